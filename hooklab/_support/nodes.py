"""Walk through autograd graphs."""

from collections.abc import Iterator

from torch import Tensor, inference_mode
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["behind", "gradient_node", "node_name"]


def gradient_node(tensor: Tensor) -> Node:
    """The Node that the gradient of `tensor` goes to; of a leaf its AccumulateGrad."""
    with inference_mode(False):
        return get_gradient_edge(tensor).node


def node_name(node: Node) -> str:
    """PyTorch's name, `"MulBackward0"`; that of its class in Python, but for those that are only called CppFunction."""
    name = type(node).__name__
    return node.name() if name == "CppFunction" else name


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
