"""The same task done by others: keep the output of every named layer in one forward.

Each function returns a callable that runs one forward. It raises ModuleNotFoundError where its package is missing, and
Unfit where the package cannot watch such a model. The two by hand also return what removes their hooks.
"""

import importlib
import warnings
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["PEERS", "Unfit", "bare_features", "bare_mean_std"]


class Unfit(Exception):
    """A peer that asks of the model what this one has not."""


def bare_features(model: nn.Module, names: list[str], x: torch.Tensor) -> tuple[Callable, Callable]:
    """Hooks by hand: a dictionary and detach. Also returns what removes them."""
    kept, handles = {}, []
    for name in names:

        def hook(module, args, output, name=name):
            kept[name] = output.detach()

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    return lambda: model(x), lambda: [handle.remove() for handle in handles]


def bare_mean_std(model: nn.Module, names: list[str], x: torch.Tensor) -> tuple[Callable, Callable]:
    """Hooks by hand that keep a mean and a standard deviation of each call."""
    kept, handles = {name: [] for name in names}, []
    for name in names:

        def hook(module, args, output, name=name):
            output = output.detach()
            kept[name].append((output.mean(), output.std()))

        handles.append(model.get_submodule(name).register_forward_hook(hook))

    def run():
        for values in kept.values():
            values.clear()
        model(x)

    return run, lambda: [handle.remove() for handle in handles]


def torchextractor(model, names, x):
    package = importlib.import_module("torchextractor")
    extractor = package.Extractor(model, names)
    return lambda: extractor(x)


def captum(model, names, x):
    attribution = importlib.import_module("captum.attr")
    activation = attribution.LayerActivation(model, [model.get_submodule(name) for name in names])
    return lambda: activation.attribute(x)


def torchcam(model, names, x):
    core = importlib.import_module("torchcam.methods.core")
    core._CAM(model, list(names))
    return lambda: model(x)


def transformer_lens(model, names, x):
    """Needs hook points in the model: a copy of a Sequential gets one behind each of the named layers."""
    if not isinstance(model, nn.Sequential):
        raise Unfit("transformer-lens: its hook points must stand in the model's own code")
    package = importlib.import_module("transformer_lens")
    HookPoint = importlib.import_module("transformer_lens.hook_points").HookPoint

    class Hooked(package.HookedRootModule):
        def __init__(self):
            super().__init__()
            self.parts = model
            self.points = nn.ModuleDict({name: HookPoint() for name in names})
            self.setup()

        def forward(self, x):
            for name, part in self.parts.named_children():
                x = part(x)
                if name in self.points:
                    x = self.points[name](x)
            return x

    hooked = Hooked().eval()
    return lambda: hooked.run_with_cache(x)


def torchinfo(model, names, x):
    package = importlib.import_module("torchinfo")
    return lambda: package.summary(model, input_data=x, verbose=0)


def extractor_of_torchvision(model, names, x):
    package = importlib.import_module("torchvision.models.feature_extraction")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extractor = package.create_feature_extractor(model, names)
    return lambda: extractor(x)


PEERS = {
    "torchextractor": torchextractor,
    "torchcam": torchcam,
    "captum": captum,
    "transformer-lens": transformer_lens,
    "torchinfo": torchinfo,
    "torchvision FX (rewrites the model)": extractor_of_torchvision,
}
