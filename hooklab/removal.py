"""Part 1: hooks taken off without their handles."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from hooklab._support import refuse
from hooklab.census import OPTIONS, HookRecord, Hooks, installed

__all__ = ["remove_hooks"]

INSTEAD = {
    "retain_grad": "PyTorch cannot switch it off; compute the tensor again",
    "saved-tensor hooks": "they go at the end of the `with` block that put them there; leave it before",
}
UNDO = "PyTorch's own; undo there what put it on (remove_weight_norm, prune.remove, …)"


def remove_hooks(
    obj: nn.Module | Tensor | Optimizer, *, where: Callable[[HookRecord], object] | None = None
) -> list[HookRecord]:
    """Take off hooks whose handles are lost: those that `hooks_on(obj)` lists, the global ones among them.

    hooklab's own are taken off as well: the object to which they belong, such as a `features` that was never given a
    name, records nothing more, and its `.remove()` stays harmless.

    Args:
        obj: a module (with all its submodules and parameters), a tensor or an optimizer.
        where: called with each `HookRecord`; those for which it is true are taken off. By default all.

    Returns:
        The records of what was taken off, as from `hooks_on`; empty where there was nothing.

    Raises:
        TypeError: `obj` is none of the three, or `where` cannot be called.
        ValueError: PyTorch's own hooks (weight norm, pruning, FSDP, …), `retain_grad` or saved-tensor hooks are among
            those chosen. Nothing has been taken off then; `where=lambda record: record.removable` leaves them out.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = layer.register_forward_hook(print)
        >>> for hook in remove_hooks(layer):
        ...     print(hook)
        forward hook on Linear: print

    Limits: docs/limits.md#remove_hooks.
    Source: [`torch.utils.hooks.RemovableHandle`](https://github.com/pytorch/pytorch/blob/main/torch/utils/hooks.py).
    """
    if where is not None:
        refuse.not_callable("remove_hooks", "where", where, "lambda record: record.owner == 'user'")
    chosen = Hooks(hook for hook in installed("remove_hooks", obj) if where is None or where(hook))
    if stay := [hook for hook in chosen if not hook.removable]:
        lines = "\n".join(f"  {hook}: {INSTEAD.get(hook.kind, UNDO)}" for hook in stay)
        raise ValueError(
            f"remove_hooks: {len(stay)} of {len(chosen)} hooks cannot be taken off here, so none has been; "
            f"where=lambda record: record.removable leaves them out:\n{lines}"
        )
    holders = _holders(obj)
    for hook in chosen:
        attribute, holder, number = hook.key
        for suffix in ("", *OPTIONS.values()):
            getattr(holders[holder], attribute + suffix, {}).pop(number, None)
    return chosen


def _holders(obj: Any) -> dict[int, Any]:
    """What may hold a hook that `hooks_on(obj)` lists, by its id: the key of a record has that."""
    parts = [*obj.modules(), *obj.parameters()] if isinstance(obj, nn.Module) else [obj]
    return {id(part): part for part in (*parts, modules, optimizers)}
