"""The plan in matrix.json: what all runs share, and what each has besides it. `make add` alone replaces it.

So a look at 10,000 runs reads one file, a deleted folder of a run comes back, and only runs that are wanted get one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records.decode import Amount, Record, RunName, Scalar, decode, field
from kmatrix.records.files import write_json, write_text
from kmatrix.records.runs import VerdictRules

DIFFERING = ("symbols", "train")  # objects of run.json of which a run has only the entries that differ
OWN = ("run_id", "name", "axes", "expected_s", "selected")  # keys that are a run's own


class PlannedRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A run in matrix.json."""

    name: RunName
    run_id: str
    axes: dict[str, str] = field(default_factory=dict)  # label -> value
    symbols: dict[str, str] = field(default_factory=dict)  # that differ from the common ones
    train: dict[str, Scalar] = field(default_factory=dict)  # the same
    without: dict[str, tuple[str, ...]] = field(default_factory=dict)  # "symbols" or "train" -> what it does not have
    config: dict[str, str] = field(default_factory=dict)  # line of the common .config -> its line
    expected_s: Amount | None = None  # estimate of the plan
    selected: bool = False  # the rules of the verdict decide from losses whether it is executed


class Common(Record, frozen=True, kw_only=True):
    """The keys of run.json that all runs share."""

    symbols: dict[str, str] = field(default_factory=dict)
    train: dict[str, Scalar] = field(default_factory=dict)


class Plan(Record, frozen=True, kw_only=True):
    """What matrix.json says about its runs."""

    name: str = ""
    common: Common = Common()
    runs: tuple[PlannedRun, ...] = ()
    checkpoints: str = ""  # folder of the checkpoints of all runs; empty: each run has its own
    verdict: VerdictRules = field(default_factory=VerdictRules)

    def train_of(self, run: PlannedRun) -> dict[str, Scalar]:
        """Return the training fields of a run."""
        return merged(self.common.train, run.train, run.without.get("train", ()))

    def symbols_of(self, run: PlannedRun) -> dict[str, str]:
        """Return the effective symbols of a run."""
        return merged(self.common.symbols, run.symbols, run.without.get("symbols", ()))

    def checkpoints_of(self, matrix: Path, run: PlannedRun) -> Path:
        """Return the folder of the checkpoints of a run."""
        return Path(self.checkpoints) / run.name if self.checkpoints else matrix / run.name / "checkpoints"


def read_plan(matrix: Path) -> Plan:
    """Return the plan of a matrix. Raises RecordError if matrix.json is missing or damaged."""
    return decode(matrix / "matrix.json", Plan)


def merged(common: Mapping[str, Any], own: Mapping[str, Any], without: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a run: the common ones, less those that it does not have, with its own."""
    left = set(without)
    return {name: value for name, value in common.items() if name not in left} | dict(own)


def split(runs: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the values of run.json of all runs as those in common, and what differs: the form of matrix.json."""
    first = runs[0] if runs else {}
    common = {
        key: value for key, value in first.items() if key not in OWN and all(run.get(key) == value for run in runs)
    }
    for key in DIFFERING:
        shared = first.get(key, {}).items()
        common[key] = {name: value for name, value in shared if all(run[key].get(name, run) == value for run in runs)}
    found = []
    for run in runs:
        own = {key: value for key, value in run.items() if key not in common}
        for key in DIFFERING:
            own[key] = {name: value for name, value in run[key].items() if name not in common[key]}
        found.append(own)
    return common, found


def make_files(matrix: Path, name: str) -> None:
    """Write run.json and .config of a run, if they are missing. Raises RecordError without a plan of this run."""
    path = matrix / name
    if (path / "run.json").exists():
        return
    value = decode(matrix / "matrix.json", dict[str, Any])
    planned = next((run for run in value.get("runs", ()) if run.get("name") == name), None)
    if planned is None:
        raise RecordError(
            f"{matrix / 'matrix.json'} has no run {name}", hint="check the name: `make status` lists them"
        )
    common, without = value.get("common", {}), planned.get("without", {})
    whole = {**common, **{key: planned[key] for key in planned if key not in ("without", "config")}}
    for key in DIFFERING:
        whole[key] = merged(common.get(key, {}), planned.get(key, {}), without.get(key, ()))
    whole.pop("config", None)
    lines = (matrix / "config.txt").read_text(encoding="utf-8").split("\n") if (matrix / "config.txt").exists() else []
    own = planned.get("config", {})
    write_text(path / ".config", "\n".join(own.get(line, line) for line in lines))
    write_json(path / "run.json", {**whole, "matrix": value.get("name")})
