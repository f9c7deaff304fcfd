"""An append-only log file without keys: processes write to a pipe, and a small program redacts what it reads.

    python -I -S redaction/log.py LOG < pipe >> LOG

Redaction at the end of a run would leave keys in the log of a run that was killed, and redaction inside the trainer
would miss the output of C libraries and of other programs. So the pipe has a reader of its own, which is not a child of
the processes that write: it reads on until the last of them has exited, whoever was killed before. It waits in the
kernel, and starts in 30 ms. Decision 0014 compares the alternatives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":  # -I leaves out the directory of the program
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kmatrix.redaction.forms import HIDDEN, PrivateKeys, may_begin
from kmatrix.redaction.redactor import redactor

PIPE = 1 << 20  # bytes that writers may be ahead of the reader: a burst of output never waits
CHUNK = 1 << 16  # bytes per read
LONGEST_LINE = 1 << 16  # bytes; a longer line is written in parts
OVERLAP = 1 << 12  # bytes of such a line that stay for the next part, or more for a longer key: it may be in both
REFRESH_S = 1.0  # between two looks at .netrc: `wandb login` may write to it meanwhile
END_S = 5.0  # for the last lines, after the last writer has exited
LINE_END = re.compile(rb"[\r\n]")
REST_OF_KEY = re.compile(rb"[^\s\"'&,;<>]+")


class RedactedLog:
    """A log file, and the program that writes it. `fileno` is the descriptor for the processes that write."""

    def __init__(self, path: Path, python: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start the program. environment: of the writers; its keys are hidden. Raises OSError if that fails."""
        self._path, self._python = path, python
        self._environment = dict(os.environ if environment is None else environment)
        self._read, self._write = os.pipe()
        with contextlib.suppress(OSError):  # beyond the limit of this user: the pipe keeps its size
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, PIPE)
        try:
            self._program = self._start()
        except OSError:
            os.close(self._read)
            os.close(self._write)
            raise

    def fileno(self) -> int:
        """Return the descriptor to write to, until `started` is called."""
        return self._write

    @property
    def reader(self) -> int:
        """The other end of the pipe. While any process holds it, a write waits instead of failing with EPIPE."""
        return self._read

    def writer(self) -> int:
        """Return a new descriptor for another process that writes, also after `started`. Raises OSError after the end.

        The caller closes it.
        """
        # Opened again through the end that this process keeps. A descriptor of its own that stays open would keep the
        # log from ending.
        return os.open(f"/proc/self/fd/{self._read}", os.O_WRONLY | os.O_CLOEXEC)

    def started(self) -> None:
        """Close this process's end of the pipe, after the processes that write have been started."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def poll(self) -> bool:
        """Return whether everything is written and the program has exited; restart it if it was killed.

        This process keeps the pipe open for reading: a writer that prints meanwhile waits, instead of getting SIGPIPE.
        """
        code = self._program.poll()
        if code is None or self._read < 0:
            return code is not None
        if code:
            with contextlib.suppress(OSError):  # tried again at the next call
                self._program = self._start()
            return False
        self.close()
        return True

    def wait(self, seconds: float = END_S) -> None:
        """Wait until the last lines are written, but no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.poll() and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._program.wait(0.05)
        self.close()

    def close(self) -> None:
        """Close the descriptors of this process. The program goes on until the last writer has exited."""
        self.started()
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def _start(self) -> subprocess.Popen[bytes]:
        with self._path.open("ab", buffering=0) as log:
            return subprocess.Popen(
                [str(self._python), "-I", "-S", __file__, str(self._path)],
                env=self._environment,
                stdin=self._read,
                stdout=log,
                stderr=log,
                start_new_session=True,  # signals to the writers and to the terminal do not reach it
            )


class LineRedactor:
    """Turns output as it arrives into redacted lines. A line that has no end yet waits, because a key may follow."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment
        self._redactor, self._asked_at = redactor(environment), time.monotonic()
        self._overlap = max(OVERLAP, 2 * self._redactor.longest)
        self._private_keys = PrivateKeys()
        self._rest = b""
        self._in_key = False  # the last part of a long line ended with a key, which may go on

    def feed(self, data: bytes) -> bytes:
        """Return what can be written after this output."""
        if self._in_key:
            rest = REST_OF_KEY.match(data)
            data = data[rest.end() :] if rest else data
            self._in_key = not data
        self._rest += data
        ends = [match.end() for match in LINE_END.finditer(self._rest)]
        cut = ends[-1] if ends else 0
        ready, self._rest = self._clean(self._rest[:cut]), self._rest[cut:]
        return ready + self._part() if len(self._rest) > LONGEST_LINE + self._overlap else ready

    def finish(self) -> bytes:
        """Return the redacted last line, which has no end. Its writer may have been killed within a key."""
        ready, self._rest = self._rest, b""
        text = self._clean(ready).decode(errors="surrogateescape")
        return self._redactor.without_beginning(text).encode(errors="surrogateescape")

    def _part(self) -> bytes:
        """Return the first part of a line that is too long to wait for its end. Its last bytes stay, redacted."""
        # Redacted before it is cut: otherwise a key could have its parts in two pieces, and be found in neither.
        text = self._clean(self._rest)
        self._in_key = text.endswith(HIDDEN.encode())
        self._rest = text[-self._overlap :]
        return text[: -self._overlap]

    def _clean(self, data: bytes) -> bytes:
        """Return redacted text. Bytes that are not UTF-8 stay as they are."""
        if not data:
            return b""
        text = data.decode(errors="surrogateescape")
        if self._private_keys or may_begin(text):
            text = "".join(map(self._private_keys.hide, text.splitlines(keepends=True)))
        if time.monotonic() - self._asked_at > REFRESH_S:
            self._redactor, self._asked_at = redactor(self._environment), time.monotonic()
        return self._redactor.redact(text).encode(errors="surrogateescape")


def copy(source: int, log: int, lines: LineRedactor) -> None:
    """Copy output to a log until all writers have exited. What a full disk does not take is counted and left out."""
    dropped = 0
    while True:
        data = os.read(source, CHUNK)
        text = lines.feed(data) if data else lines.finish()
        if dropped and text:
            text = f"kmatrix: {dropped} bytes of output are missing here: no space on the disk\n".encode() + text
        try:
            while text:
                text, dropped = text[os.write(log, text) :], 0
        except OSError:
            dropped += len(text)
        if not data:
            return


def main() -> int:
    """Copy stdin to stdout, which is the log: its name in the arguments is for people who list processes."""
    copy(0, 1, LineRedactor())
    return 0


if __name__ == "__main__":
    sys.exit(main())
