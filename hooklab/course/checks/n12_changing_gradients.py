"""Checks of notebook 12: changing gradients."""

import copy

import torch
from torch import Tensor, nn, tensor

from hooklab.course.check import (
    Exercise,
    expect_like,
    refuse,
    refuse_first,
    refuse_latest_call,
    refuse_other_items,
    refuse_removing_others,
    refuse_same_object,
)
from hooklab.course.checks.calls import all_close, equal, hook_maker, raised
from hooklab.course.checks.models import Before

# ---- 12.A: a hook maker that caps the norm of the gradient ----


def cap(limit):
    def hook(grad):
        norm = grad.norm()
        return grad * (limit / norm) if norm > limit else grad

    return hook


def _large(t):
    """Whether the gradient is above the limit, and how long it and what came of it are."""
    t.norm = t.grad.norm().item()
    t.length = t.got.norm().item() if isinstance(t.got, Tensor) else None
    return t.norm > t.limit


def _turned(t):
    return _same_kind(t) and not torch.allclose(t.got.detach() * t.norm, t.grad * t.length, rtol=1e-4)


def _same_kind(t):
    return isinstance(t.got, Tensor) and (t.got.shape, t.got.dtype) == (t.grad.shape, t.grad.dtype)


CAP = Exercise(
    "12.A",
    hook_maker(
        cap,
        calls=[
            {"limit": 2.0, "grad": tensor([1.0, 4.0])},
            {"limit": 2.0, "grad": tensor([[6.0, 3.0], [1.0, -8.0]], dtype=torch.float64)},
            {"limit": 2.0, "grad": torch.full((3,), -1.9)},  # no entry is above the limit, the norm is
            {"limit": 2.0, "grad": tensor([0.3, -0.4])},
            {"limit": 2.0, "grad": tensor([[2.0]])},
            {"limit": 100.0, "grad": tensor([30.0, 40.0])},
            {"limit": 2.0, "grad": tensor([1.2, 1.2])},  # whose sum is larger
            {"limit": 2.0, "grad": torch.zeros(3)},
        ],
        mistakes=[
            ("not_a_hook", lambda t: not callable(t.hook)),
            ("edited_in_place", lambda t: _large(t) and not equal(t.after.grad, t.grad)),
            ("edited_small", lambda t: not equal(t.after.grad, t.grad)),
            ("returned_nothing", lambda t: _large(t) and t.got is None),
            ("unchanged", lambda t: _large(t) and equal(t.got, t.grad)),
            ("clipped_entries", lambda t: _large(t) and equal(t.got, t.grad.clamp(-t.limit, t.limit))),
            ("nan_at_zero", lambda t: isinstance(t.got, Tensor) and t.got.isnan().any()),
            ("wrong_direction", lambda t: _large(t) and _turned(t)),
            ("wrong_length", lambda t: _large(t) and _same_kind(t) and abs(t.length - t.limit) > 1e-3),
            ("changed_small", lambda t: not _large(t) and isinstance(t.got, Tensor) and not t.got.allclose(t.grad)),
        ],
        what="the_gradient",
    ),
    cap,
)

# ---- 12.B: weight decay for a whole model ----


def decay(model, strength):
    def hook_for(param):
        return lambda grad: grad + strength * param.detach()

    return [param.register_hook(hook_for(param)) for param in model.parameters() if param.requires_grad]


class _Stack(nn.Module):
    """Parameters of one shape, so that a hook with the wrong one raises nothing; one is frozen, one in a child of a child."""

    def __init__(self) -> None:
        super().__init__()
        rows = (torch.randperm(8) + 1.0).reshape(4, 2)  # distinct whole numbers: sums are exact
        self.weight, self.gain, self.frozen, last = (nn.Parameter(row) for row in rows)
        self.frozen.requires_grad_(False)
        self.child = nn.ModuleDict({"inner": nn.ParameterDict({"bias": last})})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.gain + (x * 2) * self.child["inner"]["bias"] + self.frozen


class _Sum(nn.Module):
    """Two parameters that are added."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.left + self.right) * x


HUNG = [  # as soon as `decay` has returned
    ("changed_weights", lambda t: t.before.changed_state()),
    ("unfrozen", lambda t: t.before.thawed()),
    ("no_handles", lambda t: not isinstance(t.handles, list | tuple)),
    ("no_hooks", lambda t: not t.handles),
]

ADDED = [  # the first backward, after a step of training: `found` is compared with `plain`, which has no hooks
    ("nothing_added", lambda t: not any(map(torch.any, t.added.values()))),
    ("replaced", lambda t: all_close(t.found, t.penalty)),
    ("stale", lambda t: all_close(t.added, t.old_penalty)),
    ("last_one", lambda t: all_close(t.added, dict.fromkeys(t.added, t.penalty["child.inner.bias"]))),
    ("missed", lambda t: _missed(t)),
    ("wrong_addend", lambda t: _wrong_addend(t)),
]


def examine_decay(answer):
    model, x, strength = _Stack(), torch.tensor([2.0, -3.0]), 0.5
    old_penalty = _penalty(model, strength)
    (model(x) * 3).sum().backward()  # what is there before must stay
    before = Before(model)
    handles = answer(model, strength)
    refuse_first(HUNG, before=before, handles=handles)
    refuse_other_items(handles)
    _step(model)
    without_hooks = copy.deepcopy(model)  # a deep copy has none of the tensor hooks
    plain, found = _gradients(without_hooks, x), _gradients(model, x)
    if not all(map(torch.equal, model.parameters(), without_hooks.parameters())):
        refuse("changed_in_backward")
    _examine_added(model, strength, plain, found, old_penalty)
    _examine_neighbours(answer)
    _step(model)
    plain = _gradients(copy.deepcopy(model), 2 * x)
    want = {name: plain[name] + share for name, share in _penalty(model, strength).items()}
    if not all_close(_gradients(model, 2 * x), want):
        refuse("first_only")
    model(2 * x).sum().backward()  # on top of the last
    if not all_close(_grads(model), {name: 2 * grad for name, grad in want.items()}):
        refuse("empty_only")
    for handle in handles:
        handle.remove()
    if not all_close(_gradients(model, 2 * x), plain):
        refuse("not_removable")
    _examine_two_models(answer)


def _examine_added(model, strength, plain, found, old_penalty):
    refuse_first(
        ADDED,
        model=model,
        strength=strength,
        plain=plain,
        found=found,
        added={name: found[name] - plain[name] for name in plain},
        penalty=_penalty(model, strength),
        old_penalty=old_penalty,
    )


def _step(model):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)


def _gradients(model, x):
    model.zero_grad()
    model(x).sum().backward()
    return _grads(model)


def _grads(model):
    return {name: param.grad for name, param in model.named_parameters() if param.requires_grad}


def _penalty(model, strength):
    return {name: strength * param.detach() for name, param in model.named_parameters() if param.requires_grad}


def _missed(t):
    t.missed = [name for name, share in t.added.items() if not share.any()]
    return t.missed


def _wrong_addend(t):
    wrong = [name for name, share in t.penalty.items() if not torch.allclose(t.found[name], t.plain[name] + share)]
    if wrong:
        t.name, t.value, t.share = wrong[0], t.model.get_parameter(wrong[0]), t.added[wrong[0]]
    return wrong


def _examine_neighbours(answer):
    """Two parameters that are added receive one gradient, in the same memory."""
    model, x = _Sum(), torch.tensor([10.0, 20.0])
    answer(model, 0.5)
    found = _gradients(model, x)
    if all_close(found, {"left": x, "right": x}):
        refuse("asks_for_grad")
    if not all_close(found, {"left": x + 0.5, "right": x + 1.0}):
        refuse("edited_in_place")


def _examine_two_models(answer):
    models, strengths, x = (_Sum(), _Sum()), (0.5, 2.0), torch.tensor([10.0, 20.0])
    refuse_same_object(*map(answer, models, strengths))
    for model, strength in zip(models, strengths, strict=True):
        want = {name: x + share for name, share in _penalty(model, strength).items()}
        if not all_close(_gradients(model, x), want):
            refuse_latest_call()


DECAY = Exercise("12.B", examine_decay, decay)

# ---- 12.C: freeze some rows of a weight ----


def freeze_rows(weight, rows):
    def hook(grad):
        grad = grad.clone()
        grad[rows] = 0
        return grad

    return weight.register_hook(hook)


FROZEN = [  # as soon as `freeze_rows` has returned
    ("no_gradient", lambda t: not t.weight.requires_grad),
    ("changed_weights", lambda t: not equal(t.weight, t.ones)),
    (
        "no_handle",
        lambda t: isinstance(t.handle, list | tuple) or not hasattr(t.handle, "remove"),
    ),  # a list has one, too
]

ROWS = [  # the gradient of the first backward
    ("returned_nothing", lambda t: equal(t.got, t.factors) and t.weight._backward_hooks),
    ("edited_copy", lambda t: equal(t.got, t.factors) and t.weight._post_accumulate_grad_hooks),
    ("not_frozen", lambda t: equal(t.got, t.factors)),
    ("froze_everything", lambda t: not t.got.any()),
    ("inverted", lambda t: equal(t.got, t.factors - t.want)),
    ("wrong_rows", lambda t: t.zeros != t.rows),
]


def examine_freeze_rows(answer):
    factors = torch.arange(1.0, 16.0).reshape(5, 3)  # no row beside the frozen ones is their complement
    for dtype, rows in ((torch.float32, [0, 2]), (torch.float64, [3]), (torch.bfloat16, [1, 2])):
        for weight_first in (True, False):
            _examine_frozen(answer, factors.to(dtype), rows, weight_first)
    weights, frozen = [nn.Parameter(torch.ones(4, 2)) for _ in range(2)], ([0, 3], [1])
    for weight, rows in zip(weights, frozen, strict=True):
        answer(weight, list(rows))
    for weight, rows in zip(weights, frozen, strict=True):
        weight.sum().backward()
        if not (zeros := _zero_rows(weight.grad)):
            refuse("gone_with_handle")
        if zeros != rows:
            refuse_latest_call()
    weight = nn.Parameter(torch.ones(4, 2))
    refuse_removing_others(weight.register_hook, lambda: answer(weight, [1]))


def _examine_frozen(answer, factors, rows, weight_first):
    weight, neighbour = (nn.Parameter(torch.ones_like(factors)) for _ in range(2))
    ones, want = torch.ones_like(factors), factors.clone()
    want[rows] = 0

    def gradient(times=1):
        weight.grad = neighbour.grad = None
        both = weight + neighbour if weight_first else neighbour + weight  # one gradient for the two of them
        error = raised(lambda: (both * factors * times).sum().backward())
        if error is not None and "has changed the type of value" in str(error):
            refuse("changed_dtype", weight=weight)
        if error is not None:
            raise error
        return weight.grad

    handle = answer(weight, list(rows))
    refuse_first(FROZEN, weight=weight, ones=ones, handle=handle)
    got = gradient()
    refuse_first(ROWS, weight=weight, got=got, want=want, factors=factors, rows=rows, zeros=_zero_rows(got))
    expect_like(got, want, "gradient_weight")
    if not equal(neighbour.grad, factors):
        refuse("edited_in_place")
    if not equal(gradient(times=2), 2 * want):
        refuse("first_only")
    if not equal(weight, ones):
        refuse("changed_in_backward")
    handle.remove()
    if not equal(gradient(), factors):
        refuse("not_removable")


def _zero_rows(grad):
    return [row for row in range(len(grad)) if not grad[row].any()]


FREEZE_ROWS = Exercise("12.C", examine_freeze_rows, freeze_rows)

EXERCISES = [CAP, DECAY, FREEZE_ROWS]
