"""A histogram that grows call by call, with its history."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["MAX_ROWS", "Histogram"]

EXACT = 16_777_216  # whole numbers that float32 can count
MAX_ROWS = 512  # of the history: after that two rows become one


class Histogram:
    """How many entries fell into each bin, below and above: of all calls, and of each.

    Args:
        bins: how many.
        range: what they cover, as `torch.histc` counts.
    """

    def __init__(self, bins: int, range: tuple[float, float]):
        self.bins, self.range = bins, range
        self.rows: list[Tensor] = []  # of the history: what fell below, each bin, what fell above
        self.calls_per_row, self.row_calls = 1, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "rows": list(self.rows)}

    def add(self, tensor: Tensor) -> None:
        flat = tensor.flatten()
        flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
        low, high = self.range
        # torch.histc counts in float32, which stops at 2 ** 24.
        with _counting():
            parts = [torch.histc(part, self.bins, low, high) for part in flat.split(EXACT)]
        inside = sum(part.to(torch.int64) for part in parts)
        row = torch.cat([(flat < low).sum()[None], inside, (flat > high).sum()[None]])
        if self.row_calls:
            self.rows[-1] = self.rows[-1] + row.to(self.rows[-1].device)
        else:
            self.rows.append(row)
        self.row_calls = (self.row_calls + 1) % self.calls_per_row
        if len(self.rows) == MAX_ROWS and not self.row_calls:
            pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
            self.rows = [first + second.to(first.device) for first, second in pairs]
            self.calls_per_row *= 2

    def read(self) -> dict[str, Any]:
        """The part of `Statistics` that comes with bins; on a GPU this waits for it."""
        none = torch.zeros(self.bins + 2, dtype=torch.int64, device="cpu")
        history = torch.stack([row.cpu() for row in self.rows] or [none])
        below, *counts, above = history.sum(0).tolist()
        history = history[: len(self.rows), 1:-1]
        return {"histogram": counts, "below": below, "above": above, "history": history, "range": self.range}


@contextmanager
def _counting() -> Iterator[None]:
    """On a GPU `torch.histc` is refused where algorithms have to be deterministic: it adds in any order, but whole numbers."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(False)  # without PyTorch's settings for its compiler
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(True, warn_only=warns)
