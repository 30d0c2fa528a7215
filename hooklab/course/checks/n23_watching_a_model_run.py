"""Checks of notebook 23: watching a model run."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, refuse, refuse_first, refuse_from_before
from hooklab.course.checks.models import Before, fails, refuse_hooks

# ---- what the three exercises share ----


class _Broken(nn.Module):
    """The first layer runs, the second one fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.second = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class _Stumbling(nn.Module):
    """The second layer raises an error that is no RuntimeError."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2)
        self.second.register_forward_pre_hook(_stumble)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _stumble(module, args):
    raise LookupError("this layer fails on purpose")


def _user_hook(module, args, output):
    """A hook that was there before."""


def _watched(model):
    """A list of what each module of the model will be given."""
    passed = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: passed.extend(args))
    return passed


def _result(answer, model, x, passed, kinds=Tensor):
    """The answer's result on a model in which only these `kinds` should pass."""
    try:
        return answer(model, x)
    except Exception:
        if other := [value for value in passed if not isinstance(value, kinds)]:
            refuse("replaced_output", other=other[0])
        raise


def _examine_failing(answer, model):
    """The forward fails in the middle: the error must come through, and the model be as it was."""
    with fails(model, (RuntimeError, LookupError)) as before:
        answer(model, torch.ones(2, 4))
    if before.changed_modes():
        refuse("mode_after_error")
    _examine_attributes(before)
    return before


def _examine_attributes(before):
    if new := before.new_attributes():
        refuse("attribute_left", new=new)


# ---- 23.A: the shapes of the children's outputs, and the model left as it was ----


def output_shapes(model, x):
    shapes, training = {}, {module: module.training for module in model.modules()}

    def hook_for(name):
        return lambda module, args, output: shapes.update({name: tuple(output.shape)})

    handles = [child.register_forward_hook(hook_for(name)) for name, child in model.named_children()]
    try:
        model.eval()
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
        for module, flag in training.items():
            module.training = flag
    return shapes


class _Mixed(nn.Module):
    """Every child changes the shape, and the last is defined first; part of `frozen` stays in eval while the rest trains."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)
        self.stem = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.frozen = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.stem(x)))


DICT = [  # what came back for `_Mixed`
    ("one_name", lambda t: list(t.got) == ["frozen"]),  # the last of them
    ("wrong_names", lambda t: t.extra or t.missing),
    ("other_order", lambda t: _all_tuples(t.got) and t.got != t.want and _sorted(t.got) == _sorted(t.want)),
]


def examine_output_shapes(answer):
    for training in (True, False):
        _examine_shapes(answer, _Mixed().train(training))
    model = nn.Sequential(OrderedDict(lens=nn.Linear(4, 3), gate=nn.ReLU()))
    refuse_from_before(answer(model, torch.ones(2, 4)), model, dict(_Mixed().named_children()))
    for broken in (_Broken(), _Stumbling()):
        broken.second.eval()
        _examine_state(_examine_failing(answer, broken))


def _examine_shapes(answer, model):
    model.frozen.eval()
    model.frozen[2].train()  # Dropout that stays on
    model.stem.register_forward_hook(_user_hook)
    runs, passed = [], _watched(model)
    model.head.register_forward_hook(lambda module, args, output: runs.append("run"))
    before = Before(model)
    got = _result(answer, model, torch.randn(3, 4), passed)
    _examine_dict(got, {"head": (3, 2), "stem": (3, 6), "frozen": (3, 5)}, model)
    _examine_state(before)
    _examine_modes(before)
    if "track_running_stats" in before.changed_attributes():
        refuse("tracking_off")
    _examine_attributes(before)
    refuse_hooks(before, "hooks_left")
    if len(runs) > 1:
        refuse("ran_often", count=len(runs))


def _examine_dict(got, want, model):
    if not isinstance(got, dict):
        refuse("not_a_dict", got=got)
    refuse_from_before(got, model, ("lens", "gate"))
    extra, missing = sorted(map(str, got.keys() - want.keys())), sorted(want.keys() - got.keys())
    refuse_first(DICT, got=got, want=want, extra=extra, missing=missing)
    for name, shape in want.items():
        if not isinstance(got[name], tuple):
            refuse("no_tuple", name=name, got=got[name])
        if got[name] != shape:
            refuse("wrong_shape", name=name, shape=shape, got=tuple(got[name]))


def _all_tuples(got):
    return all(isinstance(shape, tuple) for shape in got.values())


def _sorted(shapes):
    return sorted(str(tuple(shape)) for shape in shapes.values())


def _examine_state(before):
    if changed := before.changed_state():
        refuse("statistics", count=len(changed), changed=changed[0])


def _examine_modes(before):
    modes = before.changed_modes()
    if "" in modes and not any(module.training for module in before.model.modules()):
        refuse("left_in_eval")
    if modes:
        name, (was, now) = next(iter(modes.items()))
        refuse("flags", name=name, was=was, now=now)


SHAPES = Exercise("23.A", examine_output_shapes, output_shapes)

# ---- 23.B: the leaf modules that a forward does not call ----


def never_called(model, x):
    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    called = set()
    handles = [
        module.register_forward_hook(lambda module, args, output: called.add(module)) for module in leaves.values()
    ]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, module in leaves.items() if module not in called]


class _Reader(nn.Module):
    """A text classifier: an encoder with a fast path, a second head for training only, a layer with two names and two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.again = self.norm
        self.head = nn.Linear(8, 3)
        self.log = _Log()
        self.helper = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
        self.runs = _Shared()  # of each forward, whether gradients were on
        self.passed = _Shared()  # what `embed` has given

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        self.runs.append(torch.is_grad_enabled())
        embedded = self.embed(tokens)
        self.passed.append(embedded)
        hidden = self.again(self.again(self.encoder(embedded))).mean(dim=1)
        self.log(hidden)
        return (self.head(hidden), self.helper(hidden)) if self.training else self.head(hidden)


class _Shared(list):
    """A copy of the model notes what happens in the same list."""

    def __deepcopy__(self, memo: dict) -> "_Shared":
        return self


class _Log(nn.Module):
    """Returns nothing."""

    def forward(self, hidden: Tensor) -> None:
        hidden.mean()


class _Either(nn.Module):
    """One of two equal layers, by a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.way = nn.Linear(4, 2), nn.Linear(4, 2), "left"

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.way)(x)


NEVER = {"encoder.self_attn.out_proj", "helper.0", "helper.1", "helper.2"}

INSIDE = {"encoder.linear1", "encoder.linear2", "encoder.dropout", "encoder.norm1", "encoder.norm2"}

CALLED = {"embed", "norm", "log", "head", "encoder.dropout1", "encoder.dropout2"} | INSIDE

CONTAINERS = {"", "helper", "encoder.self_attn", "encoder"}

NAMES = [  # those found on `_Reader`, as a set
    ("inverted", lambda t: t.found == CALLED),
    ("one_name", lambda t: (CALLED | NEVER) - t.found == {"helper.2"}),  # the last of them
    ("fast_path", lambda t: t.found >= INSIDE and "embed" not in t.found),
    ("containers", lambda t: t.containers),
    ("called_listed", lambda t: t.found >= CALLED),
    ("shared", lambda t: t.found & {"again", "norm"}),
    ("missed_unused", lambda t: not any(name.startswith("helper") for name in t.found)),
    ("missed_out_proj", lambda t: "encoder.self_attn.out_proj" not in t.found),
    ("no_tensor", lambda t: t.extra == ["log"] and not t.missing),
    ("wrong_list", lambda t: t.extra or t.missing),
]


def examine_never_called(answer):
    model, tokens = _Reader().eval(), torch.zeros(2, 5, dtype=torch.long)
    model.head.register_forward_hook(_user_hook)
    before, fast = Before(model), torch.backends.mha.get_fastpath_enabled()
    try:
        got = _result(answer, model, tokens, model.passed)
    finally:
        fast_after = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fast)
    if fast and not fast_after:
        refuse("fast_path_off")
    if before.changed_modes():
        refuse("mode_changed")
    _examine_names(got)
    refuse_hooks(before, "hooks_left")
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    if (got := answer(other, torch.ones(1, 4))) is None or list(got):
        refuse("none_expected", got=got)
    _examine_other_way(answer)
    for broken in (_Broken(), _Stumbling()):
        _examine_failing(answer, broken.eval())
    if len(model.runs) != 1:
        refuse("ran_often", count=len(model.runs))
    if any(model.runs):
        refuse("no_no_grad")


def _examine_names(got):
    if not isinstance(got, list | tuple | set):
        refuse("not_a_list", got=got)
    if other := [name for name in got if not isinstance(name, str)]:
        refuse("no_names", other=other[0])
    found = set(got)
    refuse_first(
        NAMES,
        found=found,
        listed=sorted(found),
        containers=sorted(found & CONTAINERS),
        extra=sorted(found - NEVER),
        missing=sorted(NEVER - found),
    )


def _examine_other_way(answer):
    model, x = _Either().eval(), torch.ones(1, 4)
    if set(got := answer(model, x)) != {"right"}:
        refuse("look_alike", got=got)
    model.way = "right"
    if set(got := answer(model, x)) != {"left"}:
        refuse("from_before", got=got)


NEVER_CALLED = Exercise("23.B", examine_never_called, never_called)

# ---- 23.C: where NaN appears first ----


def first_nan(model, x):
    def has_nan(value):
        if isinstance(value, tuple):
            return any(map(has_nan, value))
        return isinstance(value, Tensor) and bool(value.isnan().any())

    found, handles = [], []
    for name, layer in model.named_modules():

        def hook(module, args, output, name=name):
            if has_nan(output):
                found.append(name)

        handles.append(layer.register_forward_hook(hook))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


class _Apply(nn.Module):
    """A layer that applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class _Entropy(nn.Module):
    """Its own lines make the NaN; the layer inside is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).log()


class _Backwards(nn.Module):
    """Runs its layers in the reverse of the order in which they are defined."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.log, self.early = nn.Identity(), _Apply(torch.log), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.log(self.early(x)))


class _Again(nn.Module):
    """Runs one layer before the NaN and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.log = nn.Identity(), _Apply(torch.log)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.log(self.same(x)))


X = torch.tensor([[1.0, -2.0], [4.0, 3.0]])


def _runs():
    """Models, each with the name to find, the mistake where another one is found, and a more telling one for some names."""
    block = nn.Sequential(OrderedDict(before=nn.Identity(), log=_Apply(torch.log), after=nn.Identity()))
    around, log = nn.Sequential(OrderedDict(block=block, head=nn.Linear(2, 1))), _Apply(torch.log)
    return [
        (around, "block.log", "later", {"block": "outer", "": "outer", None: "partly"}),
        (nn.Sequential(_Apply(torch.log), _Apply(torch.nan_to_num)), "0", "cleaned", {}),
        (_Backwards(), "log", "definition_order", {}),
        (nn.Sequential(_Entropy(), nn.Identity()), "0", "leaves_only", {}),
        (_Entropy(), "", "leaves_only", {None: "the_model"}),
        (nn.Sequential(_Apply(lambda x: (x, (None, 3, x.log()))), _Apply(lambda pair: pair[0])), "0", "nested", {}),
        (nn.Sequential(_Apply(lambda x: (x, None))), None, "none_expected", {}),
        (nn.Sequential(_Apply(lambda x: x / 0), nn.Identity()), None, "infinity", {}),
        (_Again(), "log", "called_twice", {}),
        (nn.Sequential(log, _Apply(lambda x: x.nan_to_num().abs() + 1), log), "0", "called_twice", {}),
        (nn.Sequential(_Apply(lambda x: x + 0), _Apply(lambda x: x.log_())), "1", "later", {"0": "after_the_run"}),
    ]


def examine_first_nan(answer):
    for model, want, otherwise, telling in _runs():
        model.register_forward_hook(_user_hook)
        passed, before = _watched(model), Before(model)
        got = _result(answer, model, X, passed, Tensor | tuple)
        if got is not None and not isinstance(got, str):
            refuse("not_a_name", got=got)
        layers = [name for name, _ in model.named_modules()]
        if got is not None and got not in layers:
            refuse("no_such_layer", got=got, layers=layers)
        if got != want:
            refuse(telling.get(got, otherwise), got=got, want=want)
        refuse_hooks(before, "hooks_left")
        if before.changed_modes():
            refuse("mode_changed")
        _examine_attributes(before)
    for broken in (_Broken(), _Stumbling()):
        _examine_failing(answer, broken)
    runs = []
    answer(nn.Sequential(_Apply(lambda x: runs.append("run") or x.log())), X)
    if len(runs) != 1:
        refuse("ran_often", count=len(runs))


FIRST_NAN = Exercise("23.C", examine_first_nan, first_nan)

EXERCISES = [SHAPES, NEVER_CALLED, FIRST_NAN]
