"""What hooklab says of compiled models, whose compiled code calls no hooks that were installed later."""

import warnings

import torch
from torch import nn

from hooklab._support.torch_private import is_compiled

__all__ = ["refuse_compiling", "warn_if_compiled"]


def warn_if_compiled(function: str, model: nn.Module, stacklevel: int) -> None:
    """Warn that a compiled model may ignore the hooks that are installed now."""
    if any(map(is_compiled, model.modules())):
        warnings.warn(
            f"{function}: this model is compiled; once it has run, hooks installed after compiling are ignored, "
            "and nothing inside it will be seen. Install them before torch.compile, or run under "
            "torch.compiler.set_stance('force_eager').",
            stacklevel=stacklevel,
        )


def refuse_compiling(what: str) -> None:
    """Raise inside a function that is being compiled; torch.compile then runs that function uncompiled."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{what} cannot be opened inside torch.compile or torch.export; open it around the call of the compiled model"
        )
