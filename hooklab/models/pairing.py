"""Which call of one model belongs to which call of the other."""

from collections import defaultdict, deque
from collections.abc import Mapping
from difflib import SequenceMatcher

from torch import nn

from hooklab.models.calls import Call, sizes

__all__ = ["Pair", "by_name", "by_order"]

Pair = tuple[Call, Call]


def by_order(of_a: list[Call], of_b: list[Call]) -> list[Pair]:
    """The longest stretches in which both models return the same shapes one after the other."""
    shapes = [[sizes(call.output) for call in calls] for calls in (of_a, of_b)]
    blocks = SequenceMatcher(None, shapes[0], shapes[1], autojunk=False).get_matching_blocks()
    pairs = [(of_a[i + k], of_b[j + k]) for i, j, length in blocks for k in range(length)]
    if not pairs:
        found = [", ".join(f"{call.name!r} {sizes(call.output)}" for call in calls[:3]) for calls in (of_a, of_b)]
        raise ValueError(
            "compare: nothing to pair, since no two layers return the same shape; "
            f"a: {found[0] or 'no layer'}; b: {found[1] or 'no layer'}; name the layers: pairs={{...}}"
        )
    return pairs


def by_name(
    of_a: list[Call], of_b: list[Call], names: Mapping[str, str], in_a: dict[str, nn.Module], in_b: dict[str, nn.Module]
) -> list[Pair]:
    """Each call in `a` with the next call of the layer that `names` gives it for a partner."""
    partners: dict[nn.Module, nn.Module] = {}
    for name, other in names.items():
        if in_a[name] in partners:
            raise ValueError(f"compare: {name!r} of a stands in pairs under another name, too; leave one out")
        partners[in_a[name]] = in_b[other]
    for which, layers, calls in (("a", in_a, of_a), ("b", in_b, of_b)):
        for name in layers:
            _refuse_silent(which, name, [call for call in calls if call.module is layers[name]])
    waiting: defaultdict[nn.Module, deque[Call]] = defaultdict(deque)
    for call in of_b:
        waiting[call.module].append(call)
    pairs = [(call, queue.popleft()) for call in of_a if (queue := waiting[partners[call.module]])]
    for call, match in pairs:
        if sizes(call.output) != sizes(match.output):
            raise ValueError(
                f"compare: {call.name!r} of a returns {sizes(call.output)}, {match.name!r} of b {sizes(match.output)}; "
                "only outputs of the same shape can be compared: pair it with another layer, or leave it out of pairs"
            )
    return pairs


def _refuse_silent(which: str, name: str, calls: list[Call]) -> None:
    if not calls:
        what = f"the forward of {which} did not call {name!r}: it was skipped, or only its weights are used"
    elif not sizes(calls[0].output):
        what = f"{name!r} of {which} returns no tensor"
    else:
        return
    raise ValueError(f"compare: {what}; leave it out of pairs, or pair a layer around it")
