"""Checks of notebook 13: hooks inside a module."""

import copy
import gc
import math
import weakref

import torch
from torch import Tensor, nn

from hooklab.course.check import (
    Exercise,
    expect_like,
    refuse,
    refuse_latest_call,
    refuse_removing_others,
)

# ---- 13.A: for use inside forward: values as they are, no negative gradient ----


def no_negative(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(min=0))
    return x


# Where the gradient is negative the value is not, and the other way round.
VALUES, WEIGHT = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-3.0, 2.0, 0.5])


def examine_no_negative(answer):
    leaf = (-VALUES).requires_grad_()
    got = answer(leaf * -1)
    _examine_values(got, VALUES)
    if got.requires_grad:
        (got * WEIGHT).sum().backward()
    if leaf.grad is None:
        refuse("cut")
    if torch.equal(leaf.grad, -WEIGHT):
        refuse("unchanged")
    _examine_neighbour(answer)
    _examine_passed(-leaf.grad)
    _examine_two_uses(answer)
    _examine_two_backwards(answer)
    _examine_one_half(answer)
    _examine_any_shape(answer)
    _examine_without_grad(answer)
    _examine_freed(answer)


def _examine_any_shape(answer):
    x = torch.ones(1, 2, 1, 2, requires_grad=True)
    grad = torch.tensor([math.nan, -math.inf, 2.0, -3.0]).reshape(x.shape)
    answer(x * 1).backward(grad)
    if not torch.equal(x.grad.nan_to_num(-1.0), torch.tensor([-1.0, 0.0, 2.0, 0.0]).reshape(x.shape)):
        refuse("not_the_rest", x_grad=x.grad.flatten().tolist())


def _examine_values(got, want):
    if got is None:
        refuse("returned_nothing")
    if hasattr(got, "remove") and not isinstance(got, list | set):
        refuse("returned_handle")
    if isinstance(got, Tensor) and got.shape == want.shape and torch.equal(got.detach(), want.clamp(min=0)):
        refuse("changed_values")
    expect_like(got, want)


def _examine_passed(passed):
    if torch.equal(passed, WEIGHT * (VALUES > 0)):
        refuse("masked_by_values")
    if not torch.allclose(passed, WEIGHT.clamp(min=0)):
        came, went = ([round(value, 4) for value in each.tolist()] for each in (WEIGHT, passed))
        refuse("wrong_values", came=came, went=went)


def _examine_two_uses(answer):
    """In one forward; in bfloat16, whose hooks must return it."""
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [torch.ones(3, dtype=dtype, requires_grad=True) for _ in range(2)]
        weight = WEIGHT.to(dtype)
        used = [answer(leaf * 1) for leaf in leaves]
        sum((out * weight).sum() for out in used).backward()
        if not all(torch.equal(leaf.grad, weight.clamp(min=0)) for leaf in leaves):
            refuse("latest_only")


def _examine_two_backwards(answer):
    leaf = torch.ones(3, requires_grad=True)
    loss = (answer(leaf * 1) * WEIGHT).sum()
    for _ in range(2):
        leaf.grad = None
        loss.backward(retain_graph=True)
    if not torch.equal(leaf.grad, WEIGHT.clamp(min=0)):
        refuse("first_only")


def _examine_one_half(answer):
    """The Node of `chunk` has two outputs."""
    leaf = torch.ones(6, requires_grad=True)
    first, second = (leaf * 1).chunk(2)
    ((answer(first) + second) * WEIGHT).sum().backward()
    if not torch.equal(leaf.grad[3:], WEIGHT):
        refuse("whole_node")


def _examine_neighbour(answer):
    """The gradient of a sum is one buffer for both terms: editing it in place reaches the other term too."""
    other, leaf = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    neighbour = other * 1
    total = neighbour + answer(leaf * 1)
    (total * WEIGHT).sum().backward()
    if not torch.equal(other.grad, WEIGHT):
        refuse("in_place")


def _examine_without_grad(answer):
    try:
        with torch.no_grad():
            got = answer(VALUES.clone().requires_grad_() * 1)
    except RuntimeError:
        refuse("fails_in_no_grad")
    if got is None:
        refuse("returned_sometimes")
    _examine_values(got, VALUES)
    frozen = VALUES.clone()
    try:
        got = answer(frozen)
    except RuntimeError:
        refuse("fails_when_frozen")
    _examine_values(got, VALUES)
    if frozen.requires_grad or got.requires_grad:
        refuse("switched_on")


def _examine_freed(answer):
    x = torch.ones(3, requires_grad=True) * 1
    got = answer(x)
    tensors = weakref.ref(x), weakref.ref(got)
    (got * WEIGHT).sum().backward()
    del x, got
    gc.collect()
    if any(tensor() is not None for tensor in tensors):
        refuse("never_freed")


NO_NEGATIVE = Exercise("13.A", examine_no_negative, no_negative)

# ---- 13.B: hang a tensor hook on a module's output, from outside ----


def hook_output(module, hook):
    def hang(module, args, output):
        if output.requires_grad:
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def examine_hook_output(answer):
    layer, seen = nn.Linear(3, 2), []
    first, second = (torch.randn(4, 3, requires_grad=True) for _ in range(2))

    def hook(*args):
        _examine_arguments(args)
        seen.append(args[0].detach().clone())
        return args[0] * 2

    plain = layer(first).detach()
    handle = answer(layer, hook)
    _examine_handle(handle)
    output = _outcome(lambda: layer(first))
    _examine_silent(seen)
    _examine_output(output, plain)
    _examine_two_modules(answer)
    _examine_editable(answer)
    (output * 3).sum().backward()
    layer.zero_grad()
    (layer(second) * 3).sum().backward()
    _examine_calls(seen, layer)
    _examine_two_forwards(answer)
    _examine_input_alone(answer)
    _examine_eval(answer)
    _examine_quiet(layer, first.detach())
    handle.remove()
    _examine_removed(layer, first.detach(), seen)
    refuse_removing_others(layer.register_forward_hook, lambda: answer(layer, hook))
    _examine_one_module(answer)


def _outcome(run):
    """What `run` returns, or the error it raises."""
    try:
        return run()
    except RuntimeError as error:
        return error


def _examine_handle(handle):
    if isinstance(handle, list | set) or not callable(getattr(handle, "remove", None)):
        refuse("no_handle", handle=handle)


def _examine_arguments(args):
    if not isinstance(args[0], Tensor | nn.Module):
        found = ", ".join(type(arg).__name__ for arg in args)
        refuse("hook_on_node", found=found)
    if len(args) != 1:
        refuse("hook_on_module", count_args=len(args))


def _examine_silent(seen):
    if seen:
        refuse("called_in_forward")


def _examine_output(output, plain):
    if isinstance(output, RuntimeError):
        raise output
    if not isinstance(output, Tensor):
        refuse("replaced_output", output=output)
    if not torch.equal(output.detach(), plain):
        refuse("changed_output")


def _examine_two_modules(answer):
    """Of the two only the first one runs."""
    layers, calls = [nn.Linear(3, 2) for _ in range(2)], []
    hooks = [lambda *args, number=number: calls.append(number) for number in range(2)]
    handles = [answer(layer, hook) for layer, hook in zip(layers, hooks, strict=True)]
    layers[0](torch.randn(4, 3, requires_grad=True)).sum().backward()
    for handle in handles:
        handle.remove()
    if calls == [1]:
        refuse_latest_call()


def _examine_one_module(answer):
    """Which is given two hooks."""
    layer, calls = nn.Linear(3, 2), []
    hooks = [lambda *args, number=number: calls.append(number) for number in range(2)]
    handles = [answer(layer, hook) for hook in hooks]
    layer(torch.randn(4, 3, requires_grad=True)).sum().backward()
    for handle in handles:
        handle.remove()
    if sorted(calls) != [0, 1]:
        refuse("one_per_module", number=[number + 1 for number in calls])


def _examine_editable(answer):
    layer, calls = nn.Linear(3, 2), []
    handle = answer(layer, lambda *args: calls.append(args))
    outcome = _outcome(lambda: layer(torch.randn(4, 3)).exp_())
    handle.remove()
    if isinstance(outcome, RuntimeError) and "BackwardHookFunction" not in str(outcome):
        raise outcome
    if isinstance(outcome, RuntimeError):
        refuse("full_backward_hook")
    outcome.sum().backward()
    if not calls and outcome._is_view():
        refuse("hooked_a_view")


def _examine_calls(seen, layer):
    if not seen:
        refuse("never_called")
    if len(seen) == 1:
        refuse("first_only")
    if len(seen) != 2:
        refuse("wrong_count", count_seen=len(seen))
    if any(grad.shape != (4, 2) or not torch.equal(grad, torch.full((4, 2), 3.0)) for grad in seen):
        refuse("other_gradient", shape=list(seen[0].shape))
    if not torch.allclose(layer.bias.grad, torch.full((2,), 24.0)):
        refuse("value_dropped")


def _examine_two_forwards(answer):
    """Two forwards before one backward, and a hook that returns None."""
    layer, calls = nn.Linear(3, 2), []
    handle = answer(layer, lambda grad: calls.append(1))
    (layer(torch.ones(1, 3)) + layer(torch.ones(1, 3))).sum().backward()
    handle.remove()
    if not calls:
        refuse("asks_input")
    if len(calls) != 2:
        refuse("last_forward_only", count_calls=len(calls))
    if layer.bias.grad is None or layer.bias.grad.tolist() != [2.0, 2.0]:
        refuse("none_replaces")


def _examine_input_alone(answer):
    """The input requires a gradient, no parameter does; the second module has modules inside."""
    frozen = nn.Linear(3, 2).requires_grad_(False)
    for module in (frozen, nn.Sequential(frozen, nn.ReLU())):
        calls = []
        handle = answer(module, lambda grad, calls=calls: calls.append(1))
        module(torch.ones(1, 3, requires_grad=True)).sum().backward()
        handle.remove()
        if not calls:
            refuse("asks_parameters")
        if len(calls) > 1:
            refuse("everywhere", count_calls=len(calls))


def _examine_eval(answer):
    layer, calls = nn.Linear(3, 2).eval(), []
    handle = answer(layer, lambda grad: calls.append(1))
    layer(torch.ones(1, 3)).sum().backward()
    handle.remove()
    if not calls:
        refuse("only_in_training")


def _examine_quiet(layer, x):
    with torch.no_grad():
        in_no_grad = _outcome(lambda: layer(x))
    layer.requires_grad_(False)
    when_frozen = _outcome(lambda: layer(x))
    layer.requires_grad_(True)
    if isinstance(in_no_grad, RuntimeError):
        refuse("fails_in_no_grad")
    if isinstance(when_frozen, RuntimeError):
        refuse("fails_when_frozen")
    if in_no_grad.requires_grad or when_frozen.requires_grad:
        refuse("switched_on")


def _examine_removed(layer, x, seen):
    seen.clear()
    (layer(x) * 3).sum().backward()
    if seen:
        refuse("still_there")


HOOK_OUTPUT = Exercise("13.B", examine_hook_output, hook_output)

# ---- 13.C: in which order do gradients arrive at the outputs of the children? ----


def arrival_order(model, x):
    order, handles = [], []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: order.append(name))

        handles.append(child.register_forward_hook(hang))
    try:
        model(x).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return order


class _Mixed(nn.Module):
    """Declared in another order than used; `stem` is frozen, the output of `side` is not used, `relu` is in place."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(3, 1)
        self.stem, self.side, self.body = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(3, 3)
        self.stem.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        self.side(stem)
        return self.head(self.relu(self.body(stem)))


def examine_arrival_order(answer):
    plain = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1))
    _examine_order(_order(answer, plain), ["2", "1", "0"], plain)
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Linear(3, 1))
    _examine_order(_order(answer, nested), ["1", "0"], nested)
    mixed = _Mixed(frozen=False)
    _examine_order(_order(answer, mixed), ["head", "relu", "body", "stem"], mixed)
    try:
        order = _order(answer, _Mixed(frozen=True))
    except RuntimeError as error:
        if "register a hook" not in str(error):
            raise
        refuse("fails_when_frozen")
    _examine_order(order, ["head", "relu", "body"], mixed)
    muted = nn.Sequential(nn.Linear(2, 3), nn.Threshold(1e9, 0.0), nn.Linear(3, 1))
    order = _order(answer, muted)
    if [*order] == ["2", "1"]:  # the gradient that arrives at "0" is zero
        refuse("zero_for_none")
    _examine_order(order, ["2", "1", "0"], muted)
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)), torch.randn(4, 2)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    answer(model, x)
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, param), other in pairs:
        if param.grad is not None and (other.grad is None or not torch.allclose(param.grad, other.grad)):
            refuse("other_gradients", name=name)


def _order(answer, model):
    """What `answer` returns for `model`, which holds one hook of somebody else's."""
    x, child = torch.randn(4, 2), next(model.children())
    handle = child.register_forward_hook(lambda module, args, output: None)
    try:
        order = answer(model, x)
    except (RuntimeError, TypeError, AttributeError) as error:
        if "RemovableHandle" in str(error):
            refuse("replaced_output")
        if "BackwardHookFunction" not in str(error):
            raise
        refuse("full_backward_hook")
    if x.requires_grad:
        refuse("changed_input")
    if handle.id not in child._forward_hooks:
        refuse("removed_others")
    handle.remove()
    _examine_left(model)
    return order


def _examine_order(order, want, model):
    if not isinstance(order, list | tuple) or any(not isinstance(name, str) for name in order):
        refuse("not_names")
    order = list(order)
    if order == want:
        return
    if "" in order:
        refuse("whole_model")
    if strangers := sorted(set(order) - {name for name, _ in model.named_children()}):
        refuse("not_children", strangers=strangers[0])
    if not order:
        refuse("nothing_arrived")
    if len(order) > 1 and len(set(order)) == 1:
        refuse("last_name", order=order[0])
    if len(set(order)) < len(order):
        refuse("repeated", order=order)
    if order == want[::-1]:
        refuse("forward_order", order=order)
    if "side" in order:
        refuse("unused_counted")
    if {"body", "relu"} <= set(order) and order.index("body") < order.index("relu"):
        refuse("hung_too_late")
    if extra := sorted(set(order) - set(want)):
        refuse("switched_on", order=order, extra=extra)
    missing = sorted(set(want) - set(order))
    if any(list(model.get_submodule(name).parameters()) for name in missing):
        refuse("on_inputs", order=order, missing=missing)
    refuse(
        "wrong_order",
        zh=f"得到的是 `{order}`，"
        + (f"缺了 `{missing}`。没有参数的层也有输出。" if missing else "名字不缺，次序不对。"),
        en=f"Found `{order}`"
        + (
            f"; missing: `{missing}`. A layer without parameters has an output too."
            if missing
            else ", in the wrong order."
        ),
    )


def _examine_left(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    left = any(getattr(module, kind) for module in model.modules() for kind in kinds)
    if left or any(param._backward_hooks for param in model.parameters()):
        refuse("left_behind")


ARRIVAL_ORDER = Exercise("13.C", examine_arrival_order, arrival_order)

EXERCISES = [NO_NEGATIVE, HOOK_OUTPUT, ARRIVAL_ORDER]
