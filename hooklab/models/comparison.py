"""What `compare` returns: the rows, what they mean, and how they are shown."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooklab._support.nested import tensors_in
from hooklab._support.table import Tabular, table

__all__ = ["Comparison", "LayerPair", "Unpaired", "difference"]

SHOWN = 8  # names in a list of unpaired layers


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A call of a layer of `a` beside the one of `b` that it is paired with.

    Attributes:
        a, b: names of the two layers; `#2` marks the second call in one forward, `""` is the whole model.
        type: the class of the layer, or both classes.
        difference: of their outputs: the largest of all entries, divided by the largest entry of the output of `a`; inf
            where a NaN stands beside a number.
        on_equal_input: the same where the layer of `b` is given the inputs of the layer of `a`; None where it cannot be.
    """

    a: str
    b: str
    type: str
    difference: float
    on_equal_input: float | None


class Unpaired(NamedTuple):
    """The calls of layers that have no partner in the other model."""

    a: list[str]
    b: list[str]


class Comparison(Tabular, Sequence[LayerPair]):
    """The differences of two models, in the order in which the first one runs: what `compare` returns."""

    _columns = "a", "b", "type", "difference", "on equal input"
    _text_columns = 3

    def __init__(self, rows: list[LayerPair], unpaired: Unpaired, tol: float):
        self._rows, self.unpaired, self.tol = rows, unpaired, tol

    @property
    def first(self) -> LayerPair | None:
        """The first row whose outputs differ by more than `tol`."""
        return next((row for row in self._rows if row.difference > self.tol), None)

    @property
    def to_blame(self) -> LayerPair | None:
        """The first row that differs by more than `tol` on equal input, so that the fault lies inside this layer."""
        return next((row for row in self._rows if (row.on_equal_input or 0) > self.tol), None)

    def table(self) -> str:
        """All rows as text, then what they mean."""
        return "\n".join([table([self._columns, *self._cells()], left=self._text_columns), *self._verdict()])

    def _verdict(self) -> Iterator[str]:
        if self.first is None:
            yield f"no outputs differ by more than {self.tol:g}"
        else:
            yield f"first outputs that differ by more than {self.tol:g}: {_shown(self.first.a)}"
        if self.to_blame is not None:
            yield f"to blame, differs on equal input: {_shown(self.to_blame.a)}"
        elif self.first is not None:
            yield "to blame: no layer that was measured; the fault lies between them, or roundings add up"
        for which, names in self.unpaired._asdict().items():
            if names:
                more = f", … and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
                yield f"not paired, of {which}: {', '.join(map(_shown, names[:SHOWN]))}{more}"

    def _records(self) -> Iterator[Sequence[Any]]:
        return map(astuple, self._rows)

    def _cells(self) -> Iterator[Sequence[str | int]]:
        for row in self._rows:
            yield _shown(row.a), _shown(row.b), row.type, *map(_number, (row.difference, row.on_equal_input))

    def _repr_html_(self) -> str:
        return super()._repr_html_() + "".join(f"<p>{html.escape(line)}</p>" for line in self._verdict())

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Comparison({len(self)} rows; {'; '.join(self._verdict())})"


def _shown(name: str) -> str:
    return name or "(the whole model)"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def difference(output: object, other: object) -> float:
    """The largest difference of two entries, divided by the largest entry of `output`; both hold tensors of the same shapes."""
    pairs = zip(tensors_in(output), tensors_in(other), strict=True)
    return max((_relative(*(tensor.to_dense().cpu() for tensor in pair)) for pair in pairs), default=0.0)


def _relative(x: Tensor, y: Tensor) -> float:
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    gaps = (x - y).abs()[~same].nan_to_num(nan=math.inf, posinf=math.inf)
    if not gaps.numel():
        return 0.0
    finite = x[x.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return gaps.max().item() / largest if largest else math.inf
