"""Checks of notebook 33: offloading to CPU memory."""

import array
import gc
import io
import math
import re
import sys
import weakref
from decimal import Decimal
from numbers import Real

import torch
from torch import Tensor, nn

from hooklab._support.packing import outer_hooks
from hooklab.course.check import Exercise, Refused, refuse, within
from hooklab.saved import Offload

# ---- 33.A: bytes over bandwidth ----


def step_seconds(forward, backward, nbytes, bandwidth, overlap):
    one_way = nbytes / (bandwidth * 1e9)
    if overlap:
        return max(forward, one_way) + max(backward, one_way)
    return forward + backward + 2 * one_way


# Forward 1 s, backward 2 s; a copy of 1.5 s is hidden behind the one and not behind the other.
FORWARD, BACKWARD, NBYTES, BANDWIDTH = 1.0, 2.0, 60e9, 40.0


def examine_step_seconds(answer):
    serial = _number(answer(FORWARD, BACKWARD, NBYTES, BANDWIDTH, False))
    _examine_serial(serial)
    overlapped = _number(answer(FORWARD, BACKWARD, NBYTES, BANDWIDTH, True))
    _examine_overlapped(overlapped)
    for arguments in [(0.085, 0.17, 45.4e9, 55.0), (0.5, 0.25, 10e9, 25.0), (0.1, 0.2, 0, 10.0)]:
        for overlap in (False, True):
            got, want = _number(answer(*arguments, overlap)), step_seconds(*arguments, overlap)
            if not math.isclose(got, want, rel_tol=1e-6):
                refuse("one_example", forward=FORWARD, backward=BACKWARD, overlap=(*arguments, overlap), got=got)


def _number(got):
    # A tensor or an array without dimensions is one number, of the kind that `item()` gives.
    number = got.item() if getattr(got, "shape", None) == () and not getattr(got, "is_meta", False) else got
    if isinstance(number, bool) or not isinstance(number, Real | Decimal):
        refuse("no_number", got=got)
    return float(number)


def _examine_serial(got):
    moves = NBYTES / (BANDWIDTH * 1e9)  # 1.5 s
    example = f"`step_seconds({FORWARD}, {BACKWARD}, 60e9, {BANDWIDTH}, False)`"
    if math.isclose(got, FORWARD + BACKWARD + 2 * moves, rel_tol=1e-6):
        return
    if math.isclose(got, FORWARD + BACKWARD + moves, rel_tol=1e-6):
        refuse("one_way", example=example, got=got)
    if math.isclose(got, FORWARD + BACKWARD + 16 * moves, rel_tol=1e-6):
        refuse("bits", example=example, got=got)
    if math.isclose(got, FORWARD + BACKWARD + 2 * NBYTES / (BANDWIDTH * 2**30), rel_tol=1e-6):
        refuse("gibibytes", example=example, got=got)
    if got > 1e6:
        refuse("no_unit", example=example, got=got)
    if math.isclose(got, 2 * max(FORWARD + BACKWARD, moves), rel_tol=1e-6) or got < FORWARD + BACKWARD + moves:
        refuse("hidden_anyway", example=example, got=got, moves=FORWARD + BACKWARD + moves)
    refuse("wrong_serial", example=example, got=got, forward=FORWARD + BACKWARD, bandwidth=BANDWIDTH, moves=moves)


def _examine_overlapped(got):
    moves = NBYTES / (BANDWIDTH * 1e9)
    example = f"`step_seconds({FORWARD}, {BACKWARD}, 60e9, {BANDWIDTH}, True)`"
    if math.isclose(got, max(FORWARD, moves) + max(BACKWARD, moves), rel_tol=1e-6):
        return
    if math.isclose(got, FORWARD + BACKWARD + 2 * moves, rel_tol=1e-6):
        refuse("overlap_ignored", example=example, got=got)
    if math.isclose(got, max(FORWARD + BACKWARD, 2 * moves), rel_tol=1e-6):
        refuse("whole_step", example=example, got=got)
    if got < FORWARD + BACKWARD:
        refuse("too_good", example=example, got=got, forward=FORWARD + BACKWARD)
    refuse("wrong_overlap", example=example, got=got)


SECONDS = Exercise("33.A", examine_step_seconds, step_seconds)

# ---- 33.B: SaveToCpu on Offload ----


def save_to(module, store):
    class SaveTo(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            with Offload(self.module, to=store, min_bytes=0):
                return self.module(*args, **kwargs)

    return SaveTo()


class _Counting:
    """A store that keeps account; it holds the slots by weak reference only."""

    class Slot:
        def __init__(self, tensor):
            self.content = tensor.detach().clone()

    def __init__(self):
        self.written, self.slots, self.given, self.flat = [], [], [], True

    def write(self, tensor):
        self.flat = self.flat and tensor.dim() == 1
        slot = self.Slot(tensor)
        self.written.append(tensor.numel() * tensor.element_size())
        self.slots.append(weakref.ref(slot))
        return slot

    def read(self, slot):
        content = slot.content.clone()
        self.given.append(weakref.ref(content.untyped_storage()))
        return content

    @property
    def alive(self):
        gc.collect()
        return sum(slot() is not None for slot in self.slots)


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


def _inner():
    torch.manual_seed(0)
    return _Inner(), torch.randn(3, 5, requires_grad=True)


def _wrapped(answer, store):
    module, x = _inner()
    wrapped = answer(module, store)
    if not isinstance(wrapped, nn.Module):
        refuse("no_module", wrapped=wrapped)
    if wrapped is module:
        refuse("same_module")
    return module, x, wrapped


def examine_save_to(answer):
    before = outer_hooks()
    try:
        _examine_save_to(answer)
    finally:
        _close_hooks(before)  # an answer may leave its context open


def _examine_save_to(answer):
    plain, plain_x = _inner()
    want, _ = plain(plain_x, factor=2.0)
    want.square().sum().backward()

    store = _Counting()
    module, x, wrapped = _wrapped(answer, store)
    fired = []
    module.register_forward_hook(lambda *args: fired.append(1))
    before = len(store.written)
    result = wrapped(x, factor=2.0)
    written = len(store.written)
    _examine_result(result, want)
    torch.ones(2, requires_grad=True).exp().sum()
    _examine_outside(before + len(store.written) - written)
    result[0].square().sum().backward()
    _examine_save_to_gradients(plain, plain_x, module, wrapped, x)
    _examine_written(store)
    del result
    _examine_slots(store)
    if len(fired) > 1:
        refuse("ran_twice", count_fired=len(fired))
    if not fired:
        refuse("skipped_hooks")
    _examine_again(module, x, wrapped, store)
    _examine_two_inputs(answer)
    _examine_two_calls(answer)
    _examine_failing(answer)


def _examine_two_calls(answer):
    store, other = _Counting(), _Counting()
    first = answer(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), store)
    answer(nn.Linear(2, 2), other)
    first(torch.ones(1, 2))
    if other.written or not store.written:
        refuse("latest_call")


def _examine_two_inputs(answer):
    bilinear = nn.Bilinear(2, 3, 4)
    try:
        answer(bilinear, _Counting())(torch.ones(1, 2), torch.ones(1, 3))
    except TypeError as error:
        refuse("one_input", error=error)


def _examine_result(result, want):
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        refuse("other_result", result=result)
    if result[1] != 2.0 or not torch.equal(result[0], want):
        refuse("other_values")
    if not result[0].requires_grad:
        refuse("no_graph")


def _examine_slots(store):
    if alive := store.alive:
        refuse("keeps_slots", alive=alive)


def _examine_again(module, x, wrapped, store):
    first = sum(store.written)
    _result = wrapped(x, factor=2.0)
    if (second := sum(store.written) - first) != first:
        refuse("first_call_only", first=first, second=second)
    both = len(store.written)
    _result = module(x, factor=2.0)
    if len(store.written) > both:
        refuse("module_changed")


def _examine_outside(more):
    if more:
        refuse("left_open")


def _examine_written(store):
    wanted = _Counting()
    module, x = _inner()
    with Offload(module, to=wanted, min_bytes=0):
        _result = module(x, factor=2.0)  # while it is held, so is the graph
    got, want = sum(store.written), sum(wanted.written)
    if got == want:
        return
    if not got:
        refuse("nothing_moved")
    if got > want:
        refuse("moved_own", got=got, got2=got - want)
    refuse("too_few", got=got, want=want)


def _examine_save_to_gradients(plain, plain_x, module, wrapped, x):
    got = [param.grad for param in wrapped.parameters()]
    want = [param.grad for param in plain.parameters()]
    if len(got) != len(want):
        refuse("hidden_parameters", count_got=len(got), count_want=len(want))
    if {id(param) for param in wrapped.parameters()} != {id(param) for param in module.parameters()}:
        refuse("copied_parameters")
    pairs = [(x.grad, plain_x.grad), *zip(got, want, strict=True)]
    if not all(one is not None and torch.equal(one, other) for one, other in pairs):
        refuse("other_gradients")


def _examine_failing(answer):
    store = _Counting()
    _, x, wrapped = _wrapped(answer, store)
    try:
        wrapped(x, fail=True)
    except ValueError:
        pass
    else:
        refuse("hid_error")
    written = len(store.written)
    torch.ones(2, requires_grad=True).exp().sum()
    if len(store.written) > written:
        refuse("open_after_error")


def _close_hooks(before):
    """Take off the saved-tensor hooks that an answer has left open, down to those of `before`."""
    while outer_hooks() not in (before, None):
        torch._C._autograd._pop_saved_tensors_default_hooks()


SAVE_TO = Exercise("33.B", examine_save_to, save_to)

# ---- 33.C: a store that leaves zeros out ----


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


def examine_zeros_store(answer):
    store = answer()
    if isinstance(store, type) or not all(callable(getattr(store, name, None)) for name in ("write", "read")):
        zh, en = f"`{type(store).__name__}`。", f"`{type(store).__name__}`."
        if isinstance(store, type):
            zh = f"类 `{store.__name__}` 本身，是不是少了一对括号？"
            en = f"the class `{store.__name__}` itself: is a pair of parentheses missing?"
        refuse(
            "no_store",
            zh=f"`zeros_store()` 应当返回一个有 `write` 和 `read` 的对象，得到的是{zh}",
            en=f"`zeros_store()` should return an object with `write` and `read`; found {en}",
        )
    torch.manual_seed(0)
    content = torch.randn(100_000)  # more than an index in int16 can count
    content[::2] = 0
    source = content.clone()
    slot = store.write(source)
    if source.untyped_storage().nbytes() != content.nbytes or not torch.equal(source, content):
        refuse("edits_input")
    source.fill_(7)  # what the memory is used for next
    _examine_back(_read(store, slot, content), content, "half", source)
    _examine_second_read(store, slot, content)
    _examine_two(store, slot, content, torch.tensor([0.0, 1.0, 2.0]))
    del slot
    pair = [torch.tensor([0.0, number]) for number in (1.0, 2.0)]
    one, other = map(store.write, pair)
    got = _read(store, one, pair[0])
    store.read(other)
    if got[1] == 2:
        refuse("one_buffer")
    del one, other, got
    _examine_size(answer(), content)
    _examine_others(store)
    _examine_two(store, store.write(content), content, torch.tensor([0, 3]))


# What PyTorch says of a mask that is not `bool`: of one in `uint8`, where it names the kind.
_OF_A_MASK = re.compile(r"only supports boolean masks.*(unsigned char|Byte)|for mask")


def _read(store, slot, written):
    try:
        return store.read(slot)
    except RuntimeError as error:
        if _OF_A_MASK.search(str(error)) and _has_mask_of_bytes((store, slot), written):
            refuse("mask_of_bytes", error=error)
        raise


def _has_mask_of_bytes(held, written):
    """Whether one of two values for each element is among what is held, in `uint8`."""
    return any(
        isinstance(part, Tensor)
        and part.dtype == torch.uint8
        and part.numel() == len(written)
        and len(part.unique()) <= 2
        for part in within(held)
    )


def _still_reads(store, slot, content):
    try:
        return torch.equal(store.read(slot), content)
    except Exception:
        return False


def _examine_second_read(store, slot, content):
    if not _still_reads(store, slot, content):
        refuse("read_once")


def _examine_back(got, want, which, source):
    words = {
        "half": ("一半是 0 的张量", "a tensor half of whose elements are 0"),
        "signs": ("含有 `-0.0` 和 `nan` 的张量", "a tensor with `-0.0` and `nan` in it"),
        "float64": ("含有 `-0.0` 的 `torch.float64` 张量", "a tensor of `torch.float64` with `-0.0` in it"),
        "signs of bfloat16": (
            "含有 `-0.0` 的 `torch.bfloat16` 张量",
            "a tensor of `torch.bfloat16` with `-0.0` in it",
        ),
        "tiny": ("含有 `1e-30` 的张量", "a tensor with `1e-30` in it"),
        "none": ("一个 0 也没有的张量", "a tensor without any 0"),
        "all": ("全是 0 的张量", "a tensor of nothing but 0"),
        "int64": ("`torch.int64` 的张量", "a tensor of `torch.int64`"),
        "bool": ("`torch.bool` 的张量", "a tensor of `torch.bool`"),
        "bfloat16": ("`torch.bfloat16` 的张量", "a tensor of `torch.bfloat16`"),
        "complex128": ("`torch.complex128` 的张量", "a tensor of `torch.complex128`"),
    }[which]
    if not isinstance(got, Tensor):
        refuse("no_tensor", got=got)
    if got.dtype != want.dtype or got.shape != want.shape:
        refuse(
            "other_kind",
            zh=f"写入{words[0]}，应当读回 `{want.dtype} {list(want.shape)}`，得到的是 `{got.dtype} {list(got.shape)}`。",
            en=f"For {words[1]} `{want.dtype} {list(want.shape)}` should come back; found `{got.dtype} {list(got.shape)}`.",
        )
    if torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8)):
        return
    if (got == 7).any() or torch.equal(got, source):
        refuse("shares_memory")
    if torch.equal(got.nan_to_num(9), want.nan_to_num(9)):
        refuse(
            "lost_sign",
            zh=f"写入{words[0]}，读回来的数都“相等”，位却不同：看看 `-0.0` 的符号还在不在。",
            en=f"For {words[1]} what comes back compares equal, but its bits differ: is the sign of `-0.0` still there?",
        )
    if torch.equal(got[want != 0], want[want != 0]):
        refuse(
            "not_zeros",
            zh=f"写入{words[0]}，不是 0 的元素都对，原来是 0 的地方却成了别的值。",
            en=f"For {words[1]} the elements that are not 0 come back right; where there was a 0 there is something else.",
        )
    if torch.allclose(got.double(), want.double(), rtol=1e-2, atol=1e-2, equal_nan=True):
        refuse(
            "lossy",
            zh=f"写入{words[0]}，读回来的只是近似：每一位都要相同。",
            en=f"For {words[1]} what comes back is an approximation; every bit should be the same.",
        )
    refuse(
        "other_content",
        zh=f"写入{words[0]}，读回来的内容不对。",
        en=f"For {words[1]} what comes back has another content.",
    )


def _examine_two(store, slot, content, second):
    store.write(second)
    if not _still_reads(store, slot, content):
        refuse("one_slot")


def _examine_size(store, content):
    nbytes, before = content.nbytes, sum(_contents(store).values())
    slot = store.write(content.clone())
    total = sum(_contents((store, slot)).values()) - before
    del slot
    gc.collect()
    left = sum(_contents(store).values()) - before
    if total > 0.8 * nbytes:
        refuse("too_large", nbytes=nbytes, total=total, nbytes2=int(0.8 * nbytes))
    if total < 0.1 * nbytes:
        refuse("nothing_in_slot", total=total)
    if left > 0.1 * nbytes:
        refuse("left_in_store", left=left)


def _contents(slot):
    """The bytes of everything in a slot that holds content, by id: memory that is shared counts once."""
    sizes = {}
    for part in within(slot):
        if isinstance(part, Tensor) and part.layout != torch.strided:
            part = part.coalesce()
            sizes |= _contents((part.indices(), part.values()))
        elif isinstance(part, Tensor):
            storage = part.untyped_storage()
            sizes[id(storage)] = storage.nbytes()
        elif isinstance(part, bytes | bytearray):
            sizes[id(part)] = len(part)
        elif isinstance(part, array.array | io.BytesIO | str):
            sizes[id(part)] = sys.getsizeof(part)
        elif isinstance(part, int | float):
            sizes[id(part)] = 8
        elif isinstance(part, list | tuple | set | frozenset | dict):
            sizes[id(part)] = sys.getsizeof(part)  # the references: 8 bytes an item
        elif isinstance(nbytes := getattr(part, "nbytes", None), int):  # numpy's arrays
            sizes[id(part)] = nbytes
    return sizes


def _examine_others(store):
    others = {
        "signs": torch.tensor([0.0, -0.0, float("nan"), 1.5, float("-inf"), 0.0]),
        "tiny": torch.tensor([0.0, 1e-30, -1e-42, 2.0]),
        "none": torch.arange(1.0, 6.0),
        "all": torch.zeros(4),
        "int64": torch.tensor([0, -3, 2**40, 0]),
        "bool": torch.tensor([True, False, False]),
        "bfloat16": torch.tensor([0.0, 1.5, 0.0, -2.0], dtype=torch.bfloat16),
        "float64": torch.tensor([0.0, -0.0, 1.5], dtype=torch.float64),
        "signs of bfloat16": torch.tensor([0.0, -0.0, 1.5], dtype=torch.bfloat16),
        "complex128": torch.tensor([0, 1 - 2j, complex(0, -0.0)], dtype=torch.complex128),
    }
    for name, tensor in others.items():
        source = tensor.clone()
        try:
            slot = store.write(source)
            source.fill_(7)
            got = _read(store, slot, tensor)
        except Refused:
            raise
        except Exception as error:
            refuse("other_dtypes", tensor=tensor, tensor2=tensor.tolist(), error=error)
        _examine_back(got, tensor, name, source)


ZEROS = Exercise("33.C", examine_zeros_store, zeros_store)  # fmt: skip

# ---- 33.D: one copy for all views of a storage ----


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


def examine_pack_views(answer):
    store = _Counting()
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
    packed, written = [], {}
    for name, view in views.items():
        packed.append(pack(view))
        written.setdefault(len(store.written), name)  # which view made it so many
    want = [view.clone() for view in views.values()]
    nbytes = matrix.untyped_storage().nbytes()
    _examine_written_whole(store, nbytes)
    for (name, view), values, give_back in zip(views.items(), want, packed, strict=True):
        _examine_view(name, give_back, view, values)
        if wrong := _not_back(give_back, values):
            refuse("given_once", name=name, wrong=wrong)
    _examine_moves(store, len(views), written)
    _examine_version(pack, store, matrix)
    _examine_dropped(answer)
    _examine_several(answer)
    _examine_reuse(answer)
    _examine_leaks(answer)


def _examine_written_whole(store, nbytes):
    if len(store.written) == 1 and store.written[0] != nbytes:
        refuse("part_only", nbytes=nbytes, store_written=store.written[0])
    if len(store.written) == 1 and not store.flat:
        refuse("not_flat")


def _examine_dropped(answer):
    pack = answer(_Counting())
    tensor = torch.arange(8.0)
    first, second = pack(tensor), pack(tensor.view(2, 4))
    del first
    gc.collect()
    wrong = _not_back(lambda: second(), tensor.view(2, 4))
    second = None  # the slot goes, the tensor stays
    gc.collect()
    if wrong := wrong or _not_back(lambda: pack(tensor)(), tensor):
        refuse("dead_slot", wrong=wrong)


def _examine_several(answer):
    """Two storages in turn, two stores, a storage of 3 bytes; each given back twice."""
    first, second = _Counting(), _Counting()
    one, other, mask = torch.arange(6.0).view(2, 3), torch.ones(5), torch.tensor([True, False, True])
    pack = answer(first)
    views = (one, other, one.t(), mask)
    wrong, packed = "", []
    for view in views:
        wrong = wrong or _not_back(lambda view=view: packed.append(pack(view)) or packed[-1](), view)
        wrong = wrong or _not_back(lambda: packed[-1](), view)
    if wrong:
        refuse("several", wrong=wrong)
    if len(first.written) != 3:
        refuse("last_storage_only", count_first_written=len(first.written))
    third = _Counting()
    earlier = answer(third)
    again = answer(second)(one), earlier(one.clone())
    if not third.written:
        refuse("latest_call")
    if len(second.written) != 1:
        refuse("shared_notes")
    del again


def _not_back(run, want):
    try:
        got = run()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return "" if isinstance(got, Tensor) and torch.equal(got, want) else type(got).__name__


def _examine_view(name, give_back, view, values):
    if not callable(give_back):
        refuse("not_callable", give_back=give_back)
    got = give_back()
    if not isinstance(got, Tensor) or got.dtype != view.dtype:
        found = f"{got.dtype}" if isinstance(got, Tensor) else type(got).__name__
        refuse("other_dtype", name=name, view=view, found=found)
    if got.shape != view.shape:
        refuse("other_shape", name=name, view_shape=list(view.shape), got_shape=list(got.shape))
    if not torch.equal(got, values):
        refuse("other_place", name=name)
    if got.stride() != view.stride():
        refuse("other_strides", name=name, view=view.stride(), got=got.stride())


def _examine_moves(store, views, written):
    if not store.written:
        refuse("never_written")
    if len(store.written) > 1:
        later = next((name for count, name in written.items() if count > 1), None)
        zh = f"；多出来的第一次是为了 `{later}`" if later else ""
        en = f" The first too many was for `{later}`." if later else ""
        refuse(
            "moved_twice",
            zh=f"一个矩阵和它的 {views - 1} 个视图，`store.write` 调用了 {len(store.written)} 次，应当是 1 次{zh}。",
            en=f"For a matrix and {views - 1} views of it `store.write` was called {len(store.written)} times; once is wanted.{en}",
        )


def _examine_version(pack, store, matrix):
    old, before = pack(matrix), matrix.clone()
    matrix.add_(100)
    new = pack(matrix)
    if not torch.equal(new(), matrix):
        refuse("stale")
    if not torch.equal(old(), before):
        refuse("rewritten")
    _views_of_new = [pack(matrix.t()), pack(matrix[1])]
    if len(store.written) != 2:
        refuse("moved_again", len=len(store.written) - 1)


def _examine_reuse(answer):
    pack, pool, packed, earlier = answer(_Counting()), [], [], set()
    for _ in range(10):  # batch by batch, until one storage of a batch stands where one of those before has stood
        batch = [_in_pool(pool, float(number)) for number in range(len(packed), len(packed) + 20)]
        packed += map(pack, batch)
        wrong = [number for number, give_back in enumerate(packed) if give_back()[0] != number]
        if wrong:
            refuse("address_reused", count_packed=len(packed), count_wrong=len(wrong))
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
    store = _Counting()
    pack = answer(store)
    tensor = torch.ones(8)
    storage, packed = weakref.ref(tensor.untyped_storage()), pack(tensor)
    del tensor
    gc.collect()
    if storage() is not None:
        refuse("keeps_tensor")
    packed()
    gc.collect()
    if any(given() is not None for given in store.given):
        refuse("keeps_copy")
    del packed
    kept = torch.ones(8)  # the tensor stays, what was packed goes
    packed = pack(kept)
    del packed
    if store.alive:
        refuse("keeps_slot")


VIEWS = Exercise("33.D", examine_pack_views, pack_views)

EXERCISES = [SECONDS, SAVE_TO, ZEROS, VIEWS]
