"""The data of a matrix: find prepared data, forecast downloads, and prepare with gpt2.prepare as a subprocess."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.config import RunConfig, with_vocabulary
from kmatrix.errors import DataError
from kmatrix.experiment.inputs.ask import ask
from kmatrix.records.dataset import (
    FLAT,
    Dataset,
    DatasetFile,
    Parts,
    read_dataset_or_empty,
    tokens_to_read,
    train_shards,
    whole_windows,
)
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.records.train_config import TrainConfig

# Fields of a run that select its data -> option of gpt2.prepare.
OPTIONS = {
    "tokenizer": "--tokenizer",
    "data_path": "--data-path",
    "data_mix": "--mix",
    "text_column": "--text-column",
    "val_percent": "--val-percent",
    "shard_tokens": "--shard-tokens",
    "bpe_vocab_size": "--bpe-vocab-size",
}

IN_RECIPE = {"data_mix": "mix"}  # field -> name in dataset.json
MANY_EPOCHS = 4  # more epochs add little: Muennighoff et al. 2023, arXiv:2305.16264
Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The amount of data that runs read from a dataset."""

    tokens: int  # 0: all
    block_size: int
    shards: int = 0  # exact number of training shards; 0: as many as the tokens need


def key(train: TrainConfig) -> Key:
    """Return the fields that select the data of a run, as a key."""
    values = {name: getattr(train, name) for name in ("dataset", *OPTIONS, "data_tokens")}
    values["data_streaming"] = train.data_streaming or None
    return tuple((name, value) for name, value in values.items() if value not in (None, ""))


def needs(runs: Iterable[TrainConfig], shards: Mapping[Key, int] | None = None) -> dict[Key, Need]:
    """Return the amount that the longest run reads, per dataset. shards: number of training shards, if given."""
    found: dict[Key, Need] = {}
    for run in runs:
        name = key(run)
        tokens, block_size = tokens_to_read(run), run.block_size
        if former := found.get(name):
            tokens = max(tokens, former.tokens) if tokens and former.tokens else 0  # 0: all
            block_size = max(block_size, former.block_size)
        found[name] = Need(tokens=tokens, block_size=block_size, shards=(shards or {}).get(name, 0))
    return found


def run_tokens(train: TrainConfig) -> int:
    """Return the tokens that a run reads."""
    return train.max_iters * train.tokens_per_step


def prepare_data(
    data_dir: Path, runs: Iterable[TrainConfig], shards: Mapping[Key, int] | None = None
) -> dict[Key, Dataset]:
    """Prepare each dataset that the runs need. shards: number of training shards per dataset, if given.

    Raises DataError if data are missing or damaged, or too few for a step of a run.
    """
    runs = list(runs)
    found = {}
    for name, need in needs(runs, shards).items():
        answer = ask("gpt2.prepare", *_arguments(data_dir, name, need))
        found[name] = Dataset(**{field: answer[field] for field in Dataset.__slots__})
    for run in runs:
        refuse_few(run, found[key(run)])
    return found


def _arguments(data_dir: Path, wanted: Key, need: Need) -> list[str]:
    """Return the arguments of gpt2.prepare for a dataset."""
    fields = dict(wanted)
    words = [str(fields["dataset"]), "--data-dir", str(data_dir)]
    words += [f"{option}={fields[name]}" for name, option in OPTIONS.items() if name in fields]
    words += ["--streaming"] if fields.get("data_streaming") else []
    return [*words, f"--tokens={need.tokens}", f"--block-size={need.block_size}", f"--shards={need.shards}"]


def refuse_few(run: TrainConfig, data: Dataset | KnownDataset) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDataset:
    """The fields of a dataset.json below DATA_DIR that a plan needs."""

    train_tokens: int
    vocab_size: int
    parts: Parts  # as in Dataset
    train_shards: tuple[int, ...] = ()  # tokens of each training shard; empty if the download is incomplete
    val_tokens: int = 0
    is_complete: bool = True  # False: a part of the download


def prepared(data_dir: Path, train: TrainConfig) -> KnownDataset | None:
    """Return the prepared dataset of a run, None if it is not below DATA_DIR.

    Only dataset.json is read, so that a plan does not start the trainer. An incomplete download counts as the tokens
    that the run needs, because preparation fetches the rest.
    """
    without = ("data_tokens", "data_streaming")
    wanted = {IN_RECIPE.get(name, name): value for name, value in key(train) if name not in without}
    larger = _larger(train)
    # Sorted, so that a plan does not depend on the order of the file system.
    for path in sorted(data_dir.glob("*/dataset.json")):
        record = read_dataset_or_empty(path)
        recipe = record.recipe
        if recipe.get("repository") != larger:
            continue
        if recipe and all(recipe.get(name, value) == value for name, value in wanted.items()):
            known = _known(record, train.data_tokens or run_tokens(train))
            if known is not None:
                return known
    return None


def _known(record: DatasetFile, needed: int) -> KnownDataset | None:
    total = sum(source.weight for source in record.sources)
    tokens, vocab_size = record.train_tokens, record.vocab_size
    if not tokens or vocab_size is None:
        return None
    return KnownDataset(
        train_tokens=max(tokens, needed) if record.complete is False else tokens,
        vocab_size=vocab_size,
        val_tokens=record.val_tokens or 0,
        parts=tuple((source.name, source.weight / max(1, total), source.train_tokens) for source in record.sources),
        train_shards=() if record.complete is False else train_shards(record),
        is_complete=record.complete is not False,
    )


def epochs(train: TrainConfig, data: Dataset | KnownDataset) -> dict[str, float]:
    """Return the epochs of a run, per dataset."""
    return {name: run_tokens(train) * share / max(1, tokens) for name, share, tokens in _parts(train, data)}


def _parts(train: TrainConfig, data: Dataset | KnownDataset) -> Parts:
    return data.parts or ((train.dataset, 1.0, data.train_tokens),)


def most_epochs(runs: Iterable[tuple[TrainConfig, Dataset | KnownDataset]]) -> dict[str, float]:
    """Return the maximum epochs over all runs, per dataset."""
    most: dict[str, float] = {}
    for train, data in runs:
        for name, count in epochs(train, data).items():
            most[name] = max(most.get(name, 0.0), count)
    return most


def overfitting(most: Mapping[str, float]) -> list[str]:
    """Return warnings about datasets with too many epochs. most: epochs per dataset."""
    return [
        f"{math.ceil(count)} epochs of {name}: overfitting is likely, and more than {MANY_EPOCHS} epochs "
        "add little (arXiv:2305.16264)"
        for name, count in most.items()
        if count > MANY_EPOCHS
    ]


def data_lines(runs: Sequence[TrainConfig], data: Mapping[Key, Dataset]) -> list[str]:
    """Return lines about the data before the first run: tokens, epochs, warnings."""
    streamed = dict.fromkeys(run.dataset for run in runs if run.data_streaming)
    runs = [run for run in runs if not run.data_streaming]
    most = most_epochs((run, data[key(run)]) for run in runs)
    tokens = {name: count for run in runs for name, _, count in _parts(run, data[key(run)])}
    lines = [
        f"data: {name}, {tokens[name]:,} training tokens, {count:.2f} epochs in the longest run"
        for name, count in most.items()
    ]
    lines += [f"data: {name}, prepared while the runs read it" for name in streamed]
    return lines + [f"warning: {text}" for text in overfitting(most)]


def forecast_data(data_dir: Path, runs: Sequence[TrainConfig]) -> tuple[list[str], list[str]]:
    """Return notes and warnings about the data of a plan, which may not be prepared yet."""
    there = [(run, prepared(data_dir, run)) for run in runs]
    for run, known in there:
        if known and known.is_complete:
            refuse_few(run, known)
    notes = []
    if any(run.tokenizer == "char" and not known for run, known in there):
        notes = ["the vocabulary of the tokenizer char is assumed to be 256 until the data are prepared"]
    return notes, overfitting(most_epochs((run, known) for run, known in there if known and not run.data_streaming))


def with_known_vocabulary(run: RunConfig, data_dir: Path) -> RunConfig:
    """Return a configuration with the vocabulary of its data, if they are prepared."""
    known = prepared(data_dir, run.train)
    return with_vocabulary(run, known.vocab_size) if known else run


def known_shards(run: RunDir, runs: Iterable[TrainConfig]) -> dict[Key, int]:
    """Return the number of training shards that an earlier run read. runs: those that read the same data."""
    shards = read_run_file_or_empty(run).train.data_shards or 0  # 0: as many as the runs need
    return {key(train): shards for train in runs}


SHARD_TOKENS = 100_000_000
HEADER, TOKEN = 1024, 2  # bytes of the header of a shard and of a token (format of llm.c)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prebuilt:
    """A dataset with prebuilt shards: training shards, and one validation shard of the same length."""

    shards: int  # training shards
    last: int | None  # tokens of the last training shard, None if unknown

    @property
    def tokens(self) -> int | None:
        """Return the number of training tokens, None if unknown."""
        return None if self.last is None else (self.shards - 1) * SHARD_TOKENS + self.last


# Names as in gpt2.prepare.catalog. Counts: data/cached_fineweb10B.py and data/cached_finewebedu10B.py of
# KellerJordan/modded-nanogpt, which download the same repositories (kjj0/finewebedu10B-gpt2, kjj0/fineweb10B-gpt2).
PREBUILT = {
    "finewebedu": Prebuilt(shards=99, last=53_989_344),
    "fineweb": Prebuilt(shards=103, last=None),
}


# Repositories for requests above PREBUILT, as `larger` in gpt2.prepare.catalog. Counts: dev/data/edu_fineweb.sh of
# karpathy/llm.c.
LARGER = {"finewebedu": ("karpathy/fineweb-edu-100B-gpt2-token-shards", Prebuilt(shards=1000, last=None))}


def prebuilt_of(train: TrainConfig, tokens: int) -> Prebuilt | None:
    """Return the prebuilt shards that this many tokens of a run's dataset come from; None if there are none."""
    if train.tokenizer != "gpt2":
        return None
    usual = PREBUILT.get(train.dataset)
    is_larger = usual and usual.tokens and train.dataset in LARGER and tokens > usual.tokens
    return LARGER[train.dataset][1] if is_larger else usual


def _larger(train: TrainConfig) -> str | None:
    """Return the repository that a run needs because the usual one has too few tokens, else None."""
    found = prebuilt_of(train, train.data_tokens or run_tokens(train))
    return next((name for name, prebuilt in LARGER.values() if prebuilt is found), None)


def to_fetch(prebuilt: Prebuilt, tokens: int, block_size: int) -> tuple[int, int]:
    """Return the download for one epoch of `tokens` tokens, of the whole dataset for 0 or if it has fewer.

    The number of training shards, and at most how many bytes, with the validation shard. A shard holds whole sequences
    of `block_size` tokens, each with the next token.
    """
    whole = (SHARD_TOKENS - 1) // block_size * block_size
    shards = min(prebuilt.shards, math.ceil(tokens / whole)) if tokens else prebuilt.shards
    held = (shards + 1) * SHARD_TOKENS
    if shards == prebuilt.shards and prebuilt.last is not None:
        held -= SHARD_TOKENS - prebuilt.last
    return shards, (shards + 1) * HEADER + held * TOKEN
