"""Another value in the place of what a layer returns, or of what it is given."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hooklab._support import refuse
from hooklab._support.handles import Installed, OwnHook
from hooklab._support.nested import map_tensors, shapes, tensors_in
from hooklab._support.torch_private import eager, recomputing, under_checkpoint
from hooklab.layers.select import callable_layers

__all__ = ["Patch", "patch"]


class Patch(Installed):
    """A value in the place of another: what `patch` returns. `calls` is how often it has been put there."""

    def __init__(self, place: str, module: nn.Module, value: Any, at: Any, of: str):
        super().__init__("patch")
        self.calls = 0
        self._place, self._value, self._at = place, value, at
        self._why_silent = refuse.why_silent([module])
        if of == "output":
            self._handles.append(module.register_forward_hook(OwnHook(self._output)))
        else:
            self._handles.append(module.register_forward_pre_hook(OwnHook(self._input), with_kwargs=True))

    @eager
    def _output(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return self._changed(output)

    @eager
    def _input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            return (self._changed(args[0]), *args[1:]), kwargs
        first = next(iter(inspect.signature(module.forward).parameters), "")
        if first not in kwargs:
            raise TypeError(f"patch: this call gives no {first!r}, which is {self._place}; patch the layer before")
        return args, {**kwargs, first: self._changed(kwargs[first])}

    def _changed(self, old: Any) -> Any:
        """`old` with the value in it, in memory of its own."""
        if under_checkpoint() and not recomputing(self._task):
            warnings.warn(
                f"patch: {self._place} is under a checkpoint, which computes it again in backward: call backward() before "
                "the patch is removed, or its gradients are wrong",
                stacklevel=2,
            )
        if isinstance(old, Tensor):
            part = self._part(old)
            new = self._value(part.clone()) if callable(self._value) else self._value
            new = refuse.misfit("patch", self._place, new, part)
            # Where all of it is new, nothing of the old one takes part, not even a NaN times a gradient of zero.
            changed = torch.empty_like(old) if self._at is ... else old.clone()
            changed[self._at] = new
        elif callable(self._value) and self._at is ...:
            changed = map_tensors(Tensor.clone, self._value(map_tensors(Tensor.clone, old)))
            if _form(changed) != _form(old):
                raise ValueError(f"patch: value returned {_form(changed)} for {self._place}, expected {_form(old)}")
        else:
            raise TypeError(
                f"patch: {self._place} is no tensor but {shapes(old)}; give a function as value, without at=: it gets "
                "all of it and returns all of it, as lambda old: (new, *old[1:]) does"
            )
        self.calls += 1
        return changed

    def _part(self, old: Tensor) -> Tensor:
        try:
            part: Tensor = old[self._at]
        except (IndexError, TypeError) as error:
            raise IndexError(f"patch: at= does not fit {self._place}, of shape {list(old.shape)}: {error}") from None
        if old.numel() and not part.numel():
            raise IndexError(f"patch: at= chooses nothing of {self._place}, of shape {list(old.shape)}")
        return part

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if not self.calls and exc_info[0] is None:
            warnings.warn(
                f"patch: nothing has replaced {self._place}, since no forward has called this layer; its weights may be "
                f"used without calling it (as nn.MultiheadAttention does with out_proj) {self._why_silent}",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"Patch({self._place}, calls: {self.calls}{'' if self._handles else ', removed'})"


def _form(value: Any) -> str:
    return f"{type(value).__name__} {shapes(value)} {[str(tensor.dtype) for tensor in tensors_in(value)]}"


def patch(
    model: nn.Module,
    layer: str | type[nn.Module],
    value: Tensor | complex | Callable[[Any], Any],
    at: Any = ...,
    of: Literal["output", "input"] = "output",
) -> Patch:
    """Another value in the place of a layer's output or input, from now on; `with`, or `.remove()`, takes it off.

    Args:
        model: the module to run.
        layer: one layer, by its name as in `select`.
        value: a tensor or a number, or a function of the old one, such as `lambda old: old + direction`. Its dtype is
            that of what it replaces; so is its shape, or it expands to that.
        at: the index of what is replaced, as in `tensor[at]`: `0`, `(slice(None), -1)`, a mask; by default all of it.
        of: `"output"`, or `"input"`, the first argument. Where this is no tensor (a tuple, as of `nn.LSTM`), `value`
            is a function, without `at`: it gets all of it and returns all of it.

    Returns:
        A `Patch`; `.calls` counts the calls that were changed. The layer's own tensor is never edited: gradients flow to
        `value`, and to the old tensor where it is kept.

    Raises:
        KeyError: no layer has this name; the message gives the closest ones.
        TypeError, ValueError, IndexError: an argument is not as above; in a forward, `value` or `at` does not fit.

    Example:
        >>> model = nn.Sequential(nn.Identity(), nn.Flatten())
        >>> with patch(model, "0", 9.0, at=(slice(None), -1)):
        ...     model(torch.zeros(2, 3))[0]
        tensor([0., 0., 9.])

    Limits: docs/limits.md#patch. Source: [`Module.register_forward_hook`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook).
    """
    if of not in ("output", "input"):
        raise ValueError(f"patch(of={of!r}): expected 'output' or 'input'")
    if not isinstance(value, Tensor | int | float | complex) and not callable(value):
        raise TypeError(f"patch(value=...): expected a tensor, a number or a function, found {type(value).__name__}")
    if isinstance(at, bool) or not isinstance(at, int | slice | tuple | list | Tensor | type(...)):
        raise TypeError(f"patch(at={at!r}): expected an index, as in tensor[at]; leave it out for all")
    if not isinstance(layer, str | type | nn.Module):
        raise TypeError(f"patch: expected the name of one layer, such as 'layer4', found {type(layer).__name__}")
    found = callable_layers("patch", model, (layer,))
    if len(set(found.values())) > 1:
        raise ValueError(f"patch: {layer!r} matches {len(found)} layers, expected one: {refuse.listed([*found][:5])}")
    name, module = next(iter(found.items()))
    return Patch(f"the {of} of {name!r}", module, value, at, of)
