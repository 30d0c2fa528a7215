"""What the site is made of, without building it."""

import re
import subprocess
from pathlib import Path

import build
import prepare
import pytest
import reference
import yaml

import hooklab

ROOT = Path(__file__).parents[2]


def test_the_reference_has_every_public_call_in_both_languages():
    chinese = yaml.safe_load((ROOT / "docs/site/api.zh.yml").read_text("utf-8"))
    listed = [name for page in reference.PAGES for name in reference.names(page)]
    assert set(chinese) == set(listed)
    assert all(re.search("[\u4e00-\u9fff]", line) for line in chinese.values())
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


def test_its_code_stays_small():
    folder = ROOT / "docs/site"
    python = sum(_lines(path, "#") for path in folder.glob("*.py"))
    style = sum(_lines(path, "//") for path in [*folder.glob("_static/*.css"), *folder.glob("_static/*.js")])
    assert python <= 500
    assert style <= 400


def _lines(path, comment):
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    return sum(bool(line) and not line.startswith(comment) for line in lines)
