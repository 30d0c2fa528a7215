"""What the course consists of, for the progress panel and `check.progress()`: `make refresh` writes it beside the checks."""

import json
import re
from typing import Any

import notebook_form

PATH = notebook_form.ROOT / "hooklab" / "course" / "outline.json"
TITLE = re.compile(r"# (\d\d) (.+?) · (.+)")
CHECK = re.compile(r'check\.(predict|exercise)\("(\d\d\.\w+)"')
PARTS = {
    "0": ("开始", "Start"),
    "1": ("张量钩子", "Tensor hooks"),
    "2": ("模块钩子", "Module hooks"),
    "3": ("已保存张量的钩子", "Saved-tensor hooks"),
    "4": ("钩子派上用场", "Hooks at work"),
    "5": ("钩子的边界", "Where hooks end"),
}
FAST = ("00", "11", "21", "24", "31")  # for who has an afternoon


def outline() -> str:
    """The parts, and their notebooks with titles, minutes, predictions and exercises, as JSON."""
    parts: dict[str, dict[str, Any]] = {}
    for path in notebook_form.paths():
        part = path.name[0]
        zh, en = PARTS[part]
        parts.setdefault(part, {"zh": zh, "en": en, "notebooks": []})["notebooks"].append(_notebook(path))
    return json.dumps({"parts": list(parts.values())}, ensure_ascii=False, indent=1) + "\n"


def _notebook(path: Any) -> dict[str, Any]:
    cells = notebook_form.cells(notebook_form.read(path))
    number, zh, en = TITLE.match(cells[0].source).groups()
    checks = [found for cell in cells if cell.is_code for found in CHECK.findall(cell.source)]
    return {
        "file": path.name,
        "number": number,
        "zh": zh,
        "en": en,
        "fast": number in FAST,
        "minutes": sum(cell.node.metadata.get("minutes", 0) for cell in cells),
        "predictions": [name for kind, name in checks if kind == "predict"],
        "exercises": [name for kind, name in checks if kind == "exercise"],
    }
