"""Errors for bad input that several modules share: what was found, what was expected, what to do next."""

from numbers import Real

from torch import Tensor, nn

__all__ = ["number", "unhookable"]


def unhookable(function: str, name: str, tensor: object) -> None:
    """Refuse what no gradient can reach: something that is no tensor, or needs no gradient."""
    if not isinstance(tensor, Tensor):
        hint = ""
        if isinstance(tensor, nn.Module):
            hint = f"; of a module, take a parameter: {function}(weight=module.weight)"
        elif isinstance(tensor, list | tuple | dict):
            hint = f"; give each tensor a name of its own: {function}(a=tensors[0], b=tensors[1])"
        raise TypeError(f"{function}({name}=...): expected a tensor, found {type(tensor).__name__}{hint}")
    if tensor.requires_grad:
        return
    if isinstance(tensor, nn.Parameter):
        raise ValueError(
            f"{function}({name}=...): this parameter is frozen (requires_grad=False), so no gradient will reach it; "
            "leave it out: take only the parameters with requires_grad=True"
        )
    raise ValueError(
        f"{function}({name}=...): this tensor of shape {tuple(tensor.shape)} has requires_grad=False, so no "
        f"gradient will reach it; call {name}.requires_grad_() before computing with it, and check that "
        "torch.no_grad() is off"
    )


def number(function: str, name: str, value: object) -> float:
    """`value` as a float, refused unless it is a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        hint = ""
        if isinstance(value, Tensor):  # perhaps what a hook is given, and the maker itself was registered
            hint = f"; give a plain number, and register {function}(...), not {function} itself"
        raise TypeError(f"{function}({name}=...): expected a number, found {type(value).__name__}{hint}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{function}({name}=...): expected a number that a float can hold") from None
