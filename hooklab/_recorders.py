"""The forward hooks of `features`: the short ways for a plain tensor, and a call for everything else."""

from collections import Counter
from collections.abc import Callable, Iterable
from sys import getrefcount
from types import NoneType
from typing import Any

from torch import Tensor, nn

from hooklab._checkpoints import NO_BACKWARD, graph_task
from hooklab._compiler import eager
from hooklab._outputs import versions_of
from hooklab._packing import outer_hooks

__all__ = ["all_fresh", "all_new", "blame_keep", "note_detached", "note_kept"]

Flags = list[bool]
PLAIN = {NoneType, bool, int, float, complex, str}

# The last three arguments are those of a hook. What comes before, but for the name of the layer, is shared by all:
#     keep: what to keep of a tensor.
#     quick: whether grad is on; empty where an output has to be looked at twice.
#     frozen: the same in inference mode, whose tensors have no version.
#     fresh: not empty where every output is a new tensor: without a graph, of version 0.
#     note: called with (name, what was kept, its version).
#     look: called with (name, output) where no short way is right.
# Every line here is paid for in every call of every layer.


@eager
def note_kept(
    name: str,
    keep: Callable,
    quick: Flags,
    note: Callable,
    look: Callable,
    module: nn.Module,
    args: tuple,
    output: Any,
) -> None:
    """The hook with a `keep` of the user's own."""
    if quick and output.__class__ is Tensor and graph_task() == NO_BACKWARD and outer_hooks() is None:
        try:
            kept = keep(output)
        except Exception as error:
            blame_keep(error, name)
            raise
        try:
            note((name, kept, kept._version if kept.__class__ is Tensor else versions_of(kept)))
        except RuntimeError:  # an inference tensor has no version
            note((name, kept, versions_of(kept)))
    else:
        look(name, output)


@eager
def note_detached(
    name: str, note: Callable, fresh: list, others: tuple, module: nn.Module, args: tuple, output: Any
) -> None:
    """The hook with `Tensor.detach`; `others` are quick, frozen and look."""
    if output.__class__ is Tensor:
        if fresh:
            note((name, output, 0))
            return
        quick, frozen, look = others
        try:
            if quick and graph_task() == NO_BACKWARD:
                if quick[0]:
                    kept = output.detach()
                    note((name, kept, kept._version))
                    return
                if not output.requires_grad:
                    note((name, output, output._version))
                    return
            elif frozen and output.is_inference() and graph_task() == NO_BACKWARD:
                note((name, output, output.shape))
                return
        except RuntimeError:  # an inference tensor has no version, a strided nested tensor no shape
            pass
        look(name, output)
    else:
        others[2](name, output)


def all_fresh(given: Iterable) -> bool:
    """True if what a model is given cannot come out of a layer with a graph, or with edits of its own."""
    try:
        for one in given:
            if one.__class__ is Tensor:
                if one.requires_grad or one._version:
                    return False
            elif one.__class__ not in PLAIN:
                return False
    except RuntimeError:  # an inference tensor has no version
        return False
    return True


def _references(records: Iterable[tuple]) -> list[int]:
    return [getrefcount(kept) for _, kept, _ in records]


ONE_RECORD = _references([("", object(), 0)])[0]  # of an object that nobody else knows


def all_new(records: Iterable[tuple], others: Iterable) -> bool:
    """True if the outputs in `records` were made by their layers, but for those among `others`.

    Not their weights or buffers, nor a part of them: those may be edited before the next forward returns them again.
    """
    known, times = {id(one) for one in others}, Counter(id(kept) for _, kept, _ in records)
    return all(
        kept.__class__ is Tensor
        and version == 0
        and not kept._is_view()
        and (id(kept) in known or count < ONE_RECORD + times[id(kept)])
        for (_, kept, version), count in zip(records, _references(records), strict=True)
    )


def blame_keep(error: Exception, name: str) -> None:
    """Note on an error of the user's own `keep` whose output it was given."""
    error.add_note(f"hooklab.features: raised by keep, on the output of {name!r}")
