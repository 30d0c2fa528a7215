"""What a value keeps alive."""

import gc
import io
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
                stack += item.__closure__, item.__defaults__, item.__kwdefaults__
            elif isinstance(item, io.BytesIO):
                stack.append(vars(item))  # the buffer is part of it; Python 3.12 has it among the referents
            elif not isinstance(item, Tensor | nn.Module | ModuleType | type):
                stack += gc.get_referents(item)
