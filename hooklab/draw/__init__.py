"""Pictures of what the other modules return. Each picture also states its facts as text."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any

from torch import Tensor

from hooklab.draw import flow, folded, held, plots, timelines
from hooklab.draw.graphs import checked, dot_source, edges, leaves_first, sentence
from hooklab.draw.graphviz import NotDrawn, drawn_from_dot
from hooklab.draw.picture import Picture
from hooklab.layers.streaming import Statistics
from hooklab.models.updates import Updates
from hooklab.saved.record import SavedTensors
from hooklab.tracing import Trace

__all__ = ["Picture", "activations", "feature_maps", "gradient_flow", "graph", "memory", "timeline"]

MAX_EVENTS = 20_000  # above, marks cannot be told apart and the picture takes megabytes
MAX_NODES = 5_000  # above, a page-wide picture shows nothing and the layout takes minutes


def graph(
    t: Tensor,
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    saved: bool = False,
    unfold: str | None = None,
) -> Picture:
    """The autograd graph that leads to `t`: leaves in blue, Nodes in grey, `t` itself in green.

    Above 60 Nodes it is folded: a box a module, named by `params`, as deep as fits a screen. Without Graphviz's `dot`
    and the pygraphviz wheel, or above 5,000 boxes, there are the facts and the reason.

    Args:
        t: the result of a computation, any shape; not a leaf.
        params: names for leaves and for `t` itself, for example `{"w": w}` or `model.named_parameters()` (not
            `state_dict()`, whose tensors are others).
        saved: also show the tensors that each Node has saved for backward: computed ones in orange, leaves in
            blue on a line without an arrow, until `backward()` frees them. A folded picture has none.
        unfold: the module whose Nodes are drawn, for example `"layer4.0"`; `""` for all Nodes.

    Returns:
        A `Picture`. `.facts` has one line per arrow, leaves first; a second Node of the same name is `#2`.

    Raises:
        TypeError: `t` is not a tensor, or `params` does not name tensors.
        ValueError: no graph leads to `t`, `params` names a tensor that was computed, or `unfold` names no module.

    Example:
        >>> import torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> print(graph((x * 2).sum(), {"x": x}).facts)
        x (3) -> AccumulateGrad
        AccumulateGrad -> MulBackward0
        MulBackward0 -> SumBackward0
        SumBackward0 -> result ()

    Limits: docs/limits.md#draw (a checkpoint recomputes what `saved=True` reads).
    Source: [torchviz](https://github.com/szagoruyko/pytorchviz)'s `make_dot`, with stable ids and labels.
    """
    names = checked(t, params)
    nodes = list(leaves_first(t.grad_fn))
    facts = "\n".join(edges(t, nodes, {id(tensor): name for name, tensor in names.items()}, saved))
    alt = sentence(t, nodes, names)
    parts = folded.fold(nodes, names, unfold)
    if parts is not None:
        facts += f"\n{parts.fact}"
        alt = f"{alt.removesuffix('.')}, in {len(set(parts.boxes.values()))} boxes."
    try:
        if len(nodes if parts is None else set(parts.boxes.values())) > MAX_NODES:
            raise NotDrawn(
                f"{len(nodes):,} Nodes, more than the {MAX_NODES:,} that a picture can show; draw a smaller part"
            )
        source = folded.dot_source(parts, t, names) if parts else dot_source(t, names, saved, nodes)
        draw = partial(drawn_from_dot, source)
        return Picture(facts, svg=draw("svg").decode("utf-8", "replace"), alt=alt, _draw=draw)
    except NotDrawn as error:
        return Picture(facts, reason=f"not drawn: {error}")


def timeline(trace: Trace) -> Picture:
    """What fired when, at a glance: time goes to the right, modules are nested rows.

    A bar shows that a module's forward or backward is running; the marks on it are hooks, hollow before and
    filled after. The background is the phase. With many modules the deeper ones share a row;
    above 20,000 events there are the facts, and the reason why nothing is drawn.

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
        raise ValueError("timeline: nothing has fired yet; run a forward or a backward inside the block of the trace")
    facts = timelines.facts(events, trace.lines())
    alt = timelines.sentence(events)
    return _drawn_events(facts, alt, timelines.drawn, events, len(events), "trace a part")


def gradient_flow(stats: Mapping[str, Statistics] | Updates) -> Picture:
    """How large the gradient is in each layer, from top to bottom in the order of `stats`: does it vanish or explode?

    The dot is the root mean square of all entries, the mark the largest absolute entry, on a logarithmic scale. A layer
    that no gradient has reached has a row without either. A module with layers inside has a hollow square beside their
    line. Above some 200 layers not every row has its name beside it; a browser that shows the saved SVG tells it on hover.

    Args:
        stats: what `hooklab.layer_statistics(model, ..., of="grad_output")` returned, or `hooklab.updates(...)`: then
            there is a row for each parameter.

    Returns:
        A `Picture`. `.facts` has a line per layer: name, root mean square, largest absolute entry.

    Raises:
        TypeError: `stats` are no statistics.
        ValueError: they are of outputs, or no gradient has been counted yet.

    Example:
        >>> import torch, hooklab
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with hooklab.layer_statistics(model, "*", of="grad_output") as stats:
        ...     model(torch.ones(3, 2)).sum().backward()
        >>> print(gradient_flow(stats).facts.splitlines()[2])
        1      1.0e+00  1.0e+00
    """
    kind = "parameter" if isinstance(stats, Updates) else "layer"
    stats = stats.gradients if isinstance(stats, Updates) else stats
    counted = _counted("gradient_flow", stats)
    if getattr(stats, "of", "grad_output") != "grad_output":
        raise ValueError(
            "gradient_flow: found statistics of outputs; collect them with layer_statistics(model, ..., of='grad_output')"
        )
    # Also those that no gradient has reached.
    counted = {name or repr(name): layer for name, layer in getattr(stats, "asked", counted).items()}
    alt = f"How large the gradient is in {len(counted)} {kind}s, from {next(iter(counted))!r} to {next(reversed(counted))!r}."
    return _drawn(flow.gradient_flow_facts(counted, kind), alt, partial(flow.gradient_flow, kind), counted)


def activations(stats: Mapping[str, Statistics]) -> Picture:
    """How the values in each layer are spread, call by call: a heat map per layer, with more colour where there are more.

    Each has an axis of its own, over the bins that have entries; the share that falls outside the range is written in.

    Args:
        stats: what `hooklab.layer_statistics(model, ..., bins=40)` returned.

    Returns:
        A `Picture` of the first 60 layers. `.facts` has a line per layer: name, calls, mean, std, and the shares of
        entries that are exactly zero, below and above the range.

    Raises:
        TypeError: `stats` are no statistics.
        ValueError: they have no histogram, or nothing has been counted yet.

    Example:
        >>> import torch, hooklab
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with hooklab.layer_statistics(model, "1", bins=10, range=(0, 5)) as stats:
        ...     _ = model(torch.zeros(3, 2))
        >>> print(activations(stats).facts.splitlines()[0])
        layer  calls      mean       std   zeros   below   above
    """
    counted = _counted("activations", stats)
    if any(layer.histogram is None for layer in counted.values()):
        raise ValueError(
            "activations: these statistics have no histogram; collect them with layer_statistics(model, ..., bins=40)"
        )
    alt = f"How the values in {len(counted)} layers are spread, call by call: a heat map for each."
    return _drawn(plots.activations_facts(counted), alt, plots.activations, counted)


def feature_maps(tensor: Tensor) -> Picture:
    """The channels of one image, each from dark at its own minimum to bright at its own maximum.

    Args:
        tensor: (height, width), (channels, height, width) or (images, channels, height, width); of several images
            the first is shown, of more than 64 channels the first 64, of complex numbers their absolute values. Maps
            too large for the page are averaged over squares, so that no pixel is left out.

    Returns:
        A `Picture`. `.facts` say what is shown, how many maps are the same everywhere, and the range of values.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: it has no height and width, or no entries; or it is nested, quantized, or on the meta device.

    Example:
        >>> import torch
        >>> print(feature_maps(torch.arange(24.0).reshape(1, 6, 2, 2)).facts)
        6 of 6 maps, 2 x 2; values from 0.0000 to 23.0000; the same everywhere: 0
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"feature_maps: expected one tensor, found {type(tensor).__name__}")
    kinds = {
        "on the meta device": tensor.is_meta,
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
    }
    if kind := next((kind for kind, found in kinds.items() if found), ""):
        raise ValueError(f"feature_maps: found a tensor without maps to show, it is {kind}; give an ordinary one")
    if not 2 <= tensor.dim() <= 4 or tensor.numel() == 0:
        raise ValueError(
            f"feature_maps: expected (channels, height, width) or a batch of it, found shape {tuple(tensor.shape)}; "
            "choose a layer whose output is an image"
        )
    maps = plots.shown_maps(tensor)
    facts = plots.feature_maps_facts(maps, tensor.shape[-3] if tensor.dim() > 2 else 1)
    shown = f"{len(maps)} of {maps.shape[1]} x {maps.shape[2]}"
    alt = f"A mosaic of feature maps ({shown}), each from dark at its minimum to bright at its maximum."
    return _drawn(facts, alt, plots.feature_maps, maps)


def memory(saved: SavedTensors) -> Picture:
    """What autograd holds for backward: it grows while the forward saves tensors, and shrinks while backward frees them.

    Each tensor that is saved or freed is one step to the right, and so is each that a checkpoint recomputes. Each
    memory is counted once, parameters and buffers are not. The bands are the parts of the model, by their full names.

    Args:
        saved: what `hooklab.saved_tensors` returned, best after backward.

    Returns:
        A `Picture`. `.facts`: how many were saved and freed, and the bytes held at the most and at the end. Above 20,000
        events there are the facts, and the reason why nothing is drawn.

    Raises:
        TypeError: `saved` is something else.
        ValueError: nothing was saved yet.

    Example:
        >>> import torch, hooklab
        >>> x = torch.ones(3, requires_grad=True)
        >>> with hooklab.saved_tensors() as saved:
        ...     y = x.exp().sum()
        >>> y.backward()
        >>> print(memory(saved).facts)
        saved: 1, freed: 1
        held at most: 12 bytes
        held at the end: 0 bytes
    """
    if not isinstance(saved, SavedTensors):
        raise TypeError(f"memory: expected what hooklab.saved_tensors returns, found {type(saved).__name__}")
    if not saved.held:
        raise ValueError("memory: nothing has been saved yet; run a forward inside the block of saved_tensors")
    events = Counter(event for _, event in saved.events)
    kinds = ("saved", "recomputed", "freed") if events["recomputed"] else ("saved", "freed")
    facts = (
        f"{', '.join(f'{kind}: {events[kind]:,}' for kind in kinds)}\n"
        f"held at most: {max(saved.held):,} bytes\nheld at the end: {saved.held[-1]:,} bytes"
    )
    if saved.misses_recomputation:
        facts += "\nnot counted: what a checkpoint recomputes outside the model's layers"
    alt = f"What autograd holds for backward, over {len(saved.held):,} events: at most {max(saved.held):,} bytes."
    return _drawn_events(facts, alt, held.memory, copy(saved), len(saved.held), "record fewer steps")


def _drawn_events(
    facts: str, alt: str, draw: Callable[[Any, str], bytes], what: Any, count: int, advice: str
) -> Picture:
    if count > MAX_EVENTS:
        why = f"{count:,} events, more than the {MAX_EVENTS:,} that a picture can show"
        return Picture(facts, reason=f"not drawn: {why}; {advice}")
    return _drawn(facts, alt, draw, what)


def _drawn(facts: str, alt: str, draw: Callable[[Any, str], bytes], what: Any) -> Picture:
    try:
        return Picture(facts, svg=draw(what, "svg").decode(), alt=alt, _draw=partial(draw, what))
    except ImportError as error:
        return Picture(facts, reason=f"not drawn: {error}; run `uv sync` or `pip install matplotlib`")


def _counted(function: str, stats: object) -> dict[str, Statistics]:
    if not isinstance(stats, Mapping) or not all(isinstance(layer, Statistics) for layer in stats.values()):
        raise TypeError(f"{function}: expected what hooklab.layer_statistics returns, found {type(stats).__name__}")
    counted = {name or repr(name): layer for name, layer in stats.items()}  # '' is the model itself
    if not any(layer.count for layer in counted.values()):
        raise ValueError(f"{function}: nothing has been counted yet; run the model inside the block of the statistics")
    return counted
