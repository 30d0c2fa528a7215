"""Part 3: where offloaded tensors live. A store has two methods: `write(tensor) -> slot`, `read(slot) -> tensor`.

A slot is any object; its space is free again once nobody holds the slot. A store may also have
`prefetch(slot)`, a hint that `slot` is read soon, and `reaches(tensor)`, False for what it cannot take. A store
of your own can be this short:

    >>> class InAList:
    ...     def write(self, tensor):
    ...         return [tensor.clone()]
    ...     def read(self, slot):
    ...         return slot[0]
"""

import errno
import math
import os
import shutil
import tempfile
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hooklab import _refuse

__all__ = ["Disk", "PinnedMemory"]

MIB = 2**20
MIN_CHUNK = 32 * MIB
ALIGNMENT = 512  # bytes; every dtype may begin there, and neighbouring gaps fit together


class Slot:
    """A stretch of bytes in a row. When nobody holds it any more, the stretch is free."""

    __slots__ = ("dtype", "nbytes", "row", "start")

    def __init__(self, row: "Row", start: int, tensor: Tensor):
        self.row, self.start = row, start
        self.nbytes, self.dtype = tensor.nbytes, tensor.dtype

    def __del__(self) -> None:
        end = self.start + _aligned(self.nbytes)
        self.row.freed.append((self.start, end))  # atomic: any thread may be the one that collects


class Row:
    """Which bytes of a row are free. The smallest gap that fits is used; neighbouring gaps join."""

    def __init__(self, length: float = math.inf):
        self.gaps: list[tuple[int, float]] = [(0, length)]  # from, to; in order, never touching each other
        self.freed: deque[tuple[int, int]] = deque()  # by slots, not yet among the gaps

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` may begin, or None if the row is full."""
        self.join()
        size = _aligned(nbytes)
        fitting = [(end - start, at) for at, (start, end) in enumerate(self.gaps) if end - start >= size]
        if not fitting:
            return None
        room, at = min(fitting)
        start, end = self.gaps[at]
        self.gaps[at : at + 1] = [(start + size, end)] if room > size else []
        return start

    def join(self) -> None:
        """Make gaps of what slots have given back."""
        while self.freed:
            start, end = self.freed.popleft()
            at = bisect_left(self.gaps, (start, end))
            if at < len(self.gaps) and self.gaps[at][0] == end:
                end = self.gaps.pop(at)[1]
            if at and self.gaps[at - 1][1] == start:
                at, start = at - 1, self.gaps.pop(at - 1)[0]
            self.gaps.insert(at, (start, end))


class Disk:
    """One file without a name, in slots: no file is left behind, not even by a process that is killed.

    Args:
        folder: where the file lies; None for the system's folder for temporary files. It needs room for all
            that is written at one time.

    Raises:
        OSError: the folder does not exist or cannot be written to; later, by `write`, when the disk is full:
            the message gives the folder, the bytes wanted and the bytes free. Nothing that was written before is lost.

    One store may serve several contexts and threads. The file grows to the most that was held at one time; its
    room on disk is free again when the store and its slots are collected.

    Example:
        >>> store = Disk()
        >>> slot = store.write(torch.arange(3))
        >>> store.read(slot)
        tensor([0, 1, 2])

    Source: [open(2), O_TMPFILE](https://man7.org/linux/man-pages/man2/open.2.html).
    """

    def __init__(self, folder: str | os.PathLike | None = None):
        self.folder = os.path.abspath(folder) if folder is not None else tempfile.gettempdir()
        if os.path.isfile(self.folder):
            raise NotADirectoryError(errno.ENOTDIR, "Disk: expected a folder, found a file", self.folder)
        if not os.path.isdir(self.folder):
            raise FileNotFoundError(
                errno.ENOENT, f"Disk: expected a folder; make it first, or give another: os.makedirs({self.folder!r})",
                self.folder,
            )  # fmt: skip
        # On Linux it never has a name (O_TMPFILE), or loses it at once; Windows deletes it when the process ends.
        self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 (it lives as long as the store)
        weakref.finalize(self, self._file.close)
        self._process = os.getpid()
        self._row = Row()
        self._lock = threading.RLock()

    def reaches(self, tensor: Tensor) -> bool:
        """True for a tensor that has content: one on the meta device has none."""
        return not tensor.is_meta

    def write(self, tensor: Tensor) -> Slot:
        """Copy a tensor to the disk. Any shape, dtype and device; what is read back is flat."""
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).cpu()
        with self._lock:
            start = self._row.take(flat.nbytes)
        slot = Slot(self._row, start, flat)
        try:
            self._move(self._write_some, _bytes(flat), start)
        except OSError as error:
            del slot
            if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
                raise
            raise OSError(error.errno, self._full(flat.nbytes)) from error
        return slot

    def read(self, slot: Slot) -> Tensor:
        """The content of a slot, 1-D, in memory. As often as you like."""
        flat = torch.empty(slot.nbytes // slot.dtype.itemsize, dtype=slot.dtype, device="cpu")
        self._move(self._read_some, _bytes(flat), slot.start)
        return flat

    def prefetch(self, slot: Slot) -> None:
        """Tell the system that `slot` is read soon."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), slot.start, slot.nbytes, os.POSIX_FADV_WILLNEED)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"Disk: a store cannot be copied or pickled, its slots belong to it; make another one: Disk({self.folder!r})"
        )

    def _move(self, some: Callable, rest: memoryview, start: int) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "Disk: this store was made before the process was forked, and its file belongs to the other process; "
                "make one in each process"
            )
        while rest:  # one call moves 2 GiB at most, and less on a disk that is nearly full
            if not (done := some(rest, start)):
                raise OSError(errno.EIO, f"Disk: the file in {self.folder} has been cut short")
            rest, start = rest[done:], start + done

    def _write_some(self, content: memoryview, start: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), content, start)
        with self._lock:
            self._file.seek(start)
            return self._file.write(content)

    def _read_some(self, content: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [content], start)
        with self._lock:
            self._file.seek(start)
            return self._file.readinto(content)

    def _full(self, wanted: int) -> str:
        with self._lock:
            self._row.join()
            self._file.truncate(self._row.gaps[-1][0])  # what was written of it before the disk was full
        free = shutil.disk_usage(self._file.fileno() if hasattr(os, "fstatvfs") else self.folder).free
        return (
            f"Disk: no room in {self.folder}: {wanted:,} bytes wanted, {free:,} free; make room, or give a folder "
            "on another disk: Offload(model, to=Disk(folder))"
        )


class Cuda:
    """The few things of `torch.cuda` that moving needs; a test puts a slow, forgetful device in its place."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pinned(self, nbytes: int) -> Tensor:
        """Memory of the host that the GPU can reach by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor, device: torch.device) -> Any:
        """Begin a copy, after everything the current stream was given so far; the result is an event.

        One copy stream for both directions: what is read back waits for its own writing by itself.
        """
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def reaches(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def done(self, event: Any) -> bool:
        return event.query()

    def abandon(self, target: Tensor) -> None:
        """Nobody will read this: its memory must not be used again before the copy into it has ended."""
        target.record_stream(self._streams[target.device])

    def wait(self, event: Any, device: torch.device) -> None:
        """Let the current stream, not this thread, wait."""
        torch.cuda.current_stream(device).wait_event(event)


class PinnedMemory:
    """Pinned memory of the host, in slots: the GPU copies by itself, beside what it computes.

    Pinning is slow (about half a second per GB) and PyTorch's own cache rounds up to powers of two: large
    chunks are pinned once, cut to exact sizes and used again in the next step.

    Args:
        in_flight: bytes on their way that may still hold GPU memory; above, computing waits for the copy.
        chunk: bytes pinned at a time at most; a larger tensor gets a chunk of its own.

    Raises:
        TypeError: by `write`, for a tensor that is not on a GPU.

    `write` returns before the copy is done. What is read back lies on the GPU that the tensor came from.

    Source: [CUDA streams](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams).
    """

    def __init__(self, *, in_flight: int = 256 * MIB, chunk: int = 1024 * MIB, device: Cuda | None = None):
        self.in_flight = _refuse.count("PinnedMemory", "in_flight", in_flight)
        self.chunk = max(_refuse.count("PinnedMemory", "chunk", chunk), ALIGNMENT)
        self._device = device or Cuda()
        self._chunks: list[tuple[Row, Tensor]] = []
        self._leaving: deque[tuple[Any, Tensor]] = deque()  # (event, source): the copy still reads the source
        self._lock = threading.RLock()

    @property
    def pinned_bytes(self) -> int:
        return sum(memory.nbytes for _, memory in self._chunks)

    def reaches(self, tensor: Tensor) -> bool:
        """True for a tensor on a GPU."""
        return self._device.reaches(tensor)

    def write(self, tensor: Tensor) -> "PinnedSlot":
        """Begin to copy a tensor from the GPU. Any shape and dtype; what is read back is flat."""
        if not self.reaches(tensor):
            raise TypeError(f"PinnedMemory: expected a tensor on a GPU, found one on {tensor.device}")
        flat = tensor.detach().contiguous().view(-1)
        with self._lock:
            slot = self._room(flat)
            self._leaving.append((self._device.copy(slot.host, flat, flat.device), flat))
            self._let_go()
        return slot

    def prefetch(self, slot: "PinnedSlot") -> None:
        """Begin to copy back, so that `read` need not wait."""
        with self._lock:
            if slot.incoming is None:
                # Allocated on the stream that computes, so that freeing it later needs no further care.
                target = torch.empty_like(slot.host, device=slot.device, pin_memory=False)
                slot.incoming = target, self._device.copy(target, slot.host, slot.device)

    def read(self, slot: "PinnedSlot") -> Tensor:
        """The content, 1-D, on its GPU; the current stream, not this thread, waits until it is there."""
        with self._lock:
            self.prefetch(slot)
            (target, event), slot.incoming = slot.incoming, None
            self._device.wait(event, slot.device)
        return target

    def _room(self, flat: Tensor) -> "PinnedSlot":
        for row, memory in self._chunks:
            if (start := row.take(flat.nbytes)) is not None:
                return PinnedSlot(row, start, flat, memory, self._device.abandon)
        size = min(self.chunk, max(self.pinned_bytes, MIN_CHUNK))  # doubling: a small task pins little
        memory = self._device.pinned(max(size, _aligned(flat.nbytes)))
        self._chunks.append((Row(memory.nbytes), memory))
        return self._room(flat)

    def _let_go(self) -> None:
        """Forget the sources that are copied; above the bound, computing waits for the oldest."""
        while self._leaving and self._device.done(self._leaving[0][0]):
            self._leaving.popleft()
        while sum(source.nbytes for _, source in self._leaving) > self.in_flight:
            event, source = self._leaving.popleft()
            self._device.wait(event, source.device)


class PinnedSlot(Slot):
    """A slot with its memory, and with what a prefetch has begun to copy."""

    __slots__ = ("abandon", "device", "host", "incoming")

    def __init__(self, row: Row, start: int, flat: Tensor, memory: Tensor, abandon: Callable):
        super().__init__(row, start, flat)
        self.host = memory[start : start + flat.nbytes].view(flat.dtype)
        self.device = flat.device
        self.incoming: tuple[Tensor, Any] | None = None
        self.abandon = abandon

    def __del__(self) -> None:
        if self.incoming is not None:
            self.abandon(self.incoming[0])
        super().__del__()


def _aligned(nbytes: int) -> int:
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


def _bytes(flat: Tensor) -> memoryview:
    """The memory of a 1-D tensor on the CPU."""
    return memoryview(flat.view(torch.uint8).numpy())
