"""Part 1: which hook fires when. One clock for every kind, forward and backward."""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hooklab._support import refuse
from hooklab._support.calls import forget_interrupted, leave
from hooklab._support.checkpoints import NO_BACKWARD, graph_task
from hooklab._support.compiler import compiling, eager, refuse_compiling, warn_if_compiled, warn_if_ignored
from hooklab._support.events import PHASES, Event, line, with_module_backward
from hooklab._support.multi_grad import register_multi_grad_hook
from hooklab._support.nested import first_shape, tensors_in
from hooklab._support.nodes import behind, gradient_node, node_name
from hooklab._support.packing import hold, installed, outer_hooks, unhold

__all__ = ["Event", "Trace", "trace"]

# The newest PyTorch shows every Node as it is created; without that, the Nodes behind the model's output and
# behind the given tensors are found by walking the graph.
NODE_CREATION_HOOK = getattr(graph, "node_creation_hook", None)


class Running(threading.local):
    """What is running, in each thread."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, str, BaseException | None, int]] = []  # modules, in their forward
        self.nodes: dict[int, Event] = {}  # the Node of each backward
        self.forward = 0  # the number of the latest


class Trace:
    """The events recorded so far: what `trace` returns."""

    def __init__(self, model: nn.Module | None, tensors: dict[str, Tensor]):
        # With the number of the backward run, and of the forward that made the Node.
        self._recorded: list[tuple[Event, tuple[int, int]]] = []
        self._handles: list[Any] = []
        self._held: list[graph.Node] = []
        self._contexts = ExitStack()
        self._sees_new_nodes = False
        self._removed = self._entered = False
        layers = [] if model is None else [*model.modules()]  # a compiler cannot make the set of a generator
        self._layers: Any = weakref.WeakSet(layers)  # that calls are expected of
        self._mark = object()  # in the metadata of every Node that has our hooks
        self._running = Running()
        self._calls: Counter[str] = Counter()
        self._owners: dict[str, str] = {}  # of parameters: the modules
        self._places: dict[str, tuple[str, ...]] = {}  # of modules, in this forward: what they were called in
        self._forwards = 0  # that have begun
        self._thread = threading.get_ident()
        # By id(); an id is used again once it is free.
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        # Weak, so that a tensor may be freed inside the block; with the .grad seen last, to infer retain_grad.
        self._watched = [(name, weakref.ref(tensor), [_grad(tensor)]) for name, tensor in tensors.items()]
        try:
            if model is not None:
                self._hang_on_model(model)
            self._hang_on_tensors(tensors)
            self._handles.append(register_optimizer_step_pre_hook(self._on_step("optimizer step pre-hook")))
            self._handles.append(register_optimizer_step_post_hook(self._on_step("optimizer step post-hook")))
        except BaseException:
            self.remove()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """What was recorded can be copied and pickled, as a part of a model perhaps; hooks stay where they are."""
        return {
            "_recorded": list(self._recorded),
            "_handles": [],
            "_held": [],
            "_watched": [],
            "_layers": (),
            "_removed": True,
        }

    # ---- what a reader asks for ----

    @property
    def events(self) -> list[Event]:
        """Every event in order, with the begin and the end of each module's backward inferred from its Nodes."""
        return with_module_backward(self._recorded)

    def phase(self, name: str) -> list[Event]:
        """The events of one phase: `"forward"`, `"backward"`, `"recompute"` or `"step"`."""
        if name not in PHASES:
            close = get_close_matches(str(name), PHASES, cutoff=0.4) or PHASES
            raise ValueError(f"no phase is called {name!r}; close: {', '.join(close)}")
        return [event for event in self.events if event.phase == name]

    def lines(self) -> list[str]:
        """One line per event: number, phase, kind, place (indented by module) and shape."""
        return [line(number, event) for number, event in enumerate(self.events, start=1)]

    def remove(self) -> None:
        """Take every hook off again; the events stay. Twice is harmless."""
        self._removed = True  # what belongs to the block ends with the block, and notes nothing until then
        while self._handles:
            self._handles.pop().remove()
        self._held.clear()
        self._running = Running()  # an interrupted forward would keep its modules
        layers, self._layers = list(self._layers), ()
        forward = {event.kind for event, _ in self._recorded if event.phase == "forward"}
        if forward and "forward pre-hook" not in forward:
            warn_if_ignored("trace", layers)

    def __enter__(self) -> "Trace":
        if self._removed:
            raise RuntimeError(
                "trace: its hooks have been removed, and do not come back; call trace again for new ones"
            )
        if self._entered:
            raise RuntimeError("trace: this block is open already; call trace again for another one")
        self._entered = True
        # Both belong to the current thread and to a stack, so they are opened here and not by the call.
        try:
            refuse_compiling("trace")
            self._contexts.enter_context(installed(*self._packing()))
            if NODE_CREATION_HOOK is not None:
                self._hang_on_old_leaves()
                self._contexts.enter_context(NODE_CREATION_HOOK(self._hang_on_node))
                self._sees_new_nodes = True
                self._held.clear()
        except BaseException:  # without __enter__ there is no __exit__
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._contexts.close()
        finally:
            self._sees_new_nodes = False
            self.remove()

    def __repr__(self) -> str:
        counts = Counter(event.phase for event in self.events)
        return f"Trace({', '.join(f'{count} events in {phase}' for phase, count in counts.items()) or 'no event yet'})"

    # ---- hanging ----

    def _hang_on_model(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            label = name or type(module).__name__
            if isinstance(module, torch.jit.RecursiveScriptModule):  # a scripted one takes no hooks
                continue
            self._handles.append(
                module.register_forward_pre_hook(
                    eager(self._on_forward_pre(label, root=not name)), with_kwargs=True
                )
            )
            self._handles.append(
                module.register_forward_hook(eager(self._on_forward(label)), always_call=True)
            )
        for name, param in model.named_parameters():
            self._names[id(param)] = weakref.ref(param), name
            self._owners[name] = name.rpartition(".")[0] or type(model).__name__
            if param.requires_grad and not nn.parameter.is_lazy(param):
                self._handles.append(param.register_post_accumulate_grad_hook(self._on_accumulated(name)))

    def _hang_on_tensors(self, tensors: dict[str, Tensor]) -> None:
        nodes: dict[graph.Node, None] = {}  # each once, though several tensors may lead to it
        for name, tensor in tensors.items():
            known = self._name(tensor)  # a parameter of the model has this hook already
            self._names[id(tensor)] = weakref.ref(tensor), name
            self._handles.append(tensor.register_hook(self._on_gradient("tensor hook", name)))
            if tensor.is_leaf and not known:
                self._handles.append(tensor.register_post_accumulate_grad_hook(self._on_accumulated(name)))
            nodes.update(dict.fromkeys(behind(gradient_node(tensor))))
        for node in nodes:
            self._hang_on_node(node)
        # Until new ones are seen, nobody else may keep a leaf's Node; it keeps the leaf.
        self._held = [node for node in nodes if hasattr(node, "variable")]
        if len(tensors) > 1:
            record = self._on_gradient("multi-grad hook", ", ".join(tensors))
            self._handles += register_multi_grad_hook(list(tensors.values()), record)

    def _hang_on_old_leaves(self) -> None:
        """While an earlier graph lives, the Nodes of its parameters live too, and are not created anew."""
        hung = set()
        for _, reference, _ in self._watched:
            if (tensor := reference()) is not None:
                hung.update(behind(gradient_node(tensor)))
        for reference, _ in list(self._names.values()):
            leaf = reference()
            if leaf is not None and leaf.is_leaf and leaf.requires_grad and not nn.parameter.is_lazy(leaf):
                node = gradient_node(leaf)
                if node not in hung:
                    self._hang_on_node(node)

    @eager
    def _hang_on_node(self, node: graph.Node) -> None:
        # A compiler makes Nodes, and runs them, to see what backward will need.
        if self._removed or compiling():
            return
        # It may stand behind an earlier output of the model, or behind one of the given tensors.
        if self._mark in node.metadata:
            return
        node.metadata[self._mark] = True
        kind, inside, forward = node_name(node), self._inside(), self._running.forward
        leaf = node.variable if hasattr(type(node), "variable") else None
        name = "" if leaf is None else self._name(leaf)
        # The Node of a leaf may be older than the block. Without the others its module has no backward to tell.
        owner = None if self._sees_new_nodes else self._owners.get(name)
        where = f"{kind} {name}".rstrip()

        @eager
        def before(grad_outputs: tuple) -> None:
            place = self._places.get(owner, inside) if self._sees_new_nodes else inside
            self._record("Node pre-hook", where, first_shape(grad_outputs), place, forward)

        @eager
        def after(grad_inputs: tuple, grad_outputs: tuple) -> None:
            node = self._running.nodes.pop(graph_task(), None)
            place = inside if node is None else node.inside
            self._record("Node hook", where, first_shape(grad_inputs), place, forward)

        self._handles += [node.register_prehook(before), node.register_hook(after)]

    # ---- what the hooks do: note, and return None, so that nothing is replaced ----

    def _on_forward_pre(self, label: str, *, root: bool) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self._removed:  # a copy of the model still has hooks
                return
            forget_interrupted(self._running.stack)
            # Also a part of the model that is called by itself begins a forward; in other threads (those of replicas)
            # and while a checkpoint computes again one goes on.
            alone = threading.get_ident() == self._thread and graph_task() == NO_BACKWARD
            if not self._running.stack and (root or alone):
                self._calls.clear()
                self._places.clear()
                self._running.calls = Counter()
                self._forwards += 1
                self._running.forward = self._forwards
            calls = getattr(self._running, "calls", self._calls)
            calls[label] += 1
            where = label if calls[label] == 1 else f"{label} #{calls[label]}"
            self._running.stack.append((module, where, sys.exception(), graph_task()))
            self._places.setdefault(label, self._inside())
            self._record("forward pre-hook", where, first_shape((args, kwargs)))

        return hook

    def _on_forward(self, label: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            if self._removed:
                return
            stack = self._running.stack
            # It did not where an earlier pre-hook raised, or the trace began inside this call.
            began = leave(stack, module)
            where, error_before = stack[-1][1:3] if began else (label, None)
            raised = sys.exception() is not error_before  # always_call: also when the forward has failed
            self._record("forward raised" if raised else "forward hook", where, first_shape(output))
            if began:
                stack.pop()
            if not raised and not self._sees_new_nodes and not self._running.stack:
                for node in {
                    node for tensor in tensors_in(output) if tensor.grad_fn for node in behind(tensor.grad_fn)
                }:
                    self._hang_on_node(node)

        return hook

    def _on_gradient(self, kind: str, where: str) -> Callable:
        return eager(lambda grad: self._record(kind, where, first_shape(grad)))

    def _on_accumulated(self, where: str) -> Callable:
        return eager(
            lambda param: self._record(
                "post-accumulate-grad hook", where, first_shape(param), self._node().inside
            )
        )

    def _on_step(self, kind: str) -> Callable:
        return eager(lambda optimizer, args, kwargs: self._record(kind, type(optimizer).__name__, None))

    def _packing(self) -> tuple[Callable, Callable]:
        outer = outer_hooks()

        def pack(tensor: Tensor) -> Any:
            self._record("pack", self._name(tensor), first_shape(tensor))
            return hold(tensor) if outer is None else outer[0](tensor)

        def unpack(packed: Any) -> Tensor:
            tensor = packed[0] if outer is None else outer[1](packed)
            if graph_task() != NO_BACKWARD:  # somebody reads a `_saved_*` attribute otherwise
                self._record("unpack", self._node().where, first_shape(tensor), self._node().inside)
            return unhold(packed) if outer is None else tensor

        return pack, unpack

    # ---- the clock ----

    def _record(
        self, kind: str, where: str, shape: Any, inside: tuple[str, ...] | None = None, forward: int = 0
    ) -> None:
        if self._removed:
            return
        run = graph_task()  # -1 outside backward
        if kind.startswith("optimizer"):
            phase = "step"
        elif kind.startswith("forward") or kind == "pack":
            # With create_graph=True backward itself saves tensors, also where a forward asks for gradients.
            stack = self._running.stack
            again = kind.startswith("forward") or (stack and stack[-1][3] == run)
            phase = "forward" if run == NO_BACKWARD else "recompute" if again else "backward"
        else:
            phase = "backward"
        if self._watched:
            self._infer_retain_grad()
        event = Event(kind, where, phase, shape, self._inside() if inside is None else inside)
        if kind == "Node pre-hook":
            self._running.nodes[run] = event
        self._recorded.append((event, (run, forward)))

    def _infer_retain_grad(self) -> None:
        """`.grad` was set since the latest event: by backward, if that was in backward."""
        run = self._recorded[-1][1][0] if self._recorded else NO_BACKWARD
        for name, reference, last in self._watched:
            tensor = reference()
            if tensor is None or not tensor.retains_grad:
                continue
            grad, before = _grad(tensor), last[0]
            last[0] = grad
            if grad is not None and run != NO_BACKWARD and (before is None or before() is not grad()):
                event = Event("retain_grad", name, "backward", tuple(tensor.shape), inferred=True)
                self._recorded.append((event, (run, 0)))

    def _name(self, tensor: Tensor) -> str:
        reference, name = self._names.get(id(tensor), (None, ""))
        return name if reference is not None and reference() is tensor else ""

    def _node(self) -> Event:
        """The Node that is about to run or running: its pre-hook."""
        return self._running.nodes.get(graph_task()) or Event("", "", "backward")

    def _inside(self) -> tuple[str, ...]:
        return tuple(label for _, label, *_ in self._running.stack)


def trace(model: nn.Module | None = None, *unnamed: object, **tensors: Tensor) -> Trace:
    """Which hook fires when: every kind on one clock, without changing a value, a gradient or an order.

    Use it as `with trace(model) as events:`. Module, tensor and optimizer hooks are installed by the call;
    `pack`, `unpack` and the Nodes created meanwhile are seen inside the block, in its thread.

    Args:
        model: every module in it (forward pre-hook, forward hook) and every parameter
            (post-accumulate-grad hook) is traced, but for those that a lazy layer makes later; optimizers always are.
        **tensors: tensors to trace under the names you give them, of any shape: tensor hook, retain_grad,
            post-accumulate-grad hook (leaf), the Node hooks of every Node that leads to them, and with two
            or more tensors a multi-grad hook on all.

    Returns:
        A `Trace`: `.events`, `.lines()` as text, `.phase("backward")`.

    What is concluded and not seen is marked `inferred`: retain_grad (from `.grad`, at the next event) and a
    module's backward (from its Nodes: a full backward hook would add Nodes and forbid in-place layers).
    Saved-tensor hooks active on entry go on working; contexts opened inside (a checkpoint) displace this one,
    so what they save is not seen. `torch.func.grad`, `vjp`, `jacrev` and `hessian` refuse to run beside saved-tensor
    hooks: call `trace` without `with` there. Of a model that is compiled already only what surrounds it is
    seen; one that is compiled inside the block is interrupted at each hook, and its Nodes are the compiler's.
    Without `torch.autograd.graph.node_creation_hook` (PyTorch before 2.15) the Nodes of the model are seen,
    those of the loss are not.

    Raises:
        TypeError: `model` is no module, a tensor has no name or is none, or nothing was given.
        ValueError: a tensor requires no gradient. No hook is installed then.
        RuntimeError: entered again, while the block is open or after its hooks were removed.
        NotImplementedError: entered inside `torch.export`; with `torch.compile(fullgraph=True)` the compiler's own error.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = x * 3
        >>> with trace(y=y) as events:
        ...     y.sum().backward()
        >>> [event.where for event in events.events if event.kind == "Node hook"]
        ['SumBackward0', 'MulBackward0', 'AccumulateGrad']

    Source: [the order of hooks](https://docs.pytorch.org/docs/stable/notes/autograd.html#backward-hooks-execution).
    """
    if unnamed or isinstance(model, Tensor):
        nameless = model if isinstance(model, Tensor) else unnamed[0]
        raise TypeError(
            f"trace: found a {type(nameless).__name__} without a name; it takes a model, and tensors by name: "
            "trace(y=y) or trace(model, y=y)"
        )
    if model is None and not tensors:
        raise TypeError("trace() was given nothing to trace; give a model, or name tensors: trace(y=y)")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"trace: expected a module, found {type(model).__name__}; tensors are given by name: trace(y=y)"
        )
    for name, tensor in tensors.items():
        refuse.unhookable("trace", name, tensor)
    if model is not None:
        warn_if_compiled("trace", model, stacklevel=3)
    return Trace(model, tensors)


def _grad(tensor: Tensor) -> weakref.ref[Tensor] | None:
    """Another one whenever backward sets `.grad` or adds to it: retain_grad edits nothing in place."""
    grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    return None if grad is None else weakref.ref(grad)  # an id may be used again
