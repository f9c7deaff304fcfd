"""The complete state of a training run: collected into one value for a checkpoint, and restored from it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from gpt2.checkpoint.contents import out_of_memory, reason, shape_problem
from gpt2.checkpoint.files import SCHEMA
from gpt2.dist import World
from gpt2.optim.optimizers import Optimizers
from kmatrix.errors import RecordError
from kmatrix.records.train_config import TrainConfig

# Fields that may differ on resume: they do not change what is trained, only how, where and what is logged.
MAY_DIFFER = frozenset(
    (
        *("batch_size", "gradient_accumulation", "num_gpus", "use_ddp", "ddp_backend", "ddp_find_unused_params"),
        *("zero_stage", "ddp_bf16_gradients"),
        *("device", "dtype", "tf32", "compile", "compile_mode", "cpu_threads", "peak_tflops"),
        *("bf16_stream", "fp8", "deterministic", "flash_attention", "attention_kernel", "recompute_scope"),
        *("recompute", "loss_chunk", "hellaswag", "hellaswag_interval", "hellaswag_examples"),
        *("core", "core_interval", "core_examples"),
        *("sample_interval", "sample_prompt"),
        *("data_cache", "data_wait"),
        *("data_path", "init_from", "checkpoint_dir", "log_interval", "log_norms", "eval_interval", "eval_samples"),
        *("gpu_hour_price", "machine_hour_price", "stall_factor", "stall_floor", "profile"),
        *("save_checkpoint", "checkpoint_interval", "keep_checkpoints", "save_best"),
    )
)


class Stateful(Protocol):
    """An object whose state is part of a checkpoint, made of tensors, numbers, strings, lists and dicts only."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The objects whose state a checkpoint holds."""

    config: TrainConfig
    world: World
    model: torch.nn.Module
    optimizers: Optimizers
    stateful: Mapping[str, Stateful] = field(default_factory=dict)  # by name: histories, clocks, masks


def snapshot(
    training: TrainingState,
    *,
    step: int,
    run_id: str,
    rng: list[dict[str, Any]],
    optimizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state of a run after `step` updates. rng: generator states of all ranks.

    optimizer: the states gathered from all ranks; None if each rank holds all of them.
    The tensors are those of training: copy (gpt2.checkpoint.copies) or write them before the next step.
    The data order (gpt2/data/batches.py) and the learning rate (gpt2/loop/schedule.py) are functions of the step, so
    the step is all that is stored of them.
    """
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "step": step,
        "tokens": step * training.config.tokens_per_step,
        "config": training.config.to_json(),
        "model": training.model.state_dict(),
        **evaluation_weights(training),
        "optimizer": training.optimizers.state_dict() if optimizer is None else optimizer,
        "rng": rng,
        "carried": {name: part.state_dict() for name, part in training.stateful.items()},
    }


def evaluation_weights(training: TrainingState) -> dict[str, Any]:
    """Return the evaluation weights by their key in the checkpoint; {} if they are the training weights."""
    if not training.optimizers.averages:
        return {}
    # Clones, because the context restores the training weights in place.
    with training.optimizers.evaluation_weights():
        return {"judged": {name: weights.detach().clone() for name, weights in training.model.state_dict().items()}}


def restore(value: Mapping[str, Any], training: TrainingState) -> list[str]:
    """Restore the objects from a checkpoint. Return a note for each part that could not be restored.

    Raises RecordError if the checkpoint belongs to a different training configuration.
    """
    if not value["optimizer"]:
        raise RecordError(f"the checkpoint at step {value['step']} holds weights alone", why="it was imported")
    check_same_training(value, training.config)  # before anything is changed
    shapes = {name: tuple(tensor.shape) for name, tensor in training.model.state_dict().items()}
    if why := shape_problem(value["model"], shapes):
        raise RecordError(f"the checkpoint at step {value['step']} is damaged", why=why)
    parts: dict[str, Any] = {"weights": training.model, "optimizer": training.optimizers, **training.stateful}
    states = {"weights": value["model"], "optimizer": value["optimizer"], **value["carried"]}
    for name, part in parts.items():
        if name in states:
            with _damage_named(name, value["step"]):
                part.load_state_dict(states[name])
    new = [name for name in training.stateful if name not in value["carried"]]
    notes = [f"{name} starts from scratch: it is not in the checkpoint" for name in new]
    # Last: nothing above may advance the restored generators.
    ranks = value["rng"]
    if len(ranks) == training.world.size:
        with _damage_named("random generators", value["step"]):
            set_rng_state(ranks[training.world.rank], training.world)
    else:
        notes.append(
            f"the checkpoint has {len(ranks)} ranks, this run {training.world.size}: the data order continues "
            "exactly, but random numbers (dropout) differ, because they are drawn by rank"
        )
    return notes


@contextmanager
def _damage_named(part: str, step: int) -> Iterator[None]:
    """Turn the failure of a part to load its state into an error that names the part."""
    try:
        yield
    # Broad, because the state comes from a file: what torch and NumPy raise depends on where it is damaged.
    except Exception as error:
        if out_of_memory(error):
            raise
        raise RecordError(
            f"the checkpoint at step {step} is damaged",
            why=f"{part}: {reason(error)}",
            hint="resume from another checkpoint: `make list-checkpoints`",
        ) from error


def check_same_training(value: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise RecordError if a checkpoint's configuration differs in a field that changes the results."""
    saved, current = value["config"], config.to_json()
    differences = [
        f"{name} was {saved[name]} and is {current[name]}"
        for name in current
        if name not in MAY_DIFFER and saved[name] != current[name]
    ]
    if differences:
        raise RecordError(
            f"the checkpoint at step {value['step']} belongs to another configuration",
            why="; ".join(differences[:5]),
            hint="start from the beginning: --resume none",
        )


def gather_rng_states(world: World) -> list[dict[str, Any]]:
    """Return the random generator states of all ranks, by rank. All ranks must call it."""
    mine = rng_state(world)
    if world.size == 1:  # no process group
        return [mine]
    states: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(states, mine)
    return states


def rng_state(world: World) -> dict[str, Any]:
    """Return this process's random generator states: PyTorch, CUDA, NumPy and Python."""
    version, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state()
    cuda = world.device.type == "cuda"
    # As tensors and plain numbers, because torch.load(weights_only=True) refuses NumPy arrays.
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(world.device).cpu() if cuda else None,
        "numpy": {
            "key": torch.from_numpy(np.asarray(key).astype(np.int64)),
            "rest": [int(position), int(has_gauss), float(cached)],
        },
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }


def set_rng_state(state: dict[str, Any], world: World) -> None:
    """Restore this process's random generator states."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), world.device)
    position, has_gauss, cached = state["numpy"]["rest"]
    key = state["numpy"]["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, cached))
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
