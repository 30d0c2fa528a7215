"""Turn DOT source into SVG with whatever graphviz this machine has."""

import importlib.util
import shutil
import subprocess
import sys

__all__ = ["NotDrawn", "available", "svg_from_dot"]

TIMEOUT_S = 60
MANY_EDGES = 1_000
# With more edges than that, dot may spend minutes on shortening them (DenseNet-121: 19 s with these limits, over 90 without).
HURRIED = "graph [nslimit=2 nslimit1=2 mclimit=0.1]"

# In a process of its own: pygraphviz crashes on some labels, and a crash there must not take the kernel along.
PYGRAPHVIZ = [
    sys.executable,
    "-c",
    "import sys, pygraphviz; graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode('utf-8')); "
    "sys.stdout.buffer.write(graph.draw(format='svg', prog='dot'))",
]


class NotDrawn(Exception):
    """There is no picture; the message says why and what to do."""


def available() -> list[list[str]]:
    """The commands that turn DOT into SVG on this machine, best first."""
    commands = [[dot, "-Tsvg"]] if (dot := shutil.which("dot")) else []
    return commands + ([PYGRAPHVIZ] if importlib.util.find_spec("pygraphviz") else [])


def svg_from_dot(source: str) -> str:
    """SVG for a DOT `source`, through `dot` if installed, else the libraries in the pygraphviz wheel.

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
            return _run(command, source)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            failures.append(f"{name}: {error}")
            # A system may lack a library that the wheel needs.
            if command is PYGRAPHVIZ and isinstance(error, ValueError):
                failures.append("install Graphviz itself (Debian and Ubuntu: apt install graphviz)")
    raise NotDrawn("; ".join(failures))


def _run(command: list[str], source: str) -> str:
    done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=TIMEOUT_S)
    svg = done.stdout.decode("utf-8", "replace").replace("\r\n", "\n")
    if done.returncode or "<svg" not in svg:
        last_line = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"ended with exit status {done.returncode} ({last_line})")
    return svg[svg.index("<svg") :].strip()
