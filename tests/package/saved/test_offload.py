"""`Offload`: the same gradients bit for bit, whatever is saved, and nothing left when the graph is gone."""

import contextlib
import copy
import functools
import gc
import io
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from counting_store import CountingStore
from fake_device import SlowDevice, SlowMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from models import mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooklab import Offload, no_leftovers, saved, saved_tensors
from hooklab._support.packing import outer_hooks
from hooklab.saved.queue import Geometry, Packed
from hooklab.stores import Disk

EVERYTHING = 10**12


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["memory", "disk"])
def store(request):
    return CountingStore() if request.param == "memory" else "disk"


def gradients(compute, tensors, context):
    """Of the sum of what `compute` returns; and what was saved, as autograd would show it."""
    for tensor in tensors:
        tensor.grad = None
    with context:
        y = compute(*tensors)
    (y.abs() if y.is_complex() else y).sum().backward()
    return [tensor.grad.clone() for tensor in tensors if tensor.requires_grad]


def same(compute, *tensors, to=None, **options):
    """Asserts equal gradients with everything moved, and that something was; returns the context."""
    expected = gradients(compute, tensors, contextlib.nullcontext())
    offload = Offload(to=CountingStore() if to is None else to, **{"min_bytes": 0} | options)
    found = gradients(compute, tensors, offload)
    assert all(map(equal_bits, expected, found))
    if "keep" not in options:
        assert offload.moved_bytes > 0
    return offload


def equal_bits(left, right):
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right))
    return torch.equal(left, right)


def nothing_lies_ready(offload):
    return offload._queue.ahead.used == offload._queue.again.used == 0


def leaf(*shape, **options):
    return torch.randn(*shape, **options).requires_grad_()


# ---- what is moved ----


def test_what_is_saved_twice_is_moved_once():
    offload = same(lambda x: x * x, leaf(10))
    assert offload.moved_bytes == 40
    store = CountingStore()
    same(lambda x: (x.exp() + 1).relu() * x.exp().relu(), leaf(10), to=store)
    assert store.reads == store.writes  # read once as well, though used twice


@pytest.mark.parametrize("room", [1, 40, 79])
def test_what_is_saved_three_times_is_read_once_also_where_there_is_room_for_it_alone(room):
    def compute(x):
        y = x.exp()
        return y.sin() + y.cos()

    store = CountingStore()
    offload = same(compute, leaf(10), to=store, prefetch=room)
    assert (offload.moved_bytes, store.reads) == (40, 1)


def test_the_output_of_relu_is_also_the_input_of_the_next_layer():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(5, 4)
    with Offload(model, to=CountingStore(), min_bytes=0) as offload:
        y = model(x)
    assert offload.moved_bytes == x.nbytes + 5 * 6 * 4
    assert y.requires_grad


def test_parameters_and_buffers_stay_also_as_views():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(3, 4)
    store = CountingStore()
    with Offload(model, to=store, min_bytes=0) as offload:
        y = model(x)
    moved = x.nbytes + y.nbytes  # the inputs of both layers; not weight.t(), not running_mean
    assert (offload.moved_bytes, offload.kept_bytes) == (moved, 0)
    y.sum().backward()


def test_without_a_model_parameters_are_recognised_and_their_views():
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4).requires_grad_()
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        product = layer(x) * layer.bias
    assert offload.moved_bytes == x.nbytes + product.nbytes  # not weight.t(), not bias


def test_a_parameter_of_another_storage_after_moving_the_model_is_recognised():
    model = nn.Linear(4, 4)
    offload = Offload(model, to=CountingStore(), min_bytes=0)
    model.weight.data = model.weight.data.clone()
    with offload:
        y = model(torch.ones(2, 4))
    assert offload.moved_bytes == 2 * 4 * 4
    assert y.requires_grad


def test_small_tensors_stay_and_are_counted():
    x = leaf(100)
    with Offload(to=CountingStore(), min_bytes=401) as offload:
        y = x.exp()
    assert (offload.moved_bytes, offload.kept_bytes) == (0, 400)
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_a_small_slice_of_a_large_memory_moves_and_lets_the_memory_go():
    base = torch.randn(1000, 1000)
    reference = weakref.ref(base.untyped_storage())
    x = leaf(10)
    with Offload(to=CountingStore()) as offload:
        y = x * base[3, :10]
    expected = base[3, :10].clone()
    del base
    assert reference() is None
    assert offload.moved_bytes == 40
    y.sum().backward()
    assert torch.equal(x.grad, expected)


def test_the_newest_may_stay():
    x = leaf(10)
    with Offload(to=CountingStore(), min_bytes=0, keep=80) as offload:
        y = x.exp().sin().cos().tanh()
    # saved: exp(x), sin(.), tanh(.): each 40 bytes; the first moved
    assert offload.moved_bytes == 40
    assert offload.kept_bytes == 80
    y.sum().backward()


def test_what_may_stay_is_counted_with_the_whole_memory_that_a_slice_keeps():
    w, memories, products = leaf(10), [], []
    with Offload(to=CountingStore(), min_bytes=0, keep=1_000) as offload:
        for _ in range(5):
            table = torch.ones(100, 10)
            memories.append(weakref.ref(table.untyped_storage()))
            products.append(w * table[0])
            del table
    assert sum(memory() is not None for memory in memories) == 0
    assert (offload.moved_bytes, offload.kept_bytes) == (5 * 40, 0)
    torch.stack(products).sum().backward()
    assert torch.equal(w.grad, torch.full((10,), 5.0))


def test_a_memory_that_several_slices_share_counts_once():
    w, memories = leaf(10), []
    with Offload(to=CountingStore(), min_bytes=0, keep=2 * 4_000) as offload:
        for _ in range(3):
            table = torch.ones(100, 10)
            memories.append(weakref.ref(table.untyped_storage()))
            w = (w * table[0]) * table[1] * table[2]
            del table
    assert [memory() is not None for memory in memories] == [False, True, True]
    assert offload.moved_bytes > 0
    assert offload._queue.waiting.used <= 2 * 4_000
    w.sum().backward()
    assert offload._queue.waiting.used == 0
    assert dict(offload._queue.memories) == {}


@pytest.mark.parametrize("keep", [0, 100, 2_500, EVERYTHING])
def test_gradients_are_the_same_at_every_budget(keep, store):
    model = mlp(8, 16, 4)
    x = torch.randn(32, 8)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with Offload(model, to=store, keep=keep, min_bytes=0) as offload:
        loss = model(x).sum()
    loss.backward()
    assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))
    assert (offload.moved_bytes > 0) == (keep < EVERYTHING)
    assert offload.moved_bytes + offload.kept_bytes == x.nbytes + 32 * 16 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_to_cpu_without_a_gpu_passes_through_and_says_so():
    x = leaf(1000)
    with Offload(min_bytes=0) as offload:
        y = x.exp().sin()
    assert (offload.moved_bytes, offload.kept_bytes) == (0, 4000)
    y.sum().backward()


def test_pinned_memory_is_pinned_once_for_all_steps(monkeypatch):
    pinned, device = [], SlowDevice()

    def memory():
        one = SlowMemory(device)
        one._pinned = lambda nbytes: pinned.append(nbytes) or device.pinned(nbytes)
        return one

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(saved, "PinnedMemory", memory)
    saved._pinned.cache_clear()
    try:
        x = leaf(1000)
        for _ in range(3):
            with Offload(min_bytes=0):  # no name holds it
                y = x.exp().sin()
            y.sum().backward()
            del y
            gc.collect()
        assert len(pinned) == 1
        assert device.copies > 0
        assert device.hazards == 0
    finally:
        saved._pinned.cache_clear()


class Pickles:
    """A store as one would write it at first."""

    def __init__(self):
        self.files = []

    def write(self, tensor):
        file = io.BytesIO()
        torch.save(tensor, file)
        self.files.append(file)
        return file

    def read(self, slot):
        slot.seek(0)
        return torch.load(slot)


class Keeps(Pickles):
    """Copies nothing."""

    def write(self, tensor):
        self.files.append(tensor)
        return tensor

    def read(self, slot):
        return slot


@pytest.mark.parametrize("kind", [Pickles, Keeps])
@pytest.mark.parametrize(
    "part", [lambda t: t[3, :10], lambda t: t[:, 5], lambda t: t[:2].T], ids=["row", "column", "rows"]
)
def test_a_slice_takes_nothing_else_to_a_store_of_the_users(kind, part):
    store, base, x = kind(), torch.randn(300, 300), leaf(1)
    (expected,) = torch.autograd.grad((x * part(base)).sum(), x)
    with Offload(to=store, min_bytes=0) as offload:
        y = x * part(base)
    held = [
        file.untyped_storage().nbytes() if kind is Keeps else file.getbuffer().nbytes for file in store.files
    ]
    assert len(held) == 1
    assert offload.moved_bytes <= held[0] < offload.moved_bytes + 2000 < base.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied_without_a_word(copied):
    with pytest.raises(TypeError, match=r"Offload: it cannot be copied or pickled.*make one for each block"):
        copied(Offload())


def test_on_the_meta_device_a_counting_store_counts():
    class Counting:
        def write(self, tensor):
            return tensor

        def read(self, slot):
            return slot

    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh()), torch.empty(10_000, 1000)
    with Offload(model, to=Counting()) as offload:
        y = model(x)
    y.sum().backward()
    assert offload.moved_bytes == 2 * 10_000 * 1000 * 4
    with Offload(model, to="disk") as offload:  # there is nothing to write
        y = model(x)
    assert (offload.moved_bytes, offload.kept_bytes) == (0, 2 * 10_000 * 1000 * 4)
    y.sum().backward()


# ---- whatever is saved ----

VIEWS = {
    "as it is": lambda x: x * x,
    "transposed": lambda x: x.transpose(0, 1).exp() * x.transpose(0, 1),
    "a slice of rows": lambda x: x[1:3] * x[2:4],
    "a slice of columns": lambda x: x[:, 1:5] * x[:, 2:6],
    "a step slice": lambda x: x[:, ::2] * x[:, 1::2],
    "two slices that overlap": lambda x: x[:, :5] * x[:, :5] * x[:, 1:6],
    "expanded": lambda x: x[:1, :1].expand(6, 8, 4, 4) * x,
    "expanded slice": lambda x: x[:, ::2, :1].expand(6, 4, 4, 4) * x[:, 1::2],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last).exp().sin(),
    "windows": lambda x: x.unfold(2, 2, 1) * x.unfold(2, 2, 1),
    "as_strided": lambda x: torch.as_strided(x, (4, 4), (1, 3)) * torch.as_strided(x, (4, 4), (2, 5)),
    "one element": lambda x: x[0, 0, 0, 0] * x[1, 1, 1, 1],
    "flipped": lambda x: x.flip(0) * x,
    "conv": lambda x: nn.functional.conv2d(x, torch.ones(3, 8, 2, 2)).relu().pow(3),
    "max pool": lambda x: nn.functional.max_pool2d(x.tanh(), 2),
    "softmax": lambda x: x.softmax(1).log() * x,
    "index": lambda x: x[torch.tensor([0, 2, 2])].exp() * x[[1, 1, 0]],
    "where": lambda x: torch.where(x > 0, x.exp(), x.sin()),
    "dropout": lambda x: nn.functional.dropout(x, 0.0).exp(),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x.exp(), x.sin()),
}  # fmt: skip


@pytest.mark.parametrize("compute", VIEWS.values(), ids=VIEWS)
def test_gradients_are_the_same_whatever_the_strides(compute, store):
    same(compute, leaf(6, 8, 4, 4), to=store)


@pytest.mark.parametrize("compute", VIEWS.values(), ids=VIEWS)
def test_what_comes_back_has_shape_strides_and_dtype_as_before(compute):
    x = leaf(6, 8, 4, 4)

    def saved(context):
        with context:
            node = compute(x).grad_fn
        names = [name for name in dir(node) if name.startswith("_saved_")]
        found = [getattr(node, name) for name in names]
        return [(t.shape, t.stride(), t.dtype, t.is_conj()) for t in found if isinstance(t, torch.Tensor)]

    offload = Offload(to=CountingStore(), min_bytes=0)
    assert saved(contextlib.nullcontext()) == saved(offload)
    assert offload.moved_bytes > 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_view_is_taken_apart_and_rebuilt(data):
    base = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    view = base
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["slice", "transpose", "expand", "select", "unfold"]))
        dim = data.draw(st.integers(0, max(view.dim() - 1, 0)))
        if view.dim() == 0 or view.numel() == 0:
            break
        if kind == "slice":
            step = data.draw(st.integers(1, 3))
            view = view.as_strided(view.shape, view.stride(), view.storage_offset())
            view = view[
                (slice(None),) * dim + (slice(data.draw(st.integers(0, view.shape[dim] - 1)), None, step),)
            ]
        elif kind == "transpose":
            view = view.transpose(dim, data.draw(st.integers(0, view.dim() - 1)))
        elif kind == "expand":
            view = view.unsqueeze(dim).expand(
                *view.shape[:dim], data.draw(st.integers(1, 3)), *view.shape[dim:]
            )
        elif kind == "select":
            view = view.select(dim, data.draw(st.integers(0, view.shape[dim] - 1)))
        else:
            view = view.unfold(dim, data.draw(st.integers(1, view.shape[dim])), 1)
    geometry = Geometry(view)
    flat = geometry.flat(view)
    assert (flat.dim(), flat.is_contiguous()) == (1, True)
    again = geometry.rebuild(flat.clone())
    assert flat.nbytes == geometry.nbytes <= max(view.nbytes, 1)
    assert torch.equal(again, view)
    assert (again.shape, again.stride()) == (view.shape, view.stride())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_the_same_in_every_precision(dtype, store):
    same(lambda x, y: (x * y).exp().tanh() * y, leaf(50, dtype=dtype), leaf(50, dtype=dtype), to=store)


def test_numbers_that_half_precision_cannot_hold(store):
    x = torch.tensor([1e30, 2e-30, 3.0], dtype=torch.bfloat16).requires_grad_()
    same(lambda x: x.sqrt() * x, x, to=store)


def test_masks_and_indices_move_too(store):
    mask, index = torch.arange(60) % 2 == 0, torch.arange(60).flip(0)
    offload = same(lambda x: x.masked_fill(mask, 0.0) * x.gather(0, index), leaf(60), to=store)
    assert offload.moved_bytes > mask.nbytes + index.nbytes
    if isinstance(store, CountingStore):
        assert store.dtypes == {torch.bool, torch.int64, torch.float32}


def test_nan_inf_and_minus_zero_come_back(store):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45]).requires_grad_()
    same(lambda x: x * x, x, to=store)
    with Offload(to=store, min_bytes=0) as offload:
        y = x.exp() / x
    assert offload.moved_bytes > 0
    bits = torch.autograd.grad(y.sum(), x)[0].view(torch.int32)
    assert torch.equal(bits, torch.autograd.grad((x.exp() / x).sum(), x)[0].view(torch.int32))


def test_complex_numbers_and_their_conjugates(store):
    a, b = leaf(4, 3, dtype=torch.complex64), leaf(3, 4, dtype=torch.complex64)
    same(lambda a, b: (a.conj() @ b.conj()) * (a @ b), a, b, to=store)
    same(lambda a, b: a.conj()[:, ::2] * b.t()[:, ::2].conj() * a[:, ::2], a, b, to=store)
    same(lambda a, b: a.conj().imag.exp() * b.t().imag, a, b, to=store)  # imag of a conj is a negative view


def test_a_conjugate_comes_back_as_one():
    a = leaf(5, dtype=torch.complex64)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        y = a.conj() * a
    assert offload.moved_bytes == 2 * a.nbytes
    assert [y.grad_fn._saved_self.is_conj(), y.grad_fn._saved_other.is_conj()] == [True, False]


def test_sparse_tensors_stay():
    sparse, dense = torch.eye(3).to_sparse().requires_grad_(), leaf(3, 3)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        y = torch.sparse.mm(sparse, dense)
    y.sum().backward()
    assert torch.equal(dense.grad, torch.ones(3, 3))
    assert sparse.grad.to_dense().shape == (3, 3)
    assert offload.moved_bytes == dense.nbytes
    assert offload.kept_bytes == 3 * 4 + 2 * 3 * 8  # its values and its indices


def test_negative_views_quantized_and_nested_tensors_stay_and_are_counted():
    x, conj = leaf(10), torch.randn(10, dtype=torch.complex64).conj()
    quantized = torch.quantize_per_tensor(torch.ones(10), 0.1, 0, torch.qint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for tensor, size in ((conj.imag, 40), (quantized, 10), (nested, 20)):
        offload = Offload(to=CountingStore(), min_bytes=0)
        assert offload._pack(tensor)[0].dim() == tensor.dim()
        assert (offload.moved_bytes, offload.kept_bytes) == (0, size)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        y = x * conj.imag
    assert (offload.moved_bytes, offload.kept_bytes) == (0, 40)
    y.sum().backward()
    assert torch.equal(x.grad, conj.imag)


def test_subclasses_stay_what_they_are():
    class Mine(torch.Tensor):
        pass

    x, mine = leaf(5), torch.randn(5).as_subclass(Mine)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        y = x * mine
        kinds = {type(packed[0]) for packed in [offload._pack(mine)]}
    assert kinds == {Mine}
    y.sum().backward()
    assert torch.equal(x.grad.as_subclass(torch.Tensor), mine.as_subclass(torch.Tensor))


def test_empty_tensors_pass():
    x, store = leaf(0, 3), CountingStore()
    with Offload(to=store, min_bytes=0):
        y = (x * x).sum()
    assert store.writes == 0
    y.backward()
    assert x.grad.shape == (0, 3)


def test_autocast(store):
    model, x = mlp(8, 16, 4), torch.randn(6, 8)

    def run(context):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16), context:
            loss = model(x).float().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected, offload = run(contextlib.nullcontext()), Offload(model, to=store, min_bytes=0)
    assert all(map(torch.equal, expected, run(offload)))
    assert offload.moved_bytes > 0


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        x, square = ctx.saved_tensors
        assert torch.equal(x * x, square)
        return 3 * square * grad


def test_custom_functions(store):
    assert same(Cube.apply, leaf(10), to=store).moved_bytes == 80


def test_a_storage_that_is_used_again_is_another_one():
    """Equal address, version, shape and dtype: only the life of the storage tells them apart."""
    weights = [leaf(1000) for _ in range(20)]
    offload, total = Offload(to=CountingStore(), min_bytes=0), 0
    with offload:
        for number, weight in enumerate(weights):
            constant = torch.full((1000,), float(number))  # freed at once: the next one takes its place
            total = total + (weight * constant).sum()
            del constant
    total.backward()
    assert [weight.grad[0].item() for weight in weights] == list(range(20))
    assert offload.moved_bytes == 20 * 4000


def test_one_memory_under_two_shapes_or_dtypes_is_two_tensors():
    offload = same(lambda x: x[:2].sin().sum() + x[:3].sin().sum(), leaf(4, 5))
    assert offload.moved_bytes == 2 * 20 + 3 * 20

    class Signed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.view(torch.int32))
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            x, bits = ctx.saved_tensors
            assert (x.dtype, bits.dtype) == (torch.float32, torch.int32)
            return grad * x * bits.ge(0)

    assert same(Signed.apply, leaf(6)).moved_bytes == 2 * 24


# ---- edits in place ----


@pytest.mark.parametrize("keep", [0, EVERYTHING])
@pytest.mark.parametrize("min_bytes", [0, 10**6])
def test_an_edit_after_saving_still_raises(keep, min_bytes):
    x = leaf(50, dtype=torch.float64)
    with Offload(to=CountingStore(), keep=keep, min_bytes=min_bytes) as offload:
        y = x.exp()
        z = y.sin()
    assert (offload.moved_bytes > 0) == (keep == min_bytes == 0)
    with torch.no_grad():
        y.add_(1)
    what = r"modified by an inplace operation: \[torch.DoubleTensor \[50\]\] is"
    with pytest.raises(RuntimeError, match=rf"{what} at version 1; expected version 0"):
        z.sum().backward()


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.running_var"])
def test_an_edit_of_what_never_moves_still_raises(name):
    for makes in (contextlib.nullcontext, lambda model: Offload(model, to=CountingStore(), min_bytes=0)):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
        with makes(model):
            y = model(leaf(2, 4)).exp()
        with torch.no_grad():
            dict(model.state_dict(keep_vars=True))[name].add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*; expected version"):
            y.sum().backward()


def test_an_edit_through_a_view_still_raises_when_the_tensor_itself_is_gone():
    x = leaf(50)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        base = x * 1.0
        z = base.view(5, 10).sin()  # the view is saved and gone; the base is edited
    with torch.no_grad():
        base.add_(1)
    assert offload.moved_bytes > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_an_edit_between_two_saves():
    x = leaf(50)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        y = x * 1.0
        first = y.sin()
        y.add_(1)
        second = y.cos()
    assert offload.moved_bytes == 2 * 200  # before and after are two tensors
    gradient = torch.autograd.grad(second.sum(), x, retain_graph=True)[0]
    assert torch.equal(gradient, -(x.detach() + 1).sin())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


# ---- graphs ----


def test_retain_graph_reads_again(store):
    x = leaf(50)
    with Offload(to=store, min_bytes=0) as offload:
        y = x.exp().sin()
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * once)
    assert torch.equal(once, x.detach().exp().cos() * x.detach().exp())
    assert nothing_lies_ready(offload)
    assert offload.moved_bytes > 0


def test_saved_attributes_may_be_read_twice(store):
    x = leaf(50)
    with Offload(to=store, min_bytes=0) as offload:
        y = x.exp()
    assert offload.moved_bytes == 200
    for _ in range(3):
        assert torch.equal(y.grad_fn._saved_result, y)


@pytest.mark.parametrize("inside", [True, False])
def test_double_backward(store, inside):
    x = leaf(50)
    offload = Offload(to=store, min_bytes=0)
    with offload:
        y = (x**3).sum()
    with offload if inside else contextlib.nullcontext():
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 6 * x.detach())
    z = torch.autograd.grad(torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].sum(), x)[0]
    assert torch.equal(second, z)
    assert offload.moved_bytes > 0


def test_two_forwards_then_two_backwards(store):
    model, x, other = mlp(8, 16, 4), torch.randn(6, 8), torch.randn(6, 8)

    def run(context):
        model.zero_grad()
        with context:
            first = model(x).sum()
            second = model(other).exp().sum()
        second.backward(), first.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    offload = Offload(model, to=store, min_bytes=0)
    assert all(map(torch.equal, run(contextlib.nullcontext()), run(offload)))
    assert offload.moved_bytes > x.nbytes + other.nbytes


@pytest.mark.parametrize("keep", [0, EVERYTHING])
def test_a_graph_that_is_dropped_gives_everything_back_without_gc(keep):
    gc.collect()
    gc.disable()
    try:
        store, x = CountingStore(), leaf(1000)
        offload = Offload(to=store, keep=keep, min_bytes=0)
        with offload:
            y = x.exp()
            output = weakref.ref(y.untyped_storage())
            z = y.sin().exp()
        assert store.held == (0 if keep else 2)
        del y, z
        assert store.held == 0
        assert output() is None
        assert (offload._queue.waiting.used, offload._queue.found) == (0, {})
        reference = weakref.ref(offload)
        del offload
        assert reference() is None
    finally:
        gc.enable()


def test_after_backward_nothing_is_held():
    store, x = CountingStore(), leaf(1000)
    with Offload(to=store, min_bytes=0):
        y = x.exp().sin().exp()
    assert store.held == 2
    y.sum().backward()
    assert store.held == 0


def test_a_long_loop_in_one_block_leaves_no_list_behind():
    x = leaf(10)
    with Offload(to=CountingStore(), keep=EVERYTHING, min_bytes=0) as offload:
        for _ in range(50):
            x.exp().sum().backward()
    assert len(offload._queue.packed) <= 2
    assert offload._queue.found == {}


def test_part_of_a_graph_may_go_backward(store):
    x, w = leaf(50), leaf(50)
    with Offload(to=store, min_bytes=0) as offload:
        y = (x.exp() * w.exp()).sin()
    assert offload.moved_bytes > 0
    (found,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
    (stock,) = torch.autograd.grad((x.exp() * w.exp()).sin().sum(), w)
    assert torch.equal(found, stock)
    assert torch.equal(again, stock)
    del y
    gc.collect()
    assert nothing_lies_ready(offload)


def test_checkpoint_inputs_go_through_positional_ones_only():
    model, x = mlp(8, 16, 4), leaf(6, 8)
    with Offload(model, to=CountingStore(), min_bytes=0) as offload:
        y = checkpoint(model, x, use_reentrant=False)
    assert offload.moved_bytes == x.nbytes
    y.sum().backward()
    expected, x.grad = x.grad, None
    offload = Offload(model, to=CountingStore(), min_bytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing was saved
        with offload:
            y = checkpoint(lambda *, x: model(x), x=x, use_reentrant=False)
    assert offload.moved_bytes == 0
    y.sum().backward()
    assert torch.equal(x.grad, expected)
    x.grad = None
    model(x).sum().backward()
    assert torch.equal(x.grad, expected)


# ---- reading ahead ----


class Prefetching(CountingStore):
    """Notes in which order slots are asked for early and read."""

    def __init__(self):
        super().__init__()
        self.log = []

    def prefetch(self, slot):
        self.log.append(("prefetch", slot.number))

    def read(self, slot):
        self.log.append(("read", slot.number))
        return super().read(slot)


def chain(length, store, prefetch, keep=0):
    x = leaf(10)
    offload = Offload(to=store, prefetch=prefetch, keep=keep, min_bytes=0)
    with offload:
        y = chained(x, length)
    return x, y, offload


def chained(x, length):
    for _ in range(length):
        x = x.exp().mul(0.1)
    return x


def test_what_is_wanted_next_is_asked_for_early_from_the_newest_to_the_oldest():
    store = Prefetching()
    _, y, _ = chain(6, store, prefetch=80)  # room for two of 40 bytes
    y.sum().backward()
    assert store.log == [
        ("read", 6), ("prefetch", 5), ("prefetch", 4),
        ("read", 5), ("prefetch", 3), ("read", 4), ("prefetch", 2), ("read", 3), ("prefetch", 1),
        ("read", 2), ("read", 1),
    ]  # fmt: skip


def test_without_room_nothing_is_asked_for_early():
    store = Prefetching()
    _, y, _ = chain(4, store, prefetch=0)
    y.sum().backward()
    assert store.log == [("read", number) for number in (4, 3, 2, 1)]


def test_one_tensor_is_read_ahead_however_large():
    store = Prefetching()
    _, y, _ = chain(3, store, prefetch=1)
    y.sum().backward()
    assert store.log == [("read", 3), ("prefetch", 2), ("read", 2), ("prefetch", 1), ("read", 1)]


@pytest.mark.parametrize("prefetch", [1, 40, 10**6])
def test_what_is_used_twice_is_read_once_however_large(prefetch):
    store, x = CountingStore(), leaf(10)
    with Offload(to=store, prefetch=prefetch, min_bytes=0):
        y = x
        for _ in range(5):
            y = y.exp().sin()  # the result of exp is saved by both
    y.sum().backward()
    assert store.reads == store.writes == 5


def test_with_no_bytes_to_spare_nothing_that_was_read_waits():
    class Watching(CountingStore):
        def read(self, slot):
            tensor = super().read(slot).clone()
            alive.append(len(read_so_far))
            read_so_far.add(tensor.untyped_storage())
            return tensor

        def prefetch(self, slot):
            raise AssertionError("nothing is to be read ahead")

    alive: list[int] = []
    read_so_far: weakref.WeakSet = weakref.WeakSet()
    store, x = Watching(), leaf(10)
    with Offload(to=store, prefetch=0, min_bytes=0) as offload:
        y = x
        for _ in range(5):
            y = y.exp().sin()  # the result of exp is saved by both
    y.sum().backward()
    assert (store.writes, store.reads, offload.moved_bytes) == (5, 10, 5 * 40)
    assert set(alive) == {0}  # what was read before is gone already
    expected = leaf(10)
    with torch.no_grad():
        expected.copy_(x)
    z = expected
    for _ in range(5):
        z = z.exp().sin()
    z.sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_what_was_used_a_second_time_makes_room_for_others():
    store, tensors = CountingStore(), [leaf(10) for _ in range(5)]
    with Offload(to=store, prefetch=40, min_bytes=0):
        loss = sum((tensor + 0).square().exp().sum() for tensor in tensors)
        loss = loss + sum((twice * twice).sum() for twice in [tensor + 0 for tensor in tensors])
    loss.backward(retain_graph=True)  # the graph, and what belongs to it, stays
    assert store.reads == store.writes
    loss.backward()
    assert store.reads == 2 * store.writes


@pytest.mark.parametrize("prefetch", [0, 40, 80])
def test_what_lies_ready_is_bounded(prefetch):
    store = Prefetching()
    x, y, offload = chain(10, store, prefetch)
    (y * x.exp().sin()).sum().backward(retain_graph=True)
    most = []
    stock = store.read
    store.read = lambda slot: most.append(offload._queue.ahead.used) or stock(slot)
    y.sum().backward()
    assert max(most) <= prefetch


def test_what_waits_to_be_used_again_is_bounded_by_its_memory():
    """A slice is moved without what lies between its elements, but laid out again with it."""
    base, weights = torch.randn(100, 100), [leaf(100) for _ in range(16)]
    offload = Offload(to=CountingStore(), prefetch=base.nbytes * 2, min_bytes=0)
    with offload:
        columns = [base[:, number] for number in range(16)]
        first = sum((weight * column).sum() for weight, column in zip(weights, columns, strict=True))
        second = sum((weight * column).sum() for weight, column in zip(weights, columns, strict=True))
    assert offload.moved_bytes == 16 * 400
    first.backward()
    waiting = [packed.tensor for packed in offload._queue.packed.values() if packed.tensor is not None]
    assert 0 < sum(tensor.untyped_storage().nbytes() for tensor in waiting) <= base.nbytes * 2
    second.backward()
    assert nothing_lies_ready(offload)
    for weight, column in zip(weights, columns, strict=True):
        assert torch.equal(weight.grad, 2 * column)


def test_reading_ahead_begins_while_what_stayed_is_used():
    store = Prefetching()
    _, y, _ = chain(6, store, prefetch=80, keep=120)
    y.sum().backward()
    assert store.log[:3] == [("prefetch", 3), ("prefetch", 2), ("read", 3)]


@pytest.mark.parametrize("prefetch", [0, 40, 1000, 10**9])
@pytest.mark.parametrize("keep", [0, 4000])
def test_the_work_of_reading_ahead_grows_with_the_number_of_tensors_only(monkeypatch, prefetch, keep):
    calls = []
    stock = Packed.read_ahead
    monkeypatch.setattr(Packed, "read_ahead", lambda packed: calls.append(packed.number) or stock(packed))
    x, y, offload = chain(400, Prefetching(), prefetch, keep)
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    first = len(calls)
    y.sum().backward()
    assert offload.moved_bytes == (400 - keep // 40) * 40
    assert torch.equal(once, torch.autograd.grad(chained(x, 400).sum(), x)[0])
    assert (first > 0) == (prefetch > 0)
    assert first <= 3 * 400
    assert len(calls) <= 2 * 3 * 400
    assert torch.equal(x.grad, 2 * once)
    assert nothing_lies_ready(offload)


def test_with_retain_graph_the_second_backward_reads_ahead_too():
    store = Prefetching()
    _, y, _ = chain(4, store, prefetch=80)
    y.sum().backward(retain_graph=True)
    first, store.log = store.log, []
    assert {kind for kind, _ in first} == {"prefetch", "read"}
    y.sum().backward()
    assert store.log == first


# ---- contexts ----


def test_the_inner_context_wins():
    outer, inner, x = CountingStore(), CountingStore(), leaf(10)
    x.exp().sin().exp().sum().backward()
    expected, x.grad = x.grad, None
    with Offload(to=outer, min_bytes=0):
        y = x.exp()
        with Offload(to=inner, min_bytes=0):
            z = y.sin()
        z = z.exp()
    assert (outer.written, inner.written) == (80, 40)
    z.sum().backward()
    assert (outer.held, inner.held) == (0, 0)
    assert torch.equal(x.grad, expected)


def test_the_meter_sees_through_to_offload():
    store, x = CountingStore(), leaf(10)
    with Offload(to=store, min_bytes=0), saved_tensors() as saved:
        y = x.exp()
    assert (saved.total_bytes, store.written) == (40, 40)
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_a_model_that_is_offloaded_already_is_refused():
    model = nn.Linear(2, 2)
    with Offload(model, to=CountingStore()):
        with pytest.raises(RuntimeError, match="this model is being offloaded already"):
            Offload(model, to=CountingStore()).__enter__()
        model(torch.ones(1, 2))
    with Offload(model, to=CountingStore()):
        model(torch.ones(1, 2))


def test_one_context_may_be_used_again_and_again():
    model, offload = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), None
    offload = Offload(model, to=CountingStore(), min_bytes=0)
    for step in range(1, 4):
        with offload:
            loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        assert offload.moved_bytes == step * 16


def test_other_threads_are_not_seen_and_may_have_their_own():
    store, x, seen = CountingStore(), leaf(10), []

    def other():
        y = x.exp()
        seen.append(store.writes)
        with Offload(to=store, min_bytes=0):
            z = y.sin()
        seen.append(store.writes)
        z.sum().backward()

    with Offload(to=store, min_bytes=0):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [0, 1]
    assert torch.allclose(x.grad, x.detach().exp() * x.detach().exp().cos())


@pytest.mark.parametrize("to", ["memory", "disk"])
def test_many_threads_on_one_context(to):
    model = mlp(8, 16, 4)
    offload = Offload(to=CountingStore() if to == "memory" else "disk", min_bytes=0, keep=2000)
    inputs = [torch.randn(32, 8) for _ in range(6)]
    expected = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in inputs]
    found = [None] * 6

    def work(number):
        for _ in range(5):
            with offload:
                loss = model(inputs[number]).sum()
            found[number] = torch.autograd.grad(loss, list(model.parameters()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))
    assert offload.moved_bytes > 0
    assert offload._queue.waiting.used == 0
    assert nothing_lies_ready(offload)


def test_two_threads_may_each_offload_the_same_model():
    model, x = mlp(8, 16, 4), torch.randn(32, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    inside, found = threading.Barrier(2), []

    def work():
        with Offload(model, to=CountingStore(), min_bytes=0) as offload:
            inside.wait(60)
            loss = model(x).sum()
            inside.wait(60)
        found.append((offload.moved_bytes, torch.autograd.grad(loss, list(model.parameters()))))

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [moved for moved, _ in found] == [x.nbytes + 32 * 16 * 4] * 2
    assert all(all(map(torch.equal, expected, gradients)) for _, gradients in found)


def test_the_model_is_left_as_it_was():
    model = mlp(4, 5, 2)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with no_leftovers(model), Offload(model, to=CountingStore(), min_bytes=0):
        model(torch.ones(1, 4)).sum().backward()
    assert {name: list(module.__dict__) for name, module in model.named_modules()} == {
        name: list(found) for name, found in before.items()
    }


# ---- failures ----


class Broken(CountingStore):
    fails_at = None

    def write(self, tensor):
        if self.fails_at == "write" and self.writes >= 1:
            raise OSError("the store is full")
        return super().write(tensor)

    def read(self, slot):
        if self.fails_at == "read":
            raise OSError("the store cannot be read")
        return super().read(slot)


def test_a_store_that_fails_to_write_leaves_the_next_step_right():
    store, x = Broken(), leaf(10)
    store.fails_at = "write"
    offload = Offload(to=store, min_bytes=0)
    with pytest.raises(OSError, match="the store is full"), offload:
        x.exp().sin().exp()
    assert (store.held, offload.moved_bytes, outer_hooks()) == (0, 40, None)
    store.fails_at = None
    with offload:
        y = x.exp().sin()
    assert offload.moved_bytes == 2 * 40
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())
    assert (offload._queue.waiting.used, store.held) == (0, 0)


def test_a_store_that_fails_to_write_an_older_tensor_does_not_lose_it():
    store, x = Broken(), leaf(10)
    store.fails_at = "write"
    with Offload(to=store, keep=40, min_bytes=0) as offload:
        first = x.exp()
        second = first.sin().exp()  # moves what exp saved
        with pytest.raises(OSError, match="the store is full"):
            second.cos().exp()  # moves what the second exp saved
        store.fails_at = None
        assert offload.moved_bytes == 40
        third = second.cos().exp()  # and now it moves
    assert (offload.moved_bytes, store.held) == (2 * 40, 2)
    third.sum().backward()
    assert torch.isfinite(x.grad).all()
    stock = x.detach().clone().requires_grad_()
    stock.exp().sin().exp().cos().exp().sum().backward()
    assert torch.equal(x.grad, stock.grad)


def test_a_store_that_fails_to_read_can_be_asked_again():
    store, x = Broken(), leaf(10)
    with Offload(to=store, min_bytes=0) as offload:
        y = x.exp()
    assert offload.moved_bytes == 40
    store.fails_at = "read"
    with pytest.raises(OSError, match="cannot be read"):
        y.sum().backward(retain_graph=True)
    store.fails_at = None
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_what_an_error_in_backward_leaves_goes_with_the_next_backward():
    store, x = Broken(), leaf(10)
    offload = Offload(to=store, prefetch=0, min_bytes=0)
    with offload:
        y = sum((x * factor).exp() * (x + factor).sin() for factor in range(3)).sum()
    moved, store.fails_at = store.held, "read"
    with pytest.raises(OSError, match="cannot be read"):
        y.backward()
    del y
    (x * 1).sum().backward()
    assert (moved, store.held) == (9, 0)
    assert nothing_lies_ready(offload)


def test_after_a_forward_that_raises_the_model_can_be_offloaded_again():
    model, x = mlp(4, 4), torch.ones(2, 4, requires_grad=True)
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), Offload(model, to=CountingStore()):
            model(x)
            raise error
    with Offload(model, to=CountingStore(), min_bytes=0) as offload:
        loss = model(x).square().sum()
    loss.backward()
    moved, x.grad = x.grad, None
    model(x).square().sum().backward()
    assert torch.equal(moved, x.grad)
    assert offload.moved_bytes > 0


def test_10_000_saved_tensors_on_one_disk_from_two_blocks_at_a_time():
    store, x = Disk(), leaf(16)

    def chain(y):
        for _ in range(5_000):
            y = y.sin()
        return y

    chain(x).sum().backward()
    expected, x.grad = x.grad, None
    with Offload(to=store, min_bytes=0) as one:
        first = chain(x)
    with Offload(to=store, min_bytes=0) as other:
        second = chain(x)
    assert one.moved_bytes == other.moved_bytes == 5_000 * 64
    for y in (first, second):
        y.sum().backward()
        assert torch.equal(x.grad, expected)
        x.grad = None


def test_a_forward_that_raises_leaves_nothing():
    store, x = CountingStore(), leaf(10)
    offload = Offload(to=store, min_bytes=0)
    with pytest.raises(ZeroDivisionError), offload:
        x.exp().sin().mul(1 / 0)
    assert outer_hooks() is None  # in this thread
    gc.collect()
    assert (store.held, store.writes) == (0, 1)
    x.exp().sum().backward()
    assert store.writes == 1
    with offload:
        y = x.sin()
    assert (store.held, offload.moved_bytes) == (1, 2 * 40)
    y.sum().backward()


def test_a_block_that_raises_in_a_thread_holds_up_no_other():
    offload, left, x = Offload(to=CountingStore(), min_bytes=0), [], leaf(10)

    def fails():
        with contextlib.suppress(ZeroDivisionError), offload:
            left.append(leaf(10) * torch.ones(10))  # saves what needs no gradient, and might still be filled
            left.append(1 / 0)

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    assert (len(left), offload.moved_bytes) == (1, 0)
    with offload:
        y = x.exp().sin()
    assert offload.moved_bytes == 2 * 40
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


def test_a_store_that_fails_at_the_end_of_the_block_leaves_no_hook():
    store, weight = Broken(), leaf(10)
    store.fails_at, store.writes = "write", 1
    offload = Offload(to=store, min_bytes=0)
    with pytest.raises(OSError, match="the store is full"), offload:
        y = weight * torch.ones(10)  # waits for the end of the block
    assert (outer_hooks(), offload.moved_bytes) == (None, 0)
    store.fails_at = None
    with offload:
        z = weight.exp()
    assert offload.moved_bytes == 2 * 40
    (y + z).sum().backward()
    assert torch.equal(weight.grad, 1 + weight.detach().exp())


@pytest.mark.parametrize(
    ("given_back", "found"),
    [
        (lambda t: t.double(), r"torch.float64 \[10\]"),
        (lambda t: t[:5], r"torch.float32 \[5\]"),
        (lambda t: t.tolist(), "list"),
    ],
)
def test_a_store_that_gives_back_something_else_is_refused(given_back, found):
    class Wrong(CountingStore):
        def read(self, slot):
            return given_back(slot.tensor)

    x = leaf(10)
    with Offload(to=Wrong(), min_bytes=0):
        y = x.exp()
    with pytest.raises(TypeError, match=rf"was given torch.float32 \[10\] and gave back {found}"):
        y.sum().backward()


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": -1}, ValueError, r"Offload\(keep=-1\): expected 0 or more"),
        ({"prefetch": -1}, ValueError, r"Offload\(prefetch=-1\)"),
        (
            {"keep": 1e9},
            TypeError,
            r"Offload\(keep=...\): expected a whole number, found float; write keep=1000000000$",
        ),
        ({"keep": 1.5}, TypeError, "found float$"),
        ({"min_bytes": 1.5}, TypeError, r"Offload\(min_bytes=...\): expected a whole number, found float"),
        ({"to": "gpu"}, TypeError, r"""expected "cpu", "disk", or a store .* found 'gpu'"""),
        ({"to": object()}, TypeError, "found object without write and read"),
        ({"to": [1]}, TypeError, "found list without write and read"),
        ({"model": "resnet"}, TypeError, "Offload: expected a module, found str"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Offload(**options)


def test_a_class_in_place_of_a_store_is_refused():
    with pytest.raises(TypeError, match=r"found the class CountingStore; make one: to=CountingStore\(\)"):
        Offload(to=CountingStore)


def test_a_store_without_read_is_refused():
    class Half:
        def write(self, tensor):
            return tensor

    with pytest.raises(TypeError, match="found Half without read"):
        Offload(to=Half())


def test_a_model_that_is_not_called_is_announced():
    idle = Offload(nn.Linear(2, 2), to=CountingStore())
    with pytest.warns(UserWarning, match="nothing of the model was saved for backward by this block"), idle:
        pass
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="with grad on"), Offload(model, to=CountingStore()), torch.no_grad():
        model(torch.ones(1, 2))


@pytest.mark.parametrize(
    "context", [saved_tensors, functools.partial(Offload, to=CountingStore(), min_bytes=0)]
)
def test_another_model_and_a_loss_are_not_the_model(context):
    """As a loss in the block saves something, whichever model was called."""
    model, other, x = mlp(4, 4), mlp(4, 4), torch.ones(2, 4)
    with (
        pytest.warns(UserWarning, match="nothing of the model was saved for backward by this block"),
        context(model),
    ):
        other(x).square().mean()
    with (
        pytest.warns(UserWarning, match="in this thread"),
        context(model),
        ThreadPoolExecutor() as other_thread,
    ):
        other_thread.submit(model, x).result().square()  # the hooks of this thread see the square alone


def compiled_with_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.compile(model, backend="aot_eager")(x).float()


@pytest.mark.parametrize(
    "context", [saved_tensors, functools.partial(Offload, to=CountingStore(), min_bytes=0)]
)
@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: model(x),
        lambda model, x: model[0](x),  # a part of it
        lambda model, x: model.requires_grad_(False)(x),
        lambda model, x: checkpoint(model, x, use_reentrant=False),
        lambda model, x: checkpoint(model, x, use_reentrant=True),
        lambda model, x: torch.compile(model, backend="eager")(x),
        lambda model, x: compiled_with_autocast(model, x),  # which saves copies of the parameters
        lambda model, x: nn.functional.linear(x, model[0].weight),  # not called, but used
        lambda model, x: torch.func.functional_call(model, dict(mlp(4, 4).named_parameters()), x),
        lambda model, x: torch.jit.script(model)(x),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_model_that_is_run_in_any_way_is_not_warned_about(context, run):
    torch._dynamo.reset()
    x = torch.ones(2, 4, requires_grad=True)
    model = mlp(4, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*nothing of the model")
        with context(model):
            loss = run(model, x).square().mean()
    loss.backward()
    assert x.grad is not None


def test_a_step_that_the_compiler_leaves_alone_is_warned_about():
    model, w = mlp(4, 4), torch.ones(4, requires_grad=True)

    @torch.compiler.disable
    def step():
        with Offload(model, to=CountingStore(), min_bytes=0):
            with torch.no_grad():
                x = model(torch.ones(2, 4))
            return (x * w).sum()

    with pytest.warns(UserWarning, match="nothing of the model was saved"):
        step()


def test_a_block_in_which_anything_was_saved_ends_without_a_warning():
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Offload(model, to=CountingStore()) as offload:  # too small to be moved
            model(torch.ones(1, 2))
        with Offload(to=CountingStore()):  # of no model nothing is expected
            pass
        with saved_tensors(model):
            model(torch.ones(1, 2))
        with saved_tensors():
            pass
    assert (offload.moved_bytes, offload.kept_bytes) == (0, 8)
    assert repr(offload) == "Offload(moved 0 bytes, kept 8)"


def test_a_store_is_given_one_row_and_may_give_back_a_column():
    class Columns:
        """Looks at the bytes, as a file would, and hands out every second number of a memory."""

        def write(self, tensor):
            assert tensor.is_contiguous()
            assert tensor.dim() == 1
            return torch.frombuffer(bytearray(tensor.view(torch.uint8).numpy().tobytes()), dtype=tensor.dtype)

        def read(self, slot):
            return torch.stack([slot, slot], 1)[:, 0]

    x = torch.arange(6.0).requires_grad_()
    same(lambda x: x[::2] * x[1::2], x, to=Columns())
    same(lambda x: (x * x).exp(), x, to=Columns())
    weight = torch.randn(4, 3, requires_grad=True)
    same(lambda x, weight: x[:4] * weight[:, 0] * weight.t()[1], x, weight, to=Columns())


def test_without_further_words_what_has_a_mebibyte_is_moved():
    large, small = leaf(2**18), leaf(2**18 - 1)
    with Offload(to=CountingStore()) as offload:
        large.exp(), small.exp()
    assert (offload.moved_bytes, offload.kept_bytes) == (2**20, 2**20 - 4)


def test_a_wrapped_layer_in_evaluation_is_not_warned_about():
    model = nn.Linear(2, 2)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        with Offload(model, to=CountingStore()):
            model(torch.ones(1, 2))
        with saved_tensors(model):
            model(torch.ones(1, 2))


def test_a_block_that_raises_is_not_also_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), Offload(nn.Linear(2, 2), to=CountingStore()):
            raise KeyError


# ---- compiled ----


@pytest.mark.parametrize(
    "context", [saved_tensors, functools.partial(Offload, to=CountingStore(), min_bytes=0)]
)
@pytest.mark.parametrize("made_inside", [True, False])
def test_with_fullgraph_a_block_is_refused_in_words(context, made_inside):
    torch._dynamo.reset()
    model, x = mlp(4, 4), torch.ones(2, 4)
    block = context(model)

    def step(x):
        with context(model) if made_inside else block:
            return model(x).sum()

    words = r"cannot be opened inside torch\.compile or torch\.export"
    if not made_inside and not hasattr(torch.autograd.graph, "node_creation_hook"):
        words = "how to enter a `(Offload|SavedTensors)`"  # PyTorch 2.11 does not come as far as ours
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(step, backend="eager", fullgraph=True)(x)
    with block:
        torch.compile(model, backend="eager", fullgraph=True)(x).sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_compiled_models_have_the_same_gradients(backend, inside):
    torch._dynamo.reset()
    model, x = mlp(8, 8, 4), torch.randn(6, 8)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    offload = Offload(model, to=CountingStore(), min_bytes=0)

    def step(x):
        with offload:
            return model(x).sum()

    if inside:
        loss = torch.compile(step, backend=backend)(x)
    else:
        compiled = torch.compile(model, backend=backend)
        with offload:
            loss = compiled(x).sum()
    loss.backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)
    assert offload.moved_bytes > 0
    torch._dynamo.reset()


# ---- what once went wrong ----


def test_a_backward_that_edits_what_it_is_given_raises_as_in_plain_training():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return x.mul_(2).mul_(grad)

    offload = Offload(to="disk", min_bytes=0)
    for context in (contextlib.nullcontext(), offload):
        w = torch.full((4,), 3.0, requires_grad=True)
        with context:
            x = w * 1.0
            y, z = x.sin(), Square.apply(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y + z).sum().backward()
    assert offload.moved_bytes > 0


def test_backward_in_inference_mode_is_as_in_plain_training(store):
    """There no edit of what was read back is noticed: what is saved twice is read for each."""

    class Negate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return -y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            if offload.moved_bytes:
                y.zero_()  # in plain training the next who needs it would raise
            return -grad

    x, found = leaf(4), []
    for context in (contextlib.nullcontext(), offload := Offload(to=store, min_bytes=0)):
        x.grad = None
        with context:
            y = x.exp()  # which saves its result
            loss = (y.sin() + Negate.apply(y)).sum()
        with torch.inference_mode():
            loss.backward()
        found.append(x.grad)
    assert offload.moved_bytes == x.nbytes
    assert torch.equal(*found)


def newton(x):
    """Each step builds a new graph while the last one is still there, and changes `x` without its version."""
    for _ in range(20):
        y = (x**4).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x)
        x.data -= slope.detach() / curvature


def fused(x):
    optimizer = torch.optim.Adam([x], lr=0.1, fused=True)
    for _ in range(6):
        loss = (x**4).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (x.grad,) = torch.autograd.grad(slope.square().sum(), x, retain_graph=True)
        optimizer.step()


def checked(x):
    torch.autograd.gradgradcheck(lambda x: torch.tanh(x * x.sum()), x)


@pytest.mark.parametrize("work", [newton, fused, checked])
def test_what_is_saved_after_a_backward_is_not_taken_for_what_was_saved_before(work, store):
    found = []
    for context in (contextlib.nullcontext(), offload := Offload(to=store, min_bytes=0)):
        x = torch.tensor([3.0, 1.0], dtype=torch.float64, requires_grad=True)
        with context:
            work(x)
        found.append(x)
    assert torch.equal(*found)
    assert offload.moved_bytes > 0


@pytest.mark.parametrize("first", [0, 1])
def test_what_counts_its_versions_apart_is_watched_apart(first):
    """`x.data` lies in the same memory, but has a version of its own."""
    x = leaf(4)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        h = x * 1
        for one in (h.data, h) if not first else (h, h.data):
            loss = (one * torch.ones(4, requires_grad=True)).sum() + x.sum()
            if one is h:
                of_h = loss
    h.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        of_h.backward()
    assert offload.moved_bytes > 0


@pytest.mark.parametrize(
    "context", [saved_tensors, Offload, functools.partial(Offload, to="disk", min_bytes=0)]
)
def test_a_layer_that_opens_a_block_works_inside_transforms(context):
    class Wrapped(nn.Module):
        def __init__(self, of):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.of = mlp(4, 4, 1), of

        def forward(self, x):
            with self.of(self.layer):
                return self.layer(x)

    def work(model):
        x, parameters = torch.ones(5, 4), dict(model.named_parameters())
        call = lambda given: torch.func.functional_call(model, given, (x,))  # noqa: E731
        several = torch.vmap(call)({name: torch.stack([p, 2 * p]) for name, p in parameters.items()})
        ones = {name: torch.ones_like(p) for name, p in parameters.items()}
        y, tangent = torch.func.jvp(call, (parameters,), (ones,))
        loss = (y * tangent).sum() + several.square().sum()
        return [loss, *torch.autograd.grad(loss, list(parameters.values()))]

    expected = work(Wrapped(lambda layer: contextlib.nullcontext()))
    assert len(expected) == 1 + 4
    for of in (context, lambda layer: context()):
        assert all(map(torch.equal, expected, work(Wrapped(of))))


def test_a_hint_that_fails_does_not_end_backward():
    hints = []

    class Hinted(CountingStore):
        def prefetch(self, slot):
            hints.append(slot)
            raise OSError("no room to read ahead")

    w = torch.ones(4, requires_grad=True)
    with Offload(to=Hinted(), min_bytes=0) as offload:
        loss = w.exp().sin().exp().sin().sum()
    loss.backward()
    assert offload.moved_bytes > 0
    assert hints
    plain = w.detach().requires_grad_()
    plain.exp().sin().exp().sin().sum().backward()
    assert torch.equal(w.grad, plain.grad)


def test_what_is_collected_while_another_thread_holds_the_queue_waits_for_nobody():
    """The collector may run in a thread that holds the lock of a store; to wait there for the queue is a deadlock."""
    w = torch.ones(100, requires_grad=True)
    offload = Offload(to="disk", keep=10**6, min_bytes=0)
    with offload:
        loss = w.exp().sum()
    box, held, go_on = [loss], threading.Event(), threading.Event()
    del loss

    def hold():
        with offload._queue.lock:
            held.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    box.clear()  # returns, though the queue is in other hands
    go_on.set()
    thread.join()
    assert offload._queue.waiting.used == 0
    with offload:
        (w * 1).sum()
        w.exp().sum()
    assert offload._queue.waiting.used == 0


def test_noise_that_is_filled_after_it_was_saved_is_moved_filled(store):
    """RReLU saves its noise before it draws it, and the version counter says nothing."""
    relu, x = nn.RReLU(), leaf(50, 60)

    def compute(x):
        torch.manual_seed(5)
        return relu(x.tanh()).square()

    offload = same(compute, x, to=store)
    assert offload.moved_bytes == 3 * x.nbytes  # the result of tanh, the noise, what is squared
    assert offload.kept_bytes == 0


def test_what_waits_at_the_end_of_the_block_is_moved_there():
    x = torch.ones(3)  # needs no gradient: whoever saves it might still fill it
    weight = leaf(3)
    store = CountingStore()
    with Offload(to=store, min_bytes=0) as offload:
        y = weight * x
        waiting = offload.moved_bytes
    assert (waiting, offload.moved_bytes) == (0, x.nbytes)
    y.sum().backward()
    assert torch.equal(weight.grad, x)


def test_forward_mode_passes_through_the_disk():
    """There some tangents are zero tensors, without memory of their own."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3, requires_grad=True)

    def run():
        return torch.func.jvp(lambda x: model(x).exp(), (x,), (x.detach(),))

    want = run()
    with Offload(model, to="disk", min_bytes=0) as offload:
        got = run()
    assert offload.moved_bytes > 0
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("keep", [0, EVERYTHING])
def test_a_result_in_an_attribute_of_the_model_keeps_neither_alive(keep):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with Offload(model, to=CountingStore(), keep=keep, min_bytes=0) as offload:
        model.loss = model(torch.ones(2, 3)).sum()
    assert offload.moved_bytes + offload.kept_bytes > 0
    del offload
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_storages_that_follow_on_each_other_have_keys_of_their_own():
    """A freed storage's place goes to the next one; the keys of both live as long as their graphs."""
    x = leaf(10)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        y = x
        for _ in range(300):
            y = y.tanh()
    assert offload.moved_bytes == 300 * 40
    keys = list(offload._queue.found)
    assert len(keys) - len({hash(key) for key in keys}) < 10  # or finding one takes longer and longer
    y.sum().backward()
    expected = torch.autograd.grad(functools.reduce(lambda y, _: y.tanh(), range(300), x).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_a_slot_may_be_none():
    class Last:
        def write(self, tensor):
            self.last = tensor.clone()

        def read(self, slot):
            return self.last.clone()

    x = leaf(10)
    with Offload(to=Last(), min_bytes=0) as offload:
        y = x.exp()
    assert offload.moved_bytes == 40
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_what_was_edited_is_refused_before_it_is_read():
    store, x = CountingStore(), leaf(10)
    with Offload(to=store, min_bytes=0):
        y = x.exp()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert (store.writes, store.reads) == (1, 0)


def test_noise_of_an_operation_that_runs_in_another_thread_is_not_moved_yet():
    offload, packed, saved, filled = (
        Offload(to=CountingStore(), min_bytes=0),
        [],
        threading.Event(),
        threading.Event(),
    )

    def operate():
        with offload:
            noise = torch.zeros(10)
            packed.append(offload._pack(noise))
            saved.set()
            assert filled.wait(60)
            noise.data.fill_(3)  # as RReLU does, which leaves the version as it is

    thread = threading.Thread(target=operate)
    thread.start()
    assert saved.wait(60)
    x = leaf(10)
    with offload:
        y = x.exp().exp().exp()
    assert offload.moved_bytes == 0
    filled.set()
    thread.join()
    assert offload.moved_bytes == 4 * 40
    assert torch.equal(offload._queue.unpack(packed[0]), torch.full((10,), 3.0))
    y.sum().backward()
    assert offload._queue.newest == {}


def test_a_block_that_ends_moves_what_waited_in_it_though_another_is_open_elsewhere():
    offload, opened, over = Offload(to=CountingStore(), min_bytes=0), threading.Event(), threading.Event()

    def stay():
        with offload:
            opened.set()
            assert over.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert opened.wait(60)
    x, weight = torch.ones(3), leaf(3)  # x may still be filled
    with offload:
        y = weight * x
        waiting = offload.moved_bytes
    moved = offload.moved_bytes
    over.set()
    thread.join()
    assert (waiting, moved) == (0, x.nbytes)
    y.sum().backward()


def test_what_a_thread_without_a_block_has_saved_is_moved_when_the_block_ends():
    """As the threads of backward do that save for a second derivative."""
    offload, packed = Offload(to=CountingStore(), min_bytes=0), []
    for number in (1, 2):
        with offload:
            noise = torch.full((10,), float(number))
            thread = threading.Thread(target=lambda noise=noise: packed.append(offload._pack(noise)))
            thread.start()
            thread.join()
            waiting = offload.moved_bytes
        assert (waiting, offload.moved_bytes) == ((number - 1) * 40, number * 40)
        assert torch.equal(offload._queue.unpack(packed[-1]), noise)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("by_numpy", [True, False])
def test_a_memory_that_is_filled_anew_between_the_blocks_is_saved_anew(by_numpy, skips):
    """While an older graph is alive: of a step that skipped its backward, or with `retain_graph=True`."""

    def gradients(offload):
        torch.manual_seed(0)
        model, x, found = nn.Sequential(nn.Linear(16, 4), nn.Tanh()), torch.zeros(8, 16), []
        for step in range(3):
            new = torch.randn(8, 16)
            if by_numpy:
                x.numpy()[:] = new.numpy()
            else:
                x.data.copy_(new)
            with offload(model):
                loss = model(x).square().sum()
            if skips and step == 0:
                continue
            model.zero_grad()
            loss.backward(retain_graph=not skips)
            found += [param.grad.clone() for param in model.parameters()]
        return found

    store = CountingStore()
    offload = Offload(to=store, min_bytes=0)
    expected = gradients(lambda model: contextlib.nullcontext())
    assert all(map(torch.equal, gradients(lambda model: offload), expected))
    assert offload.moved_bytes > 0
