"""What processes write to a redacted log reaches the file without keys, in lines, and whoever is killed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from key_forms import KEY_FORMS, planted
from kmatrix.redaction.forms import HIDDEN
from kmatrix.redaction.log import LONGEST_LINE, OVERLAP, LineRedactor, RedactedLog
from kmatrix.redaction.redactor import SHORTEST
from waiting import wait_until

PYTHON = Path(sys.executable)
KEY = "correct-horse-battery"
ENVIRONMENT = {**os.environ, "MY_SECRET": KEY}


@pytest.fixture
def log(tmp_path):
    """An open log, and its file."""
    made = RedactedLog(tmp_path / "output.log", PYTHON, ENVIRONMENT)
    yield made, tmp_path / "output.log"
    made.close()


def writer(log, code, **known):
    """Start Python code whose output goes to the log."""
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=log, stderr=log, pass_fds=(log.reader,), env=ENVIRONMENT, **known)


@pytest.mark.process
def test_output_of_any_process_is_redacted_in_order(log):
    made, path = log
    code = f"""
import os, subprocess, sys
print("first {KEY}", flush=True)
os.write(1, b"second {KEY}\\n")
subprocess.run(["echo", "third {KEY}"])
sys.stderr.write("half of {KEY[:9]}"); sys.stderr.flush()
sys.stderr.write("{KEY[9:]} and no end"); sys.stderr.flush()
"""
    process = writer(made, code)
    made.started()
    process.wait()
    made.wait()

    assert path.read_text() == f"first {HIDDEN}\nsecond {HIDDEN}\nthird {HIDDEN}\nhalf of {HIDDEN} and no end"


@pytest.mark.process
def test_a_second_log_appends_to_the_file(log):
    made, path = log
    path.write_text("before\n")
    os.write(made.fileno(), b"after\n")
    made.started()
    made.wait()

    assert path.read_text() == "before\nafter\n"


@pytest.mark.process
def test_lines_appear_while_the_process_still_runs(log):
    made, path = log
    os.write(made.fileno(), b"a line\nand a part")
    wait_until(lambda: path.exists() and path.read_text() == "a line\n")


@pytest.mark.process
def test_the_last_lines_are_written_after_the_maker_of_the_log_was_killed(tmp_path):
    path = tmp_path / "output.log"
    code = f"""
import os, subprocess, sys
from pathlib import Path
from kmatrix.redaction.redactor import SHORTEST
from kmatrix.redaction.log import RedactedLog
log = RedactedLog(Path({str(path)!r}), Path(sys.executable))
command = ["sh", "-c", "read line; echo late {KEY} $line"]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
log.started()
print(child.pid, flush=True)
child.stdin.write(b"go\\n") if sys.stdin.readline() else None
child.stdin.flush()
os.kill(os.getpid(), 9)
"""
    maker = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
    )
    maker.communicate("now\n")
    assert maker.returncode == -signal.SIGKILL
    wait_until(lambda: path.exists() and path.read_text() == f"late {HIDDEN} go\n")


@pytest.mark.process
def test_a_killed_writer_of_the_log_is_replaced_and_no_process_gets_sigpipe(log):
    made, path = log
    process = writer(made, "print('line 0', flush=True); input(); print('line 1')", stdin=subprocess.PIPE)
    made.started()
    wait_until(lambda: path.exists() and "line 0" in path.read_text())
    child = next(one for one in psutil.Process().children() if "redaction/log.py" in " ".join(one.cmdline()))
    child.kill()
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)  # else it may take the next line with it
    process.communicate(b"go\n")
    wait_until(made.poll)

    assert process.returncode == 0
    assert path.read_text() == "line 0\nline 1\n"


def test_output_that_a_full_disk_does_not_take_is_counted(monkeypatch):
    from kmatrix.redaction import log as redacted_log

    arriving, full, written = [b"one\n", b"two\n", b""], [True], bytearray()

    def write(_, data):
        if full:
            full.pop()
            raise OSError(28, "No space left on device")
        written.extend(data)
        return len(data)

    monkeypatch.setattr(redacted_log.os, "read", lambda *_: arriving.pop(0))
    monkeypatch.setattr(redacted_log.os, "write", write)
    redacted_log.copy(-1, -1, LineRedactor({}))

    assert written == b"kmatrix: 4 bytes of output are missing here: no space on the disk\ntwo\n"


def test_every_form_of_a_key_is_found_however_its_text_arrives():
    for form in KEY_FORMS:
        text, keys = planted(form, seed=2)
        known = {f"MY_{number}_KEY": key for number, key in enumerate(keys)}
        data = f"it begins\n{text}\nit ends".encode()
        for environment, size in itertools.product((known, {}), (1, 7, 64)):
            lines = LineRedactor(environment)
            parts = [lines.feed(data[start : start + size]) for start in range(0, len(data), size)]
            clean = b"".join(parts) + lines.finish()
            assert not [key for key in keys if key.encode() in clean], (form.kind, size)
            assert (clean[:10], clean[-7:]) == (b"it begins\n", b"it ends"), (form.kind, size)


@pytest.mark.parametrize("before", [LONGEST_LINE - 5, LONGEST_LINE + OVERLAP - 5, LONGEST_LINE + OVERLAP + 3, 1000])
@pytest.mark.parametrize("secret", [KEY, "hf_" + "aB3" * 12])
def test_a_line_without_an_end_is_written_in_parts_that_split_no_key(before, secret):
    """The key is cut by the pieces in which the text arrives, and by the parts in which it is written."""
    data = b"x" * before + b" " + secret.encode() + b" " + b"y" * 2 * LONGEST_LINE
    for size in (LONGEST_LINE + OVERLAP + 7, LONGEST_LINE + OVERLAP + 20, 1 << 16):
        lines = LineRedactor({"MY_SECRET": KEY})

        clean = b"".join(lines.feed(data[start : start + size]) for start in range(0, len(data), size))
        clean += lines.finish()

        assert clean == data.replace(secret.encode(), HIDDEN.encode())


def test_the_half_of_a_key_whose_writer_was_killed_is_hidden():
    for size in range(SHORTEST, len(KEY)):
        lines = LineRedactor({"MY_SECRET": KEY})
        assert (
            lines.feed(b"loss 3.4\nhalf " + KEY[:size].encode()) + lines.finish() == f"loss 3.4\nhalf {HIDDEN}".encode()
        )


def test_bytes_that_are_not_text_are_written_as_they_are():
    assert LineRedactor({}).feed(b"\xff\x00\n") == b"\xff\x00\n"


def test_a_password_that_is_written_to_netrc_meanwhile_is_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr("kmatrix.redaction.log.REFRESH_S", -1.0)
    lines = LineRedactor({"HOME": str(tmp_path)})
    (tmp_path / ".netrc").write_text(f"machine a login b password {KEY}\n")

    assert lines.feed(f"it is {KEY}\n".encode()) == f"it is {HIDDEN}\n".encode()
