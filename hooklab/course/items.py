"""The exercises and the predictions of the course, found by their ids."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch

from hooklab.course.words import FOLDER, notebook_words, say, shared_words

__all__ = ["Exercise", "Prediction", "find", "registered", "usual_defaults"]


@dataclass(frozen=True)
class Exercise:
    """An exercise: how to examine an answer, and the reference.

    Attributes:
        words: what it says, as a table of the TOML files: `right`, and each refusal by its name. Where it is None, they are
            found by the id.
    """

    id: str
    examine: Callable[[Any], None]
    solution: Any
    words: Mapping[str, Any] | None = None

    def hints(self) -> Sequence[Mapping[str, str]]:
        """What helps on, from a direction to the way: each in both languages."""
        own = notebook_words(self.id.partition(".")[0]).get(self.id, {}) if self.words is None else self.words
        return own.get("hints", ())

    def say(self, key: str, facts: Mapping[str, Any]) -> tuple[str, str]:
        """What stands under `key` in the words of this exercise, in Chinese and in English."""
        notebook = self.id.partition(".")[0]
        tables = notebook_words(notebook)
        own = [tables.get(self.id, {}), tables.get(notebook, {})] if self.words is None else [self.words]
        return say(key, facts, [*own, shared_words()])


@dataclass(frozen=True)
class Prediction:
    """A prediction: the explanation that follows it, right or wrong. What is right is the learner's own run.

    Attributes:
        guesses: wrong guesses that people have, each with what is said of it before the explanation: `guess`, `zh`, `en`.
        near: a number that differs by no more than this counts: the understanding is right.
    """

    id: str
    zh: str
    en: str
    guesses: Sequence[Mapping[str, Any]] = ()
    near: float = 0


def find(wanted: str, kind: type) -> Any:
    """The exercise or prediction with this id. Only the files of its notebook are read.

    Raises:
        KeyError: no `kind` has this id.
    """
    gather = _exercises if kind is Exercise else _predictions
    notebook = str(wanted).partition(".")[0]
    for item in gather(notebook) if notebook in _notebooks() else ():
        if item.id == wanted:
            return item
    known = [item.id for number in _notebooks() for item in gather(number)]
    close = get_close_matches(str(wanted), known, cutoff=0.3) or known
    raise KeyError(f"no {kind.__name__.lower()} has the id {wanted!r}; close: {', '.join(map(repr, close))}")


def registered() -> list[Exercise | Prediction]:
    """The exercises and the predictions of all notebooks."""
    numbers = _notebooks()
    exercises = [item for number in numbers for item in _exercises(number)]
    return exercises + [item for number in numbers for item in _predictions(number)]


def _notebooks() -> list[str]:
    return sorted(path.name[1:3] for path in FOLDER.glob("n*.toml"))


def _exercises(notebook: str) -> list[Exercise]:
    """Those in `checks/n11_….py`; an exercise that is long has a file of its own, whose name begins in the same way."""
    # A file may make tensors when it is imported.
    with usual_defaults(), torch.inference_mode(False):
        files = [
            import_module(f"hooklab.course.checks.{path.stem}") for path in sorted(FOLDER.glob(f"n{notebook}_*.py"))
        ]
    return [exercise for file in files for exercise in file.EXERCISES]


def _predictions(notebook: str) -> list[Prediction]:
    tables = notebook_words(notebook)
    return [Prediction(name, **table) for name, table in tables.items() if "zh" in table]


@contextmanager
def usual_defaults() -> Iterator[None]:
    """A check makes its tensors without a dtype and a device; the learner may have chosen other defaults."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    # A device as a mode closes PyTorch's fast paths, so the CPU is not set where it is the default already.
    usual = nullcontext() if device.type == "cpu" else torch.device("cpu")
    torch.set_default_dtype(torch.float32)
    try:
        with usual:
            yield
    finally:
        torch.set_default_dtype(dtype)
