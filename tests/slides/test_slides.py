"""What stands on which slide, before a browser cuts what is too long."""

import html
import re
import subprocess
from itertools import pairwise

import decks
import nbformat
import notebook_form
import pytest
from shown_code import ShownCode

from hooklab import check

FIRST = notebook_form.NOTEBOOKS / "11_reading_gradients.ipynb"
LONG = [pytest.param(path, marks=pytest.mark.long) for path in notebook_form.paths() if path != FIRST]
PATHS = pytest.mark.parametrize("path", [FIRST, *LONG], ids=lambda path: path.stem)
LANGUAGES = pytest.mark.parametrize("language", ["zh", "en"])


def plain(pieces):
    """What is read of HTML, without white space."""
    return dense(html.unescape(re.sub("<[^>]+>", "", "".join(pieces))))


def dense(text):
    return re.sub(r"[\s\xa0`$]", "", text)


def all_slides(path, language, names=frozenset()):
    return [slide for column in decks.deck(path, language, names).columns for slide in column]


@LANGUAGES
@PATHS
def test_a_question_stands_with_its_code_and_the_next_slide_has_output_and_explanation(path, language):
    cells, made, answered = nbformat.read(path, as_version=4).cells, all_slides(path, language), 0
    for question, answer in pairwise(made):
        if not question.question:
            continue
        answered += 1
        assert re.search("先猜|Predict", question.question[0])
        assert "pre class" in "".join(question.question)
        assert 'class="explanation"' in "".join(answer.pieces)
        asked = [cell.id for cell in cells].index(question.id)
        begin, end = (
            next(index for index in range(asked, len(cells)) if re.match(pattern, cells[index].source))
            for pattern in (r"guess\w* = None", r"(?s).*check\.predict\(")
        )
        prediction = check.find(re.search(r'predict\(\s*"([^"]+)"', cells[end].source)[1], check.Prediction)
        assert dense(getattr(prediction, language)) in plain(answer.pieces)
        for output in (output for cell in cells[begin : end + 1] for output in cell.get("outputs", ())):
            if output.output_type == "stream":
                assert dense(output.text) in plain(answer.pieces)
    assert answered == sum("predict" in cell.metadata.get("tags", ()) for cell in cells) > 0


@LANGUAGES
@PATHS
def test_nothing_on_a_slide_is_for_somebody_at_a_keyboard(path, language):
    made = all_slides(path, language)
    shown = "".join(piece for slide in made for piece in slide.pieces + slide.question)
    text = re.sub("<[^>]+>", "", shown)
    for out in (
        "check.predict(",
        "check.exercise(",
        "lesson.start()",
        "guess = None",
        "hooklab-todo",
        "参考答案",
        "Solution",
    ):
        assert out not in text, out
    assert not re.search(r"\$[^$\n]+\$", re.sub("(?s)<pre.*?</pre>|<code>.*?</code>", "", shown)), "a formula as text"
    assert all(slide.pieces or slide.question for slide in made)
    prose = re.sub("(?s)<pre.*?</pre>|<code>.*?</code>|<img[^>]*>", "", shown)
    assert bool(re.search("[一-鿿]", prose)) == (language == "zh")


def notebook_of(*cells):
    """A notebook of cells of code, and of prose where a cell begins with a hash and a blank."""
    new = (nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell)
    return nbformat.v4.new_notebook(cells=[new[not cell.startswith("# ")](cell) for cell in cells])


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("x = 1\nassert x == 1\nprint(x)", "x = 1\nprint(x)"),
        ("x = 1\n# one\n# and only one\nassert (\n    x == 1\n)", "x = 1"),
        ("for x in y:\n    assert x\nz = 1", "z = 1"),
        ("for x in y:\n    assert x\n    print(x)", "for x in y:\n    print(x)"),
        ("from hooklab import check\n\ncheck.predict(\n    '1.1', guess, actual=x\n)", ""),
        ("from hooklab import check, draw\ncheck.exercise('1.A', f)", "from hooklab import check, draw"),
        ("assert told(1) == told(2) and x", "told(1)\ntold(2)"),
        ("import torch\n\n\ndef f():\n    pass", "import torch\n\ndef f():\n    pass"),
        ("%pip install x\nassert x", "%pip install x\nassert x"),
    ],
)
def test_code_is_shown_without_checks_and_assertions(source, shown):
    notebook = notebook_of("def told(x):\n    print(x)\n    return x", source)
    assert ShownCode(notebook)(notebook.cells[1]) == shown


def test_assertions_stay_beside_prose_that_speaks_of_them():
    notebook = notebook_of("assert 1", "# 这条断言 · this assertion", "assert 2", "# 别的 · something else", "assert 3")
    shown = ShownCode(notebook)
    assert [shown(cell) for cell in notebook.cells if cell.cell_type == "code"] == ["assert 1", "assert 2", ""]


def test_what_a_teacher_wrote_is_on_the_slides_of_its_section_and_beside_its_question(monkeypatch, tmp_path):
    (tmp_path / "11_reading_gradients.yml").write_text(
        "sections:\n  leaves: {zh: 叶子从哪来, en: where leaves come from}\n"
        'wrong:\n  - {of: "11.2 detached", zh: 以为是真, en: they say `True`}\n'
        "  - {of: 11.B, zh: 忘了复制, en: no copy}\n"
        "draw: {zh: 画三个圈, en: draw three circles}\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(decks, "NOTES", tmp_path)
    decks.notes.cache_clear()
    try:
        columns = decks.deck(FIRST, "en", set()).columns
    finally:
        decks.notes.cache_clear()
    said = {slide.id: plain(slide.notes) for column in columns for slide in column}
    assert said["title"] == "drawthreecircles"
    (leaves,) = (column for column in columns if column[0].id == "leaves")
    assert all("whereleavescomefrom" in said[slide.id] for slide in leaves)
    assert [slide.id for slide in leaves if "theysayTrue" in said[slide.id]] == [
        "leaves-guess-text",
        "leaves-guess-text-answer",
    ]
    assert "nocopy" in said["exercise-b"]
    assert not any("whereleaves" in said[column[0].id] for column in columns if column is not leaves)


def test_what_a_guess_held_back_is_shown_though_no_check_follows(tmp_path):
    path = tmp_path / "mine.ipynb"
    notebook = notebook_of("# Mine", "# Question\n\n**Predict**: one?", "guess = None", "print(1)", "# Next")
    notebook.cells[3].outputs = [nbformat.v4.new_output("stream", text="eleven\n")]
    notebook.cells[4].metadata["slideshow"] = {"slide_type": "slide"}
    nbformat.write(notebook, path)
    question, answer, following = all_slides(path, "en")[-3:]
    assert "print(1)" in plain(question.question)
    assert plain(answer.pieces) == "eleven"
    assert plain(following.pieces) == "Next"


def test_a_link_leads_to_other_slides_or_is_words():
    title = "".join(all_slides(FIRST, "en", {"12_changing_gradients"})[0].pieces)
    assert '<a href="12_changing_gradients.en.html">12 Changing gradients</a>' in title
    assert "00 Start here" in title
    assert "00_start_here" not in title


def test_a_long_name_may_break_at_dots_and_underscores_and_a_number_may_not():
    from pieces import breakable

    assert (
        breakable("torch.autograd.saved_tensors 0.25 1_000") == "torch.<wbr>autograd.<wbr>saved_<wbr>tensors 0.25 1_000"
    )


def test_without_npm_or_where_it_fails_nothing_is_left_behind(builder, monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "TARGET", tmp_path / "slides")
    monkeypatch.setattr(builder.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"没有找到 npm[\s\S]*npm was not found") as end:
        builder.main("both", [FIRST])
    assert "Install Node.js" in end.value.code
    monkeypatch.setattr(builder.shutil, "which", lambda name: name)
    failed = subprocess.CompletedProcess([], 1, "", "npm error code ENOTFOUND\n")
    monkeypatch.setattr(builder.subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(SystemExit, match=r"npm 没有取到 reveal\.js[\s\S]*ENOTFOUND"):
        builder.main("both", [FIRST])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_in_it_is_left_alone(builder, monkeypatch, tmp_path):
    (tmp_path / "mine.txt").write_text("my own")
    monkeypatch.setattr(builder, "TARGET", tmp_path)
    with pytest.raises(SystemExit, match="holds something else"):
        builder.main("both", [FIRST])
    assert (tmp_path / "mine.txt").read_text() == "my own"
