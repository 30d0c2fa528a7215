"""Compare things by time: all in one run, interleaved, medians, ratios. Seconds differ between machines, ratios less."""

import gc
import statistics
import time
from collections.abc import Callable

import torch


def medians(contenders: dict[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, float]:
    """Median seconds per call. In each of `rounds` every contender runs `repeat` times, one after the other."""
    torch.set_num_threads(1)
    for contender in contenders.values():
        contender()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, contender in contenders.items():
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
