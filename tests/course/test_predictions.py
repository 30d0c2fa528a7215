"""A guess is compared by what it means, and answered with what happened and why."""

import ast
from dataclasses import replace

import forked_kernels
import nbformat
import notebook_form
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

from hooklab import check
from hooklab.course.check import Prediction
from hooklab.course.words import FOLDER, notebook_words


@pytest.mark.parametrize(
    ("guess", "actual", "right"),
    [
        (2, 2, True),
        (2.0, torch.tensor(2), True),
        ([1, 2], torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0], True),
        (0.333, torch.tensor([1 / 3]), True),
        (0.3, 1 / 3, False),
        ([1, 2, 3], torch.tensor([1.0, 2.0]), False),
        (float("nan"), torch.tensor(float("nan")), True),
        (2.01, torch.tensor(2), True),
        (0.001, 1 / 1024, True),
        ([0, 0, 0], torch.tensor([1, -1, 1]) / 1024, False),
        ([1, -0.5, 0.01], [1, -0.5, 0.0101], True),
        (0, 1e-5, False),
        (0, 1e-7, True),
        (3, 2, False),
        ("0.0", 0.0, True),
        ("[2, 4]", torch.tensor([2.0, 4.0]), True),
        (torch.tensor(False), False, True),
        (np.bool_(True), True, True),
        (np.float32(2), 2.0, True),
        ("other words", [1.0], False),
        (True, True, True),
        (True, False, False),
        (1, True, False),
        ("true", True, True),
        ("None", None, True),
        (0, None, False),
        (" Tensor Hook ", "tensor hook", True),
        ("hook", "tensor hook", False),
        ({"x", "y"}, {"y", "x"}, True),
        (["X", "y"], {"y", "x"}, True),
        ("x, y", {"y", "x"}, True),
        ("x", {"y", "x"}, False),
        (3, {"y", "x"}, False),
        (["a", "b"], ["a", "b"], True),
        (["b", "a"], ["a", "b"], False),
        (2, ["a", "b"], False),
        (10**400, 1.0, False),
        (object(), 1.0, False),
        ([[1], [2, 3]], 1.0, False),
        ((24, 0), 24_000, True),  # 24,000 without quotes
        ("24,000", 24_000, True),
        ((25, 690, 624), torch.tensor(25_690_624), True),
        ((-4, 0), -4_000.0, True),
        ((25, 0), 24_000, False),
        ([24, 0], 24_000, False),
        ((8, 0), [8, 0], True),
        ("8, 0", [8, 0], True),
        ({"Linear", "Sequential"}, ["Linear", "Sequential"], False),  # a set has no order
        ({"Linear"}, ["Linear"], True),
        ('{"tensor hook"}', {"tensor hook"}, True),
        ("['tensor hook']", {"tensor hook"}, True),
        ("x和y", {"y", "x"}, True),
        ("x and y", {"y", "x"}, True),
        ({"tensor hook"}, "tensor hook", True),
        (["tensor hook"], "Tensor hook", True),
        ({"tensor hook", "pre-hook"}, "tensor hook", False),
    ],
)
def test_a_guess_is_compared_by_its_meaning(guess, actual, right):
    assert check.predict("11.1", guess, actual=actual).kind == ("right" if right else "wrong")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0"), (2.2e-07, "2.2e-07"), (1 / 3, "0.3333"), (float("nan"), "nan"), (torch.tensor([1.0, 2.0]), "[1.0, 2.0]"),
     ({"b", "a"}, "a, b"), (set(), "set()"), (True, "True"), (None, "None"),
     (16384.0, "16384.0"), (9999.6, "10000.0"), (4e6, "4000000.0"), (25000.6, "25000.0"), (1e12, "1e+12")],
)  # fmt: skip
def test_a_value_is_shown_as_one_would_write_it(value, text):
    assert f"it is `{text}`" in check.predict("11.1", "no such thing", actual=value).en


def test_a_missing_guess_is_not_attempted_whatever_happened():
    assert {check.predict("11.1", guess, actual=None).kind for guess in (None, ...)} == {"todo"}


def test_a_wrong_guess_is_shown_beside_what_happened_and_explained():
    assert check.predict("11.4", (25, 0), actual=24_000).en.startswith("You guessed `25000`; it is `24000`.")
    message = check.predict(Prediction("99.4", zh="解释。", en="The reason."), 1, actual=2)
    assert message.en == "You guessed `1`; it is `2`. The reason."
    assert message.zh == "你猜的是 `1`，实际是 `2`。解释。"


GUESSED = Prediction("99.5", zh="解释。", en="The reason.", guesses=[
    {"guess": 4, "zh": "多数了一次。", "en": "That counts one too many."},
    {"guess": [1.0, 2.0], "zh": "没有乘。", "en": "That is without the factor."},
])  # fmt: skip


@pytest.mark.parametrize("guess", [4, "4", "四", "4 times"])
def test_a_wrong_guess_that_people_have_gets_a_sentence_of_its_own(guess):
    message = check.predict(GUESSED, guess, actual=3)
    assert message.reason == "named"
    assert message.en.endswith("it is `3`. That counts one too many. The reason.")
    assert message.zh.endswith("实际是 `3`。多数了一次。解释。")


def test_any_other_wrong_guess_gets_the_explanation_alone():
    assert check.predict(GUESSED, 5, actual=3).en == "You guessed `5`; it is `3`. The reason."
    assert check.predict(GUESSED, [1, 2], actual=[3.0, 6.0]).reason == "named"


@pytest.mark.parametrize("guess", [{"b", "a"}, ["b", "a"], "b, a"])
def test_a_named_guess_stands_for_a_set_where_names_were_asked_for(guess):
    words = [{"guess": ["a", "b"], "zh": "少了一个。", "en": "One is missing."}]
    names = Prediction("99.8", zh="解释。", en="The reason.", guesses=words)
    assert check.predict(names, guess, actual={"a", "b", "c"}).reason == "named"
    assert check.predict(names, {"a"}, actual={"a", "b", "c"}).reason == "other"


def test_a_right_guess_is_right_although_it_is_named_as_a_wrong_one():
    assert check.predict(replace(GUESSED, id="99.6"), 4, actual=4).en == "Right. The reason."


@pytest.mark.parametrize("guess", [100, "100", "100%", 97.9])
def test_a_near_miss_counts_where_the_understanding_is_right(guess):
    near = Prediction("99.7", zh="解释。", en="The reason.", near=1.5)
    assert check.predict(near, guess, actual=99).en == "Near enough: it is `99`. The reason."
    assert check.predict(near, 97, actual=99).kind == "wrong"
    assert check.predict(near, True, actual=1).kind == "wrong"


PREDICTIONS = [
    (path.name, name, table)
    for path in sorted(FOLDER.glob("n*.toml"))
    for name, table in notebook_words(path.name[1:3]).items()
    if "zh" in table
]


@pytest.mark.parametrize(
    ("file", "name", "table"), PREDICTIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_prediction_has_an_explanation_in_both_languages_and_named_guesses_have_theirs(file, name, table):
    assert name.startswith(f"{file[1:3]}.")
    assert set(table) <= {"zh", "en", "guesses", "near"}
    assert 1 <= len(table["guesses"]) <= 3
    for words in (table, *table["guesses"]):
        assert words["zh"].strip()
        assert words["en"].strip()
    assert all(set(guess) == {"guess", "zh", "en"} for guess in table["guesses"])
    assert len({guess["en"] for guess in table["guesses"]}) == len(table["guesses"])


@pytest.mark.long
@pytest.mark.parametrize("path", notebook_form.paths(), ids=lambda path: path.stem)
def test_every_named_guess_is_answered_with_its_own_sentence(path):
    """Runs the notebook, and puts each named guess in place of the learner's."""
    notebook = notebook_form.read(path)
    asked = [cell for cell in notebook.cells if cell.cell_type == "code" and "check.predict(" in cell.source]
    for cell in asked:
        cell.source = cell.source.replace("check.predict(", "check.predict_each(")
    setting = nbformat.v4.new_code_cell(
        "from hooklab import check\n"
        "def predict_each(which, guess, *, actual):\n"
        "    named = check.find(which, check.Prediction).guesses\n"
        "    said = [check.predict(which, one['guess'], actual=actual) for one in named]\n"
        "    print([one.reason == 'named' and one.en.find(each['en']) > 0 for one, each in zip(said, named)])\n"
        "check.predict_each = predict_each"
    )
    notebook.cells.insert(0, setting)
    NotebookClient(
        notebook,
        kernel_name=forked_kernels.NAME,
        startup_timeout=300,
        timeout=120,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    for cell in asked:
        (printed,) = [
            output.text for output in cell.outputs if output.output_type == "stream" and output.text[0] == "["
        ]
        assert set(ast.literal_eval(printed)) == {True}, (cell.source, printed)
