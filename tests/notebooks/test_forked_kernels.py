"""The kernels of the tests: each as a fresh one would be, and none outlives the session."""

import ast
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import forked_kernels
import nbval.kernel
import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = [
    pytest.mark.long,  # `make test-long`
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every kernel is a plain one"),
]
FORKED = "'torch' in __import__('sys').modules"  # true before any cell has imported it


@contextmanager
def kernel(**options):
    """A kernel as its manager and the client that talks to it."""
    manager, client = start_new_kernel(kernel_name=forked_kernels.NAME, **options)
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def evaluate(client, expression, code=""):
    """The value of an expression in the kernel, after `code`."""
    reply = client.execute(code, user_expressions={"it": expression}, reply=True, timeout=60)["content"]
    assert reply["status"] == "ok", reply
    return ast.literal_eval(reply["user_expressions"]["it"]["data"]["text/plain"])


def ended(pid):
    """Has the process ended, or does it within some seconds?"""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_forked_kernel_has_pytorch_but_not_hooklab_and_the_environment_of_who_asked(tmp_path):
    asked = {**os.environ, "HOOKLAB_ASKED": "here", forked_kernels.LATE: str(tmp_path)}
    with kernel(env=asked, cwd=tmp_path) as (_, client):
        assert evaluate(client, FORKED)
        assert evaluate(client, "'hooklab' in sys.modules", "import os, sys") is False
        assert evaluate(client, "os.environ['HOOKLAB_ASKED'], os.getcwd()") == ("here", str(tmp_path))
        assert not evaluate(client, "[path for path in sys.path if path.endswith('tests')]")
        # A GPU could be used.
        assert evaluate(client, "torch.cuda._is_in_bad_fork()", "import torch") is False


def test_two_kernels_share_nothing():
    draw = "numpy.random.random(), random.random()"
    with kernel() as (_, one), kernel() as (_, other):
        for client in (one, other):
            evaluate(client, "0", "import os, numpy, random, torch")
        evaluate(one, "0", "torch.left = os.environ['LEFT'] = '1'; torch.manual_seed(7)")
        assert not evaluate(other, "hasattr(torch, 'left') or 'LEFT' in os.environ")
        assert evaluate(one, "torch.initial_seed()") != evaluate(other, "torch.initial_seed()")
        assert not set(evaluate(one, draw)) & set(evaluate(other, draw))


def test_a_stand_in_that_is_gone_before_it_is_answered_takes_nobody_along(tmp_path):
    with kernel() as (_, client):
        server = evaluate(client, "os.getppid()", "import os")
        request = {"environment": dict(os.environ), "folder": str(tmp_path), "arguments": ["-f", "gone.json"]}
        for message, patience in (
            (b"", 0),
            (json.dumps(request).encode(), 0),
            (json.dumps(request).encode(), 1),
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stand_in:
                stand_in.connect(str(Path(os.environ[forked_kernels.SHARED], "server")))
                if message:
                    socket.send_fds(stand_in, [message], [0, 1, 2])
                select.select([stand_in], [], [], 60 * patience)  # until it could read the answer
        with kernel() as (_, another):
            assert evaluate(another, "os.getppid()", "import os") == server
        assert evaluate(client, "1 + 1") == 2


def test_an_interrupt_reaches_the_kernel():
    with kernel() as (manager, client):
        # An error would make the kernel drop, for a moment, whatever is asked next.
        asked = client.execute("print('running'); import time; time.sleep(100)", stop_on_error=False)
        while client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
            pass
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != asked:
            pass  # an answer to what was asked when the kernel started
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert evaluate(client, "1 + 1") == 2


def test_what_is_read_at_import_gets_a_kernel_that_starts_afresh():
    with kernel(env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ANOTHER": "1"}) as (_, client):
        assert not evaluate(client, FORKED)
        assert evaluate(client, "torch.get_num_threads()", "import torch") == 1


def elsewhere(context):
    context.setattr(sys, "platform", "darwin")


def afresh(context):
    context.setenv("HOOKLAB_FORK", "0")


@pytest.mark.parametrize("without", [elsewhere, afresh])
def test_without_a_server_kernels_are_plain(without, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    with monkeypatch.context() as context:
        without(context)
        with forked_kernels.server(tmp_path):
            assert not (tmp_path / "server").exists()
    with kernel() as (_, client):
        assert not evaluate(client, FORKED)
        assert evaluate(client, "1 + 1") == 2


def test_a_kernel_ends_with_its_stand_in_and_the_stand_in_with_its_kernel():
    with kernel() as (manager, client):
        pid = evaluate(client, "os.getpid()", "import os")
        assert pid != manager.provisioner.pid
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        assert ended(pid)
    with kernel() as (manager, client):
        os.kill(evaluate(client, "os.getpid()", "import os"), signal.SIGKILL)
        assert ended(manager.provisioner.pid)
        assert manager.provisioner.process.poll() == 128 + signal.SIGKILL


SESSION = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import forked_kernels, test_forked_kernels
with forked_kernels.server(Path(sys.argv[1])), test_forked_kernels.kernel() as (manager, client):
    print(manager.provisioner.pid, *test_forked_kernels.evaluate(client, "(os.getpid(), os.getppid())", "import os"), flush=True)
    time.sleep(600)
"""


def test_server_and_kernels_end_with_a_session_that_was_killed(tmp_path):
    environment = {**os.environ, "JUPYTER_DATA_DIR": str(tmp_path)}
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION, tmp_path, Path(forked_kernels.__file__).parent],
        cwd=Path(__file__).parent, env=environment,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with session:
        line = session.stdout.readline()
        session.kill()
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 3, f"the kernel did not come up: {line!r}"
    assert [pid for pid in pids if not ended(pid)] == []


def test_a_kernel_that_dies_at_its_start_is_started_once_more():
    outcomes = [RuntimeError("Kernel died before replying to kernel_info"), "a kernel"]

    def start(name):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return name, outcome

    assert nbval.kernel.start_new_kernel.func(start, "python3") == ("python3", "a kernel")
    outcomes += [RuntimeError("once"), RuntimeError("twice")]
    with pytest.raises(RuntimeError, match="twice"):
        nbval.kernel.start_new_kernel.func(start, "python3")
