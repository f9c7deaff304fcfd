"""A tracker's page that this machine serves: on which port, by whom, and how one waits for its end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records import SCHEMA

LOOPBACK = "127.0.0.1"
PORTS = 100  # how many are tried, upward
START_S = 30.0  # a server that holds the state file has written its address into it by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Where a server answers. url: ends in a slash.  token: who knows it may rename and delete; empty for none."""

    url: str
    port: int
    pid: int
    token: str = ""


def free_port(host: str, wanted: int) -> int:
    """Return the first port from `wanted` upward that nobody listens on. Raises LaunchError where there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ConfigError(
            f"HOST={host} is no address of this machine",
            why=str(error),
            fix=f"leave it out: {LOOPBACK} is for this machine alone",
        ) from None
    last = min(wanted + PORTS, 65536) - 1
    for port in range(wanted, last + 1):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no port from {wanted} to {last} is free", fix="pass PORT=<another>")


class StateFile:
    """Who serves a folder's page: a file that only its owner reads, and that the server holds for as long as it lives.

    However a server ends, its hold ends with it: a file that nobody holds says nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f".page-{os.getuid()}.json"

    def living(self) -> Page | None:
        """Return the page that is served now, None where there is none."""
        try:
            with self.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._read()
        except OSError:
            return None  # no file
        return None

    @contextmanager
    def held(self) -> Iterator[StateFile | None]:
        """Be the one server, and remove the file in the end; None where another is."""
        with self._open() as self._file:
            if not self._lock():
                yield None
                return
            self._file.truncate()
            try:
                yield self
            finally:
                self.path.unlink(missing_ok=True)

    def write(self, page: Page) -> None:
        """Say where the page is."""
        self._file.write(json.dumps({"schema": SCHEMA, **asdict(page)}) + "\n")
        self._file.flush()

    def _open(self) -> TextIO:
        try:
            return os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        except OSError as error:
            raise LaunchError(
                f"a page of {self.path.parent} cannot be served",
                why=f"its server writes beside the data: {error.strerror}",
                fix="copy the folder of results, and pass RESULTS_DIR=<the copy>",
            ) from None

    def _lock(self) -> bool:
        """Whether the file is ours now. Whoever looks at it holds it for a moment; a server that ends removes it."""
        for _ in range(10):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
                continue
            if self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                return True
            self._file.close()
            self._file = self._open()
        return False

    def _read(self) -> Page | None:
        """Return what the server wrote; it may be about to."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            if text.endswith("\n"):
                said = json.loads(text)
                return Page(url=said["url"], port=said["port"], pid=said["pid"], token=said["token"])
            time.sleep(0.1)
        return None


def wait_for_the_end() -> None:
    """Return when Ctrl+C is typed, or SIGTERM or SIGHUP comes; under nohup SIGHUP stays ignored."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: ended.set())
    while not ended.wait(3600.0):
        pass
