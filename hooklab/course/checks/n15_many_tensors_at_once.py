"""Checks of notebook 15: many tensors at once."""

import copy
import math
import warnings
from functools import partial
from numbers import Real

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hooklab.course.check import (
    Exercise,
    refuse,
    refuse_latest_call,
    refuse_other_items,
    refuse_same_object,
)

# ---- 15.A: the global norm of a group, once per backward ----


def record_norms(tensors):
    norms = []

    def measure(grads):
        arrived = [grad.norm() for grad in grads if grad is not None]
        if arrived:
            norms.append(torch.stack(arrived).norm().item())

    return norms, register_multi_grad_hook(tensors, measure)


GRADS = [[2.0, 3.0], [6.0], [8.0, 16.0, 4.0]]  # of norms that no single rule but the right one explains


def examine_record_norms(answer):
    warnings.simplefilter("ignore")  # reading the .grad of a tensor that is no leaf warns
    tensors = [torch.ones(len(grad), requires_grad=True) for grad in GRADS]
    norms, handle = _pair(answer(tensors))
    if norms:
        _refuse_shared()
    _backward(tensors, GRADS)
    _examine_first(norms)
    if any(tensor.grad is None for tensor in tensors):
        refuse("cleared")
    if [tensor.grad.tolist() for tensor in tensors] != GRADS:
        refuse("changed", grads=GRADS, tensor=[tensor.grad.tolist() for tensor in tensors])
    _backward(tensors[:2], GRADS[:2])  # the third is not reached
    _backward(tensors, [[2 * number for number in grad] for grad in GRADS])
    _examine_three(norms)
    if [tensor.grad.tolist() for tensor in tensors] != [
        [times * number for number in grad] for grad, times in zip(GRADS, (4, 4, 3), strict=True)
    ]:
        refuse("changed_later")
    _examine_middle(answer, norms)
    _examine_order(answer)
    _backward(tensors, GRADS)
    if len(norms) != 4:
        _refuse_shared()
    handle.remove()
    _backward(tensors, GRADS)
    if len(norms) != 4:
        refuse("not_removed")


def _examine_order(answer):
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    norms, handle = _pair(answer([first, second]))
    (4 * second + 3 * first).backward()  # reaches the second last
    (4 * second).backward()  # and the first not at all
    (0 * first + 0 * second).backward()
    handle.remove()
    for found in norms:
        _expect_number(found)
    found = [round(float(norm), 4) for norm in norms]
    if found == [5, 4]:
        refuse("zero_left_out")
    if found != [5, 4, 0]:
        refuse("one_order_only", found=found)


def _backward(tensors, grads):
    loss = sum((tensor * torch.as_tensor(grad)).sum() for tensor, grad in zip(tensors, grads, strict=True))
    loss.backward()


def _norm(grads):
    return math.sqrt(sum(number**2 for grad in grads for number in grad))


def _close(value, wanted):
    return math.isclose(value, wanted, rel_tol=1e-4)


def _what(got):
    """The type of a value, or of the parts of a tuple, in words."""
    return f"({', '.join(map(_what, got))})" if isinstance(got, tuple) else type(got).__name__


def _pair(got):
    if not isinstance(got, tuple | list) or len(got) != 2 or not isinstance(got[0], list):
        refuse("not_a_pair", got=_what(got))
    if not hasattr(got[1], "remove") or isinstance(got[1], list):
        refuse("no_handle", got=got[1])
    return got


def _examine_first(norms):
    if not norms:
        refuse("nothing_recorded")
    if len(norms) != 1:
        refuse("one_per_tensor", count_norms=len(norms))
    _expect_number(norms[0])
    _examine_value(float(norms[0]))


def _expect_number(found):
    if not isinstance(found, Real | torch.Tensor) or getattr(found, "ndim", 0):  # NumPy's numbers are Real
        shape = f" {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
        refuse("not_a_number", found=found, shape=shape)


def _examine_value(got):
    each = [_norm([grad]) for grad in GRADS]
    if _close(got, _norm(GRADS)):
        return
    if _close(got, sum(each)):
        refuse("sum_of_norms", got=got)
    if _close(got, _norm(GRADS) ** 2):
        refuse("no_root", got=got)
    if any(_close(got, one) for one in each):
        refuse("one_only", got=got)
    for left_out in range(1, len(GRADS)):
        if _close(got, _norm(GRADS[:left_out] + GRADS[left_out + 1 :])):
            refuse("one_missing", got=got, left_out=left_out + 1)
    if _close(got, _norm(GRADS[1:])):  # `backward` reaches the first tensor last
        refuse("last_missing", got=got)
    refuse("wrong_norm", grads=GRADS, grads2=_norm(GRADS), got=got)


def _refuse_shared():
    refuse("shared_list")


def _examine_three(norms):
    if len(norms) == 1:
        refuse("first_only")
    if len(norms) != 3:
        refuse("missed_step", count_norms=len(norms))
    for found in norms:
        _expect_number(found)
    wanted = [_norm(GRADS), _norm(GRADS[:2]), 2 * _norm(GRADS)]
    if not all(_close(float(got), want) for got, want in zip(norms, wanted, strict=True)):
        refuse("other_steps")


def _examine_middle(answer, earlier):
    # Matrices, which `torch.cat` alone cannot join.
    grads = [torch.tensor(GRADS[:1]), torch.tensor(GRADS[1:2]), torch.tensor([[8.0, 16.0], [4.0, 2.0]])]
    middle = [torch.ones_like(grad, requires_grad=True) * 2 for grad in grads]
    norms, handle = _pair(answer(middle))
    if norms or norms is earlier or len(earlier) != 3:
        _refuse_shared()
    _backward(middle, grads)
    handle.remove()
    for norm in norms:
        _expect_number(norm)
    wanted, found = _norm([grad.flatten().tolist() for grad in grads]), [float(norm) for norm in norms]
    if len(found) != 1:
        refuse("leaves_only", wanted=wanted, round=[round(norm, 4) for norm in found])
    if not _close(found[0], wanted):
        refuse("of_matrices", wanted=wanted, found=found[0])


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


def _loss(model, x):
    return model(x).square().sum()


def _twins():
    model = _Tied()
    return model, copy.deepcopy(model), [torch.randn(4, 3) for _ in range(12)]


def _trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def _same(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in pairs]


def examine_step_in_backward(answer):
    for make_optimizer in OPTIMIZERS:
        model, twin, batches = _twins()
        batches[1] = torch.zeros_like(batches[1])  # a gradient of zeros, of `gain`: momentum goes on
        made = []
        handles = _handles(answer(model, _counting(make_optimizer, made)))
        watching, kept = _watch(model)
        reference = make_optimizer(_trained(twin))
        for number, x in enumerate(batches[:3]):
            before = copy.deepcopy(model)
            _backward_of(model, x)
            _loss(twin, x).backward()
            reference.step()
            reference.zero_grad()
            _examine_step(model, twin, before, number)
            _examine_freed(model, kept)
        for handle in watching:
            handle.remove()
        _examine_removed(handles, model, batches[3])
        _examine_own_optimizers(made)
    _examine_left_out(answer)
    _examine_two_models(lambda model, make_optimizer, count: answer(model, make_optimizer))


def _counting(make_optimizer, made):
    """Notes in `made` each optimizer."""

    def make(params):
        made.append(make_optimizer(params))
        return made[-1]

    return make


def _examine_own_optimizers(made):
    most = max((sum(len(group["params"]) for group in one.param_groups) for one in made), default=0)
    if most > 1:
        refuse("shared_optimizer", most=most)


def _examine_left_out(answer):
    model = _Two()
    answer(model, partial(torch.optim.SGD, lr=0.25))
    model(both=False).backward()
    if model.always.item() != 0.75:
        refuse("waited_for_all", model_always=model.always.item())


def _examine_two_models(answer, counts=(1, 1)):
    """The first goes on training after the second was given, with another learning rate."""
    models, rates, returned = (_Two(), _Two()), (0.25, 0.5), []
    for model, rate, count in zip(models, rates, counts, strict=True):
        returned.append(answer(model, partial(torch.optim.SGD, lr=rate), count))
        for _ in range(count):
            model(both=True).backward()
    refuse_same_object(*returned)
    for model, rate, count in zip(models, rates, counts, strict=True):
        before = model.always.item()
        try:
            for _ in range(count):
                model(both=True).backward()
        except Exception:  # a parameter that the second call's notes do not know
            refuse_latest_call()
        if not math.isclose(before - model.always.item(), rate * count):
            refuse_latest_call()


def _backward_of(model, x):
    try:
        _loss(model, x).backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        refuse("others_updated")


def _watch(model):
    """At each arrival: is the gradient of another parameter still there? Hung after the answer's hooks."""
    kept, params = [], _trained(model)

    def note(arrived):
        kept.append(any(param.grad is not None for param in params if param is not arrived))

    return [param.register_post_accumulate_grad_hook(note) for param in params], kept


def _handles(got):
    handles = list(got.values()) if isinstance(got, dict) else got
    if not isinstance(handles, list | tuple) or not handles:
        found = repr(got) if got in ([], (), {}) else type(got).__name__
        refuse("no_handles", found=found)
    refuse_other_items(handles)
    return handles


def _examine_step(model, twin, before, number):
    _examine_frozen(model)
    moved = _moved(model, before)
    if number == 0 and not any(moved):
        refuse("nothing_moved")
    if number == 0:
        _examine_one(moved)
    if number == 0 and not all(moved):
        refuse("some_moved", count_moved=len(moved), moved=sum(moved))
    if not all(_same(model, twin)):
        refuse(
            *(("first_step",) if number == 0 else ("later_steps",)),
            zh="第一步更新之后，权重就和普通训练的不同。每个参数都恰好更新了一次吗？用的是 `make_optimizer` 造的优化器吗？"
            if number == 0
            else "第一步与普通训练一致，后面就不同了。钩子还挂着吗？动量和 Adam 的状态存在优化器里；还有，上一步的梯度留下来了吗？",
            en="After the very first update the weights differ from ordinary training. Was each parameter updated exactly "
            "once? By an optimizer that `make_optimizer` made?"
            if number == 0
            else "The first step agrees with ordinary training, later ones do not. Is the hook still on? Momentum and Adam's "
            "state live in the optimizer; and is a gradient of the step before still there?",
        )


def _moved(model, before):
    return [not torch.equal(one, two) for one, two in zip(_trained(model), _trained(before), strict=True)]


def _examine_frozen(model):
    if model.head.bias.requires_grad:
        refuse("unfrozen")


def _examine_one(moved):
    if sum(moved) == 1:
        refuse("one_moved", count_moved=len(moved))


def _examine_freed(model, kept):
    left = [param for param in model.parameters() if param.grad is not None]
    if left and all(not param.grad.any() for param in left):
        refuse("zeros_kept")
    if left:
        refuse("not_freed", count_left=len(left))
    if any(kept):
        refuse("freed_late")


def _examine_removed(handles, model, x, count=1):
    for handle in handles:
        handle.remove()
    before = copy.deepcopy(model)
    for _ in range(count):
        _loss(model, x).backward()
    if not all(_same(model, before)) or any(param.grad is None for param in _trained(model)):
        refuse("not_removed")


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


def examine_step_every(answer):
    for make_optimizer, count in zip(OPTIMIZERS, (2, 3), strict=True):
        model, twin, batches = _twins()
        made = []
        handles = _handles(answer(model, _counting(make_optimizer, made), count))
        reference = make_optimizer(_trained(twin))
        for number, x in enumerate(batches[: 3 * count], start=1):
            before = copy.deepcopy(model)
            _backward_of(model, x)
            _loss(twin, x).backward()
            if number % count == 0:
                reference.step()
                reference.zero_grad()
            _examine_frozen(model)
            if number == count:
                moved = _moved(model, before)
                _examine_one(moved)
                if 1 < sum(moved) < len(moved):
                    refuse("some_moved", number=number, count=count, count_moved=len(moved), moved=sum(moved))
            _examine_every(model, twin, before, number, count)
        _examine_removed(handles, model, batches[-1], count)
        _examine_own_optimizers(made)
    _examine_own_count(answer)
    _examine_two_models(answer, counts=(2, 3))


class _Two(nn.Module):
    """Two numbers, of which a forward may leave out the second."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, both):
        return (self.always + (self.sometimes if both else 0)).sum()


def _examine_own_count(answer):
    model = _Two()
    handles = _handles(answer(model, partial(torch.optim.SGD, lr=0.25), 2))
    values, others = [], []
    for both in (False, True, True):
        model(both).backward()
        values.append(model.always.item())
        others.append(model.sometimes.item())
    for handle in handles:
        handle.remove()
    if values != [1.0, 0.5, 0.5] or others != [1.0, 1.0, 0.5]:
        refuse("one_count", values=values, others=others)


def _examine_every(model, twin, before, number, count):
    same = _same(model, twin)
    if all(same) and number % count == 0 and any(param.grad is not None for param in model.parameters()):
        refuse("not_freed")
    if all(same):
        return
    if number % count:
        too_early = f"第 {number} 次反向（`count` 为 {count}）之后，有参数已经更新了。"
        refuse(
            "too_early",
            zh=too_early + "每个参数各数各的吗？更新一次之后，计数还对吗？",
            en=f"After backward number {number} (`count` is {count}) some parameter was updated already. Does each "
            "parameter keep its own count? And is the count right after an update?",
        )
    if all(_same(model, before)):
        refuse("never", number=number, count=count)
    refuse("other_sum", count=count)


STEP_EVERY = Exercise("15.C", examine_step_every, step_every)

EXERCISES = [RECORD_NORMS, STEP_IN_BACKWARD, STEP_EVERY]
