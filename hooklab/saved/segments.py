"""Sequentials and ModuleLists in segments: the input of each is saved, the rest is recomputed in backward."""

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hooklab._support import refuse
from hooklab._support.handles import Installed
from hooklab._support.nested import is_data, map_tensors, shapes, tensors_in
from hooklab._support.packing import has_memory, refuse_edited
from hooklab._support.torch_private import cached_parametrizations, hook_ids, uncompiled

__all__ = ["Segments", "checkpoint_segments", "run_saving_input"]

HOLE = torch.empty(0, device="cpu")  # stands for a tensor that a call was given


def checkpoint_segments(model: nn.Module, plan: Mapping[str, int]) -> "Segments":
    """Save only the input of each segment of a Sequential or ModuleList, and recompute the rest in backward.

    Less memory for about a third more time. Gradients, buffers and random numbers are those of plain training, bit for
    bit. A block must compute the same the second time: keep its state in buffers.

    Args:
        model: any module.
        plan: blocks per segment by the name of a Sequential: `{"layer1": 1, "layer2": 2}`; `""` is the model itself.
            Of an `nn.ModuleList`, whose owner calls the blocks, each block is a segment: `{"h": 1}`.

    Returns:
        A handle: the end of its `with`, or `.remove()`, switches the layers back. Inside `Offload` the inputs of
        the segments are moved.

    Raises:
        KeyError, TypeError, ValueError: no such layer, no plain Sequential or ModuleList, or a number below 1; nothing
            is changed.
        RuntimeError: in forward, if a segment edits its input in place; in backward, if a parameter was edited
            since forward, as in plain PyTorch.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))
        >>> with checkpoint_segments(model, {"0": 1}):
        ...     model(torch.ones(3, 2)).sum().backward()

    Limits: docs/limits.md#checkpoint_segments. Source: [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html).
    """
    refuse.no_module("checkpoint_segments", model)
    return Segments(model, plan)


class Segments(Installed):
    """What `checkpoint_segments` returns."""

    _gone = "its layers have been switched back"

    def __init__(self, model: nn.Module, plan: Mapping[str, int]):
        super().__init__("checkpoint_segments")
        if not isinstance(plan, Mapping):
            wanted = 'names to blocks per segment, {"layer1": 1, "layer2": 2}'
            raise TypeError(f"checkpoint_segments: plan should map {wanted}; found {type(plan).__name__}")
        if not plan:
            raise ValueError('checkpoint_segments: the plan is empty; name a Sequential, {"layer1": 2}')
        modules = dict(uncompiled(model).named_modules(remove_duplicate=False))
        with self._all_or_none():
            for name, blocks in plan.items():
                module = _plannable(modules, name)
                blocks = refuse.count("checkpoint_segments", f"plan[{name!r}]", blocks, least=1)
                if isinstance(module, nn.ModuleList):
                    self._handles += _switched_blocks(name, module, blocks)
                else:
                    self._handles.append(Switched(name, module, blocks))

    def __exit__(self, *exc_info: object) -> None:
        idle = [one.name for one in self._handles if not one.called]
        self.remove()
        if idle and exc_info[0] is None:
            why = "was the model run inside the block, and does it call these layers as a whole?"
            warnings.warn(f"checkpoint_segments: never called: {refuse.listed(idle)}; {why}", stacklevel=2)

    def __repr__(self) -> str:
        parts = (f"{one.name or repr(one.name)}: {one.blocks}" for one in self._handles)
        return f"Segments({', '.join(parts) or 'removed'})"


class Switched:
    """A Sequential of the plan: until `.remove()` this object is its forward."""

    def __init__(self, name: str, module: nn.Module, blocks: int):
        self.name, self.blocks, self.called = name, blocks, False
        self._module = weakref.ref(module)  # the module holds this object, and would hold itself
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        self.called = True
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            inside = "torch.compile (which has its own way to recompute) or torch.export"
            advice = (
                "remove it before, or compile what is inside the segments: for block in model.layer1: block.compile()"
            )
            raise NotImplementedError(f"checkpoint_segments does not work inside {inside}; {advice}")
        return self.run(module, *args, **kwargs)

    def run(self, module: Any, input: Any) -> Any:
        blocks, size = list(module), self.blocks
        for start in range(0, len(blocks), size):
            # The first block of the next segment edits what this one may merely pass on: its own input.
            in_place = any(getattr(block, "inplace", False) for block in blocks[start::size][:2])
            input = run_saving_input(nn.Sequential(*blocks[start : start + size]), input, copies=in_place)
        return input

    def remove(self) -> None:
        """Put the forward of its class back."""
        module = self._module()
        if module is not None and vars(module).get("forward") is self:
            del vars(module)["forward"]

    def __reduce__(self) -> Any:
        """A copy of the module, also a pickled one, has the forward of its class."""
        return getattr, (self._module(), "forward")


class SwitchedBlock(Switched):
    """A block of a ModuleList: its owner calls it with any arguments, and their tensors are saved."""

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_data([*args, *kwargs.values()]):
            found = ", ".join(shapes(one) for one in (*args, *kwargs.values()) if not is_data(one))
            wanted = "tensors, numbers and text, also in lists, tuples and dicts; leave it out of the plan"
            hint = " (of transformers: a cache; use_cache=False)" if "Cache" in found else ""
            raise TypeError(f"checkpoint_segments: {self.name!r} was given {found}{hint}; expected {wanted}")
        segment = nn.Sequential(Call(module, args, kwargs))
        return run_saving_input(segment, tuple(tensors_in((args, kwargs))), copies=getattr(module, "inplace", False))


class Call(nn.Module):
    """One call of a block, as a module whose input is the tuple of all its tensors."""

    def __init__(self, block: nn.Module, *call: Any):
        super().__init__()
        self.block, self.first, self.call = block, [call], map_tensors(lambda tensor: HOLE, call)

    def forward(self, tensors: tuple[Tensor, ...]) -> Any:
        given = iter(tensors)
        # Forward is given its caller's own lists and dicts, which a block may fill; a recomputation has new ones.
        args, kwargs = self.first.pop() if self.first else map_tensors(lambda hole: next(given), self.call)
        return type(self.block).forward(self.block, *args, **kwargs)


def run_saving_input(segment: nn.Sequential, input: Any, copies: bool) -> Any:
    """What the segment returns; for backward only its input is saved, and the rest recomputed."""
    first = segment[0].block if isinstance(segment[0], Call) else segment[0]
    several, where = type(input) is tuple, f"the segment that begins with {type(first).__name__}"
    inputs = input if several else (input,)
    if not all(isinstance(one, Tensor) for one in inputs):
        wanted = "a tensor, or a tuple of tensors; leave it out of the plan"
        raise TypeError(f"checkpoint_segments: {where} was given {type(input).__name__}; expected {wanted}")
    start, given = Start(segment), [input]

    def run(*again: Tensor) -> Any:
        if cached_parametrizations():
            cached = "torch.nn.utils.parametrize.cached(), whose weights may not be the same in backward"
            raise RuntimeError(f"checkpoint_segments does not work inside {cached}; leave it out")
        if given:
            return segment.forward(given.pop())
        # A hook that a block puts on its input fires once: this input has no graph, and none will run through it.
        again = tuple(one.detach().requires_grad_(one.requires_grad) for one in again)
        again = tuple(one.clone() for one in again) if copies else again
        with start.restored() as buffers:
            return functional_call(segment, buffers, (again if several else again[0],))

    # An in-place block edits what the caller gave, as in plain training; a copy of that is saved.
    saved = [_copy(one) if copies else one for one in inputs]
    versions = [one._version for one in saved]
    # Early stop would leave a block half done, before it puts back what it changed or draws its last random numbers.
    output = checkpoint(run, *saved, use_reentrant=False, early_stop=False)
    if [one._version for one in saved] != versions:
        edits = "edits its input in place, and the input is what is saved"
        raise RuntimeError(f"checkpoint_segments: {where} {edits}; use inplace=False there, or another plan")
    if _registered(segment) != start.registered:
        what = "a parameter, a buffer or a hook on a parameter, and would do so again in backward"
        raise RuntimeError(f"checkpoint_segments: the forward of {where} registers {what}; do it before")
    return output


class Start:
    """What the forward of a segment began with: the recomputation begins with the same, or is refused."""

    def __init__(self, segment: nn.Sequential):
        self.segment, self.registered = segment, _registered(segment)
        self.buffers = {name: _copy(buffer) for name, buffer in segment.named_buffers()}
        self.parameters = [
            (name, one, one._version, _memory(one), one.requires_grad) for name, one in segment.named_parameters()
        ]
        modules = [vars(module) for module in segment.modules()]
        # A Sequential inside has a `forward` of its own where it runs in segments, too.
        self.flags = [(own, {name: own[name] for name in own.keys() & {"training", "forward"}}) for own in modules]

    @contextmanager
    def restored(self) -> Iterator[dict[str, Tensor]]:
        """A block for the recomputation, which is given the buffers; what blocks note in attributes is undone."""
        self.refuse_changes()
        noted = [(own, dict(own)) for own, _ in self.flags]
        lists = [(item, list(item)) for own, _ in noted for item in own.values() if type(item) is list]
        try:
            for own, flags in self.flags:
                own.update(flags)
            yield {name: _copy(buffer) for name, buffer in self.buffers.items()}
        finally:
            for own, before in noted:
                for name in own.keys() - before.keys():
                    del own[name]
                own.update(before)
            for item, items in lists:
                item[:] = items

    def refuse_changes(self) -> None:
        """RuntimeError if a parameter is not as forward has used it."""
        now = dict(self.segment.named_parameters())
        for name, parameter, version, memory, needs_grad in self.parameters:
            what, change = f"a parameter {list(parameter.shape)}", ""
            if now.get(name) is not parameter:
                change = "is another tensor than in forward (functional_call and fully_shard lend one for a while)"
            elif parameter._version != version:
                refuse_edited(what, parameter._version, version)
            elif _memory(parameter) is not memory:
                change = "was given other memory since forward (`.data = ...`, vector_to_parameters, model.to)"
            elif parameter.requires_grad != needs_grad:
                change = "had its requires_grad changed since forward"
            if change:
                advice = "run backward before that, or put a torch.utils.checkpoint of your own around it"
                raise RuntimeError(f"checkpoint_segments: {what} {change}; {advice}")


def _memory(parameter: Tensor) -> weakref.ref | None:
    """Its storage, which `.data = ...` replaces; each storage has one weak reference, so `is` compares them."""
    return weakref.ref(parameter.untyped_storage()) if has_memory(parameter) else None


def _registered(segment: nn.Sequential) -> list[Any]:
    """The names of parameters and buffers, and the hooks on parameters."""
    names = [name for name, _ in (*segment.named_parameters(), *segment.named_buffers())]
    return [*names, *map(hook_ids, segment.parameters())]


def _copy(tensor: Tensor) -> Tensor:
    """The same values in memory of their own, without a graph."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _switched_blocks(name: str, module: nn.ModuleList, blocks: int) -> list[SwitchedBlock]:
    """The blocks of a ModuleList, each as a segment; an error unless all of them can be."""
    if blocks > 1:
        one = f"calls its blocks one by one: 1 block per segment, {{{name!r}: 1}}"
        raise ValueError(f"checkpoint_segments(plan[{name!r}]={blocks}): the owner of a ModuleList {one}")
    named = {f"{name}.{number}".lstrip("."): block for number, block in module.named_children()}
    for name, block in named.items():
        if getattr(block.forward, "__func__", None) is not type(block).forward:
            own = "a forward of its own, put there by a wrapper or another plan; remove that first"
            raise ValueError(f"checkpoint_segments: {name!r} has {own}")
    return [SwitchedBlock(name, block, 1) for name, block in named.items()]


def _plannable(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The Sequential or ModuleList of this name; an error unless it runs its blocks one after the other."""
    if name not in modules:
        sequentials = [name for name, module in modules.items() if isinstance(module, nn.Sequential | nn.ModuleList)]
        deeper = [one for one in modules if one.endswith(f".{name}")]
        close = get_close_matches(str(name), modules) or deeper[:5] or sequentials[:5]
        shown = refuse.listed(close) or "no Sequential in this model"
        raise KeyError(f"checkpoint_segments: no layer is called {name!r}; close: {shown}")
    module: Any = modules[name]
    if isinstance(vars(module).get("forward"), Switched):
        again = "runs in segments already, perhaps under another name; remove that first"
        raise ValueError(f"checkpoint_segments: {name!r} {again}")
    if any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
        raise ValueError(f"checkpoint_segments: {name!r} has a lazy layer; run the model once before")
    # What copies and pickles of a switched Sequential have in `forward` is the method of the class.
    if isinstance(module, nn.ModuleList) or getattr(module.forward, "__func__", None) is nn.Sequential.forward:
        return module
    found = type(module).__name__
    if isinstance(module, nn.Sequential):
        found += " with a forward of its own"
    wanted = "a Sequential, whose blocks run one after the other, or a ModuleList"
    raise TypeError(f"checkpoint_segments: {name!r} should be {wanted}; found {found}")
