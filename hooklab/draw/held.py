"""The picture behind `draw.memory`: bytes held after every event, over bands for the parts of the model."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hooklab.draw.colours import BLUE, GREY, ORANGE
from hooklab.draw.svg import new_figure, shortened, told_on_hover, width_of
from hooklab.saved.record import SavedTensors

__all__ = ["memory"]

MAX_NAME = 40  # characters above a band
LINE = 9  # points that a name which stands upright takes to the right
LETTER = 4.1  # points that a letter takes
WIDTH = 430  # points from the first event to the last


def memory(saved: SavedTensors, form: str) -> bytes:
    """A curve, a line where backward begins, and what is held at the most."""
    power = min(int(math.log2(max(*saved.held, 1)) / 10), 3)
    unit, name = 2 ** (10 * power), ("bytes", "KiB", "MiB", "GiB")[power]
    held = [0.0, *(nbytes / unit for nbytes in saved.held)]
    most = max(held)
    top = most * 1.12 or 1.0
    bands = list(_bands(_parts([module for module, _ in saved.events])))
    names = _names(bands, len(held) - 1)
    upright = max((len(text) for text, turned in names.values() if turned), default=2)
    with new_figure(7.5, 2.8 + upright * LETTER / 72, form) as (figure, out):
        axes = figure.subplots()
        for begin, end, part, shaded in bands:
            if (end - begin) * WIDTH >= len(held):  # thinner ones cannot be seen
                alpha = 0.12 if shaded else 0
                told_on_hover(axes.axvspan(begin, end, color=GREY, alpha=alpha, lw=0), ".".join(part))
        _write_names(axes, bands, names)
        axes.stairs(held[1:], range(len(held)), fill=True, color=BLUE, alpha=0.45)
        axes.stairs(held[1:], range(len(held)), color=BLUE, lw=1.2, baseline=None)
        _write_peak(axes, held, f"at most {most:.{2 if power else 0}f} {name}")
        first = next((i for i, (_, event) in enumerate(saved.events) if event == "freed"), None)
        if first is not None:
            axes.axvline(first, color=ORANGE, lw=1, ls="--", label="the first is freed")
            figure.legend(loc="outside lower right", frameon=False)
        axes.set_xlim(0, len(held) - 1)
        axes.set_ylim(0, top)
        axes.set_xlabel("event: one tensor saved or freed")
        axes.set_ylabel(f"{name} held for backward")
        axes.spines[["top", "right"]].set_visible(False)
    return out[0]


def _names(bands: list[tuple[int, int, tuple[str, ...], bool]], events: int) -> dict[int, tuple[str, bool]]:
    """What stands above each band, and whether it stands upright; narrow bands are told on hover alone."""
    names: dict[int, tuple[str, bool]] = {}
    written = -math.inf  # where the last name ends, in points
    for number, (begin, end, part, _) in enumerate(bands):
        text, room = shortened(".".join(part), MAX_NAME), (end - begin) / events * WIDTH
        middle = (begin + end) / 2 / events * WIDTH
        turned = width_of(text) * LETTER > room
        half = (LINE if turned else width_of(text) * LETTER) / 2
        if text and middle - half >= written:
            names[number] = text, turned
            written = middle + half
    return names


def _write_names(axes: Any, bands: list[tuple[int, int, tuple[str, ...], bool]], names: dict) -> None:
    for number, (text, turned) in names.items():
        begin, end, *_ = bands[number]
        axes.annotate(
            text, ((begin + end) / 2, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), fontsize=7,
            textcoords="offset points", ha="center", va="bottom", rotation=90 if turned else 0,
        )  # fmt: skip


def _write_peak(axes: Any, held: list[float], text: str) -> None:
    """At the highest point; before it, where the curve still rises, unless there is no room."""
    at = held.index(max(held))
    left = at > len(held) / 4
    axes.plot([at - 0.5], [max(held)], "o", ms=4, color=BLUE)
    axes.annotate(
        text, (at - 0.5, max(held)), xytext=(-5 if left else 5, 2), textcoords="offset points",
        ha="right" if left else "left", va="bottom", color=BLUE,
    )  # fmt: skip


def _parts(modules: list[str]) -> list[tuple[str, ...]]:
    """The part of the model that each lies in: as far down as it takes for none to have more than three quarters."""
    names = [tuple(module.split(".")) for module in modules]
    for depth in range(1, max(map(len, names)) + 1):
        parts = [name[:depth] for name in names]
        if max(Counter(parts).values()) <= len(parts) * 0.75:
            break
    return parts


def _bands(parts: list[tuple[str, ...]]) -> Iterator[tuple[int, int, tuple[str, ...], bool]]:
    """Stretches of equal names: begin, end, name, and every second one shaded."""
    begin, shaded = 0, False
    for end in range(1, len(parts) + 1):
        if end == len(parts) or parts[end] != parts[begin]:
            yield begin, end, parts[begin], shaded
            begin, shaded = end, not shaded
