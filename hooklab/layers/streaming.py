"""Statistics of tensors that stream by: no tensor is kept, and a GPU is never waited for until one reads."""

import copy
import math
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, strided
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from hooklab._support.checkpoints import is_tracing, modes_open, selective
from hooklab._support.compiler import eager, untraced
from hooklab.layers.figures import CHUNK, FEW, FLOATS, as_array, careful, merged, per_thread, plain
from hooklab.layers.histogram import Histogram

__all__ = ["Running", "Statistics", "short"]

STAGED = 8_192  # numbers: small tensors are collected up to here and counted together
GPU_CHUNK = 4_194_304  # bounds the float64 copy on a GPU to 32 MiB
MEASURED = 64  # calls whose figures are merged together, which costs less than one by one
PENDING = 256  # results that wait on a GPU before they are merged, there


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
    """A figure in a table: four decimals, or one digit after the point of a power of ten; a dash for NaN, and -0.0 is 0."""
    if math.isnan(number):
        return "-"
    return f"{number + 0.0:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.1e}"


class Running:
    """Figures that grow with every tensor given to `add`."""

    @eager
    def __init__(self, bins: int, range: tuple[float, float]):
        self._calls = 0
        self._histogram = Histogram(bins, range) if bins else None
        # Replicas on several GPUs add from several threads; a signal handler or a finalizer comes in between.
        self._lock = threading.RLock()
        self._busy = False  # in the middle of measuring: what comes then waits among the staged
        _all.add(self)
        self._count = 0
        self._measured: deque[tuple[float, ...]] = (
            deque()
        )  # the figures of a call each, which are not merged yet
        self._staged: list[Tensor] = []
        self._staged_count = 0
        self._finite, self._mean, self._spread = 0.0, 0.0, 0.0  # spread: the sum of (entry - mean) ** 2
        self._zeros, self._nans, self._infs = 0.0, 0.0, 0.0
        self._min, self._max = math.inf, -math.inf
        self._pending: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._merge()
            lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
            own = {
                "_lock": None,
                "_busy": False,
                "_measured": self._measured.copy(),
                "_histogram": copy.copy(self._histogram),
            }
            return {**vars(self), **lists, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())
        _all.add(self)

    @property
    def calls(self) -> int:
        return self._calls + len(self._measured)

    # A compiler would not see that two names stand for the same memory: here, and in `read`.
    @eager
    def add(self, tensor: Tensor, unwrapped: bool = False) -> None:
        """Count the entries of `tensor`: any shape, dtype and device. Nothing of it is kept."""
        # Nearly always, on the CPU: beside a small layer's forward each question counts, so there are few.
        if (
            tensor.__class__ is Tensor
            and tensor.is_cpu
            and tensor.dtype in FLOATS
            and tensor.layout is strided
            and self._histogram is None
            and forward_ad._current_level < 0
            and peek_interpreter_stack() is None
            and not modes_open()
            and not is_tracing()
            and self._at_once(tensor.detach() if tensor.requires_grad else tensor)
        ):
            return
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
        if is_tracing():
            with untraced():
                self.add(tensor, unwrapped=True)
            return
        if tensor.requires_grad or forward_ad._current_level >= 0:
            tensor = tensor.detach()  # of its tangent, too
        if tensor.dtype not in FLOATS or tensor.layout is not torch.strided or tensor.is_nested:
            tensor = plain(tensor)
        number = tensor.numel()
        with self._lock:
            self._calls += 1
            self._count += number
            if tensor.is_meta or isinstance(tensor, FakeTensor):
                return
            if self._histogram is not None:
                self._histogram.add(tensor)
            if number:
                self._add_entries(tensor, number)

    @eager
    def read(self) -> Statistics:
        """The figures so far; on a GPU this waits for it."""
        with self._lock:
            self._merge()
            self._unstage()
            if not self._busy:
                self._fetch()
            low, high = (self._min, self._max) if self._finite else (math.nan, math.nan)
            mean = self._mean if self._finite else math.nan
            std = math.sqrt(self._spread / (self._finite - 1)) if self._finite > 1 else math.nan
            seen = self._finite + self._nans + self._infs
            zeros = self._zeros / seen if seen else math.nan
            return Statistics(
                self._calls, self._count, mean, std, low, high, zeros, int(self._nans), int(self._infs),
                **(self._histogram.read() if self._histogram is not None else {}),
            )  # fmt: skip

    # ---- the figures ----

    def _at_once(self, tensor: Tensor) -> bool:
        """Count a tensor on the CPU; False, and nothing is done, for a nested or an empty one."""
        try:
            shape = tensor.shape
        except RuntimeError:  # a nested one has none
            return False
        scratch, figures = per_thread.scratch, None
        views = scratch.views.get(shape, ())
        number = views[0] if views else shape.numel()
        if number >= STAGED:
            if number <= CHUNK:
                array = as_array(tensor) if number > FEW else None
                figures = scratch.figures(tensor, shape, array, views)
            elif (array := as_array(tensor)) is not None:
                figures = scratch.figures_in_parts(array)
        if figures is not None:
            self._measured.append(figures)  # without the lock: a deque has its own
            if len(self._measured) >= MEASURED:
                with self._lock:
                    self._merge()
        elif number:
            with self._lock:
                self._calls += 1
                self._count += number
                self._add_entries(tensor, number)
        return number > 0

    def _add_entries(self, tensor: Tensor, number: int) -> None:
        """Small ones are collected; so are those that come in the middle of measuring."""
        if number < STAGED or self._busy:
            self._stage(tensor, number)
            return
        self._busy = True
        try:
            self._measure(tensor)
        finally:
            self._busy = False

    def _merge(self) -> None:
        """Add what has been measured; nothing while that is going on, since this may have come in between."""
        if self._busy:
            return
        self._busy = True
        try:
            while self._measured:
                figures = self._measured.popleft()
                self._calls += 1
                self._count += figures[0]
                self._add(*figures)
        finally:
            self._busy = False

    def _stage(self, tensor: Tensor, number: int) -> None:
        self._staged.append(tensor.clone())
        self._staged_count += number
        if self._staged_count >= STAGED:
            self._unstage()

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
            self._pending += map(careful, tensor.flatten().split(GPU_CHUNK))
            if len(self._pending) >= PENDING:
                self._pending = [merged(self._pending)]
            return
        figures, flat = per_thread.scratch.figures, tensor.flatten()
        array, parts = as_array(flat), flat.chunk(math.ceil(tensor.numel() / CHUNK))
        size = len(parts[0])
        for index, part in enumerate(parts):
            same = None if array is None else array[index * size : (index + 1) * size]
            self._add(*(figures(part, part.shape, same) or careful(part).tolist()))

    def _fetch(self) -> None:
        """Bring what has been counted on a GPU; this waits for it."""
        if self._pending:
            result, self._pending = merged(self._pending), []
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


# A process may be forked while a thread, which the child does not have, holds the lock.
_all: weakref.WeakSet[Running] = weakref.WeakSet()


def _unlock() -> None:
    for running in _all:
        running._lock, running._busy = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)
