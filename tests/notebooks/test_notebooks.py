"""The notebooks as documents: every rule of `notebook_rules` on every notebook."""

import notebook_form
import pytest
from notebook_rules import RULES, Notebook

NOTEBOOKS = [Notebook(path, path.stem) for path in notebook_form.paths()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_rule(notebook, rule):
    problems = list(rule(notebook))
    assert not problems, "\n".join(["", *problems])
