"""Checks of notebook 14: which hooks fire, and in what order."""

import copy
import gc
import weakref
from collections import Counter
from contextlib import suppress
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hooklab.census import HookLeak, hooks_on, no_leftovers
from hooklab.course.check import (
    Exercise,
    Prediction,
    refuse,
    refuse_same_object,
    refuse_zero_for_none,
)

# ---- 14.A: a hook that fires once and takes itself off ----


def on_first_gradient(tensor, function):
    def hook(grad):
        if grad is not None:
            handle.remove()
            function(grad)

    handle = tensor.register_hook(hook)


def examine_on_first_gradient(answer):
    x = torch.ones(2, requires_grad=True)
    y, ours, seen = x * 2, [], []
    y.register_hook(lambda grad: ours.append(1))

    def function(grad):
        seen.append(grad.tolist() if isinstance(grad, torch.Tensor) else grad)
        return torch.full((2,), 300.0)

    answer(y, function)
    if seen:
        refuse(
            "called_at_once",
            zh="还没有反向，`function` 就被调用了。要把函数交给钩子，不是把调用的结果交给它。",
            en="`function` was called before any backward. Hand the function to the hook, not the result of calling it.",
        )
    hung = len(y._backward_hooks) > 1
    (y * 3).sum().backward(retain_graph=True)
    (y * 5).sum().backward()
    if not seen and not hung:
        refuse(
            "not_hung",
            zh="`function` 一次也没有被调用：反向开始时，`tensor` 上没有新的钩子。是没有注册，还是注册完就取下了？",
            en="`function` was never called: when backward began there was no new hook on `tensor`. Was it never registered, "
            "or taken off at once?",
        )
    if not seen:
        refuse(
            "never_called",
            zh="钩子挂上了，反向也跑了两遍，`function` 却一次也没有被调用。看看钩子里有没有调用它。",
            en="The hook is there and backward ran twice, yet `function` was never called. See whether the hook calls it.",
        )
    if len(seen) > 1:
        still = len(y._backward_hooks) > 1
        refuse(
            "called_again",
            zh=f"反向跑了两遍，`function` 被调用了 {len(seen)} 次，应当只有第 1 次。"
            + ("钩子还挂着：取下它的那一句运行了吗？" if still else ""),
            en=f"Backward ran twice and `function` was called {len(seen)} times; only the 1st time is wanted."
            + (" The hook is still there: did the line that removes it run?" if still else ""),
        )
    if seen != [[3.0, 3.0]]:
        refuse(
            "wrong_gradient",
            zh=f"`function` 应当收到第一次的梯度 `[3.0, 3.0]`，收到的是 `{seen[0]}`。",
            en=f"`function` should get the first gradient, `[3.0, 3.0]`; it got `{seen[0]}`.",
        )
    if x.grad.tolist() == [610.0, 610.0]:
        refuse(
            "changed",
            zh="`function` 的返回值顶替了梯度。看看你的钩子返回了什么。",
            en="What `function` returns has replaced the gradient. See what your hook returns.",
        )
    if x.grad.tolist() != [16.0, 16.0]:
        refuse(
            "changed_otherwise",
            zh=f"梯度被改动了：`x.grad` 应当是 `[16.0, 16.0]`，得到的是 `{x.grad.tolist()}`。看看你的钩子返回了什么，有没有原地改 `grad`。",
            en=f"The gradient was changed: `x.grad` should be `[16.0, 16.0]`; found `{x.grad.tolist()}`. See what your hook "
            "returns, and whether it edits `grad` in place.",
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
    _examine_apart(answer)
    _examine_two_functions(answer)
    _examine_none(answer)
    _examine_zero(answer)
    z, seen[:] = x * 2, []
    answer(z, function)
    torch.autograd.grad((z * 3).sum(), z)
    if not seen:
        refuse(
            "misses_grad",
            zh="`backward()` 时调用了，换成 `torch.autograd.grad(…, tensor)` 就没有调用。第 1 节里，哪种钩子两次都触发？",
            en="It was called in `backward()`, but not in `torch.autograd.grad(…, tensor)`. Which kind of hook fired both times "
            "in section 1?",
        )
    leaf, seen[:] = torch.ones(2, requires_grad=True), []
    loss = (leaf * 3).sum()
    answer(leaf, function)
    with suppress(RuntimeError):  # a multi-grad hook does not bear it
        torch.autograd.grad(loss, leaf)
    if not seen:
        refuse(
            "misses_grad_on_leaf",
            zh="中间张量对了；`tensor` 是叶子时，`torch.autograd.grad(…, tensor)` 没有调用它，或者报错。第 1 节里，叶子上只有哪种钩子触发？",
            en="Right for a tensor in the middle; where `tensor` is a leaf, `torch.autograd.grad(…, tensor)` did not call it, or "
            "raised. Which is the only kind of hook that fired on the leaf in section 1?",
        )
    seen.clear()
    (leaf * 3).sum().backward()
    seen.clear()
    answer(leaf, function)
    for _ in range(2):
        (leaf * 3).sum().backward()
    if len(seen) != 1:
        refuse(
            "asks_for_grad",
            zh=f"`tensor` 是叶子，`.grad` 里还有更早一次反向的梯度时，又反向两遍，`function` 被调用了 {len(seen)} 次，应当 1 次。“第一次”从你挂上钩子算起，不看 `.grad`。",
            en=f"For a leaf `tensor` whose `.grad` held the gradient of an earlier backward, two more backwards called `function` {len(seen)} "
            "times instead of 1. The first counts from your hook on; `.grad` does not tell it.",
        )


def _examine_apart(answer):
    """Two tensors, hooked one after the other."""
    x, counts = torch.ones(2, requires_grad=True), {"first": 0, "second": 0}
    first, second = x * 2, x * 3

    def count(name):
        return lambda grad: counts.update({name: counts[name] + 1})

    answer(first, count("first"))
    answer(second, count("second"))
    for _ in range(2):
        (first + second).sum().backward(retain_graph=True)
    if counts != {"first": 1, "second": 1}:
        refuse(
            "shared",
            zh=f"两个张量各挂一个，反向两遍，调用次数是 `{list(counts.values())}`，应当各 1 次：你的几次调用共用了同一个变量。",
            en=f"One on each of two tensors, two backwards: called `{list(counts.values())}` times instead of 1 each. Your calls "
            "share one variable.",
        )


def _examine_two_functions(answer):
    """On one tensor; what is noted by its id would hold for the next tensor at this address, too."""
    tensor, calls = torch.ones(2, requires_grad=True) * 2, []
    answer(tensor, lambda grad: calls.append("first"))
    answer(tensor, lambda grad: calls.append("second"))
    for _ in range(2):
        tensor.sum().backward(retain_graph=True)
    if sorted(calls) != ["first", "second"]:
        refuse(
            "one_per_tensor",
            zh="同一个张量上登记两个函数，每个都应当恰好调用 1 次。每次调用各记各的，别按张量的 `id` 记。",
            en="Of two functions on one tensor each should be called exactly 1 time. Note it for each call of yours, and not by the `id` "
            "of the tensor.",
        )


def _examine_none(answer):
    """The hook of one half of a chunk receives None where only the other half is used."""
    left, right = (torch.ones(4, requires_grad=True) * 2).chunk(2)
    seen = []
    answer(right, lambda grad: seen.append(None if grad is None else grad.tolist()))
    try:
        left.sum().backward(retain_graph=True)
    except (AttributeError, TypeError):  # the answer uses what it takes for a gradient
        seen.append(None)
    else:
        right.sum().backward()
    if seen != [[1.0, 1.0]]:
        refuse(
            "counted_none",
            zh="`chunk` 的另一半先做反向时，`tensor` 没有梯度，钩子收到的是 `None`（11）：这不算第一次，应当接着等。",
            en="When the other half of a `chunk` went through backward first, `tensor` had no gradient and the hook received `None` "
            "(11): that is not the first one; wait on.",
        )


def _examine_zero(answer):
    tensor, seen = torch.ones(2, requires_grad=True) * 2, []
    answer(tensor, lambda grad: seen.append(grad.tolist()))
    for factor in (0, 1):
        (tensor * factor).sum().backward(retain_graph=True)
    if seen == [[1.0, 1.0]]:
        refuse_zero_for_none()


def zero_for_none(tensor, function):
    def hook(grad):
        if grad is not None and grad.any():
            handle.remove()
            function(grad)

    handle = tensor.register_hook(hook)


def counts_none(tensor, function):
    def hook(grad):
        handle.remove()
        function(grad)

    handle = tensor.register_hook(hook)


_DONE: set[int] = set()


def once_per_id(tensor, function):
    _DONE.discard(id(tensor))  # of an earlier tensor at this address

    def once(grad):
        if grad is None:
            return
        handle.remove()
        if id(tensor) not in _DONE:
            _DONE.add(id(tensor))
            function(grad)

    handle = tensor.register_hook(once)


def stays(tensor, function):
    calls = []

    def hook(grad):
        if not calls:
            calls.append(1)
            function(grad)

    tensor.register_hook(hook)


def one_handle_for_all(tensor, function):
    def hook(grad):
        one_handle_for_all.handle.remove()
        function(grad)

    one_handle_for_all.handle = tensor.register_hook(hook)


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


def changed_otherwise(tensor, function):
    def hook(grad):
        handle.remove()
        function(grad)
        return grad * 0

    handle = tensor.register_hook(hook)


def misses_grad(tensor, function):
    def hook(grads):
        handle.remove()
        function(grads[0])

    handle = tensor.grad_fn.register_prehook(hook)


def misses_grad_on_leaf(tensor, function):
    if not tensor.is_leaf:
        return on_first_gradient(tensor, function)

    def hook(leaf):
        handle.remove()
        function(leaf.grad)

    handle = tensor.register_post_accumulate_grad_hook(hook)


def reads_grad(tensor, function):
    def hook(grad):
        handle.remove()
        function(tensor.grad)

    handle = tensor.register_hook(hook)


def asks_for_grad(tensor, function):
    def hook(grad):
        if grad is not None and (not tensor.is_leaf or tensor.grad is None):
            function(grad)
            handle.remove()

    handle = tensor.register_hook(hook)


ON_FIRST_GRADIENT = Exercise(
    "14.A",
    examine_on_first_gradient,
    on_first_gradient,
    {
        "stays": stays,
        "changed": changed,
        "changed_otherwise": changed_otherwise,
        "misses_grad": misses_grad,
        "misses_grad_on_leaf": misses_grad_on_leaf,
        "wrong_gradient": reads_grad,
        "removed_others": removed_others,
        "called_again": lambda tensor, function: tensor.register_hook(lambda grad: (function(grad), None)[1]),
        "called_at_once": lambda tensor, function: tensor.register_hook(function(torch.zeros(2))),
        "never_called": lambda tensor, function: tensor.register_hook(lambda grad: None),
        "not_hung": lambda tensor, function: tensor.register_hook(function).remove(),
        "shared": one_handle_for_all,
        "one_per_tensor": once_per_id,
        "counted_none": counts_none,
        "zero_for_none": zero_for_none,
        "asks_for_grad": asks_for_grad,
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
    net[2].register_forward_pre_hook(_look)
    return net


def _forgets(net):
    net[1].register_forward_hook(_look)
    net[1].register_forward_hook(_look)
    net[2].weight.register_hook(_look)
    net[0].register_forward_pre_hook(_look).remove()


def _forgets_others(net):
    net.register_forward_hook(_look)
    net[0].register_full_backward_hook(_look)
    net[2].register_forward_pre_hook(_look)
    net[2].bias.register_post_accumulate_grad_hook(_look)


def _swaps(net):
    net[1]._forward_hooks.popitem()
    net[1].register_forward_hook(_look)


def _expect_places(got):
    if not isinstance(got, list | tuple):
        refuse(
            "not_a_list",
            zh=f"应当返回一个列表，得到的是 `{type(got).__name__}`。什么也没留下时，也要返回列表。",
            en=f"Return a list; found `{type(got).__name__}`. When nothing is left, a list is wanted, too.",
        )
    for place in got:
        if not isinstance(place, str):
            refuse(
                "not_places",
                zh=f"列表里应当是 `place`，也就是字符串，得到的是 `{type(place).__name__}`。",
                en=f"The list should hold each `place`, a string; found `{type(place).__name__}`.",
            )


def examine_left_by(answer):
    net, calls = _net(), []
    got = answer(calls.append, net)
    if len(calls) != 1:
        refuse(
            "call_count",
            zh=f"`function` 应当被调用 1 次，实际是 {len(calls)} 次。",
            en=f"`function` should be called 1 time; it was called {len(calls)} times.",
        )
    if calls[0] is not net:
        refuse(
            "other_model",
            zh="`function` 收到的不是 `model` 本身。钩子要留在原来的模型上，不是留在另一个上。",
            en="What `function` got is not `model` itself. Its hooks belong on the model that was given, not on another.",
        )
    _expect_places(got)
    if got:
        refuse(
            "counted_old",
            zh=f"`function` 什么也没留下，却得到了 `{got}`：原来就有的钩子不该算。",
            en=f"`function` left nothing, yet the answer is `{got}`: hooks that were there before do not count.",
        )
    places = [hook.place for hook in hooks_on(net)]
    got = answer(_forgets, net)
    _expect_places(got)
    _examine_all_there(net, places)
    if extra := [place for place in got if place not in ("1", "2.weight")]:
        refuse(
            "too_many",
            zh=f"得到的是 `{got}`：`function` 没有在 `{extra[0]}` 留下钩子。`hooks_on` 按模块排列，新的不一定排在最后。",
            en=f"Found `{got}`: `function` left no hook at `{extra[0]}`. `hooks_on` lists by module, so a new hook need not come "
            "last.",
        )
    if not got:
        refuse(
            "found_none",
            zh="`function` 留下了 3 个钩子，得到的却是空列表。前一次 `hooks_on` 是在调用 `function` 之前吗？留下的，是后来有而原来没有的。",
            en="`function` left 3 hooks, and the list is empty. Was `hooks_on` asked once before `function` is called? What is left is there "
            "afterwards and was not there before.",
        )
    if "1" not in got:
        refuse(
            "missed_twin",
            zh=f"得到的是 `{got}`，少了 `1`：那里原来就有一个同样的函数，`function` 又注册了它，是另外的钩子。",
            en=f"Found `{got}`, without `1`: the same function was there before, and `function` has registered it again, which "
            "makes other hooks.",
        )
    if "2.weight" not in got:
        refuse(
            "missed_parameter",
            zh=f"得到的是 `{got}`，少了 `2.weight`：钩子也可以挂在参数上。",
            en=f"Found `{got}`, without `2.weight`: a hook may hang on a parameter, too.",
        )
    if sorted(got) != ["1", "1", "2.weight"]:
        refuse(
            "wrong_count",
            zh=f"`1` 上留下了两个钩子，`2.weight` 上一个，每个钩子占一项；得到的却是 `{got}`。",
            en=f"Two hooks were left at `1` and one at `2.weight`, and each has an entry; found `{got}`.",
        )
    got = answer(_forgets_others, net := _net())
    if sorted(got) != (want := ["0", "2", "2.bias", "Sequential"]):
        refuse(
            "kinds_missed",
            zh=f"`function` 在 `0` 上留下了反向钩子，在 `2` 上留下了前向 pre-hook，在 `2.bias` 上留下了 post-accumulate 钩子，在模型自己身上留下了前向钩子，应得到 `{want}`；得到的却是 `{sorted(got)}`。",
            en=f"`function` left a backward hook at `0`, a forward pre-hook at `2`, a post-accumulate hook at `2.bias` and a forward hook on "
            f"the model itself: `{want}` is wanted; found `{sorted(got)}`.",
        )
    got = answer(_swaps, _net())
    if [*got] != ["1"]:
        refuse(
            "by_number",
            zh=f"`function` 在 `1` 上取下一个原有的钩子，又挂上一个新的：个数没变，钩子换了，应得到 `['1']`；得到的却是 `{got}`。",
            en=f"`function` took an old hook off `1` and hung a new one there: their number is the same, the hooks are not. "
            f"Expected `['1']`; found `{got}`.",
        )


def _examine_all_there(net, before):
    """The answer only looks: the old hooks are there, and those that `function` has left."""
    left = [hook.place for hook in hooks_on(net)]
    want = [*before, "1", "1", "2.weight"]
    if not Counter(want) - Counter(left) and len(left) > len(want):
        refuse(
            "added",
            zh="模型上多了既不是原有的、也不是 `function` 该留下的钩子。你自己挂了一个，还是把 `function` 调用了两次？",
            en="There are hooks on the model that were not there before and that `function` does not leave in one call. Did you "
            "hang one yourself, or call `function` twice?",
        )
    if sorted(left) != sorted(want):
        refuse(
            "removed",
            zh="模型上的钩子少了：只看，不要取下。",
            en="Hooks are missing from the model: only look, take none off.",
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


def tail(function, model):
    before = len(hooks_on(model))
    function(model)
    return [hook.place for hook in hooks_on(model)[before:]]


def and_clears(function, model):
    places = left_by(function, model)
    for module in model.modules():
        module._forward_hooks.clear()
    return places


def and_hangs(function, model):
    places = left_by(function, model)
    model[0].register_forward_hook(_look)
    return places


def counts_places(function, model):
    before = Counter(hook.place for hook in hooks_on(model))
    function(model)
    return list((Counter(hook.place for hook in hooks_on(model)) - before).elements())


def records(function, model):
    before = hooks_on(model)
    function(model)
    return [hook for hook in hooks_on(model) if hook not in before]


def looked_too_late(function, model):
    function(model)
    before = hooks_on(model)
    return [hook.place for hook in hooks_on(model) if hook not in before]


def two_kinds(function, model):
    """Looks at forward hooks and at tensor hooks of parameters alone."""

    def there():
        found = [(name, key) for name, module in model.named_modules() for key in module._forward_hooks]
        return found + [(name, key) for name, param in model.named_parameters() for key in param._backward_hooks or ()]

    before = there()
    function(model)
    return [name for name, key in there() if (name, key) not in before]


LEFT_BY = Exercise(
    "14.B",
    examine_left_by,
    left_by,
    {
        "kinds_missed": two_kinds,
        "counted_old": everything,
        "missed_twin": by_function,
        "found_none": looked_too_late,
        "missed_parameter": modules_only,
        "too_many": tail,
        "wrong_count": lambda function, model: sorted(set(left_by(function, model))),
        "removed": and_clears,
        "added": and_hangs,
        "by_number": counts_places,
        "not_places": records,
        "not_a_list": lambda function, model: set(left_by(function, model)),
        "other_model": lambda function, model: left_by(function, copy.deepcopy(model)),
        "call_count": lambda function, model: [],
    },
    zh="留下了什么，一处不漏，原来的也没有冤枉。",
    en="All that was left is found, and nothing that was there before is blamed.",
)

# ---- 14.C: the gradient that is passed on in the end ----


def final_gradient(tensor):
    seen = []
    edge = get_gradient_edge(tensor)
    number = edge.output_nr

    def note(grads):
        if grads[number] is not None:
            seen.append(grads[number].clone())

    edge.node.register_prehook(note)
    return seen


def _recorded(answer, tensor, loss):
    """What the answer records of two backwards: the hook before it makes 30 of 3, the one after it 31."""
    tensor.register_hook(lambda grad: grad * 10)
    got = answer(tensor)
    if not isinstance(got, list):
        refuse(
            "not_a_list",
            zh=f"应当返回一个列表，得到的是 `{type(got).__name__}`。",
            en=f"Return a list; found `{type(got).__name__}`.",
        )
    tensor.register_hook(lambda grad: grad + 1)
    loss.backward(retain_graph=True)
    loss.backward()
    for item in got:
        if not isinstance(item, torch.Tensor | tuple | None):
            refuse(
                "not_tensors",
                zh=f"列表里应当是张量，得到的是 `{type(item).__name__}`。",
                en=f"The list should hold tensors; found `{type(item).__name__}`.",
            )
        if isinstance(item, torch.Tensor) and item.dtype != tensor.dtype:
            refuse(
                "wrong_dtype",
                zh=f"`tensor` 的数据类型是 `{tensor.dtype}`，记下的却是 `{item.dtype}`：副本应当和原来的一样。",
                en=f"`tensor` has the dtype `{tensor.dtype}`, what you noted has `{item.dtype}`: a copy is as the original.",
            )
    return [grad.tolist() if isinstance(grad, torch.Tensor) else grad for grad in got]


def examine_final_gradient(answer):
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = x * 2
    got = _recorded(answer, y, (y * 3).sum())
    _expect_final(got, "中间张量", "a tensor in the middle", after_node=62.0)
    if x.grad.tolist() != [124.0, 124.0]:
        refuse(
            "changed",
            zh="值记对了，但流到 `x` 的梯度被改动了。看看你的钩子返回了什么。",
            en="The values are right, but the gradient that reaches `x` was changed. See what your hook returns.",
        )
    _examine_two_tensors(answer)

    leaf = torch.ones(2, requires_grad=True)
    loss = (leaf * 3).sum()
    try:
        got = _recorded(answer, leaf, loss)
    except AttributeError as error:
        if error.obj is not None or not str(error.name).startswith(("register", "next_functions")):
            raise
        refuse(
            "leaf_has_no_grad_fn",
            zh="中间张量对了，叶子上却报错：叶子的 `grad_fn` 是 `None`。它的 Node 怎样取，见第 1 节。",
            en="Right for a tensor in the middle, but a leaf raises: its `grad_fn` is `None`. Section 1 shows how to get its Node.",
        )
    _expect_final(got, "叶子", "a leaf", after_node=None)
    if leaf.grad.tolist() != [62.0, 62.0]:
        refuse(
            "changed_leaf",
            zh=f"值记对了，但叶子的 `.grad` 应当是 `[62.0, 62.0]`，现在是 `{leaf.grad.tolist()}`。看看你的钩子返回了什么。",
            en=f"The values are right, but the `.grad` of the leaf should be `[62.0, 62.0]` and is `{leaf.grad.tolist()}`. See what your "
            "hook returns.",
        )
    leaf = torch.ones(2, requires_grad=True)
    loss = (leaf * 3).sum()
    got = answer(leaf)
    leaf.register_post_accumulate_grad_hook(_zero_grad)
    loss.backward()
    if [grad.tolist() for grad in got] != [[3.0, 3.0]]:
        refuse(
            "after_storing",
            zh=f"叶子的梯度存好之后，别人的钩子把 `.grad` 清成了零，你记下的就成了 `{[grad.tolist() for grad in got]}`：要的是存进去之前的值 `[[3.0, 3.0]]`。",
            en=f"After the gradient of the leaf was stored, a hook of somebody else's set `.grad` to zero, and you noted "
            f"`{[grad.tolist() for grad in got]}`; the value before it is stored is wanted, `[[3.0, 3.0]]`.",
        )

    first, second = (torch.ones(2, requires_grad=True) * 2).chunk(2)
    got = _recorded(answer, second, (first * 7 + second * 3).sum())
    if got != [[31.0], [31.0]]:
        refuse(
            "wrong_output",
            zh=f"`chunk` 的 Node 有两个输出，`tensor` 是第二个，应当记下 `[[31.0], [31.0]]`，得到的是 `{got}`。pre-hook 收到的元组里，每个输出各有一项。",
            en=f"The Node of `chunk` has two outputs and `tensor` is the second: `[[31.0], [31.0]]` is wanted; found `{got}`. The "
            "tuple that a pre-hook gets has one entry for each output.",
        )

    first, second = (torch.ones(2, requires_grad=True) * 2).chunk(2)
    got = answer(second)
    with suppress(AttributeError, TypeError):
        first.sum().backward(retain_graph=True)
        second.sum().backward()
    if [grad.tolist() for grad in got if isinstance(grad, torch.Tensor)] != [[1.0]] or len(got) != 1:
        refuse(
            "none_is_no_gradient",
            zh="只用到 `chunk` 的另一半做反向时，`tensor` 没有梯度，pre-hook 在它那一项收到的是 `None`（11）：跳过它，不要记，也不要报错。",
            en="Where only the other half of a `chunk` goes through backward, `tensor` has no gradient and the pre-hook finds "
            "`None` in its entry (11): skip it, neither note it nor raise.",
        )

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad.mul_(100))
    y = x + 0
    got = answer(y)
    (y * 3).sum().backward()
    if [grad.tolist() for grad in got] != [[3.0, 3.0]]:
        refuse(
            "shares_memory",
            zh="记下的值后来变了：前一个张量的钩子原地改了梯度，你存的和它是同一块内存。要存副本。",
            en="What you noted changed later: a hook on the tensor before edited the gradient in place, and yours shares that "
            "memory. Store a copy.",
        )

    _examine_zero_and_freed(answer)


def _zero_grad(leaf):
    leaf.grad.zero_()


def _examine_two_tensors(answer):
    first, second = (torch.ones(2, requires_grad=True) * 2 for _ in range(2))
    lists = [answer(first), answer(second)]
    refuse_same_object(*lists)
    for factor, tensor in enumerate((first, second), start=3):
        (tensor * factor).sum().backward()
    found = [[grad.tolist() for grad in grads] for grads in lists]
    if found != [[[3.0, 3.0]], [[4.0, 4.0]]]:
        refuse(
            "shared",
            zh=f"两个张量，各有各的列表，应当记下 `[[3.0, 3.0]]` 和 `[[4.0, 4.0]]`，得到的是 `{found[0]}` 和 `{found[1]}`：你的几次调用共用了同一个变量。",
            en=f"Two tensors, each with a list of its own: `[[3.0, 3.0]]` and `[[4.0, 4.0]]` are wanted; found `{found[0]}` and "
            f"`{found[1]}`. Your calls share one variable.",
        )


def _examine_zero_and_freed(answer):
    tensor = torch.ones(2, requires_grad=True) * 2
    got, alive = answer(tensor), weakref.ref(tensor)
    (tensor * 0).sum().backward()
    if not got:
        refuse_zero_for_none()
    del tensor
    gc.collect()
    if alive() is not None:
        refuse(
            "never_freed",
            zh="`tensor` 用完之后没有被释放：有东西还引用着它，多半是钩子自己。这样的循环连 `gc.collect()` 也回收不了。",
            en="`tensor` is not freed after use: something still refers to it, most likely the hook itself. Not even "
            "`gc.collect()` breaks such a circle.",
        )


def _expect_final(got, zh, en, after_node):
    if not got:
        refuse(
            "nothing",
            zh=f"{zh}：反向跑了两遍，列表还是空的。",
            en=f"For {en}: backward ran twice, and the list is still empty.",
        )
    if got == [[31.0, 31.0], [31.0, 31.0]]:
        return
    if got[0] == [30.0, 30.0]:
        refuse(
            "too_early",
            zh=f"{zh}：记下的是 `30`，后来又挂上的钩子把它改成了 `31`。哪种钩子排在所有张量钩子之后？",
            en=f"For {en}: you noted `30`, and a hook registered later made it `31`. Which kind of hook comes after all tensor hooks?",
        )
    if got[0] == [after_node, after_node]:
        refuse(
            "too_late",
            zh=f"{zh}：记下的是 Node 运行之后的梯度，那已经是它前一个张量的了。",
            en=f"For {en}: you noted a gradient from after the Node ran; it belongs to the tensor before it.",
        )
    if got[0] == [31.0, 31.0] and got[1:] == [[62.0, 62.0]]:
        refuse(
            "accumulated",
            zh=f"{zh}：第 1 次反向对，第 2 次记下的是 `62`：那是 `.grad` 里累加的和，不是这一次的梯度。",
            en=f"For {en}: right in the 1st backward; in the 2nd you noted `62`, the sum in `.grad` and not the gradient of this "
            "backward.",
        )
    if got[0] == [62.0, 62.0]:
        refuse(
            "no_copy",
            zh=f"{zh}：第 1 次记下的值后来变成了 `62`：它和 `.grad` 是同一块内存，被第 2 次累加改掉了。要存副本。",
            en=f"For {en}: what you noted in the 1st backward became `62` later: it shares its memory with `.grad`, which the 2nd "
            "accumulation changed. Store a copy.",
        )
    if isinstance(got[0], tuple):
        refuse(
            "whole_tuple",
            zh=f"{zh}：记下的是元组，不是张量。Node 的钩子收到的是元组，每个输出各有一项。",
            en=f"For {en}: you noted a tuple, not a tensor. Hooks on a Node get a tuple with one entry for each output.",
        )
    refuse(
        "wrong_values",
        zh=f"{zh}：反向跑了两遍，应当记下 `[[31.0, 31.0], [31.0, 31.0]]`，得到的是 `{got}`。",
        en=f"For {en}: after two backwards `[[31.0, 31.0], [31.0, 31.0]]` is wanted; found `{got}`.",
    )


def _with_node(register):
    """A wrong answer that hangs something on the Node."""

    def answer(tensor):
        seen = []
        register(get_gradient_edge(tensor).node, tensor, seen)
        return seen

    return answer


def too_early(tensor):
    seen = []
    tensor.register_hook(seen.append)
    return seen


def accumulated(tensor):
    seen = []
    if not tensor.is_leaf:
        tensor.retain_grad()
    get_gradient_edge(tensor).node.register_hook(lambda *grads: seen.append(tensor.grad.clone()))
    return seen


def by_grad_fn(tensor):
    seen = []
    tensor.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    return seen


def changes(tensor):
    seen = []

    def hook(grads):
        seen.append(grads[0])
        return (grads[0] * 2,)

    get_gradient_edge(tensor).node.register_prehook(hook)
    return seen


def shares_memory(tensor):
    seen = []
    edge = get_gradient_edge(tensor)

    def note(grads):
        if grads[edge.output_nr] is not None:
            seen.append(grads[edge.output_nr])

    edge.node.register_prehook(note)
    return seen


def _noted(tensor, note):
    """A right answer but for `note(grad, seen)`."""
    seen = []
    edge = get_gradient_edge(tensor)
    number = edge.output_nr
    edge.node.register_prehook(lambda grads: note(grads[number], seen) if grads[number] is not None else None)
    return seen


def zeros_left_out(tensor):
    return _noted(tensor, lambda grad, seen: seen.append(grad.clone()) if grad.any() else None)


def never_freed(tensor):
    return _noted(tensor, lambda grad, seen: seen.append(grad.clone().view_as(tensor)))


_LATEST = {}


def final_in_the_latest(tensor):
    _LATEST["seen"] = []
    _noted(tensor, lambda grad, seen: _LATEST["seen"].append(grad.clone()))
    return _LATEST["seen"]


def final_in_one_list(tensor, seen=[]):  # noqa: B006
    seen.clear()
    _noted(tensor, lambda grad, own: seen.append(grad.clone()))
    return seen


def copies_none(tensor):
    seen = []
    edge = get_gradient_edge(tensor)
    edge.node.register_prehook(lambda grads: seen.append(grads[edge.output_nr].clone()))
    return seen


def _with_node_hook(tensor, double):
    """On a leaf, by a hook after its Node; or by one that returns twice the gradient."""
    if not tensor.is_leaf:
        return final_gradient(tensor)
    gradients, (node, number, *_) = [], get_gradient_edge(tensor)

    def after(outputs, inputs):
        gradients.append(inputs[number].clone())

    def before(grads):
        gradients.append(grads[number].clone())
        return (grads[number] * 2,)

    node.register_prehook(before) if double else node.register_hook(after)
    return gradients


FINAL_GRADIENT = Exercise(
    "14.C",
    examine_final_gradient,
    final_gradient,
    {
        "after_storing": partial(_with_node_hook, double=False),
        "changed_leaf": partial(_with_node_hook, double=True),
        "too_early": too_early,
        "too_late": _with_node(lambda node, tensor, seen: node.register_hook(lambda got, given: seen.append(got[0]))),
        "accumulated": accumulated,
        "leaf_has_no_grad_fn": by_grad_fn,
        "wrong_output": _with_node(
            lambda node, tensor, seen: node.register_prehook(lambda grads: seen.append(grads[0]))
        ),
        "whole_tuple": _with_node(lambda node, tensor, seen: node.register_prehook(seen.append)),
        "no_copy": _with_node(lambda node, tensor, seen: node.register_hook(lambda got, given: seen.append(given[0]))),
        "wrong_values": _with_node(
            lambda node, tensor, seen: node.register_prehook(lambda grads: seen.append(grads[0].sum()))
        ),
        "nothing": lambda tensor: [],
        "changed": changes,
        "not_a_list": lambda tensor: tensor.register_hook(print),
        "not_tensors": _with_node(
            lambda node, tensor, seen: node.register_prehook(lambda grads: seen.append(grads[0].tolist()))
        ),
        "none_is_no_gradient": copies_none,
        "shares_memory": shares_memory,
        "wrong_dtype": lambda tensor: _noted(tensor, lambda grad, seen: seen.append(grad.clone().float())),
        "zero_for_none": zeros_left_out,
        "never_freed": never_freed,
        "shared": final_in_the_latest,
        "same_object": final_in_one_list,
    },
    zh="叶子、中间张量、多个输出中的一个，记下的都是最终的梯度。",
    en="For a leaf, a tensor in the middle and one output of several, what is noted is the final gradient.",
)

CHECKS = [
    Prediction(
        "14.1",
        zh="`autograd.grad` 只把梯度送到 `x` 就交给你，不往 `.grad` 里存：`AccumulateGrad` 没有运行，挂在它前后的、以及累加之后的钩子都不触发。`y` 在半路上，它的 Node 照常运行，3 个钩子都触发。",
        en="`autograd.grad` takes the gradient as far as `x` and hands it to you, without storing into `.grad`: "
        "`AccumulateGrad` does not run, so neither its own hooks nor the one after accumulation fire. `y` is on the way: its "
        "Node runs as ever, and all 3 hooks fire.",
    ),
    Prediction(
        "14.2",
        zh="通往 `x` 的两份梯度先在引擎里相加，`AccumulateGrad` 只运行 1 次，钩子也就触发 1 次。",
        en="The two gradients on their way to `x` are added in the engine first; `AccumulateGrad` runs 1 time, and so does "
        "the hook.",
    ),
    Prediction(
        "14.3",
        zh="张量钩子触发时还没有，Node 的 pre-hook 触发时已经有了：`retain_grad` 夹在两者之间。S0 和官方说明把 `retain_grad` 和 Node 的 pre-hook 写反了。",
        en="Nothing yet at the tensor hook, a value at the pre-hook of the Node: `retain_grad` comes between the two. S0 and the "
        "official notes have `retain_grad` and the pre-hook of the Node the wrong way round.",
    ),
    Prediction(
        "14.4",
        zh="full backward hook 分两半：前向时就在图里装好了 Node，反向时由 Node 来调用。前向之后才取下，只对以后的前向有效，管不了已经建好的这张图。",
        en="A full backward hook has two halves: forward builds Nodes into the graph for it, and in backward a Node calls it. "
        "Removed after forward, it is gone for later forwards, but not from the graph that is already built.",
    ),
    ON_FIRST_GRADIENT,
    LEFT_BY,
    FINAL_GRADIENT,
]
