"""A store in pinned memory of the host, which a GPU reads and writes by itself."""

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hooklab._support import refuse
from hooklab._support.torch_private import eager
from hooklab.stores.slots import Row, Slot, aligned

__all__ = ["PinnedMemory"]

MIB = 2**20
MIN_CHUNK = 32 * MIB


class PinnedMemory:
    """Pinned memory of the host, in slots: the GPU copies by itself, beside what it computes.

    Pinning is slow (about half a second per GB), so large chunks are pinned once and used again in the next step.
    `write` returns before the copy is done. What is read back lies on the GPU that the tensor came from.

    Args:
        in_flight: bytes that may still hold GPU memory while they are copied, and at least one tensor; above,
            computing waits for the copy. 0: computing waits for each.
        chunk: bytes pinned at a time at most; a larger tensor gets a chunk of its own.

    Raises:
        TypeError, ValueError: an argument is no whole number from 0 on; from `write`, the tensor is not on a GPU.

    Limits: docs/limits.md#stores. Source: [CUDA streams](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams).
    """

    def __init__(self, *, in_flight: int = 256 * MIB, chunk: int = 1024 * MIB):
        self.in_flight = refuse.count("PinnedMemory", "in_flight", in_flight)
        self.chunk = refuse.count("PinnedMemory", "chunk", chunk)
        self.cuda: Any = Cuda()
        # Each device has its own: what one frees, another might fill while the copy of the first still reads it.
        self._chunks: list[tuple[torch.device, Row, Tensor]] = []
        self._leaving: deque[tuple[Any, Tensor]] = deque()  # (event, source): the copy still reads the source
        self._lock = threading.RLock()

    @property
    def pinned_bytes(self) -> int:
        return sum(memory.nbytes for *_, memory in self._chunks)

    def reaches(self, tensor: Tensor) -> bool:
        """True for a tensor on a GPU."""
        return tensor.is_cuda

    def write(self, tensor: Tensor) -> "PinnedSlot":
        """Begin to copy a tensor from the GPU. Any shape and dtype; what is read back is flat."""
        if not self.reaches(tensor):
            raise TypeError(f"PinnedMemory: expected a tensor on a GPU, found one on {tensor.device}")
        flat = tensor.detach().contiguous().view(-1)
        with self._lock:
            slot = self._room(flat)
            self._leaving.append((self.cuda.copy(slot.host, flat, flat.device), flat))
            self._free_sources()
        return slot

    def prefetch(self, slot: "PinnedSlot") -> None:
        """Begin to copy back, so that `read` need not wait."""
        with self._lock:
            if slot.incoming is None:
                # Allocated on the stream that computes, so that freeing it later needs no further care.
                target = torch.empty_like(slot.host, device=slot.device, pin_memory=False)
                slot.incoming = target, self.cuda.copy(target, slot.host, slot.device)

    def read(self, slot: "PinnedSlot") -> Tensor:
        """The content, 1-D, on its GPU; the current stream, not this thread, waits until it is there."""
        with self._lock:
            self.prefetch(slot)
            assert slot.incoming is not None
            (target, event), slot.incoming = slot.incoming, None
            self.cuda.wait(event, slot.device)
            self._free_sources()  # in backward nothing is written
        return target

    def _room(self, flat: Tensor) -> "PinnedSlot":
        for device, row, memory in self._chunks:
            if device == flat.device and (start := row.take(flat.nbytes)) is not None:
                return PinnedSlot(self.cuda, row, start, flat, memory)
        size = min(self.chunk, max(self.pinned_bytes, MIN_CHUNK))  # doubling: a small task pins little
        memory = self.cuda.pinned(max(size, aligned(flat.nbytes)))
        self._chunks.append((flat.device, Row(memory.nbytes), memory))
        return self._room(flat)

    def _free_sources(self) -> None:
        """Free the sources that are copied; above the bound, computing waits for the oldest."""
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        allowed = min(self.in_flight, 1)  # one tensor, however large, is copied while the next is computed
        while len(self._leaving) > allowed and sum(source.nbytes for _, source in self._leaving) > self.in_flight:
            event, source = self._leaving.popleft()
            self.cuda.wait(event, source.device)


class Cuda:
    """The few things of `torch.cuda` that moving needs. A test puts a slow, forgetful device in its place."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def pinned(self, nbytes: int) -> Tensor:
        """Memory of the host that the GPU can reach by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor, device: torch.device) -> Any:
        """Begin a copy, after everything the current stream was given so far; the result is an event."""
        # One stream serves both directions: what is read back waits for its own writing by itself.
        stream = self.streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any, device: torch.device) -> None:
        """Let the current stream, not this thread, wait."""
        torch.cuda.current_stream(device).wait_event(event)

    def abandon(self, target: Tensor) -> None:
        """Nobody will read this: its memory must not be used again before the copy into it has ended."""
        target.record_stream(self.streams[target.device])


class PinnedSlot(Slot):
    """A slot with its memory, and with what a prefetch has begun to copy."""

    incoming: tuple[Tensor, Any] | None = None

    def __init__(self, cuda: Any, row: Row, start: int, flat: Tensor, memory: Tensor):
        super().__init__(row, start, flat)
        self.cuda, self.device = cuda, flat.device
        self.host = memory[start : start + flat.nbytes].view(flat.dtype)

    @eager
    def __del__(self) -> None:
        if self.incoming is not None:
            self.cuda.abandon(self.incoming[0])
        super().__del__()
