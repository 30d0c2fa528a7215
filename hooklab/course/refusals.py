"""Refusals: what a check says of an answer that is wrong, always with a reason and always in both languages.

A refusal says what was seen and where to look, never the answer. What several checks look for stands here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hooklab.course.message import Message

__all__ = [
    "Refused",
    "expect_like",
    "grad_stays_on",
    "kind_of",
    "refuse",
    "refuse_from_before",
    "refuse_latest_call",
    "refuse_other_items",
    "refuse_removing_others",
    "refuse_same_object",
    "refuse_zero_for_none",
    "said",
]


class Refused(Exception):
    """An answer was refused; `message` says why in both languages."""

    def __init__(self, reason: str, zh: str, en: str):
        super().__init__(en)
        self.message = Message("wrong", f"还不对。{zh}", f"Not yet. {en}", reason)


def refuse(reason: str, *, zh: str, en: str) -> Never:
    """End the examination: the answer is wrong, for this reason."""
    raise Refused(reason, zh, en)


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


def kind_of(got: Any) -> str:
    """The kind of a value, to stand between backticks: of a tensor or an array its dtype and shape too."""
    name, shape = type(got).__name__, getattr(got, "shape", None)
    return f"{name}, {got.dtype} {list(shape)}" if isinstance(shape, tuple) and hasattr(got, "dtype") else name


def said(error: Exception) -> str:
    """The kind of an error and its first line, to stand between backticks."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return text.strip(": ").replace("`", "'")
