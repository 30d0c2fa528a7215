"""Answers to the exercises of notebook 22: wrong ones by the name of their refusal, and right ones."""

import copy
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

from hooklab.course.checks.n22_backward_hooks import gradient_norms, guided_gradient, reverse


def _relus(model):
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ReLU)]


# How a wrong answer cleans up: always, only if nothing raises, never.
def _then_remove(handles, run):
    try:
        return run()
    finally:
        for handle in handles:
            handle.remove()


def _remove_if_it_works(handles, run):
    result = run()
    for handle in handles:
        handle.remove()
    return result


def _leave(handles, run):
    return run()


def unfreezes(solution):
    """Switches gradients of all parameters on, whatever they were."""

    def answer(model, *given):
        model.requires_grad_(True)
        return solution(model, *given)

    return answer


def clears(solution):
    """Takes off the forward hooks of others, too."""

    def answer(model, *given):
        result = solution(model, *given)
        for module in model.modules():
            module._forward_hooks.clear()
        return result

    return answer


# ---- 22.A: reverse the gradient that leaves a module, and no other ----


def _returning(change):
    """Answers with a full backward hook that returns `change(grad_input, grad_output, strength)`."""

    def answer(module, strength):
        return module.register_full_backward_hook(lambda module, *grads: change(*grads, strength))

    return answer


def _times(factor, grads):
    return tuple(None if grad is None else grad * factor for grad in grads)


def by_pre_hook(module, strength):
    return module.register_full_backward_pre_hook(lambda module, grad_output: _times(-strength, grad_output))


def by_input_tensor(module, strength):
    def hang(module, args):
        for arg in args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                arg.register_hook(lambda grad: grad * -strength)

    return module.register_forward_pre_hook(hang)


def by_parameters(module, strength):
    for param in module.parameters():
        param.register_hook(lambda grad: grad * -strength)
    return module.register_forward_hook(lambda *args: None)


def by_legacy(module, strength):
    return module.register_backward_hook(lambda module, grad_input, grad_output: _times(-strength, grad_input))


def _in_place(grad_input, grad_output, strength):
    for grad in grad_input:
        if grad is not None:
            grad.mul_(-strength)


def _only_floats(grad_input, grad_output, strength):
    if all(grad.is_floating_point() for grad in grad_input if grad is not None):
        return _times(-strength, grad_input)


def reverse_no_handle(module, strength):
    reverse(module, strength)


def reverse_once(module, strength):
    def hook(module, grad_input, grad_output):
        handle.remove()
        return _times(-strength, grad_input)

    handle = module.register_full_backward_hook(hook)
    return handle


def reverse_deaf(module, strength):
    reverse(module, strength)
    return nn.Linear(1, 1).register_forward_hook(lambda *args: None)


def reverse_with_two(module, strength):
    module.register_forward_hook(lambda *args: None)
    return reverse(module, strength)


def reverse_frozen(module, strength):
    module.requires_grad_(False)
    return reverse(module, strength)


_LATEST = {}


def reverse_by_global(module, strength):
    _LATEST["strength"] = strength
    by_latest = _returning(lambda grad_input, grad_output, _: _times(-_LATEST["strength"], grad_input))
    return by_latest(module, strength)


def reverse_everywhere(module, strength):
    return register_module_full_backward_hook(lambda module, grad_input, _: _times(-strength, grad_input))


def reverse_this_one(module, strength):
    """A right answer: the hook is a global one, and asks for its module."""

    def hook(other, grad_input, grad_output):
        if other is module:
            return tuple(grad if grad is None else (grad * -strength).to(grad.dtype) for grad in grad_input)

    return register_module_full_backward_hook(hook)


def detached(module, strength):
    return module.register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))


# ---- 22.B: how large is the gradient at the output of each ReLU, in place or not ----


def _norms(
    kinds=nn.ReLU,
    measure=lambda grad: grad.norm().item(),
    modules=nn.Module.named_modules,
    backward=True,
    clean_up=_then_remove,
    guarded=True,
):
    """A family of answers that differ in one thing each."""

    def answer(model, loss_fn):
        norms, handles = {}, []
        for name, module in modules(model):
            if isinstance(module, kinds):

                def hang(module, args, output, name=name):
                    if output.requires_grad or not guarded:
                        output.register_hook(lambda grad: norms.update({name: measure(grad)}))

                handles.append(module.register_forward_hook(hang))
        clean_up(handles, lambda: loss_fn(model).backward() if backward else loss_fn(model))
        return norms

    return answer


def _norms_by(register, look):
    """Answers with a module hook that returns what `look` does with the norms, a name and what the hook was given."""

    def answer(model, loss_fn):
        norms = {}
        handles = [
            register(module, lambda *given, name=name: look(norms, name, *given)) for name, module in _relus(model)
        ]
        _then_remove(handles, lambda: loss_fn(model).backward())
        return norms

    return answer


def norms_last_name(model, loss_fn):
    norms, handles = {}, []

    def hang(module, args, output):
        output.register_hook(lambda grad: norms.update({name: grad.norm().item()}))

    for name, module in model.named_modules():  # noqa: B007
        if isinstance(module, nn.ReLU):
            handles.append(module.register_forward_hook(hang))
    _then_remove(handles, lambda: loss_fn(model).backward())
    return norms


def norms_in_order(model, loss_fn):
    """Takes the order in which the layers run for that in which they are defined."""
    norms, handles = [], []
    for _, module in _relus(model):

        def hang(module, args, output):
            output.register_hook(lambda grad: norms.append(grad.norm().item()))

        handles.append(module.register_forward_hook(hang))
    _then_remove(handles, lambda: loss_fn(model).backward())
    return dict(zip([name for name, _ in _relus(model)], reversed(norms), strict=True))


def _look_backward(norms, name, module, grad_input, grad_output):
    norms[name] = grad_output[0].norm().item()


def _look_forward(norms, name, module, args, output):
    norms[name] = output.norm().item()


def _look_at_input(norms, name, module, args):
    args[0].register_hook(lambda grad: norms.update({name: grad.norm().item()}))


def _return_handle(norms, name, module, args, output):
    return output.register_hook(lambda grad: norms.update({name: grad.norm().item()}))


def _change(norms, name, module, args, output):
    def measure(grad):
        norms[name] = grad.norm().item()
        return grad / grad.norm()

    output.register_hook(measure)


def norms_out_of_place(model, loss_fn):
    for _, module in _relus(model):
        module.inplace = False
    return _norms_by(nn.Module.register_full_backward_hook, _look_backward)(model, loss_fn)


def norms_one_backward_each(model, loss_fn):
    outputs, handles = {}, []
    for name, module in _relus(model):
        keep = lambda module, args, output, name=name: outputs.update({name: output})  # noqa: E731
        handles.append(module.register_forward_hook(keep))
    loss = _then_remove(handles, lambda: loss_fn(model))
    return {
        name: torch.autograd.grad(loss, output, retain_graph=True)[0].norm().item() for name, output in outputs.items()
    }


def norms_on_module(model, loss_fn):
    def keep(module, args, output):
        output.retain_grad()
        module.kept = output

    handles = [module.register_forward_hook(keep) for _, module in _relus(model)]
    _then_remove(handles, lambda: loss_fn(model).backward())
    return {name: module.kept.grad.norm().item() for name, module in _relus(model)}


def norms_by_default(model, loss_fn, norms={}):  # noqa: B006
    norms.update(gradient_norms(model, loss_fn))
    return norms


def norms_in_place_lost(model, loss_fn):
    """Takes the layers out of place, and forgets them when forward raises."""
    flags = [(module, module.inplace) for _, module in _relus(model)]
    norms = norms_out_of_place(model, loss_fn)
    for module, flag in flags:
        module.inplace = flag
    return norms


def norms_swallowed(model, loss_fn):
    try:
        return gradient_norms(model, loss_fn)
    except Exception:
        return {}


def norms_from_zero(model, loss_fn):
    model.zero_grad()
    return gradient_norms(model, loss_fn)


def norms_run_twice(model, loss_fn):
    loss_fn(model)
    return gradient_norms(model, loss_fn)


def norms_by_numpy(model, loss_fn):
    return {name: np.float32(norm) for name, norm in gradient_norms(model, loss_fn).items()}


# ---- 22.C: guided backpropagation ----


def _clamp(module, grad_input, grad_output):
    return (grad_input[0].clamp(min=0),)


def _hung(model):
    return [relu.register_full_backward_hook(_clamp) for _, relu in _relus(model)]


def _gradient(model, x, handles, clean_up=_then_remove):
    image = x.detach().requires_grad_()
    return clean_up(handles, lambda: torch.autograd.grad(model(image).sum(), image)[0])


def _guided(
    hook=_clamp,
    register=nn.Module.register_full_backward_hook,
    modules=nn.Module.modules,
    finish=lambda grad: grad,
    clean_up=_then_remove,
):
    """A family of answers that differ in one thing each."""

    def answer(model, x):
        handles = [register(module, hook) for module in modules(model) if isinstance(module, nn.ReLU)]
        return finish(_gradient(model, x, handles, clean_up))

    return answer


def guided_inputs(model, x):
    def hang(module, args):
        args[0].register_hook(lambda grad: grad.clamp(min=0))

    return _gradient(model, x, [relu.register_forward_pre_hook(hang) for _, relu in _relus(model)])


def guided_on_x(model, x):
    x.requires_grad_()
    return _then_remove(_hung(model), lambda: torch.autograd.grad(model(x).sum(), x)[0])


def guided_on_a_clone(model, x):
    model, image = copy.deepcopy(model), x.clone()
    image.requires_grad_()  # no leaf, where `x` requires a gradient

    def run():
        model(image).sum().backward()
        return image.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _then_remove(_hung(model), run)


def guided_switching_x(model, x):
    try:
        return guided_on_x(model, x)
    finally:
        x.requires_grad_(False)


def switches_x_on(model, x):
    """And off again, but not when the forward raises."""
    grad = guided_on_x(model, x)
    x.requires_grad_(False)
    return grad


def guided_by_mask(model, x):
    positive, handles = {}, []
    for _, relu in _relus(model):
        handles += [
            relu.register_forward_hook(lambda module, args, output: positive.update({module: output > 0})),
            relu.register_full_backward_hook(
                lambda module, grad_input, grad_output: (grad_output[0].clamp(min=0) * positive[module],)
            ),
        ]
    return _gradient(model, x, handles)


def guided_on_module(model, x):
    for module in model.modules():
        module.seen = True
    return guided_gradient(model, x)


def guided_in_eval(model, x):
    model.eval()
    grad = guided_gradient(model, x)
    model.train()
    return grad


def guided_swallowed(model, x):
    try:
        return guided_gradient(model, x)
    except RuntimeError:
        return torch.zeros_like(x)


def guided_by_backward(model, x):
    image = x.detach().clone().requires_grad_()
    _then_remove(_hung(model), lambda: model(image).sum().backward())
    return image.grad


def guided_frozen(model, x):
    model.requires_grad_(False)
    return guided_gradient(model, x)


def _print_clamped(module, grad_input, grad_output):
    grad_input[0].clamp(min=0)


WRONG = {
    "22.A": {
        "parameters_changed": by_pre_hook,
        "only_parameters": by_parameters,
        "legacy_hook": by_legacy,
        "other_paths": by_input_tensor,
        "wrong_number": _returning(lambda grad_input, grad_output, strength: grad_input[0] * -strength),
        "wrong_size": _returning(lambda grad_input, grad_output, strength: _times(-strength, grad_output)),
        "unchanged": _returning(lambda grad_input, grad_output, strength: None),
        "in_place": _returning(_in_place),
        "fails_on_none": _returning(
            lambda grad_input, grad_output, strength: tuple(grad * -strength for grad in grad_input)
        ),
        "changed_dtype": _returning(lambda grad_input, grad_output, strength: _times(-strength, grad_input)),
        "beside_whole_numbers": _returning(_only_floats),
        "some_inputs": _returning(
            lambda grad_input, grad_output, strength: (grad_input[0] * -strength, *grad_input[1:])
        ),
        "no_handle": reverse_no_handle,
        "first_only": reverse_once,
        "wrong_values": _returning(lambda grad_input, grad_output, strength: _times(strength, grad_input)),
        "still_there": reverse_deaf,
        "changed_output": lambda module, strength: module.register_forward_hook(
            lambda module, args, output: output * -strength
        ),
        "everywhere": reverse_everywhere,
        "second_hook": reverse_with_two,
        "frozen": reverse_frozen,
        "replaced_output": lambda module, strength: module.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda grad: grad * -strength)
        ),
        "no_gradient": _returning(lambda grad_input, grad_output, strength: (None,) * len(grad_input)),
        "another_module": reverse_by_global,
    },
    "22.B": {
        "full_backward_hook": _norms_by(nn.Module.register_full_backward_hook, _look_backward),
        "replaced_output": _norms_by(nn.Module.register_forward_hook, _return_handle),
        "other_end": _norms_by(nn.Module.register_forward_pre_hook, _look_at_input),
        "norms_of_outputs": _norms_by(nn.Module.register_forward_hook, _look_forward),
        "last_name": norms_last_name,
        "left_behind": _norms(clean_up=_leave),
        "left_after_error": _norms(clean_up=_remove_if_it_works),
        "removed_others": clears(gradient_norms),
        "missing_layers": _norms(modules=nn.Module.named_children),
        "other_layers": _norms(kinds=(nn.ReLU, nn.Linear, nn.Conv2d)),
        "not_numbers": _norms(measure=lambda grad: grad.norm()),
        "other_order": norms_in_order,
        "wrong_values": _norms(measure=lambda grad: grad.abs().mean().item()),
        "nothing_arrived": _norms(backward=False),
        "changed_model": norms_out_of_place,
        "changed_gradient": _norms_by(nn.Module.register_forward_hook, _change),
        "cleared_grad": norms_from_zero,
        "frozen_first": _norms(guarded=False),
        "ran_twice": norms_run_twice,
        "backward_often": norms_one_backward_each,
        "attribute_left": norms_on_module,
        "from_before": norms_by_default,
        "changed_after_error": norms_in_place_lost,
        "swallowed": norms_swallowed,
        "legacy_hook": _norms_by(nn.Module.register_backward_hook, _look_backward),
        "not_a_dict": lambda model, loss_fn: list(gradient_norms(model, loss_fn).values()),
    },
    "22.C": {
        "plain_gradient": _guided(hook=_print_clamped),
        "only_at_the_end": _guided(hook=_print_clamped, finish=lambda grad: grad.clamp(min=0)),
        "once_too_often": _guided(finish=lambda grad: grad.clamp(min=0)),
        "top_level_only": _guided(modules=nn.Module.children),
        "no_mask": _guided(hook=lambda module, grad_input, grad_output: (grad_output[0].clamp(min=0),)),
        "wrong_number": _guided(hook=lambda module, grad_input, grad_output: grad_input[0].clamp(min=0)),
        "wrong_values": _guided(hook=lambda module, grad_input, grad_output: (grad_input[0].clamp(max=0),)),
        "wrong_type": _guided(finish=lambda grad: (grad,)),
        "changed_input": guided_on_x,
        "edited_input": lambda model, x: guided_gradient(model, x.clamp_(min=0)),
        "no_gradient": guided_on_a_clone,
        "switched_input": guided_switching_x,
        "used_twice": guided_by_mask,
        "attribute_left": guided_on_module,
        "changed_after_error": guided_in_eval,
        "swallowed": guided_swallowed,
        "filled_grad": guided_by_backward,
        "changed_model": guided_frozen,
        "removed_others": clears(guided_gradient),
        "other_paths": guided_inputs,
        "legacy_hook": _guided(register=nn.Module.register_backward_hook),
        "left_behind": _guided(clean_up=_leave),
        "left_after_error": _guided(clean_up=_remove_if_it_works),
    },
}

ALSO_WRONG = [
    ("22.B", "changed_model", unfreezes(gradient_norms)),
    ("22.C", "changed_model", unfreezes(guided_gradient)),
    ("22.A", "no_gradient", detached),
    ("22.C", "switched_input", switches_x_on),
]

RIGHT = [
    ("22.A", reverse_this_one),
    ("22.B", norms_by_numpy),
]
