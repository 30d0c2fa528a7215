"""Answers to the exercises of notebook 47: wrong ones by the name of their refusal, and right ones."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from answers.around import clearing, modes_of, swallowing
from hooklab.course.checks.n47_each_sample import suspects, weight_grads

# ---- 47.A: the weight gradients of each sample ----


def _linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _pairs(product="n...o,n...i->noi", factor=len, clean=True, first_only=False):
    """An answer that adds up the products of gradient and input of each call, right but for what is given."""

    def answer(model, loss_fn, x, y):
        sums, handles = {}, []
        for name, module in _linears(model).items():

            def add_up(module, args, output, name=name):
                a = args[0].detach()

                def arrive(g):
                    if not (first_only and name in sums):
                        each = torch.einsum(product, g, a) if isinstance(product, str) else product(g, a)
                        sums[name] = sums.get(name, 0) + factor(x) * each

                output.register_hook(arrive)

            handles.append(module.register_forward_hook(add_up))
        try:
            loss_fn(model(x), y).backward()
        finally:
            for handle in handles if clean else ():
                handle.remove()
        return sums

    return answer


def one_place_each(model, loss_fn, x, y):
    """A dict by name: the input of the last call, and the gradient that arrives last."""
    inputs, grads, handles = {}, {}, []
    for name, module in _linears(model).items():

        def keep(module, args, output, name=name):
            inputs[name] = args[0].detach()
            output.register_hook(lambda g: grads.update({name: g}))

        handles.append(module.register_forward_hook(keep))
    loss_fn(model(x), y).backward()
    for handle in handles:
        handle.remove()
    return {name: len(x) * torch.einsum("n...o,n...i->noi", grads[name], inputs[name]) for name in inputs}


def _positions_apart(g, a):
    """Adds the positions up before the product."""
    g, a = (one.flatten(1, -2).sum(1) if one.dim() > 2 else one for one in (g, a))
    return torch.einsum("no,ni->noi", g, a)


_SUMS = {}


def in_one_dict(model, loss_fn, x, y):
    """Keeps the results of all calls in one dict."""
    if "start" in _linears(model):
        _SUMS.clear()
    _SUMS.update(weight_grads(model, loss_fn, x, y))
    return dict(_SUMS)


def leaves_hooks_after_an_error(model, loss_fn, x, y):
    handles = [module.register_forward_hook(lambda *args: None) for module in _linears(model).values()]
    grads = weight_grads(model, loss_fn, x, y)
    for handle in handles:
        handle.remove()
    return grads


def one_at_a_time(model, loss_fn, x, y):
    layers = {name: module.weight for name, module in _linears(model).items()}
    rows = [
        torch.autograd.grad(loss_fn(model(x[i : i + 1]), y[i : i + 1]), list(layers.values())) for i in range(len(x))
    ]
    return {name: torch.stack(column) for name, column in zip(layers, zip(*rows, strict=True), strict=True)}


def in_eval_mode(model, loss_fn, x, y):
    return weight_grads(model.eval(), loss_fn, x, y)


def weights_by_parameter_name(model, loss_fn, x, y):
    return {f"{name}.weight": one for name, one in weight_grads(model, loss_fn, x, y).items()}


# ---- 47.B: the samples with the largest gradients ----


def _each(model, x, y, randomness="error"):
    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    params = {name: p.detach() for name, p in model.named_parameters()}
    return vmap(grad(loss), in_dims=(None, 0, 0), randomness=randomness)(params, x, y)


def _ranked(score, restore=True, order=lambda found: found.indices):
    """An answer that ranks by `score(model, x, y)` in eval mode."""

    def answer(model, x, y, count):
        put_back = modes_of(model)
        model.eval()
        found = score(model, x, y).topk(count)
        if restore:
            put_back(model)
        return order(found)

    return answer


def _squares(model, x, y, wanted=lambda name, model: True):
    grads = _each(model, x, y)
    return sum(g.flatten(1).square().sum(1) for name, g in grads.items() if wanted(name, model))


def _in_linear(name, model):
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)


def _of_layer(number):
    return lambda model, x, y: _squares(
        model, x, y, lambda name, model: name == f"{list(model._modules)[number]}.weight"
    )


def _norms(model, x, y):
    return sum(g.flatten(1).norm(dim=1) for g in _each(model, x, y).values())


def _losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def in_train_mode(model, x, y, count):
    losses = F.cross_entropy(model(x), y, reduction="none")
    params = list(model.parameters())
    rows = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    return torch.stack([sum(g.square().sum() for g in row) for row in rows]).topk(count).indices


def back_to_train(model, x, y, count):
    found = suspects(model, x, y, count)
    model.train()
    return found


def with_backward(model, x, y, count):
    put_back = modes_of(model)
    model.eval()
    scores = []
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        scores.append(sum(p.grad.square().sum() for p in model.parameters()))
    put_back(model)
    return torch.stack(scores).topk(count).indices


def leaves_hooks(model, x, y, count):
    model.register_forward_hook(lambda module, args, output: None)
    return suspects(model, x, y, count)


def only_in_double(model, x, y, count):
    found = suspects(model, x, y, count)
    return found if x.dtype == torch.float64 else found.flip(0)


def _scattered(model, x, y):
    return _squares(model, x.flip(0), y.flip(0))


WRONG = {
    "47.A": {
        "no_dict": lambda *given: list(weight_grads(*given).values()),
        "other_names": weights_by_parameter_name,
        "from_before": in_one_dict,
        "summed": _pairs("n...o,n...i->oi"),
        "transposed": _pairs("n...o,n...i->nio"),
        "other_shape": lambda *given: {name: one.flatten(1) for name, one in weight_grads(*given).items()},
        "mean": _pairs(factor=lambda x: 1),
        "twice_the_size": _pairs(factor=lambda x: len(x) ** 2),
        "last_call": one_place_each,
        "positions": _pairs(_positions_apart),
        "wrong_grads": lambda *given: {name: one.flip(0) for name, one in weight_grads(*given).items()},
        "other_runs": one_at_a_time,
        "mode_changed": in_eval_mode,
        "hooks_left": _pairs(clean=False),
        "hooks_left_after_error": leaves_hooks_after_an_error,
        "removed_others": clearing(weight_grads),
        "swallowed": swallowing(weight_grads, {}),
    },
    "47.B": {
        "no_tensor": lambda *given: suspects(*given).tolist(),
        "other_count": lambda model, x, y, count: suspects(model, x, y, len(x)),
        "scores": _ranked(_squares, order=lambda found: found.values),
        "train_mode": in_train_mode,
        "mode_changed": back_to_train,
        "grad_touched": with_backward,
        "smallest": _ranked(lambda *given: -_squares(*given)),
        "unordered": _ranked(_squares, order=lambda found: found.indices.flip(0)),
        "by_loss": _ranked(_losses),
        "by_confidence": _ranked(lambda model, x, y: -model(x).softmax(1).amax(1)),
        "norms_added": _ranked(_norms),
        "weights_only": _ranked(lambda *given: _squares(*given, lambda name, model: name.endswith("weight"))),
        "linear_only": _ranked(lambda *given: _squares(*given, _in_linear)),
        "last_layer": _ranked(_of_layer(-1)),
        "first_layer": _ranked(_of_layer(0)),
        "wrong_order": _ranked(_scattered),
        "other_model": only_in_double,
        "hooks_left": leaves_hooks,
        "removed_others": clearing(suspects),
    },
}

ALSO_WRONG = [
    ("47.A", "last_call", _pairs(first_only=True)),
    ("47.B", "mode_changed", _ranked(_squares, restore=False)),
]


def by_func(model, loss_fn, x, y):
    """No hook at all."""

    def loss(params, x, y):
        return loss_fn(functional_call(model, params, (x[None],)), y[None])

    params = {name: p.detach() for name, p in model.named_parameters()}
    grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    return {name: grads[f"{name}.weight"] for name in _linears(model)}


def with_a_stack(model, loss_fn, x, y):
    """Inputs on a stack, popped by a full backward hook."""
    stacks = {name: [] for name in _linears(model)}
    sums, handles = {}, []
    for name, module in _linears(model).items():

        def back(module, grad_input, grad_output, name=name):
            each = torch.einsum("n...o,n...i->noi", grad_output[0], stacks[name].pop())
            sums[name] = sums.get(name, 0) + each * len(x)

        handles.append(module.register_forward_hook(lambda m, a, o, name=name: stacks[name].append(a[0].detach())))
        handles.append(module.register_full_backward_hook(back))
    try:
        loss_fn(model(x), y).backward()
    finally:
        for handle in handles:
            handle.remove()
    return sums


def one_sample_at_a_time(model, x, y, count):
    put_back = modes_of(model)
    model.eval()
    scores = []
    for one, label in zip(x, y, strict=True):
        loss = F.cross_entropy(model(one[None]), label[None])
        scores.append(sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()))))
    put_back(model)
    return torch.stack(scores).argsort(descending=True)[:count]


RIGHT = [
    ("47.A", by_func),
    ("47.A", with_a_stack),
    ("47.A", _pairs()),
    ("47.B", one_sample_at_a_time),
    ("47.B", _ranked(_squares)),
    ("47.B", _ranked(lambda *given: _squares(*given).sqrt())),
]
