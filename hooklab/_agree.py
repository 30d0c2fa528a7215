"""Does a guess agree with what happened? For `check.predict`."""

import ast
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["agree", "as_meant", "shown"]


def agree(guess: Any, actual: Any) -> bool:
    """True if `guess` means the same as `actual`: see `hooklab.exercises.check.predict`."""
    guess, actual = _plain(guess), _plain(actual)
    if isinstance(actual, set | frozenset):
        if isinstance(guess, str) and {guess.strip().casefold()} == {str(item).casefold() for item in actual}:
            return True  # one name of several words
        return _names(guess) == {str(item).casefold() for item in actual}
    if isinstance(actual, str) and isinstance(guess, list | tuple | set | frozenset) and len(guess) == 1:
        (guess,) = guess
    if isinstance(guess, str) and not isinstance(actual, str):
        guess = _literal(guess)
    if isinstance(guess, str) or isinstance(actual, str) or guess is None or actual is None:
        return str(guess).strip().casefold() == str(actual).strip().casefold()
    if isinstance(guess, bool) or isinstance(actual, bool):
        return guess is actual
    if isinstance(guess, int) and isinstance(actual, int):
        return guess == actual
    if isinstance(guess, set | frozenset) and len(guess) > 1:
        return False  # it has no order
    if _holds_words(guess) or _holds_words(actual):
        if not (isinstance(guess, Iterable) and isinstance(actual, Iterable)):
            return False
        return [str(item).casefold() for item in guess] == [str(item).casefold() for item in actual]
    return _close(guess, actual)


def as_meant(guess: Any, actual: Any) -> Any:
    """`guess`, with 24,000 as one number where one was asked for; Python makes the tuple (24, 0) of it."""
    if isinstance(_plain(actual), bool) or not isinstance(_plain(actual), int | float):
        return guess
    if isinstance(guess, str) and re.fullmatch(r"\s*-?\d{1,3}(,\d{3})+\s*", guess):
        return int(guess.replace(",", ""))
    if isinstance(guess, tuple) and len(guess) > 1 and all(type(part) is int for part in guess):
        first, *rest = guess
        if 0 < abs(first) < 1000 and all(0 <= part < 1000 for part in rest):
            sign = 1 if first > 0 else -1
            return sign * sum(abs(part) * 1000**power for power, part in enumerate(reversed(guess)))
    return guess


def shown(value: Any) -> str:
    """`value` as short text that is the same in every run."""
    value = _plain(value)
    if isinstance(value, float):
        text = f"{value:.4g}"
        return text if re.search("[.en]", text) else f"{text}.0"
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(shown, value))) or "nothing"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)


def _plain(value: Any) -> Any:
    """Tensors and numpy's numbers as Python's own."""
    return value.tolist() if isinstance(value, Tensor) or type(value).__module__ == "numpy" else value


def _literal(text: str) -> Any:
    """What a guess in quotes would be without them: "[1, 2]", "true", "None"."""
    try:
        return ast.literal_eval(text.strip().capitalize() if text.strip().isalpha() else text.strip())
    except (ValueError, SyntaxError):
        return text


def _close(guess: Any, actual: Any) -> bool:
    try:
        guessed, happened = (torch.as_tensor(value, dtype=torch.float64) for value in (guess, actual))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    same_shape = guessed.shape == happened.shape or guessed.numel() == happened.numel() == 1
    largest = max(happened[happened.isfinite()].abs().flatten().tolist(), default=0.0)
    # What is small, but no rounding error, is not 0.
    atol = min(1e-3, largest / 20) if largest > 1e-6 else 1e-3
    return same_shape and torch.allclose(
        guessed.flatten(), happened.flatten(), rtol=1e-2, atol=atol, equal_nan=True
    )


def _holds_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, str) for item in value)


def _names(guess: Any) -> set[str]:
    if isinstance(guess, str):
        written = _literal(guess)
        words = set(re.findall(r"[\w.]+", guess, re.ASCII)) - {"and"}
        guess = written if isinstance(written, set | list | tuple) else words
    try:
        return {str(item).casefold() for item in guess}
    except TypeError:  # one number, say, where names were asked for
        return {str(guess)}
