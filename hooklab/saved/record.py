"""What `saved_tensors` returns: a record of every tensor that autograd saves, and of what is still held."""

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph

from hooklab._support import packing, refuse
from hooklab._support.calls import calls, may_be_running
from hooklab._support.compiler import eager, refuse_compiling
from hooklab._support.nested import first_shape
from hooklab._support.nodes import node_name
from hooklab._support.table import table

__all__ = ["SavedTensor", "SavedTensors", "owned"]

NODE_CREATION_HOOK = getattr(graph, "node_creation_hook", None)  # since PyTorch 2.15
# A leaf's; and what an operation in place makes for itself, between what it saves first and last.
SAVES_NOTHING = "AccumulateGrad", "CloneBackward0", "AsStridedBackward0"
SPARSE = {  # what such a tensor is made of
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


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
    """Every tensor that autograd saved in the block, in order: what `saved_tensors` returns."""

    def __init__(self, model: nn.Module | None):
        self._model = model
        self._records: list[SavedTensor] = []
        self._log: list[tuple[SavedTensor, int]] = []  # 1: saved, -1: let go
        # Of storages: the number and the owner. Dead ones go: others come to lie in their places, and hash as they did.
        self._memories: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._open: list[SavedTensors] = []  # while the block is open, itself
        self._ran = model is None  # the model, as far as can be told

    def __reduce__(self) -> Any:
        """What was recorded can be copied and pickled, as a part of a model perhaps; the block stays where it is."""
        return SavedTensors, (None,), {"_records": list(self._records), "_log": list(self._log)}

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

    @property
    def held(self) -> list[int]:
        """Bytes of memory held for backward after every event (a tensor is saved, or let go), also after the block.

        Each memory is counted once, parameters and buffers not.
        """
        held, now, holders, sizes = [], 0, Counter(), Counter()
        for record, change in self._log:
            holders[record.storage] += change
            if not record.owner:  # a sparse tensor is larger than its values, which may be saved alone
                size = max(sizes[record.storage], record.storage_bytes) if holders[record.storage] else 0
                now, sizes[record.storage] = now + size - sizes[record.storage], size
            held.append(now)
        return held

    @property
    def events(self) -> list[tuple[str, str]]:
        """For each of them the module whose tensor it was, and `"saved"` or `"let go"`."""
        return [(record.module, "saved" if change > 0 else "let go") for record, change in self._log]

    def table(self) -> str:
        """A line for each module: tensors saved, their bytes, and the bytes nobody before it had saved."""
        rows = [("module", "saved by", "tensors", "bytes", "new bytes")]
        seen: set[int] = set()
        modules: defaultdict[str, list[SavedTensor]] = defaultdict(list)
        for record in self._records:
            modules[record.module].append(record)
        for module, records in modules.items():
            new = _memories(r for r in records if r.storage not in seen and not r.owner)
            seen.update(new)
            names = (r.operation.removesuffix("0").removesuffix("Backward") or "-" for r in records)
            sizes = len(records), sum(record.bytes for record in records), sum(new.values())
            rows.append((module or "-", ", ".join(dict.fromkeys(names)), *sizes))
        rows.append(("total", "", len(self), self.total_bytes, self.unique_bytes - self.parameter_bytes))
        return table(rows, left=2)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        sizes = f"{len(self)} tensors, {self.total_bytes:,} bytes, {self.unique_bytes:,} of them unique"
        return f"SavedTensors({sizes}, {self.parameter_bytes:,} in parameters and buffers)"

    # ---- the block ----

    def __enter__(self) -> "SavedTensors":
        refuse_compiling("saved_tensors")
        if self._open:
            raise RuntimeError("saved_tensors: this block is open already; make another saved_tensors(model)")
        # Of what is saved, and the Node is not there yet: whether the graph still holds it, its record, under which hooks.
        self._unnamed: list[tuple[weakref.ref[Saved], SavedTensor, Any]] = []
        owners = ((tensor.untyped_storage(), name) for name, tensor in owned(self._model))
        self._owners = weakref.WeakKeyDictionary(owners)
        modules = self._model.named_modules() if self._model is not None else ()
        self._names = {module: name or type(module).__name__ for name, module in modules}
        with ExitStack() as contexts:
            block = [self]  # each has its own
            contexts.callback(block.clear)
            contexts.callback(self._unnamed.clear)  # it holds the hooks of others
            contexts.enter_context(packing.installed(*_hooks(block)))
            if NODE_CREATION_HOOK is not None:
                # DistributedDataParallel keeps this one as well.
                on_node = eager(lambda node: block[0]._on_node(node) if block else None)
                contexts.enter_context(NODE_CREATION_HOOK(on_node))
            self._open, self._contexts = block, contexts.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._contexts.close()
        if kind is None and not self._ran:
            packing.warn_of_nothing("saved_tensors")

    # ---- the hooks ----

    def _record(self, tensor: Tensor) -> "Saved":
        # Of the calls that are running in this thread, the innermost first.
        module = next((self._names[call["self"]] for call in calls() if call["self"] in self._names), "")
        record = SavedTensor(module, "", first_shape(tensor), tensor.dtype, *self._memory(tensor))
        self._records.append(record)
        self._ran = self._ran or record.owner not in ("", "parameter") or may_be_running(set(self._names))
        saved = Saved(self._log, record)
        # The hooks that are active are ours, or others that pass on to them.
        self._unnamed.append((weakref.ref(saved), record, packing.outer_hooks()))
        return saved

    def _memory(self, tensor: Tensor) -> tuple[int, int, int, int, str]:
        """Its bytes; and number, bytes, version and owner of the memory behind it."""
        parts, size = SPARSE.get(tensor.layout), nbytes(tensor)
        try:  # one stands for all parts
            storage = (getattr(tensor, parts[-1])() if parts else tensor).untyped_storage()
            whole = size if parts else storage.nbytes()
        except (RuntimeError, NotImplementedError):  # it has none of its own
            return size, next(self._numbers), size, tensor._version, ""
        # Autograd may run in several threads: each memory has one number, and each number one memory.
        if (found := self._memories.get(storage)) is None:
            owner = self._owners.get(storage, "parameter" if packing.is_parameter(tensor) else "")
            found = self._memories.setdefault(storage, (next(self._numbers), owner))
        return size, found[0], whole, tensor._version, found[1]

    @eager
    def _on_node(self, node: graph.Node) -> None:
        if type(node).__name__ not in SAVES_NOTHING:
            # Those of an operation that failed are gone. A checkpoint saves its input by itself, before its own hooks come.
            for saved, record, hooks in self._unnamed:
                if saved() is not None and hooks == packing.outer_hooks():
                    record.operation = node_name(node)
            self._unnamed.clear()


class Saved:
    """What the graph holds beside the content of a saved tensor; when it lets go, the log knows."""

    def __init__(self, log: list[tuple[SavedTensor, int]], record: SavedTensor):
        self.log, self.record = log, record
        log.append((record, 1))

    @eager
    def __del__(self) -> None:
        self.log.append((self.record, -1))


def _hooks(of: list[SavedTensors]) -> tuple[Callable, Callable]:
    """A pair of hooks. Autograd keeps both with the graph, which must not keep the model: a result may be its attribute."""
    outer = packing.outer_hooks() or (packing.hold, packing.unhold)

    def pack(tensor: Tensor) -> tuple[Any, Saved | None]:
        content = outer[0](tensor)
        return content, (of[0]._record(tensor) if of else None)  # contexts may be left in another order

    def unpack(packed: tuple[Any, Saved | None]) -> Tensor:
        content, saved = packed
        # Outside backward there is no Node.
        if saved and NODE_CREATION_HOOK is None and (node := torch._C._current_autograd_node()) is not None:
            saved.record.operation = saved.record.operation or node_name(node)
        return outer[1](content)

    return pack, unpack


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements; of a sparse tensor, of its indices and values."""
    parts = [getattr(tensor, part)() for part in SPARSE.get(tensor.layout, ())] or [tensor]
    return sum(part.numel() * part.itemsize for part in parts)


def owned(model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that have memory, by name."""
    named = () if model is None else (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in named if packing.has_memory(tensor)]


def _memories(records: Iterable[SavedTensor]) -> dict[int, int]:
    """The bytes of each memory that they lie in, by its number; the largest counts."""
    return {r.storage: r.storage_bytes for r in sorted(records, key=lambda r: r.storage_bytes)}


def saved_tensors(model: nn.Module | None = None) -> SavedTensors:
    """Every tensor that autograd saves inside the block: which operation, which module, how many bytes.

    Use it as `with saved_tensors(model) as saved:`, for the current thread. It changes no value and no gradient,
    and passes tensors on to the saved-tensor hooks that are active on entry; contexts opened inside (a
    checkpoint's) displace it, so what they save is not seen. `torch.func.grad`, `vjp`, `jacrev` and `hessian`
    refuse to run beside saved-tensor hooks. If nothing of `model` was saved in a block with grad on, a warning says so,
    unless a checkpoint or something compiled ran in it.
    PyTorch frees a graph whose Nodes Python has seen (here, or by `.grad_fn`) recursively: some 30,000 operations, one
    upon the other, may end the process with a segmentation fault.

    Args:
        model: names the modules, and the parameters and buffers, which live anyway, as they are when the block begins. Of
            what it is given later, parameters are called `parameter`, and buffers count as computed.

    Returns:
        A sequence of `SavedTensor` (module, operation, shape, dtype, bytes, storage, storage_bytes, version,
        owner), with `.total_bytes` (each as often as it was saved), `.unique_bytes` (the memory behind them,
        each counted once), `.parameter_bytes` (of these: parameters and buffers), `.held` (bytes after every
        event, also in backward; see `draw.memory`) and `.table()`.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: on entry, if this block is open already; in backward, if a saved tensor was edited in place, as without it.
        NotImplementedError: on entry, inside `torch.export`; with `torch.compile(fullgraph=True)` the compiler's own error.

    Example:
        >>> a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        >>> with saved_tensors() as saved:
        ...     y = a * b
        >>> [(record.operation, record.bytes) for record in saved]
        [('MulBackward0', 12), ('MulBackward0', 12)]

    Source: [saved tensors](https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors).
    """
    if model is not None:
        refuse.no_module("saved_tensors", model)
    return SavedTensors(model)
