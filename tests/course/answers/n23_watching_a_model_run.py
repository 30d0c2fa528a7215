"""Answers to the exercises of notebook 23: wrong ones by the name of their refusal, and right ones."""

from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from answers.around import clearing, gradients_off, modes_of, swallowing
from hooklab.course.checks.n23_watching_a_model_run import first_nan, never_called, output_shapes
from hooklab.layers.statistics import layer_statistics

# ---- what the three exercises share ----


@contextmanager
def _hung(layers, hook_for):
    """A hook for each name on its layer, taken off at the end, also after an error."""
    with ExitStack() as hooks:
        for name, layer in layers:
            hooks.enter_context(layer.register_forward_hook(hook_for(name)))
        yield


def naming(solution):
    """Writes names on the layers, and tidies up where nothing raises."""

    def answer(model, x):
        for name, layer in model.named_modules():
            layer.written = name
        result = solution(model, x)
        for layer in model.modules():
            del layer.written
        return result

    return answer


# ---- 23.A: the shapes of the children's outputs, and the model left as it was ----


def _shape_of_output(shapes, name):
    return lambda module, args, output: shapes.update({name: tuple(output.shape)})


def _nothing(model):
    pass


def _shapes(model, x, mode=_nothing, finish=_nothing, hook_for=_shape_of_output):
    """Output shapes with a choice of what is done before and after, as learners write it."""
    shapes = {}
    handles = [child.register_forward_hook(hook_for(shapes, name)) for name, child in model.named_children()]
    mode(model)
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    finish(model)
    return shapes


def shapes_restored(model, x):
    return _shapes(model, x, nn.Module.eval, modes_of(model))


def shapes_mode_after_error(model, x):
    restore, shapes = modes_of(model), {}
    with _hung(model.named_children(), lambda name: _shape_of_output(shapes, name)):
        model.eval()(x)
    restore(model)
    return shapes


def shapes_returned(model, x):
    def hook_for(shapes, name):
        return lambda module, args, output: shapes.setdefault(name, tuple(output.shape))

    return _shapes(model, x, hook_for=hook_for)


def shapes_of_inputs(model, x):
    def hook_for(shapes, name):
        return lambda module, args, output: shapes.update({name: args[0].shape})

    return _shapes(model, x, nn.Module.eval, modes_of(model), hook_for)


def shapes_by_default(model, x, shapes={}):  # noqa: B006
    shapes.update(output_shapes(model, x))
    return shapes


def shapes_one_by_one(model, x):
    return {name: output_shapes(model, x)[name] for name, _ in model.named_children()}


def shapes_untracked(model, x):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.track_running_stats = False
    return _shapes(model, x)


def shapes_one_name(model, x):
    restore, shapes = modes_of(model), {}
    with ExitStack() as hooks:
        for name, child in model.named_children():
            hook = lambda module, args, output: shapes.update({name: tuple(output.shape)})  # noqa: B023, E731
            hooks.enter_context(child.register_forward_hook(hook))
        model.eval()(x)
    restore(model)
    return shapes


def shapes_in_order(model, x):
    """Takes the order in which the layers run for that in which they are defined."""
    restore, shapes = modes_of(model), []
    with _hung(model.named_children(), lambda name: lambda module, args, output: shapes.append(tuple(output.shape))):
        model.eval()(x)
    restore(model)
    return dict(zip(dict(model.named_children()), shapes, strict=True))


def shapes_on_module(model, x):
    for name, child in model.named_children():
        child.__name__ = name
    return output_shapes(model, x)


def shapes_hooks_left(model, x):
    restore, shapes = modes_of(model), {}
    for name, child in model.named_children():
        child.register_forward_hook(_shape_of_output(shapes, name))
    model.eval()(x)
    restore(model)
    return shapes


def shapes_of_all(model, x):
    restore, shapes = modes_of(model), {}
    with _hung(model.named_modules(), lambda name: _shape_of_output(shapes, name)):
        model.eval()(x)
    restore(model)
    return shapes


def modes_of_children(model, x):
    """Puts back the modes of the children, and with them those of all that is inside."""
    training, modes = model.training, {child: child.training for child in model.children()}
    try:
        return output_shapes(model, x)
    finally:
        model.train(training)
        for child, mode in modes.items():
            child.train(mode)


def first_child(model, x):
    return dict([next(iter(output_shapes(model, x).items()))])


def shapes_in_training(model, x):
    """Puts the statistics back, but not when the forward raises."""
    state, shapes = {key: value.clone() for key, value in model.state_dict().items()}, {}
    with _hung(model.named_children(), lambda name: _shape_of_output(shapes, name)):
        model(x)
    model.load_state_dict(state)
    return shapes


# ---- 23.B: the leaf modules that a forward does not call ----


def _leaves(model):
    return {name: module for name, module in model.named_modules() if not list(module.children())}


def _called(model, x, modules):
    """Those of `modules` that a forward calls."""
    called = set()
    with torch.no_grad(), _hung(enumerate(modules), lambda _: lambda module, args, output: called.add(module)):
        model(x)
    return called


def never_on_the_slow_path(model, x):
    torch.backends.mha.set_fastpath_enabled(False)
    return never_called(model, x)


def never_returned(model, x):
    called, leaves = {}, _leaves(model)
    with torch.no_grad(), _hung(leaves.items(), lambda name: lambda *given: called.setdefault(name, True)):
        model(x)
    return [name for name in leaves if name not in called]


def never_global(model, x):
    called = set()
    with torch.no_grad(), register_module_forward_hook(lambda module, args, output: called.add(module)):
        model(x)
    return [name for name, module in _leaves(model).items() if module not in called]


def never_all_modules(model, x):
    called = _called(model, x, model.modules())
    return [name for name, module in model.named_modules() if module not in called]


def never_by_statistics(model, x):
    with torch.no_grad(), layer_statistics(model, "**") as stats:
        model(x)
    return [name for name in _leaves(model) if name not in stats]


def never_with_weights(model, x):
    weighted = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    return [name for name in never_called(model, x) if name in weighted]


def never_children(model, x):
    called = _called(model, x, model.children())
    return [name for name, module in model.named_children() if module not in called and not list(module.children())]


def never_by_name(model, x):
    named = model.named_modules(remove_duplicate=False)
    leaves, called = {name: module for name, module in named if not list(module.children())}, set()
    hooked = [(name, module) for name, module in leaves.items() if name != "again"]
    with torch.no_grad(), _hung(hooked, lambda name: lambda module, args, output: called.add(name)):
        model(x)
    return [name for name in leaves if name not in called]


def never_in_training(model, x):
    model.train()
    return never_called(model, x)


def never_one_name(model, x):
    called = set()
    with torch.no_grad(), ExitStack() as hooks:
        for name, module in _leaves(model).items():
            hook = lambda module, args, output: called.add(name)  # noqa: B023, E731
            hooks.enter_context(module.register_forward_hook(hook))
        model(x)
    return [name for name in _leaves(model) if name not in called]


def never_hooks_left(model, x):
    called = set()
    for module in _leaves(model).values():
        module.register_forward_hook(lambda module, args, output: called.add(module))
    with torch.no_grad():
        model(x)
    return [name for name, module in _leaves(model).items() if module not in called]


def never_no_finally(model, x):
    called, handles = set(), []
    for module in _leaves(model).values():
        handles.append(module.register_forward_hook(lambda module, args, output: called.add(module)))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return [name for name, module in _leaves(model).items() if module not in called]


def never_inverted(model, x):
    missing = never_called(model, x)
    return [name for name in _leaves(model) if name not in missing]


def never_one_by_one(model, x):
    return [name for name, module in _leaves(model).items() if not _called(model, x, [module])]


def never_by_default(model, x, called=set()):  # noqa: B006
    missing = never_called(model, x)
    called |= {module for name, module in _leaves(model).items() if name not in missing}
    return [name for name, module in _leaves(model).items() if module not in called]


def never_by_repr(model, x):
    missing = never_called(model, x)
    called = {repr(module) for name, module in _leaves(model).items() if name not in missing}
    return [name for name, module in _leaves(model).items() if repr(module) not in called]


def never_with_gradients(model, x):
    called = set()
    with register_module_forward_hook(lambda module, args, output: called.add(module)):
        model(x)
    return [name for name, module in _leaves(model).items() if module not in called]


# ---- 23.C: where NaN appears first ----


def _nan_in(value):
    if isinstance(value, tuple | list):
        return any(map(_nan_in, value))
    return isinstance(value, Tensor) and bool(value.isnan().any())


def _collect(model, x, layers, bad=_nan_in):
    """The names of the layers with a bad output, in the order in which they finish."""
    found = []
    with _hung(layers, lambda name: lambda module, args, output: found.append(name) if bad(output) else None):
        model(x)
    return found


def _first(found):
    return found[0] if found else None


def nan_last(model, x):
    found = _collect(model, x, [pair for pair in model.named_modules() if pair[0]])
    return found[-1] if found else None


def nan_at_the_end(model, x):
    return _first(_collect(model, x, model.named_modules())) if _nan_in(model(x)) else None


def nan_by_definition(model, x):
    found = _collect(model, x, model.named_modules())
    inner = [name for name in found if not any(other.startswith(f"{name}.") for other in found) and name]
    return next((name for name, _ in model.named_modules() if name in inner), None)


def nan_in_leaves(model, x):
    return _first(_collect(model, x, _leaves(model).items()))


def nan_in_first_tensor(model, x):
    def bad(output):
        while isinstance(output, tuple):
            output = output[0]
        return _nan_in(output)

    return _first(_collect(model, x, model.named_modules(), bad))


def nan_or_infinity(model, x):
    def bad(output):
        tensors = output if isinstance(output, tuple) else (output,)
        return _nan_in(output) or any(isinstance(each, Tensor) and each.isinf().any() for each in tensors)

    return _first(_collect(model, x, model.named_modules(), bad))


def nan_after_the_run(model, x):
    outputs = []
    names = _collect(model, x, model.named_modules(), lambda output: outputs.append(output) or True)
    return next((name for name, output in zip(names, outputs, strict=True) if _nan_in(output)), None)


def nan_tensors_only(model, x):
    return _first(_collect(model, x, model.named_modules(), lambda output: bool(output.isnan().any())))


def nan_of_tensors_and_nothing_else(model, x):
    """Knows of `None` among tensors, and of no number."""

    def has_nan(value):
        if value is None:
            return False
        return any(map(has_nan, value)) if isinstance(value, tuple) else bool(torch.isnan(value).any())

    return _first(_collect(model, x, model.named_modules(), has_nan))


def nan_class_names(model, x):
    return _first([type(model.get_submodule(name)).__name__ for name in _collect(model, x, model.named_modules())])


def nan_everywhere(model, x):
    def bad(output):
        return isinstance(output, Tensor) and bool(output.isnan().all())

    return _first(_collect(model, x, model.named_modules(), bad))


class _Found(Exception):
    pass


def nan_stops_early(model, x):
    name_of = {module: name for name, module in model.named_modules()}

    def hook(module, args, output):
        if _nan_in(output):
            raise _Found(name_of[module])

    for module in model.modules():
        module.register_forward_hook(hook)
    try:
        model(x)
    except _Found as found:
        return str(found)


def nan_no_finally(model, x):
    found, handles = [], []
    for name, layer in model.named_modules():
        hook = lambda module, args, output, name=name: found.append(name) if _nan_in(output) else None  # noqa: E731
        handles.append(layer.register_forward_hook(hook))
    model(x)
    for handle in handles:
        handle.remove()
    return _first(found)


def nan_returned(model, x):
    found = []

    def hook_for(name):
        def hook(module, args, output):
            if bad := _nan_in(output):
                found.append(name)
            return bad

        return hook

    with _hung(model.named_modules(), hook_for):
        model(x)
    return _first(found)


def nan_by_layer(model, x):
    seen = {}
    with _hung(model.named_modules(), lambda name: lambda module, args, output: seen.update({name: _nan_in(output)})):
        model(x)
    return next((name for name, bad in seen.items() if bad), None)


def nan_one_by_one(model, x):
    found = _collect(model, x, model.named_modules())
    alone = [name for name, layer in model.named_modules() if _collect(model, x, [(name, layer)])]
    return next((name for name in found if name in alone), None)


def nan_mode_after_error(model, x):
    restore = modes_of(model)
    name = first_nan(model.eval(), x)
    restore(model)
    return name


def nan_names_on_modules(model, x):
    for name, module in model.named_modules():
        module.__name__ = name
    return first_nan(model, x)


def first_nan_inside(model, x):
    """Forgets that the model itself may make it."""
    return _first(_collect(model, x, [named for named in model.named_modules() if named[0]]))


WRONG = {
    "23.A": {
        "statistics": _shapes,
        "left_in_eval": lambda model, x: _shapes(model, x, nn.Module.eval),
        "flags": lambda model, x: _shapes(model, x, nn.Module.eval, nn.Module.train),
        "hooks_left": shapes_hooks_left,
        "hooks_left_after_error": shapes_restored,
        "mode_after_error": shapes_mode_after_error,
        "removed_others": clearing(output_shapes),
        "swallowed": swallowing(output_shapes, {}),
        "attribute_left": shapes_on_module,
        "one_name": shapes_one_name,
        "replaced_output": shapes_returned,
        "from_before": shapes_by_default,
        "ran_often": shapes_one_by_one,
        "tracking_off": shapes_untracked,
        "grad_left_off": gradients_off(output_shapes),
        "wrong_names": shapes_of_all,
        "other_order": shapes_in_order,
        "wrong_shape": shapes_of_inputs,
        "no_tuple": lambda model, x: {name: list(shape) for name, shape in output_shapes(model, x).items()},
        "not_a_dict": lambda model, x: list(output_shapes(model, x).items()),
    },
    "23.B": {
        "called_listed": lambda model, x: list(_leaves(model)),
        "fast_path": never_global,
        "containers": never_all_modules,
        "missed_out_proj": lambda model, x: [name for name in never_called(model, x) if "out_proj" not in name],
        "missed_unused": never_children,
        "shared": never_by_name,
        "no_tensor": never_by_statistics,
        "wrong_list": never_with_weights,
        "inverted": never_inverted,
        "one_name": never_one_name,
        "mode_changed": never_in_training,
        "hooks_left": never_hooks_left,
        "hooks_left_after_error": never_no_finally,
        "swallowed": swallowing(never_called, []),
        "no_names": lambda model, x: [model.get_submodule(name) for name in never_called(model, x)],
        "not_a_list": lambda model, x: ", ".join(never_called(model, x)),
        "none_expected": lambda model, x: never_called(model, x) or None,
        "ran_often": never_one_by_one,
        "no_no_grad": never_with_gradients,
        "from_before": never_by_default,
        "look_alike": never_by_repr,
        "removed_others": clearing(never_called),
        "grad_left_off": gradients_off(never_called),
        "fast_path_off": never_on_the_slow_path,
        "replaced_output": never_returned,
    },
    "23.C": {
        "outer": lambda model, x: _first(_collect(model, x, model.named_children())),
        "later": nan_last,
        "cleaned": nan_at_the_end,
        "definition_order": nan_by_definition,
        "leaves_only": nan_in_leaves,
        "nested": nan_in_first_tensor,
        "raised": nan_tensors_only,
        "infinity": nan_or_infinity,
        "after_the_run": nan_after_the_run,
        "none_expected": lambda model, x: first_nan(model, x) or "",
        "the_model": lambda model, x: first_nan(model, x) or None,
        "hooks_left": nan_stops_early,
        "hooks_left_after_error": nan_no_finally,
        "swallowed": swallowing(first_nan, None),
        "no_such_layer": nan_class_names,
        "partly": nan_everywhere,
        "replaced_output": nan_returned,
        "called_twice": nan_by_layer,
        "ran_often": nan_one_by_one,
        "removed_others": clearing(first_nan),
        "mode_changed": lambda model, x: first_nan(model.eval(), x),
        "mode_after_error": nan_mode_after_error,
        "attribute_left": nan_names_on_modules,
        "grad_left_off": gradients_off(first_nan),
        "not_a_name": lambda model, x: _collect(model, x, model.named_modules()),
    },
}

ALSO_WRONG = [
    ("23.A", "flags", modes_of_children),
    ("23.A", "wrong_names", first_child),
    ("23.A", "statistics", shapes_in_training),
    ("23.A", "attribute_left", naming(output_shapes)),
    ("23.C", "attribute_left", naming(first_nan)),
    ("23.C", "raised", nan_of_tensors_and_nothing_else),
    ("23.C", "the_model", first_nan_inside),
]

RIGHT = []
