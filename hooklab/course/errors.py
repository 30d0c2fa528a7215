"""Errors as a learner should see them: the lines of the cells alone, and advice where a cell above has not run."""

import dis
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from hooklab._support.notebook_cell import in_cell
from hooklab.course.message import Message

__all__ = ["advice", "show_own_lines"]


def show_own_lines(shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: int | None = None) -> list:
    """Show an error with the lines of the learner's cells alone; the magic %tb shows PyTorch's lines too."""
    try:
        shown = _shown(shell, kind, error, trace)
        if (message := advice(shell, error)) is not None:
            from IPython.display import display

            display(message)
        return shown
    except KeyboardInterrupt:  # a second one: it would make IPython forget this function
        print("KeyboardInterrupt", file=sys.stderr)
        return []
    except Exception:  # its text could not be made
        traceback.print_exception(kind, error, _only_own(shell, trace))
        return []


def _shown(shell: Any, kind: type, error: BaseException, trace: Any) -> list[str]:
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # for %tb
    own = _only_own(shell, trace)
    if own is None:  # a syntax error, or nothing of the learner's
        shell.showsyntaxerror() if isinstance(error, SyntaxError) else shell.showtraceback((kind, error, trace))
        return []
    # The errors behind it ("the direct cause of ...") are cut too, for the moment in which they are printed.
    whole = [(each, each.__traceback__) for each in (error, *_chain(error))]
    try:
        for each, steps in whole:
            each.__traceback__ = _only_own(shell, steps)
        if isinstance(error, BaseExceptionGroup):  # IPython leaves its members out
            traceback.print_exception(kind, error, own)
            return []
        if isinstance(error, SyntaxError):  # by eval or exec
            shown = shell.SyntaxTB.structured_traceback(kind, error, traceback.extract_tb(own))
        else:
            shown = shell.InteractiveTB.structured_traceback(kind, error, own, tb_offset=0)
    finally:
        for each, steps in whole:
            each.__traceback__ = steps
    shell._showtraceback(kind, error, shown)
    _keep_what_is_shown(shell, error, shown)
    return shown


def _keep_what_is_shown(shell: Any, error: Any, shown: list[str]) -> None:
    """Save IPython a second formatting, for its history, which takes half a second where it reads PyTorch's files."""
    if hasattr(error, "_render_traceback_"):
        return
    try:
        error._render_traceback_ = lambda: shown
    except AttributeError:  # it takes no attributes
        return

    def forget() -> None:
        del error._render_traceback_  # for %tb
        shell.events.unregister("post_execute", forget)

    shell.events.register("post_execute", forget)


def _only_own(shell: Any, trace: Any) -> Any:
    """The steps of a traceback that lie in the learner's cells; None where none does."""
    own, short = [], None
    while trace is not None:
        if in_cell(shell, trace.tb_frame.f_code.co_filename):
            own.append(trace)
        trace = trace.tb_next
    for step in reversed(own):
        short = TracebackType(short, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return short


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    behind = error.__cause__ or error.__context__
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        yield behind
        behind = behind.__cause__ or behind.__context__


def advice(shell: Any, error: BaseException) -> Message | None:
    """What to do where a cell above would have defined the name that is missing.

    JupyterLab says which cell runs, the server in which file; without either there is no advice.
    """
    if type(error) is not NameError or not hasattr(shell, "kernel") or not error.name:
        return None
    asked = shell.kernel.get_parent("shell").get("metadata", {})
    if error.name in shell.user_ns or "raises-exception" in asked.get("tags", ()):  # the error is meant
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
