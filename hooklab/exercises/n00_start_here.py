"""Checks of notebook 00: the first hooks."""

import torch
from torch import Tensor, nn

from hooklab.exercises.check import Exercise, Prediction, expect_like, refuse

# ---- 00.A: a hook that halves the gradient ----


def halve(grad):
    return grad / 2


def examine_halve(answer):
    for grad in (torch.tensor([2.0, -4.0, 6.0]), torch.randn(2, 3, dtype=torch.float64)):
        before = grad.clone()
        got = answer(grad)
        if not torch.equal(grad, before):
            refuse(
                "edited_in_place",
                zh="传进来的 `grad` 被原地改了。别的张量可能共用这块内存，也会跟着变；请算出一个新张量。",
                en="The `grad` that came in was edited in place. Other tensors may share its memory and get "
                "the change too; compute a new tensor.",
            )
        if got is None:
            refuse(
                "returned_nothing",
                zh="钩子返回了 `None`。PyTorch 把 `None` 理解为“不改动”，梯度会原样往下传。",
                en="The hook returned `None`. To PyTorch that means 'change nothing': the gradient passes as it is.",
            )
        expect_like(got, halve(before), "钩子的返回值", "what the hook returns")


def edited_in_place(grad):
    grad *= 0.5
    return grad


def returned_nothing(grad):
    grad / 2


HALVE = Exercise(
    "00.A",
    examine_halve,
    halve,
    {
        "edited_in_place": edited_in_place,
        "returned_nothing": returned_nothing,
        "wrong_values": lambda grad: grad * 2,
        "wrong_shape": lambda grad: grad.sum() / 2,
        "wrong_type": lambda grad: [g / 2 for g in grad.tolist()],
        "raised": lambda grad: gradient / 2,  # noqa: F821
    },
    zh="返回一个新张量，原来的梯度分毫未动：改梯度就该这样改。",
    en="A new tensor is returned and the old one is left alone: that is how to change a gradient.",
)

# ---- 00.B: run a module once, look at its output's shape, leave no trace ----


def peek(module, x):
    shapes = []
    handle = module.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    try:
        return module(x), shapes[0]
    finally:
        handle.remove()


class _Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this module always fails")


def examine_peek(answer):
    module, x, calls = nn.Linear(3, 2), torch.randn(4, 3), []
    want = module(x)
    module.register_forward_hook(lambda *args: calls.append("ours"))
    got = answer(module, x)
    if not (isinstance(got, tuple) and len(got) == 2):
        refuse(
            "not_a_pair",
            zh=f"应当返回一对值 `(output, shape)`，得到的是 `{type(got).__name__}`。",
            en=f"Return a pair `(output, shape)`; found `{type(got).__name__}`.",
        )
    _examine_run(calls, got, want)
    _examine_traces(answer, module)


def _examine_run(calls, got, want):
    if len(calls) != 1:
        refuse(
            "wrong_call_count",
            zh=f"我们事先挂在模块上的钩子触发了 {len(calls)} 次，应当是 1 次。是不是调用了 `module.forward(x)`，或者运行了不止一遍？",
            en=f"A hook that we hung on the module fired {len(calls)} times instead of 1. Was `module.forward(x)` "
            "called, or the module run more than once?",
        )
    output, shape = got
    if not isinstance(output, Tensor):
        refuse(
            "replaced_output",
            zh=f"模块的输出变成了 `{type(output).__name__}`。前向钩子的返回值只要不是 `None`，就会顶替输出；看看你的钩子返回了什么。",
            en=f"The module's output is now of type `{type(output).__name__}`. Whatever a forward hook returns, other than "
            "`None`, replaces the output: look at what yours returns.",
        )
    expect_like(output, want, "输出", "the output")
    if not isinstance(shape, tuple) or tuple(shape) != tuple(want.shape):
        refuse(
            "wrong_output_shape",
            zh=f"输出的形状应当是 `{tuple(want.shape)}`，得到的是 `{shape}`。",
            en=f"The output's shape is `{tuple(want.shape)}`; found `{shape}`.",
        )


def _examine_traces(answer, module):
    if len(module._forward_hooks) > 1:
        refuse(
            "left_behind",
            zh="函数返回以后，钩子还挂在模块上，以后每次前向都会再触发。`register_forward_hook` 返回的句柄就是用来取下它的。",
            en="The hook is still on the module after the function has returned, and fires in every later forward. "
            "The handle that `register_forward_hook` returns is there to take it off.",
        )
    if len(module._forward_hooks) < 1:
        refuse(
            "removed_others",
            zh="模块上原有的、不归你管的钩子也被取下了。请只取下你自己挂的那一个。",
            en="A hook that was on the module before, and is not yours, is gone too. Take off only the one that you hung.",
        )
    failing = _Fails()
    try:
        answer(failing, torch.ones(1))
    except ValueError:
        pass
    else:
        refuse(
            "hid_the_error",
            zh="模块前向时抛出的异常被吞掉了；调用者应当能看到它。",
            en="The module raised in its forward, and the error was swallowed; the caller should see it.",
        )
    if failing._forward_hooks:
        refuse(
            "left_after_error",
            zh="前向中途出错时，取下钩子的那一行没有执行到。想想 Python 里怎样保证“无论如何都要执行”。",
            en="When the forward fails, the line that takes the hook off is never reached. How does Python run "
            "something 'in any case'?",
        )


def left_behind(module, x):
    shapes = []
    module.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    return module(x), shapes[0]


def left_after_error(module, x):
    shapes = []
    handle = module.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    output = module(x)
    handle.remove()
    return output, shapes[0]


def removed_others(module, x):
    output, shape = left_behind(module, x)
    module._forward_hooks.clear()
    return output, shape


def replaced_output(module, x):
    shapes = {}
    handle = module.register_forward_hook(
        lambda module, args, output: shapes.setdefault("shape", output.shape)
    )
    output = module(x)
    handle.remove()
    return output, shapes["shape"]


def called_forward(module, x):
    output = module.forward(x)
    return output, tuple(output.shape)


def hid_the_error(module, x):
    try:
        return peek(module, x)
    except Exception:
        return None, None


PEEK = Exercise(
    "00.B",
    examine_peek,
    peek,
    {
        "left_behind": left_behind,
        "left_after_error": left_after_error,
        "removed_others": removed_others,
        "replaced_output": replaced_output,
        "wrong_call_count": called_forward,
        "hid_the_error": hid_the_error,
        "not_a_pair": lambda module, x: module(x),
        "wrong_output_shape": lambda module, x: (module(x), x.shape),
    },
    zh="看到了形状，输出没变，出错时也不留钩子。",
    en="The shape is seen, the output unchanged, and no hook stays, not even after an error.",
)

CHECKS = [
    Prediction(
        "00.1",
        zh="模块钩子挂在 `Module.__call__` 这一层：`layer(x)` 会经过它；`layer.forward(x)` 绕了过去，钩子毫不知情。",
        en="A module hook sits in `Module.__call__`: `layer(x)` goes through it, `layer.forward(x)` goes round it and "
        "the hook never hears of it.",
    ),
    Prediction(
        "00.2",
        zh="反向传播从输出走向输入，离损失越近越先触发：`y` 的梯度先遇到挂在 `y` 上的张量钩子，再进模块，这才轮到 full backward pre-hook。",
        en="Backward runs from the output to the input, so what stands nearest to the loss comes first: the gradient of `y` "
        "meets the tensor hook on `y`, then enters the module, whose full backward pre-hook comes next.",
    ),
    HALVE,
    PEEK,
]
