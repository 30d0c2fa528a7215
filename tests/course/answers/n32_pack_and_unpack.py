"""Answers to the exercises of notebook 32: wrong ones by the name of their refusal, and right ones."""

import weakref
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab.course.checks.n32_pack_and_unpack import as_bits, checked, counting, half_precision, place

# ---- 32.A: a pair that keeps the books ----


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


_GIVEN: list[dict] = []


def counting_globally(counts):
    pair = counting(_BOOKS)

    def noted(function):
        def and_note(given):
            result = function(given)
            for books in _GIVEN:
                books.update(_BOOKS)
            return result

        return and_note

    _GIVEN[:] = [*_GIVEN[-1:], counts]
    return noted(pair[0]), noted(pair[1])


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


# ---- 32.B: the version check, for any pair ----


def checked_against_zero(pack, unpack):
    def unpack_checked(kept):
        if kept[0]._version != 0:
            raise RuntimeError("edited in place")
        return unpack(kept[1])

    return lambda tensor: (tensor.detach(), pack(tensor)), unpack_checked


def checked_by_values(equal):
    """A wrong answer to 32.B that compares the values with a copy."""

    def answer(pack, unpack):
        def unpack_checked(kept):
            if not equal(kept[0], kept[1]):
                raise RuntimeError("edited in place")
            return unpack(kept[2])

        return lambda tensor: (tensor.detach(), tensor.detach().clone(), pack(tensor)), unpack_checked

    return answer


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


_LATEST: dict[str, Any] = {}


def checked_with_the_latest(pack, unpack):
    _LATEST.update(pack=pack, unpack=unpack)
    return checked(lambda tensor: _LATEST["pack"](tensor), lambda packed: _LATEST["unpack"](packed))


# ---- 32.C: half precision, but not for what lives anyway ----


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


def halving_the_latest(model):
    _LATEST.update(model=model)
    return halving(lambda tensor, _: _in_model(tensor, _LATEST["model"]))(model)


def _in_model(tensor, model, pointer=place, buffers=True):
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


def halving_by_state_dict(model):
    own = {place(tensor) for tensor in model.state_dict().values()}
    return halving(lambda tensor, _: tensor.dtype != torch.float32 or place(tensor) in own)(model)


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


def rounded_in_a_list(model):
    """As many bytes as before, where the graph does not own them."""
    pack, kept = half_precision(model)[0], []

    def pack_index(tensor):
        packed, dtype = pack(tensor)
        if packed.dtype == dtype:
            return packed
        kept.append(packed.to(dtype))
        return len(kept) - 1

    return pack_index, lambda packed: kept[packed] if isinstance(packed, int) else packed


def halved_in_numpy(model):
    def pack(tensor):
        if _in_model(tensor, model):
            return tensor.detach()
        return tensor.detach().bfloat16().view(torch.int16).numpy()

    def unpack(packed):
        if isinstance(packed, Tensor):
            return packed
        return torch.from_numpy(packed).view(torch.bfloat16).float()

    return pack, unpack


def integers_and_a_scale(model, *, scale):
    """32.C in `int8`, with the largest value beside it."""

    def pack(tensor):
        if _in_model(tensor, model) or not tensor.numel():
            return tensor.detach()
        largest = tensor.detach().abs().max()
        return (tensor.detach() / largest * 127).round().to(torch.int8), scale(largest)

    def unpack(packed):
        return packed if isinstance(packed, Tensor) else (packed[0].double() / 127 * packed[1]).float()

    return pack, unpack


def floats_of_numpy(model):
    def pack(tensor):
        return tensor.detach() if _in_model(tensor, model) else tensor.detach().half().numpy()

    return pack, lambda packed: packed if isinstance(packed, Tensor) else torch.from_numpy(packed).float()


# ---- 32.D: masks as bits ----


def packing_masks(to_kept, from_kept, others=torch.detach, only=lambda tensor: tensor.dtype == torch.bool):
    """A wrong answer to 32.D: what it keeps of a mask and how it comes back."""

    def answer():
        def pack(tensor):
            return ("mask", to_kept(tensor)) if only(tensor) else ("other", others(tensor))

        def unpack(packed):
            return from_kept(packed[1]) if packed[0] == "mask" else packed[1]

        return pack, unpack

    return answer


def masks_in_a_list(keep):
    """A wrong answer to 32.D that keeps the masks in a list, as `keep` makes them."""
    kept = []

    def pack(tensor):
        if tensor.dtype != torch.bool:
            return tensor.detach()
        kept.append(keep(tensor))
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


def masks_in_a_closure(packed_too=False):
    """32.D with functions for what is packed: the mask as it is, or as bits."""
    pack_bits, unpack_bits = as_bits()

    def pack(tensor):
        kept = tensor.detach().clone()
        packed = pack_bits(kept) if packed_too else kept
        return lambda: packed

    return pack, lambda give: unpack_bits(give()) if packed_too else give()


def masks_as_text():
    return packing_masks(
        lambda mask: ("".join("01"[bit] for bit in mask.flatten().tolist()), mask.shape),
        lambda packed: torch.tensor([bit == "1" for bit in packed[0]], dtype=torch.bool).view(packed[1]),
    )()


def masks_as_numbers():
    return packing_masks(
        lambda mask: (mask.flatten().tolist(), mask.shape),
        lambda packed: torch.tensor(packed[0], dtype=torch.bool).view(packed[1]),
    )()


def masks_by_their_dtype():
    """Takes every `uint8` for a mask of its own."""
    pack, unpack = as_bits()

    def pack_octets(tensor):
        if tensor.dtype != torch.bool:
            return tensor.detach()
        octets, octets.of = pack(tensor)[0], tensor.shape
        return octets

    return pack_octets, lambda kept: unpack((kept, kept.of)) if kept.dtype == torch.uint8 else kept


# ---- several exercises ----


def emptied(pair_of):
    """A wrong answer that can give back what it has packed once only."""

    def answer(*given):
        pack, unpack = pair_of(*given)
        return lambda tensor: [pack(tensor)], lambda packed: unpack(packed.pop())

    return answer


def kept_in_a_list(make, given):
    """What the right pair packs, as a copy, in a list that the pair keeps."""
    (pack, unpack), kept = make(given), []

    def pack_index(tensor):
        packed = pack(tensor)
        kept.append((packed[0].clone(), *packed[1:]) if isinstance(packed, tuple) else packed.clone())
        return len(kept) - 1

    return pack_index, lambda index: unpack(kept[index])


# ---- all answers ----

WRONG = {
    "32.A": {
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
    "32.B": {
        "unnoticed": lambda pack, unpack: (pack, unpack),
        "edits_before": checked_against_zero,
        "false_alarm": checked_by_values(torch.equal),
        "same_values": checked_by_values(partial(torch.allclose, equal_nan=True)),
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
    "32.C": {
        "copied_parameter": halving(
            lambda tensor, model: tensor.dtype != torch.float32 or isinstance(tensor, nn.Parameter)
        ),
        "copied_slice": halving(
            lambda tensor, model: (
                _in_model(tensor, model, Tensor.data_ptr)
                or place(tensor) in {place(buffer) for buffer in model.buffers()}
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
    "32.D": {
        "not_smaller": packing_masks(lambda mask: mask.to(torch.uint8), Tensor.bool),
        "wrong_shape": packing_masks(_octets, lambda packed: _mask((packed[0], torch.Size([packed[1].numel()])))),
        "wrong_values": packing_masks(_without_tail, _with_tail_missing),
        "wrong_dtype": packing_masks(_octets, lambda packed: _mask(packed).to(torch.uint8)),
        "empty_dtype": masks_from_lists,
        "mask_kept": partial(masks_in_a_list, torch.detach),
        "kept_elsewhere": partial(masks_in_a_list, torch.clone),
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
}

ALSO_WRONG = [
    ("32.D", "not_smaller", masks_in_a_closure),
    ("32.A", "kept_elsewhere", partial(kept_in_a_list, counting)),
    ("32.C", "kept_elsewhere", partial(kept_in_a_list, half_precision)),
    ("32.C", "kept_elsewhere", rounded_in_a_list),
    ("32.C", "wrong_values", partial(integers_and_a_scale, scale=lambda largest: np.float32(largest))),
    ("32.C", "wrong_values", partial(integers_and_a_scale, scale=Tensor.double)),
    ("32.C", "wrong_values", partial(integers_and_a_scale, scale=Tensor.half)),
    ("32.C", "other_precision", floats_of_numpy),
    ("32.C", "copied_buffer", halving_by_state_dict),
    ("32.D", "not_smaller", masks_as_text),
    ("32.D", "not_smaller", masks_as_numbers),
    ("32.D", "raised", masks_by_their_dtype),
]

RIGHT = [
    ("32.C", halved_in_numpy),
    ("32.D", partial(masks_in_a_closure, packed_too=True)),
]
