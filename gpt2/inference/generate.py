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

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders put it in place of invalid UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled, and when a text ends. Raises ConfigError."""

    max_tokens: int = 100
    temperature: float = 1.0  # 0: take the most probable token
    top_k: int = 0  # sample from the k most probable tokens; 0: from all
    top_p: float = 1.0  # sample from the most probable tokens whose probabilities add up to this
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end the text; they are removed from it

    def __post_init__(self) -> None:
        valid = self.max_tokens >= 1 and self.top_k >= 0 and 0 <= self.seed < 2**63 and all(self.stop)
        if not (valid and 0 <= self.temperature <= 100 and 0 < self.top_p <= 1):
            ranges = (
                "max_tokens: at least 1; temperature: 0 to 100; top_k: at least 0; top_p: 0 to 1; seed: 0 to 2^63 - 1"
            )
            raise ConfigError(f"{self} is impossible", why=f"{ranges}; stop: texts that are not empty")


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
        self.text = ""  # without what may still change: an incomplete character, the beginning of a stop string
        # "length" (max_tokens), "stop" (stop string or end of document), None: unfinished
        self.finish: str | None = None

    def add(self, token: int) -> str:
        """Add a token and return the new text, which may be empty. Text that was returned is never taken back."""
        self.tokens.append(token)
        ended = token == self.tokenizer.end_of_document
        self.finish = "stop" if ended else "length" if len(self.tokens) == self.sampling.max_tokens else None
        text = self.tokenizer.decode(self.tokens[:-1] if ended else self.tokens)
        if stops := [position for stop in self.sampling.stop if (position := text.find(stop)) >= 0]:
            text, self.finish = text[: min(stops)], "stop"
        if not self.finish:
            text = text.rstrip(REPLACEMENT)
            text = text[: max(0, len(text) + 1 - max(map(len, self.sampling.stop), default=1))]
        new, self.text = text[len(self.text) :], text
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
        new = [sample_token(logits[0].cpu(), text.sampling, generator)]
        yield text.add(new[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpt2.inference.generate", description="Generate a text with a checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    numbers = {"tokens": 200, "temperature": 0.8, "top-k": 200, "top-p": 1.0, "seed": 1337}
    for name, default in {"prompt": "", **numbers, "device": ""}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args(argv)
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
    sampling = Sampling(max_tokens=args.tokens, **options)
    restored = restore(args.checkpoint, args.device)
    # Two streams, so that `> file` has nothing but the text.
    print(f"{args.checkpoint}: {restored.description}", file=sys.stderr, flush=True)
    text = GeneratedText(restored.tokenizer.encode(args.prompt).tolist(), sampling, restored.tokenizer)
    start = time.perf_counter()
    print(args.prompt, end="", flush=True)
    for new in generate(restored.model, text):
        print(new, end="", flush=True)
    print(flush=True)
    speed = f"{len(text.tokens) / (time.perf_counter() - start):.0f} tokens/s"
    print(f"{len(text.tokens)} tokens, {speed}, seed {sampling.seed}, finish: {text.finish}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
