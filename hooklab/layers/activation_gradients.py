"""For `features(keep=with_grad)`: an output together with the gradient that reaches it."""

from functools import partial

from torch import Tensor

from hooklab._support.torch_private import eager

__all__ = ["with_grad"]


def with_grad(tensor: Tensor, copy: bool = True) -> Tensor:
    """For `keep`: a copy of the output without its graph, whose `.grad` becomes the gradient of the last backward.

    Args:
        tensor: any shape, dtype and device.
        copy: False, as `keep=functools.partial(with_grad, copy=False)`, keeps the output itself, with its graph;
            its `.grad` adds up. It cannot be read once a later layer has edited it in place.

    Returns:
        A detached copy. Its `.grad` has the same shape, and is None until a gradient arrives. A second backward pass
        replaces it. Do not edit it: layers whose outputs are added share one.

    Raises:
        TypeError: `tensor` is not a tensor; give the function itself, `keep=with_grad`.

    Example:
        >>> from torch import nn, ones
        >>> from hooklab import features
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> with features(model, "0", keep=with_grad) as f:
        ...     model(ones(2, 4)).sum().backward()
        >>> f["0"].grad.shape
        torch.Size([2, 3])

    Limits: docs/limits.md#features. Source: [`Tensor.register_hook`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html).
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"with_grad: expected a tensor, found {type(tensor).__name__}; use it as features(model, ..., keep=with_grad)"
        )
    if not copy:
        if tensor.requires_grad:
            tensor.retain_grad()
        return tensor
    kept = tensor.detach().clone()
    if tensor.grad_fn is not None:  # a leaf has a `.grad` of its own
        tensor.register_hook(partial(_arrived, kept))
    return kept


@eager
def _arrived(kept: Tensor, grad: Tensor | None) -> None:
    if grad is not None:  # a Function may have none to give
        kept.grad = grad.detach()
