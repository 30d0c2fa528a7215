"""Hooks that were installed together and go together."""

from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, Self
from weakref import WeakSet

from torch import nn

from hooklab._checkpoints import graph_task
from hooklab._compiler import warn_if_ignored

__all__ = ["Installed", "OwnHook", "kwargs_and_output"]


def kwargs_and_output(given: tuple) -> tuple[dict, Any]:
    """What a hook with `with_kwargs=True` gets behind the positional arguments.

    `torch.ao.quantization` hands hooks on to the layers it puts in place of others, without that option.
    """
    return given if len(given) == 2 else ({}, *given)


class OwnHook:
    """What a hook on a module needs; the hook is one of its methods, which costs no more than a function.

    A copy of the model has it too, idle: its forwards are not ours, and what it would refer to can go.
    """

    __slots__ = ()
    IDLE: ClassVar[tuple] = ()  # the arguments that make an idle one

    def __deepcopy__(self, memo: dict) -> Self:
        return type(self)(*self.IDLE)

    def __reduce__(self) -> Any:
        """What is pickled is loaded without hooklab, too: by the names of all hooks it has one that does nothing."""
        return SimpleNamespace, (), dict.fromkeys(("begin", "end", "hook", "stop"), nullcontext().__exit__)


class Installed:
    """Owns the handles it was given: removes those and no others, at `.remove()` or at the end of a `with`."""

    def __init__(self, what: str = "", layers: Iterable[nn.Module] = ()) -> None:
        self._handles: list[Any] = []
        self._what, self._layers = what, WeakSet(layers)  # that calls are expected of; empty once removed
        self._task = graph_task()  # the backward in whose hook this was made

    def remove(self) -> None:
        """Take the hooks off again; what was recorded stays. Twice is harmless."""
        layers, self._layers = list(self._layers), set()
        while self._handles:
            self._handles.pop().remove()
        if layers and not self._has_seen():
            warn_if_ignored(self._what, layers)  # which may raise, as a warning does where it is an error

    def _has_seen(self) -> bool:
        """False if no hook of the layers has fired."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        """What was recorded can be copied and pickled, as a part of a model perhaps; hooks stay where they are."""
        return {**vars(self), "_handles": [], "_layers": set()}

    def __enter__(self) -> Self:
        if not self._handles:
            raise RuntimeError(
                f"{type(self).__name__}: its hooks have been removed, and do not come back; call the function again "
                "for new ones"
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()
