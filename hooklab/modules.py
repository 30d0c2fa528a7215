"""Part 2 of the course: find the layers of a model, watch them run, keep what they return."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from hooklab import _refuse
from hooklab._compiler import eager, eager_inside
from hooklab._features import Features
from hooklab._installed import Installed
from hooklab._layer_statistics import LayerStatistics
from hooklab._select import callable_layers, chosen, down_to, is_sharded
from hooklab._verbose import Verbose

__all__ = ["clip_gradients", "features", "layer_statistics", "select", "verbose", "with_grad"]

OURS = -1  # the number of a hook that has no handle; those of handles begin at 0


def select(model: nn.Module, *patterns: str | type[nn.Module]) -> dict[str, nn.Module]:
    """The layers of a model by name, by pattern or by class.

    Args:
        model: any module; of a compiled one the layers inside are meant.
        *patterns: exact names (`"layer1.0.conv1"`; `""` is the model itself); patterns in which `*` stands
            for text without a dot and `**` for any text, also across dots (`"layer*.0.conv1"`, `"**.relu"`);
            Module classes (`nn.Conv2d`, subclasses included).

    Returns:
        The modules by name: in the order of the patterns, for each in the order of the model, every name
        once. A module with several names is there under each of them.

    Raises:
        KeyError: a pattern matches nothing; the message gives the closest names.
        TypeError: `model` is no module, or a pattern is none of the three.
        ValueError: no pattern was given.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> list(select(model, nn.Linear)), list(select(model, "1"))
        (['0', '2'], ['1'])

    Source: [`nn.Module.named_modules`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.named_modules).
    """
    return chosen("select", model, patterns)


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
    depth = _refuse.count("verbose", "depth", depth)
    _refuse.not_callable("verbose", "write", write, "print, or lines.append of a list")
    if not patterns:
        _refuse.no_module("verbose", model)
        patterns = down_to(depth, model)
    return Verbose(model, callable_layers("verbose", model, patterns), write)


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
    _refuse.not_callable("features", "keep", keep, "torch.Tensor.detach")
    return Features(model, callable_layers("features", model, patterns), keep)


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
    _refuse.no_choice("layer_statistics", "of", of, ("output", "grad_output"))
    bins = _refuse.count("layer_statistics", "bins", bins)
    range = _refuse.interval("layer_statistics", "range", range)
    return LayerStatistics(callable_layers("layer_statistics", model, patterns), of, bins, range)


@eager_inside
def clip_gradients(model: nn.Module, min: float | None = None, max: float | None = None) -> Installed:
    """Move every entry of every parameter's gradient into [min, max], in every backward.

    A tensor hook on each parameter that requires a gradient now. It clips what one backward brings (of a reentrant
    checkpoint each part by itself), before it is added to `.grad`; `torch.nn.utils.clip_grad_value_` clips the sum
    afterwards. A parameter that takes the place of one later (`load_state_dict(..., assign=True)`, a new layer) is not
    clipped. Under a `GradScaler` what arrives is still scaled, and an inf, by which it knows an overflow, is clipped too:
    take `clip_grad_value_` after `unscale_` there.

    Args:
        model: the module whose parameters are hooked.
        min: the lower bound, or None for none. One number alone is this one: for ±1 write
            `clip_gradients(model, -1, 1)`.
        max: the upper bound, or None for none.

    Returns:
        An object with `.remove()`, also for `with`. NaN entries stay NaN; sparse gradients are refused by
        `torch.clamp` when they arrive.

    Raises:
        TypeError: `model` is no module, a bound is no real number, or both are missing.
        ValueError: `min` > `max`, a bound is NaN, no parameter requires a gradient, or one is complex, not made
            yet (`nn.LazyLinear`) or sharded.
        RuntimeError: entered again after its hooks were removed.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with clip_gradients(model, -1, 1):
        ...     model(torch.tensor([[5.0, -0.5]])).sum().backward()
        >>> model.weight.grad
        tensor([[ 1.0000, -0.5000]])

    Source: [`Tensor.register_hook`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html),
    [`torch.clamp`](https://docs.pytorch.org/docs/stable/generated/torch.clamp.html).
    """
    _refuse.no_module("clip_gradients", model)
    bounds = _refuse.bounds("clip_gradients", min, max)
    params = _clippable(model)

    def clip_hook(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.clamp(**_refuse.within(bounds, grad.dtype))

    clipped = ClipGradients()
    try:
        for param in params:
            clipped._handles.append(param.register_hook(clip_hook))
    except BaseException:
        clipped.remove()
        raise
    return clipped


class ClipGradients(Installed):
    """Hooks that clip: what `clip_gradients` returns."""


def _clippable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient; refused where a hook on them could not clip it."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        found = "no parameter" if next(model.parameters(), None) is None else "only frozen parameters"
        raise ValueError(
            f"clip_gradients: found {found} in this {type(model).__name__}, so there is no gradient to clip; "
            "call requires_grad_() on what should train, before clip_gradients"
        )

    if any(param.is_complex() for param in params):
        raise ValueError(
            f"clip_gradients: {type(model).__name__} has complex parameters, and complex numbers have no order; "
            "bound their size instead: torch.nn.utils.clip_grad_norm_ after backward"
        )
    if any(map(is_sharded, model.modules())):
        raise ValueError(
            f"clip_gradients: the parameters of {type(model).__name__} are sharded (FSDP), and hooks on them "
            "never fire; call torch.nn.utils.clip_grad_value_ after backward"
        )
    return params
