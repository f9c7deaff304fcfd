"""Matrices with successive halving, and an engine whose runs end at once with scripted losses at each evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.loop import drive
from kmatrix.runner.resume import reopen
from kmatrix.status.state import JobPhase, JobState, RunPlan
from scripted import FAIL, MEASURED, NAN, START_LOSS, TRAIN, ScriptedEngine, name_of

MAX_ITERS, EVAL_INTERVAL = 90, 5

Curve = Mapping[int, float | str]  # step -> loss there, or FAIL or NAN: it ends there; others are interpolated


def halved_matrix(matrix: MatrixDir, configurations: Sequence[str], *, eta: int = 3, seeds: int = 1) -> MatrixDir:
    """Make a matrix of these optimizers and seeds."""
    runs = []
    for configuration in configurations:
        for seed in range(1, seeds + 1):
            name = name_of(configuration, seed)
            length = {"max_iters": MAX_ITERS, "eval_interval": EVAL_INTERVAL}
            fields = {**TRAIN, **MEASURED, **length, "optimizer": configuration, "seed": seed}
            axes = {"optimizer": configuration} | ({"seed": str(seed)} if seeds > 1 else {})
            record = {"run_id": f"id-{name}", "name": name, "axes": axes, "train": fields}
            write_json(matrix.run(name).run_json, record)
            runs.append({key: record[key] for key in ("name", "run_id", "axes")})
    axes_of_matrix = [{"label": "optimizer", "symbol": "GPT2_OPTIMIZER", "values": list(configurations)}]
    if seeds > 1:
        values = [str(seed) for seed in range(1, seeds + 1)]
        axes_of_matrix.append({"label": "seed", "symbol": "GPT2_SEED", "values": values})
    plan = {"name": matrix.name, "axes": axes_of_matrix, "runs": runs, "verdict": {"halving": eta}}
    write_json(matrix.matrix_json, plan)
    return matrix


def loss_at(curve: Curve, step: int) -> float:
    """Return the scripted loss at a step, else that of the last scripted step before it."""
    known = [at for at in sorted(curve) if at <= step and not isinstance(curve[at], str)]
    return float(curve[known[-1]]) if known else START_LOSS - 1


class HalvedEngine(ScriptedEngine):
    """An engine whose runs train until the step that they are asked for, at the next poll."""

    def __init__(self, curves: Mapping[str, Curve | Sequence[Curve]], *, always: bool = False) -> None:
        """Create the engine. curves: configuration -> its curve, or one per seed.  always: a failure comes again."""
        super().__init__({})
        self._curves, self._always = curves, always
        self.steps: dict[str, int] = {}  # trained by each run
        self.asked: list[tuple[str, int | None]] = []  # run and its step
        self.noise = 0.0  # added to losses of an attempt that evaluates a step again

    def _execute(self, run: RunPlan) -> JobState:
        self.started.append((run.name, run.attempt))
        _, configuration, seed, _ = run.name.split("_")
        own = self._curves[configuration]
        curve = own if isinstance(own, Mapping) else own[int(seed.removeprefix("seed")) - 1]
        code = self.train(run, curve)
        now = time.time()
        return JobState(phase=JobPhase.ENDED, started=now - 1, ended=now, seconds=1.0, exit_code=code)

    def train(self, run: RunPlan, curve: Curve) -> int:
        """Write the files of an attempt, and return its exit code."""
        self.asked.append((run.name, run.until))
        checkpoint = run.dir.path / "scripted_step"
        start = int(checkpoint.read_text()) if run.resume != "none" and checkpoint.exists() else 0
        step, until = start, run.until or MAX_ITERS
        values: dict[str, Any] = {"run_id": run.run_id, "attempt": run.attempt, "initial_val_loss": START_LOSS}
        with run.dir.metrics.open("a") as metrics:

            def log(step: int, **values: object) -> None:
                line = {"schema": 1, "step": step, "time": time.time(), "attempt": run.attempt, **values}
                metrics.write(json.dumps(line) + "\n")

            if start:
                log(start, resumed=True)
            else:
                log(0, **{"val/loss": START_LOSS})
            while step < until:
                step += 1
                self.steps[run.name] = self.steps.get(run.name, 0) + 1
                found = curve.get(step)
                if found == FAIL and (self._always or run.attempt == 1):
                    return 1
                if found == NAN:
                    ended = {**values, "status": "failed", "kind": "nan", "reason": "loss is nan", "step": step}
                    write_json(run.dir.result, ended)
                    return 1
                if step % EVAL_INTERVAL == 0:
                    log(step, **{"val/loss": loss_at(curve, step) + self.noise})
        checkpoint.write_text(str(step))
        write_json(run.dir.run_used, {"train": read_json(run.dir.run_json)["train"], "adjusted": []})
        loss = loss_at(curve, step)
        if run.until is not None and step >= run.until:
            reason = f"waits at step {step} for the other configurations"
            write_json(run.dir.result, {**values, "status": "stopped", "kind": "rung", "reason": reason, "step": step})
            return 0
        write_json(run.dir.result, {**values, "status": "finished", "step": step, "final_val_loss": loss})
        return 0


def run_scripted(matrix: MatrixDir, curves: Mapping[str, Curve], starts: int | None = None) -> None:
    """Run the matrix with these losses; the runner dies after this many starts."""
    engine = HalvedEngine(curves)
    engine.kill_after = starts
    plan = reopen(matrix, ())
    try:
        drive(matrix, plan.plans, engine, reserve=plan.reserve, rounds=plan.rounds, poll_s=0.0)
    except KeyboardInterrupt:
        assert starts is not None
