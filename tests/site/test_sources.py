"""What the site is made of, without building it."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import build
import notebook_rules
import prepare
import pytest
import reference
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import v4

import hooklab

ROOT = Path(__file__).parents[2]


def test_the_reference_has_every_public_call_in_both_languages():
    listed = [name for page in reference.PAGES.values() for name in page["calls"]]
    assert len(listed) == len(set(listed))
    assert all(re.search("[\u4e00-\u9fff]", line) for line in reference.CHINESE.values())
    calls = {name.rpartition(".")[2] for name in listed}
    assert set(hooklab.__all__) - {"check", "draw"} <= calls
    assert set(hooklab.draw.__all__) <= calls
    assert [name for name in listed if len(reference.first_line(name)) < 10] == []


def test_without_an_address_of_the_repository_none_is_invented():
    unknown, known = prepare.Edition("en", ""), prepare.Edition("en", "example/hooklab")
    code, cell = "[code](hooklab/gradients.py)", "[12](notebooks/12_changing_gradients.ipynb#cell-id=who)"
    links = f"[limits](docs/limits.md#watch), {code}, {cell}"
    assert unknown.links(links, "README.md") == "[limits](limits.md#watch), code, [12](12_changing_gradients.ipynb#who)"
    assert "[code](https://github.com/example/hooklab/blob/main/hooklab/gradients.py)" in known.links(
        links, "README.md"
    )
    assert "http" not in unknown.run_links("00_start_here.ipynb")
    assert "colab.research.google.com/github/example/hooklab" in known.run_links("00_start_here.ipynb")


@pytest.mark.parametrize(
    ("remote", "repository"),
    [
        ("git@github.com:someone/hooklab.git", "someone/hooklab"),
        ("https://github.com/someone/hooklab", "someone/hooklab"),
        ("https://example.org/hooklab.git", ""),
    ],
)
def test_the_address_is_that_of_the_remote(monkeypatch, remote, repository):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    monkeypatch.delenv("SITE_URL", raising=False)
    answer = subprocess.CompletedProcess([], 0, stdout=f"{remote}\n")
    monkeypatch.setattr(build.subprocess, "run", lambda *args, **kwargs: answer)
    site = "https://someone.github.io/hooklab/" if repository else ""
    assert build.addresses() == {"repository": repository, "site": site}


@pytest.fixture
def known():
    return {"repository": "example/hooklab", "site": "https://example.org/"}


@pytest.fixture
def unknown():
    return {"repository": "", "site": ""}


def test_a_download_brings_the_address_that_hooklab_is_installed_from(known, unknown, monkeypatch):
    cell = v4.new_code_cell(notebook_rules.SETUP, metadata={"tags": ["setup"]})
    assert build.by_itself(cell, unknown) == notebook_rules.SETUP
    monkeypatch.setitem(sys.modules, "hooklab", None)
    asked = []

    class Shell:
        def run_line_magic(self, name, line):
            asked.append(f"%{name} {line}")
            sys.modules["hooklab"] = SimpleNamespace(lesson=SimpleNamespace(start=lambda: asked.append("started")))

    code = TransformerManager().transform_cell(build.by_itself(cell, known))
    for _ in range(2):  # the second time it is there
        exec(code, {"get_ipython": Shell})
    assert asked == ["%pip install -q torchviz git+https://github.com/example/hooklab", "started", "started"]


def test_a_download_shows_the_pictures_of_the_site(known, unknown):
    cell = v4.new_markdown_cell("![Map](images/hook_map.svg)")
    assert build.by_itself(cell, known) == "![Map](https://example.org/notebooks/images/hook_map.svg)"
    assert build.by_itself(cell, unknown) == cell.source


def test_its_code_stays_small():
    folder = ROOT / "docs/site"
    python = sum(_lines(path, "#") for path in folder.glob("*.py"))
    style = sum(_lines(path, "//") for path in [*folder.glob("_static/*.css"), *folder.glob("_static/*.js")])
    assert python <= 500
    assert style <= 400


def _lines(path, comment):
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    return sum(bool(line) and not line.startswith(comment) for line in lines)
