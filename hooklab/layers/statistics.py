"""Statistics of what layers return, or of its gradients, over any number of steps."""

import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hooklab._support import refuse
from hooklab._support.handles import Installed, OwnHook
from hooklab._support.nested import tensors_in
from hooklab._support.table import Tabular, table
from hooklab._support.torch_private import eager, recomputing
from hooklab.layers.select import callable_layers, groups
from hooklab.layers.streaming import Statistics, Tally, short

__all__ = ["LayerStatistics", "layer_statistics"]

SHOWN = 12  # layers in a repr


class LayerStatistics(Installed, Tabular, Mapping[str, Statistics]):
    """Statistics by the name of the layer: what `layer_statistics` returns."""

    _columns = "layer", "calls", "mean", "std", "min", "max", "zeros", "nan", "inf"

    def __init__(
        self, layers: dict[str, nn.Module], of: str, bins: int, range: tuple[float, float], units: int | None = None
    ):
        super().__init__("layer_statistics")
        self.of, self._units = of, units
        self._tallies: dict[str, Tally] = {}
        self._why_silent: dict[str, str] = {}
        self._frozen: set[str] = set()  # layers whose output needed no gradient
        with self._all_or_none():
            for module, names in groups(layers):
                tally = Tally(bins, range, units)  # one for all names of a shared module
                self._tallies.update(dict.fromkeys(names, tally))
                self._why_silent.update(dict.fromkeys(names, refuse.why_silent([module])))
                if of == "output":
                    hook = OwnHook(self._count, tally)
                else:
                    hook = OwnHook(self._follow, names, partial(self._arrived, tally))
                self._handles.append(module.register_forward_hook(hook))

    @eager
    def _count(self, tally: Tally, module: nn.Module, args: tuple, output: Any) -> None:
        """Count what a layer returns, but nothing a second time when a checkpoint recomputes it."""
        if not recomputing(self._task):
            for tensor in tensors_in(output):
                tally.add(tensor)

    @eager
    def _follow(self, names: list[str], arrived: Callable, module: nn.Module, args: tuple, output: Any) -> None:
        """Hang a tensor hook on what a layer returns. A checkpoint runs it twice; a gradient arrives at one of the two."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad and torch.is_grad_enabled()]
        self._frozen = self._frozen - set(names) if tensors else self._frozen | set(names)
        for tensor in tensors:
            if _hung_already(arrived, tensor):
                continue
            handle = tensor.register_hook(arrived)
            if tensor.is_leaf:  # it outlives this forward, as a parameter does; the hook must not
                self._handles[:] = [h for h in self._handles if h.hooks_dict_ref() is not None]
                self._handles.append(handle)

    @eager
    def _arrived(self, tally: Tally, grad: Tensor | None) -> None:
        if grad is not None and self._handles:  # a graph may outlive the block
            tally.add(grad)

    def table(self) -> str:
        """All statistics as text, a line for each layer; dashes where nothing was counted."""
        return table([self._columns, *self._cells()])

    @property
    def asked(self) -> dict[str, Statistics]:
        """The statistics of every layer that was asked for; empty ones where nothing was counted."""
        return {name: tally.read() for name, tally in self._tallies.items()}

    @property
    def dead(self) -> "Dead":
        """By the name of the layer the units that were zero in every sample so far; asked for with `units=`."""
        if self._units is None:
            ask = "layer_statistics(model, ..., units=1), or units=-1 where the last dim counts them (transformers)"
            raise RuntimeError(f"layer_statistics.dead: units were not counted; ask for them before: {ask}")
        return Dead(self)

    def __getitem__(self, name: str) -> Statistics:
        if name not in self._tallies:
            close = get_close_matches(str(name), self._tallies) or list(self._tallies)[:5]
            raise KeyError(f"layer_statistics: {name!r} was not asked for; asked for: {refuse.listed(close)}")
        if not self._tallies[name].calls:
            raise KeyError(self._nothing_of(name))
        return self._tallies[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self._tallies and bool(self._tallies[name].calls)

    def __iter__(self) -> Iterator[str]:
        return (name for name, tally in self._tallies.items() if tally.calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        calls = [f"{name or repr(name)}: {tally.calls}" for name, tally in self._tallies.items()]
        more = f", … and {len(calls) - SHOWN:,} more layers" if len(calls) > SHOWN else ""
        return f"LayerStatistics(calls of {', '.join(calls[:SHOWN])}{more})"

    def _nothing_of(self, name: str) -> str:
        if self.of == "output":
            return (
                f"layer_statistics: no output of {name!r} yet; run the model inside the block (counted are tensors, also "
                f"those in tuples, lists, dicts and dataclasses) {self._why_silent[name]}"
            )
        if name in self._frozen:
            return (
                f"layer_statistics: no gradient of {name!r}: what it returned needs none, since nothing before it does; "
                "unfreeze a parameter there (requires_grad_()), or give an input that requires grad, and check that "
                "torch.no_grad() is off"
            )
        return (
            f"layer_statistics: no gradient of {name!r} yet; run the model and backward() inside the block (a view that "
            "the next layer edits in place, as after nn.Flatten or nn.InstanceNorm2d, gets none: use inplace=False there) "
            f"{self._why_silent[name]}"
        )

    def _records(self) -> Iterator[tuple[Any, ...]]:
        for name, s in self.asked.items():
            yield name, s.calls, s.mean, s.std, s.min, s.max, s.zeros, s.nans, s.infs

    def _cells(self) -> Iterator[list[str | int]]:
        for name, calls, *numbers, zeros, nans, infs in self._records():
            share = "-" if math.isnan(zeros) else f"{zeros:.1%}"
            yield [name or repr(name), str(calls), *map(short, numbers), share, str(nans), str(infs)]


class Dead(dict[str, list[int]]):
    """What `LayerStatistics.dead` returns: a dict that says why it lacks a layer."""

    def __init__(self, statistics: LayerStatistics):
        units = {name: tally.units for name, tally in statistics._tallies.items() if tally.units is not None}
        found = {name: one.dead() for name, one in units.items()}
        super().__init__({name: dead for name, dead in found.items() if dead is not None})
        self._unknown = {name: one.unknown for name, one in units.items()}
        self._statistics = statistics

    def __missing__(self, name: str) -> list[int]:
        self._statistics[name]  # raises where nothing was counted
        why = self._unknown[name] or "its tensors were empty or without values (meta, fake)"
        advice = "choose layers whose outputs have the same number of units there"
        raise KeyError(f"layer_statistics.dead: no units of {name!r}: {why}; {advice}")


def _hung_already(hook: Callable, tensor: Tensor) -> bool:
    """True if the layer has returned this tensor before: a leaf, its input, one that it keeps or returns twice."""
    if tensor.grad_fn is None:
        return hook in (tensor._backward_hooks or {}).values()
    # Several tensors may come from one Node (`chunk`), and a recomputation meets the Node of its input again.
    node: Any = tensor.grad_fn
    seen = node.metadata.setdefault(__name__, set())
    before = len(seen)
    seen.add((hook, tensor.output_nr))
    return len(seen) == before


def layer_statistics(
    model: nn.Module,
    *patterns: str | type[nn.Module],
    of: Literal["output", "grad_output"] = "output",
    bins: int = 0,
    range: tuple[float, float] = (-10, 10),
    units: int | None = None,
) -> LayerStatistics:
    """Mean, spread, extremes, zeros and NaNs of what layers return; `with`, or `.remove()`, takes the hooks off.

    No tensor is kept, and a GPU is not waited for until the statistics are read.

    Args:
        model: the module to run, any number of times.
        *patterns: which layers, as in `select`; `"**"` for all of them.
        of: `"output"`, or `"grad_output"` for the gradient with respect to the output (scaled under a `GradScaler`).
        bins: the number of bins of a histogram for each call; 0 for none.
        range: what the bins cover, as `torch.histc` counts; entries below and above are counted apart.
        units: for `.dead`, the dim that counts units: 1 for (batch, channels, ...), -1 for (batch, tokens, units).

    Returns:
        A `LayerStatistics`, a read-only mapping. `s["layer4"]` has `.calls`, `.count`, `.mean`, `.std`, `.min`, `.max`,
        `.zeros` (a share), `.nans`, `.infs`, and with bins `.histogram`, `.below`, `.above`, `.history` (calls, bins).
        `.table()` is all of it as text, `.to_dataframe()` as a `pandas.DataFrame`. With units, `s.dead["layer4"]` lists
        those that were zero in every sample so far, at every place.

    Raises:
        KeyError: a pattern matches nothing; when reading, a name that was not asked for, or nothing counted yet.
        TypeError, ValueError: an argument is not as above, or a layer has no forward; no hook is installed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> with layer_statistics(model, nn.ReLU) as stats:
        ...     _ = model(torch.zeros(2, 4)), model(torch.ones(5, 4))
        >>> stats["1"].calls, stats["1"].count
        (2, 21)

    Limits: docs/limits.md#layer_statistics. Source: [`torch.std`](https://docs.pytorch.org/docs/stable/generated/torch.std.html).
    """
    if of not in ("output", "grad_output"):
        raise ValueError(f"layer_statistics(of={of!r}): expected 'output' or 'grad_output'")
    bins = refuse.count("layer_statistics", "bins", bins)
    range = refuse.interval("layer_statistics", "range", range)
    if units is not None and (isinstance(units, bool) or not isinstance(units, int)):
        found = type(units).__name__
        raise TypeError(f"layer_statistics(units=...): expected a dim, such as 1 for channels; found {found}")
    return LayerStatistics(callable_layers("layer_statistics", model, patterns), of, bins, range, units)
