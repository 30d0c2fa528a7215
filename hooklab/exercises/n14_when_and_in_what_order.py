"""Checks of notebook 14: which hooks fire, and in what order."""

import torch

from hooklab.exercises.check import Exercise, Prediction, refuse

# ---- 14.A: the names of tensors in the order in which their gradients arrive ----


def arrival_order(loss, **tensors):
    order = []
    handles = [
        tensor.register_hook(lambda grad, name=name: order.append(name)) for name, tensor in tensors.items()
    ]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return order


def _chain():
    first = torch.randn(2, requires_grad=True)
    middle = first * 2
    last = middle.tanh()
    return last.sum(), {"first": first, "middle": middle, "last": last, "aside": first * 3}


def examine_arrival_order(answer):
    loss, tensors = _chain()
    got = answer(loss, **tensors)
    if not isinstance(got, list) or any(not isinstance(name, str) for name in got):
        refuse(
            "not_names",
            zh=f"应当返回名字（字符串）的列表，得到的是 `{type(got).__name__}`。",
            en=f"Return a list of names (strings); found `{type(got).__name__}`.",
        )
    if tensors["first"].grad is None:
        refuse(
            "no_backward",
            zh="叶子的 `.grad` 还是空的：没有做 `loss.backward()`。",
            en="The leaf's `.grad` is still empty: `loss.backward()` was not run.",
        )
    if "aside" in got:
        refuse(
            "not_reached",
            zh="`aside` 没有参与损失，没有梯度到过那里，不该列出来。名字应当由钩子来记。",
            en="The loss does not use `aside`: no gradient ever got there, and it should not be listed. Let the hook note "
            "the name.",
        )
    if len(set(got)) < len(got) or set(got) == {"last"} or len(got) == 1:
        refuse(
            "one_name",
            zh=f"得到的是 `{got}`：几个钩子记的是同一个名字。循环里的 `lambda` 到触发时才去读循环变量。",
            en=f"Found `{got}`: several hooks note the same name. A `lambda` in a loop reads the loop's variable only when "
            "it fires.",
        )
    if got != ["last", "middle", "first"]:
        refuse(
            "wrong_order",
            zh=f"次序应当是梯度到达的先后，得到的是 `{got}`。反向从损失往回走。",
            en=f"The order should be that of arrival; found `{got}`. Backward walks from the loss to the input.",
        )
    if any(tensor._backward_hooks for tensor in tensors.values()):
        refuse(
            "left_behind",
            zh="次序对了，但钩子还挂在张量上，下一次反向会再触发。",
            en="The order is right, but the hooks are still on the tensors and fire in the next backward.",
        )


def note_in_loop(loss, **tensors):
    order, handles = [], []
    for name, tensor in tensors.items():
        handles.append(tensor.register_hook(lambda grad: order.append(name)))  # noqa: B023
    loss.backward()
    for handle in handles:
        handle.remove()
    return order


def left_behind(loss, **tensors):
    order = []
    for name, tensor in tensors.items():
        tensor.register_hook(lambda grad, name=name: order.append(name))
    loss.backward()
    return order


def only_reached(loss, **tensors):
    return arrival_order(loss, **tensors)[::-1]


def one_name(loss, **tensors):
    tensors.pop("aside", None)
    return note_in_loop(loss, **tensors)


def listed_all(loss, **tensors):
    loss.backward()
    return list(tensors)


ARRIVAL_ORDER = Exercise(
    "14.A",
    examine_arrival_order,
    arrival_order,
    {
        "one_name": one_name,
        "not_reached": listed_all,
        "wrong_order": only_reached,
        "left_behind": left_behind,
        "no_backward": lambda loss, **tensors: [],
        "not_names": lambda loss, **tensors: {
            name: tensor.grad for name, tensor in tensors.items() if tensor.is_leaf
        },
    },
    zh="次序是看来的，不是背来的。",
    en="The order was seen, not recited.",
)

# ---- 14.B: a hook that fires once and takes itself off ----


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
    "14.B",
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
    ARRIVAL_ORDER,
    ON_FIRST_GRADIENT,
]
