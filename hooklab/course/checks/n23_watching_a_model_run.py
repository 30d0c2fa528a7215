"""Checks of notebook 23: watching a model run."""

from collections import Counter, OrderedDict

import torch
from torch import Tensor, nn

from hooklab.census import hooks_on
from hooklab.course.check import Exercise, refuse, refuse_from_before

# ---- what the three exercises share ----


def _hung(model):
    """The hooks on a model: how many of each function, by place."""
    return Counter((hook.kind, hook.place, hook.function) for hook in hooks_on(model))


def _examine_hooks(before, model, reason, zh, en):
    after = _hung(model)
    if missing := before - after:
        place = next(iter(missing))[1]
        refuse("removed_others", place=place)
    if left := after - before:
        kind, place, _ = next(iter(left))
        refuse(reason, zh=zh.format(left=f"`{kind} on {place}`"), en=en.format(left=f"`{kind} on {place}`"))


def _examine_left(before, model):
    _examine_hooks(
        before,
        model,
        "hooks_left",
        "模型上还留着钩子：{left}。",
        "A hook is still on the model: {left}.",
    )


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


def _watched(model):
    """A list of what each module of the model will be given."""
    passed = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: passed.extend(args))
    return passed


def _result(answer, model, x, passed):
    """The answer's result on a model in which only tensors should pass."""
    try:
        return answer(model, x)
    except Exception:
        if other := [type(value).__name__ for value in passed if not isinstance(value, Tensor)]:
            refuse("replaced_output", other=other[0])
        raise


def _examine_failure(answer, model):
    """The forward fails in the middle: the error must come through, and no hook stay."""
    before = _hung(model)
    try:
        answer(model, torch.ones(2, 4))
    except (RuntimeError, LookupError):
        pass
    else:
        refuse("swallowed")
    _examine_hooks(
        before,
        model,
        "hooks_left_after_error",
        "前向报错之后，模型上还留着钩子：{left}。出错时，后面的语句不会执行。",
        "After a forward that raised, a hook is still on the model: {left}. When it raises, the statements that follow do not "
        "run.",
    )


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


def _user_hook(module, args, output):
    """A hook that was there before."""


def examine_output_shapes(answer):
    for training in (True, False):
        model = _Mixed().train(training)
        model.frozen.eval()
        model.frozen[2].train()  # Dropout that stays on
        model.stem.register_forward_hook(_user_hook)
        _examine_shapes(answer, model)
    _examine_next_model(answer)
    for broken in (_Broken(), _Stumbling()):
        _examine_shapes_failing(answer, broken)


def _examine_next_model(answer):
    model = nn.Sequential(OrderedDict(lens=nn.Linear(4, 3), gate=nn.ReLU()))
    refuse_from_before(answer(model, torch.ones(2, 4)), model, dict(_Mixed().named_children()))


def _examine_shapes_failing(answer, broken):
    broken.second.eval()
    flags, state = _flags(broken), {key: value.clone() for key, value in broken.state_dict().items()}
    names = _attributes(broken)
    _examine_failure(answer, broken)
    _examine_mode_after_error(broken, flags)
    _examine_no_new_attributes(broken, names)
    _examine_state(broken, state)


def _examine_mode_after_error(broken, flags):
    if _flags(broken) != flags:
        refuse("mode_after_error")


def _examine_shapes(answer, model):
    x, runs, passed = torch.randn(3, 4), [], _watched(model)
    model.head.register_forward_hook(lambda module, args, output: runs.append("run"))
    hung, flags, names, tracking = _hung(model), _flags(model), _attributes(model), _tracking(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    got = _result(answer, model, x, passed)
    _examine_dict(got, {"head": (3, 2), "stem": (3, 6), "frozen": (3, 5)}, model)
    _examine_state(model, state)
    _examine_flags(model, flags)
    if _tracking(model) != tracking:
        refuse("tracking_off")
    _examine_no_new_attributes(model, names)
    _examine_left(hung, model)
    if len(runs) > 1:
        refuse("ran_often", count_runs=len(runs))


def _examine_no_new_attributes(model, names):
    if _attributes(model) != names:
        new = sorted({name for after, before in zip(_attributes(model), names, strict=True) for name in after - before})
        refuse("attribute_left", new=new)


def _sorted(shapes):
    return sorted(str(tuple(shape)) for shape in shapes.values())


def _tracking(model):
    return [getattr(module, "track_running_stats", None) for module in model.modules()]


def _flags(model):
    return {name: module.training for name, module in model.named_modules()}


def _attributes(model):
    return [set(vars(module)) for module in model.modules()]


def _examine_dict(got, want, model):
    if not isinstance(got, dict):
        refuse("not_a_dict", got=got)
    if list(got) == list(want)[-1:]:
        refuse("one_name", got=next(iter(got)))
    refuse_from_before(got, model, ("lens", "gate"))
    if set(got) != set(want):
        extra, missing = sorted(map(str, set(got) - set(want))), sorted(set(want) - set(got))
        refuse("wrong_names", extra=extra, missing=missing)
    tuples = all(isinstance(shape, tuple) for shape in got.values())
    if tuples and got != want and _sorted(got) == _sorted(want):
        refuse("other_order")
    for name, shape in want.items():
        if not isinstance(got[name], tuple):
            refuse("no_tuple", name=name, got=got[name])
        if tuple(got[name]) != shape:
            refuse("wrong_shape", name=name, shape=shape, got=tuple(got[name]))


def _examine_state(model, before):
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    if changed:
        refuse("statistics", count_changed=len(changed), changed=changed[0])


def _examine_flags(model, before):
    after = _flags(model)
    if after == before:
        return
    if before[""] and not any(after.values()):
        refuse("left_in_eval")
    name = next(name for name in after if after[name] != before[name])
    refuse("flags", name=name, before=before[name], after=after[name])


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


def examine_never_called(answer):
    model, tokens = _Reader().eval(), torch.zeros(2, 5, dtype=torch.long)
    model.head.register_forward_hook(_user_hook)
    hung, flags, fast = _hung(model), _flags(model), torch.backends.mha.get_fastpath_enabled()
    try:
        got = _result(answer, model, tokens, model.passed)
    finally:
        fast_after = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fast)
    if fast and not fast_after:
        refuse("fast_path_off")
    if _flags(model) != flags:
        refuse("mode_changed")
    _examine_names(got)
    _examine_left(hung, model)
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    if (got := answer(other, torch.ones(1, 4))) is None or list(got):
        refuse("none_expected", got=got)
    _examine_other_way(answer)
    for broken in (_Broken(), _Stumbling()):
        _examine_failure(answer, broken.eval())
    _examine_runs(model.runs)


def _examine_other_way(answer):
    model, x = _Either().eval(), torch.ones(1, 4)
    if set(got := answer(model, x)) != {"right"}:
        refuse("look_alike", got=got)
    model.way = "right"
    if set(got := answer(model, x)) != {"left"}:
        refuse("from_before", got=got)


def _examine_runs(runs):
    if len(runs) != 1:
        refuse("ran_often", count_runs=len(runs))
    if any(runs):
        refuse("no_no_grad")


def _examine_names(got):
    if isinstance(got, str | dict) or not isinstance(got, list | tuple | set):
        refuse("not_a_list", got=got)
    if wrong := [type(name).__name__ for name in got if not isinstance(name, str)]:
        refuse("no_names", wrong=wrong[0])
    found = set(got)
    if found == CALLED:
        refuse("inverted")
    if (CALLED | NEVER) - found == {name := "helper.2"}:  # the last of them
        refuse("one_name", name=name)
    if found & INSIDE == INSIDE and "embed" not in found:
        refuse("fast_path", inside=sorted(INSIDE)[1])
    if containers := sorted(found & {"", "helper", "encoder.self_attn", "encoder"}):
        refuse("containers", containers=containers)
    if found & CALLED == CALLED:
        refuse("called_listed")
    if "again" in found or "norm" in found:
        refuse("shared")
    if not any(name.startswith("helper") for name in found):
        refuse("missed_unused", found=sorted(found))
    if "encoder.self_attn.out_proj" not in found:
        refuse("missed_out_proj", found=sorted(found))
    if found == NEVER | {"log"}:
        refuse("no_tensor")
    if found != NEVER:
        refuse("wrong_list", found=sorted(found - NEVER), never=sorted(NEVER - found))


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

WRONG_LAYER = {
    "outer": (
        "NaN 从 {want} 开始，你给的是 {got}：包住它的那一层。里面的层先算完。",
        "The NaN begins in {want}; you give {got}, the layer around it. What is inside finishes first.",
    ),
    "later": (
        "NaN 从 {want} 开始，再传到后面；你给的是 {got}。最先报的是哪个钩子，它用的名字是什么时候读的？",
        "The NaN begins in {want} and is passed on; you give {got}. Which hook reported first, and when is the name that it uses "
        "read?",
    ),
    "partly": (
        "{want} 的输出里有一个 NaN，其余是普通的数，有一个就算；你给的是 {got}。你的判断遇到 NaN 成立吗，结果返回了吗？",
        "The output of {want} holds one NaN among ordinary numbers, and one is enough; you give {got}. Is your condition true of "
        "a NaN, and is the result returned?",
    ),
    "cleaned": (
        "NaN 在 {want} 里出现，后面的层又把它换成了别的数；你给的是 {got}。光看最后的输出看不到它。",
        "A NaN appears in {want}, and a later layer replaces it by a number; you give {got}. The final output alone does not "
        "show it.",
    ),
    "definition_order": (
        "NaN 从 {want} 开始；你给的 {got} 定义在前，却是后来才跑的。",
        "The NaN begins in {want}; you give {got}, which is defined earlier but runs later.",
    ),
    "leaves_only": (
        "NaN 是 {want} 自己的那几行算出来的，它里面的层没有错；你给的是 {got}。不只是最里面的层会出 NaN。",
        "The NaN is made by the lines of {want} itself, the layer inside it is fine; you give {got}. Not only the innermost "
        "layers can make a NaN.",
    ),
    "the_model": (
        "NaN 是模型自己的那几行算出来的：应当返回它的名字，空字符串，你给的是 {got}。模型自己挂上钩子了吗？空字符串在 `if` 和 `or` 里算假。",
        "The NaN is made by the model's own lines: its name, the empty string, is expected; you give {got}. Is there a hook on the "
        "model itself? In `if` and `or` the empty string counts as false.",
    ),
    "nested": (
        "{want} 返回嵌套的元组，NaN 在里面的那个元组里；你给的是 {got}。",
        "{want} returns a nested tuple, and the NaN is in the inner one; you give {got}.",
    ),
    "called_twice": (
        "这个模型里有一层跑了两次，一次没有 NaN，一次有；NaN 从 {want} 开始，你给的是 {got}。每次调用都要按算完的次序看。",
        "In this model a layer runs twice, once without NaN and once with it; the NaN begins in {want}, you give {got}. Every "
        "call counts, in the order in which they finish.",
    ),
    "infinity": (
        "这个模型里只有无穷大，没有 NaN；应当返回 {want}，你给的是 {got}。",
        "In this model there is infinity and no NaN: {want} is expected; you give {got}.",
    ),
    "after_the_run": (
        "NaN 从 {want} 开始，它是原地操作，改的是前一层的输出；你给的是 {got}。要在这一层刚算完时就看，跑完再看就晚了。",
        "The NaN begins in {want}, which works in place on the output of the layer before; you give {got}. Look as soon as a "
        "layer has finished: after the run is too late.",
    ),
    "none_expected": (
        "这个模型里没有 NaN：应当返回 {want}，你给的是 {got}。",
        "There is no NaN in this model: {want} is expected; you give {got}.",
    ),
}


def examine_first_nan(answer):
    block = nn.Sequential(OrderedDict(before=nn.Identity(), log=_Apply(torch.log), after=nn.Identity()))
    _examine_first(
        answer,
        nn.Sequential(OrderedDict(block=block, head=nn.Linear(2, 1))),
        "block.log",
        {"block": "outer", "": "outer", None: "partly"},
        "later",
    )
    clean = nn.Sequential(_Apply(torch.log), _Apply(torch.nan_to_num))
    _examine_first(answer, clean, "0", {}, "cleaned")
    _examine_first(answer, _Backwards(), "log", {}, "definition_order")
    _examine_first(answer, nn.Sequential(_Entropy(), nn.Identity()), "0", {}, "leaves_only")
    _examine_first(answer, _Entropy(), "", {None: "the_model"}, "leaves_only")
    pair = nn.Sequential(_Apply(lambda x: (x, (None, 3, x.log()))), _Apply(lambda pair: pair[0]))
    _examine_first(answer, pair, "0", {}, "nested")
    _examine_first(answer, nn.Sequential(_Apply(lambda x: (x, None))), None, {}, "none_expected")
    _examine_first(answer, nn.Sequential(_Apply(lambda x: x / 0), nn.Identity()), None, {}, "infinity")
    _examine_first(answer, _Again(), "log", {}, "called_twice")
    log = _Apply(torch.log)
    cleaned = nn.Sequential(log, _Apply(lambda x: x.nan_to_num().abs() + 1), log)
    _examine_first(answer, cleaned, "0", {}, "called_twice")
    in_place = nn.Sequential(_Apply(lambda x: x + 0), _Apply(lambda x: x.log_()))
    _examine_first(answer, in_place, "1", {"0": "after_the_run"}, "later")
    for broken in (_Broken(), _Stumbling()):
        flags, names = _flags(broken), _attributes(broken)
        _examine_failure(answer, broken)
        _examine_mode_after_error(broken, flags)
        _examine_no_new_attributes(broken, names)
    runs = []
    answer(nn.Sequential(_Apply(lambda x: runs.append("run") or x.log())), X)
    if len(runs) != 1:
        refuse("ran_often", count_runs=len(runs))


def _examine_first(answer, model, want, reasons, otherwise):
    model.register_forward_hook(_user_hook)
    passed = _watched(model)
    hung, flags, names = _hung(model), _flags(model), _attributes(model)
    got = _result(answer, model, X, passed) if otherwise == "later" else answer(model, X)
    if got is not None and not isinstance(got, str):
        refuse("not_a_name", got=got)
    layers = [name for name, _ in model.named_modules()]
    if got is not None and got not in layers:
        refuse("no_such_layer", got=got, layers=layers)
    if got != want:
        reason = reasons.get(got, otherwise)
        zh, en = (text.format(got=f"`{got!r}`", want=f"`{want!r}`") for text in WRONG_LAYER[reason])
        refuse(reason, zh=zh, en=en)
    _examine_left(hung, model)
    if _flags(model) != flags:
        refuse("mode_changed")
    _examine_no_new_attributes(model, names)


FIRST_NAN = Exercise("23.C", examine_first_nan, first_nan)

EXERCISES = [SHAPES, NEVER_CALLED, FIRST_NAN]
