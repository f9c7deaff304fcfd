"""Tokenize documents into shards on all cores. Output is identical after any number of interruptions."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2.data import shards, tokenizer
from gpt2.data.tokenizer import Tokenizer, Tokens
from gpt2.prepare import text
from gpt2.prepare.catalog import DatasetOrigin
from gpt2.prepare.progress import PreparationProgress, say
from gpt2.prepare.text import Corpus
from kmatrix.errors import DataError
from kmatrix.records.dataset import RECORD, ShardInfo, kind_of
from kmatrix.records.decode import replaced as replace
from kmatrix.records.files import write_json
from kmatrix.text import plural

BATCH_CHARACTERS = 1 << 20  # characters per batch of one process
ALONE_BYTES = 8 << 20  # smaller corpora are tokenized in this process: starting others takes longer
NAMED_SKIPS = 5  # files that are named one by one
BPE_BYTES = 100 << 20  # text that a BPE tokenizer is trained on
LONGEST_FIRST = 8  # times the tokens of a shard: the most that the first one waits for a document for validation
Place = tuple[int, int]  # file, document in the file: the next one to read


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or a part of a divided document."""

    text: str
    kind: str  # "train", "val", or "": its hash decides
    after: Place  # of the next document


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """The tokens of a document, with the end-of-document token first."""

    tokens: Tokens
    held_out: bool  # for validation
    size: int  # UTF-8 bytes of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the documents of a corpus become shards."""

    name: str
    tokenizer: str
    column: str  # of JSON lines and Parquet
    val_percent: int  # percent of the documents
    shard_tokens: int  # maximum, unless one document has more
    bpe_vocab_size: int


@dataclass(slots=True)
class ShardBuffer:
    """The content of a shard that is not written yet."""

    parts: list[Tokens] = field(default_factory=list)
    tokens: int = 0
    size: int = 0  # UTF-8 bytes of the text

    def add(self, document: TokenizedDocument) -> None:
        self.parts.append(document.tokens)
        self.tokens += len(document.tokens)
        self.size += document.size


class ShardWriter:
    """Writes the shards of a corpus until `enough` accepts the training shards, or the corpus ends.

    dataset.json is updated after each shard and stores the position of the next document. An interrupted process
    therefore loses at most one shard, and resuming gives the same shards.
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        folder: Path,
        origin: DatasetOrigin,
        enough: Callable[[Sequence[ShardInfo]], bool],
        *,
        guessed: bool = False,
        first: int | None = None,
    ) -> None:
        """Read the position. first: training shard of dataset.json to begin with; None: begin after the last one."""
        self.recipe, self.corpus, self.folder, self.origin, self.enough = recipe, corpus, folder, origin, enough
        self.vocab_size = 0  # known when the tokenizer is
        self.listed: list[ShardInfo] = shards.recorded(folder)
        position = shards.position(folder) if self.listed else None
        self.next: Place = (position[0], position[1]) if position else (0, 0)
        self.end = self.next if self.listed else None  # of the text in the listed shards
        self.number = sum(kind_of(shard.name) == "train" for shard in self.listed) + 1  # of the next training shard
        if first is not None and first < self.number:
            self.number, self.next = first, self._start_of(first)
        self.begin = self.next  # of the shard that is being filled
        self.train, self.val = ShardBuffer(), ShardBuffer()
        self.guessed = guessed  # the user did not name the files: skip those that are not text
        self.skipped: dict[str, None] = {}  # names of those

    def run(self) -> None:
        """Write the shards that are missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.vocab_size = self._tokenizer().vocab_size
        workers = _workers(self.corpus)
        progress = PreparationProgress(self.recipe.name, "tokens")
        # Two batches per worker ahead: enough to keep all busy, and few enough to stay in memory.
        with _encoder(self.recipe, self.folder, workers) as encode, progress:
            for document, encoded in _pipeline(encode, self._batches(), 2 * workers):
                if self._add(encoded):
                    return
                self.next = document.after
                progress.add(len(encoded.tokens), f"file {document.after[0] + 1} of {len(self.corpus.parts)}")
        if len(self.skipped) > NAMED_SKIPS:
            say(f"skipped {plural(len(self.skipped), 'file')} in all that are not UTF-8 text")
        self._end()

    def _start_of(self, number: int) -> Place:
        start = next(shard.start for shard in self.listed if shard.name == self._name("train", number))
        if start is None:
            raise DataError(
                f"{self.folder / RECORD} does not say where the text of shard {number} starts",
                hint="delete the folder: its shards are made again",
            )
        return start

    def _name(self, kind: str, number: int) -> str:
        return f"{self.recipe.name}_{kind}_{number:06d}.bin"

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer; train it on the corpus first if its vocabulary belongs to the dataset."""
        path = self.folder / tokenizer.FILE
        if self.recipe.tokenizer == "char" and not path.exists():
            tokenizer.CharTokenizer.trained(doc.text for doc in self._documents()).save(path)
        elif self.recipe.tokenizer == "bpe" and not path.exists():
            texts = (doc.text for doc in self._documents() if not _held_out(doc, self.recipe.val_percent))
            tokenizer.BpeTokenizer.trained(_take_first(texts, BPE_BYTES), self.recipe.bpe_vocab_size).save(path)
        return tokenizer.load(self.recipe.tokenizer, self.folder)

    def _files(self) -> Iterator[Iterator[Document]]:
        """Yield the documents of each file, from the current position. A file is downloaded when it is reached."""
        # With few files, the hash of a whole file would make the validation share a matter of luck.
        parts = self.corpus.parts
        divided = len(parts) < text.FEW and all(part.plain for part in parts)
        for number in range(self.next[0], len(parts)):
            start = self.next[1] if number == self.next[0] else 0
            yield self._documents_of(number, start, divided=divided)

    def _documents_of(self, number: int, start: int, *, divided: bool) -> Iterator[Document]:
        part = self.corpus.parts[number]
        skip = self._skip if self.guessed else None
        texts = text.documents(self.corpus.path(part), part, self.recipe.column, on_skip=skip)
        for index, value in enumerate(itertools.islice(texts, start, None), start):
            yield from _split(value, self.recipe.val_percent, (number, index + 1), divided=divided)

    def _skip(self, name: str) -> None:
        if name not in self.skipped:  # read for the vocabulary before
            self.skipped[name] = None
            if len(self.skipped) <= NAMED_SKIPS:
                say(f"skipped {name}: not UTF-8 text")

    def _documents(self) -> Iterator[Document]:
        return itertools.chain.from_iterable(self._files())

    def _batches(self) -> Iterator[list[Document]]:
        """Yield batches of documents. A batch ends with a downloaded file: it must not wait for the next one."""
        batch: list[Document] = []
        size = 0
        for documents in self._files():
            for document in documents:
                batch.append(document)
                size += len(document.text)
                if size >= BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
            if batch and self.corpus.is_remote:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _add(self, document: TokenizedDocument) -> bool:
        """Add a document to its shard. Return True, without adding it, if there are enough shards."""
        if document.held_out:
            if not shards.has_val(self.listed):  # validation is complete with the first training shard
                self.val.add(document)
            return False
        if self.train.tokens and self.train.tokens + len(document.tokens) > self._limit():
            self._flush(self.next)
            if self.enough([shard for shard in self.listed if kind_of(shard.name) == "train"]):
                return True
        self.train.add(document)
        return False

    def _limit(self) -> int:
        """Return the most tokens of the shard that is being filled."""
        name = self._name("train", self.number)
        if former := next((shard for shard in self.listed if shard.name == name), None):
            return former.tokens  # it is made again
        # Of few documents none may be for validation, which ends with the first shard: it waits for one.
        waits = not self.val.tokens and not shards.has_val(self.listed)
        return self.recipe.shard_tokens * (LONGEST_FIRST if waits else 1)

    def _flush(self, place: Place, *, complete: bool = False) -> None:
        """Write the buffered shards, then dataset.json. `place`: where the next shard starts."""
        if not shards.has_val(self.listed):
            self._check_val()
            self._write("val", 0, self.val)
            self.val = ShardBuffer()
        if self.train.tokens:
            self._write("train", self.number, self.train)
            self.number += 1
            self.begin = place
            self.train = ShardBuffer()
        # A shard that was made again ends before the end of the text that is tokenized.
        self.end = max(self.end or place, place)
        # After the shards: a record never lists a shard that is not complete. A shard without a record is overwritten.
        about = {**self.origin.to_json(), "vocab_size": self.vocab_size, "position": list(self.end)}
        about["complete"] = complete or self.end[0] >= len(self.corpus.parts)
        write_json(self.folder / RECORD, shards.record(self.listed, **about))
        for part in self.corpus.parts[: place[0]]:  # not before: a resumed preparation would download them again
            self.corpus.release(part)

    def _write(self, kind: str, number: int, buffer: ShardBuffer) -> None:
        path = self.folder / self._name(kind, number)
        shards.write_shard(path, np.concatenate(buffer.parts) if buffer.parts else [])
        start = self.begin if kind == "train" else (0, 0)
        made = replace(shards.read_info(path, text_bytes=buffer.size), start=start)
        known = {shard.name: shard for shard in self.listed}
        former = known.get(made.name)
        if former and former.sha256 != made.sha256:
            path.unlink()  # nobody may train on it
            raise DataError(
                f"{path} is not the shard that it was: its text has changed",
                why=f"SHA-256 {made.sha256[:12]}..., expected {former.sha256[:12]}...",
                hint="restore the text, or start a new matrix",
            )
        self.listed = list({**known, made.name: made}.values())

    def _end(self) -> None:
        if not self.train.tokens and not self.listed:
            raise DataError(
                f"no text in the {plural(len(self.corpus.parts), 'file')} of {self.origin.source}",
                why="none of them is UTF-8 text" if len(self.skipped) == len(self.corpus.parts) else "",
                hint="check the files and TEXT_COLUMN=",
            )
        self._flush((len(self.corpus.parts), 0), complete=True)

    def _check_val(self) -> None:
        if not self.val.tokens or not self.train.tokens:
            raise DataError(
                f"{self.origin.source} has no documents for {'training' if self.val.tokens else 'validation'}",
                why=f"{self.recipe.val_percent} percent of few documents are for validation",
                hint="use more documents, or another VAL_PERCENT=",
            )


def _split(value: str, percent: int, after: Place, *, divided: bool) -> Iterator[Document]:
    """Yield a document, or its beginning for training and its end for validation."""
    if not divided:
        yield Document(value, "", after)
        return
    # The position after the first half is still before the document: a resumed preparation reads both halves again.
    cut = len(value) * (100 - percent) // 100
    before = (after[0], after[1] - 1)
    yield Document(value[:cut], "train", before)
    yield Document(value[cut:], "val", after)


def _held_out(document: Document, percent: int) -> bool:
    """Return whether a document is validation data. The hash of its text decides, so that copies are too."""
    if document.kind:
        return document.kind == "val"
    # Not hash(), which differs between processes.
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def _take_first(texts: Iterator[str], size: int) -> Iterator[str]:
    for value in texts:
        if size <= 0:
            return
        size -= len(value)
        yield value


def encode(documents: Sequence[Document], inner: Tokenizer, percent: int) -> list[TokenizedDocument]:
    """Return the tokens of documents, each after an end-of-document token, as in llm.c."""
    end = np.array([inner.end_of_document], dtype=np.uint16)
    found = []
    for document in documents:
        tokens = np.concatenate([end, inner.encode(document.text)])
        found.append(TokenizedDocument(tokens, _held_out(document, percent), len(document.text.encode())))
    return found


Encoder = Callable[[Sequence[Document]], "Future[list[TokenizedDocument]]"]
_inner: Tokenizer | None = None  # of a worker process


def _workers(corpus: Corpus) -> int:
    """Return the number of tokenizer processes; 0 on one core or for a small corpus."""
    cores = len(os.sched_getaffinity(0))  # not cpu_count, which ignores Slurm's and taskset's limits
    return cores if cores > 1 and sum(part.size for part in corpus.parts) >= ALONE_BYTES else 0


@contextmanager
def _encoder(recipe: Recipe, folder: Path, workers: int) -> Iterator[Encoder]:
    """Yield a function that tokenizes documents, in worker processes or in this process."""
    inner = tokenizer.load(recipe.tokenizer, folder)
    if not workers:
        yield lambda documents: _completed(encode(documents, inner, recipe.val_percent))
        return
    inner.encode("a")  # downloads a missing vocabulary once, before the processes start
    # spawn, because forking a process with threads (tokenizers, pyarrow) can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _init_worker, (recipe.tokenizer, folder)) as pool:
        try:
            yield lambda documents: pool.submit(_encode, documents, recipe.val_percent)
        # Broad, because also after Ctrl+C the pool's exit would wait for all submitted batches. The error continues.
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _completed(value: list[TokenizedDocument]) -> Future[list[TokenizedDocument]]:
    future: Future[list[TokenizedDocument]] = Future()
    future.set_result(value)
    return future


def _init_worker(name: str, folder: Path) -> None:
    """Initialize a worker process, which exits when its parent does."""
    global _inner  # noqa: PLW0603  (what a pool's initializer leaves for its calls)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl+C
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        assert parent
        parent.join()
        os._exit(1)  # this process holds both ends of the pool's queue, so it would wait for work forever

    threading.Thread(target=exit_with_parent, daemon=True).start()
    _inner = tokenizer.load(name, folder)


def _encode(documents: Sequence[Document], percent: int) -> list[TokenizedDocument]:
    assert _inner
    return encode(documents, _inner, percent)


def _pipeline(
    submit: Encoder, batches: Iterator[list[Document]], ahead: int
) -> Iterator[tuple[Document, TokenizedDocument]]:
    """Yield each document with its tokens, in order. ahead: batches submitted in advance."""
    # Results are taken in the order of submission, whichever process is faster: the shards are always the same.
    pending: deque[tuple[list[Document], Future[list[TokenizedDocument]]]] = deque()
    try:
        for batch in batches:
            pending.append((batch, submit(batch)))
            if len(pending) > ahead:
                yield from _finished(pending)
        while pending:
            yield from _finished(pending)
    except BrokenProcessPool:
        raise DataError("a tokenizer process was killed", why="possibly out of memory", hint="run it again") from None


def _finished(
    pending: deque[tuple[list[Document], Future[list[TokenizedDocument]]]],
) -> Iterator[tuple[Document, TokenizedDocument]]:
    batch, future = pending.popleft()
    yield from zip(batch, future.result(), strict=True)
