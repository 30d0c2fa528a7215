"""Checks of notebook 48: two ports of one model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, refuse, refuse_first
from hooklab.course.checks.models import Before, fails, refuse_hooks

# ---- what the exercises share: two small models with other names, and faults that are put into the second ----


class _Shift(nn.Module):
    """Adds a vector, so that what a fault does to each entry is known."""

    def __init__(self, by: tuple[float, ...] = (0.0, 0.0, 0.0)):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class _Original(nn.Module):
    """Registered in another order than it runs, with a layer that edits in place what it receives."""

    def __init__(self, fails: bool = False):
        super().__init__()
        self.last, self.middle = _Shift(), _Shift()
        self.drop = nn.Dropout(0.5)
        self.act = nn.LeakyReLU(0.5, inplace=True)
        self.enter, self.fails = _Shift(), fails

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.drop(self.act(self.enter(x))))
        if self.fails:
            raise RuntimeError("the data has ended")
        return self.last(x)


class _Port(nn.Module):
    """The same with other names, in the order in which it runs, and nothing in place. `faults` are shifts by name."""

    def __init__(self, **faults: tuple[float, ...]):
        super().__init__()
        self.stem = _Shift(faults.get("stem", (0.0, 0.0, 0.0)))
        self.relu, self.dropout = nn.LeakyReLU(0.5), nn.Dropout(0.5)
        self.body, self.head = (_Shift(faults.get(name, (0.0, 0.0, 0.0))) for name in ("body", "head"))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.dropout(self.relu(self.stem(x)))))


PAIRS = {"last": "head", "middle": "body", "drop": "dropout", "act": "relu", "enter": "stem"}
X = torch.tensor([[1.0, -2.0, 5.0], [-1.0, 3.0, 0.5]])
BIG = 0.5, 0.5, 0.5
ONE = 0.0, 0.0, 1e-3  # in a single column


def _models(faults: Mapping[str, tuple[float, ...]], train: bool = False) -> tuple[nn.Module, nn.Module]:
    a, b = _Original().train(train), _Port(**faults).train(train)
    a.middle.eval()
    b.body.eval()
    return a, b


def _call(answer: Callable, a: nn.Module, b: nn.Module, x: Tensor, tol: float) -> tuple[Any, int, int]:
    """What the answer returns, and how often it ran each model; whatever hooks it has left, and hooks of others that it took off, are refused."""
    runs: dict[nn.Module, int] = {a: 0, b: 0}

    def count(module: nn.Module, args: tuple, output: Tensor) -> None:
        runs[module] += 1

    others = [model.register_forward_hook(count) for model in (a, b)]
    before = [Before(a), Before(b)]
    got = answer(a, b, dict(PAIRS), x.clone(), tol)
    for one in before:
        refuse_hooks(one, "hooks_left")
        if one.changed_modes():
            refuse("mode_changed")
    for handle in others:
        handle.remove()
    return got, runs[a], runs[b]


def _examine_errors(answer: Callable) -> None:
    broken = _Original(fails=True).eval()
    with fails(broken):
        answer(broken, _Port().eval(), dict(PAIRS), X.clone(), 1e-5)


# ---- 48.A: the first layer whose outputs differ ----


def first_difference(a, b, pairs, x, tol):
    of_a, of_b, handles = {}, {}, []

    def keep(kept, name):
        def hook(module, args, output):
            kept[name] = output.detach().clone()

        return hook

    try:
        for kept, model, names in ((of_a, a, pairs), (of_b, b, pairs.values())):
            for name in names:
                layer = model.get_submodule(name)
                handles.append(layer.register_forward_hook(keep(kept, name)))
        a(x)
        b(x)
    finally:
        for handle in handles:
            handle.remove()
    for name, output in of_a.items():
        gap = (of_b[pairs[name]] - output).abs().max()
        if gap > tol * output.abs().max():
            return name
    return None


NAME = [
    ("name_of_b", lambda t: t.got in PAIRS.values()),
    ("not_a_name", lambda t: t.got is not None and not (isinstance(t.got, str) and t.got in PAIRS)),
]

FIRST = [  # faults, factor of the input, tolerance, what is right, and the refusal for a wrong name
    ({"body": BIG}, 1, 1e-5, "middle", "wrong_first"),
    ({"stem": BIG}, 1, 1e-5, "enter", "wrong_first"),
    ({}, 1, 1e-5, None, "differs_nowhere"),
    ({"stem": ONE}, 1e4, 1e-5, None, "absolute"),
    ({"stem": (1e-6, 1e-6, 1e-6)}, 1e-5, 1e-2, "enter", "absolute"),
    ({"head": ONE}, 1, 1.9e-4, "last", "not_the_largest"),
    ({"head": (0.01, 0.0, 0.0)}, 1, 4e-3, None, "each_entry"),
    ({"head": (0.01, 0.0, 0.0)}, -1, 4.5e-3, None, "signed"),
]


def examine_first(answer):
    for faults, factor, tol, want, otherwise in FIRST:
        got, *runs = _call(answer, *_models(faults), factor * X, tol)
        if max(runs) > 1:
            refuse("ran_twice")
        refuse_first(NAME, got=got)
        if got != want:
            refuse_first(WRONG_FIRST, got=got, want=want, faults=faults)
            refuse(otherwise, got=got, want=want)
    _examine_errors(answer)


WRONG_FIRST = [
    ("by_reference", lambda t: t.got == "enter" and "stem" not in t.faults and t.want != "enter"),
    ("order_of_pairs", lambda t: t.got == "last" and t.want in ("middle", "enter")),
]

FIRST_DIFFERENCE = Exercise("48.A", examine_first, first_difference)

# ---- 48.B: the layers that differ on equal input ----


@torch.no_grad()
def to_blame(a, b, pairs, x, tol):
    given, outputs, blamed, handles = {}, {}, [], []
    modes = [(part, part.training) for model in (a, b) for part in model.modules()]

    def keep_input(name):
        return lambda module, args: given.update({name: args[0].clone()})

    def keep_output(name):
        def hook(module, args, output):
            outputs[name] = output.clone()

        return hook

    try:
        for name in pairs:
            layer = a.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(keep_input(name)))
            handles.append(layer.register_forward_hook(keep_output(name)))
        a.eval()
        b.eval()
        a(x)
        for name, output in outputs.items():
            other = b.get_submodule(pairs[name])(given[name])
            if (other - output).abs().max() > tol * output.abs().max():
                blamed.append(name)
    finally:
        for handle in handles:
            handle.remove()
        for part, mode in modes:
            part.training = mode
    return blamed


BLAMED = [  # faults, in training mode, factor of the input, tolerance, what is right, and the refusal otherwise
    ({"body": BIG}, False, 1, 1e-5, ["middle"], "wrong_layers"),
    ({}, False, 1, 1e-5, [], "wrong_layers"),
    ({"stem": BIG, "body": BIG, "head": BIG}, False, 1, 1e-5, ["enter", "middle", "last"], "wrong_layers"),
    ({"body": BIG}, True, 1, 1e-5, ["middle"], "in_training_mode"),
    ({"stem": ONE}, False, 1e4, 1e-5, [], "absolute"),
    ({"stem": (1e-6, 1e-6, 1e-6)}, False, 1e-5, 1e-2, ["enter"], "absolute"),
]

NAMES = [
    ("no_list", lambda t: not isinstance(t.got, list)),
    ("names_of_b", lambda t: bool(t.got) and set(t.got) <= set(PAIRS.values())),
]

WRONG_LAYERS = [
    ("input_after", lambda t: set(t.got) - set(t.want) == {"act"}),
    ("own_inputs", lambda t: not t.train and bool(t.want) and t.got == t.runs[t.runs.index(t.want[0]) :] != t.want),
    ("stops_at_first", lambda t: len(t.want) > 1 and t.got == t.want[:1]),
    ("other_order", lambda t: t.got != t.want and sorted(t.got) == sorted(t.want)),
]


def examine_to_blame(answer):
    for faults, train, factor, tol, want, otherwise in BLAMED:
        torch.manual_seed(0)
        got, *_ = _call(answer, *_models(faults, train), factor * X, tol)
        refuse_first(NAMES, got=got)
        if got != want:
            refuse_first(WRONG_LAYERS, got=got, want=want, train=train, runs=list(reversed(PAIRS)))
            refuse(otherwise, got=got, want=want)
    _examine_errors(answer)


TO_BLAME = Exercise("48.B", examine_to_blame, to_blame)

EXERCISES = [FIRST_DIFFERENCE, TO_BLAME]
