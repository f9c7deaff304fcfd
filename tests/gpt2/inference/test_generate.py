"""Generate texts: the cache changes no number, sampling follows its options, and a text ends where it should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.data.tokenizer import ByteTokenizer
from gpt2.inference.generate import GeneratedText, Sampling, generate, overlap, sample_token
from gpt2.model.cache import Cache
from gpt2.model.gpt2 import GPT
from kmatrix.errors import ConfigError
from models import BYTE_SHAPE as SHAPE
from models import _one_thread_and_default_precision, enlarge_weights  # noqa: F401  (a fixture for all tests)

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def model():
    return enlarge_weights(GPT(SHAPE, vocab_multiple=64)).eval()


def random_ids(*shape, seed=5):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_without_cache(model, tokens):
    """Return the logits after a text, computed without a cache: (V,)."""
    return model(torch.tensor([list(tokens)]))[0][0, -1]


@pytest.mark.parametrize("pieces", [[1] * 24, [24], [5, 1, 1, 10, 7], [23, 1]])
def test_cached_logits_equal_those_of_the_complete_text(model, pieces):
    idx = random_ids(2, 24)
    cache = Cache(SHAPE, 2)
    done = 0
    for size in pieces:
        logits = model.extend(idx[:, done : done + size], cache)
        done += size
        with torch.no_grad():
            expected = model(idx[:, :done])[0][:, -1]
        assert torch.allclose(logits, expected, rtol=0, atol=1e-5)
        assert expected.std() > 0.3


def test_a_text_longer_than_the_context_is_refused_by_the_cache_which_grows_on_demand(model):
    cache = Cache(replace(SHAPE, block_size=4096))
    assert cache._kv.numel() == 0
    cache.append(1)
    assert cache._kv.shape[3] == 64
    full = Cache(SHAPE)
    model.extend(random_ids(1, 24), full)
    with pytest.raises(ValueError, match="25 tokens in a row, but the model's context is 24"):
        model.extend(random_ids(1, 1), full)


def test_temperature_0_selects_the_most_likely_token(model):
    text = GeneratedText(BYTES.encode("abc"), Sampling(max_tokens=8, temperature=0), BYTES)
    "".join(generate(model, text))
    sequence = list(text.prompt)
    for token in text.tokens:
        assert token == int(logits_without_cache(model, sequence).argmax())
        sequence.append(token)


def test_the_seed_determines_the_text(model):
    def tokens(seed):
        text = GeneratedText(BYTES.encode("abc"), Sampling(max_tokens=15, seed=seed), BYTES)
        list(generate(model, text))
        return text.tokens

    assert tokens(1) == tokens(1) != tokens(2)


def test_tokens_are_drawn_with_the_probabilities_of_the_model():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sample_token(logits, Sampling(temperature=0.5), generator)] += 1
    expected = (logits / 0.5).softmax(-1)
    assert torch.allclose(counts / 4000, expected, atol=0.03)


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {3}),  # probabilities are 0.1, 0.3, 0.15, 0.45
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 0.76}, {1, 2, 3}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # renormalized, the remaining 0.15, 0.3 and 0.45 are 1/6, 1/3 and 1/2
    ],
)
def test_top_k_and_top_p_exclude_unlikely_tokens(options, possible):
    logits = torch.tensor([0.1, 0.3, 0.15, 0.45]).log()
    generator = torch.Generator().manual_seed(1)
    assert {sample_token(logits, Sampling(**options), generator) for _ in range(300)} == possible


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-80, 80).map(lambda n: n / 10), min_size=2, max_size=30, unique=True),
    st.integers(0, 40),
    st.floats(0.01, 1),
    st.floats(0.05, 5),
    st.integers(0, 10),
)
def test_a_drawn_token_is_always_one_of_the_top_k(logits, top_k, top_p, temperature, seed):
    sampling = Sampling(top_k=top_k, top_p=top_p, temperature=temperature)
    token = sample_token(torch.tensor(logits), sampling, torch.Generator().manual_seed(seed))
    likelier = [x for x in logits if x > logits[token]]
    assert not top_k or len(likelier) < top_k
    total = sum(math.exp(x / temperature) for x in logits)
    assert top_p == 1 or sum(math.exp(x / temperature) for x in likelier) / total < top_p + 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ("a", "")}, "stop strings must not be empty"),
    ],
)
def test_invalid_sampling_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def emitted(tokens, **options):
    """Return the pieces that are emitted when these tokens are drawn, and the whole text."""
    text = GeneratedText([1], Sampling(**{"max_tokens": 100, **options}), BYTES)
    chunks = []
    for token in tokens:
        chunks.append(text.add(token))
        if text.finish:
            break
    assert "".join(chunks) == text.text
    return chunks, text


def test_a_multi_byte_character_is_emitted_when_it_is_complete():
    chunks, text = emitted("aé€😀b".encode(), max_tokens=11)
    assert chunks == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]
    assert text.finish == "length"


def test_an_invalid_character_does_not_hold_back_the_text_forever():
    chunks, _ = emitted([*b"a", 0xF0, 0xF0, 0xF0, 0xF0, *b"bc"])
    assert "".join(chunks).startswith("a")
    assert chunks[-1] == "c"
    chunks, text = emitted([*b"a", 0xC3], max_tokens=2)
    assert text.text == "a\N{REPLACEMENT CHARACTER}"


def test_the_end_of_document_token_ends_a_text_and_is_not_emitted():
    _, text = emitted([*b"ab", BYTES.end_of_document, *b"c"])
    assert (text.text, text.finish) == ("ab", "stop")


def test_a_stop_text_ends_a_text_and_no_part_of_it_is_emitted():
    chunks, text = emitted(b"one END two", stop=("END",))
    assert (text.text, text.finish) == ("one ", "stop")
    assert chunks[:5] == ["o", "n", "e", " ", ""]


def test_a_partial_stop_text_is_emitted_at_the_end():
    chunks, text = emitted(b"EN", stop=("END",), max_tokens=2)
    assert chunks == ["", "EN"]
    _, text = emitted(b"EEND", stop=("END",))
    assert text.text == "E"
    _, text = emitted([*b"xEN", BYTES.end_of_document], stop=("END",))
    assert (text.text, text.finish) == ("xEN", "stop")


def test_the_first_of_several_stop_texts_in_the_text_counts():
    _, text = emitted(b"a-b+c", stop=("+c", "-b"))
    assert text.text == "a"


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=5))
def test_the_overlap_is_the_longest_prefix_of_the_stop_text_at_the_end(text, stop):
    found = [n for n in range(len(stop)) if text.endswith(stop[:n]) and n <= len(text)]
    assert overlap(text, stop) == max(found)


def test_an_empty_prompt_starts_a_document(model):
    text = GeneratedText([], Sampling(max_tokens=1, temperature=0), BYTES)
    list(generate(model, text))
    assert text.tokens == [int(logits_without_cache(model, [BYTES.end_of_document]).argmax())]


def test_a_text_longer_than_the_context_continues_from_its_last_half(model):
    text = GeneratedText(BYTES.encode("x" * 20), Sampling(max_tokens=60, temperature=0), BYTES)
    list(generate(model, text))
    assert len(text.tokens) == 60 or text.finish == "stop"
    all_tokens = [*text.prompt, *text.tokens]
    position = 24  # the window is full: tokens 12..23 are read again, and token 24 is the next
    if len(all_tokens) > position:
        assert all_tokens[position] == int(logits_without_cache(model, all_tokens[position - 12 : position]).argmax())


def test_a_prompt_longer_than_the_context_is_truncated_at_its_start(model):
    prompt = random_ids(40).tolist()
    text = GeneratedText(prompt, Sampling(max_tokens=1, temperature=0), BYTES)
    list(generate(model, text))
    assert text.tokens == [int(logits_without_cache(model, prompt[-24:]).argmax())]
