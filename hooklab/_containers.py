"""The tensors in what modules return: nested tuples, lists, dicts, dataclasses and their kin."""

import copy
import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MemberDescriptorType
from typing import Any

from torch import Size, Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

__all__ = ["copied", "first_shape", "map_tensors", "shapes", "tensors_in"]

PLAIN = frozenset([type(None), bool, int, float, str])  # they hold nothing


def tensors_in(value: object, around: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts (UserDict, too), dataclasses and a TensorDict; of a PackedSequence its data.

    What leads back to a container `around` it (their ids), as the parent of a node does, is not entered again.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif value.__class__ not in PLAIN and id(value) not in around:
        for item in _items(value):
            yield from tensors_in(item, (*around, id(value)))


def map_tensors(function: Callable[[Tensor], Any], value: Any, around: dict[int, Any] | None = None) -> Any:
    """`value` with every tensor in it replaced by what `function` returns; the containers are new ones.

    What leads back to a container `around` it (by id) leads to the new one.
    """
    around = {} if around is None else around
    if isinstance(value, Tensor):
        return function(value)
    if value.__class__ in PLAIN:
        return value
    if isinstance(value, PackedSequence):  # the rest of it are lengths and an order
        return tuple.__new__(PackedSequence, (function(value.data), *value[1:]))
    if isinstance(value, Size):  # numbers; it refuses tuple's constructor
        return value
    if id(value) in around:
        return around[id(value)]
    try:
        return _mapped(partial(map_tensors, function, around=around), value, around)
    finally:
        around.pop(id(value), None)


def first_shape(value: object) -> tuple[int, ...] | None:
    """The shape of the first tensor in `value`, or None where there is none."""
    tensor = value if isinstance(value, Tensor) else next(tensors_in(value), None)
    return None if tensor is None else _shape(tensor, -1)


def shapes(value: object, around: tuple[int, ...] = ()) -> str:
    """`value` as text, each tensor as its shape: `[2, 5]`, `([2, 5], None)`, `{'out': [2, 5]}`.

    What leads back to a container `around` it (their ids) is `...`.
    """
    if isinstance(value, Tensor):
        return (
            str(list(value.shape)) if not value.is_nested else f"[{', '.join(map(str, _shape(value, '*')))}]"
        )
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if id(value) in around:
        return "..."
    each = partial(shapes, around=(*around, id(value)))
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return _named(value, names, map(each, value))
    if isinstance(value, tuple):
        return f"({', '.join(map(each, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(each, value))}]"
    if isinstance(value, dict | UserDict):
        return "{" + ", ".join(f"{key!r}: {each(item)}" for key, item in value.items()) + "}"
    if _is_dataclass(value):
        return _named(value, _set_fields(value), map(each, _items(value)))
    if node := _node(value):
        held, _ = node
        return f"{type(value).__name__}({', '.join(map(each, held))})"
    return type(value).__name__


def _items(value: object) -> Iterable[object]:
    """What a container holds; of anything else nothing."""
    if isinstance(value, dict | UserDict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if _is_dataclass(value):
        return [getattr(value, name) for name in _set_fields(value)]
    node = _node(value)
    return node[0] if node else ()


def _mapped(each: Callable[[Any], Any], value: Any, around: dict[int, Any]) -> Any:
    """A new container with what `each` returns for what `value` holds; what is none comes back as it is."""
    around[id(value)] = value  # of a tuple: there is no new one yet
    if isinstance(value, tuple):
        items = [each(item) for item in value]
        # torch.return_types (what `torch.max` returns) refuse tuple's constructor; named tuples may have their own.
        new = type(value)(items) if hasattr(value, "n_fields") else tuple.__new__(type(value), items)
        if hasattr(new, "__dict__"):
            vars(new).update({name: each(item) for name, item in vars(value).items()})
        return new
    if isinstance(value, list):
        around[id(value)] = new = copied(value, [])
        items = [each(item) for item in value]
        with suppress(Exception):  # it may be one that cannot be written to
            new[:] = items
            return new
        return items
    if isinstance(value, dict):
        around[id(value)] = new = copied(value, {})  # of its own class, with its own default
        items = {key: each(item) for key, item in value.items()}
        with suppress(Exception):
            return _filled(new, items, value)
        return items
    if isinstance(value, UserDict):  # as a BatchEncoding, which tokenizers return
        around[id(value)] = new = copy.copy(value)
        new.data = each(value.data)
        return new
    if _is_dataclass(value) and _holds_its_fields(value):
        around[id(value)] = new = copy.copy(value)
        for name in _set_fields(value):
            item = each(getattr(value, name))
            object.__setattr__(new, name, item)  # also where the class is frozen
        return new
    if node := _node(value):
        held, together = node
        items = [each(item) for item in held]
        try:
            return together(items)
        except Exception:  # it may hold nothing but tensors of one shape
            return items
    return value


def copied(value: Any, plain: Any) -> Any:
    """A copy one level deep; `plain` of what cannot be copied."""
    try:
        return copy.copy(value)
    except Exception:  # a lock, a file, a generator; or it writes into the copy, as nobody may
        return plain


def _filled(new: dict, items: dict, old: dict) -> dict:
    for key, item in items.items():
        new[key] = item
        if isinstance(new, OrderedDict):  # a class may copy itself in the order of its fields
            OrderedDict.move_to_end(new, key)
    for name, item in vars(old).items() if hasattr(old, "__dict__") else ():
        if name in old and old[name] is item:  # a dict whose keys are attributes, too
            object.__setattr__(new, name, new[name])
    return new


def _shape(tensor: Tensor, ragged: Any) -> tuple:
    """The shape; a nested tensor has no number for a dimension in which its parts differ."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    sizes = []
    for dim in range(tensor.dim()):
        try:
            size = tensor.size(dim)
        except RuntimeError:
            size = None
        sizes.append(size if isinstance(size, int) else ragged)
    return tuple(sizes)


def _named(value: object, names: Iterable[str], items: Iterable[str]) -> str:
    inside = ", ".join(f"{name}={item}" for name, item in zip(names, items, strict=True))
    return f"{type(value).__name__}({inside})"


def _node(value: object) -> tuple[list, Callable[[list], Any]] | None:
    """What a TensorDict or a tensorclass holds, and how to put that together again, as PyTorch's pytrees know it.

    They know of other objects as well (a `DynamicCache`), of which they rebuild a part only.
    """
    node = SUPPORTED_NODES.get(type(value))
    if node is None or not (isinstance(value, Mapping) or _is_dataclass(value)):
        return None
    try:
        items, context = node.flatten_fn(value)
    except Exception:  # it may refuse some of its objects
        return None
    return list(items), lambda items: node.unflatten_fn(items, context)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _holds_its_fields(value: object) -> bool:
    """False of a tensorclass: its fields lead to a TensorDict inside, which a copy would share."""

    def holds(name: str) -> bool:  # or has a slot for it
        return name in getattr(value, "__dict__", ()) or isinstance(
            getattr(type(value), name, None), MemberDescriptorType
        )

    return type(value) not in SUPPORTED_NODES or all(map(holds, _set_fields(value)))


def _set_fields(value: Any) -> list[str]:
    """The names of the fields of a dataclass that have a value."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
