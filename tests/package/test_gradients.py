"""watch, scale, clip and zero, compared with PyTorch or with arithmetic done by hand."""

import copy
import gc
import math
import pickle
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch

from hooklab import clip, scale, watch, zero


@pytest.fixture
def x():
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


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


def test_watch_of_a_tensor_twice_and_nested(x):
    with watch(first=x, second=x) as outer, watch(x=x) as inner:
        x.sum().backward()
    assert outer.order == ["first", "second"]
    assert inner.order == ["x"]
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


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 1e5), (torch.bfloat16, 1e39), (torch.float32, 1e39)]
)
def test_a_bound_beyond_the_dtype_bounds_nothing(dtype, bound):
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    x.register_hook(clip(-1, bound))
    (x * torch.tensor([-2.0, 0.5, torch.inf], dtype=dtype)).sum().backward()
    assert x.grad.tolist() == [-1, 0.5, math.inf]


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
        (lambda: scale(10**400), ValueError, "that a float can hold"),
        (lambda: scale(torch.ones(2)), TypeError, r"register scale\(...\), not scale itself"),
    ],
)
def test_a_maker_refuses_a_senseless_number(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_watch_bears_several_backwards_at_once():
    x = torch.ones(3, requires_grad=True)
    with watch(x=x) as log:
        (rows,) = torch.autograd.grad(x**2, x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(rows, 2 * torch.eye(3))
    assert torch.equal(log["x"], rows)


def test_watch_under_a_transform_keeps_what_outlives_it():
    x = torch.arange(3.0, requires_grad=True)
    y = x**2
    with watch(x=x, y=y) as log:
        torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(3))
    assert log["y"].tolist() == torch.eye(3).tolist()
    assert log["x"].tolist() == torch.diag(torch.tensor([0.0, 2.0, 4.0])).tolist()
    logs = []

    def loss(x):
        doubled = x * 2
        logs.append(watch(doubled=doubled))
        return (doubled**2).sum()

    torch.func.grad(loss)(torch.ones(3))
    torch.func.vmap(torch.func.grad(loss), in_dims=1)(torch.arange(6.0).reshape(3, 2))
    torch.func.jacrev(lambda x: loss(x) * torch.ones(2))(torch.ones(3))
    seen = [log["doubled"].tolist() for log in logs]
    assert seen == [[4, 4, 4], [[0, 8, 16], [4, 12, 20]], [[4, 4, 4]] * 2]
    batches = torch.arange(12.0).reshape(2, 3, 2)
    logs.clear()
    torch.func.vmap(torch.func.vmap(torch.func.grad(loss)), in_dims=2)(batches)
    assert torch.equal(logs[0]["doubled"], 4 * batches.permute(2, 0, 1))


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
