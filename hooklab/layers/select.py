"""Find the layers of a model by name, by pattern or by class."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from hooklab._support import refuse
from hooklab._support.compiled import warn_if_compiled
from hooklab._support.torch_private import uncompiled

__all__ = ["callable_layers", "chosen", "down_to", "groups", "select"]


def chosen(function: str, model: Any, patterns: tuple) -> dict[str, nn.Module]:
    """What `select` returns; `function` is the one that the errors name."""
    _check(function, model, patterns)
    layers = _layers(uncompiled(model))
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = list(_matching(layers, pattern))
        if not names:
            shown = repr(pattern) if isinstance(pattern, str) else f"class {pattern.__name__}"
            raise KeyError(f"{function}: no layer matches {shown}; close: {_close(pattern, layers)}")
        found.update((name, layers[name]) for name in names)
    return found


def callable_layers(function: str, model: Any, patterns: tuple) -> dict[str, nn.Module]:
    """The chosen layers that a forward can call; warns where hooks may be ignored."""
    found = chosen(function, model, patterns)
    layers = {name: layer for name, layer in found.items() if _has_forward(layer)}
    for name, layer in found.items():
        if name not in layers and (name in patterns or not layers):
            raise ValueError(_never_called(function, name, layer))
    warn_if_compiled(function, model, stacklevel=4)
    return layers


def down_to(depth: int, model: nn.Module) -> tuple[str, ...]:
    """The names of the layers that have a forward, down to `depth`; the model's own where there are none."""
    levels, names = {"": 0}, []
    for name, layer in _layers(uncompiled(model)).items():
        if name:
            called = _has_forward(layer)  # else, as an nn.ModuleList, it is no level of its own
            levels[name] = levels[name.rpartition(".")[0]] + called
            names += [name] if called and levels[name] <= depth else []
    return tuple(names) or ("",)


def groups(layers: dict[str, nn.Module]) -> Iterator[tuple[nn.Module, list[str]]]:
    """Each module once, with all its names: a shared module has several."""
    names: dict[nn.Module, list[str]] = {}
    for name, layer in layers.items():
        names.setdefault(layer, []).append(name)
    yield from names.items()


def _check(function: str, model: Any, patterns: tuple) -> None:
    refuse.no_module(function, model)
    if not patterns:
        raise ValueError(
            f"{function}: no pattern was given; name layers, for example {function}(model, 'layer4'), "
            "give a class such as nn.Conv2d, or '**' for every layer"
        )
    for pattern in patterns:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            found = f"the class {pattern.__name__}" if isinstance(pattern, type) else type(pattern).__name__
            hint = _hint(function, model, pattern)
            raise TypeError(f"{function}: expected names, patterns or Module classes, found {found}{hint}")


def _hint(function: str, model: nn.Module, wrong: Any) -> str:
    """What was meant, perhaps, where something else stands in place of a name, a pattern or a class."""
    is_shape = isinstance(wrong, list | tuple) and wrong and all(isinstance(size, int) for size in wrong)
    if is_shape or isinstance(wrong, torch.Tensor):
        return "; layers are named here, and no input or its shape: run the model yourself, inside the block"
    if isinstance(wrong, list | tuple | set | dict):
        return f"; write {function}(model, *names)"
    if isinstance(wrong, nn.Module):
        own = [repr(name) for name, layer in model.named_modules(remove_duplicate=False) if layer is wrong]
        return f"; here its name is {own[0]}" if own else "; it is not part of this model"
    if isinstance(wrong, type):
        return ", which is no nn.Module"
    if isinstance(wrong, int | float) or callable(wrong):
        return "; other arguments go by name: keep=, depth=, bins="
    return ""


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    try:
        return dict(model.named_modules(remove_duplicate=False))
    except RecursionError:
        raise RecursionError(
            "this model has a module inside itself; keep a reference to a parent in a list or a weakref, where nn.Module "
            "does not register it"
        ) from None


def _matching(layers: dict[str, nn.Module], pattern: str | type) -> Iterator[str]:
    if not isinstance(pattern, str):
        return (name for name, layer in layers.items() if isinstance(layer, pattern))
    if pattern in layers:
        return iter([pattern])
    matches = re.compile(_regex(pattern)).fullmatch
    return (name for name in layers if name and matches(name))


def _regex(pattern: str) -> str:
    """`*` is any text without a dot; `**` any text; `**.` any number of levels, also none."""
    meaning = {"**.": r"(?:.*\.)?", "**": ".*", "*": "[^.]*"}
    return "".join(meaning.get(part) or re.escape(part) for part in re.split(r"(\*\*\.|\*\*|\*)", pattern))


def _close(pattern: str | type, layers: dict[str, nn.Module]) -> str:
    if isinstance(pattern, str):
        names = [name for name in layers if name]
        if compiled := [name for name in names if name.replace("._orig_mod", "") == pattern]:
            return f"{compiled[0]} (compiled by itself)"
        if deeper := list(_matching(layers, f"**.{pattern.lstrip('*.')}")):
            return f"{', '.join(deeper[:3])} (deeper inside: '**.{pattern.lstrip('*.')}')"
        close = get_close_matches(pattern, names) or get_close_matches(pattern.rpartition(".")[2], names)
        return ", ".join(close or names[:3]) or 'nothing: the model has no layers inside, give "" for itself'
    classes = list(dict.fromkeys(type(layer).__name__ for layer in layers.values()))
    return ", ".join(get_close_matches(pattern.__name__, classes) or classes[:3])


def _has_forward(layer: nn.Module) -> bool:
    if isinstance(layer, torch.jit.ScriptModule):  # it takes no hooks, and its class cannot be asked for its forward
        return False
    return type(layer).forward is not nn.Module.forward or "forward" in layer.__dict__


def _never_called(function: str, name: str, layer: nn.Module) -> str:
    if isinstance(layer, torch.jit.ScriptModule):
        return (
            f"{function}: {name!r} is a {type(layer).__name__}, a TorchScript module, which is not hooked; "
            "take the eager module it was made from, or a layer around it"
        )
    cure = "it holds no layers, so there is nothing to hook; take a layer around it"
    if layer._modules:
        cure = f"take what is inside: {name + '.*' if name else '*'!r}"
    return f"{function}: {name!r} is a {type(layer).__name__}, which has no forward and is never called; {cure}"


def select(model: nn.Module, *patterns: str | type[nn.Module]) -> dict[str, nn.Module]:
    """The layers of a model by name, by pattern or by class.

    Args:
        model: any module; of a compiled one the layers inside are meant.
        *patterns: exact names (`"layer1.0.conv1"`; `""` is the model itself); patterns in which `*` stands for text
            without a dot and `**` for any text (`"layer*.0.conv1"`, `"**.relu"`); classes (`nn.Conv2d`).

    Returns:
        The modules by name, in the order of the patterns, then of the model. A shared module has all its names there.

    Raises:
        KeyError: a pattern matches nothing; the message gives the closest names.
        TypeError: `model` is no module, or a pattern is none of the three.
        ValueError: no pattern was given.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> list(select(model, nn.Linear)), list(select(model, "1"))
        (['0', '2'], ['1'])

    Limits: docs/limits.md#select. Source: [`nn.Module.named_modules`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.named_modules).
    """
    return chosen("select", model, patterns)
