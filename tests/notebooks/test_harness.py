"""The harness catches damage: a copy of a real notebook is damaged, and the rule that must notice does.

`RULE_DAMAGES` are caught by reading the file, `RUN_DAMAGES` only by running it. Each damage is a
function that edits the notebook in place, so that a new one is three lines.
"""

import copy
import json
import os
import re
import subprocess
import sys

import nbformat
import notebook_form
import notebook_rules
import prose_rules
import pytest
from notebook_rules import Notebook

pytestmark = pytest.mark.long  # `make test-long`

STEM = "11_reading_gradients"
REAL = notebook_form.NOTEBOOKS / f"{STEM}.ipynb"


def cell(notebook, wanted):
    return next(node for node in notebook.cells if node["id"] == wanted)


def replace(notebook, wanted, old, new, language=None):
    """Replace `old` once in a cell's source; with a `language`, in that half alone."""
    node = cell(notebook, wanted)
    start = node.source.index(f'<div lang="{language}">') if language else 0
    assert old in node.source[start:], f"the notebook has changed: no {old!r} in {wanted}; choose another damage"
    node.source = node.source[:start] + node.source[start:].replace(old, new, 1)


def stream(notebook, wanted):
    return next(output for output in cell(notebook, wanted).outputs if output.output_type == "stream")


def paint(notebook, wanted, old, new):
    data = cell(notebook, wanted).outputs[0].data
    assert old in data["image/svg+xml"], f"the picture has changed: no {old!r} in {wanted}; choose another damage"
    data["image/svg+xml"] = data["image/svg+xml"].replace(old, new)


def strip_a_cell(notebook):
    cell(notebook, "retain-run").update(execution_count=None, outputs=[])


def reorder_cells(notebook):
    first, second = (notebook.cells.index(cell(notebook, wanted)) for wanted in ("retain-run", "retain-s3"))
    notebook.cells[first], notebook.cells[second] = notebook.cells[second], notebook.cells[first]


def delete_a_covering_cell(notebook):
    notebook.cells.remove(cell(notebook, "weights-run"))
    notebook_form.normalise(notebook)


def write_too_long_a_cell(notebook):
    cell(notebook, "weights-run").source += "\nprint()" * 16


RECAP_EN = notebook_form.Cell(cell(notebook_form.read(REAL), "recap"), 0).halves["en"]

RULE_DAMAGES = {
    "an assertion between a guess and its answer": (
        lambda notebook: replace(notebook, "where-twice", "x.grad =", "assert w.grad is not None\nx.grad ="),
        notebook_rules.guesses_come_first,
    ),
    "a guess in one cell with other code": (
        lambda notebook: replace(notebook, "where-guess", "guess = None", "names = []\nguess = None"),
        notebook_rules.guesses_come_first,
    ),
    "no way to the next notebook": (
        lambda notebook: replace(
            notebook, "title", " · Next: [12 Changing gradients](12_changing_gradients.ipynb)", ""
        ),
        notebook_rules.neighbours,
    ),
    "minutes that nobody has counted": (
        lambda notebook: [cell(notebook, wanted).metadata.pop("minutes") for wanted in ("where", "graph", "leaves")],
        notebook_rules.opening,
    ),
    "English of nobody": (
        lambda notebook: replace(notebook, "where-after", "PyTorch", "After a backward PyTorch", "en"),
        prose_rules.natural_english,
    ),
    "a text called by its number": (
        lambda notebook: replace(notebook, "where-after", "PyTorch", "S0 and PyTorch", "en"),
        prose_rules.named_sources,
    ),
    "a notebook without its title": (
        lambda notebook: replace(notebook, "next", "[12 Changing gradients]", "[12]", "en"),
        prose_rules.references,
    ),
    "a cell stripped": (strip_a_cell, notebook_rules.execution_counts),
    "cells reordered": (reorder_cells, notebook_rules.execution_counts),
    "an executed cell deleted": (delete_a_covering_cell, notebook_rules.sources_covered),
    "an inventory id taken off": (
        lambda notebook: cell(notebook, "weights-run").metadata.pop("sources"),
        notebook_rules.sources_covered,
    ),
    "an inventory id misspelt": (
        lambda notebook: cell(notebook, "weights-run").metadata.sources.append("S9.9.9"),
        notebook_rules.sources_covered,
    ),
    "an assertion dropped": (
        lambda notebook: replace(notebook, "weights-run", "assert ", "_ = "),
        notebook_rules.sources_covered,
    ),
    "an expected error no longer stored": (
        lambda notebook: cell(notebook, "grad-scalar").update(outputs=[]),
        notebook_rules.expected_errors,
    ),
    "an error where none is expected": (
        lambda notebook: cell(notebook, "grad-scalar").metadata.pop("tags"),
        notebook_rules.expected_errors,
    ),
    "a cell too long": (write_too_long_a_cell, notebook_rules.code_length),
    "a path of this machine in an output": (
        lambda notebook: stream(notebook, "retain-run").update(text="/srv/data/model.pt\n"),
        notebook_rules.machine_traces,
    ),
    "an address in an output": (
        lambda notebook: stream(notebook, "retain-run").update(text="<function f at 0x7f2f4c0d3e20>\n"),
        notebook_rules.machine_traces,
    ),
    "an address in a picture": (
        lambda notebook: (
            cell(notebook, "graph-draw").outputs[0].data.update({"image/svg+xml": "<svg>0x7f2f4c0d3e20</svg>"})
        ),
        notebook_rules.machine_traces,
    ),
    "too many decimals": (
        lambda notebook: stream(notebook, "retain-run").update(text="0.123456\n"),
        notebook_rules.decimals,
    ),
    "a picture without its facts": (
        lambda notebook: cell(notebook, "graph-facts").metadata.pop("tags"),
        notebook_rules.pictures_have_facts,
    ),
    "a picture on a white ground": (
        lambda notebook: paint(
            notebook, "graph-draw", '<g id="graph0"', '<rect width="329" height="256" fill="#fff"/><g'
        ),
        notebook_rules.pictures_read_on_white_and_on_black,
    ),
    "letters that are lost on a dark page": (
        lambda notebook: paint(notebook, "graph-draw", "lightblue", "none"),
        notebook_rules.pictures_read_on_white_and_on_black,
    ),
    "a line that is lost on a white page": (
        lambda notebook: paint(notebook, "graph-draw", "#767676", "#cccccc"),
        notebook_rules.pictures_read_on_white_and_on_black,
    ),
    "a picture without its sentence": (
        lambda notebook: cell(notebook, "graph-draw").outputs[0].update(metadata={}),
        notebook_rules.pictures_in_a_sentence,
    ),
    "a formula that was not set in a picture": (
        lambda notebook: (
            cell(notebook, "graph-draw")
            .outputs[0]
            .data.update({"image/svg+xml": r"<svg><text>$\mathdefault{10^{-4}}$</text></svg>"})
        ),
        notebook_rules.formulas,
    ),
    "metadata of another program": (
        lambda notebook: notebook.metadata.update(kernelspec={"name": "mine", "display_name": "Mine"}),
        notebook_rules.normal_form,
    ),
    "a whole traceback": (
        lambda notebook: (
            cell(notebook, "grad-scalar").outputs[0].traceback.insert(0, "Traceback (most recent call last)")
        ),
        notebook_rules.normal_form,
    ),
    "a dead link": (
        lambda notebook: replace(notebook, "before", "SOURCES.md", "SOURCE.md"),
        notebook_rules.links,
    ),
    "a comparison switched off": (
        lambda notebook: cell(notebook, "retain-run").metadata.update(tags=["nbval-skip"]),
        notebook_rules.tags,
    ),
    "four goals": (
        lambda notebook: replace(notebook, "title", "3. ", "3. more;\n4. "),
        notebook_rules.parts,
    ),
    "no question to recall": (
        lambda notebook: replace(notebook, "before", "Recall", "Remember"),
        notebook_rules.parts,
    ),
    "no recap": (
        lambda notebook: replace(notebook, "recap", "## 小结 · Recap", ""),
        notebook_rules.parts,
    ),
    "no cell for a guess": (
        lambda notebook: replace(notebook, "where-guess", "guess = None", "pass"),
        notebook_rules.parts,
    ),
    "Chinese in the code": (
        lambda notebook: replace(notebook, "weights-run", "\n", "  # 权重\n"),
        notebook_rules.parts,
    ),
    "half-width punctuation": (
        lambda notebook: replace(notebook, "recap", "，", ", ", "zh"),
        prose_rules.punctuation,
    ),
    "another set-up cell": (
        lambda notebook: replace(notebook, "setup", "lesson.start()", "lesson.start(1)"),
        notebook_rules.opening,
    ),
    "an exercise stored solved": (
        lambda notebook: cell(notebook, "exercise-a-check").outputs[0].data.update({"text/html": "right"}),
        notebook_rules.practice,
    ),
    "Markdown where it is not rendered": (
        lambda notebook: replace(notebook, "when-not", "<summary>", "<summary>`code` ", "en"),
        prose_rules.folds,
    ),
    "an output that is not compared": (
        lambda notebook: cell(notebook, "retain-run").metadata.update(tags=["nbval-ignore-output"]),
        notebook_rules.tags,
    ),
    "a term before the English word is given": (
        lambda notebook: replace(notebook, "kept-where", "</div>", "检查点\n\n</div>", "zh"),
        prose_rules.glossary,
    ),
    "a half-width comma behind code": (
        lambda notebook: replace(notebook, "kept-where", "\n\n</div>", "`x`, 然后\n\n</div>", "zh"),
        prose_rules.punctuation,
    ),
    "a heading that begins no slide": (
        lambda notebook: cell(notebook, "kept-where").metadata.pop("slideshow"),
        notebook_rules.slides,
    ),
    "a language removed": (
        lambda notebook: replace(notebook, "kept-where", '<div lang="en">', '<div lang="fr">'),
        prose_rules.two_languages,
    ),
    "text outside both languages": (
        lambda notebook: replace(notebook, "kept-where", '<div lang="zh">', 'More.\n\n<div lang="zh">'),
        prose_rules.two_languages,
    ),
    "a heading in one language": (
        lambda notebook: replace(notebook, "kept-where", "钩子放在哪里 · ", ""),
        prose_rules.headings,
    ),
    "a number edited in one language": (
        lambda notebook: replace(notebook, "memory-after", "4,000,000", "4,000,001", "en"),
        prose_rules.same_numbers,
    ),
    "a name edited in one language": (
        lambda notebook: replace(notebook, "kept-where", "`_backward_hooks`", "`_hooks`", "en"),
        prose_rules.same_spans,
    ),
    "a name that has left the package": (
        lambda notebook: replace(notebook, "kept-where", "`_backward_hooks`", "`gone` in `hooklab/gradients.py`", "en"),
        prose_rules.names_of_the_package,
    ),
    "a link edited in one language": (
        lambda notebook: replace(notebook, "before", "00_start_here", "11_reading_gradients", "en"),
        prose_rules.same_links,
    ),
    "the English edition of a page in the Chinese half": (
        lambda notebook: [
            replace(notebook, "before", "00_start_here.ipynb", "../QUESTIONS.md", half) for half in ("zh", "en")
        ],
        prose_rules.same_links,
    ),
    "a picture outside both languages": (
        lambda notebook: replace(notebook, "kept-where", "<div", "![Map.](images/hook_map.svg)\n\n<div"),
        prose_rules.two_languages,
    ),
    "a sentence about JupyterLab that the site would show": (
        lambda notebook: replace(
            notebook, "where-after", "The gradient was", "Press Shift+Enter. The gradient was", "en"
        ),
        notebook_rules.lab_only,
    ),
    "a term edited in one language": (
        lambda notebook: replace(notebook, "weights", "need no hook", "need no callback", "en"),
        prose_rules.glossary,
    ),
    "a paragraph dropped in one language": (
        lambda notebook: replace(notebook, "where-after", "\n\nThe gradient was computed", " The gradient was", "en"),
        prose_rules.same_shape,
    ),
    "half a text dropped in one language": (
        lambda notebook: replace(notebook, "recap", RECAP_EN[RECAP_EN.index(" To keep one") :], "", "en"),
        prose_rules.length,
    ),
}


def damaged(tmp_path, damage):
    notebook = notebook_form.read(REAL)
    damage(notebook)
    path = tmp_path / REAL.name
    path.write_text(notebook_form.written(notebook), encoding="utf-8")
    return Notebook(path, STEM)


@pytest.mark.parametrize("name", RULE_DAMAGES)
def test_a_rule_notices(name, tmp_path):
    damage, rule = RULE_DAMAGES[name]
    assert list(rule(damaged(tmp_path, lambda notebook: None))) == [], "the undamaged copy must pass"
    assert list(rule(damaged(tmp_path, damage))), f"{rule.__name__} did not notice {name}"


def test_every_rule_has_been_seen_to_fail():
    assert {rule for _, rule in RULE_DAMAGES.values()} == set(notebook_rules.RULES)


def one_digit_changed(notebook):
    output = stream(notebook, "hook-hook")
    output.text = output.text.replace("-1.8891", "-1.8892")


def a_warning_reworded(notebook):
    output = cell(notebook, "where-warning").outputs[1]
    output.text = output.text.replace("UserWarning", "FutureWarning")


def an_output_added(notebook):
    cell(notebook, "where-guess").outputs = [nbformat.v4.new_output("stream", text="hello\n")]


def a_message_edited(notebook):
    data = cell(notebook, "kept-check").outputs[0].data
    data["text/html"] = data["text/html"].replace("guess", "guesses")


def an_error_that_stopped(notebook):
    cell(notebook, "grad-scalar").source = "z = (x * 2) ** 2"


# By the id of the one cell that must fail; all in one copy, which is run once.
RUN_DAMAGES = {
    "hook-hook": one_digit_changed,
    "where-warning": a_warning_reworded,
    "retain-late": lambda notebook: cell(notebook, "retain-late").update(outputs=[]),
    "where-guess": an_output_added,
    "kept-check": a_message_edited,
    "grad-undefined": lambda notebook: (
        cell(notebook, "grad-undefined").outputs[0].update(evalue="name 'q' is not defined")
    ),
    "leaves-optimizer": lambda notebook: cell(notebook, "leaves-optimizer").outputs[0].update(ename="TypeError"),
    "graph-draw": lambda notebook: cell(notebook, "graph-draw").outputs[0].data.pop("image/svg+xml"),
    "graph-facts": lambda notebook: stream(notebook, "graph-facts").update(text="x (4) -> AccumulateGrad\n"),
    "leaves-table": lambda notebook: replace(
        notebook, "leaves-table", "torch.ones(3) * 2,", "torch.ones(3) * 2.0 + x[0],"
    ),
    "weights-run": lambda notebook: replace(notebook, "weights-run", "is not param.data", "is param.data"),
    "grad-scalar": an_error_that_stopped,
}


def failing(path, again="0"):
    """Pairs of a file and a cell's id: what fails when pytest runs the notebooks here as it runs the real ones."""
    # Not by PYTHONPATH, which a forked kernel cannot take over.
    folders = [str(notebook_form.ROOT / folder) for folder in ("", "tests/support", "tools")]
    start = f"import sys; sys.path[:0] = {folders}; "
    command = [sys.executable, "-c", start + "import pytest; sys.exit(pytest.main())"]
    command += ["-c", str(notebook_form.ROOT / "pyproject.toml"), "-p", "conftest"]
    done = subprocess.run(
        [*command, "-q", "-rf", "--color=no", "-p", "no:cacheprovider", str(path)],
        env={**os.environ, "PYTEST_ADDOPTS": "", "HOOKLAB_AGAIN": again},
        capture_output=True, text=True, timeout=240, cwd=path if path.is_dir() else path.parent,
    )  # fmt: skip
    assert " passed" in done.stdout, done.stdout + done.stderr
    return re.findall(r"^(\w+)\.ipynb, '([\w-]+)', \[\d+\] in JupyterLab", done.stdout, re.MULTILINE)


def with_cells(sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[-1]["id"] = "last"
    return nbformat.v4.new_notebook(cells=cells)


def run(notebook):
    """The ids of the cells that fail."""
    return {cell for _, cell in failing(notebook.path)}


def test_a_run_notices_each_damage_in_the_cell_where_it_is(tmp_path):
    def damage(notebook):
        for one in RUN_DAMAGES.values():
            one(notebook)

    assert run(damaged(tmp_path, damage)) == set(RUN_DAMAGES)


def test_a_run_notices_cells_that_were_reordered_and_renumbered(tmp_path):
    def damage(notebook):
        reorder_cells(notebook)
        notebook_form.normalise(notebook)

    failed = run(damaged(tmp_path, damage))
    assert failed, "retain-s3 leaves another x and y behind, so what follows must differ"


def test_a_run_notices_what_cannot_be_run_again(tmp_path):
    section = ["guess = None", "y = x + 1", "check.predict('11.1', guess, actual=y)"]
    for stem, last in {
        "fine": "again = True",
        "not_twice": "assert 'again' not in globals()\nagain = True",
        "not_late": "x = None",
        "not_judged": "check.predict = lambda *args, **kwargs: None",
    }.items():
        cells = ["from hooklab import check\nx = 1", *section, last]
        notebook = with_cells(cells)
        notebook.cells.insert(1, nbformat.v4.new_markdown_cell("## 1 一 · One"))
        nbformat.write(notebook, tmp_path / f"{stem}.ipynb")
    # Each fails in the last cell: before it all was well.
    assert failing(tmp_path, again="1") == [(stem, "last") for stem in ("not_judged", "not_late", "not_twice")]


def test_a_run_notices_what_depends_on_pretrained_weights(tmp_path):
    loads = "weights = lesson.cached_weights(models.ResNet18_Weights.DEFAULT)"
    for stem, last in {
        "independent": f"{loads}\nassert weights is None or 'fc.weight' in weights",
        "dependent": f"{loads}\nassert weights is None or weights.get('bn1.num_batches_tracked') != 7",
        "never_loads": f"if False:\n    {loads}",
    }.items():
        cells = ["from torchvision import models\nfrom hooklab import lesson", last]
        nbformat.write(with_cells(cells), tmp_path / f"{stem}.ipynb")
    assert failing(tmp_path, again="1") == [("dependent", "last"), ("never_loads", "last")]
    assert failing(tmp_path) == []


def test_refresh_leaves_a_notebook_that_does_not_run_as_it_was(tmp_path, monkeypatch, capsys):
    import refresh

    notebook = damaged(
        tmp_path, lambda notebook: replace(notebook, "where-build", "import torch", "import no_such_module")
    )
    before = notebook.path.read_bytes()
    for name in ("JUPYTER_DATA_DIR", "IPYTHONDIR"):  # which refresh sets, for a process of its own
        monkeypatch.setenv(name, os.environ[name])
    monkeypatch.setattr(notebook_form, "paths", lambda: [notebook.path])
    monkeypatch.setattr(refresh, "pages", dict)  # those of the repository stay
    assert refresh.main([]) == 1
    assert re.search(r"cell 'where-build' failed.*no_such_module", capsys.readouterr().out)
    assert notebook.path.read_bytes() == before


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os; os._exit(139)", "the kernel died in cell 'setup'"),
        ("import time; time.sleep(60)", "cell 'setup' took longer than 2 s"),
        (None, "it is not a notebook as it stands"),
    ],
)
def test_refresh_says_what_ended_a_run(source, said, tmp_path, monkeypatch, capsys):
    import refresh

    def spoil(notebook):
        if source:
            cell(notebook, "setup").source = source

    notebook = damaged(tmp_path, spoil)
    if source is None:
        notebook.path.write_text("<<<<<<< HEAD\n" + notebook.path.read_text(encoding="utf-8"), encoding="utf-8")
    before = notebook.path.read_bytes()
    for name in ("JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, os.environ[name])
    monkeypatch.setattr(refresh, "CELL_TIMEOUT_S", 2)
    monkeypatch.setattr(notebook_form, "paths", lambda: [notebook.path])
    monkeypatch.setattr(refresh, "pages", dict)  # those of the repository stay
    assert refresh.main([]) == 1
    assert said in capsys.readouterr().out
    assert notebook.path.read_bytes() == before


def test_normalising_twice_changes_nothing():
    once = notebook_form.normalise(notebook_form.read(REAL))
    assert json.dumps(notebook_form.normalise(copy.deepcopy(once))) == json.dumps(once)


def test_what_a_cell_prints_may_come_in_pieces():
    whole = notebook_form.normalise(notebook_form.read(REAL))
    pieces = copy.deepcopy(whole)
    for one in pieces.cells:
        if one.cell_type == "code":
            one.outputs = [part for output in one.outputs for part in in_pieces(output)]
    assert sum(len(one.get("outputs", [])) for one in pieces.cells) > sum(
        len(one.get("outputs", [])) for one in whole.cells
    )
    assert json.dumps(notebook_form.normalise(pieces)) == json.dumps(whole)


def in_pieces(output):
    """A stream as a kernel may send it: a line at a time, and the end of a line by itself."""
    if output.output_type != "stream":
        return [output]
    return [nbformat.from_dict({**output, "text": part}) for line in output.text.splitlines() for part in (line, "\n")]


def test_which_stream_comes_first_does_not_matter():
    def both(first, second):
        texts = {"stdout": "printed\n", "stderr": "warned\n"}
        outputs = [nbformat.v4.new_output("stream", name=name, text=texts[name]) for name in (first, second)]
        picture = nbformat.v4.new_output("display_data", data={"text/plain": "picture"})
        cell = nbformat.v4.new_code_cell("pass", outputs=[outputs[0], picture, outputs[1]], id="a")
        return notebook_form.normalise(nbformat.v4.new_notebook(cells=[cell])).cells[0].outputs

    assert both("stdout", "stderr") == both("stderr", "stdout")
    assert [output.get("name", "picture") for output in both("stderr", "stdout")] == [
        "stdout",
        "picture",
        "stderr",
    ]
