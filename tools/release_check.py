"""`make release-check`: do version, changelog and pins agree, so that a release may be tagged?

    python tools/release_check.py [TAG]

Prints a line for each disagreement: where it is, what stands there, and what to do. pyproject.toml is taken as right.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PINNED_IN = ("environment.yml", ".binder/environment.yml")


def main(arguments: list[str]) -> int:
    """Print what disagrees; returns the exit status."""
    found = list(problems(ROOT, *arguments[:1]))
    for problem in found:
        print(f"release-check: {problem}")
    if not found:
        print("release-check: version, changelog and pins agree")
    return 1 if found else 0


def problems(root: Path, tag: str | None = None) -> Iterator[str]:
    """What disagrees in the checkout at `root`, and with `tag`, where one is given."""
    project = tomllib.loads(_read(root, "pyproject.toml"))
    version = project["project"]["version"]
    for file, found in _versions(root):
        if found != version:
            yield f"{file}: the version is {found}, in pyproject.toml {version}; write {version} there"
    if tag is not None and tag != f"v{version}":
        yield f"tag {tag}: the version in pyproject.toml is {version}; tag v{version}, or change the version"
    yield from _changelog(_read(root, "CHANGELOG.md"), version)
    for file in PINNED_IN:
        yield from _pins(file, _read(root, file), project["tool"]["uv"]["constraint-dependencies"])


def _read(root: Path, file: str) -> str:
    return (root / file).read_text(encoding="utf-8")


def _versions(root: Path) -> Iterator[tuple[str, str | None]]:
    # Read and not imported: hooklab would load PyTorch.
    stated = re.search(r'^__version__ = "(.+)"', _read(root, "hooklab/__init__.py"), re.MULTILINE)
    yield "hooklab/__init__.py", stated and stated[1]
    yield "CITATION.cff", yaml.safe_load(_read(root, "CITATION.cff"))["version"]
    yield "labextension/package.json", json.loads(_read(root, "labextension/package.json"))["version"]


def _changelog(text: str, version: str) -> Iterator[str]:
    sections = re.findall(r"^## (\[.+)$", text, re.MULTILINE)
    found = next((section for section in sections if section.startswith(f"[{version}]")), None)
    wanted = f"'## [{version}] - YYYY-MM-DD'"
    if found is None:
        yield f"CHANGELOG.md: no section for {version}; give what stands under [Unreleased] the heading {wanted}"
    elif not re.fullmatch(r"\[.+\] - \d{4}-\d\d-\d\d", found):
        yield f"CHANGELOG.md: the section '## {found}' has no date; write {wanted}"


def _pins(file: str, text: str, wanted: list[str]) -> Iterator[str]:
    (pip,) = (entry["pip"] for entry in yaml.safe_load(text)["dependencies"] if isinstance(entry, dict))
    found = {line.partition("==")[0]: line for line in pip if "==" in line}
    for pin in wanted:
        name = pin.partition("==")[0]
        if (line := found.pop(name, f"no {name}")) != pin:
            yield f"{file}: {line}, in pyproject.toml {pin}; write {pin} there"
    for line in found.values():
        yield f"{file}: {line}, which pyproject.toml does not pin; take it out, or pin it there"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
