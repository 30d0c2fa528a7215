"""Answers to the exercises of notebook 15: wrong ones by the name of their refusal, and right ones."""

import math
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hooklab.course.checks.n15_many_tensors_at_once import record_norms, step_every, step_in_backward, trained

# ---- 15.A: the global norm of a group, once per backward ----


def of_group(measure, **options):
    """An answer that hangs a multi-grad hook with `measure(grads, tensors)`."""

    def answer(tensors):
        norms = []
        handle = register_multi_grad_hook(tensors, lambda grads: norms.append(measure(grads, tensors)), **options)
        return norms, handle

    return answer


def there(grads):
    return [grad for grad in grads if grad is not None]


def total(grads):
    return nn.utils.get_total_norm(there(grads)).item()


def from_dot_grad(grads, tensors):
    return total(tensor.grad for tensor in tensors)


def in_place(grads, tensors):
    return math.sqrt(sum(grad.pow_(2).sum().item() for grad in there(grads)))


def of_matrices(grads, tensors):
    return torch.stack([torch.linalg.norm(grad, 2) for grad in there(grads)]).norm().item()


def of_rows(grads, tensors):
    return torch.stack([grad.norm(dim=-1).sum() for grad in there(grads)]).norm().item()


def clearing(grads, tensors):
    for tensor in tensors:
        tensor.grad = None
    return total(grads)


def zeroing_where_one_is_missing(grads, tensors):
    norm = total(grads)
    for grad in there(grads) if None in grads else ():
        grad.zero_()
    return norm


class AsOne:
    """Several handles as one."""

    def __init__(self, handles):
        self.handles = handles

    def remove(self):
        for handle in self.handles:
            handle.remove()


def counted(tensors):
    norms, arrived = [], []

    def collect(grad):
        arrived.append(grad)
        if len(arrived) == len(tensors):
            norms.append(total(arrived))
            arrived.clear()

    return norms, AsOne([tensor.register_hook(collect) for tensor in tensors])


def when_the_first_comes(tensors):
    norms, arrived = [], []

    def collect(grad, last):
        arrived.append(grad)
        if last:
            norms.append(total(arrived))
            arrived.clear()

    hooks = [partial(collect, last=number == 0) for number in range(len(tensors))]
    return norms, AsOne([tensor.register_hook(hook) for tensor, hook in zip(tensors, hooks, strict=True)])


def each_alone(tensors):
    norms = []
    return norms, AsOne([tensor.register_hook(lambda grad: norms.append(grad.norm().item())) for tensor in tensors])


def never_cleared(tensors):
    norms, arrived = [], []

    def measure(grads):
        arrived.extend(grads)
        norms.append(total(arrived))

    return norms, register_multi_grad_hook(tensors, measure)


def two_hooks_one_handle(tensors):
    norms, _ = record_norms(tensors)
    return norms, tensors[0].register_hook(lambda grad: None)


def one_list_for_all(tensors, norms=[]):  # noqa: B006
    return norms, register_multi_grad_hook(tensors, lambda grads: norms.append(total(grads)))


def recorded_once(tensors):
    norms = []

    def measure(grads):
        handle.remove()
        norms.append(total(grads))

    handle = register_multi_grad_hook(tensors, measure)
    return norms, handle


def but_zero(tensors):
    norms = []
    return norms, register_multi_grad_hook(tensors, lambda grads: norms.append(total(grads)) if total(grads) else None)


# ---- 15.B: the optimizer inside backward ----


def on_each(model, hook):
    return [param.register_post_accumulate_grad_hook(hook) for param in trained(model)]


def one_for_each(model, make_optimizer):
    return {param: make_optimizer([param]) for param in trained(model)}


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def with_own(use):
    """An answer whose hook is `use(param, optimizer)`, with an optimizer of its own for each parameter."""

    def answer(model, make_optimizer):
        small = one_for_each(model, make_optimizer)
        return on_each(model, lambda param: use(param, small[param]))

    return answer


def with_one(model, make_optimizer):
    optimizer = make_optimizer(trained(model))
    return on_each(model, lambda param: update(optimizer))


def filling_zeros(param, optimizer):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def unless_zero(param, optimizer):
    if param.grad.any():
        optimizer.step()
    optimizer.zero_grad()


def late_binding(model, make_optimizer, count=1):
    handles, calls = [], dict.fromkeys(trained(model), 0)
    for param in trained(model):
        optimizer = make_optimizer([param])

        def step(param):
            calls[param] += 1
            if calls[param] % count == 0:
                update(optimizer)  # noqa: B023

        handles.append(param.register_post_accumulate_grad_hook(step))
    return handles


def when_all_arrived(model, make_optimizer):
    optimizer = make_optimizer(trained(model))
    return [register_multi_grad_hook(trained(model), lambda grads: update(optimizer))]


def with_frozen(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in model.parameters()}
    return [param.register_post_accumulate_grad_hook(lambda param: small[param].step()) for param in small]


def with_tensor_hooks(model, make_optimizer):
    small = one_for_each(model, make_optimizer)
    return [param.register_hook(lambda grad, param=param: small[param].step()) for param in small]


def made_anew(model, make_optimizer):
    return on_each(model, lambda param: update(make_optimizer([param])))


def at_the_last(model, make_optimizer):
    optimizer, arrived = make_optimizer(trained(model)), []

    def step(param):
        arrived.append(param)
        if len(arrived) == len(trained(model)):
            update(optimizer)
            arrived.clear()

    return on_each(model, step)


def hoarding(model, make_optimizer):
    small, kept = one_for_each(model, make_optimizer), {}

    def keep(param):
        kept[param], param.grad = param.grad, None
        if len(kept) == len(small):
            for one, grad in kept.items():
                one.grad = grad
                update(small[one])
            kept.clear()

    return on_each(model, keep)


def one_group_after_another(model, make_optimizer):
    first, *others = trained(model)
    optimizer = make_optimizer([first])
    for param in others:
        optimizer.add_param_group({"params": [param]})
    return on_each(model, lambda param: update(optimizer))


def steps_once(model, make_optimizer):
    small, handles = one_for_each(model, make_optimizer), {}

    def step(param):
        update(small[param])
        handles[param].remove()

    handles.update(zip(small, on_each(model, step), strict=True))
    return list(handles.values())


def optimizers_by_name(model, make_optimizer, known={}):  # noqa: B006
    handles = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            known.setdefault(name, make_optimizer([param]))
            handles.append(param.register_post_accumulate_grad_hook(lambda param, name=name: update(known[name])))
    return handles


def of_layers_alone(model, make_optimizer):
    """Has no eyes for parameters of the model itself."""
    return [hook for layer in model.children() for hook in step_in_backward(layer, make_optimizer)]


# What each call should keep for itself: the optimizers, the count and the handles.
_OPTIMIZERS = {}
_COUNT = [1]
_HANDLES = []


def step_of_the_latest(model, make_optimizer):
    _OPTIMIZERS.clear()
    _OPTIMIZERS.update(one_for_each(model, make_optimizer))
    return on_each(model, lambda param: update(_OPTIMIZERS[param]))


def into_one_list(handles):
    _HANDLES[:] = handles
    return _HANDLES


# ---- 15.C: the same with gradient accumulation ----


def stepping(decide, *, free_always=False, free=True):
    """An answer with an optimizer for each parameter that steps where `decide(calls, param, count)`."""

    def answer(model, make_optimizer, count):
        small = one_for_each(model, make_optimizer)
        calls = dict.fromkeys(small, 0)

        def step(param):
            calls[param] += 1
            due = decide(calls, param, count)
            if due:
                small[param].step()
            if free and (due or free_always):
                small[param].zero_grad()

        return on_each(model, step)

    return answer


def own_turn(calls, param, count):
    return calls[param] % count == 0


def one_for_all(model, make_optimizer, count):
    optimizer, calls = make_optimizer(trained(model)), dict.fromkeys(trained(model), 0)

    def step(param):
        calls[param] += 1
        if calls[param] % count == 0:
            update(optimizer)

    return on_each(model, step)


def weights_only(model, make_optimizer, count):
    handles = step_every(model, make_optimizer, count)
    for param, handle in zip(trained(model), handles, strict=True):
        if param.dim() < 2:
            handle.remove()
    return handles


def every_by_the_latest(model, make_optimizer, count):
    calls = dict.fromkeys(trained(model), 0)
    _OPTIMIZERS.clear()
    _OPTIMIZERS.update(one_for_each(model, make_optimizer))

    def step(param):
        calls[param] += 1
        if calls[param] % count == 0:
            update(_OPTIMIZERS[param])

    return on_each(model, step)


def counts_to_the_latest(model, make_optimizer, count):
    _COUNT[:] = [count]
    return stepping(lambda calls, param, count: calls[param] % _COUNT[0] == 0)(model, make_optimizer, count)


def every_twice(model, make_optimizer, count):
    step_every(model, make_optimizer, count)
    return step_every(model, make_optimizer, count)


def one_count_of_backwards(model, make_optimizer, count):
    small, calls = one_for_each(model, make_optimizer), []
    counting = register_multi_grad_hook(list(small), calls.append, mode="any")
    return [counting, *on_each(model, lambda param: update(small[param]) if len(calls) % count == 0 else None)]


def counting_all(model, make_optimizer, count):
    small, calls = one_for_each(model, make_optimizer), []

    def step(param):
        calls.append(param)
        if len(calls) % (count * len(small)) == 0:
            for optimizer in small.values():
                update(optimizer)

    return on_each(model, step)


def a_hook_on_the_first(model, make_optimizer, count):
    optimizer, calls = make_optimizer(trained(model)), []

    def step(param):
        calls.append(param)
        if len(calls) % count == 0:
            update(optimizer)

    return [trained(model)[0].register_post_accumulate_grad_hook(step)]


WRONG = {
    "15.A": {
        "raised": of_group(lambda grads, _: math.sqrt(sum(grad.square().sum().item() for grad in grads))),
        "nothing_recorded": lambda tensors: ([], register_multi_grad_hook(tensors, lambda grads: None)),
        "missed_step": counted,
        "last_missing": of_group(from_dot_grad),
        "one_missing": of_group(lambda grads, _: total(grads[:-1])),
        "one_only": of_group(lambda grad, _: grad.norm().item(), mode="any"),
        "one_per_tensor": each_alone,
        "sum_of_norms": of_group(lambda grads, _: sum(grad.norm().item() for grad in there(grads))),
        "no_root": of_group(lambda grads, _: sum(grad.square().sum().item() for grad in there(grads))),
        "wrong_norm": of_group(lambda grads, _: sum(grad.sum().item() for grad in there(grads))),
        "not_a_number": of_group(lambda grads, _: [grad.norm().item() for grad in there(grads)]),
        "changed": of_group(in_place),
        "cleared": of_group(clearing),
        "changed_later": of_group(zeroing_where_one_is_missing),
        "one_order_only": when_the_first_comes,
        "zero_left_out": but_zero,
        "first_only": recorded_once,
        "shared_list": one_list_for_all,
        "other_steps": never_cleared,
        "of_matrices": of_group(of_matrices),
        "leaves_only": lambda tensors: record_norms([tensor for tensor in tensors if tensor.is_leaf]),
        "not_a_pair": lambda tensors: record_norms(tensors)[0],
        "no_handle": lambda tensors: (record_norms(tensors)[0], None),
        "not_removed": two_hooks_one_handle,
    },
    "15.B": {
        "raised": with_frozen,
        "nothing_moved": with_tensor_hooks,
        "one_moved": late_binding,
        "some_moved": when_all_arrived,
        "unfrozen": lambda model, make_optimizer: step_in_backward(model.requires_grad_(True), make_optimizer),
        "not_freed": with_own(lambda param, optimizer: optimizer.step()),
        "zeros_kept": with_own(filling_zeros),
        "later_steps": made_anew,
        "freed_late": at_the_last,
        "no_handles": lambda model, make_optimizer: print(len(step_in_backward(model, make_optimizer))),
        "other_items": lambda model, make_optimizer: list(enumerate(step_in_backward(model, make_optimizer))),
        "same_object": lambda model, make_optimizer: into_one_list(step_in_backward(model, make_optimizer)),
        "shared_optimizer": with_one,
        "waited_for_all": hoarding,
        "not_removed": lambda model, make_optimizer: step_in_backward(model, make_optimizer)[:1],
        "first_step": lambda model, make_optimizer: step_in_backward(model, partial(torch.optim.SGD, lr=1.0)),
        "latest_call": step_of_the_latest,
    },
    "15.C": {
        "too_early": stepping(lambda calls, param, count: sum(calls.values()) % count == 0),
        "other_sum": stepping(own_turn, free_always=True),
        "not_freed": stepping(own_turn, free=False),
        "never": stepping(lambda calls, param, count: calls[param] == count),
        "others_updated": one_for_all,
        "some_moved": weights_only,
        "no_handles": lambda model, make_optimizer, count: print(len(step_every(model, make_optimizer, count))),
        "raised": lambda model, make_optimizer, count: with_frozen(model, make_optimizer),
        "one_moved": late_binding,
        "unfrozen": lambda model, make_optimizer, count: step_every(model.requires_grad_(True), make_optimizer, count),
        "one_count": one_count_of_backwards,
        "shared_optimizer": a_hook_on_the_first,
        "other_items": lambda model, make_optimizer, count: list(enumerate(step_every(model, make_optimizer, count))),
        "same_object": lambda model, make_optimizer, count: into_one_list(step_every(model, make_optimizer, count)),
        "not_removed": every_twice,
        "latest_call": every_by_the_latest,
    },
}

ALSO_WRONG = [
    ("15.A", "of_matrices", of_group(of_rows)),
    ("15.B", "nothing_moved", optimizers_by_name),
    ("15.B", "later_steps", steps_once),
    ("15.C", "latest_call", counts_to_the_latest),
    ("15.B", "some_moved", of_layers_alone),
    ("15.B", "shared_optimizer", one_group_after_another),
    ("15.B", "later_steps", with_own(unless_zero)),
    ("15.C", "one_count", counting_all),
]

RIGHT = [
    ("15.B", lambda model, make_optimizer: dict(enumerate(step_in_backward(model, make_optimizer)))),
]
