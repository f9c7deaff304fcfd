"""Checkpoints: written whole or not at all, and read back with weights_only=True."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from gpt2.config import TrainConfig
from gpt2.optim import Optimizers
from kmatrix.errors import RecordError

SCHEMA = 1
LAST, STOP, FINAL = "last.pt", "stop.pt", "final.pt"  # the newest periodic one, that of a stop, that of a finished run
KEYS = {"schema", "run_id", "step", "tokens", "config", "model", "optimizer", "rng"}


def state(
    config: TrainConfig, model: torch.nn.Module, optimizers: Optimizers, *, step: int, run_id: str
) -> dict[str, Any]:
    """Return everything that a run is after `step` updates.

    The order of the data and the dropout are functions of seed, step and rank
    (gpt2/data.py, gpt2/train.py): no position has to be kept.
    """
    cuda = config.device == "cuda"
    value = {
        "schema": SCHEMA,
        "run_id": run_id,
        "step": step,
        "tokens": step * config.tokens_per_step,
        "config": config.to_json(),
        "model": model.state_dict(),
        "optimizer": optimizers.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if cuda else None},
    }
    if optimizers.averages:
        with optimizers.judged():
            value["judged"] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return value


def weights(value: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights that are to be judged, sampled and exported: the average, where the optimizer keeps one."""
    judged: dict[str, torch.Tensor] = value.get("judged") or value["model"]
    return judged


def save(path: Path, value: dict[str, Any]) -> None:
    """Write a checkpoint aside, flush it to the disk, and put it in place in one step.

    Raises RecordError when it cannot be written; the former one is then still there.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a full disk, and keeps the cause beside it
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise RecordError(
            f"{path} could not be written",
            why=str(cause).partition("\n")[0],
            fix="make room there, or set CHECKPOINT_DIR to another disk",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return a checkpoint. Raises RecordError when it is missing, damaged or too new."""
    try:
        value = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", fix="look into the run's folder checkpoints/") from None
    except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise RecordError(
            f"{path} is not a whole checkpoint",
            why=str(error).partition("\n")[0] or "it is empty",
            fix="use another checkpoint of the run",
        ) from None
    if not isinstance(value, dict) or "schema" not in value:
        raise RecordError(f"{path} is not a checkpoint of kmatrix", why="it holds no schema")
    if value["schema"] > SCHEMA:
        raise RecordError(
            f"{path} has schema {value['schema']}",
            why=f"this trainer reads schemas up to {SCHEMA}",
            fix="use the newer trainer that wrote it",
        )
    if missing := KEYS - value.keys():
        raise RecordError(f"{path} is not a whole checkpoint", why=f"it lacks {', '.join(sorted(missing))}")
    return value


def discard(folder: Path, *names: str) -> None:
    """Remove checkpoints that a newer one, whole, has replaced."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
