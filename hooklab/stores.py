"""Part 3: where offloaded tensors live. A store has two methods: `write(tensor) -> slot`, `read(slot) -> tensor`.

A slot is any object; its space is free again once nobody holds the slot. Autograd may still use what `write` is
given: copy it, as `clone` does. A backward may edit what `read` returns: copy that too, where it may be read again.
A store may also have `prefetch(slot)`, a hint that `slot` is read soon, and `reaches(tensor)`, False for what it
cannot take. A store of your own can be this short:

    >>> class InAList:
    ...     def write(self, tensor):
    ...         return [tensor.clone()]
    ...     def read(self, slot):
    ...         return slot[0].clone()
"""

import errno
import math
import os
import shutil
import tempfile
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hooklab._support import refuse
from hooklab._support.torch_private import eager

__all__ = ["Disk", "PinnedMemory"]

MIB = 2**20
MIN_CHUNK = 32 * MIB
ALIGNMENT = 512  # bytes; every dtype may begin there, and neighbouring gaps fit together


class Disk:
    """One file without a name, in slots. No file stays behind, not even after a process that is killed.

    One store may serve several contexts. Its room on disk is free again when the store and its slots are collected.

    Args:
        folder: where the file lies; None for the system's folder for temporary files.

    Raises:
        OSError: the folder does not exist or cannot be written to. Later, from `write`: the disk is full; nothing
            that was written before is lost.
        RuntimeError: from `write` and `read`, in a process that was forked since.
        TypeError: the store is copied or pickled.

    Example:
        >>> store = Disk()
        >>> slot = store.write(torch.arange(3))
        >>> store.read(slot)
        tensor([0, 1, 2])

    Limits: docs/limits.md#stores. Source: [open(2), O_TMPFILE](https://man7.org/linux/man-pages/man2/open.2.html).
    """

    def __init__(self, folder: str | os.PathLike | None = None):
        self.folder = os.path.abspath(folder) if folder is not None else tempfile.gettempdir()
        if os.path.isfile(self.folder):
            raise OSError(errno.ENOTDIR, "Disk: expected a folder, found a file", self.folder)
        if not os.path.isdir(self.folder):
            advice = f"make it first, or give another: os.makedirs({self.folder!r})"
            raise OSError(errno.ENOENT, f"Disk: expected a folder; {advice}", self.folder)
        # The file has no name on Linux and macOS; Windows deletes it when the process ends.
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            what = f"Disk: no file can be made in this folder ({error.strerror})"
            advice = "give one that you may write to, and let one Disk serve many blocks"
            raise OSError(error.errno, f"{what}; {advice}", self.folder) from error
        self._process = os.getpid()
        weakref.finalize(self, self._file.close)
        self._row = Row()
        self._lock = threading.RLock()

    def reaches(self, tensor: Tensor) -> bool:
        """True for a tensor that has content (one on the meta device has none), in the process of this store."""
        return not tensor.is_meta and os.getpid() == self._process

    def write(self, tensor: Tensor) -> "Slot":
        """Copy a tensor to the disk. Any shape, strides, dtype and device; what is read back is flat."""
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).cpu()
        with self._lock:
            slot = Slot(self._row, self._row.take(flat.nbytes) or 0, flat)  # the row of a file has no end
        try:
            self._move(flat, slot.start, reads=False)
        except OSError as error:
            del slot
            if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
                raise
            raise OSError(error.errno, self._full(flat.nbytes)) from error
        return slot

    def read(self, slot: "Slot") -> Tensor:
        """The content of a slot, 1-D, in memory. As often as you like."""
        flat = torch.empty(slot.nbytes // slot.dtype.itemsize, dtype=slot.dtype, device="cpu")
        self._move(flat, slot.start, reads=True)
        return flat

    def prefetch(self, slot: "Slot") -> None:
        """Tell the system that `slot` is read soon."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), slot.start, slot.nbytes, os.POSIX_FADV_WILLNEED)

    def __reduce__(self) -> Any:
        advice = f"make another one: Disk({self.folder!r})"
        raise TypeError(f"Disk: a store cannot be copied or pickled, its slots belong to it; {advice}")

    def _move(self, flat: Tensor, at: int, reads: bool) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("Disk: it was made before the process was forked; make one in each process")
        rest, file = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data, self._file
        while rest:  # one call moves 2 GiB at most, and less on a disk that is nearly full
            if hasattr(os, "preadv" if reads else "pwrite"):
                done = os.preadv(file.fileno(), [rest], at) if reads else os.pwrite(file.fileno(), rest, at)
            else:
                with self._lock:  # the file has one position
                    file.seek(at)
                    done = file.readinto(rest) if reads else file.write(rest)
            if not done:
                raise OSError(errno.EIO, f"Disk: the file in {self.folder} has been cut short")
            rest, at = rest[done:], at + done

    def _full(self, wanted: int) -> str:
        with self._lock:
            self._row.join()
            self._file.truncate(int(self._row.gaps[-1][0]))  # what was written of it before the disk was full
        free = shutil.disk_usage(self.folder).free
        advice = "make room, or give a folder on another disk: Offload(model, to=hooklab.stores.Disk(folder))"
        return f"Disk: no room in {self.folder}: {wanted:,} bytes wanted, {free:,} free; {advice}"


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
        one = self.in_flight > 0  # however large: it leaves while the next is computed
        while len(self._leaving) > one and sum(source.nbytes for _, source in self._leaving) > self.in_flight:
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


class Slot:
    """A stretch of bytes in a row. When nobody holds it any more, the stretch is free."""

    def __init__(self, row: "Row", start: int, tensor: Tensor):
        self.row, self.start = row, start
        self.nbytes, self.dtype = tensor.nbytes, tensor.dtype

    @eager
    def __del__(self) -> None:
        # The collector may run in any thread, also where the lock is held: this notes it without waiting.
        self.row.freed.append((self.start, self.start + aligned(self.nbytes)))


class PinnedSlot(Slot):
    """A slot with its memory, and with what a prefetch has begun to copy."""

    incoming: tuple[Tensor, Any] | None = None

    def __init__(self, cuda: Any, row: "Row", start: int, flat: Tensor, memory: Tensor):
        super().__init__(row, start, flat)
        self.cuda, self.device = cuda, flat.device
        self.host = memory[start : start + flat.nbytes].view(flat.dtype)

    @eager
    def __del__(self) -> None:
        if self.incoming is not None:
            self.cuda.abandon(self.incoming[0])
        super().__del__()


class Row:
    """Which bytes of a file, or of a chunk of memory, are free. The smallest gap that fits is used; neighbours join."""

    def __init__(self, length: float = math.inf):
        self.gaps: list[tuple[float, float]] = [(0, length)]  # in order: where each begins and ends
        self.freed: deque[tuple[float, float]] = deque()  # not yet among the gaps

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` may begin, or None if the row is full."""
        self.join()
        size = aligned(nbytes)
        fitting = [(end - start, start, end) for start, end in self.gaps if end - start >= size]
        if not fitting:
            return None
        room, start, end = min(fitting)
        self.gaps.remove((start, end))
        if room > size:
            insort(self.gaps, (start + size, end))
        return int(start)

    def join(self) -> None:
        """Make gaps of what is free again, each with the gaps beside it."""
        while self.freed:
            start, end = self.freed.popleft()
            place = bisect_left(self.gaps, (start, end))
            if self.gaps[place : place + 1] and self.gaps[place][0] == end:
                end = self.gaps.pop(place)[1]
            if place and self.gaps[place - 1][1] == start:
                start = self.gaps.pop(place - 1)[0]
            insort(self.gaps, (start, end))


def aligned(nbytes: int) -> int:
    """Bytes that a slot of `nbytes` takes up: whole multiples of `ALIGNMENT`, at least one."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
