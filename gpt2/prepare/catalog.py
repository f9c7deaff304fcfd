"""Named datasets with their source and licence, and what a run requests of a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpt2.data.tokenizer import VOCAB
from kmatrix.errors import ConfigError
from kmatrix.records.dataset import ShardInfo
from kmatrix.records.train_config import LANGUAGE

HUB = "hf://"
TEXT_FILES = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.json.gz", "*.txt", "*.txt.gz", "*.md")
SHARD_FILES = ("*_train_*.bin", "*_val_*.bin", "*_train_*.npy", "*_val_*.npy")
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
class WebFile:
    """One text file on the web."""

    url: str
    sha256: str
    size: int  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerRepository:
    """Prebuilt shards of a dataset for requests of more tokens than its usual repository has."""

    above: int  # tokens for training of the usual repository
    shards: Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDataset:
    """A dataset with a name."""

    licence: str
    text: Repository | WebFile  # for all tokenizers without prebuilt shards; {language} in a pattern: of the request
    shards: Repository | None = None  # prebuilt, in GPT-2 tokens
    larger: LargerRepository | None = None
    column: str = ""  # of the text, if it is not `text`
    by_language: bool = False  # the path of a request is one of its languages, such as deu_Latn
    language: str = ""  # without a path; "": the path is required
    terms: str = ""  # of the licence, if it does not allow every use

    def text_of(self, language: str) -> Repository | WebFile:
        """Return the source of the text in a language. Raises ConfigError if it is not the name of one."""
        if not self.by_language or not isinstance(self.text, Repository):
            return self.text
        if not LANGUAGE.fullmatch(language or self.language):
            raise ConfigError(
                f"DATA_PATH={language!r} is not a language of {self.text.name}",
                why="expected a language and a script, as its folders are named: deu_Latn",
                hint=f"see https://huggingface.co/datasets/{self.text.name}/tree/main/data",
            )
        patterns = tuple(pattern.format(language=language or self.language) for pattern in self.text.patterns)
        return replace(self.text, patterns=patterns)


CATALOG = {
    "finewebedu": NamedDataset(
        licence="ODC-By 1.0",
        text=Repository(name="HuggingFaceFW/fineweb-edu", patterns=("sample/10BT/*.parquet",)),
        shards=Repository(name="kjj0/finewebedu10B-gpt2", patterns=("finewebedu_*.bin",)),
        # Another order of the same kind of pages: llm.c's dev/data/edu_fineweb.sh downloads it.
        larger=LargerRepository(
            above=9_853_989_344,  # the same number as in kmatrix.experiment.inputs.data.PREBUILT
            shards=Repository(name="karpathy/fineweb-edu-100B-gpt2-token-shards", patterns=("edu_fineweb_*.bin",)),
        ),
    ),
    "fineweb": NamedDataset(
        licence="ODC-By 1.0",
        text=Repository(name="HuggingFaceFW/fineweb", patterns=("sample/10BT/*.parquet",)),
        shards=Repository(name="kjj0/fineweb10B-gpt2", patterns=("fineweb_*.bin",)),
    ),
    "fineweb2": NamedDataset(
        licence="ODC-By 1.0",
        text=Repository(name="HuggingFaceFW/fineweb-2", patterns=("data/{language}/train/*.parquet",)),
        by_language=True,
    ),
    "finepdfs": NamedDataset(
        licence="ODC-By 1.0",
        text=Repository(name="HuggingFaceFW/finepdfs", patterns=("data/{language}/train/*.parquet",)),
        by_language=True,
        language="eng_Latn",
    ),
    "cosmopedia": NamedDataset(
        licence="Apache 2.0",
        text=Repository(name="HuggingFaceTB/cosmopedia", patterns=("data/*.parquet",)),
    ),
    # Shuffled, and repackaged as text: https://github.com/karpathy/nanochat, nanochat/dataset.py. The licence is that
    # of nvidia/ClimbMix, which it was made from.
    "climbmix": NamedDataset(
        licence="CC BY-NC 4.0",
        text=Repository(name="karpathy/climbmix-400b-shuffle", patterns=("shard_*.parquet",)),
        terms="non-commercial, for research and development only (card of nvidia/ClimbMix)",
    ),
    "medqa": NamedDataset(
        licence="CC BY 4.0",
        # The other file, phrases_no_exclude_test.jsonl, is the test set that models are compared on.
        text=Repository(name="GBaker/MedQA-USMLE-4-options", patterns=("phrases_no_exclude_train.jsonl",)),
        column="question+answer",
    ),
    "openwebtext": NamedDataset(
        licence="CC0 1.0 (the packaging; the pages keep their own)",
        text=Repository(name="Skylion007/openwebtext", patterns=("*.parquet",)),
    ),
    "tinystories": NamedDataset(
        licence="CDLA-Sharing 1.0",
        text=Repository(name="roneneldan/TinyStories", patterns=("data/train-*.parquet",)),
    ),
    "shakespeare": NamedDataset(
        licence="public domain",
        text=WebFile(
            url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            size=1_115_394,
        ),
    ),
}


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
class DatasetOrigin:
    """What a dataset was made from, as its dataset.json records it."""

    dataset: str
    source: str  # address, URL, pattern or program
    commit: str | None  # of a repository
    tokenizer: str
    recipe: dict[str, Any]  # the fields that decide its content: DatasetRequest.recipe, and versions

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """A dataset in the tokens of one tokenizer, and how much of it is needed."""

    dataset: str
    tokenizer: str
    data_path: str = ""  # of the datasets hub, folder and shards
    mix: str = ""  # of the dataset mix
    text_column: str = "text"  # of JSON lines and Parquet
    val_percent: int = 7  # percent of the documents
    shard_tokens: int = 100_000_000  # maximum
    bpe_vocab_size: int = 8192  # maximum
    tokens: int = 0  # training tokens to read; 0: all
    block_size: int = 1  # tokens of the longest sequence
    shards: int = 0  # training shards, if known; 0: as many as hold `tokens`
    stream: str = ""  # "keep" or "drop": the shards are made while runs read them, and kept or deleted then

    @property
    def recipe(self) -> dict[str, Any]:
        """The fields that decide the content of the dataset, as in dataset.json, without the requested size."""
        values = asdict(self)
        # A longer run extends the same dataset. Fields without effect must not create a second copy of it either.
        for name in ("tokens", "block_size", "shards", "stream"):
            del values[name]
        if self.tokenizer != "bpe":
            del values["bpe_vocab_size"]
        if self.dataset == "shards" or self.prebuilt:
            for name in TEXT:
                del values[name]
        if self.larger:
            values["repository"] = self.larger.name
        return values

    @property
    def larger(self) -> Repository | None:
        """Return the repository of prebuilt shards for more tokens than the usual one has, if they are requested."""
        found = CATALOG[self.dataset].larger if self.prebuilt else None
        return found.shards if found and self.tokens > found.above else None

    @property
    def prebuilt(self) -> bool:
        """Return whether the dataset exists on Hugging Face as prebuilt shards of these tokens."""
        known = CATALOG.get(self.dataset)
        return known is not None and known.shards is not None and self.tokenizer == "gpt2"

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
            # Whole windows only, and a shard's first token is never a target (gpt2.data.sequences.Windows).
            have += max(0, tokens - 1) // self.block_size * self.block_size
            if self.tokens and have >= self.tokens:
                return number
        return len(tokens_of_shards)

    def is_satisfied_by(self, train: Sequence[ShardInfo]) -> bool:
        """Return whether these training shards hold all requested sequences."""
        if self.shards:
            return len(train) >= self.shards
        have = sum(max(0, shard.tokens - 1) // self.block_size * self.block_size for shard in train)
        return bool(self.tokens) and have >= self.tokens


def digest(recipe: dict[str, Any]) -> str:
    """Return an 8-digit hash of a recipe, used in folder names."""
    # Sorted, so that the order of the fields does not matter. 8 digits: few recipes, and a name that can be typed.
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDataset:
    """A prepared dataset."""

    path: str
    sha256: str  # of the shards that are read
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
