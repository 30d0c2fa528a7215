"""Which layer is slow on a GPU: the clock of the CPU against CUDA events, layer by layer; and the cost of `finite`.

    uv run python tests/benchmarks/gpu_layer_times.py

takes less than five minutes and writes hooklab/course/data/gpu_layer_times.json, with a description of the machine.
ResNet-50 in its parts, and a last one that reads a number, as `loss.item()` does. Each clock is read in a pair of hooks
on each part, in a forward pass of its own. `wall` is `time.perf_counter`; the part that reads is charged for what the
others queued. `synchronized` waits for the GPU first: right, and the GPU idles between the parts. `events` are CUDA
events, read once at the end: right, and nothing waits. Milliseconds are medians.

`finite` is measured on training steps, against the same step without it, one after the other. `--device cpu` tries the
logic on a small model without a GPU, and writes no file without `--out`.
"""

import argparse
import json
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from gpu_offload import machine, write
from torch import nn

from hooklab import finite

WARM_UP = 3  # rounds that do not count
RESULT = Path(__file__).parents[2] / "hooklab" / "course" / "data" / "gpu_layer_times.json"


class Read(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = x.sum().item()
        return x


def synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def event() -> torch.cuda.Event:
    """A mark in the queue of the GPU, which notes the time when its turn comes."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def between(begin: Any, end: Any) -> float:
    """Milliseconds between two marks of one clock."""
    return 1000 * (end - begin) if isinstance(end, float) else begin.elapsed_time(end)


def network(name: str, device: torch.device) -> nn.Sequential:
    parts = dict(getattr(torchvision.models, name)(weights=None).named_children())
    fc = nn.Sequential(nn.Flatten(), parts.pop("fc"))
    return nn.Sequential(OrderedDict(parts, fc=fc, read=Read())).to(device)


def layer_times(model: nn.Module, x: torch.Tensor, clock: Callable, sync: Callable) -> dict[str, float]:
    """Milliseconds of each part in one forward pass."""
    marks: dict[str, list[Any]] = {name: [] for name, _ in model.named_children()}

    def note(name: str, *call: Any) -> None:
        marks[name].append(clock())

    handles: list[Any] = []
    for name, part in model.named_children():
        handles.append(part.register_forward_pre_hook(partial(note, name)))
        handles.append(part.register_forward_hook(partial(note, name)))
    sync()
    with torch.no_grad():
        model(x)
    sync()
    for handle in handles:
        handle.remove()
    return {name: between(*pair) for name, pair in marks.items()}


def finite_cost(model: nn.Module, x: torch.Tensor, rounds: int, sync: Callable) -> dict[str, float]:
    """Milliseconds of a training step, plain and under `finite`."""
    labels = torch.zeros(len(x), dtype=torch.long, device=x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    def looked_at() -> None:
        with finite(model):
            step()

    found: dict[Callable, list[float]] = {step: [], looked_at: []}
    for _ in range(WARM_UP + rounds):
        for way in found:
            sync()
            begin = time.perf_counter()
            way()
            sync()
            found[way].append(between(begin, time.perf_counter()))
    plain, looked = (statistics.median(times[WARM_UP:]) for times in found.values())
    return {"batch": len(x), "plain_ms": plain, "finite_ms": looked, "ratio": looked / plain}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    cuda = given.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        print("gpu_layer_times: no CUDA device here; nothing was measured", file=sys.stderr)
        return 1
    sync: Callable = torch.cuda.synchronize if cuda else lambda: None
    clocks: dict[str, Callable] = {"wall": time.perf_counter}
    clocks |= {"synchronized": synchronized, "events": event} if cuda else {}
    name, size, batches = ("resnet50", 224, (64, 4)) if cuda else ("resnet18", 32, (2,))
    model = network(name, torch.device(given.device))
    x = torch.randn(batches[0], 3, size, size, device=given.device)
    seen: dict[str, list[dict[str, float]]] = {clock: [] for clock in clocks}
    for _ in range(WARM_UP + given.rounds):
        for which, clock in clocks.items():
            seen[which].append(layer_times(model, x, clock, sync))
    layers = {
        part: {which: statistics.median(times[part] for times in seen[which][WARM_UP:]) for which in clocks}
        for part, _ in model.named_children()
    }
    task = f"{name}, batch {len(x)}, {size} x {size}, float32, forward"
    result = {"machine": machine(x.device), "task": task, "rounds": given.rounds, "layers_ms": layers}
    # A training step does not read in the middle.
    result["finite"] = [finite_cost(model[:-1], x[:batch], given.rounds, sync) for batch in batches]
    text, out = json.dumps(result, indent=1), given.out or (RESULT if cuda else None)
    if out is not None:
        write(out, text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
