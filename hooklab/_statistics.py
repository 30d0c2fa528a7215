"""Statistics of tensors that stream by: no tensor is kept, and a GPU is never waited for until one reads."""

import math
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from hooklab._checkpoints import modes_open, selective
from hooklab._compiler import eager

__all__ = ["Running", "Statistics", "plain", "short", "unbatched"]

STAGED = 8_192  # numbers: small tensors are collected up to here and counted together
CHUNK = (
    131_072  # numbers: few calls, and 1.1 MiB of scratch memory for each thread, which a core's cache holds
)
ONE_PASS = 32_768  # numbers: above, amin and amax are faster than aminmax, which runs once
NARROW = 1e-6  # below this share of spread in the sum of squares, the mean is taken off first
GPU_CHUNK = 4_194_304  # bounds the float64 copy on a GPU to 32 MiB
PENDING = 256  # results that wait on a GPU before they are merged, there
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_SHAPES = 64
EXACT = 16_777_216  # whole numbers that float32 can count
UNORDERED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
MAX_ROWS = 512  # of the history: after that two rows become one


@dataclass(frozen=True)
class Statistics:
    """What has been counted of one layer.

    Attributes:
        calls: the tensors that were counted.
        count: their entries, NaN and infinite ones included.
        mean, std, min, max: of the finite entries, computed in float64; `std` as `torch.std`. NaN without any.
        zeros: the share of entries that are exactly 0, from 0 to 1.
        nans, infs: how many entries are NaN, how many infinite.
        histogram: how many entries fell into each bin, or None without bins; `below` and `above` the rest.
        history: one histogram for each call, oldest first, int64 of shape (rows, bins); in a long run one row
            for several calls. None without bins.
        range: what the bins cover.
    """

    calls: int
    count: int
    mean: float
    std: float
    min: float
    max: float
    zeros: float
    nans: int
    infs: int
    histogram: list[int] | None = None
    below: int = 0
    above: int = 0
    history: Tensor | None = field(default=None, compare=False)
    range: tuple[float, float] | None = None


def short(number: float) -> str:
    """A figure in a table: four decimals, or one digit after the point of a power of ten; a dash for NaN."""
    if math.isnan(number):
        return "-"
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.1e}"


class Running:
    """Figures that grow with every tensor given to `add`."""

    @eager
    def __init__(self, bins: int, range: tuple[float, float]):
        self.calls = 0
        self._bins, self._range = bins, range
        # Replicas on several GPUs add from several threads; a signal handler or a finalizer comes in between.
        self._lock = threading.RLock()
        self._busy = False  # in the middle of measuring: what comes then waits among the staged
        _all.add(self)
        self._count = 0
        self._staged: list[Tensor] = []
        self._staged_count = 0
        self._finite, self._mean, self._spread = 0.0, 0.0, 0.0  # spread: the sum of (entry - mean) ** 2
        self._zeros, self._nans, self._infs = 0.0, 0.0, 0.0
        self._min, self._max = math.inf, -math.inf
        self._pending: list[Tensor] = []
        self._rows: list[Tensor] = []  # of the history: what fell below, each bin, what fell above
        self._calls_per_row, self._row_calls = 1, 0

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
            return {**vars(self), **lists, "_lock": None, "_busy": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())
        _all.add(self)

    # A compiler would not see that two names stand for the same memory: here, and in `read`.
    @eager
    def add(self, tensor: Tensor, unwrapped: bool = False) -> None:
        """Count the entries of `tensor`: any shape, dtype and device. Nothing of it is kept."""
        if not unwrapped and peek_interpreter_stack() is not None:  # inside grad, vmap, jvp of torch.func
            while is_functorch_wrapped_tensor(tensor):
                tensor = get_unwrapped(tensor)
            with torch._C._DisableFuncTorch(), torch.no_grad():
                self.add(tensor.detach(), unwrapped=True)
            return
        if modes_open() and selective():
            with _disable_current_modes():
                self.add(tensor, unwrapped=True)
            return
        if tensor.requires_grad or forward_ad._current_level >= 0:
            tensor = tensor.detach()  # of its tangent, too
        if tensor.dtype not in FLOATS or tensor.layout is not torch.strided or tensor.is_nested:
            tensor = plain(tensor)
        number = tensor.numel()
        with self._lock:
            self.calls += 1
            self._count += number
            if tensor.is_meta or isinstance(tensor, FakeTensor):
                return
            if self._bins:
                self._add_to_histogram(tensor)
            if number == 0:
                return
            if number < STAGED or self._busy:
                self._staged.append(tensor.clone())
                self._staged_count += number
                if self._staged_count >= STAGED:
                    self._unstage()
                return
            self._busy = True
            try:
                if number > CHUNK or not (tensor.is_cpu and tensor.is_contiguous() and self._fast(tensor)):
                    self._measure(tensor)
            finally:
                self._busy = False

    @eager
    def read(self) -> Statistics:
        """The figures so far; on a GPU this waits for it."""
        with self._lock:
            self._unstage()
            if not self._busy:
                self._fetch()
            low, high = (self._min, self._max) if self._finite else (math.nan, math.nan)
            mean = self._mean if self._finite else math.nan
            std = math.sqrt(self._spread / (self._finite - 1)) if self._finite > 1 else math.nan
            seen = self._finite + self._nans + self._infs
            zeros = self._zeros / seen if seen else math.nan
            return Statistics(
                self.calls, self._count, mean, std, low, high, zeros, int(self._nans), int(self._infs),
                **self._histogram(),
            )  # fmt: skip

    # ---- the figures ----

    def _unstage(self) -> None:
        if not self._staged or self._busy:
            return
        self._busy = True
        try:
            flat = [tensor.flatten() for tensor in self._staged]
            self._staged, self._staged_count = [], 0
            if len({part.dtype for part in flat}) > 1:
                # torch.cat would take int64 beside bfloat16 to bfloat16.
                flat = [part.to(torch.float32 if part.is_mps else torch.float64) for part in flat]
            self._measure(
                flat[0] if len(flat) == 1 else torch.cat([part.to(flat[0].device) for part in flat])
            )
        finally:
            self._busy = False

    def _measure(self, tensor: Tensor) -> None:
        if not tensor.is_cpu:
            self._pending += map(_careful, tensor.flatten().split(GPU_CHUNK))
            if len(self._pending) >= PENDING:
                self._pending = [_merged(self._pending)]
            return
        for part in tensor.flatten().chunk(math.ceil(tensor.numel() / CHUNK)):
            if not self._fast(part):
                self._add(*_careful(part).tolist())

    def _fetch(self) -> None:
        """Bring what has been counted on a GPU; this waits for it."""
        if self._pending:
            result, self._pending = _merged(self._pending), []
            self._add(*result.tolist())

    def _add(
        self,
        finite: float,
        mean: float,
        spread: float,
        zeros: float,
        nans: float,
        infs: float,
        low: float,
        high: float,
    ) -> None:
        if finite:
            # Chan, Golub and LeVeque (1979): the spread of two groups from those of each.
            step = mean - self._mean if self._finite else 0.0
            if not self._finite:
                self._mean = mean
            both = self._finite + finite
            self._mean += step * finite / both
            self._spread += spread + step * step * self._finite * finite / both
            self._finite = both
            if low < self._min:
                self._min = low
            if high > self._max:
                self._max = high
        self._zeros += zeros
        self._nans += nans
        self._infs += infs

    def _fast(self, part: Tensor) -> bool:
        """Add a contiguous part on the CPU; False where it has NaN or infinite entries, which take longer."""
        if _scratch.busy:  # another layer was interrupted in here
            return False
        _scratch.busy = True
        try:
            return self._measure_fast(part)
        finally:
            _scratch.busy = False

    def _measure_fast(self, part: Tensor) -> bool:
        # Few calls and few steps between them: beside a small layer's forward every one of them counts.
        shape = part.shape
        wide, wide_shaped, nonzero, nonzero_array = _scratch.views.get(shape) or _scratch.of(shape)
        wide_shaped.copy_(part)
        squares = wide.dot(wide).item()
        if not math.isfinite(squares):
            return False
        number = shape.numel()
        mean = wide.sum().item() / number
        spread = squares - mean * mean * number
        lowest, highest = torch.aminmax(part) if number <= ONE_PASS else (part.amin(), part.amax())
        low, high = lowest.item(), highest.item()
        if low == high:
            mean, spread = low, 0.0
        elif spread < NARROW * squares:
            wide.sub_(mean)
            spread = wide.dot(wide).item()
        zeros = 0.0
        if low <= 0 <= high:
            nonzero.copy_(part)
            zeros = number - int(np.count_nonzero(nonzero_array))  # ten times as fast as torch.count_nonzero
        self._add(number, mean, spread, zeros, 0, 0, low, high)
        return True

    # ---- the histogram ----

    def _add_to_histogram(self, tensor: Tensor) -> None:
        flat = tensor.flatten()
        flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
        low, high = self._range
        # torch.histc counts in float32, which stops at 2 ** 24.
        with _counting():
            parts = [torch.histc(part, self._bins, low, high) for part in flat.split(EXACT)]
        inside = sum(part.to(torch.int64) for part in parts)
        row = torch.cat([(flat < low).sum()[None], inside, (flat > high).sum()[None]])
        if self._row_calls:
            self._rows[-1] = self._rows[-1] + row.to(self._rows[-1].device)
        else:
            self._rows.append(row)
        self._row_calls = (self._row_calls + 1) % self._calls_per_row
        if len(self._rows) == MAX_ROWS and not self._row_calls:
            pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
            self._rows = [first + second.to(first.device) for first, second in pairs]
            self._calls_per_row *= 2

    def _histogram(self) -> dict:
        if not self._bins:
            return {}
        rows = [row.cpu() for row in self._rows] or [
            torch.zeros(self._bins + 2, dtype=torch.int64, device="cpu")
        ]
        history = torch.stack(rows)
        below, *counts, above = history.sum(0).tolist()
        history = history[: len(self._rows), 1:-1]
        return {"histogram": counts, "below": below, "above": above, "history": history, "range": self._range}


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


def unbatched(grad: Tensor) -> Tensor:
    """All gradients of a batch inside `torch.autograd.grad(is_grads_batched=True)`; elsewhere `grad` itself."""
    # They still use the vmap from before torch.func, whose tensors are not functorch's.
    if not is_legacy_batchedtensor(grad):
        return grad
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return torch._remove_batch_dim(grad, level, 0, 0)


def _holey(tensor: Tensor) -> bool:
    return tensor.layout is torch.jagged and tensor.lengths() is not None


def plain(tensor: Tensor) -> Tensor:
    """Numbers that can be compared: the stored entries of a nested tensor, the absolute values of a complex one."""
    if tensor.is_nested:
        tensor = (
            torch.cat([part.flatten() for part in tensor.unbind()]) if _holey(tensor) else tensor.values()
        )
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = tensor.abs()
    if tensor.dtype in UNORDERED or (tensor.is_floating_point() and tensor.dtype not in FLOATS):
        tensor = tensor.double() if tensor.dtype in UNORDERED else tensor.float()
    return tensor


class _Scratch(threading.local):
    """Memory for a part as float64 and as bool, used again and again: fresh memory costs more than counting.

    Fresh views cost time too: they are kept for the shapes seen last.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False), _disable_current_modes():
            self.wide = torch.empty(CHUNK, dtype=torch.float64, device="cpu")
            self.nonzero = torch.empty(CHUNK, dtype=torch.bool, device="cpu")
        self.views: dict[torch.Size, tuple[Any, ...]] = {}
        self.busy = False

    def of(self, shape: torch.Size) -> tuple[Any, ...]:
        """The first flat and in this shape, the second in this shape and as a NumPy array."""
        if shape not in self.views:
            if len(self.views) >= MAX_SHAPES:
                self.views.clear()
            with torch.inference_mode(False), _disable_current_modes():
                wide, nonzero = self.wide[: shape.numel()], self.nonzero[: shape.numel()]
                self.views[shape] = wide, wide.view(shape), nonzero.view(shape), nonzero.numpy()
        return self.views[shape]


_scratch = _Scratch()

# A process may be forked while a thread, which the child does not have, holds the lock.
_all: weakref.WeakSet[Running] = weakref.WeakSet()


def _unlock() -> None:
    for running in _all:
        running._lock, running._busy = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def _careful(part: Tensor) -> Tensor:
    """The same figures as one tensor on the same device, of the finite entries alone; no value is looked at."""
    # Apple's GPUs have no float64.
    wide = part.to(torch.float32 if part.device.type == "mps" else torch.float64)
    finite = part.isfinite()
    number = finite.sum().to(wide.dtype)
    mean = torch.where(finite, wide, 0).sum() / number.clamp(min=1)
    off = torch.where(finite, wide - mean, 0)
    figures = (
        number, mean, off.dot(off), (part == 0).sum(), part.isnan().sum(), part.isinf().sum(),
        torch.where(finite, wide, math.inf).min(), torch.where(finite, wide, -math.inf).max(),
    )  # fmt: skip
    return torch.stack([figure.to(wide.dtype) for figure in figures])


def _merged(results: list[Tensor]) -> Tensor:
    """Several results of `_careful` as one, on the device of the first; as `Running._add`, without a look."""
    numbers, means, spreads, *counts, lows, highs = torch.stack(
        [one.to(results[0].device) for one in results]
    ).T
    number = numbers.sum()
    mean = (numbers * means).sum() / number.clamp(min=1)
    spread = spreads.sum() + (numbers * (means - mean) ** 2).sum()
    return torch.stack([number, mean, spread, *(count.sum() for count in counts), lows.min(), highs.max()])
