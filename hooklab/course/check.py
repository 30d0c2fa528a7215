"""Checks that tell a learner whether an answer behaves as it should, and if not, where to look.

    >>> from hooklab import check
    >>> check.exercise("00.A", lambda grad: ...)
    还没有作答。把上面那一格里的 `...` 换成你的代码，先运行那一格，再运行这一格。
    Not attempted yet. Replace `...` in the cell above with your code, run that cell, then this one.

The logic of a notebook's checks stands in `checks/nXX_….py`, what they say in the `.toml` file beside it; both are read when
one of their ids is asked for. CONTRIBUTING shows how to write one.
"""

from collections import Counter
from typing import Any

from hooklab.course import guess_cells
from hooklab.course import progress as desk
from hooklab.course.guesses import agree, as_meant, close_by, no_number, shown
from hooklab.course.items import Exercise, Prediction, find, registered
from hooklab.course.judge import judge, untouched
from hooklab.course.message import Message
from hooklab.course.progress import Progress, progress
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
from hooklab.course.words import Phrase, kind_of, said

__all__ = [
    "Exercise",
    "Phrase",
    "Prediction",
    "Progress",
    "Refused",
    "exercise",
    "expect_like",
    "find",
    "grad_stays_on",
    "hint",
    "kind_of",
    "predict",
    "progress",
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


def exercise(which: str | Exercise, answer: Any) -> Message:
    """Check an `answer` to exercise `which` ("11.A", or an `Exercise` of your own).

    Returns:
        A `Message` in both languages: right, wrong with the reason, or not attempted yet.

    Raises:
        KeyError: no exercise has this id.
    """
    task = which if isinstance(which, Exercise) else find(which, Exercise)
    if untouched(answer):
        return Message(
            "todo",
            "还没有作答。把上面那一格里的 `...` 换成你的代码，先运行那一格，再运行这一格。",
            "Not attempted yet. Replace `...` in the cell above with your code, run that cell, then this one.",
        )
    message = judge(task, answer)
    if task.words is None:  # one of the course
        desk.note(task.id, "done" if message.kind == "right" else "tried")
    if message.kind != "wrong" or not desk.in_kernel():
        return message
    _refusals[task.id] += 1
    return _with_offer(message, task) if _refusals[task.id] > 1 else message


# How often each exercise was refused in this kernel, and how many of its hints were given.
_refusals: Counter[str] = Counter()
_given: Counter[str] = Counter()


def _with_offer(message: Message, task: Exercise) -> Message:
    if _given[task.id] >= len(task.hints()):
        return message
    offer = f'check.hint("{task.id}")'
    zh, en = f"{message.zh}\n要提示吗？运行 `{offer}`。", f"{message.en}\nStuck? Run `{offer}` for a hint."
    return Message(message.kind, zh, en, message.reason)


def hint(which: str | Exercise) -> Message:
    """The next hint to an exercise ("11.A"): the first says where to look, the second how.

    Raises:
        KeyError: no exercise has this id.
    """
    task = which if isinstance(which, Exercise) else find(which, Exercise)
    hints = task.hints()
    if _given[task.id] >= len(hints):
        zh = "提示都给完了。再卡住，就打开练习下面折叠的参考答案。"
        return Message("note", zh, "That was the last hint. The solution is folded below the exercise.")
    given = hints[_given[task.id]]
    _given[task.id] += 1
    number = f"{_given[task.id]}/{len(hints)}"
    return Message("note", f"提示 {number}：{given['zh']}", f"Hint {number}: {given['en']}")


# What happened when a prediction was first looked at, by its id. Later cells use the same names again.
_first: dict[str, str] = {}


_OLD_GUESS = Message(
    "todo",
    "`guess` 还是之前的：写着 `guess = …` 的那一格没有运行，或者报错了。改好、运行那一格，再运行这一格。",
    "`guess` is an older one: the cell with `guess = …` above has not run, or has failed. Fix and run that cell, "
    "then this one.",
)


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
    if not guess_cells.belongs(guess, question.id):
        return _OLD_GUESS
    guess_cells.judged(question.id)
    desk.note(question.id, "done")
    guess = as_meant(guess, actual)
    before = _another_value(first) if happened != first else ("", "")
    zh, en = before[0] + question.zh, before[1] + question.en
    if agree(guess, actual):
        return Message("right", f"猜对了。{zh}", f"Right. {en}")
    if close_by(guess, actual, question.near):
        return Message("right", f"差不多：实际是 `{happened}`。{zh}", f"Near enough: it is `{happened}`. {en}")
    if no_number(guess, actual):
        return Message(
            "wrong",
            f"读不懂 `{shown(guess)}`：这里只写一个数，别的都不写。改好以后再运行这一格。",
            f"`{shown(guess)}` cannot be read: write one number, nothing else, and run this cell again.",
            "no_number",
        )
    # With the braces it can be seen why a set is no list.
    guessed = shown(guess, braces=not isinstance(actual, set | frozenset))
    named = _named(question, guess, actual)
    answered_zh, answered_en = ("", "") if named is None else (named["zh"], f"{named['en']} ")
    return Message(
        "wrong",
        f"你猜的是 `{guessed}`，实际是 `{happened}`。{answered_zh}{zh}",
        f"You guessed `{guessed}`; it is `{happened}`. {answered_en}{en}",
        "other" if named is None else "named",
    )


def _named(question: Prediction, guess: Any, actual: Any) -> Any:
    """Which of the question's wrong guesses this one is. TOML has no sets, so a set stands there as a list."""
    for named in question.guesses:
        wrong = named["guess"]
        if isinstance(wrong, list) and isinstance(actual, set | frozenset):
            wrong = set(wrong)
        if agree(as_meant(guess, wrong), wrong):
            return named
    return None


def _another_value(first: str) -> tuple[str, str]:
    """What stands before an explanation, in both languages, where the value is no longer the first one."""
    return (
        f"第一次运行到这一格时，实际值是 `{first}`。代码没有改过的话，就是后面的代码格改动了它："
        "从这一节的第一个代码格起重新运行，再看结果。",
        f"When this cell first ran, the value was `{first}`. If you have not changed the code, a later cell has changed the "
        "value: run again from the first code cell of this section, and then look. ",
    )
