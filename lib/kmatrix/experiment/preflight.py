"""Train two steps of each shape of a matrix before it starts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kmatrix.errors import LaunchError
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.create import Contents, create
from kmatrix.experiment.plan import NUMBERS
from kmatrix.records.decode import as_json
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status, Tracking, VerdictRules
from kmatrix.runner.background import train
from kmatrix.status.fold import EXIT
from kmatrix.status.look import look
from kmatrix.text import plural

STEPS = 2  # in the second step, the optimizer states are allocated
TRIAL: Mapping[str, Any] = {  # fields that a trial run overrides: its length, and what it saves
    **{"max_iters": STEPS, "warmup_steps": 0, "warmup_fraction": None, "log_interval": 1, "eval_interval": STEPS},
    **{"hellaswag": "", "core": "", "sample_interval": 0, "profile": "", "early_stopping_patience": 0},
    **{"save_checkpoint": False, "save_best": False, "checkpoint_interval": 0},
    **{"max_time": None, "max_cost": None, "max_tokens": None, "tokens_per_param": None},
}
RAMP: Mapping[str, Any] = {"pruning_warmup": 0.0, "pruning_ramp_end": 1.0, "pruning_frequency": 1}


def trial_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the trainer for the trial: two steps, one evaluation, nothing saved."""
    # A ramp over the whole trial, so that its two steps prune.
    ramp = RAMP if fields["pruning"] != "none" else {}
    # One micro-batch per rank: the memory of an evaluation does not depend on the number of samples.
    samples = min(fields["eval_samples"], fields["batch_size"] * fields["num_gpus"])
    return {**fields, **TRIAL, **ramp, "eval_samples": samples}


def by_shape(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the first run of each shape -> all runs of that shape. runs: fields of the trainer by run."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name, fields in runs.items():
        shape = tuple(value for field, value in trial_fields(fields).items() if field not in NUMBERS)
        found.setdefault(shape, []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def try_runs(
    contents: Contents,
    results_dir: Path,
    *,
    on_message: OnMessage = ignore,
    run_trials: Callable[[MatrixDir], object] | None = None,
) -> None:
    """Train two steps of each shape of a matrix. Raises LaunchError if one cannot be trained.

    A run that only needs a smaller micro-batch is reported, and is not a failure.
    run_trials: trains the runs of a matrix, and returns when they have ended; None: on this machine.
    """
    runnable = {name: run["train"] for name, run in contents.runs.items() if name not in contents.skipped}
    shapes = by_shape(runnable)
    on_message(f"preflight: two steps of {plural(len(shapes), 'shape')}, for {plural(len(runnable), 'run')}")
    # A trial answers no question about losses, and is not tracked.
    other = {"selected": False, "tracking": as_json(Tracking())}
    trial = replace(
        contents,
        about={**contents.about, "verdict": as_json(VerdictRules())},
        runs={name: {**contents.runs[name], **other, "train": trial_fields(runnable[name])} for name in shapes},
        skipped={},
    )
    with tempfile.TemporaryDirectory(prefix=".kmatrix_preflight_", dir=results_dir) as folder:
        matrix = create(trial, Path(folder))
        if run_trials is not None:
            run_trials(matrix)
        elif train(matrix.path) == EXIT[Status.STOPPED]:
            raise KeyboardInterrupt
        states = look(matrix.path).states
    failed = {}
    for name, state in states.items():
        if state.status is not Status.FINISHED:
            failed[name] = state.reason or "its job ended before it began"
        elif batch := state.attempts[-1].micro_batch:
            on_message(f"preflight: {', '.join(shapes[name])}: fits with a micro-batch of {batch}")
    if failed:
        count = sum(len(shapes[name]) for name in failed)
        raise LaunchError(
            f"preflight: {count} of {plural(len(contents.runs), 'run')} {'fails' if count == 1 else 'fail'}; "
            "nothing was started",
            why="; ".join(f"{', '.join(shapes[name])}: {reason}" for name, reason in failed.items()),
            hint="change the configuration, or leave these runs out with other values or MATRIX_EXCLUDE",
        )
