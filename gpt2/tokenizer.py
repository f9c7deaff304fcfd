"""Text to tokens and back: the byte tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kmatrix.shapes import BYTE_VOCAB

END_OF_DOCUMENT = 256


class ByteTokenizer:
    """One token a byte of UTF-8, and 256 for the end of a document."""

    name = "byte"
    vocab_size = BYTE_VOCAB
    end_of_document = END_OF_DOCUMENT

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """Return the tokens of a text; no end of document is added."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens: ends of documents become blank lines, broken UTF-8 the sign for it."""
        parts = [b"\n\n" if token == END_OF_DOCUMENT else bytes((token,)) for token in tokens]
        return b"".join(parts).decode("utf-8", errors="replace")
