"""Answers to the exercises of notebook 54: wrong ones by the name of their refusal, and right ones."""

import torch
import torch.distributed as dist

from hooklab.course.checks.n54_several_processes import counting_hook, one_bit


def _finished(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def _added(tensor):
    dist.all_reduce(tensor)
    return tensor


# ---- 54.A: count the bytes, and average ----


def _counting(change, note=lambda log, flat: log.append(flat.nbytes)):
    """An answer that returns `change(flat)` as it is, and notes something."""

    def answer(log):
        def hook(state, bucket):
            note(log, bucket.buffer())
            return change(bucket.buffer())

        return hook

    return answer


def _mean(flat):
    return _finished(_added(flat / 2))


def counting_other_name(log):
    return lambda state, b: counting_hook(log)(state, b)


def counting_lost(log):
    def hook(state, bucket):
        mine = [*log, bucket.buffer().nbytes]
        return counting_hook(mine)(state, bucket)

    return hook


def counting_by_default(log, logs=[]):  # noqa: B006
    logs.append(log)
    return _counting(_mean, lambda _, flat: logs[-1].append(flat.nbytes))(log)


def counting_emptied(log):
    log.clear()
    return counting_hook(log)


_HOOKS = {}


def counting_one_hook(log):
    return _HOOKS.setdefault("hook", counting_hook(log))


def _total(log, flat):
    log.append(sum(log[1:][-1:]) + flat.nbytes)


class Counting:
    """A right answer as a class."""

    __slots__ = ("log",)

    def __init__(self, log):
        self.log = log

    def __call__(self, state, bucket):
        flat = bucket.buffer()
        self.log += [flat.element_size() * flat.numel()]
        both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(both, flat)
        return _finished(torch.stack(both).mean(0))


def counting_set_buffer(log):
    def hook(state, bucket) -> torch.futures.Future[torch.Tensor]:
        log.append(bucket.buffer().untyped_storage().nbytes())
        bucket.set_buffer(bucket.buffer() / dist.get_world_size())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    return hook


# ---- 54.B: signs alone ----


def _one_bit(sent=lambda value: value.sign() * value.abs().mean(), rest=None, key=None, result=None, rests=None):
    """An answer with one step of its own."""

    def answer():
        kept = {} if rests is None else rests

        def hook(state, bucket):
            value, index = bucket.buffer(), key(bucket) if key else bucket.index()
            if index in kept and kept[index].shape == value.shape:
                value = value + kept[index]
            mine = sent(value)
            mean = result(mine.clone()) if result else _added(mine / 2)
            kept[index] = rest(value, mine, mean) if rest else value - mine
            return _finished(mean)

        return hook

    return answer


def one_bit_any_size():
    rests = {}

    def hook(state, bucket):
        value = bucket.buffer()
        if (rest := rests.get(bucket.index())) is not None:
            value = value + (rest if len(rest) == len(value) else rest[:1])
        mine = value.sign() * value.abs().mean()
        rests[bucket.index()] = value - mine
        return _finished(_added(mine / 2))

    return hook


def one_bit_keeps_the_memory():
    rests = {}

    def hook(state, bucket):
        flat, index = bucket.buffer(), bucket.index()
        if index in rests and rests[index].shape == flat.shape:
            flat += rests[index]
        mine = flat.sign() * flat.abs().mean()
        rests[index] = flat.sub_(mine)
        return _finished(_added(mine / 2))

    return hook


_RESTS = {}


def one_bit_in_a_global():
    """One dictionary for the hooks of all calls."""
    _RESTS.clear()
    return _one_bit(rests=_RESTS)()


def one_bit_gathered():
    rests = {}

    def hook(state, bucket):
        value = bucket.buffer().clone()
        old = rests.get((bucket.index(), len(value)))
        value += 0 if old is None else old
        scale, signs = value.abs().mean().view(1), value.sign()
        rests[bucket.index(), len(value)] = value - scale * signs
        scales, both = [torch.empty(1) for _ in range(2)], [torch.empty_like(signs) for _ in range(2)]
        dist.all_gather(scales, scale)
        dist.all_gather(both, signs)
        return _finished(sum(one * sign for one, sign in zip(scales, both, strict=True)) / 2)

    return hook


def _wait(answer):
    """Never gives its future a result."""

    def made(*given):
        hook = answer(*given)

        def waiting(state, bucket):
            hook(state, bucket)
            return torch.futures.Future()

        return waiting

    return made


WRONG = {
    "54.A": {
        "no_hook": lambda log: log.append(0),
        "argument_name": counting_other_name,
        "no_future": _counting(lambda flat: _added(flat / 2)),
        "unfinished": _wait(counting_hook),
        "no_tensor": _counting(lambda flat: _finished(flat.tolist())),
        "other_size": _counting(lambda flat: _finished(_added(flat / 2).mean())),
        "sum": _counting(lambda flat: _finished(_added(flat))),
        "own_share": _counting(lambda flat: _finished(flat / 2)),
        "divided_twice": _counting(lambda flat: _finished(_added(flat / 2) / 2)),
        "not_the_mean": _counting(lambda flat: _finished(_added(flat / 2).relu() + 1)),
        "other_dtype": _counting(lambda flat: _finished(_added(flat / 2).half().double())),
        "log_emptied": counting_emptied,
        "not_logged": counting_lost,
        "entries": _counting(_mean, lambda log, flat: log.append(len(flat))),
        "four_bytes": _counting(_mean, lambda log, flat: log.append(4 * len(flat))),
        "running_total": _counting(_mean, _total),
        "wrong_log": _counting(_mean, lambda log, flat: log.append(8 * len(flat))),
        "latest_call": counting_by_default,
        "same_object": counting_one_hook,
    },
    "54.B": {
        "no_hook": lambda: torch.zeros(4),
        "argument_name": lambda: lambda state, gradients: one_bit()(state, gradients),
        "no_future": lambda: lambda state, bucket: one_bit()(state, bucket).wait(),
        "unfinished": _wait(one_bit),
        "no_tensor": _one_bit(result=lambda mine: [mine, mine]),
        "other_size": _one_bit(result=lambda mine: _added(mine / 2)[:1]),
        "no_signs": _one_bit(sent=lambda value: value.clone()),
        "own_share": _one_bit(result=lambda mine: mine),
        "sum": _one_bit(result=_added),
        "no_scale": _one_bit(sent=torch.sign),
        "sum_of_sizes": _one_bit(sent=lambda value: value.sign() * value.abs().sum()),
        "first_call": _one_bit(sent=lambda value: value.sign() * value.abs().max()),
        "no_feedback": _one_bit(rest=lambda value, mine, mean: 0 * value),
        "one_rest": _one_bit(key=lambda bucket: 0),
        "rest_of_mean": _one_bit(rest=lambda value, mine, mean: value - mean),
        "rest_of_divided": _one_bit(rest=lambda value, mine, mean: value - mine / 2),
        "size_changed": one_bit_any_size,
        "wrong_rest": one_bit_keeps_the_memory,
        "shared_between_calls": one_bit_in_a_global,
        "same_object": lambda: _HOOKS.setdefault("one bit", one_bit()),
    },
}

ALSO_WRONG = [
    # The sign of what is left is turned round.
    ("54.B", "wrong_rest", _one_bit(rest=lambda value, mine, mean: mine - value)),
]

RIGHT = [
    ("54.A", Counting),
    ("54.A", counting_set_buffer),
    ("54.B", one_bit_gathered),
]
