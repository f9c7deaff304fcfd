"""Shards on disk, the order in which training reads them, alone or mixed by weight, and the validation sequences."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factories import make_data, prepare, train_fields
from gpt2.data import shards
from gpt2.data.batches import Batches, check_data, current_sha256, positions
from gpt2.data.sequences import Mix, Order, Windows
from gpt2.evaluate import Validation
from kmatrix.errors import DataError
from kmatrix.forms import parse_mix
from kmatrix.records.train_config import TrainConfig
from reading import SumOfTokens, world

SEED = st.integers(0, 2**31 - 1)
SHARES = {"shards=a": 65, "shards=b": 34, "shards=c": 1}
SHARD = np.array([20240520, 1, 3, *[0] * 253], "<i4").tobytes() + b"\1\0\2\0\3\0"  # [1, 2, 3] as llm.c writes it


def config_of(tmp_path, sha256="", **overrides) -> TrainConfig:
    return TrainConfig.from_json(train_fields(tmp_path, sha256, **overrides))


def test_a_shard_is_in_the_format_of_llm_c(tmp_path):
    shards.write_shard(tmp_path / "a_train_0.bin", [1, 2, 3])
    assert (tmp_path / "a_train_0.bin").read_bytes() == SHARD
    assert shards.open_shard(tmp_path / "a_train_0.bin").tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a_train_0.bin", b""),
        ("a_train_0.bin", SHARD[:100]),
        ("a_train_0.bin", SHARD[:-1]),
        ("a_train_0.bin", SHARD + b"\0\0"),
        ("a_train_0.bin", b"\0" + SHARD[1:]),
        ("a_train_0.bin", SHARD[:4] + b"\x07" + SHARD[5:]),  # another version
        ("train.bin", SHARD[:-1]),
        ("train.bin", np.arange(100, dtype="<u4").tobytes()),  # tokens of 32 bits, of 64, and of a larger vocabulary
        ("train.bin", np.arange(100, dtype="<i8").tobytes()),
        ("train.bin", np.arange(130_000, 130_100, dtype="<u4").tobytes()),
        ("train.bin", b"A text of some lines.\n" * 10),
        ("train.bin", bytes(range(101))),  # an odd size
    ],
)
def test_a_file_that_is_no_sound_shard_is_refused_by_its_path(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{tmp_path / name} is damaged or not a shard of 16-bit tokens"):
        shards.open_shard(tmp_path / name)


def test_nanogpt_files_are_read_and_its_pickle_is_never_opened(tmp_path):
    for name in ("train.bin", "val.bin"):
        np.arange(100, dtype="<u2").tofile(tmp_path / name)
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path).encode() + b"/owned'\ntR.")
    assert shards.describe(tmp_path, 257, dataset="shards")["train_tokens"] == 100
    assert Windows(tmp_path, "train", block_size=4).read([(0, 1)])[0].tolist() == [[4, 5, 6, 7]]
    assert not (tmp_path / "owned").exists()


def test_targets_are_the_tokens_shifted_by_one_and_windows_do_not_overlap(tmp_path):
    with pytest.raises(DataError, match="has 0 train shards"):
        Windows(tmp_path, "train", block_size=4)
    shards.write_shard(tmp_path / "a_train_000000.bin", range(14))
    with pytest.raises(DataError, match="has no train sequence of 14 tokens"):
        Windows(tmp_path, "train", block_size=14)
    windows = Windows(tmp_path, "train", block_size=4)
    idx, targets = windows.read([(0, 0), (0, 2)])
    assert len(windows) == 3
    assert idx.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert targets.tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert idx.dtype == targets.dtype == torch.int64
    assert idx.is_contiguous()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), SEED)
def test_every_epoch_reads_each_window_once_in_another_order(counts, seed):
    order = Order(counts, seed)
    expected = [(shard, window) for shard, count in enumerate(counts) for window in range(count)]
    for epoch in range(3):
        assert sorted(order.at(epoch * order.windows + offset) for offset in range(order.windows)) == expected
    # Of two seeds, sources and epochs
    many = [Order((50, 50), seed + n % 2, source=n // 2 % 2) for n in range(4)]
    assert len({tuple(one.at(begin + at) for at in range(9)) for one in many for begin in (0, 100)}) == 8


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 20))
def test_all_ranks_together_read_what_one_rank_would(size, batch, accumulation, step):
    single = config_of(Path(), batch_size=batch * size, gradient_accumulation=accumulation)
    many = config_of(Path(), batch_size=batch, gradient_accumulation=accumulation, num_gpus=size)
    for micro in range(accumulation):
        parts = [position for rank in range(size) for position in positions(many, world(rank, size), step, micro)]
        assert parts == list(positions(single, world(), step, micro))


def test_a_run_reads_only_the_first_shards_and_verifies_their_hash(tmp_path):
    for name in ("train_000001", "train_000002", "train_000003", "val_000000"):
        shards.write_shard(tmp_path / f"a_{name}.bin", [int(name[-1])] * 500)
    config = config_of(tmp_path, shards.current_sha256(tmp_path, 2), data_shards=2, batch_size=30)
    shards.describe(tmp_path, 257, dataset="shards")
    (tmp_path / "a_train_000003.bin").unlink()
    check_data(config)
    assert set(Batches(config, world()).next()[0].flatten().tolist()) == {1, 2}
    with pytest.raises(DataError, match="has 2 train shards, expected 3"):
        Batches(config_of(tmp_path, data_shards=3), world())


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Three datasets of different size."""
    data_dir = tmp_path_factory.mktemp("data")
    for number, (name, tokens) in enumerate((("a", 40_001), ("b", 6_401), ("c", 321))):
        make_data(data_dir / name, train=tokens, val=4_000, seed=number)
    return prepare("mix", data_dir, mix=" ".join(f"{name}:{share}" for name, share in SHARES.items()))


def mix_config(mix, **overrides):
    return config_of(Path(mix["path"]), mix["sha256"], **{"dataset": "mix", "block_size": 32, **overrides})


@given(st.lists(st.integers(1, 70), min_size=1, max_size=5), SEED, st.integers(0, 10**12))
def test_shares_of_a_mix_are_exact_after_each_block_and_counted_without_state(weights, seed, position):
    stream, block = Mix(weights, seed), sum(weights)
    drawn = list(stream.drawn(position))
    assert sum(drawn) == position
    assert all(abs(count - position * weight / block) <= weight for count, weight in zip(drawn, weights, strict=True))
    for at in range(position, position + 50):
        source, number = stream.at(at)
        assert number == drawn[source]
        drawn[source] += 1
    assert stream.drawn(7 * block) == tuple(7 * weight for weight in weights)
    of_seeds = [Mix((50, 50), one) for one in (seed, seed + 1)]
    assert len({tuple(one.at(begin + at)[0] for at in range(99)) for one in of_seeds for begin in (0, 100)}) == 4


def test_each_dataset_of_a_mix_has_its_own_epochs_and_their_hash_covers_weights(mix):
    config = mix_config(mix, batch_size=100, max_iters=30)
    stream = Batches(config, world())
    assert stream.describe() == ["Data: shards=a 1.56 epochs, shards=b 5.10 epochs, shards=c 3.00 epochs"]
    assert stream.epoch(30) == 5  # of the dataset that is read most often
    record = json.loads((Path(mix["path"]) / "dataset.json").read_text())
    assert {one["name"]: one["weight"] for one in record["sources"]} == SHARES
    assert current_sha256(config) == mix["sha256"] == record["sha256"]
    other = prepare("mix", Path(mix["path"]).parent, mix="shards=a:64+shards=b:35+shards=c:1")
    assert not {other["sha256"], other["path"]} & {mix["sha256"], mix["path"]}


@pytest.mark.parametrize("mixed", [False, True])
def test_data_that_changed_after_planning_are_refused(tmp_path, mixed):
    for name in "ab":
        make_data(tmp_path / name)
    found = {"path": str(tmp_path / "b"), "sha256": current_sha256(config_of(tmp_path / "b"))}
    if mixed:
        found = prepare("mix", tmp_path, mix="shards=a:1 shards=b:1")
    config = mix_config(found, dataset="mix" if mixed else "shards")
    (path,) = (tmp_path / "b").glob("*_train_*.bin")
    os.utime(path, ns=(1, 1))  # a copy with the same contents
    check_data(config)
    path.write_bytes(path.read_bytes()[:-2] + b"\1\1")  # as a copy of another file of the same size
    with pytest.raises(DataError, match=f"the data in {found['path']} changed after the run was planned"):
        check_data(config)
    make_data(tmp_path / "b", seed=5)  # prepared again: its own record is right
    with pytest.raises(DataError, match="changed after the run was planned"):
        check_data(config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:65 b:34 c:1", [("a", "", 65), ("b", "", 34), ("c", "", 1)]),
        ("a:0.65+b:0.34+c:0.01", [("a", "", 65), ("b", "", 34), ("c", "", 1)]),
        ("a:50  b:50", [("a", "", 1), ("b", "", 1)]),  # in lowest terms
        ("hub=me/mine:*.txt:2 a:1", [("hub", "me/mine:*.txt", 2), ("a", "", 1)]),
        ("", "'' is not DATASET:WEIGHT"),
        ("a", "'a' is not DATASET:WEIGHT"),
        ("a:1 a:2", "a is listed twice"),
        ("a:0 b:1", "must be above 0"),
        ("a:1.2.3", "is not DATASET:WEIGHT"),
        ("a:0.00001 b:1", "add up to more than 10000"),
    ],
)
def test_a_mix_is_parsed_or_refused_with_the_reason(text, expected):
    if isinstance(expected, list):
        assert [(part.dataset, part.path, part.weight) for part in parse_mix(text)] == expected
    else:
        with pytest.raises(ValueError, match=expected):
            parse_mix(text)


def test_the_validation_loss_is_the_weighted_mean_of_the_datasets(mix):
    validation = Validation(mix_config(mix), world())
    found = validation.measure(SumOfTokens())
    assert len({round(value, 3) for value in found.by_source.values()}) == 3
    assert found.loss == pytest.approx(sum(found.by_source[name] * share for name, share in SHARES.items()) / 100)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))  # a byte per token
    assert (sum(len(part.places) for part in validation.parts), validation.describe()) == (30, [])


@pytest.mark.parametrize(("batch", "size"), [(1, 1), (3, 1), (4, 3), (7, 1), (7, 2)])
def test_the_validation_loss_depends_neither_on_the_micro_batch_nor_on_ranks_or_random_numbers(tmp_path, batch, size):
    make_data(tmp_path, val=32 * 7 + 1)  # fewer sequences than asked for
    parts, before, model = [], torch.get_rng_state(), SumOfTokens()
    for rank in range(size):
        own = Validation(config_of(tmp_path, batch_size=batch, num_gpus=size), world(rank, size))
        own.world = SimpleNamespace(**asdict(own.world), sum=lambda sums: parts.append(sums[0].clone()) or sums)
        assert own.measure(model, lambda: True) is None  # a stop
        parts.pop()
        own.measure(model)
    loss, count = sum(parts)[:2].tolist()
    assert count == 7
    targets = shards.open_shard(tmp_path / "random_val_000000.bin")[1:]
    assert loss / count == pytest.approx(float(np.mean(targets)), abs=1e-4)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_validation_windows_are_equally_spaced_over_all_shards(tmp_path):
    for name, size in (("a_val_000000.bin", 41), ("a_val_000001.bin", 3), ("a_val_000002.bin", 81)):
        shards.write_shard(tmp_path / name, np.zeros(size))
    windows = Windows(tmp_path, "val", block_size=4)  # 10, 0 and 20 windows
    assert windows.spread(3) == [(0, 0), (2, 0), (2, 10)]
    assert windows.spread(6) == [(0, 0), (0, 5), (2, 0), (2, 5), (2, 10), (2, 15)]
    assert windows.spread(99) == [(0, i) for i in range(10)] + [(2, i) for i in range(20)]
