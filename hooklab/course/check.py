"""Checks that tell a learner whether an answer behaves as it should, and if not, where to look.

Write your own: copy one of the files beside this one, for example `n00_start_here.py`. A check is

- `examine(answer)`: calls the answer on fresh inputs and `refuse`s what is wrong. Each refusal has a
  name of its own and says in both languages what was seen and where to look, never the answer;
- `solution`: the reference, which must pass;
- `wrong`: answers that people really give, each under the name of the refusal that it must meet.

`tests/course/test_checks.py` proves the last two for every check. In a notebook:

    >>> from hooklab import check
    >>> check.exercise("00.A", lambda grad: ...)
    还没有作答。把上面那一格里的 `...` 换成你的代码，先运行那一格，再运行这一格。
    Not attempted yet. Replace `...` in the cell above with your code, run that cell, then this one.
"""

import dis
import importlib
import inspect
import linecache
import pkgutil
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from hooklab.course.effects import watched
from hooklab.course.guesses import agree, as_meant, no_number, shown
from hooklab.course.message import Message
from hooklab.course.reachable import within

__all__ = [
    "Exercise",
    "Prediction",
    "Refused",
    "exercise",
    "expect_like",
    "grad_stays_on",
    "kind_of",
    "predict",
    "refuse",
    "refuse_from_before",
    "refuse_latest_call",
    "refuse_other_items",
    "refuse_removing_others",
    "refuse_same_object",
    "refuse_zero_for_none",
    "said",
    "within",
]


@dataclass(frozen=True)
class Exercise:
    """An exercise: how to examine an answer, the reference, and wrong answers by the name of their refusal."""

    id: str
    examine: Callable[[Any], None]
    solution: Any
    wrong: dict[str, Any] = field(repr=False)
    zh: str  # said when the answer passes
    en: str


@dataclass(frozen=True)
class Prediction:
    """A prediction: the explanation that follows it, right or wrong. What is right is the learner's own run."""

    id: str
    zh: str
    en: str


class Refused(Exception):
    """An answer was refused; `message` says why in both languages."""

    def __init__(self, reason: str, zh: str, en: str):
        super().__init__(en)
        self.message = Message("wrong", f"还不对。{zh}", f"Not yet. {en}", reason)


def refuse(reason: str, *, zh: str, en: str) -> Never:
    """End the examination: the answer is wrong, for this reason."""
    raise Refused(reason, zh, en)


def exercise(which: str | Exercise, answer: Any) -> Message:
    """Check an `answer` to exercise `which` ("11.A", or an `Exercise` of your own).

    Returns:
        A `Message` in both languages: right, wrong with the reason, or not attempted yet.

    Raises:
        KeyError: no exercise has this id.
    """
    task = which if isinstance(which, Exercise) else _find(which, Exercise)
    if _untouched(answer):
        return Message(
            "todo",
            "还没有作答。把上面那一格里的 `...` 换成你的代码，先运行那一格，再运行这一格。",
            "Not attempted yet. Replace `...` in the cell above with your code, run that cell, then this one.",
        )
    try:
        # The learner's random numbers and warning filters stay as they are.
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            # The same answer gets the same message each time: a net drawn anew may have a dead ReLU. The generators of
            # GPUs stay alone: they would not be put back.
            torch.default_generator.manual_seed(0)
            if callable(task.solution) and not callable(answer):
                refuse(
                    "not_a_function",
                    zh=f"这里要交的是函数本身，得到的是 `{type(answer).__name__}`。是不是多写了一对括号，把它调用了？",
                    en=f"The function itself is wanted; found `{type(answer).__name__}`. Was it called, with one pair of "
                    "parentheses too many?",
                )
            changes: list[tuple[str, str]] = []
            with _no_global_hooks(), _usual_defaults(), grad_stays_on():
                task.examine(watched(answer, changes))
            if changes:
                zh, en = changes[0]
                refuse(
                    "changed_given",
                    zh=f"结果都对，可是你的函数改动了它收到的东西：{zh}。",
                    en=f"The results are right, but your function has changed what it was given: {en}.",
                )
    except Refused as refused:
        return refused.message
    except Exception as error:
        return _raised(answer, error)
    return Message("right", f"对了。{task.zh}", f"Right. {task.en}")


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
        refuse(
            "grad_left_off",
            zh="你的代码运行完以后，梯度还是关着的，后面的代码都求不了梯度。用 `with torch.no_grad()`，出来时它会变回去。",
            en="After your code has run, gradients are still switched off, and what follows gets none. Use "
            "`with torch.no_grad()`, which puts the mode back at its end.",
        )


# By the id of a prediction: what happened when it was first looked at. Later cells use the same names again.
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
    question = which if isinstance(which, Prediction) else _find(which, Prediction)
    happened = shown(actual)
    first = _first.setdefault(question.id, happened)
    if guess is None or guess is ...:
        return Message(
            "todo",
            "还没有猜。先把 `guess = None` 里的 `None` 换成你的猜测，再往下运行。",
            "Not attempted yet. Replace `None` in `guess = None` with what you expect, then run on.",
        )
    guess = as_meant(guess, actual)
    zh, en = question.zh, question.en
    if happened != first:
        zh = (
            f"第一次运行到这一格时，实际值是 `{first}`。代码没有改过的话，就是后面的代码格改动了它："
            f"从这一节的第一个代码格起重新运行，再看结果。{zh}"
        )
        en = (
            f"When this cell first ran, the value was `{first}`. If you have not changed the code, a later cell has changed the "
            f"value: run again from the first code cell of this section, and then look. {en}"
        )
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
    return Message(
        "wrong",
        f"你猜的是 `{guessed}`，实际是 `{happened}`。{zh}",
        f"You said `{guessed}`; it is `{happened}`. {en}",
        "other",
    )


def expect_like(got: Any, want: Tensor, what_zh: str, what_en: str) -> None:
    """Refuse `got` unless it is a tensor with the shape, dtype and values of `want`."""
    begin, what_zh = what_en[0].upper() + what_en[1:], what_zh.strip()
    after = " " if what_zh[-1].isascii() else ""
    if not isinstance(got, Tensor):
        refuse(
            "wrong_type",
            zh=f"{what_zh}{after}应当是张量，得到的是 `{type(got).__name__}`。",
            en=f"{begin} should be a tensor; found `{type(got).__name__}`.",
        )
    for reason, zh, en, attribute in (
        ("wrong_shape", "形状", "shape", lambda tensor: tuple(tensor.shape)),
        ("wrong_dtype", "数据类型", "dtype", lambda tensor: tensor.dtype),
    ):
        found, expected = attribute(got), attribute(want)
        if found != expected:
            refuse(
                reason,
                zh=f"{what_zh}{after}的{zh}应当是 `{expected}`，得到的是 `{found}`。",
                en=f"{begin} should have the {en} `{expected}`; found `{found}`.",
            )
    if not torch.allclose(got.detach(), want, rtol=1e-4, atol=1e-6, equal_nan=True):
        refuse(
            "wrong_values",
            zh=f"{what_zh}{after}形状没错，数值不对。挑一个能手算的小张量，把结果打印出来看看。",
            en=f"The shape is right, the values of {what_en} are not. Print them for a small tensor you can do by hand.",
        )


def refuse_from_before(names: Iterable[Any], model: nn.Module, others: Iterable[str]) -> None:
    """Refuse `names` with one that `model` has not, and that another model of this check has (`others`)."""
    own = dict(model.named_modules())
    if old := [name for name in names if name in others and name not in own]:
        refuse(
            "from_before",
            zh=f"这个模型里没有 `{old[0]}`：那是另一次调用的模型里的层。每次都要从头记起；默认参数 `={{}}`、`=[]` 只建一次。",
            en=f"This model has no `{old[0]}`: that is a layer of the model of another call. Each call has to begin "
            "afresh; a default argument, `={}` or `=[]`, is made only once.",
        )


def refuse_latest_call() -> Never:
    """Refuse an answer whose first call uses what a second one was given."""
    refuse(
        "latest_call",
        zh="调用了两次，给的东西不同；第一次挂上的钩子，用的却是第二次收到的东西。参数存在哪里？全局变量只有一份。",
        en="It was called twice, each time with something else; the hooks of the first call now work with what the second was "
        "given. Where are the arguments kept? There is only one of a global variable.",
    )


def refuse_same_object(first: Any, second: Any) -> None:
    """Refuse an answer whose two calls, each with something else, returned one list or dict."""
    if first is second:
        kind = type(first).__name__
        refuse(
            "same_object",
            zh=f"调用了两次，返回的却是同一个 `{kind}`：后一次往里放的，第一次的调用者也会拿到。每次都要新建一个；"
            "默认参数只建一次，全局变量也只有一份。",
            en=f"Two calls returned one and the same `{kind}`: what the later puts there reaches the caller of the first, too. "
            "Make a new one each time; a default argument is made only once, and there is only one of a global variable.",
        )


def refuse_other_items(handles: Iterable[Any]) -> None:
    """Refuse a list or a tuple of handles in which something else is found; a list has a `remove` of its own."""
    for number, one in enumerate(handles, start=1):
        if isinstance(one, list | set) or not callable(getattr(one, "remove", None)):
            refuse(
                "other_items",
                zh=f"列表里应当是句柄，第 {number} 项却是 `{type(one).__name__}`。",
                en=f"The list should hold handles; item {number} is of the type `{type(one).__name__}`.",
            )


def refuse_zero_for_none() -> Never:
    """Refuse an answer that does nothing where the gradient is exactly zero."""
    refuse(
        "zero_for_none",
        zh="有一次到来的梯度恰好全是 0，你的代码却当它没有来。“梯度是零”和“没有梯度”（`None`）是两回事。",
        en="Once the gradient that came was exactly zero, and your code took it for none. 'The gradient is zero' and "
        "'there is no gradient' (`None`) are two different things.",
    )


def refuse_removing_others(
    register: Callable[[Callable], RemovableHandle], hang: Callable[[], RemovableHandle]
) -> None:
    """`hang()` gives the answer's handle. A hook that `register` puts there before it, and one after it, have to stay."""
    first = register(lambda *args: None)
    handle = hang()
    second = register(lambda *args: None)
    handle.remove()
    if any(ours.id not in (ours.hooks_dict_ref() or ()) for ours in (first, second)):
        refuse(
            "removed_others",
            zh="对返回的句柄调用 `.remove()`，别人挂在同一处的钩子也没了：只取下自己挂的。",
            en="`.remove()` of the handle that was returned takes off hooks of others in the same place, too. Take off your own "
            "only.",
        )


@contextmanager
def _usual_defaults() -> Iterator[None]:
    """A check makes its tensors without a dtype and a device; the learner may have chosen other defaults."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    # Not where the CPU is the default already: a device as a mode closes PyTorch's fast paths.
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
    names = [f"_global_{when}_hooks" for when in ("forward_pre", "forward", "backward_pre", "backward")]
    tables = [getattr(modules, name) for name in names]
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


def kind_of(got: Any) -> str:
    """The kind of a value, to stand between backticks: of a tensor or an array its dtype and shape too."""
    name, shape = type(got).__name__, getattr(got, "shape", None)
    return (
        f"{name}, {got.dtype} {list(shape)}" if isinstance(shape, tuple) and hasattr(got, "dtype") else name
    )


def said(error: Exception) -> str:
    """The kind of an error and its first line, to stand between backticks."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return text.strip(": ").replace("`", "'")


def _raised(answer: Any, error: Exception) -> Message:
    own = _files(answer)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    lines = [linecache.getline(frame.filename, frame.lineno).strip() for frame in frames]
    source = next(filter(None, reversed(lines)), "").replace("`", "'")
    return Message(
        "wrong",
        f"还不对。运行你的代码时抛出了异常：`{said(error)}`"
        + (f"\n出错的那一行：`{source}`" if source else ""),
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


def _find(wanted: str, kind: type) -> Any:
    found = {item.id: item for item in _all_checks() if isinstance(item, kind)}
    if wanted in found:
        return found[wanted]
    close = get_close_matches(str(wanted), found, cutoff=0.3) or list(found)
    raise KeyError(f"no {kind.__name__.lower()} has the id {wanted!r}; close: {', '.join(map(repr, close))}")


def _all_checks() -> list[Exercise | Prediction]:
    """Every check in the files of this folder that are named after a notebook: n00_…, n11_…"""
    package = importlib.import_module("hooklab.course.checks")
    names = sorted(
        module.name for module in pkgutil.iter_modules(package.__path__) if module.name.startswith("n")
    )
    with _usual_defaults():  # a file may make tensors when it is imported
        return [
            item for name in names for item in importlib.import_module(f"hooklab.course.checks.{name}").CHECKS
        ]
