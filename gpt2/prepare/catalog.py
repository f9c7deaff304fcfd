"""The datasets that have a name: where each one comes from, and under which licence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kmatrix.errors import ConfigError

HUB = "hf://"
TEXT_FILES = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.json.gz", "*.txt", "*.txt.gz", "*.md")
SHARD_FILES = ("*_train_*.bin", "*_val_*.bin", "*_train_*.npy", "*_val_*.npy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Files of a dataset on Hugging Face. revision: branch, tag or commit.  patterns: of the files' paths or names."""

    name: str
    revision: str = "main"
    patterns: tuple[str, ...] = TEXT_FILES

    @property
    def address(self) -> str:
        """What a user would write as DATA_PATH."""
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"{HUB}{self.name}{at}:{','.join(self.patterns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Web:
    """One file of text at an address. sha256: what it must have."""

    url: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A dataset by name. shards: ready-made ones in GPT-2 tokens.  text: for every other tokenizer."""

    licence: str
    text: Repository | Web
    shards: Repository | None = None


CATALOG = {
    "finewebedu": Known(
        licence="ODC-By 1.0",
        text=Repository(name="HuggingFaceFW/fineweb-edu", patterns=("sample/10BT/*.parquet",)),
        shards=Repository(name="kjj0/finewebedu10B-gpt2", patterns=("finewebedu_*.bin",)),
    ),
    "fineweb": Known(
        licence="ODC-By 1.0",
        text=Repository(name="HuggingFaceFW/fineweb", patterns=("sample/10BT/*.parquet",)),
        shards=Repository(name="kjj0/fineweb10B-gpt2", patterns=("fineweb_*.bin",)),
    ),
    "openwebtext": Known(
        licence="CC0 1.0 (the packaging; the pages keep their own)",
        text=Repository(name="Skylion007/openwebtext", patterns=("*.parquet",)),
    ),
    "tinystories": Known(
        licence="CDLA-Sharing 1.0",
        text=Repository(name="roneneldan/TinyStories", patterns=("data/train-*.parquet",)),
    ),
    "shakespeare": Known(
        licence="public domain",
        text=Web(
            url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            size=1_115_394,
        ),
    ),
}


def repository(text: str, *, patterns: tuple[str, ...]) -> Repository:
    """Return the repository of `[hf://]OWNER/NAME[@REVISION][:PATTERN,...]`. patterns: where it gives none."""
    name, _, own = text.removeprefix(HUB).partition(":")
    name, _, revision = name.partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError(
            f"DATA_PATH={text!r} names no dataset of Hugging Face",
            why="it is read as OWNER/NAME, then @REVISION and :PATTERN where they are wanted",
            fix="write it like DATA_PATH=roneneldan/TinyStories",
        )
    found = Repository(name=name, patterns=tuple(filter(None, own.split(","))) or patterns)
    return replace(found, revision=revision) if revision else found
