"""Contexts that are left in another order or another thread than entered, forks, and interruptions."""

import asyncio
import copy
import os
import pickle
import signal
import sys
import threading
import warnings

import pytest
import torch
from models import mlp
from torch import nn
from torch.autograd.graph import save_on_cpu

from hooklab import (
    Offload,
    draw,
    features,
    no_leftovers,
    saved_tensors,
    trace,
    watch,
)
from hooklab.stores import Disk

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals and fork of POSIX")


def in_thread(function):
    """What a function returns in a thread of its own, or the error that it raises."""
    results = []

    def call():
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return results[0]


# ---- contexts in another order ----


def offloading(model):
    return Offload(model, to="disk", min_bytes=0)


@pytest.mark.parametrize("second", [saved_tensors, offloading, trace, lambda model: save_on_cpu()])
@pytest.mark.parametrize("first", [saved_tensors, offloading, trace])
def test_a_context_that_is_left_before_one_opened_after_it_spoils_nothing(first, second):
    async def task(context, begin, end):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        await asyncio.sleep(begin)
        with context(model):
            await asyncio.sleep(end)
            model(torch.ones(1, 2)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    async def both():
        return await asyncio.gather(task(first, 0, 0.02), task(second, 0.01, 0.04))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the one that was pushed aside has seen nothing
        left, right = asyncio.run(both())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    for found in (left, right):
        assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_a_trace_that_is_left_in_another_thread_leaves_no_hook():
    model = mlp(4, 3)
    with no_leftovers(model):
        events = trace(model).__enter__()
        in_thread(lambda: events.__exit__(None, None, None))
        torch._C._autograd._pop_saved_tensors_default_hooks()  # these belong to this thread
        model(torch.ones(2, 4)).sum().backward()
        assert not events.events


def test_a_trace_that_is_open_is_not_entered_again():
    model = mlp(4, 3)
    with trace(model) as events:
        with pytest.raises(RuntimeError, match="open already"), events:
            pass
        model(torch.ones(2, 4)).sum().backward()
    once = trace(model)
    with once:
        model(torch.ones(2, 4)).sum().backward()
    assert once.lines() == events.lines()


# ---- threads and forks ----


def test_pictures_of_graphs_from_several_threads_leave_the_process_as_it_was():
    before, limit = list(warnings.filters), sys.getrecursionlimit()

    def some():
        for _ in range(6):
            x = torch.ones(2, requires_grad=True)
            for _ in range(200):
                x = x * 2
            draw.graph(x)

    threads = [threading.Thread(target=some) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    import torchviz.dot

    assert not {"getattr", "hasattr"} & set(vars(torchviz.dot))
    assert sys.getrecursionlimit() == limit
    assert list(warnings.filters) == before


def forked(run):
    """The id of a child that exits with what `run` returns; with 1 after an error, which must not go on as a second pytest."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(20)  # ends it if it waits for a lock
        status = run()
    finally:
        os._exit(status)


def exit_status(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@posix
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_forked_child_saves_stays_in_its_memory():
    w = torch.ones(4, requires_grad=True)
    with Offload(to=Disk(), min_bytes=0) as offload:
        (w.exp() * w).sum().backward()

        def save():
            moved = offload.moved_bytes
            y = torch.ones(4, requires_grad=True).exp()
            # Without a backward: it is refused where an earlier one has started threads that are not in the child.
            return 7 * (offload.moved_bytes == moved and torch.equal(y.grad_fn._saved_result, torch.ones(4).exp()))

        child = forked(save)
    assert exit_status(child) == 7


# ---- interrupted, and copied ----


def test_a_copy_of_the_model_writes_nothing_into_features_that_were_interrupted():
    model = mlp(2, 3, 2)
    with pytest.raises(KeyboardInterrupt), features(model, "0") as f:
        other = copy.deepcopy(model)
        model[1].register_forward_hook(interrupt)
        model(torch.ones(1, 2))
    kept = f["0"].clone()
    other(torch.full((1, 2), 100.0))
    assert torch.equal(f["0"], kept)
    assert len(f.calls["0"]) == 1


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda saved: pickle.loads(pickle.dumps(saved))])
def test_a_record_of_saved_tensors_can_be_copied_and_pickled(copied):
    model = mlp(2, 3)
    with saved_tensors(model) as saved:
        loss = model(torch.ones(1, 2)).sum()
        inside = copied(saved)
    loss.backward()
    other = copied(saved)
    assert other.table() == saved.table()
    assert other.held == saved.held
    assert repr(other) == repr(saved)
    if not hasattr(
        torch.autograd.graph, "node_creation_hook"
    ):  # the name of an operation is known once backward has used what it saved
        assert {record.operation for record in inside} == {""}
        for earlier, record in zip(inside, saved, strict=True):
            earlier.operation = record.operation
    assert list(inside) == list(saved)


def test_a_watch_that_cannot_be_finished_leaves_no_hook():
    class Refusing(torch.Tensor):
        def register_hook(self, hook):
            raise KeyboardInterrupt

    x, y = torch.ones(2, requires_grad=True), torch.ones(2).as_subclass(Refusing).requires_grad_()
    with pytest.raises(KeyboardInterrupt):
        watch(x=x, y=y)
    assert not x._backward_hooks
