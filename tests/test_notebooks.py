"""The notebooks as documents: every rule of `notebook_rules` on every notebook."""

import copy

import forked_kernels
import notebook_form
import pytest
from nbclient import NotebookClient
from notebook_rules import RULES, Notebook

NOTEBOOKS = [Notebook(path, path.stem) for path in notebook_form.paths()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_rule(notebook, rule):
    problems = list(rule(notebook))
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_every_cell_can_be_run_again_and_a_guess_made_late_is_judged(notebook):
    """A learner runs a cell twice, and goes back from a check to its guess: neither may end in an error."""
    again = notebook.node
    for position in reversed(range(len(again.cells))):
        cell = again.cells[position]
        if cell.cell_type == "code":
            again.cells.insert(position, copy.deepcopy(cell))
            again.cells[position].source = cell.source.replace("guess = None", "guess = 'something else'")
    for start, end in reversed(list(guesses(again.cells))):
        late = copy.deepcopy(again.cells[start:end])
        late[0].source = "guess = 'something else'"
        again.cells[end:end] = late
    resources = {"metadata": {"path": str(notebook.path.parent)}}
    NotebookClient(again, timeout=120, kernel_name=forked_kernels.NAME, resources=resources).execute()
    judged = [cell.outputs[0].data["text/html"] for cell in again.cells if "check.predict(" in cell.source]
    assert judged
    assert sum("hooklab-wrong" in html for html in judged) == len(judged) / 2


def guesses(cells):
    """From each cell with a guess to behind the check that judges it."""
    start = None
    for position, cell in enumerate(cells):
        if cell.cell_type == "code" and cell.source.startswith("guess = None"):
            start = position
        if (
            "check.predict(" in cell.source
            and start is not None
            and "check.predict(" not in cells[position + 1].source
        ):
            yield start, position + 1
            start = None
