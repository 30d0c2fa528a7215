"""ModuleStack: which module of a model is running its forward."""

import contextlib
import threading

import pytest
import torch
from torch import nn

from hooklab import no_leftovers
from hooklab._support.module_stack import ModuleStack


class Asks(nn.Module):
    """Notes which module is running, as its forward begins and as it ends."""

    def __init__(self, inside=None):
        super().__init__()
        self.inside, self.seen = inside, []

    def forward(self, x):
        self.seen.append(self.ask())
        x = x if self.inside is None else self.inside(x)
        self.seen.append(self.ask())
        return x


def asking():
    model = Asks(nn.Sequential(Asks(), nn.Linear(2, 2)))
    stack = ModuleStack(model)
    model.ask = model.inside[0].ask = stack.innermost
    return model, stack


def test_the_innermost_running_module_has_its_name_and_the_model_that_of_its_class():
    model, stack = asking()
    model(torch.ones(1, 2))
    assert model.seen == ["Asks", "Asks"]
    assert model.inside[0].seen == ["inside.0", "inside.0"]
    assert stack.innermost() == ""


def test_a_call_that_raised_is_over():
    model, stack = asking()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert stack.innermost() == ""


def test_calls_in_another_thread_are_not_seen():
    model, _ = asking()
    thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
    thread.start()
    thread.join()
    assert model.seen == ["", ""]


def test_what_is_put_around_a_call_ends_with_it_and_an_interrupted_one_with_the_stack():
    open_now = []

    @contextlib.contextmanager
    def around():
        open_now.append("one")
        yield
        open_now.pop()

    def interrupt(*args):
        raise KeyboardInterrupt

    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    with no_leftovers(model):
        stack = ModuleStack(model, around)
        model(torch.ones(2))
        assert open_now == []
        with model[1].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            model(torch.ones(2))
        assert len(open_now) == 2
        stack.remove()
    assert open_now == []
