"""What torch.compile must leave alone: our hooks run in Python, on real tensors."""

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType

import torch
from torch import nn

__all__ = [
    "compiling",
    "eager",
    "eager_inside",
    "marked_eager",
    "refuse_compiling",
    "untraced",
    "warn_if_compiled",
    "warn_if_ignored",
]

try:
    # The part of the compiler that is always there: to load the rest takes seconds. These names are PyTorch's own;
    # where they have gone, a compiler that traces a call of ours still leaves it out, by its mark.
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # another PyTorch
    set_code_exec_strategy = None
try:
    from torch._guards import CompileContext, TracingContext  # each thread has its own
except ImportError:
    CompileContext = TracingContext = None


def eager(function: Callable) -> Callable:
    """The same function. Where a compiler is at work, it leaves it alone, and what it calls.

    As `torch.compiler.disable` does, without a frame more in every call; holds also for a compiler that is loaded later.
    """
    _skip(function.__code__)
    return marked_eager(function)


def marked_eager(function: Callable) -> Callable:
    """The same for one of the functions that `eager_inside` has in view, where the compiler of backward meets it too."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "hooks of hooklab run in Python; compile without fullgraph=True"
    return function


def eager_inside(function: Callable) -> Callable:
    """The same for the functions defined in `function` that autograd alone calls: to mark each takes longer than it."""
    for part in function.__code__.co_consts:
        if isinstance(part, CodeType):
            _skip(part)
    return function


def _skip(code: CodeType) -> None:
    if set_code_exec_strategy is not None:
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


eager(eager)


def compiling() -> bool:
    """True where a compiler is at work in this thread: `torch.compiler.is_compiling()` is true in all threads then."""
    if not torch.compiler.is_compiling():
        return False
    contexts = [context for context in (CompileContext, TracingContext) if context is not None]
    return (
        torch.compiler.is_dynamo_compiling()
        or not contexts
        or any(one.try_get() is not None for one in contexts)
    )


_skip(compiling.__code__)  # a tracer goes into it, and answers yes; compiled by itself it would always say so


@contextmanager
def untraced() -> Iterator[None]:
    """For torch.jit, what is computed in it does not belong to the model."""
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(tracing)


def refuse_compiling(what: str) -> None:
    """Inside a compiled function there is no Python to run; torch.compile goes on without compiling it then."""
    if compiling():
        raise NotImplementedError(
            f"{what} cannot be opened inside torch.compile or torch.export; open it around the call of the compiled model"
        )


def warn_if_compiled(function: str, model: nn.Module, stacklevel: int) -> None:
    """Say aloud that a compiled model may ignore hooks which are installed now."""
    if any(map(_is_compiled, model.modules())):
        warnings.warn(
            f"{function}: this model is compiled; once it has run, hooks installed after compiling are ignored, "
            "and nothing inside it will be seen. Install them before torch.compile, or run under "
            "torch.compiler.set_stance('force_eager').",
            stacklevel=stacklevel,
        )


def warn_if_ignored(function: str, layers: Iterable[nn.Module]) -> None:
    """At the end of a block that has seen nothing: say so, if something compiled around these may have called them."""
    utils, own = sys.modules.get("torch._dynamo.utils"), set(layers)
    if not own or sys.exception() is not None or not getattr(utils, "counters", {}).get("frames"):
        return  # nothing was ever compiled: to look for it takes a tenth of a second
    if any(_is_around(one, own) for one in gc.get_objects() if issubclass(type(one), nn.Module)):
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"{function}: nothing was seen in this block, and something compiled is around these layers. It ignores hooks "
            "that are installed once it has run: open the block before torch.compile, or run it under "
            "torch.compiler.set_stance('force_eager').",
            stacklevel=level,
        )


def _is_around(module: nn.Module, layers: set[nn.Module]) -> bool:
    try:
        return _is_compiled(module) and not layers.isdisjoint(nn.Module.modules(module))
    except Exception:  # any module of this process, perhaps half made: what its attributes raise is not ours
        return False


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, `module.compile()`, or `torch.compile` on its forward."""
    # A ScriptModule's attributes cannot all be asked for; what torch.compiler.disable marks is not compiled.
    forward = getattr(module, "forward", None)
    compiled = hasattr(forward, "_torchdynamo_orig_callable") and not getattr(
        forward, "_torchdynamo_disable", False
    )
    return "_orig_mod" in module._modules or bool(module._compiled_call_impl) or compiled
