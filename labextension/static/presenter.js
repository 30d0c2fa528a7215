// The presenter's mode: one section at a time in large type, outputs folded until their cell runs, and a clock.
//
// It hangs marks on nodes, which style.css reads, and a bar above the cells; leaving takes them off. No notebook changes.
// Where the class is stands in sessionStorage, so that a reload of this browser tab goes on there.

import { inLanguage, sections, splitHeadings } from "./headings.js";

const KEY = "hooklab-present";
const WORDS = {
  zh: { mode: "讲课模式", back: "上一节", next: "下一节", here: "本节", all: "全程", leave: "退出" },
  en: { mode: "Presenter's mode", back: "back", next: "next", here: "section", all: "total", leave: "Leave" },
};
const STEPS = { // the keys are those of a remote control
  PageDown: { command: "hooklab:present-next", by: 1, label: "讲课：下一节 Present: next section" },
  PageUp: { command: "hooklab:present-back", by: -1, label: "讲课：上一节 Present: section before" },
};
const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
const make = (tag, properties = {}) => Object.assign(document.createElement(tag), properties);

export function addPresenter(app, palette, tracker, language, storage, refold, { NotebookActions, Widget, Dialog, showDialog }) {
  let panel = null; // the notebook of the class
  let lesson, bar, windowing, timer; // sessionStorage keeps the lesson
  const keep = () => storage.writeSession(KEY, JSON.stringify({ ...lesson, path: panel.context.path }));
  const refresh = () => app.commands.notifyCommandChanged();
  const words = () => WORDS[language.current()] ?? WORDS[lesson.room];

  function begin(notebook, start) {
    [panel, lesson, bar] = [notebook, start, new Widget()];
    const { content } = panel;
    windowing = content.notebookConfig.windowingMode;
    content.notebookConfig = { ...content.notebookConfig, windowingMode: "none" }; // "full" would place cells that are away
    bar.addClass("hooklab-bar");
    bar.node.setAttribute("role", "toolbar");
    panel.addClass("hooklab-presenting");
    panel.contentHeader.addWidget(bar);
    app.shell.collapseLeft?.();
    refold(panel, new Set(lesson.ran));
    if (language.current() === "both") language.show(lesson.room);
    timer = setInterval(tick, 1000); // ms
    go(lesson.section);
    refresh();
  }

  function leave() {
    const left = panel;
    panel = null;
    clearInterval(timer);
    storage.writeSession(KEY, "null");
    if (!left.isDisposed) {
      const { content } = left;
      content.widgets.forEach(({ node }) => node.removeAttribute("data-hooklab-away"));
      content.notebookConfig = { ...content.notebookConfig, windowingMode: windowing };
      left.removeClass("hooklab-presenting");
      bar.dispose();
      refold(left);
    }
    if (lesson.sidebar) app.shell.expandLeft();
    language.show(language.chosen());
    refresh();
  }

  function go(section) {
    const now = Date.now();
    lesson.spent[lesson.section] = (lesson.spent[lesson.section] ?? 0) + now - lesson.since;
    Object.assign(lesson, { section: Math.max(section, 0), since: now });
    draw();
    panel.content.mode = "command";
    panel.content.activeCellIndex = sections(panel.content)[lesson.section].first;
    panel.content.outerNode.scrollTop = 0;
    app.shell.activateById(panel.id);
    keep();
  }

  // Shift+Enter in the last cell of a section must not hide what that cell prints.
  function stay() {
    const { first, last } = sections(panel.content)[lesson.section];
    panel.content.activeCellIndex = Math.min(Math.max(panel.content.activeCellIndex, first), last);
  }

  function draw() {
    const [all, { mode, back, next, leave: out }] = [sections(panel.content), words()];
    const section = (lesson.section = Math.min(lesson.section, all.length - 1));
    const { first, last } = all[section];
    panel.content.widgets.forEach(({ node }, at) => node.toggleAttribute("data-hooklab-away", at < first || at > last));
    const list = make("select", { ariaLabel: mode, onchange: () => go(list.selectedIndex) });
    const titles = all.map(({ title }) => inLanguage(title.replaceAll("`", ""), language.current()));
    list.append(...titles.map((textContent) => make("option", { textContent })));
    list.selectedIndex = section;
    bar.node.ariaLabel = mode;
    bar.node.replaceChildren(
      make("button", { textContent: `◀ ${back} PageUp`, disabled: section === 0, onclick: () => go(section - 1) }),
      list,
      make("button", { textContent: `${next} PageDown ▶`, disabled: section === all.length - 1, onclick: () => go(section + 1) }),
      ...[make("span"), make("span")],
      make("button", { textContent: out, onclick: leave }),
    );
    tick();
  }

  function tick() {
    splitHeadings(panel.content.node); // of which some are drawn late, or again
    const [all, now] = [sections(panel.content), Date.now()];
    const show = (node, name, seconds, minutes) => {
      node.textContent = `${name} ${clock(seconds)}${minutes ? ` / ${clock(minutes * 60)}` : ""}`;
      node.classList.toggle("hooklab-late", minutes > 0 && seconds > minutes * 60);
    };
    const [here, total] = bar.node.querySelectorAll("span");
    const spent = (lesson.spent[lesson.section] ?? 0) + now - lesson.since;
    show(here, words().here, spent / 1000, all[lesson.section].minutes);
    show(total, words().all, (now - lesson.began) / 1000, all.reduce((sum, { minutes }) => sum + minutes, 0));
  }

  async function toggle() {
    const notebook = tracker.currentWidget;
    if (notebook === panel) return leave();
    const section = sections(notebook.content).findLastIndex(({ first }) => first <= notebook.content.activeCellIndex);
    let room = language.current();
    if (room === "both") {
      const choices = ["中文", "English"].map((label) => Dialog.okButton({ label }));
      const title = "用哪种语言讲？Which language does the class read?";
      const { button } = await showDialog({ title, buttons: [Dialog.cancelButton({ label: "取消 Cancel" }), ...choices] });
      room = { 中文: "zh", English: "en" }[button.label];
    }
    if (!room) return;
    if (panel) leave();
    const sidebar = app.shell.leftCollapsed === false;
    begin(notebook, { section, room, sidebar, began: Date.now(), since: Date.now(), spent: {}, ran: [] });
  }

  const here = () => panel !== null && tracker.currentWidget === panel;
  const command = "hooklab:present";
  app.commands.addCommand(command, {
    label: ({ toolbar }) => (toolbar ? (here() ? "讲课 Present ✓" : "讲课 Present") : "讲课模式 Presenter's mode"),
    caption: "大字，一次一节，计时\nLarge type, one section at a time, a clock",
    isEnabled: () => tracker.currentWidget !== null,
    isToggled: here,
    execute: toggle,
  });
  palette?.addItem({ command, category: "hooklab 课程 Course" });
  for (const [key, { command: step, by, label }] of Object.entries(STEPS)) {
    app.commands.addCommand(step, { label, isEnabled: here, execute: () => go(lesson.section + by) });
    app.commands.addKeyBinding({ command: step, keys: [key], selector: ".hooklab-presenting" });
  }
  tracker.currentChanged.connect(refresh);
  tracker.activeCellChanged.connect(() => here() && stay());
  document.addEventListener("hooklab-language", () => panel && draw());
  NotebookActions.executionScheduled.connect((_, { notebook, cell }) => {
    if (notebook !== panel?.content) return;
    lesson.ran.push(cell.model.id);
    keep();
  });

  // Also after a reload. By then outputs.js has folded what it folds.
  async function whenOpen(notebook) {
    notebook.disposed.connect(() => notebook === panel && leave());
    await notebook.context.ready;
    await notebook.revealed;
    const kept = JSON.parse(storage.readSession(KEY) ?? "null");
    if (!panel && kept?.path === notebook.context.path) begin(notebook, kept);
  }
  tracker.forEach(whenOpen);
  tracker.widgetAdded.connect((_, notebook) => whenOpen(notebook));
}
