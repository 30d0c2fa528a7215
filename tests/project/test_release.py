"""What a release needs: `make release-check` on copies that are damaged in one place, and workflows that name what exists."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import release_check
import yaml

ROOT = release_check.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]
FILES = ["pyproject.toml", "hooklab/__init__.py", "CITATION.cff", "labextension/package.json", *release_check.PINNED_IN]
TORCH = next(pin for pin in PROJECT["tool"]["uv"]["constraint-dependencies"] if pin.startswith("torch=="))
CHANGELOG = f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2026-12-01\n\n- News.\n\n## [0.0.1] - 2026-01-01\n"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.fixture
def copy(tmp_path):
    """A copy of what is compared, with a changelog that is ready for a release."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    return tmp_path


def damage(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8", newline="\n")


def test_nothing_is_said_where_version_changelog_pins_and_tag_agree(copy):
    assert list(release_check.problems(copy)) == []
    assert list(release_check.problems(copy, f"v{VERSION}")) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "found", "do"),
    [
        ("hooklab/__init__.py", f'"{VERSION}"', '"9.9.9"', "the version is 9.9.9", f"write {VERSION} there"),
        ("hooklab/__init__.py", "__version__", "version", "the version is None", f"write {VERSION} there"),
        ("CITATION.cff", f"version: {VERSION}", "version: 9.9.9", "the version is 9.9.9", f"write {VERSION} there"),
        ("labextension/package.json", f'"{VERSION}"', '"9.9.9"', "the version is 9.9.9", f"write {VERSION} there"),
        ("CHANGELOG.md", f"[{VERSION}] - 2026-12-01", f"[{VERSION}]", "has no date", "- YYYY-MM-DD'"),
        ("CHANGELOG.md", f"## [{VERSION}]", "## [9.9.9]", f"no section for {VERSION}", "under [Unreleased]"),
        ("environment.yml", TORCH, "torch==1.0", "torch==1.0, in pyproject.toml", f"write {TORCH} there"),
        (".binder/environment.yml", TORCH, "torch>=1.0", "no torch, in pyproject.toml", f"write {TORCH} there"),
        (".binder/environment.yml", f"- {TORCH}", f"- {TORCH}\n      - six==1.0", "six==1.0", "take it out"),
    ],
)
def test_one_line_names_the_file_what_stands_there_and_what_to_do(copy, file, old, new, found, do):
    damage(copy / file, old, new)
    (line,) = release_check.problems(copy)
    assert line.startswith(f"{file}: ")
    assert found in line
    assert line.index(found) < line.index("; ") < line.index(do)


def test_a_tag_that_is_not_the_version_is_named(copy):
    for tag in ("v9.9.9", VERSION):
        (line,) = release_check.problems(copy, tag)
        assert line == f"tag {tag}: the version in pyproject.toml is {VERSION}; tag v{VERSION}, or change the version"


def test_a_version_that_was_raised_in_one_place_is_missed_in_every_other(copy):
    damage(copy / "pyproject.toml", f'version = "{VERSION}"', 'version = "9.9.9"')
    assert [line.partition(":")[0] for line in release_check.problems(copy)] == [
        "hooklab/__init__.py", "CITATION.cff", "labextension/package.json", "CHANGELOG.md"
    ]  # fmt: skip


def test_the_command_ends_with_1_where_something_disagrees(copy, monkeypatch, capsys):
    monkeypatch.setattr(release_check, "ROOT", copy)
    assert release_check.main([f"v{VERSION}"]) == 0
    assert capsys.readouterr().out == "release-check: version, changelog and pins agree\n"
    assert release_check.main(["v9.9.9"]) == 1
    assert capsys.readouterr().out.startswith("release-check: tag v9.9.9: ")


def test_only_the_date_of_a_release_may_be_missing_in_the_repository():
    assert [line for line in release_check.problems(ROOT) if not line.startswith("CHANGELOG.md: ")] == []


# ---- workflows: they run elsewhere, so that here they can only be read ----


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_what_exists(path):
    workflow = load(path)
    assert workflow["name"] == path.stem
    assert workflow[True], "YAML reads `on` as true"
    assert workflow["permissions"]["contents"] == "read", "a job that writes says so itself"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for step in steps(workflow):
        assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step["uses"]), step
        run = step.get("run", "")
        assert set(re.findall(r"^make ([a-z-]+)", run, re.MULTILINE)) <= set(targets)
        if "hashFiles" not in step.get("if", ""):
            assert [file for file in re.findall(r"\bpython ([\w/]+\.py)", run) if not (ROOT / file).is_file()] == []
    for job in workflow["jobs"].values():
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= workflow["jobs"].keys()


def test_a_tag_is_checked_before_anything_is_published_and_published_without_a_password():
    release = load(ROOT / ".github/workflows/release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}
    runs = [step.get("run", "") for step in release["jobs"]["build"]["steps"]]
    order = ["make release-check TAG=", "uv build", "twine check", "dist/*.whl", "docs/site/build.py"]
    first = [next(number for number, run in enumerate(runs) if wanted in run) for wanted in order]
    assert first == sorted(first)
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert "with" not in publish["steps"][-1]
    assert release["jobs"]["attach"]["needs"] == ["build", "publish"]


@pytest.mark.skipif(sys.platform == "win32", reason="the workflow runs on Linux")
def test_the_notes_of_a_release_are_its_section_of_the_changelog(copy):
    (step,) = (step for step in steps(load(ROOT / ".github/workflows/release.yml")) if "awk" in step.get("run", ""))
    line = next(line for line in step["run"].splitlines() if line.startswith("awk"))
    subprocess.run(["sh", "-c", line], cwd=copy, env=os.environ | {"GITHUB_REF_NAME": f"v{VERSION}"}, check=True)
    assert Path(copy, "notes.md").read_text(encoding="utf-8").strip() == "- News."
