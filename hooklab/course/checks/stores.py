"""Stores: one that keeps account of how an answer uses it, and what is asked of an answer that is a store itself."""

import array
import gc
import io
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hooklab.course.reachable import within

__all__ = ["CountingStore", "content_bytes", "dtype_and_shape", "edited", "holds_memory", "reads_back", "same_bits"]


class CountingStore:
    """A store that keeps account; it holds the slots, and what it has read, by weak reference only."""

    class Slot:
        def __init__(self, tensor: Tensor):
            self.content = tensor.detach().clone()

    def __init__(self) -> None:
        self.written: list[int] = []  # the bytes of each tensor
        self.flat = True  # whether each had one dimension
        self.given: list[weakref.ref] = []  # the memories that `read` gave
        self._slots: list[weakref.ref] = []

    def write(self, tensor: Tensor) -> Slot:
        slot = self.Slot(tensor)
        self.written.append(tensor.nbytes)
        self.flat = self.flat and tensor.dim() == 1
        self._slots.append(weakref.ref(slot))
        return slot

    def read(self, slot: Slot) -> Tensor:
        content = slot.content.clone()
        self.given.append(weakref.ref(content.untyped_storage()))
        return content

    def alive(self) -> int:
        """How many slots somebody still holds."""
        gc.collect()
        return sum(slot() is not None for slot in self._slots)


def same_bits(got: Any, want: Tensor) -> bool:
    """True if `got` is a tensor with the dtype, the shape and every bit of `want`; `-0.0` is not `0.0`, a nan is itself."""
    same_kind = dtype_and_shape(got) == dtype_and_shape(want)
    return same_kind and torch.equal(*(one.detach().contiguous().flatten().view(torch.uint8) for one in (got, want)))


def edited(given: Tensor, want: Tensor) -> bool:
    """True if `write` has changed the tensor that it was given, or resized its memory; `want` is one as it was."""
    return given.untyped_storage().nbytes() != want.untyped_storage().nbytes() or not same_bits(given, want)


def reads_back(store: Any, slot: Any, want: Tensor) -> bool:
    """True if reading `slot` gives every bit of `want`, and raises nothing."""
    try:
        return same_bits(store.read(slot), want)
    except Exception:
        return False


def holds_memory(write: Callable[[Tensor], Any]) -> bool:
    """True if what `write` returned, or left elsewhere, keeps the memory of a tensor that nobody else has any more."""
    tensor = torch.ones(10)
    memory, _slot = weakref.ref(tensor.untyped_storage()), write(tensor)
    del tensor
    gc.collect()
    return memory() is not None


def dtype_and_shape(got: Any) -> str:
    """What is said of a tensor that came back as another kind: "torch.int64 [4]"; of anything else its type."""
    return f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__


def content_bytes(value: Any) -> int:
    """The bytes of everything that `value` keeps alive and that can hold content; memory that is shared counts once."""
    sizes: dict[int, int] = {}
    for part in within(value):
        holder = part.untyped_storage() if isinstance(part, Tensor) and part.layout == torch.strided else part
        sizes[id(holder)] = _size(holder)
    return sum(sizes.values())


def _size(part: Any) -> int:
    if isinstance(part, Tensor):
        return part.coalesce().indices().nbytes + part.coalesce().values().nbytes
    if isinstance(part, torch.UntypedStorage | bytes | bytearray):
        return len(part)
    if isinstance(part, array.array | io.BytesIO | str | list | tuple | set | frozenset | dict):
        return sys.getsizeof(part)  # a container's references are 8 bytes an item
    nbytes = 8 if isinstance(part, int | float) else getattr(part, "nbytes", 0)  # numpy's arrays have that
    return nbytes if isinstance(nbytes, int) else 0
