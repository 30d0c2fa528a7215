"""How a tensor lies in memory: what of it must be moved, and how to lay it out again."""

import torch
from torch import Tensor

__all__ = ["Geometry"]


class Geometry:
    """Shape, strides, dtype and device of a strided tensor; `flat` takes its content, `rebuild` puts it back.

    Attributes:
        has_gaps: True for a slice: between its elements lie others that are not its own.
        core: shape and strides of what has to be moved: of a slice its own elements, without what expand repeats; else
            all the memory from the first to the last, in one row.
        nbytes: of the core.
    """

    def __init__(self, tensor: Tensor):
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype, self.device, self.conj = tensor.dtype, tensor.device, tensor.is_conj()
        own = torch.Size(size if stride else 1 for size, stride in zip(self.shape, self.strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(own, self.strides, strict=True))
        self.has_gaps = span > own.numel()
        self.core = (own, self.strides) if self.has_gaps else (torch.Size([span]), (1,))
        self.nbytes = self.core[0].numel() * self.dtype.itemsize

    def flat(self, tensor: Tensor) -> Tensor:
        """The content as a 1-D tensor: a view of the same memory, or for a slice a copy of its own elements."""
        physical = tensor.conj() if self.conj else tensor  # the bits as they lie in memory
        return physical.as_strided(*self.core).flatten().contiguous()

    def rebuild(self, flat: Tensor) -> Tensor:
        """A tensor with the content of `flat`, laid out as the first one was; TypeError if it cannot be that."""
        if not isinstance(flat, Tensor) or flat.dtype != self.dtype or flat.numel() != self.core[0].numel():
            given = f"{self.dtype} [{self.core[0].numel()}]"
            found = f"{flat.dtype} {list(flat.shape)}" if isinstance(flat, Tensor) else type(flat).__name__
            advice = "read(slot) should return what write(tensor) was given, bit for bit"
            raise TypeError(f"the store was given {given} and gave back {found}; {advice}")
        memory = flat.contiguous().to(self.device)
        if self.has_gaps:
            memory = memory.new_empty_strided(*self.core).copy_(memory.view(self.core[0]))
        tensor = memory.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conj else tensor
