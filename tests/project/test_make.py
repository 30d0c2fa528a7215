"""What `make` asks of uv, with a stand-in for uv: the whole installation, and with CPU=1 the one without CUDA."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import notebook_form
import pytest

ROOT = notebook_form.ROOT
TOOLS = ("awk", "env", "make", "touch", "uname")
PINS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["constraint-dependencies"]

pytestmark = pytest.mark.skipif(os.name == "nt" or not shutil.which("make"), reason="there is no make on Windows")


@pytest.fixture
def folder(tmp_path):
    """A clone with a Makefile, and a `bin` that has a uv which notes its arguments, and no nvidia-smi."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    program(tmp_path, "uv", 'if [ "$1" = --version ]; then echo uv 0.13.9; else echo "$@" >> asked; fi')
    program(tmp_path, "uname", "echo Linux x86_64")
    return tmp_path


def program(folder, name, script):
    path = folder / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make(folder, *arguments, status=0):
    """What uv was asked, and what make said."""
    (folder / "asked").unlink(missing_ok=True)
    others = {name: os.environ[name] for name in ("LANG", "LC_ALL", "HOME") if name in os.environ}
    done = subprocess.run(
        ["make", *arguments], cwd=folder, env=others | {"PATH": str(folder / "bin")}, capture_output=True, text=True,
        encoding="utf-8",
    )  # fmt: skip
    assert bool(done.returncode) == bool(status), done.stdout + done.stderr
    asked = folder / "asked"
    return asked.read_text().splitlines() if asked.exists() else [], done.stdout


def test_make_lab_installs_once_and_opens_the_course(folder):
    assert make(folder, "lab")[0] == ["sync", "run --quiet hooklab lab"]
    assert make(folder, "lab")[0] == ["run --quiet hooklab lab"]


def test_with_cpu_the_wheels_come_from_pytorchs_index_and_no_later_command_replaces_them(folder):
    asked, _ = make(folder, "lab", "CPU=1")
    assert asked == [
        "venv --quiet --allow-existing .venv",
        "pip install --python .venv --torch-backend=cpu -e .[lab] --group dev",
        "run --quiet --no-sync hooklab lab",
    ]
    for arguments in (["test"], ["test", "CPU=1"]):
        (asked,), _ = make(folder, *arguments)
        assert asked.startswith("run --quiet --no-sync pytest")
    sphinx, build = make(folder, "site")[0]
    assert sphinx == "pip install --python .venv --torch-backend=cpu --quiet --group site"
    assert build == "run --quiet --no-sync hooklab site"
    nbgrader, export = make(folder, "assignments")[0]
    assert nbgrader == "pip install --python .venv --torch-backend=cpu --quiet --group homework"
    assert export == "run --quiet --no-sync hooklab assignments"
    groups, _, *portable = make(folder, "test-long")[0]
    assert groups.endswith("--quiet --group site --group homework")
    assert portable, "and then the notebooks in other settings"


def test_a_whole_installation_stays_one_with_cpu(folder):
    make(folder, "lab")
    assert make(folder, "lab", "CPU=1")[0] == ["run --quiet hooklab lab"]


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")
def test_a_machine_without_an_nvidia_driver_is_told_before_the_installation_and_once(folder):
    told = "No NVIDIA driver: make lab CPU=1"
    assert told in make(folder, "lab")[1]
    os.utime(folder / ".venv" / ".hooklab-ready", (0, 0))
    asked, said = make(folder, "lab")
    assert asked[0] == "sync"
    assert told not in said


@pytest.mark.parametrize(("name", "script"), [("nvidia-smi", ""), ("uname", "echo Darwin arm64")])
def test_a_machine_that_has_a_driver_or_whose_wheels_lack_cuda_is_told_nothing(folder, name, script):
    program(folder, name, script)
    asked, said = make(folder, "lab")
    assert asked[0] == "sync"
    assert "NVIDIA" not in said


@pytest.mark.parametrize("arguments", [["lab"], ["lab", "CPU=1"]])
def test_an_installation_that_stops_says_what_to_do_and_begins_again(folder, arguments):
    program(folder, "uv", 'if [ "$1" = --version ]; then echo uv 0.13.9; else echo "$@" >> asked; exit 3; fi')
    first, said = make(folder, *arguments, status=2)
    assert "the installation stopped" in said
    assert make(folder, *arguments, status=2)[0] == first


def test_the_pages_give_pip_the_pinned_versions():
    for page in ("docs/install.md", "docs/install.zh-CN.md"):
        assert " ".join(PINS) in (ROOT / page).read_text(encoding="utf-8")
