"""Checks of notebook 33: offloading to CPU memory."""

import array
import gc
import io
import math
import re
import sys
import weakref
from contextlib import nullcontext
from copy import deepcopy
from decimal import Decimal
from functools import cache
from numbers import Real

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab._support.packing import outer_hooks
from hooklab.course.check import Exercise, Prediction, Refused, kind_of, refuse, said, within
from hooklab.saved import Offload

# ---- 33.A: bytes over bandwidth ----


def step_seconds(forward, backward, nbytes, bandwidth, overlap):
    one_way = nbytes / (bandwidth * 1e9)
    if overlap:
        return max(forward, one_way) + max(backward, one_way)
    return forward + backward + 2 * one_way


# Forward 1 s, backward 2 s; a copy of 1.5 s is hidden behind the one and not behind the other.
FORWARD, BACKWARD, NBYTES, BANDWIDTH = 1.0, 2.0, 60e9, 40.0


def examine_step_seconds(answer):
    serial = _number(answer(FORWARD, BACKWARD, NBYTES, BANDWIDTH, False))
    _examine_serial(serial)
    overlapped = _number(answer(FORWARD, BACKWARD, NBYTES, BANDWIDTH, True))
    _examine_overlapped(overlapped)
    for arguments in [(0.085, 0.17, 45.4e9, 55.0), (0.5, 0.25, 10e9, 25.0), (0.1, 0.2, 0, 10.0)]:
        for overlap in (False, True):
            got, want = _number(answer(*arguments, overlap)), step_seconds(*arguments, overlap)
            if not math.isclose(got, want, rel_tol=1e-6):
                refuse(
                    "one_example",
                    zh=f"`step_seconds({FORWARD}, {BACKWARD}, ...)` 对了，`step_seconds{(*arguments, overlap)}` 却得到 {got:.4g}。",
                    en=f"`step_seconds({FORWARD}, {BACKWARD}, ...)` is right, but `step_seconds{(*arguments, overlap)}` gives "
                    f"{got:.4g}.",
                )


def _number(got):
    # A tensor or an array without dimensions is one number, of the kind that `item()` gives.
    number = got.item() if getattr(got, "shape", None) == () and not getattr(got, "is_meta", False) else got
    if isinstance(number, bool) or not isinstance(number, Real | Decimal):
        refuse(
            "no_number",
            zh=f"应当返回一个数（秒），得到的是 `{kind_of(got)}`。",
            en=f"A number of seconds is wanted; found `{kind_of(got)}`.",
        )
    return float(number)


def _examine_serial(got):
    moves = NBYTES / (BANDWIDTH * 1e9)  # 1.5 s
    example = f"`step_seconds({FORWARD}, {BACKWARD}, 60e9, {BANDWIDTH}, False)`"
    if math.isclose(got, FORWARD + BACKWARD + 2 * moves, rel_tol=1e-6):
        return
    if math.isclose(got, FORWARD + BACKWARD + moves, rel_tol=1e-6):
        refuse(
            "one_way",
            zh=f"{example} 得到 {got:.4g}：只算了一趟。搬出去的还要回来。",
            en=f"{example} gives {got:.4g}: one journey is counted. What goes out has to come back.",
        )
    if math.isclose(got, FORWARD + BACKWARD + 16 * moves, rel_tol=1e-6):
        refuse(
            "bits",
            zh=f"{example} 得到 {got:.4g}：搬运的时间多了 7 倍。GB/s 的 B 是字节，不是比特。",
            en=f"{example} gives {got:.4g}: 8 times too long for moving. The B of GB/s is a byte, not a bit.",
        )
    if math.isclose(got, FORWARD + BACKWARD + 2 * NBYTES / (BANDWIDTH * 2**30), rel_tol=1e-6):
        refuse(
            "gibibytes",
            zh=f"{example} 得到 {got:.4g}：1 GB 被当成了 2 的 30 次方字节，那是 1 GiB。",
            en=f"{example} gives {got:.4g}: 1 GB was taken as 2 to the power of 30 bytes, which is 1 GiB.",
        )
    if got > 1e6:
        refuse(
            "no_unit",
            zh=f"{example} 得到 {got:.4g} 秒，太久了。带宽的单位换算了吗？",
            en=f"{example} gives {got:.4g} seconds, far too long. Was the unit of the bandwidth converted?",
        )
    if math.isclose(got, 2 * max(FORWARD + BACKWARD, moves), rel_tol=1e-6) or got < FORWARD + BACKWARD + moves:
        refuse(
            "hidden_anyway",
            zh=f"{example} 得到 {got:.4g}，还不到计算加上搬一趟的 {FORWARD + BACKWARD + moves} 秒：是漏了一样，算短了一样，还是藏了一样？`overlap` 为假时，每一样都要加上。",
            en=f"{example} gives {got:.4g}, less than computing and one way of moving, {FORWARD + BACKWARD + moves}: was something left out, "
            "taken too short, or hidden? Without `overlap` everything adds up.",
        )
    refuse(
        "wrong_serial",
        zh=f"{example} 得到 {got:.4g}。计算共 {FORWARD + BACKWARD} 秒，60 GB 以 {BANDWIDTH} GB/s 走一趟要 {moves} 秒。",
        en=f"{example} gives {got:.4g}. Computing takes {FORWARD + BACKWARD} seconds, and 60 GB at {BANDWIDTH} GB/s take "
        f"{moves} seconds one way.",
    )


def _examine_overlapped(got):
    moves = NBYTES / (BANDWIDTH * 1e9)
    example = f"`step_seconds({FORWARD}, {BACKWARD}, 60e9, {BANDWIDTH}, True)`"
    if math.isclose(got, max(FORWARD, moves) + max(BACKWARD, moves), rel_tol=1e-6):
        return
    if math.isclose(got, FORWARD + BACKWARD + 2 * moves, rel_tol=1e-6):
        refuse(
            "overlap_ignored",
            zh=f"{example} 与 `overlap` 为假时一样，是 {got:.4g}。",
            en=f"{example} is {got:.4g}, the same as without `overlap`.",
        )
    if math.isclose(got, max(FORWARD + BACKWARD, 2 * moves), rel_tol=1e-6):
        refuse(
            "whole_step",
            zh=f"{example} 得到 {got:.4g}，只有计算的时间，像是搬运全藏住了。可是搬出去只在前向里进行，前向比它短的部分，反向补不回来。",
            en=f"{example} gives {got:.4g}, the time of computing alone, as if all moving were hidden. But things go out in forward alone, and what "
            "forward is too short for cannot be made up in backward.",
        )
    if got < FORWARD + BACKWARD:
        refuse(
            "too_good",
            zh=f"{example} 得到 {got:.4g}，比计算本身的 {FORWARD + BACKWARD} 秒还短：前向和反向一先一后，没有一样能省掉。",
            en=f"{example} gives {got:.4g}, less than computing alone, {FORWARD + BACKWARD}: forward and backward come one after the "
            "other, and neither goes away.",
        )
    refuse(
        "wrong_overlap",
        zh=f"{example} 得到 {got:.4g}。分开想：前向要等计算和搬运都完成，反向也一样。",
        en=f"{example} gives {got:.4g}. Think of each phase apart: forward is over when computing and moving both are; so is "
        "backward.",
    )


def _seconds(one_way, overlapped=None):
    """A wrong answer: `one_way(nbytes, bandwidth)` seconds, and `overlapped(forward, backward, one_way)`."""

    def answer(forward, backward, nbytes, bandwidth, overlap):
        moves = one_way(nbytes, bandwidth)
        if overlap and overlapped:
            return overlapped(forward, backward, moves)
        return forward + backward + 2 * moves

    return answer


def _right_one_way(nbytes, bandwidth):
    return nbytes / (bandwidth * 1e9)


SECONDS = Exercise(
    "33.A",
    examine_step_seconds,
    step_seconds,
    {
        "one_way": _seconds(lambda nbytes, bandwidth: nbytes / (bandwidth * 1e9) / 2),
        "bits": _seconds(lambda nbytes, bandwidth: 8 * nbytes / (bandwidth * 1e9)),
        "gibibytes": _seconds(lambda nbytes, bandwidth: nbytes / (bandwidth * 2**30)),
        "wrong_serial": _seconds(lambda nbytes, bandwidth: nbytes / (bandwidth * 1e6)),
        "no_unit": _seconds(lambda nbytes, bandwidth: nbytes / bandwidth),
        "hidden_anyway": lambda forward, backward, nbytes, bandwidth, overlap: (
            max(forward, nbytes / bandwidth / 1e9) + max(backward, nbytes / bandwidth / 1e9)
        ),
        "overlap_ignored": _seconds(_right_one_way),
        "whole_step": _seconds(_right_one_way, lambda f, b, moves: max(f + b, 2 * moves)),
        "too_good": _seconds(_right_one_way, lambda f, b, moves: max(f, b, moves)),
        "wrong_overlap": _seconds(_right_one_way, lambda f, b, moves: f + b + moves),
        "one_example": _seconds(_right_one_way, lambda f, b, moves: max(f, moves) + b),
        "no_number": lambda *arguments: print(*arguments),
    },
    zh="两个阶段分开比，各取较大者。字节数除以带宽，不用 GPU 就知道值不值。",
    en="Each phase apart, the larger of the two. Bytes over bandwidth tell without a GPU whether it is worth it.",
)

# ---- 33.B: SaveToCpu on Offload ----


def save_to(module, store):
    class SaveTo(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            with Offload(self.module, to=store, min_bytes=0):
                return self.module(*args, **kwargs)

    return SaveTo()


class _Counting:
    """A store that keeps account; it holds the slots by weak reference only."""

    class Slot:
        def __init__(self, tensor):
            self.content = tensor.detach().clone()

    def __init__(self):
        self.written, self.slots, self.given, self.flat = [], [], [], True

    def write(self, tensor):
        self.flat = self.flat and tensor.dim() == 1
        slot = self.Slot(tensor)
        self.written.append(tensor.numel() * tensor.element_size())
        self.slots.append(weakref.ref(slot))
        return slot

    def read(self, slot):
        content = slot.content.clone()
        self.given.append(weakref.ref(content.untyped_storage()))
        return content

    @property
    def alive(self):
        gc.collect()
        return sum(slot() is not None for slot in self.slots)


class _Inner(nn.Module):
    """Linear, BatchNorm, tanh; takes a keyword, returns a tuple; fails when asked to."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)

    def forward(self, x: Tensor, *, factor: float = 1.0, fail: bool = False) -> tuple[Tensor, float]:
        hidden = torch.tanh(self.norm(self.linear(x))) * factor
        if fail:
            raise ValueError("this module was told to fail")
        return hidden, factor


def _inner():
    torch.manual_seed(0)
    return _Inner(), torch.randn(3, 5, requires_grad=True)


def _wrapped(answer, store):
    module, x = _inner()
    wrapped = answer(module, store)
    if not isinstance(wrapped, nn.Module):
        refuse(
            "no_module",
            zh=f"应当返回一个 `nn.Module`，得到的是 `{type(wrapped).__name__}`。",
            en=f"An `nn.Module` should come back; found `{type(wrapped).__name__}`.",
        )
    if wrapped is module:
        refuse(
            "same_module",
            zh="返回的就是 `module` 自己：从此单独调用它，也会去搬。要的是一个新模块。",
            en="What came back is `module` itself: from now on calling it alone moves things too. A new module is wanted.",
        )
    return module, x, wrapped


def examine_save_to(answer):
    before = outer_hooks()
    try:
        _examine_save_to(answer)
    finally:
        _close_hooks(before)  # an answer may leave its context open


def _examine_save_to(answer):
    plain, plain_x = _inner()
    want, _ = plain(plain_x, factor=2.0)
    want.square().sum().backward()

    store = _Counting()
    module, x, wrapped = _wrapped(answer, store)
    fired = []
    module.register_forward_hook(lambda *args: fired.append(1))
    before = len(store.written)
    result = wrapped(x, factor=2.0)
    written = len(store.written)
    _examine_result(result, want)
    torch.ones(2, requires_grad=True).exp().sum()
    _examine_outside(before + len(store.written) - written)
    result[0].square().sum().backward()
    _examine_save_to_gradients(plain, plain_x, module, wrapped, x)
    _examine_written(store)
    del result
    _examine_slots(store)
    if len(fired) > 1:
        refuse(
            "ran_twice",
            zh=f"调用一次包装，`module` 运行了 {len(fired)} 次：BatchNorm 的统计量也更新了 {len(fired)} 次。",
            en=f"One call of the wrapper ran `module` {len(fired)} times: batch norm has updated its statistics as often.",
        )
    if not fired:
        refuse(
            "skipped_hooks",
            zh="我们在 `module` 上挂了一个前向钩子，它没有触发。调用的是模块，还是它的 `forward`？",
            en="A forward hook that we had hung on `module` did not fire. Was the module called, or its `forward`?",
        )
    _examine_again(module, x, wrapped, store)
    _examine_two_inputs(answer)
    _examine_two_calls(answer)
    _examine_failing(answer)


def _examine_two_calls(answer):
    store, other = _Counting(), _Counting()
    first = answer(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), store)
    answer(nn.Linear(2, 2), other)
    first(torch.ones(1, 2))
    if other.written or not store.written:
        refuse(
            "latest_call",
            zh="调用了两次，第一次返回的，用的却是第二次收到的东西。参数存在哪里？",
            en="It was called twice; what the first call returned now works with what the second was given. Where are the "
            "arguments kept?",
        )


def _examine_two_inputs(answer):
    bilinear = nn.Bilinear(2, 3, 4)
    try:
        answer(bilinear, _Counting())(torch.ones(1, 2), torch.ones(1, 3))
    except TypeError as error:
        refuse(
            "one_input",
            zh=f"`nn.Bilinear` 有两个按位置传的输入，包装以后抛出了 `{said(error)}`。参数要原样传进去。",
            en=f"`nn.Bilinear` takes two inputs by position; wrapped, it raised `{said(error)}`. Hand all arguments on.",
        )


def _examine_result(result, want):
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        refuse(
            "other_result",
            zh=f"`module` 返回的是一个元组，包装返回的却是 `{type(result).__name__}`：结果应当原样返回。",
            en=f"`module` returns a tuple, the wrapper returned `{type(result).__name__}`: the result should come through as "
            "it is.",
        )
    if result[1] != 2.0 or not torch.equal(result[0], want):
        refuse(
            "other_values",
            zh="包装算出的值与 `module` 的不同。关键字参数传进去了吗？",
            en="The wrapper's values are not those of `module`. Do keyword arguments get through?",
        )
    if not result[0].requires_grad:
        refuse(
            "no_graph",
            zh="值都对，但结果没有计算图，反向走不下去：是不是 `detach` 过，或者关掉了梯度？",
            en="The values are right, but the result has no graph, so there is no backward. Was it put through `detach`, or were "
            "gradients off?",
        )


def _examine_slots(store):
    if alive := store.alive:
        refuse(
            "keeps_slots",
            zh=f"反向做完，结果也删掉了，`store` 里还有 {alive} 个 `slot` 有人拿着：不归计算图所有，就一直占着。",
            en=f"Backward is over and the result has been deleted, yet somebody still holds a `slot` of `store`: {alive} of them. "
            "What the graph does not own is never free.",
        )


def _examine_again(module, x, wrapped, store):
    first = sum(store.written)
    _result = wrapped(x, factor=2.0)
    if (second := sum(store.written) - first) != first:
        refuse(
            "first_call_only",
            zh=f"同样的输入，第一次调用搬了 {first} 字节，第二次却是 {second} 字节。",
            en=f"With the same input the first call moved {first} bytes, and the second {second}.",
        )
    both = len(store.written)
    _result = module(x, factor=2.0)
    if len(store.written) > both:
        refuse(
            "module_changed",
            zh="单独调用 `module`，不经过你的包装，保存的张量也进了 `store`：`module` 自己被改动了。",
            en="When `module` is called by itself, without your wrapper, what it saves goes into `store` too: `module` itself was "
            "changed.",
        )


def _examine_outside(more):
    if more:
        refuse(
            "left_open",
            zh="包装之外的运算，保存的张量也进了 `store`：上下文打开得太早，或者没有关上。",
            en="What an operation outside the wrapper saves goes into `store` as well: the context was opened too early, or "
            "never closed.",
        )


def _examine_written(store):
    wanted = _Counting()
    module, x = _inner()
    with Offload(module, to=wanted, min_bytes=0):
        _result = module(x, factor=2.0)  # while it is held, so is the graph
    got, want = sum(store.written), sum(wanted.written)
    if got == want:
        return
    if not got:
        refuse(
            "nothing_moved",
            zh="梯度没问题，可是 `store.write` 一次也没有调用，什么都没搬。看看 `to` 和 `min_bytes`。",
            en="Gradients are fine, but `store.write` was never called: nothing has moved. See `to` and `min_bytes`.",
        )
    if got > want:
        refuse(
            "moved_own",
            zh=f"搬了 {got} 字节，多了 {got - want} 字节：`module` 自己的参数或缓冲区也搬走了，还是 `module` 跑了不止一遍？",
            en=f"{got} bytes were moved, {got - want} too many: were parameters or buffers of `module` among them, or did `module` run "
            "more than once?",
        )
    refuse(
        "too_few",
        zh=f"只搬了 {got} 字节，应当是 {want} 字节：有些张量留下了。",
        en=f"Only {got} bytes were moved, {want} are wanted: some tensors stayed.",
    )


def _examine_save_to_gradients(plain, plain_x, module, wrapped, x):
    got = [param.grad for param in wrapped.parameters()]
    want = [param.grad for param in plain.parameters()]
    if len(got) != len(want):
        refuse(
            "hidden_parameters",
            zh=f"包装的 `parameters()` 有 {len(got)} 个，`module` 有 {len(want)} 个：优化器会找不到参数。",
            en=f"`parameters()` of the wrapper gives {len(got)}, `module` has {len(want)}: an optimizer would not find them.",
        )
    if {id(param) for param in wrapped.parameters()} != {id(param) for param in module.parameters()}:
        refuse(
            "copied_parameters",
            zh="包装的 `parameters()` 个数没错，却不是 `module` 的那几个：运行的是一份复制品。",
            en="`parameters()` of the wrapper are as many, but not those of `module`: what runs is a duplicate.",
        )
    pairs = [(x.grad, plain_x.grad), *zip(got, want, strict=True)]
    if not all(one is not None and torch.equal(one, other) for one, other in pairs):
        refuse(
            "other_gradients",
            zh="前向的值对了，梯度却与单独运行 `module` 时不同。结果是不是 `detach` 过？",
            en="Forward is right, but the gradients are not those of `module` alone. Was the result put through `detach`?",
        )


def _examine_failing(answer):
    store = _Counting()
    _, x, wrapped = _wrapped(answer, store)
    try:
        wrapped(x, fail=True)
    except ValueError:
        pass
    else:
        refuse(
            "hid_error",
            zh="`module` 抛出了 `ValueError`，包装却没有抛出：错误被藏起来了。",
            en="`module` raised a `ValueError` and the wrapper did not: the error was hidden.",
        )
    written = len(store.written)
    torch.ones(2, requires_grad=True).exp().sum()
    if len(store.written) > written:
        refuse(
            "open_after_error",
            zh="一切顺利时没有问题；`module` 报错以后，上下文却没有关上，后面的运算还在往 `store` 里搬。",
            en="Fine as long as nothing goes wrong; but after `module` has raised, the context is still open, and later "
            "operations go on moving into `store`.",
        )


def _close_hooks(before):
    """Take off the saved-tensor hooks that an answer has left open, down to those of `before`."""
    while outer_hooks() not in (before, None):
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _wrapping(forward):
    """An answer whose wrapper runs `forward(module, store, args, kwargs)`."""

    def answer(module, store):
        class SaveTo(nn.Module):
            def __init__(self):
                super().__init__()
                self.module = module

            def forward(self, *args, **kwargs):
                return forward(self.module, store, args, kwargs)

        return SaveTo()

    return answer


def _inside(context, call=lambda module, args, kwargs: module(*args, **kwargs)):
    def forward(module, store, args, kwargs):
        with context(module, store):
            return call(module, args, kwargs)

    return _wrapping(forward)


def _offload(module, store):
    return Offload(module, to=store, min_bytes=0)


def _by_hand(module, store, args, kwargs):
    offload = _offload(module, store).__enter__()
    result = module(*args, **kwargs)
    offload.__exit__(None, None, None)
    return result


def _never_closed(module, store, args, kwargs):
    _offload(module, store).__enter__()
    return module(*args, **kwargs)


def _hides(module, store, args, kwargs):
    try:
        with _offload(module, store):
            return module(*args, **kwargs)
    except Exception:
        return None


def _one_input(module, store, args, kwargs):
    def run(x, **kwargs):
        with _offload(module, store):
            return module(x, **kwargs)

    return run(*args, **kwargs)


def _after_a_first_run(module, store, args, kwargs):
    module(*args, **kwargs)
    with _offload(module, store):
        return module(*args, **kwargs)


def hidden_parameters(module, store):
    class SaveTo(nn.Module):
        def forward(self, *args, **kwargs):
            with Offload(module, to=store, min_bytes=0):
                return module(*args, **kwargs)

    return SaveTo()


def no_module(module, store):
    def forward(*args, **kwargs):
        with _offload(module, store):
            return module(*args, **kwargs)

    return forward


def patched(module, store):
    run = module.forward

    def forward(*args, **kwargs):
        with Offload(module, to=store, min_bytes=0):
            return run(*args, **kwargs)

    module.forward = forward
    return module


def slots_in_a_list(module, store):
    own, kept = (
        {param.untyped_storage().data_ptr() for param in (*module.parameters(), *module.buffers())},
        [],
    )

    def pack(saved):
        if saved.untyped_storage().data_ptr() in own:
            return saved.detach()
        kept.append((store.write(saved.detach()), saved.shape))
        return len(kept) - 1

    def unpack(packed):
        if isinstance(packed, Tensor):
            return packed
        slot, shape = kept[packed]
        return store.read(slot).view(shape)

    return _inside(lambda module, store: saved_tensors_hooks(pack, unpack))(module, store)


def once_alone(module, store):
    contexts = [_offload(module, store)]
    return _inside(lambda module, store: contexts.pop() if contexts else nullcontext())(module, store)


def hooks_on_the_module(module, store):
    opened = []
    module.register_forward_pre_hook(lambda *args: opened.append(_offload(module, store).__enter__()))
    module.register_forward_hook(lambda *args: opened.pop().__exit__(None, None, None) and None, always_call=True)
    return _inside(lambda module, store: nullcontext())(module, store)


_STORES: list = []


def save_to_the_latest(module, store):
    _STORES[:] = [store]
    return _inside(lambda module, _: _offload(module, _STORES[0]))(module, store)


SAVE_TO = Exercise(
    "33.B",
    examine_save_to,
    save_to,
    {
        "nothing_moved": _inside(lambda module, store: Offload(module, to=store)),
        "moved_own": _inside(lambda module, store: Offload(to=store, min_bytes=0)),
        "too_few": _inside(lambda module, store: Offload(module, to=store, min_bytes=0, keep=100)),
        "open_after_error": _wrapping(_by_hand),
        "left_open": _wrapping(_never_closed),
        "hidden_parameters": hidden_parameters,
        "no_module": no_module,
        "same_module": patched,
        "one_input": _wrapping(_one_input),
        "ran_twice": _wrapping(_after_a_first_run),
        "hid_error": _wrapping(_hides),
        "latest_call": save_to_the_latest,
        "skipped_hooks": _inside(_offload, lambda module, args, kwargs: module.forward(*args, **kwargs)),
        "no_graph": _inside(_offload, lambda module, args, kwargs: (module(*args, **kwargs)[0].detach(), 2.0)),
        "keeps_slots": slots_in_a_list,
        "first_call_only": once_alone,
        "module_changed": hooks_on_the_module,
        "copied_parameters": lambda module, store: save_to(deepcopy(module), store),
        "other_result": _inside(_offload, lambda module, args, kwargs: module(*args, **kwargs)[0]),
        "other_values": _inside(_offload, lambda module, args, kwargs: (*module(*args)[:1], 2.0)),
        "other_gradients": _inside(
            _offload, lambda module, args, kwargs: (module(*args, **kwargs)[0].detach().requires_grad_(), 2.0)
        ),
    },
    zh="一个包装，任何后端：磁盘、CPU 内存，或者你自己的。",
    en="One wrapper for any store: disk, CPU memory, or one of your own.",
)

# ---- 33.C: a store that leaves zeros out ----


def zeros_store():
    class Store:
        def write(self, tensor):
            rows = tensor.view(torch.uint8).view(len(tensor), -1)
            filled = rows.any(1).bool()
            return filled, rows[filled], tensor.dtype

        def read(self, slot):
            filled, values, dtype = slot
            rows = values.new_zeros(len(filled), values.shape[1])
            rows[filled] = values
            return rows.view(-1).view(dtype)

    return Store()


def examine_zeros_store(answer):
    store = answer()
    if isinstance(store, type) or not all(callable(getattr(store, name, None)) for name in ("write", "read")):
        zh, en = f"`{type(store).__name__}`。", f"`{type(store).__name__}`."
        if isinstance(store, type):
            zh = f"类 `{store.__name__}` 本身，是不是少了一对括号？"
            en = f"the class `{store.__name__}` itself: is a pair of parentheses missing?"
        refuse(
            "no_store",
            zh=f"`zeros_store()` 应当返回一个有 `write` 和 `read` 的对象，得到的是{zh}",
            en=f"`zeros_store()` should return an object with `write` and `read`; found {en}",
        )
    torch.manual_seed(0)
    content = torch.randn(100_000)  # more than an index in int16 can count
    content[::2] = 0
    source = content.clone()
    slot = store.write(source)
    if source.untyped_storage().nbytes() != content.nbytes or not torch.equal(source, content):
        refuse(
            "edits_input",
            zh="`write` 改动了收到的张量：别人可能还要用它，它与激活值共用内存。只读它。",
            en="`write` has changed the tensor that it was given: others may still use it, it shares memory with an activation. "
            "Only read it.",
        )
    source.fill_(7)  # what the memory is used for next
    _examine_back(_read(store, slot, content), content, "half", source)
    _examine_second_read(store, slot, content)
    _examine_two(store, slot, content, torch.tensor([0.0, 1.0, 2.0]))
    del slot
    pair = [torch.tensor([0.0, number]) for number in (1.0, 2.0)]
    one, other = map(store.write, pair)
    got = _read(store, one, pair[0])
    store.read(other)
    if got[1] == 2:
        refuse(
            "one_buffer",
            zh="先后读两个 `slot`，读第二个时，第一次读到的张量也变成了第二个的内容：`read` 每次都要给新的张量。",
            en="Two `slot` were read in turn, and reading the second changed the tensor that the first had given: `read` has to give a new "
            "tensor each time.",
        )
    del one, other, got
    _examine_size(answer(), content)
    _examine_others(store)
    _examine_two(store, store.write(content), content, torch.tensor([0, 3]))


# What PyTorch says of a mask that is not `bool`: of one in `uint8`, where it names the kind.
_OF_A_MASK = re.compile(r"only supports boolean masks.*(unsigned char|Byte)|for mask")


def _read(store, slot, written):
    try:
        return store.read(slot)
    except RuntimeError as error:
        if _OF_A_MASK.search(str(error)) and _has_mask_of_bytes((store, slot), written):
            refuse(
                "mask_of_bytes",
                zh=f"`read` 抛出了 `{said(error)}`，根源却在 `write`：它留下的掩码是 `uint8`。`uint8` 张量的 `any()` 还是 `uint8`，"
                "掩码应当是 `bool`。",
                en=f"`read` raised `{said(error)}`, but it begins in `write`: the mask that it leaves is `uint8`. `any()` of a `uint8` "
                "tensor is `uint8` again; a mask should be `bool`.",
            )
        raise


def _has_mask_of_bytes(held, written):
    """Whether one of two values for each element is among what is held, in `uint8`."""
    return any(
        isinstance(part, Tensor)
        and part.dtype == torch.uint8
        and part.numel() == len(written)
        and len(part.unique()) <= 2
        for part in within(held)
    )


def _still_reads(store, slot, content):
    try:
        return torch.equal(store.read(slot), content)
    except Exception:
        return False


def _examine_second_read(store, slot, content):
    if not _still_reads(store, slot, content):
        refuse(
            "read_once",
            zh="同一个 `slot`，第一遍读得对，第二遍就不对了。反向可能再读一遍（`retain_graph=True`）：`read` 不能改动 `slot`。",
            en="Of one `slot` the first reading is right, and the second is not. Backward may read it once more "
            "(`retain_graph=True`): `read` has to leave the `slot` as it is.",
        )


def _examine_back(got, want, which, source):
    words = {
        "half": ("一半是 0 的张量", "a tensor half of whose elements are 0"),
        "signs": ("含有 `-0.0` 和 `nan` 的张量", "a tensor with `-0.0` and `nan` in it"),
        "float64": ("含有 `-0.0` 的 `torch.float64` 张量", "a tensor of `torch.float64` with `-0.0` in it"),
        "signs of bfloat16": (
            "含有 `-0.0` 的 `torch.bfloat16` 张量",
            "a tensor of `torch.bfloat16` with `-0.0` in it",
        ),
        "tiny": ("含有 `1e-30` 的张量", "a tensor with `1e-30` in it"),
        "none": ("一个 0 也没有的张量", "a tensor without any 0"),
        "all": ("全是 0 的张量", "a tensor of nothing but 0"),
        "int64": ("`torch.int64` 的张量", "a tensor of `torch.int64`"),
        "bool": ("`torch.bool` 的张量", "a tensor of `torch.bool`"),
        "bfloat16": ("`torch.bfloat16` 的张量", "a tensor of `torch.bfloat16`"),
        "complex128": ("`torch.complex128` 的张量", "a tensor of `torch.complex128`"),
    }[which]
    if not isinstance(got, Tensor):
        refuse(
            "no_tensor",
            zh=f"`read` 应当返回张量，得到的是 `{type(got).__name__}`。",
            en=f"`read` should return a tensor; found `{type(got).__name__}`.",
        )
    if got.dtype != want.dtype or got.shape != want.shape:
        refuse(
            "other_kind",
            zh=f"写入{words[0]}，应当读回 `{want.dtype} {list(want.shape)}`，得到的是 `{got.dtype} {list(got.shape)}`。",
            en=f"For {words[1]} `{want.dtype} {list(want.shape)}` should come back; found `{got.dtype} {list(got.shape)}`.",
        )
    if torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8)):
        return
    if (got == 7).any() or torch.equal(got, source):
        refuse(
            "shares_memory",
            zh="写入以后，原来那块内存改作他用，读回来的值也跟着变了：`slot` 还与它共用内存，搬走就没有意义。",
            en="After it was written, the memory of the tensor was used for something else, and what is read changed along: "
            "the `slot` shares that memory, so nothing has moved.",
        )
    if torch.equal(got.nan_to_num(9), want.nan_to_num(9)):
        refuse(
            "lost_sign",
            zh=f"写入{words[0]}，读回来的数都“相等”，位却不同：看看 `-0.0` 的符号还在不在。",
            en=f"For {words[1]} what comes back compares equal, but its bits differ: is the sign of `-0.0` still there?",
        )
    if torch.equal(got[want != 0], want[want != 0]):
        refuse(
            "not_zeros",
            zh=f"写入{words[0]}，不是 0 的元素都对，原来是 0 的地方却成了别的值。",
            en=f"For {words[1]} the elements that are not 0 come back right; where there was a 0 there is something else.",
        )
    if torch.allclose(got.double(), want.double(), rtol=1e-2, atol=1e-2, equal_nan=True):
        refuse(
            "lossy",
            zh=f"写入{words[0]}，读回来的只是近似：每一位都要相同。",
            en=f"For {words[1]} what comes back is an approximation; every bit should be the same.",
        )
    refuse(
        "other_content",
        zh=f"写入{words[0]}，读回来的内容不对。",
        en=f"For {words[1]} what comes back has another content.",
    )


def _examine_two(store, slot, content, second):
    store.write(second)
    if not _still_reads(store, slot, content):
        refuse(
            "one_slot",
            zh="写入第二个张量以后，第一个就读不回来了：每个 `slot` 要带齐自己的全部信息，不能放在 `self` 上。",
            en="After a second tensor has been written the first can no longer be read: each `slot` needs all of its own "
            "information; `self` is no place for it.",
        )


def _examine_size(store, content):
    nbytes, before = content.nbytes, sum(_contents(store).values())
    slot = store.write(content.clone())
    total = sum(_contents((store, slot)).values()) - before
    del slot
    gc.collect()
    left = sum(_contents(store).values()) - before
    if total > 0.8 * nbytes:
        refuse(
            "too_large",
            zh=f"读写都对，可是 {nbytes} 字节的张量，`slot` 占了 {total} 字节，限度是 {int(0.8 * nbytes)}。"
            "0 是不是也存进去了？记下哪里不是 0 也要占地方：列表的一项、`int64` 的下标各 8 字节，`int32` 的 4 字节；"
            "`bool` 掩码每个元素 1 字节，按字节做掩码，`float32` 的一个数就要 4 字节。",
            en=f"It reads back right, but for a tensor of {nbytes} bytes the `slot` takes {total}; "
            f"{int(0.8 * nbytes)} are allowed. Are the zeros stored as well? To note where the others are costs too: 8 bytes "
            "for an item of a list or an `int64` index, 4 for an `int32` one; 1 for each element of a `bool` mask, and over "
            "single bytes 4 for each `float32`.",
        )
    if total < 0.1 * nbytes:
        refuse(
            "nothing_in_slot",
            zh=f"写入以后，`slot` 和后端里只找到 {total} 字节，内容存在别处。检查只看得见 `slot` 和后端对象自己身上的：请放在那里，`slot` 没了，内容也该没了。",
            en=f"After writing, {total} bytes are found in the `slot` and the store, so the content is elsewhere. The check sees only "
            "what these two hold: put it there; it should go when the `slot` goes.",
        )
    if left > 0.1 * nbytes:
        refuse(
            "left_in_store",
            zh=f"`slot` 已经没人要了，后端自己身上还留着 {left} 字节：`slot` 没了，内容也该没了。",
            en=f"Nobody holds the `slot` any more, yet {left} bytes stay with the store itself: the content should go when the "
            "`slot` goes.",
        )


def _contents(slot):
    """The bytes of everything in a slot that holds content, by id: memory that is shared counts once."""
    sizes = {}
    for part in within(slot):
        if isinstance(part, Tensor) and part.layout != torch.strided:
            part = part.coalesce()
            sizes |= _contents((part.indices(), part.values()))
        elif isinstance(part, Tensor):
            storage = part.untyped_storage()
            sizes[id(storage)] = storage.nbytes()
        elif isinstance(part, bytes | bytearray):
            sizes[id(part)] = len(part)
        elif isinstance(part, array.array | io.BytesIO | str):
            sizes[id(part)] = sys.getsizeof(part)
        elif isinstance(part, int | float):
            sizes[id(part)] = 8
        elif isinstance(part, list | tuple | set | frozenset | dict):
            sizes[id(part)] = sys.getsizeof(part)  # the references: 8 bytes an item
        elif isinstance(nbytes := getattr(part, "nbytes", None), int):  # numpy's arrays
            sizes[id(part)] = nbytes
    return sizes


def _examine_others(store):
    others = {
        "signs": torch.tensor([0.0, -0.0, float("nan"), 1.5, float("-inf"), 0.0]),
        "tiny": torch.tensor([0.0, 1e-30, -1e-42, 2.0]),
        "none": torch.arange(1.0, 6.0),
        "all": torch.zeros(4),
        "int64": torch.tensor([0, -3, 2**40, 0]),
        "bool": torch.tensor([True, False, False]),
        "bfloat16": torch.tensor([0.0, 1.5, 0.0, -2.0], dtype=torch.bfloat16),
        "float64": torch.tensor([0.0, -0.0, 1.5], dtype=torch.float64),
        "signs of bfloat16": torch.tensor([0.0, -0.0, 1.5], dtype=torch.bfloat16),
        "complex128": torch.tensor([0, 1 - 2j, complex(0, -0.0)], dtype=torch.complex128),
    }
    for name, tensor in others.items():
        source = tensor.clone()
        try:
            slot = store.write(source)
            source.fill_(7)
            got = _read(store, slot, tensor)
        except Refused:
            raise
        except Exception as error:
            refuse(
                "other_dtypes",
                zh=f"一半是 0 的 `float32` 张量没有问题；写入 `{tensor.dtype}` 的张量 `{tensor.tolist()}`，你的代码抛出了 `{said(error)}`。",
                en=f"A `float32` tensor half of whose elements are 0 is fine; with the tensor `{tensor.tolist()}` of `{tensor.dtype}` "
                f"your code raised `{said(error)}`.",
            )
        _examine_back(got, tensor, name, source)


def _store(write, read):
    """An answer that returns a store with these two functions."""

    def answer():
        class Store:
            pass

        store = Store()
        store.write, store.read = write, read
        return store

    return answer


def _fill(filled, values, dtype=None):
    tensor = torch.zeros(len(filled), dtype=dtype or values.dtype)
    tensor[filled] = values.to(tensor.dtype)
    return tensor


def _bits(tensor):
    return tensor.view(torch.uint8).view(len(tensor), -1).any(1).bool()


def one_slot():
    class Store:
        def write(self, tensor):
            self.filled = _bits(tensor)
            return tensor[self.filled]

        def read(self, slot):
            return _fill(self.filled, slot)

    return Store()


def in_a_list():
    class Store:
        def __init__(self):
            self.contents = []

        def write(self, tensor):
            self.contents.append((_bits(tensor), tensor[_bits(tensor)]))
            return len(self.contents) - 1

        def read(self, slot):
            return _fill(*self.contents[slot])

    return Store()


def into_one_buffer():
    class Store:
        def __init__(self):
            self.buffers = {}

        def write(self, tensor):
            return _bits(tensor), tensor[_bits(tensor)]

        def read(self, slot):
            filled, values = slot
            kind = len(filled), values.dtype
            buffer = self.buffers.setdefault(kind, values.new_zeros(len(filled))).zero_()
            buffer[filled] = values
            return buffer

    return Store()


_CONTENTS: list[tuple[Tensor, Tensor]] = []


def in_a_global():
    class Store:
        def write(self, tensor):
            _CONTENTS.append((_bits(tensor), tensor[_bits(tensor)]))
            return len(_CONTENTS) - 1

        def read(self, slot):
            return _fill(*_CONTENTS[slot])

    _CONTENTS.clear()
    return Store()


def consumed():
    class Store:
        def write(self, tensor):
            return [(_bits(tensor), tensor[_bits(tensor)])]

        def read(self, slot):
            return _fill(*slot.pop())

    return Store()


ZEROS = Exercise(
    "33.C",
    examine_zeros_store,
    zeros_store,
    {
        "lost_sign": _store(
            lambda tensor: (tensor != 0, tensor[tensor != 0]), lambda slot: _fill(slot[0], slot[1])
        ),
        "lossy": _store(lambda tensor: (tensor.half(), tensor.dtype), lambda slot: slot[0].to(slot[1])),
        "too_large": _store(lambda tensor: (_bits(tensor).nonzero()[:, 0], tensor[_bits(tensor)], len(tensor)),
                            lambda slot: slot[1].new_zeros(slot[2]).index_copy(0, slot[0], slot[1])),
        "shares_memory": _store(lambda tensor: tensor, lambda slot: slot),
        "other_kind": _store(
            lambda tensor: (_bits(tensor), tensor[_bits(tensor)]),
            lambda slot: _fill(slot[0], slot[1], torch.float32),
        ),
        "other_content": _store(
            lambda tensor: (tensor > 0, tensor[tensor > 0]), lambda slot: _fill(slot[0], slot[1])
        ),
        "one_slot": one_slot,
        "read_once": consumed,
        "mask_of_bytes": _store(
            lambda tensor: (tensor.view(torch.uint8).view(len(tensor), -1).any(1), tensor[_bits(tensor)]),
            lambda slot: slot[1][(slot[0].cumsum(0) - 1).clamp(min=0)].masked_fill(1 - slot[0], 0),
        ),
        "not_zeros": _store(
            lambda tensor: (_bits(tensor), tensor[_bits(tensor)]),
            lambda slot: slot[1].new_ones(len(slot[0])).masked_scatter(*slot),
        ),
        "other_dtypes": _store(
            lambda tensor: (tensor.view(torch.int32) != 0, tensor[tensor.view(torch.int32) != 0]),
            lambda slot: _fill(*slot),
        ),
        "one_buffer": into_one_buffer,
        "left_in_store": in_a_list,
        "nothing_in_slot": in_a_global,
        "edits_input": _store(
            lambda tensor: (_bits(tensor), tensor[_bits(tensor)], tensor.zero_())[:2], lambda slot: _fill(*slot)
        ),
        "no_tensor": _store(lambda tensor: (_bits(tensor), tensor[_bits(tensor)]), lambda slot: slot),
        "no_store": lambda: type("Store", (), {"write": lambda self, t: t, "read": lambda self, s: s}),
    },
    zh="无损，而且小了。把它交给 `Offload`，梯度一位不差。",
    en="Lossless, and smaller. Give it to `Offload`: the gradients stay the same to the last bit.",
)  # fmt: skip

# ---- 33.D: one copy for all views of a storage ----


def pack_views(store):
    found = {}

    def pack(tensor):
        storage, version = tensor.untyped_storage(), tensor._version
        alive, known_version, known = found.get(id(storage), (lambda: None,) * 3)
        slot = known() if alive() is storage and known_version == version else None
        if slot is None:
            slot = store.write(torch.empty(0, dtype=torch.uint8).set_(storage))
            found[id(storage)] = weakref.ref(storage), version, weakref.ref(slot)
        geometry, dtype = (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype
        return lambda: store.read(slot).view(dtype).as_strided(*geometry)

    return pack


def examine_pack_views(answer):
    store = _Counting()
    pack = answer(store)
    if not callable(pack):
        refuse(
            "no_pack_function",
            zh=f"应当返回一个打包函数，得到的是 `{type(pack).__name__}`。解包不必另写：打包函数返回的，就是还回张量的函数。",
            en=f"A pack function is wanted; found a `{type(pack).__name__}`. No unpack is needed: what the pack function returns is "
            "itself the function that gives the tensor back.",
        )
    matrix = torch.arange(16.0)[2:14].detach().view(3, 4)  # its storage begins before it, and ends after it
    views = {
        "matrix": matrix,
        "matrix.t()": matrix.t(),
        "matrix[1]": matrix[1],
        "matrix[:, ::2]": matrix[:, ::2],
        "matrix.view(torch.int32)": matrix.view(torch.int32),
        "matrix[0].expand(2, 4)": matrix[0].expand(2, 4),
    }
    packed, written = [], {}
    for name, view in views.items():
        packed.append(pack(view))
        written.setdefault(len(store.written), name)  # which view made it so many
    want = [view.clone() for view in views.values()]
    nbytes = matrix.untyped_storage().nbytes()
    _examine_written_whole(store, nbytes)
    for (name, view), values, give_back in zip(views.items(), want, packed, strict=True):
        _examine_view(name, give_back, view, values)
        if wrong := _not_back(give_back, values):
            refuse(
                "given_once",
                zh=f"还回张量的函数应当可以反复调用，调用一次之后 `slot` 也还要在。`{name}` 的那一个，第二次调用就不对了：`{wrong}`。",
                en="The function that gives the tensor back may be called again and again; after one call the `slot` should still be "
                f"there. That of `{name}` goes wrong at the second call: `{wrong}`.",
            )
    _examine_moves(store, len(views), written)
    _examine_version(pack, store, matrix)
    _examine_dropped(answer)
    _examine_several(answer)
    _examine_reuse(answer)
    _examine_leaks(answer)


def _examine_written_whole(store, nbytes):
    if len(store.written) == 1 and store.written[0] != nbytes:
        refuse(
            "part_only",
            zh=f"这块存储有 {nbytes} 字节，`store.write` 收到的是 {store.written[0]} 字节。",
            en=f"The storage has {nbytes} bytes; `store.write` was given {store.written[0]}.",
        )
    if len(store.written) == 1 and not store.flat:
        refuse(
            "not_flat",
            zh="`store.write` 收到的张量不是一维的：后端只收摊平的张量。",
            en="What `store.write` was given has other than one dimension: a store takes flat tensors.",
        )


def _examine_dropped(answer):
    pack = answer(_Counting())
    tensor = torch.arange(8.0)
    first, second = pack(tensor), pack(tensor.view(2, 4))
    del first
    gc.collect()
    wrong = _not_back(lambda: second(), tensor.view(2, 4))
    second = None  # the slot goes, the tensor stays
    gc.collect()
    if wrong := wrong or _not_back(lambda: pack(tensor)(), tensor):
        refuse(
            "dead_slot",
            zh=f"打包的结果没人要了以后，同一块存储还活着，再打包或再取就不对了：`{wrong}`。弱引用指着的 `slot` 可能已经没了。",
            en=f"After what was packed before had been dropped, with the storage still there, packing or giving back went "
            f"wrong: `{wrong}`. The `slot` behind a weak reference may be gone.",
        )


def _examine_several(answer):
    """Two storages in turn, two stores, a storage of 3 bytes; each given back twice."""
    first, second = _Counting(), _Counting()
    one, other, mask = torch.arange(6.0).view(2, 3), torch.ones(5), torch.tensor([True, False, True])
    pack = answer(first)
    views = (one, other, one.t(), mask)
    wrong, packed = "", []
    for view in views:
        wrong = wrong or _not_back(lambda view=view: packed.append(pack(view)) or packed[-1](), view)
        wrong = wrong or _not_back(lambda: packed[-1](), view)
    if wrong:
        refuse(
            "several",
            zh=f"轮流打包两块存储，再打包一个 3 字节的布尔张量，各取两遍，有一次不对：`{wrong}`。",
            en=f"Two storages were packed in turn, then a boolean tensor of 3 bytes, and each given back twice: once that went wrong, "
            f"`{wrong}`.",
        )
    if len(first.written) != 3:
        refuse(
            "last_storage_only",
            zh=f"`a`、`b`、`a.t()` 依次打包，再加一个布尔张量，共 3 块存储，`store.write` 却调用了 {len(first.written)} 次：记得住的只有最近一块？",
            en=f"`a`, `b`, `a.t()` were packed in this order, then a boolean tensor: 3 storages, but `store.write` was called "
            f"{len(first.written)} times. Is only the latest remembered?",
        )
    third = _Counting()
    earlier = answer(third)
    again = answer(second)(one), earlier(one.clone())
    if not third.written:
        refuse(
            "latest_call",
            zh="调用了两次，第一次返回的，用的却是第二次收到的东西。参数存在哪里？",
            en="It was called twice; what the first call returned now works with what the second was given. Where are the "
            "arguments kept?",
        )
    if len(second.written) != 1:
        refuse(
            "shared_notes",
            zh="`pack_views` 调用两次，给的是两个后端；同一个张量，第二个后端一次也没有写：两次调用共用了一份记录。",
            en="`pack_views` was called twice, with two stores; of one and the same tensor the second store has written nothing: the "
            "two calls share their notes.",
        )
    del again


def _not_back(run, want):
    try:
        got = run()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return "" if isinstance(got, Tensor) and torch.equal(got, want) else type(got).__name__


def _examine_view(name, give_back, view, values):
    if not callable(give_back):
        refuse(
            "not_callable",
            zh=f"打包应当返回一个函数，得到的是 `{type(give_back).__name__}`。",
            en=f"Pack should return a function; found `{type(give_back).__name__}`.",
        )
    got = give_back()
    if not isinstance(got, Tensor) or got.dtype != view.dtype:
        found = f"{got.dtype}" if isinstance(got, Tensor) else type(got).__name__
        refuse(
            "other_dtype",
            zh=f"`{name}` 的数据类型是 `{view.dtype}`，还回来的是 `{found}`。",
            en=f"`{name}` is `{view.dtype}`; what came back is `{found}`.",
        )
    if got.shape != view.shape:
        refuse(
            "other_shape",
            zh=f"`{name}` 的形状是 `{list(view.shape)}`，还回来的是 `{list(got.shape)}`。",
            en=f"`{name}` has the shape `{list(view.shape)}`; what came back has `{list(got.shape)}`.",
        )
    if not torch.equal(got, values):
        refuse(
            "other_place",
            zh=f"`{name}` 还回来的形状对，值不对。每个视图从哪里开始，怎样走？",
            en=f"`{name}` comes back with the right shape and other values. Where does each view begin, and how does it step?",
        )
    if got.stride() != view.stride():
        refuse(
            "other_strides",
            zh=f"`{name}` 的步长是 `{view.stride()}`，还回来的是 `{got.stride()}`。",
            en=f"`{name}` has the strides `{view.stride()}`; what came back has `{got.stride()}`.",
        )


def _examine_moves(store, views, written):
    if not store.written:
        refuse(
            "never_written",
            zh="`store.write` 一次也没有调用：什么都没搬。",
            en="`store.write` was never called: nothing has moved.",
        )
    if len(store.written) > 1:
        later = next((name for count, name in written.items() if count > 1), None)
        zh = f"；多出来的第一次是为了 `{later}`" if later else ""
        en = f" The first too many was for `{later}`." if later else ""
        refuse(
            "moved_twice",
            zh=f"一个矩阵和它的 {views - 1} 个视图，`store.write` 调用了 {len(store.written)} 次，应当是 1 次{zh}。",
            en=f"For a matrix and {views - 1} views of it `store.write` was called {len(store.written)} times; once is wanted.{en}",
        )


def _examine_version(pack, store, matrix):
    old, before = pack(matrix), matrix.clone()
    matrix.add_(100)
    new = pack(matrix)
    if not torch.equal(new(), matrix):
        refuse(
            "stale",
            zh="矩阵原地加了 100 再打包，还回来的却是加之前的值。",
            en="100 was added to the matrix in place, and it was packed again; what comes back is from before that.",
        )
    if not torch.equal(old(), before):
        refuse(
            "rewritten",
            zh="矩阵原地改写以后，先前打包的那一份也变了。",
            en="After the edit in place what had been packed before has changed too.",
        )
    _views_of_new = [pack(matrix.t()), pack(matrix[1])]
    if len(store.written) != 2:
        refuse(
            "moved_again",
            zh=f"原地改写之后，新版本的 3 个视图，`store.write` 又调用了 {len(store.written) - 1} 次，应当是 1 次。",
            en=f"After the edit in place `store.write` was called {len(store.written) - 1} more times for 3 views of the new "
            "version; once is wanted.",
        )


def _examine_reuse(answer):
    pack, pool, packed, earlier = answer(_Counting()), [], [], set()
    for _ in range(10):  # batch by batch, until one storage of a batch stands where one of those before has stood
        batch = [_in_pool(pool, float(number)) for number in range(len(packed), len(packed) + 20)]
        packed += map(pack, batch)
        wrong = [number for number, give_back in enumerate(packed) if give_back()[0] != number]
        if wrong:
            refuse(
                "address_reused",
                zh=f"分批打包用完就释放的张量，{len(packed)} 个里有 {len(wrong)} 个还回来的是别人的内容。地址会换主人。",
                en=f"Tensors were packed and freed batch by batch: of {len(packed)} {len(wrong)} come back with the content of "
                "another. An address changes hands.",
            )
        here = {id(tensor.untyped_storage()) for tensor in batch}
        if earlier & here:
            return
        earlier |= here
        del batch
        if any(held() is not None for _, held in pool):
            gc.collect()


def _in_pool(pool, value):
    """1,000 times `value`, in the first memory of `pool` that nobody holds, so that its address is not new by chance."""
    memory = next((memory for memory, held in pool if held() is None), bytearray(4000))
    tensor = torch.frombuffer(memory, dtype=torch.float32).fill_(value).detach()
    pool[:] = [entry for entry in pool if entry[0] is not memory]
    pool.append((memory, weakref.ref(tensor.untyped_storage())))
    return tensor


def _examine_leaks(answer):
    store = _Counting()
    pack = answer(store)
    tensor = torch.ones(8)
    storage, packed = weakref.ref(tensor.untyped_storage()), pack(tensor)
    del tensor
    gc.collect()
    if storage() is not None:
        refuse(
            "keeps_tensor",
            zh="打包以后，原来的张量已经删掉，它的存储却还在内存里：什么也没腾出来。",
            en="The tensor that was packed has been deleted, but its storage is still in memory: no room was gained.",
        )
    packed()
    gc.collect()
    if any(given() is not None for given in store.given):
        refuse(
            "keeps_copy",
            zh="还回来的张量已经没人要了，内容却还留在内存里，什么也没腾出来：内容应当只在 `store` 里，每次调用再读。",
            en="Nobody wants the tensor that was given back any more, yet its content is still in memory, and no room was gained: it "
            "should be in `store` only, and be read at every call.",
        )
    del packed
    kept = torch.ones(8)  # the tensor stays, what was packed goes
    packed = pack(kept)
    del packed
    if store.alive:
        refuse(
            "keeps_slot",
            zh="打包的结果已经没人要了，`slot` 却还有人留着：计算图没了，内容也该没了。",
            en="Nobody holds what pack returned any more, but somebody still holds the `slot`: when the graph is gone, the "
            "content should be gone.",
        )


def _views(*, key=id, same=lambda known, storage: known[0]() is storage, version=True, weak=True, hold=False,
           dtype=True, strides=True, offset=True, flat=None):  # fmt: skip
    """A wrong answer that differs from the solution in what is named."""

    def answer(store):
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            where = (key(storage), tensor._version) if version else key(storage)
            known = found.get(where)
            slot = known[1]() if known and same(known, storage) else None
            if slot is None:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                slot = store.write(whole if flat is None else flat(tensor))
                reference = weakref.ref(slot)
                found[where] = (
                    weakref.ref(storage),
                    reference if weak else lambda: slot,
                    storage if hold else None,
                )
            shape, start, kind = tensor.shape, tensor.storage_offset() if offset else 0, tensor.dtype
            steps = tensor.stride() if strides else torch.empty(shape, device="meta").stride()
            read = lambda: store.read(slot).view(kind) if dtype else store.read(slot).view(torch.float32)  # noqa: E731
            return lambda: read().as_strided(shape, steps, start)

        return pack

    return answer


def views_in_the_latest(store):
    _STORES[:] = [store]

    class Latest:
        def write(self, tensor):
            return _STORES[0].write(tensor)

        def read(self, slot):
            return _STORES[0].read(slot)

    return pack_views(Latest())


def given_back_once(store):
    pack = pack_views(store)

    def once(tensor):
        give_back, given = pack(tensor), []

        def give_back_once():
            if given:
                raise RuntimeError("given back already")
            given.append(True)
            return give_back()

        return give_back_once

    return once


def read_once(store):
    pack = pack_views(store)
    return lambda tensor: cache(pack(tensor))


NOTES = weakref.WeakKeyDictionary()


def notes_for_all(store):
    def pack(tensor):
        storage, version = tensor.untyped_storage(), tensor._version
        known_version, known = NOTES.get(storage, (None, lambda: None))
        slot = known() if known_version == version else None
        if slot is None:
            slot = store.write(torch.empty(0, dtype=torch.uint8).set_(storage))
            NOTES[storage] = version, weakref.ref(slot)
        geometry, dtype = (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype
        return lambda: store.read(slot).view(dtype).as_strided(*geometry)

    return pack


def contiguous_back(store):
    pack = pack_views(store)

    def contiguous(tensor):
        give_back = pack(tensor)
        return lambda: give_back().contiguous()

    return contiguous


def each_by_itself(store):
    def pack(tensor):
        shape, steps, kind = tensor.shape, tensor.stride(), tensor.dtype
        span = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        slot = store.write(tensor.as_strided((span,), (1,)).view(torch.uint8))
        return lambda: store.read(slot).view(kind).as_strided(shape, steps)

    return pack


def flattened(store):
    def pack(tensor):
        slot = store.write(tensor.flatten())
        return lambda: store.read(slot)

    return pack


def never_written(store):
    def pack(tensor):
        content, geometry = tensor.untyped_storage().clone(), (tensor.shape, tensor.stride())
        offset, kind = tensor.storage_offset(), tensor.dtype
        return lambda: torch.empty(0, dtype=kind).set_(content, offset, *geometry)

    return pack


def slots_for_good(store):
    """Takes it that a slot lives as long as the storage."""
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        key = id(storage), tensor._version
        alive, known = found.get(key, (lambda: None, None))
        if alive() is storage:
            slot = known()
        else:
            slot = store.write(torch.empty(0, dtype=torch.uint8).set_(storage))
            found[key] = weakref.ref(storage), weakref.ref(slot)
        geometry, dtype = (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype
        return lambda: store.read(slot).view(dtype).as_strided(*geometry)

    return pack


def first_version(store):
    """Notes a storage once and for all."""
    found = {}

    def pack(tensor):
        storage, version = tensor.untyped_storage(), tensor._version
        alive, known_version, known = found.get(id(storage), (lambda: None,) * 3)
        slot = known() if alive() is storage and known_version == version else None
        if slot is None:
            slot = store.write(torch.empty(0, dtype=torch.uint8).set_(storage))
            if alive() is not storage or known() is None:
                found[id(storage)] = weakref.ref(storage), version, weakref.ref(slot)
        geometry, dtype = (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype
        return lambda: store.read(slot).view(dtype).as_strided(*geometry)

    return pack


def latest_version(store):
    """Looks the slot up when it gives back, not when it packs."""
    found = {}

    def pack(tensor):
        storage, version = tensor.untyped_storage(), tensor._version
        if id(storage) not in found or found[id(storage)][0] != version:
            found[id(storage)] = version, store.write(torch.empty(0, dtype=torch.uint8).set_(storage))
        geometry, dtype = (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype
        key = id(storage)
        return lambda: store.read(found[key][1]).view(dtype).as_strided(*geometry)

    return pack


VIEWS = Exercise(
    "33.D",
    examine_pack_views,
    pack_views,
    {
        "moved_twice": each_by_itself,
        "other_strides": contiguous_back,
        "other_place": _views(offset=False),
        "other_dtype": _views(dtype=False),
        "rewritten": latest_version,
        "stale": _views(version=False),
        "address_reused": _views(same=lambda known, storage: True, weak=False),
        "keeps_tensor": _views(hold=True),
        "keeps_slot": _views(weak=False),
        "never_written": never_written,
        "part_only": _views(flat=lambda tensor: tensor.flatten().view(torch.uint8), offset=False),
        "not_flat": _views(
            flat=lambda tensor: torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).view(2, -1)
        ),
        "dead_slot": slots_for_good,
        "moved_again": first_version,
        "not_callable": lambda store: lambda tensor: store.write(tensor.flatten()),
        "other_shape": flattened,
        "given_once": given_back_once,
        "several": _views(flat=lambda tensor: torch.empty(0).set_(tensor.untyped_storage())),
        "no_pack_function": lambda store: (pack_views(store), store.read),
        "keeps_copy": read_once,
        "last_storage_only": _views(key=lambda storage: 0),
        "shared_notes": notes_for_all,
        "latest_call": views_in_the_latest,
    },
    zh="一块存储，一次搬运，任意多的视图。",
    en="One storage, one move, any number of views.",
)

CHECKS = [
    Prediction(
        "33.1",
        zh="注册的是 `pack` 和 `unpack`，也就是前面那对噪声钩子；`pack_hook` 定义了，却从未使用。名字差一个后缀，结果照样是 `True`，因为任何一对互逆的钩子都能通过这个检查。何况原文只打印 `allclose`，并不断言。",
        en="What was registered is `pack` and `unpack`, the noise hooks from before; `pack_hook` was defined and never used. "
        "One suffix makes the difference, and the result is `True` all the same, since any two hooks that undo each other "
        "pass this test. Besides, the text only prints its `allclose` and asserts nothing.",
    ),
    Prediction(
        "33.2",
        zh="`save_on_cpu()` 调用 `tensor.cpu()`，张量已经在 CPU 上，得到的就是它自己：没有副本，用了钩子，autograd 也不再检查版本，于是悄悄错成 5。`pin_memory=True` 总是新建一块内存复制过去，留住的是 1。文档说计算图已在 CPU 上时不复制，这只对前一种成立。",
        en="`save_on_cpu()` calls `tensor.cpu()`; the tensor is on the CPU already, so it gets the tensor itself: no copy, and "
        "with hooks autograd no longer checks the version, hence a silent 5. `pin_memory=True` always copies into new memory "
        "and keeps the 1. The documentation says that nothing is copied if the graph is on the CPU already; that holds for "
        "the first form alone.",
    ),
    Prediction(
        "33.3",
        zh="一字节也没少。上面那张表里，层 `2` 的 new bytes 是 0：它的输入就是前一个 `ReLU` 的输出，`ReLU` 在包装之外也保存了它。搬走一份，原来那份还有人要，就释放不了。",
        en="Not one byte less. In the table above layer `2` has 0 new bytes: its input is the output of the `ReLU` before, and "
        "that `ReLU`, outside the wrapper, has saved it too. Moved once, it is still wanted by another, and cannot be freed.",
    ),
    Prediction(
        "33.4",
        zh="倍数反而更大：10.8 倍。计算的速度是原来的 4.3 倍，带宽只有 2.2 倍，搬运在一步里占的份量更大了。计算进步得比链路快，卸载的相对代价就上涨。",
        en="The factor gets worse: 10.8. Computing is 4.3 times as fast and the link only 2.2 times, so moving weighs more in a step. "
        "Where computing gains more than the link, the relative price of offloading goes up.",
    ),
    Prediction(
        "33.5",
        zh="只少了大约一步。搬一趟要 0.83 秒，计算总共才 0.255 秒：把计算全藏在搬运后面，省下的也就是这 0.255 秒。",
        en="About one step less, no more. One way takes 0.83 seconds, and all the computing 0.255: hide the whole of it behind "
        "the moving, and 0.255 seconds is all there is to save.",
    ),
    SECONDS,
    SAVE_TO,
    ZEROS,
    VIEWS,
]
