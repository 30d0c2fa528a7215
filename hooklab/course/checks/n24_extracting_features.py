"""Checks of notebook 24: extracting features."""

from contextlib import ExitStack, suppress
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from hooklab.census import hooks_on
from hooklab.course.check import Exercise, Prediction, expect_like, refuse, refuse_from_before, said
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
            refuse(
                "left_behind",
                zh=f"函数返回以后，模型上多了 {more} 个钩子，以后每次前向都会触发。",
                en=f"After the function has returned the model has more hooks than before, by {more}; they fire in every later "
                "forward.",
            )
        if more < 0:
            refuse(
                "removed_others",
                zh="模型上原有的钩子少了。只取下自己挂的。",
                en="Hooks that had been on the model before are gone. Take off your own and no others.",
            )


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
        refuse(
            "changed_attributes",
            zh=f"函数返回以后，模型里有模块的属性和原来不同：`{changed}`。模型要和原来一样。",
            en=f"After the function has returned modules of the model have other attributes than before: `{changed}`. Leave the "
            "model as it was.",
        )


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
        refuse(
            "ready_made",
            zh="这是 `features` 挂的钩子。这道题要亲手写：自己的钩子只要几行。",
            en="This is the hook of `features`. Write one by hand here; a few lines are enough.",
        )
    if not finished:
        refuse(
            "stopped",
            zh="`body.0` 后面的层没有运行：前向被你的钩子中断了。题目要的是运行一次模型，后面的层仍要收到原来的张量。",
            en="The layers behind `body.0` did not run: your hook has ended the forward. The model is to run once, and later layers "
            "still get the original tensor.",
        )
    if any(cut):
        refuse(
            "cut_in_place",
            zh="后面那一层收到的张量已经和计算图断开了：`detach_` 改的是模型自己的张量，`detach` 才另外返回一个。",
            en="The tensor that the next layer receives is cut off from the graph: `detach_` edits the model's own tensor, `detach` "
            "returns another one.",
        )
    _examine_calls(calls[:1])
    _examine_feature_value(got, want)
    if not model.training:
        refuse(
            "mode_changed",
            zh="模型原本在训练模式，你的函数返回以后却在评估模式。",
            en="The model was in training mode and is in evaluation mode after your function.",
        )
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
        refuse(
            "edited_input",
            zh="你的函数原地改写了传进来的输入：调用的人手里的数据也变了。",
            en="Your function has edited the input in place: the data of the caller has changed with it.",
        )


def _examine_run(passed):
    if not passed:
        refuse(
            "not_called",
            zh="我们事先挂在 `body.0` 上的钩子没有触发：模型没有运行，或者调用的是 `forward`，不是模型本身。",
            en="A hook that we had hung on `body.0` did not fire: the model was not run, or `forward` was called and not the "
            "model itself.",
        )
    if len(passed) > 2:
        refuse(
            "ran_twice",
            zh="`body.0` 不止运行了一次。有 BatchNorm 和 Dropout 的模型，多跑一次结果就变了。",
            en="`body.0` ran more than once. With batch norm or dropout, one more run changes the results.",
        )
    if len(passed) == 2 and passed[0] != passed[1]:
        refuse(
            "replaced_output",
            zh="后面那一层收到的，已经不是 `body.0` 的输出：看看你的钩子返回了什么。",
            en="What the next layer receives is no longer the output of `body.0`: see what your hook returns.",
        )


def _examine_feature_value(got, want):
    if got is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回那一层的输出。",
            en="The function returned `None`; the output of the layer is wanted.",
        )
    if isinstance(got, Tensor) and got.shape == want.shape and torch.equal(got.detach(), want.clamp(min=0)):
        refuse(
            "overwritten",
            zh="返回的值里一个负数也没有，而 `body.0` 刚算完时是有的：后面那一层改写了它。",
            en="No value that is returned is negative, yet some were when `body.0` was done: the layer behind has written over "
            "them.",
        )
    expect_like(got, want, "返回值", "what is returned")
    _examine_leaf(got)
    if got.requires_grad:
        refuse(
            "keeps_graph",
            zh="数值对了，但返回的张量还连着计算图，前面各层的输出都跟着留在内存里。",
            en="The values are right, but the tensor is still attached to the graph, and the outputs of the layers before stay "
            "in memory with it.",
        )


def _examine_leaf(got):
    if got.requires_grad and got.is_leaf:
        refuse(
            "requires_grad",
            zh="数值对了，也没有连着计算图，可是这个张量自己的 `requires_grad` 是 `True`。留 `False` 就好。",
            en="The values are right and no graph is attached, but the tensor's own `requires_grad` is `True`. Leave it `False`.",
        )


def _examine_where_grad_is_off(run):
    with torch.no_grad():
        run()
        switched_on = torch.is_grad_enabled()
    if switched_on:
        refuse(
            "grad_switched_on",
            zh="调用的人已经用 `no_grad` 关掉了梯度，函数返回以后却是开着的。恢复的应当是原来的状态。",
            en="The caller had switched gradients off with `no_grad`, and after the function they are on. Put back what was "
            "there before.",
        )


def _examine_frozen(model, before):
    now = [param.requires_grad for param in model.parameters()]
    if any(was and not still for was, still in zip(before, now, strict=True)):
        refuse(
            "froze",
            zh="函数返回以后，模型的参数不再需要梯度：它没法训练了。",
            en="After the function has returned parameters of the model no longer require gradients: it cannot be trained.",
        )
    if now != before:
        refuse(
            "thawed",
            zh="有的参数原本冻结着，不需要梯度；函数返回以后却需要了。",
            en="Some parameters had been frozen and required no gradient; after the function has returned they do.",
        )


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
        refuse(
            "left_after_error",
            zh="一切顺利时没有问题；模型中途报错时，钩子却留在了模型上。",
            en="Fine as long as nothing goes wrong; but when the model raises half-way, the hook stays on it.",
        )
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
    refuse(
        "hid_error",
        zh=f"模型在这一层之前抛出了 `{error.__name__}`，从你的函数里出来的却是 `{type(got).__name__}`：原来的错误被藏起来了。",
        en=f"Before this layer the model raised a `{error.__name__}`; what comes out of your function is `{type(got).__name__}`: "
        "the error itself is hidden.",
    )


def _examine_unreached(answer):
    model = _Net()
    with torch.no_grad():
        want = model.extra(model.body(BRIGHT))
    bright = answer(model, "extra", BRIGHT.clone())
    if isinstance(bright, Tensor) and bright.shape == want.shape and torch.allclose(bright.detach(), 2 * want):
        refuse(
            "overwritten_by_hand",
            zh="`body.0` 对了；`extra` 后面没有 ReLU，只有一句 `*= 2`，返回的却是改写以后的值。原地改写的不一定是模块。",
            en="Right for `body.0`. Behind `extra` there is no ReLU, only a line with `*= 2`, and what came back is the value "
            "written over. What works in place need not be a module.",
        )
    expect_like(bright, want, " `extra` 的输出", "the output of `extra`")
    _examine_double(answer(_Net().double(), "body.0", BRIGHT.double()))
    try:
        got = answer(model, "extra", DARK.clone())
    except KeyError:
        return
    except Exception as error:
        refuse(
            "other_error",
            zh=f"模型没有走到那一层时，应当抛出 `KeyError`，抛出的却是 `{type(error).__name__}`。",
            en=f"When the model does not reach the layer a `KeyError` is wanted; raised was `{type(error).__name__}`.",
        )
    if isinstance(got, Tensor) and got.shape == bright.shape and torch.equal(got, bright):
        refuse(
            "stale",
            zh="第二次调用没有走到 `extra`，返回的却是第一次调用的值。上一次的值存在哪里？",
            en="The second call did not reach `extra`, and what came back is the value of the first call. Where was that "
            "one stored?",
        )
    refuse(
        "no_error",
        zh=f"模型没有走到那一层时，应当抛出 `KeyError`，函数却返回了 `{type(got).__name__}`。",
        en=f"When the model does not reach the layer a `KeyError` is wanted; a `{type(got).__name__}` came back.",
    )


def _examine_double(got):
    if isinstance(got, Tensor) and got.dtype != torch.float64:
        refuse(
            "float32_only",
            zh=f"模型换成 `float64`，返回的却是 `{got.dtype}`：应当和那一层的输出一样。",
            en=f"With a model in `float64` what comes back is `{got.dtype}`: wanted is the dtype of the layer's output.",
        )


_STALE = {}


def stale(model, name, x):
    def keep(module, args, output):
        _STALE[name] = output.detach().clone()

    with model.get_submodule(name).register_forward_hook(keep):
        model(x)
    return _STALE[name]


def _feature_with(keep, *, clean=True, run=lambda model, x: model(x)):
    """A wrong answer that keeps `keep(output)`; `clean` takes the hook off."""

    def answer(model, name, x):
        kept = {}
        handle = model.get_submodule(name).register_forward_hook(
            lambda module, args, output: kept.update({name: keep(output)})
        )
        try:
            run(model, x)
        finally:
            if clean:
                handle.remove()
        return kept[name]

    return answer


def left_after_error(model, name, x):
    kept = {}
    handle = model.get_submodule(name).register_forward_hook(
        lambda module, args, output: kept.update({name: output.detach().clone()})
    )
    model(x)
    handle.remove()
    return kept[name]


def replaced_output(model, name, x):
    kept = {}

    def keep(module, args, output):
        kept[name] = output.detach().clone()
        return output.detach().clone()

    with model.get_submodule(name).register_forward_hook(keep):
        model(x)
    return kept[name]


def index_error(model, name, x):
    kept = []
    hook = lambda module, args, output: kept.append(output.detach().clone())  # noqa: E731
    with model.get_submodule(name).register_forward_hook(hook):
        model(x)
    return kept[0]


def no_error(model, name, x):
    kept = {}
    hook = lambda module, args, output: kept.update({name: output.detach().clone()})  # noqa: E731
    with model.get_submodule(name).register_forward_hook(hook):
        model(x)
    return kept.get(name)


def feature_removed_others(model, name, x):
    try:
        return feature(model, name, x)
    finally:
        model.get_submodule(name)._forward_hooks.clear()


def ran_twice(model, name, x):
    model(x)
    return feature(model, name, x)


def mode_changed(model, name, x):
    return feature(model.eval(), name, x)


def edited_input(model, name, x):
    try:
        return feature(model, name, x)
    finally:
        x.zero_()


def not_in_place(model, name, x, then=False):
    """Switches off what works in place; `then` is what it leaves."""
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    try:
        return _feature_with(Tensor.detach)(model, name, x)
    finally:
        for module in model.modules():
            if hasattr(module, "inplace"):
                module.inplace = then


def grad_switched_on(model, name, x):
    torch.set_grad_enabled(False)
    try:
        return feature(model, name, x)
    finally:
        torch.set_grad_enabled(True)


def feature_grad_left_off(model, name, x):
    torch.set_grad_enabled(False)
    return feature(model, name, x)


def hid_error(model, name, x):
    kept = {}
    handle = model.get_submodule(name).register_forward_hook(
        lambda module, args, output: kept.update({name: output.detach().clone()})
    )
    try:
        model(x)
    except Exception:
        pass
    finally:
        handle.remove()
    return kept[name]


def with_features(model, name, x):
    with features(model, name, keep=lambda output: output.detach().clone()) as f:
        model(x)
    return f[name]


def by_ending_the_forward(model, name, x):
    class Enough(Exception):
        pass

    kept = {}

    def keep(module, args, output):
        kept[name] = output.detach().clone()
        raise Enough

    with model.get_submodule(name).register_forward_hook(keep), suppress(Enough):
        model(x)
    return kept[name]


FEATURE = Exercise(
    "24.A",
    examine_feature,
    feature,
    {
        "ready_made": with_features,
        "stopped": by_ending_the_forward,
        "overwritten": _feature_with(Tensor.detach),
        "keeps_graph": _feature_with(Tensor.clone),
        "requires_grad": lambda *given: feature(*given).requires_grad_(),
        "left_behind": _feature_with(lambda output: output.detach().clone(), clean=False),
        "left_after_error": left_after_error,
        "removed_others": feature_removed_others,
        "stale": stale,
        "other_error": index_error,
        "no_error": no_error,
        "replaced_output": replaced_output,
        "cut_in_place": _feature_with(lambda output: output.detach_().clone()),
        "returned_nothing": lambda model, name, x: print(end=str(feature(model, name, x))[:0]),
        "not_called": lambda model, name, x: model.get_submodule(name).forward(x).detach(),
        "by_forward": _feature_with(lambda output: output.detach().clone(), run=lambda model, x: model.forward(x)),
        "ran_twice": ran_twice,
        "mode_changed": mode_changed,
        "grad_left_off": feature_grad_left_off,
        "hid_error": hid_error,
        "edited_input": edited_input,
        "changed_attributes": not_in_place,
        "overwritten_by_hand": lambda model, name, x: not_in_place(model, name, x, then=True),
        "float32_only": _feature_with(lambda output: output.detach().clone().float()),
        "grad_switched_on": grad_switched_on,
        "froze": lambda model, name, x: feature(model.requires_grad_(False), name, x),
        "wrong_shape": lambda model, name, x: model(x).detach(),
        "wrong_type": lambda model, name, x: {name: feature(model, name, x)},
    },
    zh="不带计算图，改写不了，钩子不留，没走到就报错：四个毛病一个也没有。",
    en="No graph, nothing overwritten, no hook left, an error where the layer was not reached: none of the four flaws.",
)

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
        refuse(
            "graph_built",
            zh="返回的张量不带计算图，可前向照样建了图，这一批的中间结果一直占着内存：`detach` 只切断你留下的那一个张量。",
            en="What came back has no graph, but the forward has built one, which holds what the batch computes on the way: "
            "`detach` cuts off only the tensor that you keep.",
        )
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
        refuse(
            "swallowed",
            zh="第二批的形状不对，前向报了错，你的函数却把错误吞掉了：调用的人会以为每一批都算了。",
            en="The shape of the second batch was wrong and the forward raised; your function swallowed the error: the caller "
            "would believe that every batch was computed.",
        )
    if more:
        refuse(
            "hooks_left_after_error",
            zh=f"前向报错之后，模型上多了 {more} 个钩子：出错时，后面的语句不会执行，取下钩子要放进 `finally`，或者用 `with`。",
            en=f"After a forward that raised the model has more hooks than before, by {more}: when it raises, the statements that "
            "follow do not run; take hooks off in `finally`, or by `with`.",
        )
    if modes != [module.training for module in model.modules()]:
        refuse(
            "mode_after_error",
            zh="前向报错之后，有的模块停在了别的模式：恢复 `training` 的那几行没有执行到。",
            en="After a forward that raised, some module is left in the other mode: the lines that restore `training` were not "
            "reached.",
        )


def _examine_another(answer, model):
    """Another layer, other sizes, a second call; where the caller has switched gradients off; a generator; another dtype."""
    batches = [torch.randn(2, 1, 9, 7), torch.randn(3, 1, 9, 7)]
    want = embed(deepcopy(model), "conv", batches)
    found = []
    _examine_where_grad_is_off(lambda: found.append(answer(model, "conv", batches)))
    if not _agrees(found[0], want):
        shape = _kind(found[0])
        refuse(
            "first_call_only",
            zh=f"第一次调用对了；再调用一次，换成 `conv` 层和 2 批共 5 张图，就不对了：应当是 `{tuple(want.shape)}`，得到的是 "
            f"`{shape}`。有没有写死的层名和大小，有没有上一次留下的值？",
            en=f"Right in the first call; wrong in a second, with the layer `conv` and 5 images in 2 batches: expected "
            f"`{tuple(want.shape)}` and its values, found `{shape}`. Is a name or a size fixed in the code, or is something "
            "kept from the call before?",
        )
    try:
        got = answer(model, "conv", (batch for batch in batches))
        wrong = "" if _agrees(got, want) else _kind(got)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        wrong = said(error)
    if wrong:
        refuse(
            "walked_twice",
            zh=f"`batches` 是列表时对了；换成生成器，应当还是 `{tuple(want.shape)}`，得到的是 `{wrong}`。生成器没有长度，从头走过一遍就空了。",
            en=f"Right where `batches` is a list; with a generator it should be `{tuple(want.shape)}` again; found `{wrong}`. A "
            "generator has no length, and is empty once you have gone through it.",
        )
    _examine_double(answer(model.double(), "conv", [batch.double() for batch in batches]))


def _agrees(got, want):
    same_shape = isinstance(got, Tensor) and got.shape == want.shape
    return same_shape and torch.allclose(got, want, rtol=1e-4, atol=1e-6)


def _kind(got):
    return str(tuple(got.shape)) if isinstance(got, Tensor) else type(got).__name__


def _examine_seen(seen, dropping):
    if not seen:
        refuse(
            "not_called",
            zh="我们事先挂在 `norm` 上的钩子没有触发：模型没有运行。",
            en="A hook that we had hung on `norm` did not fire: the model was not run.",
        )
    if any(training for _, training in seen):
        refuse(
            "train_mode",
            zh="`norm` 是在训练模式下运行的：Dropout 在随机丢，BatchNorm 的统计量也被你改了。",
            en="`norm` ran in training mode: dropout drops at random, and you have changed the statistics of batch norm.",
        )
    if any(dropping):
        refuse(
            "dropout_on",
            zh="`norm` 在评估模式，它前面的 `drop` 却在训练模式：Dropout 还在随机丢。",
            en="`norm` was in evaluation mode, but `drop` before it in training mode: dropout still drops at random.",
        )
    sizes = [size for size, _ in seen]
    if sizes != [4, 4, 1]:
        refuse(
            "not_batch_by_batch",
            zh=f"给的是 3 批，大小 `[4, 4, 1]`；模型实际收到的是 `{sizes}`。",
            en=f"Given were 3 batches of sizes `[4, 4, 1]`; what the model received is `{sizes}`.",
        )


def _examine_embedding(got, want, ruined):
    if got is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一个张量。",
            en="The function returned `None`; one tensor is wanted.",
        )
    if isinstance(got, list | tuple):
        refuse(
            "not_joined",
            zh=f"返回的是 `{type(got).__name__}`，里面有 {len(got)} 项。各批要接成一个张量。",
            en=f"A `{type(got).__name__}` of {len(got)} came back. Join the batches into one tensor.",
        )
    if isinstance(got, Tensor) and got.ndim and len(got) == 1:
        refuse(
            "last_batch_only",
            zh="9 张图只返回了 1 行：留下的只有最后一批。",
            en="For 9 images 1 row came back: only the last batch was kept.",
        )
    if isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, ruined, atol=1e-5):
        refuse(
            "overwritten",
            zh="得到的是 ReLU 之后的平均值：你取平均的时候，`norm` 的输出已经被改写了。",
            en="These are the means after ReLU: by the time you took the mean, the output of `norm` had been overwritten.",
        )
    expect_like(got, want, "返回值", "what is returned")
    _examine_leaf(got)
    if got.requires_grad:
        refuse(
            "keeps_graph",
            zh="数值对了，但返回的张量还连着计算图：每一批的中间结果都还在内存里。",
            en="The values are right, but what came back is attached to the graph: what every batch computed on the way is "
            "still in memory.",
        )


def _examine_modes(model, modes):
    now = {name: module.training for name, module in model.named_modules()}
    if now != modes and not model.training:
        refuse(
            "left_in_eval",
            zh="模型原本在训练模式，函数返回以后却留在评估模式。",
            en="The model was in training mode and is still in evaluation mode after the function.",
        )
    if now["stem.1"]:
        refuse(
            "unfroze",
            zh="`stem.1` 原本冻结在评估模式，现在却回到了训练模式：这个 BatchNorm 又会跟着数据变。",
            en="`stem.1` had been frozen in evaluation mode and is back in training mode: this batch norm will follow the data "
            "again.",
        )
    if now != modes:
        name = next(name for name in now if now[name] != modes[name])
        refuse(
            "part_left_in_eval",
            zh=f"模型本身回到了训练模式，`{name}` 却还在评估模式：`training` 每个模块各有一个。",
            en=f"The model itself is back in training mode, but `{name}` is still in evaluation mode: each module has a "
            "`training` of its own.",
        )


def _restoring(run):
    """A wrong answer: `run` in evaluation mode, and every flag restored."""

    def answer(model, name, batches):
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            return run(model, name, batches)
        finally:
            for module, training in modes.items():
                module.training = training

    return answer


def _means(model, name, batches, keep=lambda t: t.mean((2, 3))):
    with features(model, name, keep=keep) as f:
        return [f.run(batch)[name] for batch in batches]


@_restoring
@torch.no_grad()
def mean_afterwards(model, name, batches):
    kept, rows = {}, []
    with model.get_submodule(name).register_forward_hook(lambda m, a, output: kept.update({name: output})):
        for batch in batches:
            model(batch)
            rows.append(kept[name].mean((2, 3)))
    return torch.cat(rows)


def unfroze(model, name, batches):
    with torch.no_grad():
        rows = _means(model.eval(), name, batches)
    model.train()
    return torch.cat(rows)


@_restoring
def grad_left_off(model, name, batches):
    torch.set_grad_enabled(False)
    return torch.cat(_means(model, name, batches))


@_restoring
@torch.no_grad()
def embed_left_behind(model, name, batches):
    f = features(model, name, keep=lambda t: t.mean((2, 3)))
    return torch.cat([f.run(batch)[name] for batch in batches])


@torch.no_grad()
def train_mode(model, name, batches):
    return torch.cat(_means(model, name, batches))


@_restoring
@torch.no_grad()
def last_batch_only(model, name, batches):
    with features(model, name, keep=lambda t: t.mean((2, 3))) as f:
        for batch in batches:
            model(batch)
    return f[name]


def part_left_in_eval(model, name, batches):
    training = model.training
    try:
        return embed(model.eval(), name, batches)
    finally:
        model.training = training


def dropout_on(model, name, batches):
    modes = {module: module.training for module in model.modules()}
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    with torch.no_grad():
        rows = _means(model, name, batches)
    for module, training in modes.items():
        module.training = training
    return torch.cat(rows)


def embed_thawed(model, name, batches):
    try:
        return embed(model.requires_grad_(False), name, batches)
    finally:
        model.requires_grad_(True)


def embed_switched_on(model, name, batches):
    try:
        return embed(model, name, batches)
    finally:
        torch.set_grad_enabled(True)


def froze(model, name, batches):
    return embed(model.requires_grad_(False), name, batches)


def embed_removed_others(model, name, batches):
    try:
        return embed(model, name, batches)
    finally:
        model.get_submodule(name)._forward_hooks.clear()


def embed_counting_first(model, name, batches):
    return torch.cat([embed(model, name, [batches[number]]) for number in range(len(batches))])


def embed_into_zeros(model, name, batches):
    rows = [embed(model, name, [batch]) for batch in batches]
    joined = torch.zeros(sum(map(len, rows)), rows[0].shape[1])
    joined[:] = torch.cat(rows)
    return joined


@_restoring
@torch.no_grad()
def embed_without_finally(model, name, batches):
    rows = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, a, output: rows.append(output.mean((2, 3))))
    for batch in batches:
        model(batch)
    handle.remove()
    return torch.cat(rows)


def embed_restoring_last(model, name, batches):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        got = torch.cat(_means(model, name, batches))
    for module, training in modes.items():
        module.training = training
    return got


def embed_skipping(model, name, batches):
    rows = []
    for batch in batches:
        try:
            rows.append(embed(model, name, [batch]))
        except RuntimeError:
            continue
    return torch.cat(rows)


EMBED = Exercise(
    "24.B",
    examine_embed,
    embed,
    {
        "train_mode": train_mode,
        "left_in_eval": lambda model, name, batches: embed(model.eval(), name, batches),
        "unfroze": unfroze,
        "overwritten": mean_afterwards,
        "keeps_graph": _restoring(lambda *given: torch.cat(_means(*given))),
        "graph_built": _restoring(lambda *given: torch.cat(_means(*given, keep=lambda t: t.detach().mean((2, 3))))),
        "requires_grad": lambda *given: embed(*given).requires_grad_(),
        "last_batch_only": last_batch_only,
        "not_joined": _restoring(torch.no_grad()(_means)),
        "not_batch_by_batch": lambda model, name, batches: embed(model, name, [torch.cat(batches)]),
        "grad_left_off": grad_left_off,
        "froze": froze,
        "thawed": embed_thawed,
        "part_left_in_eval": part_left_in_eval,
        "dropout_on": dropout_on,
        "first_call_only": lambda model, name, batches: embed(model, "norm", batches),  # whatever the name
        "walked_twice": embed_counting_first,
        "float32_only": embed_into_zeros,
        "grad_switched_on": embed_switched_on,
        "left_behind": embed_left_behind,
        "hooks_left_after_error": embed_without_finally,
        "mode_after_error": embed_restoring_last,
        "swallowed": embed_skipping,
        "removed_others": embed_removed_others,
        "wrong_shape": _restoring(
            torch.no_grad()(lambda *given: torch.cat(_means(*given, keep=lambda t: t.detach().clone())))
        ),
        "returned_nothing": lambda model, name, batches: print(end=str(embed(model, name, batches))[:0]),
        "not_called": lambda model, name, batches: torch.zeros(9, 6),
        "raised": _restoring(
            torch.no_grad()(lambda *given: torch.cat(_means(*given, keep=lambda t: t.mean((2, 3)).squeeze())))
        ),
    },
    zh="一批一批地算，每批只留几个数，模型和梯度开关都和原来一样。",
    en="One batch at a time, a few numbers kept of each, and the model and the switch for gradients as they were.",
)

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
        refuse(
            "only_culprits",
            zh="列出的是动手改写的层。要的是输出被别人改写的层。",
            en="The layers listed are those that do the writing. Wanted are those whose output is written over.",
        )
    if got == {"head"}:
        refuse(
            "last_name",
            zh="列出的全是最后一层的名字：每个钩子都在循环结束以后才去查 `name`。",
            en="Only the name of the last layer is listed: every hook looks up `name` after the loop is over.",
        )
    if not got:
        refuse(
            "nothing_found",
            zh="一层也没找到，而 `block.0` 后面就是原地的 ReLU。你是什么时候记下那一层的原样的？",
            en="None was found, yet a ReLU in place follows `block.0`. When do you note what a layer's output is like?",
        )
    if got == EDITED - {"block.0", "pair.1"}:
        refuse(
            "children_only",
            zh="少了 `block.0` 和 `pair.1`。它们在别的层里面，外面那一层返回的是同一个张量：里外两层都挂了钩子、各记了一笔吗？",
            en="`block.0` and `pair.1` are missing. They lie inside other layers, which return the same tensor: is there a hook on "
            "each of the two, and an entry for each?",
        )
    if got - {"block"} == EDITED | {CULPRIT}:
        refuse(
            "counted_culprit",
            zh=f"多了 `{CULPRIT}`：它自己动手改写，但是它的输出返回以后，谁也没有再改。",
            en=f"`{CULPRIT}` is one too many: it does the writing, but after it has returned nobody edits its output.",
        )
    if got == {"block.0"}:
        refuse(
            "relu_only",
            zh="只找到了 ReLU 之前的那一层。`+=` 和 `mul_` 不是模块，也会改写。",
            en="Only the layer before ReLU was found. `+=` and `mul_` are no modules, and they overwrite too.",
        )
    _expect_names(got, EDITED, "一个小模型", "a small model")
    _examine_calls(calls)
    names = _names_found(answer, _Twice(), torch.randn(6, 4))
    got = set(names)
    if got != EDITED_OF_TWICE and got <= EDITED_OF_TWICE:
        refuse(
            "one_call",
            zh=f"`first` 和 `second` 各调用两次：前者头一次的输出被改写，后者第二次的被改写，两个都算；找到的是 `{sorted(got)}`。"
            "一层的每一次调用，你都记下了吗？",
            en=f"`first` and `second` are called twice each. Of the one the first output is written over, of the other the second, "
            f"and both count; found `{sorted(got)}`. Do you note every call of a layer?",
        )
    _expect_names(got, EDITED_OF_TWICE, "每层调用两次的模型", "a model that calls each layer twice")
    if doubled := [name for name in names if names.count(name) > 1]:
        refuse(
            "name_twice",
            zh=f"`{doubled[0]}` 在列表里不止一次：一层调用了几次，被改写了几次，名字都只列一次。",
            en=f"`{doubled[0]}` is in the list more than once: however often a layer was called, and its output overwritten, list its "
            "name once.",
        )
    _examine_unchanged(answer)
    _examine_left_after_error(lambda model: answer(model, torch.randn(6, 4)))
    _examine_squeezenet(answer)


def _examine_calls(calls):
    if not calls:
        refuse(
            "by_forward",
            zh="挂在模型本身的钩子没有触发：模型没有运行，或者不是用 `model(x)` 运行的。直接调用 `forward` 会跳过钩子。",
            en="A hook on the model itself did not fire: the model did not run, or not by `model(x)`. Calling `forward` directly "
            "skips hooks.",
        )
    if len(calls) > 1:
        refuse(
            "ran_twice",
            zh=f"模型应当运行 1 次，实际运行了 {len(calls)} 次。",
            en=f"The model should run 1 time; it ran {len(calls)} times.",
        )


def _names_found(answer, model, x):
    hooks, attributes, mode = _Hooks(model), _attributes(model), model.training
    try:
        got = answer(model, x)
    finally:
        more = hooks.left()
    if got is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一个列表。",
            en="The function returned `None`; a list is wanted.",
        )
    if not isinstance(got, list | tuple | set):
        refuse(
            "not_a_list",
            zh=f"应当返回名字的列表，得到的是 `{type(got).__name__}`。",
            en=f"Return a list of names; found a `{type(got).__name__}`.",
        )
    if not all(isinstance(name, str) for name in got):
        refuse(
            "not_names",
            zh=f"应当返回名字的列表，得到的是 `{type(got).__name__}`，里面不全是字符串。",
            en=f"Return a list of names; found a `{type(got).__name__}` that holds other things than strings.",
        )
    hooks.examine(more)
    refuse_from_before(got, model, EDITED | EDITED_OF_TWICE)
    if model.training != mode:
        refuse(
            "mode_changed",
            zh="模型的训练或评估模式变了。只看，不要改模型。",
            en="The model is no longer in the mode it was in, training or evaluation. Look, and leave it as it was.",
        )
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
        refuse(
            "left_after_error",
            zh="一切顺利时没有问题；模型中途报错时，钩子却留在了模型上。",
            en="Fine as long as nothing goes wrong; but when the model raises half-way, hooks stay on it.",
        )
    if not error:
        refuse(
            "hid_error",
            zh="模型抛出了 `RuntimeError`，你的函数却把它吞掉了：调用的人会以为一切正常。",
            en="The model raised a `RuntimeError`, and your function swallowed it: the caller would believe that all is well.",
        )


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
        refuse(
            "by_values",
            zh="`Softplus` 后面接了一个原地的 ReLU，收到的全是正数：写过了，数值却没变，也算改写。"
            "比较数值是看不出来的。谁在记改写的次数？看第 6 节。",
            en="Behind a `Softplus` a ReLU works in place on positive numbers only: it writes, and no value changes. That counts too, and "
            "comparing values does not show it. What keeps count of edits? See section 6.",
        )


def _examine_squeezenet(answer):
    from torchvision.models import squeezenet1_1

    model, x = squeezenet1_1().eval(), torch.randn(1, 3, 48, 48)
    got = set(_names_found(answer, model, x))
    _expect_names(got, set(overwritten(model, x)), " `squeezenet1_1` ", "`squeezenet1_1`")


def _recording(model, x, note, judge, names=lambda model: model.named_modules(), clean=True, kept=None):
    """A wrong answer: `note(output)` in a hook of each layer, then those for which `judge` says so."""
    seen, handles = [], []
    for name, module in names(model):

        def keep(module, args, output, name=name):
            seen.append((name, output, note(output)))

        handles.append(module.register_forward_hook(keep))
    model(x)
    for handle in handles if clean else ():
        handle.remove()
    if kept is not None:
        kept.update({name: (output, noted) for name, output, noted in seen})
    return list(dict.fromkeys(name for name, output, noted in seen if judge(output, noted)))


def _edited(output, version):
    return output._version != version


def last_name(model, x):
    seen, handles = [], []
    for name, module in model.named_modules():

        def keep(module, args, output):
            seen.append((output, output._version, lambda: name))  # noqa: B023

        handles.append(module.register_forward_hook(keep))
    model(x)
    for handle in handles:
        handle.remove()
    return [named() for output, version, named in seen if output._version != version]


def relu_only(model, x):
    found, outputs, handles = [], {}, []
    for name, module in model.named_modules():

        def before(module, args, name=name):
            if getattr(module, "inplace", False):
                found.extend(other for other, output in outputs.items() if output is args[0])

        def after(module, args, output, name=name):
            outputs[name] = output

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def last_call(model, x):
    noted = {}
    _recording(model, x, lambda output: output._version, _edited, kept=noted)
    return [name for name, (output, version) in noted.items() if output._version != version]


def overwritten_swallowed(model, x):
    try:
        return overwritten(model, x)
    except RuntimeError:
        return []


def overwritten_cleared(model, x):
    try:
        return overwritten(model, x)
    finally:
        for module in model.modules():
            module._forward_hooks.clear()


def every_call(model, x, run=lambda model, x: model(x)):
    seen = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            note = lambda _, args, output, name=name: seen.append((name, output, output._version))  # noqa: E731
            hooks.enter_context(module.register_forward_hook(note))
        run(model, x)
    return [name for name, output, version in seen if output._version != version]


def overwritten_by_default(model, x, seen=[]):  # noqa: B006
    seen += overwritten(model, x)
    return list(dict.fromkeys(seen))


def ran_twice_overwritten(model, x):
    model(x)
    return overwritten(model, x)


def names_on_modules(model, x):
    for name, module in model.named_modules():
        module.name = name
    return overwritten(model, x)


def overwritten_grad_left_off(model, x):
    torch.set_grad_enabled(False)
    return overwritten(model, x)


def _pieces(model):
    return [(name, module) for name, module in model.named_modules() if not list(module.children())]


OVERWRITTEN = Exercise(
    "24.C",
    examine_overwritten,
    overwritten,
    {
        "counted_culprit": lambda model, x: _recording(model, x, id, lambda output, _: output._version > 0),
        "only_culprits": lambda model, x: [
            name for name, module in model.named_modules() if getattr(module, "inplace", False)
        ],
        "nothing_found": lambda model, x: _recording(
            model, x, Tensor.detach, lambda output, noted: not torch.equal(output, noted)
        ),
        "by_values": lambda model, x: _recording(
            model, x, torch.clone, lambda output, before: not torch.equal(output, before)
        ),
        "relu_only": relu_only,
        "last_name": last_name,
        "children_only": lambda model, x: _recording(
            model, x, lambda output: output._version, _edited, names=nn.Module.named_children
        ),
        "wrong_names": lambda model, x: _recording(model, x, lambda output: output._version, _edited, names=_pieces),
        "left_behind": lambda model, x: _recording(model, x, lambda output: output._version, _edited, clean=False),
        "left_after_error": lambda model, x: _recording(model, x, lambda output: output._version, _edited),
        "hid_error": overwritten_swallowed,
        "removed_others": overwritten_cleared,
        "one_call": last_call,
        "name_twice": every_call,
        "from_before": overwritten_by_default,
        "ran_twice": ran_twice_overwritten,
        "by_forward": lambda model, x: every_call(model, x, run=lambda model, x: model.forward(x)),
        "mode_changed": lambda model, x: overwritten(model.eval(), x),
        "grad_left_off": overwritten_grad_left_off,
        "changed_attributes": names_on_modules,
        "not_a_list": lambda model, x: ", ".join(overwritten(model, x)),
        "not_names": lambda model, x: [model.get_submodule(name) for name in overwritten(model, x)],
        "returned_nothing": lambda model, x: print(end=str(overwritten(model, x))[:0]),
    },
    zh="版本计数器什么原地操作都记得，不管是不是模块。`features` 就靠它报错。",
    en="The version counter remembers every edit in place, by a module or not. It is what `features` goes by.",
)

CHECKS = [
    Prediction(
        "24.1",
        zh="特征带着 `grad_fn`，顺着它，整张计算图都活着；图里存着反向要用的每一个卷积输出。特征本身只有 16 KiB。",
        en="The feature carries a `grad_fn`, and through it the whole graph lives, with every conv output that backward would "
        "need. The feature itself is 16 KiB.",
    ),
    Prediction(
        "24.2",
        zh="暗的批次没有走到 `refine`，钩子没有触发，字典里还是亮的那一批的值，谁也没有清掉它。",
        en="The dark batch did not reach `refine`, the hook did not fire, and the dictionary still holds the value of the "
        "bright batch: nobody cleared it.",
    ),
    Prediction(
        "24.3",
        zh="一个负数也没有：我们看到的是 ReLU 的输出，虽然要的是 `bn1`。",
        en="Not one is negative: what we see is the output of ReLU, though `bn1` was asked for.",
    ),
    Prediction(
        "24.4",
        zh="单独要 `bn1` 时，后面的 ReLU 被删掉了，没人改写它；多要一层，ReLU 就得运行，而返回的值没有复制过。答案随着你还要了别的什么而变。",
        en="With `bn1` alone the ReLU behind it is cut away and nobody writes over it; ask for a later layer and ReLU must run, "
        "on a value that is not cloned. The answer depends on what else you ask for.",
    ),
    FEATURE,
    EMBED,
    OVERWRITTEN,
]
