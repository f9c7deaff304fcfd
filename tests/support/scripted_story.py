"""Matrices of a clone whose trainer is scripted: all is real but the training."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import scripted_trainer
from clones import Clone
from factories import make_data
from kmatrix.records.attempts import read_all
from kmatrix.records.paths import MatrixDir
from story import complete_lines, kill, matrices, processes_below
from waiting import wait_until

FIRST = 1337  # the default of SEED
SETTINGS = (
    *("OPTIMIZER=adamw,muon", "NUM_GPUS=1", "MAX_ITERS=10", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "PREFLIGHT=n"),
    *("DATASET=shards", "BLOCK_SIZE=32", "EVAL_SAMPLES=10", "CPU_THREADS=1"),
)


class ScriptedStory:
    """Matrices with scripted ends in one results folder.

    background: starts a command of the clone, and kills it after the test.
    """

    def __init__(self, clone: Clone, folder: Path, background: Callable[..., subprocess.Popen[bytes]]) -> None:
        self.clone, self.results, self._background = clone, folder / "results", background
        self.results.mkdir(parents=True)
        shutil.copy(scripted_trainer.__file__, clone.root / "gpt2/train.py")
        self.data = folder / "data"
        make_data(self.data)
        clone.check("defconfig-gpt2-cpu-quick")

    def script(self, ends: Mapping[str, Sequence[float | str]]) -> None:
        (self.results / "script.json").write_text(json.dumps({"ends": ends, "first": FIRST}))

    def hold(self, number: int = 1) -> None:
        """Let this start of a run, and those after it, wait in the middle of their steps."""
        (self.results / ".hold").write_text(str(number))
        (self.results / ".hold").replace(self.results / "hold")

    def let_go(self) -> None:
        (self.results / "hold").unlink(missing_ok=True)

    def words(self, *more: str) -> list[str]:
        """Return the words of a matrix; those that are given replace others."""
        given = {word.partition("=")[0] for word in more}
        places = (f"DATA_PATH={self.data}", f"RESULTS_DIR={self.results}")
        return [word for word in (*SETTINGS, *places) if word.partition("=")[0] not in given] + list(more)

    def make(self, *arguments: str, status: int = 0, **variables: str) -> str:
        done = self.clone.make(*arguments, **variables)
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        assert "Traceback" not in done.stderr
        return done.stdout if not status else done.stdout + done.stderr

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command in the background."""
        return self._background(*arguments, **variables)

    def matrix(self, ends: Mapping[str, Sequence[float | str]], *more: str, status: int = 0) -> tuple[MatrixDir, str]:
        """Run a matrix, and return it with what was printed."""
        self.script(ends)
        printed = self.make("test-matrix", *self.words(*more), status=status)
        return self.newest(), printed

    def newest(self) -> MatrixDir:
        return MatrixDir(wait_until(lambda: matrices(self.results), "a matrix is made")[-1])

    def starts(self, matrix: MatrixDir) -> list[tuple[str, int]]:
        """Return run and attempt of all starts."""
        lines = complete_lines(self.results / "starts.jsonl")
        return [(line["run"], line["attempt"]) for line in lines if line["matrix"] == matrix.name]

    def wait_for_start(self, number: int) -> None:
        """Wait until the start with this number, from 1, waits in the middle of its steps."""

        def is_held() -> bool:
            lines = complete_lines(self.results / "starts.jsonl")
            if len(lines) < number:
                return False
            line = lines[number - 1]
            logged = complete_lines(self.results / line["matrix"] / line["run"] / "metrics.jsonl")
            return any(
                one["attempt"] == line["attempt"] and one["step"] >= scripted_trainer.MIDDLE - 1 for one in logged
            )

        wait_until(is_held, f"start {number} trains")

    def statuses(self, matrix: MatrixDir) -> dict[str, str]:
        view = json.loads(self.clone.kmatrix("status", f"TARGET={matrix.path}", "JSON=1").stdout)
        return {run["name"]: run["status"] for run in view["runs"]}


def kinds(run: Path) -> list[str]:
    """Return how the attempts of a run ended."""
    return [one.end.kind if one.end else "" for one in read_all(run)]


@pytest.fixture
def story(clone: Clone, tmp_path: Path, background: Callable[..., Any]) -> Iterator[ScriptedStory]:
    yield ScriptedStory(clone, tmp_path, background)
    kill(processes_below(tmp_path))


def run_of(optimizer: str, number: int) -> str:
    """Return the name of a run. number: of its seed, from 1."""
    return f"gpt2_{optimizer}_seed{FIRST + number - 1}_1cpu"
