"""Checks of notebook 21: forward hooks."""

from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from hooklab.census import hooks_on
from hooklab.course.check import (
    Exercise,
    Prediction,
    Refused,
    expect_like,
    refuse,
    refuse_from_before,
    refuse_removing_others,
)
from hooklab.layers.select import select

# ---- 21.A: a pre-hook that normalises the first argument ----


def normalise(module, mean, std):
    def hook(module, args):
        return ((args[0] - mean) / std, *args[1:])

    return module.register_forward_pre_hook(hook)


class _Scaled(nn.Module):
    """Keeps what its forward is given; its child is given a tensor that must stay as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()
        self.given: tuple = ()
        self.calls = 0

    def forward(self, x, *args, **kwargs):
        self.given = (x, args, kwargs)
        self.calls += 1
        if not isinstance(x, Tensor):
            return torch.zeros(2)
        return self.child(x * 2)


KEEP = torch.tensor([4.0])


def examine_normalise(answer):
    module, x = _Scaled(), torch.tensor([3.0, 7.0], requires_grad=True)
    original, mask, before = x.detach().clone(), torch.tensor([1.0, 0.0]), hooks_on(module)
    with torch.no_grad():
        handle = answer(module, 1.0, 2.0)
        _examine_handle(handle)
        output = _call_with_keyword(module, x, mask)
    got, args, kwargs = module.given
    _examine_caller(x.detach(), original)
    _examine_first(got, original, output)
    _examine_rest(args, kwargs, mask)
    if module.calls != 1:
        refuse(
            "ran_twice",
            zh=f"调用 1 次，`forward` 却运行了 {module.calls} 次。换输入不必重算：在 `forward` 之前换。",
            en=f"For 1 call `forward` ran {module.calls} times. To replace an input nothing need be computed again: do it before "
            "`forward`.",
        )
    expect_like(got, torch.tensor([1.0, 3.0]), "`forward` 收到的 `x`", "the `x` that `forward` is given")
    if not torch.equal(output, 2 * got):
        refuse(
            "everywhere",
            zh="`module` 自己收到的 `x` 对了，可是它里面的子模块也被换了输入。钩子只该挂在 `module` 上。",
            en="The `x` that `module` itself was given is right, but its child module had its input changed as well. The hook "
            "belongs on `module` alone.",
        )
    _examine_again(module, handle, original)
    _examine_all_gone(before, module)
    _examine_another(answer, original)
    _examine_gradient(answer)
    refuse_removing_others(module.register_forward_pre_hook, lambda: answer(module, 1.0, 2.0))


def _call_with_keyword(module, x, mask):
    try:
        return module(x, mask, keep=KEEP)
    except TypeError as error:
        if "must be a mapping" not in str(error):
            raise
        refuse(
            "no_pair",
            zh="带 `with_kwargs=True` 的 pre-hook，返回的两项应当是位置参数的元组和关键字参数的字典；这里第二项不是字典。看第 7 节。",
            en="A pre-hook with `with_kwargs=True` returns two things, the tuple of positional arguments and the dictionary of "
            "keyword arguments; here the second is no dictionary. See section 7.",
        )


def _examine_handle(handle):
    if not callable(getattr(handle, "remove", None)):
        refuse(
            "no_handle",
            zh=f"应当返回一个能 `.remove()` 的句柄，得到的是 `{type(handle).__name__}`。",
            en=f"Return a handle with `.remove()`; found `{type(handle).__name__}`.",
        )


def _examine_caller(x, original):
    if not torch.equal(x, original):
        refuse(
            "edited_in_place",
            zh=f"调用者的 `x` 变了：调用之前是 `{original.tolist()}`，之后是 `{x.tolist()}`。原地操作改的就是调用者的张量。",
            en=f"The caller's `x` has changed: `{original.tolist()}` before the call, `{x.tolist()}` after it. An operation in "
            "place edits the caller's own tensor.",
        )


def _examine_first(got, original, output):
    if isinstance(got, list | tuple):
        refuse(
            "wrapped",
            zh=f"`forward` 的第一个参数变成了一个 `{type(got).__name__}`：返回的东西被整个当成一个参数。看看第 4 节的打印结果。",
            en=f"The first argument of `forward` has become a `{type(got).__name__}`: what you return was taken for one "
            "argument as a whole. See what section 4 printed.",
        )
    if isinstance(got, Tensor) and torch.equal(got, original):
        if isinstance(output, Tensor) and not torch.equal(output, original * 2):
            refuse(
                "on_output",
                zh="`forward` 收到的还是原来的 `x`，改掉的是后面的东西。要换的是输入。",
                en="`forward` was given the original `x`; something later was changed. It is the input that should be replaced.",
            )
        refuse(
            "unchanged",
            zh="`forward` 收到的还是原来的 `x`。钩子触发了吗，返回了什么？",
            en="`forward` was given the original `x`. Did the hook fire, and what did it return?",
        )


def _examine_rest(args, kwargs, mask):
    if len(args) == 1 and args[0] is not mask:
        refuse(
            "rest_changed",
            zh="第二个位置参数应当原样传入，`forward` 收到的却变了。只改第一个。",
            en="The second positional argument should arrive as it was; `forward` was given another. Change the first alone.",
        )
    if len(args) != 1:
        refuse(
            "rest_lost",
            zh=f"调用时传了 2 个位置参数，`forward` 收到的却有 {len(args) + 1} 个。返回的值顶替的是什么？看第 7 节。",
            en=f"The call had 2 positional arguments; `forward` was given {len(args) + 1}. What does a returned value replace? See "
            "section 7.",
        )
    if len(kwargs) != 1 or kwargs.get("keep") is not KEEP:
        refuse(
            "keywords_lost",
            zh=f"关键字参数应当原样传入，`forward` 收到的却是 `{kwargs}`。",
            en=f"Keyword arguments should go in as they are; `forward` was given `{kwargs}`.",
        )


def _examine_again(module, handle, x):
    module(x + 2)
    again = module.given[0]
    if not isinstance(again, Tensor) or not torch.allclose(again, torch.tensor([2.0, 4.0])):
        refuse(
            "first_only",
            zh="第一次调用对了，第二次换了一个 `x`，而且只传它一个，`forward` 收到的就不对了。每次调用都要换。",
            en="The first call was right; in the second, with another `x` and nothing else, `forward` was given something wrong. "
            "Every call counts.",
        )
    module.eval()
    module(x + 2)
    if torch.equal(module.given[0], x + 2):
        refuse(
            "only_in_training",
            zh="调用 `module.eval()` 之后，`forward` 收到的是原来的 `x`。每次调用都要换，不管是训练还是评估模式。",
            en="After `module.eval()` `forward` was given the original `x`. Every call counts, in training and in evaluation mode.",
        )
    handle.remove()
    module(x)
    if not torch.equal(module.given[0], x):
        refuse(
            "still_there",
            zh="句柄已经 `.remove()`，`forward` 收到的 `x` 还是被换过。",
            en="After `.remove()` of the handle the `x` that `forward` is given is still replaced.",
        )


def _examine_all_gone(before, module):
    if left := [hook for hook in hooks_on(module) if hook not in before]:
        refuse(
            "second_hook",
            zh=f"句柄已经 `.remove()`，还留着你的另一个钩子：`{left[0].kind} on {left[0].place}`。一个句柄要能取下全部。",
            en=f"After `.remove()` of the handle another hook of yours is left: `{left[0].kind} on {left[0].place}`. One handle has "
            "to take off all.",
        )


def _examine_another(answer, x):
    module, another = _Scaled(), _Scaled()
    handles = [answer(module, 1.0, 2.0), answer(another, 2.0, 4.0)]
    module(x)
    for handle in handles:
        handle.remove()
    if not torch.allclose(module.given[0], torch.tensor([1.0, 3.0])):
        refuse(
            "another_module",
            zh="`normalise` 又用在了另一个模块上，`mean` 和 `std` 都不同；第一个模块收到的 `x` 就不对了。"
            "每个钩子只管自己的模块，用自己的数。",
            en="`normalise` was used on another module as well, with another `mean` and `std`, and now the first one is given the "
            "wrong `x`. Each hook belongs to its own module and has numbers of its own.",
        )


def _examine_gradient(answer):
    module, x = _Scaled(), torch.tensor([3.0, 7.0], dtype=torch.float64, requires_grad=True)
    answer(module, 1.0, 2.0)
    output = module(x)
    got = module.given[0]
    if got.dtype != torch.float64:
        refuse(
            "wrong_dtype",
            zh=f"`x` 是 `torch.float64`，`forward` 收到的却是 `{got.dtype}`。",
            en=f"`x` is `torch.float64`, `forward` was given `{got.dtype}`.",
        )
    if output.requires_grad:
        output.sum().backward()
    if x.grad is None:
        refuse(
            "cut",
            zh="梯度传不回调用者的 `x`：`forward` 收到的张量和它断开了。",
            en="No gradient gets back to the caller's `x`: the tensor that `forward` was given is cut off from it.",
        )
    if not torch.allclose(x.grad, torch.ones_like(x)):
        refuse(
            "wrong_gradient",
            zh=f"传回 `x` 的梯度应当是 `[1.0, 1.0]`，得到的是 `{x.grad.tolist()}`。",
            en=f"The gradient that gets back to `x` should be `[1.0, 1.0]`; found `{x.grad.tolist()}`.",
        )


def normalise_in_place(module, mean, std):
    def hook(module, args):
        args[0].sub_(mean).div_(std)

    return module.register_forward_pre_hook(hook)


def normalise_without_return(module, mean, std):
    def hook(module, args):
        args = ((args[0] - mean) / std, *args[1:])

    return module.register_forward_pre_hook(hook)


def normalise_as_list(module, mean, std):
    return module.register_forward_pre_hook(
        lambda module, args: [(args[0] - mean) / std, *args[1:]],
    )


def normalise_once(module, mean, std):
    def hook(module, args):
        handle.remove()
        return ((args[0] - mean) / std, *args[1:])

    handle = module.register_forward_pre_hook(hook)
    return handle


def normalise_in_training(module, mean, std):
    return module.register_forward_pre_hook(
        lambda module, args: ((args[0] - mean) / std, *args[1:]) if module.training else None
    )


def normalise_without_keywords(module, mean, std):
    return module.register_forward_pre_hook(
        lambda module, args, kwargs: (((args[0] - mean) / std, *args[1:]), {}), with_kwargs=True
    )


def normalise_detached(module, mean, std):
    return module.register_forward_pre_hook(
        lambda module, args: ((args[0].detach() - mean) / std, *args[1:]),
    )


def normalise_in_data(module, mean, std):
    def hook(module, args):
        x = args[0].clone()
        x.data.sub_(mean).div_(std)
        return (x, *args[1:])

    return module.register_forward_pre_hook(hook)


def normalise_with_two(module, mean, std):
    module.register_forward_hook(lambda module, args, output: None)
    return normalise(module, mean, std)


def normalise_by_global(module, mean, std):
    _numbers.update(mean=mean, std=std)
    return module.register_forward_pre_hook(
        lambda module, args: ((args[0] - _numbers["mean"]) / _numbers["std"], *args[1:])
    )


_numbers: dict[str, float] = {}  # of the wrong answers that keep them in one place for all modules


def normalise_for_ever(module, mean, std):
    run = module.forward
    module.forward = lambda x, *args, **kwargs: run((x - mean) / std, *args, **kwargs)
    return nn.Identity().register_forward_hook(print)


class _Cleared:
    """A handle that takes off whatever is there."""

    def __init__(self, module, handle):
        self.module = module

    def remove(self):
        self.module._forward_pre_hooks.clear()


NORMALISE = Exercise(
    "21.A",
    examine_normalise,
    normalise,
    {
        "removed_others": lambda module, mean, std: _Cleared(module, normalise(module, mean, std)),
        "rest_changed": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args: tuple((one - mean) / std for one in args)
        ),
        "rest_lost": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args: (args[0] - mean) / std
        ),
        "edited_in_place": normalise_in_place,
        "unchanged": normalise_without_return,
        "wrapped": normalise_as_list,
        "on_output": lambda module, mean, std: module.register_forward_hook(
            lambda module, args, output: (output - mean) / std
        ),
        "no_handle": lambda module, mean, std: normalise(module, mean, std) and None,
        "first_only": normalise_once,
        "only_in_training": normalise_in_training,
        "everywhere": lambda module, mean, std: modules.register_module_forward_pre_hook(
            lambda module, args: ((args[0] - mean) / std, *args[1:])
        ),
        "keywords_lost": normalise_without_keywords,
        "no_pair": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args, kwargs: ((args[0] - mean) / std, *args[1:]), with_kwargs=True
        ),
        "cut": normalise_detached,
        "wrong_gradient": normalise_in_data,
        "wrong_dtype": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args: ((args[0].float() - mean) / std, *args[1:])
        ),
        "still_there": normalise_for_ever,
        "second_hook": normalise_with_two,
        "another_module": normalise_by_global,
        "ran_twice": lambda module, mean, std: module.register_forward_hook(
            lambda module, args, kwargs, output: module.forward((args[0] - mean) / std, *args[1:], **kwargs),
            with_kwargs=True,
        ),
        "wrong_values": lambda module, mean, std: module.register_forward_pre_hook(
            lambda module, args: (args[0] - mean / std, *args[1:])
        ),
    },
    zh="第一个参数换掉了，其余的原样带上，调用者的张量也没动。",
    en="The first argument is replaced, the rest goes along, and the caller's tensor is untouched.",
)

# ---- 21.B: noise on the output, in training mode only ----


def add_noise(module, std):
    def hook(module, args, output):
        if module.training:
            return output + std * torch.randn_like(output)

    return module.register_forward_hook(hook)


STD = 0.5


def examine_add_noise(answer):
    # Half of the outputs are 0 whatever is added to the input, half are 100.
    x = torch.tensor([-100.0, 100.0]).repeat(200, 50)
    plain = x.clamp(min=0)
    module = nn.ReLU()
    before = hooks_on(module)
    handle = answer(module, STD)
    _examine_handle(handle)
    noise = _noise(module(x), plain)
    _examine_kind(noise, plain)
    second = _noise(module(x), plain)
    if torch.equal(noise, second):
        refuse(
            "same_noise",
            zh="两次前向加的是完全一样的噪声。它是什么时候抽的，种子有没有每次重设？",
            en="Two forwards got exactly the same noise. When is it drawn, and is a seed set each time?",
        )
    _examine_shape(module)
    _examine_modes(answer, module, x, plain)
    handle.remove()
    _examine_inside(answer, x, plain)
    _examine_backward(answer)
    _examine_dtype(answer)
    if not torch.equal(module.train()(x), plain):
        refuse(
            "still_there",
            zh="句柄已经 `.remove()`，输出里还有噪声。",
            en="After `.remove()` of the handle there is still noise in the output.",
        )
    _examine_all_gone(before, module)
    _examine_other_std(answer, x, plain)


def _noise(output, plain):
    if not isinstance(output, Tensor):
        refuse(
            "wrong_type",
            zh=f"模块的输出变成了 `{type(output).__name__}`。看看钩子返回了什么。",
            en=f"The module's output has become a `{type(output).__name__}`. See what the hook returns.",
        )
    if output.shape != plain.shape:
        refuse(
            "wrong_shape",
            zh=f"输出的形状变了：从 `{list(plain.shape)}` 变成 `{list(output.shape)}`。",
            en=f"The shape of the output has changed: from `{list(plain.shape)}` to `{list(output.shape)}`.",
        )
    return output.detach() - plain


def _examine_kind(noise, plain):
    low, high = noise[plain == 0], noise[plain != 0]
    if not noise.any():
        refuse(
            "unchanged",
            zh="训练模式下，输出里没有噪声。钩子触发了吗，返回了什么？",
            en="In training mode there is no noise in the output. Did the hook fire, and what did it return?",
        )
    if torch.allclose(high, high.mean(), atol=5.0) and high.mean() < -50:
        refuse(
            "noise_only",
            zh="原来是 100 的地方现在接近 0：返回的是噪声本身，输出不见了。",
            en="Where 100 stood there is now something near 0: the noise itself was returned, and the output is gone.",
        )
    if low.mean() < -50:
        refuse(
            "noisy_input",
            zh="ReLU 把负数变成 0，这里的输出却还有 -100 左右的数：加了噪声返回的是输入，不是输出。",
            en="ReLU turns negative numbers into 0, and yet some of the output is near -100: what is returned, with noise, is the "
            "input, not the output.",
        )
    if not low.any():
        refuse(
            "none_at_zero",
            zh="输出为 0 的地方没有噪声，100 的地方有。是加在输出上的，还是加在输入上，或者乘上去的？",
            en="Where the output is 0 there is no noise, where it is 100 there is. Is it added to the output, or to the input, "
            "or is it a factor?",
        )
    if not _independent(noise):
        refuse(
            "shared",
            zh="许多位置上的噪声一模一样。每个数都要有自己的噪声。",
            en="Many places have exactly the same noise. Each entry should have its own.",
        )
    mean, std = noise.mean().item(), noise.std().item()
    if abs(mean) > 0.1 * STD:
        refuse(
            "wrong_mean",
            zh=f"噪声的均值应当是 0，量到的是 `{mean:.2f}`。",
            en=f"The noise should have mean 0; measured: `{mean:.2f}`.",
        )
    if abs(std - STD) > 0.1 * STD:
        refuse(
            "wrong_std",
            zh=f"`std` 是 `{STD}`，噪声的标准差量到的是 `{std:.2f}`。",
            en=f"`std` is `{STD}`; the noise has a measured standard deviation of `{std:.2f}`.",
        )
    if noise.abs().max() < 2.5 * STD:
        refuse(
            "not_normal",
            zh=f"{noise.numel()} 个噪声里没有一个超过 `std` 的 2.5 倍，这不像正态分布。",
            en=f"Of {noise.numel()} entries of noise none exceeds 2.5 times `std`: not what a normal distribution gives.",
        )


def _independent(noise):
    # Rounding 100 + noise leaves equal values by chance, not whole rows or columns of them.
    rows, columns = (
        (noise - noise[:1]).abs().amax(dim=1)[1:],
        (noise[:, 2:] - noise[:, :-2]).abs().amax(dim=0),
    )
    return bool((rows > 1e-3).all() and (columns > 1e-3).all())


def _examine_shape(module):
    try:
        module(torch.ones(3, 7))
    except RuntimeError:
        refuse(
            "one_shape",
            zh="换一个形状的输入就报错：噪声的形状要跟着当时的输出走。",
            en="With an input of another shape it raises: the noise has to take its shape from the output at hand.",
        )


def _examine_modes(answer, module, x, plain):
    module.eval()
    if not torch.equal(module(x), plain):
        refuse(
            "noise_in_eval",
            zh="调用 `module.eval()` 之后，输出还是和不挂钩子时不同。钩子每次触发时都要看当时的模式。",
            en="After `module.eval()` the output still differs from that without the hook. The hook has to look at the mode each "
            "time it fires.",
        )
    if torch.equal(module.train()(x), plain):
        refuse(
            "gone_after_eval",
            zh="训练、评估、再训练：第二次回到训练模式，噪声就没有了。",
            en="Training, evaluation, training again: the second time in training mode there is no noise any more.",
        )
    other = nn.ReLU().eval()
    handle = answer(other, STD)
    got = other.train()(x)
    handle.remove()
    if torch.equal(got, plain):
        refuse(
            "mode_at_hanging",
            zh="挂钩子时是评估模式，后来切换到训练模式，却没有噪声。要看的是触发那一刻的模式。",
            en="Hung in evaluation mode and switched to training later, it adds no noise. What counts is the mode when the hook "
            "fires.",
        )


def _examine_other_std(answer, x, plain):
    module, another = nn.ReLU(), nn.ReLU()
    handles = [answer(module, STD), answer(another, 10 * STD)]
    std = _noise(module(x), plain).std().item()
    for handle in handles:
        handle.remove()
    if abs(std - STD) > 0.1 * STD:
        refuse(
            "another_module",
            zh=f"`add_noise` 又用在了另一个模块上，`std` 是 `{10 * STD}`；第一个模块的 `std` 是 `{STD}`，"
            f"噪声的标准差量到的却是 `{std:.2f}`。每个钩子只管自己的模块，用自己的数。",
            en=f"`add_noise` was used on another module as well, with a `std` of `{10 * STD}`; the first one has the `std` `{STD}`, and "
            f"yet its noise has a measured standard deviation of `{std:.2f}`. Each hook belongs to its own module and has a number "
            "of its own.",
        )


class _Noting(nn.ReLU):
    """Notes its own output, before any hook gets it."""

    def forward(self, x: Tensor) -> Tensor:
        self.own = super().forward(x)
        return self.own


class _Doubling(nn.Module):
    """A module with another one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Noting()

    def forward(self, x: Tensor) -> Tensor:
        self.given = self.inner(x)
        return 2 * self.given


def _examine_inside(answer, x, plain):
    module = _Doubling()
    handle = answer(module, STD)
    module(x)
    handle.remove()
    if not torch.equal(module.given, plain):
        refuse(
            "everywhere",
            zh="`module` 里面还有一个模块，它的输出里也有了噪声。钩子只该管 `module` 一个。",
            en="Inside `module` there is another one, and its output has noise too. The hook belongs to `module` alone.",
        )


def _examine_backward(answer):
    module, x = _Noting(), torch.tensor([[-1.0, 2.0, 3.0]], requires_grad=True)
    handle = answer(module, STD)
    output = module(x)
    handle.remove()
    if not torch.equal(module.own.detach(), x.detach().clamp(min=0)):
        refuse(
            "edited_in_place",
            zh="钩子原地改了 ReLU 自己的输出，而 ReLU 的反向还要用它：梯度会出错，或者报错。看第 4 节里 ReLU 报错的那个例子。",
            en="The hook edits the output of ReLU itself in place, and the backward of ReLU still needs it: the gradient will be "
            "wrong, or backward will raise. See the example in section 4 in which ReLU raises.",
        )
    if output.requires_grad:
        output.sum().backward()
    if x.grad is None:
        refuse(
            "cut",
            zh="加了噪声的输出不带计算图，梯度传不回去。",
            en="The output with noise has no autograd graph: no gradient gets back.",
        )
    if x.grad.tolist() != [[0, 1, 1]]:
        refuse(
            "wrong_gradient",
            zh=f"噪声不该影响梯度：应当是 `[0, 1, 1]`，得到的是 `{x.grad[0].tolist()}`。",
            en=f"Noise should not change the gradient: it should be `[0, 1, 1]`; found `{x.grad[0].tolist()}`.",
        )


def _examine_dtype(answer):
    for dtype in (torch.float64, torch.bfloat16):
        module = nn.ReLU()
        handle = answer(module, STD)
        got = module(torch.ones(2, 3, dtype=dtype)).dtype
        handle.remove()
        if got != dtype:
            refuse(
                "wrong_dtype",
                zh=f"输出原来是 `{dtype}`，加上噪声变成了 `{got}`，下一层会报错。",
                en=f"The output was `{dtype}` and with noise is `{got}`; the next layer will raise.",
            )


def noise_always(module, std):
    return module.register_forward_hook(lambda module, args, output: output + std * torch.randn_like(output))


def noise_by_the_mode_at_hanging(module, std):
    training = module.training

    def hook(module, args, output):
        if training and module.training:
            return output + std * torch.randn_like(output)

    return module.register_forward_hook(hook)


def noise_drawn_once(module, std):
    drawn = {}

    def hook(module, args, output):
        if module.training:
            return output + drawn.setdefault(output.shape, std * torch.randn_like(output))

    return module.register_forward_hook(hook)


def noise_in_place(module, std):
    def hook(module, args, output):
        if module.training:
            output += std * torch.randn_like(output)

    return module.register_forward_hook(hook)


def noise_without_return(module, std):
    def hook(module, args, output):
        if module.training:
            output = output + std * torch.randn_like(output)

    return module.register_forward_hook(hook)


def noise_on_input(module, std):
    def hook(module, args):
        if module.training:
            return args[0] + std * torch.randn_like(args[0])

    return module.register_forward_pre_hook(hook)


def noise_until_eval(module, std):
    def hook(module, args, output):
        if module.training:
            return output + std * torch.randn_like(output)
        handle.remove()

    handle = module.register_forward_hook(hook)
    return handle


def noise_with_two(module, std):
    module.register_forward_hook(lambda module, args, output: None)
    return add_noise(module, std)


def noise_of_the_first_shape(module, std):
    shapes = []

    def hook(module, args, output):
        shapes.append(output.shape)
        if module.training:
            return output + std * torch.randn(shapes[0])

    return module.register_forward_hook(hook)


def noise_for_ever(module, std):
    run = module.forward

    def forward(x):
        output = run(x)
        return output + std * torch.randn_like(output) if module.training else output

    module.forward = forward
    return nn.Identity().register_forward_hook(print)


def noise_by_global(module, std):
    _numbers.update(std=std)
    return module.register_forward_hook(
        lambda module, args, output: output + _numbers["std"] * torch.randn_like(output) if module.training else None
    )


def _noise_hook(make):
    """An answer whose hook returns `make(output, std)` in training mode."""

    def answer(module, std):
        def hook(module, args, output):
            if module.training:
                return make(output, std)

        return module.register_forward_hook(hook)

    return answer


ADD_NOISE = Exercise(
    "21.B",
    examine_add_noise,
    add_noise,
    {
        "noise_in_eval": noise_always,
        "mode_at_hanging": noise_by_the_mode_at_hanging,
        "same_noise": noise_drawn_once,
        "edited_in_place": noise_in_place,
        "unchanged": noise_without_return,
        "none_at_zero": noise_on_input,
        "noisy_input": lambda module, std: module.register_forward_hook(
            lambda module, args, output: args[0] + std * torch.randn_like(args[0])
        ),
        "noise_only": _noise_hook(lambda output, std: std * torch.randn_like(output)),
        "shared": _noise_hook(lambda output, std: output + std * torch.randn(1)),
        "wrong_mean": _noise_hook(lambda output, std: output + std * torch.rand_like(output)),
        "wrong_std": _noise_hook(lambda output, std: output + torch.randn_like(output)),
        "not_normal": _noise_hook(lambda output, std: output + (torch.rand_like(output) - 0.5) * (12**0.5) * std),
        "wrong_dtype": _noise_hook(lambda output, std: output + std * torch.randn(output.shape)),
        "wrong_type": _noise_hook(lambda output, std: (output + std * torch.randn_like(output),)),
        "wrong_shape": _noise_hook(lambda output, std: output + std * torch.randn(1, *output.shape)),
        "one_shape": noise_of_the_first_shape,
        "wrong_gradient": _noise_hook(torch.normal),  # its gradient is 0
        "still_there": noise_for_ever,
        "cut": _noise_hook(lambda output, std: output.detach() + std * torch.randn_like(output)),
        "no_handle": lambda module, std: add_noise(module, std) and None,
        "gone_after_eval": noise_until_eval,
        "second_hook": noise_with_two,
        "another_module": noise_by_global,
        "everywhere": lambda module, std: modules.register_module_forward_hook(
            lambda module, args, output: output + std * torch.randn_like(output) if module.training else None
        ),
    },
    zh="训练时有噪声，每次都是新的；评估时原样，反向也不受影响。",
    en="Noise in training, new each time; nothing in evaluation, and backward is not disturbed.",
)

# ---- 21.C: the output shapes of all leaf layers ----


def shapes_of(model, x):
    shapes = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not list(module.children()):
                stack.enter_context(module.register_forward_hook(partial(_keep, shapes, name)))
        model(x)
    return shapes


def _keep(shapes, name, module, args, output):
    shapes[name] = _shape(output)


def _shape(output):
    if isinstance(output, tuple):
        return tuple(_shape(item) for item in output)
    return tuple(output.shape) if isinstance(output, Tensor) else None


class _Tagger(nn.Module):
    """Words to tags with an LSTM, whose output is a nested tuple; one layer runs twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.tags = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        hidden, _ = self.lstm(self.words(x))
        self.tags(hidden[:, :1])
        return self.tags(self.head(hidden))


class _Spare(nn.Module):
    """One layer that runs and one that does not; both outputs would be tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.used(x)


class _Attention(nn.Module):
    """An output of which one part is None and one is a number; another that is None as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.log = _NoWeights(), _Silent()

    def forward(self, x):
        self.log(x)
        return self.attention(x)[0]


class _NoWeights(nn.Module):
    def forward(self, x):
        return x * 2, None, 3


class _Silent(nn.Module):
    def forward(self, x):
        return None


class _Broken(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(3, 4))


class _Stumbling(nn.Module):
    def forward(self, x):
        raise IndexError("this layer fails on purpose")


def examine_shapes_of(answer):
    _examine_plain(answer)
    _examine_nested(answer)
    _examine_alone(answer)
    _examine_broken(answer, _Broken(), RuntimeError, "shapes cannot be multiplied")
    _examine_broken(answer, nn.Sequential(nn.Linear(3, 4), _Stumbling()), IndexError, "on purpose")


def _run(answer, model, x):
    """The answer's result; what it leaves on the model, and does to it, is refused."""
    before, modes = hooks_on(model), [module.training for module in model.modules()]
    shapes = answer(model, x)
    after = hooks_on(model)
    if any(hook not in after for hook in before):
        refuse(
            "removed_others",
            zh="模型上原来就有的一个钩子不见了。只取下自己的：留好句柄。",
            en="A hook that was on the model before is gone. Take off your own only: keep their handles.",
        )
    if left := [hook for hook in after if hook not in before]:
        refuse(
            "left",
            zh=f"运行结束后，还留着你的 {len(left)} 个钩子，例如 `{left[0].place}` 上的。",
            en=f"When the run is over {len(left)} of your hooks are still there, for example on `{left[0].place}`.",
        )
    if modes != [module.training for module in model.modules()]:
        refuse(
            "mode_changed",
            zh="模型的训练或评估模式变了。只看，不要改模型。",
            en="The model is no longer in the mode it was in, training or evaluation. Look, and leave it as it was.",
        )
    if not isinstance(shapes, dict):
        refuse(
            "no_dict",
            zh=f"应当返回一个字典，得到的是 `{type(shapes).__name__}`。",
            en=f"Return a dictionary; found `{type(shapes).__name__}`.",
        )
    return shapes


def _plain():
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


def _examine_plain(answer):
    model = _plain()
    x, want = torch.ones(5, 3), {"0": (5, 4), "1.0": (5, 4), "1.1": (5, 2)}
    expected, passed, results = model(x), [], []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: passed.append(args[0]))
    model.register_forward_hook(lambda module, args, output: results.append(output))
    try:
        shapes = _run(answer, model, x)
    except Refused:
        raise
    except Exception:
        _examine_passed([*passed, *results])
        raise
    _examine_passed([*passed, *results])
    _examine_results(results, expected)
    _examine_names(shapes, want, model)
    _examine_shapes(shapes, want)


def _examine_passed(values):
    other = [type(value).__name__ for value in values if not isinstance(value, Tensor)]
    if other:
        refuse(
            "replaced_output",
            zh=f"模型里传的不再是张量，而是 `{other[0]}`：有个钩子把输出换掉了。看看它返回了什么。",
            en=f"What passes through the model is no tensor any more but a `{other[0]}`: a hook replaced an output. See what it "
            "returns.",
        )


def _examine_results(results, expected):
    if not results:
        refuse(
            "by_forward",
            zh="挂在模型本身的一个钩子没有触发：模型没有运行，或者不是用 `model(x)` 运行的。直接调用 `forward` 会跳过钩子（00）。",
            en="A hook on the model itself did not fire: the model did not run, or not by `model(x)`. Calling `forward` directly "
            "skips hooks (00).",
        )
    if len(results) > 1:
        refuse(
            "ran_twice",
            zh=f"模型运行了 {len(results)} 次，只该运行 1 次。",
            en=f"The model ran {len(results)} times; 1 was asked for.",
        )
    if not torch.equal(results[0], expected):
        refuse(
            "changed_output",
            zh="模型的输出和平时不一样：某个钩子改了路过的值。",
            en="The model's output is not what it otherwise is: a hook changed a value that passed.",
        )


def _examine_names(shapes, want, model):
    others = {name for other in (_plain(), _Tagger(), _Attention()) for name, _ in other.named_modules()}
    refuse_from_before(shapes, model, others)
    missing, extra = (
        [name for name in want if name not in shapes],
        [name for name in shapes if name not in want],
    )
    if not missing and not extra:
        return
    found, expected = ", ".join(map(repr, shapes)) or "{}", ", ".join(map(repr, want))
    if len(want) > 1 and list(shapes) == list(want)[-1:]:
        refuse(
            "one_entry",
            zh=f"{len(want)} 层运行过，字典里只有 1 项：`{found}`。每个钩子用的是哪个名字，什么时候读的？看第 10 节。",
            en=f"{len(want)} layers ran, the dictionary has 1 entry: `{found}`. Which name does each hook use, and when is it read? "
            "See section 10.",
        )
    if not missing:
        refuse(
            "extra",
            zh=f"多出了 `{', '.join(map(repr, extra))}`：它有子模块，或者没有运行过。",
            en=f"There is `{', '.join(map(repr, extra))}` too many: it has child modules, or never ran.",
        )
    refuse(
        "wrong_names",
        zh=f"名字应当是 `{expected}`，得到的是 `{found}`。名字在 `named_modules()` 里。",
        en=f"The names should be `{expected}`; found `{found}`. Names are in `named_modules()`.",
    )


def _examine_shapes(shapes, want):
    for name, shape in want.items():
        got = shapes[name]
        if isinstance(got, list):
            refuse(
                "no_tuple",
                zh=f"`{name}` 的形状应当是元组，得到的是 `{got}`。",
                en=f"The shape of `{name}` should be a tuple; found `{got}`.",
            )
        if got != shape:
            refuse(
                "wrong_shape",
                zh=f"`{name}` 的形状应当是 `{shape}`，得到的是 `{got!r}`。",
                en=f"The shape of `{name}` should be `{shape}`; found `{got!r}`.",
            )


def _examine_alone(answer):
    try:
        shapes = _run(answer, nn.Linear(3, 2), torch.ones(4, 3))
    except KeyError:
        refuse(
            "alone_raised",
            zh="模型只有一层 `nn.Linear(3, 2)`、里面没有别的层时，你的代码报 `KeyError`。这一层就是模型自己："
            "`select` 的 `**` 选不到它，`named_modules()` 里有它。",
            en="Where the model is one `nn.Linear(3, 2)` with no layer inside, your code raises `KeyError`. That layer is the model "
            "itself: `**` of `select` does not match it, `named_modules()` lists it.",
        )
    if shapes != {"": (4, 2)}:
        refuse(
            "alone",
            zh=f"模型只有一层 `nn.Linear(3, 2)` 时，它自己就没有子模块，名字是空串；得到的却是 `{shapes}`。",
            en=f"A model that is one `nn.Linear(3, 2)` has no child modules itself, and its name is the empty string; found `{shapes}`.",
        )


def _examine_nested(answer):
    state = ((1, 2, 4), (1, 2, 4))
    want = {
        "words": (2, 5, 6),
        "lstm": ((2, 5, 4), state),
        "head.0": (2, 5, 4),
        "head.1": (2, 5, 4),
        "tags": (2, 5, 3),
    }
    try:
        _run(answer, _Spare(), torch.ones(5, 3))
    except (KeyError, AttributeError, TypeError) as error:
        refuse(
            "never_ran",
            zh=f"模型里有一层从不运行，你的代码报 `{type(error).__name__}`：它没有输出可读。只列出运行过的层。",
            en=f"The model has a layer that never runs, and your code raises `{type(error).__name__}`: there is no output of it to "
            "read. List those that ran only.",
        )
    for model, x, expected in (
        (_Tagger(), torch.zeros(2, 5, dtype=torch.int64), want),
        (_Attention(), torch.ones(2, 3), {"attention": ((2, 3), None, None), "log": None}),
    ):
        try:
            shapes = _run(answer, model, x)
        except (KeyError, AttributeError, TypeError) as error:
            refuse(
                "nested",
                zh=f"有一层的输出是 `None` 或者元组（元组里可能还有 `None` 或数），你的代码在这里报错：`{type(error).__name__}`。"
                "`nn.LSTM` 返回 `(output, (h, c))`。",
                en="A layer's output is a tuple or `None`, perhaps a tuple with `None` or a number in it, and there your code raises "
                f"`{type(error).__name__}`. `nn.LSTM` returns `(output, (h, c))`.",
            )
        if shapes.get("tags") == (2, 1, 3):
            refuse(
                "first_call",
                zh="`tags` 运行了两次，你记下的是第一次的形状；要的是最后一次。",
                en="`tags` ran twice, and you have noted the shape of the first call; the last one is wanted.",
            )
        _examine_names(shapes, expected, model)
        _examine_shapes(shapes, expected)


def _examine_broken(answer, model, kind, said):
    before = hooks_on(model)
    try:
        answer(model, torch.ones(2, 3))
    except kind as error:
        raised = error
    else:
        raised = None
    if left := [hook for hook in hooks_on(model) if hook not in before]:
        refuse(
            "left_after_error",
            zh=f"模型运行到一半报错，你的 {len(left)} 个钩子留在了上面。错误跳过了哪一句？",
            en=f"The model raised half-way, and {len(left)} of your hooks stayed on it. Which line did the error jump over?",
        )
    if raised is None or said not in str(raised):
        refuse(
            "swallowed",
            zh="模型报了错，调用者却没有收到这个错误。",
            en="The model raised, and the error did not reach the caller.",
        )


def _shapes_by_hand(keep=None, layers=None, run=None, remove=None):
    """The answer most people write, with one part exchanged."""

    def answer(model, x):
        shapes, handles = {}, []

        def plain(name):
            def hook(module, args, output):
                shapes[name] = _shape(output)

            return hook

        chosen = layers(model) if layers else [(n, m) for n, m in model.named_modules() if not list(m.children())]
        for name, module in chosen:
            handles.append(module.register_forward_hook(keep(shapes, name) if keep else plain(name)))
        try:
            run(model, x) if run else model(x)
        finally:
            remove(model) if remove else [handle.remove() for handle in handles]
        return shapes

    return answer


def shapes_late(model, x):
    shapes = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not list(module.children()):

                def hook(module, args, output):
                    shapes[name] = _shape(output)  # noqa: B023

                stack.enter_context(module.register_forward_hook(hook))
        model(x)
    return shapes


def shapes_without_finally(model, x):
    shapes, handles = {}, []
    for name, module in model.named_modules():
        if not list(module.children()):
            handles.append(module.register_forward_hook(partial(_keep, shapes, name)))
    model(x)
    for handle in handles:
        handle.remove()
    return shapes


def shapes_by_default(model, x, shapes={}):  # noqa: B006
    shapes.update(shapes_of(model, x))
    return shapes


def shapes_of_every(model, x):
    kept = _shapes_by_hand(lambda shapes, name: lambda module, args, output: shapes.update({name: _shape(output)}))(
        model, x
    )
    return {name: kept[name] for name, module in model.named_modules() if not list(module.children())}


def _leaves(model, layers=None):
    """The layers without child modules, by name; the model itself forgotten."""
    named = layers or [(name, module) for name, module in model.named_modules() if name]
    return {name: module for name, module in named if not list(module.children())}


def _clear(model):
    for module in model.modules():
        module._forward_hooks.clear()


def _swallow(model, x):
    with suppress(RuntimeError):
        model(x)


SHAPES_OF = Exercise(
    "21.C",
    examine_shapes_of,
    shapes_of,
    {
        "one_entry": shapes_late,
        "left_after_error": shapes_without_finally,
        "left": _shapes_by_hand(remove=lambda model: None),
        "removed_others": _shapes_by_hand(remove=_clear),
        "swallowed": _shapes_by_hand(run=_swallow),
        "nested": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.update({name: tuple(output.shape)})
        ),
        "first_call": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.setdefault(name, _shape(output)) and None
        ),
        "replaced_output": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.setdefault(name, _shape(output))
        ),
        "alone": _shapes_by_hand(layers=lambda model: list(_leaves(model).items())),
        "alone_raised": _shapes_by_hand(layers=lambda model: _leaves(model, select(model, "**").items()).items()),
        "extra": _shapes_by_hand(layers=lambda model: list(model.named_modules())),
        "from_before": shapes_by_default,
        "never_ran": shapes_of_every,
        "wrong_names": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.update({type(module).__name__: _shape(output)})
        ),
        "by_forward": _shapes_by_hand(run=lambda model, x: model.forward(x)),
        "ran_twice": _shapes_by_hand(run=lambda model, x: (model(x), model(x))),
        "changed_output": _shapes_by_hand(
            lambda shapes, name: (
                lambda module, args, output: shapes.update({name: _shape(output)}) or torch.zeros_like(output)
            )
        ),
        "no_dict": lambda model, x: list(shapes_of(model, x).items()),
        "mode_changed": _shapes_by_hand(run=lambda model, x: model.eval()(x)),
        "no_tuple": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.update({name: list(output.shape)})
        ),
        "wrong_shape": _shapes_by_hand(
            lambda shapes, name: lambda module, args, output: shapes.update({name: _shape(args[0])})
        ),
    },
    zh="哪一层都没有漏，元组也看到了底，出错时也没有留下钩子。",
    en="No layer is missing, tuples are followed to the end, and no hook stays behind, even when the model raises.",
)

# ---- predictions ----

CHECKS = [
    Prediction(
        "21.1",
        zh="pre-hook 返回的值顶替了输入，后面的一切，包括前向钩子的 `args`，看到的都是换过的：`x + 1`。"
        "原来的 `x` 没有变，但钩子已经拿不到它。",
        en="What the pre-hook returned replaces the input, and all that follows sees the replaced one, the `args` of the forward "
        "hook included: `x + 1`. The original `x` has not changed, but the hook no longer gets it.",
    ),
    Prediction(
        "21.2",
        zh="只有元组才算全部位置参数。列表不是元组，被整个包成一个：`forward` 收到的唯一参数就是这个列表。"
        "要交出两个参数，就返回有两项的元组。",
        en="Only a tuple counts as all positional arguments. A list is none and is wrapped whole: the one argument that `forward` "
        "is given is that list. To hand over two arguments, return a tuple of two.",
    ),
    Prediction(
        "21.3",
        zh="先是 pre-hook，再是前向钩子；每一种里，全局的总在模块自己的之前，哪怕最后才注册。"
        "`prepend=True` 只在这个模块自己的钩子里插到前面。",
        en="Pre-hooks first, then forward hooks; of either kind the global one comes before the module's own, even if registered "
        "last. `prepend=True` goes before this module's own hooks only.",
    ),
    Prediction(
        "21.4",
        zh="报错会穿过每一层调用：`Linear` 没算完，包着它的 `Sequential` 也没算完。最先记下的是最里层，出错的就是它。"
        "`Flatten` 早就算完，`blame` 也在它上面触发了，只是它的 `output` 不是 `None`；`ReLU` 从未被调用。",
        en="The error goes up through every call: `Linear` did not finish, nor did the `Sequential` around it. The first one noted "
        "is the innermost, where the error began. `Flatten` had finished: `blame` fired there too, but its `output` was not "
        "`None`; `ReLU` was never called.",
    ),
    Prediction(
        "21.5",
        zh="钩子存在模块的字典里，`deepcopy` 连它一起复制，函数还是同一个，记进同一个列表。句柄只认原来那一层的字典，"
        "取不下副本上的。",
        en="A hook is kept in a dictionary of its module, and `deepcopy` copies that too; the function is the same one and writes "
        "into the same list. The handle knows the dictionary of the original only, and cannot take the hook off the twin.",
    ),
    NORMALISE,
    ADD_NOISE,
    SHAPES_OF,
]
