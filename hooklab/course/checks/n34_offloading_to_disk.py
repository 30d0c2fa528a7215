"""Checks of notebook 34: offloading to disk."""

import gc
import os
import tempfile
import traceback
import weakref
from collections.abc import MutableMapping
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab.course.check import Exercise, refuse, within
from hooklab.saved import Offload


def _pair(got):
    if got is None:
        refuse("returned_nothing")
    if not isinstance(got, tuple | list) or len(got) != 2 or not all(map(callable, got)):
        kinds = type(got).__name__
        if isinstance(got, tuple | list):
            kinds = f"({', '.join(type(item).__name__ for item in got)})"
        refuse("not_a_pair", kinds=kinds)
    return got


# ---- 34.A: a file that goes with the graph ----


def disk_hooks(folder):
    import os
    import uuid

    class File:
        def __init__(self):
            self.name = os.path.join(folder, str(uuid.uuid4()))

        def __del__(self):
            if os.path.exists(self.name):
                os.remove(self.name)

    def pack(saved):
        file = File()
        torch.save(saved.detach().clone(), file.name)
        return file

    return pack, lambda file: torch.load(file.name, weights_only=True)


OTHERS = ["notes.txt", "weights.pt"]


def _files(folder):
    """What the answer has in the folder: every file but those that were there before."""
    found = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return [name for name in found if name not in {os.path.join(folder, other) for other in OTHERS}]


def _forward(pair, factor=1.0):
    """Three operations, four saves: `exp` its result, `*` both, `sin` its input. The gradient is known."""
    x = torch.tensor([0.5, -1.0, 2.0]).mul(factor).requires_grad_()
    with saved_tensors_hooks(*pair):
        y = x.exp()
        z = (y * y).sin()
    inner = torch.exp(x.detach())
    return x, z, torch.cos(inner * inner) * 2 * inner * inner


def examine_disk_hooks(answer):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in OTHERS:
            with open(os.path.join(folder, name), "w") as other:
                other.write("somebody else's")
        with _files_go_first():
            _examine_files(answer, folder)
        if left := _open_in(folder):
            refuse("left_open", left=left)


@contextmanager
def _files_go_first():
    """At the end whatever is still packed goes, also after an error, whose frames hold it; so may its folder then."""
    try:
        yield
    except Exception as error:
        one = error
        while one is not None:  # and the errors that led to it
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        raise
    finally:
        gc.collect()


DESCRIPTORS = "/proc/self/fd"  # on Linux


def _open_in(folder):
    """How many file descriptors of this process are those of files in the folder, deleted or not."""
    found = []
    for number in os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ():
        with suppress(OSError):  # the one that reads the list is closed by now
            found.append(os.readlink(os.path.join(DESCRIPTORS, number)))
    return sum(name.startswith(os.path.realpath(folder)) for name in found)


def _examine_files(answer, folder):
    pair = _pair(answer(folder))
    _examine_others(folder)
    x, z, want = _forward(pair)
    written = len(_files(folder))
    if not written:
        refuse("no_file")
    if written < 4:
        refuse("same_name", written=written)
    first = z.grad_fn._saved_self
    try:
        second = z.grad_fn._saved_self
    except (FileNotFoundError, KeyError, RuntimeError) as error:
        refuse("deleted_too_early", error=error)
    try:
        z.sum().backward()
    except FileNotFoundError:
        _examine_others(folder)
        refuse("not_its_own")
    if not torch.allclose(x.grad, want, rtol=1e-4):
        _refuse_values()
    del z, first, second
    gc.collect()
    if left := len(_files(folder)):
        refuse("leaked", left=left)
    _examine_no_backward(pair, folder)
    _examine_two_pairs(answer, folder)
    _examine_two_folders(answer, folder)
    _examine_size(pair, folder)
    _examine_kinds(pair)
    _examine_others(folder)


def _examine_others(folder):
    for name in OTHERS:
        if not os.path.exists(os.path.join(folder, name)):
            refuse("touched_others", name=name)


def _refuse_values():
    refuse("wrong_values")


def _examine_no_backward(pair, folder):
    x, z, want = _forward(pair)
    del x, z, want
    gc.collect()
    if left := len(_files(folder)):
        refuse("left_without_backward", left=left)


def _examine_two_pairs(answer, folder):
    runs = [_forward(answer(folder), factor) for factor in (1.0, 0.5)]
    for x, z, want in runs:
        try:
            z.sum().backward()
        except FileNotFoundError:
            x.grad = None
        if x.grad is None or not torch.allclose(x.grad, want, rtol=1e-4):
            refuse("names_collide")


def _examine_two_folders(answer, folder):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as elsewhere:
        pack, _ = answer(folder)
        answer(elsewhere)
        packed = pack(torch.ones(3))
        wrong = _files(elsewhere)
        del packed
        gc.collect()
    if wrong:
        _refuse_latest()


def _refuse_latest():
    refuse("latest_call")


def _examine_kinds(pair):
    pack, unpack = pair
    for want in (
        torch.arange(6.0, dtype=torch.float64).view(2, 3).t(),
        torch.tensor([1.5, -0.25], dtype=torch.bfloat16),
        torch.tensor([[True], [False]]),
        torch.tensor(7),
    ):
        got = unpack(pack(want))
        if not isinstance(got, Tensor) or got.dtype != want.dtype or got.shape != want.shape or not got.equal(want):
            found = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
            refuse("other_kinds", want=want, want_shape=list(want.shape), found=found)


def _examine_size(pair, folder):
    pack, unpack = pair
    table = torch.arange(250_000.0).view(500, 500)
    row = pack(table[3, :10])
    size = max(map(os.path.getsize, _files(folder)), default=0)
    content = unpack(row)
    del row  # its file goes before the folder does
    if size > 100_000:
        refuse("whole_memory", size=size)
    if not torch.equal(content, table[3, :10]):
        _refuse_values()
    alone = torch.full((10,), 20_240.5)  # a number that is nowhere else
    storage = weakref.ref(alone.untyped_storage())
    packed = pack(alone)
    del alone
    unpack(packed)
    gc.collect()
    if (
        any(isinstance(part, Tensor) and (part == 20_240.5).sum() == 10 for part in within((pair, packed)))
        and storage() is None
    ):
        del packed
        refuse("copy_in_memory")
    if storage() is not None:
        del packed
        refuse("kept_in_memory")
    del packed


DISK_HOOKS = Exercise("34.A", examine_disk_hooks, disk_hooks)

# ---- 34.B: a store on a dictionary of bytes ----


def byte_store():
    class Slot:
        def __init__(self, held, tensor):
            self.held, self.dtype = held, tensor.dtype
            held[id(self)] = tensor.detach().view(torch.uint8).numpy().tobytes()

        def __del__(self):
            del self.held[id(self)]

    class Store:
        def __init__(self):
            self.held = {}

        def write(self, tensor):
            return Slot(self.held, tensor)

        def read(self, slot):
            return torch.frombuffer(bytearray(self.held[id(slot)]), dtype=slot.dtype)

    return Store()


def _samples():
    special = torch.tensor([0.1, -0.0, float("nan"), float("-inf"), 3e38])
    return [
        special, special.to(torch.bfloat16), special.half(), special.double() / 3, torch.tensor([True, False]),
        torch.tensor([2**53 + 1, -7]), torch.tensor([1 + 2j, -3j]), torch.tensor([2.5]),
        torch.arange(9.0)[3:6],
    ]  # fmt: skip


def _bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).tolist()


def examine_byte_store(answer):
    store = answer()
    if store is None:
        refuse("returned_nothing")
    if not isinstance(getattr(store, "held", None), MutableMapping):
        refuse("no_held", store=store)
    for sample in _samples():
        _examine_sample(answer(), sample)
    if answer().held is store.held:
        refuse("one_for_all")
    _examine_keys(answer())
    _examine_dtypes(answer())
    _examine_freed(answer())
    _examine_left(answer())
    _examine_moved(answer())
    _examine_at_work(answer())


def _examine_sample(store, sample):
    dtype = str(sample.dtype).removeprefix("torch.")
    memory = sample.untyped_storage()
    given = torch.empty(0, dtype=sample.dtype).set_(memory.clone(), sample.storage_offset(), sample.shape)
    try:
        slot = store.write(given)
    except (TypeError, ValueError, RuntimeError) as error:
        refuse("write_failed", dtype=dtype, error=error)
    if given.untyped_storage().nbytes() != memory.nbytes() or _bits(given) != _bits(sample):
        refuse("edits_input", dtype=dtype)
    del given
    entries = list(store.held.values())
    if len(entries) != 1 or not isinstance(entries[-1], bytes):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in entries})) or "-"
        refuse("not_bytes", count_entries=len(entries), kinds=kinds)
    if len(entries[-1]) == memory.nbytes() > sample.nbytes:
        refuse("whole_memory", sample_nbytes=sample.nbytes, memory=memory.nbytes())
    if len(entries[-1]) != sample.nbytes:
        refuse("wrong_length", dtype=dtype, sample_nbytes=sample.nbytes, count_entries=len(entries[-1]))
    _expect_bits(_read(store, slot, "第一遍", "the first time"), sample, dtype)
    got = _read(store, slot, "第二遍", "the second time")
    got.zero_()
    if _bits(_read(store, slot, "第三遍", "the third time")) != _bits(sample):
        refuse("shares_memory")


def _read(store, slot, zh, en):
    try:
        return store.read(slot)
    except KeyError:
        refuse(
            "read_once",
            zh=f"同一个槽位读{zh}时，抛出了 `KeyError`：`held` 里没有这个键。",
            en=f"Reading a slot {en} raised a `KeyError`: in `held` there is no such key.",
        )


def _expect_bits(got, want, dtype):
    if not isinstance(got, Tensor):
        refuse("not_a_tensor", got=got)
    if got.dtype != want.dtype or got.shape != want.shape:
        refuse("wrong_dtype", dtype=dtype, want=want.numel(), got=got, got_shape=list(got.shape))
    if _bits(got) != _bits(want):
        refuse("wrong_bits", dtype=dtype)


def _examine_keys(store):
    memory = torch.empty(3)  # one for all: neither its address nor id() tells one content from another
    slots = {number: store.write(memory.fill_(number)) for number in range(20)}
    del slots[4]
    gc.collect()
    slots |= {number: store.write(memory.fill_(number)) for number in range(20, 30)}
    for number, slot in slots.items():
        try:
            found = store.read(slot).tolist()
        except KeyError:
            found = None
        if found is None:
            refuse("freed_others")
        if found != [float(number)] * 3:
            refuse("same_key")


def _examine_dtypes(store):
    samples = [torch.ones(4), torch.ones(4, dtype=torch.float64), torch.arange(4)]
    slots = [store.write(sample.clone()) for sample in samples]
    for slot, sample in zip(slots, samples, strict=True):
        got = _read(store, slot, "一遍", "once")
        if not isinstance(got, Tensor) or got.dtype != sample.dtype or not torch.equal(got, sample):
            refuse("one_slot", sample=sample)


def _examine_freed(store):
    first, equal = store.write(torch.ones(3)), store.write(torch.ones(3))
    del first
    gc.collect()
    try:
        _expect_bits(store.read(equal), torch.ones(3), "float32")
    except KeyError:
        refuse("freed_equal")
    del equal
    slot, other = store.write(torch.ones(3)), store.write(torch.ones(5))
    del slot
    gc.collect()
    _expect_bits(_read(store, other, "一遍", "once"), torch.ones(5), "float32")


def _examine_left(store):
    slots = [store.write(torch.ones(length)) for length in range(1, 5)]  # all alive: no two have the same id()
    for slot in slots:
        store.read(slot)
    del slots, slot
    gc.collect()
    if 0 < len(store.held) < 4:  # with all four left, the graph of _examine_at_work says it better
        refuse("freed_late")


def _examine_moved(store):
    alone = torch.ones(10)
    storage = weakref.ref(alone.untyped_storage())
    slot = store.write(alone)
    del alone
    gc.collect()
    if storage() is not None:
        refuse("kept_in_memory")
    del slot


def _examine_at_work(store):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)).to(torch.bfloat16)
    x = torch.randn(4, 6).to(torch.bfloat16)
    want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with Offload(model, to=store, min_bytes=0):
        loss = model(x).sum()
    got = torch.autograd.grad(loss, list(model.parameters()))
    if not all(map(torch.equal, got, want)):
        refuse("wrong_gradients")
    del loss, got
    gc.collect()
    if store.held:
        refuse("never_freed", count_store_held=len(store.held))


BYTE_STORE = Exercise("34.B", examine_byte_store, byte_store)

# ---- 34.C: a threshold that leaves small tensors in memory, safely ----


def large_only(pack, unpack, at_least):
    def pack_either(saved):
        if saved.numel() >= at_least:
            return "moved", pack(saved), None
        return "kept", saved.detach(), saved._version

    def unpack_either(packed):
        where, content, version = packed
        if where == "moved":
            return unpack(content)
        if content._version != version:
            raise RuntimeError("a saved tensor was edited in place")
        return content

    return pack_either, unpack_either


SHAPES = [(3,), (30,), (99,), (25, 4), (101,), (50, 4)]

INNER = {
    "tensor": (lambda saved: -saved.detach(), lambda packed: -packed),
    "tuple": (lambda saved: (saved.detach() * 2, 0.5), lambda packed: packed[0] * packed[1]),
    "list": (lambda saved: [saved.detach().tolist()], lambda packed: torch.tensor(packed[0])),
    "function": (lambda saved: (lambda half: lambda: half)(saved.detach() / 2), lambda packed: packed() * 2),
    "pair": (lambda saved: (saved.detach() / 2, 2), lambda packed: packed[0] * packed[1]),
    "triple": (lambda saved: (saved.detach() / 2, saved._version, 2), lambda packed: packed[0] * packed[2]),
}


def examine_large_only(answer):
    _examine_threshold(answer)
    _examine_other_thresholds(answer)
    pair = _pair(answer(*INNER["tensor"], 100))
    _examine_leak(pair)
    _examine_edit(pair)
    _examine_equal_edit(pair)
    for kind, inner in INNER.items():
        _examine_values(answer(*inner, 100), kind)
    _examine_late_edit(pair)
    _examine_large(answer)
    _examine_given(answer)
    first = _pair(answer(torch.detach, lambda packed: packed, 10))
    answer(torch.zeros_like, lambda packed: packed, 10)
    if not torch.equal(first[1](first[0](torch.ones(20))), torch.ones(20)):
        _refuse_latest()


def _examine_given(answer):
    """A `pack` may know parameters by their storage, or ask for `requires_grad`."""
    given = []

    def pack(saved):
        given.append((saved.untyped_storage().data_ptr(), saved.requires_grad))
        return saved.detach()

    hidden = torch.ones(200, requires_grad=True) * 2
    with saved_tensors_hooks(*answer(pack, lambda packed: packed, 100)):
        hidden.sin()
    if given != [(hidden.untyped_storage().data_ptr(), True)]:
        refuse("other_tensor")


def _examine_threshold(answer):
    moved = []

    def pack(saved):
        moved.append(tuple(saved.shape))
        return saved.detach()

    pair = _pair(answer(pack, lambda packed: packed, 100))
    for shape in SHAPES:
        with saved_tensors_hooks(*pair):
            torch.zeros(shape, requires_grad=True).exp()
    if not moved:
        refuse("nothing_moved")
    if moved == SHAPES:
        refuse("everything_moved")
    if moved != [(25, 4), (101,), (50, 4)]:
        refuse("threshold_off", moved=moved)


def _examine_other_thresholds(answer):
    for at_least, x in (
        (30, torch.zeros(30, requires_grad=True)),
        (200, torch.zeros(150, requires_grad=True)),
        (100, torch.zeros(60, dtype=torch.float64, requires_grad=True)),
        (100, torch.zeros(300, requires_grad=True)[:60]),
        (100, torch.zeros(120, dtype=torch.bfloat16, requires_grad=True)),
    ):
        moved = []
        pair = answer(lambda saved, moved=moved: moved.append(1) or saved.detach(), lambda packed: packed, at_least)
        with saved_tensors_hooks(*pair):
            x.sin()
        if bool(moved) != (x.numel() >= at_least):
            zh, en = ("交给了", "was") if moved else ("没有交给", "was not")
            refuse(
                "other_threshold",
                zh=f"`at_least` 是 {at_least} 时，一个有 {x.numel()} 个元素的 `{x.dtype}` 张量{zh} `pack`；"
                f"它背后的内存有 {x.untyped_storage().nbytes()} 字节。数的应当是元素，与 `at_least` 比。",
                en=f"With `at_least` {at_least} a `{x.dtype}` tensor of {x.numel()} elements {en} given to `pack`; the memory "
                f"behind it has {x.untyped_storage().nbytes()} bytes. Its elements are to be counted, and compared with "
                "`at_least`.",
            )


def _examine_leak(pair):
    with saved_tensors_hooks(*pair):
        y = torch.zeros(3, requires_grad=True).exp()
    alive = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    if alive() is not None:
        refuse("leaks")


def _examine_edit(pair):
    x = torch.zeros(3, requires_grad=True)
    with saved_tensors_hooks(*pair):
        y = x.exp()
        z = x.exp().add_(1).sin()
    y.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError:
        pass
    except Exception as error:
        refuse("other_error", error=error)
    else:
        refuse("edit_unnoticed")
    try:
        _ = z.grad_fn._saved_self
    except RuntimeError:
        refuse("false_alarm")


def _examine_equal_edit(pair):
    x = torch.zeros(3, requires_grad=True)
    with saved_tensors_hooks(*pair):
        y = x.exp()
    y.mul_(1)
    try:
        y.sum().backward()
    except RuntimeError:
        pass
    else:
        refuse("same_values")
    with saved_tensors_hooks(*pair):
        y = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True).exp()
    try:
        y.sum().backward()
    except RuntimeError:
        refuse("nan_differs")


def _examine_late_edit(pair):
    x = torch.zeros(3, requires_grad=True)
    with saved_tensors_hooks(*pair):
        y = x.exp()
    y.sum().backward(retain_graph=True)
    y.detach().mul_(2)
    try:
        y.sum().backward()
    except RuntimeError:
        return
    refuse("checked_once")


def _examine_large(answer):
    """What `pack` has copied away may be edited, and freed."""
    pair = answer(lambda saved: saved.tolist(), torch.tensor, 100)
    x = torch.zeros(200, requires_grad=True)
    with saved_tensors_hooks(*pair):
        y = x.exp()
        hidden = x + 1
        z = hidden.sin()
    memory = weakref.ref(hidden.untyped_storage())
    del hidden
    gc.collect()
    if memory() is not None:
        refuse("large_kept")
    y.mul_(2)
    try:
        (y.sum() + z.sum()).backward()
    except RuntimeError:
        refuse("large_checked")


def _examine_values(pair, kind):
    for shape in SHAPES:
        x = torch.full(shape, 0.5, requires_grad=True)
        try:
            with saved_tensors_hooks(*pair):
                y = x.exp()
            y.sum().backward(retain_graph=True)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, KeyError) as error:
            x.grad = None
            said = type(error).__name__
        else:
            said = "-"
        if x.grad is None or not torch.allclose(x.grad, x.detach().exp(), rtol=1e-4):
            refuse("not_restored", kind=kind, shape=list(shape), said=said)
        try:
            y.sum().backward()
        except Exception as error:
            refuse("unpacked_once", error=error)


LARGE_ONLY = Exercise("34.C", examine_large_only, large_only)

EXERCISES = [DISK_HOOKS, BYTE_STORE, LARGE_ONLY]
