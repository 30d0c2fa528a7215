"""Move what autograd saves somewhere else until backward needs it: `Offload`."""

import threading
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hooklab._support import packing, refuse
from hooklab._support.calls import may_be_running
from hooklab._support.compiler import refuse_compiling
from hooklab.saved.queue import Packed, Queue
from hooklab.saved.record import nbytes, owned
from hooklab.stores import MIB, Disk, PinnedMemory

__all__ = ["Offload"]


class Offload:
    """Keep what autograd saves somewhere else between forward and backward; gradients stay the same, bit for bit.

    Use it as `with Offload(model): loss = criterion(model(x), y)`, for the current thread; backward may come
    later. The innermost saved-tensor context wins, as everywhere in PyTorch; `torch.func.grad`, `vjp`, `jacrev` and
    `hessian` refuse to run beside one.

    Args:
        model: its parameters and buffers stay where they are, views of them too: they live anyway. Of other
            models, and without it, only parameters themselves (and views of them) are recognised; a buffer that a later
            forward of the block has changed without a version (running statistics) may come back as it was at the first.
        to: `"cpu"`: pinned memory, for tensors on a CUDA device; without one, everything passes through and
            counts in `.kept_bytes`. It stays pinned, for the next step, until the process ends; that of a
            `hooklab.stores.PinnedMemory()` of your own goes with it. `"disk"`: a file without a name among the temporary files;
            `hooklab.stores.Disk(folder)` for another place. Or a store of your own: `write(tensor) -> slot` and
            `read(slot) -> tensor`, both 1-D.
        keep: bytes that may stay: the newest, which backward wants first. Of a slice all the memory behind it counts,
            once for all slices of it. More stays while it may still be filled: of each thread in the block the last two
            tensors that it saved, where they need no gradient, and what was saved after them.
        prefetch: bytes that may be read ahead in backward, where the store can, and as many that wait to be used
            again; of each at least one tensor. 0: neither, for the least memory; what is saved twice is read twice.
        min_bytes: what lies in a smaller memory than this stays.

    Attributes:
        moved_bytes: written to the store so far, complete when the block ends; a tensor that is saved twice, with no
            backward in between, is written once.
        kept_bytes: saved, but not moved so far (parameters and buffers not counted); what never moves (below) counts
            as often as it was saved.

    Raises:
        TypeError, ValueError: an argument is not as above.
        OSError: in the block, if the disk is full; see `hooklab.stores.Disk`.
        TypeError: in backward, if a store gives back another dtype or number of entries than it was given.
        RuntimeError: on entry, if another `Offload` of this model is open; in backward, if a saved tensor was
            edited in place, as without `Offload`.
        NotImplementedError: on entry, inside `torch.export`; with `torch.compile(fullgraph=True)` the compiler's own error.

    If nothing of `model` was saved in a block with grad on, a warning says so, unless a checkpoint or something compiled
    ran in it.

    What never moves: memory below `min_bytes`, sparse, nested and quantized tensors, negative views, subclasses.
    A backward that itself edits a saved tensor which has moved edits a copy. A second reading, which plain PyTorch
    refuses, reads the store again then; it is refused where that copy was waiting for it.
    After an error in backward what is left of the graph stays, in the store too, until this thread runs another
    backward, as in plain PyTorch.
    One memory that is saved in two shapes, or with a gradient and without, is moved twice. An edit through `.data`,
    by NumPy, a fused optimizer or a collective is not noticed, as by autograd itself; and what is saved from that
    memory once more, in the same block and before a backward that reads back what was moved, counts as the same. A
    memory that was saved must not be emptied (`untyped_storage().resize_(0)`), as in plain PyTorch.
    A matrix product with a slice may round otherwise in the last bit: what is read back begins elsewhere in memory.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> with Offload(model, to="disk", min_bytes=0) as offload:
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> loss.backward()
        >>> offload.moved_bytes  # the input and the output of Tanh, 2 x 4 x 4 bytes each
        64

    Source: [hooks for saved tensors](https://docs.pytorch.org/docs/stable/notes/autograd.html#hooks-for-saved-tensors).
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        to: Any = "cpu",
        keep: int = 0,
        prefetch: int = 256 * MIB,
        min_bytes: int = MIB,
    ):
        refuse_compiling("Offload")
        if model is not None:
            refuse.no_module("Offload", model)
        self._model, store = model, _store(to)
        keep = refuse.count("Offload", "keep", keep)
        prefetch = refuse.count("Offload", "prefetch", prefetch)
        self._min_bytes = refuse.count("Offload", "min_bytes", min_bytes)
        self._reaches = getattr(store, "reaches", lambda tensor: True)
        self._queue = Queue(store, keep, prefetch)
        self._own: weakref.WeakSet[Any] = weakref.WeakSet()  # the storages of parameters and buffers
        self._ran = True  # the model, in this block, as far as can be told

    @property
    def moved_bytes(self) -> int:
        return self._queue.moved_bytes

    @property
    def kept_bytes(self) -> int:
        return self._queue.saved_bytes - self._queue.moved_bytes

    def __enter__(self) -> "Offload":
        refuse_compiling("Offload")
        blocks = getattr(_opened, "blocks", ())
        if self._model is not None and any(one._model is self._model for one, _ in blocks):
            raise RuntimeError("Offload: this model is being offloaded already; leave that block first")
        self._own = weakref.WeakSet(tensor.untyped_storage() for _, tensor in owned(self._model))
        # Autograd keeps both with the graph, which must not keep the model: its own result may lie in an attribute.
        pack = weakref.WeakMethod(self._pack)
        # Contexts may be left in another order, and this object be gone before its hooks.
        hooks = packing.installed(lambda tensor: (pack() or packing.hold)(tensor), _unpack)
        hooks.__enter__()
        self._queue.enter()
        _opened.blocks = *blocks, (self, hooks)
        self._ran = self._model is None
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        *_opened.blocks, (_, hooks) = _opened.blocks
        hooks.__exit__(kind, *exc_info)
        self._queue.leave()
        if kind is None:
            self._queue.make_room()
            if not self._ran:
                packing.warn_of_nothing("Offload")

    def __reduce__(self) -> Any:
        raise TypeError("Offload: it cannot be copied or pickled, nor what holds it; make one for each block")

    def __repr__(self) -> str:
        return f"Offload(moved {self.moved_bytes:,} bytes, kept {self.kept_bytes:,})"

    def _pack(self, tensor: Tensor) -> Packed | tuple[Tensor, int]:
        storage = tensor.untyped_storage() if packing.has_memory(tensor) else None
        own = storage in self._own
        self._ran = self._ran or own or may_be_running(set(self._model.modules()))
        if not own and not packing.is_parameter(tensor):
            large = storage is not None and storage.nbytes() >= self._min_bytes
            # A signal handler or a finalizer that runs in the middle of a move owns the lock.
            if large and not self._queue.lock._is_owned() and self._reaches(tensor):
                return self._queue.pack(tensor)
            with self._queue.lock:
                self._queue.saved_bytes += nbytes(tensor)
        return packing.hold(tensor)


def _unpack(packed: Packed | tuple[Tensor, int]) -> Tensor:
    return packed.queue.unpack(packed) if isinstance(packed, Packed) else packing.unhold(packed)


def _store(to: Any) -> Any:
    """What `to` means; None where there is nothing to move to."""
    if to == "disk":
        return Disk()
    if to == "cpu":
        return _pinned() if torch.cuda.is_available() else None
    if isinstance(to, type):
        advice = f"make one: to={to.__name__}()"
        raise TypeError(f"Offload(to=...): expected a store, found the class {to.__name__}; {advice}")
    if missing := [name for name in ("write", "read") if not callable(getattr(to, name, None))]:
        found = f"{to!r}" if isinstance(to, str) else f"{type(to).__name__} without {' and '.join(missing)}"
        wanted = '"cpu", "disk", or a store with write(tensor) -> slot and read(slot) -> tensor'
        raise TypeError(f"Offload(to=...): expected {wanted}; found {found}")
    return to


@cache
def _pinned() -> PinnedMemory:
    """One memory for all `Offload(to="cpu")`: pinning is slow, and the next step wants as much again."""
    return PinnedMemory()


# Of this thread: the `blocks` that are open, each with its Offload and its hooks.
_opened = threading.local()
