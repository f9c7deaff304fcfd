"""Read a GPU recording of any format as samples: nothing above this module knows a format.

Formats: gpu_samples.bin, JSON arrays (`kmatrix.report.gpu.arrays`), and tables with a column per GPU and quantity.
"""

from __future__ import annotations

import codecs
import csv
import math
import re
from pathlib import Path

import numpy as np

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import MAGIC, damage_note, read_samples
from kmatrix.gpu.formats.samples import CSV_FIELDS, CSV_SIMULATED, SIMULATED, csv_header, time_of
from kmatrix.report.gpu.arrays import floats, read_array, unknown_kind
from kmatrix.report.gpu.samples import MEASURED, DeviceFacts, Samples, facts_of, samples_of
from kmatrix.text import first_names, plural

PROBE = 64  # bytes
CSV_COLUMN = re.compile(r"gpu(\d+)_(\w+)")
CSV_NAMES = {
    **{"power_w": "power", "temp_c": "temperature", "util_pct": "utilization", "sm_clock_mhz": "sm_clock"},
    **{"mem_used_mb": "memory_used", "mem_total_mb": "memory_total"},
}


def load(path: Path) -> Samples:
    """Return the samples of a recording; an incomplete last one is left out.

    Raises RecordError if it is missing, damaged, of another kind, or has no sample.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(PROBE).removeprefix(codecs.BOM_UTF8)
        if begin.startswith(MAGIC) or path.suffix == ".bin":
            return _binary(path)
        return _table(path) if begin.startswith(b"timestamp") else read_array(path)
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", hint="pass a gpu_stats*.json or gpu_metrics*.csv file") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read", why=error.strerror or str(error)) from None


def _binary(path: Path) -> Samples:
    recording = read_samples(path)
    header = recording.header
    devices = [
        DeviceFacts(
            index=int(gpu["gpu_index"]),
            name=str(gpu["gpu_name"]),
            uuid=str(gpu.get("uuid") or ""),
            rank=gpu.get("rank"),
            memory_total=gpu.get("memory_total"),
        )
        for gpu in header["gpus"]
    ]
    return samples_of(
        path,
        devices,
        {name: [columns[name] for columns in recording.columns] for name in MEASURED},
        recording.times,
        recording.monotonic,
        device_type=str(header.get("device_type") or ""),
        simulated=bool(header.get("simulated")) or any(one.name.endswith(SIMULATED) for one in devices),
        notes=damage_note(path, recording.damaged),
    )


def _table(path: Path) -> Samples:
    """Return the samples of a table with a column per GPU and quantity."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header, *lines = csv.reader(line.replace("\0", "") for line in file)
    matches = [CSV_COLUMN.fullmatch(name.strip()) for name in header]
    named = {at: (int(m[1]), CSV_NAMES[m[2]]) for at, m in enumerate(matches) if m and m[2] in CSV_NAMES}
    if not named:
        listed, expected = first_names(header, 12), ", ".join(csv_header([0], CSV_FIELDS))
        raise unknown_kind(path, f"its columns are {listed}; expected {expected}, gpu1_power_w ...")
    stamped = [(_time(row[0]), row) for row in lines if len(row) == len(header)]
    rows = [(time, row) for time, row in stamped if not math.isnan(time)]
    notes = [f"{path.name}: {plural(lost, 'incomplete line')} left out"] if (lost := len(lines) - len(rows)) else []
    indices = sorted({index for index, _ in named.values()})
    raw = {name: [np.full(len(rows), np.nan) for _ in indices] for name in (*MEASURED, "memory_total")}
    for at, (index, quantity) in named.items():
        raw[quantity][indices.index(index)] = floats([row[at].strip() or None for _, row in rows])[0]
    mark = f" {SIMULATED}" if CSV_SIMULATED in header else ""
    totals = zip(indices, raw["memory_total"], strict=True)
    devices = [facts_of(index, f"GPU {index}{mark}", "", total) for index, total in totals]
    return samples_of(path, devices, raw, [time for time, _ in rows], notes=notes)


def _time(text: str) -> float:
    """Return Unix s from ISO 8601 or from a number, NaN if it is neither."""
    time = time_of(text)
    try:
        return float(text) if time is None else time
    except ValueError:
        return math.nan
