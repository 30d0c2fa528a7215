"""Walk through autograd graphs and through what modules return."""

from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["behind", "first_shape", "tensors_in"]


def behind(root: Node) -> Iterator[Node]:
    """Every Node that leads to `root`, `root` first."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                stack.append(source)


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def first_shape(value: object) -> tuple[int, ...] | None:
    """The shape of the first tensor in `value`, or None where there is none."""
    tensor = value if isinstance(value, Tensor) else next(tensors_in(value), None)
    return None if tensor is None else tuple(tensor.shape)
