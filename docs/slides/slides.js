// Cuts what is too long for a slide, then starts reveal.js. Only the browser knows how high text is in its fonts.
const WIDTH = 1280, HEIGHT = 720, HIGH = 32, LOW = 52;  // px; the last two are the paddings of a slide
const PICTURE = 620;  // px, the height of one that has a slide of its own
const reveal = document.querySelector(".reveal");
const more = document.getElementById("more");

const blocks = slide => [...slide.children].filter(child => child.localName !== "aside");
const bottom = (slide, block) => block.getBoundingClientRect().bottom - slide.getBoundingClientRect().top;
const fits = (slide, block) => bottom(slide, block) <= HEIGHT - LOW + 1;
const heading = block => /^h\d$/.test(block.localName);
// A slide ends here in need only: what stands above leads to what stands below, or below is what the code above prints.
const belongs = (above, below) =>
  (above.localName === "p" && /[:：]$/.test(above.textContent.trim())) || (above.matches(".code") && below.matches(".output"));

function sizePicture(slide, image) {
  const rest = HEIGHT - LOW - (image.getBoundingClientRect().top - slide.getBoundingClientRect().top);
  const whole = Math.min(PICTURE, image.naturalHeight * 2, (image.parentElement.clientWidth * image.naturalHeight) / image.naturalWidth);
  image.style.height = `${rest < 0.8 * whole ? whole : Math.min(whole, rest)}px`;
}

function fit(slide) {
  const all = blocks(slide);
  let end = 0;
  for (; end < all.length; end++) {
    for (const image of all[end].querySelectorAll("img")) sizePicture(slide, image);
    if (!fits(slide, all[end])) break;
  }
  if (end === all.length) return;
  const ends = all.map((_, index) => index).filter(index => index && index <= end && !heading(all[index - 1]));
  const together = index => bottom(slide, all[end]) - bottom(slide, all[index - 1]) < HEIGHT - LOW - HIGH;
  end = ends.findLast(index => !belongs(all[index - 1], all[index]) && together(index)) ?? ends.at(-1);
  if (!end) {  // the first block is higher than a slide, with the headings above it
    slide.classList.add("scrolls");
    end = all.findIndex(block => !heading(block)) + 1;
    if (!end || end === all.length) return;
  }
  const next = document.createElement("section");
  next.append(...all.slice(end), ...[...slide.querySelectorAll(":scope > aside")].map(notes => notes.cloneNode(true)));
  slide.after(next);
  fit(next);
}

const below = slide => (slide ? slide.scrollHeight - slide.clientHeight - slide.scrollTop : 0);

function mark() {
  more.hidden = below(Reveal.getCurrentSlide()) < 4;
}

function scroll() {
  Reveal.getCurrentSlide().scrollBy(0, HEIGHT * 0.7);
}

async function start() {
  await Promise.allSettled([...document.images].map(image => image.decode()));
  for (const slide of document.querySelectorAll(".slides > section > section")) fit(slide);
  reveal.classList.remove("fitting");
  reveal.querySelector(".slides").append(more);
  for (const event of ["scroll", "toggle"]) reveal.addEventListener(event, mark, true);
  more.addEventListener("click", scroll);
  // A key that goes on shows first what is still below.
  addEventListener("keydown", event => {
    if ([" ", "ArrowRight", "ArrowDown", "PageDown"].includes(event.key) && !event.shiftKey && !more.hidden && !Reveal.isOverview()) {
      event.stopImmediatePropagation();
      event.preventDefault();
      scroll();
    }
  }, true);
  Reveal.on("slidechanged", mark);
  await Reveal.initialize({
    width: WIDTH, height: HEIGHT, margin: 0, center: false, hash: true, slideNumber: "c/t", transition: "none",
    navigationMode: "linear", controls: false, plugins: [RevealNotes],
  });
  mark();
}

start();
