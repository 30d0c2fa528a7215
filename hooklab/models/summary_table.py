"""What `summary` returns: a row a layer, as text, as HTML and as a DataFrame."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hooklab._support import refuse
from hooklab._support.table import Tabular, table

__all__ = ["LayerSummary", "Summary"]


@dataclass(frozen=True)
class LayerSummary:
    """A row of a `Summary`; the layers inside count with the layer around them. None is what could not be seen.

    Attributes:
        name, type: of the layer; `"a = b"` is one layer with two names.
        calls, output: how often it was called, and the shapes that its last call returned, as text.
        parameters, trainable: their number, and the share of those that require grad.
        operations, backward: floating-point operations in forward and backward, a multiplication and an addition apart.
        uncounted: the operations that computed something and that PyTorch has no formula for.
        saved: bytes saved for backward that nothing before had saved, without parameters and buffers.
    """

    name: str
    type: str
    calls: int
    output: str
    parameters: int
    trainable: float | None
    operations: int | None
    backward: int | None
    uncounted: tuple[str, ...]
    saved: int | None
    marked: tuple[bool, bool] = (False, False)  # there is more in forward, in backward


class Summary(Tabular, Mapping[str, LayerSummary]):
    """A `LayerSummary` by the name of the layer, and `.total`: what `summary` returns. `print` shows the table."""

    _text_columns = 3

    def __init__(self, rows: dict[str, LayerSummary], total: LayerSummary, backward: bool):
        self.total = total
        self._rows, self._backward = rows, backward

    @property
    def _columns(self) -> tuple[str, ...]:  # type: ignore[override]
        more = ("backward",) if self._backward else ()
        return "layer", "type", "output", "calls", "parameters", "trainable", "operations", *more, "saved bytes"

    def table(self) -> str:
        """A line for each layer and the total; `+` and `-` mark what PyTorch has no formula for, named below."""
        return "\n".join([table([self._columns, *self._cells()], left=self._text_columns), *self._note()])

    def _lines(self) -> Iterator[LayerSummary]:
        yield from dict.fromkeys(self._rows.values())

    def _records(self) -> Iterator[tuple[Any, ...]]:
        for row in self._lines():
            more = (row.backward,) if self._backward else ()
            counts = row.calls, row.parameters, row.trainable, row.operations, *more, row.saved
            yield row.name, row.type, row.output, *counts

    def _cells(self) -> Iterator[list[str | int]]:
        for row in (*self._lines(), self.total):
            share = "-" if row.trainable is None else f"{row.trainable:.0%}"
            work = [
                _marked(number, more) for number, more in zip((row.operations, row.backward), row.marked, strict=True)
            ]
            saved = "-" if row.saved is None else row.saved
            yield [row.name, row.type, row.output, row.calls, row.parameters, share, *work[: 1 + self._backward], saved]

    def _note(self) -> list[str]:
        if not self.total.uncounted:
            return []
        return [f"+ and -: PyTorch has no formula for {', '.join(self.total.uncounted)}"]

    def to_dataframe(self) -> Any:
        """The rows as a `pandas.DataFrame`, without the total; `uncounted` lists what is not among the operations."""
        frame = super().to_dataframe()
        frame["uncounted"] = [row.uncounted for row in self._lines()]
        return frame

    def _repr_html_(self) -> str:
        return super()._repr_html_() + "".join(f"<p>{html.escape(line)}</p>" for line in self._note())

    def __getitem__(self, name: str) -> LayerSummary:
        if name not in self._rows:
            close = get_close_matches(str(name), self._rows) or list(self._rows)[:5]
            raise KeyError(f"summary: no row of {name!r}; close: {refuse.listed(close)} (the model as a whole: .total)")
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Summary({len(self)} layers, {self.total.parameters:,} parameters)"


def _marked(number: int | None, more: bool) -> str:
    return "-" if number is None else f"{number:,}{' +' if more else ''}"
