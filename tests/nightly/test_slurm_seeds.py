"""Adaptive seeds on a real Slurm: jobs submit the seeds that the verdict wants next; the losses are scripted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

import kmatrix.report.formats
import scripted_trainer
from clones import Clone, environment, make_clone
from factories import make_data
from fake_torchrun import install
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import read_run_file
from kmatrix.status.outcomes import Outcomes, adaptive_seeds
from kmatrix.status.status_file import recover_status
from kmatrix.verdict.family import Replay
from slurm_stage import SlurmStage
from story import complete_lines, load_json, matrices, only

pytestmark = pytest.mark.nightly

Losses = Mapping[str, Sequence[float]]  # optimizer -> loss of each seed

SCHEMA = Path(kmatrix.report.formats.__file__).parent / "results.schema.json"
FIRST = 1337  # the default of SEED
SETTINGS = (
    *("OPTIMIZER=adamw,muon", "NUM_GPUS=1", "MAX_ITERS=10", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "PREFLIGHT=n"),
    *("DATASET=shards", "BLOCK_SIZE=32", "EVAL_SAMPLES=10", "MATRIX_SEEDS_AUTO=y", "MATRIX_SEEDS_MAX=5"),
    *("CPU_THREADS=1", "REUSE=n"),
)
CLEAR = {"adamw": [3.30, 3.31, 3.29, 3.30, 3.31], "muon": [3.20, 3.2101, 3.1902, 3.2003, 3.2101]}
# The difference fits into 0.01 nats/token with all five seeds, and not with four.
TIE = {"adamw": [3.285, 3.271, 3.28, 3.279, 3.265], "muon": [3.287, 3.272, 3.29, 3.28, 3.264]}


@dataclass
class Story:
    """The cluster, with a clone of the project and scripted losses on its shared folder."""

    stage: SlurmStage
    clone: Clone
    path: str  # for PYTHONPATH
    data: Path

    def make(self, *words: str, status: int = 0) -> str:
        """Run make on the login node."""
        done = self.stage.login(
            ["make", "--no-print-directory", *words],
            cwd=self.clone.root,
            env=environment(PYTHONPATH=self.path),
            check=False,
        )
        assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def submit(self, name: str, losses: Losses, *words: str, engine: str = "slurm") -> MatrixDir:
        """Make a matrix. engine: local runs it on the login node, to its end."""
        results = self.stage.shared / name
        results.mkdir()
        (results / "script.json").write_text(json.dumps({"ends": losses, "first": FIRST}))
        self.make(
            "test-matrix",
            f"ENGINE={engine}",
            *SETTINGS,
            f"DATA_PATH={self.data}",
            f"RESULTS_DIR={results}",
            *(["SLURM_TIME=10m"] if engine == "slurm" else []),
            *words,
        )
        return MatrixDir(only(matrices(results)))

    def wait(self, matrix: MatrixDir, status: str = "finished") -> None:
        """Wait until the last job has written the report."""

        def ended() -> bool:
            return matrix.status.exists() and load_json(matrix.status)["status"] == status and matrix.summary.exists()

        try:
            self.stage.wait(ended, f"{matrix.path} {status}")
        except AssertionError as error:
            logs = [path.read_text(errors="replace")[-2000:] for path in sorted(matrix.path.rglob("slurm.log"))]
            raise AssertionError("\n".join([str(error), *logs])) from None


def run_of(optimizer: str, number: int) -> str:
    """Return the name of a run. number: of its seed, from 1."""
    return f"gpt2_{optimizer}_seed{FIRST + number - 1}_1cpu"


def starts(matrix: MatrixDir) -> list[tuple[str, int]]:
    path = matrix.path.parent / "starts.jsonl"
    return [(line["run"], line["attempt"]) for line in complete_lines(path)] if path.exists() else []


def jobs_of(matrix: MatrixDir) -> list[str]:
    """Return the jobs that were submitted, each once, in their order."""
    lines = complete_lines(matrix.path / "jobs" / "jobs.jsonl")
    return list(dict.fromkeys(line["job"] for line in lines if line["event"] == "submitted"))


def log_of(matrix: MatrixDir) -> str:
    return "".join(path.read_text() for path in sorted(matrix.path.rglob("slurm.log")))


def verdict_of(matrix: MatrixDir) -> tuple[Replay, frozenset[str]]:
    """Return the replay of the only family, and the runs that it wants."""
    records = {run.name: read_run_file(run) for run in matrix.runs()}
    seeds = adaptive_seeds(matrix, records)
    assert seeds is not None
    states = {run.name: recover_status(run, has_runner=False) for run in matrix.runs()}
    wanted = seeds.wanted(Outcomes(matrix, records).ends(states))
    (replay,) = seeds.replays
    return replay, wanted


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with SlurmStage(nodes=2, gpus=0, caches={"login": 10}, installed=[Path(sys.prefix)], requeue_delay=5) as stage:
        clone = make_clone(stage.shared / "kmatrix")
        data = stage.shared / "data"
        make_data(data)
        made = Story(stage, clone, install(stage.shared / "python", scripted_trainer.__file__), data)
        made.make("defconfig-gpt2-cpu-quick")
        yield made


def test_rounds_end_as_on_one_machine(story):
    clear = story.submit("clear", CLEAR)
    tie = story.submit("tie", TIE, "MATRIX_MIN_DIFFERENCE=0.01")
    here = story.submit("here", TIE, "MATRIX_MIN_DIFFERENCE=0.01", engine="local")
    # The job that has submitted the second round starts again, while the later rounds run.
    _, last = jobs_of(tie)[:2]
    story.stage.wait(lambda: story.stage.job_state(last) == "COMPLETED", "the first round is over")
    story.stage.login(["scontrol", "requeue", last])
    story.wait(clear)
    # A clear difference needs the first seeds alone: one array, and the last job.
    assert len(jobs_of(clear)) == 2
    assert sorted(starts(clear)) == sorted((run_of(one, n), 1) for n in (1, 2, 3) for one in CLEAR)
    assert "looked after 3 seeds: muon better than adamw" in log_of(clear)
    story.stage.wait(lambda: "queued" not in story.make("status", f"TARGET={clear.path}"), "the last job has ended")
    status = story.make("status", f"TARGET={clear.path}")
    assert "finished, 6 finished, 4 in reserve" in status
    assert "verdict looked after 3 seeds: muon better than adamw" in status
    assert "nothing submitted" in story.make("continue", f"TARGET={clear.path}")
    # A tie needs all of them: three rounds.
    story.wait(tie)
    log = JobsDir(tie).submission(2).share(0).log
    story.stage.wait(lambda: log.read_text().count("its own last job writes the report") == 2, "its second start")
    assert len(jobs_of(tie)) == 6
    assert verdict_of(tie) == verdict_of(here)
    assert verdict_of(tie)[0].rounds == (3, 4, 5)
    assert sorted(starts(tie)) == sorted(starts(here))
    jsonschema.validate(load_json(tie.results), load_json(SCHEMA))
