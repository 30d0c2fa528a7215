"""Kernels for the tests, forked from one process that has imported PyTorch: each run of a notebook saves those seconds.

Three processes: the test session starts the *server*, which imports PRELOADED when the first kernel is wanted;
Jupyter starts a *stand-in*, which asks the server for a fork, hands on signals to it and ends as it ends; the
*kernel* is that fork. Without a server (not on Linux), or where it refuses, the stand-in becomes a plain kernel.

All kernels of a session have one hash seed, and a submodule that a notebook uses without importing it may be there by
PRELOADED alone. With HOOKLAB_FORK=0 every kernel is a fresh one, as a learner's is, and both are noticed: so run
`make screenshots` and one round of `make test-portable`.
"""

import atexit
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

NAME = "hooklab-forked"  # of the kernel, for nbval and nbclient
SHARED = "HOOKLAB_TEST_KERNELS"  # the variable with the folder of the session's server
# Of others alone: hooklab is what is tested. Not matplotlib_inline's backend, which looks for its IPython.
PRELOADED = ("ipykernel.kernelapp", "ipykernel.debugger", "numpy", "torch", "torchvision")
PRELOADED += ("matplotlib.pyplot", "torchviz")
# How the variables begin that these modules read when they are imported: with others a kernel must start afresh.
EARLY = ("ATEN_", "CUDA_", "GOMP_", "HOME", "KMP_", "LANG", "LC_", "LD_", "MKL_", "MPL", "OMP_", "OPENBLAS_")
EARLY += ("PYTHON", "PYTORCH", "TORCH")
LATE = "TORCHINDUCTOR_CACHE_DIR"  # but for this one: PyTorch sets it in a process of the tests that compiles a model
MESSAGE = 1 << 20  # bytes: a request holds a whole environment
FORKED = b"forked"


@contextmanager
def server(folder: Path) -> Iterator[None]:
    """Offer the kernel NAME in the Jupyter data folder `folder`. All processes end with the block, or with this process."""
    folder.mkdir(parents=True, exist_ok=True)
    offer(folder, NAME, folder)
    address = str(folder / "server")
    if sys.platform != "linux" or os.environ.get("HOOKLAB_FORK") == "0":
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(listener.fileno())],
            stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


def offer(folder: Path, name: str, server: Path) -> None:
    """Let the Jupyter data folder `folder` have a kernel `name` that the server with the folder `server` forks."""
    from ipykernel.kernelspec import get_kernel_dict

    command = [sys.executable, "-I", "-S", __file__, str(server / "server"), "-f", "{connection_file}"]
    place = folder / "kernels" / name
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps(get_kernel_dict() | {"argv": command}), encoding="utf-8")


class Server:
    """Forks a kernel for each stand-in; kills it when its stand-in is gone, and all when standard input ends."""

    def __init__(self, listener: socket.socket) -> None:
        os.close(os.pidfd_open(os.getpid()))  # a system without it must fail here, before there is a fork
        self.early, self.pids = early(os.environ), set()
        self.selector = selectors.DefaultSelector()
        self.watch(sys.stdin, self.kill_all)
        self.watch(listener, self.fork)

    def watch(self, file, call) -> None:
        self.selector.register(file, selectors.EVENT_READ, call)

    def serve(self) -> list[str]:
        """Returns in each fork, with the arguments of the kernel that it is to be."""
        while True:
            (key, _), *_ = self.selector.select()  # one at a time: it may make the others void
            if arguments := key.data(key.fileobj):
                return arguments

    def fork(self, listener: socket.socket) -> list[str] | None:
        stand_in, _ = listener.accept()
        try:
            message, files, *_ = socket.recv_fds(stand_in, MESSAGE, 3)
        except OSError:
            message, files = b"", []  # Jupyter has given it up meanwhile
        request = json.loads(message or "null")
        if request is None or early(request["environment"]) != self.early:
            stand_in.close()
        else:
            preload()
            pid = os.fork()
            if pid == 0:
                return self.become_a_kernel(request, [*files, stand_in.detach()])
            os.setpgid(pid, pid)  # so that an interrupt reaches the processes that the kernel started, too
            self.pids.add(pid)
            self.watch(stand_in, partial(self.hand_on, pid))
            self.watch(os.pidfd_open(pid), partial(self.report, pid, stand_in))
            with suppress(OSError):  # if it is gone, `hand_on` will hear of it
                stand_in.send(FORKED)
        for file in files:
            os.close(file)
        return None

    def become_a_kernel(self, request: dict, files: list[int]) -> list[str]:
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        others = [key.fileobj for key in self.selector.get_map().values() if key.fileobj is not sys.stdin]
        # A socket that were closed by its number would close it again when collected, whatever it is by then.
        files += [other.detach() if isinstance(other, socket.socket) else other for other in others]
        for file in files:
            os.close(file)
        self.selector.close()
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        # Else all kernels would draw the same numbers, and a seed that a notebook forgot would not be missed.
        sys.modules["numpy"].random.seed()
        return [*request["arguments"], f"--IPKernelApp.parent_handle={os.getppid()}"]

    def hand_on(self, pid: int, stand_in: socket.socket) -> None:
        """A signal to the kernel."""
        try:
            signals = stand_in.recv(1)
        except OSError:  # it went without having read the answer
            signals = b""
        os.killpg(pid, signals[0] if signals else signal.SIGKILL)
        if not signals:
            self.selector.unregister(stand_in)

    def report(self, pid: int, stand_in: socket.socket, pidfd: int) -> None:
        """To the stand-in, that the kernel has ended."""
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.pids.remove(pid)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        with suppress(KeyError):
            self.selector.unregister(stand_in)
        with suppress(OSError):
            stand_in.send(str(status).encode())
        stand_in.close()

    def kill_all(self, stdin: object) -> None:
        for pid in self.pids:
            os.killpg(pid, signal.SIGKILL)
        os._exit(0)  # as a kernel does


def early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(EARLY) and name != LATE}


def preload() -> None:
    if "torch" in sys.modules:
        return
    # As a kernel sets it; and no thread of NumPy's, which a fork would lack.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else the debugger warns on this terminal
    os.environ.pop("JPY_PARENT_PID", None)  # a kernel here has another parent, which it is told
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no collection in a fork walks over, and copies, what it shares with the others
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"


def stand_in(address: str, *arguments: str) -> None:
    request = {"environment": dict(os.environ), "folder": os.getcwd(), "arguments": arguments}
    parent = os.getppid()
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        forked = connection.recv(MESSAGE) == FORKED
    except (AttributeError, OSError):  # no such sockets here, or no server
        forked = False
    if not forked:
        os.execv(sys.executable, [sys.executable, "-m", "ipykernel_launcher", *arguments])
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: connection.send(bytes([signum])))
    while not select.select([connection], [], [], 1)[0]:
        if os.getppid() != parent:  # and with this process the kernel ends
            sys.exit(1)
    status = int(connection.recv(MESSAGE) or 1)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        del sys.path[0]  # tests/support/
        arguments = Server(socket.socket(fileno=int(sys.argv[2]))).serve()
        sys.argv = ["ipykernel_launcher", *arguments]
        try:
            importlib.import_module("ipykernel.kernelapp").launch_new_instance()
        finally:
            atexit._run_exitfuncs()
            os._exit(0)  # to take thousands of modules down one by one is seconds of work, and tests nothing
    else:
        stand_in(*sys.argv[1:])
