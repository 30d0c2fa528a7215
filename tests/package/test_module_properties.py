"""Module hooks on random trees of modules: random nesting of outputs, in-place layers, repeats, failures, removals."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Pair, Result, same_state, state_of
from torch import nn

from hooklab import features, hooks_on, layer_statistics, trace, verbose
from hooklab._support.nested import map_tensors, tensors_in

WRAPS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [[x], None],
    "dict": lambda x: {"a": x, "b": {"c": x * 2}},
    "named": lambda x: Pair(x, 3),
    "dataclass": lambda x: Result(x, [x - 1]),
}
STEPS = {
    "double": lambda x: x * 2,
    "relu_": torch.relu_,
    "add_": lambda x: x.add_(1),
    "view": lambda x: x.flatten().view(x.shape),
    "same": lambda x: x,
}


class Failure(Exception):
    pass


class Leaf(nn.Module):
    def __init__(self, step, wrap):
        super().__init__()
        self.step, self.wrap = step, wrap

    def forward(self, x):
        if self.step == "fail":
            raise Failure
        return WRAPS[self.wrap](STEPS[self.step](x * 1.5))


class Tree(nn.Module):
    """Calls its parts in turn, some of them twice, and wraps what the last one returns."""

    def __init__(self, parts, wrap):
        super().__init__()
        self.parts, self.wrap, self.twice = (
            nn.ModuleList(part for part, _ in parts),
            wrap,
            [twice for _, twice in parts],
        )

    def forward(self, x):
        for part, twice in zip(self.parts, self.twice, strict=True):
            for _ in range(1 + twice):
                x = next(tensors_in(part(x)))
        return WRAPS[self.wrap](x)


wraps, booleans = st.sampled_from(sorted(WRAPS)), st.booleans()
steps = st.sampled_from(sorted(STEPS)) | st.sampled_from(sorted(STEPS)) | st.sampled_from([*sorted(STEPS), "fail"])
leaves = st.builds(Leaf, steps, wraps)
trees = st.recursive(
    leaves,
    lambda parts: st.builds(Tree, st.lists(st.tuples(parts, booleans), min_size=1, max_size=4), wraps),
    max_leaves=8,
)


def inputs():
    return torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()


def everything(model):
    """Patterns for all layers and the model itself."""
    return [""] if len(list(model.modules())) == 1 else ["**", ""]


def outcome(model):
    """What a forward returns, or the error it raised."""
    try:
        return [tensor.detach().clone() for tensor in tensors_in(model(inputs()))]
    except Failure as error:
        return type(error)


def same(one, other):
    if isinstance(one, type) or isinstance(other, type):
        return one is other
    return len(one) == len(other) and all(map(torch.equal, one, other))


def by_hand(model):
    """Every finished call of every module: name and cloned output, in order."""
    calls, handles = [], []
    for name, module in model.named_modules():

        def hook(module, args, output, name=name):
            calls.append((name, map_tensors(lambda tensor: tensor.detach().clone(), output)))

        handles.append(module.register_forward_hook(hook))
    result = outcome(model)
    for handle in handles:
        handle.remove()
    return calls, result


def watched(model, *contexts):
    """The outcome inside the contexts, which end with the model, also when it raises."""
    result = None
    with contexts[0]:
        result = watched(model, *contexts[1:]) if contexts[1:] else outcome(model)
    return result


@settings(max_examples=60, deadline=None)
@given(model=trees)
def test_all_that_is_seen_is_what_hooks_by_hand_see_and_nothing_changes(model):
    calls, plain = by_hand(model)
    before, lines = state_of(model), []
    f = features(model, *everything(model), keep=lambda tensor: tensor.detach().clone())
    stats, traced = layer_statistics(model, *everything(model)), trace(model)
    result = watched(model, verbose(model, *everything(model), write=lines.append), f, stats, traced)
    assert same(plain, result)
    assert same_state(before, state_of(model))
    assert hooks_on(model) == []
    for name in {name for name, _ in calls}:
        own = [output for called, output in calls if called == name]
        assert len(f.calls[name]) == len(own)
        for kept, output in zip(f.calls[name], own, strict=True):
            assert type(kept) is type(output)
            assert all(map(torch.equal, tensors_in(kept), tensors_in(output)))
        assert stats[name].count == sum(tensor.numel() for output in own for tensor in tensors_in(output))
    assert set(f) == {name for name, _ in calls}
    written = [line.split()[0] for line in lines if "failed on" not in line]
    assert written == [name or type(model).__name__ for name, _ in calls]
    assert sum("failed on" in line for line in lines) == (plain is Failure)


@settings(max_examples=60, deadline=None)
@given(model=trees, mode=st.sampled_from([torch.enable_grad, torch.no_grad, torch.inference_mode]))
def test_a_detached_feature_is_right_or_refused(model, mode):
    calls, _ = by_hand(model)
    with features(model, *everything(model)) as f, mode():
        outcome(model)
    for name in f:
        last = [output for called, output in calls if called == name][-1]
        try:
            kept = f[name]
        except RuntimeError:
            continue
        assert all(map(torch.equal, tensors_in(kept), tensors_in(last))), name


@settings(max_examples=40, deadline=None)
@given(model=trees, data=st.data())
def test_run_stops_with_everything_that_was_asked_for(model, data):
    calls, plain = by_hand(model)
    reached = list(dict.fromkeys(name for name, _ in calls if name))
    if not reached:
        return
    names = data.draw(st.lists(st.sampled_from(reached), min_size=1, max_size=3, unique=True))
    lines = []
    with verbose(model, "**", write=lines.append), features(model, *names) as f:
        f.run(inputs())
    assert set(f) == set(names)
    assert plain is Failure or not any("failed" in line for line in lines)
    last_needed = max(next(index for index, (name, _) in enumerate(calls) if name == wanted) for wanted in names)
    assert len(lines) == last_needed + 1


@settings(max_examples=40, deadline=None)
@given(model=trees, order=st.permutations(range(5)))
def test_whatever_the_order_of_removal_only_the_own_hooks_go(model, order):
    root = everything(model)
    user = model.register_forward_hook(lambda module, args, output: None)
    tools = [
        features(model, *root), verbose(model, *root, write=lambda line: None), layer_statistics(model, *root),
        layer_statistics(model, *root, of="grad_output"), features(model, *root),
    ]  # fmt: skip
    for index in order:
        outcome(model)
        tools[index].remove()
        tools[index].remove()
    assert [hook.owner for hook in hooks_on(model)] == ["user"]
    user.remove()
    assert hooks_on(model) == []


def by_hand_with_versions(model, x):
    """Every finished call: name, its tensors, their versions then, and copies of them."""
    calls, handles = [], []
    for name, module in model.named_modules():

        def hook(module, args, output, name=name):
            tensors = list(tensors_in(output))
            calls.append((name, tensors, [t._version for t in tensors], [t.detach().clone() for t in tensors]))

        handles.append(module.register_forward_hook(hook))
    with contextlib.suppress(Failure):
        model(x)
    for handle in handles:
        handle.remove()
    return calls


@settings(max_examples=60, deadline=None)
@given(model=trees, edited=st.lists(booleans, min_size=3, max_size=4))
def test_each_forward_without_grad_is_told_apart_from_what_was_overwritten(model, edited):
    """Whatever the forwards before it were like: after some of them outputs are no longer looked at."""
    with torch.no_grad(), features(model, *everything(model)) as f:
        for edit in edited:
            x = torch.linspace(-1, 1, 6).reshape(2, 3)
            if edit:
                x[0] = 2.0
            calls = by_hand_with_versions(model, x.clone() if edit else x)
            with contextlib.suppress(Failure):
                model(x)
            assert set(f) == {name for name, *_ in calls}
            for name in f:
                own = [call[1:] for call in calls if call[0] == name]
                if all(
                    t._version == version
                    for tensors, versions, _ in own
                    for t, version in zip(tensors, versions, strict=True)
                ):
                    kept = f.calls[name]
                    assert len(kept) == len(own)
                    for output, (_, _, copies) in zip(kept, own, strict=True):
                        assert all(map(torch.equal, tensors_in(output), copies))
                else:
                    with pytest.raises(RuntimeError, match="overwritten"):
                        f.calls[name]
