"""Answers to the exercises of notebook 51: wrong ones by the name of their refusal, and right ones."""

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hooklab import hooks_on, trace
from hooklab.course.checks.n51_it_never_fires import leaves_of, never_called

# ---- 51.A: hooks of modules that nobody calls ----


def _hooked(model, kinds=("forward hook",)):
    return {hook.place for hook in hooks_on(model) if hook.kind in kinds}


def _noting(model, run, register="register_forward_pre_hook"):
    """The names of the modules that are called in a run."""
    called = set()
    handles = [
        getattr(module, register)(lambda module, *args, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return called


def _own(model, names):
    return {name for name in names if name in dict(model.named_modules()) and name}


def uncalled_modules(model, run):
    return {name for name, _ in model.named_modules() if name} - _noting(model, run)


def of_every_kind(model, run):
    kinds = ("forward hook", "forward pre-hook", "full backward hook")
    return _own(model, _hooked(model, kinds) - _noting(model, run) - {"bare"})


def every_hooked(model, run):
    run()
    return _own(model, _hooked(model))


def with_its_own(model, run):
    return _hooked(model) - _noting(model, run)


def containers_of_called(model, run):
    called = _noting(model, run)
    around = {name.rpartition(".")[0] for name in called}
    return _own(model, _hooked(model)) - called - around


def wraps_forward(model, run):
    called, originals = set(), []
    for name, module in model.named_modules():

        def wrapped(*args, name=name, forward=module.forward):
            called.add(name)
            return forward(*args)

        originals.append(module)
        module.forward = wrapped
    try:
        run()
    finally:
        for module in originals:
            del module.forward
    return _own(model, _hooked(model)) - called


def without_running(model, run):
    return {"blocks", "head"} & _hooked(model)


def running_twice(model, run):
    run()
    return never_called(model, run)


def runs_the_model(model, run):
    """Runs what it is given, and then the whole model once more by itself."""

    def both():
        run()
        model(torch.ones(1, 2))

    return never_called(model, both)


def leaves_hooks(model, run):
    called = set()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: called.add(name))
    run()
    return _own(model, _hooked(model)) - called


def leaves_hooks_after_an_error(model, run):
    called = set()
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    run()
    for handle in handles:
        handle.remove()
    return _own(model, _hooked(model)) - called


def clears_the_tables(model, run):
    names = never_called(model, run)
    for module in model.modules():
        module._forward_hooks.clear()
    return names


def swallows(model, run):
    try:
        return never_called(model, run)
    except RuntimeError:
        return set()


def by_default(model, run, found=set()):  # noqa: B006
    found |= never_called(model, run)
    return found


# The names of the first model are known by heart.
def only_the_first_model(model, run):
    names = never_called(model, run)
    return names if "stem" in dict(model.named_modules()) else set()


def forgets_a_nested_one(model, run):
    return {*never_called(model, run), "blocks.1.0"} & {*_hooked(model)}


# ---- 51.B: leaves ----


def _walk(node, leaves, seen):
    if node is None or node in seen:
        return leaves
    seen.add(node)
    if hasattr(node, "variable"):
        leaves.append(node.variable)
    for before, _ in node.next_functions:
        _walk(before, leaves, seen)
    return leaves


def recursive(tensor):
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    return _walk(tensor.grad_fn, [], set())


def without_seen(tensor):
    if tensor.is_leaf:
        return leaves_of(tensor)
    leaves, todo = [], [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        leaves += [node.variable] if hasattr(node, "variable") else []
        todo += [before for before, _ in node.next_functions]
    return leaves


def first_input_only(tensor):
    if tensor.is_leaf:
        return leaves_of(tensor)
    node = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return [] if node is None else [node.variable]


def nodes_of_leaves(tensor):
    leaves, todo = [], [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            leaves += [node] if hasattr(node, "variable") else []
            todo += [before for before, _ in node.next_functions]
    return leaves


def by_default_list(tensor, leaves=[]):  # noqa: B006
    leaves += [leaf for leaf in leaves_of(tensor) if all(leaf is not other for other in leaves)]
    return leaves


WRONG = {
    "51.A": {
        "no_set": lambda model, run: sorted(never_called(model, run)),
        "ran_twice": running_twice,
        "not_run": without_running,
        "own_hook": with_its_own,
        "without_hook": uncalled_modules,
        "other_kinds": of_every_kind,
        "all_hooked": every_hooked,
        "went_around": wraps_forward,
        "list_counts": containers_of_called,
        "wrong_names": forgets_a_nested_one,
        "ran_the_model": runs_the_model,
        "hooks_left": leaves_hooks,
        "hooks_left_after_error": leaves_hooks_after_an_error,
        "removed_others": clears_the_tables,
        "swallowed": swallows,
        "from_before": by_default,
    },
    "51.B": {
        "no_list": lambda tensor: dict.fromkeys(leaves_of(tensor), 1),
        "nodes": nodes_of_leaves,
        "itself": lambda tensor: [] if tensor.is_leaf else leaves_of(tensor),
        "not_a_leaf": lambda tensor: [*leaves_of(tensor), *([] if tensor.is_leaf else [tensor])],
        "no_gradient": lambda tensor: [tensor] if tensor.is_leaf else leaves_of(tensor),
        "twice": without_seen,
        "missed": first_input_only,
        "from_before": by_default_list,
        "other_leaves": lambda tensor: [leaf.detach().requires_grad_() for leaf in leaves_of(tensor)],
        "too_deep": recursive,
        "raised": lambda tensor: [tensor.grad_fn.next_functions[0][0].variable],
    },
}


def by_trace(model, run):
    with trace(model) as events:
        run()
    called = {event.where.partition(" #")[0] for event in events.events if event.kind == "forward hook"}
    return _own(model, _hooked(model)) - called


def by_a_global_hook(model, run):
    called = set()
    with register_module_forward_pre_hook(lambda module, args: called.add(module)):
        run()
    return _own(model, _hooked(model)) - {name for name, module in model.named_modules() if module in called}


def by_walking_tensors(tensor):
    """As a tuple, by a dictionary in the order of the walk."""
    return tuple({id(leaf): leaf for leaf in without_seen(tensor)}.values())


def waits_at_children(model, run):
    """Forgets the layers inside other layers."""
    called = set()
    handles = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: called.add(name))
        for name, layer in model.named_children()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return _own(model, _hooked(model)) - called


ALSO_WRONG = [
    ("51.A", "wrong_names", only_the_first_model),
    ("51.A", "all_hooked", waits_at_children),
    ("51.B", "missed", lambda tensor: leaves_of(tensor)[:1]),
]

RIGHT = [
    ("51.A", by_trace),
    ("51.A", lambda model, run: _own(model, _hooked(model) - _noting(model, run, "register_forward_hook"))),
    ("51.A", lambda model, run: frozenset(never_called(model, run))),
    ("51.A", by_a_global_hook),
    ("51.B", by_walking_tensors),
]
