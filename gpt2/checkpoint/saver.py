"""Save the state of a run in the background, and resume from it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.files import load_checkpoint
from gpt2.checkpoint.state import TrainingState, restore, snapshot
from gpt2.dist import gather
from gpt2.log import RunLog
from gpt2.optim.optimizers import each
from kmatrix.errors import RecordError
from kmatrix.records.checkpoint_dir import own_checkpoint_dir
from kmatrix.records.checkpoints import Checkpoint, Checkpoints, check_file

STOP_S = 20.0  # torchrun sends SIGKILL 30 s after a signal; the step and the result take time as well
NONE, AUTO, LATEST, BEST = "none", "auto", "latest", "best"


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
        """Save at a stop, if there is time before torchrun kills the process, or there is no checkpoint at all."""
        seconds = self.final_s()
        self.wait()
        if gather(self.training.world, seconds > STOP_S and self.checkpoints.newest() is not None)[0]:
            why = f"it would take about {seconds:.0f} s, torchrun kills after 30 s: the newest one is used"
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
        try:
            self._known = self.checkpoints.put(step, lambda file: torch.save(value, file), **about)
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
