"""Named datasets (catalog.toml), and what a run requests of a dataset."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kmatrix.records.dataset import enough_shards

# Name -> entry; the file describes the fields.
CATALOG: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """A dataset in the tokens of one tokenizer, and how much of it is needed."""

    dataset: str
    tokenizer: str = "byte"
    data_path: str = ""  # of the datasets hub, folder and shards; a language of some named ones
    mix: str = ""  # of the dataset mix
    text_column: str = "text"  # of JSON lines and Parquet
    val_percent: int = 7  # percent of the documents
    shard_tokens: int = 100_000_000  # maximum, unless one document has more
    bpe_vocab_size: int = 8192  # maximum
    repository: str = ""  # of prebuilt shards, if it is not the usual one
    tokens: int = 0  # training tokens to read; 0: all
    block_size: int = 1  # tokens of the longest sequence
    shards: int = 0  # training shards, if known; 0: as many as hold `tokens`
    streaming: bool = False  # only the first shard: the others are made while runs read them

    @property
    def named(self) -> dict[str, Any]:
        """The entry of the catalog, empty without one."""
        return CATALOG.get(self.dataset, {})

    @property
    def recipe(self) -> dict[str, Any]:
        """The fields that decide the content of the dataset, as in dataset.json, without the requested size."""
        # Nor fields without effect, which must not create a second copy of the dataset.
        without = {"tokens", "block_size", "shards", "streaming"}
        if self.shards_on_hub or self.dataset == "shards":
            without |= {"text_column", "val_percent", "shard_tokens"}
        without |= set() if self.tokenizer == "bpe" else {"bpe_vocab_size"}
        without |= set() if self.repository else {"repository"}
        return {name: value for name, value in asdict(self).items() if name not in without}

    @property
    def shards_on_hub(self) -> str:
        """The address of prebuilt shards on Hugging Face, OWNER/NAME[@REVISION][:PATTERN,...]; "" without them."""
        found: str = self.named.get("larger" if self.repository else "shards", "")
        return found if self.tokenizer == "gpt2" else ""

    @property
    def text_on_hub(self) -> str:
        """The address of text on Hugging Face, "" without that."""
        text: str = self.data_path if self.dataset == "hub" else self.named.get("text", "")
        return text.replace("{language}", self.data_path or self.named.get("language", ""))

    def as_named(self) -> DatasetRequest:
        """Return the request with the column and the repository that the catalog has for it."""
        larger = self.named.get("larger", "") if self.tokens > self.named.get("tokens", 0) else ""
        name = larger.partition(":")[0] if self.tokenizer == "gpt2" else ""
        return replace(self, text_column=self.named.get("column", self.text_column), repository=name)

    def enough(self, tokens_of_shards: Sequence[int]) -> int | None:
        """Return how many of these training shards, in order, hold what is requested; None if all are needed."""
        if self.shards:
            return self.shards if self.shards <= len(tokens_of_shards) else None
        return enough_shards(tokens_of_shards, self.tokens, self.block_size)
