"""Compare things by time: all in one run, interleaved, medians, ratios. Seconds differ between machines, ratios less."""

import ctypes
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

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


def report(title: str, value: float, budget: float, unit: str = "x") -> bool:
    """Print one line; True if the budget is kept."""
    kept = value <= budget
    print(f"{title:60} {value:8.3f} {unit}   budget {budget:g} {unit}   {'kept' if kept else 'EXCEEDED'}")
    return kept
