"""What each optimizer ran with, and where the values come from: tuned beside untuned is no comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kmatrix.report.values import OptimizerSettings, Origin, RunNumbers, Setting

# The trainer's fields that decide how a run is optimized and pruned; those that begin with the optimizer's name follow.
FIELDS = (
    *("learning_rate", "min_lr", "schedule", "warmup_steps", "weight_decay", "grad_clip"),
    *("beta1", "beta2", "epsilon", "amsgrad", "sgd_momentum", "sgd_nesterov"),
    *("muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_adamw_lr"),
    *("adafactor_beta2_decay", "adafactor_clip", "soap_frequency"),
    *("adamwprune_base", "spam_theta", "spam_interval", "spam_warmup_steps"),
    *("pruning", "target_sparsity", "pruning_warmup", "pruning_ramp_end", "pruning_frequency", "pruning_global"),
)
PRUNING = ("target_sparsity", "pruning_")
FOLLOWS = {"warmup_steps": "warmup_fraction"}  # resolved from another symbol, where that is asked for
TUNED = ("learning_rate", "weight_decay", "beta1", "beta2")  # what a paper's tables tune


def fields_of(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among the fields of a run.json's "train", without those that do not apply."""
    optimizer = str(train.get("optimizer") or "")
    own = [name for name in train if optimizer and name.startswith(f"{optimizer}_") and name not in FIELDS]
    found = {name: train[name] for name in (*FIELDS, *own) if train.get(name) is not None}
    if found.get("pruning") in (None, "none"):
        found = {name: value for name, value in found.items() if not name.startswith(("pruning", *PRUNING))}
    return found


def settings(runs: Sequence[RunNumbers]) -> tuple[OptimizerSettings, ...]:
    """Return the settings of each optimizer over all of its runs, in the order of the runs."""
    members: dict[str, list[RunNumbers]] = {}
    for run in runs:
        if run.optimizer and run.settings:
            members.setdefault(run.optimizer, []).append(run)
    return tuple(
        OptimizerSettings(
            optimizer=optimizer,
            runs=tuple(run.name for run in group),
            settings=tuple(
                _setting(name, group) for name in dict.fromkeys(name for run in group for name in run.settings)
            ),
        )
        for optimizer, group in members.items()
    )


def warnings(found: Sequence[OptimizerSettings]) -> Iterator[str]:
    """Say where one optimizer was tuned and another was not."""
    for name in TUNED:
        known = [(one.optimizer, setting.origin) for one in found if (setting := one.get(name)) and setting.origin]
        swept = [optimizer for optimizer, origin in known if origin is Origin.SWEPT]
        rest = [optimizer for optimizer, origin in known if origin is not Origin.SWEPT]
        if swept and rest:
            yield (
                f"{name} was swept for {', '.join(swept)} and not for {', '.join(rest)}: "
                "a tuned optimizer is compared with an untuned one"
            )
    rates = {one.optimizer: rate.origin for one in found if (rate := one.get("learning_rate")) and rate.origin}
    asked = [optimizer for optimizer, origin in rates.items() if origin is Origin.ASKED]
    default = [optimizer for optimizer, origin in rates.items() if origin is Origin.DEFAULT]
    if asked and default:
        yield (
            f"learning_rate was chosen for {', '.join(asked)} and is the default for {', '.join(default)}: "
            "they compare only where all of them suit this model"
        )


def _setting(name: str, group: Sequence[RunNumbers]) -> Setting:
    values = tuple(dict.fromkeys(run.settings[name] for run in group if name in run.settings))
    return Setting(name=name, values=values, origin=_origin(name, values, group))


def _origin(name: str, values: Sequence[Any], group: Sequence[RunNumbers]) -> Origin | None:
    """Say where values come from; None where the runs do not record it."""
    asked = [run.asked for run in group if run.asked is not None and name in run.settings]
    if not asked:
        return None
    wanted = any(name in names or FOLLOWS.get(name) in names for names in asked)
    if not wanted:
        return Origin.DEFAULT
    return Origin.SWEPT if len(values) > 1 else Origin.ASKED
