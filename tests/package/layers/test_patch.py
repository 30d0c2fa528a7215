"""patch: another value in the place of a layer's output or input, compared with the forward written out by hand."""

import copy
import warnings
from functools import partial

import pytest
import torch
from models import Pair
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooklab import features, hooks_on, no_leftovers, patch


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


@pytest.fixture
def x():
    return torch.linspace(-1, 1, 6).reshape(2, 3)


def by_hand(net, hidden):
    """The rest of the model, behind the first layer."""
    return net[2](hidden.clamp(min=0))


ROWS = torch.tensor([0, 1]), torch.tensor([2, 3])
AT = {
    "all": ...,
    "a sample": 1,
    "a column": (slice(None), -1),
    "a slice": slice(0, 1),
    "rows and columns": ROWS,
    "a list": [1],
    "a mask": torch.tensor([[True, False, True, False], [False, True, False, False]]),
    "with an ellipsis": (..., 2),
}


@pytest.mark.parametrize("at", AT.values(), ids=AT)
def test_what_lies_at_the_index_is_the_value_and_the_rest_is_as_before(net, x, at):
    hidden = net[0](x).detach()
    hidden[at] = 5.0
    with patch(net, "0", 5.0, at=at) as p:
        assert torch.equal(net(x), by_hand(net, hidden))
    assert p.calls == 1


@pytest.mark.parametrize("at", AT.values(), ids=AT)
def test_a_function_gets_what_lies_at_the_index(net, x, at):
    hidden = net[0](x).detach()
    hidden[at] = hidden[at] * -3 + 1
    with patch(net, "0", lambda old: old * -3 + 1, at=at):
        assert torch.equal(net(x), by_hand(net, hidden))


def test_an_activation_of_one_run_is_put_into_another(net, x):
    other = x.flip(0) * 2
    with features(net, "0", keep=lambda tensor: tensor.detach().clone()) as f:
        net(other)
    hidden = net[0](x).detach()
    hidden[:, 1] = net[0](other)[:, 1]
    with patch(net, "0", f["0"][:, 1], at=(slice(None), 1)):
        assert torch.equal(net(x), by_hand(net, hidden))
    with patch(net, "0", f["0"]):
        assert torch.equal(net(x), net(other))


def test_a_value_that_expands_is_expanded(net, x):
    mean = net[0](x).mean(0).detach()
    for value in (mean, mean[None]):
        with patch(net, "0", value):
            assert torch.equal(net(x), by_hand(net, mean.expand(2, 4)))


def test_the_input_of_a_layer_is_replaced_before_it_runs(net, x):
    hidden = net[0](x).relu().detach()
    hidden[:, 0] = 7
    with patch(net, "2", 7, at=(slice(None), 0), of="input"):
        assert torch.equal(net(x), net[2](hidden))


class TwoArguments(nn.Module):
    def forward(self, query, mask=None, scale=1):
        return (query if mask is None else query + mask) * scale


@pytest.mark.parametrize("call", [
    lambda layer, x: layer(x, 1, scale=3),
    lambda layer, x: layer(scale=3, mask=1, query=x),
], ids=["positional", "by keyword"])  # fmt: skip
def test_of_the_input_only_the_first_argument_is_another_one(x, call):
    layer = TwoArguments()
    with patch(layer, "", lambda old: old * 10, of="input") as p:
        assert torch.equal(call(layer, x), (x * 10 + 1) * 3)
    assert p.calls == 1


def test_a_call_that_does_not_give_the_first_argument_is_refused(x):
    class Anything(nn.Module):
        def forward(self, *args, **kwargs):
            return kwargs["x"]

    layer = Anything()
    with pytest.raises(TypeError, match="gives no 'args', which is the input of ''"), patch(layer, "", 0, of="input"):
        layer(x=x)


# ---- gradients ----


def test_gradients_flow_to_the_value_and_to_the_rest_of_the_old_tensor(net, x):
    value = torch.ones(2, requires_grad=True)
    with patch(net, "0", value, at=(slice(None), 1)):
        net(x).sum().backward()
    got = value.grad.clone(), net[0].weight.grad.clone()
    net.zero_grad()
    value.grad = None
    hidden = net[0](x).unbind(1)
    by_hand(net, torch.stack([hidden[0], value, *hidden[2:]], 1)).sum().backward()
    assert torch.equal(got[0], value.grad)
    assert torch.allclose(got[1], net[0].weight.grad)
    assert got[0].any()
    assert not got[1][1].any()


def test_a_gradient_flows_through_a_function(net, x):
    with patch(net, "0", lambda old: old * old + 1, at=0):
        net(x).sum().backward()
    got = net[0].weight.grad.clone()
    net.zero_grad()
    hidden = net[0](x)
    by_hand(net, torch.stack([hidden[0] * hidden[0] + 1, hidden[1]])).sum().backward()
    assert torch.allclose(got, net[0].weight.grad)
    assert got.any()


def test_where_all_of_it_is_new_a_nan_before_it_reaches_no_gradient(x):
    net = nn.Sequential(nn.Linear(3, 3), nn.Threshold(-100, 0), nn.Linear(3, 1))
    value = torch.ones(2, 3, requires_grad=True)
    with patch(net, "0", value):
        net(x * float("nan")).sum().backward()
    assert torch.equal(value.grad, net[2].weight.detach().expand(2, 3))
    assert net[0].weight.grad is None


def test_double_backward_goes_through_it():
    net, x = (
        nn.Sequential(nn.Identity(), nn.Identity()),
        torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True),
    )

    def function(x, value):
        with patch(net, "0", value, at=0):
            return net(x * x).pow(3)

    assert torch.autograd.gradgradcheck(function, (x, torch.tensor(3.0, dtype=torch.float64, requires_grad=True)))


# ---- never in place ----


def test_neither_the_value_nor_what_the_layer_returned_is_edited():
    class Stored(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.zeros(2, 2)

        def forward(self, x):
            return self.own

    def fill(old):
        return old.fill_(9.0)

    net, value = nn.Sequential(Stored(), nn.Hardtanh(-0.5, 0.5, inplace=True)), torch.full((2, 2), 9.0)
    for given, at in ((value, ...), (value[0], 0), (lambda old: value, ...), (fill, ...), (fill, 0)):
        with patch(net, "0", given, at=at):
            assert (net(value)[0] == 0.5).all()
        assert (value == 9).all()
        assert (net[0].own == 0).all()


def test_the_input_that_the_caller_holds_is_not_edited(net, x):
    before = x.clone()
    with patch(net, "0", lambda old: old.zero_(), at=0, of="input"):
        net(x)
    assert torch.equal(x, before)


# ---- outputs that are no tensor ----


def test_a_function_gets_all_of_a_tuple_and_returns_all_of_it():
    torch.manual_seed(0)
    lstm, x = nn.LSTM(2, 3), torch.ones(4, 1, 2)
    output, (h, c) = lstm(x)
    with patch(lstm, "", lambda old: (old[0] * 2, old[1])):
        got, (h_too, c_too) = lstm(x)
    assert torch.equal(got, output * 2)
    assert torch.equal(h, h_too)
    assert torch.equal(c, c_too)


@pytest.mark.parametrize(("value", "at"), [(0, ...), (lambda old: old, 0)], ids=["a number", "an index"])
def test_a_tuple_is_refused_where_no_function_gets_all_of_it(value, at):
    lstm = nn.LSTM(2, 3)
    says = r"is no tensor but \(\[4, 1, 3\].*lambda old: \(new, \*old\[1:\]\)"
    with pytest.raises(TypeError, match=says), patch(lstm, "", value, at=at):
        lstm(torch.ones(4, 1, 2))


class Two(nn.Module):
    def forward(self, x):
        return Pair(x, x)


@pytest.mark.parametrize("value", [
    lambda old: old.left,
    lambda old: (old.left, old.right),
    lambda old: Pair(old.left, old.right[0]),
    lambda old: Pair(old.left, old.right.double()),
    lambda old: None,
], ids=["a part", "another container", "another shape", "another dtype", "nothing"])  # fmt: skip
def test_what_has_another_form_than_the_whole_output_is_refused(x, value):
    two = Two()
    with (
        pytest.raises(ValueError, match=r"value returned .* for the output of '', expected Pair"),
        patch(two, "", value),
    ):
        two(x)


# ---- what is refused ----


@pytest.mark.parametrize(("wrong", "error", "says"), [
    (("5", 0), KeyError, "patch: no layer matches '5'; close: 0, 1, 2"),
    (("*", 0), ValueError, r"'\*' matches 3 layers, expected one: '0', '1', '2'"),
    ((nn.Linear, 0), ValueError, "matches 2 layers"),
    ((0, 0), TypeError, "expected the name of one layer, such as 'layer4', found int"),
    ((["0"], 0), TypeError, "found list"),
    (("0", "x"), TypeError, r"patch\(value=...\): expected a tensor, a number or a function, found str"),
    (("0", 0, None), TypeError, r"patch\(at=None\): expected an index, as in tensor\[at\]; leave it out for all"),
    (("0", 0, True), TypeError, r"patch\(at=True\)"),
    (("0", 0, ..., "inputs"), ValueError, r"patch\(of='inputs'\): expected 'output' or 'input'"),
])  # fmt: skip
def test_a_wrong_argument_is_refused_before_any_hook_is_installed(net, wrong, error, says):
    with pytest.raises(error, match=says):
        patch(net, *wrong)
    assert hooks_on(net) == []


@pytest.mark.parametrize(("value", "at", "error", "says"), [
    (torch.ones(3), ..., ValueError, r"shape \[3\], what it replaces of the output of '0' has \[2, 4\]"),
    (torch.ones(1, 4), 0, ValueError, r"shape \[1, 4\], what it replaces of the output of '0' has \[4\]"),
    (torch.ones(4).double(), ..., TypeError, r"is torch.float64, .* is torch.float32; give value.to\(torch.float32\)"),
    (1j, ..., TypeError, "value is torch.complex64"),
    (lambda old: None, ..., TypeError, "value returned NoneType for the output of '0'; expected a tensor or a number"),
    (0, 9, IndexError, r"does not fit the output of '0', of shape \[2, 4\]: index 9 is out of bounds"),
    (0, (0, 0, 0), IndexError, "too many indices"),
    (0, (0, "a"), IndexError, "does not fit the output of '0'"),
    (0, slice(7, 9), IndexError, r"chooses nothing of the output of '0', of shape \[2, 4\]"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_the_forward(net, x, value, at, error, says):
    expected = net(x)
    with pytest.raises(error, match=says), patch(net, "0", value, at=at):
        net(x)
    assert torch.equal(net(x), expected)


def test_a_number_must_be_one_that_the_dtype_holds():
    embedding = nn.Sequential(nn.Identity(), nn.Identity())
    tokens = torch.tensor([1, 2])
    with patch(embedding, "0", 7, at=0):
        assert embedding(tokens).tolist() == [7, 2]
    with pytest.raises(TypeError, match=r"value is torch\.float32"), patch(embedding, "0", 0.5):
        embedding(tokens)


# ---- on and off ----


def test_it_is_on_at_once_and_off_after_remove_which_may_be_called_twice(net, x):
    expected = net(x)
    with no_leftovers(net):
        p = patch(net, "0", 0)
        assert torch.equal(net(x), by_hand(net, torch.zeros(2, 4)))
        assert repr(p) == "Patch(the output of '0', calls: 1)"
        p.remove()
        p.remove()
        assert repr(p) == "Patch(the output of '0', calls: 1, removed)"
    assert torch.equal(net(x), expected)


def test_two_patches_of_one_layer_come_in_the_order_in_which_they_were_made(net, x):
    with patch(net, "0", 1), patch(net, "0", lambda old: old + 1, at=0):
        got = net(x)
    assert torch.equal(got, by_hand(net, torch.tensor([[2.0], [1.0]]).expand(2, 4)))


def test_a_shared_layer_is_patched_in_each_of_its_places(x):
    shared = nn.Identity()
    net = nn.Sequential(shared, shared)
    with patch(net, nn.Identity, lambda old: old + 1) as p:
        assert torch.equal(net(x), x + 2)
    assert p.calls == 2


# ---- limits ----


def test_what_was_opened_before_a_patch_sees_what_the_layer_itself_returned(net, x):
    own = net[0](x).detach()
    copied = partial(features, net, "0", keep=lambda tensor: tensor.detach().clone())
    with copied() as before, patch(net, "0", 3), copied() as after:
        net(x)
    assert torch.equal(before["0"], own)
    assert torch.equal(after["0"], torch.full((2, 4), 3.0))


def test_a_layer_that_is_never_called_is_told_at_the_end_of_the_block():
    attention, x = nn.MultiheadAttention(4, 2), torch.ones(3, 1, 4)
    with (
        pytest.warns(
            UserWarning, match=r"nothing has replaced the output of 'out_proj'.*nn\.MultiheadAttention"
        ) as caught,
        patch(attention, "out_proj", 0) as p,
    ):
        attention(x, x, x)
    assert p.calls == 0
    assert caught[0].filename == __file__


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint_a_warning_says_that_backward_belongs_into_the_block(net, x, reentrant):
    x.requires_grad_()
    with patch(net, "0", lambda old: old * 3):
        net(x).sum().backward()
    expected, net[0].weight.grad = net[0].weight.grad, None
    with pytest.warns(UserWarning, match="is under a checkpoint.*call backward"), patch(net, "0", lambda old: old * 3):
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(net[0].weight.grad, expected)
    assert expected.any()


def test_a_deep_copy_of_a_patched_model_has_no_patch(net, x):
    expected = net(x)
    with patch(net, "0", 0), patch(net, "2", 0, of="input"):
        net(x)
        assert torch.equal(copy.deepcopy(net)(x), expected)


def test_a_block_that_raises_takes_it_off_and_warns_of_nothing_else(net, x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="mine"), patch(net, "0", 0):
            raise RuntimeError("mine")
    assert hooks_on(net) == []


def test_under_autocast_a_value_of_another_dtype_is_refused_with_the_right_one(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match=r"give value\.to\(torch\.bfloat16\)"), patch(net, "0", torch.zeros(4)):
            net(x)
        with patch(net, "0", torch.zeros(4, dtype=torch.bfloat16)):
            assert torch.equal(net(x), net[2](torch.zeros(2, 4)))
