"""`saved_tensors`: a record of every tensor that autograd saves, and of what is still held for backward."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.autograd import graph

from hooklab._support import packing, refuse
from hooklab._support.compiled import refuse_compiling
from hooklab._support.module_stack import ModuleStack
from hooklab._support.nested import first_shape
from hooklab._support.nodes import node_name
from hooklab._support.storages import Storages, nbytes, owned
from hooklab._support.table import Tabular, table
from hooklab._support.torch_private import (
    eager,
    graph_task,
    is_checkpoint_hook,
    outer_hooks,
    recomputing,
    saves_something,
)
from hooklab.saved.held_memory import Dropped, Held, SavedTensor

__all__ = ["SavedTensor", "SavedTensors", "saved_tensors"]

# A leaf's Node, and those that an operation in place makes for itself between its first save and its last.
SAVES_NOTHING = "AccumulateGrad", "CloneBackward0", "AsStridedBackward0"


class SavedTensors(Tabular, Sequence[SavedTensor]):
    """Every tensor that autograd saved in the block, in order: what `saved_tensors` returns."""

    _columns = "module", "saved by", "tensors", "bytes", "new bytes"
    _text_columns = 2

    def __init__(self, model: nn.Module | None):
        self.misses_recomputation = False  # True if a checkpoint saved something outside the model's layers
        self._model = None if model is None else weakref.ref(model)
        self._saved: list[SavedTensor] = []
        self._log: list[tuple[SavedTensor, str]] = []  # each with "saved", "recomputed" or "freed"
        self._storages = Storages()
        self._modules: ModuleStack | None = None  # both while the block is open
        self._contexts: ExitStack | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all saved tensors, each as often as it was saved: what copying every one would move."""
        return sum(record.bytes for record in self._saved)

    @property
    def unique_bytes(self) -> int:
        """Bytes of the storages behind them, each counted once: what autograd keeps alive."""
        return sum(_by_storage(self._saved).values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters and buffers among the unique ones: they live anyway."""
        return sum(_by_storage(record for record in self._saved if record.owner).values())

    @property
    def held(self) -> list[int]:
        """Bytes held for backward after every event, also after the block, without parameters and buffers."""
        held, now, holders = [], 0, Counter[int]()
        sizes = _by_storage(record for record, _ in self._log if not record.owner)
        for record, event in self._log:
            change = -1 if event == "freed" else 1
            holders[record.storage] += change
            if holders[record.storage] == max(change, 0):  # the first tensor to hold it, or the last
                now += change * sizes.get(record.storage, 0)
            held.append(now)
        return held

    @property
    def events(self) -> list[tuple[str, str]]:
        """The module of each event's tensor, and `"saved"`, `"recomputed"` (by a checkpoint) or `"freed"`."""
        return [(record.module, event) for record, event in self._log]

    def table(self) -> str:
        """A line for each module: tensors saved, their bytes, and the bytes nobody before it had saved."""
        return table([self._columns, *self._cells()], left=self._text_columns)

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
        recorded = {name: vars(self)[name] for name in ("_saved", "_log", "misses_recomputation")}
        return SavedTensors, (None,), {name: copy(value) for name, value in recorded.items()}

    def __enter__(self) -> "SavedTensors":
        refuse_compiling("saved_tensors")
        if self._contexts is not None:
            raise RuntimeError("saved_tensors: this block is open already; make another saved_tensors(model)")
        model = self._model() if self._model else None
        self._before, self._task = len(self._saved), graph_task()
        self._unnamed: list[tuple[weakref.ref[Held], Any]] = []  # saved under these hooks, by a Node to come
        self._covered: list[Callable] = []  # the pack hooks of the checkpoints that are running
        self._dropped: weakref.WeakKeyDictionary[Callable, list[Any]] = weakref.WeakKeyDictionary()
        self._storages.name_owners(owned(model))
        with ExitStack() as contexts:
            contexts.enter_context(packing.installed(*self._hooks(self._save)))
            if hasattr(graph, "node_creation_hook"):  # since PyTorch 2.14
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

    def _hooks(self, note: Callable[[Tensor], Held]) -> tuple[Callable, Callable]:
        """A pair of hooks that notes what is saved and passes it on."""
        outer = outer_hooks() or (packing.hold, packing.unhold)

        def pack(tensor: Tensor) -> tuple[Any, Held | None]:
            content = outer[0](tensor)
            # Contexts may be left in another order than the one they were entered in.
            return content, (note(tensor) if self._contexts is not None else None)

        def unpack(packed: tuple[Any, Held | None]) -> Tensor:
            tensor = outer[1](packed[0])
            if packed[1] is not None:
                packed[1].use()
            return tensor

        return pack, unpack

    def _record(self, tensor: Tensor) -> SavedTensor:
        module = self._modules.innermost() if self._modules is not None else ""
        shape = first_shape(tensor) or ()
        return SavedTensor(module, "", shape, tensor.dtype, nbytes(tensor), *self._storages.of(tensor))

    def _save(self, tensor: Tensor) -> Held:
        record = self._record(tensor)
        self._saved.append(record)
        held = Held(self._log, record)
        # The active hooks are these, or others that pass on to them.
        self._unnamed.append((weakref.ref(held), outer_hooks()))
        return held

    def _under_a_checkpoint(self) -> AbstractContextManager:
        """For the call of a module: where the hooks of a checkpoint hide those of this block, a pair on top of them."""
        hooks = outer_hooks() or (None, None)
        checkpoint = getattr(hooks[0], "passes_on_to", hooks[0])  # another block may have put its pair there
        if not is_checkpoint_hook(checkpoint) or checkpoint in self._covered or recomputing(self._task):
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
        # What a failed operation saved is freed. A checkpoint saves its input without a Node, under other hooks.
        for reference, around in self._unnamed:
            if around == hooks and (held := reference()) is not None:
                held.record.operation = node_name(node)
        self._unnamed.clear()
        if hooks is not None and is_checkpoint_hook(hooks[0]) and not recomputing(self._task) and saves_something(node):
            self.misses_recomputation = True


def _by_storage(records: Iterable[SavedTensor]) -> dict[int, int]:
    """The bytes of each storage behind the records, by its number."""
    return {record.storage: record.storage_bytes for record in records}


def saved_tensors(model: nn.Module | None = None) -> SavedTensors:
    """Every tensor that autograd saves inside the block: which operation, which module, how many bytes.

    `with saved_tensors(model) as saved: loss = model(x).sum()`, for the current thread. Values and gradients stay the
    same. Tensors are passed on to the saved-tensor hooks that are active on entry.

    Args:
        model: names the modules, parameters and buffers. Without it `.held` leaves out what a checkpoint recomputes.

    Returns:
        A sequence of `SavedTensor` with `.total_bytes` (each as often as it was saved), `.unique_bytes` (each storage
        once), `.parameter_bytes` (the part of it in parameters and buffers), `.held` (bytes after every event, also in
        backward; see `draw.memory`), `.table()` and `.to_dataframe()`.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: on entry, if this block is open already; in backward, if a saved tensor was edited in place.

    Example:
        >>> import torch
        >>> a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        >>> with saved_tensors() as saved:
        ...     y = a * b
        >>> [(record.operation, record.bytes) for record in saved]
        [('MulBackward0', 12), ('MulBackward0', 12)]

    Limits: docs/limits.md#saved_tensors.
    Source: [saved tensors](https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors).
    """
    if model is not None:
        refuse.no_module("saved_tensors", model)
    return SavedTensors(model)
