"""The first check of a session, right after the imports: under 150 ms. Its notebook's two files are read, and no others.

Beside it, in the same new process, how long it takes again, and how long all notebooks' files take.
"""

import statistics
import sys
import time

from interleaved import in_processes, report

BUDGET_MS = 150
RUNS = 5
EXERCISES = ("00.A", "12.A", "24.A", "32.A", "36.B")


def milliseconds(number: int) -> dict[str, tuple[float, float, float]]:
    """For one exercise: the first check, the same one again, and reading everything."""
    import torchvision  # noqa: F401  # the set-up cells of several notebooks import it, too

    from hooklab import check

    name = EXERCISES[number % len(EXERCISES)]
    times = []
    for act in (
        lambda: check.exercise(name, lambda *given: 1),
        lambda: check.exercise(name, lambda *given: 1),
        check.registered,
    ):
        begin = time.perf_counter()
        act()
        times.append((time.perf_counter() - begin) * 1000)
    first, again, everything = times
    return {name: (first, again, everything)}


def main() -> bool:
    runs = in_processes(milliseconds, RUNS * len(EXERCISES))
    kept = []
    for name in EXERCISES:
        first, again, everything = (
            statistics.median(row) for row in zip(*[run[name] for run in runs if name in run], strict=True)
        )
        kept.append(report(f"{name}: first check", first, BUDGET_MS, "ms"))
        print(f"{'':8}again {again:.1f} ms; reading the files of every notebook {everything:.0f} ms")
    return all(kept)


if __name__ == "__main__":
    sys.exit(not main())
