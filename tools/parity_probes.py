"""What becomes of a hook where the model is compiled, checkpointed, traced, copied or shared: one probe a column.

A probe hangs one kind of hook, as its row of the cheat sheet registers it, does one thing to the model, and runs a
training step. What it returns is how often the hook has fired in that step.
"""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

FIRED: list[int] = []


# A hook that is pickled has to be found again by its name, so these are functions of this file.
def count(*call):
    FIRED.append(1)


def count_and_pass(value):
    FIRED.append(1)
    return value


def just_pass(value):
    return value


class NoNode(Exception):
    """The result has no Node on which a hook could hang."""


class Trial:
    """A small model with its optimizer, and one kind of hook that counts how often it fires."""

    def __init__(self, row: dict):
        torch.manual_seed(0)
        self.call, self.kind, self.is_context = row["call"], row["name"]["en"], row.get("comes_off") == "with"
        self.model: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
        self.around: Any = nullcontext()
        self.optimizer: Any = None
        self.of_each_node = False
        self.in_tracing = 0

    def hang(self, *, at: str = "0.0") -> None:
        """Hang the hook; a Node lives for one forward pass, so its hook is hung on the result of each one to come."""
        if self.call.startswith("node."):
            self.of_each_node = True
        elif self.is_context:
            self.around = eval(self.call, self._names(at))
        else:
            eval(self.call, self._names(at))

    def make(self, maker: Callable) -> Any:
        """What `maker` makes of the model; how often the hook fires meanwhile is noted."""
        FIRED.clear()
        with self.around:
            made = maker(self.model)
        self.in_tracing = len(FIRED)
        return made

    def step(self, forward: Callable, update: Callable | None = None) -> int:
        """Run one training step: how often has the hook fired?"""
        FIRED.clear()
        with self.around:
            output = forward(torch.ones(3, 2, requires_grad=True))
        if self.of_each_node:
            if output.grad_fn is None:
                raise NoNode
            eval(self.call, {"node": output.grad_fn, "hook": count})
        if output.requires_grad:
            output.sum().backward()
        self.with_optimizer()
        (update or self.optimizer.step)()
        return len(FIRED)

    def with_optimizer(self) -> Any:
        # Made late: fully_shard puts other parameters into the model.
        self.optimizer = self.optimizer or torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer

    def _names(self, at: str) -> dict[str, Any]:
        weight = self.model.get_submodule("0.0").weight
        names = {"module": self.model.get_submodule(at), "tensor": weight, "parameter": weight, "hook": count}
        names |= {"graph": torch.autograd.graph, "tensors": [weight, self.model.get_submodule("1").weight]}
        names |= {name: count_and_pass if name == self.kind else just_pass for name in ("pack", "unpack")}
        if self.call.startswith("optimizer."):
            names["optimizer"] = self.with_optimizer()
        return names


def eager(trial):
    trial.hang()
    trial.step(trial.model)
    return trial.step(trial.model)


def compiled(trial, hung):
    torch._dynamo.reset()
    forward = torch.compile(trial.model, backend="aot_eager")
    # The update is compiled where it has a hook; elsewhere it would only cost time.
    of_update = trial.call.startswith("optimizer.")
    update = torch.compile(trial.with_optimizer().step, backend="aot_eager") if of_update else None
    if hung == "before":
        trial.hang()
    trial.step(forward, update)
    if hung == "after":
        trial.hang()
    try:
        return trial.step(forward, update)
    finally:
        torch._dynamo.reset()


def checkpointed(trial, use_reentrant):
    trial.hang()
    return trial.step(partial(checkpoint, trial.model, use_reentrant=use_reentrant))


def traced(trial, at):
    trial.hang(at=at)
    return trial.step(trial.make(torch.fx.symbolic_trace))


def export(model):
    return torch.export.export(model, (torch.ones(3, 2, requires_grad=True),)).module()


def exported(trial, hung):
    if hung == "before":
        trial.hang()
        return trial.step(trial.make(export))
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
    hooked = [trial.model, trial.with_optimizer()]
    if trial.of_each_node:
        hooked.append(trial.model(torch.ones(3, 2)).grad_fn)
    trial.model, trial.optimizer, *_ = by(hooked)
    return trial.step(trial.model)


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


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


PROBES: dict[str, Callable[[Trial], int]] = {
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
    "pickle": partial(copied, by=through_pickle),
}
TWO_PROCESSES: dict[str, Callable[[Trial], int]] = {
    "ddp_before": partial(parallel, hung="before"),
    "ddp_after": partial(parallel, hung="after"),
    "fsdp_before": partial(sharded, hung="before"),
    "fsdp_after": partial(sharded, hung="after"),
}


def observe(probe: Callable[[Trial], int], row: dict) -> str:
    """What has become of this kind of hook, in a few words."""
    trial = Trial(row)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            times = probe(trial)
    except NoNode:
        return "not applicable"
    except Exception as error:
        return f"refused {type(error).__name__}"
    also = f", {trial.in_tracing} in tracing" if trial.in_tracing else ""
    return (f"fires {times}" if times else "silent") + also


def column(probe: Callable[[Trial], int], rows: Iterable[dict]) -> dict[str, str]:
    return {row["name"]["en"]: observe(probe, row) for row in rows}
