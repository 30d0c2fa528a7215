"""Move what autograd saves somewhere else until backward needs it: `Offload`."""

import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hooklab._support import packing, refuse
from hooklab._support.compiled import refuse_compiling
from hooklab._support.storages import nbytes, owned
from hooklab.saved.queue import Packed, Queue
from hooklab.stores import Disk, PinnedMemory

__all__ = ["Offload"]

MIB = 2**20


class Offload:
    """Move what autograd saves in this block somewhere else until backward needs it; gradients stay the same, bit for bit.

    `with Offload(model): loss = criterion(model(x), y)`; call `loss.backward()` inside or after the block.

    Args:
        model: its parameters and buffers are recognised, views of them too, and stay where they are.
        to: `"cpu"` (pinned memory; only tensors on a GPU are moved), `"disk"` (a temporary file), or a store of your
            own, an object with `write(tensor) -> slot` and `read(slot) -> tensor`, both 1-D (see `hooklab.stores`).
        keep: bytes of the newest saved tensors that stay. The whole storage behind a slice counts, once for all slices.
        prefetch: bytes that may be read ahead in backward, and as many that may wait to be used again.
        min_bytes: what lies in a smaller memory than this stays.

    Attributes:
        moved_bytes: written to the store so far. A tensor that is saved twice is written once.
        kept_bytes: saved but not moved so far; parameters and buffers are not counted.

    Raises:
        TypeError, ValueError: an argument is not as above; in backward, a store gives back something else.
        RuntimeError: another `Offload` of this model is open; in backward, a saved tensor was edited in place.
        OSError: the disk is full; see `hooklab.stores.Disk`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> with Offload(model, to="disk", min_bytes=0) as offload:
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> loss.backward()
        >>> offload.moved_bytes  # the input and the output of Tanh, 2 x 4 x 4 bytes each
        64

    Limits: docs/limits.md#offload. Source: [hooks for saved tensors](https://docs.pytorch.org/docs/stable/notes/autograd.html#hooks-for-saved-tensors).
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        to: Any = "cpu",
        keep: int = 0,
        prefetch: int = 256 * MIB,
        min_bytes: int = MIB,
    ):
        refuse_compiling("Offload")
        if model is not None:
            refuse.no_module("Offload", model)
        store, sizes = _store(to), {"keep": keep, "prefetch": prefetch, "min_bytes": min_bytes}
        keep, prefetch, min_bytes = (refuse.count("Offload", name, size) for name, size in sizes.items())
        self._queue = Queue(store, keep, prefetch)
        self._model = None if model is None else weakref.ref(model)
        self._own = _storages(model)  # what it owns may outlive the model, which may be a list made for this call
        self._hooks = packing.installed(*_hooks(self._queue, self._own, min_bytes))

    @property
    def moved_bytes(self) -> int:
        return self._queue.moved_bytes

    @property
    def kept_bytes(self) -> int:
        return self._queue.saved_bytes - self._queue.moved_bytes

    def __enter__(self) -> "Offload":
        refuse_compiling("Offload")
        model = self._model() if self._model else None
        opened = getattr(_opened, "models", ())
        if model is not None and any(one() is model for one in opened):
            raise RuntimeError("Offload: this model is being offloaded already; leave that block first")
        if self._queue.open:
            raise RuntimeError("Offload: this block is open already; make another Offload for each thread and block")
        self._own |= _storages(model)
        self._hooks.__enter__()
        self._queue.open, self._saves = True, self._queue.saves
        self._queue.known.clear()  # NumPy may have filled memory anew since the last block, without a new version
        _opened.models = *opened, *([self._model] if self._model else [])
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._hooks.__exit__(kind, *exc_info)
        _opened.models = tuple(one for one in getattr(_opened, "models", ()) if one is not self._model)
        self._queue.open = False
        if kind is None:
            self._queue.make_room()
            if self._model is not None and self._queue.saves == self._saves:
                packing.warn_of_nothing("Offload")

    def __reduce__(self) -> Any:
        raise TypeError("Offload: it cannot be copied or pickled, nor what holds it; make one for each block")

    def __repr__(self) -> str:
        return f"Offload(moved {self.moved_bytes:,} bytes, kept {self.kept_bytes:,})"


def _hooks(queue: Queue, own: weakref.WeakSet[Any], min_bytes: int) -> tuple[Callable, Callable]:
    """The pair of hooks. The graph keeps them, and the model may keep the graph: so they must not know the model."""
    reaches = getattr(queue.store, "reaches", lambda tensor: True)

    def pack(tensor: Tensor) -> Packed | tuple[Tensor, int]:
        queue.saves += 1
        storage = tensor.untyped_storage() if packing.has_memory(tensor) else None
        if storage in own or packing.is_parameter(tensor):
            return packing.hold(tensor)
        if storage is not None and storage.nbytes() >= min_bytes and reaches(tensor):
            return queue.pack(tensor)
        with queue.lock:
            queue.saved_bytes += nbytes(tensor)
        return packing.hold(tensor)

    return pack, _unpack


def _unpack(packed: Packed | tuple[Tensor, int]) -> Tensor:
    return packed.queue.unpack(packed) if isinstance(packed, Packed) else packing.unhold(packed)


def _storages(model: nn.Module | None) -> weakref.WeakSet[Any]:
    return weakref.WeakSet(tensor.untyped_storage() for _, tensor in owned(model))


def _store(to: Any) -> Any:
    """What `to` means; None where there is nothing to move to."""
    if to == "disk":
        return Disk()
    if to == "cpu":
        return _pinned() if torch.cuda.is_available() else None
    if isinstance(to, type):
        advice = f"make one: to={to.__name__}()"
        raise TypeError(f"Offload(to=...): expected a store, found the class {to.__name__}; {advice}")
    if missing := [name for name in ("write", "read") if not callable(getattr(to, name, None))]:
        found = f"{to!r}" if isinstance(to, str) else f"{type(to).__name__} without {' and '.join(missing)}"
        wanted = '"cpu", "disk", or a store with write(tensor) -> slot and read(slot) -> tensor'
        raise TypeError(f"Offload(to=...): expected {wanted}; found {found}")
    return to


@cache
def _pinned() -> PinnedMemory:
    """One memory for all `Offload(to="cpu")`: pinning is slow, and the next step wants as much again."""
    return PinnedMemory()


_opened = threading.local()  # its `models`: those of the blocks that are open in this thread
