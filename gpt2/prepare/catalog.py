"""Named datasets (catalog.toml), and what a run requests of a dataset."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kmatrix.errors import ConfigError
from kmatrix.records.dataset import whole_windows

HUB = "hf://"
TEXT_FILES = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.json.gz", "*.txt", "*.txt.gz", "*.md")
SHARD_FILES = ("*_train_*.bin", "*_val_*.bin")
WITHOUT_SIZE = ("tokens", "block_size", "shards", "streaming")  # fields of a request that a longer run changes
OF_TEXT = ("text_column", "val_percent", "shard_tokens")  # fields of a request that only text needs


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDataset:
    """An entry of catalog.toml, which describes the fields. Its text is in a repository, or one file on the web."""

    licence: str
    text: str = ""
    url: str = ""
    sha256: str = ""
    size: int = 0  # bytes
    shards: str = ""
    above: int = 0  # training tokens
    larger: str = ""
    column: str = ""
    language: str = ""
    terms: str = ""

    @property
    def by_language(self) -> bool:
        """Whether the path of a request is a language."""
        return "{language}" in self.text


_ENTRIES = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
CATALOG = {name: NamedDataset(**entry) for name, entry in _ENTRIES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Files of a dataset on Hugging Face."""

    name: str  # OWNER/NAME
    revision: str  # branch, tag or commit
    patterns: tuple[str, ...]  # with a slash of a whole path, otherwise of the name of a file

    @property
    def address(self) -> str:
        """The value of DATA_PATH for this repository."""
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"{HUB}{self.name}{at}:{','.join(self.patterns)}"

    @property
    def label(self) -> str:
        """The name as that of a folder."""
        return self.name.replace("/", "--")


def repository(address: str, *, patterns: tuple[str, ...] = TEXT_FILES) -> Repository:
    """Parse `[hf://]OWNER/NAME[@REVISION][:PATTERN,...]`. patterns: used if it has none."""
    place, _, own = address.removeprefix(HUB).partition(":")
    name, _, revision = place.partition("@")
    if name.count("/") != 1:
        raise ConfigError(
            f"DATA_PATH={address!r} is not a Hugging Face dataset",
            why="expected OWNER/NAME, optionally with @REVISION and :PATTERN",
            hint="example: DATA_PATH=roneneldan/TinyStories",
        )
    return Repository(name=name, revision=revision or "main", patterns=tuple(filter(None, own.split(","))) or patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """A dataset in the tokens of one tokenizer, and how much of it is needed."""

    dataset: str
    tokenizer: str
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
    def recipe(self) -> dict[str, Any]:
        """The fields that decide the content of the dataset, as in dataset.json, without the requested size."""
        # Fields without effect must not create a second copy of the dataset.
        without = set(WITHOUT_SIZE)
        without |= set() if self.tokenizer == "bpe" else {"bpe_vocab_size"}
        without |= set() if self.repository else {"repository"}
        without |= set(OF_TEXT) if self.shards_on_hub or self.dataset == "shards" else set()
        return {name: value for name, value in asdict(self).items() if name not in without}

    @property
    def shards_on_hub(self) -> Repository | None:
        """The repository of a dataset that is token shards on Hugging Face, else None."""
        if self.dataset == "shards":
            is_remote = self.data_path.startswith(HUB)
            return repository(self.data_path, patterns=SHARD_FILES) if is_remote else None
        known = CATALOG.get(self.dataset)
        if known is None or self.tokenizer != "gpt2" or not known.shards:
            return None
        return repository(known.larger if self.repository else known.shards)

    @property
    def text_on_hub(self) -> Repository | None:
        """The repository of a dataset that is text on Hugging Face, else None."""
        if self.dataset == "hub":
            return repository(self.data_path)
        known = CATALOG.get(self.dataset)
        if known is None or not known.text:
            return None
        return repository(known.text.format(language=self.data_path or known.language))

    def as_named(self) -> DatasetRequest:
        """Return the request with the column and the repository that the catalog has for it."""
        known = CATALOG.get(self.dataset)
        if known is None:
            return self
        is_larger = known.larger and self.tokenizer == "gpt2" and self.tokens > known.above
        larger = repository(known.larger).name if is_larger else ""
        return replace(self, text_column=known.column or self.text_column, repository=larger)

    def part(self, dataset: str, data_path: str, *, share: float) -> DatasetRequest:
        """Return the request for one dataset of a mix. share: of the tokens."""
        tokens = int(self.tokens * share) + 1 if self.tokens else 0  # rounded up: 0 would mean all
        return replace(self, dataset=dataset, data_path=data_path, mix="", tokens=tokens, shards=0)

    def enough(self, tokens_of_shards: Sequence[int]) -> int | None:
        """Return how many of these training shards, in order, hold what is requested; None if all are needed."""
        if self.shards:
            return self.shards if self.shards <= len(tokens_of_shards) else None
        have = 0
        for number, tokens in enumerate(tokens_of_shards, 1):
            have += whole_windows(tokens, self.block_size)
            if self.tokens and have >= self.tokens:
                return number
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDataset:
    """A prepared dataset."""

    path: str
    sha256: str  # of the shards that are read; of streamed data, of the first ones
    vocab_size: int
    train_tokens: int  # that are read
    val_tokens: int
    shards: int  # training shards that are read, from the first; 0: all
    made: bool  # something was downloaded or written by this call
    parts: tuple[tuple[str, float, int], ...] = ()  # of a mix: name, share of the sequences, training tokens
    train_shards: tuple[int, ...] = ()  # tokens of each training shard that is read
