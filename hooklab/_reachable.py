"""What a value keeps alive."""

import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["within"]


def within(value: Any) -> Iterator[Any]:
    """What `value` keeps alive, each object once; modules are not entered, nor what a function finds by global names."""
    seen: dict[int, Any] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            yield item
            if isinstance(item, FunctionType):
                stack += item.__closure__ or (), item.__defaults__ or (), item.__kwdefaults__ or {}
            elif not isinstance(item, Tensor | nn.Module | ModuleType | type):
                stack += gc.get_referents(item)
