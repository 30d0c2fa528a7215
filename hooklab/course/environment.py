"""Is this machine ready for the course? What is missing, and how to get it, in both languages."""

import importlib.util
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hooklab.course.message import Message
from hooklab.draw import graphviz

__all__ = [
    "OLDEST_TORCH",
    "STORED_TORCH",
    "cached_weights",
    "check_environment",
    "data",
    "main",
    "old_torch",
    "other_torch",
]

OLDEST_TORCH = (2, 11)
STORED_TORCH = "2.15.0"  # the stored outputs come from it
DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).resolve().parents[2]


def check_environment() -> Message:
    """Is this machine ready for the course? Everything that is missing, and how to get it, in both languages."""
    problems = [problem for problem in (old_torch(), _no_graphviz(), _other_python(), _no_switch()) if problem]
    if not problems:
        return Message("right", "环境就绪：可以开始了。", "Your machine is ready: go ahead.")
    zh, en = (
        "\n".join(f"{number}. {text}" for number, text in enumerate(half, 1)) for half in zip(*problems, strict=True)
    )
    return Message("wrong", f"还差 {len(problems)} 项：\n{zh}", f"To fix: {len(problems)}.\n{en}", "environment")


def main() -> None:
    """Print what is missing on this machine; the exit status says whether something is."""
    found = check_environment()
    output: Any = sys.stdout
    with suppress(AttributeError):  # in a cell (%run -m) it is no file
        output.reconfigure(errors="replace")  # a terminal that knows no Chinese still shows the English
    print(found)
    sys.exit(found.kind != "right")


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


def data(name: str) -> Path:
    """The file `name` that a notebook reads. It is part of the package, so a notebook finds it wherever it lies."""
    return DATA / name


def old_torch() -> tuple[str, str] | None:
    """Why this PyTorch does not do, in Chinese and English; None where it does."""
    if _torch_version() >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    zh, en = "在 hooklab 目录下运行 `uv sync`", "Run `uv sync` in hooklab's folder"
    if _hosted():
        zh, en = "运行 `%pip install -U torch`，再重启内核", "Run `%pip install -U torch`, then restart the kernel"
    return (
        f"PyTorch 版本过旧：当前是 {torch.__version__}，本课程需要 {oldest} 或更高版本。请{zh}。",
        f"PyTorch is too old: found {torch.__version__}, needed {oldest} or newer. {en}.",
    )


def other_torch() -> Message | None:
    """What to expect where this PyTorch is another than the one that the stored outputs come from."""
    found = torch.__version__.partition("+")[0]  # without the build, as in 2.15.0+cpu
    if found == STORED_TORCH:
        return None
    return Message(
        "note",
        f"笔记本里存下的输出来自 PyTorch {STORED_TORCH}，这里是 {found}：个别数字和报错的措辞可能不同。",
        f"The stored outputs come from PyTorch {STORED_TORCH}, and this is {found}: some numbers and messages may differ.",
    )


def _hosted() -> bool:
    """True on Colab and Kaggle, where a cell installs what is missing: no folder of the course, no terminal, no uv."""
    return "google.colab" in sys.modules or "KAGGLE_KERNEL_RUN_TYPE" in os.environ


def _no_graphviz() -> tuple[str, str] | None:
    if not graphviz.available():
        how = "`%pip install pygraphviz`" if _hosted() else "`uv sync` / `pip install pygraphviz`"
        return (
            f"没有画计算图的工具：既没有 `dot`，也没有 pygraphviz。请运行 {how}；在此之前，计算图以文字显示。",
            "Nothing here can draw a graph: neither `dot` nor pygraphviz is installed. "
            f"Run {how}; until then graphs are shown as text.",
        )
    try:
        graphviz.svg_from_dot("digraph { a -> b }")
    except graphviz.NotDrawn as error:  # a small system lacks libraries that the wheel of pygraphviz needs
        why = str(error).partition("; install ")[0]
        how = "`!apt install -y graphviz`" if _hosted() else "`apt install graphviz` / `conda install graphviz`"
        return (
            f"计算图画不出来（{why}）。请安装 Graphviz，例如 {how}；在此之前，计算图以文字显示。",
            f"No graph can be drawn here ({why}). Install Graphviz, for example with {how}; "
            "until then graphs are shown as text.",
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
    if _hosted() or importlib.util.find_spec("jupyterlab") is None:
        return None  # without JupyterLab's toolbar there is no place for it
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
