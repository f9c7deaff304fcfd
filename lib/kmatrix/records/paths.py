"""The names of all files of a matrix and of a run, and the search for a matrix."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
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
    """The path of a file with a fixed name, in a folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunDir | MatrixDir, _: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunDir:
    """The directory of one run, with the path of every file in it."""

    path: Path

    run_json = Name("run.json")
    config = Name(".config")
    output_log = Name("output.log")
    result = Name("result.json")
    metrics = Name("metrics.jsonl")
    curves = Name("curves.json")  # thinned: kmatrix.curves.file
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
    profile = Name("profile.json")  # Chrome trace of some steps of rank 0

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def gpu_stats(self) -> Path:
        return self.path / f"gpu_stats_{self.name}.json"

    @property
    def gpu_stats_multi(self) -> Path:
        return self.path / f"gpu_stats_{self.name}_multi_gpu.json"

    def earlier_gpu_samples(self) -> list[Path]:
        """Return the recordings of earlier attempts on other devices, oldest first."""
        numbers = [int(found[1]) for name in names(self.path) if (found := EARLIER_SAMPLES.fullmatch(name))]
        return [self.path / f"gpu_samples.{number}.bin" for number in sorted(numbers)]

    def gpu_metrics(self, started: datetime) -> Path:
        """Return the file of an export of all samples."""
        return self.path / f"gpu_metrics_{started:%Y%m%d_%H%M%S}.csv"

    def rank(self, rank: int) -> Path:
        """Return the folder of one rank."""
        return self.path / "ranks" / str(rank)

    def rank_states(self) -> list[Path]:
        """Return the state files of the ranks, in no particular order."""
        return [self.path / "ranks" / name / "state.json" for name in names(self.path / "ranks")]

    def timings(self, rank: int) -> Path:
        """Return the file of a rank's step times: step, steps, compute_ms, step_ms (means since the previous line)."""
        return self.rank(rank) / "timings.jsonl"

    def rank_state(self, rank: int) -> Path:
        """Return the file of a rank's newest state: where it is, and why it failed."""
        return self.rank(rank) / "state.json"

    def rank_stacks(self, rank: int, attempt: int) -> Path:
        """Return the file of the stacks of a rank's threads, written when it hung in an attempt."""
        return self.rank(rank) / f"stacks_{attempt}.txt"

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


class _Plan(Record, frozen=True, kw_only=True):
    """The names in matrix.json; `kmatrix.records.matrix` has all of it."""

    runs: tuple[_PlannedRun, ...] = ()


def below_root(text: str) -> Path:
    """Return a folder of the configuration or of the command line: relative ones start at the project's root."""
    return ROOT / Path(text).expanduser()


def matrix_dirs(results_dir: Path) -> list[MatrixDir]:
    """Return all matrices in the results folder, newest last. Raises OSError if it exists and cannot be read."""
    # Not glob, which shows a folder without permission as empty: "there is no matrix" would not be true.
    found = [name for name in names(results_dir) if name.startswith(MATRIX_PREFIX) and (results_dir / name).is_dir()]
    return [MatrixDir(results_dir / name) for name in sorted(found, key=_age)]


def staged_dir(path: Path) -> Path:
    """Return the hidden directory in which a matrix directory is prepared."""
    return path.with_name(f".{path.name}{STAGED}")


def next_path(results_dir: Path, now: float) -> Path:
    """Return the path of a new matrix: date and time, and after the newest one even if the clock was set back.

    now: Unix seconds. Another process may take the path at the same time.
    """
    there = [name.removeprefix(".").removesuffix(STAGED) for name in names(results_dir)]
    newest, number, _, _ = max((_age(name) for name in there), default=("", 0, False, ""))
    at = time.strftime(STAMP_FORMAT, time.localtime(now))
    return results_dir / (f"{MATRIX_PREFIX}{at}" if newest < at else f"{MATRIX_PREFIX}{newest}_{number + 1}")


def _age(name: str) -> tuple[str, int, bool, str]:
    """Return the key that orders matrices by the time in their names; _10 follows _9. Other names are the oldest."""
    found = STAMP.fullmatch(name)
    at, number, more = found.groups() if found else ("", "", "")
    # A copy with a suffix, such as _copy or .bak, is not newer than its original.
    return at or "", int(number or 1), not more, name


def find_matrix(results_dir: Path, target: str | None, argument: str = "TARGET") -> MatrixDir:
    """Return the matrix named by TARGET: a path or a name in the results folder; by default the newest.

    argument: name of the argument in error messages. Raises RecordError if there is no such matrix.
    """
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
    if not there:
        raise RecordError(
            f"there is no matrix in {results_dir}",
            why=f"no folder {MATRIX_PREFIX}* has a matrix.json",
            hint="run `make test-matrix` to create one, or pass TARGET=<matrix directory>",
        )
    return there[-1]


def is_matrix(matrix: MatrixDir) -> bool:
    """Return whether a directory is a matrix."""
    return matrix.matrix_json.is_file()


def program_path(root: Path = ROOT) -> str:
    """Return the PYTHONPATH for a program of a checkout."""
    return os.pathsep.join([str(root), str(root / "lib")])


def program_environment(root: Path = ROOT, /, **changes: str) -> dict[str, str]:
    """Return the environment for a program of a checkout: this one with changes, and the checkout on PYTHONPATH."""
    return {**os.environ, **changes, "PYTHONPATH": extended_path(root)}


def extended_path(root: Path = ROOT) -> str:
    """Return the PYTHONPATH for a program of a checkout on this machine: the checkout, then the user's own.

    In this order a copied checkout always runs its own code; the user's has packages, as modules of clusters set it.
    """
    return os.pathsep.join(filter(None, [program_path(root), os.environ.get("PYTHONPATH")]))
