"""Train whole runs and compare the time of their steps: this checkout, options, former commits, and nanoGPT.

    python bench/step.py --peer ../nanoGPT                        # on the CPU: a small model, fp32 and bf16
    python bench/step.py --against ../former                      # the trainer of another checkout in the same run
    python bench/step.py MODEL=124m BATCH_SIZE=32 DEVICE=cuda COMPILE=y --peer ../nanoGPT
    python bench/step.py --option "RECOMPUTE=y" --option "NUM_GPUS=2 ZERO_STAGE=1"

NAME=VALUE: settings of all runs. --option: a further row with these settings. Each run is made from a configuration and
trained by torchrun; times are those that its metrics.jsonl has, without the first ones. nanoGPT trains the
same model on the same tokens with its own train.py, once with its default `bias=False` and once with biases. Rounds
alternate, so that a drift of the machine's speed affects all; the table has medians over rounds.

ms/step: median after --warm-up. speed: relative to another row. MiB: peak of tensors on a GPU, else of the largest
process. states: of the optimizer, on rank 0. first: from the start of the program to the end of the first step. loss:
of the last step. W, MHz, capped: mean power and clock of the GPU, and the share of samples at its power limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from common import POWER, ROOT, Cost, Figures, Sensors, environment, figures_table, in_turn, machine, options, run

SMALL = {"MODEL": "custom", "N_LAYER": "4", "N_HEAD": "4", "N_EMBD": "128", "BLOCK_SIZE": "128", "BATCH_SIZE": "12"}
LARGE = {"MODEL": "124m", "BLOCK_SIZE": "1024", "BATCH_SIZE": "32", "COMPILE": "y", "VOCAB_MULTIPLE": "64"}
COMMON = {
    **{"OPTIMIZER": "adamw", "LEARNING_RATE": "1e-3", "WARMUP_STEPS": "10", "NUM_GPUS": "1"},
    **{"EVAL_INTERVAL": "1000000", "EVAL_SAMPLES": "8", "LOG_INTERVAL": "1", "SAVE_CHECKPOINT": "n"},
    **{"DATASET": "shards", "GPU_MONITOR": "n", "REUSE": "n", "PREFLIGHT": "n", "ALLOW_RISK": "y"},
}
# Run with the code of a checkout, by the functions of docs/from-python.md.
MAKE = """
import json, sys
from kmatrix.experiment.make import make_matrix
from kmatrix.experiment.plan import plan_matrix
matrix = make_matrix(plan_matrix(sys.argv[1], **json.loads(sys.argv[2])), reuse=False)
run = matrix.runs()[0]
if not run.run_json.exists():
    from kmatrix.records.matrix import make_files

    make_files(matrix.path, run.name)
print(run.path)
"""
# nanoGPT's train.py, with the time before each line that it prints.
STAMPED = """
import builtins, runpy, sys, time
say = builtins.print
builtins.print = lambda *words, **more: say(f"{time.time():.6f}", *words, **{**more, "flush": True})
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""
VOCAB = {"gpt2": 50257, "byte": 257}
TOKENS = 2_000_000


FORMS = {
    **{"ms/step": ".2f", "tokens/s": ",.0f", "speed": "", "MFU": ".1%", "MiB": ".0f", "states MiB": ".1f"},
    **{"first s": ".1f", "loss": ".4f", **POWER},
}
Way = tuple[str, Callable[[int], Figures]]  # name of the row that it is compared with, and what trains it in a round


def main() -> None:
    args = options(
        *(__doc__, "settings"),
        **{"option": [], "against": [], "peer": Path, "rounds": 3, "steps": 60, "warm_up": 10},
        threads=os.cpu_count() or 1,
    )
    if args.steps <= args.warm_up + 1:
        sys.exit("--steps must be above --warm-up by at least 2")
    if args.peer and not (args.peer / "train.py").is_file():
        sys.exit(f"{args.peer} has no train.py: --peer takes a checkout of nanoGPT")
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Sensors() as sensors:
        print(machine(sensors), flush=True)
        rows = ways(args, Path(name))
        found = in_turn({name: train for name, (_, train) in rows.items()}, args.rounds, sensors)
    for name, (base, _) in rows.items():
        found[name]["speed"] = f"{found[base]['ms/step'] / found[name]['ms/step']:.3f} x {base}"
    print("\n" + figures_table("run", FORMS, found))


def ways(args: argparse.Namespace, folder: Path) -> dict[str, Way]:
    """Return the rows of the table in their order."""
    usual = settings_of(args.settings, folder, args.threads)
    gpu = usual["DEVICE"] == "cuda"
    found: dict[str, Way] = {}

    def add(name: str, base: str, checkout: Path, **more: str) -> None:
        found[name] = base, partial(train, checkout, usual | more, folder / str(len(found)), args)

    for bias in ("n", "y") if args.peer else (usual.get("BIAS", "y"),):
        suffix = f", BIAS={bias}" if args.peer else ""
        peer = f"nanoGPT {'bf16' if gpu else 'fp32'}{suffix}"
        if args.peer:
            copy = copy_of_peer(args.peer, folder / f"peer-{bias}", Path(usual["DATA_PATH"]))
            found[peer] = peer, partial(train_peer, copy, usual | {"BIAS": bias}, args)
        for dtype in ("bf16",) if gpu else ("fp32", "bf16"):
            same = {"DTYPE": dtype, "BIAS": bias}
            former = {f"{Path(one).resolve().name} {dtype}{suffix}": Path(one).resolve() for one in args.against}
            for name, checkout in former.items():
                add(name, peer if args.peer else name, checkout, **same)
            plain = f"kmatrix {dtype}{suffix}"
            add(plain, [*former, peer if args.peer else plain][0], ROOT, **same)
            for option in args.option:
                add(f"{plain} {option}", plain, ROOT, **same | pairs(shlex.split(option)))
    return found


def pairs(words: Sequence[str]) -> dict[str, str]:
    """Return settings from NAME=VALUE."""
    return dict(word.split("=", 1) for word in words)


def settings_of(words: Sequence[str], folder: Path, threads: int, **defaults: str) -> dict[str, str]:
    """Return all settings of a run: those that were asked for, defaults for the device, and tokens in a folder."""
    settings = defaults | pairs(words)
    gpu = settings.get("DEVICE") == "cuda"
    usual = LARGE if gpu else SMALL
    usual = {"DEVICE": "cpu", **(usual if "MODEL" not in settings or gpu else {})}
    tokenizer = settings.get("TOKENIZER", "gpt2" if gpu else "byte")
    tokens = write_tokens(folder / "tokens", VOCAB[tokenizer])
    places = {"DATA_PATH": str(tokens), "DATA_DIR": str(folder / "data"), "RESULTS_DIR": str(folder / "results")}
    return COMMON | {"CPU_THREADS": str(threads), "TOKENIZER": tokenizer} | places | usual | settings


def write_tokens(folder: Path, vocab: int) -> Path:
    """Write shards of artificial text in llm.c's format, with the frequencies of Zipf's law.

    Every second token follows from the one before: there is something to learn.
    """
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    drawn = generator.zipf(1.2, TOKENS) % vocab
    drawn[1::2] = generator.permutation(vocab)[drawn[::2]]
    for kind, tokens in (("train", drawn), ("val", drawn[: TOKENS // 20])):
        head = np.zeros(256, dtype="<i4")
        head[:3] = 20240520, 1, len(tokens)
        (folder / f"text_{kind}_000000.bin").write_bytes(head.tobytes() + tokens.astype("<u2").tobytes())
    return folder


def make(checkout: Path, symbols: Mapping[str, str]) -> Path:
    """Make a run from a configuration with the code of a checkout, and return its directory."""
    empty = Path(symbols["DATA_PATH"]).with_name("defconfig")  # all settings are in `symbols`
    empty.touch()
    done = run([sys.executable, "-c", MAKE, empty, json.dumps(symbols)], checkout, environment(checkout))
    return Path(done.output.strip().splitlines()[-1])


def start(checkout: Path, run_dir: Path, *arguments: str, device: str, threads: int, ranks: int = 1) -> Cost:
    """Train a run to its end, as the local engine starts it, and return its cost."""
    variables = environment(checkout, OMP_NUM_THREADS=str(threads))
    if device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run([*torchrun, "-m", "gpt2.train", str(run_dir), *arguments], checkout, variables)


def logged(run_dir: Path) -> list[dict[str, float]]:
    """Return the lines of training steps in metrics.jsonl."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if "throughput/step_ms" in line]


def train(checkout: Path, symbols: Mapping[str, str], folder: Path, args: argparse.Namespace, _: int) -> Figures:
    """Train a run of a checkout."""
    symbols = {**symbols, "MAX_ITERS": str(args.steps), "RESULTS_DIR": str(folder)}
    ranks = int(symbols["NUM_GPUS"])
    run_dir = make(checkout, symbols)
    begin = time.time()
    cost = start(checkout, run_dir, device=symbols["DEVICE"], threads=args.threads, ranks=ranks)
    lines, result = logged(run_dir), json.loads((run_dir / "result.json").read_text("utf-8"))
    shutil.rmtree(folder)
    settled = lines[args.warm_up :]
    ms = statistics.median(line["throughput/step_ms"] for line in settled)
    shares = [share for line in settled if (share := line.get("throughput/mfu"))]
    return {
        "ms/step": ms,
        "tokens/s": 1e3 * result["tokens"] / result["step"] / ms,
        "MFU": statistics.median(shares) if shares else None,
        "MiB": result["peak_memory_mib"] if symbols["DEVICE"] == "cuda" else cost.memory,
        "states MiB": result["optimizer_state_mib"],
        "first s": lines[0]["time"] - begin,
        "loss": lines[-1]["train/loss"],
    }


def copy_of_peer(checkout: Path, folder: Path, tokens: Path) -> Path:
    """Return a copy of nanoGPT that has our tokens as the dataset "tokens"."""
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git", "*.bin"))
    target = folder / "data" / "tokens"
    target.mkdir(parents=True)
    for kind in ("train", "val"):
        (target / f"{kind}.bin").write_bytes((tokens / f"text_{kind}_000000.bin").read_bytes()[1024:])
    return folder


def train_peer(folder: Path, symbols: Mapping[str, str], args: argparse.Namespace, _: int) -> Figures:
    """Train with nanoGPT's own train.py. Its log of a step waits for the GPU, so there it logs each tenth one.

    A step takes the time between two lines of the log, divided by the steps between them.
    """
    from kmatrix.shapes import NAMED, padded

    gpu = symbols["DEVICE"] == "cuda"
    every = 10 if gpu else 1
    sizes = NAMED.get(symbols["MODEL"]) or tuple(int(symbols[name]) for name in ("N_LAYER", "N_HEAD", "N_EMBD"))
    vocab = padded(VOCAB[symbols["TOKENIZER"]], int(symbols.get("VOCAB_MULTIPLE", 1)))
    (folder / "data" / "tokens" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab}))
    accumulation = int(symbols.get("GRADIENT_ACCUMULATION", 1))
    values = {
        **dict(zip(("n_layer", "n_head", "n_embd"), sizes, strict=True)),
        **{"block_size": symbols["BLOCK_SIZE"], "batch_size": symbols["BATCH_SIZE"], "dropout": 0.0},
        **{"gradient_accumulation_steps": accumulation, "bias": symbols["BIAS"] == "y", "out_dir": "out"},
        **{"device": symbols["DEVICE"], "dtype": "bfloat16" if gpu else "float32", "dataset": "tokens"},
        **{"compile": symbols.get("COMPILE") == "y", "min_lr": 1e-4, "warmup_iters": 10},
        **{"max_iters": args.steps, "lr_decay_iters": args.steps},
        **{"learning_rate": symbols["LEARNING_RATE"], "grad_clip": 1.0, "log_interval": every},
        **{"eval_interval": 1_000_000, "eval_iters": 1},
    }
    flags = [f"--{name}={value}" for name, value in values.items()]
    variables = environment(OMP_NUM_THREADS=str(args.threads))
    variables |= {} if gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
    begin = time.time()
    cost = run([sys.executable, "-c", STAMPED, *flags], folder, variables)
    lines = re.findall(r"^([\d.]+) iter \d+: loss ([\d.]+)", cost.output, re.MULTILINE)
    at = [float(second) for second, _ in lines]
    between = [later - earlier for earlier, later in itertools.pairwise(at)][args.warm_up // every :]
    ms = 1e3 * statistics.median(between) / every
    return {
        "ms/step": ms,
        "tokens/s": 1e3 * accumulation * int(symbols["BATCH_SIZE"]) * int(symbols["BLOCK_SIZE"]) / ms,
        "MiB": None if gpu else cost.memory,
        "first s": at[0] - begin,
        "loss": float(lines[-1][1]),
    }


if __name__ == "__main__":
    main()
