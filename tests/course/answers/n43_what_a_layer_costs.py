"""Answers to the exercises of notebook 43: wrong ones by the name of their refusal, and right ones."""

import time
from collections import defaultdict
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


def _timed(model, run, clock, name=lambda module: type(module).__name__, always_call=True, remove=True):
    """The solution with a few things to turn."""
    running, own, handles = [], defaultdict(float), []

    def begin(module, args):
        running.append([clock(), 0])

    def end(module, args, output):
        start, inside = running.pop()
        whole = clock() - start
        own[name(module)] += whole - inside
        if running:
            running[-1][1] += whole

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(begin))
        handles.append(module.register_forward_hook(end, always_call=always_call))
    try:
        run()
    finally:
        for handle in handles if remove else ():
            handle.remove()
    return dict(own)


def _inclusive(model, run, clock, key=lambda module: type(module).__name__, add=True, start_at=None):
    """One start time per key; a dictionary from the key to the seconds between."""
    start, spent = {}, defaultdict(float)

    def begin(module, args):
        start[key(module)] = clock()

    def end(module, args, output):
        seconds = clock() - (start[key(module)] if start_at is None else start_at)
        spent[key(module)] = seconds + (spent[key(module)] if add else 0)

    handles = []
    for module in model.modules():
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return dict(spent)


def _subtracted(model, spent, inside):
    """By module: the seconds without those of the modules that `inside` names."""
    own = defaultdict(float)
    for module in spent:
        own[type(module).__name__] += spent[module] - sum(spent.get(other, 0) for other in inside(module))
    return dict(own)


def by_module_and_children(model, run, clock):
    spent = _inclusive(model, run, clock, key=lambda module: module)
    return _subtracted(model, spent, lambda module: [c for part in module.children() for c in part.children()])


def without_all_inside(model, run, clock):
    spent = _inclusive(model, run, clock, key=lambda module: module)
    return _subtracted(model, spent, lambda module: [*module.modules()][1:])


def last_call_only(model, run, clock):
    own, running, handles = {}, [], []

    def begin(module, args):
        running.append([clock(), 0])

    def end(module, args, output):
        start, inside = running.pop()
        own[type(module).__name__] = clock() - start - inside
        if running:
            running[-1][1] += clock() - start

    for module in model.modules():
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return own


def first_call_only(model, run, clock):
    """Of a layer that is used twice only the first call counts."""
    seen = set()

    def name(module):
        key = type(module).__name__
        known = module in seen and not list(module.children())
        seen.add(module)
        return "" if known else key

    found = _timed(model, run, clock, name)
    found.pop("", None)
    return found


def one_start_for_a_class(model, run, clock):
    """Own times by a stack, from a start that is kept by class."""
    start, running, own, handles = {}, [], defaultdict(float), []

    def begin(module, args):
        start[type(module)] = clock()
        running.append(0)

    def end(module, args, output):
        whole = clock() - start[type(module)]
        own[type(module).__name__] += max(whole - running.pop(), 0)
        if running:
            running[-1] += whole

    for module in model.modules():
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: min(seconds, 10) for name, seconds in own.items()} | ({"Net": 2} if "Net" in own else {})


def one_start_for_a_module(model, run, clock):
    start, running, own, handles = {}, [], defaultdict(float), []

    def begin(module, args):
        start[module] = clock()
        running.append(0)

    def end(module, args, output):
        whole = clock() - start[module]
        own[type(module).__name__] += whole - running.pop()
        if running:
            running[-1] += whole

    for module in model.modules():
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return dict(own)


def running_twice(model, run, clock):
    run()
    return seconds_by_type(model, run, clock)


def runs_the_model(model, run, clock):
    """Runs what it is given, and then a layer of the model once more by itself."""

    def both():
        run()
        if len(model.state_dict()) == 0 and not both.ran:
            both.ran = True

    both.ran = False
    found = seconds_by_type(model, both, clock)
    return found if "Net" in found else {**found, "Net": 2.0}


def swallows(model, run, clock):
    try:
        return seconds_by_type(model, run, clock)
    except RuntimeError:
        return {}


def hooks_stay_after_an_error(model, run, clock):
    handles = []

    def noting():
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(lambda module, args: None))
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
    for name, seconds in seconds_by_type(model, run, clock).items():
        own[name] = seconds
    return own if len(own) == 3 else {**own} if "Again" in own else {"Block": 2, "Work": 4}


def with_spare(model, run, clock):
    return {**{type(module).__name__: 0 for module in model.modules()}, **seconds_by_type(model, run, clock)}


def by_module_name(model, run, clock):
    names = {module: name for name, module in model.named_modules()}
    return _timed(model, run, clock, names.get)


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
        "absolute": partial(_inclusive, start_at=0),
        "inclusive": _inclusive,
        "grandchildren": without_all_inside,
        "last_call": last_call_only,
        "shared_once": first_call_only,
        "nested_class": one_start_for_a_class,
        "wrong_seconds": by_module_and_children,
        "ran_the_model": runs_the_model,
        "from_before": by_default,
        "calls_itself": one_start_for_a_module,
        "error_inside": partial(_timed, always_call=False),
        "hooks_left": partial(_timed, remove=False),
        "removed_others": clears_the_tables,
        "swallowed": swallows,
        "hooks_left_after_error": hooks_stay_after_an_error,
    },
}


class Stopwatch:
    """A right answer as a class, with one stack of entries that know their module."""

    __slots__ = ("clock", "own", "running")

    def __init__(self, clock):
        self.clock, self.running, self.own = clock, [], defaultdict(float)

    def begin(self, module, args, kwargs):
        self._charge()
        self.running.append(module)

    def end(self, module, args, kwargs, output):
        self._charge()
        self.running.pop()

    def _charge(self):
        raise NotImplementedError


def by_charging_the_innermost(model, run, clock):
    """At every event, what has passed goes to the module that is running."""
    running, own, last, handles = [], defaultdict(float), [clock()], []

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
    ("43.B", "error_inside", lambda model, run, clock: dict(_timed(model, run, clock, always_call=False))),
]

RIGHT = [
    ("43.A", _flops),
    ("43.A", lambda module, query, key: float(attention_flops(module, query, key))),
    ("43.B", by_charging_the_innermost),
    ("43.B", _timed),
]
