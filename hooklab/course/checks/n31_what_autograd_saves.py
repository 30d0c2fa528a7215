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

from hooklab._support.packing import hold, unhold
from hooklab._support.torch_private import close_hooks, outer_hooks
from hooklab.course.check import Exercise, Phrase, expect_like, refuse, refuse_first, refuse_from_before
from hooklab.course.checks.models import Before
from hooklab.saved import saved_tensors


def _tensors_saved(run):
    """What autograd saves while `run()` runs, each save once; and what `run` returns."""
    tensors = []
    with saved_tensors_hooks(lambda tensor: tensors.append(tensor.detach()) or tensor.detach(), lambda packed: packed):
        returned = run()
    return tensors, returned


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


CASES = [  # what is run, and the bytes that are held
    ("x = x * x, 3 times", _cubes, 8_000),
    ("(x + x)[:10].sin()", lambda x: (x + x)[:10].sin(), 4_000),
    ("sin of one slice of x + x, cos of another", _halves, 4_000),
    ("x + x + 1", lambda x: x + x + 1, 0),
    ("x[100:200].sin()", lambda x: x[100:200].sin(), 0),
]

OTHERS = [  # held too: a result, a mask, and what is no leaf of yours
    ("x.exp()", torch.exp, 4_000),
    ("x * (x > 0)", lambda x: x * (x > 0), 1_000),
    ("x * torch.ones(1000, requires_grad=True)", lambda x: x * torch.ones(1000, requires_grad=True), 4_000),
]

RUN = [  # when `function` should have run once
    ("not_once", lambda t: t.runs != 1),
    ("filled_grad", lambda t: t.x.grad is not None),
    ("returned_nothing", lambda t: t.got is None),
    ("not_a_number", lambda t: _whole(t.got) is None),
]

COUNTED = [  # `got` is not `want`: what was counted instead
    ("counted_view_of_x", lambda t: t.got == t.memory and t.want == 0),
    ("counted_x", lambda t: t.got == t.memory),
    (
        "counted_twice",
        lambda t: t.got in (t.every, t.every - t.x.nbytes, t.apart) and t.saves > t.memories and t.every > t.want,
    ),
    ("entries", lambda t: t.got in (t.want // 4, t.entries)),
    ("only_the_slice", lambda t: t.function is not _cubes and t.got in (t.every, t.by_address, 40, 400, 800)),
    ("memory_twice", lambda t: t.function is _halves and t.got == 2 * t.want),
    ("subtracted_x", lambda t: t.function is not _cubes and not t.has_x and t.got == t.want - t.x.nbytes),
    ("nothing_counted", lambda t: t.got == 0),
    ("wrong_count", lambda t: True),
]


def examine_held_bytes(answer):
    first, second = (_count_once(answer, _cubes) for _ in range(2))
    if second != first:
        refuse("kept_between_calls", first=first, second=second)
    for code, function, want in CASES:
        if (got := _count_once(answer, function)) != want:
            _explain_count(code, function, want, got)
    if (got := _count_once(answer, _cubes, _numbers(torch.float64))) != 16_000:
        refuse("float32_only", got=got)
    for code, function, want in OTHERS:
        if (got := _count_once(answer, function)) != want:
            refuse("by_dtype_of_x" if got > want else "left_out", seen=Phrase("seen"), code=code, want=want, got=got)
    row = torch.ones(10, 100)[5].requires_grad_()  # its address is not that of its memory
    if (got := _count_once(answer, torch.sin, row)) != 0:
        refuse("address_of_x", got=got)
    if (got := _count_once(answer, _exponentials)) != 24_000:
        refuse("address_reused" if got else "own_operation", got=got)


def _numbers(dtype=torch.float32):
    return torch.linspace(-1, 1, 1000, dtype=dtype).requires_grad_()


def _count_once(answer, function, x=None):
    x, calls, outer = _numbers() if x is None else x, [], outer_hooks()

    def counted(x):
        calls.append(x)
        return function(x)

    got = answer(counted, x)
    if close_hooks(outer):
        refuse("left_open")
    refuse_first(RUN, x=x, runs=len(calls), got=got)
    return _whole(got)


def _whole(got):
    """The whole number that was returned, also in a tensor or an array without dimensions; None where it is none."""
    number = got.item() if getattr(got, "shape", None) == () and not getattr(got, "is_meta", False) else got
    try:
        return None if isinstance(number, bool | Tensor) else index(number)
    except TypeError:
        return None


def _explain_count(code, function, want, got):
    x = _numbers()
    tensors, _ = _tensors_saved(lambda: function(x))
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    refuse_first(
        COUNTED,
        seen=Phrase("seen"),
        code=code,
        function=function,
        want=want,
        got=got,
        x=x,
        saves=len(tensors),
        memories=len(memories),
        memory=sum(memories.values()),
        has_x=x.data_ptr() in memories,
        every=sum(tensor.nbytes for tensor in tensors),
        entries=sum(tensor.numel() for tensor in tensors),
        by_address=sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()),
        apart=sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().data_ptr() != x.data_ptr()),
    )


HELD = Exercise("31.A", examine_held_bytes, held_bytes)

# ---- 31.B: which tensors does it save? ----

NAMES = ("x", "w", "b", "mask", "gain", "h", "s", "r", "d", "g", "t", "loss")

NAMED = [  # names in a set, beside those that a run saves
    ("unknown_names", lambda t: t.names - set(NAMES)),
    ("everything", lambda t: t.names >= set(NAMES) - {"loss"}),
    *((f"with_{name}", lambda t, name=name: name in t.names - t.want) for name in NAMES),
    *((f"without_{name}", lambda t, name=name: name in t.want - t.names) for name in NAMES),
]


def needed_by_autograd() -> set[str]:
    """The answer by running it."""
    given = {name: torch.linspace(0.5, 1.5, 4) for name in ("x", "w", "b", "mask", "gain")}
    for name in ("w", "b", "gain"):
        given[name].requires_grad_()

    def run():
        h = given["x"] * given["w"]
        s = h + given["b"]
        r = s.relu()
        d = r * given["mask"]
        g = d * given["gain"]
        t = g.tanh()
        loss = t.sum()
        return {"h": h, "s": s, "r": r, "d": d, "g": g, "t": t, "loss": loss}

    tensors, computed = _tensors_saved(run)
    names = {tensor.data_ptr(): name for name, tensor in (given | computed).items()}
    return {names[tensor.data_ptr()] for tensor in tensors}


def examine_needed(ask):
    answer = ask()
    if answer is None:
        refuse("returned_nothing")
    if not isinstance(answer, set | frozenset | list | tuple) or not all(isinstance(name, str) for name in answer):
        refuse("not_names", answer=answer)
    names = {name.strip() for name in answer}
    unknown = min(names - set(NAMES), default="")
    refuse_first(NAMED, names=names, want=needed_by_autograd(), unknown=unknown, known=", ".join(NAMES))


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


FOUND = [  # what was returned, and what is left behind on the model
    ("returned_nothing", lambda t: t.got is None),
    ("not_a_name", lambda t: not isinstance(t.got, str)),
    ("no_name", lambda t: t.got == ""),
    ("removed_others", lambda t: t.before.lost_hooks()),
    ("left_behind", lambda t: t.more),
    ("mode_changed", lambda t: not t.before.model.training),
    ("ran_twice", lambda t: t.runs > 1),
]


def examine_heaviest(answer):
    from torchvision.models import densenet121

    torch.manual_seed(0)
    with torch.device("meta"):
        dense, images = densenet121(), torch.empty(8, 3, 224, 224)
    small, row, others = _Unequal(), torch.randn(1, 8), dict(dense.named_modules())
    _examine_named(answer, small, row, "on_small", others)
    _examine_layers(answer, "only_the_slice", "soft", row=_Row(), mix=nn.Linear(50, 200), soft=nn.Softmax(-1))
    _examine_layers(answer, "with_buffers", "gate", mix=nn.Linear(50, 40), soft=nn.Softmax(-1), gate=_Gate())
    _examine_named(answer, dense, images, "on_densenet")
    _examine_named(answer, small, row, "on_small", others)
    layers = {"mix": nn.Linear(50, 40), "twice": _SinExp(), "wide": nn.Linear(40, 60), "soft": nn.Softmax(-1)}
    _examine_layers(answer, "one_operation", "soft", **layers)


def _examine_layers(answer, key, wrong, **layers):
    """The name `wrong` for a model of these layers is refused under `key`."""
    if answer(nn.Sequential(OrderedDict(layers)), torch.randn(100, 50, requires_grad=True)) == wrong:
        refuse(key)


def _examine_named(answer, model, x, phrase, others=()):
    by_measure, runs = measures(model, x), []
    counting = model.register_forward_pre_hook(lambda *args: runs.append(1))
    before = Before(model)
    got = answer(model, x)
    refuse_first(FOUND, got=got, before=before, more=len(before.new_hooks()), runs=len(runs))
    counting.remove()
    if got == by_measure.pop("right"):
        return
    refuse_from_before([got], model, others)
    for reason, found in by_measure.items():
        if got == found:
            refuse(reason, seen=Phrase(phrase), got=got)
    refuse("other_module" if got in dict(model.named_modules()) else "unknown_name", seen=Phrase(phrase), got=got)


def measures(model, x):
    """The name that each measure finds: the right one, and wrong ones in the order in which they are asked."""
    outputs = []
    handles = [
        module.register_forward_hook(lambda module, args, output, name=name: outputs.append((name, output.nbytes)))
        for name, module in model.named_modules()
    ]
    with torch.random.fork_rng(devices=[]), saved_tensors(model) as saved:
        model(x)
    for handle in handles:
        handle.remove()
    first = {}
    for record in saved:
        first.setdefault(record.storage, record)
    free = [record for record in saved if not record.owner]
    last = {record.storage: record for record in free}
    return {
        "right": _largest((record.module, record.storage_bytes) for record in first.values() if not record.owner),
        "with_parameters": _largest((record.module, record.storage_bytes) for record in first.values()),
        "every_save": _largest((record.module, record.bytes) for record in free),
        "one_record": max(free, key=lambda record: record.storage_bytes).module,
        "last_saver": _largest((record.module, record.storage_bytes) for record in last.values()),
        "output": _largest(outputs),
    }


def _largest(sizes):
    total = Counter()
    for name, size in sizes:
        total[name] += size
    return max(total, key=total.get)


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
            refuse(f"no_gradient_{name}")
        if not torch.allclose(tensor.grad, wanted.grad, rtol=1e-6, atol=1e-9):
            refuse("wrong_gradient", name=name)
    size = arguments[0].nbytes
    if held < size:
        refuse("out_of_sight")
    if held > most / 2:
        refuse("still_4" if held >= 4 * size else "still_3", held=held / size, most=most // size)
    if (again := _most_in_backward(answer, weight)) > most / 2:
        refuse("saved_again", again=again / size, most=most // size)


LEAN = Exercise("31.D", examine_lean, lean)

EXERCISES = [HELD, NEEDED, HEAVIEST, LEAN]
