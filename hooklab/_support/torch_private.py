"""Every private name of PyTorch that hooklab uses, each with what happens where it is missing.

`tests/package/test_torch_private.py` removes them one by one. The tables in which PyTorch keeps its hooks are the
subject of `census.py` and stand there.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from sys import _getframe as this_frame
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import Node
from torch.nn.utils import parametrize

NO_BACKWARD = -1  # what `graph_task()` returns outside backward


# The number of the backward pass that is running in this thread. A forward that runs there is a recomputation; where
# PyTorch cannot say, recomputations under a checkpoint are counted like forwards.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: NO_BACKWARD)


# Queues a call for the end of the backward pass that is running; public since PyTorch 2.15.
queue_callback: Callable[[Callable[[], None]], None] = (
    getattr(graph, "queue_callback", None) or torch.autograd.Variable._execution_engine.queue_callback
)


def recomputing(own: int = NO_BACKWARD) -> bool:
    """True while backward runs, where a checkpoint recomputes, but for the pass `own`, in whose hook a block was opened."""
    return graph_task() not in (NO_BACKWARD, own)


def outer_hooks() -> tuple[Callable, Callable] | None:
    """The innermost pair of saved-tensor hooks that is active in this thread; None also where PyTorch cannot say."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(False) if top is not None else None


def close_hooks(before: tuple[Callable, Callable] | None) -> int:
    """Close the saved-tensor hooks that were opened after `before`, which `outer_hooks()` has told; how many they were."""
    closed = 0
    while outer_hooks() not in (before, None):
        # Whichever pair a context is given, its end closes the innermost.
        graph.saved_tensors_hooks(lambda saved: saved, lambda packed: packed).__exit__()
        closed += 1
    return closed


def saving_node() -> Any:
    """The Node that is running its backward in this thread; None outside, and where PyTorch cannot say."""
    current = getattr(torch._C, "_current_autograd_node", None)
    return current() if current is not None else None


def is_checkpoint_hook(hook: object) -> bool:
    """True for a saved-tensor hook of a checkpoint, known by the module that defines it.

    Where PyTorch defines it elsewhere, `saved_tensors` does not count what a checkpoint recomputes.
    """
    return getattr(hook, "__module__", "") == "torch.utils.checkpoint"


def under_checkpoint() -> bool:
    """True where a checkpoint, of either kind, has called what runs now; False where PyTorch defines it elsewhere."""
    frame: FrameType | None = this_frame()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


def saves_something(node: Node) -> bool:
    """True for a Node that has saved tensors; False for all where PyTorch calls those attributes otherwise."""
    return any(name.startswith("_raw_saved_") for name in dir(node))


def hook_ids(tensor: Tensor) -> tuple[int, ...]:
    """The hooks that `tensor.register_hook` has put on it, by number; none where PyTorch keeps them elsewhere."""
    return tuple(getattr(tensor, "_backward_hooks", None) or ())


def cached_parametrizations() -> bool:
    """True inside `torch.nn.utils.parametrize.cached()`; False where PyTorch cannot say."""
    return bool(getattr(parametrize, "_cache_enabled", 0))


def eager(function: Callable) -> Callable:
    """The same function, which torch.compile leaves alone with all that it calls: hooks run in Python, on real tensors.

    `torch.compiler.disable` would load the whole compiler, for seconds. Where PyTorch has other names, it traces the hook.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = "hooks of hooklab run in Python; compile without fullgraph=True"
    return function


eager(eager)  # a block may be opened inside what is compiled


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` wraps, or `model` itself."""
    return model.get_submodule("_orig_mod") if "_orig_mod" in model._modules else model


def is_compiled(module: nn.Module) -> bool:
    """True after `torch.compile(module)`, `module.compile()`, or `torch.compile` on its forward."""
    forward = getattr(module, "forward", None)
    compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return "_orig_mod" in module._modules or bool(getattr(module, "_compiled_call_impl", None)) or compiled


def running_calls(error: BaseException) -> Iterator[tuple[nn.Module, tuple, dict]]:
    """The calls of modules that were running when `error` was raised, the innermost last, with their inputs.

    They are read from the frames in which PyTorch calls a module; none where those look different.
    """
    call = getattr(getattr(nn.Module, "_call_impl", None), "__code__", None)
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is call and frame.f_locals.keys() >= {"self", "args", "kwargs"}:
            yield frame.f_locals["self"], frame.f_locals["args"], frame.f_locals["kwargs"]


def without_modes() -> AbstractContextManager:
    """A block in which no torch-dispatch mode sees what is computed; a plain block where PyTorch cannot switch them off.

    The mode of a selective checkpoint would give results of hooks to the model when it recomputes.
    """
    modes_open = getattr(torch._C, "_len_torch_dispatch_stack", None)
    switched_off = getattr(getattr(torch.utils, "_python_dispatch", None), "_disable_current_modes", None)
    return switched_off() if switched_off and modes_open and modes_open() else nullcontext()


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor of `torch.export` or `FakeTensorMode`, which has a shape and no values."""
    fake = getattr(getattr(torch, "_subclasses", None), "FakeTensor", None)
    return fake is not None and isinstance(tensor, fake)


# True inside vmap, grad or jvp of torch.func, where a tensor stands for others; False where PyTorch cannot say.
in_transform: Callable[[Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None
) or (lambda tensor: False)


def each_operation(run: Callable[[Any, tuple, dict], Any]) -> AbstractContextManager | None:
    """A block in which every operation on tensors is given to `run(operation, args, kwargs)`, which calls it.

    None where PyTorch has no such mode.
    """
    mode: Any = getattr(getattr(torch.utils, "_python_dispatch", None), "TorchDispatchMode", None)
    if mode is None:
        return None

    def dispatch(self: Any, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(operation, args, kwargs or {})

    opened: AbstractContextManager = type("EachOperation", (mode,), {"__torch_dispatch__": dispatch})()
    return opened
