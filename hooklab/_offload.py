"""How `Offload` works. One `Packed` for each saved tensor holds all its state; the graph owns it, nobody else does."""

import threading
import weakref
from collections import deque
from itertools import count
from typing import Any

from torch import Tensor

from hooklab._geometry import Geometry
from hooklab._packing import hold, refuse_edited, version_probe

__all__ = ["Packed", "Queue"]


class Room:
    """So many bytes may lie ready at a time; one tensor always may, however large."""

    def __init__(self, nbytes: int):
        self.nbytes, self.used = nbytes, 0
        self.inside: set[int] = set()  # their numbers

    def enter(self, packed: "Packed") -> bool:
        """True if it is inside, also from before."""
        if packed.number in self.inside:
            return True
        if self.inside and self.used + packed.nbytes > self.nbytes:
            return False
        self.inside.add(packed.number)
        self.used += packed.nbytes
        return True

    def leave(self, number: int, nbytes: int) -> None:
        if number in self.inside:
            self.inside.remove(number)
            self.used -= nbytes


class Packed:
    """One saved tensor, and what is needed to give it back. It goes when the graph goes."""

    tensor: Tensor | None = None

    def __init__(self, queue: "Queue", tensor: Tensor):
        self.queue, self.number = queue, next(queue.numbers)
        self.geometry = Geometry(tensor)
        self.nbytes = self.geometry.nbytes
        self.storage = weakref.ref(tensor.untyped_storage())
        self.tensor, self.version = hold(tensor)  # until it moves
        self.counter = self.tensor  # shows the version, also after that
        # Without a gradient it may be filled only after it is saved, as the noise of RReLU is.
        self.unfilled = not tensor.requires_grad
        self.slot: Any = None
        self.uses = self.left = 0  # how often it was saved; how often it is still wanted
        self.restored: Tensor | None = None  # read, and wanted once more

    def move(self) -> None:
        """Write the content to the store. Of the tensor only the version counter stays."""
        self.slot = self.queue.store.write(self.geometry.flat(self.tensor))
        self.counter, self.tensor = version_probe(self.tensor), None

    def content(self) -> Tensor:
        """The tensor as it was. Saved twice, it is read once, if there is room to keep it so long."""
        if self.counter._version != self.version:
            refuse_edited(f"{self.geometry}", self.counter._version, self.version)
        if self.tensor is not None:
            return self.tensor
        if self.restored is None:
            self.restored = self.geometry.rebuild(self.queue.store.read(self.slot))
            self.left, self.fresh = self.uses, self.restored._version
            self.queue.ahead.leave(self.number, self.nbytes)
        if edits := self.restored._version - self.fresh:  # by a backward that was given it
            refuse_edited(f"{self.geometry}", self.version + edits, self.version)
        tensor, self.left = self.restored, self.left - 1
        if self.left <= 0 or not self.queue.again.enter(self):
            self.restored = None
            self.queue.again.leave(self.number, self.nbytes)
        return tensor

    def read_ahead(self) -> bool:
        """Begin to read; False if there is no room."""
        if self.slot is None or self.number in self.queue.ahead.inside:
            return True
        if not self.queue.ahead.enter(self):
            return False
        try:
            self.queue.store.prefetch(self.slot)
        except (OSError, RuntimeError):  # it was a hint; what is really wrong, `read` will say
            self.queue.ahead.leave(self.number, self.nbytes)
            return False
        return True

    def __del__(self) -> None:
        # Never wait here: the collector may run this in a thread that holds the lock of a store.
        self.queue.gone.append((self.number, self.nbytes, self.tensor is not None))
        if self.queue.lock.acquire(blocking=False):
            try:
                self.queue.settle()
            finally:
                self.queue.lock.release()


class Queue:
    """Saved tensors on their way to the store, the oldest first; the newest may stay, within `keep` bytes."""

    def __init__(self, store: Any, keep: float, prefetch: int):
        self.store, self.keep = store, keep
        self.reads_ahead = prefetch > 0 and hasattr(store, "prefetch")
        self.ahead = Room(prefetch)  # read before it is wanted
        self.again = Room(prefetch)  # read, and wanted a second time
        self.waiting: deque[weakref.ref[Packed]] = deque()
        # By place and version.
        self.found: weakref.WeakValueDictionary[tuple, Packed] = weakref.WeakValueDictionary()
        self.waiting_bytes = self.moved_bytes = self.kept_bytes = 0
        self.newest: weakref.ref[Packed] | None = None
        self.reached: weakref.ref[Packed] | None = None  # how far reading ahead has come
        self.numbers = count()
        self.lock = threading.RLock()  # backward may run in other threads
        self.gone: deque[tuple[int, int, bool]] = deque()  # of what was collected: number, bytes, did it wait

    def pack(self, tensor: Tensor) -> Packed:
        storage = tensor.untyped_storage()
        place = id(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = (*place, tensor._version, tensor.is_conj())
        with self.lock:
            self.settle()
            packed = self.found.get(key)
            # A new storage may have the id of a dead one.
            if packed is None or packed.storage() is not storage:
                self.found[key] = packed = Packed(self, tensor)
                self.append(packed)
                self.make_room()
            packed.uses += 1
        return packed

    def append(self, packed: Packed) -> None:
        packed.older, self.newest = self.newest, weakref.ref(packed)
        self.waiting.append(self.newest)
        self.waiting_bytes += packed.nbytes
        self.kept_bytes += packed.nbytes

    def settle(self) -> None:
        """Take what was collected off the books."""
        while self.gone:
            number, nbytes, waited = self.gone.popleft()
            self.ahead.leave(number, nbytes)
            self.again.leave(number, nbytes)
            self.waiting_bytes -= nbytes * waited

    def make_room(self, young: int = 2) -> None:
        """Move the oldest. Among the `young` newest, one that may be unfilled stays: its operation may still run."""
        while self.waiting and (self.waiting_bytes > self.keep or self.waiting[0]() is None):
            if (packed := self.waiting[0]()) is not None:
                if packed.unfilled and len(self.waiting) <= young:
                    return
                packed.move()  # if this raises, it still waits
                self.waiting_bytes -= packed.nbytes
                self.kept_bytes -= packed.nbytes
                self.moved_bytes += packed.nbytes
            self.waiting.popleft()

    def finish(self) -> None:
        """No operation is running any more."""
        with self.lock:
            self.settle()
            self.make_room(young=0)

    def unpack(self, packed: Packed) -> Tensor:
        with self.lock:
            self.settle()
            expected = packed.slot is None or packed.number in self.ahead.inside
            tensor = packed.content()
            if self.reads_ahead:
                self.read_ahead(packed, expected)
        return tensor

    def read_ahead(self, packed: Packed, expected: bool) -> None:
        """Backward goes from the newest to the oldest: go on where the last hint ended, while there is room."""
        last = self.reached() if expected and self.reached is not None else None
        if last is None or last.number > packed.number:
            last = packed
        while last.older is not None and (older := last.older()) is not None and older.read_ahead():
            last = older
        self.reached = weakref.ref(last)
