"""Tokenizers restore what they encode, and know the number of bytes of each token."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import ROOT
from gpt2.data import tokenizer
from gpt2.data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, Gpt2Tokenizer, load
from kmatrix.errors import DataError
from vocabulary import download_vocabulary

TEXT = "Two words of the text, <|endoftext|> in the midst of it: äöü € 🙂 \n\ttwo words of the text.\n"
BPE = BpeTokenizer.trained([TEXT] * 3, 300)


@pytest.mark.parametrize("name", ["byte", "char", "bpe", pytest.param("gpt2", marks=pytest.mark.nightly)])
def test_a_tokenizer_restores_what_it_encodes_and_knows_its_bytes(name, tmp_path, monkeypatch):
    if name == "gpt2":
        download_vocabulary(tmp_path, monkeypatch)
        assert Gpt2Tokenizer().encode("Hello, I am a language").tolist() == [15496, 11, 314, 716, 257, 3303]
    known = {"byte": ByteTokenizer(), "char": CharTokenizer.trained([TEXT]), "bpe": BPE, "gpt2": Gpt2Tokenizer()}
    each = known[name]
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


@pytest.mark.parametrize("name", ["char", "bpe"])
def test_the_same_texts_give_the_same_vocabulary_which_is_read_from_the_folder_of_the_dataset(tmp_path, name):
    texts = (ROOT / "gpt2/data/tokenizer.py").read_text().split(".")
    files = set()
    for _ in range(2):
        trained = CharTokenizer.trained(texts) if name == "char" else BpeTokenizer.trained(texts, 400)
        trained.save(tmp_path / "tokenizer.json")
        files.add((tmp_path / "tokenizer.json").read_bytes())
    assert len(files) == 1
    read = load(name, tmp_path)
    assert read.encode(texts[0]).tolist() == trained.encode(texts[0]).tolist()
    assert read.vocab_size == trained.vocab_size


def test_character_tokens_are_ordered_by_code_point_and_a_missing_one_is_refused_by_name():
    each = CharTokenizer.trained(["ca🙂b", "b"])
    assert each.encode("abc🙂").tolist() == [0, 1, 2, 3]
    assert CharTokenizer("b🙂ac").encode("abc🙂").tolist() == [2, 0, 3, 1]  # of another program
    with pytest.raises(DataError, match="no character 'Ω'"):
        each.encode("aΩ")


@pytest.mark.parametrize("name", ["char", "bpe"])
@pytest.mark.parametrize("content", [None, "{", '{"type": "else"}', "[]"])
def test_a_directory_without_a_vocabulary_is_refused_with_its_path(tmp_path, name, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=rf"tokenizer.json is not a {name} tokenizer"):
        load(name, tmp_path)


def test_without_its_vocabulary_gpt2_reports_which_file_to_put_where(tmp_path, monkeypatch):
    from tiktoken_ext import openai_public

    def no_network(_):
        raise OSError("no network")

    assert all(url in inspect.getsource(openai_public.gpt2) for url in tokenizer.GPT2_FILES)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    each = load("gpt2")
    assert (each.vocab_size, each.token_bytes()) == (50257, None)
    with pytest.raises(DataError) as raised:
        each.encode("text")
    assert raised.value.why == "no network"
    assert str(tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee") in raised.value.hint
