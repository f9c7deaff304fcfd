"""What a run is after some updates, as one value: taken from the parts of training, and put back into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gpt2.checkpoint.files import SCHEMA
from gpt2.checkpoint.rng import set_here
from gpt2.config import TrainConfig
from gpt2.dist import World
from gpt2.optim import Optimizers
from kmatrix.errors import RecordError

# Fields that say how a step is computed, where files lie or what is written, and not which step it is.
FREE = frozenset(
    (
        *("batch_size", "gradient_accumulation", "num_gpus", "use_ddp", "ddp_backend", "ddp_find_unused_params"),
        *("device", "dtype", "tf32", "flash_attention", "compile", "cpu_threads", "peak_tflops"),
        *("recompute", "loss_chunk", "hellaswag", "hellaswag_interval", "hellaswag_examples"),
        *("sample_interval", "sample_prompt", "sample_tokens", "sample_temperature"),
        *("data_path", "checkpoint_dir", "log_interval", "eval_interval", "eval_samples"),
        *("gpu_hour_price", "stall_factor", "stall_floor", "oom_policy", "profile"),
        *("save_checkpoint", "checkpoint_interval", "keep_checkpoints", "keep_every", "save_best", "async_checkpoint"),
    )
)


class Carried(Protocol):
    """What goes on over a resume. Its state is made of tensors, numbers, strings, lists and dicts alone."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of training that a checkpoint holds. carried: histories, clocks, masks and the like, by name."""

    config: TrainConfig
    world: World
    model: torch.nn.Module
    optimizers: Optimizers
    carried: Mapping[str, Carried] = field(default_factory=dict)


def state(parts: Parts, *, step: int, run_id: str, rng: list[dict[str, Any]]) -> dict[str, Any]:
    """Return everything that a run is after `step` updates. rng: every rank's, gathered.

    The tensors are those of training: copy them before the next step (Copies), or write them at once.
    The order of the data is a function of seed and step x global batch (gpt2/data.py), and the rate of the step
    (gpt2/schedule.py): for these the step alone is kept.
    """
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "step": step,
        "tokens": step * parts.config.tokens_per_step,
        "config": parts.config.to_json(),
        "model": parts.model.state_dict(),
        **judged(parts),
        "optimizer": parts.optimizers.state_dict(),
        "rng": rng,
        "carried": {name: part.state_dict() for name, part in parts.carried.items()},
    }


def judged(parts: Parts) -> dict[str, Any]:
    """Return the weights that are to be judged under "judged", only where they are not those that are trained."""
    if not parts.optimizers.averages:
        return {}
    with parts.optimizers.judged():
        return {"judged": {name: weights.detach().clone() for name, weights in parts.model.state_dict().items()}}


def weights(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint that are to be judged, sampled, served and exported."""
    found: dict[str, torch.Tensor] = value["judged"] if "judged" in value else value["model"]
    return found


def restore(value: Mapping[str, Any], parts: Parts) -> list[str]:
    """Put the parts where they were when the checkpoint was taken; return sentences about what could not be.

    Raises RecordError where the checkpoint is of another training than this.
    """
    if not value["optimizer"]:
        raise RecordError(f"the checkpoint at step {value['step']} holds weights alone", why="it came from an export")
    refuse_another(value, parts.config)
    parts.model.load_state_dict(value["model"])
    parts.optimizers.load_state_dict(value["optimizer"])
    for name, part in parts.carried.items():
        if name in value["carried"]:
            part.load_state_dict(value["carried"][name])
    notes = [f"{name} starts anew: the checkpoint has none" for name in parts.carried if name not in value["carried"]]
    states = value["rng"]
    if len(states) == parts.world.size:
        set_here(states[parts.world.rank], parts.world)
    else:
        notes.append(
            f"{len(states)} ranks wrote the checkpoint and {parts.world.size} go on: the order of the data goes on "
            "exactly, random numbers (dropout) are drawn by rank and do not"
        )
    return notes


def refuse_another(value: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise RecordError where a checkpoint's training differs from this one in more than how it is computed."""
    theirs, ours = value["config"], config.to_json()
    differences = [
        f"{name} was {theirs[name]} and is {ours[name]}"
        for name in ours
        if name not in FREE and name in theirs and theirs[name] != ours[name]
    ]
    if differences:
        raise RecordError(
            f"the checkpoint at step {value['step']} is of another training",
            why="; ".join(differences[:5]),
            fix="start without it: --resume none",
        )
