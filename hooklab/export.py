"""One language alone in what nbconvert makes of a notebook: slides, a page, a script.

    jupyter nbconvert --to slides --SlidesExporter.preprocessors=hooklab.export.English notebooks/11_reading_gradients.ipynb

Source: [preprocessors](https://nbconvert.readthedocs.io/en/latest/nbconvert_library.html#Using-different-preprocessors).
"""

import re
from typing import Any, ClassVar

from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode

__all__ = ["Chinese", "English"]

HEADING = re.compile(r"^(#+ (?:\d+ )?)(.+?) · (.+)$", re.MULTILINE)  # `## 3 中文 · English`


class OneLanguage(Preprocessor):
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
