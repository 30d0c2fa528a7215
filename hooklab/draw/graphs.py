"""The autograd graph that leads to a tensor: as lines of text, and for Graphviz by torchviz."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.autograd.graph import Node

from hooklab._support.nested import first_shape, tensors_in
from hooklab._support.nodes import node_name
from hooklab.draw.colours import GREY
from hooklab.draw.graphviz import NotDrawn
from hooklab.draw.svg import LOCK

__all__ = ["checked", "dot_source", "edges", "leaves_first", "sentence"]

MAX_NAMES = 4  # in one sentence


def checked(t: Tensor, params: Mapping | Iterable | None) -> dict[str, Tensor]:
    """The names of `params`; TypeError or ValueError where `t` has no graph, or `params` does not name tensors in it."""
    _refuse_without_graph(t)
    wanted = 'graph: params should name tensors, as {"w": w} or model.named_parameters(); found'
    try:
        names = {} if params is None else dict(params)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{wanted} {type(params).__name__}") from None
    for name, tensor in names.items():
        if not isinstance(name, str):
            raise TypeError(f"{wanted} a name of type {type(name).__name__}")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"graph: params[{name!r}] should be a tensor, found {type(tensor).__name__}")
        if tensor.grad_fn is not None and tensor is not t:
            raise ValueError(
                f"graph: params[{name!r}] was computed, so it has no box of its own: it is the arrow that leaves "
                f"{node_name(tensor.grad_fn)}; only leaves and the result can be named"
            )
    return names


def _refuse_without_graph(t: object) -> None:
    if isinstance(t, list | tuple):
        found = f"a {type(t).__name__} of {len(t)}"
        raise TypeError(f"graph: expected one tensor, found {found}; draw one of them, or their sum")
    if not isinstance(t, Tensor):
        cure = "draw what the computation returns"
        if next(tensors_in(t), None) is not None:
            cure = "draw one of the tensors in it, the loss perhaps"
        raise TypeError(f"graph: expected a tensor, found {type(t).__name__}; {cure}")
    if t.grad_fn is None:
        leaf, other = "a leaf: it was made, not computed", "a tensor with requires_grad=False"
        raise ValueError(
            f"graph: found {leaf if t.requires_grad else other}, so grad_fn is None and no graph leads to it; draw a "
            "result such as the loss, computed from tensors with requires_grad=True and outside torch.no_grad()"
        )


def leaves_first(root: Any) -> Iterator[Node]:
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


def edges(t: Tensor, nodes: list[Any], names: dict[int, str], saved: bool) -> Iterator[str]:
    """A line of text for every edge from the leaves to `t`; with `saved` also for every tensor that a Node has saved."""
    label: dict[Node, str] = {}
    used = Counter[str]()
    for node in nodes:
        kind = node_name(node)
        used[kind] += 1
        label[node] = kind if used[kind] == 1 else f"{kind} #{used[kind]}"
        if hasattr(type(node), "variable"):  # AccumulateGrad
            yield f"{names.get(id(node.variable), 'leaf')} {_shape(node.variable)} -> {label[node]}"
        for source, _ in node.next_functions:
            if source is not None:
                yield f"{label[source]} -> {label[node]}"
        if saved:
            yield from (f"{label[node]} saved {what}" for what in _saved_by(node))
    yield f"{label[nodes[-1]]} -> {names.get(id(t), 'result')} {_shape(t)}"


def sentence(t: Tensor, nodes: list[Any], names: dict[str, Tensor]) -> str:
    """From where to where the graph leads: by their names where there are few."""
    known = {id(tensor): name for name, tensor in names.items()}
    leaves = [known.get(id(node.variable), "a leaf") for node in nodes if hasattr(type(node), "variable")]
    start = ", ".join(leaves) if len(leaves) <= MAX_NAMES else f"{len(leaves):,} leaves"
    return f"The autograd graph from {start} to {known.get(id(t), 'the result')}: {len(nodes):,} Nodes."


def _saved_by(node: Any) -> Iterator[str]:
    fields = [name for name in dir(node) if name.startswith("_saved_")]
    if hasattr(type(node), "saved_tensors"):  # a torch.autograd.Function written in Python
        fields.append("saved_tensors")
    for field in fields:
        try:
            value = getattr(node, field)
        except Exception as error:  # a hook of the user's unpacks it
            state = f"cannot be read ({(str(error).splitlines() or [type(error).__name__])[0]})"
            if "modified by an inplace operation" in str(error):
                state = "edited in place since, backward() will raise"
            elif "a second time" in str(error):
                state = "freed, backward() has run"
            yield f"{field.removeprefix('_saved_')}: {state}"
            continue
        several = isinstance(value, tuple)
        for index, tensor in enumerate(value if several else [value]):
            if isinstance(tensor, Tensor):
                yield f"{field.removeprefix('_saved_')}{f'[{index}]' if several else ''} {_shape(tensor)}"


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, first_shape(tensor) or ()))})"


def dot_source(t: Tensor, names: dict[str, Tensor], saved: bool, nodes: list[Any]) -> str:
    """The graph in the language of Graphviz, by torchviz; nothing in it differs from run to run."""
    # In DOT a backslash begins an escape.
    names = {name.replace("\\", "\\\\"): tensor for name, tensor in names.items()}
    dot = _by_torchviz(t, names, saved, len(nodes))
    if saved:
        functions = [node for node in nodes if hasattr(type(node), "saved_tensors")]
        leaves = {id(node.variable) for node in nodes if hasattr(type(node), "variable")}
        _add_saved(dot, {node: _read(node, "saved_tensors") for node in functions}, names, leaves)
    ids: dict[str, str] = {}
    dot.graph_attr["bgcolor"] = "transparent"
    dot.node_attr.update(color=GREY, fillcolor="lightgrey")  # what is written in a box is black
    dot.edge_attr["color"] = GREY
    dot.body[:] = [_readable(statement, ids) for statement in _without_base(dot.body, names)]
    return dot.source


def _by_torchviz(t: Tensor, names: dict[str, Tensor], saved: bool, depth: int) -> Any:
    """What `make_dot` returns; it looks at Nodes through `_read` and `_has`, and calls itself once per Node."""
    with LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchviz says that distutils is deprecated
        try:
            import torchviz
        except ImportError as error:
            raise NotDrawn(f"torchviz: {error}; run `uv sync` or `pip install torchviz setuptools`") from None
        own = {"getattr": _read, "hasattr": _has, "get_fn_name": lambda node, *_: node_name(node)}
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 1_000 + 4 * depth))
        try:
            with patch.dict(vars(torchviz.dot), own):
                return torchviz.make_dot(t, params=names, show_saved=saved)
        except Exception as error:
            raise NotDrawn(f"torchviz cannot draw this graph: {type(error).__name__}: {error}") from None
        finally:
            sys.setrecursionlimit(limit)


def _read(node: Any, name: str) -> Any:
    """After `backward()` a Node raises when asked for what it saved: then there is nothing to draw."""
    try:
        return getattr(node, name)
    except Exception:
        return None


def _has(node: Any, name: str) -> bool:
    return hasattr(type(node), name) and name != "saved_tensors"  # `_add_saved` draws those


def _without_base(body: list[str], names: dict[str, Tensor]) -> list[str]:
    """torchviz draws what a view is taken from as a second result; the Node of the view says enough."""
    named = {str(id(tensor)) for tensor in names.values()}
    bases = {one.split()[0] for one in body if "fillcolor=darkolivegreen3" in one} - named
    return [one for one in body if "style=dotted" not in one and bases.isdisjoint(one.partition(" [")[0].split())]


def _add_saved(dot: Any, saved: dict[Node, Any], names: dict[str, Tensor], drawn: set[int]) -> None:
    """A box for every tensor that a Function has saved, but for leaves. torchviz fails where one of them is None."""
    for node, tensors in saved.items():
        for index, tensor in enumerate(tensors or ()):
            if tensor is None:
                continue
            dot.edge(str(id(tensor)), str(id(node)), dir="none")
            if id(tensor) not in drawn:
                own = f"saved_tensors[{index}]"
                name = next((name for name, one in names.items() if one is tensor), own)
                dot.node(str(id(tensor)), f"{name}\n {_shape(tensor)}", fillcolor="orange")


def _readable(statement: str, ids: dict[str, str]) -> str:
    """A DOT statement of torchviz with small stable ids, and labels on one line."""

    def small(match: re.Match) -> str:
        return ids.setdefault(match[0], f"n{len(ids) + 1}")

    head, bracket, attributes = statement.partition(" [")
    kind = "result" if "darkolivegreen" in attributes else "leaf"
    # pygraphviz crashes on a label whose first line is empty.
    attributes = re.sub(r'label="\n ?', f'label="{kind} ', attributes)
    return re.sub(r"\d+", small, head) + bracket + re.sub(r"\n ?(?=\()", " ", attributes)
