"""Generate a text with the model of a checkpoint (make sample)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpt2.generate import GeneratedText, Sampling, generate
from gpt2.inference.restore import restore
from kmatrix.errors import KmatrixError
from kmatrix.output import run_program


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
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    return 0


def print_text(path: Path, prompt: str, sampling: Sampling, device: str) -> None:
    """Print the prompt and the text to stdout as it is generated, and the model, speed and seed to stderr."""
    # Two streams, so that `> file` has nothing but the text.
    restored = restore(path, device)
    kind = next(restored.model.parameters()).device.type
    print(f"{restored.path}: {restored.name}, step {restored.step}, on {kind}", file=sys.stderr, flush=True)
    text = GeneratedText(restored.tokenizer.encode(prompt).tolist(), sampling, restored.tokenizer)
    print(prompt, end="", flush=True)
    start = time.perf_counter()
    for new in generate(restored.model, text):
        print(new, end="", flush=True)
    seconds = time.perf_counter() - start
    print(flush=True)
    speed = f", {len(text.tokens) / seconds:.0f} tokens/s" if seconds else ""
    print(f"{len(text.tokens)} tokens{speed}, seed {sampling.seed}, finish: {text.finish}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_program(main))
