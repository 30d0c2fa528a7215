"""The headline task on a GPU: ResNet-152, batch 256: peak memory against step time, for every strategy.

    uv run --with torchtune==0.6.1 --with torchao==0.15.0 python tests/benchmarks/gpu_offload.py

writes hooklab/course/data/gpu_offload.json, which notebook 36 plots. `--with` brings torchtune into an environment that
uv throws away; without it that rival is left out, and with another torchao its import fails. Goal: at most 6.5 GB at
no more than 1.5x the stock step, and at every memory budget faster than each of the others.

`segments 1/2/6/3`: `checkpoint_segments` with so many blocks per segment in layer1 to layer4, 0: not in the plan.
`regrouped 1/3/4/0`: the same modules in other Sequentials, see `Regrouped`. `SGD in backward`: each parameter is
updated by a hook, as soon as its gradient is complete, and the gradient is freed.

Every strategy runs in every round, in turn; figures are medians. The first step of a round stands apart: there
memory is pinned, since what the strategies before had pinned is released; `first_seconds` is the median over rounds
(of two the lower). What fails is recorded, and the others go on; the file is written anew after every round. The exit
code is 1 if anything failed, or if gradients differ in a bit (pinned, `save_on_cpu` gives weights back with other strides).

A round pins 300 GB in all, which takes most of the time: on an H200 two rounds of three `--steps` each took nine
minutes. `--only 'stock|segments'` runs those whose names match, and stock. The
host needs 100 GB of memory free. `--device cpu` tries the logic on a small model without a GPU. Neither of the two
writes a file without `--out`.
"""

import argparse
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hooklab import Offload, checkpoint_segments
from hooklab.stores import PinnedMemory

RESULT = Path(__file__).parents[2] / "hooklab" / "course" / "data" / "gpu_offload.json"
GB, MIB = 10**9, 2**20


class Regrouped(nn.Sequential):
    """The modules of a ResNet in Sequentials that a plan can name: the stem too.

    `wide` holds what has the largest outputs: one segment for the stem, each block of layer1, and the first of layer2.
    """

    def __init__(self, model: Any):
        stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
        wide = nn.Sequential(stem, *model.layer1, model.layer2[0])
        head = nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)
        rest = {"layer2": model.layer2[1:], "layer3": model.layer3, "layer4": model.layer4, "head": head}
        super().__init__(OrderedDict(wide=wide, **rest))


class Task:
    """One model, one batch, one step. `unit`: bytes that `keep 1 GB` stands for; `store` makes a store."""

    def __init__(
        self,
        name: str,
        batch: int,
        size: int,
        device: str,
        store: Callable[[], Any] = PinnedMemory,
        unit: int = GB,
    ):
        self.unit, self.store = unit, store
        torch.manual_seed(0)
        self.device, self.name, self.batch, self.size = torch.device(device), name, batch, size
        self.model = getattr(torchvision.models, name)(weights=None).to(self.device)
        self.regrouped = Regrouped(self.model)
        self.net: nn.Module = self.model  # one of the two
        self.in_backward = False
        self.x = torch.randn(batch, 3, size, size, device=self.device)
        self.labels = torch.randint(0, 1000, (batch,), device=self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        # Of one tensor there is no list to make kernels for: without `foreach` the host does less.
        self.one_each = {one: torch.optim.SGD([one], lr=1e-3, foreach=False) for one in self.model.parameters()}

    def step(self, context: Any, update: bool = True) -> int | None:
        """Forward in that context, backward, SGD; the bytes that were moved to the host, None if nobody knows."""
        self.optimizer.zero_grad(set_to_none=True)
        with context:
            loss = nn.functional.cross_entropy(self.net(self.x), self.labels)
        with self.updating() if update and self.in_backward else nullcontext():
            loss.backward()
        if update:
            self.optimizer.step()  # those that still have a gradient
        return getattr(context, "moved_bytes", 0)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """SGD in backward."""

        def update(parameter: torch.Tensor) -> None:
            self.one_each[parameter].step()
            parameter.grad = None

        handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in self.one_each]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, context: Any) -> "Timed":
        self.sync()
        before, begin = self.allocations(), time.perf_counter()
        moved = self.step(context)
        given = time.perf_counter() - begin
        self.sync()
        seconds, now = time.perf_counter() - begin, self.allocations()
        return Timed(seconds, given, None if now is None or before is None else now - before, moved)

    def allocations(self) -> int | None:
        """How often the allocator has asked CUDA for memory so far; None if nobody counts."""
        return torch.cuda.memory_stats().get("num_device_alloc") if self.device.type == "cuda" else None


class Timed(NamedTuple):
    """One step; `host_seconds` and `allocations` help to find out why it was slow."""

    seconds: float
    host_seconds: float  # until the host had given the GPU all its work
    allocations: int | None  # how often the allocator asked CUDA for memory
    moved_bytes: int | None


# Begun once in every round, with the task, it gives a context for the forward of each step.
Begin = Callable[[Task], Callable[[], Any]]


class Strategy(NamedTuple):
    begin: Begin = lambda task: nullcontext
    plan: dict[str, int] | None = None  # of checkpoint_segments, around forward and backward
    regrouped: bool = False  # which names the plan means
    in_backward: bool = False
    ours: bool = False
    settings: dict[str, int] | None = None  # of Offload, for the file

    @contextmanager
    def around(self, task: Task) -> Iterator[None]:
        task.net = task.regrouped if self.regrouped else task.model
        task.in_backward = self.in_backward
        with checkpoint_segments(task.net, self.plan) if self.plan else nullcontext():
            yield


@contextmanager
def blocks_checkpointed(task: Task) -> Iterator[None]:
    """Every block by `torch.utils.checkpoint`, as one would write it without hooklab; regrouped, the stem is one."""
    names = ("wide", "layer1", "layer2", "layer3", "layer4")
    blocks = [block for name in names for block in getattr(task.net, name, ())]
    for block in blocks:
        whole = block.forward
        block.forward = lambda x, whole=whole: checkpoint(whole, x, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class SaveOnCPU(save_on_cpu):
    """PyTorch's own; it copies every saved tensor, as often as it is saved, parameters too. Here they are counted."""

    def __init__(self, pin_memory: bool):
        super().__init__(pin_memory=pin_memory)
        self.moved_bytes, copy = 0, self.pack_hook

        def pack(tensor: torch.Tensor) -> Any:
            self.moved_bytes += tensor.nbytes
            return copy(tensor)

        self.pack_hook = pack


def offload(keep: int, **options: int) -> Strategy:
    """`keep` in GB; of the others `in_flight` too, `prefetch` in MiB."""

    def begin(task: Task) -> Callable[[], Any]:
        # A store of its own for every round: what it has pinned goes with it.
        store, small = task.store(), min(MIB, task.unit // 100)
        if "in_flight" in options:
            store.in_flight = options["in_flight"] * task.unit
        given = {"prefetch": options["prefetch"] * MIB} if "prefetch" in options else {}
        return lambda: Offload(task.model, to=store, keep=keep * task.unit, min_bytes=small, **given)

    return Strategy(begin, ours=True, settings={"keep": keep, **options})


def segments(per_layer: str, regrouped: bool = False, how: Strategy | None = None) -> Strategy:
    """`1/2/0/3`: blocks per segment; 0: not in the plan."""
    names = ("wide" if regrouped else "layer1", "layer2", "layer3", "layer4")
    plan = {name: int(n) for name, n in zip(names, per_layer.split("/"), strict=True) if n != "0"}
    return (how or Strategy())._replace(plan=plan, regrouped=regrouped, ours=True)


def torchtune_offloading() -> Begin:
    """As its recipes use it: one object for all steps."""
    from torchtune.training import OffloadActivations

    class Counted(OffloadActivations):
        def __exit__(self, *error: object) -> None:
            # Forward has ended: every copy is made, and none used up. Of another version the count is unknown.
            tracker = getattr(self, "tracker", None)
            self.moved_bytes = None
            if tracker is not None:
                self.moved_bytes = sum(kept.nbytes for kept, moved in tracker.values() if moved)
            super().__exit__(*error)

    def begin(task: Task) -> Callable[[], Any]:
        theirs = Counted(use_pin_memory=True, use_streams=True)
        return lambda: theirs

    return begin


def strategies(cuda: bool, only: str = "") -> tuple[dict[str, Strategy], dict[str, str]]:
    """By name; and why others are left out. `only`: a pattern; stock runs always, all are measured against it."""
    by_hand = Strategy(lambda task: lambda: blocks_checkpointed(task))
    found: dict[str, Strategy] = {
        "stock": Strategy(),
        "save_on_cpu, pinned": Strategy(lambda task: lambda: SaveOnCPU(pin_memory=cuda)),
        "checkpoint, every block": by_hand,
        "checkpoint, stem and every block": by_hand._replace(regrouped=True),
        "segments 1/2/6/3": segments("1/2/6/3"),
        "segments 2/3/3/0": segments("2/3/3/0"),
        "regrouped 1/3/4/0": segments("1/3/4/0", True),
        "regrouped 1/0/3/0": segments("1/0/3/0", True),
    }
    for keep in (0, 15, 30) if cuda else (0, 20):
        found[f"Offload, keep {keep} GB"] = offload(keep)
    for keep in (0, 2):
        found[f"segments 1/2/6/3 + Offload, keep {keep} GB"] = segments("1/2/6/3", False, offload(keep))
    goal = segments("1/3/4/0", True, offload(2, in_flight=2))
    least = segments("0/1/2/1", True, offload(0, prefetch=0))
    found["regrouped 1/3/4/0 + Offload, keep 2 GB"] = goal
    found["regrouped 1/3/4/0 + Offload, keep 2 GB, SGD in backward"] = goal._replace(in_backward=True)
    found["regrouped 0/1/2/1 + Offload, keep 0 GB, SGD in backward"] = least._replace(in_backward=True)
    left_out = {}
    if cuda:
        name = "torchtune OffloadActivations"
        try:
            found[name] = Strategy(torchtune_offloading())
        except Exception as error:  # what its imports raise depends on the versions of three packages
            left_out[name] = reason(error)
            print(f"  {name} is left out: {left_out[name]}", file=sys.stderr)
    unwanted = [name for name in found if name != "stock" and not re.search(only, name)]
    left_out |= dict.fromkeys(unwanted, f"does not match --only {only}")
    return {name: strategy for name, strategy in found.items() if name not in unwanted}, left_out


def reason(error: Exception) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def attempt(
    name: str, strategy: Strategy, task: Task, failed: dict[str, str], work: Callable[..., Any], *rest: Any
) -> Any:
    """One contender's turn. An error is recorded; afterwards nothing that it has left takes memory."""
    result = None
    try:
        with strategy.around(task):
            result = work(task, strategy.begin, *rest)
    except Exception as error:
        failed[name] = reason(error)
        print(f"  {name} failed: {failed[name]}", file=sys.stderr, flush=True)
    with suppress(RuntimeError):  # after some errors every call of CUDA raises
        release(task)  # only here: while the error is handled, its traceback holds what the step has made
    return result


def release(task: Task) -> None:
    """Give back what PyTorch keeps for later, pinned memory of the host too: else only the first would have to pin."""
    task.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if task.device.type != "cuda":
        return
    task.sync()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if hasattr(torch.accelerator, "empty_host_cache"):  # not in PyTorch 2.11
        torch.accelerator.empty_host_cache()
    elif hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def gradients_agree(task: Task, found: dict[str, Strategy], failed: dict[str, str]) -> dict[str, bool]:
    """Against stock, bit for bit, with deterministic algorithms; the model is put back each time.

    False also for what should have moved something, and has moved nothing.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    state = {key: value.clone() for key, value in task.model.state_dict().items()}
    expected, agree = [], {}
    for name, strategy in found.items():
        attempted = attempt(name, strategy, task, failed, one_step, state)
        if attempted is not None:
            moved, gradients = attempted
            expected = gradients if name == "stock" else expected
            equal = len(expected) > 0 and all(map(torch.equal, expected, gradients))
            agree[name] = equal and (moved != 0 or not moves(name))
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = cudnn
    return agree


def one_step(task: Task, begin: Begin, state: dict[str, torch.Tensor]) -> tuple[int | None, list[torch.Tensor]]:
    task.model.load_state_dict(state)
    moved = task.step(begin(task)(), update=False)
    return moved, [parameter.grad.clone() for parameter in task.model.parameters()]


def moves(name: str) -> bool:
    return any(word in name for word in ("Offload", "save_on_cpu"))


def measure(
    task: Task, found: dict[str, Strategy], rounds: int, steps: int, failed: dict[str, str]
) -> Iterator[list[dict[str, Any]]]:
    """After every round the figures so far, of those that have not failed."""
    rows: dict[str, dict[str, Any]] = {}
    gc.collect()
    gc.freeze()  # to the end of the process: the collections between steps look at what has been made since
    for _ in range(rounds):
        for name in [name for name in found if name not in failed]:
            row = rows.setdefault(name, {"name": name})
            attempt(name, found[name], task, failed, turn, steps, row)
        yield [finished(row, found[name]) for name, row in rows.items() if name not in failed]


def turn(task: Task, begin: Begin, steps: int, row: dict[str, Any]) -> None:
    context = begin(task)
    # Within a step the collector would stop it for longer than the GPU has been given work for.
    gc.disable()
    try:
        gc.collect()
        row.setdefault("first", []).append(task.timed(context()).seconds)
        gc.collect()
        if task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            row.setdefault("steps", []).append(task.timed(context()))
            gc.collect()  # what a step leaves behind does not count in the next
    finally:
        gc.enable()
    peaks(task, row)
    print(
        f"  {row['name']:57} {statistics.median(step.seconds for step in row['steps']):8.3f} s",
        file=sys.stderr,
        flush=True,
    )


def peaks(task: Task, row: dict[str, Any]) -> None:
    if task.device.type == "cuda":
        row.setdefault("peaks", []).append(torch.cuda.max_memory_allocated())
        row.setdefault("reserved", []).append(torch.cuda.max_memory_reserved())


def finished(row: dict[str, Any], strategy: Strategy) -> dict[str, Any]:
    seconds, host_seconds, allocations, moved = zip(*row["steps"], strict=True)
    return {
        "name": row["name"],
        "ours": strategy.ours,
        "plan": strategy.plan,
        "settings": strategy.settings,
        "first_seconds": statistics.median_low(row["first"]),
        "moved_bytes": moved[-1],
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "step_seconds": seconds,
        "step_host_seconds": host_seconds,
        "step_allocations": allocations,
        "peak_allocated": max(row.get("peaks", ()), default=None),
        "peak_reserved": max(row.get("reserved", ()), default=None),
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
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": driver(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "tf32": f"cudnn {torch.backends.cudnn.allow_tf32}, matmul {torch.backends.cuda.matmul.allow_tf32}",
        }
    return found


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError):  # there is no such program
        answer = subprocess.run(asked, capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split("\n")[0]
    return "unknown"


def verdict(runs: list[dict[str, Any]], missing: list[str]) -> dict[str, Any]:
    """The goal, and whether any of the others is as small and faster than the best of ours at its memory."""
    seconds = {run["name"]: run["seconds"] for run in runs}
    ours = [run for run in runs if run["ours"]]
    others = [run for run in runs if run not in ours and run["name"] != "stock"]
    limit = 1.5 * seconds.get("stock", 0)
    goal = [run["name"] for run in ours if run["peak_allocated"] <= 6.5 * GB and run["seconds"] <= limit]
    beaten = {}
    for other in others:
        fitting = [run for run in ours if run["peak_allocated"] <= other["peak_allocated"]]
        best = min(fitting, key=lambda run: run["seconds"], default=None)
        beaten[other["name"]] = best is not None and best["seconds"] < other["seconds"]
    return {
        "6.5 GB at 1.5x reached by": goal,
        "faster at no more memory than": beaten,
        "not compared": missing,
    }


def run(task: Task, small: Callable[[], Task], rounds: int, steps: int, only: str = "") -> Iterator[dict[str, Any]]:
    """The result so far, after every round. Gradients are compared on a small task, which is gone when memory counts."""
    result: dict[str, Any] = {"machine": machine(task.device)}
    result["task"] = f"{task.name}, batch {task.batch}, {task.size} x {task.size}, float32, SGD"
    result["link"] = link(task.device)
    release(task)
    cuda, failed = task.device.type == "cuda", {}
    found, result["left_out"] = strategies(cuda, only)
    result["failed"] = failed
    result["gradients_bit_equal"] = gradients_agree(small(), found, failed)
    release(task)
    result["steps"] = steps
    for number, runs in enumerate(measure(task, found, rounds, steps, failed), 1):
        result |= {"rounds": number, "runs": runs}
        if cuda:
            result["verdict"] = verdict(runs, [*result["left_out"], *failed])
        yield result


def write(path: Path, text: str) -> None:
    """At once: whoever reads the file sees all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="", help="a pattern; stock runs always")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if min(given.rounds, given.steps) < 1:
        parser.error("at least one round of one step")
    if given.device.startswith("cuda"):
        if not torch.cuda.is_available():
            print("gpu_offload: no CUDA device here; nothing was measured", file=sys.stderr)
            return 1
        task = Task("resnet152", given.batch, 224, given.device)
        small = lambda: Task("resnet50", 4, 96, given.device, unit=10**6)  # noqa: E731 (saves some 35 MB)
        out = given.out or (None if given.only else RESULT)
    else:
        task = Task("resnet18", 2, 32, given.device, Copies, unit=10**4)
        small, out = lambda: task, given.out
    for result in run(task, small, given.rounds, given.steps, given.only):
        text = json.dumps(result, indent=1)
        if out is not None:
            write(out, text + "\n")
    print(text)
    return 0 if all(result["gradients_bit_equal"].values()) and not result["failed"] else 1


class Copies:
    """Where there is no GPU: copies in ordinary memory."""

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def read(self, slot: torch.Tensor) -> torch.Tensor:
        return slot


if __name__ == "__main__":
    sys.exit(main())
