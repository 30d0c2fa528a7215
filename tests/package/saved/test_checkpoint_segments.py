"""`checkpoint_segments`: less is saved, and gradients and buffers are those of plain training."""

import contextlib
import copy
import gc
import io
import multiprocessing
import pickle
import warnings
import weakref

import pytest
import torch
from counting_store import CountingStore
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hooklab import Offload, checkpoint_segments, features, no_leftovers, saved_tensors


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def block(width=6):
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))


class Net(nn.Module):
    def __init__(self, extra=()):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.body = nn.Sequential(*(block() for _ in range(5)), *extra)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def net(extra=lambda: ()):
    torch.manual_seed(0)
    return Net(extra())


def train(model, steps=2, context=None, retain=False):
    """Gradients, parameters and buffers after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        if context is None:
            loss = model(x).square().sum()
        else:
            with context:
                loss = model(x).square().sum()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters()] + list(model.state_dict().values())


def equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("size", [1, 2, 100])
def test_gradients_parameters_and_buffers_equal_plain_training(size, retain):
    model = net()
    with checkpoint_segments(model, {"body": size, "head": 1}):
        found = train(model, retain=retain)
    assert equal(train(net(), retain=retain), found)
    assert model.body[0][1].num_batches_tracked == 2


def test_only_the_inputs_of_the_segments_are_saved():
    model, x = net(), torch.randn(8, 4)
    with checkpoint_segments(model, {"body": 2}), saved_tensors(model) as saved:
        y = model.body(model.stem(x))
    inputs = [one for one in saved if one.shape == (8, 6)]
    assert len(inputs) == 3  # of blocks 0, 2 and 4
    assert saved.total_bytes == x.nbytes + 3 * 8 * 6 * 4
    y.sum().backward()


class Counter(nn.Module):
    """Its output depends on a buffer that it changes: a repetition must start from the old value."""

    def __init__(self, how):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.how = how

    def forward(self, x):
        if self.how == "replaced":
            self.calls = self.calls + 1
        elif self.how == "in place":
            self.calls += 1
        else:
            self.calls.data.add_(1)
        return x * self.calls.clone()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("how", ["replaced", "in place", "through .data"])
def test_buffers_that_the_output_depends_on_have_their_old_value_again(how, retain):
    expected, model = net(lambda: (Counter(how), nn.Tanh())), net(lambda: (Counter(how), nn.Tanh()))
    with checkpoint_segments(model, {"body": 7}):
        found = train(model, retain=retain)
    assert equal(train(expected, retain=retain), found)
    assert model.body[5].calls == 2


@pytest.mark.parametrize(
    "extra",
    [
        lambda: (nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3)),
        lambda: (nn.RReLU(),),  # whose noise is drawn after the last save
        lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),),  # one more iteration a forward
    ],
)
def test_random_numbers_are_drawn_alike_and_spectral_norm_iterates_once(extra):
    expected, model = train(net(extra)), net(extra)
    with checkpoint_segments(model, {"body": 3}):
        assert equal(expected, train(model))


def test_two_forwards_before_the_backwards():
    def run(model):
        first, second = torch.ones(8, 4).cumsum(0), torch.ones(8, 4).cumsum(1)
        losses = model(first).sum(), model(second).exp().sum()
        losses[1].backward(), losses[0].backward()
        return [parameter.grad for parameter in model.parameters()] + list(model.state_dict().values())

    model = net()
    with checkpoint_segments(model, {"body": 2}):
        found = run(model)
    assert equal(run(net()), found)


def test_without_grad_nothing_is_checkpointed():
    class Adds(nn.Module):
        def forward(self, x):
            return x.add_(1)

    model, x = nn.Sequential(Adds(), nn.Linear(2, 2)), torch.zeros(3, 2)
    with checkpoint_segments(model, {"": 2}):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model(x)  # with grad it is refused: it edits its input
    assert (x == 2).all()


def test_composed_with_offload_the_inputs_move_and_gradients_are_equal():
    model, store = net(), CountingStore()
    offload = Offload(model, to=store, min_bytes=0)
    with checkpoint_segments(model, {"body": 2, "head": 3}):
        found = train(model, context=offload)
    assert equal(train(net()), found)
    # each step: the input, three inputs of segments of the body, the input of the head, what is squared
    assert offload.moved_bytes == 2 * (8 * 4 + 3 * 8 * 6 + 8 * 6 + 8) * 4
    assert store.held == 0


def test_hooks_on_the_blocks_still_fire_and_features_count_once():
    model, x = net(), torch.randn(8, 4)
    with checkpoint_segments(model, {"body": 2}), features(model, "body.*") as f:
        model(x).sum().backward()
        assert [len(f.calls[f"body.{index}"]) for index in range(5)] == [1] * 5


# ---- life ----


def test_after_remove_the_model_is_as_before():
    model = net()
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    with no_leftovers(model):
        handle = checkpoint_segments(model, {"body": 2, "head": 1})
        assert type(model.body) is nn.Sequential
        assert list(model.state_dict()) == list(net().state_dict())
        handle.remove()
        handle.remove()
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), by_torch_save])
def test_a_copy_made_meanwhile_runs_plainly_by_itself(copied):
    model, x = net(), torch.randn(8, 4)
    with checkpoint_segments(model, {"body": 2}) as handle:
        again = copied(copied(model))
        with saved_tensors(again) as saved:
            again(x)
        assert len(saved) > 20
        assert "hooklab" not in str(pickle.dumps(model))
        copy.deepcopy(handle).remove()  # it has nothing to switch back
        with saved_tensors(model) as saved:
            model(x)
        assert len(saved) < 15  # PyTorch 2.11 saves one more than 2.15
    again.load_state_dict(net().state_dict())
    assert equal(train(net()), train(again))
    with checkpoint_segments(again, {"body": 2}):
        again(x)


def without_grad(model, x):
    return model(x).detach()


def test_another_process_is_given_the_model_and_runs_it_plainly():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))
    with checkpoint_segments(model, {"0": 1}):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(without_grad, (model, torch.ones(3, 2)))
        assert torch.equal(found, model(torch.ones(3, 2)))


def test_a_model_is_freed_with_its_last_name_also_where_it_was_not_switched_back():
    gc.collect()
    gc.disable()
    try:
        for removed in (True, False):
            model = net()
            handle = checkpoint_segments(model, {"body": 2})
            model(torch.randn(8, 4)).sum().backward()
            if removed:
                handle.remove()
            gone = weakref.ref(model.body), weakref.ref(model.body[0][0].weight)
            del model
            assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_the_handle_says_what_it_did():
    model = net()
    handle = checkpoint_segments(model, {"body": 2})
    assert repr(handle) == "Segments(body: 2)"
    handle.remove()
    assert repr(handle) == "Segments(removed)"
    with checkpoint_segments(model.head, {"": 2}) as handle:
        assert repr(handle) == "Segments('': 2)"
        model(torch.randn(8, 4))


def test_a_compiled_model_is_right_though_not_compiled_and_with_fullgraph_refused():
    torch._dynamo.reset()
    model, plain, x = net(), net(), torch.randn(8, 4)
    with checkpoint_segments(model, {"body": 2}):
        torch.compile(model, backend="eager")(x).square().sum().backward()
        plain(x).square().sum().backward()
        assert equal([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
        assert equal(list(plain.buffers()), list(model.buffers()))
        with pytest.raises(KeyError, match="no layer is called 'bodi'; close: 'body'"):
            checkpoint_segments(torch.compile(model, backend="eager"), {"bodi": 1})
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"checkpoint_segments does not work inside torch\.compile"):
            compiled(torch.randn(8, 4))
        model(torch.randn(8, 4))
    torch._dynamo.reset()


# ---- bad input ----


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"bodi": 1}, KeyError, "no layer is called 'bodi'; close: 'body'"),
        ({"xyz": 1}, KeyError, "close: 'body'"),
        ({"stem": 1}, TypeError, "'stem' should be a Sequential.*found Linear$"),
        ({"": 1}, TypeError, "should be a Sequential.*found Net$"),
        ({"body": 0}, ValueError, r"plan\['body'\]=0\): expected 1 or more"),
        ({"body": 1.5}, TypeError, r"plan\['body'\]=...\): expected a whole number, found float"),
        ({}, ValueError, "the plan is empty"),
        (["body"], TypeError, "found list"),
        ({"body": 1, "head": 0}, ValueError, "'head'"),
    ],
)
def test_a_bad_plan_is_refused_and_nothing_has_changed(plan, error, message):
    model = net()
    with pytest.raises(error, match=message):
        checkpoint_segments(model, plan)
    assert "forward" not in vars(model.body) | vars(model.head)


def test_a_second_time_is_refused():
    model = net()
    with checkpoint_segments(model, {"body": 1}):
        with pytest.raises(ValueError, match="runs in segments already"):
            checkpoint_segments(model, {"body": 2})
        model(torch.randn(8, 4))


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.h, self.own, self.lazy = (
            nn.ModuleList([nn.Linear(2, 2)]),
            Residual(),
            nn.Sequential(nn.LazyLinear(2)),
        )
        self.wrapped = nn.ModuleList([nn.Linear(2, 2)])
        self.wrapped[0].forward = lambda x: x
        self.patched = nn.Sequential(nn.Linear(2, 2))
        self.patched.forward = lambda x: x
        self.alias = self.same = nn.Sequential()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"inner.h": 2}, r"the owner of a ModuleList calls its blocks one by one: 1 block .*, \{'inner.h': 1\}"),
        ({"inner.wrapped": 1}, "'inner.wrapped.0' has a forward of its own, put there by a wrapper or another plan"),
        ({"h": 1}, "no layer is called 'h'; close: 'inner.h'"),
        ({"inner.own": 1}, "found Residual with a forward of its own$"),
        ({"inner.patched": 1}, "found Sequential with a forward of its own$"),
        ({"inner.alias": 1, "inner.same": 1}, "'inner.same' runs in segments already, perhaps under another name"),
        ({"inner.lazy": 1}, "'inner.lazy' has a lazy layer; run the model once before"),
    ],
)
def test_what_cannot_run_in_segments_is_refused_with_what_to_do_instead(plan, message):
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        checkpoint_segments(nn.ModuleDict({"inner": Unrolled()}), plan)


def test_something_that_is_no_model_or_has_no_sequential_is_refused():
    with pytest.raises(TypeError, match="checkpoint_segments: expected a module, found dict"):
        checkpoint_segments({}, {"body": 1})
    with pytest.raises(KeyError, match="'body'; close: no Sequential in this model"):
        checkpoint_segments(nn.Linear(2, 2), {"body": 1})


def test_a_layer_that_is_never_called_is_announced():
    model = net()
    with (
        pytest.warns(UserWarning, match="never called: 'head';"),
        checkpoint_segments(model, {"body": 1, "head": 1}),
    ):
        model.body(torch.randn(8, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), checkpoint_segments(model, {"body": 1}):
            raise KeyError
        with checkpoint_segments(model, {"body": 1}):
            model.body(torch.randn(8, 6))


# ---- blocks that do more than compute ----


class Around(nn.Module):
    """A residual connection: the caller goes on using what it gave to the Sequential."""

    def __init__(self, *blocks):
        super().__init__()
        self.stem, self.body = nn.Linear(4, 4), nn.Sequential(*blocks)

    def forward(self, x):
        x = self.stem(x)
        return x + self.body(x)


def trained(make, plan, between=lambda model: None, steps=2):
    """Outputs, gradients and buffers of steps whose backward comes after the block."""
    torch.manual_seed(0)
    model, found = make(), []
    for _ in range(steps):
        x = torch.randn(3, 4, requires_grad=True)
        with checkpoint_segments(model, plan) if plan else contextlib.nullcontext():
            output = model(x)
        between(model)
        output.square().sum().backward()
        found += [output, x.grad, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        found += [one.clone() for one in model.buffers()]
    return found


def same_as_plain(make, plan, between=lambda model: None):
    expected = trained(make, None, between)
    assert any(one.any() for one in expected)
    return equal(expected, trained(make, plan, between))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_in_place_block_edits_what_the_caller_gave_and_leaves_the_saved_input_alone(size):
    """In plain training `x + model(x)` sees the edited x."""
    blocks = nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ELU(inplace=True), nn.Linear(4, 4)
    assert same_as_plain(lambda: Around(*copy.deepcopy(blocks)), {"body": size})


@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.Dropout(0.0), nn.Flatten])
def test_what_a_block_passes_on_may_be_edited_by_the_next_segment(first):
    blocks = first(), nn.ReLU(inplace=True), nn.Linear(4, 4)
    assert same_as_plain(lambda: Around(*copy.deepcopy(blocks)), {"body": 1})
    with pytest.raises(RuntimeError, match="edits its input in place"):
        trained(lambda: Around(*copy.deepcopy(blocks)), {"body": 2})


def test_a_segment_that_edits_its_input_deeper_inside_is_named():
    inner = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), inner))
    match = "segment that begins with Sequential edits its input in place.*inplace=False"
    with checkpoint_segments(model, {"1": 1}), pytest.raises(RuntimeError, match=match):
        model(torch.randn(3, 4))


class Noting(nn.Linear):
    """It counts its calls, and notes a loss of its own and, in a list, what it returns."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        y = super().forward(x).tanh()
        self.aux = y.square().mean()
        self.seen = [*getattr(self, "seen", [])]
        self.seen.append(y)
        return y


class Skips(Around):
    """What goes down is kept in a list of the model, and taken from it on the way up."""

    def __init__(self):
        super().__init__(Noting(4, 4), nn.Tanh(), Noting(4, 4))
        self.body[0].seen = self.body[2].seen = []

    def forward(self, x):
        y = super().forward(x)
        for block in self.body[::2]:
            while block.seen:
                y = self.stem(y + block.seen.pop())
        return y + self.body[0].aux


@pytest.mark.parametrize("size", [1, 3])
def test_what_a_block_notes_is_what_its_forward_has_noted(size):
    def check(model):
        assert model.body[0].seen == []
        model.noted = [*getattr(model, "noted", []), model.body[0].calls]

    assert same_as_plain(Skips, {"body": size}, check)
    model = Skips()
    with checkpoint_segments(model, {"body": size}):
        model(torch.randn(3, 4)).sum().backward()
    assert model.body[0].calls == 1
    assert model.body[0].seen == []


class HooksItsInput(nn.Linear):
    def forward(self, x):
        x.register_hook(lambda grad: grad * 0.1)
        return super().forward(x).tanh()


@pytest.mark.parametrize("size", [1, 2])
def test_a_hook_that_a_block_puts_on_its_input_scales_the_gradient_once(size):
    assert same_as_plain(lambda: Around(HooksItsInput(4, 4), HooksItsInput(4, 4)), {"body": size})


def late_layer(block, x):
    block.late = getattr(block, "late", None) or nn.Linear(4, 4)
    return block.late(x)


def late_buffer(block, x):
    if not hasattr(block, "scale"):
        block.register_buffer("scale", x.detach().max())
    return x * block.scale


def hook_on_a_parameter(block, x):
    block.weight.register_hook(lambda grad: grad * 0.1)
    return block(x)


@pytest.mark.parametrize("does", [late_layer, late_buffer, hook_on_a_parameter])
def test_what_a_forward_registers_is_refused_since_it_would_be_registered_twice(does):
    class Late(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.busy else self.once(x)

        busy = False

        def once(self, x):
            self.busy = True
            return does(self, x)

    with pytest.raises(RuntimeError, match=r"begins with Late registers a parameter, a buffer or a hook"):
        trained(lambda: Around(Late(4, 4)), {"body": 1})


def test_a_forward_that_takes_a_derivative_updates_its_buffers_once():
    class Force(nn.Module):
        def forward(self, x):
            return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]

    assert same_as_plain(lambda: Around(nn.Linear(4, 4), nn.BatchNorm1d(4), Force()), {"body": 3})


def test_segments_inside_segments_are_recomputed_as_they_were_though_removed_before_backward():
    def make():
        return Around(nn.Sequential(nn.Tanh(), nn.Dropout(), nn.Linear(4, 4)), nn.Linear(4, 4))

    assert same_as_plain(make, {"body": 1, "body.0": 2})


def test_a_checkpoint_inside_a_segment_and_around_one():
    class Inside(nn.Linear):
        def forward(self, x):
            return checkpoint(lambda x: super(Inside, self).forward(x).tanh(), x, use_reentrant=False)

    class Outside(Around):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    assert same_as_plain(lambda: Around(Inside(4, 4), nn.Dropout(), Inside(4, 4)), {"body": 2})
    torch.manual_seed(0)
    model, x = Outside(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    with checkpoint_segments(model, {"body": 2}):
        model(x).sum().backward()
    found = [one.grad for one in model.parameters()]
    model.zero_grad()
    Around.forward(model, x).sum().backward()
    assert equal([one.grad for one in model.parameters()], found)


# ---- inputs ----


class Masked(nn.Linear):
    def forward(self, pair):
        x, mask = pair
        return super().forward(x) * mask, mask


def test_tensors_in_a_tuple_are_saved_guarded_and_offloaded():
    def gradients(plan):
        torch.manual_seed(0)
        model, store = nn.Sequential(Masked(4, 4), Masked(4, 4)), CountingStore()
        with checkpoint_segments(model, plan) if plan else contextlib.nullcontext():
            with Offload(model, to=store, min_bytes=0) as offload:
                y, mask = model((torch.ones(2, 4), torch.arange(8.0).view(2, 4)))
            y.sum().backward()
            y, _ = model((torch.ones(2, 4), mask))
            mask.zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        return [offload.moved_bytes, *(one.grad.tolist() for one in model.parameters())]

    moved, *found = gradients({"": 1})
    assert found == gradients(None)[1:]
    assert moved == 3 * 32  # two inputs and the mask


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: {"x": x}, lambda x: (x, None)])
def test_an_input_of_another_kind_is_refused(make):
    model = nn.Sequential(Masked(4, 4))
    message = r"begins with Masked was given .*; expected a tensor, or a tuple of tensors; leave"
    with checkpoint_segments(model, {"": 1}), pytest.raises(TypeError, match=message):
        model(make(torch.ones(2, 4)))


# ---- changes between forward and backward ----


def double_in_a_vector(model):
    parameters = list(model.parameters())
    nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector(parameters).detach(), parameters)


def double_by_data(model):
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data


def double_in_place(model):
    with torch.no_grad():
        model.body[1].weight.mul_(2)


def other_parameter(model):
    model.body[0].weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            double_in_place,
            r"modified by an inplace operation: \[a parameter \[4, 4\]\] is at version 2; expected version 1",
        ),
        (double_in_a_vector, r"a parameter \[4, 4\] was given other memory .* run backward before"),
        (double_by_data, r"a parameter \[4, 4\] was given other memory .* run backward before"),
        (nn.Module.double, r"a parameter \[4, 4\] was given other memory .* run backward before"),
        (lambda model: model.requires_grad_(False), r"had its requires_grad changed .* run backward before"),
        (other_parameter, r"a parameter \[4, 4\] is another tensor than in forward"),
    ],
)
def test_parameters_that_change_between_forward_and_backward_are_refused(change, message):
    with pytest.raises(RuntimeError, match=message):
        trained(lambda: Around(nn.Linear(4, 4), nn.Linear(4, 4)), {"body": 2}, change)


def test_a_buffer_edited_between_forward_and_backward_changes_no_gradient():
    model, x, found = net().eval(), torch.randn(8, 4), []
    with checkpoint_segments(model, {"body": 2}):
        for factor in (1, 3):
            model.zero_grad()
            loss = model(x).square().sum()
            model.body[0][1].running_var.mul_(factor)
            loss.backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert equal(*found)


def test_eval_between_forward_and_backward_changes_no_gradient_and_stays():
    class Scaled(nn.Module):
        def forward(self, x):
            return torch.tanh(x * (2.0 if self.training else 1.0))

    def to_eval(model):
        model.train(not model.training)

    model = Around(Scaled(), nn.Dropout(), nn.BatchNorm1d(4))
    assert same_as_plain(lambda: copy.deepcopy(model), {"body": 2}, to_eval)
    trained(lambda: model, {"body": 2}, to_eval, steps=1)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("inside", [False, True])
def test_parameters_that_functional_call_lends_are_those_of_the_recomputation_or_refused(inside):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    lent = {name: (2 * one.detach()).requires_grad_() for name, one in model.named_parameters()}
    expected = torch.autograd.grad(functional_call(model, lent, x).sum(), list(lent.values()))

    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.autograd.grad(self.model(x).sum(), list(lent.values()))

    with checkpoint_segments(model, {"": 2}):
        if inside:  # they are still lent in backward
            found = functional_call(Trains(), {f"model.{name}": one for name, one in lent.items()}, x)
            assert equal(expected, found)
        else:
            with pytest.raises(RuntimeError, match=r"is another tensor than in forward.*functional_call"):
                functional_call(model, lent, x).sum().backward()


def test_cached_parametrizations_are_refused_in_forward_and_in_backward():
    model, x = (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()),
        torch.ones(3, 4),
    )
    with checkpoint_segments(model, {"": 2}):
        loss = model(x).sum()
        with parametrize.cached():
            for run in (lambda: model(x), loss.backward):
                with pytest.raises(RuntimeError, match=r"parametrize\.cached\(\).*; leave it out"):
                    run()
        loss.backward()


def test_an_error_in_the_recomputation_leaves_buffers_and_flags_in_place():
    model, calls = net(), []

    def fails_the_second_time(module, args, output):
        calls.append(module)
        if len(calls) > 1:
            raise ZeroDivisionError

    with checkpoint_segments(model, {"body": 5}), model.body[1].register_forward_hook(fails_the_second_time):
        loss = model(torch.randn(8, 4)).sum()
        buffers, values = list(model.buffers()), [one.clone() for one in model.buffers()]
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    assert all(one is other for one, other in zip(model.buffers(), buffers, strict=True))
    assert equal(values, buffers)


# ---- a ModuleList, whose owner calls its blocks ----


class Layer(nn.Module):
    """As in a transformer: keywords, nested arguments, a list that it fills, a tuple that it returns."""

    def __init__(self):
        super().__init__()
        self.inside, self.norm, self.drop = nn.Linear(4, 16), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.out = nn.Linear(16, 4)

    def forward(self, x, mask=None, *, rope, taps, scale=1.0):
        taps.append(x)
        cos, sin = rope
        hidden = self.norm(self.drop(self.out((self.inside(x * cos) * sin.mean()).tanh())))
        return x + hidden * mask * scale, None


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.h, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(4, 1)

    def forward(self, x):
        rope, taps = (x.detach().cos(), x.sin()), []
        for layer in self.h:
            x, _ = layer(x, torch.ones(4), rope=rope, taps=taps, scale=2)
        return self.head(x + sum(taps))


def test_each_block_of_a_modulelist_is_a_segment_and_the_training_is_plain():
    assert same_as_plain(Stack, {"h": 1})
    model, x = Stack(), torch.randn(8, 4, requires_grad=True)
    with saved_tensors(model) as plain:
        model(x)
    with checkpoint_segments(model, {"h": 1}) as segments, saved_tensors(model) as saved:
        y = model(x)
        assert repr(segments) == "Segments(h.0: 1, h.1: 1, h.2: 1, h.3: 1)"
        y.sum().backward()
    assert plain.unique_bytes > 4 * 8 * 16 * 4  # what is inside the blocks
    assert saved.unique_bytes < plain.unique_bytes / 2
    assert not any(one.shape == (8, 16) for one in saved)
    assert not any("forward" in vars(layer) for layer in model.h)


def test_hooks_on_a_block_of_a_modulelist_fire_once_and_a_copy_of_it_is_plain():
    model, calls = Stack(), []
    for layer in model.h:
        layer.register_forward_hook(lambda module, args, output: calls.append(module))
    with no_leftovers(model), checkpoint_segments(model, {"h": 1}), features(model, "h.*.out") as f:
        twin = copy.deepcopy(model)
        model(torch.randn(3, 4)).sum().backward()
    assert calls == [*model.h]
    assert [len(one) for one in f.calls.values()] == [1] * 4
    with saved_tensors(twin) as saved:
        twin(torch.randn(3, 4))
    assert any(one.shape == (3, 16) for one in saved)


def test_an_in_place_block_of_a_modulelist_edits_what_its_owner_gave():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)])

        def forward(self, x):
            first = self.h[0](x)
            return self.h[2](self.h[1](first)) + first

    assert same_as_plain(Loop, {"h": 1})


def test_an_object_that_a_block_could_fill_twice_is_refused():
    class DynamicCache:
        pass

    class Cached(nn.Linear):
        def forward(self, x, cache=None):
            return super().forward(x)

    model = nn.Module()
    model.h = nn.ModuleList([Cached(2, 2)])
    with checkpoint_segments(model, {"h": 1}):
        for cache in (DynamicCache(), {"own": DynamicCache()}):
            with pytest.raises(TypeError, match=r"'h.0' was given .*DynamicCache.*use_cache=False.*; expected tensors"):
                model.h[0](torch.ones(1, 2), cache=cache)
        with torch.no_grad():
            model.h[0](torch.ones(1, 2), cache=DynamicCache())
