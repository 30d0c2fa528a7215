"""What `saved_tensors` returns: a record of every tensor that autograd saves, and of what is still held."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph

from hooklab._packing import (
    hold,
    installed,
    is_parameter,
    outer_hooks,
    refuse_compiling,
    unhold,
    warn_of_nothing,
)
from hooklab._table import table
from hooklab._walk import forget_interrupted, leave

__all__ = ["SavedTensor", "SavedTensors", "owned"]

NODE_CREATION_HOOK = getattr(graph, "node_creation_hook", None)  # since PyTorch 2.15
# A leaf's; and what an operation in place makes for itself, between what it saves first and last.
SAVES_NOTHING = "AccumulateGrad", "CloneBackward0", "AsStridedBackward0"


@dataclass(slots=True)
class SavedTensor:
    """One tensor that an operation has saved for backward.

    Attributes:
        module: the innermost module whose forward was running; empty outside the model.
        operation: the Node that saved it, `"MulBackward0"`; empty for what no Node saves, the input of a
            checkpoint. Before PyTorch 2.15 known once backward has used it.
        shape, dtype: of the tensor.
        bytes: of its elements, as a copy would need them.
        storage: the number of the memory it lies in; equal numbers share memory.
        storage_bytes: of the whole memory, which a slice keeps alive too.
        version: how often that memory had been edited in place.
        owner: the name of the parameter or buffer it belongs to; empty for what the forward has computed.
    """

    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    storage: int
    storage_bytes: int
    version: int
    owner: str


class SavedTensors(Sequence[SavedTensor]):
    """Every tensor that autograd saved in the block, in order: what `saved_tensors` returns.

    Attributes:
        held: bytes of memory held for backward after every event (a tensor is saved, or let go), each memory
            counted once, parameters and buffers not. Goes on after the block.
        events: for each of them the module whose tensor it was, and `"saved"` or `"let go"`.
    """

    def __init__(self, model: nn.Module | None):
        self.held: list[int] = []
        self.events: list[tuple[str, str]] = []
        self._model = model
        self._records: list[SavedTensor] = []
        # Of storages: the number and the owner.
        self._numbers: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
        self._count = 0
        self._holders: dict[int, int] = {}  # how many saved tensors hold a storage, by number
        self._unnamed: list[SavedTensor] = []  # saved, and the Node is not there yet
        self._owners: dict[int, str] = {}
        self._running: list[tuple[nn.Module, str]] = []  # the calls that are running, with the name
        self._thread = 0
        self._contexts: ExitStack | None = None
        self._ours: Any = None  # our pair of hooks, while the block is open

    # ---- what a reader asks for ----

    @property
    def total_bytes(self) -> int:
        """Of all saved tensors, each as often as it was saved: what copying every one would move."""
        return sum(record.bytes for record in self._records)

    @property
    def unique_bytes(self) -> int:
        """Of the memory behind them, each counted once: what autograd keeps alive."""
        return sum(_memories(self._records).values())

    @property
    def parameter_bytes(self) -> int:
        """Of parameters and buffers among the unique ones: they live anyway."""
        return sum(_memories(record for record in self._records if record.owner).values())

    def table(self) -> str:
        """A line for each module: tensors saved, their bytes, and the bytes nobody before it had saved."""
        rows = [("module", "saved by", "tensors", "bytes", "new bytes")]
        seen: set[int] = set()
        for module in dict.fromkeys(record.module for record in self._records):
            records = [record for record in self._records if record.module == module]
            new = _memories(r for r in records if r.storage not in seen and not r.owner)
            seen.update(new)
            operations = dict.fromkeys(_short(record.operation) for record in records)
            sizes = (len(records), sum(record.bytes for record in records), sum(new.values()))
            rows.append((module or "-", ", ".join(operations), *(f"{size:,}" for size in sizes)))
        new_bytes = self.unique_bytes - self.parameter_bytes
        rows.append(("total", "", *(f"{size:,}" for size in (len(self), self.total_bytes, new_bytes))))
        return table(rows, left=2)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return (
            f"SavedTensors({len(self)} tensors, {self.total_bytes:,} bytes, {self.unique_bytes:,} of them unique, "
            f"{self.parameter_bytes:,} in parameters and buffers)"
        )

    # ---- the block ----

    def __enter__(self) -> "SavedTensors":
        refuse_compiling("saved_tensors")
        if self._contexts is not None:
            raise RuntimeError("saved_tensors: this block is open already; make another saved_tensors(model)")
        self._contexts, self._thread = ExitStack(), _thread()
        try:
            for name, module in self._model.named_modules() if self._model is not None else ():
                self._hang_on(module, name or type(module).__name__)
            self._owners = {id(tensor.untyped_storage()): name for name, tensor in owned(self._model)}
            self._contexts.enter_context(installed(*self._packing()))
            self._ours = outer_hooks()
            if NODE_CREATION_HOOK is not None:
                self._contexts.enter_context(NODE_CREATION_HOOK(self._on_node))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._leave()
        if kind is None and not self._records:
            warn_of_nothing("saved_tensors", self._model)

    def _leave(self) -> None:
        contexts, self._contexts, self._ours = self._contexts, None, None
        if contexts is not None:
            contexts.close()
        self._running.clear()
        self._unnamed.clear()

    def _hang_on(self, module: nn.Module, name: str) -> None:
        def begin(module: nn.Module, args: tuple) -> None:
            if _thread() == self._thread:
                if module is self._model:
                    forget_interrupted(self._running, module)
                self._running.append((module, name))

        def end(module: nn.Module, args: tuple, output: object) -> None:
            if _thread() == self._thread and leave(self._running, module):
                self._running.pop()

        self._contexts.callback(module.register_forward_pre_hook(begin).remove)
        self._contexts.callback(module.register_forward_hook(end, always_call=True).remove)

    # ---- the hooks ----

    def _packing(self) -> tuple[Callable, Callable]:
        outer = outer_hooks()

        def pack(tensor: Tensor) -> Saved:
            record = self._record(tensor)
            return Saved(self, record, hold(tensor) if outer is None else outer[0](tensor))

        def unpack(saved: Saved) -> Tensor:
            if NODE_CREATION_HOOK is None and not saved.record.operation:
                saved.record.operation = _running_node()
            return unhold(saved.content) if outer is None else outer[1](saved.content)

        pack.hooklab_outer = outer
        return pack, unpack

    def _record(self, tensor: Tensor) -> SavedTensor:
        number, held, owner = self._storage(tensor)
        module, shape = self._running[-1][1] if self._running else "", _shape(tensor)
        memory = nbytes(tensor), number, held, tensor._version, owner
        record = SavedTensor(module, "", shape, tensor.dtype, *memory)
        self._records.append(record)
        self._unnamed.append(record)
        self._holders[number] = self._holders.get(number, 0) + 1
        self._note(record, "saved", held if self._holders[number] == 1 else 0)
        return record

    def _storage(self, tensor: Tensor) -> tuple[int, int, str]:
        """Number, bytes and owner of the memory behind a tensor."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse: it has none of its own
            self._count += 1
            return self._count, nbytes(tensor), ""
        if storage not in self._numbers:
            self._count += 1
            owner = self._owners.get(id(storage), "parameter" if is_parameter(tensor) else "")
            self._numbers[storage] = self._count, owner
        number, owner = self._numbers[storage]
        return number, storage.nbytes(), owner

    def _on_node(self, node: graph.Node) -> None:
        if type(node).__name__ in SAVES_NOTHING:
            return
        # A checkpoint has saved its input by itself, and its Nodes are not ours.
        displaced = not self._reached()
        for record in self._unnamed:
            record.operation = "" if displaced else type(node).__name__
        self._unnamed.clear()

    def _reached(self) -> bool:
        """True if what is saved now comes to our hooks, perhaps through others that pass it on."""
        top = outer_hooks()
        while top is not None and top != self._ours:
            top = getattr(top[0], "hooklab_outer", None)
        return top is not None

    def _let_go(self, record: SavedTensor) -> None:
        self._holders[record.storage] -= 1
        self._note(record, "let go", 0 if self._holders[record.storage] else -record.storage_bytes)

    def _note(self, record: SavedTensor, event: str, change: int) -> None:
        held = self.held[-1] if self.held else 0
        self.held.append(held if record.owner else held + change)
        self.events.append((record.module, event))


class Saved:
    """What the graph holds in place of a saved tensor; when it lets go, the record knows."""

    __slots__ = ("content", "record", "records")

    def __init__(self, records: SavedTensors, record: SavedTensor, content: Any):
        self.records, self.record, self.content = records, record, content

    def __del__(self) -> None:
        self.records._let_go(self.record)


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements; of a sparse tensor, of its indices and values."""
    if tensor.layout == torch.strided:
        return tensor.nbytes
    if tensor.layout == torch.sparse_coo:
        parts = tensor._indices(), tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    elif tensor.layout == torch.jagged:
        parts = (tensor.values(),)
    else:
        return tensor.numel() * tensor.itemsize
    return sum(part.nbytes for part in parts)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_nested and tensor.layout == torch.strided:  # its parts differ
        return (tensor.size(0),)
    return tuple(tensor.shape)


def owned(model: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that have memory, by name."""
    if model is not None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:
                yield name, tensor


def _memories(records: Iterable[SavedTensor]) -> dict[int, int]:
    """The bytes of each memory that they lie in, by its number."""
    return {record.storage: record.storage_bytes for record in records}


def _short(operation: str) -> str:
    return operation.removesuffix("0").removesuffix("Backward") or "-"


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()  # which the compiler does not know


def _running_node() -> str:
    """The Node that backward is about to run; empty outside backward."""
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    return "" if node is None else node.name()
