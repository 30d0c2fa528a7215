"""docs/cheatsheet.md and docs/glossary.md; each hook is run in one training step, each call of hooklab on a small model."""

import copy
import re
from collections import OrderedDict

import atlas
import notebook_form
import pytest
import reference_pages
import torch
from prose_rules import HAN, SPAN
from torch import nn

import hooklab

HOOKS = atlas.on_the_sheet()


class Multiply(torch.autograd.Function):
    """The one Node of the step; it tells when it has run."""

    @staticmethod
    def forward(ctx, x, weight, step):
        ctx.save_for_backward(x, weight)
        ctx.step = step
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.step.last = "node"
        return grad * weight, grad * x, None


class Layer(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))
        self.step = step

    def forward(self, x):
        self.step.last = "forward"
        output = Multiply.apply(x, self.weight, self.step)
        self.step.last = "output"
        return output


class Descent(torch.optim.Optimizer):
    def __init__(self, params, step):
        super().__init__(params, {})
        self.training_step = step

    def step(self):
        self.training_step.last = "step"


class Step:
    """One training step with one hook on it, as its row of the table registers it."""

    def __init__(self, row=None, returns="None", removed=False):
        self.row, self.last, self.seen, self.registration = row, "start", [], None
        self.x, self.module = torch.tensor([2.0], requires_grad=True), Layer(self)
        self.names = {
            "graph": torch.autograd.graph,
            "module": self.module,
            "parameter": self.module.weight,
            "note": self.note,
        }
        self.names |= {"pack": lambda tensor: tensor, "unpack": lambda packed: packed}
        self.names |= {"tensors": [self.x, self.module.weight], "optimizer": Descent(self.module.parameters(), self)}
        if row:
            exec(f"def {row['gets']}:\n    note()\n    return {returns}", self.names)
        self.run(removed)

    def note(self):
        stored = self.last == "node" and self.module.weight.grad is not None
        self.seen.append("stored" if stored else self.last)

    def run(self, removed):
        self.register(removed, early=True)
        output = self.names["tensor"] = self.module(self.x)
        self.names["node"] = output.grad_fn
        if self.row and self.row["handle"] == "with" and not removed:
            self.registration.__exit__(None, None, None)
        self.register(removed, early=False)
        output.sum().backward()
        self.names["optimizer"].step()
        self.values = {
            "output": output.item(),
            "x.grad": self.x.grad.item(),
            "weight.grad": self.module.weight.grad.item(),
        }

    def register(self, removed, early):
        if not self.row or early == self.row["call"].startswith(("tensor.", "node.")):
            return
        self.registration = eval(self.row["call"], self.names)
        if self.row["handle"] == "with":
            self.registration.__enter__()
            if removed:
                self.registration.__exit__(None, None, None)
        elif removed:
            self.registration.remove()


def each_hook(test):
    return pytest.mark.parametrize("row", HOOKS, ids=lambda row: row["called"]["en"])(test)


@each_hook
def test_a_hook_with_this_signature_fires_at_this_moment_and_changes_nothing(row):
    step = Step(row, returns=row.get("looks", "None"))
    assert set(step.seen) == {row["after"]}
    assert step.values == Step().values == {"output": 6, "x.grad": 3, "weight.grad": 2}


@each_hook
def test_what_the_hook_returns_changes_what_the_table_says(row):
    if "raises" in row:
        with pytest.raises(TypeError, match="hook returned 'tuple'"):
            Step(row, returns=row["returns"])
        return
    plain = Step().values
    wanted = {name: value * (10 if name in row["changes"] else 1) for name, value in plain.items()}
    step = Step(row, returns=row["returns"])
    assert step.seen
    assert step.values == wanted


@each_hook
def test_a_hook_that_came_off_does_not_fire(row):
    assert Step(row, returns=row.get("looks", "None"), removed=True).seen == []


def test_the_cheat_sheet_has_the_hooks_of_the_map_in_the_order_of_the_map():
    start = notebook_form.cells(notebook_form.read(notebook_form.NOTEBOOKS / "00_start_here.ipynb"))
    (printed,) = (cell.outputs[0].text for cell in start if cell.id == "map-backward")
    assert [row["sheet"] for row in HOOKS] == list(range(1, 14))
    assert [row["called"]["en"] for row in HOOKS] == re.findall(r"^ ?\d+ (.+)$", printed, re.MULTILINE)


@each_hook
def test_a_row_says_the_same_in_both_languages_and_leads_to_a_section(row):
    for text in (row["called"], row["fires"], atlas.may_return(row), row["trap"]):
        zh, en = text["zh"], text["en"]
        assert HAN.search(zh)
        assert not HAN.search(en)
        assert sorted(SPAN.findall(zh)) == sorted(SPAN.findall(en))
    stem, cell_id = row["at"]
    cells = notebook_form.cells(notebook_form.read(notebook_form.NOTEBOOKS / f"{stem}.ipynb"))
    assert [cell.source[:3] for cell in cells if cell.id == cell_id] == ["## "]


@pytest.mark.parametrize("language", reference_pages.CHEATSHEETS)
def test_the_cheat_sheet_is_up_to_date_and_fits_on_one_page(language):
    page = reference_pages.CHEATSHEETS[language].read_text(encoding="utf-8")
    assert page == reference_pages.cheatsheet(language), "run `make refresh`"
    for part in re.split(r"(?m)^(?=## )", page):
        assert len(part.splitlines()) <= 32
        assert len(re.sub(r"\]\([^)]*\)", "]", part)) <= 4000, "what is printed"


CALLS = reference_pages.calls()


def each_call(test):
    return pytest.mark.parametrize("row", CALLS, ids=lambda row: row["call"])(test)


@each_call
def test_a_call_of_the_sheet_runs_and_its_hooks_come_off_as_it_says(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(OrderedDict(layer1=nn.Sequential(nn.Linear(3, 4)), layer2=nn.ReLU()))
    x = torch.ones(2, 3)
    y = model(x)
    names = {name: getattr(hooklab, name) for name in hooklab.__all__} | {"x": x, "y": y, "model": model}
    names |= {"nn": nn, "other": copy.deepcopy(model), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    found = eval(row["call"].split(" = ", 1)[-1], names)
    hooks = len(hooklab.hooks_on(model)) + len(hooklab.hooks_on(y)) + len(hooklab.hooks_on(names["optimizer"]))
    stays = row.get("stays")
    assert bool(hooks) == (stays in ("with", "handle")) or "segments" in row["call"]
    if stays == "block":
        with found:
            model(x)
        assert not hasattr(found, "remove")
    elif stays:
        found.remove()
    assert hooklab.hooks_on(model) == hooklab.hooks_on(y) == hooklab.hooks_on(names["optimizer"]) == []


@each_call
def test_a_call_of_the_sheet_says_the_same_in_both_languages_and_leads_to_its_limits(row):
    zh, en = row["gives"]["zh"], row["gives"]["en"]
    assert HAN.search(zh)
    assert not HAN.search(en)
    assert sorted(SPAN.findall(zh)) == sorted(SPAN.findall(en))
    for page in ("limits.md", "limits.zh-CN.md"):
        assert f"\n## {row['limits']}\n" in (reference_pages.DOCS / page).read_text(encoding="utf-8")


def test_every_call_of_the_package_is_on_the_sheet():
    text = " ".join(row["call"] + row["gives"]["en"] for row in CALLS)
    left = {name for name in hooklab.__all__ if not re.search(rf"\b{name}\b", text)}
    assert left == {"HookRecord", "check"}, "what hooks_on returns, and what belongs to the course"
    assert {f"draw.{name}" for name in hooklab.draw.__all__} - set(re.findall(r"draw\.\w+", text)) == {"draw.Picture"}


def test_the_glossary_is_up_to_date_and_has_every_term():
    page = reference_pages.GLOSSARY.read_text(encoding="utf-8")
    assert page == reference_pages.glossary(), "run `make refresh`"
    rows = re.findall(r"^\| (\S+) \| ([^|]+) \| \[\d\d .+ · .+\]\(\.\./notebooks/\w+\.ipynb\) \|$", page, re.MULTILINE)
    assert len(rows) > 40
    assert len({zh for zh, _ in rows}) == len(rows)
