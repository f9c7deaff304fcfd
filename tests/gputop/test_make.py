"""`make gputop` and `make gpu-exporter` leave no process behind when make is ended."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from gputop_values import ROOT, Recorder

pytestmark = pytest.mark.process


def read_until(descriptor: int, text: str) -> None:
    """Read until a text; "": until no process has the other end."""
    found = ""
    while not text or text not in found:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # a terminal that nobody has open any more
            data = b""
        if not data:
            assert not text, found
            return
        found += data.decode(errors="replace")


GATE = (("gputop", signal.SIGTERM), ("gputop", signal.SIGHUP), ("gpu-exporter", signal.SIGINT))
OTHERS = (("gputop", signal.SIGINT), ("gputop", signal.SIGKILL), ("gpu-exporter", signal.SIGTERM))


@pytest.mark.parametrize(
    ("target", "number"), [*GATE, *(pytest.param(*other, marks=pytest.mark.nightly) for other in OTHERS)]
)
def test_the_program_ends_with_make(tmp_path, target, number):
    Recorder(tmp_path / "run").write(9)
    arguments, said = ([f"REPLAY={tmp_path / 'run'}"], "q quit") if target == "gputop" else (["PORT=0"], "serving http")
    ours, theirs = pty.openpty()
    command = ["make", "--no-print-directory", "-C", str(ROOT), target, f"PYTHON={sys.executable}", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    make = subprocess.Popen(command, env=environment | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    read_until(ours, said)
    make.send_signal(number)
    read_until(ours, "")
    os.close(ours)
    make.wait()
