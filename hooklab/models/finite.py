"""The first inf or NaN of a forward or a backward pass: which layer, which operation, and was it there before?"""

from functools import partial
from sys import _getframe as this_frame
from sys import exception
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from hooklab._support.frames import is_around
from hooklab._support.handles import Installed, OwnHook
from hooklab._support.nested import tensors_in
from hooklab._support.nodes import node_name
from hooklab._support.torch_private import eager, graph_task, queue_callback, recomputing
from hooklab.layers.select import callable_layers, groups
from hooklab.models.finite_flags import Look, NotFinite, Seen, look_at, refuse_the_first

__all__ = ["Finite", "NotFinite", "finite"]


class Call(NamedTuple):
    """A call of a layer that is going on."""

    module: nn.Module
    layer: str
    frame: FrameType  # that PyTorch runs it in
    error: BaseException | None  # that was being handled when it began
    before: list[Seen]


class Finite(Installed):
    """The hooks that look for inf and NaN: what `finite` returns."""

    def __init__(self, layers: dict[str, nn.Module]):
        super().__init__("finite")
        self._running: list[Call] = []  # outermost first
        self._forward: list[Look] = []
        self._backward: dict[int, list[Look]] = {}  # for each backward pass, since one may run inside another
        with self._all_or_none():
            for module, names in groups(layers):
                begin, end = OwnHook(self._begin, names[0]), OwnHook(self._end, names[0])
                self._handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
                self._handles.append(module.register_forward_hook(end, always_call=True))

    @eager
    def _begin(self, layer: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A layer begins: note what it is given, before it can edit that in place."""
        if recomputing(self._task):
            return
        caller = this_frame(1)
        while self._running and not is_around(self._running[-1].frame, caller):
            self._running.pop()  # Ctrl-C has ended it, which calls no hook
        if not self._running:
            self._forward.clear()
            self._backward.clear()  # an error has ended what is still there
        inputs = list(tensors_in((args, kwargs)))
        # What was computed since the last layer belongs to the module around, and what comes from outside to nobody.
        self._follow(inputs, self._running[-1].layer if self._running else None)
        self._running.append(Call(module, layer, caller, exception(), list(look_at(inputs))))

    @eager
    def _end(self, layer: str, module: nn.Module, args: tuple, output: Any) -> None:
        """A layer has returned, or an error has ended it; at the end of the outermost call the flags are read."""
        calls = [call.module for call in self._running]
        if recomputing(self._task) or module not in calls:
            return
        depth = len(calls) - 1 - calls[::-1].index(module)
        call = self._running[depth]
        del self._running[depth:]
        if exception() is not call.error:
            return
        outputs = list(tensors_in(output))
        self._follow(outputs, layer)
        self._forward.append(Look(layer, type(module).__name__, call.before, list(look_at(outputs))))
        if not self._running:
            looks, self._forward = self._forward, []
            refuse_the_first("forward", looks)

    def _follow(self, tensors: list[Tensor], layer: str | None) -> None:
        """Put a hook on every Node that led to these tensors since the last look; without a layer only remember them."""
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
        while nodes:
            node = nodes.pop()
            # The gradient of a leaf is seen where it is made, at the Node before.
            if node is None or not node.next_functions or self in node.metadata:
                continue
            node.metadata[self] = True
            if layer is not None:
                node.register_hook(partial(self._passed, layer, node_name(node)))
                nodes += [source for source, _ in node.next_functions]

    @eager
    def _passed(self, layer: str, operation: str, after: tuple, before: tuple) -> None:
        """A Node has run in backward; hooks on Nodes are given what came out of it first."""
        if not self._handles:  # a graph may outlive the block
            return
        task = graph_task()
        if task not in self._backward:
            self._backward[task] = []
            queue_callback(partial(self._after_backward, task))
        self._backward[task].append(Look(layer, operation, list(look_at(before)), list(look_at(after))))

    @eager
    def _after_backward(self, task: int) -> None:
        refuse_the_first("backward", self._backward.pop(task))

    def remove(self) -> None:
        super().remove()
        self._running.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_running": [], "_forward": [], "_backward": {}}


def finite(model: nn.Module) -> Finite:
    """The first inf or NaN, in forward or backward, raises `NotFinite`; `with`, or `.remove()`, takes the hooks off.

    The error comes when `model(x)` or `loss.backward()` has run to its end. A GPU is waited for only then.

    Args:
        model: the module to run, any number of times.

    Returns:
        A `Finite`, to remove.

    Raises:
        NotFinite: from `model(x)` or `loss.backward()`; it has `.phase`, `.layer`, `.operation`, `.shape` and
            `.inputs_finite`, False where the layer was given an inf or a NaN already.
        TypeError: `model` is no module; no hook is installed then.

    Example:
        >>> from torch import ones
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> model[0].weight.data[0] = float("inf")
        >>> try:
        ...     with finite(model):
        ...         model(ones(2, 4))
        ... except NotFinite as error:
        ...     print(error.layer, error.inputs_finite)
        0 True

    Limits: docs/limits.md#finite.
    Source: [`Node.register_hook`](https://docs.pytorch.org/docs/stable/generated/torch.autograd.graph.Node.register_hook.html).
    """
    return Finite(callable_layers("finite", model, (nn.Module,)))
