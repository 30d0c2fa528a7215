"""Checks of notebook 11: reading gradients."""

import gc
import warnings
import weakref

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, expect_like, refuse

# ---- 11.A: the gradient of any tensor, without touching a .grad ----


def gradient_of(loss, tensor):
    return torch.autograd.grad(loss, tensor)[0]


def examine_gradient_of(answer):
    for power in (3, 4):
        x = torch.randn(2, 3, requires_grad=True)
        hidden = x * 2
        loss = (hidden**power).sum()
        got = answer(loss, hidden)
        touched = x.grad is not None or loss.retains_grad
        _examine_gradient(got, power * hidden.detach() ** (power - 1), hidden, touched)
    leaf, other = torch.randn(3, requires_grad=True), torch.ones(3, requires_grad=True)
    leaf.grad = torch.full((3,), 7.0)
    got = answer((leaf**2 * other).sum(), leaf)
    kept = leaf.grad is not None and torch.equal(leaf.grad, torch.full((3,), 7.0))
    _examine_gradient(got, 2 * leaf.detach(), leaf, touched=not kept or other.grad is not None)


def _examine_gradient(got, want, tensor, touched):
    if isinstance(got, tuple | list) and all(item is None or isinstance(item, Tensor) for item in got):
        refuse("tuple", count_got=len(got), got=got)
    if got is None and touched:
        refuse("got_none")
    if got is None:
        refuse("returned_nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading the .grad of a tensor that is no leaf warns
        filled = tensor.retains_grad or (not tensor.is_leaf and tensor.grad is not None)
    if touched or filled:
        refuse("filled_grad")
    if tensor._backward_hooks:
        refuse("left_behind")
    if isinstance(got, Tensor) and got.requires_grad:
        refuse("attached")
    expect_like(got, want, "gradient")


GRADIENT_OF = Exercise("11.A", examine_gradient_of, gradient_of)

# ---- 11.B: a list into which every gradient of a tensor is copied ----


def record(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(grad.detach().clone()))
    return gradients


FACTORS = (3.0, 0.0, 5.0)


def examine_record(answer):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = x * 2
    gradients = answer(y)
    if not isinstance(gradients, list):
        refuse("not_a_list", gradients=gradients)
    if gradients or answer(x * 3) is gradients:
        refuse("shared_list")
    for factor in FACTORS:
        (y * factor).sum().backward(retain_graph=True)
    _examine_recorded(gradients)
    if x.grad.tolist() != [16.0, 16.0]:
        refuse("changed", x_grad=x.grad.tolist())
    _examine_leaf(answer)
    _examine_copy(answer)
    _examine_freed(answer)


def _examine_recorded(gradients):
    if not gradients:
        refuse("nothing_recorded")
    if gradients[0] is None:
        refuse("read_dot_grad")
    if len(gradients) == 2 and all(isinstance(found, Tensor) and found.any() for found in gradients):
        refuse("zero_for_none")
    if len(gradients) != len(FACTORS):
        refuse("only_last", count_gradients=len(gradients))
    for found, factor in zip(gradients, FACTORS, strict=True):
        want = torch.full((2,), factor, dtype=torch.float64)
        expect_like(found, want, "each_recorded")


def _examine_leaf(answer):
    leaf = torch.ones(2, requires_grad=True)
    gradients = answer(leaf)
    for factor in (3, 5):
        (leaf * factor).sum().backward()
    found = [grad.tolist() if isinstance(grad, Tensor) else grad for grad in gradients]
    if found != [[3.0, 3.0], [5.0, 5.0]]:
        refuse("leaf", found=found)

    if leaf.grad is None or leaf.grad.tolist() != [8.0, 8.0]:
        refuse("leaf_grad", leaf=leaf.grad if leaf.grad is None else leaf.grad.tolist())


def _examine_copy(answer):
    # Careless neighbours: on the same tensor, on a leaf, on another that is given the same gradient.
    for place in ("middle", "leaf", "beside"):
        leaf = torch.ones(2, requires_grad=True)
        one, other = leaf * 2, leaf * 3
        tensor, careless = {"middle": (one, one), "leaf": (leaf, leaf), "beside": (other, one)}[place]
        gradients = answer(tensor)
        careless.register_hook(lambda grad: grad.mul_(100))
        output = one + other if place == "beside" else tensor
        (output * torch.tensor([3.0, 4.0])).sum().backward()
        if gradients[0].tolist() != [3.0, 4.0]:
            refuse("not_a_copy")


def _examine_freed(answer):
    y = torch.ones(2, requires_grad=True) * 2
    alive = weakref.ref(y)
    gradients = answer(y)
    (y * 3).sum().backward()
    del y, gradients
    gc.collect()
    if alive() is not None:
        refuse("never_freed")


RECORD = Exercise("11.B", examine_record, record)

# ---- 11.C: which parameters did backward not reach? ----


def without_gradient(model):
    return [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]


class _HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.dead = nn.Parameter(torch.ones(2))  # reached, with a gradient that is exactly zero
        self.frozen.requires_grad_(False)
        self.own = nn.Parameter(torch.ones(2))  # not used either

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x)) + self.dead * 0


def examine_without_gradient(answer):
    model = _HalfUsed()
    model(torch.randn(4, 2)).sum().backward()
    _examine_names(answer(model))
    if filled := [name for name in ("forgotten.weight", "own") if model.get_parameter(name).grad is not None]:
        refuse("filled_grad", filled=filled[0])
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other[0](torch.randn(4, 2)).sum().backward()
    found = answer(other)
    if other[1].weight.grad is not None:
        refuse("ran_backward")
    if sorted(found) != ["1.bias", "1.weight"]:
        refuse("one_model_only", found=list(found))
    deep = answer(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
    if sorted(deep) != ["0.0.bias", "0.0.weight"]:
        refuse("not_deep_enough", deep=list(deep))


def _examine_names(got):
    if not isinstance(got, list | tuple | set) or any(not isinstance(name, str) for name in got):
        refuse("not_names")
    if any(name.startswith("used") for name in got):
        refuse("data_grad")
    if "dead" in got:
        refuse("zero_counted")
    if any(name.startswith("frozen") for name in got):
        refuse("frozen_counted")
    if sorted(name for name in got if name.startswith("forgotten")) != ["forgotten.bias", "forgotten.weight"]:
        refuse("missed", got=sorted(got))
    if sorted(got) != ["forgotten.bias", "forgotten.weight", "own"]:
        refuse("missed_own", got=sorted(got))


WITHOUT_GRADIENT = Exercise("11.C", examine_without_gradient, without_gradient)

EXERCISES = [GRADIENT_OF, RECORD, WITHOUT_GRADIENT]
