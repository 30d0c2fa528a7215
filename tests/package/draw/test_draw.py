"""Pictures and their facts."""

import re
import shutil
import sys

import pytest
import torch

from hooklab import draw
from hooklab.draw import graphviz


class Square(torch.autograd.Function):
    """A Function written in Python, since what it saves is reached in another way."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.fixture
def computation():
    x = torch.ones(3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    return x, w, (Square.apply(x) * w).exp().sum()


def chain(length):
    y = torch.ones(2, requires_grad=True)
    for _ in range(length):
        y = y * 2
    return y


def boxes(svg):
    """The labels in an SVG, one per box."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_the_facts_are_the_graph_leaves_first(computation):
    x, w, loss = computation
    assert draw.graph(loss, {"x": x, "w": w}).facts.splitlines() == [
        "x (3) -> AccumulateGrad",
        "AccumulateGrad -> SquareBackward",
        "w (3) -> AccumulateGrad #2",
        "SquareBackward -> MulBackward0",
        "AccumulateGrad #2 -> MulBackward0",
        "MulBackward0 -> ExpBackward0",
        "ExpBackward0 -> SumBackward0",
        "SumBackward0 -> result ()",
    ]


def test_the_picture_has_one_box_and_one_arrow_for_each_fact(computation):
    x, w, loss = computation
    picture = draw.graph(loss, {"x": x, "w": w})
    names = {re.sub(r" #\d+$", "", name) for line in picture.facts.splitlines() for name in line.split(" -> ")}
    assert set(map(str.strip, boxes(picture.svg))) == names
    assert picture.svg.count('class="edge"') == len(picture.facts.splitlines())


def test_saved_tensors_are_shown_where_they_are_asked_for(computation):
    *_, loss = computation
    plain, saved = draw.graph(loss), draw.graph(loss, saved=True)
    lines = [line for line in saved.facts.splitlines() if " saved " in line]
    assert lines == [
        "SquareBackward saved saved_tensors[0] (3)",
        "MulBackward0 saved other (3)",
        "MulBackward0 saved self (3)",
        "ExpBackward0 saved result (3)",
    ]
    assert " saved " not in plain.facts
    arrows = saved.svg.count('class="edge"') - plain.svg.count('class="edge"')
    assert arrows == 4  # a saved leaf keeps its one blue box and gets an arrow more


@pytest.mark.parametrize("saved", [False, True])
def test_a_graph_can_be_drawn_after_backward(computation, saved):
    *_, loss = computation
    loss.backward()
    picture = draw.graph(loss, saved=saved)
    assert "SumBackward0" in boxes(picture.svg)
    assert ("freed, backward() has run" in picture.facts) is saved


def test_the_same_graph_gives_the_same_bytes_in_any_run():
    first, second = draw.graph(chain(3), saved=True), draw.graph(chain(3), saved=True)
    assert first == second
    assert not re.search(r"\d{9,}", first.svg)


def test_nodes_of_one_name_are_told_apart():
    assert "MulBackward0 -> MulBackward0 #2" in draw.graph(chain(2)).facts


def test_operations_on_lists_have_their_names():
    x = torch.ones(2, requires_grad=True)
    picture = draw.graph(torch._foreach_exp([x])[0], {"x": x})
    assert picture.facts.splitlines()[1:] == [
        "AccumulateGrad -> ForeachExpBackward0",
        "ForeachExpBackward0 -> result (2)",
    ]
    assert "ForeachExpBackward0" in picture.svg
    assert "CppFunction" not in picture.svg


def test_names_may_come_from_a_module():
    layer = torch.nn.Linear(2, 1)
    facts = draw.graph(layer(torch.ones(1, 2)), layer.named_parameters()).facts
    assert "weight (1, 2) -> AccumulateGrad" in facts
    assert "bias (1) -> AccumulateGrad" in facts


def test_a_name_with_odd_characters_is_drawn():
    x = torch.ones(1, requires_grad=True)
    for name in ('say "x"', "back\\slash", "权重", "a<b>&c", ""):
        assert draw.graph(x * 2, {name: x}).svg


def test_a_graph_of_5000_nodes_is_drawn_and_one_more_says_why_not():
    limit = sys.getrecursionlimit()
    assert draw.graph(chain(4_999)).svg
    refused = draw.graph(chain(5_000))
    assert refused.svg is None
    assert "5,001 Nodes" in refused.reason
    assert refused.reason in str(refused)
    assert sys.getrecursionlimit() == limit


def test_without_graphviz_the_facts_are_shown_with_what_to_install(monkeypatch):
    monkeypatch.setattr(graphviz, "available", list)
    picture = draw.graph(chain(1))
    assert picture._repr_mimebundle_() == ({"text/plain": str(picture)}, {})
    assert "pip install pygraphviz" in str(picture)
    assert picture.facts in str(picture)


def test_without_torchviz_the_facts_are_shown_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchviz", None)
    assert "pip install torchviz" in draw.graph(chain(1)).reason


def test_a_broken_dot_gives_way_to_the_next_tool(monkeypatch):
    broken = [sys.executable, "-c", "raise SystemExit('dot is broken')"]
    monkeypatch.setattr(graphviz, "available", lambda: [broken, graphviz.PYGRAPHVIZ])
    assert draw.graph(chain(1)).svg
    monkeypatch.setattr(graphviz, "available", lambda: [broken])
    assert "dot is broken" in draw.graph(chain(1)).reason


def test_where_the_wheel_lacks_a_library_of_the_system_graphviz_itself_is_asked_for(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    broken = [
        sys.executable,
        "-c",
        "raise ImportError('libgobject-2.0.so.0: cannot open shared object file')",
    ]
    monkeypatch.setattr(graphviz, "PYGRAPHVIZ", broken)
    reason = draw.graph(chain(1)).reason
    assert "pygraphviz: ended with exit status 1 (ImportError: libgobject-2.0.so.0: cannot open" in reason
    assert reason.endswith("install Graphviz itself (Debian and Ubuntu: apt install graphviz)")


def test_a_layout_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(graphviz, "TIMEOUT_S", 0.01)
    assert "timed out" in draw.graph(chain(1)).reason


@pytest.mark.parametrize(("nodes", "hurried"), [(900, "False"), (1_100, "True")])
def test_only_large_graphs_are_laid_out_in_a_hurry(monkeypatch, nodes, hurried):
    told = "import sys; print('<svg>', 'nslimit' in sys.stdin.read(), '</svg>')"
    monkeypatch.setattr(graphviz, "available", lambda: [[sys.executable, "-c", told]])
    assert hurried in graphviz.svg_from_dot("digraph {" + "a -> b\n" * nodes + "}")


def test_a_picture_is_an_svg_with_its_facts_beside_it_and_a_sentence():
    bundle, metadata = draw.graph(chain(1))._repr_mimebundle_()
    assert bundle["image/svg+xml"].startswith("<svg")
    assert bundle["text/plain"].startswith("leaf (2) -> AccumulateGrad")
    assert metadata == {"image/svg+xml": {"alt": "The autograd graph from a leaf to the result: 2 Nodes."}}


@pytest.mark.parametrize(
    ("t", "error", "words"),
    [
        (torch.ones(2, requires_grad=True), ValueError, "found a leaf.*draw a result such as the loss"),
        (torch.ones(2), ValueError, "found a tensor with requires_grad=False"),
        ([chain(1), chain(1)], TypeError, "found a list of 2; draw one of them, or their sum"),
        (
            torch.nn.Linear(1, 1),
            TypeError,
            "expected a tensor, found Linear; draw what the computation returns",
        ),
        ({"loss": chain(1)}, TypeError, "found dict; draw one of the tensors in it, the loss perhaps"),
    ],
)
def test_graph_refuses_what_has_no_graph(t, error, words):
    with pytest.raises(error, match=words):
        draw.graph(t)


def test_graph_refuses_a_name_for_something_that_is_no_tensor():
    with pytest.raises(TypeError, match=r"params\['w'\] should be a tensor, found float"):
        draw.graph(chain(1), {"w": 1.0})


@pytest.mark.parametrize(
    "params",
    [
        [torch.ones(1)],
        torch.ones(3),
        5,
        torch.nn.Linear(1, 1),
        [torch.ones(1, 2)],
        [torch.ones(2, 3)],
        {1: torch.ones(1)},
        enumerate([torch.ones(1)]),
    ],
)
def test_graph_refuses_params_that_name_nothing(params):
    with pytest.raises(TypeError, match=r"params should name tensors, as \{\"w\": w\}|should be a tensor"):
        draw.graph(chain(1), params)


def test_graph_refuses_a_name_for_an_arrow():
    y = chain(1)
    with pytest.raises(ValueError, match=r"params\['y'\] was computed.*the arrow that leaves MulBackward0"):
        draw.graph(y * 2, {"y": y})
    assert "MulBackward0 -> y (2)" in draw.graph(y, {"y": y}).facts


def test_a_picture_outside_a_notebook_shows_its_facts():
    picture = draw.graph(chain(1))
    assert repr(picture) == str(picture) == picture.facts


def test_a_saved_tensor_that_was_edited_is_not_called_freed():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.add_(1)
    assert "saved result: edited in place since, backward() will raise" in draw.graph(y, saved=True).facts


def test_a_node_with_a_variable_of_its_own_is_drawn():
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = 3
            return x * 3

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.variable

    x = torch.ones(3, requires_grad=True)
    assert "Tripled" in draw.graph(Tripled.apply(x)).facts


class Optional(torch.autograd.Function):
    """Saves None where there is no third input."""

    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.save_for_backward(x, w, bias)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w, _ = ctx.saved_tensors
        return grad * w, grad * x, None


def test_a_function_that_saves_none_is_drawn():
    x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    picture = draw.graph(Optional.apply(x, w, None), {"x": x, "w": w}, saved=True)
    assert "OptionalBackward" in " ".join(boxes(picture.svg))
    assert picture.svg.count("orange") == 0  # the leaves stay blue
    assert picture.svg.count("lightblue") == 2
    picture = draw.graph(Optional.apply(x + 1, w, None), {"x": x, "w": w}, saved=True)
    assert picture.svg.count("orange") == 1
    assert [box for box in map(str.strip, boxes(picture.svg)) if "saved" in box] == ["saved_tensors[0] (3)"]


@pytest.mark.parametrize("view", [lambda x: (x * 2)[0], lambda x: (x * 2).view(-1).view(2, 3), lambda x: x.view(-1)])
def test_a_view_has_one_result_and_no_arrow_of_its_own(view):
    x = torch.ones(2, 3, requires_grad=True)
    picture = draw.graph(view(x), {"x": x})
    assert sum("result" in box for box in boxes(picture.svg)) == 1
    assert picture.svg.count('class="edge"') == len(picture.facts.splitlines())


def test_a_leaf_behind_a_view_keeps_its_box_whatever_its_name():
    x, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    picture = draw.graph(b.view(-1), {"b": b})
    assert "b (3)" in boxes(picture.svg)
    picture = draw.graph(x * b, {"dotted": x, "darkolivegreen3": b})
    assert {"dotted (3)", "darkolivegreen3 (3)"} <= set(boxes(picture.svg))


def test_a_hook_that_cannot_unpack_leaves_the_rest_of_the_graph():
    def unpack(name):
        raise FileNotFoundError(name)

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "a file", unpack):
        y = x.exp()
    picture = draw.graph(y, {"x": x}, saved=True)
    assert "ExpBackward0 saved result: cannot be read (a file)" in picture.facts
    assert picture.svg


def test_what_torchviz_cannot_draw_is_told_in_words(monkeypatch):
    import torchviz

    monkeypatch.setattr(torchviz.dot, "Digraph", lambda **options: 1 / 0)
    picture = draw.graph(chain(1))
    assert picture.svg is None
    assert "torchviz cannot draw this graph: ZeroDivisionError" in picture.reason
    assert "MulBackward0" in str(picture)


def test_what_cannot_be_read_is_not_called_freed():
    def gone(packed):
        raise RuntimeError("the disk is gone")

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, gone):
        y = x.exp()
    facts = draw.graph(y, saved=True).facts
    assert "result: cannot be read (the disk is gone)" in facts
    assert "freed" not in facts


@pytest.mark.parametrize("name", ["a\\", "a\\N", "\\l"])
def test_a_backslash_in_a_name_stays_one(name):
    x = torch.ones(2, requires_grad=True)
    picture = draw.graph((x * 2).sum(), {name: x})
    assert name in picture.facts
    if picture.svg is not None:
        assert name in picture.svg


def test_what_a_function_keeps_as_its_variable_is_no_leaf():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = torch.ones(7)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(2, requires_grad=True)
    facts = draw.graph(Doubled.apply(x).sum(), {"x": x}).facts
    assert "leaf" not in facts
    assert "x (2) -> AccumulateGrad" in facts
