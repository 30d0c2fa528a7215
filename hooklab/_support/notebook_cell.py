"""What lies in a cell of a notebook."""

import linecache
import sys
from typing import Any

__all__ = ["in_cell", "running_shell"]

TIMED = "<timed exec>", "<timed eval>", "<magic-timeit>"  # by %%time, %time and %timeit


def running_shell() -> Any:
    """The IPython that runs this cell, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def in_cell(shell: Any, file: str) -> bool:
    """True for the file name of code that was typed into a cell."""
    # IPython 7, which Colab has, keeps a list of them instead.
    named = getattr(shell.compile, "format_code_name", getattr(linecache, "_ipython_cache", {}).get)
    return bool(file in TIMED or named(file))
