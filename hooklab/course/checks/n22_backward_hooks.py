"""Checks of notebook 22: module backward hooks."""

import copy
import math
import numbers
import traceback
import warnings
from collections import OrderedDict

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, Prediction, expect_like, refuse, refuse_from_before, said

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hook_count(model):
    on_modules = sum(len(getattr(module, table)) for module in model.modules() for table in HOOK_TABLES)
    everywhere = sum(len(getattr(nn.modules.module, f"_global{table}")) for table in HOOK_TABLES)
    return on_modules + everywhere + sum(len(param._backward_hooks or ()) for param in model.parameters())


def _settings(model):
    """What a function that only looks must leave as it was."""
    flags = [(module.training, getattr(module, "inplace", None)) for module in model.modules()]
    return flags, [param.requires_grad for param in model.parameters()]


def _attributes(model):
    return [set(vars(module)) for module in model.modules()]


def _relus(model):
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ReLU)]


# How a wrong answer cleans up: always, only if nothing raises, never.


def _then_remove(handles, run):
    try:
        return run()
    finally:
        for handle in handles:
            handle.remove()


def _remove_if_it_works(handles, run):
    result = run()
    for handle in handles:
        handle.remove()
    return result


def _leave(handles, run):
    return run()


def _examine_left_alone(model, settings, attributes, others):
    """No hook of the answer's is left, those of others are there, and no switch of the model was moved."""
    _examine_others(others)
    if _hook_count(model):
        refuse(
            "left_behind",
            zh="函数返回以后，还留着你的钩子。",
            en="After the function has returned, hooks of yours are left.",
        )
    _examine_kind(model)
    if _settings(model) != settings:
        refuse(
            "changed_model",
            zh="函数返回以后，模型和原来不一样了：有的 `training`、`inplace` 或 `requires_grad` 被改过。",
            en="After the function has returned, the model is not as it was: some `training`, `inplace` or `requires_grad` was "
            "changed.",
        )
    pairs = zip(_attributes(model), attributes, strict=True)
    if new := sorted({name for after, before in pairs for name in after - before}):
        refuse(
            "attribute_left",
            zh=f"模块身上多了属性：`{new}`。放进函数自己的字典，就不用写到模型上。",
            en=f"Modules have new attributes: `{new}`. Put it into a dictionary of your function's own, and nothing need be written "
            "onto the model.",
        )


def _examine_others(others):
    if any(hook.id not in (hook.hooks_dict_ref() or ()) for hook in others):
        refuse(
            "removed_others",
            zh="模型上原来有别人的钩子，现在少了。只取下自己挂的。",
            en="The model had hooks of somebody else's, and not all of them are left. Take off your own only.",
        )
    for hook in others:
        hook.remove()


def _examine_kind(model):
    if any(module._is_full_backward_hook is False for module in model.modules()):
        refuse(
            "legacy_hook",
            zh="你用的是旧的 `register_backward_hook`：钩子取下了，模块却从此拒绝 full backward hook。（第 4 节）",
            en="You used the legacy `register_backward_hook`: the hook is gone, but the module refuses a full backward hook from now "
            "on. (Section 4)",
        )


def _examine_left_after_error(model, settings):
    if _hook_count(model):
        refuse(
            "left_after_error",
            zh="前向中途出错时，你的钩子留在了模型上。",
            en="When forward fails midway, your hooks stay on the model.",
        )
    if _settings(model) != settings:
        refuse(
            "changed_after_error",
            zh="前向中途出错时，模型没有变回原样：有的 `training`、`inplace` 或 `requires_grad` 停在了改过的值上。",
            en="When forward fails midway, the model is not put back as it was: some `training`, `inplace` or `requires_grad` keeps the "
            "changed value.",
        )


def _refuse_swallowed():
    refuse(
        "swallowed",
        zh="前向报错了，你的函数却把错误吞掉了：调用的人会以为一切正常。",
        en="The forward raised, and your function swallowed the error: the caller would believe that all is well.",
    )


def _refuse_what_backward_hooks_raise(error):
    """The errors that a backward hook of the learner's brings about; any other is raised again."""
    line = str(error).splitlines()[0] if str(error) else ""
    if "invalid number of" in line:
        refuse(
            "wrong_number",
            zh=f"PyTorch 说：`{line}`。它对反向钩子的返回值取 `len`，要和输入（full backward pre-hook 是输出）的个数相等；不是张量的也占一项。（第 2 节）",
            en=f"PyTorch says: `{line}`. It takes the `len` of what a backward hook returns, which should be the number of inputs "
            "(of outputs, for a full backward pre-hook); what is no tensor takes a place too. (Section 2)",
        )
    if "changed the size" in line:
        refuse(
            "wrong_size",
            zh="你的钩子返回了一个张量，它就顶替了路过的梯度，而两者的形状不一样。看看钩子返回了什么。",
            en="Your hook returns a tensor, which replaces the gradient that passes, and its shape is another. See what the hook "
            "returns.",
        )
    if "BackwardHookFunction" in line:
        refuse(
            "full_backward_hook",
            zh="模型里有原地的层，前向就报错了：挂了反向钩子的模块，输入和输出都不许原地改写。（第 6 节）",
            en="With layers in place in the model forward raises: with a backward hook neither the input nor the output of a module "
            "may be edited in place. (Section 6)",
        )
    in_forward = any(frame.name == "forward" for frame in traceback.extract_tb(error.__traceback__))
    if in_forward and "RemovableHandle" in line:
        refuse(
            "replaced_output",
            zh="下一层收到的不是张量，是一个句柄。看看你的前向钩子返回了什么。",
            en="The next layer was given a handle, not a tensor. See what your forward hook returns.",
        )
    raise error


# ---- 22.A: reverse the gradient that leaves a module, and no other ----


def reverse(module, strength):
    def hook(module, grad_input, grad_output):
        return tuple(grad * -strength if grad is not None and grad.is_floating_point() else grad for grad in grad_input)

    return module.register_full_backward_hook(hook)


STRENGTH = 0.5
LOSS = torch.tensor([1.0, -2.0])  # what each column of the output counts in the loss


class _Blend(nn.Module):
    """Three inputs: two tensors and a number; and any tensors of booleans or integers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, -1.0]))

    def forward(self, left: Tensor, share: float, right: Tensor, *factors: Tensor) -> Tensor:
        return math.prod(factors, start=self.weight * (share * left + (1 - share) * right))


def examine_reverse(answer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks on a module whose inputs require no gradient
        try:
            _examine_one_input(answer)
            _examine_inputs(answer)
            _examine_inside(answer)
            _examine_another(answer)
            _examine_whole_numbers(answer)
        except (RuntimeError, TypeError, AttributeError) as error:
            _refuse_what_backward_hooks_raise(error)


def _step(layer, x):
    """One forward and backward: the output, the gradient of x, those of the parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    if not isinstance(output, Tensor):
        refuse(
            "replaced_output",
            zh=f"模块交出来的不是张量，是 `{type(output).__name__}`。看看你的前向钩子返回了什么。",
            en=f"What the module hands on is no tensor but a `{type(output).__name__}`. See what your forward hook returns.",
        )
    (output * LOSS).sum().backward()
    grads = [param.grad for param in layer.parameters()]
    return output, x.grad, [None if grad is None else grad.clone() for grad in grads]


def _examine_arrived(grad, param_grads):
    if any(param_grad is None for param_grad in param_grads):
        refuse(
            "frozen",
            zh="模块自己的参数不再收到梯度：反向之后，它们的 `.grad` 是 `None`。它们要照常训练。",
            en="The module's own parameters receive no gradient any more: after backward their `.grad` is `None`. They should train as "
            "before.",
        )
    if grad is None:
        refuse(
            "no_gradient",
            zh="反向之后，输入的 `.grad` 是 `None`：没有梯度传回去。梯度是在前向时断的，还是钩子返回的元组里只有 `None`？",
            en="After backward the `.grad` of the input is `None`: no gradient gets back. Was it cut off in forward, or does the tuple "
            "that your hook returns hold nothing but `None`?",
        )


def _examine_one_input(answer):
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    output, grad, param_grads = _step(layer, x)
    count = _hook_count(layer)
    handle = answer(layer, STRENGTH)
    if not callable(getattr(handle, "remove", None)):
        refuse(
            "no_handle",
            zh=f"应当返回能 `.remove()` 的句柄，得到的是 `{type(handle).__name__}`。",
            en=f"Return a handle with `.remove()`; found `{type(handle).__name__}`.",
        )
    got_output, got, got_params = _step(layer, x)
    if layer._is_full_backward_hook is False:
        refuse(
            "legacy_hook",
            zh="你用的是旧的 `register_backward_hook`：它的 `grad_input` 里，头一项是偏置的梯度。（第 4 节）",
            en="You used the legacy `register_backward_hook`: the first entry of its `grad_input` is the gradient of the bias. "
            "(Section 4)",
        )
    if not isinstance(got_output, Tensor) or not torch.equal(got_output, output):
        refuse(
            "changed_output",
            zh="前向的输出变了。只有反向的梯度该变。",
            en="The output of forward has changed. Only gradients in backward should.",
        )
    _examine_arrived(got, got_params)
    _examine_parameters(got_params, param_grads, reached=not torch.allclose(got, grad))
    _examine_left(got, grad)
    if not torch.allclose(_step(layer, x)[1], -STRENGTH * grad):
        refuse(
            "first_only",
            zh="第一次反向是对的，第二次又不反转了。",
            en="The first backward is right; in the second nothing is reversed any more.",
        )
    _examine_shortcut(layer, x, grad)
    _examine_neighbour(answer)
    handle.remove()
    if not torch.allclose(_step(layer, x)[1], grad):
        refuse(
            "still_there",
            zh="取下句柄之后重跑前向和反向，梯度还是被改了：这个句柄没有取下你的全部钩子。",
            en="After the handle was removed, a new forward and backward still change the gradient: the handle does not take off "
            "all your hooks.",
        )
    if _hook_count(layer) > count:
        refuse(
            "second_hook",
            zh="句柄已经 `.remove()`，模块上还留着你的另一个钩子。一个句柄要能取下全部。",
            en="After `.remove()` of the handle another hook of yours is left on the module. One handle has to take off all.",
        )


def _examine_another(answer):
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain = _step(layer, x)[1]
    handles = [answer(layer, STRENGTH), answer(nn.Linear(3, 2), 6 * STRENGTH)]
    got = _step(layer, x)[1]
    for handle in handles:
        handle.remove()
    if not torch.allclose(got, -STRENGTH * plain):
        refuse(
            "another_module",
            zh="`reverse` 又用在了另一个模块上，`strength` 不同；经过第一个模块的梯度就不对了。每个钩子只管自己的模块，用自己的数。",
            en="`reverse` was used on another module as well, with another `strength`, and now the gradient through the first one is "
            "wrong. Each hook belongs to its own module and has a number of its own.",
        )


def _examine_parameters(got, want, reached):
    if all(torch.allclose(one, other) for one, other in zip(got, want, strict=True)):
        return
    if not reached:
        refuse(
            "only_parameters",
            zh="变了的是模块参数的梯度，回到输入的那个倒没有变：正好反了。",
            en="What has changed are the gradients of the module's parameters, not the one that goes back to the input: the wrong "
            "way round.",
        )
    refuse(
        "parameters_changed",
        zh="模块自己的参数，梯度也变了：你改的是流进模块的那一头。",
        en="The gradients of the module's own parameters have changed too: you act at the end where gradients flow in.",
    )


def _examine_left(got, plain):
    if torch.allclose(got, plain):
        refuse(
            "unchanged",
            zh="回到输入的梯度和原来一样。钩子触发了吗？它返回新的梯度了吗？",
            en="The gradient that comes back to the input is as before. Has the hook fired, and did it return the new one?",
        )
    if not torch.allclose(got, -STRENGTH * plain):
        factor = (got / plain).mean().item()
        refuse(
            "wrong_values",
            zh=f"`strength` 是 0.5，回到输入的梯度平均成了原来的 `{factor:.2f}` 倍。",
            en=f"With `strength` 0.5 the gradient that comes back to the input is, on average, `{factor:.2f}` times the old one.",
        )


def _examine_shortcut(layer, x, plain):
    x = x.clone().requires_grad_()
    (layer(x) * LOSS).sum().backward(retain_graph=True)
    alone, x.grad = x.grad, None
    ((layer(x) * LOSS).sum() + 7 * x.sum()).backward()
    if not torch.allclose(x.grad - 7, alone, atol=1e-5):
        refuse(
            "other_paths",
            zh="输入 `x` 还走了一条不经过模块的路，那条路上的梯度也被你改了：钩子收到的是各条路之和。",
            en="The input `x` also goes another way, past the module, and that gradient was changed too: your hook is given the sum "
            "of all ways.",
        )


def _examine_neighbour(answer):
    """The gradient of a sum is one buffer for both terms, and nn.Identity hands it on as it is."""
    inside, beside = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    identity = nn.Identity()
    handle = answer(identity, STRENGTH)
    neighbour = beside * 1  # older than what is hooked, so that its backward comes later
    ((neighbour + identity(inside * 1)) * LOSS).sum().backward()
    handle.remove()
    if not torch.equal(beside.grad, LOSS):
        refuse(
            "in_place",
            zh="旁边另一个张量的梯度也变了：你原地改了 `grad_input` 里的张量，那块内存是共用的。",
            en="The gradient of another tensor changed too: a tensor in `grad_input` was edited in place, and that memory is shared.",
        )


def _examine_inputs(answer):
    blend, left, right = _Blend(), torch.ones(2, requires_grad=True), torch.ones(2)
    handle = answer(blend, STRENGTH)
    try:
        (blend(left, 0.25, right) * LOSS).sum().backward()
    except (TypeError, AttributeError) as error:
        if "None" not in str(error):
            raise
        refuse(
            "fails_on_none",
            zh="有 3 个输入：一个需要梯度的张量、一个数、一个不需要梯度的张量。那个数在 `grad_input` 里是 `None`，你的钩子在那里报错。",
            en="There are 3 inputs: a tensor that requires a gradient, a number, a tensor that requires none. The number is "
            "`None` in `grad_input`, and there your hook raises.",
        )
    first, left.grad = left.grad, None
    (blend(left, 0.25, right.requires_grad_()) * LOSS).sum().backward()
    handle.remove()
    want = [-STRENGTH * share * blend.weight.detach() * LOSS for share in (0.25, 0.75)]
    for place, got, wanted in ((1, first, want[0]), (1, left.grad, want[0]), (3, right.grad, want[1])):
        if got is None or not torch.allclose(got, wanted):
            refuse(
                "some_inputs",
                zh=f"只有一个输入时是对的；有 3 个输入（第 1、3 个是张量）时，第 {place} 个的梯度不对。",
                en=f"Right for one input; with 3 (the first and the third are tensors), the gradient of number {place} is wrong.",
            )


def _examine_whole_numbers(answer):
    """Beside an input that requires a gradient, a mask or an index comes as zeros of its own dtype."""
    for factor in (torch.tensor([True, False]), torch.tensor([2, 5])):
        blend, left = _Blend(), torch.ones(2, requires_grad=True)
        handle = answer(blend, STRENGTH)
        try:
            (blend(left, 0.25, torch.ones(2), factor) * LOSS).sum().backward()
        except RuntimeError as error:
            if "changed the type" not in str(error):
                raise
            refuse(
                "changed_dtype",
                zh=f"有一个输入是 `{factor.dtype}` 的张量（掩码、下标），旁边的输入需要梯度：它在 `grad_input` 里不是 `None`，"
                "是同一类型的 0。乘以 `-strength` 就成了浮点数，PyTorch 不收。这样的原样返回。",
                en=f"One input is a tensor of `{factor.dtype}` (a mask, an index), beside one that requires a gradient: in "
                "`grad_input` it is not `None` but zeros of the same dtype. Times `-strength` they are floating-point numbers, "
                "which PyTorch does not take. Return such a one as it is.",
            )
        handle.remove()
        want = -STRENGTH * 0.25 * blend.weight.detach() * LOSS * factor
        if left.grad is None or not torch.allclose(left.grad, want):
            refuse(
                "beside_whole_numbers",
                zh=f"另一个输入是 `{factor.dtype}` 的张量（掩码、下标）时，第 1 个输入的梯度不对。",
                en=f"With another input of `{factor.dtype}` (a mask, an index), the gradient of the first input is wrong.",
            )


def _examine_inside(answer):
    block, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    _, grad, param_grads = _step(block, x)
    handle = answer(block, STRENGTH)
    _, got, got_params = _step(block, x)
    handle.remove()
    if not torch.allclose(got, -STRENGTH * grad) or not all(map(torch.allclose, got_params, param_grads)):
        refuse(
            "everywhere",
            zh="`module` 里面还有别的模块时，经过它们的梯度也被改了。钩子只该管 `module` 一个。",
            en="Where `module` has others inside, gradients that pass through those were changed as well. The hook belongs to "
            "`module` alone.",
        )


def by_pre_hook(module, strength):
    return module.register_full_backward_pre_hook(
        lambda module, grad_output: tuple(grad * -strength for grad in grad_output)
    )


def by_input_tensor(module, strength):
    def hang(module, args):
        for arg in args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                arg.register_hook(lambda grad: grad * -strength)

    return module.register_forward_pre_hook(hang)


def by_parameters(module, strength):
    for param in module.parameters():
        param.register_hook(lambda grad: grad * -strength)
    return module.register_forward_hook(lambda *args: None)


def by_legacy(module, strength):
    return module.register_backward_hook(
        lambda module, grad_input, grad_output: tuple(grad * -strength for grad in grad_input)
    )


def by_grad_output(module, strength):
    return module.register_full_backward_hook(
        lambda module, grad_input, grad_output: tuple(grad * -strength for grad in grad_output)
    )


def reverse_bare(module, strength):
    return module.register_full_backward_hook(lambda module, grad_input, _: grad_input[0] * -strength)


def reverse_nothing(module, strength):
    def hook(module, grad_input, grad_output):
        tuple(grad * -strength for grad in grad_input)

    return module.register_full_backward_hook(hook)


def reverse_in_place(module, strength):
    def hook(module, grad_input, grad_output):
        for grad in grad_input:
            if grad is not None:
                grad.mul_(-strength)

    return module.register_full_backward_hook(hook)


def reverse_fails_on_none(module, strength):
    return module.register_full_backward_hook(
        lambda module, grad_input, grad_output: tuple(grad * -strength for grad in grad_input)
    )


def reverse_whole_numbers(module, strength):
    return module.register_full_backward_hook(
        lambda module, grad_input, _: tuple(None if grad is None else grad * -strength for grad in grad_input)
    )


def reverse_only_floats(module, strength):
    def hook(module, grad_input, grad_output):
        tensors = [grad for grad in grad_input if grad is not None]
        if all(grad.is_floating_point() for grad in tensors):
            return tuple(None if grad is None else grad * -strength for grad in grad_input)

    return module.register_full_backward_hook(hook)


def reverse_first(module, strength):
    return module.register_full_backward_hook(
        lambda module, grad_input, grad_output: (grad_input[0] * -strength, *grad_input[1:])
    )


def reverse_sign(module, strength):
    return module.register_full_backward_hook(
        lambda module, grad_input, _: tuple(None if grad is None else grad * strength for grad in grad_input)
    )


def reverse_no_handle(module, strength):
    reverse(module, strength)


def reverse_once(module, strength):
    def hook(module, grad_input, grad_output):
        handle.remove()
        return tuple(None if grad is None else grad * -strength for grad in grad_input)

    handle = module.register_full_backward_hook(hook)
    return handle


def reverse_deaf(module, strength):
    reverse(module, strength)
    return nn.Linear(1, 1).register_forward_hook(lambda *args: None)


def reverse_with_two(module, strength):
    module.register_forward_hook(lambda *args: None)
    return reverse(module, strength)


def reverse_frozen(module, strength):
    module.requires_grad_(False)
    return reverse(module, strength)


def reverse_by_global(module, strength):
    _numbers.update(strength=strength)
    return module.register_full_backward_hook(
        lambda module, grad_input, _: tuple(
            None if grad is None else grad * -_numbers["strength"] for grad in grad_input
        )
    )


_numbers: dict[str, float] = {}  # of a wrong answer that keeps it in one place for all modules


def reverse_everywhere(module, strength):
    return nn.modules.module.register_module_full_backward_hook(
        lambda module, grad_input, _: tuple(None if grad is None else grad * -strength for grad in grad_input)
    )


def reverse_output(module, strength):
    return module.register_forward_hook(lambda module, args, output: output * -strength)


REVERSE = Exercise(
    "22.A",
    examine_reverse,
    reverse,
    {
        "parameters_changed": by_pre_hook,
        "only_parameters": by_parameters,
        "legacy_hook": by_legacy,
        "other_paths": by_input_tensor,
        "wrong_number": reverse_bare,
        "wrong_size": by_grad_output,
        "unchanged": reverse_nothing,
        "in_place": reverse_in_place,
        "fails_on_none": reverse_fails_on_none,
        "changed_dtype": reverse_whole_numbers,
        "beside_whole_numbers": reverse_only_floats,
        "some_inputs": reverse_first,
        "no_handle": reverse_no_handle,
        "first_only": reverse_once,
        "wrong_values": reverse_sign,
        "still_there": reverse_deaf,
        "changed_output": reverse_output,
        "everywhere": reverse_everywhere,
        "second_hook": reverse_with_two,
        "frozen": reverse_frozen,
        "replaced_output": lambda module, strength: module.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda grad: grad * -strength)
        ),
        "no_gradient": lambda module, strength: module.register_full_backward_hook(
            lambda module, grad_input, grad_output: (None,) * len(grad_input)
        ),
        "another_module": reverse_by_global,
    },
    zh="回到输入的梯度反了，模块自己的参数照常训练，别的路也没有受牵连。",
    en="The gradient towards the inputs is reversed, the module's own parameters train as before, and no other way is affected.",
)

# ---- 22.B: how large is the gradient at the output of each ReLU, in place or not ----


def gradient_norms(model, loss_fn):
    norms, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):

            def hang(module, args, output, name=name):
                if output.requires_grad:
                    output.register_hook(lambda grad: norms.update({name: grad.norm().item()}))

            handles.append(module.register_forward_hook(hang))
    try:
        loss_fn(model).backward()
    finally:
        for handle in handles:
            handle.remove()
    return norms


class _Pictures(nn.Module):
    """A small convolution net: one ReLU that is not in place, one in place two levels down, one in place at the end.

    The one that runs last is defined first.
    """

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.stem, self.relu = nn.Conv2d(1, 4, 3), nn.ReLU()
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)), nn.Flatten())
        self.neck, self.head = nn.Linear(64, 8), nn.Linear(8, 3)
        self.neck.bias.requires_grad_(False)  # and so it must stay

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.neck(self.body(self.relu(self.stem(x))))))


def examine_gradient_norms(answer):
    torch.manual_seed(22)  # a net in which no ReLU is dead
    model, batch = _Pictures(), torch.randn(2, 1, 8, 8)
    runs, backwards = [], []

    def loss_fn(model):
        runs.append("run")
        loss = model(batch).square().sum()
        loss.register_hook(lambda grad: backwards.append("run"))
        return loss

    twin = copy.deepcopy(model)
    want, settings, attributes = gradient_norms(twin, loss_fn), _settings(model), _attributes(model)
    runs.clear()
    backwards.clear()
    others = [layer.register_forward_hook(lambda *args: None) for layer in (model.head, model.relu)]
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    try:
        got = answer(model, loss_fn)
    except (RuntimeError, TypeError, AttributeError) as error:
        _refuse_what_backward_hooks_raise(error)
    count = len(runs)
    _examine_left_alone(model, settings, attributes, others)
    if count == 1 and len(backwards) > 1:
        refuse(
            "backward_often",
            zh=f"反向跑了 {len(backwards)} 次，一次就够：每个 ReLU 的梯度都在同一次反向里经过。",
            en=f"Backward ran {len(backwards)} times; once is enough: the gradients of all ReLUs pass in the same one.",
        )
    if count == 1:
        _examine_gradients(model, twin)
    _examine_norms(got, want, model, loss_fn)
    if count > 1:
        refuse(
            "ran_twice",
            zh=f"`loss_fn` 被调用了 {count} 次，一次就够：真的模型跑一次很贵。",
            en=f"`loss_fn` was called {count} times; once is enough: with a real model a run is dear.",
        )
    _examine_next_model(answer)
    for error in (_BrokenForward, _BrokenData):
        _examine_failing(answer, error)


def _examine_next_model(answer):
    """The first layers are frozen."""
    layers = {
        "base": nn.Linear(3, 3).requires_grad_(False),
        "still": nn.ReLU(),
        "lens": nn.Linear(3, 2),
        "gate": nn.ReLU(),
    }
    model, x = nn.Sequential(OrderedDict(layers)), torch.ones(1, 3)
    try:
        found = list(answer(model, lambda model: model(x).sum()))
        refuse_from_before(found, model, dict(_Pictures().named_modules()))
    except (RuntimeError, TypeError, AttributeError) as error:
        found = said(error)
    if found != ["gate"]:
        refuse(
            "frozen_first",
            zh=f"换一个模型：`still` 前面的层全都冻结了，它的输出不需要梯度，字典里应当只有 `['gate']`，得到的是 `{found}`。",
            en=f"In another model all layers before `still` are frozen, so its output requires no gradient, and the dict should have "
            f"`['gate']` only; found `{found}`.",
        )


def _examine_gradients(model, twin):
    """Each `.grad` was 1, and `twin` has what one backward adds."""
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is None:
            continue
        if param.grad is None or not param.grad.any() or torch.allclose(param.grad, other.grad, atol=1e-6):
            refuse(
                "cleared_grad",
                zh="参数原有的 `.grad` 被清掉了：那可能是前几个批次累积下来的。这次反向只可以往上加。",
                en="What the parameters had in `.grad` was cleared: it may be the sum over earlier batches. This backward may only add to "
                "it.",
            )
        if not any(torch.allclose(param.grad, 1 + added, atol=1e-6) for added in (0 * other.grad, other.grad)):
            refuse(
                "changed_gradient",
                zh="你的钩子改动了路过的梯度：前面的参数收到的和原来不同。看看它返回了什么。",
                en="Your hook has changed the gradient that passes: parameters before it receive another one. See what it returns.",
            )


def _examine_norms(got, want, model, loss_fn):
    if not isinstance(got, dict):
        refuse(
            "not_a_dict",
            zh=f"应当返回字典，得到的是 `{type(got).__name__}`。",
            en=f"Return a dict; found `{type(got).__name__}`.",
        )
    if not got:
        refuse(
            "nothing_arrived",
            zh="字典是空的：没有钩子触发过。反向跑了吗？前向开始的时候，钩子还挂着吗？",
            en="The dict is empty: no hook has fired. Did backward run? Were the hooks there when forward began?",
        )
    refuse_from_before(got, model, ("gate",))
    names = [name for name, _ in model.named_modules()]
    in_order = [name for name in names if name in want]
    for last, zh, en in (
        (names[-1], "`named_modules()` 的最后一个名字", "the last name of `named_modules()`"),
        (in_order[-1], "最后一个 ReLU", "the last ReLU"),
    ):
        if list(got) == [last]:
            refuse(
                "last_name",
                zh=f"字典里只有 `{last}` 一项，它是{zh}：你的钩子触发时才去读循环变量，那时循环早就结束了。",
                en=f"The only entry is `{last}`, {en}: your hooks read the loop variable when they fire, and by then the loop is over.",
            )
    if strangers := [name for name in got if name not in want]:
        refuse(
            "other_layers",
            zh=f"`{strangers[0]}` 不是哪个 `nn.ReLU` 在 `named_modules()` 里的名字。",
            en=f"`{strangers[0]}` is not the name of an `nn.ReLU` in `named_modules()`.",
        )
    if missing := [name for name in in_order if name not in got]:
        refuse(
            "missing_layers",
            zh=f"少了 `{missing[0]}`：模型里一共有 {len(want)} 个 ReLU，有的在子模块的子模块里，有的是原地的。",
            en=f"`{missing[0]}` is missing: the model has {len(want)} of them, some inside a module inside a module, some in place.",
        )
    for name, value in got.items():
        if not isinstance(value, numbers.Real):
            refuse(
                "not_numbers",
                zh=f"字典里的值应当是浮点数，`{name}` 的却是 `{type(value).__name__}`。",
                en=f"The values of the dict should be floats; that of `{name}` is `{type(value).__name__}`.",
            )
    _examine_values(got, want, model, loss_fn)


def _close(got, want):
    return all(abs(got[name] - value) <= 1e-4 * abs(value) + 1e-7 for name, value in want.items())


def _examine_values(got, want, model, loss_fn):
    if _close(got, want):
        return
    if _close(dict(enumerate(sorted(got.values()))), dict(enumerate(sorted(want.values())))):
        refuse(
            "other_order",
            zh="数都对，名字配错了：各层运行的次序，不一定是定义的次序。",
            en="The numbers are right and stand at the wrong names: layers need not run in the order in which they are defined.",
        )
    at_inputs, outputs = _other_norms(copy.deepcopy(model), loss_fn)
    if _close(got, at_inputs):
        refuse(
            "other_end",
            zh="这些是 ReLU 输入的梯度的范数：已经过了 ReLU，有的项变成了 0。要的是流到它输出的梯度。",
            en="These are the norms at the inputs of the ReLUs: behind the ReLU, where some entries are 0 already. The gradient "
            "that arrives at its output is wanted.",
        )
    if _close(got, outputs):
        refuse(
            "norms_of_outputs",
            zh="这些是 ReLU 的输出自己的范数，不是梯度的。",
            en="These are the norms of what the ReLUs put out, not of the gradients.",
        )
    name = next(name for name in want if not _close(got, {name: want[name]}))
    refuse(
        "wrong_values",
        zh=f"名字都对，数值不对：`{name}` 应当约为 `{want[name]:.4f}`，得到的是 `{got[name]:.4f}`。范数是平方和再开方（`Tensor.norm`）。",
        en=f"The names are right, the values are not: `{name}` should be about `{want[name]:.4f}`; found `{got[name]:.4f}`. The norm "
        "is the root of the sum of squares (`Tensor.norm`).",
    )


def _other_norms(model, loss_fn):
    """The norms of the gradients at the inputs of the ReLUs, and of their outputs."""
    at_inputs, outputs = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):

            def before(module, args, name=name):
                args[0].register_hook(lambda grad: at_inputs.update({name: grad.norm().item()}))

            def after(module, args, output, name=name):
                outputs[name] = output.norm().item()

            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
    loss_fn(model).backward()
    return at_inputs, outputs


class _BrokenForward(RuntimeError):
    pass


class _BrokenData(LookupError):
    pass


def _examine_failing(answer, error):
    model = _Pictures()
    settings, passed_on = _settings(model), False

    def fails(model):
        model.stem(torch.zeros(1, 1, 8, 8))
        raise error("this loss_fn fails on purpose")

    try:
        answer(model, fails)
    except error:
        passed_on = True
    _examine_left_after_error(model, settings)
    if not passed_on:
        _refuse_swallowed()


def _norms(
    kinds=nn.ReLU,
    measure=lambda grad: grad.norm().item(),
    modules="named_modules",
    backward=True,
    clean_up=_then_remove,
    guarded=True,
):
    """A family of answers that differ in one thing each."""

    def answer(model, loss_fn):
        norms, handles = {}, []
        for name, module in getattr(model, modules)():
            if isinstance(module, kinds):

                def hang(module, args, output, name=name):
                    if output.requires_grad or not guarded:
                        output.register_hook(lambda grad: norms.update({name: measure(grad)}))

                handles.append(module.register_forward_hook(hang))
        clean_up(handles, lambda: loss_fn(model).backward() if backward else loss_fn(model))
        return norms

    return answer


def _norms_by(register, look):
    """Answers with a module hook that calls `look(name, *what the hook was given)` and returns what it returns."""

    def answer(model, loss_fn):
        norms = {}
        handles = [
            getattr(module, register)(lambda *given, name=name: look(norms, name, *given))
            for name, module in _relus(model)
        ]
        _then_remove(handles, lambda: loss_fn(model).backward())
        return norms

    return answer


def norms_last_name(model, loss_fn):
    norms, handles = {}, []

    def hang(module, args, output):
        output.register_hook(lambda grad: norms.update({name: grad.norm().item()}))

    for name, module in model.named_modules():  # noqa: B007
        if isinstance(module, nn.ReLU):
            handles.append(module.register_forward_hook(hang))
    _then_remove(handles, lambda: loss_fn(model).backward())
    return norms


def norms_in_order(model, loss_fn):
    """Takes the order in which the layers run for that in which they are defined."""
    norms, handles = [], []
    for _, module in _relus(model):

        def hang(module, args, output):
            output.register_hook(lambda grad: norms.append(grad.norm().item()))

        handles.append(module.register_forward_hook(hang))
    _then_remove(handles, lambda: loss_fn(model).backward())
    return dict(zip([name for name, _ in _relus(model)], reversed(norms), strict=True))


def norms_cleared(model, loss_fn):
    norms = _norms(clean_up=_leave)(model, loss_fn)
    for module in model.modules():
        module._forward_hooks.clear()
    return norms


def _look_backward(norms, name, module, grad_input, grad_output):
    norms[name] = grad_output[0].norm().item()


def _look_forward(norms, name, module, args, output):
    norms[name] = output.norm().item()


def _look_at_input(norms, name, module, args):
    args[0].register_hook(lambda grad: norms.update({name: grad.norm().item()}))


def _return_handle(norms, name, module, args, output):
    return output.register_hook(lambda grad: norms.update({name: grad.norm().item()}))


def _change(norms, name, module, args, output):
    def measure(grad):
        norms[name] = grad.norm().item()
        return grad / grad.norm()

    output.register_hook(measure)


def norms_out_of_place(model, loss_fn):
    for _, module in _relus(model):
        module.inplace = False
    return _norms_by("register_full_backward_hook", _look_backward)(model, loss_fn)


def norms_one_backward_each(model, loss_fn):
    outputs, handles = {}, []
    for name, module in _relus(model):
        keep = lambda module, args, output, name=name: outputs.update({name: output})  # noqa: E731
        handles.append(module.register_forward_hook(keep))
    loss = _then_remove(handles, lambda: loss_fn(model))
    return {
        name: torch.autograd.grad(loss, output, retain_graph=True)[0].norm().item() for name, output in outputs.items()
    }


def norms_on_module(model, loss_fn):
    def keep(module, args, output):
        output.retain_grad()
        module.kept = output

    handles = [module.register_forward_hook(keep) for _, module in _relus(model)]
    _then_remove(handles, lambda: loss_fn(model).backward())
    return {name: module.kept.grad.norm().item() for name, module in _relus(model)}


def norms_by_default(model, loss_fn, norms={}):  # noqa: B006
    norms.update(gradient_norms(model, loss_fn))
    return norms


def norms_in_place_lost(model, loss_fn):
    """Takes the layers out of place, and forgets them when forward raises."""
    flags = [(module, module.inplace) for _, module in _relus(model)]
    norms = norms_out_of_place(model, loss_fn)
    for module, flag in flags:
        module.inplace = flag
    return norms


def norms_swallowed(model, loss_fn):
    try:
        return gradient_norms(model, loss_fn)
    except Exception:
        return {}


def norms_from_zero(model, loss_fn):
    model.zero_grad()
    return gradient_norms(model, loss_fn)


def norms_run_twice(model, loss_fn):
    loss_fn(model)
    return gradient_norms(model, loss_fn)


GRADIENT_NORMS = Exercise(
    "22.B",
    examine_gradient_norms,
    gradient_norms,
    {
        "full_backward_hook": _norms_by("register_full_backward_hook", _look_backward),
        "replaced_output": _norms_by("register_forward_hook", _return_handle),
        "other_end": _norms_by("register_forward_pre_hook", _look_at_input),
        "norms_of_outputs": _norms_by("register_forward_hook", _look_forward),
        "last_name": norms_last_name,
        "left_behind": _norms(clean_up=_leave),
        "left_after_error": _norms(clean_up=_remove_if_it_works),
        "removed_others": norms_cleared,
        "missing_layers": _norms(modules="named_children"),
        "other_layers": _norms(kinds=(nn.ReLU, nn.Linear, nn.Conv2d)),
        "not_numbers": _norms(measure=lambda grad: grad.norm()),
        "other_order": norms_in_order,
        "wrong_values": _norms(measure=lambda grad: grad.abs().mean().item()),
        "nothing_arrived": _norms(backward=False),
        "changed_model": norms_out_of_place,
        "changed_gradient": _norms_by("register_forward_hook", _change),
        "cleared_grad": norms_from_zero,
        "frozen_first": _norms(guarded=False),
        "ran_twice": norms_run_twice,
        "backward_often": norms_one_backward_each,
        "attribute_left": norms_on_module,
        "from_before": norms_by_default,
        "changed_after_error": norms_in_place_lost,
        "swallowed": norms_swallowed,
        "legacy_hook": _norms_by("register_backward_hook", _look_backward),
        "not_a_dict": lambda model, loss_fn: list(gradient_norms(model, loss_fn).values()),
    },
    zh="原地的、藏得深的都量到了，模型上什么也没留下。",
    en="In place or nested deep, each was measured, and nothing is left on the model.",
)

# ---- 22.C: guided backpropagation ----


def guided_gradient(model, x):
    def hook(module, grad_input, grad_output):
        return (grad_input[0].clamp(min=0),)

    relus = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    handles = [relu.register_full_backward_hook(hook) for relu in relus]
    try:
        image = x.detach().requires_grad_()
        return torch.autograd.grad(model(image).sum(), image)[0]
    finally:
        for handle in handles:
            handle.remove()


class _Rule(torch.autograd.Function):
    """ReLU with a backward of its own: no hook, so that the reference owes nothing to the answer."""

    @staticmethod
    def forward(ctx, x, masked):
        ctx.save_for_backward(x)
        ctx.masked = masked
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.clamp(min=0) * (x > 0 if ctx.masked else 1), None


class _Guided(nn.Module):
    def __init__(self, masked=True):
        super().__init__()
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        return _Rule.apply(x, self.masked)


def _seeing(outer=nn.ReLU, inner=nn.ReLU):
    """The same weights each time: a net with one ReLU at the top level and two nested ones."""
    state = torch.get_rng_state()
    torch.manual_seed(5)
    net = nn.Sequential()
    net.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(inner()))
    net.conv, net.act, net.flat = nn.Conv2d(4, 4, 3), outer(), nn.Flatten()
    net.neck, net.head = nn.Sequential(nn.Linear(64, 6), inner()), nn.Linear(6, 2)
    net.conv.bias.requires_grad_(False)  # and so it must stay
    torch.set_rng_state(state)
    return net


class _Residual(nn.Module):
    """The same weights each time: a ReLU, and a way past it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        self.stem, self.activation, self.head = nn.Linear(3, 4), activation, nn.Linear(4, 4)
        torch.set_rng_state(state)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        return hidden + self.head(self.activation(hidden))


class _Twice(nn.Module):
    """The same weights each time: one ReLU, called twice."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        self.stem, self.activation, self.body = nn.Linear(3, 6), activation, nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        torch.set_rng_state(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.body(self.activation(self.stem(x)))))


def _plain_gradient(net, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(net(x).sum(), x)[0]


def examine_guided_gradient(answer):
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    model, before = _seeing(), x.clone()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    settings, attributes = _settings(model), _attributes(model)
    others = [model.head.register_forward_hook(lambda module, args, output: None)]
    try:
        got = answer(model, x)
    except (RuntimeError, TypeError, AttributeError) as error:
        _refuse_what_backward_hooks_raise(error)
    _examine_input(x, before)
    if any(param.grad is None or not (param.grad == 1).all() for param in model.parameters()):
        refuse(
            "filled_grad",
            zh="参数的 `.grad` 变了。只求 `x` 的梯度，参数的不该动。",
            en="The `.grad` of the parameters has changed. Only the gradient of `x` is wanted; leave theirs alone.",
        )
    _examine_left_alone(model, settings, attributes, others)
    _examine_guided(got, x)
    _examine_residual(answer)
    _examine_used_twice(answer)
    _examine_guided_failing(answer)


def _examine_input(x, before):
    if not torch.equal(x, before):
        refuse(
            "edited_input",
            zh="传进来的 `x` 的数值变了：不要原地改它。",
            en="The values of the `x` that was passed in have changed: do not edit it in place.",
        )
    if x.requires_grad or x.grad is not None:
        refuse(
            "changed_input",
            zh="传进来的 `x` 变了：它原本不需要梯度，也没有 `.grad`。",
            en="The `x` that was passed in has changed: it required no gradient and had no `.grad`.",
        )


def _examine_used_twice(answer):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(7))
    given = x.clone().requires_grad_()
    model = _Twice(nn.ReLU())
    others = [model.activation.register_full_backward_hook(lambda *args: None)]
    got = answer(model, given)
    if not isinstance(got, Tensor):
        refuse(
            "no_gradient",
            zh=f"这一次的 `x` 原本就需要梯度，你的函数返回的却是 `{type(got).__name__}`。`clone()` 出来的不是叶子，`.grad` 里什么也没有。",
            en=f"This time `x` required a gradient to begin with, and your function returned `{type(got).__name__}`. What `clone()` makes of "
            "it is no leaf, and has nothing in its `.grad`.",
        )
    if not torch.allclose(got, _plain_gradient(_Twice(_Guided()), x), atol=1e-6):
        refuse(
            "used_twice",
            zh="模型里有一个 ReLU 调用了两次，结果就不对了：两次的输入不同，一次调用里记下的东西不能给另一次用。",
            en="In a model that calls one ReLU twice the result is wrong: the two inputs differ, and what was noted in one call does not "
            "serve the other.",
        )
    _examine_others(others)
    if not given.requires_grad or given.grad is not None:
        refuse(
            "switched_input",
            zh="这一次的 `x` 原本就需要梯度，没有 `.grad`；你的函数返回以后不是这样了。不要改 `x`：用一个自己的张量。",
            en="This time `x` required a gradient to begin with, and had no `.grad`; after your function it is otherwise. Do not alter "
            "`x`: use a tensor of your own.",
        )


def _examine_residual(answer):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(7))
    got = answer(_Residual(nn.ReLU()), x.clone())
    if not torch.allclose(got, _plain_gradient(_Residual(_Guided()), x), atol=1e-6):
        refuse(
            "other_paths",
            zh="ReLU 的输入还走了一条不经过 ReLU 的路，那条路上的负梯度也被你去掉了。只该改经过 ReLU 的那一份（第 9 节）。",
            en="The input of a ReLU also goes another way, past the ReLU, and negative gradients were dropped there too. Only the "
            "share that came through the ReLU should change (section 9).",
        )


def _examine_guided(got, x):
    want = _plain_gradient(_seeing(_Guided, _Guided), x)
    plain = _plain_gradient(_seeing(), x)
    if isinstance(got, Tensor) and got.shape == want.shape and not torch.allclose(got, want, atol=1e-6):
        if torch.allclose(got, plain, atol=1e-6):
            refuse(
                "plain_gradient",
                zh="这就是普通的梯度，没有一个 ReLU 改过它。钩子触发了吗？它返回新的梯度了吗？",
                en="This is the plain gradient; no ReLU has changed it. Have your hooks fired, and do they return the new gradient?",
            )
        if torch.allclose(got, plain.clamp(min=0), atol=1e-6):
            refuse(
                "only_at_the_end",
                zh="你是先求出普通的梯度，最后才去掉负数。应当在每个 ReLU 那里去掉，再往前传。",
                en="You took the plain gradient and dropped negative entries at the end. They should go at each ReLU, before the "
                "gradient travels on.",
            )
        if torch.allclose(got, want.clamp(min=0), atol=1e-6):
            refuse(
                "once_too_often",
                zh="每个 ReLU 都对了，可是返回的梯度里一个负数也没有：在 `x` 和第一个 ReLU 之间，或者最后，又去掉了一遍。ReLU 之外不该动。",
                en="Each ReLU is right, but no entry of what you return is negative: they were dropped once more, between `x` and the "
                "first ReLU or at the end. Nothing but ReLU should change.",
            )
        if torch.allclose(got, _plain_gradient(_seeing(_Guided, nn.ReLU), x), atol=1e-6):
            refuse(
                "top_level_only",
                zh="藏得更深的 ReLU 还是老样子：子模块里面还有子模块。",
                en="A ReLU nested deeper still does as before: modules inside a module may have modules inside.",
            )
        no_mask = _seeing(lambda: _Guided(masked=False), lambda: _Guided(masked=False))
        if torch.allclose(got, _plain_gradient(no_mask, x), atol=1e-6):
            refuse(
                "no_mask",
                zh="负的梯度去掉了，可是前向时被 ReLU 挡住的位置，梯度也放了过去。换掉的是哪一头的梯度？",
                en="Negative gradients are dropped, but where ReLU had blocked the value in forward the gradient now passes. Which "
                "end's gradient do you start from?",
            )
    expect_like(got, want, "返回值", "what is returned")


def _examine_guided_failing(answer):
    model, x, passed_on = _seeing(), torch.randn(1, 1, 5, 5), False  # too small: a linear layer refuses it
    settings, before = _settings(model), x.clone()
    try:
        answer(model, x)
    except RuntimeError:
        passed_on = True
    _examine_left_after_error(model, settings)
    _examine_input(x, before)
    if not passed_on:
        _refuse_swallowed()


def _clamp(module, grad_input, grad_output):
    return (grad_input[0].clamp(min=0),)


def _hung(model, hook=_clamp):
    return [relu.register_full_backward_hook(hook) for _, relu in _relus(model)]


def _guided(hook=_clamp, modules="modules", finish=lambda grad: grad, clean_up=_then_remove):
    """A family of answers that differ in one thing each."""

    def answer(model, x):
        image = x.detach().requires_grad_()
        relus = [module for module in getattr(model, modules)() if isinstance(module, nn.ReLU)]
        handles = [relu.register_full_backward_hook(hook) for relu in relus]
        return clean_up(handles, lambda: finish(torch.autograd.grad(model(image).sum(), image)[0]))

    return answer


def guided_inputs(model, x):
    def hang(module, args):
        args[0].register_hook(lambda grad: grad.clamp(min=0))

    handles = [relu.register_forward_pre_hook(hang) for _, relu in _relus(model)]
    image = x.detach().requires_grad_()
    return _then_remove(handles, lambda: torch.autograd.grad(model(image).sum(), image)[0])


def guided_on_x(model, x):
    x.requires_grad_()
    return _then_remove(_hung(model), lambda: torch.autograd.grad(model(x).sum(), x)[0])


def guided_on_a_clone(model, x):
    model, image = copy.deepcopy(model), x.clone()
    image.requires_grad_()  # no leaf, where `x` requires a gradient

    def run():
        model(image).sum().backward()
        return image.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _then_remove(_hung(model), run)


def guided_switching_x(model, x):
    try:
        return guided_on_x(model, x)
    finally:
        x.requires_grad_(False)


def guided_by_mask(model, x):
    positive, handles = {}, []
    for _, relu in _relus(model):
        handles += [
            relu.register_forward_hook(lambda module, args, output: positive.update({module: output > 0})),
            relu.register_full_backward_hook(
                lambda module, grad_input, grad_output: (grad_output[0].clamp(min=0) * positive[module],)
            ),
        ]
    image = x.detach().requires_grad_()
    return _then_remove(handles, lambda: torch.autograd.grad(model(image).sum(), image)[0])


def guided_on_module(model, x):
    for module in model.modules():
        module.seen = True
    return guided_gradient(model, x)


def guided_in_eval(model, x):
    model.eval()
    grad = guided_gradient(model, x)
    model.train()
    return grad


def guided_swallowed(model, x):
    try:
        return guided_gradient(model, x)
    except RuntimeError:
        return torch.zeros_like(x)


def guided_by_backward(model, x):
    image = x.detach().clone().requires_grad_()
    _then_remove(_hung(model), lambda: model(image).sum().backward())
    return image.grad


def guided_frozen(model, x):
    model.requires_grad_(False)
    return guided_gradient(model, x)


def guided_cleared(model, x):
    grad = guided_gradient(model, x)
    for module in model.modules():
        module._forward_hooks.clear()
    return grad


def guided_by_legacy(model, x):
    image = x.detach().requires_grad_()
    handles = [relu.register_backward_hook(_clamp) for _, relu in _relus(model)]
    return _then_remove(handles, lambda: torch.autograd.grad(model(image).sum(), image)[0])


def _print_clamped(module, grad_input, grad_output):
    grad_input[0].clamp(min=0)


GUIDED_GRADIENT = Exercise(
    "22.C",
    examine_guided_gradient,
    guided_gradient,
    {
        "plain_gradient": _guided(hook=_print_clamped),
        "only_at_the_end": _guided(hook=_print_clamped, finish=lambda grad: grad.clamp(min=0)),
        "once_too_often": _guided(finish=lambda grad: grad.clamp(min=0)),
        "top_level_only": _guided(modules="children"),
        "no_mask": _guided(hook=lambda module, grad_input, grad_output: (grad_output[0].clamp(min=0),)),
        "wrong_number": _guided(hook=lambda module, grad_input, grad_output: grad_input[0].clamp(min=0)),
        "wrong_values": _guided(hook=lambda module, grad_input, grad_output: (grad_input[0].clamp(max=0),)),
        "wrong_type": _guided(finish=lambda grad: (grad,)),
        "changed_input": guided_on_x,
        "edited_input": lambda model, x: guided_gradient(model, x.clamp_(min=0)),
        "no_gradient": guided_on_a_clone,
        "switched_input": guided_switching_x,
        "used_twice": guided_by_mask,
        "attribute_left": guided_on_module,
        "changed_after_error": guided_in_eval,
        "swallowed": guided_swallowed,
        "filled_grad": guided_by_backward,
        "changed_model": guided_frozen,
        "removed_others": guided_cleared,
        "other_paths": guided_inputs,
        "legacy_hook": guided_by_legacy,
        "left_behind": _guided(clean_up=_leave),
        "left_after_error": _guided(clean_up=_remove_if_it_works),
    },
    zh="每个 ReLU 都换了反向的规则，又都换了回来。",
    en="Each ReLU had another rule for backward, and has its own again.",
)

CHECKS = [
    Prediction(
        "22.1",
        zh="`grad_input` 对应的是 `forward` 的位置参数，`fc2` 只有一个。权重和偏置不是输入，它们的梯度在 `.grad` 里。",
        en="`grad_input` goes with the positional arguments of `forward`, and `fc2` has one. Weight and bias are no inputs; their "
        "gradients are in `.grad`.",
    ),
    Prediction(
        "22.2",
        zh="`weight.grad` 由 `grad_output` 和输入算出，与 `grad_input` 无关；返回值只在离开这一层之后才起作用。",
        en="`weight.grad` is computed from `grad_output` and the input, not from `grad_input`: what the hook returns matters only "
        "once the gradient has left this layer.",
    ),
    Prediction(
        "22.3",
        zh="钩子没了，模块却记着自己用过旧的那种，从此拒绝新的。换一个新模块，再用 `load_state_dict` 搬权重。",
        en="The hook is gone, but the module remembers that it used the legacy kind and refuses the other from then on. Make a new "
        "module, and bring the weights over with `load_state_dict`.",
    ),
    Prediction(
        "22.4",
        zh="钩子只包装最外层元组里的张量，也就是 `output`；`h` 在里面一层，从它来的梯度绕过了输出处的 Node，钩子就不触发。两个都用时也不对：`grad_output` 里只有 `output` 的那一份。",
        en="The hook wraps tensors of the outermost tuple only, that is `output`; `h` is one level down, its gradient goes past the "
        "Node at the output, and the hook stays silent. With both in use it tells half: `grad_output` has the share of `output` only.",
    ),
    Prediction(
        "22.5",
        zh="`grad_input` 只是经过 `branch` 的那一份，直通的 1 不在里面。所以它和输入张量的 `.grad` 可以不同。",
        en="`grad_input` is only the share that came through `branch`, without the 1 that went straight on. So it may differ from the "
        "`.grad` of the input tensor.",
    ),
    REVERSE,
    GRADIENT_NORMS,
    GUIDED_GRADIENT,
]
