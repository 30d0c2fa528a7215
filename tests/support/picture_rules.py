"""What every picture keeps to: it has no ground of its own, and its lines and letters read on white and on black.

A letter needs a contrast of 4.5, a line 3, as WCAG 2.2 counts it. No one colour reaches 4.5 on both grounds, so on the
black of JupyterLab's dark theme a letter may have 4.1; one that stands in a filled box is measured against that box.
"""

import io
import re
from collections.abc import Iterator
from xml.etree import ElementTree

import numpy
from matplotlib import colors, image

GROUNDS = {"#ffffff": 4.5, "#111111": 4.1}  # and the least contrast of a letter
LINE = 3  # the least contrast of a line or an area
SHAPES = {"circle", "line", "path", "polygon", "polyline", "rect", "use"}
INHERITED = ("fill", "stroke", "opacity", "fill-opacity", "stroke-opacity")
Box = tuple[float, float, float, float]


def contrast(one, other) -> float:
    darker, brighter = sorted(map(_luminance, (one, other)))
    return (brighter + 0.05) / (darker + 0.05)


def svg_problems(svg: str) -> Iterator[str]:
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    boxes: list[tuple[Box, str]] = []  # filled ones, in which text may stand
    for element, style in _styled(root, {}):
        kind = element.tag.rpartition("}")[2]
        if kind == "text":
            yield from _text_problems(element, style.get("fill", "black"), boxes)
        if kind not in SHAPES:
            continue
        fill, stroke = _colour(style, "fill", "black"), _colour(style, "stroke", "none")
        box = _box(element)
        if fill and box:
            boxes.append((box, fill))
            if (box[2] - box[0]) * (box[3] - box[1]) > width * height / 2:
                yield f"a ground of its own, in {fill}"
        if seen := stroke or fill:
            yield from _too_weak(f"a {kind}", seen, dict.fromkeys(GROUNDS, LINE))


def png_problems(png: bytes) -> Iterator[str]:
    pixels = image.imread(io.BytesIO(png))
    if pixels.shape[-1] < 4 or pixels[[0, 0, -1, -1], [0, -1, 0, -1], 3].any():
        yield "a ground of its own"
        return
    for colour in numpy.unique(pixels[pixels[..., 3] == 1][:, :3], axis=0):
        yield from _too_weak("a line", colors.to_hex(colour), dict.fromkeys(GROUNDS, LINE))


def _luminance(colour) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colors.to_rgb(colour)]
    return float(numpy.dot([0.2126, 0.7152, 0.0722], linear))


def _too_weak(what: str, colour: str, grounds: dict[str, float]) -> Iterator[str]:
    for ground, least in grounds.items():
        if (found := contrast(colour, ground)) < least:
            yield f"{what} in {colour}: a contrast of {found:.1f} on {ground}, at least {least}"


def _styled(element, inherited: dict[str, str]) -> Iterator[tuple]:
    """Every element that is drawn, with its colours."""
    css = dict(re.findall(r"([\w-]+): *([^;]+)", element.get("style", "")))
    style = inherited | {name: (css | element.attrib)[name] for name in INHERITED if name in css | element.attrib}
    yield element, style
    for child in element:
        if not child.tag.endswith("defs"):  # what is drawn only where it is used, in the colours that are given there
            yield from _styled(child, style)


def _colour(style: dict[str, str], name: str, default: str) -> str | None:
    """None for a tint: what is mostly transparent shades what is behind it."""
    opacity = float(style.get("opacity", 1)) * float(style.get(f"{name}-opacity", 1))
    colour = style.get(name, default)
    return None if colour == "none" or opacity < 0.5 else colour


def _box(element) -> Box | None:
    """Left, top, right, bottom of a shape with corners or of a circle."""
    numbers = {name: float(element.get(name, 0)) for name in ("x", "y", "cx", "cy", "r")}
    if element.tag.endswith("rect"):
        left, top = numbers["x"], numbers["y"]
        return left, top, left + float(element.get("width")), top + float(element.get("height"))
    if element.tag.endswith("circle"):
        x, y, r = (numbers[name] for name in ("cx", "cy", "r"))
        return x - r, y - r, x + r, y + r
    corners = element.get("points") or element.get("d") or ""
    if not corners or re.search(r"[^MLz\d\s.,-]", corners):
        return None
    points = [float(number) for number in re.findall(r"-?[\d.]+", corners)]
    return min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])


def _text_problems(text, fill: str, boxes: list[tuple[Box, str]]) -> Iterator[str]:
    x, y = float(text.get("x", 0)), float(text.get("y", 0))
    around = [colour for (left, top, right, bottom), colour in boxes if left <= x <= right and top <= y <= bottom]
    yield from _too_weak(f"{text.text!r}", fill, {around[-1]: 4.5} if around else GROUNDS)
