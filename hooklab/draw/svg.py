"""How every picture of matplotlib is drawn here: the same bytes each time, names as they are."""

import threading
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LOCK", "drawing", "shortened", "width_of"]

# The settings of matplotlib, warnings, a module of torchviz and the recursion limit belong to all threads.
LOCK = threading.RLock()


@contextmanager
def drawing() -> Iterator[None]:
    """Text stays text in the SVG: a `$` is no formula, and a browser has fonts for Chinese where matplotlib has none.

    Settings of the user's, for pictures of another kind, are put aside.
    """
    import matplotlib

    settings = {"svg.hashsalt": "hooklab", "svg.fonttype": "none", "text.parse_math": False, "font.size": 8}
    with LOCK, matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        warnings.filterwarnings("ignore", "Glyph")
        yield


def shortened(name: str, width: int) -> str:
    """At most `width` characters of a name, without its middle: the ends tell most layers apart."""
    return name if len(name) <= width else f"{name[: width // 3]}…{name[len(name) - width + width // 3 + 1 :]}"


def width_of(name: str) -> float:
    """In characters; a Chinese one takes the place of more."""
    return sum(1.65 if unicodedata.east_asian_width(one) in "WF" else 1 for one in name)
