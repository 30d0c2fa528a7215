"""What `checkpoint_segments` returns: the Sequentials that run in segments, until they are switched back."""

import warnings
from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn

from hooklab._support import refuse
from hooklab._support.handles import Installed
from hooklab.layers.select import uncompiled
from hooklab.saved.segmented import Segmented

__all__ = ["Segments"]


class Segments(Installed):
    """The Sequentials that run in segments: what `checkpoint_segments` returns."""

    _gone = "its Sequentials have been switched back"

    def __init__(self, model: nn.Module, plan: Mapping[str, int]):
        super().__init__("checkpoint_segments")
        if not isinstance(plan, Mapping):
            wanted = 'names to blocks per segment, {"layer1": 1, "layer2": 2}'
            raise TypeError(f"checkpoint_segments: plan should map {wanted}; found {type(plan).__name__}")
        if not plan:
            raise ValueError('checkpoint_segments: the plan is empty; name a Sequential, {"layer1": 2}')
        modules = dict(uncompiled(model).named_modules(remove_duplicate=False))
        with self._all_or_none():
            for name, blocks in plan.items():
                if any(one.module is modules.get(name) for one in self._handles):
                    raise ValueError(f"checkpoint_segments: {name!r} is another name of a layer in the plan")
                module = _sequential(modules, name)
                blocks = refuse.count("checkpoint_segments", f"plan[{name!r}]", blocks, least=1)
                self._handles.append(Switched(name, module, blocks))

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        idle = [one.name for one in self._handles if not one.module._hooklab_called]
        self.remove()
        if idle and kind is None:
            why = "was the model run inside the block, and does it call these layers as a whole?"
            warnings.warn(f"checkpoint_segments: never called: {refuse.listed(idle)}; {why}", stacklevel=2)

    def __repr__(self) -> str:
        parts = (f"{one.name or repr(one.name)}: {one.module._hooklab_blocks}" for one in self._handles)
        return f"Segments({', '.join(parts) or 'removed'})"


class Switched:
    """One of them. It gets a class of its own, which holds what belongs to it."""

    def __init__(self, name: str, module: nn.Sequential, blocks: int):
        self.name, self.module, kind = name, module, type(module)
        facts = {"_hooklab_kind": kind, "_hooklab_blocks": blocks, "_hooklab_called": []}
        module.__class__ = type(kind.__name__, (Segmented, kind), facts)

    def remove(self) -> None:
        """Let it run as before."""
        if Segmented in type(self.module).__bases__:
            self.module.__class__ = self.module._hooklab_kind
        else:  # it has another class above ours since then, as from `fully_shard`: that one stays
            type(self.module)._hooklab_blocks = 0


def _sequential(modules: dict[str, nn.Module], name: str) -> nn.Sequential:
    """The Sequential of this name, refused unless it runs its blocks one after the other."""
    if name not in modules:
        sequentials = [name for name, module in modules.items() if isinstance(module, nn.Sequential)]
        deeper = [one for one in modules if isinstance(name, str) and one.endswith(f".{name}")]
        close = get_close_matches(str(name), modules) or deeper[:5] or sequentials[:5]
        shown = refuse.listed(close) or "no Sequential in this model"
        raise KeyError(f"checkpoint_segments: no layer is called {name!r}; close: {shown}")
    module = modules[name]
    if isinstance(module, Segmented):
        said = "runs in segments already; remove that first"
        if not module._hooklab_blocks:
            said = "once ran in segments, and was sharded then; make a new model, and shard it first"
        raise ValueError(f"checkpoint_segments: {name!r} {said}")
    kind = type(module)
    found = f"{kind.__module__}.{kind.__qualname__}" if kind.__name__ == "Sequential" else kind.__name__
    if isinstance(module, nn.Sequential):
        if kind.forward is nn.Sequential.forward and "forward" not in vars(module):
            return module
        found += " with a forward of its own"
        if "forward" in vars(module):
            found += ", put on the object, as accelerate does: call checkpoint_segments before that"
    elif isinstance(module, nn.ModuleList):
        switch = "the model's own switch (of transformers: model.gradient_checkpointing_enable())"
        advice = f"put torch.utils.checkpoint there, or use {switch}"
        found += f", whose owner calls the blocks in a loop of its own: {advice}"
    wanted = "a Sequential, whose blocks run one after the other"
    raise TypeError(f"checkpoint_segments: {name!r} should be {wanted}; found {found}")


def checkpoint_segments(model: nn.Module, plan: Mapping[str, int]) -> Segments:
    """Save only the input of every segment of a Sequential; the rest is computed again in backward.

    The Sequentials are switched at once. Use `with`, or call `.remove()`, to switch them back. Gradients and buffers
    are those of plain training, bit for bit: what a forward changes in the buffers of its modules (running
    statistics) is changed once, what it puts with `register_hook` on its input or its parameters holds once, and
    random numbers of PyTorch's global generators (dropout) are drawn again alike, on the CPU and on the GPUs of the
    tensors that a segment is given (inside an object they do not count); not those of a `torch.Generator` of your
    own, of NumPy, or of Python's `random`. Buffers that are views of one another are copied apart. A parameter that a
    forward edits is edited again, and what a forward adds to `.grad` by a backward of its own is added again. What a
    block notes in an attribute (a loss, a count of its calls) stays what the forward has noted, also in a list, but
    not in a dict. All else that a block uses has to stay as it is until backward is over, as with
    `torch.utils.checkpoint`: forward hooks that change an output or compute with grad (take them off after backward),
    attributes that are no buffers (a count that the output depends on belongs in one), globals. Blocks may write into
    a list, a dict or an object that they are given: each run has a copy, of an object one level deep (`copy.copy`).

    Args:
        model: any module.
        plan: blocks per segment by the name of a Sequential, `{"layer1": 1, "layer2": 2}`; `""` is the model
            itself. Small segments save less memory, and hold less while they are computed again. A segment is computed
            again to its end, where torch's own checkpoint stops at the last save, before a Linear for example.

    Returns:
        A handle with `.remove()`.

    Raises:
        KeyError: the model has no such layer; the message gives the closest names.
        TypeError: a layer is no Sequential, or one with a forward of its own; a number is none.
        ValueError: a number is below 1, `plan` is empty or names one layer twice, or a Sequential is checkpointed
            already. Nothing has been changed then.
        NotImplementedError: in forward, inside `torch.export`; with `torch.compile(fullgraph=True)` the compiler's own error.
        RuntimeError: when entered again after `.remove()`; in forward, if a segment edits its input in place, or the
            tensors and lists that an object in it holds (where its first block, or the one after it, has `inplace=True`
            itself, the input is copied instead); in backward, if a parameter, or a buffer of more than 4,096 numbers, was
            edited or given other memory (`.data = ...`, `model.to`) in between; also by an optimizer that steps in
            backward, where a segment ends in adding a parameter. An edit through `.data` (`p.data.mul_(2)`) is not noticed.
        torch.utils.checkpoint.CheckpointError: in backward, if computing again saves something else than forward, or if
            what a Node has saved is read twice: a `Function` of your own should read `ctx.saved_tensors` once.

    Composes with `Offload`, which then moves the inputs of the segments. At the end of a `with` block a warning
    names each Sequential that was never called. The parameters are those of the forward, also where
    `torch.func.functional_call` or `torch.nn.utils.parametrize.cached` gave them (but for those that FSDP gathers).
    `torch.func.grad`, `vjp`, `jacrev`, `hessian`, backward through `jvp` and, with grad on, `vmap` do not work with it, as
    with any checkpoint.
    One thread at a time may use the model where there are buffers, where blocks write into attributes, or where
    `functional_call` gave the parameters.
    Inside a checkpoint of your own, remove it after backward only. A copy made meanwhile runs as before, and so does
    the first forward of a lazy layer. `torch.jit` wants it removed first. A graph that no backward uses up keeps the
    segment's blocks; if one of them holds a result of that graph as an attribute, both stay, as with any checkpoint.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))
        >>> with checkpoint_segments(model, {"0": 1}):
        ...     model(torch.ones(3, 2)).sum().backward()

    Source: [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html).
    """
    refuse.no_module("checkpoint_segments", model)
    return Segments(model, plan)
