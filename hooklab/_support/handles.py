"""Hooks, or other changes, that were installed together and go together."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

from hooklab._support.torch_private import graph_task

__all__ = ["Installed", "OwnHook"]

NOWHERE = nullcontext()  # its `__exit__` takes anything, returns None, and is pickled without hooklab


class OwnHook(partial):
    """A hook on a module, `function(*state, module, args, output)`, that belongs to this module alone.

    A deep copy of the module, and what is pickled of it, has a hook in its place that does nothing.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return getattr, (NOWHERE, "__exit__")


class Installed:
    """Owns the handles it was given: removes those and no others, at `.remove()` or at the end of a `with`."""

    _gone = "its hooks have been removed, and do not come back"

    def __init__(self, what: str) -> None:
        self._handles: list[Any] = []
        self._what = what
        self._task = graph_task()  # the backward pass in whose hook this was made

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
        while self._handles:
            self._handles.pop().remove()

    def __getstate__(self) -> dict[str, Any]:
        """What was recorded can be copied and pickled, as a part of a model perhaps; hooks stay where they are."""
        return {**vars(self), "_handles": []}

    def __enter__(self) -> Self:
        if not self._handles:
            raise RuntimeError(f"{self._what}: {self._gone}; call the function again")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()
