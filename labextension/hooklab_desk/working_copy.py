"""The learner's own copy of the notebooks: new versions come in, and what the learner has written stays.

A copy counts as touched when the source of a cell differs from what was copied; outputs and metadata do not count. What was
copied is noted in a hidden file beside the notebooks. The pages that answer questions lie beside the notebooks too: JupyterLab
opens nothing above the folder it serves.
"""

import hashlib
import json
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Update", "update"]

NOTES = ".hooklab.json"
# Seen from the notebooks.
PAGES = (
    "SOURCES.md",
    "../QUESTIONS*.md",
    *(f"../docs/{name}*.md" for name in ("cheatsheet", "limits", "atlas", "glossary")),
)
LINK_ELSEWHERE = re.compile(r"\]\((?:\.\./)?(?:docs/|notebooks/)?(?=[\w.-]+\.(?:md|ipynb)\b)")
IMAGES = "images"  # what the notebooks show
HIDDEN = (IMAGES, "*.md")  # from the file browser


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
        raise FileNotFoundError(
            f"hooklab: {course} 里没有笔记本：请在课程的克隆里，或者解开的离线包里运行\n"
            f"hooklab: no notebooks in {course}: run this in a clone of the course, or in an unpacked bundle"
        )
    own.mkdir(parents=True, exist_ok=True)
    notes, report = _read_notes(own), Update()
    for notebook in notebooks:
        _bring(notebook, own / notebook.name, notes, report)
    _write(own / NOTES, json.dumps(notes, indent=1))
    if (course / IMAGES).is_dir():
        shutil.copytree(course / IMAGES, own / IMAGES, dirs_exist_ok=True)
    for page in [page for pattern in PAGES for page in course.glob(pattern)]:
        _write(own / page.name, _with_links_beside(page.read_text(encoding="utf-8")))
    return report


def _bring(notebook: Path, copy: Path, notes: dict[str, dict[str, str]], report: Update) -> None:
    content = _with_links_beside(notebook.read_text(encoding="utf-8"))
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


def _with_links_beside(text: str) -> str:
    """As the links read where notebooks and pages lie in one folder: `../docs/glossary.md` is `glossary.md` there."""
    return LINK_ELSEWHERE.sub("](", text)


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


def _write(path: Path, text: str) -> None:
    """In one step: an interruption leaves the old file or the new one."""
    begun = path.with_name(f"{path.name}.part")
    begun.write_text(text, encoding="utf-8", newline="\n")
    begun.replace(path)
