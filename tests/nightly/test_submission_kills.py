"""Kill whoever submits jobs to a cluster, at any time, and repeat the command: each run has exactly one job."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest

import kmatrix.cli.commands as cli
from factories import make_data
from fake_slurm import LIVE, FakeSlurm
from kmatrix.records.jobs.files import REPORT, SubmissionFile, read_engine, read_submission
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir

pytestmark = pytest.mark.nightly

KILLS = int(os.environ.get("KMATRIX_KILLS", "2"))  # of each command
SEED = int(os.environ.get("KMATRIX_SEED", "13"))
CHANGES = ("open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "subprocess.Popen")  # audit events
SETTLE_S = 0.0005  # most time from such an event to the kill
RUNS = 6
ENDED = 2  # jobs before `continue`
WORDS = (
    *("ENGINE=slurm", "DEVICE=cpu", "MODEL=tiny", "NUM_GPUS=1", "OPTIMIZER=adamw,sgd", "SEED=1,2,3"),
    *("GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "MAX_ITERS=30", "DATASET=shards", "BLOCK_SIZE=32", "EVAL_SAMPLES=10"),
    *("CPU_THREADS=1", "SLURM_TIME=10m"),
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A fake Slurm, a results directory and the data of the runs."""

    folder: Path
    slurm: FakeSlurm

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def places(self) -> list[str]:
        return [f"RESULTS_DIR={self.results}", f"KCONFIG_CONFIG={self.folder / '.config'}"]

    @property
    def test_matrix(self) -> list[str]:
        return ["test-matrix", *WORDS, f"DATA_PATH={self.folder.parent / 'data'}", *self.places]

    @property
    def again(self) -> list[str]:
        return ["continue", *self.places]

    def matrices(self) -> list[MatrixDir]:
        return [MatrixDir(path) for path in sorted(self.results.glob("test_matrix_results_*"))]

    def live(self) -> Counter[str]:
        """Return run, or "the report" -> number of its jobs that wait or run.

        Of the reports, only those that wait for all jobs count: an older one leaves the work to the last.
        """
        found: Counter[str] = Counter()
        for matrix in self.matrices():
            engine, submissions = read_engine(matrix), dict[int, SubmissionFile]()
            for folder in JobsDir(matrix).submissions():
                submissions[folder.number] = read_submission(folder) or SubmissionFile()
            assert engine is not None
            ours = [job for job in self.slurm.jobs() if f"-{engine.id}-" in job["comment"]]
            of_jobs = [(job, int(job["comment"].rpartition("-")[2])) for job in ours]
            newest = max((number for _, number in of_jobs if submissions[number].kind != REPORT), default=0)
            for job, number in of_jobs:
                if job["state"] in LIVE:
                    shares = [one for one in submissions[number].shares if job["task"] in (None, one.task)]
                    found.update(run for one in shares for run in one.runs)
                    found.update(["the report"] * (submissions[number].kind == REPORT and number > newest))
        return found

    def check_killed(self) -> None:
        """Fail if a run has two jobs."""
        assert max(self.live().values(), default=0) <= 1
        assert len(self.matrices()) <= 1

    def check_complete(self) -> None:
        """Fail unless there is one matrix, all of whose runs have one job, and one report."""
        (matrix,) = self.matrices()
        runs = [run.name for run in matrix.runs()]
        assert len(runs) == RUNS
        assert not matrix.missing()
        assert self.live() == dict.fromkeys([*runs, "the report"], 1)
        assert not list(JobsDir(matrix).path.glob(".submitter.json*"))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = new_cluster(tmp_path / "cluster")
    monkeypatch.setenv("PATH", made.slurm.path)
    return made


def new_cluster(folder: Path) -> Cluster:
    folder.mkdir()
    (folder / ".config").write_text("")
    data = folder.parent / "data"
    if not data.exists():
        make_data(data)
    return Cluster(folder, FakeSlurm(folder / "slurm"))


def renewed(cluster: Cluster, before: Path | None = None) -> None:
    """Make the cluster as it was: empty, or as in the copy `before`."""
    for name in ("results", "slurm/state.json"):
        place = cluster.folder / name
        if place.is_dir():
            shutil.rmtree(place)
        if before is not None and (before / name).is_dir():
            shutil.copytree(before / name, place)
        elif before is not None:
            shutil.copy2(before / name, place)


def begin(words: Sequence[str], output: Path, kill_at: int | None = None, later_s: float = 0.0) -> int:
    """Start a command in a process group of its own, and return its process.

    kill_at: number of the operation after which the kernel ends the process, `later_s` seconds later. None: it counts.
    """
    pid = os.fork()
    if not pid:
        _become(words, output, kill_at, later_s)
    return pid


def _become(words: Sequence[str], output: Path, kill_at: int | None, later_s: float) -> NoReturn:
    status = 70
    try:
        os.setsid()
        number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(number, 1)
        os.dup2(number, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        counted = _count_operations(sys.maxsize if kill_at is None else kill_at, later_s)
        status = cli.main(list(words))
        sys.stdout.flush()
        output.with_suffix(".count").write_text(str(counted[0]))
    finally:
        sys.stderr.flush()
        os._exit(status)


def _count_operations(kill_at: int, later_s: float) -> list[int]:
    """Count the operations of this process that change files or start programs, and let one of them end it."""
    counted = [0]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES and not (event == "open" and not _is_written(arguments)):
            if counted[0] == kill_at:
                signal.setitimer(signal.ITIMER_REAL, max(later_s, 1e-6))
            counted[0] += 1

    sys.addaudithook(look)
    return counted


def _is_written(arguments: tuple[object, ...]) -> bool:
    """Return whether a file is opened to be written. arguments: path, mode and flags of the audit event."""
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def end(pid: int, *, group: bool = True) -> int:
    """Wait for a process, and kill its group: sbatch, too. Return its exit status, negative after a signal."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if group:  # before its number can be that of another process
        kill_group(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def check(words: Sequence[str], output: Path) -> tuple[float, int]:
    """Run a command that must succeed, and return its time (s) and the number of its operations."""
    since = time.monotonic()
    code = end(begin(words, output))
    assert code == 0, output.read_text()
    return time.monotonic() - since, int(output.with_suffix(".count").read_text())


def kill_at_random(words: Sequence[str], output: Path, longest_s: float, chance: random.Random) -> None:
    """Start a command, and kill it after a random time, sometimes without its programs."""
    pid = begin(words, output)
    time.sleep(chance.uniform(0.0, longest_s))
    if chance.random() < 0.5:
        os.kill(pid, signal.SIGKILL)
        end(pid, group=False)
    else:
        kill_group(pid)
        end(pid)


def with_ended_jobs(cluster: Cluster, output: Path) -> Path:
    """Submit the matrix, let some of its jobs end, and return a copy of the cluster: `continue` submits these again."""
    check(cluster.test_matrix, output)
    jobs = [job["id"] for job in cluster.slurm.jobs() if job["array"]]
    for job in jobs[:ENDED]:
        cluster.slurm.start(job)
        cluster.slurm.end(job, "CANCELLED")
    before = cluster.folder.with_name("before")
    (before / "slurm").mkdir(parents=True)
    shutil.copytree(cluster.results, before / "results")
    shutil.copy2(cluster.folder / "slurm" / "state.json", before / "slurm")
    return before


@pytest.mark.parametrize("command", ["test-matrix", "continue"])
def test_a_submitter_killed_anywhere_and_repeated_gives_each_run_one_job(cluster, tmp_path, command):
    chance, output = random.Random(f"{SEED} {command}"), tmp_path / "output"
    before = with_ended_jobs(cluster, output) if command == "continue" else None
    words = cluster.test_matrix if command == "test-matrix" else cluster.again
    time_s, operations = check(words, output)
    for number, operation in enumerate(spread(operations, KILLS, chance)):
        renewed(cluster, before)
        if number % 2:
            kill_at_random(words, output, time_s, chance)
        else:
            end(begin(words, output, operation, chance.uniform(0.0, SETTLE_S)))
        cluster.check_killed()
        check(words, output)
        cluster.check_complete()


def spread(count: int, wanted: int, chance: random.Random) -> list[int]:
    """Return one random number of each of `wanted` equal parts of 0 to `count`; all of them if there are fewer."""
    if wanted >= count:
        return list(range(count))
    edges = [count * number // wanted for number in range(wanted + 1)]
    return [chance.randrange(low, high) for low, high in pairwise(edges)]
