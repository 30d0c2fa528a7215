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
