"""A class in JupyterLab: the presenter's mode, in a real browser, on a projector's 1280x720."""

import re
import shutil

import browser_lab as lab
import notebook_form
import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.long  # `make test-long`
NAME, SECOND = "11_reading_gradients.ipynb", "12_changing_gradients.ipynb"
BAR = f"{lab.FRONT} .hooklab-bar"
PROJECTOR = {"width": 1280, "height": 720}
SEEN = "({ content }) => content.widgets.filter(({ node }) => node.checkVisibility()).map(({ model }) => model.id)"
# The smallest type of each kind, of what can be seen.
TYPE = """(app, panel) => {
  const size = it => parseFloat(getComputedStyle(it).fontSize);
  const least = found => Math.min(...[...panel.node.querySelectorAll(found)].filter(it => it.checkVisibility()).map(size));
  return { prose: least('.jp-MarkdownOutput :is(p, li, td, code)'), code: least('.cm-line'),
           printed: least('.jp-OutputArea-output pre') };
}"""
WHOLE = """(app, panel) => JSON.stringify([panel.context.model.toJSON(), panel.context.model.dirty])"""
PRESENT = "async app => { await app.commands.execute('hooklab:present'); }"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "notebooks"
    folder.mkdir()
    for name in (NAME, SECOND):
        shutil.copy(notebook_form.NOTEBOOKS / name, folder)
    with lab.page_on(folder, viewport=PROJECTOR) as page:
        lab.open_notebook(page, NAME)
        lab.wait_for_kernel(page)
        yield page
        lab.open_notebook(page, NAME)
        lab.close_notebook(page)


@pytest.fixture
def notebook(page):
    """The notebook in front, in both languages and with all outputs shown, as someone may have left it."""
    lab.open_notebook(page, NAME)
    lab.choose(page, "both")
    lab.ask(page, "async app => { await app.commands.execute('hooklab:outputs-show'); }")
    lab.ask(page, "(app, { content }) => { content.activeCellIndex = 0; }")
    yield page
    if page.locator(BAR).count():  # after a failure
        lab.ask(page, PRESENT)


def present(page, language):
    """Begin, and answer the question for the language of the room."""
    page.locator(f'{lab.FRONT} [data-command="hooklab:present"]').click()
    page.locator(".jp-Dialog-button", has_text=language).click()
    expect(page.locator(BAR)).to_be_visible()


def seen(page):
    return lab.ask(page, f"(app, panel) => ({SEEN})(panel)")


@pytest.mark.parametrize(
    ("language", "label", "title"), [("zh", "中文", "看看这张图"), ("en", "English", "Look at the graph")]
)
def test_a_class_sees_one_section_at_a_time_in_large_type_and_leaving_restores_all(notebook, language, label, title):
    page = notebook
    looks = """(app, panel) => [panel.hasClass('hooklab-presenting'), document.documentElement.dataset.hooklabLanguage,
      panel.content.notebookConfig.windowingMode, app.shell.leftCollapsed,
      panel.content.widgets.map(({ node }) => [node.checkVisibility(), getComputedStyle(node).fontSize])]"""
    lab.ask(page, "app => { app.shell.expandLeft(); }")
    before, file = lab.ask(page, looks), lab.ask(page, WHOLE)
    present(page, label)
    assert seen(page) == ["title", "before", "setup"]
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    assert seen(page) == ["graph", "graph-draw", "graph-facts"]
    expect(page.locator(f"{lab.FRONT} h2:visible")).to_have_text(re.compile(f"^2 {title}"), use_inner_text=True)
    expect(page.locator(f"{BAR} select")).to_have_value(f"2 {title}")
    page.keyboard.press("PageUp")
    assert seen(page)[0] == "where"
    expect(page.locator(f"{lab.FRONT} .jp-OutputArea-output:visible")).to_have_count(0)
    sizes = lab.ask(page, TYPE)
    assert sizes["prose"] >= 28, sizes
    assert sizes["code"] >= 24, sizes
    page.locator(f"{BAR} button").last.click()
    expect(page.locator(BAR)).to_have_count(0)
    assert lab.ask(page, looks) == before
    assert lab.ask(page, WHOLE) == file


def test_cells_run_as_usual_and_the_last_one_of_a_section_stays_in_sight(notebook):
    page = notebook
    present(page, "English")
    for _ in range(3):
        page.keyboard.press("Shift+Enter")
    page.keyboard.press("PageDown")
    for _ in range(20):  # more than there are: the class must not be led on by it
        page.keyboard.press("Shift+Enter")
    done = page.locator(f"{lab.FRONT} .jp-OutputArea-output:visible", has_text="x.grad: tensor([2.")
    expect(done).to_be_visible()
    assert seen(page)[0] == "where"
    assert seen(page)[-1] == "where-check"
    assert lab.ask(page, TYPE)["printed"] >= 24
    expect(page.locator(f"{lab.FRONT} .hooklab-unseen:visible")).to_have_count(0)
    lab.ask(page, PRESENT)


def test_the_class_goes_on_after_a_reload_beside_another_notebook_and_ends_with_its_own(notebook):
    page = notebook
    present(page, "中文")
    page.keyboard.press("PageDown")
    lab.ask(page, "async app => { await app.commands.execute('docmanager:save'); }")
    page.reload()
    lab.wait_until_drawn(page)
    expect(page.locator(BAR)).to_be_visible()
    assert seen(page)[0] == "where"
    assert page.evaluate("document.documentElement.dataset.hooklabLanguage") == "zh"
    expect(page.locator(f"{lab.FRONT} h2:visible .hooklab-half-zh")).to_be_visible()
    expect(page.locator(f"{lab.FRONT} h2:visible .hooklab-half-en")).to_be_hidden()

    lab.open_notebook(page, SECOND)
    expect(page.locator(BAR)).to_have_count(0)
    page.keyboard.press("PageDown")
    lab.open_notebook(page, NAME)
    assert seen(page)[0] == "where", "the key went to the other notebook"

    lab.open_notebook(page, SECOND)
    lab.wait_for_kernel(page)
    lab.ask(page, PRESENT)  # a class has one notebook
    expect(page.locator(BAR)).to_be_visible()
    lab.open_notebook(page, NAME)
    expect(page.locator(BAR)).to_have_count(0)
    lab.open_notebook(page, SECOND)
    lab.close_notebook(page)
    lab.open_notebook(page, NAME)
    assert page.evaluate("[document.documentElement.dataset.hooklabLanguage, sessionStorage['hooklab-present']]") == [
        "both",
        "null",
    ]


def test_the_clock_tells_the_section_from_the_whole(notebook):
    page = notebook
    page.clock.install()
    present(page, "English")
    here, total = page.locator(f"{BAR} span").nth(0), page.locator(f"{BAR} span").nth(1)
    page.clock.fast_forward("02:05")
    expect(here).to_have_text(re.compile(r"section 2:0\d / 1:00"))
    expect(here).to_have_class(re.compile("hooklab-late"))
    page.keyboard.press("PageDown")
    page.clock.fast_forward("00:40")
    expect(here).to_have_text(re.compile(r"section 0:4\d / 4:00"))
    minutes = sum(
        cell["metadata"].get("minutes", 0) for cell in notebook_form.read(notebook_form.NOTEBOOKS / NAME)["cells"]
    )
    expect(total).to_have_text(re.compile(rf"total 2:[45]\d / {minutes}:00"))
    page.keyboard.press("PageUp")
    expect(here).to_have_text(re.compile(r"section 2:[01]\d / 1:00"))
    lab.ask(page, PRESENT)
    page.clock.resume()
