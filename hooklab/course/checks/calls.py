"""Answers that are judged by what they return: a table of calls, a table of mistakes, and the solution as the oracle."""

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hooklab.course.refusals import Refused, expect_like, refuse_first

__all__ = ["all_close", "close", "compare", "equal", "hook_maker", "outcome", "raised", "refuse_raised"]

Mistakes = Iterable[tuple[str, Callable[[Any], object]]]


def compare(
    solution: Callable, calls: Sequence[dict], mistakes: Mistakes, what: str = "returned"
) -> Callable[[Any], None]:
    """An `examine` for answers that are called once with each of `calls`, and return a tensor.

    Args:
        calls: the arguments by name, in their order. The answer and the solution get a copy of their own.
        mistakes: for `refuse_first`. The facts are the arguments by name, as they were before the call; `after`, which has the
            same after it; `got` and `want`.
        what: the phrase for what is returned.
    """

    def examine(answer: Callable) -> None:
        for call in calls:
            _judge(answer, solution, call, {}, mistakes, what)

    return examine


def hook_maker(
    solution: Callable, calls: Sequence[dict], mistakes: Mistakes, what: str = "returned"
) -> Callable[[Any], None]:
    """An `examine` for answers that make a tensor hook: the last argument of a call is the gradient that the hook gets.

    The hooks for different arguments are all made before the first one fires, so one that uses what another was made with is
    found. The mistakes have the `hook` among their facts; see `compare`.
    """

    def examine(answer: Callable) -> None:
        hooks = [answer(*list(call.values())[:-1]) for call in calls]
        for call, hook in zip(calls, hooks, strict=True):

            def fire(*given: Any, hook: Any = hook) -> Any:
                return hook(given[-1]) if callable(hook) else None

            _judge(fire, lambda *given: solution(*given[:-1])(given[-1]), call, {"hook": hook}, mistakes, what)

    return examine


def _judge(answer: Callable, solution: Callable, call: dict, facts: dict, mistakes: Mistakes, what: str) -> None:
    after = SimpleNamespace(**copy.deepcopy(call))
    want = solution(*copy.deepcopy(call).values())
    got = answer(*vars(after).values())
    refuse_first(mistakes, **call, **facts, after=after, got=got, want=want)
    if got is not None or want is not None:
        expect_like(got, want, what)


def equal(got: Any, want: Tensor) -> bool:
    """True if `got` is a tensor with the shape and the very values of `want`."""
    return isinstance(got, Tensor) and got.shape == want.shape and torch.equal(got, want)


def close(got: Any, want: Tensor) -> bool:
    """True if `got` is a tensor with the shape and the dtype of `want`, and values that agree."""
    same_kind = isinstance(got, Tensor) and (got.shape, got.dtype) == (want.shape, want.dtype)
    return same_kind and torch.allclose(got.detach(), want, rtol=1e-4, atol=1e-6)


def all_close(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    """True if both hold the same names, with values that agree."""
    return found.keys() == want.keys() and all(torch.allclose(found[name], want[name]) for name in want)


def raised(call: Callable[[], object]) -> Exception | None:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def outcome(call: Callable, *given: Any) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        return call(*given)
    except Exception as error:
        return error


@contextmanager
def refuse_raised(mistakes: str | Mistakes, **facts: Any) -> Iterator[None]:
    """Refuse an error of the block for the first of `mistakes` that holds, or for the one key. Otherwise it goes on.

    The facts have the `error`, the first `line` of what it says, and whether a `forward` was running (`in_forward`).
    """
    table = [(mistakes, lambda t: True)] if isinstance(mistakes, str) else mistakes
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        line, frames = str(error).partition("\n")[0], traceback.extract_tb(error.__traceback__)
        in_forward = any(frame.name == "forward" for frame in frames)
        refuse_first(table, **facts, error=error, line=line, in_forward=in_forward)
        raise
