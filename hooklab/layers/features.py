"""What `features` returns: the outputs of chosen layers, and a forward that ends as soon as they are there."""

import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled, nn
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from hooklab._support import refuse
from hooklab._support.calls import called_by_itself, is_running, outermost
from hooklab._support.checkpoints import NO_BACKWARD, apart, graph_task, is_tracing, next_node, recomputing
from hooklab._support.compiler import eager
from hooklab._support.handles import Installed, own_hook
from hooklab._support.nested import map_tensors
from hooklab._support.packing import outer_hooks
from hooklab.layers.outputs import NOTHING, Outputs, versions_of
from hooklab.layers.recorders import Shared, all_fresh, all_new, blame_keep, note_kept, recorder
from hooklab.layers.select import callable_layers, groups, is_sharded, uncompiled

__all__ = ["Enough", "Features", "features", "with_grad"]

OURS = -1  # the number of a hook that has no handle; those of handles begin at 0

SMALL = 2**20  # bytes that outputs of the last forward may hold during the next one
# The features whose `run` is going on, in each thread its own.
_runs = threading.local()


class Enough(Exception):
    """Ends a forward. Caught by `Features.run`."""

    def __init__(self) -> None:
        super().__init__("every wanted output is there")


class Features(Installed, Outputs):
    """The outputs of the last forward, by the name of the layer: what `features` returns.

    Attributes:
        calls: for each name every output of the last forward, in order.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], keep: Callable[[Tensor], Any]):
        Installed.__init__(self, "features", layers.values())
        Outputs.__init__(self, detaches=keep is Tensor.detach)
        self._model = model
        self._keep = keep
        self._within: dict[str, Callable[[], object]] = {}  # of layers that are called alone: in which call
        self._modules = set(uncompiled(model).modules())
        self._wanted: set[str] = set()  # what `run` still waits for
        self._running: list[int] = []  # the threads in which a forward of the whole model is running
        self._strangers: set[int] = set()  # those in a forward that does not count, until it ends
        self._quick: list[bool] = []  # whether grad is on; empty when an output has to be looked at twice
        self._frozen: list[bool] = []  # the same in inference mode, whose tensors have no version
        self._node = 0  # `next_node()` in the beginning of a forward
        self._usual = (
            0  # how many outputs a forward returned, all of them new tensors without a graph; else 0
        )
        self._ready = (
            False  # such a forward has ended, and nothing was called since: the next may be one, too
        )
        self._cells: list[
            Callable[[int], list]
        ] = []  # for each layer what gives its outputs of such a forward
        self._in_cells = 0  # the number of the forward whose outputs are there; 0 if they are in the log
        self._large = False  # whether they take more than `SMALL`
        self._steady = True  # False once a forward was no longer so
        self._looked = False  # at an output of this forward, twice
        self._vain = 0  # forwards that were not so, one after the other
        self._lone = False  # in a forward that nothing else of the model has run around or beside so far
        self._thread = 0  # the one that `run` was called in
        self._home = get_ident()  # the one that this was made in, or `run` was last called in
        self._whole = False  # in a run that goes to the end of the forward
        self._stopped = False  # in a run whose forward has been told to end
        self._groups = list(groups(layers))
        root = uncompiled(model)
        note, look = self._log.append, self._look
        self._shared = Shared(self._quick, self._frozen, note, look)
        with self._all_or_none():
            # The first hook to begin and the last to end: a wanted root is recorded in between.
            self._handles.append(
                root.register_forward_pre_hook(own_hook(Features._begin, self), with_kwargs=True)
            )
            for module, names in self._groups:
                self._first.update(dict.fromkeys(names, names[0]))
                if self._detaches:
                    hook, records = recorder(names[0], self._shared)
                    self._cells.append(records)
                else:
                    hook = own_hook(note_kept, names[0], keep, self._quick, note, look)
                self._handles.append(module.register_forward_hook(hook))
            self._handles.append(root.register_forward_hook(own_hook(Features._end, self), always_call=True))

    def __getstate__(self) -> dict[str, Any]:
        """What was kept, without the model."""
        own = {"_model": None, "_modules": set(), "_keep": None, "_groups": [], "_running": [], "_within": {}}
        own |= {"_strangers": set(), "_shared": SimpleNamespace(now=None), "_cells": [], "_in_cells": 0}
        return {**super().__getstate__(), **self._records(), **own}

    def remove(self) -> None:
        try:
            super().remove()
        finally:
            self._within.clear()  # it may lead to what a call was given
            self._no_shortcuts()  # a forward may have been interrupted, or be running
            self._noted()
            if self._model is not None:  # it may go, what was kept stays
                for names in [names for _, names in self._groups if not self._forwards]:
                    self._silent.update(dict.fromkeys(names, self._why_silent(names[0])))
                self._model, self._modules, self._groups = None, set(), []

    def _has_seen(self) -> bool:
        return bool(self._forwards or self._alone)

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
        self._usual = 0
        own, model, root = len(self._handles), self._model, uncompiled(self._model)
        try:
            # Hooks of this run alone, the last of their layers: whoever else listens there hears the output first.
            # Parameters that are gathered for a forward stay so, and grow stale, until that forward ends.
            self._whole = any(map(is_sharded, model.modules()))
            for module, _ in () if self._whole else self._groups:
                self._handles.append(module.register_forward_hook(own_hook(self._stop)))
            model(*args, **kwargs)
        except Exception:
            # The model may have caught our `Enough`, and raised an error of its own instead.
            if not self._stopped:
                raise
        finally:
            self._whole = self._stopped = False
            self._wanted.clear()
            while len(self._handles) > own:
                self._handles.pop().remove()
            if self._thread in self._running and not is_running(root):
                self._running.remove(self._thread)  # interrupted from the keyboard, which no hook hears of
            self._thread, self._task, _runs.of = 0, task, around
        return self

    # ---- the hooks ----

    def _look(self, name: str, output: Any) -> None:
        """What a hook does, whatever the case."""
        self._looked = True
        again = recomputing(self._task)
        # What runs after `Enough`, in a model that has caught it, no plain forward would have run.
        if (
            self._stopped
            or not self._handles
            or (again and self._detaches)
            or (self._whole and not self._wanted)
        ):
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
            blame_keep(error, name)
            raise
        if again:
            return
        if self._running:
            self._to_log()
            self._log.append((name, kept, versions_of(kept)))
        else:  # outside a forward of the model
            self._record_alone(name, (kept, versions_of(kept)))
        if self._wanted and self._runs_here():
            self._wanted.discard(name)

    def _record_alone(self, name: str, record: tuple[Any, Any]) -> None:
        """The outermost call of a part of the model counts as a forward: `vae.encode` calls `vae.encoder`."""
        self._ready = False
        call, known = outermost(self._modules), self._within.get(name)
        if call is None or known is None or known() is not call():
            self._alone[name] = []
            self._within[name] = call
        self._alone[name].append(record)

    @eager
    def _stop(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._wanted and graph_task() in (NO_BACKWARD, self._task) and self._runs_here():
            self._stopped = True
            raise Enough

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
            self._usual = 0
        return thread in self._strangers

    @eager
    def _begin(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any] = {}) -> None:
        # In line, since beside a small model each call counts: a forward that nothing else runs around or beside. First
        # one in which no output need be looked at.
        thread, running = get_ident(), self._running
        if self._ready:
            self._ready = False
            if (
                not (is_grad_enabled() or is_inference_mode_enabled())
                and thread == self._home
                and graph_task() == NO_BACKWARD
                and all_fresh(args)
                and not (kwargs and not all_fresh(kwargs.values()))
            ):
                if self._log:
                    self._log.clear()
                    self._sorted = NOTHING
                if self._large:
                    self._empty_cells()
                self._assumed, self._node = True, next_node()
                # One object: the hooks ask whether it is the same.
                self._forwards = self._in_cells = self._shared.now = self._forwards + 1
                running.append(thread)
                return
        if (
            not (running or self._strangers or self._thread)
            and thread == self._home
            and self._handles
            and graph_task() == NO_BACKWARD
        ):
            grad, frozen = is_grad_enabled(), is_inference_mode_enabled()
            if not (is_tracing() or (grad and outer_hooks() is not None)):
                super()._begin_anew()
                if self._in_cells:
                    self._empty_cells()
                if self._within:
                    self._within.clear()
                if not grad:
                    self._looked, self._node = False, next_node()
                (self._frozen if frozen else self._quick).append(grad)
                running.append(thread)
                self._lone = True
                return
        self._lone = False
        # Where that forward calls the model again, or another thread does, or it was interrupted.
        if self._to_log() and thread == self._home and called_by_itself(module) and self._node != next_node():
            self._doubt()
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
            self._usual = 0
            self._strangers.intersection_update(sys._current_frames())
        super()._begin_anew()
        self._empty_cells()
        self._within.clear()
        self._no_shortcuts()
        self._looked, self._node = False, next_node()
        # A trace by torch.jit runs the forward again, without grad, and compares: it wants no `detach` both times.
        if not self._wanted and not self._strangers and not is_tracing():
            (self._frozen if is_inference_mode_enabled() else self._quick).append(is_grad_enabled())

    @eager
    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        running, shared = self._running, self._shared
        # The forward that `_begin` has told in line, so no more need be asked. Another thread may be computing again.
        if shared.now is not None and get_ident() == self._home:
            running.clear()
            shared.now = None
            if self._node == next_node():
                self._ready = True
            else:
                self._doubtful = len(self._noted()) != self._usual
                self._doubt()
            return
        if self._lone and get_ident() == self._home:
            running.clear()
        else:
            thread = get_ident()
            if thread in self._strangers and not called_by_itself(module):
                self._strangers.discard(thread)
            if thread not in running or recomputing(self._task):
                return
            running.remove(thread)
            if running:
                return
        if self._quick == [False]:
            self._learn(args, output)
        else:
            self._usual = 0
        self._no_shortcuts()
        self._ready = self._usual > 0 and not (self._strangers or self._thread or self._alone)

    def _no_shortcuts(self) -> None:
        self._lone = self._ready = False
        self._quick.clear()
        self._frozen.clear()
        self._to_log()

    def _to_log(self) -> bool:
        """From now on the outputs of the forward that runs go to the log; True if they did not before."""
        if self._shared.now is None:
            return False
        self._shared.now = None
        self._noted()
        return True

    def _noted(self) -> deque[tuple[str, Any, Any]]:
        if self._in_cells:
            records = [record for cell in self._cells for record in cell(self._in_cells)]
            self._log.clear()
            self._log.extend(records)
            if self._shared.now is None:  # else there will be more
                self._empty_cells()
        return self._log

    def _empty_cells(self) -> None:
        self._in_cells = 0
        for cell in self._cells:
            cell(0)

    # ---- forwards in which outputs need not be looked at ----
    # Without grad most layers return a new tensor, without a graph and of version 0, in every forward. To ask each output
    # costs as much as to note it; so it is noted as it comes once a whole forward was like that, if what shows the contrary
    # for all of them at once does not: an input that has been edited or has a graph, a Node that was made, on reading the
    # version.

    def _learn(self, args: tuple, output: Any) -> None:
        """A forward without grad has ended: were all its outputs such tensors? After vain looks it is looked less often."""
        self._usual = 0
        if not (self._detaches and self._steady and not self._looked):
            return
        again = self._vain & (self._vain - 1) == 0  # 0 or a power of two
        if again and next_node() == self._node and all_new(self._log, (*args, output)):
            self._usual, self._vain = len(self._log), 0
            self._large = sum(kept.numel() * kept.element_size() for _, kept, _ in self._log) > SMALL
        else:
            self._vain += 1

    def _look_again(self) -> None:
        self._usual, self._ready = 0, False

    def _doubt(self) -> None:
        """A graph was made after all: let it go. Calls are believed only if they are as many as ever."""
        records = [
            (name, kept.detach() if kept.__class__ is Tensor else kept, version)
            for name, kept, version in self._noted()
        ]
        self._log.clear()
        self._log.extend(records)
        self._steady, self._usual = False, 0

    def _why_silent(self, name: str) -> str:
        watched = [module for module, names in self._groups if name in names]
        root = [uncompiled(self._model)] if self._model is not None else []
        return super()._why_silent(name) or refuse.why_silent([*root, *watched])


@eager
def _arrived(kept: Tensor, grad: Tensor | None) -> None:
    if grad is not None and not is_legacy_batchedtensor(grad) and not is_batchedtensor(grad):
        try:
            kept.grad = grad.detach() if grad.requires_grad else grad
        except RuntimeError:  # a nested tensor of the strided layout has no place for one
            if not kept.is_nested:
                raise


def with_grad(tensor: Tensor, copy: bool = True) -> Tensor:
    """For `keep`: a copy of the output without its graph, whose `.grad` becomes the gradient of the last backward.

    The gradient is taken by a tensor hook on the output: cheaper than a full backward hook. The copy and
    its gradient are right where the next layer works in place, unless the output is a view (of `nn.Flatten` or
    `nn.InstanceNorm2d`, say): autograd then goes round it, and `.grad` stays None, as it does under a reentrant
    checkpoint, under `torch.vmap`, for gradients that come in batches (`is_grads_batched=True`) and for strided
    nested tensors. It is the gradient as it arrives: hooks that are registered on the output later do not change it (with
    `copy=False` they do). Of a layer that returns its input as it is (`nn.Identity`) the gradient is that of the tensor, from
    all its uses. An output that is a leaf (an `nn.Identity` on your own input) has a `.grad` of its own: read that one;
    nothing is hooked here.

    Args:
        tensor: any shape, dtype and device.
        copy: False, as `keep=functools.partial(with_grad, copy=False)`, costs less: no memory for a copy, and no
            Python in backward. The output itself is kept, with its graph, and `Tensor.retain_grad` fills its
            `.grad`, which adds up over backwards. It cannot be read once a later layer has edited it in place.

    Returns:
        A detached copy. Its `.grad`, None until a gradient arrives, has the same shape; a second backward
        replaces it (`pickle` leaves it out: save `f["layer4"].grad` itself). The gradient is not copied: layers whose
        outputs are added share one, so do not edit it.

    Raises:
        TypeError: `tensor` is not a tensor; give the function itself, `keep=with_grad`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> with features(model, "0", keep=with_grad) as f:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> f["0"].grad.shape
        torch.Size([2, 3])
    """
    try:
        if not copy:
            if tensor.requires_grad:
                tensor.retain_grad()
            return tensor
        kept, node = tensor.data.clone(), tensor.grad_fn
    except RuntimeError:  # there is no `.data` under vmap
        return tensor.detach().clone()
    except AttributeError:
        raise TypeError(
            f"with_grad: expected a tensor, found {type(tensor).__name__}; use it as features(model, ..., keep=with_grad)"
        ) from None
    if node is not None:
        arrived = partial(_arrived, kept)  # in half the time that a function of its own, marked, would take
        if tensor._backward_hooks is None:
            # tensor.register_hook without its checks and its handle, with which it takes longer than an nn.ReLU. The
            # dictionary, made empty and then filled, takes half as long as one made full.
            tensor._backward_hooks = hooks = OrderedDict()
            hooks[OURS] = arrived
            node._register_hook_dict(tensor)
        else:
            tensor.register_hook(arrived)
    return kept


@eager
def features(
    model: nn.Module,
    *patterns: str | type[nn.Module],
    keep: Callable[[Tensor], Any] = torch.Tensor.detach,
) -> Features:
    """The outputs of layers in the middle of a model, by name.

    The hooks are installed at once. Use `with`, or call `.remove()`, to take them off again; what was kept stays.

    Args:
        model: the module to run.
        *patterns: which layers, as in `select`. Containers that are never called (`nn.ModuleList`) are left out,
            and TorchScript modules (scripted ones take no hooks).
        keep: what to keep of each output tensor, any shape, dtype and device. By default the tensor without its
            graph, in the same memory; `lambda t: t.detach().clone()` for a copy. What `keep` is given has its graph:
            `lambda t: t.mean((2, 3))` without `detach` keeps that, and everything behind it, as `lambda t: t` does on
            purpose. `with_grad` keeps the gradient, too. In nested tuples, lists, dicts, dataclasses and a
            `TensorDict` it is applied to each tensor; objects of other classes are kept as they are, with their
            graph (the cache of a transformer: run that with `use_cache=False`).
            What is kept under `torch.vmap` belongs to that transform, and cannot be read after it. Under checkpointing
            `keep` runs in the recomputation too, where what it returns is dropped: if it draws random numbers, let the
            block begin before the forward and end after backward.

    Returns:
        A `Features`, a read-only mapping. `f["layer4"]` is the last output of the layer, `f.calls["layer4"]` a list
        of all of the last forward (a layer may be called several times). A new forward of the model begins anew, and
        so does, for its layers, a call of a part of it from outside (`vae.encoder(x)`); what runs in a backward
        (recomputation under checkpointing, the adjoint of a solver) is not counted (except in threads that a layer
        starts inside a reentrant checkpoint). Forwards of several threads at the same time count as one.
        `f.run(*args, **kwargs)` runs the model, stops it as soon as every layer has been called once, and returns `f`;
        forwards in other threads do not count then, nor does ever the `run` of other features in another thread. Under
        FSDP, and where `accelerate` has hooked a layer, that forward goes to its end. Under `nn.DataParallel` give the
        wrapper. A deep copy of the model that is made inside the block is not watched; one of this object
        holds what was kept so far. After a forward that was interrupted from the keyboard call the model once before a
        part of it.

    Raises:
        KeyError: a pattern matches nothing. On reading: a name that was not asked for, or a layer that the
            last forward did not call.
        TypeError: `model` is no module, a pattern is no name or class, or `keep` cannot be called.
        ValueError: no pattern, or a layer that has no forward.
        RuntimeError: on reading a feature that a later layer has overwritten in place. The version counter shows it;
            inference tensors have none, and only a change of their shape is found. Of what `keep` takes out of the tensor
            (`t.numpy()`, `t.data`) no edit is found: copy it there. After a forward without grad that made a graph inside, and
            returned another number of outputs than those before it, which made none: run the model again. Also when entered
            again after its hooks were removed.

    Compile a model inside the block: what is compiled is interrupted at each hook, which `fullgraph=True` refuses. One
    that is compiled already may ignore hooks; a warning says so, at the end of the block where the compiled one is
    around `model`. Not where a compiled function calls it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> with features(model, "1") as f:
        ...     _ = f.run(torch.zeros(2, 4))
        >>> f["1"].shape
        torch.Size([2, 3])

    Source: built on [`Module.register_forward_hook`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook).
    """
    refuse.not_callable("features", "keep", keep, "torch.Tensor.detach")
    return Features(model, callable_layers("features", model, patterns), keep)
