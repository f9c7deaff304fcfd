"""The files of HellaSwag and CORE: where they are, and their download if they are the published ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kmatrix.errors import DataError
from kmatrix.experiment.inputs.ask import ask
from kmatrix.records.train_config import TrainConfig

# Field -> name in DATA_DIR of the published file, which gpt2.benchmarks downloads.
PUBLISHED = {"hellaswag": "hellaswag_val.jsonl", "core": "eval_bundle.zip"}


def benchmark_files(train: TrainConfig, data_dir: Path) -> dict[str, str]:
    """Return the fields that hold paths of benchmarks, made absolute. Relative ones start at DATA_DIR."""
    return {
        field: str((data_dir / Path(text).expanduser()).resolve()) if (text := getattr(train, field)) else ""
        for field in PUBLISHED
    }


def missing_files(runs: Iterable[TrainConfig], data_dir: Path) -> list[tuple[str, Path, bool]]:
    """Return field and path of each benchmark that runs ask for and that does not exist; and if it is a published one.

    CORE may be a folder.
    """
    wanted = dict.fromkeys(item for train in runs for item in benchmark_files(train, data_dir).items() if item[1])
    found = ((field, Path(text)) for field, text in wanted)
    return [
        (field, path, path == (data_dir / PUBLISHED[field]).resolve())
        for field, path in found
        if not path.is_file() and not (field == "core" and path.is_dir())
    ]


def _problem(field: str, path: Path) -> str:
    return f"{field.upper()}: {path} {'is a folder' if path.is_dir() else 'not found'}"


def forecast_benchmarks(runs: Iterable[TrainConfig], data_dir: Path) -> tuple[list[str], list[str]]:
    """Return notes and warnings about benchmarks of a plan whose files are not there."""
    missing = missing_files(runs, data_dir)
    notes = [
        f"{field.upper()}: {path.name} is downloaded into DATA_DIR before the first run"
        for field, path, known in missing
        if known
    ]
    return notes, [_problem(field, path) for field, path, known in missing if not known]


def fetch_benchmarks(runs: Iterable[TrainConfig], data_dir: Path) -> None:
    """Download the published benchmarks that runs ask for and that are missing.

    Raises DataError if another file is missing, or a download fails.
    """
    missing = missing_files(runs, data_dir)
    for field, path, known in missing:
        if not known:
            name = field.upper()
            hint = f'{name}={PUBLISHED[field]} downloads the published file, {name}="" measures nothing'
            raise DataError(_problem(field, path), why="relative names start at DATA_DIR", hint=hint)
    if missing:
        ask("gpt2.benchmarks", *(field for field, _, _ in missing), f"--data-dir={data_dir}")
