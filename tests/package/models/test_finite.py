"""finite: the first inf or NaN, in forward and in backward, with layer, operation and whether it was there before."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from models import Returns, Twice, mlp, same_state, state_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hooklab import NotFinite, finite, hooks_on, no_leftovers
from hooklab._support import torch_private
from hooklab._support.nested import tensors_in

INF, NAN = math.inf, math.nan


class Norm(nn.Module):
    """Unit rows. A row of zeros stays one, and its gradient is inf and then NaN: that of the square root at 0."""

    def forward(self, x):
        length = (x * x).sum(-1, keepdim=True).sqrt()
        return torch.where(length > 0, x / (length + 1e-6), x)


class Between(nn.Module):
    """Divides between its two layers."""

    def __init__(self, by=0.0):
        super().__init__()
        self.first, self.second, self.by = nn.Linear(2, 2), nn.Linear(2, 2), by

    def forward(self, x):
        return self.second(self.first(x) / self.by)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 6, 2)


@pytest.fixture
def with_norm():
    """A model and a batch that is fine in forward, and whose gradient is not at the square root in layer 1."""
    model = nn.Sequential(nn.Identity(), Norm(), nn.Linear(4, 3))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    return model, x


def raised_by(function, *args, **kwargs):
    with pytest.raises(NotFinite) as info:
        function(*args, **kwargs)
    return info.value


def facts(error):
    return error.phase, error.layer, error.operation, error.shape, error.inputs_finite


def backward_of(model, x):
    model(x).sum().backward()


# ---- forward ----


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_bad_weight_is_found_in_the_layer_that_has_it(model, bad):
    with torch.no_grad():
        model[2].weight[3, 1] = bad
    model[0].bias.data.fill_(10)  # so that what is multiplied with the inf is not 0
    with finite(model):
        error = raised_by(model, torch.randn(7, 4))
    assert facts(error) == ("forward", "2", "AddmmBackward0", (7, 6), True)


def test_a_bad_batch_is_told_from_a_bad_layer(model):
    with finite(model):
        error = raised_by(model, torch.full((3, 4), NAN))
    assert facts(error) == ("forward", "0", "", (3, 5), False)
    assert "look at the data" in str(error)


def test_code_between_two_layers_is_told_by_its_operation():
    between = Between()
    with finite(between):
        error = raised_by(between, torch.ones(1, 2))
    assert facts(error) == ("forward", "second", "DivBackward0", (1, 2), False)


def test_code_behind_the_last_layer_belongs_to_the_module_around():
    class Divides(nn.Sequential):
        def forward(self, x):
            return super().forward(x) / 0

    model = nn.Sequential(nn.Linear(2, 2), Divides(nn.Linear(2, 3)))
    with finite(model):
        error = raised_by(model, torch.ones(1, 2))
    assert facts(error) == ("forward", "1", "DivBackward0", (1, 3), True)


def test_the_first_layer_to_run_is_named_and_not_the_first_to_be_registered():
    class Reversed(nn.Sequential):
        def forward(self, x):
            for layer in reversed(self):
                x = layer(x)
            return x

    model = Reversed(*(nn.Linear(2, 2) for _ in range(3)))
    for layer in model:
        layer.bias.data.fill_(INF)
    with finite(model):
        assert raised_by(model, torch.ones(1, 2)).layer == "2"


def test_an_inf_that_a_later_layer_hides_is_found_all_the_same():
    model = nn.Sequential(nn.Linear(2, 2), Returns(torch.log), nn.Tanh())
    model[0].weight.data.zero_()
    model[0].bias.data.zero_()
    x = torch.ones(1, 2)
    assert model(x).isfinite().all()
    with finite(model):
        assert raised_by(model, x).layer == "1"


def test_an_input_that_a_layer_overwrites_in_place_counts_as_it_was_before():
    model = nn.Sequential(nn.Identity(), Returns(lambda x: x.mul_(INF)))
    with finite(model), torch.no_grad():
        error = raised_by(model, torch.ones(2))
    assert error.layer == "1"
    assert error.inputs_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_the_largest_numbers_of_a_dtype_are_finite_and_the_next_are_not(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 0.0], dtype=dtype)
    model = nn.Sequential(Returns(lambda x: x + 0), Returns(lambda x: x + x))
    with finite(model[0]):
        assert torch.equal(model[0](x), x)
    with finite(model):
        error = raised_by(model, x)
    assert error.layer == "1"
    assert error.inputs_finite


@pytest.mark.parametrize(
    "build",
    [
        lambda x: (x, {"a": [x / 0]}),
        lambda x: {"whole": torch.arange(3), "none": None, "bad": x.log()},
        lambda x: nn.utils.rnn.pack_padded_sequence((x / 0)[None], [2], batch_first=True),
        lambda x: (x / 0).to_sparse(),
    ],
)
def test_tensors_inside_containers_and_of_other_layouts_are_looked_at(build):
    model = Returns(build)
    x = torch.zeros(2, 3)
    with finite(model):
        assert raised_by(model, x).layer == ""


def test_what_holds_no_inf_is_let_be():
    model = Returns(lambda x: (torch.arange(3), torch.empty(0), torch.ones(2, dtype=torch.bool), "text"))
    with finite(model):
        assert len(model(torch.ones(1))) == 4


def test_a_mask_of_minus_inf_among_the_inputs_is_no_fault():
    layer = nn.MultiheadAttention(4, 1, batch_first=True)
    mask, x = nn.Transformer.generate_square_subsequent_mask(3), torch.randn(2, 3, 4)
    assert mask.isinf().any()
    with finite(layer):
        layer(x, x, x, attn_mask=mask)[0].sum().backward()


def test_a_part_that_is_called_alone_is_looked_at(model):
    model[2].bias.data.fill_(NAN)
    with finite(model):
        model[0](torch.ones(1, 4))
        assert raised_by(model[2], torch.ones(1, 5)).layer == "2"


def test_the_next_good_batch_runs_again(model):
    with finite(model):
        raised_by(model, torch.full((3, 4), NAN))
        backward_of(model, torch.ones(3, 4))
        raised_by(model, torch.full((3, 4), INF))


def test_a_forward_that_fails_raises_its_own_error_and_the_next_one_is_looked_at(model):
    with finite(model):
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.full((3, 9), NAN))
        model(torch.ones(3, 4))
        assert raised_by(model, torch.full((3, 4), NAN)).layer == "0"


def test_after_ctrl_c_in_a_forward_the_next_one_is_looked_at(model):
    def interrupt(module, args):
        raise KeyboardInterrupt

    with finite(model):
        handle = model[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.full((3, 4), NAN))
        handle.remove()
        model(torch.ones(3, 4))
        assert raised_by(model[0], torch.full((3, 4), NAN)).layer == "0"


def test_a_forward_inside_the_handling_of_an_error_is_looked_at(model):
    with finite(model):
        try:
            raise ValueError
        except ValueError:
            raised_by(model, torch.full((3, 4), NAN))


# ---- backward ----


def test_the_operation_that_makes_the_first_bad_gradient_is_named(with_norm):
    model, x = with_norm
    assert model(x).isfinite().all()
    with finite(model):
        error = raised_by(backward_of, model, x)
    assert facts(error) == ("backward", "1", "SqrtBackward0", (2, 1), True)


def test_a_bad_gradient_that_a_relu_hides_from_all_parameters_is_found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), Norm(), nn.Linear(4, 3))
    x = torch.randn(5, 4)
    x[2] = 0
    backward_of(model, x)
    assert all(param.grad.isfinite().all() for param in model.parameters())
    with finite(model):
        assert raised_by(backward_of, model, x).layer == "2"


def test_a_gradient_that_overflows_for_a_parameter_of_the_first_layer_is_found():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    nn.init.constant_(model[0].weight, 1e-30)
    x = torch.full((2, 1), 1e30)
    with finite(model):
        error = raised_by((model(x) * 1e30).sum().backward)
    assert facts(error)[:2] == ("backward", "0")
    assert error.inputs_finite
    assert error.shape == (1, 1)


def test_a_bad_gradient_of_the_loss_is_told_from_one_of_the_model(model):
    with finite(model):
        loss = (model(torch.ones(3, 4)) * 0).sum().sqrt()
        error = raised_by(loss.backward)
    assert error.layer == "4"
    assert not error.inputs_finite
    assert "look at the loss" in str(error)


def test_code_between_two_layers_belongs_to_the_module_around_in_backward():
    class Root(Between):
        def forward(self, x):
            return self.second((self.first(x) * 0).sqrt())

    model = Root()
    with finite(model):
        error = raised_by(backward_of, model, torch.ones(1, 2))
    assert facts(error) == ("backward", "", "SqrtBackward0", (1, 2), True)


def test_the_graph_in_front_of_the_model_is_left_alone():
    x = torch.zeros(2, 4, requires_grad=True)
    model = nn.Linear(4, 1)
    with finite(model):
        backward_of(model, x.sqrt())
    assert not x.grad.isfinite().any(), "its gradient is bad, and outside of the model"


def test_backward_has_run_to_its_end_when_the_error_comes(with_norm):
    model, x = with_norm
    with finite(model):
        raised_by(backward_of, model, x)
    assert all(param.grad is not None for param in model.parameters())
    assert x.grad.isnan().any()


def test_autograd_grad_and_a_second_backward_are_looked_at(with_norm):
    model, x = with_norm
    with finite(model):
        loss = model(x).sum()
        raised_by(torch.autograd.grad, loss, x, retain_graph=True)
        raised_by(loss.backward, retain_graph=True)
        raised_by(loss.backward)


def test_after_a_backward_that_failed_the_next_one_is_looked_at(with_norm):
    model, x = with_norm

    def fail(grad):
        raise ValueError("of somebody else")

    with finite(model):
        loss = model(x).sum()
        handle = x.register_hook(fail)
        with pytest.raises(ValueError, match="somebody else"):
            loss.backward(retain_graph=True)
        handle.remove()
        raised_by(loss.backward)


def test_a_backward_inside_a_backward_hides_nothing_of_the_outer_one():
    inner, model = nn.Linear(1, 1), nn.Sequential(nn.Linear(2, 2), nn.Identity(), Norm())
    ran = []

    def run_another(grad):
        with torch.enable_grad():
            inner_loss.backward()
        ran.append(True)

    both = nn.ModuleList([inner, model])
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    with finite(both):
        inner_loss = inner(torch.ones(1, 1)).sum()
        hidden = model[0](torch.ones(1, 2))
        hidden.register_hook(run_another)  # it runs after the square root
        error = raised_by(model[2](model[1](hidden)).sum().backward)
    assert ran == [True]
    assert facts(error)[1:3] == ("1.2", "SqrtBackward0")


def test_a_layer_called_twice_and_in_place_layers_are_followed():
    model = nn.Sequential(Twice(), nn.Flatten(), nn.ReLU(inplace=True), Norm())
    model[0].last.bias.data.fill_(9)  # no row of zeros
    with finite(model):
        backward_of(model, torch.ones(2, 3))
        model[0].last.bias.data.fill_(-INF)
        assert raised_by(model, torch.ones(2, 3)).layer == "0.last"


class Checkpointed(nn.Module):
    def __init__(self, inside, reentrant):
        super().__init__()
        self.inside, self.reentrant = inside, reentrant

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


def test_a_checkpoint_without_reentry_is_followed(with_norm):
    model, x = with_norm
    outer = Checkpointed(model, reentrant=False)
    with finite(outer):
        assert facts(raised_by(backward_of, outer, x))[1:3] == ("inside.1", "SqrtBackward0")


# ---- nothing is waited for ----


class Reads:
    """Counts how often a value of a tensor is asked for, which on a GPU waits for it."""

    def __init__(self, monkeypatch):
        self.count = 0
        names = "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "__contains__"
        for name in names:
            monkeypatch.setattr(Tensor, name, self._counting(getattr(Tensor, name)))

    def _counting(self, function):
        def counting(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return counting

    def during(self, function):
        """How many reads, and how many by PyTorch itself."""
        before = self.count
        with torch.profiler.profile() as profile:
            result = function()
        own = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal")
        return result, self.count - before, sum(event.name in own for event in profile.events())


def test_flags_are_read_once_after_forward_and_once_after_backward(model, monkeypatch):
    x, reads = torch.randn(3, 4), Reads(monkeypatch)
    assert reads.during(lambda: bool(x.sum() > 0) or x.sum().item())[1:] != (0, 0), "a read is counted"
    with finite(model):
        for _ in range(2):
            loss, *counted = reads.during(lambda: model(x).sum())
            assert counted == [1, 0]
            _, *counted = reads.during(loss.backward)
            assert counted == [1, 0]


# ---- hooks ----


def test_no_tensor_and_no_graph_is_kept():
    gc.disable()
    try:
        freed = []
        model = nn.Sequential(nn.Linear(4, 4), Returns(lambda x: x * 2), nn.ReLU())
        model[1].register_forward_hook(lambda module, args, out: freed.append(weakref.ref(out)))
        with finite(model):
            backward_of(model, torch.ones(2, 4))
            assert len(freed) == 1
            assert freed[0]() is None
            model(torch.ones(2, 4))
            assert freed[1]() is None, "also where no backward comes"
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["transformer", "lstm", "embedding"])
def test_models_of_other_kinds_are_found_good_and_found_bad(name):
    torch.manual_seed(0)
    if name == "transformer":  # in eval mode its padding makes nested tensors
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        mask = torch.tensor([[False, False, True], [False, True, True]])
        args = torch.randn(2, 3, 8), None, mask
    elif name == "lstm":
        model, args = nn.LSTM(3, 4, num_layers=2), (torch.randn(5, 2, 3),)
    else:  # its gradient is sparse
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
        args = (torch.tensor([1, 2, 1]),)
    with finite(model):
        sum(t.sum() for t in tensors_in(model(*args))).backward()
        with torch.no_grad():
            model(*args)
        next(model.parameters()).data.fill_(NAN)
        raised_by(model, *args)
        with torch.no_grad():
            raised_by(model, *args)


def test_values_and_gradients_are_the_same_and_nothing_is_left(model):
    x, twin = torch.randn(3, 4), copy.deepcopy(model)
    before = state_of(model)
    with no_leftovers(model), finite(model):
        assert len(hooks_on(model)) == 2 * len(list(model.modules()))
        loss = model(x).sum()
    assert same_state(before, state_of(model))
    loss.backward()
    twin(x).sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_after_the_block_a_graph_of_it_is_looked_at_no_more(with_norm):
    model, x = with_norm
    with finite(model):
        loss = model(x).sum()
    loss.backward()
    assert x.grad.isnan().any()


def test_it_is_on_at_once_and_removing_twice_is_harmless(model):
    checks = finite(model)
    raised_by(model, torch.full((3, 4), NAN))
    checks.remove()
    checks.remove()
    assert not hooks_on(model)
    assert model(torch.full((3, 4), NAN)).isnan().any()
    with pytest.raises(RuntimeError, match="call the function again"), checks:
        pass


def test_a_copy_and_a_pickle_of_the_model_have_no_working_hook(model):
    with finite(model):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin(torch.full((3, 4), NAN)).isnan().any()


def test_two_on_one_model_and_one_on_a_part_of_it(with_norm):
    model, x = with_norm
    part = finite(model[1])
    with finite(model):
        error = raised_by(backward_of, model, x)
    assert error.operation == "SqrtBackward0"
    assert raised_by(backward_of, model, x).layer == "", "the part is a model of its own"
    part.remove()
    backward_of(model, x)


def test_the_error_is_pickled_with_its_facts(with_norm):
    model, x = with_norm
    with finite(model):
        error = raised_by(backward_of, model, x)
    again = pickle.loads(pickle.dumps(error))
    assert facts(again) == facts(error)
    assert str(again) == str(error)


@pytest.mark.parametrize("wrong", [torch.ones(2), nn.Linear, None])
def test_what_is_no_module_is_refused(wrong):
    with pytest.raises(TypeError, match="finite: expected a module"):
        finite(wrong)


def test_without_the_number_of_the_backward_it_works_too(with_norm, monkeypatch):
    import hooklab.models.finite as room

    model, x = with_norm
    monkeypatch.setattr(room, "graph_task", lambda: torch_private.NO_BACKWARD)
    with finite(model):
        for _ in range(2):
            raised_by(backward_of, model, x)


# ---- limits ----


def test_a_layer_that_returns_inf_on_purpose_is_named():
    mask = torch.tensor([0.0, -INF])
    model = nn.Sequential(nn.Linear(2, 2), Returns(lambda x: x + mask), nn.Softmax(-1))
    with finite(model):
        assert raised_by(model, torch.ones(1, 2)).layer == "1"
    with finite(model[0]):
        assert model(torch.ones(1, 2)).isfinite().all()


def test_in_forward_the_operation_is_the_last_of_the_layer():
    model = Returns(lambda x: (x / 0).exp() + 1)
    with finite(model):
        assert raised_by(model, torch.ones(1, requires_grad=True)).operation == "AddBackward0"


def test_without_a_graph_the_operation_is_the_class_of_the_layer(model):
    model[2].bias.data.fill_(NAN)
    with finite(model), torch.no_grad():
        assert facts(raised_by(model, torch.ones(3, 4))) == ("forward", "2", "Linear", (3, 6), True)


def test_an_overflow_that_a_grad_scaler_would_skip_raises():
    model = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    with finite(model):
        error = raised_by(scaler.scale(model(torch.full((1, 2), 1e10)).sum()).backward)
    assert error.phase == "backward"
    scaler.step(optimizer)
    assert torch.equal(before, model.weight), "the scaler knows it all the same"


def test_buffers_have_taken_in_the_bad_batch_when_the_error_comes():
    model = nn.Sequential(nn.BatchNorm1d(2))
    with finite(model):
        raised_by(model, torch.tensor([[INF, 0.0], [0.0, 1.0]]))
    assert not model[0].running_mean.isfinite().all()


def test_transforms_of_torch_func_and_tensors_without_values_are_not_looked_at(model):
    with finite(model):
        assert torch.vmap(model)(torch.full((3, 4), NAN)).isnan().all()
        assert copy.deepcopy(model).to("meta")(torch.ones(3, 4, device="meta")).is_meta


def test_several_backwards_at_once_are_refused_by_pytorch(model):
    with finite(model):
        out = model(torch.ones(3, 4))
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            torch.autograd.grad(out, model[0].weight, torch.ones(6, 3, 2), is_grads_batched=True)


def test_tensors_in_objects_that_are_no_container_are_not_looked_at():
    class Box:
        def __init__(self, x):
            self.x = x

    model = Returns(lambda x: Box(x / 0))
    with finite(model):
        assert model(torch.ones(1)).x.isinf().all()


def test_under_a_checkpoint_with_reentry_the_whole_block_is_the_operation(with_norm):
    model, x = with_norm
    outer = Checkpointed(model, reentrant=True)
    with finite(outer):
        assert facts(raised_by(backward_of, outer, x))[:3] == ("backward", "", "CheckpointFunctionBackward")


def test_what_raises_in_backward_itself_comes_first(with_norm):
    model, x = with_norm
    with (
        finite(model),
        pytest.warns(UserWarning, match="Anomaly Detection|Error detected"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan values") as info,
    ):
        backward_of(model, x)
    assert not isinstance(info.value, NotFinite)


def test_a_sum_in_grad_that_overflows_is_not_seen():
    model = nn.Linear(1, 1, bias=False)
    x = torch.full((1, 1), 3e38)
    with finite(model):
        for _ in range(2):
            (model(x * 0) + model.weight * x).sum().backward()
    assert model.weight.grad.isinf().all()


def test_a_compiled_model_is_announced(model):
    with pytest.warns(UserWarning, match="finite: this model is compiled"):
        finite(torch.compile(model)).remove()


def test_a_model_that_is_compiled_afterwards_is_looked_at(with_norm):
    model, x = with_norm
    torch.compiler.reset()
    with finite(model):
        compiled = torch.compile(model, backend="eager")
        assert raised_by(compiled, torch.full((2, 4), NAN)).layer == "0"
        assert raised_by(backward_of, compiled, x).layer == "1"
    torch.compiler.reset()
