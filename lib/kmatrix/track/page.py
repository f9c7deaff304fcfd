"""Serve the web page of a tracker on this machine: find a port, publish the address, wait for the end."""

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
from http.client import HTTPConnection
from pathlib import Path
from typing import TextIO

from kmatrix.errors import LaunchError
from kmatrix.hosts import LOOPBACK, REFUSED
from kmatrix.records.decode import SCHEMA, Count, Record, as_json, decode_bytes

PORTS = 100  # ports to try
START_S = 30.0  # time for a server to write its address to the state file


class Page(Record, frozen=True, kw_only=True):
    """A served page."""

    url: str  # ends in a slash
    port: Count
    pid: Count  # of the server
    token: str = ""  # permits renaming and deleting runs; empty: no token


def free_port(wanted: int) -> int:
    """Return the first free port from `wanted` upward. Raises LaunchError if there is none."""
    last = min(wanted + PORTS, 65536) - 1
    for port in range(wanted, last + 1):
        with socket.socket() as probe:
            # As the server does: a port whose last connections are in TIME_WAIT can be used.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK[0], port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port from {wanted} to {last}", hint="pass PORT=<another port>")


class StateFile:
    """The state file of the server of a directory: readable by its owner only, locked as long as the server lives.

    The lock ends with the server, even after SIGKILL. A file without a lock is stale.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f".page-{os.getuid()}.json"

    def living(self) -> Page | None:
        """Return the page that is being served, or None."""
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
        """Acquire the lock, and remove the file at the end; yield None if another server has it."""
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
        """Write the address of the page."""
        # The line end marks the content as complete: readers wait for it.
        self._file.write(json.dumps({"schema": SCHEMA, **as_json(page)}) + "\n")
        self._file.flush()

    def _open(self) -> TextIO:
        try:
            return os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        except OSError as error:
            raise LaunchError(
                f"cannot serve a page of {self.path.parent}",
                why=f"its server needs to write there: {error.strerror}",
                hint="copy the results directory, and pass RESULTS_DIR=<copy>",
            ) from None

    def _lock(self) -> bool:
        """Return whether we own the lock file. Readers hold it briefly; the server deletes it on exit."""
        for _ in range(10):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
                continue
            # A server that exits deletes its file: a lock on the deleted one would exclude nobody.
            if self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                return True
            self._file.close()
            self._file = self._open()
        return False

    def _read(self) -> Page | None:
        """Return the page that the server wrote, waiting while it starts; None after START_S.

        Raises RecordError if the file is damaged.
        """
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            data = self.path.read_bytes() if self.path.exists() else b""
            if data.endswith(b"\n"):
                return decode_bytes(data, Page, str(self.path))
            time.sleep(0.1)
        return None


def check_guard(port: int) -> None:
    """Raise LaunchError if a server of this machine answers a request that names a host of the internet.

    The trackers' packages have no setting for it, so a new version of one could ignore the guard in front of it.
    """
    connection = HTTPConnection(LOOPBACK[0], port, timeout=START_S)
    try:
        connection.request("GET", "/", headers={"Host": "rebinding.invalid"})
        status = connection.getresponse().status
    except OSError:
        return  # nobody can read a server that does not answer
    finally:
        connection.close()
    if status != REFUSED:
        why = f"it answered a request to the host rebinding.invalid with status {status}"
        raise LaunchError("web sites could read this page", why=why, hint="make setup-trackers")


def wait_for_signal() -> None:
    """Wait for Ctrl+C, SIGTERM or SIGHUP. Under nohup, SIGHUP stays ignored."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: ended.set())
    while not ended.wait(3600.0):
        pass
