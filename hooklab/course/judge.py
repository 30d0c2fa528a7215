"""How an answer is examined: the same way each time, and whatever the learner has switched on or hung."""

import dis
import inspect
import linecache
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn.modules import module as modules

from hooklab.census import GLOBAL_MODULE
from hooklab.course.effects import Change, watched
from hooklab.course.items import Exercise, usual_defaults
from hooklab.course.message import Message
from hooklab.course.refusals import Refused, grad_stays_on, refuse
from hooklab.course.words import Phrase, said

__all__ = ["judge", "untouched"]


def judge(task: Exercise, answer: Any) -> Message:
    """What is to be said of an answer that was attempted."""
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
        usual_defaults(),
    ):
        torch.default_generator.manual_seed(0)  # a net drawn anew may have a dead ReLU
        yield


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


def untouched(answer: Any) -> bool:
    """True for a stub in which nobody has written anything."""
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
