"""How every picture of matplotlib is drawn here: the same bytes each time, names as they are."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["drawing", "shortened"]


@contextmanager
def drawing() -> Iterator[None]:
    """Text stays text in the SVG: a `$` is no formula, and a browser has fonts for Chinese where matplotlib has none."""
    import matplotlib

    settings = {"svg.hashsalt": "hooklab", "svg.fonttype": "none", "text.parse_math": False, "font.size": 8}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        yield


def shortened(name: str, width: int) -> str:
    """At most `width` characters of a name, without its middle: the ends tell most layers apart."""
    return (
        name if len(name) <= width else f"{name[: width // 3]}…{name[len(name) - width + width // 3 + 1 :]}"
    )
