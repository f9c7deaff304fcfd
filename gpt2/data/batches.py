"""The micro-batches of one rank, in their order, on its device.

Of streamed data, dataset.json lists the shards, and grows while they are read (`python -m gpt2.prepare --run`). All
ranks take the same number of them at the same step, so that they wait, continue and stop together.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from gpt2.data import shards
from gpt2.data.sequences import Batch, Mix, Order, batch, on_device, sequences_of, sources
from gpt2.dist import World, gather
from kmatrix.errors import DataError
from kmatrix.records.dataset import (
    RECORD,
    ShardInfo,
    enough_shards,
    read_dataset,
    sha256_of_mix,
    sha256_of_reading,
    tokens_to_read,
)
from kmatrix.records.train_config import TrainConfig

POLL_S = 0.2  # between two looks at dataset.json
SAY_S = 2.0  # a wait is logged after this time


def check_data(config: TrainConfig) -> None:
    """Raise DataError if the data changed since the run was planned."""
    found = current_sha256(config)
    if found != config.data_sha256:  # a loss on other data must not be compared with the rest of the matrix
        what = f"the data in {config.data_path} changed after the run was planned"
        why = f"hash {found[:12]}..., expected {config.data_sha256[:12]}..."
        raise DataError(what, why=why, hint="restore the former shards, or create a new matrix")


def current_sha256(config: TrainConfig) -> str:
    """Return the hash of the data of a run. A shard whose size and time are those in dataset.json is not read."""
    # Of a mix, dataset.json has only the hashes of its datasets, whose files may have changed since.
    parts = [(one.name, one.weight, shards.current_sha256(Path(one.path), one.shards)) for one in sources(config)]
    return sha256_of_reading(sha256_of_mix(parts) if config.dataset == "mix" else parts[0][2], config)


def positions(config: TrainConfig, world: World, step: int, micro: int) -> range:
    """Return the stream positions of one micro-batch on one rank.

    W ranks with micro-batch B read the same sequences as one rank with micro-batch W x B.
    """
    # Micro-batches in turn, rank by rank: a step reads consecutive positions, however it is divided.
    start = step * config.global_batch + (micro * world.size + world.rank) * config.batch_size
    return range(start, start + config.batch_size)


class Batches:
    """The consecutive micro-batches of one rank, from one dataset or from a weighted mix, on its device."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.sources = sources(config)
        self.mix = Mix([source.weight for source in self.sources], config.seed)
        self.windows = [sequences_of(config, source, "train") for source in self.sources]
        self.orders = [
            Order(windows.counts, config.seed, source=number, in_order=config.data_streaming)
            for number, windows in enumerate(self.windows)
        ]
        # Sequences of each source; without end, if no further shard will be taken
        self._readable = [order.windows if config.data_streaming else math.inf for order in self.orders]
        self._listed: dict[int, list[ShardInfo]] = {}  # in dataset.json of a source
        self.seek(0)

    def describe(self) -> list[str]:
        """Return a log line on how often the run reads its data."""
        if self.config.data_streaming:
            return ["Data: streamed, so the number of epochs is not known"]
        drawn = zip(
            self.sources, self.orders, self.mix.drawn(self.config.max_iters * self.config.global_batch), strict=True
        )
        epochs = [f"{source.name} {count / order.windows:.2f} epochs" for source, order, count in drawn]
        return [f"Data: {', '.join(epochs)}"]

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step starts; of a mix, that of the dataset read most often."""
        drawn = self.mix.drawn(step * self.config.global_batch)
        return max(count // order.windows for order, count in zip(self.orders, drawn, strict=True))

    def wait(self, stopping: Callable[[], bool], say: Callable[[str], object]) -> float | None:
        """Wait until all ranks can read the data of the next step. Return the seconds; None after a stop."""
        # Of the step after it too, whose first micro-batch a GPU reads ahead.
        end = (self._next // self.config.gradient_accumulation + 2) * self.config.global_batch
        begin, seconds, is_said = time.monotonic(), 0.0, False
        needed = self.mix.drawn(end)
        while lacking := [number for number, count in enumerate(needed) if count > self._readable[number]]:
            if seconds > SAY_S and not is_said:
                is_said = True
                names = (f"shard {len(self.windows[one].paths) + 1} of {self.sources[one].name}" for one in lacking)
                say(f"Data: waiting for {', '.join(names)}, which is prepared now")
            found = gather(self.world, ([self._look(number) for number in lacking], stopping()))
            if any(stop for _, stop in found):
                return None
            for number, *seen in zip(lacking, *(seen for seen, _ in found), strict=True):
                self._take(number, *min(seen))
            time.sleep(POLL_S)
            seconds = time.monotonic() - begin
        return seconds

    def _look(self, number: int) -> tuple[int, bool]:
        """Return how many shards of a source dataset.json lists now, and whether they are all that the run reads."""
        source = self.sources[number]
        record = read_dataset(Path(source.path, RECORD))
        listed = self._listed[number] = record.of_kind("train")
        # The shard that completes the tokens is the last one, and the next epoch follows.
        tokens = tokens_to_read(self.config, share=source.weight / self.mix.block)
        enough = enough_shards([shard.tokens for shard in listed], tokens, self.config.block_size)
        # None: shards of the user's, which do not grow
        return enough or len(listed), bool(enough) or record.complete is not False

    def _take(self, number: int, count: int, complete: bool) -> None:
        """Add the shards of a source up to this number. Raises DataError if one is not as it was prepared."""
        windows = self.windows[number]
        for shard in self._listed[number][len(windows.paths) : count]:
            path = Path(self.sources[number].path, shard.name)
            if not shards.is_recorded(path, shard):
                raise DataError(f"{path} changed after the data were prepared", hint="restore the former shard")
            windows.add(path)
        self.orders[number].extend(windows.counts)
        self._readable[number] = math.inf if complete else self.orders[number].windows

    def seek(self, step: int) -> None:
        """Continue with the first micro-batch of a step."""
        self._next = step * self.config.gradient_accumulation  # number of the next micro-batch since the run's start
        reads = (partial(self._read_number, number) for number in itertools.count(self._next))
        self._stream = on_device(reads, self.world.device)

    def next(self) -> Batch:
        """Return the next micro-batch: idx (B, T) and targets (B, T)."""
        self._next += 1
        return next(self._stream)

    def _read_number(self, number: int) -> Batch:
        return self.read(positions(self.config, self.world, *divmod(number, self.config.gradient_accumulation)))

    def read(self, at: Sequence[int]) -> Batch:
        """Return the sequences at these positions: idx and targets, each (B, T)."""
        # Group by dataset, so that each one is read at once, and write the rows back in the order of the positions.
        drawn = [self.mix.at(position) for position in at]
        rows = np.empty((len(drawn), self.config.block_size + 1), dtype=np.int64)  # (B, T + 1)
        for number, (windows, order) in enumerate(zip(self.windows, self.orders, strict=True)):
            mine = [row for row, (source, _) in enumerate(drawn) if source == number]
            rows[mine] = windows.rows([order.at(drawn[row][1]) for row in mine])
        return batch(rows)
