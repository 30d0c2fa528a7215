"""Does a guess agree with what happened? For `check.predict`."""

import ast
import re
import unicodedata
from typing import Any

import torch
from torch import Tensor

__all__ = ["agree", "as_meant", "close_by", "no_number", "shown"]

# Signs of a Chinese keyboard or a web page. NFKC knows the full-width ones.
SIGNS = str.maketrans(
    dict.fromkeys("“”„「」『』", '"')
    | dict.fromkeys("‘’", "'")
    | {"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{FRACTION SLASH}": "/"}
)
BETWEEN = re.compile(r"[,;、和与及]|->|→|\band\b")
# A number with the word for what is counted. The byte is the only unit of size among these words.
WORDS = r" *(?:[次个遍层倍条行项块种份步]|字节|times?|bytes?|rows?|lines?|steps?|files?|calls?|[x×])"
COUNTED = re.compile(rf"([+-]?[\d.]+(?:e[+-]?\d+)?|[零一二两三四五六七八九十])(?:{WORDS})?", re.IGNORECASE)
GROUPED = re.compile(rf"([+-]?\d{{1,3}}(?:,\d{{3}})+){WORDS}", re.IGNORECASE)
NUMERALS = {word: str(number) for number, word in enumerate("零一二三四五六七八九十")} | {"两": "2"}
PERCENT = re.compile(r"([+-]?\d+\.?\d*) ?%")
ANSWERS = {True: ("是", "会", "有", "对", "yes"), False: ("不是", "不会", "没有", "不对", "否", "no")}
FAILS = "报错", "会报错", "出错", "会出错", "raises", "an error"  # for "error"
FRACTION = re.compile(r"([+-]?\d+\.?\d*)\s*/\s*(\d+\.?\d*)")


def agree(guess: Any, actual: Any) -> bool:
    """True if `guess` means the same as `actual`: see `hooklab.course.check.predict`."""
    guess, actual = _plain(guess), _plain(actual)
    if isinstance(guess, str):
        guess = _typed(guess)
        if guess.casefold() == shown(actual).casefold():
            return True
    if isinstance(actual, set | frozenset):
        if not actual and str(guess).casefold() in ("nothing", "none", "空集", "无", "没有"):
            return True
        return {str(item).casefold() for item in actual} in _names(guess)
    if isinstance(actual, bool) and isinstance(guess, str) and guess.casefold() in ANSWERS[actual]:
        return True
    if actual == "error" and str(guess).casefold() in FAILS:
        return True
    if isinstance(actual, str):
        return _as_text(guess).casefold() == actual.strip().casefold()
    if isinstance(guess, str):
        # A whole number that was asked for counts percent.
        guess = _literal(guess.removesuffix("%") if isinstance(actual, int) else guess)
    if isinstance(actual, list | tuple):
        return _in_order(guess, actual)
    if isinstance(guess, list | tuple | set | frozenset) and len(guess) == 1:
        return agree(next(iter(guess)), actual)
    if isinstance(guess, str) or guess is None or actual is None:
        return str(guess).casefold() == str(actual).casefold()
    if isinstance(guess, bool) or isinstance(actual, bool):
        return guess is actual
    if isinstance(guess, int) and isinstance(actual, int):
        return guess == actual
    return _close(guess, actual)


def close_by(guess: Any, actual: Any, distance: float) -> bool:
    """True if both are numbers, a guess perhaps in quotes, that differ by at most `distance`."""
    guess, actual = _plain(guess), _plain(actual)
    guess = _literal(_typed(guess).removesuffix("%")) if isinstance(guess, str) else guess
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (guess, actual))
    return distance > 0 and numbers and abs(guess - actual) <= distance


def as_meant(guess: Any, actual: Any) -> Any:
    """`guess`, with 24,000 as one number where one was asked for; Python makes the tuple (24, 0) of it."""
    if isinstance(_plain(actual), bool) or not isinstance(_plain(actual), int | float):
        return guess
    if isinstance(guess, str) and re.fullmatch(r"-?\d{1,3}(,\d{3})+", _typed(guess)):
        return int(_typed(guess).replace(",", ""))
    if isinstance(guess, tuple) and len(guess) > 1 and all(type(part) is int for part in guess):
        first, *rest = guess
        if 0 < abs(first) < 1000 and all(0 <= part < 1000 for part in rest):
            sign = 1 if first > 0 else -1
            return sign * sum(abs(part) * 1000**power for power, part in enumerate(reversed(guess)))
    return guess


def no_number(guess: Any, actual: Any) -> bool:
    """True if a number was asked for, and `guess` has one in words that are not understood: "45.42 GB", "2 or 3"."""
    actual = _plain(actual)
    if not isinstance(guess, str) or isinstance(actual, bool) or not isinstance(actual, int | float):
        return False
    text = _typed(guess)
    return any(sign.isdecimal() or sign in NUMERALS for sign in text) and isinstance(_literal(text), str)


def shown(value: Any, *, braces: bool = False) -> str:
    """`value` as short text that is the same in every run; a set with its braces, or just the names."""
    value = _plain(value)
    if isinstance(value, float):
        text = f"{value:.4g}"
        if "e+" in text and abs(value) < 1e12:
            text = f"{value:.0f}" if value.is_integer() else f"{float(text):.0f}"
        return text if re.search("[.en]", text) else f"{text}.0"
    if isinstance(value, set | frozenset):
        names = ", ".join(sorted(map(shown, value)))
        return f"{{{names}}}" if braces else names or "set()"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value).replace("`", "'") or "''"


def _plain(value: Any) -> Any:
    """Tensors and numpy's numbers as Python's own."""
    return value.tolist() if isinstance(value, Tensor) or type(value).__module__ == "numpy" else value


def _typed(text: str) -> str:
    """A guess in quotes as one would type it in Python, without quotes inside the quotes."""
    text = unicodedata.normalize("NFKC", text).translate(SIGNS).strip(" \t\n。!?")
    return text[1:-1].strip() if re.fullmatch(r"""(["'`])[^"'`]*\1""", text) else text


def _literal(text: str) -> Any:
    """What a guess in quotes would be without them: "[1, 2]", "true", "None", "1/3", "50%", "两次"."""
    if counted := COUNTED.fullmatch(text) or GROUPED.fullmatch(text):
        text = NUMERALS.get(counted[1], counted[1].replace(",", ""))
    if percent := PERCENT.fullmatch(text):
        return float(percent[1]) / 100
    if (parts := FRACTION.fullmatch(text)) and float(parts[2]):
        return float(parts[1]) / float(parts[2])
    try:
        return ast.literal_eval(text.capitalize() if text.isalpha() else text)
    except (ValueError, SyntaxError):
        return text


def _parts(text: str) -> list[str]:
    """The names or numbers of a guess that is one text: "Linear, Sequential", "[2，4]", "E C D"."""
    inner = text[1:-1] if re.fullmatch(r"\[.*\]|\(.*\)", text) else text
    return [_typed(part) for part in BETWEEN.split(inner)] if BETWEEN.search(inner) else inner.split()


def _as_text(guess: Any) -> str:
    """A guess where a text was asked for: the one in a list, or letters that stand apart as one word."""
    if isinstance(guess, list | tuple | set | frozenset) and len(guess) == 1:
        (guess,) = guess
    parts = _parts(guess) if isinstance(guess, str) else guess
    if isinstance(parts, list | tuple) and all(isinstance(part, str) and len(part) == 1 for part in parts):
        return "".join(parts)
    return _typed(str(guess))


def _in_order(guess: Any, actual: list | tuple) -> bool:
    if isinstance(guess, str):
        guess = _parts(guess)
    if isinstance(guess, set | frozenset) and len(guess) == 1:
        guess = list(guess)
    if isinstance(guess, list | tuple) and len(guess) == len(actual):
        pairs = list(zip(guess, actual, strict=True))
        guess = [_literal(_typed(one)) if isinstance(one, str) else one for one in guess]
        if _holds_words(guess) or _holds_words(actual):
            return all(agree(one, other) for one, other in pairs)
    return _close(guess, actual)


def _close(guess: Any, actual: Any) -> bool:
    try:
        guessed, happened = (torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in (guess, actual))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    same_shape = guessed.shape == happened.shape or guessed.numel() == happened.numel() == 1
    largest = max(happened[happened.isfinite()].abs().flatten().tolist(), default=0.0)
    # A small value that is no rounding error is not 0.
    atol = min(1e-3, largest / 20) if largest > 1e-6 else 1e-3
    return same_shape and torch.allclose(guessed.flatten(), happened.flatten(), rtol=1e-2, atol=atol, equal_nan=True)


def _holds_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, str) for item in value)


def _names(guess: Any) -> list[set[str]]:
    """The sets of names that a guess may mean: a name may have several words."""
    if isinstance(guess, str):
        written = _literal(guess)
        if not isinstance(written, set | list | tuple):
            inner, words = guess.strip("{} "), re.findall(r"[\w.]+", BETWEEN.sub(" ", guess))
            return [{name.casefold() for name in names} for names in ([inner], _parts(inner), words)]
        guess = written
    try:
        return [{_typed(str(item)).casefold() for item in guess}]
    except TypeError:  # one number, say, where names were asked for
        return [{str(guess)}]
