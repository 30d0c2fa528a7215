"""Does a guess agree with what happened? For `check.predict`."""

import re
from typing import Any

import torch
from torch import Tensor

__all__ = ["agree", "shown"]


def agree(guess: Any, actual: Any) -> bool:
    """True if `guess` means the same as `actual`: see `hooklab.exercises.check.predict`."""
    if isinstance(actual, set | frozenset):
        return _words(guess) == {str(item).casefold() for item in actual}
    if isinstance(guess, str) or isinstance(actual, str) or actual is None:
        return str(guess).strip().casefold() == shown(actual).casefold()
    if isinstance(guess, bool) or isinstance(actual, bool):
        return isinstance(guess, bool) and isinstance(actual, bool) and guess == actual
    if _is_words(guess) or _is_words(actual):
        return [str(item).casefold() for item in guess] == [str(item).casefold() for item in actual]
    try:
        guessed = torch.as_tensor(guess, dtype=torch.float64)
        happened = torch.as_tensor(actual, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return False
    same_shape = guessed.shape == happened.shape or guessed.numel() == happened.numel() == 1
    return same_shape and torch.allclose(
        guessed.flatten(), happened.flatten(), rtol=1e-2, atol=1e-3, equal_nan=True
    )


def shown(value: Any) -> str:
    """`value` as short text that is the same in every run."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(str, value))) or "nothing"
    if isinstance(value, list | tuple | torch.Size):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, str) for item in value)


def _words(guess: Any) -> set[str]:
    items = re.findall(r"[\w.]+", guess) if isinstance(guess, str) else guess
    try:
        return {str(item).casefold() for item in items}
    except TypeError:  # one number, say, where names were asked for
        return {str(guess)}
