"""What the plan of `checkpoint_segments` names; everything is checked before anything is switched."""

from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn

from hooklab import _refuse
from hooklab._segmented import Segmented
from hooklab._select import uncompiled

__all__ = ["planned"]


def planned(model: nn.Module, plan: Mapping[str, int]) -> dict[str, nn.Sequential]:
    """What the plan names; everything is checked before the first is switched."""
    if not isinstance(plan, Mapping):
        wanted = 'names to blocks per segment, {"layer1": 1, "layer2": 2}'
        raise TypeError(f"checkpoint_segments: plan should map {wanted}; found {type(plan).__name__}")
    if not plan:
        raise ValueError('checkpoint_segments: the plan is empty; name a Sequential, {"layer1": 2}')
    modules, found = dict(uncompiled(model).named_modules(remove_duplicate=False)), {}
    for name, blocks in plan.items():
        module = _sequential(modules, name)
        _refuse.count("checkpoint_segments", f"plan[{name!r}]", blocks, least=1)
        if module in found.values():
            raise ValueError(f"checkpoint_segments: {name!r} is another name of a layer in the plan")
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
    elif isinstance(module, nn.ModuleList):
        switch = "the model's own switch (of transformers: model.gradient_checkpointing_enable())"
        advice = f"put torch.utils.checkpoint there, or use {switch}"
        found += f", whose owner calls the blocks in a loop of its own: {advice}"
    wanted = "a Sequential, whose blocks run one after the other"
    raise TypeError(f"checkpoint_segments: {name!r} should be {wanted}; found {found}")
