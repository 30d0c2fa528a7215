"""The pages of the API, from api.yml: what each call does in a line, then each in full."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

PAGES = yaml.safe_load((Path(__file__).parent / "api.yml").read_text("utf-8"))
CHINESE = {name: line for page in PAGES.values() for name, line in page["calls"].items()}  # what a call does


def item(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def first_line(name: str) -> str:
    return (inspect.getdoc(item(name)) or "").partition("\n")[0]


def write(folder: Path, half: int) -> None:
    """The pages in one language, Chinese for half 0."""
    folder.mkdir()
    index = ["# API", ""]
    for page, listed in PAGES.items():
        heads = ("| 调用 | 作用 |", "| call | what it does |")[half]
        index += [f"## {listed['heading'][half]}", "", heads, "|---|---|"]
        text = [f"# {listed['heading'][half]}", ""]
        for name in listed["calls"]:
            line = (first_line(name) if half else CHINESE[name]).replace("|", r"\|")
            index.append(f"| [`{name.rpartition('.')[2]}`](#{name}) | {line} |")
            kind = "class" if inspect.isclass(item(name)) else "function"
            members = "\n   :members:" if kind == "class" else ""
            text += ["```{eval-rst}", f".. auto{kind}:: {name}{members}", "```", ""]
        index.append("")
        (folder / f"{page}.md").write_text("\n".join(text), encoding="utf-8")
    index += ["```{toctree}", ":hidden:", "", *PAGES, "```", ""]
    (folder / "index.md").write_text("\n".join(index), encoding="utf-8")
