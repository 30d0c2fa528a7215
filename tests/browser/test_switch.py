"""One notebook in JupyterLab, in a real browser: both languages, the switch, a picture. The rest is in test_browser.py."""

import shutil

import browser_lab as lab
import notebook_form
from playwright.sync_api import expect

STEM = "11_reading_gradients"


def test_a_notebook_shows_the_browsers_language_then_the_chosen_one_and_its_pictures(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    stored = notebook_form.NOTEBOOKS / f"{STEM}.ipynb"
    shutil.copy(stored, folder)
    with lab.page_on(folder) as page:
        lab.open_notebook(page, stored.name)
        for language in ("en", "both", "zh", "en"):
            lab.expect_language(page, language)
            lab.button(page).click()
        lab.choose(page, "zh")
        title = page.locator(f"{lab.FRONT} h1").first
        expect(title).to_contain_text("读取梯度")
        drawn = notebook_form.cells(notebook_form.read(stored))
        for cell, shown in zip(drawn, lab.cells(page), strict=True):
            assert len(shown["images"]) >= len(notebook_form.pictures(cell)), cell.id
            assert all(width >= 50 for width in shown["images"]), cell.id
        assert any(notebook_form.pictures(cell) for cell in drawn)
