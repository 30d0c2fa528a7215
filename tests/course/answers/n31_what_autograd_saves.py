"""Answers to the exercises of notebook 31: wrong ones by the name of their refusal, and right ones."""

from collections import Counter

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hooklab import saved_tensors
from hooklab.course.checks.n31_what_autograd_saves import (
    NAMES,
    heaviest,
    held_bytes,
    lean,
    measures,
    needed,
    wasteful,
)

# ---- 31.A: count the bytes by hand ----


def _collecting(measure):
    """A wrong answer: `measure(saved tensors, x)` after an otherwise right run."""

    def answer(function, x):
        tensors = []

        def pack(tensor):
            tensors.append(tensor)
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda packed: packed):
            function(x)
        return measure(tensors, x)

    return answer


def _memories(tensors):
    """The bytes of each storage behind them, by its address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _others(tensors, x):
    """One tensor for each storage that is not at the address of `x`."""
    tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return [tensor for place, tensor in tensors.items() if place != x.data_ptr()]


def _without(sizes, address):
    return sum(size for place, size in sizes.items() if place != address)


def _addresses_only(function, x):
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()

    with saved_tensors_hooks(pack, lambda packed: packed):
        function(x)
    sizes.pop(x.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _along_the_graph(function, x):
    todo, seen, storages = [function(x).grad_fn], set(), {}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(tensor := getattr(node, name), Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        todo += [after for after, _ in node.next_functions]
    storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def _left_open(function, x):
    count = held_bytes(function, x)
    saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
    return count


_KEPT: list[Tensor] = []


def _in_a_global(tensors, x):
    _KEPT.extend(tensor.detach() for tensor in tensors)
    return _without(_memories(_KEPT), x.data_ptr())


# ---- 31.B: which tensors does it save? ----


def _names(*more, without=""):
    return lambda: (needed() | set(more)) - {without}


# ---- 31.C: the layer that holds most ----


def _summing(
    by=lambda record: (record.module,),
    size=lambda record: record.storage_bytes,
    counts=lambda record, model: not record.owner,
):
    """A wrong answer: the right one, but for what is given here."""

    def answer(model, x):
        new, seen = Counter(), set()
        with saved_tensors(model) as saved:
            model(x)
        for record in saved:
            if record.storage not in seen and counts(record, model):
                new[by(record)] += size(record)
            seen.add(record.storage)
        return max(new, key=new.get)[0]

    return answer


def _measured(reason):
    return lambda model, x: measures(model, x)[reason]


def heaviest_left_behind(model, x):
    model.register_forward_hook(lambda module, args, output: None)
    return heaviest(model, x)


def heaviest_and_clear(model, x):
    name = heaviest(model, x)
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return name


def heaviest_ran_twice(model, x):
    model(x)
    return heaviest(model, x)


def heaviest_by_default(model, x, new=Counter()):  # noqa: B006
    with saved_tensors(model) as saved:
        model(x)
    for record in {record.storage: record for record in reversed(list(saved)) if not record.owner}.values():
        new[record.module] += record.storage_bytes
    return max(new, key=new.get)


def heaviest_grad_left_off(model, x):
    name = heaviest(model, x)
    torch.set_grad_enabled(False)
    return name


# ---- 31.D: the same gradient, half the bytes ----


def _half_precision(x, gain, scale):
    return lean(x.float(), gain.float(), scale.float()).double()


class _OnCtx(torch.autograd.Function):
    """Four memories of the size of `x`, as attributes of `ctx`."""

    @staticmethod
    def forward(ctx, x, gain, scale):
        ctx.given, ctx.power = (x, gain, scale), torch.exp(gain * x * scale)
        ctx.inside = 1 + ctx.power
        return torch.log(ctx.inside)

    @staticmethod
    def backward(ctx, grad):
        x, gain, scale = ctx.given
        grad = grad * ctx.power / ctx.inside
        return grad * gain * scale, (grad * x * scale).sum(), (grad * x * gain).sum()


def _product_kept(x, gain, scale):
    """Two memories of the size of `x` from forward, and two more in backward."""
    inside = gain * scale * x
    return checkpoint(lambda inside: torch.log(1 + torch.exp(inside)), inside, use_reentrant=False)


class _FormulaWithGraph(torch.autograd.Function):
    """Backward runs no forward again; its own formula makes a graph."""

    @staticmethod
    def forward(ctx, x, gain, scale):
        ctx.save_for_backward(x, gain, scale)
        return lean(x, gain, scale)

    @staticmethod
    def backward(ctx, grad):
        x, gain, scale = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            power = torch.exp(-gain * x * scale)
            grad = grad / (1 + power)
        return grad * gain * scale, (grad * x * scale).sum(), (grad * x * gain).sum()


# ---- all answers ----

WRONG = {
    "31.A": {
        "counted_twice": _collecting(lambda tensors, x: sum(tensor.nbytes for tensor in tensors)),
        "counted_x": _collecting(lambda tensors, x: sum(_memories(tensors).values())),
        "subtracted_x": _collecting(lambda tensors, x: sum(_memories(tensors).values()) - x.nbytes),
        "left_out": _collecting(
            lambda tensors, x: sum(t.untyped_storage().nbytes() for t in _others(tensors, x) if t.is_floating_point())
        ),
        "entries": _collecting(lambda tensors, x: sum(t.numel() for t in _others(tensors, x))),
        "only_the_slice": _collecting(lambda tensors, x: sum(t.nbytes for t in _others(tensors, x))),
        "memory_twice": _collecting(
            lambda tensors, x: _without({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}, x.data_ptr())
        ),
        "nothing_counted": lambda function, x: held_bytes(lambda x: function(x.detach()), x),
        "address_reused": _addresses_only,
        "address_of_x": _collecting(lambda tensors, x: _without(_memories(tensors), x.data_ptr())),
        "own_operation": _along_the_graph,
        "float32_only": _collecting(
            lambda tensors, x: sum(4 * len(t.untyped_storage()) // t.itemsize for t in _others(tensors, x))
        ),
        "by_dtype_of_x": _collecting(
            lambda tensors, x: sum(len(t.untyped_storage()) // t.itemsize * x.itemsize for t in _others(tensors, x))
        ),
        "wrong_count": lambda function, x: held_bytes(function, x) // 1024,
        "kept_between_calls": _collecting(_in_a_global),
        "counted_view_of_x": _collecting(
            lambda tensors, x: sum(_memories(tensor for tensor in tensors if tensor is not x).values())
        ),
        "left_open": _left_open,
        "filled_grad": lambda function, x: held_bytes(lambda x: function(x).sum().backward(), x),
        "not_once": lambda function, x: function(x) is None or held_bytes(function, x),
        "not_a_number": lambda function, x: f"{held_bytes(function, x)} bytes",
        "returned_nothing": lambda function, x: print(end=str(held_bytes(function, x))[:0]),
    },
    "31.B": {f"with_{name}": _names(name) for name in NAMES if name not in needed()}
    | {f"without_{name}": _names(without=name) for name in sorted(needed())}
    | {
        "everything": lambda: set(NAMES),
        "unknown_names": _names("relu"),
        "not_names": lambda: "x, r, mask",
        "returned_nothing": lambda: print(end=""),
    },
    "31.C": {
        **{
            reason: _measured(reason)
            for reason in ("with_parameters", "every_save", "one_record", "last_saver", "output")
        },
        "other_module": lambda model, x: list(dict(model.named_modules()))[2],
        "unknown_name": lambda model, x: "layer9",
        "no_name": lambda model, x: "",
        "mode_changed": lambda model, x: heaviest(model.eval(), x),
        "left_behind": heaviest_left_behind,
        "removed_others": heaviest_and_clear,
        "only_the_slice": _summing(size=lambda record: record.bytes),
        "with_buffers": _summing(counts=lambda record, model: record.owner not in dict(model.named_parameters())),
        "one_operation": _summing(by=lambda record: (record.module, record.operation)),
        "ran_twice": heaviest_ran_twice,
        "from_before": heaviest_by_default,
        "grad_left_off": heaviest_grad_left_off,
        "not_a_name": lambda model, x: model.get_submodule(heaviest(model, x)),
        "returned_nothing": lambda model, x: print(end=heaviest(model, x)[:0]),
    },
    "31.D": {
        "still_4": wasteful,
        "rounded": _half_precision,
        "still_3": lambda x, gain, scale: F.softplus(gain * x * scale),
        "saved_again": lambda *given: checkpoint(wasteful, *given, use_reentrant=False),
        "out_of_sight": _OnCtx.apply,
        "no_graph": lambda x, gain, scale: torch.no_grad()(lean)(x, gain, scale),
        "no_gradient_x": lambda x, gain, scale: lean(x.detach(), gain, scale),
        "no_gradient_gain": lambda x, gain, scale: lean(x, gain.item(), scale),
        "no_gradient_scale": lambda x, gain, scale: lean(x, gain, scale.detach()),
        "wrong_values": lambda x, gain, scale: F.softplus(gain * x) * scale,
        "wrong_shape": lambda x, gain, scale: lean(x, gain, scale).sum(),
        "wrong_dtype": lambda x, gain, scale: lean(x.float(), gain, scale),
        "wrong_gradient": lambda x, gain, scale: (
            lean(x.detach(), gain, scale) + 0 * x + (x - x.detach()) * gain.detach()
        ),
        "returned_nothing": lambda x, gain, scale: print(end=str(lean(x, gain, scale))[:0]),
    },
}

ALSO_WRONG = [
    ("31.A", "not_a_number", lambda function, x: torch.tensor(float(held_bytes(function, x)))),
    ("31.A", "not_a_number", lambda function, x: held_bytes(function, x) > 0),
    ("31.D", "saved_again", _product_kept),
    ("31.D", "saved_again", _FormulaWithGraph.apply),
]

RIGHT = [
    ("31.A", lambda function, x: torch.tensor(held_bytes(function, x))),
    (
        "31.D",
        lambda x, *given: torch.cat(
            [checkpoint(wasteful, part, *given, use_reentrant=False) for part in x.split(1000)]
        ),
    ),
    ("31.D", lambda *given: checkpoint(lean, *given, use_reentrant=False)),
]
