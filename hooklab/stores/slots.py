"""Slots in a row of bytes, a file or a chunk of memory: which bytes are free, and when a slot is freed."""

import math
from bisect import bisect_left, insort
from collections import deque

from torch import Tensor

from hooklab._support.torch_private import eager

__all__ = ["ALIGNMENT", "Row", "Slot", "aligned"]

ALIGNMENT = 512  # bytes; every dtype may begin there, and neighbouring gaps fit together


class Slot:
    """A stretch of bytes in a row. When nobody holds it any more, the stretch is free."""

    def __init__(self, row: "Row", start: int, tensor: Tensor):
        self.row, self.start = row, start
        self.nbytes, self.dtype = tensor.nbytes, tensor.dtype

    @eager
    def __del__(self) -> None:
        # The collector may run in any thread, also where the lock is held: this notes it without waiting.
        self.row.freed.append((self.start, self.start + aligned(self.nbytes)))


class Row:
    """Which bytes of a row are free. The smallest gap that fits is used; neighbouring gaps join."""

    def __init__(self, length: float = math.inf):
        self.ends: dict[float, float] = {}  # of the gaps: where each ends, by where it begins
        self.starts: dict[float, float] = {}  # the other way round
        self.sizes: list[tuple[float, float]] = []  # sorted, each with where it begins
        self.freed: deque[tuple[float, float]] = deque([(0, length)])  # not yet among the gaps

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` may begin, or None if the row is full."""
        self.join()
        size = aligned(nbytes)
        place = bisect_left(self.sizes, (size, 0))
        if place == len(self.sizes):
            return None
        room, start = self.sizes.pop(place)
        del self.starts[self.ends.pop(start)]
        if size < room:
            self.freed.append((start + size, start + room))
            self.join()
        return int(start)

    def join(self) -> None:
        """Make gaps of what is free again, each with the gaps beside it."""
        while self.freed:
            start, end = self.freed.popleft()
            first, last = self.starts.pop(start, start), self.ends.pop(end, end)
            for left, right in (first, start), (end, last):
                if left < right:  # was a gap
                    del self.sizes[bisect_left(self.sizes, (right - left, left))]
            self.ends[first], self.starts[last] = last, first
            insort(self.sizes, (last - first, first))


def aligned(nbytes: int) -> int:
    """Bytes that a slot of `nbytes` takes up: whole multiples of `ALIGNMENT`, at least one."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
