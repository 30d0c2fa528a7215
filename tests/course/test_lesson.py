"""The set-up cell and the environment check."""

import base64
import importlib.util
import linecache
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import forked_kernels
import nbformat
import picture_rules
import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

from hooklab import lesson
from hooklab._support.notebook_cell import in_cell
from hooklab.course import environment, errors
from hooklab.draw import graphviz

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _everything_as_before():
    threads, formatter = torch.get_num_threads(), warnings.formatwarning
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)
    torch.set_printoptions(profile="default")
    warnings.formatwarning = formatter


def test_start_prints_nothing_and_may_be_called_again(capsys):
    lesson.start()
    filters = list(warnings.filters)
    lesson.start()
    assert capsys.readouterr() == ("", "")
    assert warnings.filters == filters


def test_start_uses_the_threads_it_is_told(monkeypatch):
    for wanted in ("1", "2"):
        monkeypatch.setenv("HOOKLAB_THREADS", wanted)
        lesson.start()
        assert torch.get_num_threads() == int(wanted)


@pytest.mark.parametrize("wanted", ["0", "two", "-1", "1.5", ""])
def test_start_refuses_a_senseless_number_of_threads(monkeypatch, wanted):
    monkeypatch.setenv("HOOKLAB_THREADS", wanted)
    with pytest.raises(RuntimeError, match="expected a whole number of at least 1"):
        lesson.start()


def test_a_warning_is_one_line_without_a_path():
    lesson.start()
    text = "gone. (Triggered internally at /pytorch/build/TensorBody.h:489.)"
    assert warnings.formatwarning(text, UserWarning, "/tmp/ipykernel_1/2.py", 3) == "UserWarning: gone.\n"


def test_tensors_print_with_four_decimals_and_no_exponents():
    torch.set_printoptions(precision=8, sci_mode=True)
    lesson.start()
    assert repr(torch.tensor([1e-3, 123.0])) == "tensor([  0.0010, 123.0000])"


def test_a_ready_machine_is_told_so_in_both_languages():
    found = lesson.check_environment()
    assert (found.kind, found.zh[:4], found.en) == ("right", "环境就绪", "Your machine is ready: go ahead.")


@pytest.fixture
def shadow(monkeypatch, tmp_path):
    """Damage this machine, one thing at a time."""

    def old_torch():
        monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")

    def no_graphviz():
        monkeypatch.setattr(graphviz, "available", list)

    def broken_graphviz():
        broken = [sys.executable, "-c", "raise ImportError('libX11.so.6: cannot open shared object file')"]
        monkeypatch.setattr(graphviz, "available", lambda: [broken])

    def other_python():
        (tmp_path / ".venv").mkdir()
        monkeypatch.setattr(environment, "ROOT", tmp_path)

    def no_switch():
        import jupyter_core.paths

        monkeypatch.setattr(jupyter_core.paths, "jupyter_path", lambda *parts: [str(tmp_path)])

    return locals()


@pytest.mark.parametrize(
    ("damage", "zh", "en"),
    [
        (
            "old_torch",
            "PyTorch 版本过旧：当前是 2.9.1+cpu",
            "PyTorch is too old: found 2.9.1+cpu, needed 2.11",
        ),
        ("no_graphviz", "没有画计算图的工具", "neither `dot` nor pygraphviz is installed"),
        ("broken_graphviz", "计算图画不出来", "No graph can be drawn here"),
        ("other_python", "这个内核不在课程的环境里", "This kernel is outside the course's environment"),
        ("no_switch", "语言切换按钮没有装上", "The language switch is not installed"),
    ],
)
def test_what_is_missing_is_named_with_the_way_to_get_it(shadow, damage, zh, en):
    shadow[damage]()
    found = lesson.check_environment()
    assert found.kind == "wrong"
    assert zh in found.zh
    assert en in found.en
    assert all(re.search("uv sync|make lab|apt install graphviz", half) for half in (found.zh, found.en))
    assert "To fix: 1." in found.en


def test_everything_missing_is_listed_at_once(shadow):
    for damage in ("old_torch", "no_graphviz", "other_python", "no_switch"):
        shadow[damage]()
    found = lesson.check_environment()
    assert "To fix: 4." in found.en
    assert "\n4. " in found.zh


def test_an_old_torch_stops_the_set_up_cell_with_the_way_to_a_new_one(shadow):
    shadow["old_torch"]()
    with pytest.raises(RuntimeError, match=r"found 2\.9\.1\+cpu, needed 2\.11 or newer\. Run `uv sync`"):
        lesson.start()


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_the_module_can_be_run_from_the_command_line(encoding):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "hooklab.lesson"], capture_output=True, text=True, encoding=encoding,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "Your machine is ready: go ahead."


def test_without_torch_hooklab_says_what_to_run(tmp_path):
    code = "import sys; sys.modules['torch'] = None; import hooklab"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert "ImportError: this Python has no PyTorch" in done.stderr
    assert "`make lab`" in done.stderr.splitlines()[-1]


def test_importing_hooklab_imports_nothing_heavy_but_torch():
    code = "import sys, hooklab; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "matplotlib",
        "torchviz",
        "torchvision",
        "graphviz",
        "pygraphviz",
        "IPython",
        "jupyterlab",
        "yaml",
    }
    assert all(importlib.util.find_spec(name) for name in heavy), "the test would pass for a package that is missing"
    assert not heavy & set(done.stdout.split())


def run(*sources):
    """A notebook of these cells, run one after the other in a kernel."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, kernel_name=forked_kernels.NAME, allow_errors=True, timeout=60).execute()
    return notebook


def run_cells(*sources):
    """The error outputs of such cells."""
    notebook = run(*sources)
    errors = [output for cell in notebook.cells for output in cell.outputs if output.output_type == "error"]
    return [re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback)) for error in errors]


def test_an_error_shows_the_lines_of_the_cells_and_tb_shows_all():
    set_up = "import torch\nfrom hooklab import lesson\nlesson.start()"
    hook = "x = torch.ones(1, requires_grad=True)\nx.register_hook(lambda grad: grad.nope())\nx.sum().backward()"
    short, whole, syntax = run_cells(set_up, hook, "%tb", "1 +")
    assert "----> 3 x.sum().backward()" in short
    assert "----> 2 x.register_hook(lambda grad: grad.nope())" in short
    assert "_tensor.py" not in short
    assert "_tensor.py" in whole
    assert "1 +\n       ^\nSyntaxError" in syntax


def test_the_line_of_a_cell_that_is_timed_is_shown():
    set_up = "import torch\nfrom hooklab import lesson\nlesson.start()\nlayer = torch.nn.Linear(2, 2)"
    timed = "x = torch.ones(3)\nlayer(x)"
    for error in run_cells(set_up, f"%%time\n{timed}", f"%%timeit -n 1 -r 1\n{timed}", "%time layer(torch.ones(3))"):
        assert re.search(r"<timed exec>:2|<magic-timeit>:2|<timed eval>:1", error)
        assert "module.py" not in error


def test_errors_with_a_shape_of_their_own_are_shown_whole_and_later_ones_stay_short():
    set_up = "import torch\nfrom hooklab import lesson\nlesson.start()"
    group = "raise ExceptionGroup('both', [ValueError('the first'), TypeError('the second')])"
    code = "exec('a = 1\\nb = = 2')"
    mute = "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\nraise Mute"
    plain = "torch.ones(2).nope"
    notebook = run(set_up, group, code, mute, plain)
    group, code, mute, plain = (
        "".join("\n".join(output.get("traceback", [output.get("text", "")])) for output in cell.outputs)
        for cell in notebook.cells[1:]
    )
    assert "the first" in group
    assert "the second" in group
    assert "b = = 2" in code
    assert not any("interactiveshell.py" in shown for shown in (group, code, mute))
    assert "in <module>\n    raise Mute" in mute
    assert "Custom TB Handler failed" not in mute
    assert "----> 1 torch.ones(2).nope" in re.sub(r"\x1b\[[0-9;]*m", "", plain)


def test_the_errors_behind_an_error_are_shortened_too():
    set_up = "import torch\nfrom hooklab import lesson, no_leftovers\nlesson.start()"
    leak = (
        "layer = torch.nn.Linear(2, 2)\nwith no_leftovers(layer):\n    layer.register_forward_hook(print)\n"
        "    layer(torch.ones(3))"
    )
    short, whole = run_cells(set_up, leak, "%tb")
    assert "RuntimeError" in short
    assert "HookLeak: 1 hook(s) outlived the block" in short
    assert "direct cause" in short
    assert "module.py" not in short
    assert "census.py" not in short
    assert "module.py" in whole


def test_an_error_is_formatted_once_and_the_history_keeps_what_was_shown():
    set_up = "from hooklab import lesson\nlesson.start()"
    counted = (
        "shell, formatted = get_ipython(), []\n"
        "each = shell.InteractiveTB.structured_traceback\n"
        "def counting(*args, **kwargs):\n    formatted.append(args)\n    return each(*args, **kwargs)\n"
        "shell.InteractiveTB.structured_traceback = counting"
    )
    kept = (
        "import sys\n"
        "kept = '\\n'.join(shell.history_manager.exceptions[3]['traceback']).splitlines()\n"
        "left = hasattr(sys.last_value, '_render_traceback_')\n"
        "raise RuntimeError(f'formatted {len(formatted)} times, kept {len(kept)} lines, left: {left}')"
    )
    first, then = run_cells(set_up, counted, "1 / 0", kept)
    assert f"RuntimeError: formatted 1 times, kept {len(first.splitlines())} lines, left: False" in then


def test_an_interrupt_shows_the_lines_of_the_cells_and_the_next_cell_runs():
    set_up = (
        "import signal, torch\nfrom hooklab import check, lesson\nlesson.start()\n"
        "interrupt = lambda *args: signal.raise_signal(signal.SIGINT)\n"
        "layer = torch.nn.Linear(1, 1)\nhandle = layer.register_forward_hook(interrupt)"
    )
    checked = 'check.exercise("00.A", interrupt)'
    left = "raise RuntimeError(f'{len(torch.nn.modules.module._global_forward_hooks)}, {torch.is_grad_enabled()}')"
    by_hook, by_check, whole, then = run_cells(set_up, "layer(torch.ones(1))", checked, "%tb", left)
    for short, line in ((by_hook, "----> 1 layer(torch.ones(1))"), (by_check, f"----> 1 {checked}")):
        assert line in short
        assert "----> 4 interrupt = lambda *args: signal.raise_signal(signal.SIGINT)" in short
        assert short.splitlines()[-1].startswith("KeyboardInterrupt")
        assert "module.py" not in short
        assert "check.py" not in short
    assert "check.py" in whole
    assert "RuntimeError: 0, True" in then


def test_an_interrupt_while_an_error_is_shown_leaves_the_next_one_as_short():
    set_up = "import torch\nfrom hooklab import lesson\nlesson.start()"
    impatient = (
        "shell = get_ipython()\neach = shell.InteractiveTB.structured_traceback\n"
        "def interrupted(*args, **kwargs):\n"
        "    shell.InteractiveTB.structured_traceback = each\n    raise KeyboardInterrupt\n"
        "shell.InteractiveTB.structured_traceback = interrupted\n1 / 0"
    )
    *_, short = run_cells(set_up, impatient, "torch.nn.Linear(2, 2)(torch.ones(3))")
    assert "----> 1 torch.nn.Linear(2, 2)(torch.ones(3))" in short
    assert "module.py" not in short


# ---- a name that a cell above defines ----

ABOVE = """
    def compute(x): return x
    import torch.nn as nn; from math import pi as circle
    for number in range(3): square = number ** 2
    with open("f") as file: gone = 1
    del gone
    %matplotlib inline
    1 +
    def inner(): hidden = 1
"""


@pytest.fixture
def missing(monkeypatch, tmp_path):
    """Is there advice for a name, in the last but one cell of a notebook whose server and frontend say what they say?"""
    cells = [nbformat.v4.new_code_cell(source.strip(), id=f"above{number}")
             for number, source in enumerate(ABOVE.strip().splitlines())]  # fmt: skip
    cells += [nbformat.v4.new_markdown_cell("prose = 1"), nbformat.v4.new_code_cell("asked", id="asked")]
    cells += [nbformat.v4.new_code_cell("below = 1", id="below")]
    path = tmp_path / "course.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))

    def ask(name, kind=NameError, known=(), cell="asked", **metadata):
        said = {"metadata": {"cellId": cell, **metadata}}
        shell = SimpleNamespace(user_ns=dict.fromkeys(known), transform_cell=TransformerManager().transform_cell)
        shell.kernel = SimpleNamespace(get_parent=lambda channel: said)
        error = kind("a name", name=name) if kind is NameError else kind(name)
        found = errors.advice(shell, error)
        assert found is None or (f"`{name}`" in found.zh and f"`{name}`" in found.en)
        return found is not None

    return ask


@pytest.mark.parametrize("name", ["compute", "nn", "circle", "number", "square", "file"])
def test_a_name_that_a_cell_above_defines_is_known(missing, name):
    assert missing(name)
    assert not missing(name, known=[name])
    assert not missing(name, kind=UnboundLocalError)
    assert not missing(name, cell="unknown")
    assert not missing(name, tags=["raises-exception"])


@pytest.mark.parametrize("name", ["compte", "pi", "gone", "hidden", "below", "asked", "prose", None])
def test_of_another_name_nothing_is_said(missing, name):
    assert not missing(name)


@pytest.mark.parametrize("file", ["", "[]", "nothing", '{"cells": 3}', '{"worksheets": []}', None])
def test_where_the_notebook_cannot_be_read_nothing_is_said(missing, monkeypatch, tmp_path, file):
    path = tmp_path / "other.ipynb"
    if file is not None:
        path.write_text(file)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    assert not missing("compute")
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert not missing("compute")


def test_the_advice_stands_below_the_error_in_both_languages(tmp_path):
    path = tmp_path / "course.ipynb"
    above = nbformat.v4.new_code_cell("def compute(): ...", id="above")
    nbformat.write(nbformat.v4.new_notebook(cells=[above, nbformat.v4.new_code_cell("", id="asked")]), path)
    set_up = (
        f"import os\nfrom hooklab import lesson\nlesson.start()\nos.environ['JPY_SESSION_NAME'] = {str(path)!r}\n"
        "kernel = get_ipython().kernel\nparent = kernel.get_parent\n"
        "kernel.get_parent = lambda channel=None: {**parent(channel), 'metadata': {'cellId': 'asked'}}"
    )
    cells = [nbformat.v4.new_code_cell(source) for source in (set_up, "compute()", "compote()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name=forked_kernels.NAME, allow_errors=True, timeout=60).execute()
    _, asked, other = notebook.cells
    error, advice = asked.outputs
    assert error.ename == "NameError"
    assert advice.data["text/html"].startswith(
        '<div class="hooklab-message hooklab-note"><div lang="zh"><code>compute</code>'
    )
    assert '<div lang="en"><code>compute</code> is defined by a cell above' in advice.data["text/html"]
    assert [output.output_type for output in other.outputs] == ["error"]


# ---- pictures ----


def test_a_figure_is_a_sentence_and_reads_on_white_and_on_black():
    set_up = "from hooklab import lesson\nlesson.start()\nlesson.start()\nimport matplotlib.pyplot as plt"
    drawn = "plt.plot([1], label='one\\nline')\nplt.title('T')\nplt.xlabel('time')\nplt.text(0, 0, 'here')\n_ = plt.legend()"
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in (
            set_up,
            drawn,
            "plt.plot([1]);",
            "_, a = plt.subplots(2)\na[1].set_ylabel('B')\nplt.show()",
        )
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name=forked_kernels.NAME, timeout=60).execute()
    data = [cell.outputs[-1].data for cell in notebook.cells[1:]]
    assert [shown["text/plain"] for shown in data] == [
        "Figure: T; time: here, one line.",
        "<Figure size 770x352 with 1 Axes>",
        "Figure: B.",
    ]
    for shown in data:
        assert list(picture_rules.png_problems(base64.b64decode(shown["image/png"]))) == []


# ---- pretrained weights ----


def test_weights_are_taken_from_the_cache_and_never_downloaded(tmp_path, monkeypatch):
    from torchvision.models import ResNet18_Weights

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *args: pytest.fail("a download"))
    assert lesson.cached_weights(ResNet18_Weights.DEFAULT) is None
    (tmp_path / "checkpoints").mkdir()
    name = ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save({"weight": torch.ones(2)}, tmp_path / "checkpoints" / name)
    assert torch.equal(lesson.cached_weights(ResNet18_Weights.DEFAULT)["weight"], torch.ones(2))
    with pytest.raises(TypeError, match="weights enum"):
        lesson.cached_weights("resnet18")


def test_the_machine_can_be_checked_from_a_cell():
    (cell,) = run("%run -m hooklab.lesson").cells
    assert [output.text.splitlines()[-1] for output in cell.outputs] == ["Your machine is ready: go ahead."]


def test_a_cell_is_known_where_ipython_is_as_old_as_on_colab(monkeypatch):
    """IPython 7 cannot be asked for the name of a cell; it keeps a list of the files."""
    monkeypatch.setattr(linecache, "_ipython_cache", {"/tmp/12.py": (0, 0.0, [], "")}, raising=False)
    shell = SimpleNamespace(compile=SimpleNamespace())
    assert [in_cell(shell, file) for file in ("/tmp/12.py", "<timed exec>", "/tmp/module.py")] == [
        True,
        True,
        False,
    ]
