"""Tokenizers by name, of 16-bit tokens.

`gpt2` downloads its published vocabulary once; that of `char` and `bpe` is tokenizer.json in the dataset's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
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


FILE = "tokenizer.json"
MAX_VOCAB = 65536  # 16-bit tokens
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
    pieces: Sequence[bytes]  # the UTF-8 bytes of each token; the end of a document has none

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text. No end of document is added, or recognized in a text."""
        raise NotImplementedError

    def encode(self, text: str) -> Tokens:
        return self.encode_all([text])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens: an end of document becomes a blank line, invalid UTF-8 a replacement character."""
        parts = (SEPARATOR if token == self.end_of_document else self.pieces[token] for token in tokens)
        # Joined first, because a character may have several tokens. A model may also generate invalid UTF-8.
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Return the UTF-8 length of each token, (vocab_size,), 0 for the end of a document; None if it is unknown."""
        return np.array([len(piece) for piece in self.pieces])


def load(name: str, folder: Path | None = None) -> Tokenizer:
    """Return a tokenizer by name. folder: the dataset's, which holds tokenizer.json of char and bpe.

    The vocabulary of gpt2 is loaded when it is first needed. Raises DataError if tokenizer.json cannot be used.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return Gpt2Tokenizer()
    import tokenizers

    path = (folder or Path()) / FILE
    try:
        text = path.read_text(encoding="utf-8")
        if name == "char":
            return CharTokenizer(json.loads(text)["characters"])
        return BpeTokenizer(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # broad, because tokenizers raises plain Exception
        hint = "restore it from a copy: it must be the file that the shards were made with"
        raise DataError(f"{path} is not a {name} tokenizer", why=str(error), hint=hint) from None


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and 256 for the end of a document."""

    name = "byte"
    vocab_size = VOCABULARIES["byte"]
    end_of_document = vocab_size - 1
    pieces = (*(bytes((byte,)) for byte in range(256)), b"")

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]


class CharTokenizer(Tokenizer):
    """One token per character of the dataset, and the last for the end of a document."""

    name = "char"

    def __init__(self, characters: str) -> None:
        self.characters, self.end_of_document, self.vocab_size = characters, len(characters), len(characters) + 1
        if self.vocab_size > MAX_VOCAB:
            raise DataError(f"{len(characters)} different characters are too many", hint="choose TOKENIZER=bpe")
        self.pieces = (*(character.encode() for character in characters), b"")
        self._numbers = np.full(0x110000, -1)  # code point -> token
        self._numbers[[ord(character) for character in characters]] = range(len(characters))

    @classmethod
    def trained(cls, texts: Iterable[str]) -> CharTokenizer:
        """Return the tokenizer of all characters in the texts, sorted by code point."""
        return cls("".join(sorted(set().union(*texts))))

    def save(self, path: Path) -> None:
        write_json(path, {"type": "char", "characters": self.characters})

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        found = [self._numbers[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")] for text in texts]
        for text, tokens in zip(texts, found, strict=True):
            if tokens.min(initial=0) < 0:
                unknown = f"the vocabulary of the dataset has no character {text[tokens.argmin()]!r}"
                raise DataError(unknown, hint="remove it, or train with TOKENIZER=bpe or TOKENIZER=byte")
        return [tokens.astype(np.uint16) for tokens in found]


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding of UTF-8 bytes, trained on the dataset; token 0 ends a document."""

    name = "bpe"
    end_of_document = 0

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        if inner.token_to_id(END) != self.end_of_document:  # a file of another program: 0 would be an ordinary token
            raise ValueError(f"{END} is not token {self.end_of_document}")
        inner.encode_special_tokens = True  # <|endoftext|> in a text is ordinary text
        self._inner, self.vocab_size = inner, int(inner.get_vocab_size())
        # GPT-2's alphabet (bytes_to_unicode of openai/gpt-2, encoder.py): a character for each byte; those that cannot
        # be printed have the characters from 256, in their order.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = sorted({*range(256)} - {*printable})
        alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
        known = {token: text for text, token in inner.get_vocab().items()} | {self.end_of_document: ""}
        self.pieces = [bytes(alphabet[character] for character in known[token]) for token in range(self.vocab_size)]

    @classmethod
    def trained(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Train a tokenizer with at most vocab_size tokens. The same texts give the same tokenizer."""
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        inner = Inner(models.BPE())  # with GPT-2's pre-tokenizer and alphabet: no token crosses a word boundary
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],  # gets the first number
            # All 256 bytes: no text is unknown, whatever it was trained on. In an order that is always the same.
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def save(self, path: Path) -> None:
        with replacing(path) as partial:
            self._inner.save(str(partial))

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.array(each.ids, dtype=np.uint16) for each in self._inner.encode_batch_fast(texts)]


class Gpt2Tokenizer(Tokenizer):
    """The byte-pair encoding of GPT-2 (tiktoken); 50256 ends a document."""

    name = "gpt2"
    vocab_size = VOCABULARIES["gpt2"]
    end_of_document = vocab_size - 1

    @cached_property
    def _inner(self) -> tiktoken.Encoding:
        """The encoding of tiktoken, which downloads its vocabulary (1.5 MB) if it is missing."""
        import tiktoken

        paths = gpt2_paths()
        os.environ["TIKTOKEN_CACHE_DIR"] = str(paths[GPT2_FILES[0]].parent)
        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # of the network, or another file than expected
            hint = "put " + " and ".join(f"{url} at {path}" for url, path in paths.items())
            raise DataError("the vocabulary of the gpt2 tokenizer is missing", why=str(error), hint=hint) from None

    @cached_property
    def pieces(self) -> list[bytes]:  # type: ignore[override]
        return [*map(self._inner.decode_single_token_bytes, range(self.end_of_document)), b""]

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        # "<|endoftext|>" in a text is ordinary text
        found = self._inner.encode_ordinary_batch(list(texts), num_threads=len(os.sched_getaffinity(0)))
        return [np.array(tokens, dtype=np.uint16) for tokens in found]

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
