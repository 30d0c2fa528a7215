"""The notebooks and the language switch, in JupyterLab, in a real browser. Pictures go to tests/screenshots/."""

import json
import os
import re
import shutil

import browser_lab as lab
import notebook_form
import pytest
from browser_lab import LABELS, button, choose, expect_language, expected
from playwright.sync_api import expect

pytestmark = pytest.mark.long  # `make test-long`
FOLDER = notebook_form.NOTEBOOKS
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MESSAGE = '<div class="hooklab-message hooklab-{0}"><div lang="zh">对了：{0}</div><div lang="en">Right: {0}</div></div>'

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="70" height="70"><script>alert("it runs")</script></svg>'

# One pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the notebooks without their outputs: what is seen, the cells have made now."""
    copy = tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for path in NOTEBOOKS:
        content = read(path)
        for cell in content["cells"]:
            if cell["cell_type"] == "code":
                cell |= {"outputs": [], "execution_count": None}
        (copy / path.name).write_text(json.dumps(content), encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def page(folder):
    """A page with JupyterLab in it, which serves the copied folder."""
    with lab.page_on(folder) as page:
        yield page


@pytest.fixture(scope="module")
def started():
    """The names of the notebooks whose cells were asked to run."""
    return set()


@pytest.fixture(scope="module", params=[path.name for path in NOTEBOOKS])
def notebook(request, page, folder, started):
    """The name of a notebook of the course and the cells in its file. On the page all its cells have run."""
    cells = read(FOLDER / request.param)["cells"]
    # The next one runs while this one is looked at.
    for name in wanted(request.session.items, request.param)[:2]:
        if name not in started:
            lab.start(page, name)
            started.add(name)
    lab.finish(page, request.param)
    yield request.param.removesuffix(".ipynb"), cells
    lab.close_notebook(page)


def wanted(items, first):
    """The notebooks that tests ask for, in their order, from `first` on."""
    asked = [item.callspec.params.get("notebook") for item in items if hasattr(item, "callspec")]
    names = [name for name in dict.fromkeys(asked) if name in {path.name for path in NOTEBOOKS}]
    return names[names.index(first) :]


@pytest.fixture(scope="module")
def untrusted(folder, page):
    """A notebook that nobody has run on this server, with prose, with messages of checks and with a picture."""
    content = read(NOTEBOOKS[0])
    data = [{"text/html": MESSAGE.format(kind)} for kind in ("right", "wrong", "todo", "note")]
    data.append({"image/svg+xml": SVG, "text/plain": "   1 forward\n   2 backward"})
    data.append({"image/png": PNG, "text/plain": "Figure: time.\nAnd more."})
    about = {"image/svg+xml": {"alt": "What fired when: 1 in forward, 1 in backward."}, "needs_background": "light"}
    outputs = [{"output_type": "display_data", "metadata": about, "data": each} for each in data]
    cell = {"cell_type": "code", "id": "messages", "metadata": {}, "source": "", "execution_count": 1}
    content["cells"].append(cell | {"outputs": outputs})
    (folder / "untrusted.ipynb").write_text(json.dumps(content), encoding="utf-8")
    lab.open_notebook(page, "untrusted.ipynb")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_toolbar_button_switches_prose_and_messages(untrusted, page):
    assert not lab.ask(page, "(app, panel) => [...panel.content.model.cells].some(cell => cell.trusted)")
    choose(page, "both")
    for language in ("both", "zh", "en", "both"):
        expect_language(page, language)
        now, then = {"both": ("both languages", "Chinese only"), "zh": ("Chinese only", "English only")}.get(
            language, ("English only", "both languages")
        )
        assert f"Now: {now}; click for: {then}" in button(page).get_attribute("title")
        button(page).click()


def test_a_picture_is_drawn_before_anyone_has_run_it(untrusted, page):
    image = page.locator(f"{lab.FRONT} .jp-RenderedSVG img")
    expect(image).to_have_attribute("alt", "What fired when: 1 in forward, 1 in backward.")
    assert image.evaluate("async it => { await it.decode(); return it.naturalWidth; }") == 70


def test_a_figure_has_its_words_as_alternative_text_and_no_ground(untrusted, page):
    image = page.locator(f"{lab.FRONT} .jp-RenderedImage img")
    expect(image).to_have_attribute("alt", "Figure: time.")
    assert not image.get_attribute("class")
    assert image.evaluate("async it => { await it.decode(); return it.naturalWidth; }") == 1


def test_the_palette_offers_the_languages_and_ticks_the_one_in_use(untrusted, page):
    choose(page, "both")
    entries, before = page.locator(".lm-CommandPalette-item"), "中英对照 Both languages"
    for label, language in {
        "只看中文 Chinese only": "zh",
        "只看英文 English only": "en",
        "中英对照 Both languages": "both",
    }.items():
        page.keyboard.press("ControlOrMeta+Shift+C")
        page.locator(".lm-CommandPalette-input").fill("hooklab 语言")
        expect(entries).to_have_count(4)
        expect(page.locator(".lm-CommandPalette-item[aria-checked=true]")).to_have_text(re.compile(f"^{before}"))
        page.locator(".lm-CommandPalette-itemLabel").get_by_text(label, exact=True).click()
        expect_language(page, language)
        before = label


def test_switching_changes_nothing_in_the_notebook(untrusted, page):
    # JupyterLab itself writes the name and the version of the kernel into the notebook.
    written = "it => it.getMetadata('kernelspec') && it.getMetadata('language_info').version"
    lab.wait_until(page, f"() => ({written})(jupyterapp.shell.currentWidget.content.model)")
    lab.ask(page, "(app, panel) => { panel.context.model.dirty = false; }")
    before = lab.ask(page, "(app, panel) => JSON.stringify(panel.context.model)")
    for language in LABELS:
        choose(page, language)
    assert not lab.ask(page, "(app, panel) => panel.context.model.dirty")
    assert lab.ask(page, "(app, panel) => JSON.stringify(panel.context.model)") == before


def test_the_language_survives_a_reload(untrusted, page):
    choose(page, "en")
    page.reload()
    lab.wait_until_drawn(page)
    expect_language(page, "en")


def test_other_tabs_follow_and_nonsense_means_the_browsers_language(untrusted, page):
    other = page.context.new_page()
    other.goto(page.url.partition("/lab")[0] + "/api")
    for kept, language in {"zh": "zh", "nonsense": "en"}.items():
        other.evaluate("kept => localStorage.setItem('hooklab-language', kept)", kept)
        lab.wait_until(page, "it => document.documentElement.dataset.hooklabLanguage === it", language)
        expect_language(page, language)
    other.close()


def test_every_open_notebook_follows(untrusted, page, folder):
    choose(page, "zh")
    (folder / "second.ipynb").write_text(
        '{"cells": [], "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}'
    )
    lab.open_notebook(page, "second.ipynb")
    for language in ("zh", "en"):
        choose(page, language)
        buttons = page.locator('[data-command="hooklab:language-next"]')
        assert buttons.count() >= 2
        expect(buttons).to_have_text([LABELS[language]] * buttons.count())


MODE = "(app, { content }, mode) => { content.notebookConfig = { ...content.notebookConfig, windowingMode: mode }; }"
SCROLL = "(app, { content }) => { content.outerNode.scrollTop = content.outerNode.scrollHeight / 3; }"
TOPS = """(app, { content }) => content.widgets.map(  // of the cells, in the window
  ({ node }) => node.getBoundingClientRect().top - content.outerNode.getBoundingClientRect().top)"""


def settled(page):
    """Where the cells begin, once that has been the same for a second: a busy machine takes its time to draw."""
    found, same = lab.ask(page, TOPS), 0
    for _ in range(100):
        page.wait_for_timeout(250)  # ms
        last, found = found, lab.ask(page, TOPS)
        same = same + 1 if found == last else 0
        if same == 4:
            return found
    raise AssertionError("the page does not come to rest")


@pytest.mark.parametrize("mode", ["none", "contentVisibility"])
@pytest.mark.parametrize("stem", ["12_changing_gradients", "33_offloading_to_cpu"])
def test_the_reader_stays_at_the_same_cell(page, folder, mode, stem):
    choose(page, "both")
    lab.open_notebook(page, f"{stem}.ipynb")
    lab.wait_for_kernel(page)
    page.set_viewport_size(lab.PAGE)
    for step in (MODE, SCROLL):
        lab.ask(page, step, mode)
        settled(page)
    for language in ("zh", "en", "both"):
        before = settled(page)
        first = next(number for number, top in enumerate(before) if top >= 0)  # the first that begins in the window
        assert first > 5
        button(page).click()
        assert abs(settled(page)[first] - before[first]) < 3, language
    page.set_viewport_size(lab.VIEWPORT)
    lab.close_notebook(page)


@pytest.mark.parametrize("mode", ["none", "contentVisibility"])
def test_the_reader_comes_back_to_the_same_cell_of_a_notebook_behind_another(page, folder, mode):
    choose(page, "both")
    page.set_viewport_size(lab.PAGE)
    front, behind = "empty.ipynb", "12_changing_gradients.ipynb"
    (folder / front).write_text(json.dumps({**read(NOTEBOOKS[0]), "cells": []}), encoding="utf-8")
    for name in (front, behind):
        lab.open_notebook(page, name)
        lab.wait_for_kernel(page)
    for step in (MODE, SCROLL):
        lab.ask(page, step, mode)
        settled(page)
    for language in ("zh", "en", "both"):
        before = settled(page)
        first = next(number for number, top in enumerate(before) if top >= 0)
        assert first > 5
        lab.open_notebook(page, front)
        choose(page, language)
        lab.open_notebook(page, behind)
        assert abs(settled(page)[first] - before[first]) < 3, language
    page.set_viewport_size(lab.VIEWPORT)
    for name in (front, behind):
        lab.open_notebook(page, name)
        lab.close_notebook(page)


@pytest.mark.parametrize("language", LABELS)
def test_what_is_printed_is_in_the_language_that_is_chosen(untrusted, page, language):
    """JupyterLab hangs up a frame with a page from the server, lets it load, prints it and takes it away."""
    lab.open_notebook(page, "untrusted.ipynb")
    choose(page, language)
    printed = """async app => {
      const loaded = new Promise(done => {
        new MutationObserver((changes, self) => {
          const frame = [...document.body.querySelectorAll(':scope > iframe')].at(-1);
          if (!frame) return;
          self.disconnect();
          frame.addEventListener('load', () => {
            frame.contentWindow.print = () => {};
            done(frame.contentDocument);
          });
        }).observe(document.body, { childList: true });
      });
      app.commands.execute('apputils:print');
      const page = await loaded, shown = it => getComputedStyle(it).display !== 'none';
      return {
        languages: [...new Set([...page.querySelectorAll('[lang]')].filter(it => it !== page.documentElement)
          .map(it => `${it.closest('.hooklab-message') ? 'message' : 'prose'} ${it.lang} ` +
            (shown(it) ? 'shown' : 'hidden')))],
        pictures: await Promise.all([...page.images].map(async it => { await it.decode(); return it.naturalWidth; })),
        colour: getComputedStyle(page.querySelector('.hooklab-message')).borderLeftStyle,
        // What is longer than the paper is wide.
        code: [...page.querySelectorAll('.jp-InputArea-editor pre')].map(it => getComputedStyle(it).whiteSpace),
        output: [...page.querySelectorAll('.jp-RenderedText > pre')].map(it => getComputedStyle(it).whiteSpace),
        boxes: [...page.querySelectorAll('.jp-OutputArea-output:has(> pre)')].map(it => getComputedStyle(it).overflowX),
        folded: [...page.querySelectorAll('.jp-Cell-outputWrapper')].filter(it => !shown(it)).length,
      };
    }"""
    page.emulate_media(media="print")
    found = lab.ask(page, printed)
    page.emulate_media(media="screen")
    assert set(found["languages"]) == expected(language)
    assert max(found["pictures"]) > 500, "the map of all hooks"
    assert found["colour"] == "solid"
    assert set(found["code"]) == set(found["output"]) == {"pre-wrap"}
    assert set(found["boxes"]) == {"visible"}
    assert found["folded"] == 0, "paper shows every output"


def test_a_name_from_a_cell_that_has_not_run_is_explained_in_the_language_that_is_chosen(page, folder):
    cells = ["from hooklab import lesson\nlesson.start()", "compute = len", "compute([])", "compote([])"]
    content = {**read(NOTEBOOKS[0]), "cells": []}
    for number, source in enumerate(cells):
        cell = {"cell_type": "code", "id": f"cell{number}", "metadata": {}, "source": source}
        content["cells"].append(cell | {"outputs": [], "execution_count": None})
    (folder / "restarted.ipynb").write_text(json.dumps(content), encoding="utf-8")
    choose(page, "zh")
    lab.open_notebook(page, "restarted.ipynb")
    for number in (0, 2, 3):
        lab.ask(
            page,
            """async (app, panel, number) => {
              panel.content.activeCellIndex = number;
              await app.commands.execute('notebook:run-cell');
            }""",
            number,
        )
    advice = page.locator(f"{lab.FRONT} .hooklab-note")
    expect(advice).to_have_count(1)
    expect(advice.locator("[lang=zh]")).to_contain_text("compute 是上面某一格定义的")
    expect(advice.locator("[lang=en]")).to_be_hidden()
    lab.close_notebook(page)


def test_every_cell_runs_and_shows_what_is_stored(notebook, page):
    for stored, shown in zip(notebook[1], lab.cells(page), strict=True):
        if stored["cell_type"] == "code":
            source, tags = "".join(stored["source"]), stored["metadata"].get("tags", [])
            assert bool(shown["errors"]) == ("raises-exception" in tags), f"{source}\n{shown['output']}"
            assert shown["count"], f"did not run: {source}"
            for text in lab.stored_texts(stored["outputs"]) if "nbval-ignore-output" not in tags else []:
                assert text in lab.words(shown["output"]), source


def test_every_picture_is_drawn(notebook, page):
    for stored, shown in zip(notebook[1], lab.cells(page), strict=True):
        source, least = "".join(stored["source"]), 50 if stored["cell_type"] == "code" else 1
        assert len(shown["images"]) >= lab.stored_pictures(stored.get("outputs", [])), source
        assert all(width >= least for width in shown["images"]), f"{source}\nwidths: {shown['images']}"


def test_prose_and_table_of_contents_show_no_markup(notebook, page):
    assert not [cell["markdown"] for cell in lab.cells(page) if re.search("</?div|lang=", cell["markdown"])]
    lab.ask(page, "async app => { await app.commands.execute('toc:show-panel'); }")
    entries = page.locator(".jp-tocItem-content")
    expect(entries.first).to_contain_text(notebook[0][:2])
    assert not [entry for entry in entries.all_text_contents() if re.search("<|lang=", entry)]
    lab.ask(page, "app => app.shell.collapseLeft()")


@pytest.mark.parametrize("language", LABELS)
def test_the_notebook_shows_the_language_that_is_chosen_and_is_photographed(notebook, page, language):
    choose(page, language)
    assert lab.languages(page) <= expected(language)
    if os.environ.get("HOOKLAB_SCREENSHOTS") != "0":  # nobody looks at those of `make test`
        lab.photograph(page, f"{notebook[0]}.{language}")
        lab.photograph_page(page, f"{notebook[0]}.{language}")
