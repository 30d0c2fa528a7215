"""How a tensor lies in memory: what of it must be moved, and how to lay it out again."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Geometry"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape, strides, dtype and device of a strided tensor; `flat` takes its content, `rebuild` puts it back."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    conj: bool
    span: int  # elements of memory from the first to the last
    core: tuple[int, ...]  # the shape, with 1 where expand repeats

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        shape, strides = tuple(tensor.shape), tensor.stride()
        core = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(core, strides, strict=True))
        return cls(shape, strides, tensor.dtype, tensor.device, tensor.is_conj(), span, core)

    @property
    def has_gaps(self) -> bool:
        """True for a slice: between its elements lie others that are not its own."""
        return self.span > torch.Size(self.core).numel()

    @property
    def nbytes(self) -> int:
        """What has to be moved."""
        return min(self.span, torch.Size(self.core).numel()) * self.dtype.itemsize

    def flat(self, tensor: Tensor) -> Tensor:
        """The content as a 1-D tensor: a view of the same memory, or for a slice a copy of its own elements."""
        physical = tensor.conj() if self.conj else tensor  # the bits as they lie in memory
        if self.has_gaps:
            return physical.as_strided(self.core, self.strides).reshape(-1)
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
        memory = flat.reshape(-1).to(self.device)
        if self.has_gaps:
            memory = torch.empty(self.span, dtype=self.dtype, device=self.device)
            memory.as_strided(self.core, self.strides).copy_(flat.reshape(self.core))
        tensor = memory.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conj else tensor

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"
