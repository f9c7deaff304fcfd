"""Make a dataset ready and say what it is: one JSON line on stdout, progress on stderr.

    python -m gpt2.prepare stdlib --data-dir data

stdlib is made here, from the source text of the running Python's standard library.
Shards of other datasets are looked up, checked and hashed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gpt2 import shards
from gpt2.tokenizer import ByteTokenizer
from kmatrix.errors import ConfigError, DataError, KmatrixError
from kmatrix.shapes import BYTE_VOCAB, GPT2_VOCAB

VOCAB = {"gpt2": GPT2_VOCAB, "byte": BYTE_VOCAB}
TOKENIZERS = {"stdlib": ("byte",), "finewebedu": ("gpt2",), "shakespeare": ("gpt2",), "shards": ("gpt2", "byte")}
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BUILD_DEPENDENT = ("_sysconfigdata", "sitecustomize", "usercustomize")  # names of files that differ between builds
VALIDATION_OF_256 = 18  # about 7 % of the files


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpt2.prepare", description="Make a dataset ready.")
    parser.add_argument("dataset", choices=list(TOKENIZERS))
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of datasets")
    parser.add_argument("--data-path", default="", help="folder of shards; relative paths start at --data-dir")
    parser.add_argument("--tokenizer", choices=list(VOCAB), help="what the tokens are")
    args = parser.parse_args(argv)
    try:
        answer = prepare(args.dataset, args.data_dir.absolute(), args.data_path, args.tokenizer)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {DataError(f'{args.data_dir} cannot be used', why=str(error))}", file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


def prepare(dataset: str, data_dir: Path, data_path: str = "", tokenizer: str | None = None) -> dict[str, Any]:
    """Make one dataset ready and return its path, hash, vocabulary and numbers of tokens."""
    tokenizer = tokenizer or TOKENIZERS[dataset][0]
    if tokenizer not in TOKENIZERS[dataset]:
        raise ConfigError(
            f"the dataset {dataset} has no tokens of the tokenizer {tokenizer}",
            why=f"it comes with {' or '.join(TOKENIZERS[dataset])}",
            fix="choose that tokenizer in `make menuconfig`, Data",
        )
    if dataset == "shards" and not data_path:
        raise ConfigError("the dataset shards needs a folder", fix="set CONFIG_GPT2_DATA_PATH")
    made = False
    if dataset == "stdlib":
        folder, made = make_stdlib(data_dir)
        source = stdlib_source()
    else:
        folder = data_dir / (data_path if dataset == "shards" else dataset)
        source = str(folder)
        say(f"checking the shards in {folder}")
    about = shards.describe(folder, VOCAB[tokenizer], dataset=dataset, source=source, tokenizer=tokenizer)
    return {
        "path": str(folder),
        "sha256": about["sha256"],
        "vocab_size": VOCAB[tokenizer],
        "train_tokens": about["train_tokens"],
        "val_tokens": about["val_tokens"],
        "made": made,
    }


def make_stdlib(data_dir: Path) -> tuple[Path, bool]:
    """Return the folder of the standard library's shards, and whether they were made just now.

    One process at a time makes them, in a folder aside that is renamed when it is whole:
    the folder is there whole or not at all, whatever is killed.
    """
    folder = data_dir / f"stdlib-{platform.python_version()}"
    data_dir.mkdir(parents=True, exist_ok=True)
    if whole(folder):
        return folder, False
    with locked(data_dir / f".{folder.name}.lock"):
        if whole(folder):
            return folder, False
        say(f"making {folder} from {stdlib_source()}")
        for left in data_dir.glob(f".{folder.name}.partial.*"):
            shutil.rmtree(left)
        aside = data_dir / f".{folder.name}.partial.{os.getpid()}"
        aside.mkdir()
        write_stdlib(aside)
        if folder.exists():
            say(f"{folder} was not whole: made again")
            shutil.rmtree(folder)
        aside.rename(folder)
    return folder, True


def write_stdlib(folder: Path) -> None:
    """Write the shards and dataset.json of the standard library, flushed to the disk."""
    tokenizer = ByteTokenizer()
    parts: dict[str, list[shards.Tokens]] = {"train": [], "val": []}
    for name, text in documents(Path(sysconfig.get_path("stdlib"))):
        parts[split(name)] += [tokenizer.encode(text), np.array([tokenizer.end_of_document], dtype=np.uint16)]
    for kind, tokens in parts.items():
        path = folder / f"stdlib_{kind}_000000.bin"
        shards.write_shard(path, np.concatenate(tokens))
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shards.describe(folder, BYTE_VOCAB, dataset="stdlib", source=stdlib_source(), tokenizer=tokenizer.name)


def documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield relative path and text of each module of a standard library, in order of the paths."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in names:
        *folders, file = name.split("/")
        ours = not SKIPPED_FOLDERS.intersection(folders) and not any(part.startswith("config-") for part in folders)
        if not ours or file.startswith(BUILD_DEPENDENT):
            continue
        try:
            yield name, (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a module in another encoding, or one that may not be read


def split(name: str) -> str:
    """Return "val" for about 7 % of the names and "train" for the rest, always the same ones."""
    return "val" if hashlib.sha256(name.encode()).digest()[0] < VALIDATION_OF_256 else "train"


def whole(folder: Path) -> bool:
    """Say whether a folder holds the shards that its dataset.json speaks of."""
    listed = shards.recorded(folder)
    try:
        return bool(listed) and all(shards.token_count(folder / shard.name) == shard.tokens for shard in listed)
    except (DataError, OSError):
        return False


def stdlib_source() -> str:
    return f"{platform.python_implementation()} {platform.python_version()} standard library"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
