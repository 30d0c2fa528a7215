"""Checks of notebook 46: LoRA."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, expect_like, refuse, refuse_first
from hooklab.course.checks.calls import close, raised
from hooklab.course.checks.handles import expect_handle
from hooklab.course.checks.models import Before

# ---- what the exercises share: layers that are wider than high and higher than wide, frozen or not ----

CASES: list[tuple[Any, ...]] = [  # in_features, out_features, bias, dtype, is it trained, rank, scale
    (6, 5, True, torch.float64, False, 2, 1.5),
    (4, 7, False, torch.float32, False, 3, 2.0),
    (3, 8, True, torch.float32, True, 2, 4.0),
]


def _layer(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, trained: bool) -> Any:
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(trained)
    layer.register_forward_hook(lambda module, args, output: None)
    return layer


def _inputs(layer: nn.Linear) -> Tensor:
    count = 2 * 3 * layer.in_features
    return torch.linspace(-2, 3, count, dtype=layer.weight.dtype).cos().view(2, 3, -1)


def _fill(param: Tensor) -> None:
    with torch.no_grad():
        param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape) + 0.3)


# ---- 46.A: LoRA by a hook ----


def add_lora(layer, rank, scale):
    A = layer.weight.new_empty(rank, layer.in_features)
    B = layer.weight.new_zeros(layer.out_features, rank)
    layer.lora_A = nn.Parameter(A.normal_(std=layer.in_features**-0.5))
    layer.lora_B = nn.Parameter(B)

    def add(module, args, kwargs, output):
        x = args[0] if args else kwargs["input"]
        return output + scale * (x @ module.lora_A.T @ module.lora_B.T)

    return layer.register_forward_hook(add, with_kwargs=True)


PARAMETERS = [  # what is on the layer when the answer has returned
    ("replaced_forward", lambda t: t.before.replaced_forwards()),
    ("no_parameters", lambda t: not hasattr(t.layer, "lora_A") or not hasattr(t.layer, "lora_B")),
    ("plain_tensors", lambda t: not {"lora_A", "lora_B"} <= t.params.keys()),
    ("other_shapes", lambda t: _shapes(t.params) != t.expected),
    ("other_dtype", lambda t: {t.params[name].dtype for name in ("lora_A", "lora_B")} != {t.layer.weight.dtype}),
    ("not_trained", lambda t: not (t.params["lora_A"].requires_grad and t.params["lora_B"].requires_grad)),
    ("weight_changed", lambda t: _changed(t.params, t.was)),
    ("not_zero", lambda t: t.params["lora_B"].any()),
    ("both_zero", lambda t: not t.params["lora_A"].all()),
]

OUTPUT = [  # `got` is not `want`, with another B than 0; `plain` is the output without LoRA
    ("returned_nothing", lambda t: close(t.got, t.plain)),
    ("lost_output", lambda t: close(t.got, t.change)),
    ("no_scale", lambda t: close(t.got, t.plain + t.change / t.scale)),
    ("wrong_output", lambda t: True),
]


def _shapes(params: dict[str, Tensor]) -> list[tuple[int, ...]]:
    return [tuple(params[name].shape) for name in ("lora_A", "lora_B")]


def _changed(params: dict[str, Tensor], was: dict[str, Tensor]) -> bool:
    return any(name not in params or not torch.equal(params[name], old) for name, old in was.items())


def examine_add_lora(answer):
    made = []
    for *kind, rank, scale in CASES:
        layer = _layer(*kind)
        before, plain = Before(layer), layer(_inputs(layer)).detach()
        was = {name: param.detach().clone() for name, param in layer.named_parameters()}
        handle = answer(layer, rank, scale)
        expect_handle(handle)
        expected = [(rank, layer.in_features), (layer.out_features, rank)]
        params = dict(layer.named_parameters())
        refuse_first(PARAMETERS, layer=layer, before=before, was=was, params=params, expected=expected)
        made.append((layer, before, plain, handle, scale))
    for layer, before, plain, handle, scale in made:
        _examine_layer(layer, plain, scale)
        handle.remove()
        if lost := before.lost_hooks():
            refuse("removed_others", place=lost[0][1])
        if before.new_hooks() or not close(layer(_inputs(layer)), plain):
            refuse("stays_on")


def _examine_layer(layer, plain, scale):
    x = _inputs(layer)
    _fill(layer.lora_B)
    change = (scale * (x @ layer.lora_A.T @ layer.lora_B.T)).detach()
    got = layer(x)
    if not close(got, plain + change):
        refuse_first(OUTPUT, got=got, plain=plain, change=change, scale=scale)
    if not got.requires_grad:
        refuse("no_gradient")
    got.sum().backward()
    if layer.lora_A.grad is None or layer.lora_B.grad is None:
        refuse("no_gradient")
    by_name = []
    if raised(lambda: by_name.append(layer(input=x))) or not close(by_name[0], plain + change):
        refuse("by_name")
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        layer.lora_B.add_(1)
        layer.lora_A.add_(1)
    if not close(twin(x), plain + change):
        refuse("follows_the_original")


ADD_LORA = Exercise("46.A", examine_add_lora, add_lora)

# ---- 46.B: into the weight ----


def merge(layer, handle, scale):
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight += scale * layer.lora_B @ layer.lora_A
    handle.remove()
    del layer.lora_A, layer.lora_B
    return before


WEIGHT = [  # the weight is another than `want`; `change` is scale * B @ A
    ("not_merged", lambda t: torch.equal(t.now, t.was)),
    ("no_scale", lambda t: torch.allclose(t.now, t.was + t.change / t.scale)),
    ("subtracted", lambda t: torch.allclose(t.now, t.was - t.change)),
    ("only_the_change", lambda t: torch.allclose(t.now, t.change)),
    ("wrong_weight", lambda t: True),
]

RETURNED = [  # `got` has the shape and the dtype of the weight
    ("same_memory", lambda t: t.got.untyped_storage().data_ptr() == t.weight.untyped_storage().data_ptr()),
    ("returned_new", lambda t: torch.allclose(t.got, t.weight)),
    ("not_exact", lambda t: torch.allclose(t.got, t.was, atol=1e-4)),
    ("other_weight", lambda t: True),
]


def examine_merge(answer):
    for *kind, rank, scale in CASES:
        layer = _layer(*kind)
        tied = nn.Linear(layer.in_features, layer.out_features)
        tied.weight, weight = layer.weight, layer.weight
        before, was, trained = Before(layer), weight.detach().clone(), weight.requires_grad
        handle = add_lora(layer, rank, scale)
        _fill(layer.lora_B)
        change = (scale * layer.lora_B @ layer.lora_A).detach()
        got = answer(layer, handle, scale)
        refuse_first(LEFT, before=before, layer=layer, tied=tied, trained=trained)
        now = weight.detach()
        if not torch.allclose(now, was + change, atol=1e-5):
            refuse_first(WEIGHT, now=now, was=was, change=change, scale=scale)
        if layer.bias is not None and "bias" in before.changed_state():
            refuse("bias_changed")
        if got is None:
            refuse("returned_nothing")
        if not isinstance(got, Tensor) or got.shape != was.shape or got.dtype != was.dtype:
            expect_like(got, was)
        if not torch.equal(got, was) or got.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
            refuse_first(RETURNED, got=got.detach(), was=was, weight=now)


LEFT = [
    ("hook_left", lambda t: t.before.new_hooks()),
    ("removed_others", lambda t: t.before.lost_hooks()),
    ("parameters_left", lambda t: hasattr(t.layer, "lora_A") or hasattr(t.layer, "lora_B")),
    ("other_object", lambda t: t.layer.weight is not t.tied.weight),
    ("other_flag", lambda t: t.layer.weight.requires_grad != t.trained or not t.layer.weight.is_leaf),
]

MERGE = Exercise("46.B", examine_merge, merge)

EXERCISES = [ADD_LORA, MERGE]
