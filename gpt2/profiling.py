"""Record a profile of some steps."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile

from kmatrix.records.files import replacing


class Profile:
    """Records a profile of steps i to j - 1 of a span "i:j"; "": none. A run resumed after i records nothing."""

    def __init__(self, span: str, path: Path) -> None:
        self._first, self._last = map(int, span.split(":")) if span else (-1, -1)
        self._path = path
        self._running: profile | None = None

    def at(self, step: int) -> None:
        """Start or stop recording before a step."""
        if step == self._first:
            self._running = profile()
            self._running.start()
        elif step == self._last:
            self.end()

    def end(self) -> None:
        """Write the recorded trace, if any, also if the run ends before the span does."""
        running, self._running = self._running, None
        if running:
            running.stop()
            with replacing(self._path) as partial:
                running.export_chrome_trace(str(partial))
