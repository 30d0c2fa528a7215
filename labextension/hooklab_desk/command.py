"""`hooklab lab`: open the course in JupyterLab, in a working copy that is the learner's own."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from hooklab_desk.working_copy import HIDDEN, Update, update

HERE = Path(__file__).resolve().parents[2]
# In a clone the notebooks lie beside the code; where a bundle was installed, they lie beside the environment.
ROOT = HERE if (HERE / "notebooks").is_dir() else Path(sys.prefix).parent
FOLDER = "my-notebooks"
FIRST = "00_start_here.ipynb"


def main(arguments: list[str] | None = None) -> int:
    """What the command does; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="hooklab",
        description="The course on PyTorch hooks. PyTorch 钩子课程。",
        epilog="Options that follow go to JupyterLab.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    lab = commands.add_parser("lab", help="open the course in JupyterLab")
    lab.add_argument("--folder", type=Path, default=ROOT / FOLDER, help=f"your own copy of the notebooks ({FOLDER})")
    lab.add_argument("--copy-only", action="store_true", help="bring the copy up to date and open nothing")
    options, others = parser.parse_known_args(arguments)
    try:
        done = update(ROOT / "notebooks", options.folder.resolve())
    except (FileNotFoundError, PermissionError) as error:
        print(error, file=sys.stderr)
        return 1
    _tell(done, options.folder.resolve())
    if options.copy_only:
        return 0
    return subprocess.call([sys.executable, "-m", "jupyterlab", *_flags(options.folder.resolve()), *others])


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
