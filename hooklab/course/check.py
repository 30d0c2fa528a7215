"""Checks that tell a learner whether an answer behaves as it should, and if not, where to look.

    >>> from hooklab import check
    >>> check.exercise("00.A", lambda grad: ...)
    还没有作答。把上面那一格里的 `...` 换成你的代码，先运行那一格，再运行这一格。
    Not attempted yet. Replace `...` in the cell above with your code, run that cell, then this one.

The logic of a notebook's checks stands in `checks/nXX_….py`, what they say in the `.toml` file beside it; both are read when
one of their ids is asked for. CONTRIBUTING shows how to write one.
"""

import dis
import inspect
import linecache
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn.modules import module as modules

from hooklab.census import GLOBAL_MODULE
from hooklab.course.effects import Change, watched
from hooklab.course.guesses import agree, as_meant, no_number, shown
from hooklab.course.message import Message
from hooklab.course.reachable import within
from hooklab.course.refusals import (
    Refused,
    expect_like,
    grad_stays_on,
    refuse,
    refuse_first,
    refuse_from_before,
    refuse_latest_call,
    refuse_other_items,
    refuse_removing_others,
    refuse_same_object,
)
from hooklab.course.words import FOLDER, Phrase, kind_of, notebook_words, said, say, shared_words

__all__ = [
    "Exercise",
    "Phrase",
    "Prediction",
    "Refused",
    "exercise",
    "expect_like",
    "find",
    "grad_stays_on",
    "kind_of",
    "predict",
    "refuse",
    "refuse_first",
    "refuse_from_before",
    "refuse_latest_call",
    "refuse_other_items",
    "refuse_removing_others",
    "refuse_same_object",
    "registered",
    "said",
    "within",
]


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

    def say(self, key: str, facts: Mapping[str, Any]) -> tuple[str, str]:
        """What stands under `key` in the words of this exercise, in Chinese and in English."""
        if "zh" in facts and "en" in facts:
            return facts["zh"], facts["en"]
        notebook = self.id.partition(".")[0]
        tables = notebook_words(notebook)
        own = [tables.get(self.id, {}), tables.get(notebook, {})] if self.words is None else [self.words]
        return say(key, facts, [*own, shared_words()])


@dataclass(frozen=True)
class Prediction:
    """A prediction: the explanation that follows it, right or wrong. What is right is the learner's own run.

    Attributes:
        guesses: wrong guesses that people have, each with what is said of it before the explanation: `guess`, `zh`, `en`.
    """

    id: str
    zh: str
    en: str
    guesses: Sequence[Mapping[str, Any]] = ()


def exercise(which: str | Exercise, answer: Any) -> Message:
    """Check an `answer` to exercise `which` ("11.A", or an `Exercise` of your own).

    Returns:
        A `Message` in both languages: right, wrong with the reason, or not attempted yet.

    Raises:
        KeyError: no exercise has this id.
    """
    task = which if isinstance(which, Exercise) else find(which, Exercise)
    if _untouched(answer):
        return Message(
            "todo",
            "还没有作答。把上面那一格里的 `...` 换成你的代码，先运行那一格，再运行这一格。",
            "Not attempted yet. Replace `...` in the cell above with your code, run that cell, then this one.",
        )
    try:
        with _the_same_each_time():
            _examine(task, answer)
    except Refused as refused:
        zh, en = task.say(refused.key, refused.facts)
        return Message("wrong", f"还不对。{zh}", f"Not yet. {en}", refused.key.partition("-")[0])
    except Exception as error:
        return _raised(answer, error)
    zh, en = task.say("right", {})
    return Message("right", f"对了。{zh}", f"Right. {en}")


def _examine(task: Exercise, answer: Any) -> None:
    """Refuse an answer that is wrong, or right with a side effect that nobody asked for."""
    if callable(task.solution) and not callable(answer):
        refuse("not_a_function", answer=answer)
    changes: list[Change] = []
    with grad_stays_on():
        task.examine(watched(answer, changes))
    if changes:
        phrase, facts = changes[0]
        refuse("changed_given", change=Phrase(phrase), **facts)


@contextmanager
def _the_same_each_time() -> Iterator[None]:
    """The same answer gets the same message, and the learner's random numbers, modes, hooks and filters stay as they are."""
    with (
        torch.random.fork_rng(devices=[]),  # the generators of GPUs are left alone: they would not be put back
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
        _no_global_hooks(),
        _usual_defaults(),
    ):
        torch.default_generator.manual_seed(0)  # a net drawn anew may have a dead ReLU
        yield


# What happened when a prediction was first looked at, by its id. Later cells use the same names again.
_first: dict[str, str] = {}


def predict(which: str | Prediction, guess: Any, *, actual: Any) -> Message:
    """Compare a `guess` made before a run with what `actual`ly happened, and explain.

    Fractions agree within 1 %, whole numbers exactly; words regardless of case; a set regardless of order. A guess may be
    in quotes, also in Chinese ones, and one value may stand in a list or a set.

    Args:
        which: the prediction's id, such as "11.1", or a `Prediction` of your own.
        guess: what the learner expected; None means not attempted yet (guess "None" for None).
        actual: the value that the learner's own run has produced. Where it is another than at the first time, the
            message says so: cells below may have changed it.

    Raises:
        KeyError: no prediction has this id.
    """
    question = which if isinstance(which, Prediction) else find(which, Prediction)
    happened = shown(actual)
    first = _first.setdefault(question.id, happened)
    if guess is None or guess is ...:
        return Message(
            "todo",
            "还没有猜。先把 `guess = None` 里的 `None` 换成你的猜测，再往下运行。",
            "Not attempted yet. Replace `None` in `guess = None` with what you expect, then run on.",
        )
    guess = as_meant(guess, actual)
    before = _another_value(first) if happened != first else ("", "")
    zh, en = before[0] + question.zh, before[1] + question.en
    if agree(guess, actual):
        return Message("right", f"猜对了。{zh}", f"As you said. {en}")
    if no_number(guess, actual):
        return Message(
            "wrong",
            f"读不懂 `{shown(guess)}`：这里只写一个数，别的都不写。改好以后再运行这一格。",
            f"`{shown(guess)}` cannot be read: write one number, nothing else, and run this cell again.",
            "no_number",
        )
    # With the braces it can be seen why a set is no list.
    guessed = shown(guess, braces=not isinstance(actual, set | frozenset))
    named = next((named for named in question.guesses if agree(as_meant(guess, named["guess"]), named["guess"])), None)
    answered_zh, answered_en = ("", "") if named is None else (named["zh"], f"{named['en']} ")
    return Message(
        "wrong",
        f"你猜的是 `{guessed}`，实际是 `{happened}`。{answered_zh}{zh}",
        f"You said `{guessed}`; it is `{happened}`. {answered_en}{en}",
        "other" if named is None else "named",
    )


def _another_value(first: str) -> tuple[str, str]:
    """What stands before an explanation, in both languages, where the value is no longer the first one."""
    return (
        f"第一次运行到这一格时，实际值是 `{first}`。代码没有改过的话，就是后面的代码格改动了它："
        "从这一节的第一个代码格起重新运行，再看结果。",
        f"When this cell first ran, the value was `{first}`. If you have not changed the code, a later cell has changed the "
        "value: run again from the first code cell of this section, and then look. ",
    )


@contextmanager
def _usual_defaults() -> Iterator[None]:
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


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    """The learner's own would be taken for the answer's, and one that a wrong answer leaves would reach every later module."""
    tables = [getattr(modules, name) for name in GLOBAL_MODULE]
    before, full = [dict(table) for table in tables], modules._global_is_full_backward_hook
    for table in tables:
        table.clear()
    modules._global_is_full_backward_hook = None
    try:
        yield
    finally:
        for table, known in zip(tables, before, strict=True):
            table.clear()
            table.update(known)
        modules._global_is_full_backward_hook = full


def _untouched(answer: Any) -> bool:
    if answer is None or answer is ...:
        return True
    if not isinstance(answer, FunctionType):
        return False
    # `def f(x): ...` does nothing but return a constant None (or the dots of a lambda).
    steps = [step for step in dis.get_instructions(answer) if step.opname not in ("RESUME", "NOP")]
    returns_constant = all(step.opname.startswith(("LOAD_CONST", "RETURN_")) for step in steps)
    return returns_constant and all(step.argval in (None, ...) for step in steps)


def _raised(answer: Any, error: Exception) -> Message:
    own = _files(answer)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    lines = [linecache.getline(frame.filename, frame.lineno or 0).strip() for frame in frames]
    source = next(filter(None, reversed(lines)), "").replace("`", "'")
    return Message(
        "wrong",
        f"还不对。运行你的代码时抛出了异常：`{said(error)}`" + (f"\n出错的那一行：`{source}`" if source else ""),
        f"Not yet. Running your code raised `{said(error)}`" + (f"\nThe line: `{source}`" if source else ""),
        "raised",
    )


def _files(answer: Any) -> set[str]:
    """Where an answer is written: a function, a class, an object of one, or a partial of any of them."""
    while isinstance(answer, partial):
        answer = answer.func
    owner = answer if isinstance(answer, type) else type(answer)
    functions = [inspect.unwrap(one) for one in (answer, *vars(owner).values())]
    codes = [getattr(function, "__code__", None) for function in functions]
    return {code.co_filename for code in codes if isinstance(code, CodeType)}


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
    with _usual_defaults(), torch.inference_mode(False):
        files = [
            import_module(f"hooklab.course.checks.{path.stem}") for path in sorted(FOLDER.glob(f"n{notebook}_*.py"))
        ]
    return [exercise for file in files for exercise in file.EXERCISES]


def _predictions(notebook: str) -> list[Prediction]:
    tables = notebook_words(notebook)
    return [Prediction(name, **table) for name, table in tables.items() if "zh" in table]
