"""Checks of notebook 35: checkpointing."""

import gc
import itertools
import weakref
from contextlib import contextmanager, suppress
from numbers import Integral
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hooklab._support.packing import outer_hooks
from hooklab.course.check import Exercise, Refused, expect_like, refuse, said
from hooklab.course.reachable import within


class _Block(nn.Module):
    """Linear layers with Tanh, and dropout if wanted; counts its forwards and remembers their activations weakly."""

    def __init__(self, layers: int = 3, dropout: bool = False):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.drop = nn.Dropout(0.5) if dropout else nn.Identity()
        self.runs: list[list[weakref.ref]] = []
        self.states: list[Tensor] = []  # of the random numbers, where a forward begins and where it ends
        self.draws: list[bool] = []  # for each forward, whether dropout is on

    def forward(self, x: Tensor) -> Tensor:
        refs: list[weakref.ref] = []
        self.runs.append(refs)
        self.states.append(torch.get_rng_state())
        self.draws.append(self.drop.training and getattr(self.drop, "p", 0) > 0)
        for index, linear in enumerate(self.linears):
            x = torch.tanh(linear(x))
            if index + 1 < len(self.linears):
                refs.append(weakref.ref(x.untyped_storage()))
            x = self.drop(x)
        self.states.append(torch.get_rng_state())
        return x

    def alive(self, run: int) -> int:
        """How many of the activations of a forward are still in memory."""
        gc.collect()
        return sum(ref() is not None for ref in self.runs[run])


def _new(*, dropout: bool = False, grad: bool = True) -> tuple[_Block, Tensor]:
    torch.manual_seed(0)
    return _Block(dropout=dropout), torch.randn(5, 4, requires_grad=grad)


def _gradients(block: nn.Module, *more: Tensor) -> list[Tensor]:
    return [tensor.grad for tensor in (*block.parameters(), *more) if tensor.requires_grad]


def _examine_output(y, want):
    if y is None:
        refuse("returned_nothing")
    expect_like(y, want)
    if not y.requires_grad:
        refuse("no_graph")


def _called(answer, block, x):
    """What the answer returns; saved-tensor hooks that it leaves open are closed."""
    before, left = outer_hooks(), 0
    try:
        y = answer(block, x)
    finally:
        while outer_hooks() not in (before, None):
            torch._C._autograd._pop_saved_tensors_default_hooks()
            left += 1
    if left:
        refuse("hooks_left")
    return y


def _examine_checkpointed(block: _Block):
    """After forward: one run, and nothing of it is kept."""
    if len(block.runs) != 1:
        refuse("forwards", count_block_runs=len(block.runs))
    if alive := block.alive(0):
        refuse("nothing_saved", count_block_runs=len(block.runs[0]), alive=alive)


def _examine_runs(block: _Block, want: int):
    if len(block.runs) != want:
        refuse("recomputed_often", want=want - 1, want2=want, count_block_runs=len(block.runs))


def _examine_freed(block: _Block):
    if alive := block.alive(1):
        refuse("leaked", alive=alive)


def _examine_gradients(got, want, reason, zh, en):
    if len(got) == len(want) and any(left is None and right is not None for left, right in zip(got, want, strict=True)):
        refuse("gradient_missing")
    if any(left is None for left in got) or not all(map(torch.allclose, got, want)):
        refuse(reason, zh=zh, en=en)


def _examine_segments(answer, *, dropout):
    """Two in a row, then backward."""

    def step(run):
        torch.manual_seed(0)
        blocks = [_Block(dropout=dropout), _Block(dropout=dropout)]
        x = torch.randn(5, 4, requires_grad=True)
        torch.rand(3)
        y = _called(run, blocks[1], _called(run, blocks[0], x))
        y.square().sum().backward()
        return [*_gradients(blocks[0]), *_gradients(blocks[1], x)]

    want = step(lambda block, x: block(x))
    try:
        got = step(answer)
    except Refused:
        raise
    except Exception as error:
        got, said = [None], f"{type(error).__name__}: {error}".splitlines()[0][:80]
    else:
        said = "-"
    _examine_gradients(
        got,
        want,
        "mixed_up",
        zh=f"一个 `block` 没有问题；接连两个 `block`，再反向，梯度就错了（异常：`{said}`）。第二次调用盖掉了第一次还要用的什么？",
        en=f"Fine with one `block`; with two in a row and then backward the gradients are wrong (raised: `{said}`). What that the "
        "first call still needs has the second overwritten?",
    )


# ---- 35.A: a checkpoint that remembers the random numbers ----


def _by_hand(block, x, around):
    """`handmade` of the notebook, with a context around the second run."""
    again, number = [], itertools.count()

    def unpack(index):
        if not again:
            collect = saved_tensors_hooks(lambda t: again.append(t.detach()), print)
            with around, torch.enable_grad(), collect:
                block(x)
        return again[index]

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


@contextmanager
def _random_as(state, *, fork=True):
    with torch.random.fork_rng(devices=[], enabled=fork):
        if state is not None:
            torch.set_rng_state(state)
        yield


def faithful(block, x):
    return _by_hand(block, x, _random_as(torch.get_rng_state()))


def _train(run, seed, *, grad=True, draw_between=False):
    """One step: the results, and the numbers that are drawn after forward and after backward."""
    block, x = _new(dropout=True, grad=grad)
    torch.manual_seed(seed)
    torch.rand(3)  # as in any step but the first, the seed is not the state
    y = _called(run, block, x)
    between = torch.rand(3) if draw_between else None
    kept = y.detach().clone() if isinstance(y, Tensor) else y
    if isinstance(y, Tensor) and y.requires_grad:
        y.square().sum().backward()
    return SimpleNamespace(
        block=block, y=y, kept=kept, between=between, gradients=_gradients(block, x), after=torch.rand(3)
    )


def examine_faithful(answer):
    for dropout in (False, True):
        block, x = _new(dropout=dropout)
        torch.manual_seed(1)
        y = _called(answer, block, x)
        torch.manual_seed(1)
        want = block(x).detach()
        block.runs.pop()
        if dropout and isinstance(y, Tensor) and y.shape == want.shape and not torch.allclose(y, want):
            begin, end, *_, true_begin, true_end = block.states
            if torch.equal(begin, true_begin) and (torch.equal(end, true_end) or not block.draws[0]):
                refuse("other_dropout")
            refuse("other_numbers")
        _examine_output(y, want)
        _examine_checkpointed(block)
    for seed, grad in ((1, True), (2, True), (3, False)):
        want = _train(lambda block, x: block(x), seed, grad=grad, draw_between=True)
        got = _train(answer, seed, grad=grad, draw_between=True)
        if not got.y.requires_grad:
            refuse("no_gradient")
        if not torch.allclose(got.kept, want.kept):
            refuse("same_mask")
        _examine_runs(got.block, 2)
        _examine_gradients(
            got.gradients,
            want.gradients,
            "wrong_mask",
            zh="梯度与没有检查点时不同；第二遍抽到别的随机数，就会这样。状态是什么时候存的，什么时候放回去的？",
            en="The gradients differ from those without a checkpoint, as they do when the second run draws other random numbers. "
            "When is the state stored, and when put back?",
        )
        if not torch.equal(got.between, want.between):
            refuse("disturbs_forward")
        if not torch.equal(got.after, want.after):
            refuse("disturbs")
        block = got.block
        del got, want
        _examine_freed(block)
    _examine_segments(answer, dropout=True)
    _examine_drawn_first(answer)
    _examine_by_hand(answer, dropout=True)


def _examine_drawn_first(answer):
    """The block draws before it saves anything."""
    ones, drop = torch.ones(100, requires_grad=True), nn.Dropout(0.5)
    y = answer(drop, ones)
    y.sum().backward()
    if ones.grad is None or not torch.equal(y, ones.grad):
        refuse("state_too_late")


def _examine_by_hand(answer, *, dropout):
    """In torch's checkpoint the innermost hooks, while the block runs, are torch's own; by hand they are the learner's."""
    packs, (block, x) = [], _new(dropout=dropout)
    with block.register_forward_pre_hook(lambda *args: packs.append(outer_hooks())):
        answer(block, x)
    seen = any(pair and pair[0].__module__ == "torch.utils.checkpoint" for pair in packs)
    if seen:
        refuse("ready_made")


FAITHFUL = Exercise("35.A", examine_faithful, faithful)

# ---- 35.B: the cheapest plan under a budget ----


def cheapest(count, layers, budget):
    fitting = []
    for sizes in itertools.product(*[range(blocks + 1) for blocks in layers.values()]):
        plan = {name: size for name, size in zip(layers, sizes, strict=True) if size}
        _, peak, work = count(plan)
        if peak <= budget:
            fitting.append((work, peak, plan))
    return min(fitting, key=lambda found: found[:2])[2]


class _Counted:
    """A made-up network of the kind that section 9 counts."""

    def __init__(self, outside, **layers):
        self.outside, self.table = outside, layers  # per layer (input, inner, work) of every block
        self.layers = {name: len(blocks) for name, blocks in layers.items()}

    def __call__(self, plan):
        held, peak, work, kept = self.outside, self.outside, 0, False
        for name, blocks in self.table.items():
            size = plan.get(name, 0)
            for first in range(0, len(blocks), size or 1):
                segment = blocks[first : first + (size or 1)]
                held += 0 if kept else segment[0][0]
                inner, kept = sum(block[1] for block in segment), not size
                peak = max(peak, held + inner)
                held += inner if kept else 0
                work += 0 if kept else sum(block[2] for block in segment)
        return held, peak, work


NETWORKS = [
    _Counted(5, down=[(8, 40, 3)] * 4, up=[(4, 20, 6)] * 4),
    _Counted(2, wide=[(16, 60, 1)] * 2, middle=[(6, 18, 5)] * 6, narrow=[(2, 10, 9)] * 3),
    _Counted(0, only=[(1, 10, 1)] * 9),
    _Counted(0, odd=[(10, 10, 1)] * 7),
]


def examine_cheapest(answer):
    for network in NETWORKS:
        asked = []  # peak and work of each plan that the answer has asked about

        def count(plan, network=network, asked=asked):
            cost = network(plan)
            asked.append(cost[1:])
            return cost

        stock = network({})[1]
        peaks = sorted(
            {
                network({name: size for name, size in zip(network.layers, sizes, strict=True) if size})[1]
                for sizes in itertools.product(*[range(n + 1) for n in network.layers.values()])
            }
        )
        for budget in (
            stock,
            stock - 1,
            peaks[len(peaks) // 2],
            peaks[len(peaks) // 4] + 1,
            peaks[1],
            peaks[0],
        ):
            try:
                plan = answer(count, dict(network.layers), budget)
            except ValueError as error:
                best = cheapest(network, network.layers, budget)
                refuse("gave_up", network_layers=network.layers, budget=budget, best=best, error=error)
            _examine_plan(network, budget, plan, asked)
        try:
            got = answer(count, dict(network.layers), peaks[0] - 1)
        except ValueError:
            continue
        except Exception as error:
            refuse("other_error", error=error)
        refuse("no_error", got=got)


def _examine_plan(network, budget, plan, asked):
    if not isinstance(plan, dict):
        refuse("wrong_type", plan=plan)
    bad = {
        name: size
        for name, size in plan.items()
        if name not in network.layers or isinstance(size, bool) or not isinstance(size, Integral) or size < 1
    }
    if bad:
        refuse("unfit", bad=bad)
    held, peak, work = network(plan)
    best = cheapest(network, network.layers, budget)
    _, best_peak, best_work = network(best)
    if peak > budget:
        refuse(
            "over_budget",
            zh=f"预算 {budget} 字节，你的方案 `{plan}` 峰值是 {peak}。"
            + ("`held` 不是峰值。" if held <= budget else ""),
            en=f"The budget is {budget} bytes, and your plan `{plan}` has a peak of {peak}."
            + (" `held` is not the peak." if held <= budget else ""),
        )
    if (work, peak) == (best_work, best_peak):
        return
    if network(best)[1:] not in asked:
        refuse("never_asked", network_layers=network.layers, budget=budget, best=best, plan=plan)
    if peak < best_peak == budget and network(plan)[1:] == network(cheapest(network, network.layers, budget - 1))[1:]:
        refuse("exact_budget", budget=budget, plan=plan, work=work, best_work=best_work)
    if work > best_work:
        refuse(
            "too_much_work", budget=budget, plan=plan, work=work, peak=peak, best_peak=best_peak, best_work=best_work
        )
    refuse("higher_peak", budget=budget, plan=plan, work=work, peak=peak)


CHEAPEST = Exercise("35.B", examine_cheapest, cheapest)

# ---- 35.C: a checkpoint that frees what it has handed out ----


def _frugal_where(missing):
    """The reference runs the block again where the number that is asked for is missing."""

    def answer(block, x):
        again, number = {}, itertools.count()

        def unpack(index):
            if missing(index, again):
                fresh = itertools.count()
                collect = saved_tensors_hooks(lambda t: again.update({next(fresh): t.detach()}), print)
                with torch.enable_grad(), collect:
                    block(x)
            return again.pop(index)

        with saved_tensors_hooks(lambda t: next(number), unpack):
            return block(x)

    return answer


frugal = _frugal_where(lambda index, again: index not in again)


def examine_frugal(answer):
    block, x = _new()
    want = block(x)
    want.square().sum().backward()
    true = [grad.clone() for grad in _gradients(block, x)]
    block, x = _new()
    y = _called(answer, block, x)
    _examine_output(y, want.detach())
    _examine_checkpointed(block)
    alive = []
    for linear in block.linears:  # backward comes to the last one first
        linear.bias.register_post_accumulate_grad_hook(lambda param: alive.append(block.alive(-1)))
    loss = y.square().sum()
    wrong = {
        "zh": "梯度与没有检查点时不同：反向拿到的是别的张量。反向从后往前取，你的序号还对得上吗？",
        "en": "The gradients differ from those without a checkpoint: backward was given other tensors. It asks from the back to the "
        "front; do your numbers still fit?",
    }
    try:
        loss.backward(retain_graph=True)
        _examine_gradients(_gradients(block, x), true, "wrong_gradients", **wrong)
    except Exception:
        _examine_handed_out(answer)
        raise
    _examine_runs(block, 2)
    if alive[2]:
        refuse("kept_recomputed", count_block_runs=len(block.runs[1]), alive=alive[2])
    if alive[1] > 1:
        refuse("freed_at_the_end", count_block_runs=len(block.runs[1]))
    for tensor in (*block.parameters(), x):
        tensor.grad = None
    try:
        loss.backward()
    except Exception as error:
        refuse("second_raised", error=said(error)[:120])
    _examine_gradients(
        _gradients(block, x),
        true,
        "wrong_second",
        zh="第一次反向对了；`retain_graph` 之后的第二次反向，梯度不对。",
        en="The first backward is right; in the second, after `retain_graph`, the gradients are wrong.",
    )
    _examine_runs(block, 3)
    del y, loss
    _examine_freed(block)
    _examine_segments(answer, dropout=False)
    _examine_partial(answer, true)
    _examine_next(answer)
    _examine_by_hand(answer, dropout=False)


class _Compared(_Block):
    """Notes the first tensor that backward is handed in another shape than was saved."""

    def __init__(self):
        super().__init__()
        self.asked, self.other, self.shapes = 0, None, set()

    def forward(self, x: Tensor) -> Tensor:
        hooks = outer_hooks()
        if self.runs or hooks is None:
            return super().forward(x)
        (pack, unpack), number = hooks, itertools.count()

        def pack_compared(tensor):
            self.shapes.add(tuple(tensor.shape))
            return next(number), tuple(tensor.shape), pack(tensor)

        def unpack_compared(kept):
            index, shape, packed = kept
            got = unpack(packed)
            self.asked += 1
            found = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            if self.other is None and found != shape:
                self.other = self.asked, index, shape, found
            return got

        with saved_tensors_hooks(pack_compared, unpack_compared):
            return super().forward(x)


def _examine_handed_out(answer):
    """The first backward has failed, or its gradients are wrong: was it handed another tensor?"""
    block, x = _Compared(), torch.randn(5, 4, requires_grad=True)
    with suppress(Exception):
        _called(answer, block, x).square().sum().backward()
    if block.other:
        asked, index, shape, found = block.other
        zh = f"第一次反向的第 {asked} 次解包，要的是打包时的第 {index} 个（从 0 数起），形状 `{shape}`；交出去的却是 `{found}`"
        en = (
            f"At unpacking number {asked} of the first backward the one packed as number {index} (counted from 0) is wanted, of the "
            f"shape `{shape}`; handed out was `{found}`"
        )
        if isinstance(found, str):
            refuse(
                "no_tensor",
                zh=f"{zh}，不是张量。`unpack` 返回的是它吗？",
                en=f"{en}, which is no tensor. Is that tensor what `unpack` returns?",
            )
        if found not in block.shapes:
            refuse(
                "reshaped",
                zh=f"{zh}，而打包时没有一个是这个形状。交出去之前，谁改了它的形状？",
                en=f"{en}, and nothing packed had that shape. What has changed its shape before it was handed out?",
            )
        refuse(
            "other_shape",
            zh=f"{zh}。`unpack` 收到的参数说的是哪一个？",
            en=f"{en}. Which one does the argument of `unpack` name?",
        )


def _examine_next(answer):
    """A backward has taken a part of what was recomputed; then comes another block."""
    first, x = _new()
    torch.autograd.grad(answer(first, x).sum(), first.linears[1].weight)
    block, x = _Block(layers=1), torch.randn(5, 4, requires_grad=True)
    want = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    try:
        got = torch.autograd.grad(answer(block, x).sum(), list(block.parameters()))
    except (LookupError, RuntimeError, TypeError):
        got = []
    if not got or not all(map(torch.equal, got, want)):
        refuse("left_from_before")
    _examine_freed(first)


def _examine_partial(answer, true):
    """The first backward takes a part of what was recomputed."""
    block, x = _new()
    loss = answer(block, x).square().sum()
    torch.autograd.grad(loss, block.linears[-1].weight, retain_graph=True)
    try:
        loss.backward()
        found = _gradients(block, x)
    except (LookupError, RuntimeError, TypeError):
        found = []
    if len(found) != len(true) or not all(map(torch.equal, found, true)):
        refuse("partial_backward")


FRUGAL = Exercise("35.C", examine_frugal, frugal)

# ---- 35.D: buffers as after one forward ----


def _copies(block):
    return {name: buffer.clone() for name, buffer in block.named_buffers()}


def _put(block, values):
    with torch.no_grad():
        for name, buffer in block.named_buffers():
            buffer.copy_(values[name])


@contextmanager
def _note(block, found):
    found.update(_copies(block))
    yield


def buffers_once(block):
    found = {}

    class Second:  # every backward enters it again; what `@contextmanager` makes can be entered once
        def __enter__(self):
            self.now = _copies(block)
            _put(block, found)

        def __exit__(self, *exc_info):
            _put(block, self.now)

    return _note(block, found), Second()


def _normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def _spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())


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


def _forwards_then_backward(make, count, contexts, backwards=1):
    torch.manual_seed(0)
    block, batches = make(), [torch.randn(6, 4) for _ in range(count)]
    before = _copies(block)

    def run(batch):
        if contexts is None:
            return block(batch)
        return checkpoint(block, batch, use_reentrant=False, context_fn=lambda: contexts(block))

    loss = sum(run(batch).square().sum() for batch in batches)
    middle = _copies(block)
    for number in range(backwards):  # the last forward first
        loss.backward(retain_graph=number + 1 < backwards)
    return SimpleNamespace(
        gradients=_gradients(block),
        before=before,
        middle=middle,
        buffers=_copies(block),
        modes=[module.training for module in block.modules()],
        settings=[getattr(module, "momentum", None) for module in block.modules()],
    )


def _same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def examine_buffers(answer):
    torch.manual_seed(0)
    pair = answer(_normed())
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        refuse("no_pair", pair=pair)
    kinds = ", ".join(type(context).__name__ for context in pair)
    if not all(hasattr(context, "__enter__") and hasattr(context, "__exit__") for context in pair):
        refuse("no_contexts", kinds=kinds)
    for name, make, count in (("BatchNorm", _normed, 1), ("spectral norm", _spectral, 1)):
        _examine_step(name, make, count, answer)
    for name, make in (("BatchNorm", _normed), ("spectral norm", _spectral)):
        _examine_step(name, make, 2, answer)
    for count in (1, 2):
        _examine_step("`persistent=False`", _Centred, count, answer)
    _examine_two_backwards(answer)
    _examine_errors(answer)


_ERROR = "ValueError: data server gone"


def _examine_errors(answer):
    """An error of the block has to come out of the contexts, in forward and while recomputing."""
    block, x = _normed(), torch.randn(6, 4)
    arrived, _ = _arrived(answer(block)[0])
    if arrived != _ERROR:
        refuse("forward_error", error=_ERROR, arrived=arrived)
    first, second = answer(block)
    with first:
        block(x)
    arrived, told = _arrived(second)
    if arrived != _ERROR:
        refuse(
            "recompute_error",
            zh=f"`block` 重算时一旦自己抛出 `{_ERROR}`，从第二个上下文出来的却是 `{arrived}`"
            + ("" if told else "，真正的原因就没人看得到了")
            + "。它的 `__exit__` 返回了什么，又抛出了什么，或者哪个 `except` 接住了它？",
            en=f"If `block` raises `{_ERROR}` of its own while recomputing, what comes out of the second context is `{arrived}`"
            + ("" if told else ", and the cause is lost")
            + ". What does its `__exit__` return, or raise, or which `except` has caught it?",
        )


def _arrived(context):
    """What comes out of the context when an error is raised in it, and whether a traceback tells of that error."""
    cause = ValueError("data server gone")
    try:
        with context:
            raise cause
    except Exception as error:
        text, last = said(error), error
        while last not in (cause, None):
            last = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        return text, last is cause
    return "None", False


def _examine_two_backwards(answer):
    want = _forwards_then_backward(_spectral, 1, None, backwards=2)
    try:
        got = _forwards_then_backward(_spectral, 1, answer, backwards=2)
    except (AttributeError, RuntimeError, TypeError):
        got = None
    if not got or not all(map(torch.equal, got.gradients, want.gradients)) or not _same(got.buffers, want.buffers):
        refuse("one_backward")


def _examine_step(name, make, count, answer):
    want = _forwards_then_backward(make, count, None)
    got = _forwards_then_backward(make, count, answer)
    where_zh = f"{name}，{count} 次前向之后反向"
    where_en = f"{name}, backward after {count} {'forward' if count == 1 else 'forwards'}"
    right = all(map(_close, got.gradients, want.gradients)) and _same(got.buffers, want.buffers)
    if not right and _same(got.middle, want.middle) and not _same(got.buffers, got.before):
        _examine_copies(answer, where_zh, where_en)
    if not _same(got.middle, want.middle):
        refuse(
            "forward_changed",
            zh=f"{where_zh}：反向还没开始，缓冲区就和普通训练不同了。第一个上下文只看不改。",
            en=f"{where_en}: before backward has begun the buffers already differ from plain training. The first context only "
            "looks.",
        )
    _examine_gradients(
        got.gradients,
        want.gradients,
        "wrong_gradients",
        zh=f"{where_zh}：梯度与普通训练不同。重算是从哪一刻的缓冲区出发的？模块还在训练模式吗？",
        en=f"{where_en}: the gradients differ from plain training. From which buffers does recomputing start? And are the modules "
        "in training mode?",
    )
    if _same(got.buffers, got.before) and not _same(got.buffers, want.buffers):
        refuse(
            "never_updated",
            zh=f"{where_zh}：缓冲区回到了前向之前的值，这一步的统计全丢了。",
            en=f"{where_en}: the buffers are back at their values from before forward, and the statistics of this step are lost.",
        )
    if not _same(got.buffers, want.buffers):
        refuse(
            "wrong_buffers",
            zh=f"{where_zh}：梯度对了，缓冲区与普通训练不同。重算以异常收尾，你的还原执行到了吗？还原的又是哪一刻的值？",
            en=f"{where_en}: the gradients are right, the buffers differ from plain training. Recomputing ends by an exception: is "
            "your clean-up reached? And from which moment are the values put back?",
        )
    if got.modes != want.modes or got.settings != want.settings:
        refuse(
            "settings_changed",
            zh=f"{where_zh}：缓冲区和梯度都对，但模块的训练模式或动量被改掉了。",
            en=f"{where_en}: buffers and gradients are right, but the mode or the momentum of a module has been changed.",
        )


def _close(left, right):
    return left is not None and torch.allclose(left, right)


class _Refilling(TorchDispatchMode):
    """Fills the buffers with 8 when the first of them is about to be written: a copy made before keeps its value."""

    def __init__(self, block):
        super().__init__()
        self.block, self.memory = block, {buffer.data_ptr() for buffer in block.buffers()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and self.memory & set(_addresses(args[:1])):
            _fill(self.block, 8)
            self.memory = set()
        return func(*args, **(kwargs or {}))


def _addresses(value):
    return [one.data_ptr() for one in within(value) if isinstance(one, Tensor)]


def _fill(block, number):
    with torch.no_grad():
        for buffer in block.buffers():
            buffer.fill_(number)


def _follow(block, filled):
    """Whether what was written into the buffers, which were `filled`, has changed together with them."""
    values = [float(buffer.reshape(-1)[0]) for buffer in block.buffers()]
    # A copy that is made only now, one buffer after the other, comes too early for the first of them.
    return set(values) <= {filled, 8} and values.count(filled) <= 1


def _examine_copies(answer, where_zh, where_en):
    """Something is wrong: do the values that were kept change together with the buffers?"""
    block, x = _normed(), torch.randn(6, 4)
    try:
        first, second = answer(block)
        with first:
            block(x)
        _fill(block, 7)
        with _Refilling(block):
            second.__enter__()
        start = _follow(block, 7)
        _fill(block, 9)
        with _Refilling(block):
            second.__exit__(None, None, None)
        now = _follow(block, 9)
    except Exception:
        return
    if start:
        refuse(
            "start_not_copied",
            zh=f"{where_zh}：结果与普通训练不同。记下来作起点的那些值，缓冲区一变就跟着变：它们是副本吗？",
            en=f"{where_en}: the result differs from plain training. The values that were kept to start from change together with the "
            "buffers: are they copies?",
        )
    if now:
        refuse(
            "now_not_copied",
            zh=f"{where_zh}：结果与普通训练不同。进入第二个上下文时记下、准备放回去的那些值，缓冲区一变就跟着变：它们是副本吗？",
            en=f"{where_en}: the result differs from plain training. The values that the second context keeps on entering, to put them "
            "back, change together with the buffers: are they copies?",
        )


BUFFERS = Exercise("35.D", examine_buffers, buffers_once)

EXERCISES = [FAITHFUL, CHEAPEST, FRUGAL, BUFFERS]
