"""A store in memory that counts: what was written, what was read, what is still held."""

from torch import Tensor


class CountingStore:
    def __init__(self) -> None:
        self.written = self.read_bytes = self.writes = self.reads = self.held = 0
        self.dtypes: set = set()

    def write(self, tensor: Tensor) -> "Copy":
        self.writes += 1
        self.written += tensor.nbytes
        self.dtypes.add(tensor.dtype)
        return Copy(self, tensor.clone())

    def read(self, slot: "Copy") -> Tensor:
        self.reads += 1
        self.read_bytes += slot.tensor.nbytes
        return slot.tensor.clone()


class Copy:
    def __init__(self, store: CountingStore, tensor: Tensor):
        self.store, self.tensor = store, tensor
        self.number = store.writes
        store.held += 1

    def __del__(self) -> None:
        self.store.held -= 1
