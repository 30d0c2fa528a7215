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
    refuse_first,
    refuse_latest_call,
    refuse_removing_others,
)
from hooklab.course.checks.calls import equal, refuse_raised
from hooklab.course.checks.handles import expect_handle, hung
from hooklab.course.checks.models import Before

# ---- 13.A: for use inside forward: values as they are, no negative gradient ----


def no_negative(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(min=0))
    return x


# Where the gradient is negative the value is not, and the other way round.
VALUES, WEIGHT = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-3.0, 2.0, 0.5])
NO_NUMBERS = torch.tensor([[[[math.nan, -math.inf]], [[2.0, -3.0]]]])

RETURNED = [  # for an `x` with VALUES
    ("returned_sometimes", lambda t: t.got is None and not torch.is_grad_enabled()),
    ("returned_nothing", lambda t: t.got is None),
    ("returned_handle", lambda t: hasattr(t.got, "remove") and not isinstance(t.got, list | set)),
    ("changed_values", lambda t: equal(t.got, VALUES.clamp(min=0))),
]

PASSED = [  # what `came` to `x` is WEIGHT, what `went` on is the gradient behind the hook
    ("cut", lambda t: t.went is None),
    ("unchanged", lambda t: torch.equal(t.went, t.came)),
    # The gradient of a sum is one buffer for both terms.
    ("in_place", lambda t: not torch.equal(_grads(lambda other, own: other + t.answer(own))[0], t.came)),
    ("masked_by_values", lambda t: torch.equal(t.went, t.came * (VALUES > 0))),
    ("wrong_values-gradient", lambda t: not torch.allclose(t.went, t.came.clamp(min=0))),
    ("latest_only", lambda t: not all(_both_clamped(t.answer, dtype) for dtype in (torch.float32, torch.bfloat16))),
    ("first_only", lambda t: not torch.equal(_grads(lambda _, own: t.answer(own), times=2)[1], 2 * t.went)),
    ("whole_node", lambda t: not torch.equal(_grads(lambda *tensors: _first_half(t.answer, tensors))[1], t.came)),
    ("not_the_rest", lambda t: _other_than_negative(t)),
]


def examine_no_negative(answer):
    x = VALUES.clone().requires_grad_()
    got = answer(x * 1)
    _examine_returned(got)
    if got.requires_grad:
        (got * WEIGHT).sum().backward()
    refuse_first(PASSED, answer=answer, came=WEIGHT, went=x.grad)
    for key, grad_enabled in (("fails_in_no_grad", False), ("fails_when_frozen", True)):
        with torch.set_grad_enabled(grad_enabled):
            _examine_without_grad(answer, key)
    _examine_freed(answer)


def _examine_returned(got):
    refuse_first(RETURNED, got=got)
    expect_like(got, VALUES)


def _grads(use, weight=WEIGHT, times=1):
    """The gradients of two leaves; `use` is given a tensor from each, and `weight` comes to what it returns."""
    leaves = [torch.ones_like(weight, requires_grad=True) for _ in range(2)]
    loss = (use(*[leaf * 1 for leaf in leaves]) * weight).sum()
    for _ in range(times):
        loss.backward(retain_graph=True)
    return [leaf.grad for leaf in leaves]


def _both_clamped(answer, dtype):
    """Used twice in one forward, also in a dtype that a hook has to return."""
    weight = WEIGHT.to(dtype)
    return all(equal(grad, weight.clamp(min=0)) for grad in _grads(lambda *two: sum(map(answer, two)), weight))


def _first_half(answer, tensors):
    """The Node of `chunk` has two outputs, of which one is given to `answer`."""
    first, second = torch.cat(tensors).chunk(2)
    return answer(first) + second


def _other_than_negative(t):
    t.x_grad = _grads(lambda _, own: t.answer(own), NO_NUMBERS)[1]
    return t.x_grad.nan_to_num(-1.0).flatten().tolist() != [-1.0, 0.0, 2.0, 0.0]


def _examine_without_grad(answer, key):
    x = VALUES.clone()
    with refuse_raised(key):
        got = answer(x)
    _examine_returned(got)
    if x.requires_grad or got.requires_grad:
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


ONE = torch.ones(1, 3)

ARGUMENTS = [  # of the hook, each time that it is called
    ("hook_on_node", lambda t: not isinstance(t.args[0], Tensor | nn.Module)),
    ("hook_on_module", lambda t: t.count != 1),
]

FORWARD = [  # the first forward
    ("called_in_forward", lambda t: t.seen),
    ("replaced_output", lambda t: not isinstance(t.output, Tensor)),
    ("changed_output", lambda t: not torch.equal(t.output, t.plain)),
]

BACKWARD = [  # two forwards, each with a backward of 3 times the output; the hook doubles the gradient
    ("never_called", lambda t: not t.seen),
    ("first_only", lambda t: t.count == 1),
    ("wrong_count", lambda t: t.count != 2),
    ("other_gradient", lambda t: not all(equal(grad, torch.full((4, 2), 3.0)) for grad in t.seen)),
    ("value_dropped", lambda t: not torch.allclose(t.layer.bias.grad, torch.full((2,), 24.0))),
]

TWO_FORWARDS = [  # before one backward, with a hook that returns None and an input that requires no gradient
    ("asks_input", lambda t: not t.count),
    ("last_forward_only", lambda t: t.count != 2),
    ("none_replaces", lambda t: not equal(t.layer.bias.grad, torch.full((2,), 2.0))),
]


def examine_hook_output(answer):
    layer, seen = nn.Linear(3, 2), []
    first, second = (torch.randn(4, 3, requires_grad=True) for _ in range(2))

    def hook(*args):
        refuse_first(ARGUMENTS, args=args, count=len(args), found=", ".join(type(arg).__name__ for arg in args))
        seen.append(args[0].detach().clone())
        return args[0] * 2

    plain = layer(first).detach()
    handle = answer(layer, hook)
    expect_handle(handle)
    with refuse_raised(FORWARD[:1], seen=seen):  # a hook that was called in forward may raise there
        output = layer(first)
    refuse_first(FORWARD, seen=seen, output=output, plain=plain)
    if _fired(answer, [nn.Linear(3, 2), nn.Linear(3, 2)]) == [2]:
        refuse_latest_call()
    _examine_edited(answer)
    (output * 3).sum().backward()
    layer.zero_grad()
    (layer(second) * 3).sum().backward()
    refuse_first(BACKWARD, seen=seen, count=len(seen), layer=layer, shape=list(seen[0].shape) if seen else None)
    _examine_runs(answer)
    _examine_without_gradient(layer)
    handle.remove()
    seen.clear()
    layer(first).sum().backward()
    if seen:
        refuse("still_there")
    refuse_removing_others(layer.register_forward_hook, lambda: answer(layer, hook))
    if sorted(fired := _fired(answer, [layer, layer])) != [1, 2]:
        refuse("one_per_module", fired=fired)


def _fired(answer, layers):
    """The numbers of the hooks that fire when the first of `layers` runs; each is hung on one of them, by its own call."""
    numbers, fired = range(1, len(layers) + 1), []
    hooks = [lambda *args, number=number: fired.append(number) for number in numbers]
    with hung(*map(answer, layers, hooks)):
        layers[0](ONE.clone().requires_grad_()).sum().backward()
    return fired


def _run(answer, module, run):
    """How often a hook fires that returns None, and what `run` has returned."""
    calls = []
    with hung(answer(module, lambda *args: calls.append(args))):
        output = run()
        output.sum().backward()
    return len(calls), output


def _examine_edited(answer):
    layer = nn.Linear(3, 2)
    with refuse_raised([("full_backward_hook", lambda t: "BackwardHookFunction" in t.line)]):
        count, output = _run(answer, layer, lambda: layer(ONE).exp_())
    if not count and output._is_view():
        refuse("hooked_a_view")


def _examine_runs(answer):
    layer = nn.Linear(3, 2)
    count, _ = _run(answer, layer, lambda: layer(ONE) + layer(ONE))
    refuse_first(TWO_FORWARDS, count=count, layer=layer)
    frozen = nn.Linear(3, 2).requires_grad_(False)
    for module in (frozen, nn.Sequential(frozen, nn.ReLU())):
        count, _ = _run(answer, module, lambda module=module: module(ONE.clone().requires_grad_()))
        if not count:
            refuse("asks_parameters")
        if count > 1:
            refuse("everywhere", count=count)
    layer.eval()
    if not _run(answer, layer, lambda: layer(ONE))[0]:
        refuse("only_in_training")


def _examine_without_gradient(layer):
    with refuse_raised("fails_in_no_grad"), torch.no_grad():
        in_no_grad = layer(ONE)
    layer.requires_grad_(False)
    with refuse_raised("fails_when_frozen"):
        when_frozen = layer(ONE)
    layer.requires_grad_(True)
    if in_no_grad.requires_grad or when_frozen.requires_grad:
        refuse("switched_on")


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
    """Declared in another order than used; `stem` may be frozen, the output of `side` is not used, `relu` is in place."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(3, 1)
        self.stem, self.side, self.body = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(3, 3)
        self.stem.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        self.side(stem)
        return self.head(self.relu(self.body(stem)))


RAISED = [  # while the answer runs
    ("replaced_output", lambda t: "RemovableHandle" in t.line),
    ("full_backward_hook", lambda t: "BackwardHookFunction" in t.line),
    ("fails_when_frozen", lambda t: "register a hook" in t.line and t.frozen),
]

RETURNED_ORDER = [  # as soon as the answer has returned
    ("changed_input", lambda t: t.x.requires_grad),
    ("removed_others", lambda t: t.before.lost_hooks()),
    ("left_behind", lambda t: t.before.new_hooks()),
    (
        "not_names",
        lambda t: not isinstance(t.order, list | tuple) or any(not isinstance(name, str) for name in t.order),
    ),
]

ORDER = [  # where it is not the one wanted
    ("zero_for_none", lambda t: t.zero_arrives and t.order == t.want[:-1]),
    ("whole_model", lambda t: "" in t.order),
    ("not_children", lambda t: t.strangers),
    ("nothing_arrived", lambda t: not t.order),
    ("last_name", lambda t: len(t.order) > 1 and len(set(t.order)) == 1),
    ("repeated", lambda t: len(set(t.order)) < len(t.order)),
    ("forward_order", lambda t: t.order == t.want[::-1]),
    ("unused_counted", lambda t: "side" in t.order),
    ("hung_too_late", lambda t: {"body", "relu"} <= {*t.order} and t.order.index("body") < t.order.index("relu")),
    ("switched_on", lambda t: t.extra),
    ("on_inputs", lambda t: any(list(t.model.get_submodule(name).parameters()) for name in t.missing)),
    ("wrong_order-missing", lambda t: t.missing),
    ("wrong_order", lambda t: True),
]


def examine_arrival_order(answer):
    first, last = nn.Linear(2, 3), nn.Linear(3, 1)
    _examine_order(answer, nn.Sequential(first, nn.Sigmoid(), last), ["2", "1", "0"])
    _examine_order(answer, nn.Sequential(nn.Sequential(first, nn.Tanh()), last), ["1", "0"])
    _examine_order(answer, _Mixed(frozen=False), ["head", "relu", "body", "stem"])
    _examine_order(answer, _Mixed(frozen=True), ["head", "relu", "body"], frozen=True)
    silent = nn.Threshold(1e9, 0.0)  # whose gradient is zero everywhere
    _examine_order(answer, nn.Sequential(first, silent, last), ["2", "1", "0"], zero_arrives=True)
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)), torch.randn(4, 2)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    answer(model, x)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if param.grad is not None and not torch.allclose(param.grad, other.grad):
            refuse("other_gradients", name=name)


def _examine_order(answer, model, want, frozen=False, zero_arrives=False):
    """Of `model`, which holds one hook of somebody else's."""
    x, children = torch.randn(4, 2), dict(model.named_children())
    next(model.children()).register_forward_hook(lambda module, args, output: None)
    before = Before(model)
    with refuse_raised(RAISED, frozen=frozen):
        order = answer(model, x)
    refuse_first(RETURNED_ORDER, before=before, x=x, order=order)
    order = list(order)
    if order != want:
        refuse_first(
            ORDER,
            order=order,
            want=want,
            model=model,
            zero_arrives=zero_arrives,
            strangers=sorted(set(order) - children.keys()),
            extra=sorted(set(order) - set(want)),
            missing=sorted(set(want) - set(order)),
        )


ARRIVAL_ORDER = Exercise("13.C", examine_arrival_order, arrival_order)

EXERCISES = [NO_NEGATIVE, HOOK_OUTPUT, ARRIVAL_ORDER]
