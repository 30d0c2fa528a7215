"""The project around the notebooks: pins, links, commands, sources, pictures, one language alone."""

import json
import re
import sys
import tomllib
from pathlib import Path

import atlas
import nbformat
import notebook_form
import picture_rules
import pytest
import sources_table
import yaml
from nbconvert import HTMLExporter, ScriptExporter
from notebook_rules import LINK
from prose_rules import HAN, ODD, SPAN
from traitlets.config import Config

from hooklab.course.export import Chinese, English

ROOT = notebook_form.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = [ROOT, notebook_form.NOTEBOOKS, ROOT / "docs", ROOT / "docs/teaching"]
DOCUMENTS = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
# Of each, `name.md` and `name.zh-CN.md` say the same, each in its language.
IN_TWO_LANGUAGES = ["README", "CONTRIBUTING", "docs/install", "docs/teaching", "docs/regression"]
PAIRS = [*IN_TWO_LANGUAGES, "docs/atlas"]
MAPS = {"en": notebook_form.NOTEBOOKS / "images/hook_map.svg", "zh": notebook_form.NOTEBOOKS / "images/hook_map.zh.svg"}
CHAPTERS = {path.stem for path in notebook_form.paths()}


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower()


def test_conda_and_binder_get_the_same_versions_as_uv():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    extra, *others = PROJECT["dependency-groups"]["dev"]
    assert extra == "hooklab[lab]"
    assert [line for line in pip if "==" in line] == PROJECT["tool"]["uv"]["constraint-dependencies"]
    assert [line for line in pip if "==" not in line] == ["-e .[lab]", *others]


def test_every_pin_lies_within_the_range_that_the_package_declares():
    declared = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["lab"]]
    ranges = {name_of(line): line.partition(">=")[2] for line in declared}
    for pin in PROJECT["tool"]["uv"]["constraint-dependencies"]:
        name, _, version = pin.partition("==")
        lowest = [int(part) for part in ranges[name].split(".")]
        assert [int(part) for part in version.split(".")][: len(lowest)] >= lowest, pin


def test_the_oldest_torch_is_the_same_in_the_package_and_in_the_metadata():
    from hooklab import lesson

    assert f"torch>={'.'.join(map(str, lesson.OLDEST_TORCH))}" in PROJECT["project"]["dependencies"]


def test_the_torch_of_the_stored_outputs_is_the_pinned_one():
    from hooklab import lesson

    assert f"torch=={lesson.STORED_TORCH}" in PROJECT["tool"]["uv"]["constraint-dependencies"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_link_in_a_document_is_dead(document):
    text = document.read_text(encoding="utf-8")
    targets = LINK.findall(text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    dead = [target for target in targets if not re.match("https?://|#", target)
            and not (document.parent / target.partition("#")[0]).exists()]  # fmt: skip
    assert targets
    assert not dead


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_a_readme_gives_the_two_commands_and_every_notebook(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    assert "make lab\n" in text
    assert "make test\n" in text
    assert "`make test-long`" in text
    assert set(re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", text)) == CHAPTERS
    minutes = dict(re.findall(r"\]\(notebooks/(\w+)\.ipynb\) .*\| (\d+) \|$", text, re.MULTILINE))
    for stem in CHAPTERS:
        cells = notebook_form.read(notebook_form.NOTEBOOKS / f"{stem}.ipynb").cells
        assert sum(cell.metadata.get("minutes", 0) for cell in cells) == int(minutes[stem]), stem


def test_the_readme_is_read_in_three_minutes_and_leads_to_the_pages_that_say_more():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.sub(r"(?m)^\|.*$", "", text).split()) <= 360, "apart from the table of notebooks, which one looks up"
    for name in IN_TWO_LANGUAGES[1:]:
        assert f"]({name}.md)" in text
        assert f"]({name}.zh-CN.md)" in (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAIRS)
def test_the_two_languages_of_a_document_show_the_same_commands_and_sections(name):
    english, chinese = ((ROOT / f"{name}{end}").read_text(encoding="utf-8") for end in (".md", ".zh-CN.md"))
    assert "](" + Path(f"{name}.zh-CN.md").name + ")" in english
    assert "](" + Path(f"{name}.md").name + ")" in chinese
    for pattern in (r"```\w*\n.*?```", r"^#+ ", r"^ *(?:[-*]|\d+\.) ", r"^\|", r"^!\["):
        left, right = (re.findall(pattern, text, re.DOTALL | re.MULTILINE) for text in (english, chinese))
        assert left == right, pattern
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in (english, chinese)]
    for pattern in (r"`([^`\n]+)`", r"\d+(?:[.,]\d+)*"):
        left, right = (sorted(re.findall(pattern, text)) for text in prose)
        assert left == right, pattern
        assert len(left) > (10 if name in {"README", "CONTRIBUTING"} else 0), pattern


@pytest.mark.parametrize("name", PAIRS)
def test_the_english_of_a_document_has_none_of_the_words_that_are_out(name):
    text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    assert {
        found[0]: rather for odd, rather in ODD.items() if (found := re.search(rf"\b{odd}", text, re.IGNORECASE))
    } == {}


def test_every_target_of_the_makefile_that_a_document_names_exists():
    named = {
        target
        for path in DOCUMENTS
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"lab", "test", "refresh"} <= named
    assert named <= targets


def test_the_table_of_sources_is_up_to_date():
    assert sources_table.PATH.read_text(encoding="utf-8") == sources_table.table(), "run `make refresh`"


def test_the_table_of_sources_links_to_cells_that_exist():
    """With the fragment of JupyterLab, which opens a notebook at its top for an id that it does not have."""
    linked = re.findall(
        r"\[`([\w-]+)`\]\((\w+)\.ipynb#cell-id=([^)]+)\)", sources_table.PATH.read_text(encoding="utf-8")
    )
    ids = {path.stem: {cell.id for cell in notebook_form.read(path).cells} for path in notebook_form.paths()}
    assert {stem for _, stem, _ in linked} == {entry["notebook"] for entry in sources_table.entries()}
    assert [link for link in linked if link[0] != link[2] or link[2] not in ids[link[1]]] == []
    covering = sources_table.covering_cells().values()
    assert {(stem, wanted) for _, stem, wanted in linked} == {
        (stem, cell.id) for cells in covering for stem, cell in cells
    }


def test_the_table_of_sources_names_each_text_and_says_what_it_says_of_itself():
    rows = re.findall(
        r"^\| (S\d) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", sources_table.table(), re.MULTILINE
    )
    assert [row[0] for row in rows] == ["S0", "S1", "S2", "S3", "S4"]
    for _, name, what, *_ in rows:
        for zh, en in (name.split("<br>"), what.split("<br>")):
            assert HAN.search(zh)
            assert not HAN.search(en)
    assert [row[3:] for row in rows[:2]] == [("—", "—", "—")] * 2  # known by their content only
    assert [row[3] for row in rows[3:]] == ["Torch的一些使用方法记录", "Hooks for autograd saved tensors"]
    assert "<https://zhuanlan.zhihu.com/p/75054200>" in rows[2]
    assert not re.search(r"\bS[0-4]\b(?!\.)", re.sub(r"^\| S\d \|", "", sources_table.table(), flags=re.MULTILINE))


@pytest.mark.parametrize("entry", sources_table.entries(), ids=lambda entry: entry["id"])
def test_a_topic_of_the_inventory_says_the_same_in_both_languages(entry):
    assert list(entry["topic"]) == ["zh", "en"]
    zh, en = entry["topic"].values()
    assert HAN.search(zh)
    assert not re.search(r"[\u4e00-\u9fff，。：；（）]", en)
    assert not re.search(r"[\u4e00-\u9fff][,;:!?(]", SPAN.sub("码", zh)), zh  # it is full-width
    assert set(SPAN.findall(zh)) == set(SPAN.findall(en))


def test_an_inventory_entry_belongs_to_one_notebook_and_is_listed_once():
    ids = [source for entry in sources_table.entries() for source in (entry["id"], entry.get("also")) if source]
    assert len(ids) == len(set(ids))
    assert len([source for source in ids if source[0] == "S"]) == 75
    planned = {stem[:2]: stem for stem in (entry["notebook"] for entry in sources_table.entries())}
    assert all(planned.get(stem[:2], stem) == stem for stem in CHAPTERS), "a notebook is named otherwise than planned"


# ---- the language switch ----


def test_the_language_switch_is_installed_as_it_stands_in_the_repository():
    source, installed = (
        ROOT / "labextension",
        Path(sys.prefix, "share/jupyter/labextensions/hooklab"),
    )
    files = [Path("package.json")]
    files += [path.relative_to(source) for part in ("static", "schemas") for path in (source / part).rglob("*.*")]
    assert len(files) > 4
    for file in files:
        assert (installed / file).read_bytes() == (source / file).read_bytes(), f"{file}: run `uv sync`"


def test_the_language_switch_has_the_version_of_the_package():
    package = json.loads((ROOT / "labextension/package.json").read_text(encoding="utf-8"))
    assert package["version"] == PROJECT["project"]["version"]


# ---- pictures, and one language alone ----


@pytest.mark.parametrize("language", MAPS)
def test_the_map_of_hooks_is_what_the_notebook_observed(language):
    svg = MAPS[language].read_text(encoding="utf-8")
    dots = re.findall(r'data-hook="([^"]+)">.*?class="number"[^>]*>(\d+)<', svg)
    labels = [
        name
        for group in re.findall(r'class="names".*?</g>', svg, re.DOTALL)
        for name in re.findall(">([^<>]+)</text>", group)
    ]
    cells = notebook_form.cells(notebook_form.read(notebook_form.NOTEBOOKS / "00_start_here.ipynb"))
    (observed,) = (cell.outputs[0].text for cell in cells if cell.id == "map-backward")
    assert observed.splitlines() == [
        f"{number:>2} {name}" for name, number in sorted(dots, key=lambda dot: int(dot[1]))
    ]
    assert sorted(labels) == sorted(hook["called"][language] for hook in atlas.on_the_sheet())


@pytest.mark.parametrize("language", MAPS)
def test_the_map_of_hooks_reads_on_white_and_on_black(language):
    assert list(picture_rules.svg_problems(MAPS[language].read_text(encoding="utf-8"))) == []


def test_the_map_of_hooks_is_the_same_drawing_and_names_the_same_notebooks_in_both_languages():
    english, chinese = (MAPS[language].read_text(encoding="utf-8") for language in ("en", "zh"))
    for pattern in (r"<(?:rect|circle|path) [^>]*>", r'<text [^>]*?x="\d+" y="\d+"', r"\b\d\d\b(?=[^<>]*</text>)"):
        left, right = (re.findall(pattern, svg) for svg in (english, chinese))
        assert left == right, pattern
        assert len(left) > 10
    assert not HAN.search(english)


def test_the_map_links_to_every_notebook_there_is():
    cells = notebook_form.cells(notebook_form.read(notebook_form.NOTEBOOKS / "00_start_here.ipynb"))
    (links,) = (cell for cell in cells if cell.id == "map-links")
    for half in links.halves.values():
        assert {Path(target).stem for target in LINK.findall(half)} == CHAPTERS - {"00_start_here"}


def test_a_script_made_of_a_notebook_holds_its_prose():
    script, resources = ScriptExporter().from_filename(str(ROOT / "notebooks" / "22_backward_hooks.ipynb"))
    assert resources["output_extension"] == ".py"
    assert "# # 22 " in script
    assert '# <div lang="zh">' in script


@pytest.mark.parametrize("language", ["Chinese", "English"])
def test_a_page_in_one_language_holds_nothing_of_the_other(language):
    """What nbconvert makes with the preprocessor of a language: every message of a check all the same, and its title."""
    source = str(notebook_form.NOTEBOOKS / "11_reading_gradients.ipynb")
    config = Config({"HTMLExporter": {"preprocessors": [f"hooklab.export.{language}"]}})
    html, both = HTMLExporter(config=config).from_filename(source)[0], HTMLExporter().from_filename(source)[0]
    page, whole = (
        re.sub("<(style|script).*?</\\1>|<[^>]+>", "", text.partition("<body")[2], flags=re.DOTALL)
        for text in (html, both)
    )
    assert both.count('class="hooklab-message') > 2
    assert html.count('class="hooklab-message') == both.count('class="hooklab-message')
    assert bool(re.search("[一-鿿]", page)) == (language == "Chinese")
    english = "After this notebook you can"
    assert english in whole
    assert (english in page) == (language == "English")
    assert '<html lang="{}">'.format({"Chinese": "zh-CN", "English": "en"}[language]) in html
    title = {"Chinese": "11 读取梯度", "English": "11 Reading gradients"}[language]
    assert f"<title>{title}</title>" in html


@pytest.mark.parametrize(
    ("source", "chinese", "english"),
    [
        ("## 3 标题 · Heading\n\ntext", "## 3 标题\n\ntext", "## 3 Heading\n\ntext"),
        ("## 2.1 学习 · Learning", "## 2.1 学习", "## 2.1 Learning"),
        ("## Adam · SGD · RMSprop", "## Adam · SGD · RMSprop", "## Adam · SGD · RMSprop"),
        (
            "```python\n# 损失 · loss\n```\n# 标题 · T",
            "```python\n# 损失 · loss\n```\n# 标题",
            "```python\n# 损失 · loss\n```\n# T",
        ),
        (
            '<div lang="zh">\n<div>内</div>\n外\n</div>\n\n<div lang="en">\n<div>in</div>\nout\n</div>\n\nend',
            '<div lang="zh">\n<div>内</div>\n外\n</div>\n\nend',
            '<div lang="en">\n<div>in</div>\nout\n</div>\n\nend',
        ),
        ('<div lang="en">\nnever closed', '<div lang="en">\nnever closed', '<div lang="en">\nnever closed'),
    ],
)
def test_cells_of_somebody_else_lose_the_other_language_and_nothing_more(source, chinese, english):
    for exporter, want in ((Chinese, chinese), (English, english)):
        cell, _ = exporter().preprocess_cell(nbformat.v4.new_markdown_cell(source), {}, 0)
        assert cell.source == want
