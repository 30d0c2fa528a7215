"""Every operation that PyTorch itself tests has the same gradients through `Offload(to="disk")`."""

import contextlib
import importlib
import sys
import types
import unittest
import warnings

import pytest
import torch

from hooklab import Offload


@pytest.fixture
def op_db(monkeypatch):
    """PyTorch's own table of operations with inputs for each; it asks for `expecttest`, and uses its one class alone."""
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    return importlib.import_module("torch.testing._internal.common_methods_invocations").op_db


def floating(value):
    """The tensors with a gradient in nested lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    return [one for part in value for one in floating(part)] if isinstance(value, list | tuple) else []


def gradients(operation, sample, context):
    torch.manual_seed(0)
    inputs = floating([sample.input, *sample.args, *sample.kwargs.values()])
    with context:
        outputs = floating(operation(sample.input, *sample.args, **sample.kwargs))
    if not (inputs and outputs):
        return []
    ones = [torch.ones_like(output) for output in outputs]
    return [grad for grad in torch.autograd.grad(outputs, inputs, ones, allow_unused=True) if grad is not None]


def equal_bits(left, right):
    if left.layout != torch.strided:
        return torch.equal(left.to_dense(), right.to_dense())
    return left.numpy(force=True).tobytes() == right.numpy(force=True).tobytes()


@pytest.mark.long
def test_every_operation_has_the_same_gradients_through_the_disk(op_db):
    moved, differ = {}, []
    for operation in op_db:
        if torch.float32 not in operation.dtypes or not operation.supports_autograd:
            continue
        for sample in list(operation.sample_inputs("cpu", torch.float32, requires_grad=True))[:3]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    expected = gradients(operation, sample, contextlib.nullcontext())
                    again = gradients(operation, sample, contextlib.nullcontext())
                except Exception:
                    continue
                # Where the operation itself draws, or reads what is not set, there is nothing to compare.
                if not all(map(equal_bits, expected, again)):
                    continue
                offload = Offload(to="disk", min_bytes=0)
                found = gradients(operation, sample, offload)
            moved[operation.name] = moved.get(operation.name, 0) + offload.moved_bytes
            if len(found) != len(expected) or not all(map(equal_bits, expected, found)):
                differ.append(operation.name)
    assert differ == []
    assert sum(bytes_ > 0 for bytes_ in moved.values()) > 250
