"""The learner's own copy of the notebooks: new versions come in, and what the learner has written stays.

A copy counts as touched when the source of a cell differs from what was copied; outputs and metadata do not count. What was
copied is noted in a hidden file beside the notebooks.
"""

import hashlib
import json
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Update", "update"]

NOTES = ".hooklab.json"
BESIDE = ("images", "SOURCES.md")  # what the notebooks show or link to
HIDDEN = ("images", "*.md")  # from the file browser


@dataclass
class Update:
    """What an update did, by file names: copies made, copies replaced, and touched ones of which there is a new version."""

    new: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def update(course: Path, own: Path) -> Update:
    """Bring the working copy `own` up to date with the notebooks in `course`.

    Raises:
        FileNotFoundError: `course` has no notebooks.
    """
    notebooks = sorted(course.glob("*.ipynb"))
    if not notebooks:
        raise FileNotFoundError(f"hooklab: no notebooks in {course}: run this in a clone of the course")
    own.mkdir(parents=True, exist_ok=True)
    notes, report = _read_notes(own), Update()
    for notebook in notebooks:
        _bring(notebook, own / notebook.name, notes, report)
    _write(own / NOTES, json.dumps(notes, indent=1))
    for name in BESIDE:
        _copy_beside(course / name, own / name)
    return report


def _bring(notebook: Path, copy: Path, notes: dict[str, dict[str, str]], report: Update) -> None:
    content = notebook.read_text(encoding="utf-8")
    version, noted = _digest([content]), notes.get(notebook.name, {})
    if not copy.exists():
        report.new.append(notebook.name)
    elif noted.get("version") == version:
        return
    elif noted.get("sources") != _sources(copy.read_text(encoding="utf-8")):
        if noted.get("offered") != version:  # it is named once
            report.kept.append(notebook.name)
            notes[notebook.name] = noted | {"offered": version}
        return
    else:
        report.replaced.append(notebook.name)
    _write(copy, _as_the_kernel_leaves_it(content))
    notes[notebook.name] = {"version": version, "sources": _sources(content)}


def _sources(content: str) -> str:
    """A digest of what is written in the cells; of a damaged notebook, of all of it."""
    try:
        return _digest("".join(cell["source"]) for cell in json.loads(content)["cells"])
    except (ValueError, KeyError, TypeError):
        return _digest([content])


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _as_the_kernel_leaves_it(content: str) -> str:
    """JupyterLab writes what the kernel says of its language into a notebook that it opens, and calls that a change."""
    notebook = json.loads(content)
    notebook["metadata"]["language_info"] = {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": platform.python_version(),
    }
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"


def _read_notes(own: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((own / NOTES).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # without notes every copy counts as touched, and nothing is lost
        return {}


def _copy_beside(there: Path, here: Path) -> None:
    if there.is_dir():
        shutil.copytree(there, here, dirs_exist_ok=True)
    elif there.exists():
        shutil.copyfile(there, here)


def _write(path: Path, text: str) -> None:
    """In one step: an interruption leaves the old file or the new one."""
    begun = path.with_name(f"{path.name}.part")
    begun.write_text(text, encoding="utf-8", newline="\n")
    begun.replace(path)
