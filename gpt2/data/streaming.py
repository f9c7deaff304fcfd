"""Read shards that are made while the training runs: which are there, which are wanted, and waiting for them.

The order of reading does not depend on how many shards there will be: the shards follow each other, and the sequences
of each are shuffled. Prepared shards are read in the same order by DATA_STREAMING=y.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt2.data import shards
from gpt2.data.packing import load_index, stored_index
from gpt2.data.sequences import DataSource, Order, Place, Windows
from gpt2.data.tokenizer import end_of_document
from gpt2.data.waiting import waiting_for_data
from gpt2.dist import World
from kmatrix.errors import DataError
from kmatrix.records.dataset import (
    FLAT,
    READERS,
    RECORD,
    ProducerFile,
    ReaderFile,
    ShardInfo,
    kind_of,
    read_dataset_or_empty,
)
from kmatrix.records.decode import as_json, decode_optional
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir, program_environment
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import duration

AHEAD = 8  # shards that are made ahead of the training
LAG_STEPS = 2  # steps that another rank may be later than this one
LOOK_S = 1.0  # between two looks while all is there
POLL_S = 0.05  # between two looks for a shard
BEAT_S = 5.0  # between two notes of what a run wants
# A wait is logged after the first, again if its cause has changed after the second, and in any case after the third.
SAY_S, CHANGED_S, AGAIN_S = 2.0, 10.0, 60.0
SILENT_S = 90.0  # a producer on another node that writes nothing for so long is gone; caches of storage take 60 s
MOST_STARTS = 5  # of a producer that ends again and again without a shard


class StreamedWindows(Windows):
    """The training sequences of a dataset whose shards are made while they are read."""

    def __init__(self, config: TrainConfig, source: DataSource) -> None:
        self.folder, self.name = source.folder, source.name
        self.block_size, self.vocab_size = config.block_size, config.vocab_size
        self.limit = config.data_tokens or 0  # training tokens to read; 0: all
        self.end = None if config.data_layout == FLAT else end_of_document(config.tokenizer, Path(config.data_path))
        self.infos: list[ShardInfo] = []  # training shards that were made, those that were deleted too
        self.has_val = False
        self.paths: list[Path] = []
        self.counts: tuple[int, ...] = ()
        self.ends = np.zeros(0, dtype=np.int64)  # sequences of all shards until each one's end
        self.complete = False  # no further shard will be made, or read
        self._mark: tuple[int, int] | None = None  # of dataset.json that was read last
        # Few are open at once: a deleted file takes its space until it is closed.
        self._opened = lru_cache(maxsize=2)(self._open)
        self._index = lru_cache(maxsize=2)(self._loaded)

    def refresh(self) -> None:
        """Read which shards were made, if dataset.json has changed."""
        with suppress(OSError):
            os.listdir(self.folder)  # noqa: PTH208  (network storage then knows new names and new files)
        try:
            stat = (self.folder / RECORD).stat()
        except OSError:
            return
        mark = (stat.st_mtime_ns, stat.st_ino)
        if mark == self._mark and len(self.counts) == len(self.infos):
            return
        record = read_dataset_or_empty(self.folder / RECORD)
        self._mark = mark
        self.has_val = any(kind_of(shard.name) == "val" for shard in record.shards)
        train = sorted((s for s in record.shards if kind_of(s.name) == "train"), key=lambda shard: shard.name)
        counts: list[int] = []
        complete = record.complete is True
        for shard in train:
            count = self._count_of(shard)
            if count is None:  # it is packed when it is there: the next look
                complete = False
                break
            counts.append(count)
            if self.limit and sum(counts) * self.block_size >= self.limit:
                complete = True
                break
        self.infos = train[: max(len(counts), 1)] if self.limit and complete else train
        self.paths = [self.folder / shard.name for shard in self.infos]
        self.counts, self.complete = tuple(counts), complete
        self.ends = np.cumsum(np.asarray(counts, dtype=np.int64))

    @property
    def known(self) -> int:
        """Sequences of the shards that were made."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def is_there(self, shard: int) -> bool:
        """Return whether the file of a shard (from 0) can be read."""
        return shard < len(self.counts) and self.paths[shard].is_file()

    def sha256(self, count: int) -> str:
        """Return the hash of the first shards."""
        return shards.folder_sha256(self.infos[:count])

    def _count_of(self, shard: ShardInfo) -> int | None:
        if self.end is None:
            return max(0, (shard.tokens - 1) // self.block_size)
        path = self.folder / shard.name
        if stored := stored_index(path, self.block_size + 1, self.end, shard.tokens):
            return len(stored)  # also if the shard is deleted
        try:
            return len(load_index(path, shards.open_shard(path), self.block_size + 1, self.end))
        except FileNotFoundError:
            return None

    def tokens(self, shard: int) -> shards.Tokens:
        return self._opened(shard)

    def _open(self, shard: int) -> shards.Tokens:
        return shards.open_shard(self.paths[shard])

    def _loaded(self, shard: int) -> Any:
        assert self.end is not None
        return load_index(self.paths[shard], self.tokens(shard), self.block_size + 1, self.end)

    def _pieces(self, place: Place) -> Sequence[tuple[int, int]]:
        return super()._pieces(place) if self.end is None else self._index(place[0]).pieces(place[1])


class StreamOrder(Order):
    """The order of streamed shards: one after the other, the sequences of each shuffled, again in every epoch."""

    def __init__(self, windows: StreamedWindows, seed: int, *, source: int = 0) -> None:
        super().__init__((), seed, source=source)
        self._source = windows
        self._windows = lru_cache(maxsize=4)(self._shuffle)

    @property
    def known(self) -> int:
        """Sequences of the shards that were made."""
        return self._source.known

    @property
    def counts_now(self) -> tuple[int, ...]:
        """Sequences of each shard that was made."""
        return self._source.counts

    def epoch(self, position: int) -> int:
        return position // self.known if self._source.complete and self.known else 0

    def begins(self, position: int) -> bool:
        return position == 0 or (self._source.complete and position % self.known == 0)

    def shard(self, position: int) -> int:
        """Return the number (from 0) of the shard with a position; after those that were made, the next one."""
        return self._place(position)[1]

    def at(self, position: int) -> Place:
        epoch, shard, within = self._place(position)
        return shard, int(self._windows(epoch, shard, self._source.counts[shard])[within])

    def describe(self) -> str:
        return "its shards follow each other, the sequences of each in a new random order"

    def _place(self, position: int) -> tuple[int, int, int]:
        """Return epoch, shard, and how many sequences of the shard come before a position."""
        ends = self._source.ends
        epoch = self.epoch(position)
        offset = position - epoch * self.known if self._source.complete else position
        shard = int(np.searchsorted(ends, offset, side="right"))
        return epoch, shard, offset - (int(ends[shard - 1]) if shard else 0)

    def _shuffle(self, epoch: int, shard: int, count: int) -> npt.NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64((*self.seed, epoch, shard + 1))).permutation(count)


class StreamRecord:
    """The shards that a run has read, in its checkpoints: a resumed run refuses others in their place."""

    def __init__(self, sources: Sequence[StreamedWindows]) -> None:
        self.sources = sources
        self.read: dict[str, int] = {}  # dataset -> shards that were read, from the first
        self._expected: dict[str, tuple[int, str]] = {}  # the same in the checkpoint, with their hash

    def state_dict(self) -> dict[str, Any]:
        """Return the number of shards that were read of each dataset, and their hash."""
        by_name = {source.name: source for source in self.sources}
        return {name: [count, by_name[name].sha256(count)] for name, count in self.read.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what was read. `check` compares it with the shards, as soon as they are known."""
        self.read = {name: int(count) for name, (count, _) in state.items()}
        self._expected = {name: (int(count), str(sha256)) for name, (count, sha256) in state.items()}

    def check(self) -> None:
        """Raise DataError if the shards that were read are others now."""
        for source in self.sources:
            count, sha256 = self._expected.get(source.name, (0, ""))
            if not count or len(source.infos) < count:
                continue  # dataset.json was lost: they are made again
            if (found := source.sha256(count)) != sha256:
                raise DataError(
                    f"the first {count} shards of {source.folder} are not those that the run has read",
                    why=f"hash {found[:12]}..., expected {sha256[:12]}...",
                    hint="restore the text, or create a new matrix",
                )
            del self._expected[source.name]


class StreamClient:
    """One rank's view of the streamed data of a run. Rank 0 notes what is wanted, and starts the producer."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        run_dir: RunDir,
        *,
        sources: Sequence[StreamedWindows],
        orders: Sequence[StreamOrder],
        drawn: Callable[[int], Sequence[int]],
        event: Callable[[str], object],
    ) -> None:
        """Read nothing yet. drawn: the sequences of each dataset that precede a position.  event: logs a message."""
        self.config, self.world, self.run_dir = config, world, run_dir
        self.sources, self.orders, self.drawn, self.event = sources, orders, drawn, event
        self.record = StreamRecord(sources)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._there: Mapping[str, set[int]] = {}  # the shards of the last step
        self._look_at = 0.0  # when to look at the files again
        self._noted: dict[str, tuple[tuple[int, ...], float]] = {}
        self._counter = 0
        self._beat: tuple[int | None, float] = (None, time.monotonic())  # of the producer's state
        self._reader = f"{run_dir.path.parent.name}.{run_dir.path.name}.json"

    def begin(self, stopping: Callable[[], bool]) -> bool:
        """Wait for the first shards, whose sizes decide what is read. Return False if a stop was requested."""
        for source in self.sources:
            source.refresh()
            self._note(source, () if source.infos else (1,))

        def lacks() -> str:
            for source in self.sources:
                source.refresh()
                if not source.infos or not source.has_val:
                    return f"the first shards of {source.name}"
            return ""

        return self._wait(lacks, stopping) is not None

    def wait(self, step: int, stopping: Callable[[], bool]) -> float | None:
        """Wait until all shards of a step are there, for all ranks. Return the seconds; None after a stop request."""
        needed = {source.name: numbers for source, _, numbers in self._shards_of(step)}
        # A look at the files per second, not per step: on network storage it takes milliseconds.
        if time.monotonic() < self._look_at and all(needed[name] <= self._there.get(name, set()) for name in needed):
            self._was_read(needed)
            return 0.0

        def lacks() -> str:
            for source in self.sources:
                source.refresh()
            self.record.check()
            self._want(step)
            for source, order, numbers in self._shards_of(step):
                needed[source.name] = numbers
                self._check_size(source, order)
                for number in sorted(numbers):
                    if not source.is_there(number):
                        return f"shard {number + 1} of {source.name}"
            return ""

        seconds = self._wait(lacks, stopping)
        if seconds is not None:  # else the shards of this step are not there
            self._look_at = time.monotonic() + LOOK_S
            self._there = needed
            self._was_read(needed)
        return seconds

    def _was_read(self, needed: Mapping[str, set[int]]) -> None:
        for name, numbers in needed.items():
            self.record.read[name] = max(self.record.read.get(name, 0), max(numbers, default=-1) + 1)

    def is_ready(self, start: int, end: int) -> bool:
        """Return whether the sequences from position `start` to `end` - 1 can be read now."""
        for source, order, first, last in self._ranges(start, end):
            if last > first and not all(source.is_there(order.shard(at)) for at in (first, last - 1)):
                return False
        return True

    def close(self) -> None:
        """End the producer, and note that this run wants nothing any more."""
        if self._process:
            self._process.kill()  # what it writes is complete or absent
            self._process.wait()
            self._process = None
        if self.world.main:
            for source in self.sources:
                (source.folder / READERS / self._reader).unlink(missing_ok=True)

    def _ranges(self, start: int, end: int) -> list[tuple[StreamedWindows, StreamOrder, int, int]]:
        drawn = zip(self.sources, self.orders, self.drawn(start), self.drawn(end), strict=True)
        return list(drawn)

    def _shards_of(self, step: int) -> list[tuple[StreamedWindows, StreamOrder, set[int]]]:
        """Return the shards (from 0) that all ranks read in a step, per dataset."""
        start = step * self.config.global_batch
        found = []
        for source, order, first, last in self._ranges(start, start + self.config.global_batch):
            found.append((source, order, _between(order, first, last)))
        return found

    def _check_size(self, source: StreamedWindows, order: StreamOrder) -> None:
        least = self.config.global_batch if len(self.sources) == 1 else 1
        if source.complete and order.known < least:
            raise DataError(
                f"{source.folder} has {order.known} training sequences of {self.config.block_size} tokens",
                why=f"a step takes {least} sequences, and an epoch reads each sequence once",
                hint="use more data, a smaller global batch or a shorter context",
            )

    def _want(self, step: int) -> None:
        """Write which shards this step and the next ones read, as many as the run still needs."""
        if not self.world.main:
            return
        start = step * self.config.global_batch
        late = max(0, step - LAG_STEPS) * self.config.global_batch
        total = self.drawn(self.config.max_iters * self.config.global_batch)
        for (source, order, first, last), before, end in zip(
            self._ranges(start, start + self.config.global_batch), self.drawn(late), total, strict=True
        ):
            now = _between(order, before, last) | _between(order, first, last)
            numbers = [*sorted(now, key=lambda number: (number < order.shard(first), number))]
            numbers += self._next(source, order, max(last - 1, 0), end)
            self._note(source, tuple(number + 1 for number in dict.fromkeys(numbers)))

    def _next(self, source: StreamedWindows, order: StreamOrder, position: int, end: int) -> list[int]:
        """Return the shards (from 0) that follow the one of a position, until the last position of the run."""
        numbers: list[int] = []
        number, epoch = order.shard(position), order.epoch(position)
        # Sequences until the end of this shard, as far as the sizes are known.
        reach = epoch * order.known + (int(source.ends[number]) if number < len(source.ends) else source.known)
        for _ in range(AHEAD):
            if reach >= end:
                break
            number += 1
            if number >= len(source.counts) and source.complete:
                number, epoch = 0, epoch + 1
            numbers.append(number)
            known = number < len(source.counts)
            guess = max(1, (self.config.shard_tokens or 1) // self.config.block_size)
            reach += source.counts[number] if known else guess
        return numbers

    def _note(self, source: StreamedWindows, numbers: tuple[int, ...]) -> None:
        """Write which shards this run wants, if that has changed or was written long ago."""
        if not self.world.main:
            return
        former, since = self._noted.get(source.name, ((), -math.inf))
        if former == numbers and time.monotonic() - since < BEAT_S:
            return
        self._counter += 1
        path = source.folder / READERS / self._reader
        write_json(path, as_json(ReaderFile(shards=numbers, counter=self._counter)), durable=False)
        self._noted[source.name] = numbers, time.monotonic()

    def _wait(self, lacks: Callable[[], str], stopping: Callable[[], bool]) -> float | None:
        """Wait until nothing lacks, and return the seconds; None after a stop request."""
        what = lacks()
        if not what:
            return 0.0
        begin = time.monotonic()
        say_at = begin + SAY_S
        limit_s = math.inf if self.config.data_wait is None else self.config.data_wait
        said: str | None = None  # what the producer did when the wait was logged
        with waiting_for_data():
            while what := lacks():
                if stopping():
                    return None
                now = time.monotonic()
                state = self._check_producer(now)
                if now - begin > limit_s:
                    raise DataError(
                        f"waited {duration(now - begin)} for {what}",
                        why=state or "nothing is known of the process that makes it",
                        hint="continue the run when the source of the data answers, or set DATA_WAIT",
                    )
                if now >= say_at or (said is not None and state != said and now >= say_at - AGAIN_S + CHANGED_S):
                    self.event(f"waits for {what}: {state or 'its producer starts'}")
                    say_at, said = now + AGAIN_S, state
                time.sleep(POLL_S)
        seconds = time.monotonic() - begin
        if said is not None:
            self.event(f"the data are there: waited {duration(seconds)}")
        return seconds

    def _check_producer(self, now: float) -> str:
        """Start the producer if none runs, and return what it does. Raises DataError if it has failed."""
        state = decode_optional(self.run_dir.producer, ProducerFile)
        if self.world.main:
            code = self._process.poll() if self._process else None
            if self._process and state and state.pid != self._process.pid:
                state = None  # of an earlier attempt
            if self._process is None or code is not None:
                if code is not None and state and state.failed:
                    raise _failure(state.failed)
                self._start(code)
        elif state:
            counter, since = self._beat
            if counter != state.counter:
                self._beat = state.counter, now
            elif now - since > SILENT_S:
                raise DataError(
                    "the process that makes the data has ended",
                    why=f"{self.run_dir.producer} is not rewritten",
                    hint="continue the run",
                )
        if state is None:
            return ""
        doing = [state.doing[str(source.folder)] for source in self.sources if str(source.folder) in state.doing]
        return "; ".join(dict.fromkeys(doing))

    def _start(self, code: int | None) -> None:
        if code is not None:
            self._starts += 1
            self.event(f"the producer ended with {_how(code)}, and is started again")
        if self._starts > MOST_STARTS:
            raise DataError("the producer of the data ends again and again", why=f"last with {_how(code or 0)}")
        command = [sys.executable, "-m", "gpt2.prepare.producer", "--state", str(self.run_dir.producer)]
        command += ["--parent", str(os.getpid()), *dict.fromkeys(str(source.folder) for source in self.sources)]
        root = Path(__file__).parents[2]
        self.run_dir.producer.unlink(missing_ok=True)
        # Its messages are those of this process: they are in the log of the run.
        self._process = subprocess.Popen(
            command, cwd=root, env=program_environment(root), stdin=subprocess.DEVNULL, stdout=sys.stderr
        )


def _between(order: StreamOrder, first: int, last: int) -> set[int]:
    """Return the shards (from 0) with the positions from `first` to `last` - 1."""
    if last <= first:
        return set()
    begin, end = order.shard(first), order.shard(last - 1)
    if order.epoch(first) == order.epoch(last - 1):
        return set(range(begin, end + 1))
    return set(range(begin, len(order.counts_now))) | set(range(end + 1))


def _failure(failed: tuple[str, str, str]) -> DataError:
    what, why, hint = failed
    return DataError(what, why=why, hint=hint)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
