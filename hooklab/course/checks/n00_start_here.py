"""Checks of notebook 00: the first hooks."""

import torch
from torch import Tensor, nn

from hooklab.census import hooks_on
from hooklab.course.check import Exercise, Prediction, expect_like, refuse, said

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
        "wrong_dtype": lambda grad: (grad / 2).float(),
        "raised": lambda grad: gradient / 2,  # noqa: F821
    },
    zh="返回一个新张量，原来的梯度分毫未动：改梯度就该这样改。",
    en="A new tensor is returned and the old one is left alone: that is how to change a gradient.",
)

# ---- 00.B: run a model once, look at the shape inside it, leave no trace ----


def peek(model, name, x):
    shapes = []
    child = model.get_submodule(name)
    handle = child.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    try:
        return model(x), shapes[0]
    finally:
        handle.remove()


class _Net(nn.Module):
    """A net whose middle cannot be seen from outside."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.inner, self.head, self.fails = nn.Linear(3, 5), nn.Linear(5, 2), fails

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if not isinstance(hidden, Tensor):
            refuse(
                "replaced_output",
                zh=f"你的钩子返回了值（`{type(hidden).__name__}`），它顶替了 `inner` 的输出：只看不改，就不要返回。看第 6 节。",
                en=f"Your hook returned a value (`{type(hidden).__name__}`), and it took the place of the output of `inner`: to look only, "
                "return nothing. See section 6.",
            )
        if self.fails:
            raise ValueError("this model always fails")
        return self.head(hidden)


def examine_peek(answer):
    for name, shape in (("inner", (4, 5)), ("head", (4, 2))):
        model, x, calls = _Net(), torch.randn(4, 3), []
        want = model(x)
        for part in (model, model.get_submodule(name)):
            part.register_forward_hook(lambda *args, calls=calls: calls.append("ours"))
        model.zero_grad()
        want.sum().backward(retain_graph=True)  # gradients that must stay
        before = hooks_on(model)
        _examine_run(answer(model, name, x), calls, want, model, name, shape)
        _examine_traces(model, before)
        _examine_failing(answer, name)
    deep = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), nn.Linear(7, 2))
    found = []
    for name in ("0", "0.0"):
        try:
            found.append(answer(deep, name, torch.ones(4, 3))[1])
        except Exception:  # all names without a dot were found
            found.append(None)
    if found[0] != (4, 7):
        refuse(
            "another_of_the_name",
            zh=f"模型的子模块 `0` 里还有一个叫 `0` 的：`name` 是 `0` 时，输出形状应当是 `(4, 7)`，得到的是 `{found[0]}`。名字要从模型数起，整个一样才算。",
            en=f"Inside the submodule `0` of the model there is another `0`: with `name` `0` the shape is `(4, 7)`; found `{found[0]}`. A "
            "name counts from the model, and as a whole.",
        )
    if found[1] != (4, 5):
        refuse(
            "direct_children",
            zh="名字可以带点：`0.0` 是子模块 `0` 里面的子模块 `0`，你的函数没有找到它。看看提示里的 `get_submodule`。",
            en="A name may have dots: `0.0` is the submodule `0` of the submodule `0`, and your function has not found it. See "
            "`get_submodule` in the hint.",
        )


def _examine_run(got, calls, want, model, name, inside):
    if not (isinstance(got, tuple | list) and len(got) == 2):
        refuse(
            "not_a_pair",
            zh=f"应当返回一对值 `(output, shape)`，得到的是 `{type(got).__name__}`。",
            en=f"Return a pair `(output, shape)`; found `{type(got).__name__}`.",
        )
    if not any(isinstance(one, Tensor) for one in got) and tuple(got) == inside:
        refuse(
            "shape_alone",
            zh=f"只返回了形状 `{inside}`：应当返回一对值 `(output, shape)`。",
            en=f"Only the shape `{inside}` was returned; return a pair `(output, shape)`.",
        )
    output, shape = got
    if isinstance(shape, Tensor) and isinstance(output, tuple):
        refuse(
            "swapped",
            zh="两个值的次序反了：先 `output`，后 `shape`。",
            en="The two values are in the wrong order: `output` first, then `shape`.",
        )
    if len(calls) != 2:
        refuse(
            "wrong_call_count",
            zh=f"我们事先在模型和它的 `{name}` 上各挂了一个钩子，一共触发了 {len(calls)} 次，应当是 2 次。是不是调用了 `forward`，或者运行了不止一遍？",
            en=f"We hung one hook on the model and one on its `{name}`; together they fired {len(calls)} times instead of 2. "
            "Was `forward` called, or the model run more than once?",
        )
    expect_like(output, want, "输出", "the output")
    weight = model.get_submodule(name).weight
    if not output.requires_grad or torch.autograd.grad(output.sum(), weight, allow_unused=True)[0] is None:
        refuse(
            "detached",
            zh=f"输出的数值对，但梯度从它到不了 `{name}` 的参数，没法再训练。看一眼不应当改变模型的行为。",
            en=f"The output has the right values, but no gradient gets from it to the parameters of `{name}`: it cannot be "
            "trained. A look should not change what the model does.",
        )
    if not isinstance(shape, tuple) or tuple(shape) != inside:
        refuse(
            "wrong_output_shape",
            zh=f"`{name}` 的输出形状应当是 `{inside}`，得到的是 `{shape}`。",
            en=f"The output of `{name}` has the shape `{inside}`; found `{shape}`.",
        )


def _examine_traces(model, before):
    after = hooks_on(model)
    if any(hook not in before for hook in after):
        refuse(
            "left_behind",
            zh="函数返回以后，钩子还挂着，以后每一步都会再触发。注册函数返回的句柄就是用来取下它的。",
            en="The hook is still there after the function has returned, and fires in every later step. The handle "
            "that the registration returns is there to take it off.",
        )
    if any(hook not in after for hook in before):
        refuse(
            "removed_others",
            zh="原有的、不归你管的钩子也被取下了。请只取下你自己挂的那一个。",
            en="A hook that was there before, and is not yours, is gone too. Take off only the one that you hung.",
        )
    _examine_forward(model)


def _examine_forward(model):
    for name, part in model.named_modules():
        if part.forward != type(part).forward.__get__(part):
            place = f"{name}.forward" if name else "forward"
            refuse(
                "forward_replaced",
                zh=f"运行结束以后，模型的 `{place}` 还是你换上的那个函数。用完要换回去，模型出错时也一样；或者用钩子。",
                en=f"When the run is over, `{place}` of the model is still the function that you put there. Put the old one back, "
                "also when the model fails; or use a hook.",
            )


def _examine_failing(answer, name):
    model, raised = _Net(fails=True), None
    for part in (model, model.get_submodule(name)):
        part.register_forward_hook(lambda *args: None)
    before = hooks_on(model)
    try:
        answer(model, name, torch.ones(1, 3))
    except Exception as error:
        raised = error
    if any(hook not in before for hook in hooks_on(model)):
        refuse(
            "left_after_error",
            zh="前向中途出错时，取下钩子的那一行没有执行到。想想 Python 里怎样保证“无论如何都要执行”。",
            en="When the forward fails, the line that takes the hook off is never reached. How does Python run "
            "something 'in any case'?",
        )
    if any(hook not in hooks_on(model) for hook in before):
        refuse(
            "removed_others_after_error",
            zh="模型出错以后，原有的、不归你管的钩子也被取下了。这时也只取下你自己挂的那一个。",
            en="After the model has failed, a hook that was there before, and is not yours, is gone too. Also then take off only the one "
            "that you hung.",
        )
    _examine_forward(model)
    if raised is None:
        refuse(
            "hid_the_error",
            zh="模型前向时抛出的异常被吞掉了；调用者应当能看到它。",
            en="The model raised in its forward, and the error was swallowed; the caller should see it.",
        )
    if not isinstance(raised, ValueError):
        refuse(
            "another_error",
            zh=f"模型前向时抛出的是 `ValueError`，`name` 是 `{name}`；调用者收到的却是 `{said(raised)}`。模型出错以后，你的代码还运行了哪几行？",
            en=f"The model raised `ValueError` in its forward, `name` was `{name}`, and the caller got `{said(raised)}`. Which lines of "
            "yours still run after the model has failed?",
        )


def left_behind(model, name, x):
    shapes = []
    model.get_submodule(name).register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    return model(x), shapes[0]


def left_after_error(model, name, x):
    shapes = []
    child = model.get_submodule(name)
    handle = child.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    output = model(x)
    handle.remove()
    return output, shapes[0]


def forward_replaced(model, name, x):
    shapes, child = [], model.get_submodule(name)
    run = child.forward

    def forward(*args):
        output = run(*args)
        shapes.append(tuple(output.shape))
        return output

    child.forward = forward
    output = model(x)
    child.forward = run
    return output, shapes[0]


def another_error(model, name, x):
    shapes = []
    child = model.get_submodule(name)
    handle = child.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    try:
        output = model(x)
    finally:
        handle.remove()
        shape = shapes[0]
    return output, shape


def removed_others(model, name, x):
    output, shape = left_behind(model, name, x)
    model.get_submodule(name)._forward_hooks.clear()
    return output, shape


def returned_the_shape(model, name, x):
    shapes = {}
    child = model.get_submodule(name)
    handle = child.register_forward_hook(lambda module, args, output: shapes.setdefault("shape", output.shape))
    try:
        return model(x), shapes["shape"]
    finally:
        handle.remove()


def called_forward(model, name, x):
    hidden = model.inner.forward(x)
    return model.head(hidden), tuple(hidden.shape)


def detached(model, name, x):
    with torch.no_grad():
        return peek(model, name, x)


def direct_children(model, name, x):
    shapes = []
    child = getattr(model, name)
    handle = child.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    try:
        return model(x), shapes[0]
    finally:
        handle.remove()


def hid_the_error(model, name, x):
    try:
        return peek(model, name, x)
    except Exception:
        return None, None


def clears_after_an_error(model, name, x):
    shapes = []
    child = model.get_submodule(name)
    handle = child.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    try:
        output = model(x)
    except Exception:
        child._forward_hooks.clear()
        raise
    handle.remove()
    return output, shapes[0]


def by_the_end_of_the_name(model, name, x):
    return peek(model, next(full for full, _ in reversed(list(model.named_modules())) if full.endswith(name)), x)


PEEK = Exercise(
    "00.B",
    examine_peek,
    peek,
    {
        "changed_given": lambda model, name, x: peek(model.eval(), name, x),
        "left_behind": left_behind,
        "left_after_error": left_after_error,
        "forward_replaced": forward_replaced,
        "another_error": another_error,
        "removed_others": removed_others,
        "removed_others_after_error": clears_after_an_error,
        "another_of_the_name": by_the_end_of_the_name,
        "replaced_output": returned_the_shape,
        "shape_alone": lambda model, name, x: peek(model, name, x)[1],
        "raised": lambda model, name, x: peek(model, name, x.shape),
        "wrong_call_count": called_forward,
        "detached": detached,
        "direct_children": direct_children,
        "hid_the_error": hid_the_error,
        "swapped": lambda model, name, x: peek(model, name, x)[::-1],
        "not_a_pair": lambda model, name, x: model(x),
        "wrong_output_shape": lambda model, name, x: (output := model(x), tuple(output.shape)),
    },
    zh="看到了里面的形状，输出没变，出错时也不留钩子。",
    en="The shape inside is seen, the output unchanged, and no hook stays, not even after an error.",
)

CHECKS = [
    Prediction(
        "00.1",
        zh="模块钩子挂在 `Module.__call__` 这一层：`layer(x)` 会经过它；`layer.forward(x)` 绕了过去，钩子毫不知情，反向的模块钩子也一样。",
        en="A module hook sits in `Module.__call__`: `layer(x)` goes through it, `layer.forward(x)` goes round it and "
        "the hook never hears of it; nor do the module's backward hooks.",
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
