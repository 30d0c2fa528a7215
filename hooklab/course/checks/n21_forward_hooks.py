"""Checks of notebook 21: forward hooks."""

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from hooklab.census import hooks_on
from hooklab.course.check import (
    Exercise,
    Refused,
    expect_like,
    refuse,
    refuse_from_before,
    refuse_removing_others,
)

# ---- 21.A: a pre-hook that normalises the first argument ----


def normalise(module, mean, std):
    def hook(module, args):
        return ((args[0] - mean) / std, *args[1:])

    return module.register_forward_pre_hook(hook)


class _Scaled(nn.Module):
    """Keeps what its forward is given; its child is given a tensor that must stay as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()
        self.given: tuple = ()
        self.calls = 0

    def forward(self, x, *args, **kwargs):
        self.given = (x, args, kwargs)
        self.calls += 1
        if not isinstance(x, Tensor):
            return torch.zeros(2)
        return self.child(x * 2)


KEEP = torch.tensor([4.0])


def examine_normalise(answer):
    module, x = _Scaled(), torch.tensor([3.0, 7.0], requires_grad=True)
    original, mask, before = x.detach().clone(), torch.tensor([1.0, 0.0]), hooks_on(module)
    with torch.no_grad():
        handle = answer(module, 1.0, 2.0)
        _examine_handle(handle)
        output = _call_with_keyword(module, x, mask)
    got, args, kwargs = module.given
    _examine_caller(x.detach(), original)
    _examine_first(got, original, output)
    _examine_rest(args, kwargs, mask)
    if module.calls != 1:
        refuse("ran_twice", module_calls=module.calls)
    expect_like(got, torch.tensor([1.0, 3.0]), "x_forward")
    if not torch.equal(output, 2 * got):
        refuse("everywhere")
    _examine_again(module, handle, original)
    _examine_all_gone(before, module)
    _examine_another(answer, original)
    _examine_gradient(answer)
    refuse_removing_others(module.register_forward_pre_hook, lambda: answer(module, 1.0, 2.0))


def _call_with_keyword(module, x, mask):
    try:
        return module(x, mask, keep=KEEP)
    except TypeError as error:
        if "must be a mapping" not in str(error):
            raise
        refuse("no_pair")


def _examine_handle(handle):
    if not callable(getattr(handle, "remove", None)):
        refuse("no_handle", handle=handle)


def _examine_caller(x, original):
    if not torch.equal(x, original):
        refuse("edited_in_place", original=original.tolist(), x=x.tolist())


def _examine_first(got, original, output):
    if isinstance(got, list | tuple):
        refuse("wrapped", got=got)
    if isinstance(got, Tensor) and torch.equal(got, original):
        if isinstance(output, Tensor) and not torch.equal(output, original * 2):
            refuse("on_output")
        refuse("unchanged")


def _examine_rest(args, kwargs, mask):
    if len(args) == 1 and args[0] is not mask:
        refuse("rest_changed")
    if len(args) != 1:
        refuse("rest_lost", len=len(args) + 1)
    if len(kwargs) != 1 or kwargs.get("keep") is not KEEP:
        refuse("keywords_lost", kwargs=kwargs)


def _examine_again(module, handle, x):
    module(x + 2)
    again = module.given[0]
    if not isinstance(again, Tensor) or not torch.allclose(again, torch.tensor([2.0, 4.0])):
        refuse("first_only")
    module.eval()
    module(x + 2)
    if torch.equal(module.given[0], x + 2):
        refuse("only_in_training")
    handle.remove()
    module(x)
    if not torch.equal(module.given[0], x):
        refuse("still_there")


def _examine_all_gone(before, module):
    if left := [hook for hook in hooks_on(module) if hook not in before]:
        refuse("second_hook", kind=left[0].kind, place=left[0].place)


def _examine_another(answer, x):
    module, another = _Scaled(), _Scaled()
    handles = [answer(module, 1.0, 2.0), answer(another, 2.0, 4.0)]
    module(x)
    for handle in handles:
        handle.remove()
    if not torch.allclose(module.given[0], torch.tensor([1.0, 3.0])):
        refuse("another_module")


def _examine_gradient(answer):
    module, x = _Scaled(), torch.tensor([3.0, 7.0], dtype=torch.float64, requires_grad=True)
    answer(module, 1.0, 2.0)
    output = module(x)
    got = module.given[0]
    if got.dtype != torch.float64:
        refuse("wrong_dtype", got=got)
    if output.requires_grad:
        output.sum().backward()
    if x.grad is None:
        refuse("cut")
    if not torch.allclose(x.grad, torch.ones_like(x)):
        refuse("wrong_gradient", x_grad=x.grad.tolist())


NORMALISE = Exercise("21.A", examine_normalise, normalise)

# ---- 21.B: noise on the output, in training mode only ----


def add_noise(module, std):
    def hook(module, args, output):
        if module.training:
            return output + std * torch.randn_like(output)

    return module.register_forward_hook(hook)


STD = 0.5


def examine_add_noise(answer):
    # Half of the outputs are 0 whatever is added to the input, half are 100.
    x = torch.tensor([-100.0, 100.0]).repeat(200, 50)
    plain = x.clamp(min=0)
    module = nn.ReLU()
    before = hooks_on(module)
    handle = answer(module, STD)
    _examine_handle(handle)
    noise = _noise(module(x), plain)
    _examine_kind(noise, plain)
    second = _noise(module(x), plain)
    if torch.equal(noise, second):
        refuse("same_noise")
    _examine_shape(module)
    _examine_modes(answer, module, x, plain)
    handle.remove()
    _examine_inside(answer, x, plain)
    _examine_backward(answer)
    _examine_dtype(answer)
    if not torch.equal(module.train()(x), plain):
        refuse("still_there")
    _examine_all_gone(before, module)
    _examine_other_std(answer, x, plain)


def _noise(output, plain):
    if not isinstance(output, Tensor):
        refuse("wrong_type", output=output)
    if output.shape != plain.shape:
        refuse("wrong_shape", plain_shape=list(plain.shape), output_shape=list(output.shape))
    return output.detach() - plain


def _examine_kind(noise, plain):
    low, high = noise[plain == 0], noise[plain != 0]
    if not noise.any():
        refuse("unchanged")
    if torch.allclose(high, high.mean(), atol=5.0) and high.mean() < -50:
        refuse("noise_only")
    if low.mean() < -50:
        refuse("noisy_input")
    if not low.any():
        refuse("none_at_zero")
    if not _independent(noise):
        refuse("shared")
    mean, std = noise.mean().item(), noise.std().item()
    if abs(mean) > 0.1 * STD:
        refuse("wrong_mean", mean=mean)
    if abs(std - STD) > 0.1 * STD:
        refuse("wrong_std", std=STD, std2=std)
    if noise.abs().max() < 2.5 * STD:
        refuse("not_normal", noise=noise.numel())


def _independent(noise):
    # Rounding 100 + noise leaves equal values by chance, not whole rows or columns of them.
    rows, columns = (
        (noise - noise[:1]).abs().amax(dim=1)[1:],
        (noise[:, 2:] - noise[:, :-2]).abs().amax(dim=0),
    )
    return bool((rows > 1e-3).all() and (columns > 1e-3).all())


def _examine_shape(module):
    try:
        module(torch.ones(3, 7))
    except RuntimeError:
        refuse("one_shape")


def _examine_modes(answer, module, x, plain):
    module.eval()
    if not torch.equal(module(x), plain):
        refuse("noise_in_eval")
    if torch.equal(module.train()(x), plain):
        refuse("gone_after_eval")
    other = nn.ReLU().eval()
    handle = answer(other, STD)
    got = other.train()(x)
    handle.remove()
    if torch.equal(got, plain):
        refuse("mode_at_hanging")


def _examine_other_std(answer, x, plain):
    module, another = nn.ReLU(), nn.ReLU()
    handles = [answer(module, STD), answer(another, 10 * STD)]
    std = _noise(module(x), plain).std().item()
    for handle in handles:
        handle.remove()
    if abs(std - STD) > 0.1 * STD:
        refuse("another_module", std=10 * STD, std2=STD, std3=std)


class _Noting(nn.ReLU):
    """Notes its own output, before any hook gets it."""

    def forward(self, x: Tensor) -> Tensor:
        self.own = super().forward(x)
        return self.own


class _Doubling(nn.Module):
    """A module with another one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Noting()

    def forward(self, x: Tensor) -> Tensor:
        self.given = self.inner(x)
        return 2 * self.given


def _examine_inside(answer, x, plain):
    module = _Doubling()
    handle = answer(module, STD)
    module(x)
    handle.remove()
    if not torch.equal(module.given, plain):
        refuse("everywhere")


def _examine_backward(answer):
    module, x = _Noting(), torch.tensor([[-1.0, 2.0, 3.0]], requires_grad=True)
    handle = answer(module, STD)
    output = module(x)
    handle.remove()
    if not torch.equal(module.own.detach(), x.detach().clamp(min=0)):
        refuse("edited_in_place")
    if output.requires_grad:
        output.sum().backward()
    if x.grad is None:
        refuse("cut")
    if x.grad.tolist() != [[0, 1, 1]]:
        refuse("wrong_gradient", x_grad=x.grad[0].tolist())


def _examine_dtype(answer):
    for dtype in (torch.float64, torch.bfloat16):
        module = nn.ReLU()
        handle = answer(module, STD)
        got = module(torch.ones(2, 3, dtype=dtype)).dtype
        handle.remove()
        if got != dtype:
            refuse("wrong_dtype", dtype=dtype, got=got)


ADD_NOISE = Exercise("21.B", examine_add_noise, add_noise)

# ---- 21.C: the output shapes of all leaf layers ----


def shapes_of(model, x):
    shapes = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not list(module.children()):
                stack.enter_context(module.register_forward_hook(partial(_keep, shapes, name)))
        model(x)
    return shapes


def _keep(shapes, name, module, args, output):
    shapes[name] = _shape(output)


def _shape(output):
    if isinstance(output, tuple):
        return tuple(_shape(item) for item in output)
    return tuple(output.shape) if isinstance(output, Tensor) else None


class _Tagger(nn.Module):
    """Words to tags with an LSTM, whose output is a nested tuple; one layer runs twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.tags = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        hidden, _ = self.lstm(self.words(x))
        self.tags(hidden[:, :1])
        return self.tags(self.head(hidden))


class _Spare(nn.Module):
    """One layer that runs and one that does not; both outputs would be tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.used(x)


class _Attention(nn.Module):
    """An output of which one part is None and one is a number; another that is None as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.log = _NoWeights(), _Silent()

    def forward(self, x):
        self.log(x)
        return self.attention(x)[0]


class _NoWeights(nn.Module):
    def forward(self, x):
        return x * 2, None, 3


class _Silent(nn.Module):
    def forward(self, x):
        return None


class _Broken(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(3, 4))


class _Stumbling(nn.Module):
    def forward(self, x):
        raise IndexError("this layer fails on purpose")


def examine_shapes_of(answer):
    _examine_plain(answer)
    _examine_nested(answer)
    _examine_alone(answer)
    _examine_broken(answer, _Broken(), RuntimeError, "shapes cannot be multiplied")
    _examine_broken(answer, nn.Sequential(nn.Linear(3, 4), _Stumbling()), IndexError, "on purpose")


def _run(answer, model, x):
    """The answer's result; what it leaves on the model, and does to it, is refused."""
    before, modes = hooks_on(model), [module.training for module in model.modules()]
    shapes = answer(model, x)
    after = hooks_on(model)
    if any(hook not in after for hook in before):
        refuse("removed_others")
    if left := [hook for hook in after if hook not in before]:
        refuse("left", count_left=len(left), place=left[0].place)
    if modes != [module.training for module in model.modules()]:
        refuse("mode_changed")
    if not isinstance(shapes, dict):
        refuse("no_dict", shapes=shapes)
    return shapes


def _plain():
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


def _examine_plain(answer):
    model = _plain()
    x, want = torch.ones(5, 3), {"0": (5, 4), "1.0": (5, 4), "1.1": (5, 2)}
    expected, passed, results = model(x), [], []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: passed.append(args[0]))
    model.register_forward_hook(lambda module, args, output: results.append(output))
    try:
        shapes = _run(answer, model, x)
    except Refused:
        raise
    except Exception:
        _examine_passed([*passed, *results])
        raise
    _examine_passed([*passed, *results])
    _examine_results(results, expected)
    _examine_names(shapes, want, model)
    _examine_shapes(shapes, want)


def _examine_passed(values):
    other = [type(value).__name__ for value in values if not isinstance(value, Tensor)]
    if other:
        refuse("replaced_output", other=other[0])


def _examine_results(results, expected):
    if not results:
        refuse("by_forward")
    if len(results) > 1:
        refuse("ran_twice", count_results=len(results))
    if not torch.equal(results[0], expected):
        refuse("changed_output")


def _examine_names(shapes, want, model):
    others = {name for other in (_plain(), _Tagger(), _Attention()) for name, _ in other.named_modules()}
    refuse_from_before(shapes, model, others)
    missing, extra = (
        [name for name in want if name not in shapes],
        [name for name in shapes if name not in want],
    )
    if not missing and not extra:
        return
    found, expected = ", ".join(map(repr, shapes)) or "{}", ", ".join(map(repr, want))
    if len(want) > 1 and list(shapes) == list(want)[-1:]:
        refuse("one_entry", count_want=len(want), found=found)
    if not missing:
        refuse("extra", value=", ".join(map(repr, extra)))
    refuse("wrong_names", expected=expected, found=found)


def _examine_shapes(shapes, want):
    for name, shape in want.items():
        got = shapes[name]
        if isinstance(got, list):
            refuse("no_tuple", name=name, got=got)
        if got != shape:
            refuse("wrong_shape", name=name, shape=shape, got=got)


def _examine_alone(answer):
    try:
        shapes = _run(answer, nn.Linear(3, 2), torch.ones(4, 3))
    except KeyError:
        refuse("alone_raised")
    if shapes != {"": (4, 2)}:
        refuse("alone", shapes=shapes)


def _examine_nested(answer):
    state = ((1, 2, 4), (1, 2, 4))
    want = {
        "words": (2, 5, 6),
        "lstm": ((2, 5, 4), state),
        "head.0": (2, 5, 4),
        "head.1": (2, 5, 4),
        "tags": (2, 5, 3),
    }
    try:
        _run(answer, _Spare(), torch.ones(5, 3))
    except (KeyError, AttributeError, TypeError) as error:
        refuse("never_ran", error=error)
    for model, x, expected in (
        (_Tagger(), torch.zeros(2, 5, dtype=torch.int64), want),
        (_Attention(), torch.ones(2, 3), {"attention": ((2, 3), None, None), "log": None}),
    ):
        try:
            shapes = _run(answer, model, x)
        except (KeyError, AttributeError, TypeError) as error:
            refuse("nested", error=error)
        if shapes.get("tags") == (2, 1, 3):
            refuse("first_call")
        _examine_names(shapes, expected, model)
        _examine_shapes(shapes, expected)


def _examine_broken(answer, model, kind, said):
    before = hooks_on(model)
    try:
        answer(model, torch.ones(2, 3))
    except kind as error:
        raised = error
    else:
        raised = None
    if left := [hook for hook in hooks_on(model) if hook not in before]:
        refuse("left_after_error", count_left=len(left))
    if raised is None or said not in str(raised):
        refuse("swallowed")


SHAPES_OF = Exercise("21.C", examine_shapes_of, shapes_of)

# ---- predictions ----


EXERCISES = [NORMALISE, ADD_NOISE, SHAPES_OF]
