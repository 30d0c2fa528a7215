"""The archive for a room without a network: what it holds, how it is installed, and whom it refuses."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import bundle
import notebook_form
import pytest
from bundled import install

ROOT = notebook_form.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PLATFORM, PYTHON = install.here()
NO_NETWORK = dict.fromkeys(["http_proxy", "https_proxy", "all_proxy"], "http://127.0.0.1:9")
PINS = dict(line.split("==") for line in PROJECT["tool"]["uv"]["constraint-dependencies"])


def make_wheel(folder, name, version, files):
    """A wheel of these files ({path: text}), as small as pip accepts it."""
    about = f"{name}-{version}.dist-info"
    files = files | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: not-in-the-bundle\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{about}/RECORD": record}).items():
            wheel.writestr(path, text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """hooklab's own code, stand-ins for PyTorch's two, and the pip that came with this Python."""
    folder = tmp_path_factory.mktemp("wheels")
    version = PROJECT["project"]["version"]
    entry = f"[console_scripts]\nhooklab = {PROJECT['project']['scripts']['hooklab']}\n"
    code = {
        path.relative_to(base).as_posix(): path.read_text(encoding="utf-8")
        for base, package in ((ROOT, "hooklab"), (ROOT / "labextension", "hooklab_desk"))
        for path in (base / package).rglob("*.py")
    }
    make_wheel(folder, "hooklab", version, code | {f"hooklab-{version}.dist-info/entry_points.txt": entry})
    for name in ("torch", "torchvision"):
        make_wheel(folder, name, f"{PINS[name]}+cpu", {f"{name}.py": f"__version__ = '{PINS[name]}+cpu'"})
    pytest.importorskip("ensurepip")
    pip = next((Path(sys.modules["ensurepip"].__file__).parent / "_bundled").glob("pip-*.whl"), None)
    if pip is None:
        pytest.skip("this Python came without pip's wheel")
    shutil.copy(pip, folder)
    return folder


def unpacked(wheels, platform, python, folder):
    archive = bundle.pack(wheels, platform, python, folder)
    shutil.unpack_archive(archive, folder / "room")
    (inside,) = (folder / "room").iterdir()
    assert archive.name.startswith(inside.name)
    return inside


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | NO_NETWORK
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, encoding="utf-8"
    )


@pytest.mark.long
def test_a_bundle_is_installed_by_one_command_without_a_network(wheels, tmp_path):
    room = unpacked(wheels, PLATFORM, PYTHON, tmp_path)
    done = run(sys.executable, "install.py", cwd=room)
    assert done.returncode == 0, done.stderr
    programs = room / "hooklab-env" / ("Scripts" if os.name == "nt" else "bin")
    assert f"{Path('hooklab-env', programs.name, 'hooklab')} lab" in done.stdout
    assert "lab" in run(programs / "hooklab", "--help", cwd=room).stdout
    code = "import torch, torchvision; print(torch.__version__, torch.__file__)"
    version, file = run(programs / "python", "-c", code, cwd=room).stdout.split()
    assert version == f"{PINS['torch']}+cpu"
    assert Path(file).is_relative_to(room / "hooklab-env")
    # From elsewhere, too, the command finds the notebooks of its own folder.
    copied = run(programs / "hooklab", "lab", "--copy-only", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    own = {path.name for path in (room / "my-notebooks").iterdir()}
    assert {path.name for path in notebook_form.paths()} | {"images", "QUESTIONS.md", "glossary.md"} <= own


@pytest.mark.parametrize("platform", bundle.PLATFORMS)
def test_a_bundle_holds_the_course_and_says_for_whom_it_is(wheels, tmp_path, platform):
    room = unpacked(wheels, platform, "3.12", tmp_path)
    assert room.name == f"hooklab-{PROJECT['project']['version']}-{platform}-py3.12"
    assert [*tmp_path.glob("*.zip")] == [tmp_path / f"{room.name}.zip"] * platform.startswith("windows")
    assert json.loads((room / "bundle.json").read_text(encoding="utf-8")) == {"platform": platform, "python": "3.12"}
    assert "python3.12 install.py" in (room / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in (room / "wheels").iterdir()} == {path.name for path in wheels.iterdir()}
    for page in ("QUESTIONS.md", "QUESTIONS.zh-CN.md", "docs/glossary.md", "notebooks/SOURCES.md"):
        assert (room / page).read_bytes() == (ROOT / page).read_bytes()
    for notebook in notebook_form.paths():
        assert (room / "notebooks" / notebook.name).read_bytes() == notebook.read_bytes()
    assert (room / "site").is_dir() == (ROOT / "docs/site/_build/html").is_dir()
    assert (room / "slides").is_dir() == (ROOT / "slides").is_dir()


@pytest.mark.parametrize("needed", [("amiga-m68k", PYTHON), (PLATFORM, "2.7")])
def test_another_platform_or_another_python_is_refused_in_words(tmp_path, needed):
    """With what was found, what is needed and what to do; nothing has been made by then."""
    shutil.copy(install.__file__, tmp_path)
    (tmp_path / "bundle.json").write_text(json.dumps(dict(zip(("platform", "python"), needed, strict=True))))
    refused = run(sys.executable, "install.py", cwd=tmp_path)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert refused.stderr.count(f"Python {needed[1]}, {needed[0]}") == 2  # in Chinese and in English
    assert refused.stderr.count(f"Python {PYTHON}, {PLATFORM}") == 2
    assert refused.stderr.count(f"tools/bundle.py {PLATFORM} {PYTHON}") == 2
    assert not (tmp_path / "hooklab-env").exists()


@pytest.mark.long
def test_what_stops_an_installation_is_shown_with_what_to_do(wheels, tmp_path):
    """Here it is a wheel that was damaged on its way."""
    room = unpacked(wheels, PLATFORM, PYTHON, tmp_path)
    (damaged,) = (room / "wheels").glob("torch-*.whl")
    damaged.write_bytes(b"half of it")
    stopped = run(sys.executable, "install.py", cwd=room)
    assert stopped.returncode == 1
    assert "Traceback" not in stopped.stderr
    assert damaged.name in stopped.stderr
    assert "Run it again" in stopped.stderr


def test_uv_is_asked_for_wheels_of_that_platform_with_pytorch_for_the_cpu(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(bundle, "_uv", lambda *arguments, standard_input="": asked.append(" ".join(arguments)))
    assert bundle.collect("windows-x86_64", "3.13", tmp_path) == tmp_path / "wheels"
    resolve, download, build = asked
    assert "--python-platform x86_64-pc-windows-msvc --python-version 3.13 --torch-backend cpu" in resolve
    assert "--only-binary :all: --python-version 3.13 --platform win_amd64" in download
    assert download.count("download.pytorch.org/whl/cpu") == 1
    assert build.startswith("build --quiet --wheel")


def test_where_uv_fails_there_is_no_bundle(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bundle, "ROOT", tmp_path)
    monkeypatch.setattr(bundle, "UV", str(tmp_path / "no-such-uv"))
    assert bundle.main(["linux-x86_64", "3.12"]) == 1
    assert "no-such-uv" in capsys.readouterr().err
    assert [*(tmp_path / "dist").iterdir()] == []
    with pytest.raises(SystemExit):
        bundle.main(["amiga-m68k"])
    assert "linux-x86_64, macos-arm64, windows-x86_64" in capsys.readouterr().err
