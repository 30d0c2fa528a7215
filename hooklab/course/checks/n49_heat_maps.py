"""Checks of notebook 49: heat maps."""

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, expect_like, refuse, refuse_first
from hooklab.course.checks.calls import close
from hooklab.course.checks.models import Before, fails, refuse_hooks
from hooklab.layers.activation_gradients import with_grad
from hooklab.layers.features import features

# ---- 49.A: Grad-CAM ----


class _Net(nn.Module):
    """A convolution with an in-place ReLU behind it; `fails` raises when every layer has been called."""

    def __init__(self, fails: bool = False):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.mix, self.head, self.fails = nn.Conv2d(4, 3, 2), nn.Linear(3, 3), fails

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.relu(self.conv(x)))).mean((2, 3))
        if self.fails:
            raise RuntimeError("the data has ended")
        return self.head(x) * 3


class _Deep(nn.Module):
    """Another layer, one level down, in float64, behind parameters that need no gradient; maps that are not square."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Conv2d(2, 3, 3, stride=2).requires_grad_(False)
        self.body = nn.Sequential(stem, nn.Tanh(), nn.Conv2d(3, 5, 3, padding=1))
        self.head = nn.Linear(5 * 3 * 5, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).flatten(1))


def _seeded(make, *args, **kwargs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return make(*args, **kwargs)


def _images(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 2.4).sin().view(shape) * 2


def cam_at(model, layer, x, target):
    x = x.detach().requires_grad_()
    with features(model, layer, keep=with_grad) as f:
        score = model(x).gather(1, target[:, None]).sum()
        torch.autograd.grad(score, x)
    weights = f[layer].grad.mean((2, 3), keepdim=True)
    return (weights * f[layer]).sum(1).relu()


X, TARGET = _images(4, 1, 6, 6), torch.tensor([0, 2, 1, 2])

MAPS = [  # `maps` and `grad` are those of the layer, `got` has the right shape
    ("no_relu", lambda t: close(t.got, _sum(t))),
    ("absolute", lambda t: close(t.got, _sum(t).abs())),
    ("overwritten", lambda t: close(t.got, _sum(t, maps=t.maps.relu()).relu())),
    ("overwritten", lambda t: close(t.got, _sum(t, maps=t.maps.relu(), grad=_behind(t)).relu())),
    ("max_logit", lambda t: close(t.got, cam_at(t.model, "conv", t.x, t.model(t.x).argmax(1)))),
    ("first_target", lambda t: close(t.got, cam_at(t.model, "conv", t.x, t.target[:1].expand(4)))),
    ("not_averaged", lambda t: close(t.got, (t.grad * t.maps).sum(1).relu())),
    ("mixed_batch", lambda t: close(t.got, _sum(t, weights=t.grad.mean((0, 2, 3), keepdim=True)).relu())),
    ("of_softmax", lambda t: close(t.got, _sum(t, grad=_softmax_grad(t)).relu())),
]


def _sum(t, maps=None, grad=None, weights=None):
    weights = (t.grad if grad is None else grad).mean((2, 3), keepdim=True) if weights is None else weights
    return (weights * (t.maps if maps is None else maps)).sum(1)


def _kept(model, layer, x, target, score=lambda logits: logits):
    x = x.detach().requires_grad_()
    with features(model, layer, keep=with_grad) as f:
        torch.autograd.grad(score(model(x)).gather(1, target[:, None]).sum(), x)
    return f[layer].detach(), f[layer].grad


def _behind(t):
    """The gradient behind the in-place ReLU."""
    return _kept(t.model, "relu", t.x, t.target)[1]


def _softmax_grad(t):
    return _kept(t.model, "conv", t.x, t.target, lambda logits: logits.softmax(1))[1]


def examine_cam_at(answer):
    model, given = _seeded(_Net), []
    counter = model.register_forward_pre_hook(lambda module, args: given.append(1))
    model.mix.register_forward_hook(lambda module, args, output: None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = Before(model)
    got = answer(model, "conv", X.clone(), TARGET.clone())
    refuse_hooks(before, "hooks_left")
    refuse_first(RUNS, given=given, got=got, times=len(given))
    counter.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not bool((parameter.grad == 1).all()):
            refuse("grads_left", name=name)
    refuse_first([("mode_changed", lambda t: t.modes)], modes=before.changed_modes())
    _examine_maps(got, model)
    _examine_other(answer)


RUNS = [
    ("not_run", lambda t: not t.given),
    ("ran_often", lambda t: len(t.given) > 1),
    ("returned_nothing", lambda t: t.got is None),
]


def _examine_maps(got, model):
    want = cam_at(model, "conv", X, TARGET)
    if isinstance(got, Tensor) and got.shape != want.shape:
        key = "with_channel" if got.numel() == want.numel() else "enlarged"
        refuse(key, found=tuple(got.shape), expected=tuple(want.shape))
    if isinstance(got, Tensor) and got.requires_grad:
        refuse("still_attached")
    if not close(got, want):
        maps, grad = _kept(model, "conv", X, TARGET)
        refuse_first(MAPS, got=got, want=want, maps=maps, grad=grad, model=model, x=X, target=TARGET)
        places = maps.shape[2] * maps.shape[3]
        if close(got, want * places):
            refuse("summed", factor=places)
    expect_like(got, want)


def _examine_other(answer):
    """Another model in training mode and float64, with fewer images, and an error from inside the model."""
    deep, x, target = _seeded(_Deep), _images(2, 2, 7, 11).double(), torch.tensor([3, 1])
    got = answer(deep, "body.2", x.clone(), target)
    if not close(got, cam_at(deep, "body.2", x, target)):
        refuse("other_model")
    broken = _seeded(_Net, fails=True)
    with fails(broken):
        answer(broken, "conv", X.clone(), TARGET.clone())


GRAD_CAM = Exercise("49.A", examine_cam_at, cam_at)

# ---- 49.B: the pointing game ----


def pointing_game(maps, boxes):
    flat = maps.flatten(1)
    row, column = torch.unravel_index(flat.argmax(1), maps.shape[1:])
    top, left, bottom, right = boxes.unbind(1)
    hit = (top <= row) & (row < bottom) & (left <= column) & (column < right)
    hit &= flat.amax(1) > flat.amin(1)
    return hit.double().mean().item()


def _game(points, boxes, width=8):
    """Maps of 0 with a highest point each, and the lowest in the bottom right corner."""
    maps = torch.zeros(len(points), 5, width)
    maps[:, 4, -1] = -0.5
    for one, (row, column) in zip(maps, points, strict=True):
        one[row, column] = 1
    return {"maps": maps, "boxes": torch.tensor(boxes)}


PLAIN = _game(
    [(1, 3), (3, 2), (2, 4), (0, 4), (4, 6)],
    [[0, 2, 3, 5], [2, 1, 5, 4], [1, 3, 4, 6], [3, 0, 5, 2], [0, 0, 2, 3]],
)
PLAIN["maps"][4, 1, 1] = -0.75
ENDS = _game([(3, 6), (2, 7), (2, 8)], [[1, 5, 3, 8]] * 3, width=9)
STARTS = _game([(1, 6), (2, 5), (0, 0)], [[1, 5, 3, 8], [1, 5, 3, 8], [2, 2, 4, 4]])
ZEROS = _game([(0, 0), (2, 6), (1, 1)], [[0, 0, 2, 3], [1, 5, 3, 8], [2, 4, 4, 6]])
ZEROS["maps"][0] = 0
SAME = {"maps": ZEROS["maps"].clone(), "boxes": ZEROS["boxes"]}
SAME["maps"][0] = 2.5
DEEP = _game([(1, 3), (3, 2)], [[0, 2, 3, 5], [2, 1, 5, 4]])
DEEP["maps"][0, 4, 0] = -9
TALL = {"maps": PLAIN["maps"].double().transpose(1, 2), "boxes": PLAIN["boxes"][:, [1, 0, 3, 2]]}

GAMES = [  # and what shows in each, in an answer that was right in those before
    (PLAIN, ["counted", "swapped", "lowest"]),
    (ENDS, ["ends_inside"]),
    (STARTS, ["starts_outside"]),
    (ZEROS, ["flat_hits", "flat_left_out"]),
    (SAME, ["zero_only"]),
    (DEEP, ["absolute"]),
    (TALL, []),
]


def _share(maps, boxes, swap=False, first=0, last=0, flat="miss", score=lambda maps: maps, counted=False):
    """What a mistake makes of a game."""
    row, column = torch.unravel_index(score(maps).flatten(1).argmax(1), maps.shape[1:])
    row, column = (column, row) if swap else (row, column)
    top, left, bottom, right = boxes.unbind(1)
    hit = (top + first <= row) & (row < bottom + last) & (left + first <= column) & (column < right + last)
    varies = maps.flatten(1).amax(1) > maps.flatten(1).amin(1)
    if flat == "left out":
        hit = hit[varies]
    elif flat == "zero":
        hit &= maps.flatten(1).any(1)
    elif flat == "miss":
        hit &= varies
    return float(hit.sum()) if counted else hit.double().mean().item()


MISTAKES = {
    "counted": {"counted": True},
    "swapped": {"swap": True},
    "lowest": {"score": torch.neg},
    "ends_inside": {"last": 1},
    "starts_outside": {"first": 1},
    "flat_hits": {"flat": "hit"},
    "flat_left_out": {"flat": "left out"},
    "zero_only": {"flat": "zero"},
    "absolute": {"score": torch.abs},
}


def examine_pointing_game(answer):
    for game, shows in GAMES:
        got, want = answer(game["maps"].clone(), game["boxes"].clone()), pointing_game(**game)
        if not isinstance(got, float):
            refuse("not_float", got=got)
        if abs(got - want) > 1e-6:
            refuse_first([(key, lambda t, key=key: _like(t, key)) for key in shows], got=got, game=game)
            refuse("wrong_share", got=round(got, 4), want=round(want, 4))


def _like(t, key):
    return abs(t.got - _share(**t.game, **MISTAKES[key])) < 1e-6


POINTING_GAME = Exercise("49.B", examine_pointing_game, pointing_game)

EXERCISES = [GRAD_CAM, POINTING_GAME]
