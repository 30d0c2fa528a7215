"""A notebook in one language as slides: `columns(path, "en")`, a column for each section.

The notebook says where a column and a slide begin (`slideshow` in the metadata of its cells). Here is what makes a lecture of
it: the code that a guess is about stands below the question, and what it shows comes on the next slide, with the explanation.
Cells for a learner at a keyboard stay away: set-up, checks, assertions, solutions. What is too long is cut in slides.js.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import nbformat
import yaml
from nbformat import NotebookNode
from pieces import Pieces
from shown_code import ShownCode

from hooklab.course import check
from hooklab.export import LANGUAGES

HERE = Path(__file__).resolve().parent
NOTES = HERE.parent / "teaching" / "notes"
LEFT_OUT = {"setup", "solution", "lab-only"}
ASKS = re.compile(r"^.*\*\*(?:先猜|Predict)\*\*", re.MULTILINE)  # the paragraph
GUESS = re.compile(r"guess\w* = None\b")
PREDICTS = re.compile(r"check\.predict\(\s*\"([^\"]+)\"")
EXERCISE = re.compile(r"check\.exercise\(\s*\"([^\"]+)\"")


@dataclass
class Slide:
    """Pieces of HTML from top to bottom. Those of a `question` come after the others and stay together."""

    id: str
    pieces: list[str] = field(default_factory=list)
    question: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Deck:
    """What a page is made of."""

    name: str
    title: str
    columns: list[list[Slide]]


def deck(path: Path, language: str, names: set[str]) -> Deck:
    """The slides of the notebook in `path`; links lead to those notebooks of which `names` says that they have slides, too."""
    notebook = nbformat.read(path, as_version=4)
    LANGUAGES[language]().preprocess(notebook, {})
    title = notebook.cells[0].source.partition("\n")[0].lstrip("# ") if notebook.cells else path.stem
    maker = Maker(Pieces(language, path.parent, names), language, notes(path.stem), ShownCode(notebook))
    for cell in notebook.cells:
        maker.add(cell)
    maker.finish()
    return Deck(path.stem, title, maker.columns)


@cache
def notes(stem: str) -> dict:
    """What a teacher wrote about a notebook, empty where nobody has yet."""
    path = NOTES / f"{stem}.yml"
    return yaml.safe_load(path.read_text("utf-8")) if path.is_file() else {}


class Maker:
    """Takes the cells of a notebook one by one."""

    def __init__(self, pieces: Pieces, language: str, notes: dict, shown: ShownCode):
        self.pieces, self.language, self.notes, self.shown = pieces, language, notes, shown
        self.columns: list[list[Slide]] = []
        self.section: list[str] = []  # what a teacher says about it
        self.asked: Slide | None = None  # the question that has had no answer yet
        self.guessed = False
        self.outputs: list[str] = []  # what nobody may see before

    @property
    def slide(self) -> Slide:
        return self.columns[-1][-1]

    def add(self, cell: NotebookNode) -> None:
        kind = cell.metadata.get("slideshow", {}).get("slide_type")
        tags = set(cell.metadata.get("tags", ()))
        if tags & LEFT_OUT or kind == "skip":
            return
        if kind == "slide" or not self.columns:
            self.finish()
            self.section = self.said(self.notes.get("sections", {}).get(cell.id))
            if not self.columns:
                self.section += self.said(self.notes.get("draw")) + self.said(self.notes.get("leave_out"))
            self.columns.append([])
            self.begin(cell.id)
        elif cell.cell_type == "markdown" and self.asked is None and (kind == "subslide" or len(self.columns) == 1):
            self.begin(cell.id)
        if cell.cell_type == "markdown":
            self.prose(cell)
        elif cell.cell_type == "code":
            self.code(cell)

    def begin(self, name: str) -> None:
        """Begin a slide, unless the last one is still empty."""
        if not self.columns[-1] or self.slide.pieces or self.slide.question:
            self.columns[-1].append(Slide(name, notes=list(self.section)))

    def prose(self, cell: NotebookNode) -> None:
        before, *question = split(ASKS, cell.source)
        if self.asked is not None:
            self.asked.question.append(self.pieces.prose(cell.source))
            return
        self.slide.pieces += [self.pieces.prose(before)] if before.strip() else []
        if question:
            self.asked = self.slide
            self.asked.question.append(self.pieces.prose(question[0]))

    def code(self, cell: NotebookNode) -> None:
        if GUESS.match(cell.source):
            self.asked = self.asked or self.slide
            self.guessed = True
            return
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
        code = [] if hidden else self.pieces.code(self.shown(cell))
        outputs = [self.pieces.output(output) for output in cell.outputs if not to_a_learner(output)]
        if self.asked is None:
            self.slide.pieces += code + outputs
            if found := EXERCISE.search(cell.source):
                self.slide.notes += self.wrong(found[1])
            return
        self.asked.question += code
        if not self.guessed:  # what ran before the guess gives nothing away
            self.asked.question += outputs
            return
        self.outputs += outputs
        if found := PREDICTS.search(cell.source):
            self.answer(found[1])

    def answer(self, question: str = "") -> None:
        """A slide with what the code shows and the explanation; wrong guesses are for the teacher, on both slides."""
        asked, outputs = self.asked, self.outputs
        self.asked, self.guessed, self.outputs = None, False, []
        self.begin(f"{asked.id}-answer")
        self.slide.pieces += outputs
        known = self.wrong(question)
        with suppress(KeyError):  # a question of somebody else
            prediction = check.find(question, check.Prediction)
            known += [
                self.pieces.prose(f"`{wrong['guess']!r}`: {wrong[self.language]}") for wrong in prediction.guesses
            ]
            self.slide.pieces.append(self.pieces.explanation(getattr(prediction, self.language)))
        for slide in (asked, self.slide):
            slide.notes += known

    def finish(self) -> None:
        """Show what a guess held back that nothing has judged."""
        if self.asked is not None and self.outputs:
            self.answer()
        self.asked, self.guessed = None, False

    def wrong(self, item: str) -> list[str]:
        """What a teacher says about wrong answers to a question or an exercise."""
        found = [wrong for wrong in self.notes.get("wrong", ()) if str(wrong["of"]).split()[0] == item]
        return [text for wrong in found for text in self.said(wrong)]

    def said(self, texts: dict | None) -> list[str]:
        return [self.pieces.prose(texts[self.language])] if texts else []


def to_a_learner(output: NotebookNode) -> bool:
    """What a check says to somebody who has not yet answered."""
    return "hooklab-todo" in output.get("data", {}).get("text/html", "")


def split(pattern: re.Pattern[str], text: str) -> list[str]:
    """`text` before the first match, and from there on where there is one."""
    found = pattern.search(text)
    return [text[: found.start()], text[found.start() :]] if found else [text]
