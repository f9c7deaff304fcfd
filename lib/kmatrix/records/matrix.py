"""The plan in matrix.json: what all runs share, and what each has besides it.

`make add` and `make continue NAME=value` replace it.

So a look at 10,000 runs reads one file, a deleted folder of a run comes back, and only runs that are wanted get one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records.decode import Amount, Count, Record, RunName, Scalar, UnixTime, convert, decode, field
from kmatrix.records.files import write_json, write_text
from kmatrix.records.runs import AxisEntry, ExcludedCells, Provenance, RunFile, Tracking, VerdictRules

LOCAL, SLURM, KUBERNETES = "local", "slurm", "kubernetes"  # values of ENGINE
TITLES = {LOCAL: "this machine", SLURM: "Slurm", KUBERNETES: "Kubernetes"}  # as users read them
INNER = ("symbols", "train")  # objects of run.json of which a run has only the entries that differ
CODE = "code"  # folder of a matrix with the sources of the trainer
MORE = "+"
SYMBOL = re.compile(r"(?:# )?CONFIG_(\w+)")
OWN = ("run_id", "name", "axes", "expected_s", "selected", "reused_from", "config")  # keys that are a run's own


class PlannedRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A run in matrix.json."""

    name: RunName
    run_id: str
    axes: dict[str, str] = field(default_factory=dict)  # label -> value
    symbols: dict[str, str | None] = field(default_factory=dict)  # that differ from the common ones; None: it has none
    train: dict[str, Scalar] = field(default_factory=dict)  # the same
    config: dict[str, str] = field(default_factory=dict)  # line of config.txt -> its own; MORE: lines besides these
    expected_s: Amount | None = None  # estimate of the plan
    train_tokens: Count | None = None  # in the training shards; None: as in the common values
    selected: bool = False  # the rules of the verdict decide from losses whether it is executed
    reused_from: str = ""  # <matrix>/<run> whose result this is


class Common(Record, frozen=True, kw_only=True):
    """The keys of run.json that all runs share."""

    symbols: dict[str, str] = field(default_factory=dict)
    train: dict[str, Scalar] = field(default_factory=dict)
    timeout_s: Amount = 0.0  # of an attempt; 0: no limit
    train_tokens: Count | None = None
    tracking: Tracking = field(default_factory=Tracking)


class Plan(Record, frozen=True, kw_only=True):
    """matrix.json: what was planned."""

    name: str = ""
    engine: str = LOCAL  # local, slurm or kubernetes
    created: UnixTime | None = None
    command: str = ""
    overrides: tuple[str, ...] = ()  # NAME=value, as typed
    equal: str = ""  # the budget that all runs share, as text
    axis_entries: tuple[AxisEntry, ...] = field(name="axes", default=())  # in the order of their expansion
    excluded: tuple[ExcludedCells, ...] = field(name="cuts", default=())  # cells: `count` and `reason`
    common: Common = Common()
    runs: tuple[PlannedRun, ...] = ()
    checkpoints: str | None = None  # folder of the checkpoints of all runs; None: each run has its own
    verdict: VerdictRules = field(default_factory=VerdictRules)
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Label -> values, in order."""
        return {axis.label: axis.values for axis in self.axis_entries}

    def train_of(self, run: PlannedRun) -> dict[str, Scalar]:
        """Return the training fields of a run."""
        return {**self.common.train, **run.train}

    def symbols_of(self, run: PlannedRun) -> dict[str, str]:
        """Return the effective symbols of a run."""
        return _present({**self.common.symbols, **run.symbols})

    def checkpoints_of(self, matrix: Path, run: PlannedRun) -> Path:
        """Return the folder of the checkpoints of a run."""
        return Path(self.checkpoints) / run.name if self.checkpoints else matrix / run.name / "checkpoints"


def read_plan(matrix: Path) -> Plan:
    """Return the plan of a matrix. Raises RecordError if matrix.json is missing or damaged."""
    return decode(matrix / "matrix.json", Plan)


def run_files(matrix: Path) -> dict[str, RunFile]:
    """Return run -> its run.json as planned, for all runs. Raises RecordError if matrix.json is missing or damaged."""
    value = decode(matrix / "matrix.json", dict[str, Any])
    common = value.get("common", {})
    return {
        run["name"]: convert(whole(common, run), RunFile, f"{matrix}: {run['name']}") for run in value.get("runs", ())
    }


def _present(symbols: Mapping[str, str | None]) -> dict[str, str]:
    return {name: text for name, text in symbols.items() if text is not None}


def whole(common: Mapping[str, Any], planned_run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run as `planned` was given them: those of its run.json, and `config`."""
    inner = {key: {**common.get(key, {}), **planned_run.get(key, {})} for key in INNER}
    return {**common, **planned_run, **inner, "symbols": _present(inner["symbols"])}


def make_files(matrix: Path, name: str) -> None:
    """Write run.json and .config of a run as planned now. Raises RecordError without a plan of this run."""
    value = decode(matrix / "matrix.json", dict[str, Any])
    found = next((run for run in value.get("runs", ()) if run.get("name") == name), None)
    if found is None:
        raise RecordError(f"{matrix / 'matrix.json'} has no run {name}", hint="`make status` lists them")
    write_files(matrix, value, found)


def write_files(matrix: Path, value: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Write run.json and .config of a run. value, run: of matrix.json, and its part of this run."""
    path, common = matrix / run["name"], matrix / "config.txt"
    lines = common.read_text(encoding="utf-8").split("\n") if common.exists() else []
    values = whole(value.get("common", {}), run)
    own = values.pop("config", {})
    write_text(path / ".config", "\n".join(own.get(line, line) for line in lines) + own.get(MORE, ""))
    write_json(path / "run.json", {**values, "matrix": value.get("name")})
