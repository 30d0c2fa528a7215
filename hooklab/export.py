"""Slides on which nothing is cut off, and one language alone in what nbconvert makes of a notebook: slides, a page, a script.

    jupyter nbconvert --to slides --SlidesExporter.preprocessors=hooklab.export.English notebooks/11_reading_gradients.ipynb

Source: [preprocessors](https://nbconvert.readthedocs.io/en/latest/nbconvert_library.html#Using-different-preprocessors).
"""

import re
from typing import Any, ClassVar

from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode

__all__ = ["Both", "Chinese", "English"]

HEADING = re.compile(r"^(#+ (?:\d+ )?)(.+?) · (.+)$", re.MULTILINE)  # `## 3 中文 · English`

# A slide that is longer than the screen scrolls, and a long line of code wraps: nbconvert's own page cuts both off.
STYLE = """

<style>
.reveal .slides section section { max-height: 100%; overflow: hidden auto; box-sizing: border-box; }
.reveal .jp-InputArea-editor pre { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>"""


class Both(Preprocessor):
    """Both languages, as they are; slides get a style of their own."""

    def preprocess(
        self, notebook: NotebookNode, resources: dict[str, Any]
    ) -> tuple[NotebookNode, dict[str, Any]]:
        """The notebook for its exporter, and the resources as they were."""
        notebook, resources = super().preprocess(notebook, resources)
        prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
        if prose and resources.get("output_extension") == ".slides.html":
            prose[0].source += STYLE
        return notebook, resources

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        """The cell and the resources as they were."""
        return cell, resources


class OneLanguage(Both):
    """Leaves one language in prose, headings and messages; code and what it prints are for all."""

    other: ClassVar[str]  # the value of `lang` that goes
    title: ClassVar[str]  # what stays of a heading

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        """The cell without the other language, and the resources as they were."""
        if cell.cell_type == "markdown":
            cell.source = HEADING.sub(self.title, self._without(cell.source))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" in data:
                data["text/html"] = self._without(data["text/html"])
        return cell, resources

    def _without(self, text: str) -> str:
        return re.sub(rf'<div lang="{self.other}">.*?</div>\n*', "", text, flags=re.DOTALL)


class Chinese(OneLanguage):
    """Without English."""

    other, title = "en", r"\1\2"


class English(OneLanguage):
    """Without Chinese."""

    other, title = "zh", r"\1\3"
