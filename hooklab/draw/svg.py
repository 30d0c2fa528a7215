"""How every picture of matplotlib is drawn here: the same bytes each time, no ground, names as they are."""

import io
import re
import threading
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hooklab.draw.colours import FIGURES

__all__ = ["LOCK", "new_figure", "shortened", "told_on_hover", "width_of"]

# The settings of matplotlib, warnings, a module of torchviz and the recursion limit belong to all threads.
LOCK = threading.RLock()
TOLD = "hooklab tells: "
PNG_DPI = 200  # dots an inch: sharp in print and on dense screens


@contextmanager
def new_figure(width: float, height: float, form: str) -> Iterator[tuple[Any, list[bytes]]]:
    """A figure of this size in inches, and a list that afterwards holds it as `form`: `"svg"`, `"png"` or `"pdf"`.

    Text stays text: a `$` is no formula, and a browser has fonts for Chinese where matplotlib has none. Settings of the
    user's, for pictures of another kind, are put aside.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": "hooklab", "svg.fonttype": "none", "text.parse_math": False, "font.size": 8}
    with LOCK, matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings | FIGURES)
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure(figsize=(width, height), layout="constrained")
        done: list[bytes] = []
        yield figure, done
        out = io.BytesIO()
        undated = {} if form == "png" else {"CreationDate" if form == "pdf" else "Date": None}
        figure.savefig(out, format=form, metadata=undated, dpi=PNG_DPI if form == "png" else "figure")
    drawn = out.getvalue()
    done.append(_with_titles(drawn[drawn.index(b"<svg") :].strip()) if form == "svg" else drawn)


def told_on_hover(drawn: Any, name: str) -> None:
    """A browser that shows the SVG itself says `name` where the mouse is on what is drawn; a picture of it does not."""
    drawn.set_gid(TOLD + name)


def _with_titles(svg: bytes) -> bytes:
    """matplotlib has no titles for parts of a picture, but writes the `gid` of each as its id."""
    return re.sub(rb'<g id="' + TOLD.encode() + rb'([^"]*)">', rb"<g><title>\1</title>", svg)


def shortened(name: str, width: int) -> str:
    """At most `width` characters of a name, without its middle: the ends tell most layers apart."""
    return name if len(name) <= width else f"{name[: width // 3]}…{name[len(name) - width + width // 3 + 1 :]}"


def width_of(name: str) -> float:
    """In characters; a Chinese one takes the place of more."""
    return sum(1.65 if unicodedata.east_asian_width(one) in "WF" else 1 for one in name)
