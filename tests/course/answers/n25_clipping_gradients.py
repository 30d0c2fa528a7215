"""Answers to the exercises of notebook 25: wrong ones by the name of their refusal, and right ones."""

from functools import partial

import torch
from torch import nn

from hooklab import clip, clip_gradients, select
from hooklab.course.checks.n25_clipping_gradients import capped, clip_by_group, clip_per_sample, clipped_share

# ---- 25.A: how much would clipping touch? ----


def _shares(model, beyond):
    return [beyond(param.grad) for param in model.parameters() if param.grad is not None]


def _all_grads(model):
    return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])


def share_by_clipping(model, bound):
    before = _all_grads(model).clone()
    nn.utils.clip_grad_value_(model.parameters(), bound)
    return (before != _all_grads(model)).double().mean()


def share_then_zero_grad(model, bound):
    share = clipped_share(model, bound)
    model.zero_grad()
    return share


def share_filled_none(model, bound):
    share = clipped_share(model, bound)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    return share


def share_of_all(model, bound):
    return (_all_grads(model).abs() > bound).sum() / sum(param.numel() for param in model.parameters())


def share_of_tensors(model, bound):
    touched = _shares(model, lambda grad: bool((grad.abs() > bound).any()))
    return sum(touched) / len(touched)


# ---- 25.B: a bound for each part of a language model ----


def _layers(model, bounds):
    return [(layer, bound) for pattern, bound in bounds.items() for layer in select(model, pattern).values()]


def _trained(model, bounds):
    """The parameters for hooks, each with the bound of its pattern."""
    return [
        (param, bound) for layer, bound in _layers(model, bounds) for param in layer.parameters() if param.requires_grad
    ]


def _hang(model, bounds, hook_for):
    return [param.register_hook(hook_for(bound)) for param, bound in _trained(model, bounds)]


def _pure(bound):
    return lambda grad: grad.clamp(-bound, bound)


def group_last_bound(model, bounds):
    handles = []
    for param, bound in _trained(model, bounds):
        handles.append(param.register_hook(lambda grad: grad.clamp(-bound, bound)))  # noqa: B023
    return handles


def group_by_prefix(model, bounds):
    return [
        param.register_hook(_pure(bound))
        for pattern, bound in bounds.items()
        for name, param in model.named_parameters()
        if name.startswith(pattern.rstrip(".*")) and param.requires_grad
    ]


def group_frozen_too(model, bounds):
    layers = _layers(model, bounds)
    return [param.register_hook(_pure(bound)) for layer, bound in layers for param in layer.parameters()]


def group_thawed(model, bounds):
    for param in model.parameters():
        param.requires_grad_(True)
    return clip_by_group(model, bounds)


def group_own_parameters(model, bounds):
    return [
        param.register_hook(_pure(bound))
        for layer, bound in _layers(model, bounds)
        for param in layer.parameters(recurse=False)
        if param.requires_grad
    ]


def group_within(model, bounds):
    """The hooks are gone at the end of `with`."""
    for layer, bound in _layers(model, bounds):
        with clip_gradients(layer, -bound, bound):
            pass
    return []


def group_by_default(model, bounds, handles=[]):  # noqa: B006
    handles += clip_by_group(model, bounds)
    return handles


def group_once(bound):
    calls = []
    return lambda grad: calls.append(1) or (grad.clamp(-bound, bound) if len(calls) == 1 else grad)


_BOUNDS = {}


def group_in_a_global(model, bounds):
    _BOUNDS.update(bounds)
    patterns = {pattern: pattern for pattern in bounds}
    return _hang(model, patterns, lambda pattern: lambda grad: grad.clamp(-_BOUNDS[pattern], _BOUNDS[pattern]))


def group_norm(bound):
    return lambda grad: grad * (bound / grad.norm()).clamp(max=1)


def group_afterwards(model, bounds):
    def hook_for(bound):
        def hook(param):
            param.grad.clamp_(-bound, bound)

        return hook

    return [param.register_post_accumulate_grad_hook(hook_for(bound)) for param, bound in _trained(model, bounds)]


def group_of_latest(model, bounds):
    latest = dict(_trained(model, bounds))
    return [param.register_hook(clip(-bound, bound)) for param, bound in latest.items()]


# ---- 25.C: clip by sample ----


def _sharing(share, combine=sum):
    """An answer that takes of each sample `share(grads, max_norm)`, and combines these for each parameter."""

    def answer(model, loss_fn, inputs, targets, max_norm):
        params = [param for param in model.parameters() if param.requires_grad]
        pairs = zip(inputs.split(1), targets.split(1), strict=True)
        shares = [share(torch.autograd.grad(loss_fn(model(x), y), params), max_norm) for x, y in pairs]
        for param, *parts in zip(params, *shares, strict=True):
            param.grad = combine(parts)

    return answer


def _each(change):
    return _sharing(lambda grads, max_norm: [change(part, max_norm) for part in grads])


def _scaled(factor, combine=sum):
    """Every gradient of a sample times `factor(norm, max_norm)`."""

    def share(grads, max_norm):
        norm = nn.utils.get_total_norm(grads)
        return [part * factor(norm, max_norm) for part in grads]

    return _sharing(share, combine)


def _cap(norm, max_norm):
    return (max_norm / norm).clamp(max=1)


def sample_with_graph(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    for param in model.parameters():
        if param.requires_grad:
            param.grad = param.grad + 0 * param


def sample_with_leaves(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    for param in model.parameters():
        if param.requires_grad:
            param.grad.requires_grad_()


def sample_cleared(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    model.zero_grad(set_to_none=False)


def sample_grad_left_off(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    torch.set_grad_enabled(False)


def sample_frozen_zeros(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad


def sample_batch(model, loss_fn, inputs, targets, max_norm):
    model.zero_grad()
    loss_fn(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def sample_plain(model, loss_fn, inputs, targets, max_norm):
    model.zero_grad()
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        loss_fn(model(x), y).backward()


def sample_running(model, loss_fn, inputs, targets, max_norm):
    model.zero_grad()
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def sample_on_top(model, loss_fn, inputs, targets, max_norm):
    old = {param: param.grad for param in model.parameters()}
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    for param, grad in old.items():
        if grad is not None:
            param.grad += grad


def sample_hooks(model, loss_fn, inputs, targets, max_norm):
    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(lambda grad: capped(grad, max_norm))
    sample_plain(model, loss_fn, inputs, targets, max_norm)


def sample_step(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def sample_returned(model, loss_fn, inputs, targets, max_norm):
    model.zero_grad()
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.autograd.grad(loss_fn(model(inputs), targets), params)


def sample_frozen(model, loss_fn, inputs, targets, max_norm):
    torch.autograd.grad(loss_fn(model(inputs[:1]), targets[:1]), list(model.parameters()))
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)


WRONG = {
    "25.A": {
        "changed_gradients": share_by_clipping,
        "filled_none": share_filled_none,
        "dropped_gradients": share_then_zero_grad,
        "not_a_share": lambda model, bound: (_all_grads(model).abs() > bound).sum().item(),
        "counts_the_bound": lambda model, bound: (_all_grads(model).abs() >= bound).double().mean(),
        "one_sided": lambda model, bound: (_all_grads(model) > bound).double().mean(),
        "inverted": lambda model, bound: (_all_grads(model).abs() <= bound).double().mean(),
        "counts_missing": share_of_all,
        "mean_of_shares": lambda model, bound: torch.stack(
            _shares(model, lambda grad: (grad.abs() > bound).double().mean())
        ).mean(),
        "weights": lambda model, bound: (
            (torch.cat([param.flatten() for param in model.parameters()]).abs() > bound).double().mean()
        ),
        "wrong_share": share_of_tensors,
        "wrong_type": lambda model, bound: _all_grads(model).abs() > bound,
        "raised": lambda model, bound: torch.cat([param.grad.flatten() for param in model.parameters()]),
    },
    "25.B": {
        "changed_given": lambda model, bounds: model.zero_grad() or clip_by_group(model, bounds),
        "clipped_sum": group_afterwards,
        "last_bound": group_last_bound,
        "edited_in_place": lambda model, bounds: _hang(
            model, bounds, lambda bound: lambda grad: grad.clamp_(-bound, bound)
        ),
        "clipped_others": group_by_prefix,
        "missed": group_own_parameters,
        "not_clipped": group_within,
        "one_sided": lambda model, bounds: _hang(model, bounds, lambda bound: lambda grad: grad.clamp(max=bound)),
        "wrong_values": lambda model, bounds: _hang(model, bounds, group_norm),
        "no_handles": lambda model, bounds: clip_by_group(model, bounds) and None,
        "nested_handles": lambda model, bounds: [clip_by_group(model, {key: bounds[key]}) for key in bounds],
        "same_object": group_by_default,
        "not_removable": lambda model, bounds: clip_by_group(model, bounds)[:1],
        "thawed": group_thawed,
        "first_backward_only": lambda model, bounds: _hang(model, bounds, group_once),
        "other_model": group_in_a_global,
        "raised": group_frozen_too,
        "latest_pattern": group_of_latest,
    },
    "25.C": {
        "running": sample_running,
        "by_parameter": _each(capped),
        "by_entry": _each(lambda part, max_norm: part.clamp(-max_norm, max_norm)),
        "batch": sample_batch,
        "averaged": _scaled(_cap, lambda parts: sum(parts) / len(parts)),
        "last_one": _scaled(_cap, lambda parts: parts[-1]),
        "lengthened": _scaled(lambda norm, max_norm: max_norm / norm.clamp(min=1e-12)),
        "nan_at_zero": _scaled(lambda norm, max_norm: norm.clamp(max=max_norm) / norm),
        "not_clipped": sample_plain,
        "added_to_old": sample_on_top,
        "left_hooks": sample_hooks,
        "mode_changed": lambda model, *given: clip_per_sample(model.eval(), *given),
        "keeps_graph": sample_with_graph,
        "requires_grad": sample_with_leaves,
        "all_zero": sample_cleared,
        "frozen_gradient": sample_frozen_zeros,
        "grad_left_off": sample_grad_left_off,
        "changed_weights": sample_step,
        "no_gradient": sample_returned,
        "wrong_values": _scaled(lambda norm, max_norm: (max_norm / norm.square()).clamp(max=1)),
        "raised": sample_frozen,
    },
}


def without_a_batch(model, loss_fn, inputs, targets, max_norm):
    """Gives the model single samples, without the dimension of the batch."""
    single = lambda output, target: loss_fn(output[0], target[0])  # noqa: E731
    clip_per_sample(model, single, inputs, targets, max_norm)


def another_loss(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, nn.functional.mse_loss, inputs, targets, max_norm)


def share_inside_children(model, bound, recurse=True):
    """Forgets the parameters of the model itself; without `recurse` those of a layer inside another, too."""
    grads = [param.grad for child in model.children() for param in child.parameters(recurse=recurse)]
    return (torch.cat([grad.flatten() for grad in grads if grad is not None]).abs() > bound).double().mean()


def clips_leaf_modules(model, bounds):
    leaves = [(leaf, bound) for layer, bound in _layers(model, bounds) for leaf in _leaves(layer)]
    return [
        param.register_hook(_pure(bound))
        for leaf, bound in leaves
        for param in leaf.parameters()
        if param.requires_grad
    ]


def _leaves(layer):
    return [module for module in layer.modules() if not list(module.children())]


def first_pattern_wins(model, bounds):
    first = dict(reversed(_trained(model, bounds)))
    return [param.register_hook(clip(-bound, bound)) for param, bound in first.items()]


ALSO_WRONG = [
    ("25.A", "wrong_share", share_inside_children),
    ("25.B", "missed", clips_leaf_modules),
    ("25.A", "wrong_share", partial(share_inside_children, recurse=False)),
    ("25.B", "wrong_values", first_pattern_wins),
    ("25.C", "raised", without_a_batch),
    ("25.C", "wrong_values", another_loss),
    # The factor has `max_norm` as its limit, where 1 is meant.
    ("25.C", "wrong_values", _scaled(lambda norm, max_norm: (max_norm / norm).clamp(max=max_norm))),
]

RIGHT = []
