"""Threads, signals, forks, errors in the middle, and contexts that are left in another order than entered."""

import asyncio
import contextlib
import copy
import gc
import itertools
import linecache
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref

import numpy
import pytest
import torch
from models import mlp
from torch import nn
from torch.autograd.graph import save_on_cpu

from hooklab import (
    HookLeak,
    Offload,
    checkpoint_segments,
    draw,
    features,
    layer_statistics,
    no_leftovers,
    saved_tensors,
    trace,
    watch,
)
from hooklab.layers.figures import CHUNK, Scratch, as_array
from hooklab.layers.streaming import Running
from hooklab.stores import Disk
from hooklab.tracing import NODE_CREATION_HOOK

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


# ---- threads ----


def test_two_threads_in_a_traced_model_count_their_calls_apart():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    other_is_inside, go_on = threading.Event(), threading.Event()

    def wait(module, args):
        if threading.current_thread() is not threading.main_thread():
            other_is_inside.set()
            go_on.wait(10)

    with trace(model) as events:
        model[1].register_forward_pre_hook(wait)
        thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
        thread.start()
        other_is_inside.wait(10)
        model(torch.ones(1, 2))
        go_on.set()
        thread.join()
    assert not [event for event in events.events if "#2" in event.where]


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


# ---- signals, and whatever else comes in between ----


class AtEveryLine:
    """Calls a function at the lines of one function of the package, as a signal might."""

    def __init__(self, code, function):
        self.code, self.function, self.inside = code, function, False

    def __call__(self, frame, event, argument):
        if frame.f_code is not self.code:
            return None
        if event == "line" and not self.inside:
            self.inside = True
            try:
                self.function()
            finally:
                self.inside = False
        return self

    @contextlib.contextmanager
    def at_work(self):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


# More than `CHUNK` numbers in float32 take the way of `Scratch.figures_in_parts`, all others that of `Scratch.figures`.
@pytest.mark.parametrize("size", [10_000, 18_000, 140_000])
@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        (Scratch.figures, torch.float32),
        (Scratch.figures, torch.float64),
        (Scratch.figures_in_parts, torch.float32),
        *(
            (place, dtype)
            for place in (Running.add, Running._merge, Running._add)
            for dtype in (torch.float32, torch.float64)
        ),
    ],
)
def test_statistics_are_right_whatever_is_counted_or_read_in_between(place, dtype, size):
    if place is Scratch.figures_in_parts:
        size += CHUNK
    if place is Scratch.figures and dtype is torch.float32:
        size = min(size, CHUNK)
    model = nn.Sequential(nn.ReLU(), nn.Identity())
    x, other = torch.arange(size, dtype=dtype) - size / 2, torch.full((size + 2_000,), 7.0, dtype=dtype)
    expected = layer_statistics(model, "0")
    with expected:
        model(x)
    times = []
    with layer_statistics(model, "0") as stats, layer_statistics(nn.Identity(), "") as others:
        running = others._running[""]

        def between():
            times.append(1)
            running.add(other)
            stats.table()

        with AtEveryLine(place.__code__, between).at_work():
            model(x)
            stats.table()
    assert len(times) > 3
    assert stats["0"] == expected["0"]
    assert (others[""].calls, others[""].mean, others[""].std) == (len(times), 7.0, 0.0)


@pytest.mark.parametrize("size", [100, 10_000, 18_000, 140_000])
@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        *((place, torch.float32) for place in (Scratch.figures_in_parts, Scratch.figures, Running.add)),
        *(
            (place, torch.float64)
            for place in (Scratch.figures, Running.add, Running._add_entries, Running._measure, Running._add)
        ),
    ],
)
def test_what_is_counted_of_the_same_layer_in_between_is_counted_once(place, dtype, size):
    running, times = Running(0, (-1, 1)), []
    before, large = torch.arange(10_000.0), torch.arange(-70_000.0, 80_000.0, dtype=dtype)
    if place is Scratch.figures and dtype is torch.float32:
        large = large[::4].contiguous()
        assert len(large) <= CHUNK
    other = torch.linspace(-3, 7, size, dtype=dtype)

    def between():
        times.append(1)
        running.add(other)
        running.read()

    running.add(before)
    with AtEveryLine(place.__code__, between).at_work():
        running.add(large)
    assert len(times) > 3
    found, entries = running.read(), torch.cat([before, large, *[other] * len(times)]).double()
    assert (found.calls, found.count) == (len(times) + 2, entries.numel())
    assert (found.min, found.max) == (large.min(), large.max()) == (-70_000, 80_000 - (large[1] - large[0]))
    assert found.zeros == (entries == 0).sum() / entries.numel()
    assert found.mean == pytest.approx(entries.mean().item(), rel=1e-9)
    assert found.std == pytest.approx(entries.std().item(), rel=1e-9)


# A signal is handled where a call ends or a loop begins again: not before the first lines of a `finally`.
AT_THE_END = ("self.busy = False", "set_errors(before)")


@pytest.mark.parametrize(
    ("place", "given"),
    [
        (Scratch.figures, lambda tensor: (tensor, tensor.shape, as_array(tensor))),
        (Scratch.figures_in_parts, lambda tensor: (as_array(tensor),)),
    ],
)
def test_an_interruption_leaves_the_memory_free_and_numpy_as_it_was(place, given):
    scratch = Scratch()
    tensor = torch.randn(CHUNK if place is Scratch.figures else 2 * CHUNK + 1)
    expected, left = place(scratch, *given(tensor)), 0

    def interrupt(frame, event, argument):
        nonlocal left
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if frame.f_code is not place.__code__ or event != "line" or line in AT_THE_END:
            return interrupt
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return interrupt

    for lines in itertools.count():
        left, found, before = lines, None, sys.gettrace()
        with numpy.errstate(invalid="raise"):
            errors = numpy.geterr()
            sys.settrace(interrupt)
            try:
                found = place(scratch, *given(tensor))
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            assert numpy.geterr() == errors
        assert place(scratch, *given(tensor)) == expected
        if found is not None:
            break
    assert lines > 20
    assert found == expected


@posix
def test_reading_statistics_in_a_signal_handler_does_not_wait_for_itself():
    model, x = nn.Sequential(nn.ReLU()), torch.randn(30_000)
    looks = []
    with layer_statistics(model, "*") as stats:
        before = signal.signal(signal.SIGALRM, lambda *_: looks.append(stats.table()))
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        try:
            while len(looks) < 20:
                model(x)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert stats["0"].count == 30_000 * stats["0"].calls


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
def test_a_child_that_is_forked_while_a_thread_counts_can_count():
    stats = layer_statistics(nn.Identity(), "")
    running = stats._running[""]
    held, done = threading.Event(), threading.Event()

    def hold():
        with running._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)

    def count():
        running.add(torch.ones(3))
        return running.read().count

    child = forked(count)
    done.set()
    thread.join()
    assert exit_status(child) == 3


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
            return 7 * (
                offload.moved_bytes == moved and torch.equal(y.grad_fn._saved_result, torch.ones(4).exp())
            )

        child = forked(save)
    assert exit_status(child) == 7


def test_a_copy_of_statistics_is_made_of_one_moment():
    stats = layer_statistics(nn.Identity(), "")
    running = stats._running[""]
    running.add(torch.ones(3))
    with running._lock:
        later = threading.Thread(target=lambda: results.append(pickle.dumps(stats)))
        results = []
        later.start()
        later.join(0.2)
        assert not results  # it waits
    later.join()
    running.add(torch.ones(3))
    assert pickle.loads(results[0])[""].count == 3


def test_what_is_saved_in_the_middle_of_a_move_stays_in_memory():
    x = torch.ones(4, requires_grad=True)
    with Offload(to="disk", min_bytes=0) as offload:
        with offload._queue.lock:  # a signal handler or a finalizer runs while a tensor is on its way
            y = x.exp()
        assert (offload.moved_bytes, offload.kept_bytes, offload._queue.count) == (0, 16, 0)
    y.sum().backward()
    assert torch.equal(x.grad, y)


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


def test_segments_that_cannot_all_be_switched_are_switched_back():
    class Odd(nn.Sequential):
        def __init_subclass__(cls, *, kind, **rest):
            super().__init_subclass__(**rest)

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), Odd(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="kind"):
        checkpoint_segments(model, {"0": 1, "1": 1})
    assert type(model[0]) is nn.Sequential
    checkpoint_segments(model, {"0": 1}).remove()


def test_a_copied_handle_of_segments_has_nothing_to_switch_back():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    model.handle = checkpoint_segments(model, {"0": 1})
    other = copy.deepcopy(model)
    assert repr(other.handle) == "Segments(removed)"
    other.handle.remove()
    assert type(other[0]) is nn.Sequential
    assert type(model[0]) is not nn.Sequential
    model.handle.remove()


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
    if NODE_CREATION_HOOK is None:  # the name of an operation is known once backward has used what it saved
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


def test_a_leak_that_is_reported_keeps_nothing_alive():
    gc.collect()
    gc.disable()
    try:
        tensors = []

        def block():
            model = mlp(2, 3)
            with no_leftovers(model):
                handle = model[0].register_forward_hook(interrupt)
                tensor = torch.ones(3)
                tensors.append(weakref.ref(tensor))
                assert handle is not None
                raise ValueError("of the block")

        with contextlib.suppress(HookLeak):
            block()
        assert tensors[0]() is None
    finally:
        gc.enable()
