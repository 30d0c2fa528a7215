"""The pages of the site: one language each, no dead link, nothing from elsewhere, predictions folded; then in a browser."""

import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
import pytest
import yaml

pytestmark = pytest.mark.long  # in one file: the site is built once, by the process that runs this file
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
    names += ["install", "teaching", "teaching/plans", "teaching/11_reading_gradients", "decisions", "atlas"]
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
        assert len(page.meta["description"]) >= 20, name
        assert any("template=unclear-sentence" in link for link in page.links), name
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


def test_a_page_that_is_not_there_leads_to_the_course(site):
    assert re.findall(r'href="([^"]+)"', (site / "404.html").read_text("utf-8")) == ["/hooklab/zh/", "/hooklab/en/"]


def test_there_is_a_book_in_each_language(site):
    for language in ("zh", "en"):
        names = zipfile.ZipFile(site / f"hooklab.{language}.epub").namelist()
        chapters = [name for name in names if re.search(r"\d\d_\w+\.xhtml$", name)]
        assert len([name for name in chapters if "teaching/" not in name]) == len(BOOKS)


# ---- in a browser ----

SEARCHES = {  # the page that should be among the first three
    "zh": {
        "梯度裁剪": "25_clipping_gradients", "反向传播": "00_start_here", "卸载到磁盘": "34_offloading_to_disk",
        "中间张量的梯度": "11_reading_gradients", "特征": "24_extracting_features", "检查点": "35_checkpointing",
        "显存预算": "36_the_memory_budget", "锁页内存": "33_offloading_to_cpu", "叶子张量": "11_reading_gradients",
        "术语表": "glossary",
    },
    "en": {
        "retain_grad": "11_reading_gradients", "non-leaf": "11_reading_gradients", "clipping": "25_clipping_gradients",
        "register_full_backward_hook": "22_backward_hooks", "offload to disk": "34_offloading_to_disk",
        "checkpoint": "35_checkpointing", "num_batches_tracked": "35_checkpointing", "extract features": "24_extracting_features",
        "multi-grad hook": "15_many_tensors_at_once", "cheat sheet": "cheatsheet",
        "can't optimize a non-leaf Tensor": "questions", "A different number of tensors was saved": "questions",
    },
}  # fmt: skip
FIRST_THREE = """async query => {
    const pagefind = await import('/pagefind/pagefind.js');
    await pagefind.options({ ranking: window.searchRanking });
    const { results } = await pagefind.search(query);
    return (await Promise.all(results.slice(0, 3).map(result => result.data()))).map(found => found.url);
}"""


@pytest.fixture(scope="module")
def browser():
    browser_lab = pytest.importorskip("browser_lab")
    with browser_lab.browser() as browser:
        yield browser


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


@pytest.mark.parametrize(
    ("language", "query", "wanted"), [(lang, *pair) for lang in SEARCHES for pair in SEARCHES[lang].items()]
)
def test_search_finds_the_page(address, page, language, query, wanted):
    page.goto(f"{address}{language}/")
    found = page.evaluate(FIRST_THREE, query)
    assert any(f"/{language}/{wanted}/" in url for url in found), found


@pytest.mark.parametrize("language", SEARCHES)
def test_search_finds_every_quoted_error(address, page, language):
    page.goto(f"{address}{language}/")
    groups = yaml.safe_load((Path(__file__).parents[2] / "notebooks/questions.yml").read_text("utf-8"))
    errors = {row["error"]: row["at"][0] for group in groups for row in group["questions"] if "error" in row}
    assert len(errors) > 30
    for error, notebook in errors.items():
        found = page.evaluate(FIRST_THREE, error)
        assert any("/questions/" in url or f"/{notebook}/" in url for url in found), (error, found)


def test_enter_in_a_guess_unfolds_what_happens(address, page):
    page.goto(f"{address}en/00_start_here/")
    outcome = page.locator("details.hide").first
    assert outcome.get_attribute("open") is None
    page.locator(".guess input").first.fill("2")
    page.keyboard.press("Enter")
    assert outcome.get_attribute("open") is not None


def test_the_switch_keeps_page_and_place(address, page):
    page.goto(f"{address}en/11_reading_gradients/#leaves")
    page.wait_for_function("document.getElementById('leaves').getBoundingClientRect().top < 200")
    page.evaluate("document.querySelector('.other-language').click()")
    page.wait_for_url("**/zh/11_reading_gradients/**")
    assert page.url.endswith("#leaves")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"


@pytest.mark.parametrize("width", [390, 1440])
def test_no_page_is_wider_than_the_screen_or_logs_an_error(site, address, browser, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    page, problems = context.new_page(), []
    page.on("console", lambda message: message.type == "error" and problems.append((page.url, message.text)))
    page.on("pageerror", lambda error: problems.append((page.url, str(error))))
    page.on(
        "request",
        lambda request: request.url.startswith((address, "data:")) or problems.append((page.url, request.url)),
    )
    for path in sorted(site.glob("??/*/index.html")):
        page.goto(f"{address}{path.parent.relative_to(site).as_posix()}/")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            problems.append((page.url, "wider than the screen"))
    context.close()
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name",
    ["", "course/", "11_reading_gradients/", "36_the_memory_budget/", "questions/", "cheatsheet/", "api/gradients/"],
)
def test_axe_finds_nothing_serious(address, browser, name, scheme):
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{address}zh/{name}")
    options = {"resultTypes": ["violations"]}
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    violations = axe.Axe().run(page, options=options).response["violations"]
    context.close()
    serious = [
        (violation["id"], [node["target"] for node in violation["nodes"]][:5])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []
