"""The notebooks as documents: every rule of `notebook_rules` on every notebook."""

import io
from contextlib import redirect_stdout

import notebook_form
import pytest
from notebook_rules import RULES, Notebook

NOTEBOOKS = [Notebook(path, path.stem) for path in notebook_form.paths()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_rule(notebook, rule):
    problems = list(rule(notebook))
    assert not problems, "\n".join(["", *problems])


def test_what_is_read_of_the_offloading_in_class_is_short():
    """Without comments and docstrings: what 33 prints of `Offload`, and 35 of `checkpoint_segments`."""
    lines = []
    for name, cell in (("33_offloading_to_cpu", "tool-read"), ("35_checkpointing", "bn-source")):
        (path,) = (path for path in notebook_form.paths() if path.stem == name)
        (found,) = (one for one in notebook_form.cells(notebook_form.read(path)) if one.id == cell)
        with redirect_stdout(io.StringIO()) as printed:
            exec(found.source, {})
        texts = [line.strip() for line in printed.getvalue().splitlines()]
        lines += [line for line in texts if line and not line.startswith(("#", '"""'))]
    assert "def run_saving_input(segment: list[nn.Module], input: Any, copies: bool) -> Any:" in lines
    assert "def make_room(self) -> None:" in lines
    assert len(lines) < 120
