"""Looks at every slide of a deck in a browser, as a projector of 1280x720 shows it.

    uv run python tests/support/measure_slides.py slides/11_reading_gradients.en.html ...

Prints how many slides each deck has, how many of them scroll, and what is wrong with which; exits with 1 if anything is.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import browser_lab

SCREEN = {"width": 1280, "height": 720}
# What is wrong with the slide in front. Text in pictures, and small parts of formulas, have sizes of their own.
LOOK = r"""async ([prose, code]) => {
  const slide = Reveal.getCurrentSlide(), found = [];
  const shown = node => node.checkVisibility({ visibilityProperty: true }) && !node.closest("aside, button");
  const pieces = (text, word) => {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return [...range.getClientRects()];
  };
  const box = slide.getBoundingClientRect();
  if (Math.round(box.width) !== 1280 || Math.round(box.height) !== 720) found.push(`the slide is ${box.width}x${box.height}`);
  const texts = document.createTreeWalker(document.querySelector(".reveal"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, parent = text.parentElement;
    if (!text.data.trim() || !shown(parent) || parent.closest("script, style, .aria-status, .backgrounds")) continue;
    const size = parseFloat(getComputedStyle(parent.closest("math") ?? parent).fontSize);
    const least = parent.closest("pre") ? code : prose;
    if (size < least) found.push(`type of ${size} px: ${text.data.trim().slice(0, 40)}`);
    for (const word of text.data.matchAll(/[A-Za-z0-9]+/g)) {
      const lines = new Set(pieces(text, word).filter(it => it.width > 1).map(it => Math.round(it.top)));
      if (lines.size > 1) found.push(`a word broken: ${word[0]}`);
    }
    if (slide.contains(text)) {
      const cut = word => pieces(text, word).some(it => it.right > 1281 || it.left < -1);
      for (const word of text.data.matchAll(/\S+/g)) if (cut(word)) found.push(`cut at the side: ${word[0]}`);
      if (/\$[^$]+\$|\\[(\[]/.test(text.data) && !parent.closest("pre, code")) found.push(`a formula as text: ${text.data}`);
    }
  }
  const hidden = slide.scrollHeight - slide.clientHeight - slide.scrollTop;
  const mark = document.getElementById("more");
  if (hidden > 2 && !(shown(mark.parentElement) && mark.checkVisibility())) found.push(`${hidden} px below, and no mark says so`);
  for (const image of slide.querySelectorAll("img")) {
    const { top, left, right, height } = image.getBoundingClientRect();
    const low = top - box.top + slide.scrollTop + height;
    if (!image.naturalWidth) found.push(`no picture: ${image.alt}`);
    if (left < 0 || right > 1280 || height > 720 || low > slide.scrollHeight) found.push(`a picture cut: ${image.alt}`);
  }
  const pictures = slide.querySelectorAll("img").length;
  if (!slide.innerText.trim() && !pictures) found.push("nothing on it");
  return { found: [...new Set(found)], scrolls: hidden > 2, pictures };
}"""


@dataclass
class Deck:
    """What was seen of one: how many slides, how many of them scroll, and what is wrong where."""

    slides: int
    scrolling: int
    pictures: int
    wrong: list[str]


def measure(chromium, path: Path, photographs: Path | None = None) -> Deck:
    """Goes through the deck in the file `path`; keeps a picture of each slide in `photographs` where that is given."""
    page = chromium.new_page(viewport=SCREEN)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: asked.append(f"error: {error}"))
    page.goto(path.absolute().as_uri())
    page.wait_for_function("() => window.Reveal?.isReady?.()")
    deck, places = Deck(0, 0, 0, []), page.evaluate("Reveal.getSlides().map(slide => Reveal.getIndices(slide))")
    for place in places:
        page.evaluate("({ h, v }) => Reveal.slide(h, v)", place)
        name = f"{place['h'] + 1}.{place['v'] + 1}"
        seen = page.evaluate(LOOK, [28, 24])
        deck.slides, deck.scrolling = deck.slides + 1, deck.scrolling + seen["scrolls"]
        deck.pictures += seen["pictures"]
        deck.wrong += [f"{path.name} {name}: {found}" for found in seen["found"]]
        if photographs:
            page.screenshot(path=photographs / f"{path.stem}.{name}.png")
    deck.wrong += [f"{path.name}: asks for {url}" for url in asked if not url.startswith(("file:", "data:"))]
    page.close()
    return deck


def main(paths: list[str]) -> int:
    wrong = 0
    with browser_lab.browser() as chromium:
        for path in map(Path, paths):
            deck = measure(chromium, path)
            print(
                f"{path.name}: {deck.slides} slides, {deck.scrolling} scroll, {deck.pictures} pictures",
                *deck.wrong,
                sep="\n  ",
            )
            wrong += len(deck.wrong)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
