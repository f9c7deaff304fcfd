"""Read shards while they are prepared: the same tokens as finished ones, on all ranks, and a stop while waiting."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from factories import make_data, prepare, train_fields
from gpt2.data import batches as module
from gpt2.data.batches import Batches, check_data
from gpt2.prepare.dataset import prepare_for
from kmatrix.errors import DataError
from kmatrix.records.dataset import sha256_of_reading
from kmatrix.records.train_config import TrainConfig
from reading import batches_at, world

STEP = 4  # sequences
WORDS = ["rain", "sun", "tree", "river", "stone", "cloud", "light", "wind", "road", "sea"]


@pytest.fixture
def notes(tmp_path):
    """A folder of 60 texts, about 10,000 bytes."""
    folder = tmp_path / "notes"
    folder.mkdir()
    rng = random.Random(0)
    for number in range(60):
        (folder / f"{number:03}.txt").write_text(" ".join(rng.choices(WORDS, k=rng.randint(5, 60))) + f" {number}")
    return folder


def streamed(data_dir, notes, dataset="folder", **fields):
    """Prepare the first shard of a folder of text, or of a mix with one. Return the configuration of a run on it."""
    source = {"data_path": str(notes)}
    if dataset == "mix":
        make_data(data_dir / "other", train=3000)
        source = {"mix": f"folder={notes}:3 shards=other:1"}
    found = prepare(dataset, data_dir, streaming=True, shard_tokens=1000, val_percent=20, **source)
    values = {"data_streaming": True, "batch_size": STEP, "max_iters": 60, "data_shards": found["shards"], **fields}
    config = TrainConfig.from_json(train_fields(Path(found["path"]), "", dataset=dataset, **values))
    config = replace(config, data_sha256=sha256_of_reading(found["sha256"], config))
    assert config.data_sha256 != found["sha256"]  # other data than the same shards in another order
    check_data(config)
    return config


def rows(batches, steps):
    found = []
    for _ in range(steps):
        assert batches.wait(lambda: False, print) is not None
        found += batches.next()[0].tolist()
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_iters": 140},  # over the end of the text
        {"data_layout": "bestfit"},
        {"data_tokens": 3000},  # the first shards, again and again
        {"dataset": "mix"},
    ],
)
def test_a_run_reads_growing_data_as_it_reads_finished_ones(tmp_path, monkeypatch, notes, fields):
    config = streamed(tmp_path / "data", notes, **fields)
    (folder,) = (tmp_path / "data").glob("folder-*")
    assert len(list(folder.glob("*.bin"))) == 2  # the first one, and that for validation
    waits, more = [], 1200 if fields.get("dataset") else 900  # tokens: three quarters of a mix are of the folder

    def wait(_):
        """Prepare one more shard each time that the run waits."""
        waits.append(len(list(folder.glob("*_train_*.bin"))))
        prepare_for(replace(config, data_tokens=more * (waits[-1] + 1)))

    monkeypatch.setattr(module.time, "sleep", wait)
    growing = rows(Batches(config, world()), config.max_iters)
    assert len(waits) > 1
    finished = streamed(tmp_path / "finished", notes, **fields)
    prepare_for(finished)
    assert growing == rows(Batches(finished, world()), config.max_iters)
    assert rows(batches_at(config, 30), 5) == growing[30 * STEP : 35 * STEP]  # a resumed run


def test_ranks_take_what_all_of_them_see_and_a_stop_of_one_ends_a_wait_that_is_logged(tmp_path, monkeypatch, notes):
    config = streamed(tmp_path / "data", notes)
    prepare_for(config)
    batches, lines = batches_at(config, config.max_iters - 1), []
    other = iter([([(2, False)], False), ([(2, False)], True)])  # another node sees a new file later
    monkeypatch.setattr(module, "gather", lambda _, mine: [mine, next(other)])
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.setattr(module, "SAY_S", 0.0)
    assert batches.wait(lambda: False, lines.append) is None
    assert len(batches.windows[0].paths) == 2
    assert lines == ["Data: waiting for shard 3 of folder, which is prepared now"]
    monkeypatch.undo()
    assert batches.wait(lambda: True, print) is None


def test_a_replaced_shard_and_a_text_that_changed_meanwhile_are_refused(tmp_path, notes):
    config = streamed(tmp_path / "data", notes)
    prepare_for(config)
    path = Path(config.data_path, "folder_train_000002.bin")
    path.write_bytes(path.read_bytes()[:-2] + b"\1\1")
    with pytest.raises(DataError, match=rf"{path} changed after the data were prepared"):
        rows(Batches(config, world()), 30)
    (notes / "000.txt").write_text("Something else.")
    with pytest.raises(DataError, match="has changed while runs read it"):
        prepare_for(config)
