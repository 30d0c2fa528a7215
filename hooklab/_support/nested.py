"""The tensors in what modules return: in tuples, lists, dicts and dataclasses, also one inside another."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["first_shape", "is_data", "joined", "map_tensors", "shapes", "tensors_in"]


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in `value`, which may be a tensor itself; those of a PackedSequence are its data."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value):
            yield from tensors_in(item)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with every tensor in it replaced by what `function` returns; the containers are new ones."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=function(value.data))
    if isinstance(value, tuple) and not isinstance(value, Size):
        items = [map_tensors(function, item) for item in value]
        # A named tuple may have a constructor of its own; torch.return_types (of `torch.max`) has no `_make`.
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if isinstance(value, dict):  # among them the ModelOutput of transformers
        new = copy.copy(value)
        for key, item in value.items():
            new[key] = map_tensors(function, item)
        return new
    if _is_dataclass(value):
        new = copy.copy(value)
        for name in _fields(value):
            item = map_tensors(function, getattr(value, name))
            object.__setattr__(new, name, item)  # the class may be frozen
        return new
    return value


def joined(values: Sequence[object]) -> Any:
    """Values of one form as one, each tensor in them joined on dim 0; ValueError, which names them, if they differ."""
    rows = [list(tensors_in(value)) for value in values]
    if not all(rows):
        raise ValueError(f"have no tensor to join: {_listed(values)}")
    if "PackedSequence(" in shapes(values[0]):  # what has been packed has rows of several steps
        raise ValueError("are packed sequences, which cannot be joined")
    forms = {shapes(map_tensors(lambda tensor: tensor.shape[1:], value)) for value in values}
    if len(forms) > 1 or any(tensor.dim() == 0 for row in rows for tensor in row):
        raise ValueError(f"have shapes that cannot be joined on dim 0: {_listed(values)}")
    columns = (torch.cat(column) for column in zip(*rows, strict=True))
    return map_tensors(lambda tensor: next(columns), values[0])


def is_data(value: object) -> bool:
    """True for tensors, None, numbers and text, also in tuples, lists, dicts and dataclasses; False for other objects."""
    if value is None or isinstance(value, Tensor | bool | int | float | str | torch.dtype | torch.device):
        return True
    is_container = isinstance(value, list | tuple | dict) or _is_dataclass(value)
    return is_container and all(map(is_data, _items(value)))


def first_shape(value: object) -> tuple[int, ...] | None:
    """The shape of the first tensor in `value`, or None where there is none."""
    tensor = next(tensors_in(value), None)
    return None if tensor is None or tensor.is_nested else tuple(tensor.shape)


def shapes(value: object) -> str:
    """`value` as text, each tensor as its shape: `[2, 5]`, `([2, 5], None)`, `{'out': [2, 5]}`."""
    if isinstance(value, Tensor):
        return "nested" if value.is_nested else str(list(value.shape))
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _named(value, value._fields, value)
    if isinstance(value, tuple):
        return f"({', '.join(map(shapes, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(shapes, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shapes(item)}" for key, item in value.items()) + "}"
    if _is_dataclass(value):
        return _named(value, _fields(value), _items(value))
    return type(value).__name__


def _listed(values: Sequence[object]) -> str:
    """The different ones of their shapes, the first few."""
    different = list(dict.fromkeys(map(shapes, values)))
    return ", ".join(different[:4]) + (", ..." if len(different) > 4 else "")


def _items(value: object) -> Iterable[object]:
    """What a container holds; nothing where `value` is none."""
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    if _is_dataclass(value):
        return [getattr(value, name) for name in _fields(value)]
    return ()


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[str]:
    """The names of the fields of a dataclass that have a value."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _named(value: object, names: Iterable[str], items: Iterable[object]) -> str:
    inside = ", ".join(f"{name}={shapes(item)}" for name, item in zip(names, items, strict=True))
    return f"{type(value).__name__}({inside})"
