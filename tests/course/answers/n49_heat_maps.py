"""Answers to the exercises of notebook 49: wrong ones by the name of their refusal, and right ones."""

import torch
from torch.nn import functional as F

from answers.around import clearing, swallowing
from hooklab import features, with_grad
from hooklab.course.checks.n49_heat_maps import cam_at

# ---- 49.A: Grad-CAM ----


def _cam(
    score=lambda logits, target: logits.gather(1, target[:, None]).sum(),
    weights=lambda grad: grad.mean((2, 3), keepdim=True),
    last=lambda cam: cam.relu(),
    run=lambda model, x: model(x),
):
    """An answer that is right but for what is given."""

    def answer(model, layer, x, target):
        x = x.detach().requires_grad_()
        with features(model, layer, keep=with_grad) as f:
            torch.autograd.grad(score(run(model, x), target), x)
        return last((weights(f[layer].grad) * f[layer]).sum(1))

    return answer


def _by_hand(copy=True, remove=True, detach=True, behind=False):
    """With one hook that stores the output and a hook for its gradient."""

    def answer(model, layer, x, target):
        kept = {}

        def keep(module, args, output):
            kept["maps"] = output.detach().clone() if copy else output
            if behind:
                kept["output"] = output
            else:
                output.register_hook(lambda grad: kept.update(grad=grad))

        handle = model.get_submodule(layer).register_forward_hook(keep)
        try:
            x = x.clone().requires_grad_()
            score = model(x).gather(1, target[:, None]).sum()
            if behind:
                (kept["grad"],) = torch.autograd.grad(score, kept["output"])
            else:
                torch.autograd.grad(score, x)
        finally:
            if remove:
                handle.remove()
        cam = (kept["grad"].mean((2, 3), keepdim=True) * kept["maps"]).sum(1).relu()
        return cam.detach() if detach else cam

    return answer


def leaves_hook_after_an_error(model, layer, x, target):
    kept = features(model, layer, keep=with_grad)
    x = x.detach().requires_grad_()
    score = model(x).gather(1, target[:, None]).sum()
    kept.remove()
    torch.autograd.grad(score, x)
    return _sum(kept[layer])


def _sum(kept):
    return (kept.grad.mean((2, 3), keepdim=True) * kept).sum(1).relu()


def writes_grads(model, layer, x, target):
    with features(model, layer, keep=with_grad) as f:
        model(x).gather(1, target[:, None]).sum().backward()
    return _sum(f[layer])


def clears_grads(model, layer, x, target):
    cam = writes_grads(model, layer, x, target)
    model.zero_grad()
    return cam


def runs_twice(model, layer, x, target):
    model(x)
    return cam_at(model, layer, x, target)


def runs_for_each_image(model, layer, x, target):
    return torch.cat([cam_at(model, layer, x[i : i + 1], target[i : i + 1]) for i in range(len(x))])


def one_layer_only(model, layer, x, target):
    return cam_at(model, layer, x, target) if layer == "conv" else torch.zeros(len(x), *x.shape[2:])


def in_eval_mode(model, layer, x, target):
    return cam_at(model.eval(), layer, x, target)


def enlarged(model, layer, x, target):
    cam = cam_at(model, layer, x, target)[:, None]
    return F.interpolate(cam, scale_factor=2, mode="bilinear")[:, 0]


def attached(model, layer, x, target):
    """The copy in the graph."""
    kept = []
    with model.get_submodule(layer).register_forward_hook(lambda *call: kept.append(call[-1].clone()) or kept[0]):
        score = model(x).gather(1, target[:, None]).sum()
    (grad,) = torch.autograd.grad(score, kept[0], retain_graph=True)
    return (grad.mean((2, 3), keepdim=True) * kept[0]).sum(1).relu()


# ---- 49.B: the pointing game ----


def _game(
    score=lambda maps: maps,
    swap=False,
    hit=lambda row, column, box: (box[0] <= row) & (row < box[2]) & (box[1] <= column) & (column < box[3]),
    flat=lambda hits, maps: hits & (maps.flatten(1).amax(1) > maps.flatten(1).amin(1)),
    share=lambda hits: hits.double().mean().item(),
    box=lambda boxes: boxes,
):
    """An answer that is right but for what is given."""

    def answer(maps, boxes):
        highest = score(maps).flatten(1).argmax(1)
        row, column = highest // maps.shape[2], highest % maps.shape[2]
        row, column = (column, row) if swap else (row, column)
        return share(flat(hit(row, column, box(boxes).unbind(1)), maps))

    return answer


def most_in_the_box(maps, boxes):
    """Asks for the larger part of the map, not for its highest point."""
    hits = 0
    for one, (top, left, bottom, right) in zip(maps, boxes.tolist(), strict=True):
        positive = one - one.min()
        hits += float(positive[top:bottom, left:right].sum() > positive.sum() / 2)
    return hits / len(maps)


WRONG = {
    "49.A": {
        "returned_nothing": lambda *given: print(cam_at(*given)),
        "not_run": lambda model, layer, x, target: torch.zeros(len(x), *x.shape[2:]),
        "ran_often": runs_for_each_image,
        "max_logit": _cam(score=lambda logits, target: logits.amax(1).sum()),
        "first_target": _cam(score=lambda logits, target: logits[:, target[0]].sum()),
        "overwritten": _by_hand(copy=False),
        "no_relu": _cam(last=lambda cam: cam),
        "absolute": _cam(last=torch.abs),
        "not_averaged": _cam(weights=lambda grad: grad),
        "mixed_batch": _cam(weights=lambda grad: grad.mean((0, 2, 3), keepdim=True)),
        "summed": _cam(weights=lambda grad: grad.sum((2, 3), keepdim=True)),
        "of_softmax": _cam(score=lambda logits, target: logits.softmax(1).gather(1, target[:, None]).sum()),
        "enlarged": enlarged,
        "with_channel": _cam(last=lambda cam: cam.relu()[:, None]),
        "still_attached": attached,
        "grads_left": writes_grads,
        "other_model": one_layer_only,
        "mode_changed": in_eval_mode,
        "hooks_left": _by_hand(remove=False),
        "hooks_left_after_error": leaves_hook_after_an_error,
        "removed_others": clearing(cam_at),
        "swallowed": swallowing(cam_at, torch.zeros(4, 6, 6)),
    },
    "49.B": {
        "not_float": _game(share=lambda hits: hits.double().mean()),
        "counted": _game(share=lambda hits: float(hits.sum())),
        "swapped": _game(swap=True),
        "ends_inside": _game(
            hit=lambda row, column, box: (box[0] <= row) & (row <= box[2]) & (box[1] <= column) & (column <= box[3])
        ),
        "starts_outside": _game(
            hit=lambda row, column, box: (box[0] < row) & (row < box[2]) & (box[1] < column) & (column < box[3])
        ),
        "flat_hits": _game(flat=lambda hits, maps: hits),
        "flat_left_out": _game(flat=lambda hits, maps: hits[maps.flatten(1).amax(1) > maps.flatten(1).amin(1)]),
        "zero_only": _game(flat=lambda hits, maps: hits & maps.flatten(1).any(1)),
        "lowest": _game(score=torch.neg),
        "absolute": _game(score=torch.abs),
        "wrong_share": most_in_the_box,
    },
}

ALSO_WRONG = [
    ("49.A", "ran_often", runs_twice),
    ("49.A", "overwritten", _by_hand(copy=False, behind=True)),
    ("49.A", "grads_left", clears_grads),
]


def in_a_loop(maps, boxes):
    hits = 0
    for one, (top, left, bottom, right) in zip(maps, boxes.tolist(), strict=True):
        row, column = divmod(one.argmax().item(), one.shape[1])
        hits += one.max() > one.min() and top <= row < bottom and left <= column < right
    return float(hits / len(maps))


RIGHT = [
    ("49.A", _by_hand()),
    ("49.A", _cam()),
    ("49.B", in_a_loop),
    ("49.B", _game()),
]
