"""What every notebook keeps to, one function per rule. Each yields its problems, naming the cell.

`tests/notebooks/test_notebooks.py` applies them all to every notebook; `tests/notebooks/test_harness.py` damages a copy and
shows which rule catches what.
"""

import base64
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import nbformat
import notebook_form
import outline
import picture_rules
import prose_rules
import reading_time
import sources_table
from notebook_form import Cell

MAX_CODE_LINES = 18
TAGS = {
    "exercise", "facts", "nbval-ignore-output", "own-model", "predict", "raises-exception", "setup", "solution",
    "en-docs", "lab-only", "zh-docs",
}  # fmt: skip
SETUP = """\
# Colab, Kaggle: first run %pip install git+ADDRESS_OF_THE_REPOSITORY
from hooklab import lesson

lesson.start()"""
# A path (not a closing tag, not the tail of an address on the web), a Windows path, an object's address.
MACHINE = re.compile(r"(?<![\w<:/.])/(?:[\w.+-]+/)+[\w.+-]*|\b[A-Z]:\\\w|0x[0-9a-f]{6,}|ipykernel_\d|<ipython-input")
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Notebook:
    """A notebook on disk; `stem` is the real one's, also for a damaged copy elsewhere."""

    path: Path
    stem: str

    @cached_property
    def node(self) -> nbformat.NotebookNode:
        return notebook_form.read(self.path)

    @cached_property
    def cells(self) -> list[Cell]:
        return notebook_form.cells(self.node)

    @cached_property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.is_code]


Rule = Callable[[Notebook], Iterator[str]]


def normal_form(notebook: Notebook) -> Iterator[str]:
    if notebook.path.read_text(encoding="utf-8") != notebook_form.written(
        notebook_form.normalise(copy.deepcopy(notebook.node))
    ):
        yield "the file is not as `make refresh` writes it: metadata, tracebacks or layout; run `make refresh`"


def execution_counts(notebook: Notebook) -> Iterator[str]:
    for expected, cell in enumerate(notebook.code, start=1):
        if cell.node.execution_count != expected:
            yield f"{cell.id}: execution count {cell.node.execution_count}, expected {expected}; run `make refresh`"


def expected_errors(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        tagged = "raises-exception" in cell.tags
        raised = [output for output in cell.outputs if output.output_type == "error"]
        if tagged and len(raised) != 1:
            yield f"{cell.id}: tagged raises-exception, but the stored run raised nothing"
        if raised and not tagged:
            yield f"{cell.id}: raised {raised[0].ename} without the tag raises-exception"


def sources_covered(notebook: Notebook) -> Iterator[str]:
    entries = sources_table.entries()
    carried = [(source, cell) for cell in notebook.cells for source in cell.node.metadata.get("sources", [])]
    known = {source for entry in entries for source in (entry["id"], entry.get("also"))}
    for source, cell in carried:
        if source not in known:
            yield f"{cell.id}: carries {source}, which neither sources.yml nor practice.yml knows"
    for entry in entries:
        if entry["notebook"] != notebook.stem or "not_run" in entry:
            continue
        for source in filter(None, (entry["id"], entry.get("also"))):
            cells = [cell for carried_id, cell in carried if carried_id == source and cell.is_code]
            if not any(cell.node.execution_count for cell in cells):
                yield f"{source}: covered by no executed cell ({entry['topic']['en']})"
            elif {"expect", "fix"} & entry.keys() and not any("assert " in cell.source for cell in cells):
                yield f"{source}: no covering cell asserts what is expected ({entry.get('expect') or entry['fix']})"


def code_length(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        lines = len([line for line in cell.source.splitlines() if line.strip()])
        if lines > MAX_CODE_LINES:
            yield f"{cell.id}: {lines} lines of code, at most {MAX_CODE_LINES}; make it two cells"


def machine_traces(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        texts = [text for output in cell.outputs for text in notebook_form.texts(output)]
        svgs = [output.get("data", {}).get("image/svg+xml", "") for output in cell.outputs]
        drawn = [re.sub(r"base64,[\w+/=\s]+", "", svg) for svg in svgs]  # pictures inside
        for text in texts + drawn:
            if found := MACHINE.search(text):
                yield f"{cell.id}: the output holds {found[0]!r}, which differs from machine to machine"


def decimals(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        for text in [text for output in cell.outputs for text in notebook_form.texts(output)]:
            if "nbval-ignore-output" not in cell.tags and (found := re.search(r"\d\.\d{5,}", text)):
                yield f"{cell.id}: prints {found[0]}…; print at most 4 decimals"


def pictures_have_facts(notebook: Notebook) -> Iterator[str]:
    for position, cell in enumerate(notebook.code):
        beside = notebook.code[max(position - 1, 0) : position + 2]
        if notebook_form.pictures(cell) and not any(map(_states_facts, beside)):
            yield f"{cell.id}: a picture without a cell tagged facts beside it"
    for section in _sections(notebook.cells):
        for cell in section:
            if not cell.is_code and "![" in cell.source and not any(map(_states_facts, section)):
                yield f"{cell.id}: a picture without a cell tagged facts in its section"


def pictures_read_on_white_and_on_black(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        for data in [output.get("data", {}) for output in cell.outputs]:
            problems = [*picture_rules.svg_problems(data["image/svg+xml"])] if "image/svg+xml" in data else []
            if "image/png" in data:
                problems += picture_rules.png_problems(base64.b64decode(data["image/png"]))
            yield from (f"{cell.id}: the picture has {problem}" for problem in dict.fromkeys(problems))


def pictures_in_a_sentence(notebook: Notebook) -> Iterator[str]:
    """The alternative text: a sentence that came with the picture, or the text of a figure."""
    for cell in notebook.code:
        for output in cell.outputs:
            for mime in [mime for mime in output.get("data", {}) if mime.startswith("image/")]:
                alt = output.metadata.get(mime, {}).get("alt") or output.data["text/plain"]
                if not re.fullmatch(r"\w(?!.*\. [A-Z]).*\.", alt):
                    yield f"{cell.id}: the alternative text is no sentence, {alt[:60]!r}"


def formulas(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        for output in cell.outputs:
            if found := re.search(r"\$\\\w+[^<]*", output.get("data", {}).get("image/svg+xml", "")):
                yield f"{cell.id}: the picture shows {found[0]!r}, a formula that was not set"


def links(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.cells:
        for target in LINK.findall(cell.source) if not cell.is_code else ():
            path = target.partition("#")[0]
            if not re.match(r"https?://|mailto:", target) and path and not (notebook_form.NOTEBOOKS / path).exists():
                yield f"{cell.id}: dead link {target}"


def tags(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.cells:
        if unknown := set(cell.tags) - TAGS:
            yield f"{cell.id}: unknown tags {sorted(unknown)}; known: {sorted(TAGS)}"
        if "nbval-ignore-output" in cell.tags and not re.search(r"perf_counter|getsource", cell.source):
            yield f"{cell.id}: measures nothing, so its output should be compared; take off nbval-ignore-output"
        if cell.is_code and re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)", cell.source):
            yield f"{cell.id}: a comment switches the comparison of its output off"


def lab_only(notebook: Notebook) -> Iterator[str]:
    """What is said of JupyterLab alone has cells of its own, which the site leaves out."""
    for cell in notebook.cells:
        about_the_lab = re.search(r"工具栏|左边栏|Shift\+Enter|Kernel →|Run →|toolbar|left sidebar", cell.source)
        if "lab-only" not in cell.tags:
            if about_the_lab and not cell.is_code:
                yield f"{cell.id}: speaks of {about_the_lab[0]!r}; make it a cell of its own, tagged lab-only"
        elif cell.is_code or re.search(r"^#", cell.source, re.MULTILINE) or cell.index in (0, len(notebook.cells) - 1):
            yield f"{cell.id}: tagged lab-only, but code, headings and the first and last cell stay on the site"


def opening(notebook: Notebook) -> Iterator[str]:
    first = notebook.cells[0]
    if not first.source.startswith(f"# {notebook.stem[:2]} "):
        yield f"{first.id}: should begin with the title '# {notebook.stem[:2]} …'"
    setups = [cell for cell in notebook.code if "setup" in cell.tags]
    users = [cell for cell in notebook.code if "hooklab" in cell.source]
    if [cell.source for cell in setups] != [SETUP] or users[0].index != setups[0].index:
        yield "there should be one set-up cell, the same as everywhere, before hooklab is used"
    stated = re.search(r"(\d+) minutes", first.source)
    planned = sum(cell.node.metadata.get("minutes", 0) for cell in notebook.cells)
    if not stated or int(stated[1]) != planned:
        yield f"{first.id}: says {stated and stated[0]}, the minutes in the metadata add up to {planned}"
    counted = reading_time.minutes(notebook.node)
    if abs(planned - counted) > 0.1 * counted:
        yield f"{first.id}: says {planned} minutes, tools/reading_time.py counts {counted:.1f}"


def parts(notebook: Notebook) -> Iterator[str]:
    """What every notebook has, in this order; 00 comes before hooks that one could do without, and recalls nothing."""
    first, second, *_ = notebook.cells
    for language, half in first.halves.items():
        goals = re.findall(r"^(\d)\. ", half, re.MULTILINE)
        if not 1 <= len(goals) <= 3:
            yield f"{first.id}: {len(goals)} goals in {language}; one to three"
    minutes = sum(cell.node.metadata.get("minutes", 0) for cell in notebook.cells)
    if not 10 <= minutes <= 45:
        yield f"{first.id}: {minutes} minutes; 10 to 45"
    if minutes > 38 and notebook.stem[:2] in outline.FAST:
        yield f"{first.id}: {minutes} minutes; 38 at most on the fast track"
    begins = notebook.stem.startswith("00")
    if not begins and not ("回想" in second.source and "Recall" in second.source):
        yield f"{second.id}: no question that recalls the notebook before ('回想一下', 'Recall')"
    wanted = [*([] if begins else ["When not to"]), "Recap", "Exercises"]
    headings = [
        line for cell in notebook.cells if not cell.is_code for line in cell.source.splitlines() if line[:3] == "## "
    ]
    found = [name for heading in headings for name in wanted if f"· {name}" in heading]
    if found[-len(wanted) :] != wanted:
        yield f"the last sections should be {wanted}, found {found}"
    asked = [
        "guess = None" in cell.source
        for cell in notebook.code
        if "guess = None" in cell.source or "check.predict(" in cell.source
    ]
    if asked != [True, False] * (len(asked) // 2):
        yield "before each check.predict one cell should say guess = None"
    for cell in notebook.code:
        if prose_rules.HAN.search(cell.source):
            yield f"{cell.id}: Chinese in the code; code and what it prints are English"


def practice(notebook: Notebook) -> Iterator[str]:
    calls = {
        name: [cell for cell in notebook.code if f"check.{name}(" in cell.source] for name in ("predict", "exercise")
    }
    if len(calls["predict"]) < 2:
        yield f"{len(calls['predict'])} predict-then-run cells; at least two"
    if not 2 <= len(calls["exercise"]) <= 4:
        yield f"{len(calls['exercise'])} exercises; two to four"
    for cell in calls["predict"] + calls["exercise"]:
        if not any("hooklab-todo" in text for output in cell.outputs for text in notebook_form.texts(output)):
            yield f"{cell.id}: was stored with an attempt in it; put back `None` or `...` and run `make refresh`"
    solutions = [cell for cell in notebook.cells if "solution" in cell.tags]
    if len(solutions) != len(calls["exercise"]) or any("<details>" not in cell.source for cell in solutions):
        yield "every exercise needs one folded solution"
    if not any("own-model" in cell.tags for cell in notebook.code):
        yield "there is no cell to try it on one's own model"
    for cell in notebook.code:
        if re.search(r"\binput\(", cell.source):
            yield f"{cell.id}: input() stops a run without a person"


def guesses_come_first(notebook: Notebook) -> Iterator[str]:
    """A guess has a cell of its own; between it and its answer no cell asserts: that would give the answer away."""
    guessed = False
    for cell in notebook.code:
        if "guess = None" in cell.source and not re.fullmatch(r"guess = None(  # .+)?", cell.source):
            yield f"{cell.id}: a guess stands alone in its cell; move the other code above the question or below it"
        guessed = guessed or cell.source.startswith("guess = ")
        if guessed and re.search(r"^\s*assert\b", cell.source, re.MULTILINE):
            yield f"{cell.id}: asserts before the guess above is judged; move it below the cell with check.predict"
        guessed = guessed and "check.predict(" not in cell.source


def neighbours(notebook: Notebook) -> Iterator[str]:
    """The first cell and the last one lead to the notebook before, the contents and the next one."""
    names = [path.name for path in notebook_form.paths()]
    number = names.index(f"{notebook.stem}.ipynb")
    wanted = {names[0], *names[max(number - 1, 0) : number + 2]} - {f"{notebook.stem}.ipynb"}
    for cell in (notebook.cells[0], notebook.cells[-1]):
        for language, half in cell.halves.items():
            if missing := wanted - set(LINK.findall(half)):
                yield f"{cell.id}: no link to {sorted(missing)} in {language}"


def slides(notebook: Notebook) -> Iterator[str]:
    for cell, wanted in zip(notebook.cells, notebook_form.slide_types(notebook.node), strict=True):
        if cell.node.metadata.get("slideshow", {}).get("slide_type") != wanted:
            yield f"{cell.id}: on the slides it should be {wanted or 'below the cell before it'}; run `make refresh`"


def _states_facts(cell: Cell) -> bool:
    return "facts" in cell.tags and any(text.strip() for output in cell.outputs for text in notebook_form.texts(output))


def _sections(cells: list[Cell]) -> list[list[Cell]]:
    sections: list[list[Cell]] = [[]]
    for cell in cells:
        if not cell.is_code and re.match(r"##? ", cell.source):
            sections.append([])
        sections[-1].append(cell)
    return sections


RULES: list[Rule] = [
    normal_form, execution_counts, expected_errors, sources_covered, code_length, machine_traces, decimals,
    pictures_have_facts, pictures_read_on_white_and_on_black, pictures_in_a_sentence,
    formulas, links, tags, lab_only, opening, parts, practice, guesses_come_first, neighbours, slides,
    prose_rules.headings, prose_rules.two_languages, prose_rules.punctuation, prose_rules.length,
    prose_rules.same_spans, prose_rules.same_numbers, prose_rules.same_links, prose_rules.same_shape,
    prose_rules.names_of_the_package, prose_rules.folds, prose_rules.glossary, prose_rules.natural_english,
    prose_rules.named_sources, prose_rules.references,
]  # fmt: skip
