"""Checks of notebook 47: per-sample gradients."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from hooklab.course.check import Exercise, refuse, refuse_first
from hooklab.course.checks.models import Before, fails, refuse_hooks
from hooklab.course.refusals import refuse_from_before

# ---- what the exercises share: models whose weights are the same in every run ----


def _waves(*shape: int, speed: float = 1.0) -> Tensor:
    """Numbers between -1 and 1 that follow no simple order."""
    count = torch.tensor(shape).prod().item()
    return (torch.arange(1, count + 1, dtype=torch.float64) ** 1.5 * speed).sin().view(shape)


def _filled(model: nn.Module) -> Any:
    with torch.no_grad():
        for number, param in enumerate(model.parameters(), start=1):
            param.copy_(_waves(*param.shape, speed=0.7 + 0.2 * number))
    return model


class _Steps(nn.Module):
    """Calls one layer twice; `fails` raises behind the layers."""

    def __init__(self, fails: bool = False):
        super().__init__()
        self.start, self.step, self.end = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.start(x))
        x = torch.tanh(self.step(torch.tanh(self.step(x))))
        if self.fails:
            raise RuntimeError("the data has ended")
        return self.end(x)


class _Words(nn.Module):
    """Layers at every position of a sentence, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.mixed = nn.Linear(3, 5).double(), nn.Linear(5, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(torch.tanh(self.word(x)).cumsum(1)).square().mean(1)


# ---- 47.A: the weight gradients of each sample ----


def weight_grads(model, loss_fn, x, y):
    sums: dict[str, Tensor] = {}
    handles = []

    def add_up(name, module, args, output):
        a = args[0].detach()

        def arrive(grad):
            each = torch.einsum("n...o,n...i->noi", grad, a)
            sums[name] = sums.get(name, 0) + len(x) * each

        output.register_hook(arrive)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            hook = partial(add_up, name)
            handles.append(module.register_forward_hook(hook))
    try:
        loss_fn(model(x), y).backward()
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _one_by_one(model: nn.Module, loss_fn, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The truth, by one backward pass for each sample."""
    layers = {name: layer.weight for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    grads = [
        torch.autograd.grad(loss_fn(model(x[i : i + 1]), y[i : i + 1]), list(layers.values())) for i in range(len(x))
    ]
    return dict(zip(layers, map(torch.stack, zip(*grads, strict=True)), strict=True))


SHAPES = [  # `got` is a tensor for one layer
    ("summed", lambda t: t.got.shape == t.want.shape[1:]),
    ("transposed", lambda t: t.got.shape == t.want.mT.shape != t.want.shape),
    ("other_shape", lambda t: t.got.shape != t.want.shape),
]
VALUES = [
    ("mean", lambda t: _same(t.got * len(t.want), t.want)),
    ("twice_the_size", lambda t: _same(t.got / len(t.want), t.want)),
    ("transposed-square", lambda t: t.got.shape == t.got.mT.shape and _same(t.got.mT, t.want)),
    ("last_call", lambda t: t.name == "step"),
    ("positions", lambda t: t.name in ("word", "mixed")),
    ("wrong_grads", lambda t: True),
]


def _same(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.detach().to(want.dtype), want, rtol=1e-3, atol=1e-6)


def examine_weight_grads(answer):
    x, y = _waves(5, 3).float(), torch.tensor([0, 2, 1, 1, 0])
    steps, runs = _filled(_Steps()), []
    steps.register_forward_hook(lambda module, args, output: runs.append(1))
    _examine_grads(answer, steps, F.cross_entropy, x, y, others=())
    if len(runs) != 1:
        refuse("other_runs", runs=len(runs))
    _examine_grads(
        answer, _filled(_Words()), F.mse_loss, _waves(4, 6, 3), _waves(4, 2, speed=3), ("start", "step", "end")
    )
    broken = _filled(_Steps(fails=True))
    with fails(broken):
        answer(broken, F.cross_entropy, x.clone(), y.clone())


def _examine_grads(answer, model, loss_fn, x, y, others):
    before = Before(model)
    want = _one_by_one(_filled(type(model)()), loss_fn, x, y)
    got = answer(model, loss_fn, x.clone(), y.clone())
    refuse_hooks(before, "hooks_left")
    if before.changed_modes():
        refuse("mode_changed")
    if not isinstance(got, dict) or not all(isinstance(one, Tensor) for one in got.values()):
        refuse("no_dict", got=got)
    refuse_from_before(got, model, others)
    if got.keys() != want.keys():
        refuse("other_names", found=", ".join(map(str, got)) or "nothing", expected=", ".join(want))
    for name, grads in want.items():
        facts = {"name": name, "got": got[name], "want": grads}
        refuse_first(SHAPES, **facts, found=tuple(got[name].shape), expected=tuple(grads.shape))
    # A mistake in all layers is told before one that only a layer called twice shows.
    for name in sorted(want, key=("step", "word", "mixed").__contains__):
        if not _same(got[name], want[name]):
            refuse_first(VALUES, name=name, got=got[name], want=want[name])


WEIGHT_GRADS = Exercise("47.A", examine_weight_grads, weight_grads)

# ---- 47.B: the samples with the largest gradients ----


def suspects(model, x, y, count):
    def loss(params, x, y):
        output = functional_call(model, params, (x[None],))
        return F.cross_entropy(output, y[None])

    params = {name: p.detach() for name, p in model.named_parameters()}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    finally:
        for module, training in modes:
            module.training = training
    squares = sum(g.flatten(1).square().sum(1) for g in each.values())
    return squares.topk(count).indices


def _tower() -> nn.Sequential:
    """In train mode, but for one BatchNorm; its statistics are not those of the data."""
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 5), nn.BatchNorm1d(5)
    tower = _filled(nn.Sequential(*layers, nn.Linear(5, 3)).double()).train()
    for number, norm in enumerate((tower[1], tower[5]), start=1):
        norm.running_mean.copy_(_waves(len(norm.running_mean), speed=number))
        norm.running_var.copy_(0.5 + _waves(len(norm.running_var), speed=2 * number).square())
    tower[5].eval()
    for param in tower.parameters():
        param.grad = torch.ones_like(param)
    return tower


def _small() -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))).eval()


def squared_norms(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """By parameter: the squared norm of each sample's gradient, in the mode that the model is in."""
    params = dict(model.named_parameters())
    rows = []
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        rows.append([g.square().sum() for g in torch.autograd.grad(loss, list(params.values()))])
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}


ORDER = [  # `got` has `count` whole numbers
    ("smallest", lambda t: _ranks(t, -t.total)),
    ("unordered", lambda t: sorted(t.got) == sorted(t.want)),
    ("by_loss", lambda t: _ranks(t, t.losses)),
    ("by_confidence", lambda t: _ranks(t, -t.confidence)),
    ("norms_added", lambda t: _ranks(t, sum(one.sqrt() for one in t.by_name.values()))),
    ("weights_only", lambda t: _ranks(t, sum(t.by_name[name] for name in t.by_name if "weight" in name))),
    ("linear_only", lambda t: _ranks(t, sum(t.by_name[name] for name in t.linears))),
    ("weights_only", lambda t: _ranks(t, sum(t.by_name[name] for name in t.linears if "weight" in name))),
    (
        "last_layer",
        lambda t: _ranks(t, t.by_name["6.weight"]) or _ranks(t, t.by_name["6.weight"] + t.by_name["6.bias"]),
    ),
    ("first_layer", lambda t: _ranks(t, t.by_name["0.weight"])),
    ("wrong_order", lambda t: True),
]


def _ranks(t, score: Tensor) -> bool:
    return t.got == score.topk(len(t.got)).indices.tolist()


def examine_suspects(answer):
    x, y = _waves(12, 4, speed=3.1), torch.arange(12) % 3
    tower, modes = _tower(), []
    tower[1].register_forward_hook(lambda module, args, output: modes.append(module.training))
    before = Before(tower)
    got = answer(tower, x.clone(), y.clone(), 5)
    refuse_hooks(before, "hooks_left")
    if any(modes):
        refuse("train_mode")
    if changed := before.changed_modes():
        name, (was, now) = next(iter(changed.items()))
        refuse("mode_changed", name=name or "model", was=was, now=now)
    if any(param.grad is None or not torch.equal(param.grad, torch.ones_like(param)) for param in tower.parameters()):
        refuse("grad_touched")
    _examine_indices(got, 5)
    judged = _tower().eval()
    by_name, logits = squared_norms(judged, x, y), judged(x).detach()
    total = torch.stack(list(by_name.values())).sum(0)
    got, want = got.tolist(), total.topk(5).indices.tolist()
    if got != want:
        losses, confidence = F.cross_entropy(logits, y, reduction="none"), logits.softmax(1).amax(1)
        linears = [name for name in by_name if name[0] in "046"]
        refuse_first(
            ORDER,
            got=got,
            want=want,
            total=total,
            losses=losses,
            confidence=confidence,
            by_name=by_name,
            linears=linears,
        )
    _examine_small(answer, x.float(), y)


def _examine_small(answer, x, y):
    got = answer(_small(), x.clone(), y.clone(), 3)
    _examine_indices(got, 3)
    if got.tolist() != suspects(_small(), x, y, 3).tolist():
        refuse("other_model")


def _examine_indices(got, count):
    if not isinstance(got, Tensor):
        refuse("no_tensor", got=got)
    if got.shape != (count,):
        refuse("other_count", found=tuple(got.shape), expected=(count,))
    if got.dtype.is_floating_point:
        refuse("scores", dtype=got.dtype)


SUSPECTS = Exercise("47.B", examine_suspects, suspects)

EXERCISES = [WEIGHT_GRADS, SUSPECTS]
