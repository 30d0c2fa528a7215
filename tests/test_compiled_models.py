"""Module hooks and torch.compile: what is installed before compiling is seen, what comes after is announced.

Mostly the eager backend, without the time that generating code takes.
"""

import logging.handlers

import pytest
import torch
from models import mlp
from torch import nn

from hooklab import features, layer_statistics, no_leftovers, trace, verbose, with_grad


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
def complaints():
    """What the compiler writes to its log, as about something in a hook that it cannot compile."""
    handler = logging.handlers.BufferingHandler(1_000)
    logging.getLogger("torch._dynamo").addHandler(handler)
    yield handler.buffer
    logging.getLogger("torch._dynamo").removeHandler(handler)


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("rows", [3, 1_000, 60_000])
@pytest.mark.parametrize("of", ["output", "grad_output"])
def test_statistics_of_a_compiled_model_are_those_of_the_model(backend, rows, of, complaints):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.ReLU(), nn.Linear(5, 2))

    def counted(called, stats):
        with torch.random.fork_rng(), stats:
            torch.manual_seed(1)
            called(torch.randn(rows, 4)).square().sum().backward()
        return dict(stats)

    stats = layer_statistics(model, "*", of=of, bins=4)
    found = counted(torch.compile(model, backend=backend), stats)
    assert found == counted(model, layer_statistics(model, "*", of=of, bins=4))
    assert len(found) == 4
    assert 0 < found["1"].zeros < 1
    assert not complaints


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
    for call in (features, layer_statistics, verbose):
        with pytest.warns(
            UserWarning, match=f"{call.__name__}: this model is compiled.*before torch.compile"
        ) as caught:
            call(compiled, "1").remove()
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


def test_a_compiled_model_that_has_not_run_yet_can_be_traced():
    torch.compiler.reset()
    model = mlp(4, 3)
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 4)
    with pytest.warns(UserWarning, match="hooks placed after compiling"):
        traced = trace(compiled)
    with no_leftovers(model), traced:
        output = compiled(x)
        output.sum().backward()
    assert torch.equal(output, model(x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_versions_are_not_taken_for_constants(mode, x):
    """Behind the eager backend they are not: here the one that replaces operations in place."""
    model = mlp(4, 5, 2, inplace=True)
    with features(model, "1") as f, mode():
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            compiled(x)
            assert torch.equal(f["1"], model[:2](x))


@pytest.mark.parametrize("how", ["of the instance", "of the class"])
def test_a_forward_that_is_compiled_is_announced(x, how):
    class Net(nn.Sequential):
        forward = torch.compile(nn.Sequential.forward, backend="eager")

    model = Net(*mlp(4, 5, 2)) if how == "of the class" else mlp(4, 5, 2)
    if how == "of the instance":
        model.forward = torch.compile(model.forward, backend="eager")
    with pytest.warns(UserWarning, match="this model is compiled"), features(model, "1"):
        model(x)


def test_a_forward_that_the_compiler_leaves_alone_is_not_announced(model, recwarn):
    model.forward = torch.compiler.disable(model.forward)
    with features(model, "1"):
        pass
    assert not recwarn.list
