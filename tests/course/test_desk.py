"""What a learner has on the desk: hints, guesses that belong to their question, and progress that is kept."""

import json
import os
import re

import forked_kernels
import nbformat
import outline
import pytest
from nbclient import NotebookClient

from hooklab import check
from hooklab.course import progress
from hooklab.course.check import Exercise, refuse

SET_UP = """import os
os.environ["JUPYTER_DATA_DIR"] = {folder!r}
from hooklab import check, lesson
lesson.start()"""
HINTS = [{"zh": "看第 1 节。", "en": "See section 1."}, {"zh": "用 `clone`。", "en": "Use `clone`."}]


@pytest.fixture
def learn(tmp_path):
    """Runs cells in a kernel of its own, one after the other; returns what each says in English."""

    def run(*sources):
        cells = [nbformat.v4.new_code_cell(source) for source in (SET_UP.format(folder=str(tmp_path)), *sources)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        NotebookClient(notebook, kernel_name=forked_kernels.NAME, allow_errors=True, timeout=60).execute()
        return [said(cell) for cell in notebook.cells[1:]]

    return run


def said(cell):
    texts = [output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result"]
    return texts[-1].partition("\n")[2] if texts else ""


def kept(folder):
    return json.loads((folder / "hooklab" / "progress.json").read_text(encoding="utf-8"))


# ---- progress ----


def test_what_is_done_is_kept_and_a_step_back_is_no_news(learn, tmp_path):
    learn(
        "check.predict('00.1', 1, actual=1)",
        "check.predict('00.2', None, actual=1)",
        "check.exercise('00.A', lambda grad: grad)",
        "check.exercise('00.B', lambda model, name, x: ...)",
        "check.exercise('12.A', check.find('12.A', check.Exercise).solution)",
        "check.exercise('12.A', lambda limit: 3)",
    )
    assert kept(tmp_path) == {"00.1": "done", "00.A": "tried", "12.A": "done"}


def test_progress_is_a_table_in_both_languages(learn, tmp_path, monkeypatch):
    learn("check.predict('00.1', 1, actual=1)", "check.exercise('00.A', lambda grad: grad / 2)")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    shown = check.progress()
    assert re.search(r"00 Start here +1 / 2 +1 / 2", repr(shown))
    assert "<td style=text-align:left>00 从这里开始</td><td>1 / 2</td><td>1 / 2</td>" in shown._repr_html_()
    progress.forget()
    assert progress.done() == {}
    progress.forget()


def test_tests_and_scripts_keep_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    check.exercise("00.A", lambda grad: grad / 2)
    check.predict("00.1", 1, actual=1)
    assert not os.listdir(tmp_path)


def test_homework_that_is_marked_is_nobodys_progress(learn, tmp_path):
    answer = "check.exercise('00.A', lambda grad: grad / 2)"
    (message,) = learn(f"os.environ['NBGRADER_EXECUTION'] = 'autograde'\n{answer}")
    assert message.startswith("Right.")
    assert not (tmp_path / "hooklab").exists()
    learn(answer)
    assert kept(tmp_path) == {"00.A": "done"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"00.A": 3}', "null"])
def test_a_damaged_file_counts_as_nothing_done(learn, tmp_path, content):
    (tmp_path / "hooklab").mkdir()
    (tmp_path / "hooklab" / "progress.json").write_text(content)
    learn("check.predict('00.1', 1, actual=1)")
    assert kept(tmp_path) == {"00.1": "done"}


def test_a_folder_that_cannot_be_written_stops_no_check(learn, tmp_path):
    (tmp_path / "hooklab").write_text("a file in its place")
    (message,) = learn("check.predict('00.1', 1, actual=1)")
    assert message.startswith("Right.")


def test_the_outline_is_that_of_the_notebooks():
    assert outline.PATH.read_text(encoding="utf-8") == outline.outline(), "run tools/refresh.py"


# ---- guesses ----


def test_a_guess_whose_cell_raised_is_not_judged(learn):
    *_, stale, mended = learn(
        "guess = 1", "check.predict('00.1', guess, actual=1)",
        "guess = unknown", "check.predict('00.2', guess, actual=1)",
        "guess = 1\ncheck.predict('00.2', guess, actual=1)",
    )  # fmt: skip
    assert stale.startswith("`guess` is an older one")
    assert mended.startswith("Right."), "a guess and its question may stand in one cell"


def test_without_the_set_up_cell_every_guess_counts(tmp_path):
    """Nobody follows the cells there, so nobody may say that one has not run."""
    sources = ("from hooklab import check", "guess = 1", "check.predict('00.1', guess, actual=1)", "guess = 2",
               "check.predict('00.2', guess, actual=2)")  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, kernel_name=forked_kernels.NAME, timeout=60).execute()
    assert [said(notebook.cells[number])[:6] for number in (2, 4)] == ["Right."] * 2


def test_a_guess_for_another_question_is_not_judged(learn):
    _, first, again, other, written, _, own = learn(
        "guess = 1",
        "check.predict('00.1', guess, actual=1)",
        "check.predict('00.1', guess, actual=1)",
        "check.predict('00.2', guess, actual=1)",
        "check.predict('00.2', [999_999], actual=999_999)",
        "guess = 2",
        "check.predict('00.2', guess, actual=2)",
    )
    assert first == again
    assert first.startswith("Right.")
    assert other.startswith("`guess` is an older one")
    assert written.startswith("Right."), "a guess that is written into the call is judged"
    assert own.startswith("Right.")


# ---- hints ----


@pytest.fixture
def hinted():
    def examine(answer):
        refuse("wrong")

    words = {"wrong": {"zh": "不对。", "en": "No."}, "right": {"zh": "好", "en": "Good."}, "hints": HINTS}
    task = Exercise("99.H", examine, lambda x: x, words)
    check._given.clear()
    check._refusals.clear()
    return task


def test_hints_come_one_by_one_and_end(hinted):
    texts = [check.hint(hinted).en for _ in range(4)]
    assert texts[:2] == ["Hint 1/2: See section 1.", "Hint 2/2: Use `clone`."]
    assert texts[2] == texts[3] == "That was the last hint. The solution is folded below the exercise."


def test_a_hint_is_offered_after_the_second_wrong_answer(hinted, monkeypatch):
    monkeypatch.setattr(progress, "in_kernel", lambda: True)
    first, second = (check.exercise(hinted, lambda x: x + 1) for _ in range(2))
    assert first.en == "Not yet. No."
    assert second.en == 'Not yet. No.\nStuck? Run `check.hint("99.H")` for a hint.'
    assert second.zh.endswith('要提示吗？运行 `check.hint("99.H")`。')
    check.hint(hinted)
    check.hint(hinted)
    assert check.exercise(hinted, lambda x: x + 1).en == "Not yet. No.", "all have been given"


def test_an_unknown_id_has_no_hint():
    with pytest.raises(KeyError, match=r"no exercise has the id '99\.Z'"):
        check.hint("99.Z")
