"""Checks of notebook 35: checkpoints out of pack and unpack."""

import gc
import itertools
import weakref
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab._support.torch_private import close_hooks, is_checkpoint_hook, outer_hooks
from hooklab.course.check import Exercise, Phrase, Refused, expect_like, refuse, refuse_first, said
from hooklab.course.checks.calls import all_close, raised

# ---- Both exercises: what a block went through, and what backward gave ----


class _Block(nn.Module):
    """Linear layers with Tanh, and dropout if wanted; notes its forwards and remembers their activations weakly."""

    def __init__(self, layers: int = 3, dropout: bool = False):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.drop = nn.Dropout(0.5) if dropout else nn.Identity()
        self.runs: list[SimpleNamespace] = []

    def forward(self, x: Tensor) -> Tensor:
        drops = self.drop.training and getattr(self.drop, "p", 0) > 0
        run = SimpleNamespace(activations=[], drops=drops, begin=torch.get_rng_state())
        self.runs.append(run)
        for index, linear in enumerate(self.linears):
            x = torch.tanh(linear(x))
            if index + 1 < len(self.linears):
                run.activations.append(weakref.ref(x.untyped_storage()))
            x = self.drop(x)
        run.end = torch.get_rng_state()
        return x

    def alive(self, run: int) -> int:
        """How many of the activations of a forward are still in memory."""
        gc.collect()
        return sum(ref() is not None for ref in self.runs[run].activations)


def _new(*, dropout=False, grad=True):
    torch.manual_seed(0)
    return _Block(dropout=dropout), torch.randn(5, 4, requires_grad=grad)


def _called(answer, block, x):
    """What the answer returns; saved-tensor hooks that it leaves open are closed."""
    before = outer_hooks()
    try:
        y = answer(block, x)
    finally:
        left = close_hooks(before)
    if left:
        refuse("hooks_left")
    return y


def _examine_forward(y, want, block):
    """One run, and nothing of it is kept."""
    if y is None:
        refuse("returned_nothing")
    expect_like(y, want)
    if not y.requires_grad:
        refuse("no_graph")
    if (runs := len(block.runs)) != 1:
        refuse("forwards", runs=runs)
    if alive := block.alive(0):
        refuse("nothing_saved", activations=len(block.runs[0].activations), alive=alive)


def gradients(block, **inputs):
    """The gradients that have arrived, by name."""
    tensors = {**dict(block.named_parameters()), **inputs}
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def _examine_gradients(got, want, key, **facts):
    if got.keys() < want.keys():
        refuse("gradient_missing")
    if not all_close(got, want):
        refuse(key, **facts)


def _examine_runs(block, backwards):
    if (runs := len(block.runs)) != backwards + 1:
        refuse("recomputed_often", runs=runs, backwards=backwards, wanted=backwards + 1)


def _examine_freed(block):
    if alive := block.alive(1):
        refuse("leaked", alive=alive)


def _examine_two_blocks(answer, *, dropout):
    """Two in a row, then backward."""

    def step(run):
        torch.manual_seed(0)
        blocks = nn.ModuleList(_Block(dropout=dropout) for _ in range(2))
        x = torch.randn(5, 4, requires_grad=True)
        torch.rand(3)
        _called(run, blocks[1], _called(run, blocks[0], x)).square().sum().backward()
        return gradients(blocks, x=x)

    want = step(nn.Module.__call__)
    try:
        _examine_gradients(step(answer), want, "mixed_up", error="-")
    except Refused:
        raise
    except Exception as error:
        refuse("mixed_up", error=said(error))


def _examine_by_hand(answer, *, dropout):
    """In torch's checkpoint the innermost hooks, while the block runs, are torch's own; by hand they are the learner's."""
    packs, (block, x) = [], _new(dropout=dropout)
    with block.register_forward_pre_hook(lambda *args: packs.append(outer_hooks())):
        answer(block, x)
    if any(pair and is_checkpoint_hook(pair[0]) for pair in packs):
        refuse("ready_made")


# ---- 35.A: a checkpoint that remembers the random numbers ----


def by_hand(block, x, *, around=nullcontext, missing=lambda index, again: not again, take=dict.__getitem__):
    """`handmade` of the notebook, which runs the block again, in a context, where what is asked for is missing."""
    again, number = {}, itertools.count()

    def unpack(index):
        if missing(index, again):
            fresh = itertools.count()
            collect = saved_tensors_hooks(lambda t: again.update({next(fresh): t.detach()}), print)
            with around(), torch.enable_grad(), collect:
                block(x)
        return take(again, index)

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


@contextmanager
def random_as(state, *, fork=True):
    with torch.random.fork_rng(devices=[], enabled=fork):
        torch.set_rng_state(state)
        yield


def faithful(block, x):
    return by_hand(block, x, around=partial(random_as, torch.get_rng_state()))


STEP = [  # a whole step, to be as `want`, the same without a checkpoint
    ("no_gradient", lambda t: not t.got.y.requires_grad),
    ("same_mask", lambda t: not t.got.output.allclose(t.want.output)),
    ("recomputed_often", lambda t: t.runs != t.wanted),
    ("gradient_missing", lambda t: t.got.gradients.keys() < t.want.gradients.keys()),
    ("wrong_mask", lambda t: not all_close(t.got.gradients, t.want.gradients)),
    ("disturbs_forward", lambda t: not t.got.between.equal(t.want.between)),
    ("disturbs", lambda t: not t.got.after.equal(t.want.after)),
]


def examine_faithful(answer):
    for dropout in (False, True):
        _examine_first_forward(answer, dropout)
    for seed, grad in ((1, True), (2, True), (3, False)):
        want, got = (_step(run, seed, grad) for run in (nn.Module.__call__, answer))
        block = got.block
        refuse_first(STEP, got=got, want=want, runs=len(block.runs), backwards=1, wanted=2)
        del got, want
        _examine_freed(block)
    _examine_two_blocks(answer, dropout=True)
    _examine_drawn_first(answer)
    _examine_by_hand(answer, dropout=True)


def _examine_first_forward(answer, dropout):
    block, x = _new(dropout=dropout)
    torch.manual_seed(1)
    y = _called(answer, block, x)
    torch.manual_seed(1)
    want = block(x).detach()
    true = block.runs.pop()
    if dropout and block.runs and isinstance(y, Tensor) and y.shape == want.shape and not torch.allclose(y, want):
        run = block.runs[0]
        drawn = run.begin.equal(true.begin) and (run.end.equal(true.end) or not run.drops)
        refuse("other_dropout" if drawn else "other_numbers")
    _examine_forward(y, want, block)


def _step(run, seed, grad):
    """One step: the results, and the numbers that are drawn after forward and after backward."""
    block, x = _new(dropout=True, grad=grad)
    torch.manual_seed(seed)
    torch.rand(3)  # as in any step but the first, the seed is not the state
    y = _called(run, block, x)
    between, output = torch.rand(3), y.detach().clone()
    if y.requires_grad:
        y.square().sum().backward()
    arrived = gradients(block, x=x)
    return SimpleNamespace(block=block, y=y, output=output, between=between, gradients=arrived, after=torch.rand(3))


def _examine_drawn_first(answer):
    """The block draws before it saves anything."""
    ones, drop = torch.ones(100, requires_grad=True), nn.Dropout(0.5)
    y = answer(drop, ones)
    y.sum().backward()
    if ones.grad is None or not torch.equal(y, ones.grad):
        refuse("state_too_late")


FAITHFUL = Exercise("35.A", examine_faithful, faithful)

# ---- 35.B: a checkpoint that frees what it has handed out ----


def frugal(block, x):
    return by_hand(block, x, missing=lambda index, again: index not in again, take=dict.pop)


def examine_frugal(answer):
    block, x = _new()
    want = block(x)
    want.square().sum().backward()
    true = gradients(block, x=x)
    block, x = _new()
    y = _called(answer, block, x)
    _examine_forward(y, want.detach(), block)
    alive = []
    for linear in block.linears:  # backward comes to the last one first
        linear.bias.register_post_accumulate_grad_hook(lambda param: alive.append(block.alive(-1)))
    loss = y.square().sum()
    try:
        loss.backward(retain_graph=True)
        _examine_gradients(gradients(block, x=x), true, "wrong_gradients")
    except Exception:
        _examine_handed_out(answer)
        raise
    _examine_runs(block, backwards=1)
    if alive[2]:
        refuse("kept_recomputed", activations=len(block.runs[1].activations), alive=alive[2])
    if alive[1] > 1:
        refuse("freed_at_the_end", activations=len(block.runs[1].activations))
    for tensor in (*block.parameters(), x):
        tensor.grad = None
    if error := raised(loss.backward):
        refuse("second_raised", error=error)
    _examine_gradients(gradients(block, x=x), true, "wrong_second")
    _examine_runs(block, backwards=2)
    del y, loss
    _examine_freed(block)
    _examine_two_blocks(answer, dropout=False)
    _examine_partial(answer, true)
    _examine_next(answer)
    _examine_by_hand(answer, dropout=False)


class _Compared(_Block):
    """Notes what is packed in its first forward, and what is handed out for it: a shape, or the type of what is no tensor."""

    def __init__(self):
        super().__init__()
        self.packed, self.handed_out = [], []

    def forward(self, x: Tensor) -> Tensor:
        hooks = outer_hooks()
        if self.runs or hooks is None:
            return super().forward(x)
        pack, unpack = hooks

        def pack_noting(tensor):
            self.packed.append(tuple(tensor.shape))
            return len(self.packed) - 1, pack(tensor)

        def unpack_noting(kept):
            index, got = kept[0], unpack(kept[1])
            self.handed_out.append((index, tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__))
            return got

        with saved_tensors_hooks(pack_noting, unpack_noting):
            return super().forward(x)


def _examine_handed_out(answer):
    """The first backward has failed, or its gradients are wrong: was it handed another tensor?"""
    block, x = _Compared(), torch.randn(5, 4, requires_grad=True)
    with suppress(Exception):
        _called(answer, block, x).square().sum().backward()
    for asked, (index, found) in enumerate(block.handed_out, start=1):
        if found != (shape := block.packed[index]):
            key = "no_tensor" if isinstance(found, str) else "other_shape" if found in block.packed else "reshaped"
            refuse(key, handed_out=Phrase("handed_out"), asked=asked, index=index, shape=shape, found=found)


def _examine_partial(answer, true):
    """The first backward takes a part of what was recomputed."""
    block, x = _new()
    loss = answer(block, x).square().sum()
    torch.autograd.grad(loss, block.linears[-1].weight, retain_graph=True)
    if not _gives(lambda: loss, [*block.parameters(), x], true.values()):
        refuse("partial_backward")


def _examine_next(answer):
    """A backward has taken a part of what was recomputed; then comes another block."""
    first, x = _new()
    torch.autograd.grad(answer(first, x).sum(), first.linears[1].weight)
    block, x = _Block(layers=1), torch.randn(5, 4, requires_grad=True)
    params = list(block.parameters())
    want = torch.autograd.grad(block(x).sum(), params)
    if not _gives(lambda: answer(block, x).sum(), params, want):
        refuse("left_from_before")
    _examine_freed(first)


def _gives(loss, tensors, want):
    """Whether what `loss` returns has these gradients."""
    try:
        got = torch.autograd.grad(loss(), tensors)
    except (LookupError, RuntimeError, TypeError):
        return False
    return all(map(torch.equal, got, want))


FRUGAL = Exercise("35.B", examine_frugal, frugal)

EXERCISES = [FAITHFUL, FRUGAL]
