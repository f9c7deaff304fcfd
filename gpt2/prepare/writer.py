"""Tokenize documents into shards on all cores. Output is identical after any number of interruptions."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data import shards, tokenizer
from gpt2.data.tokenizer import Tokenizer, Tokens
from gpt2.prepare.catalog import DatasetRequest
from gpt2.prepare.progress import PreparationProgress, say
from gpt2.prepare.text import Corpus, documents
from kmatrix.errors import DataError
from kmatrix.records.dataset import RECORD, kind_of, read_dataset_or_empty
from kmatrix.records.files import write_json
from kmatrix.text import first_names, plural

BATCH_CHARACTERS = 1 << 24  # that are tokenized at once
BPE_CHARACTERS = 100 << 20  # that a BPE tokenizer is trained on
FEW = 20  # with fewer plain text files, each is divided into training and validation
LONGEST_FIRST = 8  # times the tokens of a shard: the most that the first one waits for a document for validation


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or a part of a divided document."""

    text: str
    kind: str  # "train" or "val"
    after: tuple[int, int]  # the document after this one: file, document in the file


class ShardBuffer:
    """The content of a shard that is not written yet."""

    def __init__(self) -> None:
        self.parts: list[Tokens] = []
        self.tokens = 0

    def add(self, tokens: Tokens) -> None:
        self.parts.append(tokens)
        self.tokens += len(tokens)


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
        recipe: Mapping[str, Any],
        enough: Callable[[Sequence[int]], object],
    ) -> None:
        """enough: returns whether training shards of these numbers of tokens are all that is needed."""
        self.request, self.corpus, self.folder, self.enough = request, corpus, folder, enough
        self.about: dict[str, Any] = {"dataset": request.dataset, "source": corpus.source, "commit": corpus.commit}
        self.about |= {"tokenizer": request.tokenizer, "recipe": recipe}  # of dataset.json
        known = read_dataset_or_empty(folder / RECORD)
        self.listed = list(known.shards)
        self.next = known.position or (0, 0)
        self.train, self.val = ShardBuffer(), ShardBuffer()
        self.skipped: set[str] = set()  # names of files that are not text

    def run(self) -> None:
        """Write the shards that are missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        inner = self._tokenizer()
        self.about["vocab_size"] = inner.vocab_size
        progress = PreparationProgress(self.request.dataset, "tokens")
        end = np.array([inner.end_of_document], dtype=np.uint16)  # before each document, as in llm.c
        for batch in self._batches():
            encoded = inner.encode_all([document.text for document in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                if self._add(document, np.concatenate([end, tokens])):
                    return
                self.next = document.after
                progress.add(len(tokens) + 1, f"file {document.after[0] + 1} of {len(self.corpus.parts)}")
        if self.skipped:
            say(f"skipped what is not UTF-8 text: {first_names(sorted(self.skipped))}")
        if not self.train.tokens and not self.listed:
            raise DataError(
                f"no text in the {plural(len(self.corpus.parts), 'file')} of {self.corpus.source}",
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
            tokenizer.BpeTokenizer.trained(_first(texts, BPE_CHARACTERS), self.request.bpe_vocab_size).save(path)
        return tokenizer.load(name, self.folder)

    def _documents(self) -> Iterator[Document]:
        return itertools.chain.from_iterable(map(self._documents_of, range(self.next[0], len(self.corpus.parts))))

    def _documents_of(self, number: int) -> Iterator[Document]:
        """Yield the documents of a file, from the current position."""
        part, percent = self.corpus.parts[number], self.request.val_percent
        start = self.next[1] if number == self.next[0] else 0
        # With few files, the hash of a whole file would make the validation share a matter of luck.
        divided = len(self.corpus.parts) < FEW and all(each.plain for each in self.corpus.parts)
        texts = documents(self.corpus.path(part), part, self.request.text_column, self.skipped)
        for index, text in enumerate(itertools.islice(texts, start, None), start):
            if divided:
                # After the first half the position is still before the document: a resumed preparation reads both.
                cut = len(text) * (100 - percent) // 100
                yield Document(text[:cut], "train", (number, index))
                yield Document(text[cut:], "val", (number, index + 1))
            else:
                # The hash of the text decides, so that copies are on the same side. Not hash(), which differs between
                # processes.
                draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
                yield Document(text, "val" if draw < percent else "train", (number, index + 1))

    def _batches(self) -> Iterator[list[Document]]:
        """Yield batches of documents. A file with many of them ends a batch, which must not wait for a download."""
        batch: list[Document] = []
        size = 0
        for number in range(self.next[0], len(self.corpus.parts)):
            for document in self._documents_of(number):
                batch.append(document)
                size += len(document.text)
                if size >= BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
            if batch and not self.corpus.parts[number].plain:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _tokens_of(self, kind: str) -> list[int]:
        """Return the tokens of each written shard."""
        return [shard.tokens for shard in self.listed if kind_of(shard.name) == kind]

    def _add(self, document: Document, tokens: Tokens) -> bool:
        """Add a document to its shard. Return True, without adding it, if there are enough shards."""
        has_val = bool(self._tokens_of("val"))
        if document.kind == "val":
            if not has_val:  # validation is complete with the first training shard
                self.val.add(tokens)
            return False
        # Of few documents none may be for validation, which ends with the first shard: it waits for one.
        most = self.request.shard_tokens * (1 if has_val or self.val.tokens else LONGEST_FIRST)
        if self.train.tokens and self.train.tokens + len(tokens) > most:
            self._flush()
            if self.enough(self._tokens_of("train")):
                return True
        self.train.add(tokens)
        return False

    def _flush(self) -> None:
        """Write the buffered shards, then dataset.json with the position of the next document."""
        if not self._tokens_of("val"):
            if not self.val.tokens or not self.train.tokens:
                raise DataError(
                    f"{self.corpus.source} has no documents for {'training' if self.val.tokens else 'validation'}",
                    why=f"{self.request.val_percent} percent of few documents are for validation",
                    hint="use more documents, or another VAL_PERCENT=",
                )
            self._write("val", 0, self.val)
        if self.train.tokens:
            self._write("train", len(self._tokens_of("train")) + 1, self.train)
            self.train = ShardBuffer()
        # After the shards: a record never lists a shard that is not complete. A shard without a record is overwritten.
        where = {"position": list(self.next), "complete": self.next[0] >= len(self.corpus.parts)}
        write_json(self.folder / RECORD, shards.record(self.listed, **self.about, **where))
        for part in self.corpus.parts[: self.next[0]]:  # not before: it would be downloaded again after a kill
            self.corpus.release(part)

    def _write(self, kind: str, number: int, buffer: ShardBuffer) -> None:
        path = self.folder / f"{self.request.dataset}_{kind}_{number:06d}.bin"
        shards.write_shard(path, np.concatenate(buffer.parts))
        self.listed.append(shards.read_info(path))


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text
