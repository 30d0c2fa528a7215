"""`hooklab assignments`: what the exercises of a notebook become for nbgrader (test_homework.py has nbgrader mark them)."""

import re
import subprocess
from pathlib import Path

import assignments
import nbformat
import notebook_form
import pytest
from hooklab_desk import command

from hooklab import check, lesson

NOTEBOOKS = notebook_form.paths()
EXERCISES = sorted(item.id for item in check.registered() if isinstance(item, check.Exercise))
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def by_name(path):
    return path.stem


def checks(notebook):
    """The cells that are worth points."""
    return [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_every_exercise_is_in_the_assignment_and_worth_its_level(path):
    made = assignments.assignment(path, "both")
    nbformat.validate(made)
    points = {cell.source.split('"')[1]: cell.metadata.nbgrader.points for cell in checks(made)}
    assert list(points) == [name for name in EXERCISES if name.startswith(path.stem[:2])]
    texts = "\n".join(cell.source for cell in made.cells)
    for name, worth in points.items():
        assert f"**{name}** {'●' * worth}{'○' * (3 - worth)} " in texts
    assert texts.count("### BEGIN SOLUTION") == texts.count("### END SOLUTION") == len(points)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_an_assignment_in_one_language_has_nothing_of_the_other(path):
    english, chinese = (assignments.assignment(path, language) for language in ("en", "zh"))
    prose = [cell.source for cell in english.cells if cell.cell_type == "markdown"]
    assert len(prose) > 3
    assert [text for text in prose if CHINESE.search(text)] == []
    assert '<div lang="en">' not in "\n".join(cell.source for cell in chinese.cells)
    assert all(CHINESE.search(cell.source) for cell in chinese.cells[:2])
    for notebook, word in ((english, "said.en"), (chinese, "said.zh")):
        assert all(cell.source.endswith(f"print({word})") for cell in checks(notebook))


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


def test_an_export_that_fails_leaves_no_half_of_an_assignment(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "the database is locked")
    monkeypatch.setattr(assignments.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(SystemExit, match=r"the database is locked\n.*\n.* could not make the students' version"):
        assignments.main(tmp_path, "both", NOTEBOOKS[2:3])
    assert list((tmp_path / "source").iterdir()) == []


def test_the_command_passes_on_what_it_was_told(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command.subprocess, "call", lambda arguments: calls.append(arguments[1:]) or 7)
    assert command.main(["assignments", "12", "35", "--language=en", f"--folder={tmp_path}"]) == 7
    assert command.main(["assignments"]) == 7
    tool = str(notebook_form.ROOT / "tools/assignments.py")
    assert calls[0][:3] == [tool, str(tmp_path), "en"]
    assert [Path(name).stem[:2] for name in calls[0][3:]] == ["12", "35"]
    assert calls[1] == [tool, str(notebook_form.ROOT / "homework"), "both", *map(str, NOTEBOOKS)]
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.main(["assignments"]) == 1
    assert "run this in a clone of the course" in capsys.readouterr().err
