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

from hooklab.course.check import Exercise, refuse, said, within


def _two(got: Any) -> tuple[Callable, Callable]:
    """The pair of functions that an answer has returned."""
    if not (isinstance(got, tuple | list) and len(got) == 2 and all(callable(one) for one in got)):
        refuse("no_pair", got=got)
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
        refuse("not_a_tensor", got=got)
    if got.dtype != want.dtype:
        refuse(
            "wrong_dtype" if want.numel() else "empty_dtype",
            zh=f"打包的是 `{want.dtype}`，形状 `{list(want.shape)}`，解包还回的是 `{got.dtype}`。PyTorch 未必报错，但约定没有守住。",
            en=f"Packed was `{want.dtype}`, shape `{list(want.shape)}`, unpacked `{got.dtype}`. PyTorch may raise no error, but the "
            "contract is broken.",
        )
    if got.shape != want.shape:
        refuse("wrong_shape", want_shape=list(want.shape), got_shape=list(got.shape))
    if not torch.equal(_bits(got), _bits(want)):
        at = int(torch.ne(_bits(got), _bits(want)).nonzero()[0]) // want.itemsize
        found, wanted = (one.detach().reshape(-1)[at].item() for one in (got, want))
        if other_precision and want.dtype == torch.float32:
            refuse(
                "other_precision",
                want=want,
                want_shape=list(want.shape),
                other_precision=other_precision,
                at=at,
                wanted=wanted,
                found=found,
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
        refuse("kept_elsewhere")
    pair = _two(pair_of())
    if held := _held(pair, backward=False):
        if held == "pair":
            refuse("kept_if_dropped")
        refuse("never_freed")


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
        refuse("unpacked_once", error=error)


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
        refuse("empty_books")
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
        refuse("shared_books")
    _examine_other_bytes(answer)
    _examine_freed(lambda: answer({}))


def _examine_other_bytes(answer):
    """Another dtype, two dimensions, and none."""
    for x in (torch.ones(2, 3, requires_grad=True), torch.ones((), dtype=torch.bfloat16, requires_grad=True)):
        counts = {}
        with saved_tensors_hooks(*_two(answer(counts))):
            x.sin()
        if (found := counts.get("bytes")) != x.nbytes:
            refuse("other_bytes", x=x, x_shape=list(x.shape), x_nbytes=x.nbytes, found=found)


def _examine_entry(name, counts):
    if name not in counts:
        refuse("no_entry", name=name, str=sorted(map(str, counts)))


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


COUNTING = Exercise("32.A", examine_counting, counting)

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
    refuse("latest_call")


def _examine_inner_result(answer):
    pack, unpack = _two(answer(torch.detach, lambda packed: packed + 1))
    got = unpack(pack(torch.zeros(2)))
    if not isinstance(got, Tensor) or not torch.equal(got, torch.ones(2)):
        refuse("other_result")


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
        refuse("not_inner", inner=inner.packs - used[0], inner2=inner.unpacks - used[1])
    if inner and inner.places[-2:] != [(h.untyped_storage().data_ptr(), True)] * 2:
        refuse("other_tensor")
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
        refuse("other_error", error=said(error)[:100])
    refuse(reason, zh=f"{zh}，解包时却没有报错。", en=f"In this run {en}; unpacking raised nothing.")


CHECKED = Exercise("32.B", examine_checked, checked)

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
                refuse("not_halved", tensor_nbytes=tensor.nbytes, size=size, tensor_shape=list(tensor.shape))


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


HALF_PRECISION = Exercise("32.C", examine_half_precision, half_precision)

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
            refuse("not_smaller", tensor=tensor.numel(), size=size, tensor2=tensor.numel() // 8)


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
        refuse("mixed_up", error=error)


def _examine_mask_dropped(answer):
    pair, x = _two(answer()), torch.randn(100, requires_grad=True)
    mask = x.detach() > 0
    with saved_tensors_hooks(*pair):
        y = x.masked_fill(mask, 0.0)
    memory = weakref.ref(mask.untyped_storage())
    del mask
    gc.collect()
    if memory() is not None:
        refuse("mask_kept")
    with suppress(RuntimeError):
        y.sum().backward()


AS_BITS = Exercise("32.D", examine_as_bits, as_bits)

EXERCISES = [COUNTING, CHECKED, HALF_PRECISION, AS_BITS]
