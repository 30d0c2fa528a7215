"""A table of a model from one run: output, parameters, operations and saved bytes of every layer."""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd import graph

from hooklab._support import refuse
from hooklab._support.nested import tensors_in
from hooklab._support.torch_private import uncompiled
from hooklab.layers.select import chosen, down_to, groups
from hooklab.layers.verbose import label
from hooklab.models.one_run import BACKWARD, FORWARD, OneRun
from hooklab.models.summary_table import LayerSummary, Summary

__all__ = ["summary"]


def _row(run: OneRun, module: nn.Module, names: list[str], first: str, backward: bool, grad: bool) -> LayerSummary:
    """What is known of one layer; `first` is its name in `run`."""
    sizes = [(param.numel(), param.requires_grad) for param in module.parameters()]
    total, called = sum(size for size, _ in sizes), run.calls[first] > 0
    share = sum(size for size, trainable in sizes if trainable) / total if total else None
    counted = called and run.counts
    # Before PyTorch 2.14 nothing tells which layer a Node of the backward pass belongs to.
    known = counted, counted and backward and (not first or hasattr(graph, "node_creation_hook"))
    numbers: list[int | None] = []
    for direction, is_known in zip((FORWARD, BACKWARD), known, strict=True):
        work = run.work[direction][first]
        numbers.append(work.operations if is_known and (work.formulas or not work.uncounted) else None)
    uncounted = [run.work[direction][first].uncounted for direction in (FORWARD, BACKWARD)]
    return LayerSummary(
        name=label(module, names),
        type=type(module).__name__,
        calls=run.calls[first],
        output=run.outputs.get(first, "-"),
        parameters=total,
        trainable=share,
        operations=numbers[0],
        backward=numbers[1],
        uncounted=tuple(dict.fromkeys([*uncounted[0], *uncounted[1]])),
        saved=run.saved[first] if grad and called else None,
        marked=(bool(uncounted[0]), bool(uncounted[1])),
    )


def _refuse(model: nn.Module, args: tuple, kwargs: dict, backward: bool) -> None:
    """Everything that can be known before anything runs."""
    refuse.no_module("summary", model)
    for name, param in model.named_parameters():
        refuse.lazy("summary", name, param)
    if refuse.is_sharded(model):
        raise TypeError("summary: this model is sharded; call summary before sharding it, on the meta device perhaps")
    given = list(tensors_in((args, kwargs)))
    for value in () if given else (*args, *kwargs.values()):
        if isinstance(value, list | tuple) and value and all(isinstance(size, int) for size in value):
            sizes = ", ".join(map(str, value))
            raise TypeError(
                f"summary: found the shape ({sizes}), expected inputs; write summary(model, torch.zeros({sizes}))"
            )
    elsewhere = [tensor.device for tensor in given if not tensor.is_meta]
    own = list(model.parameters())
    if elsewhere and own and all(param.is_meta for param in own):
        raise ValueError(
            f"summary: the model is on meta, and an input is on {elsewhere[0]}; give inputs on meta: x.to('meta')"
        )
    if backward and not torch.is_grad_enabled():
        raise RuntimeError(
            "summary(backward=True): gradients are off here (torch.no_grad()); call it outside that block"
        )


def summary(model: nn.Module, *args: Any, depth: int | None = None, backward: bool = False, **kwargs: Any) -> Summary:
    """What each layer of a model returns, holds, computes and saves for backward, from one forward.

    The model runs as it is, in train or eval mode, on copies of buffers and inputs; nothing in it changes.

    Args:
        model: the module; on `torch.device("meta")` with inputs there, nothing is computed and no memory taken.
        args, kwargs: what its forward takes, of any shape, dtype and device.
        depth: 1 for the layers directly in the model, 2 for those inside them too, as in `verbose`; None for all.
        backward: also run a backward pass, from ones at every output, and count its operations.

    Returns:
        A `Summary`, a read-only mapping of `LayerSummary` with `.total`: `s["layer4"].parameters`, `.operations`,
        `.saved` (bytes). `print(s)` shows all of it, `.to_dataframe()` hands it to pandas.

    Raises:
        TypeError, ValueError: an argument is not as above, or the model is lazy or sharded; nothing has run then.
        RuntimeError: `backward=True` where no gradient can flow. Errors of the model's own forward are passed on.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> s = summary(model, torch.zeros(2, 4))
        >>> s["0"].output, s["0"].parameters, s["0"].operations
        ('[2, 3]', 15, 48)

    Limits: docs/limits.md#summary.
    Source: [`torch/utils/flop_counter.py`](https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py).
    """
    _refuse(model, args, kwargs, backward)
    depth = sys.maxsize if depth is None else refuse.count("summary", "depth", depth)
    root, run = uncompiled(model), OneRun(uncompiled(model))
    run.run(args, kwargs, backward)
    first = {module: name for name, module in root.named_modules()}
    options = backward, torch.is_grad_enabled()
    rows: dict[str, LayerSummary] = {}
    for module, names in groups(chosen("summary", root, down_to(depth, root))):
        rows.update(dict.fromkeys(names, _row(run, module, names, first[module], *options)))
    return Summary(rows, replace(_row(run, root, [""], "", *options), name="total"), backward)
