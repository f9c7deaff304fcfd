"""Train a run on the double of an H100, and print where the process would wait for a real one.

    python tests/support/fake_gpu_run.py '{"optimizer": "muon", "max_iters": 5}' [STEP]

The first argument has fields of "train" in run.json.
It is the project's own train(): the lines that a run on a GPU goes through are executed. Tensors have no values, so
numbers that the program reads are made up: losses and norms are 1, requests to stop are not set.
STEP: the run is killed at the start of this step, and continued from its checkpoint: the second attempt is reported.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import factories
import fake_cuda
import optim_factory
from gpt2 import dist, failure, train
from gpt2.checkpoint import state
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

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile under this mode."""
        return True

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


class KilledError(Exception):
    """The end of a run that is killed."""


class PhaseWatchdog(failure.Watchdog):
    """Tells `Waits` which phase of the run is next, and kills the run."""

    waits: Waits
    killed_at: int | None = None  # step

    def work(self, kind: str, step: int) -> None:
        if kind == failure.STEP and step == self.killed_at:
            raise KilledError
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


class Files:
    """The contents of checkpoints, which stay in memory: a file has a number in their place."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def save(self, value: Any, file: Any, **_: object) -> None:
        self.values.append(value)
        file.write(str(len(self.values) - 1).encode())

    def load(self, path: Path, *, map_location: Any, **_: object) -> Any:
        like = partial(torch.empty_like, device=map_location)
        return tree_map_only(torch.Tensor, like, self.values[int(path.read_bytes())])


@contextlib.contextmanager
def replacements() -> Iterator[None]:
    """Replace what fake tensors cannot do, which says nothing about a GPU."""
    build, loss, files = train.build_model, Validation.loss, Files()

    def build_model(config: Any) -> Any:
        model = build(config)
        model.to = lambda *_: fake_cuda.to_gpu(model)
        return model

    def validation_loss(self: Validation, *arguments: Any) -> float:
        loss(self, *arguments)  # None, because the number of sequences that it reads is made up
        self.by_source = {part.name: 5.0 for part in self.parts}
        return 5.0

    # Functions, because Dynamo asks the methods of tensors for their names.
    def pin_memory(self: torch.Tensor, *_: object) -> torch.Tensor:
        return self

    def is_pinned(self: torch.Tensor, *_: object) -> bool:
        return self.device.type == "cpu"

    with (
        mock.patch.object(train, "build_model", build_model),
        mock.patch.object(Validation, "loss", validation_loss),
        mock.patch.object(torch.Tensor, "pin_memory", pin_memory),
        mock.patch.object(torch.Tensor, "is_pinned", is_pinned),
        mock.patch.object(torch, "save", files.save),
        mock.patch.object(torch, "load", files.load),
        mock.patch.object(state, "set_rng_state"),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def run(overrides: dict[str, Any], killed_at: int | None = None) -> dict[str, Any]:
    """Train with these fields; return the report of the attempt, or of the second one if the first is killed."""
    compiles = overrides.get("compile", False)
    with tempfile.TemporaryDirectory() as name, device(compiler=compiles) as compiler, replacements():
        fields, run_dir = prepare(Path(name), overrides)
        stop = dist.Stop(sys.exit)
        if killed_at is not None:
            with contextlib.suppress(KilledError):
                attempt(fields, run_dir, stop, killed_at=killed_at)
        report = attempt(fields, run_dir, stop, number=1 if killed_at is None else 2)
    graphs = compiler.graphs if compiler else []
    return {**report, "graphs": [[graph["kind"], graph["symbolic"]] for graph in graphs]}


def device(*, compiler: bool) -> AbstractContextManager[Any]:
    """Return the context of the double, whose value is the compiler of a run with COMPILE=y, else None."""
    if not compiler:
        return fake_cuda.fake_h100()
    import fake_gpu_compile  # imports inductor, which takes seconds

    return fake_gpu_compile.compiling()


def attempt(
    fields: dict[str, Any], run_dir: RunDir, stop: dist.Stop, number: int = 1, killed_at: int | None = None
) -> dict[str, Any]:
    """Train in one attempt; return the exit status, the waits by phase, and the operators per step."""
    waits, log = Waits(), RunLog(run_dir, "0123456789", number, main=True)
    with (
        mock.patch.object(fake_cuda.FakeEvent, "waits", staticmethod(waits.add)),
        waits,
        PhaseWatchdog(log, rank=0, size=1, stalled=sys.exit) as watchdog,
    ):
        watchdog.waits, watchdog.killed_at = waits, killed_at
        code = train.train({"run_id": "0123456789", "train": fields}, log, stop, watchdog, resume="auto")
    return {"code": code, "waits": waits.found, "operators": waits.operators}


def main(argv: list[str]) -> dict[str, Any]:
    return run(*map(json.loads, argv))


if __name__ == "__main__":
    fake_cuda.run_program(main)
