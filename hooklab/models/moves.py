"""What one parameter goes through: how far each step has moved it, as running means."""

from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from hooklab.layers.streaming import Tally, plain

__all__ = ["Moves", "Update"]


@dataclass(frozen=True)
class Update:
    """What the steps so far have done to one parameter; the norms are means over these steps."""

    steps: int
    update_norm: float  # of the value after a step minus the value before
    grad_norm: float  # over the steps in which there was a gradient; NaN without any
    value_norm: float  # before a step

    @property
    def ratio(self) -> float:
        """`update_norm / value_norm`; infinite where a value of zeros was moved, and NaN where it was not."""
        return self.update_norm / self.value_norm if self.value_norm else inf if self.update_norm else nan


class Moves:
    """The running means of one parameter. They lie on its device, since to read a number waits for a GPU."""

    def __init__(self) -> None:
        self.steps = 0
        self.update = self.grad = self.value = torch.tensor(nan, device="cpu")
        self.entries = Tally(0, (-10, 10))  # the statistics of the entries of its gradient

    def add_gradient(self, grad: Tensor, scale: Tensor | None = None) -> None:
        grad = plain(grad.detach())
        if scale is not None:
            grad = grad / scale.to(grad.device)
        self.entries.add(grad)
        self.grad = _mean(self.grad, _norm(grad), self.entries.calls)

    def add_step(self, before: Tensor, after: Tensor) -> None:
        """Count a step; `before` is overwritten."""
        self.steps += 1
        self.value = _mean(self.value, _norm(before), self.steps)
        self.update = _mean(self.update, _norm(before.sub_(after)), self.steps)

    def read(self) -> Update:
        return Update(self.steps, self.update.item(), self.grad.item(), self.value.item())


def _norm(tensor: Tensor) -> Tensor:
    """The 2-norm, in float32 at least: in float16 it would be infinite above 65,504."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _mean(before: Tensor, new: Tensor, number: int) -> Tensor:
    """The mean of `number` numbers, of which `new` is the last one and `before` the mean of the others."""
    return new if number == 1 else before + (new - before) / number
