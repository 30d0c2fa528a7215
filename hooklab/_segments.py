"""What `checkpoint_segments` returns: the Sequentials that run in segments, until they are switched back."""

import warnings
from collections.abc import Mapping

from torch import nn

from hooklab import _refuse
from hooklab._installed import Installed
from hooklab._plan import planned
from hooklab._segmented import Segmented

__all__ = ["Segments"]


class Segments(Installed):
    """The Sequentials that run in segments: what `checkpoint_segments` returns."""

    _gone = "its Sequentials have been switched back"

    def __init__(self, model: nn.Module, plan: Mapping[str, int]):
        super().__init__("checkpoint_segments")
        with self._all_or_none():
            for name, module in planned(model, plan).items():
                self._handles.append(Switched(name, module, plan[name]))

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        idle = [one.name for one in self._handles if not one.module._hooklab_called]
        self.remove()
        if idle and kind is None:
            why = "was the model run inside the block, and does it call these layers as a whole?"
            warnings.warn(f"checkpoint_segments: never called: {_refuse.listed(idle)}; {why}", stacklevel=2)

    def __repr__(self) -> str:
        parts = (f"{one.name or repr(one.name)}: {one.module._hooklab_blocks}" for one in self._handles)
        return f"Segments({', '.join(parts) or 'removed'})"


class Switched:
    """One of them. It gets a class of its own, which holds what belongs to it."""

    def __init__(self, name: str, module: nn.Sequential, blocks: int):
        self.name, self.module, kind = name, module, type(module)
        facts = {"_hooklab_kind": kind, "_hooklab_blocks": blocks, "_hooklab_called": []}
        module.__class__ = type(kind.__name__, (Segmented, kind), facts)

    def remove(self) -> None:
        """Let it run as before."""
        if Segmented in type(self.module).__bases__:
            self.module.__class__ = self.module._hooklab_kind
        else:  # it has another class above ours since then, as from `fully_shard`: that one stays
            type(self.module)._hooklab_blocks = 0
