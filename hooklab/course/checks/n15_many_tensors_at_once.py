"""Checks of notebook 15: many tensors at once."""

import copy
import math
import warnings
from functools import partial
from numbers import Real

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from hooklab.course.check import (
    Exercise,
    refuse,
    refuse_first,
    refuse_latest_call,
    refuse_other_items,
    refuse_same_object,
)
from hooklab.course.checks.tensor_hooks import values

# ---- 15.A: the global norm of a group, once per backward ----


def record_norms(tensors):
    norms = []

    def measure(grads):
        arrived = [grad.norm() for grad in grads if grad is not None]
        if arrived:
            norms.append(torch.stack(arrived).norm().item())

    return norms, register_multi_grad_hook(tensors, measure)


GRADS = [[2.0, 3.0], [6.0], [8.0, 16.0, 4.0]]  # of norms that no single rule but the right one explains
NORMS = [math.hypot(*grad) for grad in GRADS]

FIRST_NORM = [  # the number that the first backward leaves; it reaches the first tensor last
    ("sum_of_norms", lambda t: _close(t.got, sum(NORMS))),
    ("no_root", lambda t: _close(t.got, t.wanted**2)),
    ("one_only", lambda t: any(_close(t.got, norm) for norm in NORMS)),
    ("one_missing", lambda t: _missing(t, 2) or _missing(t, 3)),
    ("last_missing", lambda t: _missing(t, 1)),
    ("wrong_norm", lambda t: not _close(t.got, t.wanted)),
]


def examine_record_norms(answer):
    warnings.simplefilter("ignore")  # reading the .grad of a tensor that is no leaf warns
    tensors = [torch.ones(len(grad), requires_grad=True) for grad in GRADS]
    norms, handle = _pair(answer(tensors))
    if norms:
        refuse("shared_list")
    _backward(tensors, GRADS)
    if not norms:
        refuse("nothing_recorded")
    if len(norms) != 1:
        refuse("one_per_tensor", count=len(norms))
    refuse_first(FIRST_NORM, got=_numbers(norms)[0], wanted=math.hypot(*NORMS), grads=GRADS)
    found = values(tensor.grad for tensor in tensors)
    if None in found:
        refuse("cleared")
    if found != GRADS:
        refuse("changed", wanted=GRADS, found=found)
    _backward(tensors[:2], GRADS[:2])  # the third is not reached
    _backward(tensors, [[2 * number for number in grad] for grad in GRADS])
    _examine_three(norms)
    sums = [[times * number for number in grad] for grad, times in zip(GRADS, (4, 4, 3), strict=True)]
    if values(tensor.grad for tensor in tensors) != sums:
        refuse("changed_later")
    _examine_middle(answer, norms)
    _examine_order(answer)
    _backward(tensors, GRADS)
    if len(norms) != 4:
        refuse("shared_list")
    handle.remove()
    _backward(tensors, GRADS)
    if len(norms) != 4:
        refuse("not_removed")


def _pair(got):
    if not isinstance(got, tuple | list) or len(got) != 2 or not isinstance(got[0], list):
        refuse("not_a_pair", types=_types(got))
    if not hasattr(got[1], "remove") or isinstance(got[1], list):
        refuse("no_handle", got=got[1])
    return got


def _types(got):
    """The type of a value, or those of the parts of a tuple."""
    return f"({', '.join(map(_types, got))})" if isinstance(got, tuple) else type(got).__name__


def _backward(tensors, grads):
    loss = sum((tensor * torch.as_tensor(grad)).sum() for tensor, grad in zip(tensors, grads, strict=True))
    loss.backward()


def _close(value, wanted):
    return math.isclose(value, wanted, rel_tol=1e-4)


def _missing(t, number):
    t.number = number
    return _close(t.got, math.hypot(*NORMS[: number - 1], *NORMS[number:]))


def _numbers(norms):
    for found in norms:
        if not isinstance(found, Real | Tensor) or getattr(found, "ndim", 0):  # NumPy's numbers are Real
            shape = f" {tuple(found.shape)}" if isinstance(found, Tensor) else ""
            refuse("not_a_number", found=found, shape=shape)
    return [float(norm) for norm in norms]


def _examine_three(norms):
    if len(norms) == 1:
        refuse("first_only")
    if len(norms) != 3:
        refuse("missed_step", count=len(norms))
    wanted = math.hypot(*NORMS), math.hypot(*NORMS[:2]), 2 * math.hypot(*NORMS)
    if not all(map(_close, _numbers(norms), wanted)):
        refuse("other_steps")


def _examine_middle(answer, earlier):
    # Matrices, which `torch.cat` alone cannot join.
    grads = [torch.tensor(GRADS[:1]), torch.tensor(GRADS[1:2]), torch.tensor([[8.0, 16.0], [4.0, 2.0]])]
    middle = [torch.ones_like(grad, requires_grad=True) * 2 for grad in grads]
    norms, handle = _pair(answer(middle))
    if norms or norms is earlier or len(earlier) != 3:
        refuse("shared_list")
    _backward(middle, grads)
    handle.remove()
    wanted, found = math.hypot(*(grad.norm() for grad in grads)), _numbers(norms)
    if len(found) != 1:
        refuse("leaves_only", wanted=wanted, found=[round(norm, 4) for norm in found])
    if not _close(found[0], wanted):
        refuse("of_matrices", wanted=wanted, found=found[0])


def _examine_order(answer):
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    norms, handle = _pair(answer([first, second]))
    (4 * second + 3 * first).backward()  # reaches the second last
    (4 * second).backward()  # and the first not at all
    (0 * first + 0 * second).backward()
    handle.remove()
    found = [round(norm, 4) for norm in _numbers(norms)]
    if found == [5, 4]:
        refuse("zero_left_out")
    if found != [5, 4, 0]:
        refuse("one_order_only", found=found)


RECORD_NORMS = Exercise("15.A", examine_record_norms, record_norms)

# ---- 15.B: the optimizer inside backward ----


def step_in_backward(model, make_optimizer):
    params = [param for param in model.parameters() if param.requires_grad]
    optimizers = {param: make_optimizer([param]) for param in params}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in params]


OPTIMIZERS = [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.05)]


class _Tied(nn.Module):
    """One layer used twice, another with its weight, one parameter frozen, one of the model's own."""

    def __init__(self):
        super().__init__()
        self.tied, self.head, self.again = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 3, bias=False)
        self.again.weight = self.tied.weight
        self.head.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x):
        twice = self.tied(torch.tanh(self.tied(x * self.gain)))
        return self.head(torch.tanh(self.again(torch.tanh(twice))))


class _Two(nn.Module):
    """Two numbers, of which a forward may leave out the second."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, both):
        return (self.always + (self.sometimes if both else 0)).sum()


UPDATED = [  # after each backward, in which `moved` of the parameters have changed; those `left` have a `.grad`
    ("unfrozen", lambda t: t.model.head.bias.requires_grad),
    ("nothing_moved", lambda t: t.number == 1 and not t.moved),
    ("one_moved", lambda t: t.number == 1 and t.moved == 1),
    ("some_moved", lambda t: t.number == 1 and t.moved < t.total),
    ("first_step", lambda t: t.number == 1 and not t.same),
    ("later_steps", lambda t: not t.same),
    ("zeros_kept", lambda t: t.left and not any(param.grad.any() for param in t.left)),
    ("not_freed", lambda t: t.left),
    ("freed_late", lambda t: any(t.late)),
]


def examine_step_in_backward(answer):
    def every(model, make_optimizer, count):
        return answer(model, make_optimizer)

    _examine_training(every, (1, 1), UPDATED)
    model = _Two()
    answer(model, partial(torch.optim.SGD, lr=0.25))
    model(both=False).backward()
    if model.always.item() != 0.75:
        refuse("waited_for_all", value=model.always.item())
    _examine_two_models(every, (1, 1))


def _examine_training(answer, counts, mistakes):
    """The answer's model is trained next to its twin, which an optimizer updates outside, after `count` backwards."""
    for make_optimizer, count in zip(OPTIMIZERS, counts, strict=True):
        model, batches, made = _Tied(), torch.randn(12, 4, 3), []
        batches[count] = 0  # the second update begins with a gradient of zeros, of `gain`: momentum goes on
        twin = copy.deepcopy(model)
        handles = _handles(answer(model, _noting(make_optimizer, made), count))
        watching, late = _watch(model)
        reference = make_optimizer(trained(twin))
        for number, x in enumerate(batches[: 3 * count], start=1):
            before = copy.deepcopy(model)
            _backward_of(model, x)
            _loss(twin, x).backward()
            if number % count == 0:
                reference.step()
                reference.zero_grad()
            moved = [not torch.equal(now, was) for now, was in zip(trained(model), trained(before), strict=True)]
            left = [param for param in model.parameters() if param.grad is not None]
            facts = {"model": model, "number": number, "count": count, "moved": sum(moved), "total": len(moved)}
            facts |= {"same": _same(model, twin), "left": left, "left_count": len(left), "late": late}
            refuse_first(mistakes, **facts)
        for handle in watching:
            handle.remove()
        _examine_removed(handles, model, batches[-1], count)
        most = max((sum(len(group["params"]) for group in one.param_groups) for one in made), default=0)
        if most > 1:
            refuse("shared_optimizer", most=most)


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def _loss(model, x):
    return model(x).square().sum()


def _handles(got):
    handles = list(got.values()) if isinstance(got, dict) else got
    if not isinstance(handles, list | tuple):
        refuse("no_handles", got=got)
    if not handles:
        refuse("no_handles-empty", got=got)
    refuse_other_items(handles)
    return handles


def _noting(make_optimizer, made):
    def make(params):
        made.append(make_optimizer(params))
        return made[-1]

    return make


def _watch(model):
    """At each arrival: is the gradient of another parameter still there? Hung after the answer's hooks."""
    late, params = [], trained(model)

    def note(arrived):
        late.append(any(param.grad is not None for param in params if param is not arrived))

    return [param.register_post_accumulate_grad_hook(note) for param in params], late


def _backward_of(model, x):
    try:
        _loss(model, x).backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        refuse("others_updated")


def _same(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in pairs)


def _examine_removed(handles, model, x, count):
    for handle in handles:
        handle.remove()
    before = copy.deepcopy(model)
    for _ in range(count):
        _loss(model, x).backward()
    if not _same(model, before) or any(param.grad is None for param in trained(model)):
        refuse("not_removed")


def _examine_two_models(answer, counts):
    """The first is trained after the second was given, with another learning rate."""
    models, rates = (_Two(), _Two()), (0.25, 0.5)
    calls = [*zip(models, rates, counts, strict=True)]
    refuse_same_object(*(answer(model, partial(torch.optim.SGD, lr=rate), count) for model, rate, count in calls))
    for model, rate, count in calls:
        try:
            for _ in range(count):
                model(both=True).backward()
        except Exception:  # a parameter that the second call's notes do not know
            refuse_latest_call()
        if not math.isclose(1.0 - model.always.item(), rate * count):
            refuse_latest_call()


STEP_IN_BACKWARD = Exercise("15.B", examine_step_in_backward, step_in_backward)

# ---- 15.C: the same with gradient accumulation ----


def step_every(model, make_optimizer, count):
    params = [param for param in model.parameters() if param.requires_grad]
    optimizers = {param: make_optimizer([param]) for param in params}
    arrived = dict.fromkeys(params, 0)

    def step(param):
        arrived[param] += 1
        if arrived[param] % count == 0:
            optimizers[param].step()
            optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in params]


SUMMED = [  # after each backward, as in `UPDATED`
    ("unfrozen", lambda t: t.model.head.bias.requires_grad),
    ("one_moved", lambda t: t.number == t.count and t.moved == 1),
    ("some_moved", lambda t: t.number == t.count and 1 < t.moved < t.total),
    ("not_freed", lambda t: t.number % t.count == 0 and t.same and t.left),
    ("too_early", lambda t: t.number % t.count and not t.same),
    ("never", lambda t: not t.same and not t.moved),
    ("other_sum", lambda t: not t.same),
]


def examine_step_every(answer):
    _examine_training(answer, (2, 3), SUMMED)
    model = _Two()
    handles = _handles(answer(model, partial(torch.optim.SGD, lr=0.25), 2))
    always, sometimes = [], []
    for both in (False, True, True):
        model(both).backward()
        always.append(model.always.item())
        sometimes.append(model.sometimes.item())
    for handle in handles:
        handle.remove()
    if always != [1.0, 0.5, 0.5] or sometimes != [1.0, 1.0, 0.5]:
        refuse("one_count", always=always, sometimes=sometimes)
    _examine_two_models(answer, (2, 3))


STEP_EVERY = Exercise("15.C", examine_step_every, step_every)

EXERCISES = [RECORD_NORMS, STEP_IN_BACKWARD, STEP_EVERY]
