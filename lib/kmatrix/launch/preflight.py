"""Which runs of a matrix stand for the others in a trial of two steps, and what the trial says of all of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmatrix.config import RunConfig
from kmatrix.matrix import Run

STEPS = 2  # the second has the optimizer's states in memory, too
TRIAL: Mapping[str, Any] = {  # what a trial leaves out: how long the run is, and what it keeps
    **{"max_iters": STEPS, "warmup_steps": 0, "warmup_fraction": None, "log_interval": 1, "eval_interval": STEPS},
    **{"hellaswag": "", "sample_interval": 0, "profile": "", "early_stopping_patience": 0},
    **{"save_checkpoint": False, "save_best": False, "checkpoint_interval": 0},
    **{"max_time": None, "max_cost": None, "max_tokens": None, "max_epochs": None, "tokens_per_param": None},
}
RAMP: Mapping[str, Any] = {"pruning_warmup": 0.0, "pruning_ramp_end": 1.0, "pruning_frequency": 1}
NUMBERS = frozenset(  # fields that are multiplied with, and decide neither memory nor what is called
    {
        *("seed", "learning_rate", "min_lr", "schedule", "wsd_decay_fraction", "weight_decay", "grad_clip"),
        *("beta1", "beta2", "epsilon", "muon_adamw_lr", "spam_theta", "target_sparsity", "gpu_hour_price"),
        *("adafactor_beta2_decay", "adafactor_clip", "early_stopping_min_delta", "data_tokens", "peak_tflops"),
        *("keep_checkpoints", "keep_every", "async_checkpoint", "stall_factor", "stall_floor"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """Runs that cannot be trained as they are, and why."""

    names: tuple[str, ...]
    reason: str


def shortened(config: RunConfig) -> RunConfig:
    """Return a run's configuration as the trial has it: two steps, an evaluation, nothing kept."""
    fields = {**config.fields, **{name: value for name, value in TRIAL.items() if name in config.fields}}
    if fields.get("pruning", "none") != "none":
        fields.update(RAMP)
    fields["eval_samples"] = min(int(fields["eval_samples"]), int(fields["batch_size"]) * int(fields["num_gpus"]))
    return replace(config, fields=fields)


def groups(configs: Mapping[str, RunConfig]) -> dict[str, tuple[str, ...]]:
    """Return the runs of one shape for each that stands for them, the first."""
    found: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for name, config in configs.items():
        fields = shortened(config).fields
        shape = tuple((field, fields[field]) for field in sorted(fields) if field not in NUMBERS)
        found.setdefault(shape, []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def advice(runs: Sequence[Run], bad: Sequence[Bad]) -> str:
    """Return what to type so that the bad runs are left out, "" where they have no axes.

    A value of an axis that fails in every run is left out of its list; what remains is excluded point by point.
    """
    points = {run.name: {point.axis: point.text for point in run.points if point.swept} for run in runs}
    failed = {name: group.reason for group in bad for name in group.names}
    words = []
    for axis in dict.fromkeys(axis for one in points.values() for axis in one):
        values = dict.fromkeys(one[axis] for one in points.values() if axis in one)
        good = [text for text in values if any(points[name].get(axis) == text for name in points.keys() - failed)]
        if good and len(good) < len(values):
            words.append(f"{axis.removeprefix('GPT2_')}={','.join(good)}")
            failed = {name: why for name, why in failed.items() if points[name].get(axis) in good}
    rules = "; ".join(f"{_words(points[name])}: {_plain(reason)}" for name, reason in failed.items() if points[name])
    return " ".join([*words, *([f'MATRIX_EXCLUDE="{rules}"'] if rules else [])])


def _words(points: Mapping[str, str]) -> str:
    return " ".join(f"{axis.removeprefix('GPT2_')}={text}" for axis, text in points.items())


def _plain(reason: str) -> str:
    """A reason without what separates rules."""
    words = reason.split(":", maxsplit=1)[0].replace(";", ",").replace('"', "").strip()
    return words if len(words) <= 60 else words[:57] + "..."
