"""Errors for bad input that several modules share: what was found, what was expected, what to do next."""

import math
from collections.abc import Iterable
from numbers import Integral, Real

import torch
from torch import Tensor, nn

__all__ = ["bounds", "count", "interval", "is_sharded", "lazy", "listed", "misfit", "no_module"]
__all__ += ["not_callable", "number", "unhookable", "why_silent"]


def listed(names: Iterable[str]) -> str:
    """Names as one would type them: `'0'` is no number, and `''` is the model itself."""
    return ", ".join(repr(name) if name else "'' (the model itself)" for name in names)


def why_silent(modules: Iterable[nn.Module]) -> str:
    """Why hooks on these may not have fired, though the model has run."""
    own = [type(module).__name__ for module in modules if type(module).__call__ is not nn.Module.__call__]
    if own:
        return f"({own[0]} has a __call__ of its own: where that calls forward directly, no hook fires)"
    return "(a compiled model may ignore hooks: compile it inside the block, after torch.compiler.reset())"


def is_sharded(model: nn.Module) -> bool:
    """True for a model of FSDP, known by the names of its classes."""
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})


def lazy(function: str, name: str, tensor: Tensor) -> None:
    """Refuse a parameter that has no memory yet: PyTorch hangs no hook on it."""
    if nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"{function}: the parameter {name!r} is not made yet (its layer is lazy, such as nn.LazyLinear); "
            "run the model once on a batch before"
        )


def unhookable(function: str, name: str, tensor: object) -> None:
    """Refuse what no gradient can reach: something that is no tensor, or needs no gradient."""
    if not isinstance(tensor, Tensor):
        hint = ""
        if isinstance(tensor, nn.Module):
            hint = f"; of a module, take a parameter: {function}(weight=module.weight)"
        elif isinstance(tensor, list | tuple | dict):
            hint = f"; give each tensor a name of its own: {function}(a=tensors[0], b=tensors[1])"
        raise TypeError(f"{function}({name}=...): expected a tensor, found {type(tensor).__name__}{hint}")
    lazy(function, name, tensor)
    if tensor.requires_grad:
        return
    what = f"tensor of shape {tuple(tensor.shape)} has requires_grad=False"
    cure = f"call {name}.requires_grad_() before computing with it, and check that torch.no_grad() is off"
    if not (tensor.is_floating_point() or tensor.is_complex()):
        what = f"tensor holds {tensor.dtype}, and only floating-point and complex tensors have gradients"
        cure = "take one that it was computed from"
    elif isinstance(tensor, nn.Parameter):
        what = "parameter is frozen (requires_grad=False)"
        cure = "leave it out: take only the parameters with requires_grad=True"
    elif tensor.is_inference():
        cure = f"it was made in torch.inference_mode(): make it outside, or take {name}.clone().requires_grad_()"
    raise ValueError(f"{function}({name}=...): this {what}, so no gradient will reach it; {cure}")


def number(function: str, name: str, value: object) -> float:
    """`value` as a float, refused unless it is a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        hint = ""
        if isinstance(value, Tensor | nn.Module) and function in ("scale", "clip"):  # as a hook is given
            hint = f"; give a plain number, and register {function}(...), not {function} itself"
        elif isinstance(value, Tensor):
            hint = "; give a plain number: .item() of a tensor with one entry"
        raise TypeError(f"{function}({name}=...): expected a number, found {type(value).__name__}{hint}")
    return float(value)


def bounds(function: str, min: float | None, max: float | None) -> dict[str, float]:
    """The bounds that were given, for `Tensor.clamp`; refused unless they leave room between them."""
    given = {name: bound for name, bound in (("min", min), ("max", max)) if bound is not None}
    if not given:
        raise TypeError(f"{function} was given no bound; give min, max or both, for example min=-1, max=1")
    for name, bound in given.items():
        given[name] = number(function, name, bound)
        if math.isnan(bound):
            raise ValueError(f"{function}({name}=nan): expected a number; no gradient lies within a NaN bound")
    if min is not None and max is not None and min > max:
        raise ValueError(f"{function}(min={min}, max={max}): min is above max; did you mean min={max}, max={min}?")
    return given


def count(function: str, name: str, value: object, least: int = 0) -> int:
    """`value` as a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        hint = f"; write {name}={value:.0f}" if isinstance(value, float) and value.is_integer() else ""
        raise TypeError(f"{function}({name}=...): expected a whole number, found {type(value).__name__}{hint}")
    result = int(value)
    if result < least:
        raise ValueError(f"{function}({name}={result}): expected {least} or more")
    return result


def interval(function: str, name: str, value: object) -> tuple[float, float]:
    """`value` as two finite numbers, the first below the second."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(f"{function}({name}={value!r}): expected two numbers, for example {name}=(-10, 10)")
    low, high = (number(function, name, bound) for bound in value)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"{function}({name}=({low:g}, {high:g})): this range is empty or not finite; "
            "expected two finite numbers, the first below the second"
        )
    return low, high


def not_callable(function: str, name: str, value: object, example: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(
            f"{function}({name}=...): expected something that can be called, such as {example}; "
            f"found {type(value).__name__}"
        )


def no_module(function: str, value: object) -> None:
    """Refuse what is no module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{function}: expected a module, found {type(value).__name__}")


def misfit(function: str, place: str, value: object, part: Tensor) -> Tensor:
    """`value` in the shape of `part`, which it replaces; refused unless it has its dtype and expands to its shape."""
    if not isinstance(value, Tensor | int | float | complex):
        found = type(value).__name__
        raise TypeError(f"{function}: value returned {found} for {place}; expected a tensor or a number")
    dtype = value.dtype if isinstance(value, Tensor) else torch.result_type(part, value)
    if dtype != part.dtype:
        raise TypeError(f"{function}: value is {dtype}, {place} is {part.dtype}; give value.to({part.dtype})")
    new = torch.as_tensor(value, dtype=part.dtype, device=part.device)
    try:
        return new.expand(part.shape)
    except RuntimeError:
        raise ValueError(
            f"{function}: value has shape {list(new.shape)}, what it replaces of {place} has {list(part.shape)}; "
            "give one of that shape, or one that expands to it"
        ) from None
