"""What holds the two languages of a notebook together, one function per rule; see `notebook_rules`."""

import re
from collections.abc import Iterator
from functools import cache

import notebook_form
import yaml
from notebook_form import Cell

HAN = re.compile(r"[\u4e00-\u9fff]")
FENCE = re.compile(r"```.*?```", re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FORMULA = re.compile(r"\$([^$\n]+)\$")
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)")
TITLE = re.compile(r"\[\d\d [^\]]+\](?=\(\d\d_\w+\.ipynb)")  # of another notebook: no use of a term
HEADING = re.compile(r"^#{1,3} .*$", re.MULTILINE)
MAX_WORDS = 90  # "about 80"
MAX_HAN = 180  # what 90 English words are in Chinese


def headings(notebook) -> Iterator[str]:
    """`## 前向钩子 · Forward hooks`: Chinese, a middle dot, English; no markup, which the contents would show."""
    for cell in _prose(notebook):
        for heading in HEADING.findall(_outside_halves(cell.source)):
            chinese, dot, english = heading.lstrip("# ").partition(" · ")
            if not (dot and HAN.search(chinese) and english and not HAN.search(english)) or "<" in heading:
                yield f"{cell.id}: the heading {heading!r} is not 'Chinese · English'"
        if any(HEADING.search(FENCE.sub("", half)) for half in cell.halves.values()):
            yield f"{cell.id}: a heading inside one language does not reach the table of contents in both"


def two_languages(notebook) -> Iterator[str]:
    for cell in _prose(notebook):
        outside = HEADING.sub("", _outside_halves(cell.source)).strip()
        if outside:
            yield f"{cell.id}: text outside the two languages: {outside[:40]!r}"
        languages = re.findall(r'<div lang="(\w+)">', cell.source)
        if languages not in ([], ["zh", "en"]) or (languages and list(cell.halves) != ["zh", "en"]):
            yield f"{cell.id}: expected 中文 and then English, each once, with blank lines inside; found {languages}"
        elif languages:
            zh, en = (len(HAN.findall(cell.halves[lang])) for lang in ("zh", "en"))
            if zh == 0 or en > 12:
                yield f"{cell.id}: {zh} Chinese characters in the Chinese half, {en} in the English half"


def punctuation(notebook) -> Iterator[str]:
    """After Chinese it is full-width."""
    for cell, zh, _ in _pairs(notebook):
        text = SPAN.sub("码", FENCE.sub("", LINK.sub("", zh)))
        if found := re.search(r".{0,4}[\u4e00-\u9fff](?:[,;:!?(]|\.(?!\w))", text):
            yield f"{cell.id}: {found[0]!r} has half-width punctuation after Chinese"


def length(notebook) -> Iterator[str]:
    for cell, zh, en in _pairs(notebook):
        words, characters = (
            len(re.findall(r"[A-Za-z0-9'’]+", _words_only(en))),
            len(HAN.findall(_words_only(zh))),
        )
        if words > MAX_WORDS:
            yield f"{cell.id}: {words} English words, at most {MAX_WORDS}; make it two cells"
        if characters > MAX_HAN:
            yield f"{cell.id}: {characters} Chinese characters, at most {MAX_HAN}; make it two cells"
        if max(words, characters) > 30 and not 0.9 * words <= characters <= 2.4 * words:
            yield f"{cell.id}: {characters} Chinese characters beside {words} English words; has one half been cut?"


def same_spans(notebook) -> Iterator[str]:
    for cell, zh, en in _pairs(notebook):
        for what, pattern in (("code", SPAN), ("formulas", FORMULA), ("code blocks", FENCE)):
            left, right = (set(pattern.findall(half if pattern is FENCE else FENCE.sub("", half))) for half in (zh, en))
            if left != right:
                yield f"{cell.id}: {what} in one language only: {sorted(left ^ right)}"


def same_numbers(notebook) -> Iterator[str]:
    for cell, zh, en in _pairs(notebook):
        left, right = (set(re.findall(r"\d+(?:[.,]\d+)*", _words_only(half))) for half in (zh, en))
        if left != right:
            yield f"{cell.id}: numbers in one language only: {sorted(left ^ right)}"


def same_links(notebook) -> Iterator[str]:
    for cell, zh, en in _pairs(notebook):
        left, right = sorted(LINK.findall(zh)), sorted(map(_in_chinese, LINK.findall(en)))
        if left != right and not {"zh-docs", "en-docs"} & set(cell.tags):
            yield f"{cell.id}: links differ: {left} and {right} (tag the cell zh-docs or en-docs if they should)"


def same_shape(notebook) -> Iterator[str]:
    """The same paragraphs, list items, table rows, emphasis and folds, in the same order."""
    for cell, zh, en in _pairs(notebook):
        left, right = _outline(zh), _outline(en)
        if left != right:
            yield f"{cell.id}: the halves are built differently: {' '.join(left)} and {' '.join(right)}"


def names_of_the_package(notebook) -> Iterator[str]:
    """A file that is named is there, and what is said to stand in it does: `Disk` in `hooklab/stores.py`."""
    for cell, _, en in _pairs(notebook):
        for name, file in re.findall(r"(?:`([\w.]+)` (?:in |\())?`(hooklab/[\w/]+\.py)`", en):
            path = notebook_form.NOTEBOOKS.parent / file
            code = path.read_text(encoding="utf-8") if path.exists() else ""
            if not all(re.search(rf"(?:class|def) {part}\b", code) for part in name.split(".") if part):
                yield f"{cell.id}: {file} has no {name}"
            if not path.exists():
                yield f"{cell.id}: there is no {file}"


def folds(notebook) -> Iterator[str]:
    for cell in _prose(notebook):
        if any("`" in summary or "**" in summary for summary in re.findall(r"<summary>(.*?)</summary>", cell.source)):
            yield f"{cell.id}: Markdown is not rendered inside <summary>; write <code>…</code>"


# What a native engineer would not say, and what to say: docs/style.md has the list.
ODD = {
    r"an? backward\b(?! (?:pass|hook|pre-hook|function|run|method|graph|call))": "backward, a backward pass",
    r"an? forward\b(?! (?:pass|hook|pre-hook|function|run|method|call))": "forward, a forward pass",
    r"backwards\b": "backward passes",
    r"(?:an?|four|two|three|these|those) memor(?:y|ies)\b": "memory, blocks of memory",
    r"spar(?:e|es|ed|ing)\b": "save",
    r"seldom\b": "rarely",
    r"dear\b": "expensive",
    r"let(?:s|ting)? go\b": "free, release",
    r"first the means\b": "first, the tools",
    r"mend(?:s|ed|ing)?\b": "fix",
    r"hand(?:s|ed|ing)? on\b": "pass on",
    r"comput(?:es|ed|ing|e) again\b": "recompute",
    r"S[0-4] (?:says|has|writes|shows|calls)\b": "the name of the text",
}


def natural_english(notebook) -> Iterator[str]:
    for cell, _, en in _pairs(notebook):
        for odd, instead in ODD.items():
            if found := re.search(rf"\b{odd}", _words_only(en), re.IGNORECASE):
                yield f"{cell.id}: {found[0]!r} is not what an engineer says; rather: {instead}"


def named_sources(notebook) -> Iterator[str]:
    """The texts of the course are called by their names; S0.1.2 stands in the metadata and in the table of sources."""
    for cell in _prose(notebook):
        if found := re.search(r"\bS[0-4]\b", cell.source):
            yield f"{cell.id}: {found[0]} says nothing to a reader; SOURCES.md gives the names"


def references(notebook) -> Iterator[str]:
    """Another notebook is a link with its number and its title."""
    for cell in _prose(notebook):
        source = notebook_form.NEIGHBOURS.sub("", cell.source)
        for text, target in re.findall(r"(?<!!)\[([^\]]+)\]\((\d\d_\w+\.ipynb)[^)]*\)", source):
            if not re.match(rf"{target[:2]} \S", text):
                yield f"{cell.id}: the link {text!r} should have the number and the title of {target}"


def glossary(notebook) -> Iterator[str]:
    for cell, zh, en in _pairs(notebook):
        chinese, english = _words_only(TITLE.sub("]", zh)), _words_only(TITLE.sub("]", en))
        for term in terms():
            in_zh = any(form in chinese for form in term["zh"])
            in_en, maybe_in_en = (any(re.search(rf"\b{form}\b", english, re.IGNORECASE) for form in forms)
                                  for forms in (term["en"], term["en"] + term.get("also", [])))  # fmt: skip
            if in_zh and not maybe_in_en:
                yield f"{cell.id}: the Chinese says {term['zh'][0]!r}, the English does not say {' / '.join(term['en'])!r}"
            if in_en and not in_zh:
                yield f"{cell.id}: the English says {term['en'][0]!r}, the Chinese does not say {' / '.join(term['zh'])!r}"
    everything = "\n".join(
        TITLE.sub("", notebook_form.NEIGHBOURS.sub("", zh)) for cell, zh, _ in _pairs(notebook) if cell.id != "next"
    )
    for term in terms():
        if notebook.stem < term["first"] and term["zh"][0] in everything:
            yield f"{term['zh'][0]}: used before {term['first']}, where the English word is given"
        chinese, given = term["zh"][0], f"{term['zh'][0]}（{term['en'][0]}）"
        at = everything.find(chinese)
        if term["first"] == notebook.stem and not everything.startswith(given, at if at >= 0 else None):
            yield f"{chinese}: its first use, {everything[at : at + 12]!r}, should give the English word: {given}"


@cache
def terms() -> list[dict]:
    return yaml.safe_load((notebook_form.NOTEBOOKS / "glossary.yml").read_text(encoding="utf-8"))


def _outside_halves(source: str) -> str:
    return notebook_form.HALF.sub("", source)


def _prose(notebook) -> list[Cell]:
    return [cell for cell in notebook.cells if not cell.is_code]


def _pairs(notebook) -> Iterator[tuple[Cell, str, str]]:
    for cell in _prose(notebook):
        if list(cell.halves) == ["zh", "en"]:
            yield cell, cell.halves["zh"], cell.halves["en"]


def _in_chinese(target: str) -> str:
    """The Chinese edition of a page or a picture that has one: x.zh-CN.md beside x.md, x.zh.svg beside x.svg."""
    editions = [re.sub(r"(\.\w+)$", rf".{language}\1", target) for language in ("zh", "zh-CN")]
    return next((path for path in editions if (notebook_form.NOTEBOOKS / path).exists()), target)


def _words_only(half: str) -> str:
    """Without code, addresses, tables, markup and the titles of the neighbours."""
    half = notebook_form.NEIGHBOURS.sub("", half)
    half = re.sub(r"^\|.*$", "", FENCE.sub("", half), flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)|<[^>]+>|[*●○]", "", SPAN.sub("", half))


def _outline(half: str) -> list[str]:
    half = FENCE.sub("```", half)
    blocks = re.findall(r"^(\d+\.|[-*|]|```|</?details>|(?=\S))", half, flags=re.MULTILINE)
    return [block or "text" for block in blocks] + ["**"] * (len(re.findall(r"\*\*[^*]+\*\*", half)))
