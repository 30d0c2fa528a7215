"""`hooklab`, the one command line of the course (`hooklab lab` is in test_working_copy.py)."""

import json

import notebook_form
import pytest
from hooklab_desk import command

FIRST = notebook_form.NOTEBOOKS / "11_reading_gradients.ipynb"
ALL = [str(path) for path in notebook_form.paths()]


@pytest.fixture
def called(monkeypatch):
    """What would be run, without the Python in front."""
    calls = []
    monkeypatch.setattr(command.subprocess, "call", lambda arguments: calls.append(arguments[1:]) or 7)
    return calls


@pytest.mark.parametrize("name", ["", *command.COMMANDS])
def test_help_is_in_both_languages(name, capsys):
    with pytest.raises(SystemExit) as end:
        command.main([*name.split(), "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(word in said for word in (command.COMMANDS if not name else ["hooklab", name]))
    assert any("\u4e00" <= character <= "\u9fff" for character in said)


def test_check_runs_the_module_that_looks_at_the_machine(called):
    assert command.main(["check"]) == 7, "its exit status is that of the module"
    assert called == [["-m", "hooklab.lesson"]]


def test_progress_is_the_table_that_a_notebook_shows(capsys, monkeypatch, tmp_path):
    from hooklab import check

    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    (tmp_path / "hooklab").mkdir()
    (tmp_path / "hooklab" / "progress.json").write_text(json.dumps({"00.1": "done"}))
    assert command.main(["progress"]) == 0
    said = capsys.readouterr().out
    assert said == f"{check.progress()!r}\n"
    assert "1 / 2" in said


@pytest.mark.parametrize("name", ["check", "progress", "slides", "assignments"])
def test_what_takes_no_options_refuses_them(name, called, capsys):
    with pytest.raises(SystemExit):
        command.main([name, "--fast"])
    assert f"{name} 没有这个选项 / has no such option: --fast" in capsys.readouterr().err
    assert called == []


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ([], ["both", *ALL]),
        (["--language=zh"], ["zh", *ALL]),
        ([str(FIRST), "--language", "en"], ["en", str(FIRST)]),
        (
            ["35", "12_changing_gradients"],
            ["both", *(path for name in ("35", "12") for path in ALL if f"{name}_" in path)],
        ),
    ],
)
def test_slides_are_made_of_all_notebooks_or_of_those_that_are_named(called, options, passed):
    assert command.main(["slides", *options]) == 7
    assert called == [[str(notebook_form.ROOT / "docs/slides/build.py"), *passed]]


@pytest.mark.parametrize("name", ["99", "11.ipynb", "12_changing"])
@pytest.mark.parametrize("about", ["slides", "assignments"])
def test_a_notebook_that_is_not_there_is_named_with_those_that_are(called, capsys, about, name):
    assert command.main([about, "12", name]) == 1
    said = capsys.readouterr().err
    assert f"there is no notebook {name}; give a number or a file; the numbers are 00, 11, 12" in said
    assert f"没有 {name} 这本笔记本" in said
    assert called == []


@pytest.mark.parametrize(
    ("arguments", "script", "passed"),
    [(["site", "--check"], "site", "--check"), (["slides", "--language=zh"], "slides", "zh")],
)
def test_site_and_slides_are_made_in_a_clone_only(called, monkeypatch, tmp_path, capsys, arguments, script, passed):
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    assert command.main(arguments) == 7
    assert called[0][:2] == [str(notebook_form.ROOT / f"docs/{script}/build.py"), passed]
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.main(arguments) == 1
    assert "run this in a clone of the course" in capsys.readouterr().err
    assert len(called) == 1


@pytest.mark.parametrize(
    ("arguments", "module", "remedy"),
    [
        (["lab"], "jupyterlab", 'pip install "hooklab[lab]"'),
        (["slides", str(FIRST)], "docutils", "uv sync"),
        (["site"], "sphinx", "uv run --group site hooklab site"),
        (["assignments"], "nbgrader", "uv run --group homework hooklab assignments"),
    ],
)
def test_a_package_that_is_missing_is_named_with_how_to_get_it(
    called, monkeypatch, capsys, tmp_path, arguments, module, remedy
):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    folder = [f"--folder={tmp_path / 'own'}"] if arguments == ["lab"] else []
    assert command.main([*arguments, *folder]) == 1
    said = capsys.readouterr().err
    assert f"没有安装 {module}" in said
    assert f"{module} is not installed; run " in said
    assert remedy in said
    assert not (tmp_path / "own").exists()
    assert called == []
