"""Looking at a model that checkpoints itself changes nothing in it: its two forwards stay alike."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hooklab import checkpoint_segments, features, layer_statistics, with_grad

ATEN = torch.ops.aten


class Block(nn.Module):
    """With operations that `keep` and the figures of a layer use, too."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = self.drop(hidden / hidden.max()) + hidden.clone().cos()
        return x + self.last(hidden).sigmoid()


class Model(nn.Sequential):
    def __init__(self, run):
        super().__init__(Block(), Block())
        self.run = run

    def forward(self, x):
        for block in self:
            x = self.run(block, x)
        return x


# What draws a dropout mask writes into memory that is there already: a selective checkpoint refuses to save that.
DRAWS = "aten::empty_like", "aten::bernoulli_.float", "aten::div_.Scalar"


def policy(saved, context, operation, *args, **kwargs):
    wanted = operation in saved if saved else operation.name() not in DRAWS
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def selective(saved):
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, saved))
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


RUNS = {
    "plain": lambda block, x: block(x),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": selective({ATEN.addmm.default, ATEN.max.default, ATEN.clone.default}),
    "all saved": selective(None),
    "segments": lambda block, x: block(x),
}
KEEPS = {
    "detach": torch.Tensor.detach,
    "clone": lambda output: output.detach().clone(),
    "max": lambda output: output.detach().max(),
    "with_grad": with_grad,
    "a number": lambda output: output.norm().item(),
    "the mean": lambda output: output.abs().mean(),
    "a sample": lambda output: output.detach().flatten()[torch.randint(output.numel(), (3,))],
}
TOOLS = {
    **{f"features, {name}": partial(features, keep=keep) for name, keep in KEEPS.items()},
    "statistics": layer_statistics,
    "statistics of gradients": partial(layer_statistics, of="grad_output"),
}


def trained(how, tool, until="after backward"):
    """The gradients and what was seen; the random numbers are the same in every run."""
    torch.manual_seed(0)
    model, x = Model(RUNS[how]), torch.randn(4, 6, requires_grad=True)
    segments = contextlib.ExitStack()
    if how == "segments":
        model = nn.Sequential(*model)
        segments.enter_context(checkpoint_segments(model, {"": 1}))
    torch.manual_seed(1)
    with segments:
        with tool(model) as seen:
            loss = model(x).square().mean()
            if until == "after backward":
                loss.backward()
        if until == "forward":
            loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())], seen


@pytest.mark.parametrize("how", [how for how in RUNS if how != "plain"])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_gradients_are_those_of_the_model_that_nobody_looks_at(how, tool):
    install = partial(_install, TOOLS[tool])
    expected = "plain" if "sample" in tool else how
    # A sample draws from the same random numbers as the dropout: it is compared with one in the plain model.
    reference, _ = trained(expected, install if "sample" in tool else lambda model: contextlib.nullcontext())
    gradients, seen = trained(how, install)
    assert all(map(torch.equal, gradients, reference))
    assert len(seen) == 4
    if tool.startswith("features"):
        assert [len(calls) for calls in seen.calls.values()] == [1] * 4
    else:
        assert [figures.calls for figures in seen.values()] == [1] * 4


@pytest.mark.parametrize("how", ["not reentrant", "selective", "all saved", "segments"])
@pytest.mark.parametrize("tool", [tool for tool in TOOLS if "sample" not in tool])
def test_so_they_are_where_the_hooks_have_gone_before_backward(how, tool):
    reference, _ = trained(how, lambda model: contextlib.nullcontext())
    gradients, _ = trained(how, partial(_install, TOOLS[tool]), until="forward")
    assert all(map(torch.equal, gradients, reference))


def _install(tool, model):
    return tool(model, nn.Linear)


def test_figures_and_features_are_those_of_the_plain_model():
    for name, tool in TOOLS.items():
        if "sample" in name:
            continue
        _, expected = trained("plain", partial(_install, tool))
        for how in ("not reentrant", "selective", "all saved"):
            _, seen = trained(how, partial(_install, tool))
            for layer in expected:
                one, other = seen[layer], expected[layer]
                same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
                assert same, (name, how, layer)
                if "with_grad" in name:
                    assert torch.equal(one.grad, other.grad)


def test_what_keep_computes_with_its_graph_can_be_trained_on():
    """A penalty on the activations, in a model that checkpoints."""

    def gradients(how):
        torch.manual_seed(0)
        model, x = Model(RUNS[how]), torch.randn(4, 6)
        torch.manual_seed(1)
        with features(model, "0.first", keep=lambda output: output.abs().mean()) as kept:
            loss = model(x).square().mean()
            (loss + kept["0.first"]).backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.allclose, gradients("not reentrant"), gradients("plain")))


@pytest.mark.parametrize("keep", [copy.deepcopy, lambda output: output.numpy().copy()])
def test_keep_may_want_an_output_without_a_graph(keep):
    """Which it is in the forward of a reentrant checkpoint, and not in the recomputation."""
    gradients, seen = trained("reentrant", lambda model: features(model, nn.Linear, keep=keep))
    reference, _ = trained("reentrant", lambda model: contextlib.nullcontext())
    assert all(map(torch.equal, gradients, reference))
    assert [len(seen.calls[name]) for name in seen] == [1] * 4
