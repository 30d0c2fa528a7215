"""How long each notebook takes to run, kernel start included: at most 10 s, the median of three runs."""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import notebook_form
from interleaved import report
from nbclient import NotebookClient

BUDGET_S = 10
RUNS = 3


def seconds(path: Path) -> float:
    begin = time.perf_counter()
    resources = {"metadata": {"path": str(path.parent)}}
    arguments = ["--IPKernelApp.log_level=40"]
    NotebookClient(notebook_form.read(path), timeout=120, extra_arguments=arguments, resources=resources).execute()
    return time.perf_counter() - begin


def main() -> bool:
    runs = [{path: seconds(path) for path in notebook_form.paths()} for _ in range(RUNS)]
    kept = [report(path.name, statistics.median(run[path] for run in runs), BUDGET_S, "s") for path in runs[0]]
    return all(kept)


if __name__ == "__main__":
    sys.exit(not main())
