"""The forward hooks of `features`: the short ways for a plain tensor, and a call for everything else."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from sys import getrefcount
from types import MethodType, NoneType
from typing import Any, Self

from torch import Tensor, nn

from hooklab._support.checkpoints import NO_BACKWARD, graph_task
from hooklab._support.compiler import eager, eager_inside
from hooklab._support.handles import IDLE
from hooklab._support.packing import outer_hooks
from hooklab.layers.outputs import versions_of

__all__ = ["Shared", "all_fresh", "all_new", "blame_keep", "note_kept", "recorder"]

Flags = list[bool]
PLAIN = {NoneType, bool, int, float, complex, str}

# The last three arguments are those of a hook. What comes before, but for the name of the layer, is shared by all:
#     keep: what to keep of a tensor.
#     quick: whether grad is on; empty where an output has to be looked at twice.
#     frozen: the same in inference mode, whose tensors have no version.
#     now: the number of a forward in which every output is a new tensor: without a graph, of version 0; None elsewhere.
#     note: called with (name, what was kept, its version).
#     look: called with (name, output) where no short way is right.
# Every line here is paid for in every call of every layer.


class Idle:
    """To be shared by the hooks of a copied model: they do nothing. Pickled, they are from Python's own library."""

    __slots__ = ()
    now, quick, frozen = None, (), ()

    def look(self, name: str, output: Any) -> None:
        pass

    def __deepcopy__(self, memo: dict) -> "Idle":
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(IDLE.__self__), ()  # and of a method its name is pickled


class Shared(weakref.ref):
    """What the hooks of all layers with `Tensor.detach` share.

    A weak reference, to nothing that matters, because a compiler cannot look into one: it leaves these hooks alone. It
    does look into those of a copy, and finds nothing to do.
    """

    __slots__ = ("frozen", "look", "note", "now", "quick")

    def __new__(cls, *given: Any) -> Self:
        return super().__new__(cls, cls)

    def __init__(self, quick: Flags, frozen: Flags, note: Callable, look: Callable):
        super().__init__(type(self))
        self.now: int | None = None
        self.quick, self.frozen, self.note, self.look = quick, frozen, note, look

    def __deepcopy__(self, memo: dict) -> Idle:
        return Idle()

    __reduce_ex__ = Idle.__reduce_ex__


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


@eager_inside
def recorder(name: str, shared: Shared) -> tuple[Callable, Callable[[int], list[tuple[str, Tensor, int]]]]:
    """The hook of one layer with `Tensor.detach`; and what gives the outputs that it keeps by itself, of one forward.

    It keeps them where every output is a new tensor, which takes the place of that of the last forward: so memory is free
    again just where it is wanted next. To ask for another forward than the last one drops them.

    State in cells, and a method, take the least time of what can be copied with a model.
    """
    at, kept = None, None  # the number of the forward, and the output of the first call in it
    more: tuple[Tensor, ...] = ()  # those of further calls

    def note(shared: Shared, module: nn.Module, args: tuple, output: Any) -> None:
        nonlocal at, kept, more
        if output.__class__ is Tensor:
            now = shared.now
            if now is not None:
                if at is not now:
                    if more:
                        more = ()
                    at, kept = now, output
                else:
                    more = (*more, output)
                return
            quick = shared.quick
            try:
                if quick and graph_task() == NO_BACKWARD:
                    if quick[0]:
                        detached = output.detach()
                        shared.note((name, detached, detached._version))
                        return
                    if not output.requires_grad:
                        shared.note((name, output, output._version))
                        return
                elif shared.frozen and output.is_inference() and graph_task() == NO_BACKWARD:
                    shared.note((name, output, output.shape))
                    return
            except RuntimeError:  # an inference tensor has no version, a strided nested tensor no shape
                pass
        shared.look(name, output)

    def records(now: int) -> list[tuple[str, Tensor, int]]:
        nonlocal at, kept, more
        if at is now:
            return [(name, output, 0) for output in (kept, *more)]
        at, kept, more = None, None, ()
        return []

    note.__name__ = IDLE.__name__
    return MethodType(note, shared), records


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
