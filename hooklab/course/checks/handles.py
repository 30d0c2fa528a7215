"""Answers that install a hook and return its handle. `refuse_removing_others` in refusals.py is for them, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hooklab.course.checks.models import Before
from hooklab.course.refusals import refuse

__all__ = ["expect_handle", "hung", "refuse_second_hook"]


def expect_handle(handle: Any) -> None:
    """Refuse what cannot be removed. A list and a set have a `remove` of their own."""
    if isinstance(handle, list | set) or not callable(getattr(handle, "remove", None)):
        refuse("no_handle", handle=handle)


@contextmanager
def hung(*handles: Any) -> Iterator[None]:
    """Within the block the hooks are there; behind it they are removed, since a global one would reach later modules."""
    yield
    for handle in handles:
        handle.remove()


def refuse_second_hook(before: Before) -> None:
    """The handle has been removed. `before` was taken of the model when the answer had not been called yet."""
    for kind, place, _ in before.new_hooks():
        refuse("second_hook", kind=kind, place=place)
