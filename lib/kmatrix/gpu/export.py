"""A recording as a table for the programs of others: CSV, NumPy's npz, Parquet. Never called by one that records."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.gpu.formats import COLUMNS, Recording, csv_header, csv_row, read_samples
from kmatrix.records import RunDir

ROWS = 65_536  # samples of all GPUs that are held at once, for Parquet


def export(run_dir: RunDir, form: str) -> Path:
    """Write every sample to gpu_metrics_<date>_<time>.<form> beside the recording, whole or not at all.

    form: csv, npz or parquet. Returns the path. Raises RecordError.
    """
    recording = read_samples(run_dir.gpu_samples)
    started = recording.times[0] if len(recording) else float(recording.header["started"]["wall"])
    path = run_dir.gpu_metrics(datetime.fromtimestamp(started), form)
    partial = path.with_name(f".{path.name}")
    try:
        FORMS[form](recording, started, partial)
        partial.replace(path)
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            fix="make room, or copy the run's folder to another disk: the recording is untouched",
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def _write_csv(recording: Recording, started: float, path: Path) -> None:
    """Power and temperature of each GPU, a line each sample."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(csv_header(int(gpu["gpu_index"]) for gpu in recording.header["gpus"]))
        writer.writerows(csv_row(snapshot, started) for snapshot in recording.snapshots())


def _write_npz(recording: Recording, _started: float, path: Path) -> None:
    """`time` (samples,) in Unix seconds, and for each column an array (samples, GPUs); NaN: not known."""
    import numpy as np

    gpus = recording.header["gpus"]
    arrays: dict[str, Any] = {
        "time": np.asarray(recording.times, dtype=np.float64),
        "gpu_index": np.array([int(gpu["gpu_index"]) for gpu in gpus], dtype=np.int32),
        "uuid": np.array([str(gpu.get("uuid") or "") for gpu in gpus]),
        "header": np.array(json.dumps(recording.header)),
    }
    for name in COLUMNS:
        columns = [np.asarray(columns[name], dtype=np.float32) for columns in recording.columns if name in columns]
        if len(columns) == len(gpus):
            arrays[name] = np.stack(columns, axis=1)  # (samples, GPUs)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _write_parquet(recording: Recording, _started: float, path: Path) -> None:
    """A row for each GPU of each sample: time, gpu_index, uuid and the columns; null: not known."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise RecordError(
            "Parquet needs the package pyarrow, which is not installed",
            fix="run `make setup`, or take --format npz",
        ) from None
    names = [name for name in COLUMNS if all(name in columns for columns in recording.columns)]
    schema = pa.schema(
        [("time", pa.timestamp("us", tz="UTC")), ("gpu_index", pa.int32()), ("uuid", pa.string())]
        + [(name, pa.float32()) for name in names],
        metadata={"kmatrix": json.dumps(recording.header)},
    )
    gpus = recording.header["gpus"]
    stride = max(1, ROWS // len(gpus))
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for begin in range(0, len(recording), stride):
            chosen = range(begin, min(begin + stride, len(recording)))
            table: dict[str, list[Any]] = {
                "time": [round(recording.times[at] * 1e6) for at in chosen for _ in gpus],
                "gpu_index": [int(gpu["gpu_index"]) for _ in chosen for gpu in gpus],
                "uuid": [str(gpu.get("uuid") or "") for _ in chosen for gpu in gpus],
            }
            for name in names:
                values = (columns[name][at] for at in chosen for columns in recording.columns)
                table[name] = [None if math.isnan(value) else value for value in values]
            writer.write_table(pa.table(table, schema=schema))


FORMS: dict[str, Callable[[Recording, float, Path], None]] = {
    "csv": _write_csv,
    "npz": _write_npz,
    "parquet": _write_parquet,
}
