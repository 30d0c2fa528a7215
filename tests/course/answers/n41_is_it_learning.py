"""Answers to the exercises of notebook 41: wrong ones by the name of their refusal, and right ones."""

import torch
from torch import nn

from hooklab import layer_statistics, updates
from hooklab.course.checks.n41_is_it_learning import dead_units, log_ratios

# ---- 41.A: how many units are dead? ----


def _outputs(model, batches, leave=False):
    """What each ReLU returns, batch by batch."""
    outputs, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):

            def hook(module, args, output, name=name):
                outputs.setdefault(name, []).append(output.clone())

            handles.append(module.register_forward_hook(hook))
    try:
        with torch.no_grad():
            for batch in batches:
                model(batch)
    finally:
        for handle in handles if not leave else []:
            handle.remove()
    return outputs


def _counted(count):
    """An answer that counts by what a ReLU has returned, batch by batch."""
    return lambda model, batches: {name: count(outputs) for name, outputs in _outputs(model, batches).items()}


def _dead(output):
    return (output == 0).transpose(0, 1).flatten(1).all(1)


def _at_each_place(outputs):
    return int((torch.cat(outputs) == 0).all(0).sum())


def _dead_at_some_place(outputs):
    return int((torch.cat(outputs) == 0).all(0).flatten(1).any(1).sum()) if outputs[0].dim() > 2 else _whole(outputs)


def _whole(outputs):
    return int(_dead(torch.cat(outputs)).sum())


def _alive(outputs):
    return int((~_dead(torch.cat(outputs))).sum())


def _share(outputs):
    return (torch.cat(outputs) == 0).double().mean().item()


def _mostly(outputs):
    every = torch.cat(outputs).transpose(0, 1).flatten(1)
    return int(((every == 0).double().mean(1) > 0.9).sum())


def _any_sample(outputs):
    return int((torch.cat(outputs) == 0).transpose(0, 1).flatten(1).any(1).sum())


def replaces_the_output(model, batches):
    alive = {}

    def register(name, module):
        return module.register_forward_hook(
            lambda module, args, output: alive.setdefault(name, torch.zeros(output.shape[1])).add_(
                output.transpose(0, 1).flatten(1).sum(1)
            )
        )

    handles = [register(name, m) for name, m in model.named_modules() if isinstance(m, nn.ReLU)]
    try:
        for batch in batches:
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: int((sums == 0).sum()) for name, sums in alive.items()}


def in_one_batch(model, batches):
    return dead_units(model, [torch.cat(batches)])


def one_run_too_many(model, batches):
    return dead_units(model, [*batches, batches[0]])


def of_the_model_too(model, batches):
    return {next(name for name, _ in model.named_children() if name != "first"): 0} | dead_units(model, batches)


def own_children_only(model, batches):
    inside = [name for name, module in model.named_children() if isinstance(module, nn.ReLU)]
    return {name: dead for name, dead in dead_units(model, batches).items() if name in inside}


def by_default(model, batches, found={}):  # noqa: B006
    found.update(dead_units(model, batches))
    return found


def leaves_hooks(model, batches):
    return {name: _whole(outputs) for name, outputs in _outputs(model, batches, leave=True).items()}


def leaves_hooks_after_an_error(model, batches):
    handles = [m.register_forward_hook(lambda module, args, output: None) for m in model.modules()]
    found = dead_units(model, batches)
    for handle in handles:
        handle.remove()
    return found


def clears_the_tables(model, batches):
    found = dead_units(model, batches)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    return found


def swallows(model, batches):
    try:
        return dead_units(model, batches)
    except RuntimeError:
        return {}


def lists_them(model, batches):
    with torch.no_grad(), layer_statistics(model, nn.ReLU, units=1) as stats:
        for batch in batches:
            model(batch)
    return dict(stats.dead)


def without_the_places(model, batches):
    """Ready for (batch, units) only."""
    return {
        name: [int(one.sum()) for one in (torch.cat(o) == 0).all(0)] for name, o in _outputs(model, batches).items()
    }


# ---- 41.B: how far does each step move a weight? ----


def _matrices(model):
    return {name: param for name, param in model.named_parameters() if param.ndim >= 2}


def _logged(ratio, keep=lambda param: param.detach().clone(), params=_matrices):
    """An answer that logs `ratio(param, before, optimizer)` after each step."""

    def answer(model, optimizer):
        named = params(model)
        log, before = {name: [] for name in named}, {}

        def pre(optimizer, args, kwargs):
            before.update({name: keep(param) for name, param in named.items()})

        def post(optimizer, args, kwargs):
            for name, param in named.items():
                log[name].append(ratio(param, before[name], optimizer))

        return log, [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]

    return answer


def _true(param, before, optimizer):
    return ((param.detach() - before).norm() / before.norm()).item()


def _by_gradient(param, before, optimizer):
    return 0.0 if param.grad is None else (param.grad.norm() / before.norm()).item()


def _by_lr(param, before, optimizer):
    return optimizer.param_groups[0]["lr"] * _by_gradient(param, before, optimizer)


def since_the_start(model, optimizer):
    params = _matrices(model)
    log, before = {name: [] for name in params}, {name: p.detach().clone() for name, p in params.items()}

    def post(optimizer, args, kwargs):
        for name, param in params.items():
            log[name].append(_true(param, before[name], optimizer))

    return log, [optimizer.register_step_post_hook(post)]


def between_post_hooks(model, optimizer):
    """Compares with the value after the step before: nothing is known of the first one."""
    params, before = _matrices(model), {}
    log = {name: [] for name in params}

    def post(optimizer, args, kwargs):
        for name, param in params.items():
            if name in before:
                log[name].append(_true(param, before[name], optimizer))
            before[name] = param.detach().clone()

    return log, [optimizer.register_step_post_hook(post)]


def trained_only(model, optimizer):
    named = {name: param for name, param in _matrices(model).items() if param.requires_grad}
    return _logged(_true, params=lambda model: named)(model, optimizer)


def decays(param, before, optimizer):
    ratio = _true(param, before, optimizer)
    with torch.no_grad():
        param.mul_(0.99)
    return ratio


def clears_the_optimizer(model, optimizer):
    log, _ = log_ratios(model, optimizer)

    class Handle:
        def remove(self):
            optimizer._optimizer_step_pre_hooks.clear()
            optimizer._optimizer_step_post_hooks.clear()

    return log, [Handle()]


WRONG = {
    "41.A": {
        "no_dict": lambda model, batches: list(dead_units(model, batches).values()),
        "changed_output": replaces_the_output,
        "not_run": in_one_batch,
        "other_layers": of_the_model_too,
        "missing_layer": own_children_only,
        "not_a_number": _counted(_share),
        "one_batch": _counted(lambda outputs: int(_dead(outputs[-1]).sum())),
        "added": _counted(lambda outputs: sum(int(_dead(output).sum()) for output in outputs)),
        "alive_ones": _counted(_alive),
        "places": _counted(_at_each_place),
        "any_zero": _counted(_any_sample),
        "mostly_zero": _counted(_mostly),
        "wrong_count": _counted(lambda outputs: _whole(outputs) + 1),
        "from_before": by_default,
        "hooks_left": leaves_hooks,
        "hooks_left_after_error": leaves_hooks_after_an_error,
        "removed_others": clears_the_tables,
        "swallowed": swallows,
    },
    "41.B": {
        "no_pair": lambda model, optimizer: log_ratios(model, optimizer)[0],
        "other_items": lambda model, optimizer: (log_ratios(model, optimizer)[0], [None]),
        "too_many_dims": _logged(_true, params=lambda model: dict(model.named_parameters())),
        "wrong_names": lambda model, optimizer: ({}, log_ratios(model, optimizer)[1]),
        "not_numbers": _logged(lambda param, before, optimizer: param.detach() - before),
        "other_steps": between_post_hooks,
        "frozen": trained_only,
        "no_clone": _logged(_true, keep=lambda param: param.detach()),
        "gradient_ratio": _logged(_by_gradient),
        "lr_times_grad": _logged(_by_lr),
        "over_new": _logged(lambda param, before, optimizer: _true(before, param.detach(), optimizer)),
        "norms_only": _logged(lambda p, before, optimizer: (p.detach().norm() / before.norm() - 1).abs().item()),
        "since_start": since_the_start,
        "wrong_ratio": _logged(
            lambda p, before, optimizer: ((p.detach() - before).abs().mean() / before.abs().mean()).item()
        ),
        "moved_weights": _logged(decays),
        "not_removed": lambda model, optimizer: (log_ratios(model, optimizer)[0], []),
        "removed_others": clears_the_optimizer,
    },
}


def by_the_tool(model, batches):
    return {name: len(units) for name, units in lists_them(model, batches).items()}


def by_sums(model, batches):
    """What ReLU returns is never below 0, so a sum of 0 is all zeros."""
    outputs = _outputs(model, batches)
    return {
        name: int((sum(o.transpose(0, 1).flatten(1).sum(1) for o in all_) == 0).sum()) for name, all_ in outputs.items()
    }


def by_updates(model, optimizer):
    """A new measurement for each step: `updates` returns means."""
    log, running = {name: [] for name in _matrices(model)}, []

    def pre(optimizer, args, kwargs):
        running[:] = [{name: param.detach().clone() for name, param in _matrices(model).items()}]

    def post(optimizer, args, kwargs):
        for name, param in _matrices(model).items():
            difference = torch.linalg.vector_norm(param.detach() - running[0][name])
            log[name] += [difference / torch.linalg.vector_norm(running[0][name])]

    return log, (optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post))


ALSO_WRONG = [
    ("41.A", "not_run", one_run_too_many),
    ("41.A", "not_a_number", lists_them),
    ("41.A", "not_a_number", without_the_places),
    ("41.A", "places", _counted(_dead_at_some_place)),
    ("41.A", "one_batch", _counted(lambda outputs: int(_dead(outputs[0]).sum()))),
    ("41.B", "no_pair", lambda model, optimizer: updates(model, optimizer)),
]

RIGHT = [
    ("41.A", by_the_tool),
    ("41.A", by_sums),
    ("41.A", _counted(_whole)),
    ("41.B", by_updates),
    ("41.B", lambda model, optimizer: [*log_ratios(model, optimizer)]),
]
