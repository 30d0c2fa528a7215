"""draw.memory: what is held for backward, as a picture and in words."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooklab import draw, saved_tensors


def names(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


def test_the_picture_says_what_is_held_at_most_and_at_the_end():
    x = leaf(1000)
    with saved_tensors() as saved:
        y = x.exp().tanh().sum()
    y.backward()
    picture = draw.memory(saved)
    assert picture.facts.splitlines() == [
        "saved: 2, freed: 2", "held at most: 8,000 bytes", "held at the end: 0 bytes",
    ]  # fmt: skip
    assert "KiB held for backward" in picture.svg
    assert "the first is freed" in picture.svg


@pytest.mark.parametrize(("elements", "unit"), [(10, "bytes"), (1000, "KiB"), (10**6, "MiB"), (10**9, "GiB")])
def test_the_picture_chooses_its_unit(elements, unit):
    x = torch.empty(elements, device="meta", requires_grad=True)
    with saved_tensors() as saved:
        y = x.exp()
    assert f"{unit} held for backward" in draw.memory(saved).svg
    del y


def test_the_picture_has_the_parts_of_the_model():
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()))
    model.add_module("head", nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()))
    with saved_tensors(model) as saved:
        y = model(torch.ones(2, 4))
    y.sum().backward()
    svg = draw.memory(saved).svg
    assert names(svg).count("stem") == 2  # going and coming back
    assert names(svg).count("head") == 1  # without a break in between


def test_the_picture_goes_inside_a_part_that_is_nearly_all_of_the_model():
    blocks = {name: nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 3) for name in ("down", "up")}
    model = nn.ModuleDict({"module": nn.ModuleDict({"model": nn.Sequential()}), "head": nn.Linear(4, 1)})
    for name, block in blocks.items():
        model["module"]["model"].add_module(name, block)
    with saved_tensors(model) as saved:
        y = model["head"](model["module"]["model"](torch.ones(2, 4)))
    y.sum().backward()
    svg = draw.memory(saved).svg
    assert names(svg).count("module.model.down") == names(svg).count("module.model.up") == 2
    assert {"module", "module.model", "down", "up"}.isdisjoint(names(svg))


def test_narrow_bands_have_upright_names_and_the_narrowest_are_told_on_hover():
    model = nn.Sequential()
    for number in range(80):
        model.add_module(f"a_long_name_{number}", nn.Tanh())
    with saved_tensors(model) as saved:
        y = model(leaf(3))
    y.sum().backward()
    svg = draw.memory(saved).svg
    told = re.findall(r"<title>([^<]*)</title>", svg)
    assert len(told) > 100
    assert set(told) >= {f"a_long_name_{number}" for number in range(80)}
    written = [name for name in names(svg) if name.startswith("a_long_name_")]
    assert 20 < len(written) < 80
    assert svg.count("rotate(-90)") > 20


@pytest.mark.parametrize(("elements", "words"), [(10, "at most 40 bytes"), (1000, "at most 3.91 KiB")])
def test_the_most_that_is_held_is_written_in(elements, words):
    x = leaf(elements)
    with saved_tensors() as saved:
        y = x.exp()
    y.sum().backward()
    assert words in names(draw.memory(saved).svg)


def test_more_events_than_a_picture_can_show_are_not_drawn(monkeypatch):
    x = torch.ones(3, requires_grad=True)
    with saved_tensors() as saved:
        x.exp().exp().sum().backward()
    assert draw.memory(saved).svg
    monkeypatch.setattr(draw, "MAX_EVENTS", 3)
    picture = draw.memory(saved)
    assert not picture.svg
    assert "held at most: 24 bytes" in picture.facts
    assert picture.reason == "not drawn: 4 events, more than the 3 that a picture can show; record fewer steps"


@pytest.mark.parametrize("wrong", [None, [1, 2], "saved"])
def test_the_picture_refuses_something_else(wrong):
    with pytest.raises(TypeError, match=r"memory: expected what hooklab.saved_tensors returns"):
        draw.memory(wrong)


def test_the_picture_refuses_an_empty_record():
    with pytest.raises(ValueError, match="nothing has been saved yet"):
        draw.memory(saved_tensors())


def test_the_words_say_how_many_tensors_a_checkpoint_recomputed():
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    with saved_tensors(model) as saved:
        y = checkpoint(model, leaf(1000), use_reentrant=False).sum()
    y.backward()
    lines = draw.memory(saved).facts.splitlines()
    assert "recomputed: 2" in lines[0]
    assert lines[1:] == ["held at most: 12,000 bytes", "held at the end: 0 bytes"]
