"""The data of a matrix: find prepared data, forecast downloads, and prepare with gpt2.prepare as a subprocess."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kmatrix.errors import DataError
from kmatrix.experiment.inputs.ask import ask
from kmatrix.forms import parse_mix
from kmatrix.records.dataset import (
    FLAT,
    Dataset,
    DatasetFile,
    enough_shards,
    read_dataset_or_empty,
    tokens_to_read,
    train_shards,
    whole_windows,
)
from kmatrix.records.paths import ROOT
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import first_names, make_command

# Fields of a run that select its data, with `dataset` -> name in the recipe of a dataset.
FIELDS = {
    "tokenizer": "tokenizer",
    "data_path": "data_path",
    "data_mix": "mix",
    "text_column": "text_column",
    "val_percent": "val_percent",
    "shard_tokens": "shard_tokens",
    "bpe_vocab_size": "bpe_vocab_size",
}
MANY_EPOCHS = 4  # more epochs add little: Muennighoff et al. 2023, arXiv:2305.16264
SHARD_TOKENS = 100_000_000  # of a prebuilt shard, two bytes each
NO_DOWNLOAD = frozenset({"stdlib", "shakespeare", "folder", "shards"})  # or one of 1 MB
Key = tuple[object, ...]


def key(train: TrainConfig) -> Key:
    """Return the values that select the data of a run."""
    return tuple(getattr(train, name) for name in ("dataset", *FIELDS, "data_tokens", "data_streaming"))


def prepare_data(data_dir: Path, runs: Iterable[TrainConfig], shards: int = 0) -> dict[Key, Dataset]:
    """Prepare each dataset that the runs need. shards: its training shards; 0: as many as the longest run reads.

    Raises DataError if data are missing or damaged, or too few for a step of a run.
    """
    groups: dict[Key, list[TrainConfig]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    found = {}
    for name, group in groups.items():
        found[name] = Dataset(**ask("gpt2.prepare", *arguments_for(data_dir, group, shards)))
        for run in group:
            refuse_few(run, found[name])
    return found


def arguments_for(data_dir: Path, runs: Sequence[TrainConfig], shards: int = 0) -> list[str]:
    """Return the arguments of gpt2.prepare for the dataset of these runs. shards: as for `prepare_data`."""
    one, tokens = runs[0], [tokens_to_read(run) for run in runs]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in _recipe(one).items()]
    words += ["--streaming"] if one.data_streaming else []
    most = max(tokens) if all(tokens) else 0  # 0: all
    words += [f"--tokens={most}", f"--block-size={max(run.block_size for run in runs)}", f"--shards={shards}"]
    return [one.dataset, f"--data-dir={data_dir}", *words]


def _recipe(train: TrainConfig) -> dict[str, Any]:
    values = {name: getattr(train, field) for field, name in FIELDS.items()}
    return {name: value for name, value in values.items() if value not in (None, "")}


def refuse_few(run: TrainConfig, data: Dataset) -> None:
    """Raise DataError if a dataset has too few sequences for a step, as the trainer does. A mix repeats small ones."""
    if run.data_streaming or run.data_layout != FLAT or data.parts:
        return
    found = sum(whole_windows(tokens, run.block_size) for tokens in data.train_shards) // run.block_size
    if found < run.global_batch or not whole_windows(data.val_tokens, run.block_size):
        raise DataError(
            f"{run.dataset} has {found} sequences of BLOCK_SIZE={run.block_size} tokens for training and "
            f"{max(0, data.val_tokens - 1) // run.block_size} for validation",
            why=f"a step takes GLOBAL_BATCH={run.global_batch}, and validation at least one",
            hint="use more text, a smaller BATCH_SIZE, or a smaller BLOCK_SIZE",
        )


def prepared(data_dir: Path, train: TrainConfig) -> Dataset | None:
    """Return the prepared dataset of a run, None if DATA_DIR does not have all that the run reads.

    Only dataset.json is read, so that a plan does not start the trainer.
    """
    wanted = {"dataset": train.dataset, **_recipe(train)}
    repository, _ = _prebuilt(train)
    # Sorted, so that a plan does not depend on the order of the file system.
    for path in sorted(data_dir.glob("*/dataset.json")):
        record = read_dataset_or_empty(path)
        there = {"repository": "", **record.recipe}
        is_same = there["repository"] == repository and all(
            there.get(name, wanted[name]) == wanted[name] for name in wanted
        )
        if record.recipe and is_same and (found := _dataset(path.parent, record, train)):
            return found
    return None


def _dataset(folder: Path, record: DatasetFile, train: TrainConfig) -> Dataset | None:
    """Return the dataset of a dataset.json as a run reads it, None if it has too few shards yet."""
    tokens = train_shards(record)
    # Of streamed data, the first shard is enough to start.
    count = 1 if train.data_streaming else enough_shards(tokens, tokens_to_read(train), train.block_size)
    if not tokens or not record.vocab_size or (count is None and not record.complete):
        return None
    total = sum(source.weight for source in record.sources)
    return Dataset(
        path=str(folder),
        sha256=record.sha256 or "",
        vocab_size=record.vocab_size,
        train_tokens=sum(tokens[:count]),
        train_shards=tokens[:count],
        val_tokens=record.val_tokens or 0,
        shards=len(tokens[:count]),
        parts=tuple((source.name, source.weight / total, source.train_tokens) for source in record.sources),
    )


def epochs(runs: Iterable[tuple[TrainConfig, Dataset]]) -> dict[str, tuple[float, int]]:
    """Return the most epochs of a run, and the training tokens, per dataset."""
    found: dict[str, tuple[float, int]] = {}
    for train, data in runs:
        for name, share, tokens in data.parts or ((train.dataset, 1.0, data.train_tokens),):
            count = train.max_iters * train.tokens_per_step * share / max(1, tokens)
            found[name] = max(found.get(name, (0.0, 0)), (count, tokens))
    return found


def overfitting(found: Mapping[str, tuple[float, int]]) -> list[str]:
    """Return warnings about datasets with too many epochs. found: as `epochs` returns them."""
    return [
        f"{math.ceil(count)} epochs of {name}: overfitting is likely, and more than {MANY_EPOCHS} epochs "
        "add little (arXiv:2305.16264)"
        for name, (count, _) in found.items()
        if count > MANY_EPOCHS
    ]


def data_lines(runs: Sequence[TrainConfig], data: Mapping[Key, Dataset]) -> list[str]:
    """Return lines about the data before the first run: tokens, epochs, warnings."""
    found = epochs((run, data[key(run)]) for run in runs if not run.data_streaming)
    lines = [
        f"data: {name}, {tokens:,} training tokens, {count:.2f} epochs in the longest run"
        for name, (count, tokens) in found.items()
    ]
    streamed = dict.fromkeys(run.dataset for run in runs if run.data_streaming)
    lines += [f"data: {name}, prepared while the runs read it" for name in streamed]
    return lines + [f"warning: {text}" for text in overfitting(found)]


def forecast_data(data_dir: Path, runs: Sequence[TrainConfig]) -> tuple[list[str], list[str]]:
    """Return notes and warnings about the data of a plan, which may not be prepared yet."""
    there = [(run, known) for run in runs if (known := prepared(data_dir, run))]
    for run, known in there:
        refuse_few(run, known)
    notes = []
    if any(run.tokenizer == "char" for run in runs) and len(there) < len(runs):
        notes = ["the vocabulary of the tokenizer char is assumed to be 256 until the data are prepared"]
    return notes, overfitting(epochs((run, known) for run, known in there if not run.data_streaming))


def refuse_downloads(data_dir: Path, runs: Iterable[TrainConfig]) -> None:
    """Raise DataError if this process would have to download a dataset on a login node of Slurm."""
    missing = []
    for run in runs:
        names = {part.dataset for part in parse_mix(run.data_mix or "")} if run.dataset == "mix" else {run.dataset}
        if not names <= NO_DOWNLOAD and prepared(data_dir, run) is None:
            missing.append(run.dataset)
    if missing and "SLURM_JOB_ID" not in os.environ:
        raise DataError(
            f"the data are not prepared: {first_names(dict.fromkeys(missing))}",
            why="downloads and tokenization are too much for a login node",
            hint=f"on another node, with the same arguments: srun -c 8 {make_command('prepare-data')}",
        )


def to_download(train: TrainConfig) -> tuple[int, int] | None:
    """Return how many prebuilt training shards a run reads, and how many there are; None for other data."""
    _, there = _prebuilt(train)
    wanted = min(tokens_to_read(train) or there, there)
    return (math.ceil(wanted / SHARD_TOKENS), math.ceil(there / SHARD_TOKENS)) if there else None


def _prebuilt(train: TrainConfig) -> tuple[str, int]:
    """Return the repository of prebuilt shards if it is not the usual one, and its training tokens, 0 without one."""
    known = _catalog().get(train.dataset, {}) if train.tokenizer == "gpt2" else {}
    if "larger" in known and tokens_to_read(train) > known["tokens"]:
        return known["larger"].partition(":")[0], known["larger_tokens"]
    return "", known.get("tokens", 0)


@cache
def _catalog() -> dict[str, dict[str, Any]]:
    """Return the named datasets of the trainer."""
    return tomllib.loads((ROOT / "gpt2/prepare/catalog.toml").read_text(encoding="utf-8"))
