"""What an answer may look at, and has to leave as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hooklab.exercises.check import refuse

__all__ = ["leaves_as_it_was", "refuse_removing_others"]


@contextmanager
def leaves_as_it_was(model: nn.Module, gradients: bool = True) -> Iterator[None]:
    """Refuse an answer after which `model` has other modes, flags, numbers or parameters, or another `.grad` (if asked).

    What is new on a module (a list of handles, perhaps) does no harm and is not looked at.
    """
    before = _facts(model, gradients)
    yield
    now = _facts(model, gradients)
    for place, old in before.items():
        if not _same(old, now.get(place)):
            zh, en = _change(place, old, now.get(place))
            refuse(
                "changed_model",
                zh=f"你的函数返回以后，模型和原来不一样了：{zh}。",
                en=f"After your function has returned, the model is not what it was: {en}.",
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


def _facts(model: nn.Module, gradients: bool) -> dict[str, Any]:
    facts = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and not key.startswith("_"):
                facts[f"{name}.{key}".lstrip(".")] = value
    for name, param in model.named_parameters():
        facts[f"{name}.requires_grad"] = param.requires_grad
        facts[name] = param.detach().clone()
        if gradients:
            facts[f"{name}.grad"] = None if param.grad is None else param.grad.clone()
    return facts


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return torch.equal(old, new)
    return type(old) is type(new) and old == new


def _change(place: str, old: Any, new: Any) -> tuple[str, str]:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return f"`{place}` 的数值变了", f"`{place}` has other values"
    zh, en = ([_word(one, tensor) for one in (old, new)] for tensor in ("一个张量", "a tensor"))
    return f"`{place}` 原来是 {zh[0]}，现在是 {zh[1]}", f"`{place}` was {en[0]} and is {en[1]} now"


def _word(value: Any, tensor: str) -> str:
    return tensor if isinstance(value, Tensor) else f"`{value!r}`"
