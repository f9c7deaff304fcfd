"""The data of a matrix, made or found before anything starts, by the trainer's own program in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.errors import DataError

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Prepared shards. path: their folder.  sha256: of all that is in them.  tokens: of each part."""

    path: str
    sha256: str
    vocab_size: int
    train_tokens: int
    val_tokens: int


def key(fields: Mapping[str, Any]) -> Key:
    """Return what decides a run's data: dataset, tokenizer, folder."""
    return str(fields["dataset"]), str(fields["tokenizer"]), str(fields["data_path"] or "")


def prepare_data(python: Path, root: Path, data_dir: Path, fields: Iterable[Mapping[str, Any]]) -> dict[Key, Dataset]:
    """Prepare each dataset that the runs need, once.

    Raises DataError with the preparation's own words where data are missing or damaged.
    """
    return {found: _prepare(python, root, data_dir, found) for found in dict.fromkeys(key(run) for run in fields)}


def _prepare(python: Path, root: Path, data_dir: Path, wanted: Key) -> Dataset:
    dataset, tokenizer, path = wanted
    command = [str(python), "-m", "gpt2.prepare", dataset, "--data-dir", str(data_dir), "--tokenizer", tokenizer]
    command += ["--data-path", path] if path else []
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), str(root / "lib")]))
    done = subprocess.run(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise DataError(
            f"the data of {dataset!r} cannot be used", why="see above", fix="docs/data.md tells what belongs where"
        )
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return Dataset(
        path=said["path"],
        sha256=said["sha256"],
        vocab_size=said["vocab_size"],
        train_tokens=said["train_tokens"],
        val_tokens=said["val_tokens"],
    )
