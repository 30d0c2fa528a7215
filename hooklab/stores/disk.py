"""A store on disk: one file without a name."""

import errno
import math
import os
import shutil
import tempfile
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from hooklab.stores.slots import Row, Slot

__all__ = ["Disk"]


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

    def write(self, tensor: Tensor) -> Slot:
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

    def read(self, slot: Slot) -> Tensor:
        """The content of a slot, 1-D, in memory. As often as you like."""
        flat = torch.empty(slot.nbytes // slot.dtype.itemsize, dtype=slot.dtype, device="cpu")
        self._move(flat, slot.start, reads=True)
        return flat

    def prefetch(self, slot: Slot) -> None:
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
            self._file.truncate(int(self._row.starts[math.inf]))  # what was written of it before the disk was full
        free = shutil.disk_usage(self.folder).free
        advice = "make room, or give a folder on another disk: Offload(model, to=hooklab.stores.Disk(folder))"
        return f"Disk: no room in {self.folder}: {wanted:,} bytes wanted, {free:,} free; {advice}"
