"""Where two models first differ, and which layer is to blame."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from hooklab._support import refuse
from hooklab._support.as_found import as_found, set_random_state
from hooklab._support.torch_private import uncompiled
from hooklab.layers.select import callable_layers
from hooklab.models.calls import Call, Calls, copied, given, moved, sizes
from hooklab.models.comparison import Comparison, LayerPair, Unpaired, difference
from hooklab.models.pairing import by_name, by_order

__all__ = ["compare"]

Inputs = tuple[tuple, dict[str, Any]]


def compare(
    a: nn.Module, b: nn.Module, *args: Any, pairs: Mapping[str, str] | None = None, tol: float = 1e-5, **kwargs: Any
) -> Comparison:
    """Where two models first differ, and which layer is to blame. Both run once, and each layer of `b` once more.

    They run in evaluation mode and without gradients; what layers are given and return is copied. Modes, buffers and
    random numbers are then put back.

    Args:
        a, b: the models, such as an original and its port. `b` may have another dtype or be on another device.
        args, kwargs: the inputs for both.
        pairs: names of layers of `a` -> names of layers of `b`, of any depth. Without it, layers that call no other
            layer are paired by the order in which they run and the shapes that they return.
        tol: the largest relative difference that counts as none: about 1e-5 for float32, 1e-2 for float16.

    Returns:
        A `Comparison`, a sequence of rows in the order in which `a` runs: `.a`, `.b`, `.type`, `.difference`,
        `.on_equal_input`; the last row is the whole model. `.first` is the first row whose outputs differ, `.to_blame`
        the first that differs on equal input; both may be None. `.unpaired.a` and `.unpaired.b` list what has no
        partner. `.table()` is all of it as text, `.to_dataframe()` as a `pandas.DataFrame`.

    Raises:
        KeyError: `pairs` names a layer that is not there; the message gives the closest names.
        ValueError: two layers of `pairs` return other shapes, a layer is not called, or there is nothing to pair.
        TypeError: an argument is not as above. Both models are as they were after each of these.

    Example:
        >>> import torch
        >>> a = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))
        >>> b = nn.Sequential(a[0], nn.GELU(approximate="tanh"), a[2])
        >>> compare(a, b, torch.ones(2, 4)).to_blame.a
        '1'

    Limits: docs/limits.md#compare. Source: [`Module.register_forward_hook`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook).
    """
    tol = refuse.number("compare", "tol", tol)
    _refuse(a, b, pairs, tol)
    a, b, inputs = uncompiled(a), uncompiled(b), (args, kwargs)
    if pairs is None:
        in_a, in_b = callable_layers("compare", a, (nn.Module,)), callable_layers("compare", b, (nn.Module,))
    else:
        in_a = callable_layers("compare, in a", a, tuple(pairs))
        in_b = callable_layers("compare, in b", b, tuple(pairs.values()))
    run_a = _run("a", a, in_a, pairs is None, inputs)
    run_b = _run("b", b, in_b, pairs is None, moved(inputs, a, b))
    of_a, of_b = run_a.layers, run_b.layers
    matched = by_order(of_a, of_b) if pairs is None else by_name(of_a, of_b, pairs, in_a, in_b)
    with as_found(b):
        rows = [_row(call, other, _on_equal_input(call, other)) for call, other in matched]
    for whole, other in zip(run_a.whole, run_b.whole, strict=False):
        if sizes(whole.output) == sizes(other.output):
            rows.append(_row(whole, other, None))
            matched.append((whole, other))
    paired = {call for pair in matched for call in pair}
    alone = [[call.name for call in [*run.layers, *run.whole] if call not in paired] for run in (run_a, run_b)]
    return Comparison(rows, Unpaired(*alone), tol)


def _refuse(a: Any, b: Any, pairs: Any, tol: float) -> None:
    for which, model in (("a", a), ("b", b)):
        if not isinstance(model, nn.Module):
            found = type(model).__name__
            raise TypeError(f"compare: expected a module as {which}, found {found}; call compare(a, b, *inputs)")
        for name, parameter in model.named_parameters():
            refuse.lazy("compare", name, parameter)
            if parameter.is_meta:
                raise ValueError(f"compare: {name!r} of {which} is on the device meta, without values; load them first")
        if refuse.is_sharded(model):
            raise ValueError(f"compare: {which} is sharded, so its layers cannot be called one by one; gather it first")
    if not tol >= 0:
        raise ValueError(f"compare(tol={tol:g}): expected 0 or more")
    if pairs is None:
        return
    names = [*pairs.keys(), *pairs.values()] if isinstance(pairs, Mapping) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError("compare: expected pairs as a dict from names of layers of a to names of layers of b")
    if not names:
        raise ValueError("compare(pairs={}): nothing to pair; name layers, or leave pairs out")
    if patterns := [name for name in names if "*" in name]:
        raise ValueError(f"compare: pairs takes whole names, found the pattern {patterns[0]!r}")


class Run(NamedTuple):
    """What a forward called: the layers that can be paired, and the model itself where it is none of them."""

    layers: list[Call]
    whole: list[Call]


def _run(which: str, model: nn.Module, layers: dict[str, nn.Module], leaves: bool, inputs: Inputs) -> Run:
    """One forward, and the calls in it: of layers that call no other one, or of all that were named."""

    def can_be_paired(call: Call) -> bool:
        return call.is_leaf and bool(sizes(call.output)) if leaves else call.module in layers.values()

    args, kwargs = copied(inputs)
    hooked = {name: layer for name, layer in layers.items() if not leaves or not _is_parametrization(name)}
    with as_found(model), Calls({**hooked, "": model}, lambda c: can_be_paired(c) or c.module is model) as calls:
        try:
            model(*args, **kwargs)
        except Exception as error:
            error.add_note(f"hooklab.compare: raised by the forward of {which}")
            raise
    whole = [call for call in calls.ended if not can_be_paired(call)]
    return Run([call for call in calls.ended if call not in whole], whole)


def _is_parametrization(name: str) -> bool:
    """True for what computes a weight: the layer that has the weight calls it, and is a leaf all the same."""
    return "parametrizations" in name.split(".")


def _row(call: Call, other: Call, on_equal_input: float | None) -> LayerPair:
    types = dict.fromkeys(type(one.module).__name__ for one in (call, other))
    return LayerPair(call.name, other.name, " / ".join(types), difference(call.output, other.output), on_equal_input)


def _on_equal_input(call: Call, other: Call) -> float | None:
    """How far the layer of `b` is from the output of `a` where it is given what the layer of `a` was given."""
    inputs = given(call, other)
    if inputs is None:
        return None
    args, kwargs = inputs
    set_random_state(call.random)
    try:
        output = other.module(*args, **kwargs)
    except Exception as error:
        error.add_note(f"hooklab.compare: raised by {other.name!r} of b, on the inputs of {call.name!r} of a")
        raise
    return difference(call.output, output) if sizes(output) == sizes(call.output) else None
