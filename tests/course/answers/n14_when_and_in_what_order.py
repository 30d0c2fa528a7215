"""Answers to the exercises of notebook 14: wrong ones by the name of their refusal, and right ones."""

import copy
from collections import Counter

import torch
from torch.autograd.graph import get_gradient_edge

from hooklab.census import hooks_on
from hooklab.course.checks.n14_when_and_in_what_order import final_gradient, left_by, look, on_first_gradient

# ---- 14.A: a hook that fires once and takes itself off ----


def zero_for_none(tensor, function):
    def hook(grad):
        if grad is not None and grad.any():
            handle.remove()
            function(grad)

    handle = tensor.register_hook(hook)


def counts_none(tensor, function):
    def hook(grad):
        handle.remove()
        function(grad)

    handle = tensor.register_hook(hook)


_DONE: set[int] = set()


def once_per_id(tensor, function):
    _DONE.discard(id(tensor))  # of an earlier tensor at this address

    def once(grad):
        if grad is None:
            return
        handle.remove()
        if id(tensor) not in _DONE:
            _DONE.add(id(tensor))
            function(grad)

    handle = tensor.register_hook(once)


def stays(tensor, function):
    calls = []

    def hook(grad):
        if not calls:
            calls.append(1)
            function(grad)

    tensor.register_hook(hook)


def one_handle_for_all(tensor, function):
    def hook(grad):
        one_handle_for_all.handle.remove()
        function(grad)

    one_handle_for_all.handle = tensor.register_hook(hook)


def changed(tensor, function):
    def hook(grad):
        handle.remove()
        return function(grad)

    handle = tensor.register_hook(hook)


def removed_others(tensor, function):
    def hook(grad):
        function(grad)
        tensor._backward_hooks.clear()

    tensor.register_hook(hook)


def changed_otherwise(tensor, function):
    def hook(grad):
        handle.remove()
        function(grad)
        return grad * 0

    handle = tensor.register_hook(hook)


def misses_grad(tensor, function):
    def hook(grads):
        handle.remove()
        function(grads[0])

    handle = tensor.grad_fn.register_prehook(hook)


def misses_grad_on_leaf(tensor, function):
    if not tensor.is_leaf:
        return on_first_gradient(tensor, function)

    def hook(leaf):
        handle.remove()
        function(leaf.grad)

    handle = tensor.register_post_accumulate_grad_hook(hook)


def reads_grad(tensor, function):
    def hook(grad):
        handle.remove()
        function(tensor.grad)

    handle = tensor.register_hook(hook)


def asks_for_grad(tensor, function):
    def hook(grad):
        if grad is not None and (not tensor.is_leaf or tensor.grad is None):
            function(grad)
            handle.remove()

    handle = tensor.register_hook(hook)


# ---- 14.B: the places where a function has left hooks ----


def by_function(function, model):
    before = {(hook.place, hook.function) for hook in hooks_on(model)}
    function(model)
    return [hook.place for hook in hooks_on(model) if (hook.place, hook.function) not in before]


def modules_only(function, model):
    counts = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    function(model)
    return [name for name, module in model.named_modules() if len(module._forward_hooks) > counts[name]]


def everything(function, model):
    function(model)
    return [hook.place for hook in hooks_on(model)]


def tail(function, model):
    before = len(hooks_on(model))
    function(model)
    return [hook.place for hook in hooks_on(model)[before:]]


def and_clears(function, model):
    places = left_by(function, model)
    for module in model.modules():
        module._forward_hooks.clear()
    return places


def and_hangs(function, model):
    places = left_by(function, model)
    model[0].register_forward_hook(look)
    return places


def counts_places(function, model):
    before = Counter(hook.place for hook in hooks_on(model))
    function(model)
    return list((Counter(hook.place for hook in hooks_on(model)) - before).elements())


def records(function, model):
    before = hooks_on(model)
    function(model)
    return [hook for hook in hooks_on(model) if hook not in before]


def looked_too_late(function, model):
    function(model)
    before = hooks_on(model)
    return [hook.place for hook in hooks_on(model) if hook not in before]


def two_kinds(function, model):
    """Looks at forward hooks and at tensor hooks of parameters alone."""

    def there():
        found = [(name, key) for name, module in model.named_modules() for key in module._forward_hooks]
        return found + [(name, key) for name, param in model.named_parameters() for key in param._backward_hooks or ()]

    before = there()
    function(model)
    return [name for name, key in there() if (name, key) not in before]


# ---- 14.C: the gradient that is passed on in the end ----


def on_node(register):
    """An answer that hangs its hook by `register(node, tensor, seen)`."""

    def answer(tensor):
        seen = []
        register(get_gradient_edge(tensor).node, tensor, seen)
        return seen

    return answer


def noting(note):
    """A right answer but for `note(grad, seen)`."""

    def answer(tensor):
        seen, edge = [], get_gradient_edge(tensor)
        number = edge.output_nr
        edge.node.register_prehook(lambda grads: note(grads[number], seen) if grads[number] is not None else None)
        return seen

    return answer


def keeps_the_edge(tensor):
    seen, edge = [], get_gradient_edge(tensor)

    def note(grads):
        if grads[edge.output_nr] is not None:
            seen.append(grads[edge.output_nr].clone())

    edge.node.register_prehook(note)
    return seen


def too_early(tensor):
    seen = []
    tensor.register_hook(seen.append)
    return seen


def accumulated(tensor):
    seen = []
    if not tensor.is_leaf:
        tensor.retain_grad()
    get_gradient_edge(tensor).node.register_hook(lambda *grads: seen.append(tensor.grad.clone()))
    return seen


def by_grad_fn(tensor):
    seen = []
    tensor.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    return seen


def returns_twice(node, tensor, seen):
    def hook(grads):
        seen.append(grads[0].clone())
        return (grads[0] * 2,)

    node.register_prehook(hook)


def after_the_node(node, tensor, seen):
    node.register_hook(lambda got, given: seen.append(given[0].clone()))


def on_a_leaf(register):
    """A right answer for an intermediate tensor."""
    return lambda tensor: (on_node(register) if tensor.is_leaf else final_gradient)(tensor)


def copies_none(node, tensor, seen):
    number = tensor.output_nr
    node.register_prehook(lambda grads: seen.append(grads[number].clone()))


def never_freed(tensor):
    return noting(lambda grad, seen: seen.append(grad.clone().view_as(tensor)))(tensor)


_LATEST = {}


def final_in_the_latest(tensor):
    _LATEST["seen"] = []
    noting(lambda grad, seen: _LATEST["seen"].append(grad.clone()))(tensor)
    return _LATEST["seen"]


def final_in_one_list(tensor, seen=[]):  # noqa: B006
    seen.clear()
    noting(lambda grad, own: seen.append(grad.clone()))(tensor)
    return seen


WRONG = {
    "14.A": {
        "stays": stays,
        "changed": changed,
        "changed_otherwise": changed_otherwise,
        "misses_grad": misses_grad,
        "misses_grad_on_leaf": misses_grad_on_leaf,
        "wrong_gradient": reads_grad,
        "removed_others": removed_others,
        "called_again": lambda tensor, function: tensor.register_hook(lambda grad: (function(grad), None)[1]),
        "called_at_once": lambda tensor, function: tensor.register_hook(function(torch.zeros(2))),
        "never_called": lambda tensor, function: tensor.register_hook(lambda grad: None),
        "not_hung": lambda tensor, function: tensor.register_hook(function).remove(),
        "shared": one_handle_for_all,
        "one_per_tensor": once_per_id,
        "counted_none": counts_none,
        "zero_for_none": zero_for_none,
        "asks_for_grad": asks_for_grad,
    },
    "14.B": {
        "kinds_missed": two_kinds,
        "counted_old": everything,
        "missed_twin": by_function,
        "found_none": looked_too_late,
        "missed_parameter": modules_only,
        "too_many": tail,
        "wrong_count": lambda function, model: sorted(set(left_by(function, model))),
        "removed": and_clears,
        "added": and_hangs,
        "by_number": counts_places,
        "not_places": records,
        "not_a_list": lambda function, model: set(left_by(function, model)),
        "other_model": lambda function, model: left_by(function, copy.deepcopy(model)),
        "call_count": lambda function, model: [],
    },
    "14.C": {
        "after_storing": on_a_leaf(after_the_node),
        "changed_leaf": on_a_leaf(returns_twice),
        "too_early": too_early,
        "too_late": on_node(lambda node, tensor, seen: node.register_hook(lambda got, given: seen.append(got[0]))),
        "accumulated": accumulated,
        "leaf_has_no_grad_fn": by_grad_fn,
        "wrong_output": on_node(lambda node, tensor, seen: node.register_prehook(lambda grads: seen.append(grads[0]))),
        "whole_tuple": on_node(lambda node, tensor, seen: node.register_prehook(seen.append)),
        "no_copy": on_node(lambda node, tensor, seen: node.register_hook(lambda got, given: seen.append(given[0]))),
        "wrong_values": noting(lambda grad, seen: seen.append(grad.sum())),
        "nothing": lambda tensor: [],
        "changed": on_node(returns_twice),
        "not_a_list": lambda tensor: tensor.register_hook(print),
        "not_tensors": noting(lambda grad, seen: seen.append(grad.tolist())),
        "none_is_no_gradient": on_node(copies_none),
        "shares_memory": noting(lambda grad, seen: seen.append(grad)),
        "wrong_dtype": noting(lambda grad, seen: seen.append(grad.clone().float())),
        "zero_for_none": noting(lambda grad, seen: seen.append(grad.clone()) if grad.any() else None),
        "never_freed": never_freed,
        "shared": final_in_the_latest,
        "same_object": final_in_one_list,
    },
}

ALSO_WRONG = []

RIGHT = [
    ("14.B", lambda function, model: tuple(left_by(function, model))),
    ("14.C", keeps_the_edge),
]
