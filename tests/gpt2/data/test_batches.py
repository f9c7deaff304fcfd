"""Shards on disk, and the order in which training reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import make_data, train_fields
from gpt2.data import shards
from gpt2.data.batches import Batches, positions
from gpt2.data.sequences import Order, Windows
from gpt2.evaluate import Validation
from kmatrix.errors import DataError
from kmatrix.records.train_config import TrainConfig
from reading import SumOfTokens, batches_at, world


def config_of(tmp_path, **overrides) -> TrainConfig:
    return TrainConfig.from_json(train_fields(tmp_path, "", **overrides))


def write(tmp_path, tokens, name="a_train_000000.bin"):
    shards.write_shard(tmp_path / name, tokens)
    return tmp_path / name


def test_a_shard_has_the_header_of_llm_c(tmp_path):
    path = write(tmp_path, [1, 2, 3])
    assert shards.open_shard(path).tolist() == [1, 2, 3]
    raw = path.read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, 3] + [0] * 253
    assert raw[1024:] == b"\x01\x00\x02\x00\x03\x00"


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda raw: raw[:100], "100 bytes, expected 1030 for 3 tokens"),
        (lambda raw: raw[:-1], "1029 bytes, expected 1030 for 3 tokens"),
        (lambda raw: raw + b"\0\0", "1032 bytes, expected 1030"),
        (lambda raw: b"\0" + raw[1:], "it begins with"),
        (lambda raw: raw[:4] + b"\x07" + raw[5:], "it begins with 20240520, 7"),
    ],
)
def test_a_damaged_shard_is_refused_with_its_path_and_offset(tmp_path, change, reason):
    path = write(tmp_path, [1, 2, 3])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"a_train_000000.bin") as raised:
        shards.open_shard(path)
    assert reason in raised.value.why


@pytest.mark.parametrize("kind", ["train", "val"])
def test_a_folder_without_shards_or_with_short_ones_is_refused(tmp_path, kind):
    with pytest.raises(DataError, match=f"has 0 {kind} shards") as raised:
        Windows(tmp_path, kind, block_size=4)
    assert f"*_{kind}_*.bin" in raised.value.why
    write(tmp_path, range(4), f"a_{kind}_000000.bin")
    with pytest.raises(DataError, match=f"has no {kind} sequence of 4 tokens"):
        Windows(tmp_path, kind, block_size=4)


def test_targets_are_the_tokens_shifted_by_one_and_windows_do_not_overlap(tmp_path):
    write(tmp_path, range(14))
    windows = Windows(tmp_path, "train", block_size=4)
    idx, targets = windows.read([(0, 0), (0, 2)])
    assert len(windows) == 3
    assert idx.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert targets.tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert idx.dtype == targets.dtype == torch.int64
    assert idx.is_contiguous()


counts_of_shards = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@given(counts_of_shards, st.integers(0, 2**31 - 1))
def test_every_epoch_reads_each_window_once_in_another_order(counts, seed):
    order = Order(counts, seed)
    expected = {(shard, window) for shard, count in enumerate(counts) for window in range(count)}
    for epoch in range(3):
        read_positions = [order.at(epoch * order.windows + offset) for offset in range(order.windows)]
        assert set(read_positions) == expected
        assert len(read_positions) == len(expected)
    assert len({tuple(Order((50, 50), seed + n // 2).at(n % 2 * 100 + at) for at in range(9)) for n in range(4)}) == 4


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 20))
def test_all_ranks_together_read_what_one_rank_would(tmp_path_factory, size, batch, accumulation, step):
    folder = tmp_path_factory.getbasetemp()
    single = config_of(folder, batch_size=batch * size, gradient_accumulation=accumulation)
    many = config_of(folder, batch_size=batch, gradient_accumulation=accumulation, num_gpus=size)
    for micro in range(accumulation):
        parts = [position for rank in range(size) for position in positions(many, world(rank, size), step, micro)]
        assert parts == list(positions(single, world(), step, micro))


def test_a_resumed_run_reads_what_an_uninterrupted_run_reads(tmp_path):
    make_data(tmp_path)
    config = config_of(tmp_path, gradient_accumulation=2)
    uninterrupted, resumed = Batches(config, world()), batches_at(config, 3)
    for _ in range(6):
        uninterrupted.next()
    for _ in range(4):
        assert torch.equal(uninterrupted.next()[0], resumed.next()[0])


@pytest.mark.parametrize("batch", [1, 3, 4, 7])
def test_the_validation_loss_does_not_depend_on_the_micro_batch(tmp_path, batch):
    make_data(tmp_path)
    validation = Validation(config_of(tmp_path, batch_size=batch, eval_samples=7), world())
    tokens = shards.open_shard(tmp_path / "random_val_000000.bin")
    total = (len(tokens) - 1) // 32
    starts = [number * total // 7 * 32 + 1 for number in range(7)]  # of the targets
    mean = float(np.mean([tokens[start : start + 32] for start in starts]))
    assert validation.measure(SumOfTokens()).loss == pytest.approx(mean, abs=1e-4)


def test_ranks_divide_the_validation_sequences_without_gaps_or_repetitions(tmp_path):
    make_data(tmp_path, val=32 * 7 + 1)  # fewer than asked for
    parts = [Validation(config_of(tmp_path, num_gpus=3), world(rank, 3)).parts[0].mine for rank in range(3)]
    validation = Validation(config_of(tmp_path), world())
    assert sorted(index for part in parts for index in part) == validation.parts[0].mine
    assert validation.samples == 7
    assert parts[1][:2] == [validation.parts[0].mine[1], validation.parts[0].mine[4]]


def test_evaluation_draws_no_random_numbers_and_restores_training_mode(tmp_path):
    make_data(tmp_path)
    model = SumOfTokens()
    before = torch.get_rng_state()
    Validation(config_of(tmp_path), world()).measure(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_an_interrupted_evaluation_has_no_loss(tmp_path):
    make_data(tmp_path)
    stop_requests = iter([False, True])
    validation = Validation(config_of(tmp_path), world())
    assert validation.measure(SumOfTokens(), lambda: next(stop_requests)) is None


def test_validation_windows_are_equally_spaced_over_all_shards(tmp_path):
    for name, size in (("a_val_000000.bin", 41), ("a_val_000001.bin", 81)):
        shards.write_shard(tmp_path / name, np.zeros(size, dtype=np.uint16))
    windows = Windows(tmp_path, "val", block_size=4)  # 10 and 20 windows
    assert windows.spread(3) == [(0, 0), (1, 0), (1, 10)]
    assert windows.spread(6) == [(0, 0), (0, 5), (1, 0), (1, 5), (1, 10), (1, 15)]
    assert windows.spread(99) == [(0, i) for i in range(10)] + [(1, i) for i in range(20)]


def test_nanogpt_files_are_read_and_its_pickle_is_never_opened(tmp_path):
    for name in ("train.bin", "val.bin"):
        np.arange(100, dtype="<u2").tofile(tmp_path / name)
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path).encode() + b"/owned'\ntR.")
    windows = Windows(tmp_path, "train", block_size=4)
    assert windows.read([(0, 1)])[0].tolist() == [[4, 5, 6, 7]]
    assert shards.describe(tmp_path, 257, dataset="shards")["train_tokens"] == 100
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (np.arange(100, dtype="<u4"), "32 or 64 bits, expected 16"),
        (np.arange(100, dtype="<i8"), "32 or 64 bits, expected 16"),
        (np.arange(130_000, 130_100, dtype="<u4"), "32 or 64 bits, expected 16"),  # of a larger vocabulary
        (np.frombuffer(b"A text of some lines.\n" * 10, dtype=np.uint8), "it is a text"),
        (np.arange(101, dtype=np.uint8), "101 bytes are no whole number of 16-bit tokens"),
    ],
)
def test_a_file_without_a_header_that_has_no_16_bit_tokens_is_refused(tmp_path, content, reason):
    content.tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"train.bin is damaged or not a token shard") as raised:
        shards.open_shard(tmp_path / "train.bin")
    assert reason in raised.value.why


def test_a_run_reads_only_the_first_shards_and_verifies_their_hash(tmp_path):
    for number in (1, 2, 3):
        write(tmp_path, [number] * 500, f"a_train_{number:06d}.bin")
    write(tmp_path, [0] * 500, "a_val_000000.bin")
    shards.describe(tmp_path, 257, dataset="shards")
    two_shards = shards.recorded_sha256(tmp_path, 2)
    (tmp_path / "a_train_000003.bin").unlink()
    assert shards.recorded_sha256(tmp_path, 2) == two_shards
    batches = Batches(config_of(tmp_path, data_shards=2, batch_size=30), world())
    assert set(batches.next()[0].flatten().tolist()) == {1, 2}
    with pytest.raises(DataError, match="has 2 train shards, expected 3"):
        Batches(config_of(tmp_path, data_shards=3), world())
