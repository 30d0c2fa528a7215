"""Picture.save: every kind of picture as SVG, PNG and PDF."""

import io
import sys

import pytest
import torch
from matplotlib import image
from torch import nn

import hooklab
from hooklab import draw
from hooklab.draw import graphviz

BEGINNINGS = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.fixture
def maps():
    return draw.feature_maps(torch.arange(24.0).reshape(2, 3, 4))


def graph():
    return draw.graph(torch.ones(2, requires_grad=True).exp().sum())


def timeline(name="0"):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 1))
    with hooklab.trace(model) as traced:
        model(torch.ones(1, 2))
    return draw.timeline(traced)


def memory():
    with hooklab.saved_tensors() as saved:
        torch.ones(2, requires_grad=True).exp().sum().backward()
    return draw.memory(saved)


@pytest.mark.parametrize("form", BEGINNINGS)
@pytest.mark.parametrize("kind", [graph, timeline, memory])
def test_a_picture_is_saved_as_what_its_name_ends_with(kind, form, tmp_path):
    path = kind().save(tmp_path / f"picture.{form}")
    assert path == tmp_path / f"picture.{form}"
    assert path.read_bytes().startswith(BEGINNINGS[form])


def test_the_svg_is_the_one_that_is_shown_and_a_path_may_be_a_string(maps, tmp_path):
    assert maps.save(f"{tmp_path}/maps.SVG").read_text(encoding="utf-8") == maps.svg


@pytest.mark.parametrize("picture", [graph, memory])
def test_a_png_has_no_ground_of_its_own(picture, tmp_path):
    pixels = image.imread(io.BytesIO(picture().save(tmp_path / "picture.png").read_bytes()))
    assert pixels.shape[-1] == 4
    assert pixels[0, 0, 3] == 0
    assert pixels[..., 3].max() > 0.9


def test_a_file_shows_what_the_picture_shows_also_when_the_record_goes_on(tmp_path):
    with hooklab.saved_tensors() as saved:
        torch.ones(2, requires_grad=True).exp().sum().backward()
        picture = draw.memory(saved)
        before = picture.save(tmp_path / "before.png").read_bytes()
        torch.ones(2000, requires_grad=True).exp().sum().backward()
    assert picture.save(tmp_path / "after.png").read_bytes() == before
    assert draw.memory(saved).save(tmp_path / "new.png").read_bytes() != before


@pytest.mark.parametrize("name", ["maps", "maps.jpg", "maps.svg.gz"])
def test_another_ending_is_refused(maps, name, tmp_path):
    with pytest.raises(ValueError, match=rf"found '{name}', expected a name that ends with \.svg, \.png or \.pdf"):
        maps.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_what_draws_there_is_no_file_and_the_reason_is_told(maps, tmp_path, monkeypatch):
    picture = graph()
    monkeypatch.setattr(graphviz, "available", list)
    with pytest.raises(ValueError, match=r"no picture to write \(not drawn: neither Graphviz's `dot`.*`.facts`"):
        graph().save(tmp_path / "graph.svg")
    with pytest.raises(RuntimeError, match=r"no pdf can be drawn here \(neither Graphviz's `dot`.*save it as .svg"):
        picture.save(tmp_path / "graph.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match="no png can be drawn here"):
        maps.save(tmp_path / "maps.png")
    assert not list(tmp_path.iterdir())


def test_a_picture_made_of_svg_alone_is_saved_as_that(tmp_path):
    picture = draw.Picture("a dot", svg="<svg/>")
    assert picture.save(tmp_path / "dot.svg").read_bytes() == b"<svg/>"
    with pytest.raises(ValueError, match="made from SVG alone, so it has no png"):
        picture.save(tmp_path / "dot.png")


def test_a_chinese_name_has_boxes_for_letters_in_a_png(tmp_path):
    pictures = [timeline(name) for name in ("权重", "偏置")]
    assert "权重" in pictures[0].svg
    first, second = (picture.save(tmp_path / "name.png").read_bytes() for picture in pictures)
    assert (image.imread(io.BytesIO(first)) == image.imread(io.BytesIO(second))).all()
