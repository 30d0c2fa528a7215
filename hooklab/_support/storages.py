"""The storages that tensors lie in: how many bytes, and which parameter or buffer owns them."""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hooklab._support import packing

__all__ = ["Storages", "nbytes", "owned"]

SPARSE = {  # the parts of such a tensor
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


class Storages:
    """The number and the owner of each storage."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # Both forget a storage that has been freed: another may lie in its place.
        self._known: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
        self._owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def name_owners(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """From now on these are the parameters and buffers."""
        self._owners = weakref.WeakKeyDictionary(
            (tensor.untyped_storage(), name) for name, tensor in named if packing.has_memory(tensor)
        )

    def of(self, tensor: Tensor) -> tuple[int, int, int, str]:
        """Number, bytes, version and owner of the storage behind the tensor."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a sparse tensor has none: each save of it counts
            return next(self._numbers), nbytes(tensor), tensor._version, ""
        if (found := self._known.get(storage)) is None:
            owner = self._owners.get(storage, "parameter" if packing.is_parameter(tensor) else "")
            found = self._known.setdefault(storage, (next(self._numbers), owner))
        return found[0], storage.nbytes(), tensor._version, found[1]


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements; of a sparse tensor, of its indices and values."""
    parts = [getattr(tensor, part)() for part in SPARSE.get(tensor.layout, ())] or [tensor]
    return sum(part.numel() * part.itemsize for part in parts)


def owned(model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that have memory, by name."""
    named = () if model is None else (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in named if packing.has_memory(tensor)]
