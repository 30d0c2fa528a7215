// File > Print makes a handout: one language, lines to write a guess on, what explains it at the end, no solutions.
//
// JupyterLab asks its server for a page, nbconvert's, and prints it in a frame in which no script runs. Here the page
// is changed on its way, and print.css lays it out. The notebook on the screen and its file stay as they are.

import { splitHeadings } from "./headings.js";

const GUESS = { zh: "我猜", en: "My guess" };
const APPENDIX = { zh: "附录：每个预测的解释", en: "Appendix: what explains each prediction" };
const PREDICTS = /\bcheck\.predict\("([^"]+)"/;
const CHECK = /^(from hooklab import check$|check\.|$)/;

function make(page, tag, content, properties = {}) {
  const node = Object.assign(page.createElement(tag), properties);
  node.append(...content);
  return node;
}

// An element for each language, of which style.css hides one; `code` in backticks.
function inBoth(page, tag, words) {
  return ["zh", "en"].map((lang) => {
    const parts = words[lang].split("`").map((part, at) => (at % 2 ? make(page, "code", [part]) : part));
    return make(page, tag, parts, { lang });
  });
}

// Where nobody has guessed yet there is a line to write on, and the checks, which would say no more than that, go.
function forPaper(page, { model, node }) {
  const printed = page.getElementById(`cell-id=${model.id}`);
  const source = model.sharedModel.getSource();
  const [, predicts] = (model.type === "code" && PREDICTS.exec(source)) || [];
  const untried = /^check\./m.test(source) && printed?.querySelector(".hooklab-todo");
  if (untried) (source.split("\n").every((line) => CHECK.test(line)) ? printed : untried.closest(".jp-Cell-outputWrapper")).remove();
  if (model.getMetadata("jupyter")?.source_hidden) printed?.querySelector(".jp-Cell-inputWrapper")?.remove();
  const prose = node.querySelector(".jp-MarkdownOutput:has(mjx-container)"); // with a formula, which takes a script to draw
  if (prose && printed) {
    const copy = page.importNode(prose, true);
    copy.querySelectorAll("mjx-container").forEach((formula) => formula.replaceWith(...formula.querySelectorAll("math")));
    printed.querySelector(".jp-MarkdownOutput").replaceWith(copy);
  }
  return { guess: /^guess = None\b/.test(source) && printed, predicts, untried };
}

function handout(text, cells, explained, language, styles, address) {
  const page = new DOMParser().parseFromString(text, "text/html");
  page.documentElement.dataset.hooklabLanguage = language;
  page.body.classList.add("hooklab-paper");
  page.head.prepend(make(page, "base", [], { href: address }));
  page.head.append(...styles.map((href) => make(page, "link", [], { rel: "stylesheet", href })));

  const predicted = [];
  let asked; // the cell with the guess, above the prediction
  for (const cell of cells) {
    const { guess, predicts, untried } = forPaper(page, cell);
    if (guess) asked = guess;
    if (!predicts) continue;
    predicted.push(predicts);
    const line = [`${predicts} `, ...inBoth(page, "span", GUESS)];
    if (untried && asked) asked.replaceWith(make(page, "div", line, { className: "hooklab-line" }));
    asked = undefined;
  }

  page.querySelectorAll(".celltag_solution, .celltag_lab-only, .anchor-link, script").forEach((node) => node.remove());
  page.querySelectorAll("details").forEach((node) => (node.open = true));
  splitHeadings(page);
  const known = predicted.filter((name) => explained[name]);
  const entries = known.flatMap((name) => [make(page, "dt", [name]), make(page, "dd", inBoth(page, "div", explained[name]))]);
  const appendix = [make(page, "h2", inBoth(page, "div", APPENDIX)), make(page, "dl", entries)];
  const className = "hooklab-appendix jp-RenderedHTMLCommon";
  if (known.length) page.querySelector("main").append(make(page, "section", appendix, { className }));
  return `<!DOCTYPE html>${page.documentElement.outerHTML}`;
}

export function printHandouts(app, tracker, language, styles, { Printing, ServerConnection }) {
  const { contents, serverSettings } = app.serviceManager;
  const at = (path) => new URL(path, serverSettings.baseUrl).href;

  async function explanations(cells) {
    const names = cells.map(({ model }) => PREDICTS.exec(model.sharedModel.getSource())?.[1]).filter(Boolean);
    const numbers = [...new Set(names.map((name) => name.split(".")[0]))];
    const tables = await Promise.all(numbers.map(async (number) => {
      const answer = await ServerConnection.makeRequest(at(`hooklab/explanations/${number}`), {}, serverSettings);
      return answer.ok ? answer.json() : {}; // of a notebook of one's own
    }));
    return Object.assign({}, ...tables);
  }

  async function print({ context, content }) {
    if (context.model.dirty && !context.model.readOnly) await context.save();
    const path = contents.localPath(context.path).split("/").map(encodeURIComponent).join("/");
    const explained = await explanations(content.widgets);
    const { fetch: ask } = serverSettings;
    const fetch = async (...request) => {
      const answer = await ask(...request);
      if (!answer.ok) return answer;
      const text = await answer.text();
      return new Response(handout(text, content.widgets, explained, language.current(), styles, at(`files/${path}`)));
    };
    await Printing.printURL(at(`nbconvert/html/${path}?download=false`), { ...serverSettings, fetch });
  }

  const take = (panel) => (panel[Printing.symbol] = () => () => print(panel));
  tracker.forEach(take);
  tracker.widgetAdded.connect((_, panel) => take(panel));
}
