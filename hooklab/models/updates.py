"""How far the steps of an optimizer move each parameter, over any number of steps."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from sys import _getframe as this_frame
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hooklab._support import refuse
from hooklab._support.frames import is_around
from hooklab._support.handles import Installed
from hooklab._support.table import Tabular, table
from hooklab._support.torch_private import eager
from hooklab.layers.streaming import Statistics, short
from hooklab.models.moves import Moves, Update

__all__ = ["Updates", "updates"]


class Updates(Installed, Tabular, Mapping[str, Update]):
    """How far each parameter has moved, by its name in the model: what `updates` returns."""

    _columns = "parameter", "steps", "ratio", "update_norm", "grad_norm", "value_norm"

    def __init__(self, named: list[tuple[str, nn.Parameter]], optimizer: Optimizer):
        super().__init__("updates")
        self._moves: dict[Tensor, Moves] = {param: Moves() for _, param in named}
        self._named = {name: self._moves[param] for name, param in named}
        self._before: dict[Tensor, Tensor] = {}  # the values before the step that is going on
        self._step: FrameType | None = None  # the call of that step
        with self._all_or_none():
            self._handles.append(optimizer.register_step_pre_hook(self._begin))
            self._handles.append(optimizer.register_step_post_hook(self._end))

    @eager
    def _begin(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if "grad_scaler" in kwargs:  # only the optimizer knows whether it unscales, and whether it skips
            raise RuntimeError(
                f"updates: {type(optimizer).__name__}.step takes the GradScaler itself, so the gradients are scaled and "
                "skipped steps cannot be told; call scaler.unscale_(optimizer) and optimizer.step() instead"
            )
        # A step that calls `super().step()` fires the hooks a second time, and is one step.
        if is_around(self._step, this_frame(1)) or _is_skipped(optimizer):
            return
        self._step = this_frame(1)
        self._before = {param: param.detach().clone() for param in self._moves}
        if not _has_closure(args, kwargs):
            self._add_gradients(getattr(optimizer, "grad_scale", None))

    @eager
    def _end(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if this_frame(1) is not self._step:
            return
        if _has_closure(args, kwargs):  # it has computed the gradient inside the step
            self._add_gradients()
        for param, before in self._before.items():
            self._moves[param].add_step(before, param.detach())
        self._before, self._step = {}, None

    def _add_gradients(self, scale: Tensor | None = None) -> None:
        for param, moves in self._moves.items():
            if param.grad is not None:
                moves.add_gradient(param.grad, scale)

    def remove(self) -> None:
        super().remove()
        self._moves, self._before, self._step = {}, {}, None  # so that the model may be freed

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_moves": {}, "_before": {}, "_step": None}

    def table(self) -> str:
        """All of it as text, a line for each parameter; dashes where nothing was counted."""
        return table([self._columns, *self._cells()])

    @property
    def gradients(self) -> dict[str, Statistics]:
        """Statistics of the gradient's entries, as from `layer_statistics`: what `draw.gradient_flow` shows."""
        return {name: moves.entries.read() for name, moves in self._named.items()}

    def __getitem__(self, name: str) -> Update:
        if name not in self._named:
            close = get_close_matches(str(name), self._named) or list(self._named)[:5]
            raise KeyError(
                f"updates: the optimizer had no parameter {name!r} when updates was called; close: {refuse.listed(close)}"
            )
        if name not in self:
            raise KeyError(
                f"updates: no step has moved {name!r} yet; call optimizer.step() inside the block (a step that a "
                "GradScaler skips does not count)"
            )
        return self._named[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self._named and bool(self._named[name].steps)

    def __iter__(self) -> Iterator[str]:
        return (name for name, moves in self._named.items() if moves.steps)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        steps = max(moves.steps for moves in self._named.values())
        return f"Updates(steps: {steps:,}, parameters: {len(self._named):,})"

    def _records(self) -> Iterator[tuple[Any, ...]]:
        for name, moves in self._named.items():
            u = moves.read()
            yield name, u.steps, u.ratio, u.update_norm, u.grad_norm, u.value_norm

    def _cells(self) -> Iterator[list[str | int]]:
        for name, steps, *norms in self._records():
            yield [name, steps, *map(short, norms)]


def _is_skipped(optimizer: Optimizer) -> bool:
    """True where a GradScaler leaves it to a fused optimizer to skip the step, and tells it so."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _has_closure(args: tuple, kwargs: dict) -> bool:
    return any(callable(value) for value in (*args[1:], kwargs.get("closure")))


def updates(model: nn.Module, optimizer: Optimizer) -> Updates:
    """How far each step moves every parameter, beside its size; `with`, or `.remove()`, takes the hooks off.

    No tensor is kept but, during a step, the values before it. A step that a `GradScaler` skips does not count.

    Args:
        model: gives the parameters their names.
        optimizer: any optimizer that has parameters of the model, in any number of groups.

    Returns:
        An `Updates`, a read-only mapping. `u["0.weight"]` has `.steps`, and as means over these steps `.update_norm`,
        `.grad_norm` (as the step finds it: clipped and unscaled) and `.value_norm` (before the step); `.ratio` is
        `.update_norm / .value_norm`. A new block starts afresh. `.table()` is all of it as text, `.to_dataframe()`
        as a `pandas.DataFrame`; `draw.gradient_flow(u)` draws the gradients.

    Raises:
        KeyError: when reading, a parameter that the optimizer does not have, or no step yet.
        TypeError: `model` is no module, or `optimizer` no optimizer; no hook is installed then.
        ValueError: the optimizer has no parameter of the model, or one is lazy or sharded; no hook is installed either.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with updates(model, optimizer) as u:
        ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
        ...     optimizer.step()
        >>> print(f"{u['weight'].grad_norm:.2f} {u['weight'].update_norm:.2f}")
        5.00 0.50

    Limits: docs/limits.md#updates.
    Source: [`Optimizer.register_step_pre_hook`](https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_pre_hook.html).
    """
    refuse.no_module("updates", model)
    if not isinstance(optimizer, Optimizer):
        hint = "; call updates once for each" if isinstance(optimizer, list | tuple | dict) else ""
        raise TypeError(f"updates: expected an optimizer, found {type(optimizer).__name__}{hint}")
    held = {param for group in optimizer.param_groups for param in group["params"]}
    named = [(name, param) for name, param in model.named_parameters(remove_duplicate=False) if param in held]
    if not named:
        raise ValueError(
            f"updates: this {type(optimizer).__name__} has no parameter of this {type(model).__name__}; give the model "
            "whose parameters the optimizer was made with (after copy.deepcopy, make a new optimizer)"
        )
    for name, param in named:
        refuse.lazy("updates", name, param)
    if refuse.is_sharded(model):
        raise ValueError(
            f"updates: the parameters of {type(model).__name__} are sharded (FSDP), and each process has a part of them; "
            "measure before sharding"
        )
    return Updates(named, optimizer)
