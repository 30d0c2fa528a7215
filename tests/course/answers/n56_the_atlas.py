"""Answers to the exercises of notebook 56: wrong ones by the name of their refusal, and right ones."""

from contextlib import suppress

from hooklab.course.checks.n56_the_atlas import calls_of, rule_of

# ---- 56.A: the registration calls that a class defines ----


def of(names, test):
    """An answer that keeps the names of `names(owner)` that pass `test(owner, name)`."""
    return lambda owner: sorted(name for name in names(owner) if test(owner, name))


def is_call(owner, name):
    return callable(getattr(owner, name))


def registers(owner, name):
    return name.startswith("register_") and "hook" in name


# ---- 56.B: what becomes of a returned value ----


def leaves_it_on(register, hook, run):
    plain = run()
    handle = register(hook)
    try:
        got = run()
    except Exception:
        handle.remove()
        return "refused"
    return "ignored" if got == plain else "replaces"


def leaves_it_on_after_an_error(register, hook, run):
    plain = run()
    handle = register(hook)
    try:
        got = run()
    except Exception:
        return "refused"
    handle.remove()
    return "ignored" if got == plain else "replaces"


def lets_errors_through(register, hook, run):
    plain = run()
    handle = register(hook)
    try:
        got = run()
    finally:
        handle.remove()
    return "ignored" if got == plain else "replaces"


def knows_one_error(register, hook, run):
    plain = run()
    handle = register(hook)
    try:
        got = run()
    except RuntimeError:
        return "refused"
    finally:
        handle.remove()
    return "ignored" if got == plain else "replaces"


def never_hangs_it(register, hook, run):
    return "ignored" if run() == run() else "replaces"


def compares_with_the_hook_on(register, hook, run):
    handle = register(hook)
    try:
        return "ignored" if run() == run() else "replaces"
    except Exception:
        return "refused"
    finally:
        handle.remove()


def says_true(register, hook, run):
    return {"replaces": True, "ignored": False}.get(rule_of(register, hook, run))


def takes_zero_for_nothing(register, hook, run):
    got = []
    rule = rule_of(register, hook, lambda: got.append(run()) or got[-1])
    return "ignored" if rule == "replaces" and not got[-1] else rule


def takes_any_value_for_a_change(register, hook, run):
    rule = rule_of(register, hook, run)
    return "replaces" if rule == "ignored" else rule


WRONG = {
    "56.A": {
        "no_names": lambda owner: print(calls_of(owner)),
        "inherited": of(dir, lambda owner, name: registers(owner, name) and is_call(owner, name)),
        "unregister": of(vars, lambda owner, name: registers(owner, name.removeprefix("un")) and is_call(owner, name)),
        "private": of(vars, lambda owner, name: registers(owner, name.lstrip("_")) and is_call(owner, name)),
        "no_hook": of(vars, lambda owner, name: name.startswith("register_") and is_call(owner, name)),
        "not_a_call": of(vars, registers),
        "other_names": lambda owner: calls_of(owner)[1:],
        "twice": lambda owner: sorted(calls_of(owner) * 2),
        "not_sorted": lambda owner: calls_of(owner)[::-1],
    },
    "56.B": {
        "left_on": leaves_it_on,
        "left_on_after_error": leaves_it_on_after_an_error,
        "error_passed_on": lets_errors_through,
        "never_hung": never_hangs_it,
        "no_plain_run": compares_with_the_hook_on,
        "other_word": says_true,
        "wrong_rule": takes_any_value_for_a_change,
    },
}


def in_two_blocks(register, hook, run):
    results = [run()]
    handle = register(hook)
    with suppress(Exception):
        results.append(run())
    handle.remove()
    if len(results) == 1:
        return "refused"
    return "ignored" if results[0] == results[1] else "replaces"


def plain_run_last(register, hook, run):
    handle, got = register(hook), None
    try:
        got = [run()]
    except Exception:
        return "refused"
    finally:
        handle.remove()
    return "ignored" if got == [run()] else "replaces"


ALSO_WRONG = [
    ("56.B", "error_passed_on", knows_one_error),
    ("56.B", "wrong_rule", takes_zero_for_nothing),
]

RIGHT = [
    ("56.A", lambda owner: tuple(calls_of(owner))),
    ("56.A", of(vars, lambda owner, name: registers(owner, name) and is_call(owner, name))),
    ("56.B", in_two_blocks),
    ("56.B", plain_run_last),
]
