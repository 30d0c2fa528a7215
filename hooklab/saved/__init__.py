"""Part 3 of the course: what autograd saves for backward, moving it elsewhere, or recomputing it."""

from hooklab.saved.offload import Offload
from hooklab.saved.record import saved_tensors
from hooklab.saved.segments import checkpoint_segments

__all__ = ["Offload", "checkpoint_segments", "saved_tensors"]
