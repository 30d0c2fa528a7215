"""A hook for several tensors: `register_multi_grad_hook` of PyTorch, for somebody who only looks."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

from hooklab._support.checkpoints import graph_task
from hooklab._support.compiler import eager
from hooklab._support.nodes import gradient_node

__all__ = ["register_multi_grad_hook"]


@eager
def register_multi_grad_hook(tensors: Sequence[Tensor], hook: Callable[[Tensor | None], None]) -> list[Any]:
    """Call `hook` with the first tensor's gradient once those of all tensors are there; returns the handles.

    PyTorch's own raises under `autograd.grad` where one of the tensors is a leaf; this one does not fire then.
    """
    nodes = [gradient_node(tensor) for tensor in tensors]
    waiting: dict[int, int] = {}  # for how many gradients, by the number of the backward
    first: dict[int, Tensor] = {}  # the gradient of the first tensor
    lock = threading.Lock()  # each device has a thread of its own

    @eager
    def arrived(grad: Tensor, is_first: bool) -> None:
        run = graph_task()
        with lock:
            if run not in waiting:
                waiting[run] = _expected(nodes)
            waiting[run] -= 1
            if is_first and waiting[run] >= 0:
                first[run] = grad
            complete = waiting[run] == 0
        if complete:
            hook(first.pop(run, None))

    def hook_for(is_first: bool) -> Callable:
        return eager(lambda grad: arrived(grad, is_first))

    return [tensor.register_hook(hook_for(number == 0)) for number, tensor in enumerate(tensors)]


def _expected(nodes: list[graph.Node]) -> int:
    """How many of these will get a gradient in the backward that is running; 0 where PyTorch cannot tell."""
    try:
        return sum(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return 0
