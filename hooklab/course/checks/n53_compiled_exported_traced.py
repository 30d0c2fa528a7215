"""Checks of notebook 53: compiled, exported, traced."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, refuse, refuse_first
from hooklab.course.checks.models import Before

# ---- 53.A: the shapes of every layer of a model that is compiled already ----


def layer_shapes(fast, x):
    shapes, handles = {}, []
    for name, layer in fast._orig_mod.named_modules():
        if not list(layer.children()):

            def hook(module, args, output, name=name):
                shapes[name] = tuple(output.shape)

            handles.append(layer.register_forward_hook(hook))
    try:
        with torch.compiler.set_stance("force_eager"):
            fast(x)
    finally:
        for handle in handles:
            handle.remove()
    return shapes


class _Net(nn.Module):
    """A container in a container, which may be compiled by itself."""

    def __init__(self, width: int, compile_part: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.Sequential(nn.ReLU(), nn.Linear(width, 4)))
        self.head = nn.Linear(4, 2)
        if compile_part:
            self.body[1].compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


SHAPES = [  # what `layer_shapes` has returned; `want` is what it should
    ("no_dict", lambda t: not isinstance(t.got, dict)),
    ("empty", lambda t: not t.got),
    ("only_root", lambda t: len(t.got) == 1),
    ("orig_mod_names", lambda t: any("_orig_mod" in str(name) for name in t.got)),
    ("compiled_part", lambda t: t.want.keys() - t.got.keys() == {"body.1.0", "body.1.1"}),
    ("containers", lambda t: t.got.keys() > t.want.keys()),
    ("other_names", lambda t: t.got.keys() != t.want.keys() and len(t.got) >= len(t.want)),
    ("missed_layers", lambda t: t.want.keys() - t.got.keys()),
    ("no_shapes", lambda t: not all(isinstance(shape, tuple) for shape in t.got.values())),
    ("other_run", lambda t: t.got != t.want and _without_rows(t.got) == _without_rows(t.want)),
    ("wrong_shapes", lambda t: t.got != t.want),
]

AFTERWARDS = [  # the next run of the compiled model
    ("left_eager", lambda t: t.seen.runs == t.before.runs),
    ("recompiled", lambda t: t.seen.graphs > t.before.graphs),
]


def examine_shapes(answer):
    torch.manual_seed(0)
    for width, rows, compile_part in ((5, 2, False), (6, 4, True)):
        with _as_before():
            _examine_shapes(answer, _Net(width, compile_part), width, rows)


def _examine_shapes(answer, model, width, rows):
    seen = SimpleNamespace(graphs=0, runs=0)
    fast, x = torch.compile(model, backend=_counting(seen)), torch.randn(rows, 3)
    model(x)  # so that the part has compiled code of its own, too
    fast(x)
    left = Before(model)
    got = answer(fast, x)
    columns = {"body.0": width, "body.1.0": width, "body.1.1": 4, "head": 2}
    want = {name: (rows, column) for name, column in columns.items()}
    refuse_first(SHAPES, got=got, want=want)
    if hooks := left.new_hooks():
        refuse("left_hooks", count=len(hooks))
    before = SimpleNamespace(**vars(seen))
    fast(x)
    refuse_first(AFTERWARDS, seen=seen, before=before)
    _examine_error(answer, model, fast, x, seen)


def _without_rows(shapes):
    return {name: shape[1:] for name, shape in shapes.items()}


def _examine_error(answer, model, fast, x, seen):
    left = Before(model)
    try:
        answer(fast, torch.randn(2, 7))  # the first layer wants 3 columns
    except Exception:
        pass
    else:
        refuse("swallowed")
    if left.new_hooks():
        refuse("left_after_error")
    before = SimpleNamespace(**vars(seen))
    fast(x)
    if seen.runs == before.runs:
        refuse("eager_after_error")


def _counting(seen: Any) -> Callable:
    """A backend that counts what is compiled, and how often it runs."""

    def backend(graph, inputs):
        seen.graphs += 1

        def run(*given):
            seen.runs += 1
            return graph(*given)

        return run

    return backend


@contextmanager
def _as_before() -> Iterator[None]:
    """Nothing is compiled at the beginning, and at the end; a stance that was left on is taken back."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.set_stance("default")
        torch.compiler.reset()


LAYER_SHAPES = Exercise("53.A", examine_shapes, layer_shapes)

# ---- 53.B: what becomes of a hook? ----


def fate(model, register, transform, x):
    calls = []

    def hook(module, args, output):
        calls.append(1)
        return 2 * output + 1

    torch.compiler.reset()
    plain = model(x)
    handle = register(model, hook)
    try:
        run = transform(model, x)
        run(x)
        calls.clear()
        output = run(x)
    finally:
        handle.remove()
    if calls:
        return "fires"
    return "lost" if torch.allclose(output, plain) else "burned in"


def _on(name: str) -> Callable:
    return lambda model, hook: model.get_submodule(name).register_forward_hook(hook)


def _compile(model, x):
    return torch.compile(model, backend="eager")


def _trace(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, x)


def _export(model, x):
    return torch.export.export(model, (x,)).module()


def _fx(model, x):
    return torch.fx.symbolic_trace(model)


def _late(model, x):
    """Traces in its first call."""
    traced: list[Callable] = []

    def run(x):
        if not traced:
            traced.append(_export(model, x))
            return model(x)
        return traced[0](x)

    return run


CASES = [  # what transforms, where the hook is, and what becomes of it
    ("nothing", lambda model, x: model, "body", "fires"),
    ("torch.compile", _compile, "body.0", "fires"),
    ("torch.jit.trace", _trace, "body.0", "burned in"),
    ("torch.export", _export, "head", "burned in"),
    ("torch.fx", _fx, "head", "fires"),
    ("torch.fx", _fx, "body", "burned in"),
    ("torch.fx", _fx, "", "lost"),
    ("torch.export, in the first call", _late, "head", "burned in"),
]


def examine_fate(answer):
    torch.manual_seed(0)
    with _as_before():
        for what, transform, name, want in CASES:
            _examine_case(answer, what, transform, name, want)
        _examine_failing_transform(answer)


def _examine_case(answer, what, transform, name, want):
    x = torch.randn(2, 3)
    _compile(_Net(5), x)(x)  # an instance of the same class, without a hook
    model = _Net(5)
    left, registered = Before(model), []

    def register(model, hook):
        registered.append(hook)
        return _on(name)(model, hook)

    def transforming(model, x):
        if not registered:
            refuse("registered_late")
        return transform(model, x)

    got = answer(model, register, transforming, x)
    place = name or type(model).__name__
    if left.new_hooks():
        refuse("left_hooks", what=what)
    if got == want:
        return
    if got not in ("fires", "burned in", "lost"):
        refuse("no_word", got=got)
    _name_mistake(what, place, got, want, transform)
    refuse("wrong_fate", what=what, place=place, got=got, want=want)


def _name_mistake(what, place, got, want, transform):
    """Refuse for the one mistake that gives `got` in this case, if there is one."""
    facts = {"what": what, "place": place, "got": got}
    if want == "fires" and transform is _compile:
        refuse("compiled_before", **facts)
    if want == "burned in" and got == "lost":
        refuse("only_looks", **facts)
    if want == "burned in" and got == "fires":
        refuse("first_run" if transform is _late else "while_transforming", **facts)


def _examine_failing_transform(answer):
    def failing(model, x):
        raise ValueError("cannot be transformed")

    model = _Net(5)
    left = Before(model)
    try:
        answer(model, _on("head"), failing, torch.randn(2, 3))
    except Exception:
        pass
    else:
        refuse("swallowed")
    if left.new_hooks():
        refuse("left_after_error")


FATE = Exercise("53.B", examine_fate, fate)

EXERCISES = [LAYER_SHAPES, FATE]
