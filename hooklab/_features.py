"""What `features` returns: the outputs of chosen layers, and a forward that ends as soon as they are there."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from hooklab._installed import Installed
from hooklab._select import groups, uncompiled
from hooklab._walk import map_tensors, tensors_in

__all__ = ["Enough", "Features", "recomputing"]

CALL = nn.Module._call_impl.__code__


class Enough(Exception):
    """Ends a forward: every wanted output is there. Caught by `Features.run`."""


def recomputing() -> bool:
    """True inside a backward: a forward that runs there is a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1


class Features(Installed, Mapping[str, Any]):
    """The outputs of the last forward, by the name of the layer: what `features` returns.

    Attributes:
        calls: for each name every output of the last forward, in order.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], keep: Callable[[Tensor], Any]):
        super().__init__()
        self._model = model
        self._keep = keep
        self._records: dict[str, list[tuple[Any, Any]]] = {}  # shared by the names of one module
        self._each: list[list[tuple[Any, Any]]] = []  # the same, once for each module
        self._firsts: list[str] = []  # one name of each module
        self._wanted: set[str] = set()  # what `run` still waits for
        self._running: list[int] = []  # the threads in which a forward of the whole model is running
        self._forwards = 0
        root = uncompiled(model)
        try:
            # The first hook to begin and the last to end: a wanted root is recorded in between.
            self._handles.append(root.register_forward_pre_hook(self._begin))
            for module, names in groups(layers):
                record: list[tuple[Any, Any]] = []
                self._records.update(dict.fromkeys(names, record))
                self._each.append(record)
                self._firsts.append(names[0])
                self._handles.append(module.register_forward_hook(self._recorder(names[0], record)))
            self._handles.append(root.register_forward_hook(self._end, always_call=True))
        except BaseException:
            self.remove()
            raise

    @property
    def calls(self) -> Mapping[str, list[Any]]:
        return Calls(self)

    def run(self, *args: Any, **kwargs: Any) -> "Features":
        """Run the model on these inputs, and stop it as soon as every layer has been called once.

        Returns:
            This object. A layer that the model would call again has its first output only; what the forward
            would have returned is not there, and later layers have not run.

        Raises:
            RuntimeError: the hooks have been removed.
        """
        if not self._handles:
            raise RuntimeError(
                "features.run: the hooks have been removed; call run inside the block, or make new features"
            )
        self._wanted.update(self._firsts)
        try:
            self._model(*args, **kwargs)
        except Enough:
            if self._wanted:  # another one's: this run is inside it
                raise
        finally:
            self._wanted.clear()
        return self

    def __getitem__(self, name: str) -> Any:
        return self._checked(name, *self._record(name)[-1])

    def __contains__(self, name: object) -> bool:
        return bool(self._records.get(name))

    def __iter__(self) -> Iterator[str]:
        return (name for name, record in self._records.items() if record)

    def __len__(self) -> int:
        return sum(map(bool, self._records.values()))

    def __repr__(self) -> str:
        counts = (f"{name}: {len(record)}" for name, record in self._records.items())
        return f"Features(outputs of {', '.join(counts)})"

    # ---- the hooks ----

    def _recorder(self, name: str, record: list[tuple[Any, Any]]) -> Callable:
        keep, running, wanted = self._keep, self._running, self._wanted
        append, task, plain = record.append, torch._C._current_graph_task_id, keep is Tensor.detach

        # Every line here is paid for in every call of every layer: hence no helper but for the rare cases.
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if task() != -1:  # recomputing()
                return
            if not running:  # called by itself, outside a forward of the model
                record.clear()
            # Without a graph there is nothing to detach from.
            if plain and output.__class__ is Tensor and not output.requires_grad:
                try:
                    append((output, output._version))
                except RuntimeError:  # an inference tensor has no version
                    append((output, None))
            else:
                kept = _kept(keep, output, name)
                append((kept, _versions(kept)))
            if wanted:
                wanted.discard(name)
                if not wanted:
                    raise Enough("every wanted output is there")

        return hook

    def _begin(self, module: nn.Module, args: tuple) -> None:
        if recomputing():
            return
        thread, running = _thread(), self._running
        if thread in running and not _called_by_itself(module):
            running.remove(thread)  # a forward that was interrupted from the keyboard
        if not running:
            self._forwards += 1
            for record in self._each:
                record.clear()
        running.append(thread)

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        thread = _thread()
        if thread in self._running and not recomputing():
            self._running.remove(thread)

    # ---- reading ----

    def _record(self, name: str) -> list[tuple[Any, Any]]:
        if record := self._records.get(name):
            return record
        if name not in self._records:
            close = get_close_matches(str(name), self._records) or list(self._records)[:5]
            raise KeyError(f"features: {name!r} was not asked for; asked for: {', '.join(close)}")
        if not self._forwards:
            raise KeyError(
                f"features: no output of {name!r} yet; run the model inside the block "
                "(a compiled model may ignore hooks: compile it inside the block, after torch.compiler.reset())"
            )
        raise KeyError(
            f"features: the last forward did not call {name!r}: it was skipped, or its forward is called directly, or "
            "its weights are used without calling it (as nn.MultiheadAttention does with out_proj)"
        )

    def _checked(self, name: str, kept: Any, versions: Any) -> Any:
        if _versions(kept) != versions:
            raise RuntimeError(
                f"features: the output of {name!r} has been overwritten in place since the layer returned it, by a "
                "later layer such as ReLU(inplace=True) or by `+=`; keep a copy of its own: "
                f"features(model, {name!r}, keep=lambda t: t.detach().clone())"
            )
        return kept


class Calls(Mapping[str, list[Any]]):
    """Every output of the last forward, by the name of the layer."""

    def __init__(self, features: Features):
        self._features = features

    def __getitem__(self, name: str) -> list[Any]:
        return [self._features._checked(name, *call) for call in self._features._record(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._features

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)


def _kept(keep: Callable[[Tensor], Any], output: Any, name: str) -> Any:
    try:
        return keep(output) if isinstance(output, Tensor) else map_tensors(keep, output)
    except Exception as error:
        error.add_note(f"hooklab.features: raised by keep, on the output of {name!r}")
        raise


def _versions(kept: Any) -> Any:
    """Changes whenever a tensor in `kept`, or one that shares its memory, is edited in place."""
    if isinstance(kept, Tensor):
        try:
            return kept._version
        except RuntimeError:  # an inference tensor has none
            return None
    return [_versions(tensor) for tensor in tensors_in(kept)]


def _thread() -> int:
    # Under torch.compile the first answer: the tracer knows no get_ident, and would warn.
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _called_by_itself(module: nn.Module) -> bool:
    """True if a call of `module` is running inside another call of it."""
    calls, frame = 0, sys._getframe()
    while frame is not None:
        calls += frame.f_code is CALL and frame.f_locals["self"] is module
        frame = frame.f_back
    return calls > 1
