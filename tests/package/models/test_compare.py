"""compare: where two models first differ, and which layer is to blame."""

import copy
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hooklab import compare, hooks_on, no_leftovers


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def x():
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Attention in four layers, and two more."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.q, self.k, self.v, self.o = nn.LayerNorm(width), *(nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        return x + self.down(self.up(x).relu())


class Port(nn.Module):
    """The same with one layer for three, under other names."""

    def __init__(self, block, scale=None):
        super().__init__()
        self.scale, self.ln, self.qkv, self.proj = (
            scale,
            copy.deepcopy(block.norm),
            nn.Linear(8, 24),
            copy.deepcopy(block.o),
        )
        self.fc1, self.fc2 = copy.deepcopy(block.up), copy.deepcopy(block.down)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([block.q.weight, block.k.weight, block.v.weight]))
            self.qkv.bias.copy_(torch.cat([block.q.bias, block.k.bias, block.v.bias]))

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, scale=self.scale))
        return x + self.fc2(self.fc1(x).relu())


def blocks(**wrong):
    """Two blocks and their ports, the second of which may be wrong."""
    torch.manual_seed(0)
    a = nn.Sequential(Block(), Block())
    return a, nn.Sequential(Port(a[0]), Port(a[1], **wrong)), torch.randn(2, 3, 8)


def test_one_changed_weight_is_found_and_the_layers_behind_it_are_not_blamed(model, x):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[2].weight[0, 0] += 1
    rows = compare(model, changed, x)
    assert [row.a for row in rows] == [row.b for row in rows] == ["0", "1", "2", "3", "4", ""]
    assert rows.first is rows.to_blame is rows[2]
    assert [row.on_equal_input for row in rows] == [0, 0, rows[2].difference, 0, 0, None]
    assert all(row.difference > 1e-3 for row in rows[2:])
    assert rows.unpaired.a == rows.unpaired.b == []


def test_a_difference_is_the_largest_one_over_the_largest_entry(model, x):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].bias[1] += 0.5
        one, other, given = model[0](x), changed[0](x), model[:4](x)
        expected = ((one - other).abs().max() / one.abs().max()).item()
        behind = ((model(x) - changed(x)).abs().max() / model[4](given).abs().max()).item()
    rows = compare(model, changed, x)
    assert rows[0].difference == rows[0].on_equal_input == pytest.approx(expected, rel=1e-5)
    assert rows[4].difference == rows[5].difference == pytest.approx(behind, rel=1e-5)


def test_two_faults_are_both_told_by_the_second_column(model, x):
    changed = copy.deepcopy(model)
    changed[1], changed[3] = nn.Hardtanh(), nn.Softsign()
    rows = compare(model, changed, x)
    assert [row.a for row in rows if (row.on_equal_input or 0) > rows.tol] == ["1", "3"]
    assert rows.to_blame.type == "Tanh / Hardtanh"


def test_equal_models_have_no_first_and_nobody_to_blame(model, x):
    rows = compare(model, copy.deepcopy(model), x)
    assert len(rows) == 6
    assert rows.first is rows.to_blame is None
    assert "no outputs differ" in repr(rows)


def test_a_swapped_order_is_seen_where_the_kinds_part(x):
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    rows = compare(nn.Sequential(one, nn.Tanh(), other), nn.Sequential(one, other, nn.Tanh()), x)
    assert (rows.first.a, rows.first.type, rows.to_blame.a) == ("1", "Tanh / Linear", "1")


def test_a_swapped_order_of_named_layers_blames_none_of_them(x):
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(4), nn.Linear(4, 4)
    a = nn.Sequential(OrderedDict(norm=norm, linear=linear))
    b = nn.Sequential(OrderedDict(linear=linear, norm=norm))
    rows = compare(a, b, x, pairs={"norm": "norm", "linear": "linear"})
    assert [row.on_equal_input for row in rows] == [0, 0, None]
    assert (rows.first.a, rows.to_blame) == ("norm", None)
    assert "the fault lies between them" in rows.table()


def test_float16_beside_float32_differs_by_rounding_alone(model, x):
    half = copy.deepcopy(model).half()
    for a, b, given in ((model, half, x), (half, model, x.half())):
        rows = compare(a, b, given, tol=1e-2)
        with torch.no_grad():
            one, other = a[0](given).double(), b[0](given.to(b[0].weight.dtype)).double()
        assert rows[0].difference == rows[0].on_equal_input
        assert rows[0].difference == pytest.approx(((one - other).abs().max() / one.abs().max()).item())
        assert 0 < max(row.difference for row in rows) < 1e-2
        assert all(0 < row.on_equal_input < 1e-2 for row in rows[:-1])
        assert rows.first is rows.to_blame is None


def test_batch_norm_and_dropout_in_training_mode_are_compared_in_evaluation_mode_and_left_as_they_were():
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    a[3].eval()
    b, x = copy.deepcopy(a), torch.randn(6, 4)
    with torch.no_grad():
        b[1].running_var.mul_(2)
    before = [{key: value.clone() for key, value in model.state_dict().items()} for model in (a, b)]
    versions, random = a[1].running_mean._version, torch.get_rng_state()
    rows = compare(a, b, x)
    assert (rows.first.a, rows.to_blame.a) == ("1", "1")
    assert rows[1].on_equal_input > 0.1
    for model, state in zip((a, b), before, strict=True):
        assert [module.training for module in model.modules()] == [True, True, True, True, False]
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert not hooks_on(model)
    assert a[1].running_mean._version == versions
    assert torch.equal(torch.get_rng_state(), random)


class Counting(nn.Module):
    """Has a buffer that each forward changes, even in evaluation mode, and one that it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.last = self.last + 1
        return x * self.calls + self.last


def test_buffers_that_a_forward_changes_are_put_back_and_blame_nobody(x):
    a = nn.Sequential(nn.Linear(4, 4), Counting())
    b = copy.deepcopy(a)
    last = b[1].last
    rows = compare(a, b, x)
    assert [row.on_equal_input for row in rows] == [0, 0, None]
    assert rows.first is None
    assert b[1].last is last
    assert [float(value) for value in (*a[1].buffers(), *b[1].buffers())] == [0, 0, 0, 0]


class Noisy(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5)


def test_a_layer_that_draws_random_numbers_in_evaluation_mode_draws_the_same_ones(x):
    a = nn.Sequential(nn.Linear(4, 50), Noisy(), nn.Linear(50, 50), Noisy())
    rows = compare(a, copy.deepcopy(a), x)
    assert [(row.difference, row.on_equal_input) for row in rows] == [(0, 0)] * 4 + [(0, None)]


def test_two_architectures_with_other_names_are_paired_by_order_and_shape():
    a, b, x = blocks()
    rows = compare(a, b, x)
    assert [(row.a, row.b) for row in rows] == [
        *((f"{i}.{one}", f"{i}.{other}") for i in range(2) for one, other in
          (("norm", "ln"), ("o", "proj"), ("up", "fc1"), ("down", "fc2"))),
        ("", ""),
    ]  # fmt: skip
    assert rows.unpaired.a == ["0.q", "0.k", "0.v", "1.q", "1.k", "1.v"]
    assert rows.unpaired.b == ["0.qkv", "1.qkv"]
    assert rows.first is rows.to_blame is None


def test_a_fault_between_the_layers_blames_none_of_them_but_the_block_around():
    a, b, x = blocks(scale=1.0)
    rows = compare(a, b, x)
    assert (rows.first.a, rows.to_blame) == ("1.o", None)
    rows = compare(a, b, x, pairs={"1.up": "1.fc1", "0": "0", "1": "1", "1.o": "1.proj"})
    assert [row.a for row in rows] == ["0", "1.o", "1.up", "1", ""]
    assert (rows.first.a, rows.to_blame.a) == ("1.o", "1")


def test_a_fault_behind_the_last_layer_is_seen_in_the_row_of_the_whole_model(x):
    class Doubled(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = nn.Linear(4, 4)
    rows = compare(nn.Sequential(layer), Doubled(layer), x)
    assert (rows.first.a, rows.first.difference, rows.to_blame) == ("", 1, None)


def test_each_call_of_a_shared_layer_has_a_row():
    act = nn.Tanh()
    a = nn.Sequential(nn.Linear(4, 5), act, nn.Linear(5, 3), act)
    b = nn.Sequential(a[0], nn.Tanh(), a[2], nn.ReLU())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    assert [(row.a, row.b) for row in compare(a, b, x)][:4] == [("0", "0"), ("1", "1"), ("2", "2"), ("1 #2", "3")]
    rows = compare(b, a, x, pairs={"1": "1", "3": "3"})
    assert [(row.a, row.b) for row in rows] == [("1", "1"), ("3", "1 #2"), ("", "")]
    assert rows.to_blame.a == "3"
    rows = compare(a, b, x, pairs={"1": "1"})
    assert [row.a for row in rows] == ["1", ""]
    assert (rows.unpaired.a, rows.unpaired.b) == (["1 #2"], [])


def test_layers_that_work_in_place_are_no_difference(x):
    torch.manual_seed(0)
    a = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    b, before = nn.Sequential(nn.ReLU(), a[1], nn.ReLU()), x.clone()
    assert (before < 0).any()
    rows = compare(a, b, x)
    assert [(row.difference, row.on_equal_input) for row in rows] == [(0, 0)] * 3 + [(0, None)]
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, -4.0], [1.0, -2.0], 0.5),
        ([math.nan, 2.0], [math.nan, 1.0], 0.5),
        ([math.inf, 2.0], [math.inf, 1.0], 0.5),
        ([math.nan, 2.0], [0.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([0.0, 0.0], [0.0, 1.0], math.inf),
        ([0.0, 0.0], [0.0, -0.0], 0),
        ([3 + 4j, 0], [3 + 4j, 1j], 0.2),
        ([True, False], [True, True], 1),
    ],
)
def test_what_a_difference_is_of_numbers_of_every_kind(one, other, expected):
    class Returns(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = torch.tensor(value)

        def forward(self, x):
            return self.value

    rows = compare(Returns(one), Returns(other), torch.ones(2))
    assert [row.difference for row in rows] == [row.on_equal_input for row in rows] == [expected]
    assert (rows.first is None) == (expected == 0)


def test_what_differs_only_in_training_or_in_backward_is_not_seen(x):
    class Cut(nn.Linear):
        def forward(self, x):
            return super().forward(x.detach())

    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))
    b = nn.Sequential(a[0], nn.BatchNorm1d(4, momentum=0.9), nn.Dropout(0.9), Cut(4, 2))
    b[3].load_state_dict(a[3].state_dict())
    rows = compare(a, b, x)
    assert [(row.difference, row.on_equal_input) for row in rows] == [(0, 0)] * 4 + [(0, None)]


def test_attributes_that_a_forward_changes_are_not_put_back(x):
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    a, b = nn.Sequential(Counts(4, 4)), nn.Sequential(nn.Sequential(Counts(4, 4)))
    compare(a, b, x)
    assert (a[0].calls, b[0][0].calls) == (1, 2)


class Named(nn.Module):
    def __init__(self, *order):
        super().__init__()
        self.order, self.inner = order, Weighs()

    def forward(self, x, y):
        return self.inner(**{name: {"x": x, "y": y}[name] for name in self.order})


class Weighs(nn.Module):
    def forward(self, x, y, factor=2.0):
        return x - factor * y


def test_inputs_go_by_their_names():
    x, y = torch.ones(3), torch.arange(3.0)
    rows = compare(Named("x", "y"), Named("y", "x"), x, y=y)
    assert [(row.a, row.difference, row.on_equal_input) for row in rows] == [("inner", 0, 0), ("", 0, None)]


def test_one_input_is_given_though_one_model_calls_it_by_name(x):
    class ByName(nn.Sequential):
        def forward(self, x):
            return self[1](input=self[0](input=x))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    changed = ByName(model[0], nn.Linear(4, 4))
    rows = compare(model, changed, x)
    assert rows.to_blame.a == "1"
    assert rows[0].on_equal_input == 0


def test_what_cannot_be_given_the_same_input_is_not_measured():
    class ByPlace(Named):
        def forward(self, x, y):
            return self.inner(x, y)

    class Factor:
        def __mul__(self, y):
            return 2 * y

    class WithObject(Named):
        def forward(self, x, y):
            return self.inner(x, y, Factor())

    inputs = torch.ones(3), torch.arange(3.0)
    for a, b in ((Named("x", "y"), ByPlace()), (WithObject(), WithObject())):
        rows = compare(a, b, *inputs)
        assert [(row.a, row.difference, row.on_equal_input) for row in rows] == [("inner", 0, None), ("", 0, None)]
        assert rows.table().splitlines()[1].split()[-1] == "-"


def test_recurrent_and_attention_layers_are_one_row_and_all_their_outputs_count():
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4)
    assert [row.a for row in compare(lstm, copy.deepcopy(lstm), torch.randn(5, 2, 3))] == [""]
    attention = nn.MultiheadAttention(4, 2)
    changed, q = copy.deepcopy(attention), torch.randn(5, 2, 4)
    with torch.no_grad():
        changed.out_proj.weight.add_(1)
    rows = compare(attention, changed, q, q, q)
    assert (rows.to_blame.a, rows.to_blame.type, len(rows)) == ("", "MultiheadAttention", 1)


def test_a_padded_batch_of_an_encoder_is_compared_layer_by_layer():
    torch.manual_seed(0)
    a = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    b, mask = copy.deepcopy(a), torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad():
        b.layers[1].linear1.bias.add_(1)
    rows = compare(a, b, torch.randn(2, 3, 8), src_key_padding_mask=mask)
    assert rows.to_blame.a == "layers.1.linear1"
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_parametrized_weight_beside_a_plain_one(x):
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    plain = nn.Linear(4, 4)
    plain.load_state_dict({"weight": normed.weight, "bias": normed.bias})
    rows = compare(nn.Sequential(normed, nn.ReLU()), nn.Sequential(plain, nn.ReLU()), x)
    assert [(row.a, row.b) for row in rows] == [("0", "0"), ("1", "1"), ("", "")]
    assert rows.first is None


def test_the_table_says_what_the_rows_mean(model, x):
    changed = nn.Sequential(*model[:3], nn.ReLU(), model[4], nn.Flatten(0))
    rows = compare(model, changed, x)
    lines = rows.table().splitlines()
    assert lines[0].split() == ["a", "b", "type", "difference", "on", "equal", "input"]
    assert lines[1].split() == ["0", "0", "Linear", "0", "0"]
    assert lines[4].split()[:5] == ["3", "3", "Tanh", "/", "ReLU"]
    assert lines[6:] == [
        "first outputs that differ by more than 1e-05: 3",
        "to blame, differs on equal input: 3",
        "not paired, of a: (the whole model)",
        "not paired, of b: 5, (the whole model)",
    ]
    page = rows._repr_html_()
    assert page.count("<tr>") == 1 + len(rows)
    assert "<p>to blame, differs on equal input: 3</p>" in page
    frame = rows.to_dataframe()
    assert list(frame["difference"]) == [row.difference for row in rows]


REFUSED = {
    "a name that is not there": ({"pairs": {"0": "linear"}}, KeyError, "in b: no layer matches 'linear'; close: 0, 1"),
    "a pattern": ({"pairs": {"*": "0"}}, ValueError, "pairs takes whole names, found the pattern '[*]'"),
    "other shapes": ({"pairs": {"0": "4"}}, ValueError, r"'0' of a returns \(\(2, 5\),\), '4' of b \(\(2, 3\),\)"),
    "no pairs": ({"pairs": {}}, ValueError, "nothing to pair"),
    "pairs as a list": ({"pairs": [("0", "0")]}, TypeError, "expected pairs as a dict"),
    "a module for a name": ({"pairs": {"0": nn.Linear(1, 1)}}, TypeError, "expected pairs as a dict"),
    "a tol that is no number": ({"tol": "1"}, TypeError, "expected a number, found str"),
    "a negative tol": ({"tol": -1}, ValueError, "expected 0 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_and_nothing_has_changed(model, x, case):
    options, error, words = REFUSED[case]
    with no_leftovers(model), pytest.raises(error, match=words):
        compare(model, model, x, **options)
    assert model.training


def test_nothing_to_pair_is_refused(x):
    with pytest.raises(
        ValueError, match=r"nothing to pair.* a: '0' \(\(2, 4\),\); b: '0' \(\(2, 3\),\); name the layers"
    ):
        compare(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 3)), x)


def test_a_layer_that_is_not_called_or_returns_no_tensor_is_refused_in_pairs_and_left_out_else(x):
    class Size(nn.Module):
        def forward(self, x):
            return len(x)

    class Skips(nn.Sequential):
        def forward(self, x):
            return self[0](x) * self[1](x)

    skips = Skips(nn.Linear(4, 4), Size(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="the forward of a did not call '2'"):
        compare(skips, skips, x, pairs={"2": "0"})
    with pytest.raises(ValueError, match="'1' of b returns no tensor"):
        compare(skips, skips, x, pairs={"0": "1"})
    assert [row.a for row in compare(skips, skips, x)] == ["0", ""]


def test_one_layer_under_two_names_in_pairs_is_refused(x):
    act = nn.Tanh()
    a, b = nn.Sequential(act, act), nn.Sequential(nn.Tanh(), nn.Tanh())
    with pytest.raises(ValueError, match="'1' of a stands in pairs under another name, too"):
        compare(a, b, x, pairs={"0": "0", "1": "1"})
    assert [row.a for row in compare(a, b, x)] == ["0", "0 #2", ""]


def test_models_that_have_no_values_yet_are_refused(x):
    for wrong, words in ((nn.LazyLinear(3), "is not made yet"), (nn.Linear(4, 3, device="meta"), "without values")):
        with pytest.raises(ValueError, match=words):
            compare(nn.Linear(4, 3), wrong, x)
    with pytest.raises(TypeError, match="expected a module as b, found Tensor; call compare"):
        compare(nn.Linear(4, 3), x)


def test_a_sharded_model_is_refused(x):
    class FSDPModule(nn.Linear):
        """Named as the class of a sharded model."""

    with pytest.raises(ValueError, match="a is sharded"):
        compare(FSDPModule(4, 3), nn.Linear(4, 3), x)


def test_an_error_in_a_forward_says_of_which_model_and_nothing_stays(model, x):
    short = nn.Sequential(nn.Linear(3, 5))
    with (
        no_leftovers(
            model,
        ),
        pytest.raises(RuntimeError) as caught,
    ):
        compare(model, short, x)
    assert caught.value.__notes__ == ["hooklab.compare: raised by the forward of b"]
    assert not hooks_on(short)
    assert model.training
    assert short.training
