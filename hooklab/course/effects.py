"""What an answer has changed of the things that it was given, though its results may be right."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hooklab._support.packing import has_memory

__all__ = ["watched"]

MAX_NUMBERS = 1_000_000  # of a tensor whose values are compared


Change = tuple[str, dict[str, Any]]  # the name of its phrase, and the facts that go into it


def watched(answer: Any, changes: list[Change]) -> Any:
    """The same answer; what its calls change of modules, tensors, lists, dicts and sets is put into `changes`.

    A class or a module stays as it is: a check may use more of it than its calls.
    """
    if not callable(answer) or isinstance(answer, type | nn.Module):
        return answer

    @functools.wraps(answer, updated=())
    def calling(*args: Any, **kwargs: Any) -> Any:
        looks = [look for given in (*args, *kwargs.values()) for look in _looks(given)]
        result = answer(*args, **kwargs)
        changes.extend(change for look in looks if (change := look()))
        return result

    return calling


def _looks(given: Any) -> Iterator[Callable[[], Change | None]]:
    """Each tells, later, what is not as it is now."""
    if isinstance(given, nn.Module):
        for name, module in given.named_modules():
            # Numbers are left out: a model may count its calls.
            for flag, value in vars(module).items():
                if isinstance(value, bool) and not flag.startswith("_"):
                    yield functools.partial(_flag, name, module, flag, value)
        for name, param in given.named_parameters():
            yield functools.partial(_flag, name, param, "requires_grad", param.requires_grad)
            if param.grad is not None:
                yield functools.partial(_lost_grad, name, param)
    elif isinstance(given, Tensor):
        yield functools.partial(_flag, "", given, "requires_grad", given.requires_grad)
        if has_memory(given) and not given.is_meta and given.numel() <= MAX_NUMBERS:
            yield functools.partial(_values, given, given.detach().clone())
    elif isinstance(given, list | dict | set) and given:  # an empty one may be there to be filled
        yield functools.partial(_items, given, _parts(given))


def _flag(name: str, owner: Any, flag: str, old: bool) -> Change | None:
    if (now := getattr(owner, flag, None)) == old:
        return None
    phrase = "flag_of_part" if name else "flag_of_tensor" if isinstance(owner, Tensor) else "flag_of_model"
    return phrase, {"name": name, "flag": flag, "old": old, "now": now}


def _lost_grad(name: str, param: Tensor) -> Change | None:
    if param.grad is not None:
        return None
    return "lost_grad", {"name": name}


def _values(given: Tensor, old: Tensor) -> Change | None:
    now = given.detach()
    if now.shape == old.shape and torch.allclose(now, old, rtol=0, atol=0, equal_nan=True):
        return None
    return "other_values", {}


def _items(given: Any, old: list) -> Change | None:
    now = _parts(given)
    if len(now) == len(old) and all(one is other for one, other in zip(now, old, strict=True)):
        return None
    return "other_items", {"given": given}


def _parts(given: Any) -> list:
    return [*given, *given.values()] if isinstance(given, dict) else [*given]
