"""`make refresh`: run every notebook, store its outputs in normal form, and rebuild the pages and the outline.

The pages are notebooks/SOURCES.md, QUESTIONS.md, docs/cheatsheet.md, docs/atlas.md, docs/glossary.md and docs/teaching/, with
their Chinese editions.

Run it twice and no byte changes. A notebook that does not run to its end is left as it was.
`python tools/refresh.py 11` refreshes the notebooks whose names begin with 11 alone.
"""

import copy
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import atlas
import nbformat
import notebook_form
import outline
import parity
import questions
import reference_pages
import sources_table
import teaching
import teaching_plans
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

CELL_TIMEOUT_S = 120


def main(prefixes: list[str]) -> int:
    if {"-h", "--help"} & set(prefixes):
        print(__doc__.strip())
        return 0
    chosen = [path for path in notebook_form.paths() if not prefixes or path.name.startswith(tuple(prefixes))]
    if not chosen:
        print(f"no notebook begins with {' or '.join(prefixes)}; see notebooks/")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        # The learner's own kernels and IPython start-up files must not decide what is stored.
        os.environ |= {"JUPYTER_DATA_DIR": f"{folder}/data", "IPYTHONDIR": f"{folder}/ipython"}
        with ThreadPoolExecutor(max_workers=2) as pool:
            failures = [line for line in pool.map(refresh, chosen) if line]
    with suppress(nbformat.reader.NotJSONError):  # it is among the failures
        for page, text in pages().items():
            _replace(page, text)
    print(*failures, sep="\n", end="\n" if failures else "")
    return 1 if failures else 0


def pages() -> dict[Path, str]:
    """What is made from the notebooks and the tables beside them."""
    return {
        sources_table.PATH: sources_table.table(),
        outline.PATH: outline.outline(),
        **{page: questions.page(language) for language, page in questions.PATHS.items()},
        **{page: reference_pages.cheatsheet(language) for language, page in reference_pages.CHEATSHEETS.items()},
        **{page: parity.page(language) for language, page in atlas.PATHS.items()},
        reference_pages.GLOSSARY: reference_pages.glossary(),
        **teaching.pages(),
        **teaching_plans.pages(),
    }


def refresh(path: Path) -> str | None:
    """Refresh one notebook; returns why it could not be."""
    try:
        notebook = notebook_form.read(path)
    except nbformat.reader.NotJSONError:
        return f"{path.name}: not refreshed; it is not a notebook as it stands: has a merge left its marks in it?"
    measured = {cell.id: copy.deepcopy(cell.node.outputs) for cell in _measurements(notebook)}
    begun: list[str] = []
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--IPKernelApp.log_level=40"],
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=lambda cell, cell_index: begun.append(cell.id),
    )
    try:
        client.execute()
    except DeadKernelError:
        return f"{path.name}: not refreshed; the kernel died in cell {begun[-1]!r}"
    except CellTimeoutError:
        return f"{path.name}: not refreshed; cell {begun[-1]!r} took longer than {CELL_TIMEOUT_S} s"
    except CellExecutionError as error:
        failed = [cell for cell in notebook_form.cells(notebook) if any(_untagged_errors(cell))]
        where = f"cell {failed[0].id!r}" if failed else "a cell"
        last = re.sub(r"\x1b\[[0-9;]*m", "", str(error).strip().splitlines()[-1])
        return f"{path.name}: not refreshed; {where} failed without the tag raises-exception: {last}"
    notebook = notebook_form.normalise(notebook)
    for cell in _measurements(notebook):  # another time alone is no change
        if _without_numbers(cell.node.outputs) == _without_numbers(measured[cell.id]):
            cell.node.outputs = measured[cell.id]
    changed = _replace(path, notebook_form.written(notebook))
    print(f"{path.name}: {'changed' if changed else 'as it was'}")
    return None


def _measurements(notebook: nbformat.NotebookNode) -> list[notebook_form.Cell]:
    cells = [cell for cell in notebook_form.cells(notebook) if "nbval-ignore-output" in cell.tags]
    return [cell for cell in cells if "getsource" not in cell.source]


def _without_numbers(outputs: list) -> str:
    texts = [text for output in outputs for text in notebook_form.texts(output)]
    return re.sub(r"\s*\d[\d.,]*", "#", " ".join(texts))


def _untagged_errors(cell: notebook_form.Cell) -> Iterator[bool]:
    for output in cell.outputs:
        yield output.output_type == "error" and "raises-exception" not in cell.tags


def _replace(path: Path, text: str) -> bool:
    """Write `text` unless it is there already; a reader sees the old file or the new one, never half."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(beside, path)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
