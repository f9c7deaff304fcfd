"""When a run is saved, which checkpoints are kept, and where it resumes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.contents import size_of
from gpt2.checkpoint.copies import CopyBuffers
from gpt2.checkpoint.files import (
    ChosenCheckpoint,
    WrittenCheckpoint,
    choose,
    load_checkpoint,
    save_checkpoint,
)
from gpt2.checkpoint.state import TrainingState, gather_rng_states, restore, snapshot
from gpt2.dist import gather
from gpt2.log import RunLog
from kmatrix.errors import FullError, KmatrixError, RecordError, SchemaError
from kmatrix.own_file import opener
from kmatrix.records.checkpoint_dir import INDEX, own_checkpoint_dir
from kmatrix.records.checkpoints import (
    EXPIRING,
    CheckpointIndex,
    CheckpointKind,
    Entry,
    same_file,
    sha256_of,
    superseded,
)
from kmatrix.records.files import free_path
from kmatrix.text import disk_size

EMERGENCY_S = 20.0  # torchrun sends SIGKILL 30 s after a signal; the step and the result take time as well
MIB = 2**20
WRITE_RATE = 100e6  # bytes/s, assumed before the first checkpoint
SAMPLE = 1 << 26  # bytes: enough to detect a slow disk without a noticeable delay
WORTH_PROBING = 4 * SAMPLE  # bytes: any disk is fast enough for smaller checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckpoint:
    """The index entry of a checkpoint that is about to be written."""

    step: int
    kinds: frozenset[CheckpointKind]
    val_loss: float | None  # newest validation loss, nats/token


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What all ranks together contribute to a checkpoint; complete on rank 0 only."""

    rng: list[dict[str, Any]]  # states of the random generators, by rank
    optimizer: dict[str, Any] | None = None  # the sharded optimizer states; None: rank 0 holds all of them itself


class CheckpointManager:
    """Saves and restores the training state. Every rank calls the same methods; rank 0 owns the folder.

    Checkpoints are written in the background, at most one at a time. A failed write is an event, unless the caller
    waits for it.
    """

    def __init__(self, training: TrainingState, log: RunLog) -> None:
        """Open the folder of the checkpoints."""
        self.training, self.log, self.config = training, log, training.config
        self.folder = own_checkpoint_dir(log.dir)
        self._resumed = 0  # step at which this attempt started; its checkpoint exists
        self._names: dict[int, str] = {}  # step -> file with this attempt's weights
        self._pool = ThreadPoolExecutor(1, "checkpoints")  # one thread: checkpoints are written in their order
        self._writing: Future[None] | None = None
        self._buffers = CopyBuffers()
        self._speed = WriteSpeed()
        self._gather_s = 0.0  # seconds that the newest gathering of states took
        if training.world.main:
            self.index = self._open()

    # Saving

    def due(self, step: int) -> bool:
        """Return whether a periodic checkpoint is due before this step."""
        every = self.config.checkpoint_interval
        return step > self._resumed and bool(every) and step % every == 0

    def reasons(self, *, finished: bool = False) -> list[CheckpointKind]:
        """Return why the current state is to be saved. Call it after a due evaluation."""
        step = self.log.step
        because = {
            CheckpointKind.ROLLING: self.due(step),
            CheckpointKind.BEST: self.config.save_best and step > self._resumed and self.log.is_best(step),
            CheckpointKind.FINAL: finished and self.config.save_checkpoint,
        }
        return [kind for kind, holds in because.items() if holds]

    def save(self, *kinds: CheckpointKind, wait: bool = False) -> None:
        """Save the state after log.step updates for these reasons; without a reason, do nothing.

        wait: return after it is on disk, and raise RecordError if writing failed.
        """
        if not kinds:
            return
        gathered = self._gather()  # a collective: all ranks have the same reasons
        if self.training.world.main:
            self._save(frozenset(kinds), gathered, wait=wait)

    def emergency(self) -> None:
        """Save at a stop if there is time before torchrun kills the process; else log which checkpoint remains.

        Without any checkpoint it is tried anyway, because being killed while writing damages nothing.
        A failure is an event: the run is stopped and resumes from the previous checkpoint.
        """
        world = self.training.world
        if not gather(world, self._has_time() if world.main else None)[0]:
            return
        gathered = self._gather()
        if world.main:
            kinds = frozenset({CheckpointKind.EMERGENCY})
            self._try(lambda: self._save(kinds, gathered, wait=True), self.log.step)

    def _gather(self) -> Gathered:
        """Return what other ranks hold of the state. Every rank calls it."""
        training = self.training
        states = gather_rng_states(training.world)
        if not training.optimizers.sharded:
            return Gathered(rng=states)
        self.wait()  # only rank 0 writes: the memory of the checkpoint before is free then
        start = time.perf_counter()
        optimizer = training.optimizers.state_dict()
        self._gather_s = time.perf_counter() - start
        return Gathered(rng=states, optimizer=optimizer)

    def _has_time(self) -> bool:
        """Return whether rank 0 should save at a stop; if not, log which checkpoint remains."""
        busy = self._writing is not None and not self._writing.done()
        seconds = self._speed.seconds(self._expected_bytes() * (2 if busy else 1))
        self.wait()  # after the estimate: an unfinished checkpoint may become the newest one, and takes time too
        if seconds is None or seconds + self._gather_s <= EMERGENCY_S or not self.index.present:
            return True
        newest = self.index.present[-1].name
        why = f"it would take about {seconds:.0f} s, torchrun kills after 30 s: the newest checkpoint is {newest}"
        self.log.event(self.log.step, "checkpoint left out", why)
        return False

    def final_s(self) -> float:
        """Return an estimate of the seconds for the final checkpoint, after one that may still be writing."""
        if not (self.config.save_checkpoint or self.config.save_best):
            return 0.0
        size = self._expected_bytes()
        seconds = self._speed.seconds(size)
        under_way = self._writing is not None and not self._writing.done()
        return (size / WRITE_RATE if seconds is None else seconds) * (2 if under_way else 1) + self._gather_s

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    # Resuming

    def resume(self, how: str) -> bool:
        """Resume from a checkpoint or start from the beginning, and return whether a checkpoint was restored.

        how: see gpt2.checkpoint.files.choose.
        """
        chosen = self._choose(how)
        if chosen:
            self._restore(*chosen)
        else:  # voids the lines of an earlier attempt that left no checkpoint
            self.log.resumed(0)
        return chosen is not None

    def _restore(self, path: Path, value: dict[str, Any]) -> None:
        for note in restore(value, self.training):
            self.log.say(f"Note: {note}")
        step = self._resumed = self.log.step = int(value["step"])
        if path.parent == self.folder:  # else it is of another run, and this run's own file is still to be written
            self._names[step] = path.name
        self.log.resumed(step)
        another = "" if value["run_id"] == self.log.run_id else f", of run {value['run_id']}"
        self.log.event(step, "resume", f"from {path}, step {step} of {self.config.max_iters}{another}")

    def forecast(self) -> None:
        """Log the disk space that checkpoints need, and probe the disk. Raises RecordError if one does not fit."""
        if not self.training.world.main or not self._saves():
            return
        each = self._expected_bytes()
        free = self._room_for_one(each)
        most = self.config.keep_checkpoints + 2 if self.config.checkpoint_interval else 2
        self.log.say(
            f"Checkpoints: about {disk_size(each)} each, {most} at most, in {self.folder} ({disk_size(free)} free)"
        )
        if free < most * each:
            self.log.event(self.log.step, "disk", f"{disk_size(free)} free: room for {free // each} checkpoints")
        seconds = self._speed.probe(self.folder, each)
        if seconds is not None and seconds > EMERGENCY_S:
            self.log.event(
                self.log.step,
                "slow disk",
                f"a checkpoint takes about {seconds:.0f} s: after a stop, the newest periodic one is used",
            )

    # Rank 0 only

    def _room_for_one(self, each: int) -> int:
        """Return the free bytes. Raises FullError if the first checkpoint does not fit."""
        # Fail now and not after hours. With an existing checkpoint, the oldest ones can still make room.
        free = self._free()
        if free < each and not self.index.present:
            raise self._no_room(each, free)
        return free

    def _save(self, reasons: frozenset[CheckpointKind], gathered: Gathered, *, wait: bool) -> None:
        """Write the current state; if this step was written already, add the reasons to that checkpoint."""
        step = self.log.step
        self.wait()  # the index and the copies belong to the thread until it is done
        # Often the last step is also the best and the final one: one file with several kinds.
        if written := next((e for e in self.index.present if e.name == self._names.get(step)), None):
            self.index.mark(written, reasons)
            self._retire()
            return
        optimizer = gathered.optimizer
        value = snapshot(self.training, step=step, run_id=self.log.run_id, rng=gathered.rng, optimizer=optimizer)
        pending = PendingCheckpoint(step=step, kinds=reasons, val_loss=self.log.last_val_loss)
        if wait:
            self._put(value, pending)
        else:  # copies, because the next step changes the tensors
            private = {"optimizer": value.pop("optimizer")} if optimizer is not None else {}  # gathered: copies already
            value, ready = {**self._buffers.of(value), **private}, self._copies_done()
            self._writing = self._pool.submit(self._try, lambda: self._put(value, pending, ready), step)

    def _saves(self) -> bool:
        return self.config.save_checkpoint or self.config.save_best or bool(self.config.checkpoint_interval)

    def _put(self, value: dict[str, Any], pending: PendingCheckpoint, ready: Callable[[], None] | None = None) -> None:
        """Write one checkpoint, and delete those that it supersedes."""
        if ready:
            ready()
        self._make_room(size_of(value) + MIB)
        path = self._unused(pending.step)
        written = save_checkpoint(path, value, lambda written: self._announce(path.name, pending, written))
        self._speed.measured(written)
        self._names[pending.step] = path.name
        # Only now, when the new file is complete: until then the old one is the only one of this step.
        # Of an earlier attempt, superseded by this one:
        self._retire([e for e in self.index.entries if e.step == pending.step and e.name != path.name])
        self.log.event(pending.step, "checkpoint", str(path))

    def _announce(self, name: str, pending: PendingCheckpoint, written: WrittenCheckpoint) -> None:
        self.index.announce(
            Entry(
                name=name,
                step=pending.step,
                kinds=pending.kinds,
                bytes=written.bytes,
                sha256=written.sha256,
                val_loss=pending.val_loss,
                attempt=self.log.attempt,
                time=time.time(),
            )
        )

    def _retire(self, also: Sequence[Entry] = ()) -> None:
        """Delete superseded checkpoints, and link the best and the final one. also: deleted too."""
        rest = [entry for entry in self.index.entries if entry not in also]
        self.index.remove([*also, *superseded(rest, self.config.keep_checkpoints)])
        self.index.name_links()  # best.pt and final.pt are hard links: no space, and valid without the index

    def _try(self, put: Callable[[], None], step: int) -> None:
        """Write, and log an error as an event instead of raising it."""
        try:
            put()
        except RecordError as error:
            self.log.event(step, "checkpoint failed", f"{error.what}: {error.why}")
        except OSError as error:  # of the index; the files are complete, and the next attempt repairs it
            self.log.event(step, "checkpoint failed", str(error))

    def _unused(self, step: int) -> Path:
        """Return an unused file name: existing files are never overwritten."""
        path = self.folder / f"step_{step:08d}.pt"
        number = 1
        while path.exists():
            number += 1
            path = self.folder / f"step_{step:08d}_{number}.pt"
        return path

    def _make_room(self, needed: int) -> None:
        """Delete the oldest disposable checkpoints until there is enough space, but never the only one."""
        while (free := self._free()) < needed:
            going = [entry for entry in self.index.present if entry.kinds <= EXPIRING]
            if not going or len(self.index.present) < 2:  # an old checkpoint is better than none if this write fails
                raise self._no_room(needed, free)
            self.index.remove(going[:1])  # before the event, which may be on the same disk
            self.log.event(self.log.step, "disk", f"{disk_size(free)} free: {going[0].name} makes room")

    def _no_room(self, needed: int, free: int) -> FullError:
        return FullError(
            f"{self.folder} has no space for a checkpoint",
            why=f"it takes {disk_size(needed)}, and {disk_size(free)} are free",
            hint="free some disk space, or set CHECKPOINT_DIR to another disk",
        )

    def _free(self) -> int:
        """Return the free bytes of the checkpoints' file system."""
        # The folder is created with the first checkpoint: until then its nearest existing parent is on the same disk.
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def _expected_bytes(self) -> int:
        """Return an estimate of a checkpoint's size: weights and two states per weight, as for AdamW."""
        if self._speed.bytes:  # of the last one
            return self._speed.bytes
        return 3 * size_of(dict(self.training.model.named_parameters())) + MIB

    def _open(self) -> CheckpointIndex:
        """Open the index after a possible crash: no partial files, no entries without a file."""
        try:
            index = CheckpointIndex(self.folder)
        except SchemaError:  # of a newer version, which may keep its checkpoints for other reasons
            raise
        except KmatrixError as error:  # the files are intact: renamed, it can be inspected, and `_adopt` finds them
            kept = free_path(self.folder / f"{INDEX}.damaged")
            (self.folder / INDEX).replace(kept)
            self.log.event(0, "checkpoint index", f"{error.what}; renamed to {kept.name}")
            index = CheckpointIndex(self.folder)
        if gone := index.tidy():
            self.log.event(0, "checkpoint index", f"missing files: {', '.join(gone)}")
        for path in sorted({*self.folder.glob("step_*.pt")} - {self.folder / name for name in index.names}):
            self._adopt(index, path)
        index.name_links()  # a kill may have left the name of an earlier best or final one
        return index

    def _adopt(self, index: CheckpointIndex, path: Path) -> None:
        """Add a checkpoint to an index that lost its entry, if it is readable."""
        try:
            value = load_checkpoint(path)
        except KmatrixError as error:
            self.log.event(0, "checkpoint refused", f"{error.what}: {error.why}")
            return
        # Its kinds survive in the links: best.pt and final.pt are other names of the same file.
        stat = path.stat()
        kinds = [kind for kind in CheckpointKind if same_file(self.folder / f"{kind}.pt", path)]
        index.insert(
            Entry(
                name=path.name,
                step=int(value["step"]),
                kinds=frozenset(kinds or [CheckpointKind.ROLLING]),
                bytes=stat.st_size,
                sha256=sha256_of(path),
                val_loss=None,
                attempt=0,
                time=stat.st_mtime,
            )
        )
        self.log.event(0, "checkpoint index", f"added {path.name}")

    def _choose(self, how: str) -> ChosenCheckpoint | None:
        """Choose, verify and load on rank 0, and give all ranks the same checkpoint."""
        # On one rank, because only one may rename a damaged file, and a network disk may show ranks different folders.
        # An error is sent as well: if rank 0 raised it alone, the others would wait in the broadcast.
        world, chosen = self.training.world, None
        answer: list[Any] = [None, None]  # path; what, why and hint of an error
        if world.main:
            try:
                chosen = choose(how, self.index, lambda text: self.log.event(0, "checkpoint refused", text))
                answer[0] = str(chosen[0]) if chosen else None
            except KmatrixError as error:
                answer[1] = (error.what, error.why, error.hint)
        if world.size > 1:
            torch.distributed.broadcast_object_list(answer, src=0)
        path, refused = answer
        if refused:
            raise RecordError(refused[0], why=refused[1], hint=refused[2])
        if path and not world.main:  # rank 0 has verified the hash
            chosen = Path(path), load_checkpoint(Path(path), verify=False)
        return chosen

    def _copies_done(self) -> Callable[[], None] | None:
        """Return a function that waits until the GPU has made the copies; None on the CPU."""
        if self.training.world.device.type != "cuda":
            return None
        # The thread waits for the event, not the loop: in the stream, the copies precede the next step's changes.
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
        event.record()
        return event.synchronize


class WriteSpeed:
    """The write speed of the last checkpoint, or of a probe."""

    def __init__(self) -> None:
        self.bytes = 0
        self._per_byte: float | None = None  # seconds

    def measured(self, written: WrittenCheckpoint) -> None:
        """Use the time of a written checkpoint."""
        self.bytes, self._per_byte = written.bytes, written.seconds / written.bytes

    def seconds(self, size: int) -> float | None:
        """Return an estimate of the seconds to write `size` bytes, None without a measurement."""
        return None if self._per_byte is None else size * self._per_byte

    def probe(self, folder: Path, size: int) -> float | None:
        """Write a sample to the disk if a checkpoint of `size` bytes could be slow; return the expected seconds."""
        if size < WORTH_PROBING:
            return None
        path = folder / ".probe.partial"
        data = os.urandom(SAMPLE)  # zeros would be compressed by some disks
        with contextlib.suppress(OSError):  # the first checkpoint will report the error
            folder.mkdir(exist_ok=True)
            start = time.perf_counter()
            with open(path, "wb", opener=opener) as file:
                hashlib.sha256(data)  # part of the time of a checkpoint
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._per_byte = (time.perf_counter() - start) / SAMPLE
        path.unlink(missing_ok=True)
        return self.seconds(size)
