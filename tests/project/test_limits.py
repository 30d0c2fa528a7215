"""docs/limits.md and docs/limits.zh-CN.md: the same limits in both languages, each pinned by a test that exists."""

import re

import notebook_form
import pytest

import hooklab

DOCS = notebook_form.ROOT / "docs"
ENGLISH, CHINESE = (DOCS / name for name in ("limits.md", "limits.zh-CN.md"))
HEADING = re.compile(r"^## `?([\w.]+)`?$", re.MULTILINE)


def sections(path):
    """The rows of the table under each heading: case, what happens, what to do instead, the test."""
    _, *parts = HEADING.split(path.read_text(encoding="utf-8"))
    return {
        name: [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            for line in body.splitlines()
            if line.startswith("| ") and not re.match(r"\| (case|情形) \|", line)
        ]
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def names_of_tests():
    sources = (path.read_text(encoding="utf-8") for path in (notebook_form.ROOT / "tests").rglob("test_*.py"))
    return {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}


@pytest.mark.parametrize("path", [ENGLISH, CHINESE], ids=lambda path: path.name)
def test_every_row_says_four_things_and_its_test_exists(path):
    known, rows = names_of_tests(), [row for rows in sections(path).values() for row in rows]
    assert len(rows) > 30
    for row in rows:
        assert len(row) == 4, row
        assert all(row), row
        assert set(re.findall(r"`(test_\w+)`", row[3])) <= known, row
        assert re.search(r"`test_\w+`", row[3]), row


def test_both_languages_have_the_same_rows():
    english, chinese = sections(ENGLISH), sections(CHINESE)
    assert english.keys() == chinese.keys()
    for name in english:
        assert [row[3] for row in english[name]] == [row[3] for row in chinese[name]], name
        for one, other in zip(english[name], chinese[name], strict=True):
            spans = [sorted(set(re.findall("`([^`]+)`", " ".join(row)))) for row in (one, other)]
            assert spans[0] == spans[1], name


def test_a_limit_that_a_docstring_points_to_has_its_section():
    known = set(sections(ENGLISH))
    named = set()
    for name in hooklab.__all__:
        named |= set(re.findall(r"docs/limits\.md#(\w+)", getattr(hooklab, name).__doc__ or ""))
    assert {"features", "offload"} <= named
    assert named <= {heading.lower() for heading in known} | known
