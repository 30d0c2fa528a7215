"""Decks in a browser, as a class sees them on a projector. No network is asked: they are opened as files."""

import shutil

import measure_slides
import pytest

pytestmark = pytest.mark.long

START = "() => window.Reveal?.isReady?.()"


@pytest.fixture
def page(chromium, folder):
    """The deck of 11 in English, at its first slide."""
    page = chromium.new_page(viewport=measure_slides.SCREEN)
    page.goto((folder / "11_reading_gradients.en.html").as_uri())
    page.wait_for_function(START)
    yield page
    page.close()


def test_every_slide_is_read_from_the_back_row_and_nothing_on_it_is_lost(chromium, folder):
    decks = sorted(folder.glob("*_*.html"))
    assert len(decks) % 2 == 0
    for path in decks:
        deck = measure_slides.measure(chromium, path)
        assert deck.wrong == []
        assert deck.slides > 15, path.name
        assert deck.scrolling <= deck.slides / 10, path.name


FAULTS = {
    ".reveal li { font-size: 27px !important; }": "type of 27 px",
    ".reveal pre { font-size: 23px !important; }": "type of 23 px",
    ".reveal h1 { width: 60px; overflow-wrap: anywhere; }": "a word broken",
    ".reveal pre { white-space: pre !important; margin-left: 400px !important; }": "cut at the side",
    ".reveal section section::after { content: ''; display: block; height: 900px; } #more { display: none; }": "no mark",
    ".reveal figure img { height: 900px !important; }": "a picture cut",
    ".reveal { background: url(http://127.0.0.1:9/x.png); }": "asks for http://127.0.0.1:9/x.png",
}


def test_what_is_wrong_with_a_deck_is_found(chromium, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "slides")
    with (copy / "slides.css").open("a", encoding="utf-8") as style:
        style.write("\n".join(FAULTS))
    wrong = measure_slides.measure(chromium, copy / "11_reading_gradients.en.html").wrong
    assert [found for found in FAULTS.values() if not any(found in line for line in wrong)] == []


def test_speaker_notes_open_under_s_from_a_file_with_the_next_slide(page):
    page.evaluate("Reveal.getSlides()[2].insertAdjacentHTML('beforeend', '<aside class=notes>draw the graph</aside>')")
    with page.expect_popup() as opened:
        page.keyboard.press("s")
    notes = opened.value
    notes.wait_for_function("() => document.querySelectorAll('iframe').length === 2")
    page.keyboard.press(" ")
    page.keyboard.press(" ")
    notes.get_by_text("draw the graph").wait_for(timeout=20_000)
    assert all(frame.url.startswith(("file:", "about:")) for frame in notes.frames)


def test_a_key_that_goes_on_shows_first_what_is_below(page):
    page.evaluate("Reveal.getCurrentSlide().firstElementChild.style.marginBottom = '900px'; Reveal.layout()")
    page.evaluate("document.getElementById('more').hidden = false")
    places = []
    while page.evaluate("Reveal.getSlidePastCount()") == 0:
        page.keyboard.press("PageDown")
        page.wait_for_timeout(100)  # ms
        places.append(page.evaluate("Reveal.getSlides()[0].scrollTop"))
        assert len(places) < 9
    assert places[0] > 100
    assert len(places) > 2


def test_every_deck_is_on_the_index_and_nothing_else_is_in_the_folder(chromium, folder):
    page = chromium.new_page()
    page.goto((folder / "index.html").as_uri())
    assert page.get_by_text("s the speaker notes").is_visible()
    links = page.eval_on_selector_all("a", "links => links.map(link => link.getAttribute('href'))")
    page.close()
    assert sorted(links) == sorted(path.name for path in folder.glob("*_*.html"))
    assert {path.name for path in folder.iterdir()} == {*links, "index.html", "slides.css", "slides.js", "reveal"}
    assert (folder / "reveal" / "LICENSE").is_file()
