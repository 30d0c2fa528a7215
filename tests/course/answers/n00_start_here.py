"""Answers to the exercises of notebook 00: wrong ones by the name of their refusal, and right ones."""

import torch
from torch.nn.modules import module as modules

from hooklab.course.checks.n00_start_here import peek

# ---- 00.A: a hook that halves the gradient ----


def edited_in_place(grad):
    grad *= 0.5
    return grad


def returned_nothing(grad):
    grad / 2


# ---- 00.B: run a model once, look at the shape inside it, leave no trace ----


def hang(child):
    """The list into which a forward hook on `child` puts the shapes of outputs, and the handle."""
    shapes = []
    return shapes, child.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))


def left_behind(model, name, x):
    shapes, _ = hang(model.get_submodule(name))
    return model(x), shapes[0]


def left_after_error(model, name, x):
    shapes, handle = hang(model.get_submodule(name))
    output = model(x)
    handle.remove()
    return output, shapes[0]


def never_put_back(model, name, x):
    shapes, child = [], model.get_submodule(name)
    run = child.forward

    def forward(*args):
        output = run(*args)
        shapes.append(tuple(output.shape))
        return output

    child.forward = forward
    return model(x), shapes[0]


def forward_replaced(model, name, x):
    """Puts the old `forward` back, but not after an error."""
    child = model.get_submodule(name)
    run = child.forward
    result = never_put_back(model, name, x)
    child.forward = run
    return result


def another_error(model, name, x):
    shapes, handle = hang(model.get_submodule(name))
    try:
        output = model(x)
    finally:
        handle.remove()
        shape = shapes[0]
    return output, shape


def removed_others(model, name, x):
    output, shape = left_behind(model, name, x)
    model.get_submodule(name)._forward_hooks.clear()
    return output, shape


def removed_others_after_error(model, name, x):
    child = model.get_submodule(name)
    shapes, handle = hang(child)
    try:
        output = model(x)
    except Exception:
        child._forward_hooks.clear()
        raise
    handle.remove()
    return output, shapes[0]


def replaced_output(model, name, x):
    shapes = {}
    child = model.get_submodule(name)
    handle = child.register_forward_hook(lambda module, args, output: shapes.setdefault("shape", output.shape))
    try:
        return model(x), shapes["shape"]
    finally:
        handle.remove()


def called_forward(model, name, x):
    hidden = model.inner.forward(x)
    return model.head(hidden), tuple(hidden.shape)


def detached(model, name, x):
    with torch.no_grad():
        return peek(model, name, x)


def direct_children(model, name, x):
    shapes, handle = hang(getattr(model, name))
    try:
        return model(x), shapes[0]
    finally:
        handle.remove()


def hid_the_error(model, name, x):
    try:
        return peek(model, name, x)
    except Exception:
        return None, None


def by_the_end_of_the_name(model, name, x):
    return peek(model, next(full for full, _ in reversed(list(model.named_modules())) if full.endswith(name)), x)


def hooked_everywhere(model, name, x):
    """Takes its global hook off, but not after an error."""
    shapes, child = [], model.get_submodule(name)
    handle = modules.register_module_forward_hook(
        lambda module, args, output: shapes.append(tuple(output.shape)) if module is child else None
    )
    output = model(x)
    handle.remove()
    return output, shapes[0]


def hooked_on_the_model(model, name, x):
    """Finds out on the model itself when the run is over."""
    handle = model.register_forward_hook(lambda *given: None)
    result = peek(model, name, x)
    handle.remove()
    return result


WRONG = {
    "00.A": {
        "edited_in_place": edited_in_place,
        "returned_nothing": returned_nothing,
        "wrong_values": lambda grad: grad * 2,
        "wrong_shape": lambda grad: grad.sum() / 2,
        "wrong_type": lambda grad: [g / 2 for g in grad.tolist()],
        "wrong_dtype": lambda grad: (grad / 2).float(),
        "raised": lambda grad: gradient / 2,  # noqa: F821
    },
    "00.B": {
        "changed_given": lambda model, name, x: peek(model.eval(), name, x),
        "left_behind": left_behind,
        "left_after_error": left_after_error,
        "forward_replaced": forward_replaced,
        "another_error": another_error,
        "removed_others": removed_others,
        "removed_others_after_error": removed_others_after_error,
        "another_of_the_name": by_the_end_of_the_name,
        "replaced_output": replaced_output,
        "shape_alone": lambda model, name, x: peek(model, name, x)[1],
        "raised": lambda model, name, x: peek(model, name, x.shape),
        "wrong_call_count": called_forward,
        "detached": detached,
        "direct_children": direct_children,
        "hid_the_error": hid_the_error,
        "swapped": lambda model, name, x: peek(model, name, x)[::-1],
        "not_a_pair": lambda model, name, x: model(x),
        "wrong_output_shape": lambda model, name, x: (output := model(x), tuple(output.shape)),
    },
}

ALSO_WRONG = [
    ("00.B", "left_after_error", hooked_everywhere),
    ("00.B", "left_after_error", hooked_on_the_model),
    ("00.B", "forward_replaced", never_put_back),
]

RIGHT = [
    ("00.B", lambda model, name, x: list(peek(model, name, x))),
]
