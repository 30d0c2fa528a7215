"""The stores: what is read is what was written, room is found again, and nothing stays behind."""

import copy
import errno
import gc
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from fake_device import SlowDevice, SlowMemory
from hypothesis import given, settings
from hypothesis import strategies as st

from hooklab import Offload
from hooklab.stores import Disk, PinnedMemory
from hooklab.stores.slots import ALIGNMENT, Row, Slot

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
POSIX = pytest.mark.skipif(not hasattr(os, "pwrite"), reason="this system has no pwrite")


def run_python(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


# ---- rows of bytes ----


def slot(row, nbytes):
    start = row.take(nbytes)
    return None if start is None else Slot(row, start, torch.empty(nbytes, dtype=torch.uint8))


def test_slots_of_a_row_lie_one_after_the_other_and_are_aligned():
    row = Row()
    first, second, third = (slot(row, nbytes) for nbytes in (1, 1000, 1))
    assert [one.start for one in (first, second, third)] == [0, ALIGNMENT, ALIGNMENT + 1024]


def test_the_smallest_gap_that_fits_is_used_again():
    row = Row()
    slots = [slot(row, size * ALIGNMENT) for size in (4, 1, 2, 1)]
    del slots[0], slots[1]  # gaps of 4 and of 2
    assert slot(row, 2 * ALIGNMENT).start == 5 * ALIGNMENT


def test_a_row_of_fixed_length_says_that_it_is_full():
    row = Row(2 * ALIGNMENT)
    first = slot(row, ALIGNMENT + 1)
    assert row.take(1) is None
    del first
    assert row.take(1) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * ALIGNMENT), st.integers(0, 99)), max_size=80))
def test_no_two_slots_of_a_row_overlap_and_all_room_comes_back(steps):
    row, slots = Row(64 * 5 * ALIGNMENT * 2), []
    for give_back, nbytes, which in steps:
        if give_back and slots:
            slots.pop(which % len(slots))
        else:
            slots.append(slot(row, nbytes))
        spans = sorted((one.start, one.start + one.nbytes) for one in slots)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    slots.clear()
    assert row.take(64 * 5 * ALIGNMENT * 2) == 0


# ---- disk ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_disk_gives_back_every_bit(dtype):
    tensor = (torch.randn(5, 7) * 3).to(dtype)
    store = Disk()
    again = store.read(store.write(tensor))
    assert again.dtype == dtype
    assert torch.equal(again.view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_disk_keeps_nan_inf_and_minus_zero():
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    store = Disk()
    assert store.read(store.write(tensor)).view(torch.int32).tolist() == tensor.view(torch.int32).tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.tensor(3.0),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(1, 50)[:, 0],
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    ],
)
def test_disk_takes_any_shape_and_reads_it_flat(tensor):
    store = Disk()
    assert torch.equal(store.read(store.write(tensor)), tensor.flatten())


@pytest.mark.parametrize("kind", [Disk, lambda: SlowMemory(SlowDevice())], ids=["disk", "pinned"])
def test_a_store_holds_no_graph(kind):
    store, factor = kind(), torch.full((3,), 2.0)
    in_the_graph = weakref.ref(factor)
    y = torch.ones(3, requires_grad=True) * factor
    del factor
    assert in_the_graph() is not None
    written = store.write(y)
    del y
    assert in_the_graph() is None  # also while the copy is on its way
    again = store.read(written)
    assert (again.tolist(), again.requires_grad) == ([2.0] * 3, False)


def test_disk_reads_a_slot_as_often_as_one_likes():
    store = Disk()
    written = store.write(torch.arange(3))
    first, second = store.read(written), store.read(written)
    first += 1
    assert second.tolist() == store.read(written).tolist() == [0, 1, 2]


def test_disk_holds_10_000_tensors_and_finds_their_room_again():
    store = Disk()
    for sign in (1, -1):
        slots = [store.write(torch.full((100,), sign * number)) for number in range(10_000)]
        assert max(one.start for one in slots) == 9_999 * 1024
        assert all(store.read(slots[number])[99] == sign * number for number in range(0, 10_000, 97))
        slots.clear()


def test_disk_reads_into_the_memory_of_the_host_whatever_the_default_device():
    store = Disk()
    written = store.write(torch.arange(3))
    with torch.device("meta"):
        assert store.read(written).tolist() == [0, 1, 2]


def test_disk_serves_the_threads_of_backward():
    store, right = Disk(), []

    def work(number):
        for size in range(1, 60):
            tensor = torch.full((size * 37,), number * 1000 + size)
            right.append(torch.equal(store.read(store.write(tensor)), tensor))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert right == [True] * 4 * 59
    assert store.write(torch.ones(1)).start == 0  # all room has come back


def test_two_contexts_may_share_one_file():
    store = Disk()
    x = torch.randn(1000, requires_grad=True)
    with Offload(to=store, min_bytes=0) as first:
        y = x.exp()
    with Offload(to=store, min_bytes=0) as second:
        z = x.sin()
    (y + z).sum().backward()
    assert torch.equal(x.grad, x.detach().exp() + x.detach().cos())
    assert first.moved_bytes == second.moved_bytes == 4000


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no such hint")
def test_a_prefetch_tells_the_system_what_is_read_next(monkeypatch):
    hints, store = [], Disk()
    written = store.write(torch.ones(1000))
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *hint: hints.append(hint))
    store.prefetch(written)
    assert hints == [(written.start, 4000, os.POSIX_FADV_WILLNEED)]


def test_where_the_system_can_only_seek_the_disk_serves_too(tmp_path, monkeypatch):
    for name in ("preadv", "pwrite", "posix_fadvise", "fstatvfs"):
        monkeypatch.delattr(os, name, raising=False)
    store = Disk(tmp_path)
    slots = [store.write(torch.full((1_000,), number)) for number in range(3)]
    for one in slots:
        store.prefetch(one)
    assert [store.read(one).tolist() for one in slots] == [[number] * 1_000 for number in range(3)]


# ---- what stays behind ----


def test_disk_has_no_name_in_its_folder(tmp_path):
    store = Disk(tmp_path)
    written = store.write(torch.ones(1000))
    if sys.platform != "win32":  # there it has one until it is closed
        assert list(tmp_path.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a file that is not closed warns
        del store, written
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="SIGKILL and /proc are Linux's")
def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    script = """
import os, signal, sys, torch
from hooklab import Offload
from hooklab.stores import Disk
x = torch.ones(300_000, requires_grad=True)
with Offload(to=Disk(sys.argv[1])) as offload:
    y = x.exp().sin().cos()
    print(offload.moved_bytes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = run_python(script, tmp_path)
    assert result.returncode == -9
    assert int(result.stdout) == 2 * 1_200_000  # what exp gives, sin takes: one tensor
    assert list(tmp_path.iterdir()) == []


def test_a_disk_from_before_a_fork_is_refused(monkeypatch):
    store = Disk()
    written = store.write(torch.ones(3))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (lambda: store.write(torch.ones(3)), lambda: store.read(written)):
        with pytest.raises(RuntimeError, match="made before the process was forked"):
            use()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_disk_refuses_to_be_copied_in_words(copied):
    with pytest.raises(TypeError, match=r"a store cannot be copied or pickled.*make another one"):
        copied(Disk())


# ---- folders, and disks that are full ----


def test_disk_refuses_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a folder; make it first") as error:
        Disk(tmp_path / "nowhere")
    assert error.value.filename == os.fspath(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="expected a folder, found a file"):
        Disk(tmp_path / "file")


def test_too_many_open_files_are_named(tmp_path, monkeypatch):
    def too_many(**options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("tempfile.TemporaryFile", too_many)
    with pytest.raises(OSError, match=r"let one Disk serve many blocks") as error:
        Disk(tmp_path)
    assert (error.value.errno, error.value.filename) == (errno.EMFILE, str(tmp_path))


def short_and_full(room, number=errno.ENOSPC):
    """A `pwrite` on a disk with `room` bytes left: first it writes less than asked, then it fails."""
    real, left = os.pwrite, [room]

    def pwrite(descriptor, content, start):
        if not left[0]:
            raise OSError(number, os.strerror(number))
        written = real(descriptor, content[: left[0]], start)
        left[0] -= written
        return written

    return pwrite


@POSIX
def test_a_full_disk_is_named_with_the_bytes_wanted_and_free(tmp_path, monkeypatch):
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    store = Disk("small")
    monkeypatch.chdir("/")
    before = store.write(torch.arange(100))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", short_and_full(1000))
        patch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=12_345))
        with pytest.raises(OSError, match=r"no room in .*small: 4,000,000 bytes wanted, 12,345 free") as error:
            store.write(torch.ones(1_000_000))
    assert error.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(error.value)
    assert store.read(before).tolist() == list(range(100))
    after = store.write(torch.ones(1_000_000))
    assert store.read(after).sum() == 1_000_000
    assert after.start == 1024  # the failed one left no hole


@POSIX
def test_any_other_error_of_the_disk_is_left_as_it_is(tmp_path, monkeypatch):
    store = Disk(tmp_path)
    monkeypatch.setattr(os, "pwrite", short_and_full(0, errno.EIO))
    with pytest.raises(OSError, match=f"^{re.escape(str(OSError(errno.EIO, os.strerror(errno.EIO))))}$"):
        store.write(torch.ones(1000))


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="this system has no preadv")
def test_a_file_that_was_cut_short_is_named(tmp_path, monkeypatch):
    store = Disk(tmp_path)
    written = store.write(torch.ones(1000))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match=r"the file in .* has been cut short") as error:
        store.read(written)
    assert error.value.errno == errno.EIO
    assert str(tmp_path) in str(error.value)


# ---- pinned memory, on a device that is slow and forgets ----


@pytest.fixture
def device():
    return SlowDevice()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pinned_memory_gives_back_every_bit(device, dtype):
    store = SlowMemory(device, chunk=4096)
    tensor = (torch.randn(5, 7) * 3).to(dtype).t()
    again = store.read(store.write(tensor))
    assert torch.equal(again.view(torch.uint8), tensor.flatten().view(torch.uint8))
    assert device.hazards == 0


@pytest.mark.parametrize(("in_flight", "held"), [(0, 0), (1, 1), (4_000, 1), (7_999, 1), (8_000, 2)])
def test_what_is_on_its_way_is_held_and_bounded(device, in_flight, held):
    """One source may be on its way however large: it leaves while the next is computed. With 0 bytes none may."""
    store, slots, sources = SlowMemory(device, in_flight=in_flight), [], []
    for number in range(5):
        source = torch.full((1000,), float(number))
        sources.append(weakref.ref(source.untyped_storage()))
        slots.append(store.write(source))
        del source
        assert sum(source() is not None for source in sources) == min(held, number + 1)
    assert [store.read(one)[0].item() for one in slots] == list(range(5))
    assert device.hazards == 0


def test_backward_frees_the_sources_that_are_copied(device):
    store, sources, slots = SlowMemory(device), [], []
    for number in range(3):
        source = torch.full((10,), float(number))
        sources.append(weakref.ref(source.untyped_storage()))
        slots.append(store.write(source))
    del source
    assert not device.waits
    assert store.read(slots.pop()).unique().tolist() == [2.0]
    assert all(source() is None for source in sources)  # no write will come before the next forward


def test_devices_do_not_share_a_chunk(device):
    """Each has a copy stream: a stretch that one frees may still be read by its copy on the way back."""
    store = SlowMemory(device)
    here = store.write(torch.ones(8))
    freed = here.host.data_ptr()
    del here
    there = store.write(torch.ones(8, device="meta"))
    again = store.write(torch.ones(8))
    assert again.host.data_ptr() == freed != there.host.data_ptr()
    assert len(device.chunks) == 2


def test_a_prefetch_is_read_without_a_second_copy(device):
    store = SlowMemory(device)
    written = store.write(torch.arange(5))
    store.prefetch(written), store.prefetch(written)
    assert device.given == 2
    assert store.read(written).tolist() == [0, 1, 2, 3, 4]
    assert device.given == 2
    assert store.read(written).tolist() == [0, 1, 2, 3, 4]  # again: one more copy
    assert device.given == 3


def test_a_prefetch_that_nobody_reads_ends_well(device):
    store = SlowMemory(device)
    written = store.write(torch.arange(5))
    store.prefetch(written)
    del written
    other = store.write(torch.arange(7))
    assert store.read(other).tolist() == list(range(7))
    assert device.hazards == 0


def test_room_of_slots_that_were_never_copied_is_used_again_in_order(device):
    store = SlowMemory(device, chunk=ALIGNMENT)
    store.write(torch.full((100,), 1.0))  # dropped at once, its copy still to come
    second = store.write(torch.full((100,), 2.0))
    gc.collect()
    assert store.read(second).unique().tolist() == [2.0]
    assert len(device.chunks) == 1
    assert device.hazards == 0


def test_chunks_grow_to_their_limit_and_are_used_again(device, monkeypatch):
    monkeypatch.setattr("hooklab.stores.pinned.MIN_CHUNK", 4096)
    store = SlowMemory(device, chunk=16_384)
    for _ in range(3):
        slots = [store.write(torch.zeros(1000)) for _ in range(10)]
        assert device.chunks == [4096, 4096, 8192, 16_384, 16_384]
        del slots
    store.write(torch.zeros(10_000))  # a larger tensor gets a chunk of its own
    assert device.chunks[-1] == 40_448
    assert store.pinned_bytes == sum(device.chunks)


def test_pinned_memory_refuses_what_is_on_the_cpu_and_bad_sizes():
    with pytest.raises(TypeError, match="expected a tensor on a GPU, found one on cpu"):
        PinnedMemory().write(torch.ones(3))
    with pytest.raises(ValueError, match=r"PinnedMemory\(in_flight=-1\)"):
        PinnedMemory(in_flight=-1)
    with pytest.raises(TypeError, match=r"PinnedMemory\(chunk=...\)"):
        PinnedMemory(chunk=1.5)


@pytest.mark.parametrize("prefetch", [0, 20_000, 10**9])
@pytest.mark.parametrize("keep", [0, 9_000, 10**9])
def test_gradients_through_a_slow_device_are_the_same(device, keep, prefetch):
    torch.manual_seed(0)
    blocks = (block for _ in range(6) for block in (torch.nn.Linear(32, 32), torch.nn.ReLU()))
    model, x = torch.nn.Sequential(*blocks), torch.randn(16, 32)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    store = SlowMemory(device, in_flight=5_000)
    for _ in range(3):
        model.zero_grad()
        with Offload(model, to=store, keep=keep, prefetch=prefetch, min_bytes=0) as offload:
            loss = model(x).square().sum()
        loss.backward()
        assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))
    assert (offload.moved_bytes > 0) == (keep < 10**9)
    assert device.hazards == 0
