"""Digits to learn from: drawn on this machine, so that nothing has to be downloaded."""

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["glyphs"]

# What matplotlib brings along that reads as text.
FONTS = [
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10"),
]
SHIFT, TURN = 1, 10  # pixels and degrees at most, to either side


def glyphs(count: int, size: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images of the digits 0 to 9 in twenty fonts, a little shifted and turned, and which digit each one is.

    Args:
        count: how many.
        size: height and width of an image, in pixels.
        seed: the same seed draws the same images.

    Returns:
        `images`, of shape (count, 1, size, size) and between 0 and 1, and `labels`, of shape (count,).

    Raises:
        ModuleNotFoundError: matplotlib, which has the fonts, is not installed.

    Example:
        >>> from hooklab import lesson
        >>> images, labels = lesson.glyphs(3)
        >>> images.shape
        torch.Size([3, 1, 16, 16])
        >>> labels
        tensor([4, 9, 3])
    """
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = [ImageFont.truetype(folder / f"{name}.ttf", round(0.9 * size)) for name in FONTS]
    generator = torch.Generator().manual_seed(seed)

    def choose(least: int, most: int) -> list[int]:
        return torch.randint(least, most + 1, (count,), generator=generator).tolist()

    digits, chosen = choose(0, 9), choose(0, len(fonts) - 1)
    across, down, turns = choose(-SHIFT, SHIFT), choose(-SHIFT, SHIFT), choose(-TURN, TURN)
    images = torch.zeros(count, 1, size, size)
    for number, digit in enumerate(digits):
        shift = across[number], down[number]
        images[number, 0] = _drawn(str(digit), fonts[chosen[number]], size, shift, turns[number])
    return images, torch.tensor(digits)


def _drawn(text: str, font, size: int, shift: tuple[int, int], turn: int) -> Tensor:
    """White on black; the shift is counted from where the middle of the text is the middle of the image."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (size, size))
    left, top, right, bottom = font.getbbox(text)
    corner = (size - left - right) // 2 + shift[0], (size - top - bottom) // 2 + shift[1]
    ImageDraw.Draw(image).text(corner, text, fill=255, font=font)
    pixels = bytearray(image.rotate(turn, Image.Resampling.BILINEAR).tobytes())
    return torch.frombuffer(pixels, dtype=torch.uint8).view(size, size) / 255
