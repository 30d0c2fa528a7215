"""Checks of notebook 12: changing gradients."""

import copy

import torch
from torch import Tensor, nn

from hooklab.course.check import (
    Exercise,
    expect_like,
    refuse,
    refuse_latest_call,
    refuse_other_items,
    refuse_removing_others,
    refuse_same_object,
)

# ---- 12.A: a hook maker that caps the norm of the gradient ----


def cap(limit):
    def hook(grad):
        norm = grad.norm()
        return grad * (limit / norm) if norm > limit else grad

    return hook


def examine_cap(answer):
    hook, other = answer(2.0), answer(100.0)
    for made in (hook, other):
        if not callable(made):
            refuse("not_a_hook", made=made)
    for grad in (torch.tensor([1.0, 4.0]), torch.tensor([[6.0, 3.0], [1.0, -8.0]], dtype=torch.float64)):
        _examine_large(hook, grad, grad * (2.0 / grad.norm()))
    spread = torch.full((3,), -1.9)  # no entry is above the limit, the norm is
    _examine_large(hook, spread, spread * (2.0 / spread.norm()))
    for small in (torch.tensor([0.3, -0.4]), torch.tensor([[2.0]])):
        _examine_small(hook, small, 2.0)
    _examine_small(other, torch.tensor([30.0, 40.0]), 100.0)
    _examine_small(hook, torch.tensor([1.2, 1.2]), 2.0)  # whose sum is larger
    _examine_zero(hook)


def _examine_large(hook, grad, want):
    norm, before = grad.norm().item(), grad.clone()
    got = hook(grad)
    if not torch.equal(grad, before):
        refuse("edited_in_place")
    if got is None:
        refuse("returned_nothing", norm=norm)
    if isinstance(got, Tensor) and got.shape == grad.shape and torch.equal(got, grad):
        refuse("unchanged", grad=grad, norm=norm)
    if isinstance(got, Tensor) and got.shape == grad.shape and torch.equal(got, grad.clamp(-2.0, 2.0)):
        refuse("clipped_entries", grad=grad, got=got)
    if isinstance(got, Tensor) and (got.shape, got.dtype) == (grad.shape, grad.dtype):
        _examine_length(grad, got)
    expect_like(got, want, "gradient_hook")


def _examine_length(grad, got):
    got, norm, length = got.detach(), grad.norm().item(), got.norm().item()
    if not torch.allclose(got * norm, grad * length, rtol=1e-4):
        refuse("wrong_direction", grad=grad, got=got)
    if abs(length - 2.0) > 1e-3:
        refuse("wrong_length", grad=grad, norm=norm, got=got, length=length)


def _examine_small(hook, grad, limit):
    given = grad.clone()
    got = hook(given)
    if not torch.equal(given, grad):
        refuse("edited_small", limit=limit, grad=grad, given=given)
    if isinstance(got, Tensor) and not torch.allclose(got, grad):
        refuse("changed_small", limit=limit, grad=grad, got=got)
    if got is not None:
        expect_like(got, grad, "gradient_hook")


def _examine_zero(hook):
    got = hook(torch.zeros(3))
    if isinstance(got, Tensor) and got.isnan().any():
        refuse("nan_at_zero")
    _examine_small(hook, torch.zeros(3), 2.0)


def _short(tensor):
    return [float(f"{value:.4g}") for value in tensor.flatten().tolist()]


CAP = Exercise("12.A", examine_cap, cap)

# ---- 12.B: weight decay for a whole model ----


def decay(model, strength):
    def hook_for(param):
        return lambda grad: grad + strength * param.detach()

    return [param.register_hook(hook_for(param)) for param in model.parameters() if param.requires_grad]


class _Stack(nn.Module):
    """Parameters of one shape, so that a hook with the wrong one raises nothing; one is frozen, one in a child of a child."""

    def __init__(self) -> None:
        super().__init__()
        rows = (torch.randperm(8) + 1.0).reshape(4, 2)  # distinct whole numbers: sums are exact
        self.weight, self.gain, self.frozen, last = (nn.Parameter(row) for row in rows)
        self.frozen.requires_grad_(False)
        self.child = nn.ModuleDict({"inner": nn.ParameterDict({"bias": last})})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.gain + (x * 2) * self.child["inner"]["bias"] + self.frozen


class _Sum(nn.Module):
    """Two parameters that receive one gradient, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.left + self.right) * x


def examine_decay(answer):
    model, x, strength = _Stack(), torch.tensor([2.0, -3.0]), 0.5
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    (model(x) * 3).sum().backward()  # what is there before must stay
    handles = answer(model, strength)
    if any(not torch.equal(param, values[name]) for name, param in model.named_parameters()):
        refuse("changed_weights")
    if model.frozen.requires_grad:
        refuse("unfrozen")
    if not isinstance(handles, list | tuple):
        refuse("no_handles", handles=handles)
    refuse_other_items(handles)
    if not handles:
        refuse("no_hooks")
    with torch.no_grad():  # a step of training
        for param in model.parameters():
            param.add_(1.0)
    before = copy.deepcopy(model)  # a deep copy has none of the tensor hooks
    plain, found = _gradients(before, x), _gradients(model, x)
    if not all(map(torch.equal, model.parameters(), before.parameters())):
        refuse("changed_in_backward")
    _examine_decayed(model, plain, found, strength, values)
    _examine_neighbours(answer)
    with torch.no_grad():  # and one more step
        for param in model.parameters():
            param.add_(1.0)
    plain, found = _gradients(copy.deepcopy(model), 2 * x), _gradients(model, 2 * x)
    want = {name: plain[name] + strength * dict(model.named_parameters())[name].detach() for name in plain}
    if not all(torch.allclose(found[name], want[name]) for name in plain):
        refuse("first_only")
    model(2 * x).sum().backward()  # on top of the last
    if not all(torch.allclose(dict(model.named_parameters())[name].grad, 2 * want[name]) for name in want):
        refuse("empty_only")
    for handle in handles:
        handle.remove()
    if any(not torch.allclose(found, plain[name]) for name, found in _gradients(model, 2 * x).items()):
        refuse("not_removable")
    _examine_two_models(answer)


def _examine_two_models(answer):
    models, strengths, x = (_Sum(), _Sum()), (0.5, 2.0), torch.tensor([10.0, 20.0])
    refuse_same_object(*[answer(model, strength) for model, strength in zip(models, strengths, strict=True)])
    for model, strength in zip(models, strengths, strict=True):
        want = {name: x + strength * param.detach() for name, param in model.named_parameters()}
        if not all(torch.allclose(grad, want[name]) for name, grad in _gradients(model, x).items()):
            refuse_latest_call()


def _gradients(model, x):
    model.zero_grad()
    model(x).sum().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.requires_grad}


def _examine_decayed(model, plain, found, strength, values):
    added = {name: found[name] - plain[name] for name in plain}
    want = {name: strength * param.detach() for name, param in model.named_parameters()}
    if not any(map(torch.any, added.values())):
        refuse("nothing_added")
    if all(torch.allclose(found[name], want[name]) for name in found):
        refuse("replaced")
    if all(torch.allclose(added[name], strength * values[name]) for name in added):
        refuse("stale")
    if all(torch.allclose(share, want["child.inner.bias"]) for share in added.values()):
        refuse("last_one")
    missed = [name for name in added if not added[name].any()]
    if missed:
        refuse("missed", missed=missed)
    for name in found:
        if not torch.allclose(found[name], plain[name] + want[name]):
            value, share = _short(dict(model.named_parameters())[name]), _short(added[name])
            refuse("wrong_addend", strength=strength, name=name, value=value, share=share)


def _examine_neighbours(answer):
    model = _Sum()
    answer(model, 0.5)
    x = torch.tensor([10.0, 20.0])
    found = _gradients(model, x)
    if all(torch.equal(grad, x) for grad in found.values()):
        refuse("asks_for_grad")
    if not (torch.allclose(found["left"], torch.tensor([10.5, 20.5]))
            and torch.allclose(found["right"], torch.tensor([11.0, 21.0]))):  # fmt: skip
        refuse("edited_in_place")


DECAY = Exercise("12.B", examine_decay, decay)

# ---- 12.C: freeze some rows of a weight ----


def freeze_rows(weight, rows):
    def hook(grad):
        grad = grad.clone()
        grad[rows] = 0
        return grad

    return weight.register_hook(hook)


def examine_freeze_rows(answer):
    factors = torch.arange(1.0, 16.0).reshape(5, 3)  # no row beside the frozen ones is their complement
    for dtype, rows in ((torch.float32, [0, 2]), (torch.float64, [3]), (torch.bfloat16, [1, 2])):
        for weight_first in (True, False):
            _examine_frozen(answer, factors.to(dtype), rows, weight_first)
    weights, frozen = [nn.Parameter(torch.ones(4, 2)) for _ in range(2)], ([0, 3], [1])
    for weight, rows in zip(weights, frozen, strict=True):
        answer(weight, list(rows))
    for weight, rows in zip(weights, frozen, strict=True):
        weight.sum().backward()
        zeros = [row for row in range(4) if not weight.grad[row].any()]
        if not zeros:
            refuse("gone_with_handle")
        if zeros != rows:
            refuse_latest_call()
    weight = nn.Parameter(torch.ones(4, 2))
    refuse_removing_others(weight.register_hook, lambda: answer(weight, [1]))


def _examine_frozen(answer, factors, rows, weight_first):
    weight, neighbour = (nn.Parameter(torch.ones_like(factors)) for _ in range(2))

    def gradient(times=1):
        weight.grad = neighbour.grad = None
        both = weight + neighbour if weight_first else neighbour + weight  # one gradient for the two of them
        try:
            (both * factors * times).sum().backward()
        except RuntimeError as error:
            if "has changed the type of value" not in str(error):
                raise
            refuse("changed_dtype", weight=weight)
        return weight.grad

    handle = answer(weight, list(rows))
    if not weight.requires_grad:
        refuse("no_gradient")
    if not torch.equal(weight, torch.ones_like(weight)):
        refuse("changed_weights")
    if isinstance(handle, list | tuple) or not hasattr(handle, "remove"):  # a list has a remove() of its own
        refuse("no_handle", handle=handle)
    got, want = gradient(), factors.clone()
    want[rows] = 0
    if torch.equal(got, factors) and weight._backward_hooks:
        refuse("returned_nothing")
    _examine_rows(weight, got, want, factors, rows)
    if not torch.equal(neighbour.grad, factors):
        refuse("edited_in_place")
    if not torch.equal(gradient(times=2), 2 * want):
        refuse("first_only")
    if not torch.equal(weight, torch.ones_like(weight)):
        refuse("changed_in_backward")
    handle.remove()
    if not torch.equal(gradient(), factors):
        refuse("not_removable")


def _examine_rows(weight, got, want, factors, rows):
    if torch.equal(got, factors) and weight._post_accumulate_grad_hooks:
        refuse("edited_copy")
    if torch.equal(got, factors):
        refuse("not_frozen")
    if not got.any():
        refuse("froze_everything", rows=rows)
    rest = factors - want
    if torch.equal(got, rest):
        refuse("inverted")
    zeros = [row for row in range(len(got)) if not got[row].any()]
    if zeros != rows:
        refuse("wrong_rows", rows=rows, zeros=zeros)
    expect_like(got, want, "gradient_weight")


FREEZE_ROWS = Exercise("12.C", examine_freeze_rows, freeze_rows)

EXERCISES = [CAP, DECAY, FREEZE_ROWS]
