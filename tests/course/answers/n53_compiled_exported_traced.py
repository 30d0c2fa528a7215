"""Answers to the exercises of notebook 53: wrong ones by the name of their refusal, and right ones."""

import copy
from contextlib import ExitStack

import torch
from torch.nn.modules.module import register_module_forward_hook

from hooklab import features
from hooklab.course.checks.n53_compiled_exported_traced import fate, layer_shapes

# ---- 53.A: the shapes of every layer of a model that is compiled already ----


def _leaves(model):
    return {name: layer for name, layer in model.named_modules() if not list(layer.children())}


def _watch(layers, run, value=lambda args, output: tuple(output.shape)):
    """The layers' values in `run`; the hooks are removed, also after an error."""
    found = {}
    with ExitStack() as stack:
        for name, layer in layers.items():
            hook = lambda module, args, output, name=name: found.update({name: value(args, output)})  # noqa: E731
            stack.callback(layer.register_forward_hook(hook).remove)
        run()
    return found


def _eager(fast, x):
    def run():
        with torch.compiler.set_stance("force_eager"):
            fast(x)

    return run


def shapes_without_stance(fast, x):
    return _watch(_leaves(fast._orig_mod), lambda: fast(x))


def shapes_of_root(fast, x):
    return _watch({"": fast}, lambda: fast(x))


def shapes_by_fast(fast, x):
    return _watch(_leaves(fast), _eager(fast, x))


def shapes_of_original(fast, x):
    return _watch(_leaves(fast._orig_mod), lambda: fast._orig_mod(x))


def shapes_of_all(fast, x):
    return _watch(dict(fast._orig_mod.named_modules()), _eager(fast, x))


def shapes_of_children(fast, x):
    return _watch(dict(fast._orig_mod.named_children()), _eager(fast, x))


def shapes_by_type(fast, x):
    leaves = _leaves(fast._orig_mod)
    return _watch({type(leaf).__name__ + name: leaf for name, leaf in leaves.items()}, _eager(fast, x))


def shapes_as_sizes(fast, x):
    return _watch(_leaves(fast._orig_mod), _eager(fast, x), lambda args, output: output.numel())


def shapes_of_inputs(fast, x):
    return _watch(_leaves(fast._orig_mod), _eager(fast, x), lambda args, output: tuple(args[0].shape))


def shapes_of_one_row(fast, x):
    return _watch(_leaves(fast._orig_mod), _eager(fast, x[:1]))


def shapes_leaving_hooks(fast, x):
    found = {}
    for name, layer in _leaves(fast._orig_mod).items():
        layer.register_forward_hook(lambda module, args, output, name=name: found.update({name: tuple(output.shape)}))
    _eager(fast, x)()
    return found


def shapes_left_eager(fast, x):
    torch.compiler.set_stance("force_eager")
    return _watch(_leaves(fast._orig_mod), lambda: fast(x))


def shapes_after_reset(fast, x):
    torch.compiler.reset()
    return _watch(_leaves(fast._orig_mod), _eager(fast, x))


def shapes_swallowed(fast, x):
    try:
        return layer_shapes(fast, x)
    except RuntimeError:
        return {}


def shapes_without_finally(fast, x):
    found, handles = {}, []
    for name, layer in _leaves(fast._orig_mod).items():
        hook = lambda module, args, output, name=name: found.update({name: tuple(output.shape)})  # noqa: E731
        handles.append(layer.register_forward_hook(hook))
    _eager(fast, x)()
    for handle in handles:
        handle.remove()
    return found


def shapes_stance_by_hand(fast, x):
    def run():
        torch.compiler.set_stance("force_eager")
        fast(x)
        torch.compiler.set_stance("default")

    return _watch(_leaves(fast._orig_mod), run)


# ---- 53.B: what becomes of a hook? ----


def _changing(calls):
    def hook(module, args, output):
        calls.append(1)
        return 2 * output + 1

    return hook


def _told(calls, output, plain):
    if calls:
        return "fires"
    return "lost" if torch.allclose(output, plain) else "burned in"


def fate_never_removed(model, register, transform, x):
    calls = []
    torch.compiler.reset()
    plain = model(x)
    register(model, _changing(calls))
    run = transform(model, x)
    run(x)
    calls.clear()
    return _told(calls, run(x), plain)


def fate_removed_at_the_end(model, register, transform, x):
    calls = []
    torch.compiler.reset()
    plain = model(x)
    handle = register(model, _changing(calls))
    run = transform(model, x)
    run(x)
    calls.clear()
    told = _told(calls, run(x), plain)
    handle.remove()
    return told


def _fate(model, register, transform, x, hook_of=_changing, reset=True, clear=lambda run, x: run(x)):
    calls = []
    if reset:
        torch.compiler.reset()
    plain = model(x)
    handle = register(model, hook_of(calls))
    try:
        run = transform(model, x)
        if clear is not None:
            clear(run, x)
            calls.clear()
        return _told(calls, run(x), plain)
    finally:
        handle.remove()


def fate_late(model, register, transform, x):
    calls = []
    torch.compiler.reset()
    plain = model(x)
    run = transform(model, x)
    handle = register(model, _changing(calls))
    try:
        run(x)
        calls.clear()
        return _told(calls, run(x), plain)
    finally:
        handle.remove()


def fate_swallowed(model, register, transform, x):
    try:
        return fate(model, register, transform, x)
    except ValueError:
        return "lost"


def fate_of_two(model, register, transform, x):
    return {"burned in": "burned in", "fires": "fires", "lost": "burned in"}[fate(model, register, transform, x)]


WRONG = {
    "53.A": {
        "no_dict": lambda fast, x: list(layer_shapes(fast, x).items()),
        "empty": shapes_without_stance,
        "only_root": shapes_of_root,
        "orig_mod_names": shapes_by_fast,
        "compiled_part": shapes_of_original,
        "containers": shapes_of_all,
        "missed_layers": shapes_of_children,
        "other_names": shapes_by_type,
        "no_shapes": shapes_as_sizes,
        "wrong_shapes": shapes_of_inputs,
        "other_run": shapes_of_one_row,
        "left_hooks": shapes_leaving_hooks,
        "left_eager": shapes_left_eager,
        "recompiled": shapes_after_reset,
        "swallowed": shapes_swallowed,
        "left_after_error": shapes_without_finally,
        "eager_after_error": shapes_stance_by_hand,
        "raised": lambda fast, x: {name: tuple(layer(x).shape) for name, layer in fast._orig_mod.named_children()},
    },
    "53.B": {
        "no_word": lambda *given: fate(*given) == "fires",
        "registered_late": fate_late,
        "compiled_before": lambda *given: _fate(*given, reset=False),
        "only_looks": lambda *given: _fate(*given, hook_of=lambda calls: lambda *seen: calls.append(1)),
        "while_transforming": lambda *given: _fate(*given, clear=None),
        "first_run": lambda *given: _fate(*given, clear=lambda run, x: None),
        "wrong_fate": fate_of_two,
        "left_hooks": fate_never_removed,
        "left_after_error": fate_removed_at_the_end,
        "swallowed": fate_swallowed,
    },
}

ALSO_WRONG = []


def shapes_by_features(fast, x):
    """`features` of hooklab, on the original model."""
    model = fast._orig_mod
    with torch.compiler.set_stance("force_eager"), features(model, *_leaves(model)) as outputs:
        fast(x)
    return {name: tuple(each.shape) for name, each in outputs.items()}


def shapes_by_shorter_names(fast, x):
    layers = {name.removeprefix("_orig_mod."): leaf for name, leaf in _leaves(fast).items()}
    return _watch(layers, _eager(fast, x))


def shapes_by_global_hook(fast, x):
    names, shapes = {leaf: name for name, leaf in _leaves(fast._orig_mod).items()}, {}

    def hook(module, args, output):
        if module in names:
            shapes[names[module]] = output.shape

    with register_module_forward_hook(hook):
        _eager(fast, x)()
    return shapes


def fate_on_a_copy(model, register, transform, x):
    """Leaves the given model alone."""
    return fate(copy.deepcopy(model), register, transform, x)


RIGHT = [
    ("53.A", shapes_by_features),
    ("53.A", shapes_by_shorter_names),
    ("53.A", shapes_by_global_hook),
    ("53.B", fate_on_a_copy),
]
