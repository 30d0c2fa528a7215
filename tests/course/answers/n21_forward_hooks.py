"""Answers to the exercises of notebook 21: wrong ones by the name of their refusal, and right ones."""

from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import nn
from torch.nn.modules import module as modules

from hooklab import select
from hooklab.course.checks.n21_forward_hooks import add_noise, keep, normalise, shape_of, shapes_of

# ---- 21.A: a pre-hook that normalises the first argument ----


_numbers: dict[str, float] = {}  # of the wrong answers that keep them in one place for all modules


def _pre_hook(first):
    """An answer whose pre-hook replaces the first argument by `first(x, mean, std)`."""

    def answer(module, mean, std):
        return module.register_forward_pre_hook(lambda module, args: (first(args[0], mean, std), *args[1:]))

    return answer


def normalise_in_place(module, mean, std):
    def hook(module, args):
        args[0].sub_(mean).div_(std)

    return module.register_forward_pre_hook(hook)


def normalise_without_return(module, mean, std):
    def hook(module, args):
        args = ((args[0] - mean) / std, *args[1:])

    return module.register_forward_pre_hook(hook)


def normalise_once(module, mean, std):
    def hook(module, args):
        handle.remove()
        return ((args[0] - mean) / std, *args[1:])

    handle = module.register_forward_pre_hook(hook)
    return handle


def normalise_in_training(module, mean, std):
    return module.register_forward_pre_hook(
        lambda module, args: ((args[0] - mean) / std, *args[1:]) if module.training else None
    )


def normalise_without_keywords(module, mean, std):
    return module.register_forward_pre_hook(
        lambda module, args, kwargs: (((args[0] - mean) / std, *args[1:]), {}), with_kwargs=True
    )


def in_data(x, mean, std):
    x = x.clone()
    x.data.sub_(mean).div_(std)
    return x


def normalise_with_two(module, mean, std):
    module.register_forward_hook(lambda module, args, output: None)
    return normalise(module, mean, std)


def normalise_by_global(module, mean, std):
    _numbers.update(mean=mean, std=std)
    return _pre_hook(lambda x, *_: (x - _numbers["mean"]) / _numbers["std"])(module, mean, std)


def normalise_for_ever(module, mean, std):
    run = module.forward
    module.forward = lambda x, *args, **kwargs: run((x - mean) / std, *args, **kwargs)
    return nn.Identity().register_forward_hook(print)


class _Cleared:
    """A handle that takes off whatever is there."""

    def __init__(self, module, handle):
        self.module = module

    def remove(self):
        self.module._forward_pre_hooks.clear()


# ---- 21.B: noise on the output, in training mode only ----


def _noise_hook(make):
    """An answer whose hook returns `make(output, std)` in training mode."""

    def answer(module, std):
        return module.register_forward_hook(lambda module, args, output: make(output, std) if module.training else None)

    return answer


def noise_by_the_mode_at_hanging(module, std):
    training = module.training

    def hook(module, args, output):
        if training and module.training:
            return output + std * torch.randn_like(output)

    return module.register_forward_hook(hook)


def noise_drawn_once(module, std):
    drawn = {}
    return _noise_hook(lambda output, std: output + drawn.setdefault(output.shape, std * torch.randn_like(output)))(
        module, std
    )


def noise_in_place(module, std):
    def hook(module, args, output):
        if module.training:
            output += std * torch.randn_like(output)

    return module.register_forward_hook(hook)


def noise_without_return(module, std):
    def hook(module, args, output):
        if module.training:
            output = output + std * torch.randn_like(output)

    return module.register_forward_hook(hook)


def noise_until_eval(module, std):
    def hook(module, args, output):
        if module.training:
            return output + std * torch.randn_like(output)
        handle.remove()

    handle = module.register_forward_hook(hook)
    return handle


def noise_with_two(module, std):
    module.register_forward_hook(lambda module, args, output: None)
    return add_noise(module, std)


def noise_of_the_first_shape(module, std):
    shapes = []

    def hook(module, args, output):
        shapes.append(output.shape)
        if module.training:
            return output + std * torch.randn(shapes[0])

    return module.register_forward_hook(hook)


def noise_for_ever(module, std):
    run = module.forward

    def forward(x):
        output = run(x)
        return output + std * torch.randn_like(output) if module.training else output

    module.forward = forward
    return nn.Identity().register_forward_hook(print)


def noise_by_global(module, std):
    _numbers.update(std=std)
    return _noise_hook(lambda output, _: output + _numbers["std"] * torch.randn_like(output))(module, std)


# ---- 21.C: the output shapes of all leaf layers ----


def _leaves(named):
    return [(name, module) for name, module in named if not list(module.children())]


def _noting(shape):
    """What makes a hook that notes `shape(output)`."""
    return lambda shapes, name: lambda module, args, output: shapes.update({name: shape(output)})


NOTING = _noting(shape_of)


def _shapes_by_hand(hook=NOTING, layers=nn.Module.named_modules, leaves=_leaves, run=nn.Module.__call__, remove=None):
    """The answer most people write, with one part exchanged."""

    def answer(model, x):
        shapes = {}
        handles = [module.register_forward_hook(hook(shapes, name)) for name, module in leaves(layers(model))]
        try:
            run(model, x)
        finally:
            remove(model) if remove else [handle.remove() for handle in handles]
        return shapes

    return answer


def shapes_late(model, x):
    shapes = {}
    with ExitStack() as stack:
        for name, module in _leaves(model.named_modules()):
            late = lambda module, args, output: shapes.update({name: shape_of(output)})  # noqa: B023, E731
            stack.enter_context(module.register_forward_hook(late))
        model(x)
    return shapes


def shapes_without_finally(model, x):
    shapes = {}
    handles = [
        module.register_forward_hook(partial(keep, shapes, name)) for name, module in _leaves(model.named_modules())
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return shapes


def shapes_by_default(model, x, shapes={}):  # noqa: B006
    shapes.update(shapes_of(model, x))
    return shapes


def shapes_of_every(model, x):
    kept = _shapes_by_hand(leaves=list)(model, x)
    return {name: kept[name] for name, _ in _leaves(model.named_modules())}


def _clear(model):
    for module in model.modules():
        module._forward_hooks.clear()


def _swallow(model, x):
    with suppress(RuntimeError):
        model(x)


WRONG = {
    "21.A": {
        "removed_others": lambda module, mean, std: _Cleared(module, normalise(module, mean, std)),
        "rest_changed": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args: tuple((one - mean) / std for one in args)
        ),
        "rest_lost": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args: (args[0] - mean) / std
        ),
        "edited_in_place": normalise_in_place,
        "unchanged": normalise_without_return,
        "wrapped": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args: [(args[0] - mean) / std, *args[1:]]
        ),
        "on_output": lambda module, mean, std: module.register_forward_hook(
            lambda module, args, output: (output - mean) / std
        ),
        "no_handle": lambda module, mean, std: normalise(module, mean, std) and None,
        "first_only": normalise_once,
        "only_in_training": normalise_in_training,
        "everywhere": lambda module, mean, std: modules.register_module_forward_pre_hook(
            lambda module, args: ((args[0] - mean) / std, *args[1:])
        ),
        "keywords_lost": normalise_without_keywords,
        "no_pair": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args, kwargs: ((args[0] - mean) / std, *args[1:]), with_kwargs=True
        ),
        "cut": _pre_hook(lambda x, mean, std: (x.detach() - mean) / std),
        "wrong_gradient": _pre_hook(in_data),
        "wrong_dtype": _pre_hook(lambda x, mean, std: (x.float() - mean) / std),
        "still_there": normalise_for_ever,
        "second_hook": normalise_with_two,
        "another_module": normalise_by_global,
        "ran_twice": lambda module, mean, std: module.register_forward_hook(
            lambda module, args, kwargs, output: module.forward((args[0] - mean) / std, *args[1:], **kwargs),
            with_kwargs=True,
        ),
        "wrong_values": _pre_hook(lambda x, mean, std: x - mean / std),
    },
    "21.B": {
        "noise_in_eval": lambda module, std: module.register_forward_hook(
            lambda module, args, output: output + std * torch.randn_like(output)
        ),
        "mode_at_hanging": noise_by_the_mode_at_hanging,
        "same_noise": noise_drawn_once,
        "edited_in_place": noise_in_place,
        "unchanged": noise_without_return,
        "none_at_zero": lambda module, std: module.register_forward_pre_hook(
            lambda module, args: args[0] + std * torch.randn_like(args[0]) if module.training else None
        ),
        "noisy_input": lambda module, std: module.register_forward_hook(
            lambda module, args, output: args[0] + std * torch.randn_like(args[0])
        ),
        "noise_only": _noise_hook(lambda output, std: std * torch.randn_like(output)),
        "shared": _noise_hook(lambda output, std: output + std * torch.randn(1)),
        "wrong_mean": _noise_hook(lambda output, std: output + std * torch.rand_like(output)),
        "wrong_std": _noise_hook(lambda output, std: output + torch.randn_like(output)),
        "not_normal": _noise_hook(lambda output, std: output + (torch.rand_like(output) - 0.5) * (12**0.5) * std),
        "wrong_dtype": _noise_hook(lambda output, std: output + std * torch.randn(output.shape)),
        "wrong_type": _noise_hook(lambda output, std: (output + std * torch.randn_like(output),)),
        "wrong_shape": _noise_hook(lambda output, std: output + std * torch.randn(1, *output.shape)),
        "one_shape": noise_of_the_first_shape,
        "wrong_gradient": _noise_hook(torch.normal),  # its gradient is 0
        "still_there": noise_for_ever,
        "cut": _noise_hook(lambda output, std: output.detach() + std * torch.randn_like(output)),
        "no_handle": lambda module, std: add_noise(module, std) and None,
        "gone_after_eval": noise_until_eval,
        "second_hook": noise_with_two,
        "another_module": noise_by_global,
        "everywhere": lambda module, std: modules.register_module_forward_hook(
            lambda module, args, output: output + std * torch.randn_like(output) if module.training else None
        ),
    },
    "21.C": {
        "one_entry": shapes_late,
        "left_after_error": shapes_without_finally,
        "left": _shapes_by_hand(remove=lambda model: None),
        "removed_others": _shapes_by_hand(remove=_clear),
        "swallowed": _shapes_by_hand(run=_swallow),
        "nested": _shapes_by_hand(_noting(lambda output: tuple(output.shape))),
        "first_call": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.setdefault(name, shape_of(output)) and None
        ),
        "replaced_output": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.setdefault(name, shape_of(output))
        ),
        "alone": _shapes_by_hand(layers=lambda model: [pair for pair in model.named_modules() if pair[0]]),
        "alone_raised": _shapes_by_hand(layers=lambda model: select(model, "**").items()),
        "extra": _shapes_by_hand(leaves=list),
        "from_before": shapes_by_default,
        "never_ran": shapes_of_every,
        "wrong_names": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.update({type(module).__name__: shape_of(output)})
        ),
        "by_forward": _shapes_by_hand(run=lambda model, x: model.forward(x)),
        "ran_twice": _shapes_by_hand(run=lambda model, x: (model(x), model(x))),
        "changed_output": _shapes_by_hand(
            lambda shapes, name: (
                lambda module, args, output: shapes.update({name: shape_of(output)}) or torch.zeros_like(output)
            )
        ),
        "no_dict": lambda model, x: list(shapes_of(model, x).items()),
        "mode_changed": _shapes_by_hand(run=lambda model, x: model.eval()(x)),
        "no_tuple": _shapes_by_hand(_noting(lambda output: list(output.shape))),
        "wrong_shape": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.update({name: shape_of(args[0])})
        ),
    },
}


def none_is_the_only_other(output):
    """Takes all that is neither a tuple nor None for a tensor."""
    if isinstance(output, tuple):
        return tuple(map(none_is_the_only_other, output))
    return None if output is None else tuple(output.shape)


def tidies_up_after_runtime_errors(model, x):
    """Any other error leaves the hooks."""
    shapes = {}
    handles = [
        module.register_forward_hook(partial(keep, shapes, name)) for name, module in _leaves(model.named_modules())
    ]
    try:
        model(x)
    except RuntimeError:
        [handle.remove() for handle in handles]
        raise
    [handle.remove() for handle in handles]
    return shapes


def normalise_every_such(module, mean, std):
    """All modules of the same class."""
    return modules.register_module_forward_pre_hook(
        lambda other, args: ((args[0] - mean) / std, *args[1:]) if type(other) is type(module) else None
    )


def noisy(output):
    return output + 0.5 * torch.randn_like(output)


def normalises_keywords(module, mean, std):
    def hook(module, args, kwargs):
        first, *rest = args
        kwargs = {
            key: (value - mean) / std if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()
        }
        return ((first - mean) / std, *rest), kwargs

    return module.register_forward_pre_hook(hook, with_kwargs=True)


ALSO_WRONG = [
    # An empty tuple for an output that is None.
    ("21.C", "wrong_shape", _shapes_by_hand(_noting(lambda output: shape_of(output) or ()))),
    ("21.A", "keywords_lost", normalises_keywords),
    ("21.A", "another_module", normalise_every_such),
    ("21.C", "nested", _shapes_by_hand(_noting(none_is_the_only_other))),
    ("21.C", "left_after_error", tidies_up_after_runtime_errors),
]

RIGHT = [
    ("21.A", _pre_hook(lambda x, mean, std: (x - mean) / (std + 1e-6))),
    (
        "21.B",
        lambda module, std: module.register_forward_hook(
            lambda module, args, output: noisy(output) if module.training else None, prepend=True
        ),
    ),
    (
        "21.B",
        lambda module, std: modules.register_module_forward_hook(
            lambda other, args, output: noisy(output) if other is module and module.training else None
        ),
    ),
]
