"""Answers to the exercises of notebook 35: wrong ones by the name of their refusal, and right ones."""

import itertools
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hooklab.course.checks.n35_checkpointing import buffers_once, copies, note, put
from hooklab.course.checks.n35_handmade import by_hand, faithful, frugal, random_as

# ---- 35.A: a checkpoint that remembers the random numbers ----


def stores_too_late(block, x):
    again, number, state = [], itertools.count(), []

    def pack(tensor):
        if not state:
            state.append(torch.get_rng_state())
        return next(number)

    def unpack(index):
        if not again:
            collect = saved_tensors_hooks(lambda t: again.append(t.detach()), print)
            with random_as(state[0]), torch.enable_grad(), collect:
                block(x)
        return again[index]

    with saved_tensors_hooks(pack, unpack):
        return block(x)


def seeds_both(block, x):
    torch.manual_seed(0)
    return faithful(block, x)


def without_dropout(block, x):
    block.eval()
    y = faithful(block, x)
    block.train()
    return y


def seeds_again(block, x):
    torch.manual_seed(torch.initial_seed())
    return faithful(block, x)


def faithful_keeps(block, x):
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return block(x)


def without_enable_grad(block, x):
    again, number, state = [], itertools.count(), torch.get_rng_state()

    def unpack(index):
        if not again:
            with saved_tensors_hooks(lambda t: again.append(t.detach()), print):
                torch.set_rng_state(state)
                block(x)
        return again[index]

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


def recomputes_each_time(block, x):
    state = torch.get_rng_state()
    return by_hand(block, x, around=lambda: random_as(state), missing=lambda index, again: True)


def faithful_no_graph(block, x):
    with torch.no_grad():
        return block(x)


def faithful_leaves_hooks(block, x):
    hooks = saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
    hooks.__enter__()
    return block(x)


def leaks(block, x):
    again, number, state = [], itertools.count(), torch.get_rng_state()

    def unpack(index):
        if not again:
            with random_as(state), torch.enable_grad(), saved_tensors_hooks(again.append, print):
                block(x)
        return again[index]

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def draws_in_forward(block, x):
    state = torch.get_rng_state()
    y = faithful(block, x)
    torch.set_rng_state(state)
    return y


def one_state_for_all(block, x):
    _LAST["state"] = torch.get_rng_state()
    return by_hand(block, x, around=lambda: random_as(_LAST["state"]))


_LAST: dict = {}

# ---- 35.B: a checkpoint that frees what it has handed out ----


def _frugal(*, store=dict, keep=torch.Tensor.detach):
    """The reference, with another place for what is recomputed, or with other tensors in it."""

    def answer(block, x):
        again, number = store(), itertools.count()

        def unpack(index):
            if index not in again:
                fresh = itertools.count()
                with torch.enable_grad(), saved_tensors_hooks(lambda t: again.update({next(fresh): keep(t)}), print):
                    block(x)
            return again.pop(index)

        with saved_tensors_hooks(lambda t: next(number), unpack):
            return block(x)

    return answer


def _frugal_list(take):
    def answer(block, x):
        again, number = [], itertools.count()

        def unpack(index):
            if not again:
                collect = saved_tensors_hooks(lambda t: again.append(t.detach()), print)
                with torch.enable_grad(), collect:
                    block(x)
            return take(again, index)

        with saved_tensors_hooks(lambda t: next(number), unpack):
            return block(x)

    return answer


def never_again(block, x):
    once = iter([True])
    return by_hand(block, x, missing=lambda index, again: next(once, False), take=dict.pop)


def _doubling(right):
    """A wrong answer: after so many tensors that are `right`, it hands out twice what was saved."""

    def answer(block, x):
        asked = itertools.count()

        def take(again, index):
            return again.pop(index) * (1 if next(asked) < right else 2)

        return by_hand(block, x, missing=lambda index, again: index not in again, take=take)

    return answer


def frees_at_the_end(block, x):
    again, wanted, number = {}, set(), itertools.count()

    def unpack(index):
        if not again:
            fresh = itertools.count()
            collect = saved_tensors_hooks(lambda t: again.update({next(fresh): t.detach()}), print)
            with torch.enable_grad(), collect:
                block(x)
            wanted.update(again)
        found = again[index]
        wanted.discard(index)
        if not wanted:
            again.clear()
        return found

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


def the_last_block(block, x):
    """Recomputes whichever block came last."""
    _LAST.update(block=block, x=x)
    again, number = {}, itertools.count()

    def unpack(index):
        if index not in again:
            fresh = itertools.count()
            collect = saved_tensors_hooks(lambda t: again.update({next(fresh): t.detach()}), print)
            with torch.enable_grad(), collect:
                _LAST["block"](_LAST["x"])
        return again.pop(index)

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


def runs_before(block, x):
    with torch.no_grad():
        block(x)
    return frugal(block, x)


# ---- 35.C: buffers as after one forward ----


def _second_only(block):
    @contextmanager
    def second():
        now = copies(block)
        try:
            yield
        finally:
            put(block, now)

    return nullcontext(), second()


def _no_finally(block):
    found = {}

    @contextmanager
    def second():
        now = copies(block)
        put(block, found)
        yield
        put(block, now)

    return note(block, found), second()


def _puts_found_back(block):
    found = {}

    @contextmanager
    def second():
        put(block, found)
        try:
            yield
        finally:
            put(block, found)

    return note(block, found), second()


def _entered_once(block):
    found = {}

    @contextmanager
    def second():
        now = copies(block)
        put(block, found)
        try:
            yield
        finally:
            put(block, now)

    return note(block, found), second()


def by_state_dict(block):
    found = {}

    def values():
        return {name: value.clone() for name, value in block.state_dict().items()}

    @contextmanager
    def first():
        found.update(values())
        yield

    @contextmanager
    def second():
        now = values()
        block.load_state_dict(found)
        try:
            yield
        finally:
            block.load_state_dict(now)

    return first(), second()


def _momentum_zero(block):
    first, second = buffers_once(block)

    class Still:
        def __enter__(self):
            for module in block.modules():
                if hasattr(module, "momentum"):
                    module.momentum = 0.0
            second.__enter__()

        def __exit__(self, *exc_info):
            second.__exit__(*exc_info)

    return first, Still()


def _restores_both(block):
    @contextmanager
    def either():
        now = copies(block)
        try:
            yield
        finally:
            put(block, now)

    return either(), either()


def _swapped(block):
    first, second = buffers_once(block)
    return second, first


def _keeping(start=copies, now=copies, *, swallow=(False, False)):
    """A wrong answer: keeps other values, or swallows errors."""

    def answer(block):
        found = {}

        class First:
            def __enter__(self):
                found.update(start(block))

            def __exit__(self, *exc_info):
                return swallow[0]

        class Second:
            def __enter__(self):
                self.now = now(block)
                put(block, found)

            def __exit__(self, *exc_info):
                put(block, self.now)
                return swallow[1]

        return First(), Second()

    return answer


WRONG = {
    "35.A": {
        "wrong_mask": by_hand,
        "state_too_late": stores_too_late,
        "gradient_missing": lambda block, x: faithful(block, x.detach()),
        "ready_made": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "disturbs": lambda block, x: by_hand(block, x, around=partial(random_as, torch.get_rng_state(), fork=False)),
        "disturbs_forward": draws_in_forward,
        "leaked": leaks,
        "no_gradient": reentrant,
        "mixed_up": one_state_for_all,
        "wrong_values": lambda block, x: faithful(block, faithful(block, x)),
        "other_numbers": seeds_both,
        "other_dropout": without_dropout,
        "same_mask": seeds_again,
        "nothing_saved": faithful_keeps,
        "recomputed_often": recomputes_each_time,
        "raised": without_enable_grad,
        "no_graph": faithful_no_graph,
        "hooks_left": faithful_leaves_hooks,
        "returned_nothing": lambda block, x: print(end=str(faithful(block, x))[:0]),
    },
    "35.B": {
        "kept_recomputed": by_hand,
        "freed_at_the_end": frees_at_the_end,
        "mixed_up": the_last_block,
        "leaked": _frugal(keep=lambda tensor: tensor),
        "raised": _frugal_list(lambda again, index: again.pop(index)),
        "other_shape": _frugal_list(lambda again, index: again.pop()),
        "no_tensor": _frugal_list(lambda again, index: print(end="")),
        "reshaped": _frugal_list(lambda again, index: again[index].t()),
        "second_raised": never_again,
        "wrong_gradients": _doubling(0),
        "wrong_second": _doubling(9),  # as many as the first backward asks for
        "recomputed_often": recomputes_each_time,
        "partial_backward": partial(by_hand, take=dict.pop),
        "left_from_before": _frugal(store=lambda kept={}: kept),
        "ready_made": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "gradient_missing": lambda block, x: frugal(block, x.detach()),
        "forwards": runs_before,
        "nothing_saved": faithful_keeps,
        "no_graph": faithful_no_graph,
        "hooks_left": faithful_leaves_hooks,
        "returned_nothing": lambda block, x: print(end=str(frugal(block, x))[:0]),
    },
    "35.C": {
        "wrong_gradients": _second_only,
        "wrong_buffers": _no_finally,
        "never_updated": _puts_found_back,
        "forward_changed": _restores_both,
        "settings_changed": _momentum_zero,
        "start_not_copied": _keeping(start=nn.Module.state_dict, now=nn.Module.state_dict),
        "now_not_copied": _keeping(now=nn.Module.state_dict),
        "forward_error": _keeping(swallow=(True, False)),
        "recompute_error": _keeping(swallow=(False, True)),
        "one_backward": _entered_once,
        "no_pair": lambda block: buffers_once(block)[1],
        "no_contexts": lambda block: (note, put),
        "raised": _swapped,
    },
}


@contextmanager
def seeded(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def checkpoint_by_seed(block, x):
    """Right in the first step, where the seed is the state."""
    return by_hand(block, x, around=partial(seeded, torch.initial_seed()))


def dropped_twice(block, x):
    return torch.nn.functional.dropout(faithful(block, x), getattr(block.drop, "p", 0.0))


def seeds_in_pack(block, x):
    state, number = torch.get_rng_state(), itertools.count()

    def pack(tensor):
        torch.set_rng_state(state)
        return next(number)

    with saved_tensors_hooks(pack, lambda index: torch.zeros(())):
        return block(x)


def buffers_in_a_list(keep, *, now=None, restores="finally"):
    """35.C with the buffers themselves in a closure; what is kept of each, and when it is put back, is given."""

    def answer(block):
        buffers, found = list(block.buffers()), []

        def put(values):
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(torch.as_tensor(value))

        @contextmanager
        def first():
            found.extend(map(keep, buffers))
            yield

        class Second:
            def __enter__(self):
                self.now = list(map(now or keep, buffers))
                put(found)

            def __exit__(self, kind, *_):
                if restores == "finally" or (restores == "without error" and kind is None):
                    put(self.now)

        return first(), Second()

    return answer


def raises_its_own(block):
    """35.C: in place of an error of the block comes another, which tells of it."""
    first, second = buffers_once(block)

    class Second:
        def __enter__(self):
            second.__enter__()

        def __exit__(self, kind, *_):
            second.__exit__()
            if kind is ValueError:
                raise RuntimeError("recomputing has failed")

    return first, Second()


ALSO_WRONG = [
    ("35.A", "ready_made", lambda block, x: checkpoint(lambda: block(x), use_reentrant=False)),
    ("35.A", "wrong_mask", checkpoint_by_seed),
    ("35.A", "other_dropout", dropped_twice),
    ("35.A", "other_numbers", seeds_in_pack),
    ("35.B", "no_tensor", _frugal_list(lambda again, index: [again[index]])),
    ("35.B", "other_shape", _frugal_list(lambda again, index: again[0])),
    ("35.C", "wrong_gradients", by_state_dict),
    ("35.C", "wrong_buffers", buffers_in_a_list(torch.Tensor.tolist, restores="never")),
    ("35.C", "wrong_buffers", buffers_in_a_list(torch.Tensor.tolist, restores="without error")),
    ("35.C", "wrong_buffers", buffers_in_a_list(lambda buffer: buffer.numpy().copy(), restores="never")),
    ("35.C", "start_not_copied", buffers_in_a_list(torch.Tensor.numpy)),
    ("35.C", "now_not_copied", buffers_in_a_list(torch.Tensor.tolist, now=torch.Tensor.numpy)),
    ("35.C", "now_not_copied", buffers_in_a_list(torch.clone, now=torch.Tensor.detach)),
    ("35.C", "recompute_error", raises_its_own),
]

RIGHT = [
    ("35.C", buffers_in_a_list(torch.Tensor.tolist)),
]
