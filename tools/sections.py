"""The sections of a notebook, their minutes and their guesses: what a teacher's plan is made of."""

import re
from dataclasses import dataclass
from functools import cache

import notebook_form
from questions import HEADING, in_language

PREDICTS = re.compile(r'check\.predict\("(\d\d\.\d+)"')


@dataclass(frozen=True)
class Section:
    """A heading of a notebook: the id of its cell, the heading itself, its minutes, and the guesses below it."""

    id: str
    source: str
    minutes: int
    guesses: tuple[str, ...]

    def link(self, stem: str, language: str, *, number: bool = False) -> str:
        words = in_language(language, self.source)
        return f"[{words.split()[0] if number else words}](../../notebooks/{stem}.ipynb#cell-id={self.id})"


@cache
def sections(stem: str) -> dict[str, Section]:
    """Every heading of the notebook, by the id of its cell; the first is the title."""
    found: list[tuple[notebook_form.Cell, list[str]]] = []
    for cell in notebook_form.cells(notebook_form.read(notebook_form.NOTEBOOKS / f"{stem}.ipynb")):
        if not cell.is_code and HEADING.match(cell.source):
            found.append((cell, []))
        elif cell.is_code:
            found[-1][1].extend(PREDICTS.findall(cell.source))
    return {
        cell.id: Section(cell.id, cell.source, cell.node.metadata.get("minutes", 0), tuple(guesses))
        for cell, guesses in found
    }


def title(stem: str, language: str) -> str:
    return in_language(language, next(iter(sections(stem).values())).source)


def chosen(stem: str, ids: list[str], where: str) -> list[Section]:
    """The sections with these ids; `where` is the place that named them."""
    if unknown := [name for name in ids if name not in sections(stem)]:
        raise ValueError(f"{where}: no heading of {stem} has the id {unknown[0]!r}; it has {', '.join(sections(stem))}")
    return [sections(stem)[name] for name in ids]


def time(listed: list[Section]) -> tuple[int, int]:
    """The minutes of these sections, and how many guesses they have."""
    return sum(one.minutes for one in listed), sum(len(one.guesses) for one in listed)
