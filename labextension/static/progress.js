// The progress panel in the left sidebar: parts, notebooks, minutes, what is done, what is next.
//
// The kernel's checks write one small file in Jupyter's data folder; the server part (hooklab_desk/server.py) hands it over.

const WORDS = {
  zh: { title: "课程进度", minutes: "分钟", predictions: "预测", exercises: "练习", next: "接下来", fast: "快速路线", reset: "重新开始计进度",
        lookUp: "查一查", questions: "报错或现象 → 问题索引", cheatsheet: "每种钩子 → 速查表", glossary: "一个词 → 术语表",
        sure: "忘掉所有进度？笔记本里写的东西不受影响。", none: "读不到进度：服务器没有应答。" },
  en: { title: "Progress", minutes: "min", predictions: "predictions", exercises: "exercises", next: "next", fast: "fast track", reset: "Reset progress",
        lookUp: "Look it up", questions: "an error or a symptom → questions", cheatsheet: "every hook → cheat sheet", glossary: "a word → glossary",
        sure: "Forget all progress? What you have written in the notebooks stays.", none: "No progress to show: the server did not answer." },
};
const BOTH = Object.fromEntries(Object.keys(WORDS.en).map((key) => [key, `${WORDS.zh[key]} · ${WORDS.en[key]}`]));
const CATEGORY = "hooklab 课程 Course";
const FOLDERS = ["", "my-notebooks", "notebooks", "docs"];
const PAGES = { // each in the language of the panel
  questions: { zh: "QUESTIONS.zh-CN.md", en: "QUESTIONS.md" },
  cheatsheet: { zh: "cheatsheet.zh-CN.md", en: "cheatsheet.md" },
  glossary: { zh: "glossary.md", en: "glossary.md" },
};

export function showProgress(app, palette, language, { Widget }, { ServerConnection }, { NotebookActions }, { Dialog, showDialog }) {
  const { serverSettings, contents } = app.serviceManager;
  const address = new URL("hooklab/progress", serverSettings.baseUrl).href;
  const ask = (method) => ServerConnection.makeRequest(address, { method }, serverSettings);

  const widget = new Widget();
  widget.id = "hooklab-progress";
  widget.addClass("hooklab-progress");
  widget.title.iconClass = "hooklab-progress-icon jp-SideBar-tabIcon";
  widget.node.setAttribute("role", "region");
  app.shell.add(widget, "left", { rank: 110 });

  const words = () => WORDS[language()] ?? BOTH;
  const inLanguage = ({ zh, en }) => ({ zh, en })[language()] ?? `${zh} · ${en}`;

  function make(tag, content = "", attributes = {}) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...[content].flat());
    return node;
  }

  async function open(file, factory) {
    for (const folder of FOLDERS) {
      const path = folder ? `${folder}/${file}` : file;
      const found = await contents.get(path, { content: false }).catch(() => null);
      if (found) return app.commands.execute("docmanager:open", { path, factory });
    }
  }

  function count(names, done) {
    return names.filter((name) => done[name] === "done").length;
  }

  function linkTo(text, file, factory) {
    const link = make("button", text, { class: "hooklab-progress-link" });
    link.addEventListener("click", () => open(file, factory));
    return link;
  }

  function pages() {
    const links = Object.entries(PAGES).map(([name, { zh, en }]) =>
      make("li", linkTo(words()[name], language() === "en" ? en : zh, "Markdown Preview")));
    return make("section", [make("h3", words().lookUp), make("ul", links)]);
  }

  function row(book, done, isNext) {
    const told = words();
    const link = linkTo(`${book.number} ${inLanguage(book)}`, book.file);
    const kinds = ["predictions", "exercises"];
    const counts = kinds.map((kind) => `${told[kind]} ${count(book[kind], done)}/${book[kind].length}`);
    const all = book.predictions.length + book.exercises.length;
    const bar = make("progress", "", { max: all, value: kinds.reduce((sum, kind) => sum + count(book[kind], done), 0) });
    bar.setAttribute("aria-label", counts.join(", "));
    const title = isNext ? [make("strong", told.next, { class: "hooklab-progress-next" }), link] : [link];
    const facts = make("small", [`${book.minutes} ${told.minutes}`, ...(book.fast ? [told.fast] : []), ...counts].join(" · "));
    return make("li", [...title, bar, facts], isNext ? { "aria-current": "step" } : {});
  }

  function draw({ parts, done }) {
    const books = parts.flatMap(({ notebooks }) => notebooks);
    const finished = (book) => [...book.predictions, ...book.exercises].every((name) => done[name] === "done");
    const next = books.find((book) => !finished(book));
    const sections = parts.map((part) =>
      make("section", [make("h3", inLanguage(part)), make("ul", part.notebooks.map((book) => row(book, done, book === next)))]));
    const reset = make("button", words().reset, { class: "jp-mod-styled" });
    reset.addEventListener("click", forget);
    widget.node.replaceChildren(make("h2", words().title), ...sections, pages(), reset);
  }

  async function forget() {
    const buttons = [Dialog.cancelButton({ label: "取消 Cancel" }), Dialog.warnButton({ label: words().reset })];
    const { button } = await showDialog({ title: words().title, body: words().sure, buttons });
    if (!button.accept) return;
    await ask("DELETE");
    await refresh();
  }

  async function refresh() {
    widget.title.caption = "课程进度 Progress";
    widget.node.setAttribute("aria-label", words().title);
    try {
      const answer = await ask("GET");
      if (!answer.ok) throw new Error(answer.statusText);
      draw(await answer.json());
    } catch (error) {
      console.warn("hooklab: no progress", error);
      widget.node.replaceChildren(make("p", words().none));
    }
  }

  NotebookActions.executed.connect((_, { cell }) => {
    if (/\bcheck\.(predict|exercise)\(/.test(cell.model.sharedModel.getSource())) refresh();
  });
  document.addEventListener("hooklab-language", refresh);
  const command = "hooklab:progress";
  app.commands.addCommand(command, {
    label: "课程进度 Course progress",
    execute: () => app.shell.activateById(widget.id),
  });
  palette?.addItem({ command, category: CATEGORY });
  refresh();
}
