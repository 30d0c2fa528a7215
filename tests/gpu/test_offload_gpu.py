"""`Offload(to="cpu")` on a CUDA device, where copies really run beside what is computed.

    uv run pytest tests/gpu/test_offload_gpu.py

Everything is skipped where there is no such device; tests/package/test_stores.py has the same logic on a slow fake one.
"""

import contextlib
import gc

import pytest
import torch
from saved_views import VIEWS
from torch import nn

from hooklab import Offload, checkpoint_segments
from hooklab.stores import Disk, PinnedMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def network(width=512, layers=12):
    blocks = [block for _ in range(layers) for block in (nn.Linear(width, width), nn.ReLU(), nn.BatchNorm1d(width))]
    return nn.Sequential(*blocks).cuda()


def step(model, x, context):
    model.zero_grad()
    with context:
        loss = model(x).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("keep", [0, 8 * 2**20, 10**12])
@pytest.mark.parametrize("prefetch", [0, 4 * 2**20, 256 * 2**20])
@pytest.mark.parametrize("in_flight", [0, 2**21, 256 * 2**20])
def test_gradients_are_equal_at_every_budget_step_after_step(keep, prefetch, in_flight):
    model, x = network(), torch.randn(2048, 512, device="cuda")
    expected = step(model, x, contextlib.nullcontext())
    offload = Offload(model, to=PinnedMemory(in_flight=in_flight), keep=keep, prefetch=prefetch, min_bytes=0)
    for _ in range(4):
        found = step(model, x, offload)
        assert all(map(torch.equal, expected, found))
        torch.randn(10_000_000, device="cuda").sum()  # takes whatever memory is free
    assert (offload.moved_bytes > 0) == (keep < 10**12)


@pytest.mark.parametrize("compute", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_gradients_are_equal_whatever_the_strides(compute, to):
    x = torch.randn(6, 8, 4, 4, device="cuda", requires_grad=True)
    torch.set_default_device("cuda")
    try:
        (expected,) = torch.autograd.grad(compute(x).sum(), x)
        with Offload(to=to, min_bytes=0) as offload:
            y = compute(x)
        (found,) = torch.autograd.grad(y.sum(), x)
    finally:
        torch.set_default_device(None)
    assert torch.equal(expected, found)
    assert offload.moved_bytes > 0


def test_memory_of_the_gpu_comes_down():
    model, x = network(layers=24), torch.randn(8192, 512, device="cuda")

    def peak(context):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(model, x, context)
        return torch.cuda.max_memory_allocated()

    step(model, x, contextlib.nullcontext())
    stock = peak(contextlib.nullcontext())
    small = peak(Offload(model, to=PinnedMemory(in_flight=32 * 2**20), prefetch=32 * 2**20))
    assert small < stock / 2


def test_an_edit_after_saving_still_raises():
    x = torch.randn(10**6, device="cuda", requires_grad=True)
    with Offload(min_bytes=0):
        y = x.exp()
        z = y.sin()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_dropped_graph_gives_memory_back_without_gc():
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(10**7, device="cuda", requires_grad=True)
        before, store = torch.cuda.memory_allocated(), PinnedMemory()
        for _ in range(3):
            with Offload(to=store):
                y = x.exp().sin().exp()
            pinned = store.pinned_bytes
            del y
        torch.cuda.synchronize()
        store.write(x.detach()[:1])  # what is copied is freed when the store is used again
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 1024
        assert store.pinned_bytes == pinned  # each step uses the memory of the last one again
    finally:
        gc.enable()


def test_to_cpu_pins_once_for_all_steps():
    x = torch.randn(10**6, device="cuda", requires_grad=True)
    pinned = []
    for _ in range(3):
        with Offload(min_bytes=0) as offload:  # no name holds the store
            y = x.exp().sin()
        y.sum().backward()
        assert offload.moved_bytes > 0
        pinned.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert pinned[0] == pinned[1] == pinned[2] > 0


def test_checkpoint_segments_and_offload_together():
    model = nn.Sequential(nn.Linear(512, 512), network(layers=8)).cuda()
    x = torch.randn(4096, 512, device="cuda")
    expected = step(model, x, contextlib.nullcontext())
    buffers = [buffer.clone() for buffer in model.buffers()]
    for buffer in model.buffers():
        buffer.zero_() if buffer.dtype == torch.long else None
    model[1].apply(lambda module: module.reset_running_stats() if isinstance(module, nn.BatchNorm1d) else None)
    offload = Offload(model)
    with checkpoint_segments(model, {"1": 6}):
        found = step(model, x, offload)
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, buffers, model.buffers()))
    assert offload.moved_bytes > 0


def test_disk_holds_what_a_gpu_computed(tmp_path):
    model, x = network(), torch.randn(2048, 512, device="cuda")
    expected = step(model, x, contextlib.nullcontext())
    offload = Offload(model, to=Disk(tmp_path))
    assert all(map(torch.equal, expected, step(model, x, offload)))
    assert offload.moved_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_packing_does_not_wait_for_the_gpu():
    model, x = network(), torch.randn(2048, 512, device="cuda")
    offload = Offload(model, to=PinnedMemory())
    step(model, x, offload)  # pins
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with offload:
            loss = model(x).square().sum()
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
