"""A Sequential that saves its input now and then, and computes the rest again in backward."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hooklab._compiler import compiling
from hooklab._reachable import within
from hooklab._segment_state import State, copy_of, version_of

__all__ = ["Segmented"]

MAX_PARTS = 10_000  # of an object that is an input


class Segmented(nn.Sequential):
    """A Sequential whose blocks run in segments; only the input of each segment is saved.

    Every Sequential that is switched gets a subclass of its own: it holds what belongs to this one, and goes with it.
    """

    _hooklab_kind: type = nn.Sequential  # what it was, and will be again
    _hooklab_blocks: int  # in a segment; 0 once it runs plainly again
    _hooklab_called: list[bool]  # empty until it is

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A slice, which calls the class of what it is taken from, is an ordinary Sequential."""
        return cls._hooklab_kind(*args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy, and what is pickled, is an ordinary Sequential: no handle knows it."""
        return object.__new__, (self._hooklab_kind,), vars(self)

    def forward(self, input: Any) -> Any:
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
            segment, after = blocks[start : start + size], blocks[start + size : start + size + 1]
            # A block in place edits what it is given; a block before it may hand that on from further up.
            copies = any(getattr(block, "inplace", False) for block in (segment[0], *after))
            input = run_saving_input(segment, input, copies)
        return input


def run_saving_input(segment: list[nn.Module], input: Any, copies: bool) -> Any:
    """What the segment returns; for backward only its input is saved, and the rest computed again."""
    if compiling():
        raise NotImplementedError(
            "checkpoint_segments does not work inside torch.compile (which has its own way to compute again) or "
            "torch.export; remove it before, or compile the blocks: for block in model.layer1: block.compile()"
        )
    leaves, spec = tree_flatten(input)  # a checkpoint guards tensors, and not what is inside a tuple
    leaves = list(map(_apart, leaves))
    if copies:  # are saved; the segment gets the input itself, as without us
        leaves = tree_map_only(Tensor, copy_of, leaves)
    # Blocks may write into a list, a dict or an object: the first run has the caller's own, later ones a copy.
    given = [input]

    def run(*leaves: Any) -> Any:
        if copies and not given:
            leaves = tree_map_only(Tensor, torch.clone, leaves)  # what is saved may be wanted once more
        output = given.pop() if given else tree_unflatten(map(_apart, leaves), spec)
        if state.before is None:
            with state.first():
                return run_blocks(segment, output)
        with state.again(), _ended_in_torchscript():
            return run_blocks(segment, output)

    inputs = _tensors(leaves)
    versions = list(map(version_of, inputs))
    state = State(segment)
    # Stopping early means stopping at the last save, and RReLU fills its noise after that.
    early = not any(
        isinstance(one, nn.RReLU) or getattr(one, "original_name", "") == "RReLU" for one in state.owners
    )
    output = checkpoint(run, *leaves, use_reentrant=False, early_stop=early)
    found = _tensors(leaves)
    if list(map(id, found)) != list(map(id, inputs)) or list(map(version_of, found)) != versions:
        raise RuntimeError(
            f"checkpoint_segments: the segment that begins with {type(segment[0]).__name__} edits its input in "
            "place, or what an object in it holds, and the input is what is saved; use inplace=False there, or another plan"
        )
    return output


def run_blocks(segment: list[nn.Module], output: Any) -> Any:
    """What the blocks return, one after the other."""
    for block in segment:
        output = block(output)
    return output


@contextmanager
def _ended_in_torchscript() -> Iterator[None]:
    """The word that all is computed again loses its name on the way through TorchScript; it never had a text."""
    try:
        yield
    except RuntimeError as error:
        if "TorchScript interpreter" not in str(error) or not str(error).rstrip().endswith("RuntimeError:"):
            raise


def _apart(value: Any) -> Any:
    """A copy of an object of a class of its own, as `data.x = ...; return data` needs it."""
    if isinstance(value, Tensor | nn.Module):
        return value
    try:
        return copy.copy(value)
    except Exception:  # a lock, a file, a generator: there is only one
        return value


def _tensors(leaves: list[Any]) -> list[Tensor]:
    """Those that an input holds, also inside objects."""
    return [one for leaf in leaves for one in islice(within(leaf), MAX_PARTS) if isinstance(one, Tensor)]
