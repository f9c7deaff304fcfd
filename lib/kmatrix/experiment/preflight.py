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
from kmatrix.experiment.plan import Plan, shape_of
from kmatrix.records.decode import as_json
from kmatrix.records.paths import MatrixDir, below_root
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
    **{"pruning_warmup": 0.0, "pruning_ramp_end": 1.0, "pruning_frequency": 1},  # so that both steps prune
}


def trial_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trial of a run: two steps, one evaluation, nothing saved or tracked, no question about its loss."""
    train = run["train"]
    # One micro-batch per rank: the memory of an evaluation does not depend on the number of samples.
    samples = min(train["eval_samples"], train["batch_size"] * train["num_gpus"])
    changed = {"selected": False, "tracking": as_json(Tracking()), "train": {**train, **TRIAL, "eval_samples": samples}}
    return {**run, **changed}


def try_runs(
    plan: Plan,
    contents: Contents,
    *,
    on_message: OnMessage = ignore,
    run_trials: Callable[[MatrixDir], object] | None = None,
) -> None:
    """Train two steps of each shape of a matrix. Raises LaunchError if one cannot be trained.

    run_trials: trains the runs of a matrix, and returns when they have ended; None: on this machine.
    """
    runnable = [planned for planned in plan.runs if planned.name not in contents.skipped]
    alike: dict[object, list[str]] = {}
    for planned in runnable:
        alike.setdefault(shape_of(replace(planned.config.train, **TRIAL)), []).append(planned.name)
    shapes = {names[0]: names for names in alike.values()}
    on_message(f"preflight: two steps of {plural(len(shapes), 'shape')}, for {plural(len(runnable), 'run')}")
    trial = replace(
        contents,
        about={**contents.about, "verdict": as_json(VerdictRules())},
        runs={name: trial_of(contents.runs[name]) for name in shapes},
        skipped={},
        reuse=False,
    )
    with tempfile.TemporaryDirectory(prefix=".kmatrix_preflight_", dir=below_root(plan.config.results_dir)) as folder:
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
