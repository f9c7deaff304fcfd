"""Find and read the recordings of a run: nothing above this module knows a format.

Each start of the recorder on each node has one: gpu_samples.bin. Other programs write JSON arrays
(`kmatrix.report.gpu.arrays`), and tables with a column per GPU and quantity.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kmatrix.errors import RecordError, reason_of
from kmatrix.gpu.formats.binary import damage_note, read_samples
from kmatrix.gpu.formats.samples import CSV_FIELDS, CSV_SIMULATED, SIMULATED, csv_header, time_of
from kmatrix.records.attempts import host_of
from kmatrix.records.decode import convert
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.arrays import HINT, floats, read_array
from kmatrix.report.gpu.results import DeviceFacts
from kmatrix.report.gpu.samples import MEASURED, Samples, joined, samples_of
from kmatrix.text import first_names, plural

# File names of text recordings, preferred first: JSON of all GPUs, JSON of one GPU or of all, table.
PATTERNS = ("gpu_stats*_multi_gpu.json", "gpu_stats*.json", "gpu_metrics*.csv")
CSV_COLUMN = re.compile(r"gpu(\d+)_(\w+)")
CSV_NAMES = {
    **{"power_w": "power", "temp_c": "temperature", "util_pct": "utilization", "sm_clock_mhz": "sm_clock"},
    **{"mem_used_mb": "memory_used", "mem_total_mb": "memory_total"},
}
EARLIER = "in time and energy of the run; means and balance are of the last attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The recordings of a run on one node: of simulated GPUs, of real ones, or of ranks on the CPU."""

    number: int = 0
    folder: RunDir
    host: str = ""  # of a run over several nodes
    evidence: str = ""  # the last file, from the parent directory of the run
    samples: Samples | None = field(default=None, repr=False)  # of all files; None: nothing was recorded
    notes: tuple[str, ...] = ()  # what could not be read, cannot be true, or is of other devices, one sentence each

    @property
    def prefix(self) -> str:
        """The begin of a note."""
        return f"{self.host}: " if self.host else ""


def recordings_of(run_dir: RunDir) -> list[Node]:
    """Return the nodes of a run with their recordings."""
    later = run_dir.later_nodes()
    hosts = {node: host_of(run_dir.path, node) for node in (0, *later)} if later else {0: ""}
    return [_read(run_dir, Node(number=node, folder=later.get(node, run_dir), host=hosts[node])) for node in hosts]


def _read(run_dir: RunDir, node: Node) -> Node:
    """Return a node with its recordings, which are combined if they are of the same kind as the last one."""
    found: list[tuple[Path, Samples]] = []
    notes: list[str] = []
    folder = node.folder
    last_start = [folder.gpu_samples] if folder.gpu_samples.exists() else []
    for path in (*folder.earlier_gpu_samples(), *last_start, *text_recordings(folder.path)):
        if path.suffix != ".bin" and found:
            break  # a text recording is the second choice, and the first of several has all
        try:
            found.append((path, load(path)))
        except RecordError as error:
            notes.append(f"{error.what}{error.why and f': {error.why}'}".replace(f"{folder.path}/", ""))
    if not found:
        return replace(node, notes=tuple(node.prefix + note for note in notes))
    path, last = found.pop()
    mine: list[Samples] = []
    for each, one in found:
        first = one.devices[0]
        devices = f"{plural(len(one.devices), first.unit)} ({first.gpu_name})"
        is_same = (one.simulated, first.unit) == (last.simulated, last.devices[0].unit)
        mine += [one] if is_same else []
        counts = EARLIER if is_same else "not included in these numbers"
        notes.append(f"an earlier attempt was recorded on {devices}, {one.time[-1]:.0f} s in {each.name}: {counts}")
    samples = joined([*mine, last])
    evidence = f"{run_dir.name}/{path.relative_to(run_dir.path)}"
    notes = [node.prefix + note for note in (*notes, *samples.notes)]
    return replace(node, evidence=evidence, samples=samples, notes=tuple(notes))


def text_recordings(folder: Path) -> list[Path]:
    """Return the text recordings in a folder, preferred first; of one pattern the newest name first."""
    found = (path for pattern in PATTERNS for path in sorted(folder.glob(pattern), reverse=True))
    return list(dict.fromkeys(found))


def load(path: Path) -> Samples:
    """Return the samples of a recording; an incomplete last one is left out.

    Raises RecordError if it is missing, damaged, of another kind, or has no sample.
    """
    try:
        return {".bin": _binary, ".csv": _table}.get(path.suffix, read_array)(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be read", why=reason_of(error), hint=HINT) from None


def _binary(path: Path) -> Samples:
    recording = read_samples(path)
    devices = convert(recording.header["gpus"], list[DeviceFacts], f"the header of {path}")
    raw = {name: [columns[name] for columns in recording.columns] for name in MEASURED}
    notes = damage_note(path, recording.damaged)
    return samples_of(path, devices, raw, recording.times, recording.monotonic, notes=notes)


def _table(path: Path) -> Samples:
    """Return the samples of a table with a column per GPU and quantity."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header, *lines = [*csv.reader(line.replace("\0", "") for line in file)] or [[]]
    matches = [CSV_COLUMN.fullmatch(name.strip()) for name in header]
    named = {at: (int(m[1]), CSV_NAMES[m[2]]) for at, m in enumerate(matches) if m and m[2] in CSV_NAMES}
    if not named:
        listed, expected = first_names(header, 12), ", ".join(csv_header([0], CSV_FIELDS))
        why = f"its columns are {listed}; expected {expected}, gpu1_power_w ..."
        raise RecordError(f"{path} is not a GPU recording", why=why, hint=HINT)
    complete = [row for row in lines if len(row) == len(header)]
    rows = [(time, row) for row in complete if (time := time_of(row[0])) is not None]
    notes = [f"{path.name}: {plural(lost, 'incomplete line')} left out"] if (lost := len(lines) - len(rows)) else []
    indices = sorted({index for index, _ in named.values()})
    raw = {name: [np.full(len(rows), np.nan) for _ in indices] for name in (*MEASURED, "memory_total")}
    for at, (index, quantity) in named.items():
        raw[quantity][indices.index(index)] = floats(lambda text: text or None, [row[at].strip() for _, row in rows])
    mark = f" {SIMULATED}" if CSV_SIMULATED in header else ""
    devices = [DeviceFacts(gpu_index=index, gpu_name=f"GPU {index}{mark}") for index in indices]
    return samples_of(path, devices, raw, [time for time, _ in rows], notes=notes)
