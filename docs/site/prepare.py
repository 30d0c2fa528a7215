"""The course in one language, as sources for Sphinx: `prepare("zh", folder)`.

Notebooks and documents lose their other language (`hooklab.export`), and notebooks what makes sense only where cells can
be run: a guess is typed into a field, and what it was about stays folded until then, with the explanation.
"""

import json
import re
import shutil
from html import escape
from pathlib import Path

import nbformat
import reference
from nbformat import NotebookNode, v4

from hooklab.course import check
from hooklab.course.message import Message
from hooklab.export import LANGUAGES, OneLanguage

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NOTEBOOKS = ROOT / "notebooks"
# The page, and the document that it is made from; `{}` is .zh-CN in the Chinese edition.
PAGES = {
    "install": "docs/install{}.md",
    "questions": "QUESTIONS{}.md",
    "cheatsheet": "docs/cheatsheet{}.md",
    "atlas": "docs/atlas{}.md",
    "glossary": "docs/glossary.md",
    "sources": "notebooks/SOURCES.md",
    "limits": "docs/limits{}.md",
    "teaching": "docs/teaching{}.md",
    "teaching/plans": "docs/teaching/README{}.md",
    "regression": "docs/regression{}.md",
    "contributing": "CONTRIBUTING{}.md",
    "changelog": "CHANGELOG.md",
    "decisions/index": "docs/decisions/README.md",
}
PAGES |= {f"decisions/{page.stem}": f"docs/decisions/{page.name}" for page in sorted(ROOT.glob("docs/decisions/0*.md"))}
NOTES = sorted(page.stem for page in ROOT.glob("docs/teaching/notes/*.yml"))  # the teacher's, on a notebook
PAGES |= {f"teaching/{stem}": f"docs/teaching/{stem}{{}}.md" for stem in NOTES}
ENGLISH_ONLY = ("changelog", "decisions/")
LINK = re.compile(r"(?<!!)\[((?:`[^`]*`|[^]`])*)\]\(([^)\s:]+)\)")  # within the repository
ROW = re.compile(r"^\| \[(\d\d) [^]]+\]\([^)]+\) \| (.+?) \| \d+ \|$", re.MULTILINE)
GUESS = re.compile(r"^(guess\w* = )None *(#.*)?$", re.MULTILINE)
PREDICTS = re.compile(r"check\.predict\(\"([^\"]+)\"")
EXERCISE = re.compile(r"check\.exercise\(\"([^\"]+)\"")
CHECK = re.compile(r"\n*^(from hooklab import check|check\.predict\(.*\))$", re.MULTILINE)


class Edition:
    """One language of the site; `repository` is owner/name on GitHub, or empty where it is not known."""

    def __init__(self, language: str, repository: str):
        self.language, self.repository = language, repository
        self.split: OneLanguage = LANGUAGES[language]()
        self.cells_of: dict[str, set[str]] = {}  # the ids that a notebook's page has

    def say(self, zh: str, en: str) -> str:
        return zh if self.language == "zh" else en

    def file(self, document: str) -> Path:
        return ROOT / document.format(self.say(".zh-CN", ""))

    def write(self, target: Path) -> None:
        """The sources of this edition, in the folder `target`, which is made anew."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(NOTEBOOKS / "images", target / "images")
        reference.write(target / "api", self.split.half)
        for path in sorted(NOTEBOOKS.glob("*.ipynb")):
            notebook = self.notebook(path)
            self.cells_of[path.name] = {cell.id for cell in notebook.cells}
            nbformat.write(notebook, target / path.name)
        texts = {page: self.document(page, document) for page, document in PAGES.items()}
        front = HERE.joinpath("pages", f"index.{self.language}.md").read_text("utf-8")
        texts["index"] = front.replace("RUN", self.run_links("00_start_here.ipynb", notebook=False))
        texts["course"] = self.course()
        for page, text in texts.items():
            target.joinpath(f"{page}.md").parent.mkdir(exist_ok=True)
            target.joinpath(f"{page}.md").write_text(text, encoding="utf-8")

    # ---- notebooks ----

    def notebook(self, path: Path) -> NotebookNode:
        notebook = nbformat.read(path, as_version=4)
        self.split.preprocess(notebook, {})
        notebook.cells = list(self.cells(notebook.cells, f"notebooks/{path.name}"))
        title = notebook.cells[0]
        title.source = title.source.replace("\n", f"\n\n{self.run_links(path.name)}\n", 1)
        return notebook

    def cells(self, cells: list[NotebookNode], file: str):
        """The cells for somebody who reads and cannot run them."""
        since_guess: list[NotebookNode] | None = None
        for cell in cells:
            if "lab-only" in cell.metadata.get("tags", ()):
                continue
            if "setup" in cell.metadata.get("tags", ()):  # its comment is for who runs it elsewhere
                cell.source = re.sub(r"^#.*\n", "", cell.source)
            if cell.cell_type == "markdown":
                plain = re.sub(r'^<div lang="\w+">\n+|\n+</div>$', "", cell.source, flags=re.MULTILINE)
                cell.source = self.links(plain, file)
            elif GUESS.search(cell.source) and cell.source.startswith("guess"):
                since_guess, cell = [], v4.new_markdown_cell(self.field(cell.source), id=cell.id)
            elif found := EXERCISE.search(cell.source):
                cell = v4.new_markdown_cell(self.hints(found[1]), id=cell.id)
            elif since_guess is not None:
                since_guess.append(cell)
                if found := PREDICTS.search(cell.source):
                    self.fold(since_guess, found[1])
                    since_guess = None
            if cell.metadata.get("jupyter", {}).get("source_hidden"):  # folded in JupyterLab, too
                cell.metadata.setdefault("tags", []).append("remove-input")
            for output in cell.get("outputs", ()):
                describe(cell, output)
            if cell.source:
                yield cell

    def field(self, source: str) -> str:
        """A field in place of `guess = None`."""
        fields = [f'<label>{name}<input placeholder="None"></label>{note}' for name, note in GUESS.findall(source)]
        return f'<p class="guess">{"<br>".join(fields)}</p>'

    def fold(self, cells: list[NotebookNode], name: str) -> None:
        """Fold what the cells since a guess show; below the last stands the explanation, in place of the check."""
        *before, last = cells
        last.outputs, last.source = [], CHECK.sub("", last.source).strip()
        shown = [cell for cell in before if cell.outputs] or before[-1:]
        if last.source:  # more than the check
            shown.append(last)
        question = check.find(name, check.Prediction)
        told = [Message("note", question.zh, question.en)]
        for wrong in question.guesses:
            guess = f"`{wrong['guess']!r}`".replace("'", '"')
            told.append(Message("wrong", f"猜的是 {guess}？{wrong['zh']}", f"You guessed {guess}? {wrong['en']}"))
        html = "".join(self.split.without(message._repr_html_()) for message in told)
        shown[-1].outputs.append(v4.new_output("display_data", {"text/html": html}))
        for cell in shown:
            cell.metadata.setdefault("tags", []).append("hide-output")

    def hints(self, name: str) -> str:
        """The hints of an exercise, folded, in place of its check."""
        texts = [Message("note", hint["zh"], hint["en"]) for hint in check.find(name, check.Exercise).hints()]
        summary = self.say("提示 {}", "Hint {}")
        folds = [
            f"<details><summary>{summary.format(number)}</summary>{self.split.without(text._repr_html_())}</details>"
            for number, text in enumerate(texts, 1)
        ]
        return "\n".join(folds)

    def run_links(self, name: str, notebook: bool = True) -> str:
        """Where the notebook can be run, as far as the address of the repository is known, and its downloads."""
        there = {
            "Colab": f"https://colab.research.google.com/github/{self.repository}/blob/main/notebooks/{name}",
            "Binder": f"https://mybinder.org/v2/gh/{self.repository}/main?labpath=notebooks/{name}",
            "Codespaces": f"https://codespaces.new/{self.repository}",
        }
        both = self.say("下载（双语）", "Download (both languages)")
        kinds = {"both": both, "zh": self.say("只下中文", "Chinese"), "en": self.say("只下英文", "English")}
        downloads = {words: f"../../notebooks/{kind}/{name}" for kind, words in kinds.items()}
        places = (there if self.repository else {}) | (downloads if notebook else {})
        links = "".join(f'<a href="{url}">{text}</a>' for text, url in places.items())
        return f'<p class="run">{links}</p>' if links else ""

    # ---- documents ----

    def document(self, page: str, document: str) -> str:
        text = self.file(document).read_text("utf-8")
        if page == "limits":
            label = "(limits-{})=\n## {}".format
            text = re.sub(r"^## (\S+)$", lambda name: label(name[1].lower(), name[1]), text, flags=re.MULTILINE)
        if page == "decisions/index":
            own = "\n".join(other.removeprefix("decisions/") for other in PAGES if other.startswith("decisions/0"))
            text += f"\n```{{toctree}}\n:hidden:\n\n{own}\n```\n"
        if page == "teaching":
            own = "\n".join(f"teaching/{stem}" for stem in ["plans", *NOTES])
            text += f"\n```{{toctree}}\n:hidden:\n\n{own}\n```\n"
        if page in ("cheatsheet", "atlas", "questions", "sources", "limits"):  # wide tables
            text = f"---\nlayout: compact\n---\n\n{text}"
        if page in ("glossary", "sources"):
            text = self.split.document(text)
        if page in ("cheatsheet", "atlas", "questions", "glossary", "sources") or page.startswith("teaching/"):
            text = re.sub(r"^[^|\n]*(?:`make refresh`|JupyterLab)[^|\n]*$", about_the_page, text, flags=re.MULTILINE)
        elif self.language == "zh" and page.startswith(ENGLISH_ONLY):
            text = text.replace("\n", "\n\n*本页只有英文。*\n", 1)
        text = re.sub(r"^\[(?:中文|English)\]\([^)]+\)(?: · )?", "", text, flags=re.MULTILINE)  # the site has a switch
        return self.links(text, document.format(""))

    def links(self, text: str, file: str) -> str:
        """What `file` links to: a page of the site, else the file in the repository, else only its words."""
        depth = "../" if file.startswith(("docs/decisions/", "docs/teaching/")) else ""

        def convert(found: re.Match[str]) -> str:
            words, target = found.groups()
            path, _, anchor = target.partition("#")
            goal = Path(ROOT, file).parent.joinpath(path).resolve().relative_to(ROOT) if path else Path(file)
            name = str(goal).replace(".zh-CN.md", ".md")
            anchor = anchor.removeprefix("cell-id=")
            pages = {source.format(""): page for page, source in PAGES.items()} | {"README.md": "index"}
            if name.endswith(".ipynb"):
                there = anchor in self.cells_of.get(goal.name, {anchor})  # a check has gone with its guess
                return f"[{words}]({depth}{goal.name}{f'#{anchor}' if anchor and there else ''})"
            if name in pages:
                return f"[{words}]({depth}{pages[name]}.md{f'#{anchor}' if anchor else ''})"
            if not self.repository:
                return words
            return f"[{words}](https://github.com/{self.repository}/blob/main/{goal})"

        return LINK.sub(convert, text)

    def course(self) -> str:
        """A card for each notebook with its question and minutes, by part; and the table of contents."""
        readme = self.file("README{}.md").read_text("utf-8")
        questions = dict(ROW.findall(readme))
        parts = json.loads(ROOT.joinpath("hooklab/course/outline.json").read_text("utf-8"))["parts"]
        minutes, fast = self.say("分钟", "min"), self.say("快速路线", "fast track")
        text = self.say("# 课程\n\n分钟数不含练习。", "# The course\n\nMinutes do not include the exercises.") + "\n\n"
        for number, part in enumerate(parts):
            cards, stems = "", []
            for book in part["notebooks"]:
                stems.append(book["file"].removesuffix(".ipynb"))
                facts = f"{book['minutes']} {minutes}" + (f" · <b>{fast}</b>" if book["fast"] else "")
                words = f"<b>{book['number']} {escape(book[self.language])}</b><span>{code(questions[book['number']])}</span>"
                cards += f'<a href="../{stems[-1]}/">{words}<small>{facts}</small></a>'
            text += f'## {part[self.language]}\n\n<div class="cards part-{number}">{cards}</div>\n\n'
            listed = "\n".join(stems)
            text += f"```{{toctree}}\n:hidden:\n:caption: {part[self.language]}\n\n{listed}\n```\n\n"
        return text


def describe(cell: NotebookNode, output: NotebookNode) -> None:
    """A picture says in words what is drawn in it."""
    data = output.get("data", {})
    for mime in data.keys() & {"image/png", "image/svg+xml"}:
        alt = output.metadata.get(mime, {}).get("alt") or data.get("text/plain", "")
        cell.metadata["mystnb"] = {"image": {"alt": re.sub(r"\s+", " ", alt)[:400]}}


def about_the_page(line: re.Match[str]) -> str:
    """A line without the sentences that say how the page is made, or what a click does in JupyterLab."""
    sentences = re.split(r"(?<=。)|(?<=\.) +", line[0])
    return " ".join(one for one in sentences if not re.search("`make refresh`|JupyterLab", one))


def code(text: str) -> str:
    return re.sub(r"`(.+?)`", r"<code>\1</code>", escape(text, quote=False))
