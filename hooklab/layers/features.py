"""The outputs, or inputs, of chosen layers: the hook that keeps them, and the mapping in which they are read."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from sys import _getframe as this_frame
from threading import get_ident
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hooklab._support import refuse
from hooklab._support.frames import is_around
from hooklab._support.handles import Installed, OwnHook
from hooklab._support.nested import joined, map_tensors, tensors_in
from hooklab._support.packing import has_memory, unseen
from hooklab._support.torch_private import eager, graph_task, outer_hooks, recomputing, uncompiled
from hooklab.layers.select import callable_layers, groups

__all__ = ["Enough", "Features", "features"]

SHOWN = 8  # layers in the text of a Features


def features(
    model: nn.Module,
    *patterns: str | type[nn.Module],
    keep: Callable[[Tensor], Any] = torch.Tensor.detach,
    of: Literal["output", "input"] = "output",
    every: bool = False,
) -> "Features":
    """The outputs, or inputs, of layers in the middle of a model, by name; `with`, or `.remove()`, takes the hooks off.

    Args:
        model: the module to run.
        *patterns: which layers, as in `select`: names, `"layer*"`, `"**.relu"`, or classes.
        keep: called with every output tensor (any shape, dtype, device), also inside tuples, lists, dicts and
            dataclasses; what it returns is kept. By default the tensor without its graph, in the same memory.
            `lambda t: t.detach().clone()` keeps a copy, `with_grad` the gradient as well.
        of: `"output"`, or `"input"` for the first argument of each layer that holds a tensor, as the layer gets it.
        every: True also keeps what earlier forwards gave, which needs memory for all of it; `f.all` joins it.

    Returns:
        A `Features`, a read-only mapping that starts afresh with each forward of the model. `f["layer4"]` is the
        layer's last output, `f.calls["layer4"]` the list of all of them, `f.all("layer4")` those of every forward
        joined on dim 0, and `f.run(*inputs)` runs the model only until every layer has been called once.

    Raises:
        KeyError: no layer matches; when reading, a layer that was not asked for or not called.
        RuntimeError: when reading an output that a later in-place layer has overwritten. Keep a copy instead.
        TypeError, ValueError: an argument is not as above; no hook is installed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> with features(model, "1") as f:
        ...     f.run(torch.zeros(2, 4))["1"].shape
        torch.Size([2, 3])

    Limits: docs/limits.md#features. Source: [`Module.register_forward_hook`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook).
    """
    refuse.not_callable("features", "keep", keep, "torch.Tensor.detach")
    if of not in ("output", "input"):
        raise ValueError(f"features(of={of!r}): expected 'output' or 'input'")
    return Features(model, callable_layers("features", model, patterns), keep, of, every)


class Enough(Exception):
    """Ends a forward. Caught by `Features.run`."""


class Features(Installed, Mapping[str, Any]):
    """The outputs, or inputs, of the last forward, by the name of the layer: what `features` returns.

    A call of a part of the model by itself, such as `vae.encoder(x)`, starts afresh for the layers inside it.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], keep: Callable, of: str, every: bool):
        super().__init__("features")
        self._of = of
        self._model: nn.Module | None = model
        self._detaches = keep is Tensor.detach
        self._keep = keep
        self._log: dict[str, list[tuple[Any, Any]]] = {}  # name -> for each call, what was kept and its versions
        self._every, self._history = every, dict[str, list[tuple[Any, Any]]]()  # the same of all forwards
        self._call: FrameType | None = None  # the frame that called the forward that is going on, in `_thread`
        self._thread = 0
        self._has_run = self._stopped = False
        self._wanted: set[nn.Module] = set()  # what `run` still waits for
        root = uncompiled(model)
        self._silent = {name: refuse.why_silent([root, layer]) for name, layer in layers.items()}
        inside: dict[nn.Module, list[list]] = {}  # each module around wanted layers -> their parts of the log
        add = self._handles.append
        with self._all_or_none():
            for layer, names in groups(layers):
                calls: list[tuple[Any, Any]] = []
                history: list[tuple[Any, Any]] = []
                add(self._hooked(layer, names[0], calls, history))
                for name in names:
                    self._log[name], self._history[name], around = calls, history, root
                    for part in name.split("."):
                        inside.setdefault(around, []).append(calls)
                        around = around.get_submodule(part)
            for module, within in inside.items():
                # A forward begins before its input is kept.
                add(module.register_forward_pre_hook(OwnHook(Features._begin, self, within), prepend=of == "input"))
                add(module.register_forward_hook(OwnHook(Features._end, self), always_call=True))

    def _hooked(self, layer: nn.Module, *state: Any) -> Any:
        if self._of == "output":
            return layer.register_forward_hook(OwnHook(Features._note, self, *state))
        # Before the layer runs, since it may edit its input.
        return layer.register_forward_pre_hook(OwnHook(Features._note_input, self, *state), with_kwargs=True)

    @eager
    def _begin(self, within: list[list], module: nn.Module, args: tuple) -> None:
        """The outermost call, of the model or of a part, forgets what was kept of the layers inside."""
        if recomputing(self._task):
            return
        self._refuse_a_second_thread()
        caller = this_frame(1)
        if not is_around(self._call, caller):
            self._call, self._thread, self._has_run = caller, get_ident(), True
            for calls in within:
                calls.clear()

    @eager
    def _note_input(self, name: str, calls: list, history: list, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Keep the first argument that holds a tensor."""
        given = (value for value in (*args, *kwargs.values()) if any(True for _ in tensors_in(value)))
        self._note(name, calls, history, module, args, next(given, None))

    @eager
    def _note(self, name: str, calls: list, history: list, module: nn.Module, args: tuple, output: Any) -> None:
        """Keep one output, or input. What a checkpoint recomputes is not kept, but `keep` draws its random numbers again."""
        if self._stopped:
            return
        if recomputing(self._task):
            with suppress(Exception):  # the output has a graph now, which `.numpy()` refuses
                if not self._detaches:
                    self._kept(name, output)
            return
        kept = self._kept(name, output)
        self._refuse_a_second_thread()
        if self._call is None:  # the layer is called by itself
            calls.clear()
        calls.append((kept, _versions(kept)))
        if self._every:
            history.append(calls[-1])

    @eager
    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        """The outermost call ends, or an error has ended it."""
        caller = this_frame(1)
        if self._thread == get_ident() and (caller is self._call or not is_around(self._call, caller)):
            self._call = None

    def _kept(self, name: str, output: Any) -> Any:
        """What `keep` makes of an output; a checkpoint around the layer sees nothing of it."""
        if self._detaches:
            return map_tensors(_detached, output)
        aside = nullcontext() if outer_hooks() is None else unseen()
        try:
            with aside:
                return map_tensors(self._keep, output)
        except Exception as error:
            error.add_note(f"hooklab.features: raised by keep, on the {self._of} of {name!r}")
            raise

    def _refuse_a_second_thread(self) -> None:
        if self._call is not None and self._thread != get_ident():
            raise RuntimeError(
                "features: the model is called in a second thread while a forward in another thread is going on; "
                "take one Features per thread, each on a copy of the model (copy.deepcopy) of its own"
            )

    def run(self, *args: Any, **kwargs: Any) -> "Features":
        """Run the model on these inputs, stop it as soon as every layer has been called once, and return this object."""
        if self._model is None:
            raise RuntimeError(
                "features.run: the hooks have been removed; call run inside the block, or make new features"
            )
        self._refuse_a_second_thread()
        if refuse.is_sharded(self._model):
            raise RuntimeError(
                "features.run: this model is sharded, and a forward that stops early would leave its parameters "
                "gathered; call the model itself instead"
            )
        before, lasting = (self._call, self._task, self._wanted), len(self._handles)
        self._wanted = {uncompiled(self._model).get_submodule(name) for name in self._log}
        self._call, self._task = None, graph_task()
        try:
            # Registered now, these hooks are the last of their layers: all others see the output first.
            for layer in tuple(self._wanted):
                output = self._of == "output"
                register = layer.register_forward_hook if output else layer.register_forward_pre_hook
                self._handles.append(register(OwnHook(Features._stop, self)))
            self._model(*args, **kwargs)
        except Exception:  # the model may have caught our `Enough`, and raised an error of its own instead
            if not self._stopped:
                raise
        finally:
            while len(self._handles) > lasting:
                self._handles.pop().remove()
            self._stopped = False
            self._call, self._task, self._wanted = before
        return self

    @eager
    def _stop(self, module: nn.Module, *call: Any) -> None:
        if not recomputing(self._task):
            self._wanted.discard(module)
            if not self._wanted:
                self._stopped = True
                raise Enough("all that is wanted is there")

    @property
    def calls(self) -> Mapping[str, list[Any]]:
        """For each name every output of the last forward, in order."""
        return Calls(self)

    def all(self, name: str) -> Any:
        """The outputs of all calls in all forwards, in order, joined on dim 0; asked for with `every=True`.

        Of a nested output each tensor is joined; what is no tensor there is that of the first call.
        """
        if name in self._log and not self._every:
            ask = f"features(model, {name!r}, every=True)"
            raise RuntimeError(f"features.all: only the last forward is kept; ask for all of them before: {ask}")
        if not self._history.get(name):
            self._record(name)  # says why there is none
        try:
            return joined([self._checked(name, *call) for call in self._history[name]])
        except ValueError as error:
            advice = f"read f.calls[{name!r}] after each forward, or let `keep` give them one form"
            raise ValueError(f"features.all: the {self._of}s of {name!r} {error}; {advice}") from None

    def __getitem__(self, name: str) -> Any:
        return self._checked(name, *self._record(name)[-1])

    def __contains__(self, name: object) -> bool:
        return name in self._log and bool(self._log[name])

    def __iter__(self) -> Iterator[str]:
        return (name for name, calls in self._log.items() if calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        counts = [f"{name or repr(name)}: {len(calls)}" for name, calls in self._log.items()]
        if len(counts) > SHOWN:
            counts = [f"{len(counts)} layers", *counts[:SHOWN], "..."]
        return f"Features({self._of}s of {', '.join(counts)})"

    def _record(self, name: str) -> list[tuple[Any, Any]]:
        if name in self:
            return self._log[name]
        if name not in self._log:
            close = get_close_matches(str(name), self._log) or list(self._log)[:5]
            raise KeyError(f"features: {name!r} was not asked for; asked for: {refuse.listed(close)}")
        if not self._has_run:
            why = self._silent[name]
            raise KeyError(f"features: no {self._of} of {name!r} yet; run the model inside the block {why}")
        raise KeyError(
            f"features: the last forward did not call {name!r}: it was skipped, or an error ended the forward before, "
            "or its forward is called directly, or its weights are used without calling it (as nn.MultiheadAttention "
            "does with out_proj), or another layer has taken its place since"
        )

    def _checked(self, name: str, kept: Any, versions: Any) -> Any:
        """What was kept, unless it was edited in place or freed since."""
        if any(has_memory(tensor) and tensor.untyped_storage().nbytes() == 0 for tensor in tensors_in(kept)):
            what = "has no memory any more: it has been freed by what can recompute it, such as a reversible network"
        elif _is_unedited(kept, versions):
            return kept
        else:
            since = "returned it, by" if self._of == "output" else "was given it, by that layer or"
            what = f"has been overwritten in place since the layer {since} a later layer such as ReLU(inplace=True) or by `+=`"
        asked = "" if self._of == "output" else 'of="input", '
        cure = f"features(model, {name!r}, {asked}keep=lambda t: t.detach().clone())"
        if not self._detaches:
            cure = "let `keep` end in .clone(), or take keep=with_grad without copy=False"
        raise RuntimeError(f"features: the {self._of} of {name!r} {what}; keep a copy of its own: {cure}")

    def remove(self) -> None:
        super().remove()
        self._model = self._call = None  # so that they may be freed

    def __getstate__(self) -> dict[str, Any]:
        """What was kept, without the model. Its tensors have other versions, so it says which are unedited."""
        logs = {
            which: {name: [(kept, _is_unedited(kept, old)) for kept, old in calls] for name, calls in log.items()}
            for which, log in (("_log", self._log), ("_history", self._history))
        }
        return {**super().__getstate__(), **logs, "_model": None, "_keep": None, "_call": None, "_wanted": set()}


class Calls(Mapping[str, list[Any]]):
    """What `Features.calls` returns."""

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

    def __repr__(self) -> str:
        return f"Calls({self._features!r})"


def _detached(tensor: Tensor) -> Tensor:
    """The default `keep`. An inference tensor has no version that would tell of an edit, so it is copied."""
    return tensor.detach().clone() if tensor.is_inference() else tensor.detach()


def _versions(kept: Any) -> Any:
    """Changes whenever a tensor in `kept`, or one that shares its memory, is edited in place."""
    if isinstance(kept, Tensor):
        return None if kept.is_inference() else kept._version
    return [_versions(tensor) for tensor in tensors_in(kept)]


def _is_unedited(kept: Any, versions: Any) -> bool:
    """True if no tensor in `kept` was edited since it had these versions; in a copy they are the answer itself."""
    return versions if isinstance(versions, bool) else _versions(kept) == versions
