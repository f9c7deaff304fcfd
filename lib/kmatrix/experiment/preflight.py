"""Train two steps of each shape of a matrix before it starts, and suggest how to leave out runs that fail."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from kmatrix.config import RunConfig
from kmatrix.errors import LaunchError
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.create import Creation, create
from kmatrix.experiment.plan import shape_of
from kmatrix.matrix.expand import Run
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRuns:
    """Runs of one shape that fail, with the reason."""

    names: tuple[str, ...]
    reason: str


def trial_config(config: RunConfig) -> RunConfig:
    """Return a configuration for the trial: two steps, one evaluation, nothing saved."""
    train = config.train
    # A ramp over the whole trial, so that its two steps prune.
    ramp = RAMP if train.pruning != "none" else {}
    # One micro-batch per rank: the memory of an evaluation does not depend on the number of samples.
    samples = min(train.eval_samples, train.batch_size * train.num_gpus)
    return replace(config, train=replace(train, **TRIAL, **ramp, eval_samples=samples))


def by_shape(configs: Mapping[str, RunConfig]) -> dict[str, tuple[str, ...]]:
    """Return the first run of each shape -> all runs of that shape."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name, config in configs.items():
        found.setdefault(shape_of(trial_config(config).train), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def advice(runs: Sequence[Run], bad: Sequence[FailedRuns]) -> str:
    """Return the arguments that leave out failed runs, "" if they have no axes.

    A value that fails in every run is removed from its axis; other failed runs become exclusions.
    """
    points = {run.name: {point.axis: point.text for point in run.points if point.swept} for run in runs}
    failed = {name: group.reason for group in bad for name in group.names}
    words = []
    for axis in dict.fromkeys(axis for one in points.values() for axis in one):
        values = dict.fromkeys(one[axis] for one in points.values() if axis in one)
        # A value is good if any run with it trains.
        good = [text for text in values if any(points[name].get(axis) == text for name in points.keys() - failed)]
        if good and len(good) < len(values):
            words.append(f"{axis.removeprefix('GPT2_')}={','.join(good)}")
            failed = {name: why for name, why in failed.items() if points[name].get(axis) in good}
    rules = "; ".join(f"{_words(points[name])}: {_plain(reason)}" for name, reason in failed.items() if points[name])
    return " ".join([*words, *([f'MATRIX_EXCLUDE="{rules}"'] if rules else [])])


def _words(points: Mapping[str, str]) -> str:
    return " ".join(f"{axis.removeprefix('GPT2_')}={text}" for axis, text in points.items())


def _plain(reason: str) -> str:
    """Return a reason without the characters that separate rules."""
    words = reason.split(":", maxsplit=1)[0].replace(";", ",").replace('"', "").strip()
    return words if len(words) <= 60 else words[:57] + "..."


FOLDER = ".kmatrix_preflight_"  # followed by host and pid of its owner


def try_runs(
    planned: Creation, *, on_message: OnMessage = ignore, run_trials: Callable[[MatrixDir], object] | None = None
) -> None:
    """Train two steps of each shape of a matrix. Raises LaunchError if one cannot be trained.

    A run that only needs a smaller micro-batch is reported, and is not a failure.
    run_trials: trains the runs of a matrix, and returns when they have ended; None: on this machine.
    """
    runnable = {name: config for name, config in planned.configs.items() if name not in planned.skipped}
    shapes = by_shape(runnable)
    on_message(f"preflight: two steps of {plural(len(shapes), 'shape')}, for {plural(len(runnable), 'run')}")
    with _folder(planned.results_dir) as folder:
        trial = replace(
            planned,
            plan=replace(planned.plan, runs=tuple(run for run in planned.plan.runs if run.name in shapes)),
            configs={name: trial_config(runnable[name]) for name in shapes},
            results_dir=folder,
            checkpoint_dir=None,
            skipped={},
            tracking=Tracking(),
            verdict=VerdictRules(),  # a trial answers no question about losses
            neutral=None,
        )
        matrix = create(trial)
        if run_trials is not None:
            run_trials(matrix)
        elif train(matrix.path) == EXIT[Status.STOPPED]:
            raise KeyboardInterrupt
        bad = _failures(matrix, shapes, on_message)
    if bad:
        raise _refusal(planned, bad)


def _failures(matrix: MatrixDir, shapes: Mapping[str, tuple[str, ...]], on_message: OnMessage) -> list[FailedRuns]:
    """Return the trial runs that failed, each with all runs of its shape."""
    bad = []
    for name, state in look(matrix.path).states.items():
        if state.status is not Status.FINISHED:
            bad.append(FailedRuns(names=shapes[name], reason=state.reason or "its job ended before it began"))
        elif batch := state.attempts[-1].micro_batch:
            on_message(f"preflight: {', '.join(shapes[name])}: fits with a micro-batch of {batch}")
    return bad


def _refusal(planned: Creation, bad: Sequence[FailedRuns]) -> LaunchError:
    count = sum(len(group.names) for group in bad)
    words, fail = advice(planned.plan.runs, bad), "fails" if count == 1 else "fail"
    return LaunchError(
        f"preflight: {count} of {plural(len(planned.configs), 'run')} {fail}; nothing was started",
        why="; ".join(f"{', '.join(group.names)}: {group.reason}" for group in bad),
        hint=f"change them, or leave them out with {words}" if words else "change the configuration",
    )


@contextmanager
def _folder(results_dir: Path) -> Iterator[Path]:
    """Make a temporary directory, and remove those of processes that were killed."""
    for left in results_dir.glob(FOLDER + "*"):
        host, _, owner = left.name.removeprefix(FOLDER).rpartition("_")
        # Left by a process that was killed; the directories of living processes are in use, and of other hosts
        # nobody here knows whether they live.
        if host == socket.gethostname() and owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    folder = results_dir / f"{FOLDER}{socket.gethostname()}_{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
