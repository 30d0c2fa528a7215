"""Answers to the exercises of notebook 13: wrong ones by the name of their refusal, and right ones."""

import warnings

import torch

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


_HANDLES: list = []


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


def replaced_output(module, hook):
    return module.register_forward_hook(lambda module, args, output: output.register_hook(hook))


def called_in_forward(module, hook):
    return module.register_forward_hook(lambda module, args, output: hook(output))


def other_gradient(module, hook):
    def hang(module, args, output):
        if args[0].requires_grad:
            args[0].register_hook(hook)

    return module.register_forward_hook(hang)


def changed_output(module, hook):
    def hang(module, args, output):
        changed = output * 2
        if changed.requires_grad:
            changed.register_hook(hook)
        return changed

    return module.register_forward_hook(hang)


def hook_fails_in_no_grad(module, hook):
    def hang(module, args, output):
        output.register_hook(hook)

    return module.register_forward_hook(hang)


def hook_fails_when_frozen(module, hook):
    def hang(module, args, output):
        if torch.is_grad_enabled():
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def hook_switches_on(module, hook):
    def hang(module, args, output):
        if not output.requires_grad:
            output.requires_grad_()
        output.register_hook(hook)

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


def none_replaces(module, hook):
    def hang(module, args, output):
        if output.requires_grad:
            output.grad_fn.register_prehook(lambda grads: (hook(grads[0]),))

    return module.register_forward_hook(hang)


class _Deaf:
    def remove(self):
        pass


def still_there(module, hook):
    hook_output(module, hook)
    return _Deaf()


def full_backward_hook(module, hook):
    return module.register_full_backward_pre_hook(lambda module, grad_output: (hook(grad_output[0]),))


def on_node(module, hook):
    def hang(module, args, output):
        if output.requires_grad:
            output.grad_fn.register_hook(hook)

    return module.register_forward_hook(hang)


def in_training_only(module, hook):
    def hang(module, args, output):
        if module.training and output.requires_grad:
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def asks_input(module, hook):
    def hang(module, args, output):
        if args[0].requires_grad:
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def asks_parameters(module, hook):
    def hang(module, args, output):
        if output.requires_grad and any(param.requires_grad for param in module.parameters()):
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def everywhere(module, hook):
    for part in reversed(list(module.modules())):
        handle = hook_output(part, hook)
    return handle


_LATEST = {}


def hook_of_the_latest(module, hook):
    _LATEST["hook"] = hook
    return hook_output(module, lambda grad: _LATEST["hook"](grad))


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


def last_name(model, x):
    order, handles = [], []

    def hang(module, args, output):
        output.register_hook(lambda grad: order.append(name))

    for name, child in model.named_children():  # noqa: B007
        handles.append(child.register_forward_hook(hang))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def in_forward(model, x):
    order, handles = [], []
    for name, child in model.named_children():
        handles.append(child.register_forward_hook(lambda *args, name=name: order.append(name)))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def zeros_left_out(model, x):
    order, handles = [], []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: order.append(name) if grad.any() else None)

        handles.append(child.register_forward_hook(hang))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def left_behind(model, x):
    order = []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: order.append(name))

        child.register_forward_hook(hang)
    model(x).sum().backward()
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


def order_fails_when_frozen(model, x):
    order, handles = [], []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            output.register_hook(lambda grad: order.append(name))

        handles.append(child.register_forward_hook(hang))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def _arrivals(model, x, layers, of=lambda args, output: output, switch_on=False):
    order, handles = [], []
    for name, layer in layers:

        def hang(module, args, output, name=name):
            tensor = of(args, output)
            if switch_on and not tensor.requires_grad:
                tensor.requires_grad_()
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: order.append(name))

        handles.append(layer.register_forward_hook(hang))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def whole_model(model, x):
    return _arrivals(model, x, model.named_modules())


def arrivals_at_inputs(model, x):
    return _arrivals(model, x, model.named_children(), of=lambda args, output: args[0])


def arrivals_switched_on(model, x):
    return _arrivals(model, x, model.named_children(), switch_on=True)


def full_backward_hooks(model, x):
    order, handles = [], []
    for name, child in model.named_children():
        handles.append(child.register_full_backward_hook(lambda *args, name=name: order.append(name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first layer's input requires no gradient
        model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def removed_others(model, x):
    order = left_behind(model, x)
    for child in model.children():
        child._forward_hooks.clear()
    return order


def changed_input(model, x):
    return arrival_order(model, x.requires_grad_())


def nothing_arrived(model, x):
    order, handles = [], []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: order.append(name))

        handles.append(child.register_forward_hook(hang))
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    return order


def repeated(model, x):
    return arrival_order(model, x) + arrival_order(model, x)


def order_of_parameters(model, x):
    order, handles = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            handles.append(param.register_hook(lambda grad, name=name: order.append(name)))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def handle_for_output(model, x):
    order, handles = [], []
    for name, child in model.named_children():
        hang = lambda module, args, output, name=name: output.register_hook(lambda grad: order.append(name))  # noqa: E731
        handles.append(child.register_forward_hook(hang))
    try:
        model(x).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return order


def from_weights(model, x):
    order, handles = [], []
    for name, child in model.named_children():
        if hasattr(child, "weight") and child.weight.requires_grad:
            handles.append(child.weight.register_hook(lambda grad, name=name: order.append(name)))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


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
        "replaced_output": replaced_output,
        "changed_output": changed_output,
        "called_in_forward": called_in_forward,
        "hook_on_module": lambda module, hook: module.register_forward_hook(hook),
        "fails_in_no_grad": hook_fails_in_no_grad,
        "fails_when_frozen": hook_fails_when_frozen,
        "switched_on": hook_switches_on,
        "no_handle": no_handle,
        "first_only": hangs_once,
        "never_called": lambda module, hook: module.register_forward_hook(lambda *args: None),
        "wrong_count": twice,
        "hook_on_node": on_node,
        "only_in_training": in_training_only,
        "other_gradient": other_gradient,
        "value_dropped": value_dropped,
        "last_forward_only": last_forward_only,
        "asks_input": asks_input,
        "asks_parameters": asks_parameters,
        "everywhere": everywhere,
        "latest_call": hook_of_the_latest,
        "none_replaces": none_replaces,
        "still_there": still_there,
        "full_backward_hook": full_backward_hook,
        "hooked_a_view": hooked_a_view,
    },
    "13.C": {
        "other_gradients": run_twice,
        "changed_given": without_in_place,
        "last_name": last_name,
        "forward_order": in_forward,
        "unused_counted": lambda model, x: [name for name, _ in model.named_children()][::-1],
        "left_behind": left_behind,
        "hung_too_late": hung_too_late,
        "fails_when_frozen": order_fails_when_frozen,
        "wrong_order": from_weights,
        "whole_model": whole_model,
        "full_backward_hook": full_backward_hooks,
        "removed_others": removed_others,
        "changed_input": changed_input,
        "not_names": lambda model, x: list(model.children())[::-1],
        "not_children": order_of_parameters,
        "nothing_arrived": nothing_arrived,
        "repeated": repeated,
        "switched_on": arrivals_switched_on,
        "on_inputs": arrivals_at_inputs,
        "zero_for_none": zeros_left_out,
        "replaced_output": handle_for_output,
    },
}


def hangs_the_latest(module, hook):
    _LATEST["hook"] = hook

    def hang(module, args, output):
        if output.requires_grad:
            output.register_hook(_LATEST["hook"])

    return module.register_forward_hook(hang)


def asks_the_weight(module, hook):
    def hang(module, args, output):
        if output.requires_grad and module.weight.requires_grad:
            output.register_hook(hook)

    return module.register_forward_hook(hang)


ALSO_WRONG = [
    ("13.B", "latest_call", hangs_the_latest),
    ("13.B", "asks_parameters", asks_the_weight),
]

RIGHT = []
