"""What the checks say: one TOML file a notebook holds it in both languages, so a translator needs no Python.

A template names the facts that go into it, as `str.format` does: `{count}`, `{norm:.4g}`, `{got.dtype}`, `{got!r}`. Besides
there are `{got!t}` (the name of its type), `{got!k}` (its type, and a tensor's dtype and shape) and `{error!e}` (what an error
says). A tensor is written as a list of its values, to four digits.
"""

import re
import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["LANGUAGES", "Phrase", "notebook_words", "say", "shared_words"]

FOLDER = Path(__file__).parent / "checks"
LANGUAGES = "zh", "en"
Words = Mapping[str, Any]


@dataclass(frozen=True)
class Phrase:
    """A fact that differs between the languages: the entry `name` of `phrases`, where `refuse` is given `what=Phrase(name)`.

    The template writes it as `{what}`, or as `{What}` where a sentence begins. It may name the other facts itself.
    """

    name: str


@cache
def notebook_words(notebook: str) -> dict[str, Words]:
    """The tables of one notebook's file ("12"), by the id of the exercise or prediction; ["12"] serves several of them."""
    tables: dict[str, Words] = {}
    for path in sorted(FOLDER.glob(f"n{notebook}_*.toml")):
        tables |= tomllib.loads(path.read_text(encoding="utf-8"))
    return tables


@cache
def shared_words() -> Words:
    """What checks of several notebooks say."""
    return tomllib.loads((FOLDER / "shared.toml").read_text(encoding="utf-8"))


def say(key: str, facts: Mapping[str, Any], tables: list[Words]) -> tuple[str, str]:
    """What stands under `key` in the first of `tables` that names no other facts than these, in Chinese and in English.

    So the exercise's own `wrong_shape` and the shared one may both be in use: each is said with its own facts.

    Raises:
        KeyError: no table has the key, or all of them name a fact that was not given.
    """
    zh, en = (_in_language(language, key, facts, tables) for language in LANGUAGES)
    return zh, en


def _in_language(language: str, key: str, facts: Mapping[str, Any], tables: list[Words]) -> str:
    told = dict(facts)
    for name, value in facts.items():
        if isinstance(value, Phrase):
            phrase = _in_language(language, f"phrases.{value.name}", {**facts, name: ""}, tables)
            told |= {name: phrase, name.capitalize(): phrase[0].upper() + phrase[1:]}
    for table in tables:
        template = _template(language, key, table)
        if template is not None and _named_in(template) <= told.keys():
            return _FORMATTER.vformat(template, (), told)
    raise KeyError(_no_words(language, key, told, tables))


def _no_words(language: str, key: str, told: Mapping[str, Any], tables: list[Words]) -> str:
    for table in tables:
        if (template := _template(language, key, table)) is not None:
            unknown = ", ".join(f"{{{name}}}" for name in sorted(_named_in(template) - told.keys()))
            return f"`{key}.{language}` names {unknown}; the facts are: {', '.join(told) or 'none'}"
    return f"no words for {key!r}: write `{key}.zh = …` and `{key}.en = …` into the exercise's table"


def _template(language: str, key: str, table: Words) -> str | None:
    entry: Any = table
    for part in (*key.split("."), language):
        entry = entry.get(part) if isinstance(entry, Mapping) else None
    return entry


def _named_in(template: str) -> set[str]:
    return {re.split(r"[.\[]", name)[0] for _, name, _, _ in string.Formatter().parse(template) if name is not None}


class _Formatter(string.Formatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        telling = {"t": lambda: type(value).__name__, "k": lambda: kind_of(value), "e": lambda: said(value)}
        return telling[conversion]() if conversion in telling else super().convert_field(value, conversion)

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, Tensor) and not spec:
            value = [float(f"{entry:.4g}") for entry in value.detach().flatten().tolist()]
        return super().format_field(value, spec)


_FORMATTER = _Formatter()


def kind_of(got: Any) -> str:
    """The kind of a value, to stand between backticks: of a tensor or an array its dtype and shape too."""
    name, shape = type(got).__name__, getattr(got, "shape", None)
    return f"{name}, {got.dtype} {list(shape)}" if isinstance(shape, tuple) and hasattr(got, "dtype") else name


def said(error: BaseException) -> str:
    """The kind of an error and its first line, to stand between backticks."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return text.strip(": ").replace("`", "'")
