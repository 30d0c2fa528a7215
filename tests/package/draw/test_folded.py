"""draw.graph of models too large for a screen: folded by module, and one of them unfolded."""

import re

import pytest
import torch
from picture_rules import svg_problems
from torch import nn
from torchvision.models import resnet18

from hooklab import draw


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.second(self.first(x).tanh())


def deep(blocks):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)])


def graph(model, unfold=None):
    return draw.graph(model(torch.ones(1, 4)).sum(), model.named_parameters(), unfold=unfold)


def boxes(svg):
    return re.findall(r'class="node">\s*<title>[^<]*</title>\s*<[^>]*>\s*<text[^>]*>([^<]*)</text>', svg)


def arrows(svg):
    """Pairs of the labels of boxes."""
    labels = dict(re.findall(r'class="node">\s*<title>([^<]*)</title>\s*<[^>]*>\s*<text[^>]*>([^<]*)</text>', svg))
    return [(labels[a], labels[b]) for a, b in re.findall(r"<title>(\w+)&#45;&gt;(\w+)</title>", svg)]


def test_a_small_graph_is_drawn_whole_and_a_large_one_has_a_box_for_each_module():
    small, large = graph(deep(3)), graph(deep(12))
    assert "ViewBackward0" in small.svg or "AddmmBackward0" in small.svg
    assert "folded" not in small.facts + small.svg
    modules = [f"{number}: 10 Nodes" for number in range(11)] + ["11: 11 Nodes"]  # and the sum
    assert sorted(boxes(large.svg)) == sorted([*modules, "result ()"])
    assert arrows(large.svg) == [*zip(modules, [*modules[1:], "result ()"], strict=True)]
    assert sum(int(label.split()[1]) for label in modules) == 12 * 10 + 1
    assert large.alt.endswith("121 Nodes, in 12 boxes.")


def test_it_is_folded_as_little_as_fits_a_screen():
    torch.manual_seed(0)
    model = resnet18()
    loss = model(torch.randn(2, 3, 32, 32)).sum()
    labels = boxes(draw.graph(loss, model.named_parameters()).svg)
    assert len(labels) <= 21
    assert {label.partition(":")[0] for label in labels} >= {"conv1", "layer1.0", "layer1.1", "layer4.1", "fc"}


def test_the_picture_and_the_facts_have_a_word_on_how_to_unfold():
    picture = graph(deep(12))
    word = "folded by module; unfold='11' shows the Nodes of that one, unfold='' all of them"
    assert picture.facts.splitlines()[-1] == f"drawn: 12 boxes for 121 Nodes, {word}"
    assert word in picture.svg.replace("&#39;", "'")
    assert picture.facts.count(" -> ") == graph(deep(12), unfold="").facts.count(" -> ") > 121


def test_one_module_is_unfolded_in_a_frame_of_its_own():
    picture = graph(deep(12), unfold="5")
    labels = boxes(picture.svg)
    assert {"4: 10 Nodes", "6: 10 Nodes", "AddBackward0", "5.first.weight (4, 4)"} <= set(labels)
    assert len(labels) == 11 + 10 + 1
    assert 'class="cluster"' in picture.svg
    assert "all but 5; unfold=&#39;&#39; shows all Nodes" in picture.svg or "all but 5; unfold='' shows" in picture.svg
    assert ("4: 10 Nodes", "AddBackward0") in arrows(picture.svg)


def test_everything_is_unfolded_where_it_is_asked_for():
    picture = graph(deep(12), unfold="")
    assert picture.svg.count("AddBackward0") >= 12
    assert "folded" not in picture.facts + picture.svg


def test_a_node_without_parameters_goes_with_the_one_before_it():
    model = deep(12)
    hidden = model[:6](torch.ones(1, 4)).exp().exp()
    picture = draw.graph(model[6:](hidden).sum(), model.named_parameters())
    assert "5: 12 Nodes" in boxes(picture.svg)


def test_a_weight_that_two_modules_share_leads_to_both():
    model = deep(12)
    model[11].second.weight = model[0].first.weight
    picture = graph(model)
    # The Node that transposes the weight for the last layer goes with the module that names it.
    assert {("0: 11 Nodes", "1: 10 Nodes"), ("0: 11 Nodes", "11: 9 Nodes")} <= set(arrows(picture.svg))
    assert len(set(boxes(picture.svg))) == 13


def test_a_graph_that_names_no_module_is_drawn_whole():
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(100):
        y = y * 2
    picture = draw.graph(y, {"x": x})
    assert boxes(picture.svg).count("MulBackward0") == 100
    assert len(boxes(graph(deep(30)).svg)) == 31


def test_a_module_that_no_parameter_names_is_refused():
    with pytest.raises(ValueError, match=r"unfold='layer1' is no module whose parameters `params` names; found: 0, 1"):
        graph(deep(2), unfold="layer1")


def test_a_folded_picture_reads_on_both_grounds_and_is_the_same_in_any_run():
    for unfold in (None, "3"):
        picture = graph(deep(12), unfold)
        assert list(svg_problems(picture.svg)) == []
        assert picture == graph(deep(12), unfold)
