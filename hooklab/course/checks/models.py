"""What an answer has left behind on a model, or changed of it: taken before the call, asked after it."""

from collections import Counter
from typing import Any

import torch
from torch import nn

from hooklab.census import hooks_on

__all__ = ["Before"]


class Before:
    """A model as it is now. Its methods say what is no longer so; each returns something empty where nothing has changed."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._hooks = _hooks(model)
        self._modes = _modes(model)
        self._switches = _switches(model)
        self._attributes = [set(vars(module)) for module in model.modules()]
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
        pairs = zip(self.model.modules(), self._attributes, strict=True)
        return sorted({name for module, before in pairs for name in vars(module).keys() - before})


def _hooks(model: nn.Module) -> Counter:
    return Counter((hook.kind, hook.place, hook.function) for hook in hooks_on(model))


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _switches(model: nn.Module) -> dict[str, bool]:
    flags = {
        f"{name}.{flag}".lstrip("."): value
        for name, module in model.named_modules()
        for flag, value in vars(module).items()
        if isinstance(value, bool) and not flag.startswith("_")
    }
    return flags | {f"{name}.requires_grad": param.requires_grad for name, param in model.named_parameters()}
