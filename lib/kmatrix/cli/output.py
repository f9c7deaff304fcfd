"""The output of commands: text without the control characters that a file or a name may contain."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from kmatrix.output import OutputError, discard
from kmatrix.text import printable


class PlainStream:
    """A text stream that removes control characters from everything that is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with _failing_as_output():
            self.stream.write(printable(text))
        return len(text)

    def flush(self) -> None:
        with _failing_as_output():
            self.stream.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class ErrorStream(PlainStream):
    """The same for stderr: if it cannot be written, the command continues without it."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OutputError:
            discard(self.stream)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OutputError:
            discard(self.stream)


@contextmanager
def _failing_as_output() -> Iterator[None]:
    """Turn an OSError of a stream into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


@contextmanager
def plain_output() -> Iterator[None]:
    """Replace stdout and stderr by streams without control characters.

    Names, reasons and log lines come from files, which another program or person may have written.
    """
    former = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, PlainStream(sys.stdout)), cast(TextIO, ErrorStream(sys.stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = former


def terminal_output() -> TextIO:
    """Return stdout as it is, for displays that move the cursor and set colors. They call `printable` themselves."""
    return sys.stdout.stream if isinstance(sys.stdout, PlainStream) else sys.stdout
