"""The names of all files of a matrix and of a run, and the search for a matrix."""

from __future__ import annotations

import fcntl
import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import kmatrix
from kmatrix.errors import RecordError, SchemaError, note_damage
from kmatrix.own_file import open_to_read
from kmatrix.records.decode import Record, RunName, UnixTime, decode_gzip_lines, decode_optional

ROOT = kmatrix.ROOT
RUN_JSON = "run.json"
MATRIX_PREFIX = "test_matrix_results_"
STAGED = ".new"  # suffix of a matrix or a run that is being made
EARLIER_SAMPLES = re.compile(r"gpu_samples\.([1-9][0-9]{0,8})\.bin", re.ASCII)
STAMP_FORMAT = "%Y%m%d_%H%M%S"  # of the name of a matrix, in local time
STAMP = re.compile(re.escape(MATRIX_PREFIX) + r"(?P<at>\d{8}_\d{6})(?:_(?P<number>\d{1,9}))?(?P<more>\D.*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run, with the path of every file in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_json(self) -> Path:
        return self.path / RUN_JSON

    @property
    def config(self) -> Path:
        return self.path / ".config"

    @property
    def defconfig(self) -> Path:
        return self.path / "defconfig"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def output_log(self) -> Path:
        return self.path / "output.log"

    @property
    def run_used(self) -> Path:
        return self.path / "run_used.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        """Return the file of the thinned curves: kmatrix.curves.file."""
        return self.path / "curves.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def phases(self) -> Path:
        """Return the file of the phases without training: phase, step, begin, end (Unix seconds)."""
        return self.path / "phases.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def track(self) -> Path:
        """Return the file of the upload status of each tracker."""
        return self.path / "track.json"

    @property
    def track_log(self) -> Path:
        """Return the log of the tracker process."""
        return self.path / "track.log"

    @property
    def track_lock(self) -> Path:
        """Return the lock of the tracker process; a run has one at a time."""
        return self.path / ".track.lock"

    @property
    def archive(self) -> Path:
        """The directory of archived results, replaced by reruns: 1, 2, ..."""
        return self.path / "archive"

    @property
    def gpu_stats(self) -> Path:
        return self.path / f"gpu_stats_{self.name}.json"

    @property
    def gpu_stats_multi(self) -> Path:
        return self.path / f"gpu_stats_{self.name}_multi_gpu.json"

    @property
    def gpu_samples(self) -> Path:
        return self.path / "gpu_samples.bin"

    def earlier_gpu_samples(self) -> list[Path]:
        """Return the recordings of earlier attempts on other devices, oldest first."""
        # Listed: a glob takes ten times as long, and a matrix has thousands of runs.
        numbers = [int(found[1]) for name in _names_in(self.path) if (found := EARLIER_SAMPLES.fullmatch(name))]
        return [self.path / f"gpu_samples.{number}.bin" for number in sorted(numbers)]

    @property
    def gpu_events(self) -> Path:
        return self.path / "gpu_events.jsonl"

    @property
    def gpu_summary(self) -> Path:
        return self.path / "gpu_summary.json"

    def gpu_metrics(self, started: datetime) -> Path:
        """Return the file of an export of all samples."""
        return self.path / f"gpu_metrics_{started:%Y%m%d_%H%M%S}.csv"

    def rank(self, rank: int) -> Path:
        """Return the folder of one rank."""
        return self.path / "ranks" / str(rank)

    def rank_states(self) -> list[Path]:
        """Return the state files of the ranks, in no particular order."""
        # Listed, not looked for by name: on network storage, a new name may be unknown after a failed look.
        return [self.path / "ranks" / name / "state.json" for name in _names_in(self.path / "ranks")]

    def timings(self, rank: int) -> Path:
        """Return the file of a rank's step times: step, steps, compute_ms, step_ms (means since the previous line)."""
        return self.rank(rank) / "timings.jsonl"

    def rank_state(self, rank: int) -> Path:
        """Return the file of a rank's newest state: where it is, and why it failed."""
        return self.rank(rank) / "state.json"

    def rank_stacks(self, rank: int, attempt: int) -> Path:
        """Return the file of the stacks of a rank's threads, written when it hung in an attempt."""
        return self.rank(rank) / f"stacks_{attempt}.txt"

    @property
    def profile(self) -> Path:
        """Return the Chrome trace of some steps of rank 0."""
        return self.path / "profile.json"


@dataclass(frozen=True, slots=True)
class MatrixDir:
    """The directory of a matrix, with the path of every file in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def is_mine(self) -> bool:
        """Return whether the directory belongs to this user: only then commands and scripts that it names are run."""
        return self.path.stat().st_uid == os.getuid()

    @property
    def matrix_json(self) -> Path:
        return self.path / "matrix.json"

    @property
    def plan(self) -> Path:
        """Return the file that each run directory is made from: kmatrix.records.plan."""
        return self.path / "plan.jsonl.gz"

    @property
    def rerun(self) -> Path:
        """Return the file that names the runs of a rerun until their results are archived."""
        return self.path / "rerun.json"

    @property
    def requests(self) -> Path:
        """Return the file of the runs that the user has held: kmatrix.records.states."""
        return self.path / "requests.json"

    @property
    def requests_lock(self) -> Path:
        return self.path / ".requests.lock"

    @property
    def config(self) -> Path:
        return self.path / "config.txt"

    @property
    def patch(self) -> Path:
        """Return the patch of uncommitted changes when the matrix was made; missing if there were none."""
        return self.path / "code.patch"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def runner_log(self) -> Path:
        """Return the log of a runner in the background."""
        return self.path / "runner.log"

    @property
    def all_results(self) -> Path:
        return self.path / "all_results.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary_report.txt"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def results_csv(self) -> Path:
        return self.path / "results.csv"

    @property
    def junit(self) -> Path:
        return self.path / "junit.xml"

    @property
    def report_md(self) -> Path:
        return self.path / "report.md"

    @property
    def page(self) -> Path:
        return self.path / "report.html"

    @property
    def graphs(self) -> Path:
        return self.path / "graphs"

    @property
    def tensorboard(self) -> Path:
        """Return the log directory of TensorBoard, with a folder per run."""
        return self.path / "tb"

    def is_held(self) -> bool:
        """Return whether a runner has this matrix now. The kernel releases its lock when it exits or is killed."""
        try:
            with open_to_read(self.lock) as file:
                # Shared, so that two commands that ask at the same time do not take each other for a runner.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # no lock file, or a file system without locks
        return False

    def run(self, name: str) -> RunDir:
        return RunDir(self.path / name)

    def runs(self) -> list[RunDir]:
        """Return the folders with a run.json, in the order of matrix.json, then by name."""
        # A folder with a run.json is a run even if matrix.json was lost or never listed it.
        there, order = self._present(), self._listed()
        return [self.run(name) for name in [*(name for name in order if name in there), *sorted(there - set(order))]]

    def all_runs(self) -> list[RunDir]:
        """Return the folders of all runs, also those without a run.json: in the order of matrix.json, then by name."""
        return [self.run(name) for name in dict.fromkeys([*self._listed(), *sorted(self._present())])]

    def missing(self) -> list[str]:
        """Return the runs that matrix.json or the plan lists and that have no run.json: deleted, or not made yet."""
        there = self._present()
        return [name for name in self._listed() if name not in there]

    def _present(self) -> set[str]:
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries]
        except FileNotFoundError:
            return set()
        # A run that is being made has a hidden name. An empty run.json was not flushed before a power failure.
        folder = str(self.path)
        return {name for name in names if name[0] != "." and _size(f"{folder}/{name}/{RUN_JSON}")}

    def _listed(self) -> list[str]:
        """Return the names in matrix.json; in the plan, if matrix.json is missing or damaged."""
        plan = decode_optional(self.matrix_json, _Plan)
        if plan is None:
            return list(_names_of_plan(self.plan))
        return list(dict.fromkeys(run.name for run in plan.runs))


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder, none if there is no such folder."""
    try:
        return os.listdir(folder)  # noqa: PTH208  (names alone)
    except OSError:
        return []


def _size(path: str) -> int:
    """Return the size of a file in bytes, 0 if it is missing."""
    try:
        return os.stat(path).st_size  # noqa: PTH116  (a text: a matrix has thousands of runs, and paths take time)
    except OSError:
        return 0


MOST_BYTES = 1 << 24  # of a line of a plan


def _names_of_plan(path: Path) -> tuple[str, ...]:
    """Return the names of the runs in a plan; none if it is missing, or damaged, which is noted."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    try:
        return _read_names(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    except SchemaError:
        raise
    except RecordError as error:
        note_damage(path, error.why)
        return ()


@lru_cache(maxsize=8)
def _read_names(path: Path, *_version: int) -> tuple[str, ...]:
    """Read the names in a plan. _version: changes with the file, which has the texts of thousands of runs."""
    return tuple(dict.fromkeys(line.name for line in decode_gzip_lines(path, _PlannedRun, MOST_BYTES)))


class _PlannedRun(Record, frozen=True, kw_only=True):
    name: RunName


class _Created(Record, frozen=True, kw_only=True):
    """The time of matrix.json."""

    created: UnixTime | None = None


class _Plan(Record, frozen=True, kw_only=True):
    """The names in matrix.json; `kmatrix.records.runs` has all of it."""

    runs: tuple[_PlannedRun, ...] = ()


def below_root(text: str) -> Path:
    """Return a folder of the configuration or of the command line: relative ones start at the project's root."""
    return ROOT / Path(text).expanduser()


def matrix_dirs(results_dir: Path) -> list[MatrixDir]:
    """Return all matrices in the results folder, newest last. Raises OSError if it exists and cannot be read."""
    # Not glob, which shows a folder without permission as empty: "there is no matrix" would not be true.
    try:
        there = [path for path in results_dir.iterdir() if path.name.startswith(MATRIX_PREFIX)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    # The names contain the date and the time, and `next_path` makes their order that of creation; _10 follows _9.
    found = [path for path in there if path.is_dir()]
    return [MatrixDir(path) for path in sorted(found, key=_by_age)]


def staged_dir(path: Path) -> Path:
    """Return the hidden directory in which a matrix directory is prepared."""
    return path.with_name(f".{path.name}{STAGED}")


def made_path(staged: Path) -> Path:
    """Return the directory that a matrix will have, from the one in which it is prepared; another path as it is."""
    if not staged.name.startswith(".") or not staged.name.endswith(STAGED):
        return staged
    return staged.with_name(staged.name[1 : -len(STAGED)])


def next_path(results_dir: Path, now: float) -> Path:
    """Return the path of a new matrix: date and time, and after the newest one even if the clock was set back.

    now: Unix seconds. Another process may take the path at the same time.
    """
    names = [made_path(path).name for path in results_dir.glob(f".{MATRIX_PREFIX}*{STAGED}")]
    names += [path.name for path in results_dir.glob(MATRIX_PREFIX + "*")]
    known = [found for found in map(STAMP.fullmatch, names) if found and not found["more"] and _is_date(found["at"])]
    newest = max(known, key=lambda found: (found["at"], int(found["number"] or 1)), default=None)
    at = time.strftime(STAMP_FORMAT, time.localtime(now))
    if newest is None or newest["at"] < at:
        return results_dir / f"{MATRIX_PREFIX}{at}"
    return results_dir / f"{MATRIX_PREFIX}{newest['at']}_{int(newest['number'] or 1) + 1}"


def is_in_the_future(path: Path, now: float) -> bool:
    """Return whether the name of a matrix has a later time than now (Unix seconds)."""
    found = STAMP.fullmatch(path.name)
    return found is not None and found["at"] > time.strftime(STAMP_FORMAT, time.localtime(now))


def _is_date(text: str) -> bool:
    try:
        datetime.strptime(text, STAMP_FORMAT)
    except ValueError:
        return False
    return True


def _by_age(path: Path) -> tuple[str, int, bool, str]:
    """Return the key that orders matrices by the time of their creation."""
    found = STAMP.fullmatch(path.name)
    if found is None or not _is_date(found["at"]):  # the user's own name
        about = decode_optional(MatrixDir(path).matrix_json, _Created) or _Created()
        at = path.stat().st_mtime if about.created is None else about.created
        return time.strftime(STAMP_FORMAT, time.localtime(at)), 0, False, path.name
    # A copy with a suffix, such as _copy or .bak, is not newer than its original.
    return found["at"], int(found["number"] or 1), not found["more"], path.name


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
            why=f"no folder {MATRIX_PREFIX}* has a matrix.json or a run",
            hint="run `make test-matrix` to create one, or pass TARGET=<matrix directory>",
        )
    return there[-1]


def is_matrix(matrix: MatrixDir) -> bool:
    """Return whether a directory has a matrix.json, a plan or a run."""
    return matrix.matrix_json.is_file() or matrix.plan.is_file() or any(matrix.path.glob("[!.]*/run.json"))


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
