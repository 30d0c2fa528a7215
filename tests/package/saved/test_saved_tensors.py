"""`saved_tensors`: what autograd saves, counted and named, and freed again."""

import contextlib
import copy
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from functools import partial

import pytest
import torch
from models import Careful, mlp
from torch import nn
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hooklab import checkpoint_segments, draw, no_leftovers, saved_tensors, trace

names_nodes = pytest.mark.skipif(
    not hasattr(graph, "node_creation_hook"), reason="this PyTorch does not show Nodes as they are created"
)


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


# ---- what is recorded ----


@names_nodes
def test_every_saved_tensor_has_its_operation_shape_dtype_and_bytes():
    a, b = leaf(3), leaf(3)
    with saved_tensors() as saved:
        (a * b).exp()
    assert [(one.operation, one.shape, one.dtype, one.bytes) for one in saved] == [
        ("MulBackward0", (3,), torch.float32, 12),
        ("MulBackward0", (3,), torch.float32, 12),
        ("ExpBackward0", (3,), torch.float32, 12),
    ]


@names_nodes
def test_shapes_and_dtypes_are_those_of_the_tensor():
    double, bfloat = leaf(2, 3, 4).double(), leaf(5).bfloat16()
    mask, index = torch.ones(4, 1, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64)
    with saved_tensors() as saved:
        double.exp(), bfloat.sin(), leaf(4, 6).masked_fill(mask, 0), leaf(2, 3).gather(1, index)
        torch.view_as_complex(leaf(3, 2)).square()
    found = {(one.shape, one.dtype, one.bytes) for one in saved}
    assert {
        ((2, 3, 4), torch.float64, 24 * 8),
        ((5,), torch.bfloat16, 10),
        ((4, 1), torch.bool, 4),
        ((2, 3), torch.int64, 48),
        ((3,), torch.complex64, 24),
    } <= found


@names_nodes
@pytest.mark.parametrize(
    ("compute", "operations"),
    [
        (lambda x: x + 1, []),
        (lambda x: x.relu(), ["ReluBackward0"]),
        (lambda x: nn.functional.relu(x * 2, inplace=True), ["ReluBackward0"]),
        (lambda x: x.softmax(0).log(), ["SoftmaxBackward0", "LogBackward0"]),
        (lambda x: Twice.apply(x), ["TwiceBackward"]),
        (lambda x: nn.functional.linear(x[None], torch.ones(2, 3)), ["MmBackward0"]),
        (lambda x: torch._foreach_exp([x]), ["ForeachExpBackward0"]),
        (lambda x: Named.apply(x), ["NamedBackward"]),
    ],
)
def test_operations_are_named_by_the_node_that_saves(compute, operations):
    with saved_tensors() as saved:
        compute(leaf(3))
    assert [one.operation for one in saved] == operations


class Named(torch.autograd.Function):
    """Its `ctx.name` hides the method of every Node."""

    @staticmethod
    def forward(ctx, x):
        ctx.name = "mine"
        ctx.save_for_backward(x)
        return x.clone()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_without_the_hook_of_new_nodes_backward_tells_the_operation(monkeypatch):
    monkeypatch.delattr(graph, "node_creation_hook", raising=False)
    x = leaf(3)
    with saved_tensors() as saved:
        y = x.exp().sin()
    assert {one.operation for one in saved} == {""}
    y.sum().backward()
    assert [one.operation for one in saved] == ["ExpBackward0", "SinBackward0"]


def test_a_parameter_that_no_model_names_is_called_parameter():
    x = leaf(1, 2)
    with saved_tensors() as saved:
        nn.Linear(2, 2)(x).sum()
    assert sorted(record.owner for record in saved) == ["", "parameter"]
    assert (saved.parameter_bytes, saved.unique_bytes) == (16, 24)


def test_modules_are_named_from_the_inside():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Sigmoid()))
    with saved_tensors(model) as saved:
        model(leaf(1, 2)).exp()
    assert [one.module for one in saved] == ["0", "0", "1.0", "1.1", ""]


def test_a_forward_that_raises_leaves_the_names_right():
    class Fails(nn.Module):
        def forward(self, x):
            x.exp()
            raise ValueError("no")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Fails(), nn.Tanh()

        def forward(self, x):
            try:
                self.first(x)
            except ValueError:
                return self.second(x)

    model = Model()
    with saved_tensors(model) as saved:
        model(leaf(2))
    assert [one.module for one in saved] == ["first", "second"]


def test_parameters_and_buffers_are_named_also_behind_views():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    with saved_tensors(model) as saved:
        model(torch.randn(5, 3))
    owners = sorted(one.owner for one in saved if one.owner)
    assert owners == ["2.weight", "3.running_mean", "3.running_var", "3.weight"]
    assert saved.parameter_bytes == 4 * 2 * 4 + 3 * 2 * 4


def test_bytes_are_counted_once_for_each_memory():
    x = leaf(100)
    with saved_tensors() as saved:
        y = x.exp()  # saves its result
        y.sin() + y.cos()  # save it again, twice
    assert (len(saved), saved.total_bytes, saved.unique_bytes) == (3, 1200, 400)
    assert len({one.storage for one in saved}) == 1


def test_a_slice_is_counted_with_the_memory_that_it_keeps_alive():
    base, x = torch.randn(1000), leaf(10)
    with saved_tensors() as saved:
        x * base[:10]
    assert (saved.total_bytes, saved.unique_bytes) == (40, 4000)


def test_an_expanded_tensor_needs_more_as_a_copy_than_in_memory():
    x = leaf(1000)
    with saved_tensors() as saved:
        x * torch.ones(1).expand(1000)
    assert (saved.total_bytes, saved.unique_bytes) == (4000, 4)


def test_versions_are_noted():
    x = leaf(3)
    with saved_tensors() as saved:
        y = x * 1.0
        y.sin()
        y.add_(1)
        y.sin()
    assert [one.version for one in saved] == [0, 1]
    assert saved.unique_bytes == 12


def test_a_memory_that_is_used_again_is_another_one():
    x = leaf(1000)
    with saved_tensors() as saved:
        for _ in range(20):
            x.exp()  # dropped at once: the next takes its place
    assert len({one.storage for one in saved}) == 20
    assert max(saved.held) == 4000


@pytest.mark.parametrize(
    ("layout", "bytes"),
    [
        (torch.sparse_coo, 2 * 3 * 8 + 12),
        (torch.sparse_csr, 4 * 8 + 3 * 8 + 12),
        (torch.sparse_csc, 4 * 8 + 3 * 8 + 12),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_counted_with_their_indices(layout, bytes):
    sparse, dense = torch.eye(3).to_sparse(layout=layout).requires_grad_(), leaf(3, 3)
    with saved_tensors() as saved:
        torch.sparse.mm(sparse, dense)
    assert sorted(one.bytes for one in saved) == sorted([36, bytes])


def test_resnet152_at_batch_256_is_counted_on_the_meta_device():
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model, x = torchvision.models.resnet152(weights=None), torch.empty(256, 3, 224, 224)
    with saved_tensors(model) as saved:
        model(x)
    # Counted independently: every output and input by the shapes of the network.
    assert saved.total_bytes == pytest.approx(68.76e9, rel=1e-3)
    assert saved.unique_bytes == pytest.approx(45.66e9, rel=1e-3)
    assert saved.parameter_bytes == pytest.approx(0.241e9, rel=1e-2)


# ---- nothing changes ----


def test_gradients_are_the_same_bit_for_bit():
    torch.manual_seed(0)
    model, x = mlp(8, 16, 4), torch.randn(6, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with saved_tensors(model) as saved:
        loss = model(x).sum()
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, expected, found))
    assert len(saved) > 0


def test_an_edit_in_place_still_raises():
    x = leaf(5)
    with saved_tensors():
        y = x.exp()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*at version 1; expected version 0"):
        y.sum().backward()


def test_no_hook_stays_also_after_an_error():
    model = mlp(4, 5, 2)
    with no_leftovers(model):
        with pytest.raises(ZeroDivisionError), saved_tensors(model):
            model(torch.ones(1, 4)).sum() / (1 // 0)
        with saved_tensors(model):
            model(torch.ones(1, 4))
    seen = []
    with graph.saved_tensors_hooks(lambda t: seen.append(t) or t.detach(), lambda t: t):
        leaf(3).exp()
    assert len(seen) == 1


def test_graph_and_memory_go_without_gc():
    gc.collect()
    gc.disable()
    try:
        x = leaf(1000)
        with saved_tensors() as saved:
            y = x.exp()
        memory = weakref.ref(y.untyped_storage())
        del y
        assert memory() is None
        assert saved.held == [4000, 0]
        reference = weakref.ref(saved)
        del saved
        assert reference() is None
    finally:
        gc.enable()


def test_other_threads_are_not_recorded():
    model = mlp(4, 5, 2)
    with saved_tensors(model) as saved:
        thread = threading.Thread(target=lambda: model(torch.ones(3, 4)))
        thread.start()
        thread.join()
        model(torch.ones(3, 4))
    expected = saved_tensors(model)
    with expected:
        model(torch.ones(3, 4))
    assert [one.module for one in saved] == [one.module for one in expected]


def test_what_a_checkpoint_saves_inside_is_not_seen_its_input_is():
    model, x = mlp(4, 5, 2), leaf(3, 4)
    with saved_tensors(model) as saved:
        y = checkpoint(model, x, use_reentrant=False)
    assert [one.bytes for one in saved if one.bytes] == [x.nbytes]  # older versions save an empty one too
    y.sum().backward()


@names_nodes
def test_the_input_of_a_checkpoint_is_saved_by_no_node():
    x = leaf(3)
    with saved_tensors() as saved:
        y = checkpoint(torch.tanh, x, use_reentrant=False).exp()
    assert [one.operation for one in saved if one.bytes] == ["", "ExpBackward0"]
    y.sum().backward()
    assert saved[0].operation == ""


def test_nested_meters_both_see_and_trace_too():
    x = leaf(3)
    with trace(x=x) as events, saved_tensors() as outer, saved_tensors() as inner:
        y = x.exp()
    y.sum().backward()
    assert len(outer) == len(inner) == 1
    assert [event.kind for event in events.events if event.kind == "pack"] == ["pack"]
    assert torch.equal(x.grad, x.detach().exp())


def test_compiled_models_are_counted():
    torch._dynamo.reset()
    model = mlp(4, 5, 2)
    compiled = torch.compile(model, backend="aot_eager")
    with saved_tensors(model) as saved:
        y = compiled(torch.ones(3, 4))
    assert saved.total_bytes > 0
    y.sum().backward()
    torch._dynamo.reset()


# ---- what is held ----


def test_what_is_held_grows_in_forward_and_shrinks_in_backward():
    x = leaf(100)
    with saved_tensors() as saved:
        y = x.exp().tanh().sigmoid()
    assert saved.held == [400, 800, 1200]
    y.sum().backward()
    assert saved.held == [400, 800, 1200, 800, 400, 0]
    assert [event for _, event in saved.events] == ["saved"] * 3 + ["freed"] * 3


def test_memory_shared_by_two_saves_is_let_go_with_the_second():
    x = leaf(100)
    with saved_tensors() as saved:
        y = x.exp().sin()
    y.sum().backward()
    assert saved.held == [400, 400, 400, 0]


def test_parameters_are_not_held():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    with saved_tensors(model) as saved:
        y = model(torch.ones(2, 3))
    assert max(saved.held) == 2 * 24
    y.sum().backward()
    assert saved.held[-1] == 0


def test_with_retain_graph_nothing_is_let_go():
    x = leaf(100)
    with saved_tensors() as saved:
        y = x.exp().sum()
    y.backward(retain_graph=True)
    assert saved.held == [400]
    y.backward()
    assert saved.held == [400, 0]


# ---- what a checkpoint recomputes ----


class Live(TorchDispatchMode):
    """Counts the memory of all tensors that operations make while they are alive, and knows of no saved tensor."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            storage = tensor.untyped_storage()
            if storage not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage.nbytes())
        return result

    def gone(self, nbytes):
        self.now -= nbytes


def sixteen_blocks():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16)])


def in_segments(model, x, blocks):
    with checkpoint_segments(model, {"": blocks}):
        return model(x)


RUNS = {
    "plain": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "segments of 16": lambda model, x: in_segments(model, x, 16),
    "segments of 4": lambda model, x: in_segments(model, x, 4),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_held_at_most_is_the_peak_of_the_memory_also_with_a_checkpoint(name):
    model, x = sixteen_blocks(), torch.randn(1024, 64, requires_grad=True)
    with Live() as live:
        RUNS[name](model, x).sum().backward()
    with saved_tensors(model) as saved:
        loss = RUNS[name](model, x).sum()
    loss.backward()
    activation = (
        x.nbytes
    )  # 0.25 MiB, as all others; the result and the gradients of a block are alive beside what is held
    assert max(saved.held) <= live.peak + activation <= max(saved.held) + 3.1 * activation
    assert saved.held[-1] == 0
    assert max(saved.held) == activation * {"segments of 4": 11}.get(name, 32)


def test_what_is_recomputed_counts_until_backward_has_used_it():
    model, x = nn.Sequential(nn.Tanh(), nn.Sigmoid()), leaf(100)
    with saved_tensors(model) as saved:
        y = checkpoint(model, x, use_reentrant=False)
    assert saved.held[-1] == 400
    y.sum().backward(retain_graph=True)
    for _ in range(2):  # the second backward recomputes once more
        assert saved.events[-4:] == [
            ("0", "recomputed"), ("1", "recomputed"), ("1", "freed"), ("0", "freed"),
        ]  # fmt: skip
        assert saved.held[-4:] == [800, 1200, 800, 400]
        y.sum().backward(retain_graph=True)
    del y
    assert saved.held[-1] == 0
    assert len([one for one in saved if one.bytes]) == 1  # the input


def test_gradients_under_a_checkpoint_are_the_same_bit_for_bit_and_no_hook_stays():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()), leaf(8, 4)
    grads = []
    for watched in (contextlib.nullcontext, lambda: saved_tensors(model)):
        torch.manual_seed(1)
        with no_leftovers(model), watched():
            checkpoint(model, x, use_reentrant=False).sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        x.grad, _ = None, model.zero_grad()
    assert all(map(torch.equal, *grads))


def test_two_records_count_the_same_recomputation():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(8, 4)
    with saved_tensors(model) as outer, saved_tensors(model) as inner:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert outer.held == inner.held
    assert max(outer.held) == 2 * x.nbytes


def test_a_selective_checkpoint_passes_on_what_it_keeps():
    mm = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(8, 4)
    options = {"use_reentrant": False, "respect_saved_tensors_hooks": True}
    if "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters:
        pytest.skip("since PyTorch 2.14")
    with saved_tensors(model) as saved:
        y = checkpoint(model, x, context_fn=partial(create_selective_checkpoint_contexts, mm), **options)
    assert [record.bytes for record in saved if record.bytes] == [x.nbytes, x.nbytes]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(model(x).sum(), x)[0])


def test_an_interruption_inside_a_checkpoint_leaves_no_hook():
    def interrupt(*args):
        raise KeyboardInterrupt

    model = mlp(2, 3, 1)
    with (
        no_leftovers(model),
        pytest.raises(KeyboardInterrupt),
        saved_tensors(model),
        model[1].register_forward_hook(interrupt),
    ):
        checkpoint(model, leaf(4, 2), use_reentrant=False)


@names_nodes
def test_what_a_checkpoint_saves_outside_the_model_is_said_to_be_missing():
    model, x = mlp(2, 3, 1), leaf(4, 2)
    with saved_tensors(model) as complete:
        checkpoint(lambda x: model(x) + 1, x, use_reentrant=False)
    with saved_tensors(model) as partial:
        y = checkpoint(lambda x: model(x).exp(), x, use_reentrant=False)
    y.sum().backward()
    assert (complete.misses_recomputation, partial.misses_recomputation) == (False, True)
    assert "not counted: what a checkpoint recomputes outside the model's layers" in draw.memory(partial).facts


# ---- the table ----


@names_nodes
def test_the_table_has_a_line_for_each_module_and_the_totals():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with saved_tensors(model) as saved:
        model(torch.ones(3, 4)).exp()
    assert saved.table() == "\n".join(
        [
            "module  saved by  tensors  bytes  new bytes",
            "0       Addmm           1     48         48",
            "1       Relu            1     96         96",
            "2       Addmm           2    128          0",
            "-       Exp             1     12         12",
            "total                   5    284        156",
        ]
    )


def test_what_no_operation_has_saved_has_a_dash_in_the_table():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    with saved_tensors(model) as saved:
        checkpoint(model, leaf(3, 4), use_reentrant=False)
    header, line, total = saved.table().splitlines()
    assert header.split() == ["module", "saved", "by", "tensors", "bytes", "new", "bytes"]
    count = str(len(saved))  # of PyTorch 2.11 two: its checkpoint saves a tensor without elements as well
    assert line.split() == ["-", "-", count, "48", "48"]
    assert total.split() == ["total", count, "48", "48"]


# ---- bad input ----


def test_something_that_is_no_module_is_refused():
    with pytest.raises(TypeError, match="saved_tensors: expected a module, found Tensor"):
        saved_tensors(torch.ones(3))


def test_a_block_cannot_be_opened_twice_at_a_time():
    saved = saved_tensors()
    with saved, pytest.raises(RuntimeError, match="this block is open already"):
        saved.__enter__()
    with saved:
        leaf(3).exp()
    assert len(saved) == 1


def test_a_model_that_is_not_called_is_announced():
    with (
        pytest.warns(UserWarning, match="nothing of the model was saved for backward by this block"),
        saved_tensors(nn.Linear(2, 2)),
    ):
        pass


def test_a_block_ends_without_a_warning_where_something_was_saved_or_nothing_is_expected():
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with saved_tensors(model) as saved:
            model(torch.ones(1, 2))
        with saved_tensors(), torch.no_grad():
            model(torch.ones(1, 2))
    assert len(saved) == 1


# ---- what once went wrong ----


def test_a_pre_hook_that_raises_and_is_handled_does_not_disturb_the_names():
    net = Careful()
    with saved_tensors(net) as saved:
        net(torch.ones(1, 2))
    assert list(dict.fromkeys(record.module for record in saved)) == ["second", "Careful"]


def test_the_owner_of_a_memory_is_the_same_for_all_that_lies_in_it():
    p, x = nn.Parameter(torch.ones(1000)), torch.ones(1000, requires_grad=True)
    with saved_tensors() as saved:
        first, second = (p * 2.0).mul(p), x * p.detach()
    del first
    del second  # it goes last, and does not know that the memory is a parameter's
    assert min(saved.held) == saved.held[-1] == 0


def test_nested_tensors_are_recorded():
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    for layout in (torch.jagged, torch.strided):
        x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        with saved_tensors() as saved:
            y = x * x
        assert saved.total_bytes == 2 * 18 * 4, layout
        del y


@names_nodes
@pytest.mark.parametrize("inner", [lambda model: trace(model), lambda model: saved_tensors(model)])
def test_tools_opened_inside_that_pass_tensors_on_hide_no_operation(inner):
    model = mlp(2, 3, 1)
    with saved_tensors(model) as alone:
        model(leaf(4, 2))
    with saved_tensors(model) as saved, inner(model):
        model(leaf(4, 2))
    assert [record.operation for record in saved] == [record.operation for record in alone]
    assert all(record.operation for record in saved)


@names_nodes
@pytest.mark.parametrize("edit", [lambda a, b: a.mul_(b), lambda a, b: a.div_(b), lambda a, b: a[0:2].mul_(b[0:2])])
def test_what_an_operation_in_place_saves_is_its_own(edit):
    a, b = leaf(3) * 1, leaf(3)
    with saved_tensors() as saved:
        result = edit(a, b)
    names = {record.operation for record in saved}
    assert len(saved) == 2
    assert names <= {type(result.grad_fn).__name__, "CopySlices", type(a.grad_fn).__name__}
    assert not names & {"CloneBackward0", "AsStridedBackward0", ""}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_counted_each_time_it_is_saved(layout):
    sparse, dense = torch.eye(3).to_sparse(layout=layout), leaf(3, 3)
    with saved_tensors() as saved:
        for _ in range(2):
            torch.sparse.mm(sparse, dense)
    assert len({record.storage for record in saved}) == len(saved) == 2
    assert saved.total_bytes == saved.unique_bytes > 0


@names_nodes
def test_what_a_failed_operation_saved_has_no_name():
    a, b = leaf(2, 3), leaf(2, 3)
    with saved_tensors() as saved:
        with pytest.raises(RuntimeError):
            a @ b
        a * b
    assert [record.operation for record in saved] == ["", "", "MulBackward0", "MulBackward0"]


def test_a_record_does_not_keep_the_model_alive():
    gc.collect()
    gc.disable()
    try:
        for error in (None, ValueError("stop")):
            model = mlp(4, 5, 2)
            with contextlib.suppress(ValueError), saved_tensors(model) as saved:
                loss = model(torch.ones(3, 4)).sum()
                if error:
                    raise error
            alive = weakref.ref(model)
            del model, loss
            assert alive() is None
            assert len(saved) == 4
    finally:
        gc.enable()


def test_a_model_that_is_watched_can_be_copied_and_pickled_and_the_copy_records_nothing():
    model = mlp(4, 5, 2)
    with saved_tensors(model) as saved:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        before = len(saved)
        with saved_tensors() as own:
            for other in copies:
                other(torch.ones(3, 4))
        assert {record.module for record in saved[before:]} == {""}
    assert len(own) == 8


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda saved: pickle.loads(pickle.dumps(saved))])
def test_a_record_can_be_copied_and_pickled_also_inside_the_block(copied):
    model = mlp(2, 3)
    with saved_tensors(model) as saved:
        loss = model(torch.ones(1, 2)).sum()
        inside = copied(saved)
    loss.backward()
    other = copied(saved)
    assert (other.table(), other.held, repr(other)) == (saved.table(), saved.held, repr(saved))
    assert len(inside) == len(saved)


def test_a_result_in_an_attribute_of_the_model_keeps_neither_alive():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with saved_tensors(model) as saved:
        model.loss = model(torch.ones(2, 3)).sum()
    assert len(saved) > 0
    del saved
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_the_records_do_not_keep_the_hooks_around_the_block(monkeypatch):
    monkeypatch.delattr(graph, "node_creation_hook", raising=False)  # nothing that was saved gets a name
    around = nn.Linear(3, 3)

    def pack(tensor, around=around):
        return tensor.detach()

    with graph.saved_tensors_hooks(pack, lambda tensor: tensor), saved_tensors() as saved:
        leaf(3).exp()
    alive = weakref.ref(around)
    del pack, around
    gc.collect()
    assert len(saved) == 1
    assert alive() is None


def test_in_a_notebook_it_is_its_table_and_for_pandas_a_row_for_each_module():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with saved_tensors(model) as saved:
        model(torch.ones(3, 4))
    html = saved._repr_html_().replace(' style="text-align: left"', "")
    assert html.count("<tr>") == 4  # names of the columns, two modules, total
    assert "<td>total</td>" in html
    frame = saved.to_dataframe()
    assert list(frame.columns) == ["module", "saved by", "tensors", "bytes", "new bytes"]
    assert frame["bytes"].tolist() == [48, 96]


def test_the_short_form_gives_the_three_totals():
    model = nn.Linear(2, 3)
    with saved_tensors(model) as saved:
        model(torch.ones(4, 2, requires_grad=True))
    text = "SavedTensors(2 tensors, 56 bytes, 56 of them unique, 24 in parameters and buffers)"
    assert repr(saved) == text


def test_after_an_error_nothing_is_said_of_what_was_not_saved():
    with warnings.catch_warnings(), pytest.raises(ValueError, match="stop"):
        warnings.simplefilter("error")
        with saved_tensors(nn.Linear(2, 3)):
            raise ValueError("stop")


class Replaces(nn.Module):
    """Replaces its buffer in every forward, or the memory behind it."""

    def __init__(self, memory_only):
        super().__init__()
        self.memory_only = memory_only
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        mean = 0.9 * self.mean + 0.1 * x.detach()
        if self.memory_only:
            self.mean.data = mean
        else:
            self.mean = mean
        return (x - self.mean).tanh()


@pytest.mark.parametrize("memory_only", [True, False])
def test_what_takes_the_place_of_a_dead_buffer_is_no_buffer(memory_only):
    model = nn.Sequential(*[Replaces(memory_only) for _ in range(10)])
    for _ in range(3):
        with saved_tensors(model) as saved:
            loss = model(torch.ones(8, requires_grad=True)).sum()
        assert (saved.parameter_bytes, max(saved.held)) == (0, 320)  # the results of tanh
        loss.backward()
