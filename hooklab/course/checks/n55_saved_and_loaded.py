"""Checks of notebook 55: saved and loaded."""

import copy

import torch
from torch import nn

from hooklab.course.check import Exercise, refuse, refuse_first, refuse_latest_call
from hooklab.course.checks.calls import raised, refuse_raised
from hooklab.course.checks.handles import expect_handle

# ---- 55.A: old names, new names ----


def renames(module, names):
    def rename(module, state_dict, prefix, *_):
        found = {}
        for key in list(state_dict):
            for old, new in names.items():
                if key.startswith(f"{prefix}{old}."):
                    rest = key.removeprefix(f"{prefix}{old}.")
                    found[f"{prefix}{new}.{rest}"] = state_dict.pop(key)
                    break
        state_dict.update(found)

    return module.register_load_state_dict_pre_hook(rename)


def _encoder(fc="fc", norm="norm"):
    """Two layers that are renamed; one whose name only begins alike, and one with the same name further inside."""
    inner = nn.ModuleDict({"linear": nn.Linear(1, 1)})
    layers = {fc: nn.Linear(1, 1), norm: nn.Sequential(nn.BatchNorm1d(1))}
    return nn.ModuleDict({**layers, "linear_out": nn.Linear(1, 1), "block": inner})


def _numbered(model):
    """The state of a model, each entry with a number of its own."""
    return {key: torch.full_like(value, at) for at, (key, value) in enumerate(model.state_dict().items(), start=1)}


NAMES = {"linear": "fc", "bn": "norm"}

HOOKED = [  # the keys as the answer's hook has left them (`got`), as they were (`before`), and as they should be (`want`)
    ("nothing_renamed", lambda t: t.got == t.before and not t.prefix),
    ("no_prefix", lambda t: t.got == t.before),
    ("left_old", lambda t: t.want < t.got <= t.want | t.before),
    ("one_name", lambda t: {key for key in t.before if key.startswith(f"{t.prefix}bn.")} <= t.got),
    ("similar_name", lambda t: t.prefix + "fc_out.weight" in t.got),
    ("same_name_inside", lambda t: t.prefix + "block.fc.weight" in t.got),
    ("lost_keys", lambda t: t.got < t.want),
    ("wrong_keys", lambda t: t.got != t.want),
]


def examine_renames(answer):
    _examine_names(answer, "")
    _examine_names(answer, "net.encoder.")
    _examine_swapped(answer)
    _examine_two_calls(answer)


def _wrapped(module, prefix):
    """The module at this place in a larger model, in which layers elsewhere have the old names."""
    for name in reversed(prefix.split(".")[:-1]):
        module = nn.ModuleDict({name: module, "linear": nn.Linear(1, 1)})
    return module


def _examine_names(answer, prefix):
    module = _encoder()
    model, old_model = _wrapped(module, prefix), _wrapped(_encoder("linear", "bn"), prefix)
    handle = answer(module, dict(NAMES))
    expect_handle(handle)
    for turn in ("first", "second"):
        old = dict(reversed(_numbered(old_model).items()))
        _load(model, module, old, turn)
        if any((value != at).any() for at, value in enumerate(reversed(old.values()), start=1)):
            refuse("edited_tensors")
    state = _numbered(model)
    with refuse_raised("new_checkpoint"):
        model.load_state_dict(state)
    handle.remove()
    if raised(lambda: model.load_state_dict(_numbered(old_model))) is None:
        refuse("not_removed")


def _load(model, module, old, turn):
    """Load `old` with a second hook behind the answer's, which looks at the keys and at the numbers."""
    found = {}

    def look(module, state_dict, prefix, *_):
        found.update(prefix=prefix, numbers={key: value.flatten()[0].item() for key, value in state_dict.items()})

    with module.register_load_state_dict_pre_hook(look):
        error = raised(lambda: model.load_state_dict(old))
    if not found:  # the answer's hook has raised
        raise error
    prefix, got = found["prefix"], found["numbers"]
    before = {key: value.flatten()[0].item() for key, value in old.items() if key.startswith(prefix)}
    want = {_new_key(key, prefix): number for key, number in before.items()}
    if turn == "second" and got == before:
        refuse("first_load_only")
    refuse_first(HOOKED, got=set(got), before=set(before), want=set(want), prefix=prefix)
    for key, number in want.items():
        if got[key] != number:
            refuse("wrong_layer", name=key)
    if error is not None:
        raise error


def _new_key(key, prefix):
    first, _, rest = key.removeprefix(prefix).partition(".")
    return f"{prefix}{NAMES.get(first, first)}.{rest}"


def _examine_swapped(answer):
    module = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    old = _numbered(module)
    answer(module, {"a": "b", "b": "a"})
    error = raised(lambda: module.load_state_dict(old))
    if error is not None or module["a"].weight.item() != old["b.weight"].item():
        refuse("swapped")


def _examine_two_calls(answer):
    """Two hooks with other names, both made before the first one fires."""
    modules = {old: nn.ModuleDict({"fc": nn.Linear(1, 1)}) for old in ("left", "right")}
    for old, module in modules.items():
        answer(module, {old: "fc"})
    for old, module in modules.items():
        state = {f"{old}.weight": torch.ones(1, 1), f"{old}.bias": torch.ones(1)}
        if raised(lambda module=module, state=state: module.load_state_dict(state)) is not None:
            refuse_latest_call()


RENAMES = Exercise("55.A", examine_renames, renames)

# ---- 55.B: optimizer state by name ----


def by_name(optimizer):
    def reorder(optimizer, state_dict):
        number = {}
        for group in state_dict["param_groups"]:
            number.update(zip(group["param_names"], group["params"], strict=True))
        groups = []
        for theirs, ours in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            names = ours["param_names"]
            groups.append({**theirs, "params": [number[name] for name in names], "param_names": names})
        return {**state_dict, "param_groups": groups}

    return optimizer.register_load_state_dict_pre_hook(reorder)


SAVED = [["a", "b"], ["c", "d", "e"]]
REORDERED = [["b", "a"], ["e", "c", "d"]]
REGROUPED = [["d", "b", "a"], ["e", "c"]]  # `d` has moved to the other group

LOADED = [  # `got` and `want` are the momentum by name; `by_place` what it is without a hook, None where that raises
    ("no_state", lambda t: not any(t.got.values())),
    ("names_only", lambda t: t.got == t.by_place and t.names == t.own_names),
    ("by_position", lambda t: t.got == t.by_place),
    ("first_group", lambda t: all(t.got[name] == t.want[name] for name in t.groups[0])),
    ("wrong_state", lambda t: t.got != t.want),
]

SETTINGS = [
    ("other_settings", lambda t: t.rates != t.saved_rates),
    ("stale_names", lambda t: t.names != t.own_names),
]


def examine_by_name(answer):
    for make in (_sgd, _adam):
        _examine_groups(answer, make, REORDERED)
        _examine_groups(answer, make, REGROUPED)
    _examine_two_optimizers(answer)


def _sgd(groups):
    return torch.optim.SGD(groups, lr=1.0, momentum=0.5)


def _adam(groups):
    return torch.optim.Adam(groups, lr=1.0)


def _optimizer(make, groups):
    """With a parameter for each name, whose gradient is a number of its own."""
    params = {name: nn.Parameter(torch.zeros(2)) for name in "abcde"}
    for at, param in enumerate(params.values(), start=1):
        param.grad = torch.full((2,), float(at))
    return params, make([{"params": [(name, params[name]) for name in names]} for names in groups])


def _momentum(params, optimizer):
    states = {name: optimizer.state.get(param, {}) for name, param in params.items()}
    return {name: state.get("momentum_buffer", state.get("exp_avg")) for name, state in states.items()}


def _numbers(params, optimizer):
    """The momentum of each parameter in units of that of `a`; 0 where there is none."""
    found = _momentum(params, optimizer)
    return {name: 0 if value is None else round(float(value[0]), 4) for name, value in found.items()}


def _examine_groups(answer, make, groups):
    params, optimizer = _optimizer(make, SAVED)
    optimizer.param_groups[1]["lr"] = 0.25
    optimizer.step()
    want, saved = _numbers(params, optimizer), optimizer.state_dict()
    untouched = copy.deepcopy(saved)
    for turn in ("first", "second"):
        fresh, target = _optimizer(make, groups)
        handle = answer(target)
        expect_handle(handle)
        target.load_state_dict(saved)
        facts = {"got": _numbers(fresh, target), "want": want, "groups": groups}
        _refuse_loaded(make, groups, untouched, target, facts)
        if not _same(saved, untouched):
            refuse("edited_file")
        if turn == "first":
            error = raised(lambda target=target: target.load_state_dict(copy.deepcopy(untouched)))
            if error is not None or _numbers(fresh, target) != want:
                refuse("first_load_only")
            _examine_removal(handle, target, untouched, fresh, want)


def _examine_two_optimizers(answer):
    """Both hooks are made before the first one fires."""
    params, optimizer = _optimizer(_sgd, SAVED)
    optimizer.step()
    want, saved = _numbers(params, optimizer), optimizer.state_dict()
    both = [_optimizer(_sgd, groups) for groups in (REORDERED, REGROUPED)]
    for _, target in both:
        answer(target)
    for fresh, target in both:
        if raised(lambda target=target: target.load_state_dict(saved)) is not None or _numbers(fresh, target) != want:
            refuse_latest_call()


def _refuse_loaded(make, groups, saved, target, facts):
    plain, without = _optimizer(make, groups)
    failed = raised(lambda: without.load_state_dict(copy.deepcopy(saved)))
    by_place = None if failed else _numbers(plain, without)
    names = [group.get("param_names") for group in target.param_groups]
    rates, saved_rates = ([group["lr"] for group in where] for where in (target.param_groups, saved["param_groups"]))
    facts |= {"by_place": by_place, "names": names, "own_names": groups, "rates": rates, "saved_rates": saved_rates}
    if facts["got"] != facts["want"]:
        wrong = next(name for name, number in facts["want"].items() if facts["got"][name] != number)
        facts |= {"name": wrong, "found": facts["got"][wrong], "wanted": facts["want"][wrong]}
        refuse_first(LOADED, **facts)
    refuse_first(SETTINGS, **facts)


def _examine_removal(handle, target, saved, fresh, want):
    handle.remove()
    error = raised(lambda: target.load_state_dict(copy.deepcopy(saved)))
    if error is None and _numbers(fresh, target) == want:
        refuse("not_removed")


def _same(one, other):
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


BY_NAME = Exercise("55.B", examine_by_name, by_name)

EXERCISES = [RENAMES, BY_NAME]
