"""Part 1 of the course: look at gradients on their way through the graph, and change them."""

import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    maybe_get_bdim,
)

from hooklab._support import refuse
from hooklab._support.compiler import eager_inside, marked_eager
from hooklab._support.handles import Installed
from hooklab.layers.select import is_sharded

__all__ = ["Watch", "clip", "scale", "watch", "zero"]

# Autograd hands a hook None where an operation with several results had no gradient for this one
# (`a, b = x.chunk(2)` and only `a` is used): there is nothing to record and nothing to change then.
Hook = Callable[[Tensor | None], Tensor | None]


class Watch(Installed, Mapping[str, Tensor]):
    """The gradients that have arrived at the watched tensors: what `watch` returns.

    A read-only mapping from name to the last gradient; a name is in it once a gradient has arrived.

    Attributes:
        history: for each name every gradient so far, oldest first.
        order: the names in the order in which their gradients arrived.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        self.history: dict[str, list[Tensor]] = {name: [] for name in tensors}
        self.order: list[str] = []
        # Each hook holds two lists and never its tensor: a computed tensor that its own hook refers to is
        # not freed until the hook is removed.
        try:
            for name, tensor in tensors.items():
                self._handles.append(tensor.register_hook(_recorder(name, self.history[name], self.order)))
        except BaseException:
            self.remove()
            raise

    def __getitem__(self, name: str) -> Tensor:
        if self.history.get(name):
            return self.history[name][-1]
        if name in self.history:
            raise KeyError(
                f"no gradient has arrived at {name!r} yet; run backward() on a result that uses it"
            )
        close = get_close_matches(str(name), self.history) or list(self.history)
        raise KeyError(f"{name!r} is not watched; watched: {refuse.listed(close)}")

    def __iter__(self) -> Iterator[str]:
        return (name for name, gradients in self.history.items() if gradients)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        arrived = (f"{name}: {len(gradients)}" for name, gradients in self.history.items())
        return f"Watch(gradients arrived at {', '.join(arrived)})"


def watch(*unnamed: object, **tensors: Tensor) -> Watch:
    """See the gradient of any tensor, leaf or not, without changing anything.

    The hooks are installed at once. Use `with`, or call `.remove()`, to take them off again. A computed
    tensor is a new one in each step: watch it inside the step. `history` keeps every gradient; in a long
    run make a new watch per step. On a computed tensor a hook stays with the value that it had when the hook
    was hung: watch after edits in place, not before.

    Args:
        **tensors: the tensors to watch, each under the name you give it. Any shape, any device; each
            must require a gradient.

    Returns:
        A `Watch`. `log["y"]` is the last gradient that arrived at `y`: a detached copy with the
        shape, dtype and device of the gradient; in `torch.func.vmap` the batch comes first. `log.history["y"]`
        has all of them, `log.order` the names as they arrived. A tensor's own gradient is seen as the hooks
        registered on it before `watch` have left it.

    Raises:
        TypeError: nothing was given, a tensor without a name, or something that is not a tensor.
        ValueError: a tensor that requires no gradient. No hook is installed then.
        RuntimeError: entered again after its hooks were removed.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = x * 3
        >>> with watch(x=x, y=y) as log:
        ...     y.sum().backward()
        >>> log["x"], log.order
        (tensor([3., 3.]), ['y', 'x'])

    Source: built on [`Tensor.register_hook`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html).
    """
    if unnamed:
        raise TypeError(
            "watch: found a value without a name; name each tensor: watch(y=y), of a dict watch(**tensors)"
        )
    if not tensors:
        raise TypeError("watch() was given nothing to watch; name the tensors, for example watch(y=y)")
    for name, tensor in tensors.items():
        refuse.unhookable("watch", name, tensor)
    return Watch(tensors)


@eager_inside
def scale(factor: float) -> Hook:
    """A hook that multiplies the gradient by `factor`.

    Args:
        factor: a real number; negative reverses the gradient, as in domain-adversarial training.

    Returns:
        A function for `Tensor.register_hook`. It returns a new tensor and never edits its argument.

    Raises:
        TypeError: `factor` is not a real number.
        ValueError: `factor` is NaN or infinite.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> _ = x.register_hook(scale(0.5))
        >>> x.sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000])
    """
    factor = refuse.number("scale", "factor", factor)
    if not math.isfinite(factor):
        raise ValueError(f"scale(factor={factor}): expected a finite number; to stop a gradient use zero()")

    def scale_hook(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad * factor

    return scale_hook


@eager_inside
def clip(min: float | None = None, max: float | None = None) -> Hook:
    """A hook that moves every entry of the gradient into [min, max].

    Args:
        min: the lower bound, or None for none. One number alone is this one: for ±1 write `clip(-1, 1)`.
        max: the upper bound, or None for none.

    Returns:
        A function for `Tensor.register_hook`. It returns a new tensor and never edits its argument.
        NaN entries stay NaN, as in `torch.clamp`, which refuses complex and sparse gradients.

    Raises:
        TypeError: a bound is not a real number, or both are missing.
        ValueError: a bound is NaN, or `min` > `max` (`torch.clamp` would set every entry to `max`).

    Example:
        >>> x = torch.zeros(3, requires_grad=True)
        >>> _ = x.register_hook(clip(-1, 1))
        >>> (x * torch.tensor([-5.0, 0.5, 5.0])).sum().backward()
        >>> x.grad
        tensor([-1.0000,  0.5000,  1.0000])

    Source: [`torch.clamp`](https://docs.pytorch.org/docs/stable/generated/torch.clamp.html).
    """
    bounds = refuse.bounds("clip", min, max)

    def clip_hook(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.clamp(**refuse.within(bounds, grad.dtype))

    return clip_hook


@eager_inside
def zero() -> Hook:
    """A hook that replaces the gradient by zeros, also where it was NaN or infinite. Register `zero()`, not `zero`.

    Returns:
        A function for `Tensor.register_hook`. It returns a new tensor with the shape, dtype and
        device of its argument, and never edits its argument.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> _ = x.register_hook(zero())
        >>> x.sum().backward()
        >>> x.grad
        tensor([0., 0.])
    """

    def zero_hook(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else torch.zeros_like(grad)

    return zero_hook


def _copy(grad: Tensor) -> Tensor:
    # With is_grads_batched=True: it lives no longer than the call, but the tensor behind it does.
    if is_legacy_batchedtensor(grad):
        with torch.no_grad():
            return torch._remove_batch_dim(grad.clone(), 1, 1, 0)
    if not is_functorch_wrapped_tensor(grad):
        return grad.detach().clone()
    with torch._C._DisableFuncTorch(), torch.no_grad():  # of torch.func: its wrapper dies with its transform
        batches = []
        while is_functorch_wrapped_tensor(grad):
            batches += [maybe_get_bdim(grad)] if is_batchedtensor(grad) else []
            grad = get_unwrapped(grad)
        for depth, dim in enumerate(reversed(batches)):  # the outermost first
            grad = grad.movedim(depth + dim, depth)
        return grad.detach().clone()


@eager_inside
def _recorder(name: str, gradients: list[Tensor], order: list[str]) -> Callable[[Tensor | None], None]:
    @marked_eager
    def record(grad: Tensor | None) -> None:
        if grad is not None:
            gradients.append(_copy(grad))
            order.append(name)

    return record


@eager_inside
def clip_gradients(model: nn.Module, min: float | None = None, max: float | None = None) -> Installed:
    """Move every entry of every parameter's gradient into [min, max], in every backward.

    A tensor hook on each parameter that requires a gradient now. It clips what one backward brings (of a reentrant
    checkpoint each part by itself), before it is added to `.grad`; `torch.nn.utils.clip_grad_value_` clips the sum
    afterwards. A parameter that takes the place of one later (`load_state_dict(..., assign=True)`, a new layer) is not
    clipped. Under a `GradScaler` what arrives is still scaled, and an inf, by which it knows an overflow, is clipped too:
    take `clip_grad_value_` after `unscale_` there.

    Args:
        model: the module whose parameters are hooked.
        min: the lower bound, or None for none. One number alone is this one: for ±1 write
            `clip_gradients(model, -1, 1)`.
        max: the upper bound, or None for none.

    Returns:
        An object with `.remove()`, also for `with`. NaN entries stay NaN; sparse gradients are refused by
        `torch.clamp` when they arrive.

    Raises:
        TypeError: `model` is no module, a bound is no real number, or both are missing.
        ValueError: `min` > `max`, a bound is NaN, no parameter requires a gradient, or one is complex, not made
            yet (`nn.LazyLinear`) or sharded.
        RuntimeError: entered again after its hooks were removed.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with clip_gradients(model, -1, 1):
        ...     model(torch.tensor([[5.0, -0.5]])).sum().backward()
        >>> model.weight.grad
        tensor([[ 1.0000, -0.5000]])

    Source: [`Tensor.register_hook`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html),
    [`torch.clamp`](https://docs.pytorch.org/docs/stable/generated/torch.clamp.html).
    """
    refuse.no_module("clip_gradients", model)
    bounds = refuse.bounds("clip_gradients", min, max)
    params = _clippable(model)

    def clip_hook(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.clamp(**refuse.within(bounds, grad.dtype))

    clipped = ClipGradients()
    try:
        for param in params:
            clipped._handles.append(param.register_hook(clip_hook))
    except BaseException:
        clipped.remove()
        raise
    return clipped


class ClipGradients(Installed):
    """Hooks that clip: what `clip_gradients` returns."""


def _clippable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient; refused where a hook on them could not clip it."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        found = "no parameter" if next(model.parameters(), None) is None else "only frozen parameters"
        raise ValueError(
            f"clip_gradients: found {found} in this {type(model).__name__}, so there is no gradient to clip; "
            "call requires_grad_() on what should train, before clip_gradients"
        )

    if any(param.is_complex() for param in params):
        raise ValueError(
            f"clip_gradients: {type(model).__name__} has complex parameters, and complex numbers have no order; "
            "bound their size instead: torch.nn.utils.clip_grad_norm_ after backward"
        )
    if any(map(is_sharded, model.modules())):
        raise ValueError(
            f"clip_gradients: the parameters of {type(model).__name__} are sharded (FSDP), and hooks on them "
            "never fire; call torch.nn.utils.clip_grad_value_ after backward"
        )
    return params
