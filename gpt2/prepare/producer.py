"""Make the shards of streamed datasets ahead of the training, in a process of its own.

python -m gpt2.prepare.producer --state RUN_DIR/producer.json FOLDER...

Each folder has a stream.json, and .readers/ with the shards that runs want. This process makes them in order, deletes
those that nobody wants if the dataset is not kept, waits for servers that do not answer, and ends with its parent.
Several of them may work for one folder: a lock makes one of them write at a time, and the others use its shards.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

from gpt2.data import shards
from gpt2.data.download import UnavailableError
from gpt2.prepare import dataset, hub, text
from gpt2.prepare.catalog import DatasetOrigin, DatasetRequest, vocabulary
from gpt2.prepare.progress import say
from kmatrix.errors import DataError, KmatrixError, reason_of
from kmatrix.records.dataset import (
    READERS,
    RECORD,
    STREAM,
    DatasetFile,
    ProducerFile,
    ReaderFile,
    ShardInfo,
    StreamFile,
    kind_of,
    read_dataset_or_empty,
)
from kmatrix.records.decode import as_json, decode, decode_optional
from kmatrix.records.files import write_json

POLL_S = 0.1  # between two looks at what is wanted
BEAT_S = 1.0  # between two states
IDLE_S = 300.0  # then others may prepare the same data
SILENT_S = 60.0  # a reader that writes nothing for so long is gone
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a server is asked again; doubled each time
NICE = 10  # the training comes first: on the CPU both share its cores
PR_SET_PDEATHSIG = 1  # prctl(2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gpt2.prepare.producer", description="Make shards for running runs."
    )
    parser.add_argument("--state", type=Path, required=True, help="file that says what this process does")
    parser.add_argument(
        "--parent", type=int, required=True, help="process id of the trainer: this process ends with it"
    )
    parser.add_argument("folders", type=Path, nargs="+", help="folders with a stream.json")
    args = parser.parse_args(argv)
    _end_with(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C: the trainer saves, and ends this process then
    with suppress(OSError):
        os.nice(NICE)
    producers = [Producer(folder) for folder in args.folders]
    threads = [threading.Thread(target=producer.run, daemon=True) for producer in producers]
    for thread in threads:
        thread.start()
    counter = 0
    while os.getppid() == args.parent:  # also without prctl
        failed = next((producer.failed for producer in producers if producer.failed), None)
        counter += 1
        doing = {str(producer.folder): producer.describe() for producer in producers}
        with suppress(OSError):  # on a full disk it is outdated for a while
            state = ProducerFile(pid=os.getpid(), counter=counter, doing=doing, failed=failed)
            write_json(args.state, as_json(state), durable=False, parents=False)
        if failed:
            return 2
        for thread in threads:
            thread.join(BEAT_S / len(threads))
    return 0


def _end_with(parent: int) -> None:
    """End this process when the trainer does, also if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)


class Producer:
    """Makes the shards of one folder that runs want. `run` is a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.doing = "starts"
        self.trouble = ""  # why the server did not answer last, until it does
        self.failed: tuple[str, str, str] | None = None  # what, why and hint of the error that ended it
        self._seen: dict[Path, tuple[int, float]] = {}  # file of a reader -> its last counter, and since when

    def run(self) -> None:
        """Make shards until this process ends, or an error that waiting does not fix."""
        try:
            self._run()
        except KmatrixError as error:
            self.failed = error.what, error.why, error.hint
        except OSError as error:
            self.failed = f"cannot write {error.filename or self.folder}", reason_of(error), "check DATA_DIR"
        # Broad, because the training would wait for a thread that ended without a message.
        except Exception as error:
            self.failed = f"the producer of {self.folder} failed", f"{type(error).__name__}: {error}", ""
            raise

    def _run(self) -> None:
        stream = decode(self.folder / STREAM, StreamFile)
        pause_s = FIRST_PAUSE_S
        while True:
            wanted = self.wanted()
            if stream.drop:
                self._drop(set(wanted))
            if self.missing(wanted) is None:
                self.doing = "is ahead of the training"
                time.sleep(POLL_S)
                continue
            try:
                with _try_lock(self.folder) as mine:
                    if mine:
                        self._make(stream)
                    else:
                        self.doing = "another process makes the shards"
                        time.sleep(POLL_S)
                pause_s = FIRST_PAUSE_S
            except UnavailableError as error:
                self.trouble = f"last error: {error.what}: {error.why}"
                self.doing = f"asks again in {pause_s:g} s"
                say(f"data: {error.what}: {error.why}; {self.doing}")
                time.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def describe(self) -> str:
        """Return what it does now, and why the last attempt failed."""
        return f"{self.doing} ({self.trouble})" if self.trouble else self.doing

    def wanted(self) -> list[int]:
        """Return the numbers of the shards that live readers want, the most urgent first."""
        lists = []
        now = time.monotonic()
        for path in sorted((self.folder / READERS).glob("*.json")):
            reader = decode_optional(path, ReaderFile)
            if reader is None:
                continue
            counter, since = self._seen.get(path, (None, now))
            if counter != reader.counter:
                since = now
            self._seen[path] = reader.counter, since
            if now - since < SILENT_S:
                lists.append(reader.shards)
        turns = max(map(len, lists), default=0)
        return list(dict.fromkeys(shards_[turn] for turn in range(turns) for shards_ in lists if turn < len(shards_)))

    def missing(self, wanted: Sequence[int]) -> int | None:
        """Return the first wanted shard that has to be made, None if all are there."""
        record = read_dataset_or_empty(self.folder / RECORD)
        train = train_infos(record)
        for number in wanted:
            if number > len(train):
                return None if record.complete else number
            if not is_there(self.folder, train[number - 1]):
                return number
        return None

    def _make(self, stream: StreamFile) -> None:
        """Make wanted shards, one after the other, as long as the next one is wanted and missing."""
        request = DatasetRequest(**{field.name: stream.request[field.name] for field in fields(DatasetRequest)})
        recipe = {**request.recipe, **dataset.version_of(request, Path(stream.data_dir))}
        if dataset.shards_on_hub(request):
            recipe = request.recipe
        if recipe != stream.recipe:
            raise DataError(
                f"the text of {stream.source} changed while it is read",
                why="names, sizes or times of its files differ from those that the run was planned with",
                hint="restore the files, or start a new matrix",
            )
        origin = DatasetOrigin(
            dataset=request.dataset,
            source=stream.source,
            commit=stream.commit,
            tokenizer=request.tokenizer,
            recipe=stream.recipe,
        )
        self._forget_other_shards(stream)
        if dataset.shards_on_hub(request):
            self._download(request, origin)
        else:
            self._tokenize(request, origin, Path(stream.data_dir))

    def _forget_other_shards(self, stream: StreamFile) -> None:
        """Delete dataset.json if it is of other data. Raise DataError if its shards are to be kept."""
        record = read_dataset_or_empty(self.folder / RECORD)
        if not record.shards or (record.recipe == stream.recipe and record.commit == stream.commit):
            return
        if not stream.drop:
            raise DataError(
                f"{self.folder} has shards of other data",
                why=f"{record.commit or record.recipe} instead of {stream.commit or stream.recipe}",
                hint="set another DATA_DIR, or DATA_CACHE=drop, which has a directory of its own",
            )
        (self.folder / RECORD).unlink()

    def _tokenize(self, request: DatasetRequest, origin: DatasetOrigin, data_dir: Path) -> None:
        number = self.missing(self.wanted())
        if number is None:
            return
        self.doing = f"lists the files of {origin.source}"
        found, _, _ = dataset.corpus_of(request, data_dir, self.folder, origin.commit)
        corpus = Watched(found, self)
        made = len(train_infos(read_dataset_or_empty(self.folder / RECORD)))
        # A shard that was dropped is made again from where its text starts.
        first = number if number <= made else None
        written = first or made + 1

        def enough(_: Sequence[ShardInfo]) -> bool:
            nonlocal written
            written += 1
            self.trouble = ""
            return not self._is_next(written)

        dataset.shard_writer(request, corpus, self.folder, origin, enough, first=first).run()
        if read_dataset_or_empty(self.folder / RECORD).complete:
            hub.clear(self.folder)

    def _is_next(self, number: int) -> bool:
        """Wait until a wanted shard is missing, and return whether it is this one, which can be made at once."""
        # Its tokenizer processes, and the place in the file, stay: another start would read the file to that place.
        begin = time.monotonic()
        while time.monotonic() - begin < IDLE_S:
            self.drop_unwanted()
            if (missing := self.missing(self.wanted())) is not None:
                return missing == number
            self.doing = "is ahead of the training"
            time.sleep(POLL_S)
        return False

    def drop_unwanted(self) -> None:
        """Delete the shards that no run wants, if the dataset is not kept."""
        if decode(self.folder / STREAM, StreamFile).drop:
            self._drop(set(self.wanted()))

    def _download(self, request: DatasetRequest, origin: DatasetOrigin) -> None:
        """Download the next wanted prebuilt shard, and those for validation first."""
        repository = dataset.shards_on_hub(request)
        assert repository
        self.doing = f"lists the files of {repository.name}"
        listing = hub.listing(repository, origin.commit)
        train = [file for file in listing.files if kind_of_file(file.name) == "train"]
        val = [file for file in listing.files if kind_of_file(file.name) == "val"]
        if not train or not val:
            raise DataError(
                f"{repository.name} has {len(train)} training and {len(val)} validation shards",
                hint="name a dataset of token shards",
            )
        while (number := self.missing(self.wanted())) is not None and number <= len(train):
            known = {shard.name: shard for shard in read_dataset_or_empty(self.folder / RECORD).shards}
            for file in (*(file for file in val if file.name not in known), train[number - 1]):
                self.doing = f"downloads {file.name}"
                path = hub.fetch(listing, file, self.folder)
                made = shards.read_info(path)
                shards.check_tokens(path, made, vocabulary(request.tokenizer))
                path.replace(self.folder / file.name)
                known[file.name] = made
            listed = [known[name] for name in sorted(known)]
            complete = sum(kind_of(shard.name) == "train" for shard in listed) == len(train)
            about = {**origin.to_json(), "vocab_size": vocabulary(request.tokenizer), "complete": complete}
            write_json(self.folder / RECORD, shards.record(listed, **about))
            self.trouble = ""
            self.drop_unwanted()

    def _drop(self, wanted: set[int]) -> None:
        for number, shard in enumerate(train_infos(read_dataset_or_empty(self.folder / RECORD)), 1):
            if number not in wanted and wanted:  # without a reader nobody says what is not needed
                (self.folder / shard.name).unlink(missing_ok=True)


class Watched:
    """A corpus that says which file is downloaded now."""

    def __init__(self, corpus: text.Corpus, producer: Producer) -> None:
        self._corpus, self._producer = corpus, producer

    @property
    def parts(self) -> tuple[text.TextPart, ...]:
        return self._corpus.parts

    @property
    def is_remote(self) -> bool:
        return self._corpus.is_remote

    def path(self, part: text.TextPart) -> Path:
        self._producer.doing = f"downloads {part.name}" if self.is_remote else f"tokenizes {part.name}"
        path = self._corpus.path(part)
        self._producer.doing = f"tokenizes {part.name}"
        return path

    def release(self, part: text.TextPart) -> None:
        self._corpus.release(part)


def kind_of_file(name: str) -> str:
    """Return "train" or "val" for the name of a shard, "" for another file."""
    try:
        return kind_of(name)
    except StopIteration:
        return ""


def train_infos(record: DatasetFile) -> list[ShardInfo]:
    """Return the training shards that were made, in their order, those that were deleted too."""
    return sorted((shard for shard in record.shards if kind_of(shard.name) == "train"), key=lambda shard: shard.name)


def is_there(folder: Path, shard: ShardInfo) -> bool:
    """Return whether a shard is in its folder, unchanged."""
    try:
        stat = (folder / shard.name).stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (shard.size, shard.mtime_ns)


@contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    """Yield whether this process got the lock of a folder, the one of `gpt2.prepare.dataset.locked`."""
    with dataset.lock_path(folder).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


if __name__ == "__main__":
    sys.exit(main())
