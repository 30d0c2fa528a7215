"""Answers to the exercises of notebook 34: wrong ones by the name of their refusal, and right ones."""

import io
import os
import tempfile
import uuid
import warnings
import weakref
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab import Offload
from hooklab.course.checks.n34_offloading_to_disk import DESCRIPTORS, byte_store, disk_hooks, files_in, large_only
from hooklab.course.checks.n34_save_to_disk import save_to_disk
from hooklab.stores import Disk

# ---- 34.A: a file that goes with the graph ----


def _to_files(folder, name=lambda saved: str(uuid.uuid4()), keep=Tensor.clone, remove=os.remove):
    """A self-deleting file, with one thing changed."""

    class File:
        def __init__(self, saved):
            self.name = os.path.join(folder, name(saved))
            torch.save(keep(saved.detach()), self.name)

        def __del__(self):
            if os.path.exists(self.name):
                remove(self.name)

    return File, lambda file: torch.load(file.name, weights_only=True)


def _leaking(folder):
    def pack(saved):
        torch.save(saved.clone(), name := os.path.join(folder, str(uuid.uuid4())))
        return name

    return pack, torch.load


def _deleting_in_unpack(folder):
    def unpack(name):
        saved = torch.load(name, weights_only=True)
        os.remove(name)
        return saved

    return _leaking(folder)[0], unpack


def _cached_in_unpack(folder):
    pack, unpack = _deleting_in_unpack(folder)

    def unpack_cached(packed):
        if "saved" not in packed:
            packed["saved"] = unpack(packed["name"])
        return packed["saved"]

    return lambda saved: {"name": pack(saved)}, unpack_cached


def _counted(folder):
    numbers = iter(range(1_000_000))
    return _to_files(folder, name=lambda saved: f"{next(numbers)}.pt")


def _all_removed(folder):
    """Every file goes when one of them does."""

    def remove(name):
        for other in files_in(folder):
            os.remove(other)

    return _to_files(folder, remove=remove)


def _holding(folder):
    pack, unpack = _to_files(folder)
    return lambda saved: (pack(saved), saved.detach()), lambda packed: unpack(packed[0])


def _loaded_once(folder):
    pack, unpack = _to_files(folder)

    def load(file):
        if not hasattr(file, "content"):
            file.content = unpack(file)
        return file.content

    return pack, load


def _by_mkstemp(folder):
    class File:
        def __init__(self, saved):
            _, self.name = tempfile.mkstemp(dir=folder)
            torch.save(saved.detach().clone(), self.name)
            weakref.finalize(self, os.remove, self.name)

    return File, lambda file: torch.load(file.name, weights_only=True)


def _numbers_alone(folder):
    """The content without its shape and dtype."""

    class File:
        def __init__(self, saved):
            self.name = os.path.join(folder, str(uuid.uuid4()))
            saved.detach().float().numpy().tofile(self.name)

        def __del__(self):
            os.remove(self.name)

    return File, lambda file: torch.frombuffer(bytearray(open(file.name, "rb").read()), dtype=torch.float32)


def _cleaning_up_first(folder):
    for name in os.listdir(folder):
        if name.endswith(".pt"):
            os.remove(os.path.join(folder, name))
    return _to_files(folder, name=lambda saved: f"{uuid.uuid4()}.pt")


def _in_memory(folder):
    return lambda saved: saved.detach().clone(), lambda saved: saved


_FOLDERS: list[str] = []


def _in_the_latest_folder(folder):
    _FOLDERS[:] = [folder]
    return lambda saved: _to_files(_FOLDERS[0])[0](saved), _to_files(folder)[1]


def misreads(folder):
    pack, unpack = disk_hooks(folder)
    return pack, lambda file: unpack(file).view(7)


def copies_kept(folder):
    pack, unpack = _to_files(folder)
    cache = []

    def pack_and_keep(saved):
        cache.append(saved.clone())
        return pack(saved)

    return pack_and_keep, unpack


def deleting_themselves(keep=lambda file: None, load=lambda saved: saved):
    """Files that take their folder to be there, with one thing changed."""

    def answer(folder):
        class File:
            def __init__(self, saved):
                self.path = Path(folder, str(uuid.uuid4()))
                torch.save(saved.detach().clone(), self.path)
                keep(self)

            def __del__(self):
                self.path.unlink()

        return File, lambda file: load(torch.load(file.path, weights_only=True))

    return answer


def files_in_a_list(folder):
    return deleting_themselves(keep=[].append)(folder)


# ---- 34.B: a store on a dictionary of bytes ----


def _byte_store(
    *, take=lambda tensor: tensor.view(torch.uint8).numpy().tobytes(), key=lambda slot, *given: id(slot),
    give=lambda held, slot: torch.frombuffer(bytearray(held[slot.key]), dtype=slot.dtype),
    drop=lambda held, slot: held.pop(slot.key, None),
):  # fmt: skip
    """A maker of stores with one thing changed."""

    class Made:
        class Slot:
            def __del__(self):
                drop(self.held, self)

        def __init__(self):
            self.held = {}

        def write(self, tensor):
            slot = self.Slot()
            slot.held, slot.dtype = self.held, tensor.dtype
            slot.key = key(slot, self.held, tensor)
            self.held[slot.key] = take(tensor)
            return slot

        def read(self, slot):
            return give(self.held, slot)

    return Made


def _by_torch_save(tensor):
    torch.save(tensor, buffer := io.BytesIO())
    return buffer.getvalue()


def _without_a_copy(held, slot):
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that bytes are not to be written to
        return torch.frombuffer(held[slot.key], dtype=slot.dtype)


def _sharing(held):
    store = byte_store()
    store.held = held
    return store


def _holding_too():
    store = byte_store()
    write = store.write

    def and_hold(tensor):
        slot = write(tensor)
        slot.tensor = tensor
        return slot

    store.write = and_hold
    return store


def _no_held():
    store = byte_store()
    store.content = store.__dict__.pop("held")
    return store


class _RemembersTheDtype(_byte_store()):
    def write(self, tensor):
        self.dtype = tensor.dtype
        return super().write(tensor)

    def read(self, slot):
        return torch.frombuffer(bytearray(self.held[slot.key]), dtype=self.dtype)


class _RemembersTheLatest(_byte_store()):
    def read(self, slot):
        self.latest = slot
        return super().read(slot)


class _ReadsIntoOneBuffer(_byte_store()):
    def __init__(self):
        super().__init__()
        self.buffer = torch.empty(1024, dtype=torch.uint8)

    def read(self, slot):
        content = super().read(slot).view(torch.uint8)
        return self.buffer[: len(content)].copy_(content).view(slot.dtype)


# ---- 34.C: a threshold that leaves small tensors in memory, safely ----


def _large_only(keep, give, test=lambda saved, at_least: saved.numel() >= at_least):
    """A threshold with one thing changed: packed results are marked."""

    def answer(pack, unpack, at_least):
        def pack_either(saved):
            return (True, pack(saved)) if test(saved, at_least) else (False, keep(saved))

        return pack_either, lambda packed: (unpack if packed[0] else give)(packed[1])

    return answer


def _guarded(packed):
    if packed[0]._version != packed[1]:
        raise RuntimeError("edited")
    return packed[0]


def _asserted(packed):
    assert packed[0]._version == packed[1]
    return packed[0]


def _never_edited(saved):
    if saved._version:
        raise RuntimeError("edited")
    return saved


def _versioned(saved):
    return saved.detach(), saved._version


def _safe(test):
    return _large_only(_versioned, _guarded, test)


def _guessed_by_tensor(pack, unpack, at_least):
    def unpack_either(packed):
        if isinstance(packed, Tensor):
            return _never_edited(packed) if packed.numel() < at_least and packed._version > 1 else packed
        return _guarded(packed) if isinstance(packed, tuple) else unpack(packed)

    def pack_either(saved):
        return pack(saved) if saved.numel() >= at_least else _versioned(saved)

    return pack_either, unpack_either


def _checked_once(pack, unpack, at_least):
    either, restored = large_only(pack, unpack, at_least)

    def unpack_either(packed):
        content, checked = packed
        if checked and content[0] == "kept":
            return content[1]
        packed[1] = True
        return restored(content)

    return lambda saved: [either(saved), False], unpack_either


def _checked_around(pack, unpack, at_least):
    def unpack_either(packed):
        tensor = _guarded(packed[:2])
        return unpack(packed[2]) if tensor.numel() >= at_least else tensor

    def pack_either(saved):
        return *_versioned(saved), pack(saved) if saved.numel() >= at_least else None

    return pack_either, unpack_either


def _checked_throughout(pack, unpack, at_least):
    def pack_either(saved):
        if saved.numel() < at_least:
            return None, *_versioned(saved)
        moved, counter = pack(saved), saved.detach()
        counter.data = torch.empty(0)  # shares the version, and not the memory
        return moved, counter, saved._version

    def unpack_either(packed):
        moved, *versioned = packed
        kept = _guarded(tuple(versioned))
        return kept if moved is None else unpack(moved)

    return pack_either, unpack_either


def _unpacked_once(pack, unpack, at_least):
    pack_either, unpack_either = large_only(pack, unpack, at_least)
    return lambda saved: [pack_either(saved)], lambda packed: unpack_either(packed.pop())


def _as_in_the_sources(pack, unpack, at_least):
    def pack_either(saved):
        return saved if saved.numel() < at_least else pack(saved)

    return pack_either, lambda packed: packed if isinstance(packed, Tensor) else unpack(packed)


_LATEST: dict = {}


def _with_the_latest(pack, unpack, at_least):
    _LATEST.update(pack=pack, unpack=unpack)
    return large_only(lambda saved: _LATEST["pack"](saved), lambda packed: _LATEST["unpack"](packed), at_least)


def _large_copied(pack, unpack, at_least):
    return large_only(lambda saved: pack(saved.clone()), unpack, at_least)


def _by_values(same):
    """A small tensor is kept with a copy of its values and its version, and `same` compares."""

    def guarded(packed):
        if not same(*packed):
            raise RuntimeError("edited")
        return packed[0]

    return _large_only(lambda saved: (saved.detach(), saved.detach().clone(), saved._version), guarded)


def small_pairs(pack, unpack, least):
    """Takes every pair that ends in a number for its own."""

    def small_or(tensor):
        return _versioned(tensor) if tensor.numel() < least else pack(tensor)

    def give(packed):
        if isinstance(packed, tuple) and len(packed) == 2 and isinstance(packed[1], int):
            return _guarded(packed)
        return unpack(packed)

    return small_or, give


def calls_what_can_be_called(pack, unpack, least):
    """Mistakes what an inner pair has packed for its own."""

    def small_or(tensor):
        if tensor.numel() >= least:
            return pack(tensor)
        held = _versioned(tensor)
        return lambda: _guarded(held)

    return small_or, lambda packed: packed() if callable(packed) else unpack(packed)


# ---- 34.D: SaveToDisk, on Offload and Disk ----


class _Wrapper(nn.Module):
    def __init__(self, module, folder):
        super().__init__()
        self.module, self.folder = module, folder

    def forward(self, *args, **kwargs):
        with self.context():
            return self.module(*args, **kwargs)

    def context(self):
        return Offload(self.module, to=Disk(self.folder), min_bytes=4096)


def _on_disk(store=Disk, min_bytes=4096, **options):
    """A wrapper with another store, or other options."""

    class OnDisk(_Wrapper):
        def context(self):
            return Offload(self.module, to=store(self.folder), min_bytes=min_bytes, **options)

    return OnDisk


class _LatestFolder(_Wrapper):
    latest = None

    def __init__(self, module, folder):
        super().__init__(module, folder)
        _LatestFolder.latest = folder

    def context(self):
        return Offload(self.module, to=Disk(self.latest), min_bytes=4096)


class _OpenedOnce(_Wrapper):
    def __init__(self, module, folder):
        super().__init__(module, folder)
        self.stack = ExitStack()
        self.stack.enter_context(super().context())

    def context(self):
        return nullcontext()


class _NeverClosed(_Wrapper):
    def forward(self, *args, **kwargs):
        Offload(to=Disk(self.folder), min_bytes=4096).__enter__()
        return self.module(*args, **kwargs)


class _ClosedIfAllGoesWell(_Wrapper):
    def forward(self, *args, **kwargs):
        offload = self.context()
        offload.__enter__()
        result = self.module(*args, **kwargs)
        offload.__exit__(None, None, None)
        return result


class _RunsTwice(_Wrapper):
    def forward(self, *args, **kwargs):
        self.module(*args, **kwargs)
        return super().forward(*args, **kwargs)


class _OneDisk(_Wrapper):
    def __init__(self, module, folder):
        super().__init__(module, folder)
        self.disk = Disk(folder)

    def context(self):
        return Offload(self.module, to=self.disk, min_bytes=4096)


class _CopiesWhatIsInside(_OneDisk):
    def __deepcopy__(self, memo):
        return deepcopy(self.module, memo)


class _Around:
    """A store that leaves the work to a `Disk`."""

    def __init__(self, folder):
        self.disk = Disk(folder)

    def write(self, tensor):
        return self.disk.write(tensor)

    def read(self, slot):
        return self.disk.read(slot)


class _IntoOneBuffer(Disk):
    def __init__(self, folder):
        super().__init__(folder)
        self.buffer = torch.empty(10_000, dtype=torch.uint8)

    def read(self, slot):
        content = super().read(slot)
        return self.buffer[: content.nbytes].copy_(content.view(torch.uint8)).view(content.dtype)


class _Copying(Disk):
    def write(self, tensor):
        return super().write(tensor.clone())


class _CopiesAll(_Wrapper):
    """Gives the file copies, also of what belongs to the module."""

    def context(self):
        return Offload(to=_Copying(self.folder), min_bytes=4096)


class _BareHooks(_Wrapper):
    """Leaves the parameters where they are, and takes the buffers."""

    def context(self):
        disk = Disk(self.folder)
        own = {param.untyped_storage().data_ptr() for param in self.module.parameters()}

        def pack(saved):
            kept = saved.untyped_storage().data_ptr() in own
            return (None, saved.detach()) if kept else (disk.write(saved), saved.shape)

        def unpack(packed):
            slot, given = packed
            return given if slot is None else disk.read(slot).view(given)

        return saved_tensors_hooks(pack, unpack)


class _KnowsTheFirst(_Wrapper):
    """Runs its own module, and leaves out what belongs to the one that it was made with."""

    def __init__(self, module, folder):
        super().__init__(module, folder)
        self.context = lambda: Offload(module, to=Disk(folder), min_bytes=4096)


def _own_files(module, folder):
    class Wrapper(_Wrapper):
        def context(self):
            pack, unpack = large_only(*disk_hooks(folder), 1024)
            return saved_tensors_hooks(pack, unpack)

    return Wrapper(module, folder)


class _Closure(_Wrapper):
    def __init__(self, module, folder):
        super().__init__(module, folder)
        self.run = lambda *args, **kwargs: module(*args, **kwargs)

    def forward(self, *args, **kwargs):
        with self.context():
            return self.run(*args, **kwargs)


class _CallsForward(_Wrapper):
    def forward(self, *args, **kwargs):
        with self.context():
            return self.module.forward(*args, **kwargs)


class _Detached(_Wrapper):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0].detach(), None


def _hooks_on_the_module(module, folder):
    opened = []
    module.register_forward_pre_hook(lambda module, args: opened.append(_Wrapper(module, folder).context().__enter__()))
    module.register_forward_hook(lambda *args: opened.pop().__exit__(None, None, None) and None, always_call=True)
    return module


class _NoReturn(_Wrapper):
    def forward(self, *args, **kwargs):
        super().forward(*args, **kwargs)


class _PositionalOnly(_Wrapper):
    def forward(self, *args):
        return super().forward(*args)


class _OneInput(_Wrapper):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, x, x)


class _Hushed(_Wrapper):
    def forward(self, *args, **kwargs):
        try:
            return super().forward(*args, **kwargs)
        except ValueError:
            return torch.zeros(3)


class _Hidden(_Wrapper):
    def __init__(self, module, folder):
        super().__init__(nn.Identity(), folder)
        self.module = nn.ModuleDict()
        self.inside = [module]

    def forward(self, *args, **kwargs):
        return save_to_disk(self.inside[0], self.folder)(*args, **kwargs)


WRONG = {
    "34.A": {
        "leaked": _leaking,
        "deleted_too_early": _deleting_in_unpack,
        "left_without_backward": _cached_in_unpack,
        "same_name": lambda folder: _to_files(folder, name=lambda saved: f"{saved.data_ptr()}.pt"),
        "names_collide": _counted,
        "latest_call": _in_the_latest_folder,
        "not_its_own": _all_removed,
        "whole_memory": lambda folder: _to_files(folder, keep=lambda saved: saved),
        "touched_others": lambda folder: _to_files(
            folder,
            remove=lambda name: [os.remove(os.path.join(folder, other)) for other in os.listdir(folder)],
        ),
        "kept_in_memory": _holding,
        "copy_in_memory": _loaded_once,
        **({"left_open": _by_mkstemp} if os.path.isdir(DESCRIPTORS) else {}),
        "other_kinds": _numbers_alone,
        "no_file": _in_memory,
        "wrong_values": lambda folder: _to_files(folder, keep=lambda saved: saved.half()),
        "not_a_pair": lambda folder: _to_files(folder)[0],
        "returned_nothing": lambda folder: print(end=str(len(_to_files(folder)))[:0]),
    },
    "34.B": {
        "write_failed": _byte_store(take=lambda tensor: tensor.numpy().tobytes()),
        "not_bytes": _byte_store(take=lambda tensor: bytearray(tensor.view(torch.uint8).numpy().tobytes())),
        "wrong_length": _byte_store(
            take=_by_torch_save, give=lambda held, slot: torch.load(io.BytesIO(held[slot.key]))
        ),
        "whole_memory": _byte_store(take=lambda tensor: bytes(tensor.untyped_storage())),
        "wrong_dtype": _byte_store(
            give=lambda held, slot: torch.frombuffer(bytearray(held[slot.key]), dtype=torch.uint8)
        ),
        "wrong_bits": _byte_store(
            give=lambda held, slot: (
                torch.frombuffer(bytearray(held[slot.key]), dtype=slot.dtype).nan_to_num()
                if slot.dtype.is_floating_point
                else torch.frombuffer(bytearray(held[slot.key]), dtype=slot.dtype)
            )
        ),
        "read_once": _byte_store(
            give=lambda held, slot: torch.frombuffer(bytearray(held.pop(slot.key)), dtype=slot.dtype)
        ),
        "shares_memory": _byte_store(give=_without_a_copy),
        "same_key": _byte_store(key=lambda slot, held, tensor: len(held)),
        "never_freed": _byte_store(drop=lambda held, slot: None),
        "freed_others": _byte_store(
            key=lambda slot, held, tensor: str(uuid.uuid4()), drop=lambda held, slot: held.clear()
        ),
        "freed_equal": _byte_store(key=lambda slot, held, tensor: hash(tensor.view(torch.uint8).numpy().tobytes())),
        "freed_late": _RemembersTheLatest,
        "one_slot": _RemembersTheDtype,
        "wrong_gradients": _ReadsIntoOneBuffer,
        "not_a_tensor": _byte_store(give=lambda held, slot: held[slot.key]),
        "edits_input": _byte_store(take=lambda tensor: (tensor.view(torch.uint8).numpy().tobytes(), tensor.zero_())[0]),
        "one_for_all": lambda held={}: _sharing(held),
        "kept_in_memory": _holding_too,
        "no_held": _no_held,
        "returned_nothing": lambda: print(end=str(byte_store())[:0]),
    },
    "34.C": {
        "same_values": _by_values(lambda now, then, version: torch.equal(now.nan_to_num(), then.nan_to_num())),
        "nan_differs": _by_values(lambda now, then, version: now._version == version and torch.equal(now, then)),
        "leaks": _as_in_the_sources,
        "edit_unnoticed": _large_only(Tensor.detach, lambda kept: kept),
        "false_alarm": _large_only(Tensor.detach, _never_edited),
        "other_error": _large_only(_versioned, _asserted),
        "not_restored": _guessed_by_tensor,
        "unpacked_once": _unpacked_once,
        "checked_once": _checked_once,
        "large_kept": _checked_around,
        "large_checked": _checked_throughout,
        "other_tensor": _large_copied,
        "latest_call": _with_the_latest,
        "other_threshold": lambda pack, unpack, at_least: large_only(pack, unpack, 100),
        "threshold_off": _safe(lambda saved, at_least: saved.numel() > at_least),
        "nothing_moved": _safe(lambda saved, at_least: False),
        "everything_moved": lambda pack, unpack, at_least: (pack, unpack),
        "not_a_pair": lambda pack, unpack, at_least: large_only(pack, unpack, at_least)[0],
        "returned_nothing": lambda *given: print(end=str(large_only(*given))[:0]),
    },
    "34.D": {
        "not_copyable": _OneDisk,
        "nothing_moved": _on_disk(min_bytes=2**20),
        "no_tools": _own_files,
        "moved_small": _on_disk(min_bytes=4095),
        "ran_twice": _RunsTwice,
        "kept_some": _on_disk(keep=4096),
        "wrong_folder": _on_disk(lambda folder: "disk"),
        "latest_call": _LatestFolder,
        "threshold_off": _on_disk(min_bytes=4097),
        "copy_runs_original": _Closure,
        "copy_moves_own": _KnowsTheFirst,
        "copy_differs": _CopiesWhatIsInside,
        "wrong_output": _OneInput,
        "wrong_gradients": _on_disk(_IntoOneBuffer),
        "other_thread": _OpenedOnce,
        "left_open": _NeverClosed,
        "left_after_error": _ClosedIfAllGoesWell,
        "moved_own": _BareHooks,
        "skipped_hooks": _CallsForward,
        "forward_returned_nothing": _NoReturn,
        "no_graph": _Detached,
        "module_changed": _hooks_on_the_module,
        "returned_nothing": lambda module, folder: print(end=str(save_to_disk(module, folder))[:0]),
        "not_registered": _Hidden,
        "raised": _PositionalOnly,
        "hid_error": _Hushed,
        "not_a_module": lambda module, folder: Offload(module, to=Disk(folder), min_bytes=4096),
    },
}


ALSO_WRONG = [
    ("34.C", "not_restored", small_pairs),
    ("34.C", "not_restored", calls_what_can_be_called),
    ("34.A", "touched_others", _cleaning_up_first),
    ("34.B", "same_key", _byte_store(key=lambda slot, held, tensor: tensor.data_ptr())),
    ("34.B", "not_bytes", _byte_store(take=torch.clone, give=lambda held, slot: held[slot.key].clone())),
    ("34.A", "raised", misreads),
    ("34.A", "copy_in_memory", copies_kept),
    ("34.A", "leaked", files_in_a_list),
    ("34.C", "other_threshold", _safe(lambda saved, least: saved.nbytes >= 4 * least)),
    ("34.C", "other_threshold", _safe(lambda saved, least: saved.untyped_storage().nbytes() >= 4 * least)),
    ("34.D", "moved_small", _on_disk(min_bytes=0)),
    ("34.D", "moved_own", _CopiesAll),
    ("34.D", "kept_some", _on_disk(_Copying, keep=4096)),
    ("34.D", "kept_some", _on_disk(_Around, keep=4096)),
]

RIGHT = [
    ("34.A", lambda folder: _to_files(tempfile.mkdtemp(dir=folder))),
    ("34.D", _on_disk(_Copying)),
    ("34.D", _on_disk(_Around)),
]
