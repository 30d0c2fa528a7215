"""One language alone in a notebook: for the website, for slides, and for what nbconvert makes, such as a page or a script.

    jupyter nbconvert --to html --HTMLExporter.preprocessors=hooklab.export.English notebooks/11_reading_gradients.ipynb

Source: [preprocessors](https://nbconvert.readthedocs.io/en/latest/nbconvert_library.html#Using-different-preprocessors).
"""

import re
from typing import Any, ClassVar

from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode

__all__ = ["LANGUAGES", "Chinese", "English", "OneLanguage"]

# `## 3 中文 · English`; code in a fence, whose lines may look like it, is matched first and left alone.
HEADING = re.compile(r"^(`{3,}|~{3,})[\s\S]*?^\1|^(#+ (?:[\d.]+ )?)(.+?) · (.+)$", re.MULTILINE)
CHINESE = re.compile(r"[\u4e00-\u9fff]")
# Begin, middle and end of a heading, of a table cell or the title of a link in it, and of a cell with two lines.
BILINGUAL = (
    (r"^(#+ |- \*\*\w+\*\*: )", " · ", "$"),
    (r"(\| \[?(?:\d\d )?)", " · ", r"\]| \|"),
    (r"(\| )", "<br>", r" \|"),
)
DIV = re.compile(r"<(/?)div\b[^>]*>\n*")


class OneLanguage(Preprocessor):
    """Leaves one language in prose, headings and messages; code and what it prints are for all."""

    other: ClassVar[str]  # the value of `lang` that goes
    language: ClassVar[str]  # of the page
    half: ClassVar[int]  # of a heading, the one that stays

    def preprocess(self, notebook: NotebookNode, resources: dict[str, Any]) -> tuple[NotebookNode, dict[str, Any]]:
        """The notebook in one language, and the resources with that language and the title in it."""
        title = HEADING.match(notebook.cells[0].source) if notebook.cells else None
        resources["language_code"] = self.language
        if title is not None and "metadata" in resources:
            resources["metadata"]["name"] = self._heading(title).lstrip("# ")
        return super().preprocess(notebook, resources)

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        """The cell without the other language, and the resources as they were."""
        if cell.cell_type == "markdown":
            cell.source = HEADING.sub(self._heading, self.without(cell.source))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" in data:
                data["text/html"] = self.without(data["text/html"])
        return cell, resources

    def _heading(self, found: re.Match[str]) -> str:
        fence, start, *halves = found.groups()
        bilingual = not fence and [bool(CHINESE.search(half)) for half in halves] == [True, False]
        return start + halves[self.half] if bilingual else found[0]

    def without(self, text: str) -> str:
        """`text` without the blocks in the other language."""
        kept, depth, end = "", 0, 0  # depth: of what goes
        for tag in DIV.finditer(text):
            if depth:
                depth += -1 if tag[1] else 1
                end = tag.end()
            elif tag[0].startswith(f'<div lang="{self.other}">'):
                kept += text[end : tag.start()]
                depth, end = 1, tag.end()
        if depth:  # a <div> in code, perhaps, that nothing ends
            return re.sub(rf'<div lang="{self.other}">.*?</div>\n*', "", text, flags=re.DOTALL)
        return kept + text[end:]

    def document(self, text: str) -> str:
        """A document in whose headings, paragraphs and table cells Chinese stands before ` · ` or `<br>`, English after it."""

        def paragraph(found: re.Match[str]) -> str:
            return found[1 + self.half].strip().replace("\n", " ") + "\n\n"

        text = re.sub(r"^([^|\n]*[\u4e00-\u9fff][^|\n]*)<br>\n([^|]+?)\n\n", paragraph, text, flags=re.MULTILINE)
        for begin, middle, end in BILINGUAL:
            pattern = rf"{begin}([^|\n]*?[\u4e00-\u9fff][^|\n]*?){middle}([^|\n]+?)(?={end})"
            text = re.sub(pattern, lambda found: found[1] + found[2 + self.half], text, flags=re.MULTILINE)
        return text


class Chinese(OneLanguage):
    """Without English."""

    other, half, language = "en", 0, "zh-CN"


class English(OneLanguage):
    """Without Chinese."""

    other, half, language = "zh", 1, "en"


LANGUAGES: dict[str, type[OneLanguage]] = {"zh": Chinese, "en": English}
