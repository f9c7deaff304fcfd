"""Tokenizers by name: gpt2, byte, char and bpe.

Tokens are 16-bit integers. `gpt2` downloads its published vocabulary once. The vocabulary of `char` and `bpe` belongs
to the dataset: tokenizer.json in the folder of its shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kmatrix.errors import DataError
from kmatrix.records.files import replacing, write_json
from kmatrix.shapes import VOCABULARIES

if TYPE_CHECKING:
    import tiktoken
    import tokenizers


NAMES = ("gpt2", "byte", "char", "bpe")
FILE = "tokenizer.json"
MAX_VOCAB = 65536  # 16-bit tokens
LONGEST_WORD = 512  # characters of a word, or of white space, that the training of bpe merges as a whole
WITHOUT_BREAK = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)|\s{{{LONGEST_WORD}}}(?=\s)")
END = "<|endoftext|>"
SEPARATOR = b"\n\n"  # the end of a document as text
GPT2_FILES = (  # of tiktoken_ext/openai_public.py
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
)
Tokens = npt.NDArray[np.uint16]


class Tokenizer:
    """The base of all tokenizers. `vocab_size` includes the end-of-document token."""

    name: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text. No end of document is added, or recognized in the text."""
        raise NotImplementedError

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, on all cores if encoding is slow."""
        return [self.encode(text) for text in texts]

    def _bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token other than the end of a document."""
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens: an end of document becomes a blank line, invalid UTF-8 a replacement character."""
        parts = (SEPARATOR if token == self.end_of_document else self._bytes(int(token)) for token in tokens)
        # Joined first, because a character may have several tokens. A model may also generate invalid UTF-8.
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Return the UTF-8 length of each token, (vocab_size,), 0 for the end of a document; None if it is unknown."""
        tokens = range(self.vocab_size)
        return np.array([0 if token == self.end_of_document else len(self._bytes(token)) for token in tokens])


def load(name: str, folder: Path | None = None) -> Tokenizer:
    """Return a tokenizer by name. folder: the dataset's, which holds tokenizer.json of char and bpe.

    The vocabulary of gpt2 is loaded when it is first needed. Raises DataError if tokenizer.json cannot be used.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return Gpt2Tokenizer()
    path = (folder or Path()) / FILE
    try:
        text = path.read_text(encoding="utf-8")
        return CharTokenizer(json.loads(text)["characters"]) if name == "char" else BpeTokenizer.read(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a {name} tokenizer",
            why=str(error),
            hint="restore it from a copy: it must be the file that the shards were made with",
        ) from None


def end_of_document(name: str, folder: Path) -> int:
    """Return the end-of-document token of a dataset, without the vocabulary of GPT-2."""
    return VOCABULARIES[name] - 1 if name in VOCABULARIES else load(name, folder).end_of_document


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and 256 for the end of a document."""

    name = "byte"
    vocab_size = VOCABULARIES["byte"]
    end_of_document = vocab_size - 1

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def _bytes(self, token: int) -> bytes:
        return bytes((token,))


class CharTokenizer(Tokenizer):
    """One token per character of the dataset, sorted by code point, and the last for the end of a document."""

    name = "char"

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.end_of_document = len(characters)
        self.vocab_size = len(characters) + 1
        if self.vocab_size > MAX_VOCAB:
            raise DataError(f"{len(characters)} different characters are too many", hint="choose TOKENIZER=bpe")
        self._code_points = _code_points(characters)
        self._order = np.argsort(self._code_points)  # a file of another program may have any

    @classmethod
    def trained(cls, texts: Iterable[str]) -> CharTokenizer:
        """Return the tokenizer of all characters in the texts."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls("".join(sorted(found)))

    def save(self, path: Path) -> None:
        write_json(path, {"type": "char", "characters": self.characters})

    def encode(self, text: str) -> Tokens:
        if unknown := set(text) - set(self.characters):
            raise DataError(
                f"the vocabulary has no character {min(unknown)!r}",
                why="the char tokenizer knows only the characters of its dataset",
                hint="remove it, or train with TOKENIZER=bpe or TOKENIZER=byte",
            )
        found = np.searchsorted(self._code_points, _code_points(text), sorter=self._order)
        return self._order[found].astype(np.uint16)

    def _bytes(self, token: int) -> bytes:
        return self.characters[token].encode()


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding of UTF-8 bytes, trained on the dataset; token 0 ends a document."""

    name = "bpe"
    end_of_document = 0

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        if inner.token_to_id(END) != self.end_of_document:  # a file of another program: 0 would be an ordinary token
            raise ValueError(f"{END} is not token {self.end_of_document}")
        self.vocab_size = int(inner.get_vocab_size())
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
    def read(cls, text: str) -> BpeTokenizer:
        """Return the tokenizer in the text of a file. Raises ValueError if it is invalid."""
        from tokenizers import Tokenizer as Inner

        try:
            return cls(Inner.from_str(text))
        except Exception as error:  # broad, because the library raises plain Exception
            raise ValueError(str(error)) from None

    def save(self, path: Path) -> None:
        with replacing(path) as partial:
            self._inner.save(str(partial))

    def encode(self, text: str) -> Tokens:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.array(each.ids, dtype=np.uint16) for each in self._inner.encode_batch_fast(texts)]

    def decode(self, tokens: Iterable[int]) -> str:
        parts: list[list[int]] = [[]]  # divided here, because the decoder omits special tokens
        for token in tokens:
            parts.append([]) if token == self.end_of_document else parts[-1].append(int(token))
        return SEPARATOR.decode().join(self._inner.decode(part) for part in parts)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for text, token in self._inner.get_vocab().items():
            # In the byte alphabet each character stands for one byte.
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


class Gpt2Tokenizer(Tokenizer):
    """The byte-pair encoding of GPT-2 (tiktoken); 50256 ends a document."""

    name = "gpt2"
    vocab_size = VOCABULARIES["gpt2"]
    end_of_document = vocab_size - 1

    @cached_property
    def _inner(self) -> tiktoken.Encoding:
        return fetch_gpt2()

    def encode(self, text: str) -> Tokens:
        # No special tokens: "<|endoftext|>" in a text is text, not the end of a document
        return self._inner.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # tiktoken releases the interpreter's lock
            return list(pool.map(self.encode, texts))

    def _bytes(self, token: int) -> bytes:
        return self._inner.decode_single_token_bytes(token)

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        return None if missing_gpt2() else super().token_bytes()  # nothing is downloaded while a model trains


def gpt2_paths() -> dict[str, Path]:
    """Return the path of each vocabulary file by URL, as tiktoken names it."""
    # Not tiktoken's default, a folder in /tmp: it is lost on a restart, and a training node may be offline.
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or Path.home() / ".cache" / "kmatrix" / "tiktoken"
    # tiktoken/load.py: the SHA-1 of the URL is the name of a file in its cache
    return {url: Path(folder) / hashlib.sha1(url.encode()).hexdigest() for url in GPT2_FILES}


def missing_gpt2() -> list[str]:
    """Return the URLs of vocabulary files that are missing. tiktoken checks the hashes of those that are there."""
    return [url for url, path in gpt2_paths().items() if not path.is_file()]


def fetch_gpt2() -> tiktoken.Encoding:
    """Return the encoding of GPT-2. tiktoken downloads its vocabulary (1.5 MB) if it is missing."""
    import tiktoken

    paths = gpt2_paths()
    os.environ["TIKTOKEN_CACHE_DIR"] = str(paths[GPT2_FILES[0]].parent)
    try:
        return tiktoken.get_encoding("gpt2")
    # OSError: of the network, or of requests, whose errors are OSErrors.  ValueError: another file than expected
    except (OSError, ValueError) as error:
        raise DataError(
            "the vocabulary of the gpt2 tokenizer is missing",
            why=str(error),
            hint="put " + " and ".join(f"{url} at {path}" for url, path in paths.items()),
        ) from None
