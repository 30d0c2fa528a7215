"""Run a model only to look at it: afterwards its modes, its buffers and the random numbers are what they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["as_found", "random_state", "set_random_state"]


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """A block in evaluation mode and without gradients, which leaves `model` and the random numbers as it found them."""
    # The attribute, not `train()`: some models merge weights or refuse to leave a mode there.
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    random, fast = random_state(), torch.backends.mha.get_fastpath_enabled()
    try:
        # The fast path of nn.TransformerEncoder calls none of its layers, and makes nested tensors of masked ones.
        torch.backends.mha.set_fastpath_enabled(False)
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        set_random_state(random)
        for module, training in modes:
            module.training = training
        for module, name, buffer, value in buffers:
            _put_back(module, name, buffer, value)


def _put_back(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(buffer, value):  # else its version stays, which a graph may rely on
            buffer.copy_(value)
    if getattr(module, name) is not buffer:
        setattr(module, name, buffer)


def random_state() -> list[Tensor]:
    """Where the random numbers of the CPU stand, and those of each GPU if this process uses one."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def set_random_state(state: list[Tensor]) -> None:
    """Draw again the numbers that followed when `random_state()` was read."""
    torch.set_rng_state(state[0])
    if state[1:]:
        torch.cuda.set_rng_state_all(state[1:])
