"""The complete state of a training run: collected into one value for a checkpoint, and restored from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpt2.dist import World
from gpt2.model.base import LanguageModel
from gpt2.optim.optimizers import Optimizers
from kmatrix.errors import RecordError
from kmatrix.records.train_config import MAY_DIFFER, TrainConfig


class Stateful(Protocol):
    """An object whose state is part of a checkpoint, made of tensors, numbers, strings, lists and dicts only."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The objects whose state a checkpoint holds."""

    config: TrainConfig
    world: World
    model: LanguageModel
    optimizers: Optimizers
    stateful: Mapping[str, Stateful] = field(default_factory=dict)  # by name: histories, clocks, masks


def snapshot(
    training: TrainingState, *, step: int, run_id: str, optimizer: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state of a run after `step` updates.

    optimizer: the states gathered from all ranks; None if each rank holds all of them.
    The tensors are those of training: copy them, or write them before the next step.
    The order of the data, the learning rate and the random generators are functions of the step
    (gpt2/data/batches.py, gpt2/schedule.py), so the step is all that is stored of them.
    """
    return {
        "run_id": run_id,
        "step": step,
        "config": training.config.to_json(),
        "model": training.model.state_dict(),
        **evaluation_weights(training),
        "optimizer": training.optimizers.state_dict() if optimizer is None else optimizer,
        "parts": {name: part.state_dict() for name, part in training.stateful.items()},
    }


def evaluation_weights(training: TrainingState) -> dict[str, Any]:
    """Return the evaluation weights by their key in the checkpoint; {} if they are the training weights."""
    if not training.optimizers.averages:
        return {}
    # Clones, because the context restores the training weights in place.
    with training.optimizers.evaluation_weights():
        return {"evaluation": {name: weights.detach().clone() for name, weights in training.model.state_dict().items()}}


def restore(value: Mapping[str, Any], training: TrainingState) -> None:
    """Restore the objects from a checkpoint. Raises RecordError if it is of other training."""
    if not value["optimizer"]:
        raise RecordError(
            "the checkpoint holds weights alone: training cannot resume from it",
            why="it was imported",
            hint="start a new run from these weights: INIT_FROM=<the file>",
        )
    check_same_training(value, training.config)  # before anything is changed
    training.model.load_state_dict(value["model"])
    training.optimizers.load_state_dict(value["optimizer"])
    for name, part in training.stateful.items():
        part.load_state_dict(value["parts"][name])


def check_same_training(value: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise RecordError if a checkpoint's configuration differs in a field that changes the results."""
    saved, current = value["config"], config.to_json()
    differences = [
        f"{name} was {saved.get(name)} and is {current[name]}"
        for name in current
        if name not in MAY_DIFFER and saved.get(name) != current[name]
    ]
    if differences:
        raise RecordError(
            f"the checkpoint at step {value['step']} belongs to another configuration",
            why="; ".join(differences[:5]),
            hint="start from the beginning: --resume none",
        )
