"""How `checkpoint_segments` works: a Sequential that saves its input now and then, and computes the rest again."""

import warnings
from collections.abc import Iterator, Mapping
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
                input = checkpoint(
                    run,
                    segment,
                    input,
                    use_reentrant=False,
                    context_fn=lambda buffers=buffers: (buffers.first, buffers),
                )
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
        self.first = First(self)
        self.before: dict[tuple[nn.Module, str], Tensor] = {}  # those that the forward has changed
        self.real: list[dict[tuple[nn.Module, str], Tensor]] = []

    def now(self) -> dict[tuple[nn.Module, str], Tensor]:
        return {
            (owner, name): buffer
            for owner in self.owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }

    def __enter__(self) -> None:
        self.real.append(self.now())
        for (owner, name), buffer in self.real[-1].items():
            owner._buffers[name] = self.before.get((owner, name), buffer).clone()

    def __exit__(self, *exc_info: object) -> None:
        for (owner, name), buffer in self.real.pop().items():
            owner._buffers[name] = buffer


class First:
    """Around the forward: notes which buffers it changes, and what they were."""

    def __init__(self, buffers: Buffers):
        self.buffers = buffers

    def __enter__(self) -> None:
        self.found = {place: (b, b._version, b.detach().clone()) for place, b in self.buffers.now().items()}

    def __exit__(self, *exc_info: object) -> None:
        for (owner, name), (buffer, version, copy) in self.found.items():
            if owner._buffers.get(name) is not buffer or buffer._version != version:
                self.buffers.before[owner, name] = copy
        del self.found


class Segments:
    """The Sequentials that run in segments: what `checkpoint_segments` returns."""

    def __init__(self, model: nn.Module, plan: Mapping[str, int]):
        self._switched: dict[str, tuple[nn.Sequential, type]] = {}
        for name, module, blocks in _checked(model, plan):
            self._switched[name] = module, type(module)
            module._hooklab_blocks, module._hooklab_called = blocks, False
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


def _checked(model: nn.Module, plan: Mapping[str, int]) -> Iterator[tuple[str, nn.Sequential, int]]:
    """Everything is checked before the first is given out."""
    if not isinstance(plan, Mapping):
        raise TypeError(
            'checkpoint_segments: plan should map names to blocks per segment, {"layer1": 1, "layer2": 2}; '
            f"found {type(plan).__name__}"
        )
    if not plan:
        raise ValueError('checkpoint_segments: the plan is empty; name a Sequential, {"layer1": 2}')
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for name, blocks in plan.items():
        if name not in modules:
            sequentials = [name for name, module in modules.items() if isinstance(module, nn.Sequential)]
            close = (
                get_close_matches(str(name), modules) or sequentials[:5] or ["no Sequential in this model"]
            )
            raise KeyError(f"checkpoint_segments: no layer is called {name!r}; close: {', '.join(close)}")
        _check_one(name, modules[name], blocks)
        if any(module is modules[name] for _, module, _ in found):
            raise ValueError(
                f"checkpoint_segments: {name!r} is another name of a layer that the plan has already"
            )
        found.append((name, modules[name], blocks))
    return iter(found)


def _check_one(name: str, module: nn.Module, blocks: Any) -> None:
    if isinstance(module, Segmented):
        raise ValueError(f"checkpoint_segments: {name!r} runs in segments already; remove that first")
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        raise TypeError(
            f"checkpoint_segments: {name!r} should be a Sequential, whose blocks run one after the other; found "
            f"{type(module).__name__}"
        )
    _refuse.count("checkpoint_segments", f"plan[{name!r}]", blocks, least=1)
