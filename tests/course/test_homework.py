"""From the export to the marks: nbgrader releases the assignments, marks right, wrong and odd submissions, and says why."""

import html
import os
import re
import subprocess
import sys
import sysconfig

import assignments
import browser_lab
import nbformat
import notebook_form
import pytest

from hooklab import check

pytestmark = pytest.mark.long
FIRST = "12_changing_gradients"
# In the weekly run every notebook is marked, which takes some minutes.
MARKED = [FIRST, "35_checkpointing"]
if os.environ.get("HOOKLAB_EVERY") == "1":
    MARKED = [path.stem for path in notebook_form.paths()]
LEVEL = re.compile(r'<div lang="en">\s+\*\*\d\d\.[A-Z]\*\* (●+)')

IN_PLACE = """\
def cap(limit):
    def hook(grad):
        if grad.norm() > limit:
            grad *= limit / grad.norm()

    return hook
"""
DECAY = """\
def decay(model, strength):
    def hook_for(param):
        return lambda grad: grad + strength * param.detach()

    return [param.register_hook(hook_for(param)) for param in model.parameters() if param.requires_grad]
"""
ENDLESS = """\
def cap(limit):
    while True:
        pass
"""
LOUD = """\
def cap(limit):
    print("too much\\n" * 50_000)
    return lambda grad: grad * min(1.0, limit / grad.norm())
"""


class Course:
    """A course for nbgrader in a folder, with submissions and marks. Jupyter keeps what it keeps in `data`."""

    def __init__(self, folder, data):
        self.folder, self.data = folder, data

    def run(self, *arguments):
        others = {"JUPYTER_DATA_DIR": str(self.data), "JUPYTER_CONFIG_DIR": str(self.data)}
        # nbgrader calls alembic by its name.
        others["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=os.environ | others, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, student, name, answers):
        """Hand in the released notebook, with these answers in the cells with these names."""
        notebook = nbformat.read(self.folder / "release" / name / f"{name}.ipynb", as_version=4)
        for cell in notebook.cells:
            cell.source = answers.get(cell.id, cell.source)
        folder = self.folder / "submitted" / student / name
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / f"{name}.ipynb")

    def grade(self, name, *options):
        self.run("nbgrader", "autograde", name, *options)
        self.run("nbgrader", "generate_feedback", name)

    def points(self, student, name):
        """Those of each exercise in turn."""
        from nbgrader.api import Gradebook

        with Gradebook(f"sqlite:///{self.folder / 'gradebook.db'}") as book:
            grades = book.find_submission_notebook(name, name, student).grades
            return [grade.score for grade in sorted(grades, key=lambda grade: grade.name)]

    def feedback(self, student, name):
        """What the student reads."""
        page = (self.folder / "feedback" / student / name / f"{name}.html").read_text(encoding="utf-8")
        return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    pytest.importorskip("nbgrader", reason="`make test-long` installs what homework needs")
    made = Course(tmp_path_factory.mktemp("homework"), tmp_path_factory.mktemp("jupyter"))
    said = made.run("hooklab_desk.command", "assignments", f"--folder={made.folder}", *MARKED)
    assert f"new assignments in {made.folder}: {', '.join(MARKED)}; hand out" in said
    return made


def notebook(name):
    return notebook_form.read(notebook_form.NOTEBOOKS / f"{name}.ipynb")


def solutions(name):
    """The answers of the teacher's version, by the names of their cells."""
    made = assignments.assignment(notebook_form.NOTEBOOKS / f"{name}.ipynb", "both")
    return {cell.id: cell.source for cell in made.cells if cell.metadata.get("nbgrader", {}).get("solution")}


@pytest.mark.parametrize("name", MARKED)
def test_students_get_the_stub_of_the_notebook_and_checks_that_they_cannot_edit(course, name):
    released = nbformat.read(course.folder / "release" / name / f"{name}.ipynb", as_version=4)
    code = {cell.id: cell for cell in released.cells if cell.cell_type == "code"}
    stubs = {cell.id: cell.source for cell in notebook(name).cells if cell.id in solutions(name)}
    assert stubs
    assert {key: code[key].source.strip() for key in stubs} == stubs
    assert {key for key, cell in code.items() if cell.metadata.get("editable", True)} == set(stubs)


@pytest.mark.parametrize("name", MARKED)
def test_the_solutions_get_all_points_and_an_empty_submission_gets_none(course, name):
    course.submit("right", name, solutions(name))
    course.submit("empty", name, {})
    course.grade(name)
    worth = [len(dots) for cell in notebook(name).cells for dots in LEVEL.findall(cell.source)]
    assert len(worth) == len(solutions(name))
    assert course.points("right", name) == worth
    assert course.points("empty", name) == [0] * len(worth)
    assert "AssertionError" not in course.feedback("right", name)
    assert "AssertionError: 还没有作答" in course.feedback("empty", name)
    assert not (course.data / "hooklab").exists(), "marking is nobody's progress"


def test_a_wrong_answer_gets_no_points_and_its_refusal_as_feedback(course):
    known = {}
    exec(IN_PLACE, known)
    refusal = check.exercise("12.A", known["cap"])
    assert refusal.kind == "wrong"
    answers = {"exercise-a-stub": IN_PLACE, "exercise-a-check": "assert True", "exercise-b-stub": DECAY}
    course.submit("wrong", FIRST, answers)
    course.grade(FIRST, "--student=wrong")
    assert course.points("wrong", FIRST) == [0, 2, 0], "an edited check is put back"
    assert f"AssertionError: {refusal}" in course.feedback("wrong", FIRST)
    with browser_lab.browser() as chromium:
        page = chromium.new_page()
        page.context.set_offline(True)  # nbgrader's page asks a content network for MathJax
        page.goto((course.folder / "feedback" / "wrong" / FIRST / f"{FIRST}.html").as_uri())
        assert page.locator("pre", has_text="AssertionError").count() == 2
        cut = "all => all.filter(pre => pre.scrollWidth > pre.clientWidth).map(pre => pre.textContent)"
        assert page.locator("pre").evaluate_all(cut) == [], "a refusal is read without scrolling"


def test_an_answer_that_never_ends_costs_its_own_points_only_and_one_that_prints_much_is_cut_off(course):
    for student, answer in (("endless", ENDLESS), ("loud", LOUD)):
        course.submit(student, FIRST, solutions(FIRST) | {"exercise-a-stub": answer})
    course.grade(FIRST, "--Execute.timeout=30")
    assert course.points("endless", FIRST) == [0, 2, 2]
    assert "CellTimeoutError" in course.feedback("endless", FIRST)
    assert course.points("loud", FIRST) == [1, 2, 2]
    assert 900 < course.feedback("loud", FIRST).count("too much") <= 1010


def test_an_assignment_that_lies_there_is_left_alone(course):
    page = course.folder / "source" / FIRST / f"{FIRST}.ipynb"
    before = page.read_bytes(), page.stat().st_mtime_ns
    said = course.run("hooklab_desk.command", "assignments", f"--folder={course.folder}", "--language=en", FIRST)
    assert "left alone" in said
    assert (page.read_bytes(), page.stat().st_mtime_ns) == before
