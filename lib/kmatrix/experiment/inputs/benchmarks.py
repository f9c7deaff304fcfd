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


def missing_benchmarks(runs: Iterable[TrainConfig], data_dir: Path) -> list[str]:
    """Return the fields of the published files that runs ask for and that are not in DATA_DIR.

    Raises DataError if another file is missing. CORE may be a folder.
    """
    missing = []
    for field, text in dict.fromkeys(item for run in runs for item in benchmark_files(run, data_dir).items()):
        path, name = Path(text), field.upper()
        if not text or path.is_file() or (field == "core" and path.is_dir()):
            continue
        if path != (data_dir / PUBLISHED[field]).resolve():
            hint = f'{name}={PUBLISHED[field]} downloads the published file, {name}="" measures nothing'
            raise DataError(f"{name}: no file {path}", why="relative names start at DATA_DIR", hint=hint)
        missing.append(field)
    return missing


def fetch_benchmarks(runs: Iterable[TrainConfig], data_dir: Path) -> None:
    """Download the published benchmarks that runs ask for and that are missing. Raises DataError if one fails."""
    if missing := missing_benchmarks(runs, data_dir):
        ask("gpt2.benchmarks", *missing, f"--data-dir={data_dir}")
