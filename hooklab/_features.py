"""What `features` returns: the outputs of chosen layers, and a forward that ends as soon as they are there."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn

from hooklab import _refuse
from hooklab._checkpoints import NO_BACKWARD, apart, graph_task, recomputing
from hooklab._compiler import eager
from hooklab._installed import Installed
from hooklab._packing import has_memory, outer_hooks
from hooklab._select import groups, is_gathered, uncompiled
from hooklab._walk import called_by_itself, first_shape, is_running, map_tensors, outermost, tensors_in

__all__ = ["Enough", "Features"]

# The features whose `run` is going on, in each thread its own.
_runs = threading.local()

NOTHING: tuple[tuple[int, int], dict] = (0, 0), {}


class Enough(Exception):
    """Ends a forward: every output that `of` wanted is there. Caught by `Features.run`."""

    def __init__(self, of: "Features"):
        super().__init__("every wanted output is there")
        self.of = of


class Features(Installed, Mapping[str, Any]):
    """The outputs of the last forward, by the name of the layer: what `features` returns.

    Attributes:
        calls: for each name every output of the last forward, in order.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], keep: Callable[[Tensor], Any]):
        super().__init__("features", layers.values())
        self._model = model
        self._detaches = keep is Tensor.detach
        self._keep = keep
        self._first: dict[str, str] = {}  # for each name the first one of its module
        self._log: deque[tuple[str, Any, Any]] = deque()  # the outputs of the last forward, by first names
        # Of layers called since then by themselves, or in a call of a part of the model: the same, and which call.
        self._alone: dict[str, list[tuple[Any, Any]]] = {}
        self._within: dict[str, Callable[[], object]] = {}
        self._modules = set(uncompiled(model).modules())
        self._sorted = NOTHING  # the log by layer, behind the number of the forward and the length of the log
        self._wanted: set[str] = set()  # what `run` still waits for
        self._running: list[int] = []  # the threads in which a forward of the whole model is running
        self._strangers: set[int] = set()  # those in a forward that does not count, until it ends
        self._quick: list[bool] = []  # whether grad is on; empty when an output has to be looked at twice
        self._frozen: list[bool] = []  # the same in inference mode, whose tensors have no version
        self._forwards = 0
        self._thread = 0  # the one that `run` was called in
        self._home = get_ident()  # the one that this was made in, or `run` was last called in
        self._whole = False  # in a run that goes to the end of the forward
        self._groups = list(groups(layers))
        self._silent: dict[str, str] = {}  # after the block, if there was no forward: why
        root, recorder = uncompiled(model), self._recorders()
        try:
            # The first hook to begin and the last to end: a wanted root is recorded in between.
            self._handles.append(root.register_forward_pre_hook(self._begin))
            for module, names in self._groups:
                self._first.update(dict.fromkeys(names, names[0]))
                self._handles.append(module.register_forward_hook(recorder(names[0])))
            self._handles.append(root.register_forward_hook(self._end, always_call=True))
        except BaseException:
            self.remove()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """What was kept, without the model; in place of its version each says whether it is as it was."""

        def fresh(*records: tuple) -> list[tuple]:
            return [(*record, _versions(record[-1]) == versions) for *record, versions in records]

        alone = {name: fresh(*calls) for name, calls in self._alone.items()}
        state = {**super().__getstate__(), "_log": fresh(*self._log), "_alone": alone, "_sorted": NOTHING}
        own = {"_model": None, "_modules": set(), "_keep": None, "_groups": [], "_running": [], "_within": {}}
        return {**state, **own, "_strangers": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        def numbered(records: list[tuple]) -> Iterator[tuple]:
            return ((*record, _versions(record[-1]) if fresh else "edited") for *record, fresh in records)

        alone = {name: list(numbered(calls)) for name, calls in state["_alone"].items()}
        vars(self).update(state, _log=deque(numbered(state["_log"])), _alone=alone)

    def remove(self) -> None:
        try:
            super().remove()
        finally:
            self._within.clear()  # it may lead to what a call was given
            self._no_shortcuts()  # a copy of the model still has hooks, and a forward may have been interrupted
            if self._model is not None:  # it may go, what was kept stays
                for names in [names for _, names in self._groups if not self._forwards]:
                    self._silent.update(dict.fromkeys(names, self._why_silent(names[0])))
                self._model, self._modules, self._groups = None, set(), []

    def _has_seen(self) -> bool:
        return bool(self._forwards or self._alone)

    @property
    def calls(self) -> Mapping[str, list[Any]]:
        return Calls(self)

    def run(self, *args: Any, **kwargs: Any) -> "Features":
        """Run the model on these inputs, and stop it as soon as every layer has been called once.

        Returns:
            This object. A layer that the model would call again has its first output only; what the forward
            would have returned is not there, and later layers have not run.

        Raises:
            RuntimeError: the hooks have been removed, or another thread is in `run` of this object.
        """
        if not self._handles:
            raise RuntimeError(
                "features.run: the hooks have been removed; call run inside the block, or make new features"
            )
        if self._thread not in (0, get_ident()) and self._thread in sys._current_frames():
            raise RuntimeError(
                "features.run: a run in another thread has not ended; each thread needs features of its own"
            )
        self._wanted.update(self._first.values())
        self._thread, task, self._task = get_ident(), self._task, graph_task()
        self._home, around = self._thread, getattr(_runs, "of", ())
        _runs.of = (*around, self)
        self._no_shortcuts()
        own, model, root = len(self._handles), self._model, uncompiled(self._model)
        try:
            # Hooks of this run alone, the last of their layers: whoever else listens there hears the output first.
            # Parameters that are gathered for a forward stay so, and grow stale, until that forward ends.
            self._whole = any(map(is_gathered, model.modules()))
            for module, _ in () if self._whole else self._groups:
                self._handles.append(module.register_forward_hook(self._stop))
            model(*args, **kwargs)
        except Exception as error:
            if not self._ended(error):
                raise
        finally:
            self._whole = False
            self._wanted.clear()
            while len(self._handles) > own:
                self._handles.pop().remove()
            if self._thread in self._running and not is_running(root):
                self._running.remove(self._thread)  # interrupted from the keyboard, which no hook hears of
            self._thread, self._task, _runs.of = 0, task, around
        return self

    def _ended(self, error: BaseException | None) -> bool:
        """True if it comes from our `Enough`: the model may have caught that and raised an error of its own instead."""
        # Not in `run`, whose frame the error knows: what its names refer to would not be freed.
        chain: list[BaseException] = []  # `raise error from error` makes a circle
        while error is not None and all(error is not one for one in chain):
            chain.append(error)
            error = error.__cause__ or error.__context__
        return any(getattr(error, "of", None) is self for error in chain)

    def __getitem__(self, name: str) -> Any:
        return self._checked(name, *self._record(name)[-1])

    def __contains__(self, name: object) -> bool:
        return bool(self._calls_of(name))

    def __iter__(self) -> Iterator[str]:
        return filter(self._calls_of, self._first)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        counts = (f"{name or repr(name)}: {len(self._calls_of(name))}" for name in self._first)
        return f"Features(outputs of {', '.join(counts)})"

    # ---- the hooks ----

    def _recorders(self) -> Callable[[str], Callable]:
        """Makes the hooks. All that they use but the name is shared, so that it stays in a core's cache."""
        quick, note, look, task, keep = self._quick, self._log.append, self._look, graph_task, self._keep
        frozen = self._frozen

        # Every line here is paid for in every call of every layer.
        def keeping(name: str) -> Callable:
            @eager
            def hook(module: nn.Module, args: tuple, output: Any) -> None:
                if quick and output.__class__ is Tensor and task() == NO_BACKWARD and outer_hooks() is None:
                    try:
                        kept = keep(output)
                    except Exception as error:
                        _blame_keep(error, name)
                        raise
                    try:
                        note((name, kept, kept._version if kept.__class__ is Tensor else _versions(kept)))
                    except RuntimeError:  # an inference tensor has no version
                        note((name, kept, _versions(kept)))
                else:
                    look(name, output)

            return hook

        def detaching(name: str) -> Callable:
            @eager
            def hook(module: nn.Module, args: tuple, output: Any) -> None:
                if quick and output.__class__ is Tensor and task() == NO_BACKWARD:
                    try:
                        kept = output.detach() if quick[0] or output.requires_grad else output
                        note((name, kept, kept._version))
                        return
                    except RuntimeError:  # an inference tensor has no version
                        pass
                elif (
                    frozen and output.__class__ is Tensor and output.is_inference() and task() == NO_BACKWARD
                ):
                    try:
                        note((name, output, output.shape))
                        return
                    except RuntimeError:  # a strided nested tensor has no shape
                        pass
                look(name, output)

            return hook

        return detaching if self._detaches else keeping

    def _look(self, name: str, output: Any) -> None:
        """What a hook does, whatever the case."""
        again = recomputing(self._task)
        if not self._handles or (again and self._detaches) or (self._whole and not self._wanted):
            return
        # It may have begun before there were hooks that could have told.
        strange = self._is_elsewhere() or get_ident() in self._strangers
        if strange and self._model is not None and is_running(uncompiled(self._model)):
            return
        # Also in a recomputation, which has to draw the random numbers that the forward has drawn.
        try:
            with apart():
                kept = self._keep(output) if isinstance(output, Tensor) else map_tensors(self._keep, output)
        except Exception as error:
            if again:  # the forward of a reentrant checkpoint has no graph, which `.numpy()` refuses
                return
            _blame_keep(error, name)
            raise
        if again:
            return
        if self._running:
            self._log.append((name, kept, _versions(kept)))
        else:  # outside a forward of the model
            self._record_alone(name, (kept, _versions(kept)))
        if self._wanted and self._runs_here():
            self._wanted.discard(name)

    def _record_alone(self, name: str, record: tuple[Any, Any]) -> None:
        """The outermost call of a part of the model counts as a forward: `vae.encode` calls `vae.encoder`."""
        call, known = outermost(self._modules), self._within.get(name)
        if call is None or known is None or known() is not call():
            self._alone[name] = []
            self._within[name] = call
        self._alone[name].append(record)

    @eager
    def _stop(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._wanted and graph_task() in (NO_BACKWARD, self._task) and self._runs_here():
            raise Enough(self)

    def _runs_here(self) -> bool:
        """True in the thread that `run` was called in."""
        return get_ident() == self._thread

    def _is_elsewhere(self) -> bool:
        """True where forwards of the model are not ours: in other threads, while we run or inside the `run` of others."""
        here = get_ident()
        if self._thread:
            return here != self._thread
        if here == self._home:
            return False
        runs = getattr(_runs, "of", ())
        return bool(runs) and all(one is not self for one in runs)

    def _is_strange(self, module: nn.Module, thread: int) -> bool:
        """True where the forward that begins does not count, or is inside one that does not."""
        if thread in self._strangers and not called_by_itself(module):
            self._strangers.discard(thread)
        if self._is_elsewhere():
            self._strangers.add(thread)
        return thread in self._strangers

    @eager
    def _begin(self, module: nn.Module, args: tuple) -> None:
        thread, running = get_ident(), self._running
        if recomputing(self._task) or not self._handles or self._is_strange(module, thread):
            return
        if running and thread in running:
            if not called_by_itself(module):
                running.remove(thread)  # a forward that was interrupted from the keyboard
        elif running:
            # Their ids alone: this frame is among the frames, and a name for them would keep them all.
            noted, alive = tuple(running), set(sys._current_frames())  # a thread may begin in between
            for other in noted:
                if other not in alive and other in running:
                    running.remove(other)  # it ended in its forward
        if not running or (self._thread and thread not in running):
            self._begin_anew()
        running.append(thread)

    def _begin_anew(self) -> None:
        """Forget the last forward; the forwards that still run elsewhere are strangers from now on."""
        self._strangers.update(self._running)
        self._running.clear()
        if self._strangers:  # some may have ended in their forward
            self._strangers.intersection_update(sys._current_frames())
        self._forwards += 1
        self._log.clear()
        self._alone.clear()
        self._within.clear()
        self._sorted = NOTHING
        self._no_shortcuts()
        if not self._wanted and not self._strangers:
            (self._frozen if torch.is_inference_mode_enabled() else self._quick).append(is_grad_enabled())

    @eager
    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        thread, running = get_ident(), self._running
        if thread in self._strangers and not called_by_itself(module):
            self._strangers.discard(thread)
        if thread in running and not recomputing(self._task):
            running.remove(thread)
            if not running:
                self._no_shortcuts()

    def _no_shortcuts(self) -> None:
        self._quick.clear()
        self._frozen.clear()

    # ---- reading ----

    def _calls_of(self, name: object) -> list[tuple[Any, Any]]:
        """The calls of a layer, with what `_versions` said when they were noted."""
        first = self._first.get(name)
        seen = self._forwards, len(self._log)
        if self._sorted[0] != seen:
            records: dict[str, list[tuple[Any, Any]]] = {}
            for of, kept, versions in tuple(self._log):
                records.setdefault(of, []).append((kept, versions))
            self._sorted = seen, records
        return self._alone.get(first) or self._sorted[1].get(first, [])

    def _record(self, name: str) -> list[tuple[Any, Any]]:
        if calls := self._calls_of(name):
            return calls
        if name not in self._first:
            close = get_close_matches(str(name), self._first) or list(self._first)[:5]
            raise KeyError(f"features: {name!r} was not asked for; asked for: {_refuse.listed(close)}")
        if not self._forwards:
            why = self._silent.get(name) or self._why_silent(name)
            raise KeyError(f"features: no output of {name!r} yet; run the model inside the block {why}")
        raise KeyError(
            f"features: the last forward did not call {name!r}: it was skipped, or its forward is called directly, or "
            "its weights are used without calling it (as nn.MultiheadAttention does with out_proj), or another layer has "
            "taken its place since"
        )

    def _why_silent(self, name: str) -> str:
        watched = [module for module, names in self._groups if name in names]
        return _refuse.why_silent([*([uncompiled(self._model)] if self._model is not None else []), *watched])

    def _checked(self, name: str, kept: Any, versions: Any) -> Any:
        what = None
        if _versions(kept) != versions:
            what = (
                "has been overwritten in place since the layer returned it, by a later layer such as ReLU(inplace=True) or "
                "by `+=`"
            )
        elif any(map(_is_freed, tensors_in(kept))):  # to read it would end the process
            what = "has no memory any more: something that can compute it again has freed it, as reversible networks do"
        if what is not None:
            cure = f"features(model, {name!r}, keep=lambda t: t.detach().clone())"
            if not self._detaches:
                cure = "let `keep` end in .clone(), or take keep=with_grad without copy=False"
            raise RuntimeError(f"features: the output of {name!r} {what}; keep a copy of its own: {cure}")
        # A reentrant checkpoint of the whole model gives its output a graph afterwards.
        late = self._detaches and isinstance(kept, Tensor) and kept.requires_grad
        return kept.detach() if late else kept


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


def _blame_keep(error: Exception, name: str) -> None:
    error.add_note(f"hooklab.features: raised by keep, on the output of {name!r}")


def _is_freed(tensor: Tensor) -> bool:
    return has_memory(tensor) and not tensor.untyped_storage().nbytes()


def _versions(kept: Any) -> Any:
    """Changes whenever a tensor in `kept`, or one that shares its memory, is edited in place.

    Inference tensors have no version; of them it is the shape, since they may be the very tensor that later layers get.
    """
    if isinstance(kept, Tensor):
        return first_shape(kept) if kept.is_inference() else kept._version
    return [_versions(tensor) for tensor in tensors_in(kept)]
