"""Checks of notebook 25: clipping gradients."""

import copy
import numbers

import torch
from torch import Tensor, nn

from hooklab import clip, clip_gradients, hooks_on, select
from hooklab.course.check import Exercise, Prediction, refuse, refuse_same_object

# ---- 25.A: how much would clipping touch? ----


def clipped_share(model, bound):
    grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
    return (torch.cat(grads).abs() > bound).double().mean().item()


def examine_share(answer):
    torch.manual_seed(1)  # no two ways of counting agree
    for bound in (0.5, 2.0):
        _examine_share(answer, bound)


def _examine_share(answer, bound):
    """Gradients of a GRU in whole multiples of half the bound: some are at the bound, and shares are exact."""
    body = nn.Sequential(nn.GRU(2, 3))
    model = nn.ModuleDict({"embed": nn.Embedding(6, 2), "body": body, "head": nn.Linear(3, 6)})
    model["embed"].requires_grad_(False)
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))  # in no layer
    params = [param for param in model.parameters() if param.requires_grad]
    for number, param in enumerate(params):
        size = 7 if number == 0 else 4  # so that the parameters have different shares
        param.grad = torch.randint(-size, size, param.shape) * bound / 2
    params[-1].grad = None  # not used in this backward
    params[1].requires_grad_(False)  # frozen since then: its gradient is still there, and clipped with the others
    grads = torch.cat([param.grad.flatten() for param in params[:-1]])
    before = copy.deepcopy([param.grad for param in params])
    got = answer(model, bound)
    if params[-1].grad is not None:
        refuse(
            "filled_none",
            zh="有一个参数的 `.grad` 原本是 `None`，函数返回以后却有了：没有梯度的参数，优化器会跳过，填了 0 就不跳了。",
            en="The `.grad` of one parameter was `None`, and after the function it is there: the optimizer skips a parameter "
            "without a gradient, but not one that is filled with 0.",
        )
    if any(param.grad is None for param in params[:-1]):
        refuse(
            "dropped_gradients",
            zh="函数返回以后，`.grad` 成了 `None`：优化器没有梯度可用了。",
            en="After the function has returned `.grad` is `None`: nothing is left for the optimizer.",
        )
    if any(old is not None and not torch.equal(param.grad, old)
           for param, old in zip(params, before, strict=True)):  # fmt: skip
        refuse(
            "changed_gradients",
            zh="梯度被改动了：要的是看一眼，不是真的裁剪。`clip_grad_value_` 和 `clamp_` 都原地改。",
            en="The gradients were changed: look, and do not clip. `clip_grad_value_` and `clamp_` work in place.",
        )
    if not isinstance(got, numbers.Real) and not (isinstance(got, Tensor) and got.numel() == 1):
        refuse(
            "wrong_type",
            zh=f"应当返回一个数，得到的是 `{type(got).__name__}`。",
            en=f"Return one number; found `{type(got).__name__}`.",
        )
    _examine_number(float(got), grads, bound, model)


def _examine_number(got, grads, bound, model):
    beyond = grads.abs() > bound
    want, total = beyond.double().mean().item(), sum(param.numel() for param in model.parameters())
    if abs(got - want) < 1e-4:
        return
    if got > 1:
        refuse(
            "not_a_share",
            zh=f"应当在 0 和 1 之间，得到的是 `{got:.4g}`：是个数，还是百分数？",
            en=f"Expected between 0 and 1, found `{got:.4g}`: is it a count, or per cent?",
        )
    if abs(got - (1 - want)) < 1e-4:
        refuse(
            "inverted",
            zh="反了：这是裁剪不会改变的那些元素的占比。",
            en="The wrong way round: this is the share of entries that clipping leaves as they are.",
        )
    if abs(got - (grads.abs() >= bound).double().mean().item()) < 1e-4:
        refuse(
            "counts_the_bound",
            zh=f"正好等于 ±`{bound}` 的元素也算进去了，可裁剪不会改变它们。",
            en=f"Entries that equal ±`{bound}` were counted too, and clipping does not change those.",
        )
    if abs(got - (grads > bound).double().mean().item()) < 1e-4:
        refuse(
            "one_sided",
            zh=f"小于 -`{bound}` 的元素没有数到：上下限有两边。",
            en=f"Entries below -`{bound}` were not counted: there are two bounds.",
        )
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    if any(abs(got - beyond.sum().item() / count) < 1e-4 for count in (total, trained)):
        refuse(
            "counts_missing",
            zh=f"分子对，分母不对：有梯度的元素一共 `{len(grads)}` 个。没有梯度的参数是不是也数进去了？",
            en=f"The count is right, what it is divided by is not: `{len(grads)}` entries have a gradient. Were parameters "
            "without one counted in?",
        )
    if abs(got - (weights.abs() > bound).double().mean().item()) < 1e-4:
        refuse(
            "weights",
            zh="这是参数的数值越界的占比；要数的是梯度。",
            en="This is the share of the parameters' own values beyond the bound; count their gradients.",
        )
    shares = [(param.grad.abs() > bound).double().mean() for param in model.parameters() if param.grad is not None]
    if abs(got - torch.stack(shares).mean().item()) < 1e-4:
        refuse(
            "mean_of_shares",
            zh="这是各参数占比的平均：一个只有几个元素的偏置，和一个大矩阵算得一样重。要把所有元素放在一起数。",
            en="This is the mean of the parameters' shares: a bias of a few entries weighs as much as a large matrix. Count "
            "all entries together.",
        )
    refuse(
        "wrong_share",
        zh=f"`{len(grads)}` 个元素里有 `{int(beyond.sum())}` 个超出 ±`{bound}`，得到的却是 `{got:.4g}`。",
        en=f"Of `{len(grads)}` entries `{int(beyond.sum())}` are beyond ±`{bound}`; found `{got:.4g}`.",
    )


def _shares(model, beyond):
    return [beyond(param.grad) for param in model.parameters() if param.grad is not None]


def _all_grads(model):
    return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])


def share_by_clipping(model, bound):
    before = _all_grads(model).clone()
    nn.utils.clip_grad_value_(model.parameters(), bound)
    return (before != _all_grads(model)).double().mean()


def share_then_zero_grad(model, bound):
    share = clipped_share(model, bound)
    model.zero_grad()
    return share


def share_filled_none(model, bound):
    share = clipped_share(model, bound)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    return share


def share_of_all(model, bound):
    return (_all_grads(model).abs() > bound).sum() / sum(param.numel() for param in model.parameters())


def share_of_tensors(model, bound):
    touched = _shares(model, lambda grad: bool((grad.abs() > bound).any()))
    return sum(touched) / len(touched)


SHARE = Exercise(
    "25.A",
    examine_share,
    clipped_share,
    {
        "changed_gradients": share_by_clipping,
        "filled_none": share_filled_none,
        "dropped_gradients": share_then_zero_grad,
        "not_a_share": lambda model, bound: (_all_grads(model).abs() > bound).sum().item(),
        "counts_the_bound": lambda model, bound: (_all_grads(model).abs() >= bound).double().mean(),
        "one_sided": lambda model, bound: (_all_grads(model) > bound).double().mean(),
        "inverted": lambda model, bound: (_all_grads(model).abs() <= bound).double().mean(),
        "counts_missing": share_of_all,
        "mean_of_shares": lambda model, bound: torch.stack(
            _shares(model, lambda grad: (grad.abs() > bound).double().mean())
        ).mean(),
        "weights": lambda model, bound: (
            (torch.cat([param.flatten() for param in model.parameters()]).abs() > bound).double().mean()
        ),
        "wrong_share": share_of_tensors,
        "wrong_type": lambda model, bound: _all_grads(model).abs() > bound,
        "raised": lambda model, bound: torch.cat([param.grad.flatten() for param in model.parameters()]),
    },
    zh="定上限之前先看这个数：占比很高，说明裁剪改写了大半梯度；一直是 0，说明它从不起作用。",
    en="Look at this number before choosing a bound: if it is high, clipping rewrites most of the gradient; if it is always 0, "
    "clipping does nothing.",
)

# ---- 25.B: a bound for each part of a language model ----


def clip_by_group(model, bounds):
    handles = []
    for pattern, bound in bounds.items():
        hook = clip(-bound, bound)
        for layer in select(model, pattern).values():
            handles += [param.register_hook(hook) for param in layer.parameters() if param.requires_grad]
    return handles


class _LanguageModel(nn.Module):
    """Two GRU blocks with a norm each, and a head whose name begins like that of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"rnn": nn.GRU(3, 3, batch_first=True), "norm": nn.LayerNorm(3)}) for _ in range(2)
        )
        self.head = nn.Linear(3, 5)
        self.head_extra = nn.Linear(3, 5)
        self.blocks[0]["norm"].bias.requires_grad_(False)
        for block in self.blocks:
            block.register_parameter("gain", nn.Parameter(torch.ones(3)))  # in no layer of the block

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block.gain * block["norm"](block["rnn"](x)[0])
        return self.head(x) + self.head_extra(x)


class _Sum(nn.Module):
    """Two layers whose parameters are added and so receive a gradient in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.left.weight + self.right.weight) * x


def examine_groups(answer):
    torch.manual_seed(0)
    _examine_groups(answer, {"embed": 0.5, "blocks.*": 0.25, "head": 0.125})
    _examine_groups(answer, {"**.norm": 0.25, "embed": 1.0})
    _examine_groups(answer, {"blocks.1.rnn": 0.5})
    _examine_groups(answer, {"blocks.1": 0.5})
    _examine_groups(answer, {"blocks.*": 0.125, "**.norm": 0.5})
    _examine_groups(answer, {"**.norm": 0.5, "blocks.*": 0.125, "embed": 1.0})
    for names in (("left", "right"), ("right", "left")):
        _examine_neighbour(answer, *names)
    _examine_two_models(answer)


def _examine_groups(answer, bounds):
    model, tokens = _LanguageModel(), torch.randint(5, (4, 6))
    plain = {name: grad.clone() for name, grad in _gradients(model, tokens).items()}
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    handles = answer(model, dict(bounds))
    found = handles if isinstance(handles, list | tuple) else [handles]
    wrong = [item for item in found if isinstance(item, list | tuple) or not hasattr(item, "remove")]
    if wrong or not isinstance(handles, list | tuple):
        kind = type((wrong or [handles])[0]).__name__
        if kind in ("list", "tuple"):
            refuse(
                "nested_handles",
                zh=f"列表里应当直接是句柄，里面却还有 `{kind}`：用 `+=` 接起来，不要用 `append`。",
                en=f"The list should hold the handles themselves; there is a `{kind}` inside it: join with `+=`, not `append`.",
            )
        refuse(
            "no_handles",
            zh=f"应当返回句柄的列表，好让别人取下钩子；得到的是 `{kind}`。",
            en=f"Return a list of handles, so that the hooks can be taken off; found `{kind}`.",
        )
    for name, param in model.named_parameters():
        if param.requires_grad == (name in frozen):
            refuse(
                "thawed",
                zh=f"`{name}` 的 `requires_grad` 变了。冻结的参数不挂钩子，也不要解冻。",
                en=f"`requires_grad` of `{name}` was changed. A frozen parameter gets no hook, and stays frozen.",
            )
    first = _gradients(model, tokens)
    _compare(model, plain, first, bounds)
    if any(not torch.allclose(found, first[name]) for name, found in _gradients(model, tokens).items()):
        refuse(
            "first_backward_only",
            zh="第一次反向裁剪得对，第二次却不一样了：从此每一次反向都要裁剪。",
            en="Right in the first backward, different in the second: from now on every backward is to be clipped.",
        )
    (10 * model(tokens).square().sum()).backward()  # onto the gradients of the last one
    for name, param in model.named_parameters():
        if name in first and not torch.allclose(param.grad, 2 * first[name]):
            refuse(
                "clipped_sum",
                zh=f"连做两次反向，中间不清零，`{name}` 的 `.grad` 应当正好加倍，实际不是：裁剪的是 `.grad` 里的和，不是每次反向带来的那一份"
                "（第 6 节）。",
                en=f"Two backwards without clearing in between should double the `.grad` of `{name}`, and do not: what is clipped "
                "is the sum in `.grad`, not what each backward brings (section 6).",
            )
    for handle in handles:
        handle.remove()
    if any(not torch.allclose(found, plain[name]) for name, found in _gradients(model, tokens).items()):
        refuse(
            "not_removable",
            zh="对返回的每个句柄都调用了 `.remove()`，梯度还是被裁剪：有的钩子没有交出句柄。",
            en="After `.remove()` of every handle that was returned the gradients are still clipped: a hook is there whose "
            "handle was not handed out.",
        )


def _gradients(model, x):
    model.zero_grad()
    (10 * model(x).square().sum()).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def _compare(model, plain, found, bounds):
    wanted_bounds, latest = {}, {}
    for pattern, bound in bounds.items():
        for layer in select(model, pattern):
            for name in plain:
                if name.startswith(f"{layer}."):
                    wanted_bounds[name] = min(bound, wanted_bounds.get(name, bound))
                    latest[name] = bound
    last = list(bounds.values())[-1]
    chosen = [name for name in plain if name in wanted_bounds]
    if all(torch.allclose(found[name], plain[name]) for name in chosen):
        refuse(
            "not_clipped",
            zh="梯度和不挂钩子时一样。钩子挂上了吗，函数返回之后还在吗？它返回了新值吗？",
            en="The gradients are what they are without hooks. Were hooks hung, are they still there after the call, and do they "
            "return the new value?",
        )
    if len(set(bounds.values())) > 1 and all(
        torch.allclose(found[name], plain[name].clamp(-last, last)) for name in chosen
    ):
        refuse(
            "last_bound",
            zh=f"每一组用的都是最后一个上限 `{last}`。循环变量要到钩子触发时才去读，那时循环早就结束了。",
            en=f"Every group uses the last bound, `{last}`. A loop variable is read when the hook fires, and by then the loop "
            "is over.",
        )
    of_latest = {name: plain[name].clamp(-bound, bound) for name, bound in latest.items()}
    if latest != wanted_bounds and all(torch.allclose(found[name], of_latest[name]) for name in latest):
        name = next(name for name in latest if latest[name] != wanted_bounds[name])
        refuse(
            "latest_pattern",
            zh=f"`{name}` 被两个模式选中，上限是 `{wanted_bounds[name]}` 和 `{latest[name]}`，你用了后一个：被几个模式选中的，以最小的上限为准。",
            en=f"Two patterns choose `{name}`, with the bounds `{wanted_bounds[name]}` and `{latest[name]}`, and you use the latter: "
            "where several patterns choose a parameter the smallest bound holds.",
        )
    for name in plain:
        if name not in wanted_bounds and not torch.allclose(found[name], plain[name]):
            refuse(
                "clipped_others",
                zh=f"`{list(bounds)}` 没有选中 `{name}`，它的梯度却变了。",
                en=f"`{list(bounds)}` do not choose `{name}`, and its gradient has changed.",
            )
    for name in chosen:
        _compare_one(name, plain[name], found[name], wanted_bounds[name])


def _compare_one(name, plain, found, bound):
    if torch.allclose(found, plain.clamp(-bound, bound)):
        return
    if torch.allclose(found, plain):
        refuse(
            "missed",
            zh=f"`{name}` 在选中的层里，梯度却没有裁剪。选中一层，它自己的和里面各层的参数都算。",
            en=f"`{name}` is inside a chosen layer, and its gradient was not clipped. With a layer, its own parameters and those of "
            "the layers inside it are chosen.",
        )
    if torch.allclose(found, plain.clamp(max=bound)):
        refuse(
            "one_sided",
            zh=f"`{name}` 的梯度只有上限 `{bound}`，没有下限。",
            en=f"The gradient of `{name}` has the upper bound `{bound}` and no lower one.",
        )
    refuse(
        "wrong_values",
        zh=f"`{name}` 的每个元素都应截到 ±`{bound}`；梯度变了，变得不是这样。",
        en=f"Every entry of `{name}` should be clipped to ±`{bound}`; the gradient has changed, but not like that.",
    )


def _examine_neighbour(answer, hooked, other):
    model = _Sum()
    answer(model, {hooked: 1.0})
    model(torch.full((1, 2), 5.0)).sum().backward()
    if not (getattr(model, other).weight.grad == 5).all():
        refuse(
            "edited_in_place",
            zh="两个参数相加，只裁其中一个，另一个的梯度也从 `5` 变成了别的：钩子改了传进来的 `grad`，而那块内存是两者共用的。",
            en="Two parameters are added and one of them is clipped, and the gradient of the other is no longer `5` either: the "
            "hook edits the `grad` it is given, whose memory the two share.",
        )


def _examine_two_models(answer):
    """In float64, each with its own bound for the same pattern."""
    models = {bound: _Sum().double() for bound in (1.0, 2.0)}
    refuse_same_object(*[answer(model, {"left": bound}) for bound, model in models.items()])
    for bound, model in models.items():
        model(torch.full((1, 2), 5.0, dtype=torch.float64)).sum().backward()
        if not (model.left.weight.grad == bound).all():
            found = model.left.weight.grad.max().item()
            refuse(
                "other_model",
                zh=f"两个模型，`left` 的上限先后设成 `1.0` 和 `2.0`；本该裁到 `{bound}` 的，得到的是 `{found:g}`。上限存在哪里，后一次调用"
                "会不会盖掉前一次的？",
                en=f"Two models were given the bounds `1.0` and `2.0` for `left`, one after the other; where `{bound}` is due, "
                f"`{found:g}` was found. Where is a bound stored, and does a later call replace it?",
            )


def _hang(model, bounds, hook_for, layers=select):
    return [
        param.register_hook(hook_for(bound))
        for pattern, bound in bounds.items()
        for layer in layers(model, pattern).values()
        for param in layer.parameters()
        if param.requires_grad
    ]


def _pure(bound):
    return lambda grad: grad.clamp(-bound, bound)


def group_last_bound(model, bounds):
    handles = []
    for pattern, bound in bounds.items():
        for layer in select(model, pattern).values():
            for param in layer.parameters():
                if param.requires_grad:
                    handles.append(param.register_hook(lambda grad: grad.clamp(-bound, bound)))  # noqa: B023
    return handles


def group_by_prefix(model, bounds):
    return [
        param.register_hook(_pure(bound))
        for pattern, bound in bounds.items()
        for name, param in model.named_parameters()
        if name.startswith(pattern.rstrip(".*")) and param.requires_grad
    ]


def group_frozen_too(model, bounds):
    layers = [(layer, bound) for pattern, bound in bounds.items() for layer in select(model, pattern).values()]
    return [param.register_hook(_pure(bound)) for layer, bound in layers for param in layer.parameters()]


def group_thawed(model, bounds):
    for param in model.parameters():
        param.requires_grad_(True)
    return clip_by_group(model, bounds)


def group_own_parameters(model, bounds):
    layers = [(layer, bound) for pattern, bound in bounds.items() for layer in select(model, pattern).values()]
    return [
        param.register_hook(_pure(bound))
        for layer, bound in layers
        for param in layer.parameters(recurse=False)
        if param.requires_grad
    ]


def group_within(model, bounds):
    """The hooks are gone at the end of `with`."""
    for pattern, bound in bounds.items():
        for layer in select(model, pattern).values():
            with clip_gradients(layer, -bound, bound):
                pass
    return []


def group_by_default(model, bounds, handles=[]):  # noqa: B006
    handles += clip_by_group(model, bounds)
    return handles


def group_once(bound):
    calls = []
    return lambda grad: calls.append(1) or (grad.clamp(-bound, bound) if len(calls) == 1 else grad)


_BOUNDS = {}


def group_in_a_global(model, bounds):
    _BOUNDS.update(bounds)
    return [
        param.register_hook(lambda grad, pattern=pattern: grad.clamp(-_BOUNDS[pattern], _BOUNDS[pattern]))
        for pattern in bounds
        for layer in select(model, pattern).values()
        for param in layer.parameters()
        if param.requires_grad
    ]


def group_norm(bound):
    return lambda grad: grad * (bound / grad.norm()).clamp(max=1)


def group_afterwards(model, bounds):
    def hook_for(bound):
        def hook(param):
            param.grad.clamp_(-bound, bound)

        return hook

    return [
        param.register_post_accumulate_grad_hook(hook_for(bound))
        for pattern, bound in bounds.items()
        for layer in select(model, pattern).values()
        for param in layer.parameters()
        if param.requires_grad
    ]


def group_of_latest(model, bounds):
    found = {}
    for pattern, bound in bounds.items():
        for layer in select(model, pattern).values():
            found.update({param: bound for param in layer.parameters() if param.requires_grad})
    return [param.register_hook(clip(-bound, bound)) for param, bound in found.items()]


GROUPS = Exercise(
    "25.B",
    examine_groups,
    clip_by_group,
    {
        "changed_given": lambda model, bounds: model.zero_grad() or clip_by_group(model, bounds),
        "clipped_sum": group_afterwards,
        "last_bound": group_last_bound,
        "edited_in_place": lambda model, bounds: _hang(
            model, bounds, lambda bound: lambda grad: grad.clamp_(-bound, bound)
        ),
        "clipped_others": group_by_prefix,
        "missed": group_own_parameters,
        "not_clipped": group_within,
        "one_sided": lambda model, bounds: _hang(model, bounds, lambda bound: lambda grad: grad.clamp(max=bound)),
        "wrong_values": lambda model, bounds: _hang(model, bounds, group_norm),
        "no_handles": lambda model, bounds: clip_by_group(model, bounds) and None,
        "nested_handles": lambda model, bounds: [clip_by_group(model, {key: bounds[key]}) for key in bounds],
        "same_object": group_by_default,
        "not_removable": lambda model, bounds: clip_by_group(model, bounds)[:1],
        "thawed": group_thawed,
        "first_backward_only": lambda model, bounds: _hang(model, bounds, group_once),
        "other_model": group_in_a_global,
        "raised": group_frozen_too,
        "latest_pattern": group_of_latest,
    },
    zh="每一组都按自己的上限裁剪，别的参数分毫未动，钩子也能全部取下。",
    en="Each group is clipped to its own bound, no other parameter is touched, and all hooks can be taken off.",
)

# ---- 25.C: clip by sample ----


def clip_per_sample(model, loss_fn, inputs, targets, max_norm):
    params = [param for param in model.parameters() if param.requires_grad]
    totals = [torch.zeros_like(param) for param in params]
    for i in range(len(inputs)):
        loss = loss_fn(model(inputs[i : i + 1]), targets[i : i + 1])
        grads = torch.autograd.grad(loss, params)
        factor = (max_norm / nn.utils.get_total_norm(grads)).clamp(max=1)
        for total, grad in zip(totals, grads, strict=True):
            total += grad * factor
    for param, total in zip(params, totals, strict=True):
        param.grad = total


def examine_per_sample(answer):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    inputs = torch.tensor([[30.0, -40.0], [0.1, 0.2], [1.0, 1.0], [-3.0, -4.0]])
    with torch.no_grad():  # one far out, one small, one without an error, and one large
        targets = model(inputs) - torch.tensor([[2.0], [-0.1], [0.0], [1.0]])
    _examine_per_sample(answer, model, inputs, targets, nn.functional.mse_loss, 2.0)
    deep = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    deep[0].bias.requires_grad_(False)
    _examine_per_sample(answer, deep, torch.randn(5, 3) * 4, torch.randn(5, 2) * 4, _distance, 1.0)


def _distance(output, target):
    """Bears no sample without the dimension of the batch."""
    return (output - target).abs().sum(1).mean()


def _examine_per_sample(answer, model, inputs, targets, loss_fn, max_norm):
    params = [param for param in model.parameters() if param.requires_grad]
    before = copy.deepcopy(model.state_dict())
    pairs = list(zip(inputs.split(1), targets.split(1), strict=True))
    samples = [_flat(torch.autograd.grad(loss_fn(model(x), y), params)) for x, y in pairs]
    old = [torch.full_like(param, 100.0) for param in params]
    for param, gradient in zip(params, old, strict=True):
        param.grad = gradient.clone()
    hooks = hooks_on(model)
    answer(model, loss_fn, inputs, targets, max_norm)
    if any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()):
        refuse(
            "changed_weights",
            zh="参数的数值变了：只填 `.grad`，更新是优化器的事。",
            en="The values of the parameters have changed: fill `.grad` only, updating is for the optimizer.",
        )
    if hooks_on(model) != hooks:
        refuse(
            "left_hooks",
            zh="函数返回之后，模型或参数上还挂着钩子，下一次普通的反向也会触发它们。",
            en="After the call hooks are still on the model or its parameters, and the next ordinary backward will fire them.",
        )
    if not model.training:
        refuse(
            "mode_changed",
            zh="模型原本在训练模式，你的函数返回以后却在评估模式。",
            en="The model was in training mode and is in evaluation mode after your function.",
        )
    if any(param.grad is not None for param in model.parameters() if not param.requires_grad):
        refuse(
            "frozen_gradient",
            zh="冻结的参数也有了 `.grad`。哪怕全是 0，带权重衰减的优化器也会改动它；让它保持 `None`。",
            en="A frozen parameter has got a `.grad`. Even if it is all 0, an optimizer with weight decay would move the "
            "parameter; leave it `None`.",
        )
    if any(param.grad is None or torch.equal(param.grad, gradient)
           for param, gradient in zip(params, old, strict=True)):  # fmt: skip
        refuse(
            "no_gradient",
            zh="有的参数的 `.grad` 是 `None`，或者还是原来的值：结果要存进 `.grad`，不是返回。",
            en="The `.grad` of some parameter is `None`, or what it was before: put the result into `.grad`, do not return it.",
        )
    found = _flat([param.grad for param in params])
    if any(param.grad.requires_grad and param.grad.is_leaf for param in params):
        refuse(
            "requires_grad",
            zh="`.grad` 没有连着计算图，可是它自己的 `requires_grad` 是 `True`。留 `False` 就好。",
            en="No graph is attached to `.grad`, but its own `requires_grad` is `True`. Leave it `False`.",
        )
    if any(param.grad.requires_grad for param in params):
        refuse(
            "keeps_graph",
            zh="`.grad` 还连着计算图，每个样本的前向都跟着留在内存里。",
            en="`.grad` is attached to a graph, and the forward of every sample stays in memory with it.",
        )
    _diagnose(found, _flat(old), samples, [param.numel() for param in params], max_norm)


def _flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).detach()


def _capped(tensor, max_norm):
    return tensor * (max_norm / tensor.norm()).clamp(max=1)


def _diagnose(found, old, samples, sizes, max_norm):
    want = sum(_capped(sample, max_norm) for sample in samples)
    if torch.allclose(found, want, rtol=1e-3, atol=1e-4):
        return
    if found.isnan().any():
        refuse(
            "nan_at_zero",
            zh="`.grad` 里有 NaN：有一个样本的梯度全是 `0`，哪里除以了它的范数？",
            en="There is NaN in `.grad`: the gradient of one sample is all `0`; where is something divided by its norm?",
        )
    if not found.any():
        refuse(
            "all_zero",
            zh="`.grad` 里全是 `0`，各样本的梯度却不全是：求好的各份，加到你存进 `.grad` 的张量上了吗，后来有没有清零？",
            en="`.grad` is all `0`, the gradients of the samples are not: were their shares added to the tensors that you put into "
            "`.grad`, and was anything set to 0 afterwards?",
        )
    parts = [torch.split(sample, sizes) for sample in samples]
    by_parameter = sum(_flat([_capped(part, max_norm) for part in split]) for split in parts)
    total = sum(samples)
    running, running_on_old = torch.zeros_like(old), old
    for sample in samples:
        running, running_on_old = (_capped(value + sample, max_norm) for value in (running, running_on_old))
    guesses = {
        "running": (
            [running, running_on_old],
            "每来一个样本，就把 `.grad` 里到此为止的和裁了一遍；要裁的是这一个样本的梯度。",
            "With each sample the sum so far in `.grad` was clipped; clip the gradient of that one sample.",
        ),
        "added_to_old": (
            [want + old],
            "结果加到了原有的 `.grad` 上面；原有的应当丢弃。",
            "The result was added to what `.grad` held before; that should be dropped.",
        ),
        "batch": (
            [_capped(total, max_norm), _capped(total / len(samples), max_norm)],
            "这是先求和（或求平均）、再按范数裁剪：离群的样本已经混进去了。",
            "This is the sum (or the mean) first and then the norm: the outlier is mixed in already.",
        ),
        "by_parameter": (
            [by_parameter],
            "每个参数各裁各的：一个样本的范数，要把它在全部参数上的梯度合起来算。",
            "Each parameter was capped by itself: the norm of a sample is that of its gradients over all parameters.",
        ),
        "by_entry": (
            [sum(sample.clamp(-max_norm, max_norm) for sample in samples)],
            "每个元素被单独截断了，样本梯度的方向变了。要按范数等比例缩短。",
            "Every entry was clipped on its own, and the direction of a sample's gradient has changed. Shorten by the norm, in "
            "proportion.",
        ),
        "averaged": (
            [want / len(samples)],
            "这是平均，要的是求和。",
            "This is the mean; the sum was asked for.",
        ),
        "not_clipped": (
            [total, total / len(samples)],
            "这是没有裁剪的梯度。",
            "This is the gradient without any clipping.",
        ),
        "last_one": (
            [_capped(sample, max_norm) for sample in (samples[0], samples[-1])],
            "`.grad` 里只有一个样本的份：先来的被盖住了，还是后来的没有算进去？",
            "`.grad` holds one sample's share: were the earlier ones replaced, or the later ones left out?",
        ),
        "lengthened": (
            [sum(sample * max_norm / sample.norm().clamp(min=1e-12) for sample in samples)],
            "范数小于 `max_norm` 的样本被拉长了，它们应当原样相加。",
            "Samples whose norm is below `max_norm` were made longer; they should be added as they are.",
        ),
    }
    for reason, (values, zh, en) in guesses.items():
        if any(torch.allclose(found, value, rtol=1e-3, atol=1e-4) for value in values):
            refuse(reason, zh=zh, en=en)
    refuse(
        "wrong_values",
        zh=f"`{len(samples)}` 个样本，`max_norm` 是 `{max_norm}`，结果的范数应是 `{want.norm():.4g}`，得到的是 `{found.norm():.4g}`。"
        "用一层线性模型和两个样本手算一遍。",
        en=f"With `{len(samples)}` samples and `max_norm` `{max_norm}` the result should have norm `{want.norm():.4g}`; found "
        f"`{found.norm():.4g}`. Do a linear layer and two samples by hand.",
    )


def _per_sample(model, loss_fn, inputs, targets, share, combine=sum):
    params = [param for param in model.parameters() if param.requires_grad]
    shares = [
        share(torch.autograd.grad(loss_fn(model(x), y), params))
        for x, y in zip(inputs.split(1), targets.split(1), strict=True)
    ]
    for param, *parts in zip(params, *shares, strict=True):
        param.grad = combine(parts)


def _capped_together(grads, max_norm):
    return [part * (max_norm / nn.utils.get_total_norm(grads)).clamp(max=1) for part in grads]


def sample_by_parameter(model, loss_fn, inputs, targets, max_norm):
    _per_sample(model, loss_fn, inputs, targets, lambda grads: [_capped(part, max_norm) for part in grads])


def sample_by_entry(model, loss_fn, inputs, targets, max_norm):
    _per_sample(model, loss_fn, inputs, targets, lambda grads: [part.clamp(-max_norm, max_norm) for part in grads])


def sample_mean(model, loss_fn, inputs, targets, max_norm):
    _per_sample(model, loss_fn, inputs, targets, lambda grads: _capped_together(grads, max_norm),
                lambda parts: sum(parts) / len(parts))  # fmt: skip


def sample_last(model, loss_fn, inputs, targets, max_norm):
    _per_sample(model, loss_fn, inputs, targets, lambda grads: _capped_together(grads, max_norm),
                lambda parts: parts[-1])  # fmt: skip


def sample_normalised(model, loss_fn, inputs, targets, max_norm):
    def share(grads):
        return [part * max_norm / nn.utils.get_total_norm(grads).clamp(min=1e-12) for part in grads]

    _per_sample(model, loss_fn, inputs, targets, share)


def sample_nan(model, loss_fn, inputs, targets, max_norm):
    def share(grads):
        norm = nn.utils.get_total_norm(grads)
        return [part / norm * norm.clamp(max=max_norm) for part in grads]

    _per_sample(model, loss_fn, inputs, targets, share)


def sample_with_graph(model, loss_fn, inputs, targets, max_norm):
    _per_sample(model, loss_fn, inputs, targets, lambda grads: _capped_together(grads, max_norm))
    for param in model.parameters():
        if param.requires_grad:
            param.grad = param.grad + 0 * param


def sample_with_leaves(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    for param in model.parameters():
        if param.requires_grad:
            param.grad.requires_grad_()


def sample_cleared(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    model.zero_grad(set_to_none=False)


def sample_grad_left_off(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    torch.set_grad_enabled(False)


def sample_frozen_zeros(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad


def sample_squared(model, loss_fn, inputs, targets, max_norm):
    def share(grads):
        square = sum(part.square().sum() for part in grads)
        return [part * (max_norm / square).clamp(max=1) for part in grads]

    _per_sample(model, loss_fn, inputs, targets, share)


def sample_batch(model, loss_fn, inputs, targets, max_norm):
    model.zero_grad()
    loss_fn(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def sample_plain(model, loss_fn, inputs, targets, max_norm):
    model.zero_grad()
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        loss_fn(model(x), y).backward()


def sample_running(model, loss_fn, inputs, targets, max_norm):
    model.zero_grad()
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def sample_on_top(model, loss_fn, inputs, targets, max_norm):
    old = {param: param.grad for param in model.parameters()}
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    for param, grad in old.items():
        if grad is not None:
            param.grad += grad


def sample_hooks(model, loss_fn, inputs, targets, max_norm):
    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(lambda grad: _capped(grad, max_norm))
    sample_plain(model, loss_fn, inputs, targets, max_norm)


def sample_step(model, loss_fn, inputs, targets, max_norm):
    clip_per_sample(model, loss_fn, inputs, targets, max_norm)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def sample_returned(model, loss_fn, inputs, targets, max_norm):
    model.zero_grad()
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.autograd.grad(loss_fn(model(inputs), targets), params)


def sample_frozen(model, loss_fn, inputs, targets, max_norm):
    params = list(model.parameters())
    shares = []
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        shares.append(_capped_together(torch.autograd.grad(loss_fn(model(x), y), params), max_norm))
    for param, *parts in zip(params, *shares, strict=True):
        param.grad = sum(parts)


PER_SAMPLE = Exercise(
    "25.C",
    examine_per_sample,
    clip_per_sample,
    {
        "running": sample_running,
        "by_parameter": sample_by_parameter,
        "by_entry": sample_by_entry,
        "batch": sample_batch,
        "averaged": sample_mean,
        "last_one": sample_last,
        "lengthened": sample_normalised,
        "nan_at_zero": sample_nan,
        "not_clipped": sample_plain,
        "added_to_old": sample_on_top,
        "left_hooks": sample_hooks,
        "mode_changed": lambda model, *given: clip_per_sample(model.eval(), *given),
        "keeps_graph": sample_with_graph,
        "requires_grad": sample_with_leaves,
        "all_zero": sample_cleared,
        "frozen_gradient": sample_frozen_zeros,
        "grad_left_off": sample_grad_left_off,
        "changed_weights": sample_step,
        "no_gradient": sample_returned,
        "wrong_values": sample_squared,
        "raised": sample_frozen,
    },
    zh="每个样本的影响都不超过 `max_norm`，离群的再大也一样。",
    en="No sample counts for more than `max_norm`, however far out it lies.",
)

CHECKS = [
    Prediction(
        "25.1",
        zh="还是 1：损失是输出之和，偏置的梯度本来就是 1。挂不挂钩子都一样的检验，证明不了什么。",
        en="Still 1: the loss is the sum of the outputs, and the gradient of the bias is 1 by itself. A test that comes out "
        "the same with and without the hook proves nothing.",
    ),
    Prediction(
        "25.2",
        zh="一个也没有。反向不用损失的数值，只用 `log` 的导数 `1 / x`，负数也有倒数。梯度正常，不等于损失正常。",
        en="None. Backward does not use the value of the loss, only the derivative of `log`, `1 / x`, and negative numbers do "
        "have a reciprocal. Sound gradients do not mean a sound loss.",
    ),
    Prediction(
        "25.3",
        zh="每次反向，钩子把 5 裁成 1 再放行，`.grad` 里加起来就超出了上限。钩子看不见已经存下的部分。",
        en="In each backward the hook clips 5 to 1 and lets it pass; in `.grad` they add up to more than the bound. The hook does "
        "not see what is stored already.",
    ),
    Prediction(
        "25.4",
        zh="`middle` 的梯度从 5 裁成 1，再往回走，乘以 `b` 的 1 和系数 2，到 `a` 就是 2。上限只管 `middle`，不管 `a`。",
        en="The gradient of `middle` is clipped from 5 to 1; on the way to `a` it is multiplied by `b`, which is 1, and by the "
        "factor 2. The bound holds for `middle`, not for `a`.",
    ),
    Prediction(
        "25.5",
        zh="放大后的梯度是 3072、-512、10.24，全都越界，一律裁成 ±1；缩回来就是 ±1/1024，大小全丢了，只剩正负号。",
        en="Scaled up the gradients are 3072, -512 and 10.24, all out of bounds, and all become ±1; scaled down that is ±1/1024. "
        "The sizes are lost, the signs are left.",
    ),
    SHARE,
    GROUPS,
    PER_SAMPLE,
]
