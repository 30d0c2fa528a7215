"""The set-up cell of every notebook: threads, printing, warnings, figures, errors."""

import os
import re
import warnings
from functools import cache
from typing import Any

import torch

from hooklab._support.notebook_cell import running_shell
from hooklab.course import guess_cells
from hooklab.course.environment import old_torch, other_torch
from hooklab.course.errors import show_own_lines
from hooklab.draw.colours import FIGURES

__all__ = ["start"]


def start() -> None:
    """Make what the cells print the same on every machine; calling it again is harmless.

    Two threads (or HOOKLAB_THREADS), four decimals, one-line warnings without a path, figures of one size,
    errors that show the lines of the cells and not PyTorch's, and say where a cell above has not run, and pictures that
    say in words what is drawn in them. Shows nothing, but once where PyTorch is another than for the stored outputs.

    Raises:
        RuntimeError: PyTorch is older than the course needs, or HOOKLAB_THREADS is no positive number.
    """
    if (problem := old_torch()) is not None:
        raise RuntimeError(problem[1])
    torch.set_num_threads(_threads())
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=100)
    warnings.formatwarning = _one_line
    warnings.filterwarnings("default", module="__main__")  # once for each line of a cell
    if (shell := running_shell()) is not None:
        _set_figures(shell)
        guess_cells.follow(shell)
        shell.set_custom_exc((Exception, KeyboardInterrupt), show_own_lines)
        _tell_of_another_torch()


@cache  # once in a kernel
def _tell_of_another_torch() -> None:
    from IPython.display import display

    # The weekly run of the tests has another PyTorch on purpose; there a cell that shows more counts as changed.
    if (note := other_torch()) is not None and os.environ.get("HOOKLAB_ANY_TORCH") != "1":
        display(note)


def _threads() -> int:
    wanted = os.environ.get("HOOKLAB_THREADS", "2")
    if not wanted.isdigit() or int(wanted) < 1:
        raise RuntimeError(f"HOOKLAB_THREADS={wanted!r}: expected a whole number of at least 1; unset it for 2 threads")
    return int(wanted)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    # A path of PyTorch's build machine helps nobody.
    text = re.sub(r"\s*\(Triggered internally at .*?\)", "", str(message))
    return f"{category.__name__}: {text}\n"


def _set_figures(shell: Any) -> None:
    # They are read when the first figure is drawn; matplotlib is not imported here.
    shell.config.InlineBackend.figure_formats = {"png"}
    shell.config.InlineBackend.rc = FIGURES | {
        "figure.figsize": (7, 3.2),
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
    }
    # The first figure of all makes IPython forget how to write one, so it is told after every cell.
    shell.events.register("post_execute", _describe_figures)


def _describe_figures() -> None:
    text = running_shell().display_formatter.formatters["text/plain"]
    text.for_type_by_name("matplotlib.figure", "Figure", _in_words)


def _in_words(figure: Any, printer: Any, cycle: bool) -> None:
    """A figure in one sentence, in place of <Figure size …>: the labextension makes it the alternative text."""
    parts = [figure.get_suptitle(), *map(_axes_in_words, figure.axes)]
    words = [" ".join(part.split()) for part in parts if part.strip()]
    printer.text(f"Figure: {'; '.join(words)}." if words else repr(figure))


def _axes_in_words(axes: Any) -> str:
    """Such as "loss over w: before, after": what is written at the axes, then what stands between them."""
    legend = axes.get_legend()
    inside = [text.get_text() for text in (*axes.texts, *(legend.get_texts() if legend else ()))]
    over = " over ".join(filter(None, [axes.get_ylabel(), axes.get_xlabel()]))
    around = "; ".join(filter(None, [*(axes.get_title(side) for side in ("left", "center", "right")), over]))
    return ": ".join(filter(None, [around, ", ".join(inside)]))
