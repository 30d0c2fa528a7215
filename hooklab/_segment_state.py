"""Computing a segment again begins from the state in which its forward began."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from hooklab._packing import has_memory, is_plain, refuse_edited

__all__ = ["State", "copy_of", "version_of"]

SMALL = 4096  # numbers
Flags = list[tuple[Any, str, Any]]  # of modules and parameters: attributes and their values
# Buffers or parameters, by their owner and their name there.
Named = dict[tuple[nn.Module, str], Tensor | None]


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
        found = {(one, name): p for one in self.owners for name, p in one._parameters.items()}
        return {place: p for place, p in found.items() if type(p).__name__ != "DTensor"}

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
            self.used = {
                tensor: (version_of(tensor), _memory(tensor)) for tensor in (*parameters, *unchanged)
            }
            values.update(zip(unchanged, unchanged, strict=True))
            self.before = flags, _replaced(found, values)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around computing it again."""
        for tensor, (version, memory) in self.used.items():
            what = f"a {'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {list(tensor.shape)}"
            if version_of(tensor) != version:
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
        except RuntimeError as error:
            # The word that all is computed again loses its name on the way through TorchScript; it never had a text.
            message = str(error).rstrip()
            if "TorchScript interpreter" not in message or not message.endswith("RuntimeError:"):
                raise
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
    return {b: copy_of(b) for b in set(buffers.values()) if _is_there(b)}


def _replaced(buffers: Named, by: dict[Tensor, Tensor]) -> Named:
    return {place: by.get(buffer, buffer) for place, buffer in buffers.items()}


def _equal(old: Tensor, buffer: Tensor) -> bool:
    """What cannot be compared counts as changed."""
    return is_plain(old) and not old.is_meta and torch.equal(old, buffer)


def copy_of(tensor: Tensor) -> Tensor:
    """The same content in memory of its own, without a graph; it requires a gradient where `tensor` does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def version_of(tensor: Tensor) -> int | None:
    """None of inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def _memory(tensor: Tensor) -> StorageWeakRef | None:
    """What `.data = ...` replaces; None where there is no memory to speak of, or it is gathered for each use."""
    return StorageWeakRef(tensor.untyped_storage()) if has_memory(tensor) else None
