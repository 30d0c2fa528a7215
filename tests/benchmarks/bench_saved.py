"""Saved tensors: what is moved (exact, by counting) and what it costs (ratios), against the sources' ways.

Counted: ResNet-152, batch 2 at 224 x 224, parameters and buffers on neither side. Timed: the meter and Offload
with everything kept on ResNet-50, the disk against one torch.save file per tensor.
"""

import math
import os
import subprocess
import sys
import tempfile
import uuid
from collections import OrderedDict
from contextlib import nullcontext

import torch
from interleaved import in_processes, medians, middle, report
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision.models import resnet50, resnet152

from hooklab import Offload, checkpoint_segments, saved_tensors
from hooklab.stores import Disk

PLAN = {"layer1": 1, "layer2": 2, "layer3": 6, "layer4": 3}
MIB = 2**20


class Counting:
    def write(self, tensor):
        return tensor.clone()

    def read(self, slot):
        return slot


def with_stem(model: nn.Module) -> nn.Sequential:
    """The same modules, and a plan can name the stem too."""
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    head = nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)
    layers = {name: getattr(model, name) for name in PLAN}
    return nn.Sequential(OrderedDict(stem=stem, **layers, head=head))


def moved() -> bool:
    """Bytes that go to the store, as shares of what `save_on_cpu` moves; gradients and buffers bit-equal."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 224, 224)

    def step(*contexts, regrouped=False):
        torch.manual_seed(0)
        model = resnet152(weights=None)
        net = with_stem(model) if regrouped else model
        opened = [context(net) for context in contexts]
        for context in opened:
            context.__enter__()
        loss = net(x).square().sum()
        for context in reversed(opened):
            context.__exit__(None, None, None)
        loss.backward()
        return [p.grad for p in model.parameters()] + list(model.buffers()), opened

    plain, (meter,) = step(saved_tensors)
    stock = meter.total_bytes - sum(one.bytes for one in meter if one.owner)
    unique = meter.unique_bytes - meter.parameter_bytes
    print(f"ResNet-152, batch 2: save_on_cpu moves {stock:,} bytes, {unique:,} of them are unique")
    kept = report("unique bytes / save_on_cpu", unique / stock, 0.67)
    segments = lambda model: checkpoint_segments(model, PLAN)  # noqa: E731
    stem_too = lambda model: checkpoint_segments(model, {"stem": 4, **PLAN})  # noqa: E731
    rows = {
        "Offload": ([lambda model: Offload(model, to=Counting(), min_bytes=0)], 0.67),
        "Offload, default min_bytes": ([lambda model: Offload(model, to=Counting())], 0.67),
        "segments 1/2/6/3 + Offload": ([segments, lambda model: Offload(model, to=Counting())], None),
        "segments 1/2/6/3 + Offload, keep 16 MiB": (
            [segments, lambda model: Offload(model, to=Counting(), keep=16 * MIB)],
            0.09,
        ),
        "the same with the stem, nothing kept": (
            [stem_too, lambda model: Offload(model, to=Counting())],
            0.09,
        ),
    }
    for name, (contexts, budget) in rows.items():
        found, opened = step(*contexts, regrouped=stem_too in contexts)
        equal = all(map(torch.equal, plain, found))
        share = opened[-1].moved_bytes / stock
        line = f"{name}: moved / save_on_cpu"
        if budget is None:
            print(f"{line:60} {share:8.3f} x   (the stem, outside the plan, included)")
        else:
            kept &= report(line, share, budget)
        print(f"  {opened[-1]}; gradients and buffers {'bit-equal' if equal else 'DIFFER'}")
        kept &= equal and opened[-1].moved_bytes > 0
    torch.use_deterministic_algorithms(False)
    return kept


def overhead() -> bool:
    """On ResNet-50, forward and backward."""
    torch.manual_seed(0)
    model, x = resnet50(weights=None), torch.randn(2, 3, 96, 96)

    def step(context=None):
        model.zero_grad()
        if context is None:
            loss = model(x).sum()
        else:
            with context:
                loss = model(x).sum()
        loss.backward()

    seconds = medians(
        {
            "plain": step,
            "identity hooks": lambda: step(saved_tensors_hooks(lambda t: t.detach(), lambda t: t)),
            "saved_tensors": lambda: step(saved_tensors(model)),
            "Offload, all kept": lambda: step(Offload(model, to=Counting(), keep=10**12, min_bytes=0)),
        },
        rounds=40,
        repeat=1,
    )
    print("ResNet-50, 2 x 3 x 96 x 96, forward and backward, one thread")
    print("  " + "   ".join(f"{name} {value * 1e3:.1f} ms" for name, value in seconds.items()))
    first = report("saved_tensors / plain", seconds["saved_tensors"] / seconds["plain"], 1.15)
    return first & report(
        "Offload with everything kept / identity hooks",
        seconds["Offload, all kept"] / seconds["identity hooks"],
        1.25,
    )


def small_layers() -> None:
    """Where the cost per tensor shows: a tiny MLP. Reported, without a budget."""
    torch.manual_seed(0)
    blocks = [block for _ in range(24) for block in (nn.Linear(16, 16), nn.ReLU())]
    model, x = nn.Sequential(*blocks), torch.randn(8, 16)

    def step(context):
        with context:
            loss = model(x).sum()
        loss.backward()

    seconds = medians(
        {
            "identity hooks": lambda: step(saved_tensors_hooks(lambda t: t.detach(), lambda t: t)),
            "saved_tensors": lambda: step(saved_tensors(model)),
            "Offload, all kept": lambda: step(Offload(model, to=Counting(), keep=10**12, min_bytes=0)),
        },
        rounds=40,
        repeat=3,
    )
    print("24 x (Linear, ReLU), forward and backward")
    print("  " + "   ".join(f"{name} {value * 1e6:.0f} us" for name, value in seconds.items()))


class FilePerTensor:
    """The sources' way: an object that owns one `torch.save` file and deletes it."""

    folder = ""

    def __init__(self, tensor):
        self.name = os.path.join(self.folder, str(uuid.uuid4()))
        torch.save(tensor, self.name)

    def load(self):
        return torch.load(self.name, weights_only=True)

    def __del__(self):
        os.remove(self.name)


DISK = (  # name, numbers in a tensor, tensors, rounds, budget, small tensors written before, how many of them stay
    ("1 KiB", 256, 100, 15, 0.1, 0, 0),
    ("1 KiB, 5,000 gaps", 256, 100, 15, 0.1, 10_000, 5_000),
    ("1 MiB", 2**18, 16, 50, 1 / 3, 0, 0),
    # What was written in small pieces stays so in the page cache of Linux, and takes longer to write and read.
    ("1 MiB, where small ones were", 2**18, 16, 50, math.inf, 20_000, 0),
    ("64 MiB", 2**24, 2, 7, 1.0, 0, 0),
)


def time_disk(seed: int) -> dict[str, dict[str, float]]:
    """Seconds to write and read one tensor, by the sources' files and by `Disk`."""
    torch.manual_seed(seed)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        FilePerTensor.folder = folder
        for name, elements, count, rounds, _, before, stay in DISK:
            store, small = Disk(folder), torch.randn(256)
            tensors = [torch.randn(elements) for _ in range(count)]
            staying = [store.write(small) for _ in range(before)][: 2 * stay : 2]  # the others are free again

            def files(tensors=tensors):
                saved = [FilePerTensor(tensor) for tensor in tensors]
                return [one.load() for one in saved][-1]

            def slots(tensors=tensors, store=store):
                saved = [store.write(tensor) for tensor in tensors]
                return [store.read(slot) for slot in saved][-1]

            assert torch.equal(files(), slots())
            seconds = medians({"torch.save files": files, "Disk": slots}, rounds=rounds, repeat=1)
            found[name] = {key: value / count for key, value in seconds.items()}
            assert len(staying) == stay
    return found


def disk() -> bool:
    """Write and read together, per tensor: after training in this process, and in new ones, where other memory is warm."""
    return report_disk("after training", [time_disk(0)]) & report_disk("new processes", in_processes(time_disk, 8))


def report_disk(where: str, runs: list[dict[str, dict[str, float]]]) -> bool:
    kept = True
    for name, _, _, _, budget, *_ in DISK:
        keys = ("torch.save files", "Disk")
        each = (f"{key} {middle([run[name][key] for run in runs])[0] * 1e6:.0f} us" for key in keys)
        print(f"{name}, {where}, write + read: {'   '.join(each)}")
        ratio, error = middle([run[name]["Disk"] / run[name]["torch.save files"] for run in runs])
        known = error if len(runs) > 1 else None
        kept &= report(f"Disk / torch.save files, {name}, {where}", ratio, budget, error=known)
    return kept


def disk_through_hooks() -> None:
    """The same, inside forward and backward: a chain of operations that each save 1 KiB or 1 MiB. Reported, without a budget."""
    with tempfile.TemporaryDirectory() as folder:
        FilePerTensor.folder = folder
        store = Disk(folder)
        for name, elements, length in (("1 KiB", 256, 100), ("1 MiB", 2**18, 16)):
            x = torch.zeros(elements, requires_grad=True)

            def chain(context, x=x, length=length):
                with context:
                    y = x
                    for _ in range(length):
                        y = y.sin()
                y.backward(torch.ones_like(y))

            seconds = medians(
                {
                    "plain": lambda: chain(nullcontext()),
                    "torch.save files": lambda: chain(saved_tensors_hooks(FilePerTensor, FilePerTensor.load)),
                    "Disk": lambda: chain(Offload(to=store, min_bytes=0)),
                },
                rounds=15,
                repeat=1,
            )
            added = {key: value - seconds["plain"] for key, value in seconds.items() if key != "plain"}
            each = "   ".join(f"{key} {value / length * 1e6:.0f} us" for key, value in added.items())
            ratio = added["Disk"] / added["torch.save files"]
            print(f"{name}, what one saved tensor costs in a step: {each}   {ratio:.3f} x")


def peak_memory() -> bool:
    """The most memory that tensors of 32 MiB need on their way to the disk and back, each time in a process of its own.

    Through the store itself it is the tensor that was read. With `Offload` it may not grow with their number: there are
    the gradient that comes and the one that goes, the tensor that was read, and what the operation makes for itself.
    """
    if sys.platform != "linux":
        print("tensors of 32 MiB to the disk and back: peak memory is measured on Linux only")
        return True
    alone, few, many = (_peak(*what) for what in (("store", 24), ("Offload", 6), ("Offload", 48)))
    print(f"24 tensors of 32 MiB to the disk and back: peak memory grows by {alone:.2f} tensors")
    print(f"forward and backward with Offload: by {few:.2f} tensors where 6 are saved, by {many:.2f} where 48 are")
    kept = report("peak memory / one tensor read", alone, 1.25)
    return report("Offload: peak memory of 48 / of 6", many / few, 1.05) & kept


def _peak(what: str, count: int) -> float:
    """By how many tensors the peak grows."""
    script = """
import re, sys, torch
from pathlib import Path
from hooklab import Offload
from hooklab.stores import Disk
what, count = sys.argv[1], int(sys.argv[2])
source = torch.ones(2**23, requires_grad=True)
# Not ru_maxrss: that begins at the peak of the process that has started this one.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
if what == "store":
    store = Disk()
    slots = [store.write(source) for _ in range(count)]
    for slot in reversed(slots):
        assert store.read(slot)[-1] == 1
else:
    with Offload(to="disk") as offload:
        y = source
        for _ in range(count):
            y = y.sin()
    y.sum().backward()
    assert offload.moved_bytes == count * source.nbytes
print((peak() - before) / 1024)
"""
    given = [sys.executable, "-c", script, what, str(count)]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    return float(done.stdout) / 32


def main() -> bool:
    kept = moved()
    kept &= overhead()
    small_layers()
    kept &= disk()
    disk_through_hooks()
    return peak_memory() & kept


if __name__ == "__main__":
    sys.exit(not main())
