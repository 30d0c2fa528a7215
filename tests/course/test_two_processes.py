"""Notebook 54 outside its stored run: nothing outlives a cell, and it runs where PyTorch has no gloo."""

import notebook_form
import pytest
import torch.distributed as dist

from hooklab import lesson

NOTEBOOK = next(notebook_form.NOTEBOOKS.glob("54_*.ipynb"))
CODE = {
    cell.id: cell.source
    for cell in notebook_form.cells(notebook_form.read(NOTEBOOK))
    if cell.is_code and "setup" not in cell.tags
}


def run(*ids):
    """The names that these cells define."""
    names = {"lesson": lesson}
    for cell_id in ids:
        exec(CODE[cell_id], names)
    return names


def test_where_gloo_is_missing_every_cell_runs_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    names = run(*CODE)
    assert capsys.readouterr().out.count(names["SKIPPED"]) > 10
    assert not names["results"]


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_the_process_group_of_an_experiment_ends_with_it_also_after_an_error():
    alone = run(*list(CODE)[: list(CODE).index("alone-def") + 1])["alone"]
    assert alone(dist.get_world_size) == 1
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError):
        alone(lambda: 1 / 0)
    assert not dist.is_initialized()


@pytest.mark.long
def test_an_error_in_one_of_the_two_processes_reaches_the_cell(tmp_path):
    torchrun = run("which-show", "which-run")["torchrun"]
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(60)\nraise ValueError('broken')\n"
    )
    with pytest.raises(RuntimeError, match="broken"):
        torchrun(script)
