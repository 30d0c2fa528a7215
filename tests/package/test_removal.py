"""remove_hooks: hooks of which nobody has the handle, taken off as their handles would have done it."""

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as modules
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hooklab import features, hooks_on, remove_hooks, watch


@pytest.fixture
def fired():
    return []


@pytest.fixture
def spy(fired):
    def spy(*args, **kwargs):
        fired.append("spy")

    return spy


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def step(net):
    """All that can make a hook fire."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(4, 2, requires_grad=True)).sum().backward()
    optimizer.step()
    net.load_state_dict(net.state_dict())


ON_A_MODULE = {
    "forward pre-hook": lambda m, spy: m.register_forward_pre_hook(spy, with_kwargs=True),
    "forward hook": lambda m, spy: m.register_forward_hook(spy, with_kwargs=True, always_call=True),
    "full backward pre-hook": lambda m, spy: m.register_full_backward_pre_hook(spy),
    "full backward hook": lambda m, spy: m.register_full_backward_hook(spy),
    "state_dict pre-hook": lambda m, spy: m.register_state_dict_pre_hook(spy),
    "state_dict hook": lambda m, spy: m.register_state_dict_post_hook(spy),
    "load_state_dict pre-hook": lambda m, spy: m.register_load_state_dict_pre_hook(spy),
    "load_state_dict post-hook": lambda m, spy: m.register_load_state_dict_post_hook(spy),
    "tensor hook": lambda m, spy: m.weight.register_hook(spy),
    "post-accumulate-grad hook": lambda m, spy: m.bias.register_post_accumulate_grad_hook(spy),
}


@pytest.mark.parametrize("kind", ON_A_MODULE)
def test_each_kind_on_a_model_fires_before_and_not_after(net, fired, spy, kind):
    handle = ON_A_MODULE[kind](net[0], spy)
    step(net)
    assert fired
    removed = remove_hooks(net)
    assert [hook.kind for hook in removed] == [kind]
    fired.clear()
    step(net)
    assert fired == []
    assert hooks_on(net) == []
    handle.remove()  # harmless, should it turn up


@pytest.mark.parametrize("kind", ON_A_MODULE)
def test_a_hook_that_comes_later_fires_as_on_a_new_model(net, fired, spy, kind):
    ON_A_MODULE[kind](net[0], lambda *args, **kwargs: None)
    assert len(remove_hooks(net)) == 1
    ON_A_MODULE[kind](net[0], spy)
    step(net)
    assert fired == ["spy"]


GLOBAL = [
    modules.register_module_forward_pre_hook,
    modules.register_module_forward_hook,
    modules.register_module_full_backward_pre_hook,
    modules.register_module_full_backward_hook,
    register_optimizer_step_pre_hook,
]


@pytest.mark.parametrize("register", GLOBAL, ids=lambda register: register.__name__)
def test_global_hooks_go_too_since_they_fire_here(net, fired, spy, register):
    handle = register(spy)
    try:
        step(net)
        assert fired
        assert [hook.place for hook in remove_hooks(net)] == ["everywhere"]
        fired.clear()
        step(net)
        assert fired == []
    finally:
        handle.remove()


def test_hooks_on_a_computed_tensor_go(fired, spy):
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(spy)
    x.register_hook(lambda grad: fired.append("x"))
    assert len(remove_hooks(y)) == 1
    y.sum().backward()
    assert fired == ["x"]


def test_hooks_on_an_optimizer_go(net, fired, spy):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(spy)
    optimizer.register_step_post_hook(spy)
    assert len(remove_hooks(optimizer)) == 2
    optimizer.step()
    assert fired == []


def test_where_chooses_and_the_others_stay(net, fired):
    for place in (0, 1, 2):
        net[place].register_forward_hook(lambda *call, place=place: fired.append(place))
    before = hooks_on(net)
    removed = remove_hooks(net, where=lambda record: record.place == "1")
    assert removed == before[1:2]
    assert "<table>" in removed._repr_html_()
    net(torch.ones(1, 2))
    assert fired == [0, 2]
    assert remove_hooks(net, where=lambda record: False) == []
    assert hooks_on(net) == [before[0], before[2]]


def test_a_model_without_hooks_gives_an_empty_list(net):
    assert remove_hooks(net) == []


def test_hooklabs_own_are_taken_off_and_the_object_stays_harmless(net):
    features(net, "0")  # nobody has it
    f = features(net, "2")
    log = watch(weight=net[0].weight)
    assert {hook.owner for hook in remove_hooks(net)} == {"hooklab"}
    step(net)
    assert "2" not in f
    assert "weight" not in log
    f.remove()
    assert hooks_on(net) == []


PYTORCHS_OWN = {
    "spectral norm": lambda layer: nn.utils.spectral_norm(layer),
    "pruning": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("what", PYTORCHS_OWN)
def test_pytorchs_own_are_refused_and_nothing_is_taken_off(net, fired, spy, what):
    PYTORCHS_OWN[what](net[0])
    net[2].register_forward_hook(spy)
    before = hooks_on(net)
    with pytest.raises(ValueError, match=r"so none has been(.|\n)*PyTorch's own; undo there what put it on"):
        remove_hooks(net)
    assert hooks_on(net) == before
    removed = remove_hooks(net, where=lambda record: record.removable)
    assert [hook.place for hook in removed] == ["2"]
    assert {hook.owner for hook in hooks_on(net)} == {"torch"}


def test_what_python_cannot_take_off_is_refused_and_says_what_to_do(spy):
    y = torch.ones(2, requires_grad=True) * 2
    y.retain_grad()
    y.register_hook(spy)
    with pytest.raises(ValueError, match=r"1 of 2 hooks(.|\n)*retain_grad on the tensor: PyTorch cannot switch it off"):
        remove_hooks(y)
    assert len(hooks_on(y)) == 2
    assert len(remove_hooks(y, where=lambda record: record.removable)) == 1


def test_saved_tensor_hooks_go_at_the_end_of_their_block(net, spy):
    net[0].register_forward_hook(spy)
    with graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        with pytest.raises(ValueError, match=r"saved-tensor hooks on this thread.*leave it before"):
            remove_hooks(net)
        assert len(hooks_on(net)) == 2


@pytest.mark.parametrize(("wrong", "where", "says"), [
    ("net", None, "remove_hooks: expected a module, a tensor or an optimizer, found str"),
    (nn.Linear(1, 1), "user", r"remove_hooks\(where=...\): expected something that can be called"),
])  # fmt: skip
def test_wrong_arguments_are_refused(wrong, where, says):
    with pytest.raises(TypeError, match=says):
        remove_hooks(wrong, where=where)


def test_hooks_on_a_node_are_refused():
    with pytest.raises(TypeError, match=r"remove_hooks: .*hooks on autograd Nodes cannot be listed from Python"):
        remove_hooks((torch.ones(1, requires_grad=True) * 2).grad_fn)


# ---- limits ----


def test_a_forward_that_has_run_still_calls_its_full_backward_hook(net, fired, spy):
    net[0].register_full_backward_hook(spy)
    y = net(torch.ones(1, 2, requires_grad=True))
    remove_hooks(net)
    y.sum().backward()
    assert fired == ["spy"]
    step(net)
    assert fired == ["spy"]


@pytest.mark.parametrize(("mode", "calls"), [("all", []), ("any", ["spy"])])
def test_of_a_multi_grad_hook_only_the_part_on_this_tensor_goes(fired, spy, mode, calls):
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    graph.register_multi_grad_hook([x, y], spy, mode=mode)
    assert [hook.kind for hook in remove_hooks(x)] == ["multi-grad hook"]
    (x * y).sum().backward()
    assert fired == calls
    assert len(hooks_on(y)) == 1


def test_a_function_of_pytorch_that_a_user_registers_counts_as_pytorchs_own(net):
    handle = net[0].weight.register_hook(torch.neg)
    with pytest.raises(ValueError, match="PyTorch's own"):
        remove_hooks(net)
    handle.remove()


def test_after_a_legacy_backward_hook_pytorch_still_refuses_a_full_one(net):
    net[0].register_backward_hook(print)
    remove_hooks(net)
    with pytest.raises(RuntimeError, match="Cannot use both regular backward hooks and full backward hooks"):
        net[0].register_full_backward_hook(print)
