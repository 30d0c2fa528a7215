"""Colab, Kaggle and other places that have neither the lab's packages nor anything beside the notebook."""

import os
import subprocess
import sys
from types import ModuleType

import forked_kernels
import nbformat
import notebook_form
import pytest
import torch
from nbclient import NotebookClient

from hooklab import lesson
from hooklab.course import environment
from hooklab.draw import graphviz

# The cells of notebooks, one after the other, as a kernel runs them.
RUN = """
import json, sys
from pathlib import Path
sys.modules |= dict.fromkeys(HIDDEN)  # None: the import says that there is no such module
import matplotlib
matplotlib.use("agg")
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
for path in sys.argv[1:]:
    shell.reset()
    for cell in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            done = shell.run_cell("".join(cell["source"]))
            if done.success == ("raises-exception" in cell["metadata"].get("tags", ())):
                print("NOT AS STORED:", path, cell["id"], done.error_in_exec, file=sys.stderr)
"""
HIDDEN = ["jupyterlab", "jupyter_server", "nbconvert", "nbformat", "nbval", "nbclient", "pandas", "pygraphviz"]
HIDDEN += ["torchvision", "torchviz"]
CHAPTERS = ["11_reading_gradients.ipynb", "32_pack_and_unpack.ipynb"]


@pytest.mark.long
def test_notebooks_run_without_the_packages_of_the_lab_and_with_nothing_beside_them(tmp_path):
    code = f"HIDDEN = {HIDDEN}{RUN}\nassert shell.user_ns['lesson'].data('gpu_offload.json').is_file()"
    own = {"IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTER_DATA_DIR": str(tmp_path / "jupyter")}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, map(notebook_form.NOTEBOOKS.joinpath, CHAPTERS))],
        cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "NOT AS STORED" not in done.stderr


@pytest.fixture(params=["Colab", "Kaggle"])
def hosted(request, monkeypatch):
    if request.param == "Colab":
        monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    else:
        monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")


def nothing_draws(monkeypatch):
    monkeypatch.setattr(graphviz, "available", list)


def a_library_is_missing(monkeypatch):
    broken = [sys.executable, "-c", "raise ImportError('libX11.so.6: cannot open shared object file')"]
    monkeypatch.setattr(graphviz, "available", lambda: [broken])


def an_old_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")


@pytest.mark.parametrize(
    ("damage", "advice"),
    [
        (nothing_draws, "`%pip install pygraphviz`"),
        (a_library_is_missing, "`!apt install -y graphviz`"),
        (an_old_torch, "`%pip install -U torch`"),
    ],
)
def test_on_colab_and_kaggle_the_advice_is_what_a_cell_can_run(hosted, monkeypatch, damage, advice):
    damage(monkeypatch)
    found = lesson.check_environment()
    for half in (found.zh, found.en):
        assert advice in half
        assert not {"make", "uv"} & set(half.replace("`", " ").split())


def test_where_there_is_no_jupyterlab_its_switch_is_not_missed(hosted, monkeypatch, tmp_path):
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *parts: [str(tmp_path)])
    assert lesson.check_environment().kind == "right"


def test_another_torch_is_said_once_in_both_languages():
    code = "import torch\nfrom hooklab import lesson\ntorch.__version__ = {!r}\nlesson.start()"
    other, again, stored = code.format("2.14.1+cpu"), "lesson.start()", code.format(f"{lesson.STORED_TORCH}+cu130")
    for sources, notes in (([other, again], 1), ([stored], 0)):
        cells = ["import os\nos.environ['HOOKLAB_ANY_TORCH'] = '0'", *sources]
        notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
        NotebookClient(notebook, kernel_name=forked_kernels.NAME, timeout=60).execute()
        shown = [output for cell in notebook.cells for output in cell.outputs]
        assert len(shown) == notes


def test_the_note_on_another_torch_names_both(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
    note = environment.other_torch()
    assert all(version in half for half in (note.zh, note.en) for version in ("2.14.1", lesson.STORED_TORCH))
    monkeypatch.setattr(torch, "__version__", f"{lesson.STORED_TORCH}+cpu")
    assert environment.other_torch() is None


def test_a_notebook_finds_its_data_wherever_it_lies(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert '"runs"' in lesson.data("gpu_offload.json").read_text(encoding="utf-8")
