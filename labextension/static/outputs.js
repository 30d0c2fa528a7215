// Stored outputs stay folded until their cell has run in this session, so that nothing is given away before a guess.
//
// Nothing in a notebook changes: a mark on the cell's node, and style.css folds what is marked. Which cells have run is kept
// in sessionStorage, which lasts over a reload of this browser tab; whether to fold at all in localStorage.
// The code of folded cells is not shown either, not even its first line.

const KEY = "hooklab-outputs"; // "folded" or "shown"
const LABEL = "运行后可见 · run to see";
const CATEGORY = "hooklab 课程 Course";

export function foldOutputs(app, palette, tracker, { NotebookActions }, storage) {
  let shown = storage.read(KEY) === "shown";
  const mark = () => (document.documentElement.dataset.hooklabOutputs = shown ? "shown" : "folded");
  mark();

  const runHere = (panel) => `hooklab-run:${panel.context.path}`;
  const haveRun = (panel) => new Set(JSON.parse(storage.readSession(runHere(panel)) ?? "[]"));

  function unfold(cell) {
    delete cell.node.dataset.hooklabUnseen;
    cell.node.querySelector(":scope > .hooklab-unseen")?.remove();
  }

  // A button in place of the outputs: reached by Tab, and a click shows them all the same.
  function fold(cell) {
    cell.node.dataset.hooklabUnseen = "";
    cell.ready.then(() => {
      if (!("hooklabUnseen" in cell.node.dataset) || cell.node.querySelector(":scope > .hooklab-unseen")) return;
      const button = document.createElement("button");
      button.className = "hooklab-unseen";
      button.textContent = LABEL;
      button.addEventListener("click", () => unfold(cell));
      cell.node.querySelector(":scope > .jp-Cell-outputWrapper")?.before(button);
    });
  }

  const isCourse = (panel) =>
    panel.content.widgets.some(({ model }) =>
      model.type === "code" && model.sharedModel.getSource().includes("lesson.start()"));

  function refold(panel, before = haveRun(panel)) {
    for (const cell of panel.content.widgets) {
      if (cell.model.type === "code") (cell.model.outputs.length > 0 && !before.has(cell.model.id) ? fold : unfold)(cell);
    }
  }

  function begin(panel) {
    if (!isCourse(panel)) return;
    panel.content.addClass("hooklab-course");
    refold(panel);
  }

  const whenOpen = (panel) => panel.context.ready.then(() => panel.revealed).then(() => begin(panel));
  tracker.forEach(whenOpen);
  tracker.widgetAdded.connect((_, panel) => whenOpen(panel));

  NotebookActions.executionScheduled.connect((_, { notebook, cell }) => {
    unfold(cell);
    const panel = tracker.find(({ content }) => content === notebook);
    if (panel) storage.writeSession(runHere(panel), JSON.stringify([...haveRun(panel).add(cell.model.id)]));
  });

  const commands = {
    "hooklab:outputs-fold": ["运行前收起输出 Fold stored outputs until run", () => (shown = false), () => !shown],
    "hooklab:outputs-show": ["显示全部输出 Show all outputs", () => (shown = true), () => shown],
    "hooklab:outputs-toggle": ["收起或显示输出 Fold or show outputs", () => (shown = !shown), () => shown],
  };
  for (const [command, [label, act, isToggled]] of Object.entries(commands)) {
    app.commands.addCommand(command, {
      label: ({ toolbar }) => (toolbar ? (shown ? "输出 Outputs ✓" : "输出 Outputs") : label),
      caption: () =>
        shown
          ? "现在显示全部输出；点击：运行后才可见\nAll stored outputs show; click to fold them until their cell has run"
          : "现在运行后才可见；点击：显示全部输出\nStored outputs are folded until run; click to show all",
      isToggled,
      execute: () => {
        act();
        mark();
        storage.write(KEY, shown ? "shown" : "folded");
        app.commands.notifyCommandChanged();
      },
    });
    palette?.addItem({ command, category: CATEGORY });
  }

  // For the presenter's mode: only what has run in front of the class counts, and afterwards what has run at all.
  return (panel, before) => (before || isCourse(panel) ? refold(panel, before) : panel.content.widgets.forEach(unfold));
}
