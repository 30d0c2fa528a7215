"""Checks of notebook 33: offloading to CPU memory."""

import gc
import re
import weakref
from contextlib import suppress

import torch
from torch import Tensor, nn

from hooklab._support.torch_private import close_hooks, outer_hooks
from hooklab.course.check import Exercise, Phrase, Refused, refuse, refuse_first, said, within
from hooklab.course.checks.calls import equal
from hooklab.course.checks.stores import (
    CountingStore,
    content_bytes,
    dtype_and_shape,
    edited,
    holds_memory,
    reads_back,
    same_bits,
)
from hooklab.saved import Offload

# ---- 33.A: SaveToCpu on Offload ----


def save_to(module, store):
    class SaveTo(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            with Offload(self.module, to=store, min_bytes=0):
                return self.module(*args, **kwargs)

    return SaveTo()


class _Inner(nn.Module):
    """Linear, BatchNorm, tanh; takes a keyword, returns a tuple; fails when asked to."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)

    def forward(self, x: Tensor, *, factor: float = 1.0, fail: bool = False) -> tuple[Tensor, float]:
        hidden = torch.tanh(self.norm(self.linear(x))) * factor
        if fail:
            raise ValueError("this module was told to fail")
        return hidden, factor


RESULT = [  # what the first call has returned
    ("other_result", lambda t: not isinstance(t.result, tuple) or len(t.result) != 2),
    ("other_result", lambda t: not isinstance(t.result[0], Tensor)),
    ("other_values", lambda t: t.result[1] != 2.0 or not torch.equal(t.result[0], t.want)),
    ("no_graph", lambda t: not t.result[0].requires_grad),
]

USED = [  # backward is over, and what was returned has been deleted; `plain` is the same module under the solution
    ("hidden_parameters", lambda t: t.count != t.own_count),
    ("copied_parameters", lambda t: {*map(id, t.wrapped.parameters())} != {*map(id, t.module.parameters())}),
    ("other_gradients", lambda t: not all(map(equal, _grads(t.wrapped, t.x), _grads(t.plain, t.plain_x)))),
    ("nothing_moved", lambda t: not t.moved),
    ("moved_own", lambda t: t.moved > t.wanted),
    ("too_few", lambda t: t.moved < t.wanted),
    ("keeps_slots", lambda t: t.alive),
    ("ran_twice", lambda t: t.runs > 1),
    ("skipped_hooks", lambda t: not t.runs),
]


def examine_save_to(answer):
    before = outer_hooks()
    try:
        _examine_calls(answer)
        _examine_two_inputs(answer)
        _examine_two_stores(answer)
        _examine_failing(answer)
    finally:
        close_hooks(before)  # an answer may leave its context open


def _examine_calls(answer):
    plain, plain_x = _inner()
    wanted = CountingStore()
    want, _ = save_to(plain, wanted)(plain_x, factor=2.0)
    want.square().sum().backward()

    store, runs = CountingStore(), []
    module, x, wrapped = _wrapped(answer, store)
    module.register_forward_hook(lambda *args: runs.append(1))
    result = wrapped(x, factor=2.0)
    refuse_first(RESULT, result=result, want=want)
    if _moves_outside(store):
        refuse("left_open")
    result[0].square().sum().backward()
    del result
    moved = sum(store.written)
    refuse_first(
        USED,
        plain=plain,
        plain_x=plain_x,
        wrapped=wrapped,
        module=module,
        x=x,
        count=len(list(wrapped.parameters())),
        own_count=len(list(module.parameters())),
        moved=moved,
        wanted=sum(wanted.written),
        surplus=moved - sum(wanted.written),
        alive=store.alive(),
        runs=len(runs),
    )
    wrapped(x, factor=2.0)
    if (second := sum(store.written) - moved) != moved:
        refuse("first_call_only", first=moved, second=second)
    module(x, factor=2.0)
    if sum(store.written) > 2 * moved:
        refuse("module_changed")


def _inner():
    torch.manual_seed(0)  # each call makes the same
    return _Inner(), torch.randn(3, 5, requires_grad=True)


def _wrapped(answer, store):
    module, x = _inner()
    wrapped = answer(module, store)
    if not isinstance(wrapped, nn.Module):
        refuse("no_module", wrapped=wrapped)
    if wrapped is module:
        refuse("same_module")
    return module, x, wrapped


def _moves_outside(store):
    before = len(store.written)
    torch.ones(2, requires_grad=True).exp()
    return len(store.written) > before


def _grads(module, x):
    return [tensor.grad for tensor in (x, *module.parameters())]


def _examine_two_inputs(answer):
    try:
        answer(nn.Bilinear(2, 3, 4), CountingStore())(torch.ones(1, 2), torch.ones(1, 3))
    except TypeError as error:
        refuse("one_input", error=error)


def _examine_two_stores(answer):
    store, other = CountingStore(), CountingStore()
    first = answer(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), store)
    answer(nn.Linear(2, 2), other)
    first(torch.ones(1, 2))
    if other.written or not store.written:
        refuse("latest_call")


def _examine_failing(answer):
    store = CountingStore()
    _, x, wrapped = _wrapped(answer, store)
    with suppress(ValueError):
        wrapped(x, fail=True)
        refuse("hid_error")
    if _moves_outside(store):
        refuse("open_after_error")


SAVE_TO = Exercise("33.A", examine_save_to, save_to)

# ---- 33.B: a store that leaves zeros out ----


def zeros_store():
    class Store:
        def write(self, tensor):
            rows = tensor.view(torch.uint8).view(len(tensor), -1)
            filled = rows.any(1).bool()
            return filled, rows[filled], tensor.dtype

        def read(self, slot):
            filled, values, dtype = slot
            rows = values.new_zeros(len(filled), values.shape[1])
            rows[filled] = values
            return rows.view(-1).view(dtype)

    return Store()


SAMPLES = {  # what else is written, by the phrase for it
    "signs": torch.tensor([0.0, -0.0, float("nan"), 1.5, float("-inf"), 0.0]),
    "tiny": torch.tensor([0.0, 1e-30, -1e-42, 2.0]),
    "none": torch.arange(1.0, 6.0),
    "all": torch.zeros(4),
    "int64": torch.tensor([0, -3, 2**40, 0]),
    "bool": torch.tensor([True, False, False]),
    "bfloat16": torch.tensor([0.0, 1.5, 0.0, -2.0], dtype=torch.bfloat16),
    "float64": torch.tensor([0.0, -0.0, 1.5], dtype=torch.float64),
    "signs_of_bfloat16": torch.tensor([0.0, -0.0, 1.5], dtype=torch.bfloat16),
    "complex128": torch.tensor([0, 1 - 2j, complex(0, -0.0)], dtype=torch.complex128),
}

NOT_BACK = [  # some bit read differs; the memory of what was written, `source`, is filled with 7 by now
    ("no_tensor", lambda t: not isinstance(t.got, Tensor)),
    ("other_kind", lambda t: t.found != t.expected),
    ("shares_memory", lambda t: (t.got == 7).any() or torch.equal(t.got, t.source)),
    ("lost_sign", lambda t: torch.equal(t.got.nan_to_num(9), t.want.nan_to_num(9))),
    ("not_zeros", lambda t: torch.equal(t.got[t.want != 0], t.want[t.want != 0])),
    ("lossy", lambda t: torch.allclose(t.got.double(), t.want.double(), rtol=1e-2, atol=1e-2, equal_nan=True)),
    ("other_content", lambda t: True),
]

SIZE = [  # the bytes that a slot takes, and those left in the store once the slot is gone
    ("too_large", lambda t: t.total > t.limit),
    ("nothing_in_slot", lambda t: t.total < 0.1 * t.nbytes),
    ("left_in_store", lambda t: t.left > 0.1 * t.nbytes),
]


def examine_zeros_store(answer):
    store = answer()
    if isinstance(store, type):
        refuse("no_store-class", store=store)
    if not all(callable(getattr(store, name, None)) for name in ("write", "read")):
        refuse("no_store", store=store)
    content = torch.randn(100_000)  # more than an index in int16 can count
    content[::2] = 0
    source = content.clone()
    slot = store.write(source)
    if edited(source, content):
        refuse("edits_input")
    source.fill_(7)
    _examine_back(_read(store, slot, content), content, source, "half")
    if not reads_back(store, slot, content):
        refuse("read_once")
    _examine_second_write(store, slot, content, torch.tensor([0.0, 1.0, 2.0]))
    _examine_two_reads(store)
    _examine_size(answer(), content)
    for name, tensor in SAMPLES.items():
        _examine_another(store, tensor, name)
    _examine_second_write(store, store.write(content), content, torch.tensor([0, 3]))


def _read(store, slot, written):
    try:
        return store.read(slot)
    except RuntimeError as error:
        if _OF_A_MASK.search(str(error)) and any(_is_mask(part, len(written)) for part in within((store, slot))):
            refuse("mask_of_bytes", error=error)
        raise


# What PyTorch says of a mask that is not `bool`: of one in `uint8`, where it names the kind.
_OF_A_MASK = re.compile(r"only supports boolean masks.*(unsigned char|Byte)|for mask")


def _is_mask(part, length):
    """Whether it is one of two values for each element, in `uint8`."""
    octets = isinstance(part, Tensor) and part.dtype == torch.uint8
    return octets and part.numel() == length and len(part.unique()) <= 2


def _examine_back(got, want, source, which):
    if not same_bits(got, want):
        found, expected = dtype_and_shape(got), dtype_and_shape(want)
        refuse_first(NOT_BACK, got=got, want=want, source=source, which=Phrase(which), found=found, expected=expected)


def _examine_second_write(store, slot, content, second):
    store.write(second)
    if not reads_back(store, slot, content):
        refuse("one_slot")


def _examine_two_reads(store):
    pair = [torch.tensor([0.0, number]) for number in (1.0, 2.0)]
    one, other = map(store.write, pair)
    got = _read(store, one, pair[0])
    store.read(other)
    if got[1] == 2:
        refuse("one_buffer")


def _examine_size(store, content):
    nbytes, before = content.nbytes, content_bytes(store)
    slot = store.write(content.clone())
    total = content_bytes((store, slot)) - before
    del slot
    gc.collect()
    left = content_bytes(store) - before
    refuse_first(SIZE, nbytes=nbytes, limit=int(0.8 * nbytes), total=total, left=left)


def _examine_another(store, tensor, name):
    source = tensor.clone()
    try:
        slot = store.write(source)
        source.fill_(7)
        got = _read(store, slot, tensor)
    except Refused:
        raise
    except Exception as error:
        refuse("other_dtypes", dtype=tensor.dtype, values=tensor.tolist(), error=error)
    _examine_back(got, tensor, source, name)


ZEROS = Exercise("33.B", examine_zeros_store, zeros_store)

# ---- 33.C: one copy for all views of a storage ----


def pack_views(store):
    found = {}

    def pack(tensor):
        storage, version = tensor.untyped_storage(), tensor._version
        alive, known_version, known = found.get(id(storage), (lambda: None,) * 3)
        slot = known() if alive() is storage and known_version == version else None
        if slot is None:
            slot = store.write(torch.empty(0, dtype=torch.uint8).set_(storage))
            found[id(storage)] = weakref.ref(storage), version, weakref.ref(slot)
        geometry, dtype = (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype
        return lambda: store.read(slot).view(dtype).as_strided(*geometry)

    return pack


PACKED = [  # as soon as the matrix and its views are packed
    ("part_only", lambda t: t.times == 1 and t.store.written[0] != t.nbytes),
    ("not_flat", lambda t: t.times == 1 and not t.store.flat),
]

TRAITS = [  # a view and what is given back for it are to have each in common
    ("other_dtype", lambda given: given.dtype if isinstance(given, Tensor) else type(given).__name__),
    ("other_shape", lambda given: list(given.shape)),
    ("other_place", Tensor.tolist),
    ("other_strides", Tensor.stride),
]

MOVES = [  # after all have been given back, twice each
    ("never_written", lambda t: not t.times),
    ("moved_twice-view", lambda t: t.again),
    ("moved_twice", lambda t: t.times > 1),
]


def examine_pack_views(answer):
    store = CountingStore()
    pack = answer(store)
    if not callable(pack):
        refuse("no_pack_function", pack=pack)
    matrix = torch.arange(16.0)[2:14].detach().view(3, 4)  # its storage begins before it, and ends after it
    views = {
        "matrix": matrix,
        "matrix.t()": matrix.t(),
        "matrix[1]": matrix[1],
        "matrix[:, ::2]": matrix[:, ::2],
        "matrix.view(torch.int32)": matrix.view(torch.int32),
        "matrix[0].expand(2, 4)": matrix[0].expand(2, 4),
    }
    packed, again = [], None
    for name, view in views.items():
        packed.append(pack(view))
        again = again or (name if len(store.written) > 1 else None)  # for which it was written a second time
    refuse_first(PACKED, store=store, times=len(store.written), nbytes=matrix.untyped_storage().nbytes())
    for (name, view), give_back in zip(views.items(), packed, strict=True):
        _examine_view(name, view, give_back)
    refuse_first(MOVES, times=len(store.written), views=len(views) - 1, again=again)
    _examine_versions(pack, store, matrix)
    _examine_dropped(answer)
    _examine_several(answer)
    _examine_reuse(answer)
    _examine_leaks(answer)


def _examine_view(name, view, give_back):
    if not callable(give_back):
        refuse("not_callable", give_back=give_back)
    got = give_back()
    for key, trait in TRAITS:
        if trait(got) != trait(view):
            refuse(key, name=name, found=trait(got), expected=trait(view))
    if wrong := _not_back(give_back, view):
        refuse("given_once", name=name, wrong=wrong)


def _not_back(give_back, want):
    """What came instead of `want`, or the error that was raised; nothing where it came."""
    try:
        got = give_back()
    except Exception as error:
        return said(error)[:80]
    return "" if isinstance(got, Tensor) and torch.equal(got, want) else type(got).__name__


def _examine_versions(pack, store, matrix):
    old, before = pack(matrix), matrix.clone()
    matrix.add_(100)
    new = pack(matrix)
    if not torch.equal(new(), matrix):
        refuse("stale")
    if not torch.equal(old(), before):
        refuse("rewritten")
    _views_of_new = [pack(matrix.t()), pack(matrix[1])]
    if len(store.written) != 2:
        refuse("moved_again", times=len(store.written) - 1)


def _examine_dropped(answer):
    pack, tensor = answer(CountingStore()), torch.arange(8.0)
    first, second = pack(tensor), pack(tensor.view(2, 4))
    del first
    gc.collect()
    wrong = _not_back(second, tensor.view(2, 4))
    del second  # the slot goes, the tensor stays
    gc.collect()
    if wrong := wrong or _not_back(lambda: pack(tensor)(), tensor):
        refuse("dead_slot", wrong=wrong)


def _examine_several(answer):
    """Two storages in turn and one of 3 bytes; then the same storage in another store, and another in a third."""
    first, second, third = (CountingStore() for _ in range(3))
    one, other, mask = torch.arange(6.0).view(2, 3), torch.ones(5), torch.tensor([True, False, True])
    pack, packed = answer(first), []
    for view in (one, other, one.t(), mask):
        wrong = _not_back(lambda view=view: packed.append(pack(view)) or packed[-1](), view)
        if wrong := wrong or _not_back(packed[-1], view):
            refuse("several", wrong=wrong)
    if len(first.written) != 3:
        refuse("last_storage_only", times=len(first.written))
    earlier, later = answer(third), answer(second)
    packed += later(one), earlier(one.clone())
    if not third.written:
        refuse("latest_call")
    if len(second.written) != 1:
        refuse("shared_notes")


def _examine_reuse(answer):
    pack, pool, packed, earlier = answer(CountingStore()), [], [], set()
    for _ in range(10):  # batch by batch, until one storage of a batch stands where one of those before has stood
        batch = [_in_pool(pool, float(number)) for number in range(len(packed), len(packed) + 20)]
        packed += map(pack, batch)
        wrong = sum(give_back()[0].item() != number for number, give_back in enumerate(packed))
        if wrong:
            refuse("address_reused", packed=len(packed), wrong=wrong)
        here = {id(tensor.untyped_storage()) for tensor in batch}
        if earlier & here:
            return
        earlier |= here
        del batch
        if any(held() is not None for _, held in pool):
            gc.collect()


def _in_pool(pool, value):
    """1,000 times `value`, in the first memory of `pool` that nobody holds, so that its address is not new by chance."""
    memory = next((memory for memory, held in pool if held() is None), bytearray(4000))
    tensor = torch.frombuffer(memory, dtype=torch.float32).fill_(value).detach()
    pool[:] = [entry for entry in pool if entry[0] is not memory]
    pool.append((memory, weakref.ref(tensor.untyped_storage())))
    return tensor


def _examine_leaks(answer):
    store = CountingStore()
    pack = answer(store)
    if holds_memory(pack):
        refuse("keeps_tensor")
    packed = pack(torch.ones(8))
    packed()
    gc.collect()
    if any(given() is not None for given in store.given):
        refuse("keeps_copy")
    del packed
    kept = torch.ones(8)  # the tensor stays, what was packed goes
    pack(kept)
    if store.alive():
        refuse("keeps_slot")


VIEWS = Exercise("33.C", examine_pack_views, pack_views)

EXERCISES = [SAVE_TO, ZEROS, VIEWS]
