"""Answers to the exercises of notebook 48: wrong ones by the name of their refusal, and right ones."""

from functools import partial

import torch

from answers.around import clearing, swallowing
from hooklab import compare, features
from hooklab.course.checks.n48_two_ports import first_difference, to_blame

# ---- 48.A: the first layer whose outputs differ ----


def _largest(output, other, tol):
    return (other - output).abs().max() > tol * output.abs().max()


def _first(keep=torch.clone, differs=_largest, order=lambda of_a, pairs: of_a, of_b_too=False, clean=True):
    """An answer with one thing changed. `order(of_a, pairs)` gives the names to go through."""

    def answer(a, b, pairs, x, tol):
        of_a, of_b, handles = {}, {}, []
        try:
            for name, other in pairs.items():
                for kept, model, key in ((of_a, a, name), (of_b, b, other)):
                    hook = partial(_keep, kept, key, keep)
                    handles.append(model.get_submodule(key).register_forward_hook(hook))
            with torch.no_grad():
                a(x)
                b(x)
        finally:
            if clean:
                for handle in handles:
                    handle.remove()
        for name in order(of_a, pairs):
            if differs(of_a[name], of_b[pairs[name]], tol):
                return pairs[name] if of_b_too else name
        return None

    return answer


def _keep(kept, name, keep, module, args, output):
    kept[name] = keep(output)


def _registered(of_a, pairs):
    return list(pairs)


def _absolute(output, other, tol):
    return (other - output).abs().max() > tol


def _mean(output, other, tol):
    return (other - output).abs().mean() > tol * output.abs().max()


def _signed(output, other, tol):
    return (other - output).abs().max() > tol * output.max()


def _means(output, other, tol):
    return (other - output).abs().mean() > tol * output.abs().mean()


def _each(output, other, tol):
    return ((other - output).abs() > tol * output.abs()).any()


def layer_by_layer(a, b, pairs, x, tol):
    """Runs both models again for each layer."""
    for name in reversed(pairs):
        if first_difference(a, b, {name: pairs[name]}, x, tol):
            return name
    return None


def leaves_hooks_after_an_error(a, b, pairs, x, tol):
    of_a, of_b, handles = {}, {}, []
    for name, other in pairs.items():
        for kept, model, key in ((of_a, a, name), (of_b, b, other)):
            handles.append(model.get_submodule(key).register_forward_hook(partial(_keep, kept, key, torch.clone)))
    a(x)
    b(x)
    for handle in handles:
        handle.remove()
    return next((name for name in of_a if _largest(of_a[name], of_b[pairs[name]], tol)), None)


def last_one(a, b, pairs, x, tol):
    """Goes through the layers from the end."""
    return _first(order=lambda of_a, pairs: reversed(of_a))(a, b, pairs, x, tol)


def always_a_name(a, b, pairs, x, tol):
    return first_difference(a, b, pairs, x, tol) or "last"


def only_looks_at_the_ends(a, b, pairs, x, tol):
    """The outputs of the whole models, and then the first layer that is not last."""
    return "middle" if _largest(a(x), b(x), tol) else None


def in_train_mode(a, b, pairs, x, tol):
    got = first_difference(a, b, pairs, x, tol)
    a.train()
    return got


def in_the_order_of_features(a, b, pairs, x, tol):
    """`features` gives layers in the order in which they were named."""
    with features(a, *pairs, keep=torch.clone) as of_a, features(b, *pairs.values(), keep=torch.clone) as of_b:
        a(x)
        b(x)
    return next((name for name in of_a if _largest(of_a[name], of_b[pairs[name]], tol)), None)


# ---- 48.B: the layers that differ on equal input ----


@torch.no_grad()
def _blame(a, b, pairs, x, tol, *, given_after=False, own=False, eval_mode=True, restore=True, differs=_largest, **how):
    """As the solution, with one thing changed."""
    given, outputs, of_b, handles = {}, {}, {}, []
    modes = [(part, part.training) for model in (a, b) for part in model.modules()]

    def before(name, module, args):
        given[name] = args[0].clone()

    def after(name, module, args, output):
        outputs[name] = output.clone()
        if given_after:
            given[name] = args[0].clone()

    try:
        for name, other in pairs.items():
            layer = a.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(partial(before, name)))
            handles.append(layer.register_forward_hook(partial(after, name)))
            handles.append(b.get_submodule(other).register_forward_hook(partial(_keep, of_b, other, torch.clone)))
        if eval_mode:
            a.eval()
            b.eval()
        a(x)
        if own:
            b(x)
            others = {name: of_b[pairs[name]] for name in outputs}
        else:
            others = {name: b.get_submodule(pairs[name])(given[name]) for name in outputs}
    finally:
        if how.get("clean", True):
            for handle in handles:
                handle.remove()
        if restore:
            for part, mode in modes:
                part.training = mode
    names = how.get("order", list)(outputs)
    return [name for name in names if differs(outputs[name], others[name], tol)]


def _changed(**how):
    return partial(_blame, **how)


def blame_leaves_hooks_after_an_error(a, b, pairs, x, tol):
    handles = [a.get_submodule(name).register_forward_hook(lambda *given: None) for name in pairs]
    a(x)
    for handle in handles:
        handle.remove()
    return to_blame(a, b, pairs, x, tol)


def modes_of_the_whole_only(a, b, pairs, x, tol):
    """Puts the mode of the model into every layer."""
    a_mode, b_mode = a.training, b.training
    try:
        return to_blame(a, b, pairs, x, tol)
    finally:
        a.train(a_mode)
        b.train(b_mode)


def only_a_in_eval_mode(a, b, pairs, x, tol):
    modes = [(part, part.training) for part in a.modules()]
    a.eval()
    try:
        return _blame(a, b, pairs, x, tol, eval_mode=False)
    finally:
        for part, mode in modes:
            part.training = mode


def blames_only_a_small_fault(a, b, pairs, x, tol):
    return [name for name in to_blame(a, b, pairs, x, tol) if name == "enter"]


WRONG = {
    "48.A": {
        "name_of_b": _first(of_b_too=True),
        "not_a_name": lambda *given: [first_difference(*given)],
        "by_reference": _first(keep=lambda output: output),
        "order_of_pairs": _first(order=_registered),
        "wrong_first": only_looks_at_the_ends,
        "differs_nowhere": always_a_name,
        "absolute": _first(differs=_absolute),
        "not_the_largest": _first(differs=_mean),
        "each_entry": _first(differs=_each),
        "signed": _first(differs=_signed),
        "ran_twice": layer_by_layer,
        "mode_changed": in_train_mode,
        "hooks_left": _first(clean=False),
        "hooks_left_after_error": leaves_hooks_after_an_error,
        "removed_others": clearing(first_difference),
        "swallowed": swallowing(first_difference, None),
    },
    "48.B": {
        "no_list": lambda *given: tuple(to_blame(*given)),
        "names_of_b": lambda a, b, pairs, x, tol: [pairs[name] for name in to_blame(a, b, pairs, x, tol)],
        "input_after": _changed(given_after=True),
        "own_inputs": _changed(own=True),
        "stops_at_first": lambda *given: to_blame(*given)[:1],
        "other_order": lambda a, b, pairs, x, tol: [name for name in pairs if name in to_blame(a, b, pairs, x, tol)],
        "wrong_layers": blames_only_a_small_fault,
        "in_training_mode": _changed(eval_mode=False),
        "absolute": _changed(differs=_absolute),
        "mode_changed": _changed(restore=False),
        "hooks_left": _changed(clean=False),
        "hooks_left_after_error": blame_leaves_hooks_after_an_error,
        "removed_others": clearing(to_blame),
        "swallowed": swallowing(to_blame, []),
    },
}

ALSO_WRONG = [
    ("48.A", "not_the_largest", _first(differs=_means)),
    ("48.A", "order_of_pairs", last_one),
    ("48.A", "order_of_pairs", in_the_order_of_features),
    ("48.B", "mode_changed", modes_of_the_whole_only),
    ("48.B", "in_training_mode", only_a_in_eval_mode),
]


def by_compare(a, b, pairs, x, tol):
    result = compare(a, b, x, pairs=pairs, tol=tol)
    return result.first.a if result.first else None


def blame_by_compare(a, b, pairs, x, tol):
    return [row.a for row in compare(a, b, x, pairs=pairs) if (row.on_equal_input or 0) > tol]


RIGHT = [
    ("48.A", _first()),
    ("48.A", by_compare),
    ("48.B", _changed()),
    ("48.B", blame_by_compare),
]
