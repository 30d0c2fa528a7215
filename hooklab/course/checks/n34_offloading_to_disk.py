"""Checks of notebook 34: offloading to disk. 34.D stands in n34_save_to_disk.py."""

import gc
import os
import traceback
import weakref
from collections.abc import MutableMapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab.course.check import Exercise, Phrase, refuse, refuse_first, refuse_latest_call, within
from hooklab.course.checks.pairs import is_pair, refuse_latest_pair, refuse_unpacked_once
from hooklab.course.checks.stores import dtype_and_shape, edited, holds_memory, reads_back, same_bits
from hooklab.saved import Offload


def _pair(got):
    if got is None:
        refuse("returned_nothing")
    if not is_pair(got):
        parts = ", ".join(type(item).__name__ for item in got) if isinstance(got, tuple | list) else None
        refuse("not_a_pair", kinds=type(got).__name__ if parts is None else f"({parts})")
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


OTHERS = ["notes.txt", "weights.pt"]  # somebody else's, in the folder before the answer is called
DESCRIPTORS = "/proc/self/fd"  # on Linux


def examine_disk_hooks(answer):
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        TemporaryDirectory(ignore_cleanup_errors=True) as elsewhere,
    ):
        for name in OTHERS:
            Path(folder, name).write_text("somebody else's")
        with _packed_goes_first():
            _examine_files(answer, folder, elsewhere)
        # A descriptor leads to its file, deleted or not.
        opened = [os.path.realpath(descriptor) for descriptor in Path(DESCRIPTORS).glob("*")]
        if left := sum(path.startswith(os.path.realpath(folder)) for path in opened):
            refuse("left_open", left=left)


def _examine_files(answer, folder, elsewhere):
    pair = _pair(answer(folder))
    _expect_others(folder)
    _examine_graph(pair, folder)
    _refuse_left("leaked", folder)
    _forward(pair)
    _refuse_left("left_without_backward", folder)
    # Two pairs at a time, first in one folder and then in two.
    for x, z, want in [_forward(answer(folder), factor) for factor in (1.0, 0.5)]:
        with suppress(FileNotFoundError):
            z.sum().backward()
        if x.grad is None or not torch.allclose(x.grad, want, rtol=1e-4):
            refuse("names_collide")
    pack, _ = answer(folder)
    answer(elsewhere)
    _packed = pack(torch.ones(3))
    if files_in(elsewhere):
        refuse_latest_call()
    _examine_content(pair, folder)
    _examine_kinds(pair)
    _expect_others(folder)


def _examine_graph(pair, folder):
    x, z, want = _forward(pair)
    written = len(files_in(folder))
    if not written:
        refuse("no_file")
    if written < 4:
        refuse("same_name", written=written)
    _first = z.grad_fn._saved_self  # it stays while it is read again
    try:
        _second = z.grad_fn._saved_self
    except (FileNotFoundError, KeyError, RuntimeError) as error:
        refuse("deleted_too_early", error=error)
    try:
        z.sum().backward()
    except FileNotFoundError:
        _expect_others(folder)
        refuse("not_its_own")
    if not torch.allclose(x.grad, want, rtol=1e-4):
        refuse("wrong_values")


def _examine_content(pair, folder):
    pack, unpack = pair
    row = torch.arange(250_000.0).view(500, 500)[3, :10]
    packed = pack(row)
    size = max((file.stat().st_size for file in files_in(folder)), default=0)
    if size > 100_000:
        refuse("whole_memory", size=size)
    if not torch.equal(unpack(packed), row):
        refuse("wrong_values")
    alone = torch.full((10,), 20_240.5)  # a number that is nowhere else
    memory, packed = weakref.ref(alone.untyped_storage()), pack(alone)
    del alone
    unpack(packed)
    gc.collect()
    if memory() is not None:
        refuse("kept_in_memory")
    if any(isinstance(part, Tensor) and (part == 20_240.5).sum() == 10 for part in within((pair, packed))):
        refuse("copy_in_memory")


def _examine_kinds(pair):
    pack, unpack = pair
    for want in (
        torch.arange(6.0, dtype=torch.float64).view(2, 3).t(),
        torch.tensor([1.5, -0.25], dtype=torch.bfloat16),
        torch.tensor([[True], [False]]),
        torch.tensor(7),
    ):
        got = unpack(pack(want))
        if not same_bits(got, want):
            refuse("other_kinds", want=dtype_and_shape(want), found=dtype_and_shape(got))


def _forward(pair, factor=1.0):
    """Three operations, four saves: `exp` its result, `*` both, `sin` its input. The gradient is known."""
    x = torch.tensor([0.5, -1.0, 2.0]).mul(factor).requires_grad_()
    with saved_tensors_hooks(*pair):
        y = x.exp()
        z = (y * y).sin()
    inner = torch.exp(x.detach())
    return x, z, torch.cos(inner * inner) * 2 * inner * inner


def files_in(folder):
    """What the answer has in the folder: every file but those that were there before."""
    return [path for path in Path(folder).rglob("*") if path.is_file() and path.name not in OTHERS]


def _refuse_left(key, folder):
    gc.collect()
    if left := len(files_in(folder)):
        refuse(key, left=left)


def _expect_others(folder):
    for name in OTHERS:
        if not Path(folder, name).exists():
            refuse("touched_others", name=name)


@contextmanager
def _packed_goes_first():
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


WRITTEN = [  # after one tensor has been written: how many entries `held` has, of which types, with how many bytes
    ("edits_input", lambda t: edited(t.given, t.sample)),
    ("not_bytes", lambda t: (t.count, t.kinds) != (1, "bytes")),
    ("whole_memory", lambda t: t.stored == t.memory > t.sample.nbytes),
    ("wrong_length", lambda t: t.stored != t.sample.nbytes),
]

READ = [  # what `read` has returned
    ("not_a_tensor", lambda t: not isinstance(t.got, Tensor)),
    ("wrong_dtype", lambda t: (t.got.dtype, t.got.shape) != (t.sample.dtype, t.sample.shape)),
    ("wrong_bits", lambda t: not same_bits(t.got, t.sample)),
]


SPECIAL = torch.tensor([0.1, -0.0, float("nan"), float("-inf"), 3e38])
SAMPLES = [
    *(SPECIAL, SPECIAL.to(torch.bfloat16), SPECIAL.half(), SPECIAL.double() / 3, torch.tensor([True, False])),
    *(torch.tensor([2**53 + 1, -7]), torch.tensor([1 + 2j, -3j]), torch.tensor([2.5]), torch.arange(9.0)[3:6]),
]


def examine_byte_store(answer):
    store = answer()
    if store is None:
        refuse("returned_nothing")
    if not isinstance(getattr(store, "held", None), MutableMapping):
        refuse("no_held", store=store)
    for sample in SAMPLES:
        _examine_sample(answer(), sample)
    if answer().held is store.held:
        refuse("one_for_all")
    _examine_keys(answer())
    _examine_dtypes(answer())
    _examine_freed(answer())
    _examine_left(answer())
    if holds_memory(answer().write):
        refuse("kept_in_memory")
    _examine_at_work(answer())


def _examine_sample(store, sample):
    given = deepcopy(sample)  # with all the memory behind it
    told = {"sample": sample, "dtype": str(sample.dtype).removeprefix("torch.")}
    try:
        slot = store.write(given)
    except (TypeError, ValueError, RuntimeError) as error:
        refuse("write_failed", **told, error=error)
    entries = list(store.held.values())
    found = {"count": len(entries), "kinds": ", ".join(sorted({type(entry).__name__ for entry in entries})) or "-"}
    found["stored"] = sum(len(entry) for entry in entries if isinstance(entry, bytes))
    refuse_first(WRITTEN, **told, given=given, memory=sample.untyped_storage().nbytes(), **found)
    got = _read(store, slot, "first_time")
    refuse_first(READ, **told, got=got, got_shape=list(getattr(got, "shape", ())), count=sample.numel())
    _read(store, slot, "second_time").zero_()
    if not same_bits(_read(store, slot, "third_time"), sample):
        refuse("shares_memory")


def _read(store, slot, time="once"):
    try:
        return store.read(slot)
    except KeyError:
        refuse("read_once", time=Phrase(time))


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
            refuse("freed_others")
        if found != [float(number)] * 3:
            refuse("same_key")


def _examine_dtypes(store):
    samples = [torch.ones(4), torch.ones(4, dtype=torch.float64), torch.arange(4)]
    slots = [store.write(sample.clone()) for sample in samples]
    for slot, sample in zip(slots, samples, strict=True):
        if not same_bits(_read(store, slot), sample):
            refuse("one_slot", sample=sample)


def _examine_freed(store):
    first, equal = store.write(torch.ones(3)), store.write(torch.ones(3))
    del first
    gc.collect()
    if not reads_back(store, equal, torch.ones(3)):
        refuse("freed_equal")


def _examine_left(store):
    slots = [store.write(torch.ones(length)) for length in range(1, 5)]  # all alive: no two have the same id()
    for slot in slots:
        store.read(slot)
    del slots, slot
    gc.collect()
    if 0 < len(store.held) < 4:  # with all four left, the graph of _examine_at_work says it better
        refuse("freed_late")


def _examine_at_work(store):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)).to(torch.bfloat16)
    params, x = list(model.parameters()), torch.randn(4, 6).to(torch.bfloat16)
    want = torch.autograd.grad(model(x).sum(), params)
    with Offload(model, to=store, min_bytes=0):
        loss = model(x).sum()
    if not all(map(torch.equal, torch.autograd.grad(loss, params), want)):
        refuse("wrong_gradients")
    del loss
    gc.collect()
    if store.held:
        refuse("never_freed", left=len(store.held))


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

THRESHOLD = [  # one tensor of each of these shapes is saved, `at_least` is 100
    ("nothing_moved", lambda t: not t.moved),
    ("everything_moved", lambda t: t.moved == SHAPES),
    ("threshold_off", lambda t: t.moved != [(25, 4), (101,), (50, 4)]),
]

# By key: what is computed of a small tensor, what is done to the result, and whether backward then has to raise.
SMALL = [
    ("edit_unnoticed", torch.exp, lambda y: y.mul_(2), True),
    ("false_alarm", lambda x: (x * 2).add_(1).sin(), lambda y: None, False),
    ("same_values", torch.exp, lambda y: y.mul_(1), True),
    ("nan_differs", lambda x: (x * float("nan")).exp(), lambda y: None, False),
]

INNER = {  # pairs of hooks by what they pack into
    "tensor": (lambda saved: -saved.detach(), lambda packed: -packed),
    "tuple": (lambda saved: (saved.detach() * 2, 0.5), lambda packed: packed[0] * packed[1]),
    "list": (lambda saved: [saved.detach().tolist()], lambda packed: torch.tensor(packed[0])),
    "function": (lambda saved: (lambda half: lambda: half)(saved.detach() / 2), lambda packed: packed() * 2),
    "pair": (lambda saved: (saved.detach() / 2, 2), lambda packed: packed[0] * packed[1]),
    "triple": (lambda saved: (saved.detach() / 2, saved._version, 2), lambda packed: packed[0] * packed[2]),
}


def examine_large_only(answer):
    def make(*given):
        return _pair(answer(*given))

    refuse_first(THRESHOLD, moved=[shape for shape, *_ in _given(make, 100, map(torch.zeros, SHAPES))])
    _examine_other_thresholds(make)
    pair = make(*INNER["tensor"], 100)
    if _kept(pair, lambda: [torch.zeros(3, requires_grad=True).exp()]):
        refuse("leaks")
    for edit in SMALL:
        _examine_edit(pair, 3, *edit)
    for kind, inner in INNER.items():
        _examine_values(make(*inner, 100), kind)
    _examine_edit(pair, 3, "checked_once", torch.exp, _backward_and_edit, True)
    # What `pack` has copied away may be freed, and edited.
    copying = make(lambda saved: saved.tolist(), torch.tensor, 100)
    if _kept(copying, lambda: [hidden := torch.zeros(200, requires_grad=True) + 1, hidden.sin()]):
        refuse("large_kept")
    _examine_edit(copying, 200, "large_checked", torch.exp, lambda y: y.mul_(2), False)
    # A `pack` may know parameters by their storage, or ask for `requires_grad`.
    hidden = torch.ones(200, requires_grad=True) * 2
    if _given(make, 100, [hidden]) != [((200,), hidden.untyped_storage().data_ptr(), True)]:
        refuse("other_tensor")
    refuse_latest_pair(make, (torch.detach, torch.clone, 10), (torch.zeros_like, torch.clone, 10), torch.ones(20))


def _given(make, at_least, tensors):
    """What `pack` is given when these are saved: of each its shape, where its memory lies, and `requires_grad`."""
    given = []

    def pack(saved):
        given.append((tuple(saved.shape), saved.untyped_storage().data_ptr(), saved.requires_grad))
        return saved.detach()

    with saved_tensors_hooks(*make(pack, torch.clone, at_least)):
        for tensor in tensors:
            tensor.requires_grad_().sin()
    return given


def _examine_other_thresholds(make):
    for at_least, x in (
        (30, torch.zeros(30)),
        (200, torch.zeros(150)),
        (100, torch.zeros(60, dtype=torch.float64)),
        (100, torch.zeros(300)[:60]),
        (100, torch.zeros(120, dtype=torch.bfloat16)),
    ):
        moved, count, memory = bool(_given(make, at_least, [x])), x.numel(), x.untyped_storage().nbytes()
        if moved != (count >= at_least):
            given = Phrase("given" if moved else "not_given")
            refuse("other_threshold", at_least=at_least, count=count, dtype=x.dtype, memory=memory, given=given)


def _kept(pair, compute):
    """Whether the memory of the first of these results is still there when it is gone, with the others alive."""
    with saved_tensors_hooks(*pair):
        first, *_others = compute()
    memory = weakref.ref(first.untyped_storage())
    del first
    gc.collect()
    return memory() is not None


def _examine_edit(pair, size, key, compute, then, edited_since):
    """Refuse for `key` where backward raises a RuntimeError though nothing was edited, or does not though it was."""
    with saved_tensors_hooks(*pair):
        y = compute(torch.zeros(size, requires_grad=True))
    then(y)
    try:
        y.sum().backward()
        raises = False
    except RuntimeError:
        raises = True
    except Exception as error:
        if not edited_since:
            raise
        refuse("other_error", error=error)
    if raises != edited_since:
        refuse(key)


def _backward_and_edit(y):
    y.sum().backward(retain_graph=True)
    y.detach().mul_(2)


def _examine_values(pair, kind):
    for shape in SHAPES:
        x, found = torch.full(shape, 0.5, requires_grad=True), {"kind": kind, "shape": list(shape)}
        try:
            with saved_tensors_hooks(*pair):
                y = x.exp()
            y.sum().backward(retain_graph=True)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, KeyError) as error:
            refuse("not_restored", **found, raised=type(error).__name__)
        if not torch.allclose(x.grad, x.detach().exp(), rtol=1e-4):
            refuse("not_restored", **found, raised="-")
        refuse_unpacked_once(y.sum())


LARGE_ONLY = Exercise("34.C", examine_large_only, large_only)

EXERCISES = [DISK_HOOKS, BYTE_STORE, LARGE_ONLY]
