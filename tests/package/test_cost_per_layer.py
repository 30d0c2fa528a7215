"""What a watched layer costs does not depend on how many there are: counted in instructions, which no cache disturbs."""

import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import hooklab
from hooklab import features, layer_statistics, verbose, with_grad

pytestmark = pytest.mark.long  # `make test-long`
PACKAGE = str(Path(hooklab.__file__).parent)


class Instructions:
    """Counts the instructions of Python that run in the package while it is open."""

    def __init__(self):
        self.number = 0

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        self.number += event == "opcode"
        return self

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(self.before)


@pytest.fixture(scope="module", autouse=True)
def _traced_before():
    """On Python 3.12 the first run that is traced counts a few instructions less or more."""
    for use in (features, partial(features, keep=with_grad), layer_statistics, verbose_lines):
        for grad in (False, True):
            instructions_of(use, 3, grad)


def instructions_of(use, layers, grad, forwards=3):
    model = nn.Sequential(*[nn.Tanh() for _ in range(layers)])
    x = torch.ones(2, requires_grad=grad)
    with use(model, "*") as used, torch.set_grad_enabled(grad), Instructions() as counted:
        for _ in range(forwards):
            y = model(x)
            if grad:
                y.sum().backward()
    assert len(used) == layers
    return counted.number


@contextmanager
def verbose_lines(model, pattern):
    """The layers that `verbose` has written a line about."""
    lines, layers = [], set()
    with verbose(model, pattern, write=lines.append):
        yield layers
        layers.update(line.split()[0] for line in lines)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "enable_grad"])
@pytest.mark.parametrize(
    "use",
    [
        features,
        partial(features, keep=torch.Tensor.clone),
        partial(features, keep=with_grad),
        layer_statistics,
        verbose_lines,
    ],
    ids=["features", "features of copies", "features with_grad", "layer_statistics", "verbose"],
)
def test_each_layer_adds_as_many_instructions_as_the_one_before(use, grad):
    few, more, many = (instructions_of(use, layers, grad) for layers in (10, 100, 1_000))
    per_layer = (more - few) / 90
    assert per_layer > 5
    assert (many - more) / 900 == per_layer


def test_and_so_it_is_with_gradients():
    use = partial(layer_statistics, of="grad_output")
    few, more, many = (instructions_of(use, layers, grad=True) for layers in (10, 100, 1_000))
    assert (many - more) / 900 == (more - few) / 90 > 5


@pytest.mark.parametrize("use", [features, layer_statistics])
def test_so_it_is_up_to_ten_thousand(use):
    few, many = (instructions_of(use, layers, grad=False) for layers in (10, 10_000))
    assert (many - few) / 9_990 == (instructions_of(use, 20, grad=False) - few) / 10
