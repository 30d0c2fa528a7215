"""Checks of notebook 45: patching."""

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, expect_like, refuse, refuse_first
from hooklab.course.checks.calls import close
from hooklab.course.checks.models import Before, fails, refuse_hooks
from hooklab.layers.features import features
from hooklab.layers.patch import patch

# ---- what the exercises share: a small network that reads from left to right ----


class _Block(nn.Module):
    """Mixes each position with those before it; `gain` comes as a second argument, `shift` by its name."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, gain: float = 1.0, *, shift: float = 0.0) -> Tensor:
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + gain * torch.tanh(self.linear(before)) + shift


class _Reader(nn.Module):
    """`fails` raises behind the blocks, when every layer has been called."""

    def __init__(self, width: int = 4, fails: bool = False):
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.blocks = nn.ModuleList([_Block(width), _Block(width)])
        self.head, self.fails = nn.Linear(width, 3), fails

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, 2.0, shift=0.5)
        if self.fails:
            raise RuntimeError("the data has ended")
        return self.head(x)


class _Stack(nn.Module):
    """Other layers with other names, in float64, with one argument each and no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_Block(3), nn.Tanh(), _Block(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


CLEAN = torch.tensor([[0, 1, 2, 3, 0], [2, 4, 1, 5, 2], [5, 0, 3, 1, 5]])
CORRUPT = torch.tensor([[2, 1, 0, 3, 0], [1, 4, 2, 5, 2], [3, 0, 5, 1, 5]])


def _points(count: int) -> Tensor:
    return torch.linspace(-2, 3, count * 12, dtype=torch.float64).sin().view(count, 4, 3)


def _examine_left(before: Before) -> None:
    refuse_hooks(before, "hooks_left")
    refuse_first([("mode_changed", lambda t: t.modes)], modes=before.changed_modes())


# ---- 45.A: another value in the place of what a layer receives ----


def patched(model, layer, position, value, x):
    def put(module, args):
        first, *others = args
        first = first.clone()
        first[:, position] = value
        return first, *others

    with model.get_submodule(layer).register_forward_pre_hook(put):
        return model(x)


LAYER, POSITION = "blocks.1", 2

RESULT = [  # what comes out of each mistake; `want` is the right result
    ("returned_nothing", lambda t: t.got is None),
    ("not_patched", lambda t: close(t.got, t.model(t.x))),
    ("patched_output", lambda t: close(t.got, _by_tool(t, at=(slice(None), POSITION), of="output"))),
    ("lost_arguments", lambda t: close(t.got, _without_arguments(t))),
    ("wrong_axis", lambda t: close(t.got, _by_tool(t, at=(POSITION,)))),
    ("one_sample", lambda t: close(t.got, _by_tool(t, at=(0, POSITION)))),
    ("everywhere", lambda t: close(t.got, _by_tool(t, at=...))),
]


def _by_tool(t, at, of="input"):
    """The result with the value at another index, or in what the layer returns."""
    with patch(t.model, LAYER, t.value, at=at, of=of):
        return t.model(t.x)


def _without_arguments(t):
    """The result where the layer gets the patched tensor and nothing else by position."""

    def put(module, args):
        changed = args[0].clone()
        changed[:, POSITION] = t.value
        return changed

    with t.model.get_submodule(LAYER).register_forward_pre_hook(put):
        return t.model(t.x)


def examine_patched(answer):
    model, value = _Reader(), torch.tensor([1.0, -0.5, 2.0, 0.25])
    kept, given = [], []
    handles = [
        model.blocks[0].register_forward_hook(lambda module, args, output: kept.append((output, output.clone()))),
        model.register_forward_pre_hook(lambda module, args: given.append(1)),
    ]
    before = Before(model)
    got = answer(model, LAYER, POSITION, value, CLEAN.clone())
    _examine_left(before)
    refuse_first(RUNS, given=given)
    if any(not torch.equal(output, copy) for output, copy in kept):
        refuse("edited_in_place")
    for handle in handles:
        handle.remove()
    want = patched(model, LAYER, POSITION, value, CLEAN)
    if not close(got, want):
        refuse_first(RESULT, got=got, want=want, model=model, value=value, x=CLEAN)
    expect_like(got, want)
    _examine_stack(answer)
    broken = _Reader(fails=True)
    with fails(broken):
        answer(broken, LAYER, POSITION, value, CLEAN.clone())


RUNS = [
    ("not_run", lambda t: not t.given),
    ("ran_twice", lambda t: len(t.given) > 1),
]


def _examine_stack(answer):
    """Another model, another layer, the last position, a number as the value, and one value for each sample."""
    stack, x = _Stack(), _points(2)
    for layer, position, value in (("body.2", -1, 0.25), ("body.0", 0, -x[:, 1])):
        got = answer(stack, layer, position, value, x.clone())
        want = patched(stack, layer, position, value, x)
        if not close(got, want):
            refuse("other_place", layer=layer, position=position)


PATCHED = Exercise("45.A", examine_patched, patched)

# ---- 45.B: the causal trace ----


@torch.no_grad()
def trace_table(model, layers, clean, corrupt, lead):
    with features(model, *layers) as good:
        high = float(lead(model(clean)))
    low = float(lead(model(corrupt)))
    table = []
    for layer in layers:
        row = []
        for position in range(clean.shape[1]):
            at = (slice(None), position)
            with patch(model, layer, good[layer][at], at=at):
                now = float(lead(model(corrupt)))
            row.append((now - low) / (high - low))
        table.append(row)
    return torch.tensor(table)


def _leads(t, source, into, of="output", at=None, together=False):
    """The lead with each place patched in a run on `into`, from a run on `source`."""
    model, layers, lead = t.model, t.layers, t.lead
    with torch.no_grad(), features(model, *layers, of=of, keep=lambda x: x.detach().clone()) as kept:
        model(source)
    rows = []
    for layer in layers:
        row = []
        for position in range(source.shape[1]):
            place = (slice(None), slice(0, position + 1) if together else position) if at is None else (at, position)
            with torch.no_grad(), patch(model, layer, kept[layer][place], at=place, of=of):
                row.append(float(lead(model(into))))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


TABLE = [  # `got` has the right shape; each test compares it with what the mistake gives
    ("by_the_lead", lambda t: _like(t, lambda now: (now - t.low) / t.high)),
    ("leads", lambda t: _like(t, lambda now: now)),
    ("not_divided", lambda t: _like(t, lambda now: now - t.low)),
    ("lost", lambda t: _like(t, lambda now: (t.high - now) / (t.high - t.low))),
    ("noised", lambda t: _same(t, (t.high - _leads(t, t.corrupt, t.clean)) / (t.high - t.low))),
    ("noised", lambda t: _same(t, (_leads(t, t.corrupt, t.clean) - t.low) / (t.high - t.low))),
    ("into_clean", lambda t: _same(t, torch.ones_like(t.want))),
    ("from_corrupt", lambda t: _same(t, torch.zeros_like(t.want))),
    ("adds_up", lambda t: _share(t, together=True)),
    ("patched_input", lambda t: _share(t, of="input")),
    ("one_sample", lambda t: _share(t, at=0)),
]


def _same(t, table):
    return torch.allclose(t.got, table.to(t.got), rtol=1e-3, atol=1e-4)


def _like(t, of_leads):
    return _same(t, of_leads(_leads(t, t.clean, t.corrupt)))


def _share(t, **how):
    return _same(t, (_leads(t, t.clean, t.corrupt, **how) - t.low) / (t.high - t.low))


def examine_trace_table(answer):
    model = _Reader().train()
    model.head.register_forward_hook(lambda module, args, output: None)
    _examine_table(answer, model, ["embed", "blocks.0", "blocks.1"], CLEAN, CORRUPT, _first_two, "wrong_shares")
    x = _points(2)
    other = x.clone()
    other[:, 1], other[:, 2] = x[:, 2], x[:, 1]
    _examine_table(answer, _Stack().eval(), ["body.2", "body.0"], x, other, _last_one, "other_model")
    broken = _Reader(fails=True)
    with fails(broken):
        answer(broken, ["embed"], CLEAN.clone(), CORRUPT.clone(), _first_two)


def _first_two(output: Tensor) -> Tensor:
    return (output[:, -1, 0] - output[:, -1, 1]).mean()


def _last_one(output: Tensor) -> Tensor:
    return output[:, -1, 2].sum() + output[:, 0, 1].mean()


def _examine_table(answer, model, layers, clean, corrupt, lead, otherwise):
    before = Before(model)
    got = answer(model, list(layers), clean.clone(), corrupt.clone(), lead)
    refuse_hooks(before, "hooks_left")
    want = trace_table(model, layers, clean, corrupt, lead).double()
    if not isinstance(got, Tensor):
        refuse("no_table", got=got)
    if got.shape == want.T.shape != want.shape:
        refuse("transposed", found=tuple(got.shape), expected=tuple(want.shape))
    if got.shape != want.shape:
        refuse("other_shape", found=tuple(got.shape), expected=tuple(want.shape))
    got = got.detach().double()
    with torch.no_grad():
        high, low = float(lead(model(clean))), float(lead(model(corrupt)))
    facts = {"model": model, "layers": layers, "clean": clean, "corrupt": corrupt, "lead": lead}
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-4):
        refuse_first(TABLE, got=got, want=want, high=high, low=low, **facts)
        refuse(otherwise)
    _examine_left(before)


TRACE_TABLE = Exercise("45.B", examine_trace_table, trace_table)

EXERCISES = [PATCHED, TRACE_TABLE]
