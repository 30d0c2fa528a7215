"""Checks of notebook 23: watching a model run."""

from collections import Counter, OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hooklab.census import hooks_on
from hooklab.course.check import Exercise, Prediction, refuse, refuse_from_before
from hooklab.layers.statistics import layer_statistics

# ---- what the three exercises share ----


def _hung(model):
    """The hooks on a model: how many of each function, by place."""
    return Counter((hook.kind, hook.place, hook.function) for hook in hooks_on(model))


def _examine_hooks(before, model, reason, zh, en):
    after = _hung(model)
    if missing := before - after:
        place = next(iter(missing))[1]
        refuse(
            "removed_others",
            zh=f"`{place}` 上原有一个不是你挂的钩子，现在不见了。只取下自己挂的：用注册时得到的句柄。",
            en=f"`{place}` had a hook that is not yours, and it is gone. Take off your own only, by the handles that "
            "registration gave you.",
        )
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
            refuse(
                "replaced_output",
                zh=f"模型里传的不再是张量，而是 `{other[0]}`：有个钩子把输出换掉了。看看它返回了什么。",
                en=f"What passes through the model is no tensor any more but a `{other[0]}`: a hook replaced an output. See what it "
                "returns.",
            )
        raise


def _examine_failure(answer, model):
    """The forward fails in the middle: the error must come through, and no hook stay."""
    before = _hung(model)
    try:
        answer(model, torch.ones(2, 4))
    except (RuntimeError, LookupError):
        pass
    else:
        refuse(
            "swallowed",
            zh="前向报错了，你的函数却把错误吞掉了：调用的人会以为一切正常。",
            en="The forward raised, and your function swallowed the error: the caller would believe that all is well.",
        )
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
        refuse(
            "mode_after_error",
            zh="前向报错之后，有的模块停在了别的模式：恢复 `training` 的那几行没有执行到。",
            en="After a forward that raised, some module is left in the other mode: the lines that restore `training` were not "
            "reached.",
        )


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
        refuse(
            "tracking_off",
            zh="有的 BatchNorm 的 `track_running_stats` 变了：统计量这一次没有动，可是以后训练时也不会再动。",
            en="`track_running_stats` of some BatchNorm has changed: its statistics did not move this time, but in later training "
            "they will not either.",
        )
    _examine_no_new_attributes(model, names)
    _examine_left(hung, model)
    if len(runs) > 1:
        refuse(
            "ran_often",
            zh=f"模型跑了 {len(runs)} 次。一次就够：钩子可以同时挂在所有的子模块上。",
            en=f"The model ran {len(runs)} times. Once is enough: there may be hooks on all child modules at the same time.",
        )


def _examine_no_new_attributes(model, names):
    if _attributes(model) != names:
        new = sorted({name for after, before in zip(_attributes(model), names, strict=True) for name in after - before})
        refuse(
            "attribute_left",
            zh=f"模块身上多了属性：`{new}`。名字放进闭包，就不用写到别人的模块上。",
            en=f"Modules have new attributes: `{new}`. Put the name into a closure, and nothing need be written onto somebody's "
            "module.",
        )


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
        refuse(
            "not_a_dict",
            zh=f"应当返回字典，得到的是 `{type(got).__name__}`。",
            en=f"Return a dict; found `{type(got).__name__}`.",
        )
    if list(got) == list(want)[-1:]:
        refuse(
            "one_name",
            zh=f"三个子模块，字典里只有 `{next(iter(got))}` 一项：循环变量要到钩子触发时才去读，那时循环早就结束了。",
            en=f"Three child modules, and the dict has `{next(iter(got))}` alone: a loop variable is read when the hook fires, "
            "and by then the loop is over.",
        )
    refuse_from_before(got, model, ("lens", "gate"))
    if set(got) != set(want):
        extra, missing = sorted(map(str, set(got) - set(want))), sorted(set(want) - set(got))
        refuse(
            "wrong_names",
            zh=f"要的是直接子模块。多了 `{extra}`，少了 `{missing}`。",
            en=f"The direct child modules are wanted. Too many: `{extra}`; missing: `{missing}`.",
        )
    tuples = all(isinstance(shape, tuple) for shape in got.values())
    if tuples and got != want and _sorted(got) == _sorted(want):
        refuse(
            "other_order",
            zh="形状都对，名字配错了：子模块运行的次序，不一定是定义的次序。",
            en="The shapes are right and stand at the wrong names: child modules need not run in the order in which they are defined.",
        )
    for name, shape in want.items():
        if not isinstance(got[name], tuple):
            refuse(
                "no_tuple",
                zh=f"`{name}` 的形状应当是元组，得到的是 `{type(got[name]).__name__}`。",
                en=f"The shape of `{name}` should be a tuple; found `{type(got[name]).__name__}`.",
            )
        if tuple(got[name]) != shape:
            refuse(
                "wrong_shape",
                zh=f"`{name}` 输出的形状是 `{shape}`，你给的是 `{tuple(got[name])}`。你读的是输出吗？",
                en=f"The output of `{name}` has the shape `{shape}`; you give `{tuple(got[name])}`. Is it the output that you "
                "read?",
            )


def _examine_state(model, before):
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    if changed:
        refuse(
            "statistics",
            zh=f"`state_dict()` 里有 {len(changed)} 项变了，例如 `{changed[0]}`：这次前向是在训练模式下跑的。",
            en=f"Entries of `state_dict()` that have changed: {len(changed)}, `{changed[0]}` for one. This forward ran in training "
            "mode.",
        )


def _examine_flags(model, before):
    after = _flags(model)
    if after == before:
        return
    if before[""] and not any(after.values()):
        refuse(
            "left_in_eval",
            zh="模型原本在训练，现在每个模块都停在 `eval()`：训练会带着关掉的 Dropout 继续下去。",
            en="The model was in training, and now every module is left in `eval()`: training would go on with Dropout switched "
            "off.",
        )
    name = next(name for name in after if after[name] != before[name])
    refuse(
        "flags",
        zh=f"`{name}` 原本的 `training` 是 `{before[name]}`，现在是 `{after[name]}`。`train()` 和 `eval()` 会把里面所有的模块一起改掉，"
        "而它们原先并不一样。",
        en=f"`training` of `{name}` was `{before[name]}` and is `{after[name]}` now. `train()` and `eval()` set every module "
        "inside, and they were not all the same before.",
    )


def _shapes(model, x, mode, finish, make=None):
    """Output shapes with a choice of what is done before and after, as learners write it."""
    shapes = {}

    def hook_for(name):
        return lambda module, args, output: shapes.update({name: tuple(output.shape)})

    handles = [child.register_forward_hook((make or hook_for)(name)) for name, child in model.named_children()]
    mode(model)
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    finish(model)
    return shapes


def _nothing(model):
    pass


def shapes_restored(model, x):
    training = {module: module.training for module in model.modules()}

    def restore(model):
        for module, flag in training.items():
            module.training = flag

    return _shapes(model, x, nn.Module.eval, restore)


def shapes_mode_after_error(model, x):
    handles, shapes = [], {}
    flags = [(module, module.training) for module in model.modules()]
    for name, child in model.named_children():
        handles.append(child.register_forward_hook(lambda m, a, out, name=name: shapes.update({name: out.shape})))
    model.eval()
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    for module, flag in flags:
        module.training = flag
    return shapes


def shapes_returned(model, x):
    shapes = {}

    def hook_for(name):
        return lambda module, args, output: shapes.setdefault(name, tuple(output.shape))

    _shapes(model, x, _nothing, _nothing, hook_for)
    return shapes


def shapes_by_default(model, x, shapes={}):  # noqa: B006
    shapes.update(output_shapes(model, x))
    return shapes


def shapes_one_by_one(model, x):
    return {name: output_shapes(model, x)[name] for name, _ in model.named_children()}


def shapes_untracked(model, x):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.track_running_stats = False
    return _shapes(model, x, _nothing, _nothing)


def shapes_without_gradients(model, x):
    torch.set_grad_enabled(False)
    return output_shapes(model, x)


def shapes_one_name(model, x):
    shapes, handles = {}, []
    for name, child in model.named_children():
        hook = lambda module, args, output: shapes.update({name: tuple(output.shape)})  # noqa: B023, E731
        handles.append(child.register_forward_hook(hook))
    try:
        model.eval()(x)
    finally:
        for handle in handles:
            handle.remove()
    return shapes


def shapes_in_order(model, x):
    """Takes the order in which the layers run for that in which they are defined."""
    training, shapes, names = {module: module.training for module in model.modules()}, [], []
    handles = []
    for name, child in model.named_children():
        names.append(name)
        handles.append(child.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape))))
    try:
        model.eval()(x)
    finally:
        for handle in handles:
            handle.remove()
        for module, flag in training.items():
            module.training = flag
    return dict(zip(names, shapes, strict=True))


def shapes_on_module(model, x):
    shapes, flags = {}, [(module, module.training) for module in model.modules()]
    handles = []
    for name, child in model.named_children():
        child.__name__ = name
        handles.append(
            child.register_forward_hook(lambda module, args, output: shapes.update({module.__name__: output.shape}))
        )
    model.eval()(x)
    for handle in handles:
        handle.remove()
    for module, flag in flags:
        module.training = flag
    return shapes


def shapes_hooks_left(model, x):
    shapes, flags = {}, [(module, module.training) for module in model.modules()]
    for name, child in model.named_children():
        child.register_forward_hook(lambda module, args, output, name=name: shapes.update({name: output.shape}))
    model.eval()(x)
    for module, flag in flags:
        module.training = flag
    return shapes


def shapes_clear(model, x):
    try:
        return output_shapes(model, x)
    finally:
        for module in model.modules():
            module._forward_hooks.clear()


def shapes_of_inputs(model, x):
    shapes, flags = {}, [(module, module.training) for module in model.modules()]
    for name, child in model.named_children():
        child.register_forward_hook(lambda module, args, output, name=name: shapes.update({name: args[0].shape}))
    model.eval()(x)
    for module, flag in flags:
        module.training = flag
    return shapes


def shapes_swallowed(model, x):
    try:
        return output_shapes(model, x)
    except RuntimeError:
        return {}


def shapes_of_all(model, x):
    shapes, flags = {}, [(module, module.training) for module in model.modules()]
    handles = []
    for name, module in model.named_modules():
        handles.append(
            module.register_forward_hook(lambda module, args, output, name=name: shapes.update({name: output.shape}))
        )
    model.eval()(x)
    for handle in handles:
        handle.remove()
    for module, flag in flags:
        module.training = flag
    return shapes


SHAPES = Exercise(
    "23.A",
    examine_output_shapes,
    output_shapes,
    {
        "statistics": lambda model, x: _shapes(model, x, _nothing, _nothing),
        "left_in_eval": lambda model, x: _shapes(model, x, nn.Module.eval, _nothing),
        "flags": lambda model, x: _shapes(model, x, nn.Module.eval, nn.Module.train),
        "hooks_left": shapes_hooks_left,
        "hooks_left_after_error": shapes_restored,
        "mode_after_error": shapes_mode_after_error,
        "removed_others": shapes_clear,
        "swallowed": shapes_swallowed,
        "attribute_left": shapes_on_module,
        "one_name": shapes_one_name,
        "replaced_output": shapes_returned,
        "from_before": shapes_by_default,
        "ran_often": shapes_one_by_one,
        "tracking_off": shapes_untracked,
        "grad_left_off": shapes_without_gradients,
        "wrong_names": shapes_of_all,
        "other_order": shapes_in_order,
        "wrong_shape": shapes_of_inputs,
        "no_tuple": lambda model, x: {name: list(shape) for name, shape in output_shapes(model, x).items()},
        "not_a_dict": lambda model, x: list(output_shapes(model, x).items()),
    },
    zh="形状都在，模型还是原来的样子，出错时也一样。",
    en="The shapes are there, and the model is as it was, also after an error.",
)

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
        refuse(
            "fast_path_off",
            zh="你的函数返回以后，快路径在整个进程里都关着：此后每个编码器都会变慢。挂在模块自己身上的钩子，用不着关它。",
            en="After your function has returned, the fast path is off for the whole process: every encoder runs slower from now on. "
            "With hooks on the modules themselves it need not be switched off.",
        )
    if _flags(model) != flags:
        refuse(
            "mode_changed",
            zh="模型原本在 `eval()`，现在不是了；在训练模式下，它调用的是另一些层。",
            en="The model was in `eval()` and no longer is; in training mode it calls other layers.",
        )
    _examine_names(got)
    _examine_left(hung, model)
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    if (got := answer(other, torch.ones(1, 4))) is None or list(got):
        refuse(
            "none_expected",
            zh=f"在一个每层都会调用的模型上，应当返回空列表，得到的是 `{got}`。",
            en=f"On a model that calls every layer an empty list is expected; found `{got}`.",
        )
    _examine_other_way(answer)
    for broken in (_Broken(), _Stumbling()):
        _examine_failure(answer, broken.eval())
    _examine_runs(model.runs)


def _examine_other_way(answer):
    model, x = _Either().eval(), torch.ones(1, 4)
    if set(got := answer(model, x)) != {"right"}:
        refuse(
            "look_alike",
            zh=f"模型里有两个一样的层，`left` 和 `right`，只调用了 `left`；你给的是 `{got}`。要记的是模块本身，不是它的类型或打印出来的样子。",
            en=f"The model has two equal layers, `left` and `right`, and calls only `left`; you give `{got}`. Note the module itself, not "
            "its type or how it prints.",
        )
    model.way = "right"
    if set(got := answer(model, x)) != {"left"}:
        refuse(
            "from_before",
            zh=f"同一个模型，第一次只调用 `left`，第二次只调用 `right`；第二次你给的是 `{got}`。第一次记下的东西还在吗？"
            "默认参数只建一次，每次调用都要从头记。",
            en=f"The same model calls only `left` the first time and only `right` the second; for the second you give `{got}`. Is what "
            "the first call noted still there? A default argument is made only once; each call has to begin anew.",
        )


def _examine_runs(runs):
    if len(runs) != 1:
        refuse(
            "ran_often",
            zh=f"`model(x)` 跑了 {len(runs)} 次。一次就够：钩子可以同时挂在所有的叶子模块上。",
            en=f"`model(x)` ran {len(runs)} times. Once is enough: there may be hooks on all leaf modules at the same time.",
        )
    if any(runs):
        refuse(
            "no_no_grad",
            zh="`model(x)` 没有在 `torch.no_grad()` 里运行。放进去，再看列表还对不对。",
            en="`model(x)` did not run in `torch.no_grad()`. Put it there, and see whether the list is still right.",
        )


def _examine_names(got):
    if isinstance(got, str | dict) or not isinstance(got, list | tuple | set):
        refuse(
            "not_a_list",
            zh=f"应当返回名字的列表，得到的是 `{type(got).__name__}`。",
            en=f"Return a list of names; found `{type(got).__name__}`.",
        )
    if wrong := [type(name).__name__ for name in got if not isinstance(name, str)]:
        refuse(
            "no_names",
            zh=f"列表里应当是名字，却有 `{wrong[0]}`。",
            en=f"The list should hold names; it holds a `{wrong[0]}`.",
        )
    found = set(got)
    if found == CALLED:
        refuse(
            "inverted",
            zh="反了：你列出的，正是被调用过的那些。",
            en="The wrong way round: these are the ones that were called.",
        )
    if (CALLED | NEVER) - found == {name := "helper.2"}:  # the last of them
        refuse(
            "one_name",
            zh=f"除了 `{name}`，所有的叶子模块都被你列出来了：循环变量要到钩子触发时才去读，那时循环早就结束了。",
            en=f"You list every leaf module but `{name}`: a loop variable is read when the hook fires, and by then the loop is "
            "over.",
        )
    if found & INSIDE == INSIDE and "embed" not in found:
        refuse(
            "fast_path",
            zh=f"你说 `{sorted(INSIDE)[1]}` 没有被调用。你的钩子挂在它自己身上吗？只挂在外面一层，看不到它；只用全局钩子，编码器层就走快路径，"
            "里面的模块一个也不调用。看第 9 节的两次计数，和第 10 节的第二条。",
            en=f"You say that `{sorted(INSIDE)[1]}` is not called. Does your hook hang on that module itself? One on a module around "
            "it does not see it; with global hooks alone the encoder layer takes its fast path, on which no module inside is "
            "called. See the two counts in section 9, and the second point of section 10.",
        )
    if containers := sorted(found & {"", "helper", "encoder.self_attn", "encoder"}):
        refuse(
            "containers",
            zh=f"`{containers}` 里面还有别的模块，不是叶子。",
            en=f"`{containers}` have other modules inside: no leaf modules.",
        )
    if found & CALLED == CALLED:
        refuse(
            "called_listed",
            zh="被调用过的叶子模块，你也全列出来了。先记下哪些被调用过，再从全部叶子模块里去掉它们。",
            en="You list every leaf module that was called, too. Note which ones are called, and leave these out.",
        )
    if "again" in found or "norm" in found:
        refuse(
            "shared",
            zh="有一层有两个名字，它用其中一个被调用了，你却把它列了出来。要记的是模块，不是名字。",
            en="One layer has two names and was called by one of them; you list it. It is the module that should be noted, not "
            "the name.",
        )
    if not any(name.startswith("helper") for name in found):
        refuse(
            "missed_unused",
            zh=f"列表是 `{sorted(found)}`，而 `helper` 里的层在 `eval()` 时不会被调用，它们不在里面。",
            en=f"The list is `{sorted(found)}`; the layers in `helper` are not called in `eval()`, and they are missing.",
        )
    if "encoder.self_attn.out_proj" not in found:
        refuse(
            "missed_out_proj",
            zh=f"列表是 `{sorted(found)}`，少了一层：它的权重用到了，它自己却没有被调用。",
            en=f"The list is `{sorted(found)}`, and one layer is missing: its weight is used, yet it is not called itself.",
        )
    if found == NEVER | {"log"}:
        refuse(
            "no_tensor",
            zh="多了 `log`：它被调用了，只是返回 `None`。统计里没有它，不等于没有调用。",
            en="`log` is one too many: it was called, and returned `None`. Not to be in the statistics is not the same as not to be "
            "called.",
        )
    if found != NEVER:
        refuse(
            "wrong_list",
            zh=f"列表不对：多了 `{sorted(found - NEVER)}`，少了 `{sorted(NEVER - found)}`。",
            en=f"The list is not right; too many: `{sorted(found - NEVER)}`, missing: `{sorted(NEVER - found)}`.",
        )


def never_on_the_slow_path(model, x):
    torch.backends.mha.set_fastpath_enabled(False)
    return never_called(model, x)


def never_returned(model, x):
    called, handles = {}, []
    for module in _leaves(model).values():
        handles.append(module.register_forward_hook(lambda module, args, output: called.setdefault(module, True)))
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, module in _leaves(model).items() if module not in called]


def _leaves(model):
    return {name: module for name, module in model.named_modules() if not list(module.children())}


def never_global(model, x):
    called = set()
    with torch.no_grad(), register_module_forward_hook(lambda module, args, output: called.add(module)):
        model(x)
    return [name for name, module in _leaves(model).items() if module not in called]


def never_all_modules(model, x):
    called, handles = set(), []
    for module in model.modules():
        handles.append(module.register_forward_hook(lambda module, args, output: called.add(module)))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, module in model.named_modules() if module not in called]


def never_by_statistics(model, x):
    with torch.no_grad(), layer_statistics(model, "**") as stats:
        model(x)
    return [name for name in _leaves(model) if name not in stats]


def never_with_weights(model, x):
    weighted = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    return [name for name in never_called(model, x) if name in weighted]


def never_children(model, x):
    called, handles = set(), []
    for module in model.children():
        handles.append(module.register_forward_hook(lambda module, args, output: called.add(module)))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, module in model.named_children() if module not in called and not list(module.children())]


def never_by_name(model, x):
    called, handles = set(), []
    names = [name for name, module in model.named_modules(remove_duplicate=False) if not list(module.children())]
    for name in names:
        layer = model.get_submodule(name)
        if name != "again":
            handles.append(layer.register_forward_hook(lambda module, args, output, name=name: called.add(name)))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name in names if name not in called]


def never_in_training(model, x):
    model.train()
    return never_called(model, x)


def never_one_name(model, x):
    called, handles = set(), []
    for name, module in _leaves(model).items():
        handles.append(module.register_forward_hook(lambda module, args, output: called.add(name)))  # noqa: B023
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name in _leaves(model) if name not in called]


def never_hooks_left(model, x):
    called = set()
    for module in _leaves(model).values():
        module.register_forward_hook(lambda module, args, output: called.add(module))
    model(x)
    return [name for name, module in _leaves(model).items() if module not in called]


def never_no_finally(model, x):
    called, handles = set(), []
    for module in _leaves(model).values():
        handles.append(module.register_forward_hook(lambda module, args, output: called.add(module)))
    model(x)
    for handle in handles:
        handle.remove()
    return [name for name, module in _leaves(model).items() if module not in called]


def never_swallowed(model, x):
    try:
        return never_called(model, x)
    except RuntimeError:
        return []


def never_inverted(model, x):
    missing = never_called(model, x)
    return [name for name in _leaves(model) if name not in missing]


def never_one_by_one(model, x):
    missing = []
    for name, module in _leaves(model).items():
        called = []
        with torch.no_grad(), module.register_forward_hook(lambda module, args, output: called.append(1)):  # noqa: B023
            model(x)
        missing += [] if called else [name]
    return missing


def never_by_default(model, x, called=set()):  # noqa: B006
    missing = never_called(model, x)
    called |= {module for name, module in _leaves(model).items() if name not in missing}
    return [name for name, module in _leaves(model).items() if module not in called]


def never_by_repr(model, x):
    missing = never_called(model, x)
    called = {repr(module) for name, module in _leaves(model).items() if name not in missing}
    return [name for name, module in _leaves(model).items() if repr(module) not in called]


def never_cleared(model, x):
    missing = never_called(model, x)
    for module in model.modules():
        module._forward_hooks.clear()
    return missing


def never_gradients_again(model, x):
    torch.set_grad_enabled(False)
    return never_called(model, x)


def never_with_gradients(model, x):
    called = set()
    with register_module_forward_hook(lambda module, args, output: called.add(module)):
        model(x)
    return [name for name, module in _leaves(model).items() if module not in called]


NEVER_CALLED = Exercise(
    "23.B",
    examine_never_called,
    never_called,
    {
        "called_listed": lambda model, x: [
            name for name, module in model.named_modules() if not list(module.children())
        ],
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
        "swallowed": never_swallowed,
        "no_names": lambda model, x: [model.get_submodule(name) for name in never_called(model, x)],
        "not_a_list": lambda model, x: ", ".join(never_called(model, x)),
        "none_expected": lambda model, x: never_called(model, x) or None,
        "ran_often": never_one_by_one,
        "no_no_grad": never_with_gradients,
        "from_before": never_by_default,
        "look_alike": never_by_repr,
        "removed_others": never_cleared,
        "grad_left_off": never_gradients_again,
        "fast_path_off": never_on_the_slow_path,
        "replaced_output": never_returned,
    },
    zh="一个不漏，也没有冤枉谁：钩子挂在模块自己身上，快路径就让开了。",
    en="None missed and none blamed: with hooks on the modules themselves, the fast path makes way.",
)

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
        refuse(
            "ran_often",
            zh=f"模型跑了 {len(runs)} 次。一次就够：钩子可以同时挂在所有的层上。",
            en=f"The model ran {len(runs)} times. Once is enough: there may be hooks on all layers at the same time.",
        )


def _examine_first(answer, model, want, reasons, otherwise):
    model.register_forward_hook(_user_hook)
    passed = _watched(model)
    hung, flags, names = _hung(model), _flags(model), _attributes(model)
    got = _result(answer, model, X, passed) if otherwise == "later" else answer(model, X)
    if got is not None and not isinstance(got, str):
        refuse(
            "not_a_name",
            zh=f"应当返回一个名字，得到的是 `{type(got).__name__}`。",
            en=f"Return one name; found `{type(got).__name__}`.",
        )
    layers = [name for name, _ in model.named_modules()]
    if got is not None and got not in layers:
        refuse(
            "no_such_layer",
            zh=f"这个模型里没有叫 `{got}` 的层：它有 `{layers}`。",
            en=f"This model has no layer called `{got}`: it has `{layers}`.",
        )
    if got != want:
        reason = reasons.get(got, otherwise)
        zh, en = (text.format(got=f"`{got!r}`", want=f"`{want!r}`") for text in WRONG_LAYER[reason])
        refuse(reason, zh=zh, en=en)
    _examine_left(hung, model)
    if _flags(model) != flags:
        refuse(
            "mode_changed",
            zh="模型原本在训练模式，你的函数返回以后却不是了：看完以后，要和原来一样。",
            en="The model was in training mode and is not after your function has returned: look, and leave it as it was.",
        )
    _examine_no_new_attributes(model, names)


def _nan_in(value):
    if isinstance(value, tuple | list):
        return any(map(_nan_in, value))
    return isinstance(value, Tensor) and bool(value.isnan().any())


def _collect(model, x, layers, bad=_nan_in):
    """The names of the layers with a bad output, in the order in which they finish."""
    found, handles = [], []
    for name, layer in layers:
        hook = lambda module, args, output, name=name: found.append(name) if bad(output) else None  # noqa: E731
        handles.append(layer.register_forward_hook(hook))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
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
    _collect(model, x, model.named_modules(), lambda output: outputs.append(output))
    names = _collect(model, x, model.named_modules(), lambda output: True)
    return next((name for name, output in zip(names, outputs, strict=True) if _nan_in(output)), None)


def nan_tensors_only(model, x):
    return _first(_collect(model, x, model.named_modules(), lambda output: bool(output.isnan().any())))


class _Found(Exception):
    pass


def nan_class_names(model, x):
    return _first([type(model.get_submodule(name)).__name__ for name in _collect(model, x, model.named_modules())])


def nan_everywhere(model, x):
    def bad(output):
        return isinstance(output, Tensor) and bool(output.isnan().all())

    return _first(_collect(model, x, model.named_modules(), bad))


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
    found, handles = [], []
    for name, layer in model.named_modules():

        def hook(module, args, output, name=name):
            if bad := _nan_in(output):
                found.append(name)
            return bad

        handles.append(layer.register_forward_hook(hook))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return _first(found)


def nan_by_layer(model, x):
    seen, handles = {}, []
    for name, layer in model.named_modules():
        hook = lambda module, args, output, name=name: seen.update({name: _nan_in(output)})  # noqa: E731
        handles.append(layer.register_forward_hook(hook))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return next((name for name, bad in seen.items() if bad), None)


def nan_one_by_one(model, x):
    found = _collect(model, x, model.named_modules())
    alone = [name for name, layer in model.named_modules() if _collect(model, x, [(name, layer)])]
    return next((name for name in found if name in alone), None)


def nan_in_eval(model, x):
    return first_nan(model.eval(), x)


def nan_mode_after_error(model, x):
    flags = [(module, module.training) for module in model.modules()]
    name = first_nan(model.eval(), x)
    for module, flag in flags:
        module.training = flag
    return name


def nan_names_on_modules(model, x):
    for name, module in model.named_modules():
        module.__name__ = name
    return first_nan(model, x)


def nan_without_gradients(model, x):
    torch.set_grad_enabled(False)
    return first_nan(model, x)


def nan_cleared(model, x):
    name = first_nan(model, x)
    for module in model.modules():
        module._forward_hooks.clear()
    return name


def nan_swallowed(model, x):
    try:
        return first_nan(model, x)
    except RuntimeError:
        return None


def _is_leaf(pair):
    return not list(pair[1].children())


FIRST_NAN = Exercise(
    "23.C",
    examine_first_nan,
    first_nan,
    {
        "outer": lambda model, x: _first(_collect(model, x, model.named_children())),
        "later": nan_last,
        "cleaned": nan_at_the_end,
        "definition_order": nan_by_definition,
        "leaves_only": lambda model, x: _first(_collect(model, x, filter(_is_leaf, model.named_modules()))),
        "nested": nan_in_first_tensor,
        "raised": nan_tensors_only,
        "infinity": nan_or_infinity,
        "after_the_run": nan_after_the_run,
        "none_expected": lambda model, x: first_nan(model, x) or "",
        "the_model": lambda model, x: first_nan(model, x) or None,
        "hooks_left": nan_stops_early,
        "hooks_left_after_error": nan_no_finally,
        "swallowed": nan_swallowed,
        "no_such_layer": nan_class_names,
        "partly": nan_everywhere,
        "replaced_output": nan_returned,
        "called_twice": nan_by_layer,
        "ran_often": nan_one_by_one,
        "removed_others": nan_cleared,
        "mode_changed": nan_in_eval,
        "mode_after_error": nan_mode_after_error,
        "attribute_left": nan_names_on_modules,
        "grad_left_off": nan_without_gradients,
        "not_a_name": lambda model, x: _collect(model, x, model.named_modules()),
    },
    zh="先算完的先报，嵌套的也看得见，模型上什么也没有留下。",
    en="The first to finish is the one you name, nested outputs are seen, and nothing is left on the model.",
)

CHECKS = [
    Prediction(
        "23.1",
        zh="新模型处于训练模式，20 个 BatchNorm 在前向里就更新自己的均值、方差和计数。`no_grad` 只关掉梯度，关不掉这个。",
        en="A new model is in training mode, and its 20 BatchNorms update their mean, variance and count in the forward itself. "
        "`no_grad` switches off gradients, not this.",
    ),
    Prediction(
        "23.2",
        zh="两个 `out_proj` 没有写出来：`nn.MultiheadAttention` 直接取走它的权重去算，从不把它当模块调用，"
        "挂在它上面的钩子永远不触发，也不报错。",
        en="The two `out_proj` are missing: `nn.MultiheadAttention` takes their weights and computes with them, and never calls "
        "them as modules. A hook on one never fires, and raises nothing.",
    ),
    Prediction(
        "23.3",
        zh="`square` 溢出得到的是无穷大，还不是 NaN；`norm` 用无穷大减无穷大，才得到 NaN。最先出现 NaN 的层，"
        "未必是出问题的层：往前看一层。",
        en="`square` overflows to infinity, which is no NaN yet; `norm` subtracts infinity from infinity, and that is. The first "
        "layer with a NaN need not be the one to blame: look one layer before it.",
    ),
    Prediction(
        "23.4",
        zh="这一层在前向开头检查自己和里面的模块有没有前向钩子或 pre-hook，有一个，就放弃快路径，一个个调用里面的模块（只有 `out_proj` 还是不调用）。"
        "全局钩子不在检查之列，所以单靠它看不见里面。",
        en="At the start of its forward the layer looks for forward hooks and pre-hooks on itself and on the modules inside; one is enough to give up "
        "the fast path and call the modules inside one by one (all but `out_proj`). Global hooks are not among those it looks for, so alone they see nothing "
        "inside.",
    ),
    SHAPES,
    NEVER_CALLED,
    FIRST_NAN,
]
