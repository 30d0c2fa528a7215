"""Does the variable `guess` belong to the prediction that asks for it? A cell that failed leaves the guess before it."""

import re
from typing import Any

from hooklab._support.notebook_cell import running_shell

__all__ = ["belongs", "follow", "judged"]

ASSIGNS = re.compile(r"^guess\s*=", re.MULTILINE)

# The prediction that has judged the present guess; "" while none has, None after a cell that should have set it failed.
_judged_by: str | None = ""


def follow(shell: Any) -> None:
    """Look at each cell that this IPython runs. Calling it again is harmless."""
    if not _follows(shell):
        shell.events.register("pre_run_cell", _before_cell)
        shell.events.register("post_run_cell", _after_cell)


def _follows(shell: Any) -> bool:
    return shell is not None and _after_cell in shell.events.callbacks["post_run_cell"]


def _before_cell(info: Any) -> None:
    global _judged_by
    if ASSIGNS.search(info.raw_cell or ""):
        _judged_by = ""


def _after_cell(result: Any) -> None:
    global _judged_by
    if not result.success and result.info is not None and ASSIGNS.search(result.info.raw_cell or ""):
        _judged_by = None


def belongs(guess: Any, prediction: str) -> bool:
    """False where `guess` is an older one: its cell has raised, or has not run since another prediction.

    In a notebook without the set-up cell nobody follows the cells, and every guess counts.
    """
    shell = running_shell()
    by_name = _follows(shell) and guess is shell.user_ns.get("guess")
    return not by_name or _judged_by in ("", prediction)


def judged(prediction: str) -> None:
    """From now on the present guess belongs to this prediction."""
    global _judged_by
    _judged_by = prediction
