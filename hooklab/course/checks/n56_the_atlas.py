"""Checks of notebook 56: the atlas of hooks."""

from typing import Any

import torch

from hooklab.course.check import Exercise, refuse_first

# ---- 56.A: the registration calls that a class defines ----


def calls_of(owner):
    names = [name for name in vars(owner) if name.startswith("register_")]
    return sorted(name for name in names if "hook" in name and callable(getattr(owner, name)))


class Parent:
    register_hook_count = 3

    def register_start_hook(self, hook): ...

    def unregister_start_hook(self, hook): ...

    def register_buffer(self, name, tensor): ...

    def _register_inner_hook(self, hook): ...


class Child(Parent):
    hooks = ()

    @staticmethod
    def register_stop_hook(hook): ...

    @classmethod
    def register_all_hooks(cls, hook): ...


OWNERS = (Parent, Child, torch.nn.Module, torch.nn.Linear, torch.optim.Optimizer)

CALLS = [  # `more` are names too many, `missing` those that are not there
    ("no_names", lambda t: not isinstance(t.got, list | tuple) or not all(isinstance(name, str) for name in t.got)),
    ("inherited", lambda t: any(name not in vars(t.owner) and hasattr(t.owner, name) for name in t.more)),
    ("unregister", lambda t: any(name.startswith("unregister") for name in t.more)),
    ("private", lambda t: any(name[:1] == "_" for name in t.more)),
    ("no_hook", lambda t: any("hook" not in name for name in t.more)),
    ("not_a_call", lambda t: any(not callable(getattr(t.owner, name, None)) for name in t.more)),
    ("other_names", lambda t: t.more or t.missing),
    ("twice", lambda t: len(t.got) > len(t.want)),
    ("not_sorted", lambda t: list(t.got) != t.want),
]


def examine_calls_of(answer):
    for owner in OWNERS:
        got, want = answer(owner), calls_of(owner)
        names = [name for name in got if isinstance(name, str)] if isinstance(got, list | tuple) else []
        more, missing = sorted(set(names) - set(want)), sorted(set(want) - set(names))
        refuse_first(CALLS, owner=owner, where=owner.__name__, got=got, want=want, more=more, missing=missing)


OF_CLASS = Exercise("56.A", examine_calls_of, calls_of)

# ---- 56.B: what becomes of a returned value ----


def rule_of(register, hook, run):
    plain = run()
    handle = register(hook)
    try:
        got = run()
    except Exception:
        return "refused"
    finally:
        handle.remove()
    return "ignored" if got == plain else "replaces"


class Host:
    """Something with hooks, which treats what they return by its rule; `runs` has the number of hooks in each run."""

    def __init__(self, rule: str, value: float = 2.0, error: type[Exception] = RuntimeError):
        self.rule, self.value, self.error = rule, value, error
        self.hooks: dict[object, Any] = {}
        self.runs: list[int] = []

    def register(self, hook):
        handle = Handle(self.hooks)
        self.hooks[handle] = hook
        return handle

    def run(self):
        self.runs.append(len(self.hooks))
        value = self.value
        for hook in list(self.hooks.values()):
            returned = hook(value)
            if returned is not None and self.rule == "refused":
                raise self.error("a hook must return None")
            value = value if returned is None or self.rule == "ignored" else returned
        return value


class Handle:
    def __init__(self, hooks):
        self._hooks = hooks

    def remove(self):
        self._hooks.pop(self, None)


def double(value):
    return 2 * value


def nothing(value):
    return None


HOSTS = [
    (lambda: Host("replaces"), double, "replaces"),
    (lambda: Host("ignored"), double, "ignored"),
    (lambda: Host("refused"), double, "refused"),
    (lambda: Host("refused", error=KeyError), double, "refused"),
    (lambda: Host("refused"), nothing, "ignored"),
    (lambda: Host("replaces", value=5.0), lambda value: 0, "replaces"),
]

RULE = [
    ("left_on_after_error", lambda t: t.host.hooks and t.want == "refused"),
    ("left_on", lambda t: t.host.hooks),
    ("error_passed_on", lambda t: t.error is not None and 1 in t.host.runs and t.want == "refused"),
    ("never_hung", lambda t: t.error is None and not any(t.host.runs)),
    ("no_plain_run", lambda t: t.error is None and 0 not in t.host.runs and t.want != "refused"),
    ("other_word", lambda t: t.error is None and t.got not in ("replaces", "ignored", "refused")),
    ("wrong_rule", lambda t: t.error is None and t.got != t.want),
]


def examine_rule_of(answer):
    for make, hook, want in HOSTS:
        host, got, error = make(), None, None
        try:
            got = answer(host.register, hook, host.run)
        except Exception as raised:
            error = raised
        refuse_first(RULE, host=host, got=got, error=error, want=want)
        if error is not None:
            raise error


OF_VALUE = Exercise("56.B", examine_rule_of, rule_of)

EXERCISES = [OF_CLASS, OF_VALUE]
