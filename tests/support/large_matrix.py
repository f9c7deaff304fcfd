"""Make a matrix of thousands of finished runs, several at a time, for measurements."""

from __future__ import annotations

from pathlib import Path

from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from records_factory import CREATED, FakeRun, make_matrix

OPTIMIZERS = ("adamw", "muon", "sgd", "adam")
AT_A_TIME = 4  # runs
RUN_S = 60.0


def make_large_matrix(root: Path, count: int) -> MatrixDir:
    """Write a matrix of `count` finished runs: optimizers x 10 learning rates x seeds."""
    matrix = make_matrix(root, [_run(number) for number in range(count)])
    for number in range(count):
        path = matrix.run(_run(number).name).status
        begin = CREATED + RUN_S * (number // AT_A_TIME)
        attempt = {"attempt": 1, "status": "finished", "started": begin, "ended": begin + RUN_S}
        write_json(path, read_json(path) | {"attempts": [attempt]}, durable=False)
    return matrix


def _run(number: int) -> FakeRun:
    seed = number // (10 * len(OPTIMIZERS))
    axes = {"lr": str(number // len(OPTIMIZERS) % 10), "seed": str(seed)}
    loss = 3.2 + 0.0001 * (number * 7919 % 100)  # all different, so that there is something to rank
    return FakeRun(optimizer=OPTIMIZERS[number % len(OPTIMIZERS)], seed=seed, axes=axes, final_loss=loss)
