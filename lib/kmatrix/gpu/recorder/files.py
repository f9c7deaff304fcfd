"""Write the files of a recording, and export it. A full disk leaves a reported gap and does not stop the recorder."""

from __future__ import annotations

import csv
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import COLUMNS, Calibrated, Recording, RecordingHeader, SampleFile, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.formats.json_array import JsonArrayFile
from kmatrix.gpu.formats.samples import Snapshot, csv_header, csv_row, legacy, multi
from kmatrix.records.files import append_jsonl, replacing, write_json
from kmatrix.records.paths import RunDir

MONOTONIC = 1  # index in a sample
MAX_PENDING = 1000  # events kept in memory while the disk is full
ROWS = 65_536  # samples of all GPUs per Parquet row group


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
        """Append samples to gpu_samples.bin: Unix s, monotonic s, host energy (J, NaN: unknown), values."""
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


def export(run_dir: RunDir, form: str) -> Path:
    """Export all samples to gpu_metrics_<date>_<time>.<form> next to the recording, and return the path.

    `form`: csv, npz or parquet. The file is written atomically. Raises RecordError.
    """
    # Named after the start of the recording: a second export replaces the first.
    recording = read_samples(run_dir.gpu_samples)
    started = recording.times[0] if len(recording) else float(recording.header["started"]["wall"])
    path = run_dir.gpu_metrics(datetime.fromtimestamp(started), form)
    try:
        with replacing(path) as partial:
            FORMS[form](recording, partial)
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


def _write_npz(recording: Recording, path: Path) -> None:
    """Write `time` in Unix s and `elapsed` in s (samples,), and one array (samples, GPUs) per column. NaN: unknown."""
    import numpy as np

    gpus = recording.header["gpus"]
    arrays: dict[str, Any] = {
        "time": np.asarray(recording.times, dtype=np.float64),
        "elapsed": np.asarray(RecordingClock(recording).between(0, len(recording)), dtype=np.float64),
        "gpu_index": np.array([int(gpu["gpu_index"]) for gpu in gpus], dtype=np.int32),
        "uuid": np.array([str(gpu.get("uuid") or "") for gpu in gpus]),
        "header": np.array(json.dumps(recording.header)),
    }
    for name in COLUMNS:
        columns = [np.asarray(columns[name]) for columns in recording.columns if name in columns]
        if len(columns) == len(gpus):
            arrays[name] = np.stack(columns, axis=1)  # (samples, GPUs)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _write_parquet(recording: Recording, path: Path) -> None:
    """Write one row per GPU and sample: time, elapsed (s), gpu_index, uuid and the columns. null: unknown."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise RecordError(
            "Parquet needs the package pyarrow, which is not installed",
            hint="run `make setup`, or pass --format npz",
        ) from None
    names = [name for name in COLUMNS if all(name in columns for columns in recording.columns)]
    schema = pa.schema(
        [("time", pa.timestamp("us", tz="UTC")), ("elapsed", pa.float64())]
        + [("gpu_index", pa.int32()), ("uuid", pa.string())]
        + [(name, pa.float64() if name == "energy_j" else pa.float32()) for name in names],
        metadata={"kmatrix": json.dumps(recording.header)},
    )
    # One row group at a time, so that the memory does not depend on the length of the recording.
    gpus, clock = recording.header["gpus"], RecordingClock(recording)
    stride = max(1, ROWS // len(gpus))
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for begin in range(0, len(recording), stride):
            chosen = range(begin, min(begin + stride, len(recording)))
            table: dict[str, list[Any]] = {
                "time": [round(recording.times[at] * 1e6) for at in chosen for _ in gpus],
                "elapsed": [clock.of(at) for at in chosen for _ in gpus],
                "gpu_index": [int(gpu["gpu_index"]) for _ in chosen for gpu in gpus],
                "uuid": [str(gpu.get("uuid") or "") for _ in chosen for gpu in gpus],
            }
            for name in names:
                values = (columns[name][at] for at in chosen for columns in recording.columns)
                table[name] = [None if math.isnan(value) else value for value in values]
            writer.write_table(pa.table(table, schema=schema))


FORMS: dict[str, Callable[[Recording, Path], None]] = {
    "csv": _write_csv,
    "npz": _write_npz,
    "parquet": _write_parquet,
}
