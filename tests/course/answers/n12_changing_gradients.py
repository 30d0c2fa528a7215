"""Answers to the exercises of notebook 12: wrong ones by the name of their refusal, and right ones."""

import torch
from torch.autograd.graph import get_gradient_edge

from hooklab.course.checks.n12_changing_gradients import decay, freeze_rows

# ---- 12.A: a hook maker that caps the norm of the gradient ----


def cap_in_place(limit):
    def hook(grad):
        if grad.norm() > limit:
            grad *= limit / grad.norm()

    return hook


def cap_without_return(limit):
    def hook(grad):
        if grad.norm() > limit:
            grad = grad * (limit / grad.norm())

    return hook


def cap_rows(limit):
    def hook(grad):
        norm = grad.norm(dim=-1, keepdim=True)
        return torch.where(norm > limit, grad * (limit / norm), grad)

    return hook


def edited_small(limit):
    def hook(grad):
        if grad.norm() > limit:
            return grad * (limit / grad.norm())
        grad.zero_()

    return hook


# ---- 12.B: weight decay for a whole model ----


_LATEST = {}  # where some keep what each call should keep for itself


def _hang(model, make_hook):
    return [param.register_hook(make_hook(param)) for param in model.parameters() if param.requires_grad]


def decay_last_one(model, strength):
    handles = []
    for param in [param for param in model.parameters() if param.requires_grad]:
        handles.append(param.register_hook(lambda grad: grad + strength * param.detach()))  # noqa: B023
    return handles


def decay_stale(model, strength):
    def make_hook(param):
        penalty = strength * param.detach()
        return lambda grad: grad + penalty

    return _hang(model, make_hook)


def decay_without_return(model, strength):
    def make_hook(param):
        def hook(grad):
            grad = grad + strength * param.detach()

        return hook

    return _hang(model, make_hook)


def decay_in_place(model, strength):
    def make_hook(param):
        def hook(grad):
            grad += strength * param.detach()

        return hook

    return _hang(model, make_hook)


def decay_weights(model, strength):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 - strength)
    return []


def decay_one_handle(model, strength):
    return decay(model, strength)[:1]


def decay_first_only(model, strength):
    return [model.weight.register_hook(lambda grad: grad + strength * model.weight.detach())]


def decay_frozen_too(model, strength):
    return [param.register_hook(lambda grad, param=param: grad + strength * param) for param in model.parameters()]


def decay_unfrozen(model, strength):
    model.requires_grad_(True)
    return decay(model, strength)


def decay_in_data(model, strength):
    return _hang(model, lambda param: lambda grad: grad + param.data.mul_(strength))


def decay_once(model, strength):
    def make_hook(param):
        first = {}
        return lambda grad: first.setdefault("grad", grad + strength * param.detach())

    return _hang(model, make_hook)


def decay_where_grad(model, strength):
    return [
        param.register_hook(lambda grad, param=param: grad + strength * param.detach())
        for param in model.parameters()
        if param.requires_grad and param.grad is not None
    ]


def decay_into_one_list(model, strength, handles=[]):  # noqa: B006
    handles += decay(model, strength)
    return handles


def decay_by_the_latest(model, strength):
    _LATEST["strength"] = strength
    return _hang(model, lambda param: lambda grad: grad + _LATEST["strength"] * param.detach())


def empty_only(model, strength):
    def hook_for(param):
        return lambda grad: grad + strength * param.detach() if param.grad is None else grad

    return [param.register_hook(hook_for(param)) for param in model.parameters() if param.requires_grad]


# ---- 12.C: freeze some rows of a weight ----


def _masked(weight, mask):
    return weight.register_hook(lambda grad: grad * mask.to(grad.dtype))


def freeze_in_place(weight, rows):
    def hook(grad):
        grad[rows] = 0

    return weight.register_hook(hook)


def freeze_without_return(weight, rows):
    def hook(grad):
        grad = grad.clone()
        grad[rows] = 0

    return weight.register_hook(hook)


def freeze_rescaled(weight, rows):
    mask = torch.ones(len(weight), 1)
    mask[rows] = 0
    return _masked(weight, mask / mask.mean())


def freeze_by_zeroing(weight, rows):
    with torch.no_grad():
        weight[rows] = 0
    return freeze_rows(weight, rows)


def freeze_by_zeroing_in_backward(weight, rows):
    def hook(grad):
        weight.data[rows] = 0
        grad = grad.clone()
        grad[rows] = 0
        return grad

    return weight.register_hook(hook)


def freeze_inverted(weight, rows):
    mask = torch.zeros(len(weight), 1)
    mask[rows] = 1
    return _masked(weight, mask)


def freeze_float_mask(weight, rows):
    mask = torch.ones(len(weight), 1)
    mask[rows] = 0
    return weight.register_hook(lambda grad: grad * mask)


def freeze_columns(weight, rows):
    def hook(grad):
        grad = grad.clone()
        grad[:, rows[0] % 3] = 0
        return grad

    return weight.register_hook(hook)


def freeze_twice(weight, rows):
    freeze_rows(weight, rows)
    return freeze_rows(weight, rows)


def freeze_once(weight, rows):
    first, mask = {}, torch.ones_like(weight)
    mask[rows] = 0
    return weight.register_hook(lambda grad: first.setdefault("grad", grad * mask))


def freeze_a_copy(weight, rows):
    def hook(param):
        param.grad[rows].zero_()

    return weight.register_post_accumulate_grad_hook(hook)


def freeze_the_latest(weight, rows):
    _LATEST["rows"] = rows

    def hook(grad):
        grad = grad.clone()
        grad[_LATEST["rows"]] = 0
        return grad

    return weight.register_hook(hook)


class _Cleared:
    """A handle that takes off whatever is there."""

    def __init__(self, weight, handle):
        self.weight = weight

    def remove(self):
        self.weight._backward_hooks.clear()


class _Holding:
    """A handle that alone keeps the Node which has the hook."""

    def __init__(self, node, hook):
        self.node, self.handle = node, node.register_prehook(hook)

    def remove(self):
        self.handle.remove()


def freeze_on_the_node(weight, rows):
    def hook(grads):
        grad = grads[0].clone()
        grad[rows] = 0
        return (grad,)

    return _Holding(get_gradient_edge(weight).node, hook)


def freeze_and_empty(weight, rows):
    keep = torch.ones(len(weight), 1)
    while rows:
        keep[rows.pop()] = 0
    return _masked(weight, keep)


WRONG = {
    "12.A": {
        "not_a_hook": lambda limit: torch.ones(2) * limit,
        "edited_in_place": cap_in_place,
        "returned_nothing": cap_without_return,
        "clipped_entries": lambda limit: lambda grad: grad.clamp(-limit, limit),
        "edited_small": edited_small,
        "changed_small": lambda limit: lambda grad: grad * limit / (grad.norm() + 1e-6),
        "nan_at_zero": lambda limit: lambda grad: grad / grad.norm() * grad.norm().clamp(max=limit),
        "wrong_length": lambda limit: lambda grad: grad / grad.norm() if grad.norm() > limit else grad,
        "wrong_direction": cap_rows,
        "unchanged": lambda limit: lambda grad: grad * (limit / grad.norm()) if (grad.abs() > limit).any() else grad,
        "wrong_shape": lambda limit: lambda grad: grad.norm().clamp(max=limit),
        "wrong_type": lambda limit: lambda grad: min(limit, grad.norm().item()),
    },
    "12.B": {
        "changed_weights": decay_weights,
        "unfrozen": decay_unfrozen,
        "changed_in_backward": decay_in_data,
        "first_only": decay_once,
        "no_handles": lambda model, strength: decay(model, strength) and None,
        "other_items": lambda model, strength: list(enumerate(decay(model, strength))),
        "same_object": decay_into_one_list,
        "asks_for_grad": decay_where_grad,
        "no_hooks": lambda model, strength: [] if decay(model, strength) else None,
        "nothing_added": decay_without_return,
        "replaced": lambda model, strength: _hang(model, lambda param: lambda grad: strength * param.detach()),
        "stale": decay_stale,
        "last_one": decay_last_one,
        "missed": decay_first_only,
        "raised": decay_frozen_too,
        "wrong_addend": lambda model, strength: _hang(
            model, lambda param: lambda grad: grad - strength * param.detach()
        ),
        "edited_in_place": decay_in_place,
        "empty_only": empty_only,
        "not_removable": decay_one_handle,
        "changed_given": lambda model, strength: model.zero_grad() or decay(model, strength),
        "latest_call": decay_by_the_latest,
    },
    "12.C": {
        "changed_given": freeze_and_empty,
        "removed_others": lambda weight, rows: _Cleared(weight, freeze_rows(weight, rows)),
        "edited_in_place": freeze_in_place,
        "first_only": freeze_once,
        "not_frozen": lambda weight, rows: weight[rows].register_hook(lambda grad: grad * 0),
        "edited_copy": freeze_a_copy,
        "froze_everything": lambda weight, rows: weight.register_hook(lambda grad: grad * 0),
        "inverted": freeze_inverted,
        "changed_weights": freeze_by_zeroing,
        "changed_in_backward": freeze_by_zeroing_in_backward,
        "no_handle": lambda weight, rows: freeze_rows(weight, rows) and None,
        "no_gradient": lambda weight, rows: weight.requires_grad_(False),
        "changed_dtype": freeze_float_mask,
        "wrong_rows": freeze_columns,
        "returned_nothing": freeze_without_return,
        "wrong_values": freeze_rescaled,
        "not_removable": freeze_twice,
        "gone_with_handle": freeze_on_the_node,
        "latest_call": freeze_the_latest,
    },
}


def by_shape(model, strength):
    params = {param.shape: param for param in model.parameters() if param.requires_grad}

    def hook(grad):
        return grad + strength * params[grad.shape].detach()

    return [param.register_hook(hook) for param in model.parameters() if param.requires_grad]


ALSO_WRONG = [
    ("12.B", "last_one", by_shape),
]

RIGHT = []
