"""CheckpointManager on a tiny model: when it saves, what it keeps, and from which checkpoint it resumes."""

from __future__ import annotations

import os
import shutil
import threading
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from factories import make_data, train_fields
from gpt2.checkpoint import manager
from gpt2.checkpoint.files import WrittenCheckpoint, load_checkpoint, save_checkpoint
from gpt2.checkpoint.manager import CheckpointManager
from gpt2.checkpoint.state import TrainingState, restore
from gpt2.dist import World
from gpt2.log import RunLog
from gpt2.optim.builders import build_optimizers
from gpt2.train import build_model
from kmatrix.errors import RecordError
from kmatrix.records.checkpoints import CheckpointKind, read_index
from kmatrix.records.files import read_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig

pytestmark = pytest.mark.process

WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
Disk = namedtuple("Disk", "total used free")


class Run:
    """A run without its loop: the first bias of the model counts the updates."""

    def __init__(self, folder, attempt=1, world=WORLD, **fields):
        sha256 = make_data(folder / "data", train=2000, val=200)
        train = {"checkpoint_interval": 1, "keep_checkpoints": 3, "max_iters": 100, **fields}
        self.config = TrainConfig.from_json(train_fields(folder / "data", sha256, **train))
        self.model = build_model(self.config)
        self.log = RunLog(RunDir(folder), "0123456789", attempt, main=True)
        self.log.config = self.config
        optimizers = build_optimizers(self.config, self.model)
        self.parts = TrainingState(
            config=self.config, world=world, model=self.model, optimizers=optimizers, stateful={"log": self.log}
        )
        self.checkpoints = CheckpointManager(self.parts, self.log)
        self.folder = folder / "checkpoints"

    @property
    def first_bias(self):
        return self.model.ln_f.bias.data[0].item()

    def set_updates(self, step):
        """Set the run to the state after this many updates."""
        self.log.step = step
        self.model.ln_f.bias.data[0] = step
        return self

    def save(self, step, *kinds, **options):
        self.set_updates(step).checkpoints.save(*(kinds or [CheckpointKind.ROLLING]), **options)
        self.checkpoints.wait()
        return self

    def next_attempt(self, resume="auto", **fields):
        """Return the next attempt of the same run, restored from its checkpoints."""
        run = Run(self.log.dir.path, attempt=self.log.attempt + 1, **fields)
        run.checkpoints.resume(resume)
        return run

    @property
    def steps(self):
        return [entry.step for entry in read_index(self.folder)]

    @property
    def events(self):
        return [event["event"] for event in read_jsonl(self.log.dir.events)]


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    run = Run(tmp_path)
    for step in range(1, 11):
        run.save(step, *([CheckpointKind.ROLLING, CheckpointKind.BEST] if step == 3 else [CheckpointKind.ROLLING]))
    assert run.steps == [3, 8, 9, 10]
    names = {path.name for path in run.folder.iterdir()}
    assert names == {"index.json", "best.pt", *(f"step_{step:08d}.pt" for step in run.steps)}


def test_two_reasons_at_one_step_give_one_file(tmp_path):
    run = Run(tmp_path).save(5, CheckpointKind.ROLLING).save(5, CheckpointKind.FINAL, CheckpointKind.BEST, wait=True)
    (entry,) = read_index(run.folder)
    assert entry.kinds == {CheckpointKind.ROLLING, CheckpointKind.FINAL, CheckpointKind.BEST}
    assert run.events == ["checkpoint"]


def test_training_continues_during_a_write_and_the_file_has_the_earlier_state(tmp_path, monkeypatch):
    go, save = threading.Event(), save_checkpoint

    def slow_write(*arguments):
        assert go.wait(60)
        return save(*arguments)

    monkeypatch.setattr(manager, "save_checkpoint", slow_write)
    run = Run(tmp_path)
    run.set_updates(3).checkpoints.save(CheckpointKind.ROLLING)
    run.set_updates(4)  # the call returned before the write, and training continues
    assert run.steps == []
    go.set()
    run.checkpoints.wait()
    value = load_checkpoint(run.folder / "step_00000003.pt")
    assert value["model"]["ln_f.bias"][0] == value["step"] == 3


def test_a_failed_periodic_save_is_an_event_and_a_failed_blocking_save_an_error(tmp_path, monkeypatch):
    def raise_disk_full(value, file):
        # Leave a partial file, as a write that runs out of space does.
        file.write(b"half")
        raise OSError(28, "No space left on device")

    run = Run(tmp_path).save(1)
    monkeypatch.setattr(torch, "save", raise_disk_full)
    run.save(2)
    assert run.events == ["checkpoint", "checkpoint failed"]
    with pytest.raises(RecordError, match="could not be written"):
        run.save(3, CheckpointKind.FINAL, wait=True)
    assert run.steps == [1]
    assert load_checkpoint(run.folder / "step_00000001.pt")["step"] == 1


def test_a_full_disk_deletes_the_oldest_first_and_never_the_last(tmp_path, monkeypatch):
    run = Run(tmp_path).save(1).save(2).save(3)
    size = read_index(run.folder)[0].bytes
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Disk(0, 0, 4 * 2**20 - size * len(run.checkpoints.index.present))
    )
    # With this reserve, two of the tiny checkpoints fit on the fake disk.
    monkeypatch.setattr(manager, "MIB", 4 * 2**20 - 2 * size)
    run.save(4)
    assert run.steps == [3, 4]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, 0))
    run.save(5)
    assert run.steps == [4]
    assert run.events[-1] == "checkpoint failed"
    with pytest.raises(RecordError, match="has no space for a checkpoint"):
        run.save(6, CheckpointKind.FINAL, wait=True)


def test_a_disk_without_space_for_one_checkpoint_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, 1000))
    with pytest.raises(RecordError, match="has no space for a checkpoint"):
        Run(tmp_path).checkpoints.forecast()


def test_a_stop_saves_a_checkpoint_and_the_next_attempt_resumes_from_it(tmp_path):
    run = Run(tmp_path).save(3)
    run.set_updates(5).checkpoints.emergency()
    assert [entry.kinds for entry in read_index(run.folder)] == [{CheckpointKind.ROLLING}, {CheckpointKind.EMERGENCY}]
    next_attempt = run.next_attempt()
    assert (next_attempt.log.step, next_attempt.first_bias) == (5, 5)
    next_attempt.save(6)
    assert next_attempt.steps == [3, 6]


def test_a_stop_relies_on_the_newest_checkpoint_if_a_save_would_take_too_long(tmp_path):
    run = Run(tmp_path).save(3)
    size = read_index(run.folder)[0].bytes
    run.checkpoints._speed.measured(WrittenCheckpoint(bytes=size, sha256="", seconds=21.0))
    run.set_updates(5).checkpoints.emergency()
    assert run.steps == [3]
    (event,) = (e for e in read_jsonl(run.log.dir.events) if e["event"] == "checkpoint left out")
    assert "about 21 s" in event["text"]
    assert "step_00000003.pt" in event["text"]


def test_a_stop_saves_anyway_if_there_is_no_checkpoint(tmp_path):
    run = Run(tmp_path)
    run.checkpoints._speed.measured(WrittenCheckpoint(bytes=1, sha256="", seconds=21.0))
    run.set_updates(5).checkpoints.emergency()
    assert run.steps == [5]


def test_a_stop_without_a_successful_save_is_still_a_stop(tmp_path, monkeypatch):
    run = Run(tmp_path).save(3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, 0))
    run.set_updates(5).checkpoints.emergency()
    assert run.events[-1] == "checkpoint failed"


@pytest.mark.parametrize("harm", ["cut short", "tampered with", "gone"])
def test_the_checkpoint_before_a_damaged_one_is_used_and_reported(tmp_path, harm):
    run = Run(tmp_path).save(1).save(2)
    path = run.folder / "step_00000002.pt"
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        half = len(data) // 2
        path.write_bytes(data[:half] if harm == "cut short" else data[:half] + b"x" + data[half + 1 :])
    next_attempt = run.next_attempt()
    assert (next_attempt.log.step, next_attempt.first_bias) == (1, 1)
    messages = " ".join(event["text"] for event in read_jsonl(run.log.dir.events))
    assert "step_00000002.pt" in messages
    assert (run.folder / "step_00000002.pt.damaged").exists() == (harm != "gone")
    assert next_attempt.steps == [1]


def test_if_all_are_damaged_auto_starts_from_scratch_and_latest_is_refused(tmp_path):
    run = Run(tmp_path).save(1).save(2)
    for path in run.folder.glob("step_*.pt"):
        path.write_bytes(b"nothing")
    assert run.next_attempt("auto").log.step == 0
    with pytest.raises(RecordError, match="has no checkpoint to resume from"):
        run.next_attempt("latest")


def test_best_and_an_explicit_path_select_that_checkpoint(tmp_path):
    run = Run(tmp_path).save(1).save(2, CheckpointKind.BEST).save(3)
    assert run.next_attempt("best").log.step == 2
    assert run.next_attempt(str(run.folder / "step_00000001.pt")).log.step == 1
    assert run.next_attempt("latest").log.step == 3
    with pytest.raises(RecordError, match="is missing"):
        run.next_attempt(str(run.folder / "none.pt"))


def test_after_a_resume_from_an_earlier_one_the_newest_is_the_last_written(tmp_path):
    run = Run(tmp_path).save(1).save(2).save(3)
    next_attempt = run.next_attempt(str(run.folder / "step_00000001.pt")).save(2)
    assert next_attempt.steps == [1, 3, 2]
    assert next_attempt.next_attempt("latest").log.step == 2


def test_a_missing_index_is_rebuilt_from_the_files(tmp_path):
    run = Run(tmp_path).save(1).save(2, CheckpointKind.ROLLING, CheckpointKind.BEST)
    (run.folder / "index.json").unlink()
    next_attempt = run.next_attempt()
    assert (next_attempt.log.step, next_attempt.steps) == (2, [1, 2])
    assert read_index(run.folder)[1].kinds == {CheckpointKind.BEST}


def test_a_damaged_index_is_archived(tmp_path):
    run = Run(tmp_path).save(1)
    (run.folder / "index.json").write_text("{")
    assert run.next_attempt().log.step == 1
    assert (run.folder / "index.json.damaged").read_text() == "{"


def test_a_kill_at_any_point_of_a_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    """What is on the disk at each point is what the next process finds after kill -9 at that point."""
    run = Run(tmp_path, keep_checkpoints=1).save(1)
    operations = []

    def snapshot(*_):
        operations.append(tmp_path / f"killed{len(operations)}")
        shutil.copytree(run.folder, operations[-1] / "checkpoints")

    # A kill between two of these calls leaves what the copy before the call contains.
    for owner, name in ((os, "fsync"), (os, "replace"), (type(tmp_path), "replace"), (type(tmp_path), "unlink")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, **k: (snapshot(), real(*a, **k))[1])
    run.save(2)
    monkeypatch.undo()
    assert len(operations) > 5
    for operation in operations:
        killed = Run(operation)
        killed.checkpoints.resume("latest")
        assert killed.log.step in (1, 2), operation
        assert killed.first_bias == killed.log.step


def test_a_checkpoint_of_another_configuration_is_refused_with_the_difference(tmp_path):
    run = Run(tmp_path).save(1)
    with pytest.raises(RecordError, match="belongs to another configuration") as raised:
        run.next_attempt(learning_rate=5e-4)
    assert "learning_rate was 0.001 and is 0.0005" in raised.value.why


def test_a_resume_with_another_number_of_ranks_keeps_the_data_and_reports_it(tmp_path, capsys):
    run = Run(tmp_path, batch_size=4).save(3)
    next_attempt = Run(tmp_path, 2, replace(WORLD, size=1), batch_size=2, gradient_accumulation=2)
    value = load_checkpoint(run.folder / "step_00000003.pt")
    notes = restore(value | {"rng": value["rng"] * 2}, next_attempt.parts)
    assert len(notes) == 1
    assert "the checkpoint has 2 ranks, this run 1: the data order continues exactly" in notes[0]
    assert next_attempt.config.global_batch == run.config.global_batch


def test_history_and_time_continue_and_later_lines_become_void(tmp_path):
    run = Run(tmp_path)
    run.log.world = WORLD
    for step in range(4):
        run.log.step = step
        run.log.validation(step, 4.0 - step / 10)
        if step == 2:
            run.save(2)
    next_attempt = run.next_attempt()
    assert [line["step"] for line in next_attempt.log.val] == [0, 1, 2]
    assert next_attempt.log.evaluated(2)
    assert next_attempt.log.before_s > 0
    metrics = list(read_jsonl(run.log.dir.metrics))
    assert metrics[-1]["resumed"]
    assert metrics[-1]["step"] == 2


def test_a_slow_disk_is_measured_and_reported_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "SAMPLE", 1000)
    monkeypatch.setattr(manager, "WORTH_PROBING", 2000)
    # Any measured speed is too slow for a limit of zero seconds.
    monkeypatch.setattr(manager, "EMERGENCY_S", 0.0)
    run = Run(tmp_path)
    run.checkpoints.forecast()
    assert run.events == ["slow disk"]
    assert not list(run.folder.glob(".probe*"))


def test_a_small_checkpoint_needs_no_measurement(tmp_path):
    assert manager.WriteSpeed().probe(tmp_path, 1000) is None
    assert list(tmp_path.iterdir()) == []


def test_an_index_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path):
    run = Run(tmp_path).save(1)
    text = (run.folder / "index.json").read_text().replace('"schema": 1', '"schema": 9')
    (run.folder / "index.json").write_text(text)
    with pytest.raises(RecordError, match="has schema 9"):
        Run(tmp_path, attempt=2)
    assert (run.folder / "index.json").read_text() == text


def test_a_damaged_file_never_replaces_one_that_was_kept_before(tmp_path):
    run = Run(tmp_path).save(1)
    for text in ("{", "["):
        (run.folder / "index.json").write_text(text)
        Run(tmp_path, attempt=2)
    kept = sorted(path.read_text() for path in run.folder.glob("index.json.damaged*"))
    assert kept == ["[", "{"]


def test_a_lost_entry_of_an_earlier_step_does_not_become_the_newest_checkpoint(tmp_path):
    run = Run(tmp_path).save(1).save(2).save(3)
    run.checkpoints.index.entries = run.checkpoints.index.entries[1:]
    run.checkpoints.index._write()
    os.utime(run.folder / "step_00000001.pt", (2**32, 2**32))  # written when the clock was ahead
    later = Run(tmp_path, attempt=2)
    assert [entry.step for entry in later.checkpoints.index.entries] == [1, 2, 3]
    assert later.next_attempt().first_bias == 3
