"""The module hooks against hooks by hand, other packages, and their budgets. A table of all, one run, interleaved.

`make bench` installs the peers. The table leaves out one that is missing, and the run fails: its budget was not looked at.
"""

import copy
import math
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torchvision
from interleaved import in_processes, medians, middle, report
from peers import PEERS, Unfit, bare_features, bare_mean_std
from torch import nn

from hooklab import features, layer_statistics, select, verbose, with_grad

# torchextractor and torchcam are bare hooks, without a check for edits: the table shows them, the budget is beside bare hooks.
MUST_BEAT = ("captum", "transformer-lens", "torchinfo")


def mlp(layers: int = 24, width: int = 16) -> tuple[nn.Module, torch.Tensor, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())])
    return model.eval(), torch.randn(8, width), [str(2 * index) for index in range(layers)]


def conv_net(blocks: int = 20, channels: int = 16) -> tuple[nn.Module, torch.Tensor, list[str]]:
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        for _ in range(blocks)
    ]
    return (
        nn.Sequential(*parts).eval(),
        torch.randn(1, channels, 32, 32),
        [str(index) for index in range(blocks)],
    )


def resnet50() -> tuple[nn.Module, torch.Tensor, list[str]]:
    torch.manual_seed(0)
    model = torchvision.models.resnet50().eval()
    names = [name for name, layer in model.named_modules() if type(layer).__name__ == "Bottleneck"]
    return model, torch.randn(1, 3, 224, 224), names


def twin(model: nn.Module) -> nn.Module:
    """A copy with modules of its own, and the same parameters and buffers: where weights lie is worth 2 % of ResNet-50."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def hooked(use: Callable) -> Callable:
    """A contender as in `peers.py`: hooks of the package on the model, and its forward."""

    def make(model: nn.Module, names: list[str], x: torch.Tensor) -> Callable:
        used = use(model, *names)

        def run() -> object:
            model(x)
            return used  # as long as this lives, what it has counted lives

        return run

    return make


MAKERS: dict[str, Callable] = {
    "plain": lambda model, names, x: partial(model, x),
    "plain, an identical copy": lambda model, names, x: partial(model, x),
    "bare dict + detach": lambda *args: bare_features(*args)[0],
    "bare mean + std": lambda *args: bare_mean_std(*args)[0],
    "hooklab features": hooked(features),
    "hooklab layer_statistics": hooked(layer_statistics),
    "hooklab verbose": hooked(partial(verbose, write=[].append)),
    "hooklab verbose, every module": lambda model, names, x: hooked(partial(verbose, write=[].append))(
        model, ["", "**"], x
    ),
    **PEERS,
}


def time_forwards(
    build: Callable, rounds: int, repeat: int, copies: int, seed: int
) -> tuple[dict[str, float], dict[str, str], dict[str, str]]:
    """Seconds of one forward for every way to keep the outputs of the same layers, each on a copy of the same model.

    Where modules and hooks come to lie in memory is worth a few percent of a small model: of each contender
    `copies` are made, in a random order, and their mean counts. The weights are the same ones for all. Also returns
    who is missing and who is unfit, each with the reason.
    """
    model, x, names = build()
    contenders: dict[tuple[str, int], Callable] = {}
    missing, unfit = {}, {}
    todo = [(name, number) for name in MAKERS for number in range(copies)]
    random.Random(seed).shuffle(todo)
    for name, number in todo:
        try:
            contenders[name, number] = MAKERS[name](twin(model), names, x)
        except ModuleNotFoundError as error:
            missing[name] = str(error)
        except Unfit as error:
            unfit[name] = str(error)
    with torch.no_grad():
        each = medians(contenders, rounds, repeat)
    assert all(len(contenders["hooklab features", number]()) == len(names) for number in range(copies))
    assert contenders["hooklab layer_statistics", 0]()[names[0]].calls > 1
    seconds = {
        name: statistics.mean(each[name, number] for number in range(copies)) for name in MAKERS if (name, 0) in each
    }
    return seconds, missing, unfit


def compare_forwards(
    title: str, build: Callable, features_budget: float, rounds: int, repeat: int, copies: int, processes: int
) -> list[bool]:
    """A table of `time_forwards`, and the budgets; ratios are taken in each process, and their median counts."""
    runs = in_processes(partial(time_forwards, build, rounds, repeat, copies), processes)
    _, missing, unfit = runs[0]
    found = [seconds for seconds, _, _ in runs]
    names = build()[-1]
    print(f"{title}: {len(names)} layers, forward under no_grad, 1 thread, {processes} processes")
    plain = statistics.mean(seconds["plain"] for seconds in found)
    table = {name: middle([seconds[name] / seconds["plain"] for seconds in found]) for name in found[0]}
    for name, (ratio, error) in sorted(table.items(), key=lambda item: item[1]):
        added = (ratio - 1) * plain / len(names) * 1e6
        print(
            f"  {name:38} {ratio * plain * 1e6:10.0f} us   {ratio:6.3f} ± {error:.3f} x plain   {added:8.2f} us/layer"
        )
    for error in unfit.values():
        print(f"  left out: {error}")
    for name, error in missing.items():
        print(f"  MISSING: {name} ({error}); no budget against it was looked at")

    def against(what: str, other: str, budget: float) -> bool:
        ratio, error = middle([seconds[what] / seconds[other] for seconds in found])
        return report(f"{what} / {other}", ratio, budget, error=error)

    kept = [
        against("hooklab features", "bare dict + detach", features_budget),
        against("hooklab layer_statistics", "bare mean + std", 4.0),
    ]
    if build is resnet50:
        kept.append(against("hooklab layer_statistics", "plain", 1.35))
    for name in MUST_BEAT:
        if name in found[0]:
            kept.append(against("hooklab features", name, 1.0))
        elif name not in unfit:
            kept.append(False)
    if "torchinfo" in found[0]:
        for name, budget in {"hooklab verbose": 0.1, "hooklab verbose, every module": math.inf}.items():
            ratio, error = middle(
                [(seconds[name] - seconds["plain"]) / (seconds["torchinfo"] - seconds["plain"]) for seconds in found]
            )
            kept.append(report(f"overhead of {name} / of torchinfo", ratio, budget, error=error))
    return kept


def without_computing(model: nn.Module, names: list[str], x: torch.Tensor, new_outputs: bool) -> nn.Module:
    """The same calls of the named layers, but these answer from memory, and what is beside them, too.

    With `new_outputs` each call returns a new tensor without content; else always the same one, of the real forward.
    """
    layers = [model.get_submodule(name) for name in names]
    beside = [layer for layer in model.children() if not set(layers).intersection(layer.modules())]
    outputs, handles = {}, []
    for layer in (*layers, *beside):

        def keep(layer, args, output):
            outputs[layer] = output.clone()

        handles.append(layer.register_forward_hook(keep))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    for layer, output in outputs.items():
        layer.forward = partial(answer, output, new_outputs)
    return model


def answer(output: torch.Tensor, new: bool, x: torch.Tensor) -> torch.Tensor:
    return torch.empty(output.shape) if new else output


def time_hooks_alone(
    build: Callable, ways: list[str], new_outputs: bool, repeat: int, copies: int, seed: int
) -> dict[str, float]:
    """Seconds that each of `ways` adds to a forward, measured in one that computes nothing."""
    model, x, names = build()
    contenders = {}
    todo = [(name, number) for name in ("plain", *ways) for number in range(copies)]
    random.Random(seed).shuffle(todo)
    for name, number in todo:
        contenders[name, number] = MAKERS[name](without_computing(twin(model), names, x, new_outputs), names, x)
    with torch.no_grad():
        each = medians(contenders, rounds=12, repeat=repeat)
    seconds = {name: statistics.mean(each[name, number] for number in range(copies)) for name in ("plain", *ways)}
    return {name: seconds[name] - seconds["plain"] for name in ways}


def hooks_alone(title: str, build: Callable) -> list[bool]:
    """What the hooks take by themselves: beside the forward of ResNet-50, 100,000 us, a few us do not show."""
    print(f"{title} without its computing: what is added to a forward, 5 processes")
    keeping = ["hooklab features", "captum"]
    printing = ["hooklab verbose", "torchinfo"]  # which meets the layers inside the blocks no more here
    kept = []
    for ways, new_outputs, repeat, budget in (
        (keeping, True, 100, 1.0),
        (printing, True, 10, 0.1),
    ):
        try:
            runs = in_processes(partial(time_hooks_alone, build, ways, new_outputs, repeat, 4), 5)
        except ModuleNotFoundError as error:
            print(f"  MISSING: {error}; no budget was looked at")
            kept.append(False)
            continue
        for name in ways:
            added, error = middle([seconds[name] * 1e6 for seconds in runs])
            print(f"  {name:38} {added:10.1f} ± {error:.1f} us")
        ours, *others = ways
        for name in others:
            ratio, error = middle([seconds[ours] / seconds[name] for seconds in runs])
            kept.append(report(f"added by {ours} / by {name}", ratio, budget, error=error))
    return kept


def by_hand(copying: bool) -> Callable:
    """A forward hook and a tensor hook on every layer; `copying` keeps a copy of the output as well."""

    def make(model: nn.Module, names: list[str]) -> dict:
        grads, kept = {}, {}
        for name in names:

            def take(module, args, output, name=name):
                if copying:
                    kept[name] = output.detach().clone()
                output.register_hook(lambda grad: grads.update({name: grad}))

            model.get_submodule(name).register_forward_hook(take)
        return grads

    return make


def full_backward_hooks(model: nn.Module, names: list[str]) -> dict:
    grads = {}
    for name in names:

        def hook(module, grad_input, grad_output, name=name):
            grads[name] = grad_output[0]

        model.get_submodule(name).register_full_backward_hook(hook)
    return grads


def gradients_of_activations(copies: int = 5) -> list[bool]:
    """As in `compare_forwards`, `copies` of each contender."""
    model, x, names = mlp()
    x = x.requires_grad_()
    copied, shared = "features(keep=with_grad), which copies", "features(keep=with_grad, copy=False)"
    makers: dict[str, Callable] = {
        "plain": lambda model, names: {},
        "forward hook + tensor hook by hand": by_hand(copying=False),
        "the same, with a copy of the output": by_hand(copying=True),
        copied: lambda model, names: features(model, *names, keep=with_grad),
        shared: lambda model, names: features(model, *names, keep=partial(with_grad, copy=False)),
        "full backward hooks": full_backward_hooks,
    }
    contenders, found = {}, {}
    todo = [(name, number) for name in makers for number in range(copies)]
    random.Random(0).shuffle(todo)
    for name, number in todo:
        own = copy.deepcopy(model)
        found[name, number] = makers[name](own, names)
        contenders[name, number] = lambda own=own: own(x).sum().backward()
    each = medians(contenders, rounds=40, repeat=10)
    for number in range(copies):
        assert all(found[way, number][name].grad is not None for way in (copied, shared) for name in names)
        assert len(found["full backward hooks", number]) == len(names)
    seconds = {name: statistics.mean(each[name, number] for number in range(copies)) for name in makers}
    print("gradients of all 24 activations, forward and backward of the MLP")
    for name, value in seconds.items():
        print(f"  {name:38} {value * 1e6:10.0f} us   {value / seconds['plain']:6.3f} x plain")
    by_hand_too = "the same, with a copy of the output"
    return [
        report(f"{shared} / plain", seconds[shared] / seconds["plain"], 1.25),
        report(f"{copied} / {by_hand_too}", seconds[copied] / seconds[by_hand_too], 1.3),
    ]


def early_stop() -> list[bool]:
    model, x, _ = resnet50()
    stage = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1)
    watched = twin(model)
    f = features(watched, "layer1")
    contenders = {
        "the stage alone": lambda: stage(x),
        "f.run": lambda: f.run(x),
        "whole model": lambda: model(x),
    }
    with torch.no_grad():
        seconds = medians(contenders, rounds=15, repeat=1)
    print("f.run with layer1 of ResNet-50, 1x3x224x224")
    for name, value in seconds.items():
        print(f"  {name:38} {value * 1e3:10.1f} ms")
    return [report("f.run / running that stage alone", seconds["f.run"] / seconds["the stage alone"], 1.15)]


def time_other_modes(copies: int, seed: int) -> dict[str, float]:
    """What `features` costs where graphs are recorded, in units of bare hooks. In inference mode it copies."""
    model, x, names = mlp()
    contenders, found = {}, []
    for number in random.Random(seed).sample(range(copies), copies):
        ours = twin(model)
        found.append(features(ours, *names))
        contenders["features", number] = partial(ours, x)
        contenders["bare", number], _ = bare_features(twin(model), names, x)
    ratios = {}
    for mode in (torch.enable_grad,):
        with mode():
            each = medians(contenders, rounds=20, repeat=10)
        ratios[mode.__name__] = sum(each["features", n] for n in range(copies)) / sum(
            each["bare", n] for n in range(copies)
        )
    assert all(len(f) == len(names) for f in found)
    return ratios


def other_modes() -> list[bool]:
    runs = in_processes(partial(time_other_modes, 5), 6)
    kept = []
    for mode in runs[0]:
        ratio, error = middle([ratios[mode] for ratios in runs])
        kept.append(report(f"features / bare dict + detach, MLP under {mode}", ratio, 1.3, error=error))
    return kept


def time_growth(seed: int) -> dict[str, dict[int, float]]:
    """Microseconds that a layer costs in models of 10 to 10,000 layers: `features`, and the plainest hook."""
    costs: dict[str, dict[int, float]] = {"features": {}, "bare dict + detach": {}}
    for layers in random.Random(seed).sample((10, 100, 1_000, 10_000), 4):
        model = nn.Sequential(*[nn.Identity() for _ in range(layers)])
        watched, x = copy.deepcopy(model), torch.ones(2)
        bare, _ = bare_features(copy.deepcopy(model), [str(index) for index in range(layers)], x)
        contenders = {
            "plain": partial(model, x),
            "features": partial(watched, x),
            "bare dict + detach": bare,
        }
        with features(watched, "*"), torch.no_grad():
            seconds = medians(contenders, rounds=9, repeat=max(1, 3_000 // layers))
        for name, cost in costs.items():
            cost[layers] = (seconds[name] - seconds["plain"]) / layers * 1e6
    return costs


def growth() -> list[bool]:
    """The cost of a layer in models of 10 to 10,000 layers, beside that of the plainest hook."""
    runs = in_processes(time_growth, 8)
    for name in runs[0]:
        cost = {layers: middle([run[name][layers] for run in runs])[0] for layers in sorted(runs[0][name])}
        each = ", ".join(f"{layers:,} layers {value:.2f} us" for layers, value in cost.items())
        print(f"{name}, cost of a layer: {each}; dearest / cheapest {spread(cost):.3f} x")
    # Beyond 1,000 layers the modules themselves leave the cache, which every hook pays for.
    ratio, error = middle([spread(run["features"]) / spread(run["bare dict + detach"]) for run in runs])
    kept = [report("features, dearest / cheapest, / the same of bare", ratio, 1.05, error=error)]
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(3_333)])
    names = {"select('**')": ("**",), "select(class)": (nn.Linear,), "select('*.0')": ("*.0",)}
    calls = {name: lambda patterns=patterns: select(model, *patterns) for name, patterns in names.items()}
    seconds = medians(calls, rounds=9, repeat=1)
    kept += [report(f"{name} on 10,000 modules", value * 1e3, 50, "ms") for name, value in seconds.items()]
    return kept


def spread(costs: dict[int, float]) -> float:
    return max(costs.values()) / min(costs.values())


def main() -> bool:
    kept = gradients_of_activations()
    kept += compare_forwards("24-layer tiny MLP", mlp, 1.3, rounds=8, repeat=30, copies=5, processes=8)
    kept += compare_forwards("20-block conv net", conv_net, 1.1, rounds=16, repeat=2, copies=6, processes=8)
    kept += compare_forwards("ResNet-50, 1x3x224x224", resnet50, 1.03, rounds=8, repeat=1, copies=3, processes=6)
    kept += hooks_alone("20-block conv net", conv_net) + hooks_alone("ResNet-50", resnet50)
    kept += early_stop() + other_modes() + growth()
    return all(kept)


if __name__ == "__main__":
    sys.exit(not main())
