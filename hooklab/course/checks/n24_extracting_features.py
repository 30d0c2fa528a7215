"""Checks of notebook 24: extracting features."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from hooklab.census import hooks_on
from hooklab.course.check import Exercise, expect_like, refuse, refuse_from_before, said
from hooklab.layers.features import features


class _Hooks:
    """Sees which hooks were there before; takes global ones off again that an answer leaves."""

    def __init__(self, model):
        self.model, self.before = model, len(hooks_on(model))
        self.everywhere = dict(_global_forward_hooks)

    def left(self):
        """How many hooks more than before."""
        more = len(hooks_on(self.model)) - self.before
        _global_forward_hooks.clear()
        _global_forward_hooks.update(self.everywhere)
        return more

    @staticmethod
    def examine(more):
        if more > 0:
            refuse("left_behind", more=more)
        if more < 0:
            refuse("removed_others")


# ---- 24.A: the output of one layer, by hand ----


def feature(model, name, x):
    kept = {}

    def keep(module, args, output):
        kept[name] = output.detach().clone()

    with model.get_submodule(name).register_forward_hook(keep):
        model(x)
    return kept[name]


def _attributes(model):
    """The attributes of each module, without what is called `training`; flags such as `inplace` with their value."""
    return {
        (name, key): value if isinstance(value, bool | int | float | str) else None
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key != "training" and getattr(value, "__func__", None) is not type(module).forward
    }


def _examine_attributes(model, before):
    now = _attributes(model)
    if now != before:
        changed = sorted({key for _, key in dict(now.items() ^ before.items())})
        refuse("changed_attributes", changed=changed)


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


def examine_feature(answer):
    torch.manual_seed(0)
    model, passed, calls, cut = _Net(), [], [], []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    model.body[1].register_forward_pre_hook(lambda module, args: cut.append(_is_cut(args[0], model.body[0].weight)))
    want = model.body[0](BRIGHT).detach()
    tools, finished = [], []
    model.register_forward_pre_hook(lambda module, args: tools.extend(_written_in(module.body[0])))
    model.head.register_forward_hook(lambda module, args, output: finished.append(1))
    model.body[0].register_forward_hook(lambda module, args, output: passed.append(output.data_ptr()))
    model.body[1].register_forward_pre_hook(lambda module, args: passed.append(args[0].data_ptr()))
    hooks, attributes, x = _Hooks(model), _attributes(model), BRIGHT.clone()
    try:
        got = answer(model, "body.0", x)
    finally:
        more = hooks.left()
    _examine_input(x, BRIGHT)
    _examine_run(passed)
    if "hooklab.layers.features" in tools:
        refuse("ready_made")
    if not finished:
        refuse("stopped")
    if any(cut):
        refuse("cut_in_place")
    _examine_calls(calls[:1])
    _examine_feature_value(got, want)
    if not model.training:
        refuse("mode_changed")
    hooks.examine(more)
    _examine_frozen(model, [True] * len(list(model.parameters())))
    _examine_attributes(model, attributes)
    _examine_where_grad_is_off(lambda: answer(_Net(), "body.0", BRIGHT.clone()))
    _examine_failing(answer)
    _examine_unreached(answer)


def _written_in(layer):
    """The modules that the forward hooks of a layer come from."""
    functions = [getattr(hook, "func", hook) for hook in layer._forward_hooks.values()]  # of a partial, what it calls
    return [getattr(function, "__module__", "") for function in functions]


def _is_cut(output, weight):
    """Whether the output of a layer with this weight has lost its graph, where it must have one."""
    return torch.is_grad_enabled() and weight.requires_grad and not output.requires_grad


def _examine_input(x, before):
    if not torch.equal(x, before):
        refuse("edited_input")


def _examine_run(passed):
    if not passed:
        refuse("not_called")
    if len(passed) > 2:
        refuse("ran_twice")
    if len(passed) == 2 and passed[0] != passed[1]:
        refuse("replaced_output")


def _examine_feature_value(got, want):
    if got is None:
        refuse("returned_nothing")
    if isinstance(got, Tensor) and got.shape == want.shape and torch.equal(got.detach(), want.clamp(min=0)):
        refuse("overwritten")
    expect_like(got, want)
    _examine_leaf(got)
    if got.requires_grad:
        refuse("keeps_graph")


def _examine_leaf(got):
    if got.requires_grad and got.is_leaf:
        refuse("requires_grad")


def _examine_where_grad_is_off(run):
    with torch.no_grad():
        run()
        switched_on = torch.is_grad_enabled()
    if switched_on:
        refuse("grad_switched_on")


def _examine_frozen(model, before):
    now = [param.requires_grad for param in model.parameters()]
    if any(was and not still for was, still in zip(before, now, strict=True)):
        refuse("froze")
    if now != before:
        refuse("thawed")


def _examine_failing(answer):
    model = _Net(fails="behind")
    model.body[0].register_forward_hook(lambda *args: None)
    hooks = _Hooks(model)
    try:
        answer(model, "body.0", BRIGHT.clone())
    except Exception:  # whether it is the model's own error, the next call shows
        pass
    finally:
        left = hooks.left()
    if left < 0:
        hooks.examine(left)
    if left:
        refuse("left_after_error")
    for error in (ValueError, RuntimeError):
        _examine_error(answer, error)


def _examine_error(answer, error):
    model = _Net(fails="before")
    model.error = error
    try:
        got = answer(model, "body.0", BRIGHT.clone())
    except error:
        return
    except Exception as other:
        got = other
    refuse("hid_error", error___name__=error.__name__, got=got)


def _examine_unreached(answer):
    model = _Net()
    with torch.no_grad():
        want = model.extra(model.body(BRIGHT))
    bright = answer(model, "extra", BRIGHT.clone())
    if isinstance(bright, Tensor) and bright.shape == want.shape and torch.allclose(bright.detach(), 2 * want):
        refuse("overwritten_by_hand")
    expect_like(bright, want, "output_extra")
    _examine_double(answer(_Net().double(), "body.0", BRIGHT.double()))
    try:
        got = answer(model, "extra", DARK.clone())
    except KeyError:
        return
    except Exception as error:
        refuse("other_error", error=error)
    if isinstance(got, Tensor) and got.shape == bright.shape and torch.equal(got, bright):
        refuse("stale")
    refuse("no_error", got=got)


def _examine_double(got):
    if isinstance(got, Tensor) and got.dtype != torch.float64:
        refuse("float32_only", got=got)


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


def examine_embed(answer):
    torch.manual_seed(0)
    model, seen, dropping, building = _Images(), [], [], []
    batches = [torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8), torch.randn(1, 1, 8, 8)]
    want = embed(deepcopy(model), "norm", batches)
    ruined = embed(deepcopy(model), "relu", batches)
    model.norm.register_forward_pre_hook(lambda module, args: seen.append((len(args[0]), module.training)))
    model.drop.register_forward_pre_hook(lambda module, args: dropping.append(module.training))
    model.norm.register_forward_pre_hook(lambda module, args: building.append(args[0].requires_grad))
    model.norm.register_forward_hook(lambda *args: None)
    modes = {name: module.training for name, module in model.named_modules()}
    frozen = [param.requires_grad for param in model.parameters()]
    hooks, attributes = _Hooks(model), _attributes(model)
    try:
        got = answer(model, "norm", batches)
    finally:
        more = hooks.left()
    _examine_seen(seen, dropping)
    _examine_embedding(got, want, ruined)
    if any(building):
        refuse("graph_built")
    hooks.examine(more)
    _examine_modes(model, modes)
    _examine_frozen(model, frozen)
    _examine_attributes(model, attributes)
    _examine_another(answer, model)
    _examine_embed_after_error(answer)


def _examine_embed_after_error(answer):
    """The second batch does not fit the model: the error must come through, and the model be as before."""
    model = _Images()
    modes, hooks = [module.training for module in model.modules()], _Hooks(model)
    try:
        answer(model, "conv", [torch.randn(2, 1, 8, 8), torch.randn(2, 3, 8, 8)])
    except Exception:
        more = hooks.left()
    else:
        hooks.left()
        refuse("swallowed")
    if more:
        refuse("hooks_left_after_error", more=more)
    if modes != [module.training for module in model.modules()]:
        refuse("mode_after_error")


def _examine_another(answer, model):
    """Another layer, other sizes, a second call; where the caller has switched gradients off; a generator; another dtype."""
    batches = [torch.randn(2, 1, 9, 7), torch.randn(3, 1, 9, 7)]
    want = embed(deepcopy(model), "conv", batches)
    found = []
    _examine_where_grad_is_off(lambda: found.append(answer(model, "conv", batches)))
    if not _agrees(found[0], want):
        shape = _kind(found[0])
        refuse("first_call_only", want_shape=tuple(want.shape), shape=shape)
    try:
        got = answer(model, "conv", (batch for batch in batches))
        wrong = "" if _agrees(got, want) else _kind(got)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        wrong = said(error)
    if wrong:
        refuse("walked_twice", want_shape=tuple(want.shape), wrong=wrong)
    _examine_double(answer(model.double(), "conv", [batch.double() for batch in batches]))


def _agrees(got, want):
    same_shape = isinstance(got, Tensor) and got.shape == want.shape
    return same_shape and torch.allclose(got, want, rtol=1e-4, atol=1e-6)


def _kind(got):
    return str(tuple(got.shape)) if isinstance(got, Tensor) else type(got).__name__


def _examine_seen(seen, dropping):
    if not seen:
        refuse("not_called")
    if any(training for _, training in seen):
        refuse("train_mode")
    if any(dropping):
        refuse("dropout_on")
    sizes = [size for size, _ in seen]
    if sizes != [4, 4, 1]:
        refuse("not_batch_by_batch", sizes=sizes)


def _examine_embedding(got, want, ruined):
    if got is None:
        refuse("returned_nothing")
    if isinstance(got, list | tuple):
        refuse("not_joined", got=got, count_got=len(got))
    if isinstance(got, Tensor) and got.ndim and len(got) == 1:
        refuse("last_batch_only")
    if isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, ruined, atol=1e-5):
        refuse("overwritten")
    expect_like(got, want)
    _examine_leaf(got)
    if got.requires_grad:
        refuse("keeps_graph")


def _examine_modes(model, modes):
    now = {name: module.training for name, module in model.named_modules()}
    if now != modes and not model.training:
        refuse("left_in_eval")
    if now["stem.1"]:
        refuse("unfroze")
    if now != modes:
        name = next(name for name in now if now[name] != modes[name])
        refuse("part_left_in_eval", name=name)


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


EDITED, CULPRIT = {"block.0", "second", "pair", "pair.1"}, "block.1"  # `block` returns what `block.1` returns

EDITED_OF_TWICE = {"first", "second", "both"}


def examine_overwritten(answer):
    torch.manual_seed(0)
    model = _Mixed()
    model.block.register_forward_hook(lambda *args: None)
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    got = set(_names_found(answer, model, torch.randn(6, 4)))
    if got == {CULPRIT}:
        refuse("only_culprits")
    if got == {"head"}:
        refuse("last_name")
    if not got:
        refuse("nothing_found")
    if got == EDITED - {"block.0", "pair.1"}:
        refuse("children_only")
    if got - {"block"} == EDITED | {CULPRIT}:
        refuse("counted_culprit", culprit=CULPRIT)
    if got == {"block.0"}:
        refuse("relu_only")
    _expect_names(got, EDITED, "一个小模型", "a small model")
    _examine_calls(calls)
    names = _names_found(answer, _Twice(), torch.randn(6, 4))
    got = set(names)
    if got != EDITED_OF_TWICE and got <= EDITED_OF_TWICE:
        refuse("one_call", got=sorted(got))
    _expect_names(got, EDITED_OF_TWICE, "每层调用两次的模型", "a model that calls each layer twice")
    if doubled := [name for name in names if names.count(name) > 1]:
        refuse("name_twice", doubled=doubled[0])
    _examine_unchanged(answer)
    _examine_left_after_error(lambda model: answer(model, torch.randn(6, 4)))
    _examine_squeezenet(answer)


def _examine_calls(calls):
    if not calls:
        refuse("by_forward")
    if len(calls) > 1:
        refuse("ran_twice", count_calls=len(calls))


def _names_found(answer, model, x):
    hooks, attributes, mode = _Hooks(model), _attributes(model), model.training
    try:
        got = answer(model, x)
    finally:
        more = hooks.left()
    if got is None:
        refuse("returned_nothing")
    if not isinstance(got, list | tuple | set):
        refuse("not_a_list", got=got)
    if not all(isinstance(name, str) for name in got):
        refuse("not_names", got=got)
    hooks.examine(more)
    refuse_from_before(got, model, EDITED | EDITED_OF_TWICE)
    if model.training != mode:
        refuse("mode_changed")
    _examine_attributes(model, attributes)
    return list(got)


def _examine_left_after_error(run):
    """The second layer cannot take what the first one gives."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 2))
    hooks = _Hooks(model)
    try:
        run(model)
    except RuntimeError:
        error = True
    else:
        error = False
    finally:
        left = hooks.left()
    hooks.examine(min(left, 0))
    if left:
        refuse("left_after_error")
    if not error:
        refuse("hid_error")


def _expect_names(got, want, where_zh, where_en):
    if got != want:
        missing, extra = (sorted(names)[:3] for names in (want - got, got - want))
        refuse(
            "wrong_names",
            zh=f"在{where_zh}上，漏掉的有 `{missing}`，多出来的有 `{extra}`（各列三个）。",
            en=f"On {where_en} these are missing: `{missing}`, and these are too many: `{extra}` (three of each at most).",
        )


def _examine_unchanged(answer):
    model = nn.Sequential(nn.Softplus(), nn.ReLU(inplace=True), nn.Linear(4, 2))
    if set(_names_found(answer, model, torch.randn(6, 4))) != {"0"}:
        refuse("by_values")


def _examine_squeezenet(answer):
    from torchvision.models import squeezenet1_1

    model, x = squeezenet1_1().eval(), torch.randn(1, 3, 48, 48)
    got = set(_names_found(answer, model, x))
    _expect_names(got, set(overwritten(model, x)), " `squeezenet1_1` ", "`squeezenet1_1`")


OVERWRITTEN = Exercise("24.C", examine_overwritten, overwritten)

EXERCISES = [FEATURE, EMBED, OVERWRITTEN]
