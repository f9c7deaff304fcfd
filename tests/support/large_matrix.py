"""Make a matrix of thousands of runs for measurements: finished ones, or jobs of a cluster of which most wait."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from gpu_factory import FakeGpus, summary_of, write_phases, write_samples
from kmatrix.engines.ports import label_of
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from records_factory import CREATED, FakeRun, edit_attempt, make_matrix, make_run

OPTIMIZERS = ("adamw", "muon", "sgd", "adam")


def make_large_matrix(root: Path, count: int) -> MatrixDir:
    """Write a matrix of `count` finished runs: optimizers x 10 learning rates x seeds."""
    return make_matrix(root, [_run(number) for number in range(count)])


def make_logged_matrix(root: Path, count: int, *, lines: int) -> MatrixDir:
    """Write a matrix of `count` finished runs with logs of about `lines` lines and recordings of their 4 GPUs, 1 Hz.

    The seeds of a configuration share these files, as hard links; each run has its own result.json.
    """
    logs = {"steps": lines - 100, "eval_interval": max(1, lines // 100), "log_interval": 1, "tokens_per_s": 40_960.0}
    runs = [replace(_run(number), gpus=4, device="cuda", **logs) for number in range(count)]
    matrix = make_matrix(root, [replace(run, stop_at=1) for run in runs])  # the logs are linked
    shared = {}
    for number, run in enumerate(runs):
        source = shared.get((run.optimizer, run.axes["lr"]))
        if source is None:
            source = shared[run.optimizer, run.axes["lr"]] = make_run(MatrixDir(root / "shared"), run)
            seconds = int(read_json(source.result)["seconds"])
            fake = FakeGpus(samples=seconds, counter=True)
            snapshots = list(fake.snapshots())
            write_samples(source.gpu_samples, fake, snapshots)
            write_json(source.gpu_summary, summary_of(fake, snapshots) | {"final": True})
            write_phases(source, ("set-up", 0, 5), ("evaluation", seconds // 2, seconds // 2 + 1), end=seconds - 1)
        folder, result = matrix.run(run.name), read_json(source.result)
        seconds = result["seconds"] + 20
        begin = CREATED + seconds * (number // 4)  # four at a time
        times = {"ended": CREATED + result["seconds"], "run_id": run.run_id, "final_val_loss": run.final_loss}
        write_json(folder.result, result | times, durable=False)
        folder.metrics.unlink()
        for path in (source.metrics, source.phases, source.gpu_samples, source.gpu_summary):
            os.link(path, folder.path / path.name)
        edit_attempt(folder, started=begin, seconds=seconds, end={"seconds": seconds, "at": begin + seconds})
    return matrix


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


def _run(number: int) -> FakeRun:
    seed = number // (10 * len(OPTIMIZERS))
    axes = {"lr": str(number // len(OPTIMIZERS) % 10), "seed": str(seed)}
    loss = 3.2 + 0.0001 * (number * 7919 % 100)  # all different, so that there is something to rank
    return FakeRun(optimizer=OPTIMIZERS[number % len(OPTIMIZERS)], seed=seed, axes=axes, final_loss=loss)
