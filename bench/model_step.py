"""Measure training steps of the model in several variants, interleaved, and of nanoGPT if a checkout is given.

    python bench/model_step.py --peer ../nanoGPT

A step is forward, backward, clipping to norm 1 and the AdamW update. The variants run in turn, a few steps each, so
that a drift of the machine's speed affects all of them. The table shows the median over all timed steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # only kmatrix is installed, gpt2 is not

from gpt2.model.gpt2 import GPT
from gpt2.model.precision import autocast, configure_precision
from kmatrix.shapes import ModelShape

Forward = Callable[[Tensor, Tensor], Tensor]
SETTLE_STEPS = 2  # after a change of variant, not timed


@dataclass(kw_only=True)
class Variant:
    """One variant of a training step. seconds: of each timed step.  losses: of every step."""

    name: str
    prepare: Callable[[], object]
    forward: Forward
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, idx: Tensor, targets: Tensor, *, timed: bool) -> None:
        _synchronize(self.device)
        start = time.perf_counter()
        loss = self.forward(idx, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        _synchronize(self.device)
        if timed:
            self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def ours(name: str, shape: ModelShape, device: str, dtype: str, *, plain: bool = False) -> Variant:
    """Return the trainer's step. plain: highest matmul precision, and no fused update."""
    model = GPT(shape).to(device)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=not plain)

    def forward(idx: Tensor, targets: Tensor) -> Tensor:
        with autocast(device, dtype):
            loss = model(idx, targets)[1]
        assert loss is not None
        return loss

    def prepare() -> object:
        if plain:
            return torch.set_float32_matmul_precision("highest")
        return configure_precision(device, dtype, tf32=True)

    return Variant(name=name, prepare=prepare, forward=forward, model=model, optimizer=optimizer, device=device)


def peer(path: Path, shape: ModelShape, device: str) -> Variant:
    """Return nanoGPT's step in 32 bits: its model and optimizer, as its train.py uses them on this device."""
    module = _load(path / "model.py")
    names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
    torch.manual_seed(1337)
    model = module.GPT(module.GPTConfig(**{name: getattr(shape, name) for name in names}, dropout=0.0)).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device)

    def forward(idx: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(idx, targets)[1]
        return loss

    def prepare() -> None:
        torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")

    return Variant(
        name="nanoGPT, fp32", prepare=prepare, forward=forward, model=model, optimizer=optimizer, device=device
    )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_model", path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(f"{path} not found: --peer takes the folder of a nanoGPT checkout")
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_model"] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    return module


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(variants: Sequence[Variant], args: argparse.Namespace) -> None:
    """Time the variants in turn, on the same batches."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.rounds):
        draws = torch.randint(args.vocab, (SETTLE_STEPS + args.steps, args.batch, args.block + 1), generator=generator)
        draws = draws.to(args.device)
        for variant in variants:
            variant.prepare()
            for number, draw in enumerate(draws):
                variant.step(draw[:, :-1], draw[:, 1:].contiguous(), timed=number >= SETTLE_STEPS)


def table(variants: Sequence[Variant], tokens: int) -> str:
    """Return one line per variant. `x`: its speed relative to the first one."""
    first = statistics.median(variants[0].seconds)
    lines = [f"{'variant':34} {'ms/step':>9} {'fastest 10 %':>13} {'tok/s':>9} {'x':>6} {'last loss':>10}"]
    for variant in variants:
        median = statistics.median(variant.seconds)
        p10 = sorted(variant.seconds)[len(variant.seconds) // 10]
        lines.append(
            f"{variant.name:34} {median * 1e3:9.1f} {p10 * 1e3:13.1f} {tokens / median:9.0f} "
            f"{first / median:6.2f} {variant.losses[-1]:10.4f}"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 4, "heads": 4, "width": 128, "block": 128, "batch": 12, "vocab": 97, "rounds": 12, "steps": 10}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's own choice")
    parser.add_argument("--peer", type=Path, help="folder of a nanoGPT checkout")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    shape = ModelShape(
        n_layer=args.layers, n_head=args.heads, n_embd=args.width, block_size=args.block, vocab_size=args.vocab
    )
    variants = [peer(args.peer, shape, args.device)] if args.peer else []
    variants += [
        ours("fp32, plain", shape, args.device, "fp32", plain=True),
        ours("fp32, as the trainer", shape, args.device, "fp32"),
        ours("bf16, as the trainer", shape, args.device, "bf16"),
    ]
    measure(variants, args)
    tokens = args.batch * args.block
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {args.device}, {threads} CPU threads, {tokens} tokens/step, {shape}")
    print(table(variants, tokens))


if __name__ == "__main__":
    main()
