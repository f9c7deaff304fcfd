"""Make the directories of a matrix and its runs, with everything that is needed to reproduce them."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kmatrix.clock import clock
from kmatrix.config import RunConfig, cpu_threads, environment
from kmatrix.errors import LaunchError, is_full, reason_of
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.inputs.benchmarks import benchmark_files
from kmatrix.experiment.inputs.data import Key, key
from kmatrix.experiment.inputs.initial import InitialWeights, initial_fields
from kmatrix.experiment.provenance import Code, code_of, copy_code, provenance, secret_variables
from kmatrix.experiment.reuse import reuse_runs
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.matrix.expand import Matrix, Run
from kmatrix.plan.feasibility import detected, expected_seconds, middle_mfu
from kmatrix.records.checkpoint_dir import check_own_files
from kmatrix.records.control import Request, change
from kmatrix.records.dataset import Dataset, sha256_of_reading
from kmatrix.records.decode import as_json, replaced
from kmatrix.records.files import read_json, sync_folder, write_json, write_text
from kmatrix.records.matrix import CODE, INNER, LOCAL, MORE, OWN, SYMBOL
from kmatrix.records.paths import ROOT, STAGED, MatrixDir, next_path
from kmatrix.records.runs import Provenance, Tracking, VerdictRules
from kmatrix.redaction.redactor import redact
from kmatrix.text import shortened

# Characters of the command in each run.json: with thousands of values of an axis, each of thousands of runs would list
# all of them. matrix.json has the whole command.
MOST_COMMAND = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RunText:
    """The configuration of one run as text."""

    config: str  # .config
    values: Mapping[str, str]  # effective values
    asked: tuple[str, ...] = ()  # symbols and choices that were asked for; the others have their defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """Everything that a matrix directory is made from."""

    plan: Matrix
    configs: Mapping[str, RunConfig]
    texts: Mapping[str, RunText]
    data: Mapping[Key, Dataset]
    data_dir: Path
    skipped: Mapping[str, str]  # run -> why it cannot run here
    gpus: tuple[Gpu, ...]  # GPUs of this machine that runs may use
    results_dir: Path
    checkpoint_dir: Path | None  # None: checkpoints are saved in the run directories
    timeout_s: int
    root: Path
    config_text: str
    command: str
    overrides: tuple[str, ...]
    equal: str = ""  # the budget that all runs share, as text
    verdict: VerdictRules = field(default_factory=VerdictRules)  # how the losses will be compared
    tracking: Tracking = field(default_factory=Tracking)
    engine: str = LOCAL
    nodes: Nodes | None = None  # of the cluster that executes the runs; None: this machine does
    code: Path = ROOT  # folder with the sources of the trainer: the checkout, or those of a matrix that is reproduced
    # Fields that cannot change a result, if runs that have finished in other matrices are reused; None: they are not.
    neutral: frozenset[str] | None = None
    expected: Mapping[str, float | None] = field(default_factory=dict)  # time (s) of runs on a cluster
    initial: Mapping[str, InitialWeights] = field(default_factory=dict)  # by the text of INIT_FROM


def create(made_from: Creation, on_message: OnMessage = ignore) -> MatrixDir:
    """Make the directory of a matrix, and return it. The folder of a run is made when somebody takes the run.

    on_message: called with each note.
    """
    staged, path = _stage(made_from.results_dir)
    folder = None
    try:  # complete, or not there
        with _full_disk_named(path):
            folder = new_folder(made_from.checkpoint_dir, path) if made_from.checkpoint_dir else None
            _write(staged, path, folder, made_from, on_message)
            sync_folder(staged.path)
            staged.path.rename(path)
            sync_folder(path.parent)
    except BaseException:  # a full disk, Ctrl+C: nothing refers to these files
        shutil.rmtree(staged.path, ignore_errors=True)
        if folder and not path.exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return MatrixDir(path)


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Turn the error of a full disk into a LaunchError. path: of the matrix."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        hint = "free some space, then run it again"
        raise LaunchError(f"cannot write {path}", why=str(error.strerror), hint=hint) from error


def add_to(matrix: MatrixDir, made_from: Creation, on_message: OnMessage = ignore) -> None:
    """Add runs to a matrix. made_from: of these runs only."""
    with _full_disk_named(matrix.path):
        check_own_files(matrix)
        record = read_json(matrix.matrix_json)
        code, planned_code = code_of(made_from.root, made_from.code), record["provenance"]["code"]
        if code.sha256 != planned_code:
            on_message(
                "note: the trainer's code has changed since this matrix was made; its new runs train that of the "
                "matrix (`make continue CODE=checkout` takes the present one)"
            )
        origin: Provenance = {**_origin(code, made_from), "code": planned_code}
        more = _matrix_json(record["name"], None, made_from, origin)
        records = _reused(matrix, _records(made_from, origin), made_from, on_message)
        runs = _planned(record["common"], matrix.config.read_text(encoding="utf-8"), records, made_from)
        changed = {name: more[name] for name in ("axes", "overrides", "verdict")}
        write_json(matrix.matrix_json, {**record, **changed, "runs": [*record["runs"], *runs]})
        _skip(matrix, made_from)


def _write(staged: MatrixDir, path: Path, folder: Path | None, made_from: Creation, on_message: OnMessage) -> None:
    """Write the files of a matrix. path: that it will have.  folder: of its checkpoints."""
    code = code_of(made_from.root, made_from.code)
    for variable in secret_variables(os.environ):
        on_message(f"warning: not recorded: the environment variable {variable}, whose value may be a key")
    origin = _origin(code, made_from)
    write_text(staged.config, made_from.config_text)
    copy_code(made_from.code, code, staged.path / CODE)
    records = _reused(staged, _records(made_from, origin), made_from, on_message)
    common = common_of(list(records.values()))
    runs = _planned(common, made_from.config_text, records, made_from)
    place = {"place": str(path.resolve())}
    about = _matrix_json(path.name, folder, made_from, origin)
    write_json(staged.matrix_json, {**about, **place, "common": common, "runs": runs})
    _skip(staged, made_from)


def _origin(code: Code, made_from: Creation) -> Provenance:
    """Return the provenance of a matrix."""
    origin = provenance(code, made_from.command, made_from.gpus)
    return made_from.nodes.provenance(origin) if made_from.nodes else origin


def _records(made_from: Creation, origin: Provenance) -> dict[str, dict[str, Any]]:
    """Return run -> what its run.json will have."""
    # Redacted before it is cut: the half of a key would not be recognized.
    short: Provenance = {**origin, "command": shortened(redact(origin["command"]), MOST_COMMAND)}
    return {run.name: _run_json(run, made_from, short) for run in made_from.plan.runs}


def _reused(
    matrix: MatrixDir, records: Mapping[str, dict[str, Any]], made_from: Creation, on_message: OnMessage
) -> dict[str, dict[str, Any]]:
    """Return the values of all runs, after results of other matrices were copied for those that have finished there."""
    if made_from.neutral is None:
        return dict(records)
    found = reuse_runs(matrix.path, made_from.results_dir, records, made_from.neutral)
    for name, source in found.items():
        on_message(f"{name}: reused from {source} (REUSE=n trains it again)")
    return {name: {**value, "reused_from": found.get(name, "")} for name, value in records.items()}


def _planned(
    common: Mapping[str, Any], text: str, records: Mapping[str, dict[str, Any]], made_from: Creation
) -> list[dict[str, Any]]:
    """Return runs as matrix.json has them. text: of config.txt."""
    return [
        planned(common, value) | {"config": config_lines(text, made_from.texts[name].config)}
        for name, value in records.items()
    ]


def _skip(matrix: MatrixDir, made_from: Creation) -> None:
    """Leave out the runs that cannot run here: the next `make continue` looks at them again."""
    if made_from.skipped:
        skipped = {name: Request(skip=why) for name, why in made_from.skipped.items()}
        change(matrix.path, lambda known: replaced(known, runs={**known.runs, **skipped}))


def new_folder(base: Path, path: Path) -> Path:
    """Make the folder for the checkpoints of a new matrix below CHECKPOINT_DIR, and return it. path: of the matrix."""
    base.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}_{number}" for number in itertools.count(2)))
    # Never one that exists: matrices of two results folders may have the same name.
    folder = next(base.resolve() / name for name in names if not (base / name).exists())
    folder.mkdir()
    return folder


def common_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the values of run.json of all runs share. Those of `symbols` and `train` are compared one by one."""
    first = runs[0] if runs else {}
    return _shared(first, runs, OWN) | {key: _shared(first.get(key, {}), [run[key] for run in runs]) for key in INNER}


def _shared(first: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], own: Sequence[str] = ()) -> dict[str, Any]:
    return {
        key: value
        for key, value in first.items()
        if key not in own and all(key in run and run[key] == value for run in runs)
    }


def planned(common: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as matrix.json has it: its values of run.json that differ from the common ones."""
    own = _own(common, run, OWN) | {key: _own(common[key], run[key]) for key in INNER}
    return own | {"symbols": {name: None for name in common["symbols"] if name not in run["symbols"]} | own["symbols"]}


def _own(common: Mapping[str, Any], run: Mapping[str, Any], own: Sequence[str] = ()) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key in own or key not in common or common[key] != value}


def config_lines(common: str, own: str) -> dict[str, str]:
    """Return how the text of a .config differs from the common one, as `make_files` takes it."""
    theirs, ours = common.split("\n"), own.split("\n")
    gone, new = set(theirs).difference(ours), set(ours).difference(theirs)
    named = {name[1]: line for line in ours if line in new and (name := SYMBOL.match(line))}
    found = {line: named.pop(name[1], "") for line in theirs if line in gone and (name := SYMBOL.match(line))}
    more = [line for line in ours if line in named.values()]
    return found | ({MORE: "\n".join([*more, ""])} if more else {})


def check_place(results_dir: Path, checkpoint_dir: Path | None = None) -> None:
    """Raise LaunchError if the results directory, or CHECKPOINT_DIR, is not writable."""
    _check_writable(results_dir, "a matrix", "RESULTS_DIR")
    if checkpoint_dir:
        _check_writable(checkpoint_dir, "checkpoints", "CHECKPOINT_DIR")


def _check_writable(folder: Path, content: str, argument: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Tried, not asked: permission bits say little about network file systems.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".kmatrix_"):
            pass
    except OSError as error:
        raise LaunchError(
            f"cannot make {content} in {folder}", why=reason_of(error), hint=f"pass {argument}=<a folder of yours>"
        ) from None


def _stage(results_dir: Path) -> tuple[MatrixDir, Path]:
    """Make a hidden directory for a new matrix, and return it with the path that the matrix will have.

    A second matrix in the same second gets a number after its name.
    """
    while True:
        path = next_path(results_dir, clock.now())
        staged = path.with_name(f".{path.name}{STAGED}")
        try:
            staged.mkdir()  # atomic: of two commands in the same second, each gets its own directory
        except FileExistsError:
            continue
        if os.path.lexists(path):  # the other command was faster
            staged.rmdir()
            continue
        return MatrixDir(staged), path


def _matrix_json(name: str, folder: Path | None, made_from: Creation, origin: Provenance) -> dict[str, Any]:
    axes = [(axis.label, axis.name, [point.text for point in axis.points]) for axis in made_from.plan.axes]
    return {
        "name": name,
        "engine": made_from.engine,
        "created": origin["created"],
        "command": made_from.command,
        "axes": [{"label": label, "symbol": symbol, "values": values} for label, symbol, values in axes],
        "overrides": list(made_from.overrides),
        "equal": made_from.equal,
        "verdict": as_json(made_from.verdict),
        "checkpoints": str(folder) if folder else None,
        "cuts": [{"count": cells.count, "reason": cells.reason} for cells in made_from.plan.excluded],
        "notes": list(made_from.plan.notes),
        "provenance": origin,
    }


def _run_json(run: Run, made_from: Creation, origin: Provenance) -> dict[str, Any]:
    """Return the values of run.json."""
    data = made_from.data.get(key(made_from.configs[run.name].train))  # a skipped run may have no data
    return {
        "run_id": run.run_id,
        "name": run.name,
        "axes": dict(run.axes),
        "symbols": dict(made_from.texts[run.name].values),
        "asked": list(made_from.texts[run.name].asked),
        "train": train_fields(run, made_from, origin["cores"]),
        "timeout_s": made_from.timeout_s,
        "selected": made_from.verdict.seeds_auto,
        "environment": environment(made_from.texts[run.name].values),
        "tracking": as_json(made_from.tracking),
        "train_tokens": data.train_tokens if data else None,
        **_expected(run.name, made_from),
        "provenance": origin,
    }


def _expected(name: str, made_from: Creation) -> dict[str, Any]:
    """Return the expected time (s) of a run, and its source where that is a model of GPUs; None if unknown."""
    config = made_from.configs[name]
    gpus = made_from.gpus
    device = (
        made_from.nodes.model if made_from.nodes else detected(gpus[0].name, gpus[0].memory_total) if gpus else None
    )
    if config.device != "cuda" or device is None:
        return {"expected_s": made_from.expected.get(name), "expected_from": None}
    seconds = expected_seconds(shape=config.shape, train=config.train, tokens=config.tokens, device=device)
    share = middle_mfu(config.shape, config.train, device)
    source = None if seconds is None else f"an MFU of {share:.0%} on {device.name}"
    return {"expected_s": seconds, "expected_from": source}


def train_fields(run: Run, made_from: Creation, cores: int) -> dict[str, Any]:
    """Return the fields of the trainer with data and threads."""
    config = made_from.configs[run.name]
    ranks = config.train.ranks_per_node  # share the cores of a node
    data = made_from.data.get(key(config.train))  # a skipped run may have no data
    return {
        **config.train.to_json(),
        "max_iters": config.steps,
        "warmup_steps": config.train.warmup_steps,
        "cpu_threads": cpu_threads(config.train.cpu_threads, device=config.device, cores=cores, ranks=ranks),
        "data_path": data.path if data else "",
        "data_sha256": sha256_of_reading(data.sha256, config.train) if data else "",
        **benchmark_files(config.train, made_from.data_dir),
        **initial_fields(made_from.initial, config.train),
        "data_shards": data.shards if data else 0,
    }
