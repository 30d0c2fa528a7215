"""How notebooks are compared: in this environment's own kernel, strictly, pictures by their facts."""

import gc
import math
import os
import tempfile
import time
from contextlib import ExitStack
from functools import partial, partialmethod
from pathlib import Path
from queue import Empty

import forked_kernels
import nbval.kernel
import pytest

ROOT = Path(__file__).parent
pytest_plugins = ["run_again"]
# What takes longest. It begins first, and the short rest fills the gaps: so all processes of a run end together.
LONGEST = ["test_browser.py", "test_torchvision_models.py", "test_harness.py", "test_forked_kernels.py"]
LONGEST += [".ipynb", "test_checks.py", "test_lesson.py", "test_switch.py", "test_project.py"]
LONGEST += ["test_notebooks.py", ""]

# Before PyTorch is loaded: a thread that waits for work sleeps. It would spin, on a core that another process needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure(config):
    config.option.nbval_kernel_name = forked_kernels.NAME
    config.option.nbval_sanitize_with = str(ROOT / "tests" / "support" / "nbval_sanitize.cfg")
    undone_at_the_end = ExitStack()
    config.add_cleanup(undone_at_the_end.close)
    folder = Path(undone_at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="hooklab-jupyter-")))
    environment = undone_at_the_end.enter_context(pytest.MonkeyPatch.context())
    # A kernel or a start-up file of the person who runs the tests must not change what cells print.
    environment.setenv("IPYTHONDIR", str(folder / "ipython"))
    # A process or a test of a run that has its kernels uses those.
    if forked_kernels.SHARED not in os.environ:
        undone_at_the_end.enter_context(forked_kernels.server(folder / "data"))
        environment.setenv(forked_kernels.SHARED, str(folder / "data"))
    environment.setenv("JUPYTER_DATA_DIR", os.environ[forked_kernels.SHARED])
    # Outputs are compared under any PyTorch: the note that it is another one would be no output of theirs.
    environment.setenv("HOOKLAB_ANY_TORCH", "1")
    environment.setattr(nbval.kernel, "start_new_kernel", partial(start_twice, nbval.kernel.start_new_kernel))
    kernel = nbval.kernel.RunningKernel
    environment.setattr(kernel, "await_reply", partialmethod(notice_death, kernel.await_reply))


def start_twice(start, *args, **kwargs):
    """Two kernels that start at once may pick the same port, and one dies: it gets another."""
    try:
        return start(*args, **kwargs)
    except RuntimeError:
        return start(*args, **kwargs)


def notice_death(kernel, await_reply, message, timeout=None):
    """A kernel that died answers nothing: say so at once, and not that the time is over."""
    end = time.monotonic() + (math.inf if timeout is None else timeout)
    while True:
        try:
            return await_reply(kernel, message, timeout=1)
        except Empty:
            if not kernel.is_alive():
                raise RuntimeError("the kernel died in this cell") from None
            if time.monotonic() > end:
                raise


def pytest_collection_modifyitems(items):
    def rank(item):
        return [item.path.name.endswith(name) for name in LONGEST].index(True)

    items.sort(key=rank)


def pytest_collection_finish():
    """Tests that collect garbage shall look at what they made, not each time at all that PyTorch is."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def freeze():
    """Nor at what earlier modules have imported."""
    gc.freeze()
