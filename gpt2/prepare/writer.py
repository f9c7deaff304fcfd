"""Tokenize documents into shards on all cores. Output is identical after any number of interruptions."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data import shards, tokenizer
from gpt2.data.tokenizer import Tokenizer, Tokens
from gpt2.prepare import text
from gpt2.prepare.catalog import DatasetRequest
from gpt2.prepare.progress import PreparationProgress, say
from gpt2.prepare.text import Corpus
from kmatrix.errors import DataError
from kmatrix.records.dataset import RECORD, ShardInfo, kind_of, read_dataset_or_empty
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
    kind: str  # "train" or "val"
    after: Place  # of the next document


@dataclass(slots=True)
class ShardBuffer:
    """The content of a shard that is not written yet."""

    parts: list[Tokens] = field(default_factory=list)
    tokens: int = 0
    size: int = 0  # UTF-8 bytes of the text

    def add(self, tokens: Tokens, size: int) -> None:
        self.parts.append(tokens)
        self.tokens += len(tokens)
        self.size += size


class ShardWriter:
    """Writes the shards of a corpus, starting at the position that dataset.json records.

    A shard is written when it is complete, and then listed in dataset.json with the position of the next document. An
    interrupted process therefore loses at most one shard, and resuming gives the same shards.
    """

    def __init__(
        self,
        request: DatasetRequest,
        corpus: Corpus,
        folder: Path,
        about: Mapping[str, Any],
        enough: Callable[[Sequence[ShardInfo]], bool],
        *,
        guessed: bool = False,
    ) -> None:
        """Read the position. about: further entries of dataset.json."""
        self.request, self.corpus, self.folder, self.about, self.enough = request, corpus, folder, about, enough
        known = read_dataset_or_empty(folder / RECORD)
        self.listed = list(known.shards)
        self.next: Place = known.position or (0, 0)
        self.train, self.val = ShardBuffer(), ShardBuffer()
        self.guessed = guessed  # the user did not name the files: skip those that are not text
        self.skipped: dict[str, None] = {}  # names of those

    def run(self) -> None:
        """Write the shards that are missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        inner = self._tokenizer()
        self.about = {**self.about, "vocab_size": inner.vocab_size}
        progress = PreparationProgress(self.request.dataset, "tokens")
        with _encoder(inner, self.folder, self.corpus) as (submit, ahead):
            for document, tokens in _pipeline(submit, self._batches(), ahead):
                if self._add(document, tokens):
                    return
                self.next = document.after
                progress.add(len(tokens), f"file {document.after[0] + 1} of {len(self.corpus.parts)}")
        if len(self.skipped) > NAMED_SKIPS:
            say(f"skipped {plural(len(self.skipped), 'file')} in all that are not UTF-8 text")
        if not self.train.tokens and not self.listed:
            raise DataError(
                f"no text in the {plural(len(self.corpus.parts), 'file')} of {self.about['source']}",
                why="none of them is UTF-8 text" if len(self.skipped) == len(self.corpus.parts) else "",
                hint="check the files and TEXT_COLUMN=",
            )
        self.next = (len(self.corpus.parts), 0)
        self._flush()

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer; train it on the corpus first if its vocabulary belongs to the dataset."""
        path, name = self.folder / tokenizer.FILE, self.request.tokenizer
        if name == "char" and not path.exists():
            tokenizer.CharTokenizer.trained(doc.text for doc in self._documents()).save(path)
        elif name == "bpe" and not path.exists():
            texts = (doc.text for doc in self._documents() if doc.kind == "train")
            tokenizer.BpeTokenizer.trained(_take_first(texts, BPE_BYTES), self.request.bpe_vocab_size).save(path)
        return tokenizer.load(name, self.folder)

    def _files(self) -> Iterator[Iterator[Document]]:
        """Yield the documents of each file, from the current position. A file is downloaded when it is reached."""
        # With few files, the hash of a whole file would make the validation share a matter of luck.
        parts = self.corpus.parts
        divided = len(parts) < text.FEW and all(part.plain for part in parts)
        for number in range(self.next[0], len(parts)):
            yield self._documents_of(number, self.next[1] if number == self.next[0] else 0, divided=divided)

    def _documents_of(self, number: int, start: int, *, divided: bool) -> Iterator[Document]:
        part, percent = self.corpus.parts[number], self.request.val_percent
        skip = self._skip if self.guessed else None
        texts = text.documents(self.corpus.path(part), part, self.request.text_column, on_skip=skip)
        for index, value in enumerate(itertools.islice(texts, start, None), start):
            if divided:
                # After the first half the position is still before the document: a resumed preparation reads both.
                cut = len(value) * (100 - percent) // 100
                yield Document(value[:cut], "train", (number, index))
                yield Document(value[cut:], "val", (number, index + 1))
            else:
                # The hash of the text decides, so that copies are on the same side. Not hash(), which differs between
                # processes.
                draw = int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "big") % 100
                yield Document(value, "val" if draw < percent else "train", (number, index + 1))

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

    def _of(self, kind: str) -> list[ShardInfo]:
        return [shard for shard in self.listed if kind_of(shard.name) == kind]

    def _add(self, document: Document, tokens: Tokens) -> bool:
        """Add a document to its shard. Return True, without adding it, if there are enough shards."""
        size, has_val = len(document.text.encode()), bool(self._of("val"))
        if document.kind == "val":
            if not has_val:  # validation is complete with the first training shard
                self.val.add(tokens, size)
            return False
        # Of few documents none may be for validation, which ends with the first shard: it waits for one.
        most = self.request.shard_tokens * (1 if has_val or self.val.tokens else LONGEST_FIRST)
        if self.train.tokens and self.train.tokens + len(tokens) > most:
            self._flush()
            if self.enough(self._of("train")):
                return True
        self.train.add(tokens, size)
        return False

    def _flush(self) -> None:
        """Write the buffered shards, then dataset.json with the position of the next document."""
        if not self._of("val"):
            if not self.val.tokens or not self.train.tokens:
                raise DataError(
                    f"{self.about['source']} has no documents for {'training' if self.val.tokens else 'validation'}",
                    why=f"{self.request.val_percent} percent of few documents are for validation",
                    hint="use more documents, or another VAL_PERCENT=",
                )
            self._write("val", 0, self.val)
        if self.train.tokens:
            self._write("train", len(self._of("train")) + 1, self.train)
            self.train = ShardBuffer()
        # After the shards: a record never lists a shard that is not complete. A shard without a record is overwritten.
        about = {**self.about, "position": list(self.next), "complete": self.next[0] >= len(self.corpus.parts)}
        write_json(self.folder / RECORD, shards.record(self.listed, **about))
        for part in self.corpus.parts[: self.next[0]]:  # not before: it would be downloaded again after a kill
            self.corpus.release(part)

    def _write(self, kind: str, number: int, buffer: ShardBuffer) -> None:
        path = self.folder / f"{self.request.dataset}_{kind}_{number:06d}.bin"
        shards.write_shard(path, np.concatenate(buffer.parts))
        self.listed.append(shards.read_info(path, text_bytes=buffer.size))


def _take_first(texts: Iterator[str], size: int) -> Iterator[str]:
    for value in texts:
        if size <= 0:
            return
        size -= len(value)
        yield value


def encode(texts: Sequence[str], inner: Tokenizer) -> list[Tokens]:
    """Return the tokens of documents, each after an end-of-document token, as in llm.c."""
    end = np.array([inner.end_of_document], dtype=np.uint16)
    return [np.concatenate([end, inner.encode(text)]) for text in texts]


Submit = Callable[[Sequence[str]], "Future[list[Tokens]]"]
_inner: Tokenizer | None = None  # of a worker process


@contextmanager
def _encoder(inner: Tokenizer, folder: Path, corpus: Corpus) -> Iterator[tuple[Submit, int]]:
    """Yield a function that tokenizes texts, in worker processes or in this one, and how many batches to submit."""
    cores = len(os.sched_getaffinity(0))  # not cpu_count, which ignores Slurm's and taskset's limits
    if cores == 1 or sum(part.size for part in corpus.parts) < ALONE_BYTES:
        yield lambda texts: _completed(encode(texts, inner)), 0
        return
    inner.encode("a")  # downloads a missing vocabulary once, before the processes start
    # spawn, because forking a process with threads (tokenizers, pyarrow) can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, context, _init_worker, (inner.name, folder)) as pool:
        try:
            # Two batches per worker ahead: enough to keep all busy, and few enough to stay in memory.
            yield lambda texts: pool.submit(_encode, texts), 2 * cores
        # Broad, because also after Ctrl+C the pool's exit would wait for all submitted batches. The error continues.
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _completed(value: list[Tokens]) -> Future[list[Tokens]]:
    future: Future[list[Tokens]] = Future()
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


def _encode(texts: Sequence[str]) -> list[Tokens]:
    assert _inner
    return encode(texts, _inner)


def _pipeline(submit: Submit, batches: Iterator[list[Document]], ahead: int) -> Iterator[tuple[Document, Tokens]]:
    """Yield each document with its tokens, in order. ahead: batches submitted in advance."""
    # Results are taken in the order of submission, whichever process is faster: the shards are always the same.
    pending: deque[tuple[list[Document], Future[list[Tokens]]]] = deque()
    try:
        for batch in itertools.chain(batches, itertools.repeat([], ahead)):  # empty ones push the last ones out
            pending.append((batch, submit([document.text for document in batch])))
            if len(pending) > ahead:
                documents, future = pending.popleft()
                yield from zip(documents, future.result(), strict=True)
    except BrokenProcessPool:
        raise DataError("a tokenizer process was killed", why="possibly out of memory", hint="run it again") from None
