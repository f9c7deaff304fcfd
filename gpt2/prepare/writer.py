"""Tokenize documents into shards on all cores. Output is identical after any number of interruptions."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data import shards, tokenizer
from gpt2.data.tokenizer import Tokenizer, Tokens
from gpt2.prepare import say
from gpt2.prepare.catalog import DatasetRequest
from gpt2.prepare.text import ROWS, Corpus, documents
from kmatrix.errors import DataError
from kmatrix.records.dataset import RECORD, kind_of, read_dataset_or_empty
from kmatrix.records.files import write_json
from kmatrix.text import count, first_names

AT_ONCE = 100  # documents that are tokenized at once
BPE_CHARACTERS = 100 << 20  # that a BPE tokenizer is trained on
FEW = 20  # with fewer plain text files, each is divided into training and validation
# Text; "train" or "val"; the document after this one: file, document in the file. One may be divided into two.
Document = tuple[str, str, tuple[int, int]]


class ShardWriter:
    """Writes the shards of a corpus, starting at the position that dataset.json records.

    A shard is written when it is complete, and then listed in dataset.json with the position of the next document. An
    interrupted process therefore loses at most one shard, and resuming gives the same shards.
    """

    def __init__(self, request: DatasetRequest, corpus: Corpus, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.request, self.corpus, self.folder = request, corpus, folder
        self.about: dict[str, Any] = {"dataset": request.dataset, "source": corpus.source, "commit": corpus.commit}
        self.about |= {"tokenizer": request.tokenizer, "recipe": recipe}  # of dataset.json
        known = read_dataset_or_empty(folder / RECORD)
        self.listed = list(known.shards)
        self.next = known.position or (0, 0)
        # Of the shards that are not written yet
        self.parts: dict[str, list[Tokens]] = {"val": [], "train": []}
        self.skipped: set[str] = set()  # names of files that are not text

    def run(self) -> None:
        """Write the shards that are missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        inner = self._tokenizer()
        self.about["vocab_size"] = inner.vocab_size
        end = np.array([inner.end_of_document], dtype=np.uint16)  # before each document, as in llm.c
        held = 0  # tokens of the next training shard
        coming = self._documents()
        while batch := list(itertools.islice(coming, AT_ONCE)):
            for (_, kind, after), tokens in zip(batch, inner.encode_all([text for text, _, _ in batch]), strict=True):
                size = len(tokens) + 1
                # Of few documents none may be for validation: the first shard waits for one.
                is_full = held and held + size > self.request.shard_tokens
                if kind == "train" and is_full and (self.listed or self.parts["val"]):
                    self._flush()
                    held = 0
                    if self.request.enough(self._tokens_of("train")):
                        return
                if kind == "train" or not self.listed:  # validation ends with the first shard
                    self.parts[kind] += [end, tokens]
                held += size if kind == "train" else 0
                self.next = after
        if self.skipped:
            say(f"skipped what is not UTF-8 text: {first_names(sorted(self.skipped))}")
        self.next = (len(self.corpus.parts), 0)
        self._flush()

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer; train it on the corpus first if its vocabulary belongs to the dataset."""
        path, name = self.folder / tokenizer.FILE, self.request.tokenizer
        if name == "char" and not path.exists():
            tokenizer.CharTokenizer.trained(text for text, _, _ in self._documents()).save(path)
        elif name == "bpe" and not path.exists():
            texts = (text for text, kind, _ in self._documents() if kind == "train")
            tokenizer.BpeTokenizer.trained(_first(texts, BPE_CHARACTERS), self.request.bpe_vocab_size).save(path)
        return tokenizer.load(name, self.folder)

    def _documents(self) -> Iterator[Document]:
        """Yield the documents from the current position."""
        percent = self.request.val_percent
        # With few files, the hash of a whole file would make the validation share a matter of luck.
        divided = len(self.corpus.parts) < FEW and not any(part.name.endswith(ROWS) for part in self.corpus.parts)
        first, start = self.next
        for number, part in enumerate(self.corpus.parts[first:], first):
            texts = documents(self.corpus.path(part), part, self.request.text_column, self.skipped)
            for index, text in itertools.islice(enumerate(texts), start if number == first else 0, None):
                if divided:
                    # After the first half the position is still before the document: a resumed preparation reads both.
                    cut = len(text) * (100 - percent) // 100
                    yield text[:cut], "train", (number, index)
                    yield text[cut:], "val", (number, index + 1)
                else:
                    # The hash of the text decides, so that copies are on the same side. Not hash(), which differs
                    # between processes.
                    draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
                    yield text, "val" if draw < percent else "train", (number, index + 1)

    def _tokens_of(self, kind: str) -> list[int]:
        """Return the tokens of each written shard."""
        return [shard.tokens for shard in self.listed if kind_of(shard.name) == kind]

    def _flush(self) -> None:
        """Write the shards that are complete, then dataset.json with the position of the next document."""
        for kind, first in (("val", 0), ("train", 1)):
            number = len(self._tokens_of(kind)) + first
            if self.parts[kind]:
                path = self.folder / f"{self.request.dataset}_{kind}_{number:06d}.bin"
                shards.write_shard(path, np.concatenate(self.parts[kind]))
                self.listed.append(shards.read_info(path))
                say(f"{path.name}: {count(self.listed[-1].tokens)} tokens")
                self.parts[kind] = []
            elif number == first:
                what = f"{self.corpus.source} has no documents for {'validation' if kind == 'val' else 'training'}"
                raise DataError(what, hint="use more text, or another VAL_PERCENT= or TEXT_COLUMN=")
        # After the shards: a record never lists a shard that is not complete. A shard without a record is overwritten.
        where: dict[str, Any] = {"position": list(self.next), "complete": self.next[0] >= len(self.corpus.parts)}
        write_json(self.folder / RECORD, shards.record(self.listed, **self.about, **where))
        for part in self.corpus.parts[: self.next[0]]:  # not before: it would be downloaded again after a kill
            self.corpus.release(part)


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text
