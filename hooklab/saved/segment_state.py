"""Computing a segment again begins from the state in which its forward began."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from hooklab._support.packing import has_memory, refuse_edited

__all__ = ["State", "copy_of", "version_of"]

SMALL = 4096  # numbers
Flags = list[tuple[Any, str, Any]]  # of modules and parameters: attributes and their values
# Buffers (of the kind "_buffers") or parameters, by their owner, their kind and their name there.
Named = dict[tuple[nn.Module, str, str], Tensor | None]


class State:
    """Computing a segment again starts from the state that its forward found: of the buffers it changes copies only.

    So running statistics are updated once, and a buffer that the output depends on has its old value again; and
    so have `training`, `requires_grad`, and whether a Sequential inside runs in segments. What blocks note in
    attributes meanwhile, a loss or a count, goes again. The parameters are those of the forward, which
    `torch.func.functional_call` gives for a while, and `parametrize.cached()` computes once.
    """

    def __init__(self, segment: list[nn.Module]):
        self.owners = list(dict.fromkeys(module for block in segment for module in block.modules()))
        self.parameters = self.named("_parameters")
        places = [(one, "training") for one in self.owners]
        places += [(one, "__class__") for one in self.owners if isinstance(one, nn.Sequential)]
        places += [(p, "requires_grad") for p in self.parameters.values() if p is not None]
        self.flags: Flags = [(one, name, getattr(one, name)) for one, name in places]
        self.cached = parametrize._cache_enabled, dict(parametrize._cache)

    def named(self, kind: str) -> Named:
        return {(m, kind, name): tensor for m in self.owners for name, tensor in getattr(m, kind).items()}

    def put(self, flags: Flags, tensors: Named) -> None:
        for one, name, value in flags:
            if getattr(one, name) is not value:
                setattr(one, name, value)
        # A forward may register a buffer.
        for module, kind, name in self.named("_buffers").keys() - tensors.keys():
            del getattr(module, kind)[name]
        for (module, kind, name), tensor in tensors.items():
            getattr(module, kind)[name] = tensor

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the forward: notes which buffers it changes, and what they were."""
        found, self.failed = self.named("_buffers"), ()
        # The forward may itself take a derivative, for which this is computed again.
        self.used, self.buffers = {}, _copied(found)
        try:
            yield
        except BaseException as error:  # a graph that ends in an error may be used, too
            self.failed = type(error)
            raise
        finally:
            # Of these there is no copy, but the version and the memory that the forward has used.
            unchanged = {place: b for place, b in found.items() if _is_as_before(b, self.buffers[place])}
            self.buffers |= unchanged
            used = (*self.named("_parameters").values(), *unchanged.values())
            self.used = {tensor: _mark(tensor) for tensor in used if _is_there(tensor)}

    def refuse_edits(self) -> None:
        """RuntimeError if what has no copy is no longer what the forward has used."""
        for tensor, (version, memory) in self.used.items():
            what = f"a {'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {list(tensor.shape)}"
            version_now, memory_now = _mark(tensor)
            if version_now != version:
                refuse_edited(what, version_now, version)
            if memory and memory_now and memory_now != memory:
                ways = "`.data = ...`, vector_to_parameters, model.to"
                found = f"{what} was given other memory between forward and backward ({ways})"
                raise RuntimeError(f"checkpoint_segments: {found}; run backward before that")

    @contextmanager
    def again(self, inputs: tuple[Any, ...]) -> Iterator[None]:
        """Around computing it again, from these inputs."""
        self.refuse_edits()
        copies = _copied(self.buffers)  # memory may be full: nothing is replaced yet
        flags, (enabled, cache) = list(self.flags), self.cached
        if enabled or parametrize._cache_enabled:  # else it is left to other threads
            flags += [(parametrize, "_cache_enabled", enabled), (parametrize, "_cache", dict(cache))]
        now = [(one, name, getattr(one, name)) for one, name, _ in flags]
        parameters, buffers = _own(self.named("_parameters")), self.named("_buffers")
        given = {place: p for place, p in _own(self.parameters).items() if place in parameters}
        tensors = [one for one in (*inputs, *self.parameters.values()) if isinstance(one, Tensor)]
        with _undone(self.owners, tensors):
            try:
                self.put(flags, given | copies)
                yield
            except self.failed:
                pass  # as in the forward; all that it has saved is there by then
            finally:
                self.put(now, parameters | buffers)


@contextmanager
def _undone(modules: list[nn.Module], tensors: list[Tensor]) -> Iterator[None]:
    """What is noted meanwhile in attributes and lists of the modules, and which hooks the tensors get, goes again."""
    noted = [(vars(one), dict(vars(one))) for one in modules]
    lists = [(item, list(item)) for own, _ in noted for item in own.values() if type(item) is list]
    hooks = [(tensor, dict(tensor._backward_hooks or {})) for tensor in tensors]
    try:
        yield
    finally:
        for own, old in noted:
            for name in own.keys() - old.keys():
                del own[name]
            own.update(old)
        for item, old in lists:
            item[:] = old
        for tensor, old in hooks:
            if tensor._backward_hooks is not None:
                tensor._backward_hooks.clear()
                tensor._backward_hooks.update(old)


def _is_there(tensor: Tensor | None) -> bool:
    return tensor is not None and not nn.parameter.is_lazy(tensor)


def _own(parameters: Named) -> Named:
    """Without those that are gathered for each forward, as by `fully_shard`: these are of the class DTensor."""
    return {place: p for place, p in parameters.items() if type(p).__name__ != "DTensor"}


def _copied(buffers: Named) -> Named:
    """Each is copied once, though it may have several names."""
    copies = {b: copy_of(b) for b in set(buffers.values()) if _is_there(b)}
    return {place: copies.get(b, b) for place, b in buffers.items()}


def _is_as_before(buffer: Tensor | None, old: Tensor | None) -> bool:
    """True of a large one that was not changed; what cannot be compared counts as changed."""
    return has_memory(old) and old.numel() > SMALL and not old.is_meta and torch.equal(old, buffer)


def copy_of(tensor: Tensor) -> Tensor:
    """The same content in memory of its own, without a graph; it requires a gradient where `tensor` does."""
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy  # within jvp that cannot be asked for


def version_of(tensor: Tensor) -> int | None:
    """None of inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def _mark(tensor: Tensor) -> tuple[int | None, StorageWeakRef | None]:
    """Its version, and the memory that `.data = ...` replaces; None where there is none, or it is gathered for each use."""
    return version_of(tensor), StorageWeakRef(tensor.untyped_storage()) if has_memory(tensor) else None
