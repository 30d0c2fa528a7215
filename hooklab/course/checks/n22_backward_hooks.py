"""Checks of notebook 22: module backward hooks."""

import copy
import math
import numbers
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, expect_like, refuse, refuse_first, refuse_from_before
from hooklab.course.checks.calls import equal, refuse_raised
from hooklab.course.checks.handles import expect_handle, hung, refuse_second_hook
from hooklab.course.checks.models import Before

RAISED = [  # while hooks of the answer run
    ("wrong_number", lambda t: "invalid number of" in t.line),
    ("wrong_size", lambda t: "changed the size" in t.line),
    ("full_backward_hook", lambda t: "BackwardHookFunction" in t.line),
    ("replaced_output", lambda t: "RemovableHandle" in t.line and t.in_forward),
]

LEFT = [  # on the model of a function that only looks
    ("removed_others", lambda t: t.before.lost_hooks()),
    ("left_behind", lambda t: t.before.new_hooks()),
    ("legacy_hook", lambda t: any(module._is_full_backward_hook is False for module in t.before.model.modules())),
    ("changed_model", lambda t: t.before.switched()),
    ("attribute_left", lambda t: t.new),
]


def _examine_failing(answer, error, model, given):
    """`answer(model, given)` should raise `error`, and leave the model as it was all the same."""
    before, passed_on = Before(model), False
    try:
        answer(model, given)
    except error:
        passed_on = True
    if before.new_hooks():
        refuse("left_after_error")
    if before.switched():
        refuse("changed_after_error")
    if not passed_on:
        refuse("swallowed")


def _relus(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.ReLU)}


# ---- 22.A: reverse the gradient that leaves a module, and no other ----


def reverse(module, strength):
    def hook(module, grad_input, grad_output):
        return tuple(grad * -strength if grad is not None and grad.is_floating_point() else grad for grad in grad_input)

    return module.register_full_backward_hook(hook)


STRENGTH = 0.5

LOSS = torch.tensor([1.0, -2.0])  # what each column of the output counts in the loss


class _Blend(nn.Module):
    """Three inputs: two tensors and a number; and any tensors of booleans or integers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, -1.0]))

    def forward(self, left: Tensor, share: float, right: Tensor, *factors: Tensor) -> Tensor:
        return math.prod(factors, start=self.weight * (share * left + (1 - share) * right))


REVERSED = [  # one forward and backward of a linear layer, without the hook (`plain`) and with it (`got`)
    ("legacy_hook", lambda t: t.layer._is_full_backward_hook is False),
    ("changed_output", lambda t: not equal(t.got.output, t.plain.output)),
    ("frozen", lambda t: any(grad is None for grad in t.got.params)),
    ("no_gradient", lambda t: t.got.grad is None),
    ("only_parameters", lambda t: _other_params(t) and torch.allclose(t.got.grad, t.plain.grad)),
    ("parameters_changed", lambda t: _other_params(t)),
    ("unchanged", lambda t: torch.allclose(t.got.grad, t.plain.grad)),
    ("wrong_values", lambda t: _other_factor(t)),
]

BLENDED = [  # the backward of a module with several inputs raises
    ("fails_on_none", lambda t: isinstance(t.error, TypeError | AttributeError) and "None" in t.line),
    ("changed_dtype", lambda t: t.factors and "changed the type" in t.line),
]


def examine_reverse(answer):
    with warnings.catch_warnings(), refuse_raised(RAISED):
        warnings.simplefilter("ignore")  # of hooks on a module whose inputs require no gradient
        _examine_one_input(answer)
        _examine_blend(answer)
        _examine_blend(answer, both=True)
        _examine_other_modules(answer)
        for factor in (torch.tensor([True, False]), torch.tensor([2, 5])):
            _examine_blend(answer, factor)


def _step(layer, x):
    """One forward and backward: the output, the gradient of x, those of the parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    if not isinstance(output, Tensor):
        refuse("replaced_output", output=output)
    (output * LOSS).sum().backward()
    return SimpleNamespace(output=output, grad=x.grad, params=[param.grad for param in layer.parameters()])


def _other_params(t):
    return not all(map(torch.allclose, t.got.params, t.plain.params))


def _other_factor(t):
    t.factor = (t.got.grad / t.plain.grad).mean().item()
    return not _is_reversed(t.got.grad, t.plain.grad)


def _is_reversed(grad, plain):
    return torch.allclose(grad, -STRENGTH * plain)


def _examine_one_input(answer):
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain, before = _step(layer, x), Before(layer)
    handle = answer(layer, STRENGTH)
    expect_handle(handle)
    got = _step(layer, x)
    refuse_first(REVERSED, layer=layer, got=got, plain=plain)
    if not _is_reversed(_step(layer, x).grad, plain.grad):
        refuse("first_only")
    _examine_other_way(layer, x, plain.grad)
    _examine_neighbour(answer)
    handle.remove()
    if not torch.allclose(_step(layer, x).grad, plain.grad):
        refuse("still_there")
    refuse_second_hook(before)


def _examine_other_way(layer, x, plain):
    """From the input straight to the loss, past the module."""
    x = x.clone().requires_grad_()
    ((layer(x) * LOSS).sum() + 7 * x.sum()).backward()
    if not torch.allclose(x.grad - 7, -STRENGTH * plain, atol=1e-5):
        refuse("other_paths")


def _examine_neighbour(answer):
    """The gradient of a sum is one buffer for both terms, and nn.Identity hands it on as it is."""
    inside, beside = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    identity = nn.Identity()
    neighbour = beside * 1  # older than what is hooked, so that its backward comes later
    with hung(answer(identity, STRENGTH)):
        ((neighbour + identity(inside * 1)) * LOSS).sum().backward()
    if not torch.equal(beside.grad, LOSS):
        refuse("in_place")


def _examine_blend(answer, *factors, both=False):
    """Beside an input that requires a gradient, a mask or an index comes as zeros of its own dtype."""
    blend, left, right = _Blend(), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=both)
    with hung(answer(blend, STRENGTH)), refuse_raised(BLENDED, factors=factors):
        (blend(left, 0.25, right, *factors) * LOSS).sum().backward()
    for place, x, share in ((1, left, 0.25), (3, right, 0.75)):
        plain = share * blend.weight.detach() * LOSS * math.prod(factors)
        if x.requires_grad and (x.grad is None or not _is_reversed(x.grad, plain)):
            refuse("beside_whole_numbers" if factors else "some_inputs", place=place, factors=factors)


def _examine_other_modules(answer):
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    _examine_hung("everywhere", block, lambda: [answer(block, STRENGTH)])
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    _examine_hung("another_module", layer, lambda: [answer(layer, STRENGTH), answer(other, 6 * STRENGTH)])


def _examine_hung(key, layer, hang):
    """With the hooks that `hang` gives the handles of, only the gradient of the input of `layer` is reversed."""
    x = torch.randn(4, 3)
    plain = _step(layer, x)
    with hung(*hang()):
        got = _step(layer, x)
    if not _is_reversed(got.grad, plain.grad) or not all(map(torch.allclose, got.params, plain.params)):
        refuse(key)


REVERSE = Exercise("22.A", examine_reverse, reverse)

# ---- 22.B: how large is the gradient at the output of each ReLU, in place or not ----


def gradient_norms(model, loss_fn):
    norms, handles = {}, []
    for name, relu in _relus(model).items():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                _note_norm(norms, name, output)

        handles.append(relu.register_forward_hook(hang))
    try:
        loss_fn(model).backward()
    finally:
        for handle in handles:
            handle.remove()
    return norms


class _Pictures(nn.Module):
    """A small convolution net: one ReLU that is not in place, one in place two levels down, one in place at the end.

    The one that runs last is defined first.
    """

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.stem, self.relu = nn.Conv2d(1, 4, 3), nn.ReLU()
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)), nn.Flatten())
        self.neck, self.head = nn.Linear(64, 8), nn.Linear(8, 3)
        self.neck.bias.requires_grad_(False)  # and so it must stay

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.neck(self.body(self.relu(self.stem(x))))))


NAMES = [  # what the dict has, beside the `names` of all modules and of the `relus`
    ("last_name", lambda t: t.found == t.names[-1:]),
    ("last_name-relu", lambda t: t.found == t.relus[-1:]),
    ("other_layers", lambda t: t.strangers),
    ("missing_layers", lambda t: t.missing),
]

VALUES = [  # where the norms are not the ones wanted; each tensor has one entry for each ReLU
    ("other_order", lambda t: _close(t.found.sort().values, t.wanted.sort().values)),
    ("other_end", lambda t: _close(t.found, t.at_inputs)),
    ("norms_of_outputs", lambda t: _close(t.found, t.outputs)),
]


def examine_gradient_norms(answer):
    torch.manual_seed(22)  # a net in which no ReLU is dead
    model, batch = _Pictures(), torch.randn(2, 1, 8, 8)
    runs, backwards = [], []

    def loss_fn(model):
        runs.append("run")
        loss = plain_loss_fn(model)
        loss.register_hook(lambda grad: backwards.append("run"))
        return loss

    def plain_loss_fn(model):
        return model(batch).square().sum()

    twin = copy.deepcopy(model)
    want = gradient_norms(twin, plain_loss_fn)
    for layer in (model.head, model.relu):
        layer.register_forward_hook(lambda *args: None)
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    before = Before(model)
    with refuse_raised(RAISED):
        got = answer(model, loss_fn)
    refuse_first(LEFT, before=before, new=before.new_attributes())
    if len(runs) == 1 and len(backwards) > 1:
        refuse("backward_often", count=len(backwards))
    if len(runs) == 1:
        _examine_gradients(model, twin)
    _examine_norms(got, want, model, plain_loss_fn)
    if len(runs) > 1:
        refuse("ran_twice", count=len(runs))
    _examine_next_model(answer)
    for error in (_BrokenForward, _BrokenData):
        _examine_failing(answer, error, _Pictures(), _failing_with(error))


def _examine_gradients(model, twin):
    """Each `.grad` was 1, and `twin` has what one backward adds."""
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is None:
            continue
        if param.grad is None or not param.grad.any() or torch.allclose(param.grad, other.grad, atol=1e-6):
            refuse("cleared_grad")
        if not any(torch.allclose(param.grad, 1 + added, atol=1e-6) for added in (0 * other.grad, other.grad)):
            refuse("changed_gradient")


def _examine_norms(got, want, model, loss_fn):
    if not isinstance(got, dict):
        refuse("not_a_dict", got=got)
    if not got:
        refuse("nothing_arrived")
    refuse_from_before(got, model, ("gate",))
    relus = list(_relus(model))
    refuse_first(
        NAMES,
        found=list(got),
        names=list(dict(model.named_modules())),
        relus=relus,
        strangers=[name for name in got if name not in relus],
        missing=[name for name in relus if name not in got],
        count=len(relus),
    )
    for name, value in got.items():
        if not isinstance(value, numbers.Real):
            refuse("not_numbers", name=name, value=value)
    found, wanted = _in_order(got, want), _in_order(want, want)
    if not _close(found, wanted):
        at_inputs, outputs = (_in_order(norms, want) for norms in _other_norms(copy.deepcopy(model), loss_fn))
        refuse_first(VALUES, found=found, wanted=wanted, at_inputs=at_inputs, outputs=outputs)
        name = next(name for name, one, other in zip(want, found, wanted, strict=True) if not _close(one, other))
        refuse("wrong_values", name=name, want=want[name], got=got[name])


def _in_order(norms, want):
    return torch.tensor([float(norms[name]) for name in want], dtype=torch.float64)


def _close(found, wanted):
    return torch.allclose(found, wanted, rtol=1e-4, atol=1e-7)


def _other_norms(model, loss_fn):
    """The norms of the gradients at the inputs of the ReLUs, and of their outputs."""
    at_inputs, outputs = {}, {}
    for name, relu in _relus(model).items():
        relu.register_forward_pre_hook(lambda _, args, name=name: _note_norm(at_inputs, name, args[0]))
        relu.register_forward_hook(lambda _, args, output, name=name: outputs.update({name: output.norm().item()}))
    loss_fn(model).backward()
    return at_inputs, outputs


def _note_norm(norms, name, tensor):
    tensor.register_hook(lambda grad: norms.update({name: grad.norm().item()}))


def _examine_next_model(answer):
    """The first layers are frozen."""
    base, lens = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2)
    model = nn.Sequential(OrderedDict(base=base, still=nn.ReLU(), lens=lens, gate=nn.ReLU()))
    with refuse_raised("frozen_first-raised"):
        found = list(answer(model, lambda model: model(torch.ones(1, 3)).sum()))
    refuse_from_before(found, model, dict(_Pictures().named_modules()))
    if found != ["gate"]:
        refuse("frozen_first", found=found)


class _BrokenForward(RuntimeError):
    pass


class _BrokenData(LookupError):
    pass


def _failing_with(error):
    def loss_fn(model):
        model.stem(torch.zeros(1, 1, 8, 8))
        raise error("this loss_fn fails on purpose")

    return loss_fn


GRADIENT_NORMS = Exercise("22.B", examine_gradient_norms, gradient_norms)

# ---- 22.C: guided backpropagation ----


def guided_gradient(model, x):
    def hook(module, grad_input, grad_output):
        return (grad_input[0].clamp(min=0),)

    handles = [relu.register_full_backward_hook(hook) for relu in _relus(model).values()]
    try:
        image = x.detach().requires_grad_()
        return torch.autograd.grad(model(image).sum(), image)[0]
    finally:
        for handle in handles:
            handle.remove()


class _Rule(torch.autograd.Function):
    """ReLU with a backward of its own: no hook, so that the reference owes nothing to the answer."""

    @staticmethod
    def forward(ctx, x, masked):
        ctx.save_for_backward(x)
        ctx.masked = masked
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.clamp(min=0) * (x > 0 if ctx.masked else 1), None


class _Guided(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        return _Rule.apply(x, self.masked)


def _reference(model, x, replaced=lambda name: True, masked=True):
    """The gradient of `x`, with each ReLU of a copy of `model` `replaced` that has such a name."""
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    for name in filter(replaced, _relus(model)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _Guided(masked))
    return torch.autograd.grad(model(x).sum(), x)[0]


def _seeing():
    """A net with one ReLU at the top level and two nested ones."""
    net = nn.Sequential()
    net.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.ReLU()))
    net.conv, net.act, net.flat = nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()
    net.neck, net.head = nn.Sequential(nn.Linear(64, 6), nn.ReLU()), nn.Linear(6, 2)
    net.conv.bias.requires_grad_(False)  # and so it must stay
    return net


class _Residual(nn.Module):
    """A ReLU, and a way past it."""

    def __init__(self):
        super().__init__()
        self.stem, self.relu, self.head = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        return hidden + self.head(self.relu(hidden))


class _Twice(nn.Module):
    """One ReLU, called twice."""

    def __init__(self):
        super().__init__()
        self.stem, self.relu, self.body, self.head = nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.body(self.relu(self.stem(x)))))


INPUT = [  # that was given, and requires no gradient
    ("edited_input", lambda t: not torch.equal(t.x, t.original)),
    ("changed_input", lambda t: t.x.requires_grad or t.x.grad is not None),
]


def examine_guided_gradient(answer):
    torch.manual_seed(5)
    model, x = _seeing(), torch.randn(3, 1, 8, 8)
    original, want = x.clone(), _reference(model, x)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model.head.register_forward_hook(lambda *args: None)
    before = Before(model)
    with refuse_raised(RAISED):
        got = answer(model, x)
    refuse_first(INPUT, x=x, original=original)
    if any(param.grad is None or not (param.grad == 1).all() for param in model.parameters()):
        refuse("filled_grad")
    refuse_first(LEFT, before=before, new=before.new_attributes())
    if not _same(got, want):
        for key, other in _by_other_rules(model, x, want).items():
            if _same(got, other):
                refuse(key)
    expect_like(got, want)
    model, x = _Residual(), torch.randn(5, 3)
    if not _same(answer(model, x.clone()), _reference(model, x)):
        refuse("other_paths")
    _examine_used_twice(answer, x)
    x = torch.randn(1, 1, 5, 5)  # too small: a linear layer refuses it
    original = x.clone()
    _examine_failing(answer, RuntimeError, _seeing(), x)
    refuse_first(INPUT, x=x, original=original)


def _by_other_rules(model, x, want):
    """The gradient that each of these mistakes gives."""
    plain = _reference(model, x, replaced=lambda name: False)
    return {
        "plain_gradient": plain,
        "only_at_the_end": plain.clamp(min=0),
        "once_too_often": want.clamp(min=0),
        "top_level_only": _reference(model, x, replaced=lambda name: "." not in name),
        "no_mask": _reference(model, x, masked=False),
    }


def _same(got, want):
    same_kind = isinstance(got, Tensor) and (got.shape, got.dtype) == (want.shape, want.dtype)
    return same_kind and torch.allclose(got, want, atol=1e-6)


def _examine_used_twice(answer, x):
    model, given = _Twice(), x.clone().requires_grad_()
    want = _reference(model, x)
    model.relu.register_full_backward_hook(lambda *args: None)
    before = Before(model)
    got = answer(model, given)
    if not isinstance(got, Tensor):
        refuse("no_gradient", got=got)
    if not _same(got, want):
        refuse("used_twice")
    if before.lost_hooks():
        refuse("removed_others")
    if not given.requires_grad or given.grad is not None:
        refuse("switched_input")


GUIDED_GRADIENT = Exercise("22.C", examine_guided_gradient, guided_gradient)

EXERCISES = [REVERSE, GRADIENT_NORMS, GUIDED_GRADIENT]
