"""The code of a cell as a class sees it: without assertions and checks, which are for who runs it."""

import ast
import re
from collections.abc import Iterator
from itertools import groupby

from nbformat import NotebookNode

CHECKS = ("check.predict", "check.exercise")


class ShownCode:
    """Knows which functions of a notebook print, and beside which cells prose speaks of their assertions, which then stay."""

    def __init__(self, notebook: NotebookNode):
        self.printing = {name for cell in notebook.cells for name in printing_functions(cell)}
        self.spoken_of = set(beside_words_on_assertions(notebook.cells))

    def __call__(self, cell: NotebookNode) -> str:
        """The source without checks and assertions; of an assertion that prints, the call that does it stays."""
        tree = parsed(cell.source)
        lines = cell.source.split("\n")
        for statement in reversed(list(statements_that_go(tree, cell.id in self.spoken_of))):
            first, last = statement.lineno - 1, statement.end_lineno
            while first and lines[first - 1].strip().startswith("#"):
                first -= 1  # a comment on what goes
            calls = [node for node in ast.walk(statement) if called(node) in self.printing]
            lines[first:last] = [
                " " * statement.col_offset + ast.get_source_segment(cell.source, call) for call in calls
            ]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def parsed(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except SyntaxError:  # a magic command of IPython, perhaps
        return ast.Module([], [])


def printing_functions(cell: NotebookNode) -> Iterator[str]:
    for node in ast.walk(parsed(cell.source if cell.cell_type == "code" else "")):
        if isinstance(node, ast.FunctionDef) and any(called(inner) == "print" for inner in ast.walk(node)):
            yield node.name


def beside_words_on_assertions(cells: list[NotebookNode]) -> Iterator[str]:
    """The ids of the cells of code right above and right below prose that speaks of assertions."""
    blocks = [list(block) for _, block in groupby(cells, key=lambda cell: cell.cell_type)]
    for above, prose, below in zip([[], *blocks], blocks, [*blocks[1:], []], strict=False):
        if prose[0].cell_type == "markdown" and any(re.search("断言|assert", cell.source) for cell in prose):
            yield from (cell.id for cell in above + below)


def statements_that_go(tree: ast.AST, keep: bool) -> Iterator[ast.stmt]:
    """From top to bottom. A loop or a condition goes where nothing else is in it; assertions stay where `keep` says so."""
    for child in ast.iter_child_nodes(tree):
        if goes(child, keep):
            yield child
        else:
            yield from statements_that_go(child, keep)


def goes(node: ast.AST, keep: bool) -> bool:
    if isinstance(node, ast.For | ast.If):
        return all(goes(inner, keep) for inner in node.body + node.orelse)
    if isinstance(node, ast.ImportFrom):
        return node.module == "hooklab" and [name.name for name in node.names] == ["check"]
    return (isinstance(node, ast.Assert) and not keep) or (isinstance(node, ast.Expr) and called(node.value) in CHECKS)


def called(node: ast.AST) -> str:
    """The name of what a call calls, such as `check.predict`; empty where it is no call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""
