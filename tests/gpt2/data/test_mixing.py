"""Mix datasets by weight: exact shares, one stream for any number of ranks, separate epochs per dataset."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import make_data, prepare, train_fields
from gpt2.data.batches import Batches, Mix, planned_sha256
from gpt2.data.sequences import Order
from gpt2.evaluate import Validation
from kmatrix.errors import ConfigError, DataError
from kmatrix.records.train_config import TrainConfig, parse_mix
from reading import SumOfTokens, world

PARTS = ("shards=a:65", "shards=b:34", "shards=c:1")
CASES = ((1, 0), (1, 10), (2, 0))  # seed, first position of a block
weights = st.lists(st.integers(1, 70), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def mix_folder(tmp_path_factory):
    """Three datasets of different size, mixed 65 to 34 to 1, and the directory of the mix."""
    data_dir = tmp_path_factory.mktemp("data")
    for number, (name, tokens) in enumerate((("a", 40_001), ("b", 6_401), ("c", 321))):
        make_data(data_dir / name, train=tokens, val=4_000, seed=number)
    return prepare("mix", data_dir, tokenizer="byte", mix=" ".join(PARTS))


def config_of(mix_folder, **overrides):
    overrides = {"dataset": "mix", "block_size": 32, **overrides}
    return TrainConfig.from_json(train_fields(Path(mix_folder["path"]), mix_folder["sha256"], **overrides))


@given(weights, st.integers(0, 2**31 - 1), st.integers(0, 10**12))
def test_a_share_is_exact_after_each_block_and_within_one_block_anywhere(ws, seed, position):
    drawn = Mix(ws, seed).drawn(position)
    assert sum(drawn) == position
    block = sum(ws)
    for count, weight in zip(drawn, ws, strict=True):
        assert abs(count - position * weight / block) <= weight
        if position % block == 0:
            assert count == position // block * weight


@given(weights, st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_the_count_before_a_position_is_computed_without_state(ws, seed, start):
    stream = Mix(ws, seed)
    expected = list(stream.drawn(start))
    for position in range(start, start + 50):
        source, number = stream.at(position)
        assert number == expected[source]
        expected[source] += 1


def test_blocks_and_datasets_are_shuffled_independently_by_the_seed():
    blocks = [tuple(Mix((5, 5), seed).at(position)[0] for position in range(at, at + 10)) for seed, at in CASES]
    assert len(set(blocks)) == 3
    orders = [tuple(Order((50,), 1, source=source).at(position) for position in range(50)) for source in (0, 1, 2)]
    assert len(set(orders)) == 3


def test_each_dataset_has_its_own_epochs_and_a_new_order_in_each(mix_folder):
    stream = Batches(config_of(mix_folder, batch_size=100, max_iters=30), world())
    small = stream.orders[2]
    assert small.windows == 10
    first, second = ([small.at(position) for position in range(start, start + 10)] for start in (0, 10))
    assert sorted(first) == sorted(second)
    assert first != second
    assert stream.describe() == ["Data: shards=a 1.56 epochs, shards=b 5.10 epochs, shards=c 3.00 epochs"]
    assert stream.epoch(30) == 5  # epochs of the dataset that is read most often


def test_the_validation_loss_is_the_weighted_mean_of_the_datasets(mix_folder):
    validation = Validation(config_of(mix_folder), world())
    found = validation.measure(SumOfTokens())
    loss, by_source = found.loss, found.by_source
    assert list(by_source) == ["shards=a", "shards=b", "shards=c"]
    assert len({round(value, 3) for value in by_source.values()}) == 3
    mean = sum(by_source[name] * weight for name, weight in zip(by_source, (65, 34, 1), strict=True)) / 100
    assert loss == pytest.approx(mean)
    assert validation.samples == 30
    assert not validation.describe()
    assert found.bits_per_byte == pytest.approx(loss / math.log(2))  # a byte per token


def test_the_mix_directory_describes_the_mix_and_its_hash_covers_weights_and_data(mix_folder, tmp_path):
    record = json.loads((Path(mix_folder["path"]) / "dataset.json").read_text())
    assert [(source["name"], source["weight"]) for source in record["sources"]] == [
        ("shards=a", 65),
        ("shards=b", 34),
        ("shards=c", 1),
    ]
    assert planned_sha256(config_of(mix_folder)) == mix_folder["sha256"] == record["sha256"]
    data_dir = Path(mix_folder["path"]).parent
    other = prepare("mix", data_dir, tokenizer="byte", mix="shards=a:64+shards=b:35+shards=c:1")
    assert other["sha256"] != mix_folder["sha256"]
    assert other["path"] != mix_folder["path"]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_shard_that_was_replaced_after_planning_is_refused_by_its_name(tmp_path, mixed):
    for name in "ab":
        make_data(tmp_path / name)
    found = {"path": str(tmp_path / "b"), "sha256": make_data(tmp_path / "b")}
    if mixed:
        found = prepare("mix", tmp_path, tokenizer="byte", mix="shards=a:1 shards=b:1")
    config = config_of(found, dataset="mix" if mixed else "shards")
    (path,) = (tmp_path / "b").glob("*_train_*.bin")
    os.utime(path, ns=(1, 1))  # a copy with the same contents
    assert planned_sha256(config) == found["sha256"]
    path.write_bytes(path.read_bytes()[:-2] + b"\1\1")  # as a copy of another file of the same size
    with pytest.raises(DataError, match=f"{path} changed after the data were prepared"):
        planned_sha256(config)
    make_data(tmp_path / "b", seed=5)  # prepared again: its own record is right
    assert planned_sha256(config) != found["sha256"]


@pytest.mark.parametrize(
    "text, parts",
    [
        ("a:65 b:34 c:1", [("a", "", 65), ("b", "", 34), ("c", "", 1)]),
        ("a:0.65+b:0.34+c:0.01", [("a", "", 65), ("b", "", 34), ("c", "", 1)]),
        ("a:50  b:50", [("a", "", 1), ("b", "", 1)]),
        ("hub=me/mine:*.txt:2 a:1", [("hub", "me/mine:*.txt", 2), ("a", "", 1)]),
    ],
)
def test_the_weights_of_a_mix_are_reduced_to_lowest_terms(text, parts):
    assert [(part.dataset, part.path, part.weight) for part in parse_mix(text)] == parts


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "'' is not DATASET:WEIGHT"),
        ("a", "'a' is not DATASET:WEIGHT"),
        ("a:1 a:2", "a is listed twice"),
        ("a:0 b:1", "must be above 0"),
        ("a:1.2.3", "is not a number"),
        ("a:0.00001 b:1", "add up to more than 10000"),
    ],
)
def test_an_invalid_mix_is_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=reason.replace("'", ".")):
        parse_mix(text)


def test_a_mix_with_the_char_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a mix cannot use the char tokenizer"):
        prepare("mix", tmp_path, tokenizer="char", mix="stdlib:1")
