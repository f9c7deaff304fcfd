"""Matrices that are submitted to a real Slurm through make, and what becomes of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clones import Clone, environment
from held_training import HeldTraining
from kmatrix.records.attempts import Attempt
from kmatrix.status.fold import State, end_of
from kmatrix.status.look import look
from slurm_stage import SlurmStage
from story import complete_lines, matrices, only

TINY = {
    **{"DEVICE": "cpu", "MODEL": "custom", "N_LAYER": "2", "N_HEAD": "2", "N_EMBD": "32", "BLOCK_SIZE": "32"},
    **{"BATCH_SIZE": "2", "GLOBAL_BATCH": "8", "EVAL_SAMPLES": "8", "EVAL_INTERVAL": "20", "LOG_INTERVAL": "1"},
    **{"MAX_ITERS": "40", "REUSE": "n", "OPTIMIZER": "adamw", "NUM_GPUS": "1", "CPU_THREADS": "1", "GPU_MONITOR": "n"},
    "STALL_FACTOR": "0",  # steps that wait do not hang,
}
# Seven steps, and then none until the story frees them. A further attempt, which starts at a checkpoint, is not held.
PAUSE = "steps >= 8 and step - steps < 2"


def tiny(*words: str) -> list[str]:
    """Return the words of a tiny matrix, with these instead of its own."""
    return [f"{name}={text}" for name, text in (TINY | dict(word.split("=", 1) for word in words)).items()]


def on_nodes(*names: str) -> str:
    return f"SLURM_EXTRA_FLAGS=--nodelist={','.join(names)}"


@dataclass
class Story:
    """A matrix that was submitted."""

    cluster: Cluster
    results: Path
    output: str = ""  # of the command that submitted it
    slow: HeldTraining | None = None

    @property
    def matrix(self) -> Path:
        return only(matrices(self.results))

    @property
    def runs(self) -> list[Path]:
        return [self.matrix / name for name in self.states()]

    @property
    def run(self) -> Path:
        return only(self.runs)

    def states(self) -> dict[str, State]:
        return dict(look(self.matrix).states)

    def statuses(self) -> set[str]:
        return {str(state.status) for state in self.states().values()}

    def attempts(self) -> tuple[Attempt, ...]:
        return only(self.states().values()).attempts

    def kinds(self) -> list[str]:
        return [end_of(one).kind for one in self.attempts()]

    def steps(self, run: Path | None = None) -> list[int]:
        """Return the steps that were logged, in the order of the log."""
        lines = complete_lines((run or self.run) / "metrics.jsonl")
        return [line["step"] for line in lines if "train/loss" in line]

    def submissions(self) -> list[str]:
        """Return the numbers of the submissions of runs."""
        return sorted(path.parent.name for path in (self.matrix / "jobs").glob("*/runs") if path.read_text())

    def jobs(self) -> list[str]:
        """Return the ids of its jobs that wait or run."""
        name = re.search(r"--job-name=(\S+)-\d+", next(self.matrix.glob("jobs/*/job.sbatch")).read_text())
        assert name is not None
        return [job for job, of in self.cluster.stage.squeue("%i|%j") if of.startswith(name[1])]

    def make(self, command: str, *words: str, status: int = 0) -> str:
        """Run a command on the matrix, on the login node; return its output."""
        return self.cluster.make(command, f"TARGET={self.matrix}", *words, status=status).stdout

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 400.0) -> None:
        def tried() -> object:
            try:
                return condition()
            except (OSError, ValueError, KeyError, IndexError):  # files that are not there yet
                return False

        try:
            self.cluster.stage.wait(tried, what, seconds)
        except AssertionError as error:
            logs = [path.read_text(errors="replace")[-3000:] for path in sorted(self.results.rglob("jobs/*/*.log"))]
            raise AssertionError("\n".join([str(error), str(self.states())[-4000:], *logs])) from None

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: all(max(self.steps(run)) >= step for run in self.runs), f"step {step} in {self.results.name}")

    def wait_finished(self) -> None:
        self.wait(lambda: self.statuses() == {"finished"}, f"{self.results.name} finished")

    def wait_for_ends(self) -> None:
        self.wait(lambda: not self.jobs(), "its jobs have ended")

    def free(self) -> None:
        assert self.slow is not None
        self.slow.free()

    def check_steps(self) -> None:
        """Check that no step was trained twice, and none left out."""
        for run in self.runs:
            assert self.steps(run) == list(range(40)), run.name


@dataclass
class Cluster:
    """The Slurm, and a clone of the project on its shared folder."""

    stage: SlurmStage
    clone: Clone
    stories: dict[str, Story] = field(default_factory=dict)

    def make(self, *words: str, status: int | None = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run make on the login node, as a user does after logging in."""
        command = ["make", "--no-print-directory", *words]
        done = self.stage.login(command, cwd=self.clone.root, env=environment(**variables), check=False)
        assert status is None or done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def submit(self, name: str, *words: str, steps: str | None = None) -> Story:
        """Submit a matrix. steps: which of its steps are held."""
        slow = HeldTraining(self.stage.folder / f"control_{name}", steps) if steps else None
        results, variables = self.clone.root / "results" / name, slow.environment if slow else {}
        done = self.make("test-matrix", "ENGINE=slurm", f"RESULTS_DIR={results}", *tiny(*words), **variables)
        self.stories[name] = Story(self, results, done.stdout, slow)
        return self.stories[name]
