"""The pictures behind `draw.activations` and `feature_maps`, and their facts."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hooklab.draw.colours import BLUE, RED
from hooklab.draw.svg import new_figure, shortened
from hooklab.layers.streaming import Statistics, short

__all__ = [
    "activations",
    "activations_facts",
    "feature_maps",
    "feature_maps_facts",
    "shown_maps",
]

COLUMNS = 3  # of heat maps
MAX_HEAT_MAPS = 60
MAX_TITLE = 36  # characters above a heat map
MAPS = 64  # of one tensor
MAX_CELLS = 200, 110  # of a heat map, to the right and up: a page shows no more, and leaves out the rest
MAX_PIXELS = 800, 540  # of a mosaic
NUMBER = 8  # points that the number of a map takes


def activations_facts(stats: dict[str, Statistics]) -> str:
    """A line for each layer: name, calls, mean, std, and the shares that are zero, below and above the range."""
    width = max(5, *map(len, stats))
    lines = [f"{'layer':{width}}  {'calls':>5}  {'mean':>8}  {'std':>8}  {'zeros':>6}  {'below':>6}  {'above':>6}"]
    for name, layer in stats.items():
        outside = layer.below, layer.above
        shares = (
            layer.zeros,
            *(number / layer.count if layer.count else math.nan for number in outside),
        )
        cells = [
            f"{short(layer.mean):>8}",
            f"{short(layer.std):>8}",
            *(f"{'-' if math.isnan(share) else f'{share:.1%}':>6}" for share in shares),
        ]
        lines.append(f"{name:{width}}  {layer.calls:5}  " + "  ".join(cells))
    if len(stats) > MAX_HEAT_MAPS:
        lines.append(f"drawn: the first {MAX_HEAT_MAPS} of {len(stats)} layers; choose fewer for the others")
    return "\n".join(lines)


def activations(stats: dict[str, Statistics], form: str) -> bytes:
    """A heat map for each layer: calls go right, values up; the stronger the colour, the more entries."""
    names = list(stats)[:MAX_HEAT_MAPS]
    columns = min(COLUMNS, len(names))
    lines = math.ceil(len(names) / columns)
    with new_figure(2.9 * columns + 0.6, 1.75 * lines + 0.8, form) as (figure, out):
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, name in zip(grid.flat, names, strict=False):
            scale = _heat_map(axes, name, stats[name])
        for axes in list(grid.flat)[len(names) :]:
            axes.set_visible(False)
        bar = figure.colorbar(
            scale, ax=list(grid.flat), location="top", ticks=[0, 0.01, 0.1, 0.5, 1], format="{x:.0%}",
            shrink=min(1.0, 1.8 / columns), aspect=40, label="entries, as a share of the fullest field of the layer",
        )  # fmt: skip
        bar.outline.set_linewidth(0.5)
        figure.supxlabel("call", fontsize=8)
        figure.supylabel("value", fontsize=8)
    return out[0]


def _heat_map(axes: Any, name: str, layer: Any) -> Any:
    """Over the bins that have entries, not over the whole range; what lies outside the range is written in."""
    low, high = layer.range
    bins = [number for number, entries in enumerate(layer.histogram) if entries] or [0, len(layer.histogram) - 1]
    width = (high - low) / len(layer.histogram)
    low, high = low + bins[0] * width, low + (bins[-1] + 1) * width
    history = layer.history.double()[None, :, bins[0] : bins[-1] + 1]
    size = [min(number, most) for number, most in zip(history.shape[1:], MAX_CELLS, strict=True)]
    # The average of neighbours leaves out no call and no bin.
    shade = F.adaptive_avg_pool2d(history, (size[0], size[1]))[0].T
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    blues = LinearSegmentedColormap.from_list("from nothing to blue", [(BLUE, 0), BLUE])
    scale = axes.imshow(
        (shade / shade.max().clamp(min=1e-300)).tolist(), aspect="auto", origin="lower", cmap=blues,
        interpolation="none", norm=PowerNorm(0.5, 0, 1), extent=(0.5, layer.calls + 0.5, low, high),
    )  # fmt: skip
    axes.set_title(shortened(name, MAX_TITLE), fontsize=8, family="monospace")
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=5, min_n_ticks=1)
    _write_outside(axes, layer, low, high)
    return scale


def _write_outside(axes: Any, layer: Any, low: float, high: float) -> None:
    """What share lies above or below the range and how far, at the side where it lies, clear of the map."""
    room = (high - low) * 0.18
    if layer.above:
        axes.set_ylim(top=high + room)
        words = f"{layer.above / layer.count:.1%} above {layer.range[1]:g}, up to {layer.max:.3g}"
        axes.text(0.5, 0.97, words, transform=axes.transAxes, ha="center", va="top", fontsize=6.5, color=RED)
    if layer.below:
        axes.set_ylim(bottom=low - room)
        words = f"{layer.below / layer.count:.1%} below {layer.range[0]:g}, down to {layer.min:.3g}"
        axes.text(0.5, 0.03, words, transform=axes.transAxes, ha="center", va="bottom", fontsize=6.5, color=RED)


def shown_maps(tensor: Tensor) -> Tensor:
    """The maps that are drawn: (maps, height, width), the first 64 of the first image."""
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    tensor = tensor.abs() if tensor.is_complex() else tensor
    while tensor.dim() > 3:
        tensor = tensor[0]
    tensor = tensor[None] if tensor.dim() == 2 else tensor
    return tensor[:MAPS].to("cpu", torch.float64)


def feature_maps_facts(maps: Tensor, channels: int) -> str:
    """What is shown, the range of values, and how many maps are the same everywhere."""
    flat = sum(bool((one == one.flatten()[0]).all()) for one in maps)
    finite = maps[maps.isfinite()]
    spread = "no finite value"
    if finite.numel():
        spread = f"values from {short(finite.min().item())} to {short(finite.max().item())}"
    bad = f"; NaN or infinite: {maps.numel() - finite.numel()}" if finite.numel() < maps.numel() else ""
    return (
        f"{len(maps)} of {channels} maps, {maps.shape[1]} x {maps.shape[2]}; {spread}{bad}; the same everywhere: {flat}"
    )


def feature_maps(maps: Tensor, form: str) -> bytes:
    """The maps as one mosaic, each stretched from its own minimum (dark) to its own maximum (bright), under its number."""
    number = len(maps)
    # One row, or as many columns as leave the fewest places empty.
    columns = number if number <= 8 else min(range(8, 13), key=lambda columns: (-number % columns, columns))
    lines = math.ceil(number / columns)
    maps = _shrunk(maps, (MAX_PIXELS[1] / lines - 14, MAX_PIXELS[0] / columns))
    if number > 1:  # lines side by side: each as wide as it takes to see it beside its number
        maps = _at_most_6_to_1(maps)
    height, width = maps.shape[1:]
    gap_y, gap_x = max(1, height // 16), max(1, width // 16)
    points = _size(lines * (height + gap_y) - gap_y, columns * (width + gap_x) - gap_x)[1] * 72
    # Room for a number; how many points a pixel has is known once the picture has its size.
    gap_y = max(gap_y, math.ceil(NUMBER * (lines * (height + gap_y) - gap_y) / max(1.0, points - NUMBER * lines)))
    canvas = torch.full((lines * (height + gap_y) - gap_y, columns * (width + gap_x) - gap_x), math.nan, device="cpu")
    places = [(index // columns * (height + gap_y), index % columns * (width + gap_x)) for index in range(number)]
    for values, (top, left) in zip(maps, places, strict=True):
        known = values[~values.isnan()]
        low, high = (known.min(), known.max()) if known.numel() else (0.0, 0.0)
        canvas[top : top + height, left : left + width] = (values - low) / (high - low) if high > low else values * 0
    tall = canvas.shape[0] / canvas.shape[1]
    wide, high_inches = _size(*canvas.shape)
    # Square pixels, unless the picture would be a line.
    aspect = "equal" if 1 / 40 < tall < 40 else "auto"
    with new_figure(wide, high_inches + NUMBER / 72, form) as (figure, out):
        axes = figure.subplots()
        axes.imshow(canvas.tolist(), cmap="viridis", interpolation="none", vmin=0, vmax=1, aspect=aspect)
        for channel, (top, left) in enumerate(places):
            axes.annotate(
                str(channel), (left - 0.5, top - 0.5), xytext=(0, 1), textcoords="offset points",
                fontsize=6, annotation_clip=False,
            )  # fmt: skip
        axes.set_axis_off()
    return out[0]


def _at_most_6_to_1(maps: Tensor) -> Tensor:
    height, width = maps.shape[1:]
    down, right = math.ceil(width / 6 / height), math.ceil(height / 6 / width)
    return maps.repeat_interleave(down, 1).repeat_interleave(right, 2)


def _size(height: int, width: int) -> tuple[float, float]:
    """Of a mosaic in inches, to the right and down."""
    tall = height / width
    wide = max(0.5, min(9.0, max(2.0, width / 24), 6.0 / tall))
    return wide, min(6.0, max(0.5, wide * tall))


def _shrunk(maps: Tensor, room: tuple[float, float]) -> Tensor:
    """What is not finite as NaN; and maps that are too large for their place averaged: no pixel is left out.

    A line may be drawn without square pixels: its short side stays as it is.
    """
    maps = torch.where(maps.isfinite(), maps, math.nan)
    height, width = maps.shape[1:]
    tall, wide = math.ceil(height / room[0]), math.ceil(width / room[1])
    if 1 / 40 < height / width < 40:  # drawn with square pixels
        tall = wide = max(tall, wide)
    maps = F.pad(maps, (0, -width % wide, 0, -height % tall), value=math.nan)
    return maps.unflatten(2, (-1, wide)).unflatten(1, (-1, tall)).nanmean((2, 4))
