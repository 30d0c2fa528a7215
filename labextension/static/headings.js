// Headings hold both languages, `## 3 中文 · English`, and a heading of the first or second level begins a section.

const BOTH = /^([\d.]+ )?(.*?[\u4e00-\u9fff].*?) · ([^\u4e00-\u9fff]+)$/;

export function inLanguage(title, language) {
  const [, number = "", zh, en] = BOTH.exec(title) ?? [];
  return zh && language !== "both" ? number + { zh, en }[language] : title;
}

export function sections({ widgets }) {
  const found = [];
  widgets.forEach(({ model }, index) => {
    const [, title] = (model.type === "markdown" && /^##? (.+)/.exec(model.sharedModel.getSource())) || [];
    if (title || index === 0) found.push({ title: title ?? "", minutes: 0, first: index });
    found.at(-1).last = index;
    found.at(-1).minutes += model.getMetadata("minutes") ?? 0;
  });
  return found;
}

// Gives each half a node of its own, which style.css can hide.
export function splitHeadings(root) {
  for (const heading of root.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const text = [...heading.childNodes].find((node) => node.nodeType === Node.TEXT_NODE && BOTH.test(node.data));
    if (!text) continue;
    const [, number = "", zh, en] = BOTH.exec(text.data);
    const halves = { zh, both: " · ", en };
    text.replaceWith(number, ...Object.entries(halves).map(([name, words]) => {
      const half = heading.ownerDocument.createElement("span");
      half.className = `hooklab-half-${name}`;
      half.textContent = words;
      return half;
    }));
  }
}
