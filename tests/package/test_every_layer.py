"""Every module of torch.nn under each call that looks at layers: nothing changes, and nothing stays."""

import copy
import warnings
from contextlib import ExitStack

import pytest
import torch
from models import same_state, state_of
from torch import nn
from torch_nn_samples import ABSTRACT, SAMPLES

from hooklab import compare, features, finite, hooks_on, layer_statistics, no_leftovers, patch, trace, verbose
from hooklab._support.nested import tensors_in


def test_no_module_of_torch_nn_is_missing():
    every = {
        name for name in dir(nn) if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), nn.Module)
    }
    assert every - SAMPLES.keys() - ABSTRACT.keys() == set()
    assert not SAMPLES.keys() & ABSTRACT.keys()
    assert {name for name in every if getattr(nn, name).forward is nn.Module.forward} == ABSTRACT.keys()


@pytest.fixture(params=SAMPLES)
def sample(request):
    build, inputs = SAMPLES[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules and prototypes announce themselves
        torch.manual_seed(0)
        layer = build()
        with torch.no_grad():
            layer(*inputs())  # a lazy module takes its shape at the first call
        torch.manual_seed(1)
        yield layer, inputs()


def run(layer, inputs):
    """The outputs and every gradient of one forward and backward, with the same random numbers each time."""
    state = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    torch.manual_seed(2)
    outputs = [tensor for tensor in tensors_in(layer(*inputs)) if isinstance(tensor, torch.Tensor)]
    leaves = [tensor for tensor in (*inputs, *layer.parameters()) if tensor.requires_grad]
    total = sum(output.double().sum() for output in outputs if output.requires_grad)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if isinstance(total, torch.Tensor) and leaves else ()
    with torch.no_grad():
        for name, buffer in layer.named_buffers():  # running statistics: the next run starts from the same
            buffer.copy_(state[name])
    return [*outputs, *(grad for grad in grads if grad is not None)]


def test_outputs_and_gradients_are_bit_equal_and_nothing_is_left(sample):
    layer, inputs = sample
    plain, before = run(layer, inputs), state_of(layer)
    with no_leftovers(layer), ExitStack() as stack:
        lines: list[str] = []
        stack.enter_context(verbose(layer, depth=9, write=lines.append))
        f = stack.enter_context(features(layer, "", keep=lambda tensor: tensor.detach().clone()))
        stats = stack.enter_context(layer_statistics(layer, "", bins=3))
        grads = stack.enter_context(layer_statistics(layer, "", of="grad_output"))
        stack.enter_context(finite(layer))
        traced = stack.enter_context(trace(layer))
        watched = run(layer, inputs)
    assert len(plain) == len(watched)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert same_state(before, state_of(layer))
    assert hooks_on(layer) == []
    assert lines
    assert traced.phase("forward")
    kept = list(tensors_in(f[""]))
    assert all(torch.equal(one, other) for one, other in zip(kept, watched, strict=False))
    assert stats[""].count == sum(tensor.numel() for tensor in kept)
    assert ("" in grads) == any(tensor.requires_grad for tensor in watched[: len(kept)])


def test_a_copy_does_not_differ_and_comparing_changes_nothing(sample):
    layer, inputs = sample
    other = copy.deepcopy(layer)
    before, of_other, random = state_of(layer), state_of(other), torch.get_rng_state()
    with no_leftovers(layer):
        rows = compare(layer, other, *inputs)
    assert len(rows) > 0
    assert rows.first is rows.to_blame is None
    assert rows.unpaired == ([], [])
    assert all(row.on_equal_input == 0 for row in rows if row.a)
    assert torch.equal(torch.get_rng_state(), random)
    assert same_state(before, state_of(layer))
    assert same_state(of_other, state_of(other))


def test_a_patch_that_puts_the_same_there_changes_no_output_and_no_gradient(sample):
    layer, inputs = sample
    plain = run(layer, inputs)
    with no_leftovers(layer), patch(layer, "", lambda old: old) as output:
        patched = run(layer, inputs)
    assert output.calls == 1
    assert len(plain) == len(patched)
    assert all(torch.equal(one, other) for one, other in zip(plain, patched, strict=True))
