"""`saved_tensors`: a record of every tensor that autograd saves, and of what is still held for backward."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.autograd import graph

from hooklab._support import packing, refuse
from hooklab._support.compiled import refuse_compiling
from hooklab._support.module_stack import ModuleStack
from hooklab._support.nested import first_shape
from hooklab._support.nodes import node_name
from hooklab._support.table import Tabular, table
from hooklab._support.torch_private import eager, graph_task, outer_hooks, recomputing
from hooklab.saved.held import Dropped, Held, SavedTensor, Storages, nbytes, owned

__all__ = ["SavedTensor", "SavedTensors", "nbytes", "owned", "saved_tensors"]

# A leaf's Node, and those that an operation in place makes for itself between its first save and its last.
SAVES_NOTHING = "AccumulateGrad", "CloneBackward0", "AsStridedBackward0"
CHECKPOINT = "torch.utils.checkpoint"  # the module that the hooks of a checkpoint are defined in


class SavedTensors(Tabular, Sequence[SavedTensor]):
    """Every tensor that autograd saved in the block, in order: what `saved_tensors` returns."""

    def __init__(self, model: nn.Module | None):
        self._model = None if model is None else weakref.ref(model)
        self._saved: list[SavedTensor] = []
        self._log: list[tuple[SavedTensor, str]] = []  # each with "saved", "recomputed" or "let go"
        self._storages = Storages()
        self._modules: ModuleStack | None = None  # both while the block is open
        self._contexts: ExitStack | None = None
        self._unmetered = False  # a checkpoint saved something where no module of the model was running

    # ---- what a reader asks for ----

    @property
    def total_bytes(self) -> int:
        """Bytes of all saved tensors, each as often as it was saved: what copying every one would move."""
        return sum(record.bytes for record in self._saved)

    @property
    def unique_bytes(self) -> int:
        """Bytes of the memory behind them, each counted once: what autograd keeps alive."""
        return sum(_by_storage(self._saved).values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters and buffers among the unique ones: they live anyway."""
        return sum(_by_storage(record for record in self._saved if record.owner).values())

    @property
    def held(self) -> list[int]:
        """Bytes held for backward after every event, also after the block; parameters and buffers are not counted.

        What a checkpoint recomputes counts from its recomputation until backward has used it.
        """
        held, now, holders, sizes = [], 0, Counter[int](), Counter[int]()
        for record, event in self._log:
            holders[record.storage] += -1 if event == "let go" else 1
            if not record.owner:  # a sparse tensor is larger than its values, which may be saved alone
                size = max(sizes[record.storage], record.storage_bytes) if holders[record.storage] else 0
                now, sizes[record.storage] = now + size - sizes[record.storage], size
            held.append(now)
        return held

    @property
    def events(self) -> list[tuple[str, str]]:
        """The module of each event's tensor, and `"saved"`, `"recomputed"` (by a checkpoint) or `"let go"`."""
        return [(record.module, event) for record, event in self._log]

    @property
    def misses_recomputation(self) -> bool:
        """True if a checkpoint saved something outside the model's layers: `held` leaves its recomputation out."""
        return self._unmetered

    def table(self) -> str:
        """A line for each module: tensors saved, their bytes, and the bytes nobody before it had saved."""
        return table([self._columns(), *self._cells()], left=2)

    def _columns(self) -> Sequence[str]:
        return "module", "saved by", "tensors", "bytes", "new bytes"

    def _records(self) -> Iterator[Sequence[str | int]]:
        seen: set[int] = set()
        modules: defaultdict[str, list[SavedTensor]] = defaultdict(list)
        for record in self._saved:
            modules[record.module].append(record)
        for module, records in modules.items():
            new = _by_storage(r for r in records if r.storage not in seen and not r.owner)
            seen.update(new)
            names = (r.operation.removesuffix("0").removesuffix("Backward") or "-" for r in records)
            sizes = len(records), sum(record.bytes for record in records), sum(new.values())
            yield module or "-", ", ".join(dict.fromkeys(names)), *sizes

    def _cells(self) -> Iterator[Sequence[str | int]]:
        yield from self._records()
        yield "total", "", len(self), self.total_bytes, self.unique_bytes - self.parameter_bytes

    def __getitem__(self, index: Any) -> Any:
        return self._saved[index]

    def __len__(self) -> int:
        return len(self._saved)

    def __repr__(self) -> str:
        sizes = f"{len(self)} tensors, {self.total_bytes:,} bytes, {self.unique_bytes:,} of them unique"
        return f"SavedTensors({sizes}, {self.parameter_bytes:,} in parameters and buffers)"

    def __reduce__(self) -> Any:
        """What was recorded can be copied and pickled; the block stays where it is."""
        kept = {"_saved": list(self._saved), "_log": list(self._log)}
        return SavedTensors, (None,), {**kept, "_unmetered": self._unmetered}

    # ---- the block ----

    def __enter__(self) -> "SavedTensors":
        refuse_compiling("saved_tensors")
        if self._contexts is not None:
            raise RuntimeError("saved_tensors: this block is open already; make another saved_tensors(model)")
        model = self._model() if self._model is not None else None
        self._before, self._task = len(self._saved), graph_task()
        self._unnamed: list[tuple[weakref.ref[Held], Any]] = []  # saved under these hooks, by a Node to come
        self._covered: list[Callable] = []  # the pack hooks of the checkpoints that are running
        self._dropped: weakref.WeakKeyDictionary[Callable, list[Any]] = weakref.WeakKeyDictionary()
        self._storages.name_owners(owned(model))
        with ExitStack() as contexts:
            contexts.enter_context(packing.installed(*self._hooks(self._save)))
            if hasattr(graph, "node_creation_hook"):  # since PyTorch 2.15
                contexts.enter_context(graph.node_creation_hook(self._on_node))
            if model is not None:
                self._modules = ModuleStack(model, self._under_a_checkpoint)
                contexts.callback(self._modules.remove)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        contexts, self._contexts, self._modules = self._contexts, None, None
        if contexts is not None:
            contexts.close()
        self._unnamed.clear()  # it holds the hooks of others
        if kind is None and self._model is not None and len(self._saved) == self._before:
            packing.warn_of_nothing("saved_tensors")

    # ---- the hooks ----

    def _hooks(self, note: Callable[[Tensor], Held]) -> tuple[Callable, Callable]:
        """A pair that notes what is saved and passes it on. Autograd keeps both with the graph."""
        outer = outer_hooks() or (packing.hold, packing.unhold)

        def pack(tensor: Tensor) -> tuple[Any, Held | None]:
            content = outer[0](tensor)
            # Contexts may be left in another order than the one they were entered in.
            return content, (note(tensor) if self._contexts is not None else None)

        def unpack(packed: tuple[Any, Held | None]) -> Tensor:
            content, held = packed
            tensor = outer[1](content)
            if held is not None:
                held.use()
            return tensor

        return pack, unpack

    def _record(self, tensor: Tensor) -> SavedTensor:
        module = self._modules.innermost() if self._modules is not None else ""
        return SavedTensor(module, "", first_shape(tensor) or (), tensor.dtype, *self._storages.of(tensor))

    def _save(self, tensor: Tensor) -> Held:
        record = self._record(tensor)
        self._saved.append(record)
        held = Held(self._log, record)
        # The hooks that are active are ours, or others that pass on to them.
        self._unnamed.append((weakref.ref(held), outer_hooks()))
        return held

    def _under_a_checkpoint(self) -> AbstractContextManager:
        """For the call of a module: where the hooks of a checkpoint hide ours, a pair of ours upon them."""
        hooks = outer_hooks() or (None, None)
        checkpoint = getattr(hooks[0], "passes_on_to", hooks[0])  # another block may have put its pair there
        if not _of_checkpoint(checkpoint) or checkpoint in self._covered or recomputing(self._task):
            return nullcontext()
        return self._cover(checkpoint)

    @contextmanager
    def _cover(self, checkpoint: Any) -> Iterator[None]:
        dropped = self._dropped.setdefault(checkpoint, [])
        pack, unpack = self._hooks(lambda tensor: Dropped(self._log, self._record(tensor), dropped))
        # A checkpoint marks its hooks, so that a selective one passes what it keeps on to the hooks around them.
        vars(pack).update(vars(checkpoint), passes_on_to=checkpoint)
        with packing.installed(pack, unpack):
            self._covered.append(checkpoint)
            yield
        self._covered.remove(checkpoint)
        vars(pack).clear()  # the graph keeps it, and must not keep the hooks around the checkpoint

    @eager
    def _on_node(self, node: graph.Node) -> None:
        if self._contexts is None or type(node).__name__ in SAVES_NOTHING:
            return
        hooks = outer_hooks()
        # What an operation that failed has saved is gone. A checkpoint saves its input by itself, before its hooks come.
        for reference, around in self._unnamed:
            if around == hooks and (held := reference()) is not None:
                held.record.operation = node_name(node)
        self._unnamed.clear()
        if hooks is not None and _of_checkpoint(hooks[0]) and not recomputing(self._task):
            self._unmetered |= any(name.startswith("_raw_saved_") for name in dir(node))


def _of_checkpoint(hook: object) -> bool:
    return getattr(hook, "__module__", "") == CHECKPOINT


def _by_storage(records: Iterable[SavedTensor]) -> dict[int, int]:
    """The bytes of each memory that they lie in, by its number; the largest counts."""
    return {r.storage: r.storage_bytes for r in sorted(records, key=lambda r: r.storage_bytes)}


def saved_tensors(model: nn.Module | None = None) -> SavedTensors:
    """Every tensor that autograd saves inside the block: which operation, which module, how many bytes.

    `with saved_tensors(model) as saved: loss = model(x).sum()`, for the current thread. Values and gradients stay the
    same. Tensors are passed on to the saved-tensor hooks that are active on entry.

    Args:
        model: names the modules, and the parameters and buffers, which live anyway. Without it neither is named, and
            what a checkpoint recomputes is not counted in `.held`.

    Returns:
        A sequence of `SavedTensor` (module, operation, shape, dtype, bytes, storage, storage_bytes, version,
        owner), with `.total_bytes` (each as often as it was saved), `.unique_bytes` (the memory behind them,
        each counted once), `.parameter_bytes` (the part of it in parameters and buffers), `.held` (bytes after every
        event, also in backward; see `draw.memory`), `.table()` and `.to_dataframe()`.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: on entry, if this block is open already; in backward, if a saved tensor was edited in place.
        NotImplementedError: on entry, inside `torch.export`; `torch.compile(fullgraph=True)` gives its own error.

    Example:
        >>> import torch
        >>> a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        >>> with saved_tensors() as saved:
        ...     y = a * b
        >>> [(record.operation, record.bytes) for record in saved]
        [('MulBackward0', 12), ('MulBackward0', 12)]

    Limits: docs/limits.md#saved_tensors (a checkpoint's own tensors, compiled models, `torch.func`).
    Source: [saved tensors](https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors).
    """
    if model is not None:
        refuse.no_module("saved_tensors", model)
    return SavedTensors(model)
