"""The complete state of a training run: collected into one value for a checkpoint, and restored from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt2.dist import World
from gpt2.model.base import LanguageModel
from gpt2.optim.optimizers import Optimizers
from kmatrix.errors import RecordError
from kmatrix.records.train_config import MAY_DIFFER, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The objects whose state a checkpoint holds."""

    config: TrainConfig
    world: World
    model: LanguageModel
    optimizers: Optimizers
    # By name: histories and masks, whose state_dict has tensors, numbers, strings, lists and dicts only
    stateful: Mapping[str, Any] = field(default_factory=dict)


def snapshot(
    training: TrainingState, *, step: int, run_id: str, optimizer: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state of a run after `step` updates. Its tensors are those of training, except for `evaluation`.

    optimizer: the states gathered from all ranks; None if each rank holds all of them.
    The order of the data, the learning rate and random numbers depend on the step: nothing else is stored of them.
    """
    value = {
        "run_id": run_id,
        "step": step,
        "config": training.config.to_json(),
        "model": training.model.state_dict(),
        "optimizer": training.optimizers.state_dict() if optimizer is None else optimizer,
        "parts": {name: part.state_dict() for name, part in training.stateful.items()},
    }
    if training.optimizers.averages:
        with training.optimizers.evaluation_weights():  # which restores the training weights in place
            value["evaluation"] = {name: weights.clone() for name, weights in training.model.state_dict().items()}
    return value


def restore(value: Mapping[str, Any], training: TrainingState) -> None:
    """Restore the objects from a checkpoint. Raises RecordError if it is of other training, before any change."""
    if not value["optimizer"]:
        raise RecordError(
            "the checkpoint holds weights alone: training cannot resume from it",
            why="it was imported",
            hint="start a new run from these weights: INIT_FROM=<the file>",
        )
    saved, current = value["config"], training.config.to_json()
    if other := [name for name in current if name not in MAY_DIFFER and saved.get(name) != current[name]]:
        raise RecordError(
            f"the checkpoint at step {value['step']} belongs to another configuration",
            why="; ".join(f"{name} was {saved.get(name)} and is {current[name]}" for name in other),
            hint="start from the beginning: --resume none",
        )
    training.model.load_state_dict(value["model"])
    training.optimizers.load_state_dict(value["optimizer"])
    for name, part in training.stateful.items():
        part.load_state_dict(value["parts"][name])
