"""The forward hooks of `features`: the short ways for a plain tensor, and a call for everything else."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hooklab._checkpoints import NO_BACKWARD, graph_task
from hooklab._compiler import eager
from hooklab._installed import OwnHook
from hooklab._outputs import versions_of
from hooklab._packing import outer_hooks

__all__ = ["Detaching", "Keeping", "blame_keep"]


def _ignore(name: str, output: Any) -> None:
    """In place of `look`, in a copy of the model."""


class Recorder(OwnHook):
    """The hook on a layer. All that it uses but `name` is shared, so that it stays in a core's cache.

    Args:
        name: the layer's.
        keep: what to keep of a tensor.
        quick: whether grad is on; empty where an output has to be looked at twice.
        frozen: the same in inference mode, whose tensors have no version.
        note: called with (name, what was kept, its version).
        look: called with (name, output) where neither short way is right.
    """

    __slots__ = ("frozen", "keep", "look", "name", "note", "quick")
    IDLE = "", None, (), (), None, _ignore

    def __init__(
        self, name: str, keep: Any, quick: Sequence[bool], frozen: Sequence[bool], note: Any, look: Callable
    ):
        self.name, self.keep, self.quick, self.frozen = name, keep, quick, frozen
        self.note, self.look = note, look


# Every line here is paid for in every call of every layer.
class Keeping(Recorder):
    """With a `keep` of the user's own."""

    __slots__ = ()

    @eager
    def hook(self, module: nn.Module, args: tuple, output: Any) -> None:
        if (
            self.quick
            and output.__class__ is Tensor
            and graph_task() == NO_BACKWARD
            and outer_hooks() is None
        ):
            try:
                kept = self.keep(output)
            except Exception as error:
                blame_keep(error, self.name)
                raise
            try:
                self.note((self.name, kept, kept._version if kept.__class__ is Tensor else versions_of(kept)))
            except RuntimeError:  # an inference tensor has no version
                self.note((self.name, kept, versions_of(kept)))
        else:
            self.look(self.name, output)


class Detaching(Recorder):
    """With `Tensor.detach`."""

    __slots__ = ()

    @eager
    def hook(self, module: nn.Module, args: tuple, output: Any) -> None:
        quick = self.quick
        if quick and output.__class__ is Tensor and graph_task() == NO_BACKWARD:
            try:
                kept = output.detach() if quick[0] or output.requires_grad else output
                self.note((self.name, kept, kept._version))
                return
            except RuntimeError:  # an inference tensor has no version
                pass
        elif (
            self.frozen
            and output.__class__ is Tensor
            and output.is_inference()
            and graph_task() == NO_BACKWARD
        ):
            try:
                self.note((self.name, output, output.shape))
                return
            except RuntimeError:  # a strided nested tensor has no shape
                pass
        self.look(self.name, output)


def blame_keep(error: Exception, name: str) -> None:
    """Note on an error of the user's own `keep` whose output it was given."""
    error.add_note(f"hooklab.features: raised by keep, on the output of {name!r}")
