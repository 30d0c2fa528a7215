"""The figures of one tensor: as plain numbers first, then without a look at a value, so that a GPU is not waited for."""

import math
import threading
from ctypes import c_float
from functools import lru_cache
from typing import Any

import numpy
import torch
from numpy import float32, frombuffer, int32, int64, ndarray, uint32, uint64
from torch import Tensor, mm
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._python_dispatch import _disable_current_modes

try:
    from numpy._core.multiarray import count_nonzero  # what `numpy.count_nonzero` calls, two calls later
except ImportError:

    def count_nonzero(array: ndarray) -> int:
        return int(numpy.count_nonzero(array))


try:  # what `numpy.errstate` does, but for making the same value again each time
    from numpy._core.umath import _extobj_contextvar, _make_extobj

    get_errors, set_errors = _extobj_contextvar.get, _extobj_contextvar.set
    QUIET = _make_extobj(invalid="ignore")  # a signaling NaN is invalid
except ImportError:
    QUIET, get_errors = {"invalid": "ignore"}, numpy.geterr

    def set_errors(errors: dict[str, str]) -> None:
        numpy.seterr(**errors)


__all__ = [
    "CHUNK",
    "FEW",
    "FLOATS",
    "as_array",
    "careful",
    "merged",
    "per_thread",
    "plain",
    "unbatched",
]

CHUNK = 49_152  # numbers: few calls, and 0.6 MiB of scratch memory for each thread, less than a cache holds
HALF = CHUNK // 2
NO_SUMS = numpy.zeros(6)  # to set a product of `Scratch` to zero
STEP = 16  # a matrix product takes longer where sizes are not multiples of this
FEW = 16_384  # numbers: up to here a call costs more than what it reads, so there are fewer calls, which read more
NARROW = 1e-6  # below this share of spread in the sum of squares, the mean is taken off first
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_SHAPES = 64
UNORDERED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)


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


def _holey(tensor: Tensor) -> bool:
    return tensor.layout is torch.jagged and tensor.lengths() is not None


def unbatched(grad: Tensor) -> Tensor:
    """All gradients of a batch inside `torch.autograd.grad(is_grads_batched=True)`; elsewhere `grad` itself."""
    # They still use the vmap from before torch.func, whose tensors are not functorch's.
    if not is_legacy_batchedtensor(grad):
        return grad
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return torch._remove_batch_dim(grad, level, 0, 0)


def careful(part: Tensor) -> Tensor:
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


def merged(results: list[Tensor]) -> Tensor:
    """Several results of `careful` as one, on the device of the first; as `Running._add`, without a look."""
    numbers, means, spreads, *counts, lows, highs = torch.stack(
        [one.to(results[0].device) for one in results]
    ).T
    number = numbers.sum()
    mean = (numbers * means).sum() / number.clamp(min=1)
    spread = spreads.sum() + (numbers * (means - mean) ** 2).sum()
    return torch.stack([number, mean, spread, *(count.sum() for count in counts), lows.min(), highs.max()])


# Types: to make one takes longer than to read so many numbers.
_floats = lru_cache(MAX_SHAPES)(c_float.__mul__)


def _channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def as_array(tensor: Tensor) -> ndarray | None:
    """The same memory for NumPy, flat, if it is float32 and so much that this pays: to be read while `tensor` lives.

    Its entries come as they lie in memory, which need not be their order in `tensor` (channels last).

    By its address: `Tensor.numpy` would forbid to resize it, and DLPack asks so much that it takes longer than all else.
    Not of a subclass: its entries may lie in another tensor, and what is read here would be somebody else's memory.
    """
    number = tensor.numel()
    if (
        number <= FEW
        or tensor.__class__ is not Tensor
        or tensor.dtype is not torch.float32
        or not (tensor.is_contiguous() or _channels_last(tensor))
        or tensor.is_neg()
        or not (address := tensor.data_ptr())  # 0: a tensor of zeros that needs no memory
    ):
        return None
    return frombuffer(_floats(number).from_address(address), dtype=float32)


def _bounds(values: ndarray, bits: ndarray) -> tuple[float, float, int]:
    """The least and the largest of finite numbers, and how many are not 0; `bits` is their memory as unsigned integers."""
    # NumPy finds places in less time than values, and in integers in half the time that floats take. As unsigned ones, the bits
    # of floats below 0 are larger than all others, and the largest are those of the least.
    low = values.item(bits.argmax())
    if low > 0:  # then it is the largest, and no number has a sign: after a ReLU, say
        nonzero = count_nonzero(bits)
        return 0.0 if nonzero < bits.size else values.item(bits.argmin()), low, nonzero
    return _signed_bounds(values, bits, low)


def _signed_bounds(values: ndarray, bits: ndarray, low: float) -> tuple[float, float, int]:
    """The same where `low`, the least, is below 0 or a zero."""
    # As signed ones, the bits of floats above 0 have their order, those below 0 the reverse; those of -0.0, a zero too, are
    # the least of all.
    bits = bits.view(int64 if bits.itemsize == 8 else int32)
    first, last = bits.argmin(), bits.argmax()
    high = values.item(first if bits.item(last) < 0 else last)
    if high < 0:
        return low, high, bits.size
    return low, high, count_nonzero(values != 0 if values.item(first) == 0 else bits)


class Scratch:
    """Measures on the CPU, in memory for `CHUNK` numbers as float64, used again and again: fresh memory costs more.

    Fresh views cost time too: they are kept for the shapes and sizes seen last.
    """

    __slots__ = ("busy", "flat_sums", "memory", "read_sums", "rows", "sums", "views")

    def __init__(self) -> None:
        with torch.inference_mode(False), _disable_current_modes():
            # The ones before `HALF` stay so.
            self.memory = torch.ones(HALF + CHUNK, dtype=torch.float64, device="cpu")
            self.sums = torch.empty(3, 2, dtype=torch.float64, device="cpu")
        self.flat_sums = self.sums.numpy().reshape(-1)
        self.read_sums = self.flat_sums.tolist  # in a tenth of the time that Tensor.tolist takes
        self.views: dict[torch.Size, tuple[Any, ...]] = {}
        self.rows: dict[int, tuple[Tensor, Tensor, ndarray]] = {}
        self.busy = False

    def figures(
        self, part: Tensor, shape: torch.Size, array: ndarray | None = None, views: tuple[Any, ...] = ()
    ) -> tuple[float, ...] | None:
        """As `careful`, of at most `CHUNK` numbers.

        `array`, where one is given, is the same memory as float32; `views`, those of the shape.
        None where one is NaN or infinite, and where this is in use: another layer was interrupted in here.
        """
        if self.busy:
            return None
        # Few calls and few steps between them: beside a small layer's forward every one of them counts.
        views = views or self.views.get(shape) or self._views(shape)
        number, wide_shaped, spare, rows, columns, values, bits = views
        try:
            self.busy = True
            wide_shaped.copy_(part)
            if spare is not None:
                spare.fill(0.0)
            mm(rows, columns, out=self.sums)
            first_sum, second_sum, first_squares, _, _, second_squares = self.read_sums()
            squares = first_squares + second_squares
            if not squares < math.inf:
                return None
            mean = (first_sum + second_sum) / number
            spread = squares - mean * mean * number
            if array is not None:
                values, bits = array, array.view(uint32)
            # As in `_bounds`, whose call would show here.
            high = values.item(bits.argmax())
            if high > 0:
                nonzero = count_nonzero(bits)
                low = 0.0 if nonzero < number else values.item(bits.argmin())
            else:
                low, high, nonzero = _signed_bounds(values, bits, high)
            if low == high:
                mean, spread = low, 0.0
            elif spread < NARROW * squares:
                wide = self.memory[HALF : HALF + number]
                wide.sub_(mean)
                off = wide.sum().item() / number  # by which that mean was rounded
                mean, spread = mean + off, wide.sub_(off).dot(wide).item()
            return number, mean, spread, number - nonzero, 0, 0, low, high
        finally:
            self.busy = False

    def figures_in_parts(self, array: ndarray) -> tuple[float, ...] | None:
        """As `figures`, of more than `CHUNK` numbers in a row; None also where the mean has to be taken off first."""
        if self.busy:
            return None
        number = array.size
        size = math.ceil(number / math.ceil(number / CHUNK) / STEP) * STEP
        rows, columns, wide = self.rows.get(size) or self._row(size)
        bits, addmm_ = array.view(uint32), self.sums.addmm_
        full, low, high = 0, math.inf, -math.inf
        before = get_errors()
        try:
            self.busy = True
            set_errors(QUIET)
            self.flat_sums[:] = NO_SUMS
            for first in range(0, number, size):
                part = array[first : first + size]
                if part.size < size:
                    wide[part.size :] = 0.0
                    wide = wide[: part.size]
                wide[:] = part  # in less time than a view of the tensor takes beside a copy of its own
                addmm_(rows, columns)
                least, largest, nonzero = _bounds(part, bits[first : first + size])
                if least < low:
                    low = least
                if largest > high:
                    high = largest
                full += nonzero
            first_sum, second_sum, first_squares, _, _, second_squares = self.read_sums()
        finally:
            self.busy = False
            set_errors(before)
        squares = first_squares + second_squares
        if not squares < math.inf:
            return None
        mean = (first_sum + second_sum) / number
        spread = squares - mean * mean * number
        if spread < NARROW * squares:
            return None
        return number, mean, spread, number - full, 0, 0, low, high

    def _matrices(self, number: int) -> tuple[Tensor, Tensor]:
        """Memory for so many numbers, and a zero behind an odd one, as two rows below one of ones; the two again, as columns.

        Their product holds all sums and all squares: one call, in less time than `sum` and `dot`.
        """
        half = (number + 1) // 2
        rows = self.memory.as_strided((3, half), (half, 1), HALF - half)
        return rows, rows[1:].T

    def _row(self, size: int) -> tuple[Tensor, Tensor, ndarray]:
        """`_matrices`, and the same memory flat for NumPy."""
        if len(self.rows) >= MAX_SHAPES:
            self.rows.clear()
        with torch.inference_mode(False), _disable_current_modes():
            self.rows[size] = row = *self._matrices(size), self.memory[HALF : HALF + size].numpy()
        return row

    def _views(self, shape: torch.Size) -> tuple[Any, ...]:
        """How many numbers; memory for them in this shape; what has to be 0; `_matrices`; flat for NumPy, also as bits."""
        if len(self.views) >= MAX_SHAPES:
            self.views.clear()
        number = shape.numel()
        with torch.inference_mode(False), _disable_current_modes():
            wide = self.memory[HALF : HALF + number]
            spare = self.memory[HALF + number : HALF + number + 1].numpy() if number % 2 else None
            array = wide.numpy()
            views = number, wide.view(shape), spare, *self._matrices(number), array, array.view(uint64)
        self.views[shape] = views
        return views


class PerThread(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


per_thread = PerThread()
