"""Checks of notebook 00: the first hooks."""

import torch
from torch import Tensor, nn, tensor

from hooklab.course.check import Exercise, expect_like, refuse, refuse_first
from hooklab.course.checks.calls import compare, equal, raised
from hooklab.course.checks.models import Before

# ---- 00.A: a hook that halves the gradient ----


def halve(grad):
    return grad / 2


HALVE = Exercise(
    "00.A",
    compare(
        halve,
        calls=[{"grad": tensor([2.0, -4.0, 6.0])}, {"grad": tensor([[1.0, -3.0], [0.5, 7.0]], dtype=torch.float64)}],
        mistakes=[
            ("edited_in_place", lambda t: not equal(t.after.grad, t.grad)),
            ("returned_nothing", lambda t: t.got is None),
        ],
        what="hook_returns",
    ),
    halve,
)

# ---- 00.B: run a model once, look at the shape inside it, leave no trace ----


def peek(model, name, x):
    shapes = []
    child = model.get_submodule(name)
    handle = child.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    try:
        return model(x), shapes[0]
    finally:
        handle.remove()


class _Net(nn.Module):
    """A net whose middle cannot be seen from outside."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.inner, self.head, self.fails = nn.Linear(3, 5), nn.Linear(5, 2), fails

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if not isinstance(hidden, Tensor):
            refuse("replaced_output", hidden=hidden)
        if self.fails:
            raise ValueError("this model always fails")
        return self.head(hidden)


RETURNED = [  # by a run; the hooks that were there before have noted their `calls`
    ("not_a_pair", lambda t: not (isinstance(t.got, tuple | list) and len(t.got) == 2)),
    ("shape_alone", lambda t: not any(isinstance(one, Tensor) for one in t.got) and tuple(t.got) == t.inside),
    ("swapped", lambda t: isinstance(t.got[0], tuple) and isinstance(t.got[1], Tensor)),
    ("wrong_call_count", lambda t: t.call_count != 2),
]

LEFT = [  # on the model, by a run
    ("left_behind", lambda t: t.before.new_hooks()),
    ("removed_others", lambda t: t.before.lost_hooks()),
    ("forward_replaced", lambda t: t.replaced),
]

FAILED = [  # a run whose model raised
    ("left_after_error", lambda t: t.before.new_hooks()),
    ("removed_others_after_error", lambda t: t.before.lost_hooks()),
    ("forward_replaced", lambda t: t.replaced),
    ("hid_the_error", lambda t: t.error is None),
    ("another_error", lambda t: not isinstance(t.error, ValueError)),
]


def examine_peek(answer):
    for name, inside in (("inner", (4, 5)), ("head", (4, 2))):
        model, x, calls = _Net(), torch.randn(4, 3), []
        want = model(x)
        want.sum().backward()  # gradients that must stay
        before = _hooked(model, name, calls)
        got = answer(model, name, x)
        refuse_first(RETURNED, got=got, name=name, inside=inside, call_count=len(calls))
        output, shape = got
        expect_like(output, want, "output")
        weight = model.get_submodule(name).weight
        if not output.requires_grad or torch.autograd.grad(output.sum(), weight, allow_unused=True)[0] is None:
            refuse("detached", name=name)
        if not isinstance(shape, tuple) or shape != inside:
            refuse("wrong_output_shape", name=name, inside=inside, shape=shape)
        refuse_first(LEFT, before=before, replaced=before.replaced_forwards())
        _examine_failing(answer, name)
    _examine_names(answer)


def _hooked(model, name, calls):
    """The model with hooks that are not the answer's, on itself and on its submodule."""
    for part in (model, model.get_submodule(name)):
        part.register_forward_hook(lambda *args: calls.append(args))
    return Before(model)


def _examine_failing(answer, name):
    model = _Net(fails=True)
    before = _hooked(model, name, [])
    error = raised(lambda: answer(model, name, torch.ones(1, 3)))
    refuse_first(FAILED, before=before, replaced=before.replaced_forwards(), error=error, name=name)


def _examine_names(answer):
    deep = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), nn.Linear(7, 2))
    for name, inside, key in (("0", (4, 7), "another_of_the_name"), ("0.0", (4, 5), "direct_children")):
        try:
            _, found = answer(deep, name, torch.ones(4, 3))
        except Exception:  # the names without a dot were found in the other model
            found = None
        if found != inside:
            refuse(key, found=found)


PEEK = Exercise("00.B", examine_peek, peek)

EXERCISES = [HALVE, PEEK]
