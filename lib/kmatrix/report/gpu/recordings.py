"""Find the recordings of a run: one for each start of the recorder on each node, or one of another program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.errors import RecordError
from kmatrix.records.attempts import host_of
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.load import load
from kmatrix.report.gpu.samples import CPU, Samples, unit_of
from kmatrix.text import plural

# File names of text recordings, preferred first: JSON of all GPUs, JSON of one GPU or of all, table.
PATTERNS = ("gpu_stats*_multi_gpu.json", "gpu_stats*.json", "gpu_metrics*.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording of a run."""

    node: int = 0
    host: str = ""  # of a run over several nodes
    evidence: str  # its file, from the parent directory of the run
    samples: Samples = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecordings:
    """All recordings of a run, of each node oldest first: of simulated GPUs, of real ones, or of ranks on the CPU."""

    recordings: tuple[Recording, ...] = ()
    folders: dict[int, RunDir] = field(default_factory=dict)  # node -> folder of its recordings
    hosts: dict[int, str] = field(default_factory=dict)  # node -> host, of a run over several nodes
    notes: tuple[str, ...] = ()  # recordings that could not be read, or are of another kind, one sentence each


def recordings_of(run_dir: RunDir, *, cpu: bool = False) -> RunRecordings:
    """Return the recordings of a run, none if there is none. cpu: it trained on the CPU.

    Those of another kind than the last one of a node are left out: simulated and real devices are never combined.
    """
    later = run_dir.later_nodes()
    folders = {0: run_dir, **later}
    hosts = {node: host_of(run_dir.path, node) for node in folders} if later else {}
    found: list[Recording] = []
    notes: list[str] = []
    for node, folder in folders.items():
        host, mine = hosts.get(node, ""), list[Recording]()
        prefix = f"{host}: " if host else ""
        for path in _paths(folder):
            if path.suffix != ".bin" and mine:
                break  # a text recording is the second choice, and the first of several has all
            evidence = f"{run_dir.name}/{path.relative_to(run_dir.path)}"
            try:
                mine.append(Recording(node=node, host=host, evidence=evidence, samples=load(path, cpu=cpu)))
            except RecordError as error:
                text = f"{error.what}{error.why and f': {error.why}'}".replace(f"{folder.path}/", "")
                notes.append(f"{prefix}{text}")
        for one in mine:
            if _kind(one) == _kind(mine[-1]):
                found.append(one)
            else:
                notes.append(f"{prefix}{earlier_text(one)}: not included in these numbers")
    return RunRecordings(recordings=tuple(found), folders=folders, hosts=hosts, notes=tuple(notes))


def earlier_text(one: Recording) -> str:
    """Return the devices, length and file of a recording of an earlier attempt."""
    names = Counter(device.name for device in one.samples.devices)
    unit = unit_of(one.samples.device_type == CPU)
    devices = ", ".join(f"{plural(count, unit)} ({name})" for name, count in names.items())
    seconds = f"{one.samples.time[-1]:.0f} s in {Path(one.evidence).name}"
    return f"an earlier attempt was recorded on {devices}, {seconds}"


def _kind(one: Recording) -> tuple[str, bool]:
    return one.samples.device_type, one.samples.simulated


def text_recordings(folder: Path) -> list[Path]:
    """Return the text recordings in a folder, preferred first; of one pattern the newest name first."""
    found = (path for pattern in PATTERNS for path in sorted(folder.glob(pattern), reverse=True))
    return list(dict.fromkeys(found))


def _paths(folder: RunDir) -> list[Path]:
    last = [folder.gpu_samples] if folder.gpu_samples.exists() else []
    return [*folder.earlier_gpu_samples(), *last, *text_recordings(folder.path)]
