"""Train a run on the double of an H100, and print where the process would wait for a real one.

    python tests/support/fake_gpu_run.py '{"optimizer": "muon", "max_iters": 5}'      # fields of "train" in run.json

It is the project's own train(): the lines that a run on a GPU goes through are executed. Tensors have no values, so
numbers that the program reads are made up: losses and norms are 1, requests to stop are not set.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import factories
import fake_cuda
import optim_factory
from gpt2 import dist, failure, train
from gpt2.data import shards
from gpt2.evaluate import Validation
from gpt2.log import RunLog
from kmatrix.records.paths import RunDir

VOCAB = 50257
SMALL = {
    **{"model": "custom", "n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 256, "vocab_multiple": 64},
    **{"tokenizer": "gpt2", "vocab_size": VOCAB, "batch_size": 2, "max_iters": 6, "log_interval": 2},
    **{"device": "cuda", "dtype": "bf16", "ddp_backend": "nccl"},
    **{"eval_interval": 1000, "eval_samples": 4, "save_checkpoint": False},
}
# Operators whose result has as many elements as the values say: a GPU has to be asked.
COUNTED = {
    *("aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default", "aten.linalg_eigh.default"),
    "aten._linalg_eigh.default",
}


class Waits(TorchDispatchMode):
    """Counts what makes the process wait for the device, by the phase of the run, the reason and the line."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "set-up"
        self.found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.operators: collections.Counter[str] = collections.Counter()  # per phase

    def add(self, reason: str) -> None:
        if threading.current_thread() is threading.main_thread():  # a thread that waits does not hold up the loop
            self.found[self.phase][f"{reason} @ {fake_cuda.line_of_caller()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name == "prim.device.default":
            return func(*args, **kwargs)
        if body := fake_cuda.body_of(func):
            with self:
                return body(*args, **kwargs)
        self.operators[self.phase] += 1
        if name == "aten._local_scalar_dense.default":
            return self._read(args[0])
        if name == "aten._fused_sgd_.default":  # torch has no version of it for fake tensors; it works in place
            return None
        if name == "aten._to_copy.default" and kwargs.get("device") is not None:
            self._copied(args[0].device, torch.device(kwargs["device"]), bool(kwargs.get("non_blocking")))
        if name == "aten.copy_.default":
            asynchronous = (len(args) > 2 and bool(args[2])) or bool(kwargs.get("non_blocking"))
            self._copied(args[1].device, args[0].device, asynchronous)
        if name in COUNTED and args[0].device.type == "cuda":
            self.add(name.split(".")[1])
        return func(*args, **kwargs)

    def _read(self, tensor: torch.Tensor) -> float | int | bool:
        """Return a value for a tensor of one element that the program reads."""
        if tensor.device.type == "cuda":
            self.add("read")
        # gpt2.steps.Steps sends loss and norm first, and then requests: nobody asks for a stop.
        if "gpt2/steps.py" in fake_cuda.line_of_caller() and tensor.storage_offset() >= 2:
            return 0.0
        return 1.0 if tensor.dtype.is_floating_point else tensor.dtype == torch.bool or 1

    def _copied(self, source: torch.device, target: torch.device, asynchronous: bool) -> None:
        if source.type != target.type and not asynchronous:
            self.add(f"blocking copy from {source.type} to {target.type}")


class PhaseWatchdog(failure.Watchdog):
    """Tells `Waits` which phase of the run is next."""

    waits: Waits

    def work(self, kind: str, step: int) -> None:
        self.waits.phase = f"{kind} {step}"
        super().work(kind, step)


def prepare(folder: Path, overrides: dict[str, Any]) -> tuple[dict[str, Any], RunDir]:
    """Write a dataset; return the fields of a run on it and its directory."""
    data = folder / "data"
    data.mkdir()
    tokens = np.random.default_rng(0).integers(0, VOCAB, 200_000)
    for kind, count in (("train", 200_000), ("val", 20_000)):
        shards.write_shard(data / f"random_{kind}_000000.bin", tokens[:count])
    sha256 = str(shards.describe(data, VOCAB, dataset="shards", source="tests", tokenizer="gpt2")["sha256"])
    known = factories.train_fields(data, sha256)
    optimizers = {name: value for name, value in asdict(optim_factory.Settings()).items() if known.get(name) is None}
    run_dir = RunDir(folder / "run")
    run_dir.path.mkdir()
    return factories.train_fields(data, sha256, **{**optimizers, **SMALL, **overrides}), run_dir


def replacements(waits: Waits) -> list[Any]:
    """Return patches for what fake tensors cannot do, which says nothing about a GPU."""
    build, loss = train.build_model, Validation.loss

    def build_model(config: Any) -> Any:
        model = build(config)
        model.to = lambda *_: fake_cuda.to_gpu(model)
        return model

    def validation_loss(self: Validation, *arguments: Any) -> float:
        loss(self, *arguments)  # None, because the number of sequences that it reads is made up
        self.by_source = {part.name: 5.0 for part in self.parts}
        return 5.0

    def pinned(self: torch.Tensor, *_: object) -> torch.Tensor:
        return self

    return [
        mock.patch.object(train, "build_model", build_model),
        mock.patch.object(Validation, "loss", validation_loss),
        mock.patch.object(torch.Tensor, "pin_memory", pinned),
        mock.patch.object(torch.Tensor, "is_pinned", return_value=True),
        mock.patch.object(torch, "save", lambda _, file, **__: file.write(b"fake tensors have no values")),
        mock.patch.object(fake_cuda.FakeEvent, "waits", staticmethod(waits.add)),
    ]


def run(overrides: dict[str, Any]) -> dict[str, Any]:
    """Train with these fields; return the exit status, the waits by phase, and the operators per step."""
    waits = Waits()
    with tempfile.TemporaryDirectory() as name, fake_cuda.fake_h100():
        fields, run_dir = prepare(Path(name), overrides)
        log = RunLog(run_dir, "0123456789", 1, main=True)
        patches = replacements(waits)
        for patch in patches:
            patch.start()
        stop = dist.Stop(sys.exit)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            waits,
            PhaseWatchdog(log, rank=0, size=1, stalled=sys.exit) as watchdog,
        ):
            watchdog.waits = waits
            code = train.train({"run_id": "0123456789", "train": fields}, log, stop, watchdog)
        for patch in patches:
            patch.stop()
    return {"code": code, "waits": waits.found, "operators": waits.operators}


def main(argv: list[str]) -> dict[str, Any]:
    return run(json.loads(argv[0]) if argv else {})


if __name__ == "__main__":
    fake_cuda.run_program(main)
