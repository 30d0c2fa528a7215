"""Answers to the exercises of notebook 33: wrong ones by the name of their refusal, and right ones."""

import io
import weakref
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab import Offload
from hooklab.course.checks.n33_offloading_to_cpu import pack_views, save_to, zeros_store

# ---- 33.A: SaveToCpu on Offload ----


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
            with _offload(module, store):
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
        with _offload(module, store):
            return run(*args, **kwargs)

    module.forward = forward
    return module


def slots_in_a_list(module, store):
    own, kept = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}, []

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


# ---- 33.B: a store that leaves zeros out ----


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


def _octet_mask(tensor):
    return tensor.view(torch.uint8).view(len(tensor), -1).any(1)


def _bits(tensor):
    return _octet_mask(tensor).bool()


def _split(tensor, mask=_bits):
    return mask(tensor), tensor[mask(tensor)]


def _kept(mask=_bits, read=lambda slot: _fill(*slot)):
    """An answer whose slots are `mask(tensor)` and the elements under it."""
    return _store(lambda tensor: _split(tensor, mask), read)


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
            self.contents.append(_split(tensor))
            return len(self.contents) - 1

        def read(self, slot):
            return _fill(*self.contents[slot])

    return Store()


def into_one_buffer():
    class Store:
        def __init__(self):
            self.buffers = {}

        def write(self, tensor):
            return _split(tensor)

        def read(self, slot):
            filled, values = slot
            kind = len(filled), values.dtype
            buffer = self.buffers.setdefault(kind, values.new_zeros(len(filled))).zero_()
            buffer[filled] = values
            return buffer

    return Store()


_CONTENTS: list = []


def in_a_global():
    class Store:
        def write(self, tensor):
            _CONTENTS.append(_split(tensor))
            return len(_CONTENTS) - 1

        def read(self, slot):
            return _fill(*_CONTENTS[slot])

    _CONTENTS.clear()
    return Store()


class ShortIndices:
    """Counts as far as 32,767."""

    def write(self, tensor):
        places = _bits(tensor).nonzero()[:, 0]
        return places.to(torch.int16), tensor[places], len(tensor)

    def read(self, slot):
        places, values, length = slot
        whole = torch.zeros(length, dtype=values.dtype)
        whole[places.long()] = values
        return whole


class WithSlots:
    __slots__ = ("__weakref__", "content")

    def __init__(self, content=None):
        self.content = content


def _in_a_function(tensor):
    slot = zeros_store().write(tensor)
    return lambda: slot


def bytes_for_a_mask(fill):
    """A mask in `uint8`, filled by `fill(mask, values)`."""
    return _store(lambda tensor: (_octet_mask(tensor), tensor[_bits(tensor)]), lambda slot: fill(*slot))


def turned_after_reading():
    """The second reading gives something, and something else."""

    def read(slot):
        tensor = zeros_store().read(slot)
        slot[1] = slot[1].flip(0)
        return tensor

    return _store(lambda tensor: list(zeros_store().write(tensor)), read)()


class Compressed:
    """With a slot that is a file in memory."""

    def write(self, tensor):
        content = io.BytesIO()
        np.savez_compressed(content, octets=tensor.view(torch.uint8).numpy())
        return content, tensor.dtype

    def read(self, slot):
        slot[0].seek(0)
        return torch.from_numpy(np.load(slot[0])["octets"]).view(slot[1])


class FreedWithItsSlot:
    """With the content in the store, where it goes when the slot goes."""

    def __init__(self):
        self.held = {}

    def write(self, tensor):
        slot = WithSlots()
        self.held[id(slot)] = zeros_store().write(tensor)
        weakref.finalize(slot, self.held.pop, id(slot))
        return slot

    def read(self, slot):
        return zeros_store().read(self.held[id(slot)])


class ValuesInTheStore:
    """Where the elements are is in the slot, what they are stays for ever."""

    def __init__(self):
        self.values = []

    def write(self, tensor):
        filled, values, dtype = zeros_store().write(tensor)
        self.values.append(values)
        return filled, len(self.values) - 1, dtype

    def read(self, slot):
        filled, number, dtype = slot
        return zeros_store().read((filled, self.values[number], dtype))


class TinyIsZero(FreedWithItsSlot):
    """With what is nearly 0 taken for 0."""

    def write(self, tensor):
        near = tensor.abs() < 1e-12 if tensor.is_floating_point() else torch.zeros(len(tensor), dtype=torch.bool)
        return super().write(tensor.masked_fill(near & ~tensor.signbit(), 0))


class BitsInAList:
    """A list of as many items as the tensor has elements: 8 bytes each, larger than the tensor."""

    def write(self, tensor):
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        bits = tensor.contiguous().view(integers).flatten()
        return (bits != 0).tolist(), bits[bits != 0], tensor.dtype

    def read(self, slot):
        there, bits, dtype = slot
        whole = torch.zeros(len(there), dtype=bits.dtype)
        whole[torch.tensor(there, dtype=torch.bool)] = bits
        return whole.view(dtype)


def bits_of_float32(tensor):
    """Looks at the bits where they have four bytes only."""
    return tensor.view(torch.int32) != 0 if tensor.dtype == torch.float32 else tensor != 0


def signs_of_real_numbers(tensor):
    """Keeps -0.0, but not inside a complex number."""
    return (tensor != 0) | torch.signbit(tensor) if tensor.is_floating_point() else tensor != 0


# ---- 33.C: one copy for all views of a storage ----


def _whole(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _giving_back(store, slot, tensor):
    """What the solution's pack returns; `slot()` is asked for when the tensor is given back."""
    geometry, dtype = (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype
    return lambda: store.read(slot()).view(dtype).as_strided(*geometry)


def _views(*, key=id, same=lambda known, storage: known[0]() is storage, version=True, weak=True, hold=False,
           dtype=True, offset=True, flat=lambda tensor: _whole(tensor.untyped_storage())):  # fmt: skip
    """A wrong answer that differs from the solution in what is named."""

    def answer(store):
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            where = (key(storage), tensor._version) if version else key(storage)
            known = found.get(where)
            slot = known[1]() if known and same(known, storage) else None
            if slot is None:
                slot = store.write(flat(tensor))
                noted = weakref.ref(slot) if weak else lambda: slot
                found[where] = weakref.ref(storage), noted, storage if hold else None
            geometry = tensor.shape, tensor.stride(), tensor.storage_offset() if offset else 0
            kind = tensor.dtype if dtype else torch.float32
            return lambda: store.read(slot).view(kind).as_strided(*geometry)

        return pack

    return answer


def views_in_the_latest(store):
    _STORES[:] = [store]
    latest = SimpleNamespace(write=lambda tensor: _STORES[0].write(tensor), read=lambda slot: _STORES[0].read(slot))
    return pack_views(latest)


def given_back_once(store):
    pack = pack_views(store)

    def once(tensor):
        ways = [pack(tensor)]

        def give_back():
            if not ways:
                raise RuntimeError("given back already")
            return ways.pop()()

        return give_back

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
            slot = store.write(_whole(storage))
            NOTES[storage] = version, weakref.ref(slot)
        return _giving_back(store, lambda: slot, tensor)

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
            slot = store.write(_whole(storage))
            found[key] = weakref.ref(storage), weakref.ref(slot)
        return _giving_back(store, lambda: slot, tensor)

    return pack


def first_version(store):
    """Notes a storage once and for all."""
    found = {}

    def pack(tensor):
        storage, version = tensor.untyped_storage(), tensor._version
        alive, known_version, known = found.get(id(storage), (lambda: None,) * 3)
        slot = known() if alive() is storage and known_version == version else None
        if slot is None:
            slot = store.write(_whole(storage))
            if alive() is not storage or known() is None:
                found[id(storage)] = weakref.ref(storage), version, weakref.ref(slot)
        return _giving_back(store, lambda: slot, tensor)

    return pack


def latest_version(store):
    """Looks the slot up when it gives back, not when it packs."""
    found = {}

    def pack(tensor):
        storage, version = tensor.untyped_storage(), tensor._version
        if id(storage) not in found or found[id(storage)][0] != version:
            found[id(storage)] = version, store.write(_whole(storage))
        key = id(storage)
        return _giving_back(store, lambda: found[key][1], tensor)

    return pack


def notes_with_slots(store):
    """Each note holds its slot for as long as the storage lives, whether or not anybody wants it."""
    notes = weakref.WeakKeyDictionary()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage not in notes or notes[storage][0] != tensor._version:
            notes[storage] = tensor._version, store.write(_whole(storage))
        slot = notes[storage][1]
        return _giving_back(store, lambda: slot, tensor)

    return pack


WRONG = {
    "33.A": {
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
    "33.B": {
        "lost_sign": _kept(lambda tensor: tensor != 0),
        "lossy": _store(lambda tensor: (tensor.half(), tensor.dtype), lambda slot: slot[0].to(slot[1])),
        "too_large": _store(
            lambda tensor: (_bits(tensor).nonzero()[:, 0], tensor[_bits(tensor)], len(tensor)),
            lambda slot: slot[1].new_zeros(slot[2]).index_copy(0, slot[0], slot[1]),
        ),
        "shares_memory": _store(lambda tensor: tensor, lambda slot: slot),
        "other_kind": _kept(read=lambda slot: _fill(*slot, torch.float32)),
        "other_content": _kept(lambda tensor: tensor > 0),
        "one_slot": one_slot,
        "read_once": _store(lambda tensor: [_split(tensor)], lambda slot: _fill(*slot.pop())),
        "mask_of_bytes": bytes_for_a_mask(
            lambda mask, values: values[(mask.cumsum(0) - 1).clamp(min=0)].masked_fill(1 - mask, 0)
        ),
        "not_zeros": _kept(read=lambda slot: slot[1].new_ones(len(slot[0])).masked_scatter(*slot)),
        "other_dtypes": _kept(lambda tensor: tensor.view(torch.int32) != 0),
        "one_buffer": into_one_buffer,
        "left_in_store": in_a_list,
        "nothing_in_slot": in_a_global,
        "edits_input": _store(lambda tensor: (_split(tensor), tensor.zero_())[0], lambda slot: _fill(*slot)),
        "no_tensor": _kept(read=lambda slot: slot),
        "no_store": lambda: type("Store", (), {"write": lambda self, t: t, "read": lambda self, s: s}),
    },
    "33.C": {
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
        "not_flat": _views(flat=lambda tensor: _whole(tensor.untyped_storage()).view(2, -1)),
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
}

ALSO_WRONG = [
    ("33.B", "other_content", ShortIndices),
    ("33.B", "raised", bytes_for_a_mask(lambda mask, values: values if mask.bool() else mask)),
    ("33.B", "raised", bytes_for_a_mask(lambda mask, values: _fill(-mask.bool(), values))),
    ("33.B", "raised", bytes_for_a_mask(lambda mask, values: mask.double().masked_fill(mask.long(), 1))),
    ("33.B", "mask_of_bytes", bytes_for_a_mask(lambda mask, values: values.masked_select(mask))),
    ("33.B", "read_once", turned_after_reading),
    ("33.B", "too_large", BitsInAList),
    ("33.C", "keeps_slot", notes_with_slots),
    ("33.B", "left_in_store", ValuesInTheStore),
    ("33.B", "lossy", TinyIsZero),
    ("33.C", "part_only", _views(flat=lambda tensor: tensor.flatten().view(torch.uint8))),
    ("33.B", "lost_sign", _kept(bits_of_float32)),
    ("33.B", "lost_sign", _kept(signs_of_real_numbers)),
    ("33.B", "no_store", lambda: zeros_store().write),
    ("33.C", "moved_twice", lambda store: lambda tensor: lambda: pack_views(store)(tensor)()),
]

RIGHT = [
    ("33.B", _store(_in_a_function, lambda slot: zeros_store().read(slot()))),
    (
        "33.B",
        _store(lambda tensor: WithSlots(zeros_store().write(tensor)), lambda slot: zeros_store().read(slot.content)),
    ),
    ("33.B", Compressed),
    ("33.B", bytes_for_a_mask(lambda mask, values: _fill(mask.bool(), values))),
    ("33.B", FreedWithItsSlot),
]
