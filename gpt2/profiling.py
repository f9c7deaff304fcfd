"""Record a profile of some steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from kmatrix.records.files import replacing


class Profile:
    """Records a profile of steps i to j - 1 of a span "i:j"; "": none. A run resumed after i records nothing."""

    def __init__(self, span: str, path: Path) -> None:
        first, _, last = span.partition(":")
        self._first, self._last = (int(first), int(last)) if span else (-1, -1)
        self._path = path
        self._running: profile | None = None

    def at(self, step: int) -> bool:
        """Start or stop recording before a step. Return whether a trace was written."""
        if step == self._first:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._running.start()
        return step == self._last and self.end()

    def end(self) -> bool:
        """Write the recorded trace, if any, also if the run ends before the span does."""
        running, self._running = self._running, None  # first: the loop's `finally` calls this again after an error
        if running is None:
            return False
        running.stop()
        with replacing(self._path) as partial:
            running.export_chrome_trace(str(partial))
        return True
