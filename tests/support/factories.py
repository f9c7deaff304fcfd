"""Make a dataset of random tokens and run directories that are ready to train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import forked
from gpt2.data import shards
from kmatrix.experiment.create import common_of, planned
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, End
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 257


def make_data(folder: Path, *, train: int = 40_000, val: int = 4_000, seed: int = 0) -> str:
    """Write one training and one validation shard that a model can learn from, and return their hash.

    train, val: tokens. A token is the previous one plus 0 to 3, modulo the 256 bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for kind, count in (("train", train), ("val", val)):
        shards.write_shard(folder / f"random_{kind}_000000.bin", np.cumsum(rng.integers(0, 4, count)) % 256)
    return str(shards.describe(folder, VOCAB_SIZE, dataset="shards", source="tests", tokenizer="byte")["sha256"])


def prepare(dataset: str, data_dir: Path, data_path: str = "", tokenizer: str = "byte", **more: Any) -> dict[str, Any]:
    """Prepare a dataset and return it as the program prints it. more: fields of DatasetRequest."""
    from gpt2.prepare.catalog import DatasetRequest
    from gpt2.prepare.dataset import prepare_dataset

    request = DatasetRequest(dataset=dataset, tokenizer=tokenizer, data_path=data_path, **more)
    return asdict(prepare_dataset(request, data_dir))


def train_fields(data_path: Path, data_sha256: str, **overrides: Any) -> dict[str, Any]:
    """Return the fields of a tiny run on the CPU: 2 layers of width 32, 4 sequences of 32 tokens per step."""
    config = TrainConfig(
        **{"model": "custom", "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_multiple": 1},
        **{"dataset": "shards", "data_layout": "flat", "tokenizer": "byte", "vocab_size": VOCAB_SIZE},
        **{"batch_size": 4, "gradient_accumulation": 1, "max_iters": 12, "seed": 1337},
        **{"learning_rate": 1e-3, "schedule": "cosine", "min_lr": 1e-4, "warmup_steps": 2, "grad_clip": 1.0},
        **{"eval_interval": 5, "eval_samples": 10, "log_interval": 1},
        **{"save_checkpoint": True, "keep_checkpoints": 10, "save_best": True},
        **{"optimizer": "adamw", "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "pruning": "none"},
        **{"device": "cpu", "num_gpus": 1, "num_nodes": 1, "cpu_threads": 1, "dtype": "fp32"},
        **{"use_ddp": True, "ddp_backend": "gloo", "ddp_find_unused_params": False, "ddp_bf16_gradients": False},
        **{"attention_kernel": "auto", "stall_factor": 10.0},
        **{"data_path": str(data_path), "data_sha256": data_sha256},
    )
    fields = {**config.to_json(), **overrides}
    product = fields["batch_size"] * fields["gradient_accumulation"] * fields["num_gpus"]
    return fields | {"global_batch": overrides.get("global_batch", product)}


def train_config(**overrides: Any) -> TrainConfig:
    """Return the configuration of a tiny run on the CPU, without validating it."""
    fields = train_fields(Path("data"), "") | overrides
    product = fields["batch_size"] * fields["gradient_accumulation"] * fields["num_gpus"]
    return TrainConfig(**fields | {"global_batch": overrides.get("global_batch", product)})


def with_shape(train: TrainConfig, shape: ModelShape) -> TrainConfig:
    """Return a configuration with the model of another shape."""
    return replace(train, **asdict(shape))


def make_run(tmp_path: Path, name: str = "gpt2_adamw_1cpu", **train_overrides: Any) -> RunDir:
    """Return a run directory with a complete run.json of a tiny run; the fields of "train" may be overridden."""
    run_dir = RunDir(tmp_path / name)
    run_dir.path.mkdir(parents=True)
    data = Path(train_overrides.pop("data_path", tmp_path / "data"))
    sha256 = train_overrides.pop("data_sha256", None) or make_data(data)
    train = train_fields(data, sha256, **train_overrides)
    write_json(
        run_dir.run_json,
        {
            "run_id": "0123456789",
            "name": name,
            "matrix": tmp_path.name,
            "axes": {"optimizer": train["optimizer"], "gpus": str(train["num_gpus"])},
            "symbols": {"GPT2_OPTIMIZER": train["optimizer"], "GPT2_MAX_ITERS": str(train["max_iters"])},
            "train": train,
            "timeout_s": 0,
            "provenance": {
                "created": time.time(),
                "command": "tests",
                "host": "localhost",
                "git_commit": None,
                "git_dirty": None,
                "python": sys.version.split()[0],
                "versions": {},
                "gpus": [],
                "cpu": "",
                "cores": os.cpu_count(),
            },
        },
    )
    return run_dir


def note_end(run_dir: RunDir, kind: str = "finished") -> RunDir:
    """Write that the first attempt of a run has ended, as its program does."""
    attempts.folder(run_dir.path).mkdir()
    attempts.write(run_dir.path, Attempt(number=1, end=End(kind=kind, seconds=60.0)))
    return run_dir


def list_runs(matrix: Path) -> None:
    """Write matrix.json with the runs whose folders are there, as planned by their run.json."""
    records = [read_json(path) for path in sorted(matrix.glob("*/run.json"))]
    common = common_of(records)
    about = {"provenance": records[0].get("provenance", {}), "common": common}
    write_json(matrix / "matrix.json", {**about, "runs": [planned(common, record) for record in records]})


def environment(threads: int = 1) -> dict[str, str]:
    """Return the environment that the local engine gives a trainer on the CPU."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "lib"), str(ROOT / "tests" / "support")])
    threads_of_rank = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "MKL_CBWR": "AUTO"}
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **threads_of_rank}


def train_command(run_dir: RunDir, *, attempt: int = 1, program: tuple[str, ...] = ("-m", "gpt2.train")) -> list[str]:
    """Return a command that trains a run: torchrun with one process per rank, or the trainer alone for one rank.

    The local engine starts torchrun for one rank too. Tests do not: it takes as long to import torch as the trainer.
    """
    ranks = ranks_of(run_dir)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *torchrun, *trainer(run_dir, attempt=attempt, program=program)]


def trainer(run_dir: RunDir, *, attempt: int = 1, program: tuple[str, ...] = ("-m", "gpt2.train")) -> list[str]:
    """Return the program of one rank, with its arguments."""
    return [*program, str(run_dir.path), "--attempt", str(attempt)]


def ranks_of(run_dir: RunDir) -> int:
    """Return the number of ranks that a run asks for."""
    return int(json.loads(run_dir.run_json.read_text())["train"]["num_gpus"])


def train(run_dir: RunDir, *, timeout: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    """Train a run in real processes and return the completed process with its output."""
    return forked.run(trainer(run_dir, **options), environment(), ranks=ranks_of(run_dir), timeout=timeout)
