"""What every call of `draw` returns: a picture with its facts, which a notebook shows and a file can hold."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hooklab.draw.graphviz import NotDrawn

__all__ = ["Picture"]

FORMS = "svg", "png", "pdf"


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture as the last line of a notebook cell; without one, its facts and the reason.

    Attributes:
        facts: what the picture shows, as text that is the same in every run.
        svg: the picture, without a ground of its own, or None when it could not be drawn.
        reason: why it could not be drawn, and what to do; empty when it was.
        alt: the picture in one sentence, for those who cannot see it.
    """

    facts: str
    svg: str | None = None
    reason: str = ""
    alt: str = ""
    _draw: Callable[[str], bytes] | None = field(default=None, compare=False)

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file: `.svg` as the notebook shows it, or the same as `.png` or `.pdf`.

        Args:
            path: ends with `.svg`, `.png` or `.pdf`. A file that stands there is replaced.

        Returns:
            The path. The picture has no ground of its own there either.

        Raises:
            ValueError: another ending, or there is no picture; nothing has been written.
            RuntimeError: what draws the file is not installed; nothing has been written.

        Example:
            >>> import torch, tempfile
            >>> from hooklab import draw
            >>> picture = draw.feature_maps(torch.rand(4, 8, 8))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     picture.save(f"{folder}/maps.png").name
            'maps.png'

        Limits: docs/limits.md#draw.
        """
        path = Path(path)
        form = path.suffix.removeprefix(".").lower()
        if form not in FORMS:
            raise ValueError(f"save: found {path.name!r}, expected a name that ends with .svg, .png or .pdf")
        if not self.svg:
            raise ValueError(f"save: there is no picture to write ({self.reason}); its text is in `.facts`")
        path.write_bytes(self.svg.encode() if form == "svg" else self._drawn_again(form))
        return path

    def _drawn_again(self, form: str) -> bytes:
        if self._draw is None:
            raise ValueError(f"save: this picture was made from SVG alone, so it has no {form}; save it as .svg")
        try:
            return self._draw(form)
        except (ImportError, NotDrawn) as error:
            raise RuntimeError(f"save: no {form} can be drawn here ({error}); save it as .svg") from None

    def __str__(self) -> str:
        return f"{self.facts}\n({self.reason})" if self.reason else self.facts

    __repr__ = __str__

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict, dict]:
        text = {"text/plain": str(self)}
        if not self.svg:
            return text, {}
        return text | {"image/svg+xml": self.svg}, {"image/svg+xml": {"alt": self.alt}}
