"""The files around the code: citation, forms, bots, and the documents of the project."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
FORMS = sorted(path for path in TEMPLATES.glob("*.yml") if path.name != "config.yml")
DOCUMENTS = sorted(
    path for path in (ROOT / "docs").rglob("*.md") if "site" not in path.relative_to(ROOT).parts
)  # its own tests
DECISIONS = ROOT / "docs" / "decisions"
LINK = re.compile(r"\]\(([^)\s]+)\)")
CHINESE, ENGLISH = re.compile("[一-鿿]"), re.compile("[A-Za-z]{2,}")


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_has_the_version_and_licence_of_the_package():
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == PROJECT["name"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    assert citation["version"] == PROJECT["version"]


def test_the_changelog_has_the_version_of_the_package_and_what_comes_next():
    versions = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert PROJECT["version"] in versions


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_speaks_both_languages(form):
    content = load(form)
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    said = [content["name"], content["description"], *(field["attributes"]["label"] for field in fields)]
    said += [field["attributes"]["value"] for field in content["body"] if field["type"] == "markdown"]
    assert fields
    for text in said:
        assert CHINESE.search(text), text
        assert ENGLISH.search(text), text
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))


def test_an_unclear_sentence_is_asked_for_with_notebook_and_cell():
    fields = {field.get("id"): field for field in load(TEMPLATES / "unclear-sentence.yml")["body"]}
    for wanted in ("notebook", "cell", "sentence"):
        assert fields[wanted]["validations"]["required"], wanted


def test_dependabot_looks_at_actions_once_a_week_and_at_nothing_else():
    (update,) = load(ROOT / ".github" / "dependabot.yml")["updates"]
    assert (update["package-ecosystem"], update["schedule"]) == ("github-actions", {"interval": "weekly"})


def test_hooks_before_a_commit_run_the_ruff_of_the_project_and_strip_no_output():
    hooks = {hook["id"]: hook for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    assert "nbstripout" not in hooks
    assert {"ruff", "ruff-format", "check-merge-conflict", "check-added-large-files"} <= hooks.keys()
    assert all(hooks[name]["entry"].startswith("uv run ") for name in ("ruff", "ruff-format"))
    for name in ("end-of-file-fixer", "trailing-whitespace"):
        assert re.search(hooks[name]["exclude"], "notebooks/11_reading_gradients.ipynb"), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_relative_link_of_a_document_is_dead(document):
    targets = [target.partition("#")[0] for target in LINK.findall(document.read_text(encoding="utf-8"))]
    relative = [target for target in targets if target and not re.match("https?://", target)]
    assert [target for target in relative if not (document.parent / target).exists()] == []


def test_the_index_lists_every_decision_under_its_number_and_title():
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| \[(.+)\]\((.+\.md)\) \|$", index, re.MULTILINE)
    files = sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    assert files
    assert [file for _, _, file in listed] == files
    for place, (number, title, file) in enumerate(listed, start=1):
        first_line = (DECISIONS / file).read_text(encoding="utf-8").splitlines()[0]
        assert int(number) == int(file[:4]) == place
        assert first_line == f"# {number}. {title}"


@pytest.mark.parametrize("decision", sorted(DECISIONS.glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_a_decision_says_what_and_why_and_what_a_user_does(decision):
    headings = re.findall(r"^## (.+)$", decision.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["What", "Why"]
    assert headings[2] in {"What a user does", "What a user does instead"}
