"""The pages of the site: one language each, no dead link, nothing from elsewhere, predictions folded."""

import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
import pytest

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("site")]
HAN = re.compile(r"[\u4e00-\u9fff]+")
BILINGUAL = ("glossary", "sources", "contributing")  # words of both languages, titles of texts, examples
OUTLINE = json.loads((Path(__file__).parents[2] / "hooklab/course/outline.json").read_text("utf-8"))
BOOKS = [book for part in OUTLINE["parts"] for book in part["notebooks"]]


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads, self.meta, self.text = set(), [], [], {}, ""
        self.lang = self.inside = None
        self.classes = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given["id"]} if "id" in given else set()
        self.classes += (given.get("class") or "").split()
        if tag == "html":
            self.lang = given.get("lang")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("img", "script", "source", "iframe") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") == "alternate":
            self.meta[given.get("hreflang")] = given["href"]
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(given["href"])
        if tag == "meta" and given.get("name"):
            self.meta[given["name"]] = given.get("content")
        if tag == "article":
            self.inside = True

    def handle_endtag(self, tag):
        if tag == "article":
            self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.text += data


@pytest.fixture(scope="module")
def pages(site):
    """By address within the site: en/11_reading_gradients/."""
    return {
        f"{path.parent.relative_to(site).as_posix()}/": Page(path) for path in sorted(site.glob("??/**/index.html"))
    }


def test_every_notebook_and_document_has_a_page_in_both_languages(pages):
    names = [book["file"].removesuffix(".ipynb") for book in BOOKS]
    names += ["course", "questions", "cheatsheet", "glossary", "sources", "limits", "contributing", "changelog", "api"]
    names += ["install", "teaching", "decisions"]
    assert {f"{language}/{name}/" for language in ("zh", "en") for name in names} <= set(pages)
    assert {page[3:] for page in pages if page.startswith("zh/")} == {
        page[3:] for page in pages if page.startswith("en/")
    }


def test_links_and_what_pages_load_lead_somewhere(site, pages):
    followed, dead = 0, []
    for name, page in pages.items():
        for link in page.links + page.loads:
            if re.match(r"https?:|mailto:|data:", link):
                continue
            path, fragment = urldefrag(link)
            target = (site / name / unquote(path.partition("?")[0])).resolve()
            target = target / "index.html" if target.is_dir() else target
            other = pages.get(f"{target.parent.relative_to(site).as_posix()}/") if path else page
            followed += 1
            if not target.exists() or (fragment and other and unquote(fragment) not in other.ids):
                dead.append((name, link))
    assert dead == []
    assert followed > 5000


def test_nothing_comes_from_another_host(pages):
    loads = {load for page in pages.values() for load in page.loads if re.match(r"(https?:)?//", load)}
    assert loads == set()


def test_each_page_is_in_one_language_and_says_so(pages):
    for name, page in pages.items():
        language, rest = name.split("/", 1)
        assert page.lang == {"zh": "zh-CN", "en": "en"}[language], name
        assert {"zh-CN", "en", "x-default"} <= set(page.meta), name
        assert page.meta["en"] == f"https://example.org/hooklab/en/{rest}"
        assert len(page.meta["description"]) > 20, name
        if language == "en" and not rest.startswith((*BILINGUAL, "_modules")):
            assert set(HAN.findall(page.text)) <= {"中文"}, name  # the name of a button
        if language == "zh" and re.match(r"\d\d_", rest):
            assert len("".join(HAN.findall(page.text))) > 1000, name
    assert "本页只有英文" in pages["zh/changelog/"].text


def test_predictions_are_folded_and_their_wrong_guesses_answered(pages):
    for book in BOOKS:
        for language in ("zh", "en"):
            page = pages[f"{language}/{book['file'].removesuffix('.ipynb')}/"]
            assert page.classes.count("guess") == len(book["predictions"])
            assert page.classes.count("hide") >= len(book["predictions"])
            assert page.classes.count("hooklab-note") == len(book["predictions"]) + 2 * len(book["exercises"])
    assert "You guessed" in pages["en/31_what_autograd_saves/"].text


def test_nobody_is_told_to_attempt_what_cannot_be_run(pages):
    told = [name for name, page in pages.items() if re.search("Not attempted yet|还没有猜|还没有作答", page.text)]
    assert [name for name in told if "_modules" not in name] == []


def test_pages_are_small_enough_for_a_phone(site):
    assert [path for path in site.glob("??/**/*.html") if path.stat().st_size > 600_000] == []


def test_notebooks_can_be_downloaded_in_both_languages_or_one(site):
    for book in BOOKS:
        both, zh, en = (
            nbformat.read(site / "notebooks" / kind / book["file"], as_version=4) for kind in ("both", "zh", "en")
        )
        assert len(both.cells) == len(zh.cells) == len(en.cells)
        assert 'lang="zh"' not in "".join(cell.source for cell in en.cells)


def test_the_sitemap_lists_every_page(site, pages):
    listed = re.findall(r"<loc>https://example\.org/hooklab/([^<]*)</loc>", (site / "sitemap.xml").read_text("utf-8"))
    assert set(listed) == {name for name in pages if "_modules" not in name}


def test_there_is_a_book_in_each_language(site):
    for language in ("zh", "en"):
        (book,) = (site.parent / "epub" / language).glob("*.epub")
        names = zipfile.ZipFile(book).namelist()
        assert sum(bool(re.search(r"\d\d_\w+\.xhtml$", name)) for name in names) == len(BOOKS)
