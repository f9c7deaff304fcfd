"""Some steps of rank 0 as a Chrome trace of torch.profiler."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Profile:
    """Records the steps i to j - 1 of a span "i:j"; "" for none. A resume behind i records nothing."""

    def __init__(self, span: str, path: Path) -> None:
        first, _, last = span.partition(":")
        self._first, self._last = (int(first), int(last)) if span else (-1, -1)
        self._path = path
        self._running: profile | None = None

    def at(self, step: int) -> bool:
        """Begin or end where `step` says so, before it is taken. Returns whether a trace was written."""
        if step == self._first:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._running.start()
        return step == self._last and self.end()

    def end(self) -> bool:
        """Write what was recorded, if anything; also where the run ends before the span does."""
        running, self._running = self._running, None
        if running is None:
            return False
        running.stop()
        partial = self._path.with_name(f".{self._path.name}.partial")
        running.export_chrome_trace(str(partial))
        partial.replace(self._path)
        return True
