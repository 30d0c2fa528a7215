"""`make bundle`: the course in one archive, for a room without a network. It is written into dist/.

    python tools/bundle.py [PLATFORM] [PYTHON]        as in: python tools/bundle.py windows-x86_64 3.12

The archive holds the wheels of all that `hooklab lab` needs (PyTorch's are those for the CPU), the notebooks, the site
and the slides where they have been made, and what lies in tools/bundled/. Without arguments it is made for this
machine and this Python. Mirrors are those of UV_DEFAULT_INDEX and PIP_INDEX_URL.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bundled.install import here

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "labextension"))
from hooklab_desk.working_copy import PAGES  # noqa: E402

UV = os.environ.get("UV", "uv")  # `uv run` says where uv lies
TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"
# What uv calls a platform, and the tags of the wheels that fit it. PyTorch wants glibc 2.28 of Linux, and macOS 14.
PLATFORMS = {
    "linux-x86_64": (
        "x86_64-manylinux_2_28",
        ["manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 29))],
    ),
    "macos-arm64": ("aarch64-apple-darwin", ["macosx_14_0_arm64"]),
    "windows-x86_64": ("x86_64-pc-windows-msvc", ["win_amd64"]),
}
NOT_FOR_LEARNERS = shutil.ignore_patterns(".*", "__pycache__", "*.yml", "ruff.toml")


def main(arguments: list[str] | None = None) -> int:
    """What the command does; returns its exit status."""
    platform, python = here()
    parser = argparse.ArgumentParser(description="The course in one archive, for a room without a network.")
    parser.add_argument("platform", nargs="?", default=platform, help=f"{', '.join(PLATFORMS)}; now {platform}")
    parser.add_argument("python", nargs="?", default=python, help=f"the version of Python there; now {python}")
    options = parser.parse_args(arguments)
    if options.platform not in PLATFORMS:
        parser.error(f"no bundle for {options.platform}; there is one for {', '.join(PLATFORMS)}")
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dist) as folder:
        try:
            wheels = collect(options.platform, options.python, Path(folder))
        except OSError as error:
            print(f"hooklab: 没有打成，这一步失败了 / no bundle, since this failed: {error}", file=sys.stderr)
            return 1
        archive = pack(wheels, options.platform, options.python, dist)
    print(f"hooklab: {archive.relative_to(ROOT)}, {archive.stat().st_size / 2**20:.0f} MiB")
    return 0


def collect(platform: str, python: str, folder: Path) -> Path:
    """The folder with all wheels: those of the requirements, in the versions that uv resolves, and hooklab's own."""
    uv_platform, tags = PLATFORMS[platform]
    requirements, wheels = folder / "requirements.txt", folder / "wheels"
    resolve = ["pip", "compile", "--quiet", "pyproject.toml", "-", "--all-extras", "--only-binary", ":all:"]
    resolve += ["--python-platform", uv_platform, "--python-version", python, "--torch-backend", "cpu"]
    # pip comes along, since the Python of a Linux distribution often lacks it: install.py runs it from its wheel.
    _uv(*resolve, "--no-header", "--no-annotate", "--output-file", str(requirements), standard_input="pip\n")
    # uv resolves for another platform, but downloads only what it installs: pip is asked for the wheels.
    download = ["tool", "run", "--quiet", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    download += ["--python-version", python, *(word for tag in tags for word in ("--platform", tag))]
    _uv(*download, "--extra-index-url", TORCH_FOR_CPU, "--requirement", str(requirements), "--dest", str(wheels))
    _uv("build", "--quiet", "--wheel", "--no-create-gitignore", "--out-dir", str(wheels))
    return wheels


def pack(wheels: Path, platform: str, python: str, into: Path) -> Path:
    """The archive of what lies in `wheels` and of the course; its one folder has the archive's name."""
    (own,) = wheels.glob("hooklab-*.whl")
    name = f"hooklab-{own.name.split('-')[1]}-{platform}-py{python}"
    with tempfile.TemporaryDirectory(dir=into) as temporary:
        folder = Path(temporary, name)
        shutil.copytree(ROOT / "tools/bundled", folder, ignore=NOT_FOR_LEARNERS)
        (folder / "bundle.json").write_text(json.dumps({"platform": platform, "python": python}), encoding="utf-8")
        readme = (folder / "README.md").read_text(encoding="utf-8").replace("PYTHON_VERSION", python)
        (folder / "README.md").write_text(readme, encoding="utf-8")
        shutil.copytree(wheels, folder / "wheels")
        shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=NOT_FOR_LEARNERS)
        for page in (page.resolve() for pattern in PAGES for page in (ROOT / "notebooks").glob(pattern)):
            (folder / page.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy2(page, folder / page.relative_to(ROOT))
        if (site := ROOT / "docs/site/_build/html").is_dir():
            shutil.copytree(site, folder / "site")
        if (slides := ROOT / "slides").is_dir():
            shutil.copytree(slides, folder / "slides")
        form = "zip" if platform.startswith("windows") else "gztar"
        return Path(shutil.make_archive(str(into / name), form, temporary, name))


def _uv(*arguments: str, standard_input: str = "") -> None:
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    if subprocess.run([UV, *arguments], input=standard_input, text=True, cwd=ROOT, env=environment).returncode:
        raise OSError(f"uv {' '.join(arguments[:2])}")


if __name__ == "__main__":
    sys.exit(main())
