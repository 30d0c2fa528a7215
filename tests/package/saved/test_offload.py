"""`Offload`: the same gradients bit for bit, whatever is saved, and nothing left when the graph is gone."""

import contextlib
import copy
import gc
import io
import multiprocessing
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from counting_store import CountingStore
from hypothesis import given, settings
from hypothesis import strategies as st
from models import mlp
from saved_views import VIEWS
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooklab import Offload, no_leftovers
from hooklab.saved.queue import Geometry, Queue
from hooklab.stores import Disk

EVERYTHING = 10**12
EDITED = "modified by an inplace operation"


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["memory", "disk"])
def store(request):
    return CountingStore() if request.param == "memory" else "disk"


@pytest.fixture
def without_collector():
    """What goes, goes by itself: there is no reference cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leaf(*shape, **options):
    return torch.randn(*shape, **options).requires_grad_()


def gradients(compute, tensors, context):
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
    assert offload.moved_bytes > 0
    return offload


def equal_bits(left, right):
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right))
    return torch.equal(left, right)


# ---- what is moved ----


def test_what_is_saved_several_times_is_moved_once_and_read_once():
    store = CountingStore()
    assert same(lambda x: x * x, leaf(10), to=store).moved_bytes == 40
    same(lambda x: (x.exp() + 1).relu() * x.exp().relu(), leaf(10), to=store)
    assert store.reads == store.writes


def test_parameters_and_buffers_stay_also_as_views():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[0].weight.data = model[0].weight.data.clone()  # as after moving the model
    x = torch.randn(3, 4)
    for owner, buffers in ((model, 0), (nn.ModuleList(model), 0), (None, 2 * 16)):
        with Offload(owner, to=CountingStore(), min_bytes=0) as offload:
            y = model(x)
        moved = x.nbytes + y.nbytes + buffers  # the inputs of both layers; not weight.t()
        assert (offload.moved_bytes, offload.kept_bytes) == (moved, 0)
        y.sum().backward()


def test_small_tensors_stay_and_are_counted():
    large, small = leaf(2**18), leaf(2**18 - 1)
    with Offload(to=CountingStore()) as offload:  # 1 MiB, without further words
        y = large.exp().sum() + small.exp().sum()
    assert (offload.moved_bytes, offload.kept_bytes) == (2**20, 2**20 - 4)
    assert repr(offload) == "Offload(moved 1,048,576 bytes, kept 1,048,572)"
    y.backward()
    assert torch.equal(small.grad, small.detach().exp())


def test_a_small_slice_of_a_large_memory_moves_and_frees_the_memory():
    base = torch.randn(1000, 1000)
    reference, expected, x = weakref.ref(base.untyped_storage()), base[3, :10].clone(), leaf(10)
    with Offload(to=CountingStore()) as offload:
        y = x * base[3, :10]
    del base
    assert reference() is None
    assert offload.moved_bytes == 40
    y.sum().backward()
    assert torch.equal(x.grad, expected)


def test_what_may_stay_is_counted_with_the_whole_memory_that_slices_share():
    w, memories = leaf(10), []
    with Offload(to=CountingStore(), min_bytes=0, keep=2 * 4_000) as offload:
        for _ in range(3):
            table = torch.ones(100, 10)
            memories.append(weakref.ref(table.untyped_storage()))
            w = (w * table[0]) * table[1] * table[2]
            del table
    assert [memory() is not None for memory in memories] == [False, True, True]
    assert offload.moved_bytes > 0
    w.sum().backward()


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


def test_on_the_meta_device_a_store_counts_and_the_disk_takes_nothing():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh()), torch.empty(10_000, 1000)
    for to, moved in ((CountingStore(), 2 * 10_000 * 1000 * 4), ("disk", 0)):
        with Offload(model, to=to) as offload:
            y = model(x)
        assert (offload.moved_bytes, offload.moved_bytes + offload.kept_bytes) == (moved, 80_000_000)
        y.sum().backward()


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


@pytest.mark.parametrize("part", [lambda t: t[3, :10], lambda t: t[:, 5], lambda t: t[:2].T])
def test_a_slice_takes_nothing_else_to_a_store_of_the_users(part):
    store, base, x = Pickles(), torch.randn(300, 300), leaf(1)
    (expected,) = torch.autograd.grad((x * part(base)).sum(), x)
    with Offload(to=store, min_bytes=0) as offload:
        y = x * part(base)
    (file,) = store.files
    assert offload.moved_bytes <= file.getbuffer().nbytes < offload.moved_bytes + 2000 < base.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, expected)


# ---- whatever is saved ----


@pytest.mark.parametrize("compute", VIEWS.values(), ids=VIEWS)
def test_gradients_are_the_same_whatever_the_strides(compute, store):
    same(compute, leaf(6, 8, 4, 4), to=store)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_view_is_taken_apart_and_rebuilt(data):
    view = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["slice", "transpose", "expand", "select", "unfold"]))
        dim = data.draw(st.integers(0, max(view.dim() - 1, 0)))
        if view.dim() == 0:
            break
        if kind == "slice":
            begin, step = data.draw(st.integers(0, view.shape[dim] - 1)), data.draw(st.integers(1, 3))
            view = view[(slice(None),) * dim + (slice(begin, None, step),)]
        elif kind == "transpose":
            view = view.transpose(dim, data.draw(st.integers(0, view.dim() - 1)))
        elif kind == "expand":
            times = data.draw(st.integers(1, 3))
            view = view.unsqueeze(dim).expand(*view.shape[:dim], times, *view.shape[dim:])
        elif kind == "select":
            view = view.select(dim, data.draw(st.integers(0, view.shape[dim] - 1)))
        else:
            view = view.unfold(dim, data.draw(st.integers(1, view.shape[dim])), 1)
    geometry = Geometry(view)
    flat = geometry.flat(view)
    again = geometry.rebuild(flat.clone())
    assert (flat.dim(), flat.is_contiguous()) == (1, True)
    assert flat.nbytes == geometry.nbytes <= max(view.nbytes, 1)
    assert torch.equal(again, view)
    assert (again.shape, again.stride()) == (view.shape, view.stride())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_the_same_in_every_precision(dtype, store):
    same(lambda x, y: (x * y).exp().tanh() * y, leaf(50, dtype=dtype), leaf(50, dtype=dtype), to=store)


def test_nan_inf_and_minus_zero_come_back(store):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45]).requires_grad_()
    same(lambda x: x * x, x, to=store)
    same(lambda x: x.exp() / x, x, to=store)


def test_complex_numbers_and_their_conjugates(store):
    a, b = leaf(4, 3, dtype=torch.complex64), leaf(3, 4, dtype=torch.complex64)
    same(lambda a, b: (a.conj() @ b.conj()) * (a @ b), a, b, to=store)
    same(lambda a, b: a.conj()[:, ::2] * b.t()[:, ::2].conj() * a[:, ::2], a, b, to=store)
    same(lambda a, b: a.conj().imag.exp() * b.t().imag, a, b, to=store)  # imag of a conj is a negative view


def test_sparse_and_negative_tensors_and_subclasses_stay_and_are_counted():
    class Mine(torch.Tensor):
        pass

    sparse, dense = torch.eye(3).to_sparse().requires_grad_(), leaf(3, 3)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        y = torch.sparse.mm(sparse, dense)
    y.sum().backward()
    assert torch.equal(dense.grad, torch.ones(3, 3))
    assert offload.moved_bytes == dense.nbytes
    assert offload.kept_bytes == 3 * 4 + 2 * 3 * 8  # its values and its indices

    for other in (torch.randn(10, dtype=torch.complex64).conj().imag, torch.randn(10).as_subclass(Mine)):
        x = leaf(10)
        with Offload(to=CountingStore(), min_bytes=0) as offload:
            y = x * other
        assert (offload.moved_bytes, offload.kept_bytes) in (
            (0, 40),
            (40, 0) if type(other) is Mine else (0, 40),
        )
        y.sum().backward()
        assert torch.equal(x.grad.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))


def test_noise_that_is_filled_after_it_was_saved_is_moved_filled(store):
    """RReLU saves its noise before it draws it, and the version counter says nothing."""
    relu, x = nn.RReLU(), leaf(50, 60)

    def compute(x):
        torch.manual_seed(5)
        return relu(x.tanh()).square()

    offload = same(compute, x, to=store)
    assert offload.moved_bytes == 3 * x.nbytes  # the result of tanh, the noise, what is squared
    assert offload.kept_bytes == 0


# ---- what is the same, and what is not ----


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
    with pytest.raises(RuntimeError, match=EDITED):
        of_h.backward()
    assert offload.moved_bytes > 0


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


@pytest.mark.parametrize("work", [newton, fused])
def test_what_is_saved_after_a_backward_is_not_taken_for_what_was_saved_before(work, store):
    found = []
    for context in (contextlib.nullcontext(), offload := Offload(to=store, min_bytes=0)):
        x = torch.tensor([3.0, 1.0], dtype=torch.float64, requires_grad=True)
        with context:
            work(x)
        found.append(x)
    assert torch.equal(*found)
    assert offload.moved_bytes > 0


@pytest.mark.parametrize("skips", [True, False])
def test_a_memory_that_numpy_fills_anew_between_the_blocks_is_saved_anew(skips):
    """While an older graph is alive: of a step that skipped its backward, or with `retain_graph=True`."""

    def gradients(offload):
        torch.manual_seed(0)
        model, x, found = nn.Sequential(nn.Linear(16, 4), nn.Tanh()), torch.zeros(8, 16), []
        for step in range(3):
            x.numpy()[:] = torch.randn(8, 16).numpy()
            with offload(model):
                loss = model(x).square().sum()
            if skips and step == 0:
                continue
            model.zero_grad()
            loss.backward(retain_graph=not skips)
            found += [param.grad.clone() for param in model.parameters()]
        return found

    offload = Offload(to=CountingStore(), min_bytes=0)
    expected = gradients(lambda model: contextlib.nullcontext())
    assert all(map(torch.equal, gradients(lambda model: offload), expected))
    assert offload.moved_bytes > 0


# ---- edits in place ----


@pytest.mark.parametrize("keep", [0, EVERYTHING])
@pytest.mark.parametrize("min_bytes", [0, 10**6])
def test_an_edit_after_saving_still_raises_and_nothing_is_read(keep, min_bytes):
    store, x = CountingStore(), leaf(50, dtype=torch.float64)
    with Offload(to=store, keep=keep, min_bytes=min_bytes) as offload:
        y = x.exp()
        z = y.sin()
    assert (offload.moved_bytes > 0) == (keep == min_bytes == 0)
    with torch.no_grad():
        y.add_(1)
    what = rf"{EDITED}: \[torch.DoubleTensor \[50\]\] is at version 1; expected version 0"
    with pytest.raises(RuntimeError, match=what):
        z.sum().backward()
    assert store.reads == 0


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.running_var"])
def test_an_edit_of_what_never_moves_still_raises(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    with Offload(model, to=CountingStore(), min_bytes=0):
        y = model(leaf(2, 4)).exp()
    with torch.no_grad():
        dict(model.state_dict(keep_vars=True))[name].add_(1)
    with pytest.raises(RuntimeError, match=rf"{EDITED}.*; expected version"):
        y.sum().backward()


def test_an_edit_through_a_view_still_raises_when_the_tensor_itself_is_gone():
    x = leaf(50)
    with Offload(to=CountingStore(), min_bytes=0) as offload:
        base = x * 1.0
        z = base.view(5, 10).sin()  # the view is saved and gone; the base is edited
    with torch.no_grad():
        base.add_(1)
    assert offload.moved_bytes > 0
    with pytest.raises(RuntimeError, match=EDITED):
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
    with pytest.raises(RuntimeError, match=EDITED):
        first.sum().backward()


class Square(torch.autograd.Function):
    """Its backward edits what it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grad)


def test_a_backward_that_edits_what_it_is_given_raises_as_in_plain_training():
    offload = Offload(to="disk", min_bytes=0)
    for context in (contextlib.nullcontext(), offload):
        w = torch.full((4,), 3.0, requires_grad=True)
        with context:
            x = w * 1.0
            y, z = x.sin(), Square.apply(x)
        with pytest.raises(RuntimeError, match=EDITED):
            (y + z).sum().backward()
    assert offload.moved_bytes > 0


def test_in_inference_mode_where_no_edit_is_noticed_each_backward_is_given_its_own_copy(store):
    w = torch.full((4,), 3.0, requires_grad=True)
    with Offload(to=store, min_bytes=0) as offload:
        x = w * 1.0
        loss = (x.sin() + Square.apply(x)).sum()
    with torch.inference_mode():
        loss.backward()
    assert offload.moved_bytes == x.nbytes
    assert torch.equal(w.grad, w.detach().cos() + 2 * w.detach())


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
    assert offload.moved_bytes > 0


@pytest.mark.parametrize("inside", [True, False])
def test_double_backward(store, inside):
    x = leaf(50)
    offload = Offload(to=store, min_bytes=0)
    with offload:
        y = (x**3).sum()
    with offload if inside else contextlib.nullcontext():
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    z = torch.autograd.grad(torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].sum(), x)[0]
    assert torch.equal(second, z)
    assert offload.moved_bytes > 0


@pytest.mark.parametrize("keep", [0, EVERYTHING])
def test_a_graph_that_is_dropped_frees_everything(keep, without_collector):
    store, x = CountingStore(), leaf(1000)
    offload = Offload(to=store, keep=keep, min_bytes=0)
    with offload:
        y = x.exp()
        output = weakref.ref(y.untyped_storage())
        z = y.sin().exp()
    assert store.held == (0 if keep else 2)
    del y, z
    assert (store.held, output()) == (0, None)
    reference = weakref.ref(offload)
    del offload
    assert reference() is None


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("keep", [0, EVERYTHING])
def test_after_the_block_nothing_keeps_the_model(keep, raises, without_collector):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    offload = Offload(model, to=CountingStore(), keep=keep, min_bytes=0)
    with contextlib.suppress(ZeroDivisionError), offload:
        model.loss = model(torch.ones(2, 3)).sum()  # a result that is an attribute of the model
        assert not raises or 1 / 0
    assert offload.moved_bytes + offload.kept_bytes > 0
    alive = weakref.ref(model)
    del model
    assert alive() is None


def test_a_checkpoint_has_its_input_moved_and_recomputes_the_rest():
    model, x = mlp(8, 16, 4), leaf(6, 8)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    for reentrant in (True, False):
        with Offload(model, to=CountingStore(), min_bytes=0) as offload:
            y = checkpoint(model, x, use_reentrant=reentrant)
        assert offload.moved_bytes == x.nbytes
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0] if not reentrant else expected, expected)


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


def chain(length, store, **options):
    y = leaf(10)
    with Offload(to=store, min_bytes=0, **options):
        for _ in range(length):
            y = y.exp().mul(0.1)
    return y.sum()


def test_what_is_wanted_next_is_asked_for_early_from_the_newest_to_the_oldest():
    store = Prefetching()
    loss = chain(6, store, prefetch=80)  # room for two of 40 bytes
    loss.backward(retain_graph=True)
    first, store.log = store.log, []
    assert first == [
        ("read", 6), ("prefetch", 5), ("prefetch", 4),
        ("read", 5), ("prefetch", 3), ("read", 4), ("prefetch", 2), ("read", 3), ("prefetch", 1),
        ("read", 2), ("read", 1),
    ]  # fmt: skip
    loss.backward()
    assert store.log == first


def test_one_tensor_is_read_ahead_however_large_and_none_without_room():
    store = Prefetching()
    chain(3, store, prefetch=1).backward()
    assert store.log == [("read", 3), ("prefetch", 2), ("read", 2), ("prefetch", 1), ("read", 1)]
    store = Prefetching()
    chain(4, store, prefetch=0).backward()
    assert store.log == [("read", number) for number in (4, 3, 2, 1)]


def test_reading_ahead_begins_while_what_stayed_is_used():
    store = Prefetching()
    chain(6, store, prefetch=80, keep=120).backward()
    assert store.log[:3] == [("prefetch", 3), ("prefetch", 2), ("read", 3)]


def test_a_hint_that_fails_does_not_end_backward():
    class Hinted(CountingStore):
        def prefetch(self, slot):
            raise OSError("no room to read ahead")

    same(lambda w: w.exp().sin().exp().sin(), leaf(4), to=Hinted())


@pytest.mark.parametrize(("prefetch", "reads"), [(0, 10), (1, 5), (40, 5), (10**6, 5)])
def test_what_is_used_twice_is_read_once_where_there_is_room(prefetch, reads):
    def compute(y):
        for _ in range(5):
            y = y.exp().sin()  # the result of exp is saved by both
        return y

    store = CountingStore()
    same(compute, leaf(10), to=store, prefetch=prefetch)
    assert (store.writes, store.reads) == (5, reads)


# ---- contexts ----


def test_the_innermost_context_wins():
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


def test_contexts_that_are_left_in_another_order_give_the_same_gradients():
    x = leaf(10)
    (expected,) = torch.autograd.grad(x.exp().sin().exp().sum(), x)
    one, other = (Offload(to=CountingStore(), min_bytes=0) for _ in range(2))
    one.__enter__(), other.__enter__()
    y = x.exp()
    one.__exit__(None, None, None)
    y = y.sin()
    other.__exit__(None, None, None)
    y = y.exp()
    y.sum().backward()
    assert torch.equal(x.grad, expected)
    assert (one.moved_bytes, other.moved_bytes) == (
        40,
        40,
    )  # PyTorch takes off the newest first; then nothing moves


def test_a_model_or_a_block_that_is_open_already_is_refused():
    model = nn.Linear(2, 2)
    offload = Offload(to=CountingStore())
    with offload, Offload(model, to=CountingStore()):
        with pytest.raises(RuntimeError, match="this model is being offloaded already"):
            Offload(model, to=CountingStore()).__enter__()
        with pytest.raises(RuntimeError, match="this block is open already; make another Offload"):
            offload.__enter__()
        model(torch.ones(1, 2))
    with offload, Offload(model, to=CountingStore()):
        model(torch.ones(1, 2))


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


def test_what_is_collected_while_another_thread_holds_the_queue_waits_for_nobody():
    """The collector may run in a thread that holds the lock of a store; to wait there for the queue is a deadlock."""
    queue = Queue(Disk(), keep=10**6, prefetch=0)
    box, held, go_on = [queue.pack(torch.ones(100))], threading.Event(), threading.Event()

    def hold():
        with queue.lock:
            held.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    assert queue.waiting.used == 400
    box.clear()  # returns, though the queue is in other hands
    go_on.set()
    thread.join()
    assert queue.waiting.used == 0


def works_elsewhere(model):
    return model(torch.ones(1, 4)).sum().item()


def test_the_model_is_left_as_it_was_and_can_be_copied_and_sent_to_another_process():
    model, x = mlp(4, 5, 2), torch.ones(1, 4)
    with no_leftovers(model), Offload(model, to=CountingStore(), min_bytes=0) as offload:
        loss = model(x).sum()
        here = loss.item()
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        torch.save(model, io.BytesIO())
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(works_elsewhere, (model,)) == pytest.approx(here)
    assert offload.moved_bytes == x.nbytes + 5 * 4
    loss.backward()
    for other in copies:
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied_without_a_word(copied):
    with pytest.raises(TypeError, match=r"Offload: it cannot be copied or pickled.*make one for each block"):
        copied(Offload())


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
    assert (store.held, offload.moved_bytes) == (0, 40)
    store.fails_at = None
    with offload:
        y = x.exp().sin()
    assert offload.moved_bytes == 2 * 40
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())
    assert store.held == 0


def test_a_store_that_fails_to_write_an_older_tensor_does_not_lose_it():
    store, x = Broken(), leaf(10)
    (expected,) = torch.autograd.grad(x.exp().sin().exp().cos().exp().sum(), x)
    store.fails_at = "write"
    with Offload(to=store, keep=40, min_bytes=0) as offload:
        second = x.exp().sin().exp()  # moves what the first exp saved
        with pytest.raises(OSError, match="the store is full"):
            second.cos().exp()  # moves what the second exp saved
        store.fails_at = None
        assert offload.moved_bytes == 40
        third = second.cos().exp()  # and now it moves
    assert (offload.moved_bytes, store.held) == (2 * 40, 2)
    third.sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_store_that_fails_to_read_can_be_asked_again():
    store, x = Broken(), leaf(10)
    with Offload(to=store, min_bytes=0):
        y = x.exp()
    store.fails_at = "read"
    with pytest.raises(OSError, match="cannot be read"):
        y.sum().backward(retain_graph=True)
    store.fails_at = None
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_nothing_and_the_next_one_is_right(error):
    store, model, x = CountingStore(), mlp(4, 4), torch.ones(2, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor is it warned about
        with pytest.raises(error), Offload(model, to=store, min_bytes=0):
            raise error
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    assert store.writes == 0  # the hooks are off
    with Offload(model, to=store, min_bytes=0) as offload:
        loss = model(x).square().sum()
    loss.backward()
    assert torch.equal(x.grad, expected)
    assert offload.moved_bytes > 0


def test_a_store_that_fails_at_the_end_of_the_block_leaves_no_hook():
    store, weight = Broken(), leaf(10)
    store.fails_at, store.writes = "write", 1
    offload = Offload(to=store, min_bytes=0)
    with pytest.raises(OSError, match="the store is full"), offload:
        y = weight * torch.ones(10)  # might still be filled: it waits for the end of the block
    assert offload.moved_bytes == 0
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


def test_a_store_may_have_none_for_a_slot_and_give_back_a_column():
    class Columns:
        """Looks at the bytes, as a file would, and hands out every second number of a row."""

        def write(self, tensor):
            self.last = torch.frombuffer(bytearray(tensor.numpy().tobytes()), dtype=tensor.dtype)

        def read(self, slot):
            assert slot is None
            return torch.stack([self.last, self.last], 1)[:, 0]

    same(lambda x: x[::2].exp(), leaf(6), to=Columns())


# ---- bad input, and what is said ----


class Half:
    def write(self, tensor):
        return tensor


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": -1}, ValueError, r"Offload\(keep=-1\): expected 0 or more"),
        ({"prefetch": -1}, ValueError, r"Offload\(prefetch=-1\)"),
        (
            {"keep": 1e9},
            TypeError,
            r"keep=...\): expected a whole number, found float; write keep=1000000000$",
        ),
        ({"min_bytes": 1.5}, TypeError, r"Offload\(min_bytes=...\): expected a whole number, found float"),
        ({"to": "gpu"}, TypeError, r"""expected "cpu", "disk", or a store .* found 'gpu'"""),
        ({"to": object()}, TypeError, "found object without write and read"),
        ({"to": Half()}, TypeError, "found Half without read"),
        ({"to": CountingStore}, TypeError, r"found the class CountingStore; make one: to=CountingStore\(\)"),
        ({"model": "resnet"}, TypeError, "Offload: expected a module, found str"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Offload(**options)


def test_a_block_that_saves_nothing_is_announced():
    idle = Offload(nn.Linear(2, 2), to=CountingStore())
    with pytest.warns(UserWarning, match="nothing of the model was saved for backward by this block"), idle:
        pass
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="with grad on"), Offload(model, to=CountingStore()), torch.no_grad():
        model(torch.ones(1, 2))


def test_a_block_in_which_anything_was_saved_ends_without_a_warning():
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Offload(model, to=CountingStore()) as offload:  # too small to be moved
            model(x)
        assert (offload.moved_bytes, offload.kept_bytes) == (0, 8)
        with Offload(to=CountingStore()):  # without a model nothing is expected
            pass
        with torch.no_grad(), Offload(model, to=CountingStore()):  # a wrapped layer in evaluation
            model(x)


# ---- limits ----


def test_a_compiled_model_in_a_block_has_the_same_gradients():
    torch._dynamo.reset()
    model, x = mlp(8, 8, 4), torch.randn(6, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with Offload(model, to=CountingStore(), min_bytes=0) as offload:
        loss = torch.compile(model, backend="aot_eager")(x).sum()
    assert all(map(torch.equal, torch.autograd.grad(loss, list(model.parameters())), expected))
    assert offload.moved_bytes > 0
    torch._dynamo.reset()


def test_with_fullgraph_a_block_inside_is_refused_in_words():
    torch._dynamo.reset()
    model = mlp(4, 4)

    def step(x):
        with Offload(model, to=CountingStore()):
            return model(x).sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"cannot be opened inside torch\.compile"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2, 4))
    torch._dynamo.reset()


def test_transforms_of_torch_func_refuse_to_run_in_a_block():
    with Offload(to=CountingStore()), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.exp().sum())(torch.ones(3))


def test_an_edit_that_moves_no_version_is_not_noticed():
    """As by autograd itself; what has moved has the content of before."""
    x, h = leaf(4), torch.ones(4)
    with Offload(to=CountingStore(), min_bytes=0):
        y = x * h
    h.data.fill_(7.0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4))
