"""Answers to the exercises of notebook 13: wrong ones by the name of their refusal, and right ones."""

import warnings

import torch
from torch import nn

from hooklab.course.checks.n13_hooks_inside_a_module import arrival_order, hook_output

# ---- 13.A: for use inside forward: values as they are, no negative gradient ----


def in_place(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp_(min=0))
    return x


def fails_in_no_grad(x):
    x.register_hook(lambda grad: grad.clamp(min=0))
    return x


def fails_when_frozen(x):
    if torch.is_grad_enabled():
        x.register_hook(lambda grad: grad.clamp(min=0))
    return x


def switched_on(x):
    if torch.is_grad_enabled():
        if not x.requires_grad:
            x.requires_grad_()
        x.register_hook(lambda grad: grad.clamp(min=0))
    return x


def returned_nothing(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(min=0))


def cut(x):
    x = x.detach().requires_grad_()
    x.register_hook(lambda grad: grad.clamp(min=0))
    return x


def unchanged(x):
    if x.requires_grad:
        x.register_hook(lambda grad: print(grad.clamp(min=0).shape))
    return x


def wrong_side(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(max=0))
    return x


def masked_by_values(x):
    if x.requires_grad:
        positive = x.detach() > 0
        x.register_hook(lambda grad: grad * positive)
    return x


def returned_sometimes(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(min=0))
        return x


def never_freed(x):
    if x.requires_grad:
        x.register_hook(lambda grad: torch.where(grad < 0, torch.zeros_like(x), grad))
    return x


def first_only(x):
    if x.requires_grad:
        handle = x.register_hook(lambda grad: (handle.remove(), grad.clamp(min=0))[1])
    return x


def whole_node(x):
    if x.requires_grad:
        x.grad_fn.register_prehook(lambda grads: tuple(grad.clamp(min=0) for grad in grads))
    return x


_HANDLES = []


def latest_only(x):
    while _HANDLES:
        _HANDLES.pop().remove()
    if x.requires_grad:
        _HANDLES.append(x.register_hook(lambda grad: grad.clamp(min=0)))
    return x


def nan_is_zero(x):
    if x.requires_grad:
        x.register_hook(lambda grad: torch.where(grad > 0, grad, 0))
    return x


# ---- 13.B: hang a tensor hook on a module's output, from outside ----


def _looking(ready, hang=lambda hook, args, output: output.register_hook(hook)):
    """Answers with a forward hook that asks `ready(module, args, output)`, and then hangs `hook`."""

    def answer(module, hook):
        def look(module, args, output):
            if ready(module, args, output):
                hang(hook, args, output)

        return module.register_forward_hook(look)

    return answer


def _output_requires_grad(module, args, output):
    return output.requires_grad


def changed_output(module, hook):
    def hang(module, args, output):
        changed = output * 2
        if changed.requires_grad:
            changed.register_hook(hook)
        return changed

    return module.register_forward_hook(hang)


def no_handle(module, hook):
    hook_output(module, hook)


def hangs_once(module, hook):
    def hang(module, args, output):
        output.register_hook(hook)
        handle.remove()

    handle = module.register_forward_hook(hang)
    return handle


def twice(module, hook):
    hook_output(module, hook)
    return hook_output(module, hook)


def value_dropped(module, hook):
    def look(grad):
        hook(grad)

    return hook_output(module, look)


def last_forward_only(module, hook):
    hung = []

    def hang(module, args, output):
        while hung:
            hung.pop().remove()
        if output.requires_grad:
            hung.append(output.register_hook(hook))

    return module.register_forward_hook(hang)


class _Deaf:
    def remove(self):
        pass


def still_there(module, hook):
    hook_output(module, hook)
    return _Deaf()


def everywhere(module, hook):
    for part in reversed(list(module.modules())):
        handle = hook_output(part, hook)
    return handle


_LATEST = {}


def calls_the_latest(module, hook):
    _LATEST["hook"] = hook
    return hook_output(module, lambda grad: _LATEST["hook"](grad))


def hangs_the_latest(module, hook):
    _LATEST["hook"] = hook
    hang = _looking(_output_requires_grad, lambda _, args, output: output.register_hook(_LATEST["hook"]))
    return hang(module, hook)


class _Cleared:
    """A handle that takes off whatever is there."""

    def __init__(self, module, handle):
        self.module = module

    def remove(self):
        self.module._forward_hooks.clear()


def hooked_a_view(module, hook):
    def hang(module, args, output):
        if output.requires_grad:
            output = output.view_as(output)
            output.register_hook(hook)
            return output

    return module.register_forward_hook(hang)


def one_per_module(module, hook):
    if getattr(module, "last_handle", None) is not None:
        module.last_handle.remove()
    module.last_handle = hook_output(module, hook)
    return module.last_handle


# ---- 13.C: in which order do gradients arrive at the outputs of the children? ----


def _run(model, x, handles):
    model(x).sum().backward()
    for handle in handles:
        handle.remove()


def _leave(model, x, handles):
    model(x).sum().backward()


def _remove_and_run(model, x, handles):
    for handle in handles:
        handle.remove()
    model(x).sum().backward()


def _arrivals(
    layers=nn.Module.named_children,
    of=lambda args, output: output,
    ready=lambda tensor: tensor.requires_grad,
    counts=lambda grad: True,
    run=_run,
):
    """Answers that differ in one thing each."""

    def answer(model, x):
        order, handles = [], []
        for name, layer in layers(model):

            def hang(module, args, output, name=name):
                if ready(tensor := of(args, output)):
                    tensor.register_hook(lambda grad: order.append(name) if counts(grad) else None)

            handles.append(layer.register_forward_hook(hang))
        run(model, x, handles)
        return order

    return answer


def _by_hooks(register):
    """Answers that hang with `register(child, note)`, for each child that gets a hook; `note` takes whatever it is given."""

    def answer(model, x):
        order, handles = [], []
        for name, child in model.named_children():
            handles.append(register(child, lambda *args, name=name: order.append(name)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a full backward hook on the first layer, whose input requires no gradient
            _run(model, x, [handle for handle in handles if handle is not None])
        return order

    return answer


def last_name(model, x):
    order, handles = [], []

    def hang(module, args, output):
        output.register_hook(lambda grad: order.append(name))

    for name, child in model.named_children():  # noqa: B007
        handles.append(child.register_forward_hook(hang))
    _run(model, x, handles)
    return order


def hung_too_late(model, x):
    outputs, order, handles = {}, [], []
    for name, child in model.named_children():

        def keep(module, args, output, name=name):
            outputs[name] = output

        handles.append(child.register_forward_hook(keep))
    loss = model(x).sum()
    for name, output in outputs.items():
        output.register_hook(lambda grad, name=name: order.append(name))
    loss.backward()
    for handle in handles:
        handle.remove()
    return order


def removed_others(model, x):
    order = _arrivals(run=_leave)(model, x)
    for child in model.children():
        child._forward_hooks.clear()
    return order


def order_of_parameters(model, x):
    order = []
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    handles = [param.register_hook(lambda grad, name=name: order.append(name)) for name, param in trained]
    _run(model, x, handles)
    return order


def _on_weight(child, note):
    if hasattr(child, "weight") and child.weight.requires_grad:
        return child.weight.register_hook(note)


def without_in_place(model, x):
    for module in model.modules():
        module.inplace = False
    return arrival_order(model, x)


def run_twice(model, x):
    arrival_order(model, x)
    return arrival_order(model, x)


WRONG = {
    "13.A": {
        "not_the_rest": nan_is_zero,
        "in_place": in_place,
        "fails_in_no_grad": fails_in_no_grad,
        "fails_when_frozen": fails_when_frozen,
        "switched_on": switched_on,
        "returned_handle": lambda x: x.register_hook(lambda grad: grad.clamp(min=0)),
        "returned_nothing": returned_nothing,
        "returned_sometimes": returned_sometimes,
        "changed_values": lambda x: x.clamp(min=0),
        "cut": cut,
        "unchanged": unchanged,
        "masked_by_values": masked_by_values,
        "wrong_values": wrong_side,
        "latest_only": latest_only,
        "first_only": first_only,
        "whole_node": whole_node,
        "never_freed": never_freed,
    },
    "13.B": {
        "one_per_module": one_per_module,
        "removed_others": lambda module, hook: _Cleared(module, hook_output(module, hook)),
        "replaced_output": lambda module, hook: module.register_forward_hook(
            lambda module, args, output: output.register_hook(hook)
        ),
        "changed_output": changed_output,
        "called_in_forward": lambda module, hook: module.register_forward_hook(
            lambda module, args, output: hook(output)
        ),
        "hook_on_module": lambda module, hook: module.register_forward_hook(hook),
        "fails_in_no_grad": _looking(lambda module, args, output: True),
        "fails_when_frozen": _looking(lambda module, args, output: torch.is_grad_enabled()),
        "switched_on": _looking(lambda module, args, output: output.requires_grad_() is output),
        "no_handle": no_handle,
        "first_only": hangs_once,
        "never_called": lambda module, hook: module.register_forward_hook(lambda *args: None),
        "wrong_count": twice,
        "hook_on_node": _looking(_output_requires_grad, lambda hook, args, output: output.grad_fn.register_hook(hook)),
        "only_in_training": _looking(lambda module, args, output: module.training and output.requires_grad),
        "other_gradient": _looking(
            lambda module, args, output: args[0].requires_grad, lambda hook, args, output: args[0].register_hook(hook)
        ),
        "value_dropped": value_dropped,
        "last_forward_only": last_forward_only,
        "asks_input": _looking(lambda module, args, output: args[0].requires_grad),
        "asks_parameters": _looking(
            lambda module, args, output: (
                output.requires_grad and any(param.requires_grad for param in module.parameters())
            )
        ),
        "everywhere": everywhere,
        "latest_call": calls_the_latest,
        "none_replaces": _looking(
            _output_requires_grad,
            lambda hook, args, output: output.grad_fn.register_prehook(lambda grads: (hook(grads[0]),)),
        ),
        "still_there": still_there,
        "full_backward_hook": lambda module, hook: module.register_full_backward_pre_hook(
            lambda module, grad_output: (hook(grad_output[0]),)
        ),
        "hooked_a_view": hooked_a_view,
    },
    "13.C": {
        "other_gradients": run_twice,
        "changed_given": without_in_place,
        "last_name": last_name,
        "forward_order": _by_hooks(nn.Module.register_forward_hook),
        "unused_counted": lambda model, x: [name for name, _ in model.named_children()][::-1],
        "left_behind": _arrivals(run=_leave),
        "hung_too_late": hung_too_late,
        "fails_when_frozen": _arrivals(ready=lambda tensor: True),
        "wrong_order": _by_hooks(_on_weight),
        "whole_model": _arrivals(nn.Module.named_modules),
        "full_backward_hook": _by_hooks(nn.Module.register_full_backward_hook),
        "removed_others": removed_others,
        "changed_input": lambda model, x: arrival_order(model, x.requires_grad_()),
        "not_names": lambda model, x: list(model.children())[::-1],
        "not_children": order_of_parameters,
        "nothing_arrived": _arrivals(run=_remove_and_run),
        "repeated": lambda model, x: arrival_order(model, x) + arrival_order(model, x),
        "switched_on": _arrivals(ready=lambda tensor: tensor.requires_grad_() is tensor),
        "on_inputs": _arrivals(of=lambda args, output: args[0]),
        "zero_for_none": _arrivals(counts=torch.any),
        "replaced_output": _by_hooks(
            lambda child, note: child.register_forward_hook(lambda module, args, output: output.register_hook(note))
        ),
    },
}

ALSO_WRONG = [
    ("13.B", "latest_call", hangs_the_latest),
    (
        "13.B",
        "asks_parameters",
        _looking(lambda module, args, output: output.requires_grad and module.weight.requires_grad),
    ),
]

RIGHT = []
