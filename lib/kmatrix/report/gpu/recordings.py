"""Find the recordings of a run: one for each start of the recorder on each node, or one of another program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from kmatrix.errors import RecordError
from kmatrix.records.attempts import host_of
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.load import load
from kmatrix.report.gpu.samples import CPU, Samples, joined, unit_of
from kmatrix.text import plural

# File names of text recordings, preferred first: JSON of all GPUs, JSON of one GPU or of all, table.
PATTERNS = ("gpu_stats*_multi_gpu.json", "gpu_stats*.json", "gpu_metrics*.csv")
EARLIER = "in time, energy and mean power of the run; memory and balance are of the last attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The recordings of a run on one node: of simulated GPUs, of real ones, or of ranks on the CPU."""

    number: int = 0
    folder: RunDir
    host: str = ""  # of a run over several nodes
    evidence: str = ""  # the last file, from the parent directory of the run
    samples: Samples | None = field(default=None, repr=False)  # of all files; None: nothing was recorded
    notes: tuple[str, ...] = ()  # what could not be read, cannot be true, or is of other devices, one sentence each


def recordings_of(run_dir: RunDir) -> list[Node]:
    """Return the nodes of a run with their recordings."""
    later = run_dir.later_nodes()
    hosts = {node: host_of(run_dir.path, node) for node in (0, *later)} if later else {0: ""}
    return [_node(run_dir, node, host, later.get(node, run_dir)) for node, host in hosts.items()]


def _node(run_dir: RunDir, number: int, host: str, folder: RunDir) -> Node:
    """Return the recordings of a node, which are combined if they are of the same kind as the last one."""
    found: dict[Path, Samples] = {}
    notes: list[str] = []
    for path in _paths(folder):
        if path.suffix != ".bin" and found:
            break  # a text recording is the second choice, and the first of several has all
        try:
            found[path] = load(path)
        except RecordError as error:
            notes.append(f"{error.what}{error.why and f': {error.why}'}".replace(f"{folder.path}/", ""))
    node = Node(number=number, folder=folder, host=host, notes=tuple(notes))
    if not found:
        return node
    path, last = list(found.items())[-1]
    mine: list[Samples] = []
    for each, one in found.items():
        names = Counter(device.name for device in one.devices)
        devices = ", ".join(
            f"{plural(count, unit_of(one.device_type == CPU))} ({name})" for name, count in names.items()
        )
        earlier = f"an earlier attempt was recorded on {devices}, {one.time[-1]:.0f} s in {each.name}"
        if (one.device_type, one.simulated) != (last.device_type, last.simulated):
            notes.append(f"{earlier}: not included in these numbers")
            continue
        mine.append(one)
        if {device.identity for device in one.devices} != {device.identity for device in last.devices}:
            notes.append(f"{earlier}: {EARLIER}")
    samples = joined(mine)
    evidence = f"{run_dir.name}/{path.relative_to(run_dir.path)}"
    return replace(node, evidence=evidence, samples=samples, notes=(*notes, *samples.notes))


def text_recordings(folder: Path) -> list[Path]:
    """Return the text recordings in a folder, preferred first; of one pattern the newest name first."""
    found = (path for pattern in PATTERNS for path in sorted(folder.glob(pattern), reverse=True))
    return list(dict.fromkeys(found))


def _paths(folder: RunDir) -> list[Path]:
    last = [folder.gpu_samples] if folder.gpu_samples.exists() else []
    return [*folder.earlier_gpu_samples(), *last, *text_recordings(folder.path)]
