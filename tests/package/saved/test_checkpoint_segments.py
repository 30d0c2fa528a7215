"""`checkpoint_segments`: less is saved, and gradients and buffers are those of plain training."""

import contextlib
import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from counting_store import CountingStore
from torch import nn
from torch.nn.utils import parametrize

from hooklab import Offload, checkpoint_segments, features, no_leftovers, saved_tensors


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def block(width=6):
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))


class Net(nn.Module):
    def __init__(self, blocks=5, extra=()):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.body = nn.Sequential(*(block() for _ in range(blocks)), *extra)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def net(blocks=5, extra=lambda: ()):
    torch.manual_seed(0)
    return Net(blocks, extra())


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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
def test_gradients_parameters_and_buffers_equal_plain_training(size):
    model = net()
    with checkpoint_segments(model, {"body": size}):
        found = train(model)
    assert equal(train(net()), found)
    assert model.body[0][1].num_batches_tracked == 2


def test_several_sequentials_each_in_its_own_way():
    model = net()
    with checkpoint_segments(model, {"body": 2, "head": 1}):
        found = train(model)
    assert equal(train(net()), found)


def test_only_the_inputs_of_the_segments_are_saved():
    model, x = net(), torch.randn(8, 4)
    with checkpoint_segments(model, {"body": 2}), saved_tensors(model) as saved:
        y = model.body(model.stem(x))
    inputs = [one for one in saved if one.shape == (8, 6)]
    assert len(inputs) == 3  # of blocks 0, 2 and 4
    assert saved.total_bytes == x.nbytes + 3 * 8 * 6 * 4
    y.sum().backward()


def test_running_statistics_are_updated_once_also_with_retain_graph():
    model = net()
    with checkpoint_segments(model, {"body": 1}):
        found = train(model, retain=True)
    assert equal(train(net(), retain=True), found)
    assert model.body[0][1].num_batches_tracked == 2


def test_dropout_draws_the_same_numbers_again():
    extra = lambda: (nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3))  # noqa: E731
    model, runs = net(extra=extra), []
    with (
        checkpoint_segments(model, {"body": 3}),
        model.body[6].register_forward_hook(lambda *args: runs.append("forward")),
    ):
        found = train(model)
    assert len(runs) == 2 * 2  # twice in each step
    assert equal(train(net(extra=extra)), found)


class Counter(nn.Module):
    """Its output depends on a buffer that it changes: a repetition must start from the old value."""

    def __init__(self, replaces):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.replaces = replaces

    def forward(self, x):
        if self.replaces:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return x * self.calls


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("replaces", [True, False])
def test_buffers_that_the_output_depends_on_have_their_old_value_again(replaces, retain):
    extra = lambda: (Counter(replaces), nn.Tanh())  # noqa: E731
    model = net(extra=extra)
    with checkpoint_segments(model, {"body": 7}):
        found = train(model, steps=3, retain=retain)
    assert equal(train(net(extra=extra), steps=3, retain=retain), found)
    assert model.body[5].calls == 3


class Noting(nn.Module):
    """It notes a count of its calls, a loss of its own, and in each forward another one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.calls, self.aux = 0, None

    def forward(self, x):
        self.calls += 1
        y = self.inner(x).tanh()
        self.aux = y.square().mean()
        setattr(self, f"aux_{self.calls}", self.aux.detach())
        return y


@pytest.mark.parametrize("size", [1, 7])
def test_what_a_block_notes_in_attributes_is_what_its_forward_has_noted(size):
    extra = lambda: (Noting(), nn.Tanh())  # noqa: E731
    model = net(extra=extra)
    with checkpoint_segments(model, {"body": size}):
        assert equal(train(net(extra=extra), steps=3), train(model, steps=3))
        noting = model.body[5]
        loss = model(torch.ones(8, 4)).sum() + noting.aux
        noted = dict(vars(noting))
        loss.backward()
    assert noting.calls == 4
    assert vars(noting).keys() == noted.keys()
    assert all(vars(noting)[name] is value for name, value in noted.items())


class Lazily(nn.Module):
    """Makes a layer, and a table for a number, when they are first wanted."""

    def __init__(self):
        super().__init__()
        self.layer = self.length = self.table = None

    def forward(self, x):
        if self.layer is None:
            self.layer = nn.Linear(x.shape[-1], 6)
        if len(x) != self.length:
            self.length, self.table = len(x), torch.arange(float(len(x)))[:, None]
        return (self.layer(x) * self.table).tanh()


def test_what_a_block_makes_when_it_is_wanted_is_made_once():
    def run(context):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Lazily(), nn.Tanh())
        with context(model):
            outputs = [model(torch.ones(length, 6)).sum() for length in (3, 3, 5)]
            layer = model[1].layer
            sum(outputs).backward()
        assert model[1].layer is layer
        return [parameter.grad for parameter in model.parameters()]

    want = run(lambda model: contextlib.nullcontext())
    found = run(lambda model: checkpoint_segments(model, {"": 3}))
    assert len(want) == 4
    assert equal(want, found)


def test_spectral_norm_iterates_once():
    extra = lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),)  # noqa: E731
    model = net(extra=extra)
    with checkpoint_segments(model, {"body": 2}):
        found = train(model)
    assert equal(train(net(extra=extra)), found)


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


def test_a_graph_that_is_never_used_leaves_buffers_as_plain_training():
    model, plain = net(), net()
    x = torch.randn(8, 4)
    with checkpoint_segments(model, {"body": 2}):
        model(x)
    plain(x)
    assert equal(list(plain.state_dict().values()), list(model.state_dict().values()))


def test_without_grad_nothing_is_checkpointed():
    model, x = net().eval(), torch.randn(8, 4)
    expected = model(x)
    with checkpoint_segments(model, {"body": 2}), torch.no_grad():
        assert torch.equal(model(x), expected)
    edits = nn.Sequential(Adds(), nn.Linear(2, 2))
    with checkpoint_segments(edits, {"": 2}):
        for given in torch.zeros(2, 3, 2):  # also the first time
            with torch.no_grad():
                edits(given)
            assert given.all()
        with pytest.raises(RuntimeError, match="edits its input in place"):
            edits(torch.zeros(3, 2))


class Adds(nn.Module):
    def forward(self, x):
        return x.add_(1)


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


def test_an_error_in_a_block_leaves_buffers_in_place():
    model = net()
    handle = model.body[3].register_forward_hook(lambda module, args, output: 1 / 0)
    buffers = dict(model.named_buffers())
    with checkpoint_segments(model, {"body": 5}), pytest.raises(ZeroDivisionError):
        model(torch.randn(8, 4))
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    handle.remove()


def test_an_error_while_computing_again_leaves_buffers_in_place():
    model, calls = net(), []

    def fails_the_second_time(module, args, output):
        calls.append(module)
        if len(calls) > 1:
            raise ZeroDivisionError

    buffers = dict(model.named_buffers())
    with checkpoint_segments(model, {"body": 5}):
        loss = model(torch.randn(8, 4)).sum()
        with model.body[1].register_forward_hook(fails_the_second_time):
            calls.append(None)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_threads():
    model = net().eval()
    xs = [torch.randn(8, 4) for _ in range(4)]
    expected = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in xs]
    found = [None] * 4

    def work(number):
        found[number] = torch.autograd.grad(model(xs[number]).sum(), list(model.parameters()))

    with checkpoint_segments(model, {"body": 2}):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert all(equal(one, other) for one, other in zip(expected, found, strict=True))


# ---- life ----


def test_after_remove_the_model_is_as_before():
    model = net()
    before = {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()}
    with no_leftovers(model):
        handle = checkpoint_segments(model, {"body": 2, "head": 1})
        assert isinstance(model.body, nn.Sequential)
        assert list(model.state_dict()) == list(net().state_dict())
        handle.remove()
        handle.remove()
    assert {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()} == before
    pickle.loads(pickle.dumps(model))


def test_a_copy_made_meanwhile_works_by_itself():
    model = net()
    handle = checkpoint_segments(model, {"body": 2})
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    handle.remove()
    found = train(twin)
    assert equal(train(net()), found)
    assert equal(train(again), found)
    assert equal(train(model), found)


def test_subclasses_of_sequential_without_a_forward_of_their_own():
    class Stage(nn.Sequential):
        pass

    model = net()
    model.body = Stage(*model.body)
    with checkpoint_segments(model, {"body": 2}):
        assert isinstance(model.body, Stage)
        found = train(model)
    assert type(model.body) is Stage
    assert equal(train(net()), found)


def test_the_handle_says_what_it_did():
    model = net()
    handle = checkpoint_segments(model, {"body": 2})
    assert repr(handle) == "Segments(body: 2)"
    handle.remove()
    assert repr(handle) == "Segments(removed)"
    with checkpoint_segments(model.head, {"": 2}) as handle:
        assert repr(handle) == "Segments('': 2)"
        model(torch.randn(8, 4))


def test_an_error_on_the_way_switches_back_what_was_switched(monkeypatch):
    from hooklab import _segments

    def second_fails(name, module, blocks):
        if name == "head":
            raise KeyboardInterrupt
        return switched(name, module, blocks)

    switched, model = _segments.Switched, net()
    monkeypatch.setattr(_segments, "Switched", second_fails)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_segments(model, {"body": 1, "head": 1})
    assert type(model.body) is type(model.head) is nn.Sequential


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_a_compiled_model_it_is_right_though_not_compiled(backend):
    torch._dynamo.reset()
    model = net()
    with checkpoint_segments(model, {"body": 2}):
        compiled = torch.compile(model, backend=backend)
        torch.manual_seed(0)
        compiled(torch.randn(8, 4)).square().sum().backward()
    plain = net()
    torch.manual_seed(0)
    plain(torch.randn(8, 4)).square().sum().backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    assert model.body[0][1].num_batches_tracked == 1
    torch._dynamo.reset()


def test_a_compiled_model_has_the_names_of_the_one_inside():
    compiled = torch.compile(net(), backend="eager")
    with checkpoint_segments(compiled, {"body": 2}) as segments:
        compiled(torch.randn(8, 4)).sum().backward()
    assert repr(segments) == "Segments(removed)"
    with pytest.raises(KeyError, match="no layer is called 'bodi'; close: 'body'"):
        checkpoint_segments(compiled, {"bodi": 1})
    torch._dynamo.reset()


def test_with_fullgraph_it_is_refused_in_words():
    torch._dynamo.reset()
    model = net()
    with checkpoint_segments(model, {"body": 2}):
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
        ({"heed": 1}, KeyError, "no layer is called 'heed'; close: 'head'"),
        ({"xyz": 1}, KeyError, "close: 'body'"),
        ({0: 1}, KeyError, "no layer is called 0; close: 'body'"),
        ({"stem": 1}, TypeError, "'stem' should be a Sequential.*found Linear$"),
        ({"": 1}, TypeError, "should be a Sequential.*found Net$"),
        ({"body": 0}, ValueError, r"plan\['body'\]=0\): expected 1 or more"),
        ({"body": -3}, ValueError, "=-3\\): expected 1 or more"),
        ({"body": 1.5}, TypeError, r"plan\['body'\]=...\): expected a whole number, found float"),
        ({"body": True}, TypeError, "expected a whole number, found bool"),
        ({}, ValueError, "the plan is empty"),
        (["body"], TypeError, "found list"),
        ("body", TypeError, "found str"),
        ({"body": 1, "head": 0}, ValueError, "'head'"),
    ],
)
def test_a_bad_plan_is_refused_and_nothing_has_changed(plan, error, message):
    model = net()
    with pytest.raises(error, match=message):
        checkpoint_segments(model, plan)
    assert type(model.body) is type(model.head) is nn.Sequential
    assert "_hooklab_blocks" not in model.body.__dict__


def test_a_model_without_a_sequential_is_refused_in_words():
    with pytest.raises(KeyError, match="'body'; close: no Sequential in this model"):
        checkpoint_segments(nn.Linear(2, 2), {"body": 1})


def test_a_sequential_with_its_own_forward_is_refused():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    model = net()
    model.body = Residual(*model.body)
    with pytest.raises(TypeError, match="found Residual with a forward of its own"):
        checkpoint_segments(model, {"body": 1})


def test_a_second_time_is_refused():
    model = net()
    with checkpoint_segments(model, {"body": 1}):
        with pytest.raises(ValueError, match="runs in segments already"):
            checkpoint_segments(model, {"body": 2})
        model(torch.randn(8, 4))


def test_two_names_of_one_layer_are_refused():
    model = net()
    model.alias = model.body
    with pytest.raises(ValueError, match="another name of a layer"):
        checkpoint_segments(model, {"body": 1, "alias": 1})


def test_something_that_is_no_model_is_refused():
    with pytest.raises(TypeError, match="checkpoint_segments: expected a module, found dict"):
        checkpoint_segments({}, {"body": 1})


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


# ---- what once went wrong ----


def both(make, inputs, plan):
    """The plain model; and gradients, parameters and buffers after backward for each input, plain and in segments."""
    found = []
    for segmented in (False, True):
        torch.manual_seed(0)
        model = make()
        context = checkpoint_segments(model, plan) if segmented else contextlib.nullcontext()
        with context:
            for x in inputs:
                model(x).square().sum().backward()
        gradients = [param.grad for param in model.parameters()]
        assert any(grad.any() for grad in gradients)
        found.append((model, [*gradients, *model.parameters(), *model.buffers()]))
    (plain, want), (_, got) = found
    return plain, want, got


def test_an_in_place_block_at_a_border_leaves_the_saved_input_alone():
    def make():
        return nn.Sequential(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ELU(inplace=True))
        )

    for blocks in (1, 3):
        _, want, got = both(make, [torch.randn(3, 4)], {"0": blocks})
        assert equal(want, got)


def test_a_segment_that_edits_its_input_deeper_inside_is_named():
    inner = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), inner))
    match = "segment that begins with Sequential edits its input in place.*inplace=False"
    with checkpoint_segments(model, {"1": 1}), pytest.raises(RuntimeError, match=match):
        model(torch.randn(3, 4))


def test_an_input_that_is_the_callers_is_edited_as_in_plain_training():
    """There `x + model(x)` sees the edited x."""
    model = nn.Sequential(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)))
    for mode in (torch.enable_grad, torch.no_grad):
        x = torch.randn(3, 4) * 2
        with checkpoint_segments(model, {"0": 1}), mode():
            model(x)
        assert (x >= 0).all()


def test_a_buffer_from_inference_mode():
    def make():
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Shared(torch.ones(2), False)))
        with torch.inference_mode():
            model[0][1].number = torch.full((2,), 3)
        return model

    class Whole(Shared):
        def forward(self, x):
            return x * self.weight + self.number.shape[0]

    def with_whole():
        model = make()
        model[0][1].__class__ = Whole
        return model

    _, want, got = both(with_whole, [torch.ones(3, 2)], {"0": 1})
    assert equal(want, got)


def test_a_script_module_is_no_sequential():
    model = nn.Sequential(torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)))
    with pytest.raises(TypeError, match="should be a Sequential"):
        checkpoint_segments(model, {"0": 1})


class Shared(nn.Module):
    """Changes a buffer that the next one uses."""

    def __init__(self, number, changes):
        super().__init__()
        self.weight, self.changes = nn.Parameter(torch.ones(2)), changes
        self.register_buffer("number", number)

    def forward(self, x):
        if self.changes:
            self.number.add_(1)
        return x * self.weight * self.number


class LateBuffer(nn.Module):
    """Fills a buffer in its first forward, and takes another way afterwards."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("number", None)

    def forward(self, x):
        if self.number is None:
            self.number = torch.full((2,), 3.0)
            return x * self.weight * 2
        return (x * self.weight * self.number).sin()


class Recurrent(nn.Module):
    """Keeps its state, graph and all, in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("state", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.state = torch.tanh(x * self.weight + self.state * self.weight)
        return self.state


@pytest.mark.parametrize("kind", ["shared", "late"])
def test_odd_buffers_have_their_old_value_again(kind):
    def make():
        if kind == "shared":
            number = torch.ones(2)
            return nn.Sequential(nn.Sequential(Shared(number, True), Shared(number, False)))
        return nn.Sequential(nn.Sequential(LateBuffer(), nn.Tanh()))

    _, want, got = both(make, [torch.ones(3, 2) / 2] * 2, {"0": 2})
    assert equal(want, got)


def test_a_buffer_that_carries_a_graph():
    def gradients(segmented):
        model = nn.Sequential(nn.Sequential(Recurrent(), nn.Tanh()))
        with checkpoint_segments(model, {"0": 2}) if segmented else contextlib.nullcontext():
            loss = sum(model(torch.ones(2) / number).sum() for number in (1, 2, 3))
        loss.backward()
        return model[0][0].weight.grad

    assert torch.equal(gradients(True), gradients(False))


def test_buffers_that_fused_operations_edit_without_a_version():
    from torch.ao import quantization

    def make():
        layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3)
        model = nn.Sequential(nn.Sequential(*layers))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return quantization.prepare_qat(model.train())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, want, got = both(make, torch.randn(2, 2, 1, 8, 8), {"0": 4})
    assert any("scale" in name for name, _ in plain.named_buffers())
    assert equal(want, got)


def test_a_graph_that_ends_in_an_error_may_be_used():
    class Doubling(Shared):
        def forward(self, x):
            self.number.mul_(2)
            return x * self.weight * self.number

    def gradient(segmented):
        model, caught = nn.Sequential(nn.Sequential(Doubling(torch.ones(2), True), nn.Identity())), []

        def stop(module, args):
            caught.append(args[0])
            raise ValueError("here")

        model[0][1].register_forward_pre_hook(stop)
        context = checkpoint_segments(model, {"0": 2}) if segmented else contextlib.nullcontext()
        with context, contextlib.suppress(ValueError):
            model(torch.ones(2))
        caught[0].square().sum().backward()
        return model[0][0].weight.grad

    assert torch.equal(gradient(True), gradient(False))


def test_a_parameter_edited_before_backward_raises_as_in_plain_training():
    for segmented in (False, True):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        with checkpoint_segments(model, {"0": 2}) if segmented else contextlib.nullcontext():
            loss = model(torch.ones(1, 2)).sum()
            with torch.no_grad():
                model[0][1].weight.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def _double_in_a_vector(model):
    parameters = list(model.parameters())
    nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector(parameters).detach(), parameters)


def _double_by_data(model):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = 2 * tensor.data


@pytest.mark.parametrize("change", [_double_in_a_vector, _double_by_data, nn.Module.double])
def test_parameters_that_are_given_other_memory_before_backward_are_refused(change):
    """Plain training takes the old ones or the new ones, as each operation has saved them."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1)))
    with checkpoint_segments(model, {"0": 2}):
        loss = model(torch.ones(1, 2, 2)).sum()
        change(model)
        with pytest.raises(
            RuntimeError, match=r"a parameter \[2, 2\] was given other memory .* run backward before"
        ):
            loss.backward()


def test_so_is_a_large_buffer():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 5_000), nn.BatchNorm1d(5_000).eval()))
    with checkpoint_segments(model, {"0": 2}):
        loss = model(torch.ones(3, 2)).sum()
        model[0][1].running_var.data = torch.ones(5_000)
        with pytest.raises(RuntimeError, match=r"a buffer \[5000\] was given other memory"):
            loss.backward()


def test_parameters_that_have_their_memory_again_in_backward_are_as_they_were():
    """Averaged weights, say, are put in place for a moment."""

    def gradients(segmented, other):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
        with checkpoint_segments(model, {"0": 2}) if segmented else contextlib.nullcontext():
            loss = model(torch.ones(1, 2)).sum()
            own = [parameter.data for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data = other(parameter.data)
            for parameter, data in zip(model.parameters(), own, strict=True):
                parameter.data = data
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(True, torch.zeros_like), gradients(False, torch.zeros_like)))


@pytest.mark.parametrize("when", ["in forward", "in forward, and gathered ahead", "after forward"])
def test_parameters_that_are_gathered_by_a_hook_of_the_layer_may_be_empty_in_between(when):
    def gather(layer, args):
        layer.weight.data = layer.whole.clone()

    def release(layer, args, output):
        layer.weight.data = torch.empty(0)

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    layer, x = model[0][0], torch.ones(1, 2)
    model(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    layer.whole = layer.weight.data
    layer.register_forward_pre_hook(gather)
    with checkpoint_segments(model, {"0": 2}):
        # Not in backward, before the gradient is there.
        with layer.register_forward_hook(release) if when != "after forward" else contextlib.nullcontext():
            loss = model(x).sum()
        if when == "in forward, and gathered ahead":
            gather(layer, ())
        elif when == "after forward":
            release(layer, (), None)
        loss.backward()
    assert torch.equal(layer.weight.grad, expected)


def test_tensors_in_a_tuple_are_guarded_too():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, pair):
            x, mask = pair
            return x * self.weight * mask, mask

    for segmented in (False, True):
        model, mask = nn.Sequential(nn.Sequential(Masked(), Masked())), torch.ones(2)
        with checkpoint_segments(model, {"0": 1}) if segmented else contextlib.nullcontext():
            y, _ = model((torch.ones(2), mask))
            mask.zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


class Named(nn.Sequential):
    """A Sequential with a class of its own."""


@pytest.mark.parametrize("kind", [nn.Sequential, Named])
def test_slices_copies_and_pickles_are_ordinary(kind):
    model = nn.Sequential(kind(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    with checkpoint_segments(model, {"0": 1}):
        parts = model[0][:2], copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0]
        assert [type(part) for part in parts] == [kind] * 3
        assert len(parts[0]) == 2
        assert torch.equal(parts[1](torch.ones(2)), model[0](torch.ones(2)))
        checkpoint_segments(copy.deepcopy(model), {"0": 2}).remove()
    assert type(model[0]) is kind


def test_a_forward_that_was_wrapped_meanwhile_runs_plainly_afterwards():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))
    x = torch.ones(3, 2)
    expected = model(x)
    with checkpoint_segments(model, {"0": 1, "": 1}):
        for part in (model, model[0]):
            part.forward = torch.autocast("cpu", enabled=False)(part.forward)
        model(x).sum().backward()
        other = copy.deepcopy(model)
    for one in (model, other):
        with saved_tensors(one) as saved:
            assert torch.equal(one(x), expected)
        assert [record.shape for record in saved] == [(3, 2), (3, 2), (3, 2), (2, 1)]  # nothing is left out


def test_a_forward_of_its_own_on_the_object_is_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    model[0].forward = lambda x: x
    with pytest.raises(
        TypeError,
        match=r"container.Sequential with a forward of its own, put on the object, as accelerate does",
    ):
        checkpoint_segments(model, {"0": 1})


class Leaky(nn.Module):
    def forward(self, x):
        return nn.functional.rrelu(x, training=True)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("make", [nn.RReLU, lambda: torch.jit.script(nn.Sequential(nn.RReLU())), Leaky])
def test_noise_that_is_drawn_after_the_last_save_is_drawn_again(make):
    model, by_segments = net(extra=lambda: (make(),)), net(extra=lambda: (make(),))
    expected = train(model)
    with checkpoint_segments(by_segments, {"body": 3}):
        assert all(map(torch.equal, train(by_segments), expected))


class Scaled(nn.Module):
    def forward(self, x):
        return torch.tanh(x * (2.0 if self.training else 1.0))


def test_eval_between_forward_and_backward_changes_no_gradient_and_stays():
    gradients, x = [], torch.randn(8, 4)
    for plan in ({}, {"body": 2}):
        model = net(extra=lambda: (Scaled(), nn.Dropout()))
        torch.manual_seed(1)
        with checkpoint_segments(model, plan) if plan else contextlib.nullcontext():
            loss = model(x).square().sum()
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


class Quantize(nn.Module):
    """A codebook that moves along in training, edited through `.data` as vector quantizers do."""

    def __init__(self, codes):
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, 6))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantized = self.codes[nearest]
        self.codes.data.mul_(0.5).add_(x.detach().mean())
        return x * quantized


@pytest.mark.parametrize("codes", [10, 1_000])
def test_a_buffer_edited_through_data_has_its_old_value_again(codes):
    def make():
        return nn.Sequential(nn.Sequential(nn.Linear(6, 6), Quantize(codes), nn.Linear(6, 6), nn.Tanh()))

    plain, want, got = both(make, [torch.randn(8, 6), torch.randn(8, 6)], {"0": 4})
    assert equal(want, got)
    assert plain[0][1].codes.abs().max() < 10


@pytest.mark.parametrize("numbers", [4_096, 4_097])
def test_of_a_large_buffer_that_stays_as_it_is_there_is_no_copy(numbers):
    class Mask(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(numbers, dtype=torch.int16))

        def forward(self, x):
            return x * self.mask.sum()

    def masks():
        gc.collect()
        return sum(type(one) is torch.Tensor and one.dtype == torch.int16 for one in gc.get_objects())

    model = nn.Sequential(nn.Linear(2, 2), Mask())
    before = masks()
    with checkpoint_segments(model, {"": 2}):
        loss = model(torch.ones(1, 2)).sum()
        assert masks() - before == (1 if numbers == 4_096 else 0)
        loss.backward()
    assert model[0].bias.grad.tolist() == [numbers, numbers]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(100, 100).to_sparse(),
        lambda: torch.ones(100, 100).to_sparse_csr(),
        lambda: torch.ones(100, 100, device="meta"),
        lambda: torch.full((5_000,), torch.nan),
        lambda: torch.ones(0),
    ],
)
def test_buffers_that_cannot_be_compared(make):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("other", make())

        def forward(self, x):
            return x * (1 + self.other.dim())

    model = nn.Sequential(nn.Linear(2, 2), Keeps())
    other = model[1].other
    with checkpoint_segments(model, {"": 2}):
        model(torch.ones(1, 2)).sum().backward()
    assert model[0].bias.grad.tolist() == [1 + other.dim()] * 2
    assert model[1].other is other


def test_inputs_that_cannot_be_copied_and_large_buffers_without_a_version():
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            with torch.inference_mode():
                self.register_buffer("numbers", torch.ones(5_000))

        def forward(self, given):
            x, lock = given
            with lock:
                return torch.exp(self.linear(x)) * self.numbers.dim(), lock

    x, lock, found = torch.ones(1, 2), threading.Lock(), []
    torch.manual_seed(0)
    model = nn.Sequential(Locked(), Locked())
    for context in (contextlib.nullcontext(), checkpoint_segments(model, {"": 1})):
        model.zero_grad()
        with context:
            model((x, lock))[0].sum().backward()
        found.append([param.grad.clone() for param in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_model_on_the_meta_device():
    model = net().to("meta")
    with checkpoint_segments(model, {"body": 2}):
        model(torch.ones(8, 4, device="meta")).sum().backward()
    assert all(param.grad.is_meta for param in model.parameters())


@pytest.mark.parametrize("numbers", [10, 5_000])
def test_a_buffer_edited_between_forward_and_backward_changes_no_gradient_in_secret(numbers):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.ones(numbers))

        def forward(self, x):
            return x * self.factor.mean()

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Scale()))
    with checkpoint_segments(model, {"0": 2}):
        loss = model(torch.ones(1, 2)).sum()
        model[0][1].factor.add_(1)
        if numbers > 4_096:  # there is no copy of it
            with pytest.raises(
                RuntimeError, match=r"modified by an inplace operation: \[a buffer \[5000\]\]"
            ):
                loss.backward()
        else:
            loss.backward()
            assert model[0][0].bias.grad.tolist() == [1, 1]


def test_when_memory_is_full_at_the_begin_of_computing_again_buffers_stay(monkeypatch):
    model, calls = net(), []

    def full(buffer):
        calls.append(buffer)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("on purpose")
        return buffer.clone()

    buffers = dict(model.named_buffers())
    with checkpoint_segments(model, {"body": 5}):
        loss = model(torch.randn(8, 4)).sum()
        values = {name: buffer.clone() for name, buffer in buffers.items()}
        monkeypatch.setattr("hooklab._segment_state.copy_of", full)
        with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
            loss.backward()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(torch.equal(buffer, values[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())


def equal_gradients(make, plan):
    """And equal parameters and buffers."""
    _, want, got = both(make, [torch.randn(3, 4)], plan)
    assert equal(want, got)


class Around(nn.Module):
    """A residual connection: the caller goes on using what it gave to the Sequential."""

    def __init__(self, *blocks):
        super().__init__()
        self.stem, self.body = nn.Linear(4, 4), nn.Sequential(*blocks)

    def forward(self, x):
        x = self.stem(x)
        return x + self.body(x)


@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.Dropout(0.0), nn.Flatten])
def test_what_a_block_hands_through_is_edited_as_in_plain_training(first):
    blocks = first(), nn.ReLU(inplace=True), nn.Linear(4, 4)
    equal_gradients(lambda: Around(*copy.deepcopy(blocks)), {"body": 1})
    with pytest.raises(RuntimeError, match="edits its input in place"):
        equal_gradients(lambda: Around(*copy.deepcopy(blocks)), {"body": 2})


def test_an_in_place_block_at_the_beginning_edits_what_the_caller_gave():
    equal_gradients(lambda: Around(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh()), {"body": 2})


def test_the_copy_of_an_input_that_an_in_place_block_edits_leads_no_further_up():
    class Cuts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x.detach()).tanh()

    model, x = nn.Sequential(nn.ReLU(inplace=True), Cuts()), torch.ones(2, 4, requires_grad=True)
    with checkpoint_segments(model, {"": 2}):
        upstream = x.exp()  # its Node saves it
        memory = weakref.ref(upstream.untyped_storage())
        y = model(upstream * 1)
        del upstream
        assert memory() is None
        y.sum().backward()
    assert model[1].linear.weight.grad.any()


class Collecting(nn.Module):
    """Blocks that add to a list, or write into a dictionary, of the caller's."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, given):
        if self.kind is list:
            given.append(self.linear(given[-1]).tanh())
        else:
            given["x"] = self.linear(given["x"]).tanh()
            given["sum"] = given["sum"] + given["x"]
        return given


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("size", [1, 2])
def test_what_blocks_write_into_a_list_or_dict_of_the_caller_is_there(kind, size):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*[Collecting(kind) for _ in range(3)])

        def forward(self, x):
            given = [x] if kind is list else {"x": x, "sum": x * 0}
            self.body(given)
            return sum(given) if kind is list else given["sum"]

    equal_gradients(Net, {"body": size})


def test_a_module_that_blocks_are_given_is_itself_in_each_run():
    class Shared(nn.Module):
        def forward(self, given):
            x, module = given
            seen.append(module)
            return module(x).tanh(), module

    seen, model, linear = [], nn.Sequential(Shared(), Shared()), nn.Linear(4, 4)
    with checkpoint_segments(model, {"": 2}):
        y, _ = model((torch.ones(2, 4, requires_grad=True), linear))
        y.sum().backward()
    assert len(seen) == 4
    assert all(module is linear for module in seen)


class Graph:
    """Like the `Data` of a graph library: layers put their result in the place of what it held."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "around", [lambda graph: graph, lambda graph: (graph, threading.Lock())], ids=["alone", "beside a lock"]
)
def test_what_blocks_put_into_an_object_of_the_caller(size, around):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, given):
            graph = given[0] if isinstance(given, tuple) else given
            graph.x = self.linear(graph.x).tanh()
            return given

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body = nn.Linear(4, 4), nn.Sequential(Layer(), Layer(), Layer())

        def forward(self, x):
            graph = Graph(self.stem(x))
            given = around(graph)
            self.body(given)
            return graph.x

    equal_gradients(Net, {"body": size})


class Edits(nn.Module):
    """Blocks that write into what an object holds, where a copy of the object shares it."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, given):
        if self.how == "tensor":
            given.x.add_(1)
        new = self.linear(given.x).tanh()
        if self.how == "list":
            given.parts.append(new)
        elif self.how == "inner":
            given.inner.x = new
        return Graph(new)


@pytest.mark.parametrize("how", ["tensor", "list", "inner"])
def test_what_is_edited_deep_inside_an_object_is_refused(how):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body = nn.Linear(4, 4), nn.Sequential(Edits(how))

        def forward(self, x):
            graph = Graph(self.stem(x) * 1)
            graph.parts, graph.inner = [graph.x], Graph(graph.x * 1)
            return self.body(graph).x

    with pytest.raises(
        RuntimeError, match="that begins with Edits edits its input in place, or what an object"
    ):
        equal_gradients(Net, {"body": 1})


@torch.jit.script
def scripted(x):
    return torch.tanh(x) * x


class ScriptedFunction(nn.Module):
    def forward(self, x):
        return scripted(x)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "last",
    [
        lambda: torch.jit.script(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh())),
        lambda: torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)),
        ScriptedFunction,
    ],
    ids=["scripted", "traced", "function"],
)
def test_blocks_of_torchscript(last, size):
    def make():
        torch.manual_seed(0)
        return Around(nn.Linear(4, 4), last(), nn.Dropout(0.5), last())

    with torch.jit.optimized_execution(False):  # else it computes otherwise after the first runs
        equal_gradients(make, {"body": size})


class Hooks(nn.Module):
    """Its forward puts hooks on what it is given and on its parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.register_hook(lambda grad: grad + 1)

    def forward(self, x):
        x.register_hook(lambda grad: grad * 0.1)
        self.linear.weight.register_hook(lambda grad: grad * 0.1)
        return self.linear(x).tanh()


class HooksAnew(nn.Module):
    """Each forward takes off the hook of the one before."""

    def __init__(self):
        super().__init__()
        self.linear, self.handle = nn.Linear(4, 4), None

    def forward(self, x):
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.linear.weight.register_hook(lambda grad: grad * 0.1)
        return self.linear(x).tanh()


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), []

    def forward(self, x):
        y = self.linear(x).relu()
        self.seen.append(y)
        return sum(self.seen[-1:])


class Binary(nn.Linear):
    """It puts back its weight after its last operation that saves something."""

    def forward(self, x):
        full, self.weight.data = self.weight.data, self.weight.data.sign()
        y = super().forward(x).clone()
        self.weight.data = full
        return y


class HooksForAWhile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        handle = self.linear.register_forward_hook(lambda module, args, output: output * 2)
        y = self.linear(x)
        handle.remove()
        assert not self.linear._forward_hooks
        return y


class DoublePrecision(nn.Module):
    def forward(self, x):
        torch.set_default_dtype(torch.float64)
        y = x * torch.ones(4)
        torch.set_default_dtype(torch.float32)
        return y.float()


class Tries(nn.Module):
    """It has another way where the first one fails."""

    def forward(self, x):
        try:
            return x * x.sin()
        except Exception:
            return x


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "kind", [Hooks, HooksAnew, Lists, lambda: Binary(4, 4), HooksForAWhile, DoublePrecision, Tries]
)
def test_what_a_block_does_besides_is_done_once_or_to_the_end(kind, size):
    def make():
        torch.manual_seed(0)
        return Around(kind(), nn.Tanh(), kind())

    _, want, got = both(make, torch.randn(2, 3, 4), {"body": size})
    assert equal(want, got)
    assert torch.get_default_dtype() == torch.float32


class Down(nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.linear, self.skips = nn.Linear(4, 4), skips

    def forward(self, x):
        y = self.linear(x).relu()
        self.skips.append(y)
        return y


class UNet(nn.Module):
    """What goes down is kept in a list, and taken from it on the way up."""

    def __init__(self):
        super().__init__()
        self.skips = []
        self.body, self.up = nn.Sequential(Down(self.skips), Down(self.skips)), nn.Linear(4, 4)

    def forward(self, x):
        y = self.body(x)
        while self.skips:
            y = self.up(y + self.skips.pop())
        return y


@pytest.mark.parametrize("size", [1, 2])
def test_what_blocks_hand_on_in_a_list_is_there_once(size):
    plain, want, got = both(UNet, torch.randn(3, 2, 4), {"body": size})
    assert equal(want, got)
    assert plain.skips == []


class Stop(BaseException):
    """Ends a forward, from a hook that stays."""


@pytest.mark.parametrize("error", [Stop, ValueError])
def test_a_forward_that_a_hook_ends_ends_there_again(error):
    def gradients(context):
        torch.manual_seed(0)
        model, found = Around(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []

        def end(module, args):
            found.append(args[0])
            raise error

        model.body[2].register_forward_pre_hook(end)
        with context(model), contextlib.suppress(error):
            model(torch.ones(3, 4))
        found[0].square().sum().backward()
        return [model.body[0].weight.grad, model.stem.weight.grad]

    expected = gradients(lambda model: contextlib.nullcontext())
    assert equal(expected, gradients(lambda model: checkpoint_segments(model, {"body": 3})))


def test_another_error_after_a_forward_that_raised_is_not_lost():
    class Fails(nn.Module):
        def forward(self, x):
            if torch._C._current_graph_task_id() != -1:
                raise MemoryError("in recomputation")
            self.found = x.tanh()
            raise ValueError

    model = Around(nn.Linear(4, 4), Fails())
    with checkpoint_segments(model, {"body": 2}):
        with contextlib.suppress(ValueError):
            model(torch.ones(3, 4))
        with pytest.raises(MemoryError, match="in recomputation"):
            model.body[1].found.sum().backward()


def test_hooks_on_an_input_hold_once_in_every_backward():
    def gradients(context):
        torch.manual_seed(0)
        model, found = Around(Hooks(), Hooks()), []
        with context(model):
            loss = model(torch.ones(3, 4)).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
            found += [param.grad.clone() for param in model.parameters()]
        return found

    expected = gradients(lambda model: contextlib.nullcontext())
    assert equal(expected, gradients(lambda model: checkpoint_segments(model, {"body": 1})))


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="this PyTorch's checkpoint takes no jvp"
)
def test_forward_mode_derivatives_through_buffers_and_blocks_in_place():
    model, x = Around(nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4)).eval(), torch.randn(3, 4)
    expected = torch.func.jvp(model, (x,), (x,))
    for size in (1, 2):
        with checkpoint_segments(model, {"body": size}):
            assert equal(expected, torch.func.jvp(model, (x,), (x,)))


def patched(block):
    """As libraries do that wrap the forward of a layer: the new one is an attribute and knows the old one, of this layer."""
    forward = block.forward
    block.forward = lambda x: forward(x)
    return block


def compiled_by_itself(block):
    block.compile(backend="eager")
    return block


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("change", [patched, compiled_by_itself])
def test_blocks_whose_forward_was_replaced_or_compiled(change, size):
    torch._dynamo.reset()

    def make():
        torch.manual_seed(0)
        return Around(change(block(4)), nn.Dropout(0.5), change(nn.BatchNorm1d(4)), nn.Tanh())

    equal_gradients(make, {"body": size})
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "said",
    [
        "The following operation failed in the TorchScript interpreter.\nRuntimeError: mine",
        "mine, without a word after RuntimeError:",
    ],
)
def test_an_error_in_recomputation_that_looks_like_the_one_of_torchscript_is_not_lost(said):
    class Fails(nn.Module):
        def forward(self, x):
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(said)
            return x.tanh()

    model = Around(nn.Linear(4, 4), Fails())
    with checkpoint_segments(model, {"body": 2}), pytest.raises(RuntimeError, match=said):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("name", "message"), [("h", "close: 'inner.h'"), ("inner.h", "found ModuleList, whose owner calls")]
)
def test_a_module_list_is_refused_with_what_to_do_instead(name, message):
    model = nn.ModuleDict({"inner": nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 2)])})})
    with pytest.raises((KeyError, TypeError), match=message):
        checkpoint_segments(model, {name: 1})


def test_none_beside_a_tensor_at_the_border_of_an_in_place_block():
    class Pair(nn.Module):
        inplace = True

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair):
            x, nothing = pair
            assert nothing is None
            return self.linear(x.relu_()), None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body = nn.Linear(4, 4), nn.Sequential(Pair(), Pair())

        def forward(self, x):
            return self.body((self.stem(x), None))[0]

    equal_gradients(Net, {"body": 1})


def test_a_buffer_that_a_layer_registers_in_its_first_forward():
    class Late(nn.Module):
        def forward(self, x):
            if not hasattr(self, "scale"):
                self.register_buffer("scale", x.detach().abs().max().sin())
            self.scale = self.scale + 1
            return (x * self.scale).tanh()

    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Late(), nn.Linear(4, 4)))

    x = torch.randn(3, 4)
    plain, want, got = both(make, [x, x], {"1": 2})
    assert equal(want, got)
    assert plain[1][0].scale > 1


@pytest.mark.parametrize("size", [1, 4])
def test_what_a_block_hands_on_and_also_saves_may_be_edited_by_the_next(size):
    class Penalty(nn.Module):
        def forward(self, x):
            self.value = x.tanh().pow(2).mean()
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = nn.Linear(4, 4), Penalty(), nn.ReLU(inplace=True), nn.Linear(4, 1)
            self.body = nn.Sequential(nn.Linear(4, 4), *blocks)

        def forward(self, x):
            return self.body(x) + self.body[2].value

    equal_gradients(Net, {"body": size})


def first_steps(model, plan, x, between=lambda model: None):
    """Output, gradients and buffers after one step, with the plan and without; the handle goes before backward."""
    results = []
    for segmented in (False, True):
        own, own_x = copy.deepcopy(model), x.clone().requires_grad_()
        torch.manual_seed(1)
        with checkpoint_segments(own, plan) if segmented else contextlib.nullcontext():
            output = own(own_x)
        between(own)
        output.square().sum().backward()
        grads = [own_x.grad, *(parameter.grad for parameter in own.parameters())]
        flags = torch.tensor([parameter.requires_grad for parameter in own.parameters()])
        results.append([output, *(grad for grad in grads if grad is not None), *own.buffers(), flags])
    return results


def test_segments_inside_segments_are_computed_again_as_they_were():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner, nn.Linear(4, 4)))
    assert equal(*first_steps(model, {"1": 1, "1.0": 2}, torch.ones(2, 4)))
    assert type(inner) is nn.Sequential


@pytest.mark.parametrize("frozen_first", [True, False])
def test_parameters_frozen_or_thawed_before_backward(frozen_first):
    """As for a GAN, whose discriminator is switched on and off."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh()]
    model = nn.Sequential(nn.Sequential(*layers)).requires_grad_(not frozen_first)
    x = torch.randn(4, 4)
    plain, found = first_steps(model, {"0": 2}, x, lambda model: model.requires_grad_(frozen_first))
    assert equal(plain, found)
    assert plain[-1].tolist() == [frozen_first] * 2


def test_a_forward_that_takes_a_derivative_updates_its_buffers_once():
    class Force(nn.Module):
        def forward(self, x):
            return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Force()))
    plain, found = first_steps(model, {"0": 3}, torch.randn(8, 4))
    assert equal(plain, found)
    assert plain[-2] == 1  # num_batches_tracked


def test_the_first_forward_of_a_lazy_layer_draws_no_more_than_before():
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(8), nn.Dropout(), nn.Linear(8, 1)))
    results = []
    for plan in (None, {"0": 3}):
        torch.manual_seed(0)
        own = copy.deepcopy(model)
        grads = []
        with checkpoint_segments(own, plan) if plan else contextlib.nullcontext():
            for _ in range(2):  # in the second step it runs in segments
                own(torch.ones(2, 4)).sum().backward()
                grads += [parameter.grad.clone() for parameter in own.parameters()]
        results.append(grads)
    assert equal(*results)


def test_a_lazy_layer_that_is_never_called_costs_the_first_step_only():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(50, 50)
            self.unused = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

        def forward(self, x):
            return self.layer(x).tanh().sin().cos()

    model, held = nn.Sequential(nn.Sequential(Block(), Block())), []
    with checkpoint_segments(model, {"0": 1}):
        for _ in range(3):
            with saved_tensors(model) as saved:
                loss = model(torch.randn(10, 50)).sum()
            loss.backward()
            held.append(saved.unique_bytes - saved.parameter_bytes)
    assert held[0] > 2 * held[1] == 2 * held[2] == 8_000


def test_a_parameter_that_was_replaced_before_backward_keeps_its_flag():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    with checkpoint_segments(model, {"0": 2}):
        loss = model(torch.randn(4, 3)).sum()
        old = model[0][0].weight.requires_grad_(False)
        model[0][0].weight = nn.Parameter(old.detach().clone())
        loss.backward()
    assert not old.requires_grad
    assert model[0][0].weight.requires_grad


def test_a_parameter_that_was_taken_out_before_backward_stays_out():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    model[0][0].scale = nn.Parameter(torch.ones(1))  # the forward does not use it
    with checkpoint_segments(model, {"0": 2}):
        loss = model(torch.randn(4, 3)).sum()
        del model[0][0].scale
        loss.backward()
    assert dict(model.named_parameters()).keys() == {"0.0.weight", "0.0.bias"}


class Hyper(nn.Module):
    """A network whose weights another one computes: nothing of that is seen where it is called."""

    def __init__(self):
        super().__init__()
        self.weights, self.main = nn.Linear(3, 16), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        weight = self.weights(x[0, :3]).view(4, 4)
        return torch.func.functional_call(self.main, {"0.weight": weight}, (x,))


def adapted(model, x):
    """The loss after one step of gradient descent inside, as MAML takes it."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(model(x).square().mean(), list(named.values()), create_graph=True)
    fast = {name: param - 0.1 * grad for (name, param), grad in zip(named.items(), grads, strict=True)}
    return torch.func.functional_call(model, fast, (x,)).square().mean()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("how", ["maml", "hyper"])
def test_parameters_that_a_functional_call_gave_are_those_of_the_recomputation(how, size):
    def gradients(name):
        torch.manual_seed(0)
        model = nn.Sequential(Hyper()) if how == "hyper" else nn.Sequential(nn.Sequential(*blocks()))
        x = torch.randn(6, 4, requires_grad=True)
        with contextlib.nullcontext() if name is None else checkpoint_segments(model, {name: size}):
            loss = model(x).square().mean() if how == "hyper" else adapted(model, x)
            loss.backward()
        own = [*model.parameters()]
        assert all(isinstance(parameter, nn.Parameter) for parameter in own)
        return [x.grad, *(parameter.grad for parameter in own)]

    def blocks():
        return nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)

    for found, expected in zip(gradients("0.main" if how == "hyper" else "0"), gradients(None), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)


class Squared(nn.Module):
    def forward(self, weight):
        return weight * weight


def test_a_recomputation_among_what_parametrize_has_cached_since_then():
    def gradients(plan):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        parametrize.register_parametrization(model[0], "weight", Squared())
        with contextlib.nullcontext() if plan is None else checkpoint_segments(model, plan):
            loss = model(torch.randn(8, 8)).sum()
            with parametrize.cached():
                cached = model[0].weight
                loss.backward()
                assert model[0].weight is cached
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients({"": 2}), gradients(None)))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_what_parametrize_has_cached_is_cached_in_the_recomputation(inside, bias):
    def gradients(plan):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Tanh(), nn.Linear(8, 8, bias=bias), nn.Tanh())
        for layer in model[0], model[2]:
            parametrize.register_parametrization(layer, "weight", Squared())
        x = torch.randn(8, 8)
        with contextlib.nullcontext() if plan is None else checkpoint_segments(model, plan):
            with parametrize.cached():
                loss = (model(x) * model(x + 1)).sum()  # the weights are computed once
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        assert (parametrize._cache_enabled, parametrize._cache) == (0, {})
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients({"": 2}), gradients(None)))


class OwnParameter(nn.Parameter):
    pass


class OwnTensor(torch.Tensor):
    pass


@pytest.mark.parametrize("owned", [nn.Parameter, OwnParameter])
@pytest.mark.parametrize("given", [torch.Tensor, OwnTensor, OwnParameter])
def test_parameters_of_a_class_of_ones_own_are_those_of_the_forward(owned, given):
    def gradients(plan):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
        for layer in model[0], model[2]:
            layer.weight = owned(layer.weight.detach().clone())
        parameters = {
            name: (2 * parameter.detach()).as_subclass(given).requires_grad_()
            for name, parameter in model.named_parameters()
        }
        x = torch.randn(2, 3, requires_grad=True)
        with contextlib.nullcontext() if plan is None else checkpoint_segments(model, plan):
            loss = torch.func.functional_call(model, parameters, (x,)).sum()
        loss.backward()
        assert type(model[0].weight) is owned
        return [x.grad, *(parameter.grad for parameter in parameters.values())]

    assert all(map(torch.equal, gradients({"": 2}), gradients(None)))
