"""Install the course from this folder, without a network: python install.py

不用网络，从这个文件夹安装课程：python install.py
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ENVIRONMENT = FOLDER / "hooklab-env"
PROGRAMS = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")


def here():
    """This machine and its Python, as a bundle is named: ("linux-x86_64", "3.12")."""
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    machine = platform.machine().lower().replace("amd64", "x86_64")
    return f"{system}-{machine}", "{}.{}".format(*sys.version_info)


def main():
    bundle = json.loads((FOLDER / "bundle.json").read_text(encoding="utf-8"))
    needed, found = (bundle["platform"], bundle["python"]), here()
    if found != needed:
        print(refusal(needed, found), file=sys.stderr)
        return 1
    print("hooklab: 正在装进 hooklab-env，要几分钟……")
    print("hooklab: installing into hooklab-env, for some minutes ...", flush=True)
    if install() != 0:
        print("hooklab: 安装中断，原因见上面几行。排除之后再运行一次，它会从头装起。", file=sys.stderr)
        print("hooklab: it stopped, for the reason above. Run it again afterwards: it begins anew.", file=sys.stderr)
        return 1
    start = os.path.join(os.path.relpath(PROGRAMS), "hooklab")
    print(f"hooklab: 装好了。这样打开课程：{start} lab")
    print(f"hooklab: installed. This opens the course: {start} lab")
    return 0


def refusal(needed, found):
    """What was found, what is needed and what to do, in both languages."""
    right, wrong = ("Python {1}, {0}".format(*pair) for pair in (needed, found))
    command = "uv run python tools/bundle.py {} {}".format(*found)
    return (
        f"hooklab: 这个安装包是给 {right} 的，而这里是 {wrong}，所以什么都没装。\n"
        f"         请用 Python {needed[1]} 运行 install.py；系统不同的话，请在有网络的机器上另打一个：{command}\n"
        f"hooklab: this bundle is for {right}. Found: {wrong}. Nothing was installed.\n"
        f"         Run install.py with Python {needed[1]}, or make another bundle where there is a network: {command}"
    )


def install():
    """Returns an exit status. Every wheel is named with its version, so that nothing is left to resolve."""
    wheels = sorted((FOLDER / "wheels").glob("*.whl"))
    names = ["==".join(wheel.name.split("-")[:2]) for wheel in wheels]
    pip = next(wheel for wheel in wheels if wheel.name.startswith("pip-"))
    make = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(ENVIRONMENT)]
    fill = [str(PROGRAMS / "python"), "-m", "pip", "--isolated", "install", "--quiet", "--no-index", "--no-deps"]
    fill += ["--find-links", str(FOLDER / "wheels"), *names]
    return subprocess.call(make) or subprocess.call(fill, env={**os.environ, "PYTHONPATH": str(pip)})


if __name__ == "__main__":
    sys.exit(main())
