"""A graph too large for a screen: its Nodes by the module they belong to, one box for each, and one module unfolded."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from hooklab._support.nested import first_shape
from hooklab._support.nodes import node_name
from hooklab.draw.colours import GREY

__all__ = ["Folded", "dot_source", "fold"]

MAX_BOXES = 20  # under each other they take about the height of a screen
MAX_NODES = 60  # a graph of so few is drawn whole
NOWHERE = ("outside any module",)
Path = tuple[str, ...]


@dataclass
class Folded:
    """Which box each Node is in, from the leaves to the result: the path of a module, or the Node itself."""

    boxes: dict[Node, Any]
    opened: str | None  # the module whose Nodes are drawn

    @property
    def word(self) -> str:
        """How to see more."""
        if self.opened:
            return f"folded by module, all but {self.opened}; unfold='' shows all Nodes"
        modules = [".".join(box) for box in self.boxes.values() if box != NOWHERE]
        return f"folded by module; unfold={modules[-1]!r} shows the Nodes of that one, unfold='' all of them"

    @property
    def fact(self) -> str:
        return f"drawn: {len(set(self.boxes.values()))} boxes for {len(self.boxes):,} Nodes, {self.word}"


def fold(nodes: list[Any], names: dict[str, Tensor], unfold: str | None) -> Folded | None:
    """None where the graph is to be drawn whole: it is small, nothing names its modules, or `unfold` is `''`.

    Raises:
        ValueError: no parameter of a module with the name `unfold` leads to the result.
    """
    known = {id(tensor): name for name, tensor in names.items()}
    leaves = [known.get(id(node.variable), "") for node in nodes if hasattr(type(node), "variable")]
    modules = _modules(nodes, known)
    opened = tuple(unfold.split(".")) if unfold else ()
    inside = {node for node, path in modules.items() if opened and path[: len(opened)] == opened}
    if opened and not inside:
        raise ValueError(
            f"graph: unfold={unfold!r} is no module whose parameters `params` names; found: "
            f"{', '.join(sorted({path[0] for path in modules.values()} - set(NOWHERE))) or 'none'}"
        )
    if unfold == "" or not any("." in name for name in leaves) or (not unfold and len(nodes) <= MAX_NODES):
        return None
    depth = max(map(len, modules.values()))
    while depth > 1 and len({path[:depth] for path in modules.values()}) > MAX_BOXES:
        depth -= 1
    return Folded({node: node if node in inside else path[:depth] for node, path in modules.items()}, unfold)


def _modules(nodes: list[Any], known: dict[int, str]) -> dict[Node, Path]:
    """A Node that reads a parameter belongs to its module; another one to that of the last Node that leads to it."""
    modules: dict[Node, Path] = {}
    position = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        sources = [source for source, _ in node.next_functions if source in modules]
        if hasattr(type(node), "variable"):
            path = tuple(known.get(id(node.variable), "").split("."))
            modules[node] = path[:-1] or (path if path != ("",) else NOWHERE)
            continue
        read = [modules[source] for source in sources if hasattr(type(source), "variable")]
        before = modules[max(sources, key=position.__getitem__)] if sources else NOWHERE
        modules[node] = next((path for path in read if path != NOWHERE), before)
    return modules


def dot_source(folded: Folded, t: Tensor, names: dict[str, Tensor]) -> str:
    """In the language of Graphviz: a box a module, and inside the frame of the unfolded one a box a Node."""
    ids: dict[Any, str] = {}
    for box in folded.boxes.values():
        ids.setdefault(box, f"n{len(ids) + 1}")
    known = {id(tensor): name for name, tensor in names.items()}
    sizes = Counter(folded.boxes.values())
    modules = [_module(name, box, sizes[box]) for box, name in ids.items() if isinstance(box, tuple)]
    nodes = [_node(name, box, known) for box, name in ids.items() if not isinstance(box, tuple)]
    frame = f'label="{_text(folded.opened or "")}" labeljust=l style=dashed color="{GREY}"'
    result = f"{known.get(id(t), 'result')} {_shape(t)}"
    arrows = dict.fromkeys(
        (ids[folded.boxes[source]], ids[box])
        for node, box in folded.boxes.items()
        for source, _ in node.next_functions
        if source is not None and folded.boxes[source] != box
    )
    statements = [
        f'bgcolor=transparent ranksep=0.22 nodesep=0.2 fontname=monospace fontsize=10 fontcolor="{GREY}"',
        f'label="{_text(folded.word)}"',
        f'node [shape=box style=filled color="{GREY}" fillcolor=lightgrey fontname=monospace fontsize=10 height=0.2]',
        f'edge [color="{GREY}"]',
        *modules,
        *([f"subgraph cluster_unfolded {{ {frame}", *nodes, "}"] if nodes else []),
        f'result [label="{_text(result)}" fillcolor=darkolivegreen1]',
        *(f"{one} -> {other}" for one, other in arrows),
        f"{ids[list(folded.boxes.values())[-1]]} -> result",
    ]
    return "digraph {\n" + "\n".join(statements) + "\n}"


def _module(name: str, path: Path, size: int) -> str:
    return f'{name} [label="{_text(".".join(path))}: {size:,} Node{"s" if size > 1 else ""}"]'


def _node(name: str, node: Any, known: dict[int, str]) -> str:
    if not hasattr(type(node), "variable"):
        return f'{name} [label="{_text(node_name(node))}"]'
    label = f"{known.get(id(node.variable), 'leaf')} {_shape(node.variable)}"
    return f'{name} [label="{_text(label)}" fillcolor=lightblue]'


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, first_shape(tensor) or ()))})"


def _text(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')
