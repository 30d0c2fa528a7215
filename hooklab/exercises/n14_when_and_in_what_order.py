"""Checks of notebook 14: which hooks fire, and in what order."""

import torch
from torch import nn

from hooklab.census import HookLeak, hooks_on, no_leftovers
from hooklab.exercises.check import Exercise, Prediction, refuse

# ---- 14.A: a hook that fires once and takes itself off ----


def on_first_gradient(tensor, function):
    def hook(grad):
        handle.remove()
        function(grad)

    handle = tensor.register_hook(hook)


def examine_on_first_gradient(answer):
    x = torch.ones(2, requires_grad=True)
    y, ours, seen = x * 2, [], []
    y.register_hook(lambda grad: ours.append(1))

    def function(grad):
        seen.append(grad.tolist())
        return grad * 100

    answer(y, function)
    if seen:
        refuse(
            "called_at_once",
            zh="还没有反向，`function` 就被调用了。要把函数交给钩子，不是把调用的结果交给它。",
            en="`function` was called before any backward. Hand the function to the hook, not the result of calling it.",
        )
    (y * 3).sum().backward(retain_graph=True)
    (y * 5).sum().backward()
    if not seen:
        refuse(
            "never_called",
            zh="反向跑了两遍，`function` 一次也没有被调用。",
            en="Backward ran twice, and `function` was never called.",
        )
    if len(seen) > 1:
        refuse(
            "called_again",
            zh=f"反向跑了两遍，`function` 被调用了 {len(seen)} 次，应当只有第 1 次。",
            en=f"Backward ran twice and `function` was called {len(seen)} times; only the 1st time is wanted.",
        )
    if seen != [[3.0, 3.0]]:
        refuse(
            "wrong_gradient",
            zh=f"`function` 应当收到第一次的梯度 `[3.0, 3.0]`，收到的是 `{seen[0]}`。",
            en=f"`function` should get the first gradient, `[3.0, 3.0]`; it got `{seen[0]}`.",
        )
    if x.grad.tolist() != [16.0, 16.0]:
        refuse(
            "changed",
            zh="`function` 的返回值顶替了梯度。钩子要返回 `None`。",
            en="What `function` returns has replaced the gradient. The hook should return `None`.",
        )
    if len(ours) != 2:
        refuse(
            "removed_others",
            zh="`y` 上原有的钩子也被取下了。只取下自己的那一个。",
            en="A hook that was on `y` before is gone too. Take off only your own.",
        )
    if len(y._backward_hooks) != 1:
        refuse(
            "stays",
            zh="`function` 只被调用了一次，但钩子还挂着，以后每次反向都要白跑一趟。",
            en="`function` was called once, but the hook is still there and runs for nothing in every later backward.",
        )


def stays(tensor, function):
    calls = []

    def hook(grad):
        if not calls:
            calls.append(1)
            function(grad)

    tensor.register_hook(hook)


def changed(tensor, function):
    def hook(grad):
        handle.remove()
        return function(grad)

    handle = tensor.register_hook(hook)


def removed_others(tensor, function):
    def hook(grad):
        function(grad)
        tensor._backward_hooks.clear()

    tensor.register_hook(hook)


def never_called(tensor, function):
    tensor.register_hook(lambda grad: None).remove()
    tensor.register_hook(lambda grad: None)


ON_FIRST_GRADIENT = Exercise(
    "14.A",
    examine_on_first_gradient,
    on_first_gradient,
    {
        "stays": stays,
        "changed": changed,
        "removed_others": removed_others,
        "called_again": lambda tensor, function: tensor.register_hook(lambda grad: (function(grad), None)[1]),
        "called_at_once": lambda tensor, function: tensor.register_hook(function(torch.zeros(2))),
        "never_called": never_called,
    },
    zh="触发一次，取下自己，不动梯度。",
    en="It fires once, takes itself off, and leaves the gradient alone.",
)

# ---- 14.B: the places where a function has left hooks ----


def left_by(function, model):
    try:
        with no_leftovers(model):
            function(model)
    except HookLeak as leak:
        return [hook.place for hook in leak.hooks]
    return []


def _look(*args):
    """A hook that was there before, or is left behind."""


def _net():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    net[1].register_forward_hook(_look)
    return net


def _forgets(net):
    net[1].register_forward_hook(_look)
    net[2].weight.register_hook(_look)
    net[0].register_forward_pre_hook(_look).remove()


def examine_left_by(answer):
    net, calls = _net(), []
    got = answer(lambda model: calls.append(1), net)
    if len(calls) != 1:
        refuse(
            "call_count",
            zh=f"`function` 应当被调用 1 次，实际是 {len(calls)} 次。",
            en=f"`function` should be called 1 time; it was called {len(calls)} times.",
        )
    if not isinstance(got, list) or any(not isinstance(place, str) for place in got):
        refuse(
            "not_places",
            zh=f"应当返回一个列表，里面是字符串，得到的是 `{type(got).__name__}`。",
            en=f"Return a list of strings; found `{type(got).__name__}`.",
        )
    if got:
        refuse(
            "counted_old",
            zh=f"`function` 什么也没留下，却得到了 `{got}`：原来就有的钩子不该算。",
            en=f"`function` left nothing, yet the answer is `{got}`: hooks that were there before do not count.",
        )
    got = answer(_forgets, net)
    if "1" not in got:
        refuse(
            "missed_twin",
            zh=f"得到的是 `{got}`，少了 `1`：那里原来就有一个同样的函数，`function` 又注册了一次，是另一个钩子。",
            en=f"Found `{got}`, without `1`: the same function was there before, and `function` has registered it once more, "
            "which is another hook.",
        )
    if "2.weight" not in got:
        refuse(
            "missed_parameter",
            zh=f"得到的是 `{got}`，少了 `2.weight`：钩子也可以挂在参数上。",
            en=f"Found `{got}`, without `2.weight`: a hook may hang on a parameter, too.",
        )
    if sorted(got) != ["1", "2.weight"]:
        refuse(
            "too_many",
            zh=f"应当是 `1` 和 `2.weight` 两处，得到的是 `{got}`。",
            en=f"The places are `1` and `2.weight`; found `{got}`.",
        )


def by_function(function, model):
    before = {(hook.place, hook.function) for hook in hooks_on(model)}
    function(model)
    return [hook.place for hook in hooks_on(model) if (hook.place, hook.function) not in before]


def modules_only(function, model):
    counts = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    function(model)
    return [name for name, module in model.named_modules() if len(module._forward_hooks) > counts[name]]


def everything(function, model):
    function(model)
    return [hook.place for hook in hooks_on(model)]


LEFT_BY = Exercise(
    "14.B",
    examine_left_by,
    left_by,
    {
        "counted_old": everything,
        "missed_twin": by_function,
        "missed_parameter": modules_only,
        "not_places": lambda function, model: len(left_by(function, model)),
        "call_count": lambda function, model: [],
    },
    zh="留下了什么，一处不漏，原来的也没有冤枉。",
    en="All that was left is found, and nothing that was there before is blamed.",
)

CHECKS = [
    Prediction(
        "14.1",
        zh="`autograd.grad` 只把梯度送到 `x` 就交给你，不往 `.grad` 里存：`AccumulateGrad` 没有运行，挂在它前后的、以及累加之后的钩子都不触发。",
        en="`autograd.grad` takes the gradient as far as `x` and hands it to you, without storing into `.grad`: "
        "`AccumulateGrad` does not run, so neither its own hooks nor the one after accumulation fire.",
    ),
    Prediction(
        "14.2",
        zh="通往 `x` 的两份梯度先在引擎里相加，`AccumulateGrad` 只运行 1 次，钩子也就触发 1 次。",
        en="The two gradients on their way to `x` are added in the engine first; `AccumulateGrad` runs 1 time, and so does "
        "the hook.",
    ),
    Prediction(
        "14.3",
        zh="`retain_grad` 在张量钩子之后、Node 的 pre-hook 之前写入 `.grad`，和资料里列的次序相反。",
        en="`retain_grad` writes `.grad` after the tensor hooks and before the pre-hooks of the Node, the other way round "
        "from what the texts list.",
    ),
    Prediction(
        "14.4",
        zh="full backward hook 分两半：前向时就在图里装好了一个 Node，反向时由它来调用。前向之后再取下句柄，只管以后的前向，管不了这一张图。",
        en="A full backward hook has two halves: in forward it builds a Node into the graph, and in backward that Node calls "
        "it. A handle removed after forward counts for later forwards, not for this graph.",
    ),
    ON_FIRST_GRADIENT,
    LEFT_BY,
]
