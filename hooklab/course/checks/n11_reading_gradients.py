"""Checks of notebook 11: reading gradients."""

import warnings

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, expect_like, refuse, refuse_first
from hooklab.course.checks.tensor_hooks import backward, refuse_never_freed, values

# ---- 11.A: the gradient of any tensor, without touching a .grad ----


def gradient_of(loss, tensor):
    return torch.autograd.grad(loss, tensor)[0]


GRADIENT = [  # `touched` is whether a `.grad` of another tensor has changed
    ("got_none", lambda t: t.got is None and t.touched),
    ("returned_nothing", lambda t: t.got is None),
    ("filled_grad", lambda t: t.touched or _filled(t.tensor)),
    ("left_behind", lambda t: t.tensor._backward_hooks),
    ("attached", lambda t: isinstance(t.got, Tensor) and t.got.requires_grad),
]


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
    touched = values([leaf.grad, other.grad]) != [[7.0, 7.0, 7.0], None]
    _examine_gradient(got, 2 * leaf.detach(), leaf, touched)


def _examine_gradient(got, want, tensor, touched):
    if isinstance(got, tuple | list) and all(isinstance(item, Tensor | None) for item in got):
        refuse("tuple", got=got, count=len(got))
    refuse_first(GRADIENT, got=got, tensor=tensor, touched=touched)
    expect_like(got, want, "gradient")


def _filled(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading the .grad of a tensor that is no leaf warns
        return not tensor.is_leaf and (tensor.retains_grad or tensor.grad is not None)


GRADIENT_OF = Exercise("11.A", examine_gradient_of, gradient_of)

# ---- 11.B: a list into which every gradient of a tensor is copied ----


def record(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(grad.detach().clone()))
    return gradients


RECORDED = [  # three backwards of `y`, one of them with a gradient of zeros
    ("nothing_recorded", lambda t: not t.gradients),
    ("read_dot_grad", lambda t: t.gradients[0] is None),
    ("zero_for_none", lambda t: values(t.gradients) == [[3.0, 3.0], [5.0, 5.0]]),
    ("only_last", lambda t: len(t.gradients) != 3),
]


def examine_record(answer):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = x * 2
    gradients = answer(y)
    if not isinstance(gradients, list):
        refuse("not_a_list", gradients=gradients)
    if gradients or answer(x * 3) is gradients:
        refuse("shared_list")
    backward(y, 3, 0, 5)
    refuse_first(RECORDED, gradients=gradients, count=len(gradients))
    for found, factor in zip(gradients, (3, 0, 5), strict=True):
        expect_like(found, torch.full_like(x, factor), "each_recorded")
    if x.grad.tolist() != [16.0, 16.0]:
        refuse("changed", found=x.grad)
    leaf = torch.ones(2, requires_grad=True)
    gradients = answer(leaf)
    backward(leaf, 3, 5)
    if (found := values(gradients)) != [[3.0, 3.0], [5.0, 5.0]]:
        refuse("leaf", found=found)
    if values([leaf.grad]) != [[8.0, 8.0]]:
        refuse("leaf_grad", found=leaf.grad)
    _examine_copy(answer)
    refuse_never_freed(answer)


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


NAMES = [  # of the half used model, after its backward
    ("data_grad", lambda t: any(name.startswith("used") for name in t.got)),
    ("zero_counted", lambda t: "dead" in t.got),
    ("frozen_counted", lambda t: any(name.startswith("frozen") for name in t.got)),
    ("missed", lambda t: [name for name in t.got if name.startswith("forgotten")] != t.want[:2]),
    ("missed_own", lambda t: t.got != t.want),
]


def examine_without_gradient(answer):
    model = _HalfUsed()
    model(torch.randn(4, 2)).sum().backward()
    got = answer(model)
    if not isinstance(got, list | tuple | set) or any(not isinstance(name, str) for name in got):
        refuse("not_names")
    refuse_first(NAMES, got=sorted(got), want=["forgotten.bias", "forgotten.weight", "own"])
    if filled := [name for name in ("forgotten.weight", "own") if model.get_parameter(name).grad is not None]:
        refuse("filled_grad", name=filled[0])
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other[0](torch.randn(4, 2)).sum().backward()
    found = list(answer(other))
    if other[1].weight.grad is not None:
        refuse("ran_backward")
    if sorted(found) != ["1.bias", "1.weight"]:
        refuse("one_model_only", found=found)
    found = list(answer(nn.Sequential(nn.Sequential(nn.Linear(2, 2)))))
    if sorted(found) != ["0.0.bias", "0.0.weight"]:
        refuse("not_deep_enough", found=found)


WITHOUT_GRADIENT = Exercise("11.C", examine_without_gradient, without_gradient)

EXERCISES = [GRADIENT_OF, RECORD, WITHOUT_GRADIENT]
