"""How `Offload` works. One `Packed` for each saved tensor holds all its state; the graph owns it, nobody else does."""

import math
import threading
import weakref
from collections import defaultdict, deque
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hooklab._support.compiler import eager
from hooklab._support.packing import hold, refuse_edited, version_probe
from hooklab.stores import Disk, PinnedMemory

__all__ = ["Geometry", "Packed", "Queue"]


class Geometry:
    """Shape, strides, dtype and device of a strided tensor; `flat` takes its content, `rebuild` puts it back.

    Attributes:
        has_gaps: True for a slice: between its elements lie others that are not its own.
        core: shape and strides of what has to be moved: of a slice its own elements, without what expand repeats; else
            all the memory from the first to the last, in one row.
        nbytes: of the core.
    """

    def __init__(self, tensor: Tensor):
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype, self.device, self.conj = tensor.dtype, tensor.device, tensor.is_conj()
        own = torch.Size(size if stride else 1 for size, stride in zip(self.shape, self.strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(own, self.strides, strict=True))
        self.has_gaps = span > own.numel()
        self.core = (own, self.strides) if self.has_gaps else (torch.Size([span]), (1,))
        self.nbytes = self.core[0].numel() * self.dtype.itemsize

    def flat(self, tensor: Tensor) -> Tensor:
        """The content as a 1-D tensor: a view of the same memory, or for a slice a copy of its own elements."""
        physical = tensor.conj() if self.conj else tensor  # the bits as they lie in memory
        return physical.as_strided(*self.core).flatten().contiguous()

    def rebuild(self, flat: Tensor) -> Tensor:
        """A tensor with the content of `flat`, laid out as the first one was; TypeError if it cannot be that."""
        if not isinstance(flat, Tensor) or flat.dtype != self.dtype or flat.numel() != self.core[0].numel():
            given = f"{self.dtype} [{self.core[0].numel()}]"
            found = f"{flat.dtype} {list(flat.shape)}" if isinstance(flat, Tensor) else type(flat).__name__
            advice = "read(slot) should return what write(tensor) was given, bit for bit"
            raise TypeError(f"the store was given {given} and gave back {found}; {advice}")
        memory = flat.contiguous().to(self.device)
        if self.has_gaps:
            memory = memory.new_empty_strided(*self.core).copy_(memory.view(self.core[0]))
        tensor = memory.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conj else tensor


class Room:
    """So many bytes may be in it at a time; one tensor always may, however large, but in a room for none."""

    def __init__(self, nbytes: float):
        self.nbytes, self.entered = nbytes, 0
        # Never wait to note how many bytes go: the collector may do it in a thread that holds the lock of a store.
        self.left: deque[int] = deque()

    @property
    def used(self) -> int:
        while self.left:
            self.entered -= self.left.popleft()
        return self.entered

    def enter(self, nbytes: int) -> "Stay | None":
        """None if there is no room."""
        full = not self.nbytes or (self.used and self.used + nbytes > self.nbytes)
        return None if full else Stay(self, nbytes)


class Stay:
    """Bytes in a room. They leave it when nobody holds this any more."""

    def __init__(self, room: Room, nbytes: int, memory: Any = None):
        self.room, self.nbytes, self.memory = room, nbytes, memory
        room.entered += nbytes

    @eager
    def __del__(self) -> None:
        self.room.left.append(self.nbytes)


class Packed:
    """One saved tensor, and what is needed to give it back. It goes when the graph goes."""

    tensor: Tensor | None = None  # what was read, while it is wanted once more

    def __init__(self, queue: "Queue", tensor: Tensor, stay: Stay):
        self.queue, self.number = queue, queue.count
        self.stay: Stay | None = stay  # None: in the store, and nowhere else
        self.geometry = Geometry(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())
        # The tensor itself; when it has moved, its version counter alone.
        self.held, self.version = hold(tensor)
        self.uses = 0  # how often it was saved

    def move(self) -> None:
        """Write the content to the store. Of the tensor only the version counter stays."""
        flat, store = self.geometry.flat(self.held), self.queue.store
        # Ours copy at once. Another one may keep or pickle what it is given, and all the memory behind a view with it.
        if not isinstance(store, Disk | PinnedMemory) and flat.nbytes < flat.untyped_storage().nbytes():
            flat = flat.clone()
        self.slot = store.write(flat)
        self.held, self.stay = version_probe(self.held), None

    def content(self) -> Tensor:
        """The tensor as it was. Saved twice, it is read once, if there is room to keep it so long."""
        edits = 0 if self.tensor is None else self.tensor._version  # by a backward that was given it
        if (found := self.held._version + edits) != self.version:
            refuse_edited(f"{self.held.type()} {list(self.geometry.shape)}", found, self.version)
        if self.held.numel():  # it has not moved
            return self.held
        if (tensor := self.tensor) is None:
            tensor = self.geometry.rebuild(self.queue.store.read(self.slot)).data  # whose version is 0
            self.left = self.uses
            again = self.uses > 1 and not tensor.is_inference()  # of which nobody would notice edits
            self.stay = self.queue.again.enter(tensor.untyped_storage().nbytes()) if again else None
        self.left -= 1  # so often it is still wanted
        if self.left <= 0:
            self.stay = None
        self.tensor = tensor if self.stay else None
        return tensor

    def read_ahead(self) -> bool:
        """Begin to read; False if there is no room."""
        if self.stay is None and (stay := self.queue.ahead.enter(self.geometry.nbytes)):
            with suppress(OSError, RuntimeError):  # it was a hint; what is really wrong, `read` will say
                self.queue.store.prefetch(self.slot)
                self.stay = stay
        return self.stay is not None


class Queue:
    """Saved tensors on their way to the store, the oldest first; the newest may stay, within `keep` bytes."""

    def __init__(self, store: Any, keep: int, prefetch: int):
        self.store = store
        self.waiting = Room(math.inf if store is None else keep)  # to be moved; beyond `keep` the oldest is
        self.ahead = Room(prefetch if hasattr(store, "prefetch") else 0)  # read before it is wanted
        self.again = Room(prefetch)  # read, and wanted a second time
        # By place and version, and by number.
        self.found: weakref.WeakValueDictionary[tuple, Packed] = weakref.WeakValueDictionary()
        self.packed: weakref.WeakValueDictionary[int, Packed] = weakref.WeakValueDictionary()
        self.memories: weakref.WeakValueDictionary[int, Stay] = weakref.WeakValueDictionary()  # that wait
        # Of each thread in a block its two newest: the operation that saved them may still run, and fill one that needs
        # no gradient, as RReLU does its noise. None for those that need one.
        self.newest: defaultdict[int, deque[int | None]] = defaultdict(lambda: deque(maxlen=2))
        self.blocks = 0  # that are open
        self.count = self.oldest = 0  # the numbers before the oldest have moved
        self.reached = -1  # how far reading ahead has come
        self.saved_bytes = self.moved_bytes = 0
        self.lock = threading.RLock()  # backward may run in other threads

    def pack(self, tensor: Tensor) -> Packed:
        storage = tensor.untyped_storage()
        place = id(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        # `x` and `x.data` count versions apart. Negative views never come here.
        key = (*place, tensor._version, tensor.is_conj(), tensor.requires_grad)
        with self.lock:
            # A new storage may have the id of a dead one.
            if (packed := self.found.get(key)) is None or packed.storage() is not storage:
                # Its whole memory waits with it, and counts once, however many share it.
                stay = self.memories.setdefault(id(storage), Stay(self.waiting, storage.nbytes(), storage))
                self.found[key] = self.packed[self.count] = packed = Packed(self, tensor, stay)
                self.newest[threading.get_ident()].append(None if tensor.requires_grad else self.count)
                self.count += 1
                self.saved_bytes += packed.geometry.nbytes
                self.make_room()
            packed.uses += 1
        return packed

    @eager
    def make_room(self) -> None:
        """Beyond `keep` the oldest moves, but none that may still be filled."""
        with self.lock, torch._C._DisableFuncTorch():  # a block may end inside jvp
            while self.waiting.used > self.waiting.nbytes and self.oldest < self.count:
                if (packed := self.packed.get(self.oldest)) is not None:
                    if any(self.oldest in numbers for numbers in self.newest.values()):
                        return
                    packed.move()  # if this raises, it still waits
                    self.moved_bytes += packed.geometry.nbytes
                self.oldest += 1

    def enter(self) -> None:
        """A block begins. What an older one has saved may have been filled anew since then, as by NumPy, unnoticed."""
        with self.lock:
            self.found.clear()
            self.blocks += 1

    def leave(self) -> None:
        """A block ends: no operation of this thread is running any more."""
        with self.lock:
            self.blocks -= 1
            self.newest.pop(threading.get_ident(), None)
            if not self.blocks:
                self.newest.clear()  # of the threads that backward runs in

    def unpack(self, packed: Packed) -> Tensor:
        with self.lock:
            self.found.clear()  # after a backward a memory may be filled anew, unnoticed, as fused optimizers do
            tensor = packed.content()
            if self.ahead.nbytes:
                self.read_ahead(packed.number)
        return tensor

    def read_ahead(self, number: int) -> None:
        """Backward goes from the newest to the oldest: go on where the last hint ended, while there is room."""
        # Where what was read ahead last still waits to be used.
        if (last := self.packed.get(self.reached)) is not None and last.stay is not None:
            number = min(number, self.reached)
        while (older := self.packed.get(number - 1)) is not None and older.read_ahead():
            number -= 1
        self.reached = number
