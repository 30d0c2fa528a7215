"""Answers to the exercises of notebook 46: wrong ones by the name of their refusal, and right ones."""

import copy
from functools import partial
from types import MethodType

import torch
from torch import nn

from hooklab.course.checks.n46_lora import add_lora, merge

# ---- 46.A: LoRA by a hook ----


def _on_layer(
    first=lambda x: x.normal_(std=0.5),
    second=lambda x: x.zero_(),
    formula=lambda output, change, scale: output + scale * change,
    read=lambda module, layer: module,
    param=nn.Parameter,
    like=lambda layer: layer.weight,
    extra=lambda layer: None,
):
    """An answer that is right but for what is given."""

    def answer(layer, rank, scale):
        layer.lora_A = param(first(like(layer).new_empty(rank, layer.in_features)))
        layer.lora_B = param(second(like(layer).new_empty(layer.out_features, rank)))
        extra(layer)

        def add(module, args, kwargs, output):
            owner = read(module, layer)
            x = args[0] if args else kwargs["input"]
            return formula(output, x @ owner.lora_A.T @ owner.lora_B.T, scale)

        return layer.register_forward_hook(add, with_kwargs=True)

    return answer


def in_the_closure(layer, rank, scale):
    A = nn.Parameter(torch.randn(rank, layer.in_features, dtype=layer.weight.dtype))
    B = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=layer.weight.dtype))
    return layer.register_forward_hook(lambda module, args, output: output + scale * (args[0] @ A.T @ B.T))


def with_other_shapes(layer, rank, scale):
    layer.lora_A = nn.Parameter(torch.randn(layer.in_features, rank, dtype=layer.weight.dtype))
    layer.lora_B = nn.Parameter(torch.zeros(rank, layer.out_features, dtype=layer.weight.dtype))
    return layer.register_forward_hook(
        lambda module, args, output: output + scale * (args[0] @ module.lora_A @ module.lora_B)
    )


def by_position_only(layer, rank, scale):
    add_lora(layer, rank, scale).remove()
    return layer.register_forward_hook(
        lambda module, args, output: output + scale * (args[0] @ module.lora_A.T @ module.lora_B.T)
    )


def clears_the_hooks(layer, rank, scale):
    layer._forward_hooks.clear()
    return add_lora(layer, rank, scale)


def new_forward(layer, rank, scale):
    handle = add_lora(layer, rank, scale)
    layer.forward = MethodType(type(layer).forward, layer)
    layer.forward = lambda input: type(layer).forward(layer, input)
    return handle


def with_a_second_hook(layer, rank, scale):
    layer.register_forward_hook(lambda module, args, output: output * 1)
    return add_lora(layer, rank, scale)


def zero_weight(layer):
    with torch.no_grad():
        layer.weight.mul_(0.5)


def without_graph(output, change, scale):
    return output + scale * change.detach()


# ---- 46.B: into the weight ----


def _merge(
    write=lambda layer, change, scale: layer.weight.data.add_(scale * change),
    remove=lambda layer, handle: handle.remove(),
    delete=("lora_A", "lora_B"),
    give=lambda layer, was, change, scale: was,
):
    """An answer that is right but for what is given."""

    @torch.no_grad()
    def answer(layer, handle, scale):
        was, change = layer.weight.detach().clone(), layer.lora_B @ layer.lora_A
        write(layer, change, scale)
        remove(layer, handle)
        for name in delete:
            delattr(layer, name)
        return give(layer, was, change, scale)

    return answer


def new_parameter(layer, change, scale):
    layer.weight = nn.Parameter(layer.weight + scale * change, layer.weight.requires_grad)


def clear_all(layer, handle):
    layer._forward_hooks.clear()


def thawed(layer, change, scale):
    layer.weight.data.add_(scale * change)
    layer.weight.requires_grad_(True)


def bias_too(layer, change, scale):
    layer.weight.data.add_(scale * change)
    if layer.bias is not None:
        layer.bias.data.add_(scale)


WRONG = {
    "46.A": {
        "no_handle": lambda layer, rank, scale: [add_lora(layer, rank, scale)],
        "replaced_forward": new_forward,
        "no_parameters": in_the_closure,
        "plain_tensors": _on_layer(param=lambda x: x.requires_grad_()),
        "other_shapes": with_other_shapes,
        "other_dtype": _on_layer(like=lambda layer: torch.empty(0)),
        "not_trained": _on_layer(param=partial(nn.Parameter, requires_grad=False)),
        "weight_changed": _on_layer(extra=zero_weight),
        "not_zero": _on_layer(second=lambda x: x.normal_()),
        "both_zero": _on_layer(first=lambda x: x.zero_()),
        "returned_nothing": _on_layer(formula=lambda output, change, scale: None),
        "lost_output": _on_layer(formula=lambda output, change, scale: scale * change),
        "no_scale": _on_layer(formula=lambda output, change, scale: output + change),
        "wrong_output": _on_layer(formula=lambda output, change, scale: output - scale * change),
        "no_gradient": _on_layer(formula=without_graph),
        "by_name": by_position_only,
        "follows_the_original": _on_layer(read=lambda module, layer: layer),
        "removed_others": clears_the_hooks,
        "stays_on": with_a_second_hook,
    },
    "46.B": {
        "hook_left": _merge(remove=lambda layer, handle: None),
        "removed_others": _merge(remove=clear_all),
        "parameters_left": _merge(delete=("lora_A",)),
        "other_object": _merge(write=new_parameter),
        "other_flag": _merge(write=thawed),
        "not_merged": _merge(write=lambda layer, change, scale: None),
        "no_scale": _merge(write=lambda layer, change, scale: layer.weight.data.add_(change)),
        "subtracted": _merge(write=lambda layer, change, scale: layer.weight.data.sub_(scale * change)),
        "only_the_change": _merge(write=lambda layer, change, scale: layer.weight.data.copy_(scale * change)),
        "wrong_weight": _merge(write=lambda layer, change, scale: layer.weight.data.add_(2 * scale * change)),
        "bias_changed": _merge(write=bias_too),
        "returned_nothing": _merge(give=lambda *given: None),
        "same_memory": _merge(give=lambda layer, was, change, scale: layer.weight.detach()),
        "returned_new": _merge(give=lambda layer, was, change, scale: layer.weight.detach().clone()),
        "not_exact": _merge(give=lambda layer, was, change, scale: layer.weight - scale * change),
        "other_weight": _merge(give=lambda layer, was, change, scale: scale * change),
    },
}

ALSO_WRONG = [
    ("46.A", "not_zero", _on_layer(first=lambda x: x.zero_(), second=lambda x: x.normal_())),
    ("46.B", "parameters_left", _merge(delete=())),
]


class Adds:
    """A hook that is an object."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, module, args, kwargs, output):
        (x,) = args or kwargs.values()
        return torch.add(output, (x @ module.lora_A.T) @ module.lora_B.T, alpha=self.scale)


def by_an_object(layer, rank, scale):
    A = nn.init.kaiming_uniform_(layer.weight.new_empty(rank, layer.in_features), a=5**0.5)
    layer.register_parameter("lora_A", nn.Parameter(A))
    layer.register_parameter("lora_B", nn.Parameter(layer.weight.new_zeros(layer.out_features, rank)))
    return layer.register_forward_hook(Adds(scale), with_kwargs=True, prepend=True)


def _add(module, args, kwargs, output, scale):
    x = kwargs.get("input", *args)
    return output + scale * nn.functional.linear(x, module.lora_B @ module.lora_A)


def by_partial(layer, rank, scale):
    add_lora(layer, rank, scale).remove()
    return layer.register_forward_hook(partial(_add, scale=scale), with_kwargs=True)


def copied_deeply(layer, handle, scale):
    was = copy.deepcopy(layer.weight.data)
    layer.weight.data.copy_(was + scale * layer.lora_B.data @ layer.lora_A.data)
    handle.remove()
    layer._parameters.pop("lora_A")
    layer._parameters.pop("lora_B")
    return was


RIGHT = [
    ("46.A", _on_layer()),
    ("46.A", by_an_object),
    ("46.A", by_partial),
    ("46.B", _merge()),
    ("46.B", copied_deeply),
    ("46.B", merge),
]
