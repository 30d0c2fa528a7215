"""Every kind of picture reads on white and on black, and says in one sentence what it shows."""

import math

import picture_rules
import pytest
import torch
from torch import nn

import hooklab
from hooklab import draw
from hooklab.draw import colours


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def graph(model):
    return draw.graph(model(torch.ones(1, 3)).exp().sum(), model.named_parameters(), saved=True)


def timeline(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hooklab.trace(model) as traced:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return draw.timeline(traced)


def gradient_flow(model):
    with hooklab.layer_statistics(model, "*", of="grad_output") as stats:
        (model(torch.ones(1, 3)) * torch.tensor([math.nan, 1.0])).sum().backward()
    return draw.gradient_flow(stats)


def activations(model):
    with hooklab.layer_statistics(model, "*", bins=10) as stats:
        model(torch.ones(5, 3))
    return draw.activations(stats)


def feature_maps(model):
    return draw.feature_maps(model[0].weight)


def memory(model):
    with hooklab.saved_tensors(model) as saved:
        model(torch.ones(1, 3)).sum().backward()
    return draw.memory(saved)


ALTS = {
    graph: "The autograd graph from 2.bias, 0.bias, 0.weight, 2.weight to the result: 11 Nodes.",
    timeline: "What fired when: 12 in forward, 36 in backward, 2 in step.",
    gradient_flow: "How large the gradient is in 3 layers, from '0' to '2'.",
    activations: "How the values in 3 layers are spread, call by call: a heat map for each.",
    feature_maps: "A mosaic of feature maps (1 of 4 x 3), each from dark at its minimum to bright at its maximum.",
    memory: "What autograd holds for backward, over 8 events: at most 28 bytes.",
}


@pytest.mark.parametrize("kind", ALTS)
def test_a_picture_reads_on_both_grounds_and_has_its_sentence(kind, model):
    picture = kind(model)
    assert list(picture_rules.svg_problems(picture.svg)) == []
    assert picture.alt == ALTS[kind]


@pytest.mark.parametrize("colour", colours.CYCLE)
def test_letters_may_have_any_of_the_colours(colour):
    assert all(picture_rules.contrast(colour, ground) >= least for ground, least in picture_rules.GROUNDS.items())
