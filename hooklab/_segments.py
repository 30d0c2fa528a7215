"""What `checkpoint_segments` returns: the Sequentials that run in segments, until they are switched back."""

import warnings
from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn

from hooklab import _refuse
from hooklab._installed import Installed
from hooklab._segmented import Segmented
from hooklab._select import uncompiled

__all__ = ["Segments"]


class Segments(Installed):
    """The Sequentials that run in segments: what `checkpoint_segments` returns."""

    _gone = "its Sequentials have been switched back"

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
                if any(one.module is modules.get(name) for one in self._handles):
                    raise ValueError(f"checkpoint_segments: {name!r} is another name of a layer in the plan")
                module = _sequential(modules, name)
                blocks = _refuse.count("checkpoint_segments", f"plan[{name!r}]", blocks, least=1)
                self._handles.append(Switched(name, module, blocks))

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        idle = [one.name for one in self._handles if not one.module._hooklab_called]
        self.remove()
        if idle and kind is None:
            why = "was the model run inside the block, and does it call these layers as a whole?"
            warnings.warn(f"checkpoint_segments: never called: {_refuse.listed(idle)}; {why}", stacklevel=2)

    def __repr__(self) -> str:
        parts = (f"{one.name or repr(one.name)}: {one.module._hooklab_blocks}" for one in self._handles)
        return f"Segments({', '.join(parts) or 'removed'})"


class Switched:
    """One of them. It gets a class of its own, which holds what belongs to it."""

    def __init__(self, name: str, module: nn.Sequential, blocks: int):
        self.name, self.module, kind = name, module, type(module)
        facts = {"_hooklab_kind": kind, "_hooklab_blocks": blocks, "_hooklab_called": []}
        module.__class__ = type(kind.__name__, (Segmented, kind), facts)

    def remove(self) -> None:
        """Let it run as before."""
        if Segmented in type(self.module).__bases__:
            self.module.__class__ = self.module._hooklab_kind
        else:  # it has another class above ours since then, as from `fully_shard`: that one stays
            type(self.module)._hooklab_blocks = 0


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
        said = "runs in segments already; remove that first"
        if not module._hooklab_blocks:
            said = "once ran in segments, and was sharded then; make a new model, and shard it first"
        raise ValueError(f"checkpoint_segments: {name!r} {said}")
    kind = type(module)
    found = f"{kind.__module__}.{kind.__qualname__}" if kind.__name__ == "Sequential" else kind.__name__
    if isinstance(module, nn.Sequential):
        if kind.forward is nn.Sequential.forward and "forward" not in vars(module):
            return module
        found += " with a forward of its own"
        if "forward" in vars(module):
            found += ", put on the object, as accelerate does: call checkpoint_segments before that"
    elif isinstance(module, nn.ModuleList):
        switch = "the model's own switch (of transformers: model.gradient_checkpointing_enable())"
        advice = f"put torch.utils.checkpoint there, or use {switch}"
        found += f", whose owner calls the blocks in a loop of its own: {advice}"
    wanted = "a Sequential, whose blocks run one after the other"
    raise TypeError(f"checkpoint_segments: {name!r} should be {wanted}; found {found}")
