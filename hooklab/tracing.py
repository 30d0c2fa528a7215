"""Part 1: which hook fires when. One clock for every kind, forward and backward."""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook

from hooklab._support import refuse
from hooklab._support.compiled import refuse_compiling, warn_if_compiled
from hooklab._support.events import PHASES, Event, Forward, Retained, line, phase_of, with_module_backward
from hooklab._support.handles import Installed, OwnHook
from hooklab._support.nested import first_shape, tensors_in
from hooklab._support.nodes import behind, gradient_node, node_name
from hooklab._support.packing import hold, installed, unhold
from hooklab._support.table import Tabular
from hooklab._support.torch_private import NO_BACKWARD, eager, graph_task, outer_hooks

__all__ = ["Event", "Trace", "trace"]

# The newest PyTorch shows every Node as it is created; without that, the Nodes behind the model's output and
# behind the given tensors are found by walking the graph.
NODE_CREATION_HOOK = getattr(graph, "node_creation_hook", None)


class Trace(Tabular, Installed):
    """The events recorded so far: what `trace` returns."""

    _columns = "phase", "kind", "where", "shape", "inside", "inferred"
    _text_columns = len(_columns)

    def __init__(self, model: nn.Module | None, tensors: dict[str, Tensor]):
        super().__init__("trace")
        # Each event with the number of its backward pass, and of the forward that made its Node.
        self._recorded: list[tuple[Event, tuple[int, int]]] = []
        self._entered = self._sees_new_nodes = False
        self._contexts = ExitStack()
        self._stack: list[Forward] = []
        self._nodes: dict[tuple[int, int], Event] = {}  # the Node that runs, by thread and backward pass
        self._mark = object()  # in the metadata of every Node that has our hooks
        self._held: list[graph.Node] = []
        self._forwards = 0  # how many have begun
        self._calls: Counter[str] = Counter()  # calls of each module in this forward
        self._places: dict[str, tuple[str, ...]] = {}  # module -> the modules around its first call in this forward
        self._owners: dict[str, str] = {}  # parameter -> its module
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # by id, which another tensor may have later
        self._retained = Retained(tensors)
        with self._all_or_none():
            if model is not None:
                self._hang_on_model(model)
            self._hang_on_tensors(tensors)
            self._handles.append(register_optimizer_step_pre_hook(self._on_step("optimizer step pre-hook")))
            self._handles.append(register_optimizer_step_post_hook(self._on_step("optimizer step post-hook")))

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

    def __repr__(self) -> str:
        counts = Counter(event.phase for event in self.events)
        return f"Trace({', '.join(f'{count} events in {phase}' for phase, count in counts.items()) or 'no event yet'})"

    def _records(self) -> Iterable[tuple]:
        return ((e.phase, e.kind, e.where, e.shape, e.inside, e.inferred) for e in self.events)

    def _cells(self) -> Iterable[tuple[str, ...]]:
        for phase, kind, where, shape, inside, inferred in self._records():
            yield phase, kind, where, str(shape or ""), " › ".join(inside), "yes" if inferred else ""

    def __enter__(self) -> "Trace":
        super().__enter__()
        if self._entered:
            raise RuntimeError("trace: this block is open already; call trace again for another one")
        self._entered = True
        with ExitStack() as opened:  # after an error everything is undone
            opened.callback(self.remove)
            refuse_compiling("trace")
            # Both contexts belong to the current thread and to a stack: they are opened here and not by the call.
            opened.enter_context(installed(*self._packing()))
            if NODE_CREATION_HOOK is not None:
                self._hang_on_old_leaves()
                opened.enter_context(NODE_CREATION_HOOK(self._hang_on_node))
                self._sees_new_nodes = True
                self._held.clear()
            self._contexts = opened.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._contexts.close()

    def remove(self) -> None:
        """Take every hook off again; the events stay. Twice is harmless."""
        super().remove()  # the contexts end with the block, and without handles they note nothing until then
        self._sees_new_nodes = False
        self._held.clear()
        self._stack.clear()

    def __getstate__(self) -> dict[str, Any]:
        left = {"_contexts": ExitStack(), "_retained": Retained({}), "_held": [], "_stack": [], "_names": {}}
        return super().__getstate__() | left | {"_recorded": list(self._recorded)}

    def _hang_on_model(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            label = name or type(module).__name__
            begin, end = OwnHook(self._begin, label, not name), OwnHook(self._end, label)
            self._handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))
        for name, param in model.named_parameters():
            self._names[id(param)] = weakref.ref(param), name
            self._owners[name] = name.rpartition(".")[0] or type(model).__name__
            if param.requires_grad and not nn.parameter.is_lazy(param):
                note = self._note("post-accumulate-grad hook", name)
                self._handles.append(param.register_post_accumulate_grad_hook(note))

    def _hang_on_tensors(self, tensors: dict[str, Tensor]) -> None:
        nodes: dict[graph.Node, None] = {}  # each once, though several tensors may lead to it
        for name, tensor in tensors.items():
            known = self._name(tensor)  # a parameter of the model has this hook already
            self._names[id(tensor)] = weakref.ref(tensor), name
            self._handles.append(tensor.register_hook(unserializable_hook(self._note("tensor hook", name))))
            if tensor.is_leaf and not known:
                note = self._note("post-accumulate-grad hook", name)
                self._handles.append(tensor.register_post_accumulate_grad_hook(note))
            nodes.update(dict.fromkeys(behind(gradient_node(tensor))))
        for node in nodes:
            self._hang_on_node(node)
        # Until new Nodes are seen, nobody else may keep the Node of a leaf, which keeps the leaf.
        self._held = [node for node in nodes if hasattr(node, "variable")]
        if len(tensors) > 1:
            on_all = self._note("multi-grad hook", ", ".join(tensors))
            hook = graph.register_multi_grad_hook([*tensors.values()], lambda gradients: on_all(gradients[0]))
            self._handles.append(hook)

    def _hang_on_old_leaves(self) -> None:
        """While an earlier graph lives, the Nodes of its parameters live too, and are not created anew."""
        for reference, _ in self._names.values():
            leaf = reference()
            if leaf is not None and leaf.is_leaf and leaf.requires_grad and not nn.parameter.is_lazy(leaf):
                self._hang_on_node(gradient_node(leaf))

    @eager
    def _hang_on_node(self, node: Any) -> None:
        # A Node may stand behind an earlier output of the model, or behind one of the given tensors.
        if not self._handles or self._mark in node.metadata or torch.compiler.is_compiling():
            return
        node.metadata[self._mark] = True
        name = self._name(node.variable) if hasattr(type(node), "variable") else ""
        where = f"{node_name(node)} {name}".rstrip()
        inside, forward = self._inside(), self._forwards
        # The Node of a leaf may be older than the block: it belongs where its module is called.
        owner = None if self._sees_new_nodes else self._owners.get(name)

        @eager
        def before(grad_outputs: tuple) -> None:
            place = self._places.get(owner, inside) if self._sees_new_nodes and owner else inside
            self._record("Node pre-hook", where, first_shape(grad_outputs), place, forward)

        @eager
        def after(grad_inputs: tuple, grad_outputs: tuple) -> None:
            begun = self._nodes.pop(_here(), None)
            place = begun.inside if begun else inside
            self._record("Node hook", where, first_shape(grad_inputs), place, forward)

        self._handles += [node.register_prehook(before), node.register_hook(after)]

    @eager
    def _begin(self, label: str, is_root: bool, module: nn.Module, args: tuple, kwargs: dict) -> None:
        in_backward = graph_task() != NO_BACKWARD
        if is_root and not in_backward and self._stack and self._stack[-1].label != label:
            self._stack.clear()  # the forward before was interrupted by Ctrl-C, which no hook hears of
        # A part of the model that is called by itself begins a forward, too; in backward a checkpoint goes on with one.
        if not self._stack and (is_root or not in_backward):
            self._calls.clear()
            self._places.clear()
            self._forwards += 1
        self._calls[label] += 1
        where = label if self._calls[label] == 1 else f"{label} #{self._calls[label]}"
        self._stack.append(Forward(label, where, id(sys.exception()), graph_task()))
        self._places.setdefault(label, self._inside())
        self._record("forward pre-hook", where, first_shape((args, kwargs)))

    @eager
    def _end(self, label: str, module: nn.Module, args: tuple, output: object) -> None:
        # The call is not noted where an earlier pre-hook raised, or the trace began inside it.
        began = any(forward.label == label for forward in self._stack)
        while began and self._stack[-1].label != label:
            self._stack.pop()
        this = self._stack[-1] if began else Forward(label, label, id(None), graph_task())
        raised = id(sys.exception()) != this.error  # always_call: also when the forward has failed
        self._record("forward raised" if raised else "forward hook", this.where, first_shape(output))
        if began:
            self._stack.pop()
        if not raised and not self._sees_new_nodes and not self._stack:
            roots = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
            for node in {node for root in roots for node in behind(root)}:
                self._hang_on_node(node)

    def _note(self, kind: str, where: str) -> Callable:
        return eager(lambda tensor: self._record(kind, where, first_shape(tensor)))

    def _on_step(self, kind: str) -> Callable:
        return eager(lambda optimizer, args, kwargs: self._record(kind, type(optimizer).__name__, None))

    def _packing(self) -> tuple[Callable, Callable]:
        outer_pack, outer_unpack = outer_hooks() or (hold, unhold)

        def pack(tensor: Tensor) -> Any:
            self._record("pack", self._name(tensor), first_shape(tensor))
            return outer_pack(tensor)

        def unpack(packed: Any) -> Tensor:
            tensor = outer_unpack(packed)
            if graph_task() != NO_BACKWARD:  # outside backward somebody has read a `_saved_*` attribute
                self._record("unpack", self._node().where, first_shape(tensor))
            return tensor

        return pack, unpack

    def _record(
        self, kind: str, where: str, shape: Any, inside: tuple[str, ...] | None = None, forward: int = 0
    ) -> None:
        if not self._handles:
            return
        run = self._recorded[-1][1][0] if self._recorded else NO_BACKWARD
        arrived = list(self._retained.arrived())
        if run != NO_BACKWARD:  # they arrived in backward if the latest event was there
            self._recorded += [(event, (run, 0)) for event in arrived]
        if inside is None:
            inside = self._node().inside if kind in ("post-accumulate-grad hook", "unpack") else self._inside()
        event = Event(kind, where, phase_of(kind, graph_task(), self._stack), shape, inside)
        if kind == "Node pre-hook":
            self._nodes[_here()] = event
        self._recorded.append((event, (graph_task(), forward)))

    def _name(self, tensor: Tensor) -> str:
        reference, name = self._names.get(id(tensor), (None, ""))
        return name if reference is not None and reference() is tensor else ""

    def _node(self) -> Event:
        """The event of the Node that is running."""
        return self._nodes.get(_here()) or Event("", "", "backward")

    def _inside(self) -> tuple[str, ...]:
        return tuple(forward.where for forward in self._stack)


def _here() -> tuple[int, int]:
    return threading.get_ident(), graph_task()


def trace(model: nn.Module | None = None, *unnamed: object, **tensors: Tensor) -> Trace:
    """Which hook fires when: every kind on one clock, without changing a value, a gradient or an order.

    Use it as `with trace(model) as events:`. Module, tensor and optimizer hooks are installed by the call;
    `pack`, `unpack` and the Nodes created meanwhile are seen inside the block, in its thread.

    Args:
        model: every module in it (forward pre-hook, forward hook) and every parameter (post-accumulate-grad hook)
            is traced; optimizers always are.
        **tensors: tensors to trace under the names you give them: tensor hook, retain_grad, post-accumulate-grad
            hook (leaf), the hooks of every Node that leads to them, and with two or more a multi-grad hook on all.

    Returns:
        A `Trace`: `.events`, `.lines()` as text, `.phase("backward")`. What is concluded and not seen is marked
        `inferred`: retain_grad (from `.grad`, at the next event) and a module's backward (from its Nodes).

    Raises:
        TypeError: `model` is no module, a tensor has no name or is none, or nothing was given.
        ValueError: a tensor requires no gradient. No hook is installed then.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = x * 3
        >>> with trace(y=y) as events:
        ...     y.sum().backward()
        >>> [event.where for event in events.events if event.kind == "Node hook"]
        ['SumBackward0', 'MulBackward0', 'AccumulateGrad']

    Limits: docs/limits.md#trace.
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
    for name, tensor in tensors.items():
        refuse.unhookable("trace", name, tensor)
    if model is not None:
        refuse.no_module("trace", model)
        warn_if_compiled("trace", model, stacklevel=3)
    return Trace(model, tensors)
