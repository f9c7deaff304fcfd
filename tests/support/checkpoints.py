"""Checkpoints of a run, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kmatrix.records.checkpoints import Checkpoint, Checkpoints


def add_checkpoint(folder: Path, step: int, data: bytes = b"weights", **about: Any) -> Checkpoint:
    """Write a checkpoint of some bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    return Checkpoints(folder).put(step, lambda file: file.write(data), **{"attempt": 1, **about})


def final_of(run: Path) -> Path:
    """Return the final checkpoint of a run directory."""
    checkpoints = Checkpoints(run / "checkpoints")
    final = checkpoints.final()
    assert final
    return checkpoints.path(final)


def best_of(run: Path) -> Path:
    """Return the best checkpoint of a run directory."""
    checkpoints = Checkpoints(run / "checkpoints")
    best = checkpoints.best()
    assert best
    return checkpoints.path(best)
