"""Run and matrix directories, made with everything that reproduces them, before anything starts."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kmatrix.config import RunConfig, cpu_threads
from kmatrix.errors import LaunchError
from kmatrix.gpu.nvml import Gpu
from kmatrix.launch.code import code_of
from kmatrix.launch.judging import judging_files
from kmatrix.launch.prepare import Dataset, Key, key
from kmatrix.launch.provenance import provenance
from kmatrix.matrix import Matrix, Run
from kmatrix.plan.devices import detected
from kmatrix.plan.outlook import MIDDLE, expected_seconds
from kmatrix.records import MATRIX_PREFIX, MatrixDir, write_bytes, write_json, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunText:
    """One run's configuration as text: its full .config, its minimal lines, and every value in force.

    asked: the symbols and choices among them that were asked for; the others have their defaults.
    """

    config: str
    minimal: str
    values: Mapping[str, str]
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """All that a matrix directory is made from.

    gpus: those that runs may use.  checkpoint_dir: None to keep checkpoints in each run's directory.
    equal: what all runs have in common, in words, or "".
    tracking: trackers (names), project, limit_s (seconds after a run's end); empty where there are none.
    """

    plan: Matrix
    configs: Mapping[str, RunConfig]
    texts: Mapping[str, RunText]
    data: Mapping[Key, Dataset]
    data_dir: Path
    skipped: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    results_dir: Path
    checkpoint_dir: Path | None
    timeout_s: int
    root: Path
    config_text: str
    command: str
    overrides: tuple[str, ...]
    equal: str = ""
    tracking: Mapping[str, Any] = field(default_factory=dict)


def create(made_from: Creation) -> MatrixDir:
    """Make the directories of a matrix and of its runs."""
    matrix = _new_matrix_dir(made_from.results_dir)
    code = code_of(made_from.root)
    origin = provenance(code, made_from.command, made_from.gpus, matrix.patch.name if code.patch else None)
    write_text(matrix.config, made_from.config_text)
    if code.patch:
        write_bytes(matrix.patch, code.patch)
    write_json(matrix.matrix_json, _matrix_json(matrix, made_from, {**origin, "files": code.files}))
    for run in made_from.plan.runs:
        run_dir = matrix.run(run.name)
        run_dir.path.mkdir()
        write_text(run_dir.config, made_from.texts[run.name].config)
        write_text(run_dir.defconfig, made_from.texts[run.name].minimal)
        write_json(run_dir.run_json, _run_json(matrix, run, made_from, origin))
    return matrix


def check_place(results_dir: Path) -> None:
    """Refuse a folder of results in which no matrix can be made, before any work is done for it."""
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=results_dir, prefix=".kmatrix_"):
            pass
    except OSError as error:
        raise LaunchError(
            f"no matrix can be made in {results_dir}", why=str(error), fix="pass RESULTS_DIR=<a folder of yours>"
        ) from None


def _new_matrix_dir(results_dir: Path) -> MatrixDir:
    """Make a directory that nobody else has: two matrices of one second get two names."""
    stamp = time.strftime("%Y%m%d_%H%M%S")
    for number in itertools.count(1):
        path = results_dir / (MATRIX_PREFIX + stamp + (f"_{number}" if number > 1 else ""))
        try:
            path.mkdir()
        except FileExistsError:
            continue
        break
    return MatrixDir(path)


def _matrix_json(matrix: MatrixDir, made_from: Creation, origin: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": matrix.name,
        "created": origin["created"],
        "command": made_from.command,
        "axes": [
            {"label": axis.label, "symbol": axis.name, "values": [point.text for point in axis.points]}
            for axis in made_from.plan.axes
        ],
        "overrides": list(made_from.overrides),
        "equal": made_from.equal,
        "runs": [{"name": run.name, "run_id": run.run_id, "axes": dict(run.axes)} for run in made_from.plan.runs],
        "cuts": [{"count": cut.count, "reason": cut.reason} for cut in made_from.plan.cuts],
        "notes": list(made_from.plan.notes),
        "provenance": origin,
    }


def _run_json(matrix: MatrixDir, run: Run, made_from: Creation, origin: Mapping[str, Any]) -> dict[str, Any]:
    data = made_from.data.get(key(made_from.configs[run.name].fields))  # a skipped run may have none
    return {
        "run_id": run.run_id,
        "name": run.name,
        "matrix": matrix.name,
        "axes": dict(run.axes),
        "symbols": dict(made_from.texts[run.name].values),
        "asked": list(made_from.texts[run.name].asked),
        "train": _train_fields(matrix, run, made_from, int(origin["cores"])),
        "timeout_s": made_from.timeout_s,
        "tracking": dict(made_from.tracking),
        "train_tokens": data.train_tokens if data else None,
        **_expected(made_from.configs[run.name], made_from.gpus),
        "provenance": origin,
    }


def _expected(config: RunConfig, gpus: tuple[Gpu, ...]) -> dict[str, Any]:
    """Return how long the plan says that a run takes on these GPUs, and what that is taken from; None: not known."""
    seconds = None
    if config.device == "cuda" and gpus:
        device = detected(gpus[0].name, gpus[0].memory_total)
        seconds = expected_seconds(shape=config.shape, fields=config.fields, tokens=config.tokens, device=device)
    source = None if seconds is None else f"an MFU of {MIDDLE:.0%} on {gpus[0].name}"
    return {"expected_s": seconds, "expected_from": source}


def _train_fields(matrix: MatrixDir, run: Run, made_from: Creation, cores: int) -> dict[str, Any]:
    """Return the trainer's fields with the data, the threads and the places filled in."""
    config = made_from.configs[run.name]
    data = made_from.data.get(key(config.fields))  # a skipped run may have none
    below = made_from.checkpoint_dir
    checkpoints = below / matrix.name / run.name if below else matrix.run(run.name).checkpoints
    return {
        **config.fields,
        "cpu_threads": cpu_threads(config.fields["cpu_threads"], device=config.device, cores=cores, ranks=config.ranks),
        "data_path": data.path if data else "",
        "data_sha256": data.sha256 if data else "",
        **judging_files(config.fields, made_from.data_dir),
        "data_shards": data.shards if data else 0,
        "checkpoint_dir": str(checkpoints.resolve()),
    }
