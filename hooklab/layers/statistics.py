"""What `layer_statistics` returns: figures by the name of the layer, filled by hooks."""

import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor, is_grad_enabled, nn

from hooklab._support import refuse
from hooklab._support.checkpoints import NO_BACKWARD, graph_task, recomputing
from hooklab._support.compiler import eager
from hooklab._support.handles import Installed, own_hook
from hooklab._support.nested import tensors_in
from hooklab._support.table import table
from hooklab.layers.figures import unbatched
from hooklab.layers.select import callable_layers, groups
from hooklab.layers.streaming import Running, Statistics, short

__all__ = ["LayerStatistics"]


class LayerStatistics(Installed, Mapping[str, Statistics]):
    """Figures of what chosen layers return, or of its gradients: what `layer_statistics` returns."""

    def __init__(self, layers: dict[str, nn.Module], of: str, bins: int, range: tuple[float, float]):
        super().__init__("layer_statistics", layers.values())
        self.of = of
        self._called: list[bool] = []  # not empty once a layer whose gradients are counted was called
        self._running: dict[str, Running] = {}
        self._why_silent: dict[str, str] = {}
        with self._all_or_none():
            for module, names in groups(layers):
                running = Running(bins, range)  # one for all names of a shared module
                self._running.update(dict.fromkeys(names, running))
                self._why_silent.update(dict.fromkeys(names, refuse.why_silent([module])))
                self._handles.append(module.register_forward_hook(self._hook_for(running)))

    def _hook_for(self, running: Running) -> Callable:
        handles, task = self._handles, self._task
        if self.of == "output":
            return own_hook(_count_output, running.add, handles, task, (NO_BACKWARD, task))
        return own_hook(_hang_on_output, _arrival(running.add, handles), handles, self._called)

    def _has_seen(self) -> bool:
        return bool(self._called or len(self))

    def table(self) -> str:
        """All figures as text, a line for each layer; dashes where nothing was counted."""
        rows = [("layer", "calls", "mean", "std", "min", "max", "zeros", "nan", "inf")]
        rows += [_row(name, figures) for name, figures in self.asked.items()]
        return table(rows)

    @property
    def asked(self) -> dict[str, Statistics]:
        """The figures of every layer that was asked for; empty ones where nothing was counted."""
        return {name: running.read() for name, running in self._running.items()}

    def __getitem__(self, name: str) -> Statistics:
        if name not in self._running:
            close = get_close_matches(str(name), self._running) or list(self._running)[:5]
            raise KeyError(f"layer_statistics: {name!r} was not asked for; asked for: {refuse.listed(close)}")
        if not self._running[name].calls:
            missing = "output" if self.of == "output" else "gradient"
            todo = "run the model inside the block (counted are tensors, also those in tuples, lists, dicts and dataclasses)"
            if self.of != "output":
                todo = (
                    "run the model and backward() inside the block (a view that the next layer edits in place, as after "
                    "nn.Flatten or nn.InstanceNorm2d, gets none: use inplace=False there)"
                )
            raise KeyError(f"layer_statistics: no {missing} of {name!r} yet; {todo} {self._why_silent[name]}")
        return self._running[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self._running and bool(self._running[name].calls)

    def __iter__(self) -> Iterator[str]:
        return (name for name, running in self._running.items() if running.calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        calls = (f"{name or repr(name)}: {running.calls}" for name, running in self._running.items())
        return f"LayerStatistics(calls of {', '.join(calls)})"


# The last three arguments are those of a hook; `handles` are those of the block, empty once it is over.


@eager
def _count_output(
    add: Callable, handles: list[Any], task: Any, counted: tuple, module: nn.Module, args: tuple, output: Any
) -> None:
    """Count what a layer returns; `task` is the backward in whose hook the block began."""
    if handles and graph_task() in counted and not (is_grad_enabled() and recomputing(task)):
        if output.__class__ is Tensor:  # nearly always: the short way
            add(output)
            return
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            add(tensor)


# Also in a recomputation: only one of the two forwards of a checkpoint meets the gradient. A reentrant one runs the first
# without grad.
@eager
def _hang_on_output(
    arrived: Callable, handles: list[Any], called: list[bool], module: nn.Module, args: tuple, output: Any
) -> None:
    """Hang a tensor hook on what a layer returns; `called` is no longer empty then."""
    if not handles:  # removed in the middle of this forward
        return
    called[:] = [True]
    if not is_grad_enabled():
        return
    for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
        if tensor.requires_grad and not _hung_already(arrived, tensor):
            handle = tensor.register_hook(arrived)
            if tensor.is_leaf:  # not the layer's own: it outlives this forward, the hook must not
                # Of leaves that are gone there is nothing to remove.
                handles[:] = [h for h in handles if h.hooks_dict_ref() is not None]
                handles.append(handle)


def _arrival(add: Callable, handles: list[Any]) -> Callable:
    @eager
    def arrived(grad: Tensor | None) -> None:
        if grad is not None and handles:
            add(unbatched(grad))

    return arrived


def _hung_already(hook: Callable, tensor: Tensor) -> bool:
    """True if the layer has returned this tensor before: a leaf, its input, one that it keeps or returns twice."""
    if tensor.is_leaf:
        return hook in (tensor._backward_hooks or {}).values()
    # Several tensors may come from one Node (`chunk`); computing a checkpoint again meets the same Node.
    noted, this = tensor.grad_fn.metadata.setdefault(__name__, set()), (hook, tensor.output_nr)
    if this in noted:
        return True
    noted.add(this)
    return False


def _row(name: str, figures: Statistics) -> tuple[str, ...]:
    label = name or repr(name)  # '' is the model itself
    numbers = (figures.mean, figures.std, figures.min, figures.max)
    zeros = "-" if math.isnan(figures.zeros) else f"{figures.zeros:.1%}"
    return (label, str(figures.calls), *map(short, numbers), zeros, str(figures.nans), str(figures.infs))


@eager
def layer_statistics(
    model: nn.Module,
    *patterns: str | type[nn.Module],
    of: Literal["output", "grad_output"] = "output",
    bins: int = 0,
    range: tuple[float, float] = (-10, 10),
) -> LayerStatistics:
    """Mean, spread, extremes, zeros and NaNs of what layers return, over any number of steps.

    The hooks are installed at once. Use `with`, or call `.remove()`, to take them off again; the figures stay.
    No tensor is kept (at most 8,192 numbers of a layer wait to be counted together), and a GPU is
    not waited for until the figures are read.

    Args:
        model: the module to run.
        *patterns: which layers, as in `select`; `"**"` for all of them.
        of: `"output"`, or `"grad_output"` for the gradient with respect to the output, taken by a tensor hook
            on it (right beside in-place layers, and cheaper than a full backward hook; a view that the next
            layer edits in place, as after `nn.Flatten` or `nn.InstanceNorm2d`, gets none; of a layer that returns
            its input as it is the gradient is that of the tensor, from all its uses).
        bins: the number of bins of a histogram for each call; 0 for none.
        range: what the bins cover, as `torch.histc` counts; entries below and above are counted apart.

    Returns:
        A read-only mapping. `s["layer4"]` has `.calls`, `.count`, `.mean`, `.std`, `.min`, `.max`, `.zeros`
        (the share of exact zeros), `.nans`, `.infs`, and with bins `.histogram`, `.below`, `.above` and
        `.history` (calls, bins). Mean, std, min and max are those of the finite entries, as
        torch computes them in float64 on all tensors concatenated. `.table()` is all of it as text. Of tuples,
        lists, dicts and dataclasses every tensor is counted, of other objects nothing, of complex tensors the
        absolute value; meta and fake tensors have no figures but `.calls` and `.count`. A deep copy of the
        model is not watched; one of this object holds the figures so far. Of
        `"output"` what runs in a backward (recomputation under checkpointing, the adjoint of a solver) is not counted
        (except in threads that a layer starts inside a reentrant checkpoint).

    Raises:
        KeyError: a pattern matches nothing. On reading: a name that was not asked for, or nothing counted yet.
        TypeError: `model` is no module, a pattern is no name or class, `bins` or `range` hold no numbers.
        ValueError: no pattern, a layer without a forward, `of` misspelt, negative `bins`, an empty `range`.
        RuntimeError: entered again after its hooks were removed.

    Compile a model inside the block: what is compiled is interrupted at each hook, which `fullgraph=True` refuses. One
    that is compiled already may ignore hooks; a warning says so, at the end of the block where the compiled one is
    around `model`. Not where a compiled function calls it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> with layer_statistics(model, nn.ReLU) as stats:
        ...     _ = model(torch.zeros(2, 4)), model(torch.ones(5, 4))
        >>> stats["1"].calls, stats["1"].count
        (2, 21)

    Source: [`torch.std`](https://docs.pytorch.org/docs/stable/generated/torch.std.html),
    [`torch.histc`](https://docs.pytorch.org/docs/stable/generated/torch.histc.html).
    """
    refuse.no_choice("layer_statistics", "of", of, ("output", "grad_output"))
    bins = refuse.count("layer_statistics", "bins", bins)
    range = refuse.interval("layer_statistics", "range", range)
    return LayerStatistics(callable_layers("layer_statistics", model, patterns), of, bins, range)
