"""Checks of notebook 52: hooks that fire and do something else."""

import gc
import weakref
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from hooklab.course.check import Exercise, refuse, refuse_first
from hooklab.course.checks.calls import refuse_raised
from hooklab.course.checks.models import Before, fails, refuse_hooks
from hooklab.course.refusals import refuse_result_of

# ---- 52.A: does what the hook returns count? ----


def counts(register, run):
    plain = run().clone()
    with register(lambda *args: args[-1] + 1):
        hooked = run()
    return not torch.allclose(plain, hooked, rtol=0, atol=0, equal_nan=True)


RUNS = [  # the refusal where the answer is wrong, the run (`x` is all ones, the layer a ReLU), and what is wanted
    ("never", lambda layer, x: layer(x), True),
    ("counted_calls", lambda layer, x: (layer(x), x)[1], False),
    ("always", lambda layer, x: layer.forward(x), False),
    ("multiplied", lambda layer, x: x + layer(-x), True),
    ("nan", lambda layer, x: layer(x).new_full((2,), torch.nan), False),
    ("nan_hides", lambda layer, x: torch.cat([layer(x), x * torch.nan]), True),
    ("too_lenient", lambda layer, x: 1e6 + layer(x), True),
]


def examine_counts(answer):
    for key, run, want in RUNS:
        layer = _layer()
        before = Before(layer)
        got = answer(layer.register_forward_hook, partial(run, layer, torch.ones(2)))
        refuse_hooks(before, "hooks_left")
        _expect_bool(got, want, key)
    weight = nn.Parameter(torch.ones(2))
    with refuse_raised("forward_only"):
        got = answer(weight.register_hook, lambda: _gradient(weight))
    if weight._backward_hooks:
        refuse("tensor_hook_left")
    _expect_bool(got, True, "tensor_hook")
    layer = _layer()
    with fails(layer, swallowed="swallowed", left="left_after_error"):
        answer(layer.register_forward_hook, lambda: _fails_with_hook(layer))


def _layer():
    layer = nn.ReLU()
    layer.register_forward_hook(_does_nothing)
    return layer


def _does_nothing(*args):
    """A hook of somebody else, which has to stay."""


def _expect_bool(got, want, key):
    if not isinstance(got, bool):
        refuse("no_bool", got=got)
    if got is not want:
        refuse(key)


def _gradient(weight):
    return torch.autograd.grad((3 * weight).sum(), weight)[0]


def _fails_with_hook(layer):
    if len(layer._forward_hooks) > 1:
        raise RuntimeError("the model fails in this run")
    return layer(torch.ones(2))


COUNTS = Exercise("52.A", examine_counts, counts)

# ---- 52.B: a mean of squares over all batches ----


def mean_square(model, layer, batches):
    total, count = 0.0, 0

    def add(module, args, output):
        nonlocal total, count
        total += output.detach().double().square().sum().item()
        count += output.numel()

    with layer.register_forward_hook(add):
        for batch in batches:
            model(batch)
    return total / count


class _Calls(nn.Module):
    """Calls its layer once, or once more for large batches, and remembers what it returned and which outputs live."""

    def __init__(self, layer: nn.Module, twice: bool = False):
        super().__init__()
        self.layer, self.twice = layer, twice
        self.returned: list[torch.Tensor] = []
        self.outputs: list[list[weakref.ref]] = []
        self.old = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        self.old += sum(ref() is not None for batch in self.outputs[:-1] for ref in batch)
        self.outputs.append([])
        for given in _given(x, self.twice):
            y = self.layer(given)
            if isinstance(y, torch.Tensor):
                self.outputs[-1].append(weakref.ref(y))
        self.returned.append(y.detach().clone() if isinstance(y, torch.Tensor) else y)
        return x


MISTAKES = [  # what each mistake gives in place of the mean of all squares; `batches` has the outputs of each, joined
    ("mean_of_means", lambda t: [_mean(_mean(call.square()) for call in t.calls)]),
    ("mean_of_batches", lambda t: [_mean(_mean(batch.square()) for batch in t.batches)]),
    ("last_batch", lambda t: [_mean(t.batches[-1].square()), _mean(t.calls[0].square()), _mean(t.calls[-1].square())]),
    ("last_call", lambda t: [_mean(torch.cat(t.last).square())]),
    ("by_sample", lambda t: [torch.cat(t.calls).square().sum() / sum(len(call) for call in t.calls)]),
    ("not_divided", lambda t: [torch.cat(t.calls).square().sum(), sum(_mean(call.square()) for call in t.calls)]),
    ("not_squared", lambda t: [_mean(torch.cat(t.calls)), _mean(torch.cat(t.calls).abs())]),
    ("rooted", lambda t: [_mean(torch.cat(t.calls).square()) ** 0.5]),
    ("squared_mean", lambda t: [_mean(torch.cat(t.calls)) ** 2]),
]


def examine_mean(answer):
    torch.manual_seed(0)
    _examine_mean(answer, nn.Linear(2, 3), [4, 1, 3], twice=True)
    _examine_mean(answer, nn.Linear(2, 3), [4, 1, 3], twice=False)
    _examine_half(answer)
    broken = _Calls(nn.Linear(2, 3))
    with fails(broken, swallowed="swallowed", left="left_after_error"):
        answer(broken, broken.layer, [torch.ones(1, 2), torch.ones(1, 5)])


def _examine_mean(answer, layer, sizes, twice):
    model, batches = _Calls(layer, twice), [torch.randn(size, 2) for size in sizes]
    layer.register_forward_hook(_does_nothing)
    before = Before(model)
    got = answer(model, layer, list(batches))
    refuse_hooks(before, "hooks_left")
    calls, joined, last = [], [], []
    for batch in batches:
        own = [F.linear(x, layer.weight, layer.bias).detach() for x in _given(batch, twice)]
        calls += own
        last.append(own[-1])
        joined.append(torch.cat(own))
    refuse_first(SEEN, model=model, got=got, want=last, batches=len(batches))
    want = _mean(torch.cat(calls).square())
    if abs(got - want) > 1e-5:
        refuse_result_of(MISTAKES, got, calls=calls, batches=joined, last=last)
        refuse("wrong_mean", got=round(got, 4), want=round(float(want), 4))


SEEN = [  # as soon as `mean_square` has returned
    ("not_all_run", lambda t: len(t.model.returned) != t.batches),
    ("changed_output", lambda t: any(map(_differ, t.model.returned, t.want))),
    ("kept", lambda t: t.model.old),
    ("no_float", lambda t: not isinstance(t.got, float)),
]


def _given(batch, twice):
    return [batch, 2 * batch] if twice and len(batch) > 1 else [batch]


def _differ(found, want):
    return not isinstance(found, torch.Tensor) or found.shape != want.shape or not torch.allclose(found, want)


def _examine_half(answer):
    """Each 300 in half precision: its square is beyond the largest number there is."""
    model = _Calls(nn.Identity())
    got = answer(model, model.layer, [torch.full((size, 2), 300.0, dtype=torch.half) for size in (3, 1)])
    if not isinstance(got, float):
        refuse("no_float", got=got)
    if abs(got - 90_000) > 1:
        refuse("overflow", got=got)


def _mean(numbers):
    numbers = torch.as_tensor([*numbers]) if not isinstance(numbers, torch.Tensor) else numbers
    return numbers.double().mean().item()


MEAN = Exercise("52.B", examine_mean, mean_square)

EXERCISES = [COUNTS, MEAN]
