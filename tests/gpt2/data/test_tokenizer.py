"""Tokenizers restore what they encode, and know the number of bytes of each token."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2.data import tokenizer
from gpt2.data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, load
from kmatrix.errors import DataError
from vocabulary import download_vocabulary

TEXT = "Two words of the text, <|endoftext|> in the midst of it: äöü € 🙂 \n\ttwo words of the text.\n"
BPE = BpeTokenizer.trained([TEXT] * 3, 300)
TRAINED = {"char": lambda: CharTokenizer.trained([TEXT]), "bpe": lambda: BpeTokenizer.trained([TEXT] * 3, 300)}


@pytest.mark.parametrize("name", ["byte", "char", "bpe", pytest.param("gpt2", marks=pytest.mark.nightly)])
def test_a_tokenizer_restores_what_it_encodes_and_knows_its_bytes(name, tmp_path, monkeypatch):
    if name == "gpt2":
        download_vocabulary(tmp_path, monkeypatch)
        assert load("gpt2").encode("Hello, I am a language").tolist() == [15496, 11, 314, 716, 257, 3303]
    each = TRAINED[name]() if name in TRAINED else load(name)
    tokens, sizes = each.encode(TEXT), each.token_bytes()
    assert each.decode(tokens) == TEXT
    assert [found.tolist() for found in each.encode_all([TEXT, ""])] == [tokens.tolist(), []]
    assert tokens.dtype == np.uint16
    assert sizes.shape == (each.vocab_size,)
    assert sizes[tokens].sum() == len(TEXT.encode())
    assert sizes[each.end_of_document] == 0
    assert each.end_of_document not in tokens  # although the text has <|endoftext|>
    assert each.decode([*each.encode("two"), each.end_of_document, *each.encode("words")]) == "two\n\nwords"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_and_trained_bpe_tokenizers_restore_every_text(text):
    for each in (ByteTokenizer(), BPE):
        assert each.decode(each.encode(text)) == text


@pytest.mark.parametrize("name", TRAINED)
def test_the_same_texts_give_the_same_vocabulary_and_a_missing_or_damaged_one_is_refused(tmp_path, name):
    path, files = tmp_path / "tokenizer.json", set()
    for trained in (TRAINED[name](), TRAINED[name]()):
        trained.save(path)
        files.add(path.read_bytes())
    assert len(files) == 1
    assert load(name, tmp_path).encode(TEXT).tolist() == trained.encode(TEXT).tolist()
    for content in ("{", '{"type": "else"}', "[]", None):
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(DataError, match=rf"tokenizer.json is not a {name} tokenizer"):
            load(name, tmp_path)


def test_character_tokens_are_ordered_by_code_point_and_a_missing_one_is_refused_by_name():
    each = CharTokenizer.trained(["ca🙂b", "b"])
    assert each.encode("abc🙂").tolist() == [0, 1, 2, 3]
    assert CharTokenizer("b🙂ac").encode("abc🙂").tolist() == [2, 0, 3, 1]  # of another program
    with pytest.raises(DataError, match="no character 'Ω'"):
        each.encode("aΩ")


def test_without_its_vocabulary_gpt2_reports_which_file_to_put_where(tmp_path, monkeypatch):
    from tiktoken_ext import openai_public

    def no_network(_):
        raise OSError("no network")

    assert all(url in inspect.getsource(openai_public.gpt2) for url in tokenizer.GPT2_FILES)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    each = load("gpt2")
    assert (each.vocab_size, each.token_bytes()) == (50257, None)
    with pytest.raises(DataError, match="no network") as raised:
        each.encode("text")
    assert str(tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee") in raised.value.hint
