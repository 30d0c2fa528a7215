"""Checks of notebook 24: extracting features."""

from contextlib import contextmanager, suppress
from copy import deepcopy

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, Phrase, expect_like, refuse, refuse_first, refuse_from_before, said
from hooklab.course.checks.calls import close, equal, outcome
from hooklab.course.checks.models import Before, fails, refuse_hooks
from hooklab.layers.features import features

# ---- what the exercises share ----

GRAPH = [  # a tensor with the right values
    ("requires_grad", lambda t: t.got.requires_grad and t.got.is_leaf),
    ("keeps_graph", lambda t: t.got.requires_grad),
]

MODES = [("mode_changed", lambda t: t.modes)]  # for a model that is in one mode as a whole

LEFT = [
    ("froze", lambda t: t.before.frozen()),
    ("thawed", lambda t: t.before.thawed()),
    ("changed_attributes", lambda t: t.changed),
]


def _examine_left(before, mistakes=MODES):
    """What the answer has left on the model, or changed of it."""
    refuse_hooks(before, "left_behind")
    modes = before.changed_modes()
    refuse_first(mistakes, modes=modes, name=next(iter(modes), None))
    refuse_first(LEFT, before=before, changed=before.changed_attributes())


@contextmanager
def _grad_stays_off():
    """The answer is called where gradients are off, and has to leave them off."""
    with torch.no_grad():
        yield
        if torch.is_grad_enabled():
            refuse("grad_switched_on")


def _examine_double(got):
    if isinstance(got, Tensor) and got.dtype != torch.float64:
        refuse("float32_only", got=got)


# ---- 24.A: the output of one layer, by hand ----


def feature(model, name, x):
    kept = {}

    def keep(module, args, output):
        kept[name] = output.detach().clone()

    with model.get_submodule(name).register_forward_hook(keep):
        model(x)
    return kept[name]


class _Net(nn.Module):
    """A ReLU in place after `body.0`; only input with a mean above 0 goes through `extra`, edited by `*=`."""

    error = ValueError  # raised before the body

    def __init__(self, *, fails: str = ""):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True))
        self.extra, self.head, self.fails = nn.Linear(5, 5), nn.Linear(5, 2), fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "before":
            raise self.error("this model always fails")
        hidden = self.body(x)
        if self.fails == "behind":
            raise RuntimeError("this model always fails")
        if x.mean() > 0:
            hidden = self.extra(hidden)
            hidden *= 2
        return self.head(hidden)


BRIGHT, DARK = torch.tensor([[1.0, 2.0, 3.0], [4.0, -1.0, 0.5]]), torch.tensor([[-1.0, -2.0, 0.5]])

RUN = [  # what the hooks of the check have seen of the first run, and what came back
    ("edited_input", lambda t: not torch.equal(t.x, BRIGHT)),
    ("not_called", lambda t: not t.passed),
    ("ran_twice", lambda t: len(t.passed) > 2),
    ("replaced_output", lambda t: len(set(t.passed)) > 1),
    ("ready_made", lambda t: "hooklab.layers.features" in t.tools),
    ("stopped", lambda t: not t.finished),
    ("cut_in_place", lambda t: any(t.cut)),
    ("by_forward", lambda t: not t.calls),
    ("returned_nothing", lambda t: t.got is None),
    ("overwritten", lambda t: equal(t.got, t.want.clamp(min=0))),
]

UNREACHED = [  # what comes of a layer that this input does not reach, after one that did
    ("other_error", lambda t: isinstance(t.got, Exception) and not isinstance(t.got, KeyError)),
    ("stale", lambda t: equal(t.got, t.bright)),
    ("no_error", lambda t: not isinstance(t.got, KeyError)),
]


def examine_feature(answer):
    model, x = _Net(), BRIGHT.clone()
    body, want = model.body, model.body[0](BRIGHT).detach()
    calls, tools, passed, cut, finished = [], [], [], [], []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    model.register_forward_pre_hook(lambda module, args: tools.extend(_written_in(body[0])))
    body[0].register_forward_hook(lambda module, args, output: passed.append(output.data_ptr()))
    body[1].register_forward_pre_hook(lambda module, args: passed.append(args[0].data_ptr()))
    body[1].register_forward_pre_hook(lambda module, args: cut.append(_is_cut(args[0], body[0].weight)))
    model.head.register_forward_hook(lambda module, args, output: finished.append(1))
    before = Before(model)
    got = answer(model, "body.0", x)
    refuse_first(RUN, x=x, passed=passed, tools=tools, finished=finished, cut=cut, calls=calls, got=got, want=want)
    expect_like(got, want)
    refuse_first(GRAPH, got=got)
    _examine_left(before)
    with _grad_stays_off():
        answer(_Net(), "body.0", BRIGHT.clone())
    _examine_failing(answer)
    _examine_unreached(answer)


def _written_in(layer):
    """The modules that the forward hooks of a layer come from."""
    functions = [getattr(hook, "func", hook) for hook in layer._forward_hooks.values()]  # of a partial, what it calls
    return [getattr(function, "__module__", "") for function in functions]


def _is_cut(output, weight):
    """Whether the output of a layer with this weight has lost its graph, where it must have one."""
    return torch.is_grad_enabled() and weight.requires_grad and not output.requires_grad


def _examine_failing(answer):
    model = _Net(fails="behind")
    model.body[0].register_forward_hook(lambda *args: None)
    before = Before(model)
    with suppress(Exception):  # whether it is the model's own error, the next call shows
        answer(model, "body.0", BRIGHT.clone())
    refuse_hooks(before, "left_after_error")
    for error in (ValueError, RuntimeError):
        model = _Net(fails="before")
        model.error = error
        if not isinstance(got := outcome(answer, model, "body.0", BRIGHT.clone()), error):
            refuse("hid_error", error=error, got=got)


def _examine_unreached(answer):
    model = _Net()
    with torch.no_grad():
        want = model.extra(model.body(BRIGHT))
    bright = answer(model, "extra", BRIGHT.clone())
    if close(bright, 2 * want):
        refuse("overwritten_by_hand")
    expect_like(bright, want, "output_extra")
    _examine_double(answer(_Net().double(), "body.0", BRIGHT.double()))
    refuse_first(UNREACHED, got=outcome(answer, model, "extra", DARK.clone()), bright=bright)


FEATURE = Exercise("24.A", examine_feature, feature)

# ---- 24.B: embeddings, batch by batch ----


def embed(model, name, batches):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), features(model, name, keep=lambda t: t.mean((2, 3))) as f:
            return torch.cat([f.run(batch)[name] for batch in batches])
    finally:
        for module, training in modes.items():
            module.training = training


class _Images(nn.Module):
    """The stem is frozen, its batch norm in evaluation mode, the rest trains; a ReLU in place follows `norm`."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.drop, self.conv, self.norm = nn.Dropout(0.5), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(6, 2)
        self.stem.requires_grad_(False)[1].eval()
        nn.init.normal_(self.norm.bias)  # so that its output is not that of `conv`

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.norm(self.conv(self.drop(self.stem(x))))).mean((2, 3)))


BATCHES = [  # what the hooks of the check have seen of the batches, and what came back for them
    ("not_called", lambda t: not t.sizes),
    ("train_mode", lambda t: any(t.training)),
    ("dropout_on", lambda t: any(t.dropping)),
    ("not_batch_by_batch", lambda t: t.sizes != [4, 4, 1]),
    ("returned_nothing", lambda t: t.got is None),
    ("not_joined", lambda t: t.count is not None),
    ("last_batch_only", lambda t: isinstance(t.got, Tensor) and t.got.ndim and len(t.got) == 1),
    ("overwritten", lambda t: close(t.got, t.ruined)),
]

MODES_OF_IMAGES = [
    ("left_in_eval", lambda t: "" in t.modes),
    ("unfroze", lambda t: "stem.1" in t.modes),
    ("part_left_in_eval", lambda t: t.modes),
]


def examine_embed(answer):
    model, sizes, training, dropping, building = _Images(), [], [], [], []
    batches = [torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8), torch.randn(1, 1, 8, 8)]
    want = embed(deepcopy(model), "norm", batches)
    ruined = embed(deepcopy(model), "relu", batches)
    model.drop.register_forward_pre_hook(lambda module, args: dropping.append(module.training))
    model.norm.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    model.norm.register_forward_pre_hook(lambda module, args: training.append(module.training))
    model.norm.register_forward_pre_hook(lambda module, args: building.append(args[0].requires_grad))
    model.norm.register_forward_hook(lambda *args: None)
    before = Before(model)
    got = answer(model, "norm", batches)
    count = len(got) if isinstance(got, list | tuple) else None
    refuse_first(BATCHES, sizes=sizes, training=training, dropping=dropping, got=got, count=count, ruined=ruined)
    expect_like(got, want)
    refuse_first(GRAPH, got=got)
    if any(building):
        refuse("graph_built")
    _examine_left(before, MODES_OF_IMAGES)
    _examine_another(answer, model)
    _examine_embed_failing(answer)


def _examine_another(answer, model):
    """Another layer, other sizes, a second call; where the caller has switched gradients off; a generator; another dtype."""
    batches = [torch.randn(2, 1, 9, 7), torch.randn(3, 1, 9, 7)]
    want = embed(deepcopy(model), "conv", batches)
    with _grad_stays_off():
        got = answer(model, "conv", batches)
    if not close(got, want):
        refuse("first_call_only", want=tuple(want.shape), found=_found(got))
    got = outcome(answer, model, "conv", (batch for batch in batches))
    if not close(got, want):
        refuse("walked_twice", want=tuple(want.shape), found=_found(got))
    _examine_double(answer(model.double(), "conv", [batch.double() for batch in batches]))


def _found(got):
    if isinstance(got, Exception):
        return said(got)
    return tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__


def _examine_embed_failing(answer):
    """The second batch does not fit the model: the error must come through, and the model be as before."""
    model = _Images()
    with fails(model, Exception) as before:
        answer(model, "conv", [torch.randn(2, 1, 8, 8), torch.randn(2, 3, 8, 8)])
    if before.changed_modes():
        refuse("mode_after_error")


EMBED = Exercise("24.B", examine_embed, embed)

# ---- 24.C: whose output was overwritten later ----


def overwritten(model, x):
    seen, handles = [], []
    for name, module in model.named_modules():

        def keep(module, args, output, name=name):
            seen.append((name, output, output._version))

        handles.append(module.register_forward_hook(keep))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(name for name, output, version in seen if output._version != version))


class _Mixed(nn.Module):
    """A ReLU in place, one that is not, a `+=`, and an edit in place of what a Sequential returned."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.plain, self.relu, self.second = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
        self.pair, self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.plain(self.block(x)))
        added = self.second(hidden)
        added += x
        return self.head(self.pair(added).mul_(2))


class _Twice(nn.Module):
    """Each layer is called twice; of `first` the first output is edited, of `second` the second, of `both` either."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.both = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.both(self.both(x).mul_(2)).mul_(2)
        hidden = self.second(self.first(self.first(hidden).mul_(2)))
        return self.second(hidden).mul_(2).sum()


EDITED = {"block.0", "second", "pair", "pair.1"}

EDITED_OF_TWICE = {"first", "second", "both"}

NAMES = [  # those found on `_Mixed`, as a set; `block` returns what `block.1` returns
    ("only_culprits", lambda t: t.got == {"block.1"}),
    ("last_name", lambda t: t.got == {"head"}),
    ("nothing_found", lambda t: not t.got),
    ("children_only", lambda t: t.got == {"second", "pair"}),
    ("counted_culprit", lambda t: t.got - {"block"} == EDITED | {"block.1"}),
    ("relu_only", lambda t: t.got == {"block.0"}),
]

LIST = [  # what came back
    ("returned_nothing", lambda t: t.got is None),
    ("not_a_list", lambda t: not isinstance(t.got, list | tuple | set)),
    ("not_names", lambda t: not all(isinstance(name, str) for name in t.got)),
]


def examine_overwritten(answer):
    model, calls = _Mixed(), []
    model.block.register_forward_hook(lambda *args: None)
    model.register_forward_hook(lambda *args: calls.append(1))
    got = set(_names_found(answer, model, torch.randn(6, 4)))
    refuse_first(NAMES, got=got)
    _expect_names(got, EDITED, "small_model")
    if not calls:
        refuse("by_forward")
    if len(calls) > 1:
        refuse("ran_twice", count=len(calls))
    _examine_twice(answer)
    unchanged = nn.Sequential(nn.Softplus(), nn.ReLU(inplace=True), nn.Linear(4, 2))
    if set(_names_found(answer, unchanged, torch.randn(6, 4))) != {"0"}:
        refuse("by_values")
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 2))  # the second layer cannot take what the first one gives
    with fails(model, RuntimeError, "hid_error", "left_after_error"):
        answer(model, torch.randn(6, 4))
    _examine_squeezenet(answer)


def _names_found(answer, model, x):
    before = Before(model)
    got = answer(model, x)
    refuse_first(LIST, got=got)
    refuse_from_before(got, model, EDITED | EDITED_OF_TWICE)
    _examine_left(before)
    return list(got)


def _expect_names(got, want, where):
    if got != want:
        missing, extra = (sorted(names)[:3] for names in (want - got, got - want))
        refuse("wrong_names", where=Phrase(where), missing=missing, extra=extra)


def _examine_twice(answer):
    names = _names_found(answer, _Twice(), torch.randn(6, 4))
    if set(names) < EDITED_OF_TWICE:
        refuse("one_call", got=sorted(set(names)))
    _expect_names(set(names), EDITED_OF_TWICE, "twice")
    if doubled := [name for name in names if names.count(name) > 1]:
        refuse("name_twice", doubled=doubled[0])


def _examine_squeezenet(answer):
    from torchvision.models import squeezenet1_1

    model, x = squeezenet1_1().eval(), torch.randn(1, 3, 48, 48)
    _expect_names(set(_names_found(answer, model, x)), set(overwritten(model, x)), "squeezenet")


OVERWRITTEN = Exercise("24.C", examine_overwritten, overwritten)

EXERCISES = [FEATURE, EMBED, OVERWRITTEN]
