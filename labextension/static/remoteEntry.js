// The language switch: 中文, English or both, in every notebook at once. And pictures for those who only read.
// Beside it: outputs.js folds what has not run yet, progress.js shows how far one has come, presenter.js is for a class,
// print.js for paper.
//
// JupyterLab (and Notebook 7) runs this file as it stands, there is no build step. A prebuilt extension is an
// object in window._JUPYTERLAB: init() receives the modules that JupyterLab shares, get() hands over the plugin.
// The switch sets one attribute on <html>; style.css does the hiding. No document is ever changed.
(() => {
  "use strict";

  const KEY = "hooklab-language"; // in localStorage
  const LANGUAGES = {
    zh: { button: "中文", command: "只看中文 Chinese only", chinese: "只看中文", english: "Chinese only" },
    en: { button: "English", command: "只看英文 English only", chinese: "只看英文", english: "English only" },
    both: { button: "双语 Both", command: "中英对照 Both languages", chinese: "中英对照", english: "both languages" },
  };
  const NAMES = Object.keys(LANGUAGES);

  // A browser may refuse localStorage (private windows, strict settings): then a choice lasts until a reload.
  const refused = (use) => {
    try {
      return use();
    } catch {
      console.warn("hooklab: this browser does not keep choices over a reload");
      return null;
    }
  };
  const storage = {
    read: (key) => refused(() => localStorage.getItem(key)),
    write: (key, value) => refused(() => localStorage.setItem(key, value)),
    readSession: (key) => refused(() => sessionStorage.getItem(key)),
    writeSession: (key, value) => refused(() => sessionStorage.setItem(key, value)),
  };

  // Before anybody has chosen: JupyterLab's language or the browser's.
  function remembered() {
    const name = storage.read(KEY);
    if (NAMES.includes(name)) return name;
    return [document.documentElement.lang, navigator.language].some((one) => one.startsWith("zh")) ? "zh" : "en";
  }

  let current;
  function show(name) {
    const scrollers = [...document.querySelectorAll(SCROLLER)];
    const places = scrollers.filter((scroller) => scroller.checkVisibility()).map(placeIn);
    current = name;
    document.documentElement.dataset.hooklabLanguage = name;
    document.dispatchEvent(new Event("hooklab-language"));
    places.forEach(keep);
  }

  // The topmost cell of a notebook stays where it is, while the prose above it grows or shrinks.
  const SCROLLER = ".jp-Notebook .jp-WindowedPanel-outer";
  function placeIn(scroller) {
    const { top } = scroller.getBoundingClientRect();
    const cells = [...scroller.querySelectorAll(".jp-Cell")];
    const cell = cells.find((one) => one.getBoundingClientRect().top >= top - 1) ?? cells.at(-1);
    return { scroller, cell, below: cell && cell.getBoundingClientRect().top - top, language: current };
  }

  // For a moment: JupyterLab learns how high a cell is when it draws it.
  function keep({ scroller, cell, below }) {
    const end = performance.now() + 300; // ms
    let frames = 20; // at least: a busy machine draws few in that time
    scroller.addEventListener("wheel", () => (frames = -Infinity), { once: true, passive: true }); // the reader moves on
    function mend() {
      if (frames === -Infinity) return;
      const { top } = scroller.getBoundingClientRect();
      scroller.scrollTop += cell.getBoundingClientRect().top - top - below;
      frames -= 1;
      if (performance.now() < end || frames > 0) requestAnimationFrame(mend);
    }
    if (cell) mend();
  }

  // A notebook behind another one cannot be measured: what counts is where it was when it last scrolled, or when one of
  // its cells was drawn, which may be long after that and moves those below.
  const places = new WeakMap();
  const observed = new WeakSet();
  const drawn = new ResizeObserver((changes) =>
    new Set(changes.map(({ target }) => target.closest(SCROLLER))).forEach(note),
  );
  function note(scroller) {
    if (scroller?.checkVisibility()) places.set(scroller, placeIn(scroller));
  }
  function notePlace({ target }) {
    if (!target.matches?.(SCROLLER)) return;
    note(target);
    for (const cell of target.querySelectorAll(".jp-Cell")) {
      if (!observed.has(cell)) drawn.observe(cell);
      observed.add(cell);
    }
  }
  document.addEventListener("scroll", notePlace, { capture: true, passive: true });

  function comesToTheFront(_, { newValue }) {
    const place = places.get(newValue?.node.querySelector(SCROLLER));
    if (place && place.language !== current) keep(place);
  }

  // JupyterLab shows an SVG only once its cell has run here, and says nothing of it to a screen reader. Here it is
  // an <img>, as there, in which no script runs. The alt text of every picture is the sentence that came with it, or else
  // the first line of the text beside it in the output. A figure without a ground is given none: its lines need none.
  function drawAlways(registry, { svgRendererFactory, RenderedSVG, imageRendererFactory, RenderedImage }) {
    const described = (Renderer) =>
      class extends Renderer {
        async render({ data, metadata }) {
          await super.render({ data, metadata: { ...metadata, needs_background: undefined }, trusted: true });
          const sentence = metadata[this.mimeType]?.alt ?? String(data["text/plain"] ?? "").split("\n", 1)[0];
          this.node.querySelector("img")?.setAttribute("alt", sentence);
        }
      };
    const [Drawing, Photo] = [RenderedSVG, RenderedImage].map(described);
    registry.addFactory({ ...svgRendererFactory, safe: true, createRenderer: (options) => new Drawing(options) });
    registry.addFactory({ ...imageRendererFactory, createRenderer: (options) => new Photo(options) });
  }

  // At once, before the first notebook is drawn.
  show(remembered());
  const style = document.createElement("link");
  style.rel = "stylesheet";
  const source = document.currentScript.src;
  const beside = (name) => new URL(name, source).href;
  style.href = beside("style.css");
  document.head.append(style);

  // `palette` is null where there is none. The toolbar button is declared in schemas/hooklab/plugin.json:
  // it shows the label and the caption of hooklab:language-next, and reads them again at notifyCommandChanged().
  function activate(app, palette) {
    const refresh = () => app.commands.notifyCommandChanged();
    const choose = (name) => {
      show(name);
      storage.write(KEY, name);
      refresh();
    };
    const category = "hooklab 语言 Language";

    for (const name of NAMES) {
      const command = `hooklab:language-${name}`;
      app.commands.addCommand(command, {
        label: LANGUAGES[name].command,
        isToggled: () => current === name, // the tick in the palette
        execute: () => choose(name),
      });
      palette?.addItem({ command, category });
    }

    const next = () => NAMES[(NAMES.indexOf(current) + 1) % NAMES.length];
    app.commands.addCommand("hooklab:language-next", {
      label: ({ toolbar }) => (toolbar ? LANGUAGES[current].button : "换一种语言 Next language"),
      caption: () => {
        const [now, then] = [LANGUAGES[current], LANGUAGES[next()]];
        return `现在${now.chinese}；点击：${then.chinese}\nNow: ${now.english}; click for: ${then.english}`;
      },
      execute: () => choose(next()),
    });
    palette?.addItem({ command: "hooklab:language-next", category });

    app.shell.currentChanged?.connect(comesToTheFront);

    // Another tab of this browser chose a language.
    window.addEventListener("storage", ({ key }) => {
      if (key === KEY) {
        show(remembered());
        refresh();
      }
    });
  }

  // A toolbar is one stop of the Tab key, with arrow keys inside; a button of the course is a stop of its own.
  function reachedByTab(tracker) {
    const OWN = '[data-command^="hooklab:"][tabindex="-1"]';
    const stop = (toolbar) => toolbar.querySelectorAll(OWN).forEach((button) => button.setAttribute("tabindex", "0"));
    const watch = ({ toolbar: { node } }) => {
      const options = { attributes: true, attributeFilter: ["tabindex"], childList: true, subtree: true };
      new MutationObserver(() => stop(node)).observe(node, options);
      stop(node);
    };
    tracker.forEach(watch);
    tracker.widgetAdded.connect((_, panel) => watch(panel));
  }

  // What JupyterLab offers is asked for by token objects, which live in modules that it shares: {version: {get}}.
  let shared = {};
  async function moduleOf(name) {
    try {
      const [newest] = Object.values(shared[name]).reverse();
      return (await newest.get())();
    } catch (error) {
      console.warn(`hooklab: goes on without ${name}`, error);
      return {};
    }
  }

  (window._JUPYTERLAB ??= {}).hooklab = {
    init(scope) {
      shared = scope;
    },
    async get() {
      const [apputils, rendermime, notebook, widgets, services] = await Promise.all(
        ["@jupyterlab/apputils", "@jupyterlab/rendermime", "@jupyterlab/notebook", "@lumino/widgets", "@jupyterlab/services"].map(moduleOf),
      );
      const [{ foldOutputs }, { showProgress }, { addPresenter }, { printHandouts }] = await Promise.all(
        ["outputs.js", "progress.js", "presenter.js", "print.js"].map((name) => import(beside(name))),
      );
      const language = { current: () => current, chosen: remembered, show };
      const plugin = (id, tokens, activate) => ({ id, autoStart: true, optional: tokens.filter(Boolean), activate });
      const plugins = [
        plugin("hooklab:plugin", [apputils.ICommandPalette], activate),
        plugin("hooklab:pictures", [rendermime.IRenderMimeRegistry], (_, registry) => {
          if (registry) drawAlways(registry, rendermime);
        }),
        plugin("hooklab:outputs", [apputils.ICommandPalette, notebook.INotebookTracker], (app, palette, tracker) => {
          if (!tracker) return;
          const refold = foldOutputs(app, palette, tracker, notebook, storage);
          printHandouts(app, tracker, language, ["style.css", "print.css"].map(beside), { ...apputils, ...services });
          addPresenter(app, palette, tracker, language, storage, refold, { ...notebook, ...widgets, ...apputils });
          reachedByTab(tracker);
        }),
        plugin("hooklab:progress", [apputils.ICommandPalette], (app, palette) =>
          showProgress(app, palette, language.current, widgets, services, notebook, apputils)),
      ];
      return () => ({ __esModule: true, default: plugins });
    },
  };
})();
