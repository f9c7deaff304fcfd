"""How long a checkpoint takes to write here: measured beforehand on a sample, then on each that is written."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from gpt2.checkpoint.files import Written

SAMPLE = 1 << 26  # bytes: long enough to see a slow disk, short enough not to be felt
WORTH_PROBING = 4 * SAMPLE  # below this any disk is fast enough


class Speed:
    """The rate of the last checkpoint, or of a sample. bytes: of the last checkpoint, 0 before the first."""

    def __init__(self) -> None:
        self.bytes = 0
        self._per_byte: float | None = None  # seconds

    def measured(self, written: Written) -> None:
        """Take in what a whole checkpoint took."""
        self.bytes, self._per_byte = written.bytes, written.seconds / written.bytes

    def seconds(self, size: int) -> float | None:
        """Return how long `size` bytes will take, None where nothing was measured."""
        return None if self._per_byte is None else size * self._per_byte

    def probe(self, folder: Path, size: int) -> float | None:
        """Write, hash and flush a sample where a checkpoint of `size` bytes could be slow; return its seconds."""
        if size < WORTH_PROBING:
            return None
        path = folder / ".probe.partial"
        data = os.urandom(SAMPLE)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # the first checkpoint will say what is wrong with the disk
            start = time.perf_counter()
            with path.open("wb") as file:
                hashlib.sha256(data)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._per_byte = (time.perf_counter() - start) / SAMPLE
        path.unlink(missing_ok=True)
        return self.seconds(size)
