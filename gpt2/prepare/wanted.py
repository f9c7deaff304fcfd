"""What is asked of a preparation, and what it answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpt2.prepare.catalog import CATALOG
from gpt2.shards import ShardInfo
from gpt2.tokenizer import VOCAB

TEXT = ("text_column", "val_percent", "shard_tokens")  # what a dataset of text needs beside its tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One dataset in the tokens of one tokenizer.

    data_path: of the datasets hub, folder and shards.  mix: of the dataset mix.  val_percent: of the documents.
    tokens: training tokens that are to be read, 0 for all that there are.  block_size: of the longest sequence.
    shards: training shards, where their number is known already; 0 where it follows from tokens.
    """

    dataset: str
    tokenizer: str
    data_path: str = ""
    mix: str = ""
    text_column: str = "text"
    val_percent: int = 7
    shard_tokens: int = 100_000_000
    bpe_vocab_size: int = 8192
    tokens: int = 0
    block_size: int = 1
    shards: int = 0

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the data, as dataset.json has it; how much of them is wanted is no part of it."""
        values = asdict(self)
        for name in ("tokens", "block_size", "shards"):
            del values[name]
        if self.tokenizer != "bpe":
            del values["bpe_vocab_size"]
        if self.dataset == "shards" or self.ready_made:
            for name in TEXT:
                del values[name]
        return values

    @property
    def ready_made(self) -> bool:
        """Whether a dataset that has a name lies on Hugging Face in these tokens."""
        known = CATALOG.get(self.dataset)
        return known is not None and known.shards is not None and self.tokenizer == "gpt2"

    def part(self, dataset: str, data_path: str, *, share: float) -> Wanted:
        """Return what is wanted of one dataset of a mix. share: of the tokens."""
        tokens = int(self.tokens * share) + 1 if self.tokens else 0
        return replace(self, dataset=dataset, data_path=data_path, mix="", tokens=tokens, shards=0)

    def needed(self, tokens_of_shards: Sequence[int]) -> int:
        """Return how many of these training shards, in order, hold the sequences that are to be read."""
        if self.shards:
            return min(self.shards, len(tokens_of_shards))
        have = 0
        for number, tokens in enumerate(tokens_of_shards, 1):
            have += max(0, tokens - 1) // self.block_size * self.block_size
            if self.tokens and have >= self.tokens:
                return number
        return len(tokens_of_shards)

    def enough(self, train: Sequence[ShardInfo]) -> bool:
        """Say whether these training shards hold all that is to be read."""
        if self.shards:
            return len(train) >= self.shards
        have = sum(max(0, shard.tokens - 1) // self.block_size * self.block_size for shard in train)
        return bool(self.tokens) and have >= self.tokens


def digest(recipe: dict[str, Any]) -> str:
    """Return eight digits that differ where a recipe does: the end of a folder's name."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A dataset that is ready. shards: the first so many of training are read, 0 for all.

    train_tokens, val_tokens: of what is read.  made: whether something was made or fetched just now.
    parts: name, share of the sequences and training tokens of each dataset of a mix; empty where there is one dataset.
    """

    path: str
    sha256: str
    vocab_size: int
    train_tokens: int
    val_tokens: int
    shards: int
    made: bool
    parts: tuple[tuple[str, float, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def vocabulary(name: str) -> int:
    """Return the size of a vocabulary that does not depend on the data; 65536, which refuses nothing, of another."""
    return VOCAB.get(name, 65536)
