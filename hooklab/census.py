"""Part 1: which hooks are installed, and none left behind.

The tables in which PyTorch keeps hooks are private to it; they are listed here, where they are read.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from hooklab._support import refuse
from hooklab._support.notebook_cell import in_cell, running_shell
from hooklab._support.table import Tabular
from hooklab._support.torch_private import is_compiled, outer_hooks, uncompiled

__all__ = ["OPTIONS", "HookLeak", "HookRecord", "Hooks", "hooks_on", "installed", "no_leftovers"]

Tables = dict[str, str]  # each attribute that holds hooks, with PyTorch's word for the kind
ON_MODULE: Tables = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "full backward pre-hook",
    "_backward_hooks": "full backward hook",
    "_state_dict_pre_hooks": "state_dict pre-hook",
    "_state_dict_hooks": "state_dict hook",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}
ON_TENSOR: Tables = {
    "_backward_hooks": "tensor hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
ON_OPTIMIZER: Tables = {
    "_optimizer_step_pre_hooks": "optimizer step pre-hook",
    "_optimizer_step_post_hooks": "optimizer step post-hook",
    "_optimizer_state_dict_pre_hooks": "state_dict pre-hook",
    "_optimizer_state_dict_post_hooks": "state_dict hook",
    "_optimizer_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_optimizer_load_state_dict_post_hooks": "load_state_dict post-hook",
}
GLOBAL_MODULE: Tables = {
    "_global_forward_pre_hooks": "forward pre-hook",
    "_global_forward_hooks": "forward hook",
    "_global_backward_pre_hooks": "full backward pre-hook",
    "_global_backward_hooks": "full backward hook",
    "_global_module_registration_hooks": "module registration hook",
    "_global_parameter_registration_hooks": "parameter registration hook",
    "_global_buffer_registration_hooks": "buffer registration hook",
}
GLOBAL_OPTIMIZER: Tables = {
    "_global_optimizer_pre_hooks": "optimizer step pre-hook",
    "_global_optimizer_post_hooks": "optimizer step post-hook",
}
# Beside some of these tables PyTorch keeps another one, of the hooks that were registered with an option.
OPTIONS = {"with_kwargs": "_with_kwargs", "always_call": "_always_called"}

COMPILED = "inside a compiled model: it never fires if it came after the first run"


@dataclass(frozen=True)
class HookRecord:
    """One installed hook.

    Attributes:
        kind: PyTorch's word: `"forward hook"`, `"tensor hook"`, `"retain_grad"`, `"saved-tensor hooks"`, …
        place: the module, parameter or tensor that it is on, `"everywhere"` or `"this thread"`.
        function: the qualified name of the function; empty for retain_grad, which has none.
        file, line: where the function is written; None for what has no source in Python.
        options: those that were switched on, such as `("with_kwargs",)`.
        owner: `"hooklab"`, `"torch"` (PyTorch's own, such as weight norm) or `"user"`.
        doubt: why it may never fire, where that can be seen; empty elsewhere.
    """

    kind: str
    place: str
    function: str = ""
    file: str | None = None
    line: int | None = None
    options: tuple[str, ...] = ()
    owner: str = "user"
    doubt: str = ""
    key: tuple = field(default=(), repr=False)  # tells two registrations of one function apart

    @property
    def removable(self) -> bool:
        """True if `remove_hooks` can take it off: it is not PyTorch's own, nor one for which PyTorch has no way."""
        return self.owner != "torch" and self.kind not in ("retain_grad", "saved-tensor hooks")

    def __str__(self) -> str:
        source = f" ({_short(self.file)}, line {self.line})" if self.file else ""
        by = f": {self.function}{source}" if self.function else ""
        options = f" [{', '.join(self.options)}]" if self.options else ""
        owner = f" ({self.owner}'s own)" if self.owner != "user" else ""
        doubt = f"; {self.doubt}" if self.doubt else ""
        return f"{self.kind} on {self.place}{by}{options}{owner}{doubt}"


class Hooks(Tabular, list[HookRecord]):
    """A list of `HookRecord`, shown as a table in a notebook: what `hooks_on` returns."""

    _columns = "kind", "place", "function", "file", "line", "options", "owner"
    _text_columns = len(_columns)

    def _records(self) -> Iterable[tuple]:
        return ((h.kind, h.place, h.function, h.file, h.line, h.options, h.owner) for h in self)

    def _cells(self) -> Iterable[tuple[str, ...]]:
        for h in self:
            where = (_short(h.file), str(h.line)) if h.file else ("", "")
            yield h.kind, h.place, h.function, *where, "; ".join(filter(None, [", ".join(h.options), h.doubt])), h.owner


class HookLeak(RuntimeError):
    """Hooks outlived the block that should have removed them; `hooks` lists them."""

    def __init__(self, hooks: list[HookRecord]):
        self.hooks = hooks
        lines = "\n".join(f"  {hook}" for hook in hooks)
        cure = "keep the handles and call .remove()"
        if all(hook.owner == "torch" for hook in hooks):
            cure = (
                "undo there what put them on (remove_weight_norm, remove_spectral_norm, …), or do it before the block"
            )
        super().__init__(f"{len(hooks)} hook(s) outlived the block; {cure}:\n{lines}")

    def __reduce__(self) -> tuple:
        return HookLeak, (self.hooks,)


def hooks_on(obj: nn.Module | Tensor | Optimizer) -> list[HookRecord]:
    """Every hook that can be listed on `obj`, and the global ones.

    Args:
        obj: a module (with all its submodules and parameters), a tensor or an optimizer.

    Returns:
        One `HookRecord` per registration: on modules, on parameters, then the global ones. A notebook shows the list
        as a table, and `.to_dataframe()` hands it to pandas.

    Raises:
        TypeError: `obj` is none of the three.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> handle = layer.register_forward_hook(print)
        >>> for hook in hooks_on(layer):
        ...     print(hook)
        forward hook on Linear: print

    Limits: docs/limits.md#hooks_on.
    Source: the tables in `torch/nn/modules/module.py`, `torch/_tensor.py` and `torch/optim/optimizer.py`.
    """
    return installed("hooks_on", obj)


@contextmanager
def no_leftovers(model: nn.Module) -> Iterator[None]:
    """Make sure that a block leaves no hook behind that was not there before, also when it raises.

    Args:
        model: the module whose hooks are compared, with submodules, parameters and the global hooks.

    Raises:
        HookLeak: names each hook that outlived the block; if the block raised, its error is the cause.
        TypeError: `model` is not a module.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with no_leftovers(layer):
        ...     handle = layer.register_forward_hook(print)
        ...     handle.remove()

    Limits: docs/limits.md#no_leftovers.
    """
    refuse.no_module("no_leftovers", model)
    before = {hook.key for hook in hooks_on(model)}
    try:
        yield
    except BaseException as error:
        if left := _new(model, before):
            # This frame is left out: it leads back to the error, a cycle that lives until the garbage collector runs.
            raise HookLeak(left) from error.with_traceback(getattr(error.__traceback__, "tb_next", None))
        raise
    if left := _new(model, before):
        raise HookLeak(left)


def installed(function: str, obj: Any) -> Hooks:
    """What `hooks_on` returns; `function` is the one that the errors name."""
    if isinstance(obj, nn.Module):
        found = _on_model(obj)
    elif isinstance(obj, Tensor):
        found = _on_tensor(obj, "the tensor")
    elif isinstance(obj, Optimizer):
        found = _in_tables(obj, ON_OPTIMIZER, type(obj).__name__)
    else:
        is_node = isinstance(obj, torch.autograd.graph.Node)
        hint = "; hooks on autograd Nodes cannot be listed from Python" if is_node else ""
        raise TypeError(f"{function}: expected a module, a tensor or an optimizer, found {type(obj).__name__}{hint}")
    return Hooks([*found, *_everywhere()])


def _new(model: nn.Module, before: set[tuple]) -> list[HookRecord]:
    found = (hook for hook in hooks_on(model) if hook.key not in before)
    return [hook for hook in found if hook.owner != "torch" or "state_dict" not in hook.kind]


def _on_model(model: nn.Module) -> Iterator[HookRecord]:
    outer = [module for module in model.modules() if is_compiled(module)]
    inside = {part for module in outer for part in uncompiled(module).modules() if part is not uncompiled(module)}
    for name, module in model.named_modules():
        for hook in _in_tables(module, ON_MODULE, name or type(module).__name__):
            in_doubt = module in inside and "state_dict" not in hook.kind
            yield replace(hook, doubt=COMPILED) if in_doubt else hook
    for name, param in model.named_parameters():
        yield from _on_tensor(param, name)


def _on_tensor(tensor: Tensor, place: str) -> Iterator[HookRecord]:
    yield from _in_tables(tensor, ON_TENSOR, place)
    if tensor.retains_grad:
        yield HookRecord("retain_grad", place, key=("retain_grad", id(tensor)))


def _everywhere() -> Iterator[HookRecord]:
    yield from _in_tables(modules, GLOBAL_MODULE, "everywhere")
    yield from _in_tables(optimizers, GLOBAL_OPTIMIZER, "everywhere")
    if (pair := outer_hooks()) is not None:
        key = ("saved-tensor hooks", id(pair[0]), id(pair[1]))
        yield _record("saved-tensor hooks", "this thread", pair[0], (), key)


def _in_tables(obj: Any, tables: Tables, place: str) -> Iterator[HookRecord]:
    for attribute, kind in tables.items():
        for number, function in (getattr(obj, attribute, None) or {}).items():
            options = [name for name, suffix in OPTIONS.items() if number in getattr(obj, attribute + suffix, ())]
            full = "_global_is_full_backward_hook" if obj is modules else "_is_full_backward_hook"
            if kind == "full backward hook" and getattr(obj, full) is False:
                kind = "legacy backward hook"
            yield _record(kind, place, function, tuple(options), (attribute, id(obj), number))


def _record(kind: str, place: str, function: Any, options: tuple[str, ...], key: tuple) -> HookRecord:
    wrapper = getattr(getattr(function, "__code__", None), "co_qualname", "")
    if wrapper.startswith("register_multi_grad_hook."):
        kind = "multi-grad hook"
        inner = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        function = inner["fn"].cell_contents if "fn" in inner else function
    function = _unwrapped(function)
    called = function if isinstance(function, type) else function.__call__
    code = getattr(function, "__code__", None) or getattr(called, "__code__", None)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    home = (getattr(function, "__module__", None) or type(function).__module__ or "").partition(".")[0]
    owner = home if home in ("hooklab", "torch") else "user"
    if any(kind.__module__.startswith("torch.nn.utils.") for kind in type(function).__mro__):
        owner = "torch"  # a pruning method that somebody has derived from PyTorch's
    file, line = (code.co_filename, code.co_firstlineno) if code else (None, None)
    return HookRecord(kind, place, name, file, line, options, owner, key=key)


def _unwrapped(function: Any) -> Any:
    """The function a person wrote, behind partials, wrappers, methods and torch.compile."""
    inner = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
    if isinstance(function, functools.partial):
        inner = function.func
    elif type(function).__module__.startswith("torch."):
        inner = getattr(function, "hook", None)
    return function if inner is None else _unwrapped(inner)


def _short(file: str) -> str:
    """The name of a file; a cell of a notebook has none that is the same in every run."""
    shell = running_shell()
    return "notebook cell" if shell is not None and in_cell(shell, file) else Path(file).name
