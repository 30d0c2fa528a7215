"""Part 1 of the course: look at gradients on their way through the graph, and change them."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from hooklab._support import refuse
from hooklab._support.handles import Installed
from hooklab._support.torch_private import eager, in_transform

__all__ = ["ClipGradients", "Watch", "clip", "clip_gradients", "scale", "watch", "zero"]

Hook = Callable[[Tensor | None], Tensor | None]
P = ParamSpec("P")
R = TypeVar("R")


class Watch(Installed, Mapping[str, Tensor]):
    """The gradients that have arrived at the watched tensors: what `watch` returns.

    A read-only mapping from name to the last gradient; a name is in it once a gradient has arrived. `history` has for
    each name every gradient so far, oldest first; `order` has the names as their gradients arrived.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__("watch")
        self.history: dict[str, list[Tensor]] = {name: [] for name in tensors}
        self.order: list[str] = []
        with self._all_or_none():
            for name, tensor in tensors.items():
                # The hook holds two lists and never its tensor, which would stay alive until it is removed.
                self._handles.append(tensor.register_hook(_recorder(name, self.history[name], self.order)))

    def __getitem__(self, name: str) -> Tensor:
        if self.history.get(name):
            return self.history[name][-1]
        if name in self.history:
            raise KeyError(f"no gradient has arrived at {name!r} yet; run backward() on a result that uses it")
        close = get_close_matches(str(name), self.history) or list(self.history)
        raise KeyError(f"{name!r} is not watched; watched: {refuse.listed(close)}")

    def __iter__(self) -> Iterator[str]:
        return (name for name, gradients in self.history.items() if gradients)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        arrived = (f"{name}: {len(gradients)}" for name, gradients in self.history.items())
        return f"Watch(gradients arrived at {', '.join(arrived)})"


def _recorder(name: str, gradients: list[Tensor], order: list[str]) -> Hook:
    @unserializable_hook
    @eager
    def record(grad: Tensor | None) -> None:
        if grad is None:
            return
        if in_transform(grad):
            raise RuntimeError(
                f"watch: the gradient at {name!r} lives inside a torch.func transform and ends with it, so it cannot "
                "be kept; return it from the transformed function, or call watch around a plain backward()"
            )
        gradients.append(grad.detach().clone())
        order.append(name)

    return record


def watch(*unnamed: object, **tensors: Tensor) -> Watch:
    """See the gradient of any tensor, leaf or not, without changing anything.

    The hooks are installed at once; `with`, or `.remove()`, takes them off. A computed tensor is a new one in each
    step, so watch it inside the step. `history` keeps every gradient: in a long run make a new watch per step.

    Args:
        **tensors: the tensors to watch, each under the name you give it; each must require a gradient.

    Returns:
        A `Watch`. `log["y"]` is a detached copy of the last gradient that arrived at `y`, `log.history["y"]` has all
        of them, and `log.order` has the names as they arrived.

    Raises:
        TypeError: nothing was given, a tensor without a name, or something that is not a tensor.
        ValueError: a tensor that requires no gradient. No hook is installed then.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = x * 3
        >>> with watch(x=x, y=y) as log:
        ...     y.sum().backward()
        >>> log["x"], log.order
        (tensor([3., 3.]), ['y', 'x'])

    Limits: docs/limits.md#watch.
    Source: [`Tensor.register_hook`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html).
    """
    if unnamed:
        raise TypeError("watch: found a value without a name; name each tensor: watch(y=y), of a dict watch(**tensors)")
    if not tensors:
        raise TypeError("watch() was given nothing to watch; name the tensors, for example watch(y=y)")
    for name, tensor in tensors.items():
        refuse.unhookable("watch", name, tensor)
    return Watch(tensors)


def _hook(change: Callable[[Tensor], Tensor | None]) -> Hook:
    """`change` as a tensor hook, with an error that says so where it is registered on a module or a Node."""

    @unserializable_hook
    @eager
    @functools.wraps(change)
    def hook(grad: Tensor | None, *others: object) -> Tensor | None:
        if others or not isinstance(grad, Tensor | None):
            raise TypeError(
                f"{change.__qualname__.partition('.')[0]}: expected the gradient of one tensor, found "
                f"{', '.join(type(one).__name__ for one in (grad, *others))}; register this hook on a tensor: "
                "tensor.register_hook(...), inside a forward hook output.register_hook(...)"
            )
        # Autograd hands over None where one of several results is not used: `a, b = x.chunk(2)`, and only `a` is.
        return None if grad is None else change(grad)

    return hook


def _bounds_named(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which refuses one bound without a name: people take it for both sides."""
    place = list(inspect.signature(function).parameters).index("min")
    call = f"{function.__name__}({'model, ' * place}"

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        bound: Any = args[-1] if len(args) == place + 1 and "max" not in kwargs else None
        if isinstance(bound, Real):
            raise TypeError(
                f"{call}{bound}): one bound without a name would be the lower one, with no upper one; "
                f"write {call}{-abs(bound)}, {abs(bound)}) for both sides, or {call}min={bound})"
            )
        return function(*args, **kwargs)

    return checked


def scale(factor: float) -> Hook:
    """A hook that multiplies the gradient by `factor`.

    Args:
        factor: a real number; negative reverses the gradient, as in domain-adversarial training.

    Returns:
        A function for `Tensor.register_hook`. It returns a new tensor and edits nothing.

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
    return _hook(lambda grad: grad * factor)


@_bounds_named
def clip(min: float | None = None, max: float | None = None) -> Hook:
    """A hook that moves every entry of the gradient into [min, max].

    Args:
        min, max: the lower and the upper bound, None for no bound. For ±1 write `clip(-1, 1)`.

    Returns:
        A function for `Tensor.register_hook`. It returns a new tensor, as `torch.clamp` does: NaN stays NaN.

    Raises:
        TypeError: a bound is not a real number, both are missing, or one stands alone without its name.
        ValueError: a bound is NaN, or `min` > `max` (`torch.clamp` would set every entry to `max`).

    Example:
        >>> x = torch.zeros(3, requires_grad=True)
        >>> _ = x.register_hook(clip(-1, 1))
        >>> (x * torch.tensor([-5.0, 0.5, 5.0])).sum().backward()
        >>> x.grad
        tensor([-1.0000,  0.5000,  1.0000])

    Limits: docs/limits.md#clip. Source: [`torch.clamp`](https://docs.pytorch.org/docs/stable/generated/torch.clamp.html).
    """
    bounds = refuse.bounds("clip", min, max)
    return _hook(lambda grad: grad.clamp(**bounds))


def zero(*given: object) -> Hook:
    """A hook that replaces the gradient by zeros, also where it was NaN or infinite. Register `zero()`, not `zero`.

    Returns:
        A function for `Tensor.register_hook`. It returns a new tensor and edits nothing.

    Raises:
        TypeError: it was given something, as where `zero` itself is registered.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> _ = x.register_hook(zero())
        >>> x.sum().backward()
        >>> x.grad
        tensor([0., 0.])
    """
    if given:
        raise TypeError(f"zero() takes no argument, found {type(given[0]).__name__}; register zero(), not zero itself")
    return _hook(lambda grad: torch.zeros_like(grad))


class ClipGradients(Installed):
    """Hooks that clip: what `clip_gradients` returns."""

    def __init__(self, params: list[nn.Parameter], bounds: dict[str, float]):
        super().__init__("clip_gradients")
        told = ", ".join(f"{name}={bound:g}" for name, bound in bounds.items())
        self._told = f"{told}, on {len(params)} parameter{'s' if len(params) > 1 else ''}"
        with self._all_or_none():
            for param in params:
                self._handles.append(param.register_hook(clip(**bounds)))

    def __repr__(self) -> str:
        return f"ClipGradients({self._told}{'' if self._handles else ', removed'})"


@_bounds_named
def clip_gradients(model: nn.Module, min: float | None = None, max: float | None = None) -> ClipGradients:
    """Move every entry of every parameter's gradient into [min, max], in every backward pass.

    Each parameter that requires a gradient now gets a tensor hook. It clips what one pass brings, before that is added
    to `.grad`; `torch.nn.utils.clip_grad_value_` clips the sum afterwards. Under a `GradScaler` the gradient
    is still scaled here: use `clip_grad_value_` after `unscale_`.

    Args:
        model: the module whose parameters are hooked.
        min, max: the bounds, as in `clip`. For ±1 write `clip_gradients(model, -1, 1)`.

    Returns:
        An object with `.remove()`, also for `with`.

    Raises:
        TypeError: `model` is no module, or a bound is not as in `clip`.
        ValueError: `min` > `max`, a bound is NaN, no parameter requires a gradient, or one is lazy or sharded.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with clip_gradients(model, -1, 1):
        ...     model(torch.tensor([[5.0, -0.5]])).sum().backward()
        >>> model.weight.grad
        tensor([[ 1.0000, -0.5000]])

    Limits: docs/limits.md#clip_gradients.
    Source: [`Tensor.register_hook`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html).
    """
    refuse.no_module("clip_gradients", model)
    bounds = refuse.bounds("clip_gradients", min, max)
    kind = type(model).__name__
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not params:
        found = "no parameter" if next(model.parameters(), None) is None else "only frozen parameters"
        raise ValueError(
            f"clip_gradients: found {found} in this {kind}, so there is no gradient to clip; "
            "call requires_grad_() on what should train, before clip_gradients"
        )
    for name, param in params.items():
        refuse.lazy("clip_gradients", name, param)
    if refuse.is_sharded(model):
        raise ValueError(
            f"clip_gradients: the parameters of {kind} are sharded (FSDP), and hooks on them "
            "never fire; call torch.nn.utils.clip_grad_value_ after backward"
        )
    return ClipGradients(list(params.values()), bounds)
