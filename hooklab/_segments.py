"""What `checkpoint_segments` returns: the Sequentials that run in segments, until they are switched back."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from hooklab import _refuse
from hooklab._plan import planned
from hooklab._segmented import Segmented

__all__ = ["Segments"]


class Segments:
    """The Sequentials that run in segments: what `checkpoint_segments` returns."""

    def __init__(self, model: nn.Module, plan: Mapping[str, int]):
        self._switched: dict[str, nn.Sequential] = {}
        try:
            for name, module in planned(model, plan).items():
                kind = type(module)
                facts = {"_hooklab_kind": kind, "_hooklab_blocks": plan[name], "_hooklab_called": []}
                module.__class__ = type(kind.__name__, (Segmented, kind), facts)
                self._switched[name] = module
        except BaseException:
            self.remove()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model is an ordinary one: the copy of its handle has nothing to switch back."""
        return {"_switched": {}}

    def remove(self) -> None:
        """Let the Sequentials run as before. Twice is harmless."""
        while self._switched:
            _, module = self._switched.popitem()
            if Segmented in type(module).__bases__:
                module.__class__ = module._hooklab_kind
            else:  # it has another class above ours since then, as from `fully_shard`: that one stays
                type(module)._hooklab_blocks = 0

    def __enter__(self) -> "Segments":
        if not self._switched:
            raise RuntimeError(
                "checkpoint_segments: its Sequentials have been switched back; call checkpoint_segments again"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        idle = [name for name, module in self._switched.items() if not module._hooklab_called]
        self.remove()
        if idle and kind is None:
            warnings.warn(
                f"checkpoint_segments: never called: {_refuse.listed(idle)}; was the model run inside the block, and does "
                "it call these layers as a whole?",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        parts = (f"{name or repr(name)}: {module._hooklab_blocks}" for name, module in self._switched.items())
        return f"Segments({', '.join(parts) or 'removed'})"
