"""Answers that are a pair of functions, `pack` and `unpack`: whether they are one, and what they give back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hooklab.course.refusals import Refused, refuse, refuse_first, refuse_latest_call

__all__ = ["Watched", "differs", "expect_pair", "is_pair", "refuse_latest_pair", "refuse_unpacked_once"]


def is_pair(got: Any) -> bool:
    """True for two functions, in a tuple or a list."""
    return isinstance(got, tuple | list) and len(got) == 2 and all(map(callable, got))


def expect_pair(got: Any) -> tuple[Callable, Callable]:
    """The two functions that an answer has returned; refused where it is anything else."""
    if not is_pair(got):
        refuse("no_pair", got=got)
    return got[0], got[1]


UNPACKED = [  # what `unpack` has returned, beside what was packed
    ("not_a_tensor", lambda t: not isinstance(t.got, Tensor)),
    ("empty_dtype", lambda t: t.got.dtype != t.want.dtype and not t.want.numel()),
    ("wrong_dtype", lambda t: t.got.dtype != t.want.dtype),
    ("wrong_shape", lambda t: t.got.shape != t.want.shape),
    ("changed_others", lambda t: t.want.dtype not in (torch.float32, torch.bool) and differs(t)),
    ("wrong_values", lambda t: differs(t)),
]


class Watched:
    """A pair under observation: how often it packs and unpacks, and whether what is unpacked is what it was."""

    mistakes = UNPACKED

    def __init__(self, pair: Any, want: Callable[[Tensor], Tensor] = torch.clone):
        self.inner_pack, self.inner_unpack = expect_pair(pair)
        self.want, self.packs, self.unpacks = want, 0, 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.packs += 1
        packed = self.inner_pack(tensor)
        self.examine(tensor, packed)
        return self.want(tensor.detach()), packed

    def examine(self, tensor: Tensor, packed: Any) -> None:
        """Look at what was packed; here nothing is asked of it."""

    def unpack(self, kept: tuple[Tensor, Any]) -> Tensor:
        self.unpacks += 1
        want, packed = kept
        got = self.inner_unpack(packed)
        shapes = {"want_shape": list(want.shape), "got_shape": list(getattr(got, "shape", ()))}
        refuse_first(self.mistakes, got=got, want=want, packed=packed, **shapes)
        return got


def differs(t: Any) -> bool:
    """Whether `t.got` has other bits than `t.want`; where, and what stands there, is set on `t`."""
    # A clone first: an empty array of numpy steps by 0, which a view refuses.
    got, want = (tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for tensor in (t.got, t.want))
    other = torch.ne(got.view(torch.uint8), want.view(torch.uint8)).nonzero()
    if len(other):
        t.at = int(other[0]) // want.itemsize
        t.found, t.wanted = got[t.at].item(), want[t.at].item()
    return len(other) > 0


def refuse_unpacked_once(loss: Tensor) -> None:
    """A second backward, which unpacks everything once more, may not fail. The first one had `retain_graph=True`."""
    try:
        loss.backward()
    except Refused:
        raise
    except Exception as error:
        refuse("unpacked_once", error=error)


def refuse_latest_pair(answer: Callable, first: tuple, second: tuple, tensor: Tensor) -> None:
    """The pair that is made with `first` has to give `tensor` back, also after one is made with `second`."""
    pack, unpack = expect_pair(answer(*first))
    answer(*second)
    if not torch.equal(unpack(pack(tensor)), tensor):
        refuse_latest_call()
