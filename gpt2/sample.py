"""Texts to look at: of fixed prompts at intervals while a run trains, and of a checkpoint by `make sample`.

python -m gpt2.sample CHECKPOINT --prompt "Once upon a time"
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.config import TrainConfig
from gpt2.generate import Sampling, Text, Writer, write
from gpt2.model import GPT
from gpt2.tokenizer import load
from kmatrix.errors import KmatrixError

BETWEEN_PROMPTS = "|"


class Samples:
    """Texts of the same prompts with the same seeds each time: what differs is what the model has learnt."""

    def __init__(self, config: TrainConfig) -> None:
        """Raise DataError where the tokenizer's vocabulary is not at hand or lacks a letter of a prompt."""
        self.config = config
        self.prompts = [prompt for prompt in (config.sample_prompt or "").split(BETWEEN_PROMPTS) if prompt] or [""]
        self.tokenizer = load(config.tokenizer, Path(config.data_path))
        self._encoded = [self.tokenizer.encode(prompt).tolist() for prompt in self.prompts]

    def texts(self, model: GPT) -> list[dict[str, Any]]:
        """Return prompt, text, seed and number of tokens of each; the model is left in training mode.

        Nothing is drawn from the generators that training uses.
        """
        texts = [
            Text(
                tokens,
                Sampling(
                    max_tokens=self.config.sample_tokens or 1,
                    temperature=self.config.sample_temperature or 0.0,
                    seed=self.config.seed + number,
                ),
                self.tokenizer,
            )
            for number, tokens in enumerate(self._encoded)
        ]
        model.eval()
        try:
            writer = Writer(model, len(texts))
            for text in texts:
                writer.begin(text)
            while writer.texts:
                writer.turn()
        finally:
            model.train()
        return [
            {"prompt": prompt, "text": text.text, "seed": text.sampling.seed, "tokens": len(text.tokens)}
            for prompt, text in zip(self.prompts, texts, strict=True)
        ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpt2.sample", description="Write a text with a checkpoint's model.")
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
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    return 0


def print_text(path: Path, prompt: str, sampling: Sampling, device: str) -> None:
    """Write the prompt and the text to stdout as it comes; what was used, and how fast, to stderr."""
    from gpt2.restore import restore

    restored = restore(path, device)
    place = next(restored.model.parameters()).device.type
    print(f"{restored.path}: {restored.name}, step {restored.step}, on {place}", file=sys.stderr, flush=True)
    text = Text(restored.tokenizer.encode(prompt).tolist(), sampling, restored.tokenizer)
    print(prompt, end="", flush=True)
    start = time.perf_counter()
    for said in write(restored.model, text):
        print(said, end="", flush=True)
    seconds = time.perf_counter() - start
    print(flush=True)
    speed = f"{len(text.tokens) / seconds:.0f} tokens/s" if seconds else ""
    print(f"{len(text.tokens)} tokens, {speed}, seed {sampling.seed}, ended by {text.finish}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
