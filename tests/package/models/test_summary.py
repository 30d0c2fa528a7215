"""summary: a row a layer with its output, parameters, operations and saved bytes; nothing in the model changes."""

import copy
import warnings

import pytest
import torch
from models import Twice, same_state, state_of
from torch import nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from hooklab import features, hooks_on, no_leftovers, saved_tensors, summary

knows_nodes = pytest.mark.skipif(not hasattr(graph, "node_creation_hook"), reason="needs PyTorch 2.14")


@pytest.fixture
def convnet():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout()
    return nn.Sequential(*layers, nn.Linear(36, 2))


IMAGES = 2, 3, 8, 8


# ---- what the numbers are ----


def test_outputs_and_parameters_of_each_layer(convnet):
    s = summary(convnet, torch.zeros(IMAGES))
    assert [s[name].output for name in s] == [*["[2, 4, 6, 6]"] * 3, "[2, 4, 3, 3]", "[2, 36]", "[2, 36]", "[2, 2]"]
    assert [s[name].parameters for name in s] == [3 * 4 * 9 + 4, 8, 0, 0, 0, 0, 36 * 2 + 2]
    assert s.total.parameters == sum(p.numel() for p in convnet.parameters()) == 194
    assert [s[name].calls for name in s] == [1] * 7


def test_operations_are_those_of_the_formulas(convnet):
    s = summary(convnet, torch.zeros(IMAGES))
    convolution = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    assert s["0"].operations == convolution
    assert s["6"].operations == 2 * 2 * 36 * 2
    assert s.total.operations == convolution + 2 * 2 * 36 * 2
    with FlopCounterMode(display=False) as counter:
        convnet(torch.zeros(IMAGES))
    assert s.total.operations == counter.get_total_flops()


def test_a_multiplication_and_an_addition_are_two_operations_at_every_position():
    s = summary(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(2), nn.Linear(4, 5)), torch.zeros(1, 2, 4, 4))
    assert s["0"].operations == 2 * (4 * 2 * 2) * (2 * 3 * 3)  # and no bias
    assert s["2"].operations == 2 * (4 * 5) * 4  # each of the four channels is a position


def test_what_has_no_formula_is_none_and_named_and_what_computes_nothing_is_0(convnet):
    s = summary(convnet, torch.zeros(IMAGES))
    assert s["2"].operations is None
    assert s["2"].uncounted == ("relu_",)
    assert (s["4"].operations, s["4"].uncounted) == (0, ())
    assert (s["0"].operations > 0, s["0"].uncounted) == (True, ())
    lines = s.table().splitlines()
    assert lines[-2].split()[:2] == ["total", "Sequential"]
    assert f"{s.total.operations:,} +" in lines[-2]
    assert lines[-1].startswith("+ and -: PyTorch has no formula for add_, ")
    assert "relu_" in lines[-1]


@pytest.mark.parametrize("size", [1, 3])
def test_an_lstm_that_pytorch_runs_in_one_operation_is_not_counted_as_0(size):
    s = summary(nn.Sequential(nn.LSTM(size, 4)), torch.zeros(5, 2, size))
    assert s["0"].operations in (None, 2 * 5 * 2 * 16 * (size + 4))
    assert (s["0"].operations is None) == bool(s["0"].uncounted and "mm" not in str(s["0"].uncounted))


@knows_nodes
def test_operations_of_the_backward_pass_belong_to_the_layers_of_their_forward(convnet):
    s = summary(convnet, torch.zeros(IMAGES), backward=True)
    # The images need no gradient; the weight of the convolution takes as much as its forward.
    assert s["0"].backward == s["0"].operations
    assert s["6"].backward == 2 * s["6"].operations
    assert s.total.backward == s["0"].backward + s["6"].backward
    assert s["2"].backward is None
    assert "threshold_backward" in s["2"].uncounted
    with FlopCounterMode(display=False) as counter:
        convnet(torch.zeros(IMAGES)).sum().backward()
    assert s.total.operations + s.total.backward == counter.get_total_flops()


@knows_nodes
@pytest.mark.parametrize("groups", [1, 4])
def test_the_backward_pass_of_a_grouped_convolution_is_counted_too_high(groups):
    """Once PyTorch counts the groups, this fails for 4, and the row in the limits can go."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=groups))
    layer = summary(model, torch.zeros(1, 8, 5, 5), backward=True)["1"]
    assert layer.backward == (1 + groups) * layer.operations


def test_before_pytorch_2_14_only_the_total_of_the_backward_pass_is_known(convnet, monkeypatch):
    monkeypatch.delattr(graph, "node_creation_hook", raising=False)
    s = summary(convnet, torch.zeros(IMAGES), backward=True)
    assert [s[name].backward for name in s] == [None] * 7
    assert s.total.backward == s["0"].operations + 2 * s["6"].operations


def test_saved_bytes_are_those_that_saved_tensors_counts(convnet):
    x = torch.zeros(IMAGES)
    s = summary(convnet, x)
    with saved_tensors(convnet) as saved:
        loss = convnet(x)
    assert s.total.saved == saved.unique_bytes - saved.parameter_bytes > 0
    assert sum(s[name].saved for name in s) == s.total.saved
    assert s["0"].saved == 4 * x.numel()
    del loss


def test_saved_bytes_are_unknown_where_gradients_are_off(convnet):
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            s = summary(convnet, torch.zeros(IMAGES))
        assert s.total.saved is None
        assert s["0"].operations == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)


def test_the_trainable_share():
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 4), nn.ReLU())
    model[0].requires_grad_(False)
    s = summary(model, torch.zeros(2, 3))
    assert [s[name].trainable for name in s] == [0, 1, None]
    assert s.total.trainable == 8 / 12


def test_a_layer_includes_those_inside_and_depth_leaves_them_out():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.ModuleList([nn.ReLU()])[0])
    x = torch.zeros(5, 4)
    every, top, whole = (summary(model, x, depth=depth) for depth in (None, 1, 0))
    assert list(every) == ["0", "0.0", "0.1", "1"]
    assert list(top) == ["0", "1"]
    assert list(whole) == [""]
    assert every["0"].parameters == every["0.0"].parameters + every["0.1"].parameters == 23
    assert every["0"].operations == every["0.0"].operations + every["0.1"].operations == 2 * 5 * (12 + 6)
    assert top["0"] == every["0"]
    assert top.total == whole.total == every.total


def test_a_layer_with_two_names_is_one_row_and_counts_each_call():
    s = summary(Twice(), torch.zeros(5, 3))
    assert s["step"] is s["again"]
    assert (s["step"].name, s["step"].calls) == ("step = again", 2)
    assert s["step"].operations == 2 * (2 * 5 * 3 * 3)
    assert s.total.parameters == 12 + 8
    assert [line.split()[0] for line in s.table().splitlines()[1:]] == ["step", "last", "total"]


def test_a_layer_that_is_not_called_keeps_its_parameters():
    model = nn.MultiheadAttention(4, 2)
    s = summary(model, *[torch.zeros(3, 1, 4)] * 3)
    row = s["out_proj"]
    assert (row.calls, row.output, row.parameters, row.operations, row.saved) == (0, "-", 20, None, None)


def test_keyword_inputs_and_inputs_in_containers_reach_the_forward():
    class Sum(nn.Module):
        def forward(self, pair, *, scale):
            return {"sum": (pair[0] + pair[1]) * scale}

    s = summary(Sum(), (torch.ones(2), torch.ones(2)), scale=torch.ones(1))
    assert s.total.output == "{'sum': [2]}"


# ---- how it is shown ----


def test_text_html_and_dataframe_say_the_same(convnet):
    pandas = pytest.importorskip("pandas")
    s = summary(convnet, torch.zeros(IMAGES), backward=True)
    assert str(s) == s.table()
    assert repr(s) == "Summary(7 layers, 194 parameters)"
    html, frame = s._repr_html_(), s.to_dataframe()
    assert html.count("<tr>") == 1 + 7 + 1
    assert "PyTorch has no formula for" in html
    assert list(frame["layer"]) == list(s)
    assert list(frame["parameters"]) == [s[name].parameters for name in s]
    assert frame["operations"][0] == s["0"].operations
    assert pandas.isna(frame["operations"][2])
    assert frame["uncounted"][2] == s["2"].uncounted
    assert "backward" in frame
    assert "backward" not in summary(convnet, torch.zeros(IMAGES)).to_dataframe()


def test_what_is_no_row_raises_with_the_close_names(convnet):
    with pytest.raises(KeyError, match="no row of 'fc'; close: '0', '1'"):
        summary(convnet, torch.zeros(IMAGES))["fc"]


# ---- nothing changes ----


@pytest.mark.parametrize("training", [True, False])
def test_the_model_its_gradients_the_input_and_the_random_numbers_stay(convnet, training):
    convnet.train(training)
    x = torch.randn(IMAGES, requires_grad=True)
    convnet(x).sum().backward()
    before, values = state_of(convnet), x.detach().clone()
    grads = [tensor.grad.clone() for tensor in (x, *convnet.parameters())]
    buffers = [(buffer, buffer._version) for buffer in convnet.buffers()]
    random = torch.get_rng_state()
    with no_leftovers(convnet):
        s = summary(convnet, x, backward=True)
    assert s["0"].calls == 1
    assert same_state(before, state_of(convnet))
    assert all(map(torch.equal, grads, [tensor.grad for tensor in (x, *convnet.parameters())]))
    assert all(old is new for (old, _), new in zip(buffers, convnet.buffers(), strict=True))
    assert [version for _, version in buffers] == [buffer._version for buffer in convnet.buffers()]
    assert torch.equal(x, values)
    assert torch.equal(random, torch.get_rng_state())
    assert hooks_on(convnet) == []


def test_hooks_on_parameters_do_not_fire():
    model, fired = nn.Linear(3, 2), []
    model.weight.register_hook(lambda grad: fired.append("tensor"))
    model.weight.register_post_accumulate_grad_hook(lambda param: fired.append("parameter"))
    summary(model, torch.ones(1, 3), backward=True)
    assert fired == []
    model(torch.ones(1, 3)).sum().backward()
    assert fired == ["tensor", "parameter"]


def test_an_lstm_keeps_its_parameters_and_gradients():
    model = nn.LSTM(3, 4)
    params = list(model.parameters())
    summary(model, torch.ones(5, 2, 3), backward=True)
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    assert all(one is other for one, other in zip(params, model._flat_weights, strict=True))
    assert all(param.grad is None for param in params)


def test_an_input_that_the_first_layer_edits_in_place_stays():
    x = torch.tensor([-1.0, 2.0])
    assert summary(nn.Sequential(nn.ReLU(inplace=True)), x)["0"].uncounted == ("relu_",)
    assert x.tolist() == [-1, 2]


def test_a_graph_from_before_still_has_its_backward(convnet):
    expected = copy.deepcopy(convnet)
    x = torch.ones(IMAGES)
    torch.manual_seed(1)
    loss = convnet(x).sum()
    summary(convnet, x, backward=True)
    loss.backward()
    torch.manual_seed(1)
    expected(x).sum().backward()
    for one, other in zip(convnet.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_an_error_in_the_forward_is_passed_on_and_leaves_nothing(convnet):
    before, random = state_of(convnet), torch.get_rng_state()
    with no_leftovers(convnet), pytest.raises(RuntimeError, match="expected input"):
        summary(convnet, torch.zeros(2, 5, 8, 8))
    assert same_state(before, state_of(convnet))
    assert torch.equal(random, torch.get_rng_state())
    assert summary(convnet, torch.zeros(IMAGES)).total.calls == 1


# ---- meta ----


def test_a_model_on_meta_has_the_same_table(convnet):
    on_meta = copy.deepcopy(convnet).to("meta")
    real = summary(convnet, torch.zeros(IMAGES), backward=True)
    assert dict(summary(on_meta, torch.zeros(IMAGES, device="meta"), backward=True)) == dict(real)


def test_a_model_too_large_for_any_machine_on_meta():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(10**6, 10**6), nn.ReLU()), torch.zeros(10**6, 10**6)
    s = summary(model, x, backward=True)
    assert s["0"].parameters == 10**12 + 10**6
    assert s["0"].operations == 2 * 10**18
    assert s.total.saved == 2 * 4 * 10**12


# ---- refusals ----


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: summary(torch.zeros(2)), TypeError, "expected a module, found Tensor"),
        (lambda: summary(nn.Linear(2, 2), (1, 2)), TypeError, r"write summary\(model, torch.zeros\(1, 2\)\)"),
        (lambda: summary(nn.Linear(2, 2), torch.zeros(2), depth=-1), ValueError, "expected 0 or more"),
        (lambda: summary(nn.Linear(2, 2), torch.zeros(2), depth="2"), TypeError, "expected a whole number"),
        (lambda: summary(nn.LazyLinear(2), torch.zeros(2)), ValueError, "run the model once"),
        (lambda: summary(nn.Linear(2, 2).to("meta"), torch.zeros(2)), ValueError, "give inputs on meta"),
        (
            lambda: summary(nn.Linear(2, 2).requires_grad_(False), torch.zeros(2), backward=True),
            RuntimeError,
            "needs a gradient",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_summed_up_is_refused_with_the_way_out(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_sharded_model_is_refused():
    model = type("FSDPModule", (nn.Linear,), {})(2, 2)
    with pytest.raises(TypeError, match="before sharding"):
        summary(model, torch.zeros(2))


def test_backward_where_gradients_are_off_is_refused(convnet):
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are off"):
        summary(convnet, torch.zeros(IMAGES), backward=True)


# ---- limits ----


class Checkpointed(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
        self.inside = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(checkpoint(self.inside, x, use_reentrant=self.reentrant))


@knows_nodes
def test_what_a_checkpoint_recomputes_counts_in_the_total_alone():
    model, x = Checkpointed(), torch.ones(5, 4)
    before = state_of(model)
    s = summary(model, x, backward=True)
    assert same_state(before, state_of(model))
    inside, last = s["inside"], s["last"]
    assert (inside.calls, inside.operations) == (1, 2 * 5 * (4 * 8 + 8 * 3))
    # x needs no gradient.
    assert inside.backward == 2 * 5 * (4 * 8 + 2 * 8 * 3)
    recomputed = s.total.backward - inside.backward - last.backward
    assert 0 < recomputed <= inside.operations
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert s.total.operations + s.total.backward == counter.get_total_flops()
    # The input of the checkpoint, and what the last layer saves.
    assert s.total.saved == 4 * (x.numel() + 5 * 3)


def test_a_reentrant_checkpoint_has_no_backward_here():
    model, x = Checkpointed(reentrant=True), torch.ones(5, 4, requires_grad=True)
    with no_leftovers(model), pytest.raises(RuntimeError, match="use_reentrant"):
        summary(model, x, backward=True)
    assert summary(model, x)["last"].operations == 2 * 5 * 3 * 2


def test_hooks_of_ones_own_fire():
    model = nn.Linear(3, 2)
    with features(model, "") as f:
        summary(model, torch.zeros(1, 3))
    assert f[""].shape == (1, 2)


def test_attributes_that_a_forward_sets_come_back_and_lists_that_it_fills_do_not():
    class Counts(nn.Linear):
        steps, last = 0, None

        def forward(self, x):
            self.steps += 1
            self.last = x
            seen.append(1)
            return super().forward(x)

    model, seen = Counts(3, 2), []
    assert summary(model, torch.zeros(1, 3)).total.calls == 1
    assert (model.steps, model.last, seen) == (0, None, [1])


def test_an_argument_of_forward_called_depth_is_given_by_position():
    class Deep(nn.Module):
        def forward(self, x, depth):
            return x * depth

    assert summary(Deep(), torch.ones(2), 3).total.calls == 1
    with pytest.raises(TypeError, match="depth"):
        summary(Deep(), torch.ones(2), depth=3)


def test_on_meta_pytorch_takes_an_lstm_apart():
    on_meta = summary(nn.LSTM(3, 4).to("meta"), torch.zeros(5, 2, 3, device="meta"))
    assert on_meta.total.operations == 2 * 5 * 2 * 16 * (3 + 4)


def test_the_fast_path_of_an_attention_layer_is_one_operation_without_a_formula():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.zeros(1, 3, 8)
    with torch.no_grad():
        fast = summary(model, x)
    assert fast["self_attn"].operations is None
    assert fast["self_attn"].uncounted == ("_native_multi_head_attention",)
    assert fast.total.operations == 2 * (2 * 3 * 8 * 16)
    assert summary(model, x)["self_attn"].operations > 2 * 3 * 8 * 24


def test_a_compiled_model_is_run_without_its_compiled_code():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    s = summary(torch.compile(model, backend="eager"), torch.zeros(1, 3))
    assert list(s) == ["0", "1"]
    assert s["0"].operations == 2 * 3 * 2


# ---- real models ----

TEN = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mobilenet_v3_small", "regnet_y_400mf",
    "resnet50", "swin_t", "vit_b_32",
)  # fmt: skip


@pytest.mark.long  # ten models
@pytest.mark.parametrize("name", TEN)
def test_ten_models_of_torchvision(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = getattr(models, name)(**({"init_weights": False} if name == "googlenet" else {}))
    x = torch.randn(2, 3, 224, 224)
    before, random = state_of(model), torch.get_rng_state()
    s = summary(model, x)
    assert same_state(before, state_of(model))
    assert torch.equal(random, torch.get_rng_state())
    for layer, module in model.named_modules():
        if layer in s:
            assert s[layer].parameters == sum(p.numel() for p in module.parameters()), layer
    assert s.total.parameters == sum(p.numel() for p in model.parameters())
    torch.set_rng_state(random)
    with FlopCounterMode(display=False) as counter, saved_tensors(model) as saved:
        loss = model(x)
    assert s.total.operations == counter.get_total_flops() > 0
    assert s.total.saved == saved.unique_bytes - saved.parameter_bytes > 0
    del loss
    on_meta = summary(model.to("meta"), x.to("meta"))
    assert on_meta.total.operations == s.total.operations
    assert {layer: row.output for layer, row in on_meta.items()} == {layer: row.output for layer, row in s.items()}
