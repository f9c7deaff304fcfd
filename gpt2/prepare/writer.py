"""Documents to token shards, on all cores: the same shards whatever was killed on the way, and however often."""

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
from typing import Any

import numpy as np

from gpt2 import shards, tokenizer
from gpt2.prepare import text
from gpt2.prepare.progress import Progress
from gpt2.prepare.text import Corpus
from gpt2.tokenizer import Tokenizer, Tokens
from kmatrix.errors import DataError
from kmatrix.records import write_json

BATCH_CHARACTERS = 1 << 20  # of text that one process tokenizes at once
ALONE_BYTES = 8 << 20  # a corpus below this is tokenized here: starting processes takes longer
BPE_BYTES = 100 << 20  # of text that a byte-pair encoding is trained on
Place = tuple[int, int]  # file of the corpus, document in it: the next one to read


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or a part of a divided one. kind: "train", "val", or "" where its hash decides.

    after: the place of the document behind it.
    """

    text: str
    kind: str
    after: Place


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a document, each document's beginning marked by the token that ends one. size: UTF-8 bytes."""

    tokens: Tokens
    held_out: bool
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides the shards of a corpus, beside its files.

    val_percent: of the documents.  shard_tokens: the most in a shard, unless one document has more.
    """

    name: str
    tokenizer: str
    column: str
    val_percent: int
    shard_tokens: int
    bpe_vocab_size: int


@dataclass(slots=True)
class Filling:
    """A shard that is being filled. size: UTF-8 bytes of its text."""

    parts: list[Tokens] = field(default_factory=list)
    tokens: int = 0
    size: int = 0

    def add(self, document: Encoded) -> None:
        self.parts.append(document.tokens)
        self.tokens += len(document.tokens)
        self.size += document.size


def write(
    recipe: Recipe,
    corpus: Corpus,
    folder: Path,
    about: dict[str, Any],
    enough: Callable[[Sequence[shards.ShardInfo]], bool],
    *,
    guessed: bool = False,
) -> None:
    """Write shards until `enough` says so of the training shards, or the corpus ends.

    dataset.json is written anew with each shard, and says at which document the next one begins: a process that is
    killed loses one shard's work, and what is made after it is what would have been made without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _Writer(recipe, corpus, folder, about, enough, guessed=guessed).run()


class _Writer:
    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        folder: Path,
        about: dict[str, Any],
        enough: Callable[[Sequence[shards.ShardInfo]], bool],
        *,
        guessed: bool,
    ) -> None:
        self.recipe, self.corpus, self.folder, self.about, self.enough = recipe, corpus, folder, about, enough
        self.listed: list[shards.ShardInfo] = shards.recorded(folder)
        position = shards.position(folder) if self.listed else None
        self.next: Place = (position[0], position[1]) if position else (0, 0)
        self.train, self.val = Filling(), Filling()
        self.guessed = guessed  # nobody named the files: those that are not text are passed over

    def run(self) -> None:
        tokenizer_ = self._tokenizer()
        self.about["vocab_size"] = tokenizer_.vocab_size
        workers = _workers(self.corpus)
        progress = Progress(self.recipe.name, "tokens")
        with _encoder(self.recipe, self.folder, workers) as encode, progress:
            for document, encoded in _pipeline(encode, self._batches(), 2 * workers):
                if self._add(encoded):
                    return
                self.next = document.after
                progress.add(len(encoded.tokens), f"file {document.after[0] + 1} of {len(self.corpus.parts)}")
        self._end()

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer; that of the dataset's own vocabulary is made from the corpus first."""
        path = self.folder / tokenizer.FILE
        if self.recipe.tokenizer == "char" and not path.exists():
            tokenizer.CharTokenizer.trained(doc.text for doc in self._documents()).save(path)
        elif self.recipe.tokenizer == "bpe" and not path.exists():
            texts = (doc.text for doc in self._documents() if not _held_out(doc, self.recipe.val_percent))
            tokenizer.BpeTokenizer.trained(_first(texts, BPE_BYTES), self.recipe.bpe_vocab_size).save(path)
        return tokenizer.load(self.recipe.tokenizer, self.folder)

    def _files(self) -> Iterator[Iterator[Document]]:
        """Yield the documents of each file, from the next place on; a file is fetched when its turn comes."""
        parts = self.corpus.parts
        divided = len(parts) < text.FEW and all(part.plain for part in parts)
        for number in range(self.next[0], len(parts)):
            start = self.next[1] if number == self.next[0] else 0
            yield self._documents_of(number, start, divided=divided)

    def _documents_of(self, number: int, start: int, *, divided: bool) -> Iterator[Document]:
        part = self.corpus.parts[number]
        texts = text.documents(self.corpus.path(part), part, self.recipe.column, guessed=self.guessed)
        for index, value in enumerate(itertools.islice(texts, start, None), start):
            yield from _divided(value, self.recipe.val_percent, (number, index + 1), divided=divided)

    def _documents(self) -> Iterator[Document]:
        return itertools.chain.from_iterable(self._files())

    def _batches(self) -> Iterator[list[Document]]:
        """Yield documents in portions; one ends where a fetched file does, so that the next is not needed for it."""
        batch: list[Document] = []
        size = 0
        for documents in self._files():
            for document in documents:
                batch.append(document)
                size += len(document.text)
                if size >= BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
            if batch and isinstance(self.corpus, text.Remote):
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _add(self, document: Encoded) -> bool:
        """Put a document into the shard that it belongs to. Returns whether it is enough, without the document then."""
        if document.held_out:
            if not shards.has_val(self.listed):  # validation is that of the first training shard, and grows no more
                self.val.add(document)
            return False
        if self.train.tokens and self.train.tokens + len(document.tokens) > self.recipe.shard_tokens:
            self._flush(self.next)
            if self.enough([shard for shard in self.listed if shards.kind_of(shard.name) == "train"]):
                return True
        self.train.add(document)
        return False

    def _flush(self, place: Place, *, complete: bool = False) -> None:
        """Write the shards that are filled, and dataset.json last: `place` is where the next one begins."""
        if not shards.has_val(self.listed):
            self._check_val()
            self._write("val", 0, self.val)
            self.val = Filling()
        if self.train.tokens:
            number = sum(shards.kind_of(shard.name) == "train" for shard in self.listed) + 1
            self._write("train", number, self.train)
            self.train = Filling()
        about = {**self.about, "position": list(place), "complete": complete}
        write_json(self.folder / shards.RECORD, shards.record(self.listed, **about))
        for part in self.corpus.parts[: place[0]]:
            self.corpus.release(part)

    def _write(self, kind: str, number: int, filling: Filling) -> None:
        path = self.folder / f"{self.recipe.name}_{kind}_{number:06d}.bin"
        shards.write_shard(path, np.concatenate(filling.parts) if filling.parts else [])
        self.listed.append(shards.read_info(path, text_bytes=filling.size))

    def _end(self) -> None:
        if not self.train.tokens and not self.listed:
            raise DataError(
                f"there is no text in the {len(self.corpus.parts)} files of {self.about['source']}",
                fix="look at the files, or at TEXT_COLUMN=",
            )
        self._flush((len(self.corpus.parts), 0), complete=True)

    def _check_val(self) -> None:
        if not self.val.tokens or not self.train.tokens:
            raise DataError(
                f"no document of {self.about['source']} came to {'training' if self.val.tokens else 'validation'}",
                why=f"{self.recipe.val_percent} percent of the documents are validation, and there are few documents",
                fix="use more documents, or another VAL_PERCENT=",
            )


def _divided(value: str, percent: int, after: Place, *, divided: bool) -> Iterator[Document]:
    """Yield a document whole, or its beginning for training and its end for validation."""
    if not divided:
        yield Document(value, "", after)
        return
    cut = len(value) * (100 - percent) // 100
    before = (after[0], after[1] - 1)
    yield Document(value[:cut], "train", before)
    yield Document(value[cut:], "val", after)


def _held_out(document: Document, percent: int) -> bool:
    """Say whether a document is validation: the hash of its text decides, so that no copy of it is trained on."""
    if document.kind:
        return document.kind == "val"
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def _first(texts: Iterator[str], size: int) -> Iterator[str]:
    for value in texts:
        if size <= 0:
            return
        size -= len(value)
        yield value


def encode(documents: Sequence[Document], inner: Tokenizer, percent: int) -> list[Encoded]:
    """Return the tokens of documents, each behind the token that ends a document, as llm.c writes them."""
    end = np.array([inner.end_of_document], dtype=np.uint16)
    found = []
    for document in documents:
        tokens = np.concatenate([end, inner.encode(document.text)])
        found.append(Encoded(tokens, _held_out(document, percent), len(document.text.encode())))
    return found


Encoder = Callable[[Sequence[Document]], "Future[list[Encoded]]"]
_inner: Tokenizer | None = None  # of a process that tokenizes


def _workers(corpus: Corpus) -> int:
    """Return the processes that tokenize a corpus; none where there is one core or little text."""
    cores = len(os.sched_getaffinity(0))
    return cores if cores > 1 and sum(part.size for part in corpus.parts) >= ALONE_BYTES else 0


@contextmanager
def _encoder(recipe: Recipe, folder: Path, workers: int) -> Iterator[Encoder]:
    """Give a function that tokenizes documents: in processes of their own, or here where there are none."""
    inner = tokenizer.load(recipe.tokenizer, folder)
    if not workers:
        yield lambda documents: _done(encode(documents, inner, recipe.val_percent))
        return
    inner.encode("a")  # a vocabulary that has to be fetched is fetched once, here
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (recipe.tokenizer, folder)) as pool:
        try:
            yield lambda documents: pool.submit(_encode, documents, recipe.val_percent)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _done(value: list[Encoded]) -> Future[list[Encoded]]:
    future: Future[list[Encoded]] = Future()
    future.set_result(value)
    return future


def _begin(name: str, folder: Path) -> None:
    """Make a process ready; it ends when the one that started it does."""
    global _inner  # noqa: PLW0603  (what a pool's initializer leaves for its calls)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the parent's affair
    parent = multiprocessing.parent_process()

    def follow() -> None:
        assert parent
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    _inner = tokenizer.load(name, folder)


def _encode(documents: Sequence[Document], percent: int) -> list[Encoded]:
    assert _inner
    return encode(documents, _inner, percent)


def _pipeline(submit: Encoder, batches: Iterator[list[Document]], ahead: int) -> Iterator[tuple[Document, Encoded]]:
    """Yield each document with its tokens, in order. ahead: batches that are under way meanwhile."""
    under_way: deque[tuple[list[Document], Future[list[Encoded]]]] = deque()
    try:
        for batch in batches:
            under_way.append((batch, submit(batch)))
            if len(under_way) > ahead:
                yield from _finished(under_way)
        while under_way:
            yield from _finished(under_way)
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenizes was killed", why="perhaps for want of memory", fix="run it again"
        ) from None


def _finished(under_way: deque[tuple[list[Document], Future[list[Encoded]]]]) -> Iterator[tuple[Document, Encoded]]:
    batch, future = under_way.popleft()
    yield from zip(batch, future.result(), strict=True)
