"""What a record of saved tensors is made of: one entry a tensor, and how long it is held."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import graph

from hooklab._support.nodes import node_name
from hooklab._support.torch_private import eager, saving_node

__all__ = ["Dropped", "Held", "SavedTensor"]


@dataclass(slots=True)
class SavedTensor:
    """One tensor that an operation has saved for backward."""

    module: str  # the innermost module whose forward was running; empty outside the model
    # The Node that saved it, "MulBackward0"; empty for the input of a checkpoint, and until backward before PyTorch 2.14.
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int  # of its elements, as a copy would need them
    storage: int  # the number of its storage; equal numbers share memory
    storage_bytes: int  # of the whole storage, which a slice keeps alive too
    version: int  # how often the storage had been edited in place
    owner: str  # the name of the parameter or buffer it belongs to; empty for what the forward has computed


class Held:
    """What the graph holds beside a saved tensor: the log learns from it when the tensor comes and goes."""

    def __init__(self, log: list[tuple[SavedTensor, str]], record: SavedTensor):
        self.log, self.record = log, record
        log.append((record, "saved"))

    def use(self) -> None:
        """Backward has read the tensor: before PyTorch 2.14 this is where its Node is seen first."""
        if not hasattr(graph, "node_creation_hook") and (node := saving_node()) is not None:
            self.record.operation = self.record.operation or node_name(node)

    @eager
    def __del__(self) -> None:
        self.log.append((self.record, "freed"))


class Dropped(Held):
    """The same where a checkpoint drops the tensor: it lives from the recomputation until backward has read it."""

    def __init__(self, log: list[tuple[SavedTensor, str]], record: SavedTensor, together: list[Any]):
        self.log, self.record, self.lives, self.together = log, record, False, together
        together.append(weakref.ref(self))

    def use(self) -> None:
        """Backward has read the tensor; the first that it reads has the checkpoint recompute all."""
        for reference in () if self.lives else self.together:
            if (other := reference()) is not None and not other.lives:
                other.lives = True
                self.log.append((other.record, "recomputed"))
        self.__del__()

    @eager
    def __del__(self) -> None:
        if self.lives:
            self.lives = False
            self.log.append((self.record, "freed"))
