"""How `checkpoint_segments` works: a Sequential that saves its input now and then, and computes the rest again."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hooklab import _refuse

__all__ = ["Segments"]


class Segmented(nn.Sequential):
    """A Sequential whose blocks run in segments; only the input of each segment is saved."""

    def forward(self, input: Any) -> Any:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "checkpoint_segments does not work inside torch.compile, which has its own way to compute again; "
                "remove it before compiling, or compile the blocks: for block in model.layer1: block.compile()"
            )
        self._hooklab_called = True
        blocks = iter(self)
        while segment := list(islice(blocks, self._hooklab_blocks)):
            if torch.is_grad_enabled():
                buffers = Buffers(segment)
                input = checkpoint(run, segment, input, use_reentrant=False, context_fn=buffers.contexts)
            else:
                input = run(segment, input)
        return input


def run(segment: list[nn.Module], input: Any) -> Any:
    """The blocks one after the other; what a checkpoint calls, and calls again."""
    for block in segment:
        input = block(input)
    return input


class Buffers:
    """Computing a segment again starts from the buffers as its forward found them, and changes copies only.

    So running statistics are updated once, and a buffer that the output depends on has its old value again.
    """

    def __init__(self, segment: list[nn.Module]):
        self.owners = list(dict.fromkeys(module for block in segment for module in block.modules()))
        self.before: dict[tuple[nn.Module, str], Tensor] = {}  # those that the forward has changed
        self.real: list[dict[tuple[nn.Module, str], Tensor]] = []

    def now(self) -> dict[tuple[nn.Module, str], Tensor]:
        places = ((owner, name) for owner in self.owners for name in owner._buffers)
        return {(owner, name): b for owner, name in places if (b := owner._buffers[name]) is not None}

    def contexts(self) -> tuple[Any, Any]:
        """Around the forward, and around computing it again."""
        return self.first(), self

    @contextmanager
    def first(self) -> Iterator[None]:
        """Notes which buffers the forward changes, and what they were."""
        found = {place: (b, b._version, b.detach().clone()) for place, b in self.now().items()}
        yield
        for (owner, name), (buffer, version, copy) in found.items():
            if owner._buffers.get(name) is not buffer or buffer._version != version:
                self.before[owner, name] = copy

    def __enter__(self) -> None:
        self.real.append(self.now())
        for (owner, name), buffer in self.real[-1].items():
            owner._buffers[name] = self.before.get((owner, name), buffer).clone()

    def __exit__(self, *exc_info: object) -> None:
        for (owner, name), buffer in self.real.pop().items():
            owner._buffers[name] = buffer


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
    return Segmented if kind is nn.Sequential else type(kind.__name__, (Segmented, kind), {})


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
        if name not in modules:
            sequentials = [name for name, module in modules.items() if isinstance(module, nn.Sequential)]
            close = (
                get_close_matches(str(name), modules) or sequentials[:5] or ["no Sequential in this model"]
            )
            raise KeyError(f"checkpoint_segments: no layer is called {name!r}; close: {', '.join(close)}")
        module = modules[name]
        if isinstance(module, Segmented):
            raise ValueError(f"checkpoint_segments: {name!r} runs in segments already; remove that first")
        if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
            raise TypeError(
                f"checkpoint_segments: {name!r} should be a Sequential, whose blocks run one after the other; found "
                f"{type(module).__name__}"
            )
        _refuse.count("checkpoint_segments", f"plan[{name!r}]", blocks, least=1)
        if module in found.values():
            raise ValueError(
                f"checkpoint_segments: {name!r} is another name of a layer that the plan has already"
            )
        found[name] = module
    return found
