"""Checks of notebook 41: is it learning?"""

import numbers

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, refuse, refuse_first, refuse_from_before, refuse_other_items
from hooklab.course.checks.models import Before, fails, refuse_hooks

# ---- 41.A: how many units are dead? ----


def dead_units(model, batches):
    alive: dict[str, Tensor] = {}
    handles = []

    def watch(name):
        def hook(module, args, output):
            seen = (output > 0).transpose(0, 1).flatten(1).any(dim=1)
            alive[name] = alive.get(name, False) | seen

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):
            handles.append(module.register_forward_hook(watch(name)))
    try:
        with torch.no_grad():
            for batch in batches:
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: int((~units).sum()) for name, units in alive.items()}


class _Given(nn.Module):
    """Its ReLUs get what the batch holds: it passes it on, keeps what comes out, and may fail after it."""

    def __init__(self, fails: bool = False, **parts: nn.Module) -> None:
        super().__init__()
        self.fails = fails
        self.outputs: list[Tensor] = []
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
            if self.fails:
                raise RuntimeError("the data has ended")
        self.outputs.append(x.detach().clone())
        return x


def _units() -> list[Tensor]:
    """Twelve units, of which three are dead: every wrong way to count them gives another number."""
    units = -torch.ones(22, 12)
    units[:, :2] = 1
    units[::2, 2:5] = 1
    units[3, 5:7] = units[13, 7] = units[20, 8] = 1  # in one sample only, of another batch each time
    units[:, 9] = 0
    return list(units.split([12, 6, 4]))


def _images() -> list[Tensor]:
    """Three channels: 0 is above 0 at one place of one sample, 1 never, 2 at all places but the first one."""
    images = -torch.ones(4, 3, 2, 2)
    images[3, 0, 1, 1] = 1
    images[:, 2] = 2
    images[:, 2, 0, 0] = 0
    return [images[:2], images[2:]]


def _split(outputs: list[Tensor]) -> list[Tensor]:
    """Each batch as (units, entries): whether they are above 0."""
    return [(output > 0).transpose(0, 1).flatten(1) for output in outputs]


def _count(zero: Tensor) -> int:
    return int(zero.sum())


COUNTS = [  # `lit` has a tensor (units, entries) for each batch, `lit_all` all of it; `want` is right
    ("places", lambda t: t.found in t.by_place),
    ("one_batch", lambda t: t.found in [_count(~lit.any(1)) for lit in t.lit]),
    ("added", lambda t: t.found == sum(_count(~lit.any(1)) for lit in t.lit)),
    ("alive_ones", lambda t: t.found == _count(t.lit_all.any(1))),
    ("any_zero", lambda t: t.found == _count(~t.lit_all.all(1))),
    ("mostly_zero", lambda t: t.found == _count(t.lit_all.double().mean(1) < 0.1)),
    ("wrong_count", lambda t: True),
]


def examine_dead_units(answer):
    flat = _Given(body=nn.Sequential(nn.Identity(), nn.ReLU()), same=nn.Identity())
    images = _Given(first=nn.ReLU(inplace=True), flat=nn.Flatten(), last=nn.ReLU())
    _examine_counts(answer, flat, _units(), {"body.1"}, dict(images.named_modules()))
    _examine_counts(answer, images, _images(), {"first", "last"}, dict(flat.named_modules()))
    broken = _Given(fails=True, body=nn.ReLU())
    with fails(broken):
        answer(broken, [torch.ones(2, 3)])


def _examine_counts(answer, model, batches, names, foreign):
    outputs = _outputs(model, batches)
    model.get_submodule(sorted(names)[0]).register_forward_pre_hook(_look)
    before, runs = Before(model), len(batches)
    got = answer(model, [batch.clone() for batch in batches])
    given, model.outputs = model.outputs, []
    refuse_hooks(before, "hooks_left")
    if not isinstance(got, dict):
        refuse("no_dict", got=got)
    if len(given) != runs:
        refuse("not_run", wanted=runs, found=len(given))
    final = outputs["last"] if "last" in names else outputs["body.1"]
    if not all(map(torch.equal, given, final)):
        refuse("changed_output")
    refuse_from_before(got, model, foreign)
    if other := [name for name in got if name not in names]:
        refuse("other_layers", name=other[0] or "''")
    if missing := [name for name in sorted(names) if name not in got]:
        refuse("missing_layer", name=missing[0])
    for name in sorted(names):
        _examine_count(name, got[name], outputs[name])


def _look(*args):
    """A hook that changes nothing."""


def _outputs(model, batches):
    """What each ReLU returns, batch by batch, by the name of the layer."""
    found: dict[str, list[Tensor]] = {}

    def keep(name):
        def hook(module, args, output):
            found.setdefault(name, []).append(output.clone())

        return hook

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ReLU)]
    handles = [module.register_forward_hook(keep(name)) for name, module in layers]
    for batch in batches:
        model(batch.clone())
    for handle in handles:
        handle.remove()
    model.outputs.clear()
    return found


def _examine_count(name, value, outputs):
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        refuse("not_a_number", name=name, value=value)
    lit, every = _split(outputs), torch.cat(outputs)
    lit_all, by_place = torch.cat(lit, dim=1), []
    if every.dim() > 2:
        at_places = (every > 0).any(0).flatten(1)  # (channels, places)
        by_place = [_count(~at_places), _count(~at_places.all(1))]
    want = _count(~lit_all.any(1))
    if value != want:
        refuse_first(COUNTS, name=name, found=int(value), want=want, lit=lit, lit_all=lit_all, by_place=by_place)


DEAD_UNITS = Exercise("41.A", examine_dead_units, dead_units)

# ---- 41.B: how far does each step move a weight? ----


def log_ratios(model, optimizer):
    params = {name: param for name, param in model.named_parameters() if param.ndim >= 2}
    log: dict[str, list[float]] = {name: [] for name in params}
    before: dict[str, Tensor] = {}

    def pre(optimizer, args, kwargs):
        before.update({name: param.detach().clone() for name, param in params.items()})

    def post(optimizer, args, kwargs):
        for name, param in params.items():
            old = before[name]
            log[name].append(((param.detach() - old).norm() / old.norm()).item())

    return log, [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]


STEPS = 3

RATIOS = [  # `found` and `want` are the numbers of one parameter, one for each step
    ("frozen", lambda t: t.is_frozen),
    ("no_clone", lambda t: not any(t.found)),
    ("gradient_ratio", lambda t: _near(t.found, t.by_gradient)),
    ("lr_times_grad", lambda t: _near(t.found, [t.lr * ratio for ratio in t.by_gradient])),
    ("over_new", lambda t: _near(t.found, t.over_new)),
    ("norms_only", lambda t: _near([abs(ratio) for ratio in t.found], t.norms_only)),
    ("since_start", lambda t: _near(t.found, t.since_start)),
    ("wrong_ratio", lambda t: True),
]


def examine_log_ratios(answer):
    _examine_log(answer, _convolutional, lambda params: torch.optim.SGD(params, lr=0.5))
    _examine_log(answer, _convolutional, lambda params: torch.optim.Adam(params, lr=0.05))
    _examine_log(answer, _recurrent, lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.1))


def _convolutional():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[2].requires_grad_(False)
    return model, torch.randn(STEPS + 1, 4, 1, 3, 3)


def _recurrent():
    torch.manual_seed(1)
    return nn.ModuleDict({"cell": nn.RNNCell(2, 3), "head": nn.Linear(3, 1)}).double(), torch.randn(STEPS + 1, 4, 2)


def _step(model, optimizer, x):
    optimizer.zero_grad()
    y = model["head"](model["cell"](x.double())) if isinstance(model, nn.ModuleDict) else model(x)
    (y - 1).square().sum().backward()
    optimizer.step()


def _examine_log(answer, make_model, make_optimizer):
    model, data = make_model()
    optimizer = make_optimizer(model.parameters())
    first = optimizer.register_step_post_hook(_look)
    got = answer(model, optimizer)
    if not isinstance(got, tuple | list) or len(got) != 2 or not isinstance(got[0], dict):
        refuse("no_pair", got=got)
    log, handles = got
    if not isinstance(handles, tuple | list):
        refuse("no_pair", got=got)
    refuse_other_items(handles)
    last = optimizer.register_step_post_hook(_look)
    history = _history(model, optimizer, data)
    _examine_names(log, model)
    _examine_unchanged(model, make_model, make_optimizer)
    for name, param in model.named_parameters():
        if param.ndim >= 2:
            _examine_ratios(name, log[name], history[name], optimizer, not param.requires_grad)
    for handle in handles:
        handle.remove()
    if any(one.id not in (one.hooks_dict_ref() or ()) for one in (first, last)):
        refuse("removed_others")
    lengths = {name: len(found) for name, found in log.items()}
    _step(model, optimizer, data[-1])
    if lengths != {name: len(found) for name, found in log.items()}:
        refuse("not_removed")


def _history(model, optimizer, data):
    """By the name of the parameter: (value before, gradient, value after) of each step."""
    history: dict[str, list] = {name: [] for name, _ in model.named_parameters()}
    for x in data[:STEPS]:
        old = {name: param.detach().clone() for name, param in model.named_parameters()}
        _step(model, optimizer, x)
        for name, param in model.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            history[name].append((old[name], grad, param.detach().clone()))
    return history


def _examine_names(log, model):
    wanted = [name for name, param in model.named_parameters() if param.ndim >= 2]
    if flat := [name for name, param in model.named_parameters() if param.ndim < 2 and name in log]:
        refuse("too_many_dims", name=flat[0])
    missing = [name for name in wanted if name not in log]
    if missing and missing == [name for name in wanted if not model.get_parameter(name).requires_grad]:
        refuse("frozen", name=missing[0])
    if set(log) != set(wanted):
        refuse("wrong_names", wanted=wanted, found=[str(name) for name in log])


def _examine_ratios(name, found, history, optimizer, is_frozen):
    if not isinstance(found, tuple | list) or not all(map(_is_number, found)):
        refuse("not_numbers", name=name, value=found)
    if len(found) != STEPS:
        refuse("frozen" if is_frozen else "other_steps", name=name, steps=STEPS, found=len(found))
    found = [float(ratio) for ratio in found]
    want = [_ratio(new - old, old) for old, _, new in history]
    if _near(found, want):
        return
    start = history[0][0]
    mistakes = {
        "by_gradient": [_ratio(grad, old) for old, grad, _ in history],
        "over_new": [_ratio(new - old, new) for old, _, new in history],
        "norms_only": [abs(_ratio(new, old) - 1) for old, _, new in history],
        "since_start": [_ratio(new - start, start) for _, _, new in history],
    }
    facts = {"name": name, "lr": optimizer.param_groups[0]["lr"], "optimizer": type(optimizer).__name__}
    ratios = {"found": found, "want": want}
    refuse_first([*RATIOS[:-1]], **facts, **ratios, **mistakes, is_frozen=is_frozen)
    refuse("wrong_ratio", **facts, found=found[0], want=want[0])


def _is_number(value):
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _ratio(part, whole):
    return (part.norm() / whole.norm()).item()


def _near(found, want):
    pairs = zip(found, want, strict=True)
    return all(abs(one - other) <= 1e-4 * max(abs(other), 1e-4) for one, other in pairs)


def _examine_unchanged(model, make_model, make_optimizer):
    plain, data = make_model()
    optimizer = make_optimizer(plain.parameters())
    for x in data[:STEPS]:
        _step(plain, optimizer, x)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    if not all(torch.allclose(one, other) for one, other in pairs):
        refuse("moved_weights")


LOG_RATIOS = Exercise("41.B", examine_log_ratios, log_ratios)

EXERCISES = [DEAD_UNITS, LOG_RATIOS]
