"""How `checkpoint_segments` works: a Sequential that saves its input now and then, and computes the rest again."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hooklab import _refuse
from hooklab._compiler import compiling
from hooklab._packing import has_memory, is_plain, refuse_edited
from hooklab._select import uncompiled
from hooklab._walk import within

__all__ = ["Segments"]

SMALL = 4096  # numbers
MAX_PARTS = 10_000  # of an object that is an input
Flags = list[tuple[Any, str, Any]]  # of modules and parameters: attributes and their values
# Buffers or parameters, by their owner and their name there.
Named = dict[tuple[nn.Module, str], Tensor | None]


class Segmented(nn.Sequential):
    """A Sequential whose blocks run in segments; only the input of each segment is saved.

    Every Sequential that is switched gets a subclass of its own: it holds what belongs to this one, and goes with it.
    """

    _hooklab_kind: type = nn.Sequential  # what it was, and will be again
    _hooklab_blocks: int  # in a segment; 0 once it runs plainly again
    _hooklab_called: list[bool]  # empty until it is

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(index, slice):
            part.__class__ = self._hooklab_kind
        return part

    def __reduce__(self) -> Any:
        """A copy, and what is pickled, is an ordinary Sequential: no handle knows it."""
        return object.__new__, (self._hooklab_kind,), vars(self)

    def forward(self, input: Any) -> Any:
        plain = not torch.is_grad_enabled() or not self._hooklab_blocks
        if not self._hooklab_called:
            self._hooklab_called.append(True)
            # The first forward of a lazy layer draws random numbers that no later one draws.
            lazy = [one for one in self.modules() if isinstance(one, LazyModuleMixin)]
            plain = plain or any(one.has_uninitialized_params() for one in lazy)
        if plain:
            return super().forward(input)
        blocks, size = list(self), self._hooklab_blocks
        for start in range(0, len(blocks), size):
            segment, after = blocks[start : start + size], blocks[start + size : start + size + 1]
            # A block in place edits what it is given; a block before it may hand that on from further up.
            copies = any(getattr(block, "inplace", False) for block in (segment[0], *after))
            input = run_saving_input(segment, input, copies)
        return input


def run_saving_input(segment: list[nn.Module], input: Any, copies: bool) -> Any:
    """What the segment returns; for backward only its input is saved, and the rest computed again."""
    if compiling():
        raise NotImplementedError(
            "checkpoint_segments does not work inside torch.compile (which has its own way to compute again) or "
            "torch.export; remove it before, or compile the blocks: for block in model.layer1: block.compile()"
        )
    leaves, spec = tree_flatten(input)  # a checkpoint guards tensors, and not what is inside a tuple
    leaves = list(map(_apart, leaves))
    if copies:  # are saved; the segment gets the input itself, as without us
        leaves = tree_map_only(Tensor, _copy, leaves)
    # Blocks may write into a list, a dict or an object: the first run has the caller's own, later ones a copy.
    given = [input]

    def run(*leaves: Any) -> Any:
        if copies and not given:
            leaves = tree_map_only(Tensor, torch.clone, leaves)  # what is saved may be wanted once more
        output = given.pop() if given else tree_unflatten(map(_apart, leaves), spec)
        if state.before is None:
            with state.first():
                return run_blocks(segment, output)
        with state.again(), _ended_in_torchscript():
            return run_blocks(segment, output)

    inputs = _tensors(leaves)
    versions = list(map(_version, inputs))
    state = State(segment)
    # Stopping early means stopping at the last save, and RReLU fills its noise after that.
    early = not any(
        isinstance(one, nn.RReLU) or getattr(one, "original_name", "") == "RReLU" for one in state.owners
    )
    output = checkpoint(run, *leaves, use_reentrant=False, early_stop=early)
    found = _tensors(leaves)
    if list(map(id, found)) != list(map(id, inputs)) or list(map(_version, found)) != versions:
        raise RuntimeError(
            f"checkpoint_segments: the segment that begins with {type(segment[0]).__name__} edits its input in "
            "place, or what an object in it holds, and the input is what is saved; use inplace=False there, or another plan"
        )
    return output


def run_blocks(segment: list[nn.Module], output: Any) -> Any:
    for block in segment:
        output = block(output)
    return output


@contextmanager
def _ended_in_torchscript() -> Iterator[None]:
    """The word that all is computed again loses its name on the way through TorchScript; it never had a text."""
    try:
        yield
    except RuntimeError as error:
        if "TorchScript interpreter" not in str(error) or not str(error).rstrip().endswith("RuntimeError:"):
            raise


def _apart(value: Any) -> Any:
    """A copy of an object of a class of its own, as `data.x = ...; return data` needs it."""
    if isinstance(value, Tensor | nn.Module):
        return value
    try:
        return copy.copy(value)
    except Exception:  # a lock, a file, a generator: there is only one
        return value


def _tensors(leaves: list[Any]) -> list[Tensor]:
    """Those that an input holds, also inside objects."""
    return [one for leaf in leaves for one in islice(within(leaf), MAX_PARTS) if isinstance(one, Tensor)]


def _version(value: Any) -> int | None:
    """None where there is none: of inference tensors, and of what is no tensor."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _memory(tensor: Tensor) -> StorageWeakRef | None:
    """What `.data = ...` replaces; None where there is no memory to speak of, or it is gathered for each use."""
    return StorageWeakRef(tensor.untyped_storage()) if has_memory(tensor) else None


class State:
    """Computing a segment again starts from the state that its forward found: of the buffers it changes copies only.

    So running statistics are updated once, and a buffer that the output depends on has its old value again; and
    so have `training`, `requires_grad`, and whether a Sequential inside runs in segments. What blocks note in
    attributes meanwhile, a loss or a count, goes again. The parameters are those of the forward, which
    `torch.func.functional_call` gives for a while, and `parametrize.cached()` computes once.
    """

    def __init__(self, segment: list[nn.Module]):
        self.owners = list(dict.fromkeys(module for block in segment for module in block.modules()))
        # Flags and the buffers, as the forward found them.
        self.before: tuple[Flags, Named] | None = None
        self.noted = [vars(one) for one in self.owners]  # what lies in their attributes
        self.parameters = self.own_parameters()
        self.cached = parametrize._cache_enabled, dict(parametrize._cache)

    def buffers(self) -> Named:
        return {(one, name): buffer for one in self.owners for name, buffer in one._buffers.items()}

    def own_parameters(self) -> Named:
        """Without those that are gathered for each forward, as by `fully_shard`: these are of the class DTensor."""
        found = ((one, name, p) for one in self.owners for name, p in one._parameters.items())
        return {(one, name): p for one, name, p in found if _is_there(p) and type(p).__name__ != "DTensor"}

    def flags(self) -> Flags:
        flags = []
        for one in self.owners:
            names = ("training", "__class__") if isinstance(one, nn.Sequential) else ("training",)
            flags += [(one, name, getattr(one, name)) for name in names]
            flags += [
                (p, "requires_grad", p.requires_grad) for p in one._parameters.values() if p is not None
            ]
        return flags

    def put(self, flags: Flags, buffers: Named) -> None:
        for one, name, value in flags:
            if getattr(one, name) != value:
                setattr(one, name, value)
        for module, name in self.buffers().keys() - buffers.keys():  # a forward may register one
            del module._buffers[name]
        for (module, name), buffer in buffers.items():
            module._buffers[name] = buffer

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the forward: notes which buffers it changes, and what they were."""
        flags, found = self.flags(), self.buffers()
        values = _copies(found)
        # The forward may itself take a derivative, for which this is computed again.
        self.used, self.before = {}, (flags, _replaced(found, values))
        try:
            yield
        finally:  # a graph that ends in an error may be used, too
            parameters = (p for one in self.owners for p in one._parameters.values() if _is_there(p))
            unchanged = [b for b, old in values.items() if b.numel() > SMALL and _equal(old, b)]
            # Of these there is no copy: with the version and the memory that the forward has used.
            self.used = {tensor: (_version(tensor), _memory(tensor)) for tensor in (*parameters, *unchanged)}
            values.update(zip(unchanged, unchanged, strict=True))
            self.before = flags, _replaced(found, values)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around computing it again."""
        for tensor, (version, memory) in self.used.items():
            what = f"a {'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {list(tensor.shape)}"
            if _version(tensor) != version:
                refuse_edited(what, tensor._version, version)
            if memory and (now := _memory(tensor)) and now != memory:
                raise RuntimeError(
                    f"checkpoint_segments: {what} was given other memory between forward and backward (`.data = ...`, "
                    "vector_to_parameters, model.to); run backward before that"
                )
        flags, before = self.before
        copies = _copies(before)  # memory may be full: nothing is replaced yet
        # Also of what has been replaced since then.
        now = self.flags() + [(one, name, getattr(one, name)) for one, name, _ in flags], self.buffers()
        noted = [dict(each) for each in self.noted]
        parameters, cached = self.own_parameters(), (parametrize._cache_enabled, parametrize._cache)
        in_use = self.cached[0] or cached[0]
        try:
            _swap({place: self.parameters.get(place, p) for place, p in parameters.items()})
            self.put(flags, _replaced(before, copies))
            if in_use:
                parametrize._cache_enabled, parametrize._cache = self.cached[0], dict(self.cached[1])
            yield
        finally:
            if in_use:
                parametrize._cache_enabled, parametrize._cache = cached
            _swap(parameters)
            self.put(*now)
            for each, old in zip(self.noted, noted, strict=True):
                for name in each.keys() - old.keys():
                    del each[name]
                each.update(old)


def _swap(parameters: Named) -> None:
    for (module, name), parameter in parameters.items():
        module._parameters[name] = parameter


def _is_there(tensor: Tensor | None) -> bool:
    return tensor is not None and not nn.parameter.is_lazy(tensor)


def _copies(buffers: Named) -> dict[Tensor, Tensor]:
    """One of each, though it may have several names."""
    return {b: _copy(b) for b in set(buffers.values()) if _is_there(b)}


def _replaced(buffers: Named, by: dict[Tensor, Tensor]) -> Named:
    return {place: by.get(buffer, buffer) for place, buffer in buffers.items()}


def _equal(old: Tensor, buffer: Tensor) -> bool:
    """What cannot be compared counts as changed."""
    return is_plain(old) and not old.is_meta and torch.equal(old, buffer)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class Segments:
    """The Sequentials that run in segments: what `checkpoint_segments` returns."""

    def __init__(self, model: nn.Module, plan: Mapping[str, int]):
        self._switched: dict[str, nn.Sequential] = {}
        try:
            for name, module in _checked(model, plan).items():
                kind = type(module)
                facts = {"_hooklab_kind": kind, "_hooklab_blocks": plan[name], "_hooklab_called": []}
                module.__class__ = type(kind.__name__, (Segmented, kind), facts)
                self._switched[name] = module
        except BaseException:
            self.remove()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model is an ordinary one: the copy of its handle has nothing to switch back."""
        return {"_switched": {}}

    def remove(self) -> None:
        """Let the Sequentials run as before. Twice is harmless."""
        while self._switched:
            _, module = self._switched.popitem()
            if Segmented in type(module).__bases__:
                module.__class__ = module._hooklab_kind
            else:  # it has another class above ours since then, as from `fully_shard`: that one stays
                type(module)._hooklab_blocks = 0

    def __enter__(self) -> "Segments":
        if not self._switched:
            raise RuntimeError(
                "checkpoint_segments: its Sequentials have been switched back; call checkpoint_segments again"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        idle = [name for name, module in self._switched.items() if not module._hooklab_called]
        self.remove()
        if idle and kind is None:
            warnings.warn(
                f"checkpoint_segments: never called: {_refuse.listed(idle)}; was the model run inside the block, and does "
                "it call these layers as a whole?",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        parts = (f"{name or repr(name)}: {module._hooklab_blocks}" for name, module in self._switched.items())
        return f"Segments({', '.join(parts) or 'removed'})"


def _checked(model: nn.Module, plan: Mapping[str, int]) -> dict[str, nn.Sequential]:
    """What the plan names; everything is checked before the first is switched."""
    if not isinstance(plan, Mapping):
        raise TypeError(
            'checkpoint_segments: plan should map names to blocks per segment, {"layer1": 1, "layer2": 2}; '
            f"found {type(plan).__name__}"
        )
    if not plan:
        raise ValueError('checkpoint_segments: the plan is empty; name a Sequential, {"layer1": 2}')
    modules, found = dict(uncompiled(model).named_modules(remove_duplicate=False)), {}
    for name, blocks in plan.items():
        module = _sequential(modules, name)
        _refuse.count("checkpoint_segments", f"plan[{name!r}]", blocks, least=1)
        if module in found.values():
            raise ValueError(
                f"checkpoint_segments: {name!r} is another name of a layer that the plan has already"
            )
        found[name] = module
    return found


def _sequential(modules: dict[str, nn.Module], name: str) -> nn.Sequential:
    """The Sequential of this name, refused unless it runs its blocks one after the other."""
    if name not in modules:
        sequentials = [name for name, module in modules.items() if isinstance(module, nn.Sequential)]
        deeper = [one for one in modules if isinstance(name, str) and one.endswith(f".{name}")]
        close = get_close_matches(str(name), modules) or deeper[:5] or sequentials[:5]
        shown = _refuse.listed(close) or "no Sequential in this model"
        raise KeyError(f"checkpoint_segments: no layer is called {name!r}; close: {shown}")
    module = modules[name]
    if isinstance(module, Segmented):
        again = (
            "remove that first"
            if module._hooklab_blocks
            else "and was sharded then; make a new model, and shard it first"
        )
        state = "runs" if module._hooklab_blocks else "once ran"
        raise ValueError(f"checkpoint_segments: {name!r} {state} in segments already; {again}")
    ordinary = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    if not ordinary or "forward" in vars(module):
        raise TypeError(
            f"checkpoint_segments: {name!r} should be a Sequential, whose blocks run one after the other; found "
            f"{_found(module)}"
        )
    return module


def _found(module: nn.Module) -> str:
    kind = type(module)
    if isinstance(module, nn.ModuleList):
        return (
            f"{kind.__name__}, whose owner calls the blocks in a loop of its own: put torch.utils.checkpoint there, or use "
            "the model's own switch (of transformers: model.gradient_checkpointing_enable())"
        )
    name = f"{kind.__module__}.{kind.__qualname__}" if kind.__name__ == "Sequential" else kind.__name__
    return f"{name} with a forward of its own" if isinstance(module, nn.Sequential) else name
