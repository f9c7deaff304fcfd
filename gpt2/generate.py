"""Texts from a model: several at once, one token of each a turn, with the keys and values of what was read kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.cache import Cache
from gpt2.model import GPT
from gpt2.tokenizer import Tokenizer
from kmatrix.errors import ConfigError

MOST_TOKENS_OF_A_SIGN = 4  # UTF-8 has at most 4 bytes a sign: longer broken ends are broken for good
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and where a text ends.

    temperature: 0 takes the likeliest token.  top_k: only the k likeliest; 0 for all.
    top_p: only the likeliest that together have this probability.  stop: texts that end it; they are left out.
    """

    max_tokens: int = 100
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, good, why in (
            ("max_tokens", self.max_tokens >= 1, "it must be a whole number above zero"),
            ("temperature", 0 <= self.temperature <= 100, "it must be a number from 0 to 100"),
            ("top_k", self.top_k >= 0, "it must be a whole number, 0 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "it must be above 0 and at most 1"),
            ("seed", 0 <= self.seed < 2**63, "it must be a whole number of at most 63 bits"),
            ("stop", all(self.stop), "an empty text ends nothing"),
        ):
            if not good:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", why=why)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token drawn from softmax(logits / temperature), less what top_k and top_p leave out.

    logits: (V,), on the CPU, as the generator is. Of equal logits at the border of top_k, all stay.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.double() / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # of the tokens likelier than this one: the first always stays
        probabilities = probabilities.index_fill(0, tokens[before >= sampling.top_p], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


class Text:
    """One text in the making. tokens: those that were drawn.  text: what they say, as far as it is certain.

    finish: None while it grows, then "length" (max_tokens were drawn) or "stop" (a stop text or the end of a
    document).
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, tokenizer: Tokenizer) -> None:
        self.prompt = [int(token) for token in prompt] or [
            tokenizer.end_of_document
        ]  # an empty prompt begins a document
        self.sampling, self.tokenizer = sampling, tokenizer
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self._read = 0  # tokens whose text is known
        self._held = ""  # text that may be the beginning of a stop text

    @property
    def newest(self) -> int:
        """The token that the model has not seen yet."""
        return (self.tokens or self.prompt)[-1]

    def take(self, token: int) -> str:
        """Add a token, and return the text that is certain by now and was not before."""
        self.tokens.append(token)
        end = token == self.tokenizer.end_of_document
        last = end or len(self.tokens) == self.sampling.max_tokens
        fresh = self._held + self._decoded(len(self.tokens) - end, whole=last)
        ends = [place for stop in self.sampling.stop if (place := fresh.find(stop)) >= 0]
        if ends:
            fresh, self.finish = fresh[: min(ends)], "stop"
        elif last:
            self.finish = "stop" if end else "length"
        keep = 0 if self.finish else max((overlap(fresh, stop) for stop in self.sampling.stop), default=0)
        certain, self._held = fresh[: len(fresh) - keep], fresh[len(fresh) - keep :]
        self.text += certain
        return certain

    def _decoded(self, count: int, *, whole: bool) -> str:
        """Return the text of the first `count` tokens, less what is known; "" while they end within a sign."""
        waiting = self.tokens[self._read : count]
        text = self.tokenizer.decode(waiting)
        if text.endswith(BROKEN) and not whole and len(waiting) < MOST_TOKENS_OF_A_SIGN:
            return ""
        self._read = count
        return text


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with, less than the whole of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Writer:
    """Writes up to `rows` texts at once; each turn adds one token to each. One may begin while others are written.

    A text that outgrows the model's context goes on from its last half, as if the rest had never been.
    """

    def __init__(self, model: GPT, rows: int) -> None:
        self.model, self.rows = model, rows
        parameter = next(model.parameters())
        self._device = parameter.device
        self._cache = Cache(model.shape, rows, device=self._device, dtype=parameter.dtype)
        self.texts: list[Text] = []

    @property
    def free(self) -> int:
        return self.rows - len(self.texts)

    def begin(self, text: Text) -> None:
        """Read a text's prompt; its first token comes with the next turn."""
        row = len(self.texts)
        self.texts.append(text)
        try:
            self._read(row, text.prompt[-self.model.shape.block_size :])
        except Exception:
            self.texts.pop()
            raise

    @torch.no_grad()
    def turn(self) -> list[tuple[Text, str]]:
        """Add a token to every text; return each with what it says more. Those that end are no longer among them."""
        for row, text in enumerate(self.texts):
            if self._cache.lengths[row] == self.model.shape.block_size:
                half = max(1, self.model.shape.block_size // 2)
                self._read(row, (text.prompt + text.tokens)[-half:])
        newest = torch.tensor([[text.newest] for text in self.texts], device=self._device)  # (B, 1)
        logits = self.model.extend(newest, self._cache).cpu()  # (B, V)
        said = [
            (text, text.take(choose(row, text.sampling, text.generator)))
            for text, row in zip(self.texts, logits, strict=True)
        ]
        for text, _ in said:
            if text.finish:
                self.drop(text)
        return said

    def drop(self, text: Text) -> None:
        """Leave off a text; the last one takes its row."""
        if text in self.texts:
            row, last = self.texts.index(text), len(self.texts) - 1
            if row != last:
                self._cache.move(last, row)
                self.texts[row] = self.texts[last]
            self.texts.pop()

    def _read(self, row: int, tokens: Sequence[int]) -> None:
        """Put all tokens but the last into a row of the cache: that one goes with the next turn."""
        self._cache.lengths[row] = 0
        if len(tokens) > 1:
            self.model.extend(torch.tensor([tokens[:-1]], device=self._device), self._cache, row)


def write(model: GPT, text: Text) -> Iterator[str]:
    """Write one text to its end, and yield what it says, bit by bit. The model must be in evaluation mode."""
    writer = Writer(model, 1)
    writer.begin(text)
    while writer.texts:
        yield from (said for _, said in writer.turn() if said)
