"""Flags that tell of an inf or a NaN: they stay on the device of their tensor until `refuse_the_first` reads them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hooklab._support import refuse
from hooklab._support.nested import first_shape
from hooklab._support.nodes import node_name
from hooklab._support.torch_private import in_transform, is_fake, without_modes
from hooklab.layers.streaming import plain

__all__ = ["Look", "NotFinite", "Seen", "look_at", "refuse_the_first"]


class NotFinite(RuntimeError):
    """A layer returned an inf or a NaN, or passed one on in a gradient.

    Attributes:
        phase: `"forward"` or `"backward"`.
        layer: its name, `""` for the model itself.
        operation: PyTorch's name of the operation that made it, such as `"DivBackward0"`; in a forward without a graph
            the class of the layer, or empty where the layer only received it.
        shape: of the tensor, or in backward of the gradient.
        inputs_finite: True if what the layer was given (in backward the operation) had no inf and no NaN.
    """

    def __init__(self, phase: str, layer: str, operation: str, shape: tuple[int, ...], inputs_finite: bool):
        self.phase, self.layer, self.operation, self.shape = phase, layer, operation, shape
        self.inputs_finite = inputs_finite
        where, made = refuse.listed([layer]), f", made by {operation}" if operation else ""
        if phase == "backward":
            said = f"a gradient of shape {list(shape)} at {operation} in {where}"
            inside = "what reached this operation was finite, so it began here"
            before = "it was there before this operation: look at the loss, and at hooks that change gradients"
        else:
            said = f"the layer {where} returned it in a tensor of shape {list(shape)}"
            inside = f"its inputs were finite, so it began here{made}: look at its parameters and what it computes"
            before = f"its inputs had it already{made}: look at the data, and at code between the layers"
        super().__init__(f"inf or NaN in {phase}: {said}; {inside if inputs_finite else before}")

    def __reduce__(self) -> tuple:
        return NotFinite, (self.phase, self.layer, self.operation, self.shape, self.inputs_finite)


class Seen(NamedTuple):
    """A tensor that was looked at."""

    shape: tuple[int, ...]
    operation: str  # that made it; empty where there is no graph
    flag: Tensor  # on the tensor's device: 0 if all of it is finite, else NaN


class Look(NamedTuple):
    """What went into a layer and what came out of it; in backward, into and out of an operation."""

    layer: str
    operation: str
    before: list[Seen]
    after: list[Seen]


def look_at(tensors: Iterable[Tensor | None]) -> Iterator[Seen]:
    """Look at each tensor that can hold an inf. The result stays on its device, and nothing waits for it."""
    with torch.no_grad(), without_modes():
        for tensor in tensors:
            if tensor is None or in_transform(tensor) or tensor.is_meta or is_fake(tensor):
                continue
            values = tensor.detach()
            if values.is_sparse:
                values = values.coalesce().values()
            if values.is_complex():
                values = torch.view_as_real(values.resolve_conj())
            if values.is_floating_point() and values.numel():
                # One pass over the memory, where `isfinite` makes four; inf * 0 is NaN.
                low, high = plain(values).aminmax()
                operation = "" if tensor.grad_fn is None else node_name(tensor.grad_fn)
                yield Seen(first_shape(tensor) or (), operation, (low * 0 + high * 0).float())


def refuse_the_first(phase: str, looks: list[Look]) -> None:
    """Read all flags at once, and raise for the first that is NaN; on a GPU this waits for it."""
    flags = [seen.flag for look in looks for seen in (*look.before, *look.after)]
    if not flags:
        return
    with without_modes():
        values = iter(torch.stack([flag.to(flags[0].device) for flag in flags]).tolist())
    for layer, operation, before, after in looks:
        # Each takes its own values off the iterator.
        bad_before = [seen for seen in before if next(values) != 0]
        bad_after = [seen for seen in after if next(values) != 0]
        if phase == "backward" and (bad_before or bad_after):
            shape = (bad_after or bad_before)[0].shape
            raise NotFinite(phase, layer, operation, shape, not bad_before)
        if bad_after:  # a mask among the inputs may hold -inf
            made = bad_before[0].operation if bad_before else bad_after[0].operation or operation
            raise NotFinite(phase, layer, made, bad_after[0].shape, not bad_before)
