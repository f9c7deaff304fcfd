"""The plan in matrix.json: what all runs share, and what each has besides it. `make add` alone replaces it.

So a look at 10,000 runs reads one file, a deleted folder of a run comes back, and only runs that are wanted get one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records.decode import Amount, Count, Record, RunName, Scalar, UnixTime, convert, decode, field
from kmatrix.records.files import write_json, write_text
from kmatrix.records.runs import AxisEntry, ExcludedCells, Provenance, RunFile, Tracking, VerdictRules

LOCAL, SLURM, KUBERNETES = "local", "slurm", "kubernetes"  # values of ENGINE
TITLES = {LOCAL: "this machine", SLURM: "Slurm", KUBERNETES: "Kubernetes"}  # as users read them
DIFFERING = ("symbols", "train")  # objects of run.json of which a run has only the entries that differ
CODE = "code"  # folder of a matrix with the sources of the trainer
MORE = "+"
SYMBOL = re.compile(r"(?:# )?CONFIG_(\w+)")
OWN = ("run_id", "name", "axes", "expected_s", "selected", "reused_from")  # keys that are a run's own


class PlannedRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A run in matrix.json."""

    name: RunName
    run_id: str
    axes: dict[str, str] = field(default_factory=dict)  # label -> value
    symbols: dict[str, str] = field(default_factory=dict)  # that differ from the common ones
    train: dict[str, Scalar] = field(default_factory=dict)  # the same
    without: dict[str, tuple[str, ...]] = field(default_factory=dict)  # "symbols" or "train" -> what it does not have
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
    engine: str = LOCAL
    created: UnixTime | None = None
    command: str = ""
    overrides: tuple[str, ...] = ()  # NAME=value, as typed
    equal: str = ""  # the budget that all runs share, as text
    axis_entries: tuple[AxisEntry, ...] = field(name="axes", default=())
    excluded: tuple[ExcludedCells, ...] = field(name="cuts", default=())
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


def run_files(matrix: Path) -> dict[str, RunFile]:
    """Return run -> its run.json as planned, for all runs. Raises RecordError if matrix.json is missing or damaged."""
    value = decode(matrix / "matrix.json", dict[str, Any])
    common = value.get("common", {})
    return {
        run["name"]: convert(whole(common, run), RunFile, f"{matrix}: {run['name']}") for run in value.get("runs", ())
    }


def merged(common: Mapping[str, Any], own: Mapping[str, Any], without: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a run: the common ones, less those that it does not have, with its own."""
    if left := set(without):
        common = {name: value for name, value in common.items() if name not in left}
    return {**common, **own}


def common_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the values of run.json of all runs share. Those of `symbols` and `train` are compared one by one."""
    first = runs[0] if runs else {}
    shared = {key: value for key, value in first.items() if key not in OWN and _all_have(runs, key, value)}
    for key in DIFFERING:
        inner = [run.get(key, {}) for run in runs]
        shared[key] = {name: value for name, value in first.get(key, {}).items() if _all_have(inner, name, value)}
    return shared


def _all_have(runs: Sequence[Mapping[str, Any]], key: str, value: object) -> bool:
    return all(key in run and run[key] == value for run in runs)


def planned(common: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as matrix.json has it: its values of run.json that differ from the common ones."""
    own = {key: value for key, value in run.items() if key in OWN or key not in common or common[key] != value}
    lacks = {}
    for key in DIFFERING:
        mine, shared = run.get(key, {}), common.get(key, {})
        own[key] = {name: value for name, value in mine.items() if name not in shared or shared[name] != value}
        lacks[key] = [name for name in shared if name not in mine]
    return own | {"without": {key: names for key, names in lacks.items() if names}}


def whole(common: Mapping[str, Any], planned_run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of run.json of a run, as `planned` was given them."""
    own = {key: value for key, value in planned_run.items() if key not in ("without", "config")}
    without = planned_run.get("without", {})
    inner = {key: merged(common.get(key, {}), own.get(key, {}), without.get(key, ())) for key in DIFFERING}
    return {**common, **own, **inner}


def make_files(matrix: Path, name: str) -> None:
    """Write run.json and .config of a run, if they are missing. Raises RecordError without a plan of this run."""
    path = matrix / name
    if (path / "run.json").exists():
        return
    value = decode(matrix / "matrix.json", dict[str, Any])
    found = next((run for run in value.get("runs", ()) if run.get("name") == name), None)
    if found is None:
        raise RecordError(
            f"{matrix / 'matrix.json'} has no run {name}", hint="check the name: `make status` lists them"
        )
    common = matrix / "config.txt"
    lines = common.read_text(encoding="utf-8").split("\n") if common.exists() else []
    own = found.get("config", {})
    write_text(path / ".config", "\n".join(own.get(line, line) for line in lines) + own.get(MORE, ""))
    write_json(path / "run.json", {**whole(value.get("common", {}), found), "matrix": value.get("name")})


def config_lines(common: str, own: str) -> dict[str, str]:
    """Return how the text of a .config differs from the common one, as `make_files` takes it."""
    theirs, ours = common.split("\n"), own.split("\n")
    gone, new = set(theirs).difference(ours), set(ours).difference(theirs)
    named = {name[1]: line for line in ours if line in new and (name := SYMBOL.match(line))}
    found = {line: named.pop(name[1], "") for line in theirs if line in gone and (name := SYMBOL.match(line))}
    more = [line for line in ours if line in named.values()]
    return found | ({MORE: "\n".join([*more, ""])} if more else {})
