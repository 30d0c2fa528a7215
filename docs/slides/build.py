"""`make slides`: the slides of the course in slides/, for a room without a network.

    python docs/slides/build.py both|zh|en NOTEBOOK ...

reveal.js comes from npm; everything else is made here. The folder is replaced as a whole once all of it has been made.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import jinja2
from pygments.formatters import HtmlFormatter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
import decks  # noqa: E402

from hooklab.export import LANGUAGES  # noqa: E402

TARGET = Path(os.environ.get("SLIDES_BUILD", ROOT / "slides"))
REVEAL = "reveal.js@6.0.2"
# Of the package that npm brings, what a page loads, and the licence.
FILES = ("dist/reveal.js", "dist/reveal.css", "dist/reset.css", "dist/plugin/notes.js", "LICENSE")
HEADINGS = {"zh": "hooklab 幻灯片", "en": "hooklab slides"}
HINTS = {
    "zh": "空格或 → 往后，← 往前，o 看全部，s 打开讲稿，f 全屏，? 列出所有按键。",
    "en": "Space or → goes on, ← back, o shows all slides, s the speaker notes, f fills the screen, ? lists the keys.",
}
PAGES = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE))


def main(language: str, paths: list[Path]) -> None:
    languages = list(LANGUAGES) if language == "both" else [language]
    if TARGET.exists() and not (TARGET / "reveal").is_dir():
        sys.exit(
            f"hooklab: {TARGET} 里是别的东西，幻灯片会把它整个换掉；请把它改名，再运行一次。\n"
            f"hooklab: {TARGET} holds something else, which the slides would replace; rename it and run this again."
        )
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent, prefix=".slides") as folder:
        made = Path(folder) / "slides"
        made.mkdir()
        fetch_reveal(made / "reveal")
        write(made, paths, languages)
        shutil.rmtree(TARGET, ignore_errors=True)
        made.rename(TARGET)
    print(f"slides: {len(paths) * len(languages)} decks; open {TARGET / 'index.html'}")


def fetch_reveal(target: Path) -> None:
    """reveal.js into the folder `target`. What npm has fetched before it does not fetch again."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit(
            "hooklab: 没有找到 npm，reveal.js 要用它来取；请安装 Node.js（https://nodejs.org），再运行一次。\n"
            "hooklab: npm was not found; it brings reveal.js. Install Node.js (https://nodejs.org), then run this again."
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", REVEAL, "--prefer-offline", "--pack-destination", folder]
        packed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        archives = list(Path(folder).glob("*.tgz"))
        if packed.returncode or not archives:
            sys.exit(
                f"hooklab: npm 没有取到 {REVEAL}，原因见下；第一次生成幻灯片要有网络，放映时不用。\n"
                f"hooklab: npm did not bring {REVEAL}, for the reason below; the first time, slides are made with a network.\n"
                + "\n".join(packed.stderr.split("\n")[:4])
            )
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder, filter="data")
        target.mkdir()
        for name in FILES:
            shutil.copy(Path(folder, "package", name), target)


def write(target: Path, paths: list[Path], languages: list[str]) -> None:
    names, editions = {path.stem for path in paths}, []
    for language in languages:
        lang = LANGUAGES[language].language
        made = [decks.deck(path, language, names) for path in paths]
        for deck in made:
            page = PAGES.get_template("deck.html").render(deck=deck, lang=lang)
            (target / f"{deck.name}.{language}.html").write_text(page, encoding="utf-8")
        editions.append(
            {"name": language, "lang": lang, "decks": made, "heading": HEADINGS[language], "hint": HINTS[language]}
        )
    index = PAGES.get_template("index.html").render(editions=editions)
    (target / "index.html").write_text(index, encoding="utf-8")
    style = (HERE / "slides.css").read_text("utf-8") + HtmlFormatter(style="friendly").get_style_defs("pre")
    (target / "slides.css").write_text(style, encoding="utf-8")
    shutil.copy(HERE / "slides.js", target)


if __name__ == "__main__":
    main(sys.argv[1], [Path(name) for name in sys.argv[2:]])
