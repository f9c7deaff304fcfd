"""The saver on a tiny model: what it writes while training goes on, and from which checkpoint a run resumes."""

from __future__ import annotations

import threading

import pytest
import torch

from factories import make_data, train_fields
from gpt2 import checkpoint
from gpt2.checkpoint import Copies, Saver, load_checkpoint
from gpt2.log import RunLog
from gpt2.model.registry import build_model
from gpt2.optim.optimizers import each
from kmatrix.errors import RecordError, is_full
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig
from reading import training_state, world
from recordings import read_jsonl


class Run:
    """A run without its loop: the first bias of the model counts the updates."""

    def __init__(self, folder, attempt=1, **fields):
        sha256 = make_data(folder / "data", train=2000, val=200)
        train = {"checkpoint_interval": 1, "keep_checkpoints": 3, "max_iters": 100, **fields}
        self.config = TrainConfig.from_json(train_fields(folder / "data", sha256, **train))
        self.model = build_model(self.config)
        self.log = RunLog(RunDir(folder), "0123456789", attempt, main=True)
        self.log.config, self.log.world = self.config, world()
        state = training_state(self.config, self.model, stateful={"log": self.log})
        self.saver = Saver(state, self.log)
        self.folder = folder / "checkpoints"

    def set_updates(self, step):
        """Set the run to the state after this many updates, and return its saver."""
        self.log.step = step
        self.model.ln_f.bias.data[0] = step
        return self.saver

    def save(self, step, loss=None, **options):
        self.set_updates(step)
        if loss is not None:
            self.log.validation(step, loss, {}, None)
        self.saver.save(**options)
        self.saver.wait()
        return self

    def next_attempt(self, resume="auto"):
        """Return the next attempt of the same run, restored from its checkpoints."""
        run = Run(self.log.dir.path, attempt=self.log.attempt + 1)
        run.saver.resume(resume)
        assert run.model.ln_f.bias[0] == run.log.step
        return run

    @property
    def steps(self):
        return [item.step for item in self.saver.checkpoints.all()]

    @property
    def events(self):
        return [event["event"] for event in read_jsonl(self.log.dir.events)]


def no_space(value, file):
    """Write to a full disk: a partial file remains, and torch reports another error while it handles the disk's."""
    file.write(b"half")
    try:
        raise OSError(28, "No space left on device")
    except OSError:
        raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904  (as torch does)


def test_a_checkpoint_is_due_at_its_interval_and_wanted_if_it_is_the_best(tmp_path):
    run = Run(tmp_path, checkpoint_interval=4)
    assert [step for step in range(9) if run.saver.due(step)] == [4, 8]
    for step, loss in ((2, 3.0), (3, 2.0), (5, 2.5)):
        run.log.validation(step, loss, {}, None)
        assert run.saver.wanted(step) == (loss != 2.5)
    assert not Run(tmp_path, checkpoint_interval=0).saver.due(4)


@pytest.mark.process
def test_training_continues_during_a_write_and_the_file_has_the_earlier_state(tmp_path, monkeypatch):
    go, save = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *arguments: go.wait(60) and save(*arguments))
    run = Run(tmp_path)
    run.set_updates(3).save()
    run.set_updates(4)  # the call returned before the write, and training continues
    assert run.steps == []
    go.set()
    run.saver.wait()
    value = load_checkpoint(run.folder / "step_00000003.pt")
    assert value["model"]["ln_f.bias"][0] == value["step"] == 3


@pytest.mark.process
def test_a_second_save_of_a_step_only_changes_its_description(tmp_path):
    run = Run(tmp_path).save(5)
    run.save(5, loss=3.25, final=True)
    (item,) = run.saver.checkpoints.all()
    assert (item.val_loss, item.final, run.events) == (3.25, True, ["checkpoint"])
    assert run.next_attempt().save(5).events == ["checkpoint", "resume"]
    assert run.saver.checkpoints.final().step == 5


@pytest.mark.process
@pytest.mark.parametrize(("interval", "kept"), [(1, [3, 8, 9, 10]), (0, [3, 10])])
def test_the_newest_and_the_best_are_kept(tmp_path, interval, kept):
    run = Run(tmp_path, checkpoint_interval=interval)
    for step in range(1, 11):
        run.save(step, loss=2.0 if step == 3 else 3.0)
    assert run.steps == kept


@pytest.mark.process
def test_a_failed_save_is_an_event_and_that_of_a_finished_run_an_error(tmp_path, monkeypatch):
    run = Run(tmp_path).save(1)
    monkeypatch.setattr(torch, "save", no_space)
    run.save(2)
    assert run.events == ["checkpoint", "checkpoint failed"]
    with pytest.raises(RecordError, match=r"(?s)step 3 could not be written.*No space left on device") as raised:
        run.save(3, final=True)
    assert is_full(raised.value)
    run.set_updates(4).stop()
    assert run.events[-1] == "checkpoint failed"
    assert {path.name for path in run.folder.iterdir()} == {"step_00000001.pt", "step_00000001.json"}


@pytest.mark.process
def test_a_stop_saves_unless_the_last_save_took_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "STOP_S", -1.0)
    run = Run(tmp_path)
    for step in (3, 5):  # without any checkpoint it is tried anyway
        run.set_updates(step).stop()
    assert (run.steps, run.events) == ([3], ["checkpoint", "checkpoint left out"])
    monkeypatch.undo()
    run.set_updates(5).stop()
    assert run.next_attempt().log.step == 5


@pytest.mark.process
@pytest.mark.parametrize("harm", ["cut short", "changed", "gone"])
def test_the_checkpoint_before_a_damaged_one_is_used_and_reported(tmp_path, harm):
    run = Run(tmp_path).save(1).save(2)
    path = run.folder / "step_00000002.pt"
    data = path.read_bytes()
    half = len(data) // 2
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:half] if harm == "cut short" else data[:half] + b"x" + data[half + 1 :])
    assert run.next_attempt().steps == [1]
    assert ("checkpoint refused" in run.events) == (harm != "gone")
    assert path.with_name("step_00000002.pt.damaged").exists() == (harm != "gone")


@pytest.mark.process
def test_auto_latest_best_and_a_path_select_a_checkpoint(tmp_path):
    run = Run(tmp_path).save(1).save(2, loss=2.0).save(3)
    for how, step in (("latest", 3), ("best", 2), (str(run.folder / "step_00000001.pt"), 1), ("none", 0)):
        assert run.next_attempt(how).log.step == step
    with pytest.raises(RecordError, match="is missing"):
        run.next_attempt(str(run.folder / "none.pt"))
    for path in run.folder.glob("step_*.pt"):
        path.write_bytes(b"nothing")
    for how in ("best", "latest"):
        with pytest.raises(RecordError, match="has no checkpoint to resume from"):
            run.next_attempt(how)
    assert run.next_attempt("auto").log.step == 0


def test_copies_are_equal_keep_the_order_of_memory_and_use_it_again():
    def leaves(value):
        found = []
        each(value, found.append)
        return found

    value = {"a": torch.randn(5, 7), "b": [torch.arange(4), (torch.randn(6, 4).T, torch.randn(4, 4)[:, ::2])]}
    copies = Copies()
    first = leaves(copies.of(value))
    for copy, original in zip(first, leaves(value), strict=True):
        assert torch.equal(copy, original)
        assert copy.stride() == torch.empty_like(original).stride()  # SOAP goes on with the same numbers
        assert copy.data_ptr() != original.data_ptr()
    value["a"] += 1
    second = leaves(copies.of(value | {"new": torch.ones(5, 7)}))
    assert [copy.data_ptr() for copy in second[:-1]] == [copy.data_ptr() for copy in first]
    assert torch.equal(second[0], value["a"])
