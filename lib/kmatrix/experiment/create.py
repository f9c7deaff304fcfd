"""Make the directories of a matrix and its runs, with everything that is needed to reproduce them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kmatrix.config import RunConfig, cpu_threads, environment
from kmatrix.errors import LaunchError, is_full, reason_of
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.inputs.benchmarks import benchmark_files
from kmatrix.experiment.inputs.data import Key, key
from kmatrix.experiment.inputs.initial import InitialWeights, initial_fields
from kmatrix.experiment.provenance import Code, code_of, provenance, secret_variables
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.matrix.expand import Matrix, Run
from kmatrix.plan.feasibility import GpuModel, detected, expected_seconds, middle_mfu
from kmatrix.records.checkpoint_dir import check_own_files, new_folder
from kmatrix.records.dataset import Dataset, sha256_of_reading
from kmatrix.records.decode import as_json
from kmatrix.records.files import json_text, read_json, sync_folder, write_bytes, write_json, write_text
from kmatrix.records.jobs.files import LOCAL, write_engine
from kmatrix.records.lock import MAKING, held
from kmatrix.records.paths import MatrixDir, is_in_the_future, next_path, staged_dir
from kmatrix.records.place import Place
from kmatrix.records.plan import RunTexts, make_runs, write_plan
from kmatrix.records.runs import Provenance, Tracking, VerdictRules
from kmatrix.redaction.redactor import redact
from kmatrix.runner.cluster import new_engine
from kmatrix.status.disk_space import how_full, what_to_do
from kmatrix.text import make_command, shortened

# Characters of the command in each run.json: with thousands of values of an axis, each of thousands of runs would list
# all of them. matrix.json has the whole command.
MOST_COMMAND = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RunText:
    """The configuration of one run as text."""

    config: str  # full .config
    minimal: str  # the lines that differ from the defaults
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
    settings: Mapping[str, str] = field(default_factory=dict)  # symbol -> value, those of the scheduler of a cluster
    initial: Mapping[str, InitialWeights] = field(default_factory=dict)  # by the text of INIT_FROM


def create(
    made_from: Creation, on_message: OnMessage = ignore, then: Callable[[MatrixDir], object] | None = None
) -> MatrixDir:
    """Make the directories of a matrix and its runs, and return the matrix.

    on_message: called with each note.  then: called with the matrix before another process can hold it.
    """
    # 1. Everything that the runs are made from, in a hidden directory: the plan is complete, or there is no matrix.
    staged, path = _stage(made_from.results_dir)
    if is_in_the_future(path, time.time()):
        on_message(f"note: the newest matrix has a later date than now, so that this one is named {path.name}")
    with _full_disk_named(path), _removed_unless_held(staged), held(staged, MAKING):
        folder = None
        try:
            folder = new_folder(made_from.checkpoint_dir, staged, path) if made_from.checkpoint_dir else None
            _write_plan(staged, path.name, folder, made_from, on_message)
            sync_folder(staged.path)
            staged.path.rename(path)
        except BaseException:  # a full disk, Ctrl+C: nothing refers to these files
            shutil.rmtree(staged.path, ignore_errors=True)
            if folder and not path.exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise
        sync_folder(path.parent)
        # 2. The runs. After a kill, `continue` makes the missing ones.
        matrix = MatrixDir(path)
        make_runs(matrix, {run.name for run in made_from.plan.runs})
        if then:
            then(matrix)
    return matrix


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Turn the error of a full disk into a LaunchError, with the command that continues a matrix that exists by then.

    path: of the matrix.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise LaunchError(
            f"cannot write {path}", why=f"{error.strerror}: {how_full(path)}", hint=what_to_do(path)
        ) from error


@contextmanager
def _removed_unless_held(staged: MatrixDir) -> Iterator[None]:
    """Remove the directory of a new matrix if not even its lock can be written."""
    try:
        yield
    except LaunchError:
        with suppress(OSError):
            staged.lock.unlink(missing_ok=True)
            staged.path.rmdir()  # fails if there is anything else in it
        raise


def add_to(
    matrix: MatrixDir, made_from: Creation, on_message: OnMessage = ignore, then: Callable[[], object] | None = None
) -> None:
    """Add runs to a matrix. made_from: of these runs only.  then: called before another process can hold the matrix.

    Raises LaunchError if another process holds the matrix.
    """
    with _full_disk_named(matrix.path), held(matrix, MAKING):
        check_own_files(matrix)
        record = read_json(matrix.matrix_json)
        code = code_of(made_from.root)
        origin = _origin(code, made_from, None)
        if origin["code"] != (record.get("provenance") or {}).get("code"):
            on_message(
                f"warning: the trainer's code has changed since this matrix was made: see `{make_command('compare')}`"
            )
        # The plan first: matrix.json decides which runs the matrix has.
        runs, short = made_from.plan.runs, _of_runs(origin)
        write_plan(matrix, (_planned(record["name"], run, made_from, short) for run in runs), append=True)
        more = _matrix_json(record["name"], None, made_from, origin)
        changed = {name: more[name] for name in ("axes", "overrides", "verdict")}
        write_json(matrix.matrix_json, {**record, **changed, "runs": [*record["runs"], *more["runs"]]})
        make_runs(matrix, {run.name for run in runs})
        if then:
            then()


def _write_plan(matrix: MatrixDir, name: str, folder: Path | None, made_from: Creation, on_message: OnMessage) -> None:
    """Write the files of a matrix, without its runs. name: of the matrix.  folder: of its checkpoints."""
    code = code_of(made_from.root)
    for one in code.left_out:
        on_message(f"warning: not in {matrix.patch.name}: {one.describe()}")
    for variable in secret_variables(os.environ):
        on_message(f"warning: not recorded: the environment variable {variable}, whose value may be a key")
    origin = _origin(code, made_from, matrix.patch.name if code.patch else None)
    write_text(matrix.config, made_from.config_text)
    if code.patch:
        write_bytes(matrix.patch, code.patch, private=True)
    short = _of_runs(origin)
    write_plan(matrix, (_planned(name, run, made_from, short) for run in made_from.plan.runs))
    path = matrix.path.with_name(name).resolve()
    if made_from.engine != LOCAL:  # before the matrix is there: without this file, it would be one of this machine
        write_engine(matrix, new_engine(made_from.engine, path, made_from.settings))
    place = {"place": as_json(Place.of(matrix, path))}
    write_json(matrix.matrix_json, {**_matrix_json(name, folder, made_from, {**origin, "files": code.files}), **place})


def _origin(code: Code, made_from: Creation, patch: str | None) -> Provenance:
    """Return the provenance of a matrix. patch: name of the file with the patch."""
    origin = provenance(code, made_from.command, made_from.gpus, patch)
    return made_from.nodes.provenance(origin) if made_from.nodes else origin


def _of_runs(origin: Provenance) -> Provenance:
    """Return the provenance for each run.json, without the middle of a long command."""
    # Redacted before it is cut: the half of a key would not be recognized.
    return {**origin, "command": shortened(redact(origin["command"]), MOST_COMMAND)}


def _planned(name: str, run: Run, made_from: Creation, origin: Provenance) -> RunTexts:
    """Return the files of a run. name: of the matrix."""
    text, record = made_from.texts[run.name], _run_json(name, run, made_from, origin)
    return RunTexts(run.name, (text.config, text.minimal, json_text(record)))


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
        path = next_path(results_dir, time.time())
        staged = staged_dir(path)
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
        "created": origin["created"],
        "command": made_from.command,
        "axes": [{"label": label, "symbol": symbol, "values": values} for label, symbol, values in axes],
        "overrides": list(made_from.overrides),
        "equal": made_from.equal,
        "verdict": as_json(made_from.verdict),
        "checkpoints": str(folder) if folder else None,
        "runs": [{"name": run.name, "run_id": run.run_id, "axes": dict(run.axes)} for run in made_from.plan.runs],
        "cuts": [{"count": cells.count, "reason": cells.reason} for cells in made_from.plan.excluded],
        "notes": list(made_from.plan.notes),
        "provenance": origin,
    }


def _run_json(name: str, run: Run, made_from: Creation, origin: Provenance) -> dict[str, Any]:
    """Return run.json. name: of the matrix."""
    data = made_from.data.get(key(made_from.configs[run.name].train))  # a skipped run may have no data
    return {
        "run_id": run.run_id,
        "name": run.name,
        "matrix": name,
        "axes": dict(run.axes),
        "symbols": dict(made_from.texts[run.name].values),
        "asked": list(made_from.texts[run.name].asked),
        "train": train_fields(run, made_from, origin["cores"]),
        "timeout_s": made_from.timeout_s,
        "selected": made_from.verdict.seeds_auto,
        "environment": environment(made_from.texts[run.name].values),
        "tracking": made_from.tracking.to_json(),
        "train_tokens": data.train_tokens if data else None,
        **_expected(made_from.configs[run.name], _device(made_from)),
        "provenance": origin,
    }


def _device(made_from: Creation) -> GpuModel | None:
    """Return the model of the GPUs that runs will use, None without GPUs or for an unknown type."""
    if made_from.nodes:
        return made_from.nodes.model
    return detected(made_from.gpus[0].name, made_from.gpus[0].memory_total) if made_from.gpus else None


def _expected(config: RunConfig, device: GpuModel | None) -> dict[str, Any]:
    """Return the expected time of a run on a GPU model and its source; both None if unknown."""
    if config.device != "cuda" or device is None:
        return {"expected_s": None, "expected_from": None}
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
