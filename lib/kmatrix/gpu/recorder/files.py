"""Write the files of a recording, and export it. A full disk leaves a reported gap and does not stop the recorder."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import Calibrated, Recording, RecordingHeader, SampleFile, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.formats.json_array import JsonArrayFile
from kmatrix.gpu.formats.samples import Snapshot, csv_header, csv_row, legacy, multi
from kmatrix.records.files import append_jsonl, replacing, write_json
from kmatrix.records.paths import RunDir

MONOTONIC = 1  # index in a sample
MAX_PENDING = 1000  # events kept in memory while the disk is full


class RecordingFiles:
    """gpu_samples.bin, both gpu_stats files, gpu_events.jsonl and gpu_summary.json of one run.

    A file that cannot be opened or written is retried once per second. `on_gap`: receives a message about samples that
    could not be written, when writing succeeds again or at the end.
    """

    def __init__(self, run_dir: RunDir, header: RecordingHeader, on_gap: Callable[[str], None]) -> None:
        self._dir, self._header, self._on_gap = run_dir, header, on_gap
        self._samples: SampleFile | None = None
        self._arrays: list[JsonArrayFile | None] = [None, None]
        self._calibration: Calibrated | None = None
        self._events: list[dict[str, Any]] = []
        self._missed, self._since, self._why = 0, 0.0, ""
        self._writer: threading.Thread | None = None
        self._open_samples()

    @property
    def continued(self) -> bool:
        """True if the samples of an earlier attempt are continued."""
        return self._samples is not None and self._samples.continued

    @property
    def renamed(self) -> bool:
        """True if the samples of an earlier attempt, of other GPUs or another format, were renamed."""
        return self._samples is not None and self._samples.renamed

    def write_samples(self, samples: Sequence[Sequence[float]]) -> None:
        """Append samples to gpu_samples.bin: Unix s, monotonic s, values."""
        if self._samples is None:
            self._miss(samples, self._why)
            return
        try:
            self._samples.extend(samples)
        except OSError as error:
            self._miss(samples, error.strerror or str(error))
            return
        if self._missed:
            self._report_gap(samples[0][MONOTONIC])

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Append one snapshot to both gpu_stats files, and retry pending events."""
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

    def write_event(self, event: str, text: str, gpu_index: int | None = None, **more: float | str | None) -> None:
        """Append one line to gpu_events.jsonl, with further keys. The order is kept, also after a full disk."""
        now = {"time": time.time(), "monotonic": time.monotonic()}
        self._events.append({**now, "event": event, "gpu_index": gpu_index, "text": text, **more})
        del self._events[:-MAX_PENDING]  # the disk may stay full for days
        self._flush_events()

    def write_calibration(self, calibration: Calibrated) -> None:
        """Write the calibration to the header of gpu_samples.bin."""
        self._calibration = calibration
        # A continued file keeps the calibration of its first attempt: it describes the same GPUs.
        if self._samples is not None and not self._samples.continued:
            try:
                self._samples.write_calibration(calibration)
            except OSError as error:
                self._why = error.strerror or str(error)

    def write_facts(self, header: RecordingHeader) -> None:
        """Write the facts of the devices to the header of gpu_samples.bin. A file that has no room keeps its own."""
        self._header = header
        if self._samples is not None:
            try:
                self._samples.write_facts(header)
            except OSError as error:
                self._why = error.strerror or str(error)

    def write_summary(self, value: Mapping[str, Any]) -> None:
        """Write gpu_summary.json in a thread, so that a slow disk does not delay samples."""
        # If the disk takes longer than a minute, this summary is skipped: the next one contains it.
        if self._writer is None or not self._writer.is_alive():
            self._writer = threading.Thread(target=self._write_summary_file, args=(value,), daemon=True)
            self._writer.start()

    def close(self, summary: Callable[[], Mapping[str, Any]]) -> bool:
        """Write pending events and the last summary, and close all files. Return whether the summary was written."""
        if self._missed:
            self._report_gap(time.monotonic())
        # Before the last summary: an older one that is still being written would replace it.
        if self._writer is not None:
            self._writer.join()
        self._flush_events()
        for file in (self._samples, *self._arrays):
            if file is not None:
                file.close()
        return self._write_summary_file(summary())

    def _write_summary_file(self, value: Mapping[str, Any]) -> bool:
        # Atomic, with a flush to disk: the next attempt continues from this file.
        try:
            write_json(self._dir.gpu_summary, value)
        except OSError:
            return False  # the next summary contains this one
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

    def _miss(self, samples: Sequence[Sequence[float]], why: str) -> None:
        if not self._missed:
            self._since = samples[0][MONOTONIC]
        self._missed += len(samples)
        self._why = why

    def _report_gap(self, until: float) -> None:
        missed, self._missed = self._missed, 0
        text = f"{missed} samples in {until - self._since:.1f} s could not be written: {self._why}"
        self.write_event("hole", text)
        self._on_gap(text)


def export(run_dir: RunDir) -> Path:
    """Export power and temperature of all samples to gpu_metrics_<date>_<time>.csv next to the recording.

    Return its path. The file is written atomically. Raises RecordError.
    """
    # Named after the start of the recording: a second export replaces the first.
    recording = read_samples(run_dir.gpu_samples)
    started = recording.times[0] if len(recording) else float(recording.header["started"]["wall"])
    path = run_dir.path / f"gpu_metrics_{datetime.fromtimestamp(started):%Y%m%d_%H%M%S}.csv"
    try:
        with replacing(path) as partial:
            _write_csv(recording, partial)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            hint="free disk space, or copy the run directory to another disk: the recording is unchanged",
        ) from None
    return path


def _write_csv(recording: Recording, path: Path) -> None:
    """Write power and temperature of each GPU, one row per sample."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        simulated = bool(recording.header.get("simulated"))
        writer.writerow(csv_header((int(gpu["gpu_index"]) for gpu in recording.header["gpus"]), simulated=simulated))
        clock = RecordingClock(recording)
        for index, snapshot in enumerate(recording.snapshots()):
            writer.writerow(csv_row(snapshot, clock.of(index), simulated=simulated))
