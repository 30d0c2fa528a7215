// The language switch: 中文, English or both, in every notebook at once.
//
// JupyterLab (and Notebook 7) runs this file as it stands, there is no build step. A prebuilt extension is an
// object in window._JUPYTERLAB: init() receives the modules that JupyterLab shares, get() hands over the plugin.
// The switch sets one attribute on <html>; style.css does the hiding. No document is ever changed.
(() => {
  "use strict";

  const KEY = "hooklab-language"; // in localStorage
  const LANGUAGES = {
    zh: { button: "中文", command: "只看中文", now: "现在只看中文 · Chinese only" },
    en: { button: "English", command: "English only", now: "现在只看英文 · English only" },
    both: { button: "双语", command: "双语 Both", now: "现在中英对照 · Both languages" },
  };
  const NAMES = Object.keys(LANGUAGES);

  // A browser may refuse localStorage (private windows, strict settings): then the choice lasts until a reload.
  function remembered() {
    try {
      const name = localStorage.getItem(KEY);
      return NAMES.includes(name) ? name : "both";
    } catch {
      return "both";
    }
  }

  function remember(name) {
    try {
      localStorage.setItem(KEY, name);
    } catch {
      console.warn("hooklab: this browser does not keep the language over a reload");
    }
  }

  let current;
  function show(name) {
    current = name;
    document.documentElement.dataset.hooklabLanguage = name;
  }

  // At once, before the first notebook is drawn.
  show(remembered());
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("style.css", document.currentScript.src);
  document.head.append(style);

  // `palette` is null where there is none. The toolbar button is declared in schemas/hooklab/plugin.json:
  // it shows the label and the caption of hooklab:language-next, and reads them again at notifyCommandChanged().
  function activate(app, palette) {
    const refresh = () => app.commands.notifyCommandChanged();
    const choose = (name) => {
      show(name);
      remember(name);
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
      caption: () => `${LANGUAGES[current].now}\n点击：${LANGUAGES[next()].command} · click to change`,
      execute: () => choose(next()),
    });
    palette?.addItem({ command: "hooklab:language-next", category });

    // Another tab of this browser chose a language.
    window.addEventListener("storage", ({ key }) => {
      if (key === KEY) {
        show(remembered());
        refresh();
      }
    });
  }

  // The palette is asked for by a token object, which lives in a module that JupyterLab shares: {version: {get}}.
  let shared = {};
  async function paletteToken() {
    try {
      const [newest] = Object.values(shared["@jupyterlab/apputils"]).reverse();
      return (await newest.get())().ICommandPalette;
    } catch (error) {
      console.warn("hooklab: no entries in the command palette, the commands work all the same", error);
    }
  }

  (window._JUPYTERLAB ??= {}).hooklab = {
    init(scope) {
      shared = scope;
    },
    async get() {
      const token = await paletteToken();
      const plugin = { id: "hooklab:plugin", autoStart: true, optional: token ? [token] : [], activate };
      return () => ({ __esModule: true, default: plugin });
    },
  };
})();
