"""Keep fast tests in one process: without programs, sockets, threads and sleep.

The functions are replaced once; a fast test that calls one of them fails. `process`, `story`, `nightly` and `gpu` tests
may use them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

FREE = ("process", "story", "nightly", "gpu")  # markers

_guarded: list[str] = []  # the fast test that runs now


def install() -> None:
    """Replace the functions that a fast test must not call."""
    for owner, name, what in (
        (subprocess.Popen, "__init__", "starts a process"),
        (os, "fork", "starts a process"),
        (os, "posix_spawn", "starts a process"),
        (os, "kill", "sends a signal"),
        (os, "killpg", "sends a signal"),
        (socket.socket, "connect", "opens a connection"),
        (socket.socket, "bind", "opens a port"),
        (threading.Thread, "start", "starts a thread"),
        (time, "sleep", "sleeps"),
    ):
        setattr(owner, name, _refusing(getattr(owner, name), name, what))


def begin(item: pytest.Item) -> None:
    """Guard the test, if it is a fast one."""
    _guarded[:] = [] if any(item.get_closest_marker(name) for name in FREE) else [item.nodeid]


def end() -> None:
    """Guard nothing until the next test begins."""
    _guarded.clear()


def _refusing(original: Callable[..., Any], name: str, what: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if _guarded and not (name in ("kill", "killpg") and arguments[1:] == (0,)):  # signal 0 asks if it is alive
            pytest.fail(f"a fast test {what} ({name}): mark it process, or pass a value instead", pytrace=True)
        return original(*arguments, **named)

    return call
