"""Checks of notebook 51: it never fires."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from hooklab.census import hooks_on
from hooklab.course.check import Exercise, refuse, refuse_first, refuse_from_before
from hooklab.course.checks.models import Before, fails, refuse_hooks

# ---- 51.A: which hooked modules does nobody call? ----


def never_called(model, run):
    called = set()

    def note(module, args):
        called.add(module)

    hooks = [hook for hook in hooks_on(model) if hook.kind == "forward hook"]
    hooked = {hook.place for hook in hooks}
    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    modules = model.named_modules()
    return {name for name, m in modules if name in hooked and m not in called}


class _Model(nn.Module):
    """`blocks` is a list, `head` is called by its forward, `spare` not at all; `fails` raises on its way."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.stem, self.fails = nn.Linear(2, 2), fails
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
        self.head, self.spare, self.bare = nn.Linear(2, 1), nn.ReLU(), nn.ReLU()

    def forward(self, x):
        x = self.stem(x)
        if self.fails:
            raise RuntimeError("the data has ended")
        for block in self.blocks:
            x = block(x)
        return self.head.forward(x)


class _Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2)

    def forward(self, x):
        return self.decoder(self.encoder(x))


def _look(*args):
    """A hook that changes nothing."""


def _hooked(model, *names):
    """A run notes itself in `runs`."""
    for name in names:
        model.get_submodule(name).register_forward_hook(_look)
    return model


NAMES = [  # `got` is a set of names; `want` is the right one
    ("ran_twice", lambda t: len(t.runs) > 1),
    ("not_run", lambda t: not t.runs),
    ("own_hook", lambda t: t.got & {"", "_Model"}),
    ("from_before", lambda t: t.got & t.foreign),
    ("without_hook", lambda t: "bare" in t.got),
    ("other_kinds", lambda t: t.got & {"spare", "blocks.1.1"}),
    ("all_hooked", lambda t: "stem" in t.got or "blocks.1" in t.got),
    ("went_around", lambda t: "head" not in t.got),
    ("list_counts", lambda t: "blocks" not in t.got),
    ("wrong_names", lambda t: t.got != t.want),
]


def examine_never_called(answer):
    model, x, runs = _hooked(_Model(), "", "stem", "blocks", "blocks.1", "blocks.1.0", "head"), torch.ones(1, 2), []
    model.spare.register_forward_pre_hook(_look)
    model.blocks[1][1].register_full_backward_hook(_look)

    def run():
        runs.append(1)
        model(x)

    before = Before(model)
    got = _names(answer(model, run))
    refuse_hooks(before, "hooks_left")
    refuse_first(NAMES, got=got, want={"blocks", "head"}, runs=runs, foreign={"decoder"}, name="decoder")
    _examine_part(answer, model)
    _examine_other(answer, model)
    broken = _hooked(_Model(fails=True), "stem", "head")
    with fails(broken):
        answer(broken, lambda: broken(x))


def _names(got):
    if not isinstance(got, set | frozenset) or not all(isinstance(name, str) for name in got):
        refuse("no_set", got=got)
    return got


def _examine_part(answer, model):
    """Not the model is run, only one of its blocks."""
    got = _names(answer(model, lambda: model.blocks[1](torch.ones(1, 2))))
    if got != {"stem", "blocks", "head"}:
        refuse("ran_the_model", got=sorted(got))


def _examine_other(answer, first):
    other = _hooked(_Other(), "encoder", "decoder")
    got = _names(answer(other, lambda: other.encoder(torch.ones(1, 2))))
    refuse_from_before(got, other, dict(first.named_modules()))
    if got != {"decoder"}:
        refuse("wrong_names-other", got=sorted(got))


NEVER_CALLED = Exercise("51.A", examine_never_called, never_called)

# ---- 51.B: from a tensor to its parameters ----


def leaves_of(tensor):
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    leaves, seen, todo = [], set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [before for before, _ in node.next_functions]
    return leaves


def _normed():
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    return layer.weight, list(layer.parametrizations.weight.parameters())


def _pruned():
    layer = nn.Linear(2, 2)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return layer.weight, [layer.weight_orig]


def _deep(w):
    tensor = w
    for _ in range(3000):
        tensor = tensor + 1
    return tensor


def _cases():
    """(how it is written, the tensor, the leaves behind it)"""
    w, v, data = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), torch.ones(2)
    yield "w[0]", w[0], [w]
    yield "w * v + w", w * v + w, [w, v]
    yield "w", w, [w]
    yield "data", data, []
    yield "data * 2", data * 2, []
    yield "w.detach() * v", w.detach() * v, [v]
    yield "w * data", w * data, [w]
    yield "pruned.weight", *_pruned()
    yield "normed.weight", *_normed()
    yield "w + 1 + 1 + …", _deep(w), [w]


def _ids(leaves):
    return {id(leaf) for leaf in leaves}


LEAVES = [  # `got` is a list of tensors
    ("itself", lambda t: t.case == "w" and not t.got),
    ("not_a_leaf", lambda t: any(not leaf.is_leaf for leaf in t.got)),
    ("no_gradient", lambda t: any(not leaf.requires_grad for leaf in t.got)),
    ("twice", lambda t: len({id(leaf) for leaf in t.got}) < len(t.got)),
    ("from_before", lambda t: _ids(t.got) > _ids(t.want)),
    ("missed", lambda t: len(t.got) < len(t.want)),
    ("other_leaves", lambda t: _ids(t.got) != _ids(t.want)),
]


def examine_leaves_of(answer):
    with torch.enable_grad():
        cases = list(_cases())
    for case, tensor, want in cases:
        try:
            got = answer(tensor)
        except RecursionError:
            refuse("too_deep")
        if not isinstance(got, list | tuple):
            refuse("no_list", case=case, got=got)
        if others := [item for item in got if not isinstance(item, Tensor)]:
            refuse("nodes", case=case, item=others[0])
        refuse_first(LEAVES, case=case, got=got, want=want, found=len(got), wanted=len(want))


LEAVES_OF = Exercise("51.B", examine_leaves_of, leaves_of)

EXERCISES = [NEVER_CALLED, LEAVES_OF]
