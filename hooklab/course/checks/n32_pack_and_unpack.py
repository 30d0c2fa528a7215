"""Checks of notebook 32: pack and unpack."""

import array
import gc
import io
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from hooklab.course.check import Exercise, refuse, refuse_first, within
from hooklab.course.checks.calls import equal, raised
from hooklab.course.checks.pairs import (
    UNPACKED,
    Watched,
    differs,
    expect_pair,
    refuse_latest_pair,
    refuse_unpacked_once,
)

# ---- for all of them: what a pair holds ----


def place(tensor: Tensor) -> int:
    """The address of the memory that a tensor shares with its views."""
    return tensor.untyped_storage().data_ptr()


def refuse_kept(make: Callable[[], Any]) -> None:
    """A pair that `make` returns may leave nothing behind: after backward, and where a graph is dropped without one."""
    if _holder(expect_pair(make()), backward=True):
        refuse("kept_elsewhere")
    if holder := _holder(expect_pair(make()), backward=False):
        refuse("kept_if_dropped" if holder == "pair" else "never_freed")


def _holder(pair: tuple[Callable, Callable], *, backward: bool) -> str:
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
        held.append(sum(map(content, within(pair))))
    if held[1] > held[0]:
        return "pair"
    return "graph" if memory() is not None else ""


def content(part: Any) -> int:
    """The bytes of content in this object alone: a tensor, bytes, an array of numpy."""
    if isinstance(part, Tensor):
        return part.untyped_storage().nbytes()
    if isinstance(part, bytes | bytearray):
        return len(part)
    return part.nbytes if isinstance(getattr(part, "nbytes", None), int) else 0


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
    watched = Watched(answer(counts))
    expect_pair(answer(others))
    part = torch.tensor([1.0, 2.0, -0.5, 0.25, 3.0], dtype=torch.float64, requires_grad=True)[1:4]
    with watched.hooks():
        y = torch.mul(part, part).exp()
    if not counts:
        refuse("empty_books")
    for name in ("packed", "bytes", "unpacked"):
        if name not in counts:
            refuse("no_entry", name=name, entries=sorted(map(str, counts)))
    _expect_counts(counts, packed=watched.packs, bytes=3 * part.nbytes)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    _expect_counts(counts, packed=watched.packs)
    with watched.hooks():
        torch.mul(part, part)  # the next step goes on with the same books
    _expect_counts(counts, unpacked=watched.unpacks, bytes=5 * part.nbytes)
    if others.get("packed", 0):
        refuse("shared_books")
    _examine_other_bytes(answer)
    refuse_kept(lambda: answer({}))


def _expect_counts(counts, **wanted):
    for name, want in wanted.items():
        if (found := counts.get(name)) != want:
            refuse(f"wrong_{name}", found=found, want=want, tensors=want // 24)


def _examine_other_bytes(answer):
    """Another dtype, two dimensions, and none."""
    for x in (torch.ones(2, 3, requires_grad=True), torch.ones((), dtype=torch.bfloat16, requires_grad=True)):
        counts = {}
        with saved_tensors_hooks(*expect_pair(answer(counts))):
            x.sin()
        if (found := counts.get("bytes")) != x.nbytes:
            refuse("other_bytes", x=x, shape=list(x.shape), found=found)


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
        self.kept, self.places, self.unpacks = [], [], 0

    def pack(self, tensor):
        self.places.append((place(tensor), tensor.requires_grad))
        self.kept.append(tensor.detach())
        return len(self.kept) - 1

    def unpack(self, index):
        self.unpacks += 1
        return self.kept[index]


def _edit_alias(run):
    del run.h  # of which a weak reference now finds nothing
    run.alias[0] = 5.0


def _edit_late(run):
    run.y.sum().backward(retain_graph=True)
    run.h.add_(1)


UNEDITED = [  # how often `h` is edited before anything is packed, and what packs it: unpacking may not raise
    ("false_alarm", 0, lambda h, other: torch.mul(h, h)),
    ("edits_before", 2, lambda h, other: torch.mul(h, h)),
    ("mixed_up", 1, lambda h, other: other.exp() + h.sin()),
]

EDITED = [  # what is done after `h` was packed: unpacking has to raise
    ("unnoticed", lambda run: run.h[0].fill_(5.0)),
    ("same_values", lambda run: run.h.add_(0)),
    ("unnoticed_alias", _edit_alias),
    ("checked_once", _edit_late),
]

INNER = [  # the pair that was given, when two tensors were packed and unpacked by the new one
    ("not_inner", lambda t: (t.packs, t.unpacks) != (2, 2)),
    ("other_tensor", lambda t: t.places != [(place(t.h), True)] * 2),
]


def examine_checked(answer):
    listed = _Listed()
    for pair in ((listed.pack, listed.unpack), (torch.clone, lambda packed: packed)):
        for key, edits, forward in UNEDITED:
            _examine_unedited(answer(*pair), key, edits, forward)
        _examine_edited(lambda pair=pair: answer(*pair))
    _examine_inner(answer)
    refuse_kept(lambda: answer(torch.detach, lambda packed: packed))
    inner = [(pack, lambda packed: packed) for pack in (torch.detach, torch.zeros_like)]
    refuse_latest_pair(answer, *inner, torch.ones(2))


def _examine_unedited(pair, key, edits, forward):
    x, watched = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True), Watched(pair)
    h = x * 2
    for _ in range(edits):
        h += 1
    with watched.hooks():
        y = forward(h, x * 3)
    try:
        y.sum().backward()
    except RuntimeError as error:
        refuse(key, error=error)


def _examine_edited(make):
    run = _packed(make())
    run.y.sum().backward(retain_graph=True)
    refuse_unpacked_once(run.y.sum())
    for key, edit in EDITED:
        run = _packed(make())
        edit(run)
        error = raised(run.y.sum().backward)
        if error is None:
            refuse(key)
        if not isinstance(error, RuntimeError):
            refuse("other_error", error=error)


def _packed(pair):
    """A forward that packs two tensors, `h` the first of them."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    h, other = x * 2, x * 3
    alias = h.detach()
    with saved_tensors_hooks(*expect_pair(pair)):
        y = h.sin() + other.sin()
    return SimpleNamespace(h=h, alias=alias, other=other, y=y)


def _examine_inner(answer):
    inner = _Listed()
    h = torch.ones(3, requires_grad=True) * 2
    with saved_tensors_hooks(*answer(inner.pack, inner.unpack)):
        y = torch.mul(h, h)
    y.sum().backward()
    refuse_first(INNER, h=h, packs=len(inner.kept), unpacks=inner.unpacks, places=inner.places)
    pack, unpack = answer(torch.detach, lambda packed: packed + 1)
    if not equal(unpack(pack(torch.zeros(2))), torch.ones(2)):
        refuse("other_result")


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


PACKED = [  # each tensor as it is packed
    ("copied_buffer-temporary", lambda t: t.copied and t.buffer and t.buffer not in t.stored),
    ("copied_buffer", lambda t: t.copied and t.buffer),
    ("copied_slice", lambda t: t.copied and t.tensor.storage_offset()),
    ("copied_parameter", lambda t: t.copied and t.tensor.requires_grad),
    ("copied_detached", lambda t: t.copied),
    ("not_halved", lambda t: not t.own and t.tensor.dtype == torch.float32 and t.size > t.tensor.nbytes // 2),
]


def _other_precision(t):
    """Whether what was packed stands there in a floating dtype that the exercise does not ask for."""
    parts = [part for part in within(t.packed) if _count(part) == t.want.numel()]  # not a scale beside integers
    dtypes = {str(getattr(part, "dtype", "")) for part in parts}  # also of numpy
    floats = sorted(dtype for dtype in dtypes if "float" in dtype)
    t.precision = ", ".join(floats)
    return floats and not {"torch.bfloat16", "torch.float32"} & set(floats)


class _Halving(Watched):
    """Watches what is copied: nothing of the model, and half of each float32."""

    mistakes = (
        *UNPACKED[:-1],
        ("other_precision", lambda t: t.want.dtype == torch.float32 and differs(t) and _other_precision(t)),
        UNPACKED[-1],
    )

    def __init__(self, pair: Any, model: nn.Module):
        super().__init__(pair, self.rounded)
        self.buffers = {place(buffer): name for name, buffer in model.named_buffers()}
        self.own = {place(param) for param in model.parameters()} | set(self.buffers)
        self.stored = set(model.state_dict())

    def rounded(self, tensor: Tensor) -> Tensor:
        own = place(tensor) in self.own
        return tensor.clone() if own or tensor.dtype != torch.float32 else tensor.bfloat16().float()

    def examine(self, tensor: Tensor, packed: Any) -> None:
        own = place(tensor) in self.own
        sizes = {place(part): content(part) for part in within(packed) if isinstance(part, Tensor)}
        refuse_first(
            PACKED,
            tensor=tensor,
            shape=list(tensor.shape),
            own=own,
            copied=own and sizes.keys() - {place(tensor)},
            buffer=self.buffers.get(place(tensor)),
            stored=self.stored,
            size=sum(sizes.values()),
        )


def _count(part: Any) -> Any:
    """How many elements: of a tensor, or of an array of numpy."""
    return part.numel() if isinstance(part, Tensor) else getattr(part, "size", None)


def examine_half_precision(answer):
    torch.manual_seed(0)
    model = _Reader()
    watched = _Halving(answer(model), model)
    with watched.hooks():
        y = model(torch.tensor([[1, 999], [257, 1000], [3, 513], [2, 7]]))
    y.sum().backward(retain_graph=True)
    refuse_kept(lambda: answer(model))
    refuse_unpacked_once(y.sum())
    refuse_latest_pair(answer, (model,), (nn.Linear(2, 2),), model.first.weight.detach())


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


class _Bits(Watched):
    """Watches how many bytes a mask takes when it is packed."""

    def examine(self, tensor: Tensor, packed: Any) -> None:
        size, count = sum(map(_bytes, within(packed))), tensor.numel()
        if tensor.dtype == torch.bool and count >= 10_000 and size > count // 8 + 2000:
            refuse("not_smaller", count=count, size=size, enough=count // 8)


def _bytes(part: Any) -> int:
    """Of this object alone."""
    holders = list | tuple | set | dict | str | int | array.array | io.BytesIO
    return content(part) or (sys.getsizeof(part) if isinstance(part, holders) else 0)


def examine_as_bits(answer):
    torch.manual_seed(0)
    for shape in ((16,), (3, 5), (2, 3, 7), (), (1,), (0,), (0, 3), (200, 300)):
        _examine_mask(answer, torch.randn(shape), torch.rand(shape) < 0.4)
    _examine_mask(answer, torch.randn(5, 9), (torch.rand(9, 5) < 0.4).t())
    x = torch.tensor([[0.5, -1.0, 3.0, 7.0]], requires_grad=True)
    with _Bits(answer()).hooks():
        y = F.max_pool1d(torch.mul(x, x), 2) * torch.tensor([3, 255], dtype=torch.uint8)
    y.sum().backward()
    _examine_two_masks(answer)
    _examine_mask_dropped(answer)
    refuse_kept(answer)


def _examine_mask(answer, values, mask):
    x = values.requires_grad_()
    with _Bits(answer()).hooks():
        y = x.masked_fill(mask, 0.0)
        z = torch.where(mask, x, -x)
    (y.sum() + z.sum()).backward(retain_graph=True)
    refuse_unpacked_once(y.sum() + z.sum())


def _examine_two_masks(answer):
    """Both packed before either is unpacked."""
    wide, tall = torch.randn(2, 3, requires_grad=True), torch.randn(9, requires_grad=True)
    with Watched(answer()).hooks():
        loss = wide.masked_fill(wide > 0, 0.0).sum() + tall.masked_fill(tall > 0, 0.0).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        refuse("mixed_up", error=error)


def _examine_mask_dropped(answer):
    x = torch.randn(100, requires_grad=True)
    mask = x.detach() > 0
    with saved_tensors_hooks(*expect_pair(answer())):
        y = x.masked_fill(mask, 0.0)
    memory = weakref.ref(mask.untyped_storage())
    del mask
    gc.collect()
    if memory() is not None:
        refuse("mask_kept")
    y.sum().backward()  # until then the graph has kept what was packed


AS_BITS = Exercise("32.D", examine_as_bits, as_bits)

EXERCISES = [COUNTING, CHECKED, HALF_PRECISION, AS_BITS]
