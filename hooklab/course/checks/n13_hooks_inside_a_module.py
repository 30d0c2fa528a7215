"""Checks of notebook 13: hooks inside a module."""

import copy
import gc
import math
import warnings
import weakref

import torch
from torch import Tensor, nn

from hooklab.course.check import (
    Exercise,
    Prediction,
    expect_like,
    refuse,
    refuse_latest_call,
    refuse_removing_others,
    refuse_zero_for_none,
)

# ---- 13.A: for use inside forward: values as they are, no negative gradient ----


def no_negative(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(min=0))
    return x


# Where the gradient is negative the value is not, and the other way round.
VALUES, WEIGHT = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-3.0, 2.0, 0.5])


def examine_no_negative(answer):
    leaf = (-VALUES).requires_grad_()
    got = answer(leaf * -1)
    _examine_values(got, VALUES)
    if got.requires_grad:
        (got * WEIGHT).sum().backward()
    if leaf.grad is None:
        refuse(
            "cut",
            zh="梯度到不了前面的层：你返回的张量和传进来的 `x` 已经断开。",
            en="No gradient reaches the layers before: the tensor you return is cut off from the `x` that came in.",
        )
    if torch.equal(leaf.grad, -WEIGHT):
        refuse(
            "unchanged",
            zh="梯度原样通过，负数还在。钩子挂上了吗？它有没有返回新的梯度？",
            en="The gradient passes as it is, negative entries and all. Is the hook hung, and does it return the new gradient?",
        )
    _examine_neighbour(answer)
    _examine_passed(-leaf.grad)
    _examine_two_uses(answer)
    _examine_two_backwards(answer)
    _examine_one_half(answer)
    _examine_any_shape(answer)
    _examine_without_grad(answer)
    _examine_freed(answer)


def _examine_any_shape(answer):
    x = torch.ones(1, 2, 1, 2, requires_grad=True)
    grad = torch.tensor([math.nan, -math.inf, 2.0, -3.0]).reshape(x.shape)
    answer(x * 1).backward(grad)
    if not torch.equal(x.grad.nan_to_num(-1.0), torch.tensor([-1.0, 0.0, 2.0, 0.0]).reshape(x.shape)):
        refuse(
            "not_the_rest",
            zh=f"形状 `(1, 2, 1, 2)` 的梯度 `[nan, -inf, 2, -3]` 应当变成 `[nan, 0, 2, 0]`，得到的是 `{x.grad.flatten().tolist()}`：负数换成 0，其余不动，NaN 也不动。",
            en=f"A gradient `[nan, -inf, 2, -3]` of the shape `(1, 2, 1, 2)` should become `[nan, 0, 2, 0]`; found "
            f"`{x.grad.flatten().tolist()}`: negative entries become 0 and the rest stays, NaN too.",
        )


def _examine_values(got, want):
    if got is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，下一层就没有输入了。",
            en="The function returned `None`: the next layer has no input.",
        )
    if hasattr(got, "remove") and not isinstance(got, list | set):
        refuse(
            "returned_handle",
            zh="返回的是句柄，下一层要的是张量。",
            en="A handle was returned; the next layer wants a tensor.",
        )
    if isinstance(got, Tensor) and got.shape == want.shape and torch.equal(got.detach(), want.clamp(min=0)):
        refuse(
            "changed_values",
            zh="前向的数值被改了：输入里的 -2 变成了 0。要改的是反向时的梯度。",
            en="The values of forward were changed: the -2 of the input became 0. It is the gradient in backward that should change.",
        )
    expect_like(got, want, "返回值", "what is returned")


def _examine_passed(passed):
    if torch.equal(passed, WEIGHT * (VALUES > 0)):
        refuse(
            "masked_by_values",
            zh="换成 0 的是 `x` 为负的位置。要看的是梯度的正负，不是 `x` 的正负。",
            en="Zeros stand where `x` is negative. It is the sign of the gradient that counts, not that of `x`.",
        )
    if not torch.allclose(passed, WEIGHT.clamp(min=0)):
        came, went = ([round(value, 4) for value in each.tolist()] for each in (WEIGHT, passed))
        refuse(
            "wrong_values",
            zh=f"流到 `x` 的梯度是 `{came}`，过了你的钩子变成 `{went}`。只有负数该变，变成 0。",
            en=f"The gradient that came to `x` was `{came}`, and behind your hook it is `{went}`. Negative entries alone "
            "should change, to 0.",
        )


def _examine_two_uses(answer):
    """In one forward; in bfloat16, whose hooks must return it."""
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [torch.ones(3, dtype=dtype, requires_grad=True) for _ in range(2)]
        weight = WEIGHT.to(dtype)
        used = [answer(leaf * 1) for leaf in leaves]
        sum((out * weight).sum() for out in used).backward()
        if not all(torch.equal(leaf.grad, weight.clamp(min=0)) for leaf in leaves):
            refuse(
                "latest_only",
                zh="一次前向里用了 2 次，有一处的负数还在：后一次调用影响了前一次的钩子。",
                en="Used 2 times in one forward, it still lets negative entries pass in one place: the later call has touched the hook of "
                "the earlier one.",
            )


def _examine_two_backwards(answer):
    leaf = torch.ones(3, requires_grad=True)
    loss = (answer(leaf * 1) * WEIGHT).sum()
    for _ in range(2):
        leaf.grad = None
        loss.backward(retain_graph=True)
    if not torch.equal(leaf.grad, WEIGHT.clamp(min=0)):
        refuse(
            "first_only",
            zh="前向一次，用 `retain_graph=True` 反向两次：第一次对了，第二次的负数还在。钩子还挂着吗？",
            en="One forward, two backwards with `retain_graph=True`: right in the first, negative entries in the second. Is the hook "
            "still there?",
        )


def _examine_one_half(answer):
    """The Node of `chunk` has two outputs."""
    leaf = torch.ones(6, requires_grad=True)
    first, second = (leaf * 1).chunk(2)
    ((answer(first) + second) * WEIGHT).sum().backward()
    if not torch.equal(leaf.grad[3:], WEIGHT):
        refuse(
            "whole_node",
            zh="`x` 是 `chunk` 的一半时，另一半的梯度也被改了：这个 Node 有两个输出，你的钩子管的是它，不是 `x`。",
            en="Where `x` is one half of a `chunk`, the gradient of the other half changed as well: the Node has two outputs, and "
            "your hook belongs to the Node, not to `x`.",
        )


def _examine_neighbour(answer):
    """The gradient of a sum is one buffer for both terms: editing it in place reaches the other term too."""
    other, leaf = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    neighbour = other * 1
    total = neighbour + answer(leaf * 1)
    (total * WEIGHT).sum().backward()
    if not torch.equal(other.grad, WEIGHT):
        refuse(
            "in_place",
            zh="旁边那个张量的梯度也被改了：钩子原地改了 `grad`，而这块内存是两个张量共用的。请算出一个新张量。",
            en="The gradient of the tensor next to it changed as well: the hook edits `grad` in place, and the two tensors "
            "share that memory. Compute a new tensor.",
        )


def _examine_without_grad(answer):
    try:
        with torch.no_grad():
            got = answer(VALUES.clone().requires_grad_() * 1)
    except RuntimeError:
        refuse(
            "fails_in_no_grad",
            zh="在 `torch.no_grad()` 之内报错：那里算出来的张量不需要梯度，不能挂钩子。",
            en="It raises in `torch.no_grad()`: a tensor computed there requires no gradient and takes no hook.",
        )
    if got is None:
        refuse(
            "returned_sometimes",
            zh="平时返回的是张量，在 `torch.no_grad()` 之内却是 `None`。看看 `return` 缩进在哪一层。",
            en="Otherwise a tensor is returned, but in `torch.no_grad()` it is `None`. See how far `return` is indented.",
        )
    _examine_values(got, VALUES)
    frozen = VALUES.clone()
    try:
        got = answer(frozen)
    except RuntimeError:
        refuse(
            "fails_when_frozen",
            zh="`no_grad` 之内没问题，但是前面的参数全部冻结时报错：梯度是开着的，`x` 却不需要梯度。要问的是张量自己。",
            en="Fine in `no_grad`, but it raises when all parameters before are frozen: gradients are on, yet `x` requires "
            "none. The tensor itself is the one to ask.",
        )
    _examine_values(got, VALUES)
    if frozen.requires_grad or got.requires_grad:
        refuse(
            "switched_on",
            zh="`x` 原本不需要梯度，经过你的函数之后却需要了：反向会多算一大段。",
            en="`x` required no gradient and does after your function: backward computes a stretch more than it should.",
        )


def _examine_freed(answer):
    x = torch.ones(3, requires_grad=True) * 1
    got = answer(x)
    tensors = weakref.ref(x), weakref.ref(got)
    (got * WEIGHT).sum().backward()
    del x, got
    gc.collect()
    if any(tensor() is not None for tensor in tensors):
        refuse(
            "never_freed",
            zh="用完之后张量没有释放：还有东西引用着它，多半是钩子自己，每次前向都会多占一份内存（第 2 节）。钩子里只用传给它的 `grad`。",
            en="The tensor is not freed after use: something still refers to it, most likely the hook itself, and every forward "
            "keeps more memory (section 2). In the hook use only the `grad` that it is given.",
        )


def in_place(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp_(min=0))
    return x


def fails_in_no_grad(x):
    x.register_hook(lambda grad: grad.clamp(min=0))
    return x


def fails_when_frozen(x):
    if torch.is_grad_enabled():
        x.register_hook(lambda grad: grad.clamp(min=0))
    return x


def switched_on(x):
    if torch.is_grad_enabled():
        if not x.requires_grad:
            x.requires_grad_()
        x.register_hook(lambda grad: grad.clamp(min=0))
    return x


def returned_nothing(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(min=0))


def cut(x):
    x = x.detach().requires_grad_()
    x.register_hook(lambda grad: grad.clamp(min=0))
    return x


def unchanged(x):
    if x.requires_grad:
        x.register_hook(lambda grad: print(grad.clamp(min=0).shape))
    return x


def wrong_side(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(max=0))
    return x


def masked_by_values(x):
    if x.requires_grad:
        positive = x.detach() > 0
        x.register_hook(lambda grad: grad * positive)
    return x


def returned_sometimes(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(min=0))
        return x


def never_freed(x):
    if x.requires_grad:
        x.register_hook(lambda grad: torch.where(grad < 0, torch.zeros_like(x), grad))
    return x


def first_only(x):
    if x.requires_grad:
        handle = x.register_hook(lambda grad: (handle.remove(), grad.clamp(min=0))[1])
    return x


def whole_node(x):
    if x.requires_grad:
        x.grad_fn.register_prehook(lambda grads: tuple(grad.clamp(min=0) for grad in grads))
    return x


_HANDLES: list = []


def latest_only(x):
    while _HANDLES:
        _HANDLES.pop().remove()
    if x.requires_grad:
        _HANDLES.append(x.register_hook(lambda grad: grad.clamp(min=0)))
    return x


def nan_is_zero(x):
    if x.requires_grad:
        x.register_hook(lambda grad: torch.where(grad > 0, grad, 0))
    return x


NO_NEGATIVE = Exercise(
    "13.A",
    examine_no_negative,
    no_negative,
    {
        "not_the_rest": nan_is_zero,
        "in_place": in_place,
        "fails_in_no_grad": fails_in_no_grad,
        "fails_when_frozen": fails_when_frozen,
        "switched_on": switched_on,
        "returned_handle": lambda x: x.register_hook(lambda grad: grad.clamp(min=0)),
        "returned_nothing": returned_nothing,
        "returned_sometimes": returned_sometimes,
        "changed_values": lambda x: x.clamp(min=0),
        "cut": cut,
        "unchanged": unchanged,
        "masked_by_values": masked_by_values,
        "wrong_values": wrong_side,
        "latest_only": latest_only,
        "first_only": first_only,
        "whole_node": whole_node,
        "never_freed": never_freed,
    },
    zh="训练时管住梯度，验证时不碍事，可以放心写进 `forward`。",
    en="It holds the gradient in training and is out of the way in validation: safe to write into `forward`.",
)

# ---- 13.B: hang a tensor hook on a module's output, from outside ----


def hook_output(module, hook):
    def hang(module, args, output):
        if output.requires_grad:
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def examine_hook_output(answer):
    layer, seen = nn.Linear(3, 2), []
    first, second = (torch.randn(4, 3, requires_grad=True) for _ in range(2))

    def hook(*args):
        _examine_arguments(args)
        seen.append(args[0].detach().clone())
        return args[0] * 2

    plain = layer(first).detach()
    handle = answer(layer, hook)
    _examine_handle(handle)
    output = _outcome(lambda: layer(first))
    _examine_silent(seen)
    _examine_output(output, plain)
    _examine_two_modules(answer)
    _examine_editable(answer)
    (output * 3).sum().backward()
    layer.zero_grad()
    (layer(second) * 3).sum().backward()
    _examine_calls(seen, layer)
    _examine_two_forwards(answer)
    _examine_input_alone(answer)
    _examine_eval(answer)
    _examine_quiet(layer, first.detach())
    handle.remove()
    _examine_removed(layer, first.detach(), seen)
    refuse_removing_others(layer.register_forward_hook, lambda: answer(layer, hook))
    _examine_one_module(answer)


def _outcome(run):
    """What `run` returns, or the error it raises."""
    try:
        return run()
    except RuntimeError as error:
        return error


def _examine_handle(handle):
    if isinstance(handle, list | set) or not callable(getattr(handle, "remove", None)):
        refuse(
            "no_handle",
            zh=f"应当返回一个能 `.remove()` 的句柄，得到的是 `{type(handle).__name__}`。",
            en=f"Return a handle with `.remove()`; found `{type(handle).__name__}`.",
        )


def _examine_arguments(args):
    if not isinstance(args[0], Tensor | nn.Module):
        found = ", ".join(type(arg).__name__ for arg in args)
        refuse(
            "hook_on_node",
            zh=f"`hook` 收到的是 `{found}`，不是一个梯度。它是张量钩子，只收一个张量；Node 的钩子收到的是元组。",
            en=f"`hook` received `{found}`, not one gradient. It is a tensor hook and takes one tensor; hooks on a Node get tuples.",
        )
    if len(args) != 1:
        refuse(
            "hook_on_module",
            zh=f"`hook` 收到了 {len(args)} 个参数：你把它本身注册到了模块上。它是张量钩子，只收一个梯度。",
            en=f"`hook` received {len(args)} arguments: you registered it on the module as it is. It is a tensor hook and "
            "takes one gradient.",
        )


def _examine_silent(seen):
    if seen:
        refuse(
            "called_in_forward",
            zh="反向还没开始，`hook` 就被调用了：你在前向里直接调用了它。让 PyTorch 在梯度到来时调用它。",
            en="`hook` was called before backward had begun: you call it in forward. Let PyTorch call it when a gradient comes.",
        )


def _examine_output(output, plain):
    if isinstance(output, RuntimeError):
        raise output
    if not isinstance(output, Tensor):
        refuse(
            "replaced_output",
            zh=f"模块的输出变成了 `{type(output).__name__}`。看看你的前向钩子返回了什么。",
            en=f"The module's output has become a `{type(output).__name__}`. See what your forward hook returns.",
        )
    if not torch.equal(output.detach(), plain):
        refuse(
            "changed_output",
            zh="模块输出的数值变了。钩子只该改反向时的梯度，不该改前向的值。",
            en="The values of the module's output have changed. The hook should act on the gradient in backward, not on the "
            "values of forward.",
        )


def _examine_two_modules(answer):
    """Of the two only the first one runs."""
    layers, calls = [nn.Linear(3, 2) for _ in range(2)], []
    hooks = [lambda *args, number=number: calls.append(number) for number in range(2)]
    handles = [answer(layer, hook) for layer, hook in zip(layers, hooks, strict=True)]
    layers[0](torch.randn(4, 3, requires_grad=True)).sum().backward()
    for handle in handles:
        handle.remove()
    if calls == [1]:
        refuse_latest_call()


def _examine_one_module(answer):
    """Which is given two hooks."""
    layer, calls = nn.Linear(3, 2), []
    hooks = [lambda *args, number=number: calls.append(number) for number in range(2)]
    handles = [answer(layer, hook) for hook in hooks]
    layer(torch.randn(4, 3, requires_grad=True)).sum().backward()
    for handle in handles:
        handle.remove()
    if sorted(calls) != [0, 1]:
        refuse(
            "one_per_module",
            zh=f"对同一个模块调用了两次 `hook_output`，两个钩子都该触发一次，实际触发的是第 {[number + 1 for number in calls]} 个。后一次不能顶掉前一次。",
            en=f"`hook_output` was called twice on one module; both hooks should fire once, and those that fired are number "
            f"{[number + 1 for number in calls]}. The second must not take the place of the first.",
        )


def _examine_editable(answer):
    layer, calls = nn.Linear(3, 2), []
    handle = answer(layer, lambda *args: calls.append(args))
    outcome = _outcome(lambda: layer(torch.randn(4, 3)).exp_())
    handle.remove()
    if isinstance(outcome, RuntimeError) and "BackwardHookFunction" not in str(outcome):
        raise outcome
    if isinstance(outcome, RuntimeError):
        refuse(
            "full_backward_hook",
            zh="后面接 `nn.ReLU(inplace=True)` 就报错：模块的反向钩子会把输出变成视图，不许原地改。用别的钩子。",
            en="With `nn.ReLU(inplace=True)` behind it raises: a module's backward hook makes the output a view that may not be "
            "edited in place. Use another kind of hook.",
        )
    outcome.sum().backward()
    if not calls and outcome._is_view():
        refuse(
            "hooked_a_view",
            zh="后面接原地操作，前向不报错，`hook` 却一次也没有被调用：你把输出换成了视图，视图被原地改写以后，挂在它上面的钩子就不再触发。挂在输出自己身上。",
            en="When the output is then edited in place nothing fails, but `hook` was never called: you made the output a view, and "
            "a hook on a view is silent once that is edited. Hang it on the output itself.",
        )


def _examine_calls(seen, layer):
    if not seen:
        refuse(
            "never_called",
            zh="前向和反向都跑了，`hook` 一次也没有被调用。",
            en="Forward and backward ran, and `hook` was never called.",
        )
    if len(seen) == 1:
        refuse(
            "first_only",
            zh="只有第一次前向的输出挂上了 `hook`，第二次就没有了。",
            en="Only the output of the first forward had the `hook`; that of the second had none.",
        )
    if len(seen) != 2:
        refuse(
            "wrong_count",
            zh=f"前向和反向各跑了 2 次，`hook` 应当被调用 2 次，实际是 {len(seen)} 次。每次前向的输出都是新张量，各挂一次，不多不少。",
            en=f"Forward and backward ran 2 times each; `hook` should be called 2 times, it was {len(seen)}. The output of each "
            "forward is a new tensor and takes the hook once.",
        )
    if any(grad.shape != (4, 2) or not torch.equal(grad, torch.full((4, 2), 3.0)) for grad in seen):
        refuse(
            "other_gradient",
            zh=f"`hook` 收到的不是输出的梯度：形状是 `{list(seen[0].shape)}`，输出的形状是 `[4, 2]`。是别的张量的，还是改过、取了一部分的？",
            en=f"`hook` was not given the gradient of the output: its shape is `{list(seen[0].shape)}`, the output has `[4, 2]`. Is "
            "it that of another tensor, or was it changed or cut first?",
        )
    if not torch.allclose(layer.bias.grad, torch.full((2,), 24.0)):
        refuse(
            "value_dropped",
            zh="`hook` 收到了梯度，可是它返回的新值没有被用上：前面的参数收到的不是翻倍后的梯度。",
            en="`hook` received the gradient, but the value it returned was not used: the parameters before it did not get the "
            "doubled gradient.",
        )


def _examine_two_forwards(answer):
    """Two forwards before one backward, and a hook that returns None."""
    layer, calls = nn.Linear(3, 2), []
    handle = answer(layer, lambda grad: calls.append(1))
    (layer(torch.ones(1, 3)) + layer(torch.ones(1, 3))).sum().backward()
    handle.remove()
    if not calls:
        refuse(
            "asks_input",
            zh="输入不需要梯度、参数需要梯度时，`hook` 一次也没有被调用。要问的是输出自己，不是输入。",
            en="Where the input requires no gradient and the parameters do, `hook` was never called. The output itself is the one to "
            "ask, not the input.",
        )
    if len(calls) != 2:
        refuse(
            "last_forward_only",
            zh=f"连做两次前向，再做一次反向，`hook` 应当被调用 2 次，实际是 {len(calls)} 次。前一次前向的输出还没有反向，它上面的钩子不能取下。",
            en=f"Two forwards, then one backward: `hook` should be called 2 times, it was {len(calls)}. The output of the first "
            "forward has not been through backward yet and needs its hook.",
        )
    if layer.bias.grad is None or layer.bias.grad.tolist() != [2.0, 2.0]:
        refuse(
            "none_replaces",
            zh="`hook` 返回 `None` 时，梯度应当照旧；现在前面的参数收不到正确的梯度了。",
            en="Where `hook` returns `None` the gradient should stay as it was; now the parameters before do not get the right one.",
        )


def _examine_input_alone(answer):
    """The input requires a gradient, no parameter does; the second module has modules inside."""
    frozen = nn.Linear(3, 2).requires_grad_(False)
    for module in (frozen, nn.Sequential(frozen, nn.ReLU())):
        calls = []
        handle = answer(module, lambda grad, calls=calls: calls.append(1))
        module(torch.ones(1, 3, requires_grad=True)).sum().backward()
        handle.remove()
        if not calls:
            refuse(
                "asks_parameters",
                zh="输入需要梯度、参数都冻结时，`hook` 一次也没有被调用。要问的是输出自己，不是参数。",
                en="Where the input requires a gradient and all parameters are frozen, `hook` was never called. The output itself is "
                "the one to ask, not the parameters.",
            )
        if len(calls) > 1:
            refuse(
                "everywhere",
                zh=f"`module` 里面还有两个模块，前向和反向各跑一次，`hook` 被调用了 {len(calls)} 次，应当 1 次。只挂在 `module` 自己的输出上。",
                en=f"`module` has two modules inside; in one forward and one backward `hook` was called {len(calls)} times instead of 1. "
                "It belongs on the output of `module` itself.",
            )


def _examine_eval(answer):
    layer, calls = nn.Linear(3, 2).eval(), []
    handle = answer(layer, lambda grad: calls.append(1))
    layer(torch.ones(1, 3)).sum().backward()
    handle.remove()
    if not calls:
        refuse(
            "only_in_training",
            zh="`eval()` 之后做前向和反向，`hook` 一次也没有被调用。`eval()` 不关梯度，关掉它的是 `no_grad`（第 3 节）。",
            en="After `eval()` forward and backward ran, and `hook` was never called. `eval()` does not switch gradients off; "
            "`no_grad` does (section 3).",
        )


def _examine_quiet(layer, x):
    with torch.no_grad():
        in_no_grad = _outcome(lambda: layer(x))
    layer.requires_grad_(False)
    when_frozen = _outcome(lambda: layer(x))
    layer.requires_grad_(True)
    if isinstance(in_no_grad, RuntimeError):
        refuse(
            "fails_in_no_grad",
            zh="在 `torch.no_grad()` 之内前向报错：那里的输出不需要梯度，不能挂钩子。",
            en="Forward raises in `torch.no_grad()`: the output there requires no gradient and takes no hook.",
        )
    if isinstance(when_frozen, RuntimeError):
        refuse(
            "fails_when_frozen",
            zh="参数冻结时前向报错：梯度是开着的，输出却不需要梯度。要问的是输出自己。",
            en="Forward raises when the parameters are frozen: gradients are on, yet the output requires none. The output "
            "itself is the one to ask.",
        )
    if in_no_grad.requires_grad or when_frozen.requires_grad:
        refuse(
            "switched_on",
            zh="输出原本不需要梯度（在 `no_grad` 之内，或者参数冻结），现在却需要了：在 `no_grad` 之外，后面接原地操作会报错。只问，不要改。",
            en="The output required no gradient (in `no_grad`, or with frozen parameters) and does now: outside `no_grad` an "
            "in-place operation behind it raises. Ask, do not switch on.",
        )


def _examine_removed(layer, x, seen):
    seen.clear()
    (layer(x) * 3).sum().backward()
    if seen:
        refuse(
            "still_there",
            zh="取下句柄之后又跑了一遍新的前向和反向，`hook` 还是被调用了：这个句柄管的不是那个前向钩子。",
            en="After the handle was removed a new forward and backward ran, and `hook` was still called: this handle does not "
            "belong to the forward hook.",
        )


def replaced_output(module, hook):
    return module.register_forward_hook(lambda module, args, output: output.register_hook(hook))


def called_in_forward(module, hook):
    return module.register_forward_hook(lambda module, args, output: hook(output))


def other_gradient(module, hook):
    def hang(module, args, output):
        if args[0].requires_grad:
            args[0].register_hook(hook)

    return module.register_forward_hook(hang)


def changed_output(module, hook):
    def hang(module, args, output):
        changed = output * 2
        if changed.requires_grad:
            changed.register_hook(hook)
        return changed

    return module.register_forward_hook(hang)


def hook_fails_in_no_grad(module, hook):
    def hang(module, args, output):
        output.register_hook(hook)

    return module.register_forward_hook(hang)


def hook_fails_when_frozen(module, hook):
    def hang(module, args, output):
        if torch.is_grad_enabled():
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def hook_switches_on(module, hook):
    def hang(module, args, output):
        if not output.requires_grad:
            output.requires_grad_()
        output.register_hook(hook)

    return module.register_forward_hook(hang)


def no_handle(module, hook):
    hook_output(module, hook)


def first_only(module, hook):
    def hang(module, args, output):
        output.register_hook(hook)
        handle.remove()

    handle = module.register_forward_hook(hang)
    return handle


def twice(module, hook):
    hook_output(module, hook)
    return hook_output(module, hook)


def value_dropped(module, hook):
    def look(grad):
        hook(grad)

    return hook_output(module, look)


def last_forward_only(module, hook):
    hung = []

    def hang(module, args, output):
        while hung:
            hung.pop().remove()
        if output.requires_grad:
            hung.append(output.register_hook(hook))

    return module.register_forward_hook(hang)


def none_replaces(module, hook):
    def hang(module, args, output):
        if output.requires_grad:
            output.grad_fn.register_prehook(lambda grads: (hook(grads[0]),))

    return module.register_forward_hook(hang)


class _Deaf:
    def remove(self):
        pass


def still_there(module, hook):
    hook_output(module, hook)
    return _Deaf()


def full_backward_hook(module, hook):
    return module.register_full_backward_pre_hook(lambda module, grad_output: (hook(grad_output[0]),))


def on_node(module, hook):
    def hang(module, args, output):
        if output.requires_grad:
            output.grad_fn.register_hook(hook)

    return module.register_forward_hook(hang)


def in_training_only(module, hook):
    def hang(module, args, output):
        if module.training and output.requires_grad:
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def asks_input(module, hook):
    def hang(module, args, output):
        if args[0].requires_grad:
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def asks_parameters(module, hook):
    def hang(module, args, output):
        if output.requires_grad and any(param.requires_grad for param in module.parameters()):
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def everywhere(module, hook):
    for part in reversed(list(module.modules())):
        handle = hook_output(part, hook)
    return handle


_LATEST = {}


def hook_of_the_latest(module, hook):
    _LATEST["hook"] = hook
    return hook_output(module, lambda grad: _LATEST["hook"](grad))


class _Cleared:
    """A handle that takes off whatever is there."""

    def __init__(self, module, handle):
        self.module = module

    def remove(self):
        self.module._forward_hooks.clear()


def hooked_a_view(module, hook):
    def hang(module, args, output):
        if output.requires_grad:
            output = output.view_as(output)
            output.register_hook(hook)
            return output

    return module.register_forward_hook(hang)


def one_per_module(module, hook):
    if getattr(module, "last_handle", None) is not None:
        module.last_handle.remove()
    module.last_handle = hook_output(module, hook)
    return module.last_handle


HOOK_OUTPUT = Exercise(
    "13.B",
    examine_hook_output,
    hook_output,
    {
        "one_per_module": one_per_module,
        "removed_others": lambda module, hook: _Cleared(module, hook_output(module, hook)),
        "replaced_output": replaced_output,
        "changed_output": changed_output,
        "called_in_forward": called_in_forward,
        "hook_on_module": lambda module, hook: module.register_forward_hook(hook),
        "fails_in_no_grad": hook_fails_in_no_grad,
        "fails_when_frozen": hook_fails_when_frozen,
        "switched_on": hook_switches_on,
        "no_handle": no_handle,
        "first_only": first_only,
        "never_called": lambda module, hook: module.register_forward_hook(lambda *args: None),
        "wrong_count": twice,
        "hook_on_node": on_node,
        "only_in_training": in_training_only,
        "other_gradient": other_gradient,
        "value_dropped": value_dropped,
        "last_forward_only": last_forward_only,
        "asks_input": asks_input,
        "asks_parameters": asks_parameters,
        "everywhere": everywhere,
        "latest_call": hook_of_the_latest,
        "none_replaces": none_replaces,
        "still_there": still_there,
        "full_backward_hook": full_backward_hook,
        "hooked_a_view": hooked_a_view,
    },
    zh="不改类，一个函数就够到了 `forward` 里的张量，后面接原地操作也不怕。",
    en="One function reaches a tensor inside `forward` without touching the class, in-place operations behind it included.",
)

# ---- 13.C: in which order do gradients arrive at the outputs of the children? ----


def arrival_order(model, x):
    order, handles = [], []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: order.append(name))

        handles.append(child.register_forward_hook(hang))
    try:
        model(x).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return order


class _Mixed(nn.Module):
    """Declared in another order than used; `stem` is frozen, the output of `side` is not used, `relu` is in place."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(3, 1)
        self.stem, self.side, self.body = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(3, 3)
        self.stem.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        self.side(stem)
        return self.head(self.relu(self.body(stem)))


def examine_arrival_order(answer):
    plain = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1))
    _examine_order(_order(answer, plain), ["2", "1", "0"], plain)
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Linear(3, 1))
    _examine_order(_order(answer, nested), ["1", "0"], nested)
    mixed = _Mixed(frozen=False)
    _examine_order(_order(answer, mixed), ["head", "relu", "body", "stem"], mixed)
    try:
        order = _order(answer, _Mixed(frozen=True))
    except RuntimeError as error:
        if "register a hook" not in str(error):
            raise
        refuse(
            "fails_when_frozen",
            zh="有一层的参数冻结了，它的输出不需要梯度，不能挂钩子：你的函数在这里报错。",
            en="One layer is frozen, so that its output requires no gradient and takes no hook: your function raises there.",
        )
    _examine_order(order, ["head", "relu", "body"], mixed)
    muted = nn.Sequential(nn.Linear(2, 3), nn.Threshold(1e9, 0.0), nn.Linear(3, 1))
    order = _order(answer, muted)
    if [*order] == ["2", "1"]:  # the gradient that arrives at "0" is zero
        refuse_zero_for_none()
    _examine_order(order, ["2", "1", "0"], muted)
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)), torch.randn(4, 2)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    answer(model, x)
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, param), other in pairs:
        if param.grad is not None and (other.grad is None or not torch.allclose(param.grad, other.grad)):
            refuse(
                "other_gradients",
                zh=f"`{name}` 的 `.grad` 和只跑一次反向的结果不同。反向跑了几次？",
                en=f"The `.grad` of `{name}` is not that of one backward. How often was it run?",
            )


def _order(answer, model):
    """What `answer` returns for `model`, which holds one hook of somebody else's."""
    x, child = torch.randn(4, 2), next(model.children())
    handle = child.register_forward_hook(lambda module, args, output: None)
    try:
        order = answer(model, x)
    except (RuntimeError, TypeError, AttributeError) as error:
        if "RemovableHandle" in str(error):
            refuse(
                "replaced_output",
                zh="下一层收到的不是张量，是一个句柄。看看你的前向钩子返回了什么（第 5 节）。",
                en="The next layer was given a handle, not a tensor. See what your forward hook returns (section 5).",
            )
        if "BackwardHookFunction" not in str(error):
            raise
        refuse(
            "full_backward_hook",
            zh="模型里有原地的 ReLU，前向就报错了：模块的反向钩子会把输出变成视图，不许原地改。用别的钩子。",
            en="With a ReLU in place in the model forward raises: a module's backward hook makes the output a view that may not "
            "be edited in place. Use another kind of hook.",
        )
    if x.requires_grad:
        refuse(
            "changed_input",
            zh="输入 `x` 原本不需要梯度，现在需要了：这样一来，冻结的层也要参与反向。",
            en="The input `x` required no gradient and does now, so that frozen layers take part in backward too.",
        )
    if handle.id not in child._forward_hooks:
        refuse(
            "removed_others",
            zh="模型上原来就有别人挂的一个前向钩子，现在没了。只取下自己挂的。",
            en="The model had a forward hook of somebody else's, and it is gone. Take off your own only.",
        )
    handle.remove()
    _examine_left(model)
    return order


def _examine_order(order, want, model):
    if not isinstance(order, list | tuple) or any(not isinstance(name, str) for name in order):
        refuse(
            "not_names",
            zh="应当返回名字（字符串）的列表，例如 `['fc', 'conv']`。",
            en="Return a list of names (strings), such as `['fc', 'conv']`.",
        )
    order = list(order)
    if order == want:
        return
    if "" in order:
        refuse(
            "whole_model",
            zh="列表里有空名字：`named_modules()` 把模型自己也算了进去。这里要的是 `named_children()` 里的名字。",
            en="There is an empty name in the list: `named_modules()` counts the model itself too. The names wanted are those of "
            "`named_children()`.",
        )
    if strangers := sorted(set(order) - {name for name, _ in model.named_children()}):
        refuse(
            "not_children",
            zh=f"`{strangers[0]}` 不是子模块的名字。要的是 `named_children()` 里的名字，也就是子模块的输出收到梯度的先后。",
            en=f"`{strangers[0]}` is not the name of a child module. The names wanted are those of `named_children()`, in the "
            "order in which gradients arrive at the outputs of these modules.",
        )
    if not order:
        refuse(
            "nothing_arrived",
            zh="列表是空的，没有一个钩子触发过。反向跑了吗？前向开始的时候，钩子还挂着吗？",
            en="The list is empty: no hook has fired. Did backward run? Were the hooks still there when forward began?",
        )
    if len(order) > 1 and len(set(order)) == 1:
        refuse(
            "last_name",
            zh=f"每一项都是 `{order[0]}`：钩子触发时才去读循环变量，而循环早已停在最后一个名字上。",
            en=f"Every entry is `{order[0]}`: your hooks read the loop variable when they fire, and by then it has stopped at "
            "the last name.",
        )
    if len(set(order)) < len(order):
        refuse(
            "repeated",
            zh=f"得到的是 `{order}`，有的名字出现了不止一次。前向和反向各跑一次就够，每一层也只挂一次。",
            en=f"Found `{order}`, with names in it more than once. Run forward and backward once each, and hang one hook per "
            "layer.",
        )
    if order == want[::-1]:
        refuse(
            "forward_order",
            zh=f"得到的是 `{order}`，这是前向的次序。要在梯度到达时才记，先到的排在前面。",
            en=f"Found `{order}`, which is the order of forward. Take the note when the gradient arrives, the first to arrive "
            "first.",
        )
    if "side" in order:
        refuse(
            "unused_counted",
            zh="`side` 的输出没有用到，收不到梯度，却在列表里。别从定义或前向的次序去推，让钩子自己记。",
            en="The output of `side` is not used and receives no gradient, yet it is listed. Do not infer it from the order of "
            "definition or of forward; let hooks take the note.",
        )
    if {"body", "relu"} <= set(order) and order.index("body") < order.index("relu"):
        refuse(
            "hung_too_late",
            zh="`relu` 是原地操作，梯度先到它的输出，再到 `body` 的输出；你的次序反了。前向结束之后再挂钩子，两个名字就指向同一个张量了（第 6 节）。",
            en="`relu` works in place; gradients arrive at its output first, then at that of `body`, and you have them the other "
            "way round. Once forward is over, the two names are one tensor (section 6).",
        )
    if extra := sorted(set(order) - set(want)):
        refuse(
            "switched_on",
            zh=f"得到的是 `{order}`，多了 `{extra}`：它冻结了，输出不需要梯度，是你的函数让它需要的。",
            en=f"Found `{order}`; `{extra}` is too many: it is frozen and its output requires no gradient, unless your function "
            "makes it.",
        )
    missing = sorted(set(want) - set(order))
    if any(list(model.get_submodule(name).parameters()) for name in missing):
        refuse(
            "on_inputs",
            zh=f"得到的是 `{order}`，缺了 `{missing}`。每个子模块都挂上了吗，里面还有层的也算？挂的是输出，不是输入吗？",
            en=f"Found `{order}`; missing: `{missing}`. Does every child have a hook, also one with layers inside it? And is it "
            "on the output, not on the input?",
        )
    refuse(
        "wrong_order",
        zh=f"得到的是 `{order}`，"
        + (f"缺了 `{missing}`。没有参数的层也有输出。" if missing else "名字不缺，次序不对。"),
        en=f"Found `{order}`"
        + (
            f"; missing: `{missing}`. A layer without parameters has an output too."
            if missing
            else ", in the wrong order."
        ),
    )


def _examine_left(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    left = any(getattr(module, kind) for module in model.modules() for kind in kinds)
    if left or any(param._backward_hooks for param in model.parameters()):
        refuse(
            "left_behind",
            zh="函数返回以后，模型上还留着你的钩子。",
            en="After the function has returned your hooks are still on the model.",
        )


def last_name(model, x):
    order, handles = [], []

    def hang(module, args, output):
        output.register_hook(lambda grad: order.append(name))

    for name, child in model.named_children():  # noqa: B007
        handles.append(child.register_forward_hook(hang))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def in_forward(model, x):
    order, handles = [], []
    for name, child in model.named_children():
        handles.append(child.register_forward_hook(lambda *args, name=name: order.append(name)))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def zeros_left_out(model, x):
    order, handles = [], []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: order.append(name) if grad.any() else None)

        handles.append(child.register_forward_hook(hang))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def left_behind(model, x):
    order = []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: order.append(name))

        child.register_forward_hook(hang)
    model(x).sum().backward()
    return order


def hung_too_late(model, x):
    outputs, order, handles = {}, [], []
    for name, child in model.named_children():

        def keep(module, args, output, name=name):
            outputs[name] = output

        handles.append(child.register_forward_hook(keep))
    loss = model(x).sum()
    for name, output in outputs.items():
        output.register_hook(lambda grad, name=name: order.append(name))
    loss.backward()
    for handle in handles:
        handle.remove()
    return order


def order_fails_when_frozen(model, x):
    order, handles = [], []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            output.register_hook(lambda grad: order.append(name))

        handles.append(child.register_forward_hook(hang))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def _arrivals(model, x, layers, of=lambda args, output: output, switch_on=False):
    order, handles = [], []
    for name, layer in layers:

        def hang(module, args, output, name=name):
            tensor = of(args, output)
            if switch_on and not tensor.requires_grad:
                tensor.requires_grad_()
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: order.append(name))

        handles.append(layer.register_forward_hook(hang))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def whole_model(model, x):
    return _arrivals(model, x, model.named_modules())


def arrivals_at_inputs(model, x):
    return _arrivals(model, x, model.named_children(), of=lambda args, output: args[0])


def arrivals_switched_on(model, x):
    return _arrivals(model, x, model.named_children(), switch_on=True)


def full_backward_hooks(model, x):
    order, handles = [], []
    for name, child in model.named_children():
        handles.append(child.register_full_backward_hook(lambda *args, name=name: order.append(name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first layer's input requires no gradient
        model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def removed_others(model, x):
    order = left_behind(model, x)
    for child in model.children():
        child._forward_hooks.clear()
    return order


def changed_input(model, x):
    return arrival_order(model, x.requires_grad_())


def nothing_arrived(model, x):
    order, handles = [], []
    for name, child in model.named_children():

        def hang(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: order.append(name))

        handles.append(child.register_forward_hook(hang))
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    return order


def repeated(model, x):
    return arrival_order(model, x) + arrival_order(model, x)


def order_of_parameters(model, x):
    order, handles = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            handles.append(param.register_hook(lambda grad, name=name: order.append(name)))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def handle_for_output(model, x):
    order, handles = [], []
    for name, child in model.named_children():
        hang = lambda module, args, output, name=name: output.register_hook(lambda grad: order.append(name))  # noqa: E731
        handles.append(child.register_forward_hook(hang))
    try:
        model(x).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return order


def from_weights(model, x):
    order, handles = [], []
    for name, child in model.named_children():
        if hasattr(child, "weight") and child.weight.requires_grad:
            handles.append(child.weight.register_hook(lambda grad, name=name: order.append(name)))
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return order


def without_in_place(model, x):
    for module in model.modules():
        module.inplace = False
    return arrival_order(model, x)


def run_twice(model, x):
    arrival_order(model, x)
    return arrival_order(model, x)


ARRIVAL_ORDER = Exercise(
    "13.C",
    examine_arrival_order,
    arrival_order,
    {
        "other_gradients": run_twice,
        "changed_given": without_in_place,
        "last_name": last_name,
        "forward_order": in_forward,
        "unused_counted": lambda model, x: [name for name, _ in model.named_children()][::-1],
        "left_behind": left_behind,
        "hung_too_late": hung_too_late,
        "fails_when_frozen": order_fails_when_frozen,
        "wrong_order": from_weights,
        "whole_model": whole_model,
        "full_backward_hook": full_backward_hooks,
        "removed_others": removed_others,
        "changed_input": changed_input,
        "not_names": lambda model, x: list(model.children())[::-1],
        "not_children": order_of_parameters,
        "nothing_arrived": nothing_arrived,
        "repeated": repeated,
        "switched_on": arrivals_switched_on,
        "on_inputs": arrivals_at_inputs,
        "zero_for_none": zeros_left_out,
        "replaced_output": handle_for_output,
    },
    zh="次序是记下来的，不是推出来的：声明的先后、没有用到的分支、原地的 ReLU 都骗不了它。",
    en="The order is a record and no inference: neither declarations, nor unused branches, nor a ReLU in place can fool it.",
)

CHECKS = [
    Prediction(
        "13.1",
        zh="`lambda` 里的 `x` 到触发时才去查，那时 `forward` 早已把 `x` 改指最后一层的输出。钩子没有挂错张量，是读错了名字。",
        en="The `x` in the `lambda` is looked up when the hook fires; by then `forward` has made `x` the output of the last "
        "layer. The hook hangs on the right tensor and reads the wrong name.",
    ),
    Prediction(
        "13.2",
        zh="每次前向都算出新的 `x`，钩子挂在各自的 `x` 上；反向只经过最后那一次前向的张量，另外两个 `x` 连同钩子早已释放。",
        en="Every forward computes a new `x`, and each has hooks of its own. Backward passes only through the tensors of the "
        "last forward; the other two `x` are long gone, hooks and all.",
    ),
    Prediction(
        "13.3",
        zh="每一步都多挂一个，谁也没有取下：到最后一步，梯度被减半了 3 次。参数不像中间张量，不会每步都换新的。",
        en="Each step adds one and none is taken off: in the last step the gradient is halved 3 times. Unlike tensors in the "
        "middle, a parameter is not new in each step.",
    ),
    Prediction(
        "13.4",
        zh="ReLU 原地改写了 `conv` 的输出，字典里的两个名字成了同一个张量；前向之后再挂，看到的是 ReLU 输出的梯度。",
        en="ReLU has overwritten the output of `conv`, and the two names in the dictionary are one tensor; hung after forward, "
        "the hook sees the gradient of the output of ReLU.",
    ),
    Prediction(
        "13.5",
        zh="反向传播还没走到 `flatten`，`fc` 的权重和偏置就已经写好了 `.grad`：参数一算完就累加，不等整趟反向结束。",
        en="Backward has not even come to `flatten` when the weight and the bias of `fc` have their `.grad`: a parameter's "
        "gradient is added as soon as it is known, not when all of backward is over.",
    ),
    NO_NEGATIVE,
    HOOK_OUTPUT,
    ARRIVAL_ORDER,
]
