"""Checks of notebook 00: the first hooks."""

import torch
from torch import Tensor, nn

from hooklab.census import hooks_on
from hooklab.course.check import Exercise, expect_like, refuse

# ---- 00.A: a hook that halves the gradient ----


def halve(grad):
    return grad / 2


def examine_halve(answer):
    for grad in (torch.tensor([2.0, -4.0, 6.0]), torch.randn(2, 3, dtype=torch.float64)):
        before = grad.clone()
        got = answer(grad)
        if not torch.equal(grad, before):
            refuse("edited_in_place")
        if got is None:
            refuse("returned_nothing")
        expect_like(got, halve(before), "hook_returns")


HALVE = Exercise("00.A", examine_halve, halve)

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


def examine_peek(answer):
    for name, shape in (("inner", (4, 5)), ("head", (4, 2))):
        model, x, calls = _Net(), torch.randn(4, 3), []
        want = model(x)
        for part in (model, model.get_submodule(name)):
            part.register_forward_hook(lambda *args, calls=calls: calls.append("ours"))
        model.zero_grad()
        want.sum().backward(retain_graph=True)  # gradients that must stay
        before = hooks_on(model)
        _examine_run(answer(model, name, x), calls, want, model, name, shape)
        _examine_traces(model, before)
        _examine_failing(answer, name)
    deep = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), nn.Linear(7, 2))
    found = []
    for name in ("0", "0.0"):
        try:
            found.append(answer(deep, name, torch.ones(4, 3))[1])
        except Exception:  # all names without a dot were found
            found.append(None)
    if found[0] != (4, 7):
        refuse("another_of_the_name", found=found[0])
    if found[1] != (4, 5):
        refuse("direct_children")


def _examine_run(got, calls, want, model, name, inside):
    if not (isinstance(got, tuple | list) and len(got) == 2):
        refuse("not_a_pair", got=got)
    if not any(isinstance(one, Tensor) for one in got) and tuple(got) == inside:
        refuse("shape_alone", inside=inside)
    output, shape = got
    if isinstance(shape, Tensor) and isinstance(output, tuple):
        refuse("swapped")
    if len(calls) != 2:
        refuse("wrong_call_count", name=name, count_calls=len(calls))
    expect_like(output, want, "output")
    weight = model.get_submodule(name).weight
    if not output.requires_grad or torch.autograd.grad(output.sum(), weight, allow_unused=True)[0] is None:
        refuse("detached", name=name)
    if not isinstance(shape, tuple) or tuple(shape) != inside:
        refuse("wrong_output_shape", name=name, inside=inside, shape=shape)


def _examine_traces(model, before):
    after = hooks_on(model)
    if any(hook not in before for hook in after):
        refuse("left_behind")
    if any(hook not in after for hook in before):
        refuse("removed_others")
    _examine_forward(model)


def _examine_forward(model):
    for name, part in model.named_modules():
        if part.forward != type(part).forward.__get__(part):
            place = f"{name}.forward" if name else "forward"
            refuse("forward_replaced", place=place)


def _examine_failing(answer, name):
    model, raised = _Net(fails=True), None
    for part in (model, model.get_submodule(name)):
        part.register_forward_hook(lambda *args: None)
    before = hooks_on(model)
    try:
        answer(model, name, torch.ones(1, 3))
    except Exception as error:
        raised = error
    if any(hook not in before for hook in hooks_on(model)):
        refuse("left_after_error")
    if any(hook not in hooks_on(model) for hook in before):
        refuse("removed_others_after_error")
    _examine_forward(model)
    if raised is None:
        refuse("hid_the_error")
    if not isinstance(raised, ValueError):
        refuse("another_error", name=name, raised=raised)


PEEK = Exercise("00.B", examine_peek, peek)

EXERCISES = [HALVE, PEEK]
