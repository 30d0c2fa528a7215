"""Slides of two notebooks, made once in both languages; and what makes them, as modules."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import browser_lab
import pytest

ROOT = Path(__file__).parents[2]
SLIDES = ROOT / "docs" / "slides"
sys.path.insert(0, str(SLIDES))


@pytest.fixture(scope="session")
def builder():
    """docs/slides/build.py; the script of the site has the same name."""
    spec = importlib.util.spec_from_file_location("build_slides", SLIDES / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The decks of 11 and 35, or of all notebooks where HOOKLAB_ALL_SLIDES=1, as the weekly run asks."""
    target = tmp_path_factory.mktemp("made") / "slides"
    every = os.environ.get("HOOKLAB_ALL_SLIDES") == "1"
    named = [path for path in sorted(ROOT.glob("notebooks/*.ipynb")) if every or path.name[:2] in ("11", "35")]
    command = [sys.executable, str(SLIDES / "build.py"), "both", *map(str, named)]
    built = subprocess.run(command, env=os.environ | {"SLIDES_BUILD": str(target)}, capture_output=True, text=True)
    if "npm error" in built.stderr or "npm was not found" in built.stderr:
        browser_lab.give_up(built.stderr[-1000:])
    assert built.returncode == 0, built.stderr[-3000:]
    return target


@pytest.fixture(scope="session")
def chromium():
    with browser_lab.browser() as chromium:
        yield chromium
        chromium.close()
