"""Checks of notebook 21: forward hooks."""

from collections import OrderedDict
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn, tensor

from hooklab.course.check import (
    Exercise,
    expect_like,
    refuse,
    refuse_first,
    refuse_from_before,
    refuse_removing_others,
)
from hooklab.course.checks.calls import equal, raised
from hooklab.course.checks.handles import expect_handle, hung, refuse_second_hook
from hooklab.course.checks.models import Before

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
        self.calls = 0

    def forward(self, x, *args, **kwargs):
        self.x, self.args, self.count, self.kwargs = x, args, 1 + len(args), kwargs
        self.calls += 1
        return self.child(x * 2) if isinstance(x, Tensor) else torch.zeros(2)


KEEP = tensor([4.0])

GIVEN = [  # what forward is given in the first call, `module(x, mask, keep=KEEP)`; `old` has the values of `x`
    ("edited_in_place", lambda t: not equal(t.x, t.old)),
    ("wrapped", lambda t: isinstance(t.module.x, list | tuple)),
    ("on_output", lambda t: equal(t.module.x, t.old) and not equal(t.output, t.old * 2)),
    ("unchanged", lambda t: equal(t.module.x, t.old)),
    ("rest_changed", lambda t: t.module.count == 2 and t.module.args[0] is not t.mask),
    ("rest_lost", lambda t: t.module.count != 2),
    ("keywords_lost", lambda t: len(t.module.kwargs) != 1 or t.module.kwargs.get("keep") is not KEEP),
    ("ran_twice", lambda t: t.module.calls != 1),
]

PASSED = [  # backward, in float64
    ("wrong_dtype", lambda t: t.module.x.dtype != torch.float64),
    ("cut", lambda t: t.x.grad is None),
    ("wrong_gradient", lambda t: not torch.allclose(t.x.grad, torch.ones_like(t.x))),
]


def examine_normalise(answer):
    module, x, mask = _Scaled(), tensor([3.0, 7.0], requires_grad=True), tensor([1.0, 0.0])
    old, before = x.detach().clone(), Before(module)
    with torch.no_grad():  # elsewhere an edit of `x` in place raises
        handle = answer(module, 1.0, 2.0)
        expect_handle(handle)
        try:
            output = module(x, mask, keep=KEEP)
        except TypeError as error:
            if "must be a mapping" in str(error):
                refuse("no_pair")
            raise
    refuse_first(GIVEN, module=module, x=x, old=old, mask=mask, output=output)
    expect_like(module.x, tensor([1.0, 3.0]), "x_forward")
    if not equal(output, 2 * module.x):
        refuse("everywhere")
    module(old + 2)
    if not _close(module.x, tensor([2.0, 4.0])):
        refuse("first_only")
    module.eval()(old + 2)
    if equal(module.x, old + 2):
        refuse("only_in_training")
    handle.remove()
    module(old)
    if not equal(module.x, old):
        refuse("still_there")
    refuse_second_hook(before)
    _examine_two_modules(answer, old)
    _examine_gradient(answer, old.double().requires_grad_())
    refuse_removing_others(module.register_forward_pre_hook, lambda: answer(module, 1.0, 2.0))


def _examine_two_modules(answer, x):
    module, another = _Scaled(), _Scaled()
    with hung(answer(module, 1.0, 2.0), answer(another, 2.0, 4.0)):
        module(x)
    if not _close(module.x, tensor([1.0, 3.0])):
        refuse("another_module")


def _examine_gradient(answer, x):
    module = _Scaled()
    answer(module, 1.0, 2.0)
    output = module(x)
    if output.requires_grad:
        output.sum().backward()
    refuse_first(PASSED, module=module, x=x)


def _close(got, want):
    return isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, want)


NORMALISE = Exercise("21.A", examine_normalise, normalise)

# ---- 21.B: noise on the output, in training mode only ----


def add_noise(module, std):
    def hook(module, args, output):
        if module.training:
            return output + std * torch.randn_like(output)

    return module.register_forward_hook(hook)


STD = 0.5

NOISE = [  # of the first forward: `low` where the output is 0 without it, `high` where that is 100
    ("unchanged", lambda t: not t.noise.any()),
    ("noise_only", lambda t: torch.allclose(t.high, t.high.mean(), atol=5.0) and t.high.mean() < -50),
    ("noisy_input", lambda t: t.low.mean() < -50),
    ("none_at_zero", lambda t: not t.low.any()),
    ("shared", lambda t: not _independent(t.noise)),
    ("wrong_mean", lambda t: abs(t.mean) > 0.1 * STD),
    ("wrong_std", lambda t: not _about(t.measured)),
    ("not_normal", lambda t: t.noise.abs().max() < 2.5 * STD),
]

WITHIN = [  # forward and backward of a ReLU with a module inside, for an `x` of [-1, 2, 3]
    ("everywhere", lambda t: not equal(t.module.passed, t.x)),
    ("edited_in_place", lambda t: not equal(t.module.own, t.x.clamp(min=0))),
    ("cut", lambda t: t.x.grad is None),
    ("wrong_gradient", lambda t: t.x.grad.tolist() != [0, 1, 1]),
]


class _Noting(nn.ReLU):
    """Notes what the module inside gives it, and its own output before any hook gets that."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.passed = self.inside(x)
        self.own = super().forward(self.passed)
        return self.own


def examine_add_noise(answer):
    # Half of the outputs are 0 whatever is added to the input, half are 100.
    x = tensor([-100.0, 100.0]).repeat(200, 50)
    plain, module = x.clamp(min=0), nn.ReLU()
    before = Before(module)
    handle = answer(module, STD)
    expect_handle(handle)
    noise = _noise(module(x), plain)
    parts = {"noise": noise, "count": noise.numel(), "low": noise[plain == 0], "high": noise[plain != 0]}
    refuse_first(NOISE, **parts, mean=noise.mean().item(), std=STD, measured=noise.std().item())
    if equal(_noise(module(x), plain), noise):
        refuse("same_noise")
    if raised(lambda: module(torch.ones(3, 7))):
        refuse("one_shape")
    if not equal(module.eval()(x), plain):
        refuse("noise_in_eval")
    if equal(module.train()(x), plain):
        refuse("gone_after_eval")
    _examine_new_modules(answer, x, plain)
    handle.remove()
    if not equal(module(x), plain):
        refuse("still_there")
    refuse_second_hook(before)
    module, another = nn.ReLU(), nn.ReLU()
    with hung(answer(module, STD), answer(another, 10 * STD)):
        measured = _noise(module(x), plain).std().item()
    if not _about(measured):
        refuse("another_module", other=10 * STD, std=STD, measured=measured)


def _noise(output, plain):
    if not isinstance(output, Tensor):
        refuse("wrong_type", output=output)
    if output.shape != plain.shape:
        refuse("wrong_shape", shapes=[list(plain.shape), list(output.shape)])
    return output.detach() - plain


def _independent(noise):
    # Rounding 100 + noise leaves equal values by chance, not whole rows or columns of them.
    rows, columns = noise[1:] - noise[0], noise[:, 2:] - noise[:, :-2]
    return (rows.abs().amax(dim=1) > 1e-3).all() and (columns.abs().amax(dim=0) > 1e-3).all()


def _about(measured):
    return abs(measured - STD) <= 0.1 * STD


def _examine_new_modules(answer, x, plain):
    module = nn.ReLU().eval()
    with hung(answer(module, STD)):
        got = module.train()(x)
    if equal(got, plain):
        refuse("mode_at_hanging")
    module, x = _Noting(), tensor([-1.0, 2.0, 3.0], requires_grad=True)
    with hung(answer(module, STD)):
        output = module(x)
    if output.requires_grad and equal(module.own, x.clamp(min=0)):  # of an edited output backward raises
        output.sum().backward()
    refuse_first(WITHIN, module=module, x=x)
    for dtype in (torch.float64, torch.bfloat16):
        module = nn.ReLU()
        with hung(answer(module, STD)):
            got = module(torch.ones(2, 3, dtype=dtype)).dtype
        if got != dtype:
            refuse("wrong_dtype", dtype=dtype, got=got)


ADD_NOISE = Exercise("21.B", examine_add_noise, add_noise)

# ---- 21.C: the output shapes of all leaf layers ----


def shapes_of(model, x):
    shapes = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not list(module.children()):
                stack.enter_context(module.register_forward_hook(partial(keep, shapes, name)))
        model(x)
    return shapes


def keep(shapes, name, module, args, output):
    shapes[name] = shape_of(output)


def shape_of(output):
    if isinstance(output, tuple):
        return tuple(shape_of(item) for item in output)
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


class _First(nn.Sequential):
    """The second layer never runs."""

    def forward(self, x):
        return self[0](x)


class _Layer(nn.Module):
    """Computes what it is told."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _stumble(x):
    raise IndexError("this layer fails on purpose")


PLAIN = {"0": (5, 4), "1.0": (5, 4), "1.1": (5, 2)}
TAGGER = {
    "words": (2, 5, 6),
    "lstm": ((2, 5, 4), ((1, 2, 4), (1, 2, 4))),
    "head.0": (2, 5, 4),
    "head.1": (2, 5, 4),
    "tags": (2, 5, 3),
}
ODD = {"attention": ((2, 3), None, None), "log": None}

LEFT = [  # when the function has returned
    ("removed_others", lambda t: t.before.lost_hooks()),
    ("left", lambda t: t.left),
    ("mode_changed", lambda t: t.before.changed_modes()),
    ("no_dict", lambda t: not isinstance(t.shapes, dict)),
]

RUN = [  # the outputs of the model, noted by a hook on it; `expected` is what it gives otherwise
    ("by_forward", lambda t: not t.results),
    ("ran_twice", lambda t: t.count > 1),
    ("changed_output", lambda t: not torch.equal(t.results[0], t.expected)),
]

NAMES = [  # the names in the dictionary
    ("one_entry", lambda t: t.count > 1 and t.names == t.wanted[-1:]),
    ("extra", lambda t: t.extra and not set(t.wanted) - set(t.names)),
    ("wrong_names", lambda t: set(t.wanted) != set(t.names)),
]

SHAPE = [  # of one layer
    ("no_tuple", lambda t: isinstance(t.got, list)),
    ("wrong_shape", lambda t: t.got != t.shape),
]


def examine_shapes_of(answer):
    _examine_plain(answer)
    _run(answer, _First(nn.Linear(3, 4), nn.Linear(3, 4)), torch.ones(5, 3), "never_ran")
    model = _Tagger()
    shapes = _run(answer, model, torch.zeros(2, 5, dtype=torch.int64), "nested")
    if shapes.get("tags") == (2, 1, 3):
        refuse("first_call")
    _examine_shapes(shapes, TAGGER, model)
    odd = {"log": _Layer(lambda x: None), "attention": _Layer(lambda x: (torch.ones(2, 3), None, 3))}
    model = nn.Sequential(OrderedDict(odd))
    _examine_shapes(_run(answer, model, torch.ones(2, 3), "nested"), ODD, model)
    shapes = _run(answer, nn.Linear(3, 2), torch.ones(4, 3), "alone_raised", KeyError)
    if shapes != {"": (4, 2)}:
        refuse("alone", shapes=shapes)
    _examine_broken(answer, nn.Linear(3, 4), RuntimeError, "shapes cannot be multiplied")
    _examine_broken(answer, _Layer(_stumble), IndexError, "on purpose")


def _run(answer, model, x, key=None, errors=(KeyError, AttributeError, TypeError)):
    """What the answer returns. Refused is what it leaves on the model or changes of it, and under `key` one of `errors`."""
    before = Before(model)
    try:
        shapes = answer(model, x)
    except errors as error:
        if key is None:
            raise
        refuse(key, error=error)
    left = before.new_hooks()
    refuse_first(LEFT, before=before, left=left, count=len(left), shapes=shapes)
    return shapes


def _examine_plain(answer):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))), torch.ones(5, 3)
    expected, given, results = model(x), [], []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    model.register_forward_hook(lambda module, args, output: results.append(output))
    try:
        shapes = _run(answer, model, x)
    finally:  # the next layer may raise where an output is no tensor any more
        for value in (*given, *results):
            if not isinstance(value, Tensor):
                refuse("replaced_output", value=value)
    refuse_first(RUN, results=results, count=len(results), expected=expected)
    _examine_shapes(shapes, PLAIN, model)


def _examine_shapes(shapes, want, model):
    refuse_from_before(shapes, model, {*PLAIN, *TAGGER, *ODD})
    names, wanted, extra = list(shapes), list(want), [name for name in shapes if name not in want]
    texts = {"found": _listed(names) or "{}", "expected": _listed(wanted), "too_many": _listed(extra)}
    refuse_first(NAMES, names=names, wanted=wanted, extra=extra, count=len(want), **texts)
    for name, shape in want.items():
        refuse_first(SHAPE, name=name, shape=shape, got=shapes[name])


def _listed(names):
    return ", ".join(map(repr, names))


def _examine_broken(answer, last, kind, said):
    model = nn.Sequential(nn.Linear(3, 4), last)
    before = Before(model)
    error = raised(lambda: answer(model, torch.ones(2, 3)))
    if left := before.new_hooks():
        refuse("left_after_error", count=len(left))
    if not isinstance(error, kind) or said not in str(error):
        refuse("swallowed")


SHAPES_OF = Exercise("21.C", examine_shapes_of, shapes_of)

EXERCISES = [NORMALISE, ADD_NOISE, SHAPES_OF]
