"""What an answer has left behind on a model, or changed of it: taken before the call, asked after it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hooklab.census import hooks_on
from hooklab.course.refusals import refuse

__all__ = ["Before", "fails", "refuse_hooks"]


class Before:
    """A model as it is now. Its methods say what is no longer so; each returns something empty where nothing has changed."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._hooks = _hooks(model)
        self._modes = _modes(model)
        self._attributes = _attributes(model)
        self._switches = _switches(model)
        self._trained = {name: param.requires_grad for name, param in model.named_parameters()}
        self._state = {name: value.clone() for name, value in model.state_dict().items()}

    def new_hooks(self) -> list[tuple[str, str, Any]]:
        """(kind, place, function) of each hook that was not there."""
        return list((_hooks(self.model) - self._hooks).elements())

    def lost_hooks(self) -> list[tuple[str, str, Any]]:
        """(kind, place, function) of each hook that was there and is not any more."""
        return list((self._hooks - _hooks(self.model)).elements())

    def replaced_forwards(self) -> list[str]:
        """Where `forward` is no longer that of the class: "inner.forward"."""
        return [
            f"{name}.forward".lstrip(".")
            for name, module in self.model.named_modules()
            if module.forward != type(module).forward.__get__(module)
        ]

    def changed_modes(self) -> dict[str, tuple[bool, bool]]:
        """By module: `training` before and now."""
        now = _modes(self.model)
        return {name: (was, now[name]) for name, was in self._modes.items() if was != now[name]}

    def switched(self) -> list[str]:
        """What is True and was False, or the other way round: "act.inplace", "training", "head.weight.requires_grad"."""
        now = _switches(self.model)
        return [name for name, was in self._switches.items() if now.get(name) != was]

    def frozen(self) -> list[str]:
        """The parameters that had `requires_grad` and have it no longer."""
        return [
            name for name, param in self.model.named_parameters() if self._trained[name] and not param.requires_grad
        ]

    def thawed(self) -> list[str]:
        """The parameters that had no `requires_grad` and have it now."""
        return [
            name for name, param in self.model.named_parameters() if param.requires_grad and not self._trained[name]
        ]

    def changed_state(self) -> list[str]:
        """The parameters and buffers with other values."""
        return [name for name, value in self.model.state_dict().items() if not torch.equal(value, self._state[name])]

    def new_attributes(self) -> list[str]:
        """The names of attributes that some module has now and had not."""
        return sorted({key for _, key in _attributes(self.model).keys() - self._attributes.keys()})

    def changed_attributes(self) -> list[str]:
        """The names of attributes that some module has now and had not, has no longer, or has with another flag or number.

        The `training` of a module is left out, and a `forward` that was put back.
        """
        changed = {key for (_, key), _ in _attributes(self.model).items() ^ self._attributes.items()}
        return sorted(changed if self.replaced_forwards() else changed - {"forward"})


def refuse_hooks(before: Before, left: str) -> None:
    """Refuse an answer that took off a hook which was there ("removed_others"), or has left one of its own (`left`).

    The words may name its `kind` and `place`, and how many `more` there are now.
    """
    if lost := before.lost_hooks():
        refuse("removed_others", place=lost[0][1])
    if new := before.new_hooks():
        kind, place, _ = new[0]
        refuse(left, kind=kind, place=place, more=len(new))


@contextmanager
def fails(
    model: nn.Module,
    error: type[Exception] | tuple[type[Exception], ...] = RuntimeError,
    swallowed: str = "swallowed",
    left: str = "hooks_left_after_error",
) -> Iterator[Before]:
    """The block gives an answer a `model` that raises `error`: this has to come through, and no hook may stay."""
    before = Before(model)
    try:
        yield before
    except error:
        pass
    else:
        refuse(swallowed)
    refuse_hooks(before, left)


def _hooks(model: nn.Module) -> Counter:
    return Counter((hook.kind, hook.place, hook.function) for hook in hooks_on(model))


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """By module and name: flags, numbers and words with their value, anything else as None."""
    return {
        (name, key): value if isinstance(value, bool | int | float | str) else None
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key != "training"
    }


def _switches(model: nn.Module) -> dict[str, bool]:
    flags = {
        f"{name}.{flag}".lstrip("."): value
        for name, module in model.named_modules()
        for flag, value in vars(module).items()
        if isinstance(value, bool) and not flag.startswith("_")
    }
    return flags | {f"{name}.requires_grad": param.requires_grad for name, param in model.named_parameters()}
