"""The pictures behind `draw.gradient_flow`, `activations`, `feature_maps` and `memory`, as SVG, and their facts."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hooklab.draw.colours import BLUE, GREY, ORANGE, RED
from hooklab.draw.svg import new_figure, shortened
from hooklab.layers.streaming import Statistics, short
from hooklab.saved.record import SavedTensors

__all__ = [
    "activations",
    "activations_facts",
    "feature_maps",
    "feature_maps_facts",
    "gradient_flow",
    "gradient_flow_facts",
    "memory",
    "shown_maps",
]

MAX_LABELS = 60  # layer names that can be read under each other
COLUMNS = 3  # of heat maps
MAX_HEAT_MAPS = 60
MAX_TITLE = 36  # characters above a heat map
MAX_NAME = 48  # beside a row
MAPS = 64  # of one tensor
MAX_CELLS = 200, 110  # of a heat map, to the right and up: a page shows no more, and leaves out the rest
MAX_PIXELS = 800, 540  # of a mosaic


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


def gradient_flow(stats: dict[str, Statistics], kind: str) -> str:
    """A row for each layer or parameter, first on top: a dot for the root mean square, a mark for the largest entry."""
    names = list(stats)
    sizes = [_rms(layer) for layer in stats.values()]
    largest = [max(abs(layer.min), abs(layer.max)) for layer in stats.values()]
    above_zero = [size for size in sizes if size > 0 and math.isfinite(size)]
    floor = 10 ** math.floor(math.log10(min(above_zero)) - 0.3) if above_zero else 1e-8
    from matplotlib.ticker import LogFormatter

    step = math.ceil(len(names) / MAX_LABELS)
    with new_figure(7.5, 1.1 + min(0.2 * len(names), 12)) as (figure, out):
        axes = figure.subplots()
        for values, mark, colour, label in (
            (sizes, "o-", BLUE, "root mean square"), (largest, "|", ORANGE, "largest |entry|"),
        ):  # fmt: skip
            shown = [value if value > 0 else math.nan for value in values]
            axes.plot(shown, range(len(names)), mark, color=colour, ms=5, lw=1, mew=1.5, label=label)
        for first, last, remark in _runs(list(map(_remark, stats.values())), 1 if step == 1 else len(names)):
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
        labels = [shortened(name, MAX_NAME) for name in names[::step]]
        axes.set_yticks(range(0, len(names), step), labels, family="monospace")
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel("gradient with respect to the " + ("layer's output" if kind == "layer" else kind))
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return out[0]


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


def activations(stats: dict[str, Statistics]) -> str:
    """A heat map for each layer: calls go right, values up; the stronger the colour, the more entries (by the square root)."""
    names = list(stats)[:MAX_HEAT_MAPS]
    columns = min(COLUMNS, len(names))
    lines = math.ceil(len(names) / columns)
    with new_figure(2.9 * columns + 0.6, 1.75 * lines + 0.4) as (figure, out):
        grid = figure.subplots(
            lines, columns, squeeze=False, sharey=len({layer.range for layer in stats.values()}) == 1
        )
        for axes, name in zip(grid.flat, names, strict=False):
            _heat_map(axes, name, stats[name])
        for axes in list(grid.flat)[len(names) :]:
            axes.set_visible(False)
        figure.supxlabel("call", fontsize=8)
        figure.supylabel("value", fontsize=8)
    return out[0]


def _heat_map(axes: Any, name: str, layer: Any) -> None:
    low, high = layer.range
    history = layer.history.double()[None]
    size = [min(number, most) for number, most in zip(history.shape[1:], MAX_CELLS, strict=True)]
    # The average of neighbours leaves out no call and no bin.
    shade = F.adaptive_avg_pool2d(history, (size[0], size[1]))[0].sqrt().T.tolist()
    from matplotlib.colors import LinearSegmentedColormap

    blues = LinearSegmentedColormap.from_list("from nothing to blue", [(BLUE, 0), BLUE])
    axes.imshow(
        shade, aspect="auto", origin="lower", cmap=blues, interpolation="none", vmin=0,
        extent=(0.5, layer.calls + 0.5, low, high),
    )  # fmt: skip
    axes.set_title(shortened(name, MAX_TITLE), fontsize=8, family="monospace")
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=5, min_n_ticks=1)


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


def feature_maps(maps: Tensor) -> str:
    """The maps as one mosaic, each stretched from its own minimum (dark) to its own maximum (bright)."""
    number = len(maps)
    # One row, or as many columns as leave the fewest places empty.
    columns = number if number <= 8 else min(range(8, 13), key=lambda columns: (-number % columns, columns))
    lines = math.ceil(number / columns)
    maps = _shrunk(maps, (MAX_PIXELS[1] / lines, MAX_PIXELS[0] / columns))
    height, width = maps.shape[1:]
    gap_y, gap_x = max(1, height // 16), max(1, width // 16)
    canvas = torch.full((lines * (height + gap_y) - gap_y, columns * (width + gap_x) - gap_x), math.nan, device="cpu")
    for index, values in enumerate(maps):
        known = values[~values.isnan()]
        low, high = (known.min(), known.max()) if known.numel() else (0.0, 0.0)
        top, left = index // columns * (height + gap_y), index % columns * (width + gap_x)
        canvas[top : top + height, left : left + width] = (values - low) / (high - low) if high > low else values * 0
    tall = canvas.shape[0] / canvas.shape[1]
    wide = max(0.5, min(9.0, max(2.0, canvas.shape[1] / 24), 6.0 / tall))
    # Square pixels, unless the picture would be a line.
    aspect = "equal" if 1 / 40 < tall < 40 else "auto"
    with new_figure(wide, min(6.0, max(0.5, wide * tall))) as (figure, out):
        axes = figure.subplots()
        axes.imshow(canvas.tolist(), cmap="viridis", interpolation="none", vmin=0, vmax=1, aspect=aspect)
        axes.set_axis_off()
    return out[0]


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


def memory(saved: SavedTensors) -> str:
    """Bytes held after every event, over bands for the parts of the model; where backward begins, a line."""
    power = min(int(math.log2(max(*saved.held, 1)) / 10), 3)
    unit, name = 2 ** (10 * power), ("bytes", "KiB", "MiB", "GiB")[power]
    held = [0.0, *(nbytes / unit for nbytes in saved.held)]
    top = max(held) * 1.18 or 1.0
    with new_figure(7.5, 3.0) as (figure, out):
        axes = figure.subplots()
        bands = list(_bands(_parts([module for module, _ in saved.events])))
        shades = [(begin, end - begin) for begin, end, _, shaded in bands if shaded]
        axes.broken_barh(shades, (0, top * 0.91), color=GREY, alpha=0.12, lw=0)
        for begin, end, part, _ in bands:
            if end - begin > len(held) * 0.009 * (len(part[-1]) + 1):
                axes.text((begin + end) / 2, top * 0.93, part[-1], ha="center", fontsize=7)
        axes.stairs(held[1:], range(len(held)), fill=True, color=BLUE, alpha=0.45)
        axes.stairs(held[1:], range(len(held)), color=BLUE, lw=1.2, baseline=None)
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
