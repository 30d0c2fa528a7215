"""Answers to the exercises of notebook 55: wrong ones by the name of their refusal, and right ones."""

import copy

from hooklab.course.checks.n55_saved_and_loaded import by_name, renames

# ---- 55.A: old names, new names ----


def _renames(new_key, keep_old=False):
    """An answer that asks `new_key(key, prefix, old, new)` for each key and each name; None leaves the key."""

    def answer(module, names):
        def hook(module, state_dict, prefix, *_):
            found = {}
            for key in list(state_dict):
                for old, new in names.items():
                    renamed = new_key(key, prefix, old, new)
                    if renamed is not None:
                        found[renamed] = state_dict[key] if keep_old else state_dict.pop(key)
                        break
            state_dict.update(found)

        return module.register_load_state_dict_pre_hook(hook)

    return answer


def _right_key(key, prefix, old, new):
    start = f"{prefix}{old}."
    return f"{prefix}{new}.{key[len(start) :]}" if key.startswith(start) else None


def without_prefix(key, prefix, old, new):
    return _right_key(key, "", old, new)


def without_dot(key, prefix, old, new):
    start = f"{prefix}{old}"
    return f"{prefix}{new}{key[len(start) :]}" if key.startswith(start) else None


def anywhere(key, prefix, old, new):
    parts = key[len(prefix) :].split(".")
    return prefix + ".".join(new if part == old else part for part in parts) if old in parts else None


def prefix_lost(key, prefix, old, new):
    renamed = _right_key(key, prefix, old, new)
    return renamed and renamed.replace(".", "/")


def one_by_one(module, names):
    def hook(module, state_dict, prefix, *_):
        for key in list(state_dict):
            for old, new in names.items():
                if key.startswith(f"{prefix}{old}."):
                    state_dict[f"{prefix}{new}.{key[len(f'{prefix}{old}.') :]}"] = state_dict.pop(key)
                    break

    return module.register_load_state_dict_pre_hook(hook)


def weight_and_bias(module, names):
    def hook(module, state_dict, prefix, *_):
        for old, new in names.items():
            for part in ("weight", "bias"):
                if f"{prefix}{old}.{part}" in state_dict:
                    state_dict[f"{prefix}{new}.{part}"] = state_dict.pop(f"{prefix}{old}.{part}")
            for key in [key for key in state_dict if key.startswith(f"{prefix}{old}.")]:
                del state_dict[key]

    return module.register_load_state_dict_pre_hook(hook)


def first_name(module, names):
    return renames(module, dict(list(names.items())[:1]))


def old_only(module, names):
    def hook(module, state_dict, prefix, *_):
        for old, new in names.items():
            keys = [key for key in state_dict if key.startswith(f"{prefix}{old}.")]
            if not keys:
                raise KeyError(f"{prefix}{old}")
            for key in keys:
                state_dict[f"{prefix}{new}.{key[len(f'{prefix}{old}.') :]}"] = state_dict.pop(key)

    return module.register_load_state_dict_pre_hook(hook)


def once(module, names):
    handle = renames(module, names)

    def take_off(module, keys):
        handle.remove()
        after.remove()

    after = module.register_load_state_dict_post_hook(take_off)
    return handle


def two_hooks(module, names):
    renames(module, names)
    return renames(module, names)


def renamed_copy(module, names):
    """Works on a dictionary of its own, which nobody reads."""

    def hook(module, state_dict, prefix, *_):
        state_dict = {_right_key(key, prefix, *next(iter(names.items()))): value for key, value in state_dict.items()}

    return module.register_load_state_dict_pre_hook(hook)


def by_position(module, names):
    """Takes it that the file has the keys in the order of the module."""

    def hook(module, state_dict, prefix, *_):
        keys = [key for key in state_dict if key.startswith(prefix)]
        values = [state_dict.pop(key) for key in keys]
        state_dict.update(zip([prefix + key for key in module.state_dict()], values, strict=True))

    return module.register_load_state_dict_pre_hook(hook)


def doubled_in_place(module, names):
    def hook(module, state_dict, prefix, *_):
        for value in state_dict.values():
            value.add_(1)

    handle = renames(module, names)
    module.register_load_state_dict_pre_hook(hook)
    return handle


def empties(module, state_dict, prefix, *_):
    state_dict.clear()


def in_a_row(module, names):
    """Goes on with the key that it has just renamed, so a swap puts it back."""

    def hook(module, state_dict, prefix, *_):
        for old, new in names.items():
            for key in [key for key in state_dict if key.startswith(f"{prefix}{old}.")]:
                state_dict[_right_key(key, prefix, old, new)] = state_dict.pop(key)

    return module.register_load_state_dict_pre_hook(hook)


LAST = {}


def names_in_a_global(module, names):
    LAST.clear()
    LAST.update(names)
    return renames(module, LAST)


# ---- 55.B: optimizer state by name ----


def _sorting(group_of, state=lambda state: state):
    """An answer whose hook makes each group by `group_of(theirs, ours, number, at)`."""

    def answer(optimizer):
        def hook(optimizer, state_dict):
            number = {}
            for group in state_dict["param_groups"]:
                number.update(zip(group["param_names"], group["params"], strict=True))
            pairs = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
            groups = [group_of(theirs, ours, number, at) for at, (theirs, ours) in enumerate(pairs)]
            return {"state": state(state_dict["state"]), "param_groups": groups}

        return optimizer.register_load_state_dict_pre_hook(hook)

    return answer


def _right_group(theirs, ours, number, at):
    names = ours["param_names"]
    return {**theirs, "params": [number[name] for name in names], "param_names": names}


def in_place(optimizer):
    def hook(optimizer, state_dict):
        number = {}
        for group in state_dict["param_groups"]:
            number.update(zip(group["param_names"], group["params"], strict=True))
        for theirs, ours in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            theirs["params"] = [number[name] for name in ours["param_names"]]
            theirs["param_names"] = list(ours["param_names"])

    return optimizer.register_load_state_dict_pre_hook(hook)


def returns_nothing(optimizer):
    def hook(optimizer, state_dict):
        state_dict = copy.deepcopy(state_dict)
        for theirs, ours in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            theirs["param_names"] = ours["param_names"]

    return optimizer.register_load_state_dict_pre_hook(hook)


def own_settings(theirs, ours, number, at):
    return {**ours, "params": [number[name] for name in ours["param_names"]]}


def left_names(theirs, ours, number, at):
    return {**theirs, "params": [number[name] for name in ours["param_names"]]}


def only_names(theirs, ours, number, at):
    return {**theirs, "param_names": ours["param_names"]}


def only_the_first(theirs, ours, number, at):
    return {**_right_group(theirs, ours, number, at), **({"params": theirs["params"]} if at else {})}


def upside_down(theirs, ours, number, at):
    return {**_right_group(theirs, ours, number, at), "params": [number[name] for name in ours["param_names"][::-1]]}


def within_a_group(theirs, ours, number, at):
    own = dict(zip(theirs["param_names"], theirs["params"], strict=True))
    return _right_group(theirs, ours, own, at)


def twice(optimizer):
    by_name(optimizer)
    return by_name(optimizer)


def once_only(optimizer):
    handle = by_name(optimizer)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: handle.remove())
    return handle


LATEST = []


def latest_optimizer(optimizer):
    LATEST[:] = [optimizer]

    def hook(optimizer, state_dict):
        number = {}
        for group in state_dict["param_groups"]:
            number.update(zip(group["param_names"], group["params"], strict=True))
        pairs = zip(state_dict["param_groups"], LATEST[0].param_groups, strict=True)
        return {**state_dict, "param_groups": [_right_group(theirs, ours, number, 0) for theirs, ours in pairs]}

    return optimizer.register_load_state_dict_pre_hook(hook)


def deep_copy_in_place(optimizer):
    """Right: edits a deep copy, and returns it."""

    def hook(optimizer, state_dict):
        state_dict = copy.deepcopy(state_dict)
        number = {}
        for group in state_dict["param_groups"]:
            number.update(zip(group["param_names"], group["params"], strict=True))
        for theirs, ours in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            theirs["params"] = [number[name] for name in ours["param_names"]]
            theirs["param_names"] = list(ours["param_names"])
        return state_dict

    return optimizer.register_load_state_dict_pre_hook(hook)


def numbers_anew(optimizer):
    """Right: numbers the states afresh, in the order of the optimizer's own parameters."""

    def hook(optimizer, state_dict):
        theirs = state_dict["param_groups"]
        number = {name: at for group in theirs for name, at in zip(group["param_names"], group["params"], strict=True)}
        states, groups = {}, []
        for group, ours in zip(theirs, optimizer.param_groups, strict=True):
            params = []
            for name in ours["param_names"]:
                params.append(len(states))
                states[len(states)] = state_dict["state"][number[name]]
            groups.append({**group, "params": params, "param_names": list(ours["param_names"])})
        return {"state": states, "param_groups": groups}

    return optimizer.register_load_state_dict_pre_hook(hook)


class ByRegularExpression:
    """Right: a class with slots, a regular expression, and the dictionary filled anew."""

    __slots__ = ("names",)

    def __init__(self, names):
        self.names = names

    def __call__(self, module, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        entries = list(state_dict.items())
        state_dict.clear()
        for key, value in entries:
            rest = key[len(prefix) :] if key.startswith(prefix) else ""
            first, dot, last = rest.partition(".")
            state_dict[f"{prefix}{self.names[first]}.{last}" if dot and first in self.names else key] = value


WRONG = {
    "55.A": {
        "no_handle": lambda module, names: renames(module, names) and None,
        "nothing_renamed": renamed_copy,
        "no_prefix": _renames(without_prefix),
        "left_old": _renames(_right_key, keep_old=True),
        "one_name": first_name,
        "similar_name": _renames(without_dot),
        "same_name_inside": _renames(anywhere),
        "lost_keys": weight_and_bias,
        "wrong_keys": _renames(prefix_lost),
        "wrong_layer": by_position,
        "edited_tensors": doubled_in_place,
        "first_load_only": once,
        "new_checkpoint": old_only,
        "not_removed": two_hooks,
        "swapped": one_by_one,
        "latest_call": names_in_a_global,
    },
    "55.B": {
        "no_handle": lambda optimizer: by_name(optimizer) and None,
        "no_state": _sorting(_right_group, state=lambda state: {}),
        "by_position": returns_nothing,
        "names_only": _sorting(only_names),
        "first_group": _sorting(only_the_first),
        "wrong_state": _sorting(upside_down),
        "other_settings": _sorting(own_settings),
        "stale_names": _sorting(left_names),
        "edited_file": in_place,
        "not_removed": twice,
        "first_load_only": once_only,
        "latest_call": latest_optimizer,
        "raised": _sorting(within_a_group),
    },
}

ALSO_WRONG = [
    ("55.A", "lost_keys", lambda module, names: module.register_load_state_dict_pre_hook(empties)),
    ("55.A", "swapped", in_a_row),
    ("55.A", "nothing_renamed", lambda module, names: module.register_load_state_dict_pre_hook(lambda *_: None)),
    ("55.B", "by_position", lambda optimizer: optimizer.register_load_state_dict_pre_hook(lambda *_: None)),
]

RIGHT = [
    ("55.A", lambda module, names: module.register_load_state_dict_pre_hook(ByRegularExpression(names))),
    ("55.A", _renames(_right_key)),
    ("55.B", deep_copy_in_place),
    ("55.B", numbers_anew),
]
