"""One small run for each hook of notebooks/atlas.yml: how often it fires, what becomes of its value, what its handle is.

`PROBES` gives it by name, with `:pack` or `:unpack` behind the name of two hooks. A probe of a name that takes no hook asserts
what the atlas says of it, and gives None.
"""

import io
import pickle
import sys
import tempfile
import warnings
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.utils.prune
import torch.package
from torch import distributed, nn
from torch.autograd import graph
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrize
from torch.optim import optimizer as all_optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

import hooklab


class Found(NamedTuple):
    fired: int
    returned: str
    handle: str


class Handle:
    """Takes off what has no handle of its own; `kind` is the atlas' word for that."""

    def __init__(self, kind, remove=lambda: None):
        self.kind, self.remove = kind, remove


def entered(context):
    context.__enter__()
    return Handle("with", lambda: context.__exit__(None, None, None))


def hung(register, act):
    """Hang a hook, act, take it off and see that it is off; gives what the hook may have changed, and the handle."""

    def run(hook):
        if hook is None:
            return act(), None
        calls = []
        handle = register(lambda *args: (calls.append(args), hook(*args))[1])
        try:
            value = act()
        finally:
            handle.remove()
        before = len(calls)
        act()
        assert len(calls) == before, "the hook is still there"
        return value, handle

    return run


def find(run, other, looks=None, none_crashes=False):
    """What becomes of the value that `other` returns; `looks` is for a hook that must return one."""
    plain, calls = run(None)[0], []
    look = looks or (lambda *args: None)
    value, handle = run(lambda *args: (calls.append(args), look(*args))[1])
    assert value == plain, "a hook that only looks changes nothing"
    kind = getattr(handle, "kind", type(handle).__name__)
    changed = outcome(run, other)
    if looks and (none_crashes or outcome(run, lambda *args: None) != plain):
        assert changed not in (plain, "raises")
        return Found(len(calls), "needed", kind)
    returned = "none_only" if changed == "raises" else "ignored" if changed == plain else "replaces"
    return Found(len(calls), returned, kind)


def outcome(run, hook):
    try:
        return run(hook)[0]
    except (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, pickle.PicklingError):
        return "raises"


# ---- tensors, Nodes, the graph ----


def leaf(value=1):
    return torch.tensor([float(value)], requires_grad=True)


def tensor_hook(method, other):
    t = leaf()

    def act():
        t.grad = None
        (2 * t).sum().backward()
        return t.grad.item()

    return find(hung(getattr(t, method), act), other)


def node_hook(method, other):
    t = leaf()
    y = 2 * t

    def act():
        t.grad = None
        y.backward(retain_graph=True)
        return t.grad.item()

    return find(hung(getattr(y.grad_fn, method), act), other)


def multi_grad():
    a, b = leaf(2), leaf(3)

    def act():
        a.grad = b.grad = None
        (a * b).backward()
        return a.grad.item(), b.grad.item()

    return find(hung(partial(graph.register_multi_grad_hook, (a, b)), act), lambda grads: [10 * g for g in grads])


def node_creation():
    t = leaf()
    return find(
        hung(lambda hook: entered(graph.node_creation_hook(hook)), lambda: (2 * t).item()),
        lambda node: node.next_functions,
    )


def square():
    t = leaf(3)
    (t * t).backward()
    return t.grad.item()


def same(value):
    return value


def pack():
    def register(hook):
        return entered(graph.saved_tensors_hooks(lambda tensor: hook(tensor.detach()), same))

    return find(hung(register, square), lambda tensor: 10 * tensor, looks=same)


def unpack():
    def register(hook):
        return entered(graph.saved_tensors_hooks(torch.Tensor.detach, hook))

    return find(hung(register, square), lambda packed: 10 * packed, looks=same)


def saved_tensor():
    def run(hook):
        t = leaf(3)
        y = t * t
        if hook:
            assert y.grad_fn._raw_saved_self.register_hooks(lambda tensor: hook(tensor.detach()), same) is None
        y.backward()
        return t.grad.item(), Handle("none")

    return find(run, lambda tensor: 10 * tensor, looks=same)


def unpack_property():
    t = leaf()
    y = t * t  # a saved tensor does not keep its Node alive
    saved = y.grad_fn._raw_saved_self
    assert saved.unpack_hook is None
    packed = []
    saved.register_hooks(lambda tensor: packed.append(tensor.item()), same)
    assert packed == [1], "at once"
    assert saved.unpack_hook is same


def disabled():
    with graph.disable_saved_tensors_hooks("not here"):
        assert outcome(lambda hook: (entered(graph.saved_tensors_hooks(same, same)), None), None) == "raises"


# ---- modules ----


def forward(register, other):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    return find(hung(partial(register, layer), lambda: layer(x).tolist()), other)


def backward(register, other):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)

    def act():
        x.grad = None
        with warnings.catch_warnings():  # the deprecated kind says so in every forward pass
            warnings.simplefilter("ignore")
            layer(x).sum().backward()
        return x.grad.tolist()

    return find(hung(partial(register, layer), act), other)


def on_all(name):
    return lambda layer, hook: getattr(all_modules, name)(hook)


def deprecated_on_all():
    """The first global backward hook decides which kind is allowed, and which kind is called, from then on."""
    decided = all_modules._global_is_full_backward_hook
    all_modules._global_is_full_backward_hook = None
    try:
        return backward(on_all("register_module_backward_hook"), every_grad)
    finally:
        all_modules._global_is_full_backward_hook = decided


def first_grad(module, first, *rest):
    return (10 * first[0],)


def every_grad(module, grad_input, grad_output):
    return tuple(grad if grad is None else 10 * grad for grad in grad_input)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.ones(1))
        self.child = nn.ReLU()


def registration(kind, other):
    def act():
        parts = Parts()
        return parts.weight.item(), parts.mean.item(), type(parts.child).__name__

    return find(hung(getattr(all_modules, f"register_module_{kind}_registration_hook"), act), other)


def module_state(method):
    layer = nn.Linear(2, 2)
    return find(hung(getattr(layer, method), lambda: list(layer.state_dict())), lambda *args: {})


def module_load(method):
    layer, state = nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1)}

    def act():
        layer.load_state_dict(dict(state))
        return layer.weight.item()

    return find(hung(getattr(layer, method), act), lambda *args: {"weight": torch.zeros(1, 1)})


def refused(method):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(RuntimeError, match="is not supported on ScriptModules"):
        getattr(scripted, method)(lambda *args: None)


# ---- optimizers ----


def sgd(lr=0.5):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def step(owner, name, other):
    optimizer = sgd()
    return find(hung(getattr(owner or optimizer, name), optimizer.step), other)


def another_closure(optimizer, args, kwargs):
    return (optimizer, lambda: 7), {}


def optimizer_state(method):
    optimizer = sgd()
    return find(hung(getattr(optimizer, method), lambda: list(optimizer.state_dict())), lambda *args: {})


def optimizer_load(method):
    optimizer, state, another = sgd(), sgd(3.0).state_dict(), sgd(7.0).state_dict()

    def act():
        optimizer.load_state_dict(state)
        return optimizer.param_groups[0]["lr"]

    return find(hung(getattr(optimizer, method), act), lambda *args: another)


# ---- one process that thinks it is a group ----


@contextmanager
def process_group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def gradients(wrap, register):
    """A run that wraps a layer anew each time: its hook cannot come off."""

    def run(hook):
        torch.manual_seed(0)
        model = wrap(nn.Linear(2, 2))
        if hook:
            assert register(model, hook) is None
        model(torch.ones(1, 2)).sum().backward()
        return [to_list(p.grad) for p in model.parameters()], Handle("none")

    return run


def to_list(grad):
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).tolist()


def future(value):
    done = torch.futures.Future()
    done.set_result(value)
    return done


def register_ddp(model, hook):
    return model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))


def ddp_comm():
    with process_group():
        run = gradients(nn.parallel.DistributedDataParallel, register_ddp)
        return find(
            run,
            lambda state, bucket: future(10 * bucket.buffer()),
            looks=lambda state, bucket: future(bucket.buffer()),
            none_crashes=True,
        )


def ready_made(register):
    """A ready-made communication hook gives one process its own gradient."""
    with process_group() as group:
        run = gradients(nn.parallel.DistributedDataParallel, lambda model, hook: register(model, group))
        assert run("ready-made")[0] == run(None)[0]


def comm_hook(module, name, state=lambda group: group):
    def register(model, group):
        hooks = import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{module}")
        return model.register_comm_hook(state(group), getattr(hooks, name))

    return partial(ready_made, register)


def power_sgd(group):
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return PowerSGDState(group, 1, start_powerSGD_iter=2)


def local_sgd(group):
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    return PostLocalSGDState(group, group, 2)


def by_type(model, group):
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook

    return register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model, group)


def fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group():
        mesh = init_device_mesh("cpu", (1,))
        run = gradients(partial(fully_shard, mesh=mesh), lambda model, hook: model.set_all_reduce_hook(hook))
        return find(run, lambda reduced: 10 * reduced)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with process_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is the older FSDP, on a CPU
        wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
        run = gradients(wrap, lambda model, hook: model.register_comm_hook(None, hook))
        return find(run, lambda state, grad: 10 * grad)


def collective(kind):
    with process_group() as group:

        def register(hook):
            assert getattr(group, f"register_{kind}_hook")(1, hook) is None
            return Handle("number", lambda: getattr(group, f"unregister_{kind}_hook")(1))

        def act():
            t = torch.ones(1)
            distributed.all_reduce(t)
            return t.item()

        return find(hung(register, act), lambda args: torch.zeros(1))


def nan_check():
    with process_group() as group:
        check = distributed.distributed_c10d.NanCheckHook.attach(group)
        bad = torch.tensor([float("nan")])
        assert outcome(lambda hook: (distributed.all_reduce(bad), None), None) == "raises"
        check.remove()
        distributed.all_reduce(bad)


def abort_hooks_are_not_for_gloo():
    with process_group() as group:
        assert not group.supports_abort_hooks
        assert outcome(lambda hook: (group.register_abort_hook(1, hook), None), print) == "raises"


def joined(name):
    from torch.distributed.algorithms.join import Join, Joinable, JoinHook

    def run(hook):
        class Last(JoinHook):
            def post_hook(self, is_last_joiner):
                return hook(is_last_joiner) if hook and name == "post_hook" else None

        class Work(Joinable):
            join_device = torch.device("cpu")
            join_process_group = distributed.group.WORLD

            def __init__(self):
                super().__init__()

            def join_hook(self, **kwargs):
                return hook(Last()) if hook and name == "join_hook" else Last()

        work = Work()
        with Join([work]):
            Join.notify_join_context(work)
        return "through", Handle("subclass")

    with process_group():
        if name == "join_hook":
            calls = []
            run(lambda own: (calls.append(own), own)[1])
            assert outcome(run, lambda own: None) == "raises"
            return Found(len(calls), "needed", "subclass")
        return find(run, lambda is_last_joiner: 5)


# ---- packages, data pipes ----


def packaged(kind):
    """`intern` reads the source of a module: an empty one will do."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "atlas_part.py").write_text("")
        sys.path.insert(0, folder)
        try:
            return find(partial(package, kind), lambda exporter, name: "another")
        finally:
            sys.path.remove(folder)
            sys.modules.pop("atlas_part", None)


def package(kind, hook):
    exporter = torch.package.PackageExporter(io.BytesIO())
    getattr(exporter, kind)("atlas_part")
    handle = getattr(exporter, f"register_{kind}_hook")(hook) if hook else None
    exporter.save_source_string("whole", "import atlas_part")
    exporter.close()  # what it needs is looked up at the end
    return getattr(exporter, f"{kind}ed_modules")(), handle


class MapNumbers(MapDataPipe):
    def __init__(self):
        self.start = 1


class IterNumbers(IterDataPipe):
    def __init__(self):
        self.start = 1


def piped(pipe, kind, other, looks):
    setter = getattr(pipe, f"set_{kind}_hook")

    def register(hook):
        setter(hook)
        assert outcome(lambda another: (setter(another), None), hook) == "raises", "there is one already"
        return Handle("unset", lambda: setter(None))

    def act():
        copied = pickle.loads(pickle.dumps(pipe()))
        return getattr(copied, "start", copied)

    return find(hung(register, act), other, looks)


# ---- without the word ----


def mode(base, method):
    def register(hook):
        def intercept(self, func, types, args=(), kwargs=None):
            return hook(func, types, args, kwargs or {})

        return entered(type("Mode", (base,), {method: intercept})())

    def looks(func, types, args, kwargs):
        return func(*args, **kwargs)

    return find(hung(register, lambda: torch.ones(1).item()), lambda *args: 10 * looks(*args), looks)


def parametrized():
    layer = nn.Linear(2, 2)

    def register(hook):
        parametrization = nn.Module()
        parametrization.forward = hook
        parametrize.register_parametrization(layer, "weight", parametrization)
        return Handle("remover", lambda: parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False))

    return find(hung(register, lambda: layer.weight.tolist()), lambda weight: 10 * weight, looks=same)


def after_future(method):
    def run(hook):
        first = torch.futures.Future()
        second = getattr(first, method)(hook) if hook else None
        first.set_result(1)
        return (second or first).value(), Handle("none")

    if method == "then":
        return find(run, lambda done: 10 * done.value(), looks=lambda done: done.value())
    return find(run, lambda done: 10)


def queued():
    queue = torch.autograd.Variable._execution_engine.queue_callback
    assert outcome(lambda hook: (queue(hook), None), print) == "raises", "outside a backward pass"

    def run(hook):
        t = leaf()
        if hook:
            t.register_hook(lambda grad: queue(hook))
        (2 * t).backward()
        return t.grad.item(), Handle("once")

    return find(run, lambda: 10)


def retained():
    middle = 2 * leaf()
    middle.retain_grad()
    middle.backward()
    assert middle.grad.item() == 1


def packs(use):
    """Where packing is disabled, it raises."""
    use()
    with graph.disable_saved_tensors_hooks("not here"):
        assert outcome(lambda hook: (use(), None), None) == "raises"


def use_context(context):
    entered(context()).remove()


def use_checkpoint():
    torch.utils.checkpoint.checkpoint(torch.sin, leaf(), use_reentrant=False)


def has_pre_hook(change):
    layer = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(layer)
    assert "forward pre-hook" in {hook.kind for hook in hooklab.hooks_on(layer)}


def serializable():
    t = leaf()
    t.register_hook(torch.utils.hooks.unserializable_hook(lambda grad: None))
    for count in (0, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.utils.hooks.warn_if_has_hooks(t)
        assert len(caught) == count
        t.register_hook(lambda grad: None)


MODULE, GLOBAL, STEP = "torch.nn.modules.module.Module.", "torch.nn.modules.module.", "torch.optim.optimizer."
COMM = "torch.distributed.algorithms.ddp_comm_hooks."
GROUP, JOIN = "torch.distributed.distributed_c10d.", "torch.distributed.algorithms.join."
PIPES = "torch.utils.data.datapipes.datapipe."
PROBES = {
    "torch.Tensor.register_hook": partial(tensor_hook, "register_hook", lambda grad: 10 * grad),
    "torch.Tensor.register_post_accumulate_grad_hook": partial(
        tensor_hook, "register_post_accumulate_grad_hook", lambda parameter: 1
    ),
    "torch.autograd.graph.Node.register_hook": partial(
        node_hook, "register_hook", lambda inputs, outputs: (10 * inputs[0], None)
    ),
    "torch.autograd.graph.Node.register_prehook": partial(
        node_hook, "register_prehook", lambda outputs: (10 * outputs[0],)
    ),
    "torch.autograd.graph.register_multi_grad_hook": multi_grad,
    "torch.autograd.graph.node_creation_hook": node_creation,
    "torch.autograd.graph.saved_tensors_hooks:pack": pack,
    "torch.autograd.graph.saved_tensors_hooks:unpack": unpack,
    "torch.autograd.SavedTensor.register_hooks": saved_tensor,
    "torch.autograd.SavedTensor.unpack_hook": unpack_property,
    "torch.autograd.graph.disable_saved_tensors_hooks": disabled,
    f"{MODULE}register_forward_pre_hook": partial(
        forward, nn.Module.register_forward_pre_hook, lambda module, args: 10 * args[0]
    ),
    f"{MODULE}register_forward_hook": partial(
        forward, nn.Module.register_forward_hook, lambda module, args, output: 10 * output
    ),
    f"{MODULE}register_full_backward_pre_hook": partial(
        backward, nn.Module.register_full_backward_pre_hook, first_grad
    ),
    f"{MODULE}register_full_backward_hook": partial(backward, nn.Module.register_full_backward_hook, first_grad),
    f"{MODULE}register_backward_hook": partial(backward, nn.Module.register_backward_hook, every_grad),
    f"{GLOBAL}register_module_forward_pre_hook": partial(
        forward, on_all("register_module_forward_pre_hook"), lambda module, args: 10 * args[0]
    ),
    f"{GLOBAL}register_module_forward_hook": partial(
        forward, on_all("register_module_forward_hook"), lambda module, args, output: 10 * output
    ),
    f"{GLOBAL}register_module_full_backward_pre_hook": partial(
        backward, on_all("register_module_full_backward_pre_hook"), first_grad
    ),
    f"{GLOBAL}register_module_full_backward_hook": partial(
        backward, on_all("register_module_full_backward_hook"), first_grad
    ),
    f"{GLOBAL}register_module_backward_hook": deprecated_on_all,
    f"{GLOBAL}register_module_parameter_registration_hook": partial(
        registration, "parameter", lambda module, name, param: nn.Parameter(0 * param)
    ),
    f"{GLOBAL}register_module_buffer_registration_hook": partial(
        registration, "buffer", lambda module, name, buffer: 0 * buffer
    ),
    f"{GLOBAL}register_module_module_registration_hook": partial(
        registration, "module", lambda module, name, submodule: nn.Tanh()
    ),
    f"{MODULE}register_state_dict_pre_hook": partial(module_state, "register_state_dict_pre_hook"),
    f"{MODULE}register_state_dict_post_hook": partial(module_state, "register_state_dict_post_hook"),
    f"{MODULE}register_load_state_dict_pre_hook": partial(module_load, "register_load_state_dict_pre_hook"),
    f"{MODULE}register_load_state_dict_post_hook": partial(module_load, "register_load_state_dict_post_hook"),
    f"{STEP}Optimizer.register_step_pre_hook": partial(step, None, "register_step_pre_hook", another_closure),
    f"{STEP}Optimizer.register_step_post_hook": partial(step, None, "register_step_post_hook", another_closure),
    f"{STEP}register_optimizer_step_pre_hook": partial(
        step, all_optimizers, "register_optimizer_step_pre_hook", another_closure
    ),
    f"{STEP}register_optimizer_step_post_hook": partial(
        step, all_optimizers, "register_optimizer_step_post_hook", another_closure
    ),
    f"{STEP}Optimizer.register_state_dict_pre_hook": partial(optimizer_state, "register_state_dict_pre_hook"),
    f"{STEP}Optimizer.register_state_dict_post_hook": partial(optimizer_state, "register_state_dict_post_hook"),
    f"{STEP}Optimizer.register_load_state_dict_pre_hook": partial(optimizer_load, "register_load_state_dict_pre_hook"),
    f"{STEP}Optimizer.register_load_state_dict_post_hook": partial(
        optimizer_load, "register_load_state_dict_post_hook"
    ),
    "torch.nn.parallel.distributed.DistributedDataParallel.register_comm_hook": ddp_comm,
    f"{COMM}register_ddp_comm_hook": partial(ready_made, by_type),
    f"{COMM}default_hooks.allreduce_hook": comm_hook("default_hooks", "allreduce_hook"),
    f"{COMM}default_hooks.fp16_compress_hook": comm_hook("default_hooks", "fp16_compress_hook"),
    f"{COMM}default_hooks.bf16_compress_hook": comm_hook("default_hooks", "bf16_compress_hook"),
    f"{COMM}debugging_hooks.noop_hook": comm_hook("debugging_hooks", "noop_hook"),
    f"{COMM}powerSGD_hook.powerSGD_hook": comm_hook("powerSGD_hook", "powerSGD_hook", power_sgd),
    f"{COMM}powerSGD_hook.batched_powerSGD_hook": comm_hook("powerSGD_hook", "batched_powerSGD_hook", power_sgd),
    f"{COMM}post_localSGD_hook.post_localSGD_hook": comm_hook("post_localSGD_hook", "post_localSGD_hook", local_sgd),
    f"{COMM}quantization_hooks.quantization_pertensor_hook": comm_hook(
        "quantization_hooks", "quantization_pertensor_hook"
    ),
    f"{COMM}quantization_hooks.quantization_perchannel_hook": comm_hook(
        "quantization_hooks", "quantization_perchannel_hook"
    ),
    "torch.distributed.fsdp.FSDPModule.set_all_reduce_hook": fsdp2,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.register_comm_hook": fsdp1,
    f"{JOIN}JoinHook.post_hook": partial(joined, "post_hook"),
    f"{JOIN}Joinable.join_hook": partial(joined, "join_hook"),
    f"{GROUP}ProcessGroup.register_pre_hook": partial(collective, "pre"),
    f"{GROUP}ProcessGroup.register_post_hook": partial(collective, "post"),
    f"{GROUP}ProcessGroup.supports_abort_hooks": abort_hooks_are_not_for_gloo,
    f"{GROUP}NanCheckHook": nan_check,
    "torch.package.package_exporter.PackageExporter.register_extern_hook": partial(packaged, "extern"),
    "torch.package.package_exporter.PackageExporter.register_intern_hook": partial(packaged, "intern"),
    "torch.package.package_exporter.PackageExporter.register_mock_hook": partial(packaged, "mock"),
    "torch.utils.hooks.unserializable_hook": serializable,
    "torch.utils.hooks.warn_if_has_hooks": serializable,
    "torch.overrides.TorchFunctionMode": partial(mode, TorchFunctionMode, "__torch_function__"),
    "torch.utils._python_dispatch.TorchDispatchMode": partial(mode, TorchDispatchMode, "__torch_dispatch__"),
    "torch.nn.utils.parametrize.register_parametrization": parametrized,
    "torch.futures.Future.then": partial(after_future, "then"),
    "torch.futures.Future.add_done_callback": partial(after_future, "add_done_callback"),
    "torch.autograd.Variable._execution_engine.queue_callback": queued,
    "torch.Tensor.retain_grad": retained,
    "torch.autograd.graph.save_on_cpu": partial(packs, partial(use_context, graph.save_on_cpu)),
    "torch.autograd.graph.allow_mutation_on_saved_tensors": partial(
        packs, partial(use_context, graph.allow_mutation_on_saved_tensors)
    ),
    "torch.utils.checkpoint.checkpoint": partial(packs, use_checkpoint),
    "torch.nn.utils.spectral_norm": partial(has_pre_hook, nn.utils.spectral_norm),
    "torch.nn.utils.prune.identity": partial(has_pre_hook, lambda layer: nn.utils.prune.identity(layer, "weight")),
}
for kind, pipe in (("IterDataPipe", IterNumbers), ("MapDataPipe", MapNumbers)):
    PROBES[f"{PIPES}{kind}.set_getstate_hook"] = partial(
        piped, pipe, "getstate", other=lambda state: {**state, "start": 7}, looks=same
    )
    PROBES[f"{PIPES}{kind}.set_reduce_ex_hook"] = partial(
        piped, pipe, "reduce_ex", other=lambda pipe: (int, (7,)), looks=lambda pipe: (type(pipe), ())
    )
for call in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "backward_hook"):
    PROBES[f"torch.jit.RecursiveScriptModule.register_{call}"] = partial(refused, f"register_{call}")
for call in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
    PROBES[f"torch.jit.RecursiveScriptModule.register_{call}_hook"] = partial(refused, f"register_{call}_hook")
