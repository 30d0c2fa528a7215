"""After nbval has judged a cell it runs once more, and after the last one every section is gone back to, with a guess.

A learner runs a cell twice, and guesses when all is done: neither may end in an error. It happens in the kernel of
nbval's run, before the next cell: so nbval notices, too, where a second run changes what later cells show.

A notebook that uses pretrained weights where they are cached finds such files, with numbers that nobody else has: what
it shows may not depend on them. With HOOKLAB_AGAIN=0 the notebooks run once from top to bottom, with no more weights
than the machine has, as they do in the browser test.
"""

import copy
import inspect
import os
import re
import tempfile
from itertools import pairwise

import pytest
from nbval.plugin import IPyNbCell, NbCellError

PASSED = pytest.StashKey[list[IPyNbCell]]()  # of a notebook, as far as it has run
WEIGHTS = pytest.StashKey[set[str]]()  # that it finds in its cache


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    again = isinstance(item, IPyNbCell) and os.environ.get("HOOKLAB_AGAIN") != "0"
    if again and WEIGHTS not in item.parent.stash:
        item.parent.stash[WEIGHTS] = weights_for(item)
    result = yield
    if again:
        run(item, item.cell, "when it is run again")
        passed = item.parent.stash.setdefault(PASSED, [])
        passed.append(item)
        if len(passed) == sum(cell.cell_type == "code" for cell in item.parent.nb.cells):
            guess_late(passed, item.parent.nb.cells)
            if item.parent.stash[WEIGHTS]:
                all_were_read(item, item.parent.stash[WEIGHTS])
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Say which cell failed, as JupyterLab numbers it, and which of the two outputs is which."""
    report = yield
    if report.failed and isinstance(item, IPyNbCell):
        where = f"{item.path.name}, {item.cell['id']!r}, [{number(item)}] in JupyterLab; "
        where += "'+' is what is stored, '-' what it showed now"
        if item.parent.stash.get(WEIGHTS, None):
            where += ", with pretrained weights of other numbers than anybody's: nothing may depend on them"
        report.sections.append(("the cell", where))
    return report


def number(item):
    """Which of the code cells of its notebook this is, from one: nbval's own count depends on its version."""
    code = [cell for cell in item.parent.nb.cells if cell.cell_type == "code"]
    return next(number for number, cell in enumerate(code, start=1) if cell is item.cell)


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
    return with_source(cell, cell.source.replace("guess = None", "guess = 'something else'"))


def with_source(cell, source):
    other = copy.deepcopy(cell)
    other.source = source
    return other


def weights_for(item):
    """Files of pretrained weights for the notebook of this cell, its first; returns the weights' names."""
    sources = "\n".join(cell.source for cell in item.parent.nb.cells if cell.cell_type == "code")
    names = re.findall(r"cached_weights\((?:\w+\.)*(\w+_Weights\.\w+)\)", sources)
    assert len(names) == sources.count("cached_weights("), "of which weights? A member's name is expected"
    if names:
        folder = tempfile.TemporaryDirectory(prefix="hooklab-weights-")
        item.parent.addfinalizer(folder.cleanup)
        # In the kernel, which has loaded PyTorch; not in its globals, where an import that is missing would be there.
        source = inspect.getsource(lay_weights) + f"lay_weights({folder.name!r}, {names})"
        run(item, with_source(item.cell, f"exec({source!r}, {{}})"), "when weights are laid ready")
    return set(names)


def lay_weights(home, names):
    import os

    import torch
    from torchvision import models

    def load(path, *args, own=torch.load, **options):
        torch.hub.were_read.append(files.get(os.path.basename(path)))
        return own(path, *args, **options)

    os.makedirs(f"{home}/hub/checkpoints")
    files = {}
    for name in names:
        file = models.get_weight(name).url.rpartition("/")[2]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            state = models.get_model(name.partition("_Weights")[0].lower()).state_dict()
            for value in state.values():  # and no zeros or ones either, with which all such models begin
                value *= torch.rand_like(value) + 0.5 if value.is_floating_point() else 1
                value[value == 0] = 0.01 if value.is_floating_point() else 7
        torch.save(state, f"{home}/hub/checkpoints/{file}")
        files[file] = name
    torch.load, torch.hub.were_read, os.environ["TORCH_HOME"] = load, [], home


def all_were_read(item, names):
    shown = run(item, with_source(item.cell, "print(*__import__('torch').hub.were_read)"), "for what it read")
    if not all(name in str(shown) for name in names):
        raise NbCellError(item.cell_num, f"Not all of {names} were read", item.cell.source)
