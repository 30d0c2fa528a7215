"""One line for each layer that finishes, and one for the layer that fails."""

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from hooklab._support import refuse
from hooklab._support.handles import Installed, OwnHook
from hooklab._support.nested import shapes
from hooklab._support.torch_private import eager, recomputing, running_calls, uncompiled
from hooklab.layers.features import Enough
from hooklab.layers.select import callable_layers, down_to, groups

__all__ = ["Verbose", "label", "verbose"]

MAX_NAME, MAX_TYPE = 40, 20  # characters of a column
SHOWN = 5  # layers in a repr

_on: weakref.WeakSet["Verbose"] = weakref.WeakSet()  # those whose hooks are on a model now


class Verbose(Installed):
    """Writes while a forward runs, until it is removed: what `verbose` returns."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], write: Callable[[str], object]):
        super().__init__("verbose")
        root, labels = uncompiled(model), {module: label(module, names) for module, names in groups(layers)}
        self._write, self._labels = write, list(labels.values())
        self._root = weakref.ref(root)  # its hooks hold this object, which must not hold the model
        self._watched = weakref.WeakSet([root, *labels])
        self._calls: Counter[str] = Counter()  # lines of this forward, by label
        self._inside = False  # a forward of the model is running
        # One layer with a long name must not push all shapes off the page.
        self._names = min(MAX_NAME, max(map(len, self._labels)))
        self._types = min(MAX_TYPE, max(len(type(module).__name__) for module in labels))
        with self._all_or_none():
            self._handles.append(root.register_forward_pre_hook(OwnHook(self._begin), prepend=True))
            for module in {root: None, **labels}:  # the root always, since it may fail between two layers
                hook = OwnHook(self._end, labels.get(module))
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True, always_call=True))
        _on.add(self)

    @eager
    def _begin(self, root: nn.Module, args: tuple) -> None:
        if not recomputing(self._task):
            self._calls.clear()
            self._inside = True

    @eager
    def _end(self, label: str | None, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Called for every watched layer, and for the model, whether its forward returned or raised."""
        if recomputing(self._task):
            return
        error, is_root = sys.exception(), module is self._root()
        if error is not None and _raised_in(error, args, output) and not isinstance(error, Enough):
            self._failed(error, module, args, kwargs)
        elif label is not None and (error is None or output is not None):
            self._finished(label, module, output)
        elif is_root and error is None and not self._calls:
            name = type(module).__name__
            self._write(f"{name}  {name}  {shapes(output)}  (none of the chosen layers was called)")
        if is_root:
            self._inside = False

    def _finished(self, label: str, module: nn.Module, output: Any) -> None:
        if not self._inside:  # a layer that is called by itself
            self._calls.clear()
        self._calls[label] += 1
        name = label if self._calls[label] == 1 else f"{label} #{self._calls[label]}"
        self._names = max(self._names, min(MAX_NAME, len(name)))
        kind = type(module).__name__
        self._write(f"{name:{self._names}}  {kind:{self._types}}  {shapes(output)}")

    def _failed(self, error: BaseException, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """One line for the innermost layer that raised, whether or not it was to be written."""
        calls = list(running_calls(error)) or [(module, args, kwargs)]
        causes = running_calls(error.__cause__) if error.__cause__ is not None else ()
        if any(inner in self._watched for inner, *_ in (*calls[1:], *causes)):
            return  # a watched layer inside this one has written the line
        self._calls[""] += 1
        module, args, kwargs = calls[-1]
        root, kind = self._root(), type(module).__name__
        names = [name for name, layer in root.named_modules() if layer is module] if root is not None else []
        given = shapes(args[0] if len(args) == 1 and not kwargs else (*args, *([kwargs] if kwargs else [])))
        said = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        self._write(f"{names[0] if names and names[0] else kind}  {kind}  failed on {given}: {said}")

    def remove(self) -> None:
        _on.discard(self)
        super().remove()

    def __reduce__(self) -> Any:
        """A copy is on no model."""
        return Installed, ("verbose",)

    def __repr__(self) -> str:
        more = f", … and {len(self._labels) - SHOWN:,} more" if len(self._labels) > SHOWN else ""
        state = "on" if self._handles else "removed"
        return f"Verbose({state}; layers: {', '.join(self._labels[:SHOWN])}{more})"


def label(module: nn.Module, names: list[str]) -> str:
    """All names of a shared layer; of many, as where every block has the same one, the first two."""
    shown = [name or type(module).__name__ for name in (names if len(names) <= 3 else names[:2])]
    return " = ".join(shown if len(shown) == len(names) else [*shown, f"… ({len(names)} names)"])


def _raised_in(error: BaseException, args: tuple, output: Any) -> bool:
    """True if the call with `args` raised; False if it returned while its caller handled an older error."""
    outermost = next(running_calls(error), None)
    return output is None if outermost is None else outermost[1] is args


def verbose(
    model: nn.Module,
    *patterns: str | type[nn.Module],
    depth: int = 1,
    write: Callable[[str], object] = print,
) -> Verbose:
    """One line for each layer that finishes, while the forward runs; `with`, or `.remove()`, takes the hooks off.

    Args:
        model: the module to watch. Nothing in it changes; for running statistics call `model.eval()` yourself.
        *patterns: which layers, as in `select`. Without any, those down to `depth`.
        depth: 1 for the layers directly in the model, 2 for those inside them too, and so on (an `nn.ModuleList`
            is no level of its own); 0 for the model as a whole.
        write: called with each line; `lines.append` collects them.

    Returns:
        A `Verbose`. A line holds the name, the type and the shapes of the output; `#2` marks the second call in one
        forward, `a = b` a layer with two names. A forward that raises ends with a line that names the innermost layer
        that failed, the shapes it was given and the error.

    Raises:
        KeyError: no layer matches.
        TypeError, ValueError: an argument is not as above, or a layer has no forward; no hook is installed then.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> with verbose(model):
        ...     _ = model(torch.ones(2, 4))
        0  Linear  [2, 3]
        1  ReLU    [2, 3]

    Limits: docs/limits.md#verbose. Source: [`Module.register_forward_hook`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook).
    """
    depth = refuse.count("verbose", "depth", depth)
    refuse.not_callable("verbose", "write", write, "print, or lines.append of a list")
    refuse.no_module("verbose", model)
    before = [other for other in _on if other._root() is uncompiled(model) and other._write == write]
    lines = Verbose(model, callable_layers("verbose", model, patterns or down_to(depth, model)), write)
    if any(other._labels == lines._labels for other in before):
        warnings.warn(
            "verbose: the same verbose is on this model already, so every line will come twice; "
            "call .remove() on the first one, or use `with`",
            stacklevel=2,
        )
    return lines
