"""Checks of notebook 35: checkpointing."""

import gc
import itertools
import weakref
from contextlib import contextmanager, nullcontext, suppress
from numbers import Integral
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hooklab._support.packing import outer_hooks
from hooklab.course.check import Exercise, Prediction, Refused, expect_like, refuse, said
from hooklab.course.reachable import within

HOOKS = Prediction(
    "35.1",
    zh="前向 16 次，重算 15 次：最后一层算到一半，检查点就把前向停了，它的钩子没来得及触发。下面看 `trace` 怎么说。",
    en="16 in forward and 15 while recomputing: half-way through the last layer the checkpoint stops the forward, and the hook "
    "of that layer never fires. See below what `trace` says.",
)
BATCHES = Prediction(
    "35.2",
    zh="重算也是一次前向，BatchNorm 分不清：同一批数据，它数了两次，统计量也更新了两次。可重入和不可重入都这样。",
    en="Recomputing is a forward like any other to batch norm: one batch is counted twice, and the statistics are updated "
    "twice. Both versions do so.",
)
KEYWORD = Prediction(
    "35.3",
    zh="只有 `x`。位置参数由检查点存成已保存张量，外面的钩子看得见；关键字参数留在它的闭包里，谁也看不见。",
    en="Only `x`. The checkpoint stores positional arguments as saved tensors, which the hooks outside see; keyword arguments "
    "stay in its closure, where nobody sees them.",
)
SEGMENTS = Prediction(
    "35.4",
    zh="比不用还多。每层一段，就要存除最后一层以外每层的输入，其中近一半普通训练本来不存。段数不是越多越好，看下面的图。",
    en="More than without. With a segment for each layer the input of every layer but the last is held, and nearly half of these plain training "
    "would not store. More segments are not better: see the picture below.",
)


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
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回 `block(x)` 的结果。",
            en="The function returned `None`; the result of `block(x)` is wanted.",
        )
    expect_like(y, want, "返回值", "what is returned")
    if not y.requires_grad:
        refuse(
            "no_graph",
            zh="返回值没有计算图，反向走不下去：第一遍前向要开着梯度。",
            en="What is returned has no graph, so there is no backward: the first forward needs gradients on.",
        )


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
        refuse(
            "hooks_left",
            zh="函数返回以后，你的已保存张量钩子还开着，后面所有的运算都会经过它。",
            en="After your function has returned its saved-tensor hooks are still open; every later operation passes them.",
        )
    return y


def _examine_checkpointed(block: _Block):
    """After forward: one run, and nothing of it is kept."""
    if len(block.runs) != 1:
        refuse(
            "forwards",
            zh=f"反向还没开始，`block` 就运行了 {len(block.runs)} 次，应当是 1 次。",
            en=f"Before backward has begun `block` has run {len(block.runs)} times; once is wanted.",
        )
    if alive := block.alive(0):
        refuse(
            "nothing_saved",
            zh=f"前向之后，{len(block.runs[0])} 个中间激活值里还有 {alive} 个占着内存：这就不是检查点了。看看你的 `pack` 返回了什么，又往别处记了什么。",
            en=f"After forward {alive} of {len(block.runs[0])} activations in the middle are still in memory, so this is no "
            "checkpoint. See what your `pack` returns, and what it notes elsewhere.",
        )


def _examine_runs(block: _Block, want: int):
    if len(block.runs) != want:
        refuse(
            "recomputed_often",
            zh=f"前向 1 次、反向 {want - 1} 次，`block` 应当运行 {want} 次，实际运行了 {len(block.runs)} 次。",
            en=f"For 1 forward and {want - 1} backward, `block` should run {want} times; it ran {len(block.runs)} times.",
        )


def _examine_freed(block: _Block):
    if alive := block.alive(1):
        refuse(
            "leaked",
            zh=f"反向结束，返回值也删了，重算出来的激活值还有 {alive} 个占着内存：要么是 `gc` 收不走的引用环，要么有什么比这次调用活得更久。",
            en=f"Backward is over and the result is gone, yet {alive} recomputed activations stay in memory: held in a "
            "reference cycle that `gc` cannot free, or by something that outlives the call.",
        )


def _examine_gradients(got, want, reason, zh, en):
    if len(got) == len(want) and any(left is None and right is not None for left, right in zip(got, want, strict=True)):
        refuse(
            "gradient_missing",
            zh="反向之后，有的参数或者 `x` 根本没有梯度：`x` 是不是 `detach` 过？",
            en="After backward a parameter, or `x`, has no gradient at all: was `x` put through `detach`?",
        )
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
                refuse(
                    "other_dropout",
                    zh="`block` 里没有 dropout，返回值是对的；有了 dropout，就和普通训练不同，而第一遍前向开始时，随机数的状态并没有错："
                    "dropout 关掉了，还是做了两遍？",
                    en="With no dropout in `block`, what is returned is right; with dropout it differs from plain training, though the "
                    "random state is right when the first forward begins: is dropout off, or done twice?",
                )
            refuse(
                "other_numbers",
                zh="`block` 里没有 dropout，返回值是对的；有了 dropout，就和普通训练不同：第一遍前向抽到的，已经不是普通训练会抽到的那些"
                "随机数。抽之前，谁动过随机数的状态？",
                en="With no dropout in `block`, what is returned is right; with dropout it differs from plain training: the first forward no "
                "longer draws the random numbers that plain training draws. What has touched the random state before that?",
            )
        _examine_output(y, want)
        _examine_checkpointed(block)
    for seed, grad in ((1, True), (2, True), (3, False)):
        want = _train(lambda block, x: block(x), seed, grad=grad, draw_between=True)
        got = _train(answer, seed, grad=grad, draw_between=True)
        if not got.y.requires_grad:
            refuse(
                "no_gradient",
                zh="`x` 不需要梯度时，返回值没有计算图，参数也就得不到梯度。",
                en="With an `x` that needs no gradient, what is returned has no graph, and parameters get no gradient.",
            )
        if not torch.allclose(got.kept, want.kept):
            refuse(
                "same_mask",
                zh="换一个种子，输出应当跟着变；你的输出和没有检查点时不一样。第一遍前向不该动随机数的状态。",
                en="With another seed the output should change along; yours differs from the one without a checkpoint. Leave the "
                "random state alone in the first forward.",
            )
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
            refuse(
                "disturbs_forward",
                zh="前向刚结束，全局随机数就和没有检查点时不一样了。",
                en="Right after forward the global random numbers already differ from those without a checkpoint.",
            )
        if not torch.equal(got.after, want.after):
            refuse(
                "disturbs",
                zh="梯度对了，但是反向之后再抽随机数，和没有检查点时不一样：重算动了全局的状态，没有还原。",
                en="The gradients are right; but random numbers drawn after backward differ from those without a checkpoint: "
                "recomputing has moved the global state and not put it back.",
            )
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
        refuse(
            "state_too_late",
            zh="`block` 只有一个 `nn.Dropout`，先抽随机数、后存张量，梯度就不对了。状态是在前向开始之前存的吗？",
            en="With a `block` that is one `nn.Dropout`, and so draws before it saves anything, the gradients are wrong. Was the state "
            "stored before the forward began?",
        )


def _examine_by_hand(answer, *, dropout):
    """In torch's checkpoint the innermost hooks, while the block runs, are torch's own; by hand they are the learner's."""
    packs, (block, x) = [], _new(dropout=dropout)
    with block.register_forward_pre_hook(lambda *args: packs.append(outer_hooks())):
        answer(block, x)
    seen = any(pair and pair[0].__module__ == "torch.utils.checkpoint" for pair in packs)
    if seen:
        refuse(
            "ready_made",
            zh="都对，可是 `block` 运行时，开着的是 torch 现成的 `checkpoint` 自己的钩子。这一题要用打包和解包来写，从 `handmade` 改起。",
            en="All right, but while `block` runs the hooks that are open are those of torch's own `checkpoint`. Here it is to be written "
            "out of pack and unpack; begin with `handmade`.",
        )


def stores_too_late(block, x):
    again, number, state = [], itertools.count(), []

    def pack(tensor):
        if not state:
            state.append(torch.get_rng_state())
        return next(number)

    def unpack(index):
        if not again:
            collect = saved_tensors_hooks(lambda t: again.append(t.detach()), print)
            with _random_as(state[0]), torch.enable_grad(), collect:
                block(x)
        return again[index]

    with saved_tensors_hooks(pack, unpack):
        return block(x)


def forgets(block, x):
    return _by_hand(block, x, nullcontext())


def seeds_both(block, x):
    torch.manual_seed(0)
    return _by_hand(block, x, _random_as(torch.get_rng_state()))


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
    number, state = itertools.count(), torch.get_rng_state()

    def unpack(index):
        again = []
        collect = saved_tensors_hooks(lambda t: again.append(t.detach()), print)
        with _random_as(state), torch.enable_grad(), collect:
            block(x)
        return again[index]

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


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
            with _random_as(state), torch.enable_grad(), saved_tensors_hooks(again.append, print):
                block(x)
        return again[index]

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def draws_in_forward(block, x):
    state = torch.get_rng_state()
    y = _by_hand(block, x, _random_as(state))
    torch.set_rng_state(state)
    return y


def one_state_for_all(block, x):
    _LAST["state"] = torch.get_rng_state()
    again, number = [], itertools.count()

    def unpack(index):
        if not again:
            collect = saved_tensors_hooks(lambda t: again.append(t.detach()), print)
            with _random_as(_LAST["state"]), torch.enable_grad(), collect:
                block(x)
        return again[index]

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


_LAST: dict = {}


FAITHFUL = Exercise(
    "35.A",
    examine_faithful,
    faithful,
    {
        "wrong_mask": forgets,
        "state_too_late": stores_too_late,
        "gradient_missing": lambda block, x: faithful(block, x.detach()),
        "ready_made": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "disturbs": lambda block, x: _by_hand(block, x, _random_as(torch.get_rng_state(), fork=False)),
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
    zh="抽到的是同一批随机数，别人的也没打乱。",
    en="The same numbers are drawn, and nobody else's are disturbed.",
)

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
                refuse(
                    "gave_up",
                    zh=f"层是 `{network.layers}`、预算 {budget} 字节时，`{best}` 放得下，却抛出了 `{said(error)}`：从 1 到块数，每种大小都试了吗？",
                    en=f"For the layers `{network.layers}` and a budget of {budget} bytes `{best}` fits, yet raised was `{said(error)}`: is "
                    "every size tried, from 1 to the number of blocks?",
                )
            _examine_plan(network, budget, plan, asked)
        try:
            got = answer(count, dict(network.layers), peaks[0] - 1)
        except ValueError:
            continue
        except Exception as error:
            refuse(
                "other_error",
                zh=f"没有方案放得下时，应当抛出 `ValueError`，抛出的却是 `{type(error).__name__}`。",
                en=f"When no plan fits a `ValueError` is wanted; raised was `{type(error).__name__}`.",
            )
        refuse(
            "no_error",
            zh=f"没有方案放得下时，应当抛出 `ValueError`，函数却返回了 `{got}`。",
            en=f"When no plan fits a `ValueError` is wanted; `{got}` came back.",
        )


def _examine_plan(network, budget, plan, asked):
    if not isinstance(plan, dict):
        refuse(
            "wrong_type",
            zh=f"应当返回一个字典，得到的是 `{type(plan).__name__}`。",
            en=f"A dictionary is wanted; found `{type(plan).__name__}`.",
        )
    bad = {
        name: size
        for name, size in plan.items()
        if name not in network.layers or isinstance(size, bool) or not isinstance(size, Integral) or size < 1
    }
    if bad:
        refuse(
            "unfit",
            zh=f"`checkpoint_segments` 不收这样的方案：`{bad}`。不做检查点的层不要写进去，块数至少为 1。",
            en=f"`checkpoint_segments` takes no such plan: `{bad}`. A layer without checkpoints is not in it, and numbers are 1 "
            "or more.",
        )
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
        refuse(
            "never_asked",
            zh=f"层是 `{network.layers}`、预算 {budget} 字节时，`{best}` 也放得下，比你的方案 `{plan}` 更好，你却没有问过 `count`："
            "每一层不做检查点，还有从 1 到块数的每种大小，都试了吗？",
            en=f"For the layers `{network.layers}` and a budget of {budget} bytes `{best}` fits too and is better than your plan `{plan}`, "
            "yet `count` was never asked about it: is each layer tried without checkpoints, and with every size from 1 to the number of "
            "blocks?",
        )
    if peak < best_peak == budget and network(plan)[1:] == network(cheapest(network, network.layers, budget - 1))[1:]:
        refuse(
            "exact_budget",
            zh=f"预算 {budget} 字节，你的方案 `{plan}` 要重算 {work}；有的方案只要重算 {best_work}，峰值正好等于预算。它放得下吗？",
            en=f"For a budget of {budget} bytes your plan `{plan}` recomputes {work}; another recomputes {best_work}, with a peak that is "
            "exactly the budget. Does it fit?",
        )
    if work > best_work:
        refuse(
            "too_much_work",
            zh=f"预算 {budget} 字节，你的方案 `{plan}` 要重算 {work}，峰值是 {peak}；有的方案也放得下，峰值是 {best_peak}，只要重算 {best_work}。",
            en=f"For a budget of {budget} bytes your plan `{plan}` recomputes {work}, with a peak of {peak}; another fits too, with a peak of "
            f"{best_peak}, and recomputes {best_work}.",
        )
    refuse(
        "higher_peak",
        zh=f"预算 {budget} 字节，你的方案 `{plan}` 要重算 {work}，已经最少；但同样的重算量，峰值可以比 {peak} 更低。",
        en=f"For a budget of {budget} bytes your plan `{plan}` recomputes {work}, which is the least; but for the same work there is a peak "
        f"lower than {peak}.",
    )


def _chosen(key, *, fits=lambda cost, budget: cost[1] <= budget, sizes=lambda n: range(n + 1), keep_zero=False):
    """A wrong answer: another key, another test, other sizes."""

    def answer(count, layers, budget):
        plans = [
            {name: size for name, size in zip(layers, chosen, strict=True) if size or keep_zero}
            for chosen in itertools.product(*[sizes(n) for n in layers.values()])
        ]
        fitting = [plan for plan in plans if fits(count(plan), budget)]
        if not fitting:
            raise ValueError("nothing fits")
        return min(fitting, key=lambda plan: key(count(plan)))

    return answer


def returns_none(count, layers, budget):
    try:
        return cheapest(count, layers, budget)
    except ValueError:
        return None


def index_error(count, layers, budget):
    try:
        return cheapest(count, layers, budget)
    except ValueError:
        return [][0]


def empties_the_layers(count, layers, budget):
    names = {}
    while layers:
        name, blocks = layers.popitem()
        names = {name: blocks, **names}
    return cheapest(count, names, budget)


CHEAPEST = Exercise(
    "35.B",
    examine_cheapest,
    cheapest,
    {
        "changed_given": empties_the_layers,
        "over_budget": _chosen(lambda cost: cost[:0:-1], fits=lambda cost, budget: cost[0] <= budget),
        "too_much_work": _chosen(lambda cost: cost[1:]),
        "higher_peak": _chosen(lambda cost: cost[2]),
        "exact_budget": _chosen(lambda cost: cost[:0:-1], fits=lambda cost, budget: cost[1] < budget),
        "never_asked": _chosen(lambda cost: cost[:0:-1], sizes=range),
        "unfit": _chosen(lambda cost: cost[:0:-1], keep_zero=True),
        "no_error": returns_none,
        "gave_up": _chosen(lambda cost: cost[:0:-1], sizes=lambda n: [s for s in range(n + 1) if not s or not n % s]),
        "other_error": index_error,
        "wrong_type": lambda count, layers, budget: list(cheapest(count, layers, budget)),
    },
    zh="先看峰值放不放得下，再比重算，最后比峰值。",
    en="First whether the peak fits, then the work, then the peak.",
)

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
frugal_if_empty = _frugal_where(lambda index, again: not again)


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
        refuse(
            "kept_recomputed",
            zh=f"反向快结束时，重算出来的 {len(block.runs[1])} 个激活值里，还有 {alive[2]} 个占着内存，而它们早已用完。",
            en=f"Near the end of backward {alive[2]} of the {len(block.runs[1])} recomputed activations are still in memory, though "
            "they were used long before.",
        )
    if alive[1] > 1:
        refuse(
            "freed_at_the_end",
            zh=f"反向走到中间一层时，重算出来的 {len(block.runs[1])} 个激活值还都占着内存，其中一个已经用完：不是交出一个，放掉一个。",
            en=f"When backward is half-way, all {len(block.runs[1])} recomputed activations are still in memory, though one has "
            "been used: each should go as it is handed out.",
        )
    for tensor in (*block.parameters(), x):
        tensor.grad = None
    try:
        loss.backward()
    except Exception as error:
        refuse(
            "second_raised",
            zh=f"第一次反向没有问题；`retain_graph=True` 之后的第二次反向，抛出了 `{said(error)[:120]}`。第一次已经交出去的，它还会再要。",
            en=f"The first backward is fine; the second, after `retain_graph=True`, raised `{said(error)[:120]}`. It asks again for what "
            "the first was given.",
        )
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
        refuse(
            "left_from_before",
            zh="第一个 `block` 只求了中间一层的梯度；接着换一个 `block`，梯度就错了：上一次没取走的还在。它存在哪里？",
            en="Of a first `block` only the gradient of a layer in the middle was asked for; with another `block` after that the gradients "
            "are wrong: what was left of the first is still there. Where is it stored?",
        )
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
        refuse(
            "partial_backward",
            zh="第一次反向只求了最后一层的梯度，第二次反向就错了：当时交出去的又有人要，而手里还剩着别的。",
            en="After a first backward that asked for the gradient of the last layer only, a second one went wrong: what was handed "
            "out then is wanted again, while something else is still left.",
        )


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
    again, done, number = {}, [], itertools.count()

    def unpack(index):
        if not done:
            done.append(True)
            fresh = itertools.count()
            collect = saved_tensors_hooks(lambda t: again.update({next(fresh): t.detach()}), print)
            with torch.enable_grad(), collect:
                block(x)
        return again.pop(index)

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


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


_AGAIN: dict = {}


def frugal_in_a_global(block, x):
    number = itertools.count()

    def unpack(index):
        if index not in _AGAIN:
            fresh = itertools.count()
            collect = saved_tensors_hooks(lambda t: _AGAIN.update({next(fresh): t.detach()}), print)
            with torch.enable_grad(), collect:
                block(x)
        return _AGAIN.pop(index)

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


def frugal_with_graphs(block, x):
    again, number = {}, itertools.count()

    def unpack(index):
        if index not in again:
            fresh = itertools.count()
            with torch.enable_grad(), saved_tensors_hooks(lambda t: again.update({next(fresh): t}), print):
                block(x)
        return again.pop(index)

    with saved_tensors_hooks(lambda t: next(number), unpack):
        return block(x)


def runs_before(block, x):
    with torch.no_grad():
        block(x)
    return frugal(block, x)


FRUGAL = Exercise(
    "35.C",
    examine_frugal,
    frugal,
    {
        "kept_recomputed": forgets,
        "freed_at_the_end": frees_at_the_end,
        "mixed_up": the_last_block,
        "leaked": frugal_with_graphs,
        "raised": _frugal_list(lambda again, index: again.pop(index)),
        "other_shape": _frugal_list(lambda again, index: again.pop()),
        "no_tensor": _frugal_list(lambda again, index: print(end="")),
        "reshaped": _frugal_list(lambda again, index: again[index].t()),
        "second_raised": never_again,
        "recomputed_often": recomputes_each_time,
        "partial_backward": frugal_if_empty,
        "left_from_before": frugal_in_a_global,
        "ready_made": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "gradient_missing": lambda block, x: frugal(block, x.detach()),
        "forwards": runs_before,
        "nothing_saved": faithful_keeps,
        "no_graph": faithful_no_graph,
        "hooks_left": faithful_leaves_hooks,
        "returned_nothing": lambda block, x: print(end=str(frugal(block, x))[:0]),
    },
    zh="交出一个，放掉一个；图还留着，就再算一遍。",
    en="Each goes as it is handed out; while the graph stays, it is computed again.",
)

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
        refuse(
            "no_pair",
            zh=f"应当返回两个上下文，得到的是 `{type(pair).__name__}`。",
            en=f"Two contexts are wanted; found `{type(pair).__name__}`.",
        )
    kinds = ", ".join(type(context).__name__ for context in pair)
    if not all(hasattr(context, "__enter__") and hasattr(context, "__exit__") for context in pair):
        refuse(
            "no_contexts",
            zh=f"返回的两样东西不能用在 `with` 里，得到的是 `{kinds}`。忘了调用，还是忘了 `@contextmanager`？",
            en=f"What is returned cannot be used with `with`; found `{kinds}`. Not called, or `@contextmanager` forgotten?",
        )
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
        refuse(
            "forward_error",
            zh=f"`block` 前向时一旦自己抛出 `{_ERROR}`，从第一个上下文出来的却是 `{arrived}`。它的 `__exit__` 返回了什么，又抛出了什么，"
            "或者哪个 `except` 接住了它？",
            en=f"If `block` raises `{_ERROR}` of its own in forward, what comes out of the first context is `{arrived}`. What does its "
            "`__exit__` return, or raise, or which `except` has caught it?",
        )
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
        refuse(
            "one_backward",
            zh="前向一次，反向两次（`retain_graph=True`）：第二次出错了，或者结果不对。每次反向都要进一次第二个上下文，"
            "而 `@contextmanager` 造出来的只能进一次（第 5 节）。",
            en="One forward and two backwards (`retain_graph=True`): the second one fails, or its result is wrong. Each backward enters "
            "the second context, and what `@contextmanager` makes can be entered once (section 5).",
        )


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


def _second_only(block):
    @contextmanager
    def second():
        now = _copies(block)
        try:
            yield
        finally:
            _put(block, now)

    return nullcontext(), second()


def _no_finally(block):
    found = {}

    @contextmanager
    def second():
        now = _copies(block)
        _put(block, found)
        yield
        _put(block, now)

    return _note(block, found), second()


def _puts_found_back(block):
    found = {}

    @contextmanager
    def second():
        _put(block, found)
        try:
            yield
        finally:
            _put(block, found)

    return _note(block, found), second()


def _entered_once(block):
    found = {}

    @contextmanager
    def second():
        now = _copies(block)
        _put(block, found)
        try:
            yield
        finally:
            _put(block, now)

    return _note(block, found), second()


def by_state_dict(block):
    found = {}

    def copies():
        return {name: value.clone() for name, value in block.state_dict().items()}

    @contextmanager
    def first():
        found.update(copies())
        yield

    @contextmanager
    def second():
        now = copies()
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
        now = _copies(block)
        try:
            yield
        finally:
            _put(block, now)

    return either(), either()


def _swapped(block):
    first, second = buffers_once(block)
    return second, first


def _keeping(start=_copies, now=_copies, *, swallow=(False, False)):
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
                _put(block, found)

            def __exit__(self, *exc_info):
                _put(block, self.now)
                return swallow[1]

        return First(), Second()

    return answer


BUFFERS = Exercise(
    "35.D",
    examine_buffers,
    buffers_once,
    {
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
        "no_contexts": lambda block: (_note, _put),
        "raised": _swapped,
    },
    zh="第二遍从同样的缓冲区出发，算完再放回去，一点痕迹也不留。",
    en="The second run starts from the same buffers and leaves no trace in them.",
)

CHECKS = [HOOKS, BATCHES, KEYWORD, SEGMENTS, FAITHFUL, CHEAPEST, FRUGAL, BUFFERS]
