"""What a learner does, from the first look to the next version of the course, in JupyterLab, in a real browser."""

import json
import os
import shutil

import browser_lab as lab
import notebook_form
import pytest
from hooklab_desk.working_copy import update
from playwright.sync_api import expect

FIRST = "00_start_here.ipynb"
SIZES = {"wide": {"width": 1440, "height": 900}, "narrow": {"width": 1024, "height": 768}}
UNSEEN = f"{lab.FRONT} .hooklab-unseen"
RUN = """async (app, { content }, { id, source }) => {
  content.activeCellIndex = content.widgets.findIndex(({ model }) => model.id === id);
  if (source) content.activeCell.model.sharedModel.setSource(source);
  await app.commands.execute('notebook:run-cell');
}"""
SAID = {
    "zh": {
        "named": "你猜的是",
        "offer": "要提示吗？",
        "hint": "提示 1/2",
        "right": "对了。",
        "next": "接下来",
        "count": "预测 1/2 · 练习 1/2",
    },
    "en": {
        "named": "You guessed",
        "offer": "Stuck?",
        "hint": "Hint 1/2",
        "right": "Right.",
        "next": "next",
        "count": "predictions 1/2 · exercises 1/2",
    },
}


@pytest.fixture
def course(tmp_path):
    """A copy of the course, so that a new version can be made of it."""
    folder = tmp_path / "course" / "notebooks"
    shutil.copytree(notebook_form.NOTEBOOKS, folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    shutil.copytree(notebook_form.ROOT / "docs", folder.parent / "docs")
    for page in notebook_form.ROOT.glob("QUESTIONS*.md"):
        shutil.copy(page, folder.parent)
    return folder


def run(page, cell, source=""):
    """Run a cell by its id, with another source perhaps."""
    lab.ask(page, RUN, {"id": cell, "source": source})


def output_of(page, cell):
    """What the outputs of a cell show."""
    number = lab.ask(page, "(app, { content }, id) => content.widgets.findIndex(({ model }) => model.id === id)", cell)
    return page.locator(f"{lab.FRONT} .jp-Cell[data-windowed-list-index='{number}'] .jp-OutputArea").first


def learn(page, course, own, language, name):
    """From the first look at 00 to the next version of the course."""
    said = SAID[language]
    lab.open_notebook(page, FIRST)
    assert page.evaluate("document.documentElement.dataset.hooklabLanguage") == language, "the browser's language"
    assert not lab.ask(page, "(app, panel) => panel.context.model.dirty"), "opening is no change"

    # Outputs are unseen until their cell has run; a click shows one all the same.
    unseen = page.locator(UNSEEN).count()
    assert unseen > 15
    expect(output_of(page, "first-hook")).to_be_hidden()
    assertion = page.locator(f"{lab.FRONT} .jp-PlaceholderText", has_text="assert len(calls) == 1")
    expect(assertion).to_have_count(1)
    expect(assertion).to_be_hidden()  # it would answer the first guess
    picture(page, f"{name}.first")
    page.locator(UNSEEN).first.click()
    expect(output_of(page, "first-hook")).to_be_visible()
    expect(output_of(page, "bypass-run")).to_be_hidden()

    # A wrong guess that people have is answered.
    for cell in ("first-hook", "setup", "bypass-hook"):
        run(page, cell)
    run(page, "bypass-guess", "guess = 2")
    for cell in ("bypass-run", "bypass-check"):
        run(page, cell)
    expect(output_of(page, "bypass-check").locator(f"[lang={language}]")).to_contain_text(said["named"])

    # A second wrong answer offers a hint, and the right one is praised.
    for _ in range(2):
        run(page, "exercise-a-stub", "def halve(grad):\n    grad / 2")
        run(page, "exercise-a-check")
    expect(output_of(page, "exercise-a-check").locator(f"[lang={language}]")).to_contain_text(said["offer"])
    picture(page, f"{name}.refused")
    run(page, "exercise-a-check", 'check.hint("00.A")')
    expect(output_of(page, "exercise-a-check").locator(f"[lang={language}]")).to_contain_text(said["hint"])
    run(page, "exercise-a-stub", "def halve(grad):\n    return grad / 2")
    run(page, "exercise-a-check", 'check.exercise("00.A", halve)')
    expect(output_of(page, "exercise-a-check").locator(f"[lang={language}]")).to_contain_text(said["right"])

    # Progress is there, and after a reload, with what has been seen.
    lab.ask(page, "async app => { await app.commands.execute('docmanager:save'); }")
    for _ in range(2):
        lab.ask(page, "async app => { await app.commands.execute('hooklab:progress'); }")
        current = page.locator(".hooklab-progress [aria-current]")
        expect(current).to_contain_text(said["count"])
        expect(current).to_contain_text(said["next"])
        picture(page, f"{name}.progress")
        page.reload()
        lab.wait_until_drawn(page)
    expect(output_of(page, "bypass-run")).to_be_visible()
    expect(output_of(page, "map-backward")).to_be_hidden()
    lab.close_notebook(page)

    # A new version comes: what was written in stays.
    for path in course.glob("*.ipynb"):
        content = json.loads(path.read_text(encoding="utf-8"))
        content["cells"][-1]["source"] = ["A new version."]
        path.write_text(json.dumps(content), encoding="utf-8")
    report = update(course, own)
    assert report.kept == [FIRST]
    assert len(report.replaced) == len(list(course.glob("*.ipynb"))) - 1
    assert "return grad / 2" in (own / FIRST).read_text(encoding="utf-8")


def picture(page, name):
    if os.environ.get("HOOKLAB_SCREENSHOTS") != "0":
        lab.SCREENSHOTS.mkdir(exist_ok=True)
        page.screenshot(path=lab.SCREENSHOTS / f"learner.{name}.png")


def at_work(course, tmp_path, language, size, theme):
    own = tmp_path / "own"
    update(course, own)
    with lab.page_on(own, locale={"zh": "zh-CN", "en": "en-US"}[language], viewport=SIZES[size]) as page:
        lab.ask(
            page, "async (app, _, theme) => { await app.commands.execute('apputils:change-theme', { theme }); }", theme
        )
        learn(page, course, own, language, f"{language}.{size}.{'dark' if 'Dark' in theme else 'light'}")


def test_a_learner_works_through_the_beginning_of_the_course(course, tmp_path):
    at_work(course, tmp_path, "zh", "wide", "JupyterLab Light")


@pytest.mark.long
@pytest.mark.parametrize(
    ("language", "size", "theme"),
    [("en", "wide", "JupyterLab Dark"), ("en", "narrow", "JupyterLab Light"), ("zh", "narrow", "JupyterLab Dark")],
)
def test_so_it_is_in_every_language_size_and_theme(course, tmp_path, language, size, theme):
    at_work(course, tmp_path, language, size, theme)


@pytest.mark.long
def test_outputs_are_folded_or_shown_as_wanted_also_after_a_reload(course, tmp_path):
    own = tmp_path / "own"
    update(course, own)
    with lab.page_on(own) as page:
        lab.open_notebook(page, FIRST)
        output = output_of(page, "map-backward")
        expect(output).to_be_hidden()
        page.locator(f'{lab.FRONT} [data-command="hooklab:outputs-toggle"]').click()
        expect(output).to_be_visible()
        page.reload()
        lab.wait_until_drawn(page)
        expect(output).to_be_visible()
        lab.ask(page, "async app => { await app.commands.execute('hooklab:outputs-fold'); }")
        expect(output).to_be_hidden()
        lab.close_notebook(page)


@pytest.mark.long
def test_the_switch_is_a_stop_of_the_tab_key_and_the_panel_can_be_read(course, tmp_path):
    own = tmp_path / "own"
    update(course, own)
    with lab.page_on(own) as page:
        lab.open_notebook(page, FIRST)
        expect(lab.button(page)).to_have_attribute("tabindex", "0")
        lab.button(page).focus()
        before = page.evaluate("document.documentElement.dataset.hooklabLanguage")
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.hooklabLanguage") != before
        lab.ask(page, "async app => { await app.commands.execute('hooklab:progress'); }")
        panel = page.locator(".hooklab-progress")
        expect(panel).to_have_attribute("role", "region")
        assert panel.get_attribute("aria-label")
        link = panel.get_by_role("button", name="11")
        link.focus()
        page.keyboard.press("Enter")
        lab.wait_until(page, "() => jupyterapp.shell.currentWidget?.context?.path === '11_reading_gradients.ipynb'")
        lab.wait_until_drawn(page)
        lab.close_notebook(page)


PAGES = {
    "zh": [("问题索引", "QUESTIONS.zh-CN.md"), ("速查表", "cheatsheet.zh-CN.md"), ("术语表", "glossary.md")],
    "en": [("questions", "QUESTIONS.md"), ("cheat sheet", "cheatsheet.md"), ("glossary", "glossary.md")],
}


@pytest.mark.long
@pytest.mark.parametrize("language", PAGES)
def test_the_pages_that_answer_questions_are_a_click_away_and_lead_back(course, tmp_path, language):
    own = tmp_path / "own"
    update(course, own)
    with lab.page_on(own, locale={"zh": "zh-CN", "en": "en-US"}[language], viewport=SIZES["wide"]) as page:
        lab.open_notebook(page, FIRST)
        lab.ask(page, "async app => { await app.commands.execute('hooklab:progress'); }")
        panel, front = page.locator(".hooklab-progress"), page.locator(f"{lab.FRONT} .jp-MarkdownOutput")
        opened = "name => jupyterapp.shell.currentWidget?.context?.path === name"
        shown = page.locator(".jp-MarkdownViewer:visible")
        for text, name in PAGES[language]:
            for link in (panel.get_by_role("button", name=text), front.get_by_role("link", name=text, exact=True)):
                link.click()
                lab.wait_until(page, opened, name)
                expect(shown.locator("table").first).to_be_visible()
                picture(page, f"{language}.{name}")
                lab.ask(page, "(app, page) => page.dispose()")
                lab.open_notebook(page, FIRST)
        lab.close_notebook(page)

        # A question leads to the notebook that answers it.
        panel.get_by_role("button", name=PAGES[language][0][0]).click()
        shown.locator("a", has_text="11").first.click()
        lab.wait_until(page, opened, "11_reading_gradients.ipynb")
        lab.wait_until_drawn(page)
        lab.close_notebook(page)


@pytest.mark.long
def test_progress_can_begin_again(course, tmp_path):
    own = tmp_path / "own"
    update(course, own)
    kept = tmp_path / "state" / "JUPYTER_DATA_DIR" / "hooklab" / "progress.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"00.A": "done", "00.B": "done", "00.1": "done", "00.2": "done"}')
    with lab.page_on(own) as page:
        lab.ask(page, "async app => { await app.commands.execute('hooklab:progress'); }")
        panel = page.locator(".hooklab-progress")
        expect(panel.locator("[aria-current]")).to_contain_text("11 Reading gradients")
        panel.get_by_role("button", name="Reset progress").click()
        page.locator(".jp-Dialog-button.jp-mod-accept").click()
        expect(panel.locator("[aria-current]")).to_contain_text("00 Start here")
        assert not kept.exists()
