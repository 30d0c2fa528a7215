"""How notebooks are compared: in this environment's own kernel, strictly, pictures by their facts."""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent


def pytest_configure(config):
    config.option.nbval_current_env = True
    config.option.nbval_sanitize_with = str(ROOT / "tests" / "nbval_sanitize.cfg")
    # A kernel or a start-up file of the person who runs the tests must not change what cells print.
    folder = tempfile.TemporaryDirectory(prefix="hooklab-jupyter-")
    config.add_cleanup(folder.cleanup)
    os.environ |= {"JUPYTER_DATA_DIR": f"{folder.name}/data", "IPYTHONDIR": f"{folder.name}/ipython"}
