"""hooks_on and no_leftovers: every hook that PyTorch lets one list, by name."""

import contextlib
import functools
import gc
import pickle
import weakref

import forked_kernels
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as modules
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hooklab import HookLeak, hooks_on, no_leftovers, watch


def spy(*args):
    """A hook that looks."""


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def listed(obj):
    return [(hook.kind, hook.place, hook.function) for hook in hooks_on(obj)]


ON_A_MODULE = {
    "forward pre-hook": "register_forward_pre_hook",
    "forward hook": "register_forward_hook",
    "full backward pre-hook": "register_full_backward_pre_hook",
    "full backward hook": "register_full_backward_hook",
    "legacy backward hook": "register_backward_hook",
    "state_dict pre-hook": "register_state_dict_pre_hook",
    "state_dict hook": "register_state_dict_post_hook",
    "load_state_dict pre-hook": "register_load_state_dict_pre_hook",
    "load_state_dict post-hook": "register_load_state_dict_post_hook",
}


@pytest.mark.parametrize("kind", ON_A_MODULE)
def test_each_kind_on_a_module_is_found_in_its_place_and_gone_when_removed(net, kind):
    handle = getattr(net[2], ON_A_MODULE[kind])(spy)
    assert listed(net) == [(kind, "2", "spy")]
    handle.remove()
    assert hooks_on(net) == []


def test_hooks_on_parameters_are_found_under_their_names(net):
    net[0].weight.register_hook(spy)
    net[0].bias.register_post_accumulate_grad_hook(spy)
    net[2].register_forward_hook(spy)
    assert listed(net) == [
        ("forward hook", "2", "spy"), ("tensor hook", "0.weight", "spy"), ("post-accumulate-grad hook", "0.bias", "spy"),
    ]  # fmt: skip


def test_hooks_on_a_tensor_are_found_with_retain_grad_and_multi_grad_hooks():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(spy)
    y.retain_grad()
    graph.register_multi_grad_hook([x, y], spy)
    graph.register_multi_grad_hook([y], spy, mode="any")
    place = "the tensor"
    multi = ("multi-grad hook", place, "spy")
    assert sorted(listed(y)) == sorted([("tensor hook", place, "spy"), multi, multi, ("retain_grad", place, "")])


def test_hooks_on_an_optimizer_are_found(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(spy)
    optimizer.register_step_post_hook(spy)
    optimizer.register_state_dict_pre_hook(spy)
    assert [kind for kind, *_ in listed(optimizer)] == [
        "optimizer step pre-hook", "optimizer step post-hook", "state_dict pre-hook",
    ]  # fmt: skip


GLOBAL = [
    ("forward pre-hook", modules.register_module_forward_pre_hook),
    ("forward hook", modules.register_module_forward_hook),
    ("full backward pre-hook", modules.register_module_full_backward_pre_hook),
    ("full backward hook", modules.register_module_full_backward_hook),
    ("module registration hook", modules.register_module_module_registration_hook),
    ("parameter registration hook", modules.register_module_parameter_registration_hook),
    ("buffer registration hook", modules.register_module_buffer_registration_hook),
    ("optimizer step pre-hook", register_optimizer_step_pre_hook),
]


@pytest.mark.parametrize(("kind", "register"), GLOBAL, ids=[kind for kind, _ in GLOBAL])
def test_global_hooks_are_found_from_anywhere(kind, register):
    handle = register(spy)
    try:
        for obj in (nn.Linear(1, 1), torch.ones(1)):
            assert (kind, "everywhere", "spy") in listed(obj)
    finally:
        handle.remove()


def test_saved_tensor_hooks_of_this_thread_are_found():
    with graph.saved_tensors_hooks(spy, spy):
        assert ("saved-tensor hooks", "this thread", "spy") in listed(torch.ones(1))
    assert listed(torch.ones(1)) == []


def test_options_file_and_line_are_told(net):
    net[0].register_forward_hook(spy, with_kwargs=True, always_call=True)
    net[1].register_forward_pre_hook(spy, with_kwargs=True)
    forward, pre = hooks_on(net)
    assert forward.options == ("with_kwargs", "always_call")
    assert pre.options == ("with_kwargs",)
    assert (forward.file, forward.line) == (spy.__code__.co_filename, spy.__code__.co_firstlineno)
    assert str(forward) == f"forward hook on 0: spy (test_census.py, line {forward.line}) [with_kwargs, always_call]"


class Callable:
    def __call__(self, *args):
        pass

    def method(self, *args):
        pass


FUNCTIONS = {
    "builtin": (print, "print", False),
    "lambda": (lambda *args: None, "<lambda>", True),
    "partial": (functools.partial(spy, 1), "spy", True),
    "partial of a builtin": (functools.partial(print, end=""), "print", False),
    "method": (Callable().method, "Callable.method", True),
    "object": (Callable(), "Callable", True),
    "decorated": (functools.wraps(spy)(lambda *args: spy()), "spy", True),
    "method of a list": ([].append, "list.append", False),
    "class": (Callable, "Callable", False),
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_function_of_any_make_is_named(net, what):
    function, name, has_source = FUNCTIONS[what]
    net.register_forward_hook(function)
    (hook,) = hooks_on(net)
    assert hook.function == name
    assert (hook.file is not None) is has_source
    assert hook.function in str(hook)


def test_the_users_own_hooks_are_told_from_ours_and_from_pytorchs(net):
    net[0].register_forward_hook(spy)
    log = watch(weight=net[0].weight)
    torch.nn.utils.spectral_norm(net[2])
    owners = {hook.owner for hook in hooks_on(net)}
    assert owners == {"user", "hooklab", "torch"}
    assert "(hooklab's own)" in str(next(hook for hook in hooks_on(net) if hook.owner == "hooklab"))
    log.remove()


def test_a_shared_module_and_a_function_registered_twice_are_counted_as_they_fire():
    shared = nn.Linear(1, 1)
    net = nn.Sequential(shared, shared)
    shared.register_forward_hook(spy)
    shared.register_forward_hook(spy)
    assert listed(net) == [("forward hook", "0", "spy")] * 2


@pytest.mark.parametrize("thing", [None, "net", [nn.Linear(1, 1)], spy])
def test_hooks_on_refuses_what_is_none_of_the_three(thing):
    with pytest.raises(TypeError, match="expected a module, a tensor or an optimizer, found"):
        hooks_on(thing)


def test_hooks_on_says_that_node_hooks_cannot_be_listed():
    y = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(TypeError, match="hooks on autograd Nodes cannot be listed from Python"):
        hooks_on(y.grad_fn)


def test_what_is_found_is_a_list_that_a_notebook_shows_as_a_table(net):
    net[0].register_forward_hook(spy, with_kwargs=True)
    net[2].weight.register_hook(print)
    found = hooks_on(net)
    assert isinstance(found, list)
    assert repr(found) == repr([*found])
    row = f"<td>forward hook</td><td>0</td><td>spy</td><td>test_census.py</td><td>{found[0].line}</td><td>with_kwargs</td>"
    assert row in found._repr_html_().replace(' style="text-align: left"', "")
    frame = found.to_dataframe()
    assert list(frame["place"]) == ["0", "2.weight"]
    assert list(frame["function"]) == ["spy", "print"]
    assert frame["file"][0] == spy.__code__.co_filename


def test_a_pruning_method_that_somebody_derives_from_pytorchs_is_pytorchs_own():
    layer = nn.Linear(2, 2)
    Half.apply(layer, "weight")
    assert [(hook.owner, hook.removable) for hook in hooks_on(layer)] == [("torch", False)]


class Half(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask / 2


@pytest.mark.parametrize("switch", ["overwrite", "swap"])
def test_hooks_on_parameters_that_are_swapped_by_a_conversion_never_fire(switch):
    layer, fired = nn.Linear(2, 2), []
    old = layer.weight
    old.register_hook(fired.append)
    name = f"set_{switch}_module_params_on_conversion"
    getattr(torch.__future__, name)(True)
    try:
        layer.to(torch.float64)
    finally:
        getattr(torch.__future__, name)(False)
    layer(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert fired == []
    assert layer.weight.grad is not None
    assert [hook.place for hook in hooks_on(layer)] == {"overwrite": [], "swap": ["weight"]}[switch]
    assert [hook.kind for hook in hooks_on(old)] == ["tensor hook"]


# ---- no_leftovers ----


def test_a_block_that_cleans_up_passes(net):
    net[0].register_forward_hook(spy)  # there before: not a leftover
    with no_leftovers(net):
        net[1].register_forward_hook(spy).remove()


@pytest.mark.parametrize("kind", ON_A_MODULE)
def test_a_hook_that_outlives_the_block_is_named(net, kind):
    with (
        pytest.raises(HookLeak, match=f"1 hook.*outlived the block.*\n  {kind} on 1: spy") as caught,
        no_leftovers(net),
    ):
        getattr(net[1], ON_A_MODULE[kind])(spy)
    assert [hook.place for hook in caught.value.hooks] == ["1"]


def test_a_second_registration_of_a_function_that_was_there_is_a_leak(net):
    net[0].register_forward_hook(spy)
    with pytest.raises(HookLeak, match="1 hook"), no_leftovers(net):
        net[0].register_forward_hook(spy)


def test_a_global_hook_and_a_parameters_hook_are_leaks(net):
    handles = []
    with pytest.raises(HookLeak, match="2 hook") as caught, no_leftovers(net):
        handles.append(modules.register_module_forward_hook(spy))
        handles.append(net[0].bias.register_hook(spy))
    for handle in handles:
        handle.remove()
    assert {hook.place for hook in caught.value.hooks} == {"everywhere", "0.bias"}


def test_a_block_that_raises_and_leaks_says_both(net):
    with pytest.raises(HookLeak) as caught, no_leftovers(net):
        net[0].register_forward_hook(spy)
        raise ValueError("in the block")
    assert str(caught.value.__cause__) == "in the block"


def test_a_block_that_raises_and_leaks_nothing_raises_its_own_error(net):
    with pytest.raises(ValueError, match="in the block"), no_leftovers(net):
        raise ValueError("in the block")


def test_a_leak_that_is_reported_keeps_nothing_alive():
    def block(tensors):
        model = nn.Linear(2, 3)
        with no_leftovers(model):
            model.register_forward_hook(spy)
            tensor = torch.ones(3)
            tensors.append(weakref.ref(tensor))
            raise ValueError("of the block")

    gc.collect()
    gc.disable()
    try:
        tensors = []
        with contextlib.suppress(HookLeak):
            block(tensors)
        assert tensors[0]() is None
    finally:
        gc.enable()


def test_no_leftovers_refuses_what_is_no_module():
    with pytest.raises(TypeError, match="expected a module, found Tensor"), no_leftovers(torch.ones(1)):
        pass


def test_hooks_on_a_resnet_50_are_all_found():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet50()
    for module in model.modules():
        module.register_forward_hook(spy)
    for param in model.parameters():
        param.register_hook(spy)
    assert len(hooks_on(model)) == len(list(model.modules())) + len(list(model.parameters()))


# ---- what once went wrong ----


def test_tied_parameters_are_listed_once():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    net[0].weight.register_hook(print)
    assert [hook.place for hook in hooks_on(net)] == ["0.weight"]


def test_a_layer_that_moves_with_its_hook_is_no_leak():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(print)
    net[0].weight.register_hook(print)
    with no_leftovers(net):
        net[0] = nn.Sequential(nn.Dropout(), net[0])
    assert [hook.place for hook in hooks_on(net)] == ["0.1", "0.1.weight"]


def test_a_leak_can_be_sent_to_another_process():
    net = nn.Linear(2, 2)
    with pytest.raises(HookLeak) as caught, no_leftovers(net):
        net.register_forward_hook(print)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.hooks) == (str(caught.value), caught.value.hooks)


def test_what_pytorch_hangs_on_state_dicts_for_itself_is_no_leftover():
    layer = nn.Linear(2, 2)
    with no_leftovers(layer):
        layer.register_state_dict_pre_hook(torch.nn.Module.train)  # a function of PyTorch's
    with pytest.raises(HookLeak, match="state_dict pre-hook"), no_leftovers(layer):
        layer.register_state_dict_pre_hook(lambda *args: None)
    with pytest.raises(HookLeak, match="forward pre-hook"), no_leftovers(layer):
        layer.register_forward_pre_hook(torch.nn.Module.train)


def test_a_wrapper_of_an_optimizer_shows_none_of_the_hooks_inside_it():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner

    inner = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    inner.register_step_post_hook(spy)
    assert hooks_on(Wrapper(inner)) == []
    assert listed(inner) == [("optimizer step post-hook", "SGD", "spy")]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_hooks_of_pytorch_itself_have_no_handles_to_keep():
    layer = nn.Linear(2, 2)
    with (
        pytest.raises(HookLeak, match=r"undo there what put them on \(remove_weight_norm"),
        no_leftovers(layer),
    ):
        nn.utils.weight_norm(layer)
    with no_leftovers(layer):
        nn.utils.remove_weight_norm(layer)
    with (
        pytest.raises(HookLeak, match=r"2 hook.*keep the handles and call \.remove\(\)"),
        no_leftovers(layer),
    ):
        nn.utils.weight_norm(layer)
        layer.register_forward_hook(print)


@pytest.mark.parametrize("magic", ["", "%%time\n"])
def test_a_cell_of_a_notebook_is_called_so_whatever_magic_runs_it(magic):
    leak = "import torch\nfrom hooklab import hooks_on\nx = torch.ones(1, requires_grad=True)\n"
    leak += "x.register_hook(lambda grad: None)\nprint(*hooks_on(x))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(magic + leak)])
    NotebookClient(notebook, kernel_name=forked_kernels.NAME, timeout=60).execute()
    printed = "".join(output.text for output in notebook.cells[0].outputs)
    assert "tensor hook on the tensor: <lambda> (notebook cell, line 4)" in printed
