"""The picture behind `draw.gradient_flow`: a row for each layer, and its facts."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from hooklab.draw.colours import BLUE, GREY, ORANGE, RED
from hooklab.draw.svg import new_figure, shortened, told_on_hover
from hooklab.layers.streaming import Statistics

__all__ = ["gradient_flow", "gradient_flow_facts"]

MAX_NAME = 48  # characters beside a row
ROW, SMALL_ROW = 0.2, 0.11  # inches: up to so many layers rows have their full height, then less
MAX_LABELS = 60
MAX_HEIGHT = 24.0  # inches; beyond it not every row has its name beside it


def _rms(layer: Statistics) -> float:
    """The root of the mean square: the usual size of an entry."""
    if math.isnan(layer.mean) or layer.count < 1:
        return math.nan
    finite = layer.count - layer.nans - layer.infs
    spread = layer.std * math.sqrt((finite - 1) / finite) if finite > 1 else 0.0
    return math.hypot(layer.mean, spread)


def gradient_flow_facts(stats: dict[str, Statistics], kind: str) -> str:
    """A line for each layer or parameter: name, root mean square, largest absolute entry."""
    width = max(len(kind), *map(len, stats))
    lines = [f"{kind:{width}}  {'rms':>7}  {'max':>7}"]
    for name, layer in stats.items():
        if not layer.count:
            lines.append(f"{name:{width}}  {'-':>7}  {'-':>7}  no gradient")
            continue
        largest = max(abs(layer.min), abs(layer.max))
        bad = f"  {layer.nans} NaN, {layer.infs} inf" if layer.nans or layer.infs else ""
        lines.append(f"{name:{width}}  {_rms(layer):7.1e}  {largest:7.1e}{bad}")
    return "\n".join(lines)


def gradient_flow(kind: str, stats: dict[str, Statistics], form: str) -> bytes:
    """A row for each layer or parameter, the first on top: a dot for the root mean square, a mark for the largest entry."""
    above_zero = [size for size in map(_rms, stats.values()) if size > 0 and math.isfinite(size)]
    floor = 10 ** math.floor(math.log10(min(above_zero)) - 0.3) if above_zero else 1e-8
    from matplotlib.ticker import LogFormatter

    height = ROW if len(stats) <= MAX_LABELS else max(SMALL_ROW, ROW * MAX_LABELS / len(stats))
    with new_figure(7.5, 1.1 + min(height * len(stats), MAX_HEIGHT), form) as (figure, out):
        axes = figure.subplots()
        _sizes(axes, stats)
        step = math.ceil(SMALL_ROW * len(stats) / MAX_HEIGHT)
        for first, last, remark in _runs(list(map(_remark, stats.values())), 1 if height == ROW else len(stats)):
            many = f": {last - first + 1} {kind}s" if last > first else ""
            axes.annotate(
                remark + many, (floor, (first + last) / 2), xytext=(6, 0), textcoords="offset points",
                va="center", fontsize=7, color=RED,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())  # 1e-05: the usual one writes formulas
        axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
        axes.grid(axis="x", color=GREY, alpha=0.25)
        axes.set_xlim(left=floor * 0.8)
        labels = [shortened(name, MAX_NAME) for name in list(stats)[::step]]
        size = min(8, max(1.0, 72 * height * step * 0.85))
        axes.set_yticks(range(0, len(stats), step), labels, family="monospace", fontsize=size)
        axes.set_ylim(len(stats) - 0.4, -0.6)
        of = "layer's output" if kind == "layer" else kind
        left_out = f"; one row in {step} is named, all of them in .facts" if step > 1 else ""
        axes.set_xlabel(f"gradient with respect to the {of}{left_out}")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return out[0]


def _sizes(axes: Any, stats: dict[str, Statistics]) -> None:
    """What holds other layers returns what the last of them returns: it stays out of the line through the layers."""
    sizes = {row: _rms(layer) for row, layer in enumerate(stats.values())}
    largest = {row: max(abs(layer.min), abs(layer.max)) for row, layer in enumerate(stats.values())}
    inside = {row for row, name in enumerate(stats) if _holds_others(name, stats)}
    for values, rows, mark, colour, label in (
        (sizes, sizes.keys() - inside, "o-", BLUE, "root mean square"),
        (sizes, inside, "s", GREY, "that of a module with layers inside"),
        (largest, sizes.keys(), "|", ORANGE, "largest |entry|"),
    ):
        if rows:
            shown = [values[row] if values[row] > 0 else math.nan for row in sorted(rows)]
            face = "none" if colour == GREY else colour
            axes.plot(shown, sorted(rows), mark, color=colour, mfc=face, ms=5, lw=1, mew=1.5, label=label)
    for row, name in enumerate(stats):
        told_on_hover(axes.axhspan(row - 0.5, row + 0.5, color=GREY, alpha=0, lw=0), name)


def _holds_others(name: str, names: Iterable[str]) -> bool:
    start = "" if name == repr("") else f"{name}."  # '' is the model itself
    return any(other.startswith(start) and other != name for other in names)


def _remark(layer: Statistics) -> str:
    if not layer.count:
        return "no gradient"
    if layer.nans + layer.infs:
        return "NaN or inf"
    return "all 0" if layer.min == layer.max == 0 else ""


def _runs(remarks: list[str], longest: int) -> Iterator[tuple[int, int, str]]:
    """First and last row of equal remarks one under the other."""
    first = 0
    for row, remark in enumerate(remarks):
        if row + 1 == len(remarks) or remarks[row + 1] != remark or row + 1 - first == longest:
            if remark:
                yield first, row, remark
            first = row + 1
