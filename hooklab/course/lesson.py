"""The set-up cell of every notebook, and the check of this machine.

`python -m hooklab.lesson` says in both languages what is missing and how to get it.
"""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hooklab.course import cells
from hooklab.course.message import Message
from hooklab.draw import graphviz

__all__ = ["cached_weights", "check_environment", "start"]

OLDEST_TORCH = (2, 11)
ROOT = Path(__file__).resolve().parents[2]


def start() -> None:
    """Make what the cells print the same on every machine. Prints nothing; calling it again is harmless.

    Two threads (or HOOKLAB_THREADS), four decimals, one-line warnings without a path, figures of one size,
    errors that show the lines of the cells and not PyTorch's, and say where a cell above has not run, and pictures that
    say in words what is drawn in them.

    Raises:
        RuntimeError: PyTorch is older than the course needs, or HOOKLAB_THREADS is no positive number.
    """
    if _torch_version() < OLDEST_TORCH:
        raise RuntimeError(_old_torch()[1])
    torch.set_num_threads(_threads())
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=100)
    warnings.formatwarning = _one_line
    warnings.filterwarnings("default", module="__main__")  # once for each line of a cell
    if (shell := _ipython()) is not None:
        _set_figures(shell)
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show_own_lines)


def check_environment() -> Message:
    """Is this machine ready for the course? Everything that is missing, and how to get it, in both languages."""
    problems = [
        problem for problem in (_old_torch(), _no_graphviz(), _other_python(), _no_switch()) if problem
    ]
    if not problems:
        return Message("right", "环境就绪：可以开始了。", "Your machine is ready: go ahead.")
    zh, en = (
        "\n".join(f"{number}. {text}" for number, text in enumerate(half, 1))
        for half in zip(*problems, strict=True)
    )
    return Message(
        "wrong", f"还差 {len(problems)} 项：\n{zh}", f"To be mended: {len(problems)}.\n{en}", "environment"
    )


def cached_weights(weights: Any) -> dict[str, torch.Tensor] | None:
    """The state dict of pretrained torchvision weights if this machine already has the file, else None.

    Nothing is ever downloaded. `ResNet18_Weights.DEFAULT.get_state_dict()` fetches the file once.

    Args:
        weights: a member of a torchvision weights enum, such as `torchvision.models.ResNet18_Weights.DEFAULT`.

    Raises:
        TypeError: `weights` has no address of a file.
    """
    url = getattr(weights, "url", None)
    if not isinstance(url, str):
        raise TypeError(
            f"cached_weights: expected a member of a torchvision weights enum, such as ResNet18_Weights.DEFAULT, "
            f"found {type(weights).__name__}"
        )
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None


def _old_torch() -> tuple[str, str] | None:
    if _torch_version() >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return (
        f"PyTorch 版本过旧：当前是 {torch.__version__}，本课程需要 {oldest} 或更高版本。请在 hooklab 目录下运行 `uv sync`。",
        f"PyTorch is too old: found {torch.__version__}, needed {oldest} or newer. Run `uv sync` in hooklab's folder.",
    )


def _no_graphviz() -> tuple[str, str] | None:
    if not graphviz.available():
        return (
            "没有画计算图的工具：既没有 `dot`，也没有 pygraphviz。"
            "请运行 `uv sync` 或 `pip install pygraphviz`；在此之前，计算图以文字显示。",
            "Nothing here can draw a graph: neither `dot` nor pygraphviz is installed. Run `uv sync` or "
            "`pip install pygraphviz`; until then graphs are shown as text.",
        )
    try:
        graphviz.svg_from_dot("digraph { a -> b }")
    except graphviz.NotDrawn as error:  # a small system lacks libraries that the wheel of pygraphviz needs
        why = str(error).partition("; install ")[0]
        return (
            f"计算图画不出来（{why}）。请安装 Graphviz，例如 `apt install graphviz` 或 `conda install graphviz`；"
            "在此之前，计算图以文字显示。",
            f"No graph can be drawn here ({why}). Install Graphviz, as by `apt install graphviz` or "
            "`conda install graphviz`; until then graphs are shown as text.",
        )
    return None


def _other_python() -> tuple[str, str] | None:
    expected = Path(os.environ.get("UV_PROJECT_ENVIRONMENT") or ".venv")
    expected = expected if expected.is_absolute() else ROOT / expected
    if not expected.is_dir() or Path(sys.prefix).resolve() == expected.resolve():
        return None  # installed another way (conda, Binder), or the right one
    return (
        f"这个内核不在课程的环境里：它用的是 `{sys.prefix}`，课程的环境在 `{expected}`。"
        "请用 `make lab` 启动，再从菜单 Kernel → Change Kernel 选择 Python 3 (ipykernel)。",
        f"This kernel is outside the course's environment: it runs in `{sys.prefix}`, the environment is `{expected}`. "
        "Start with `make lab`, then choose Python 3 (ipykernel) under Kernel → Change Kernel.",
    )


def _no_switch() -> tuple[str, str] | None:
    # Where JupyterLab looks: jupyter_core knows, and every kernel has it.
    from jupyter_core.paths import jupyter_path

    if any(Path(folder, "hooklab", "package.json").is_file() for folder in jupyter_path("labextensions")):
        return None
    return (
        "语言切换按钮没有装上，所以中英文会同时显示。请运行 `uv sync --reinstall-package hooklab`，再刷新页面。",
        "The language switch is not installed, so both languages show. "
        "Run `uv sync --reinstall-package hooklab`, then reload the page.",
    )


def _torch_version() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def _threads() -> int:
    wanted = os.environ.get("HOOKLAB_THREADS", "2")
    if not wanted.isdigit() or int(wanted) < 1:
        raise RuntimeError(
            f"HOOKLAB_THREADS={wanted!r}: expected a whole number of at least 1; unset it for 2 threads"
        )
    return int(wanted)


def _one_line(message: Warning | str, category: type[Warning], *place: object) -> str:
    text = re.sub(
        r"\s*\(Triggered internally at .*?\)", "", str(message)
    )  # a path of PyTorch's build machine
    return f"{category.__name__}: {text}\n"


def _ipython() -> Any:
    """The IPython that runs this cell, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _set_figures(shell: Any) -> None:
    # Read when the first figure is drawn; matplotlib is not imported here.
    shell.config.InlineBackend.figure_formats = {"png"}
    shell.config.InlineBackend.rc = {
        "figure.figsize": (7, 3.2),
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
    }
    # After every cell, before its figures are shown: the first of all makes IPython forget how to write one.
    shell.events.register("post_execute", _describe_figures)


def _describe_figures() -> None:
    text = _ipython().display_formatter.formatters["text/plain"]
    text.for_type_by_name("matplotlib.figure", "Figure", _in_words)


def _in_words(figure: Any, printer: Any, cycle: bool) -> None:
    """What is written in a figure, in place of <Figure size …>: the labextension makes it the alternative text."""
    words = [figure.get_suptitle()]
    for axes in figure.axes:
        legend = axes.get_legend()
        words += [axes.get_title(side) for side in ("left", "center", "right")]
        labels = {"x": axes.get_xlabel(), "y": axes.get_ylabel()}
        words += [f"{name}: {label}" for name, label in labels.items() if label]
        words += [text.get_text() for text in (*axes.texts, *(legend.get_texts() if legend else ()))]
    words = [" ".join(text.split()) for text in words if text.strip()]
    printer.text(f"Figure: {'; '.join(words)}" if words else repr(figure))


def _show_own_lines(
    shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: int | None = None
) -> list:
    """Show an error with the lines of the learner's cells alone; the magic %tb shows PyTorch's lines too."""
    try:
        shown = _shown(shell, kind, error, trace)
        if (advice := cells.advice(shell, error)) is not None:
            from IPython.display import display

            display(advice)
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
        shell.showsyntaxerror() if isinstance(error, SyntaxError) else shell.showtraceback(
            (kind, error, trace)
        )
        return []
    # Also the errors behind it ("the direct cause of ..."): cut for the moment in which they are printed.
    whole = [(each, each.__traceback__) for each in (error, *_chain(error))]
    try:
        for each, steps in whole:
            each.__traceback__ = _only_own(shell, steps)
        if isinstance(error, BaseExceptionGroup):  # IPython leaves its members out
            traceback.print_exception(kind, error, own)
            return []
        if isinstance(error, SyntaxError):  # by eval or exec
            steps = traceback.extract_tb(own)
            shown = shell.SyntaxTB.structured_traceback(kind, error, steps)
        else:
            shown = shell.InteractiveTB.structured_traceback(kind, error, own, tb_offset=0)
    finally:
        for each, steps in whole:
            each.__traceback__ = steps
    shell._showtraceback(kind, error, shown)
    _keep_what_is_shown(shell, error, shown)
    return shown


def _keep_what_is_shown(shell: Any, error: BaseException, shown: list[str]) -> None:
    """IPython formats an error once more, for its history. That takes half a second where it reads PyTorch's files."""
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
    short = None
    for step in reversed([step for step in _steps(trace) if _is_own(shell, step)]):
        short = TracebackType(short, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return short


def _is_own(shell: Any, step: Any) -> bool:
    return cells.in_cell(shell, step.tb_frame.f_code.co_filename)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    behind = error.__cause__ or error.__context__
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        yield behind
        behind = behind.__cause__ or behind.__context__


def _steps(trace: Any) -> Iterator[Any]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def main() -> None:
    """Print what is missing on this machine; the exit status says whether something is."""
    found = check_environment()
    with suppress(AttributeError):  # in a cell (%run -m) it is no file
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no Chinese still shows the English
    print(found)
    sys.exit(found.kind != "right")
