"""What a value keeps alive."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["within"]


def within(value: Any) -> Iterator[Any]:
    """What `value` keeps alive, each object once: in containers, objects, functions; modules are not entered."""
    seen: dict[int, Any] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            yield item
            if not isinstance(item, Tensor | nn.Module | ModuleType | type):
                stack += _parts(item)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    slots = {name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))}
    return [getattr(value, name) for name in sorted(slots) if hasattr(value, name) and name != "__weakref__"]


def _names(slots: Any) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else [*slots, "__dict__"]
