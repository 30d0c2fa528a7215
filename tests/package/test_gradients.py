"""watch, scale, clip, zero and clip_gradients, compared with PyTorch or with arithmetic done by hand."""

import copy
import gc
import io
import math
import pickle
import weakref
from fractions import Fraction
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from models import Constant, mlp, same_state, state_of
from torch import nn

from hooklab import clip, clip_gradients, hooks_on, no_leftovers, scale, watch, zero


@pytest.fixture
def x():
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 2)


# ---- watch ----


def test_watch_sees_what_retain_grad_and_the_leaf_keep(x):
    y = x * x
    y.retain_grad()
    with watch(x=x, y=y) as log:
        (y * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert torch.equal(log["y"], y.grad)
    assert torch.equal(log["x"], x.grad)
    assert log.order == ["y", "x"]


def test_watch_keeps_every_gradient_and_answers_with_the_last(x):
    y = x * 2
    log = watch(y=y)
    (y * 3).sum().backward(retain_graph=True)
    (y * 5).sum().backward()
    assert [gradient[0].item() for gradient in log.history["y"]] == [3.0, 5.0]
    assert log["y"].tolist() == [5.0, 5.0, 5.0]


def test_watch_hands_out_copies_that_a_later_hook_cannot_change(x):
    y = x * 2
    log = watch(y=y)
    y.register_hook(lambda grad: grad.mul_(100))
    (y * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert log["y"].tolist() == [1.0, 2.0, 3.0]


def test_watch_changes_no_gradient(x):
    (x**3).sum().backward()
    plain, x.grad = x.grad, None
    y = x**3
    with watch(x=x, y=y):
        y.sum().backward()
    assert torch.equal(x.grad, plain)


def test_watch_keeps_no_graph_alive_when_the_gradient_has_one(x):
    y = x**2
    log = watch(y=y)
    torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert not log["y"].requires_grad


def test_watch_keeps_shape_dtype_and_sparsity_of_the_gradient():
    table = torch.nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
    with watch(weight=table.weight) as log:
        table(torch.tensor([1, 1])).sum().backward()
    assert log["weight"].is_sparse
    assert log["weight"].to_dense().tolist() == table.weight.grad.to_dense().tolist()
    assert log["weight"].dtype == torch.float64


def test_watch_records_nothing_where_no_gradient_arrived(x):
    left, right = (x * 2).split([1, 2])
    with watch(left=left, right=right) as log:
        left.sum().backward()
    assert list(log) == log.order == ["left"]


def test_watch_never_keeps_a_tensor_alive(x):
    y = x * 2
    log = watch(y=y)
    y.sum().backward()
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is None
    assert log["y"].tolist() == [1.0, 1.0, 1.0]


def test_watch_removes_its_own_hooks_and_no_others(x):
    calls = []
    x.register_hook(calls.append)
    log = watch(x=x)
    log.remove()
    log.remove()
    x.sum().backward()
    assert len(calls) == 1
    assert len(log) == 0


def test_watch_removes_its_hooks_when_the_block_raises(x):
    with pytest.raises(ZeroDivisionError), watch(x=x):
        1 / 0  # noqa: B018
    assert not x._backward_hooks


def test_watch_shows_how_many_gradients_arrived(x):
    log = watch(x=x)
    x.sum().backward()
    assert repr(log) == "Watch(gradients arrived at x: 1)"


def test_watch_refuses_a_tensor_that_needs_no_gradient_and_hooks_nothing(x):
    with pytest.raises(ValueError, match=r"watch\(data=...\).*shape \(2,\).*data\.requires_grad_\(\)"):
        watch(x=x, data=torch.ones(2))
    assert not x._backward_hooks


def test_watch_says_what_to_do_with_a_tensor_from_inference_mode():
    with torch.inference_mode():
        y = torch.ones(2)
    with pytest.raises(ValueError, match=r"inference_mode\(\): .*y\.clone\(\)\.requires_grad_\(\)"):
        watch(y=y)
    assert not watch(y=y.clone().requires_grad_())


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (3.0, "expected a tensor, found float"),
        (None, "found NoneType"),
        ([torch.ones(1)], "found list; give each tensor a name"),
        (torch.nn.Linear(1, 1), "found Linear; of a module, take a parameter"),
    ],
)
def test_watch_refuses_what_is_no_tensor_and_hooks_nothing(x, thing, words):
    with pytest.raises(TypeError, match=words):
        watch(x=x, thing=thing)
    assert not x._backward_hooks


def test_watch_refuses_a_tensor_without_a_name(x):
    with pytest.raises(TypeError, match=r"without a name.*watch\(y=y\), of a dict watch\(\*\*tensors\)"):
        watch(x)
    assert not x._backward_hooks


def test_watch_tells_that_a_parameter_is_frozen():
    layer = torch.nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match=r"watch\(weight=...\): this parameter is frozen"):
        watch(weight=layer.weight)


def test_watch_refuses_nothing():
    with pytest.raises(TypeError, match=r"nothing to watch.*watch\(y=y\)"):
        watch()


def test_watch_says_that_no_gradient_has_arrived_yet(x):
    with pytest.raises(KeyError, match="no gradient has arrived at 'x' yet"):
        watch(x=x)["x"]


def test_watch_names_the_closest_when_a_name_is_unknown(x):
    log = watch(logits=x, hidden=x)
    with pytest.raises(KeyError, match="'logit' is not watched; watched: 'logits'"):
        log["logit"]


# ---- the hook makers ----

MAKERS = [scale(3), clip(-1, 1), zero()]


@pytest.mark.parametrize("hook", MAKERS)
def test_a_hook_edits_nothing_in_place(hook):
    grad = torch.tensor([-2.0, 0.5, 2.0])
    before = grad.clone()
    assert hook(grad).data_ptr() != grad.data_ptr()
    assert torch.equal(grad, before)


@pytest.mark.parametrize("hook", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_hook_keeps_shape_and_dtype(hook, dtype):
    changed = hook(torch.ones(2, 3, dtype=dtype))
    assert changed.shape == (2, 3)
    assert changed.dtype == dtype


@pytest.mark.parametrize("hook", MAKERS)
def test_a_hook_lets_a_missing_gradient_pass(hook):
    used, unused = (torch.ones(4, requires_grad=True) * 2).chunk(2)
    unused.register_hook(hook)
    used.sum().backward()  # would raise inside the hook


def test_scale_doubles_what_flows_on_to_the_leaf(x):
    y = x * x
    y.register_hook(scale(2))
    y.sum().backward()
    assert x.grad.tolist() == [4.0, 8.0, 12.0]


def test_clip_is_torch_clamp_with_one_bound_or_two():
    grad = torch.tensor([-5.0, 0.0, 5.0, math.inf])
    assert clip(-1, 2)(grad).tolist() == [-1.0, 0.0, 2.0, 2.0]
    assert clip(min=0)(grad).tolist() == [0.0, 0.0, 5.0, math.inf]
    assert clip(max=0)(grad).tolist() == [-5.0, 0.0, 0.0, 0.0]
    assert clip(1, 1)(grad).tolist() == [1.0] * 4


def test_a_number_of_any_kind_will_do():
    assert scale(Fraction(1, 2))(torch.ones(1)).tolist() == [0.5]
    assert clip(max=np.float32(1))(torch.tensor([3.0])).tolist() == [1.0]


def test_zero_also_silences_nan_and_inf():
    assert zero()(torch.tensor([math.nan, math.inf, 1.0])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: clip(), TypeError, "no bound"),
        (lambda: clip(1, -1), ValueError, r"min=1, max=-1.*did you mean min=-1, max=1\?"),
        (lambda: clip(math.nan, 1), ValueError, r"clip\(min=nan\)"),
        (lambda: clip(0, float("nan")), ValueError, r"clip\(max=nan\)"),
        (lambda: clip("0", 1), TypeError, r"clip\(min=...\): expected a number, found str"),
        (lambda: clip(0, True), TypeError, "found bool"),
        (
            lambda: clip(0, torch.tensor(1.0)),
            TypeError,
            r"found Tensor; give a plain number, and register clip\(...\)",
        ),
        (lambda: scale("2"), TypeError, r"scale\(factor=...\): expected a number, found str"),
        (lambda: scale(math.nan), ValueError, "finite number"),
        (lambda: scale(math.inf), ValueError, "finite number"),
        (lambda: scale(torch.ones(2)), TypeError, r"register scale\(...\), not scale itself"),
        (lambda: zero(torch.ones(2)), TypeError, r"found Tensor; register zero\(\), not zero itself"),
    ],
)
def test_a_maker_refuses_a_senseless_number(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model: clip(1.0), r"clip\(1.0\): .*write clip\(-1.0, 1.0\) .* or clip\(min=1.0\)"),
        (lambda model: clip(-2), r"clip\(-2\): .*write clip\(-2, 2\) .* or clip\(min=-2\)"),
        (
            lambda model: clip_gradients(model, 1.0),
            r"would be the lower one.*clip_gradients\(model, -1.0, 1.0\) .* or clip_gradients\(model, min=1.0\)",
        ),
    ],
)
def test_one_bound_without_a_name_is_refused_and_both_meanings_are_spelled(model, call, told):
    with pytest.raises(TypeError, match=told):
        call(model)
    assert hooks_on(model) == []


@pytest.mark.parametrize("hook", MAKERS)
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_for_tensors_says_so_where_it_was_hung_on_a_module(hook, register):
    layer = nn.Linear(2, 1)
    getattr(layer, register)(hook)
    with pytest.raises(TypeError, match=r"expected the gradient of one tensor, found Linear, .*tensor\.register_hook"):
        layer(torch.ones(1, 2))


@pytest.mark.parametrize("hook", ["watch", "clip"])
def test_hooks_on_parameters_stay_behind_where_the_model_is_copied_or_sent(model, hook, recwarn):
    installed = clip_gradients(model, -1, 1) if hook == "clip" else watch(weight=model[0].weight)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with installed:
        sent = ForkingPickler.dumps(model)  # as to a process that is spawned
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
        for twin in (*twins, pickle.loads(sent)):
            assert hooks_on(twin) == []
            assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
    assert not [warning for warning in recwarn if "will not be serialized" in str(warning.message)]


def test_neither_the_model_nor_a_gradient_waits_for_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        model = mlp(4, 5, 2)
        log, clipped = watch(weight=model[0].weight), clip_gradients(model, -1, 1)
        model(torch.ones(1, 4)).sum().backward()
        tensor, holder = weakref.ref(log["weight"]), weakref.ref(model)
        log.remove()
        del model, log
        assert tensor() is None
        assert holder() is None
        clipped.remove()
    finally:
        gc.enable()


# ---- what leaves with a torch.func transform ----


def test_a_gradient_inside_a_torch_func_transform_is_refused_and_not_kept_as_an_empty_shell():
    def loss(x):
        doubled = x * 2
        watch(doubled=doubled)
        return (doubled**2).sum()

    for transformed in (
        torch.func.grad(loss),
        torch.func.vmap(torch.func.grad(loss)),
        torch.func.jacrev(loss),
    ):
        with pytest.raises(RuntimeError, match=r"'doubled' lives inside a torch\.func transform"):
            transformed(torch.ones(2, 3))


def test_several_backwards_at_once_are_refused_by_pytorch_where_a_gradient_is_watched(x):
    with (
        watch(x=x) as log,
        pytest.raises(RuntimeError, match="Batching rule not implemented for aten::detach"),
    ):
        torch.autograd.grad(x**2, x, torch.eye(3), is_grads_batched=True)
    assert not log


def test_a_copy_is_what_has_arrived_so_far_and_can_be_pickled():
    a = torch.ones(2, requires_grad=True)
    with watch(a=a) as watched:
        (a * 2).sum().backward()
        before, pickled = copy.deepcopy(watched), pickle.loads(pickle.dumps(watched))
        (a * 5).sum().backward()
    for earlier in (before, pickled):
        assert earlier["a"].tolist() == [2, 2]
        earlier.remove()
    assert watched["a"].tolist() == [5, 5]


# ---- clip_gradients ----


def gradients(model, scale=100.0):
    model.zero_grad()
    (model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().sum() * scale).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("bounds", [{"min": -0.5, "max": 0.5}, {"max": 0.1}, {"min": 0.0}, {"min": 1, "max": 1}])
def test_one_backward_gives_what_clamping_afterwards_gives(model, bounds):
    plain = gradients(model)
    with clip_gradients(model, **bounds):
        clipped = gradients(model)
    assert any(not torch.equal(plain[name], clipped[name]) for name in plain)
    for name in plain:
        assert torch.equal(clipped[name], plain[name].clamp(**bounds))


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
        ((math.nan, 1), ValueError, "NaN bound"),
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


def test_a_lazy_parameter_is_refused_by_name_and_no_hook_stays():
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
    told = r"the parameter '(1\.)?weight' is not made yet .*run the model once"
    with no_leftovers(model), pytest.raises(ValueError, match=told):
        clip_gradients(model, -1, 1)
    with pytest.raises(ValueError, match=told):
        watch(weight=model[1].weight)


def test_sharded_parameters_are_refused_since_hooks_on_them_never_fire(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/here", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = torch.distributed.fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh)
        with pytest.raises(ValueError, match=r"are sharded.*never fire.*clip_grad_value_"):
            clip_gradients(model, -1, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_what_clip_gradients_returns_shows_bounds_and_parameters(model):
    with clip_gradients(model, -1, 0.5) as clipped:
        assert repr(clipped) == "ClipGradients(min=-1, max=0.5, on 4 parameters)"
    assert repr(clipped) == "ClipGradients(min=-1, max=0.5, on 4 parameters, removed)"


def test_under_a_grad_scaler_the_scaled_gradient_is_clipped(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=1_024.0)
    with clip_gradients(model, -0.5, 0.5):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    unscaled = [param.grad / scaler.get_scale() for param in model.parameters()]
    assert max(grad.abs().max() for grad in unscaled) <= 0.5 / 1_024


@pytest.mark.parametrize(
    ("dtype", "bound", "error", "words"),
    [
        (torch.complex64, 1, NotImplementedError, "not supported for complex types"),
        (torch.float16, 1e5, RuntimeError, "without overflow"),
    ],
)
def test_what_torch_clamp_refuses_is_refused_in_backward(dtype, bound, error, words):
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    with clip_gradients(nn.ParameterList([weight]), -1, bound), pytest.raises(error, match=words):
        weight.abs().sum().backward()
    assert weight.grad is None
