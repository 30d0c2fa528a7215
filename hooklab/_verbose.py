"""What `verbose` does: a line for each layer that finishes, and one for the layer that fails."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from hooklab._features import CALL, Enough, recomputing
from hooklab._installed import Installed
from hooklab._select import groups, uncompiled
from hooklab._walk import shapes

__all__ = ["Verbose"]

MAX_NAME, MAX_TYPE = 40, 20  # characters of a column


class Verbose(Installed):
    """Writes while a forward runs, until it is removed: what `verbose` returns."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], write: Callable[[str], object]):
        super().__init__()
        self._write = write
        self._root = uncompiled(model)
        self._local = threading.local()  # the calls that are running in this thread
        labels = {
            module: " = ".join(name or type(module).__name__ for name in names)
            for module, names in groups(layers)
        }
        # Wide enough for most: one layer with a long name must not push all shapes off the page.
        self._names = min(MAX_NAME, max(map(len, labels.values())))
        self._types = min(MAX_TYPE, max(len(type(module).__name__) for module in labels))
        try:
            for module in {**{self._root: None}, **labels}:  # the root always: it may fail between two layers
                self._hang(module, labels.get(module))
        except BaseException:
            self.remove()
            raise

    def _hang(self, module: nn.Module, label: str | None) -> None:
        self._handles.append(module.register_forward_pre_hook(self._begin))
        after = module.register_forward_hook(self._end(label), with_kwargs=True, always_call=True)
        self._handles.append(after)

    def _begin(self, module: nn.Module, args: tuple) -> None:
        if recomputing():
            return
        if not self._stack():
            self._local.calls, self._local.reported, self._local.silent = Counter(), None, True
        # An error may be on its way already: a forward may call a layer while it handles one.
        self._stack().append((module, sys.exc_info()[1]))

    def _end(self, label: str | None) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            stack = self._stack()
            if recomputing() or not any(running is module for running, _ in stack):
                return
            while stack[-1][0] is not module:  # interrupted from the keyboard
                stack.pop()
            _, before = stack.pop()
            error = sys.exc_info()[1]
            if error is not before and not isinstance(error, Enough):
                self._failed(module, args, kwargs, error)
            elif label is not None and (error is before or output is not None):
                self._finished(label, module, output)
            elif module is self._root and not stack and self._local.silent and error is before:
                name = type(module).__name__
                self._write(f"{name}  {name}  {shapes(output)}  (none of the chosen layers was called)")
            if not stack:
                self._local.reported = None

        return hook

    def _finished(self, label: str, module: nn.Module, output: Any) -> None:
        calls = self._local.calls
        calls[label] += 1
        again = f" #{calls[label]}" if calls[label] > 1 else ""
        self._line(label + again, module, shapes(output))

    def _failed(self, module: nn.Module, args: tuple, kwargs: dict, error: BaseException) -> None:
        """One line for the innermost layer that raised, whether or not it was to be written."""
        if error is self._local.reported:
            return
        self._local.reported = error
        module, args, kwargs = _innermost(error) or (module, args, kwargs)
        names = [name for name, layer in self._root.named_modules() if layer is module]
        given = shapes(args[0] if len(args) == 1 and not kwargs else (*args, *([kwargs] if kwargs else [])))
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(
            ": "
        )
        label = names[0] if names and names[0] else type(module).__name__
        self._local.silent = False
        self._write(
            f"{label}  {type(module).__name__}  failed on {given}: {said}"
        )  # long enough without columns

    def _line(self, label: str, module: nn.Module, text: str) -> None:
        self._local.silent = False
        self._write(f"{label:{self._names}}  {type(module).__name__:{self._types}}  {text}".rstrip())

    def _stack(self) -> list[tuple[nn.Module, BaseException | None]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack


def _innermost(error: BaseException) -> tuple[nn.Module, tuple, dict] | None:
    """The module whose call was running deepest when the error was raised, with its inputs."""
    found, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code is CALL:
            local = step.tb_frame.f_locals
            found = local["self"], local["args"], local["kwargs"]
        step = step.tb_next
    return found
