"""The calls of layers in one forward: what each was given, and what it returned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooklab._support.as_found import random_state
from hooklab._support.handles import Installed, OwnHook
from hooklab._support.nested import map_tensors, tensors_in
from hooklab._support.torch_private import eager
from hooklab.layers.select import groups

__all__ = ["Call", "Calls", "copied", "given", "moved", "sizes"]


@dataclass(eq=False)
class Call:
    """One call of a layer. Its tensors are copies, which no later layer can overwrite."""

    name: str  # with `#2` for a second call
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    random: list[Tensor]  # where the random numbers stood when it began
    output: Any = None
    is_leaf: bool = True  # no other layer was called inside it


class Calls(Installed):
    """Notes calls in the order in which they end, those for which `keep` is true."""

    def __init__(self, layers: dict[str, nn.Module], keep: Callable[[Call], bool]):
        super().__init__("compare")
        self.ended: list[Call] = []
        self._running: list[Call] = []
        self._keep, self._begun = keep, dict.fromkeys(layers.values(), 0)
        with self._all_or_none():
            for module, names in groups(layers):
                begin, end = OwnHook(self._begin, names[0]), OwnHook(self._end)
                # First of the pre-hooks and last of the hooks: what others put on the layer counts as a part of it.
                self._handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
                self._handles.append(module.register_forward_hook(end))

    @eager
    def _begin(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        for outer in self._running:
            outer.is_leaf = False
        self._begun[module] += 1
        label = name if self._begun[module] == 1 else f"{name} #{self._begun[module]}"
        args, kwargs = copied((args, kwargs))
        self._running.append(Call(label, module, args, kwargs, random_state()))

    @eager
    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        call = self._running.pop()
        while call.module is not module:  # an error ended it, which the model has caught
            call = self._running.pop()
        call.output = output
        if self._keep(call):
            call.output = copied(output)
            self.ended.append(call)


def copied(value: Any) -> Any:
    """`value` with a copy of each tensor."""
    return _map_once(lambda tensor: tensor.detach().clone(), value)


def _map_once(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """As `map_tensors`; a tensor that is given twice stays one, as self-attention needs for its faster path."""
    made: dict[int, Tensor] = {}

    def result(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    return map_tensors(result, value)


def sizes(value: object) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors in `value`."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def moved(inputs: tuple[tuple, dict[str, Any]], a: nn.Module, b: nn.Module) -> tuple[tuple, dict[str, Any]]:
    """The inputs of `a` for `b`, in the dtype and on the device of its parameters where those are others."""
    mine, theirs = _first_float(a), _first_float(b)
    if mine is None or theirs is None or (mine.dtype, mine.device) == (theirs.dtype, theirs.device):
        return inputs

    def to_b(tensor: Tensor) -> Tensor:
        rounded = mine.dtype != theirs.dtype and tensor.is_floating_point()
        return tensor.to(theirs.device, theirs.dtype if rounded else tensor.dtype)

    args, kwargs = _map_once(to_b, inputs)
    return args, kwargs


def _first_float(model: nn.Module) -> Tensor | None:
    return next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)


def given(call: Call, other: Call) -> tuple[tuple, dict[str, Any]] | None:
    """The inputs of `call` for the layer of `other`, in the dtype and on the device that it is called with.

    None where it is unclear which input is which, or where one is an object that a layer may change, such as a cache.
    """
    same_form = len(call.args) == len(other.args) and call.kwargs.keys() == other.kwargs.keys()
    form = call if same_form else other  # in the same form each input goes by its place or its name
    mine = list(tensors_in((call.args, call.kwargs)))
    theirs = list(tensors_in((other.args, [other.kwargs[name] for name in form.kwargs])))
    clear = (same_form or len(mine) == 1) and list(map(_kind, mine)) == list(map(_kind, theirs))
    if not clear or not _is_plain((call.args, call.kwargs)) or not _is_plain((form.args, form.kwargs)):
        return None
    places = mine if same_form else theirs
    ready = {
        id(place): tensor.to(their.device, their.dtype)
        for place, tensor, their in zip(places, mine, theirs, strict=True)
    }
    args, kwargs = map_tensors(lambda place: ready[id(place)], (form.args, form.kwargs))
    return args, kwargs


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What stays when a tensor is rounded to another dtype."""
    return tuple(tensor.shape), tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, Tensor | bool | int | float | str)
