"""A Sequential that saves its input now and then, and computes the rest again in backward."""

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hooklab._support.compiler import compiling
from hooklab.course.reachable import within
from hooklab.saved.segment_state import State, copy_of, version_of

__all__ = ["Segmented"]

MAX_PARTS = 10_000  # of an object that is an input


class Segmented(nn.Sequential):
    """A Sequential whose blocks run in segments; only the input of each segment is saved.

    Every Sequential that is switched gets a subclass of its own: it holds what belongs to this one, and goes with it.
    """

    _hooklab_kind: type  # what it was, and will be again
    _hooklab_blocks: int  # in a segment; 0 once it runs plainly again
    _hooklab_called: list[bool]  # empty until it is

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A slice, which calls the class of what it is taken from, is an ordinary Sequential."""
        return cls._hooklab_kind(*args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy, and what is pickled, is an ordinary Sequential: no handle knows it."""
        return object.__new__, (self._hooklab_kind,), vars(self)

    def forward(self, input: Any) -> Any:
        # Switched back; but what wraps a forward, as accelerate and autocast do, has kept this one.
        if not isinstance(self, Segmented):
            return type(self).forward(self, input)
        plain = not torch.is_grad_enabled() or not self._hooklab_blocks
        if not self._hooklab_called:
            self._hooklab_called.append(True)
            # The first forward of a lazy layer draws random numbers that no later one draws.
            lazy = [one for one in self.modules() if isinstance(one, LazyModuleMixin)]
            plain = plain or any(one.has_uninitialized_params() for one in lazy)
        if plain:
            return super().forward(input)
        blocks, size = list(self), self._hooklab_blocks
        for start in range(0, len(blocks), size):
            # A block in place edits what it is given; a block before it may hand that on from further up. So the first
            # ones count, of this segment and of the next.
            copies = any(getattr(block, "inplace", False) for block in blocks[start::size][:2])
            input = run_saving_input(blocks[start : start + size], input, copies)
        return input


def run_saving_input(segment: list[nn.Module], input: Any, copies: bool) -> Any:
    """What the segment returns; for backward only its input is saved, and the rest computed again."""
    if compiling():
        inside = "torch.compile (which has its own way to compute again) or torch.export"
        advice = "remove it before, or compile the blocks: for block in model.layer1: block.compile()"
        raise NotImplementedError(f"checkpoint_segments does not work inside {inside}; {advice}")
    leaves, spec = tree_flatten(input)  # a checkpoint guards tensors, and not what is inside a tuple
    leaves = [_apart(leaf, copies, copy_of) for leaf in leaves]  # a copy that is saved leads no further up
    # Blocks may write into what they are given: the first run has the caller's own, later ones a copy.
    given = [input]

    def run(*leaves: Any) -> Any:
        with state.first() if given else state.again(leaves):
            output = given.pop() if given else tree_unflatten([_apart(leaf, copies) for leaf in leaves], spec)
            for block in segment:
                output = block(output)
        return output

    before = _versions(leaves)
    state = State(segment)
    # To stop at the last save would leave a block half done: what it was to put back, and the noise that RReLU fills in.
    output = checkpoint(run, *leaves, use_reentrant=False, early_stop=False)
    if _versions(leaves) != before:
        where = f"the segment that begins with {type(segment[0]).__name__}"
        edits = "edits its input in place, or what an object in it holds, and the input is what is saved"
        raise RuntimeError(f"checkpoint_segments: {where} {edits}; use inplace=False there, or another plan")
    return output


def _apart(value: Any, copies: bool, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    """A copy, if it is a tensor and `copies`, or an object of a class of its own: `data.x = ...; return data` needs it."""
    if isinstance(value, Tensor):
        return copy(value) if copies else value
    return value if isinstance(value, nn.Module) else copy_or_same(value)


def _versions(leaves: list[Any]) -> list[tuple[int, int | None, Tensor]]:
    """Of the tensors that an input holds, also inside objects. Each is there itself, so that no other gets its id."""
    parts = (part for leaf in leaves for part in islice(within(leaf), MAX_PARTS))
    return [(id(part), version_of(part), part) for part in parts if isinstance(part, Tensor)]


def copy_or_same(value):
    with suppress(Exception):
        return copy(value)
    return value
