"""Training shards that are prepared while the training reads them, in their order.

dataset.json lists the shards, and grows (gpt2.prepare.beside). All ranks take the same number of them at the same step,
so that they wait, continue and stop together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpt2.data import shards
from gpt2.data.sequences import Order, Windows
from gpt2.dist import World, gather
from kmatrix.errors import DataError
from kmatrix.records.dataset import RECORD, ShardInfo, SourceEntry, kind_of, read_dataset, whole_windows

POLL_S = 0.2  # between two looks at dataset.json
SAY_S = 2.0  # a wait is logged after this time
Say = Callable[[str], object]


class GrowingShards:
    """The training shards of one dataset that all ranks have taken. It begins with those of `windows`."""

    def __init__(self, source: SourceEntry, windows: Windows, order: Order, *, tokens: int) -> None:
        """tokens: that the run reads. The shard that completes them is the last one, and the next epoch follows."""
        self.name, self.folder = source.name, Path(source.path)
        self.windows, self.order, self.tokens = windows, order, tokens
        self.complete = False  # no further shard will be taken
        self._listed: list[ShardInfo] = []

    def covers(self, sequences: int) -> bool:
        """Return whether this many sequences of the dataset can be read."""
        return self.complete or sequences <= self.order.windows

    def look(self) -> tuple[int, bool]:
        """Return how many shards dataset.json lists now, and whether they are all that the run reads."""
        record = read_dataset(self.folder / RECORD)
        train = (shard for shard in record.shards if kind_of(shard.name) == "train")
        self._listed = sorted(train, key=lambda shard: shard.name)
        held = 0
        for number, shard in enumerate(self._listed, 1):
            held += whole_windows(shard.tokens, self.windows.block_size)
            if held >= self.tokens:
                return number, True
        return len(self._listed), record.complete is not False  # None: shards of the user's, which do not grow

    def take(self, count: int, complete: bool) -> None:
        """Add the shards up to this number. Raises DataError if one is not as it was prepared."""
        for shard in self._listed[len(self.windows.paths) : count]:
            path = self.folder / shard.name
            if not shards.is_recorded(path, shard):
                raise DataError(f"{path} changed after the data were prepared", hint="restore the former shard")
            self.windows.add(path)
        self.order.extend(self.windows.counts)
        self.complete = complete


def wait_for(needed: Mapping[GrowingShards, int], world: World, stopping: Callable[[], bool], say: Say) -> float | None:
    """Wait until all ranks can read so many sequences of each dataset. Return the seconds; None if one has to stop."""
    begin, seconds, is_said = time.monotonic(), 0.0, False
    while lacking := [one for one, count in needed.items() if not one.covers(count)]:
        if seconds > SAY_S and not is_said:
            is_said = True
            names = ", ".join(f"shard {len(one.windows.paths) + 1} of {one.name}" for one in lacking)
            say(f"Data: waiting for {names}, which is prepared now")
        found = gather(world, ([one.look() for one in lacking], stopping()))
        if any(stop for _, stop in found):
            return None
        for number, one in enumerate(lacking):
            one.take(*min(seen[number] for seen, _ in found))
        time.sleep(POLL_S)
        seconds = time.monotonic() - begin
    return seconds
