"""Pictures of what the other modules return. Each picture also states its facts as text."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from unittest.mock import patch

from torch import Tensor
from torch.autograd.graph import Node

from hooklab import _timeline
from hooklab._graphviz import NotDrawn, svg_from_dot
from hooklab.trace import Trace

__all__ = ["Picture", "graph", "timeline"]

MAX_NODES = 5_000  # above, a page-wide picture shows nothing and the layout takes minutes


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture as the last line of a notebook cell; without one, its facts and the reason.

    Attributes:
        facts: what the picture shows, as text that is the same in every run.
        svg: the picture, or None when it could not be drawn.
        reason: why it could not be drawn, and what to do; empty when it was.
    """

    facts: str
    svg: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.facts}\n({self.reason})" if self.reason else self.facts

    __repr__ = __str__

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self)} | ({"image/svg+xml": self.svg} if self.svg else {})


def graph(
    t: Tensor,
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    saved: bool = False,
) -> Picture:
    """The autograd graph that leads to `t`: leaves in blue, Nodes in grey, `t` itself in green.

    Drawn with graphviz's `dot` where it is installed, else with the libraries inside the pygraphviz
    wheel. Where neither works, or above 5,000 Nodes, the facts are shown with the reason.

    Args:
        t: the result of a computation, any shape; not a leaf.
        params: names for leaves, for example `{"w": w}` or `model.named_parameters()`.
        saved: also show the tensors that each Node has saved for backward, in orange. Gone once
            `backward()` has run; the rest of the graph can still be drawn then.

    Returns:
        A `Picture`. `.facts` has one line per arrow, `x (3) -> AccumulateGrad`, leaves first; a
        second Node of the same name is `#2`; shapes stand in parentheses.

    Raises:
        TypeError: `t` is not a tensor, or `params` does not name tensors.
        ValueError: `t` is a leaf or needs no gradient, so there is no graph behind it; or `params` names
            a tensor that was computed, which is an arrow in the picture and not a box.

    Example:
        >>> import torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> print(graph((x * 2).sum(), {"x": x}).facts)
        x (3) -> AccumulateGrad
        AccumulateGrad -> MulBackward0
        MulBackward0 -> SumBackward0
        SumBackward0 -> result ()

    Source: the picture is [torchviz](https://github.com/szagoruyko/pytorchviz)'s `make_dot`, with
    stable ids and labels.
    """
    names = _checked(t, params)
    nodes = list(_leaves_first(t.grad_fn))
    facts = "\n".join(_edges(t, nodes, {id(tensor): name for name, tensor in names.items()}, saved))
    try:
        if len(nodes) > MAX_NODES:
            raise NotDrawn(
                f"{len(nodes):,} Nodes, more than the {MAX_NODES:,} that a picture can show; draw a smaller part"
            )
        return Picture(facts, svg=svg_from_dot(_dot_source(t, names, saved, len(nodes))))
    except NotDrawn as error:
        return Picture(facts, reason=f"not drawn: {error}")


def timeline(trace: Trace) -> Picture:
    """What fired when, at a glance: time goes to the right, modules are nested rows.

    A bar shows that a module's forward or backward is running; the marks on it are hooks, hollow before and
    filled after. The background is the phase. With many modules the deeper ones share a row.

    Args:
        trace: what `hooklab.trace` returned, during or after its block.

    Returns:
        A `Picture`. `.facts` are the lines of the trace, or counts per phase and kind above 120 events.

    Raises:
        TypeError: `trace` is not a trace.
        ValueError: it has recorded no event yet.

    Example:
        >>> import torch, hooklab
        >>> x = torch.ones(2, requires_grad=True)
        >>> with hooklab.trace(x=x) as traced:
        ...     x.sum().backward()
        >>> "tensor hook" in timeline(traced).facts
        True
    """
    if not isinstance(trace, Trace):
        raise TypeError(f"timeline: expected what hooklab.trace returns, found {type(trace).__name__}")
    events = trace.events
    if not events:
        raise ValueError(
            "timeline: nothing has fired yet; run a forward or a backward inside the block of the trace"
        )
    facts = _timeline.facts(events, trace.lines())
    try:
        return Picture(facts, svg=_timeline.svg(events))
    except ImportError as error:
        return Picture(facts, reason=f"not drawn: {error}; run `uv sync` or `pip install matplotlib`")


def _checked(t: Tensor, params: Mapping | Iterable | None) -> dict[str, Tensor]:
    if isinstance(t, list | tuple):
        raise TypeError(
            f"graph: expected one tensor, found a {type(t).__name__} of {len(t)}; draw one of them, or their sum"
        )
    if not isinstance(t, Tensor):
        raise TypeError(
            f"graph: expected a tensor, found {type(t).__name__}; draw what the computation returns"
        )
    if t.grad_fn is None:
        found = (
            "a leaf: it was made, not computed" if t.requires_grad else "a tensor with requires_grad=False"
        )
        raise ValueError(
            f"graph: found {found}, so grad_fn is None and no graph leads to it; draw a result such as the "
            "loss, computed from tensors with requires_grad=True and outside torch.no_grad()"
        )
    try:
        names = {} if params is None else dict(params)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f'graph: params should name tensors, as {{"w": w}} or model.named_parameters(); found {type(params).__name__}'
        ) from None
    for name, tensor in names.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"graph: params[{name!r}] should be a tensor, found {type(tensor).__name__}")
        if tensor.grad_fn is not None and tensor is not t:
            raise ValueError(
                f"graph: params[{name!r}] was computed, so it has no box of its own: it is the arrow that leaves "
                f"{tensor.grad_fn.name()}; only leaves and the result can be named"
            )
    return names


def _leaves_first(root: Node) -> Iterator[Node]:
    """Every Node that leads to `root`, once, each after the Nodes it gets its inputs from."""
    seen, stack = {root}, [(root, iter(root.next_functions))]
    while stack:  # no recursion: a graph may be deeper than Python's stack
        node, inputs = stack[-1]
        for source, _ in inputs:
            if source is not None and source not in seen:
                seen.add(source)
                stack.append((source, iter(source.next_functions)))
                break
        else:
            stack.pop()
            yield node


def _edges(t: Tensor, nodes: list[Node], names: dict[int, str], saved: bool) -> Iterator[str]:
    label, used = {}, Counter()
    for node in nodes:
        kind = type(node).__name__
        used[kind] += 1
        label[node] = kind if used[kind] == 1 else f"{kind} #{used[kind]}"
        if (leaf := getattr(node, "variable", None)) is not None:
            yield f"{names.get(id(leaf), 'leaf')} {_shape(leaf)} -> {label[node]}"
        for source, _ in node.next_functions:
            if source is not None:
                yield f"{label[source]} -> {label[node]}"
        if saved:
            yield from (f"{label[node]} saved {what}" for what in _saved_by(node))
    yield f"{label[nodes[-1]]} -> {names.get(id(t), 'result')} {_shape(t)}"


def _saved_by(node: Node) -> Iterator[str]:
    fields = [name for name in dir(node) if name.startswith("_saved_")]
    if hasattr(type(node), "saved_tensors"):  # a torch.autograd.Function written in Python
        fields.append("saved_tensors")
    for field in fields:
        try:
            value = getattr(node, field)
        except RuntimeError:
            yield f"{field.removeprefix('_saved_')}: freed, backward() has run"
            continue
        several = isinstance(value, tuple)
        for index, tensor in enumerate(value if several else [value]):
            if isinstance(tensor, Tensor):
                yield f"{field.removeprefix('_saved_')}{f'[{index}]' if several else ''} {_shape(tensor)}"


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


def _dot_source(t: Tensor, names: dict[str, Tensor], saved: bool, node_count: int) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # distutils' deprecation: torchviz's affair
            import torchviz
    except ImportError as error:
        raise NotDrawn(f"torchviz: {error}; run `uv sync` or `pip install torchviz setuptools`") from None

    # After backward() a Node raises when asked for what it saved; torchviz should find nothing there instead.
    def read(node: Node, name: str) -> object:
        try:
            return getattr(node, name)
        except RuntimeError:
            return None

    def has(node: Node, name: str) -> bool:
        return hasattr(type(node), name) and (
            name != "saved_tensors" or (saved and read(node, name) is not None)
        )

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 1_000 + 4 * node_count))  # make_dot calls itself once per Node
    try:
        with warnings.catch_warnings(), patch.multiple(torchviz.dot, create=True, getattr=read, hasattr=has):
            warnings.simplefilter("ignore")
            dot = torchviz.make_dot(t, params=names, show_saved=saved)
    finally:
        sys.setrecursionlimit(limit)
    ids: dict[str, str] = {}
    dot.body[:] = [_readable(statement, ids) for statement in dot.body]
    return dot.source


def _readable(statement: str, ids: dict[str, str]) -> str:
    """A DOT statement of torchviz with small stable ids, and labels on one line."""

    def small(match: re.Match) -> str:
        return ids.setdefault(match[0], f"n{len(ids) + 1}")

    head, bracket, attributes = statement.partition(" [")
    kind = "result" if "darkolivegreen" in attributes else "leaf"
    attributes = re.sub(
        r'label="\n ?', f'label="{kind} ', attributes
    )  # pygraphviz crashes on an empty first line
    return re.sub(r"\d+", small, head) + bracket + re.sub(r"\n ?(?=\()", " ", attributes)
