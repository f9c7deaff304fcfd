"""Save the state of a run in the background, and resume from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.contents import size_of
from gpt2.checkpoint.files import load_checkpoint
from gpt2.checkpoint.state import TrainingState, restore, snapshot
from gpt2.dist import gather
from gpt2.log import RunLog
from gpt2.optim.optimizers import each
from kmatrix.errors import FullError, RecordError, is_full
from kmatrix.records.checkpoint_dir import own_checkpoint_dir
from kmatrix.records.checkpoints import Checkpoint, Checkpoints, check_file

STOP_S = 20.0  # torchrun sends SIGKILL 30 s after a signal; the step and the result take time as well
WRITE_RATE = 100e6  # bytes/s, assumed before the first checkpoint
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
        self._seconds: float | None = None  # that the last save took
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
        step = self.log.step
        # Sharded: a collective, whose result is a copy. Rank 0 has freed the memory of the checkpoint before.
        sharded = self.training.optimizers.state_dict() if self.training.optimizers.sharded else None
        if not self.training.world.main:
            return
        loss = self.log.val[-1].loss if self.log.evaluated(step) else None
        if self._known and self._known.step == step:
            self._known = self.checkpoints.describe(self._known, val_loss=loss, final=final or self._known.final)
            return
        value = snapshot(self.training, step=step, run_id=self.log.run_id, optimizer=sharded)
        if final:
            self._write(value, loss, None, final=True)
            return
        # Copies, because the next step changes the tensors
        value |= self._copies.of({name: part for name, part in value.items() if part is not sharded})
        self._writing = self._thread.submit(self._write, value, loss, _copies_done(self.training.world.device))

    def stop(self) -> None:
        """Save at a stop, if there is time before torchrun kills the process; a failure is an event.

        Without any checkpoint it is tried anyway, because being killed while writing damages nothing.
        """
        seconds = self.final_s() if self._seconds else 0.0
        self.wait()
        newest = self.checkpoints.newest() if self.training.world.main else None
        if gather(self.training.world, bool(newest) and seconds > STOP_S)[0]:
            why = f"it would take about {seconds:.0f} s, torchrun kills after 30 s: the newest one is used"
            self.log.event(self.log.step, "checkpoint left out", why)
            return
        self.save()
        self.wait()

    def final_s(self) -> float:
        """Return an estimate of the seconds for a checkpoint, after one that may still be written."""
        size = 3 * size_of(dict(self.training.model.named_parameters()))  # two states per weight, as for AdamW
        busy = self._writing is not None and not self._writing.done()
        return (self._seconds or size / WRITE_RATE) * (2 if busy else 1)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    def resume(self, how: str) -> bool:
        """Resume from a checkpoint or start from the beginning; return whether a checkpoint was restored.

        how: none; auto: the newest, or the beginning; latest: the newest; best; or a path.
        A newest one that is damaged is renamed, and the one before is used.
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
        best = self.checkpoints.best()
        possible = {NONE: [], BEST: [best] if best else []}.get(how, self.checkpoints.all()[::-1])
        for item in possible:
            path = self.checkpoints.path(item)
            try:
                check_file(path)
            except RecordError as error:  # the one before costs some steps; ending here would cost the whole run
                if how == BEST:
                    raise
                self.checkpoints.set_aside(item)
                self.log.event(0, "checkpoint refused", f"{error.what}: {error.why}")
            else:
                self._known = item
                return path
        if how in (NONE, AUTO):
            return None
        raise RecordError(
            f"{self.checkpoints.folder} has no checkpoint to resume from",
            why="none was evaluated" if how == BEST else "none was written, or all are damaged",
            hint="start from the beginning: --resume none",
        )

    def _write(
        self, value: dict[str, Any], val_loss: float | None, copied: Callable[[], None] | None, *, final: bool = False
    ) -> None:
        """Write one checkpoint, and delete those that it replaces. copied: waits until `value` is complete."""
        start, step = time.perf_counter(), value["step"]
        path = self.checkpoints.folder / f"step_{step:08d}.pt"
        about = {"attempt": self.log.attempt, "val_loss": val_loss, "final": final}
        if copied:
            copied()
        try:
            self._known = self.checkpoints.put(step, lambda file: torch.save(value, file), **about)
            self.checkpoints.retire(self.config.keep_checkpoints if self.config.checkpoint_interval else 1)
        # On a full disk torch's zip writer raises RuntimeError while it handles the OSError, which is the real cause.
        except (OSError, RuntimeError) as error:
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            failed = (FullError if is_full(cause) else RecordError)(
                f"{path} could not be written",
                why=str(cause).partition("\n")[0],
                hint="free some disk space, or set CHECKPOINT_DIR to another disk",
            )
            if final:
                raise failed from error
            self.log.event(step, "checkpoint failed", f"{failed.what}: {failed.why}")
        else:
            self._seconds = time.perf_counter() - start
            self.log.event(step, "checkpoint", str(path))


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


def _copies_done(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits until the GPU has made the copies; None on the CPU."""
    if device.type != "cuda":
        return None
    # The thread waits for the event, not the loop: in the stream, the copies precede the next step's changes.
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
    event.record()
    return event.synchronize
