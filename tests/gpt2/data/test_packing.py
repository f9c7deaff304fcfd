"""Pack documents by best fit: the rows of nanochat, every row begins with a document, exact and repeatable."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import make_data, train_fields
from gpt2.data import packing, shards
from gpt2.data.batches import Batches, current_sha256
from gpt2.data.packing import best_fit, index_of, load_index
from gpt2.data.shards import open_shard, write_shard
from gpt2.evaluate import Validation
from kmatrix.errors import DataError
from kmatrix.records.train_config import TrainConfig
from reading import world

FIXTURE = Path(__file__).parents[2] / "fixtures" / "nanochat" / "packing.json"
END = 256


def test_the_rows_are_those_of_nanochat():
    """The numbers are stored; document i is the token 0 and then its number, cut to the rows of 65 tokens."""
    found = json.loads(FIXTURE.read_text())
    limits = {name: found[name] for name in ("waiting", "read_at_once")}
    rows = best_fit(found["document_sizes"], found["length"] + 1, **limits)
    for expected, row in zip(found["rows"], rows, strict=False):
        # A piece of one token is only the end-of-document token: the fixture cannot say of which document.
        pieces = [[None if size == 1 else document + 1, size] for document, size in row]
        assert pieces == [[None if size == 1 else number, size] for number, size in expected]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=60), st.integers(2, 40))
def test_every_row_is_full_begins_with_a_document_and_no_document_is_used_twice(lengths, capacity):
    tokens = np.concatenate([np.array([END, *([7] * length)], dtype=np.uint16) for length in lengths])
    index = index_of(tokens, capacity, END)
    used = [piece for row in range(len(index)) for piece in index.pieces(row)]
    assert all(sum(size for _, size in index.pieces(row)) == capacity for row in range(len(index)))
    assert all(tokens[start] == END for start, _ in used)
    assert len({start for start, _ in used}) == len(used)


def test_an_index_is_stored_and_replaced_when_its_shard_is(tmp_path, monkeypatch):
    path = tmp_path / "a_train_000001.bin"
    write_shard(path, [END, 1, 2, END, 3, END, 4, 5, 6])
    first = load_index(path, open_shard(path), 3, END).starts.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(packing, "index_of", None)  # another one cannot be made
        assert load_index(path, open_shard(path), 3, END).starts.tolist() == first
    write_shard(path, [END, 1, END, 2, 3, 4, END, 3, 3])
    assert load_index(path, open_shard(path), 3, END).starts.tolist() != first


def config_of(folder, sha256="", **overrides):
    return TrainConfig.from_json(train_fields(folder, sha256, **{"data_layout": "bestfit", **overrides}))


@pytest.fixture
def documents(tmp_path):
    """Two training shards and one for validation, of documents of 1 to 50 bytes."""
    rng = np.random.default_rng(0)
    for name in ("a_train_000001.bin", "a_train_000002.bin", "a_val_000000.bin"):
        texts = [[END, *rng.integers(97, 123, rng.integers(1, 50))] for _ in range(200)]
        write_shard(tmp_path / name, np.concatenate(texts))
    shards.describe(tmp_path, 257, dataset="shards", source="tests", tokenizer="byte")
    return tmp_path


@pytest.mark.parametrize("size", [1, 4])
def test_packed_rows_begin_with_a_document_are_read_once_per_epoch_and_do_not_depend_on_the_ranks(documents, size):
    config = config_of(documents, batch_size=4 // size, num_gpus=size)
    ranks = [Batches(config, world(rank, size)) for rank in range(size)]
    steps = ranks[0].orders[0].windows // 4
    rows = [tuple(row) for _ in range(steps) for one in ranks for row in one.next()[0].tolist()]
    assert {row[0] for row in rows} == {END}
    assert len(set(rows)) == len(rows)
    single = Batches(config_of(documents, batch_size=4), world())
    assert rows == [tuple(row) for _ in range(steps) for row in single.next()[0].tolist()]


def test_packed_rows_are_other_data_than_the_flat_stream_also_for_validation_and_need_documents(documents, tmp_path):
    (part,) = Validation(config_of(documents), world()).parts
    assert set(part.windows.read(part.windows.spread(9))[0][:, 0].tolist()) == {END}
    assert current_sha256(config_of(documents)) != current_sha256(config_of(documents, data_layout="flat"))
    make_data(tmp_path / "others")
    with pytest.raises(DataError, match="has no train sequence of 32 tokens"):
        Batches(config_of(tmp_path / "others"), world())
