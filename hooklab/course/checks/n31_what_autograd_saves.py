"""Checks of notebook 31: what autograd saves."""

import weakref
from collections import Counter, OrderedDict
from contextlib import suppress
from functools import wraps
from operator import index
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from hooklab._support.packing import hold, outer_hooks, unhold
from hooklab.census import hooks_on
from hooklab.course.check import Exercise, expect_like, refuse, refuse_from_before
from hooklab.saved import saved_tensors

# ---- 31.A: count the bytes by hand ----


def held_bytes(function, x):
    storages = []

    def pack(tensor):
        storages.append(tensor.untyped_storage())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda packed: packed):
        function(x)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    sizes.pop(x.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _cubes(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x * x
    return x


class _Exp(torch.autograd.Function):
    """`exp` into the first memory of `pool` that nobody holds: addresses are reused for certain, not by chance."""

    @staticmethod
    def forward(ctx, x, pool):
        memory = next((memory for memory, held in pool if held() is None), bytearray(x.nbytes))
        result = torch.frombuffer(memory, dtype=x.dtype)
        result[:] = x.exp()
        pool[:] = [entry for entry in pool if entry[0] is not memory]
        pool.append((memory, weakref.ref(result.untyped_storage())))
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def _exponentials(x: Tensor) -> Tensor:
    pool = []
    return sum(_Exp.apply(x, pool).sum() for _ in range(6))


def _halves(x: Tensor) -> Tensor:
    doubled = x + x
    return doubled[:100].sin() + doubled[100:200].cos()


# What is run, the bytes of x, the bytes that are held, in words.
CASES = (
    (_cubes, 4_000, 8_000, "x = x * x, 3 times"),
    (lambda x: (x + x)[:10].sin(), 4_000, 4_000, "(x + x)[:10].sin()"),
    (_halves, 4_000, 4_000, "sin of one slice of x + x, cos of another"),
    (lambda x: x + x + 1, 4_000, 0, "x + x + 1"),
    (lambda x: x[100:200].sin(), 4_000, 0, "x[100:200].sin()"),
)

# Held too: a result, a mask, and what is no leaf of yours. What is run, the bytes that are held, in words.
OTHERS = (
    (torch.exp, 4_000, "x.exp()"),
    (lambda x: x * (x > 0), 1_000, "x * (x > 0)"),
    (lambda x: x * torch.ones(1000, requires_grad=True), 4_000, "x * torch.ones(1000, requires_grad=True)"),
)


def examine_held_bytes(answer):
    _examine_state(answer)
    for function, _, want, words in CASES:
        got = _count_once(answer, function)
        if got != want:
            _explain_count(function, words, got, want)
    doubles = _count_once(answer, _cubes, torch.float64)
    if doubles != 16_000:
        refuse("float32_only", doubles=doubles)
    for function, want, words in OTHERS:
        if (got := _count_once(answer, function)) > want:
            refuse("by_dtype_of_x", words=words, want=want, got=got)
        if got != want:
            refuse("left_out", words=words, want=want, got=got)
    row = torch.ones(10, 100)[5].requires_grad_()  # its address is not that of its memory
    if (got := _count_once(answer, torch.sin, x=row)) != 0:
        refuse("address_of_x", got=got)
    got = _count_once(answer, _exponentials)
    if got == 0:
        refuse("own_operation")
    if got != 24_000:
        refuse("address_reused", got=got)


def _count_once(answer, function, dtype=torch.float32, x=None):
    calls = []

    def counted(x):
        calls.append(x)
        return function(x)

    x = torch.linspace(-1, 1, 1000, dtype=dtype).requires_grad_() if x is None else x
    outer = outer_hooks()
    got = answer(counted, x)
    if outer_hooks() != outer:
        while outer_hooks() not in (None, outer):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        refuse("left_open")
    if len(calls) != 1:
        refuse("not_once", count_calls=len(calls))
    if x.grad is not None:
        refuse("filled_grad")
    if got is None:
        refuse("returned_nothing")
    # A tensor or an array without dimensions is one number, of the kind that `item()` gives.
    number = got.item() if getattr(got, "shape", None) == () and not getattr(got, "is_meta", False) else got
    try:
        whole = None if isinstance(number, bool | Tensor) else index(number)
    except TypeError:
        whole = None
    if whole is None:
        refuse("not_a_number", got=got)
    return whole


def _explain_count(function, words, got, want):
    x = torch.linspace(-1, 1, 1000).requires_grad_()
    tensors = []
    with saved_tensors_hooks(lambda t: tensors.append(t.detach()) or t.detach(), lambda packed: packed):
        function(x)
    every = sum(tensor.nbytes for tensor in tensors)
    by_tensor = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    seen_zh, seen_en = (
        f"`{words}`：应当是 {want:,}，得到的是 {got:,}。",
        f"`{words}`: {want:,} is right; found {got:,}. ",
    )
    if got == sum(storages.values()) and want == 0:
        refuse(
            "counted_view_of_x",
            zh=seen_zh + "存下的切片，正是 `x` 的切片：它不是 `x` 这个对象，起始地址也不同，内存却是 `x` 的。",
            en=seen_en
            + "The slice that is saved is one of `x`: not the object `x`, nor at its address, but in its memory.",
        )
    if got == sum(storages.values()):
        refuse(
            "counted_x",
            zh=seen_zh + "多出来的正是 `x` 自己的内存。",
            en=seen_en + "What is too much is the memory of `x` itself.",
        )
    apart = sum(t.nbytes for t in tensors if t.untyped_storage().data_ptr() != x.data_ptr())
    if got in (every, every - x.nbytes, apart) and len(tensors) > len(storages) and every > want:
        refuse(
            "counted_twice",
            zh=seen_zh + f"存了 {len(tensors)} 次，背后只有 {len(storages)} 块内存。",
            en=seen_en + f"There were {len(tensors)} saves, and {len(storages)} memories behind them.",
        )
    if got in (want // 4, sum(t.numel() for t in tensors)):
        refuse(
            "entries",
            zh=seen_zh + "像是数了元素，没有清点字节。",
            en=seen_en + "It looks as if entries were counted, not bytes.",
        )
    if function is not _cubes and got in (every, sum(by_tensor.values()), 40, 400, 800):
        refuse(
            "only_the_slice",
            zh=seen_zh + "这里存的是切片，算的是切片自己的字节。留住它，要留住多大的一块内存？",
            en=seen_en + "What is saved here is a slice, and its own bytes were counted. How much memory does it hold?",
        )
    if function is _halves and got == 2 * want:
        refuse(
            "memory_twice",
            zh=seen_zh + "两个切片同在一块内存里，算了两次。切片有自己的起始地址，存储只有一个。",
            en=seen_en
            + "Two slices of one memory were counted twice. Each slice has an address of its own; the storage has one.",
        )
    if x.data_ptr() not in storages and got == want - x.nbytes and function is not _cubes:
        refuse(
            "subtracted_x",
            zh=seen_zh + "这里没有存 `x`：还是减掉了它的内存，还是漏掉了切片？",
            en=seen_en + "`x` was not saved here: was its memory subtracted all the same, or was the slice left out?",
        )
    if got == 0:
        refuse(
            "nothing_counted",
            zh=seen_zh
            + "要么一个也没数到：`function` 是在钩子打开的时候、带着梯度运行的吗？要么化成更大的单位时舍掉了：要的是字节。",
            en=seen_en
            + "Either nothing was counted: did `function` run while the hooks were on, and with gradients? Or it was lost in a larger "
            "unit: bytes are wanted.",
        )
    refuse("wrong_count", zh=seen_zh, en=seen_en.strip())


def _examine_state(answer):
    first, second = (_count_once(answer, _cubes) for _ in range(2))
    if second != first:
        refuse("kept_between_calls", first=first, second=second)


HELD = Exercise("31.A", examine_held_bytes, held_bytes)

# ---- 31.B: which tensors does it save? ----


NAMES = ("x", "w", "b", "mask", "gain", "h", "s", "r", "d", "g", "t", "loss")


def needed_by_autograd() -> set[str]:
    """The answer by running it."""
    given = {name: torch.linspace(0.5, 1.5, 4) for name in ("x", "w", "b", "mask", "gain")}
    for name in ("w", "b", "gain"):
        given[name].requires_grad_()
    tensors = []
    with saved_tensors_hooks(lambda t: tensors.append(t.detach()) or t.detach(), lambda packed: packed):
        h = given["x"] * given["w"]
        s = h + given["b"]
        r = s.relu()
        d = r * given["mask"]
        g = d * given["gain"]
        t = g.tanh()
        loss = t.sum()
    everything = given | {"h": h, "s": s, "r": r, "d": d, "g": g, "t": t, "loss": loss}
    names = {tensor.data_ptr(): name for name, tensor in everything.items()}
    return {names[tensor.data_ptr()] for tensor in tensors}


# Asked in this order: too many, then missing.
TOO_MANY = {
    "w": (
        "`w` 多了。它只在求一个张量的梯度时才用得上；那个张量需要梯度吗？",
        "`w` is one too many. It is of use for the gradient of one tensor only; does that one require a gradient?",
    ),
    "b": (
        "`b` 多了。加法的导数里有哪些数？",
        "`b` is one too many. Which numbers are in the derivative of an addition?",
    ),
    "h": (
        "`h` 多了：谁会用到它？只有加法。",
        "`h` is one too many: who would use it? The addition alone.",
    ),
    "s": (
        "`s` 多了。看看第 8 节的表：`relu` 存输入还是存结果？",
        "`s` is one too many. See the table of section 8: does `relu` save its input or its result?",
    ),
    "g": (
        "`g` 多了。`tanh` 的导数，用输入写和用结果写，哪一种不用再算一遍 `tanh`？",
        "`g` is one too many. The derivative of `tanh` can be written with its input or with its result; which spares "
        "computing `tanh` again?",
    ),
    "loss": (
        "`loss` 多了：谁会用到它？反向从它开始，只要一个 1。",
        "`loss` is one too many: who would use it? Backward begins there, with no more than a 1.",
    ),
}  # fmt: skip

MISSING = {
    "x": ("少了一个：求 `w` 的梯度要用什么？", "One is missing: what does the gradient of `w` need?"),
    "r": (
        "少了一个：`relu` 要凭什么知道哪些位置是 0？",
        "One is missing: how would `relu` know which entries are 0?",
    ),
    "mask": (
        "少了一个：梯度怎样从 `d` 传回 `r`？",
        "One is missing: how does the gradient get from `d` back to `r`?",
    ),
    "d": ("少了一个：求 `gain` 的梯度要用什么？", "One is missing: what does the gradient of `gain` need?"),
    "gain": (
        "少了一个：梯度怎样从 `g` 传回 `d`？",
        "One is missing: how does the gradient get from `g` back to `d`?",
    ),
    "t": ("少了一个：`tanh` 一个也没存？", "One is missing: does `tanh` save nothing at all?"),
}


def examine_needed(ask):
    answer = ask()
    if answer is None:
        refuse("returned_nothing")
    if not isinstance(answer, set | frozenset | list | tuple) or not all(isinstance(name, str) for name in answer):
        refuse("not_names", answer=answer)
    answer, want = {name.strip() for name in answer}, needed_by_autograd()
    if unknown := sorted(answer - set(NAMES)):
        refuse("unknown_names", unknown=unknown[0], value=", ".join(NAMES))
    if answer == set(NAMES) - {"loss"} or answer == set(NAMES):
        refuse("everything")
    for name in NAMES:
        if name in answer - want:
            refuse(f"with_{name}", zh=TOO_MANY[name][0], en=TOO_MANY[name][1])
    for name in NAMES:
        if name in want - answer:
            refuse(f"without_{name}", zh=MISSING[name][0], en=MISSING[name][1])


def needed():
    return {"x", "r", "mask", "d", "gain", "t"}


NEEDED = Exercise("31.B", examine_needed, needed)

# ---- 31.C: the layer that holds most ----


def heaviest(model, x):
    new, seen = Counter(), set()
    with saved_tensors(model) as saved:
        model(x)
    for record in saved:
        if record.storage not in seen and not record.owner:
            new[record.module] += record.storage_bytes
        seen.add(record.storage)
    return max(new, key=new.get)


class _Unequal(nn.Module):
    """`norm` is the right answer; by each wrong measure another layer is the largest."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.narrow = nn.Linear(2000, 8)  # most, with its weight
        self.spread = nn.Upsample(10_000)  # the largest output, which nobody saves
        self.norm = nn.LayerNorm(500)  # 3 calls of 8,032 bytes
        self.once = nn.Softmax(-1)  # the largest single tensor, 19,200
        self.again = nn.Linear(700, 2)  # 3 saves of what `first` has saved, 33,600
        self.first, self.left, self.right = nn.Softmax(-1), nn.Softmax(-1), nn.Softmax(-1)
        self.tail = nn.Linear(560, 1)  # saves what 3 others have saved, 26,880

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(x)
        total = self.narrow(hidden.repeat(1, 250)).sum() + self.spread(hidden[None]).sum()
        base = hidden.sum()
        for _ in range(3):
            total = total + self.norm(base + torch.ones(4, 500)).sum()
        total = total + self.once(base + torch.ones(4, 1200)).sum()
        shared = self.first(base + torch.ones(4, 700))
        for _ in range(3):
            total = total + self.again(shared).sum()
        for layer in (self.first, self.left, self.right):
            total = total + self.tail(layer(base + torch.ones(4, 560))).sum()
        return total


class _Row(nn.Module):
    """Saves a slice of 2,000 bytes, out of 20,000."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2)[:10].sin()


class _Gate(nn.Module):
    """Saves a buffer of 32,000 bytes, and nothing else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(100, 80))

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 2) * self.mask


class _SinExp(nn.Module):
    """Saves by two operations: what `sin` is given, and what `exp` returns."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().exp()


def examine_heaviest(answer):
    from torchvision.models import densenet121

    torch.manual_seed(0)
    with torch.device("meta"):
        dense, images = densenet121(), torch.empty(8, 3, 224, 224)
    small, row, others = _Unequal(), torch.randn(1, 8), dict(dense.named_modules())
    _examine_named(answer, small, row, "一个小模型", "a small model", others)
    parts = {"row": _Row(), "mix": nn.Linear(50, 200), "soft": nn.Softmax(-1)}
    sliced, x = nn.Sequential(OrderedDict(parts)), torch.randn(100, 50, requires_grad=True)
    if answer(sliced, x) == "soft":
        refuse("only_the_slice")
    gated = nn.Sequential(OrderedDict(mix=nn.Linear(50, 40), soft=nn.Softmax(-1), gate=_Gate()))
    if answer(gated, torch.randn(100, 50)) == "gate":
        refuse("with_buffers")
    _examine_named(answer, dense, images, " `densenet121` ", "`densenet121`")
    _examine_named(answer, small, row, "一个小模型", "a small model", others)
    parts = {"mix": nn.Linear(50, 40), "twice": _SinExp(), "wide": nn.Linear(40, 60), "soft": nn.Softmax(-1)}
    if answer(nn.Sequential(OrderedDict(parts)), torch.randn(100, 50)) == "soft":
        refuse("one_operation")


def _examine_named(answer, model, x, where_zh, where_en, others=()):
    measures = _measures(model, x)
    calls = []
    counting = model.register_forward_pre_hook(lambda *args: calls.append(1))
    before, training = len(hooks_on(model)), model.training
    got = answer(model, x)
    more = len(hooks_on(model)) - before
    counting.remove()
    if got is None:
        refuse("returned_nothing")
    if not isinstance(got, str):
        refuse("not_a_name", got=got)
    if got == "":
        refuse("no_name")
    if more < 0:
        refuse("removed_others")
    if more:
        refuse("left_behind", more=more)
    if model.training != training:
        refuse("mode_changed")
    if len(calls) > 1:
        refuse("ran_twice", count_calls=len(calls))
    if got == measures["right"]:
        return
    refuse_from_before([got], model, others)
    where_zh, where_en = f"在{where_zh}上，你的答案是 `{got}`。", f"On {where_en} your answer is `{got}`. "
    for reason, zh, en in WRONG_MEASURES:
        if got == measures[reason]:
            refuse(reason, zh=where_zh + zh, en=where_en + en)
    if got not in dict(model.named_modules()):
        refuse(
            "unknown_name",
            zh=where_zh + "没有叫这个名字的模块。",
            en=where_en + "There is no module of this name.",
        )
    refuse(
        "other_module",
        zh=where_zh + "按“新占的字节”加起来，它不是最多的。照着 `.table()` 的最后一列核对一遍。",
        en=where_en + "By the sum of new bytes it is not the largest. Compare with the last column of `.table()`.",
    )


WRONG_MEASURES = (
    (
        "with_parameters",
        "算上参数它最多；参数本来就在内存里。",
        "With parameters counted it is the largest, but they live anyway.",
    ),
    (
        "every_save",
        "每存一次都算的话它最多；其中有的内存，前面的模块早就存过。",
        "With every save counted it is the largest, but some of that memory had been saved by a module before it.",
    ),
    (
        "one_record",
        "单看一个张量它最大；每个模块的要加起来。",
        "Of single tensors its is the largest; add up what each module saves.",
    ),
    (
        "last_saver",
        "前面的模块存过的内存，又算给了它；每块只归第一个存它的模块。",
        "Memory that modules before it had saved was counted for it; each belongs to the module that saved it first.",
    ),
    (
        "output",
        "它的输出最大；可是输出不一定有人存。",
        "Its output is the largest, but an output need not be saved.",
    ),
)  # fmt: skip


def _measures(model, x):
    """The name that each measure, right or wrong, finds."""
    sizes, handles = Counter(), []
    for name, module in model.named_modules():

        def note(module, args, output, name=name):
            sizes[name] += output.nbytes

        handles.append(module.register_forward_hook(note))
    with torch.random.fork_rng(devices=[]), saved_tensors(model) as saved:
        model(x)
    for handle in handles:
        handle.remove()
    new, every, last, seen = Counter(), Counter(), {}, set()
    with_parameters, largest = Counter(), Counter()
    for record in saved:
        if record.storage not in seen:
            with_parameters[record.module] += record.storage_bytes
            new[record.module] += 0 if record.owner else record.storage_bytes
        seen.add(record.storage)
        if not record.owner:
            every[record.module] += record.bytes
            last[record.storage] = record
            largest[record.module] = max(largest[record.module], record.storage_bytes)
    by_last = Counter()
    for record in last.values():
        by_last[record.module] += record.storage_bytes
    found = {
        "right": new, "with_parameters": with_parameters, "every_save": every, "one_record": largest,
        "last_saver": by_last, "output": sizes,
    }  # fmt: skip
    return {reason: max(counter, key=counter.get) for reason, counter in found.items()}


HEAVIEST = Exercise("31.C", examine_heaviest, heaviest)

# ---- 31.D: the same gradient, half the bytes ----


SMALL = 1024  # bytes; scalars do not count


def wasteful(x, gain, scale):
    return torch.log(1 + torch.exp(gain * x * scale))


def lean(x, gain, scale):
    return F.softplus(gain * scale * x)


def _arguments():
    torch.manual_seed(0)
    x = torch.randn(10_000, dtype=torch.float64).requires_grad_()
    return x, *(torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.7, -1.3))


def _large_bytes(function):
    """Value, arguments, and the bytes of the large memories that are held while the value lives."""
    arguments = _arguments()
    with saved_tensors() as saved:
        value = function(*arguments)
    sizes = {record.storage: record.storage_bytes for record in saved if record.storage_bytes >= SMALL}
    return value, arguments, sum(sizes.values())


def _most_in_backward(function, weight):
    """The most bytes of large memories that are saved at a time while backward saves anything, with what forward has saved.

    Also those that go to hooks of a checkpoint's own.
    """
    alive, most = weakref.WeakSet(), 0

    def note(tensor):
        if (storage := tensor.untyped_storage()).nbytes() >= SMALL:
            alive.add(storage)

    def pack(tensor):
        note(tensor)
        return hold(tensor)

    enter = saved_tensors_hooks.__enter__

    def entering(hooks):
        inner = hooks.pack_hook

        @wraps(inner)  # with the marks by which a checkpoint knows its own
        def noting(tensor):
            nonlocal most
            note(tensor)
            most = max(most, sum(storage.nbytes() for storage in alive))
            return inner(tensor)

        hooks.pack_hook = noting
        return enter(hooks)

    with saved_tensors_hooks(pack, unhold):
        value = function(*_arguments())
    with (
        patch.object(saved_tensors_hooks, "__enter__", entering),
        saved_tensors_hooks(hold, unhold),
        suppress(Exception),  # torch.func's transforms refuse to run beside hooks
    ):
        value.backward(weight)
    return most


def examine_lean(answer):
    want, wanted_from, most = _large_bytes(wasteful)
    got, arguments, held = _large_bytes(answer)
    if got is None:
        refuse("returned_nothing")
    expect_like(got, want.detach())
    if not got.requires_grad:
        refuse("no_graph")
    if not torch.allclose(got, want, rtol=1e-9, atol=1e-12):
        refuse("rounded")
    weight = torch.linspace(0.5, 1.5, 10_000, dtype=torch.float64)
    (want * weight).sum().backward()
    (got * weight).sum().backward()
    for name, tensor, wanted in zip(("x", "gain", "scale"), arguments, wanted_from, strict=True):
        if tensor.grad is None:
            refuse(
                f"no_gradient_{name}",
                zh=f"`{name}` 没有收到梯度。",
                en=f"`{name}` received no gradient.",
            )
        if not torch.allclose(tensor.grad, wanted.grad, rtol=1e-6, atol=1e-9):
            refuse("wrong_gradient", name=name)
    size = arguments[0].nbytes
    if held < size:
        refuse("out_of_sight")
    if held > most / 2:
        refuse(
            f"still_{held // size}",
            zh=f"数值和梯度都对，存的却相当于 {held / size:g} 个 `x`，原来是 {most // size} 个。`with saved_tensors() as saved: lean(...)` 之后，看 `saved.table()` 里是谁存的。",
            en=f"Values and gradients are right, but as much as {held / size:g} times `x` is saved; it was {most // size}. "
            "After `with saved_tensors() as saved: lean(...)`, `saved.table()` shows by whom.",
        )
    if (again := _most_in_backward(answer, weight)) > most / 2:
        refuse("saved_again", again=again / size, most=most // size)


LEAN = Exercise("31.D", examine_lean, lean)

EXERCISES = [HELD, NEEDED, HEAVIEST, LEAN]
