"""Checks of notebook 14: which hooks fire, and in what order."""

import gc
import weakref
from collections import Counter
from contextlib import suppress

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hooklab.census import HookLeak, hooks_on, no_leftovers
from hooklab.course.check import (
    Exercise,
    refuse,
    refuse_same_object,
)

# ---- 14.A: a hook that fires once and takes itself off ----


def on_first_gradient(tensor, function):
    def hook(grad):
        if grad is not None:
            handle.remove()
            function(grad)

    handle = tensor.register_hook(hook)


def examine_on_first_gradient(answer):
    x = torch.ones(2, requires_grad=True)
    y, ours, seen = x * 2, [], []
    y.register_hook(lambda grad: ours.append(1))

    def function(grad):
        seen.append(grad.tolist() if isinstance(grad, torch.Tensor) else grad)
        return torch.full((2,), 300.0)

    answer(y, function)
    if seen:
        refuse("called_at_once")
    hung = len(y._backward_hooks) > 1
    (y * 3).sum().backward(retain_graph=True)
    (y * 5).sum().backward()
    if not seen and not hung:
        refuse("not_hung")
    if not seen:
        refuse("never_called")
    if len(seen) > 1:
        still = len(y._backward_hooks) > 1
        refuse(
            "called_again",
            zh=f"反向跑了两遍，`function` 被调用了 {len(seen)} 次，应当只有第 1 次。"
            + ("钩子还挂着：取下它的那一句运行了吗？" if still else ""),
            en=f"Backward ran twice and `function` was called {len(seen)} times; only the 1st time is wanted."
            + (" The hook is still there: did the line that removes it run?" if still else ""),
        )
    if seen != [[3.0, 3.0]]:
        refuse("wrong_gradient", seen=seen[0])
    if x.grad.tolist() == [610.0, 610.0]:
        refuse("changed")
    if x.grad.tolist() != [16.0, 16.0]:
        refuse("changed_otherwise", x_grad=x.grad.tolist())
    if len(ours) != 2:
        refuse("removed_others")
    if len(y._backward_hooks) != 1:
        refuse("stays")
    _examine_apart(answer)
    _examine_two_functions(answer)
    _examine_none(answer)
    _examine_zero(answer)
    z, seen[:] = x * 2, []
    answer(z, function)
    torch.autograd.grad((z * 3).sum(), z)
    if not seen:
        refuse("misses_grad")
    leaf, seen[:] = torch.ones(2, requires_grad=True), []
    loss = (leaf * 3).sum()
    answer(leaf, function)
    with suppress(RuntimeError):  # a multi-grad hook does not bear it
        torch.autograd.grad(loss, leaf)
    if not seen:
        refuse("misses_grad_on_leaf")
    seen.clear()
    (leaf * 3).sum().backward()
    seen.clear()
    answer(leaf, function)
    for _ in range(2):
        (leaf * 3).sum().backward()
    if len(seen) != 1:
        refuse("asks_for_grad", count_seen=len(seen))


def _examine_apart(answer):
    """Two tensors, hooked one after the other."""
    x, counts = torch.ones(2, requires_grad=True), {"first": 0, "second": 0}
    first, second = x * 2, x * 3

    def count(name):
        return lambda grad: counts.update({name: counts[name] + 1})

    answer(first, count("first"))
    answer(second, count("second"))
    for _ in range(2):
        (first + second).sum().backward(retain_graph=True)
    if counts != {"first": 1, "second": 1}:
        refuse("shared", counts=list(counts.values()))


def _examine_two_functions(answer):
    """On one tensor; what is noted by its id would hold for the next tensor at this address, too."""
    tensor, calls = torch.ones(2, requires_grad=True) * 2, []
    answer(tensor, lambda grad: calls.append("first"))
    answer(tensor, lambda grad: calls.append("second"))
    for _ in range(2):
        tensor.sum().backward(retain_graph=True)
    if sorted(calls) != ["first", "second"]:
        refuse("one_per_tensor")


def _examine_none(answer):
    """The hook of one half of a chunk receives None where only the other half is used."""
    left, right = (torch.ones(4, requires_grad=True) * 2).chunk(2)
    seen = []
    answer(right, lambda grad: seen.append(None if grad is None else grad.tolist()))
    try:
        left.sum().backward(retain_graph=True)
    except (AttributeError, TypeError):  # the answer uses what it takes for a gradient
        seen.append(None)
    else:
        right.sum().backward()
    if seen != [[1.0, 1.0]]:
        refuse("counted_none")


def _examine_zero(answer):
    tensor, seen = torch.ones(2, requires_grad=True) * 2, []
    answer(tensor, lambda grad: seen.append(grad.tolist()))
    for factor in (0, 1):
        (tensor * factor).sum().backward(retain_graph=True)
    if seen == [[1.0, 1.0]]:
        refuse("zero_for_none")


ON_FIRST_GRADIENT = Exercise("14.A", examine_on_first_gradient, on_first_gradient)

# ---- 14.B: the places where a function has left hooks ----


def left_by(function, model):
    try:
        with no_leftovers(model):
            function(model)
    except HookLeak as leak:
        return [hook.place for hook in leak.hooks]
    return []


def _look(*args):
    """A hook that was there before, or is left behind."""


def _net():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    net[1].register_forward_hook(_look)
    net[2].register_forward_pre_hook(_look)
    return net


def _forgets(net):
    net[1].register_forward_hook(_look)
    net[1].register_forward_hook(_look)
    net[2].weight.register_hook(_look)
    net[0].register_forward_pre_hook(_look).remove()


def _forgets_others(net):
    net.register_forward_hook(_look)
    net[0].register_full_backward_hook(_look)
    net[2].register_forward_pre_hook(_look)
    net[2].bias.register_post_accumulate_grad_hook(_look)


def _swaps(net):
    net[1]._forward_hooks.popitem()
    net[1].register_forward_hook(_look)


def _expect_places(got):
    if not isinstance(got, list | tuple):
        refuse("not_a_list", got=got)
    for place in got:
        if not isinstance(place, str):
            refuse("not_places", place=place)


def examine_left_by(answer):
    net, calls = _net(), []
    got = answer(calls.append, net)
    if len(calls) != 1:
        refuse("call_count", count_calls=len(calls))
    if calls[0] is not net:
        refuse("other_model")
    _expect_places(got)
    if got:
        refuse("counted_old", got=got)
    places = [hook.place for hook in hooks_on(net)]
    got = answer(_forgets, net)
    _expect_places(got)
    _examine_all_there(net, places)
    if extra := [place for place in got if place not in ("1", "2.weight")]:
        refuse("too_many", got=got, extra=extra[0])
    if not got:
        refuse("found_none")
    if "1" not in got:
        refuse("missed_twin", got=got)
    if "2.weight" not in got:
        refuse("missed_parameter", got=got)
    if sorted(got) != ["1", "1", "2.weight"]:
        refuse("wrong_count", got=got)
    got = answer(_forgets_others, net := _net())
    if sorted(got) != (want := ["0", "2", "2.bias", "Sequential"]):
        refuse("kinds_missed", want=want, got=sorted(got))
    got = answer(_swaps, _net())
    if [*got] != ["1"]:
        refuse("by_number", got=got)


def _examine_all_there(net, before):
    """The answer only looks: the old hooks are there, and those that `function` has left."""
    left = [hook.place for hook in hooks_on(net)]
    want = [*before, "1", "1", "2.weight"]
    if not Counter(want) - Counter(left) and len(left) > len(want):
        refuse("added")
    if sorted(left) != sorted(want):
        refuse("removed")


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


def _recorded(answer, tensor, loss):
    """What the answer records of two backwards: the hook before it makes 30 of 3, the one after it 31."""
    tensor.register_hook(lambda grad: grad * 10)
    got = answer(tensor)
    if not isinstance(got, list):
        refuse("not_a_list", got=got)
    tensor.register_hook(lambda grad: grad + 1)
    loss.backward(retain_graph=True)
    loss.backward()
    for item in got:
        if not isinstance(item, torch.Tensor | tuple | None):
            refuse("not_tensors", item=item)
        if isinstance(item, torch.Tensor) and item.dtype != tensor.dtype:
            refuse("wrong_dtype", tensor=tensor, item=item)
    return [grad.tolist() if isinstance(grad, torch.Tensor) else grad for grad in got]


def examine_final_gradient(answer):
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = x * 2
    got = _recorded(answer, y, (y * 3).sum())
    _expect_final(got, "中间张量", "a tensor in the middle", after_node=62.0)
    if x.grad.tolist() != [124.0, 124.0]:
        refuse("changed")
    _examine_two_tensors(answer)

    leaf = torch.ones(2, requires_grad=True)
    loss = (leaf * 3).sum()
    try:
        got = _recorded(answer, leaf, loss)
    except AttributeError as error:
        if error.obj is not None or not str(error.name).startswith(("register", "next_functions")):
            raise
        refuse("leaf_has_no_grad_fn")
    _expect_final(got, "叶子", "a leaf", after_node=None)
    if leaf.grad.tolist() != [62.0, 62.0]:
        refuse("changed_leaf", leaf_grad=leaf.grad.tolist())
    leaf = torch.ones(2, requires_grad=True)
    loss = (leaf * 3).sum()
    got = answer(leaf)
    leaf.register_post_accumulate_grad_hook(_zero_grad)
    loss.backward()
    if [grad.tolist() for grad in got] != [[3.0, 3.0]]:
        refuse("after_storing", grad=[grad.tolist() for grad in got])

    first, second = (torch.ones(2, requires_grad=True) * 2).chunk(2)
    got = _recorded(answer, second, (first * 7 + second * 3).sum())
    if got != [[31.0], [31.0]]:
        refuse("wrong_output", got=got)

    first, second = (torch.ones(2, requires_grad=True) * 2).chunk(2)
    got = answer(second)
    with suppress(AttributeError, TypeError):
        first.sum().backward(retain_graph=True)
        second.sum().backward()
    if [grad.tolist() for grad in got if isinstance(grad, torch.Tensor)] != [[1.0]] or len(got) != 1:
        refuse("none_is_no_gradient")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad.mul_(100))
    y = x + 0
    got = answer(y)
    (y * 3).sum().backward()
    if [grad.tolist() for grad in got] != [[3.0, 3.0]]:
        refuse("shares_memory")

    _examine_zero_and_freed(answer)


def _zero_grad(leaf):
    leaf.grad.zero_()


def _examine_two_tensors(answer):
    first, second = (torch.ones(2, requires_grad=True) * 2 for _ in range(2))
    lists = [answer(first), answer(second)]
    refuse_same_object(*lists)
    for factor, tensor in enumerate((first, second), start=3):
        (tensor * factor).sum().backward()
    found = [[grad.tolist() for grad in grads] for grads in lists]
    if found != [[[3.0, 3.0]], [[4.0, 4.0]]]:
        refuse("shared", found=found[0], found2=found[1])


def _examine_zero_and_freed(answer):
    tensor = torch.ones(2, requires_grad=True) * 2
    got, alive = answer(tensor), weakref.ref(tensor)
    (tensor * 0).sum().backward()
    if not got:
        refuse("zero_for_none")
    del tensor
    gc.collect()
    if alive() is not None:
        refuse("never_freed")


def _expect_final(got, zh, en, after_node):
    if not got:
        refuse(
            "nothing",
            zh=f"{zh}：反向跑了两遍，列表还是空的。",
            en=f"For {en}: backward ran twice, and the list is still empty.",
        )
    if got == [[31.0, 31.0], [31.0, 31.0]]:
        return
    if got[0] == [30.0, 30.0]:
        refuse(
            "too_early",
            zh=f"{zh}：记下的是 `30`，后来又挂上的钩子把它改成了 `31`。哪种钩子排在所有张量钩子之后？",
            en=f"For {en}: you noted `30`, and a hook registered later made it `31`. Which kind of hook comes after all tensor hooks?",
        )
    if got[0] == [after_node, after_node]:
        refuse(
            "too_late",
            zh=f"{zh}：记下的是 Node 运行之后的梯度，那已经是它前一个张量的了。",
            en=f"For {en}: you noted a gradient from after the Node ran; it belongs to the tensor before it.",
        )
    if got[0] == [31.0, 31.0] and got[1:] == [[62.0, 62.0]]:
        refuse(
            "accumulated",
            zh=f"{zh}：第 1 次反向对，第 2 次记下的是 `62`：那是 `.grad` 里累加的和，不是这一次的梯度。",
            en=f"For {en}: right in the 1st backward; in the 2nd you noted `62`, the sum in `.grad` and not the gradient of this "
            "backward.",
        )
    if got[0] == [62.0, 62.0]:
        refuse(
            "no_copy",
            zh=f"{zh}：第 1 次记下的值后来变成了 `62`：它和 `.grad` 是同一块内存，被第 2 次累加改掉了。要存副本。",
            en=f"For {en}: what you noted in the 1st backward became `62` later: it shares its memory with `.grad`, which the 2nd "
            "accumulation changed. Store a copy.",
        )
    if isinstance(got[0], tuple):
        refuse(
            "whole_tuple",
            zh=f"{zh}：记下的是元组，不是张量。Node 的钩子收到的是元组，每个输出各有一项。",
            en=f"For {en}: you noted a tuple, not a tensor. Hooks on a Node get a tuple with one entry for each output.",
        )
    refuse(
        "wrong_values",
        zh=f"{zh}：反向跑了两遍，应当记下 `[[31.0, 31.0], [31.0, 31.0]]`，得到的是 `{got}`。",
        en=f"For {en}: after two backwards `[[31.0, 31.0], [31.0, 31.0]]` is wanted; found `{got}`.",
    )


FINAL_GRADIENT = Exercise("14.C", examine_final_gradient, final_gradient)

EXERCISES = [ON_FIRST_GRADIENT, LEFT_BY, FINAL_GRADIENT]
