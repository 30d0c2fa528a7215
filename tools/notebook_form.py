"""The normal form of a notebook: what `make refresh` writes and the tests demand."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"

# With a kernel's name: without one JupyterLab asks which kernel to use where several are installed.
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    # `jupyter nbconvert --to script` would leave out the prose without its exporter.
    "language_info": {"name": "python", "nbconvert_exporter": "python"},
}
SCREEN = 24  # lines of code that fit on a slide below its prose
PICTURE = 14  # lines of code that are as high as a picture
CELL_METADATA = ("jupyter", "minutes", "slideshow", "sources", "tags")
# The line that leads to the notebooks before and behind: titles of others.
NEIGHBOURS = re.compile(r"^(?:上一本|Previous|\[目录\]|\[Contents\]|下一本：\[|Next: \[).*\.ipynb\)$", re.MULTILINE)
HALF = re.compile(r'<div lang="(zh|en)">\n\n(.*?)\n\n</div>', re.DOTALL)


@dataclass(frozen=True)
class Cell:
    """A cell with what the rules ask of it."""

    node: NotebookNode
    index: int

    @property
    def id(self) -> str:
        return self.node.get("id", f"number {self.index}")

    @property
    def tags(self) -> list[str]:
        return self.node.metadata.get("tags", [])

    @property
    def source(self) -> str:
        return self.node.source

    @property
    def is_code(self) -> bool:
        return self.node.cell_type == "code"

    @property
    def outputs(self) -> list[NotebookNode]:
        return self.node.get("outputs", [])

    @property
    def halves(self) -> dict[str, str]:
        """The prose in each language; empty for a heading or a picture alone."""
        return dict(HALF.findall(self.source))


def paths() -> list[Path]:
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def cells(notebook: NotebookNode) -> list[Cell]:
    return [Cell(node, index) for index, node in enumerate(notebook.cells)]


def texts(output: NotebookNode) -> list[str]:
    """Every text in one output that a reader may see, pictures left out."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return [output.evalue, *output.traceback]
    return [data for mime, data in output.data.items() if mime.startswith("text/")]


def pictures(cell: Cell) -> list[str]:
    return [mime for output in cell.outputs for mime in output.get("data", {}) if mime.startswith("image/")]


def slide_types(notebook: NotebookNode) -> Iterator[str | None]:
    """For a lecture: how each cell stands on the slides. None: below the one before it.

    A section is a column of slides. One ends where prose begins again, where the class has to guess, and between
    pieces of code that are more than a screen together.
    """
    before, height = None, 0
    for cell in cells(notebook):
        if "solution" in cell.tags:
            yield "skip"
            continue
        if not cell.is_code and re.match(r"##? ", cell.source):
            kind = "slide"
        elif before and before.is_code:
            guessed, full = before.source.startswith("guess = "), height + lines(cell) > SCREEN
            kind = "subslide" if not cell.is_code or guessed or full else None
        else:
            kind = None
        height = lines(cell) + (height if kind is None else 0)
        yield kind
        before = cell


def lines(cell: Cell) -> int:
    """About how high the code of a cell and its outputs are."""
    shown = cell.source if cell.is_code else ""
    printed = sum(text.count("\n") + 1 for output in cell.outputs for text in texts(output))
    return shown.count("\n") + 1 + (PICTURE if pictures(cell) else printed)


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Put `notebook` into normal form, in place: only what a reader or a test needs."""
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    count = 0
    for node in notebook.cells:
        node.source = node.source.strip("\n")
        if node.cell_type == "code":
            count += 1
            node.execution_count = count
            node.outputs = [_normal_output(output, count) for output in _merged(node.outputs)]
    # What a cell prints may come in pieces, never the same ones: how high it is shows when they are merged.
    for node, kind in zip(notebook.cells, slide_types(notebook), strict=True):
        node.metadata["slideshow"] = {"slide_type": kind}
        node.metadata["jupyter"] = {"source_hidden": True}
        node.metadata = nbformat.from_dict({key: node.metadata[key] for key in CELL_METADATA if key in node.metadata})
        if kind is None:
            del node.metadata["slideshow"]
        if not only_checks(Cell(node, 0)):
            del node.metadata["jupyter"]
    return notebook


def only_checks(cell: Cell) -> bool:
    """True for code that a learner need not read: it only asserts, or prints in words what a picture shows."""
    try:
        statements = ast.parse(cell.source).body if cell.is_code else []
    except SyntaxError:  # a magic, or an error that is meant
        return False
    return bool(statements) and ("facts" in cell.tags or all(isinstance(one, ast.Assert) for one in statements))


def written(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"


def _merged(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Streams of one name as one output: how a print is cut into pieces depends on the machine."""
    merged: list[NotebookNode] = []
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        if output.output_type == "stream" and output.name in streams:
            streams[output.name].text += output.text
            continue
        if output.output_type == "stream":
            streams[output.name] = output
        merged.append(output)
    # Which of the two comes first depends on the machine as well.
    places = sorted(merged.index(output) for output in streams.values())
    for place, name in zip(places, sorted(streams, reverse=True), strict=True):  # stdout, stderr
        merged[place] = streams[name]
    return merged


def _normal_output(output: NotebookNode, count: int) -> NotebookNode:
    if output.output_type == "error":
        # The frames hold paths of this machine; the last line is what the text talks about.
        output.traceback = [f"{output.ename}: {output.evalue}"]
    if output.output_type == "execute_result":
        output.execution_count = count
    if "metadata" in output:
        # The sentence of a picture stays.
        alts = {mime: {"alt": output.metadata[mime]["alt"]} for mime in output.metadata if mime.startswith("image/")}
        output.metadata = nbformat.from_dict(alts)
    return output
