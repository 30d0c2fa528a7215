"""`hooklab`, the course on a command line; only what shows progress or checks the machine loads PyTorch."""

import argparse
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hooklab_desk.working_copy import HIDDEN, Update, update

HERE = Path(__file__).resolve().parents[2]
# In a clone the notebooks lie beside the code; where a bundle was installed, they lie beside the environment.
ROOT = HERE if (HERE / "notebooks").is_dir() else Path(sys.prefix).parent
FOLDER = "my-notebooks"
HOMEWORK = "homework"
FIRST = "00_start_here.ipynb"
INSTALL = 'pip install "hooklab[lab]"'
LANGUAGES = ["both", "zh", "en"]
SOME = "例如 / such as 12 11_reading_gradients；不写就是全部 / all of them by default"


class Wrong(Exception):
    """The command cannot be carried out; the message says what was found and what to do, in both languages."""

    def __init__(self, zh: str, en: str):
        super().__init__(f"hooklab: {zh}\nhooklab: {en}")


def main(arguments: list[str] | None = None) -> int:
    """What the command does; returns its exit status."""
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")  # a terminal that knows no Chinese still shows the English
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    if others and options.command in ("check", "progress", "slides", "assignments"):
        parser.error(f"{options.command} 没有这个选项 / has no such option: {' '.join(others)}")
    try:
        return COMMANDS[options.command](options, others)
    except (Wrong, FileNotFoundError, PermissionError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hooklab", description="PyTorch 钩子课程。The course on PyTorch hooks.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, zh: str, en: str, rest: str = "") -> argparse.ArgumentParser:
        epilog = rest and f"其余选项交给 {rest}。Other options go to {rest}."
        return commands.add_parser(name, help=f"{zh} / {en}", description=f"{zh} / {en}", epilog=epilog)

    lab = add("lab", "在 JupyterLab 里打开课程", "open the course in JupyterLab", "JupyterLab")
    lab.add_argument(
        "--folder",
        type=Path,
        default=ROOT / FOLDER,
        help=f"你自己的一份笔记本放在哪里 / where your own copy of the notebooks is ({FOLDER})",
    )
    lab.add_argument(
        "--copy-only",
        action="store_true",
        help="只更新你的那一份，不打开 / bring the copy up to date and open nothing",
    )
    add("check", "这台机器缺什么", "what is missing on this machine")
    add("progress", "你做到了哪里", "what you have done so far")
    slides = add("slides", "生成幻灯片", "make slides")
    add("site", "把课程做成网站", "build the course as a website", "docs/site/build.py")
    assignments = add("assignments", "把练习做成 nbgrader 的作业", "make nbgrader assignments of the exercises")
    assignments.add_argument(
        "--folder",
        type=Path,
        default=ROOT / HOMEWORK,
        help=f"作业放在哪里 / where the assignments go ({HOMEWORK})",
    )
    for made in (slides, assignments):
        made.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help=SOME)
        made.add_argument("--language", choices=LANGUAGES, default="both", help="语言，默认两种都有 / both by default")
    return parser


def _lab(options: argparse.Namespace, others: list[str]) -> int:
    if not options.copy_only:
        _need("jupyterlab", INSTALL)
    folder = options.folder.resolve()
    _tell(update(ROOT / "notebooks", folder), folder)
    return 0 if options.copy_only else _python("-m", "jupyterlab", *_flags(folder), *others)


def _check(options: argparse.Namespace, others: list[str]) -> int:
    return _python("-m", "hooklab.lesson")


def _progress(options: argparse.Namespace, others: list[str]) -> int:
    from hooklab import check

    print(check.progress())
    return 0


def _slides(options: argparse.Namespace, others: list[str]) -> int:
    return _build("docs/slides/build.py", "docutils", "uv sync", [options.language, *_notebooks(options.notebooks)])


def _site(options: argparse.Namespace, others: list[str]) -> int:
    return _build("docs/site/build.py", "sphinx", "make site (uv run --group site hooklab site)", others)


def _build(script: str, module: str, remedy: str, arguments: list[str]) -> int:
    """Run what only a clone has, and what needs a package that `remedy` brings."""
    if not (ROOT / script).is_file():
        raise Wrong(
            f"没有 {ROOT / script}：请在课程的克隆里运行",
            f"there is no {ROOT / script}: run this in a clone of the course",
        )
    _need(module, remedy)
    return _python(str(ROOT / script), *arguments)


def _assignments(options: argparse.Namespace, others: list[str]) -> int:
    arguments = [str(options.folder.resolve()), options.language, *_notebooks(options.notebooks)]
    remedy = "make assignments (uv run --group homework hooklab assignments)"
    return _build("tools/assignments.py", "nbgrader", remedy, arguments)


def _notebooks(names: list[str]) -> list[str]:
    """The paths of what is named by a number, a name or a path; of all notebooks, where nothing is."""
    known = {path.stem: str(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    numbers = {stem[:2]: path for stem, path in known.items()}
    found = {name: name if Path(name).is_file() else (known | numbers).get(name) for name in names}
    for name, path in found.items():
        if path is None:
            raise Wrong(
                f"没有 {name} 这本笔记本；请写编号或文件名，编号有 {', '.join(numbers)}",
                f"there is no notebook {name}; give a number or a file; the numbers are {', '.join(numbers)}",
            )
    return [path for path in found.values() if path] or list(known.values())


COMMANDS = {
    "lab": _lab,
    "check": _check,
    "progress": _progress,
    "slides": _slides,
    "site": _site,
    "assignments": _assignments,
}


def _need(module: str, command: str) -> None:
    if find_spec(module) is None:
        raise Wrong(f"没有安装 {module}，请运行 {command}", f"{module} is not installed; run {command}")


def _python(*arguments: str) -> int:
    """Run this Python once more, with what the command needs in a process of its own."""
    return subprocess.call([sys.executable, *arguments])


def _tell(done: Update, own: Path) -> None:
    folder = own.name if own.parent == ROOT else own
    if done.new:
        print(f"hooklab: {folder} 是你自己的笔记本，新放进 {len(done.new)} 本。")
        print(f"hooklab: {folder} holds your own notebooks, {len(done.new)} of them new.")
    if done.replaced:
        print(f"hooklab: 没写过的换成了新版 / new versions of what you had not touched: {', '.join(done.replaced)}")
    if done.kept:
        print(f"hooklab: 有新版，你写过，所以没动 / a new version exists, yours was left: {', '.join(done.kept)}")
        print("hooklab: 想换成新版，就把自己的那本改名或删掉，再运行一次。")
        print("hooklab: to begin one again, rename or delete yours and run this again.")


def _flags(folder: Path) -> list[str]:
    hidden = [*HIDDEN, "__pycache__", "*.part"]
    # The address, and not the file: where no browser opens, it is this address that is printed.
    flags = [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{FIRST}"]
    flags.append(f"--ContentsManager.hide_globs={hidden!r}")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--allow-root")
    if sys.platform == "linux" and not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        flags.append("--no-browser")
        print("hooklab: 这台机器没有屏幕，请打开下面 JupyterLab 打印的地址。")
        print("hooklab: no screen here; open the address that JupyterLab prints below.")
    return flags


if __name__ == "__main__":
    sys.exit(main())
