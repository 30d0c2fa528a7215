"""Cells of a notebook: what lies in one; and has the one that defines a missing name not run in this kernel?"""

import dis
import json
import linecache
import os
import warnings
from pathlib import Path
from typing import Any

from hooklab.course.message import Message

__all__ = ["advice", "in_cell"]

TIMED = "<timed exec>", "<timed eval>", "<magic-timeit>"  # by %%time, %time and %timeit


def in_cell(shell: Any, file: str) -> bool:
    """True for the file name of code that was typed into a cell."""
    # IPython 7, which Colab has, keeps a list of them instead.
    named = getattr(shell.compile, "format_code_name", getattr(linecache, "_ipython_cache", {}).get)
    return bool(file in TIMED or named(file))


def advice(shell: Any, error: BaseException) -> Message | None:
    """What to do where a cell above would have defined the name that is missing.

    JupyterLab says which cell runs, the server in which file; without either there is no advice.
    """
    if type(error) is not NameError or not hasattr(shell, "kernel") or error.name in shell.user_ns:
        return None
    asked = shell.kernel.get_parent("shell").get("metadata", {})
    if "raises-exception" in asked.get("tags", ()):  # it is meant
        return None
    try:
        known = error.name in _defined_above(shell, asked["cellId"])
    except Exception:  # another program than JupyterLab, or another file: the error says enough
        return None
    return _not_run(error.name) if known else None


def _not_run(name: str) -> Message:
    return Message(
        "note",
        f"`{name}` 是上面某一格定义的，那一格在这个内核里还没有运行完。内核一重启，定义过的就都没了。"
        "请选菜单 Run → Run All Above Selected Cell，再运行这一格。",
        f"`{name}` is defined by a cell above, which has not run to its end in this kernel. After a restart nothing is "
        "defined. Choose Run → Run All Above Selected Cell, then run this cell again.",
    )


def _defined_above(shell: Any, asked: str) -> set[str]:
    """The names that there would be if the cells above had been run."""
    cells = json.loads(Path(os.environ["JPY_SESSION_NAME"]).read_text(encoding="utf-8"))["cells"]
    position = [cell["id"] for cell in cells].index(asked)
    defined: set[str] = set()
    for cell in cells[:position]:
        if cell["cell_type"] == "code":
            _run_in_mind(shell.transform_cell("".join(cell["source"])), defined)
    return defined


def _run_in_mind(source: str, defined: set[str]) -> None:
    """Add the names that a cell defines, and take away those that it deletes."""
    try:
        with warnings.catch_warnings(action="ignore"):
            steps = list(dis.get_instructions(compile(source, "", "exec")))
    except (SyntaxError, ValueError):
        return
    for step in steps:
        if step.opname == "STORE_NAME":
            defined.add(step.argval)
        elif step.opname == "DELETE_NAME":
            defined.discard(step.argval)
