"""Answers to the exercises of notebook 42: wrong ones by the name of their refusal, and right ones."""

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hooklab.course.checks.n42_where_the_nan_began import first_bad, poisoned, safe_norm

# ---- 42.A: the first bad layer ----


def _is_bad(tensor):
    return not tensor.isfinite().all()


def _noting(model, batch, judge=_is_bad, layers=None):
    """(name, was the input bad, is the output bad) of each call, in the order in which layers finish."""
    calls, given = [], {}
    names = {module: name for name, module in (layers or model.named_modules())}
    handles = []
    for module in names:

        def begin(module, args):
            given[module] = judge(args[0])

        def end(module, args, output):
            calls.append((names[module], given[module], judge(output)))

        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _first(calls):
    return next((f"before {name}" if given else name for name, given, bad in calls if bad), None)


def only_nan(model, batch):
    return _first(_noting(model, batch, judge=lambda tensor: tensor.isnan().any()))


def in_order_of_definition(model, batch):
    calls = {name: (name, given, bad) for name, given, bad in _noting(model, batch)}
    return _first([calls[name] for name, _ in model.named_modules() if name and name in calls])


def never_before(model, batch):
    return next((name for name, _, bad in _noting(model, batch) if bad), None)


def the_last_good(model, batch):
    """Names the layer after which it went wrong."""
    calls = _noting(model, batch)
    bad = next((i for i, call in enumerate(calls) if call[2]), None)
    return None if bad is None else calls[max(bad - 1, 0)][0] if calls[bad][1] else calls[bad][0]


def only_children(model, batch):
    return _first(_noting(model, batch, layers=list(model.named_children())))


def children_and_model(model, batch):
    return _first(_noting(model, batch, layers=[("", model), *model.named_children()]))


def by_forward_hook_alone(model, batch):
    found, handles = [], []
    for name, module in model.named_modules():

        def after(module, args, output, name=name):
            if _is_bad(output):
                found.append(f"before {name}" if _is_bad(args[0]) else name)

        handles.append(module.register_forward_hook(after))
    try:
        model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def by_input_too(model, batch):
    calls = _noting(model, batch)
    return next((f"before {name}" if given else name for name, given, bad in calls if given or bad), None)


def leaves_hooks(model, batch):
    found = []
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, args, output, name=name: found.append(name) if _is_bad(output) else None
        )
    model(batch)
    return found[0] if found else None


def leaves_hooks_after_an_error(model, batch):
    found, given, handles = [], {}, []
    for name, module in model.named_modules():

        def begin(module, args):
            given[module] = _is_bad(args[0])

        def end(module, args, output, name=name):
            if _is_bad(output):
                found.append(f"before {name}" if given[module] else name)

        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    model(batch)
    for handle in handles:
        handle.remove()
    return found[0] if found else None


def clears_the_tables(model, batch):
    found = first_bad(model, batch)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    return found


def swallows(model, batch):
    try:
        return first_bad(model, batch)
    except RuntimeError:
        return None


def runs_twice(model, batch):
    model(batch.clone())
    return first_bad(model, batch)


def without_running(model, batch):
    return next((name for name, param in model.named_parameters() if _is_bad(param)), None)


def by_default(model, batch, found=[]):  # noqa: B006
    found += filter(None.__ne__, [first_bad(model, batch)])
    return found[0] if found else None


def with_the_class(model, batch):
    name = first_bad(model, batch)
    return name and f"layer {name}"


# ---- 42.B: what is still bad? ----


def _bad_names(tensors):
    return {name for name, tensor in tensors.items() if _is_bad(tensor)}


def _state(model, optimizer, keys=None):
    names = {param: name for name, param in model.named_parameters()}
    return {
        f"{names[param]}/{key}": value
        for param, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and (keys is None or key in keys)
    }


def _all(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def with_gradients(model, optimizer):
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return poisoned(model, optimizer) | _bad_names(grads)


def only_nan_in_weights(model, optimizer):
    names = {name for name, param in model.named_parameters() if param.isnan().any()}
    return names | _bad_names(dict(model.named_buffers()) | _state(model, optimizer))


def parameters_and_state(model, optimizer):
    return _bad_names(dict(model.named_parameters()) | _state(model, optimizer))


def state_dict_and_state(model, optimizer):
    return _bad_names(model.state_dict() | _state(model, optimizer))


def adam_alone(model, optimizer):
    return _bad_names(_all(model) | _state(model, optimizer, keys=("exp_avg", "exp_avg_sq")))


def by_position(model, optimizer):
    names = [name for name, _ in model.named_parameters()]
    states = optimizer.state_dict()["state"]
    tensors = {f"{names[i]}/{key}": value for i, state in states.items() for key, value in state.items()}
    return _bad_names(_all(model) | {key: value for key, value in tensors.items() if isinstance(value, torch.Tensor)})


def repairing(model, optimizer):
    names = poisoned(model, optimizer)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.nan_to_num_()
    return names


def every_name(model, optimizer):
    return set(_all(model) | _state(model, optimizer))


def with_dots(model, optimizer):
    return {name.replace("/", ".") for name in poisoned(model, optimizer)}


def without_asking_for_tensors(model, optimizer):
    names = {param: name for name, param in model.named_parameters()}
    states = {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}
    return _bad_names(_all(model) | states)


# ---- 42.C: a length with a gradient at zero ----


def _root(x):
    return (x * x).sum(-1).sqrt()


def where_outside(x):
    length = _root(x)
    return torch.where(length > 0, length, 0.0)


def hook_on_x(x):
    x.register_hook(lambda grad: grad.nan_to_num(0.0))
    return _root(x)


def with_a_slope(x):
    return safe_norm(x) + torch.where((x == 0).all(-1), x.sum(-1), 0.0)


def one_row_constant(x):
    return torch.where((x * x).sum(-1) == 25, 5.0, safe_norm(x))


WRONG = {
    "42.A": {
        "no_name": lambda model, batch: [first_bad(model, batch)],
        "ran_twice": runs_twice,
        "not_run": without_running,
        "nan_only": only_nan,
        "by_definition": in_order_of_definition,
        "blamed_the_next": never_before,
        "blamed_the_one_before": the_last_good,
        "forgot_the_model": only_children,
        "outermost": children_and_model,
        "looked_too_late": by_forward_hook_alone,
        "judged_the_input": by_input_too,
        "wrong_layer": with_the_class,
        "hooks_left": leaves_hooks,
        "hooks_left_after_error": leaves_hooks_after_an_error,
        "removed_others": clears_the_tables,
        "swallowed": swallows,
    },
    "42.B": {
        "no_set": lambda model, optimizer: sorted(poisoned(model, optimizer)),
        "repaired": repairing,
        "clean": every_name,
        "gradients": with_gradients,
        "no_weights": only_nan_in_weights,
        "no_buffers": parameters_and_state,
        "saved_only": state_dict_and_state,
        "no_state": lambda model, optimizer: _bad_names(_all(model)),
        "adam_only": adam_alone,
        "wrong_owner": by_position,
        "wrong_names": with_dots,
        "raised": without_asking_for_tensors,
    },
    "42.C": {
        "no_graph": lambda x: safe_norm(x).detach(),
        "used_norm": lambda x: x.norm(dim=-1),
        "left_hook": hook_on_x,
        "clamped": lambda x: _root(x).clamp(min=1e-6),
        "eps_outside": lambda x: _root(x) + 1e-6,
        "eps_inside": lambda x: ((x * x).sum(-1) + 1e-12).sqrt(),
        "wrong_lengths": lambda x: safe_norm(x) ** 2,
        "nan_gradient": where_outside,
        "gradient_at_zero": with_a_slope,
        "wrong_gradient": one_row_constant,
        "wrong_shape": lambda x: safe_norm(x)[..., None],
        "wrong_type": lambda x: safe_norm(x).tolist(),
        "wrong_dtype": lambda x: safe_norm(x.float()),
    },
}


def by_global_hooks(model, batch):
    """Watches every module, with two global hooks."""
    names = {module: name for name, module in model.named_modules()}
    given, found = {}, []

    def begin(module, args):
        given[module] = _is_bad(args[0])

    def end(module, args, output):
        if module in names and _is_bad(output):
            found.append(f"before {names[module]}" if given[module] else names[module])

    with register_module_forward_pre_hook(begin), register_module_forward_hook(end), torch.no_grad():
        model(batch)
    return found[0] if found else None


def by_masking(x):
    """Adds 1 to the squares of a row of zeros, and takes its root away."""
    zero = (x == 0).all(-1)
    return ((x * x).sum(-1) + zero).sqrt() - zero.to(x.dtype)


ALSO_WRONG = [
    ("42.A", "from_before", by_default),
    ("42.A", "blamed_the_next", lambda model, batch: (first_bad(model, batch) or "").removeprefix("before ") or None),
    ("42.C", "nan_gradient", lambda x: _root(x).nan_to_num(0.0)),
    ("42.C", "eps_inside", lambda x: (x * x).sum(-1).clamp(min=1e-12).sqrt()),
]

RIGHT = [
    ("42.A", lambda model, batch: _first(_noting(model, batch))),
    ("42.A", by_global_hooks),
    ("42.B", lambda model, optimizer: _bad_names(_all(model) | _state(model, optimizer))),
    ("42.B", lambda model, optimizer: frozenset(poisoned(model, optimizer))),
    ("42.C", by_masking),
    (
        "42.C",
        lambda x: torch.where(
            (x == 0).all(-1), 0.0, torch.where(x.any(-1, keepdim=True), x, 1).square().sum(-1).sqrt()
        ),
    ),
]
