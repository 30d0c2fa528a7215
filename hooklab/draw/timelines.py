"""The picture behind `draw.timeline`: time goes right, a row for each module, tensor and optimizer."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from hooklab._support.events import Event
from hooklab.draw.colours import BLUE, GREEN, GREY, ORANGE, RED
from hooklab.draw.svg import new_figure, shortened, width_of

__all__ = ["drawn", "facts", "sentence"]

MAX_ROWS = 30  # more cannot be read: deeper modules then share the row of the module around them
MAX_NAME = 56  # characters beside a row
MAX_LINES = 120  # more events are counted instead of listed
OUTSIDE = "outside the model"

PHASE_COLOURS = {"forward": BLUE, "backward": ORANGE, "recompute": GREEN, "step": GREY}
# Hollow before, filled after. The colours are those of the map in notebook 00.
STYLES = {
    "forward pre-hook": (">", BLUE, False),
    "forward hook": (">", BLUE, True),
    "forward raised": ("X", RED, True),
    "pack": ("v", GREEN, False),
    "unpack": ("^", GREEN, True),
    "Node pre-hook": ("<", ORANGE, False),
    "Node hook": ("<", ORANGE, True),
    "tensor hook": ("o", ORANGE, True),
    "retain_grad": ("s", ORANGE, False),
    "multi-grad hook": ("*", ORANGE, True),
    "post-accumulate-grad hook": ("D", ORANGE, True),
    "optimizer step pre-hook": ("d", GREY, False),
    "optimizer step post-hook": ("d", GREY, True),
}
BEGINS = ("forward pre-hook", "module backward begins")
ENDS = ("forward hook", "forward raised", "module backward ends")


def facts(events: list[Event], lines: list[str]) -> str:
    """The lines of the trace; of a long one how many events of each kind each phase has."""
    if len(events) <= MAX_LINES:
        return "\n".join(lines)
    counts = Counter((event.phase, event.kind) for event in events)
    return "\n".join(f"{phase:9} {kind:25} {count:5}" for (phase, kind), count in counts.items())


def sentence(events: list[Event]) -> str:
    """How many events each phase has."""
    counts = Counter(event.phase for event in events)
    return f"What fired when: {', '.join(f'{count:,} in {phase}' for phase, count in counts.items())}."


def drawn(events: list[Event], form: str) -> bytes:
    """The timeline, the same bytes for the same events."""
    events = _placed(events)
    if len({_row(event, len(event.inside)) for event in events}) > MAX_ROWS:
        events = _folded(events)
    depth = _depth_that_fits(events)
    rows = {label: row for row, label in enumerate(dict.fromkeys(_row(event, depth) for event in events))}
    with new_figure(9, 1.5 + 0.24 * len(rows), form) as (figure, out):
        axes = figure.subplots()
        _phases(axes, events, len(rows))
        _spans(axes, events, rows, depth)
        _marks(axes, events, rows, depth)
        axes.set_yticks(range(len(rows)), [_indented(label, events) for label in rows], family="monospace", ha="left")
        axes.tick_params(axis="y", length=0, pad=_label_width(rows, events))
        axes.set_ylim(len(rows) - 0.4, -1.3)
        axes.set_xlim(-1, len(events))
        axes.xaxis.set_major_formatter(lambda position, _: f"{position + 1:g}")  # as in the lines
        axes.set_xlabel("event, in the order in which they fired")
        axes.spines[["top", "right", "left"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return out[0]


def _placed(events: list[Event]) -> list[Event]:
    """A parameter's gradient in the row of its module, also where an earlier graph, still alive, has made its Node."""
    modules = {event.inside[-1]: event.inside for event in reversed(events) if event.inside}
    return [
        replace(event, inside=modules.get(event.where.rpartition(".")[0], ()))
        if event.kind == "post-accumulate-grad hook" and not event.inside
        else event
        for event in events
    ]


def _folded(events: list[Event]) -> list[Event]:
    """What a checkpoint recomputes, in the rows of the forward: it runs without the modules around it."""
    again = {event.inside[-1] for event in events if event.phase == "recompute" and event.inside}
    first = {event.inside[-1]: event.inside for event in events if event.phase == "forward" and event.inside}
    return [
        replace(event, inside=first.get(event.inside[-1].partition(" #")[0], event.inside))
        if event.inside and event.inside[-1] in again
        else event
        for event in events
    ]


def _depth_that_fits(events: list[Event]) -> int:
    depth = max((len(event.inside) for event in events), default=0)
    while depth > 1 and len({_row(event, depth) for event in events}) > MAX_ROWS:
        depth -= 1
    return depth


def _row(event: Event, depth: int) -> str:
    if event.inside:
        return event.inside[: max(depth, 1)][-1]
    own = event.phase == "step" or event.kind in (
        "tensor hook",
        "retain_grad",
        "multi-grad hook",
        "post-accumulate-grad hook",
    )
    return event.where if own else OUTSIDE


def _phases(axes: Any, events: list[Event], rows: int) -> None:
    start, written = 0, -math.inf  # where a phase begins, and where the last name ends
    for position, event in enumerate(events):
        last = position + 1 == len(events)
        if last or events[position + 1].phase != event.phase:
            band = ([(start - 0.5, position + 1 - start)], (-0.6, rows + 0.2))  # the name stands above it
            axes.broken_barh(*band, color=PHASE_COLOURS[event.phase], alpha=0.1, lw=0, zorder=0)
            middle, half = (start + position) / 2, 0.006 * len(events) * len(event.phase)
            # A name that would not fit is left to the colour.
            if position + 1 - start > 0.04 * len(events) and middle - half > written:
                axes.text(middle, -0.95, event.phase, ha="center", va="center")
                written = middle + half
            start = position + 1


def _spans(axes: Any, events: list[Event], rows: dict[str, int], depth: int) -> None:
    """A bar while a module's forward or backward is running."""
    begun: dict[str, list[int]] = {}
    for position, event in enumerate(events):
        if len(event.inside) > max(depth, 1):
            continue
        if event.kind in BEGINS:
            begun.setdefault(event.where, []).append(position)
        elif event.kind in ENDS and begun.get(event.where):
            start = begun[event.where].pop()
            colour = BLUE if event.kind.startswith("forward") else ORANGE
            axes.plot(
                [start, position],
                [rows[_row(event, depth)]] * 2,
                color=colour,
                alpha=0.2,
                lw=7,
                solid_capstyle="butt",
            )


def _marks(axes: Any, events: list[Event], rows: dict[str, int], depth: int) -> None:
    for kind, (marker, colour, filled) in STYLES.items():
        at = [(position, rows[_row(event, depth)]) for position, event in enumerate(events) if event.kind == kind]
        if at:
            size = 5 if len(events) < 150 else 3
            face = colour if filled else "none"
            axes.plot(*zip(*at, strict=True), marker, ms=size, color=colour, mfc=face, mew=0.9, label=kind, zorder=3)


def _indented(label: str, events: list[Event]) -> str:
    depth = next((event.inside.index(label) for event in events if label in event.inside), 0)
    return "\u00a0\u00a0" * depth + shortened(label, MAX_NAME)  # SVG drops plain leading spaces


def _label_width(rows: dict[str, int], events: list[Event]) -> float:
    return 4.9 * max(width_of(_indented(label, events)) for label in rows) + 4
