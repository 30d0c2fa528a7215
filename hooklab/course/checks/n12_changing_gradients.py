"""Checks of notebook 12: changing gradients."""

import copy

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hooklab.course.check import (
    Exercise,
    Prediction,
    expect_like,
    refuse,
    refuse_latest_call,
    refuse_other_items,
    refuse_removing_others,
    refuse_same_object,
)

# ---- 12.A: a hook maker that caps the norm of the gradient ----


def cap(limit):
    def hook(grad):
        norm = grad.norm()
        return grad * (limit / norm) if norm > limit else grad

    return hook


def examine_cap(answer):
    hook, other = answer(2.0), answer(100.0)
    for made in (hook, other):
        if not callable(made):
            refuse(
                "not_a_hook",
                zh=f"`cap(2.0)` 应当返回一个钩子，也就是一个函数；得到的是 `{type(made).__name__}`。",
                en=f"`cap(2.0)` should return a hook, which is a function; found `{type(made).__name__}`.",
            )
    for grad in (torch.tensor([1.0, 4.0]), torch.tensor([[6.0, 3.0], [1.0, -8.0]], dtype=torch.float64)):
        _examine_large(hook, grad, grad * (2.0 / grad.norm()))
    spread = torch.full((3,), -1.9)  # no entry is above the limit, the norm is
    _examine_large(hook, spread, spread * (2.0 / spread.norm()))
    for small in (torch.tensor([0.3, -0.4]), torch.tensor([[2.0]])):
        _examine_small(hook, small, 2.0)
    _examine_small(other, torch.tensor([30.0, 40.0]), 100.0)
    _examine_small(hook, torch.tensor([1.2, 1.2]), 2.0)  # whose sum is larger
    _examine_zero(hook)


def _examine_large(hook, grad, want):
    norm, before = grad.norm().item(), grad.clone()
    got = hook(grad)
    if not torch.equal(grad, before):
        refuse(
            "edited_in_place",
            zh="传进来的 `grad` 被原地改了。这块内存也许正由别的梯度共用；名字以下划线结尾的方法和 `*=` 都会改它。",
            en="The `grad` that came in was edited in place. Another gradient may live in the same memory; methods whose "
            "name ends in an underscore edit it, and so does `*=`.",
        )
    if got is None:
        refuse(
            "returned_nothing",
            zh=f"梯度的范数是 `{norm:.4g}`，上限是 `2.0`，钩子却返回了 `None`：梯度会原样通过。",
            en=f"The gradient has norm `{norm:.4g}`, the limit is `2.0`, and the hook returned `None`: the gradient passes "
            "as it is.",
        )
    if isinstance(got, Tensor) and got.shape == grad.shape and torch.equal(got, grad):
        refuse(
            "unchanged",
            zh=f"梯度 `{_short(grad)}` 的范数是 `{norm:.4g}`，超过了上限 `2.0`，却原样通过。比较的是整个张量的范数，和这次调用的 `limit` 吗？",
            en=f"The gradient `{_short(grad)}` has norm `{norm:.4g}`, above the limit `2.0`, and passed as it is. Is it the norm of the "
            "whole tensor that is compared, and with the `limit` of this call?",
        )
    if isinstance(got, Tensor) and got.shape == grad.shape and torch.equal(got, grad.clamp(-2.0, 2.0)):
        refuse(
            "clipped_entries",
            zh=f"每个元素都被单独截断了：`{_short(grad)}` 变成 `{_short(got)}`，方向变了，范数也还超过上限。",
            en=f"Every entry was clipped on its own: `{_short(grad)}` became `{_short(got)}`. The direction has changed, "
            "and the norm is still above the limit.",
        )
    if isinstance(got, Tensor) and (got.shape, got.dtype) == (grad.shape, grad.dtype):
        _examine_length(grad, got)
    expect_like(got, want, "返回的梯度", "the gradient that the hook returns")


def _examine_length(grad, got):
    got, norm, length = got.detach(), grad.norm().item(), got.norm().item()
    if not torch.allclose(got * norm, grad * length, rtol=1e-4):
        refuse(
            "wrong_direction",
            zh=f"方向变了：`{_short(grad)}` 变成了 `{_short(got)}`。范数要对整个张量算，每个元素按同样的比例缩短。",
            en=f"The direction has changed: `{_short(grad)}` became `{_short(got)}`. The norm is that of the whole tensor, and "
            "every entry shrinks in the same proportion.",
        )
    if abs(length - 2.0) > 1e-3:
        refuse(
            "wrong_length",
            zh=f"方向没变，长度不对：上限是 `2.0`，`{_short(grad)}`（范数 `{norm:.4g}`）变成了 `{_short(got)}`，"
            f"范数是 `{length:.4g}`。量的是哪一种范数，除以的又是什么？",
            en=f"The direction is right, the length is not: the limit is `2.0`, and `{_short(grad)}` (norm `{norm:.4g}`) "
            f"became `{_short(got)}`, with norm `{length:.4g}`. Which norm is measured, and what is divided by what?",
        )


def _examine_small(hook, grad, limit):
    given = grad.clone()
    got = hook(given)
    if not torch.equal(given, grad):
        refuse(
            "edited_small",
            zh=f"范数没有超过上限的梯度应当原样通过；`cap({limit})` 返回的钩子却把传进来的 `{_short(grad)}` 原地改成了 `{_short(given)}`。",
            en=f"A gradient whose norm is within the limit should pass as it is; the hook that `cap({limit})` returned edited "
            f"`{_short(grad)}` in place: it is `{_short(given)}` now.",
        )
    if isinstance(got, Tensor) and not torch.allclose(got, grad):
        refuse(
            "changed_small",
            zh=f"范数没有超过上限的梯度应当原样通过；`cap({limit})` 返回的钩子却把 `{_short(grad)}` 变成了 `{_short(got)}`。",
            en=f"A gradient whose norm is within the limit should pass as it is; the hook that `cap({limit})` returned made "
            f"`{_short(got)}` of `{_short(grad)}`.",
        )
    if got is not None:
        expect_like(got, grad, "返回的梯度", "the gradient that the hook returns")


def _examine_zero(hook):
    got = hook(torch.zeros(3))
    if isinstance(got, Tensor) and got.isnan().any():
        refuse(
            "nan_at_zero",
            zh="梯度全是 0 时，返回了 NaN：有一处除以了 0。一个 NaN 足以毁掉所有权重。",
            en="For a gradient of zeros the hook returned NaN: something was divided by 0. A single NaN is enough to ruin "
            "every weight.",
        )
    _examine_small(hook, torch.zeros(3), 2.0)


def _short(tensor):
    return [float(f"{value:.4g}") for value in tensor.flatten().tolist()]


def cap_in_place(limit):
    def hook(grad):
        if grad.norm() > limit:
            grad *= limit / grad.norm()

    return hook


def cap_without_return(limit):
    def hook(grad):
        if grad.norm() > limit:
            grad = grad * (limit / grad.norm())

    return hook


def cap_rows(limit):
    def hook(grad):
        norm = grad.norm(dim=-1, keepdim=True)
        return torch.where(norm > limit, grad * (limit / norm), grad)

    return hook


def edited_small(limit):
    def hook(grad):
        if grad.norm() > limit:
            return grad * (limit / grad.norm())
        grad.zero_()

    return hook


CAP = Exercise(
    "12.A",
    examine_cap,
    cap,
    {
        "not_a_hook": lambda limit: torch.ones(2) * limit,
        "edited_in_place": cap_in_place,
        "returned_nothing": cap_without_return,
        "clipped_entries": lambda limit: lambda grad: grad.clamp(-limit, limit),
        "edited_small": edited_small,
        "changed_small": lambda limit: lambda grad: grad * limit / (grad.norm() + 1e-6),
        "nan_at_zero": lambda limit: lambda grad: grad / grad.norm() * grad.norm().clamp(max=limit),
        "wrong_length": lambda limit: lambda grad: grad / grad.norm() if grad.norm() > limit else grad,
        "wrong_direction": cap_rows,
        "unchanged": lambda limit: lambda grad: grad * (limit / grad.norm()) if (grad.abs() > limit).any() else grad,
        "wrong_shape": lambda limit: lambda grad: grad.norm().clamp(max=limit),
        "wrong_type": lambda limit: lambda grad: min(limit, grad.norm().item()),
    },
    zh="方向不变，长度不超过上限，小梯度原样通过。",
    en="The direction stays, the length keeps within the limit, and small gradients pass as they are.",
)

# ---- 12.B: weight decay for a whole model ----


def decay(model, strength):
    def hook_for(param):
        return lambda grad: grad + strength * param.detach()

    return [param.register_hook(hook_for(param)) for param in model.parameters() if param.requires_grad]


class _Stack(nn.Module):
    """Parameters of one shape, so that a hook with the wrong one raises nothing; one is frozen, one in a child of a child."""

    def __init__(self) -> None:
        super().__init__()
        rows = (torch.randperm(8) + 1.0).reshape(4, 2)  # distinct whole numbers: sums are exact
        self.weight, self.gain, self.frozen, last = (nn.Parameter(row) for row in rows)
        self.frozen.requires_grad_(False)
        self.child = nn.ModuleDict({"inner": nn.ParameterDict({"bias": last})})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.gain + (x * 2) * self.child["inner"]["bias"] + self.frozen


class _Sum(nn.Module):
    """Two parameters that receive one gradient, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.left + self.right) * x


def examine_decay(answer):
    model, x, strength = _Stack(), torch.tensor([2.0, -3.0]), 0.5
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    (model(x) * 3).sum().backward()  # what is there before must stay
    handles = answer(model, strength)
    if any(not torch.equal(param, values[name]) for name, param in model.named_parameters()):
        refuse(
            "changed_weights",
            zh="`decay` 把参数本身改了。它只该挂上钩子，改的是以后的梯度。",
            en="`decay` has changed the parameters themselves. It should only hang hooks, which change gradients to come.",
        )
    if model.frozen.requires_grad:
        refuse(
            "unfrozen",
            zh="有一个参数本来是冻结的，`requires_grad` 是 `False`，现在成了 `True`，以后会被训练。这样的参数应当跳过。",
            en="A parameter was frozen, with `requires_grad` `False`; now it is `True` and the parameter will train. Leave such "
            "parameters out.",
        )
    if not isinstance(handles, list | tuple):
        refuse(
            "no_handles",
            zh=f"应当返回句柄的列表，好让别人取下这些钩子；得到的是 `{type(handles).__name__}`。",
            en=f"Return a list of handles, so that the hooks can be taken off; found `{type(handles).__name__}`.",
        )
    refuse_other_items(handles)
    if not handles:
        refuse(
            "no_hooks",
            zh="返回的列表是空的：钩子挂上了吗，句柄收进列表了吗？",
            en="The list that was returned is empty: are the hooks there, and are their handles put into the list?",
        )
    with torch.no_grad():  # a step of training
        for param in model.parameters():
            param.add_(1.0)
    before = copy.deepcopy(model)  # a deep copy has none of the tensor hooks
    plain, found = _gradients(before, x), _gradients(model, x)
    if not all(map(torch.equal, model.parameters(), before.parameters())):
        refuse(
            "changed_in_backward",
            zh="反向传播改动了参数本身：钩子里有一行在原地改它。`param.data` 和参数共用一块内存。",
            en="Backward has changed the parameters themselves: a line of the hook edits them in place. `param.data` is in the "
            "same memory as the parameter.",
        )
    _examine_decayed(model, plain, found, strength, values)
    _examine_neighbours(answer)
    with torch.no_grad():  # and one more step
        for param in model.parameters():
            param.add_(1.0)
    plain, found = _gradients(copy.deepcopy(model), 2 * x), _gradients(model, 2 * x)
    want = {name: plain[name] + strength * dict(model.named_parameters())[name].detach() for name in plain}
    if not all(torch.allclose(found[name], want[name]) for name in plain):
        refuse(
            "first_only",
            zh="第一次反向对了，换了输入、更新了参数再反向一次，就不对了。钩子都还挂着吗？每次都是从传进来的 `grad` 算起吗？",
            en="Right in the first backward, wrong in a second one with another input and updated parameters. Are the hooks "
            "still there, and do they start from the `grad` they are given each time?",
        )
    model(2 * x).sum().backward()  # on top of the last
    if not all(torch.allclose(dict(model.named_parameters())[name].grad, 2 * want[name]) for name in want):
        refuse(
            "empty_only",
            zh="`.grad` 里已经有上一次反向的梯度时，结果就不对了：连着反向两次、中间不清零，`.grad` 应当是两次之和，惩罚项也有两份。你的钩子看 `.grad` 了吗？",
            en="Wrong where `.grad` already holds the gradient of an earlier backward: after two backwards without clearing, `.grad` should "
            "be the sum of both, with the penalty twice. Does your hook look at `.grad`?",
        )
    for handle in handles:
        handle.remove()
    if any(not torch.allclose(found, plain[name]) for name, found in _gradients(model, 2 * x).items()):
        refuse(
            "not_removable",
            zh="对返回的每个句柄都调用了 `.remove()`，可梯度里还是多出一份：有的钩子没有交出句柄。",
            en="After `.remove()` of every handle that was returned the gradients still have something added: a hook is "
            "there whose handle was not handed out.",
        )
    _examine_two_models(answer)


def _examine_two_models(answer):
    models, strengths, x = (_Sum(), _Sum()), (0.5, 2.0), torch.tensor([10.0, 20.0])
    refuse_same_object(*[answer(model, strength) for model, strength in zip(models, strengths, strict=True)])
    for model, strength in zip(models, strengths, strict=True):
        want = {name: x + strength * param.detach() for name, param in model.named_parameters()}
        if not all(torch.allclose(grad, want[name]) for name, grad in _gradients(model, x).items()):
            refuse_latest_call()


def _gradients(model, x):
    model.zero_grad()
    model(x).sum().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.requires_grad}


def _examine_decayed(model, plain, found, strength, values):
    added = {name: found[name] - plain[name] for name in plain}
    want = {name: strength * param.detach() for name, param in model.named_parameters()}
    if not any(map(torch.any, added.values())):
        refuse(
            "nothing_added",
            zh="梯度和不挂钩子时一样。钩子挂上了吗？它返回了新值吗？（它触发时 `.grad` 还没有写入，改那里没有用。）",
            en="The gradients are what they are without a hook. Are the hooks there, and do they return the new value? "
            "(When they fire `.grad` is not yet written; changing it does nothing.)",
        )
    if all(torch.allclose(found[name], want[name]) for name in found):
        refuse(
            "replaced",
            zh="梯度里只剩下惩罚项，损失那一份不见了：钩子返回的是什么，梯度就是什么。",
            en="Only the penalty is left of the gradient, the loss's share is gone: what a hook returns is the whole "
            "gradient from then on.",
        )
    if all(torch.allclose(added[name], strength * values[name]) for name in added):
        refuse(
            "stale",
            zh="参数更新之后，加上去的还是挂钩子那一刻的旧值。参数的值是在钩子里面读的，还是在外面？",
            en="After the parameters were updated, what is added still comes from their values when the hook was hung. Is "
            "the parameter's value read inside the hook, or outside?",
        )
    if all(torch.allclose(share, want["child.inner.bias"]) for share in added.values()):
        refuse(
            "last_one",
            zh="每个参数加上的，都是 `strength` 乘以最后那个参数。多半是循环变量：它要到钩子触发时才去读，那时循环早就结束了；也可能是几个参数共用了一个键。",
            en="Every parameter has `strength` times the last parameter added. Most likely a loop variable: it is read when the hook "
            "fires, and by then the loop is over. Or several parameters share one key.",
        )
    missed = [name for name in added if not added[name].any()]
    if missed:
        refuse(
            "missed",
            zh=f"这些参数的梯度没有变：`{missed}`。",
            en=f"The gradients of these parameters have not changed: `{missed}`.",
        )
    for name in found:
        if not torch.allclose(found[name], plain[name] + want[name]):
            value, share = _short(dict(model.named_parameters())[name]), _short(added[name])
            refuse(
                "wrong_addend",
                zh=f"`strength` 是 `{strength}`，反向时 `{name}` 的值是 `{value}`，它的梯度却多出了 `{share}`。",
                en=f"`strength` is `{strength}` and in backward the value of `{name}` was `{value}`, but `{share}` was added "
                "to its gradient.",
            )


def _examine_neighbours(answer):
    model = _Sum()
    answer(model, 0.5)
    x = torch.tensor([10.0, 20.0])
    found = _gradients(model, x)
    if all(torch.equal(grad, x) for grad in found.values()):
        refuse(
            "asks_for_grad",
            zh="换一个还没有反向过的模型，就什么也没有加上：`.grad` 都还是 `None`。挂不挂钩子，看的是 `requires_grad`。",
            en="On a model that has not been through backward yet nothing was added: every `.grad` is still `None`. Whether to hang "
            "a hook depends on `requires_grad`.",
        )
    if not (torch.allclose(found["left"], torch.tensor([10.5, 20.5]))
            and torch.allclose(found["right"], torch.tensor([11.0, 21.0]))):  # fmt: skip
        refuse(
            "edited_in_place",
            zh="两个参数相加，收到的是同一块内存里的梯度；其中一个的惩罚项跑到了另一个头上。钩子是不是改了传进来的 `grad`？",
            en="Two parameters that are added receive a gradient in the same memory, and the penalty of one has reached the "
            "other. Does the hook edit the `grad` it is given?",
        )


_LATEST = {}  # where some keep what each call should keep for itself


def _hang(model, make_hook):
    return [param.register_hook(make_hook(param)) for param in model.parameters() if param.requires_grad]


def decay_last_one(model, strength):
    handles = []
    for param in [param for param in model.parameters() if param.requires_grad]:
        handles.append(param.register_hook(lambda grad: grad + strength * param.detach()))  # noqa: B023
    return handles


def decay_stale(model, strength):
    def make_hook(param):
        penalty = strength * param.detach()
        return lambda grad: grad + penalty

    return _hang(model, make_hook)


def decay_without_return(model, strength):
    def make_hook(param):
        def hook(grad):
            grad = grad + strength * param.detach()

        return hook

    return _hang(model, make_hook)


def decay_in_place(model, strength):
    def make_hook(param):
        def hook(grad):
            grad += strength * param.detach()

        return hook

    return _hang(model, make_hook)


def decay_weights(model, strength):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 - strength)
    return []


def decay_one_handle(model, strength):
    return decay(model, strength)[:1]


def decay_first_only(model, strength):
    return [model.weight.register_hook(lambda grad: grad + strength * model.weight.detach())]


def decay_frozen_too(model, strength):
    return [param.register_hook(lambda grad, param=param: grad + strength * param) for param in model.parameters()]


def decay_unfrozen(model, strength):
    model.requires_grad_(True)
    return decay(model, strength)


def decay_in_data(model, strength):
    return _hang(model, lambda param: lambda grad: grad + param.data.mul_(strength))


def decay_once(model, strength):
    def make_hook(param):
        first = {}
        return lambda grad: first.setdefault("grad", grad + strength * param.detach())

    return _hang(model, make_hook)


def decay_where_grad(model, strength):
    return [
        param.register_hook(lambda grad, param=param: grad + strength * param.detach())
        for param in model.parameters()
        if param.requires_grad and param.grad is not None
    ]


def decay_into_one_list(model, strength, handles=[]):  # noqa: B006
    handles += decay(model, strength)
    return handles


def decay_by_the_latest(model, strength):
    _LATEST["strength"] = strength
    return _hang(model, lambda param: lambda grad: grad + _LATEST["strength"] * param.detach())


def empty_only(model, strength):
    def hook_for(param):
        return lambda grad: grad + strength * param.detach() if param.grad is None else grad

    return [param.register_hook(hook_for(param)) for param in model.parameters() if param.requires_grad]


DECAY = Exercise(
    "12.B",
    examine_decay,
    decay,
    {
        "changed_weights": decay_weights,
        "unfrozen": decay_unfrozen,
        "changed_in_backward": decay_in_data,
        "first_only": decay_once,
        "no_handles": lambda model, strength: decay(model, strength) and None,
        "other_items": lambda model, strength: list(enumerate(decay(model, strength))),
        "same_object": decay_into_one_list,
        "asks_for_grad": decay_where_grad,
        "no_hooks": lambda model, strength: [] if decay(model, strength) else None,
        "nothing_added": decay_without_return,
        "replaced": lambda model, strength: _hang(model, lambda param: lambda grad: strength * param.detach()),
        "stale": decay_stale,
        "last_one": decay_last_one,
        "missed": decay_first_only,
        "raised": decay_frozen_too,
        "wrong_addend": lambda model, strength: _hang(
            model, lambda param: lambda grad: grad - strength * param.detach()
        ),
        "edited_in_place": decay_in_place,
        "empty_only": empty_only,
        "not_removable": decay_one_handle,
        "changed_given": lambda model, strength: model.zero_grad() or decay(model, strength),
        "latest_call": decay_by_the_latest,
    },
    zh="每个参数都按自己在反向时的值加了一份，冻结的不受影响，钩子也能全部取下。",
    en="Each parameter gets its share by its own value in that backward, frozen ones are left alone, and all hooks can be taken "
    "off.",
)

# ---- 12.C: freeze some rows of a weight ----


def freeze_rows(weight, rows):
    def hook(grad):
        grad = grad.clone()
        grad[rows] = 0
        return grad

    return weight.register_hook(hook)


def examine_freeze_rows(answer):
    factors = torch.arange(1.0, 16.0).reshape(5, 3)  # no row beside the frozen ones is their complement
    for dtype, rows in ((torch.float32, [0, 2]), (torch.float64, [3]), (torch.bfloat16, [1, 2])):
        for weight_first in (True, False):
            _examine_frozen(answer, factors.to(dtype), rows, weight_first)
    weights, frozen = [nn.Parameter(torch.ones(4, 2)) for _ in range(2)], ([0, 3], [1])
    for weight, rows in zip(weights, frozen, strict=True):
        answer(weight, list(rows))
    for weight, rows in zip(weights, frozen, strict=True):
        weight.sum().backward()
        zeros = [row for row in range(4) if not weight.grad[row].any()]
        if not zeros:
            refuse(
                "gone_with_handle",
                zh="换一个 `weight`，返回的句柄不留着，那几行就还有梯度：句柄没有人留着，钩子就没了。",
                en="With another `weight`, and the handle not kept, the rows still had a gradient: where nobody keeps the handle, "
                "the hook is gone.",
            )
        if zeros != rows:
            refuse_latest_call()
    weight = nn.Parameter(torch.ones(4, 2))
    refuse_removing_others(weight.register_hook, lambda: answer(weight, [1]))


def _examine_frozen(answer, factors, rows, weight_first):
    weight, neighbour = (nn.Parameter(torch.ones_like(factors)) for _ in range(2))

    def gradient(times=1):
        weight.grad = neighbour.grad = None
        both = weight + neighbour if weight_first else neighbour + weight  # one gradient for the two of them
        try:
            (both * factors * times).sum().backward()
        except RuntimeError as error:
            if "has changed the type of value" not in str(error):
                raise
            refuse(
                "changed_dtype",
                zh=f"换成 `{weight.dtype}` 的 `weight`，反向就报错：钩子返回的是另一种数据类型。掩码是哪种，乘出来的又是哪种？",
                en=f"For a `weight` of `{weight.dtype}` backward raises: the hook returns another dtype. Of which is the mask, and "
                "of which the product?",
            )
        return weight.grad

    handle = answer(weight, list(rows))
    if not weight.requires_grad:
        refuse(
            "no_gradient",
            zh="整个 `weight` 都不再需要梯度了：`requires_grad` 管的是整个张量，不能只管几行。",
            en="All of `weight` no longer requires a gradient: `requires_grad` rules a whole tensor, not some of its rows.",
        )
    if not torch.equal(weight, torch.ones_like(weight)):
        refuse(
            "changed_weights",
            zh="`weight` 的数值变了。冻结是指往后不再更新，不是清零。",
            en="The values of `weight` have changed. Frozen means no more updates; it does not mean zero.",
        )
    if isinstance(handle, list | tuple) or not hasattr(handle, "remove"):  # a list has a remove() of its own
        refuse(
            "no_handle",
            zh=f"应当返回一个句柄，好让别人解冻；得到的是 `{type(handle).__name__}`。",
            en=f"Return one handle, so that the rows can be thawed again; found `{type(handle).__name__}`.",
        )
    got, want = gradient(), factors.clone()
    want[rows] = 0
    if torch.equal(got, factors) and weight._backward_hooks:
        refuse(
            "returned_nothing",
            zh="`weight` 上有钩子，梯度却和原来一样：钩子返回新值了吗？返回的那个真的改过吗？（`grad[rows].zero_()` 改的是取出来的副本；钩子触发时 `weight.grad` 还没有写入，改那里也没有用。）",
            en="There is a hook on `weight`, but the gradient is what it was: does the hook return a new value, and has that been "
            "changed at all? (`grad[rows].zero_()` edits a copy of these rows; and `weight.grad` is not yet written when the hook "
            "fires, changing it does nothing.)",
        )
    _examine_rows(weight, got, want, factors, rows)
    if not torch.equal(neighbour.grad, factors):
        refuse(
            "edited_in_place",
            zh="`weight` 的梯度对了，可是和它相加的另一个参数，梯度里也有几行变成了 0：钩子改的是两者共用的那块内存。",
            en="The gradient of `weight` is right, but another parameter that was added to it has rows of 0 as well: the hook "
            "edited memory that the two share.",
        )
    if not torch.equal(gradient(times=2), 2 * want):
        refuse(
            "first_only",
            zh="第一次反向对了，把损失乘以 2 再反向一次，就不对了。钩子还挂着吗？每次都是从传进来的 `grad` 算起吗？",
            en="Right in the first backward, wrong in a second one with the loss times 2. Is the hook still there, and does it "
            "start from the `grad` it is given each time?",
        )
    if not torch.equal(weight, torch.ones_like(weight)):
        refuse(
            "changed_in_backward",
            zh="反向传播以后，`weight` 的数值变了。冻结是指往后不再更新，不是清零。",
            en="After backward the values of `weight` have changed. Frozen means no more updates; it does not mean zero.",
        )
    handle.remove()
    if not torch.equal(gradient(), factors):
        refuse(
            "not_removable",
            zh="对返回的句柄调用 `.remove()` 之后，那几行还是 0。",
            en="After `.remove()` of the handle that was returned, the rows are still 0.",
        )


def _examine_rows(weight, got, want, factors, rows):
    if torch.equal(got, factors) and weight._post_accumulate_grad_hooks:
        refuse(
            "edited_copy",
            zh="`weight` 上挂着累加后钩子，`weight.grad` 却和原来一样。改的是 `weight.grad` 本身吗？`.clone()` 和 `weight.grad[rows]` 给的都是副本。",
            en="There is a post-accumulate-grad hook on `weight`, but `weight.grad` is what it was. Is it `weight.grad` itself "
            "that is edited? `.clone()` and `weight.grad[rows]` give a copy.",
        )
    if torch.equal(got, factors):
        refuse(
            "not_frozen",
            zh="梯度和原来一样，`weight` 上也没有钩子。是不是已经取下了？不然，它挂在谁身上？`weight[rows]` 每次都是一个新张量，没有人用它计算。",
            en="The gradient is what it was, and there is no hook on `weight`. Is it off again already? If not, on what does it "
            "hang? `weight[rows]` is a new tensor each time, and nobody computes with it.",
        )
    if not got.any():
        refuse(
            "froze_everything",
            zh=f"所有的行都成了 0，应当只有 `{rows}` 这几行。",
            en=f"Every row has become 0; only the rows `{rows}` should.",
        )
    rest = factors - want
    if torch.equal(got, rest):
        refuse(
            "inverted",
            zh="反了：要冻结的行还有梯度，其余的行成了 0。",
            en="The wrong way round: the rows to freeze have a gradient and the others have become 0.",
        )
    zeros = [row for row in range(len(got)) if not got[row].any()]
    if zeros != rows:
        refuse(
            "wrong_rows",
            zh=f"要冻结的是 `{rows}`，梯度为 0 的行却是 `{zeros}`。",
            en=f"The rows to freeze are `{rows}`, the rows whose gradient is 0 are `{zeros}`.",
        )
    expect_like(got, want, "`weight` 的梯度", "the gradient of `weight`")


def _masked(weight, mask):
    return weight.register_hook(lambda grad: grad * mask.to(grad.dtype))


def freeze_in_place(weight, rows):
    def hook(grad):
        grad[rows] = 0

    return weight.register_hook(hook)


def freeze_without_return(weight, rows):
    def hook(grad):
        grad = grad.clone()
        grad[rows] = 0

    return weight.register_hook(hook)


def freeze_rescaled(weight, rows):
    mask = torch.ones(len(weight), 1)
    mask[rows] = 0
    return _masked(weight, mask / mask.mean())


def freeze_by_zeroing(weight, rows):
    with torch.no_grad():
        weight[rows] = 0
    return freeze_rows(weight, rows)


def freeze_by_zeroing_in_backward(weight, rows):
    def hook(grad):
        weight.data[rows] = 0
        grad = grad.clone()
        grad[rows] = 0
        return grad

    return weight.register_hook(hook)


def freeze_inverted(weight, rows):
    mask = torch.zeros(len(weight), 1)
    mask[rows] = 1
    return _masked(weight, mask)


def freeze_float_mask(weight, rows):
    mask = torch.ones(len(weight), 1)
    mask[rows] = 0
    return weight.register_hook(lambda grad: grad * mask)


def freeze_columns(weight, rows):
    def hook(grad):
        grad = grad.clone()
        grad[:, rows[0] % 3] = 0
        return grad

    return weight.register_hook(hook)


def freeze_twice(weight, rows):
    freeze_rows(weight, rows)
    return freeze_rows(weight, rows)


def freeze_once(weight, rows):
    first, mask = {}, torch.ones_like(weight)
    mask[rows] = 0
    return weight.register_hook(lambda grad: first.setdefault("grad", grad * mask))


def freeze_a_copy(weight, rows):
    def hook(param):
        param.grad[rows].zero_()

    return weight.register_post_accumulate_grad_hook(hook)


def freeze_the_latest(weight, rows):
    _LATEST["rows"] = rows

    def hook(grad):
        grad = grad.clone()
        grad[_LATEST["rows"]] = 0
        return grad

    return weight.register_hook(hook)


class _Cleared:
    """A handle that takes off whatever is there."""

    def __init__(self, weight, handle):
        self.weight = weight

    def remove(self):
        self.weight._backward_hooks.clear()


class _Holding:
    """A handle that alone keeps the Node which has the hook."""

    def __init__(self, node, hook):
        self.node, self.handle = node, node.register_prehook(hook)

    def remove(self):
        self.handle.remove()


def freeze_on_the_node(weight, rows):
    def hook(grads):
        grad = grads[0].clone()
        grad[rows] = 0
        return (grad,)

    return _Holding(get_gradient_edge(weight).node, hook)


def freeze_and_empty(weight, rows):
    keep = torch.ones(len(weight), 1)
    while rows:
        keep[rows.pop()] = 0
    return _masked(weight, keep)


FREEZE_ROWS = Exercise(
    "12.C",
    examine_freeze_rows,
    freeze_rows,
    {
        "changed_given": freeze_and_empty,
        "removed_others": lambda weight, rows: _Cleared(weight, freeze_rows(weight, rows)),
        "edited_in_place": freeze_in_place,
        "first_only": freeze_once,
        "not_frozen": lambda weight, rows: weight[rows].register_hook(lambda grad: grad * 0),
        "edited_copy": freeze_a_copy,
        "froze_everything": lambda weight, rows: weight.register_hook(lambda grad: grad * 0),
        "inverted": freeze_inverted,
        "changed_weights": freeze_by_zeroing,
        "changed_in_backward": freeze_by_zeroing_in_backward,
        "no_handle": lambda weight, rows: freeze_rows(weight, rows) and None,
        "no_gradient": lambda weight, rows: weight.requires_grad_(False),
        "changed_dtype": freeze_float_mask,
        "wrong_rows": freeze_columns,
        "returned_nothing": freeze_without_return,
        "wrong_values": freeze_rescaled,
        "not_removable": freeze_twice,
        "gone_with_handle": freeze_on_the_node,
        "latest_call": freeze_the_latest,
    },
    zh="只有那几行不再更新，别人的梯度分毫未动，句柄一取下就解冻。",
    en="Only those rows stop moving, no other gradient is touched, and removing the handle thaws them.",
)

CHECKS = [
    Prediction(
        "12.1",
        zh="新值从 `z` 逆着前向继续走，先到 `x + y`，所以 `x` 和 `y` 变了。`w` 的梯度就是 `z` 的数值，不经过这个钩子。",
        en="The new value goes on from `z`, against the direction of forward, into `x + y`: `x` and `y` change. The "
        "gradient of `w` is the value of `z` and does not pass this hook.",
    ),
    Prediction(
        "12.2",
        zh="`setdefault` 返回字典里的值，lambda 又把它返回给了 PyTorch：从第二次起，流过去的一直是第一次的梯度。没有报错，没有警告。",
        en="`setdefault` returns what the dictionary holds, and the lambda hands that to PyTorch: from the second time on "
        "it is always the first gradient that goes on. No error, no warning.",
    ),
    Prediction(
        "12.3",
        zh="`d` 的梯度根本不流向 `a`，`a.grad` 却也变成了 100 倍：加法把同一个张量交给了两边，改了一边就改了另一边。",
        en="The gradient of `d` never goes to `a`, and `a.grad` is still 100 times what it was: the addition hands one and "
        "the same tensor to both sides, and an edit on one side is an edit on the other.",
    ),
    Prediction(
        "12.4",
        zh="每次反向，钩子都触发一次。损失除以了 4，惩罚项没有，于是它加了 4 遍。",
        en="The hook fires in every backward. The loss was divided by 4 and the penalty was not, so it was added 4 times.",
    ),
    CAP,
    DECAY,
    FREEZE_ROWS,
]
