"""The site in a browser: search, guesses, the switch of language, widths, axe."""

import pytest

pytest.importorskip("playwright")
browser_lab = pytest.importorskip("browser_lab")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="`make test-long` installs it")

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("site")]

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
        "can't optimize a non-leaf Tensor": "questions", "A different number of tensors was saved": "35_checkpointing",
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
    violations = axe.Axe().run(page, options=options).response["violations"]
    context.close()
    serious = [
        (violation["id"], [node["target"] for node in violation["nodes"]][:5])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []
