"""Turn DOT source into a picture with whatever graphviz this machine has."""

import importlib.util
import shutil
import subprocess
import sys

__all__ = ["NotDrawn", "available", "drawn_from_dot", "svg_from_dot"]

TIMEOUT_S = 60
BEGINNINGS = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}
MANY_EDGES = 1_000
# With more edges than that, dot may spend minutes on shortening them (DenseNet-121: 19 s with these limits, over 90 without).
HURRIED = "graph [nslimit=2 nslimit1=2 mclimit=0.1]"

# In a process of its own: pygraphviz crashes on some labels, and a crash there must not take the kernel along.
PYGRAPHVIZ = [
    sys.executable,
    "-c",
    "import sys, pygraphviz; graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode('utf-8')); "
    "sys.stdout.buffer.write(graph.draw(format=sys.argv[1].removeprefix('-T'), prog='dot'))",
]


class NotDrawn(Exception):
    """There is no picture; the message says why and what to do."""


def available() -> list[list[str]]:
    """The commands that lay out DOT on this machine, best first; each wants `-Tsvg`, `-Tpng` or `-Tpdf` behind it."""
    commands = [[dot]] if (dot := shutil.which("dot")) else []
    return commands + ([PYGRAPHVIZ] if importlib.util.find_spec("pygraphviz") else [])


def svg_from_dot(source: str) -> str:
    """SVG for a DOT `source`, without what stands before its first tag."""
    return drawn_from_dot(source, "svg").decode("utf-8", "replace")


def drawn_from_dot(source: str, form: str) -> bytes:
    """A picture of a DOT `source`, through `dot` if installed, else the libraries in the pygraphviz wheel.

    Args:
        source: a graph in the language of Graphviz.
        form: `"svg"`, `"png"` or `"pdf"`.

    Raises:
        NotDrawn: neither is here, or none of them could lay the graph out within a minute.
    """
    commands = available()
    if not commands:
        raise NotDrawn(
            "neither Graphviz's `dot` nor pygraphviz is installed; run `uv sync` or `pip install pygraphviz`"
        )
    if source.count("->") > MANY_EDGES:
        source = source.replace("{", "{\n" + HURRIED, 1)
    failures = []
    for command in commands:
        name = "pygraphviz" if command is PYGRAPHVIZ else command[0]
        try:
            return _run(command, source, form)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            failures.append(f"{name}: {error}")
            # A system may lack a library that the wheel needs.
            if command is PYGRAPHVIZ and isinstance(error, ValueError):
                failures.append("install Graphviz itself (Debian and Ubuntu: apt install graphviz)")
    raise NotDrawn("; ".join(failures))


def _run(command: list[str], source: str, form: str) -> bytes:
    done = subprocess.run([*command, f"-T{form}"], input=source.encode(), capture_output=True, timeout=TIMEOUT_S)
    start = done.stdout.find(BEGINNINGS[form])
    if done.returncode or start < 0:
        last_line = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"ended with exit status {done.returncode} ({last_line})")
    picture = done.stdout[start:]
    return picture.replace(b"\r\n", b"\n").strip() if form == "svg" else picture
