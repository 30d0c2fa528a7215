"""Answers that hang a hook on a tensor: tensors for them, the backwards that make the hook fire, and what it should bear.

Where an answer is called `hang`, `hang(tensor)` returns the list into which its hook puts what it receives.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hooklab.course.refusals import refuse

__all__ = [
    "after_other_half",
    "backward",
    "middle",
    "refuse_never_freed",
    "refuse_zero_for_none",
    "values",
]

Hang = Callable[[Tensor], list]


def middle(size: int = 2) -> Tensor:
    """A tensor between a leaf and a loss."""
    return torch.ones(size, requires_grad=True) * 2


def backward(tensor: Tensor, *factors: float) -> None:
    """A backward for each of `factors`; it is the gradient of every entry of `tensor`."""
    for factor in factors:
        (tensor * factor).sum().backward(retain_graph=True)


def values(recorded: Iterable[Any]) -> list[Any]:
    """Tensors as lists, to be compared and shown; anything else as it is."""
    return [item.tolist() if isinstance(item, Tensor) else item for item in recorded]


def after_other_half(hang: Hang) -> list[Any]:
    """What is put down for one of the two outputs of a `chunk`: it should be [[1.0, 1.0]].

    First only the other output goes through backward, and the hook of this one receives None; then this one does.
    """
    left, right = middle(4).chunk(2)
    recorded = hang(right)
    with suppress(AttributeError, TypeError):  # an answer that takes None for a gradient
        backward(left, 1)
        backward(right, 1)
    return values(recorded)


def refuse_zero_for_none(hang: Hang) -> None:
    """Refuse an answer that puts down nothing where the gradient is zero."""
    tensor = middle()
    recorded = hang(tensor)
    backward(tensor, 0)
    if not recorded:
        refuse("zero_for_none")


def refuse_never_freed(hang: Hang) -> None:
    """Refuse an answer whose hook refers to its own tensor: a circle through C++, which nothing breaks."""
    tensor = middle()
    hang(tensor)
    alive = weakref.ref(tensor)
    backward(tensor, 3)
    del tensor
    gc.collect()
    if alive() is not None:
        refuse("never_freed")
