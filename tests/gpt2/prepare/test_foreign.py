"""The character shards of nanoGPT: their vocabulary, and that nothing in the user's folder is ever deleted."""

from __future__ import annotations

import numpy as np
import pytest

from factories import make_data
from gpt2.data.tokenizer import load
from gpt2.prepare.dataset import prepare
from kmatrix.errors import DataError

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak!\n" * 40


@pytest.fixture
def folder(tmp_path):
    """Return a folder as nanoGPT's data/shakespeare_char/prepare.py makes it."""
    made = tmp_path / "shakespeare_char"
    made.mkdir()
    number = {character: token for token, character in enumerate(sorted(set(TEXT)))}
    tokens = np.array([number[character] for character in TEXT], dtype=np.uint16)
    most = int(len(tokens) * 0.9)
    tokens[:most].tofile(made / "train.bin")
    tokens[most:].tofile(made / "val.bin")
    (made / "meta.pkl").write_bytes(b"\x80\x04")
    (made / "input.txt").write_text(TEXT)
    return made


def test_the_vocabulary_is_taken_from_the_text_next_to_the_shards(folder, tmp_path):
    result = prepare("shards", tmp_path, str(folder), "char")
    assert result["vocab_size"] == len(set(TEXT)) + 1
    tokens = np.fromfile(folder / "train.bin", dtype=np.uint16)
    assert load("char", folder).decode(tokens.tolist()) == TEXT[: len(tokens)]


@pytest.mark.parametrize("text", [None, "Another text, which has none of these words.\n" * 100])
def test_without_that_text_the_hint_says_what_to_add_and_not_what_to_delete(folder, tmp_path, text):
    (folder / "input.txt").unlink()
    if text:
        (folder / "input.txt").write_text(text)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError) as refused:
        prepare("shards", tmp_path, str(folder), "char")
    message = str(refused.value)
    assert "input.txt" in message
    assert not any(word in message for word in ("delete", "remove", "made again"))
    assert text or "meta.pkl is not read" in message
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("pickled", [True, False])
def test_characters_are_not_bytes(folder, tmp_path, pickled):
    if not pickled:
        (folder / "meta.pkl").unlink()
    with pytest.raises(DataError, match="are not bytes") as refused:
        prepare("shards", tmp_path, str(folder), "byte")
    assert "TOKENIZER=char" in str(refused.value)


def test_text_as_bytes_and_binary_data_are_bytes(folder, tmp_path):
    (folder / "meta.pkl").unlink()
    data = np.frombuffer(TEXT.encode(), dtype=np.uint8).astype(np.uint16)
    for name in ("train.bin", "val.bin"):
        data.tofile(folder / name)
    assert prepare("shards", tmp_path, str(folder), "byte")["vocab_size"] == 257
    make_data(tmp_path / "random")
    assert prepare("shards", tmp_path, str(tmp_path / "random"), "byte")["vocab_size"] == 257
