"""notebooks/parity.yml: every cell is observed again, and every cell that surprises has a note that holds."""

import pickle
import subprocess

import parity
import parity_probes
import psutil
import pytest
import torch
from prose_rules import HAN, SPAN
from torch import nn

from hooklab.course.environment import STORED_TORCH, other_torch

TABLE = parity.stored()
KINDS = {kind.en: kind for kind in parity.kinds()}
NO_GLOO = not (torch.distributed.is_available() and torch.distributed.is_gloo_available())

of_stored_torch = pytest.mark.skipif(other_torch() is not None, reason=f"the table is of PyTorch {STORED_TORCH}")
needs_gloo = pytest.mark.skipif(NO_GLOO, reason="this PyTorch has no gloo, through which two processes could talk")
COLUMNS = [pytest.param(name, marks=pytest.mark.long) if name.startswith("compile") else name
           for name in parity_probes.PROBES]  # fmt: skip


@of_stored_torch
@pytest.mark.parametrize("name", COLUMNS)
def test_what_is_observed_in_one_process_is_what_is_stored(name):
    observed = {name: parity_probes.column(parity_probes.PROBES[name])}
    assert parity.differences(observed) == [], "run python tools/parity.py"


@of_stored_torch
@needs_gloo
@pytest.mark.long
def test_what_two_processes_observe_is_what_is_stored():
    observed = parity.observed_by_two()
    assert observed.keys() == parity_probes.TWO_PROCESSES.keys()
    assert parity.differences(observed) == [], "run python tools/parity.py"


def test_the_table_has_a_cell_for_each_kind_in_each_column():
    names = [*parity_probes.PROBES, *parity_probes.TWO_PROCESSES]
    assert [column["id"] for column in TABLE["columns"]] == list(TABLE["observed"]) == names
    assert all(seen.keys() == KINDS.keys() for seen in TABLE["observed"].values())
    assert {words.split()[0] for words in TABLE["observed"]["eager"].values()} == {"fires"}, "or nothing was hung"


def test_a_cell_that_differs_is_named():
    seen = TABLE["observed"]["eager"] | {"tensor hook": "silent"}
    assert parity.differences({"eager": seen}) == ["tensor hook × eager: stored 'fires 1', found 'silent'"]


def test_every_cell_that_is_not_as_in_eager_has_one_note():
    noted = [(column, kind) for note in TABLE["notes"] for column in note["columns"] for kind in note["kinds"]]
    assert len(set(noted)) == len(noted)
    cells = {(column, kind): words for column, seen in TABLE["observed"].items() for kind, words in seen.items()}
    odd = {(column, kind) for (column, kind), words in cells.items() if words != cells["eager", kind]}
    assert odd <= set(noted) <= cells.keys()


def test_the_words_of_the_table_say_the_same_in_both_languages():
    pairs = [*TABLE["groups"].values(), *TABLE["notes"]]
    pairs += [column[field] for column in TABLE["columns"] for field in ("name", "did")]
    for pair in pairs:
        assert sorted(SPAN.findall(pair["zh"])) == sorted(SPAN.findall(pair["en"]))
        assert not HAN.search(pair["en"])
        assert HAN.search(pair["zh"]) or SPAN.fullmatch(pair["zh"]), pair["zh"]


@pytest.mark.parametrize("language", ["zh", "en"])
def test_each_group_is_shown_with_a_row_for_each_kind_and_what_was_done(language):
    page = parity.tables(language)
    for kind in KINDS.values():
        assert page.count(f"\n| {getattr(kind, language)} | ") == len(TABLE["groups"])
    assert all(column["did"][language] in page for column in TABLE["columns"])
    assert all(f"{note[language]}\n" in page for note in TABLE["notes"])
    assert "|  |" not in page


def late_hook_on(part, model, x):
    """Compile without the hook, hang it, and reset the compiler: how often does it fire before and after that?"""
    compiled, fired = torch.compile(model, backend="eager"), []
    compiled(x)
    part.register_forward_hook(lambda *call: fired.append(1))
    compiled(x)
    before = len(fired)
    torch.compiler.reset()
    compiled(x)
    return before, len(fired)


@of_stored_torch
def test_the_notes_on_compiling_and_tracing_hold():
    x, kinds = torch.ones(3, 2), []
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
    assert late_hook_on(model[0], model, x) == (0, 1)

    def tenfold(module, args, output):
        kinds.append(type(output).__name__)
        return 10 * output

    model[0].register_forward_hook(tenfold)
    expected = model(x)
    for trace in (torch.fx.symbolic_trace, lambda model: torch.export.export(model, (x,)).module()):
        kinds.append("traced:")
        assert torch.equal(trace(model)(x), expected)
    assert kinds == ["Tensor", "traced:", "Proxy", "traced:", "FakeTensor"]


@of_stored_torch
def test_the_notes_on_what_comes_without_a_word_hold(recwarn):
    trial = parity_probes.Trial(KINDS["full backward hook"])
    assert parity_probes.vmapped(trial) == 0
    assert not recwarn
    parity_probes.traced(parity_probes.Trial(KINDS["full backward hook"]), at="0")
    assert "module output should be a Tensor" in str(recwarn.pop().message)
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *call: None)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(model)


WORKER = """
import sys, time
import parity_workers, psutil, torch.distributed

def observe():
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:
        here = [process for process in psutil.process_iter(["cmdline"]) if __file__ in (process.info["cmdline"] or [])]
        assert len(here) >= 2, "or a look at the processes finds none at all"
        if sys.argv[1] == "fails":
            raise ZeroDivisionError("on purpose")
    time.sleep(3600)

parity_workers.in_a_group(observe, limit_s=float(sys.argv[2]))
"""


@needs_gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "own_limit_s", "limit_s", "said"),
    [
        ("fails", 600, 300, (RuntimeError, "ZeroDivisionError: on purpose")),
        ("waits", 15, 300, (RuntimeError, "Timeout")),
        ("waits", 600, 30, (subprocess.TimeoutExpired, "timed out")),
    ],
    ids=["a worker that fails", "workers that wait for ever", "a launcher that takes too long"],
)
def test_no_process_is_left_after(does, own_limit_s, limit_s, said, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    error, message = said
    with pytest.raises(error, match=message):
        parity.two_processes(script, does, str(own_limit_s), limit_s=limit_s)
    left = [process for process in psutil.process_iter(["cmdline"]) if str(script) in (process.info["cmdline"] or [])]
    assert left == []
