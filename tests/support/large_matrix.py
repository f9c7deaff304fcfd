"""Make a matrix of thousands of runs for measurements: finished ones, or jobs of a cluster of which most wait."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from gpu_factory import FakeGpus, summary_of, write_samples
from kmatrix.engines.ports import label_of
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir, RunDir
from records_factory import CREATED, FakeRun, edit_attempt, make_matrix, make_run

OPTIMIZERS = ("adamw", "muon", "sgd", "adam")
AT_A_TIME = 4  # runs
RUN_S = 60.0


def make_large_matrix(root: Path, count: int) -> MatrixDir:
    """Write a matrix of `count` finished runs: optimizers x 10 learning rates x seeds."""
    matrix = make_matrix(root, [_run(number) for number in range(count)])
    for number in range(count):
        edit_attempt(matrix.run(_run(number).name), started=CREATED + RUN_S * (number // AT_A_TIME))
    return matrix


def make_logged_matrix(root: Path, count: int, *, lines: int, gpus: int) -> MatrixDir:
    """Write a matrix of `count` finished runs with logs of about `lines` lines and recordings of their GPUs, 1 Hz.

    The seeds of a configuration share these files, as hard links; each run has its own result.json.
    """
    runs = [
        replace(_run(number), steps=lines - 100, eval_interval=max(1, lines // 100), log_interval=1, gpus=gpus,
                device="cuda", tokens_per_s=40_960.0)
        for number in range(count)
    ]  # fmt: skip
    shared = {}
    for run in runs[: 10 * len(OPTIMIZERS)]:
        folder = make_run(MatrixDir(root / "shared"), run)
        seconds = read_json(folder.result)["seconds"]
        _record(folder, gpus, seconds)
        shared[run.optimizer, run.axes["lr"]] = folder
    matrix = make_matrix(root, [replace(run, stop_at=1) for run in runs])  # the logs are linked
    for number, run in enumerate(runs):
        folder, source = matrix.run(run.name), shared[run.optimizer, run.axes["lr"]]
        result = read_json(source.result) | {"run_id": run.run_id, "final_val_loss": run.final_loss}
        result["ended"] = CREATED + result["seconds"]
        write_json(folder.result, result, durable=False)
        folder.metrics.unlink()
        for path in (source.metrics, source.phases, source.gpu_samples, source.gpu_summary):
            os.link(path, folder.path / path.name)
        begin = CREATED + (result["seconds"] + 30) * (number // AT_A_TIME)
        seconds = result["seconds"] + 20
        edit_attempt(folder, started=begin, seconds=seconds, end={"seconds": seconds, "at": begin + seconds})
    return matrix


def _record(folder: RunDir, gpus: int, seconds: float) -> None:
    """Record the GPUs of a run from its start to its end, and log its set-up and evaluations as phases."""
    values = [100.0] * gpus
    fake = FakeGpus(memory=[9_000.0] * gpus, power=values, utilization=values, samples=int(seconds) + 20, counter=True)
    snapshots = [replace(one, time=CREATED - 10 + number) for number, one in enumerate(fake.snapshots())]
    write_samples(folder.gpu_samples, fake, snapshots)
    write_json(folder.gpu_summary, summary_of(fake, snapshots) | {"final": True})
    ends = [line["time"] for line in map(json.loads, folder.metrics.open()) if "val/loss" in line]
    spans = [("set-up", CREATED - 10, CREATED), *(("evaluation", end - 0.5, end) for end in ends)]
    lines = [
        {"phase": name, "begin": begin, "end": end, "begin_monotonic": begin - CREATED + 10,
         "end_monotonic": end - CREATED + 10, "attempt": 1, "step": number}
        for number, (name, begin, end) in enumerate(spans)
    ]  # fmt: skip
    folder.phases.write_text("".join(json.dumps({"schema": 1, **line}) + "\n" for line in lines), encoding="utf-8")


def _run(number: int) -> FakeRun:
    seed = number // (10 * len(OPTIMIZERS))
    axes = {"lr": str(number // len(OPTIMIZERS) % 10), "seed": str(seed)}
    loss = 3.2 + 0.0001 * (number * 7919 % 100)  # all different, so that there is something to rank
    return FakeRun(optimizer=OPTIMIZERS[number % len(OPTIMIZERS)], seed=seed, axes=axes, final_loss=loss)


def make_queued_matrix(root: Path, count: int, *, running: int = 4, tasks: int = 1000) -> tuple[MatrixDir, str]:
    """Write a matrix of `count` runs on Slurm, in arrays of `tasks` jobs: a few run, the others wait.

    Return it with what squeue prints about its jobs.
    """
    runs = [replace(_run(number), status="running") for number in range(count)]
    matrix = make_matrix(root, runs[:running], planned=runs[running:], engine="slurm")
    lines = []
    for number, start in enumerate(range(0, count, tasks), start=1):
        names = [run.name for run in runs[start : start + tasks]]
        (matrix.path / "jobs" / f"{number:04d}").mkdir(parents=True)
        (matrix.path / "jobs" / f"{number:04d}" / "runs").write_text("".join(f"{name}\n" for name in names), "utf-8")
        for task in range(len(names)):
            state = "RUNNING|None|n1" if start + task < running else "PENDING|Resources|"
            lines.append(f"{100 + number}_{task}|{label_of(matrix.path)}-{number:04d}|{state}|N/A\n")
    return matrix, "".join(lines)
