"""layer_statistics: what torch computes of all tensors concatenated, without keeping a tensor."""

import copy
import gc
import math
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Constant, Result, Returns, Twice, mlp
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hooklab import hooks_on, layer_statistics, no_leftovers
from hooklab.layers.streaming import CPU_PIECE, MAX_ROWS, STAGED, Tally


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 6, 2)


def statistics_of(tensors, bins=0, range=(-10.0, 10.0)):
    tally = Tally(bins, range)
    for tensor in tensors:
        tally.add(tensor)
    return tally.read()


def assert_exact(found, tensors):
    """The statistics are those of torch in float64 on the finite entries of all tensors."""
    everything = torch.cat([tensor.flatten().double() for tensor in tensors])
    finite = everything[everything.isfinite()]
    assert found.calls == len(tensors)
    assert found.count == everything.numel()
    assert found.nans == everything.isnan().sum()
    assert found.infs == everything.isinf().sum()
    if finite.numel() == 0:
        assert all(map(math.isnan, (found.mean, found.std, found.min, found.max)))
        return
    size = finite.abs().max().item()
    assert found.min == finite.min()
    assert found.max == finite.max()
    assert found.zeros == pytest.approx((everything == 0).sum().item() / everything.numel())
    assert found.mean == pytest.approx(finite.mean().item(), rel=1e-12, abs=1e-14 * size)
    if finite.numel() > 1:
        assert found.std == pytest.approx(finite.std().item(), rel=1e-7, abs=1e-12 * size)
    else:
        assert math.isnan(found.std)


# ---- exact ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (2, 64, 33, 31), (STAGED,), (CPU_PIECE,), (1, CPU_PIECE + 33)])
def test_the_statistics_are_those_of_torch_in_float64(dtype, shape):
    torch.manual_seed(0)
    tensors = [(torch.randn(shape) * 3 + 1).to(dtype) for _ in range(3)]
    assert_exact(statistics_of(tensors), tensors)


@pytest.mark.parametrize("number", [5, 10_000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.uint16, torch.uint64])
def test_whole_numbers_and_truth_values_are_counted_too(dtype, number):
    tensors = [(torch.arange(number) % 5).to(dtype)]
    assert_exact(statistics_of(tensors, bins=2), tensors)


@pytest.mark.parametrize("offset", [1e3, 1e6, -1e8])
def test_a_large_mean_does_not_drown_a_small_spread(offset):
    torch.manual_seed(0)
    tensors = [torch.randn(1000, dtype=torch.float64) + offset for _ in range(20)]
    assert_exact(statistics_of(tensors), tensors)


@pytest.mark.parametrize("number", [0.1, 1e6 + 0.1, -1e8 / 3])
def test_the_mean_of_nearly_equal_numbers_is_right_to_the_last_digits(number):
    """Equal ones are all rounded to the same side as they are added up."""
    tensor = torch.full((3 * CPU_PIECE,), number, dtype=torch.float64)
    tensor[0] *= 1 + 1e-9
    exact = math.fsum(tensor.tolist()) / tensor.numel()
    assert statistics_of([tensor]).mean == pytest.approx(exact, rel=4e-16, abs=0)
    assert_exact(statistics_of([tensor]), [tensor])


def test_a_constant_layer_has_no_spread_at_all():
    assert statistics_of([torch.full((50_000,), 0.1)] * 3).std == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_few_and_of_many_numbers_in_turn_do_not_disturb_each_other(dtype):
    torch.manual_seed(0)
    sizes = (1, 5, STAGED - 1, STAGED + 1, 3, 3 * CPU_PIECE, 4000, 5000, CPU_PIECE)
    tensors = [(torch.randn(size) * scale).to(dtype).relu() for scale, size in enumerate(sizes, 1)]
    assert_exact(statistics_of(tensors), tensors)


SIGNS = {
    "below 0": (-0.25, -1.0, -3.0),
    "after ReLU": (0.0, 0.5, 3.0),
    "zeros of both signs": (0.0, -0.0),
    "hardly above 0": (1e-38, 1e-45, 0.0),
}


@pytest.mark.parametrize("size", [STAGED - 1, CPU_PIECE, 3 * CPU_PIECE + 7])
@pytest.mark.parametrize("values", SIGNS.values(), ids=SIGNS)
def test_the_bounds_and_the_zeros_are_right_for_numbers_of_any_sign(values, size):
    torch.manual_seed(0)
    tensor = torch.tensor(values)[torch.randint(len(values), (size,))]
    assert_exact(statistics_of([tensor]), [tensor])


def seen_otherwise(kind, tensor):
    """The same entries, in another order in memory, or with other entries between them."""
    if kind == "transposed":
        return tensor.view(2, -1).t()
    if kind == "channels last":
        return tensor.view(2, 4, -1, 2).contiguous(memory_format=torch.channels_last)
    if kind == "every second":
        return torch.stack([tensor, tensor + 100], 1)[:, 0]
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("size", [1600, 4 * CPU_PIECE + 16])
@pytest.mark.parametrize("kind", ["transposed", "channels last", "every second", "for inference"])
def test_however_the_entries_lie_in_memory_they_are_counted(kind, size):
    torch.manual_seed(0)
    tensor = torch.randn(size)
    assert_exact(statistics_of([seen_otherwise(kind, tensor)]), [tensor])


numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0])


@settings(max_examples=100, deadline=None)
@given(
    lists=st.lists(st.lists(numbers, max_size=40), min_size=1, max_size=12),
    repeat=st.sampled_from([1, 400, 700]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_statistics_are_exact_for_any_numbers(lists, repeat, dtype):
    tensors = [torch.tensor(values * repeat, dtype=dtype) for values in lists]
    assert_exact(statistics_of(tensors), tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_nothing_waits_for_it_until_the_statistics_are_read():
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
    found = statistics_of([torch.tensor([1.0, math.nan, 3.0, -math.inf]), torch.full((STAGED,), math.nan)])
    assert (found.count, found.nans, found.infs) == (STAGED + 4, STAGED + 1, 1)
    assert (found.mean, found.min, found.max) == (2.0, 1.0, 3.0)
    assert found.std == pytest.approx(math.sqrt(2))


def test_one_nan_in_a_large_tensor_changes_nothing_but_its_own_number():
    """The way that a GPU always takes: no value is looked at."""
    torch.manual_seed(0)
    tensor = torch.randn(3 * CPU_PIECE).relu()
    tensor[:: CPU_PIECE // 4] = math.nan
    assert_exact(statistics_of([tensor]), [tensor])


def test_empty_tensors_count_as_calls():
    found = statistics_of([torch.empty(0, 3)])
    assert (found.calls, found.count) == (1, 0)
    assert math.isnan(found.mean)


def test_meta_tensors_have_no_statistics_but_their_number():
    model = mlp(4, 3, 2).to("meta")
    with layer_statistics(model, "0", bins=4) as stats:
        model(torch.ones(7, 4, device="meta"))
    assert (stats["0"].calls, stats["0"].count) == (1, 21)
    assert math.isnan(stats["0"].mean)


def test_fake_tensors_are_counted_without_statistics_and_spoil_nothing():
    model, x = nn.Linear(100, 90), torch.randn(99, 100)
    with layer_statistics(model, "") as stats:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(x)
        assert (stats[""].calls, stats[""].count) == (1, 99 * 90)
        model(x)
    assert stats[""].mean == pytest.approx(model(x).double().mean().item())


def test_sparse_and_complex_tensors():
    assert statistics_of([torch.eye(4).to_sparse()]).zeros == 0.75
    assert statistics_of([torch.tensor([3 + 4j])]).mean == 5


def test_padding_that_a_transformer_encoder_leaves_out_is_not_counted():
    """With a padding mask its layers get nested tensors in eval mode."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with layer_statistics(encoder, "layers.0.linear1") as stats, torch.no_grad():
        encoder(torch.randn(2, 3, 8), src_key_padding_mask=padding)
    assert stats["layers.0.linear1"].count == 5 * 16


def test_statistics_are_made_on_the_cpu_whatever_the_default_device(model):
    with layer_statistics(model, "*", bins=3) as stats, torch.device("meta"):
        model[0](torch.ones(2, 4, device="cpu"))
        assert stats["0"].histogram is not None
        assert len(stats.table().splitlines()) == 6


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda model: torch.func.grad(lambda x: model(x).sum())])
def test_a_forward_inside_torch_func_is_refused(model, transform):
    with (
        layer_statistics(model, "0") as stats,
        pytest.raises(NotImplementedError, match="layer_statistics: this layer runs inside vmap, grad or jvp"),
    ):
        transform(model)(torch.ones(2, 4))
    assert len(stats) == 0


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
    found = statistics_of(tensors, bins=8, range=(-2.0, 3.0))
    everything = torch.cat(tensors)
    assert found.histogram == torch.histc(everything, 8, -2, 3).long().tolist()
    assert found.below == (everything < -2).sum()
    assert found.above == (everything > 3).sum()
    assert found.below + found.above + sum(found.histogram) == everything.numel()
    assert found.history.tolist() == [torch.histc(tensor, 8, -2, 3).long().tolist() for tensor in tensors]
    assert found.range == (-2.0, 3.0)
    edges = statistics_of([torch.tensor([-2.0, 3.0])], bins=2, range=(-2.0, 3.0))
    assert (edges.below, edges.above, edges.histogram) == (0, 0, [1, 1])


def test_infinities_fall_outside_and_nans_nowhere():
    found = statistics_of([torch.tensor([math.inf, -math.inf, math.nan, 0.0])], bins=2, range=(-1.0, 1.0))
    assert (found.below, found.above, found.histogram) == (1, 1, [0, 1])


def test_the_history_of_a_long_run_keeps_its_size_and_loses_no_count():
    calls = 5 * MAX_ROWS + 3
    found = statistics_of([torch.tensor([float(call)]) for call in range(calls)], bins=3, range=(0.0, calls))
    assert found.history.shape[0] <= MAX_ROWS
    assert found.history.sum() == calls
    assert found.calls == calls
    assert found.history.sum(1).tolist() == [8] * 320 + [3]  # every row stands for equally many calls


def test_dtypes_without_a_histogram_of_their_own_are_counted():
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        assert statistics_of([torch.ones(3, dtype=dtype)], bins=2, range=(0.0, 2.0)).histogram == [0, 3]


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


def test_a_layer_called_twice_counts_twice_and_its_names_share_the_statistics():
    model = Twice()
    with layer_statistics(model, "step", "again") as stats:
        model(torch.ones(2, 3))
    assert stats["step"].calls == 2
    assert stats["again"] == stats["step"]


def test_a_gradient_that_is_none_is_not_counted(model):
    with layer_statistics(model, "*", of="grad_output") as stats:
        x = model[0](torch.ones(2, 4))
        (Constant.apply(model[1](x)).sum() + x.sum()).backward()
    assert list(stats) == ["0"]


def test_a_backward_after_the_block_is_not_counted(model):
    with layer_statistics(model, "0", of="grad_output") as stats:
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    with pytest.raises(KeyError, match=r"no gradient of '0' yet; run the model and backward\(\) inside the block"):
        stats["0"]


def test_a_forward_that_fails_leaves_the_statistics_and_no_hook(model):
    model[4] = nn.Linear(99, 2)
    with no_leftovers(model), pytest.raises(RuntimeError), layer_statistics(model, "*") as stats:
        model(torch.ones(2, 4))
    assert list(stats) == ["0", "1", "2", "3"]
    assert "4" not in stats


# ---- checkpoints ----


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("of", ["output", "grad_output"])
def test_recomputation_under_checkpointing_is_not_counted(reentrant, of):
    block, x = mlp(4, 4, 4), torch.ones(2, 4, requires_grad=True)
    with layer_statistics(block, "*", of=of) as stats:
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert [found.calls for found in stats.values()] == [1, 1, 1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_returns_its_input_counts_once_under_a_checkpoint(reentrant):
    block, x = nn.Sequential(nn.Identity(), nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    with layer_statistics(block, "0", of="grad_output") as stats:
        checkpoint(block, x * 2 / 2, use_reentrant=reentrant).sum().backward()
    assert_exact(stats["0"], [expected])


def test_a_selective_checkpoint_does_not_take_what_is_counted_for_its_own():
    """Its mode saves results in their order; those of a hook would shift them."""
    policy = [torch.ops.aten.sum.default, torch.ops.aten.sub.Tensor, torch.ops.aten._to_copy.default]

    class Sums(nn.Module):
        def forward(self, x):
            return (x - x.mean()).tanh() * (x - 2).sum() / x.sum()

    model, x = nn.Sequential(Sums(), Sums()), torch.linspace(0, 1, STAGED).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with layer_statistics(model, "*") as stats:
        y = checkpoint(model, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, expected)
    assert [found.calls for found in stats.values()] == [1, 1]


# ---- what stays, and what does not ----


@pytest.mark.parametrize("of", ["output", "grad_output"])
def test_no_tensor_is_kept_and_no_model(of):
    model, alive = mlp(4, 5, 2), []
    stats = layer_statistics(model, "**", of=of)
    model[1].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        model(torch.randn(3000, 4)).sum().backward()
        assert alive[0]() is None
        gone = weakref.ref(model)
        del model
        assert gone() is None  # with its hooks on
    finally:
        gc.enable()
    assert stats["1"].count == 15_000


def test_a_model_that_returns_a_parameter_is_free_after_the_block():
    model = Returns(lambda x: weight)
    weight = model.weight = nn.Parameter(torch.ones(3))
    with layer_statistics(model, "", of="grad_output") as stats:
        for _ in range(3):
            model(None).sum().backward()
    assert stats[""].calls == 3
    assert hooks_on(weight) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_is_as_large_as_the_tensor(dtype):
    images = torch.ones(4, 64, 64, 64, dtype=dtype)
    for tensor in (images, images.contiguous(memory_format=torch.channels_last), images.mT):
        tally = Tally(8, (0.0, 2.0))
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            tally.add(tensor)
        assert 0 < max(event.cpu_memory_usage for event in profile.function_events) <= 8 * CPU_PIECE
        assert tally.read().histogram == [0, 0, 0, 0, tensor.numel(), 0, 0, 0]


def test_small_tensors_wait_to_be_counted_but_not_for_ever(model):
    with layer_statistics(model, "0") as stats:
        for _ in range(10_000):
            model[0](torch.ones(20, 4))
        assert len(pickle.dumps(stats)) < 100_000
    assert stats["0"].count == 1_000_000


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stats: pickle.loads(pickle.dumps(stats))])
def test_a_copy_holds_what_was_counted_so_far(model, copied):
    with layer_statistics(model, "0", bins=3) as stats:
        model(torch.ones(2, 4))
        twin = copied(stats)
        model(torch.ones(2, 4))
    assert (twin["0"].calls, stats["0"].calls) == (1, 2)
    assert twin["0"].mean == pytest.approx(stats["0"].mean)
    assert twin.table() != stats.table()


def test_threads_lose_no_count(model):
    tensors = [torch.randn(STAGED // 2 + 3000 * number) for number in range(4)]

    def count(tensor):
        for _ in range(100):
            layer(tensor)
            assert stats[""].calls

    layer = nn.Identity()
    with layer_statistics(layer, "") as stats:
        threads = [threading.Thread(target=count, args=(tensor,)) for tensor in tensors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_exact(stats[""], [tensor for tensor in tensors for _ in range(100)])


# ---- what it says ----


def test_a_notebook_shows_a_table_and_pandas_gets_the_numbers(model):
    pandas = pytest.importorskip("pandas")
    with layer_statistics(model, "0", "1") as stats:
        model[0](torch.full((1, 4), math.nan))
    html = stats._repr_html_()
    assert html.count("<tr>") == 3
    assert "<td>5</td>" in html
    assert "<td>-</td>" in html
    frame = stats.to_dataframe()
    assert list(frame.columns) == stats.table().splitlines()[0].split()
    assert frame["nan"].tolist() == [5, 0]
    assert pandas.isna(frame["mean"]).all()


def test_gradients_that_nothing_needs_are_named_as_the_cause(model):
    model.requires_grad_(False)
    with layer_statistics(model, "0", of="grad_output") as stats:
        model(torch.ones(2, 4))
        with pytest.raises(KeyError, match=r"no gradient of '0': what it returned needs none.*requires_grad_\(\)"):
            stats["0"]
        model(torch.ones(2, 4, requires_grad=True))
        with pytest.raises(KeyError, match=r"no gradient of '0' yet; run the model and backward\(\)"):
            stats["0"]


def test_gradients_under_a_grad_scaler_are_the_scaled_ones(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with layer_statistics(model, "4", of="grad_output") as stats:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    assert stats["4"].mean == 1024


def test_batched_gradients_are_refused_by_pytorch(model):
    x = torch.ones(2, 4, requires_grad=True)
    with layer_statistics(model, "0", of="grad_output"), pytest.raises(RuntimeError, match="Batching rule"):
        torch.autograd.grad(model(x), x, torch.ones(3, 2, 2), is_grads_batched=True)


def test_nested_outputs_count_every_tensor():
    layer, x = Returns(lambda x: {"a": x * 2, "b": (x + 1, [Result(x - 3, [x])])}), torch.arange(6.0)
    with layer_statistics(layer, "") as stats:
        layer(x)
    assert_exact(stats[""], [x * 2, x + 1, x - 3, x])


# ---- the table, and what is refused ----


def test_it_is_a_mapping_of_the_layers_that_were_called(model):
    with layer_statistics(model, "0", "2") as stats:
        assert (len(stats), list(stats), "0" in stats) == (0, [], False)
        with pytest.raises(KeyError, match="no output of '0' yet; run the model inside the block"):
            stats["0"]
        model[0](torch.ones(4))
        assert (len(stats), list(stats)) == (1, ["0"])
        assert [name in stats for name in ("0", "2", "1")] == [True, False, False]
        assert dict(stats)["0"].calls == 1
        assert repr(stats) == "LayerStatistics(calls of 0: 1, 2: 0)"
        with pytest.raises(KeyError, match="'weight' was not asked for; asked for: '0', '2'"):
            stats["weight"]
    many = layer_statistics(nn.Sequential(*[nn.ReLU() for _ in range(200)]), "**")
    assert repr(many).endswith("10: 0, 11: 0, … and 188 more layers)")


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
        ({"range": (5, -5)}, ValueError, r"range=\(5, -5\)\): this range is empty"),
        ({"range": (0, math.inf)}, ValueError, "not finite"),
        ({"range": (torch.tensor(0.0), 1)}, TypeError, "found Tensor; give a plain number: .item()"),
        ({"range": ("a", 1)}, TypeError, "expected a number, found str"),
        ({"range": 10}, TypeError, r"range=10\): expected two numbers"),
        ({"of": "grad_input"}, ValueError, r"of='grad_input'\): expected 'output' or 'grad_output'"),
    ],
)
def test_bad_options_are_refused_and_no_hook_stays(model, options, error, words):
    with pytest.raises(error, match=words):
        layer_statistics(model, "0", **options)
    assert hooks_on(model) == []


def test_a_view_that_is_edited_in_place_has_no_gradient_and_the_error_says_why():
    """Autograd goes round it; should a PyTorch ever show that gradient, the documentation is to be changed."""
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 1))
    with layer_statistics(model, "**", of="grad_output") as stats:
        model(torch.ones(1, 1, 3, 3)).sum().backward()
    assert list(stats) == ["0", "2", "3"]
    with pytest.raises(KeyError, match=r"no gradient of '1' yet.*view.*inplace=False"):
        stats["1"]


def test_a_leaf_that_is_returned_again_and_again_is_counted_once_for_each_backward():
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 1)).eval()
    x = torch.ones(2, 3, requires_grad=True)
    with layer_statistics(model, "0", of="grad_output") as stats:
        for _ in range(4):
            model(x).sum().backward()
        assert stats["0"].calls == 4
    assert not x._backward_hooks


def test_a_later_layer_in_place_does_not_change_what_was_counted():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True)), torch.randn(8, 4)
    with layer_statistics(model, "0") as stats, torch.no_grad():
        model(x)
    assert stats["0"].min == model[0](x).min().item()
    assert stats["0"].min < 0


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


def test_tensors_in_objects_of_other_kinds_are_not_counted():
    class Box:
        def __init__(self, content):
            self.content = content

    class Boxes(nn.Module):
        def forward(self, x):
            return Box(x)

    model = nn.Sequential(nn.Linear(2, 2), Boxes())
    with layer_statistics(model, "*") as stats:
        assert model(torch.ones(1, 2)).content.shape == (1, 2)
    assert list(stats) == ["0"]


# ---- dead units ----


def always_zero(outputs, dim):
    """By hand: the entries along `dim` that are zero in all outputs."""
    rows = torch.cat([output.movedim(dim, 0).reshape(output.shape[dim], -1) for output in outputs], 1)
    return [unit for unit, row in enumerate(rows.tolist()) if not any(row)]


@pytest.mark.parametrize(
    ("layer", "shape", "units"),
    [
        (nn.Linear(4, 6), (3, 4), 1),
        (nn.Linear(4, 6), (3, 5, 4), -1),
        (nn.Linear(4, 6), (4,), -1),
        (nn.Conv2d(4, 6, 1), (2, 4, 3, 3), 1),
        (nn.Conv1d(4, 6, 1), (2, 4, 3), 1),
    ],
)
def test_a_unit_is_dead_that_was_zero_in_every_sample_at_every_place(layer, shape, units):
    torch.manual_seed(0)
    model, kept = nn.Sequential(layer, nn.ReLU()), []
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([-9.0, 9, -9, 0.5, -0.5, 0.1]))
    model[1].register_forward_hook(lambda module, args, output: kept.append(output.detach().clone()))
    with layer_statistics(model, "*", units=units) as stats:
        for _ in range(4):
            model(torch.randn(shape))
            assert stats.dead["1"] == always_zero(kept, units)
        if len(shape) > 1:
            model(torch.randn((0, *shape[1:])))
    assert {0, 2} <= set(stats.dead["1"])
    assert stats.dead == {"0": [], "1": always_zero(kept[:4], units)}
    assert len(always_zero(kept[:1], units)) >= len(stats.dead["1"])


def test_a_unit_that_fires_once_is_never_dead_again_and_nan_is_not_zero():
    layer = nn.Identity()
    with layer_statistics(layer, "", units=1) as stats:
        layer(torch.tensor([[0.0, 0, 0, 1e-45, 0]]))
        assert stats.dead[""] == [0, 1, 2, 4]
        layer(torch.tensor([[0.0, math.nan, -0.0, 0, -1]]))
        layer(torch.zeros(3, 5))
    assert stats.dead[""] == [0, 2]
    assert pickle.loads(pickle.dumps(stats)).dead == {"": [0, 2]}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_dead_units_of_any_dtype(dtype):
    layer = nn.Identity()
    with layer_statistics(layer, "", units=1) as stats:
        layer(torch.tensor([[0, 1, 0], [0, 0, 0]]).to(dtype))
    assert stats.dead == {"": [0, 2]}


def test_units_whose_gradient_is_always_zero():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, 0, 2]]))
    with layer_statistics(model, "0", of="grad_output", units=1) as stats:
        model(torch.ones(2, 4)).sum().backward()
    assert stats.dead == {"0": [1]}


def test_units_that_were_not_asked_for_are_not_counted_and_dead_says_how_to_ask(model):
    with layer_statistics(model, "*") as stats:
        model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"units were not counted.*layer_statistics\(model, ..., units=1\)"):
        stats.dead["1"]
    for units in (True, 1.0, "1"):
        with pytest.raises(TypeError, match=r"layer_statistics\(units=...\): expected a dim, such as 1"):
            layer_statistics(model, "*", units=units)
    assert hooks_on(model) == []


def test_a_layer_without_units_in_common_is_left_out_and_named_with_the_reason():
    widths = Returns(lambda x: (x, x[:, :2]))
    model = nn.Sequential(nn.Linear(4, 3), widths)
    model.flat, model.idle = Returns(lambda x: x.flatten()), nn.ReLU()
    with layer_statistics(model, "*", units=1) as stats:
        model[:2](torch.ones(2, 4))
        model.flat(torch.ones(2, 4))
    assert list(stats.dead) == ["0"]
    with pytest.raises(KeyError, match="no units of '1': one tensor has 3 units, another 2; choose layers"):
        stats.dead["1"]
    with pytest.raises(KeyError, match=r"no units of 'flat': a tensor has no dim 1: its shape is \[8\]"):
        stats.dead["flat"]
    with pytest.raises(KeyError, match="no output of 'idle' yet"):
        stats.dead["idle"]
    with pytest.raises(KeyError, match="'7' was not asked for"):
        stats.dead["7"]
    assert stats["1"].calls == 2
    with layer_statistics(layer := nn.Identity(), "", units=1) as stats:
        layer(torch.ones(2, 3, device="meta")), layer(torch.ones(0, 3))
    with pytest.raises(KeyError, match="no units of '': its tensors were empty or without values"):
        stats.dead[""]
