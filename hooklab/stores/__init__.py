"""Part 3: where offloaded tensors live. A store has two methods: `write(tensor) -> slot`, `read(slot) -> tensor`.

A slot is any object; its space is free again once nobody holds the slot. Autograd may still use what `write` is
given: copy it, as `clone` does. A backward may edit what `read` returns: copy that too, where it may be read again.
A store may also have `prefetch(slot)`, a hint that `slot` is read soon, and `reaches(tensor)`, False for what it
cannot take. A store of your own can be this short:

    >>> class InAList:
    ...     def write(self, tensor):
    ...         return [tensor.clone()]
    ...     def read(self, slot):
    ...         return slot[0].clone()
"""

from hooklab.stores.disk import Disk
from hooklab.stores.pinned import PinnedMemory

__all__ = ["Disk", "PinnedMemory"]
