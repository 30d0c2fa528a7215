"""draw.timeline: what the trace saw, in its order and its rows."""

import html
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooklab import draw, trace
from hooklab._support.events import Event
from hooklab.draw import timelines
from hooklab.draw.svg import shortened
from hooklab.tracing import NODE_CREATION_HOOK


@pytest.fixture
def traced():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trace(net.eval()) as traced:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return traced


def texts(svg):
    return [text.strip("\u00a0 ") for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_every_module_and_the_optimizer_have_a_row_in_the_order_of_the_run(traced):
    shown = texts(draw.timeline(traced).svg)
    rows = [text for text in shown if text in {"Sequential", "0", "0.0", "0.1", "1", "SGD"} | {timelines.OUTSIDE}]
    assert [row for row in rows if not row.isdigit()] == [
        "Sequential",
        "0.0",
        "0.1",
        timelines.OUTSIDE,
        "SGD",
    ]


def test_the_legend_names_the_kinds_that_fired_and_no_others(traced):
    shown = set(texts(draw.timeline(traced).svg)) & set(timelines.STYLES)
    assert shown == {event.kind for event in traced.events} & set(timelines.STYLES)
    assert "tensor hook" not in shown


def test_every_kind_that_a_trace_records_can_be_drawn(traced):
    drawn = set(timelines.STYLES) | {"module backward begins", "module backward ends"}
    assert {event.kind for event in traced.events} <= drawn


def test_deeper_modules_are_indented(traced):
    assert re.search(r">\u00a0\u00a0\u00a0\u00a00\.0<", draw.timeline(traced).svg)


def test_the_facts_are_the_lines_of_the_trace(traced):
    assert draw.timeline(traced).facts.splitlines() == traced.lines()


def test_the_same_trace_gives_the_same_bytes(traced):
    assert draw.timeline(traced).svg == draw.timeline(traced).svg


@pytest.mark.skipif(NODE_CREATION_HOOK is None, reason="without it Nodes are not told apart by module")
def test_what_a_checkpoint_computes_again_shares_the_rows_of_a_large_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)) for _ in range(8)])

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    net = Net()
    with trace(net) as traced:
        net(torch.ones(1, 2)).sum().backward()
    assert any("#2" in event.where for event in traced.events)
    shown = texts(draw.timeline(traced).svg)
    assert not [text for text in shown if "#2" in text]
    assert {"blocks.0", "blocks.7"} <= set(shown)
    assert len({"blocks.0.0", "blocks.0", "Net"} & set(shown)) > 1
    assert len([text for text in shown if text.startswith(("blocks", "Net"))]) <= timelines.MAX_ROWS


def test_long_names_leave_room_for_the_events():
    name = "a_layer_with_a_name_of_its_own_" * 5
    net = nn.Sequential()
    net.add_module(name, nn.Linear(2, 2))
    with trace(net) as traced:
        net(torch.ones(1, 2)).sum().backward()
    shown = texts(draw.timeline(traced).svg)
    assert name not in shown
    assert shortened(name, timelines.MAX_NAME) in shown


def test_names_of_phases_do_not_run_into_each_other(traced):
    phases = ["backward", "recompute"] * 8
    events = [Event("Node hook", "x", phase) for phase in phases for _ in range(10)]
    shown = texts(timelines.drawn(events, "svg").decode())
    assert (shown.count("backward"), shown.count("recompute")) == (8, 0)
    assert texts(draw.timeline(traced).svg).count("backward") == 1


def test_a_large_model_is_folded_into_rows_that_can_be_read_and_facts_that_can_be_counted():
    net = nn.Sequential(*[nn.Sequential(*[nn.Linear(1, 1) for _ in range(5)]) for _ in range(20)])
    with trace(net) as traced:
        net(torch.ones(1, 1)).backward()
    picture = draw.timeline(traced)
    rows = set(texts(picture.svg)) & {event.where for event in traced.events}
    assert {"Sequential", "19"} <= rows
    assert "19.4" not in rows
    counts = {(phase, kind): int(count) for phase, kind, count in re.findall(r"(\w+) +(.+?) +(\d+)", picture.facts)}
    assert counts["forward", "forward hook"] == 121
    assert sum(counts.values()) == len(traced.events)


def test_tensors_are_drawn_without_a_model():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.retain_grad()
    with trace(x=x, y=y) as traced:
        y.sum().backward()
    assert {"x", "y", "x, y", "retain_grad", "multi-grad hook"} <= set(texts(draw.timeline(traced).svg))


def test_a_forward_that_raised_is_drawn(traced):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with pytest.raises(RuntimeError), trace(net) as traced:
        net(torch.ones(1, 2))
    assert "forward raised" in texts(draw.timeline(traced).svg)


def test_without_matplotlib_the_facts_are_shown_with_what_to_install(traced, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = draw.timeline(traced)
    assert picture.svg is None
    assert "pip install matplotlib" in str(picture)
    assert traced.lines()[0] in str(picture)


def test_timeline_refuses_what_is_no_trace_and_a_trace_without_events():
    with pytest.raises(TypeError, match=r"expected what hooklab\.trace returns, found list"):
        draw.timeline([])
    empty = trace(x=torch.ones(1, requires_grad=True))
    empty.remove()
    with pytest.raises(ValueError, match="nothing has fired yet"):
        draw.timeline(empty)


@pytest.mark.parametrize("name", ["$x_$", "权重", "a<b&c"])
def test_a_name_is_written_as_it_is_without_a_warning(name, recwarn):
    x = torch.ones(2, requires_grad=True)
    with trace(**{name: x}) as events:
        (x * 2).sum().backward()
    picture = draw.timeline(events)
    assert html.escape(name, quote=False) in picture.svg
    assert not recwarn.list


def test_a_loss_that_is_kept_from_the_step_before_changes_no_row():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(20)])

    def rows(kept):
        with trace(net) as traced:
            net(torch.ones(1, 2)).sum().backward()
        # Beside the rows only the ticks of the axis are whole numbers, and they are larger.
        return [row for row in texts(draw.timeline(traced).svg) if row in rows_of_the_net]

    rows_of_the_net = {
        "Sequential",
        timelines.OUTSIDE,
        *map(str, range(20)),
        *(f"{n}.0.weight" for n in range(20)),
    }
    assert rows(None) == rows(net(torch.ones(1, 2)).sum())


def test_more_events_than_can_be_told_apart_are_not_drawn(monkeypatch, traced):
    monkeypatch.setattr(draw, "MAX_EVENTS", len(traced.events) - 1)
    picture = draw.timeline(traced)
    assert not picture.svg
    assert f"{len(traced.events)} events, more than the {draw.MAX_EVENTS}" in picture.reason


def test_a_chinese_name_has_the_room_that_it_takes():
    def left_of_the_axis(name):
        svg = timelines.drawn([Event("forward hook", name, "forward", inside=(name,))] * 40, "svg").decode()
        return float(re.search(r'id="patch_2">\s*<path d="M ([\d.]+)', svg)[1])

    assert left_of_the_axis("编码器编码器编码器") > 1.2 * left_of_the_axis("abcabcabc")
