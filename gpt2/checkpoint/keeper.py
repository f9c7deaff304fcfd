"""When a run is saved, what stays of it, and where it goes on: the checkpoints of one attempt."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint import choose, rng, speed
from gpt2.checkpoint.copies import Copies, size_of
from gpt2.checkpoint.files import Written, load, save
from gpt2.checkpoint.state import Parts, restore, state
from gpt2.log import RunLog
from kmatrix.errors import FullError, KmatrixError, RecordError
from kmatrix.records.checkpoints import AGES, INDEX, Entry, Kind, Shelf, aged, same, sha256_of

EMERGENCY_S = 20.0  # torchrun kills 30 s after it passed a signal on; the step must end and the result be written too
MIB = 2**20
WRITE_RATE = 100e6  # bytes a second, until one was written


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the index says of a checkpoint that is about to be written."""

    step: int
    kinds: frozenset[Kind]
    val_loss: float | None


class Keeper:
    """Saves and restores the parts of training. Every rank calls the same methods; rank 0 has the folder.

    Writing goes on beside the training, at most one checkpoint at a time. One that fails is an event, unless the
    caller waits for it.
    """

    def __init__(self, parts: Parts, log: RunLog) -> None:
        self.parts, self.log, self.config = parts, log, parts.config
        self.folder = Path(self.config.checkpoint_dir)
        self._resumed = 0  # the step at which this attempt began: its checkpoint is there
        self._names: dict[int, str] = {}  # what holds the weights of a step, as this attempt has them
        self._pool = ThreadPoolExecutor(1, "checkpoints")
        self._writing: Future[None] | None = None
        self._copies = Copies()
        self._speed = speed.Speed()
        if parts.world.main:
            self.shelf = self._open()

    # Saving

    def due(self, step: int) -> bool:
        """Whether a periodic checkpoint belongs before this step."""
        interval = self.config.checkpoint_interval
        return bool(interval) and step > self._resumed and step % interval == 0

    def reasons(self, *, finished: bool = False) -> list[Kind]:
        """Return why the run is to be saved as it is now, after what there is to evaluate was evaluated."""
        step = self.log.step
        because = {
            Kind.ROLLING: self.due(step),
            Kind.BEST: self.config.save_best and step > self._resumed and self.log.is_best(step),
            Kind.FINAL: finished and self.config.save_checkpoint,
        }
        return [kind for kind, holds in because.items() if holds]

    def save(self, *kinds: Kind, wait: bool = False) -> None:
        """Keep the run as it is after log.step updates, for these reasons; without a reason, do nothing.

        wait: return when it is on the disk, and raise RecordError when that failed.
        """
        if not kinds:
            return
        states = rng.gathered(self.parts.world)
        if self.parts.world.main:
            self._save(frozenset(kinds), states, wait=wait)

    def emergency(self) -> None:
        """Save at a stop, where there is time for it before torchrun kills; else say which one is relied on.

        Where there is none to rely on it is tried all the same: being killed at it damages nothing.
        One that fails is an event: the run is stopped, and goes on from the one before.
        """
        states = rng.gathered(self.parts.world)
        if not self.parts.world.main:
            return
        busy = self._writing is not None and not self._writing.done()
        seconds = self._speed.seconds(self._expected_bytes() * (2 if busy else 1))
        self.wait()
        if seconds is None or seconds <= EMERGENCY_S or not self.shelf.present:
            self._try(lambda: self._save(frozenset({Kind.EMERGENCY}), states, wait=True), self.log.step)
            return
        newest = self.shelf.present[-1].name
        why = f"it would take about {seconds:.0f} s, torchrun waits 30: the newest is {newest}"
        self.log.event(self.log.step, "checkpoint left out", why)

    def final_s(self) -> float:
        """Return about how long the last checkpoint will take, in seconds, after one that may be under way."""
        if not (self.config.save_checkpoint or self.config.save_best):
            return 0.0
        size = self._expected_bytes()
        seconds = self._speed.seconds(size)
        under_way = self._writing is not None and not self._writing.done()
        return (size / WRITE_RATE if seconds is None else seconds) * (2 if under_way else 1)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    # Going on

    def resume(self, how: str) -> None:
        """Go on from a checkpoint, or begin at the start: see gpt2/checkpoint/choose.py."""
        chosen = self._choose(how)
        if chosen:
            self._go_on(*chosen)
        else:
            self.log.resumed(0)

    def go_back(self) -> bool:
        """Put all parts back to the newest checkpoint; False where there is none. The data are to be sought anew."""
        if self.parts.world.main:
            self.wait()
        chosen = self._choose(choose.AUTO)
        if chosen:
            self._go_on(*chosen)
        return chosen is not None

    def _go_on(self, path: Path, value: dict[str, Any]) -> None:
        for note in restore(value, self.parts):
            self.log.say(f"Note: {note}")
        step = self._resumed = self.log.step = int(value["step"])
        self._names = {known: name for known, name in self._names.items() if known < step}
        if path.parent == self.folder:
            self._names[step] = path.name
        self.log.resumed(step)
        another = "" if value["run_id"] == self.log.run_id else f", of the run {value['run_id']}"
        self.log.event(step, "resume", f"from {path}, step {step} of {self.config.max_iters}{another}")

    def forecast(self) -> None:
        """Say what checkpoints will take, of the disk and of the time after a stop. Raises RecordError without room."""
        if not self.parts.world.main or not self._saves():
            return
        each, free = self._expected_bytes(), self._free()
        most = self.config.keep_checkpoints + 2 if self.config.checkpoint_interval else 2
        self.log.say(
            f"Checkpoints: about {each / MIB:.0f} MiB each, {most} at most besides those kept for good, in "
            f"{self.folder} ({free / MIB:.0f} MiB free)"
        )
        if free < each and not self.shelf.present:
            raise self._no_room(each, free)
        if free < most * each:
            self.log.event(self.log.step, "disk", f"{free / MIB:.0f} MiB free: room for {free // each} checkpoints")
        seconds = self._speed.probe(self.folder, each)
        if seconds is not None and seconds > EMERGENCY_S:
            self.log.event(
                self.log.step,
                "slow disk",
                f"a checkpoint takes about {seconds:.0f} s: a stop relies on the newest periodic one",
            )

    # Rank 0 alone

    def _save(self, reasons: frozenset[Kind], states: list[dict[str, Any]], *, wait: bool) -> None:
        """Write what there is now; where it was written already, give that file the further reasons."""
        step = self.log.step
        if self.config.keep_every and Kind.ROLLING in reasons and step % self.config.keep_every == 0:
            reasons |= {Kind.KEPT}
        self.wait()
        if there := next((e for e in self.shelf.present if e.name == self._names.get(step)), None):
            self.shelf.mark(there, reasons)
            self._retire()
            return
        value = state(self.parts, step=step, run_id=self.log.run_id, rng=states)
        about = About(step=step, kinds=reasons, val_loss=self.log.last_val_loss)
        if wait:
            self._put(value, about)
        elif not self.config.async_checkpoint:
            self._try(lambda: self._put(value, about), step)
        else:
            value, ready = self._copies.of(value), self._copies_done()
            self._writing = self._pool.submit(self._try, lambda: self._put(value, about, ready), step)

    def _saves(self) -> bool:
        return self.config.save_checkpoint or self.config.save_best or bool(self.config.checkpoint_interval)

    def _put(self, value: dict[str, Any], about: About, ready: Callable[[], None] | None = None) -> None:
        """Write one checkpoint, and let those go that it makes old."""
        if ready:
            ready()
        self._make_room(size_of(value) + MIB)
        path = self._unused(about.step)
        written = save(path, value, lambda written: self._announce(path.name, about, written))
        self._speed.measured(written)
        self._names[about.step] = path.name
        for entry in [e for e in self.shelf.entries if e.step == about.step and e.name != path.name]:
            self.shelf.remove(entry)  # of an earlier attempt, and no more than what was just written
        self._retire()
        self.log.event(about.step, "checkpoint", str(path))

    def _announce(self, name: str, about: About, written: Written) -> None:
        self.shelf.announce(
            Entry(
                name=name,
                step=about.step,
                kinds=about.kinds,
                bytes=written.bytes,
                sha256=written.sha256,
                val_loss=about.val_loss,
                attempt=self.log.attempt,
                time=time.time(),
            )
        )

    def _retire(self) -> None:
        """Remove what newer ones have replaced, and name the best and the final one."""
        for entry in aged(self.shelf.entries, self.config.keep_checkpoints):
            self.shelf.remove(entry)
        self.shelf.name_links()

    def _try(self, put: Callable[[], None], step: int) -> None:
        """Write; an error is an event, and what called goes on."""
        try:
            put()
        except RecordError as error:
            self.log.event(step, "checkpoint failed", f"{error.what}: {error.why}")
        except OSError as error:  # of the index; the files are whole, and the next attempt puts it right
            self.log.event(step, "checkpoint failed", str(error))

    def _unused(self, step: int) -> Path:
        """Return a name that no file has: one that is there is never written over."""
        path = self.folder / f"step_{step:08d}.pt"
        number = 1
        while path.exists():
            number += 1
            path = self.folder / f"step_{step:08d}_{number}.pt"
        return path

    def _make_room(self, needed: int) -> None:
        """Remove the oldest of those that go anyway, until there is room; never the last one that is there."""
        while (free := self._free()) < needed:
            going = [entry for entry in self.shelf.present if entry.kinds <= AGES]
            if not going or len(self.shelf.present) < 2:
                raise self._no_room(needed, free)
            self.log.event(self.log.step, "disk", f"{free / MIB:.0f} MiB free: {going[0].name} makes room")
            self.shelf.remove(going[0])

    def _no_room(self, needed: int, free: int) -> FullError:
        return FullError(
            f"{self.folder} has no room for a checkpoint",
            why=f"it takes {needed / MIB:.0f} MiB, and {free / MIB:.0f} MiB are free",
            fix="make room there, or set CHECKPOINT_DIR to another disk",
        )

    def _free(self) -> int:
        """Return the bytes that are free where checkpoints lie."""
        place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(place).free

    def _expected_bytes(self) -> int:
        """Return about how large a checkpoint is: weights and two numbers for each, as AdamW has them."""
        if self._speed.bytes:
            return self._speed.bytes
        return 3 * size_of(dict(self.parts.model.named_parameters())) + MIB

    def _open(self) -> Shelf:
        """Return the folder as it is after a crash at any moment: no halves, no entries without a file."""
        try:
            shelf = Shelf(self.folder)
        except KmatrixError as error:
            (self.folder / INDEX).replace(self.folder / f"{INDEX}.damaged")
            self.log.event(0, "checkpoint index", f"{error.what}; it is put aside as {INDEX}.damaged")
            shelf = Shelf(self.folder)
        if gone := shelf.tidy():
            self.log.event(0, "checkpoint index", f"no file is there of {', '.join(gone)}")
        for path in sorted(set(self.folder.glob("step_*.pt")) - {self.folder / name for name in shelf.names}):
            self._adopt(shelf, path)
        return shelf

    def _adopt(self, shelf: Shelf, path: Path) -> None:
        """Take a checkpoint into the index that lost it, if it can be read."""
        try:
            value = load(path, verify=False)
        except KmatrixError as error:
            self.log.event(0, "checkpoint refused", f"{error.what}: {error.why}")
            return
        stat = path.stat()
        kinds = [kind for kind in Kind if same(self.folder / f"{kind}.pt", path)] or [Kind.ROLLING]
        shelf.announce(
            Entry(
                name=path.name,
                step=int(value["step"]),
                kinds=frozenset(kinds),
                bytes=stat.st_size,
                sha256=sha256_of(path),
                val_loss=None,
                attempt=0,
                time=stat.st_mtime,
            )
        )
        self.log.event(0, "checkpoint index", f"{path.name} is taken into it")

    def _choose(self, how: str) -> choose.Chosen | None:
        """Let rank 0 choose, verify and read, and give every rank the same."""
        world, chosen = self.parts.world, None
        answer: list[Any] = [None, None]  # the path, or what, why and fix of an error
        if world.main:
            try:
                chosen = choose.choose(how, self.shelf, lambda text: self.log.event(0, "checkpoint refused", text))
                answer[0] = str(chosen[0]) if chosen else None
            except RecordError as error:
                answer[1] = (error.what, error.why, error.fix)
        if world.size > 1:
            torch.distributed.broadcast_object_list(answer, src=0)
        path, refused = answer
        if refused:
            raise RecordError(refused[0], why=refused[1], fix=refused[2])
        if path and not world.main:
            chosen = Path(path), load(Path(path), verify=False)
        return chosen

    def _copies_done(self) -> Callable[[], None] | None:
        """Return what waits until the GPU has made the copies that were asked for; None on the CPU."""
        if self.parts.world.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
        event.record()
        return event.synchronize
