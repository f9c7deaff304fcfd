"""Generate texts: the cache changes no number, sampling follows its options, and a text ends where it should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gpt2.data.tokenizer import ByteTokenizer
from gpt2.inference.generate import GeneratedText, Sampling, generate, sample_token
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


# Tokens (256: end of document), options, the parts that are sent, and why the text ends
TEXTS = {
    "a character of several bytes is sent when it is complete": (
        "aé€😀b".encode(),
        {"max_tokens": 11},
        ["a", "", "é", "", "", "€", "", "", "", "😀", "b"],
        "length",
    ),
    "an invalid character holds nothing back for ever": (
        b"a\xf0\xf0\xf0\xf0b",
        {"max_tokens": 6},
        ["a", "", "", "", 4 * "\ufffd", "b"],
        "length",
    ),
    "an incomplete end": (b"a\xc3", {"max_tokens": 2}, ["a", "\ufffd"], "length"),
    "the end of document is not sent": ([*b"ab", 256, *b"c"], {}, ["a", "b", ""], "stop"),
    "no part of a stop text is sent": (b"oneEND two", {"stop": ("END",)}, ["", "", "o", "n", "e", ""], "stop"),
    "the beginning of a stop text is text": (b"EN", {"stop": ("END",), "max_tokens": 2}, ["", "EN"], "length"),
    "and before the end of document": ([*b"xEN", 256], {"stop": ("END",)}, ["", "", "x", "EN"], "stop"),
    "a stop text after its own beginning": (b"EEND", {"stop": ("END",)}, ["", "", "E", ""], "stop"),
    "the first of several in the text counts": (b"a-b+c", {"stop": ("+c", "-b")}, ["", "a", ""], "stop"),
}


@pytest.mark.parametrize(("tokens", "options", "parts", "finish"), TEXTS.values(), ids=TEXTS)
def test_a_text_ends_where_it_should_and_is_sent_as_early_as_it_can(tokens, options, parts, finish):
    text = GeneratedText([1], Sampling(**{"max_tokens": 100, **options}), BYTES)
    sent = []
    for token in tokens:
        sent.append(text.add(token))
        if text.finish:
            break
    assert (sent, text.finish) == (parts, finish)
    assert text.text == "".join(parts)


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
