"""The names of all files of a matrix and of a run, and the search for a matrix."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import kmatrix
from kmatrix.errors import RecordError
from kmatrix.records.decode import Record, RunName, decode
from kmatrix.records.files import names

ROOT = kmatrix.ROOT
MATRIX_PREFIX = "test_matrix_results_"
STAGED = ".new"  # suffix of a matrix that is being made
EARLIER_SAMPLES = re.compile(r"gpu_samples\.([1-9][0-9]{0,8})\.bin", re.ASCII)
STAMP_FORMAT = "%Y%m%d_%H%M%S"  # of the name of a matrix, in local time
STAMP = re.compile(re.escape(MATRIX_PREFIX) + r"(\d{8}_\d{6})(?:_(\d{1,9}))?(\D.*)?", re.ASCII)


class Name:
    """The path of a file in a folder; {} in its name: that of the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunDir | MatrixDir, _: object) -> Path:
        return folder.path / self._name.format(folder.path.name)


@dataclass(frozen=True)
class RunDir:
    """The directory of one run, with the path of every file in it."""

    path: Path

    run_json = Name("run.json")
    config = Name(".config")
    output_log = Name("output.log")
    result = Name("result.json")
    metrics = Name("metrics.jsonl")
    alerts = Name("alerts.jsonl")
    events = Name("events.jsonl")
    phases = Name("phases.jsonl")  # without training
    checkpoints = Name("checkpoints")
    lock = Name(".lock")
    track = Name("track.json")  # upload status of each tracker
    track_log = Name("track.log")
    track_lock = Name(".track.lock")  # a run has one tracker process at a time
    archive = Name("archive")  # results that reruns have replaced
    gpu_samples = Name("gpu_samples.bin")
    gpu_events = Name("gpu_events.jsonl")
    gpu_summary = Name("gpu_summary.json")
    gpu_stats = Name("gpu_stats_{}.json")
    gpu_stats_multi = Name("gpu_stats_{}_multi_gpu.json")
    profile = Name("profile.json")  # Chrome trace of some steps of rank 0

    @property
    def name(self) -> str:
        return self.path.name

    def earlier_gpu_samples(self) -> list[Path]:
        """Return the recordings of earlier attempts on other devices, oldest first."""
        numbers = [int(found[1]) for name in names(self.path) if (found := EARLIER_SAMPLES.fullmatch(name))]
        return [self.path / f"gpu_samples.{number}.bin" for number in sorted(numbers)]

    def rank(self, rank: int) -> Path:
        """Return the folder of one rank."""
        return self.path / "ranks" / str(rank)

    def timings(self, rank: int) -> Path:
        """Return the file of a rank's step times."""
        return self.rank(rank) / "timings.jsonl"

    def later_nodes(self) -> dict[int, RunDir]:
        """Return the nodes after node 0 that have files, by number: the folder of the recording of each."""
        found = {name.partition(".")[0] for name in names(self.path / "nodes")}
        numbers = sorted(int(name) for name in found if name.isascii() and name.isdecimal())
        return {number: RunDir(self.path / "nodes" / str(number)) for number in numbers}


@dataclass(frozen=True)
class MatrixDir:
    """The directory of a matrix, with the path of every file in it."""

    path: Path

    matrix_json = Name("matrix.json")
    config = Name("config.txt")
    lock = Name(".lock")
    runner_log = Name("runner.log")
    all_results = Name("all_results.json")
    summary = Name("summary_report.txt")
    results = Name("results.json")
    results_csv = Name("results.csv")
    junit = Name("junit.xml")
    report_md = Name("report.md")
    page = Name("report.html")
    graphs = Name("graphs")
    tensorboard = Name("tb")  # with a folder per run

    @property
    def name(self) -> str:
        return self.path.name

    def run(self, name: str) -> RunDir:
        return RunDir(self.path / name)

    def runs(self) -> list[RunDir]:
        """Return the folders of all runs, in their order; one that nobody took has none yet. Raises RecordError."""
        return [self.run(run.name) for run in decode(self.matrix_json, _Plan).runs]


class _PlannedRun(Record, frozen=True, kw_only=True):
    name: RunName


class _Plan(Record, frozen=True, kw_only=True):  # `kmatrix.records.matrix` has all of it
    runs: tuple[_PlannedRun, ...] = ()


def below_root(text: str) -> Path:
    """Return a folder that a user named: relative ones start at the project's root."""
    return ROOT / Path(text).expanduser()


def matrix_dirs(results_dir: Path) -> list[MatrixDir]:
    """Return all matrices in the results folder, newest last. Raises OSError if it exists and cannot be read."""
    found = [name for name in names(results_dir) if name.startswith(MATRIX_PREFIX) and (results_dir / name).is_dir()]
    return [MatrixDir(results_dir / name) for name in sorted(found, key=_age)]


def next_path(results_dir: Path, now: float) -> Path:
    """Return the path of a new matrix: date and time, and after the newest one even if the clock was set back."""
    there = [name.removeprefix(".").removesuffix(STAGED) for name in names(results_dir)]
    newest, number, _, _ = max((_age(name) for name in there), default=("", 0, False, ""))
    at = time.strftime(STAMP_FORMAT, time.localtime(now))
    return results_dir / (f"{MATRIX_PREFIX}{at}" if newest < at else f"{MATRIX_PREFIX}{newest}_{number + 1}")


def _age(name: str) -> tuple[str, int, bool, str]:
    """Return the key that orders matrices by the time in their names; a copy (.bak) is before its original."""
    found = STAMP.fullmatch(name)
    at, number, more = found.groups() if found else ("", "", "")
    return at or "", int(number or 1), not more, name


def find_matrix(results_dir: Path, target: str | None, argument: str = "TARGET") -> MatrixDir:
    """Return the matrix named by TARGET (or `argument`): a path or a name, else the newest one. Raises RecordError."""
    there = [matrix for matrix in matrix_dirs(results_dir) if is_matrix(matrix)]
    if target:
        for path in (Path(target).expanduser(), results_dir / target):
            if is_matrix(MatrixDir(path)):
                return MatrixDir(path.resolve())
        newest = ", ".join(matrix.name for matrix in there[:-6:-1])  # five at most
        raise RecordError(
            f"{argument}={target} is not a matrix directory",
            why=f"newest of {len(there)} in {results_dir}: {newest}" if there else f"{results_dir} has no matrix",
            hint=f"pass {argument}=<one of these, or a path>" if there else "run `make test-matrix` to create one",
        )
    if there:
        return there[-1]
    hint = "run `make test-matrix`, or pass TARGET=<its directory>"
    raise RecordError(f"there is no matrix in {results_dir}", hint=hint)


def is_matrix(matrix: MatrixDir) -> bool:
    return matrix.matrix_json.is_file()


def program_path(root: Path = ROOT) -> str:
    """Return the PYTHONPATH for a program of a checkout."""
    return os.pathsep.join([str(root), str(root / "lib")])


def program_environment(root: Path = ROOT, /, **changes: str) -> dict[str, str]:
    """Return the environment for a program of a checkout on this machine: this one, with changes.

    PYTHONPATH begins with the checkout, so that a copied one always runs its own code; the user's has packages.
    """
    path = os.pathsep.join(filter(None, [program_path(root), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **changes, "PYTHONPATH": path}
