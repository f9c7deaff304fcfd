"""Named datasets (catalog.toml), and what a run requests of a dataset."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpt2.data.tokenizer import VOCAB
from kmatrix.errors import ConfigError
from kmatrix.records.dataset import ShardInfo, whole_windows
from kmatrix.records.train_config import LANGUAGE

HUB = "hf://"
TEXT_FILES = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.json.gz", "*.txt", "*.txt.gz", "*.md")
SHARD_FILES = ("*_train_*.bin", "*_val_*.bin")
TEXT = ("text_column", "val_percent", "shard_tokens")  # fields that only text datasets use


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Files of a dataset on Hugging Face."""

    name: str  # OWNER/NAME
    revision: str = "main"  # branch, tag or commit
    patterns: tuple[str, ...] = TEXT_FILES  # of paths or file names

    @property
    def address(self) -> str:
        """The value of DATA_PATH for this repository."""
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"{HUB}{self.name}{at}:{','.join(self.patterns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDataset:
    """An entry of catalog.toml, which describes the fields. Its text is in a repository, or one file on the web."""

    licence: str
    text: Repository | None = None
    url: str = ""
    sha256: str = ""
    size: int = 0  # bytes
    shards: Repository | None = None
    above: int = 0
    larger: Repository | None = None
    column: str = ""
    by_language: bool = False
    language: str = ""
    terms: str = ""

    def text_of(self, language: str) -> Repository | None:
        """Return the repository of the text in a language. Raises ConfigError if it is not the name of one."""
        if not self.by_language or self.text is None:
            return self.text
        if not LANGUAGE.fullmatch(language or self.language):
            raise ConfigError(
                f"DATA_PATH={language!r} is not a language of {self.text.name}",
                why="expected a language and a script, as its folders are named: deu_Latn",
                hint=f"see https://huggingface.co/datasets/{self.text.name}/tree/main/data",
            )
        patterns = tuple(pattern.format(language=language or self.language) for pattern in self.text.patterns)
        return replace(self.text, patterns=patterns)


def _named(entry: dict[str, Any]) -> NamedDataset:
    fields = dict(entry)
    for key in {"text", "shards", "larger"} & entry.keys():
        fields[key] = Repository(name=entry[key]["name"], patterns=tuple(entry[key]["patterns"]))
    return NamedDataset(**fields)


_ENTRIES = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
CATALOG = {name: _named(entry) for name, entry in _ENTRIES.items()}


def repository(text: str, *, patterns: tuple[str, ...]) -> Repository:
    """Parse `[hf://]OWNER/NAME[@REVISION][:PATTERN,...]`. patterns: used if the text has none."""
    name, _, own = text.removeprefix(HUB).partition(":")
    name, _, revision = name.partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError(
            f"DATA_PATH={text!r} is not a Hugging Face dataset",
            why="expected OWNER/NAME, optionally with @REVISION and :PATTERN",
            hint="example: DATA_PATH=roneneldan/TinyStories",
        )
    found = Repository(name=name, patterns=tuple(filter(None, own.split(","))) or patterns)
    return replace(found, revision=revision) if revision else found


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """A dataset in the tokens of one tokenizer, and how much of it is needed."""

    dataset: str
    tokenizer: str
    data_path: str = ""  # of the datasets hub, folder and shards
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
        values = asdict(self)
        # A longer run extends the same dataset. Fields without effect must not create a second copy of it either.
        without = ["tokens", "block_size", "shards", "streaming"]
        without += [] if self.tokenizer == "bpe" else ["bpe_vocab_size"]
        without += [] if self.repository else ["repository"]
        without += TEXT if self.dataset == "shards" or self.prebuilt else ()
        return {name: value for name, value in values.items() if name not in without}

    @property
    def prebuilt(self) -> Repository | None:
        """The repository with the dataset as prebuilt shards of these tokens, None without one."""
        known = CATALOG.get(self.dataset)
        if known is None or self.tokenizer != "gpt2":
            return None
        return known.larger if self.repository else known.shards

    def part(self, dataset: str, data_path: str, *, share: float) -> DatasetRequest:
        """Return the request for one dataset of a mix. share: of the tokens."""
        tokens = int(self.tokens * share) + 1 if self.tokens else 0  # rounded up: 0 would mean all
        return replace(self, dataset=dataset, data_path=data_path, mix="", tokens=tokens, shards=0)

    def shards_needed(self, tokens_of_shards: Sequence[int]) -> int:
        """Return how many of these training shards, in order, hold the requested sequences."""
        if self.shards:
            return min(self.shards, len(tokens_of_shards))
        have = 0
        for number, tokens in enumerate(tokens_of_shards, 1):
            have += whole_windows(tokens, self.block_size)
            if self.tokens and have >= self.tokens:
                return number
        return len(tokens_of_shards)

    def is_satisfied_by(self, train: Sequence[ShardInfo]) -> bool:
        """Return whether these training shards hold all requested sequences."""
        if self.shards:
            return len(train) >= self.shards
        return bool(self.tokens) and sum(whole_windows(s.tokens, self.block_size) for s in train) >= self.tokens


def digest(recipe: dict[str, Any]) -> str:
    """Return an 8-digit hash of a recipe, used in folder names."""
    # Sorted, so that the order of the fields does not matter. 8 digits: few recipes, and a name that can be typed.
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def vocabulary(name: str) -> int:
    """Return the size of a fixed vocabulary; 65536, which accepts all tokens, if it depends on the dataset."""
    return VOCAB.get(name, 65536)  # that of char and bpe is known only after they were trained
