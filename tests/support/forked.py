"""Run trainers in processes forked from one that has imported torch: an import takes longer than a small run.

`python forked.py` is the server: a JSON request per line on stdin. A trainer of several ranks is started as torchrun
starts it: one process per rank, with its environment; if one fails, the others get SIGTERM. It ends with its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.01
KILL_S = 30  # after the first failure, the ranks that are left get SIGKILL, as by torchrun
PORT_DIGITS = 5  # in the pipe: each rank reads its own copy


class Forked:
    """A process that the server has forked, with the methods of subprocess.Popen that tests use."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self.returncode = pid, None
        self._folder = folder

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        if self.returncode is None and (self._folder / "code").exists():
            self.returncode = int((self._folder / "code").read_text())
        return self.returncode

    def communicate(self, timeout: float = 240.0) -> tuple[str, str]:
        """Wait for the end, and return stdout and stderr. Fails after the timeout."""
        wait_until(lambda: self.poll() is not None, f"process {self.pid} ends", timeout)
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the server has not written that yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(program: Sequence[str], environment: Mapping[str, str], *, ranks: int = 1) -> Forked:
    """Start a program: the file of a script, or -m and a module, and its arguments."""
    server, folder = _server(), Path(tempfile.mkdtemp(dir=_folders()))
    request = {"program": list(program), "environment": dict(environment), "ranks": ranks, "folder": str(folder)}
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return Forked(int(server.stdout.readline()), folder)


def run(
    program: Sequence[str], environment: Mapping[str, str], *, ranks: int = 1, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its exit status and output. Fails after the timeout."""
    process = start(program, environment, ranks=ranks)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(program), int(process.returncode or 0), out, err)


@functools.cache
def _folders() -> str:
    """Return the folder for the output of this process's programs, removed at its end."""
    folder = tempfile.mkdtemp(prefix="forked-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _server() -> subprocess.Popen[str]:
    from factories import environment

    command = [sys.executable, __file__]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Fork a process per request, and write its exit status into its folder when it has ended."""
    import torch._dynamo  # noqa: F401  (what takes the time: the first optimizer of a process imports it)

    import gpt2.train  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the tests, whose end is this one's
    folders: dict[int, Path] = {}
    while True:
        readable, _, _ = select.select([0], [], [], POLL_S if folders else None)
        if readable:
            line = _line()
            if not line:
                return
            request = json.loads(line)
            pid = os.fork()
            if not pid:
                _become(request)
            folders[pid] = Path(request["folder"])
            os.write(1, f"{pid}\n".encode())
        while folders and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            folder = folders.pop(ended[0])
            (folder / "code.part").write_text(str(os.waitstatus_to_exitcode(ended[1])))
            (folder / "code.part").replace(folder / "code")


def _line() -> str:
    """Return a line of stdin, unbuffered: a buffer would hide the next request from `select`."""
    found = b""
    while not found.endswith(b"\n") and (byte := os.read(0, 1)):
        found += byte
    return found.decode()


def _become(request: Mapping[str, Any]) -> NoReturn:
    """Make this process the program of a request, or the launcher of its ranks."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(request["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on, its output is the program's
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["ranks"] > 1:
        _launch(request)
    _exit(request["program"])


def _launch(request: Mapping[str, Any]) -> NoReturn:
    """Start the ranks, and exit when all have ended: with 1 if one has failed."""
    from torch.distributed import TCPStore

    # As torchrun does, the launcher serves the store: a port for rank 0 might be taken before rank 0 listens there.
    # Started after the forks: the ranks must not inherit its sockets and its thread.
    # Nor its reaction to SIGTERM, which is that of torchrun: each rank gets it.
    read_end, write_end = os.pipe()
    common = {"WORLD_SIZE": str(request["ranks"]), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {**common, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    pids = set()
    for rank in range(request["ranks"]):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        pid = os.fork()
        if not pid:
            os.close(write_end)
            os.environ["MASTER_PORT"] = os.read(read_end, PORT_DIGITS).decode()
            _exit(request["program"])
        pids.add(pid)
    signal.signal(signal.SIGTERM, lambda *_: _stop(pids))
    signal.signal(signal.SIGALRM, lambda *_: _stop(pids, signal.SIGKILL))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write_end, f"{store.port:0{PORT_DIGITS}}".encode() * request["ranks"])
    failed = False
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status:
            failed = True
            _stop(pids)
            signal.alarm(KILL_S)
    os._exit(int(failed))


def _stop(pids: set[int], number: int = signal.SIGTERM) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the launcher has not seen that yet
            os.kill(pid, number)


def _exit(program: Sequence[str]) -> NoReturn:
    """Run the program in this process, and exit with its status."""
    status = 0
    try:
        if program[0] == "-m":
            sys.argv = list(program[1:])
            sys.modules.pop(program[1], None)  # else runpy warns that it is imported already
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
