"""What a learner has done so far: one small file in Jupyter's data folder, which the checks of a notebook write."""

import html
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hooklab._support.notebook_cell import running_shell
from hooklab._support.table import table

__all__ = ["Progress", "done", "forget", "in_kernel", "note", "outline", "path", "progress"]

# How far an item has come, by its id. A step back is no news.
STEPS = "tried", "done"
HEADINGS = {"zh": ("笔记本", "预测", "练习"), "en": ("notebook", "predictions", "exercises")}


def path() -> Path:
    """Where it is kept. The JupyterLab extension's server part reads the same file."""
    from jupyter_core.paths import jupyter_data_dir  # every kernel has it

    return Path(jupyter_data_dir(), "hooklab", "progress.json")


def done() -> dict[str, str]:
    """By id, how far each item has come: an exercise is "tried" or "done", a prediction "done" once it was guessed."""
    try:
        kept = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none yet, or it is damaged: begin again
        return {}
    return {str(name): step for name, step in kept.items() if step in STEPS} if isinstance(kept, dict) else {}


def note(name: str, step: str) -> None:
    """Keep that an item has come so far. Only a notebook's kernel writes; a folder that cannot be written is no error."""
    known = done() if in_kernel() else {}
    if not in_kernel() or known.get(name) in (step, "done"):
        return
    with suppress(OSError):
        _write(known | {name: step})


def forget() -> None:
    """Begin again: nothing has been done."""
    path().unlink(missing_ok=True)


def _write(items: dict[str, str]) -> None:
    """In one step: a reader finds the old file or the new one, never half of one."""
    path().parent.mkdir(parents=True, exist_ok=True)
    begun = path().with_suffix(f".{os.getpid()}")
    begun.write_text(json.dumps(items, indent=1, sort_keys=True), encoding="utf-8")
    begun.replace(path())


def in_kernel() -> bool:
    """Whether a notebook is being worked through here: this is no test, nor nbgrader, which marks or validates homework."""
    return hasattr(running_shell(), "kernel") and "NBGRADER_EXECUTION" not in os.environ


def outline() -> dict[str, Any]:
    """The parts of the course and their notebooks, with the ids of predictions and exercises."""
    return json.loads((Path(__file__).parent / "outline.json").read_text(encoding="utf-8"))


class Progress:
    """How much of each notebook is done, as a table in both languages."""

    def __init__(self, items: dict[str, str]):
        self.items = items

    def rows(self, language: str) -> Iterator[tuple[str, ...]]:
        """(notebook, predictions, exercises) of each notebook: "12 Changing gradients", "2 / 4", "1 / 3"."""
        for part in outline()["parts"]:
            for book in part["notebooks"]:
                counts = (self._count(book[kind]) for kind in ("predictions", "exercises"))
                yield (f"{book['number']} {book[language]}", *counts)

    def _count(self, names: list[str]) -> str:
        return f"{sum(self.items.get(name) == 'done' for name in names)} / {len(names)}"

    def _repr_html_(self) -> str:
        halves = (f'<div lang="{language}">{self._table(language)}</div>' for language in HEADINGS)
        return f'<div class="hooklab-message hooklab-note">{"".join(halves)}</div>'

    def _table(self, language: str) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            first, *others = (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{first.replace('>', ' style=text-align:left>', 1)}{''.join(others)}</tr>"

        rows = [row(HEADINGS[language], "th"), *(row(cells, "td") for cells in self.rows(language))]
        return f"<table>{''.join(rows)}</table>"

    def __repr__(self) -> str:
        return table([HEADINGS["en"], *self.rows("en")])


def progress() -> Progress:
    """What you have done so far, notebook by notebook. The panel in JupyterLab's left sidebar shows the same."""
    return Progress(done())
