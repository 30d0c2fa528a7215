"""After nbval has judged a cell it runs once more, and after the last one every section is gone back to, with a guess.

A learner runs a cell twice, and guesses when all is done: neither may end in an error. It happens in the kernel of
nbval's run, before the next cell: so nbval notices, too, where a second run changes what later cells show. With
HOOKLAB_AGAIN=0 the notebooks run once from top to bottom, as they do in the browser test.
"""

import copy
import os
from itertools import pairwise

import pytest
from nbval.plugin import IPyNbCell, NbCellError

PASSED = pytest.StashKey[list[IPyNbCell]]()  # of a notebook, as far as it has run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    if isinstance(item, IPyNbCell) and os.environ.get("HOOKLAB_AGAIN") != "0":
        run(item, item.cell, "when it is run again")
        passed = item.parent.stash.setdefault(PASSED, [])
        passed.append(item)
        if len(passed) == sum(cell.cell_type == "code" for cell in item.parent.nb.cells):
            guess_late(passed, item.parent.nb.cells)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Say which cell failed, as JupyterLab numbers it, and which of the two outputs is which."""
    report = yield
    if report.failed and isinstance(item, IPyNbCell):
        where = f"{item.cell['id']!r}, [{item.cell_num + 1}] in JupyterLab; '+' is what is stored, '-' what it showed now"
        report.sections.append(("the cell", where))
    return report


def run(item, cell, when):
    """The outputs of a cell in the kernel of its notebook. They are compared with nothing."""
    stored, checked = item.cell, item.options["check"]
    item.cell, item.options["check"] = cell, False
    try:
        item.runtest()
    except NbCellError as error:
        error.args = (f"{error} {when}",)
        raise
    finally:
        item.cell, item.options["check"] = stored, checked
    return item.test_outputs


def guess_late(items, cells):
    items = {id(item.cell): item for item in items}
    for section in sections(cells):
        checks = [number for number, cell in enumerate(section, start=1) if "check.predict(" in cell.source]
        for cell in section[: max(checks, default=0)]:
            if cell.cell_type == "code":
                item, when = items[id(cell)], "when all has run and one goes back to it with a guess"
                outputs = run(item, guessing(cell), when)
                if "check.predict(" in cell.source and "hooklab-wrong" not in str(outputs):
                    raise NbCellError(item.cell_num, f"This guess is not judged {when}", cell.source)


def sections(cells):
    """The cells from each heading to the next."""
    headings = [number for number, cell in enumerate(cells) if cell.source.startswith("## ")]
    return [cells[start:end] for start, end in pairwise([*headings, len(cells)])]


def guessing(cell):
    """A copy with a guess in it, where one is asked for."""
    late = copy.deepcopy(cell)
    late.source = late.source.replace("guess = None", "guess = 'something else'")
    return late
