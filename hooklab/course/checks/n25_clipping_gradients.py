"""Checks of notebook 25: clipping gradients."""

import copy
import numbers

import torch
from torch import Tensor, nn

from hooklab import clip, hooks_on, select
from hooklab.course.check import Exercise, refuse, refuse_same_object

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
        refuse("filled_none")
    if any(param.grad is None for param in params[:-1]):
        refuse("dropped_gradients")
    if any(old is not None and not torch.equal(param.grad, old)
           for param, old in zip(params, before, strict=True)):  # fmt: skip
        refuse("changed_gradients")
    if not isinstance(got, numbers.Real) and not (isinstance(got, Tensor) and got.numel() == 1):
        refuse("wrong_type", got=got)
    _examine_number(float(got), grads, bound, model)


def _examine_number(got, grads, bound, model):
    beyond = grads.abs() > bound
    want, total = beyond.double().mean().item(), sum(param.numel() for param in model.parameters())
    if abs(got - want) < 1e-4:
        return
    if got > 1:
        refuse("not_a_share", got=got)
    if abs(got - (1 - want)) < 1e-4:
        refuse("inverted")
    if abs(got - (grads.abs() >= bound).double().mean().item()) < 1e-4:
        refuse("counts_the_bound", bound=bound)
    if abs(got - (grads > bound).double().mean().item()) < 1e-4:
        refuse("one_sided", bound=bound)
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    if any(abs(got - beyond.sum().item() / count) < 1e-4 for count in (total, trained)):
        refuse("counts_missing", count_grads=len(grads))
    if abs(got - (weights.abs() > bound).double().mean().item()) < 1e-4:
        refuse("weights")
    shares = [(param.grad.abs() > bound).double().mean() for param in model.parameters() if param.grad is not None]
    if abs(got - torch.stack(shares).mean().item()) < 1e-4:
        refuse("mean_of_shares")
    refuse("wrong_share", count_grads=len(grads), beyond=int(beyond.sum()), bound=bound, got=got)


SHARE = Exercise("25.A", examine_share, clipped_share)

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
            refuse("nested_handles", kind=kind)
        refuse("no_handles", kind=kind)
    for name, param in model.named_parameters():
        if param.requires_grad == (name in frozen):
            refuse("thawed", name=name)
    first = _gradients(model, tokens)
    _compare(model, plain, first, bounds)
    if any(not torch.allclose(found, first[name]) for name, found in _gradients(model, tokens).items()):
        refuse("first_backward_only")
    (10 * model(tokens).square().sum()).backward()  # onto the gradients of the last one
    for name, param in model.named_parameters():
        if name in first and not torch.allclose(param.grad, 2 * first[name]):
            refuse("clipped_sum", name=name)
    for handle in handles:
        handle.remove()
    if any(not torch.allclose(found, plain[name]) for name, found in _gradients(model, tokens).items()):
        refuse("not_removable")


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
        refuse("not_clipped")
    if len(set(bounds.values())) > 1 and all(
        torch.allclose(found[name], plain[name].clamp(-last, last)) for name in chosen
    ):
        refuse("last_bound", last=last)
    of_latest = {name: plain[name].clamp(-bound, bound) for name, bound in latest.items()}
    if latest != wanted_bounds and all(torch.allclose(found[name], of_latest[name]) for name in latest):
        name = next(name for name in latest if latest[name] != wanted_bounds[name])
        refuse("latest_pattern", name=name, wanted_bounds=wanted_bounds[name], latest=latest[name])
    for name in plain:
        if name not in wanted_bounds and not torch.allclose(found[name], plain[name]):
            refuse("clipped_others", bounds=list(bounds), name=name)
    for name in chosen:
        _compare_one(name, plain[name], found[name], wanted_bounds[name])


def _compare_one(name, plain, found, bound):
    if torch.allclose(found, plain.clamp(-bound, bound)):
        return
    if torch.allclose(found, plain):
        refuse("missed", name=name)
    if torch.allclose(found, plain.clamp(max=bound)):
        refuse("one_sided", name=name, bound=bound)
    refuse("wrong_values", name=name, bound=bound)


def _examine_neighbour(answer, hooked, other):
    model = _Sum()
    answer(model, {hooked: 1.0})
    model(torch.full((1, 2), 5.0)).sum().backward()
    if not (getattr(model, other).weight.grad == 5).all():
        refuse("edited_in_place")


def _examine_two_models(answer):
    """In float64, each with its own bound for the same pattern."""
    models = {bound: _Sum().double() for bound in (1.0, 2.0)}
    refuse_same_object(*[answer(model, {"left": bound}) for bound, model in models.items()])
    for bound, model in models.items():
        model(torch.full((1, 2), 5.0, dtype=torch.float64)).sum().backward()
        if not (model.left.weight.grad == bound).all():
            found = model.left.weight.grad.max().item()
            refuse("other_model", bound=bound, found=found)


GROUPS = Exercise("25.B", examine_groups, clip_by_group)

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
        refuse("changed_weights")
    if hooks_on(model) != hooks:
        refuse("left_hooks")
    if not model.training:
        refuse("mode_changed")
    if any(param.grad is not None for param in model.parameters() if not param.requires_grad):
        refuse("frozen_gradient")
    if any(param.grad is None or torch.equal(param.grad, gradient)
           for param, gradient in zip(params, old, strict=True)):  # fmt: skip
        refuse("no_gradient")
    found = _flat([param.grad for param in params])
    if any(param.grad.requires_grad and param.grad.is_leaf for param in params):
        refuse("requires_grad")
    if any(param.grad.requires_grad for param in params):
        refuse("keeps_graph")
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
        refuse("nan_at_zero")
    if not found.any():
        refuse("all_zero")
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
    refuse("wrong_values", count_samples=len(samples), max_norm=max_norm, want=want.norm(), found=found.norm())


PER_SAMPLE = Exercise("25.C", examine_per_sample, clip_per_sample)

EXERCISES = [SHARE, GROUPS, PER_SAMPLE]
