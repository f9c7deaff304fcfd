"""The parts of `make bench PART=` that train, and their runs."""

from __future__ import annotations

import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import gpu_kernels
import gpu_runs
from gpu_results import LEAST_S, Item, Results, Values
from gpu_runs import Setting

from gpt2.data import shards
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import ModelShape, mfu, peak_tflops

BEST = {"124m": 64, "350m": 32, "774m": 16, "1558m": 8}  # micro-batches, in sequences
USUAL = {"124m": 32, "774m": 16}
NANOCHAT = {"d12": ("12", "32"), "d20": ("20", "16")}  # depth and micro-batch; 16 is that of the defconfig of d20
PEER_BATCH = {"124m": 32, "774m": 8}
ROUNDS = 2
EVAL_INTERVAL = 250  # steps, the default
ATTENTION = ("cudnn", "flash", "flash3")  # kernels that the ladder compares
SHORT = 26  # steps of a run with several micro-batches per step
SLOW_S = 240.0  # of autotuning: it starts only with so much time left


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run of a part."""

    name: str
    setting: Setting
    least_s: float = LEAST_S
    fits: bool = field(default=False)  # halve the micro-batch until it fits


def symbols_of(model: str, batch: int, **symbols: str) -> dict[str, str]:
    return {"MODEL": model, "BATCH_SIZE": str(batch), **symbols}


def nanochat(name: str) -> dict[str, str]:
    """Return the symbols of a model of nanochat, with the vocabulary of GPT-2."""
    depth, batch = NANOCHAT[name]
    sizes = {"ARCH": "nanochat2025", "MODEL": "depth", "DEPTH": depth, "BLOCK_SIZE": "2048", "BATCH_SIZE": batch}
    return {**sizes, "OPTIMIZER": "muon-nanochat2025"}


# -- speed


def speed_cases() -> list[Case]:
    """Return the runs of the part `speed`."""
    found = [
        Case(name=model, setting=Setting(symbols=symbols_of(model, batch)), fits=True) for model, batch in BEST.items()
    ]
    found[1:1] = [  # the goals in bf16 and FP8 are of these
        case for model in USUAL for case in (_stream(model, fp8=False), _stream(model, fp8=True))
    ]
    return found + [
        Case(name=f"nanochat {name}", setting=Setting(symbols=nanochat(name)), fits=True) for name in NANOCHAT
    ]


def _stream(model: str, *, fp8: bool) -> Case:
    """Return the fastest numbers that the project has: bfloat16 stream, CUDA graphs, 4 micro-batches, and FP8."""
    batch = BEST[model]
    more = {"BF16_STREAM": "y", "COMPILE_MODE": "reduce_overhead", "GRADIENT_ACCUMULATION": "4"}
    return Case(
        name=f"{model} bf16 stream, graphs, x4" + (", FP8" if fp8 else ""),
        setting=Setting(symbols=symbols_of(model, batch, **more, **({"FP8": "y"} if fp8 else {})), steps=SHORT),
        fits=True,
    )


def speed(results: Results) -> Iterator[Item]:
    """Yield the runs of the models, the chains of their products, the input pipeline, evaluation and checkpoints."""
    scale = results.scale
    usual = Setting(symbols=symbols_of("124m", USUAL["124m"]))
    cases = speed_cases()
    yield from of_cases(cases[:1], results)
    yield Item(name="input pipeline, 124m", measure=lambda: gpu_runs.loader(usual, results))
    between = {"EVAL_INTERVAL": "20", "EVAL_SAMPLES": "200", "CHECKPOINT_INTERVAL": "20", "SAVE_CHECKPOINT": "y"}
    if scale.tiny:
        between |= {"EVAL_INTERVAL": "2", "EVAL_SAMPLES": "2", "CHECKPOINT_INTERVAL": "2"}
    saving = replace(usual, symbols={**usual.symbols, **between})
    yield Item(
        name="evaluation and checkpoints, 124m", measure=lambda: gpu_runs.train(saving, results), least_s=LEAST_S
    )
    yield from of_cases(cases[1:], results)
    for name, batch in BEST.items():
        shape, size = gpu_kernels.shape_of(scale) if scale.tiny else (gpu_kernels.named(name), batch)
        products = products_of(shape, size * shape.block_size)
        yield Item(name=f"products of {name}", measure=lambda p=products: gpu_kernels.chain(p, scale))
    for name, (depth, batch) in NANOCHAT.items():
        rows, layers = (64, 2) if scale.tiny else (int(batch) * 2048, int(depth))
        # as many heads of keys as of queries
        products = products_of(
            ModelShape(n_layer=layers, n_head=1, n_embd=64 * layers, block_size=rows, vocab_size=50257), rows
        )
        yield Item(name=f"products of nanochat {name}", measure=lambda p=products: gpu_kernels.chain(p, scale))


def products_of(shape: ModelShape, rows: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return the products of a micro-batch of `rows` tokens: rows, columns, inner dimension and how often."""
    return tuple(
        (*gpu_kernels.mnk(way, (rows, outputs, inputs)), 1 if layer == "head" else shape.n_layer)
        for layer, (outputs, inputs) in gpu_kernels.layers_of(shape).items()
        for way in gpu_kernels.WAYS
    )


def of_cases(cases: list[Case], results: Results) -> Iterator[Item]:
    """Yield the measurements of runs."""
    for case in cases:
        train = gpu_runs.fitting if case.fits else gpu_runs.train
        yield Item(name=case.name, measure=lambda c=case, t=train: t(c.setting, results), least_s=case.least_s)


# -- ladder


def ladder_cases() -> list[Case]:
    """Return the runs of the part `ladder`: the model as it is, and each change alone."""
    found = []
    for model, batch in USUAL.items():
        others = (batch // 2, batch * 2)
        graphs = {"COMPILE_MODE": "reduce_overhead"}
        together = {"BF16_STREAM": "y", **graphs, "GRADIENT_ACCUMULATION": "4"}
        rows: list[tuple[str, dict[str, str], int, int]] = [
            ("as it is", {}, batch, 50),
            ("BF16_STREAM", {"BF16_STREAM": "y"}, batch, 50),
            ("FP8", {"FP8": "y"}, batch, 50),
            ("LOSS_CHUNK=8192", {"LOSS_CHUNK": "8192"}, batch, 50),
            *((f"micro-batch {other}", {}, other, 50) for other in others),
            ("4 micro-batches per step", {"GRADIENT_ACCUMULATION": "4"}, batch, SHORT),
            ("CUDA graphs", graphs, batch, 50),
            *((f"ATTENTION_KERNEL={kernel}", {"ATTENTION_KERNEL": kernel}, batch, 50) for kernel in ATTENTION),
            ("DETERMINISTIC", {"DETERMINISTIC": "y"}, batch, 50),
            ("RECOMPUTE=elementwise", {"RECOMPUTE": "y", "RECOMPUTE_SCOPE": "elementwise"}, batch, 50),
            ("RECOMPUTE=blocks", {"RECOMPUTE": "y", "RECOMPUTE_SCOPE": "blocks"}, batch, 50),
            ("stream, graphs, x4", together, batch, SHORT),
            ("stream, graphs, x4, FP8", {**together, "FP8": "y"}, batch, SHORT),
            ("max_autotune", {"COMPILE_MODE": "max_autotune"}, batch, 50),
        ]
        for label, symbols, size, steps in rows:
            setting = Setting(symbols=symbols_of(model, size, **symbols), steps=steps)
            least_s = SLOW_S if label == "max_autotune" else LEAST_S
            found.append(Case(name=f"{model} {label}", setting=setting, least_s=least_s))
    return found


def ladder(results: Results) -> Iterator[Item]:
    """Yield the runs with each change on and off."""
    cases = ladder_cases()
    # The check on the CPU replaces the sizes: the second model would repeat the first.
    return of_cases([case for case in cases if case.name.startswith("124m")] if results.scale.tiny else cases, results)


# -- peer


def peer_names(model: str, turn: int) -> tuple[str, str, str]:
    """Return the names of the three runs of a round: nanoGPT, kmatrix with its numbers, and with a bfloat16 stream."""
    return tuple(f"{model} round {turn} {who}" for who in ("nanoGPT", "kmatrix", "kmatrix, bf16 stream, graphs"))  # type: ignore[return-value]


def peer(results: Results, checkout: Path) -> Iterator[Item]:
    """Yield runs of nanoGPT and of kmatrix in turn, so that a drift of the clocks affects both."""
    for model, batch in PEER_BATCH.items():
        same = Setting(symbols=symbols_of(model, batch))
        fast = {"BF16_STREAM": "y", "COMPILE_MODE": "reduce_overhead"}
        ours = Setting(symbols=symbols_of(model, batch, **fast))
        for turn in range(1, 1 + (1 if results.scale.tiny else ROUNDS)):
            theirs, plain, graphed = peer_names(model, turn)
            yield Item(
                name=theirs, measure=lambda m=model, b=batch: train_peer(checkout, m, b, results), least_s=LEAST_S
            )
            yield Item(name=plain, measure=lambda s=same: gpu_runs.train(s, results), least_s=LEAST_S)
            yield Item(name=graphed, measure=lambda s=ours: gpu_runs.train(s, results), least_s=LEAST_S)


def train_peer(checkout: Path, model: str, batch: int, results: Results) -> Values:
    """Train with nanoGPT's own train.py, and return its speed.

    It reads the loss of each step that it logs, which waits for the GPU. So it logs each tenth step only, and the time
    between the arrival of two lines counts: that of ten steps.
    """
    scale = results.scale
    every, settle = (1, 2) if scale.tiny else (10, 2)  # steps per line, and lines that are not timed
    steps = 6 if scale.tiny else 81
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name) / "peer"
        shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git", "*.bin"))
        target = folder / "data" / "tokens"
        target.mkdir(parents=True)
        config = gpu_runs.config_of(
            Setting(symbols=symbols_of(model, batch)), scale, gpu_runs.tokens_of(results.path.parent / "random-tokens")
        )
        for kind in shards.KINDS:
            found = sorted(Path(config.data_path).glob(f"*_{kind}_*.bin"))
            (target / f"{kind}.bin").write_bytes(b"".join(shards.open_shard(path).tobytes() for path in found))
        options = peer_options(config, steps, every) | {"dataset": target.name, "compile": not scale.tiny}
        flags = [f"--{key}={value}" for key, value in options.items()]
        lines = gpu_runs.stamped([sys.executable, "train.py", *flags], folder, scale, 8, results.left_s)
    at = [second for second, line in lines if re.match(r"iter \d+: loss", line)]
    between = [(later - earlier) / every for earlier, later in zip(at[settle:], at[settle + 1 :], strict=False)]
    speed = config.batch_size * config.block_size / statistics.median(between)
    used = mfu(speed, config.shape.flops_per_token, peak_tflops(scale.name, "bf16"), 1)
    return {"step_ms": 1e3 * statistics.median(between), "tokens_per_second": speed, "mfu": used, "micro_batch": batch}


def peer_options(config: TrainConfig, steps: int, every: int) -> dict[str, object]:
    """Return the options of nanoGPT's train.py for the same model and batch. Its vocabulary is 50,304 by default."""
    return {
        **{"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd},
        **{"block_size": config.block_size, "batch_size": config.batch_size, "gradient_accumulation_steps": 1},
        **{"dropout": 0.0, "bias": True, "device": config.device, "dtype": "bfloat16"},
        **{"max_iters": steps, "lr_decay_iters": steps, "warmup_iters": 10, "learning_rate": 6e-4, "out_dir": "out"},
        **{"log_interval": every, "eval_interval": 1_000_000, "eval_iters": 1},
    }


# -- profile and ranks


def profile_settings() -> Mapping[str, Setting]:
    """Return the runs of the part `profile`."""
    return {
        "124m as it is": Setting(symbols=symbols_of("124m", 32)),
        "124m bf16 stream, FP8": Setting(symbols=symbols_of("124m", 32, BF16_STREAM="y", FP8="y")),
        "774m as it is": Setting(symbols=symbols_of("774m", 16)),
    }


def profile(results: Results) -> Iterator[Item]:
    """Yield the profiles. The traces stay next to the results."""
    for name, setting in profile_settings().items():
        trace = results.path.parent / f"{name.replace(' ', '-').replace(',', '')}.trace.json"
        short = replace(setting, steps=30)
        yield Item(name=name, measure=lambda s=short, t=trace: gpu_runs.profiled(s, results, t), least_s=LEAST_S)


def ranks(results: Results, model: str = "124m") -> Iterator[Item]:
    """Yield the runs on all GPUs: the choices of DDP and of sharded states. On the CPU: two ranks with gloo."""
    count = 2 if results.scale.tiny else results.scale.gpus
    rows: list[tuple[str, dict[str, str]]] = [
        ("adamw", {}),
        ("adamw DDP_BF16_GRADIENTS", {"DDP_BF16_GRADIENTS": "y"}),
        ("adamw ZERO_STAGE=1", {"ZERO_STAGE": "1"}),
        ("muon", {"OPTIMIZER": "muon"}),
        ("muon ZERO_STAGE=1", {"OPTIMIZER": "muon", "ZERO_STAGE": "1"}),
    ]
    alone = Setting(symbols=symbols_of(model, USUAL[model]))
    yield Item(name="one rank", measure=lambda: gpu_runs.train(alone, results), least_s=LEAST_S)
    for label, symbols in rows:
        setting = Setting(symbols=symbols_of(model, USUAL[model], **symbols), ranks=count)
        yield Item(
            name=f"{label}, {count} ranks", measure=lambda s=setting: gpu_runs.train(s, results), least_s=LEAST_S
        )


def show(name: str, values: Values) -> str:
    """Return the line of a measurement for the terminal."""
    if "shares" in values:
        found = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in values["shares"].items())
        return f"{found}; {values['waits']:.1f} waits per step"
    if "tokens_per_second" not in values:
        return (
            gpu_kernels.show(name, values)
            if "tflops" in values
            else f"{1e3 * values['seconds']:.3f} ms per micro-batch"
        )
    used = f"{100 * values['mfu']:5.1f} % MFU" if values.get("mfu") else "MFU n/a"
    memory = f", {values['peak_mib'] / 1024:.1f} GiB" if values.get("peak_mib") else ""
    loss = f", loss {values['loss']:.3f}" if values.get("loss") else ""
    return f"{values['tokens_per_second']:10,.0f} tokens/s, {used}{memory}{loss}"
