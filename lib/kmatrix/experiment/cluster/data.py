"""Refuse data that are too large to be prepared on a login node of Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from kmatrix.errors import DataError
from kmatrix.experiment.inputs.data import Key, key, needs, prebuilt_of, prepared, to_fetch
from kmatrix.forms import parse_mix
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import first_names, make_command

MOST_BYTES = 10**9  # of a download: a minute of a login node
SMALL = frozenset({"stdlib", "shakespeare"})  # a few MB


def refuse_large_data(data_dir: Path, runs: Iterable[TrainConfig], shards: Mapping[Key, int] | None = None) -> None:
    """Raise DataError if this process, outside a job, would have to download large data, or data of unknown size.

    shards: number of training shards per dataset, if given.
    """
    by_key = {key(run): run for run in runs}
    needed = needs(by_key.values(), shards)
    large = [run.dataset for name, run in by_key.items() if _is_large(data_dir, run, needed[name].tokens)]
    if large and "SLURM_JOB_ID" not in os.environ:
        raise DataError(
            f"the data are not prepared: {first_names(dict.fromkeys(large))}",
            why="more than 1 GB to download, or of unknown size: too much for a login node",
            hint=f"prepare them on another node: srun -c 8 {make_command('prepare-data')}",
        )


def _is_large(data_dir: Path, run: TrainConfig, tokens: int) -> bool:
    known = prepared(data_dir, run)
    # Of streamed data, only the first shard is made now.
    if (known is not None and (known.is_complete or run.data_streaming)) or run.dataset in SMALL:
        return False
    if run.dataset == "mix":
        parts = [
            replace(run, dataset=part.dataset, data_path=part.path, data_mix=None)
            for part in parse_mix(run.data_mix or "")
        ]
        return any(_is_large(data_dir, part, tokens) for part in parts)
    if prebuilt := prebuilt_of(run, tokens):
        return to_fetch(prebuilt, tokens, run.block_size)[1] > MOST_BYTES
    return run.dataset not in ("folder", "shards")
