"""Checks of notebook 54: several processes. A twin stands in for the second one, so that the check needs no other."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from hooklab.course.check import Exercise, refuse, refuse_first, refuse_same_object

# ---- the second process ----


@cache
def _twin_backend() -> str:
    """The second process sends what this one sends, back to front; numbers that are no floats it sends as they are."""

    class Work(dist._Work):
        def __init__(self, result: list) -> None:
            super().__init__()
            self.future: torch.futures.Future = torch.futures.Future()
            self.future.set_result(result)

        def wait(self, timeout=None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def get_future(self):
            return self.future

    class Twin(dist.ProcessGroup):
        def getBackendName(self) -> str:
            return "hooklab_twin"

        def allreduce(self, tensors, opts=None):
            average = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
            for tensor in tensors:
                tensor.add_(theirs(tensor)).mul_(0.5 if average else 1)
            return Work(tensors)

        def allgather(self, outputs, inputs, opts=None):
            for (mine, other), tensor in zip(outputs, inputs, strict=True):
                mine.copy_(tensor)
                other.copy_(theirs(tensor))
            return Work(outputs)

        def _allgather_base(self, output, tensor, opts=None):
            output.copy_(torch.stack([tensor, theirs(tensor)]).view_as(output))
            return Work([output])

        def broadcast(self, tensors, opts=None):
            return Work(tensors)

        def barrier(self, opts=None):
            return Work([])

    dist.Backend.register_backend("hooklab_twin", lambda store, rank, size, timeout: Twin(rank, size), devices=["cpu"])
    return "hooklab_twin"


def theirs(tensor: Tensor) -> Tensor:
    return tensor.flip(0) if tensor.is_floating_point() else tensor.clone()


@contextmanager
def two_processes() -> Iterator[None]:
    backend = _twin_backend()
    if dist.is_initialized():  # a cell has left one open, and there can be only one
        dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Bucket:
    """What a communication hook is given, with the calls of DDP's own."""

    def __init__(self, number: int, values: list[float], dtype: torch.dtype = torch.float32) -> None:
        self._number, self._buffer = number, torch.tensor(values, dtype=dtype)

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        return [self._buffer]

    def parameters(self) -> list[Tensor]:
        return [self._buffer.clone()]

    def is_last(self) -> bool:
        return True


MADE = [  # as soon as the answer has returned
    ("no_hook", lambda t: not callable(t.hook)),
    ("argument_name", lambda t: t.names[1:] != ["bucket"]),
]


def made(hook):
    names = list(inspect.signature(hook).parameters) if callable(hook) else []
    refuse_first(MADE, hook=hook, names=names, found=", ".join(names))
    return hook


def returned(hook, bucket: Bucket) -> Tensor:
    """What DDP would write back for a bucket. Afterwards DDP uses the memory of the bucket for other numbers."""
    memory, size = bucket.buffer(), len(bucket.buffer())
    got = hook(None, bucket)
    if not (hasattr(got, "wait") and hasattr(got, "done")):  # what `then` returns is of another class than Future
        refuse("no_future", got=got)
    if not got.done():
        refuse("unfinished")
    value = got.wait()
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        refuse("no_tensor", value=value)
    if tuple(value.shape) != (size,):
        refuse("other_size", found=tuple(value.shape), size=size)
    value = value.clone()
    memory.fill_(1000)
    return value


# ---- 54.A: count the bytes, and average ----


def counting_hook(log):
    def hook(state, bucket):
        flat = bucket.buffer()
        log.append(flat.nbytes)
        flat.div_(dist.get_world_size())
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda future: future.value()[0])

    return hook


AVERAGED = [  # `mine` is what this process has, `other` what the second one has
    ("other_dtype", lambda t: t.got.dtype != t.mine.dtype),
    ("sum", lambda t: torch.allclose(t.got, t.mine + t.other)),
    ("own_share", lambda t: torch.allclose(t.got, t.mine) or torch.allclose(t.got, t.mine / 2)),
    ("divided_twice", lambda t: torch.allclose(t.got, (t.mine + t.other) / 4)),
    ("not_the_mean", lambda t: not torch.allclose(t.got, (t.mine + t.other) / 2)),
]

LOGGED = [  # `log` is what was appended, `want` the bytes, `sizes` the numbers in each bucket
    ("log_emptied", lambda t: t.log[:1] != ["begun"]),
    ("not_logged", lambda t: len(t.log) == 1),
    ("entries", lambda t: t.log[1:] == t.sizes),
    ("four_bytes", lambda t: t.log[1:] == [4 * size for size in t.sizes]),
    ("running_total", lambda t: t.log[1:] == [sum(t.want[: number + 1]) for number in range(len(t.want))]),
    ("wrong_log", lambda t: t.log[1:] != t.want),
]


def examine_counting(answer):
    with two_processes():
        log, other_log = ["begun"], ["begun"]
        hook, other_hook = made(answer(log)), made(answer(other_log))
        refuse_same_object(hook, other_hook)
        buckets = [Bucket(0, [1.0, 2.0, 6.0]), Bucket(1, [3.0, 4.0], torch.float64), Bucket(0, [0.0, 8.0, 1.0, 5.0])]
        sizes, want = [3, 2, 4], [12, 16, 16]
        for bucket in buckets:
            mine = bucket.buffer().clone()
            refuse_first(AVERAGED, got=returned(hook, bucket), mine=mine, other=theirs(mine))
        if len(other_log) > 1:
            refuse("latest_call")
        refuse_first(LOGGED, log=log, sizes=sizes, want=want, shown=log[1:])


COUNTING = Exercise("54.A", examine_counting, counting_hook)

# ---- 54.B: signs alone, and what is lost is added the next time ----


def one_bit():
    rests = {}

    def hook(state, bucket):
        value, index = bucket.buffer(), bucket.index()
        if index in rests and rests[index].shape == value.shape:
            value = value + rests[index]
        sent = value.sign() * value.abs().mean()
        rests[index] = value - sent
        sent /= dist.get_world_size()
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: future.value()[0])

    return hook


def _calls() -> list[Bucket]:
    """Two buckets of one size, several times, then one that has another size."""
    return [
        Bucket(0, [4.0, -1.0, 0.5, 0.25]),
        Bucket(1, [1.0, 3.0, -2.0, -8.0]),
        Bucket(0, [2.0, 1.5, -0.25, 1.0]),
        Bucket(1, [-1.0, 0.5, 4.0, 2.0]),
        Bucket(0, [-3.0, 0.75, 1.0, -0.5]),
        Bucket(0, [5.0, -2.0, 1.0]),
        Bucket(0, [-1.0, 3.0, 2.5]),
    ]


def expected(*, feedback=True, shared=False, scaled=True, mean=True, sent_only=True, halved=False) -> list[Tensor]:
    """What comes back from each of the calls: as it should, or with one mistake."""
    rests, results = {}, []
    for bucket in _calls():
        flat, index = bucket.buffer(), 0 if shared else bucket.index()
        rest = rests.get(index)
        value = flat + rest if feedback and rest is not None and rest.shape == flat.shape else flat
        sent = value.sign() * (value.abs().mean() if scaled else 1)
        total = (sent + theirs(sent)) / (2 if mean else 1)
        rests[index] = value - (total if not sent_only else sent / 2 if halved else sent)
        results.append(total)
    return results


PROCESSES = [  # what comes back from the first call, where nothing was left over
    ("no_signs", lambda t: torch.allclose(t.got, (t.mine + t.other) / 2)),
    ("own_share", lambda t: torch.allclose(t.got, t.mine.sign() * t.scale)),
    ("sum", lambda t: torch.allclose(t.got, 2 * t.want)),
    ("no_scale", lambda t: torch.allclose(t.got, t.want / t.scale)),
    ("sum_of_sizes", lambda t: torch.allclose(t.got, t.want * len(t.mine))),
    ("first_call", lambda t: not torch.allclose(t.got, t.want)),
]

KEPT = [  # what comes back from all of them
    ("no_feedback", {"feedback": False}),
    ("one_rest", {"shared": True}),
    ("rest_of_mean", {"sent_only": False}),
    ("rest_of_divided", {"halved": True}),
]


def examine_one_bit(answer):
    with two_processes():
        hook, other = made(answer()), made(answer())
        refuse_same_object(hook, other)
        want, found = expected(), []
        for number, bucket in enumerate(_calls()):
            mine = bucket.buffer().clone()
            found.append(returned(hook, bucket).float())
            if number == 0:
                facts = {"mine": mine, "other": theirs(mine), "scale": mine.abs().mean()}
                refuse_first(PROCESSES, got=found[0], want=want[0], **facts)
        for key, mistake in KEPT:
            if _same(found, expected(**mistake)):
                refuse(key)
        if not _same(found, want):
            wrong = [number for number, (got, right) in enumerate(zip(found, want, strict=True), 1)
                     if not torch.allclose(got, right)]  # fmt: skip
            refuse("size_changed" if wrong[0] > 5 else "wrong_rest", number=wrong[0])
        if not torch.allclose(returned(other, _calls()[1]).float(), want[1]):
            refuse("shared_between_calls")


def _same(found, want):
    return all(map(torch.allclose, found, want))


ONE_BIT = Exercise("54.B", examine_one_bit, one_bit)

EXERCISES = [COUNTING, ONE_BIT]
