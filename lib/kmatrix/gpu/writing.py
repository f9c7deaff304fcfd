"""The files of a recording while it goes on: a full disk makes a hole in them, which is reported, and ends nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kmatrix.gpu.formats import JsonArrayFile, SampleFile, Snapshot, legacy, multi
from kmatrix.records import RunDir, append_jsonl, write_json

WAITING = 1000  # events that are kept while the disk takes none


class Files:
    """gpu_samples.bin, both gpu_stats files, gpu_events.jsonl and gpu_summary.json of one run.

    A file that cannot be opened or written is tried again at the next tick of a second.
    hole: called with a sentence when samples could not be written and the disk takes them again, or at the end.
    """

    def __init__(self, run_dir: RunDir, header: Mapping[str, Any], hole: Callable[[str], None]) -> None:
        self._dir, self._header, self._hole = run_dir, header, hole
        self._samples: SampleFile | None = None
        self._arrays: list[JsonArrayFile | None] = [None, None]
        self._calibration: Mapping[str, Any] | None = None
        self._events: list[dict[str, Any]] = []
        self._missed, self._since, self._why = 0, 0.0, ""
        self._writer: threading.Thread | None = None
        self._open_samples()

    @property
    def continued(self) -> bool:
        """Whether the samples go on from those of an earlier attempt."""
        return self._samples is not None and self._samples.continued

    def sample(self, time: float, values: Sequence[float]) -> None:
        """Write one moment to gpu_samples.bin. time: Unix seconds."""
        if self._samples is None:
            self._miss(time, self._why)
            return
        try:
            self._samples.append(time, values)
        except OSError as error:
            self._miss(time, error.strerror or str(error))
            return
        if self._missed:
            self._report(time)

    def second(self, snapshot: Snapshot) -> None:
        """Write one moment to both gpu_stats files, and what has waited for the disk."""
        if self._samples is None:
            self._open_samples()
        entries = (
            (self._dir.gpu_stats, legacy(snapshot.samples[0], snapshot.time)),
            (self._dir.gpu_stats_multi, multi(snapshot)),
        )
        for at, (path, entry) in enumerate(entries):
            try:
                array = self._arrays[at] or JsonArrayFile(path)
                self._arrays[at] = array
                array.append(entry)
            except OSError as error:
                self._why = error.strerror or str(error)
        self._flush_events()

    def event(self, event: str, text: str, gpu_index: int | None = None) -> None:
        """Write one line to gpu_events.jsonl, in the order of events also after a full disk."""
        self._events.append({"time": time.time(), "event": event, "gpu_index": gpu_index, "text": text})
        del self._events[:-WAITING]
        self._flush_events()

    def calibrated(self, calibration: Mapping[str, Any]) -> None:
        """Put the calibration in the header of gpu_samples.bin."""
        self._calibration = calibration
        if self._samples is not None and not self._samples.continued:
            try:
                self._samples.calibrated(calibration)
            except OSError as error:
                self._why = error.strerror or str(error)

    def summary(self, value: Mapping[str, Any]) -> None:
        """Write gpu_summary.json from a thread: waiting for the disk is not to delay samples."""
        if self._writer is None or not self._writer.is_alive():
            self._writer = threading.Thread(target=self._write_summary, args=(value,), daemon=True)
            self._writer.start()

    def close(self, summary: Callable[[], Mapping[str, Any]]) -> bool:
        """Write what is left and the last summary; return whether the disk took it."""
        if self._missed:
            self._report(time.time())
        if self._writer is not None:
            self._writer.join()
        self._flush_events()
        for file in (self._samples, *self._arrays):
            if file is not None:
                file.close()
        return self._write_summary(summary())

    def _write_summary(self, value: Mapping[str, Any]) -> bool:
        try:
            write_json(self._dir.gpu_summary, value)
        except OSError:
            return False  # the next one says the same and more
        return True

    def _open_samples(self) -> None:
        try:
            self._samples = SampleFile(self._dir.gpu_samples, {**self._header, "calibration": self._calibration})
        except OSError as error:
            self._why = error.strerror or str(error)

    def _flush_events(self) -> None:
        while self._events:
            try:
                append_jsonl(self._dir.gpu_events, self._events[0])
            except OSError as error:
                self._why = error.strerror or str(error)
                return
            del self._events[0]

    def _miss(self, time: float, why: str) -> None:
        if not self._missed:
            self._since = time
        self._missed += 1
        self._why = why

    def _report(self, until: float) -> None:
        missed, self._missed = self._missed, 0
        text = f"{missed} samples in {until - self._since:.1f} s could not be written: {self._why}"
        self.event("hole", text)
        self._hole(text)
