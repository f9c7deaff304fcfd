"""Checkpoints: the complete state of a run, written in the background, and read without running code.

python -m gpt2.checkpoint describe CHECKPOINT...   the weights that runs start from (INIT_FROM)
python -m gpt2.checkpoint compare WAS.pt NOW.pt    the weights of two checkpoints of one configuration
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpt2.dist import World, gather
from gpt2.log import RunLog
from gpt2.model.base import LanguageModel
from gpt2.optim.optimizers import Optimizers, each
from kmatrix.errors import DataError, KmatrixError, RecordError
from kmatrix.records.attempts import GRACE
from kmatrix.records.checkpoint_dir import own_checkpoint_dir
from kmatrix.records.checkpoints import Checkpoint, Checkpoints, check_file, damaged
from kmatrix.records.files import replacing
from kmatrix.records.train_config import MAY_DIFFER, SAME_AS_INITIAL, TrainConfig

PARTS = ("run_id", "step", "config", "model", "optimizer")  # of every checkpoint
MEMORY_WORDS = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# SIGKILL follows a signal: after 30 s by torchrun, after the time that a scheduler gives by `kmatrix run`. The step and
# the result take time as well.
STOP_S = float(os.environ.get(GRACE) or 30) - 10
NONE, AUTO, LATEST, BEST = "none", "auto", "latest", "best"


def save_checkpoint(path: Path, value: dict[str, Any]) -> None:
    """Write a checkpoint to a file of its own: complete, or not at all."""
    with replacing(path) as partial, partial.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(
    path: Path, device: str | torch.device = "cpu", *, verify: bool = True, mmap: bool = True
) -> dict[str, Any]:
    """Return a checkpoint. Raises RecordError if it is missing or damaged.

    verify: compare the file with the SHA-256 in its description, if it has one.
    mmap: tensors are private pages of the file, which is read as they are used. Reading all of it takes longer so.
    """
    if not path.is_file():
        raise RecordError(f"{path} is missing", hint="`make list-checkpoints` lists the checkpoints")
    if verify:
        check_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle of another program's file
            value: dict[str, Any] = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        for part in PARTS:
            value[part]
    # Broad, because a file of another program makes zip, pickle and tensors raise exceptions of almost every type.
    except Exception as error:
        if out_of_memory(error):
            raise
        # Not PyTorch's own message: it advises to load the file so that it can run code.
        why = f"{type(error).__name__}: it has other objects than tensors and plain values, or lacks a part of {PARTS}"
        raise damaged(path, why) from None
    return value


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory of this machine or of its GPU."""
    # torch raises OutOfMemoryError for GPU memory only: the CPU's allocator and cuBLAS raise a plain RuntimeError.
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS)


def saved_weights(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint to evaluate, sample, serve and export."""
    found: dict[str, torch.Tensor] = value.get("evaluation") or value["model"]
    return found


def weights_sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the hash of names and values, sorted by name, so that equal weights have equal hashes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\0{tuple(weights[name].shape)}\0".encode())
        digest.update(bytes_of(weights[name]).numpy().tobytes())
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any dtype."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The objects whose state a checkpoint holds."""

    config: TrainConfig
    world: World
    model: LanguageModel
    optimizers: Optimizers
    # By name: histories and masks, whose state_dict has tensors, numbers, strings, lists and dicts only
    stateful: Mapping[str, Any] = field(default_factory=dict)


def snapshot(
    training: TrainingState, *, step: int, run_id: str, optimizer: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state of a run after `step` updates. Its tensors are those of training, except for `evaluation`.

    optimizer: the states gathered from all ranks; None if each rank holds all of them.
    The order of the data, the learning rate and random numbers depend on the step: nothing else is stored of them.
    """
    value = {
        "run_id": run_id,
        "step": step,
        "config": training.config.to_json(),
        "model": training.model.state_dict(),
        "optimizer": training.optimizers.state_dict() if optimizer is None else optimizer,
        "parts": {name: part.state_dict() for name, part in training.stateful.items()},
    }
    if training.optimizers.averages:
        with training.optimizers.evaluation_weights():  # which restores the training weights in place
            value["evaluation"] = {name: weights.clone() for name, weights in training.model.state_dict().items()}
    return value


def restore(value: Mapping[str, Any], training: TrainingState) -> None:
    """Restore the objects from a checkpoint. Raises RecordError if it is of other training, before any change."""
    if not value["optimizer"]:
        raise RecordError(
            "the checkpoint holds weights alone: training cannot resume from it",
            why="it was imported",
            hint="start a new run from these weights: INIT_FROM=<the file>",
        )
    saved, current = value["config"], training.config.to_json()
    if other := [name for name in current if name not in MAY_DIFFER and saved.get(name) != current[name]]:
        raise RecordError(
            f"the checkpoint at step {value['step']} belongs to another configuration",
            why="; ".join(f"{name} was {saved.get(name)} and is {current[name]}" for name in other),
            hint="start from the beginning: --resume none",
        )
    training.model.load_state_dict(value["model"])
    training.optimizers.load_state_dict(value["optimizer"])
    for name, part in training.stateful.items():
        part.load_state_dict(value["parts"][name])


class Saver:
    """Saves and restores the training state. Every rank calls the same methods; rank 0 owns the folder.

    Checkpoints are written by a thread, at most one at a time. A failed write is an event, unless the run is finished.
    """

    def __init__(self, training: TrainingState, log: RunLog) -> None:
        """Open the folder, and delete what a killed save left."""
        self.training, self.log, self.config = training, log, training.config
        self.checkpoints = Checkpoints(own_checkpoint_dir(log.dir))
        self._resumed = 0  # step at which this attempt started
        self._known: Checkpoint | None = None  # the checkpoint with the weights of its step that was written or read
        self._seconds = 0.0  # that the last save took
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._writing: Future[None] | None = None
        self._copies = Copies()
        if training.world.main:
            self.checkpoints.tidy()

    def due(self, step: int) -> bool:
        """Return whether a periodic checkpoint is due before this step."""
        every = self.config.checkpoint_interval
        return step > self._resumed and bool(every) and step % every == 0

    def wanted(self, step: int) -> bool:
        """Return whether a checkpoint is due, or the weights are the best so far. Call it after a due evaluation."""
        is_best = self.config.save_best and step > self._resumed and self.log.is_best(step)
        return self.due(step) or is_best

    def save(self, *, final: bool = False) -> None:
        """Save the state after log.step updates. Training goes on while it is written.

        final: of a finished run: return after it is on disk, and raise RecordError if writing failed.
        """
        self.wait()  # the copies belong to the thread until it is done
        training, step = self.training, self.log.step
        # Sharded: a collective, whose result is a copy. Rank 0 has freed the memory of the checkpoint before.
        sharded = training.optimizers.state_dict() if training.optimizers.sharded else None
        if not training.world.main:
            return
        loss = self.log.val[-1].loss if self.log.evaluated(step) else None
        if self._known and self._known.step == step:
            self.log.leave_if_replaced()
            self._known = self.checkpoints.describe(self._known, val_loss=loss, final=final or self._known.final)
            return
        value = snapshot(training, step=step, run_id=self.log.run_id, optimizer=sharded)
        if final:
            self._write(value, loss, None, final=True)
            return
        # Copies, because the next step changes the tensors. From a GPU they are made in stream order, before that step:
        # the thread waits for them, not the loop.
        value |= self._copies.of({name: part for name, part in value.items() if part is not sharded})
        copied = torch.cuda.Event() if training.world.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if copied:
            copied.record()
        self._writing = self._thread.submit(self._write, value, loss, copied, final=False)

    def stop(self) -> None:
        """Save at a stop, if there is time before the process is killed, or there is no checkpoint at all."""
        seconds = self.final_s()
        self.wait()
        if gather(self.training.world, seconds > STOP_S and self.checkpoints.newest() is not None)[0]:
            why = f"it would take about {seconds:.0f} s, and there are {STOP_S:.0f} s: the newest one is used"
            self.log.event(self.log.step, "checkpoint left out", why)
            return
        self.save()
        self.wait()

    def final_s(self) -> float:
        """Return the seconds for a checkpoint, after one that may still be written; 0 before the first."""
        busy = self._writing is not None and not self._writing.done()
        return self._seconds * (2 if busy else 1)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    def resume(self, how: str) -> bool:
        """Resume from a checkpoint or start from the beginning; return whether a checkpoint was restored.

        how: none; auto: the newest, or the beginning; latest: the newest; best; or a path.
        A damaged one is renamed, and the one before is used.
        Raises RecordError if there is no such checkpoint, or it is of another configuration.
        """
        # One rank reads a whole file for its hash, and may rename it.
        path = gather(self.training.world, self._choose(how) if self.training.world.main else None)[0]
        if path is None:
            self.log.resumed(0)  # voids the lines of an earlier attempt that left no checkpoint
            return False
        # Several ranks share the pages of the file, and one with sharded states reads only its share.
        value = load_checkpoint(path, verify=False, mmap=self.training.world.size > 1)
        restore(value, self.training)
        step = self._resumed = self.log.step = int(value["step"])
        self.log.resumed(step)
        another = "" if value["run_id"] == self.log.run_id else f", of run {value['run_id']}"
        self.log.event(step, "resume", f"from {path}, step {step} of {self.config.max_iters}{another}")
        return True

    def _choose(self, how: str) -> Path | None:
        """Return the checkpoint to resume from, whose hash is right; None to start from the beginning."""
        if how not in (NONE, AUTO, LATEST, BEST):
            check_file(Path(how))
            return Path(how)
        while item := None if how == NONE else self.checkpoints.best() if how == BEST else self.checkpoints.newest():
            path = self.checkpoints.path(item)
            try:
                check_file(path)
            except RecordError as error:  # the one before costs some steps; ending here would cost the whole run
                self.checkpoints.set_aside(item)
                self.log.event(0, "checkpoint refused", f"{error.what}: {error.why}")
            else:
                self._known = item
                return path
        if how in (NONE, AUTO):
            return None
        raise RecordError(f"{self.checkpoints.folder} has no checkpoint to resume from", hint="pass --resume none")

    def _write(
        self, value: dict[str, Any], loss: float | None, copied: torch.cuda.Event | None, *, final: bool
    ) -> None:
        """Write one checkpoint, and delete those that it replaces. copied: after it, `value` is complete."""
        start, step = time.perf_counter(), value["step"]
        about = {"attempt": self.log.attempt, "val_loss": loss, "final": final}
        if copied:
            copied.synchronize()

        def write(file: Any) -> None:
            torch.save(value, file)
            self.log.leave_if_replaced()  # before it has its name and its description, without which it does not count

        try:
            self._known = self.checkpoints.put(step, write, **about)
            self.checkpoints.retire(self.config.keep_checkpoints if self.config.checkpoint_interval else 1)
        # On a full disk torch's zip writer raises RuntimeError while it handles the OSError, which is the real cause.
        except (OSError, RuntimeError) as error:
            what = f"the checkpoint of step {step} could not be written to {self.checkpoints.folder}"
            why = str(error.__context__ or error).partition("\n")[0]
            if final:
                raise RecordError(what, why=why, hint="free disk space, or set another CHECKPOINT_DIR") from error
            self.log.event(step, "checkpoint failed", f"{what}: {why}")
        else:
            self._seconds = time.perf_counter() - start
            self.log.event(step, "checkpoint", str(self.checkpoints.path(self._known)))


class Copies:
    """Copies of a state in CPU memory, in the same memory each time: allocating takes longer than copying."""

    def __init__(self) -> None:
        self._memory: list[tuple[Any, torch.Tensor]] = []

    def of(self, value: Any) -> Any:
        """Return a nested value with all tensors copied over the former copies; from a GPU, in stream order."""
        memory, used = iter(self._memory), list[tuple[Any, torch.Tensor]]()

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            # Strides as well: products of matrices round by them, and a resumed SOAP goes on with the same numbers.
            kind = tensor.dtype, tensor.shape, tensor.stride()
            known, place = next(memory, (None, tensor))
            if known != kind:  # PyTorch rounds pinned memory up to a power of two (docs/decisions/0025)
                place = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            used.append((kind, place))
            return place.copy_(tensor.detach(), non_blocking=True)

        found = each(value, copied)
        self._memory = used
        return found


def describe(path: Path) -> dict[str, Any]:
    """Return the SHA-256 of a checkpoint's weights, and the settings that a run from them must share."""
    value = load_checkpoint(path)
    settings = {name: value["config"].get(name) for name in SAME_AS_INITIAL}
    return {"sha256": weights_sha256(unpadded(value)), **settings}


def unpadded(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint to evaluate, without the rows that pad the vocabulary."""
    rows = value["config"]["vocab_size"]
    return {name: weights[:rows] if is_table(name) else weights for name, weights in saved_weights(value).items()}


def is_table(name: str) -> bool:
    """Return whether a weight has a row per token, and so rows for the padding of the vocabulary."""
    return name in ("wte.weight", "lm_head.weight") or name.startswith("value_embeds.")


def initialize(model: LanguageModel, config: TrainConfig) -> None:
    """Load the weights of config.init_from. Raises DataError if they are not those that the run was planned with."""
    weights = unpadded(load_checkpoint(Path(config.init_from), next(model.parameters()).device))
    found = weights_sha256(weights)
    if found != config.init_sha256:
        raise DataError(
            f"the weights in {config.init_from} changed after the run was planned",
            why=f"hash {found[:12]}..., expected {config.init_sha256[:12]}...",
            hint="restore the file, or create a new matrix",
        )
    for name, own in model.state_dict().items():
        if is_table(name):  # padding rows keep their initial values: they are masked out of the loss
            weights[name] = torch.cat([weights[name], own[len(weights[name]) :]])
    model.load_state_dict(weights)


def compare(was: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return equality, number of tensors and of differing ones, SHA-256 of the second, and the largest difference.

    was, now: weights of one model.  by: the difference; None if there is none, or it is not finite.
    """
    differences = {
        name: (was[name].double() - now[name].double()).abs().max().item()
        for name in now
        if not torch.equal(bytes_of(was[name]), bytes_of(now[name]))  # bytes, because NaN != NaN and 0.0 == -0.0
    }
    most = max(differences, key=lambda name: differences[name], default=None)
    by = differences[most] if most and math.isfinite(differences[most]) else None  # JSON has no infinity
    counts = {"equal": not differences, "tensors": len(now), "differing": len(differences)}
    return {**counts, "sha256": weights_sha256(now), "most": most, "by": by}


def main(argv: Sequence[str] | None = None) -> int:
    """Describe checkpoints, or compare two, as JSON; or print the error of the first that cannot be used."""
    how, *paths = map(Path, sys.argv[1:] if argv is None else argv)
    try:
        weights = (load_checkpoint(path)["model"] for path in paths)
        print(json.dumps(compare(*weights) if how.name == "compare" else [describe(path) for path in paths]))
    except KmatrixError as error:
        print(json.dumps({"what": error.what, "why": error.why, "hint": error.hint}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
