"""Checks of notebook 42: where the NaN began."""

from typing import Any, NamedTuple

import torch
from torch import nn

from hooklab.course.check import Exercise, expect_like, refuse, refuse_first, refuse_from_before
from hooklab.course.checks.models import Before, fails, refuse_hooks

NAN, INF = float("nan"), float("inf")

# ---- 42.A: the first bad layer, and was its input good? ----


def first_bad(model, batch):
    good, found, handles = {}, [], []

    def before(module, args):
        good[module] = bool(args[0].isfinite().all())

    for name, module in model.named_modules():

        def after(module, args, output, name=name):
            if not output.isfinite().all():
                found.append(name if good[module] else f"before {name}")

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))
    try:
        model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


class _Plus(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x):
        return x + self.value


class _DivideInPlace(nn.Module):
    def forward(self, x):
        return x.div_(0)


class _Hide(nn.Module):
    """What is not finite becomes 0."""

    def forward(self, x):
        return torch.where(x.isfinite(), x, 0.0)


class _Two(nn.Module):
    """`second` is defined first; plain code may spoil what is between the two, or what comes after them."""

    def __init__(self, first: nn.Module, between: float = 0.0, after: float = 0.0) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(2, 2), first
        self.between, self.after = between, after

    def forward(self, x):
        return self.second(self.first(x) + self.between) + self.after


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        self.inner(x)
        raise RuntimeError("the data has ended")


class _Case(NamedTuple):
    written: str
    model: nn.Module
    want: str | None
    mistakes: dict[Any, str]  # by what is returned
    batch: float = 1.0  # each entry


def _cases():
    linear = nn.Linear(2, 2)
    yield _Case("Sequential(Linear, ReLU)", nn.Sequential(linear, nn.ReLU()), None, {})
    inf_first = nn.Sequential(_Plus(INF), _Plus(-INF))
    yield _Case(
        "Sequential(x + inf, x - inf)", inf_first, "0", {"1": "nan_only", "before 1": "nan_only", "": "outermost"}
    )
    reverse = {"second": "by_definition", "before second": "by_definition", "": "outermost", "before ": "outermost"}
    yield _Case("second(first(x)), first: x + nan", _Two(_Plus(NAN)), "first", reverse)
    between = {"second": "blamed_the_next", "first": "blamed_the_one_before", "": "outermost"}
    yield _Case("second(first(x) + nan)", _Two(nn.Linear(2, 2), between=NAN), "before second", between)
    after = {None: "forgot_the_model", "second": "blamed_the_one_before"}
    yield _Case("second(first(x)) + nan", _Two(nn.Linear(2, 2), after=NAN), "", after)
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), _Plus(NAN)), nn.ReLU())
    yield _Case("Sequential(Sequential(Linear, x + nan), ReLU)", nested, "0.1", {"0": "outermost", "": "outermost"})
    in_place = nn.Sequential(nn.Linear(2, 2), _DivideInPlace())
    yield _Case("Sequential(Linear, x.div_(0))", in_place, "1", {"before 1": "looked_too_late"})
    yield _Case("a batch of nan", nn.Sequential(nn.Linear(2, 2)), "before 0", {"0": "blamed_the_next"}, NAN)
    hidden = nn.Sequential(_Hide(), nn.Linear(2, 2))
    yield _Case("a batch of nan, which the first layer hides", hidden, None, {"before 0": "judged_the_input"}, NAN)


def examine_first_bad(answer):
    earlier: set[str] = set()
    for case in _cases():
        runs: list[int] = []
        case.model.register_forward_pre_hook(lambda module, args, runs=runs: runs.append(1))
        before = Before(case.model)
        got = answer(case.model, torch.full((1, 2), case.batch))
        refuse_hooks(before, "hooks_left")
        if got is not None and not isinstance(got, str):
            refuse("no_name", got=got)
        refuse_from_before([(got or "").removeprefix("before ")], case.model, earlier)
        earlier |= set(dict(case.model.named_modules()))
        if len(runs) != 1:
            refuse("ran_twice" if runs else "not_run")
        if got != case.want:
            refuse(case.mistakes.get(got, "wrong_layer"), case=case.written, got=got)
    broken = _Fails()
    with fails(broken):
        answer(broken, torch.ones(1, 2))


FIRST_BAD = Exercise("42.A", examine_first_bad, first_bad)

# ---- 42.B: what is still bad? ----


def poisoned(model, optimizer):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, param in model.named_parameters():
        if param in optimizer.state:
            for key, value in optimizer.state[param].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
    return {name for name, t in tensors.items() if not t.isfinite().all()}


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.scale * self.norm(self.linear(x))


def _trained(make):
    """A model and its optimizer after one good step; the optimizer has the parameters in reverse order."""
    model = _Scaled()
    optimizer = make(list(model.parameters())[::-1])
    model(torch.arange(8.0).view(4, 2)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _adam():
    return _trained(lambda params: torch.optim.Adam(params, lr=0.01))


def _sgd():
    return _trained(lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9))


def _spoilt():
    """(the case, model, optimizer, the right names)"""
    yield "clean", *_adam(), set()
    fresh = _Scaled()
    yield "clean", fresh, torch.optim.Adam(fresh.parameters()), set()

    model, adam = _adam()
    model.norm.running_mean[0] = -INF
    yield "buffer", model, adam, {"norm.running_mean"}

    model, adam = _adam()
    model.scale[0] = NAN
    yield "unsaved", model, adam, {"scale"}

    model, adam = _adam()
    adam.state[model.linear.weight]["exp_avg"][0, 0] = NAN
    yield "state", model, adam, {"linear.weight/exp_avg"}

    model, sgd = _sgd()
    sgd.state[model.linear.bias]["momentum_buffer"][0] = INF
    sgd.state[model.linear.bias]["skipped"] = 3
    yield "momentum", model, sgd, {"linear.bias/momentum_buffer"}

    model, adam = _adam()
    model.linear.weight.data[0, 1] = INF
    model.linear.bias.grad[0] = NAN
    yield "weight", model, adam, {"linear.weight"}


POISONED = [  # `got` is a set of names, `want` the right one
    ("gradients", lambda t: t.case == "weight" and t.got == {"linear.weight", "linear.bias"}),
    ("no_weights", lambda t: t.case == "weight" and not t.got),
    ("no_buffers", lambda t: t.case == "buffer" and not t.got),
    ("saved_only", lambda t: t.case == "unsaved" and not t.got),
    ("no_state", lambda t: t.case == "state" and not t.got),
    ("adam_only", lambda t: t.case == "momentum" and not t.got),
    (
        "wrong_owner",
        lambda t: {name.rpartition("/")[2] for name in t.got} == {name.rpartition("/")[2] for name in t.want},
    ),
]


def examine_poisoned(answer):
    for case, model, optimizer, want in _spoilt():
        before = [value.clone() for value in _tensors(model, optimizer)]
        got = answer(model, optimizer)
        if not isinstance(got, set | frozenset) or not all(isinstance(name, str) for name in got):
            refuse("no_set", got=got)
        after = list(_tensors(model, optimizer))
        pairs = zip(before, after, strict=False)
        if len(before) != len(after) or not all(torch.allclose(a, b, equal_nan=True) for a, b in pairs):
            refuse("repaired")
        if case == "clean" and got:
            refuse("clean", got=sorted(got))
        if got != want:
            refuse_first(POISONED, case=case, got=got, want=want)
            refuse("wrong_names", got=sorted(got), count=len(want))


def _tensors(model, optimizer):
    yield from (*model.parameters(), *model.buffers())
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


WHAT_IS_POISONED = Exercise("42.B", examine_poisoned, poisoned)

# ---- 42.C: a length with a gradient at zero ----


def safe_norm(x):
    squares = (x * x).sum(-1)
    inside = torch.where(squares > 0, squares, 1.0)
    return torch.where(squares > 0, inside.sqrt(), 0.0)


ROWS = [[3.0, 4.0], [0.0, 0.0], [-6.0, 8.0]]

NORMS = [  # of ROWS: `got` and `grad` have a row for each
    ("clamped", lambda t: t.got[1] > 0 and t.got[0] == 5 and t.grad[1].isnan().any()),
    ("eps_outside", lambda t: t.got[1] > 0 and torch.isclose(t.got[0] - 5, t.got[1], rtol=1e-3)),
    ("eps_inside", lambda t: t.got[1] > 0),
    ("wrong_lengths", lambda t: not torch.allclose(t.got, t.want, rtol=1e-12, atol=0)),
    ("nan_gradient", lambda t: t.grad[1].isnan().any()),
    ("gradient_at_zero", lambda t: t.grad[1].any()),
    ("wrong_gradient", lambda t: not torch.allclose(t.grad, t.want_grad, rtol=1e-12, atol=0)),
]


def examine_safe_norm(answer):
    for shape, dtype in ((3, 2), torch.float64), ((2,), torch.float64), ((1, 3, 2), torch.float32):
        values = torch.tensor(ROWS if shape != (2,) else ROWS[0], dtype=dtype).view(shape)
        x = values.clone().requires_grad_()
        got, want = answer(x), values.norm(dim=-1)
        expect_like(got, want) if dtype == torch.float32 else _refuse_form(got, want)
        if got.grad_fn is None:
            refuse("no_graph")
        if any("Norm" in name for name in _operations(got)):
            refuse("used_norm")
        # The loss counts each row in another way.
        factors = torch.arange(1.0, want.numel() + 1, dtype=dtype).view_as(want)
        (grad,) = torch.autograd.grad((got * factors).sum(), x, allow_unused=True, materialize_grads=True)
        if x._backward_hooks:
            refuse("left_hook")
        if shape == (3, 2):
            want_grad = values / want.clamp(min=1e-300)[:, None] * factors[:, None]
            refuse_first(NORMS, got=got.detach(), want=want, grad=grad, want_grad=want_grad)
        elif not torch.allclose(got.detach(), want, rtol=1e-6):
            refuse("wrong_lengths")
        elif not torch.isfinite(grad).all():
            refuse("nan_gradient")


def _refuse_form(got, want):
    """Refuse another type, shape or dtype; the values are judged later."""
    expect_like(got if not isinstance(got, torch.Tensor) or got.shape != want.shape else want.to(got.dtype), want)


def _operations(tensor):
    """The names of the Nodes behind a tensor."""
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node.name()
        todo += [before for before, _ in node.next_functions]


SAFE_NORM = Exercise("42.C", examine_safe_norm, safe_norm)

EXERCISES = [FIRST_BAD, WHAT_IS_POISONED, SAFE_NORM]
