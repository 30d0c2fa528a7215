"""The headline task on a GPU: ResNet-152, batch 256: peak memory against step time, for every strategy.

    uv run python tests/benchmarks/gpu_offload.py

writes notebooks/data/gpu_offload.json, which notebook 33 plots. Goal: at most 6.5 GB at no more than 1.5x the
stock step, and at every memory budget faster than each of the others. Every strategy runs in every round, in
turn; figures are medians; the first step, in which memory is pinned, stands apart. `--device cpu` tries the
logic on a small model without a GPU and writes no result of that kind.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hooklab import Offload, checkpoint_segments

RESULT = Path(__file__).parents[2] / "notebooks" / "data" / "gpu_offload.json"
PLAN = {"layer1": 1, "layer2": 2, "layer3": 6, "layer4": 3}
LEAST = {
    "layer1": 2,
    "layer2": 3,
    "layer3": 3,
}  # the lowest peak by arithmetic, without offloading (notebook 35)
GB = 10**9


class Task:
    """One model, one batch, one step; and the strategies that run it. `unit`: bytes that `keep 1 GB` stands for."""

    def __init__(
        self,
        name: str,
        batch: int,
        size: int,
        device: str,
        store: Callable[[], Any] | None = None,
        unit: int = GB,
    ):
        self.unit = unit
        torch.manual_seed(0)
        self.device, self.name, self.batch, self.size = torch.device(device), name, batch, size
        self.model = getattr(torchvision.models, name)(weights=None).to(self.device)
        self.x = torch.randn(batch, 3, size, size, device=self.device)
        self.labels = torch.randint(0, 1000, (batch,), device=self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.store = store() if store is not None else "cpu"

    def step(self, strategy: Callable[["Task"], Any], update: bool = True) -> int:
        """Forward, backward, SGD; the bytes that were moved."""
        self.optimizer.zero_grad(set_to_none=True)
        with strategy(self) as offload:
            loss = nn.functional.cross_entropy(self.model(self.x), self.labels)
        loss.backward()
        if update:
            self.optimizer.step()
        return getattr(offload, "moved_bytes", 0)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, strategy: Callable[["Task"], Any]) -> float:
        self.sync()
        begin = time.perf_counter()
        self.step(strategy)
        self.sync()
        return time.perf_counter() - begin


@contextmanager
def blocks_checkpointed(task: Task) -> Iterator[None]:
    """Every block by `torch.utils.checkpoint`, as one would write it without hooklab."""
    blocks = [block for name in PLAN for block in getattr(task.model, name)]
    for block in blocks:
        whole = block.forward
        block.forward = lambda x, whole=whole: checkpoint(whole, x, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def offload(keep: int) -> Callable[[Task], Any]:
    def strategy(task: Task) -> Offload:
        small = 0 if task.device.type == "cpu" else 2**20
        return Offload(task.model, to=task.store, keep=keep, min_bytes=small)

    return strategy


def strategies(task: Task) -> dict[str, Callable[[Task], Any]]:
    unit, pinned = task.unit, task.device.type == "cuda"
    found = {
        "stock": lambda task: nullcontext(),
        "save_on_cpu, pinned": lambda task: save_on_cpu(pin_memory=pinned),
        "checkpoint, every block": blocks_checkpointed,
        "checkpoint_segments 1/2/6/3": lambda task: nullcontext(),
        "checkpoint_segments 2/3/3": lambda task: nullcontext(),
    }
    for keep in (0, 5, 10, 20, 30) if pinned else (0, 20):
        found[f"Offload, keep {keep} GB"] = offload(keep * unit)
    for keep in (0, 1, 2, 3) if pinned else (0, 3):
        found[f"checkpoint_segments + Offload, keep {keep} GB"] = offload(keep * unit)
    if pinned and (theirs := torchtune_offloading()) is not None:
        found["torchtune OffloadActivations"] = theirs
    return found


def torchtune_offloading() -> Callable[[Task], Any] | None:
    try:
        from torchtune.training import OffloadActivations
    except ImportError:
        print("torchtune is not installed: its OffloadActivations is left out", file=sys.stderr)
        return None
    return lambda task: OffloadActivations(use_pin_memory=True, use_streams=True)


def wrapped(name: str, task: Task) -> Any:
    """`checkpoint_segments` lives as long as forward and backward, which is longer than the packing context."""
    if not name.startswith("checkpoint_segments"):
        return nullcontext()
    return checkpoint_segments(task.model, LEAST if "2/3/3" in name else PLAN)


def gradients_agree(task: Task) -> dict[str, bool]:
    """Against stock, bit for bit, with deterministic algorithms; the model is put back each time.

    False also for an `Offload` that has moved nothing.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    state = {key: value.clone() for key, value in task.model.state_dict().items()}
    expected, agree = None, {}
    for name, strategy in strategies(task).items():
        task.model.load_state_dict(state)
        with wrapped(name, task):
            moved = task.step(strategy, update=False)
        found = [parameter.grad.clone() for parameter in task.model.parameters()]
        expected = expected or found
        agree[name] = all(map(torch.equal, expected, found)) and (moved > 0 or "Offload, keep" not in name)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = cudnn
    return agree


def measure(task: Task, rounds: int, steps: int) -> list[dict[str, Any]]:
    rows = {name: {"name": name, "times": [], "peaks": [], "reserved": []} for name in strategies(task)}
    for _ in range(rounds):
        for name, strategy in strategies(task).items():
            row = rows[name]
            with wrapped(name, task):
                first = task.timed(strategy)
                row.setdefault("first_seconds", first)
                reset(task)
                row["times"] += [task.timed(strategy) for _ in range(steps)]
                row["moved_bytes"] = task.step(strategy)
            peaks(task, row)
            print(f"  {name:50} {statistics.median(row['times']):8.3f} s", file=sys.stderr, flush=True)
    return [finished(row) for row in rows.values()]


def reset(task: Task) -> None:
    if task.device.type == "cuda":
        task.sync()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(task: Task, row: dict[str, Any]) -> None:
    if task.device.type == "cuda":
        row["peaks"].append(torch.cuda.max_memory_allocated())
        row["reserved"].append(torch.cuda.max_memory_reserved())


def finished(row: dict[str, Any]) -> dict[str, Any]:
    times = row.pop("times")
    peak, reserved = row.pop("peaks"), row.pop("reserved")
    return row | {
        "seconds": statistics.median(times),
        "fastest": min(times),
        "slowest": max(times),
        "peak_allocated": max(peak, default=None),
        "peak_reserved": max(reserved, default=None),
    }


def link(device: torch.device) -> dict[str, float] | None:
    """Gigabytes per second between pinned memory and the GPU, each way, and of pinning itself."""
    if device.type != "cuda":
        return None
    nbytes = 2**30
    begin = time.perf_counter()
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pinning = time.perf_counter() - begin
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = {"pinning_GBps": nbytes / pinning / GB}
    for name, target, source in (("to_host_GBps", host, there), ("to_device_GBps", there, host)):
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        rates[name] = nbytes / statistics.median(times) / GB
    return rates


def machine(device: torch.device) -> dict[str, str]:
    found = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "date": date.today().isoformat(),
    }
    if device.type == "cuda":
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": driver.stdout.split("\n")[0],
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "tf32": f"cudnn {torch.backends.cudnn.allow_tf32}, matmul {torch.backends.cuda.matmul.allow_tf32}",
        }
    return found


def verdict(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The goal, and whether any of the others is as small and faster than the best of ours at its memory."""
    stock = next(run for run in runs if run["name"] == "stock")["seconds"]
    ours = [run for run in runs if "Offload, keep" in run["name"] or "segments" in run["name"]]
    others = [run for run in runs if run not in ours and run["name"] != "stock"]
    goal = [
        run["name"] for run in ours if run["peak_allocated"] <= 6.5 * GB and run["seconds"] <= 1.5 * stock
    ]
    beaten = {}
    for other in others:
        fitting = [run for run in ours if run["peak_allocated"] <= other["peak_allocated"]]
        best = min(fitting, key=lambda run: run["seconds"], default=None)
        beaten[other["name"]] = best is not None and best["seconds"] < other["seconds"]
    return {"6.5 GB at 1.5x reached by": goal, "faster at no more memory than": beaten}


def run(task: Task, small: Task, rounds: int, steps: int) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": machine(task.device)}
    result["task"] = f"{task.name}, batch {task.batch}, {task.size} x {task.size}, float32, SGD"
    result["link"] = link(task.device)
    result["gradients_bit_equal"] = gradients_agree(small)
    result["runs"] = measure(task, rounds, steps)
    if task.device.type == "cuda":
        result["verdict"] = verdict(result["runs"])
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda"):
        if not torch.cuda.is_available():
            print("gpu_offload: no CUDA device here; nothing was measured", file=sys.stderr)
            return 1
        task = Task("resnet152", given.batch, 224, given.device)
        small = Task("resnet50", 4, 96, given.device, unit=10**6)  # saves some 35 MB
        out = given.out or RESULT
    else:
        task = Task("resnet18", 2, 32, given.device, Copies, unit=10**4)
        small, out = task, given.out
    result = run(task, small, given.rounds, given.steps)
    text = json.dumps(result, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    return 0 if all(result["gradients_bit_equal"].values()) else 1


class Copies:
    """Where there is no GPU: copies in ordinary memory."""

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def read(self, slot: torch.Tensor) -> torch.Tensor:
        return slot


if __name__ == "__main__":
    sys.exit(main())
