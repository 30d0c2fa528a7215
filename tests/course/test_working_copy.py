"""`hooklab lab`: the learner's own copy of the notebooks, and what its server part tells the progress panel."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import notebook_form
import pytest
from hooklab_desk import command
from hooklab_desk.working_copy import NOTES, Update, update


def write(folder, name, *sources):
    cells = [{"cell_type": "code", "source": [source], "outputs": [], "metadata": {}} for source in sources]
    (folder / name).write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))


def sources(path):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def edit(path, source):
    content = json.loads(path.read_text(encoding="utf-8"))
    content["cells"][0]["source"] = source
    path.write_text(json.dumps(content))


@pytest.fixture
def course(tmp_path):
    folder = tmp_path / "course" / "notebooks"
    folder.mkdir(parents=True)
    for name in ("11_a.ipynb", "12_b.ipynb"):
        write(folder, name, "def halve(grad): ...", "1 + 1")
    (folder / "images").mkdir()
    (folder / "images" / "map.svg").write_text("<svg/>")
    (folder / "SOURCES.md").write_text("# Sources")
    (folder.parent / "QUESTIONS.md").write_text("[why](notebooks/11_a.ipynb#cell-id=why) [中文](QUESTIONS.zh-CN.md)")
    (folder.parent / "docs").mkdir()
    (folder.parent / "docs" / "glossary.md").write_text("[a](../notebooks/11_a.ipynb) [b](https://docs/notebooks/b.md)")
    return folder


@pytest.fixture
def own(tmp_path):
    return tmp_path / "my-notebooks"


def test_the_first_time_everything_is_copied_with_what_the_notebooks_show(course, own):
    assert update(course, own).new == ["11_a.ipynb", "12_b.ipynb"]
    assert sources(own / "11_a.ipynb") == sources(course / "11_a.ipynb")
    assert (own / "images" / "map.svg").exists()
    assert (own / "SOURCES.md").exists()


def test_pages_that_answer_questions_lie_beside_with_their_links(course, own):
    write(course, "11_a.ipynb", "[errors](../QUESTIONS.md) [words](../docs/glossary.md) [next](12_b.ipynb)")
    update(course, own)
    assert (own / "QUESTIONS.md").read_text() == "[why](11_a.ipynb#cell-id=why) [中文](QUESTIONS.zh-CN.md)"
    assert (own / "glossary.md").read_text() == "[a](11_a.ipynb) [b](https://docs/notebooks/b.md)"
    assert sources(own / "11_a.ipynb") == ["[errors](QUESTIONS.md) [words](glossary.md) [next](12_b.ipynb)"]
    assert update(course, own) == Update(), "a link that reads otherwise is no change"


def test_every_page_of_the_course_comes_along_and_its_links_lead_to_what_is_there(own):
    update(notebook_form.NOTEBOOKS, own)
    pages = {"SOURCES.md", "QUESTIONS.md", "QUESTIONS.zh-CN.md", "cheatsheet.md", "cheatsheet.zh-CN.md", "glossary.md"}
    pages |= {"limits.md", "limits.zh-CN.md", "atlas.md", "atlas.zh-CN.md"}
    assert {path.name for path in own.glob("*.md")} == pages
    for path in [*map(own.joinpath, pages), own / command.FIRST]:
        targets = re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        assert len(targets) > (0 if path.name.startswith("limits") else 5)
        assert [target for target in targets if not (own / target).exists()] == [], path.name


def test_a_second_time_nothing_is_done(course, own):
    update(course, own)
    before = {path: path.read_bytes() for path in own.iterdir() if path.is_file()}
    assert update(course, own) == Update()
    assert {path: path.read_bytes() for path in own.iterdir() if path.is_file()} == before


def test_a_new_version_replaces_what_was_not_touched_and_leaves_and_names_what_was(course, own):
    update(course, own)
    edit(own / "11_a.ipynb", "def halve(grad): return grad / 2")
    for name in ("11_a.ipynb", "12_b.ipynb"):
        write(course, name, "def halve(grad): ...", "2 + 2")
    report = update(course, own)
    assert (report.new, report.replaced, report.kept) == ([], ["12_b.ipynb"], ["11_a.ipynb"])
    assert sources(own / "11_a.ipynb")[0] == "def halve(grad): return grad / 2"
    assert sources(own / "12_b.ipynb")[1] == "2 + 2"
    assert update(course, own).kept == [], "it is named once"


def test_outputs_and_metadata_alone_do_not_count_as_touched(course, own):
    update(course, own)
    content = json.loads((own / "11_a.ipynb").read_text(encoding="utf-8"))
    content["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "2"}]
    content["metadata"]["kernelspec"] = {"name": "mine"}
    (own / "11_a.ipynb").write_text(json.dumps(content))
    write(course, "11_a.ipynb", "new")
    assert update(course, own).replaced == ["11_a.ipynb"]


def test_a_copy_that_was_deleted_begins_again(course, own):
    update(course, own)
    edit(own / "11_a.ipynb", "mine")
    (own / "11_a.ipynb").unlink()
    assert update(course, own).new == ["11_a.ipynb"]
    assert sources(own / "11_a.ipynb")[0] == "def halve(grad): ..."


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"cells": 3}'])
def test_a_damaged_copy_is_left_alone(course, own, damage):
    update(course, own)
    (own / "11_a.ipynb").write_text(damage)
    write(course, "11_a.ipynb", "new")
    assert update(course, own).kept == ["11_a.ipynb"]
    assert (own / "11_a.ipynb").read_text() == damage


def test_without_its_notes_nothing_is_replaced(course, own):
    update(course, own)
    (own / NOTES).write_text("{")
    write(course, "11_a.ipynb", "new")
    assert update(course, own).replaced == []
    assert sources(own / "11_a.ipynb")[0] == "def halve(grad): ..."


def test_files_of_the_learners_own_stay(course, own):
    own.mkdir()
    (own / "ideas.ipynb").write_text("mine")
    update(course, own)
    assert (own / "ideas.ipynb").read_text() == "mine"


def test_a_course_without_notebooks_says_so(tmp_path, own):
    with pytest.raises(FileNotFoundError, match="run this in a clone of the course"):
        update(tmp_path, own)
    assert not own.exists()


def test_the_command_copies_and_passes_the_rest_on_to_jupyterlab(tmp_path, own, monkeypatch, capsys):
    called = []
    monkeypatch.setattr(command.subprocess, "call", lambda arguments: called.append(arguments) or 0)
    monkeypatch.setenv("BROWSER", "some")
    assert command.main(["lab", "--folder", str(own), "--port=9999"]) == 0
    (arguments,) = called
    assert arguments[1:3] == ["-m", "jupyterlab"]
    assert "--LabApp.default_url=/lab/tree/00_start_here.ipynb" in arguments
    assert arguments[-1] == "--port=9999"
    assert f"--ServerApp.root_dir={own}" in arguments
    assert len(list(own.glob("*.ipynb"))) == len(notebook_form.paths())
    assert "holds your own notebooks" in capsys.readouterr().out
    assert command.main(["lab", "--folder", str(own), "--copy-only"]) == 0
    assert len(called) == 1


@pytest.mark.parametrize("arguments", ["lab --copy-only --folder=FOLDER", "site", "slides none", "--help"])
def test_what_opens_or_makes_something_needs_no_pytorch(arguments, own):
    script = (
        "import sys\nfrom hooklab_desk import command\ncommand.subprocess.call = lambda arguments: 0\n"
        "try: command.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    )
    found = {"PYTHONPATH": str(notebook_form.ROOT / "labextension"), "PYTHONIOENCODING": "utf-8"}
    asked = arguments.replace("FOLDER", str(own)).split()
    run = subprocess.run(
        [sys.executable, "-c", script, *asked], env=os.environ | found, capture_output=True, text=True, encoding="utf-8"
    )
    assert run.stdout.splitlines()[-1] == "False", run.stderr


def test_the_server_tells_the_outline_and_what_is_done_and_forgets_it(tmp_path, monkeypatch):
    import browser_lab

    folder = tmp_path / "own"
    folder.mkdir()
    kept = tmp_path / "state" / "JUPYTER_DATA_DIR" / "hooklab" / "progress.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"00.A": "done"}')
    with browser_lab.running_lab(folder, tmp_path / "state") as address:
        question = address.replace("/lab?", "/hooklab/progress?")
        told = json.load(urllib.request.urlopen(question))
        assert told["done"] == {"00.A": "done"}
        assert [book["number"] for part in told["parts"] for book in part["notebooks"]][:2] == ["00", "11"]
        token = address.partition("token=")[2]
        request = urllib.request.Request(question, method="DELETE", headers={"Authorization": f"token {token}"})
        urllib.request.urlopen(request)
        assert not kept.exists()
        assert json.load(urllib.request.urlopen(question))["done"] == {}


def test_the_working_copy_is_ignored_by_git():
    assert f"{command.FOLDER}/" in (notebook_form.ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert Path(command.ROOT) == notebook_form.ROOT
