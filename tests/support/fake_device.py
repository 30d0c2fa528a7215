"""A device for `PinnedMemory` without a GPU: copies happen late, and memory that is freed too early is noticed."""

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooklab.stores import PinnedMemory


class SlowDevice:
    """Copies wait in one queue, as on one copy stream, until somebody waits for them or `step` is called.

    It keeps no tensor alive: if the source or the target of a copy that has not happened yet is gone, the real
    device would read or write memory that belongs to somebody else by then. Those are counted in `hazards`.
    """

    def __init__(self) -> None:
        self.pending: deque[tuple[int, Any, Any]] = deque()
        self.given = self.happened = self.copies = self.hazards = 0
        self.waits: list[int] = []
        self.chunks: list[int] = []  # bytes pinned at a time

    def pinned(self, nbytes: int) -> Tensor:
        self.chunks.append(nbytes)
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, device: torch.device) -> "Event":
        self.given += 1
        # The host's side of a copy is a stretch of the slab: always there. Only the device's side may go.
        self.pending.append((self.given, _weak(target), _weak(source)))
        return Event(self, self.given)

    def wait(self, event: "Event", device: torch.device) -> None:
        self.waits.append(event.number)
        while self.pending and self.pending[0][0] <= event.number:
            self.step()

    def abandon(self, target: Tensor) -> None:
        while self.pending:
            self.step()

    def step(self) -> None:
        """Let the oldest copy happen."""
        event, target, source = self.pending.popleft()
        if target() is None or source() is None:
            self.hazards += 1
        else:
            _tensor(target()).copy_(_tensor(source()))
            self.copies += 1
        self.happened = event


class Event(NamedTuple):
    device: SlowDevice
    number: int

    def query(self) -> bool:
        return self.number <= self.device.happened


class SlowMemory(PinnedMemory):
    """`PinnedMemory` on such a device."""

    def __init__(self, device: SlowDevice, **options: int) -> None:
        super().__init__(**options)
        self.cuda = device

    def reaches(self, tensor: Tensor) -> bool:
        return True


def _weak(tensor: Tensor) -> Any:
    # Of the storage: the tensor object may go while its memory stays.
    place = tensor.dtype, tensor.storage_offset(), tensor.shape
    reference = weakref.ref(tensor.untyped_storage())
    return lambda: None if reference() is None else (reference(), *place)


def _tensor(parts: tuple) -> Tensor:
    storage, dtype, offset, shape = parts
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape)
