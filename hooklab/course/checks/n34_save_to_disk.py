"""Check 34.D: SaveToDisk, on Offload and Disk."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, grad_stays_on, refuse, refuse_first
from hooklab.saved import Offload
from hooklab.stores import Disk


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


class _Attention(nn.MultiheadAttention):
    """Saves a buffer of its own, of 4,096 bytes, and a mask of one byte less."""

    def __init__(self):
        super().__init__(8, 2, batch_first=True)
        self.register_buffer("gains", torch.rand(16, 8, 8))

    def forward(self, *args, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        odd = torch.arange(4095) % 2 == 1
        return output * self.gains + torch.where(odd, output.mean(), 0.0).mean(), weights


class _Failing(nn.Linear):
    def forward(self, x):
        super().forward(x).exp()
        raise ValueError("this model always fails")


QUERY, MEMORY = torch.arange(1024.0).cos().view(16, 8, 8), torch.arange(1280.0).sin().view(16, 10, 8)

MADE = [  # as soon as `save_to_disk` has returned
    ("returned_nothing", lambda t: t.wrapped is None),
    ("not_a_module", lambda t: not isinstance(t.wrapped, nn.Module)),
    ("not_registered", lambda t: set(t.wrapped.parameters()) != set(t.model.parameters())),
]

RUN = [  # after one forward and backward; `want` is the run of the solution
    ("skipped_hooks", lambda t: t.called == 0),
    ("ran_twice", lambda t: t.called > 1),
    ("wrong_output", lambda t: not torch.equal(t.got.output, t.want.output)),
    ("no_tools", lambda t: not t.got.writes and not t.tools),
    ("nothing_moved", lambda t: not t.got.writes),
    ("wrong_folder", lambda t: _folders(t.got.writes) != {t.folder}),
    ("moved_own", lambda t: t.moved),
    ("moved_small", lambda t: t.smallest < 4096),
    ("threshold_off", lambda t: t.smallest > 4096),
    ("kept_some", lambda t: t.kept > 0),
    ("wrong_gradients", lambda t: not all(map(torch.equal, t.got.grads, t.want.grads))),
]

COPIED = [  # after a run of the copy and one of the first wrapper
    ("copy_runs_original", lambda t: any(grad is None for grad in t.got.grads)),
    ("copy_moves_own", lambda t: _of_its_own(t.got.writes, t.twin)),
    ("copy_differs", lambda t: not t.got.writes or not torch.equal(t.got.output, t.want.output)),
]


def examine_save_to_disk(answer):
    """In a thread of its own: a context that is left open goes with it."""
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        TemporaryDirectory(ignore_cleanup_errors=True) as elsewhere,
        _seen() as seen,
    ):
        _in_thread(lambda: _examine_wrapper(answer, folder, elsewhere, seen))
        gc.collect()  # a file must be closed before its folder goes, on Windows


def _in_thread(run):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(grad_stays_on()(run)).result()


def _examine_wrapper(answer, folder, elsewhere, seen):
    torch.manual_seed(0)
    model = _Attention()
    want = _attend(save_to_disk(model, folder), model, seen)
    called = []
    model.register_forward_hook(lambda *args: called.append(1))
    seen.tools.clear()
    wrapped = answer(model, folder)
    refuse_first(MADE, wrapped=wrapped, model=model)
    got = _attend(wrapped, model, seen)
    found = {"called": len(called), "tools": seen.tools, "moved": len(_of_its_own(got.writes, model))}
    found["smallest"] = min((write.memory for write in got.writes), default=0)
    found["kept"] = want.size - got.size
    refuse_first(RUN, got=got, want=want, folder=folder, **found)
    if not _in_thread(lambda: _attend(wrapped, model, seen)).writes:
        refuse("other_thread")
    if _written_outside(seen):
        refuse("left_open")
    if wrapped is model or _attend(model, model, seen).writes:
        refuse("module_changed")
    failing = answer(_Failing(3, 3), folder)
    with suppress(ValueError):
        failing(torch.ones(3))
        refuse("hid_error")
    if _written_outside(seen):
        refuse("left_after_error")
    _examine_copy(wrapped, seen)
    _examine_two_folders(answer, folder, elsewhere, seen)


def _attend(wrapped, model, seen):
    """One forward and backward: the output, the gradients of `model`, what was written, and how many bytes that is."""
    model.zero_grad()
    seen.writes.clear()
    got = wrapped(QUERY, MEMORY, value=MEMORY, need_weights=False)
    if got is None:
        refuse("forward_returned_nothing")
    if isinstance(got[0], Tensor) and not got[0].requires_grad:
        refuse("no_graph")
    got[0].square().sum().backward()
    grads = [param.grad for param in model.parameters()]
    # Of the content: a store around a `Disk` may be given a copy, which lies in a memory no larger than that.
    size = sum(write.content.nbytes for write in seen.writes)
    return SimpleNamespace(output=got[0].detach(), grads=grads, writes=list(seen.writes), size=size)


def _written_outside(seen):
    seen.writes.clear()
    torch.zeros(10_000, requires_grad=True).exp()
    return seen.writes


def _examine_copy(wrapped, seen):
    try:
        twin = deepcopy(wrapped)
    except TypeError as error:
        refuse("not_copyable", error=error)
    refuse_first(COPIED, twin=twin, got=_attend(twin, twin, seen), want=_attend(wrapped, wrapped, seen))


def _examine_two_folders(answer, folder, elsewhere, seen):
    first, second = (answer(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), where) for where in (folder, elsewhere))
    for wrapped, where, reason in ((first, folder, "latest_call"), (second, elsewhere, "wrong_folder")):
        seen.writes.clear()
        wrapped(torch.ones(64, 64)).sum().backward()
        if _folders(seen.writes) - {where}:
            refuse(reason)


# What the disks see.


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


@contextmanager
def _seen():
    """While this is open: `writes` is what every `Disk` is given, `tools` each `Disk` made and each `Offload` opened."""
    seen, write = SimpleNamespace(writes=[], tools=[]), Disk.write

    def noting(disk, tensor):
        storage = tensor.untyped_storage()
        seen.writes.append(_Write(disk.folder, storage.data_ptr(), storage.nbytes(), tensor.detach().clone()))
        return write(disk, tensor)

    def counting(run):
        def counted(*args, **kwargs):
            seen.tools.append(run)
            return run(*args, **kwargs)

        return counted

    with (
        patch.object(Disk, "write", noting),
        patch.object(Disk, "__init__", counting(Disk.__init__)),
        patch.object(Offload, "__enter__", counting(Offload.__enter__)),
    ):
        yield seen


def _folders(writes):
    return {write.folder for write in writes}


def _of_its_own(writes, model):
    """The parameters and buffers that were written, or copies of them."""
    return [own for own in (*model.parameters(), *model.buffers()) if any(write.is_of(own) for write in writes)]


SAVE_TO_DISK = Exercise("34.D", examine_save_to_disk, save_to_disk)

EXERCISES = [SAVE_TO_DISK]
