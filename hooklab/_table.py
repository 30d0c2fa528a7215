"""Text tables: the first column to the left, numbers to the right."""

from collections.abc import Iterable

__all__ = ["table"]


def table(rows: Iterable[tuple[str | int, ...]], left: int = 1) -> str:
    """Rows of cells as aligned lines; the first `left` columns are text, the others numbers, perhaps written already."""
    rows = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (
        [*map(str.ljust, row[:left], widths[:left]), *map(str.rjust, row[left:], widths[left:])]
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)
