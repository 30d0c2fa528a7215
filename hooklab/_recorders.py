"""The forward hooks of `features`: the short ways for a plain tensor, and a call for everything else."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hooklab._checkpoints import NO_BACKWARD, graph_task
from hooklab._compiler import eager
from hooklab._outputs import versions_of
from hooklab._packing import outer_hooks

__all__ = ["blame_keep", "recorders"]


def recorders(
    keep: Callable[[Tensor], Any], quick: list[bool], frozen: list[bool], note: Callable, look: Callable
) -> Callable[[str], Callable]:
    """Makes the hooks, each from a name. All that they use but that is shared, so that it stays in a core's cache.

    Args:
        keep: what to keep of a tensor.
        quick: whether grad is on; empty where an output has to be looked at twice.
        frozen: the same in inference mode, whose tensors have no version.
        note: called with (name, what was kept, its version).
        look: called with (name, output) where neither short way is right.
    """
    task = graph_task

    # Every line here is paid for in every call of every layer.
    def keeping(name: str) -> Callable:
        @eager
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if quick and output.__class__ is Tensor and task() == NO_BACKWARD and outer_hooks() is None:
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

        return hook

    def detaching(name: str) -> Callable:
        @eager
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if quick and output.__class__ is Tensor and task() == NO_BACKWARD:
                try:
                    kept = output.detach() if quick[0] or output.requires_grad else output
                    note((name, kept, kept._version))
                    return
                except RuntimeError:  # an inference tensor has no version
                    pass
            elif frozen and output.__class__ is Tensor and output.is_inference() and task() == NO_BACKWARD:
                try:
                    note((name, output, output.shape))
                    return
                except RuntimeError:  # a strided nested tensor has no shape
                    pass
            look(name, output)

        return hook

    return detaching if keep is Tensor.detach else keeping


def blame_keep(error: Exception, name: str) -> None:
    """Note on an error of the user's own `keep` whose output it was given."""
    error.add_note(f"hooklab.features: raised by keep, on the output of {name!r}")
