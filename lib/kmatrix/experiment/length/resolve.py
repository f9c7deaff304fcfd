"""Compute the steps of runs whose length a budget of time or money decides, before their matrix is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kmatrix.config import RunConfig, with_length
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.create import Creation, origin_of, train_fields
from kmatrix.experiment.length.earlier import EarlierRun, Key, Machine, earlier_runs, length_key, runs_of, speed_key
from kmatrix.experiment.length.pace import Pace, mean_pace, pace_of
from kmatrix.experiment.preflight import trials
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.packing import Limits, usable_cores
from kmatrix.plan.memory import warnings
from kmatrix.plan.risk import START_S
from kmatrix.records.jobs.files import LOCAL
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.train_config import TrainConfig, budget_s
from kmatrix.status.status_file import recover_status
from kmatrix.status.watch import RunProgress
from kmatrix.text import duration, first_names, plural

SHARE = 0.25  # of its budget that a calibration takes, at most
LEAST_S = 10.0  # seconds of a calibration, its set-up included
STEPS_SHARE, LEAST_STEPS_S, MOST_STEPS_S = 0.02, 10.0, 60.0  # of its steps: share of the budget, and bounds in seconds
ENOUGH = 5  # earlier runs that are averaged
FOREVER = 1_000_000  # steps: a calibration ends by its time


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How and where the speed of runs may be measured."""

    on_message: OnMessage = ignore
    on_progress: Callable[[RunProgress], None] | None = None
    on_note: Callable[[str], None] | None = None
    run_jobs: Callable[[MatrixDir], object] | None = None  # trains runs on the cluster of the plan
    in_jobs: bool = False  # the user has asked to try runs on the cluster first (PREFLIGHT)
    rendered: bool = False  # the user starts the runs: nothing can be measured
    steps: Mapping[str, int] = field(default_factory=dict)  # run -> its length, if it is given
    matrix: MatrixDir | None = None  # that the runs are added to: its lengths hold for them


@dataclass(frozen=True, slots=True)
class _Length:
    """The length of runs, and where it comes from."""

    steps: int
    source: str
    seconds: float | None = None  # expected; None: unknown


def resolve_lengths(made_from: Creation, gpus: Sequence[Gpu], measuring: Measuring) -> Creation:
    """Return the creation with the number of steps of each run whose length a budget decides.

    Runs that differ in seeds and rates alone get the same length. It is that of the matrix which they are added to, or
    of an earlier run that ended near the same budget; else it follows from the speed of earlier runs like them, or
    from a calibration. Raises ConfigError if a budget is too short, LaunchError if nothing can be measured.
    """
    shaped = {name: one for name, one in made_from.configs.items() if one.is_shaped and name not in made_from.skipped}
    if not shaped:
        return made_from
    runs = _Shaped(made_from, shaped)
    known = runs.given(measuring.steps)
    if measuring.matrix is not None:
        known |= runs.former(runs_of(measuring.matrix), f"as in {measuring.matrix.name}", finished=False)
    machine = Machine.of(runs.origin, any_code=_is_elsewhere(made_from, measuring))
    earlier = list(earlier_runs(made_from.results_dir, machine))
    known = runs.former(earlier, "", finished=True) | known
    paces = runs.paces(earlier, known)
    if missing := runs.without_pace(known, paces):
        _refuse_if_elsewhere(made_from, measuring, missing)
        paces |= _calibrated(made_from, gpus, measuring, runs, missing)
    lengths = {**runs.computed(known, paces), **known}
    _describe(runs, lengths, measuring.on_message)
    configs = {name: with_length(one, lengths[runs.lengths[name]].steps) for name, one in shaped.items()}
    for text in dict.fromkeys(text for one in configs.values() for text in warnings(one.train)):
        measuring.on_message(f"warning: {text}")
    seconds = {name: lengths[runs.lengths[name]].seconds for name in shaped}
    expected = {name: (each, lengths[runs.lengths[name]].source) for name, each in seconds.items() if each is not None}
    return replace(made_from, configs={**made_from.configs, **configs}, expected=expected)


class _Shaped:
    """The runs of a plan whose length is computed, grouped by what decides it."""

    def __init__(self, made_from: Creation, configs: Mapping[str, RunConfig]) -> None:
        self.configs, self.origin = configs, origin_of(made_from)
        self.fields: dict[str, Mapping[str, Any]] = {
            run.name: train_fields(run, made_from, self.origin["cores"])
            for run in made_from.plan.runs
            if run.name in configs
        }
        self.budgets = {name: _budget(one.train) for name, one in configs.items()}
        self.speeds = {name: speed_key(fields) for name, fields in self.fields.items()}
        self.lengths = {name: length_key(fields, self.budgets[name]) for name, fields in self.fields.items()}

    def given(self, steps: Mapping[str, int]) -> dict[Key, _Length]:
        return {self.lengths[name]: _Length(n, "as before") for name, n in steps.items() if name in self.configs}

    def former(self, runs: Sequence[EarlierRun] | Any, source: str, *, finished: bool) -> dict[Key, _Length]:
        """Return the lengths that earlier runs got from the same budget. source: as text, "": the name of the run."""
        wanted, found = set(self.lengths.values()), {}
        for run in runs:
            shaped = run.shaped_length(finished=finished)
            if shaped is not None and shaped[0] in wanted and shaped[0] not in found:
                found[shaped[0]] = _Length(shaped[1], source or f"as in {run.name}, which ended near this budget")
        return found

    def paces(self, earlier: Sequence[EarlierRun], known: Mapping[Key, _Length]) -> dict[Key, tuple[Pace, str]]:
        """Return the pace of each shape without a length that earlier runs have measured, and its source."""
        wanted = {self.speeds[name] for name in self.configs if self.lengths[name] not in known}
        found: dict[Key, list[tuple[Pace, str]]] = {}
        for run in earlier if wanted else ():
            key = speed_key(run.train)
            if key not in wanted or len(found.get(key, ())) == ENOUGH:
                continue
            pace = run.pace
            if pace is not None and pace.step_s > 0:
                found.setdefault(key, []).append((pace, run.name))
        return {
            key: (mean_pace([pace for pace, _ in some]), f"measured in {first_names(name for _, name in some)}")
            for key, some in found.items()
        }

    def without_pace(self, known: Mapping[Key, _Length], paces: Mapping[Key, Any]) -> dict[Key, list[str]]:
        """Return the shapes that are still to be measured, each with its runs that have no length yet."""
        found: dict[Key, list[str]] = {}
        for name, speed in self.speeds.items():
            if self.lengths[name] not in known and speed not in paces:
                found.setdefault(speed, []).append(name)
        return found

    def computed(self, known: Mapping[Key, _Length], paces: Mapping[Key, tuple[Pace, str]]) -> dict[Key, _Length]:
        """Return the lengths that follow from the paces. Raises ConfigError if a budget allows no step."""
        found: dict[Key, _Length] = {}
        for name, config in self.configs.items():
            key = self.lengths[name]
            if key in known or key in found:
                continue
            pace, source = paces[self.speeds[name]]
            budget = self.budgets[name]
            steps = pace.steps_within(config.train, pace.target_s(budget))
            if steps < 1:
                raise _too_short(name, config.train, budget, pace)
            found[key] = _Length(steps, f"{source}: {pace.describe()}", pace.seconds(config.train, steps))
        return found


def _budget(train: TrainConfig) -> float:
    seconds = budget_s(train)
    if seconds is None:
        raise ValueError("a run without a budget has a length of its own")
    return seconds


def _is_elsewhere(made_from: Creation, measuring: Measuring) -> bool:
    return made_from.engine != LOCAL or measuring.rendered


def _refuse_if_elsewhere(made_from: Creation, measuring: Measuring, missing: Mapping[Key, Sequence[str]]) -> None:
    """Raise LaunchError if these runs cannot be measured from here."""
    if not _is_elsewhere(made_from, measuring):
        return
    if measuring.run_jobs is not None and measuring.in_jobs and not measuring.rendered:
        return
    names = [name for group in missing.values() for name in group]
    where = "RENDER= leaves the start of runs to you" if measuring.rendered else f"ENGINE={made_from.engine} runs later"
    measure = "" if measuring.rendered else "pass PREFLIGHT=y to measure it in a job first; or "
    raise LaunchError(
        f"the length of {first_names(names)} is not known: MAX_ITERS=0 computes it from a measured speed",
        why=f"{where}, and no earlier run like it on these nodes is in RESULTS_DIR",
        hint=f"{measure}set the length with MAX_ITERS=<steps>",
    )


def _calibrated(
    made_from: Creation,
    gpus: Sequence[Gpu],
    measuring: Measuring,
    runs: _Shaped,
    missing: Mapping[Key, Sequence[str]],
) -> dict[Key, tuple[Pace, str]]:
    """Train a few steps of each shape, and return the pace of each."""
    # As many runs of a shape at the same time as the matrix will have, because they slow each other down.
    chosen = {key: list(names[: _at_once(made_from, runs, names[0])]) for key, names in missing.items()}
    configs = {
        name: calibration_config(made_from.configs[name], runs.budgets[name])
        for some in chosen.values()
        for name in some
    }
    longest = max(config.train.max_time or 0.0 for config in configs.values())
    measuring.on_message(
        f"calibration: {plural(len(chosen), 'shape')}, {plural(len(configs), 'run')} of about {duration(longest)}, "
        "for the number of steps"
    )
    found: dict[Key, tuple[Pace, str]] = {}
    with trials(
        made_from,
        configs,
        gpus,
        on_progress=measuring.on_progress,
        on_note=measuring.on_note,
        run_jobs=measuring.run_jobs,
    ) as matrix:
        for key, names in chosen.items():
            paces = []
            for name in names:
                run = matrix.run(name)
                state = recover_status(run, has_runner=False)
                pace = pace_of(run, retried=True)
                if state.status is not Status.FINISHED or pace is None:
                    raise _failed(name, state.reason or "it ended before two steps were measured")
                paces.append(pace)
            found[key] = mean_pace(paces), "measured in a calibration"
    return found


def _failed(name: str, reason: str) -> LaunchError:
    return LaunchError(
        f"the calibration of {name} failed; nothing was started",
        why=reason,
        hint="change the configuration, or set the length with MAX_ITERS=<steps>",
    )


def calibration_config(config: RunConfig, budget: float) -> RunConfig:
    """Return a configuration that trains for a part of the budget (s), and does at its end what the run will do."""
    train = config.train
    steps_s = min(MOST_STEPS_S, max(LEAST_STEPS_S, STEPS_SHARE * budget))
    seconds = max(LEAST_S, min(SHARE * budget, START_S[train.device] + steps_s))
    saves = train.save_best or train.checkpoint_interval or train.checkpoint_minutes or train.keep_weights_every
    changes: dict[str, Any] = {
        **{"max_iters": FOREVER, "max_time": seconds, "max_cost": None, "length_from": ""},
        # A long warm-up: rates stay near 0, so nothing diverges.
        **{"warmup_steps": FOREVER - 1, "warmup_fraction": None, "early_stopping_patience": 0, "profile": ""},
        **{"eval_interval": FOREVER, "checkpoint_interval": 0, "keep_every": 0, "keep_weights_every": 0},
        "checkpoint_minutes": seconds / 240 if saves else 0.0,  # about two, apart from the last one
    }
    for interval in ("hellaswag_interval", "core_interval", "sample_interval"):
        if getattr(train, interval):
            changes[interval] = FOREVER
    if train.pruning != "none":
        changes |= {"pruning_warmup": 0.0, "pruning_ramp_end": 1.0}
    return replace(config, train=replace(train, **changes))


def _at_once(made_from: Creation, runs: _Shaped, name: str) -> int:
    """Return how many runs of the shape of this one will train at the same time."""
    train = runs.configs[name].train
    cuda = train.device == "cuda"
    limit = Limits.of(made_from.texts[name].values).on(gpus=cuda).jobs
    threads = 1 if cuda else int(runs.fields[name]["cpu_threads"])
    units = len(made_from.gpus) if cuda else usable_cores()
    fitting = max(1, units // (train.num_gpus * threads)) if made_from.nodes is None else 1
    return min(fitting, limit) if limit else fitting


def _too_short(name: str, train: TrainConfig, budget: float, pace: Pace) -> ConfigError:
    least = pace.seconds(train, 1)
    symbol = (train.length_from or "max_time").upper()
    return ConfigError(
        f"{symbol} of {name} allows no step: {duration(budget)}",
        why=f"start, evaluations and end take about {duration(least)}",
        hint=f"pass {symbol}={_enough(train, least)}, or more",
    )


def _enough(train: TrainConfig, least: float) -> str:
    """Return a budget that is twice as long as a run of one step."""
    budget = _budget(train)
    if train.length_from == "max_cost" and train.max_cost is not None:
        return f"{2 * least / budget * train.max_cost:.2g}"
    return f"{round(2 * least) or 1}s"


def _describe(runs: _Shaped, lengths: Mapping[Key, _Length], on_message: OnMessage) -> None:
    """Report the length of each group of runs."""
    groups: dict[Key, list[str]] = {}
    for name, key in runs.lengths.items():
        groups.setdefault(key, []).append(name)
    for key, names in groups.items():
        length, train = lengths[key], runs.configs[names[0]].train
        limit = f"MAX_COST=${train.max_cost:g}" if train.length_from == "max_cost" else "MAX_TIME"
        about = "" if length.seconds is None else f" in about {duration(length.seconds)}"
        on_message(
            f"length: {first_names(names)}: {length.steps:,} steps{about}, by {limit} "
            f"({duration(runs.budgets[names[0]])}); {length.source}"
        )
