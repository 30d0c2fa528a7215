"""features: the outputs of layers, and nothing but them."""

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import sys
import threading
import warnings
import weakref
from collections import UserDict
from functools import partial

import pytest
import torch
from models import NESTED, Constant, Known, Returns, Twice, mlp, same_state, state_of
from torch import nn
from torch.utils._pytree import register_pytree_node
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
    with model.get_submodule(name).register_forward_hook(
        lambda module, args, output: kept.append(output.clone())
    ):
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
        assert list(f) == []
        assert "1" not in f
        model(x)
        assert list(f) == ["1", "0", "2", "3", "4"]
        assert len(f) == 5
        assert repr(f) == "Features(outputs of 1: 1, 0: 1, 2: 1, 3: 1, 4: 1)"


def test_no_graph_is_kept_alive_unless_keep_asks_for_it(model, x):
    with features(model, "1") as f:
        assert not graph_is_alive(model, x)
        assert f["1"].grad_fn is None
    with features(model, "4", keep=lambda tensor: tensor) as f:
        assert graph_is_alive(model, x)
        assert f["4"].grad_fn is not None


def graph_is_alive(model, x):
    """True if something still holds the graph of a forward whose result has been dropped."""

    def look(grad):
        """A hook in the middle of the graph lives as long as the graph does."""

    def hang(module, args, output):
        output.register_hook(look)

    with model[2].register_forward_hook(hang):
        model(x)
    there = weakref.ref(look)
    look = hang = None
    gc.collect()
    return there() is not None


def test_keep_is_applied_to_each_tensor():
    for name, (build, _) in NESTED.items():
        model, x = Returns(build), torch.arange(6.0).reshape(2, 3).requires_grad_()
        with features(model, "", keep=lambda tensor: tensor.detach().clone()) as f:
            expected = model(x)
        assert_same_structure(f[""], expected, name)


def assert_same_structure(kept, expected, name):
    assert type(kept) is type(expected), name
    if isinstance(expected, torch.Tensor):
        assert torch.equal(kept, expected)
        assert not kept.requires_grad
    elif isinstance(expected, dict):
        assert list(kept) == list(expected)
        for key in expected:
            assert_same_structure(kept[key], expected[key], name)
    elif isinstance(expected, list | tuple):
        assert kept is not expected
        for one, other in zip(kept, expected, strict=True):
            assert_same_structure(one, other, name)
    elif hasattr(expected, "__dataclass_fields__"):
        for field in expected.__dataclass_fields__:
            assert_same_structure(getattr(kept, field), getattr(expected, field), name)
    elif type(expected) is Known:
        assert_same_structure(kept.own, expected.own, name)
    else:
        assert kept is expected


def test_a_container_that_cannot_hold_what_keep_returns_is_kept_as_a_list():
    class Strict(Known):
        def __init__(self, *items):
            assert all(item.requires_grad for item in items)
            super().__init__(*items)

    register_pytree_node(
        Strict, lambda strict: (list(strict.values()), None), lambda items, _: Strict(*items)
    )
    model = Returns(lambda x: Strict(x * 2))
    with features(model, "") as f:
        model(torch.ones(2, requires_grad=True))
    assert [item.requires_grad for item in f[""]] == [False]


def test_keep_may_return_anything(model, x):
    with features(model, "1", keep=lambda tensor: tuple(tensor.shape)) as f:
        model(x)
    assert f["1"] == (3, 5)


def test_what_keep_raises_reaches_the_user_with_the_name_of_the_layer(model, x):
    with (
        no_leftovers(model),
        pytest.raises(ZeroDivisionError) as raised,
        features(model, "2", keep=lambda t: 1 / 0),
    ):
        model(x)
    assert raised.value.__notes__ == ["hooklab.features: raised by keep, on the output of '2'"]


@pytest.mark.parametrize("how", ["in a run", "in a tuple", "in a call by itself"])
def test_so_does_what_it_raises_where_an_output_is_looked_at_twice(x, how):
    model = nn.Sequential(Returns(lambda x: (x, x) if how == "in a tuple" else x + 1))
    with (
        no_leftovers(model),
        pytest.raises(ZeroDivisionError) as raised,
        features(model, "0", keep=lambda t: 1 / 0) as f,
    ):
        (f.run if how == "in a run" else model[0] if how == "in a call by itself" else model)(x)
    assert raised.value.__notes__ == ["hooklab.features: raised by keep, on the output of '0'"]


def test_packed_sequences_and_recurrent_layers_keep_their_structure():
    lstm, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    with features(lstm, "") as f:
        expected, (h, c) = lstm(packed)
        output, (kept_h, kept_c) = f[""]
    assert isinstance(output, nn.utils.rnn.PackedSequence)
    assert torch.equal(output.data, expected.data)
    assert torch.equal(kept_h, h)
    assert torch.equal(kept_c, c)


def test_of_a_packed_sequence_keep_gets_the_data_and_not_the_lengths():
    gru = nn.GRU(3, 4)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 3]))
    with features(gru, "", keep=lambda t: t.detach().mean()) as f:  # of integers there is no mean
        expected, _ = gru(packed)
    output, _ = f[""]
    assert torch.equal(output.data, expected.data.mean())
    assert torch.equal(output.batch_sizes, packed.batch_sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept(x, dtype):
    model = mlp(4, 3, 2).to(dtype)
    with features(model, "0") as f:
        model(x.to(dtype))
    assert f["0"].dtype == dtype


def test_meta_tensors_are_kept():
    model = mlp(4, 3, 2).to("meta")
    with features(model, "0") as f:
        model(torch.ones(7, 4, device="meta"))
    assert f["0"].is_meta
    assert f["0"].shape == (7, 3)


# ---- calls ----


def test_each_call_of_one_forward_is_kept():
    model, x = Twice(), torch.randn(2, 3)
    with features(model, "step", "last") as f:
        model(x, times=3)
        assert len(f.calls["step"]) == 3
    hidden = x
    for kept in f.calls["step"]:
        hidden = torch.nn.functional.linear(hidden, model.step.weight, model.step.bias)
        assert torch.equal(kept, hidden)
    assert f["step"] is f.calls["step"][-1]


def test_a_shared_module_answers_to_both_names():
    model = Twice()
    with features(model, "step", "again") as f:
        model(torch.randn(2, 3))
    assert f["step"] is f["again"]
    assert len(f.calls["again"]) == 2


def test_a_new_forward_begins_anew(model, x):
    with features(model, "1") as f:
        model(x)
        first = f["1"]
        model(x + 1)
        assert len(f.calls["1"]) == 1
        assert not torch.equal(f["1"], first)


def test_a_layer_that_the_last_forward_skipped_has_no_stale_value():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, use_b):
            return self.b(x) if use_b else self.a(x)

    model, x = Sometimes(), torch.randn(2, 3)
    with features(model, "a", "b") as f:
        model(x, True)
        model(x, False)
        assert list(f) == ["a"]
        with pytest.raises(KeyError, match="the last forward did not call 'b'"):
            f["b"]


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


def test_a_part_inside_a_module_that_is_not_of_the_model_begins_anew_each_time():
    model = AutoEncoder()

    class Around(nn.Module):
        def forward(self, x):
            return [model.encoder(factor * x) for factor in (1.0, 2.0)]

    with features(model, "**.layer") as f:
        Around()(torch.ones(1, 2))
        assert len(f.calls["encoder.layer"]) == 2
        assert torch.equal(f["encoder.layer"], model.encoder.forward(torch.full((1, 2), 2.0)))


def test_a_call_of_a_part_whose_forward_is_one_object_for_all_calls_is_a_forward():
    model = AutoEncoder()
    model.encoder.forward = model.encoder.forward
    with features(model, "**.layer") as f:
        for _ in range(3):
            model.training_step(torch.ones(1, 2))
            assert [len(outputs) for outputs in f.calls.values()] == [2, 2]


def test_calls_of_a_part_whose_class_shares_one_forward_begin_anew_each_time(x):
    class Doubled(nn.Module):
        forward = partial(torch.mul, other=2)

    model = nn.Sequential(Doubled())
    with features(model, "0") as f:
        model[0](x)
        model[0](-x)
    assert [out.tolist() for out in f.calls["0"]] == [(-2 * x).tolist()]


def test_a_copy_of_a_layer_made_inside_is_not_watched(model, x):
    with features(model, "0") as f:
        twin = copy.deepcopy(model[0])
        expected = model[0](x)
        twin(-x)
    assert [out.tolist() for out in f.calls["0"]] == [expected.tolist()]


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
    with features(model, "*") as f, layer_statistics(model, "0") as stats:
        snapshots = []
        for step in range(3):
            model(x * step)
            snapshots.append(copy.deepcopy((f, stats)))
        model(x * 7)
    assert [figures["0"].calls for _, figures in snapshots] == [1, 2, 3]
    for step, (kept, _) in enumerate(snapshots):
        assert torch.equal(kept["0"], model[0](x * step))
    with pytest.raises(RuntimeError, match="its hooks have been removed"), snapshots[0][0]:
        pass


def test_a_copy_of_what_was_kept_with_its_graph_has_the_same_tensors(model, x):
    model.seen = features(model, "0", keep=lambda t: t)
    with model.seen as f:
        model(x)
        twin = copy.deepcopy(model)
    assert twin.seen is not f
    assert twin.seen["0"] is f["0"]
    assert f["0"].requires_grad


@pytest.mark.parametrize("watching", WATCHES, ids=NAMES)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_torch_jit_traces_is_the_model_alone(watching):
    model, x = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 4)), torch.ones(100, 100)
    plain = torch.jit.trace(model, x)
    with watching(model, "*"):
        traced = torch.jit.trace(model, x)  # which compares with a second run, without grad
    assert torch.equal(traced(x), model(x))
    if watching.__class__ is not partial:  # `with_grad` copies, `verbose` and gradients look at the shape
        assert [node.kind() for node in traced.inlined_graph.nodes() if "detach" not in node.kind()] == [
            node.kind() for node in plain.inlined_graph.nodes()
        ]


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


@dataclasses.dataclass(slots=True)
class WithSlots:
    mask: torch.Tensor
    hidden: torch.Tensor


def test_a_copy_holds_of_each_layer_its_own_also_where_some_cannot_be_copied(x):
    class Masked(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.linear, self.number = nn.Linear(4, 4), number

        def forward(self, given):
            hidden = self.linear(given.hidden if isinstance(given, WithSlots) else given)
            return WithSlots(torch.full((2,), float(self.number)), hidden)

    model = nn.Sequential(*map(Masked, range(4)))
    with features(model, "*", keep=lambda t: t) as f:
        model(x)
        twin = copy.deepcopy(f)
    for number, kept in enumerate(twin.values()):
        assert kept.mask.tolist() == [number, number]
        assert torch.equal(kept.hidden, f[str(number)].hidden)


@pytest.mark.parametrize("watching", WATCHES, ids=NAMES)
def test_a_copy_made_inside_compiles_to_one_graph(watching, model, x):
    with watching(model, "*"):
        twin = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def test_a_layer_behind_an_error_says_that_an_error_may_be_why(x):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(9, 9), nn.Tanh())
    with features(model, "2") as f:
        with pytest.raises(RuntimeError):
            model(x)
        with pytest.raises(KeyError, match="an error ended the forward before"):
            f["2"]


def test_the_calls_are_a_mapping_of_what_was_called(model, x):
    with features(model, "*") as f:
        assert (list(f.calls), len(f.calls), "0" in f.calls) == ([], 0, False)
        model[:2](x)
    assert (list(f.calls), len(f.calls), "0" in f.calls, "2" in f.calls) == (["0", "1"], 2, True, False)


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


def test_a_forward_interrupted_from_the_keyboard_does_not_spoil_the_next(model, x):
    def interrupt(*args):
        raise KeyboardInterrupt

    with features(model, "1") as f:
        with model[2].register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
            model(x)
        model(x)
        assert len(f.calls["1"]) == 1


def test_after_the_block_the_model_may_go_and_what_was_kept_stays(x):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with features(model, "0", "1") as f:
        model(x)
    with features(model, "0") as idle:
        pass
    expected, gone = model[0](x), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert torch.equal(f["0"], expected)
    with pytest.raises(KeyError, match="no output of '0' yet; run the model inside the block"):
        idle["0"]


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


@pytest.mark.parametrize("inside", [False, True], ids=["registered before", "registered inside"])
def test_an_error_of_a_users_hook_that_ends_the_block_leaves_that_hook_alone(model, x, inside):
    def broken(module, args, output):
        raise error

    error = ValueError("from a hook of the user's")
    handle = None if inside else model[1].register_forward_hook(broken)
    with (
        pytest.raises(ValueError, match="from a hook of the user's") as raised,
        features(model, "*", "") as f,
    ):
        handle = handle or model[1].register_forward_hook(broken)
        model(x)
    assert raised.value is error
    assert list(f) == (["0", "1"] if inside else ["0"])
    assert list(model[1]._forward_hooks.values()) == [broken]
    assert [hook.owner for hook in hooks_on(model)] == ["user"]
    handle.remove()
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


def test_threads_that_run_at_the_same_time_are_all_kept():
    model, gate = Returns(lambda x: x), threading.Barrier(4)
    model.layer = nn.Linear(1, 1)

    def forward(x):
        gate.wait()
        result = model.layer(x)
        gate.wait()
        return result

    model.build = forward
    with features(model, "layer") as f:
        threads = [threading.Thread(target=model, args=(torch.full((1, 1), float(i)),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = sorted(output.item() for output in f.calls["layer"])
    assert kept == sorted(model.layer(torch.full((1, 1), float(i))).item() for i in range(4))


# ---- overwritten in place ----


def test_features_refuse_a_value_overwritten_in_place():
    model, x = mlp(4, 5, 2, inplace=True), torch.randn(3, 4)
    with features(model, "0", "1") as f:
        model(x)
    assert (f["1"] >= 0).all()
    for read in (lambda: f["0"], lambda: f.calls["0"], lambda: dict(f)):
        with pytest.raises(
            RuntimeError, match=r"output of '0' has been overwritten.*keep=lambda t: t.detach\(\).clone\(\)"
        ):
            read()
    assert "0" in f


def test_a_copy_is_safe_from_in_place_layers():
    model, x = mlp(4, 5, 2, inplace=True), torch.randn(3, 4)
    with features(model, "0", keep=lambda t: t.detach().clone()) as f:
        model(x)
    assert torch.equal(f["0"], model[0](x))


def test_overwriting_is_found_inside_nested_outputs():
    model = nn.Sequential(Returns(lambda x: {"a": [x * 2]}), Returns(lambda out: out["a"][0].add_(1)))
    with features(model, "0") as f:
        model(torch.ones(2))
    with pytest.raises(RuntimeError, match="overwritten in place"):
        f["0"]


def test_inference_tensors_have_no_version_and_are_not_checked():
    model = mlp(4, 5, 2, inplace=True)
    with torch.inference_mode(), features(model, "0") as f:
        model(torch.randn(3, 4))
    assert (f["0"] >= 0).all()  # the ReLU's output: documented


def test_an_inference_tensor_of_another_shape_than_its_layer_returned_is_refused():
    model = nn.Sequential(nn.Linear(4, 1), Returns(lambda x: x.squeeze_(-1)))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), features(model, "0") as f, features(model, "0", keep=lambda t: t.clone()) as copied:
            model(torch.ones(3, 4))
        assert copied["0"].shape == (3, 1)
        with pytest.raises(RuntimeError, match="overwritten in place"):
            f["0"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("keep", [torch.Tensor.detach, torch.clone])
def test_in_inference_mode_nested_tensors_of_an_encoder(keep):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2).eval()
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.inference_mode(), features(encoder, "layers.0", keep=keep) as f:
        encoder(torch.randn(2, 4, 8), src_key_padding_mask=padding)
    assert [part.shape for part in f["layers.0"].unbind()] == [(4, 8), (2, 8)]


def test_in_inference_mode_an_ordinary_tensor_is_checked_still():
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    x = -torch.ones(2)
    with torch.inference_mode(), features(model, "0") as f:
        model(x)
    with pytest.raises(RuntimeError, match="overwritten in place"):
        f["0"]


def test_after_a_forward_in_inference_mode_the_next_is_checked_again():
    model = mlp(4, 5, 2, inplace=True)
    with features(model, "0") as f:
        with torch.inference_mode():
            model(torch.randn(3, 4))
        model(torch.randn(3, 4))
        with pytest.raises(RuntimeError, match="overwritten in place"):
            f["0"]


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


def test_after_run_a_plain_forward_runs_to_its_end(model, x):
    with features(model, "0") as f:
        f.run(x)
        assert model(x).shape == (3, 2)


def test_run_after_removal_is_refused(model, x):
    f = features(model, "1")
    f.remove()
    with pytest.raises(RuntimeError, match="the hooks have been removed"):
        f.run(x)


def test_run_lets_errors_of_the_model_through(model):
    with features(model, "4") as f, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        f.run(torch.ones(1, 7))
    assert hooks_on(model) == []


# ---- before, after, and beside others ----


def test_after_the_block_the_model_is_as_before(model, x):
    before, expected = state_of(model), model(x)
    plain = pickle.dumps(model)
    with features(model, "**", "") as f:
        model(x)
        assert f
    assert same_state(before, state_of(model))
    assert hooks_on(model) == []
    assert pickle.dumps(model) == plain
    assert torch.equal(copy.deepcopy(model)(x), expected)


def test_outputs_and_gradients_are_bit_equal_during_the_block(model, x):
    plain = torch.autograd.grad(model(x).sum(), model.parameters())
    with features(model, "**"):
        watched = torch.autograd.grad(model(x).sum(), model.parameters())
    assert all(map(torch.equal, plain, watched))


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


def test_the_value_is_what_hooks_before_it_have_made_of_the_output(model, x):
    model[1].register_forward_hook(lambda module, args, output: output + 100)
    with features(model, "1") as f:
        model(x)
    assert (f["1"] >= 100).all()


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
    with pytest.raises(
        TypeError, match=r"features\(keep=...\): expected something that can be called.*found str"
    ):
        features(model, "1", keep="detach")
    assert hooks_on(model) == []


def test_a_list_of_parameters_is_refused_without_a_cure_that_fails_too():
    model = nn.Module()
    model.parts = nn.ParameterList([nn.Parameter(torch.ones(2))])
    with pytest.raises(
        ValueError, match=r"'parts' is a ParameterList, .* it holds no layers, so there is nothing to hook"
    ):
        features(model, "parts")


def test_a_container_that_is_never_called_is_refused_or_left_out():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"'layers' is a ModuleList, which has no forward.*'layers\.\*'"):
        features(model, "layers")
    with pytest.raises(ValueError, match="'layers' is a ModuleList"):
        features(model, "layers.0", "layers")
    with pytest.raises(ValueError, match="'layers' is a ModuleList"):
        features(model, nn.ModuleList)
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


TRANSFORMED = {
    "vmap": lambda model, x: torch.vmap(model)(x[None]),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
}


@pytest.mark.parametrize("run", TRANSFORMED.values(), ids=TRANSFORMED)
def test_a_forward_under_a_transform_has_its_features(model, x, run):
    """Of the tensors there nobody can ask for the memory."""
    with features(model, "1") as f:
        model(x)
        expected = f["1"].shape
        run(model, x)
    assert f["1"].shape == expected


def test_with_grad_under_vmap_leaves_the_forward_alone(model, x):
    stacked, buffers = torch.func.stack_module_state([copy.deepcopy(model) for _ in range(3)])

    def ensemble():
        run = lambda params, own: torch.func.functional_call(model, (params, own), (x,))  # noqa: E731
        return torch.autograd.grad(torch.vmap(run)(stacked, buffers).square().sum(), stacked.values())

    plain = ensemble()
    with features(model, "1", keep=with_grad):
        assert all(map(torch.equal, ensemble(), plain))


def test_with_grad_has_no_gradient_of_those_that_come_in_batches(model, x):
    batch = torch.eye(2).expand(3, 2, 2).movedim(1, 0)
    with features(model, "1", keep=with_grad) as f:
        out = model(x.requires_grad_())
    torch.autograd.grad(out, x, batch, is_grads_batched=True, retain_graph=True)
    assert f["1"].grad is None
    torch.vmap(lambda grad: torch.autograd.grad(out, x, grad, retain_graph=True)[0])(batch)
    assert f["1"].grad is None
    out.sum().backward()
    assert f["1"].grad.shape == f["1"].shape


def test_with_grad_under_vmap_is_a_copy(x):
    def edited(row):
        kept = with_grad(row)
        row *= 2
        return kept

    assert torch.equal(torch.vmap(edited)(x.clone()), x)


def test_run_lets_weights_go_that_come_for_each_call(x):
    """As `accelerate` does where it offloads: `_hf_hook` on the module, and a forward around its own."""
    inner = nn.Linear(4, 4)
    model, there = nn.Sequential(nn.Sequential(inner), nn.Tanh()), []

    def forward(value, own=model[0].forward):
        there.append("weights")
        output = own(value)
        there.clear()
        return output

    model[0].forward, model[0]._hf_hook = forward, object()
    with features(model, "0.0") as f:
        assert f.run(x)["0.0"].shape == inner(x).shape
    assert not there


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
    with pytest.raises(
        RuntimeError, match=r"'0' has been overwritten in place.*or take keep=with_grad without"
    ):
        f["0"]


def test_with_grad_leaves_a_leaf_alone_and_refuses_what_is_no_tensor():
    x = torch.ones(2, requires_grad=True)
    assert with_grad(x).grad is None
    assert hooks_on(x) == []
    with pytest.raises(TypeError, match="expected a tensor, found Linear"):
        with_grad(nn.Linear(1, 1))


def test_with_grad_does_not_keep_the_graph(model, x):
    with features(model, "1", keep=with_grad) as f:
        assert not graph_is_alive(model, x)
        assert f["1"].grad is None


def test_the_hook_of_with_grad_is_one_among_others():
    class Halves(nn.Module):
        def forward(self, x):
            return x.chunk(2)  # two outputs of one Node

    model = nn.Sequential(nn.Linear(4, 3), Halves())
    with features(model, "1", keep=with_grad) as f, features(model, "1", keep=with_grad) as again:
        one, two = model(torch.ones(2, 4))
    doubled = two.register_hook(lambda grad: 2 * grad)
    removed = two.register_hook(lambda grad: 1 / 0)
    assert len(hooks_on(two)) == 4
    removed.remove()
    two.retain_grad()
    (one.sum() + 3 * two.sum()).backward()
    for kept in f["1"], again["1"]:
        assert [half.grad.unique().item() for half in kept] == [1, 3]  # before the hook that came later
    assert two.grad.unique().item() == 6
    doubled.remove()
    assert [record.kind for record in hooks_on(two)] == ["tensor hook", "tensor hook", "retain_grad"]


# ---- what once went wrong ----


def test_whoever_else_listens_hears_the_last_output_of_a_run():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with features(model, "0") as f, layer_statistics(model, "0") as stats, features(model, "0") as g:
        f.run(torch.ones(1, 2))
        assert stats["0"].calls == 1
        assert torch.equal(g["0"], f["0"])
    assert hooks_on(model) == []


def test_a_run_stops_its_own_thread_only():
    began, other_ran = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread():
                began.set()
                assert other_ran.wait(60)
            return x

    model = nn.Sequential(Waiting(), nn.Linear(2, 3))
    with features(model, "0") as f:
        thread = threading.Thread(target=f.run, args=(torch.ones(1, 2),))
        thread.start()
        assert began.wait(60)
        assert model(torch.ones(1, 2)).shape == (1, 3)
        other_ran.set()
        thread.join()
    assert hooks_on(model) == []


def test_what_another_thread_calls_is_not_what_a_run_waits_for():
    began, other_ran = threading.Event(), threading.Event()

    def wait(module, args, output):
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert other_ran.wait(60)

    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())
    errors = []
    for place in ("0", "1"):  # the run still waits for one layer; it has all, and is about to stop
        began.clear(), other_ran.clear()
        with features(model, "0", "1") as f, model.get_submodule(place).register_forward_hook(wait):
            thread = threading.Thread(target=f.run, args=(torch.zeros(1),))
            thread.start()
            assert began.wait(60)
            try:
                model(torch.ones(1))
            except Exception as error:
                errors.append(error)
            other_ran.set()
            thread.join()
            assert [output.item() for output in f.calls["1"]] == [0]
    assert errors == []


def test_a_run_stops_whatever_shortcuts_were_taken_before(model, x):
    ran = []
    with features(model, "0") as f, model[2].register_forward_hook(lambda *given: ran.append(1)):
        with torch.inference_mode():
            model(x)
            f.run(x)
        assert len(ran) == 1
        inner = model[1].register_forward_hook(lambda *given: inner.remove() or (f.run(2 * x) and None))
        model(x)
        assert len(ran) == 2  # the outer forward alone


def test_a_script_module_is_left_out_by_patterns_and_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.ReLU(), torch.ones(1)), nn.Linear(2, 2))
    with features(model, "*") as f:
        model(torch.ones(1, 2))
    assert list(f) == ["0", "2"]
    with pytest.raises(ValueError, match=r"'1' is a \w+, a TorchScript module, which is not hooked"):
        features(model, "1")
    with pytest.raises(ValueError, match=r"'' is a \w+, a TorchScript module"):
        features(model[1], "")
    with pytest.raises(ValueError, match="'' is a RecursiveScriptModule"):
        features(torch.jit.script(nn.Sequential(nn.ReLU())), "0")
    assert hooks_on(model) == []


def test_a_dict_whose_keys_are_attributes_keeps_no_graph():
    class Attributes(dict):
        def __init__(self, **items):
            super().__init__(items)
            self.__dict__ = self

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return Attributes(out=self.inner(x))

    net = Net()
    with features(net, "") as f:
        net(torch.ones(1, 2))
    assert f[""].out is f[""]["out"]
    assert not f[""].out.requires_grad


@dataclasses.dataclass(slots=True)
class Slots:
    out: torch.Tensor


register_pytree_node(Slots, lambda it: ([it.out], None), lambda items, _: Slots(*items))


class ReadOnlyDict(dict):
    def __setitem__(self, key, value):
        raise TypeError("read-only")


class ReadOnlyList(list):
    def __setitem__(self, key, value):
        raise TypeError("read-only")


@pytest.mark.parametrize(
    ("wrapped", "read", "kind"),
    [
        (Slots, lambda kept: kept.out, Slots),
        (lambda out: ReadOnlyDict(out=out), lambda kept: kept["out"], dict),
        (lambda out: ReadOnlyList([out]), lambda kept: kept[0], list),
    ],
)
def test_containers_that_cannot_be_filled_as_others(wrapped, read, kind):
    layer = nn.Linear(2, 3)
    model, x = nn.Sequential(layer, Returns(wrapped)), torch.ones(1, 2)
    with features(model, "1") as f:
        out = read(model(x))
    kept = f["1"]
    assert type(kept) is kind
    assert (out.requires_grad, read(kept).requires_grad) == (True, False)
    assert torch.equal(read(kept), layer(x))


class Loss(collections.namedtuple("Loss", "logits")):
    """A tuple with attributes."""

    def __new__(cls, logits, name="none"):
        made = super().__new__(cls, logits)
        made.name, made.hidden = name, logits
        return made


def test_a_tuple_keeps_its_attributes():
    model = nn.Sequential(nn.Linear(2, 3), Returns(lambda out: Loss(out, "mean")))
    with features(model, "1") as f:
        model(torch.ones(1, 2))
    assert (type(f["1"]), f["1"].name) == (Loss, "mean")
    assert not f["1"].logits.requires_grad
    assert not f["1"].hidden.requires_grad


@dataclasses.dataclass(eq=False)
class Tree:
    out: torch.Tensor
    parent: "Tree | None" = None
    children: list = dataclasses.field(default_factory=list)


def grown(out):
    root = Tree(out)
    root.children.append(Tree(out * 2, parent=root))
    return root


def test_an_output_that_leads_back_to_itself_is_gone_through_once():
    model, lines = nn.Sequential(nn.Linear(2, 3), Returns(grown)), []
    with features(model, "1") as f, layer_statistics(model, "1") as stats, verbose(model, write=lines.append):
        root = model(torch.ones(1, 2))
    kept = f["1"]
    (child,) = kept.children
    assert child.parent is kept is not root
    assert [torch.equal(child.out, 2 * kept.out), kept.out.requires_grad, child.out.requires_grad] == [
        True,
        False,
        False,
    ]
    assert stats["1"].count == 6
    assert lines[-1].endswith(
        "Tree(out=[1, 3], parent=None, children=[Tree(out=[1, 3], parent=..., children=[])])"
    )


@pytest.mark.parametrize("around", [list, lambda items: {"it": items[0]}, tuple])
def test_a_container_that_holds_itself(around):
    def circle(out):
        loop = [out]
        loop.append(around([loop]))
        return loop

    model = nn.Sequential(nn.Linear(2, 3), Returns(circle))
    with (
        features(model, "1") as f,
        layer_statistics(model, "1") as stats,
        verbose(model, write=lambda line: None),
    ):
        model(torch.ones(1, 2))
    kept, back = f["1"]
    assert not kept.requires_grad
    assert (back["it"] if isinstance(back, dict) else back[0]) is f["1"]
    assert stats["1"].count == 3


def test_a_dataclass_with_a_field_that_is_not_set():
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        loss: torch.Tensor = dataclasses.field(init=False)

    class Net(nn.Module):
        def forward(self, x):
            return Output(x)

    net, lines = Net(), []
    with features(net, "") as f, verbose(net, "", write=lines.append):
        net(torch.ones(1, 2))
    assert f[""].logits.shape == (1, 2)
    assert lines == ["Net  Net  Output(logits=[1, 2])"]


def test_a_layer_that_returns_a_shape_beside_its_tensor(x):
    class WithShape(nn.Module):
        def forward(self, x):
            return x * 2, x.shape

    layer = WithShape()
    with features(layer, "") as f:
        layer(x)
    kept, shape = f[""]
    assert torch.equal(kept, x * 2)
    assert isinstance(shape, torch.Size)
    assert shape == x.shape


def test_a_batch_of_gradients_is_not_the_gradient_of_the_output(model, x):
    with features(model, "0", keep=with_grad) as f:
        torch.autograd.functional.jacobian(model, x, vectorize=True)
        assert f["0"].grad is None
        model(x).sum().backward()
    assert f["0"].grad.shape == f["0"].shape


@pytest.fixture
def checkpointed(x):
    """A model behind a checkpoint; reading what a Node has saved computes it again, outside backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward_and_read():
        loss = checkpoint(model, x.clone().requires_grad_(), use_reentrant=False).sum()
        node = loss.grad_fn.next_functions[0][0]
        for _ in range(2):
            assert node._saved_mat2 is not None
        return loss

    return model, forward_and_read


def test_reading_what_a_checkpoint_saved_counts_nothing(checkpointed):
    model, forward_and_read = checkpointed
    lines = []
    with (
        features(model, "1", keep=with_grad) as f,
        layer_statistics(model, "1") as stats,
        verbose(model, write=lines.append),
    ):
        forward_and_read().backward()
    assert f["1"].grad is not None
    assert (len(f.calls["1"]), stats["1"].calls) == (1, 1)
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]


def test_after_the_block_a_copy_made_inside_reports_no_more(model, x):
    lines = []
    with features(model, "1") as f, verbose(model, write=lines.append):
        twin = copy.deepcopy(model)
        model(x)
    kept, written = f["1"].clone(), len(lines)
    twin(x * 5)
    twin[1](x.new_ones(5))
    assert torch.equal(f["1"], kept)
    assert len(f.calls["1"]) == 1
    assert len(lines) == written


@pytest.mark.parametrize(
    "keep", [torch.Tensor.detach, lambda tensor: [tensor.detach()]], ids=["tensor", "list"]
)
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


def test_lines_and_figures_in_a_model_do_not_keep_it_from_being_pickled(model, x):
    model.lines, model.figures = verbose(model, write=lambda line: None), layer_statistics(model, "1", bins=3)
    with model.lines, model.figures:
        model(x)
    again = pickle.loads(pickle.dumps(model))
    assert again.figures["1"] == model.figures["1"]
    assert torch.equal(again.figures["1"].history, model.figures["1"].history)
    assert again.figures.table() == model.figures.table()
    again.lines.remove()


def test_an_output_that_is_given_a_graph_later_is_kept_without():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

        def forward(self, x):
            return self.trained(self.frozen(x).requires_grad_())

    model = Embedded()
    with features(model, "frozen") as f:
        model(torch.ones(2, 4))
    assert not f["frozen"].requires_grad


def test_what_a_reentrant_checkpoint_returns_is_kept_without_its_graph(x):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x), x * 2

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.last = Two(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            y, z = checkpoint(self.pair, x, use_reentrant=True)
            return checkpoint(self.last, y + z, use_reentrant=True)

    model, x = Net(), x.clone().requires_grad_()
    with features(model, "pair", "last") as f:
        model(x)
    assert not any(tensor.requires_grad for tensor in (*f["pair"], f["last"]))
    with features(model, "pair", "last") as f:
        f.run(x)
    assert not any(tensor.requires_grad for tensor in (*f["pair"], f["last"]))
    with features(model, "last") as alone, features(model.last, "1") as whole:
        checkpoint(model.last, x, use_reentrant=True)
    assert not alone["last"].requires_grad
    assert not whole["1"].requires_grad


def test_run_keeps_nothing_of_a_forward_that_it_has_ended(x):
    passed = []

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x):
            large = x * 2
            passed.append(weakref.ref(large))
            return self.inner(large) + 1

    model = nn.Sequential(Inside(), nn.ReLU())
    gc.collect()
    gc.disable()
    try:
        with features(model, "0.inner", keep=lambda tensor: tensor.sum().item()) as f:
            f.run(x)
            assert f["0.inner"] == pytest.approx((x * 2).tanh().sum().item())
            assert passed[0]() is None
    finally:
        gc.enable()


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


def test_run_ends_in_a_model_that_raises_errors_of_its_own(x):
    class Translating(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x):
            try:
                x = self.a(x)
            except Exception as error:
                raise RuntimeError("layer a failed") from error
            return self.b(x)

    model = Translating()
    f = features(model, "a").run(x)
    assert torch.equal(f["a"], model.a(x))
    with pytest.raises(RuntimeError, match="layer a failed"):
        f.run(x[:, :2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_inside_its_forward_is_forgotten(model, x):
    def end_the_thread(module, args, output):
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit

    with features(model, "1") as f, model[2].register_forward_hook(end_the_thread):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
        for _ in range(3):
            model(x)
        assert len(f.calls["1"]) == 1


def test_an_error_that_is_its_own_cause_ends_the_run(x):
    class Circular(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 2)

        def forward(self, x):
            try:
                raise ValueError("my own")
            except ValueError as error:
                raise error from error

    with pytest.raises(ValueError, match="my own"):
        features(Circular(), "a").run(x)


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


def test_the_gradient_of_a_strided_nested_tensor_is_left_to_autograd(model):
    def step(keep):
        x = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)])
        model.zero_grad()
        with features(model, "1", keep=keep) as f:
            torch.nested.to_padded_tensor(model(x), 0.0).sum().backward()
        return f["1"], [parameter.grad for parameter in model.parameters()]

    (_, expected), (kept, found) = step(torch.detach), step(with_grad)
    assert kept.is_nested
    assert kept.grad is None
    assert all(map(torch.equal, found, expected))


# ---- threads, each with features of its own ----


def test_a_run_keeps_the_outputs_of_its_own_thread(x):
    model, inside, go = Returns(None), threading.Event(), threading.Event()
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 2)
    first = model.first(x)
    second, others = model.second(first), x + 100

    def forward(x):
        hidden = model.first(x)
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go.wait(60)
        return model.second(hidden)

    model.build = forward
    with torch.no_grad(), features(model, "first", "second") as early:
        thread = threading.Thread(target=model, args=(others,))
        thread.start()
        assert inside.wait(60)  # the other one is in the middle of its forward
        with features(model, "first", "second") as late:
            for f in (early, late):
                assert torch.equal(f.run(x)["first"], first)
                assert [len(f.calls[name]) for name in ("first", "second")] == [1, 1]
            model.second.register_forward_pre_hook(lambda module, args: finish(go, thread), prepend=True)
            for f in (early, late):
                assert torch.equal(f.run(x)["second"], second)
                assert [len(f.calls[name]) for name in ("first", "second")] == [1, 1]


def finish(go, thread):
    """In the middle of a forward here, the one of the other thread goes on to its end."""
    if threading.current_thread() is threading.main_thread():
        go.set()
        thread.join()


def test_a_run_beside_the_forwards_of_another_thread_that_begin_and_end_in_it(x):
    model = Returns(None)
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 2)
    first = model.first(x)
    second = model.second(first)

    def forward(x):
        hidden = model.first(x)
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=model, args=(hidden + 100,))
            thread.start()
            thread.join()
        return model.second(hidden)

    model.build = forward
    with features(model, "first", "second") as f:
        for _ in range(2):
            f.run(x)
            assert torch.equal(f["first"], first)
            assert torch.equal(f["second"], second)
            assert [len(f.calls[name]) for name in ("first", "second")] == [1, 1]


@pytest.mark.parametrize("forwards", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_forward_beside_a_recomputation_in_another_thread_that_ends_in_it(x, forwards):
    """As on GPUs, where backward runs in threads of its own."""
    model, recomputes, go = Returns(None), threading.Event(), threading.Event()
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(x):
        hidden = model.first(x)
        if threading.current_thread() is threading.main_thread():
            if thread.is_alive():
                go.set()
                thread.join()
        elif recomputes_now.is_set():
            recomputes.set()
            assert go.wait(60)
        return model.second(model.first(hidden))

    def train():
        y = checkpoint(model, x + 100, use_reentrant=False)
        recomputes_now.set()
        y.sum().backward()

    model.build, recomputes_now, thread = forward, threading.Event(), threading.Thread(target=train)
    with features(model, "first", "second") as f:
        with forwards():
            for _ in range(3):  # only then is it known what the forwards are like
                model(x)
        thread.start()
        assert recomputes.wait(60)
        with forwards():
            model(x)
        assert not thread.is_alive()
        calls = {name: list(f.calls[name]) for name in f}
    first = model.first(x)
    again = model.first(first)
    for found, expected in zip(calls["first"], [first, again], strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(*calls["second"], model.second(again))
    assert all(param.grad is not None for param in model.parameters())


# ---- what layers return, and where from ----


def test_a_userdict_that_layers_hand_on_is_kept_as_each_returned_it():
    class Batch(UserDict):
        pass

    class Add(nn.Module):
        def __init__(self, features):
            super().__init__()
            self.linear = nn.Linear(4, features)

        def forward(self, batch):
            batch["embedding"] = self.linear(batch["tokens"])
            return batch

    model, lines = nn.Sequential(Add(8), Add(3)), []
    with (
        features(model, "0", "1") as f,
        layer_statistics(model, "0") as stats,
        verbose(model, write=lines.append),
    ):
        model(Batch(tokens=torch.rand(2, 4)))
    assert type(f["0"]) is Batch
    assert [list(f[name]["embedding"].shape) for name in "01"] == [[2, 8], [2, 3]]
    assert not f["0"]["embedding"].requires_grad
    assert lines[0] == "0  Add  {'tokens': [2, 4], 'embedding': [2, 8]}"
    assert stats["0"].calls == 2
    assert stats["0"].count == 2 * 4 + 2 * 8


def test_a_feature_without_memory_is_refused():
    class Free(nn.Module):
        def forward(self, x):
            y = x.detach() + 1
            x.untyped_storage().resize_(0)
            return y

    model = nn.Sequential(nn.Linear(4, 4), Free())
    with features(model, "0") as f:
        model(torch.rand(2, 4))
    for read in (lambda: f["0"], lambda: f.calls["0"], lambda: dict(f)):
        with pytest.raises(
            RuntimeError, match=r"'0' has no memory any more.*keep=lambda t: t.detach\(\).clone\(\)"
        ):
            read()
    with features(model, "0", keep=lambda t: t.detach().clone()) as f:
        model(x := torch.rand(2, 4))
    assert torch.equal(f["0"], model[0](x))


@pytest.mark.parametrize(
    "replaced",
    [lambda forward: forward, lambda forward: lambda x: forward(x), torch.no_grad(), torch.compiler.disable],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_calls_of_a_part_whose_forward_was_replaced(replaced, keyword, x):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x))

    model = nn.Sequential(Encoder())
    encoder = model[0]
    encoder.forward = replaced(encoder.forward)
    with features(model, "0.layer") as f:
        for _ in range(2):
            encoder(x=x) if keyword else encoder(x)
            assert len(f.calls["0.layer"]) == 2
            assert torch.equal(f.calls["0.layer"][0], encoder.layer(x))
            encoder.layer(x)
            assert len(f.calls["0.layer"]) == 1


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


class TwoStages(nn.Module):
    """Another thread than the main one waits between its two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, x):
        hidden = self.first(x)
        if threading.current_thread() is not threading.main_thread():
            self.inside.set()
            assert self.go.wait(60)
        return self.second(hidden)


@pytest.mark.parametrize("begins", ["before the run", "in the run"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_of_another_thread_that_goes_on_after_a_run_does_not_count(x, begins, grad):
    model = TwoStages()
    first = model.first(x)
    second = model.second(first)
    thread = threading.Thread(target=model, args=(x + 100,))

    def begin(*args):
        if threading.current_thread() is threading.main_thread() and not model.inside.is_set():
            thread.start()
            assert model.inside.wait(60)

    with torch.set_grad_enabled(grad), features(model, "first", "second") as f:
        if begins == "in the run":
            model.first.register_forward_hook(begin)
        else:
            begin()
        f.run(x)
        model.go.set()
        thread.join()
        assert (len(f.calls["first"]), len(f.calls["second"])) == (1, 1)
        assert torch.equal(f["first"], first)
        assert torch.equal(f["second"], second)
        again = threading.Thread(target=model, args=(x + 200,))  # another one is a forward like any other
        again.start()
        again.join()
        assert torch.equal(f["first"], model.first.forward(x + 200))


def test_the_run_of_other_features_in_another_thread_does_not_count(x):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with features(model, "0") as f, features(model, "0") as other:
        f.run(x)
        thread = threading.Thread(target=other.run, args=(x + 1,))
        thread.start()
        thread.join()
        assert torch.equal(f["0"], model[0].forward(x))
        assert torch.equal(other["0"], model[0].forward(x + 1))
        other.run(x + 2)  # in this thread it does
        assert torch.equal(f["0"], model[0].forward(x + 2))


def test_threads_that_only_run_each_read_their_own(x):
    model, wrong = mlp(4, *[8] * 16, 2), []

    def use(number):
        with torch.no_grad(), features(model, "0", "16") as f:
            for step in range(150):
                given = torch.full((3, 4), float(number * 100 + step))
                f.run(given)
                want = model[0].forward(given)
                if not torch.equal(f["0"], want) or [len(f.calls[name]) for name in f] != [1, 1]:
                    wrong.append((number, step))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


@pytest.mark.parametrize("slots", [False, True])
def test_a_part_whose_forward_is_a_method_of_something_else(slots, x):
    class Timed:
        if slots:
            __slots__ = ("__weakref__", "inner")

        def __init__(self, module):
            self.inner = module.forward
            module.forward = self.call

        def call(self, x):
            return self.inner(x)

    model = AutoEncoder()
    Timed(model.encoder)
    with features(model, "encoder.layer") as f:
        for _ in range(3):
            model.encoder(torch.ones(1, 2))
            assert len(f.calls["encoder.layer"]) == 2


def test_what_a_part_was_given_by_keyword_is_not_kept_after_the_block(x):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    inner = model[0].forward
    model[0].forward = lambda input: inner(input)
    given = x.clone()
    with features(model, "0.0") as f:
        model[0](input=given)
    alive = weakref.ref(given)
    del given
    assert alive() is None
    assert f["0.0"].shape == (3, 4)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_a_part_was_given_by_keyword_is_not_kept_after_the_next_forward(mode, x):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    inner = model[0].forward
    model[0].forward = lambda input: inner(input)
    given = x.clone()
    with features(model, "0.0"), mode():
        for _ in range(2):
            model(x)
        model[0](input=given)
        alive = weakref.ref(given)
        del given
        model(x)
        assert alive() is None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_forward_in_whose_beginning_the_hooks_are_removed_is_not_begun(mode, model, x):
    """PyTorch still calls those that it had found; what was kept of the last forward stays."""
    f = features(model, "1")
    with mode():
        for _ in range(2):
            model(x)
        kept = f["1"].clone()
        with model.register_forward_pre_hook(lambda *_: f.remove(), prepend=True):
            model(x + 1)
    assert torch.equal(f["1"], kept)
    assert len(f.calls["1"]) == 1


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


# ---- forwards after one without grad whose outputs were all new: these are noted without a look at them ----


class Changeable(nn.Module):
    """What it computes is changed between two forwards: `model.step = ...`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.step = lambda first, second, x: second(first(x))

    def forward(self, x, **others):
        return self.step(self.first, self.second, x, **others)


def recomputes(first, second, x):
    """A step of `Changeable` in which a checkpoint calls the first layer twice."""
    with torch.enable_grad():
        inner = checkpoint(lambda x: first(x).exp(), x, use_reentrant=False)
        inner.sum().backward()
    return second(inner.detach())


@pytest.fixture
def steady():
    """A model, its features after two forwards without grad, and a copy of the model that nobody watches."""
    torch.manual_seed(0)
    model = Changeable()
    own = copy.deepcopy(model)
    with torch.no_grad(), features(model, "first", "second") as f:
        for _ in range(2):
            model(torch.ones(3, 4))
        assert f._assumed
        yield model, f, own


def test_the_next_forwards_are_seen_as_the_first_was(steady, x):
    model, f, own = steady
    for factor in range(4):
        model(x * factor)
        assert f._assumed
        assert torch.equal(f["first"], own.first(x * factor))
        assert list(map(len, f.calls.values())) == [1, 1]
    assert not any(tensor.requires_grad for tensor in f.values())


def test_a_later_step_that_overwrites_is_found_though_it_did_not_before(steady, x):
    model, f, own = steady
    model.step = lambda first, second, x: second(first(x).mul_(2))
    for _ in range(2):
        model(x)
        assert torch.equal(f["second"], own.second(own.first(x) * 2))
        with pytest.raises(RuntimeError, match="the output of 'first' has been overwritten in place"):
            f["first"]


def test_a_layer_that_begins_to_work_in_place_itself_is_told_apart_in_the_next_forward(x):
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad(), features(model, "*") as f:
        for _ in range(2):
            model(x.clone())
        model[0].inplace = True
        model(x.clone())
        with pytest.raises(
            RuntimeError, match="works in place itself, and did not before: then run the model again"
        ):
            f["0"]
        for _ in range(2):
            model(x.clone())
            assert torch.equal(f["0"], x.relu())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_forward_in_another_mode_ends_what_was_learned(mode, x):
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad(), features(model, "*") as f:
        for _ in range(2):
            model(x.clone())
        model[0].inplace = True
        with mode():
            model(x.clone())
        model(x.clone())
        assert torch.equal(f["0"], x.relu())


def test_what_the_user_edits_is_found(steady, x):
    model, f, own = steady
    model(x)
    f["first"].add_(1)
    with pytest.raises(RuntimeError, match="overwritten"):
        f["first"]
    model(x)
    assert torch.equal(f["first"], own.first(x))


@pytest.fixture
def passes():
    """A model whose first layer returns its input, its features after two forwards without grad, and that input."""
    model, x = nn.Sequential(nn.Identity(), nn.Linear(4, 4)), torch.ones(3, 4)
    with torch.no_grad(), features(model, "*") as f:
        for _ in range(2):
            model(x)
        assert f._assumed
        yield model, f, x


@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_input_that_has_been_edited_can_come_out_of_a_layer(passes, by_keyword):
    model, f, x = passes
    call = (lambda x: model(input=x)) if by_keyword else model
    edited = x.clone()
    edited[0] = 7.0
    for given in (x, edited, x, edited):
        call(given)
        assert torch.equal(f["0"], given)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_input_with_a_graph_does_not_keep_it_alive(passes, by_keyword):
    model, f, x = passes
    call = (lambda x: model(input=x)) if by_keyword else model
    with torch.enable_grad():
        base = x.clone().requires_grad_()
        given = base.exp() + 0
    alive = weakref.ref(base)
    call(given)
    assert torch.equal(f["0"], given)
    del base, given
    assert alive() is None
    assert not f["0"].requires_grad


def test_a_list_as_input_is_looked_into(passes):
    model, f, x = passes
    model[0].forward = lambda parts: parts[0]
    for step in range(4):
        x.fill_(step)
        model([x])
        assert torch.equal(f["0"], x)


@pytest.mark.parametrize("part", ["buffer", "attribute", "slice", "parameter", "slice of the parameter"])
def test_weights_and_buffers_that_a_layer_returns_may_be_edited_between_forwards(part, x):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("buffer", torch.zeros(4))
            self.parameter = nn.Parameter(torch.zeros(4))
            self.attribute = torch.zeros(4)

        def forward(self, x):
            whole = getattr(self, part.removeprefix("slice of the ").replace("slice", "buffer"))
            return whole[:4] if "slice" in part else whole

    model = Changeable()
    model.first = Table()
    model.step = lambda first, second, x: second(x) + first(x)
    table = getattr(model.first, "parameter" if "parameter" in part else part.replace("slice", "buffer"))
    with torch.no_grad(), features(model, "first", "second") as f:
        for step in range(4):
            model(x)
            assert torch.equal(f["first"], torch.full((4,), float(step)))
            assert torch.equal(f["second"], nn.functional.linear(x, model.second.weight, model.second.bias))
            table.add_(1)


@pytest.mark.parametrize("other", ["enable_grad", "inference_mode"])
def test_modes_may_change_from_one_forward_to_the_next(steady, other, x):
    model, f, own = steady
    for _ in range(2):
        with getattr(torch, other)():
            model(x)
            assert torch.equal(f["first"], own.first(x))
            assert not f["first"].requires_grad
        model(x)
        assert torch.equal(f["first"], own.first(x))


def test_calls_outside_a_forward_a_run_and_an_error_in_between(steady, x):
    model, f, own = steady
    model.first(x * 2)
    assert list(map(len, f.calls.values())) == [1, 1]
    assert torch.equal(f["first"], own.first(x * 2))
    model(x)
    assert torch.equal(f["first"], own.first(x))
    model.first(x * 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(3, 5))
    assert list(f) == []
    model.first(x * 4)
    assert torch.equal(f["first"], own.first(x * 4))
    model(x)
    assert torch.equal(f["second"], own.second(own.first(x)))
    assert f.run(x * 5) is f
    assert torch.equal(f["first"], own.first(x * 5))
    model(x)
    model(x)
    assert list(map(len, f.calls.values())) == [1, 1]


def test_a_forward_that_calls_the_model_again_counts_as_one(steady, x):
    model, f, _own = steady
    plain = model.step

    def twice(first, second, x):
        model.step = plain
        try:
            return model(x) + second(first(x))
        finally:
            model.step = twice

    model.step = twice
    for _ in range(2):
        model(x)
        assert list(map(len, f.calls.values())) == [2, 2]
    model.step = plain
    for _ in range(3):
        model(x)
        assert list(map(len, f.calls.values())) == [1, 1]


def test_a_forward_interrupted_from_the_keyboard_is_over(steady, x):
    model, f, _own = steady
    plain = model.step

    def interrupted(first, second, x):
        first(x)
        raise KeyboardInterrupt

    model.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(x)
    with torch.enable_grad():
        x.clone().requires_grad_().exp()
    model.step = plain
    for _ in range(3):
        model(x)
        assert list(map(len, f.calls.values())) == [1, 1]
    assert f._assumed


def test_a_graph_made_inside_is_let_go_and_what_was_computed_twice_is_not_counted(steady, x):
    model, f, own = steady
    plain = model.step

    def trains(first, second, x, again=True):
        with torch.enable_grad():
            inner = checkpoint(first, x, use_reentrant=False) if again else first(x)
            inner.sum().backward()
        return second(inner.detach())

    model.step = lambda *args: trains(*args, again=False)
    model(x)
    assert torch.equal(f["first"], own.first(x))
    assert not any(record[1].requires_grad for record in f._log)
    model.step = trains
    for _ in range(3):
        model(x)
        assert list(map(len, f.calls.values())) == [1, 1]
    model.step = plain
    model(x)
    assert list(map(len, f.calls.values())) == [1, 1]


def test_a_recomputation_that_was_not_to_be_expected_is_announced_and_then_not_counted(steady, x):
    model, f, own = steady

    model.step = recomputes
    model(x)
    with pytest.raises(
        RuntimeError, match="what was computed twice in it cannot be told; run the model again"
    ):
        f["first"]
    with pytest.raises(KeyError, match="was not asked for"):
        f["third"]
    for _ in range(3):
        model(x)
        assert list(map(len, f.calls.values())) == [1, 1]
        assert torch.equal(f["first"], own.first(x))


def test_who_makes_a_graph_now_and_then_is_announced_once(steady, x):
    model, f, own = steady
    plain = model.step

    model.step = recomputes
    model(x)
    with pytest.raises(RuntimeError, match="run the model again"):
        f["first"]
    for _ in range(3):
        for step in plain, recomputes:
            model.step = step
            model(x)
            assert list(map(len, f.calls.values())) == [1, 1]
            assert torch.equal(f["first"], own.first(x))


def test_who_makes_graphs_from_the_first_forward_on_is_never_announced(x):
    model = Changeable()

    def makes_a_graph(first, second, x):
        with torch.enable_grad():
            x.clone().requires_grad_().exp()
        return second(first(x))

    with torch.no_grad(), features(model, "first", "second") as f:
        for step in makes_a_graph, recomputes, makes_a_graph, recomputes:
            model.step = step
            model(x)
            assert list(map(len, f.calls.values())) == [1, 1]


def test_a_forward_without_grad_that_a_checkpoint_computes_again_counts_once(steady, x):
    model, f, own = steady
    x = x.clone().requires_grad_()

    def step(x):
        with torch.no_grad():
            target = model(x.detach().clone())
        return (x.exp() - target).exp()

    with torch.enable_grad():
        loss = checkpoint(step, x, use_reentrant=False).sum()
    assert f._assumed
    kept = f["first"]
    loss.backward()
    assert f["first"] is kept
    assert torch.equal(kept, own.first(x))


def test_run_ends_early_after_forwards_without_grad(steady, x):
    model, f, own = steady
    plain, after = model.step, []

    def goes_on(first, second, x):
        output = plain(first, second, x)
        after.append(1)
        return output

    model.step = goes_on
    for factor in (1, 2):
        assert torch.equal(f.run(x * factor)["first"], own.first(x * factor))
        assert after == []
    model(x)
    assert after == [1]


def test_a_stranger_in_the_middle_of_a_forward_without_grad_is_not_noted(steady, x):
    model, f, own = steady
    plain, first_done, go_on = model.step, threading.Event(), threading.Event()

    def stops_halfway(first, second, x):
        inner = first(x)
        if threading.current_thread() is stranger:
            first_done.set()
            go_on.wait(30)
        elif go_on not in waited:
            waited.append(go_on)
            go_on.set()
            stranger.join()
        return second(inner)

    def run():
        with torch.no_grad(), features(model, "second") as others:
            others.run(x * 9)

    waited = []
    stranger = threading.Thread(target=run)
    model.step = stops_halfway
    stranger.start()
    first_done.wait(30)
    model(x)
    assert list(map(len, f.calls.values())) == [1, 1]
    assert torch.equal(f["second"], own.second(own.first(x)))
    model.step = plain
    for _ in range(3):
        model(x)
        assert list(map(len, f.calls.values())) == [1, 1]
    assert f._assumed


@pytest.mark.parametrize("grad", [False, True])
def test_another_thread_that_begins_in_the_middle_of_a_forward_without_grad_is_noted(steady, x, grad):
    model, f, own = steady
    plain, others = model.step, []

    def forward():
        with torch.set_grad_enabled(grad):
            model(x * 2)

    def starts_another(first, second, x):
        inner = first(x)
        if not others:
            others.append(threading.Thread(target=forward))
            others[0].start()
            others[0].join()
        return second(inner)

    model.step = starts_another
    model(x)
    assert list(map(len, f.calls.values())) == [2, 2]
    assert torch.equal(f.calls["second"][0], own.second(own.first(x * 2)))
    assert not any(tensor.requires_grad for calls in f.calls.values() for tensor in calls)
    model.step = plain
    for _ in range(3):
        model(x)
        assert list(map(len, f.calls.values())) == [1, 1]
    assert f._assumed


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torch_jit_traces_the_model_alone_after_forwards_without_grad(steady, x):
    model, _f, _own = steady
    with torch.enable_grad():
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert "detach" not in str(traced.inlined_graph)


def test_copies_and_removal_after_forwards_without_grad(steady, x):
    model, f, own = steady
    model(x)
    twin = copy.deepcopy(f)
    again = pickle.loads(pickle.dumps(f))
    model(x * 2)
    f.remove()
    model(x * 3)
    for kept, given in ((twin, x), (again, x), (f, x * 2)):
        assert torch.equal(kept["first"], own.first(given))


class Script(nn.Module):
    """Calls its layers in the order of `plan`: numbers of layers, or functions that are called in between."""

    def __init__(self, layers=3, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.plan = list(range(layers))

    def forward(self, x, factor=1):
        for one in self.plan:
            x = one(x) if callable(one) else self.layers[one](x * factor)
        return x


@pytest.fixture
def script():
    """A `Script`, and its features after three forwards without grad: the third was one that is not looked at."""
    torch.manual_seed(0)
    model = Script()
    with torch.no_grad(), features(model, "layers.*") as f:
        for _ in range(3):
            model(torch.ones(2, 4))
        assert f._in_cells
        yield model, f


def calls_by_hand(model, x):
    """What each layer of a `Script` returns in a forward, by hooks written here."""
    seen = {f"layers.{number}": [] for number in range(len(model.layers))}
    handles = [
        layer.register_forward_hook(lambda *given, calls=calls: calls.append(given[-1]))
        for layer, calls in zip(model.layers, seen.values(), strict=True)
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return {name: calls for name, calls in seen.items() if calls}


def agree(calls, expected):
    assert {name: len(some) for name, some in calls.items()} == {
        name: len(some) for name, some in expected.items()
    }
    return all(
        torch.equal(*two) for name in expected for two in zip(calls[name], expected[name], strict=True)
    )


def test_how_often_a_layer_is_called_may_change_without_grad(script):
    model, f = script
    for number, plan in enumerate(([0, 1, 1, 2], [2, 0], [1, 1, 1], [1], [], [0, 1, 2], [2, 2, 0])):
        model.plan = plan
        x = torch.full((2, 4), number + 0.5)
        expected = calls_by_hand(model, x)
        assert f._in_cells
        assert agree(f.calls, expected)  # of the forward of `by_hand`
        model(x + 1)
        if number % 2:
            assert agree(f.calls, calls_by_hand(model, x + 1))


def test_what_is_read_in_the_middle_of_a_forward_without_grad_is_of_this_one(script):
    model, f = script
    seen = []

    def read(x):
        seen.append({name: len(calls) for name, calls in f.calls.items()})
        return x

    model.plan = [read, 0, read, 1, 0, read, 0]
    model(torch.zeros(2, 4))
    assert f._in_cells
    assert seen == [{}, {"layers.0": 1}, {"layers.0": 2, "layers.1": 1}]
    assert agree(f.calls, calls_by_hand(model, torch.zeros(2, 4)))


def test_a_forward_without_grad_that_raises_leaves_what_it_has_called(script, x):
    model, f = script

    def fails(x):
        raise ValueError

    for plan in ([1, 1, fails, 0], [fails], [2, fails]):
        model.plan = plan
        with pytest.raises(ValueError, match=r"^$"):
            model(x)
        assert f._in_cells
        called = [f"layers.{one}" for one in plan[: plan.index(fails)]]
        assert {name: len(calls) for name, calls in f.calls.items()} == collections.Counter(called)
    with pytest.raises(KeyError, match="an error ended the forward before"):
        f["layers.0"]
    model.plan = [0, 1, 2]
    assert agree(f.calls, calls_by_hand(model, x))


def test_a_layer_that_returns_something_else_than_before_is_seen_with_the_others(script, x):
    model, f = script

    class Pairs(nn.Module):
        def forward(self, x):
            return x + 1, [x]

    model.plan = [0, 1, lambda x: x[0], 1, lambda x: x[0], 2]
    model.layers[1].forward = Pairs().forward
    for _ in range(2):
        model(x)
        first = nn.functional.linear(x, model.layers[0].weight, model.layers[0].bias)
        assert {name: len(calls) for name, calls in f.calls.items()} == {
            "layers.0": 1,
            "layers.1": 2,
            "layers.2": 1,
        }
        assert torch.equal(f["layers.0"], first)
        assert torch.equal(f.calls["layers.1"][0][0], first + 1)
        assert torch.equal(f["layers.1"][1][0], first + 1)
    del model.layers[1].forward
    model.plan = [0, 1, 2]
    for _ in range(3):
        model(x)
    assert f._in_cells
    assert agree(f.calls, calls_by_hand(model, x))


def test_by_keyword_too_outputs_are_not_looked_at(script, x):
    model, f = script
    for factor in (2, 3):
        model(x=x, factor=factor)
        assert f._in_cells
        model(x, factor=factor)
        assert f._in_cells
        layer = model.layers[0]
        assert torch.equal(f["layers.0"], nn.functional.linear(x * factor, layer.weight, layer.bias))


@pytest.mark.parametrize(("width", "left"), [(4, 3), (512, 0)])
def test_without_grad_small_outputs_stay_until_the_next_ones_take_their_place_and_large_ones_do_not(
    width, left
):
    model, x, alive = Script(width=width), torch.ones(256, width), []

    def note(x):
        alive.append(sum(one() is not None for one in old))
        return x

    model.plan = [note, 0, note, 1, note, 2, note]
    with torch.no_grad(), features(model, "layers.*") as f:
        for _ in range(3):
            old = []
            model(x)
        assert (width * 256 * 4 * 3 > 2**20) is (left == 0)
        assert f._in_cells
        old = [weakref.ref(f[name]) for name in f]
        alive.clear()
        model(x)  # read, they are in the log, which is emptied
        assert alive == [0] * 4
        old = [weakref.ref(cell(f._in_cells)[0][1]) for cell in f._cells]
        model(x)
        assert alive[4:] == [left, max(left - 1, 0), max(left - 2, 0), 0]


@pytest.mark.parametrize("then", ["grad", "inference", "run", "remove", "alone", "again"])
def test_what_was_kept_without_grad_is_let_go_by_whatever_comes_next(script, x, then):
    model, f = script
    old = [weakref.ref(cell(f._in_cells)[0][1]) for cell in f._cells]
    assert all(one() is not None for one in old)
    if then == "grad":
        with torch.enable_grad():
            model(x)
    elif then == "inference":
        with torch.inference_mode():
            model(x)
    elif then == "run":
        f.run(x)
    elif then == "remove":
        f.remove()
        assert all(torch.equal(f[name], one()) for name, one in zip(f, old, strict=True))
        assert [cell(f._forwards) for cell in f._cells] == [[]] * 3
        f._log.clear()
        f._sorted = ((0, 0), {})
    elif then == "alone":
        model.layers[0](x)
        assert torch.equal(f["layers.0"], model.layers[0](x))
        assert torch.equal(f["layers.1"], old[1]())
        model(x)
        model(x)
    else:
        model(x)
    assert [one() for one in old] == [None] * 3


def test_forwards_in_other_threads_are_seen_too(steady, x):
    model, f, own = steady

    def forward():
        with torch.no_grad():
            model(x * 2)

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    assert torch.equal(f["first"], own.first(x * 2))
    for _ in range(2):
        model(x)
        assert torch.equal(f["first"], own.first(x))
    entered, go_on = threading.Event(), threading.Event()
    plain = model.step

    def waits(first, second, x):
        inner = first(x)
        if threading.current_thread() is other:
            entered.set()
            go_on.wait(30)
        return second(inner)

    other = threading.Thread(target=forward)
    model.step = waits
    other.start()
    entered.wait(30)
    model(x)
    go_on.set()
    other.join()
    assert list(map(len, f.calls.values())) == [2, 2]
    model.step = plain
    for _ in range(2):
        model(x)
        assert list(map(len, f.calls.values())) == [1, 1]
