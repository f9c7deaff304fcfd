"""The data of a matrix, made or found before anything starts, by the trainer's own program in a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.errors import DataError, RecordError
from kmatrix.records import read_json

# Fields of a run that decide its data, with the option of gpt2.prepare that each is.
OPTIONS = {
    "tokenizer": "--tokenizer",
    "data_path": "--data-path",
    "data_mix": "--mix",
    "text_column": "--text-column",
    "val_percent": "--val-percent",
    "shard_tokens": "--shard-tokens",
    "bpe_vocab_size": "--bpe-vocab-size",
}
IN_RECIPE = {"data_mix": "mix"}  # fields that dataset.json has under another name
MANY_EPOCHS = 4  # repeats beyond these add little: Muennighoff et al. 2023, arXiv:2305.16264
Key = tuple[tuple[str, Any], ...]
Parts = tuple[tuple[str, float, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Prepared shards. path: their folder.  sha256: of all that is read.  tokens: of what is read.

    shards: the first so many of training are read, 0 for all.
    parts: name, share of the sequences and training tokens of each dataset of a mix; empty where there is one dataset.
    """

    path: str
    sha256: str
    vocab_size: int
    train_tokens: int
    val_tokens: int
    shards: int
    parts: Parts = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """How much of a dataset is read. tokens: 0 for all.  shards: exactly so many; 0: as many as hold the tokens."""

    tokens: int
    block_size: int
    shards: int = 0


def key(fields: Mapping[str, Any]) -> Key:
    """Return what decides a run's data, beside how much of them is read."""
    names = ("dataset", *OPTIONS, "data_tokens")
    return tuple((name, fields[name]) for name in names if fields.get(name) not in (None, ""))


def needs(fields: Iterable[Mapping[str, Any]], shards: Mapping[Key, int] | None = None) -> dict[Key, Need]:
    """Return for each dataset what the runs read of it: the longest one decides. shards: of data that are known."""
    found: dict[Key, Need] = {}
    for run in fields:
        name = key(run)
        tokens, block_size = int(run["data_tokens"] or 0) or run_tokens(run), int(run["block_size"])
        if former := found.get(name):
            tokens = max(tokens, former.tokens) if tokens and former.tokens else 0  # 0: all that there are
            block_size = max(block_size, former.block_size)
        found[name] = Need(tokens=tokens, block_size=block_size, shards=(shards or {}).get(name, 0))
    return found


def run_tokens(fields: Mapping[str, Any]) -> int:
    """Return the tokens that a run reads; 0 where that follows from the data."""
    return int(fields["max_iters"] or 0) * int(fields["global_batch"]) * int(fields["block_size"])


def prepare_data(
    python: Path,
    root: Path,
    data_dir: Path,
    fields: Iterable[Mapping[str, Any]],
    shards: Mapping[Key, int] | None = None,
) -> dict[Key, Dataset]:
    """Prepare each dataset that the runs need, once. shards: training shards of datasets where they are known.

    Raises DataError with the preparation's own words where data are missing or damaged.
    """
    return {name: _prepare(python, root, data_dir, name, need) for name, need in needs(fields, shards).items()}


def _prepare(python: Path, root: Path, data_dir: Path, wanted: Key, need: Need) -> Dataset:
    fields = dict(wanted)
    command = [str(python), "-m", "gpt2.prepare", str(fields["dataset"]), "--data-dir", str(data_dir)]
    for name, option in OPTIONS.items():
        command += [f"{option}={fields[name]}"] if name in fields else []
    command += [f"--tokens={need.tokens}", f"--block-size={need.block_size}", f"--shards={need.shards}"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), str(root / "lib")]))
    done = subprocess.run(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise DataError(
            f"the data of {fields['dataset']!r} cannot be used",
            why="see above",
            fix="docs/data.md tells what belongs where",
        )
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return Dataset(**{name: said[name] for name in Dataset.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What dataset.json says of data that lie below DATA_DIR. parts: as those of Dataset."""

    train_tokens: int
    vocab_size: int
    parts: Parts


def prepared(data_dir: Path, fields: Mapping[str, Any]) -> Known | None:
    """Return what is known of a run's data before they are prepared; None where they do not lie below DATA_DIR.

    Only dataset.json is read, so that a plan needs no program of the trainer. Data that a longer run adds to are
    counted as what it needs of them.
    """
    wanted = {IN_RECIPE.get(name, name): value for name, value in key(fields) if name != "data_tokens"}
    for path in sorted(data_dir.glob("*/dataset.json")):
        try:
            record = read_json(path)
            recipe = record["recipe"]
            if all(recipe.get(name, value) == value for name, value in wanted.items()):
                return _known(record, int(fields.get("data_tokens") or 0) or run_tokens(fields))
        except (RecordError, KeyError, TypeError, AttributeError):
            continue
    return None


def _known(record: Mapping[str, Any], needed: int) -> Known:
    total = sum(source["weight"] for source in record.get("sources", ()))
    tokens = int(record["train_tokens"])
    return Known(
        train_tokens=tokens if record.get("complete", True) else max(tokens, needed),
        vocab_size=int(record["vocab_size"]),
        parts=tuple((s["name"], s["weight"] / total, s["train_tokens"]) for s in record.get("sources", ())),
    )


def epochs(fields: Mapping[str, Any], data: Dataset | Known) -> dict[str, float]:
    """Return how often a run reads each of its datasets."""
    parts = data.parts or ((str(fields["dataset"]), 1.0, data.train_tokens),)
    return {name: run_tokens(fields) * share / max(1, tokens) for name, share, tokens in parts}


def most_epochs(runs: Iterable[tuple[Mapping[str, Any], Dataset | Known]]) -> dict[str, float]:
    """Return how often the run that reads it most reads each dataset."""
    most: dict[str, float] = {}
    for fields, data in runs:
        for name, count in epochs(fields, data).items():
            most[name] = max(most.get(name, 0.0), count)
    return most


def overfitting(most: Mapping[str, float]) -> list[str]:
    """Return the warnings of datasets that are read too often. most: epochs of each."""
    return [
        f"{name} is read {math.ceil(count)} times: overfitting is likely, and more than {MANY_EPOCHS} epochs "
        "add little (arXiv:2305.16264)"
        for name, count in most.items()
        if count > MANY_EPOCHS
    ]
