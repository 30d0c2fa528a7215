"""PyTorch's private names: hooklab works where any one of them is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

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
    with Offload(model, to="disk", min_bytes=0) as offload:
        model(x).sum().backward()
    assert len(lines) == len(f) == len(stats) == 3, lines
    assert f["2"].grad.tolist() == [[1.0]] * 4
    assert log["weight"].shape == (2, 3)
    assert len(events.phase("forward")) > 6
    assert saved.total_bytes > 0
    assert offload.moved_bytes > 0
    try:
        model(torch.ones(2, 5))
    except RuntimeError:
        pass
    assert "fail" not in "".join(lines)
    with verbose(model, write=lines.append), __import__("contextlib").suppress(RuntimeError):
        model(torch.ones(2, 5))
    assert "failed" in lines[-1], lines
assert not hooks_on(model)
print("works")
"""
NAMES = [
    ("torch._C", "_current_graph_task_id"),
    ("torch._C", "_current_autograd_node"),
    ("torch._C._autograd", "_top_saved_tensors_default_hooks"),
]


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[name for _, name in NAMES])
def test_hooklab_is_imported_and_works_without(owner, name):
    code = USE.format(owner=owner, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "works", done.stderr[-2000:]


def test_the_names_that_are_removed_here_are_those_that_the_room_uses():
    source = Path(torch_private.__file__).read_text(encoding="utf-8")
    of_c = {part.split('"')[1] for part in source.split("getattr(torch._C")[1:]}
    assert of_c == {name for _, name in NAMES}


def test_a_pytorch_that_calls_modules_in_other_frames_names_no_calls(monkeypatch):
    with pytest.raises(RuntimeError) as raised:
        nn.Linear(2, 2)(torch.ones(3))
    error = raised.value
    assert [type(module) for module, *_ in torch_private.running_calls(error)] == [nn.Linear]
    monkeypatch.delattr(nn.Module, "_call_impl")
    assert list(torch_private.running_calls(error)) == []


def test_outside_backward_nothing_recomputes():
    assert torch_private.graph_task() == torch_private.NO_BACKWARD
    assert not torch_private.recomputing()
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(torch_private.recomputing()))
    x.sum().backward()
    assert seen == [True]
