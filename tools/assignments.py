"""`hooklab assignments`: the exercises of the notebooks as a course for nbgrader, an assignment for each notebook.

    python tools/assignments.py FOLDER LANGUAGE NOTEBOOK ...

This writes the version of the teacher, `source/`, and nbgrader makes that of the students from it, `release/`. An assignment
that lies there already is left alone.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import nbformat
import notebook_form
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook

from hooklab.export import LANGUAGES

CHECK = re.compile(r'check\.exercise\("([^"]+)", (\w+)\)')
LEVEL = r"\*\*{}\*\* (●+)"
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`(\w+)(?:\([^`]*)?`")
LINK = re.compile(r"\[([^\]]+)\]\(\w+\.ipynb[^)]*\)")
# How a message is printed in each language; `both` prints the two.
WORDS = {"both": "said", "zh": "said.zh", "en": "said.en"}
ABOUT = """\
<div lang="zh">

这份作业是同名笔记本的练习；题目里说的“第几节”，是那本笔记本的小节。在 `...` 的地方写下你的代码，运行那一格；再运行下面的一格，它说对不对，错在哪里。检查的那一格改了也没有用，评分时会换回来。

</div>

<div lang="en">

This assignment has the exercises of the notebook with this title; a section that an exercise speaks of is a section of that notebook. Write your code in place of `...` and run the cell; then run the cell below it, which says whether the answer is right, and if not, why. It is of no use to edit the checks: marking puts them back.

</div>
"""  # noqa: E501
# On nbgrader's page of feedback a refusal would be cut off at the right; JupyterLab leaves a style out.
WRAP = "\n<style>pre { white-space: pre-wrap; word-break: normal; }</style>"
CONFIG = """\
c = get_config()
c.CourseDirectory.course_id = "hooklab"
# An answer cell has a stub of its own, so nothing stands for the solution that nbgrader takes out.
c.ClearSolutions.code_stub = {"python": ""}
# Seconds for a cell; after that an answer gets no points.
c.Execute.timeout = 60
"""


def main(folder: Path, language: str, paths: list[Path]) -> None:
    notebooks = [path for path in paths if not any(map(Path.exists, places(folder, path.stem)))]
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "nbgrader_config.py"
    if not config.exists():
        config.write_text(CONFIG, encoding="utf-8")
    try:
        for path in notebooks:
            source, _ = places(folder, path.stem)
            written = assignment(path, language)
            source.mkdir(parents=True)
            nbformat.write(written, source / path.name)
        if notebooks:
            release(folder)
    finally:  # what nbgrader has not released goes, so that the next call exports it again
        for path in notebooks:
            source, released = places(folder, path.stem)
            if not released.exists():
                shutil.rmtree(source, ignore_errors=True)
    tell(folder, [path.stem for path in notebooks])


def places(folder: Path, name: str) -> tuple[Path, Path]:
    """Where the teacher's version and the students' version of an assignment lie."""
    return folder / "source" / name, folder / "release" / name


def assignment(path: Path, language: str) -> NotebookNode:
    """The teacher's version: the set-up, what the exercises use of the notebook, and each exercise with its solution."""
    cells = notebook_form.cells(notebook_form.read(path))
    last = max(cell.index for cell in cells if "solution" in cell.tags)
    first = max(cell.index for cell in cells[:last] if not cell.is_code and cell.source.startswith("## "))
    setup = next(cell for cell in cells if "setup" in cell.tags)
    title = new_markdown_cell(cells[0].source.splitlines()[0], id="title")
    written = [title, new_markdown_cell(ABOUT + WRAP, id="about"), locked(setup.node)]
    above = [cell.source for cell in cells[:first] if cell.is_code and cell is not setup]
    exercises = cells[first : last + 1]
    texts = "\n".join(cell.source for cell in exercises if not cell.is_code and "solution" not in cell.tags)
    written.append(locked(nbformat.v4.new_code_cell("\n".join(used(above, texts)), id="from-the-notebook")))
    solutions = iter([CODE.search(cell.source)[1] for cell in exercises if "solution" in cell.tags])
    for cell in exercises:
        check = CHECK.fullmatch(cell.source)
        if check:
            written.append(tested(cell.node, *check.groups(), texts, WORDS[language]))
        elif "exercise" in cell.tags:
            written.append(answered(cell.node, next(solutions)))
        elif not cell.is_code and "solution" not in cell.tags:
            written.append(new_markdown_cell(LINK.sub(r"\1", cell.source), id=cell.id))
    if language != "both":
        written = [LANGUAGES[language]().preprocess_cell(cell, {}, 0)[0] for cell in written]
    return new_notebook(cells=written, metadata=notebook_form.NOTEBOOK_METADATA)


def used(above: list[str], texts: str) -> Iterator[str]:
    """The imports of the cells `above`, and those of their functions and classes that the exercises name."""
    imports, named = {}, {}
    for source in above:
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports[ast.get_source_segment(source, node)] = None
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in NAMED.findall(texts):
                begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
                named[node.name] = "\n".join(["\n", *source.splitlines()[begin : node.end_lineno]])
    yield from (*imports, *named.values())


def answered(stub: NotebookNode, solution: str) -> NotebookNode:
    """The cell of an answer: the stub, and below it the solution, which only the teacher's version has."""
    stub.source += f"\n### BEGIN SOLUTION\n{solution}### END SOLUTION"
    return marked(stub, solution=True)


def tested(check: NotebookNode, exercise: str, answer: str, texts: str, words: str) -> NotebookNode:
    """The cell that is worth points: it fails with the words in which the course refuses the answer."""
    level = re.search(LEVEL.format(re.escape(exercise)), texts)
    if level is None:
        raise SystemExit(f"hooklab: {exercise} 没有难度 / has no level: expected **{exercise}** ●○○")
    check.source = (
        f'said = check.exercise("{exercise}", {answer})\nassert said.kind == "right", {words}\nprint({words})'
    )
    return marked(check, grade=True, locked=True, points=len(level[1]))


def locked(cell: NotebookNode) -> NotebookNode:
    """A cell that is put back as it was before an answer is marked."""
    return marked(cell, locked=True)


def marked(cell: NotebookNode, **options: bool | int) -> NotebookNode:
    """The cell with what nbgrader wants to know of it, and nothing else."""
    defaults = {"grade": False, "locked": False, "solution": False, "task": False}
    known = {"schema_version": 3, "grade_id": cell.id, "cell_type": "code"}
    cell.metadata = nbformat.from_dict({"nbgrader": defaults | known | options})
    cell.outputs, cell.execution_count = [], None
    return cell


def release(folder: Path) -> None:
    """Let nbgrader make the students' version of what has none."""
    command = [sys.executable, "-m", "nbgrader", "generate_assignment", "--assignment=*"]
    command += [f"--course-dir={folder}", "--log-level=ERROR"]
    # nbgrader calls alembic, which lies beside this Python, by its name alone.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=os.environ | {"PATH": path})
    if done.returncode:
        sys.exit(
            f"{done.stderr}\nhooklab: nbgrader 没能生成学生版，原因见上面几行\n"
            "hooklab: nbgrader could not make the students' version, for the reason above"
        )


def tell(folder: Path, new: list[str]) -> None:
    """What there is now."""
    if new:
        names = ", ".join(new)
        print(f"hooklab: {folder} 里新添的作业：{names}；发给学生的是 release/ 里的。")
        print(f"hooklab: new assignments in {folder}: {names}; hand out those in release/.")
    else:
        print("hooklab: 这些作业已经有了，没有改动；想重新导出，就删掉它在 source/ 和 release/ 里的文件夹。")
        print("hooklab: these assignments were there already and are left alone;")
        print("         to export one again, delete its folders in source/ and release/.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [Path(name) for name in sys.argv[3:]])
