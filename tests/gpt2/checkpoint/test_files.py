"""Checkpoints are complete or absent, and sufficient to resume."""

from __future__ import annotations

import pytest
import torch

from factories import make_data, train_fields
from gpt2.checkpoint.files import load_checkpoint, save_checkpoint
from gpt2.checkpoint.state import TrainingState, snapshot
from gpt2.data.batches import Batches
from gpt2.dist import World
from gpt2.loop import schedule
from gpt2.optim.builders import build_optimizers
from gpt2.train import build_model
from kmatrix.errors import RecordError
from kmatrix.records.train_config import TrainConfig

WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
VALUE = {
    **{"schema": 2, "run_id": "a", "step": 3, "tokens": 0, "config": {}},
    **{"model": {}, "optimizer": {}, "rng": [], "carried": {}},
}


def train_steps(config, model, optimizers, first, last):
    """Train the steps from `first` to before `last`, without the logging of the loop, and return the losses."""
    batches, losses = Batches(config, WORLD, start_step=first), []
    for step in range(first, last):
        optimizers.set_scale(schedule.scale(config, step))
        _, loss = model(*batches.next())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "adamw"},
        {"optimizer": "sgd", "sgd_momentum": 0.9, "sgd_nesterov": False},
    ],
)
def test_a_checkpoint_contains_all_state_that_a_bit_exact_resume_needs(tmp_path, optimizer):
    sha256 = make_data(tmp_path)
    config = TrainConfig.from_json(train_fields(tmp_path, sha256, **optimizer))
    model = build_model(config)
    optimizers = build_optimizers(config, model)
    train_steps(config, model, optimizers, 0, 4)
    parts = TrainingState(config=config, world=WORLD, model=model, optimizers=optimizers)
    save_checkpoint(tmp_path / "c.pt", snapshot(parts, step=4, run_id="a", rng=[]))
    uninterrupted = train_steps(config, model, optimizers, 4, 8)

    loaded = load_checkpoint(tmp_path / "c.pt")
    config_read = TrainConfig.from_json(loaded["config"])
    resumed = build_model(config_read)
    resumed.load_state_dict(loaded["model"])
    optimizers = build_optimizers(config_read, resumed)
    optimizers.load_state_dict(loaded["optimizer"])
    assert train_steps(config_read, resumed, optimizers, loaded["step"], 8) == uninterrupted
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    assert loaded["tokens"] == 4 * config.tokens_per_step


def test_a_failed_save_keeps_the_previous_checkpoint_and_leaves_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    save_checkpoint(path, VALUE)

    def raise_disk_full(value, file):
        file.write(b"half")
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904  (as torch does)

    monkeypatch.setattr(torch, "save", raise_disk_full)
    with pytest.raises(RecordError, match=r"last.pt could not be written") as raised:
        save_checkpoint(path, {**VALUE, "step": 4})
    assert "No space left on device" in raised.value.why
    assert load_checkpoint(path)["step"] == 3
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_leftovers_of_a_killed_save_do_not_prevent_the_next_one(tmp_path):
    (tmp_path / ".last.pt.partial").write_bytes(b"half")
    save_checkpoint(tmp_path / "last.pt", VALUE)
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("size", [0, 10, 500])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, size):
    path = tmp_path / "final.pt"
    save_checkpoint(path, {**VALUE, "model": {"w": torch.zeros(1000)}})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RecordError, match=r"final.pt is damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "value, message",
    [
        ({**VALUE, "schema": 3}, "has schema 3"),
        ({"schema": 2, "step": 3}, "is damaged"),
        ([1, 2], "is not a checkpoint of kmatrix"),
    ],
)
def test_a_file_that_is_not_our_checkpoint_is_refused(tmp_path, value, message):
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(RecordError, match=message):
        load_checkpoint(tmp_path / "x.pt")


def test_a_missing_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(RecordError, match=r"none.pt is missing"):
        load_checkpoint(tmp_path / "none.pt")
