"""Text generation: several texts at once, one token each per step, with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.data.tokenizer import Tokenizer
from gpt2.model.base import LanguageModel
from gpt2.model.cache import Cache
from kmatrix.errors import ConfigError

MAX_TOKENS_PER_CHARACTER = 4  # UTF-8 has at most 4 bytes per character: a longer incomplete end is invalid
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders put it in place of invalid UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled, and when a text ends."""

    max_tokens: int = 100  # 0: only score the prompt
    temperature: float = 1.0  # 0: take the most probable token
    top_k: int = 0  # sample from the k most probable tokens; 0: from all
    top_p: float = 1.0  # sample from the most probable tokens whose probabilities add up to this
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end the text; they are removed from it
    logprobs: int | None = None  # most probable tokens to report for each token; None: no log-probabilities at all
    prompt_logprobs: bool = False  # also of the tokens of the prompt

    def __post_init__(self) -> None:
        for name, valid, why in (
            ("max_tokens", self.max_tokens >= 0, "expected an integer of at least 0"),
            ("temperature", 0 <= self.temperature <= 100, "expected a number from 0 to 100"),
            ("top_k", self.top_k >= 0, "expected an integer of at least 0 (0: all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "expected a number above 0 and at most 1"),
            ("seed", 0 <= self.seed < 2**63, "expected an integer from 0 to 2^63 - 1"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "expected an integer of at least 0"),
            ("stop", all(self.stop), "stop strings must not be empty"),
        ):
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """The log-probability of one token, before temperature, top-k and top-p."""

    token: int
    logprob: float | None  # nats; None for the first token of a prompt, which nothing predicts
    top: dict[int, float]  # the most probable tokens and this one, with their log-probabilities
    offset: int  # of the token's first character in the text, or in the prompt


def score_of(logits: Tensor, token: int, count: int, offset: int) -> TokenScore:
    """Return the score of a token. logits: (V,).  count: of the most probable tokens to report, next to this one."""
    logprobs = logits.double().log_softmax(-1)  # (V,); 64 bits: the sum runs over the vocabulary
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    own = float(logprobs[token])
    top = {**dict(zip(tokens.tolist(), values.tolist(), strict=True)), token: own}
    return TokenScore(token=token, logprob=own, top=top, offset=offset)


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token sampled from softmax(logits / temperature), after top-k and top-p filtering.

    Sources: Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2019, arXiv:1904.09751 (top-p, nucleus).
    logits: (V,), on the CPU like the generator. Logits equal to the k-th largest all pass top-k.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    # 64 bits: at a low temperature differences between logits are large, and sums over the vocabulary must be 1.
    logits = logits.double() / sampling.temperature  # (V,)
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True, stable=True)  # stable: the same seed gives the same text
        before = ordered.cumsum(-1) - ordered  # probability of all likelier tokens; 0 for the first, which always stays
        probabilities = probabilities.index_fill(0, tokens[before >= sampling.top_p], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


class GeneratedText:
    """One text that is being generated."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, tokenizer: Tokenizer) -> None:
        # an empty prompt means the beginning of a document
        self.prompt = [int(token) for token in prompt] or [tokenizer.end_of_document]
        self.sampling, self.tokenizer = sampling, tokenizer
        self.generator = torch.Generator().manual_seed(sampling.seed)  # its own: texts in a batch are independent
        self.tokens: list[int] = []  # sampled so far
        self.text = ""  # decoded so far, without what may still become part of a stop string
        # "length" (max_tokens), "stop" (stop string or end of document), None: unfinished
        self.finish: str | None = None
        self.scores: list[TokenScore] = []  # of the sampled tokens, if they are asked for
        self.prompt_scores: list[TokenScore] = []
        self._taken = 0  # scores that `take_scores` has returned
        self._decoded_tokens = 0
        self._held_back = ""  # decoded text that may be the beginning of a stop string

    @property
    def newest(self) -> int:
        """The token that the model has not processed yet."""
        return (self.tokens or self.prompt)[-1]

    def add(self, token: int, logits: Tensor | None = None) -> str:
        """Add a token and return the new text, which may be empty. logits: (V,), that predicted it, for its score."""
        if logits is not None and self.sampling.logprobs is not None:
            offset = len(self.text) + len(self._held_back)
            self.scores.append(score_of(logits, token, self.sampling.logprobs, offset))
        self.tokens.append(token)
        end = token == self.tokenizer.end_of_document
        last = end or len(self.tokens) == self.sampling.max_tokens
        new = self._held_back + self._decode(len(self.tokens) - end, last=last)  # without the end of document
        stops = [position for stop in self.sampling.stop if (position := new.find(stop)) >= 0]
        if stops:
            new, self.finish = new[: min(stops)], "stop"
        elif last:
            self.finish = "stop" if end else "length"
        # Text that was sent cannot be taken back, so keep what may turn out to be the beginning of a stop string.
        keep = 0 if self.finish else max((overlap(new, stop) for stop in self.sampling.stop), default=0)
        new, self._held_back = new[: len(new) - keep], new[len(new) - keep :]
        self.text += new
        return new

    def take_scores(self) -> list[TokenScore]:
        """Return the scores of the tokens in the text so far that were not returned before.

        A token after a stop string, or the end of the document, is not in the text.
        """
        new = self.scores[self._taken :]
        if self.finish != "length":
            new = [score for score in new if score.offset < len(self.text)]
        self._taken += len(new)
        return new

    def score_prompt(self, logits: Tensor) -> None:
        """Score the tokens of the prompt. logits: (T, V), after each of its tokens."""
        count = self.sampling.logprobs or 0
        first = GeneratedText([], Sampling(max_tokens=len(self.prompt) + 1), self.tokenizer)  # decodes as texts do
        for place, token in enumerate(self.prompt):
            offset = len(first.text)
            if place:
                self.prompt_scores.append(score_of(logits[place - 1], token, count, offset))
            else:
                self.prompt_scores.append(TokenScore(token=token, logprob=None, top={}, offset=offset))
            first.add(token)

    def _decode(self, count: int, *, last: bool) -> str:
        """Return the text of the first `count` tokens, without the part that was already decoded.

        Return "" while they end in an incomplete character, unless no further token will come.
        """
        # Only new tokens: decoding everything again would take quadratic time.
        waiting = self.tokens[self._decoded_tokens : count]
        text = self.tokenizer.decode(waiting)
        if text.endswith(REPLACEMENT) and not last and len(waiting) < MAX_TOKENS_PER_CHARACTER:
            return ""
        self._decoded_tokens = count
        return text


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class BatchGenerator:
    """Continuous batching of up to `rows` texts: each step adds a token to each, and texts join and leave at any step.

    If a text outgrows the model's context, generation continues from its last half, as if it began there.
    """

    def __init__(self, model: LanguageModel, rows: int) -> None:
        self.model, self.rows = model, rows
        parameter = next(model.parameters())
        self._device = parameter.device
        self._cache = Cache(model.shape, rows, device=self._device, dtype=parameter.dtype)
        self.texts: list[GeneratedText] = []  # in the order of their rows in the cache

    @property
    def free(self) -> int:
        """Rows without a text."""
        return self.rows - len(self.texts)

    def add(self, text: GeneratedText) -> None:
        """Process a text's prompt. The next step samples its first token."""
        row = len(self.texts)
        self.texts.append(text)
        try:
            if text.sampling.prompt_logprobs:
                self._score_prompt(text)
            if text.sampling.max_tokens:
                self._prefill(row, text.prompt[-self.model.shape.block_size :])
        # Broad, because any failure (often of memory) must leave the batch as it was: the caller gets the error, and
        # the other texts continue.
        except Exception:
            self.texts.pop()
            raise

    @torch.no_grad()
    def step(self) -> list[tuple[GeneratedText, str]]:
        """Add a token to every text and return each with its new text. Finished texts leave the batch."""
        scored = [text for text in self.texts if not text.sampling.max_tokens]
        for text in scored:
            text.finish = "length"
            self.drop(text)
        return [*((text, "") for text in scored), *(self._step() if self.texts else [])]

    def _step(self) -> list[tuple[GeneratedText, str]]:
        # Texts that fill the context: positions are absolute in GPT-2, so the cache cannot be shifted. Half of it, so
        # that this does not happen again with each token.
        for row, text in enumerate(self.texts):
            if self._cache.lengths[row] == self.model.shape.block_size:
                half = max(1, self.model.shape.block_size // 2)
                self._prefill(row, (text.prompt + text.tokens)[-half:])
        newest = torch.tensor([[text.newest] for text in self.texts], device=self._device)  # (B, 1)
        # Sampled on the CPU: the generators are there, and the same seed gives the same text on every device.
        logits = self.model.extend(newest, self._cache).cpu()  # (B, V)
        new = [
            (text, text.add(sample_token(row, text.sampling, text.generator), row))
            for text, row in zip(self.texts, logits, strict=True)
        ]
        for text, _ in new:  # not in the loop above: dropping moves rows
            if text.finish:
                self.drop(text)
        return new

    def drop(self, text: GeneratedText) -> None:
        """Remove a text from the batch, if it is there. The last text moves into its row."""
        if text in self.texts:
            row, last = self.texts.index(text), len(self.texts) - 1
            if row != last:
                self._cache.move(last, row)
                self.texts[row] = self.texts[last]
            self.texts.pop()

    @torch.no_grad()
    def _score_prompt(self, text: GeneratedText) -> None:
        """Score a prompt that fits the context, with one forward pass."""
        logits, _ = self.model(torch.tensor([text.prompt], device=self._device))  # (1, T, V)
        text.score_prompt(logits[0].float().cpu())

    def _prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Fill a row of the cache with all tokens but the last, which the next step processes."""
        self._cache.lengths[row] = 0
        if len(tokens) > 1:
            self.model.extend(torch.tensor([tokens[:-1]], device=self._device), self._cache, row)


def generate(model: LanguageModel, text: GeneratedText) -> Iterator[str]:
    """Generate one text and yield its parts. The model must be in evaluation mode."""
    batch = BatchGenerator(model, 1)
    batch.add(text)
    while batch.texts:
        yield from (new for _, new in batch.step() if new)
