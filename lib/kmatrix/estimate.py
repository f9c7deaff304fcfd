"""How long runs still take: by their own steps, by runs like them, by their operations; and all of them, packed.

Pure: files are read elsewhere. Seconds of a run to come contain its start and its evaluations, since they are taken
from whole runs; of a run that goes on, the steps and the evaluations that remain are counted apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kmatrix.packing import Job, Limits, ends
from kmatrix.shapes import ModelShape

SHAPE = ("model", "n_layer", "n_embd", "block_size", "global_batch", "num_gpus", "device", "dtype")
GUESS = {"cuda": 50e12, "cpu": 50e9}  # operations a second of a GPU or core: for the order of runs, never shown
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"  # phases, as the trainer writes them
PERIODS = {EVALUATION: "eval_interval", CHECKPOINT: "checkpoint_interval"}


class Source(StrEnum):
    """What a time is taken from, the best first."""

    OWN = "its own steps"
    MATRIX = "runs like it here"
    EARLIER = "earlier runs like it"
    FLOPS = "its operations"
    PLAN = "the plan"


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that took so many seconds for so many steps, all in all. train: of its run.json."""

    train: Mapping[str, Any]
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class Expected:
    """How long something takes, in seconds, and how that is known."""

    seconds: float
    source: Source


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch without training. begin, end: Unix seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is left of one run. seconds: of it, None where that is not known.  width: GPUs or cores."""

    name: str
    width: int
    cuda: bool
    running: bool
    seconds: float | None


def whole_run(
    train: Mapping[str, Any], here: Sequence[Measured], earlier: Sequence[Measured], planned_s: float | None = None
) -> Expected | None:
    """Return how long a run takes from its start to its end, None where nothing is known of it.

    here, earlier: finished runs of this matrix and of former ones on this machine.  planned_s: what the plan said,
    which counts as long as nothing was measured.
    """
    steps, planned = train.get("max_iters"), None if planned_s is None else Expected(planned_s, Source.PLAN)
    if not isinstance(steps, int):
        return planned
    for runs, source in ((here, Source.MATRIX), (earlier, Source.EARLIER)):
        alike = [run for run in runs if _shape(run.train) == _shape(train)]
        same = [run for run in alike if run.train.get("optimizer") == train.get("optimizer")]
        if alike:
            return Expected(steps * statistics.median(run.seconds / run.steps for run in same or alike), source)
    speeds = [_speed(run) for run in (*here, *earlier) if _kind(run.train) == _kind(train)]
    known, work = [speed for speed in speeds if speed], operations(train)
    if not known or not work:
        return planned
    return Expected(work / statistics.median(known), Source.FLOPS)


def guess(train: Mapping[str, Any]) -> float | None:
    """Return seconds that tell long runs from short ones where nothing was measured: for their order only."""
    work = operations(train)
    return None if work is None else work / GUESS.get(str(train.get("device")), GUESS["cpu"])


def operations(train: Mapping[str, Any]) -> float | None:
    """Return the floating-point operations of each GPU or core in a whole run, None where the record is incomplete."""
    try:
        shape = ModelShape(
            **{name: train[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")},
            bias=bool(train.get("bias", True)),
            weight_tying=bool(train.get("weight_tying", True)),
        )
        tokens = int(train["max_iters"]) * int(train["global_batch"]) * shape.block_size
        threads = int(train.get("cpu_threads") or 1) if train.get("device") == "cpu" else 1
        return shape.flops_per_token * tokens / (int(train["num_gpus"]) * threads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def rest_of_run(
    first: tuple[int, float], last: tuple[int, float], phases: Sequence[Phase], train: Mapping[str, Any], now: float
) -> float | None:
    """Return the seconds until the end of a run that goes on, None before it has shown a pace.

    first, last: step and Unix seconds of the first and the newest line of training of this attempt.
    phases: of this attempt. The pace of the steps is taken without them, and those to come are added.
    """
    (from_step, since), (step, at) = first, last
    steps = train.get("max_iters")
    if step <= from_step or not isinstance(steps, int):
        return None
    within = sum(
        min(phase.end, at) - max(phase.begin, since) for phase in phases if phase.begin < at > since < phase.end
    )
    pace = max(0.0, at - since - within) / (step - from_step)
    left = pace * (steps - 1 - step)
    for name, period in PERIODS.items():
        seen = [phase.end - phase.begin for phase in phases if phase.name == name]
        count = _to_come(step, steps, train.get(period))
        left += count * statistics.median(seen) if seen else 0.0
    spent = max(0.0, now - at)
    return max(0.0, left - spent)


def ends_of(runs: Sequence[Rest], *, gpus: int, cores: int, limits: Limits) -> Mapping[str, tuple[float, float]] | None:
    """Return run -> seconds from now until its start and its end, as the launcher packs them; None: not known.

    Runs on GPUs and runs on the CPU are not beside each other: the kind that runs now, or stands first, goes first.
    """
    found: dict[str, tuple[float, float]] = {}
    kinds = list(dict.fromkeys(run.cuda for run in sorted(runs, key=lambda run: not run.running)))
    after = 0.0
    for cuda in kinds:
        units = gpus if cuda else cores
        jobs = [(run, Job(name=run.name, width=run.width, seconds=run.seconds)) for run in runs if run.cuda == cuda]
        if any(job.width > units for _, job in jobs):
            return None  # not on this machine
        queue, running = ([job for run, job in jobs if run.running is now] for now in (False, True))
        known = ends(queue, running, units, limits.on(gpus=cuda))
        if known is None:
            return None
        found |= {name: (after + begin, after + end) for name, (begin, end) in known.items()}
        after = max(end for _, end in found.values())
    return found


def _shape(train: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides the time of a step, beside the optimizer."""
    return tuple(train.get(name) for name in SHAPE)


def _kind(train: Mapping[str, Any]) -> tuple[Any, ...]:
    return train.get("device"), train.get("dtype")


def _speed(run: Measured) -> float | None:
    """Operations a second of each GPU or core of a run that was measured."""
    work, steps = operations(run.train), run.train.get("max_iters")
    if work is None or not steps:
        return None
    return work * run.steps / int(steps) / run.seconds


def _to_come(step: int, steps: int, period: object) -> int:
    """How often something is done behind `step`: at each multiple of its period, and at the end."""
    if not isinstance(period, int) or period < 1:
        return 1
    return steps // period - step // period + bool(steps % period)
