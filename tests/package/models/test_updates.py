"""updates: what cloning every parameter before and after each step would tell, without keeping the clones."""

import copy
import gc
import math
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from models import mlp, same_state, state_of
from torch import nn

from hooklab import draw, hooks_on, updates


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 3)


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return torch.randn(4, 6, 4)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def backward(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().sum()
    loss.backward()
    return loss


def norms(tensors):
    return torch.stack([tensor.detach().norm() for tensor in tensors])


def train(model, optimizer, batches):
    """By hand: for each parameter the mean norms of the update, of the gradient and of the value before."""
    rows = []
    for batch in batches:
        backward(model, optimizer, batch)
        before = [param.detach().clone() for param in model.parameters()]
        grads = norms([param.grad for param in model.parameters()])
        optimizer.step()
        moved = [after - old for after, old in zip(model.parameters(), before, strict=True)]
        rows.append(torch.stack([norms(moved), grads, norms(before)]))
    return torch.stack(rows).mean(0).T


def found(u):
    return torch.tensor([[each.update_norm, each.grad_norm, each.value_norm] for each in u.values()])


def test_a_step_of_plain_sgd_moves_by_the_learning_rate_times_the_gradient():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[6.0, 8.0]]))
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        optimizer.step()
    weight = u["weight"]
    assert (weight.steps, weight.grad_norm, weight.value_norm) == (1, 5.0, 10.0)
    assert weight.update_norm == pytest.approx(0.5)
    assert weight.ratio == pytest.approx(0.05)


OPTIMIZERS = {
    "SGD": sgd,
    "SGD with momentum and weight decay": lambda model: sgd(model, momentum=0.9, weight_decay=0.1),
    "SGD, maximize": lambda model: sgd(model, maximize=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "AdamW with weight decay": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5),
    "AdamW, all at once": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "two groups": lambda model: torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "weight_decay": 0.3}], lr=0.01
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_norms_are_those_of_clones_before_and_after_each_step(model, batches, make):
    optimizer = make(model)
    with updates(model, optimizer) as u:
        expected = train(model, optimizer, batches)
    assert list(u) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {each.steps for each in u.values()} == {len(batches)}
    assert (expected > 0).all()
    torch.testing.assert_close(found(u), expected)
    for each, (moved, _, value) in zip(u.values(), expected, strict=True):
        assert each.ratio == pytest.approx((moved / value).item(), rel=1e-5)


def test_the_gradient_is_the_clipped_one(model, batches):
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        backward(model, optimizer, batches[0])
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
        optimizer.step()
    assert math.hypot(*(each.grad_norm for each in u.values())) == pytest.approx(0.01, rel=1e-3)


def test_a_closure_computes_the_gradient_inside_the_step(model, batches):
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        optimizer.step(lambda: backward(model, optimizer, batches[0]))
        first = norms([param.grad for param in model.parameters()])
        optimizer.step(closure=lambda: backward(model, optimizer, batches[1]))
        second = norms([param.grad for param in model.parameters()])
    torch.testing.assert_close(found(u)[:, 1], (first + second) / 2)
    assert u["0.weight"].steps == 2


def test_the_gradient_of_lbfgs_is_that_of_the_last_evaluation(model, batches):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    before, evaluated = [param.detach().clone() for param in model.parameters()], []

    def closure():
        loss = backward(model, optimizer, batches[0])
        evaluated.append(norms([param.grad for param in model.parameters()]))
        return loss

    with updates(model, optimizer) as u:
        optimizer.step(closure)
    moved = norms([param - old for param, old in zip(model.parameters(), before, strict=True)])
    assert len(evaluated) > 1
    torch.testing.assert_close(found(u), torch.stack([moved, evaluated[-1], norms(before)], 1))
    assert not torch.allclose(evaluated[-1], evaluated[0])


# ---- GradScaler ----


def scaled_step(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    scaler.scale(model(batch).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_count(model, batches, fused):
    """A scaler does not call `step` of most optimizers then. A fused one is called, and skips by itself."""
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.01, fused=fused) for each in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with updates(model, optimizer) as u:
        scaled_step(model, optimizer, scaler, batches[0])
        assert u["0.weight"].steps == 1
        before = [param.detach().clone() for param in model.parameters()]
        scaled_step(model, optimizer, scaler, batches[1] * math.inf)
        assert scaler.get_scale() == 512
        assert all(map(torch.equal, model.parameters(), before))
        assert u["0.weight"].steps == 1
        scaled_step(model, optimizer, scaler, batches[2])
    assert u["0.weight"].steps == 2
    torch.testing.assert_close(found(u), train(twin, plain, batches[[0, 2]]))


class TakesTheScaler(torch.optim.SGD):
    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        return super().step(closure)


@pytest.mark.filterwarnings("ignore")  # PyTorch announces the end of this
def test_an_optimizer_that_is_given_the_scaler_is_refused(model, batches):
    optimizer = TakesTheScaler(model.parameters(), lr=0.0)
    with updates(model, optimizer), pytest.raises(RuntimeError, match=r"takes the GradScaler itself.*unscale_"):
        scaled_step(model, optimizer, torch.amp.GradScaler("cpu"), batches[0])


# ---- which steps, which parameters ----


def test_a_parameter_without_a_gradient_has_no_gradient_norm(model, batches):
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        backward(model, optimizer, batches[0])
        optimizer.step()
    assert u["0.weight"].steps == u["2.weight"].steps == 1
    assert u["0.weight"].ratio == 0
    assert math.isnan(u["0.weight"].grad_norm)
    assert u["2.weight"].grad_norm > 0
    assert u.table().splitlines()[1].split()[4] == "-"


def test_the_gradient_norm_is_the_mean_over_the_steps_that_had_one(model):
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        for grad in (3.0, None, 5.0):
            optimizer.zero_grad()
            model[2].bias.grad = None if grad is None else torch.tensor([0.0, grad, 0.0])
            optimizer.step()
    assert (u["2.bias"].steps, u["2.bias"].grad_norm) == (3, 4.0)


def test_zeros_that_are_moved_have_an_infinite_ratio_and_a_finite_one_afterwards():
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.bias)
    nn.init.zeros_(model.weight)
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        for steps in (1, 2):
            model.bias.grad, model.weight.grad = torch.ones(1), torch.zeros(1, 1)
            optimizer.step()
            assert u["bias"].ratio == pytest.approx(math.inf if steps == 1 else 2.0)
    assert math.isnan(u["weight"].ratio)


def test_a_shared_parameter_keeps_all_its_names_and_is_counted_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        backward(model, optimizer, torch.ones(1, 2))
        optimizer.step()
    assert u["0.weight"] == u["2.weight"]
    assert u["0.weight"].steps == 1


def test_only_the_parameters_that_the_optimizer_has_are_listed(model, batches):
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with updates(model, optimizer) as u:
        backward(model, optimizer, batches[0])
        optimizer.step()
    assert list(u) == ["2.weight", "2.bias"]
    with pytest.raises(KeyError, match=r"the optimizer had no parameter '0.weight'.*close: '2.weight'"):
        u["0.weight"]


def test_parameters_that_join_the_optimizer_later_are_not_counted(model, batches):
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    u = updates(model, optimizer)
    optimizer.add_param_group({"params": model[0].parameters()})
    backward(model, optimizer, batches[0])
    optimizer.step()
    assert "2.weight" in u
    with pytest.raises(KeyError, match="when updates was called"):
        u["0.weight"]


class Decayed(torch.optim.SGD):
    """Its step calls that of SGD, so the hooks of a step fire twice."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.5)
        return super().step(closure)


def test_a_step_that_calls_the_step_of_its_parent_is_one_step(model, batches):
    sgd(model)  # PyTorch gives the step of a class its hooks when the first one is made
    optimizer, fired = Decayed(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: fired.append(1))
    with updates(model, optimizer) as u:
        expected = train(model, optimizer, batches[:2])
    assert len(fired) == 4, "or this test shows nothing"
    assert u["0.weight"].steps == 2
    torch.testing.assert_close(found(u), expected)


class Stops(torch.optim.SGD):
    stop = True

    @torch.no_grad()
    def step(self, closure=None):
        if self.stop:
            self.param_groups[0]["params"][0].add_(1)
            raise KeyboardInterrupt
        return super().step(closure)


def test_a_step_that_an_error_ends_is_no_step_and_the_next_one_is_right(model, batches):
    optimizer = Stops(model.parameters(), lr=0.1)
    with updates(model, optimizer) as u:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert len(u) == 0
        optimizer.stop = False
        expected = train(model, optimizer, batches)
    assert u["0.weight"].steps == len(batches)
    torch.testing.assert_close(found(u), expected)


def test_a_step_that_an_error_ends_is_no_step_though_its_gradient_counts(model):
    optimizer = Stops(model.parameters(), lr=0.1)
    with updates(model, optimizer) as u:
        for optimizer.stop, grad in ((True, 1.0), (False, 3.0)):
            model[2].bias.grad = torch.tensor([0.0, grad, 0.0])
            with pytest.raises(KeyboardInterrupt) if optimizer.stop else nullcontext():
                optimizer.step()
    assert (u["2.bias"].steps, u["2.bias"].grad_norm) == (1, 2.0)


def test_a_pre_hook_that_comes_later_changes_the_gradient_unseen(model):
    def step(clip_first):
        optimizer = sgd(model)
        handles = [optimizer.register_step_pre_hook(halve)] if clip_first else []
        with updates(model, optimizer) as u:
            handles += [] if clip_first else [optimizer.register_step_pre_hook(halve)]
            model[2].bias.grad = torch.tensor([0.0, 4.0, 0.0])
            optimizer.step()
        handles[0].remove()
        return u["2.bias"].grad_norm

    def halve(*_):
        model[2].bias.grad /= 2

    assert (step(clip_first=True), step(clip_first=False)) == (2.0, 4.0)


# ---- tensors of other kinds ----


def test_sparse_gradients_are_measured():
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with updates(model, optimizer) as u:
        model(torch.tensor([1, 1, 4])).sum().backward()
        assert model.weight.grad.is_sparse
        optimizer.step()
    assert u["weight"].grad_norm == pytest.approx(math.sqrt(3 * 2**2 + 3 * 1**2))
    assert u["weight"].update_norm == pytest.approx(0.1 * math.sqrt(6), rel=1e-3)


def test_norms_that_float16_cannot_hold_are_finite():
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((4096,), 2000.0, dtype=torch.float16))
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        model.weight.grad = torch.full_like(model.weight, 5000.0)
        optimizer.step()
    assert u["weight"].value_norm == pytest.approx(64 * 2000, rel=1e-5)
    assert u["weight"].grad_norm == pytest.approx(64 * 5000, rel=1e-5)
    assert u["weight"].update_norm == pytest.approx(64 * 500, rel=1e-5)


def test_complex_parameters_are_measured():
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([3 + 4j]))
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        model.weight.grad = torch.tensor([6 + 8j])
        optimizer.step()
    assert (u["weight"].value_norm, u["weight"].grad_norm) == (5.0, 10.0)
    assert u["weight"].update_norm == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore")  # what the compiler says of its own
def test_a_compiled_step_is_counted(model, batches):
    optimizer, twin = sgd(model), copy.deepcopy(model)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    with updates(model, optimizer) as u:
        for batch in batches:
            backward(model, optimizer, batch)
            compiled()
    assert u["0.weight"].steps == len(batches)
    torch.testing.assert_close(found(u), train(twin, sgd(twin), batches))


# ---- looking changes nothing ----


def test_training_is_the_same_bit_for_bit_and_nothing_stays(model, batches):
    twin = copy.deepcopy(model)
    plain, optimizer = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (twin, model))
    handle, state = optimizer.register_step_post_hook(lambda *_: None), state_of(model)
    u = updates(model, optimizer)
    assert same_state(state, state_of(model))
    assert len(hooks_on(optimizer)) == 3
    train(model, optimizer, batches)
    train(twin, plain, batches)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    u.remove()
    u.remove()
    assert [hook.owner for hook in hooks_on(optimizer)] == ["user"]
    handle.remove()
    before = u["0.weight"]
    backward(model, optimizer, batches[0])
    optimizer.step()
    assert u["0.weight"] == before


def test_the_hooks_go_after_an_error_too(model):
    optimizer = sgd(model)
    with pytest.raises(ZeroDivisionError), updates(model, optimizer):
        assert hooks_on(optimizer)
        raise ZeroDivisionError
    assert hooks_on(optimizer) == []


def big_tensors():
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) and thing.numel() > 10_000 for thing in gc.get_objects())


def test_no_tensor_is_kept_between_steps():
    model = nn.Linear(300, 100)
    optimizer, inside = sgd(model), []
    optimizer.zero_grad(set_to_none=True)
    alone = big_tensors()
    u = updates(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: inside.append(big_tensors()))
    for _ in range(3):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert big_tensors() == alone
    assert inside == [alone + 2] * 3  # the gradient, and the value before the step
    assert u["weight"].steps == 3


def test_after_the_block_the_model_and_the_optimizer_may_be_freed(batches):
    model = mlp(4, 5, 3)
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        train(model, optimizer, batches)
    gone = weakref.ref(model[0].weight), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert u["0.weight"].steps == len(batches)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda u: pickle.loads(pickle.dumps(u))])
def test_a_copy_has_what_was_counted_and_no_hooks(model, batches, copied):
    optimizer = sgd(model)
    with updates(model, optimizer) as u:
        train(model, optimizer, batches)
        other = copied(u)
        before = dict(u)
        train(model, optimizer, batches)
        assert dict(other) == before != dict(u)
        assert len(hooks_on(optimizer)) == 2
        with pytest.raises(RuntimeError, match="call the function again"), other:
            pass


# ---- read ----


def test_the_table_has_a_row_for_each_parameter(model, batches):
    optimizer = sgd(model)
    u = updates(model, optimizer)
    assert u.table().splitlines()[1].split() == ["0.weight", "0", "-", "-", "-", "-"]
    train(model, optimizer, batches)
    lines = u.table().splitlines()
    assert lines[0].split() == ["parameter", "steps", "ratio", "update_norm", "grad_norm", "value_norm"]
    each = u["2.weight"]
    assert lines[3].split() == ["2.weight", "4"] + [
        f"{number:.4f}" for number in (each.ratio, each.update_norm, each.grad_norm, each.value_norm)
    ]
    assert "<td>4</td>" in u._repr_html_()
    assert repr(u) == "Updates(steps: 4, parameters: 4)"


def test_the_picture_of_the_gradients_shows_every_parameter_and_step(model, batches):
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    grads = []
    with updates(model, optimizer) as u:
        for batch in batches:
            backward(model, optimizer, batch)
            grads.append(model[2].weight.grad.clone())
            optimizer.step()
    entries = torch.stack(grads)
    picture = draw.gradient_flow(u)
    lines = [line.split() for line in picture.facts.splitlines()]
    assert lines[0] == ["parameter", "rms", "max"]
    assert lines[2] == ["0.bias", "-", "-", "no", "gradient"]
    assert lines[3] == ["2.weight", f"{entries.square().mean().sqrt():.1e}", f"{entries.abs().max():.1e}"]
    assert picture.alt == "How large the gradient is in 4 parameters, from '0.weight' to '2.bias'."
    assert "gradient with respect to the parameter" in picture.svg


# ---- refused ----


def test_what_is_no_model_or_no_optimizer_is_refused(model):
    optimizer = sgd(model)
    cases = [
        ((optimizer, model), TypeError, "expected a module, found SGD"),
        ((model, model.parameters()), TypeError, "expected an optimizer, found generator"),
        ((model, [optimizer]), TypeError, "found list; call updates once for each"),
        ((copy.deepcopy(model), optimizer), ValueError, r"this SGD has no parameter of this Sequential; .*deepcopy"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            updates(*arguments)
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="'weight' is not made yet"):
        updates(lazy, sgd(lazy))
    assert hooks_on(optimizer) == []


def test_before_the_first_step_an_error_says_what_to_do(model):
    u = updates(model, sgd(model))
    assert "0.weight" not in u
    assert list(u) == []
    with pytest.raises(KeyError, match=r"no step .*'0.weight' yet; call optimizer.step\(\) inside the block"):
        u["0.weight"]
