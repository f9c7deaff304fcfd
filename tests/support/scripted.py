"""Matrices with adaptive seeds, and an engine whose runs end at once with scripted losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.loop import Outcome, drive
from kmatrix.runner.resume import reopen
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.state import JobPhase, JobState, RunPlan
from kmatrix.status.watch import RunProgress

FAIL, NAN, ABOVE = "fail", "nan", "above"  # a crash; a loss that is not a number; one above that of the first step
START_LOSS = 11.0
TRAIN = {"batch_size": 4, "max_iters": 3, "num_gpus": 1, "device": "cpu", "cpu_threads": 1, "data_path": "/data"}
MEASURED = {"data_sha256": "ab", "tokenizer": "byte", "block_size": 32, "eval_samples": 10}

Script = Mapping[str, Sequence[float | str]]  # configuration -> outcome of each seed, in order


def name_of(configuration: str, seed: int) -> str:
    return f"gpt2_{configuration}_seed{seed}_1cpu"


def adaptive_matrix(
    matrix: MatrixDir,
    configurations: Sequence[str],
    seeds: int = 6,
    *,
    train: Mapping[str, Mapping[str, Any]] | None = None,
    **rules: Any,
) -> MatrixDir:
    """Make a matrix with all seeds of these optimizers. train: further fields of "train" by configuration."""
    runs = []
    for seed in range(1, seeds + 1):
        for configuration in configurations:
            name = name_of(configuration, seed)
            axes = {"optimizer": configuration, "seed": str(seed)}
            own = (train or {}).get(configuration, {})
            fields = {**TRAIN, **MEASURED, "optimizer": configuration, "seed": seed, **own}
            record = {"run_id": f"id-{name}", "name": name, "axes": axes, "train": fields}
            write_json(matrix.run(name).run_json, record)
            runs.append({key: record[key] for key in ("name", "run_id", "axes")})
    numbers = list(range(1, seeds + 1))
    axes_of_matrix = [
        {"label": "optimizer", "symbol": "GPT2_OPTIMIZER", "values": list(configurations)},
        {"label": "seed", "symbol": "GPT2_SEED", "values": [str(seed) for seed in numbers]},
    ]
    verdict = {"seeds_auto": True, "seeds": numbers, "seeds_min": 3, **rules}
    write_json(matrix.matrix_json, {"name": matrix.name, "axes": axes_of_matrix, "runs": runs, "verdict": verdict})
    return matrix


class ScriptedEngine:
    """An engine whose runs end at the next poll. A text in the script is a failure: of the first attempt, or of all."""

    def __init__(self, script: Script, *, twice: bool = False) -> None:
        """Create the engine. twice: a failed seed fails in its second attempt, too."""
        self._script, self._twice = script, twice
        self._jobs: dict[str, JobState] = {}
        self._plans: dict[str, RunPlan] = {}
        self.started: list[tuple[str, int]] = []  # run and attempt
        self.kill_after: int | None = None  # starts, after which this runner dies

    def check(self, runs: Sequence[RunPlan]) -> list[str]:
        return []

    def submit(self, runs: Sequence[RunPlan]) -> dict[str, str]:
        for run in runs:
            self._jobs[run.name] = JobState(phase=JobPhase.PENDING)
            self._plans[run.name] = run
        return {run.name: run.name for run in runs}

    def poll(self, jobs: Mapping[str, str] | None = None) -> dict[str, JobState]:
        """Execute the first pending run, and return all states."""
        name = next((name for name, job in self._jobs.items() if job.phase is JobPhase.PENDING), None)
        if name is not None:
            if self.kill_after is not None and len(self.started) >= self.kill_after:
                raise KeyboardInterrupt
            self._jobs[name] = self._execute(self._plans[name])
        return dict(self._jobs)

    def cancel(self, jobs: Mapping[str, str] | None = None, *, now: bool = False) -> None:
        for name in self._jobs if jobs is None else jobs:
            if self._jobs[name].phase is JobPhase.PENDING:
                self._jobs[name] = JobState(phase=JobPhase.GONE, cancelled=True)

    def _execute(self, run: RunPlan) -> JobState:
        self.started.append((run.name, run.attempt))
        _, configuration, seed, _ = run.name.split("_")
        outcome = self._script[configuration][int(seed.removeprefix("seed")) - 1]
        code = write_end(run, outcome if run.attempt == 1 or self._twice or isinstance(outcome, float) else 3.0)
        now = time.time()
        return JobState(phase=JobPhase.ENDED, started=now - 1, ended=now, seconds=1.0, exit_code=code)


def write_end(run: RunPlan, outcome: float | str) -> int:
    """Write the files of an attempt that ended, and return its exit code."""
    values: dict[str, Any] = {"run_id": run.run_id, "attempt": run.attempt, "step": 3, "initial_val_loss": START_LOSS}
    if outcome == FAIL:
        return 1
    if outcome == NAN:
        write_json(run.dir.result, {**values, "status": "failed", "kind": "nan", "reason": "loss is nan"})
        return 1
    write_json(run.dir.run_used, {"train": read_json(run.dir.run_json)["train"], "adjusted": []})
    loss = START_LOSS + 1 if outcome == ABOVE else outcome
    write_json(run.dir.result, {**values, "status": "finished", "final_val_loss": loss})
    return 0


def run(
    matrix: MatrixDir,
    engine: ScriptedEngine,
    *,
    budget: MatrixBudget | None = None,
    on_progress: Callable[[RunProgress], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    **asked: Any,
) -> Outcome:
    """Run or continue a matrix as its runner does, and return how it ended. asked: keywords of reopen()."""
    plan = reopen(matrix, (), **asked)
    return drive(
        matrix,
        plan.plans,
        engine,
        reserve=plan.reserve,
        rounds=plan.rounds,
        budget=budget,
        on_progress=on_progress,
        on_note=on_note,
        poll_s=0.0,
        requests_s=1e-9,
    )
