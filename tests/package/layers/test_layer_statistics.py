"""layer_statistics: the figures of torch on all tensors concatenated, without keeping a tensor."""

import copy
import gc
import importlib.util
import math
import pickle
import threading
import weakref

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import NESTED, Constant, Known, Returns, Twice, mlp, same_state, state_of
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from hooklab import hooks_on, layer_statistics, no_leftovers
from hooklab.layers.figures import CHUNK, FEW, HALF, MAX_SHAPES, as_array, careful, per_thread
from hooklab.layers.histogram import MAX_ROWS
from hooklab.layers.streaming import STAGED, Running


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 6, 2)


def figures_of(tensors, bins=0, range=(-10.0, 10.0)):
    running = Running(bins, range)
    for tensor in tensors:
        running.add(tensor)
    return running.read()


def assert_exact(figures, tensors):
    """The figures are those of torch in float64 on the finite entries of all tensors."""
    everything = torch.cat([tensor.flatten().double() for tensor in tensors])
    finite = everything[everything.isfinite()]
    assert figures.calls == len(tensors)
    assert figures.count == everything.numel()
    assert figures.nans == everything.isnan().sum()
    assert figures.infs == everything.isinf().sum()
    if finite.numel() == 0:
        assert all(map(math.isnan, (figures.mean, figures.std, figures.min, figures.max)))
        return
    size = finite.abs().max().item()
    assert figures.min == finite.min()
    assert figures.max == finite.max()
    assert figures.zeros == pytest.approx((everything == 0).sum().item() / everything.numel())
    assert figures.mean == pytest.approx(finite.mean().item(), rel=1e-12, abs=1e-14 * size)
    if finite.numel() > 1:
        assert figures.std == pytest.approx(finite.std().item(), rel=1e-7, abs=1e-12 * size)
    else:
        assert math.isnan(figures.std)


# ---- exact ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(7,), (3, 5), (2, 64, 33, 31), (STAGED,), (FEW,), (1, FEW + 1), (CHUNK,), (1, CHUNK + 33)]
)
def test_the_figures_are_those_of_torch_in_float64(dtype, shape):
    torch.manual_seed(0)
    tensors = [(torch.randn(shape) * 3 + 1).to(dtype) for _ in range(3)]
    assert_exact(figures_of(tensors), tensors)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers_and_truth_values_are_counted_too(dtype):
    tensors = [torch.tensor([0, 1, 1, 0, 1]).to(dtype)]
    assert_exact(figures_of(tensors), tensors)


@pytest.mark.parametrize("offset", [1e3, 1e6, -1e8])
def test_a_large_mean_does_not_drown_a_small_spread(offset):
    torch.manual_seed(0)
    tensors = [torch.randn(1000, dtype=torch.float64) + offset for _ in range(20)]
    assert_exact(figures_of(tensors), tensors)


@pytest.mark.parametrize("size", [FEW, CHUNK, 3 * CHUNK])
@pytest.mark.parametrize("number", [0.1, 1e6 + 0.1, -1e8 / 3])
def test_the_mean_of_nearly_equal_numbers_is_right_to_the_last_digits(number, size):
    """Equal ones are all rounded to the same side as they are added up."""
    tensor = torch.full((size,), number, dtype=torch.float64)
    tensor[0] *= 1 + 1e-9
    exact = math.fsum(tensor.tolist()) / size
    assert figures_of([tensor]).mean == pytest.approx(exact, rel=4e-16, abs=0)
    assert_exact(figures_of([tensor]), [tensor])


def test_a_constant_layer_has_no_spread_at_all():
    assert figures_of([torch.full((50_000,), 0.1)] * 3).std == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_tensors_of_few_and_of_many_numbers_in_turn_do_not_disturb_each_other(dtype):
    torch.manual_seed(0)
    sizes = (FEW, CHUNK, FEW - 1, 3 * CHUNK, STAGED, FEW + 1, FEW)
    tensors = [(torch.randn(size) * scale).to(dtype).relu() for scale, size in enumerate(sizes, 1)]
    assert_exact(figures_of(tensors), tensors)
    for tensor in tensors:  # each by itself
        assert_exact(figures_of([tensor]), [tensor])


@pytest.mark.parametrize("size", [FEW, CHUNK])
def test_the_bounds_of_one_layer_are_not_those_of_the_next(size):
    """What is used again and again is memory of our own: figures that wait to be merged are numbers by then."""
    first, second = Running(0, (-1.0, 1.0)), Running(0, (-1.0, 1.0))
    first.add(torch.linspace(-5, 7, size))
    second.add(torch.linspace(-1, 2, size))
    assert (first.read().min, first.read().max) == (-5, 7)
    assert (second.read().min, second.read().max) == (-1, 2)


SIGNS = {
    "above 0": (0.25, 1.0, 3.0),
    "below 0": (-0.25, -1.0, -3.0),
    "on both sides": (-2.0, 0.5, 3.0),
    "with zeros": (-2.0, 0.0, 3.0),
    "after ReLU": (0.0, 0.5, 3.0),
    "up to 0": (-2.0, -0.5, 0.0),
    "zeros of both signs": (0.0, -0.0),
    "negative zeros alone": (-0.0,),
    "dropped out": (0.0, -0.0, 2.0, -4.0),
    "above a negative zero": (-0.0, 0.5, 2.0),
    "below a negative zero": (-0.0, -0.5, -2.0),
    "hardly above 0": (1e-38, 1e-45, 0.0),
    "hardly below 0": (-1e-45, -1e-38, 0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [STAGED, FEW, FEW + 1, CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("values", SIGNS.values(), ids=SIGNS)
def test_the_bounds_and_the_zeros_are_right_for_numbers_of_any_sign(values, size, dtype):
    """The bits of -0.0 are not those of 0.0, and those of negative numbers are in another order."""
    torch.manual_seed(0)
    tensor = torch.tensor(values)[torch.randint(len(values), (size,))].to(dtype)
    assert_exact(figures_of([tensor]), [tensor])


class Wrapped(torch.Tensor):
    """A tensor whose entries lie in another one: its own memory has none of them."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, Wrapped) else value

        args, kwargs = tree_map(unwrap, (args, kwargs or {}))
        result = function(*args, **kwargs)
        views = function in (torch.ops.aten.view.default, torch.ops.aten.split.Tensor)
        return tree_map(Wrapped, result) if views else result


def seen_otherwise(kind, tensor):
    """The same entries, in memory that NumPy must not be given, or not in this order."""
    if kind == "transposed":
        return tensor.view(2, -1).t()
    if kind == "every second":
        return torch.stack([tensor, tensor + 100], 1)[:, 0]
    if kind == "negated when read":
        return torch._neg_view(-tensor)
    if kind == "half of a complex one":
        seen = torch.complex(torch.zeros(()), -tensor).conj().imag
        assert seen.is_neg()
        return seen
    if kind == "wrapped":
        return Wrapped(tensor)
    if kind == "in the middle":
        return torch.cat([torch.full((3,), -99.0), tensor, torch.full((5,), 99.0)])[3:-5]
    if kind == "a parameter":
        return nn.Parameter(tensor.clone())
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("size", [FEW, FEW + 2, 3 * CHUNK + 8])
@pytest.mark.parametrize(
    "kind",
    [
        *("transposed", "every second", "negated when read", "half of a complex one"),
        *("in the middle", "a parameter", "wrapped", "for inference"),
    ],
)
def test_however_the_entries_lie_in_memory_they_are_counted(kind, size):
    torch.manual_seed(0)
    tensor = torch.randn(size)
    assert_exact(figures_of([seen_otherwise(kind, tensor)]), [tensor])


def test_a_negative_zero_is_written_as_zero():
    layer = nn.Identity()
    with layer_statistics(layer, "") as stats:
        layer(torch.full((3,), -0.0))
    assert stats.table().splitlines()[-1].split() == ["''", "1", *["0.0000"] * 4, "100.0%", "0", "0"]


@pytest.mark.parametrize("size", [FEW, FEW + 1, CHUNK, 3 * CHUNK])
def test_a_tensor_that_was_counted_can_still_be_resized(size):
    tensor = torch.randn(size)
    figures_of([tensor])
    assert tensor.resize_(2 * size).numel() == 2 * size


@pytest.mark.parametrize("shape", [(FEW + 1,), (3, FEW), (2, CHUNK, 3)])
def test_numpy_reads_the_memory_of_the_tensor_itself(shape):
    tensor = torch.randn(shape)
    array = as_array(tensor)
    assert (array.ctypes.data, array.dtype) == (tensor.data_ptr(), numpy.float32)
    assert array.tolist() == tensor.flatten().tolist()


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("size", [50, 130])
def test_channels_may_come_last(images, size):
    torch.manual_seed(0)
    tensor = torch.randn(images, 8, size, size).relu().contiguous(memory_format=torch.channels_last)
    array = as_array(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    assert array.tolist() == tensor.permute(0, 2, 3, 1).flatten().tolist()
    assert_exact(figures_of([tensor]), [tensor])
    assert as_array(tensor[:, :5]) is as_array(tensor.mT[:, :, 1:]) is None
    assert_exact(figures_of([tensor[:, :5]]), [tensor[:, :5]])


@pytest.mark.parametrize("size", [FEW + 1, CHUNK + 1])
def test_zeros_without_memory_are_counted(size):
    zeros = torch._efficientzerotensor((size,))
    assert zeros._is_zerotensor()
    figures = figures_of([zeros])
    assert (figures.count, figures.zeros, figures.mean, figures.std) == (size, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("fallback", [False, True])
def test_what_numpy_does_about_errors_is_as_before(fallback, monkeypatch):
    with monkeypatch.context() as other_numpy:
        if fallback:
            other_numpy.delattr(numpy._core.umath, "_extobj_contextvar")
            other_numpy.delattr(numpy._core.multiarray, "count_nonzero")
        source = importlib.util.find_spec("hooklab.layers.figures")
        figures = importlib.util.module_from_spec(source)
        source.loader.exec_module(figures)
    tensor = torch.randn(2 * CHUNK)
    tensor.view(torch.int32)[5] = 0x7FA00000
    with numpy.errstate(all="raise", under="call"):
        before = numpy.geterr()
        assert figures.Scratch().figures_in_parts(as_array(tensor)) is None
        assert numpy.geterr() == before
        numbers = figures.Scratch().figures_in_parts(as_array(tensor[6:]))
        assert numbers[0] == tensor[6:].numel()
        assert numbers[1] == pytest.approx(tensor[6:].double().mean().item(), rel=1e-12)
        with pytest.raises(FloatingPointError):
            numpy.array([1.0]) / 0


@pytest.mark.parametrize("size", [STAGED - 1, FEW, FEW + 1, 3 * CHUNK + 7])
def test_a_signaling_nan_is_a_nan_among_others(size):
    tensor = torch.randn(size)
    tensor.view(torch.int32)[5] = 0x7FA00000  # NumPy warns of it in a cast, or raises
    with numpy.errstate(all="raise"):
        assert_exact(figures_of([tensor]), [tensor])


def test_large_tensors_of_many_sizes_share_the_memory_they_are_measured_in():
    torch.manual_seed(0)
    scratch = per_thread.scratch
    tensors = [torch.randn(2 * CHUNK + size).relu() for size in range(0, 8 * MAX_SHAPES, 2)]
    assert_exact(figures_of(tensors), tensors)
    assert 0 < len(scratch.rows) <= MAX_SHAPES
    for size, (rows, columns, wide) in scratch.rows.items():
        assert wide.size == size == columns.numel() >= CHUNK / 2
        assert (
            rows[1].data_ptr() == columns.data_ptr() == wide.ctypes.data == scratch.memory[HALF:].data_ptr()
        )
        assert torch.equal(rows[0], torch.ones(size // 2, dtype=torch.float64))


def test_many_small_tensors_beside_large_ones():
    torch.manual_seed(0)
    tensors = [
        torch.randn(size) for size in (1, 5, STAGED - 1, STAGED + 1, 3, CHUNK + 5_000, 1, 2, 4000, 5000)
    ]
    assert_exact(figures_of(tensors), tensors)


numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0])


@settings(max_examples=150, deadline=None)
@given(
    lists=st.lists(st.lists(numbers, max_size=40), min_size=1, max_size=12),
    repeat=st.sampled_from([1, 400, 700]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_figures_are_exact_for_any_numbers(lists, repeat, dtype):
    tensors = [torch.tensor(values * repeat, dtype=dtype) for values in lists]
    assert_exact(figures_of(tensors), tensors)


@settings(max_examples=60, deadline=None)
@given(
    lists=st.lists(st.lists(numbers, min_size=1, max_size=40), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_way_taken_on_a_gpu_gives_the_same(lists, dtype):
    """Without a GPU the same operations run on the CPU: `_careful` and `_merged` never look at a value."""
    tensors = [torch.tensor(values).to(dtype) for values in lists]
    running = Running(0, (-10.0, 10.0))
    for tensor in tensors:
        running._calls += 1
        running._count += tensor.numel()
        running._pending.append(careful(tensor))
    assert_exact(running.read(), tensors)


@pytest.mark.parametrize("size", [FEW + 1, CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize(
    "ends", [(-5, 7), (7, -5), (1, 9), (-9, -1), (-3, 0), (0, 3), (999, 1001), (-1e6, -1e6 - 1)]
)
def test_large_tensors_whose_parts_are_unlike(size, ends):
    """All below 0 first, all above it last; far from 0; a spread that is little beside the mean."""
    tensor = torch.linspace(*ends, size)
    assert_exact(figures_of([tensor, tensor.flip(0)]), [tensor, tensor])


@pytest.mark.parametrize("size", [FEW, FEW + 1, CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e30])
def test_one_entry_that_does_not_fit_in_a_large_tensor(size, where, number):
    torch.manual_seed(0)
    tensor = torch.randn(size)
    tensor[where] = number
    assert_exact(figures_of([tensor, tensor]), [tensor, tensor])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_nothing_waits_for_it_until_the_figures_are_read():
    model, x = mlp(4, 300, 2).cuda(), torch.randn(700, 4, device="cuda")
    with layer_statistics(model, "0", bins=4) as stats, layer_statistics(model, "0", of="grad_output"):
        model(x).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(300):
                model(x).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_exact(stats["0"], [model[0](x).detach().cpu()] * 301)


def test_nan_and_inf_are_counted_and_kept_out_of_the_rest():
    figures = figures_of([torch.tensor([1.0, math.nan, 3.0, -math.inf]), torch.full((STAGED,), math.nan)])
    assert (figures.count, figures.nans, figures.infs) == (STAGED + 4, STAGED + 1, 1)
    assert (figures.mean, figures.min, figures.max) == (2.0, 1.0, 3.0)
    assert figures.std == pytest.approx(math.sqrt(2))


def test_empty_tensors_count_as_calls():
    figures = figures_of([torch.empty(0, 3)])
    assert (figures.calls, figures.count) == (1, 0)
    assert math.isnan(figures.mean)


def test_meta_tensors_have_no_figures_but_their_number():
    model = mlp(4, 3, 2).to("meta")
    with layer_statistics(model, "0", bins=4) as stats:
        model(torch.ones(7, 4, device="meta"))
    assert (stats["0"].calls, stats["0"].count) == (1, 21)
    assert math.isnan(stats["0"].mean)


def test_nested_sparse_and_complex_tensors():
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert figures_of([ragged]).count == 18
    assert figures_of([torch.eye(4).to_sparse()]).zeros == 0.75
    assert figures_of([torch.tensor([3 + 4j])]).mean == 5


# ---- histograms ----


def test_the_lengths_in_a_packed_sequence_are_not_counted():
    lstm = nn.LSTM(3, 4)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 3]))
    with layer_statistics(lstm, "") as s:
        output, (h, c) = lstm(packed)
    counted = torch.cat([output.data.flatten(), h.flatten(), c.flatten()]).double()
    assert s[""].count == counted.numel()
    assert s[""].max == counted.max().item()
    assert s[""].mean == pytest.approx(counted.mean().item(), rel=1e-12)


def test_the_histogram_is_that_of_torch_with_the_rest_counted_apart():
    torch.manual_seed(0)
    tensors = [torch.randn(1000) * 3 for _ in range(5)]
    figures = figures_of(tensors, bins=8, range=(-2.0, 3.0))
    everything = torch.cat(tensors)
    assert figures.histogram == torch.histc(everything, 8, -2, 3).long().tolist()
    assert figures.below == (everything < -2).sum()
    assert figures.above == (everything > 3).sum()
    assert figures.below + figures.above + sum(figures.histogram) == everything.numel()
    assert figures.history.tolist() == [torch.histc(tensor, 8, -2, 3).long().tolist() for tensor in tensors]
    assert figures.range == (-2.0, 3.0)
    edges = figures_of([torch.tensor([-2.0, 3.0])], bins=2, range=(-2.0, 3.0))
    assert (edges.below, edges.above, edges.histogram) == (0, 0, [1, 1])


def test_infinities_fall_outside_and_nans_nowhere():
    figures = figures_of([torch.tensor([math.inf, -math.inf, math.nan, 0.0])], bins=2, range=(-1.0, 1.0))
    assert (figures.below, figures.above, figures.histogram) == (1, 1, [0, 1])


def test_the_history_of_a_long_run_keeps_its_size_and_loses_no_count():
    calls = 5 * MAX_ROWS + 3
    figures = figures_of([torch.tensor([float(call)]) for call in range(calls)], bins=3, range=(0.0, calls))
    assert figures.history.shape[0] <= MAX_ROWS
    assert figures.history.sum() == calls
    assert figures.calls == calls
    assert figures.history.sum(1).tolist() == [8] * 320 + [3]  # every row stands for equally many calls


def test_small_tensors_wait_to_be_counted_but_not_for_ever():
    running = Running(0, (-1.0, 1.0))
    for _ in range(300):
        running.add(torch.ones(100))
        assert sum(part.numel() for part in running._staged) < STAGED + 100
    assert running.read().count == 30_000


def test_without_bins_there_is_no_histogram():
    assert figures_of([torch.ones(3)]).histogram is None


def test_dtypes_without_a_histogram_of_their_own_are_counted():
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        assert figures_of([torch.ones(3, dtype=dtype)], bins=2, range=(0.0, 2.0)).histogram == [0, 3]


# ---- through hooks ----


def test_outputs_over_several_steps(model):
    torch.manual_seed(1)
    outputs = {"1": [], "2": []}
    for name, kept in outputs.items():
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, kept=kept: kept.append(output.detach())
        )
    with layer_statistics(model, *outputs) as stats:
        for _ in range(10):
            model(torch.randn(3, 4))
    for name, kept in outputs.items():
        assert_exact(stats[name], kept)


def test_gradients_of_outputs_also_beside_in_place_layers():
    for inplace in (False, True):
        torch.manual_seed(0)
        model, x = mlp(4, 5, 6, 2, inplace=inplace), torch.randn(3, 4)
        plain = copy.deepcopy(model)
        for layer in plain:
            if isinstance(layer, nn.ReLU):
                layer.inplace = False
        with layer_statistics(model, "*", of="grad_output") as stats:
            for _ in range(3):
                model(x).square().sum().backward()
        for index in range(len(plain)):
            hidden = plain[: index + 1](x)
            loss = plain[index + 1 :](hidden).square().sum()
            (grad,) = torch.autograd.grad(loss, hidden)
            assert_exact(stats[str(index)], [grad] * 3)


def test_nested_outputs_count_every_tensor():
    for name in ("tuple", "list", "dict", "named", "dataclass", "torch.max", "pytree"):
        model, x = Returns(NESTED[name][0]), torch.arange(6.0).reshape(2, 3)
        with layer_statistics(model, "") as stats:
            model(x)
        flat = []
        _collect(NESTED[name][0](x), flat)
        assert_exact(stats[""], flat)


def _collect(value, flat):
    if isinstance(value, torch.Tensor):
        flat.append(value)
    elif isinstance(value, dict):
        _collect(list(value.values()), flat)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, flat)
    elif hasattr(value, "__dataclass_fields__") or isinstance(value, Known):
        _collect(list(vars(value).values()), flat)


def test_a_layer_called_twice_counts_twice_and_its_names_share_the_figures():
    model = Twice()
    with layer_statistics(model, "step", "again") as stats:
        model(torch.ones(2, 3))
    assert stats["step"].calls == 2
    assert stats["again"] == stats["step"]


def test_no_tensor_is_kept(model):
    alive = []
    model[1].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    with layer_statistics(model, "**", of="output"), layer_statistics(model, "**", of="grad_output"):
        model(torch.randn(3000, 4)).sum().backward()
        gc.collect()
        assert alive[0]() is None


def test_recomputation_under_checkpointing_is_not_counted():
    block, x = mlp(4, 4, 4), torch.ones(2, 4, requires_grad=True)
    for reentrant in (False, True):
        for of in ("output", "grad_output"):
            with layer_statistics(block, "*", of=of) as stats:
                checkpoint(block, x, use_reentrant=reentrant).sum().backward()
            assert [figures.calls for figures in stats.values()] == [1, 1, 1], (reentrant, of)


def test_a_layer_that_a_function_calls_in_its_backward_is_not_counted():
    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return layer(x)

        @staticmethod
        def backward(ctx, grad):
            return layer(grad)

    layer = nn.Linear(3, 3)
    with layer_statistics(layer, "") as stats:
        Adjoint.apply(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert stats[""].calls == 1


def test_a_gradient_that_is_none_is_not_counted(model):
    with layer_statistics(model, "*", of="grad_output") as stats:
        x = model[0](torch.ones(2, 4))
        (Constant.apply(model[1](x)).sum() + x.sum()).backward()
    assert list(stats) == ["0"]


def test_threads_that_count_large_tensors_and_read_lose_no_count():
    model, tensors = nn.Identity(), [torch.randn(STAGED + number) for number in range(4)]

    def count(tensor):
        for _ in range(100):
            model(tensor)
            assert stats[""].calls

    with layer_statistics(model, "") as stats:
        threads = [threading.Thread(target=count, args=(tensor,)) for tensor in tensors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stats[""].calls == 400
    assert_exact(stats[""], [tensor for tensor in tensors for _ in range(100)])


def test_threads_lose_no_count(model):
    x = torch.randn(50, 4)
    with layer_statistics(model, "1") as stats:
        threads = [threading.Thread(target=lambda: [model(x) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stats["1"].calls == 200
    assert stats["1"].count == 200 * 250
    assert stats["1"].mean == pytest.approx(model[:2](x).double().mean().item())


def test_inference_mode_and_training_can_alternate(model):
    x = torch.randn(3000, 4)
    with layer_statistics(model, "0", bins=3) as stats:
        with torch.inference_mode():
            model(x)
        model(x).sum().backward()
        with torch.inference_mode():
            model(x)
    assert_exact(stats["0"], [model[0](x).detach()] * 3)


def test_outputs_and_gradients_are_bit_equal_during_the_block(model):
    x = torch.randn(3, 4)
    plain = torch.autograd.grad(model(x).sum(), model.parameters())
    with layer_statistics(model, "**", bins=4), layer_statistics(model, "**", of="grad_output"):
        watched = torch.autograd.grad(model(x).sum(), model.parameters())
    assert all(map(torch.equal, plain, watched))


def test_after_the_block_the_model_is_as_before(model):
    before, plain = state_of(model), pickle.dumps(model)
    with no_leftovers(model), layer_statistics(model, "**"), layer_statistics(model, "**", of="grad_output"):
        model(torch.ones(2, 4)).sum()
    assert same_state(before, state_of(model))
    assert pickle.dumps(model) == plain


def test_a_backward_after_the_block_is_not_counted(model):
    with layer_statistics(model, "0", of="grad_output") as stats:
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    with pytest.raises(
        KeyError, match=r"no gradient of '0' yet; run the model and backward\(\) inside the block"
    ):
        stats["0"]


def test_a_leaf_that_a_layer_hands_through_keeps_no_hook():
    x = torch.ones(2, requires_grad=True)
    model = nn.Sequential(nn.Identity())
    with layer_statistics(model, "0", of="grad_output") as stats:
        model(x).sum().backward()
    assert stats["0"].mean == 1
    assert hooks_on(x) == []


def test_a_forward_that_fails_leaves_the_figures_and_no_hook(model):
    model[4] = nn.Linear(99, 2)
    with no_leftovers(model), pytest.raises(RuntimeError), layer_statistics(model, "*") as stats:
        model(torch.ones(2, 4))
    assert list(stats) == ["0", "1", "2", "3"]
    assert "4" not in stats


@pytest.mark.parametrize("inside", [False, True], ids=["registered before", "registered inside"])
@pytest.mark.parametrize("of", ["output", "grad_output"])
def test_an_error_of_a_users_hook_arrives_as_it_is_and_the_next_step_is_counted(model, inside, of):
    def broken(module, args, output):
        raise error

    error, x = ValueError("from a hook of the user's"), torch.linspace(-1, 1, 8).view(2, 4)
    counted = [] if of == "grad_output" else ["0", "1"] if inside else ["0"]  # there is no backward
    expected = {}
    for index in range(3):
        output = model[: index + 1](2 * x)
        once = [output] if of == "output" else torch.autograd.grad(model[index + 1 :](output).sum(), output)
        expected[str(index)] = [model[: index + 1](x)] * (str(index) in counted) + [*once]
    handle = None if inside else model[1].register_forward_hook(broken)
    with layer_statistics(model, *expected, of=of) as stats:
        handle = handle or model[1].register_forward_hook(broken)
        with pytest.raises(ValueError, match="from a hook of the user's") as raised:
            model(x)
        assert raised.value is error
        assert not hasattr(error, "__notes__")
        assert list(stats) == counted
        handle.remove()
        model(2 * x).sum().backward()
    for name, tensors in expected.items():
        assert_exact(stats[name], tensors)
    assert hooks_on(model) == []


@pytest.mark.parametrize("inside", [False, True], ids=["registered before", "registered inside"])
@pytest.mark.parametrize("of", ["output", "grad_output"])
def test_an_error_of_a_users_hook_that_ends_the_block_leaves_that_hook_alone(model, inside, of):
    def broken(module, args, output):
        raise error

    error = ValueError("from a hook of the user's")
    handle = None if inside else model[1].register_forward_hook(broken)
    with (
        pytest.raises(ValueError, match="from a hook of the user's") as raised,
        layer_statistics(model, "*", "", of=of),
    ):
        handle = handle or model[1].register_forward_hook(broken)
        model(torch.ones(2, 4))
    assert raised.value is error
    assert list(model[1]._forward_hooks.values()) == [broken]
    assert [hook.owner for hook in hooks_on(model)] == ["user"]
    handle.remove()
    assert hooks_on(model) == []


# ---- the table, and what is refused ----


def test_it_is_a_mapping_of_the_layers_that_were_called(model):
    with layer_statistics(model, "0", "2") as stats:
        assert (len(stats), list(stats), "0" in stats) == (0, [], False)
        model[0](torch.ones(4))
        assert (len(stats), list(stats)) == (1, ["0"])
        assert [name in stats for name in ("0", "2", "1")] == [True, False, False]
        assert dict(stats)["0"].calls == 1
        assert repr(stats) == "LayerStatistics(calls of 0: 1, 2: 0)"
        with pytest.raises(KeyError, match="'weight' was not asked for; asked for: '0', '2'"):
            stats["weight"]


def test_the_model_itself_is_shown_by_its_empty_name(model):
    with layer_statistics(model, "") as stats:
        model(torch.ones(1, 4))
    assert repr(stats) == "LayerStatistics(calls of '': 1)"
    assert stats.table().splitlines()[1].split()[:2] == ["''", "1"]


def test_of_many_layers_an_unknown_name_is_told_the_closest():
    stats = layer_statistics(nn.Sequential(*[nn.ReLU() for _ in range(12)]), "*")
    with pytest.raises(KeyError, match=r"'10\.0' was not asked for; asked for: '10'\W*$"):
        stats["10.0"]


def test_the_table_has_a_line_for_each_layer_also_for_one_that_was_never_called():
    model = Returns(lambda x: model.used(x))
    model.used, model.idle = nn.ReLU(), nn.ReLU()
    with layer_statistics(model, "*") as stats:
        model(torch.tensor([-1.0, 0.0, 2.0, 1e-5, 3e7]))
    assert [line.split() for line in stats.table().splitlines()] == [
        ["layer", "calls", "mean", "std", "min", "max", "zeros", "nan", "inf"],
        ["used", "1", "6.0e+06", "1.3e+07", "0.0000", "3.0e+07", "40.0%", "0", "0"],
        ["idle", "0", "-", "-", "-", "-", "-", "0", "0"],
    ]
    assert len({len(line) for line in stats.table().splitlines()}) == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bins": -1}, ValueError, r"layer_statistics\(bins=-1\): expected 0 or more"),
        ({"bins": 2.5}, TypeError, r"layer_statistics\(bins=...\): expected a whole number, found float"),
        ({"range": (1, 1)}, ValueError, r"range=\(1, 1\)\): this range is empty"),
        ({"range": (5, -5)}, ValueError, r"range=\(5, -5\)\): this range is empty"),
        ({"range": (0, math.inf)}, ValueError, "not finite"),
        ({"range": 10}, TypeError, r"range=10\): expected two numbers"),
        ({"range": (torch.tensor(0.0), 1)}, TypeError, "found Tensor; give a plain number: .item()"),
        ({"range": ("a", 1)}, TypeError, "expected a number, found str"),
        ({"of": "grad_input"}, ValueError, r"of='grad_input'\): expected 'output' or 'grad_output'"),
    ],
)
def test_bad_options_are_refused_and_no_hook_stays(model, options, error, words):
    with pytest.raises(error, match=words):
        layer_statistics(model, "0", **options)
    assert hooks_on(model) == []


def test_reading_before_the_forward_and_an_unknown_name_are_refused(model):
    with layer_statistics(model, "0", "1") as stats:
        with pytest.raises(KeyError, match="no output of '0' yet; run the model inside the block"):
            stats["0"]
        with pytest.raises(KeyError, match="'3' was not asked for; asked for: '0', '1'"):
            stats["3"]
        assert repr(stats) == "LayerStatistics(calls of 0: 0, 1: 0)"


def test_a_view_that_is_edited_in_place_has_no_gradient_and_the_error_says_why():
    """Autograd goes round it; should a PyTorch ever show that gradient, the documentation is to be changed."""
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 1))
    with layer_statistics(model, "**", of="grad_output") as stats:
        model(torch.ones(1, 1, 3, 3)).sum().backward()
    assert list(stats) == ["0", "2", "3"]
    with pytest.raises(KeyError, match=r"no gradient of '1' yet.*view.*inplace=False"):
        stats["1"]


# ---- what once went wrong ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_integers_beside_floats_are_counted_exactly(dtype):
    class Router(nn.Module):
        def forward(self, x):
            return x, torch.tensor([16_777_217, 100_001])

    router, x = Router(), torch.randn(64).to(dtype)
    with layer_statistics(router, "") as stats:
        router(x)
    both = torch.cat([x.double(), torch.tensor([16_777_217.0, 100_001.0], dtype=torch.float64)])
    assert stats[""].max == 16_777_217
    assert stats[""].infs == 0
    assert stats[""].mean == pytest.approx(both.mean().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("number", [3, 10_000])
def test_unsigned_integers_are_counted(dtype, number):
    layer = nn.Identity()
    with layer_statistics(layer, "") as stats:
        layer(torch.arange(number).to(dtype))
    assert (stats[""].count, stats[""].max) == (number, number - 1)


def test_a_leaf_that_is_returned_again_and_again_is_counted_once_for_each_backward():
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 1)).eval()
    x = torch.ones(2, 3, requires_grad=True)
    with layer_statistics(model, "0", of="grad_output") as stats:
        for _ in range(4):
            model(x).sum().backward()
        assert stats["0"].calls == 4
    assert not x._backward_hooks


@pytest.mark.parametrize("number", [6, 9_000])
def test_transforms_of_functions_are_counted_and_leave_nothing_behind(number):
    from torch.func import grad, jvp, vmap

    model, x = nn.Sequential(nn.Tanh()), torch.linspace(-1, 1, 3 * number).view(3, number)
    expected = x.double().tanh()
    with layer_statistics(model, "0") as stats:
        vmap(model)(x)
        jvp(model, (x,), (x,))
        grad(lambda x: model(x).sum())(x)
    assert (stats["0"].calls, stats["0"].count) == (3, 3 * x.numel())
    assert stats["0"].mean == pytest.approx(expected.mean().item(), abs=1e-6)
    assert stats["0"].max == pytest.approx(expected.max().item())
    with layer_statistics(model, "0") as stats:  # the memory for counting is as good as before
        model(x)
    assert stats["0"].count == x.numel()


def test_the_default_dtype_does_not_matter():
    model = nn.Identity()

    def zeros():
        torch.set_default_dtype(torch.float16)
        with layer_statistics(model, "") as stats:
            model(torch.zeros(65_536))
        found.append(stats[""].zeros)

    found, before = [], torch.get_default_dtype()
    try:
        thread = threading.Thread(target=zeros)  # which has no memory for counting yet
        thread.start()
        thread.join()
    finally:
        torch.set_default_dtype(before)
    assert found == [1.0]


def test_of_a_nested_tensor_with_holes_the_entries_alone_are_counted():
    whole, starts, lengths = torch.arange(40.0).view(4, 10), torch.zeros(4).long(), torch.arange(1, 5)
    jagged = torch.nested.narrow(whole, 1, starts, lengths, layout=torch.jagged)
    layer = nn.Identity()
    with layer_statistics(layer, "") as stats:
        layer(jagged)
    assert (stats[""].count, stats[""].mean) == (10, 21.0)


@pytest.mark.parametrize("width", [10, 1_000])
def test_gradients_that_come_in_batches_are_counted_together(width):
    model, x = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)), torch.randn(20, 4)
    x.requires_grad_()
    batch = torch.randn(30, 20, 3)
    with layer_statistics(model, "1", of="grad_output") as stats:
        torch.autograd.grad(model(x), x, batch, is_grads_batched=True)
    assert_exact(stats["1"], [batch @ model[2].weight])
    with layer_statistics(model, "1", of="grad_output") as stats:
        torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x.detach(), vectorize=True)
    assert stats["1"].count == 3 * 20 * width


@pytest.mark.parametrize("number", [30, 300])
def test_under_forward_mode_derivatives_the_values_are_counted(number):
    model = nn.Linear(number, number).requires_grad_(False)
    x = torch.randn(number, number)
    with layer_statistics(model, "") as stats, forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent
    assert_exact(stats[""], [model(x)])
    assert tangent is not None


def test_a_later_layer_in_place_does_not_change_what_was_counted():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True)), torch.randn(8, 4)
    with layer_statistics(model, "0") as stats, torch.no_grad():
        model(x)
    assert stats["0"].min == model[0](x).min().item()
    assert stats["0"].min < 0


def test_fake_tensors_are_counted_without_figures_and_spoil_nothing():
    model = nn.Linear(100, 90)
    x = torch.randn(99, 100)
    with layer_statistics(model, "") as stats, FakeTensorMode(allow_non_fake_inputs=True):
        model(x)
    assert (stats[""].calls, stats[""].count) == (1, 99 * 90)
    assert math.isnan(stats[""].mean)
    with layer_statistics(model, "") as stats:
        torch.export.export(model, (x,))
    with layer_statistics(model, "") as stats:
        model(x)
    assert_exact(stats[""], [model(x)])


def test_figures_are_made_on_the_cpu_whatever_the_default_device(model):
    with layer_statistics(model, "*", bins=3) as stats, torch.device("meta"):
        model[0](torch.ones(2, 4, device="cpu"))
        assert stats["0"].histogram is not None
        assert len(stats.table().splitlines()) == 6


def test_leaves_that_are_gone_leave_no_handle_behind():
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    with layer_statistics(model, "0", of="grad_output") as stats:
        for _ in range(20):
            model(torch.ones(3, 2, requires_grad=True)).sum().backward()
        handles = len(stats._handles)
    assert handles <= 3
    assert stats["0"].calls == 20


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_that_hands_its_input_through_counts_once_under_a_checkpoint(reentrant, nested):
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Identity(), nn.Linear(3, 3), nn.Tanh()))
    with layer_statistics(model, "1.0", of="grad_output") as plain:
        model(torch.ones(2, 2)).sum().backward()

    def block(x):
        return checkpoint(model[1], x, use_reentrant=reentrant) if nested else model[1](x)

    with layer_statistics(model, "1.0", of="grad_output") as stats:
        checkpoint(block, model[0](torch.ones(2, 2)), use_reentrant=reentrant).sum().backward()
    assert (stats["1.0"].calls, stats["1.0"].count) == (plain["1.0"].calls, plain["1.0"].count) == (1, 6)
    assert stats["1.0"].mean == pytest.approx(plain["1.0"].mean)


def test_a_call_without_entries_has_a_row_of_zeros():
    layer = nn.Identity()
    with layer_statistics(layer, "", bins=4, range=(0, 1)) as stats:
        for number in (2, 0, 3):
            layer(torch.zeros(number))
    assert stats[""].history.tolist() == [[2, 0, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]]
    assert stats[""].calls == 3


def test_a_bin_holds_more_than_float32_can_count():
    layer, number = nn.Identity(), 2**24 + 1000
    with layer_statistics(layer, "", bins=2, range=(0, 2)) as stats:
        layer(torch.zeros(number, dtype=torch.int8))
    assert stats[""].histogram == [number, 0]
    assert stats[""].count == number


def test_the_spread_of_numbers_whose_squares_overflow():
    layer, numbers = nn.Identity(), torch.tensor([1e160, 1e160 + 1e150], dtype=torch.float64)
    with layer_statistics(layer, "") as stats:
        layer(numbers)
    assert stats[""].std == pytest.approx(numbers.std().item(), rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_handed_through_by_keyword_under_a_checkpoint_counts_once(reentrant):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.same, self.linear = nn.Identity(), nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(self.same(input=x))

    block, x = Block(), torch.ones(2, 3, requires_grad=True)
    with layer_statistics(block, "same", of="grad_output") as stats:
        checkpoint(block, x * 2, use_reentrant=reentrant).sum().backward()
    assert (stats["same"].calls, stats["same"].count) == (1, 6)


def test_after_the_block_a_copy_made_inside_counts_no_more():
    model = mlp(4, 5, 2)
    with layer_statistics(model, "1") as stats:
        twin = copy.deepcopy(model)
        model(torch.ones(2, 4))
    twin(torch.ones(3, 4))
    assert (stats["1"].calls, stats["1"].count) == (1, 10)


def test_gradients_of_tensors_from_one_node_are_all_counted():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.same = nn.Linear(4, 6), nn.Dropout(0.5)

        def forward(self, x):
            q, k, v = (self.same(part) for part in self.linear(x).chunk(3, -1))
            return (q + 2 * k + 3 * v).sum()

    model = Parts().eval()
    with layer_statistics(model, "same", of="grad_output") as stats:
        model(torch.ones(2, 4)).backward()
    assert (stats["same"].calls, stats["same"].count, stats["same"].mean) == (3, 12, 2.0)


def test_the_gradient_of_a_tensor_that_is_returned_twice_is_counted_once():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x):
            hidden = self.linear(x)
            return {"last": hidden, "all": (x, hidden)}

    model = nn.Sequential(Last())
    with layer_statistics(model, "0", of="grad_output") as stats:
        model(torch.ones(2, 4))["last"].sum().backward()
    assert (stats["0"].calls, stats["0"].count) == (1, 12)


@pytest.mark.parametrize("warns", [False, True])
def test_a_histogram_is_counted_where_algorithms_have_to_be_deterministic(monkeypatch, warns):
    """On a GPU PyTorch refuses `torch.histc` there, or warns."""
    modes, histc = [], torch.histc

    def as_on_a_gpu(*args):
        modes.append(torch.are_deterministic_algorithms_enabled())
        return histc(*args)

    monkeypatch.setattr(torch, "histc", as_on_a_gpu)
    model = mlp(4, 3)
    torch.use_deterministic_algorithms(True, warn_only=warns)
    try:
        with layer_statistics(model, "0", bins=4) as stats:
            model(torch.ones(2, 4))
        after = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert sum(stats["0"].histogram) == 6
    assert set(modes) == {False}
    assert after == (True, warns)
