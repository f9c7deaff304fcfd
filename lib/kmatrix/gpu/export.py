"""A recording as a CSV file, for spreadsheets and the scripts of others."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

from kmatrix.gpu.formats import csv_header, csv_row, read_samples
from kmatrix.records import RunDir


def export_csv(run_dir: RunDir) -> Path:
    """Write every sample to gpu_metrics_<date>_<time>.csv beside the recording; return its path. Raises RecordError."""
    recording = read_samples(run_dir.gpu_samples)
    started = recording.times[0] if len(recording) else float(recording.header["started"]["wall"])
    path = run_dir.gpu_metrics_csv(datetime.fromtimestamp(started))
    partial = path.with_name(f".{path.name}")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(csv_header(int(gpu["gpu_index"]) for gpu in recording.header["gpus"]))
        writer.writerows(csv_row(snapshot, started) for snapshot in recording.snapshots())
    partial.replace(path)
    return path
