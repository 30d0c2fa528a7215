"""Answers to the exercises of notebook 43: wrong ones by the name of their refusal, and right ones."""

import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from hooklab.course.checks.n43_what_a_layer_costs import attention_flops, seconds_by_type

# ---- 43.A: FLOPs of attention ----


def _flops(module, query, key, inputs=3, products=2, output=1, by=2, batched=True, batch_first=None, same=False):
    """Written in another way than the solution, and wrong in one place if asked."""
    dim = 0 if (module.batch_first if batch_first is None else batch_first) else 1
    batch, steps, others = query.shape[dim], query.shape[1 - dim], (query if same else key).shape[1 - dim]
    size = query.shape[-1]
    rows = {0: 0, 1: steps, 3: steps + 2 * others}[inputs]
    flops = by * (rows * size * size + products * steps * others * size + output * steps * size * size)
    return flops * batch if batched else flops


def by_counter(module, query, key):
    with FlopCounterMode(display=False) as counter:
        module(query, key, key)
    return counter.get_total_flops()


# ---- 43.B: own seconds by class ----


@contextmanager
def _around(model, begin, end, always_call=True, remove=True):
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(begin))
        handles.append(module.register_forward_hook(end, always_call=always_call))
    try:
        yield
    finally:
        for handle in handles if remove else ():
            handle.remove()


def _class(module):
    return type(module).__name__


def _timed(model, run, clock, name=_class, add=True, start_by=None, **options):
    """By a stack. `add`: calls are added up; `start_by`: one start for each module, or for each class."""
    running, own, start = [], defaultdict(float), {}

    def begin(module, args):
        key = len(running) if start_by is None else start_by(module)
        start[key] = clock()
        running.append([key, 0])

    def end(module, args, output):
        key, inside = running.pop()
        whole = clock() - start[key]
        named = name(module)
        own[named] = whole - inside + (own[named] if add else 0)
        if running:
            running[-1][1] += whole

    with _around(model, begin, end, **options):
        run()
    return dict(own)


def _inclusive(model, run, clock, start=None):
    """By module, from its pre-hook (or from `start`) to its hook."""
    starts, spent = {}, defaultdict(float)

    def begin(module, args):
        starts[module] = clock() if start is None else start

    def end(module, args, output):
        spent[module] += clock() - starts[module]

    with _around(model, begin, end):
        run()
    return spent


def _by_class(seconds):
    total = defaultdict(float)
    for module, spent in seconds.items():
        total[_class(module)] += spent
    return dict(total)


def minus_children(model, run, clock):
    spent = _inclusive(model, run, clock)
    return _by_class({one: spent[one] - sum(spent.get(part, 0) for part in one.children()) for one in [*spent]})


def minus_all_inside(model, run, clock):
    spent = _inclusive(model, run, clock)
    return _by_class({one: spent[one] - sum(spent.get(part, 0) for part in [*one.modules()][1:]) for one in [*spent]})


def minus_the_next_level(model, run, clock):
    """Looks through the lists, in which `minus_children` finds nothing."""
    spent = _inclusive(model, run, clock)
    parts = {one: [part for between in one.children() for part in between.children()] for one in spent}
    return _by_class({one: spent[one] - sum(spent.get(part, 0) for part in parts[one]) for one in [*spent]})


def first_call_only(model, run, clock):
    """Of a layer that is used twice only the first call counts."""
    seen = set()

    def name(module):
        known = module in seen and not list(module.children())
        seen.add(module)
        return "twice" if known else _class(module)

    found = _timed(model, run, clock, name)
    found.pop("twice", None)
    return found


def averages(model, run, clock):
    calls = Counter()

    def count(module, args, output):
        calls[_class(module)] += 1

    with _around(model, lambda module, args: None, count):
        found = seconds_by_type(model, run, clock)
    return {name: seconds / calls[name] for name, seconds in found.items()}


def the_rest_is_the_models(model, run, clock):
    begin = clock()
    found = seconds_by_type(model, run, clock)
    found.pop(_class(model), None)
    return {**found, _class(model): clock() - begin - sum(found.values())}


def running_twice(model, run, clock):
    run()
    return seconds_by_type(model, run, clock)


def swallows(model, run, clock):
    try:
        return seconds_by_type(model, run, clock)
    except RuntimeError:
        return {}


def hooks_stay_after_an_error(model, run, clock):
    def noting():
        handles = [module.register_forward_pre_hook(lambda module, args: None) for module in model.modules()]
        run()
        for handle in handles:
            handle.remove()

    return seconds_by_type(model, noting, clock)


def clears_the_tables(model, run, clock):
    found = seconds_by_type(model, run, clock)
    for module in model.modules():
        module._forward_hooks.clear()
    return found


def by_default(model, run, clock, own={}):  # noqa: B006
    own |= seconds_by_type(model, run, clock)
    return own


def with_spare(model, run, clock):
    return {**{_class(module): 0 for module in model.modules()}, **seconds_by_type(model, run, clock)}


def by_module_name(model, run, clock):
    return _timed(model, run, clock, {module: name for name, module in model.named_modules()}.get)


WRONG = {
    "43.A": {
        "no_number": lambda module, query, key: torch.tensor(attention_flops(module, query, key)),
        "ran": by_counter,
        "half": partial(_flops, by=1),
        "no_products": partial(_flops, products=0),
        "one_product": partial(_flops, products=1),
        "each_head": lambda module, query, key: _flops(module, query, key, products=2 * module.num_heads),
        "no_output": partial(_flops, output=0),
        "no_inputs": partial(_flops, inputs=0),
        "one_input": partial(_flops, inputs=1),
        "no_batch": partial(_flops, batched=False),
        "other_dimension": partial(_flops, batch_first=True),
        "same_steps": partial(_flops, same=True),
        "wrong_number": lambda module, query, key: attention_flops(module, query, key) + query.numel(),
    },
    "43.B": {
        "no_dict": lambda model, run, clock: list(seconds_by_type(model, run, clock).items()),
        "no_words": partial(_timed, name=type),
        "no_seconds": lambda *given: {name: [value] for name, value in seconds_by_type(*given).items()},
        "ran_twice": running_twice,
        "not_run": lambda model, run, clock: {"Net": 2, "Block": 6, "Work": 10},
        "module_names": by_module_name,
        "not_called": with_spare,
        "other_clock": lambda model, run, clock: seconds_by_type(model, run, time.perf_counter),
        "absolute": lambda *given: _by_class(_inclusive(*given, start=0)),
        "inclusive": minus_children,
        "grandchildren": minus_all_inside,
        "negative": minus_the_next_level,
        "last_call": partial(_timed, add=False),
        "shared_once": first_call_only,
        "nested_class": partial(_timed, start_by=type),
        "wrong_seconds": averages,
        "ran_the_model": the_rest_is_the_models,
        "from_before": by_default,
        "calls_itself": partial(_timed, start_by=lambda module: module),
        "error_inside": partial(_timed, always_call=False),
        "hooks_left": partial(_timed, remove=False),
        "removed_others": clears_the_tables,
        "swallowed": swallows,
        "hooks_left_after_error": hooks_stay_after_an_error,
    },
}


def by_charging_the_innermost(model, run, clock):
    """At every event, what has passed goes to the module that is running."""
    running, own, last, handles = [], defaultdict(float), [0], []

    def charge():
        if running:
            own[running[-1]] += clock() - last[0]
        last[0] = clock()

    def begin(module, args, kwargs):
        charge()
        running.append(type(module).__name__)

    def end(module, args, kwargs, output):
        charge()
        running.pop()

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(end, with_kwargs=True, always_call=True))
    try:
        run()
    finally:
        while handles:
            handles.pop().remove()
    return own


ALSO_WRONG = [
    ("43.B", "inclusive", lambda *given: _by_class(_inclusive(*given))),
]

RIGHT = [
    ("43.A", _flops),
    ("43.A", lambda module, query, key: float(attention_flops(module, query, key))),
    ("43.B", by_charging_the_innermost),
    ("43.B", _timed),
]
