"""Refusals: what a check says of an answer that is wrong, always with a reason. The words stand in `checks/*.toml`.

A refusal says what was seen and where to look, never the answer. What several checks look for stands here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hooklab.course.words import Phrase

__all__ = [
    "Refused",
    "expect_like",
    "grad_stays_on",
    "refuse",
    "refuse_first",
    "refuse_from_before",
    "refuse_latest_call",
    "refuse_other_items",
    "refuse_removing_others",
    "refuse_result_of",
    "refuse_same_object",
]


class Refused(Exception):
    """An answer was refused, for what stands under `key` in the words of the exercise; `facts` go into them."""

    def __init__(self, key: str, facts: dict[str, Any]):
        super().__init__(key)
        self.key, self.facts = key, facts


def refuse(key: str, **facts: Any) -> Never:
    """End the examination: the answer is wrong.

    Args:
        key: the reason, as it stands in the words of the exercise. Where one mistake is told in two ways, "stale-twice"
            says it in the second way: the reason is "stale".
        **facts: what the words name between braces; a `Phrase` for what differs between the languages.
    """
    raise Refused(key, facts)


def refuse_first(mistakes: Iterable[tuple[str, Callable[[Any], object]]], **facts: Any) -> None:
    """Refuse for the first of `mistakes`, each a key and a test, whose test holds.

    A test is given the facts as attributes of one object; where it finds more to tell it sets that there.
    """
    seen = SimpleNamespace(**facts)
    for key, holds in mistakes:
        if holds(seen):
            refuse(key, **vars(seen))


def refuse_result_of(mistakes: Iterable[tuple[str, Callable[[Any], Sequence[Any]]]], found: Any, **facts: Any) -> None:
    """Refuse `found`, numbers that are not what is wanted, for the first of `mistakes` that gives them.

    Args:
        mistakes: each a key, and what comes out of that mistake: one or several values, computed from the facts.
        found: a tensor or a number.
    """
    found = torch.as_tensor(found)
    for key, results in mistakes:
        values = [torch.as_tensor(value, dtype=found.dtype) for value in results(SimpleNamespace(**facts))]
        if any(torch.allclose(found, value, rtol=1e-3, atol=1e-4) for value in values):
            refuse(key, **facts)


def expect_like(got: Any, want: Tensor, what: str = "returned") -> None:
    """Refuse `got` unless it is a tensor with the shape, dtype and values of `want`; `what` names the phrase for it."""
    if not isinstance(got, Tensor):
        refuse("wrong_type", what=Phrase(what), got=got)
    shapes, dtypes = (tuple(got.shape), tuple(want.shape)), (got.dtype, want.dtype)
    for key, (found, expected) in (("wrong_shape", shapes), ("wrong_dtype", dtypes)):
        if found != expected:
            refuse(key, what=Phrase(what), found=found, expected=expected)
    if not torch.allclose(got.detach(), want, rtol=1e-4, atol=1e-6, equal_nan=True):
        refuse("wrong_values", what=Phrase(what))


def refuse_from_before(names: Iterable[Any], model: nn.Module, others: Iterable[str]) -> None:
    """Refuse `names` with one that `model` has not, and that another model of this check has (`others`)."""
    own = dict(model.named_modules())
    if old := [name for name in names if name in others and name not in own]:
        refuse("from_before", name=old[0])


def refuse_latest_call() -> Never:
    """Refuse an answer whose first call uses what a second one was given."""
    refuse("latest_call")


def refuse_same_object(first: Any, second: Any) -> None:
    """Refuse an answer whose two calls, each with something else, returned one list or dict."""
    if first is second:
        refuse("same_object", first=first)


def refuse_other_items(handles: Iterable[Any]) -> None:
    """Refuse a list or a tuple of handles in which something else is found; a list has a `remove` of its own."""
    for number, item in enumerate(handles, start=1):
        if isinstance(item, list | set) or not callable(getattr(item, "remove", None)):
            refuse("other_items", number=number, item=item)


def refuse_removing_others(
    register: Callable[[Callable], RemovableHandle], hang: Callable[[], RemovableHandle]
) -> None:
    """`hang()` gives the answer's handle. A hook that `register` puts there before it, and one after it, have to stay."""
    first = register(lambda *args: None)
    handle = hang()
    second = register(lambda *args: None)
    handle.remove()
    if any(ours.id not in (ours.hooks_dict_ref() or ()) for ours in (first, second)):
        refuse("removed_others")


@contextmanager
def grad_stays_on() -> Iterator[None]:
    """Whatever is found where an answer has left gradients off is due to that. Each thread has its own mode."""
    try:
        yield
    except Exception:
        _refuse_grad_left_off()
        raise
    _refuse_grad_left_off()


def _refuse_grad_left_off() -> None:
    if not torch.is_grad_enabled():
        refuse("grad_left_off")
