"""How long a notebook takes, by one count: what its stated minutes are held to.

180 English words, 12 lines of code and 25 lines of output a minute, and a minute for each prediction. Folded asides, folded
cells, exercises and the cell for one's own model are apart.
"""

import re
from collections.abc import Iterator

import notebook_form
from nbformat import NotebookNode
from notebook_form import Cell

WORDS, CODE, OUTPUT, PREDICTION = 180, 12, 25, 1  # a minute; and minutes for each
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
APART = {"exercise", "solution", "own-model", "setup"}


def minutes(notebook: NotebookNode) -> float:
    """The minutes of all sections but the exercises."""
    return sum(time for _, time in sections(notebook))


def sections(notebook: NotebookNode) -> Iterator[tuple[str, float]]:
    """(id of the cell with its heading, minutes) of each section."""
    name, time = "", 0.0
    for cell in notebook_form.cells(notebook):
        if not cell.is_code and re.match(r"##? ", cell.source):
            if name:
                yield name, time
            name, time = cell.id, 0.0
        if "· Exercises" in cell.source:
            return
        time += _cell(cell)
    yield name, time


def _cell(cell: Cell) -> float:
    if APART & set(cell.tags):
        return 0.0
    if not cell.is_code:
        return len(re.findall(r"[A-Za-z0-9'’]+", _prose(cell))) / WORDS
    if "check.predict(" in cell.source:
        return PREDICTION
    code = 0 if notebook_form.only_checks(cell) else cell.source.count("\n") + 1
    printed = sum(text.count("\n") + 1 for output in cell.outputs for text in _printed(output))
    return code / CODE + printed / OUTPUT


def _prose(cell: Cell) -> str:
    english = cell.halves.get("en", "")
    heading = re.match(r"##? .*· (.*)", cell.source)
    words = re.sub(r"\]\([^)]*\)", "]", FOLDED.sub("", notebook_form.NEIGHBOURS.sub("", english)))
    return f"{heading[1] if heading else ''} {words}"


def _printed(output: NotebookNode) -> list[str]:
    if output.output_type == "stream":
        return [output.text.rstrip()]
    if output.output_type == "error":
        return [output.evalue]
    return [] if any(mime.startswith("image/") for mime in output.data) else [output.data.get("text/plain", "")]


if __name__ == "__main__":
    for path in notebook_form.paths():
        node = notebook_form.read(path)
        stated = sum(cell.metadata.get("minutes", 0) for cell in node.cells)
        print(f"{path.stem:32} counted {minutes(node):5.1f}  stated {stated:3}")
