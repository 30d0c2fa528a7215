"""Checks of notebook 22: module backward hooks."""

import copy
import math
import numbers
import traceback
import warnings
from collections import OrderedDict

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, expect_like, refuse, refuse_from_before, said

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hook_count(model):
    on_modules = sum(len(getattr(module, table)) for module in model.modules() for table in HOOK_TABLES)
    everywhere = sum(len(getattr(nn.modules.module, f"_global{table}")) for table in HOOK_TABLES)
    return on_modules + everywhere + sum(len(param._backward_hooks or ()) for param in model.parameters())


def _settings(model):
    """What a function that only looks must leave as it was."""
    flags = [(module.training, getattr(module, "inplace", None)) for module in model.modules()]
    return flags, [param.requires_grad for param in model.parameters()]


def _attributes(model):
    return [set(vars(module)) for module in model.modules()]


def _examine_left_alone(model, settings, attributes, others):
    """No hook of the answer's is left, those of others are there, and no switch of the model was moved."""
    _examine_others(others)
    if _hook_count(model):
        refuse("left_behind")
    _examine_kind(model)
    if _settings(model) != settings:
        refuse("changed_model")
    pairs = zip(_attributes(model), attributes, strict=True)
    if new := sorted({name for after, before in pairs for name in after - before}):
        refuse("attribute_left", new=new)


def _examine_others(others):
    if any(hook.id not in (hook.hooks_dict_ref() or ()) for hook in others):
        refuse("removed_others")
    for hook in others:
        hook.remove()


def _examine_kind(model):
    if any(module._is_full_backward_hook is False for module in model.modules()):
        refuse("legacy_hook")


def _examine_left_after_error(model, settings):
    if _hook_count(model):
        refuse("left_after_error")
    if _settings(model) != settings:
        refuse("changed_after_error")


def _refuse_swallowed():
    refuse("swallowed")


def _refuse_what_backward_hooks_raise(error):
    """The errors that a backward hook of the learner's brings about; any other is raised again."""
    line = str(error).splitlines()[0] if str(error) else ""
    if "invalid number of" in line:
        refuse("wrong_number", line=line)
    if "changed the size" in line:
        refuse("wrong_size")
    if "BackwardHookFunction" in line:
        refuse("full_backward_hook")
    in_forward = any(frame.name == "forward" for frame in traceback.extract_tb(error.__traceback__))
    if in_forward and "RemovableHandle" in line:
        refuse("replaced_output")
    raise error


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


def examine_reverse(answer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks on a module whose inputs require no gradient
        try:
            _examine_one_input(answer)
            _examine_inputs(answer)
            _examine_inside(answer)
            _examine_another(answer)
            _examine_whole_numbers(answer)
        except (RuntimeError, TypeError, AttributeError) as error:
            _refuse_what_backward_hooks_raise(error)


def _step(layer, x):
    """One forward and backward: the output, the gradient of x, those of the parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    if not isinstance(output, Tensor):
        refuse("replaced_output", output=output)
    (output * LOSS).sum().backward()
    grads = [param.grad for param in layer.parameters()]
    return output, x.grad, [None if grad is None else grad.clone() for grad in grads]


def _examine_arrived(grad, param_grads):
    if any(param_grad is None for param_grad in param_grads):
        refuse("frozen")
    if grad is None:
        refuse("no_gradient")


def _examine_one_input(answer):
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    output, grad, param_grads = _step(layer, x)
    count = _hook_count(layer)
    handle = answer(layer, STRENGTH)
    if not callable(getattr(handle, "remove", None)):
        refuse("no_handle", handle=handle)
    got_output, got, got_params = _step(layer, x)
    if layer._is_full_backward_hook is False:
        refuse("legacy_hook")
    if not isinstance(got_output, Tensor) or not torch.equal(got_output, output):
        refuse("changed_output")
    _examine_arrived(got, got_params)
    _examine_parameters(got_params, param_grads, reached=not torch.allclose(got, grad))
    _examine_left(got, grad)
    if not torch.allclose(_step(layer, x)[1], -STRENGTH * grad):
        refuse("first_only")
    _examine_shortcut(layer, x, grad)
    _examine_neighbour(answer)
    handle.remove()
    if not torch.allclose(_step(layer, x)[1], grad):
        refuse("still_there")
    if _hook_count(layer) > count:
        refuse("second_hook")


def _examine_another(answer):
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain = _step(layer, x)[1]
    handles = [answer(layer, STRENGTH), answer(nn.Linear(3, 2), 6 * STRENGTH)]
    got = _step(layer, x)[1]
    for handle in handles:
        handle.remove()
    if not torch.allclose(got, -STRENGTH * plain):
        refuse("another_module")


def _examine_parameters(got, want, reached):
    if all(torch.allclose(one, other) for one, other in zip(got, want, strict=True)):
        return
    if not reached:
        refuse("only_parameters")
    refuse("parameters_changed")


def _examine_left(got, plain):
    if torch.allclose(got, plain):
        refuse("unchanged")
    if not torch.allclose(got, -STRENGTH * plain):
        factor = (got / plain).mean().item()
        refuse("wrong_values", factor=factor)


def _examine_shortcut(layer, x, plain):
    x = x.clone().requires_grad_()
    (layer(x) * LOSS).sum().backward(retain_graph=True)
    alone, x.grad = x.grad, None
    ((layer(x) * LOSS).sum() + 7 * x.sum()).backward()
    if not torch.allclose(x.grad - 7, alone, atol=1e-5):
        refuse("other_paths")


def _examine_neighbour(answer):
    """The gradient of a sum is one buffer for both terms, and nn.Identity hands it on as it is."""
    inside, beside = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    identity = nn.Identity()
    handle = answer(identity, STRENGTH)
    neighbour = beside * 1  # older than what is hooked, so that its backward comes later
    ((neighbour + identity(inside * 1)) * LOSS).sum().backward()
    handle.remove()
    if not torch.equal(beside.grad, LOSS):
        refuse("in_place")


def _examine_inputs(answer):
    blend, left, right = _Blend(), torch.ones(2, requires_grad=True), torch.ones(2)
    handle = answer(blend, STRENGTH)
    try:
        (blend(left, 0.25, right) * LOSS).sum().backward()
    except (TypeError, AttributeError) as error:
        if "None" not in str(error):
            raise
        refuse("fails_on_none")
    first, left.grad = left.grad, None
    (blend(left, 0.25, right.requires_grad_()) * LOSS).sum().backward()
    handle.remove()
    want = [-STRENGTH * share * blend.weight.detach() * LOSS for share in (0.25, 0.75)]
    for place, got, wanted in ((1, first, want[0]), (1, left.grad, want[0]), (3, right.grad, want[1])):
        if got is None or not torch.allclose(got, wanted):
            refuse("some_inputs", place=place)


def _examine_whole_numbers(answer):
    """Beside an input that requires a gradient, a mask or an index comes as zeros of its own dtype."""
    for factor in (torch.tensor([True, False]), torch.tensor([2, 5])):
        blend, left = _Blend(), torch.ones(2, requires_grad=True)
        handle = answer(blend, STRENGTH)
        try:
            (blend(left, 0.25, torch.ones(2), factor) * LOSS).sum().backward()
        except RuntimeError as error:
            if "changed the type" not in str(error):
                raise
            refuse("changed_dtype", factor=factor)
        handle.remove()
        want = -STRENGTH * 0.25 * blend.weight.detach() * LOSS * factor
        if left.grad is None or not torch.allclose(left.grad, want):
            refuse("beside_whole_numbers", factor=factor)


def _examine_inside(answer):
    block, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    _, grad, param_grads = _step(block, x)
    handle = answer(block, STRENGTH)
    _, got, got_params = _step(block, x)
    handle.remove()
    if not torch.allclose(got, -STRENGTH * grad) or not all(map(torch.allclose, got_params, param_grads)):
        refuse("everywhere")


REVERSE = Exercise("22.A", examine_reverse, reverse)

# ---- 22.B: how large is the gradient at the output of each ReLU, in place or not ----


def gradient_norms(model, loss_fn):
    norms, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):

            def hang(module, args, output, name=name):
                if output.requires_grad:
                    output.register_hook(lambda grad: norms.update({name: grad.norm().item()}))

            handles.append(module.register_forward_hook(hang))
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


def examine_gradient_norms(answer):
    torch.manual_seed(22)  # a net in which no ReLU is dead
    model, batch = _Pictures(), torch.randn(2, 1, 8, 8)
    runs, backwards = [], []

    def loss_fn(model):
        runs.append("run")
        loss = model(batch).square().sum()
        loss.register_hook(lambda grad: backwards.append("run"))
        return loss

    twin = copy.deepcopy(model)
    want, settings, attributes = gradient_norms(twin, loss_fn), _settings(model), _attributes(model)
    runs.clear()
    backwards.clear()
    others = [layer.register_forward_hook(lambda *args: None) for layer in (model.head, model.relu)]
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    try:
        got = answer(model, loss_fn)
    except (RuntimeError, TypeError, AttributeError) as error:
        _refuse_what_backward_hooks_raise(error)
    count = len(runs)
    _examine_left_alone(model, settings, attributes, others)
    if count == 1 and len(backwards) > 1:
        refuse("backward_often", count_backwards=len(backwards))
    if count == 1:
        _examine_gradients(model, twin)
    _examine_norms(got, want, model, loss_fn)
    if count > 1:
        refuse("ran_twice", count=count)
    _examine_next_model(answer)
    for error in (_BrokenForward, _BrokenData):
        _examine_failing(answer, error)


def _examine_next_model(answer):
    """The first layers are frozen."""
    layers = {
        "base": nn.Linear(3, 3).requires_grad_(False),
        "still": nn.ReLU(),
        "lens": nn.Linear(3, 2),
        "gate": nn.ReLU(),
    }
    model, x = nn.Sequential(OrderedDict(layers)), torch.ones(1, 3)
    try:
        found = list(answer(model, lambda model: model(x).sum()))
        refuse_from_before(found, model, dict(_Pictures().named_modules()))
    except (RuntimeError, TypeError, AttributeError) as error:
        found = said(error)
    if found != ["gate"]:
        refuse("frozen_first", found=found)


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
    names = [name for name, _ in model.named_modules()]
    in_order = [name for name in names if name in want]
    for last, zh, en in (
        (names[-1], "`named_modules()` 的最后一个名字", "the last name of `named_modules()`"),
        (in_order[-1], "最后一个 ReLU", "the last ReLU"),
    ):
        if list(got) == [last]:
            refuse(
                "last_name",
                zh=f"字典里只有 `{last}` 一项，它是{zh}：你的钩子触发时才去读循环变量，那时循环早就结束了。",
                en=f"The only entry is `{last}`, {en}: your hooks read the loop variable when they fire, and by then the loop is over.",
            )
    if strangers := [name for name in got if name not in want]:
        refuse("other_layers", strangers=strangers[0])
    if missing := [name for name in in_order if name not in got]:
        refuse("missing_layers", missing=missing[0], count_want=len(want))
    for name, value in got.items():
        if not isinstance(value, numbers.Real):
            refuse("not_numbers", name=name, value=value)
    _examine_values(got, want, model, loss_fn)


def _close(got, want):
    return all(abs(got[name] - value) <= 1e-4 * abs(value) + 1e-7 for name, value in want.items())


def _examine_values(got, want, model, loss_fn):
    if _close(got, want):
        return
    if _close(dict(enumerate(sorted(got.values()))), dict(enumerate(sorted(want.values())))):
        refuse("other_order")
    at_inputs, outputs = _other_norms(copy.deepcopy(model), loss_fn)
    if _close(got, at_inputs):
        refuse("other_end")
    if _close(got, outputs):
        refuse("norms_of_outputs")
    name = next(name for name in want if not _close(got, {name: want[name]}))
    refuse("wrong_values", name=name, want=want[name], got=got[name])


def _other_norms(model, loss_fn):
    """The norms of the gradients at the inputs of the ReLUs, and of their outputs."""
    at_inputs, outputs = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):

            def before(module, args, name=name):
                args[0].register_hook(lambda grad: at_inputs.update({name: grad.norm().item()}))

            def after(module, args, output, name=name):
                outputs[name] = output.norm().item()

            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
    loss_fn(model).backward()
    return at_inputs, outputs


class _BrokenForward(RuntimeError):
    pass


class _BrokenData(LookupError):
    pass


def _examine_failing(answer, error):
    model = _Pictures()
    settings, passed_on = _settings(model), False

    def fails(model):
        model.stem(torch.zeros(1, 1, 8, 8))
        raise error("this loss_fn fails on purpose")

    try:
        answer(model, fails)
    except error:
        passed_on = True
    _examine_left_after_error(model, settings)
    if not passed_on:
        _refuse_swallowed()


GRADIENT_NORMS = Exercise("22.B", examine_gradient_norms, gradient_norms)

# ---- 22.C: guided backpropagation ----


def guided_gradient(model, x):
    def hook(module, grad_input, grad_output):
        return (grad_input[0].clamp(min=0),)

    relus = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    handles = [relu.register_full_backward_hook(hook) for relu in relus]
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
    def __init__(self, masked=True):
        super().__init__()
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        return _Rule.apply(x, self.masked)


def _seeing(outer=nn.ReLU, inner=nn.ReLU):
    """The same weights each time: a net with one ReLU at the top level and two nested ones."""
    state = torch.get_rng_state()
    torch.manual_seed(5)
    net = nn.Sequential()
    net.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(inner()))
    net.conv, net.act, net.flat = nn.Conv2d(4, 4, 3), outer(), nn.Flatten()
    net.neck, net.head = nn.Sequential(nn.Linear(64, 6), inner()), nn.Linear(6, 2)
    net.conv.bias.requires_grad_(False)  # and so it must stay
    torch.set_rng_state(state)
    return net


class _Residual(nn.Module):
    """The same weights each time: a ReLU, and a way past it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        self.stem, self.activation, self.head = nn.Linear(3, 4), activation, nn.Linear(4, 4)
        torch.set_rng_state(state)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        return hidden + self.head(self.activation(hidden))


class _Twice(nn.Module):
    """The same weights each time: one ReLU, called twice."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        self.stem, self.activation, self.body = nn.Linear(3, 6), activation, nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        torch.set_rng_state(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.body(self.activation(self.stem(x)))))


def _plain_gradient(net, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(net(x).sum(), x)[0]


def examine_guided_gradient(answer):
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    model, before = _seeing(), x.clone()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    settings, attributes = _settings(model), _attributes(model)
    others = [model.head.register_forward_hook(lambda module, args, output: None)]
    try:
        got = answer(model, x)
    except (RuntimeError, TypeError, AttributeError) as error:
        _refuse_what_backward_hooks_raise(error)
    _examine_input(x, before)
    if any(param.grad is None or not (param.grad == 1).all() for param in model.parameters()):
        refuse("filled_grad")
    _examine_left_alone(model, settings, attributes, others)
    _examine_guided(got, x)
    _examine_residual(answer)
    _examine_used_twice(answer)
    _examine_guided_failing(answer)


def _examine_input(x, before):
    if not torch.equal(x, before):
        refuse("edited_input")
    if x.requires_grad or x.grad is not None:
        refuse("changed_input")


def _examine_used_twice(answer):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(7))
    given = x.clone().requires_grad_()
    model = _Twice(nn.ReLU())
    others = [model.activation.register_full_backward_hook(lambda *args: None)]
    got = answer(model, given)
    if not isinstance(got, Tensor):
        refuse("no_gradient", got=got)
    if not torch.allclose(got, _plain_gradient(_Twice(_Guided()), x), atol=1e-6):
        refuse("used_twice")
    _examine_others(others)
    if not given.requires_grad or given.grad is not None:
        refuse("switched_input")


def _examine_residual(answer):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(7))
    got = answer(_Residual(nn.ReLU()), x.clone())
    if not torch.allclose(got, _plain_gradient(_Residual(_Guided()), x), atol=1e-6):
        refuse("other_paths")


def _examine_guided(got, x):
    want = _plain_gradient(_seeing(_Guided, _Guided), x)
    plain = _plain_gradient(_seeing(), x)
    if isinstance(got, Tensor) and got.shape == want.shape and not torch.allclose(got, want, atol=1e-6):
        if torch.allclose(got, plain, atol=1e-6):
            refuse("plain_gradient")
        if torch.allclose(got, plain.clamp(min=0), atol=1e-6):
            refuse("only_at_the_end")
        if torch.allclose(got, want.clamp(min=0), atol=1e-6):
            refuse("once_too_often")
        if torch.allclose(got, _plain_gradient(_seeing(_Guided, nn.ReLU), x), atol=1e-6):
            refuse("top_level_only")
        no_mask = _seeing(lambda: _Guided(masked=False), lambda: _Guided(masked=False))
        if torch.allclose(got, _plain_gradient(no_mask, x), atol=1e-6):
            refuse("no_mask")
    expect_like(got, want)


def _examine_guided_failing(answer):
    model, x, passed_on = _seeing(), torch.randn(1, 1, 5, 5), False  # too small: a linear layer refuses it
    settings, before = _settings(model), x.clone()
    try:
        answer(model, x)
    except RuntimeError:
        passed_on = True
    _examine_left_after_error(model, settings)
    _examine_input(x, before)
    if not passed_on:
        _refuse_swallowed()


GUIDED_GRADIENT = Exercise("22.C", examine_guided_gradient, guided_gradient)

EXERCISES = [REVERSE, GRADIENT_NORMS, GUIDED_GRADIENT]
