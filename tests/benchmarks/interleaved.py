"""Compare things by time: all in one run, interleaved, medians, ratios. Seconds differ between machines, ratios less."""

import ctypes
import gc
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


def keep_the_heap() -> None:
    """glibc alone: memory once fetched is not handed back between two calls.

    Otherwise it is, or is not, by what happens to lie at the end of the heap: the same contender is 1.5 to 4
    times slower in one process than in the next.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((M_TRIM_THRESHOLD, 1 << 30), (M_TOP_PAD, 1 << 26), (M_MMAP_THRESHOLD, 1 << 25)):
            if not mallopt(option, size):
                raise RuntimeError(f"mallopt({option}, {size}) was refused")


def medians(contenders: dict[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, float]:
    """Median seconds per call. In each of `rounds` every contender runs `repeat` times, one after the other.

    Each round has an order of its own, always the same ones: who follows on whom costs up to 3 % here, since
    every contender leaves the caches and the heap to the next in a state of its own.
    """
    torch.set_num_threads(1)
    keep_the_heap()
    for contender in contenders.values():
        contender()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                contender = contenders[name]
                begin = time.perf_counter()
                for _ in range(repeat):
                    contender()
                seconds[name].append((time.perf_counter() - begin) / repeat)
    finally:
        gc.enable()
    return {name: statistics.median(times) for name, times in seconds.items()}


def in_processes(measure: Callable[[int], T], runs: int) -> list[T]:
    """What `measure` returns in each of `runs` new processes, one after the other; it is given their number.

    Where things come to lie in memory is drawn anew in each, and worth 1 to 2 % of a small model.
    """
    found = []
    for number in range(runs):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(measure, (number,)))
    return found


def middle(values: list[float]) -> tuple[float, float]:
    """The median and its standard error, from the median deviation: a process that was disturbed changes neither."""
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    return median, 1.4826 * 1.2533 * deviation / math.sqrt(len(values))


def report(title: str, value: float, budget: float, unit: str = "x", error: float | None = None) -> bool:
    """Print one line, with the standard error if it is known; True if the budget is kept."""
    kept = value <= budget
    spread = "" if error is None else f" ± {error:.3f}"
    verdict = "kept" if kept else "EXCEEDED"
    if error is not None and abs(value - budget) < 2 * error:
        verdict += " (less than two standard errors off)"
    print(f"{title:60} {value:8.3f}{spread} {unit}   budget {budget:g} {unit}   {verdict}")
    return kept
