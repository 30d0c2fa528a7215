"""What a trace is made of: events, how they are written, and what is concluded from them."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hooklab._support.torch_private import NO_BACKWARD

__all__ = ["PHASES", "Event", "Forward", "Retained", "line", "phase_of", "with_module_backward"]

PHASES = ("forward", "backward", "recompute", "step")


@dataclass(frozen=True, slots=True)
class Event:
    """One hook firing.

    Attributes:
        kind: PyTorch's word: `"forward hook"`, `"tensor hook"`, `"Node pre-hook"`, `"pack"`, …
        where: the module, tensor, Node or optimizer; `#2` marks a module's second call in one forward.
        phase: `"forward"`, `"backward"`, `"recompute"` (a forward inside backward) or `"step"`.
        shape: of the tensor concerned (the first, where there are several), or None.
        inside: the modules whose forward was running, outermost first; for a Node, when it was created.
        inferred: not seen directly but concluded from the events around it.
    """

    kind: str
    where: str
    phase: str
    shape: tuple[int, ...] | None = None
    inside: tuple[str, ...] = ()
    inferred: bool = False


class Forward(NamedTuple):
    """A forward of a module that has begun."""

    label: str  # the name of the module, for the model itself that of its class
    where: str  # the same with `#2` for a second call
    error: int  # the id of the exception that was being handled when it began
    task: int  # the number of the backward pass that it runs in


def phase_of(kind: str, task: int, stack: list[Forward]) -> str:
    """The phase of an event in the backward pass `task`, while the forwards of `stack` run."""
    if kind.startswith("optimizer"):
        return "step"
    if kind.startswith("forward"):
        return "forward" if task == NO_BACKWARD else "recompute"
    if kind == "pack" and task == NO_BACKWARD:
        return "forward"
    # With create_graph=True backward itself saves tensors, also where a forward asks for gradients.
    return "recompute" if kind == "pack" and stack and stack[-1].task == task else "backward"


def line(number: int, event: Event) -> str:
    """One event as text: number, phase, kind, place (indented by module), shape."""
    depth = len(event.inside) - (event.where in event.inside)
    shape = "" if event.shape is None else f" {event.shape}"
    mark = " (inferred)" if event.inferred else ""
    return f"{number:4} {event.phase:9} {event.kind:25} {'  ' * depth}{event.where}{shape}{mark}".rstrip()


class Retained:
    """Tensors that may retain their gradient. No hook tells when it arrives; a new `.grad` does."""

    def __init__(self, tensors: dict[str, Tensor]):
        # Weak, so that a tensor may be freed meanwhile; each with the `.grad` that was seen last.
        self._watched = [(name, weakref.ref(tensor), [_grad(tensor)]) for name, tensor in tensors.items()]

    def arrived(self) -> Iterator[Event]:
        """An event for each gradient that has arrived since this was asked last."""
        for name, reference, last in self._watched:
            tensor = reference()
            if tensor is not None and tensor.retains_grad:
                before, last[0] = last[0], _grad(tensor)
                if last[0] is not None and (before is None or before() is not last[0]()):
                    yield Event("retain_grad", name, "backward", tuple(tensor.shape), inferred=True)


def _grad(tensor: Tensor) -> weakref.ref[Tensor] | None:
    """The present `.grad`. retain_grad replaces it and edits nothing in place, so a new object is a new gradient."""
    grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    return None if grad is None else weakref.ref(grad)  # an id may be used again


def with_module_backward(recorded: list[tuple[Event, tuple[int, int]]]) -> list[Event]:
    """The events, with the begin and the end of each module's backward put in: around the Nodes of its forward.

    `recorded` holds each event with its run: the number of the backward pass, and of the forward that made the Node.
    """
    spans: dict[tuple[str, tuple[int, int]], list[int]] = {}  # (module, run) -> first and last position
    latest: dict[tuple[str, int], tuple[int, int]] = {}  # (module, backward pass) -> its last run
    for position, (event, made) in enumerate(recorded):
        if event.kind in ("Node pre-hook", "Node hook"):
            # Forwards share a leaf's Node, while an earlier graph is alive.
            leaf = event.where.startswith("AccumulateGrad")
            for module in event.inside:
                run = latest.get((module, made[0]), made) if leaf else made
                latest[module, made[0]] = run
                spans.setdefault((module, run), [position, position])[1] = position
    begins = {(begin, module) for (module, _), (begin, _) in spans.items()}
    ends = {(end, module) for (module, _), (_, end) in spans.items()}
    events: list[Event] = []
    for position, (event, _) in enumerate(recorded):
        events += [_edge("begins", module, event) for module in event.inside if (position, module) in begins]
        events.append(event)
        events += [_edge("ends", module, event) for module in reversed(event.inside) if (position, module) in ends]
    return events


def _edge(what: str, module: str, event: Event) -> Event:
    inside = event.inside[: event.inside.index(module) + 1]
    return Event(f"module backward {what}", module, "backward", inside=inside, inferred=True)
