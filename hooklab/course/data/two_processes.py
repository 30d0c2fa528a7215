"""What notebook 54 runs in two processes: torchrun starts this file twice.

Each process has its own rank, 0 or 1. Rank 0 prints the results as one line of JSON.
"""

import faulthandler
import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from hooklab.census import hooks_on
from hooklab.course.glyphs import glyphs


def small():
    """The same model in both processes."""
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=False)


def batch(rank):
    """Ones for rank 0, twos for rank 1."""
    return torch.full((1, 4), rank + 1.0)


def sees(rank):
    """What each hook sees of the gradient, and what .grad is in the end."""
    saw = {}

    def tensor_hook(grad):
        saw["tensor hook"] = grad.sum().item()

    def post_accumulate_hook(param):
        saw["post-accumulate"] = param.grad.sum().item()

    model = small()
    model.weight.register_hook(tensor_hook)
    ddp = DDP(model)
    model.weight.register_post_accumulate_grad_hook(post_accumulate_hook)
    ddp(batch(rank)).sum().backward()
    saw[".grad in the end"] = model.weight.grad.sum().item()
    return saw


def drifts(rank):
    """The optimizer steps in a hook: are the copies still equal?"""
    model = small()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(param):
        optimizer.step()

    model.weight.register_post_accumulate_grad_hook(hook)
    ddp(batch(rank)).sum().backward()
    return equal_everywhere(model.weight)


def averages_first(rank):
    """The same hook averages the gradient before it steps, without DDP."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(param):
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
        optimizer.step()

    model.weight.register_post_accumulate_grad_hook(hook)
    model(batch(rank)).sum().backward()
    return equal_everywhere(model.weight)


def equal_everywhere(weight):
    """Do both processes have the same weight?"""
    first, second = torch.zeros(2, *weight.shape)
    dist.all_gather([first, second], weight.detach())
    return torch.equal(first, second)


def forgets_to_divide(rank):
    """A communication hook that sums, and stops there."""

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp = DDP(small())
    ddp.register_comm_hook(None, hook)
    ddp(batch(rank)).sum().backward()
    return ddp.module.weight.grad.sum().item()


def shards(rank):
    """FSDP2: what hooks see if registered before and after fully_shard."""
    saw = {}

    def note(what):
        def hook(module, *args):
            saw[what] = type(module.weight).__name__

        return hook

    def hang(layer, when):
        def tensor_hook(grad):
            saw[f"{when}: tensor hook"] = kind(grad)

        layer.register_forward_pre_hook(note(f"{when}: forward pre-hook"))
        layer.register_forward_hook(note(f"{when}: forward hook"))
        layer.weight.register_hook(tensor_hook)

    model = nn.Sequential(nn.Linear(8, 8), nn.Identity())
    layer = model[0]
    mesh = init_device_mesh("cpu", (2,))
    hang(layer, "before")
    for module in (layer, model):
        fully_shard(module, mesh=mesh)
    hang(layer, "after")

    def post_accumulate_hook(param):
        saw["after: post-accumulate"] = kind(param.grad)

    layer.weight.register_post_accumulate_grad_hook(post_accumulate_hook)
    model(torch.full((1, 8), rank + 1.0)).sum().backward()
    saw["full_tensor()"] = kind(layer.weight.grad.full_tensor())
    return {"saw": saw, "own": own_hooks(layer)}


def own_hooks(layer):
    """The hooks that FSDP2 has put on a layer."""
    found = {f"{record.kind}: {record.function.partition('.<')[0]}" for record in hooks_on(layer)}
    return sorted(text for text in found if "FSDP" in text)


def kind(grad):
    """Type, own shape, whole shape and mean of a gradient."""
    here = grad.to_local() if hasattr(grad, "to_local") else grad
    return f"{type(grad).__name__}, {list(here.shape)} of {list(grad.shape)}, mean {here.mean():g}"


def top_k(share, rests=None):
    """Send the largest entries. `rests` keeps what is not sent, for the next step."""

    def hook(state, bucket):
        flat = bucket.buffer()
        if rests is not None:
            flat = flat + rests.get(bucket.index(), 0)
        where = flat.abs().topk(round(share * len(flat))).indices
        if rests is not None:
            rests[bucket.index()] = flat.index_fill(0, where, 0)
        total = torch.zeros_like(flat)
        values, places = gathered(flat[where]), gathered(where.int())
        for one_process in range(len(values)):
            total.index_add_(0, places[one_process], values[one_process])
        done = torch.futures.Future()
        done.set_result(total / dist.get_world_size())
        return done

    return hook


def gathered(tensor):
    """This tensor of every process."""
    found = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def compresses(rank):
    """Train three times: all of the gradient, its top 1 %, and with the rest kept."""
    torch.set_default_dtype(torch.float64)
    images, labels = glyphs(1200)
    images = images.flatten(1).double()
    rests = {}
    hooks = {"dense": None, "top 1 %": top_k(0.01), "top 1 %, keep the rest": top_k(0.01, rests)}
    return {name: trained(hook, rests, rank, images, labels) for name, hook in hooks.items()}


def trained(hook, rests, rank, images, labels):
    """Bytes of the last step, and the share of new images that is read well."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)))
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    mine = torch.Generator().manual_seed(rank)
    sent = []
    dist.group.WORLD.register_pre_hook(0, lambda work: sent.extend(t.nbytes for t in work.input_tensors))
    for step in range(150):
        rows = torch.randint(1000, (32,), generator=mine)
        optimizer.zero_grad()
        sent.clear()
        nn.functional.cross_entropy(ddp(images[rows]), labels[rows]).backward()
        optimizer.step()
        if step == 0:
            rests.clear()  # DDP orders the buckets anew after the first step
    right = ddp.module(images[1000:]).argmax(1) == labels[1000:]
    return [sum(sent), right.double().mean().item()]


JOBS = [sees, drifts, averages_first, forgets_to_divide, shards, compresses]


def main():
    """Run all jobs; rank 0 prints what they return."""
    faulthandler.dump_traceback_later(90, exit=True)  # a process that waits for a dead one ends, too
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    try:
        results = {job.__name__: job(rank) for job in JOBS}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(results), flush=True)
    # Python's own end now and then aborts the process while threads of gloo are still running.
    os._exit(0)


if __name__ == "__main__":
    main()
