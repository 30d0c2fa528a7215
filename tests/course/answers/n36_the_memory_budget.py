"""Answers to the exercises of notebook 36: wrong ones by the name of their refusal, and right ones."""

import itertools
from fractions import Fraction

import torch

from hooklab.course.checks.n36_the_memory_budget import cheapest, step_seconds

# ---- 36.A: bytes over bandwidth ----


def _seconds(one_way, overlapped=None):
    """A wrong answer: `one_way(nbytes, bandwidth)` seconds, and `overlapped(forward, backward, one_way)`."""

    def answer(forward, backward, nbytes, bandwidth, overlap):
        moves = one_way(nbytes, bandwidth)
        if overlap and overlapped:
            return overlapped(forward, backward, moves)
        return forward + backward + 2 * moves

    return answer


def _right_one_way(nbytes, bandwidth):
    return nbytes / (bandwidth * 1e9)


# ---- 36.B: the cheapest plan under a budget ----


def _chosen(key, *, fits=lambda cost, budget: cost[1] <= budget, sizes=lambda n: range(n + 1), keep_zero=False):
    """A wrong answer: another key, another test, other sizes."""

    def answer(count, layers, budget):
        plans = [
            {name: size for name, size in zip(layers, chosen, strict=True) if size or keep_zero}
            for chosen in itertools.product(*[sizes(n) for n in layers.values()])
        ]
        fitting = [plan for plan in plans if fits(count(plan), budget)]
        if not fitting:
            raise ValueError("nothing fits")
        return min(fitting, key=lambda plan: key(count(plan)))

    return answer


def returns_none(count, layers, budget):
    try:
        return cheapest(count, layers, budget)
    except ValueError:
        return None


def index_error(count, layers, budget):
    try:
        return cheapest(count, layers, budget)
    except ValueError:
        return [][0]


def empties_the_layers(count, layers, budget):
    names = {}
    while layers:
        name, blocks = layers.popitem()
        names = {name: blocks, **names}
    return cheapest(count, names, budget)


def only_divisors(count, layers, budget):
    """Tries no plan in which the last segment of a layer is a shorter one."""
    sizes = [[0, *(size for size in range(1, n + 1) if n % size == 0)] for n in layers.values()]
    plans = [
        {name: size for name, size in zip(layers, each, strict=True) if size} for each in itertools.product(*sizes)
    ]
    fitting = [plan for plan in plans if count(plan)[1] <= budget]
    if not fitting:
        raise ValueError("no plan fits")
    return min(fitting, key=lambda plan: (count(plan)[2], count(plan)[1]))


def sizes_beyond_the_layer(count, layers, budget):
    """One segment of six blocks, in a layer of two, is one segment of two."""
    most, fitting = max(layers.values()), []
    for sizes in itertools.product(range(most, -1, -1), repeat=len(layers)):
        plan = {name: size for name, size in zip(layers, sizes, strict=True) if size}
        _, peak, work = count(plan)
        if peak <= budget:
            fitting.append((work, peak, len(fitting), plan))
    if not fitting:
        raise ValueError("nothing fits")
    return min(fitting)[-1]


WRONG = {
    "36.A": {
        "one_way": _seconds(lambda nbytes, bandwidth: nbytes / (bandwidth * 1e9) / 2),
        "bits": _seconds(lambda nbytes, bandwidth: 8 * nbytes / (bandwidth * 1e9)),
        "gibibytes": _seconds(lambda nbytes, bandwidth: nbytes / (bandwidth * 2**30)),
        "wrong_serial": _seconds(lambda nbytes, bandwidth: nbytes / (bandwidth * 1e6)),
        "no_unit": _seconds(lambda nbytes, bandwidth: nbytes / bandwidth),
        "hidden_anyway": lambda forward, backward, nbytes, bandwidth, overlap: (
            max(forward, nbytes / bandwidth / 1e9) + max(backward, nbytes / bandwidth / 1e9)
        ),
        "overlap_ignored": _seconds(_right_one_way),
        "whole_step": _seconds(_right_one_way, lambda f, b, moves: max(f + b, 2 * moves)),
        "too_good": _seconds(_right_one_way, lambda f, b, moves: max(f, b, moves)),
        "wrong_overlap": _seconds(_right_one_way, lambda f, b, moves: f + b + moves),
        "one_example": _seconds(_right_one_way, lambda f, b, moves: max(f, moves) + b),
        "no_number": lambda *arguments: print(*arguments),
    },
    "36.B": {
        "changed_given": empties_the_layers,
        "over_budget": _chosen(lambda cost: cost[:0:-1], fits=lambda cost, budget: cost[0] <= budget),
        "too_much_work": _chosen(lambda cost: cost[1:]),
        "higher_peak": _chosen(lambda cost: cost[2]),
        "exact_budget": _chosen(lambda cost: cost[:0:-1], fits=lambda cost, budget: cost[1] < budget),
        "never_asked": _chosen(lambda cost: cost[:0:-1], sizes=range),
        "unfit": _chosen(lambda cost: cost[:0:-1], keep_zero=True),
        "no_error": returns_none,
        "gave_up": _chosen(lambda cost: cost[:0:-1], sizes=lambda n: [s for s in range(n + 1) if not s or not n % s]),
        "other_error": index_error,
        "wrong_type": lambda count, layers, budget: list(cheapest(count, layers, budget)),
    },
}

ALSO_WRONG = [
    ("36.B", "gave_up", only_divisors),
    ("36.B", "over_budget", lambda count, layers, budget: {}),
]

RIGHT = [
    ("36.A", lambda *given: torch.tensor(step_seconds(*given))),
    ("36.A", lambda *given: Fraction(step_seconds(*given))),
    ("36.B", sizes_beyond_the_layer),
]
