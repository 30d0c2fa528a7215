"""Checks of notebook 35: checkpointing."""

import itertools
import re
import traceback
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hooklab.course.check import Exercise, Phrase, refuse, refuse_first, said
from hooklab.course.checks.calls import all_close
from hooklab.course.checks.n35_handmade import gradients
from hooklab.course.reachable import within

# ---- 35.C: buffers as after one forward ----


def copies(block):
    return {name: buffer.clone() for name, buffer in block.named_buffers()}


def put(block, values):
    with torch.no_grad():
        for name, buffer in block.named_buffers():
            buffer.copy_(values[name])


@contextmanager
def note(block, found):
    found.update(copies(block))
    yield


def buffers_once(block):
    found = {}

    class Second:  # every backward enters it again; what `@contextmanager` makes can be entered once
        def __enter__(self):
            self.now = copies(block)
            put(block, found)

        def __exit__(self, *exc_info):
            put(block, self.now)

    return note(block, found), Second()


class _Centred(nn.Module):
    """Takes off a running mean, which is in no `state_dict`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4), persistent=False)

    def forward(self, x):
        x = self.linear(x)
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return torch.tanh(x - self.mean)


MODELS = {
    "BatchNorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
    "`persistent=False`": _Centred,
}

STEP = [  # forwards, then backward, to be as `want`, the same without a checkpoint
    ("forward_changed", lambda t: not _same(t.got.middle, t.want.middle)),
    ("gradient_missing", lambda t: t.got.gradients.keys() < t.want.gradients.keys()),
    ("wrong_gradients", lambda t: not all_close(t.got.gradients, t.want.gradients)),
    ("never_updated", lambda t: not _same(t.got.buffers, t.want.buffers) and _same(t.got.buffers, t.got.before)),
    ("wrong_buffers", lambda t: not _same(t.got.buffers, t.want.buffers)),
    ("settings_changed", lambda t: t.got.settings != t.want.settings),
]


def examine_buffers(answer):
    torch.manual_seed(0)
    pair = answer(MODELS["BatchNorm"]())
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        refuse("no_pair", pair=pair)
    if not all(hasattr(context, "__enter__") and hasattr(context, "__exit__") for context in pair):
        refuse("no_contexts", kinds=", ".join(type(context).__name__ for context in pair))
    for count, name in itertools.product((1, 2), ("BatchNorm", "spectral norm")):
        _examine_step(answer, name, count)
    for count in (1, 2):
        _examine_step(answer, "`persistent=False`", count)
    _examine_two_backwards(answer)
    _examine_errors(answer)


def _examine_step(answer, name, count):
    want, got = _step(name, count), _step(name, count, answer)
    right = all_close(got.gradients, want.gradients) and _same(got.buffers, want.buffers)
    where = {"where": Phrase("after_1" if count == 1 else "after_2"), "name": name}
    if not right and _same(got.middle, want.middle) and not _same(got.buffers, got.before):
        _examine_copies(answer, where)
    refuse_first(STEP, got=got, want=want, **where)


def _step(name, count, contexts=None, backwards=1):
    torch.manual_seed(0)
    block, batches = MODELS[name](), [torch.randn(6, 4) for _ in range(count)]
    checkpointed = partial(checkpoint, block, use_reentrant=False, context_fn=lambda: contexts(block))
    run = block if contexts is None else checkpointed
    before = copies(block)
    loss = sum(run(batch).square().sum() for batch in batches)
    middle = copies(block)
    for number in range(backwards):  # the last forward first
        loss.backward(retain_graph=number + 1 < backwards)
    settings = [(module.training, getattr(module, "momentum", None)) for module in block.modules()]
    return SimpleNamespace(
        gradients=gradients(block), before=before, middle=middle, buffers=copies(block), settings=settings
    )


def _same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _examine_copies(answer, where):
    """Something is wrong: do the values that were kept change together with the buffers?"""
    block, x = MODELS["BatchNorm"](), torch.randn(6, 4)
    try:
        first, second = answer(block)
        with first:
            block(x)
        start = _follow(block, 7, second.__enter__)
        now = _follow(block, 9, lambda: second.__exit__(None, None, None))
    except Exception:
        return
    if start or now:
        refuse("start_not_copied" if start else "now_not_copied", **where)


def _follow(block, filled, act):
    """Whether what `act` writes into the buffers, which are `filled` before, has changed together with them."""
    _fill(block, filled)
    with _Refilling(block):
        act()
    values = [float(buffer.reshape(-1)[0]) for buffer in block.buffers()]
    # A copy that is made only now, one buffer after the other, comes too early for the first of them.
    return set(values) <= {filled, 8} and values.count(filled) <= 1


def _fill(block, number):
    with torch.no_grad():
        for buffer in block.buffers():
            buffer.fill_(number)


class _Refilling(TorchFunctionMode):
    """Fills the buffers with 8 when the first of them is about to be written: a copy made before keeps its value."""

    def __init__(self, block):
        super().__init__()
        self.block, self.memory = block, {buffer.data_ptr() for buffer in block.buffers()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        in_place = func.__name__ == "__setitem__" or re.fullmatch(r"\w*[^_]_", func.__name__)
        if in_place and self.memory & {one.data_ptr() for one in within(args[:1]) if isinstance(one, Tensor)}:
            _fill(self.block, 8)
            self.memory = set()
        return func(*args, **(kwargs or {}))


def _examine_two_backwards(answer):
    want = _step("spectral norm", 1, backwards=2)
    try:
        got = _step("spectral norm", 1, answer, backwards=2)
    except (AttributeError, RuntimeError, TypeError):
        got = None
    if not got or not _same(got.gradients, want.gradients) or not _same(got.buffers, want.buffers):
        refuse("one_backward")


def _examine_errors(answer):
    """An error of the block has to come out of the contexts, in forward and while recomputing."""
    block, x = MODELS["BatchNorm"](), torch.randn(6, 4)
    _examine_error(answer(block)[0], "forward_error", "forward_error")
    first, second = answer(block)
    with first:
        block(x)
    _examine_error(second, "recompute_error", "recompute_error-lost")


def _examine_error(context, key, key_if_lost):
    """The second key is for an error of which no traceback tells."""
    cause, arrived, told = ValueError("data server gone"), "None", False
    try:
        with context:
            raise cause
    except Exception as error:
        arrived, told = said(error), str(cause) in "".join(traceback.format_exception(error))
    if arrived != said(cause):
        refuse(key if told else key_if_lost, error=said(cause), arrived=arrived)


BUFFERS = Exercise("35.C", examine_buffers, buffers_once)

EXERCISES = [BUFFERS]
