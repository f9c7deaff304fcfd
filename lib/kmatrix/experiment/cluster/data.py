"""Data that are too large for a login node: their size, and the commands that a job prepares them with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kmatrix.errors import DataError
from kmatrix.experiment.inputs.data import Key, key, needs, prebuilt_of, prepare_command, prepared, run_tokens, to_fetch
from kmatrix.paste import make_command
from kmatrix.records.train_config import TrainConfig, parse_mix
from kmatrix.text import disk_size

MOST_BYTES = 10**9  # prepared where the command runs: a minute of a login node
SMALL = frozenset({"stdlib", "shakespeare"})  # a few MB
SHARD_BYTES = 200_000_000  # of a prebuilt shard


@dataclass(frozen=True, slots=True)
class LargeData:
    """A dataset that is not prepared, and too large for a login node."""

    dataset: str
    size: float | None  # bytes to download or to tokenize, at least; None: unknown

    def describe(self) -> str:
        """Return `finewebedu: 19.8 GB`."""
        return f"{self.dataset}: {'unknown size' if self.size is None else disk_size(self.size)}"


def large_data(
    data_dir: Path, runs: Iterable[TrainConfig], shards: Mapping[Key, int] | None = None
) -> dict[Key, LargeData]:
    """Return the datasets of runs that are not prepared, and larger than a login node should prepare.

    shards: number of training shards per dataset, if given.
    """
    runs = list(runs)
    longest: dict[Key, TrainConfig] = {}
    for run in runs:
        former = longest.get(key(run))
        if former is None or run_tokens(former) < run_tokens(run):
            longest[key(run)] = run
    found = {}
    for wanted, need in needs(runs, shards).items():
        size = _unprepared(data_dir, longest[wanted], need.tokens, need.block_size)
        if size is None or size > MOST_BYTES:
            found[wanted] = LargeData(longest[wanted].dataset, size)
    return found


def refuse_large_data(data_dir: Path, runs: Iterable[TrainConfig], shards: Mapping[Key, int] | None = None) -> None:
    """Raise DataError if the login node would have to prepare large data."""
    if large := list(large_data(data_dir, runs, shards).values()):
        raise DataError(
            f"the data are not prepared: {', '.join(one.describe() for one in large)}",
            why="that is too much work for a login node",
            hint=f"prepare them in a job: {make_command('prepare-data', ENGINE='slurm')}",
        )


def commands(python: Path, data_dir: Path, runs: Iterable[TrainConfig], wanted: Sequence[Key]) -> list[list[str]]:
    """Return the commands that prepare these datasets, as much of each as the runs need."""
    needed = needs(runs)
    return [prepare_command(python, data_dir, one, needed[one]) for one in wanted]


def _unprepared(data_dir: Path, run: TrainConfig, tokens: int, block_size: int) -> float | None:
    """Return the bytes of a run's data that are left to download or tokenize, None if unknown."""
    known = prepared(data_dir, run)
    if known is not None and known.is_complete:
        return 0.0
    if run.dataset in SMALL or run.data_streaming:
        return 0.0
    if run.dataset == "mix":
        return _sum(_unprepared(data_dir, part, int(tokens * share), block_size) for part, share in _parts(run))
    if prebuilt := prebuilt_of(run, tokens):
        fetch = to_fetch(prebuilt, tokens, block_size)
        return max(0.0, fetch.bytes - (known.shards if known else 0) * SHARD_BYTES)
    if run.dataset in ("folder", "shards") and not run.data_path.startswith("hf://"):
        # Shards are used as they are: only their checksums are computed.
        return float(_size(data_dir, run.data_path)) if run.dataset == "folder" else 0.0
    return None


def _sum(sizes: Iterable[float | None]) -> float | None:
    found = list(sizes)
    known = [size for size in found if size is not None]
    return sum(known) if len(known) == len(found) else None


def _parts(run: TrainConfig) -> Iterator[tuple[TrainConfig, float]]:
    """Yield the datasets of a mix, each with its share."""
    parts = parse_mix(run.data_mix or "")
    for part in parts:
        share = part.weight / sum(one.weight for one in parts)
        yield replace(run, dataset=part.dataset, data_path=part.path, data_mix=None), share


def _size(data_dir: Path, text: str) -> int:
    """Return the bytes of the files of a directory or pattern, until they are above the limit."""
    path = data_dir / Path(text).expanduser()
    try:
        files = path.rglob("*") if path.is_dir() else path.parent.glob(path.name)
        total = 0
        for file in files:
            total += file.stat().st_size if file.is_file() else 0
            if total > MOST_BYTES:
                break
    except (OSError, ValueError):  # gpt2.prepare says what is wrong with it
        return 0
    return total
