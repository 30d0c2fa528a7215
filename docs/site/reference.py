"""The pages of the API, in the order in which a reader needs them: what each call does in a line, then each in full."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

# Page, heading in both languages, and what is on it; a call comes before what it returns.
PAGES = {
    "gradients": ("梯度", "Gradients", "gradients: watch Watch scale clip zero clip_gradients ClipGradients"),
    "tracing": ("次序", "Order", "tracing: trace Trace Event"),
    "features": ("特征", "Features", "layers.features: features Features, layers.activation_gradients: with_grad"),
    "layers": (
        "层",
        "Layers",
        "layers.select: select, layers.verbose: verbose, layers.statistics: layer_statistics LayerStatistics, "
        "layers.patch: patch Patch",
    ),
    "models": (
        "整个模型",
        "A whole model",
        "models.summary: summary, models.summary_table: Summary LayerSummary, models.compare: compare, "
        "models.comparison: Comparison LayerPair, models.finite: finite Finite NotFinite, "
        "models.updates: updates Updates Update",
    ),
    "saved": (
        "已保存张量",
        "Saved tensors",
        "saved.record: saved_tensors SavedTensors SavedTensor, saved.offload: Offload, "
        "stores: Disk PinnedMemory, saved.segments: checkpoint_segments",
    ),
    "census": (
        "装了哪些钩子",
        "Installed hooks",
        "census: hooks_on HookRecord, removal: remove_hooks, census: no_leftovers HookLeak",
    ),
    "draw": ("图", "Pictures", "draw: graph timeline gradient_flow activations feature_maps memory Picture"),
    "course": (
        "课程",
        "The course",
        "course.check: predict exercise hint progress, lesson: start check_environment cached_weights data glyphs, "
        "export: Both Chinese English",
    ),
}


def names(page: str) -> list[str]:
    """The full names of what is on a page: `hooklab.gradients.watch`."""
    modules = (part.partition(": ") for part in PAGES[page][2].split(", "))
    return [f"hooklab.{module}.{name}" for module, _, listed in modules for name in listed.split()]


def item(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def first_line(name: str) -> str:
    return (inspect.getdoc(item(name)) or "").partition("\n")[0]


def write(folder: Path, half: int, chinese: dict[str, str]) -> None:
    """The pages in one language; `chinese` has the first line of each call, for half 0."""
    folder.mkdir()
    index = ["# API", ""]
    for page, (*headings, _) in PAGES.items():
        heads = ("| 调用 | 作用 |", "| call | what it does |")[half]
        index += [f"## {headings[half]}", "", heads, "|---|---|"]
        text = [f"# {headings[half]}", ""]
        for name in names(page):
            line = (first_line(name) if half else chinese[name]).replace("|", r"\|")
            index.append(f"| [`{name.rpartition('.')[2]}`](#{name}) | {line} |")
            kind = "class" if inspect.isclass(item(name)) else "function"
            members = "\n   :members:" if kind == "class" else ""
            text += ["```{eval-rst}", f".. auto{kind}:: {name}{members}", "```", ""]
        index.append("")
        (folder / f"{page}.md").write_text("\n".join(text), encoding="utf-8")
    index += ["```{toctree}", ":hidden:", "", *PAGES, "```", ""]
    (folder / "index.md").write_text("\n".join(index), encoding="utf-8")
