"""clip_gradients: one hook on each parameter, gone as one."""

import copy
import math
import pickle

import pytest
import torch
from models import Constant, mlp, same_state, state_of
from torch import nn

from hooklab import clip_gradients, hooks_on, no_leftovers


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 2)


def gradients(model, scale=100.0):
    model.zero_grad()
    (model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().sum() * scale).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    "bounds", [{"min": -0.5, "max": 0.5}, {"max": 0.1}, {"min": 0.0}, {"min": 1, "max": 1}]
)
def test_one_backward_gives_what_clamping_afterwards_gives(model, bounds):
    plain = gradients(model)
    with clip_gradients(model, **bounds):
        clipped = gradients(model)
    assert any(not torch.equal(plain[name], clipped[name]) for name in plain)
    for name in plain:
        assert torch.equal(clipped[name], plain[name].clamp(**bounds))


def test_one_backward_gives_what_clip_grad_value_gives(model):
    with clip_gradients(model, -0.01, 0.01):
        clipped = gradients(model)
    gradients(model)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert all(torch.equal(param.grad, clipped[name]) for name, param in model.named_parameters())


def test_each_backward_is_clipped_before_it_is_added():
    weight = nn.Linear(1, 1, bias=False)
    with clip_gradients(weight, -1, 1):
        for _ in range(3):
            weight(torch.tensor([[5.0]])).sum().backward()
    assert weight.weight.grad.item() == 3


def test_a_neighbour_that_shares_the_gradient_is_not_touched():
    bias, other = nn.Parameter(torch.zeros(2)), torch.zeros(2, requires_grad=True)
    holder = nn.Module()
    holder.bias = bias
    with clip_gradients(holder, -1, 1):
        ((bias + other) * 5).sum().backward()
    assert bias.grad.tolist() == [1, 1]
    assert other.grad.tolist() == [5, 5]


def test_nan_stays_nan_and_infinity_is_clipped():
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.ones(3))
    with clip_gradients(holder, -1, 1):
        (holder.weight * torch.tensor([math.nan, math.inf, 0.5])).sum().backward()
    assert math.isnan(holder.weight.grad[0])
    assert holder.weight.grad[1:].tolist() == [1, 0.5]


def test_a_parameter_whose_gradient_is_none_has_none():
    weight = nn.Parameter(torch.ones(2))
    with clip_gradients(nn.ParameterList([weight]), -1, 1):
        Constant.apply(weight).sum().backward()
    assert weight.grad is None


def test_frozen_parameters_are_passed_over(model):
    model[0].requires_grad_(False)
    with clip_gradients(model, -1, 1):
        assert [hook.place for hook in hooks_on(model)] == ["2.weight", "2.bias"]


def test_after_the_block_nothing_is_left_also_when_it_raises(model):
    handle = model[0].weight.register_hook(lambda grad: None)
    before = state_of(model)
    with no_leftovers(model), pytest.raises(ZeroDivisionError), clip_gradients(model, -1, 1):
        raise ZeroDivisionError
    assert same_state(before, state_of(model))
    assert [hook.owner for hook in hooks_on(model)] == ["user"]
    handle.remove()


def test_after_the_block_the_model_is_pickled_and_copied_as_before(model):
    unclipped = gradients(model)
    model.zero_grad()
    before, plain = state_of(model), pickle.dumps(model)
    with no_leftovers(model), clip_gradients(model, -1, 1):
        gradients(model)
        model.zero_grad()
    assert same_state(before, state_of(model))
    assert pickle.dumps(model) == plain
    for twin in (copy.deepcopy(model), pickle.loads(plain)):
        assert hooks_on(twin) == []
        assert list(twin.state_dict()) == list(model.state_dict())
        assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
        assert all(torch.equal(grad, unclipped[name]) for name, grad in gradients(twin).items())


def test_nested_blocks_both_clip_and_removing_twice_is_harmless(model):
    outer = clip_gradients(model, -1, 1)
    with clip_gradients(model, -0.1, 0.1):
        inside = gradients(model)
    after = gradients(model)
    outer.remove()
    outer.remove()
    assert max(grad.abs().max() for grad in inside.values()) == pytest.approx(0.1)
    assert max(grad.abs().max() for grad in after.values()) == 1
    assert hooks_on(model) == []


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((), TypeError, "clip_gradients was given no bound; give min, max or both"),
        ((1, -1), ValueError, r"min=1, max=-1\): min is above max; did you mean min=-1, max=1\?"),
        ((math.nan,), ValueError, "NaN bound"),
        ((torch.tensor(1.0),), TypeError, r"found Tensor; give a plain number: .item\(\)"),
        (("0.1",), TypeError, r"clip_gradients\(min=...\): expected a number, found str"),
    ],
)
def test_bad_bounds_are_refused_and_no_hook_stays(model, arguments, error, words):
    with pytest.raises(error, match=words):
        clip_gradients(model, *arguments)
    assert hooks_on(model) == []


def test_a_model_with_nothing_to_clip_is_refused(model):
    with pytest.raises(ValueError, match="found no parameter in this ReLU"):
        clip_gradients(nn.ReLU(), -1, 1)
    with pytest.raises(ValueError, match="found only frozen parameters"):
        clip_gradients(model.requires_grad_(False), -1, 1)
    with pytest.raises(TypeError, match="clip_gradients: expected a module, found list"):
        clip_gradients(list(model.parameters()), -1, 1)


def test_a_parameter_that_takes_no_hook_leaves_none_on_the_others():
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
    with no_leftovers(model), pytest.raises(ValueError, match="uninitialized parameter"):
        clip_gradients(model, -1, 1)


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="complex numbers have no order"):
        clip_gradients(nn.Linear(2, 2, dtype=torch.complex64), -1, 1)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 1e5), (torch.bfloat16, 1e39), (torch.float32, 1e39)]
)
def test_a_bound_beyond_the_dtype_bounds_nothing(dtype, bound):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    layer = nn.ParameterList([weight])
    factors = torch.tensor([-2.0, 0.5, torch.inf], dtype=dtype)
    with clip_gradients(layer, -1, bound):
        (weight * factors).sum().backward()
    assert weight.grad.tolist() == [-1, 0.5, math.inf]
