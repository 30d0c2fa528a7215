"""What hooks need to know of a checkpoint around them, which runs the same forward a second time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import is_grad_enabled
from torch._C import _current_graph_task_id as graph_task
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as modes_open
from torch._C._autograd import _get_sequence_nr as next_node
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from hooklab._support.compiler import untraced
from hooklab._support.packing import hold, installed, outer_hooks, unhold

__all__ = [
    "NO_BACKWARD",
    "apart",
    "graph_task",
    "is_tracing",
    "modes_open",
    "next_node",
    "recomputing",
    "selective",
]

# Inside a backward there is a graph task: a forward that runs there is a checkpoint's recomputation.
NO_BACKWARD = -1
# `next_node()` is the number of the Node that is made next in this thread: where it has not changed, no graph was made.
SELECTIVE = "_CachingTorchDispatchMode", "_CachedTorchDispatchMode"  # in forward, and in the recomputation


def recomputing(own: int = NO_BACKWARD) -> bool:
    """True where a checkpoint computes again: in a backward, or while someone reads what a Node has saved.

    What a hook of the backward `own` runs itself is no recomputation.
    """
    if graph_task() not in (NO_BACKWARD, own):
        return True
    return is_grad_enabled() and _hooks_are("_recomputation_hook")


def selective() -> bool:
    """True inside a selective checkpoint: it numbers operations, and would give the model what a hook has computed."""
    return any(type(mode).__name__ in SELECTIVE for mode in _get_current_dispatch_mode_stack())


@contextmanager
def without_selective() -> Iterator[None]:
    """The other modes stay: a tensor that a hook makes under FakeTensorMode has to be a fake one, too."""
    others = [mode for mode in _get_current_dispatch_mode_stack() if type(mode).__name__ not in SELECTIVE]
    with _disable_current_modes():
        pushed = []
        try:
            for mode in others:
                _push_mode(mode)
                pushed.append(mode)
            yield
        finally:
            for mode in reversed(pushed):
                _pop_mode(getattr(mode, "_mode_key", None))


def apart() -> ExitStack:
    """What is computed in it is no part of a trace, nor of a checkpoint: that counts what its two forwards save."""
    contexts = ExitStack()
    if is_tracing():
        contexts.enter_context(untraced())
    if _hooks_are("_checkpoint_hook", "_recomputation_hook"):
        contexts.enter_context(installed(hold, unhold))
    if modes_open() and selective():
        contexts.enter_context(without_selective())
    return contexts


def _hooks_are(*classes: str) -> bool:
    """True where the saved-tensor hooks that are active now are those of `torch.utils.checkpoint`."""
    hooks = outer_hooks()
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(classes)
