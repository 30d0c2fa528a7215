"""File > Print in JupyterLab, as a PDF on A4: a handout to write on, in one language, whole pictures, an appendix."""

import io
import re
import shutil
import tomllib
import unicodedata

import browser_lab as lab
import notebook_form
import pytest
from pypdf import PdfReader

pytestmark = pytest.mark.long  # `make test-long`
NOTEBOOKS = {"11_reading_gradients": (8, 20), "41_is_it_learning": (10, 24)}  # pages: what a class can be handed
THEMES = {"en": "JupyterLab Light", "zh": "JupyterLab Dark"}
SAYS = {
    "en": {"guess": "My guess", "appendix": "Appendix", "solution": "Solution", "todo": "Not attempted"},
    "zh": {"guess": "我猜", "appendix": "附录", "solution": "参考答案", "todo": "还没有"},
}
CHINESE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff]")
# JupyterLab hangs up a frame with the page, prints it and takes it away. Here nothing prints.
CAUGHT = """async app => {
  const caught = new Promise(done => new MutationObserver((changes, self) => {
    const frame = document.body.querySelector(':scope > iframe');
    if (!frame) return;
    self.disconnect();
    frame.addEventListener('load', () => {
      frame.contentWindow.print = () => {};
      done(frame.srcdoc);
      setTimeout(() => document.body.dispatchEvent(new MouseEvent('mousemove', { bubbles: true })), 100);
    });
  }).observe(document.body, { childList: true }));
  app.commands.execute('apputils:print');
  return await caught;
}"""
PICTURES = """() => [...document.images].map(it => {
  const { left, right, width, height } = it.getBoundingClientRect();
  return { inside: left >= 0 && right <= innerWidth + 1, kept: getComputedStyle(it).breakInside,
           whole: Math.abs(width / height / (it.naturalWidth / it.naturalHeight) - 1) };
})"""
WIDTH = 680  # CSS pixels: A4 without its margins


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("print") / "notebooks"
    folder.mkdir()
    for stem in NOTEBOOKS:
        shutil.copy(notebook_form.NOTEBOOKS / f"{stem}.ipynb", folder)
    with lab.page_on(folder) as page:
        yield page


@pytest.fixture(scope="module", params=[(stem, language) for stem in NOTEBOOKS for language in SAYS], ids="-".join)
def handout(request, page):
    """The notebook, the language, the page that would be printed, and the PDF that comes of it."""
    stem, language = request.param
    lab.open_notebook(page, f"{stem}.ipynb")
    theme = "async (app, _, theme) => { await app.commands.execute('apputils:change-theme', { theme }); }"
    lab.ask(page, theme, THEMES[language])
    lab.choose(page, language)
    lab.wait_until(
        page, "() => ![...document.querySelectorAll('.jp-MarkdownOutput')].some(it => /\\$.+\\$/.test(it.textContent))"
    )
    html = lab.ask(page, CAUGHT)
    paper = page.context.new_page()
    paper.goto(
        page.url.partition("/lab")[0] + "/lab/extensions/hooklab/static/print.css"
    )  # so the pictures are at home
    paper.set_content(html)
    paper.emulate_media(media="print")
    paper.set_viewport_size({"width": WIDTH, "height": 1000})
    printed = PdfReader(io.BytesIO(paper.pdf(prefer_css_page_size=True, outline=True, tagged=True)))
    yield stem, language, paper, printed
    paper.close()


def plain(text):
    """Without spaces and backticks, each character in its usual form: in a PDF there are ligatures and radicals."""
    return re.sub(r"[\s`*]", "", unicodedata.normalize("NFKC", text))


def text_of(printed):
    return plain("".join(sheet.extract_text() for sheet in printed.pages))


def explained(stem):
    """The predictions of a notebook, with what explains them."""
    path = notebook_form.ROOT / "hooklab" / "course" / "checks" / f"n{stem}.toml"
    return {name: words for name, words in tomllib.loads(path.read_text(encoding="utf-8")).items() if "zh" in words}


def test_a_handout_has_a_line_for_each_guess_and_explains_it_on_the_last_pages(handout):
    stem, language, _, printed = handout
    says, text, predictions = SAYS[language], text_of(printed), explained(stem)
    assert len(predictions) >= 2
    body, _, appendix = text.rpartition(plain(says["appendix"]))
    for name, words in predictions.items():
        assert plain(f"{name} {says['guess']}") in body, name
        assert plain(words[language]) in appendix, name
        assert plain(words[language]) not in body, name
    assert plain(says["todo"]) not in text
    assert plain(says["solution"]) not in text


def test_a_handout_is_in_one_language_black_on_white_also_from_the_dark_theme(handout):
    stem, language, paper, printed = handout
    text = text_of(printed)
    halves = [cell["source"] for cell in notebook_form.read(notebook_form.NOTEBOOKS / f"{stem}.ipynb")["cells"]]
    if language == "en":
        assert not CHINESE.findall(text)
    else:
        english = re.findall(r'<div lang="en">\n\n([A-Z][^`$*\[<]{30,}?[.:?])', "\n".join(map("".join, halves)))
        assert len(english) > 10
        assert [sentence for sentence in english if plain(sentence) in text] == []
        assert plain("".join(halves[0]).splitlines()[0].rpartition(" · ")[2]) not in text
    colours = "() => [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    assert paper.evaluate(colours) == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]


def test_a_handout_is_a4_with_whole_pictures_and_no_heading_at_the_foot_of_a_page(handout):
    stem, _, paper, printed = handout
    least, most = NOTEBOOKS[stem]
    assert least <= len(printed.pages) <= most
    assert [round(float(side)) for side in printed.pages[0].mediabox[2:]] == [595, 842]
    pictures = paper.evaluate(PICTURES)
    assert pictures
    for picture in pictures:
        assert picture["inside"], pictures
        assert picture["whole"] < 0.02, pictures
        assert picture["kept"] == "avoid"
    headings = list(flat(printed.outline))
    assert len(headings) > 8
    foot = [heading.title for heading in headings if float(heading.top) < 90]  # points: the margin and two lines
    assert foot == []


def flat(outline):
    for entry in outline:
        if isinstance(entry, list):
            yield from flat(entry)
        else:
            yield entry
