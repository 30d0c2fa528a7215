"""How a tensor lies in memory: what of it must be moved, and how to lay it out again."""

import torch
from torch import Tensor

__all__ = ["Geometry"]


class Geometry:
    """Shape, strides, dtype and device of a strided tensor; `flat` takes its content, `rebuild` puts it back.

    Attributes:
        span: elements of memory from the first to the last.
        core: the shape, with 1 where expand repeats.
        has_gaps: True for a slice: between its elements lie others that are not its own.
        nbytes: what has to be moved.
    """

    def __init__(self, tensor: Tensor):
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype, self.device, self.conj = tensor.dtype, tensor.device, tensor.is_conj()
        sizes = list(zip(self.shape, self.strides, strict=True))
        self.core = tuple(1 if stride == 0 else size for size, stride in sizes)
        self.span = 1 + sum((size - 1) * stride for size, stride in sizes)
        elements = torch.Size(self.core).numel()
        self.has_gaps = self.span > elements
        self.nbytes = min(self.span, elements) * self.dtype.itemsize

    def flat(self, tensor: Tensor) -> Tensor:
        """The content as a 1-D tensor: a view of the same memory, or for a slice a copy of its own elements."""
        physical = tensor.conj() if self.conj else tensor  # the bits as they lie in memory
        if self.has_gaps:
            return physical.as_strided(self.core, self.strides).contiguous().view(-1)
        return physical.as_strided((self.span,), (1,))

    def rebuild(self, flat: Tensor) -> Tensor:
        """A tensor with the content of `flat`, laid out as the first one was; TypeError if it cannot be that."""
        elements = self.nbytes // self.dtype.itemsize
        if not isinstance(flat, Tensor) or flat.dtype != self.dtype or flat.numel() != elements:
            found = f"{flat.dtype} {list(flat.shape)}" if isinstance(flat, Tensor) else type(flat).__name__
            raise TypeError(
                f"the store was given {self.dtype} [{elements}] and gave back {found}; read(slot) should return "
                "what write(tensor) was given, bit for bit"
            )
        memory = flat.contiguous().to(self.device)
        if self.has_gaps:
            memory = torch.empty(self.span, dtype=self.dtype, device=self.device)
            memory.as_strided(self.core, self.strides).copy_(flat.reshape(self.core))
        tensor = memory.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conj else tensor
