"""How `checkpoint_segments` works: a Sequential that saves its input now and then, and computes the rest again."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hooklab import _refuse
from hooklab._packing import refuse_edited

__all__ = ["Segments"]

SMALL = 4096  # numbers


class Segmented(nn.Sequential):
    """A Sequential whose blocks run in segments; only the input of each segment is saved."""

    _hooklab_kind: type = nn.Sequential  # what it was, and will be again

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(index, slice):
            part.__class__ = self._hooklab_kind
        return part

    def __reduce__(self) -> Any:
        """A copy, and what is pickled, is an ordinary Sequential: no handle knows it."""
        state = {name: value for name, value in vars(self).items() if not name.startswith("_hooklab_")}
        return _new, (self._hooklab_kind,), state

    def forward(self, input: Any) -> Any:
        self._hooklab_called = True
        if not torch.is_grad_enabled():
            return super().forward(input)
        blocks, size = list(self), self._hooklab_blocks
        for start in range(0, len(blocks), size):
            segment = blocks[start : start + size]
            # What lies between two segments is nobody else's: a copy may be edited in its place.
            copies = start > 0 and getattr(segment[0], "inplace", False)
            input = run_saving_input(segment, input, copies)
        return input


def run_saving_input(segment: list[nn.Module], input: Any, copies: bool) -> Any:
    """What the segment returns; for backward only its input is saved, and the rest computed again."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "checkpoint_segments does not work inside torch.compile, which has its own way to compute again; "
            "remove it before compiling, or compile the blocks: for block in model.layer1: block.compile()"
        )
    leaves, spec = tree_flatten(input)  # a checkpoint guards tensors, and not what is inside a tuple

    def run(*leaves: Any) -> Any:
        output = tree_unflatten([leaf.clone() for leaf in leaves] if copies else leaves, spec)
        for block in segment:
            output = block(output)
        return output

    versions = list(map(_version, leaves))
    buffers = Buffers(segment)
    # Stopping early means stopping at the last save, and RReLU fills its noise after that.
    early = not any(isinstance(module, nn.RReLU) for module in buffers.owners)
    output = checkpoint(run, *leaves, use_reentrant=False, context_fn=buffers.contexts, early_stop=early)
    if versions != list(map(_version, leaves)):
        raise RuntimeError(
            f"checkpoint_segments: the segment that begins with {type(segment[0]).__name__} edits its input in "
            "place, and the input is what is saved; use inplace=False there, or another plan"
        )
    return output


def _version(value: Any) -> int | None:
    """None where there is none: of inference tensors, and of what is no tensor."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _new(kind: type) -> nn.Sequential:
    return kind.__new__(kind)


class Buffers:
    """Computing a segment again starts from the buffers as its forward found them, and changes copies only.

    So running statistics are updated once, and a buffer that the output depends on has its old value again; and
    so has `training`, should `eval()` have been called in between.
    """

    def __init__(self, segment: list[nn.Module]):
        self.owners = list(dict.fromkeys(module for block in segment for module in block.modules()))
        self.before: dict[tuple[nn.Module, str], Tensor | None] = {}  # as the forward found them
        self.modes = [module.training for module in self.owners]
        self.real: list[tuple[dict[tuple[nn.Module, str], Tensor | None], list[bool]]] = []
        # Parameters and large buffers, of which there is no copy: with the version that the forward has used.
        self.used: dict[Tensor, int | None] = {}

    def now(self) -> dict[tuple[nn.Module, str], Tensor | None]:
        return {(owner, name): b for owner in self.owners for name, b in owner._buffers.items()}

    def contexts(self) -> tuple[Any, Any]:
        """Around the forward, and around computing it again."""
        return self.first(), self

    @contextmanager
    def first(self) -> Iterator[None]:
        """Notes which buffers the forward changes, and what they were."""
        found, copies = self.now(), {}  # one copy, though a buffer may have several names
        for buffer in filter(_is_there, found.values()):
            copies[id(buffer)] = _copy(buffer), _version(buffer)
        try:
            yield
        finally:  # a graph that ends in an error may be used, too
            found_now = (p for owner in self.owners for p in owner._parameters.values())
            self.used = {p: _version(p) for p in filter(_is_there, found_now)}
            for (owner, name), buffer in found.items():
                copy, version = copies.get(id(buffer), (buffer, None))
                same = (
                    owner._buffers.get(name) is buffer and _is_there(buffer) and _version(buffer) == version
                )
                # Fused operations and edits through `.data` leave the version as it was.
                large = same and buffer.numel() > SMALL and _equal(copy, buffer)
                self.before[owner, name] = buffer if large else copy
                if large:
                    self.used[buffer] = version

    def __enter__(self) -> None:
        for tensor, version in self.used.items():
            if _version(tensor) != version:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                refuse_edited(f"a {kind} {list(tensor.shape)}", tensor._version, version)
        there = {id(buffer): buffer for buffer in filter(_is_there, self.before.values())}
        copies = {
            number: _copy(buffer) for number, buffer in there.items()
        }  # memory may be full: nothing is replaced yet
        self.real.append((self.now(), [module.training for module in self.owners]))
        try:
            self.set_modes(self.modes)
            for (owner, name), buffer in self.before.items():
                owner._buffers[name] = copies.get(id(buffer), buffer)
        except BaseException:  # without __enter__ there is no __exit__
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        buffers, modes = self.real.pop()
        self.set_modes(modes)
        for (owner, name), buffer in buffers.items():
            owner._buffers[name] = buffer

    def set_modes(self, modes: list[bool]) -> None:
        for module, training in zip(self.owners, modes, strict=True):
            module.training = training


def _equal(copy: Tensor, buffer: Tensor) -> bool:
    """Meta and fake tensors have no content to compare; what is not strided counts as changed."""
    if copy.layout != torch.strided or copy.is_quantized:
        return False
    return copy.is_meta or isinstance(copy, FakeTensor) or torch.equal(copy, buffer)


def _is_there(tensor: Tensor | None) -> bool:
    return tensor is not None and not nn.parameter.is_lazy(tensor)


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)


class Segments:
    """The Sequentials that run in segments: what `checkpoint_segments` returns."""

    def __init__(self, model: nn.Module, plan: Mapping[str, int]):
        self._switched: dict[str, tuple[nn.Sequential, type]] = {}
        for name, module in _checked(model, plan).items():
            self._switched[name] = module, type(module)
            module._hooklab_blocks, module._hooklab_called = plan[name], False
            module.__class__ = _segmented(type(module))

    def remove(self) -> None:
        """Let the Sequentials run as before. Twice is harmless."""
        while self._switched:
            _, (module, kind) = self._switched.popitem()
            module.__class__ = kind
            del module._hooklab_blocks, module._hooklab_called

    def __enter__(self) -> "Segments":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        idle = [name for name, (module, _) in self._switched.items() if not module._hooklab_called]
        self.remove()
        if idle and kind is None:
            warnings.warn(
                f"checkpoint_segments: never called: {', '.join(idle)}; was the model run inside the block, and does "
                "it call these layers as a whole?",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        parts = (f"{name}: {module._hooklab_blocks}" for name, (module, _) in self._switched.items())
        return f"Segments({', '.join(parts) or 'removed'})"


def _segmented(kind: type) -> type:
    return type(kind.__name__, (Segmented, kind), {"_hooklab_kind": kind})


def _checked(model: nn.Module, plan: Mapping[str, int]) -> dict[str, nn.Sequential]:
    """What the plan names; everything is checked before the first is switched."""
    if not isinstance(plan, Mapping):
        raise TypeError(
            'checkpoint_segments: plan should map names to blocks per segment, {"layer1": 1, "layer2": 2}; '
            f"found {type(plan).__name__}"
        )
    if not plan:
        raise ValueError('checkpoint_segments: the plan is empty; name a Sequential, {"layer1": 2}')
    modules, found = dict(model.named_modules(remove_duplicate=False)), {}
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
        close = get_close_matches(str(name), modules) or sequentials[:5] or ["no Sequential in this model"]
        raise KeyError(f"checkpoint_segments: no layer is called {name!r}; close: {', '.join(close)}")
    module = modules[name]
    if isinstance(module, Segmented):
        raise ValueError(f"checkpoint_segments: {name!r} runs in segments already; remove that first")
    ordinary = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    if not ordinary or "forward" in vars(module):
        raise TypeError(
            f"checkpoint_segments: {name!r} should be a Sequential, whose blocks run one after the other; found "
            f"{type(module).__name__}"
        )
    return module
