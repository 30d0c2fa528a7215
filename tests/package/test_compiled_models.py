"""Module hooks and torch.compile: what is installed before compiling is seen, what comes after is announced.

Mostly the eager backend, without the time that generating code takes.
"""

import gc
import logging.handlers
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from models import mlp
from torch import nn

from hooklab import (
    Offload,
    checkpoint_segments,
    clip,
    clip_gradients,
    features,
    hooks_on,
    layer_statistics,
    no_leftovers,
    saved_tensors,
    scale,
    trace,
    verbose,
    watch,
    with_grad,
    zero,
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


TOOLS = [
    partial(verbose, write=lambda line: None),
    features,
    layer_statistics,
    partial(layer_statistics, of="grad_output"),
    lambda model, *layers: trace(model),
]


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_block_that_saw_nothing_says_so_where_something_compiled_is_around_its_layers(
    tool, how, x, recwarn
):
    part = nn.Sequential(nn.Linear(4, 3))
    model = nn.Sequential(part, nn.ReLU())
    if how == "torch.compile":
        compiled, hooked = torch.compile(model, backend="eager"), model
    else:
        model.compile(backend="eager")
        compiled, hooked = model, part
    compiled(x)
    fired = []
    with hooked[0].register_forward_hook(lambda *args: fired.append(1)):
        compiled(x)
    if fired:
        pytest.skip("this PyTorch compiles anew for a hook")
    recwarn.clear()
    with tool(hooked, "0"):
        compiled(x)
    (said,) = [each for each in recwarn if "nothing was seen in this block" in str(each.message)]
    assert said.filename == __file__
    if tool is TOOLS[-1]:  # what is saved is seen in a `with` alone
        return
    handle = tool(part, "0")
    with pytest.warns(UserWarning, match="nothing was seen in this block") as caught:
        handle.remove()
    assert caught[0].filename == __file__


class HalfMade(nn.Module):
    """Whatever is asked of it fails."""

    def __init__(self):
        pass

    def __getattr__(self, name):
        raise RuntimeError(name)


@pytest.mark.filterwarnings("error:.*nothing was seen")
@pytest.mark.parametrize("tool", TOOLS)
def test_where_that_warning_is_an_error_no_hook_stays(tool, x):
    model, others = mlp(4, 3), HalfMade()
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with no_leftovers(model), pytest.raises(UserWarning, match="nothing was seen"), tool(model, "0"):
        compiled(x)
    assert isinstance(others, nn.Module)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_block_that_saw_something_or_is_not_compiled_or_fails_says_nothing(tool, x, recwarn):
    other = torch.compile(mlp(4, 3), backend="eager")
    compiled = torch.compile(model := mlp(4, 3), backend="eager")
    with tool(model, "0"):
        model(x).sum().backward()
    with tool(mlp(4, 3), "0"):
        other(x)
    with layer_statistics(model, "0", of="grad_output"):
        loss = model(x).sum()  # backward comes later
    loss.backward()
    assert not [each for each in recwarn if "nothing was seen" in str(each.message)]
    with pytest.raises(ValueError, match="a fault"), tool(model, "0"):
        raise ValueError("a fault")
    assert compiled(x).shape == (3, 3)
    assert not [each for each in recwarn if "nothing was seen" in str(each.message)]


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
    with pytest.warns(
        UserWarning, match="hooks installed after compiling are ignored, and nothing inside it"
    ):
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


OF_PYTHON = "Guards may run slower on Python"  # 3.13.0, whatever is compiled


def told(warnings):
    return [str(warning.message) for warning in warnings if OF_PYTHON not in str(warning.message)]


def test_a_forward_that_the_compiler_leaves_alone_is_not_announced(model, recwarn):
    model.forward = torch.compiler.disable(model.forward)
    with features(model, "1"):
        pass
    assert not told(recwarn)


class Broken(nn.Module):
    """A layer in the middle of which the compiler gives up and goes on: two graphs."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return x * torch.sigmoid(x)


BLOCKS = {
    "trace": lambda model: trace(model),
    "saved_tensors": lambda model: saved_tensors(model),
    "Offload": lambda model: Offload(model, to="disk", min_bytes=0),
    "with_grad": lambda model: features(model, "*", keep=with_grad),
    "statistics": lambda model: layer_statistics(model, "*", of="grad_output"),
    "watch": lambda model: watch(weight=model[0].weight),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("broken", [False, True])
def test_a_whole_step_can_be_compiled_inside_a_block(block, backend, broken, x, complaints, recwarn):
    """Where backward, too, is called from what is compiled, the compiler comes across our hooks there as well."""
    model = mlp(4, 5, 2)
    model[1] = Broken() if broken else model[1]

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    expected = step(x), [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with no_leftovers(model), BLOCKS[block](model) as found:
        compiled = torch.compile(step, backend=backend)
        for _ in range(3):
            model.zero_grad()
            loss = compiled(x)
    assert torch.allclose(loss, expected[0])
    for parameter, grad in zip(model.parameters(), expected[1], strict=True):
        assert torch.allclose(parameter.grad, grad)
    assert not complaints
    assert not told(recwarn)
    if block == "trace":
        assert sum(event.kind == "post-accumulate-grad hook" for event in found.events) == 3 * 4
    elif block == "saved_tensors":
        assert found.total_bytes > 0
        assert found.held[-1] == 0
    elif block == "Offload":
        assert found.moved_bytes > 0
    elif block == "with_grad":
        assert all(found[name].grad is not None for name in found)
    elif block == "statistics":
        assert [figures.calls for figures in found.values()] == [3, 3, 3]
    else:
        assert len(found.history["weight"]) == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("opened", ["inside", "around"])
def test_figures_read_in_what_is_compiled_are_those_so_far(backend, opened):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    around = layer_statistics(model, "1")

    def figures(x):
        if opened == "around":
            return model(x), around["1"].mean, around["1"].zeros, around["1"].calls
        with layer_statistics(model, "1") as stats:
            output = model(x)
        return output, stats["1"].mean, stats["1"].zeros, stats["1"].calls

    compiled, outputs = torch.compile(figures, backend=backend), []
    with around:
        for rows in (3, 3, 1_000, 3, 4):
            torch.manual_seed(10 * len(outputs) + rows)
            output, mean, zeros, calls = compiled(torch.randn(rows, 4))
            outputs = (
                [*outputs, output.detach().double().flatten()]
                if opened == "around"
                else [output.double().flatten()]
            )
            expected = torch.cat(outputs)
            assert mean == pytest.approx(expected.mean().item())
            assert zeros == pytest.approx((expected == 0).double().mean().item())
            assert calls == len(outputs)


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


def test_shapes_that_the_compiler_leaves_open_are_written(model, x):
    lines = []
    with verbose(model, write=lines.append):
        compiled = torch.compile(model, backend="eager", dynamic=True)
        for rows in (3, 2):
            compiled(x[:rows])
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        f"[{rows}, {width}]" for rows in (3, 2) for width in (5, 5, 2)
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_trace_opened_in_what_is_compiled_sees_backward(backend):
    def lines(x):
        y = x * 2
        with trace(y=y, x=x) as events:
            y.sum().backward()
        return events.lines()

    expected = [line.replace("MulBackward0", "Node") for line in lines(torch.ones(3, requires_grad=True))]
    found = torch.compile(lines, backend=backend)(torch.ones(3, requires_grad=True))
    own = "MulBackward0" if backend == "eager" else "CompiledFunctionBackward"
    assert [line.replace(own, "Node") for line in found] == expected


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


@pytest.mark.parametrize("install", [features, layer_statistics, verbose])
def test_one_graph_for_all_is_refused_with_the_way_out(model, x, install):
    with (
        install(model, "1"),
        pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"hooks of hooklab.*compile without fullgraph=True"
        ),
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


def test_a_thread_that_compiles_does_not_hinder_another():
    """`torch.compiler.is_compiling()` is true in every thread meanwhile."""
    compiling, done = threading.Event(), threading.Event()

    def backend(graph, inputs):
        compiling.set()
        assert done.wait(60)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(3, 2)

    def seen():
        with trace(model) as events, checkpoint_segments(model, {"": 1}):
            model(x).sum().backward()
        with saved_tensors(model) as saved:
            model(x).sum().backward()
        with Offload(model, to="disk", min_bytes=0) as offload:
            loss = model(x).sum()
        loss.backward()
        return sum("Node" in event.kind for event in events.events), len(saved), offload.moved_bytes

    alone = seen()
    thread = threading.Thread(target=lambda: torch.compile(torch.sin, backend=backend)(torch.ones(3)))
    thread.start()
    try:
        assert compiling.wait(60)
        beside = seen()
    finally:
        done.set()
        thread.join()
    assert beside == alone
    assert min(alone) > 0


@pytest.mark.parametrize("block", ["saved_tensors", "Offload"])
def test_a_compiler_that_waits_keeps_nothing_alive(block):
    """With this stance it keeps the locals of the first frames that it sees, and so what a destructor is called on."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    gc.collect()
    kinds = {"Saved", "Packed", "Slot"}
    before = sum(type(thing).__name__ in kinds for thing in gc.get_objects())
    with torch.compiler.set_stance("eager_then_compile"):
        for _ in range(3):
            with BLOCKS[block](model) as found:
                compiled(torch.randn(3, 4))
    assert found.total_bytes if block == "saved_tensors" else found.moved_bytes
    gc.collect()
    assert sum(type(thing).__name__ in kinds for thing in gc.get_objects()) == before


@pytest.mark.parametrize("hook", ["clip_gradients", "clip", "scale", "zero", "watch"])
def test_hooks_on_parameters_compile_nothing_in_backward(hook, x):
    model = mlp(4, 5, 2)
    weight = model[0].weight

    def step(x):
        model(x).square().sum().backward()

    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        compiled(x)
    install = {
        "clip_gradients": lambda: clip_gradients(model, -0.01, 0.01),
        "clip": lambda: weight.register_hook(clip(-0.01, 0.01)),
        "scale": lambda: weight.register_hook(scale(2)),
        "zero": lambda: weight.register_hook(zero()),
        "watch": lambda: watch(weight=weight),
    }
    before, weight.grad = weight.grad / 2, None
    handle = install[hook]()
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x)
    handle.remove()
    expected = {"scale": 2 * before, "zero": 0 * before, "watch": before}
    assert torch.allclose(weight.grad, expected.get(hook, before.clamp(-0.01, 0.01)))


@pytest.mark.parametrize("block", ["features", "with_grad", "verbose", "statistics", "trace", "watch"])
def test_a_block_in_what_is_compiled_compiles_nothing_anew(block, x, complaints):
    model = mlp(4, 5, 2)
    blocks = {
        **BLOCKS,
        "features": lambda model: features(model, "*"),
        "verbose": lambda model: verbose(model, write=lambda line: None),
    }

    def step(x):
        with blocks[block](model):
            loss = model(x).square().sum()
            loss.backward()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    for _ in range(12):  # the compiler gives up after eight versions of one function, and says so
        compiled(x)
    assert not complaints


def test_the_compiler_of_backward_goes_round_the_hooks_of_with_grad(x, recwarn):
    model = mlp(4, 5, 2)
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        features(model, "*", keep=with_grad) as f,
    ):
        torch.compile(lambda x: model(x).sum().backward(), backend="eager")(x)
    assert all(f[name].grad is not None for name in ("0", "1", "2"))
    assert not [warning for warning in recwarn if "does not know how to trace" in str(warning.message)]


def test_the_compiler_of_backward_goes_round_the_hooks_of_watch(x, recwarn):
    model = mlp(4, 5, 2)
    weights = {f"w{index}": layer.weight for index, layer in enumerate(model) if hasattr(layer, "weight")}
    with torch._dynamo.config.patch(compiled_autograd=True), watch(**weights) as log:
        torch.compile(lambda x: model(x).sum().backward(), backend="eager")(x)
    assert len(weights) == 2
    assert all(torch.equal(log[name], weight.grad) for name, weight in weights.items())
    assert not [warning for warning in recwarn if "does not know how to trace" in str(warning.message)]


LATE = """
import sys, torch, warnings
warnings.filterwarnings("ignore", {of_python!r})
from torch import nn
import hooklab

class Broken(nn.Module):
    def forward(self, x):
        print(end="")
        return x * torch.sigmoid(x)

def step(x):
    model(x).sum().backward()

model = nn.Sequential(nn.Linear(8, 8), Broken(), nn.Linear(8, 2))
assert "torch._dynamo" not in sys.modules, "hooklab loads the compiler: that takes seconds"
with hooklab.{block} as found:
    torch.compile(step, backend="aot_eager")(torch.ones(4, 8))
if {block!r}.startswith("saved"):
    assert found.total_bytes > 0 == found.held[-1]
elif {block!r}.startswith("Offload"):
    assert found.moved_bytes > 0
"""


@pytest.mark.parametrize(
    "block", ["trace(model)", "saved_tensors(model)", "Offload(model, to='disk', min_bytes=0)"]
)
def test_a_compiler_that_is_loaded_after_our_hooks_leaves_them_alone(block, tmp_path):
    """In a process of its own: here it is loaded already."""
    program = tmp_path / "program.py"
    program.write_text(LATE.format(block=block, of_python=OF_PYTHON))
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=300)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_pytorch_whose_compiler_has_other_names_inside_can_be_used(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import torch
del torch._C._dynamo.eval_frame._FrameExecStrategy
from hooklab import Offload, features, trace
from hooklab._support import compiler
assert compiler.set_code_exec_strategy is None
model = torch.nn.Linear(2, 2)
with features(model, "") as f, trace(model) as events, Offload(model, to="disk", min_bytes=0) as moved:
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
print(list(f), len(events.phase("backward")) > 3, moved.moved_bytes)
""")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=300)
    assert (ran.stdout, ran.stderr) == ("[''] True 8\n", "")
