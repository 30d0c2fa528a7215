"""What every pair of saved-tensor hooks here needs: hold a tensor safely, and notice edits as autograd would."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import graph

from hooklab._support.torch_private import eager, outer_hooks, without_modes

__all__ = ["has_memory", "hold", "installed", "is_parameter", "outer_hooks", "refuse_edited", "unhold", "unseen"]
__all__ += ["version_probe", "warn_of_nothing"]


def hold(tensor: Tensor) -> tuple[Tensor, int]:
    """What a pack hook may keep of `tensor`, with its version.

    A Node that keeps its own output is a cycle that is never freed. `detach()` breaks it, and still shares memory
    and version counter.
    """
    return tensor.detach(), tensor._version


def unhold(held: tuple[Tensor, int]) -> Tensor:
    """The tensor again; RuntimeError if it was edited in place in between (with hooks, autograd does not look)."""
    tensor, version = held
    if tensor._version != version:
        refuse_edited(f"{tensor.type()} {list(tensor.shape)}", tensor._version, version)
    return tensor


def is_parameter(tensor: Tensor) -> bool:
    """True for a parameter and a view of it, whichever model it belongs to."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def has_memory(tensor: Tensor) -> bool:
    """True for an ordinary tensor with entries, which is no more than bytes in a storage."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_neg())


def refuse_edited(what: str, found: int, expected: int) -> None:
    """Raise what autograd raises for a saved tensor that was edited."""
    edited = "one of the variables needed for gradient computation has been modified by an inplace operation"
    raise RuntimeError(f"{edited}: [{what}] is at version {found}; expected version {expected} instead")


def installed(pack: Callable, unpack: Callable) -> graph.saved_tensors_hooks:
    """The context for these two hooks."""
    return graph.saved_tensors_hooks(eager(pack), eager(unpack))


@contextmanager
def unseen() -> Iterator[None]:
    """A block for what hooks compute: a checkpoint, which compares what its two forwards save, sees nothing of it."""
    with installed(hold, unhold), without_modes():
        yield


def warn_of_nothing(what: str) -> None:
    """Warn at the end of a block that nothing of the model was saved in it, unless gradients are off."""
    if torch.is_grad_enabled():
        why = "was it called there, in this thread, with grad on?"
        other = "Another such context (Offload, save_on_cpu), opened inside, takes what is saved in it."
        warnings.warn(f"{what}: nothing of the model was saved for backward by this block: {why} {other}", stacklevel=3)


def version_probe(tensor: Tensor) -> Tensor:
    """A tensor without memory that shares the version counter of `tensor`, and so still tells of edits."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe
