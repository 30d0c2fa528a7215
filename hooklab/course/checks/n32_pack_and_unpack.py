"""Checks of notebook 32: pack and unpack."""

import array
import gc
import io
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from hooklab.course.check import Exercise, Prediction, refuse, said, within


def _two(got: Any) -> tuple[Callable, Callable]:
    """The pair of functions that an answer has returned."""
    if not (isinstance(got, tuple | list) and len(got) == 2 and all(callable(one) for one in got)):
        refuse(
            "no_pair",
            zh=f"应当返回一对函数 `(pack, unpack)`，得到的是 `{type(got).__name__}`。",
            en=f"A pair of functions `(pack, unpack)` is wanted; found `{type(got).__name__}`.",
        )
    return got[0], got[1]


class _Watched:
    """A pair under observation: what was packed, and whether what is unpacked is what it was."""

    def __init__(self, pair: Any, want: Callable[[Tensor], Tensor] = torch.clone):
        self.inner_pack, self.inner_unpack = _two(pair)
        self.want, self.packs, self.unpacks = want, 0, 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.packs += 1
        packed = self.inner_pack(tensor)
        self.examine(tensor, packed)
        return self.want(tensor.detach()), packed

    def examine(self, tensor: Tensor, packed: Any) -> None:
        pass

    def unpack(self, kept: tuple[Tensor, Any]) -> Tensor:
        self.unpacks += 1
        want, packed = kept
        got = self.inner_unpack(packed)
        _examine_unpacked(got, want, self.other_precision(packed, want.numel()))
        return got

    def other_precision(self, packed: Any, count: int) -> str:
        """The floating dtype of the `count` elements that were packed, where it is not the one that the exercise asks for."""
        return ""


def _examine_unpacked(got: Any, want: Tensor, other_precision: str = "") -> None:
    if not isinstance(got, Tensor):
        refuse(
            "not_a_tensor",
            zh=f"解包必须还回一个张量，你的 `unpack` 还回的是 `{type(got).__name__}`。",
            en=f"Unpacking has to give a tensor back; your `unpack` gave `{type(got).__name__}`.",
        )
    if got.dtype != want.dtype:
        refuse(
            "wrong_dtype" if want.numel() else "empty_dtype",
            zh=f"打包的是 `{want.dtype}`，形状 `{list(want.shape)}`，解包还回的是 `{got.dtype}`。PyTorch 未必报错，但约定没有守住。",
            en=f"Packed was `{want.dtype}`, shape `{list(want.shape)}`, unpacked `{got.dtype}`. PyTorch may raise no error, but the "
            "contract is broken.",
        )
    if got.shape != want.shape:
        refuse(
            "wrong_shape",
            zh=f"打包的形状是 `{list(want.shape)}`，解包还回的是 `{list(got.shape)}`。PyTorch 会悄悄广播。",
            en=f"Packed was the shape `{list(want.shape)}`, unpacked `{list(got.shape)}`. PyTorch broadcasts without a word.",
        )
    if not torch.equal(_bits(got), _bits(want)):
        at = int(torch.ne(_bits(got), _bits(want)).nonzero()[0]) // want.itemsize
        found, wanted = (one.detach().reshape(-1)[at].item() for one in (got, want))
        if other_precision and want.dtype == torch.float32:
            refuse(
                "other_precision",
                zh=f"一个 `{want.dtype}`、形状 `{list(want.shape)}` 的张量，打包时存成了 `{other_precision}`，题目要的不是它。"
                f"第 {at} 个元素应当是 `{wanted}`，得到的是 `{found}`。",
                en=f"A tensor of `{want.dtype}`, shape `{list(want.shape)}`, is kept as `{other_precision}`, which is not what the exercise "
                f"asks for. Element {at} should be `{wanted}`, found `{found}`.",
            )
        refuse(
            "wrong_values" if want.dtype in (torch.float32, torch.bool) else "changed_others",
            zh=f"一个 `{want.dtype}`、形状 `{list(want.shape)}` 的张量，解包之后数值不对。第 {at} 个元素应当是 "
            f"`{wanted}`，得到的是 `{found}`。",
            en=f"A tensor of `{want.dtype}`, shape `{list(want.shape)}`, has other values after unpacking. Element {at} "
            f"should be `{wanted}`, found `{found}`.",
        )


def _bits(tensor: Tensor) -> Tensor:
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)  # numpy's empty arrays step by 0
    return whole.reshape(-1).view(torch.uint8)


def _examine_freed(pair_of: Callable[[], Any]) -> None:
    """Nothing may stay behind: after backward, and where a graph is dropped without one."""
    if _held(_two(pair_of()), backward=True):
        refuse(
            "kept_elsewhere",
            zh="反向已经做完，张量也都丢掉了，内存却还没有释放：除了计算图，还有谁留着打包的东西？",
            en="Backward is over and every tensor has been dropped, yet memory is still held: who else but the graph keeps "
            "what was packed?",
        )
    pair = _two(pair_of())
    if held := _held(pair, backward=False):
        if held == "pair":
            refuse(
                "kept_if_dropped",
                zh="没做反向就扔掉计算图时，打包的东西还留着：`pack` 和 `unpack` 都够得着的某样东西拿着它。让计算图做它唯一的主人。",
                en="Where the graph is dropped without a backward, what was packed stays: something that `pack` and `unpack` both "
                "reach holds it. Let the graph be its only owner.",
            )
        refuse(
            "never_freed",
            zh="没做反向就扔掉计算图时，`exp` 的输出再也释放不了，`gc.collect()` 也没有用。看看 `pack` 返回的是谁，它的 "
            "`grad_fn` 又是谁；再看看外面有没有变量还拿着它。",
            en="Where the graph is dropped without a backward, the output of `exp` is never freed, not even by "
            "`gc.collect()`. See what `pack` returns, and what its `grad_fn` is; and whether a variable outside still holds it.",
        )


def _held(pair: tuple[Callable, Callable], *, backward: bool) -> str:
    """Who still holds what was packed: the pair, a graph that is never freed, or "" for nobody."""
    held = []
    for _ in range(2):  # what is made once and for all is no leak
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        with saved_tensors_hooks(*pair):
            y = x.exp()
            z = y.masked_fill(y.detach() > 9, 0.0).float().exp()
        if backward:
            z.sum().backward()
        memory = weakref.ref(y.untyped_storage())
        del x, y, z
        gc.collect()
        held.append(sum(map(_content, within(pair))))
    if held[1] > held[0]:
        return "pair"
    return "graph" if memory() is not None else ""


def _content(part: Any) -> int:
    """The bytes of content in this object alone: a tensor, bytes, an array."""
    if isinstance(part, Tensor):
        return part.untyped_storage().nbytes()
    if isinstance(part, bytes | bytearray):
        return len(part)
    return part.nbytes if isinstance(getattr(part, "nbytes", None), int) else 0  # numpy


def _again(loss: Tensor) -> None:
    """A second backward, which unpacks everything once more."""
    try:
        loss.backward()
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        refuse(
            "unpacked_once",
            zh=f"第一次反向没有问题；`retain_graph=True` 之后的第二次反向，解包抛出了 `{type(error).__name__}`。解包要经得起重复。",
            en=f"The first backward is fine; in a second, after `retain_graph=True`, unpacking raised `{type(error).__name__}`. "
            "Unpacking must bear repetition.",
        )


# ---- 32.A: a pair that keeps the books ----


def counting(counts):
    counts.update(packed=0, unpacked=0, bytes=0)

    def pack(tensor):
        counts["packed"] += 1
        counts["bytes"] += tensor.nbytes
        return tensor.detach()

    def unpack(packed):
        counts["unpacked"] += 1
        return packed

    return pack, unpack


def examine_counting(answer):
    counts, others = {}, {}
    watched = _Watched(answer(counts))
    _two(answer(others))
    x = torch.tensor([1.0, 2.0, -0.5, 0.25, 3.0], dtype=torch.float64, requires_grad=True)
    part = x[1:4]
    with watched.hooks():
        y = torch.mul(part, part).exp()
    if not counts:
        refuse(
            "empty_books",
            zh="打包之后，交给你的那个字典还是空的。账记到哪里去了？",
            en="After packing, the dictionary that you were given is still empty. Where did the books go?",
        )
    _examine_number("packed", counts, watched.packs)
    _examine_number("bytes", counts, 3 * part.nbytes)
    _examine_entry("unpacked", counts)  # how often: not yet
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    _examine_number("packed", counts, watched.packs)
    with watched.hooks():
        torch.mul(part, part)  # the next step goes on with the same books
    _examine_number("unpacked", counts, watched.unpacks)
    _examine_number("bytes", counts, 5 * part.nbytes)
    if others.get("packed", 0):
        refuse(
            "shared_books",
            zh="调用了两次 `counting`，给的是两个字典；只用了第一对钩子，第二个字典里也有了账。",
            en="`counting` was called twice, with two dictionaries; only the first pair was used, and the second dictionary "
            "has counted too.",
        )
    _examine_other_bytes(answer)
    _examine_freed(lambda: answer({}))


def _examine_other_bytes(answer):
    """Another dtype, two dimensions, and none."""
    for x in (torch.ones(2, 3, requires_grad=True), torch.ones((), dtype=torch.bfloat16, requires_grad=True)):
        counts = {}
        with saved_tensors_hooks(*_two(answer(counts))):
            x.sin()
        if (found := counts.get("bytes")) != x.nbytes:
            refuse(
                "other_bytes",
                zh=f"`torch.float64` 的一维张量记对了；换成 `{x.dtype}`、形状 `{list(x.shape)}`，打包了 {x.nbytes} 字节，"
                f'`counts["bytes"]` 记的是 `{found}`。',
                en=f"Right for a `torch.float64` tensor of one dimension; of `{x.dtype}`, shape `{list(x.shape)}`, "
                f'{x.nbytes} bytes were packed, and `counts["bytes"]` says `{found}`.',
            )


def _examine_entry(name, counts):
    if name not in counts:
        refuse(
            "no_entry",
            zh=f'字典里没有 `"{name}"` 这一项，只有 `{sorted(map(str, counts))}`。',
            en=f'The dictionary has no entry `"{name}"`, only `{sorted(map(str, counts))}`.',
        )


def _examine_number(name, counts, want):
    _examine_entry(name, counts)
    if counts[name] != want:
        zh, en = {
            "packed": (
                f"`part = x[1:4]`，前向 `torch.mul(part, part).exp()` 打包了 {want} 次",
                f"`part = x[1:4]`, and the forward `torch.mul(part, part).exp()` packed {want} times",
            ),
            "unpacked": (f"两次反向一共解包了 {want} 次", f"two runs of backward unpacked {want} times"),
            "bytes": (
                f"打包的 {want // 24} 个张量各有 3 个 `torch.float64` 元素，共 {want} 字节",
                f"the {want // 24} tensors that were packed have 3 `torch.float64` elements each, {want} bytes in all",
            ),
        }[name]
        refuse(
            f"wrong_{name}",
            zh=f'这一次，{zh}，`counts["{name}"]` 记的是 `{counts[name]}`。',
            en=f'In this run {en}; `counts["{name}"]` says `{counts[name]}`.',
        )


def _booking(keep=torch.detach, give=lambda packed: packed, size=lambda tensor: tensor.nbytes):
    """A wrong answer to 32.A: the right one, but for what is given here."""

    def answer(counts):
        counts.update(packed=0, unpacked=0, bytes=0)

        def pack(tensor):
            counts["packed"] += 1
            counts["bytes"] += size(tensor)
            return keep(tensor)

        def unpack(kept):
            counts["unpacked"] += 1
            return give(kept)

        return pack, unpack

    return answer


def counting_anew(counts):
    pack, unpack = counting(counts)
    return lambda tensor: counts.update(unpacked=0) or pack(tensor), unpack


def counting_distinct(counts):
    seen = set()
    counts.update(packed=0, unpacked=0, bytes=0)

    def pack(tensor):
        seen.add(id(tensor))
        counts.update(packed=len(seen), bytes=counts["bytes"] + tensor.nbytes)
        return tensor.detach()

    def unpack(packed):
        counts["unpacked"] += 1
        return packed

    return pack, unpack


_BOOKS: dict[str, int] = {"packed": 0, "unpacked": 0, "bytes": 0}


def counting_globally(counts):
    pair = counting(_BOOKS)

    def pack(tensor):
        packed = pair[0](tensor)
        for books in _GIVEN:
            books.update(_BOOKS)
        return packed

    def unpack(packed):
        tensor = pair[1](packed)
        for books in _GIVEN:
            books.update(_BOOKS)
        return tensor

    _GIVEN[:] = [*_GIVEN[-1:], counts]
    return pack, unpack


_GIVEN: list[dict] = []


def counting_lazily(counts):
    def add(name, number):
        counts[name] = counts.get(name, 0) + number

    def pack(tensor):
        add("packed", 1)
        add("bytes", tensor.nbytes)
        return tensor.detach()

    return pack, lambda packed: add("unpacked", 1) or packed


def counting_in_a_list(counts):
    pack, unpack = counting(counts)
    kept = []

    def pack_index(tensor):
        kept.append(pack(tensor))
        return len(kept) - 1

    return pack_index, lambda index: unpack(kept[index])


COUNTING = Exercise(
    "32.A",
    examine_counting,
    counting,
    {
        "never_freed": _booking(keep=lambda tensor: tensor),
        "wrong_bytes": _booking(size=Tensor.numel),
        "other_bytes": _booking(size=lambda tensor: len(tensor) * tensor.element_size()),
        "wrong_unpacked": counting_anew,
        "wrong_packed": counting_distinct,
        "kept_elsewhere": counting_in_a_list,
        "empty_books": lambda counts: counting({}),
        "shared_books": counting_globally,
        "no_entry": counting_lazily,
        "not_a_tensor": _booking(give=lambda packed: print(end="")),
        "wrong_dtype": _booking(keep=Tensor.bfloat16),
        "no_pair": lambda counts: saved_tensors_hooks(*counting(counts)),
    },
    zh="账目清楚，梯度不变，内存按时释放。",
    en="The books are right, the gradients unchanged, the memory freed in time.",
)

# ---- 32.B: the version check, for any pair ----


def checked(pack, unpack):
    def pack_checked(tensor):
        return tensor.detach(), tensor._version, pack(tensor)

    def unpack_checked(kept):
        tensor, version, packed = kept
        if tensor._version != version:
            raise RuntimeError(f"edited in place: version {version} when packed, now {tensor._version}")
        return unpack(packed)

    return pack_checked, unpack_checked


class _Listed:
    """A pair that packs to an index, and notes how often it was used."""

    def __init__(self):
        self.kept, self.places, self.packs, self.unpacks = [], [], 0, 0

    def pack(self, tensor):
        self.packs += 1
        self.places.append((tensor.untyped_storage().data_ptr(), tensor.requires_grad))
        self.kept.append(tensor.detach())
        return len(self.kept) - 1

    def unpack(self, index):
        self.unpacks += 1
        return self.kept[index]


def examine_checked(answer):
    for make in (_Listed, lambda: None):
        inner = make()
        pair = (inner.pack, inner.unpack) if inner else (torch.clone, lambda packed: packed)
        _examine_unedited(lambda pair=pair: answer(*pair), inner)
        _examine_edited(lambda pair=pair: answer(*pair))
    _examine_inner_result(answer)
    _examine_freed(lambda: answer(torch.detach, lambda packed: packed))
    first = _two(answer(torch.detach, lambda packed: packed))
    answer(torch.zeros_like, lambda packed: packed)
    if not torch.equal(first[1](first[0](torch.ones(2))), torch.ones(2)):
        _refuse_latest()


def _refuse_latest():
    refuse(
        "latest_call",
        zh="调用了两次，第一次返回的，用的却是第二次收到的东西。参数存在哪里？",
        en="It was called twice; what the first call returned now works with what the second was given. Where are the "
        "arguments kept?",
    )


def _examine_inner_result(answer):
    pack, unpack = _two(answer(torch.detach, lambda packed: packed + 1))
    got = unpack(pack(torch.zeros(2)))
    if not isinstance(got, Tensor) or not torch.equal(got, torch.ones(2)):
        refuse(
            "other_result",
            zh="交给你一个 `unpack`，它还回的不是原来的数值，而是加了 1 的；你的新钩子还回的却不是它的结果。",
            en="You were given an `unpack` that returns not the values packed but 1 more; what your new hooks return is not its "
            "result.",
        )


def _examine_unedited(pair_of, inner):
    x = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    watched, used = _Watched(pair_of()), (inner.packs, inner.unpacks) if inner else None
    h = x * 2
    with watched.hooks():
        y = torch.mul(h, h)
    _backward(
        y,
        "false_alarm",
        "前后都没有原地改写过任何张量（有一个元素是 `nan`，它和谁都不相等，和自己也不）",
        "no tensor was edited in place at all (one element is `nan`, which equals nothing, not even itself)",
    )
    if inner and (inner.packs - used[0], inner.unpacks - used[1]) != (2, 2):
        refuse(
            "not_inner",
            zh=f"打包、解包各 2 次，交给你的那一对里，`pack` 却执行了 {inner.packs - used[0]} 次，`unpack` 执行了 "
            f"{inner.unpacks - used[1]} 次。",
            en=f"Packed 2 times and unpacked 2 times; of the pair that you were given, `pack` ran "
            f"{inner.packs - used[0]} times and `unpack` {inner.unpacks - used[1]} times.",
        )
    if inner and inner.places[-2:] != [(h.untyped_storage().data_ptr(), True)] * 2:
        refuse(
            "other_tensor",
            zh="交给你的 `pack` 收到的不是被保存的张量，而是它的副本或 `detach()` 的结果：按存储认参数的 `pack`（第 11 节）认不出副本，看 `requires_grad` 的会被 `detach()` 骗过。",
            en="The `pack` that you were given gets a copy of the saved tensor, or what `detach()` makes of it, and not the tensor "
            "itself: a `pack` that knows parameters by their storage (section 11) does not know a copy, and one that asks for "
            "`requires_grad` is misled by `detach()`.",
        )
    watched, h = _Watched(pair_of()), x * 2
    h += 1
    h += 1
    with watched.hooks():
        y = torch.mul(h, h)
    _backward(y, "edits_before", "改写发生在打包之前，打包之后没有再改", "the edits came before packing, none after")
    watched, h, other = _Watched(pair_of()), x * 2, x * 3
    h += 1
    with watched.hooks():
        y = other.exp() + h.sin()
    _backward(
        y,
        "mixed_up",
        "打包了两个张量，版本各不相同，打包之后都没有改写",
        "two tensors were packed, of different versions, and neither was edited after packing",
    )


def _backward(y, reason, zh, en):
    try:
        y.sum().backward()
    except RuntimeError as error:
        refuse(
            reason,
            zh=f"{zh}，解包时却抛出了 `{said(error)[:100]}`。",
            en=f"Here {en}, yet unpacking raised `{said(error)[:100]}`.",
        )


def _examine_edited(pair_of):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    h, other = x * 2, x * 3
    with saved_tensors_hooks(*_two(pair_of())):
        y = h.sin() + other.sin()
    h[0] = 5.0
    _must_raise(
        y,
        "unnoticed",
        "两个张量打包之后，头一个有一个元素被原地改写",
        "two tensors were packed, and then one element of the first was edited in place",
    )
    h = x * 2
    with saved_tensors_hooks(*_two(pair_of())):
        y = h.sin()
    h += 0
    _must_raise(
        y,
        "same_values",
        "打包之后执行了 `h += 0`，数值没变，没有钩子时 PyTorch 照样报错",
        "`h += 0` ran after packing: the values are the same, and without hooks PyTorch raises all the same",
    )
    h = x * 2
    alias = h.detach()
    with saved_tensors_hooks(*_two(pair_of())):
        y = h.sin()
    del h
    alias[0] = 5.0
    _must_raise(
        y,
        "unnoticed_alias",
        "打包之后，变量 `h` 删掉了，再通过先前的 `h.detach()` 改写同一块内存",
        "after packing, the variable `h` was deleted, and then the same memory was edited through an earlier `h.detach()`",
    )
    h = x * 2
    with saved_tensors_hooks(*_two(pair_of())):
        y = h.sin()
    y.sum().backward(retain_graph=True)
    _again(y.sum())
    h = x * 2
    with saved_tensors_hooks(*_two(pair_of())):
        y = h.sin()
    y.sum().backward(retain_graph=True)
    h += 1
    _must_raise(
        y,
        "checked_once",
        "第一次反向之后才改写，接着做第二次反向",
        "the edit came after a first backward, and then there was a second",
    )


def _must_raise(y, reason, zh, en):
    try:
        y.sum().backward()
    except RuntimeError:
        return
    except Exception as error:
        refuse(
            "other_error",
            zh=f"应当抛出 `RuntimeError`，抛出的是 `{said(error)[:100]}`。",
            en=f"A `RuntimeError` is wanted; raised was `{said(error)[:100]}`.",
        )
    refuse(reason, zh=f"{zh}，解包时却没有报错。", en=f"In this run {en}; unpacking raised nothing.")


def checked_against_zero(pack, unpack):
    def unpack_checked(kept):
        if kept[0]._version != 0:
            raise RuntimeError("edited in place")
        return unpack(kept[1])

    return lambda tensor: (tensor.detach(), pack(tensor)), unpack_checked


def checked_by_values(pack, unpack):
    def unpack_checked(kept):
        if not torch.equal(kept[0], kept[1]):
            raise RuntimeError("edited in place")
        return unpack(kept[2])

    return lambda tensor: (tensor.detach(), tensor.detach().clone(), pack(tensor)), unpack_checked


def checked_by_equal_values(pack, unpack):
    def unpack_checked(kept):
        if not torch.allclose(kept[0], kept[1], equal_nan=True):
            raise RuntimeError("edited in place")
        return unpack(kept[2])

    return lambda tensor: (tensor.detach(), tensor.detach().clone(), pack(tensor)), unpack_checked


def checked_while_it_lives(pack, unpack):
    def unpack_checked(kept):
        tensor = kept[0]()
        if tensor is not None and tensor._version != kept[1]:
            raise RuntimeError("edited in place")
        return unpack(kept[2])

    return lambda tensor: (weakref.ref(tensor), tensor._version, pack(tensor)), unpack_checked


def checked_with_one_version(pack, unpack):
    version = None

    def pack_checked(tensor):
        nonlocal version
        version = tensor._version
        return tensor.detach(), pack(tensor)

    def unpack_checked(kept):
        if kept[0]._version != version:
            raise RuntimeError("edited in place")
        return unpack(kept[1])

    return pack_checked, unpack_checked


def checked_on(keep, error=RuntimeError):
    """A wrong answer to 32.B that keeps `keep(tensor)` to see the version."""

    def answer(pack, unpack):
        def pack_checked(tensor):
            kept = keep(tensor)
            return kept, kept._version, pack(tensor)

        def unpack_checked(kept):
            if kept[0]._version != kept[1]:
                raise error("edited in place")
            return unpack(kept[2])

        return pack_checked, unpack_checked

    return answer


def checked_the_first_time(pack, unpack):
    pack_checked, unpack_checked = checked(pack, unpack)

    def unpack_once(noted):
        kept, done = noted
        noted[1] = True
        return unpack(kept[2]) if done else unpack_checked(kept)

    return lambda tensor: [pack_checked(tensor), False], unpack_once


def checked_without_its_result(pack, unpack):
    pack_checked, unpack_checked = checked(pack, unpack)

    def unpack_and_ignore(kept):
        unpack_checked(kept)
        return kept[0]

    return pack_checked, unpack_and_ignore


def checked_on_a_copy(pack, unpack):
    return checked(lambda tensor: pack(tensor.clone()), unpack)


def emptied(pair_of):
    """A wrong answer that can give back what it has packed once only."""

    def answer(*given):
        pack, unpack = pair_of(*given)
        return lambda tensor: [pack(tensor)], lambda packed: unpack(packed.pop())

    return answer


_LATEST: dict[str, Any] = {}


def checked_with_the_latest(pack, unpack):
    _LATEST.update(pack=pack, unpack=unpack)
    return checked(lambda tensor: _LATEST["pack"](tensor), lambda packed: _LATEST["unpack"](packed))


def halving_the_latest(model):
    _LATEST.update(model=model)
    return halving(lambda tensor, _: _in_model(tensor, _LATEST["model"]))(model)


CHECKED = Exercise(
    "32.B",
    examine_checked,
    checked,
    {
        "unnoticed": lambda pack, unpack: (pack, unpack),
        "edits_before": checked_against_zero,
        "false_alarm": checked_by_values,
        "same_values": checked_by_equal_values,
        "unnoticed_alias": checked_while_it_lives,
        "mixed_up": checked_with_one_version,
        "never_freed": checked_on(lambda tensor: tensor),
        "other_error": checked_on(torch.detach, error=AssertionError),
        "unpacked_once": emptied(checked),
        "checked_once": checked_the_first_time,
        "other_result": checked_without_its_result,
        "other_tensor": checked_on_a_copy,
        "latest_call": checked_with_the_latest,
        "not_inner": lambda pack, unpack: checked(torch.detach, lambda packed: packed),
        "raised": lambda pack, unpack: (lambda tensor: (pack(tensor), pack(tensor)._version), unpack),
        "no_pair": lambda pack, unpack: saved_tensors_hooks(*checked(pack, unpack)),
    },
    zh="任何一对钩子都能用上它：改写过就报错，没改写过就不打扰。",
    en="Any pair can have it: an edit raises, and where there is none nobody is disturbed.",
)


# ---- 32.C: half precision, but not for what lives anyway ----


def half_precision(model):
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor):
        if tensor.dtype != torch.float32 or tensor.untyped_storage().data_ptr() in own:
            return tensor.detach(), tensor.dtype
        return tensor.bfloat16(), tensor.dtype

    def unpack(packed):
        tensor, dtype = packed
        return tensor.to(dtype)

    return pack, unpack


class _Reader(nn.Module):
    """Words to scores: an embedding, a slice of a weight, running statistics, other dtypes and masks on the way."""

    def __init__(self):
        super().__init__()
        self.words, self.first, self.norm = nn.Embedding(1001, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.weight, self.scale = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(4))
        self.register_buffer("gains", torch.randn(8), persistent=False)
        self.norm.running_var.uniform_(1, 2)
        self.norm.eval()

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.words(indices).mean(1)) * 1000)
        hidden = F.linear(hidden.tanh() * self.gains, self.weight[2:])
        hidden = hidden.double().sin().bfloat16().sin().float().masked_fill(hidden < 0, 0.25)
        return F.linear(hidden * self.scale * self.scale.detach(), self.weight[2:, :4])


class _Halving(_Watched):
    """Watches what is copied: nothing of the model, and half of each float32."""

    def __init__(self, pair: Any, model: nn.Module):
        super().__init__(pair, self.rounded)
        self.params = {_place(param) for param in model.parameters()}
        self.buffers = {_place(buffer): name for name, buffer in model.named_buffers()}
        self.stored = set(model.state_dict())

    def rounded(self, tensor: Tensor) -> Tensor:
        own = _place(tensor) in self.params | set(self.buffers)
        return tensor.clone() if own or tensor.dtype != torch.float32 else tensor.bfloat16().float()

    def other_precision(self, packed: Any, count: int) -> str:
        parts = [part for part in within(packed) if _count(part) == count]  # not a scale beside integers
        dtypes = {str(getattr(part, "dtype", "")) for part in parts}  # also of numpy
        floats = sorted(dtype for dtype in dtypes if "float" in dtype)
        return "" if {"torch.bfloat16", "torch.float32"} & set(floats) else ", ".join(floats)

    def examine(self, tensor: Tensor, packed: Any) -> None:
        place, kept = _place(tensor), [part for part in within(packed) if isinstance(part, Tensor)]
        if place in self.params | set(self.buffers) and any(_place(one) != place for one in kept):
            kind = "slice" if tensor.storage_offset() else "parameter" if tensor.requires_grad else "detached"
            kind = "buffer" if place in self.buffers else kind
            zh, en = {
                "buffer": (
                    f"缓冲区 `{self.buffers.get(place)}`",
                    f"the buffer `{self.buffers.get(place)}`",
                ),
                "slice": ("一个参数的切片", "a slice of a parameter"),
                "detached": ("一个参数的 `detach()`", "what `detach()` makes of a parameter"),
                "parameter": ("一个参数，或它的转置", "a parameter, or its transpose"),
            }[kind]
            left_out = kind == "buffer" and self.buffers[place] not in self.stored
            refuse(
                f"copied_{kind}",
                zh=f"打包时复制了{zh}，形状 `{list(tensor.shape)}`：它本来就在内存里，复制只会更多。"
                + ("`state_dict()` 里没有它，它是用 `persistent=False` 注册的；`buffers()` 里有。" if left_out else ""),
                en=f"Packing has made a copy of {en}, shape `{list(tensor.shape)}`: it lives anyway, and a copy only adds."
                + (
                    " It is not in `state_dict()`, being registered with `persistent=False`; `buffers()` has it."
                    if left_out
                    else ""
                ),
            )
        if tensor.dtype == torch.float32 and place not in self.params | set(self.buffers):
            size = sum({_place(one): one.untyped_storage().nbytes() for one in kept}.values())
            if size > tensor.nbytes // 2:
                refuse(
                    "not_halved",
                    zh=f"一个 float32 张量有 {tensor.nbytes} 字节，打包之后留住了 {size} 字节，应当是一半。形状 "
                    f"`{list(tensor.shape)}`，不是模型的参数。",
                    en=f"A float32 tensor has {tensor.nbytes} bytes; what was packed holds {size}, where half is wanted. "
                    f"Its shape is `{list(tensor.shape)}`, and it is no parameter of the model.",
                )


def _count(part: Any) -> Any:
    """How many elements: of a tensor, or of an array of numpy."""
    return part.numel() if isinstance(part, Tensor) else getattr(part, "size", None)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def examine_half_precision(answer):
    torch.manual_seed(0)
    model = _Reader()
    watched = _Halving(answer(model), model)
    indices = torch.tensor([[1, 999], [257, 1000], [3, 513], [2, 7]])
    with watched.hooks():
        y = model(indices)
    y.sum().backward(retain_graph=True)
    _examine_freed(lambda: answer(model))
    _again(y.sum())
    first, weight = _two(answer(model)), model.first.weight.detach()
    answer(nn.Linear(2, 2))
    if not torch.equal(first[1](first[0](weight)), weight):
        _refuse_latest()


def halving(skips=lambda tensor, model: False, to=torch.bfloat16, others=torch.detach):
    """A wrong answer to 32.C, which leaves alone what `skips`."""

    def answer(model):
        def pack(tensor):
            if skips(tensor, model):
                return others(tensor), tensor.dtype
            return tensor.to(to), tensor.dtype

        return pack, lambda packed: packed[0].to(packed[1])

    return answer


def halving_without_dtype(model):
    def pack(tensor):
        return tensor.detach() if _in_model(tensor, model) else tensor.bfloat16()

    return pack, lambda packed: packed.float() if packed.dtype == torch.bfloat16 else packed


def _in_model(tensor, model, pointer=_place, buffers=True):
    own = [*model.parameters(), *(model.buffers() if buffers else ())]
    return tensor.dtype != torch.float32 or pointer(tensor) in {pointer(one) for one in own}


def halving_by_base(model):
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor):
        base = tensor if tensor._base is None else tensor._base
        if tensor.dtype != torch.float32 or id(base) in own:
            return tensor.detach(), tensor.dtype
        return tensor.bfloat16(), tensor.dtype

    return pack, lambda packed: packed[0].to(packed[1])


def halving_until_unpacked(model):
    pack, unpack = half_precision(model)
    kept = {}

    def pack_key(tensor):
        key = object()
        kept[key] = pack(tensor)
        return key

    return pack_key, lambda key: unpack(kept.pop(key))


def halving_by_cutting(model):
    """Keeps the upper half of the bits, without rounding."""

    def pack(tensor):
        if _in_model(tensor, model):
            return tensor.detach(), tensor.dtype
        return tensor.contiguous().view(torch.bfloat16)[..., 1::2].clone(), tensor.dtype

    return pack, lambda packed: packed[0].to(packed[1])


HALF_PRECISION = Exercise(
    "32.C",
    examine_half_precision,
    half_precision,
    {
        "copied_parameter": halving(
            lambda tensor, model: tensor.dtype != torch.float32 or isinstance(tensor, nn.Parameter)
        ),
        "copied_slice": halving(
            lambda tensor, model: (
                _in_model(tensor, model, Tensor.data_ptr)
                or _place(tensor) in {_place(buffer) for buffer in model.buffers()}
            )
        ),
        "copied_detached": halving_by_base,
        "kept_if_dropped": halving_until_unpacked,
        "copied_buffer": halving(lambda tensor, model: _in_model(tensor, model, buffers=False)),
        "changed_others": halving(lambda tensor, model: tensor.dtype == torch.float32 and _in_model(tensor, model)),
        "wrong_dtype": halving_without_dtype,
        "not_halved": halving(lambda tensor, model: _in_model(tensor, model) or tensor.requires_grad),
        "wrong_values": halving_by_cutting,
        "other_precision": halving(_in_model, to=torch.float16),
        "never_freed": halving(_in_model, others=lambda tensor: tensor),
        "latest_call": halving_the_latest,
        "unpacked_once": emptied(half_precision),
        "no_pair": lambda model: half_precision(model)[0],
    },
    zh="该减半的减半，本来就在的不复制，别的类型一位不动。",
    en="Halved what may be halved, no copy of what lives anyway, other dtypes untouched.",
)

# ---- 32.D: masks as bits ----


def as_bits():
    weights = 2 ** torch.arange(8, dtype=torch.uint8)

    def pack(tensor):
        if tensor.dtype != torch.bool:
            return tensor.detach()
        flat = tensor.reshape(-1)
        flat = F.pad(flat, (0, -len(flat) % 8))
        return (flat.view(-1, 8) * weights).sum(1, dtype=torch.uint8), tensor.shape

    def unpack(packed):
        if isinstance(packed, Tensor):
            return packed
        octets, shape = packed
        return (octets[:, None] & weights).ne(0).flatten()[: shape.numel()].view(shape)

    return pack, unpack


class _Bits(_Watched):
    """Watches how many bytes a mask takes when it is packed."""

    def examine(self, tensor: Tensor, packed: Any) -> None:
        size = sum(map(_bytes, within(packed)))
        if tensor.dtype == torch.bool and tensor.numel() >= 10_000 and size > tensor.numel() // 8 + 2000:
            refuse(
                "not_smaller",
                zh=f"{tensor.numel()} 个元素的掩码，打包之后占 {size} 字节；8 个元素 1 字节，只要 {tensor.numel() // 8}。",
                en=f"A mask of {tensor.numel()} elements takes {size} bytes when packed; at 8 elements per byte "
                f"{tensor.numel() // 8} will do.",
            )


def _bytes(part: Any) -> int:
    """Of this object alone."""
    holders = list | tuple | set | dict | str | int | array.array | io.BytesIO
    return _content(part) or (sys.getsizeof(part) if isinstance(part, holders) else 0)


def examine_as_bits(answer):
    torch.manual_seed(0)
    for shape in ((16,), (3, 5), (2, 3, 7), (), (1,), (0,), (0, 3), (200, 300)):
        _examine_mask(answer, torch.randn(shape), torch.rand(shape) < 0.4)
    _examine_mask(answer, torch.randn(5, 9), (torch.rand(9, 5) < 0.4).t())
    watched = _Bits(answer())
    x = torch.tensor([[0.5, -1.0, 3.0, 7.0]], requires_grad=True)
    with watched.hooks():
        y = F.max_pool1d(torch.mul(x, x), 2) * torch.tensor([3, 255], dtype=torch.uint8)
    y.sum().backward()
    _examine_two_masks(answer)
    _examine_mask_dropped(answer)
    _examine_freed(answer)


def _examine_mask(answer, values, mask):
    x = values.requires_grad_()
    watched = _Bits(answer())
    with watched.hooks():
        y = x.masked_fill(mask, 0.0)
        z = torch.where(mask, x, -x)
    (y.sum() + z.sum()).backward(retain_graph=True)
    _again(y.sum() + z.sum())


def _examine_two_masks(answer):
    """Both packed before either is unpacked."""
    wide, tall = torch.randn(2, 3, requires_grad=True), torch.randn(9, requires_grad=True)
    watched = _Watched(answer())
    with watched.hooks():
        loss = wide.masked_fill(wide > 0, 0.0).sum() + tall.masked_fill(tall > 0, 0.0).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        refuse(
            "mixed_up",
            zh=f"先打包一个 `[2, 3]` 的掩码，再打包一个 `[9]` 的，然后解包，抛出了 `{type(error).__name__}`。每个掩码的形状记在哪里？",
            en=f"A mask of `[2, 3]` was packed, then one of `[9]`, and then both unpacked: that raised `{type(error).__name__}`. Where "
            "is the shape of each mask noted?",
        )


def _examine_mask_dropped(answer):
    pair, x = _two(answer()), torch.randn(100, requires_grad=True)
    mask = x.detach() > 0
    with saved_tensors_hooks(*pair):
        y = x.masked_fill(mask, 0.0)
    memory = weakref.ref(mask.untyped_storage())
    del mask
    gc.collect()
    if memory() is not None:
        refuse(
            "mask_kept",
            zh="掩码已经没人用了，它原来的内存却没有释放：打包的东西，或者 `pack` 够得着的列表、字典，还有什么引用着它？",
            en="Nobody uses the mask any more, yet its old memory is not freed: what still refers to it, the packed thing, or a list "
            "or dictionary that `pack` reaches?",
        )
    with suppress(RuntimeError):
        y.sum().backward()


def packing_masks(to_kept, from_kept, others=torch.detach, only=lambda tensor: tensor.dtype == torch.bool):
    """A wrong answer to 32.D: what it keeps of a mask and how it comes back."""

    def answer():
        def pack(tensor):
            return ("mask", to_kept(tensor)) if only(tensor) else ("other", others(tensor))

        def unpack(packed):
            return from_kept(packed[1]) if packed[0] == "mask" else packed[1]

        return pack, unpack

    return answer


def masks_in_a_list():
    kept = []

    def pack(tensor):
        if tensor.dtype != torch.bool:
            return tensor.detach()
        kept.append(tensor.detach())
        return len(kept) - 1

    return pack, lambda packed: kept[packed] if isinstance(packed, int) else packed


def copied_masks_in_a_list():
    kept = []

    def pack(tensor):
        if tensor.dtype != torch.bool:
            return tensor.detach()
        kept.append(tensor.clone())
        return len(kept) - 1

    return pack, lambda packed: kept[packed] if isinstance(packed, int) else packed


def _octets(tensor):
    return as_bits()[0](tensor)


def _mask(packed):
    return as_bits()[1](packed)


def _without_tail(tensor):
    octets, shape = _octets(tensor)
    return octets[: shape.numel() // 8], shape


def _with_tail_missing(packed):
    octets, shape = packed
    flat = torch.zeros(shape.numel(), dtype=torch.bool)
    flat[: len(octets) * 8] = _mask((octets, torch.Size([len(octets) * 8])))
    return flat.view(shape)


def shape_of_the_last():
    pack, unpack = as_bits()
    last = None

    def pack_mask(tensor):
        nonlocal last
        packed = pack(tensor)
        if isinstance(packed, Tensor):
            return packed
        octets, last = packed
        return (octets,)

    return pack_mask, lambda packed: unpack(packed if isinstance(packed, Tensor) else (*packed, last))


masks_from_lists = packing_masks(  # `torch.tensor` makes float32 of an empty list
    _octets, lambda packed: torch.tensor(_mask(packed).flatten().tolist()).view(packed[1])
)


AS_BITS = Exercise(
    "32.D",
    examine_as_bits,
    as_bits,
    {
        "not_smaller": packing_masks(lambda mask: mask.to(torch.uint8), Tensor.bool),
        "wrong_shape": packing_masks(_octets, lambda packed: _mask((packed[0], torch.Size([packed[1].numel()])))),
        "wrong_values": packing_masks(_without_tail, _with_tail_missing),
        "wrong_dtype": packing_masks(_octets, lambda packed: _mask(packed).to(torch.uint8)),
        "empty_dtype": masks_from_lists,
        "mask_kept": masks_in_a_list,
        "kept_elsewhere": copied_masks_in_a_list,
        "never_freed": packing_masks(_octets, _mask, others=lambda tensor: tensor),
        "changed_others": packing_masks(
            lambda tensor: (*_octets(tensor.bool()), tensor.dtype),
            lambda packed: _mask(packed[:2]).to(packed[2]),
            only=lambda tensor: tensor.dtype in (torch.bool, torch.int64),
        ),
        "unpacked_once": emptied(as_bits),
        "mixed_up": shape_of_the_last,
        "no_pair": lambda: as_bits()[0],
    },
    zh="一个掩码只占原来的八分之一，一个元素也没错。",
    en="A mask takes an eighth of what it took, and every element is right.",
)

CHECKS = [
    Prediction(
        "32.1",
        zh="`b`。打印出来的第一行带着 `grad_fn`，而 S0 的注释说先是 `a`。次序由每种运算自己的代码决定，谁也没有许诺过。",
        en="`b`. The first line printed has a `grad_fn`; the comment in S0 says `a`. Each operation's own code decides, and nobody has promised an order.",
    ),
    Prediction(
        "32.2",
        zh="成立。梯度是 -2000，减去 `2 * x` 还是负数，负数当然小于 1e-4。只看一边的断言，拦不住另一边的错。",
        en="It holds. The gradient is -2000; minus `2 * x` it is negative, and negative numbers are below 1e-4. An assertion that looks one way stops nothing from the other.",
    ),
    Prediction(
        "32.3",
        zh="48 和 56：反向用的是改写之后的 `h`，算出来是 $4h$，`h` 已经是 12 和 14。同一处错误，没有钩子时会报错；有了钩子，PyTorch 不再核对版本，梯度就悄悄错了。",
        en="48 and 56: backward used `h` as it was after the edit, $4h$ with `h` at 12 and 14. Without hooks the same mistake raises; with hooks PyTorch does not compare versions, and the gradient is wrong without a word.",
    ),
    Prediction(
        "32.4",
        zh="6 块，一块也没释放。`y` 的 `grad_fn` 存着打包的结果，打包的结果就是 `y`：一个环，而且有一段在 C++ 里，Python 的垃圾回收看不见。环上连着整张计算图，所以 `x` 也陪着留下。",
        en="All 6. The `grad_fn` of `y` keeps what was packed, and that is `y`: a cycle, part of it in C++, where Python's garbage collector cannot see. The whole graph hangs on the cycle, so `x` stays too.",
    ),
    Prediction(
        "32.5",
        zh="1.17 倍：比不用钩子还多。每个元素是省了一半，可是本来共用的、本来就在的，现在都另存了一份。",
        en="1.17 times: more than without hooks. Each element takes half, but what was shared, and what lives anyway, is now kept a second time.",
    ),
    COUNTING,
    CHECKED,
    HALF_PRECISION,
    AS_BITS,
]
