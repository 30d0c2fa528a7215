"""What `verbose` does: a line for each layer that finishes, and one for the layer that fails."""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch._utils import ExceptionWrapper
from torch.autograd import graph

from hooklab._support import refuse
from hooklab._support.calls import CALL, forget_interrupted, leave
from hooklab._support.checkpoints import recomputing
from hooklab._support.compiler import eager
from hooklab._support.handles import Installed, kwargs_and_output, own_hook
from hooklab._support.nested import shapes
from hooklab.layers.features import Enough
from hooklab.layers.select import callable_layers, down_to, groups, uncompiled

__all__ = ["Verbose"]

MAX_NAME, MAX_TYPE = 40, 20  # characters of a column
RERAISE = ExceptionWrapper.reraise.__code__  # raises anew what a replica of nn.DataParallel has raised
BACKWARD = graph._engine_run_backward.__code__  # of the frame in which a backward runs
# On an error: the forwards in which it was written, each with how many had failed. Kept here, the error would keep all
# that its frames hold.
MARK = "_hooklab_written_in"
NUMBERS = itertools.count(1)  # of forwards, whoever watches them


class _Thread(threading.local):
    """What is going on in one thread."""

    def __init__(self) -> None:
        # The calls that are running: the error that was on its way, and how many failures there were, when each began.
        self.stack: list[tuple[nn.Module, BaseException | None, int]] = []
        self.calls: dict[str, int] = {}  # the lines of this forward, by label
        # When this forward began: lines of the whole object, failures in other threads.
        self.lines = self.others = 0
        self.failures = 0  # in this thread
        self.forward, self.given = 0, 0  # its number, and the id of what it was given


class Verbose(Installed):
    """Writes while a forward runs, until it is removed: what `verbose` returns."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], write: Callable[[str], object]):
        super().__init__("verbose", layers.values())
        self._write = write
        self._root = uncompiled(model)
        self._local = _Thread()
        self._lines = self._failures = 0  # written so far, in all threads
        self._seen = False
        labels = {module: _label(module, names) for module, names in groups(layers)}
        # Wide enough for most: one layer with a long name must not push all shapes off the page.
        self._names = min(MAX_NAME, max(map(len, labels.values())))
        self._types = min(MAX_TYPE, max(len(type(module).__name__) for module in labels))
        with self._all_or_none():
            for module in {**{self._root: None}, **labels}:  # the root always: it may fail between two layers
                self._hang(module, labels.get(module))

    def __reduce__(self) -> Any:
        """Nothing is recorded here: what is pickled is an object whose hooks are removed."""
        return Installed, ()

    def _hang(self, module: nn.Module, label: str | None) -> None:
        self._handles.append(module.register_forward_pre_hook(own_hook(self._begin), prepend=True))
        after = module.register_forward_hook(own_hook(self._end, label), with_kwargs=True, always_call=True)
        self._handles.append(after)

    @eager
    def _begin(self, module: nn.Module, args: tuple) -> None:
        if recomputing(self._task) or not self._handles:
            return
        local = self._local
        if module is self._root:
            forget_interrupted(local.stack)
        if not local.stack:
            local.calls, local.lines, local.others = {}, self._lines, self._failures - local.failures
            local.forward, local.given = next(NUMBERS), id(args)
            self._seen = True
        # An error may be on its way already: a forward may call a layer while it handles one.
        local.stack.append((module, sys.exception(), self._failures))

    def _has_seen(self) -> bool:
        return self._seen

    @eager
    def _end(self, label: str | None, module: nn.Module, args: tuple, *given: Any) -> None:
        kwargs, output = kwargs_and_output(given)
        stack = self._local.stack
        if recomputing(self._task) or not leave(stack, module):
            return
        _, before, failures = stack.pop()
        error = sys.exception()
        if error is not before and not isinstance(error, Enough):
            self._failed(error, failures, module, args, kwargs)
        elif label is not None and (error is before or output is not None):
            self._finished(label, module, output)
        elif module is self._root and not stack and self._lines == self._local.lines and error is before:
            name = type(module).__name__
            self._write(f"{name}  {name}  {shapes(output)}  (none of the chosen layers was called)")

    def _finished(self, label: str, module: nn.Module, output: Any) -> None:
        local = self._local
        self._lines += 1
        local.calls[label] = call = local.calls.get(label, 0) + 1
        name = label if call == 1 else f"{label} #{call}"
        self._names = max(self._names, min(MAX_NAME, len(name)))
        kind = type(module).__name__
        self._write(f"{name.ljust(self._names)}  {kind.ljust(self._types)}  {shapes(output)}".rstrip())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """Hooks do not hear of what is no Exception (Ctrl-C), nor of what a hook behind ours has raised."""
        try:
            calls = list(_calls(error)) if self._handles and not isinstance(error, Enough) else []
            parts, local = set(self._root.modules()) if calls else set(), self._local
            ours = [id(args) for module, args, _ in calls if module in parts]
            if ours and (local.stack or local.given in ours):  # and not an error that is older
                self._failed(error, self._failures, *calls[-1])
        except Exception as own:
            error.add_note(
                f"hooklab.verbose: the line for this error could not be written: {type(own).__name__}"
            )
        finally:
            super().__exit__(kind, error, traceback)

    def _failed(
        self, error: BaseException, before: int, module: nn.Module, args: tuple, kwargs: dict
    ) -> None:
        """One line for the innermost layer that raised, whether or not it was to be written.

        None for an error that only tells of one in other words, which has been written since there were `before`.
        """
        local = self._local
        first, *causes = [vars(one).get(MARK, {}).get(local.forward, -1) for one in _told(error)]
        elsewhere = self._failures - local.failures > local.others
        told = any(number > before for number in causes) or (elsewhere and _from_replica(error))
        if first < 0:
            vars(error).setdefault(MARK, {})[local.forward] = self._failures + 1
        if first >= 0 or told:
            return
        local.failures += 1
        module, args, kwargs = next(reversed([*_calls(error)]), (module, args, kwargs))
        # A replica of nn.DataParallel has the dictionaries of the module it was made from.
        hooks = module._forward_hooks
        names = [
            name for name, layer in self._root.named_modules() if vars(layer).get("_forward_hooks") is hooks
        ]
        given = shapes(args[0] if len(args) == 1 and not kwargs else (*args, *([kwargs] if kwargs else [])))
        said = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        kind = type(module).__name__
        label = names[0] if names and names[0] else kind
        self._lines, self._failures = self._lines + 1, self._failures + 1
        self._write(f"{label}  {kind}  failed on {given}: {said}")  # long enough without columns


def _label(module: nn.Module, names: list[str]) -> str:
    """All names of a shared layer; of many, as where every block has the same one, the first two."""
    shown = [name or type(module).__name__ for name in (names if len(names) <= 3 else names[:2])]
    return " = ".join(shown if len(shown) == len(names) else [*shown, f"… ({len(names)} names)"])


def _calls(error: BaseException | None) -> Iterator[tuple[nn.Module, tuple, dict]]:
    """The calls of modules whose forward was running when the error was raised, the innermost last, with their inputs."""
    step = error.__traceback__ if error is not None else None
    while step is not None and step.tb_frame.f_code is not BACKWARD:
        if step.tb_frame.f_code is CALL:
            local = step.tb_frame.f_locals
            yield local["self"], local["args"], local["kwargs"]
        step = step.tb_next


def _told(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those of which it says that they are its cause: `raise ... from`."""
    told: list[BaseException] = []  # it may be its own
    while error is not None and all(error is not one for one in told):
        yield error
        told.append(error)
        error = error.__cause__


def _from_replica(error: BaseException) -> bool:
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and step.tb_frame.f_code is RERAISE


@eager
def verbose(
    model: nn.Module,
    *patterns: str | type[nn.Module],
    depth: int = 1,
    write: Callable[[str], object] = print,
) -> Verbose:
    """One line for each layer that finishes, while the forward runs; where it fails, the last line says so.

    The hooks are installed at once. Use `with`, or call `.remove()`, to take them off again.

    Args:
        model: the module to watch. Nothing in it changes; for running statistics call `model.eval()` yourself. Any hook
            on a layer inside a `nn.TransformerEncoder` turns off its fast path: the last bits may differ.
        *patterns: which layers, as in `select`. Without any, those down to `depth`.
        depth: 1 for the layers directly in the model, 2 for those inside them too, and so on (an `nn.ModuleList`,
            which is never called, is no level of its own); 0 for the model as a whole. Not used with patterns.
        write: called with each line; `lines.append` collects them.

    Returns:
        An object with `.remove()`. A line holds the name, the type and the shapes of the output (of nested
        tuples, lists, dicts and dataclasses too); `#2` marks the second call in one forward; a layer with
        two names is written `a = b`, with more than three `a = b = … (5 names)`. A forward that raises ends with a
        line that names the innermost layer that failed, the shapes it was given and the error (at the end of the
        `with` block, if it is interrupted, or if a forward hook raises that was put on the model later); where a layer
        around it says the same in other words, `raise ... from error`, there is no second line. A forward that calls none
        of the layers has a line that says so. A deep copy of the model is not watched. What runs in a backward
        (recomputation under checkpointing, the adjoint of a solver) is not written (except in threads that a layer starts
        inside a reentrant checkpoint).

    Raises:
        KeyError, TypeError, ValueError: as `select`; a layer that has no forward; `depth` is no whole number, or
            negative; `write` cannot be called. No hook is installed then.
        RuntimeError: entered again after its hooks were removed.

    Compile a model inside the block: what is compiled is interrupted at each hook, which `fullgraph=True` refuses. One
    that is compiled already may ignore hooks; a warning says so, at the end of the block where the compiled one is
    around `model`. Not where a compiled function calls it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> with verbose(model):
        ...     _ = model(torch.ones(2, 4))
        0  Linear  [2, 3]
        1  ReLU    [2, 3]

    Source: built on [`Module.register_forward_hook`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook)
    with `always_call=True`.
    """
    depth = refuse.count("verbose", "depth", depth)
    refuse.not_callable("verbose", "write", write, "print, or lines.append of a list")
    if not patterns:
        refuse.no_module("verbose", model)
        patterns = down_to(depth, model)
    return Verbose(model, callable_layers("verbose", model, patterns), write)
