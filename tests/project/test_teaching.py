"""docs/teaching/: the teacher's notes on the notebooks, and the plans of 'Teach it'."""

import re
from types import SimpleNamespace

import notebook_form
import prose_rules
import pytest
import sections
import teaching
import teaching_plans
import torch
from nbformat import v4
from torch import nn

LESSON = 40  # of 45 minutes; the rest goes to questions
RULES = [getattr(prose_rules, name) for name in (
    "two_languages", "punctuation", "length", "same_spans", "same_numbers", "same_links", "same_shape",
    "names_of_the_package", "natural_english", "named_sources", "references", "glossary",
)]  # fmt: skip
PAGES = teaching.pages() | teaching_plans.pages()
CLASSES = [one for plan in teaching_plans.plans() for one in plan.get("classes", ())]


def entries(part, where=""):
    """Whatever is written in both languages in `part`, with the place where it stands."""
    if isinstance(part, dict):
        if "zh" in part or "en" in part:
            yield where, part
        part = {key: value for key, value in part.items() if key not in ("zh", "en")}
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        yield from entries(value, f"{where}.{key}".lstrip("."))


def as_cells(part):
    """For the rules of prose: a cell for each entry, in a notebook where every term has been introduced."""
    half, cells = '<div lang="{}">\n\n{}\n\n</div>', []
    for where, text in entries(part):
        node = v4.new_markdown_cell("\n\n".join(half.format(key, text[key].strip()) for key in ("zh", "en")))
        node.id = where
        cells.append(notebook_form.Cell(node, len(cells)))
    return SimpleNamespace(stem="99", cells=cells)


def problems(notebook):
    return "\n".join(problem for rule in RULES for problem in rule(notebook))


def each_notes(test):
    return pytest.mark.parametrize("stem", teaching.stems())(test)


def test_the_pages_are_up_to_date_and_no_other_lies_beside_them():
    stale = [page.name for page, text in PAGES.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make refresh`"
    assert set(teaching.FOLDER.glob("*.md")) == set(PAGES)
    assert len(teaching.stems()) >= 2


@each_notes
def test_notes_have_the_parts_that_a_teacher_looks_for_in_both_languages(stem):
    text = teaching.notes(stem)
    assert set(text) == {"sections", "wrong", "draw", "leave_out", "exam"}
    assert len(text["sections"]) >= 5, "what to say in a section"
    assert len(text["wrong"]) >= 3
    assert text["leave_out"]["sections"]
    named = [one["of"] for one in text["wrong"] if teaching.said(stem, one["of"])]
    assert len(named) >= 2, "wrong answers that a check knows"
    assert [set(one) for one in text["exam"]] == [{"question", "answer", "proof"}] * 2
    assert all({"zh", "en"} <= set(both) for _, both in entries(text))


@each_notes
def test_notes_say_the_same_in_both_languages_and_in_the_words_of_the_course(stem):
    cells = as_cells(teaching.notes(stem))
    assert len(cells.cells) > 10
    assert not (found := problems(cells)), found


@each_notes
def test_notes_fit_on_two_sheets_of_paper(stem):
    written = [both for _, both in entries(teaching.notes(stem))]
    words, characters = (
        len(re.findall(pattern, prose_rules.FENCE.sub("", " ".join(both[language] for both in written))))
        for language, pattern in (("en", r"[A-Za-z0-9'’]+"), ("zh", prose_rules.HAN))
    )
    assert words <= 640
    assert characters <= 780


@each_notes
def test_the_clock_counts_the_minutes_of_the_notebook_and_a_lesson_has_room_for_questions(stem):
    listed = list(sections.sections(stem).values())
    rows = re.findall(r"^\| (\d):(\d\d) \| .+ \| (\d*) \| .*\|$", PAGES[teaching.FOLDER / f"{stem}.md"], re.MULTILINE)
    ends = [60 * int(hour) + int(minute) + int(minutes or 0) for hour, minute, minutes in rows]
    assert ends[-1] == int(re.search(r"About (\d+) minutes", listed[0].source)[1])
    left = sections.chosen(stem, teaching.notes(stem)["leave_out"]["sections"], stem)
    assert sum(sections.time([one for one in listed if one not in left])) <= LESSON


@each_notes
def test_the_answers_of_the_exam_are_true(stem):
    """The code of the question runs, then the proof, which asserts what the answer says."""
    for one in teaching.notes(stem)["exam"]:
        assert "assert " in one["proof"]
        names = {"torch": torch, "nn": nn}
        for code in re.findall(r"```python\n(.*?)```", one["question"]["en"], re.DOTALL):
            exec(code, names)
        exec(one["proof"], names)


def wrong(of):
    return {"wrong": [{"of": of, "zh": "", "en": ""}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sections": {"leafs": {}}}, "no heading of 11_reading_gradients has the id 'leafs'; it has title, where"),
        ({"leave_out": {"sections": ["leafs"]}}, "no heading of 11_reading_gradients has the id 'leafs'"),
        (wrong("11.9 True"), "no question or exercise of this notebook is called '11.9'"),
        (wrong("12.1 2"), "no question or exercise of this notebook is called '12.1'"),
        (wrong("11.2 False"), "11.2 has no 'False'; it has True"),
        (wrong("11.A detatched"), "11.A has no 'detatched'; it has .*left_behind"),
    ],
)
def test_what_is_not_in_the_notebook_is_named(change, said, monkeypatch):
    text = teaching.notes("11_reading_gradients") | change
    monkeypatch.setattr(teaching, "notes", lambda stem: text)
    with pytest.raises(ValueError, match=said):
        teaching.page("11_reading_gradients", "en")


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: f"{one['title']['en']}-{one['minutes']}")
def test_a_class_of_a_plan_fits_into_its_time(one):
    assert 0 < teaching_plans.planned(one) <= one["minutes"] - 4


def test_the_plans_are_a_lecture_a_day_and_four_weeks_and_say_the_same_in_both_languages():
    sizes = [len(plan["classes"]) for plan in teaching_plans.plans() if "classes" in plan]
    assert sizes == [1, 4, 8]
    assert not (found := problems(as_cells(teaching_plans.plans()))), found
    link = re.compile(r"notebooks/(\w+\.ipynb(?:#cell-id=[\w-]+)?)")
    links = [link.findall(text) for text in teaching_plans.pages().values()]
    assert links[0] == links[1]
    assert len(links[0]) > 50


def test_a_plan_with_a_notebook_that_is_not_there_says_so():
    with pytest.raises(ValueError, match="no notebook has the number '99'"):
        teaching_plans.taught("99")
