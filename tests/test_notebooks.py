"""The notebooks as documents: every rule of `notebook_rules` on every notebook."""

import copy
from itertools import pairwise

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
    """A learner runs a cell twice, and at the end goes back to a section to guess: neither may end in an error."""
    cells = notebook.node.cells
    again = copy.copy(notebook.node)
    again.cells = [copy.deepcopy(cell) for cell in cells for _ in range(1 + (cell.cell_type == "code"))]
    for section in sections(cells):
        checks = [number for number, cell in enumerate(section, start=1) if "check.predict(" in cell.source]
        again.cells += map(guessing, section[: max(checks, default=0)])
    resources = {"metadata": {"path": str(notebook.path.parent)}}
    NotebookClient(again, timeout=120, kernel_name=forked_kernels.NAME, resources=resources).execute()
    judged = [cell.outputs[0].data["text/html"] for cell in again.cells if "check.predict(" in cell.source]
    assert judged
    assert sum("hooklab-wrong" in html for html in judged) == len(judged) / 3


def sections(cells):
    """The cells from each heading to the next."""
    headings = [number for number, cell in enumerate(cells) if cell.source.startswith("## ")]
    return [cells[start:end] for start, end in pairwise([*headings, len(cells)])]


def guessing(cell):
    """A copy with a guess in it, where one is asked for."""
    late = copy.deepcopy(cell)
    late.source = late.source.replace("guess = None", "guess = 'something else'")
    return late
