"""QUESTIONS.md and QUESTIONS.zh-CN.md: what people ask, and a section for each that answers it."""

import re

import notebook_form
import pytest
import questions
from prose_rules import HAN, SPAN

GROUPS = questions.groups()
ROWS = [question for _, rows in GROUPS for question in rows]
LINKS = re.compile(r"\]\((notebooks/\w+\.ipynb#cell-id=[\w-]+)\)")


def name_of(question):
    return f"{question.stem}-{question.cell_id}-{question.asked['en'][:40]}"


@pytest.mark.parametrize("language", questions.PATHS)
def test_a_page_of_questions_is_up_to_date(language):
    assert questions.PATHS[language].read_text(encoding="utf-8") == questions.page(language), "run `make refresh`"


def test_there_are_at_least_120_questions_in_seven_groups_and_none_twice():
    assert [name["en"] for name, _ in GROUPS] == [
        "By the text of the error", "The hook is never called", "The value is wrong", "Memory", "Removing and saving",
        "Speed", "How do I …",
    ]  # fmt: skip
    assert len(ROWS) >= 120
    assert all(len(rows) >= 8 for _, rows in GROUPS)
    for language in questions.PATHS:
        asked = [(question.error, question.asked[language]) for question in ROWS]
        assert len(asked) == len(set(asked))


@pytest.mark.parametrize("question", ROWS, ids=name_of)
def test_a_question_is_the_same_in_both_languages_and_leads_to_a_heading(question):
    zh, en = question.asked["zh"], question.asked["en"]
    assert HAN.search(zh)
    assert not HAN.search(en)
    assert re.search(r"[？。]$", zh)
    assert re.search(r"[?.]$", en)
    assert sorted(SPAN.findall(zh)) == sorted(SPAN.findall(en))
    assert not re.search(r"[\u4e00-\u9fff][,;:!?(]", SPAN.sub("码", zh)), "full-width punctuation after Chinese"
    assert not HAN.search(question.heading("en"))
    assert HAN.search(question.heading("zh"))
    assert question.heading("en")[:2] == question.heading("zh")[:2] == question.stem[:2]


@pytest.mark.parametrize("question", [question for question in ROWS if question.error], ids=name_of)
def test_a_quoted_error_is_printed_in_the_section_that_answers_it(question):
    assert questions.in_one_line(question.error) in question.outputs()


def test_every_notebook_answers_a_question():
    assert {question.stem for question in ROWS} == {path.stem for path in notebook_form.paths()}


def test_every_error_that_a_section_raises_on_purpose_can_be_looked_up():
    """Apart from names that a source forgot to define, and hooklab's own errors, which say what to do."""
    looked_up = {(question.stem, question.cell_id) for question in ROWS if question.error}
    missing = []
    for path in notebook_form.paths():
        section = ""
        for cell in notebook_form.cells(notebook_form.read(path)):
            if not cell.is_code and questions.HEADING.match(cell.source):
                section = cell.id
            names = {output.ename for output in cell.outputs if output.output_type == "error"}
            if names - {"NameError", "HookLeak", "KeyError"} and (path.stem, section) not in looked_up:
                missing.append((path.stem, section, *names))
    assert missing == []


def test_both_pages_lead_to_the_same_sections_in_the_same_order():
    pages = [LINKS.findall(questions.page(language)) for language in questions.PATHS]
    assert pages[0] == pages[1]
    assert len(pages[0]) == len(ROWS)


def test_a_question_that_leads_nowhere_is_named():
    question = questions.Question({"zh": "为什么？", "en": "Why?"}, "11_reading_gradients", "no-such-cell", None)
    with pytest.raises(ValueError, match=r"no heading has the id 'no-such-cell' in 11_reading_gradients.*Why\?"):
        question.heading("en")
