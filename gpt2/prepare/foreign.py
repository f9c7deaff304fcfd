"""Shards of other programs: are they of the chosen tokenizer, and what is the vocabulary of their characters?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpt2.data import shards, tokenizer
from gpt2.prepare.progress import say
from kmatrix.errors import DataError

PICKLE = "meta.pkl"  # nanoGPT's vocabulary, never read: loading a pickle can run any program
TEXT = "input.txt"  # nanoGPT's name for the text of its character datasets
SAMPLE = 1 << 16  # tokens at the beginning of the first training shard
QUOTE = 4096  # tokens that must occur in the text that the vocabulary is taken from
MOST_TEXT = 1 << 30  # bytes of a text that is read as a whole
MOST_CONTROL = 0.05  # share of control characters in a text
WHITE_SPACE = (9, 10, 12, 13)  # control characters that texts have


def check_tokenizer(folder: Path, name: str) -> None:
    """Raise DataError if the shards in a user's folder are not of this tokenizer; nothing in it is ever deleted.

    For char without a vocabulary, take it from the text next to the shards, and write it as tokenizer.json.
    """
    if name == "byte":
        _check_bytes(folder)
    elif name in ("char", "bpe") and not (folder / tokenizer.FILE).is_file():
        if name == "bpe":
            raise _no_vocabulary(folder, "bpe", f"put the {tokenizer.FILE} that they were made with next to them")
        _take_characters(folder)


def _check_bytes(folder: Path) -> None:
    """Raise DataError if tokens are numbers of characters, which are as small as bytes."""
    sample = _sample(folder)
    control = (sample < 32) & ~np.isin(sample, WHITE_SPACE)
    # Numbers of characters begin at 0, where bytes are control characters. Binary data have bytes above 127.
    numbered = sample.size and sample.max() < 128 and control.mean() > MOST_CONTROL
    if numbered or (folder / PICKLE).is_file():
        why = f"{control.mean():.0%} of the first {sample.size:,} tokens would be control characters"
        raise DataError(
            f"the tokens in {folder} are not bytes",
            why=why if numbered else f"{PICKLE} next to them is the vocabulary of a character dataset",
            hint=f"pass TOKENIZER=char, with the text that they were made from next to them as {TEXT}",
        )


def _take_characters(folder: Path) -> None:
    """Write the vocabulary of the text next to the shards, after checking that they are its tokens."""
    hint = f"put the text that they were made from next to them as {TEXT}, or pass DATASET=folder DATA_PATH=<text>"
    path = folder / TEXT
    if not path.is_file():
        raise _no_vocabulary(folder, "char", hint)
    try:
        if path.stat().st_size > MOST_TEXT:
            raise DataError(f"{path} has more than 1 GiB", why="it is read as a whole", hint=hint)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read", why=str(error), hint="it must be a text in UTF-8") from None
    # As nanoGPT's prepare.py numbers them: sorted by code point, from 0.
    found = tokenizer.CharTokenizer.trained([text])
    sample = _sample(folder)[:QUOTE]
    if sample.max() >= found.end_of_document or found.decode(sample.tolist()) not in text:
        raise DataError(
            f"the shards in {folder} were not made from {TEXT}",
            why=f"their first {sample.size:,} tokens, as its characters, do not occur in it",
            hint=hint,
        )
    try:
        found.save(folder / tokenizer.FILE)
    except OSError as error:
        raise DataError(
            f"cannot write {folder / tokenizer.FILE}",
            why=error.strerror or str(error),
            hint="copy the folder to a place of yours, and pass its DATA_PATH",
        ) from None
    say(f"took the vocabulary of {len(found.characters)} characters from {path}")


def _sample(folder: Path) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return np.asarray(shards.open_shard(shards.find(folder, "train")[0])[:SAMPLE])


def _no_vocabulary(folder: Path, name: str, hint: str) -> DataError:
    why = f"{folder / tokenizer.FILE} is missing"
    pickled = f"; {PICKLE} is not read, because a pickle can run any program"
    return DataError(
        f"the vocabulary of the {name} shards in {folder} is unknown",
        why=why + (pickled if (folder / PICKLE).exists() else ""),
        hint=hint,
    )
