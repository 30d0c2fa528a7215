"""What 35 says of checkpoints of unequal segments: the bytes it counts are held, and no other cut needs fewer."""

import ast
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooklab import saved_tensors

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "35_checkpointing.ipynb"


@pytest.fixture(scope="module")
def starts():
    """Where the segments of the cell `winner-unequal` begin; from the last one on there is no checkpoint."""
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]}
    (line,) = (line for line in cells["winner-unequal"].splitlines() if line.startswith("starts = "))
    return ast.literal_eval(line.partition("#")[0].removeprefix("starts = ").strip())


class Cut(nn.Module):
    """A row of modules run in segments, each in a checkpoint; from the last of `starts` on they run plainly."""

    def __init__(self, row, head, starts):
        super().__init__()
        self.segments = nn.ModuleList(nn.Sequential(*row[a:b]) for a, b in pairwise(starts))
        self.rest = nn.Sequential(*row[starts[-1] :], head)

    def forward(self, x):
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=False)
        return self.rest(x)


def held(model, x):
    """Bytes that stay after `model(x)` for backward, parameters and buffers not counted; and the result."""
    with saved_tensors(model) as saved:
        y = model(x)
    return saved.unique_bytes - saved.parameter_bytes, y.detach()


@pytest.fixture(scope="module")
def network():
    """The beginning of ResNet-152 and its blocks in a row, its end, and the images."""
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model, images = torchvision.models.resnet152(weights=None), torch.empty(256, 3, 224, 224)
    layers = model.layer1, model.layer2, model.layer3, model.layer4
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    row = [stem, *(block for layer in layers for block in layer)]
    return row, nn.Sequential(model.avgpool, nn.Flatten(), model.fc), images


@pytest.fixture(scope="module")
def sizes(network):
    """Of each module of the row its input's bytes and what it keeps besides; and what the end keeps."""
    row, head, hidden = network
    found = []
    for number, module in enumerate(row):
        size = hidden.nbytes
        own, hidden = held(module, hidden if number == 0 else hidden.requires_grad_())
        found.append((size, own - size))
    return found, held(head, hidden.requires_grad_())[0]


def peak(starts, sizes):
    """The cut at `starts`: bytes held after forward, and at most."""
    modules, end = sizes
    inputs, most = end, 0
    for start, stop in pairwise([*starts, len(modules)]):
        inputs += modules[start][0]
        most = max(most, inputs + sum(inner for _, inner in modules[start:stop]))
    return inputs + sum(inner for _, inner in modules[starts[-1] :]), most


def fits(limit, sizes):
    """Whether any cut stays within `limit` bytes, checkpoints up to some module and none from there on."""
    modules, end = sizes
    least = [end] + [float("inf")] * len(
        modules
    )  # least inputs held, where the modules before are in segments
    for start, (size, _) in enumerate(modules):
        inputs, inner = least[start] + size, 0
        for stop in range(start, len(modules)):
            inner += modules[stop][1]
            if inputs + inner > limit:
                break
            least[stop + 1] = min(least[stop + 1], inputs)
    return least[-1] < float("inf")


def test_the_sum_is_what_the_checkpoints_hold(starts, network, sizes):
    row, head, images = network
    assert held(Cut(row, head, starts), images)[0] == pytest.approx(peak(starts, sizes)[0], rel=1e-3)


def test_it_is_the_figure_of_the_notebook(starts, sizes):
    assert f"{peak(starts, sizes)[1] / 1e9:.2f}" == "6.12"


def test_no_other_cut_between_blocks_needs_less(starts, sizes):
    found = peak(starts, sizes)[1]
    assert fits(found, sizes)
    assert not fits(0.999 * found, sizes)


def test_the_search_finds_what_trying_every_cut_finds():
    sizes = [(3, 5), (1, 4), (2, 6), (1, 1), (4, 2)], 1
    cuts = [[0, *(n for n in range(1, 5) if bits >> n & 1)] for bits in range(0, 32, 2)]
    least = min(peak(cut, sizes)[1] for cut in cuts)
    assert fits(least, sizes)
    assert not fits(least - 1, sizes)
