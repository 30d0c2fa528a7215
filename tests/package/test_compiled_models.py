"""Module hooks and torch.compile: what is installed before compiling is seen, what comes after is announced.

Mostly the eager backend, without the time that generating code takes.
"""

import subprocess
import sys

import pytest
import torch
from models import mlp
from torch import nn

from hooklab import (
    Offload,
    checkpoint_segments,
    compare,
    features,
    hooks_on,
    layer_statistics,
    no_leftovers,
    patch,
    saved_tensors,
    trace,
    verbose,
    watch,
    with_grad,
)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 2)


@pytest.fixture
def x():
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def test_features_asked_for_before_compiling_are_seen(model, x):
    expected = model[:2](x)
    with features(model, "1") as f:
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            compiled(x)
        assert len(f.calls["1"]) == 1
    assert torch.allclose(f["1"], expected)


def test_a_patch_that_was_there_before_compiling_is_on(model, x):
    expected = model[2](model[1](torch.zeros(3, 5)))
    with patch(model, "0", 0) as p:
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(x), expected)
    assert p.calls == 2


def test_the_compiler_does_not_look_into_our_hooks(model, x, recwarn, monkeypatch):
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    with features(model, "1"), layer_statistics(model, "1"), verbose(model, write=str), saved_tensors(model):
        torch.compile(model, backend="eager")(x)
    assert [str(warning.message) for warning in recwarn] == []


def test_after_the_block_a_compiled_model_records_nothing_more(model, x):
    with features(model, "1") as f, layer_statistics(model, "1") as stats:
        compiled = torch.compile(model, backend="eager")
        compiled(x)
    compiled(x + 1)
    assert torch.allclose(f["1"], model[:2](x))
    assert stats["1"].calls == 1


def test_statistics_asked_for_before_compiling_are_counted(model, x):
    with layer_statistics(model, "*") as stats, layer_statistics(model, "*", of="grad_output") as grads:
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(x).sum().backward()
    assert [figures.calls for figures in stats.values()] == [2, 2, 2]
    assert stats["1"].mean == pytest.approx(model[:2](x).double().mean().item())
    assert [figures.calls for figures in grads.values()] == [2, 2, 2]


def test_lines_asked_for_before_compiling_are_written(model, x):
    lines = []
    with verbose(model, write=lines.append):
        torch.compile(model, backend="eager")(x)
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile", "a part"])
def test_what_comes_after_compiling_is_announced(model, how):
    if how == "torch.compile":
        compiled = torch.compile(model, backend="eager")
    elif how == "a part":
        model[0] = torch.compile(model[0], backend="eager")
        compiled = model
    else:
        model.compile(backend="eager")
        compiled = model
    for call, *value in ((features,), (layer_statistics,), (verbose,), (patch, 0)):
        with pytest.warns(
            UserWarning, match=f"{call.__name__}: this model is compiled.*before torch.compile"
        ) as caught:
            call(compiled, "1", *value).remove()
        assert caught[0].filename == __file__


def test_a_compiled_model_is_compared_uncompiled(model, x, recwarn):
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    rows = compare(compiled, model, x)
    assert [row.a for row in rows] == ["0", "1", "2", ""]
    assert rows.first is None
    assert not recwarn
    model[0].compile(backend="eager")
    with pytest.warns(UserWarning, match="compare: this model is compiled") as caught:
        compare(model, model, x)
    assert caught[0].filename == __file__


def test_with_grad_is_right_in_a_model_compiled_afterwards(model, x):
    hidden = model[:2](x)
    (expected,) = torch.autograd.grad(model[2](hidden).sum(), hidden)
    with features(model, "1", keep=with_grad) as f:
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(x).sum().backward()
            assert torch.equal(f["1"].grad, expected)
            assert torch.equal(f["1"], hidden)


@pytest.mark.parametrize("how", ["of the instance", "of the class"])
def test_a_forward_that_is_compiled_is_announced(x, how):
    class Net(nn.Sequential):
        forward = torch.compile(nn.Sequential.forward, backend="eager")

    model = Net(*mlp(4, 5, 2)) if how == "of the class" else mlp(4, 5, 2)
    if how == "of the instance":
        model.forward = torch.compile(model.forward, backend="eager")
    with pytest.warns(UserWarning, match="this model is compiled"), features(model, "1"):
        model(x)


OF_PYTHON = "Guards may run slower on Python"  # 3.13.0, whatever is compiled


def told(warnings):
    return [str(warning.message) for warning in warnings if OF_PYTHON not in str(warning.message)]


def test_a_forward_that_the_compiler_leaves_alone_is_not_announced(model, recwarn):
    model.forward = torch.compiler.disable(model.forward)
    with features(model, "1"):
        pass
    assert not told(recwarn)


BLOCKS = {
    "trace": lambda model: trace(model),
    "saved_tensors": lambda model: saved_tensors(model),
    "Offload": lambda model: Offload(model, to="disk", min_bytes=0),
    "with_grad": lambda model: features(model, "*", keep=with_grad),
    "statistics": lambda model: layer_statistics(model, "*", of="grad_output"),
    "watch": lambda model: watch(weight=model[0].weight),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_the_gradients_of_a_model_compiled_inside_a_block_are_those_of_the_model(block, model, x):
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with no_leftovers(model), BLOCKS[block](model):
        torch.compile(model, backend="eager")(x).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_a_compiled_model_that_failed_can_be_called_again(x):
    class Net(nn.Sequential):
        def forward(self, x):
            return self[2](self[1](self[0](x)))

    model = Net(*mlp(4, 5, 2))
    with features(model, "1") as f:
        compiled = torch.compile(model, backend="eager")
        compiled(x)
        with pytest.raises(Exception, match=r"reduction dim|shapes cannot be multiplied"):
            compiled(torch.ones(3, 7))
        for _ in range(2):
            compiled(x + 1)
            assert torch.allclose(f["1"], model[1](model[0](x + 1)))


@pytest.mark.parametrize("how", ["of the instance", "Module.compile"])
def test_a_trace_says_of_every_compiled_part_that_it_is_one(model, how):
    model = nn.Sequential(model, nn.Linear(2, 2))
    if how == "Module.compile":
        model[0].compile(backend="eager")
    else:
        model[0].forward = torch.compile(model[0].forward, backend="eager")
    with pytest.warns(UserWarning, match="trace: this model is compiled") as caught:
        trace(model).remove()
    assert caught[0].filename == __file__


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 2), nn.Linear(2, 1)

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_hooks_on_doubts_those_inside_a_compiled_model_of_which_a_late_one_never_fires(x, how):
    model, fired = Net(), []
    compiled = torch.compile(model, backend="eager") if how == "torch.compile" else model
    if how == "Module.compile":
        model.compile(backend="eager")
    compiled(x)
    for place, part in (("inside", model.first), ("itself", model)):
        part.register_forward_hook(lambda *call, place=place: fired.append(place))
    model.first.weight.register_hook(lambda grad: fired.append("weight"))
    compiled(x).sum().backward()
    assert set(fired) == {"itself", "weight"}
    doubts = {hook.place.removeprefix("_orig_mod").removeprefix("."): hook for hook in hooks_on(compiled)}
    in_doubt = doubts.pop("first")
    assert "inside a compiled model: it never fires if it came after the first run" in str(in_doubt)
    assert in_doubt.doubt in hooks_on(compiled)._repr_html_()
    assert [hook.doubt for hook in doubts.values()] == ["", ""]


def test_hooks_on_doubts_nothing_in_a_model_that_is_not_compiled():
    model = Net()
    model.first.register_forward_hook(print)
    assert [hook.doubt for hook in hooks_on(model)] == [""]


@pytest.mark.parametrize("install", [features, layer_statistics, verbose])
def test_one_graph_for_all_is_refused_with_the_way_out(model, x, install):
    with (
        install(model, "1"),
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"hooks of hooklab.*compile without fullgraph=True"),
    ):
        torch.compile(model, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("block", ["trace", "saved_tensors", "Offload", "segments"])
def test_what_needs_python_is_not_exported_but_refused(block, x):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(4, 5, 2)

        def forward(self, x):
            blocks = {**BLOCKS, "segments": lambda model: checkpoint_segments(model, {"": 1})}
            with blocks[block](self.body):
                return self.body(x)

    model = Inside()
    with pytest.raises(NotImplementedError, match=r"inside torch\.compile.* or torch\.export; "):
        torch.export.export(model, (x,))
    assert not [hook for hook in hooks_on(model.body) if hook.owner == "hooklab"]
    # An export that fails leaves hooks of PyTorch's own (2.11), whatever the model.
    for kind in ("buffer", "module", "parameter"):
        getattr(nn.modules.module, f"_global_{kind}_registration_hooks").clear()
    with no_leftovers(model):
        assert model(x).shape == (3, 2)


def test_importing_hooklab_does_not_load_the_compiler():
    code = "import sys, hooklab; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
