"""trace: the order it shows is the order of hooks hung by hand, and it changes nothing."""

import copy
import gc
import io
import pickle
import weakref
from collections import Counter
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from models import Careful
from torch import nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from hooklab import hooks_on, no_leftovers, trace

SEES_NEW_NODES = hasattr(graph, "node_creation_hook")
sees_new_nodes = pytest.mark.skipif(not SEES_NEW_NODES, reason="this PyTorch cannot show Nodes as they are made")


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))


@pytest.fixture
def batch():
    return torch.linspace(-1, 1, 15).reshape(5, 3)


def kinds(events):
    return [event.kind for event in events]


# ---- the order, against hooks hung by hand ----


def test_a_computed_tensor_has_the_order_that_was_observed_by_hand():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.retain_grad()
    by_hand = []
    y.register_hook(lambda grad: by_hand.append("tensor hook"))
    y.grad_fn.register_prehook(lambda *grads: by_hand.append(f"Node pre-hook, .grad {y.grad is not None}"))
    y.grad_fn.register_hook(lambda *grads: by_hand.append("Node hook"))
    with trace(y=y) as traced:
        (y * 3).sum().backward()
    assert by_hand == ["tensor hook", "Node pre-hook, .grad True", "Node hook"]
    seen = [event for event in traced.events if event.where in ("y", "MulBackward0")][-4:]
    assert kinds(seen) == ["tensor hook", "retain_grad", "Node pre-hook", "Node hook"]
    assert [event.inferred for event in seen] == [False, True, False, False]


def test_a_leaf_has_the_order_that_was_observed_by_hand():
    x = torch.ones(2, requires_grad=True)
    by_hand = []
    x.register_hook(lambda grad: by_hand.append("tensor hook"))
    x.register_post_accumulate_grad_hook(lambda leaf: by_hand.append("post-accumulate-grad hook"))
    y = x * 2
    node = graph.get_gradient_edge(x).node
    node.register_prehook(lambda *grads: by_hand.append("Node pre-hook"))
    node.register_hook(lambda *grads: by_hand.append("Node hook"))
    with trace(x=x) as traced:
        y.sum().backward()
    assert by_hand == ["tensor hook", "Node pre-hook", "post-accumulate-grad hook", "Node hook"]
    assert kinds(event for event in traced.events if event.where in ("x", "AccumulateGrad x")) == by_hand


def test_two_tensors_get_a_multi_grad_hook_and_no_node_is_seen_twice():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    with trace(x=x, y=y) as traced:
        y.sum().backward()
    assert [event.where for event in traced.events if event.kind == "multi-grad hook"] == ["x, y"]
    nodes = [event.where for event in traced.events if event.kind == "Node pre-hook"]
    assert len(nodes) == len(set(nodes))


def test_the_multi_grad_hook_is_pytorchs_own():
    x, y = (torch.ones(shape, requires_grad=True) * 1 for shape in (2, 3))
    seen = []
    with graph.register_multi_grad_hook([x, y], seen.append), trace(x=x, y=y) as traced:
        for loss in (x.sum() + y.sum(), y.sum(), x.sum()):
            loss.backward(retain_graph=True)
    shapes = [None if grads[0] is None else tuple(grads[0].shape) for grads in seen]
    assert [event.shape for event in traced.events if event.kind == "multi-grad hook"] == shapes


def test_two_tensors_of_which_one_is_a_leaf_cannot_be_traced_under_autograd_grad():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    with trace(x=x, y=y), pytest.raises(RuntimeError, match=r"A leaf node was passed.*autograd\.grad"):
        torch.autograd.grad(y.sum(), x)


def test_no_tensor_hook_but_the_one_asked_for_fires_under_autograd_grad():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    with trace(x=x, y=y) as traced:
        torch.autograd.grad((y * 3).sum(), y)
    assert [event.where for event in traced.events if event.kind == "tensor hook"] == ["y"]
    assert "post-accumulate-grad hook" not in kinds(traced.events)


@sees_new_nodes
def test_a_training_step_shows_every_kind_in_its_phase(net, batch):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trace(net) as traced:
        net(batch).sum().backward()
        optimizer.step()
    assert set(kinds(traced.phase("forward"))) == {"forward pre-hook", "forward hook", "pack"}
    assert {"Node pre-hook", "Node hook", "unpack", "post-accumulate-grad hook"} <= set(kinds(traced.phase("backward")))
    assert kinds(traced.phase("step")) == ["optimizer step pre-hook", "optimizer step post-hook"]
    accumulated = [event.where for event in traced.events if event.kind == "post-accumulate-grad hook"]
    assert sorted(accumulated) == sorted(name for name, _ in net.named_parameters())


@sees_new_nodes
def test_backward_goes_through_the_modules_from_last_to_first(net, batch):
    with trace(net) as traced:
        net(batch).sum().backward()
    for what, order in {
        "begins": ["Sequential", "3", "2", "1", "0"],
        "ends": ["3", "2", "1", "0", "Sequential"],
    }.items():
        assert [event.where for event in traced.events if event.kind == f"module backward {what}"] == order


@sees_new_nodes
def test_what_is_unpacked_was_packed_with_the_same_shape(net, batch):
    with trace(net) as traced:
        net(batch).sum().backward()
    shapes = {kind: sorted(event.shape for event in traced.events if event.kind == kind) for kind in ("pack", "unpack")}
    assert shapes["unpack"]
    assert shapes["pack"] == shapes["unpack"]


def test_a_second_call_in_one_forward_is_numbered_and_a_second_forward_is_not():
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    with trace(net) as traced:
        net(torch.ones(1, 2))
        net(torch.ones(1, 2))
    assert [event.where for event in traced.events if event.kind == "forward hook"] == [
        "0",
        "1",
        "0 #2",
        "Sequential",
    ] * 2


# ---- it changes nothing ----


def step(net, batch, within):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    outputs = []
    for _ in range(2):
        optimizer.zero_grad()
        with within():
            outputs.append(net(batch))
            outputs[-1].square().sum().backward()
            optimizer.step()
    return [*outputs, *(param.grad for param in net.parameters()), *net.state_dict().values()]


def test_values_gradients_and_statistics_are_the_same_to_the_bit(net, batch):
    twin = copy.deepcopy(net)
    plain = step(net, batch, lambda: torch.enable_grad())
    traced = step(twin, batch, lambda: trace(twin))
    assert all(torch.equal(left, right) for left, right in zip(plain, traced, strict=True))


def test_the_users_own_hooks_fire_in_the_same_order(net, batch):
    def order(within):
        fired = []
        handles = [
            hook
            for name, module in net.named_children()
            for hook in (
                module.register_forward_pre_hook(lambda *args, name=name: fired.append(f"pre {name}")),
                module.register_forward_hook(lambda *args, name=name: fired.append(f"forward {name}")),
            )
        ]
        handles += [
            param.register_hook(lambda grad, name=name: fired.append(f"grad {name}"))
            for name, param in net.named_parameters()
        ]
        with within():
            net(batch).sum().backward()
        for handle in handles:
            handle.remove()
        return fired

    assert order(lambda: torch.enable_grad()) == order(lambda: trace(net))


def test_an_edit_in_place_after_saving_still_raises():
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    with trace(x=x):
        z = y**2
        y.add_(1)
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
        ):
            z.sum().backward()


def test_the_saved_tensor_hooks_active_on_entry_go_on_working():
    moved = []
    x = torch.ones(3, requires_grad=True)
    with (
        graph.saved_tensors_hooks(lambda tensor: moved.append("in") or tensor * 2, lambda tensor: tensor / 2),
        trace(x=x) as traced,
    ):
        (x**2).sum().backward()
    assert moved == ["in"]
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    assert kinds(traced.events).count("pack") == 1


def test_double_backward_goes_through():
    x = torch.tensor([2.0], requires_grad=True)
    with trace(x=x):
        (first,) = torch.autograd.grad(x**3, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    assert second.item() == 12.0


# ---- it leaves nothing ----


def test_no_hook_outlives_the_block(net, batch):
    loss = net(batch).sum()
    with no_leftovers(net):
        with trace(net, loss=loss) as traced:
            net(batch)
        traced.remove()
    count = len(traced.events)
    loss.backward()
    assert len(traced.events) == count
    assert loss._backward_hooks is None or not loss._backward_hooks


def test_a_model_that_raises_halfway_is_left_clean_and_its_last_line_names_the_place(net):
    net[3].forward = lambda x: 1 / 0
    with no_leftovers(net), pytest.raises(ZeroDivisionError), trace(net) as traced:
        net(torch.ones(5, 3))
    raised = [event.where for event in traced.events if event.kind == "forward raised"]
    assert raised == ["3", "Sequential"]
    assert "forward raised" in traced.lines()[-1]


def test_a_trace_goes_on_rightly_after_a_forward_that_raised(net):
    with trace(net) as traced:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(5, 7))
        net(torch.ones(5, 3))
    assert traced.events[-1].inside == ("Sequential",)


def test_a_trace_goes_on_rightly_after_a_forward_that_was_stopped_by_ctrl_c(net, batch):
    class Stopped(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(net, Stopped())
    with trace(model) as traced:
        for _ in range(2):
            begun = len(traced.events)
            with pytest.raises(KeyboardInterrupt):
                model(batch)
    first = traced.events[begun]
    assert (first.where, first.inside) == ("Sequential", ("Sequential",))


def test_a_trace_removed_inside_its_block_notes_nothing_more(net, batch):
    with no_leftovers(net), trace(net) as traced:
        net(batch).sum().backward()
        traced.remove()
        count = len(traced.events)
        net(batch).sum().backward()
    assert len(traced.events) == count


@sees_new_nodes
def test_packing_has_its_place_and_its_phase():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2, requires_grad=True)

    def places(kind, run):
        with trace(model) as traced:
            run()
        found = [event for event in traced.events if event.kind == kind]
        return [(event.phase, event.where, event.inside[-1:]) for event in found]

    unpacked = places("unpack", lambda: model(x).sum().backward())
    tanh, linear = ("backward", "TanhBackward0", ("1",)), ("backward", "AddmmBackward0", ("0",))
    assert unpacked == [tanh, linear, linear]
    # What a reentrant checkpoint computes again is packed in backward, and inside a module.
    packed = places("pack", lambda: checkpoint(model, x, use_reentrant=True).sum().backward())
    again = [("recompute", "", ("0",)), ("recompute", "", ("0",)), ("recompute", "", ("1",))]
    assert packed == [("forward", "", ()), *again]
    packed = places("pack", lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True))
    assert set(packed[3:]) == {("backward", "", ())}


@pytest.mark.parametrize("forward", ["two", "nested", "before the block"])
def test_a_node_is_hooked_once_however_many_outputs_it_stands_behind(forward):
    model, first, second = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2), torch.zeros(1, 2)
    traced = trace(model)
    if forward == "before the block":
        y = model(first)
        with traced:
            y.sum().backward()
    else:
        y = model(model(first)) if forward == "nested" else model(first) + model(second)
        y.sum().backward()
        traced.remove()
    ran = Counter(event.where for event in traced.events if event.kind == "Node pre-hook")
    calls = 1 if forward == "before the block" else 2
    assert ran["AccumulateGrad 0.weight"] == ran["AccumulateGrad 0.bias"] == 1
    assert ran["AddmmBackward0"] == ran["ReluBackward0"] == calls


def test_what_is_unpacked_after_the_block_is_no_event(net, batch):
    with trace(net) as traced:
        loss = net(batch).sum()
    count = len(traced.events)
    loss.backward()
    assert len(traced.events) == count


def test_a_tensor_may_be_freed_inside_the_block():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    alive = weakref.ref(y)
    with trace(y=y) as traced:
        del y
        gc.collect()
        assert alive() is None
        (x * 3).sum().backward()
    assert "y" not in [event.where for event in traced.events]


@pytest.mark.parametrize("ended", [True, False])
def test_after_the_block_nothing_waits_for_the_garbage_collector(ended):
    gc.collect()
    gc.disable()
    try:
        model, batch = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.ones(5, 3, requires_grad=True)
        model[1].register_forward_pre_hook(lambda *args: None if ended else 1 / 0)
        alive = [weakref.ref(model), weakref.ref(batch)]
        with suppress(ZeroDivisionError), trace(model, batch=batch) as traced:
            loss = model(batch).sum()
            alive.append(weakref.ref(loss))
            loss.backward()
            del loss
        del model, batch
        assert [reference() for reference in alive] == [None] * len(alive)
        assert traced.events
    finally:
        gc.enable()


def test_copies_of_a_traced_model_record_nothing_and_it_can_be_saved_and_sent(recwarn):
    model, file = nn.Sequential(nn.Linear(2, 1), nn.Tanh()), io.BytesIO()
    with trace(model, weight=model[0].weight) as traced:
        torch.save(model, file)
        file.seek(0)
        sent = pickle.loads(ForkingPickler.dumps(model))  # as to a process that is spawned
        twins = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
            sent,
        ]
        for twin in twins:
            twin(torch.ones(1, 2)).sum().backward()
            assert twin[0].weight.grad is not None
    assert not {"forward hook", "tensor hook", "post-accumulate-grad hook"} & set(kinds(traced.events))
    assert not [warning for warning in recwarn if "will not be serialized" in str(warning.message)]


def test_a_model_that_keeps_its_trace_can_be_copied_and_saved():
    model = nn.Linear(2, 1)
    with trace(model) as model.seen:
        model(torch.ones(1, 2)).sum().backward()
        during = copy.deepcopy(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), during):
        assert twin.seen.lines() == model.seen.lines()
        twin.seen.remove()


def test_without_a_with_modules_and_their_nodes_are_seen_until_removed(net, batch):
    traced = trace(net)
    net(batch).sum().backward()
    traced.remove()
    traced.remove()
    count = len(traced.events)
    net(batch).sum().backward()
    assert len(traced.events) == count
    assert {"forward hook", "Node hook", "post-accumulate-grad hook"} <= set(kinds(traced.events))


# ---- real models ----


def test_a_checkpointed_block_shows_its_second_forward_as_recompute(batch):
    block = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    with no_leftovers(block), trace(block) as traced:
        checkpoint(block, batch.requires_grad_(), use_reentrant=False).sum().backward()
    fired = [(event.phase, event.kind, event.where) for event in traced.events if event.kind.startswith("forward ")]
    assert [where for phase, kind, where in fired if (phase, kind) == ("forward", "forward hook")] == [
        "0",
        "1",
        "Sequential",
    ]
    # The second forward is cut short, by an exception, as soon as the last tensor is there again.
    assert ("recompute", "forward hook", "0") in fired
    assert ("recompute", "forward raised", "1") in fired


def test_a_resnet_50_with_in_place_layers_is_traced():
    torchvision = pytest.importorskip("torchvision")
    net = torchvision.models.resnet50().train()
    handle = net.layer1.register_forward_hook(lambda *args: None)
    with no_leftovers(net), trace(net) as traced:
        net(torch.randn(2, 3, 32, 32)).sum().backward()
    handle.remove()
    calls = []
    handles = [module.register_forward_hook(lambda *args: calls.append(1)) for module in net.modules()]
    net(torch.randn(2, 3, 32, 32))
    for handle in handles:
        handle.remove()
    forward = [event.where for event in traced.events if event.kind == "forward hook"]
    assert len(forward) == len(calls) > 150
    assert "layer1.0.relu #3" in forward


# ---- text ----


def test_lines_are_numbered_indented_and_the_same_in_every_run(net, batch):
    def lines():
        net.zero_grad()
        with trace(net.eval()) as traced:
            net(batch).sum().backward()
        return traced.lines()

    first = lines()
    assert first == lines()
    assert first[0] == "   1 forward   forward pre-hook          Sequential (5, 3)"
    assert first[1] == "   2 forward   forward pre-hook            0 (5, 3)"


def test_a_trace_shows_its_counts_and_a_table():
    x = torch.ones(1, requires_grad=True)
    with trace(x=x) as traced:
        assert repr(traced) == "Trace(no event yet)"
        (x * 1).backward()
    assert repr(traced) == f"Trace({len(traced.events)} events in backward)"
    assert "<td>backward</td><td>tensor hook</td><td>x</td><td>(1,)</td>" in traced._repr_html_().replace(
        ' style="text-align: left"', ""
    )
    assert list(traced.to_dataframe()["kind"]) == kinds(traced.events)


@sees_new_nodes
def test_two_forwards_in_one_backward_have_backwards_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with trace(model) as log:
        (model(torch.ones(1, 2)).sum() + model(torch.ones(1, 2)).sum()).backward()
    once = ["begins Sequential", "begins 1", "ends 1", "begins 0", "ends 0", "ends Sequential"]
    inferred = [
        f"{event.kind.removeprefix('module backward ')} {event.where}" for event in log.events if event.inferred
    ]
    assert Counter(inferred) == Counter(once * 2)
    for where in ("1", "0"):  # the second begins after the first has ended
        assert [line.split()[0] for line in inferred if line.endswith(f" {where}")] == ["begins", "ends"] * 2


def test_every_gradient_that_replaces_another_is_told():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.retain_grad()
    z = y.sum()
    with trace(y=y) as log:
        for _ in range(6):
            z.backward(retain_graph=True)
    assert sum(event.kind == "retain_grad" for event in log.events) == 6


def test_a_gradient_that_is_edited_by_hand_is_not_told():
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    y.retain_grad()
    loss = y.sum()
    with trace(y=y) as log:
        loss.backward(retain_graph=True)
        y.grad.zero_()
        torch.optim.SGD([x], lr=0.1).step()
        y.grad = torch.ones(2)
        loss.backward(inputs=[y])
        torch.optim.SGD([x], lr=0.1).step()
    told = [event for event in log.events if event.kind == "retain_grad"]
    assert [event.phase for event in told] == ["backward", "backward"]
    assert log.events.index(told[0]) < kinds(log.events).index("optimizer step pre-hook")


@sees_new_nodes
def test_a_loop_that_keeps_its_loss_has_each_backward_once_and_in_its_place():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    steps = []
    for _ in range(2):  # the loss, and so the Nodes of the leaves, stays from the step before
        with trace(model) as log:
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
        steps.append(log.lines())
    assert steps[0] == steps[1]
    with trace(model) as log:
        for _ in range(3):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
    inferred = Counter(event.kind for event in log.events if event.inferred)
    assert inferred == {"module backward begins": 9, "module backward ends": 9}
    for kind in ("Node hook", "post-accumulate-grad hook"):
        leaf = [event for event in log.events if event.kind == kind and event.where.endswith("0.bias")]
        assert [event.inside for event in leaf] == [("Sequential", "0")] * 3


@sees_new_nodes
def test_a_parameter_that_is_shared_belongs_to_the_layer_that_used_it_first():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.emb = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.emb.weight = self.head.weight

        def forward(self, x):
            return self.head(self.emb(x).tanh())

    with trace(model := Tied()) as log:
        model(torch.ones(1, 2)).sum().backward()
    (leaf,) = [event for event in log.events if event.kind == "post-accumulate-grad hook"]
    assert leaf.inside == ("Tied", "emb")
    inferred = [f"{event.kind[16:]} {event.where}" for event in log.events if event.inferred]
    assert inferred == ["begins Tied", "begins head", "ends head", "begins emb", "ends emb", "ends Tied"]


def test_gradients_that_a_forward_asks_for_are_no_recomputation():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(2, 1)

        def forward(self, x):
            return torch.autograd.grad(self.energy(x).tanh().sum(), x, create_graph=True)[0]

    with trace(model := Force()) as log:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert log.phase("recompute") == []
    assert any(event.kind == "pack" for event in log.phase("backward"))


def test_what_a_node_does_besides_does_not_hide_its_place(net, batch):
    model = nn.Linear(2, 1)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
    with trace(model) as log:
        model(torch.ones(1, 2)).sum().backward()
    stepped = [event for event in log.events if event.kind == "post-accumulate-grad hook"]
    assert len(stepped) == 2
    if SEES_NEW_NODES:
        assert [event.inside for event in stepped] == [("Linear",)] * 2

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            net(batch)
            return 2 * grad * ctx.saved_tensors[0]

    x = torch.ones(2, requires_grad=True)
    with trace(net, x=x) as log:
        y = Reversible.apply(x)
        traced = trace(y=y)
        y.sum().backward()
        traced.remove()
    if SEES_NEW_NODES:
        assert [event.where for event in log.events if event.kind == "unpack"] == ["ReversibleBackward"]


def test_inputs_by_keyword_have_their_shape():
    class Doubled(nn.Module):
        def forward(self, ids):
            return ids * 2

    with trace(model := Doubled()) as log:
        model(ids=torch.ones(3))
    assert [event.shape for event in log.events if event.kind.startswith("forward")] == [(3,), (3,)]


def test_the_node_of_a_leaf_is_seen_without_a_with_too():
    x = torch.ones(2, requires_grad=True)
    log = trace(x=x)
    (x * 2).sum().backward()
    log.remove()
    assert kinds(log.events) == ["tensor hook", "Node pre-hook", "post-accumulate-grad hook", "Node hook"]


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: trace(), TypeError, r"nothing to trace.*trace\(y=y\)"),
        (lambda: trace(torch.ones(1)), TypeError, "a Tensor without a name"),
        (lambda: trace(nn.Linear(1, 1), torch.ones(1)), TypeError, "a Tensor without a name"),
        (lambda: trace(nn.Linear(1, 1), "weight"), TypeError, "a str without a name"),
        (lambda: trace(root=torch.ones(1).long()), ValueError, "holds torch.int64, and only floating-point"),
        (lambda: trace("net"), TypeError, "expected a module, found str"),
        (lambda: trace(root=torch.ones(1)), ValueError, r"trace\(root=...\).*requires_grad=False"),
        (lambda: trace(y=[torch.ones(1)]), TypeError, "found list; give each tensor a name"),
    ],
)
def test_trace_refuses_what_it_cannot_see(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_trace_hangs_nothing_when_one_of_its_tensors_is_refused(net):
    with no_leftovers(net), pytest.raises(ValueError, match="requires_grad=False"):
        trace(net, x=torch.ones(1))


@pytest.mark.parametrize("name", ["backwards", "Forward", "", None])
def test_a_misspelt_phase_names_the_closest(name):
    x = torch.ones(1, requires_grad=True)
    with trace(x=x) as traced, pytest.raises(ValueError, match=r"no phase is called .*; close: .*ward"):
        traced.phase(name)


# ---- what once went wrong ----


def test_a_trace_that_cannot_be_opened_leaves_nothing():
    net = nn.Linear(2, 2)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        trace(net).__enter__()
    assert hooks_on(net) == []


def test_a_pre_hook_that_raises_and_is_handled_does_not_disturb_the_rest():
    net = Careful()
    with trace(net) as traced:
        net(torch.ones(1, 2))
    seen = [(event.kind, event.where) for event in traced.phase("forward") if event.kind.startswith("forward")]
    assert seen == [
        ("forward pre-hook", "Careful"),
        ("forward raised", "first"),
        ("forward pre-hook", "second"),
        ("forward hook", "second"),
        ("forward hook", "Careful"),
    ]


def test_a_parameter_given_alone_shows_its_accumulation():
    layer = nn.Linear(2, 1)
    with trace(weight=layer.weight) as traced:
        layer(torch.ones(1, 2)).sum().backward()
    assert kinds(traced.events).count("post-accumulate-grad hook") == 1
    with trace(layer, weight=layer.weight) as traced:
        layer(torch.ones(1, 2)).sum().backward()
    assert kinds(traced.events).count("post-accumulate-grad hook") == 2  # weight and bias, each once


def test_what_a_compiler_tries_out_is_no_event():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with trace(net) as traced:
        torch.compile(net, backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    last_of_forward = max(number for number, event in enumerate(traced.events) if event.phase == "forward")
    first_of_backward = min(number for number, event in enumerate(traced.events) if event.phase == "backward")
    assert last_of_forward < first_of_backward


@sees_new_nodes
def test_an_earlier_graph_that_still_lives_hides_no_node():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def lines():
        with trace(model) as events:
            model(torch.ones(1, 2)).sum().backward()
        return sorted((event.kind, event.where) for event in events.events)

    alone = lines()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert lines() == alone
    assert ("Node hook", "AccumulateGrad 0.weight") in alone
    with no_leftovers(model):
        lines()


def test_reading_what_a_node_saved_is_no_backward():
    model, x = nn.Tanh(), torch.ones(2, requires_grad=True)
    with trace(model) as events:
        y = model(x)
        assert y.grad_fn._saved_result is not None
        assert events.phase("backward") == []
        y.sum().backward()
    assert "unpack" in {event.kind for event in events.phase("backward")}


@pytest.mark.parametrize(
    "traced", [lambda: {"model": nn.Linear(2, 1)}, lambda: {"w": torch.ones(2, requires_grad=True)}]
)
def test_inference_mode_has_events_too(traced):
    what = traced()
    with torch.inference_mode(), trace(**what) as events:
        if "model" in what:
            what["model"](torch.ones(1, 2))
    assert [event.kind for event in events.events] == (["forward pre-hook", "forward hook"] if "model" in what else [])


def test_a_lazy_layer_is_traced_but_for_the_parameters_it_makes():
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    with trace(model) as events:
        model(torch.ones(3, 4)).sum().backward()
    accumulated = {event.where for event in events.events if event.kind == "post-accumulate-grad hook"}
    assert accumulated == {"1.weight", "1.bias"}
    assert [event.where for event in events.events if event.kind == "forward hook"] == [
        "0",
        "1",
        "Sequential",
    ]


def test_a_part_that_is_called_by_itself_begins_a_forward():
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    with trace(model) as events:
        for _ in range(2):
            model["decoder"](model["encoder"](torch.ones(1, 2)))
    called = [event.where for event in events.events if event.kind == "forward hook"]
    assert called == ["encoder", "decoder.0", "decoder.1", "decoder"] * 2


def test_what_a_checkpoint_computes_again_is_a_second_call():
    class Saving(nn.Sequential):
        def forward(self, x):
            return checkpoint(self[0], x, use_reentrant=False)

    model = Saving(nn.Linear(2, 2))
    with trace(model) as events:
        model(torch.ones(1, 2)).sum().backward()
    assert [event.where for event in events.events if event.kind == "forward pre-hook"] == [
        "Saving",
        "0",
        "0 #2",
    ]


def test_a_sparse_leaf_is_refused_by_pytorch_and_keeps_no_hook():
    weight = torch.eye(2).to_sparse().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"aten::view.*Sparse"):
        trace(weight=weight)
    assert hooks_on(weight) == []


def test_a_scripted_block_is_refused_by_pytorch_and_leaves_nothing():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with no_leftovers(model), pytest.raises(RuntimeError, match="not supported on ScriptModules"):
        trace(model)


def test_a_context_opened_inside_displaces_the_trace():
    x = torch.ones(2, requires_grad=True)
    with trace(x=x) as events:
        with graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda packed: packed):
            hidden = x.exp()
        hidden.sin().sum().backward()
    assert [event.kind for event in events.events].count("pack") == 1  # of sin, and not of exp
