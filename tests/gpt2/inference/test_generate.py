"""Generate texts: the cache changes no number, sampling follows its options, and a text ends where it should."""

from __future__ import annotations

import math

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


def generated(model, prompt, **options):
    """Return a text that the model has generated."""
    text = GeneratedText(prompt, Sampling(**options), BYTES)
    assert "".join(generate(model, text)) == text.text
    return text


@pytest.mark.parametrize("pieces", [[1] * 24, [24], [5, 1, 1, 10, 7]])
def test_cached_logits_equal_those_of_the_complete_text(model, pieces):
    idx = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(5))
    cache, done = Cache(SHAPE), 0
    for size in pieces:
        logits = model.extend(idx[:, done : done + size], cache)
        done += size
        with torch.no_grad():
            expected = model(idx[:, :done])[0][:, -1]
        assert torch.allclose(logits, expected, rtol=0, atol=1e-5)
        assert expected.std() > 0.3


def test_temperature_0_takes_the_most_likely_token_after_the_last_half_of_a_full_context(model):
    """Of a short, an empty (it starts a document) and a too long prompt; the context has 24 tokens."""
    for prompt in (b"abc", b"", b"x" * 40):
        text = generated(model, prompt, max_tokens=20, temperature=0)
        known, start = list(prompt) or [BYTES.end_of_document], max(0, len(prompt) - 24)
        for token in text.tokens:
            if len(known) - start > 24:
                start = len(known) - 12
            with torch.no_grad():  # without a cache
                assert token == int(model(torch.tensor([known[start:]]))[0][0, -1].argmax())
            known.append(token)


def test_tokens_are_drawn_by_the_seed_with_the_probabilities_of_the_model(model):
    first, again, other = (generated(model, [97], max_tokens=15, seed=seed).tokens for seed in (1, 1, 2))
    assert first == again != other
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sample_token(logits, Sampling(temperature=0.5), generator)] += 1
    assert torch.allclose(counts / 4000, (logits / 0.5).softmax(-1), atol=0.03)


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


def test_invalid_sampling_options_are_refused():
    for name, value in (("max_tokens", 0), ("temperature", math.nan), ("top_k", -1), ("top_p", 1.5), ("seed", -1)):
        with pytest.raises(ConfigError, match=f"{name}={value}.* is impossible"):
            Sampling(**{name: value})


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
        ["a", "", "", "", "", 4 * "\ufffd" + "b"],
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
