"""Answers to the exercises of notebook 15: wrong ones by the name of their refusal, and right ones."""

import math
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hooklab.course.check import (
    Exercise,
    find,
)
from hooklab.course.checks.n15_many_tensors_at_once import record_norms, step_every, step_in_backward, trained

_LATEST = {}  # where some keep what each call should keep for itself

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


def from_dot_grad(grads, tensors):
    return nn.utils.get_total_norm(there(tensor.grad for tensor in tensors)).item()


def in_place(grads, tensors):
    return math.sqrt(sum(grad.pow_(2).sum().item() for grad in there(grads)))


class _AsOne:
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
            norms.append(nn.utils.get_total_norm(arrived).item())
            arrived.clear()

    return norms, _AsOne([tensor.register_hook(collect) for tensor in tensors])


def each_alone(tensors):
    norms = []
    handles = [tensor.register_hook(lambda grad: norms.append(grad.norm().item())) for tensor in tensors]
    return norms, _AsOne(handles)


def never_cleared(tensors):
    norms, arrived = [], []

    def measure(grads):
        arrived.extend(there(grads))
        norms.append(nn.utils.get_total_norm(arrived).item())

    return norms, register_multi_grad_hook(tensors, measure)


def two_hooks_one_handle(tensors):
    norms, _ = record_norms(tensors)
    return norms, tensors[0].register_hook(lambda grad: None)


def one_list_for_all(tensors, norms=[]):  # noqa: B006
    def measure(grads):
        norms.append(nn.utils.get_total_norm(there(grads)).item())

    return norms, register_multi_grad_hook(tensors, measure)


def recorded_once(tensors):
    norms = []

    def measure(grads):
        handle.remove()
        norms.append(nn.utils.get_total_norm(there(grads)).item())

    handle = register_multi_grad_hook(tensors, measure)
    return norms, handle


def of_matrices(grads, tensors):
    return torch.stack([torch.linalg.norm(grad, 2) for grad in there(grads)]).norm().item()


def clears_grad(tensors):
    norms = []

    def measure(grads):
        norms.append(nn.utils.get_total_norm(there(grads)).item())
        for tensor in tensors:
            tensor.grad = None

    return norms, register_multi_grad_hook(tensors, measure)


def when_the_first_comes(tensors):
    norms, arrived = [], []

    def collect(grad, last):
        arrived.append(grad.norm())
        if last:
            norms.append(torch.stack(arrived).norm().item())
            arrived.clear()

    hooks = [partial(collect, last=number == 0) for number in range(len(tensors))]
    return norms, _AsOne([tensor.register_hook(hook) for tensor, hook in zip(tensors, hooks, strict=True)])


def but_zero(tensors):
    norms = []

    def measure(grads):
        if norm := nn.utils.get_total_norm(there(grads)).item():
            norms.append(norm)

    return norms, register_multi_grad_hook(tensors, measure)


def zeroing_where_one_is_missing(grads, tensors):
    norm = nn.utils.get_total_norm(there(grads)).item()
    for grad in there(grads) if None in grads else ():
        grad.zero_()
    return norm


# ---- 15.B: the optimizer inside backward ----


_HANDLES = []  # of an answer that returns it from every call


def into_one_list(handles):
    _HANDLES[:] = handles
    return _HANDLES


_OPTIMIZERS = {}  # where some keep what they should not share


def on_each(model, make_hook, register="register_post_accumulate_grad_hook"):
    return [getattr(param, register)(make_hook(param)) for param in trained(model)]


def late_binding(model, make_optimizer, count=1):
    handles, calls = [], dict.fromkeys(trained(model), 0)
    for param in trained(model):
        optimizer = make_optimizer([param])

        def step(param):
            calls[param] += 1
            if calls[param] % count == 0:
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023

        handles.append(param.register_post_accumulate_grad_hook(step))
    return handles


def when_all_arrived(model, make_optimizer):
    optimizer = make_optimizer(trained(model))

    def step(grads):
        optimizer.step()
        optimizer.zero_grad()

    return [register_multi_grad_hook(trained(model), step)]


def thawing(model, make_optimizer):
    model.requires_grad_(True)
    return step_in_backward(model, make_optimizer)


def with_frozen(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in model.parameters()}
    return [param.register_post_accumulate_grad_hook(lambda param: small[param].step()) for param in small]


def with_tensor_hooks(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in trained(model)}
    return on_each(model, lambda param: lambda grad: small[param].step(), register="register_hook")


def without_freeing(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in trained(model)}
    return on_each(model, lambda param: lambda param: small[param].step())


def filling_zeros(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in trained(model)}

    def step(param):
        small[param].step()
        small[param].zero_grad(set_to_none=False)

    return on_each(model, lambda param: step)


def made_anew(model, make_optimizer):
    def step(param):
        optimizer = make_optimizer([param])
        optimizer.step()
        optimizer.zero_grad()

    return on_each(model, lambda param: step)


def at_the_last(model, make_optimizer):
    optimizer = make_optimizer(trained(model))
    arrived = []

    def step(param):
        arrived.append(param)
        if len(arrived) == len(trained(model)):
            optimizer.step()
            optimizer.zero_grad()
            arrived.clear()

    return on_each(model, lambda param: step)


def step_of_the_latest(model, make_optimizer):
    _OPTIMIZERS.clear()
    _OPTIMIZERS.update({param: make_optimizer([param]) for param in trained(model)})

    def step(param):
        _OPTIMIZERS[param].step()
        _OPTIMIZERS[param].zero_grad()

    return on_each(model, lambda param: step)


def one_optimizer(model, make_optimizer):
    optimizer = make_optimizer(trained(model))

    def step(param):
        optimizer.step()
        optimizer.zero_grad()

    return on_each(model, lambda param: step)


def hoarding(model, make_optimizer):
    small, kept = {param: make_optimizer([param]) for param in trained(model)}, {}

    def keep(param):
        kept[param], param.grad = param.grad, None
        if len(kept) == len(small):
            for one, grad in kept.items():
                one.grad = grad
                small[one].step()
                small[one].zero_grad()
            kept.clear()

    return on_each(model, lambda param: keep)


# ---- 15.C: the same with gradient accumulation ----


def stepping(decide, *, free_always=False, divide=False, free=True):
    """An answer with one small optimizer per parameter that steps where `decide(calls, count)`."""

    def answer(model, make_optimizer, count):
        small = {param: make_optimizer([param]) for param in trained(model)}
        calls = dict.fromkeys(small, 0)

        def step(param):
            calls[param] += 1
            due = decide(calls, param, count)
            if due:
                if divide:
                    param.grad /= count
                small[param].step()
            if free and (due or free_always):
                small[param].zero_grad()

        return on_each(model, lambda param: step)

    return answer


def one_for_all(model, make_optimizer, count):
    optimizer, calls = make_optimizer(trained(model)), dict.fromkeys(trained(model), 0)

    def step(param):
        calls[param] += 1
        if calls[param] % count == 0:
            optimizer.step()
            optimizer.zero_grad()

    return on_each(model, lambda param: step)


def own_turn(calls, param, count):
    return calls[param] % count == 0


def weights_only(model, make_optimizer, count):
    handles = step_every(model, make_optimizer, count)
    for param, handle in zip(trained(model), handles, strict=True):
        if param.dim() < 2:
            handle.remove()
    return handles


def every_by_the_latest(model, make_optimizer, count):
    calls = dict.fromkeys(trained(model), 0)
    _OPTIMIZERS.clear()
    _OPTIMIZERS.update({param: make_optimizer([param]) for param in calls})

    def step(param):
        calls[param] += 1
        if calls[param] % count == 0:
            _OPTIMIZERS[param].step()
            _OPTIMIZERS[param].zero_grad()

    return on_each(model, lambda param: step)


def every_twice(model, make_optimizer, count):
    step_every(model, make_optimizer, count)
    return step_every(model, make_optimizer, count)


def one_count_of_backwards(model, make_optimizer, count):
    small, calls = {param: make_optimizer([param]) for param in trained(model)}, []

    def step(param):
        if len(calls) % count == 0:
            small[param].step()
            small[param].zero_grad()

    counting = register_multi_grad_hook(list(small), calls.append, mode="any")
    return [counting, *on_each(model, lambda param: step)]


def a_hook_on_the_first(model, make_optimizer, count):
    optimizer, calls = make_optimizer(trained(model)), []

    def step(param):
        calls.append(param)
        if len(calls) % count == 0:
            optimizer.step()
            optimizer.zero_grad()

    return [trained(model)[0].register_post_accumulate_grad_hook(step)]


WRONG = {
    "15.A": {
        "raised": of_group(lambda grads, _: math.sqrt(sum(grad.square().sum().item() for grad in grads))),
        "nothing_recorded": lambda tensors: ([], register_multi_grad_hook(tensors, lambda grads: None)),
        "missed_step": counted,
        "last_missing": of_group(from_dot_grad),
        "one_missing": of_group(lambda grads, _: nn.utils.get_total_norm(there(grads[:-1])).item()),
        "one_only": of_group(lambda grad, _: grad.norm().item(), mode="any"),
        "one_per_tensor": each_alone,
        "sum_of_norms": of_group(lambda grads, _: sum(grad.norm().item() for grad in there(grads))),
        "no_root": of_group(lambda grads, _: sum(grad.square().sum().item() for grad in there(grads))),
        "wrong_norm": of_group(lambda grads, _: sum(grad.sum().item() for grad in there(grads))),
        "not_a_number": of_group(lambda grads, _: [grad.norm().item() for grad in there(grads)]),
        "changed": of_group(in_place),
        "cleared": clears_grad,
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
        "unfrozen": thawing,
        "not_freed": without_freeing,
        "zeros_kept": filling_zeros,
        "later_steps": made_anew,
        "freed_late": at_the_last,
        "no_handles": lambda model, make_optimizer: print(len(step_in_backward(model, make_optimizer))),
        "other_items": lambda model, make_optimizer: list(enumerate(step_in_backward(model, make_optimizer))),
        "same_object": lambda model, make_optimizer: into_one_list(step_in_backward(model, make_optimizer)),
        "shared_optimizer": one_optimizer,
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
        "one_moved": lambda model, make_optimizer, count: late_binding(model, make_optimizer, count),
        "unfrozen": lambda model, make_optimizer, count: step_every(model.requires_grad_(True), make_optimizer, count),
        "one_count": one_count_of_backwards,
        "shared_optimizer": a_hook_on_the_first,
        "other_items": lambda model, make_optimizer, count: list(enumerate(step_every(model, make_optimizer, count))),
        "same_object": lambda model, make_optimizer, count: into_one_list(step_every(model, make_optimizer, count)),
        "not_removed": every_twice,
        "latest_call": every_by_the_latest,
    },
}


def by_layers(step_in_backward):
    """Has no eyes for parameters of the model itself."""
    return lambda model, make: [hook for layer in model.children() for hook in step_in_backward(layer, make)]


def row_norms(tensors):
    norms = []

    def measure(grads):
        each = [grad.norm(dim=-1).sum() for grad in grads if grad is not None]
        norms.append(torch.stack(each).norm().item())

    return norms, torch.autograd.graph.register_multi_grad_hook(tensors, measure)


def optimizers_by_name(model, make_optimizer, known={}):  # noqa: B006
    handles = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            known.setdefault(name, make_optimizer([param]))

            def step(param, name=name):
                known[name].step()
                known[name].zero_grad()

            handles.append(param.register_post_accumulate_grad_hook(step))
    return handles


def steps_once(model, make_optimizer):
    optimizers, handles = {}, {}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()
        handles[param].remove()

    for param in model.parameters():
        if param.requires_grad:
            optimizers[param] = make_optimizer([param])
            handles[param] = param.register_post_accumulate_grad_hook(step)
    return list(handles.values())


def counts_to_the_latest(model, make_optimizer, count):
    _LATEST["count"] = count
    optimizers = {param: make_optimizer([param]) for param in model.parameters() if param.requires_grad}
    arrived = dict.fromkeys(optimizers, 0)

    def step(param):
        arrived[param] += 1
        if arrived[param] % _LATEST["count"] == 0:
            optimizers[param].step()
            optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in optimizers]


def one_group_after_another(model, make_optimizer):
    first, *others = trained(model)
    optimizer = make_optimizer([first])
    for param in others:
        optimizer.add_param_group({"params": [param]})

    def step(param):
        optimizer.step()
        optimizer.zero_grad()

    return on_each(model, lambda param: step)


def unless_zero(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in trained(model)}

    def step(param):
        if param.grad.any():
            small[param].step()
        small[param].zero_grad()

    return on_each(model, lambda param: step)


def counting_all(model, make_optimizer, count):
    small, calls = {param: make_optimizer([param]) for param in trained(model)}, []

    def step(param):
        calls.append(param)
        if len(calls) % (count * len(small)) == 0:
            for optimizer in small.values():
                optimizer.step()
                optimizer.zero_grad()

    return on_each(model, lambda param: step)


ALSO_WRONG = [
    ("15.A", "of_matrices", row_norms),
    ("15.B", "nothing_moved", optimizers_by_name),
    ("15.B", "later_steps", steps_once),
    ("15.C", "latest_call", counts_to_the_latest),
    ("15.B", "some_moved", by_layers(find("15.B", Exercise).solution)),
    ("15.B", "shared_optimizer", one_group_after_another),
    ("15.B", "later_steps", unless_zero),
    ("15.C", "one_count", counting_all),
]

RIGHT = [
    ("15.B", lambda model, make: dict(enumerate(find("15.B", Exercise).solution(model, make)))),
]
