"""The package as a house: which room may lead to which, how long a file, a function and a docstring may be."""

import ast
import inspect
import re

import notebook_form
import pytest

import hooklab
from hooklab import draw, lesson, stores

ROOT = notebook_form.ROOT
HOUSE = ROOT / "hooklab"
FILES = sorted(path for path in HOUSE.rglob("*.py") if "checks" not in path.parts)
LEAVES = {"_support", "census", "stores"}
ROOMS = LEAVES | {"gradients", "removal", "tracing", "layers", "models", "saved", "draw"}  # all that is no lesson
MAY_IMPORT = {
    "_support": set(),
    "census": {"_support"},
    "removal": {"_support", "census"},
    "stores": {"_support"},
    "gradients": LEAVES | {"tracing"},
    "tracing": LEAVES | {"gradients"},
    "layers": LEAVES,
    "models": LEAVES | {"layers"},
    "saved": LEAVES,
    "draw": ROOMS,
    "course": ROOMS,
    "lesson": {"course"},
    "export": {"course"},
    "__init__": ROOMS | {"course"},
}
PRIVATE = re.compile(r"torch\._C|torch\._dynamo|_subclasses|_functorch|utils\._pytree|_python_dispatch")
DOORS = {"__init__.py", "lesson.py", "export.py"}
DOORS |= {f"{room}/__init__.py" for room in ("layers", "models", "saved", "course", "_support")}
KNOW_PRIVATE_NAMES = {"_support/torch_private.py", "census.py"}


def name_of(path):
    return path.relative_to(HOUSE).as_posix()


def room_of(path):
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def rooms_that_are_imported(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import names its room in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("hooklab."))


def definitions(path):
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def test_every_room_says_what_it_may_import():
    assert {room_of(path) for path in FILES} == set(MAY_IMPORT)
    assert "gradients" in set(rooms_that_are_imported(HOUSE / "__init__.py")), "or no import is seen at all"


def test_imports_point_one_way():
    wrong = {name_of(path): set(rooms_that_are_imported(path)) - {room_of(path)} - MAY_IMPORT[room_of(path)]
             for path in FILES}  # fmt: skip
    assert {name: rooms for name, rooms in wrong.items() if rooms} == {}


def test_private_names_of_pytorch_stand_in_one_room():
    found = {name_of(path): PRIVATE.findall(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: names for name, names in found.items() if names and name not in KNOW_PRIVATE_NAMES} == {}


def test_a_file_has_at_most_350_lines():
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > 350} == {}


def test_a_function_has_at_most_40_lines_without_its_docstring():
    lines = {}
    for path in FILES:
        for node in definitions(path):
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                body = node.body[1] if documented and len(node.body) > 1 else node.body[0]
                before = node.body[0].lineno - node.lineno
                lines[name_of(path), node.name] = before + node.end_lineno - body.lineno + 1
    assert {name: count for name, count in lines.items() if count > 40} == {}


def test_a_docstring_has_at_most_31_lines():
    lines = {(name_of(path), getattr(node, "name", "module")): (ast.get_docstring(node) or "").count("\n") + 1
             for path in FILES for node in [tree(path), *definitions(path)]}  # fmt: skip
    assert {name: count for name, count in lines.items() if count > 31} == {}


def public_names():
    """Every call of the package, and every class that calls return, under its address."""
    for owner in (hooklab, draw, stores, lesson):
        yield from ((f"{owner.__name__}.{name}", getattr(owner, name)) for name in owner.__all__)
    yield from ((f"{name_of(path)}:{node.name}", node) for path in FILES if room_of(path) in ROOMS - {"_support"}
                for node in definitions(path) if isinstance(node, ast.ClassDef) and node.name[0] != "_")  # fmt: skip


def test_every_public_name_has_a_docstring():
    silent = [name for name, thing in public_names()
              if not (ast.get_docstring(thing) if isinstance(thing, ast.AST) else inspect.getdoc(thing))]  # fmt: skip
    assert not silent


CALLS = {name: getattr(owner, name) for owner in (hooklab, draw) for name in owner.__all__}
CALLS = {name: call for name, call in CALLS.items() if inspect.isfunction(call)}
CALLS |= {"Offload": hooklab.Offload, "Disk": stores.Disk}


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"zero"}))
def test_a_call_says_what_it_raises_and_shows_an_example(name):
    assert "Raises:" in CALLS[name].__doc__
    assert ">>>" in CALLS[name].__doc__


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CONTRIBUTING.zh-CN.md"])
def test_contributing_says_which_file_answers_which_question(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", "\n".join(re.findall(r"^\|.*\|$", text, re.MULTILINE))))
    files = {name_of(path) for path in FILES}
    elsewhere = {name for name in files if name.startswith("_support/") or name in DOORS}
    assert named <= {name_of(path) for path in HOUSE.rglob("*.py")}, "a file that is named exists"
    assert files - elsewhere <= named, "a file of a room is named"
