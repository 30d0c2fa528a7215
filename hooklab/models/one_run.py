"""One forward, and perhaps one backward, of a model for `summary`: what is counted, and how nothing of it stays."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph

from hooklab._support import packing
from hooklab._support.handles import OwnHook
from hooklab._support.module_stack import ModuleStack
from hooklab._support.nested import map_tensors, shapes, tensors_in
from hooklab._support.storages import Storages
from hooklab._support.torch_private import each_operation, eager, graph_task, is_compiled, recomputing, saving_node

__all__ = ["OneRun", "Work", "stand_ins"]

# Operations that make, copy or move entries and compute nothing. Views are known without this list.
_MOVES = """
_local_scalar_dense _to_copy _unsafe_view arange cat channel_shuffle clone constant_pad_nd copy detach
embedding empty empty_like empty_strided fill flip full full_like gather index index_select lift_fresh
new_empty new_empty_strided new_full new_ones new_zeros ones ones_like pixel_shuffle pixel_unshuffle
reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d
replication_pad3d roll scalar_tensor select_backward slice_backward stack unsafe_split zero zeros zeros_like
"""
MOVES = set(_MOVES.split())
FORWARD, BACKWARD = "forward", "backward"


class Work:
    """What one layer computed in one direction."""

    def __init__(self) -> None:
        self.operations = 0  # those that PyTorch has a formula for
        self.formulas = 0  # how often one was used
        self.uncounted: Counter[str] = Counter()  # what it has none for, by name


def stand_ins(model: nn.Module, args: tuple, kwargs: dict) -> tuple[dict[str, Tensor], tuple, dict]:
    """For one run: parameters in the same memory without hooks and `.grad`; copies of the buffers and of the inputs."""
    state: dict[str, Tensor] = {
        name: nn.Parameter(param.detach(), param.requires_grad) for name, param in model.named_parameters()
    }
    state.update((name, buffer.detach().clone()) for name, buffer in model.named_buffers())
    copies: dict[Tensor, Tensor] = {}  # a tensor that is given twice stays one

    def copied(tensor: Tensor) -> Tensor:
        if tensor not in copies:
            copies[tensor] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[tensor]

    return state, map_tensors(copied, args), map_tensors(copied, kwargs)


class OneRun:
    """Runs a model once on stand-ins and notes of each layer, by its first name: calls, output, work, saved bytes."""

    def __init__(self, model: nn.Module):
        self.calls: Counter[str] = Counter()
        self.outputs: dict[str, str] = {}
        self.saved: Counter[str] = Counter()  # bytes that nothing before the layer had saved
        self.work: dict[str, defaultdict[str, Work]] = {FORWARD: defaultdict(Work), BACKWARD: defaultdict(Work)}
        self.counts = False  # PyTorch can tell of operations
        self._model, self._seen = model, set[int]()
        self._counter: Any = None
        self._stack: ModuleStack | None = None
        self._storages = Storages()
        self._task = graph_task()
        self._mark = object()  # in the metadata of every Node: whose it is

    def run(self, args: tuple, kwargs: dict, backward: bool) -> None:
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad), ExitStack() as contexts:
            state, args, kwargs = stand_ins(self._model, args, kwargs)
            self._storages.name_owners(state.items())
            contexts.enter_context(_same_random_numbers([*state.values(), *tensors_in((args, kwargs))]))
            contexts.enter_context(_same_attributes(self._model))
            contexts.enter_context(_uncompiled(self._model))
            for context in self._watching():
                contexts.enter_context(context)
            # A checkpoint runs the model again in backward, so that too has to use the stand-ins.
            whole = Both(self._model, [*state.values(), *tensors_in((args, kwargs))] if backward else None)
            prefixed = {f"model.{name}": tensor for name, tensor in state.items()}
            torch.func.functional_call(whole, prefixed, args, kwargs)

    def _watching(self) -> Iterator[AbstractContextManager]:
        yield self._installed()
        yield packing.installed(self._pack, packing.unhold)
        if hasattr(graph, "node_creation_hook"):  # since PyTorch 2.14
            yield graph.node_creation_hook(self._on_node)
        if (mode := each_operation(self._operation)) is not None:
            # It takes long to import.
            from torch.utils.flop_counter import FlopCounterMode, flop_registry

            self.counts, self._formulas = True, {str(operation) for operation in flop_registry}
            self._counter = FlopCounterMode(display=False)
            self._counter.mod_tracker = Everywhere()
            yield self._counter
            yield mode

    @contextmanager
    def _installed(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            self._stack = ModuleStack(self._model)
            for name, module in self._model.named_modules():
                handles.append(module.register_forward_hook(OwnHook(self._note, name)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self._stack is not None:
                self._stack.remove()

    @eager
    def _note(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        if not recomputing(self._task):
            self.calls[name] += 1
            self.outputs[name] = shapes(output)

    def _layers(self) -> set[str]:
        """The layers whose forward is running, or whose backward; what a checkpoint recomputes is only the model's."""
        if not recomputing(self._task):
            return set(self._stack.running()) if self._stack is not None else set()
        node = None if torch.is_grad_enabled() else saving_node()
        return {"", *(node.metadata.get(self._mark, ()) if node is not None else ())}

    def _on_node(self, node: Any) -> None:
        if not recomputing(self._task):
            node.metadata[self._mark] = self._layers()

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        number, size, _, owner = self._storages.of(tensor)
        if number not in self._seen and not owner:
            self.saved.update(dict.fromkeys(self._layers(), size))
        self._seen.add(number)
        return packing.hold(tensor)

    def _operation(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        before = self._counter.get_total_flops()
        result = operation(*args, **kwargs)
        more = self._counter.get_total_flops() - before
        name = str(operation).rpartition(".")[0]
        short = name.removeprefix("aten.")
        unseen = name not in self._formulas and not more
        moves = (
            getattr(operation, "is_view", False) or short.removesuffix("_") in MOVES or short.startswith("profiler.")
        )
        if unseen and moves:
            return result
        work = self.work[BACKWARD if recomputing(self._task) else FORWARD]
        for layer in self._layers():
            if unseen:
                work[layer].uncounted[short] += 1
            else:
                work[layer].operations += more
                work[layer].formulas += 1
        return result


class Everywhere(nullcontext):
    """In place of the counter's own record of modules, whose tensor hooks `autograd.grad` refuses."""

    parents = ("Global",)


class Both(nn.Module):
    """A forward of a model and, if `leaves` are given, the gradients of its outputs, which are dropped."""

    def __init__(self, model: nn.Module, leaves: list[Tensor] | None):
        super().__init__()
        self.model, self.leaves = model, leaves

    def forward(self, *args: Any, **kwargs: Any) -> None:
        outputs = [tensor for tensor in tensors_in(self.model(*args, **kwargs)) if tensor.requires_grad]
        if self.leaves is None:
            return
        if not outputs:
            raise RuntimeError(
                "summary(backward=True): nothing that the model returned needs a gradient, so there is no backward to "
                "run; take backward=False, or unfreeze a parameter that its output depends on"
            )
        wanted = [tensor for tensor in self.leaves if tensor.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.ones_like(tensor) for tensor in outputs], allow_unused=True)


@contextmanager
def _same_attributes(model: nn.Module) -> Iterator[None]:
    """After the block each module has the attributes it had: an nn.LSTM keeps its weights in one of its own, too."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, old in before:
            attributes.clear()
            attributes.update(old)


def _same_random_numbers(tensors: list[Tensor]) -> AbstractContextManager:
    """After the block the generators of PyTorch go on as if it had not been."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    context: AbstractContextManager = torch.random.fork_rng(
        sorted(device.index or 0 for device in devices), device_type=kind
    )
    return context


def _uncompiled(model: nn.Module) -> AbstractContextManager:
    """A block in which nothing compiled runs, where a part of the model is: its code calls no hooks."""
    compiled = any(map(is_compiled, model.modules()))
    stance: Callable[..., AbstractContextManager] = torch.compiler.set_stance
    return stance("force_eager") if compiled else nullcontext()
