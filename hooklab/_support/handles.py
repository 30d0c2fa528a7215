"""Hooks, or other changes, that were installed together and go together."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self
from weakref import WeakSet

from torch import nn

from hooklab._support.checkpoints import graph_task
from hooklab._support.compiler import warn_if_ignored

__all__ = ["Installed", "kwargs_and_output", "own_hook"]


def kwargs_and_output(given: tuple) -> tuple[dict, Any]:
    """What a hook with `with_kwargs=True` gets behind the positional arguments.

    `torch.ao.quantization` hands hooks on to the layers it puts in place of others, without that option.
    """
    return given if len(given) == 2 else ({}, *given)


IDLE = nullcontext().__exit__  # it takes anything, returns None, and can be pickled without hooklab


class OwnHook(partial):
    """A hook on a module, `function(*state, module, args, output)`, that belongs to this module alone.

    A deep copy of the module, and what is pickled of it, has a hook in its place that does nothing. So forwards of the
    copy are not recorded, and nothing of ours travels with it.
    """

    def __deepcopy__(self, memo: dict) -> Callable:
        return IDLE

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return getattr, (IDLE.__self__, IDLE.__name__)


def own_hook(function: Callable, *state: Any) -> Callable:
    return OwnHook(function, *state)


class Installed:
    """Owns the handles it was given: removes those and no others, at `.remove()` or at the end of a `with`."""

    _gone = "its hooks have been removed, and do not come back"

    def __init__(self, what: str = "", layers: Iterable[nn.Module] = ()) -> None:
        self._handles: list[Any] = []
        self._what, self._layers = what, WeakSet(layers)  # that calls are expected of; empty once removed
        self._task = graph_task()  # the backward in whose hook this was made

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Around what installs: after an error or an interruption nothing stays."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

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
            raise RuntimeError(f"{self._what or type(self).__name__}: {self._gone}; call the function again")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()
