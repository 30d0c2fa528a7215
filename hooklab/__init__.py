"""hooklab: a course on PyTorch hooks, and the small package it teaches with."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "this Python has no PyTorch, so it is not hooklab's environment. "
        "Run `make lab` (or `uv run hooklab lab`) in hooklab's folder.\n"
        "当前 Python 里没有 PyTorch，说明它不是 hooklab 的环境。"
        "请在 hooklab 目录下运行 `make lab`（或 `uv run hooklab lab`）。"
    ) from None

from hooklab import draw
from hooklab.census import HookLeak, HookRecord, hooks_on, no_leftovers
from hooklab.course import check
from hooklab.gradients import clip, clip_gradients, scale, watch, zero
from hooklab.layers.activation_gradients import with_grad
from hooklab.layers.features import features
from hooklab.layers.patch import patch
from hooklab.layers.select import select
from hooklab.layers.statistics import layer_statistics
from hooklab.layers.verbose import verbose
from hooklab.models.compare import compare
from hooklab.models.finite import NotFinite, finite
from hooklab.models.summary import summary
from hooklab.models.updates import updates
from hooklab.removal import remove_hooks
from hooklab.saved import Offload, checkpoint_segments, saved_tensors
from hooklab.tracing import trace

__version__ = "0.1.0"

__all__ = [
    "HookLeak",
    "HookRecord",
    "NotFinite",
    "Offload",
    "check",
    "checkpoint_segments",
    "clip",
    "clip_gradients",
    "compare",
    "draw",
    "features",
    "finite",
    "hooks_on",
    "layer_statistics",
    "no_leftovers",
    "patch",
    "remove_hooks",
    "saved_tensors",
    "scale",
    "select",
    "summary",
    "trace",
    "updates",
    "verbose",
    "watch",
    "with_grad",
    "zero",
]
