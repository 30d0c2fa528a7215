"""Which calls of modules are running in this thread: the frames of the interpreter tell."""

import sys
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any
from weakref import ref

from torch import nn

__all__ = [
    "CALL",
    "called_by_itself",
    "calls",
    "forget_interrupted",
    "is_running",
    "leave",
    "may_be_running",
    "outermost",
]

CALL = nn.Module._call_impl.__code__  # of the frame in which a module is called


def leave(running: list[tuple], module: nn.Module) -> bool:
    """True if a call of `module` is among those `running`, each noted as (module, ...).

    It is the last one then: what began inside it was interrupted, and is taken off. It is not among them where a
    pre-hook raised before the one that notes.
    """
    if running and running[-1][0] is module:  # nearly always
        return True
    if not any(noted[0] is module for noted in running):
        return False
    while running[-1][0] is not module:
        running.pop()
    return True


def called_by_itself(module: nn.Module) -> bool:
    """True if a call of `module` is running inside another call of it."""
    return sum(frame["self"] is module for frame in calls()) > 1


def is_running(module: nn.Module) -> bool:
    """True if a call of `module` is running in this thread."""
    return any(frame["self"] is module for frame in calls())


def may_be_running(modules: set[nn.Module]) -> bool:
    """True if a call of one of them is running in this thread, or what calls modules in a way of its own.

    A checkpoint saves its input before it calls any; what is compiled calls none of those inside.
    """
    frame = sys._getframe()
    while frame is not None:
        called = frame.f_code is CALL and frame.f_locals["self"] in modules
        in_checkpoint = frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        if called or in_checkpoint or frame.f_code.co_name == "compile_wrapper":
            return True
        frame = frame.f_back
    return False


def outermost(modules: set[nn.Module]) -> Callable[[], object] | None:
    """Leads to an object that is new in each call: in the outermost one of `modules` that is running, if any."""
    found = None
    for frame in calls():
        if frame["self"] in modules:
            found = frame
    if found is None:
        return None
    forward, kwargs = found.get("forward_call"), found["kwargs"]
    if isinstance(forward, MethodType) and "forward" not in vars(found["self"]):
        return ref(forward)  # bound anew in each call
    return lambda: kwargs  # an empty dictionary, mostly


def calls() -> Iterator[Mapping[str, Any]]:
    """The names of each call of a module that is running in this thread, the innermost first."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CALL:
            yield frame.f_locals
        frame = frame.f_back


def forget_interrupted(running: list[tuple]) -> None:
    """A call begins: what is noted as running, as (module, ...), and is not was interrupted, which no hook hears of."""
    frame, around = sys._getframe() if running else None, []
    while frame is not None:
        if frame.f_code is CALL:
            around.append(frame.f_locals["self"])
        elif frame.f_code.co_name.removeprefix("torch_dynamo_resume_in_").startswith("_call_impl"):
            return  # compiled: what it calls cannot be told
        frame = frame.f_back
    while running and all(module is not running[-1][0] for module in around[1:]):
        running.pop()
