"""Tokenizers restore what they encode, and know the number of bytes of each token."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import ROOT, environment
from gpt2.data import tokenizer
from gpt2.data.tokenizer import (
    LONGEST_WORD,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Gpt2Tokenizer,
    load,
)
from kmatrix.errors import DataError
from vocabulary import download_vocabulary

TEXT = "Two words of the text, <|endoftext|> in the midst of it: äöü € 🙂 \n\ttwo words of the text.\n"


def trained_bpe():
    return [ByteTokenizer(), CharTokenizer.trained([TEXT]), BpeTokenizer.trained([TEXT] * 3, 300)]


@pytest.mark.parametrize("each", trained_bpe(), ids=lambda each: each.name)
def test_decoding_restores_the_encoded_text(each):
    assert each.decode(each.encode(TEXT)) == TEXT
    assert [tokens.tolist() for tokens in each.encode_all([TEXT, ""])] == [each.encode(TEXT).tolist(), []]
    assert each.encode(TEXT).dtype == np.uint16


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_and_trained_bpe_tokenizers_restore_every_text(text):
    for each in (ByteTokenizer(), BPE):
        assert each.decode(each.encode(text)) == text


BPE = BpeTokenizer.trained([TEXT] * 3, 300)


@pytest.mark.parametrize("each", trained_bpe(), ids=lambda each: each.name)
def test_the_bytes_of_the_tokens_add_up_to_those_of_the_text(each):
    sizes = each.token_bytes()
    assert sizes.shape == (each.vocab_size,)
    assert sizes[each.encode(TEXT)].sum() == len(TEXT.encode())
    assert sizes[each.end_of_document] == 0


@pytest.mark.parametrize("each", trained_bpe(), ids=lambda each: each.name)
def test_the_end_of_a_document_decodes_to_a_blank_line(each):
    assert each.end_of_document not in each.encode(TEXT)
    both = [*each.encode("two"), each.end_of_document, *each.encode("words")]
    assert each.decode(both) == "two\n\nwords"
    assert each.end_of_document < each.vocab_size


@pytest.mark.parametrize("each", trained_bpe()[1:], ids=lambda each: each.name)
def test_the_vocabulary_of_a_dataset_is_read_from_its_directory(tmp_path, each):
    each.save(tmp_path / "tokenizer.json")
    second = load(each.name, tmp_path)
    assert second.encode(TEXT).tolist() == each.encode(TEXT).tolist()
    assert second.vocab_size == each.vocab_size


@pytest.mark.process
def test_the_same_texts_train_the_same_bpe_in_another_process(tmp_path):
    program = (
        "import sys; from pathlib import Path; from gpt2.data.tokenizer import BpeTokenizer\n"
        "BpeTokenizer.trained(Path(sys.argv[1]).read_text().split('.'), 400).save(Path(sys.argv[2]))"
    )
    (tmp_path / "text").write_text((ROOT / "gpt2" / "data" / "tokenizer.py").read_text())
    for number in (1, 2):
        command = [sys.executable, "-c", program, str(tmp_path / "text"), str(tmp_path / f"{number}.json")]
        subprocess.run(command, env=environment(), cwd=ROOT, check=True, timeout=120)
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    (tmp_path / "1.json").rename(tmp_path / "tokenizer.json")
    assert load("bpe", tmp_path).vocab_size == 400


def test_a_line_without_breaks_is_trained_on_in_pieces():
    trained = BpeTokenizer.trained(["a" * 2000], 300)

    # Each merge doubles the longest token: in one word of 2000 letters it would grow to 1024 of them.
    assert trained.token_bytes().max() == LONGEST_WORD


def test_a_character_missing_in_the_dataset_is_refused_by_name():
    with pytest.raises(DataError, match="no character 'Ω'"):
        CharTokenizer.trained(["abc"]).encode("aΩ")


def test_character_tokens_are_ordered_by_code_point():
    assert CharTokenizer.trained(["ca🙂b", "b"]).encode("abc🙂").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["char", "bpe"])
@pytest.mark.parametrize("content", [None, "{", '{"type": "else"}', "[]"])
def test_a_directory_without_a_vocabulary_is_refused_with_its_path(tmp_path, name, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=rf"tokenizer.json is not a {name} tokenizer"):
        load(name, tmp_path)


def test_urls_of_the_gpt2_vocabulary_match_tiktoken():
    from tiktoken_ext import openai_public

    source = inspect.getsource(openai_public.gpt2)
    assert all(url in source for url in tokenizer.GPT2_FILES)


def no_network(_):
    raise OSError("no network")


def test_without_its_vocabulary_gpt2_reports_which_file_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    each = load("gpt2")
    assert each.vocab_size == 50257
    assert each.token_bytes() is None
    with pytest.raises(DataError) as raised:
        each.encode("text")
    assert raised.value.why == "no network"
    assert str(tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee") in raised.value.hint


@pytest.mark.nightly
def test_gpt2_encodes_like_the_published_tokenizer(tmp_path, monkeypatch):
    download_vocabulary(tmp_path, monkeypatch)
    each = Gpt2Tokenizer()
    assert each.encode("Hello, I am a language model").tolist() == [15496, 11, 314, 716, 257, 3303, 2746]
    assert each.decode([15496, 50256, *each.encode(TEXT)]) == "Hello\n\n" + TEXT
    sizes = each.token_bytes()
    assert sizes.shape == (50257,)
    assert sizes[each.encode(TEXT)].sum() == len(TEXT.encode())
