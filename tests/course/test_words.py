"""What the checks say: both languages hold the same keys and facts, and nothing that nobody says."""

import re
import string

import pytest
import torch
from answers import WRONG
from prose_rules import ODD

from hooklab.course.words import FOLDER, LANGUAGES, Phrase, notebook_words, say, shared_words

FILES = sorted(path.stem for path in FOLDER.glob("n*.toml"))
HAN = re.compile(r"[\u4e00-\u9fff]")


def entries(table, path=()):
    """(key, {language: template}) of a table, whatever tables lie in it."""
    for key, value in table.items():
        if isinstance(value, dict) and set(value) & set(LANGUAGES):
            yield ".".join((*path, key)), value
        elif isinstance(value, dict):
            yield from entries(value, (*path, key))


def tables(stem):
    return shared_words() if stem == "shared" else notebook_words(stem[1:3])


def facts(template):
    """What a template names: {"norm:.4g", "got!t"}; `What` is `what` at the beginning of a sentence."""
    parts = string.Formatter().parse(template)
    named = [(name, conversion, spec) for _, name, spec, conversion in parts if name is not None]
    return {(name[0].lower() + name[1:], conversion, spec) for name, conversion, spec in named}


@pytest.mark.parametrize("stem", [*FILES, "shared"])
def test_both_languages_have_the_same_keys_and_the_same_facts(stem):
    found = list(entries(tables(stem)))
    assert found
    for key, words in found:
        assert set(words) - {"guesses", "near"} == set(LANGUAGES), key
        assert facts(words["zh"]) == facts(words["en"]), key
        assert HAN.search(words["zh"]) or words["zh"].strip() == words["en"].strip(), key
        assert not HAN.search(words["en"]), key


def english(table):
    """All that a table says in English, guesses and hints included."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        if isinstance(value, dict | list):
            yield from english(value)
        elif key == "en":
            yield re.sub(r"`[^`]*`|{[^}]*}", "", value)


@pytest.mark.parametrize("stem", [*FILES, "shared"])
def test_messages_are_natural_english(stem):
    odd = re.compile(rf"\b(?:{'|'.join(ODD)})", re.IGNORECASE)
    assert [text for text in english(tables(stem)) if odd.search(text)] == []


@pytest.mark.parametrize("stem", FILES)
def test_every_refusal_has_a_wrong_answer(stem):
    number = stem[1:3]
    for name, table in notebook_words(number).items():
        exercises = [name] if name in WRONG else [exercise for exercise in WRONG if exercise[:2] == number]
        shown = {reason for exercise in exercises for reason in WRONG[exercise]}
        keys = {key.partition("-")[0] for key in table} - {"right", "phrases", "zh", "en", "guesses", "near", "hints"}
        assert keys <= shown, name


@pytest.mark.parametrize("exercise", WRONG)
def test_every_exercise_has_two_hints_in_both_languages(exercise):
    hints = notebook_words(exercise[:2])[exercise]["hints"]
    assert len(hints) == 2
    for hint in hints:
        assert set(hint) == set(LANGUAGES)
        assert HAN.search(hint["zh"])
        assert not HAN.search(hint["en"])
        assert set(re.findall(r"`[^`]+`", hint["zh"])) == set(re.findall(r"`[^`]+`", hint["en"]))


@pytest.mark.parametrize("stem", [*FILES, "shared"])
def test_every_phrase_is_said_somewhere(stem):
    code = "".join(
        path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py" if stem == "shared" else f"{stem[:3]}*.py")
    )
    code += "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.glob("*.py"))
    for key, _ in entries(tables(stem)):
        *_, name = key.split(".")
        assert f'"{name}"' in code or "phrases" not in key, key


def test_no_check_has_words_of_its_own():
    """A translator finds every sentence in the TOML files."""
    assert not [path.name for path in FOLDER.glob("*.py") if HAN.search(path.read_text(encoding="utf-8"))]


# ---- templates ----


WORDS = {
    "said": {"zh": "{given}、{given!t}、{given!k}、{error!e}", "en": "{given}, {given!t}, {given!k}, {error!e}"},
    "number": {"zh": "{value:.2f} {value.dtype}", "en": "{value:.2f} {value.dtype}"},
    "told": {"zh": "{what}错了", "en": "{What} is wrong"},
    "phrases": {"where": {"zh": "第 {number} 次", "en": "call {number}"}},
}


def test_a_template_tells_a_tensor_its_type_and_an_error():
    _, en = say("said", {"given": torch.tensor([1.0, 2.00001]), "error": ValueError("no\nsecond line")}, [WORDS])
    assert en == "[1.0, 2.0], Tensor, Tensor, torch.float32 [2], ValueError: no"


def test_a_tensor_of_one_number_takes_a_format():
    assert say("number", {"value": torch.tensor(1.0)}, [WORDS])[1] == "1.00 torch.float32"


def test_a_phrase_differs_between_the_languages_and_knows_the_facts():
    assert say("told", {"what": Phrase("where"), "number": 2}, [WORDS]) == ("第 2 次错了", "Call 2 is wrong")


def test_the_first_table_that_has_the_key_says_it():
    own = {"told": {"zh": "自己的", "en": "its own"}}
    assert say("told", {}, [own, WORDS]) == ("自己的", "its own")


def test_a_key_without_words_says_where_to_write_them():
    with pytest.raises(KeyError, match=r"no words for 'stale': write `stale.zh = …`"):
        say("stale", {}, [WORDS])


def test_a_fact_that_is_not_given_is_named():
    with pytest.raises(KeyError, match=r"`number.zh` names {value}; the facts are: valeu"):
        say("number", {"valeu": 1}, [WORDS])


def test_a_table_whose_words_name_other_facts_is_passed_over():
    own = {"told": {"zh": "{shape}不对", "en": "{shape} is wrong"}}
    facts = {"what": Phrase("where"), "number": 2}
    assert say("told", facts, [own, WORDS])[1] == "Call 2 is wrong"
    assert say("told", {"shape": (2, 3)}, [own, WORDS])[1] == "(2, 3) is wrong"
