"""Small models with outputs of every kind, for the tests of module hooks."""

from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Result:
    logits: Tensor
    hidden: list
    note: str = "words"


class Fields(OrderedDict):
    """As the outputs of some libraries: a copy of it is made in the order of its fields, not of its entries."""

    def __reduce__(self):
        return Fields, (sorted(self.items()),)


class Known(Mapping):
    """A mapping that is known to PyTorch's pytrees, as a `TensorDict` is."""

    def __init__(self, *items):
        self.own = dict(enumerate(items))

    def __getitem__(self, key):
        return self.own[key]

    def __iter__(self):
        return iter(self.own)

    def __len__(self):
        return len(self.own)


class Choosy(Known):
    """As `Known`, but it refuses to be taken apart."""


def _refuse_to_flatten(value):
    raise RuntimeError("not this one")


class Cache:
    """Known to pytrees too, which rebuild a part of it only, as of a `DynamicCache`: it stays as it is."""

    def __init__(self, *items):
        self.items, self.position = list(items), 7


register_pytree_node(Cache, lambda cache: (cache.items, None), lambda items, _: Cache(*items))
register_pytree_node(Known, lambda known: (list(known.values()), "context"), lambda items, _: Known(*items))
register_pytree_node(Choosy, _refuse_to_flatten, lambda items, _: Choosy(*items))


CHOOSY, CACHE = Choosy(None), Cache(torch.ones(2))


@dataclass
class Registered:
    logits: Tensor
    hidden: list
    note: object = None


torch.export.register_dataclass(Registered)


class Returns(nn.Module):
    """Returns what `build` makes of its input."""

    def __init__(self, build):
        super().__init__()
        self.build = build

    def forward(self, x):
        return self.build(x)


# What a layer may return, and its shapes as text for an input of shape (2, 3).
NESTED = {
    "tensor": (lambda x: x * 2, "[2, 3]"),
    "tuple": (lambda x: (x * 2, x + 1), "([2, 3], [2, 3])"),
    "one": (lambda x: (x * 2,), "([2, 3],)"),
    "list": (lambda x: [x * 2, [x.sum()]], "[[2, 3], [[]]]"),
    "dict": (lambda x: {"out": x * 2, "aux": {"low": x[0]}}, "{'out': [2, 3], 'aux': {'low': [3]}}"),
    "ordered": (lambda x: OrderedDict(b=x * 2, a=x.sum()), "{'b': [2, 3], 'a': []}"),
    "named": (lambda x: Pair(x * 2, (x, None)), "Pair(left=[2, 3], right=([2, 3], None))"),
    "torch.max": (lambda x: x.max(dim=1), "([2], [2])"),
    "dataclass": (lambda x: Result(x * 2, [x.sum(0)]), "Result(logits=[2, 3], hidden=[[3]], note='words')"),
    "mixed": (lambda x: (x * 2, 7, "text", None, object()), "([2, 3], 7, 'text', None, object)"),
    "none": (lambda x: None, "None"),
    "fields": (lambda x: Fields(b=x * 2, a=x.sum()), "{'b': [2, 3], 'a': []}"),
    "pytree": (lambda x: Known(x * 2, [x.sum()]), "Known([2, 3], [[]])"),
    "choosy": (lambda x: (x * 2, CHOOSY), "([2, 3], Choosy)"),
    "cache": (lambda x: (x * 2, CACHE), "([2, 3], Cache)"),
    "registered": (
        lambda x: Registered(x * 2, [x.sum()]),
        "Registered(logits=[2, 3], hidden=[[]], note=None)",
    ),
}


class Careful(nn.Module):
    """Goes on without its first layer where a pre-hook of that refuses the input."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.first.register_forward_pre_hook(_refuse)

    def forward(self, x):
        with suppress(ValueError):
            x = self.first(x)
        return self.second(x).tanh()


def _refuse(module, args):
    raise ValueError("not this")


class Constant(torch.autograd.Function):
    """The identity, which has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class Unhookable(nn.Linear):
    def register_forward_hook(self, *args, **kwargs):
        raise ValueError("no hooks here")


class Twice(nn.Module):
    """Calls one layer twice in a forward; `again` is another name of it."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(3, 3)
        self.again = self.step
        self.last = nn.Linear(3, 2)

    def forward(self, x, times=2):
        for _ in range(times):
            x = self.step(x)
        return self.last(x)


def mlp(*widths: int, inplace: bool = False) -> nn.Sequential:
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=inplace)]
    return nn.Sequential(*layers[:-1])


def state_of(model: nn.Module) -> list:
    """All that a hook could leave behind or change: `__dict__`s, training flags, parameters, buffers."""

    def snapshot(value):
        if isinstance(value, Tensor):
            return value.detach().clone()
        return {key: snapshot(item) for key, item in value.items()} if isinstance(value, dict) else value

    return [(name, module.training, snapshot(vars(module))) for name, module in model.named_modules()]


def same_state(before: list, after: list) -> bool:
    def same(one, other):
        if isinstance(one, Tensor):
            return torch.equal(one, other)
        if isinstance(one, dict):
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        return one is other or one == other

    return len(before) == len(after) and all(
        one[:2] == other[:2] and same(one[2], other[2]) for one, other in zip(before, after, strict=True)
    )
