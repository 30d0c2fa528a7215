"""How `Offload` works: one `Packed` for each saved tensor.

The graph owns it, and the queue knows it by weak references alone: when the graph goes, everything goes.
Read `Packed` first, then `Queue`: what is saved enters by `Queue.pack` and comes back by `Queue.unpack`.
"""

import math
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hooklab._support.packing import hold, refuse_edited, version_probe
from hooklab._support.torch_private import eager

__all__ = ["Geometry", "Packed", "Place", "Queue", "Room"]


class Packed:
    """One saved tensor: it waits in memory, moves to the store, and is read back."""

    def __init__(self, queue: "Queue", number: int, tensor: Tensor, place: "Place"):
        self.queue, self.number = queue, number
        self.place: Place | None = place  # in one of the rooms; None: the content is in the store alone
        self.moved, self.slot = False, None
        self.held, self.version = hold(tensor)  # moved: an empty tensor with the same version counter
        self.again: Tensor | None = None  # what was read, while it is wanted once more
        self.uses = self.left = 0  # how often it was saved; how often it is still wanted
        self.geometry, self.needs_grad = Geometry(tensor), tensor.requires_grad
        self.storage = weakref.ref(tensor.untyped_storage())

    def move(self) -> None:
        """Write the content to the store. Only the version counter of the tensor stays."""
        flat = self.geometry.flat(self.held)
        # A store that keeps or pickles what it is given would take the whole storage behind a view.
        if flat.nbytes < flat.untyped_storage().nbytes():
            flat = flat.clone()
        self.slot = self.queue.store.write(flat)
        self.held, self.place, self.moved = version_probe(self.held), None, True

    def content(self) -> Tensor:
        """The tensor as it was saved; RuntimeError if it was edited in place since."""
        edits = 0 if self.again is None else self.again._version  # by a backward pass that was given this copy
        if (found := self.held._version + edits) != self.version:
            refuse_edited(f"{self.held.type()} {list(self.geometry.shape)}", found, self.version)
        if not self.moved:
            return self.held
        tensor = self.read() if self.again is None else self.again
        self.left -= 1
        if self.left <= 0:
            self.again = self.place = None
        return tensor

    def read(self) -> Tensor:
        """Read the content from the store; where it is wanted again, it stays if there is room."""
        tensor = self.geometry.rebuild(self.queue.store.read(self.slot)).data  # a tensor of version 0
        self.left, self.place = self.uses, None
        if self.uses > 1 and not tensor.is_inference():  # an inference tensor counts no versions
            self.place = self.queue.again.enter(tensor.untyped_storage().nbytes())
            self.again = tensor if self.place else None
        return tensor

    def read_ahead(self) -> bool:
        """Ask the store to begin reading, if there is room."""
        if self.place is None and (place := self.queue.ahead.enter(self.geometry.nbytes)):
            with suppress(OSError, RuntimeError):  # only a hint: `read` reports what is wrong
                self.queue.store.prefetch(self.slot)
                self.place = place
        return self.place is not None


class Queue:
    """Saved tensors on their way to the store, the oldest first; the newest may stay, within `keep` bytes."""

    def __init__(self, store: Any, keep: int, prefetch: int):
        self.store = store
        self.waiting = Room(math.inf if store is None else keep)  # to be moved
        self.ahead = Room(prefetch if hasattr(store, "prefetch") else 0)  # read before it is wanted
        self.again = Room(prefetch)  # read, and wanted once more
        self.known: weakref.WeakValueDictionary[tuple, Packed] = weakref.WeakValueDictionary()  # by content
        self.packed: weakref.WeakValueDictionary[int, Packed] = weakref.WeakValueDictionary()  # by number
        self.places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()  # of storages that wait
        self.count = self.oldest = 0  # all numbers before the oldest have moved
        self.reached = -1  # the number that reading ahead has come to
        self.open = False  # whether a block is open
        self.saves = self.saved_bytes = self.moved_bytes = 0
        self.lock = threading.RLock()  # backward may run in another thread

    def pack(self, tensor: Tensor) -> Packed:
        """One `Packed` for all saves of the same content; what is new enters the queue."""
        storage = tensor.untyped_storage()
        where = id(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        # `x` and `x.data` share memory but no version counter; only one of them needs a gradient.
        key = (*where, tensor._version, tensor.is_conj(), tensor.requires_grad)
        with self.lock:
            packed = self.known.get(key)
            # A new storage may have the id of a dead one.
            if packed is None or packed.storage() is not storage:
                # All the memory behind a view waits with it, and counts once, however many views share it.
                place = self.places.setdefault(id(storage), Place(self.waiting, storage.nbytes()))
                packed = Packed(self, self.count, tensor, place)
                self.known[key] = self.packed[self.count] = packed
                self.count += 1
                self.saved_bytes += packed.geometry.nbytes
                self.make_room()
            packed.uses += 1
        return packed

    @eager
    def make_room(self) -> None:
        """Beyond `keep` the oldest moves."""
        with self.lock:
            while self.waiting.used > self.waiting.nbytes and self.oldest < self.count:
                packed = self.packed.get(self.oldest)
                if packed is not None:
                    if self.may_be_filled(packed):
                        return
                    packed.move()  # if this raises, it still waits
                    self.moved_bytes += packed.geometry.nbytes
                self.oldest += 1

    def may_be_filled(self, packed: Packed) -> bool:
        """True if the operation that saved this may still write into it, as RReLU does with its noise."""
        return self.open and not packed.needs_grad and packed.number >= self.count - 2

    def unpack(self, packed: Packed) -> Tensor:
        """The saved tensor; what backward wants next is asked for early."""
        with self.lock:
            self.known.clear()  # after backward, memory may be filled anew without a new version (fused optimizers)
            tensor = packed.content()
            self.read_ahead(packed.number)
        return tensor

    def read_ahead(self, number: int) -> None:
        """Backward goes from the newest to the oldest: ask for those before `number`, while there is room."""
        last = self.packed.get(self.reached)
        # What was asked for last still waits: go on from there.
        if last is not None and last.place is not None:
            number = min(number, self.reached)
        while (older := self.packed.get(number - 1)) is not None and older.read_ahead():
            number -= 1
        self.reached = number


class Room:
    """A bound in bytes. One tensor always finds room, however large, unless the bound is 0."""

    def __init__(self, nbytes: float):
        self.nbytes, self.entered = nbytes, 0
        # The collector may run anywhere, also where a lock is held: what leaves is noted without waiting.
        self.freed: deque[int] = deque()

    @property
    def used(self) -> int:
        while self.freed:
            self.entered -= self.freed.popleft()
        return self.entered

    def enter(self, nbytes: int) -> "Place | None":
        """A place for so many bytes, or None if there is no room."""
        full = not self.nbytes or (self.used and self.used + nbytes > self.nbytes)
        return None if full else Place(self, nbytes)


class Place:
    """Bytes in a room, until nobody holds this object any more."""

    def __init__(self, room: Room, nbytes: int):
        self.room, self.nbytes = room, nbytes
        room.entered += nbytes

    @eager
    def __del__(self) -> None:
        self.room.freed.append(self.nbytes)


class Geometry:
    """How a strided tensor lies in memory: `flat` takes its content, `rebuild` lays it out again."""

    def __init__(self, tensor: Tensor):
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype, self.device, self.conj = tensor.dtype, tensor.device, tensor.is_conj()
        own = torch.Size(size if stride else 1 for size, stride in zip(self.shape, self.strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(own, self.strides, strict=True))
        # For a slice its own elements are moved; else all the memory from the first element to the last.
        self.has_gaps = span > own.numel()
        self.core = (own, self.strides) if self.has_gaps else (torch.Size([span]), (1,))
        self.nbytes = self.core[0].numel() * self.dtype.itemsize

    def flat(self, tensor: Tensor) -> Tensor:
        """The content, 1-D: a view of the same memory, or for a slice a copy of its own elements."""
        physical = tensor.conj() if self.conj else tensor  # the bits as they lie in memory
        return physical.as_strided(*self.core).flatten().contiguous()

    def rebuild(self, flat: Tensor) -> Tensor:
        """A tensor with the content of `flat`, laid out as the first one was."""
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
