"""Read shards while they are prepared: the same tokens as finished ones, on all ranks, and a stop while waiting."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from factories import make_data, prepare, train_fields
from gpt2.data import batches as module
from gpt2.data.batches import Batches, current_sha256
from gpt2.prepare.dataset import prepare_for
from kmatrix.errors import DataError
from kmatrix.records.dataset import sha256_of_reading
from kmatrix.records.train_config import TrainConfig
from reading import batches_at, world

RECIPE = {"shard_tokens": 1000, "val_percent": 20}
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


def config_of(found, **overrides):
    values = {"data_streaming": True, "shard_tokens": 1000, "batch_size": STEP, "max_iters": 60, "dataset": "folder"}
    values |= {"data_shards": found["shards"], **overrides}
    config = TrainConfig.from_json(train_fields(Path(found["path"]), found["sha256"], **values))
    assert current_sha256(config) == sha256_of_reading(found["sha256"], config)
    return config


def data_of(kind, data_dir, notes, **more):
    """Prepare a folder of text, or a mix with one, to be read as a stream."""
    if kind == "mix":
        make_data(data_dir / "other", train=3000)
        return prepare("mix", data_dir, mix=f"folder={notes}:3 shards=other:1", streaming=True, **RECIPE, **more)
    return prepare("folder", data_dir, str(notes), streaming=True, **RECIPE, **more)


def rows(batches, steps):
    found = []
    for _ in range(steps):
        assert batches.wait(lambda: False, print) is not None
        found += batches.next()[0].tolist()
    return found


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("folder", {}),
        ("folder", {"max_iters": 140}),  # over the end of the text
        ("folder", {"data_layout": "bestfit"}),
        ("folder", {"data_tokens": 3000}),  # the first shards, again and again
        ("mix", {"dataset": "mix"}),
    ],
)
def test_a_run_reads_growing_data_as_it_reads_finished_ones(tmp_path, monkeypatch, notes, kind, fields):
    found = data_of(kind, tmp_path / "data", notes)
    config = config_of(found, **fields)
    (folder,) = (tmp_path / "data").glob("folder-*")
    assert len(list(folder.glob("*.bin"))) == 2  # the first one, and that for validation
    waits, more = [], 900 if kind == "folder" else 1200  # tokens: three quarters of a mix are of the folder

    def wait(_):
        """Prepare one more shard each time that the run waits."""
        waits.append(len(list(folder.glob("*_train_*.bin"))))
        prepare_for(replace(config, data_tokens=more * (waits[-1] + 1)))

    monkeypatch.setattr(module.time, "sleep", wait)
    batches = Batches(config, world())
    growing = rows(batches, config.max_iters)
    assert len(waits) > 1
    finished = config_of(data_of(kind, tmp_path / "finished", notes), **fields)
    prepare_for(finished)
    assert growing == rows(Batches(finished, world()), config.max_iters)
    assert rows(batches_at(config, 30), 5) == growing[30 * STEP : 35 * STEP]  # a resumed run


def test_ranks_take_what_all_of_them_see_and_one_that_stops_stops_all(tmp_path, monkeypatch, notes):
    config = config_of(data_of("folder", tmp_path / "data", notes))
    prepare_for(config)
    batches = Batches(config, world())
    other = iter([([(2, False)], False), ([(2, False)], True)])  # another node sees a new file later
    monkeypatch.setattr(module, "gather", lambda _, mine: [mine, next(other)])
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    batches.seek(config.max_iters - 1)
    assert batches.wait(lambda: False, print) is None
    assert len(batches.windows[0].paths) == 2


def test_a_stop_while_waiting_ends_the_wait_and_a_long_one_is_logged(tmp_path, monkeypatch, notes):
    config = config_of(data_of("folder", tmp_path / "data", notes))
    batches = Batches(config, world())
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.setattr(module, "SAY_S", 0.0)
    stops, lines = iter([False, False, True]), []
    batches.seek(20)
    assert batches.wait(lambda: next(stops), lines.append) is None
    assert lines == ["Data: waiting for shard 2 of folder, which is prepared now"]


def test_a_replaced_shard_and_a_text_that_changed_meanwhile_are_refused(tmp_path, notes):
    found = data_of("folder", tmp_path / "data", notes)
    config = config_of(found)
    assert current_sha256(config) != found["sha256"]  # other data than the same shards in another order
    prepare_for(config)
    path = Path(found["path"], "folder_train_000002.bin")
    path.write_bytes(path.read_bytes()[:-2] + b"\1\1")
    with pytest.raises(DataError, match=rf"{path} changed after the data were prepared"):
        rows(Batches(config, world()), 30)
    (notes / "000.txt").write_text("Something else.")
    with pytest.raises(DataError, match="has changed while runs read it"):
        prepare_for(config)
