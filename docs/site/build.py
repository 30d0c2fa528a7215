"""`make site`: the course on the web, in both languages, in docs/site/_build/html.

    python docs/site/build.py [--check]

`--check` also asks every outside link whether it works. The address of the repository is taken from GITHUB_REPOSITORY or
from git's remote, that of the site from SITE_URL; where neither is known, what needs them (Colab, downloads that install
hooklab, 'report this sentence', the sitemap) is left out.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import nbformat

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
import prepare  # noqa: E402

from hooklab.export import LANGUAGES  # noqa: E402

BUILD = Path(os.environ.get("SITE_BUILD", HERE / "_build"))
HTML = BUILD / "html"
INVENTORIES = {"torch": "https://docs.pytorch.org/docs/stable/", "python": "https://docs.python.org/3/"}
# npm has a newer Pagefind, which cuts Chinese into words as browsers do.
PAGEFIND = ["npx", "--yes", "pagefind@1.6.0"] if shutil.which("npx") else [sys.executable, "-m", "pagefind"]
HIDDEN, INDEXED = ".headerlink, .run, .report", "{en,zh}/{*,*/*,api/*/*,decisions/*/*}.html"
PAGEFIND += ["--site", str(HTML), "--root-selector", "article", "--exclude-selectors", HIDDEN, "--glob", INDEXED]
# The set-up cell of a download, which knows where it came from.
SETUP = """\
try:
    from hooklab import lesson
except ModuleNotFoundError:  # on Colab and Kaggle
    %pip install -q torchviz git+https://github.com/REPOSITORY
    from hooklab import lesson

lesson.start()"""


def main(options: list[str]) -> None:
    start = time.perf_counter()
    shutil.rmtree(HTML, ignore_errors=True)
    settings = addresses() | {"inventories": inventories()}
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    for language in LANGUAGES:
        prepare.Edition(language, settings["repository"]).write(BUILD / "src" / language)
    sphinx("dirhtml", "html", "-W", "--keep-going")
    shutil.rmtree(HTML / "jupyter_execute", ignore_errors=True)  # MyST-NB's own copies
    shutil.copytree(HERE / "root", HTML, dirs_exist_ok=True)
    lost = HTML / "404.html"  # shown at addresses of any depth, so its links begin at the root of the host
    lost.write_text(lost.read_text("utf-8").replace("BASE", urlsplit(settings["site"]).path or "/"), encoding="utf-8")
    downloads(settings)
    sphinx("epub", "epub")
    for language in LANGUAGES:
        shutil.copy(BUILD / "epub" / language / "hooklab.epub", HTML / f"hooklab.{language}.epub")
    if settings["site"]:
        sitemap(settings["site"])
    subprocess.run(PAGEFIND, check=True, stdout=subprocess.DEVNULL)
    if "--check" in options:
        sphinx("linkcheck", "links")
    print(f"site: {HTML} in {time.perf_counter() - start:.0f} s; see it with: make site-serve")


def addresses() -> dict[str, str]:
    """The repository as owner/name and the site's address, empty where they are not known."""
    asked = ["git", "-C", str(prepare.ROOT), "remote", "get-url", "origin"]
    remote = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    found = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?$", remote)
    repository = os.environ.get("GITHUB_REPOSITORY", found[1] if found else "")
    owner, _, name = repository.partition("/")
    site = os.environ.get("SITE_URL", f"https://{owner.lower()}.github.io/{name}/" if repository else "")
    if not repository:
        print("site: the address of the repository is not known (GITHUB_REPOSITORY); links that need it are left out")
    return {"repository": repository, "site": site}


def inventories() -> dict[str, str]:
    """Where PyTorch and Python document their names; empty without a network, and then these are no links."""
    found = {}
    for name, address in INVENTORIES.items():
        file = BUILD / f"{name}.inv"
        try:
            with urllib.request.urlopen(f"{address}objects.inv", timeout=10) as answer:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(answer.read())
            found[name] = address
        except OSError:
            print(f"site: no network to {address}; its names are not links")
    return found


def sphinx(builder: str, folder: str, *options: str) -> None:
    """Build both languages at the same time; end if one of them fails."""
    running = []
    for language in LANGUAGES:
        command = [sys.executable, "-m", "sphinx", "-q", "-c", HERE, "-b", builder, *options]
        command += ["-d", BUILD / "trees" / language, BUILD / "src" / language, BUILD / folder / language]
        running.append(
            subprocess.Popen(command, env=os.environ | {"SITE_LANGUAGE": language, "SITE_BUILD": str(BUILD)})
        )
    if max(process.wait() for process in running):
        sys.exit("site: not built, for the reason above")


def downloads(settings: dict[str, str]) -> None:
    """Each notebook in both languages and in one."""
    shutil.copytree(prepare.NOTEBOOKS / "images", HTML / "notebooks" / "images")
    for kind in ("both", *LANGUAGES):
        for path in sorted(prepare.NOTEBOOKS.glob("*.ipynb")):
            notebook = nbformat.read(path, as_version=4)
            if kind != "both":
                notebook, _ = LANGUAGES[kind]().preprocess(notebook, {})
            for cell in notebook.cells:
                cell.source = by_itself(cell, settings)
            (HTML / "notebooks" / kind).mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, HTML / "notebooks" / kind / path.name)


def by_itself(cell: nbformat.NotebookNode, settings: dict[str, str]) -> str:
    """The source of a cell for a notebook with nothing beside it."""
    if not settings["repository"]:
        return cell.source
    if "setup" in cell.metadata.get("tags", ()):
        return SETUP.replace("REPOSITORY", settings["repository"])
    return cell.source.replace("](images/", f"]({settings['site']}notebooks/images/")


def sitemap(site: str) -> None:
    pages = sorted(page.parent.relative_to(HTML).as_posix() for page in HTML.glob("??/**/index.html"))
    rows = "".join(f"<url><loc>{site}{page}/</loc></url>\n" for page in pages if "_modules" not in page)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
    (HTML / "sitemap.xml").write_text(f"{head}{rows}</urlset>\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
