"""What becomes of a hook where the model is compiled, checkpointed, traced, copied or shared: one probe a column.

A probe hangs one kind of hook, as its row of the cheat sheet registers it, does one thing to the model, and runs a
training step. What it returns is how often the hook has fired in that step.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from parity import Kind, kinds
from torch import nn
from torch.utils.checkpoint import checkpoint

FIRED: list[int] = []


# A hook that is pickled has to be found again by its name, so these are functions of this file.
def count(*call):
    FIRED.append(1)


def count_and_pass(value):
    FIRED.append(1)
    return value


class Trial:
    """A small model with its optimizer, and one kind of hook that counts how often it fires."""

    def __init__(self, kind: Kind):
        torch.manual_seed(0)
        self.kind = kind
        self.model: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
        self.around: Any = nullcontext()
        self.of_each_node, self.in_tracing = False, 0

    @cached_property
    def optimizer(self) -> Any:
        # Made when it is needed: fully_shard puts other parameters into the model.
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def hang(self, *, at: str = "0.0") -> None:
        """Hang the hook; a Node lives for one forward pass, so its hook is hung on the result of each one to come."""
        if self.kind.call.startswith("node."):
            self.of_each_node = True
            return
        part = self.model.get_submodule
        weight, other = part("0.0").weight, part("1").weight
        names = {"module": part(at), "tensor": weight, "parameter": weight, "tensors": [weight, other], "hook": count}
        names |= {"graph": torch.autograd.graph, "optimizer": self.optimizer}
        names |= {"pack": lambda tensor: tensor, "unpack": lambda packed: packed} | {self.kind.en: count_and_pass}
        registered = eval(self.kind.call, names)
        # The handles of the others can be entered, too: at the end of the block they would take the hook off.
        if isinstance(registered, torch.autograd.graph.saved_tensors_hooks):
            self.around = registered

    def trace(self, tracer: Callable) -> Any:
        """What `tracer` makes of the model; how often the hook fires meanwhile is noted."""
        FIRED.clear()
        with self.around:
            traced = tracer(self.model)
        self.in_tracing = len(FIRED)
        return traced

    def step(self, forward: Callable, update: Callable | None = None) -> int | None:
        """Run one training step: how often has the hook fired? None where there is nothing to hang it on."""
        FIRED.clear()
        with self.around:
            output = forward(torch.ones(3, 2, requires_grad=True))
        if self.of_each_node:
            if output.grad_fn is None:
                return None
            eval(self.kind.call, {"node": output.grad_fn, "hook": count})
        if output.requires_grad:
            output.sum().backward()
        (update or self.optimizer.step)()
        return len(FIRED)


def eager(trial):
    trial.hang()
    trial.step(trial.model)
    return trial.step(trial.model)


def compiled(trial, hung):
    torch.compiler.reset()
    forward = torch.compile(trial.model, backend="aot_eager")
    # The update is compiled where it has a hook; elsewhere it would only cost time.
    of_update = trial.kind.call.startswith("optimizer.")
    update = torch.compile(trial.optimizer.step, backend="aot_eager") if of_update else None
    if hung == "before":
        trial.hang()
    trial.step(forward, update)
    if hung == "after":
        trial.hang()
    return trial.step(forward, update)


def checkpointed(trial, use_reentrant):
    trial.hang()
    return trial.step(partial(checkpoint, trial.model, use_reentrant=use_reentrant))


def traced(trial, at):
    trial.hang(at=at)
    return trial.step(trial.trace(torch.fx.symbolic_trace))


def exported(trial, hung):
    def export(model):
        return torch.export.export(model, (torch.ones(3, 2, requires_grad=True),)).module()

    if hung == "before":
        trial.hang()
        return trial.step(trial.trace(export))
    trial.model = export(trial.model)
    trial.hang()
    return trial.step(trial.model)


def functional(trial):
    trial.hang()
    values = {name: value.detach().clone().requires_grad_() for name, value in trial.model.named_parameters()}
    return trial.step(lambda x: torch.func.functional_call(trial.model, values, (x,)))


def vmapped(trial):
    trial.hang()
    return trial.step(torch.vmap(trial.model))


def per_sample(trial):
    trial.hang()
    values = {name: value.detach() for name, value in trial.model.named_parameters()}
    grads = torch.func.grad(lambda values, x: torch.func.functional_call(trial.model, values, (x,)).sum())
    return trial.step(lambda x: torch.vmap(grads, (None, 0))(values, x.detach())["1.weight"])


def copied(trial, by):
    trial.hang()
    hooked = [trial.model, trial.optimizer]
    if trial.of_each_node:
        hooked.append(trial.model(torch.ones(3, 2)).grad_fn)
    trial.model, trial.optimizer, *_ = by(hooked)
    return trial.step(trial.model)


def parallel(trial, hung):
    if hung == "before":
        trial.hang()
    wrapped = nn.parallel.DistributedDataParallel(trial.model)
    if hung == "after":
        trial.hang()
    trial.step(wrapped)
    return trial.step(wrapped)


def sharded(trial, hung):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if hung == "before":
        trial.hang()
    for unit in (trial.model[0], trial.model):
        fully_shard(unit, mesh=mesh)
    if hung == "after":
        trial.hang()
    trial.step(trial.model)
    return trial.step(trial.model)


Probe = Callable[[Trial], int | None]
PROBES: dict[str, Probe] = {
    "eager": eager,
    "compile_before": partial(compiled, hung="before"),
    "compile_after": partial(compiled, hung="after"),
    "export_before": partial(exported, hung="before"),
    "export_after": partial(exported, hung="after"),
    "fx_layer": partial(traced, at="0.0"),
    "fx_block": partial(traced, at="0"),
    "checkpoint": partial(checkpointed, use_reentrant=False),
    "checkpoint_reentrant": partial(checkpointed, use_reentrant=True),
    "functional_call": functional,
    "vmap": vmapped,
    "vmap_grad": per_sample,
    "deepcopy": partial(copied, by=copy.deepcopy),
    "pickle": partial(copied, by=lambda hooked: pickle.loads(pickle.dumps(hooked))),
}
TWO_PROCESSES: dict[str, Probe] = {
    "ddp_before": partial(parallel, hung="before"),
    "ddp_after": partial(parallel, hung="after"),
    "fsdp_before": partial(sharded, hung="before"),
    "fsdp_after": partial(sharded, hung="after"),
}


def observe(probe: Probe, kind: Kind) -> str:
    """What has become of this kind of hook, in a few words."""
    trial = Trial(kind)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            times = probe(trial)
    except Exception as error:
        return f"refused {type(error).__name__}"
    if times is None:
        return "not applicable"
    also = f", {trial.in_tracing} in tracing" if trial.in_tracing else ""
    return (f"fires {times}" if times else "silent") + also


def column(probe: Probe) -> dict[str, str]:
    return {kind.en: observe(probe, kind) for kind in kinds()}
