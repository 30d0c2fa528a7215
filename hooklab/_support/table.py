"""Objects that are tables: as text, as HTML in a notebook, as a pandas DataFrame."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Tabular", "table"]

MAX_ROWS = 60  # of a table in a notebook; its text and its DataFrame have all


def table(rows: Iterable[Sequence[str | int]], left: int = 1) -> str:
    """Rows of cells as aligned lines; the first `left` columns are text, the others numbers, perhaps written already."""
    written = _written(rows)
    widths = [max(map(len, column)) for column in zip(*written, strict=True)]
    aligned = (
        [*map(str.ljust, row[:left], widths[:left]), *map(str.rjust, row[left:], widths[left:])] for row in written
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def _written(rows: Iterable[Sequence[str | int]]) -> list[list[str]]:
    return [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]


class Tabular:
    """Something with rows. A subclass says what they are; this shows them in a notebook and passes them to pandas."""

    _columns: Sequence[str]  # their names
    _text_columns = 1  # the first ones, which stand to the left as text does; numbers stand to the right

    def _records(self) -> Iterable[Sequence[Any]]:
        """The values of each row, as they are."""
        raise NotImplementedError

    def _cells(self) -> Iterable[Sequence[str | int]]:
        """The cells of each row as they are shown."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        rows = _written(self._cells())
        lines = [self._row("th", self._columns), *(self._row("td", row) for row in rows[:MAX_ROWS])]
        more = f"<p>… {len(rows) - MAX_ROWS:,} more rows</p>" if len(rows) > MAX_ROWS else ""
        return f"<table>{''.join(lines)}</table>{more}"

    def to_dataframe(self) -> Any:
        """The table as a `pandas.DataFrame`, a row for each line; pandas has to be installed."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe needs pandas, which is not installed: pip install pandas") from None
        return pandas.DataFrame(list(self._records()), columns=list(self._columns))

    def _row(self, tag: str, cells: Sequence[str]) -> str:
        styles = [' style="text-align: left"' if column < self._text_columns else "" for column in range(len(cells))]
        written = zip(styles, map(html.escape, cells), strict=True)
        return f"<tr>{''.join(f'<{tag}{style}>{cell}</{tag}>' for style, cell in written)}</tr>"
