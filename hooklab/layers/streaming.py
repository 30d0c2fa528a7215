"""Statistics of tensors that stream by: no tensor is kept, and a GPU is never waited for until one reads."""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hooklab._support.torch_private import eager, in_transform, is_fake, without_modes

__all__ = ["MAX_ROWS", "STAGED", "Statistics", "Tally", "plain", "short"]

STAGED = 8_192  # numbers: small tensors are collected up to here and counted together
CPU_PIECE, GPU_PIECE = 32_768, 4_194_304  # numbers: the float64 copy of a piece has at most 0.25 and 32 MiB
PENDING = 64  # summaries that wait before they are merged
MAX_ROWS = 512  # rows of the history: once it has so many, two rows become one
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
UNORDERED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)  # PyTorch compares none of them
ONE_AT_A_TIME = threading.RLock()  # autograd has a thread for each GPU


@dataclass(frozen=True)
class Statistics:
    """What has been counted of one layer; mean, std, min and max are those of the finite entries, NaN without any."""

    calls: int  # tensors
    count: int  # their entries, NaN and infinite ones included
    mean: float  # like std computed in float64
    std: float  # as torch.std
    min: float
    max: float
    zeros: float  # the share of entries that are exactly 0, from 0 to 1
    nans: int  # entries
    infs: int
    histogram: list[int] | None = None  # entries in each bin; None without bins
    below: int = 0  # entries below what the bins cover
    above: int = 0
    # One histogram for each call, oldest first, int64 of shape (rows, bins); in a long run a row has several calls.
    history: Tensor | None = field(default=None, compare=False)
    range: tuple[float, float] | None = None  # what the bins cover


class Tally:
    """Counts every tensor given to `add`, and `read` is the `Statistics` so far.

    Each piece of a tensor becomes a summary, eight numbers on its device. Summaries are merged, first there.
    """

    def __init__(self, bins: int, range: tuple[float, float], units: int | None = None):
        self.calls = self.count = 0
        self._histogram = Histogram(bins, range) if bins else None
        self.units = None if units is None else Units(units)
        self._staged: dict[torch.device, list[Tensor]] = {}
        self._staged_count = 0
        self._summaries: dict[torch.device, list[Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        with ONE_AT_A_TIME:
            self._unstage()
            return vars(self)

    @eager
    def add(self, tensor: Tensor) -> None:
        """Count the entries of `tensor`: any shape, dtype and device. Nothing of it is kept."""
        if in_transform(tensor):
            raise NotImplementedError(
                "layer_statistics: this layer runs inside vmap, grad or jvp of torch.func, where its tensors stand for "
                "others; open the block around a plain forward"
            )
        with ONE_AT_A_TIME, without_modes():
            flattened, tensor = tensor.is_nested, plain(tensor.detach())
            number = tensor.numel()
            self.calls += 1
            self.count += number
            if tensor.is_meta or is_fake(tensor):
                return
            if self._histogram is not None:
                self._histogram.add(tensor)
            if self.units is not None:
                self.units.add(tensor, flattened)
            if number >= STAGED:
                self._summarize(tensor)
            elif number:
                self._staged.setdefault(tensor.device, []).append(_widened(tensor).flatten())
                self._staged_count += number
                if self._staged_count >= STAGED:
                    self._unstage()

    @eager
    def read(self) -> Statistics:
        """What has been counted so far; on a GPU this waits for it."""
        with ONE_AT_A_TIME, without_modes():
            self._unstage()
            each = [_merge(summaries).cpu().double() for summaries in self._summaries.values()]
            n, mean, spread, zeros, nans, infs, low, high = _merge(each).tolist() if each else [0.0] * 8
            seen, none = n + nans + infs, math.nan
            low, high, mean = (low, high, mean) if n else (none, none, none)
            std = math.sqrt(spread / (n - 1)) if n > 1 else none
            binned = self._histogram.read() if self._histogram is not None else {}
            share = zeros / seen if seen else none
            return Statistics(self.calls, self.count, mean, std, low, high, share, int(nans), int(infs), **binned)

    def _unstage(self) -> None:
        staged, self._staged, self._staged_count = self._staged, {}, 0
        for tensors in staged.values():
            self._summarize(torch.cat(tensors))

    def _summarize(self, tensor: Tensor) -> None:
        summaries = self._summaries.setdefault(tensor.device, [])
        summaries += [_summary(_widened(piece)) for piece in _pieces(tensor)]
        if len(summaries) >= PENDING:
            summaries[:] = [_merge(summaries)]


class Histogram:
    """How many entries fell into each bin, below and above: of all calls, and of each."""

    def __init__(self, bins: int, range: tuple[float, float]):
        self.bins, self.range = bins, range
        self.rows: list[Tensor] = []  # of the history: what fell below, each bin, what fell above
        self.calls_per_row, self.row_calls = 1, 0

    def add(self, tensor: Tensor) -> None:
        row = torch.zeros(self.bins + 2, dtype=torch.int64, device=tensor.device)
        low, high = self.range
        for piece in _pieces(tensor):  # torch.histc counts in float32, which is exact for so few
            piece = piece if piece.dtype in (torch.float32, torch.float64) else piece.float()
            inside = torch.histc(piece, self.bins, low, high).to(torch.int64)
            row = row + torch.cat([(piece < low).sum()[None], inside, (piece > high).sum()[None]])
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


class Units:
    """Which units have been other than zero so far; the units are the entries along one dim."""

    def __init__(self, dim: int):
        self.dim = dim
        self.alive: Tensor | None = None  # bool, one entry a unit
        self.unknown = ""  # why these tensors have no units

    def add(self, tensor: Tensor, flattened: bool) -> None:
        if not tensor.numel() or self.unknown:
            return
        dims = range(tensor.dim())
        if flattened or not -len(dims) <= self.dim < len(dims):
            self.unknown = f"a tensor has no dim {self.dim}: its shape is {'nested' if flattened else [*tensor.shape]}"
            return
        # Also a tensor with one dim has another one now, over which to ask.
        alive = tensor[None].any([0, *(dim + 1 for dim in dims if dim != dims[self.dim])])
        if self.alive is None:
            self.alive = alive
        elif len(alive) == len(self.alive):
            self.alive = self.alive | alive.to(self.alive.device)
        else:
            self.unknown = f"one tensor has {len(self.alive)} units, another {len(alive)}"

    def dead(self) -> list[int] | None:
        """The units that were always zero; None where these are unknown. On a GPU this waits for it."""
        if self.unknown or self.alive is None:
            return None
        return (~self.alive).nonzero().flatten().tolist()


def plain(tensor: Tensor) -> Tensor:
    """Numbers that can be compared: dense ones, and of complex numbers the absolute values."""
    if tensor.is_nested:  # as inside a nn.TransformerEncoder that is given a padding mask
        tensor = torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.abs()
    if tensor.dtype in UNORDERED:
        return tensor.double()
    return tensor.float() if tensor.is_floating_point() and tensor.dtype not in FLOATS else tensor


def short(number: float) -> str:
    """A number in a table: four decimals, or one digit after the point of a power of ten; a dash for NaN; -0.0 is 0."""
    if math.isnan(number):
        return "-"
    return f"{number + 0.0:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.1e}"


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` in pieces, each a block of its memory, so that no copy is as large as the tensor."""
    if tensor.numel() <= (CPU_PIECE if tensor.is_cpu else GPU_PIECE):
        yield tensor
        return
    outermost = max((dim for dim, size in enumerate(tensor.shape) if size > 1), key=tensor.stride)
    for half in tensor.chunk(2, outermost):
        yield from _pieces(half)


def _widened(tensor: Tensor) -> Tensor:
    """A copy in float64. Apple's GPUs have none, so there it is float32."""
    return tensor.to(torch.float32 if tensor.is_mps else torch.float64, copy=True)


def _summary(wide: Tensor) -> Tensor:
    """Eight numbers of a tensor, which is overwritten: count, mean, spread, zeros, NaNs, infinities, least, largest.

    The spread is the sum of squared distances from the mean; all but the three counts are of the finite entries.
    """
    if wide.is_cpu and math.isfinite(total := wide.sum().item()):  # on a GPU a look at a value would wait for it
        return _finite_summary(wide, total)
    finite = wide.isfinite()
    number = finite.sum()
    mean = wide.where(finite, 0).sum() / number.clamp(min=1)
    spread = (wide - mean).where(finite, 0).square().sum()
    counts = ((wide == 0).sum(), wide.isnan().sum(), wide.isinf().sum())
    low, high = wide.where(finite, math.inf).amin(), wide.where(finite, -math.inf).amax()
    return torch.stack([each.to(wide.dtype) for each in (number, mean, spread, *counts, low, high)])


def _finite_summary(wide: Tensor, total: float) -> Tensor:
    """The same on the CPU in a third of the time, where all entries are finite; `total` is their sum."""
    number, (low, high) = wide.numel(), (bound.item() for bound in wide.aminmax())
    centre = low if low == high else total / number  # equal numbers have no spread at all
    off = wide - centre
    mean = centre + off.sum().item() / number
    spread, zeros = off.square_().sum().item(), number - wide.ne_(0).sum().item()
    return torch.tensor((number, mean, spread, zeros, 0, 0, low, high), dtype=torch.float64, device="cpu")


def _merge(summaries: list[Tensor]) -> Tensor:
    """Several summaries as one (Chan, Golub and LeVeque, 1979), without waiting for a GPU."""
    numbers, means, spreads, *counts, lows, highs = torch.stack(summaries).T
    number, off = numbers.sum(), means - means[0]  # equal means stay exactly equal
    step = (numbers * off).sum() / number.clamp(min=1)
    spread = spreads.sum() + (numbers * (off - step) ** 2).sum()
    return torch.stack([number, means[0] + step, spread, *(each.sum() for each in counts), lows.min(), highs.max()])
