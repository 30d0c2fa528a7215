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
from torch.utils.checkpoint import checkpoint

from hooklab._support.packing import hold, outer_hooks, unhold
from hooklab.census import hooks_on
from hooklab.course.check import Exercise, Prediction, expect_like, kind_of, refuse, refuse_from_before
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
        refuse(
            "float32_only",
            zh=f"float32 都对；换成 float64，应当是 16,000，得到的是 {doubles:,}。一个数占几个字节，要看数据类型。",
            en=f"Right for float32. For float64 16,000 are right; found {doubles:,}. Bytes per entry depend on the dtype.",
        )
    for function, want, words in OTHERS:
        if (got := _count_once(answer, function)) > want:
            refuse(
                "by_dtype_of_x",
                zh=f"`{words}`：应当是 {want:,}，得到的是 {got:,}。一个元素占几个字节，看存下的那个张量的类型，不看 `x` 的。",
                en=f"`{words}`: {want:,} is right; found {got:,}. How many bytes an entry takes depends on the dtype of what is saved, "
                "not on that of `x`.",
            )
        if got != want:
            refuse(
                "left_out",
                zh=f"`{words}`：应当是 {want:,}，得到的是 {got:,}。不算的只有 `x`；结果、掩码、别的叶子张量，存了就算。",
                en=f"`{words}`: {want:,} is right; found {got:,}. Nothing but `x` is left out; a result, a mask, another leaf count "
                "if they are saved.",
            )
    row = torch.ones(10, 100)[5].requires_grad_()  # its address is not that of its memory
    if (got := _count_once(answer, torch.sin, x=row)) != 0:
        refuse(
            "address_of_x",
            zh=f"`x` 自己是个切片时，`x.sin()` 留住的只有 `x` 的内存，应当是 0，得到的是 {got:,}：切片的地址，不是那块内存的地址。",
            en=f"Where `x` is itself a slice, `x.sin()` holds nothing but the memory of `x`, so 0 is right; found {got:,}. The address "
            "of a slice is not that of its memory.",
        )
    got = _count_once(answer, _exponentials)
    if got == 0:
        refuse(
            "own_operation",
            zh="手写的操作（第 4 节）用 `ctx.save_for_backward` 存，得到的是 0。它的 Node 没有 `_saved_` 开头的属性，`saved_tensors_hooks` 却看得见。",
            en="An operation written by hand (section 4) saves by `ctx.save_for_backward`, and 0 was found. Its Node has no attribute "
            "that begins with `_saved_`, but `saved_tensors_hooks` sees what it saves.",
        )
    if got != 24_000:
        refuse(
            "address_reused",
            zh=f"`x.exp().sum()` 算 6 次再相加，6 个 `exp` 的结果都要存，共 24,000 字节，得到的是 {got:,}。"
            "内存一释放，地址就会分给下一个张量：数的时候，前面存下的还都在吗？",
            en=f"`x.exp().sum()`, 6 times and added, saves the 6 results of `exp`, 24,000 bytes; found {got:,}. When memory "
            "is freed its address goes to the next tensor: at the time of counting, was everything saved before still there?",
        )


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
        refuse(
            "left_open",
            zh="函数返回以后，保存钩子还开着：此后每存一个张量都会调用它。",
            en="After the function has returned the hooks are still on: they will be called for every tensor saved from now on.",
        )
    if len(calls) != 1:
        refuse(
            "not_once",
            zh=f"`function` 应当运行 1 次，实际运行了 {len(calls)} 次。",
            en=f"`function` should run 1 time; it ran {len(calls)} times.",
        )
    if x.grad is not None:
        refuse(
            "filled_grad",
            zh="`x` 原来没有 `.grad`，现在有了：只要运行 `function`，不用做反向。",
            en="`x` had no `.grad`, and has one now: just run `function`, without a backward.",
        )
    if got is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一个整数。",
            en="The function returned `None`; a whole number is wanted.",
        )
    # A tensor or an array without dimensions is one number, of the kind that `item()` gives.
    number = got.item() if getattr(got, "shape", None) == () and not getattr(got, "is_meta", False) else got
    try:
        whole = None if isinstance(number, bool | Tensor) else index(number)
    except TypeError:
        whole = None
    if whole is None:
        refuse(
            "not_a_number",
            zh=f"应当返回一个整数，得到的是 `{kind_of(got)}`。",
            en=f"Return a whole number; found a `{kind_of(got)}`.",
        )
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
        refuse(
            "kept_between_calls",
            zh=f"同一个 `function` 数两次，第一次得到 {first:,}，第二次得到 {second:,}：前一次调用记下的还在。它存在哪里？",
            en=f"Counted twice, the same `function` gives {first:,} and then {second:,}: what the call before has noted is still "
            "there. Where is it stored?",
        )


def _collecting(measure):
    """A wrong answer: `measure(saved tensors, x)` after an otherwise right run."""

    def answer(function, x):
        tensors = []

        def pack(tensor):
            tensors.append(tensor)
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda packed: packed):
            function(x)
        return measure(tensors, x)

    return answer


def _others(tensors, x):
    return {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage().data_ptr() != x.data_ptr()}


def _addresses_only(function, x):
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()

    with saved_tensors_hooks(pack, lambda packed: packed):
        function(x)
    sizes.pop(x.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _address_of_x(function, x):
    storages = []

    def pack(tensor):
        storages.append(tensor.untyped_storage())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda packed: packed):
        function(x)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    sizes.pop(x.data_ptr(), None)
    return sum(sizes.values())


def _along_the_graph(function, x):
    todo, seen, storages = [function(x).grad_fn], set(), {}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(tensor := getattr(node, name), Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        todo += [after for after, _ in node.next_functions]
    storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def _left_open(function, x):
    count = held_bytes(function, x)
    saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
    return count


def _by_slice_address(tensors, x):
    sizes = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.data_ptr() != x.data_ptr()}
    return sum(sizes.values())


def _with_backward(function, x):
    return held_bytes(lambda x: function(x).sum().backward(), x)


_STORAGES = []


def _in_a_global(function, x):
    def pack(tensor):
        _STORAGES.append(tensor.untyped_storage())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda packed: packed):
        function(x)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in _STORAGES}
    sizes.pop(x.data_ptr(), None)
    return sum(sizes.values())


HELD = Exercise(
    "31.A",
    examine_held_bytes,
    held_bytes,
    {
        "counted_twice": _collecting(lambda tensors, x: sum(tensor.nbytes for tensor in tensors)),
        "counted_x": _collecting(
            lambda tensors, x: sum(
                {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
            )
        ),
        "subtracted_x": _collecting(
            lambda tensors, x: (
                sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) - x.nbytes
            )
        ),
        "left_out": _collecting(
            lambda tensors, x: sum(
                t.untyped_storage().nbytes() for t in _others(tensors, x).values() if t.is_floating_point()
            )
        ),
        "entries": _collecting(lambda tensors, x: sum(t.numel() for t in _others(tensors, x).values())),
        "only_the_slice": _collecting(lambda tensors, x: sum(t.nbytes for t in _others(tensors, x).values())),
        "memory_twice": _collecting(_by_slice_address),
        "nothing_counted": lambda function, x: held_bytes(lambda x: function(x.detach()), x),
        "address_reused": _addresses_only,
        "address_of_x": _address_of_x,
        "own_operation": _along_the_graph,
        "float32_only": _collecting(
            lambda tensors, x: sum(4 * len(t.untyped_storage()) // t.itemsize for t in _others(tensors, x).values())
        ),
        "by_dtype_of_x": _collecting(
            lambda tensors, x: sum(
                len(t.untyped_storage()) // t.itemsize * x.itemsize for t in _others(tensors, x).values()
            )
        ),
        "wrong_count": lambda function, x: held_bytes(function, x) // 1024,
        "kept_between_calls": _in_a_global,
        "counted_view_of_x": _collecting(
            lambda tensors, x: sum(
                {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not x}.values()
            )
        ),
        "left_open": _left_open,
        "filled_grad": _with_backward,
        "not_once": lambda function, x: function(x) is None or held_bytes(function, x),
        "not_a_number": lambda function, x: f"{held_bytes(function, x)} bytes",
        "returned_nothing": lambda function, x: print(end=str(held_bytes(function, x))[:0]),
    },
    zh="每块内存一次，切片算整块，`x` 不算。前两条 `unique_bytes` 也这样，但它把 `x` 算进去。",
    en="Each memory once, slices in full, `x` left out. `unique_bytes` does the first two, but it counts `x`.",
)

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
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一个集合。",
            en="The function returned `None`; a set is wanted.",
        )
    if not isinstance(answer, set | frozenset | list | tuple) or not all(isinstance(name, str) for name in answer):
        refuse(
            "not_names",
            zh=f"应当是名字的集合，得到的是 `{type(answer).__name__}`，或者里面不全是字符串。",
            en=f"A set of names is wanted; found a `{type(answer).__name__}`, or other things than strings in it.",
        )
    answer, want = {name.strip() for name in answer}, needed_by_autograd()
    if unknown := sorted(answer - set(NAMES)):
        refuse(
            "unknown_names",
            zh=f"代码里没有叫 `{unknown[0]}` 的张量。能写的名字是 `{', '.join(NAMES)}`。",
            en=f"No tensor in the code is called `{unknown[0]}`. Names that can be given: `{', '.join(NAMES)}`.",
        )
    if answer == set(NAMES) - {"loss"} or answer == set(NAMES):
        refuse(
            "everything",
            zh="不是每个都存。一行一行看：这一步的导数里出现了谁，又有谁要这个梯度？",
            en="Not everything is saved. Go line by line: what is in the derivative of this step, and who wants the gradient?",
        )
    for name in NAMES:
        if name in answer - want:
            refuse(f"with_{name}", zh=TOO_MANY[name][0], en=TOO_MANY[name][1])
    for name in NAMES:
        if name in want - answer:
            refuse(f"without_{name}", zh=MISSING[name][0], en=MISSING[name][1])


def needed():
    return {"x", "r", "mask", "d", "gain", "t"}


def _names(*more, without=""):
    return lambda: (needed() | set(more)) - {without}


NEEDED = Exercise(
    "31.B",
    examine_needed,
    needed,
    {f"with_{name}": _names(name) for name in TOO_MANY}
    | {f"without_{name}": _names(without=name) for name in MISSING}
    | {
        "everything": lambda: set(NAMES),
        "unknown_names": _names("relu"),
        "not_names": lambda: "x, r, mask",
        "returned_nothing": lambda: print(end=""),
    },
    zh="两条规矩：导数里有谁就存谁，没人要的梯度，多半不为它存。",
    en="Two rules: what the derivative contains is saved, and as a rule nothing is for a gradient that nobody wants.",
)

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


def heaviest_by_operation(model, x):
    new, seen = Counter(), set()
    with saved_tensors(model) as saved:
        model(x)
    for record in saved:
        if record.storage not in seen and not record.owner:
            new[record.module, record.operation] += record.storage_bytes
        seen.add(record.storage)
    return max(new, key=new.get)[0]


def heaviest_with_buffers(model, x):
    new, seen, params = Counter(), set(), {name for name, _ in model.named_parameters()}
    with saved_tensors(model) as saved:
        model(x)
    for record in saved:
        if record.storage not in seen and record.owner not in params:
            new[record.module] += record.storage_bytes
        seen.add(record.storage)
    return max(new, key=new.get)


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
        refuse(
            "only_the_slice",
            zh="在一个小模型上，你的答案是 `soft`，它存了 8,000 字节。`row` 存的切片自己只有 2,000 字节，可是切片留住的是一整块 20,000 字节的内存。",
            en="On a small model your answer is `soft`, which saves 8,000 bytes. The slice that `row` saves has no more than 2,000 "
            "of its own, but it holds a whole memory of 20,000.",
        )
    gated = nn.Sequential(OrderedDict(mix=nn.Linear(50, 40), soft=nn.Softmax(-1), gate=_Gate()))
    if answer(gated, torch.randn(100, 50)) == "gate":
        refuse(
            "with_buffers",
            zh="在一个小模型上，你的答案是 `gate`。它存的只有自己的缓冲区；缓冲区和参数一样，本来就在内存里。",
            en="On a small model your answer is `gate`. All it saves is a buffer of its own, which lives anyway, as parameters do.",
        )
    _examine_named(answer, dense, images, " `densenet121` ", "`densenet121`")
    _examine_named(answer, small, row, "一个小模型", "a small model", others)
    parts = {"mix": nn.Linear(50, 40), "twice": _SinExp(), "wide": nn.Linear(40, 60), "soft": nn.Softmax(-1)}
    if answer(nn.Sequential(OrderedDict(parts)), torch.randn(100, 50)) == "soft":
        refuse(
            "one_operation",
            zh="在一个小模型上，你的答案是 `soft`，它存了 24,000 字节。`twice` 有两个操作，各存 16,000 字节：同一个模块的要加在一起。",
            en="On a small model your answer is `soft`, which saves 24,000 bytes. `twice` has two operations that save 16,000 bytes "
            "each: those of one module belong together.",
        )


def _examine_named(answer, model, x, where_zh, where_en, others=()):
    measures = _measures(model, x)
    calls = []
    counting = model.register_forward_pre_hook(lambda *args: calls.append(1))
    before, training = len(hooks_on(model)), model.training
    got = answer(model, x)
    more = len(hooks_on(model)) - before
    counting.remove()
    if got is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一个名字。",
            en="The function returned `None`; a name is wanted.",
        )
    if not isinstance(got, str):
        refuse(
            "not_a_name",
            zh=f"应当返回一个名字，得到的是 `{type(got).__name__}`。",
            en=f"Return one name; found a `{type(got).__name__}`.",
        )
    if got == "":
        refuse(
            "no_name",
            zh="返回了一个空名字。把模型交给 `saved_tensors`，它才知道每个张量是哪个模块存的。",
            en="An empty name came back. Give the model to `saved_tensors`; how else should it know which module saved what?",
        )
    if more < 0:
        refuse(
            "removed_others",
            zh="函数返回以后，模型上的钩子比原来少了：不是你挂的也删掉了。",
            en="After the function has returned the model has fewer hooks than before: some that were not yours are gone.",
        )
    if more:
        refuse(
            "left_behind",
            zh=f"函数返回以后，模型上多了 {more} 个钩子。",
            en=f"After the function has returned the model has more hooks than before, by {more}.",
        )
    if model.training != training:
        refuse(
            "mode_changed",
            zh="模型原本在训练模式，你的函数返回以后却不在了。",
            en="The model was in training mode, and after your function it is not.",
        )
    if len(calls) > 1:
        refuse(
            "ran_twice",
            zh=f"模型应当运行 1 次，实际运行了 {len(calls)} 次。",
            en=f"The model should run 1 time; it ran {len(calls)} times.",
        )
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


def _measured(reason):
    return lambda model, x: _measures(model, x)[reason]


def heaviest_left_behind(model, x):
    model.register_forward_hook(lambda module, args, output: None)
    return heaviest(model, x)


def heaviest_and_clear(model, x):
    name = heaviest(model, x)
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return name


def heaviest_by_slice(model, x):
    new, seen = Counter(), set()
    with saved_tensors(model) as saved:
        model(x)
    for record in saved:
        if record.storage not in seen and not record.owner:
            new[record.module] += record.bytes
        seen.add(record.storage)
    return max(new, key=new.get)


def heaviest_ran_twice(model, x):
    model(x)
    return heaviest(model, x)


def heaviest_by_default(model, x, new=Counter()):  # noqa: B006
    with saved_tensors(model) as saved:
        model(x)
    for record in {record.storage: record for record in reversed(list(saved)) if not record.owner}.values():
        new[record.module] += record.storage_bytes
    return max(new, key=new.get)


def heaviest_grad_left_off(model, x):
    name = heaviest(model, x)
    torch.set_grad_enabled(False)
    return name


HEAVIEST = Exercise(
    "31.C",
    examine_heaviest,
    heaviest,
    {
        **{reason: _measured(reason) for reason, _, _ in WRONG_MEASURES},
        "other_module": lambda model, x: list(dict(model.named_modules()))[2],
        "unknown_name": lambda model, x: "layer9",
        "no_name": lambda model, x: "",
        "mode_changed": lambda model, x: heaviest(model.eval(), x),
        "left_behind": heaviest_left_behind,
        "removed_others": heaviest_and_clear,
        "only_the_slice": heaviest_by_slice,
        "with_buffers": heaviest_with_buffers,
        "one_operation": heaviest_by_operation,
        "ran_twice": heaviest_ran_twice,
        "from_before": heaviest_by_default,
        "grad_left_off": heaviest_grad_left_off,
        "not_a_name": lambda model, x: model.get_submodule(heaviest(model, x)),
        "returned_nothing": lambda model, x: print(end=heaviest(model, x)[:0]),
    },
    zh="先知道是谁，才知道该从哪里省起。",
    en="Knowing who it is comes before deciding where to spare.",
)

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
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一个张量。",
            en="The function returned `None`; a tensor is wanted.",
        )
    expect_like(got, want.detach(), "返回值", "what is returned")
    if not got.requires_grad:
        refuse(
            "no_graph",
            zh="数值对了，可是结果不带计算图：一个字节也没存，反向也做不了。",
            en="The values are right, but there is no graph behind them: nothing is saved, and there is no backward either.",
        )
    if not torch.allclose(got, want, rtol=1e-9, atol=1e-12):
        refuse(
            "rounded",
            zh="数值只对到 7 位左右：中间是不是换成了精度更低的类型？省下来的是精度，这一题要一样的数值。",
            en="The values agree to some 7 digits only: was there a dtype of lower precision on the way? That spares precision; here "
            "the values should be the same.",
        )
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
            refuse(
                "wrong_gradient",
                zh=f"数值对了，可是 `{name}` 的梯度和原来的不同。",
                en=f"The values are right, but the gradient of `{name}` is not what it was.",
            )
    size = arguments[0].nbytes
    if held < size:
        refuse(
            "out_of_sight",
            zh="数值和梯度都对，可是 `saved_tensors` 看到的不到一个 `x`：反向要用的，放在了它看不见的地方（`ctx` 的属性、列表、闭包、你自己的一对钩子）。"
            "看不见的也可能占内存，还不受检查（第 4 节）。让 autograd 来存；自己写的操作用 `ctx.save_for_backward`。",
            en="Values and gradients are right, but `saved_tensors` sees less than one `x`: what backward needs is where it cannot "
            "see (attributes of `ctx`, a list, a closure, a pair of hooks of your own). Out of sight it may take memory too, and "
            "nobody checks it (section 4). Let autograd save it; an operation of your own does so by `ctx.save_for_backward`.",
        )
    if held > most / 2:
        refuse(
            f"still_{held // size}",
            zh=f"数值和梯度都对，存的却相当于 {held / size:g} 个 `x`，原来是 {most // size} 个。`with saved_tensors() as saved: lean(...)` 之后，看 `saved.table()` 里是谁存的。",
            en=f"Values and gradients are right, but as much as {held / size:g} times `x` is saved; it was {most // size}. "
            "After `with saved_tensors() as saved: lean(...)`, `saved.table()` shows by whom.",
        )
    if (again := _most_in_backward(answer, weight)) > most / 2:
        refuse(
            "saved_again",
            zh=f"数值和梯度都对，前向存的也少，可是反向又带着计算图做了一遍计算，连同前向留下的，最多时同时存着相当于 {again / size:g} 个 `x`，"
            f"原来是 {most // size} 个：只是推迟，没有减半。重算是 35 的办法，这一题用不着。",
            en="Values and gradients are right, and forward saves little, but backward computes with a graph once more, and together "
            f"with what forward has left as much as {again / size:g} times `x` is saved at a time; it was {most // size}: put off, not "
            "halved. Computing again is the way of 35; here you can do without.",
        )


def _half_precision(x, gain, scale):
    return lean(x.float(), gain.float(), scale.float()).double()


class _OnCtx(torch.autograd.Function):
    """Four memories of the size of `x`, as attributes of `ctx`."""

    @staticmethod
    def forward(ctx, x, gain, scale):
        ctx.given, ctx.power = (x, gain, scale), torch.exp(gain * x * scale)
        ctx.inside = 1 + ctx.power
        return torch.log(ctx.inside)

    @staticmethod
    def backward(ctx, grad):
        x, gain, scale = ctx.given
        grad = grad * ctx.power / ctx.inside
        return grad * gain * scale, (grad * x * scale).sum(), (grad * x * gain).sum()


def _product_kept(x, gain, scale):
    """Two memories of the size of `x` from forward, and two more in backward."""
    inside = gain * scale * x
    return checkpoint(lambda inside: torch.log(1 + torch.exp(inside)), inside, use_reentrant=False)


class _FormulaWithGraph(torch.autograd.Function):
    """Backward runs no forward again; its own formula makes a graph."""

    @staticmethod
    def forward(ctx, x, gain, scale):
        ctx.save_for_backward(x, gain, scale)
        return lean(x, gain, scale)

    @staticmethod
    def backward(ctx, grad):
        x, gain, scale = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            power = torch.exp(-gain * x * scale)
            grad = grad / (1 + power)
        return grad * gain * scale, (grad * x * scale).sum(), (grad * x * gain).sum()


LEAN = Exercise(
    "31.D",
    examine_lean,
    lean,
    {
        "still_4": wasteful,
        "rounded": _half_precision,
        "still_3": lambda x, gain, scale: F.softplus(gain * x * scale),
        "saved_again": lambda *given: checkpoint(wasteful, *given, use_reentrant=False),
        "out_of_sight": lambda x, gain, scale: _OnCtx.apply(x, gain, scale),
        "no_graph": lambda x, gain, scale: torch.no_grad()(lean)(x, gain, scale),
        "no_gradient_x": lambda x, gain, scale: lean(x.detach(), gain, scale),
        "no_gradient_gain": lambda x, gain, scale: lean(x, gain.item(), scale),
        "no_gradient_scale": lambda x, gain, scale: lean(x, gain, scale.detach()),
        "wrong_values": lambda x, gain, scale: F.softplus(gain * x) * scale,
        "wrong_shape": lambda x, gain, scale: lean(x, gain, scale).sum(),
        "wrong_dtype": lambda x, gain, scale: lean(x.float(), gain, scale),
        "wrong_gradient": lambda x, gain, scale: (
            lean(x.detach(), gain, scale) + 0 * x + (x - x.detach()) * gain.detach()
        ),
        "returned_nothing": lambda x, gain, scale: print(end=str(lean(x, gain, scale))[:0]),
    },
    zh="数值不变，内存至多一半。最短的写法：先乘小的，再乘大的；一次调用代替几次。",
    en="The same values in at most half the memory. The shortest way: multiply what is small first, and make one call of several.",
)

CHECKS = [
    Prediction(
        "31.1",
        zh="留不留，看这一步的导数里有没有它。只有 `hidden * hidden` 的导数含有它；`exp` 用的是自己的结果。",
        en="It stays only if the derivative of this step contains it. That of `hidden * hidden` does; that of `exp` contains its "
        "own result.",
    ),
    Prediction(
        "31.2",
        zh="3 次乘法，每次存两个操作数，一共 6 次，每次 4,000 字节。同一个张量作了两个操作数，就存两次。",
        en="3 products, each saving both factors: 6 saves of 4,000 bytes. A tensor that is both factors is saved twice.",
    ),
    Prediction(
        "31.3",
        zh="存的是一个 4,000 字节的切片。切片是视图，它的存储就是整张表：留住一行，就留住了 1,000 行。"
        "写成 `table[:1].clone().sin()`，留住的才只有 4,000 字节。",
        en="What is saved is a slice of 4,000 bytes. A slice is a view, and its storage is the whole table: who holds one row "
        "holds all 1,000. With `table[:1].clone().sin()` it would be 4,000 bytes.",
    ),
    Prediction(
        "31.4",
        zh="`eval()` 不关 autograd：卷积和 BatchNorm 照样存输入，ReLU 照样存结果。少掉的 1 %，是 BatchNorm 每批算出来的均值和标准差的倒数。",
        en="`eval()` does not switch autograd off: convolution and batch norm save their inputs, ReLU its result, as before. The "
        "1 % that is gone are the mean and the inverse standard deviation that batch norm computes of each batch.",
    ),
    Prediction(
        "31.5",
        zh="一样多。BatchNorm 存的是自己的输入，它的输出没有人要：原地就被改写，不原地就马上释放，留住的都只有 ReLU 的结果。",
        en="The same. Batch norm saves its input, and nobody wants its output: in place it is overwritten, otherwise freed at once, "
        "and what is held is the result of ReLU in both cases.",
    ),
    HELD,
    NEEDED,
    HEAVIEST,
    LEAN,
]
