"""Checks of notebook 34: offloading to disk."""

import gc
import io
import os
import tempfile
import traceback
import uuid
import warnings
import weakref
from collections.abc import MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from threading import Thread
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab.course.check import Exercise, Prediction, grad_stays_on, refuse, said, within
from hooklab.saved import Offload
from hooklab.stores import Disk


def _pair(got):
    if got is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一对钩子。",
            en="The function returned `None`; a pair of hooks is wanted.",
        )
    if not isinstance(got, tuple | list) or len(got) != 2 or not all(map(callable, got)):
        kinds = type(got).__name__
        if isinstance(got, tuple | list):
            kinds = f"({', '.join(type(item).__name__ for item in got)})"
        refuse(
            "not_a_pair",
            zh=f"应当返回 `(pack, unpack)` 两个函数，得到的是 `{kinds}`。",
            en=f"Return two functions, `(pack, unpack)`; found `{kinds}`.",
        )
    return got


# ---- 34.A: a file that goes with the graph ----


def disk_hooks(folder):
    import os
    import uuid

    class File:
        def __init__(self):
            self.name = os.path.join(folder, str(uuid.uuid4()))

        def __del__(self):
            if os.path.exists(self.name):
                os.remove(self.name)

    def pack(saved):
        file = File()
        torch.save(saved.detach().clone(), file.name)
        return file

    return pack, lambda file: torch.load(file.name, weights_only=True)


OTHERS = ["notes.txt", "weights.pt"]


def _files(folder):
    """What the answer has in the folder: every file but those that were there before."""
    found = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return [name for name in found if name not in {os.path.join(folder, other) for other in OTHERS}]


def _forward(pair, factor=1.0):
    """Three operations, four saves: `exp` its result, `*` both, `sin` its input. The gradient is known."""
    x = torch.tensor([0.5, -1.0, 2.0]).mul(factor).requires_grad_()
    with saved_tensors_hooks(*pair):
        y = x.exp()
        z = (y * y).sin()
    inner = torch.exp(x.detach())
    return x, z, torch.cos(inner * inner) * 2 * inner * inner


def examine_disk_hooks(answer):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in OTHERS:
            with open(os.path.join(folder, name), "w") as other:
                other.write("somebody else's")
        with _files_go_first():
            _examine_files(answer, folder)
        if left := _open_in(folder):
            refuse(
                "left_open",
                zh=f"打包过的都释放以后，还多开着 {left} 个文件描述符：`mkstemp` 返回的描述符要自己关。",
                en=f"After all that was packed has been released, {left} more file descriptors are open than before: the one that "
                "`mkstemp` returns is yours to close.",
            )


@contextmanager
def _files_go_first():
    """At the end whatever is still packed goes, also after an error, whose frames hold it; so may its folder then."""
    try:
        yield
    except Exception as error:
        one = error
        while one is not None:  # and the errors that led to it
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        raise
    finally:
        gc.collect()


DESCRIPTORS = "/proc/self/fd"  # on Linux


def _open_in(folder):
    """How many file descriptors of this process are those of files in the folder, deleted or not."""
    found = []
    for number in os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ():
        with suppress(OSError):  # the one that reads the list is closed by now
            found.append(os.readlink(os.path.join(DESCRIPTORS, number)))
    return sum(name.startswith(os.path.realpath(folder)) for name in found)


def _examine_files(answer, folder):
    pair = _pair(answer(folder))
    _examine_others(folder)
    x, z, want = _forward(pair)
    written = len(_files(folder))
    if not written:
        refuse(
            "no_file",
            zh="前向之后，`folder` 里看不到新文件。没有名字的文件不算，这里要数得到的。还是已经删掉了？文件应当跟着 `pack` 返回的东西走，不是跟着张量。",
            en="After forward no new file is to be seen in `folder`. Files without a name do not count here. Or were they deleted "
            "again? A file should go with what `pack` returns, not with the tensor.",
        )
    if written < 4:
        refuse(
            "same_name",
            zh=f"前向打包了 4 次，文件只有 {written} 个：有几次用的是同一个文件。",
            en=f"Forward packed 4 times, but the number of files is {written}: several packings used the same one.",
        )
    first = z.grad_fn._saved_self
    try:
        second = z.grad_fn._saved_self
    except (FileNotFoundError, KeyError, RuntimeError) as error:
        refuse(
            "deleted_too_early",
            zh=f"同一个已保存张量读第二遍时，抛出了 `{type(error).__name__}`：文件已经不在了。",
            en=f"Reading one saved tensor for the second time raised a `{type(error).__name__}`: the file is gone.",
        )
    try:
        z.sum().backward()
    except FileNotFoundError:
        _examine_others(folder)
        refuse(
            "not_its_own",
            zh="反向中途少了文件：有个文件，别的已保存张量还要用，就被删掉了。",
            en="Half-way through backward a file was missing: it was deleted while something else that was packed still needed it.",
        )
    if not torch.allclose(x.grad, want, rtol=1e-4):
        _refuse_values()
    del z, first, second
    gc.collect()
    if left := len(_files(folder)):
        refuse(
            "leaked",
            zh=f"反向做完，计算图也释放了，`folder` 里还有 {left} 个文件。该由谁来删？除了计算图，还有谁拿着 `pack` 返回的东西？",
            en=f"Backward is done and the graph is gone, but files are left in `folder`: {left}. Who is to delete them? And who else, "
            "besides the graph, still holds what `pack` has returned?",
        )
    _examine_no_backward(pair, folder)
    _examine_two_pairs(answer, folder)
    _examine_two_folders(answer, folder)
    _examine_size(pair, folder)
    _examine_kinds(pair)
    _examine_others(folder)


def _examine_others(folder):
    for name in OTHERS:
        if not os.path.exists(os.path.join(folder, name)):
            refuse(
                "touched_others",
                zh=f"`folder` 里原有一个 `{name}`，现在没了。",
                en=f"There was a `{name}` in `folder` before; it is gone.",
            )


def _refuse_values():
    refuse(
        "wrong_values",
        zh="文件都在，但求出的梯度不对：解包还回来的，不是打包时的那个张量。",
        en="The files are there, but the gradient is wrong: what unpack gives back is not what was packed.",
    )


def _examine_no_backward(pair, folder):
    x, z, want = _forward(pair)
    del x, z, want
    gc.collect()
    if left := len(_files(folder)):
        refuse(
            "left_without_backward",
            zh=f"做了反向的图没有留下文件；没做反向就扔掉的图，留下了 {left} 个。",
            en=f"A graph with a backward leaves no file; one that is dropped without a backward leaves {left}.",
        )


def _examine_two_pairs(answer, folder):
    runs = [_forward(answer(folder), factor) for factor in (1.0, 0.5)]
    for x, z, want in runs:
        try:
            z.sum().backward()
        except FileNotFoundError:
            x.grad = None
        if x.grad is None or not torch.allclose(x.grad, want, rtol=1e-4):
            refuse(
                "names_collide",
                zh="两对钩子同时用一个 `folder` 时，一对的文件被另一对盖掉或者删掉了：名字重了，还是清理过了头？",
                en="With two pairs of hooks in one `folder` at a time, the files of one are overwritten or deleted by the other: the "
                "same names, or too much cleaning up?",
            )


def _examine_two_folders(answer, folder):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as elsewhere:
        pack, _ = answer(folder)
        answer(elsewhere)
        packed = pack(torch.ones(3))
        wrong = _files(elsewhere)
        del packed
        gc.collect()
    if wrong:
        _refuse_latest()


def _refuse_latest():
    refuse(
        "latest_call",
        zh="调用了两次，第一次返回的，用的却是第二次收到的东西。参数存在哪里？",
        en="It was called twice; what the first call returned now works with what the second was given. Where are the "
        "arguments kept?",
    )


def _examine_kinds(pair):
    pack, unpack = pair
    for want in (
        torch.arange(6.0, dtype=torch.float64).view(2, 3).t(),
        torch.tensor([1.5, -0.25], dtype=torch.bfloat16),
        torch.tensor([[True], [False]]),
        torch.tensor(7),
    ):
        got = unpack(pack(want))
        if not isinstance(got, Tensor) or got.dtype != want.dtype or got.shape != want.shape or not got.equal(want):
            found = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
            refuse(
                "other_kinds",
                zh=f"一维的 `float32` 没有问题；打包 `{want.dtype} {list(want.shape)}`，还回来的是 `{found}`，或者值不同。",
                en=f"Fine with `float32` in one dimension; `{want.dtype} {list(want.shape)}` was packed, and what comes back is "
                f"`{found}`, or has other values.",
            )


def _examine_size(pair, folder):
    pack, unpack = pair
    table = torch.arange(250_000.0).view(500, 500)
    row = pack(table[3, :10])
    size = max(map(os.path.getsize, _files(folder)), default=0)
    content = unpack(row)
    del row  # its file goes before the folder does
    if size > 100_000:
        refuse(
            "whole_memory",
            zh=f"一个 40 字节的切片，写出的文件有 {size:,} 字节。",
            en=f"For a slice of 40 bytes the file has {size:,}.",
        )
    if not torch.equal(content, table[3, :10]):
        _refuse_values()
    alone = torch.full((10,), 20_240.5)  # a number that is nowhere else
    storage = weakref.ref(alone.untyped_storage())
    packed = pack(alone)
    del alone
    unpack(packed)
    gc.collect()
    if (
        any(isinstance(part, Tensor) and (part == 20_240.5).sum() == 10 for part in within((pair, packed)))
        and storage() is None
    ):
        del packed
        refuse(
            "copy_in_memory",
            zh="文件写了，可是打包、再解包一次以后，打包返回的东西里，或者钩子够得着的地方，还有一份同样内容的张量：内存一点没省。",
            en="The file is written, but after packing, and unpacking once, there is a tensor of the same content in what pack returns, or "
            "where the hooks reach: no memory is saved.",
        )
    if storage() is not None:
        del packed
        refuse(
            "kept_in_memory",
            zh="文件写了，但原来的张量还有人拿着（打包返回的东西，或者别处的缓存）：内存一点没省。",
            en="The file is written, but something still holds the tensor (what pack returns, or a cache elsewhere): no memory is "
            "saved.",
        )
    del packed


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


def _deleting_in_unpack(folder):
    def unpack(name):
        saved = torch.load(name, weights_only=True)
        os.remove(name)
        return saved

    return _leaking(folder)[0], unpack


def _leaking(folder):
    def pack(saved):
        torch.save(saved.clone(), name := os.path.join(folder, str(uuid.uuid4())))
        return name

    return pack, torch.load


def _cached_in_unpack(folder):
    def pack(saved):
        torch.save(saved.detach().clone(), name := os.path.join(folder, str(uuid.uuid4())))
        return {"name": name}

    def unpack(packed):
        if "saved" not in packed:
            packed["saved"] = torch.load(packed["name"])
            os.remove(packed["name"])
        return packed["saved"]

    return pack, unpack


def _counted(folder):
    numbers = iter(range(1_000_000))
    return _to_files(folder, name=lambda saved: f"{next(numbers)}.pt")


def _by_size(folder):
    """One more letter for each packing of a size, and every letter removed when one of them goes."""

    def remove(name):
        for other in _files(folder):
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


DISK_HOOKS = Exercise(
    "34.A",
    examine_disk_hooks,
    disk_hooks,
    {
        "leaked": _leaking,
        "deleted_too_early": _deleting_in_unpack,
        "left_without_backward": _cached_in_unpack,
        "same_name": lambda folder: _to_files(folder, name=lambda saved: f"{saved.data_ptr()}.pt"),
        "names_collide": _counted,
        "latest_call": _in_the_latest_folder,
        "not_its_own": _by_size,
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
    zh="文件跟着计算图来去，切片也只写它自己的内容。",
    en="The files come and go with the graph, and a slice writes no more than its own content.",
)

# ---- 34.B: a store on a dictionary of bytes ----


def byte_store():
    class Slot:
        def __init__(self, held, tensor):
            self.held, self.dtype = held, tensor.dtype
            held[id(self)] = tensor.detach().view(torch.uint8).numpy().tobytes()

        def __del__(self):
            del self.held[id(self)]

    class Store:
        def __init__(self):
            self.held = {}

        def write(self, tensor):
            return Slot(self.held, tensor)

        def read(self, slot):
            return torch.frombuffer(bytearray(self.held[id(slot)]), dtype=slot.dtype)

    return Store()


def _samples():
    special = torch.tensor([0.1, -0.0, float("nan"), float("-inf"), 3e38])
    return [
        special, special.to(torch.bfloat16), special.half(), special.double() / 3, torch.tensor([True, False]),
        torch.tensor([2**53 + 1, -7]), torch.tensor([1 + 2j, -3j]), torch.tensor([2.5]),
        torch.arange(9.0)[3:6],
    ]  # fmt: skip


def _bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).tolist()


def examine_byte_store(answer):
    store = answer()
    if store is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一个有 `write` 和 `read` 的对象。",
            en="The function returned `None`; wanted is an object with `write` and `read`.",
        )
    if not isinstance(getattr(store, "held", None), MutableMapping):
        refuse(
            "no_held",
            zh=f"返回的 `{type(store).__name__}` 没有叫 `held` 的字典。",
            en=f"What is returned, a `{type(store).__name__}`, has no dictionary `held`.",
        )
    for sample in _samples():
        _examine_sample(answer(), sample)
    if answer().held is store.held:
        refuse(
            "one_for_all",
            zh="`byte_store()` 调用两次，两个对象共用一个 `held`：各自的内容混在一起。",
            en="Two calls of `byte_store()` give two objects with one `held` between them: their contents are mixed up in it.",
        )
    _examine_keys(answer())
    _examine_dtypes(answer())
    _examine_freed(answer())
    _examine_left(answer())
    _examine_moved(answer())
    _examine_at_work(answer())


def _examine_sample(store, sample):
    dtype = str(sample.dtype).removeprefix("torch.")
    memory = sample.untyped_storage()
    given = torch.empty(0, dtype=sample.dtype).set_(memory.clone(), sample.storage_offset(), sample.shape)
    try:
        slot = store.write(given)
    except (TypeError, ValueError, RuntimeError) as error:
        refuse(
            "write_failed",
            zh=f"`write` 存 `{dtype}` 的张量时抛出了 `{said(error)}`。",
            en=f"`write` raised `{said(error)}` for a tensor of `{dtype}`.",
        )
    if given.untyped_storage().nbytes() != memory.nbytes() or _bits(given) != _bits(sample):
        refuse(
            "edits_input",
            zh=f"`write` 改动了收到的 `{dtype}` 张量：它与激活值共用内存，只能读。",
            en=f"`write` has changed the `{dtype}` tensor that it was given: it shares memory with an activation, only read it.",
        )
    del given
    entries = list(store.held.values())
    if len(entries) != 1 or not isinstance(entries[-1], bytes):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in entries})) or "-"
        refuse(
            "not_bytes",
            zh=f"`write` 之后，`held` 里应当有一份 `bytes`；现在有 {len(entries)} 份，类型是 `{kinds}`。",
            en=f"After `write` there should be one entry in `held`, of `bytes`; there are {len(entries)}, of type `{kinds}`.",
        )
    if len(entries[-1]) == memory.nbytes() > sample.nbytes:
        refuse(
            "whole_memory",
            zh=f"收到的是一个切片，{sample.nbytes} 字节；你存下的是它背后的整块内存，{memory.nbytes()} 字节。只存张量自己的。",
            en=f"What came was a slice of {sample.nbytes} bytes; you have stored all the memory behind it, {memory.nbytes()} bytes. "
            "Store only what is the tensor's own.",
        )
    if len(entries[-1]) != sample.nbytes:
        refuse(
            "wrong_length",
            zh=f"`{dtype}` 的张量占 {sample.nbytes} 字节，存下的却有 {len(entries[-1])} 字节。",
            en=f"A tensor of `{dtype}` has {sample.nbytes} bytes, but {len(entries[-1])} were stored.",
        )
    _expect_bits(_read(store, slot, "第一遍", "the first time"), sample, dtype)
    got = _read(store, slot, "第二遍", "the second time")
    got.zero_()
    if _bits(_read(store, slot, "第三遍", "the third time")) != _bits(sample):
        refuse(
            "shares_memory",
            zh="把 `read` 返回的张量原地清零以后再读，存着的内容也变成了零：它们共用内存。",
            en="After what `read` returned was set to zero in place, the next read gave zeros: it shares memory with what is held.",
        )


def _read(store, slot, zh, en):
    try:
        return store.read(slot)
    except KeyError:
        refuse(
            "read_once",
            zh=f"同一个槽位读{zh}时，抛出了 `KeyError`：`held` 里没有这个键。",
            en=f"Reading a slot {en} raised a `KeyError`: in `held` there is no such key.",
        )


def _expect_bits(got, want, dtype):
    if not isinstance(got, Tensor):
        refuse(
            "not_a_tensor",
            zh=f"`read` 应当返回张量，得到的是 `{type(got).__name__}`。",
            en=f"`read` should return a tensor; found `{type(got).__name__}`.",
        )
    if got.dtype != want.dtype or got.shape != want.shape:
        refuse(
            "wrong_dtype",
            zh=f"存进去的是 `{dtype}`、{want.numel()} 个元素，读出来是 `{got.dtype}`、形状 `{list(got.shape)}`。",
            en=f"Written: `{dtype}`, {want.numel()} elements; read: `{got.dtype}`, shape `{list(got.shape)}`.",
        )
    if _bits(got) != _bits(want):
        refuse(
            "wrong_bits",
            zh=f"`{dtype}` 的内容读回来有几位不一样了。",
            en=f"Read back, some bits of the `{dtype}` content are different.",
        )


def _examine_keys(store):
    memory = torch.empty(3)  # one for all: neither its address nor id() tells one content from another
    slots = {number: store.write(memory.fill_(number)) for number in range(20)}
    del slots[4]
    gc.collect()
    slots |= {number: store.write(memory.fill_(number)) for number in range(20, 30)}
    for number, slot in slots.items():
        try:
            found = store.read(slot).tolist()
        except KeyError:
            found = None
        if found is None:
            refuse(
                "freed_others",
                zh="写 20 个，释放 1 个，再写 10 个：还有人要的槽位，有的已经没有内容了。释放时动了别人的，或者键重了。",
                en="20 written, 1 given back, 10 more written: slots that are still wanted have lost their content. Giving one "
                "back touched others, or two had the same key.",
            )
        if found != [float(number)] * 3:
            refuse(
                "same_key",
                zh="写 20 个，释放 1 个，再写 10 个：有的槽位读到了别人的内容。看看字典的键会不会重。",
                en="20 written, 1 given back, 10 more written: some slots now read another's content. See whether two can get the "
                "same key.",
            )


def _examine_dtypes(store):
    samples = [torch.ones(4), torch.ones(4, dtype=torch.float64), torch.arange(4)]
    slots = [store.write(sample.clone()) for sample in samples]
    for slot, sample in zip(slots, samples, strict=True):
        got = _read(store, slot, "一遍", "once")
        if not isinstance(got, Tensor) or got.dtype != sample.dtype or not torch.equal(got, sample):
            refuse(
                "one_slot",
                zh=f"先后写入三种 dtype 的张量，写完再读，`{sample.dtype}` 的那个就不对了：每个槽位要带齐自己的全部信息，不能放在 `self` 上。",
                en=f"Tensors of three dtypes were written, and read after that: the one of `{sample.dtype}` is wrong. Each slot needs "
                "all of its own information; `self` is no place for it.",
            )


def _examine_freed(store):
    first, equal = store.write(torch.ones(3)), store.write(torch.ones(3))
    del first
    gc.collect()
    try:
        _expect_bits(store.read(equal), torch.ones(3), "float32")
    except KeyError:
        refuse(
            "freed_equal",
            zh="两个内容相同的张量各写一次，释放了一个，另一个也读不到了：键重了。",
            en="Two tensors of equal content were written, and one was given back: the other can no longer be read. They had the same "
            "key.",
        )
    del equal
    slot, other = store.write(torch.ones(3)), store.write(torch.ones(5))
    del slot
    gc.collect()
    _expect_bits(_read(store, other, "一遍", "once"), torch.ones(5), "float32")


def _examine_left(store):
    slots = [store.write(torch.ones(length)) for length in range(1, 5)]  # all alive: no two have the same id()
    for slot in slots:
        store.read(slot)
    del slots, slot
    gc.collect()
    if 0 < len(store.held) < 4:  # with all four left, the graph of _examine_at_work says it better
        refuse(
            "freed_late",
            zh="槽位已经没人要了，它的内容还在 `held` 里。",
            en="Nobody has the slot any more, yet its content is still in `held`.",
        )


def _examine_moved(store):
    alone = torch.ones(10)
    storage = weakref.ref(alone.untyped_storage())
    slot = store.write(alone)
    del alone
    gc.collect()
    if storage() is not None:
        refuse(
            "kept_in_memory",
            zh="`write` 返回以后，原来的张量已经没人要了，它的内存却没有释放：槽位或者后端还拿着它。",
            en="After `write` nobody else wants the tensor, yet its memory is not freed: the slot or the store still holds it.",
        )
    del slot


def _examine_at_work(store):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)).to(torch.bfloat16)
    x = torch.randn(4, 6).to(torch.bfloat16)
    want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with Offload(model, to=store, min_bytes=0):
        loss = model(x).sum()
    got = torch.autograd.grad(loss, list(model.parameters()))
    if not all(map(torch.equal, got, want)):
        refuse(
            "wrong_gradients",
            zh="单独读写没有错，交给 `Offload` 以后，梯度却和普通训练不同。",
            en="Reading and writing by itself is right, but as a store of `Offload` the gradients differ from plain training.",
        )
    del loss, got
    gc.collect()
    if store.held:
        refuse(
            "never_freed",
            zh=f"反向做完，图也释放了，`held` 里还有 {len(store.held)} 份内容。",
            en=f"Backward is done and the graph is gone; in `held` there is still content: {len(store.held)}.",
        )


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


BYTE_STORE = Exercise(
    "34.B",
    examine_byte_store,
    byte_store,
    {
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
    zh="内容逐位相等，槽位一回收，字节就没了：它可以交给 `Offload`。",
    en="The content is equal bit for bit, and the bytes go with the slot: a store for `Offload`.",
)

# ---- 34.C: a threshold that leaves small tensors in memory, safely ----


def large_only(pack, unpack, at_least):
    def pack_either(saved):
        if saved.numel() >= at_least:
            return "moved", pack(saved), None
        return "kept", saved.detach(), saved._version

    def unpack_either(packed):
        where, content, version = packed
        if where == "moved":
            return unpack(content)
        if content._version != version:
            raise RuntimeError("a saved tensor was edited in place")
        return content

    return pack_either, unpack_either


SHAPES = [(3,), (30,), (99,), (25, 4), (101,), (50, 4)]
INNER = {
    "tensor": (lambda saved: -saved.detach(), lambda packed: -packed),
    "tuple": (lambda saved: (saved.detach() * 2, 0.5), lambda packed: packed[0] * packed[1]),
    "list": (lambda saved: [saved.detach().tolist()], lambda packed: torch.tensor(packed[0])),
    "function": (lambda saved: (lambda half: lambda: half)(saved.detach() / 2), lambda packed: packed() * 2),
    "pair": (lambda saved: (saved.detach() / 2, 2), lambda packed: packed[0] * packed[1]),
    "triple": (lambda saved: (saved.detach() / 2, saved._version, 2), lambda packed: packed[0] * packed[2]),
}


def examine_large_only(answer):
    _examine_threshold(answer)
    _examine_other_thresholds(answer)
    pair = _pair(answer(*INNER["tensor"], 100))
    _examine_leak(pair)
    _examine_edit(pair)
    _examine_equal_edit(pair)
    for kind, inner in INNER.items():
        _examine_values(answer(*inner, 100), kind)
    _examine_late_edit(pair)
    _examine_large(answer)
    _examine_given(answer)
    first = _pair(answer(torch.detach, lambda packed: packed, 10))
    answer(torch.zeros_like, lambda packed: packed, 10)
    if not torch.equal(first[1](first[0](torch.ones(20))), torch.ones(20)):
        _refuse_latest()


def _examine_given(answer):
    """A `pack` may know parameters by their storage, or ask for `requires_grad`."""
    given = []

    def pack(saved):
        given.append((saved.untyped_storage().data_ptr(), saved.requires_grad))
        return saved.detach()

    hidden = torch.ones(200, requires_grad=True) * 2
    with saved_tensors_hooks(*answer(pack, lambda packed: packed, 100)):
        hidden.sin()
    if given != [(hidden.untyped_storage().data_ptr(), True)]:
        refuse(
            "other_tensor",
            zh="交给你的 `pack` 收到的不是被保存的张量，而是它的副本或 `detach()` 的结果：按存储认参数的 `pack` 认不出副本，看 `requires_grad` 的会被 `detach()` 骗过。",
            en="The `pack` that you were given gets a copy of the saved tensor, or what `detach()` makes of it, and not the tensor "
            "itself: a `pack` that knows parameters by their storage does not know a copy, and one that asks for `requires_grad` "
            "is misled by `detach()`.",
        )


def _examine_threshold(answer):
    moved = []

    def pack(saved):
        moved.append(tuple(saved.shape))
        return saved.detach()

    pair = _pair(answer(pack, lambda packed: packed, 100))
    for shape in SHAPES:
        with saved_tensors_hooks(*pair):
            torch.zeros(shape, requires_grad=True).exp()
    if not moved:
        refuse(
            "nothing_moved",
            zh="一个张量也没有交给 `pack`，大的也没有。",
            en="No tensor was given to `pack`, not even a large one.",
        )
    if moved == SHAPES:
        refuse(
            "everything_moved",
            zh="所有张量都交给了 `pack`，只有 3 个元素的也在内；`at_least` 是 100。",
            en="Every tensor was given to `pack`, even one of 3 elements; `at_least` was 100.",
        )
    if moved != [(25, 4), (101,), (50, 4)]:
        refuse(
            "threshold_off",
            zh=f"`at_least` 是 100 时，交给 `pack` 的是这些形状：`{moved}`。用元素个数对一对，刚好 100 个的也要看。",
            en=f"With `at_least` 100 these shapes were given to `pack`: `{moved}`. Go through them by their number of elements, "
            "the one with exactly 100 too.",
        )


def _examine_other_thresholds(answer):
    for at_least, x in (
        (30, torch.zeros(30, requires_grad=True)),
        (200, torch.zeros(150, requires_grad=True)),
        (100, torch.zeros(60, dtype=torch.float64, requires_grad=True)),
        (100, torch.zeros(300, requires_grad=True)[:60]),
        (100, torch.zeros(120, dtype=torch.bfloat16, requires_grad=True)),
    ):
        moved = []
        pair = answer(lambda saved, moved=moved: moved.append(1) or saved.detach(), lambda packed: packed, at_least)
        with saved_tensors_hooks(*pair):
            x.sin()
        if bool(moved) != (x.numel() >= at_least):
            zh, en = ("交给了", "was") if moved else ("没有交给", "was not")
            refuse(
                "other_threshold",
                zh=f"`at_least` 是 {at_least} 时，一个有 {x.numel()} 个元素的 `{x.dtype}` 张量{zh} `pack`；"
                f"它背后的内存有 {x.untyped_storage().nbytes()} 字节。数的应当是元素，与 `at_least` 比。",
                en=f"With `at_least` {at_least} a `{x.dtype}` tensor of {x.numel()} elements {en} given to `pack`; the memory "
                f"behind it has {x.untyped_storage().nbytes()} bytes. Its elements are to be counted, and compared with "
                "`at_least`.",
            )


def _examine_leak(pair):
    with saved_tensors_hooks(*pair):
        y = torch.zeros(3, requires_grad=True).exp()
    alive = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    if alive() is not None:
        refuse(
            "leaks",
            zh="一个小张量和它的计算图都没人要了，内存却一直不释放。是谁还拿着它？打包的结果里装的是不是它自己？",
            en="Nobody has the small tensor or its graph any more, yet the memory is not freed. Who still holds it? Is the very "
            "tensor in what was packed?",
        )


def _examine_edit(pair):
    x = torch.zeros(3, requires_grad=True)
    with saved_tensors_hooks(*pair):
        y = x.exp()
        z = x.exp().add_(1).sin()
    y.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError:
        pass
    except Exception as error:
        refuse(
            "other_error",
            zh=f"小张量保存之后被原地改写，应当抛出 `RuntimeError`，抛出的却是 `{type(error).__name__}`。",
            en=f"A small tensor was edited in place after saving: a `RuntimeError` is wanted, raised was "
            f"`{type(error).__name__}`.",
        )
    else:
        refuse(
            "edit_unnoticed",
            zh="一个小张量保存之后被原地改写，反向照样走完了，没有抛出 `RuntimeError`。",
            en="A small tensor was edited in place after saving; backward went through all the same, without a `RuntimeError`.",
        )
    try:
        _ = z.grad_fn._saved_self
    except RuntimeError:
        refuse(
            "false_alarm",
            zh="一个张量在保存之前改过一次，保存之后没有再改，解包却抛出了 `RuntimeError`。",
            en="A tensor was edited before it was saved and never after; unpacking it raised a `RuntimeError` all the same.",
        )


def _examine_equal_edit(pair):
    x = torch.zeros(3, requires_grad=True)
    with saved_tensors_hooks(*pair):
        y = x.exp()
    y.mul_(1)
    try:
        y.sum().backward()
    except RuntimeError:
        pass
    else:
        refuse(
            "same_values",
            zh="一个小张量保存之后执行了 `mul_(1)`，数值没变，没有钩子时 PyTorch 照样报错，这里却没有：要看的是改过没有，不是数值。",
            en="After a small tensor was saved, `mul_(1)` ran: the values are the same, and without hooks PyTorch raises all the "
            "same; here nothing is raised. Look at whether it was edited, not at its values.",
        )
    with saved_tensors_hooks(*pair):
        y = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True).exp()
    try:
        y.sum().backward()
    except RuntimeError:
        refuse(
            "nan_differs",
            zh="一个小张量里有 `nan`，谁也没有改它，解包却抛出了 `RuntimeError`：`nan` 和谁都不相等，和自己也不。",
            en="A small tensor has a `nan` in it and was edited by nobody; unpacking raised a `RuntimeError` all the same. `nan` "
            "equals nothing, not even itself.",
        )


def _examine_late_edit(pair):
    x = torch.zeros(3, requires_grad=True)
    with saved_tensors_hooks(*pair):
        y = x.exp()
    y.sum().backward(retain_graph=True)
    y.detach().mul_(2)
    try:
        y.sum().backward()
    except RuntimeError:
        return
    refuse(
        "checked_once",
        zh="第一次反向之后才原地改写一个小张量，第二次反向照样走完了：每次解包都要核对。",
        en="A small tensor was edited in place after a first backward, and a second went through all the same: compare at every "
        "unpacking.",
    )


def _examine_large(answer):
    """What `pack` has copied away may be edited, and freed."""
    pair = answer(lambda saved: saved.tolist(), torch.tensor, 100)
    x = torch.zeros(200, requires_grad=True)
    with saved_tensors_hooks(*pair):
        y = x.exp()
        hidden = x + 1
        z = hidden.sin()
    memory = weakref.ref(hidden.untyped_storage())
    del hidden
    gc.collect()
    if memory() is not None:
        refuse(
            "large_kept",
            zh="一个大张量已经交给 `pack` 搬走，别人也不要它了，它的内存却没有释放：你的打包结果里还拿着它。",
            en="A large tensor was given to `pack` and moved, and nobody else wants it, yet its memory is not freed: what you packed "
            "still holds it.",
        )
    y.mul_(2)
    try:
        (y.sum() + z.sum()).backward()
    except RuntimeError:
        refuse(
            "large_checked",
            zh="一个大张量由 `pack` 另存了一份，之后原地改写它并不碍事，解包却抛出了 `RuntimeError`：核对只管留在内存里的小张量。",
            en="`pack` has stored a large tensor elsewhere, so an edit in place afterwards does no harm; yet unpacking raised a "
            "`RuntimeError`. Only small ones, which stay in memory, are to be compared.",
        )


def _examine_values(pair, kind):
    for shape in SHAPES:
        x = torch.full(shape, 0.5, requires_grad=True)
        try:
            with saved_tensors_hooks(*pair):
                y = x.exp()
            y.sum().backward(retain_graph=True)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, KeyError) as error:
            x.grad = None
            said = type(error).__name__
        else:
            said = "-"
        if x.grad is None or not torch.allclose(x.grad, x.detach().exp(), rtol=1e-4):
            refuse(
                "not_restored",
                zh=f"`pack` 返回的是 `{kind}` 时，形状 `{list(shape)}` 的张量还原错了（异常：`{said}`）。解包时，打包的结果交给谁去还原了？",
                en=f"With a `pack` that returns a `{kind}`, a tensor of shape `{list(shape)}` is not restored rightly (raised: "
                f"`{said}`). Who was given it to restore?",
            )
        try:
            y.sum().backward()
        except Exception as error:
            refuse(
                "unpacked_once",
                zh=f"第一次反向没有问题；`retain_graph=True` 之后的第二次反向，解包抛出了 `{type(error).__name__}`。",
                en=f"The first backward is fine; in a second, after `retain_graph=True`, unpacking raised "
                f"`{type(error).__name__}`.",
            )


def _large_only(keep, give, test=lambda saved, at_least: saved.numel() >= at_least, moved=None):
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

    return lambda saved: (
        *_versioned(saved),
        pack(saved) if saved.numel() >= at_least else None,
    ), unpack_either


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
    def guarded(packed):
        if not same(*packed):
            raise RuntimeError("edited")
        return packed[0]

    return _large_only(lambda saved: (saved.detach(), saved.detach().clone()), guarded)


def _by_values_and_versions(pack, unpack, at_least):
    def guarded(packed):
        tensor, then, version = packed
        if tensor._version != version or not torch.equal(tensor, then):
            raise RuntimeError("edited")
        return tensor

    keep = lambda saved: (saved.detach(), saved.detach().clone(), saved._version)  # noqa: E731
    return _large_only(keep, guarded)(pack, unpack, at_least)


LARGE_ONLY = Exercise(
    "34.C",
    examine_large_only,
    large_only,
    {
        "same_values": _by_values(lambda now, then: torch.equal(now.nan_to_num(), then.nan_to_num())),
        "nan_differs": _by_values_and_versions,
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
    zh="大的搬走，小的安全地留下：不漏内存，改了就报错。",
    en="The large ones move, the small ones stay, safely: nothing leaks, and an edit raises.",
)

# ---- 34.D: SaveToDisk, on Offload and Disk ----


def save_to_disk(module, folder):
    from hooklab import Offload
    from hooklab.stores import Disk

    class SaveToDisk(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.folder = module, folder

        def forward(self, *args, **kwargs):
            with Offload(self.module, to=Disk(self.folder), min_bytes=4096):
                return self.module(*args, **kwargs)

    return SaveToDisk()


class _Write(NamedTuple):
    """What a `Disk` was given once: for which folder, from which memory of how many bytes, and the content itself."""

    folder: str
    place: int
    memory: int
    content: Tensor

    def is_of(self, own):
        """Whether this is what `own` holds, or a copy of it."""
        if self.place == own.untyped_storage().data_ptr():
            return True
        mine, its = (tensor.detach().flatten() for tensor in (self.content, own))
        return mine.nbytes == its.nbytes and torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


class _Seen:
    """What every `Disk` is given while this is open.

    And how often a `Disk` was made or an `Offload` opened.
    """

    def __enter__(self):
        self.writes, self.tools, self.stack = [], 0, ExitStack()
        write = Disk.write

        def noting(disk, tensor):
            storage = tensor.untyped_storage()
            content = tensor.detach().clone()
            self.writes.append(_Write(disk.folder, storage.data_ptr(), storage.nbytes(), content))
            return write(disk, tensor)

        def counting(run):
            def counted(*args, **kwargs):
                self.tools += 1
                return run(*args, **kwargs)

            return counted

        self.stack.enter_context(patch.object(Disk, "write", noting))
        self.stack.enter_context(patch.object(Disk, "__init__", counting(Disk.__init__)))
        self.stack.enter_context(patch.object(Offload, "__enter__", counting(Offload.__enter__)))
        return self

    def __exit__(self, *exc_info):
        self.stack.close()

    def during(self, run):
        """What `run` returns, and what was written meanwhile."""
        before = len(self.writes)
        return run(), self.writes[before:]


class _Attention(nn.MultiheadAttention):
    """Saves a buffer of its own, of 4,096 bytes, and a mask of one byte less."""

    def __init__(self):
        super().__init__(8, 2, batch_first=True)
        self.register_buffer("gains", torch.rand(16, 8, 8))

    def forward(self, *args, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        odd = torch.arange(4095) % 2 == 1
        return output * self.gains + torch.where(odd, output.mean(), 0.0).mean(), weights


class _Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        (self.weight * x).exp()
        raise ValueError("this model always fails")


def examine_save_to_disk(answer):
    """In a thread of its own: a context that is left open goes with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _Seen() as seen:
        _in_thread(lambda: _examine_wrapper(answer, folder, seen))
        gc.collect()  # a file must be closed before its folder goes, on Windows


def _in_thread(run):
    done, raised = [], []

    def guarded():
        try:
            with grad_stays_on():
                done.append(run())
        except Exception as error:
            raised.append(error)

    thread = Thread(target=guarded)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return done[0]


def _saves_outside():
    torch.zeros(10_000, requires_grad=True).exp()


def _examine_wrapper(answer, folder, seen):
    torch.manual_seed(0)
    model = _Attention()
    query, memory = torch.randn(16, 8, 8), torch.randn(16, 10, 8)
    want = _attend(model, model, query, memory)
    _, wanted = seen.during(lambda: _attend(save_to_disk(model, folder), model, query, memory))
    called = []
    model.register_forward_hook(lambda *args: called.append(1))
    before = seen.tools
    wrapped = answer(model, folder)
    _examine_module(wrapped, model)
    got, writes = seen.during(lambda: _attend(wrapped, model, query, memory))
    if not called:
        refuse(
            "skipped_hooks",
            zh="挂在里面那个模块上的前向钩子没有触发：调用的是它的 `forward`，不是它本身。",
            en="A forward hook on the module inside did not fire: its `forward` was called, not the module itself.",
        )
    if len(called) > 1:
        refuse(
            "ran_twice",
            zh=f"一次前向里，里面那个模块运行了 {len(called)} 次；应当只运行 1 次。",
            en=f"In one forward the module inside ran {len(called)} times; it should run 1 time.",
        )
    if not torch.equal(got[0], want[0]):
        refuse(
            "wrong_output",
            zh="前向的结果和里面那个模块的不一样。参数都传到了吗？",
            en="The output is not that of the module inside. Did all arguments get there?",
        )
    if not writes and seen.tools == before:
        refuse(
            "no_tools",
            zh="前向跑完了，没有新建过 `Disk`，也没有打开过 `Offload`，`Disk` 里什么也没写。用自己的钩子写的文件，这里不算。",
            en="Forward is done; no `Disk` was made and no `Offload` opened, so nothing was written to a `Disk`. Files written by hooks "
            "of your own do not count here.",
        )
    _examine_writes(writes, model, folder)
    # Of the content: a store around a `Disk` may be given a copy, which lies in a memory no larger than that.
    most, moved = (sum(write.content.nbytes for write in some) for some in (wanted, writes))
    if (kept := most - moved) > 0:
        refuse(
            "kept_some",
            zh=f"该写进文件的，有 {kept:,} 字节留在了内存里。`keep` 是不是没有留成 0？",
            en=f"Of what should go to the file {kept:,} bytes stayed in memory. Is `keep` something other than 0?",
        )
    if not all(map(torch.equal, got[1], want[1])):
        refuse(
            "wrong_gradients",
            zh="前向没错，参数的梯度却和普通训练不同。",
            en="Forward is right, but the gradients of the parameters differ from plain training.",
        )
    _examine_elsewhere(wrapped, model, query, memory, seen)
    _examine_closed(answer(_Failing(), folder), seen)
    _examine_copy(wrapped, query, memory, seen)
    _examine_two_wrappers(answer, folder, seen)


def _examine_two_wrappers(answer, folder, seen):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as elsewhere:
        wrapped = [answer(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), where) for where in (folder, elsewhere)]
        first, second = (
            {write.folder for write in seen.during(lambda run=run: run(torch.ones(64, 64)).sum().backward())[1]}
            for run in wrapped
        )
        del wrapped
        gc.collect()
    if first - {folder}:
        _refuse_latest()
    if second - {elsewhere}:
        _refuse_folder()


def _refuse_folder():
    refuse(
        "wrong_folder",
        zh="写是写了，文件却不是直接在给你的 `folder` 里。",
        en="It was written, but to a file that is not directly in the `folder` that was given.",
    )


def _examine_module(wrapped, model):
    if wrapped is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`，应当返回一个模块。",
            en="The function returned `None`; a module is wanted.",
        )
    if not isinstance(wrapped, nn.Module):
        refuse(
            "not_a_module",
            zh=f"应当返回一个模块，得到的是 `{type(wrapped).__name__}`。",
            en=f"A module should be returned; found `{type(wrapped).__name__}`.",
        )
    if {id(param) for param in wrapped.parameters()} != {id(param) for param in model.parameters()}:
        refuse(
            "not_registered",
            zh="返回的模块，它的 `parameters()` 和里面那个模块的不一样：优化器会漏掉参数。",
            en="`parameters()` of what you return are not those of the module inside: an optimizer would miss some.",
        )


def _attend(wrapped, model, query, memory):
    model.zero_grad()
    got = wrapped(query, memory, value=memory, need_weights=False)
    if got is None:
        refuse(
            "forward_returned_nothing",
            zh="前向返回了 `None`，应当返回里面那个模块的结果。",
            en="The forward returned `None`; wanted is what the module inside returns.",
        )
    if isinstance(got[0], Tensor) and not got[0].requires_grad:
        refuse(
            "no_graph",
            zh="前向的结果没有计算图，反向走不下去：是不是 `detach` 过，或者关掉了梯度？",
            en="The output has no graph, so there is no backward. Was it put through `detach`, or were gradients off?",
        )
    got[0].square().sum().backward()
    return got[0].detach(), [param.grad for param in model.parameters()]


def _of_its_own(writes, model):
    """The parameters and buffers that were written, or copies of them."""
    return [own for own in (*model.parameters(), *model.buffers()) if any(write.is_of(own) for write in writes)]


def _examine_writes(writes, model, folder):
    if not writes:
        refuse(
            "nothing_moved",
            zh="前向跑完了，`Disk` 里什么也没写。最大的张量有 5,120 字节：阈值是多少？卸载到哪里？",
            en="Forward is done and nothing was written to a `Disk`. The largest tensor has 5,120 bytes: what is the threshold, and "
            "where does it go?",
        )
    if {write.folder for write in writes} != {folder}:
        _refuse_folder()
    if moved := len(_of_its_own(writes, model)):
        refuse(
            "moved_own",
            zh=f"写进文件的还有模块自己的参数或缓冲区（{moved} 个）：它们本来就一直在内存里。",
            en=f"Parameters or buffers of the module were written too ({moved} of them): they are in memory anyway.",
        )
    if (smallest := min(write.memory for write in writes)) < 4096:
        refuse(
            "moved_small",
            zh=f"不到 4,096 字节的也写进了文件：最小的一个，内存只有 {smallest:,} 字节。",
            en=f"What is smaller than 4,096 bytes was written too: the smallest lies in a memory of {smallest:,}.",
        )

    if all(write.memory > 4096 for write in writes):
        refuse(
            "threshold_off",
            zh="有一个张量的内存正好是 4,096 字节，它没有写进文件。",
            en="One tensor lies in a memory of exactly 4,096 bytes, and it was not written.",
        )


def _examine_elsewhere(wrapped, model, query, memory, seen):
    _, writes = seen.during(lambda: _in_thread(lambda: _attend(wrapped, model, query, memory)))
    if not writes:
        refuse(
            "other_thread",
            zh="在创建它的线程里没有问题；换一个线程来运行，什么也没写。",
            en="Fine in the thread that made it; run in another thread, nothing is written.",
        )
    if seen.during(_saves_outside)[1]:
        refuse(
            "left_open",
            zh="前向早已返回，模块外面保存的张量还在写进文件：上下文没有关上。",
            en="Forward has long returned, and what is saved outside the module still goes to the file: the context was not closed.",
        )
    if wrapped is model or seen.during(lambda: _attend(model, model, query, memory))[1]:
        refuse(
            "module_changed",
            zh="单独调用 `module`，不经过你返回的模块，也在写文件：`module` 自己被改动了。",
            en="When `module` is called by itself, without the module that you return, files are written too: `module` itself was "
            "changed.",
        )


def _examine_closed(wrapped, seen):
    try:
        wrapped(torch.ones(3))
    except ValueError:
        pass
    else:
        refuse(
            "hid_error",
            zh="里面的模块抛出了 `ValueError`，从外面的模块里却没有出来。",
            en="The module inside raised a `ValueError`; it did not come out of yours.",
        )
    if seen.during(_saves_outside)[1]:
        refuse(
            "left_after_error",
            zh="一切顺利时没有问题；前向中途报错以后，上下文却一直开着，模块外面的张量也写进了文件。",
            en="Fine as long as nothing goes wrong; after an error in forward the context stays open, and tensors saved outside "
            "the module go to the file.",
        )


def _examine_copy(wrapped, query, memory, seen):
    try:
        twin = deepcopy(wrapped)
    except TypeError as error:
        refuse(
            "not_copyable",
            zh=f"`copy.deepcopy` 复制你的模块时抛出了 `TypeError: {error}`。你的模块里存着什么复制不了的东西？",
            en=f"`copy.deepcopy` of your module raised `TypeError: {error}`. What does the module keep that has no copy?",
        )
    got, writes = seen.during(lambda: _attend(twin, twin, query, memory))
    if any(grad is None for grad in got[1]):
        refuse(
            "copy_runs_original",
            zh="`copy.deepcopy` 得到的副本，自己的参数没有梯度：它运行的还是原来那个模块。",
            en="The copy that `copy.deepcopy` makes has no gradients in its own parameters: it still runs the first module.",
        )
    if _of_its_own(writes, twin):
        refuse(
            "copy_moves_own",
            zh="原来的模块没有问题；`copy.deepcopy` 得到的副本，却把自己的参数或缓冲区也写进了文件。不写的是哪个模块的？",
            en="Fine with the first module; the copy that `copy.deepcopy` makes writes its own parameters or buffers too. Those of which "
            "module are left out?",
        )
    if not writes or not torch.equal(got[0], wrapped(query, memory, value=memory, need_weights=False)[0]):
        refuse(
            "copy_differs",
            zh="`copy.deepcopy` 得到的副本能运行，但是结果不同，或者什么也没写。",
            en="The copy that `copy.deepcopy` makes runs, but its output differs, or nothing is written.",
        )


class _Wrapper(nn.Module):
    def __init__(self, module, folder):
        super().__init__()
        self.module, self.folder = module, folder

    def forward(self, *args, **kwargs):
        with self.context():
            return self.module(*args, **kwargs)

    def context(self):
        return Offload(self.module, to=Disk(self.folder), min_bytes=4096)


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


class _DefaultThreshold(_Wrapper):
    def context(self):
        return Offload(self.module, to=Disk(self.folder))


class _NoThreshold(_Wrapper):
    def context(self):
        return Offload(self.module, to=Disk(self.folder), min_bytes=0)


class _RunsTwice(_Wrapper):
    def forward(self, *args, **kwargs):
        self.module(*args, **kwargs)
        return super().forward(*args, **kwargs)


class _KeepsSome(_Wrapper):
    def context(self):
        return Offload(self.module, to=Disk(self.folder), min_bytes=4096, keep=4096)


class _AnyFolder(_Wrapper):
    def context(self):
        return Offload(self.module, to="disk", min_bytes=4096)


class _OneDisk(_Wrapper):
    def __init__(self, module, folder):
        super().__init__(module, folder)
        self.disk = Disk(folder)

    def context(self):
        return Offload(self.module, to=self.disk, min_bytes=4096)


class _CopiesWhatIsInside(_OneDisk):
    def __deepcopy__(self, memo):
        return deepcopy(self.module, memo)


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


class _OneBuffer(_Wrapper):
    def context(self):
        return Offload(self.module, to=_IntoOneBuffer(self.folder), min_bytes=4096)


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


class _OffByOne(_Wrapper):
    def context(self):
        return Offload(self.module, to=Disk(self.folder), min_bytes=4097)


class _OneTooLow(_Wrapper):
    def context(self):
        return Offload(self.module, to=Disk(self.folder), min_bytes=4095)


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


SAVE_TO_DISK = Exercise(
    "34.D",
    examine_save_to_disk,
    save_to_disk,
    {
        "not_copyable": _OneDisk,
        "nothing_moved": _DefaultThreshold,
        "no_tools": _own_files,
        "moved_small": _OneTooLow,
        "ran_twice": _RunsTwice,
        "kept_some": _KeepsSome,
        "wrong_folder": _AnyFolder,
        "latest_call": _LatestFolder,
        "threshold_off": _OffByOne,
        "copy_runs_original": _Closure,
        "copy_moves_own": _KnowsTheFirst,
        "copy_differs": _CopiesWhatIsInside,
        "wrong_output": _OneInput,
        "wrong_gradients": _OneBuffer,
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
    zh="谁运行它，上下文就开在谁的线程里，出了错也会关上；模块里没有打开的文件，所以能复制。",
    en="The context is opened in whichever thread runs it, and closed after an error too; no open file lies in the module, so it "
    "can be duplicated.",
)

CHECKS = [
    Prediction(
        "34.1",
        zh="3 个，一个也没删。Python 只接管 Ctrl-C 的 SIGINT，变成 `KeyboardInterrupt`；SIGTERM 按系统的默认处理，进程当场结束，"
        "`__del__`、`finally`、`atexit` 一个也不执行。要善后，得自己写 `signal.signal(signal.SIGTERM, ...)`。",
        en="All 3. Python handles only the SIGINT of Ctrl-C, which becomes a `KeyboardInterrupt`; SIGTERM keeps the "
        "system's default and ends the process on the spot: no `__del__`, no `finally`, no `atexit`. To clean up you would have "
        "to set `signal.signal(signal.SIGTERM, ...)`.",
    ),
    Prediction(
        "34.2",
        zh="大约 4 MB：`torch.save` 存的是张量背后的整块内存，这样几个视图读回来还能共用它。",
        en="About 4 MB: `torch.save` stores the whole memory behind a tensor, so that several views still share it when read back.",
    ),
    Prediction(
        "34.3",
        zh="一个也没有。`Model` 在自己的 `forward` 里打开了 `save_on_cpu`，最里层的上下文说了算，外面的打包钩子一次也没有执行。",
        en="None. `Model` opens `save_on_cpu` in its own `forward`; the innermost context wins, and the pack hook outside does not "
        "run once.",
    ),
    Prediction(
        "34.4",
        zh="和直接调用模块一样多。没有 GPU 或只有一块时，`DataParallel` 不开线程，就在调用它的线程里运行模块，所以资料里的例子在这里"
        "看不出任何差别。有两块以上的 GPU，才会是 0。",
        en="As often as without it. With no GPU or a single one `DataParallel` starts no thread: it runs the module in the calling "
        "one, so the example of the sources shows nothing here. With two GPUs or more it would be 0.",
    ),
    DISK_HOOKS,
    BYTE_STORE,
    LARGE_ONLY,
    SAVE_TO_DISK,
]
