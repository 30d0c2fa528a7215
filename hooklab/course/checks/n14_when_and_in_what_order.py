"""Checks of notebook 14: which hooks fire, and in what order."""

from collections import Counter
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hooklab.census import HookLeak, hooks_on, no_leftovers
from hooklab.course.check import Exercise, Phrase, refuse, refuse_first, refuse_same_object
from hooklab.course.checks.tensor_hooks import (
    after_other_half,
    backward,
    middle,
    refuse_never_freed,
    refuse_zero_for_none,
    values,
)

# ---- 14.A: a hook that fires once and takes itself off ----


def on_first_gradient(tensor, function):
    def hook(grad):
        if grad is not None:
            handle.remove()
            function(grad)

    handle = tensor.register_hook(hook)


FIRED = [  # after two backward passes of `y`, which has a hook of `ours`; what `function` got is in `seen`
    ("not_hung", lambda t: not t.seen and not t.hung),
    ("never_called", lambda t: not t.seen),
    ("called_again-still", lambda t: len(t.seen) > 1 and len(t.y._backward_hooks) > 1),
    ("called_again", lambda t: len(t.seen) > 1),
    ("wrong_gradient", lambda t: t.seen != [[3.0, 3.0]]),
    ("changed", lambda t: t.x.grad.tolist() == [610.0, 610.0]),
    ("changed_otherwise", lambda t: t.x.grad.tolist() != [16.0, 16.0]),
    ("removed_others", lambda t: len(t.ours) != 2),
    ("stays", lambda t: len(t.y._backward_hooks) != 1),
]


def examine_on_first_gradient(answer):
    hang = partial(_hang, answer)
    x = torch.ones(2, requires_grad=True)
    y, ours = x * 2, []
    y.register_hook(lambda grad: ours.append(1))
    seen = hang(y)
    if seen:
        refuse("called_at_once")
    hung = len(y._backward_hooks) > 1
    backward(y, 3, 5)
    refuse_first(FIRED, x=x, y=y, ours=ours, seen=seen, hung=hung, count=len(seen))
    _examine_apart(hang)
    if after_other_half(hang) != [[1.0, 1.0]]:
        refuse("counted_none")
    refuse_zero_for_none(hang)
    y = x * 2
    seen = hang(y)
    torch.autograd.grad((y * 3).sum(), y)
    if not seen:
        refuse("misses_grad")
    _examine_leaf(hang)


def _hang(answer, tensor):
    """The list into which the answer's `function` puts what it gets; what it returns would be another gradient."""
    seen = []

    def function(grad):
        seen.extend(values([grad]))
        return torch.full((2,), 300.0)

    answer(tensor, function)
    return seen


def _examine_apart(hang):
    x = torch.ones(2, requires_grad=True)
    first, second = x * 2, x * 3
    seen = hang(first), hang(second)
    backward(first + second, 1, 1)
    if (counts := [*map(len, seen)]) != [1, 1]:
        refuse("shared", counts=counts)
    # What is noted by the id of a tensor would hold for the next tensor at this address, too.
    tensor = middle()
    seen = hang(tensor), hang(tensor)
    backward(tensor, 1, 1)
    if [*map(len, seen)] != [1, 1]:
        refuse("one_per_tensor")


def _examine_leaf(hang):
    leaf = torch.ones(2, requires_grad=True)
    loss = (leaf * 3).sum()
    seen = hang(leaf)
    with suppress(RuntimeError):  # a multi-grad hook does not bear it
        torch.autograd.grad(loss, leaf)
    if not seen:
        refuse("misses_grad_on_leaf")
    backward(leaf, 3)  # fills `.grad`
    seen = hang(leaf)
    backward(leaf, 3, 3)
    if len(seen) != 1:
        refuse("asks_for_grad", count=len(seen))


ON_FIRST_GRADIENT = Exercise("14.A", examine_on_first_gradient, on_first_gradient)

# ---- 14.B: the places where a function has left hooks ----


def left_by(function, model):
    try:
        with no_leftovers(model):
            function(model)
    except HookLeak as leak:
        return [hook.place for hook in leak.hooks]
    return []


def look(*args):
    """A hook that was there before, or is left behind."""


def _net():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    net[1].register_forward_hook(look)
    net[2].register_forward_pre_hook(look)
    return net


def _forgets(net):
    net[1].register_forward_hook(look)
    net[1].register_forward_hook(look)
    net[2].weight.register_hook(look)
    net[0].register_forward_pre_hook(look).remove()


def _forgets_others(net):
    net.register_forward_hook(look)
    net[0].register_full_backward_hook(look)
    net[2].register_forward_pre_hook(look)
    net[2].bias.register_post_accumulate_grad_hook(look)


def _swaps(net):
    net[1]._forward_hooks.popitem()
    net[1].register_forward_hook(look)


FORGOTTEN = [  # after `_forgets`: hooks are `there`, and should be where they are `due`
    ("added", lambda t: not Counter(t.due) - Counter(t.there) and len(t.there) > len(t.due)),
    ("removed", lambda t: sorted(t.there) != sorted(t.due)),
    ("too_many", lambda t: t.extra),
    ("found_none", lambda t: not t.got),
    ("missed_twin", lambda t: "1" not in t.got),
    ("missed_parameter", lambda t: "2.weight" not in t.got),
    ("wrong_count", lambda t: sorted(t.got) != ["1", "1", "2.weight"]),
]


def examine_left_by(answer):
    net, calls = _net(), []
    got = answer(calls.append, net)
    if len(calls) != 1:
        refuse("call_count", count=len(calls))
    if calls[0] is not net:
        refuse("other_model")
    _expect_places(got)
    if got:
        refuse("counted_old", got=got)
    due = [*_places(net), "1", "1", "2.weight"]
    got = answer(_forgets, net)
    _expect_places(got)
    extra = [place for place in got if place not in ("1", "2.weight")]
    refuse_first(FORGOTTEN, got=got, extra=extra, due=due, there=_places(net))
    got, want = sorted(answer(_forgets_others, _net())), ["0", "2", "2.bias", "Sequential"]
    if got != want:
        refuse("kinds_missed", want=want, got=got)
    got = answer(_swaps, _net())
    if [*got] != ["1"]:
        refuse("by_number", got=got)


def _places(net):
    return [hook.place for hook in hooks_on(net)]


def _expect_places(got):
    if not isinstance(got, list | tuple):
        refuse("not_a_list", got=got)
    for place in got:
        if not isinstance(place, str):
            refuse("not_places", place=place)


LEFT_BY = Exercise("14.B", examine_left_by, left_by)

# ---- 14.C: the gradient that is passed on in the end ----


def final_gradient(tensor):
    seen = []
    edge = get_gradient_edge(tensor)
    number = edge.output_nr

    def note(grads):
        if grads[number] is not None:
            seen.append(grads[number].clone())

    edge.node.register_prehook(note)
    return seen


FINAL = [  # what two backward passes leave: a hook before the answer's made 30 of 3, one after it 31, and `y`'s Node makes 62 of it
    ("nothing", lambda t: not t.got),
    ("too_early", lambda t: t.got[0] == [30.0, 30.0]),
    ("too_late", lambda t: t.got[0] == [62.0, 62.0] and not t.tensor.is_leaf),
    ("accumulated", lambda t: t.got == [[31.0, 31.0], [62.0, 62.0]]),
    ("no_copy", lambda t: t.got[0] == [62.0, 62.0]),
    ("whole_tuple", lambda t: isinstance(t.got[0], tuple)),
    ("wrong_values", lambda t: t.got != [[31.0, 31.0], [31.0, 31.0]]),
]


def examine_final_gradient(answer):
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = x * 2
    refuse_first(FINAL, got=_recorded(answer, y, (y * 3).sum()), tensor=y, place=Phrase("middle"))
    if x.grad.tolist() != [124.0, 124.0]:
        refuse("changed")
    _examine_two_tensors(answer)
    _examine_leaves(answer)
    first, second = middle().chunk(2)
    got = _recorded(answer, second, (first * 7 + second * 3).sum())
    if got != [[31.0], [31.0]]:
        refuse("wrong_output", got=got)
    if after_other_half(answer) != [[1.0, 1.0]]:
        refuse("none_is_no_gradient")
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad.mul_(100))
    y = x + 0
    got = answer(y)
    backward(y, 3)
    if values(got) != [[3.0, 3.0]]:
        refuse("shares_memory")
    refuse_zero_for_none(answer)
    refuse_never_freed(answer)


def _recorded(answer, tensor, loss):
    tensor.register_hook(lambda grad: grad * 10)
    got = answer(tensor)
    if not isinstance(got, list):
        refuse("not_a_list", got=got)
    tensor.register_hook(lambda grad: grad + 1)
    loss.backward(retain_graph=True)
    loss.backward()
    for item in got:
        if not isinstance(item, Tensor | tuple | None):
            refuse("not_tensors", item=item)
        if isinstance(item, Tensor) and item.dtype != tensor.dtype:
            refuse("wrong_dtype", tensor=tensor, item=item)
    return values(got)


def _examine_two_tensors(answer):
    first, second = middle(), middle()
    lists = [answer(first), answer(second)]
    refuse_same_object(*lists)
    backward(first, 3)
    backward(second, 4)
    found, other = map(values, lists)
    if (found, other) != ([[3.0, 3.0]], [[4.0, 4.0]]):
        refuse("shared", found=found, other=other)


def _examine_leaves(answer):
    leaf = torch.ones(2, requires_grad=True)
    try:
        got = _recorded(answer, leaf, (leaf * 3).sum())
    except AttributeError as error:
        if error.obj is not None or not str(error.name).startswith(("register", "next_functions")):
            raise
        refuse("leaf_has_no_grad_fn")
    refuse_first(FINAL, got=got, tensor=leaf, place=Phrase("leaf"))
    if leaf.grad.tolist() != [62.0, 62.0]:
        refuse("changed_leaf", grad=leaf.grad)
    _examine_after_storing(answer)


def _examine_after_storing(answer):
    def set_to_zero(leaf):
        leaf.grad.zero_()

    leaf = torch.ones(2, requires_grad=True)
    loss = (leaf * 3).sum()
    got = answer(leaf)
    leaf.register_post_accumulate_grad_hook(set_to_zero)
    loss.backward()
    if (found := values(got)) != [[3.0, 3.0]]:
        refuse("after_storing", found=found)


FINAL_GRADIENT = Exercise("14.C", examine_final_gradient, final_gradient)

EXERCISES = [ON_FIRST_GRADIENT, LEFT_BY, FINAL_GRADIENT]
