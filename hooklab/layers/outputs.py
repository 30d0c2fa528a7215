"""The outputs that were kept of a forward, and how to read them: not one that has changed since."""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Self

from torch import Tensor

from hooklab._support import refuse
from hooklab._support.nested import first_shape, tensors_in
from hooklab._support.packing import has_memory

__all__ = ["NOTHING", "Outputs", "versions_of"]

NOTHING: tuple[tuple[int, int], dict] = (0, 0), {}


class Outputs(Mapping[str, Any]):
    """The outputs of the last forward, by the name of the layer: the part of `Features` that is read.

    Attributes:
        calls: for each name every output of the last forward, in order.
    """

    def __init__(self, detaches: bool):
        self._detaches = detaches
        self._first: dict[str, str] = {}  # for each name the first one of its module
        self._log: deque[tuple[str, Any, Any]] = deque()  # the outputs of the last forward, by first names
        # Of layers called since then by themselves, or in a call of a part of the model: the same.
        self._alone: dict[str, list[tuple[Any, Any]]] = {}
        self._forwards = 0
        self._sorted = NOTHING  # the log by layer, behind the number of the forward and the length of the log
        self._assumed = False  # that the outputs of the last forward were new tensors: none was looked at
        self._doubtful = False  # some of them may be there twice
        self._silent: dict[str, str] = {}  # by name why there was no forward, once that is known

    @property
    def calls(self) -> Mapping[str, list[Any]]:
        return Calls(self)

    def __getitem__(self, name: str) -> Any:
        return self._checked(name, *self._record(name)[-1])

    def __contains__(self, name: object) -> bool:
        return bool(self._calls_of(name))

    def __iter__(self) -> Iterator[str]:
        return filter(self._calls_of, self._first)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        counts = (f"{name or repr(name)}: {len(self._calls_of(name))}" for name in self._first)
        return f"{type(self).__name__}(outputs of {', '.join(counts)})"

    def _begin_anew(self) -> None:
        """A forward begins: forget the last one."""
        self._forwards += 1
        self._log.clear()
        self._alone.clear()
        self._sorted, self._assumed, self._doubtful = NOTHING, False, False

    def _noted(self) -> deque[tuple[str, Any, Any]]:
        """The log, up to date."""
        return self._log

    def _calls_of(self, name: object) -> list[tuple[Any, Any]]:
        """The calls of a layer, with what `versions_of` said when they were noted."""
        first, log = self._first.get(name), self._noted()
        seen = self._forwards, len(log)
        if self._sorted[0] != seen:
            records: dict[str, list[tuple[Any, Any]]] = {}
            for of, kept, versions in tuple(log):
                records.setdefault(of, []).append((kept, versions))
            self._sorted = seen, records
        return self._alone.get(first) or self._sorted[1].get(first, [])

    def _record(self, name: str) -> list[tuple[Any, Any]]:
        if self._doubtful and name in self._first:
            count = len(self._noted())
            raise RuntimeError(
                f"features: the last forward returned {count} outputs, made a graph though it ran under no_grad, and "
                "the forwards before it did neither, so what was computed twice in it cannot be told; run the model again"
            )
        if calls := self._calls_of(name):
            return calls
        if name not in self._first:
            close = get_close_matches(str(name), self._first) or list(self._first)[:5]
            raise KeyError(f"features: {name!r} was not asked for; asked for: {refuse.listed(close)}")
        if not self._forwards:
            why = self._why_silent(name)
            raise KeyError(f"features: no output of {name!r} yet; run the model inside the block {why}")
        raise KeyError(
            f"features: the last forward did not call {name!r}: it was skipped, or an error ended the forward before, "
            "or its forward is called directly, or its weights are used without calling it (as nn.MultiheadAttention does with "
            "out_proj), or another layer has taken its place since"
        )

    def _why_silent(self, name: str) -> str:
        return self._silent.get(name, "")

    def _checked(self, name: str, kept: Any, versions: Any) -> Any:
        what = None
        if versions_of(kept) != versions:
            what = (
                "has been overwritten in place since the layer returned it, by a later layer such as ReLU(inplace=True) or "
                "by `+=`"
            )
            if self._assumed:
                what += " (or the layer works in place itself, and did not before: then run the model again)"
                self._look_again()
        elif any(map(_is_freed, tensors_in(kept))):  # to read it would end the process
            what = "has no memory any more: something that can compute it again has freed it, as reversible networks do"
        if what is not None:
            cure = f"features(model, {name!r}, keep=lambda t: t.detach().clone())"
            if not self._detaches:
                cure = "let `keep` end in .clone(), or take keep=with_grad without copy=False"
            raise RuntimeError(f"features: the output of {name!r} {what}; keep a copy of its own: {cure}")
        # A reentrant checkpoint of the whole model gives its output a graph afterwards.
        late = self._detaches and isinstance(kept, Tensor) and kept.requires_grad
        return kept.detach() if late else kept

    def _look_again(self) -> None:
        """In the next forward each output has to be looked at."""

    # ---- copies ----

    def _records(self) -> dict[str, Any]:
        """What was kept, for a copy; in place of its version each says whether it is as it was."""

        def fresh(*records: tuple) -> list[tuple]:
            return [(*record, versions_of(record[-1]) == versions) for *record, versions in records]

        alone = {name: fresh(*calls) for name, calls in self._alone.items()}
        return {"_log": fresh(*self._noted()), "_alone": alone, "_sorted": NOTHING}

    def __deepcopy__(self, memo: dict) -> Self:
        """What was kept so far. What cannot be copied, such as a tensor with a graph, is in both."""

        def copied(record: tuple) -> tuple:
            trial = dict(memo)  # of what fails nothing may stay there
            try:
                twin = copy.deepcopy(record, trial)
            except Exception:
                return record
            memo.setdefault(id(memo), []).extend(trial.pop(id(trial), ()))  # what the ids of it belong to
            memo.update(trial)
            return twin

        state = self.__getstate__()
        log, alone = state.pop("_log"), state.pop("_alone")
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        records = {
            "_log": list(map(copied, log)),
            "_alone": {name: list(map(copied, calls)) for name, calls in alone.items()},
        }
        twin.__setstate__(copy.deepcopy(state, memo) | records)
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        def numbered(records: list[tuple]) -> Iterator[tuple]:
            return ((*record, versions_of(record[-1]) if fresh else "edited") for *record, fresh in records)

        alone = {name: list(numbered(calls)) for name, calls in state["_alone"].items()}
        vars(self).update(state, _log=deque(numbered(state["_log"])), _alone=alone)


class Calls(Mapping[str, list[Any]]):
    """Every output of the last forward, by the name of the layer."""

    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def __getitem__(self, name: str) -> list[Any]:
        return [self._outputs._checked(name, *call) for call in self._outputs._record(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._outputs

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


def _is_freed(tensor: Tensor) -> bool:
    return has_memory(tensor) and not tensor.untyped_storage().nbytes()


def versions_of(kept: Any) -> Any:
    """Changes whenever a tensor in `kept`, or one that shares its memory, is edited in place.

    Inference tensors have no version; of them it is the shape, since they may be the very tensor that later layers get.
    """
    if isinstance(kept, Tensor):
        return first_shape(kept) if kept.is_inference() else kept._version
    return [versions_of(tensor) for tensor in tensors_in(kept)]
