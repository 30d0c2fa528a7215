"""`hooklab assignments`: what the exercises become for nbgrader, and the marks that nbgrader gives."""

import html
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import assignments
import nbformat
import notebook_form
import pytest
from hooklab_desk import command

from hooklab import check, lesson

NOTEBOOKS = notebook_form.paths()
CHOSEN = ["12_changing_gradients", "35_checkpointing"]
# Every notebook is marked in the weekly run; it takes some minutes.
MARKED = [path.stem for path in NOTEBOOKS] if os.environ.get("HOOKLAB_EVERY") == "1" else CHOSEN
EXERCISES = sorted(item.id for item in check.registered() if isinstance(item, check.Exercise))
CHINESE = re.compile(r"[\u4e00-\u9fff]")
DECAY = """\
def decay(model, strength):
    def hook_for(param):
        return lambda grad: grad + strength * param.detach()

    return [param.register_hook(hook_for(param)) for param in model.parameters() if param.requires_grad]
"""
IN_PLACE = """\
def cap(limit):
    def hook(grad):
        if grad.norm() > limit:
            grad *= limit / grad.norm()

    return hook
"""
ENDLESS = "def cap(limit):\n    while True:\n        pass\n"
LOUD = 'def cap(limit):\n    print("too much\\n" * 50_000)\n    return lambda grad: grad * min(1.0, limit / grad.norm())\n'


def by_name(path):
    return path.stem


def sources(notebook, kind):
    """The cells that are graded, or that hold an answer, by their names."""
    return {
        cell.metadata.nbgrader.grade_id: cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.metadata.nbgrader[kind]
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_every_exercise_is_in_the_assignment_and_worth_its_level(path):
    made = assignments.assignment(path, "both")
    nbformat.validate(made)
    points = {
        cell.source.split('"')[1]: cell.metadata.nbgrader.points
        for cell in made.cells
        if cell.metadata.get("nbgrader", {}).get("grade")
    }
    assert list(points) == [name for name in EXERCISES if name.startswith(path.stem[:2])]
    texts = "\n".join(cell.source for cell in made.cells)
    for name, worth in points.items():
        assert f"**{name}** {'●' * worth}{'○' * (3 - worth)} " in texts
    assert all(cell.source.count("### BEGIN SOLUTION") == cell.metadata.nbgrader.solution
               for cell in made.cells if cell.cell_type == "code")  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_an_assignment_in_one_language_has_nothing_of_the_other(path):
    english, chinese = (assignments.assignment(path, language) for language in ("en", "zh"))
    prose = [cell.source for cell in english.cells if cell.cell_type == "markdown"]
    assert len(prose) > 3
    assert [text for text in prose if CHINESE.search(text)] == []
    assert '<div lang="en">' not in "\n".join(cell.source for cell in chinese.cells)
    assert all(CHINESE.search(cell.source) for cell in chinese.cells[:2])
    for notebook, word in ((english, "said.en"), (chinese, "said.zh")):
        assert all(source.endswith(f"print({word})") for source in sources(notebook, "grade").values())


def test_functions_and_classes_that_an_exercise_names_come_along():
    named = {}
    for path in NOTEBOOKS:
        cell = next(cell for cell in assignments.assignment(path, "en").cells if cell.id == "from-the-notebook")
        named[path.stem[:2]] = re.findall(r"^(?:def|class) (\w+)", cell.source, re.MULTILINE)
    assert named["33"] == ["SaveToCpu", "once"]
    assert named["35"] == ["handmade", "buffers_back"]
    assert named["12"] == []


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
@pytest.mark.filterwarnings("ignore")
def test_with_the_solutions_each_assignment_runs_on_its_own(path):
    made, known = assignments.assignment(path, "both"), {"__name__": "__main__", "lesson": lesson}
    for cell in made.cells:
        if cell.cell_type == "code" and cell.id != "setup":  # it sets threads and printing, here those of other tests
            exec(cell.source, known)
    assert known["said"].kind == "right"


@pytest.mark.parametrize("name", ["99", "12_changing.ipynb"])
def test_a_notebook_that_there_is_not_is_named_with_those_that_there_are(name, tmp_path):
    with pytest.raises(SystemExit, match=rf"there is no notebook {name}; .* 00, 11, 12"):
        assignments.main(tmp_path / "homework", "both", ["12", name])
    assert not (tmp_path / "homework").exists()


def test_an_export_that_fails_leaves_no_half_of_an_assignment(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "the database is locked")
    monkeypatch.setattr(assignments.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(SystemExit, match="the database is locked\n.*\n.* could not make the students' version"):
        assignments.main(tmp_path, "both", ["12"])
    assert list((tmp_path / "source").iterdir()) == []


def test_the_command_passes_on_what_it_was_told(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command.subprocess, "call", lambda arguments: calls.append(arguments[1:]) or 7)
    assert command.main(["assignments", "12", "35", "--language=en", f"--folder={tmp_path}"]) == 7
    assert command.main(["assignments"]) == 7
    tool = str(notebook_form.ROOT / "tools/assignments.py")
    assert calls == [[tool, str(tmp_path), "en", "12", "35"], [tool, str(notebook_form.ROOT / "homework"), "both"]]
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.main(["assignments"]) == 1
    assert "run this in a clone of the course" in capsys.readouterr().err


class Course:
    """A course for nbgrader in a folder, with submissions and marks; its kernels keep their progress there, too."""

    def __init__(self, folder, data):
        self.folder, self.data = folder, data

    def run(self, *arguments):
        others = {"JUPYTER_DATA_DIR": str(self.data), "JUPYTER_CONFIG_DIR": str(self.data)}
        # nbgrader calls alembic by its name.
        others["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=self.folder, env=os.environ | others, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def grade(self, name, *options):
        self.run("nbgrader", "autograde", name, *options)
        self.run("nbgrader", "generate_feedback", name, *options)

    def submit(self, student, name, answers):
        """The released notebook, in which the cells with these names hold these answers."""
        notebook = nbformat.read(self.folder / "release" / name / f"{name}.ipynb", as_version=4)
        for cell in notebook.cells:
            cell.source = answers.get(cell.metadata.get("nbgrader", {}).get("grade_id"), cell.source)
        folder = self.folder / "submitted" / student / name
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / f"{name}.ipynb")

    def points(self, student, name):
        """Those of each exercise in turn."""
        from nbgrader.api import Gradebook

        with Gradebook(f"sqlite:///{self.folder / 'gradebook.db'}") as book:
            grades = book.find_submission_notebook(name, name, student).grades
            return [grade.score for grade in sorted(grades, key=lambda grade: grade.name)]

    def feedback(self, student, name):
        """The page as a student reads it, without colours."""
        page = (self.folder / "feedback" / student / name / f"{name}.html").read_text(encoding="utf-8")
        return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    pytest.importorskip("nbgrader", reason="`make test-long` installs what homework needs")
    folder = tmp_path_factory.mktemp("homework")
    made = Course(folder, tmp_path_factory.mktemp("jupyter"))
    said = made.run("hooklab_desk.command", "assignments", f"--folder={folder}", *MARKED)
    assert f"{len(MARKED)} more assignments" in said
    return made


def solutions(name):
    """The answers of the teacher's version."""
    path = notebook_form.NOTEBOOKS / f"{name}.ipynb"
    return sources(assignments.assignment(path, "both"), "solution")


def refusal(exercise, source):
    """What the course says of an answer."""
    known = {}
    exec(source, known)
    said = check.exercise(exercise, known[re.search(r"def (\w+)", source)[1]])
    assert said.kind == "wrong"
    return said


@pytest.mark.long
def test_nbgrader_takes_the_solutions_out_and_locks_the_checks(course):
    for name in MARKED:
        released = nbformat.read(course.folder / "release" / name / f"{name}.ipynb", as_version=4)
        original = {cell.id: cell.source for cell in notebook_form.read(notebook_form.NOTEBOOKS / f"{name}.ipynb").cells}
        for cell, source in sources(released, "solution").items():
            assert source.strip() == original[cell], "the stub of the notebook and nothing else"
        assert [cell.id for cell in released.cells if cell.metadata.get("editable") is False][:2] == [
            "setup", "from-the-notebook",
        ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", MARKED)
def test_the_solutions_get_all_points_and_an_empty_submission_gets_none(course, name):
    course.submit("right", name, solutions(name))
    course.submit("empty", name, {})
    course.grade(name)
    worth = levels(name)
    assert course.points("right", name) == worth
    assert course.points("empty", name) == [0] * len(worth)
    assert "Not attempted yet." in course.feedback("empty", name)
    assert "AssertionError" not in course.feedback("right", name)
    assert not (course.data / "hooklab").exists(), "marking is no progress of anybody"


def levels(name):
    """How many dots each exercise of a notebook has."""
    text = "\n".join(cell.source for cell in notebook_form.read(notebook_form.NOTEBOOKS / f"{name}.ipynb").cells)
    english = re.findall(r'<div lang="en">\s+\*\*\d\d\.[A-Z]\*\* (●+)', text)
    return [len(dots) for dots in english]


@pytest.mark.long
def test_a_wrong_answer_gets_no_points_and_its_refusal_as_feedback(course):
    name = CHOSEN[0]
    tampered = solutions(name) | {"exercise-a-stub": IN_PLACE, "exercise-a-check": "assert True", "exercise-b-stub": DECAY}
    course.submit("wrong", name, tampered)
    course.grade(name, "--student=wrong")
    assert course.points("wrong", name) == [0, 2, 2], "an edited check is put back"
    said, page = refusal("12.A", IN_PLACE), course.feedback("wrong", name)
    assert said.en in page
    assert said.zh in page


@pytest.mark.long
def test_an_answer_that_never_ends_costs_its_own_points_only_and_one_that_prints_much_is_cut_off(course):
    name = CHOSEN[0]
    course.submit("endless", name, solutions(name) | {"exercise-a-stub": ENDLESS})
    course.submit("loud", name, solutions(name) | {"exercise-a-stub": LOUD})
    for student in ("endless", "loud"):
        course.grade(name, f"--student={student}", "--Execute.timeout=30")
    assert course.points("endless", name) == [0, 2, 2]
    assert "CellTimeoutError" in course.feedback("endless", name)
    assert course.points("loud", name) == [1, 2, 2]
    assert 900 < course.feedback("loud", name).count("too much") <= 1000


@pytest.mark.long
def test_what_lies_there_already_is_left_alone(course):
    name = CHOSEN[0]
    page = Path(course.folder, "source", name, f"{name}.ipynb")
    before = page.stat().st_mtime_ns
    said = course.run("hooklab_desk.command", "assignments", f"--folder={course.folder}", name)
    assert "0 more assignments" in said
    assert page.stat().st_mtime_ns == before
