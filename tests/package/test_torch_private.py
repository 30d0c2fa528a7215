"""PyTorch's private names: hooklab works where any one of them is missing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooklab._support import torch_private

# Every call that can do without; a checkpoint itself needs the number of the backward.
USE = """
import torch, warnings
from torch import nn
owner, name = {owner}, {name!r}
assert hasattr(owner, name), name
delattr(owner, name)
import hooklab
from hooklab import *
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), torch.ones(4, 3)
with no_leftovers(model):
    lines = []
    with verbose(model, write=lines.append), clip_gradients(model, -1, 1), watch(weight=model[0].weight) as log:
        with features(model, "**", keep=with_grad) as f, layer_statistics(model, "**", of="grad_output") as stats:
            with trace(model) as events, saved_tensors(model) as saved:
                model(x).sum().backward()
    with finite(model):
        model(x).sum().backward()
        try:
            (model(x).sum() * 0).sqrt().backward()
        except NotFinite as error:
            lines.append(error.phase)
    assert lines.pop() == "backward"
    with Offload(model, to="disk", min_bytes=0) as offload:
        loss = model(x).sum()
    loss.backward()
    assert len(lines) == len(f) == len(stats) == 3, lines
    assert f["2"].grad.tolist() == [[1.0]] * 4
    assert log["weight"].shape == (2, 3)
    assert len(events.phase("forward")) > 6
    assert saved.total_bytes > 0
    assert offload.moved_bytes > 0
    with verbose(model, write=lines.append), __import__("contextlib").suppress(RuntimeError):
        model(torch.ones(2, 5))
    assert "failed" in lines[-1], lines
assert not hooks_on(model)
print("works")
"""
NAMES = [
    ("torch._C", "_current_graph_task_id"),
    ("torch._C", "_current_autograd_node"),
    ("torch._C", "_dynamo"),
    ("torch._C", "_functorch"),
    ("torch._C", "_len_torch_dispatch_stack"),
    ("torch._C._functorch", "is_functorch_wrapped_tensor"),
    ("torch._C._autograd", "_top_saved_tensors_default_hooks"),
    ("torch._C._dynamo.eval_frame", "set_code_exec_strategy"),
    ("torch.autograd.graph", "queue_callback"),
    ("torch.nn.utils.parametrize", "_cache_enabled"),
    ("torch.utils", "_python_dispatch"),
    ("torch.utils._python_dispatch", "_disable_current_modes"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch", "_subclasses"),
    ("torch._subclasses", "FakeTensor"),
]
# PyTorch's own modules and tensors do not work without these; where they mean something else is tested below.
OF_MODULES_AND_TENSORS = {"_backward_hooks", "_call_impl", "_compiled_call_impl"}


@pytest.mark.long  # a process for each name
@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[name for _, name in NAMES])
def test_hooklab_is_imported_and_works_without(owner, name):
    code = USE.format(owner=owner, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "works", done.stderr[-2000:]


def test_the_names_that_are_removed_here_are_those_that_the_room_asks_for():
    source = Path(torch_private.__file__).read_text(encoding="utf-8")
    asked = set(re.findall(r'"(\w+)", (?:None|0|lambda: NO_BACKWARD)\s*\)', source)) - {
        "forward",
        "eval_frame",
        "__code__",
    }
    assert asked | {"set_code_exec_strategy"} == {name for _, name in NAMES} | OF_MODULES_AND_TENSORS


def test_a_pytorch_that_calls_modules_in_other_frames_names_no_calls(monkeypatch):
    with pytest.raises(RuntimeError) as raised:
        nn.Linear(2, 2)(torch.ones(3))
    error = raised.value
    assert [type(module) for module, *_ in torch_private.running_calls(error)] == [nn.Linear]
    monkeypatch.delattr(nn.Module, "_call_impl")
    assert list(torch_private.running_calls(error)) == []


def test_a_checkpoint_and_what_it_saves_are_known_by_their_names():
    hooks, x = [], torch.ones(2, requires_grad=True)

    def inside(x):
        hooks.extend(torch_private.outer_hooks())
        return x.exp()

    checkpoint(inside, x, use_reentrant=False)
    assert [torch_private.is_checkpoint_hook(hook) for hook in (*hooks, inside)] == [True, True, False]
    nodes = x.exp().grad_fn, (x + 1).grad_fn
    assert [torch_private.saves_something(node) for node in nodes] == [True, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_either_kind_is_known_while_it_runs(reentrant):
    told, x = [], torch.ones(2, requires_grad=True)

    def inside(x):
        told.append(torch_private.under_checkpoint())
        return x.exp()

    checkpoint(inside, x, use_reentrant=reentrant).sum().backward()
    inside(x)
    assert told == [True, True, False]


def test_outside_backward_nothing_recomputes():
    assert torch_private.graph_task() == torch_private.NO_BACKWARD
    assert not torch_private.recomputing()
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(torch_private.recomputing()))
    x.sum().backward()
    assert seen == [True]
