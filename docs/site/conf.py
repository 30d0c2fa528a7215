"""Sphinx: one language of the course, from what prepare.py wrote. build.py says which: SITE_LANGUAGE is zh or en."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ["SITE_BUILD"])
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
from reference import CHINESE  # noqa: E402

import hooklab  # noqa: E402

ZH = os.environ["SITE_LANGUAGE"] == "zh"
SETTINGS = json.loads((BUILD / "settings.json").read_text("utf-8"))


def say(zh, en):
    return zh if ZH else en


language, project, version = say("zh_CN", "en"), "hooklab", hooklab.__version__
copyright = say("hooklab 的作者 · MIT 许可证", "the hooklab authors · MIT licence")
extensions = ["myst_nb", "sphinx_codeautolink", "sphinx_copybutton"]
extensions += [f"sphinx.ext.{name}" for name in ("autodoc", "napoleon", "intersphinx", "viewcode")]
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = say("先猜，再点开看结果", "Guess first, then click to see")
nb_code_prompt_hide = say("结果", "What happens")
myst_enable_extensions = ["dollarmath", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3
# A message with a backtick is no Python, and is shown without colours.
suppress_warnings = ["codeautolink.match_name", "epub.unknown_project_files", "misc.highlighting_failure"]
add_module_names = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
codeautolink_concat_default = True
intersphinx_mapping = {name: (url, str(BUILD / f"{name}.inv")) for name, url in SETTINGS["inventories"].items()}
linkcheck_ignore = [r"https://(colab|codespaces|mybinder)\."]
linkcheck_anchors = False
linkcheck_timeout = 20

html_theme = "shibuya"
html_title = say("hooklab：PyTorch 钩子课程", "hooklab: a course on PyTorch hooks")
html_baseurl = SETTINGS["site"] + say("zh/", "en/") if SETTINGS["site"] else ""
html_math_renderer = "mathml"
html_favicon = str(HERE / "_static" / "hook.svg")
html_static_path = [str(HERE / "_static")]
html_css_files, html_js_files = ["site.css"], [("site.js", {"defer": "defer"})]
templates_path = [str(HERE / "_templates")]
html_copy_source = html_use_index = html_domain_indices = False
html_context = {"other": say(("en", "English"), ("zh", "中文")), "site_url": SETTINGS["site"]}
NAVIGATION = {"course": say("课程", "Course"), "questions": say("问题", "Questions")}
NAVIGATION |= {"cheatsheet": say("速查表", "Cheat sheet"), "api/index": "API"}
html_theme_options = {
    "accent_color": "blue",
    "show_ai_links": False,
    "nav_links": [{"title": title, "url": page} for page, title in NAVIGATION.items()],
}
if SETTINGS["repository"]:
    html_theme_options["nav_links"].append({"title": "GitHub", "url": f"https://github.com/{SETTINGS['repository']}"})
epub_show_urls = "no"


def name_cells(app, doctree):
    """The id of a cell becomes its anchor, the same in both languages; a heading has one too, for Pagefind."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    cells = [cell.id for cell in nbformat.read(path, as_version=4).cells]
    anchors = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for section in doctree.findall(nodes.section):
        name = cells[section.line // 10000 - 1]  # so MyST-NB counts lines
        section["ids"], anchors[name] = [name], (0, name, name)
        if isinstance(section.parent, nodes.section):  # the title of the page is none
            section[0]["ids"] = [f"h-{name}"]
    for container in doctree.findall(nodes.container):
        if container.get("nb_element") == "cell_code":
            name = cells[container["cell_index"]]
            container["ids"], anchors[name] = [name], (0, name, name)


def from_markdown(app, what, name, obj, options, lines):
    """Our docstrings are Markdown: links, and code, of which names of hooklab and PyTorch become links."""

    def convert(found):
        text, url, code = found.groups()
        if url:
            return f"`{text.replace('`', '')} <{url}>`__"
        known = code.startswith("torch.") or hasattr(hooklab, code)
        return (f":py:obj:`{code}`" if known else f"``{code}``") + "\\ "

    text = "\n".join(lines)
    if ZH and name in CHINESE:  # the first line; the rest stays English
        text = re.sub(r"\A[^\n]+", lambda _: CHINESE[name], text)
    # Napoleon would take what stands before the first colon of a "Returns:" for a type.
    text = re.sub(r"^( *Returns:\n *)", r"\1: ", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]+)\]\((https?:[^)\s]+)\)|`([^`]+)`", convert, text)
    limits = rf":ref:`{say('限制', 'Limits')} <limits-\1>`"
    lines[:] = re.sub(r"Limits: docs/limits\.md#(\w+)\.?", limits, text).split("\n")


def formula(translator, node):
    """MathML, which browsers draw themselves."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def search_elsewhere(app):
    """Pagefind makes the index: that of Sphinx does not find 反向传播."""
    app.builder.search = False


def describe_page(app, page, template, context, doctree):
    """A description of the page, its first paragraph of prose; and where to report a sentence of it."""
    paragraphs = doctree.findall(nodes.paragraph) if doctree is not None else ()
    texts = [" ".join(paragraph.astext().split()) for paragraph in paragraphs]
    context["description"] = next((text for text in texts if len(text) > 30), html_title)[:180]
    # In the search a word in a heading counts most, and the errors that the questions quote count as much.
    heavy = r"<(h[12]|code)(?=[ >])" if page == "questions" else r"<(h[12])(?=[ >])"
    context["body"] = re.sub(heavy, r'<\1 data-pagefind-weight="10"', context.get("body", ""))
    if SETTINGS["repository"]:
        form = f"https://github.com/{SETTINGS['repository']}/issues/new?template=unclear-sentence.yml"
        context["report"] = f"{form}&notebook={page}"


def setup(app):
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("doctree-read", name_cells, priority=100)
    app.connect("autodoc-process-docstring", from_markdown, priority=100)
    app.connect("builder-inited", search_elsewhere)
    app.connect("html-page-context", describe_page)
