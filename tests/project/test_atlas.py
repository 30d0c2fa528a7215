"""notebooks/atlas.yml and docs/atlas.md: the names that the installed PyTorch has, and what each hook really does."""

import pkgutil
import re
import subprocess
import sys

import atlas
import notebook_form
import parity
import pytest
import torch
from atlas_probes import PROBES
from prose_rules import HAN, SPAN

from hooklab.lesson import OLDEST_TORCH, STORED_TORCH

ROWS = {f"{row['name']}:{row['part']}" if "part" in row else row["name"]: row for row in atlas.rows()}
FOUND = torch.__version__.partition("+")[0]
TEXTS = ("called", "fires", "may_return", "trap", "what", "not_run")


def version(text):
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def is_there(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.skipif(
    FOUND != STORED_TORCH, reason="the names are those of the PyTorch that the stored outputs come from"
)
def test_the_atlas_has_every_public_name_with_hook_that_pytorch_has():
    """In a process of its own: every public module is imported for it."""
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", notebook_form.ROOT / "tools/torch_hooks.py"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    installed = set(printed.split())
    listed = {row["name"] for row in ROWS.values() if "hook" in row["name"].lower()}
    assert len(installed) > 100
    differences = {"added or renamed": sorted(installed - listed), "removed or renamed": sorted(listed - installed)}
    assert differences == {"added or renamed": [], "removed or renamed": []}


def test_a_name_is_there_from_the_version_that_the_atlas_gives():
    since = {row["name"]: version(row.get("since", "0.0")) for row in ROWS.values()}
    assert [name for name, first in since.items() if (0, 0) < first <= OLDEST_TORCH] == [], "they need no `since`"
    missing = {name for name in since if not is_there(name)}
    if FOUND == STORED_TORCH:
        assert missing == set()
    assert {name for name, first in since.items() if first > version(FOUND)} <= missing


def test_other_names_of_a_hook_stand_for_the_same():
    pairs = [(row["name"], other) for row in ROWS.values() for other in row.get("also", []) if is_there(row["name"])]
    assert len(pairs) > 30
    assert [pair for pair in pairs if pkgutil.resolve_name(pair[0]) != pkgutil.resolve_name(pair[1])] == []


def test_a_hook_is_run_or_the_atlas_says_why_not():
    hooks = {name: row for name, row in ROWS.items() if "fires" in row}
    assert [name for name, row in hooks.items() if (name in PROBES) == ("not_run" in row)] == []
    for row in hooks.values():
        assert row["gets"]
        assert row["returned"] in atlas.RETURNED
        assert row["handle"] in atlas.HANDLES
    others = {name: row for name, row in ROWS.items() if "what" in row}
    assert hooks.keys() | others.keys() == ROWS.keys()
    assert [
        name for name, row in others.items() if row.keys() & {"gets", "returned", "handle", "not_run", "fires"}
    ] == []


def test_no_probe_is_left_over():
    assert PROBES.keys() - ROWS.keys() == set()
    assert sum("fires" in ROWS[name] for name in PROBES) > 50


@pytest.mark.parametrize("name", PROBES)
def test_a_hook_fires_and_its_value_and_its_handle_are_what_the_atlas_says(name):
    row = ROWS[name]
    if FOUND != STORED_TORCH and not is_there(row["name"]):
        pytest.skip("another PyTorch")
    found = PROBES[name]()
    if "fires" in row:
        assert found.fired > 0
        assert (found.returned, found.handle) == (row["returned"], row["handle"])
    else:
        assert found is None


CUDA = [name for name in ROWS if name.startswith("torch.cuda.graphs.register_graph_")]


@pytest.mark.parametrize("name", CUDA)
def test_a_hook_on_all_cuda_graphs_can_be_registered_without_a_gpu(name):
    if not is_there(name):
        pytest.skip("another PyTorch")
    handle = pkgutil.resolve_name(name)(print)
    handle.remove()
    assert type(handle).__name__ == ROWS[name]["handle"]


def test_rows_and_groups_say_the_same_in_both_languages():
    texts = [row[field] for row in ROWS.values() for field in TEXTS if field in row]
    texts += [group[field] for group in atlas.groups() for field in ("group", "hangs_on", "note") if field in group]
    for zh, en in {(text["zh"], text["en"]) for text in texts}:
        assert HAN.search(zh) or zh == en, "a name is the same in both"
        assert not HAN.search(en)
        assert sorted(SPAN.findall(zh)) == sorted(SPAN.findall(en))
        assert not re.search(r"[\u4e00-\u9fff][,;:!?(]", SPAN.sub("码", zh)), (
            f"{zh}: full-width punctuation after Chinese"
        )
        assert "|" not in zh + en, "it would end the cell of the table"


def test_rows_lead_to_sections_that_are_there():
    led = {tuple(row["at"]) for row in ROWS.values() if "at" in row}
    for stem in {stem for stem, _ in led}:
        cells = notebook_form.cells(notebook_form.read(notebook_form.NOTEBOOKS / f"{stem}.ipynb"))
        headings = {cell.id for cell in cells if cell.source.startswith("## ")}
        assert {cell_id for other, cell_id in led if other == stem} <= headings, stem


@pytest.mark.parametrize("language", atlas.PATHS)
def test_the_atlas_is_up_to_date_and_has_every_row(language):
    page = atlas.PATHS[language].read_text(encoding="utf-8")
    assert page == parity.page(language), "run `make refresh`"
    entries = re.findall(r"^(?:\| |- )\[?`", atlas.page(language), re.MULTILINE)
    assert len(entries) == len(ROWS)
