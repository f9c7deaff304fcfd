"""Earlier runs that tell the speed of a new one, or the length that an equal budget gave: same shape, same machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.errors import KmatrixError
from kmatrix.experiment.length.pace import Pace, pace_of
from kmatrix.experiment.preflight import NUMBERS, TRIAL
from kmatrix.records.paths import MatrixDir, RunDir, matrix_dirs
from kmatrix.records.runs import Provenance, RunFile, read_result, read_run_file, read_train_values
from kmatrix.records.train_config import TrainConfig, budget_s, with_added

MATRICES, RUNS = 20, 200  # the newest ones that are read: a plan must not read thousands of files
ON_TIME = 0.10  # of the budget: a length that missed it by more is not taken again
Key = tuple[tuple[str, Any], ...]

# Fields that do not change the time of a step, of the set-up or of an evaluation: where files are, how often the run is
# saved and evaluated, and what it may cost.
_PLACES = ("data_path", "data_sha256", "data_shards", "init_from", "init_sha256", "length_from")
_OFTEN = (
    *("eval_interval", "hellaswag_interval", "core_interval", "sample_interval"),
    *("checkpoint_interval", "checkpoint_minutes"),
)
_SAVED = ("save_checkpoint", "save_best", "keep_weights_every")
_STOPS = ("machine_hour_price", "early_stopping_patience", "stall_factor", "stall_floor", "profile")
_LENGTH = ("max_iters", "warmup_steps", "warmup_fraction", "max_time", "max_cost", "max_tokens", "max_epochs")
NOT_SPEED = frozenset(NUMBERS) | {*_PLACES, *_OFTEN, *_SAVED, *_STOPS, *_LENGTH, "tokens_per_param"}
assert set(TRIAL) - NOT_SPEED <= {"hellaswag", "core", "log_interval"}  # these change what a step or the end costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties that an earlier run has to share: times elsewhere say little about times here."""

    hardware: tuple[Any, ...]  # processor, cores and GPU models
    torch: str | None
    code: str | None  # of the trainer; None: any, where nothing can be measured

    @classmethod
    def of(cls, about: Provenance, *, any_code: bool = False) -> Machine:
        """Return the machine of a run."""
        models = {str(gpu.get("name", "")) for gpu in about.get("gpus") or []}
        versions = about.get("versions") or {}
        code = None if any_code else about.get("code")
        hardware = (about.get("cpu"), about.get("cores"), tuple(sorted(models)))
        return cls(hardware=hardware, torch=versions.get("torch"), code=code)


def speed_key(train: Mapping[str, Any]) -> Key:
    """Return the fields that decide the time of a step. train: all fields of "train" in a run.json."""
    known = with_added(train)
    return tuple((name, known.get(name)) for name in TrainConfig.names() if name not in NOT_SPEED)


def length_key(train: Mapping[str, Any], budget: float) -> Key:
    """Return the fields that decide the length of a run, with its budget (s): not the seed, and no rate."""
    known = with_added(train)
    return (*speed_key(train), *((name, known.get(name)) for name in (*_OFTEN, *_SAVED)), ("budget_s", budget))


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """A run that was planned for this machine."""

    run: RunDir
    train: Mapping[str, Any]
    record: RunFile

    @property
    def name(self) -> str:
        return f"{self.run.path.parent.name}/{self.run.name}"

    @property
    def pace(self) -> Pace | None:
        return pace_of(self.run)

    def shaped_length(self, *, finished: bool) -> tuple[Key, int] | None:
        """Return the key and the steps of a run whose length was computed; None for others.

        finished: only of one that has ended near its budget.
        """
        steps, budget = self.record.train.max_iters, budget_s(self.record.train)
        if not self.record.train.length_from or not steps or budget is None:
            return None
        if finished:
            result = read_result(self.run)
            on_time = result is not None and result.step == steps and result.spent_s is not None
            if not on_time or result is None or abs((result.spent_s or 0.0) / budget - 1) > ON_TIME:
                return None
        return length_key(self.train, budget), steps


def earlier_runs(results_dir: Path, machine: Machine) -> Iterator[EarlierRun]:
    """Yield the newest runs of a results directory that were planned for this machine, the newest first."""
    newest = itertools.islice(reversed(matrix_dirs(results_dir)), MATRICES)
    runs = itertools.islice((run for matrix in newest for run in _runs(matrix)), RUNS)
    return (found for found in _read(runs) if _is_like(machine, found.record.provenance))


def runs_of(matrix: MatrixDir) -> Iterator[EarlierRun]:
    """Yield the runs of a matrix."""
    return _read(_runs(matrix))


def _is_like(machine: Machine, about: Provenance) -> bool:
    return machine == Machine.of(about, any_code=machine.code is None)


def _read(runs: Iterable[RunDir]) -> Iterator[EarlierRun]:
    for run in runs:
        try:
            yield EarlierRun(run=run, train=read_train_values(run), record=read_run_file(run))
        except KmatrixError:  # of any matrix: an unreadable or newer run is skipped
            continue


def _runs(matrix: MatrixDir) -> list[RunDir]:
    try:
        return matrix.runs()
    except KmatrixError:
        return []
