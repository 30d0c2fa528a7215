"""Answers to the exercises of notebook 11: wrong ones by the name of their refusal, and right ones."""

import torch
from torch import Tensor

from hooklab.course.checks.n11_reading_gradients import gradient_of, record, without_gradient

# ---- 11.A: the gradient of any tensor, without touching a .grad ----


def got_none(loss, tensor):
    loss.backward()
    return tensor.grad if tensor.is_leaf else None


def hooked(loss, tensor):
    seen = []
    tensor.register_hook(seen.append)
    torch.autograd.grad(loss, tensor)
    return seen[0]


def filled_only_its_own(loss, tensor):
    loss.backward(inputs=[tensor])
    return tensor.grad


# ---- 11.B: a list into which every gradient of a tensor is copied ----


def recording(take):
    """An answer that puts down `take(grad)`."""

    def answer(tensor):
        gradients = []
        tensor.register_hook(lambda grad: gradients.append(take(grad)))
        return gradients

    return answer


def nothing_recorded(tensor):
    gradients = []

    def hook(grad):
        gradients = [grad.clone()]  # noqa: F841

    tensor.register_hook(hook)
    return gradients


SHARED = []  # the list of every call


def shared_list(tensor):
    tensor.register_hook(lambda grad: SHARED.append(grad.clone()))
    return SHARED


def only_last(tensor):
    gradients = []

    def hook(grad):
        gradients[:] = [grad.clone()]

    tensor.register_hook(hook)
    return gradients


def read_dot_grad(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(None if tensor.is_leaf else tensor.__dict__.get("grad")))
    return gradients


def changed(tensor):
    gradients, first = [], {}

    def hook(grad):
        gradients.append(grad.clone())
        return first.setdefault("grad", grad)

    tensor.register_hook(hook)
    return gradients


def never_freed(tensor):
    gradients = []

    def hook(grad):
        assert grad.shape == tensor.shape
        gradients.append(grad.clone())

    tensor.register_hook(hook)
    return gradients


def leaf_grad(tensor):
    gradients = []

    def take(leaf):
        gradients.append(leaf.grad.clone())
        leaf.grad = None

    if not tensor.is_leaf:
        return record(tensor)
    tensor.register_post_accumulate_grad_hook(take)
    return gradients


def middle_only(tensor):
    return record(tensor) if not tensor.is_leaf else []


def zeros_left_out(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(grad.clone()) if grad.any() else None)
    return gradients


def of_the_original(tensor):
    """Keeps the gradient itself, and lets a copy flow on."""
    gradients = []

    def hook(grad):
        gradients.append(grad)
        return grad.clone()

    tensor.register_hook(hook)
    return gradients


# ---- 11.C: which parameters did backward not reach? ----


def by_layers(model):
    layers = model.named_children()
    return [f"{name}.{missing}" for name, layer in layers for missing in without_gradient(layer)]


def fills_with_zeros(model):
    names = without_gradient(model)
    for name in names:
        param = model.get_parameter(name)
        param.grad = torch.zeros_like(param)
    return names


def run_again(model):
    model(torch.ones(1, 2)).sum().backward()
    return without_gradient(model)


def named(model, is_listed):
    return [name for name, param in model.named_parameters() if is_listed(param)]


def of_direct_children(model):
    found = []
    for name, part in [("", model), *model.named_children()]:
        for own, param in part.named_parameters(prefix=name, recurse=False):
            if param.requires_grad and param.grad is None:
                found.append(own)
    return found


def in_a_default(model, found=[]):  # noqa: B006
    found += without_gradient(model)
    return found


WRONG = {
    "11.A": {
        "wrong_type": lambda loss, tensor: gradient_of(loss, tensor).tolist(),
        "tuple": lambda loss, tensor: torch.autograd.grad(loss, tensor),
        "filled_grad": filled_only_its_own,
        "got_none": got_none,
        "returned_nothing": lambda loss, tensor: print(torch.autograd.grad(loss, tensor)[0].shape),
        "left_behind": hooked,
        "attached": lambda loss, tensor: torch.autograd.grad(loss, tensor, create_graph=True)[0],
        "wrong_values": lambda loss, tensor: torch.ones_like(tensor),
        "wrong_shape": lambda loss, tensor: torch.autograd.grad(loss, tensor)[0].mean(),
    },
    "11.B": {
        "nothing_recorded": nothing_recorded,
        "only_last": only_last,
        "shared_list": shared_list,
        "wrong_type": recording(Tensor.tolist),
        "wrong_dtype": recording(lambda grad: grad.clone().float()),
        "leaf": middle_only,
        "leaf_grad": leaf_grad,
        "zero_for_none": zeros_left_out,
        "read_dot_grad": read_dot_grad,
        "changed": changed,
        "not_a_copy": recording(lambda grad: grad),
        "never_freed": never_freed,
        "not_a_list": lambda tensor: tensor.register_hook(lambda grad: None),
    },
    "11.C": {
        "not_deep_enough": of_direct_children,
        "data_grad": lambda model: named(model, lambda param: param.data.grad is None),
        "zero_counted": lambda model: named(model, lambda param: param.grad is None or not param.grad.any()),
        "frozen_counted": lambda model: named(model, lambda param: param.grad is None),
        "ran_backward": run_again,
        "one_model_only": lambda model: ["forgotten.weight", "forgotten.bias", "own"],
        "missed": lambda model: [name for name in without_gradient(model) if name.endswith("weight")],
        "missed_own": by_layers,
        "filled_grad": fills_with_zeros,
        "not_names": lambda model: [param for param in model.parameters() if param.grad is None],
        "raised": lambda model: named(model, lambda param: param.grad.sum() == 0),
    },
}

ALSO_WRONG = [
    ("11.C", "one_model_only", in_a_default),
    ("11.B", "not_a_copy", of_the_original),
]

RIGHT = []
