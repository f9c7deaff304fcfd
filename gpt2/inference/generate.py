"""Generate a text with the model of a checkpoint (make sample), with a key-value cache."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt2.data.tokenizer import Tokenizer
from gpt2.inference.restore import restore
from gpt2.model.base import LanguageModel
from gpt2.model.cache import Cache
from kmatrix.errors import ConfigError
from kmatrix.output import run_program

MAX_TOKENS_PER_CHARACTER = 4  # UTF-8 has at most 4 bytes per character: a longer incomplete end is invalid
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders put it in place of invalid UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled, and when a text ends."""

    max_tokens: int = 100
    temperature: float = 1.0  # 0: take the most probable token
    top_k: int = 0  # sample from the k most probable tokens; 0: from all
    top_p: float = 1.0  # sample from the most probable tokens whose probabilities add up to this
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end the text; they are removed from it

    def __post_init__(self) -> None:
        for name, valid, why in (
            ("max_tokens", self.max_tokens >= 1, "expected an integer of at least 1"),
            ("temperature", 0 <= self.temperature <= 100, "expected a number from 0 to 100"),
            ("top_k", self.top_k >= 0, "expected an integer of at least 0 (0: all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "expected a number above 0 and at most 1"),
            ("seed", 0 <= self.seed < 2**63, "expected an integer from 0 to 2^63 - 1"),
            ("stop", all(self.stop), "stop strings must not be empty"),
        ):
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", why=why)


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
        self.tokens: list[int] = []  # sampled so far
        self.text = ""  # decoded so far, without what may still become part of a stop string
        # "length" (max_tokens), "stop" (stop string or end of document), None: unfinished
        self.finish: str | None = None
        self._undecoded: list[int] = []  # an incomplete character
        self._held_back = ""  # the newest text, as long as a stop string may begin in it

    def add(self, token: int) -> str:
        """Add a token and return the new text, which may be empty."""
        self.tokens.append(token)
        if token == self.tokenizer.end_of_document:
            self.finish = "stop"
        else:
            self._undecoded.append(token)
            self.finish = "length" if len(self.tokens) == self.sampling.max_tokens else None
        new = self.tokenizer.decode(self._undecoded)  # not all tokens again, which would take quadratic time
        if new.endswith(REPLACEMENT) and not self.finish and len(self._undecoded) < MAX_TOKENS_PER_CHARACTER:
            return ""
        self._undecoded = []
        new = self._held_back + new
        if stops := [position for stop in self.sampling.stop if (position := new.find(stop)) >= 0]:
            new, self.finish = new[: min(stops)], "stop"
        # Text that was sent cannot be taken back.
        keep = 0 if self.finish else max((len(stop) - 1 for stop in self.sampling.stop), default=0)
        sent = max(0, len(new) - keep)
        new, self._held_back = new[:sent], new[sent:]
        self.text += new
        return new


def generate(model: LanguageModel, text: GeneratedText) -> Iterator[str]:
    """Generate a text and yield its parts, which may be empty: one per token. The model is in evaluation mode.

    If the text outgrows the model's context, generation continues from its last half, as if it began there.
    """
    parameter, context = next(model.parameters()), model.shape.block_size
    generator = torch.Generator().manual_seed(text.sampling.seed)
    cache = Cache(model.shape, device=parameter.device, dtype=parameter.dtype)
    new = text.prompt[-context:]
    while text.finish is None:
        if cache.length == context:
            # Positions are absolute in GPT-2, so the cache cannot be shifted. Half, so that it is rare.
            cache.length, new = 0, (text.prompt + text.tokens)[-max(1, context // 2) :]
        # The newest token alone: the same products, and so the same text, after any prompt.
        for part in (new[:-1], new[-1:]):
            if part:
                logits = model.extend(torch.tensor([part], device=parameter.device), cache)  # (1, V)
        # Sampled on the CPU: the generator is there, and the same seed gives the same text on every device.
        token = sample_token(logits[0].cpu(), text.sampling, generator)
        new = [token]
        yield text.add(token)


def print_text(path: Path, prompt: str, sampling: Sampling, device: str) -> None:
    """Print the prompt and the text to stdout as it is generated, and the model, speed and seed to stderr."""
    # Two streams, so that `> file` has nothing but the text.
    restored = restore(path, device)
    print(f"{path}: {restored.description}", file=sys.stderr, flush=True)
    text = GeneratedText(restored.tokenizer.encode(prompt).tolist(), sampling, restored.tokenizer)
    print(prompt, end="", flush=True)
    start = time.perf_counter()
    for new in generate(restored.model, text):
        print(new, end="", flush=True)
    speed = len(text.tokens) / (time.perf_counter() - start)
    print(flush=True)
    print(
        f"{len(text.tokens)} tokens, {speed:.0f} tokens/s, seed {sampling.seed}, finish: {text.finish}", file=sys.stderr
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpt2.inference.generate", description="Generate a text with a checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=200)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="")
    args = parser.parse_args(argv)
    try:
        sampling = Sampling(
            max_tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
        )
        print_text(args.checkpoint, args.prompt, sampling, args.device)
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
