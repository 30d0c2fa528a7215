"""Checks of notebook 36: the memory budget."""

import itertools
from collections import namedtuple
from decimal import Decimal
from functools import partial
from math import isclose
from numbers import Integral, Real

from hooklab.course.check import Exercise, refuse, refuse_first

# ---- 36.A: bytes over bandwidth ----


def step_seconds(forward, backward, nbytes, bandwidth, overlap):
    one_way = nbytes / (bandwidth * 1e9)
    if overlap:
        return max(forward, one_way) + max(backward, one_way)
    return forward + backward + 2 * one_way


_close = partial(isclose, rel_tol=1e-6)

FIRST = 1.0, 2.0, 60e9, 40.0  # one way takes 1.5 s: backward is long enough to hide it, forward is not
REST = (0.085, 0.17, 45.4e9, 55.0), (0.5, 0.25, 10e9, 25.0), (0.1, 0.2, 0, 10.0)

SERIAL = [  # the first call, without overlap: 3 s of computing and 3 s of moving
    ("one_way", lambda t: _close(t.got, 3 + 1.5)),
    ("bits", lambda t: _close(t.got, 3 + 8 * 3)),
    ("gibibytes", lambda t: _close(t.got, 3 + 3 * 1e9 / 2**30)),
    ("no_unit", lambda t: t.got > 1e6),
    ("hidden_anyway", lambda t: t.got < 3 + 1.5),
    ("wrong_serial", lambda t: not _close(t.got, 3 + 3)),
]

OVERLAPPED = [  # the first call, with overlap: 1.5 s in forward and 2 s in backward
    ("overlap_ignored", lambda t: _close(t.got, 3 + 3)),
    ("whole_step", lambda t: _close(t.got, max(3, 3))),
    ("too_good", lambda t: t.got < 3),
    ("wrong_overlap", lambda t: not _close(t.got, 1.5 + 2)),
]


def examine_step_seconds(answer):
    refuse_first(SERIAL, got=_number(answer(*FIRST, False)))
    refuse_first(OVERLAPPED, got=_number(answer(*FIRST, True)))
    for call in [(*numbers, overlap) for numbers in REST for overlap in (False, True)]:
        got = _number(answer(*call))
        if not _close(got, step_seconds(*call)):
            refuse("one_example", call=call, got=got)


def _number(got):
    # A tensor or an array without dimensions is one number, of the kind that `item()` gives.
    number = got.item() if getattr(got, "shape", None) == () and not getattr(got, "is_meta", False) else got
    if isinstance(number, bool) or not isinstance(number, Real | Decimal):
        refuse("no_number", got=got)
    return float(number)


SECONDS = Exercise("36.A", examine_step_seconds, step_seconds)

# ---- 36.B: the cheapest plan under a budget ----


def _plans(layers):
    for sizes in itertools.product(*[range(blocks + 1) for blocks in layers.values()]):
        yield {name: size for name, size in zip(layers, sizes, strict=True) if size}


def cheapest(count, layers, budget):
    fitting = []
    for plan in _plans(layers):
        _, peak, work = count(plan)
        if peak <= budget:
            fitting.append((work, peak, plan))
    return min(fitting, key=lambda found: found[:2])[2]  # a ValueError where nothing fits


Cost = namedtuple("Cost", "held peak work")


class _Counted:
    """A made-up network of the kind that section 2 counts."""

    def __init__(self, outside, **layers):
        self.outside, self.table = outside, layers  # per layer (input, inner, work) of every block
        self.layers = {name: len(blocks) for name, blocks in layers.items()}

    def __call__(self, plan):
        held, peak, work, kept = self.outside, self.outside, 0, False
        for name, blocks in self.table.items():
            size = plan.get(name, 0)
            for first in range(0, len(blocks), size or 1):
                segment = blocks[first : first + (size or 1)]
                held += 0 if kept else segment[0][0]
                inner, kept = sum(block[1] for block in segment), not size
                peak = max(peak, held + inner)
                held += inner if kept else 0
                work += 0 if kept else sum(block[2] for block in segment)
        return Cost(held, peak, work)


NETWORKS = [
    _Counted(5, down=[(8, 40, 3)] * 4, up=[(4, 20, 6)] * 4),
    _Counted(2, wide=[(16, 60, 1)] * 2, middle=[(6, 18, 5)] * 6, narrow=[(2, 10, 9)] * 3),
    _Counted(0, only=[(1, 10, 1)] * 9),
    _Counted(0, odd=[(10, 10, 1)] * 7),
]

PLAN = [  # its `cost` beside the `lowest`, that of the best plan; `asked` is the peak and work of each plan that was tried
    ("over_budget-held", lambda t: t.cost.held <= t.budget < t.cost.peak),
    ("over_budget", lambda t: t.cost.peak > t.budget),
    ("never_asked", lambda t: t.cost[1:] != t.lowest[1:] and t.lowest[1:] not in t.asked),
    ("exact_budget", lambda t: t.cost.peak < t.lowest.peak == t.budget and t.cost[1:] == _lowest_below(t)[1:]),
    ("too_much_work", lambda t: t.cost.work > t.lowest.work),
    ("higher_peak", lambda t: t.cost.peak > t.lowest.peak),
]


def examine_cheapest(answer):
    for network in NETWORKS:
        _examine_network(answer, network, network.layers)


def _examine_network(answer, network, layers):
    asked = []

    def count(plan):
        cost = network(plan)
        asked.append(cost[1:])
        return cost

    peaks = sorted({network(plan).peak for plan in _plans(layers)})
    stock = network({}).peak
    for budget in (stock, stock - 1, peaks[len(peaks) // 2], peaks[len(peaks) // 4] + 1, peaks[1], peaks[0]):
        best = cheapest(network, layers, budget)
        facts = {"layers": layers, "budget": budget, "best": best}
        try:
            plan = answer(count, dict(layers), budget)
        except ValueError as error:
            refuse("gave_up", **facts, error=error)
        if not isinstance(plan, dict):
            refuse("wrong_type", plan=plan)
        if bad := {name: size for name, size in plan.items() if name not in layers or not _is_size(size)}:
            refuse("unfit", bad=bad)
        costs = {"cost": network(plan), "lowest": network(best)}
        refuse_first(PLAN, **facts, plan=plan, **costs, network=network, asked=asked)
    try:
        got = answer(count, dict(layers), peaks[0] - 1)
    except ValueError:
        return
    except Exception as error:
        refuse("other_error", error=error)
    refuse("no_error", got=got)


def _is_size(size):
    return isinstance(size, Integral) and not isinstance(size, bool) and size >= 1


def _lowest_below(t):
    """The cost of the best plan with a peak below the budget."""
    return t.network(cheapest(t.network, t.layers, t.budget - 1))


CHEAPEST = Exercise("36.B", examine_cheapest, cheapest)

EXERCISES = [SECONDS, CHEAPEST]
