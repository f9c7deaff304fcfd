"""Run a command that serves a page of a tracker, and read its address."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path


@dataclass
class Served:
    """A command that serves a page. output: what it printed before it began to wait."""

    process: subprocess.Popen[str]
    output: str

    @property
    def url(self) -> str:
        return self.output.partition("URL: ")[2].split()[0]

    @property
    def base(self) -> str:
        return self.url.partition("?")[0]

    def interrupt(self) -> str:
        """Press Ctrl+C and return the output after it."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.communicate(timeout=600)[0]


def status_for_host(port: int, path: str, host: str, body: str | None = None) -> int:
    """Return the status of a request to a local server that names a host: GET, or POST with a JSON body."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        headers = {"Host": host, "Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body=body, headers=headers)
        return connection.getresponse().status


@contextmanager
def serve_page(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> Iterator[Served]:
    """Run a command that serves a page, from its last line until the end of the `with` block."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=cwd, env=env, text=True, start_new_session=True, **pipes)
    output = ""
    try:
        while "press Ctrl+C to stop" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        yield Served(process, output)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
