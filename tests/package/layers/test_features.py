"""features: the outputs of layers, and nothing but them."""

import contextlib
import copy
import gc
import io
import pickle
import re
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from models import Constant, Result, Returns, Twice, mlp, same_state, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooklab import (
    checkpoint_segments,
    clip_gradients,
    features,
    hooks_on,
    layer_statistics,
    no_leftovers,
    trace,
    verbose,
    watch,
    with_grad,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 6, 2)


@pytest.fixture
def x():
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def by_hand(model, name, x):
    """The output of one layer, cloned by a hook written here."""
    kept = []
    with model.get_submodule(name).register_forward_hook(lambda module, args, output: kept.append(output.clone())):
        model(x)
    return kept


# ---- what is kept ----


def test_a_feature_is_the_output_of_its_layer(model, x):
    with features(model, "1", "2") as f:
        model(x)
    for name in ("1", "2"):
        assert torch.equal(f[name], by_hand(model, name, x)[0])


def test_the_mapping_holds_the_layers_that_were_called(model, x):
    with features(model, "1", "*") as f:
        assert (list(f), "1" in f, list(f.calls), len(f.calls), "1" in f.calls) == ([], False, [], 0, False)
        model[:3](x)
        for found in (f, f.calls):
            assert (list(found), len(found), "1" in found, "3" in found) == (["1", "0", "2"], 3, True, False)
        assert repr(f) == "Features(outputs of 1: 1, 0: 1, 2: 1, 3: 0, 4: 0)"
        assert repr(f.calls) == f"Calls({f!r})"
    many = features(nn.Sequential(*[nn.Tanh() for _ in range(1_000)]), "*")
    assert repr(many) == "Features(outputs of 1000 layers, 0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0, ...)"


def test_no_graph_is_kept_unless_keep_asks_for_it(model, x):
    with features(model, "1") as f, features(model, "1", keep=lambda tensor: tensor) as whole:
        model(x)
    assert f["1"].grad_fn is None
    assert whole["1"].grad_fn is not None


def test_keep_is_applied_to_each_tensor_of_a_nested_output():
    model = Returns(lambda x: {"logits": x * 2, "hidden": [(x + 1, None)], "result": Result(x - 1, [x])})
    x = torch.ones(2, 3, requires_grad=True)
    with features(model, "") as f, features(model, "", keep=lambda t: t.sum().item()) as sums:
        model(x)
    assert f[""]["logits"].tolist() == [[2.0] * 3] * 2
    assert not any(t.requires_grad for t in (f[""]["logits"], f[""]["hidden"][0][0], f[""]["result"].logits))
    assert sums[""] == {"logits": 12, "hidden": [(12, None)], "result": Result(0, [6])}


def test_what_keep_raises_reaches_the_user_with_the_name_of_the_layer(model, x):
    with (
        no_leftovers(model),
        pytest.raises(ZeroDivisionError) as raised,
        features(model, "2", keep=lambda t: 1 / 0),
    ):
        model(x)
    assert raised.value.__notes__ == ["hooklab.features: raised by keep, on the output of '2'"]


# ---- calls ----


def test_each_call_of_one_forward_is_kept_under_every_name_of_a_shared_module():
    model, hidden = Twice(), torch.randn(2, 3)
    with features(model, "step", "again") as f:
        model(hidden, times=3)
    assert len(f.calls["step"]) == len(f.calls["again"]) == 3
    for kept in f.calls["step"]:
        hidden = torch.nn.functional.linear(hidden, model.step.weight, model.step.bias)
        assert torch.equal(kept, hidden)
    assert f["step"] is f["again"] is f.calls["step"][-1]


def test_a_new_forward_begins_anew(model, x):
    with features(model, "1") as f:
        model(x)
        first = f["1"]
        model(x + 1)
        assert len(f.calls["1"]) == 1
        assert not torch.equal(f["1"], first)


def test_a_layer_that_the_last_forward_skipped_has_no_stale_value():
    model = Returns(lambda x: model.layer(x) if x.sum() > 0 else x)
    model.layer = nn.Linear(3, 3)
    with features(model, "layer") as f:
        model(torch.ones(2, 3))
        assert list(f) == ["layer"]
        model(-torch.ones(2, 3))
        with pytest.raises(KeyError, match="the last forward did not call 'layer'"):
            f["layer"]


def test_a_layer_called_by_itself_is_a_forward_of_its_own(model, x):
    with features(model, "0", "1") as f:
        model(x)
        for factor in (2, 3, 4):
            own = model[0](factor * x)
        assert len(f.calls["0"]) == 1
        assert torch.equal(f["0"], own)
        assert len(f.calls["1"]) == 1  # the rest of the last forward stays
        model(x)
        assert torch.equal(f["0"], model[0].forward(x))


class Coder(nn.Module):
    """Its layer runs twice; it fails when asked to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, fail=False):
        x = self.layer(x)
        if fail:
            raise ValueError("this part was told to fail")
        return self.layer(x)


class AutoEncoder(nn.Module):
    """Its parts are called by methods of its own, as in many libraries: no forward of the whole runs."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Coder(), Coder()

    def training_step(self, x, **options):
        return self.decoder(self.encoder(x, **options)).sum()


def test_a_call_of_a_part_is_a_forward_of_its_layers():
    model = AutoEncoder()
    with features(model, "**.layer") as f:
        for factor in (1.0, 2.0, 3.0):
            x = torch.full((1, 2), factor)
            model.training_step(x)
            assert {name: len(outputs) for name, outputs in f.calls.items()} == {
                "encoder.layer": 2,
                "decoder.layer": 2,
            }
            assert torch.equal(f.calls["encoder.layer"][0], model.encoder.layer.forward(x))
            assert torch.equal(f["encoder.layer"], model.encoder.forward(x))
        model.encoder.layer(x)
        assert [len(outputs) for outputs in f.calls.values()] == [1, 2]
        with pytest.raises(ValueError, match="told to fail"):
            model.training_step(x, fail=True)
        assert [len(outputs) for outputs in f.calls.values()] == [1, 2]
        model.training_step(x)
        assert [len(outputs) for outputs in f.calls.values()] == [2, 2]
        again = pickle.loads(pickle.dumps(f))
        assert torch.equal(again["encoder.layer"], f["encoder.layer"])


WATCHES = [
    features,
    partial(features, keep=with_grad),
    layer_statistics,
    partial(layer_statistics, of="grad_output"),
    partial(verbose, write=[].append),
]


NAMES = ["features", "with_grad", "layer_statistics", "grad_output", "verbose"]


@pytest.mark.parametrize("watching", WATCHES, ids=NAMES)
def test_a_copy_made_inside_reports_nothing_keeps_nothing_and_can_be_saved(watching):
    model, lines = nn.Sequential(nn.Identity(), nn.Linear(3, 3)), []
    if "write" in getattr(watching, "keywords", {}):
        watching = partial(verbose, write=lines.append)
    x = torch.ones(2, 3, requires_grad=True)
    with watching(model, "*") as seen:
        twin = copy.deepcopy(model)
        model(torch.ones(2, 3)).sum().backward()
        within = str(lines), str(dict(getattr(seen, "asked", {}))), str(dict(getattr(seen, "calls", {})))
        twin(x).sum().backward()
        saved = io.BytesIO()
        torch.save(twin, saved)
        torch.save(model, whole := io.BytesIO())
        assert b"hooklab" not in saved.getvalue() + whole.getvalue()
    twin(x).sum().backward()
    after = str(lines), str(dict(getattr(seen, "asked", {}))), str(dict(getattr(seen, "calls", {})))
    assert after == within
    assert not x._backward_hooks
    for file in saved, whole:
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert torch.equal(again(x), twin(x))
    gone = weakref.ref(model), weakref.ref(seen)
    del model, seen
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_a_copy_of_what_was_kept_stays_as_it_was(model, x):
    with features(model, "*") as f:
        model(x)
        twin = copy.deepcopy(f)
        model(x * 7)
    assert torch.equal(twin["0"], model[0](x))
    with pytest.raises(RuntimeError, match="its hooks have been removed"), twin:
        pass


def test_run_ends_a_model_that_tries_again_and_then_raises_an_error_of_its_own(x):
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            for factor in 1, 2:
                try:
                    return self.b(self.a(x * factor))
                except Exception:
                    pass
            raise RuntimeError("failed twice")

    model = Stubborn()
    with features(model, "a") as f:
        assert torch.equal(f.run(x)["a"], model.a(x))
        assert len(f.run(x).calls["a"]) == 1  # a plain forward would not have tried again
        with pytest.raises(RuntimeError, match="failed twice"):
            f.run(torch.ones(1, 9))


def test_a_model_that_calls_itself_keeps_all_calls():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = nn.Linear(2, 2)

        def forward(self, tree):
            return sum(map(self, tree)) if isinstance(tree, list) else self.leaf(tree)

    model, leaf = Tree(), torch.ones(2)
    with features(model, "leaf") as f:
        model([leaf, [leaf, leaf], leaf])
    assert len(f.calls["leaf"]) == 4


def test_a_forward_that_fails_keeps_what_came_before(model, x):
    model[4] = nn.Linear(99, 2)
    with (
        no_leftovers(model),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        features(model, "*") as f,
    ):
        model(x)
    assert list(f) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("inside", [False, True], ids=["registered before", "registered inside"])
@pytest.mark.parametrize("runs", [False, True], ids=["forward", "run"])
def test_an_error_of_a_users_hook_arrives_as_it_is_and_the_next_forward_is_kept(model, x, inside, runs):
    def broken(module, args, output):
        raise error

    error = ValueError("from a hook of the user's")
    expected = {name: by_hand(model, name, x) for name in ("0", "1", "2")}
    outside = contextlib.nullcontext() if inside else model[1].register_forward_hook(broken)
    with outside as handle, features(model, "*") as f:
        handle = model[1].register_forward_hook(broken) if inside else handle
        with pytest.raises(ValueError, match="from a hook of the user's") as raised:
            (f.run if runs else model)(x)
        assert raised.value is error
        assert not hasattr(error, "__notes__")
        assert list(f) == (["0", "1"] if inside else ["0"])
        handle.remove()
        model(x + 1)
        (f.run if runs else model)(x)
        assert [len(outputs) for outputs in f.calls.values()] == [1] * 5
        assert all(torch.equal(f[name], kept) for name, (kept,) in expected.items())
    assert hooks_on(model) == []


def test_recomputation_under_checkpointing_is_not_counted(x):
    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.block, self.reentrant = mlp(4, 4, 4), reentrant

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        model = Checkpointed(reentrant)
        with features(model, "**") as f:
            model(x.clone().requires_grad_()).sum().backward()
        assert [len(f.calls[name]) for name in f] == [1, 1, 1, 1]


# ---- overwritten in place ----


def test_features_refuse_a_value_overwritten_in_place():
    model, x = mlp(4, 5, 2, inplace=True), torch.randn(3, 4)
    with features(model, "0", "1") as f:
        model(x)
    for read in (lambda: f["0"], lambda: f.calls["0"], lambda: dict(f)):
        with pytest.raises(
            RuntimeError, match=r"output of '0' has been overwritten.*keep=lambda t: t.detach\(\).clone\(\)"
        ):
            read()
    assert "0" in f


def test_overwriting_is_found_inside_nested_outputs():
    model = nn.Sequential(Returns(lambda x: {"a": [x * 2]}), Returns(lambda out: out["a"][0].add_(1)))
    with features(model, "0") as f:
        model(torch.ones(2))
    with pytest.raises(RuntimeError, match="overwritten in place"):
        f["0"]


def test_reading_an_output_whose_memory_was_freed_says_so_and_what_helps(model, x):
    """Reversible networks free what they can recompute; to read it would end the process."""
    model[1].register_forward_hook(lambda module, args, output: (args[0].untyped_storage().resize_(0), None)[1])
    with features(model, "0") as f, features(model, "0", keep=lambda t: [t.detach().clone()]) as copies:
        model(x)
    for read in (lambda: f["0"], lambda: f.calls["0"]):
        with pytest.raises(RuntimeError, match=r"'0' has no memory any more.*keep=lambda t: t.detach\(\).clone\(\)"):
            read()
    assert torch.equal(copies["0"][0], model[0](x))


def test_under_inference_mode_the_default_keeps_a_copy():
    model, x = mlp(4, 5, 2, inplace=True), torch.randn(3, 4)
    with torch.inference_mode(), features(model, "0") as f:
        model(x)
    assert f["0"].min() < 0
    assert torch.equal(f["0"], model[0](x))


def test_under_inference_mode_what_a_keep_of_ones_own_returns_is_not_checked():
    """A limit: an inference tensor has no version."""
    model = mlp(4, 5, 2, inplace=True)
    with torch.inference_mode(), features(model, "0", keep=lambda t: t) as f:
        model(torch.randn(3, 4))
    assert f["0"].min() == 0  # what the ReLU has made of it


# ---- run ----


def test_run_ends_the_forward_as_soon_as_nothing_is_missing(model, x):
    for names in (("1", "2"), ("2", "1")):
        lines = []
        with verbose(model, write=lines.append), features(model, *names) as f:
            assert f.run(x) is f
        assert torch.equal(f["2"], by_hand(model, "2", x)[0])
        assert [line.split()[0] for line in lines] == ["0", "1", "2"]


def test_run_takes_keyword_arguments_and_goes_to_the_end_when_a_layer_is_never_called():
    model = Twice()
    model.idle = nn.Linear(1, 1)
    with features(model, "step", "idle") as f:
        f.run(x=torch.ones(2, 3), times=2)
        assert len(f.calls["step"]) == 2
        with pytest.raises(KeyError, match="did not call 'idle'"):
            f["idle"]


def test_a_run_inside_a_run_ends_only_itself(model, x):
    inner_model = mlp(4, 4, 4)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.first, self.rest = inner_model, nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with features(self.inner, "2") as g:
                x = g.run(self.first(x))["2"]
            return self.rest(x)

    outer = Outer()
    with features(outer, "rest") as f:
        assert f.run(x)["rest"].shape == (3, 4)
    with features(outer, "first") as f:
        f.run(x)
    assert list(f) == ["first"]


def test_run_lets_errors_of_the_model_through(model):
    with features(model, "4") as f, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        f.run(torch.ones(1, 7))
    assert hooks_on(model) == []


# ---- before, after, and beside others ----


@pytest.mark.parametrize("watching", WATCHES, ids=NAMES)
def test_what_is_watched_is_bit_equal_and_after_the_block_the_model_is_as_before(watching, model, x):
    expected = torch.autograd.grad(model(x).sum(), model.parameters())
    before, pickled = state_of(model), pickle.dumps(model)
    with watching(model, "**", ""):
        watched = torch.autograd.grad(model(x).sum(), model.parameters())
    assert all(map(torch.equal, expected, watched))
    assert same_state(before, state_of(model))
    assert hooks_on(model) == hooks_on(copy.deepcopy(model)) == []
    assert pickle.dumps(model) == pickled


def test_only_its_own_hooks_are_removed(model, x):
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append("mine"))
    with features(model, "1") as outer:
        with features(model, "1") as inner:
            model(x)
        model(x)
        assert len(hooks_on(model)) == 4  # mine, the outer one's and its two on the model
    assert [hook.owner for hook in hooks_on(model)] == ["user"]
    model(x)
    assert len(seen) == 3
    assert torch.equal(inner["1"], outer["1"])


def test_removing_twice_is_harmless_and_what_was_kept_stays(model, x):
    f = features(model, "1")
    model(x)
    f.remove()
    f.remove()
    assert f["1"].shape == (3, 5)
    model(x + 1)
    assert torch.equal(f["1"], by_hand(model, "1", x)[0])


# ---- reading and asking wrongly ----


def test_reading_before_the_forward_says_what_to_do(model):
    with (
        features(model, "1") as f,
        pytest.raises(KeyError, match="no output of '1' yet; run the model inside the block"),
    ):
        f["1"]


def test_an_unknown_name_is_refused_with_the_names_asked_for(model, x):
    with features(model, "1", "2") as f:
        model(x)
        with pytest.raises(KeyError, match="'3' was not asked for; asked for: '1', '2'"):
            f["3"]


def test_keep_that_cannot_be_called_is_refused(model):
    with pytest.raises(TypeError, match=r"features\(keep=...\): expected something that can be called.*found str"):
        features(model, "1", keep="detach")
    assert hooks_on(model) == []


def test_a_container_that_is_never_called_is_refused_or_left_out():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    for patterns in (["layers"], ["layers.0", "layers"], [nn.ModuleList]):
        with pytest.raises(ValueError, match=r"'layers' is a ModuleList, which has no forward.*'layers\.\*'"):
            features(model, *patterns)
    with features(model, "**") as f:
        assert repr(f) == "Features(outputs of layers.0: 0)"


def test_a_compiled_model_warns_that_hooks_may_be_ignored(model):
    with pytest.warns(UserWarning, match="features: this model is compiled.*before torch.compile"):
        features(torch.compile(model), "1").remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features(model, "1").remove()


# ---- gradients of activations ----


def test_with_grad_is_the_gradient_of_the_output(model, x):
    hidden = model[:2](x)
    (expected,) = torch.autograd.grad(model[2:](hidden).square().sum(), hidden)
    with features(model, "1", keep=with_grad) as f:
        model(x).square().sum().backward()
    assert torch.equal(f["1"].grad, expected)
    assert torch.equal(f["1"], hidden)
    assert not f["1"].requires_grad


def test_with_grad_keeps_no_graph_of_the_gradient(model, x):
    with features(model, "1", keep=with_grad) as f:
        torch.autograd.grad(model(x).square().sum(), model[0].weight, create_graph=True)
    assert not f["1"].grad.requires_grad


def test_an_output_whose_gradient_is_none_has_none(model, x):
    with features(model, "1", keep=with_grad) as f:
        (Constant.apply(model[:2](x)).sum() + model[0](x).sum()).backward()
    assert f["1"].grad is None


def test_with_grad_is_right_beside_an_in_place_layer(x):
    torch.manual_seed(1)
    model = mlp(4, 5, 2, inplace=True)
    plain = copy.deepcopy(model)
    plain[1] = nn.ReLU()
    hidden = plain[0](x)
    (expected,) = torch.autograd.grad(plain[1:](hidden).sum(), hidden)
    with features(model, "0", keep=with_grad) as f:
        model(x).sum().backward()
    assert torch.equal(f["0"].grad, expected)
    assert torch.equal(f["0"], hidden)


def test_with_grad_without_a_copy_keeps_the_output_itself_and_says_so_where_that_was_edited(model, x):
    plain = features(model, "1", keep=with_grad)
    with plain, features(model, "1", keep=partial(with_grad, copy=False)) as f:
        output = []
        model[1].register_forward_hook(lambda module, args, out: output.append(out))
        model(x).square().sum().backward()
    assert f["1"] is output[0]
    assert torch.equal(f["1"], plain["1"])
    assert torch.equal(f["1"].grad, plain["1"].grad)
    with torch.no_grad(), features(model, "1", keep=partial(with_grad, copy=False)) as f:
        model(x)
    assert f["1"] is output[1]
    assert f["1"].grad is None
    with pytest.raises(TypeError, match="expected a tensor, found Linear"):
        with_grad(nn.Linear(1, 1), copy=False)

    in_place = mlp(4, 5, 2, inplace=True)
    with features(in_place, "0", keep=partial(with_grad, copy=False)) as f:
        in_place(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0' has been overwritten in place.*or take keep=with_grad without"):
        f["0"]


def test_with_grad_leaves_a_leaf_alone_and_refuses_what_is_no_tensor():
    x = torch.ones(2, requires_grad=True)
    assert with_grad(x).grad is None
    assert hooks_on(x) == []
    with pytest.raises(TypeError, match="expected a tensor, found Linear"):
        with_grad(nn.Linear(1, 1))


# ---- what once went wrong ----


def test_whoever_else_listens_hears_the_last_output_of_a_run():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with features(model, "0") as f, layer_statistics(model, "0") as stats, features(model, "0") as g:
        f.run(torch.ones(1, 2))
        assert stats["0"].calls == 1
        assert torch.equal(g["0"], f["0"])
    assert hooks_on(model) == []


def test_a_script_module_is_left_out_by_patterns_and_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.ReLU(), torch.ones(1)))
    assert repr(features(model, "*")) == "Features(outputs of 0: 0)"
    with pytest.raises(ValueError, match=r"'1' is a \w+, a TorchScript module, which is not hooked"):
        features(model, "1")


@pytest.mark.parametrize("keep", [torch.Tensor.detach, lambda tensor: [tensor.detach()]], ids=["tensor", "list"])
def test_what_was_kept_can_be_pickled_and_an_overwritten_one_stays_refused(x, keep):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(inplace=True))
    model.seen = features(model, "0", "1", "2", keep=keep)
    with model.seen as f:
        model(x)
        model[1](x)
    again = pickle.loads(pickle.dumps(model)).seen
    for name in ("0", "1"):
        assert torch.equal(*(torch.stack(list(one[name])) for one in (f, again)))
        assert len(again.calls[name]) == len(f.calls[name])
    for one in (f, again):
        with pytest.raises(RuntimeError, match="the output of '2' has been overwritten in place"):
            one["2"]
    with pytest.raises(RuntimeError, match="the hooks have been removed"):
        again.run(x)
    assert b"Linear" in pickle.dumps(model)
    assert b"Linear" not in pickle.dumps(f)  # the model is not part of it


def test_run_keeps_nothing_of_a_forward_that_it_has_ended(x):
    passed = []

    def forward(x):
        large = x * 2
        passed.append(weakref.ref(large))
        return model.inner(large) + 1

    model = Returns(forward)
    model.inner = nn.Tanh()
    with (
        without_the_cyclic_collector(),
        features(model, "inner", keep=lambda tensor: tensor.sum().item()) as f,
    ):
        f.run(x)
        assert f["inner"] == pytest.approx((x * 2).tanh().sum().item())
        assert passed[0]() is None


TOOLS = ["features", "verbose", "layer_statistics", "clip_gradients", "watch", "trace", "checkpoint_segments"]


@pytest.mark.parametrize("tool", TOOLS)
def test_what_has_been_removed_is_not_entered_again(model, tool):
    used = {
        "features": lambda: features(model, "1"),
        "verbose": lambda: verbose(model),
        "layer_statistics": lambda: layer_statistics(model, "1"),
        "clip_gradients": lambda: clip_gradients(model, -1, 1),
        "watch": lambda: watch(x=torch.ones(2, requires_grad=True)),
        "trace": lambda: trace(model),
        "checkpoint_segments": lambda: checkpoint_segments(nn.Sequential(model), {"": 1}),
    }[tool]()
    with contextlib.suppress(OSError), used:
        raise OSError
    gone = "switched back" if tool == "checkpoint_segments" else "removed"
    said = f"(?i){tool.replace('_', '_?')}.*{gone}.*again"
    with pytest.raises(RuntimeError, match=said), used:
        pass


def test_a_run_in_a_hook_of_a_backward_is_none_of_a_checkpoint(model):
    of_b, ran = torch.full((2, 4), 2.0), []
    with torch.no_grad():
        expected = model[:2](of_b)
    z = torch.ones(3, requires_grad=True) * 2
    with features(model, "1") as f:
        f.run(torch.zeros(2, 4))
        model[2].register_forward_hook(lambda *_: ran.append("2"))
        z.register_hook(lambda grad: (f.run(of_b), None)[1])
        z.sum().backward()
        assert torch.equal(f["1"], expected)
    assert ran == []  # it stopped


def test_a_block_in_a_hook_of_a_backward_sees_its_forwards(model):
    seen = []

    def look(grad):
        lines = []
        with (
            features(model, "*") as f,
            layer_statistics(model, "*") as stats,
            verbose(model, write=lines.append),
        ):
            model(torch.ones(2, 4))
        seen.append((list(f), [stats[name].calls for name in stats], len(lines)))

    z = torch.ones(3, requires_grad=True) * 2
    z.register_hook(look)
    z.sum().backward()
    names = [name for name, _ in model.named_children()]
    assert seen == [(names, [1] * len(names), len(names))]


def test_a_class_with_a_call_of_its_own_is_named_where_no_hook_fired(x):
    class Direct(nn.Linear):
        def __call__(self, *args):
            return self.forward(*args)

    model = nn.Sequential(Direct(4, 2))
    with features(model[0], "") as f, layer_statistics(model, "0") as stats:
        model(x)
    for read in (lambda: f[""], lambda: stats["0"]):
        with pytest.raises(KeyError, match="Direct has a __call__ of its own"):
            read()


def test_parts_called_after_a_run_that_was_interrupted_from_the_keyboard_do_not_pile_up():
    class Interrupts(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(2, 2), Interrupts(), nn.Linear(2, 2))
    with features(model, "0", "2") as f:
        with pytest.raises(KeyboardInterrupt):
            f.run(torch.ones(1, 2))
        for _ in range(4):
            model[0](torch.ones(1, 2))
        assert len(f.calls["0"]) == 1


# ---- what is not supported says so ----


def in_thread(function):
    """What `function` returned or raised in a thread of its own."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("what", ["the model", "a part", "a layer", "run"])
def test_a_second_thread_in_the_middle_of_a_forward_is_refused(x, what):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Tanh())
    with features(model, "0.0", "1") as f:
        other = {"the model": model, "a part": model[0], "a layer": model[0][0], "run": f.run}[what]
        refused = []
        hook = model[0][1].register_forward_hook(
            lambda *_: refused.append(in_thread(lambda: other(x + 1))) if not refused else None
        )
        f.run(x)
        hook.remove()
        assert isinstance(refused[0], RuntimeError)
        assert re.search("second thread.*one Features per thread", str(refused[0]))
        assert torch.equal(f["0.0"], model[0][0].forward(x))
        assert [len(calls) for calls in f.calls.values()] == [1, 1]
        in_thread(lambda: other(x + 2))  # later it may
        assert torch.equal(f["0.0"], model[0][0].forward(x + 2))


def test_replicas_of_a_model_each_with_features_of_its_own_run_in_threads(model, x):
    def use(number):
        own = copy.deepcopy(model)
        with features(own, "1") as f:
            return all(torch.equal(f.run(x * step)["1"], own[:2](x * step)) for step in range(20))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(use, range(3))) == [True] * 3


def test_a_forward_under_vmap_is_left_alone(model, x):
    """A limit: what is kept belongs to the transform."""
    plain = torch.vmap(model)(x)
    with features(model, "1"):
        assert torch.equal(torch.vmap(model)(x), plain)


# ---- nothing stays ----


@contextlib.contextmanager
def without_the_cyclic_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("keep", [torch.Tensor.detach, with_grad], ids=["detach", "with_grad"])
@pytest.mark.parametrize("ends", ["at its end", "with an error", "with run", "from the keyboard"])
def test_outputs_and_model_are_freed_as_soon_as_nobody_asks_for_them(x, keep, ends):
    def stop(*_):
        if ends != "at its end":
            raise KeyboardInterrupt if ends == "from the keyboard" else ValueError

    def block():
        model = mlp(4, 5, 6, 2)
        if ends != "with run":
            model[3].register_forward_hook(stop)
        with contextlib.suppress(KeyboardInterrupt, ValueError), features(model, "*", keep=keep) as f:
            f.run(x) if ends == "with run" else model(x)
        return model, f

    with without_the_cyclic_collector():
        model, f = block()
        output, gone = weakref.ref(f["0"]), weakref.ref(model)
        del model
        assert gone() is None
        assert output() is not None
        del f
        assert output() is None


def test_outputs_of_the_last_forward_are_freed_by_the_next(model, x):
    with without_the_cyclic_collector(), features(model, "0") as f:
        model(x)
        output = weakref.ref(f["0"])
        with model[0].register_forward_pre_hook(lambda *_: freed.append(output() is None)):
            freed = []
            model(x)
    assert freed == [True]


def test_after_an_interruption_the_model_and_a_part_start_afresh(model, x):
    coder = AutoEncoder()
    with features(coder, "**.layer") as part, features(model, "*") as f:
        for called, layer in ((coder.encoder, coder.encoder.layer), (model, model[2])):
            given = x[:, : layer.in_features] if layer is coder.encoder.layer else x
            with layer.register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
                called(given)
            called(given)
    assert len(part.calls["encoder.layer"]) == 2
    assert [len(calls) for calls in f.calls.values()] == [1] * 5


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_view_that_the_next_layer_edits_in_place_gets_no_gradient(x):
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0), nn.ReLU(inplace=True))
    with features(model, "1", keep=with_grad) as f:
        model(x).sum().backward()
    assert f["1"].grad is None
    model[2].inplace = False
    with features(model, "1", keep=with_grad) as f:
        model(x).sum().backward()
    assert f["1"].grad.shape == f["1"].shape


def test_a_frozen_model_gives_its_outputs_no_gradient(x):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).requires_grad_(False)
    with features(model, "*", keep=with_grad) as f:
        model(x)
    assert [f[name].grad for name in f] == [None, None]


# ---- inputs ----


def test_an_input_is_what_the_layer_gets(model, x):
    kept = []
    with model[2].register_forward_pre_hook(lambda module, args: kept.append(args[0].clone())):
        model(x)
    with features(model, "", "2", of="input") as f:
        model(x)
        assert torch.equal(f["2"], kept[0])
        assert torch.equal(f[""], x)
        assert f["2"].grad_fn is None
        model(2 * x)
        assert torch.equal(f.calls[""][0], 2 * x)
        assert repr(f) == "Features(inputs of '': 1, 2: 1)"
    assert hooks_on(model) == []


def test_the_first_argument_that_holds_a_tensor_is_kept_with_its_structure(x):
    class Sums(nn.Module):
        def forward(self, x, y=None, pair=None):
            return torch.zeros(1)

    model = Returns(lambda x: model.layer(None, 3, pair=(x, {"mask": x > 0})) + model.layer(x, 2 * x))
    model.layer = Sums()
    with features(model, "layer", of="input") as f:
        model(x)
    (kept, nested), last = f.calls["layer"]
    assert torch.equal(kept, x)
    assert torch.equal(nested["mask"], x > 0)
    assert torch.equal(last, x)


def test_an_input_that_its_layer_overwrites_is_refused_unless_a_copy_is_kept():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.linspace(-1, 1, 8).view(2, 4)
    with features(model, "1", of="input") as f, features(model, "1", of="input", keep=torch.clone) as copies:
        model(x)
    with pytest.raises(
        RuntimeError, match=r"the input of '1' has been overwritten.*by that layer.*of=\"input\", keep="
    ):
        f["1"]
    assert torch.equal(copies["1"], model[0](x))
    assert (copies["1"] < 0).any()


def test_run_with_inputs_ends_before_the_last_layer_runs(model, x):
    ran = []
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda module, args, output, name=name: ran.append(name))
    with features(model, "1", "3", of="input") as f:
        assert torch.equal(f.run(x)["3"], model[:3](x))
    assert ran == ["0", "1", "2"] * 2


def test_inputs_of_a_model_that_calls_itself_are_all_kept():
    class Tree(nn.Module):
        def forward(self, tree):
            return sum(map(self, tree)) if isinstance(tree, list) else tree * 2

    model, leaf = Tree(), torch.ones(2)
    with features(model, "", of="input") as f:
        model([leaf, [leaf, leaf]])
        assert len(f.calls[""]) == 5
        model(leaf)
        assert len(f.calls[""]) == 1


def test_inputs_are_kept_once_under_a_checkpoint(x):
    model = nn.Sequential(mlp(4, 4, 4))
    with features(model, "0.2", of="input", every=True) as f, checkpoint_segments(model, {"": 1}):
        for _ in range(2):
            model(x).sum().backward()
    assert torch.equal(f.all("0.2"), torch.cat([model[0][:2](x)] * 2))


def test_something_else_than_outputs_and_inputs_is_refused(model):
    with pytest.raises(ValueError, match=r"features\(of='grad'\): expected 'output' or 'input'"):
        features(model, "0", of="grad")
    assert hooks_on(model) == []


# ---- all forwards ----


def test_the_outputs_of_all_forwards_are_joined_on_the_batch(model, x):
    batches = [x, x[:1] + 1, x - 1]
    with features(model, "1", "2", every=True) as f:
        for batch in batches:
            model(batch)
        f.run(x)
    expected = torch.cat([model[:2](batch) for batch in [*batches, x]])
    assert torch.equal(f.all("1"), expected)
    assert len(f.calls["1"]) == 1
    twin = pickle.loads(pickle.dumps(f))
    assert torch.equal(twin.all("1"), expected)
    assert torch.equal(f.all("2"), torch.cat([model[:3](batch) for batch in [*batches, x]]))


def test_all_has_every_call_in_order_under_every_name_of_a_shared_module():
    model, x = Twice(), torch.randn(2, 3)
    with features(model, "step", "again", every=True) as f:
        model(x, times=2)
        model(x + 1, times=1)
    first, second = model.step.forward(x), model.step.forward(x + 1)
    assert torch.equal(f.all("step"), torch.cat([first, model.step.forward(first), second]))
    assert torch.equal(f.all("again"), f.all("step"))


def test_all_joins_each_tensor_of_a_nested_output():
    model = Returns(lambda x: {"logits": x * 2, "rest": [(x.sum(1), None, "text")], "result": Result(x - 1, [x])})
    with features(model, "", every=True) as f:
        model(torch.ones(2, 3))
        model(torch.zeros(1, 3))
    found, rows = f.all(""), torch.cat([torch.ones(2, 3), torch.zeros(1, 3)])
    assert torch.equal(found["logits"], 2 * rows)
    assert torch.equal(found["rest"][0][0], rows.sum(1))
    assert found["rest"][0][1:] == (None, "text")
    assert torch.equal(found["result"].logits, rows - 1)
    assert f[""]["logits"].shape == (1, 3)


def test_all_without_every_says_how_to_ask(model, x):
    with features(model, "1") as f:
        model(x)
    with pytest.raises(RuntimeError, match=r"only the last forward is kept.*features\(model, '1', every=True\)"):
        f.all("1")
    with pytest.raises(KeyError, match="'7' was not asked for"):
        f.all("7")


def test_all_keeps_a_layer_that_the_last_forward_skipped():
    model = Returns(lambda x: model.layer(x) if x.sum() > 0 else x)
    model.layer = nn.Linear(3, 3)
    with features(model, "layer", every=True) as f:
        with pytest.raises(KeyError, match="no output of 'layer' yet"):
            f.all("layer")
        model(torch.ones(2, 3))
        model(-torch.ones(2, 3))
    assert "layer" not in f
    assert torch.equal(f.all("layer"), model.layer(torch.ones(2, 3)))


@pytest.mark.parametrize(
    ("outputs", "options", "words"),
    [
        (
            [torch.ones(2, 3), torch.ones(2, 4)],
            {},
            r"have shapes that cannot be joined on dim 0: \[2, 3\], \[2, 4\]; read",
        ),
        ([torch.ones(0), torch.ones(2, 4)], {}, r"on dim 0: \[0\], \[2, 4\];"),
        ([torch.ones(()), torch.ones(())], {}, r"on dim 0: \[\];"),
        ([(torch.ones(2), 1), (torch.ones(2), 2)], {}, r"on dim 0: \(\[2\], 1\), \(\[2\], 2\);"),
        ([torch.ones(2, 3)] * 2, {"keep": lambda t: 7.0}, "have no tensor to join: 7.0;"),
        ([nn.utils.rnn.pack_sequence([torch.ones(2)])] * 2, {}, "are packed sequences, which cannot be joined"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_its_shapes(outputs, options, words):
    model = Returns(lambda number: outputs[number])
    with features(model, "", every=True, **options) as f:
        model(0), model(1)
    with pytest.raises(ValueError, match=words):
        f.all("")


def test_all_refuses_an_output_of_an_earlier_forward_that_was_overwritten(model, x):
    with features(model, "1", every=True) as f, torch.no_grad():
        hidden = model[:2](x)
        model(x)
        hidden.add_(1)
    assert torch.equal(f["1"], model[:2](x))
    with pytest.raises(RuntimeError, match="the output of '1' has been overwritten in place"):
        f.all("1")


def test_without_every_no_earlier_output_is_kept(model, x):
    alive = []
    model[1].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output.untyped_storage())))
    for every in (False, True):
        alive.clear()
        with torch.no_grad(), features(model, "1", every=every) as f:
            model(x), model(x)
            assert f["1"].shape == (3, 5)
            assert [one() is not None for one in alive] == [every, True]


def test_dim_0_is_joined_also_where_it_is_not_the_batch():
    model, batches = nn.LSTM(3, 4, num_layers=2), [torch.ones(6, 5, 3), torch.zeros(6, 5, 3)]
    with features(model, "", every=True) as f, features(model, "", every=True, keep=swapped) as turned:
        expected = [model(batch) for batch in batches]
    outputs, states = [output for output, _ in expected], [state for _, (state, _) in expected]
    assert torch.equal(f.all("")[0], torch.cat(outputs, 0))
    assert torch.equal(turned.all("")[0], torch.cat(outputs, 1).transpose(0, 1))
    assert torch.equal(turned.all("")[1][0], torch.cat(states, 1).transpose(0, 1))


def swapped(tensor):
    return tensor.detach().transpose(0, 1)


def test_the_gradient_of_an_input_is_that_of_all_its_uses():
    model, x = Returns(lambda x: (hidden := model.first(x)) * 2 + model.second(hidden)), torch.ones(2, 3)
    model.first, model.second = nn.Linear(3, 3), nn.Linear(3, 3)
    with features(model, "first", "second", of="input", keep=with_grad) as f:
        model(x.requires_grad_()).sum().backward()
    assert torch.allclose(f["second"].grad, (2 + model.second.weight.sum(0)).expand(2, 3))
    assert f["first"].grad is None
    assert x.grad.any()
