"""Which module of a model is running its forward in this thread: hooks on every module tell."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any

from torch import nn

from hooklab._support.handles import OwnHook
from hooklab._support.torch_private import eager

__all__ = ["ModuleStack"]


class ModuleStack:
    """The running calls of a model's modules, from its making to `remove()`; the object does not keep the model alive.

    `around()` is called as each of them begins; the context that it returns is open until the call ends.
    """

    def __init__(self, model: nn.Module, around: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._thread, self._root, self._around = get_ident(), type(model).__name__, around
        self._running: list[tuple[str, AbstractContextManager]] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            # It comes before other pre-hooks: where one of those raises, `_end` finds the call that it looks for.
            begin, end = OwnHook(_begin, self, name), OwnHook(_end, self, name)
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))

    def innermost(self) -> str:
        """The name of the module whose forward is running; the model itself by its class; empty outside."""
        return (self._running[-1][0] or self._root) if self._running else ""

    def running(self) -> tuple[str, ...]:
        """The names of all modules whose forward is running, the outermost first; the model itself is `""`."""
        return tuple(name for name, _ in self._running)

    def remove(self) -> None:
        """Take the hooks off; a context that an interrupted call has left open is closed."""
        while self._handles:
            self._handles.pop().remove()
        self._close(0)

    def _close(self, depth: int) -> None:
        while len(self._running) > depth:
            self._running.pop()[1].__exit__(None, None, None)


@eager
def _begin(stack: ModuleStack, name: str, *call: Any) -> None:
    if get_ident() == stack._thread:
        context = stack._around()
        context.__enter__()
        stack._running.append((name, context))


@eager
def _end(stack: ModuleStack, name: str, *call: Any) -> None:
    names = [running for running, _ in stack._running]
    if get_ident() == stack._thread and name in names:
        # Calls inside it that have not ended were interrupted from the keyboard, which calls no hook.
        stack._close(len(names) - 1 - names[::-1].index(name))
