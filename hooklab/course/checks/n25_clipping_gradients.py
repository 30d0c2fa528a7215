"""Checks of notebook 25: clipping gradients."""

import numbers

import torch
from torch import Tensor, nn

from hooklab import clip, select
from hooklab.course.check import Exercise, refuse, refuse_first, refuse_same_object
from hooklab.course.checks.calls import all_close
from hooklab.course.checks.models import Before
from hooklab.course.refusals import refuse_result_of

# ---- 25.A: how much would clipping touch? ----


def clipped_share(model, bound):
    grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
    return (torch.cat(grads).abs() > bound).double().mean().item()


LOOKED = [  # as soon as `clipped_share` has returned; `grads` are those of the parameters `used`, as they were
    ("filled_none", lambda t: t.unused.grad is not None),
    ("dropped_gradients", lambda t: any(param.grad is None for param in t.used)),
    ("changed_gradients", lambda t: not all(map(torch.equal, [param.grad for param in t.used], t.grads))),
]

MISCOUNTED = [  # what each mistake gives in place of the share
    ("inverted", lambda t: [1 - t.want]),
    ("counts_the_bound", lambda t: [_share(t.flat.abs() >= t.bound)]),
    ("one_sided", lambda t: [_share(t.flat > t.bound)]),
    ("counts_missing", lambda t: [t.beyond / t.weights.numel(), t.beyond / t.trained]),
    ("weights", lambda t: [_share(t.weights.abs() > t.bound)]),
    ("mean_of_shares", lambda t: [sum(_share(grad.abs() > t.bound) for grad in t.grads) / len(t.grads)]),
]


def examine_share(answer):
    torch.manual_seed(1)  # no two ways of counting agree
    _examine_share(answer, 0.5)
    _examine_share(answer, 2.0)


def _examine_share(answer, bound):
    """Gradients of a GRU in whole multiples of half the bound: some are at the bound, and shares are exact."""
    body = nn.Sequential(nn.GRU(2, 3))
    model = nn.ModuleDict({"embed": nn.Embedding(6, 2), "body": body, "head": nn.Linear(3, 6)})
    model["embed"].requires_grad_(False)
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))  # in no layer
    *used, unused = [param for param in model.parameters() if param.requires_grad]
    for number, param in enumerate(used):
        size = 7 if number == 0 else 4  # so that the parameters have different shares
        param.grad = torch.randint(-size, size, param.shape) * bound / 2
    used[1].requires_grad_(False)  # frozen since then: its gradient is still there, and clipped with the others
    grads = [param.grad.clone() for param in used]
    got = answer(model, bound)
    refuse_first(LOOKED, used=used, unused=unused, grads=grads)
    if not isinstance(got, numbers.Real) and not (isinstance(got, Tensor) and got.numel() == 1):
        refuse("wrong_type", got=got)
    got, flat = float(got), _flat(grads)
    beyond, want = int((flat.abs() > bound).sum()), _share(flat.abs() > bound)
    if abs(got - want) < 1e-4:
        return
    if got > 1:
        refuse("not_a_share", got=got)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    facts = {"want": want, "flat": flat, "grads": grads, "weights": _flat(model.parameters()), "trained": trained}
    refuse_result_of(MISCOUNTED, got, bound=bound, beyond=beyond, entries=len(flat), **facts)
    refuse("wrong_share", entries=len(flat), beyond=beyond, bound=bound, got=got)


def _share(true):
    return true.double().mean().item()


def _flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).detach()


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


HUNG = [  # as soon as `clip_by_group` has returned
    ("nested_handles", lambda t: t.odd and isinstance(t.odd[0], list | tuple)),
    ("no_handles", lambda t: t.odd),
    ("thawed", lambda t: t.names),
]

CLIPPED = [  # the gradients of the first backward; `plain` are those without hooks
    ("not_clipped", lambda t: not any(name in t.changed for name in t.chosen)),
    ("last_bound", lambda t: len(t.patterns) > 1 and _all_clipped(t, lambda own: t.last)),
    ("latest_pattern", lambda t: _latest_is_larger(t) and _all_clipped(t, lambda own: own[-1])),
    ("clipped_others", lambda t: t.others),
]

PARAMETER = [  # one gradient that is not clipped to the smallest bound of its parameter
    ("missed", lambda t: torch.allclose(t.found, t.plain)),
    ("one_sided", lambda t: torch.allclose(t.found, t.plain.clamp(max=t.bound))),
    ("wrong_values", lambda t: True),
]


def examine_groups(answer):
    torch.manual_seed(0)
    _examine_groups(answer, {"embed": 0.5, "blocks.*": 0.25, "head": 0.125})
    _examine_groups(answer, {"**.norm": 0.25, "embed": 1.0})
    _examine_groups(answer, {"blocks.1.rnn": 0.5})
    _examine_groups(answer, {"blocks.1": 0.5})
    _examine_groups(answer, {"blocks.*": 0.125, "**.norm": 0.5})
    _examine_groups(answer, {"**.norm": 0.5, "blocks.*": 0.125, "embed": 1.0})
    _examine_sums(answer)


def _examine_groups(answer, bounds):
    model, tokens = _LanguageModel(), torch.randint(5, (4, 6))
    plain, before = _gradients(model, tokens), Before(model)
    handles = answer(model, dict(bounds))
    refuse_first(HUNG, odd=_no_handles(handles), names=before.frozen() + before.thawed())
    first = _gradients(model, tokens)
    _examine_clipped(model, plain, first, bounds)
    if not all_close(_gradients(model, tokens), first):
        refuse("first_backward_only")
    for name, total in _gradients(model, tokens, clear=False).items():  # onto those of the last one
        if not torch.allclose(total, 2 * first[name]):
            refuse("clipped_sum", name=name)
    for handle in handles:
        handle.remove()
    if not all_close(_gradients(model, tokens), plain):
        refuse("not_removable")


def _no_handles(handles):
    """What is found in place of handles; a list has a `remove` of its own."""
    if not isinstance(handles, list | tuple):
        return [handles]
    return [item for item in handles if isinstance(item, list | tuple) or not hasattr(item, "remove")]


def _gradients(model, x, clear=True):
    if clear:
        model.zero_grad()
    (10 * model(x).square().sum()).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def _examine_clipped(model, plain, found, bounds):
    layers = [(f"{layer}.", bound) for pattern, bound in bounds.items() for layer in select(model, pattern)]
    chosen = {name: own for name in plain if (own := [bound for layer, bound in layers if name.startswith(layer)])}
    changed = [name for name in plain if not torch.allclose(found[name], plain[name])]
    others, last = [name for name in changed if name not in chosen], [*bounds.values()][-1]
    gradients = {"plain": plain, "found": found, "chosen": chosen, "changed": changed, "others": others}
    refuse_first(CLIPPED, **gradients, patterns=[*bounds], last=last)
    for name, own in chosen.items():
        if not _clipped(found[name], plain[name], min(own)):
            refuse_first(PARAMETER, name=name, bound=min(own), found=found[name], plain=plain[name])


def _clipped(found, plain, bound):
    return torch.allclose(found, plain.clamp(-bound, bound))


def _all_clipped(t, bound_of):
    return all(_clipped(t.found[name], t.plain[name], bound_of(own)) for name, own in t.chosen.items())


def _latest_is_larger(t):
    larger = [(name, min(own), own[-1]) for name, own in t.chosen.items() if own[-1] > min(own)]
    if larger:
        t.name, t.smallest, t.latest = larger[0]
    return larger


def _examine_sums(answer):
    """Two layers whose parameters are added and so receive a gradient in the same memory; then two models in float64."""
    for hooked, other in (("left", "right"), ("right", "left")):
        layers = _sum()
        answer(layers, {hooked: 1.0})
        if not (_gradient_of_sum(layers, other) == 5).all():
            refuse("edited_in_place")
    models = {bound: _sum().double() for bound in (1.0, 2.0)}
    refuse_same_object(*[answer(layers, {"left": bound}) for bound, layers in models.items()])
    for bound, layers in models.items():
        found = _gradient_of_sum(layers, "left")
        if not (found == bound).all():
            refuse("other_model", bound=bound, found=found.max().item())


def _sum():
    return nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("left", "right")})


def _gradient_of_sum(layers, name):
    (5 * (layers["left"].weight + layers["right"].weight)).sum().backward()
    return layers[name].weight.grad


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


OLD = 100.0  # what each `.grad` is full of, before

LEFT = [  # what the function has left behind
    ("changed_weights", lambda t: t.before.changed_state()),
    ("left_hooks", lambda t: t.before.new_hooks()),
    ("mode_changed", lambda t: t.before.changed_modes()),
    ("frozen_gradient", lambda t: any(param.grad is not None for param in t.frozen)),
    ("no_gradient", lambda t: any(param.grad is None or (param.grad == OLD).all() for param in t.params)),
    ("requires_grad", lambda t: any(param.grad.requires_grad and param.grad.is_leaf for param in t.params)),
    ("keeps_graph", lambda t: any(param.grad.requires_grad for param in t.params)),
]

SUMS = [  # what each mistake gives in place of `want`; `samples` has the gradient of each, over all parameters
    ("running", lambda t: [_running(t, 0.0), _running(t, OLD)]),
    ("added_to_old", lambda t: [t.want + OLD]),
    ("batch", lambda t: [capped(t.plain, t.max_norm), capped(t.plain / t.count, t.max_norm)]),
    ("by_parameter", lambda t: [sum(_flat(capped(part, t.max_norm) for part in split) for split in t.split)]),
    ("by_entry", lambda t: [sum(sample.clamp(-t.max_norm, t.max_norm) for sample in t.samples)]),
    ("averaged", lambda t: [t.want / t.count]),
    ("not_clipped", lambda t: [t.plain, t.plain / t.count]),
    ("last_one", lambda t: [capped(t.samples[0], t.max_norm), capped(t.samples[-1], t.max_norm)]),
    ("lengthened", lambda t: [sum(nn.functional.normalize(sample, dim=0) for sample in t.samples) * t.max_norm]),
]


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
    pairs = zip(inputs.split(1), targets.split(1), strict=True)
    samples = [_flat(torch.autograd.grad(loss_fn(model(x), y), params)) for x, y in pairs]
    for param in params:
        param.grad = torch.full_like(param, OLD)
    before = Before(model)
    answer(model, loss_fn, inputs, targets, max_norm)
    frozen = [param for param in model.parameters() if not param.requires_grad]
    refuse_first(LEFT, before=before, params=params, frozen=frozen)
    found, want = _flat(param.grad for param in params), sum(capped(sample, max_norm) for sample in samples)
    if torch.allclose(found, want, rtol=1e-3, atol=1e-4):
        return
    if found.isnan().any():
        refuse("nan_at_zero")
    if not found.any():
        refuse("all_zero")
    facts = {"plain": sum(samples), "count": len(samples), "max_norm": max_norm, "want": want}
    split = [sample.split([param.numel() for param in params]) for sample in samples]
    refuse_result_of(SUMS, found, samples=samples, split=split, **facts)
    refuse("wrong_values", count=len(samples), max_norm=max_norm, want_norm=want.norm(), found_norm=found.norm())


def capped(tensor, max_norm):
    return tensor * (max_norm / tensor.norm()).clamp(max=1)


def _running(t, start):
    """With each sample the sum so far is clipped."""
    total = torch.full_like(t.want, start)
    for sample in t.samples:
        total = capped(total + sample, t.max_norm)
    return total


PER_SAMPLE = Exercise("25.C", examine_per_sample, clip_per_sample)

EXERCISES = [SHARE, GROUPS, PER_SAMPLE]
