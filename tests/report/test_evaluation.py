"""Bits per byte and HellaSwag in the report, and the ranking of runs with different tokenizers."""

from __future__ import annotations

import json
import math

import pytest

from kmatrix.records.files import read_json, write_json
from kmatrix.report.analyse import analyse
from kmatrix.report.write import summary
from kmatrix.verdict.family import Method
from kmatrix.verdict.sequential import crossing_table
from records_factory import FakeRun, make_matrix

BYTES, BPE = "aa" * 32, "bb" * 32  # the same text in tokens of two tokenizers


def run_of(tokenizer, loss, seed, **train):
    axes = {"tokenizer": tokenizer, "seed": str(seed)}
    data = BYTES if tokenizer == "byte" else BPE
    return FakeRun(
        seed=seed, final_loss=loss, axes=axes, data_sha256=data, train={"tokenizer": tokenizer, **train}
    )  # fmt: skip


def add_bits_per_byte(matrix, lengths, **more):
    """Add bits per byte to every finished run, as its trainer would. lengths: bytes per token of each tokenizer."""
    for run in matrix.runs():
        if run.result.exists():
            tokenizer = read_json(run.run_json)["train"]["tokenizer"]
            result, length = read_json(run.result), lengths.get(tokenizer)
            bits = result["final_val_loss"] / math.log(2) / length if length else None
            write_json(run.result, result | {"final_bits_per_byte": bits, **more})


@pytest.fixture
def two_tokenizers(tmp_path):
    """Byte tokens at 1.0 nats each, and BPE tokens of 4 bytes at 3.6: fewer bits per byte, but a higher loss."""
    runs = [run_of("byte", 1.0 + seed / 1000, seed) for seed in (1, 2, 3)]
    runs += [run_of("bpe", 3.6 + seed / 1000, seed) for seed in (1, 2, 3)]
    matrix = make_matrix(tmp_path, runs)
    add_bits_per_byte(matrix, {"byte": 1.0, "bpe": 4.0})
    return matrix


def test_runs_of_different_tokenizers_are_ranked_by_bits_per_byte_and_never_by_loss(two_tokenizers):
    results = analyse(two_tokenizers)
    (ranking,) = results.rankings
    assert (ranking.measure, ranking.unit, ranking.data_sha256) == ("final_bits_per_byte", "bits/byte", None)
    assert ranking.order == ("adamw, bpe", "adamw, byte")
    assert results.configurations[0].mean == pytest.approx(3.602 / math.log(2) / 4)
    assert ranking.pairs[0].outcome == "better"
    assert any("other parts of it" in note for note in ranking.notes)
    assert "bits/byte" in results.verdict[0]
    assert results.target is None  # a loss per token is none of several tokenizers


def test_with_adaptive_seeds_the_ranking_by_bits_is_sequential_too(two_tokenizers):
    """The seeds were chosen by the same differences: a test of a fixed number would err too often."""
    plan = read_json(two_tokenizers.matrix_json)
    (fixed,) = analyse(two_tokenizers).rankings[0].pairs
    rules = {"seeds_auto": True, "seeds": [*range(1, 11)], "seeds_min": 3}
    write_json(two_tokenizers.matrix_json, {**plan, "verdict": rules})
    (ranking,) = analyse(two_tokenizers).rankings
    (pair,) = ranking.pairs
    assert (ranking.unit, pair.method, pair.outcome) == ("bits/byte", Method.SEQUENTIAL, "better")
    assert pair.p == pytest.approx(2 * crossing_table(3, 10).p(fixed.p / 2 / (2 / 9)), rel=1e-9)


def test_prebuilt_shards_without_known_text_do_not_count_as_the_same_text(tmp_path):
    runs = [run_of("byte", 1.0, 1, dataset="shards"), run_of("bpe", 3.6, 1, dataset="shards")]
    matrix = make_matrix(tmp_path, runs)
    add_bits_per_byte(matrix, {"byte": 1.0, "bpe": 4.0})
    assert [ranking.measure for ranking in analyse(matrix).rankings] == ["final_val_loss"] * 2


def test_hellaswag_is_listed_next_to_bits_and_a_run_without_either_has_no_row(tmp_path):
    runs = [run_of("byte", 1.0, 1), FakeRun(optimizer="sgd", status="planned")]
    matrix = make_matrix(tmp_path, runs)
    assert "Benchmarks" not in summary(analyse(matrix))
    add_bits_per_byte(matrix, {}, hellaswag_accuracy=0.29, hellaswag_accuracy_norm=0.3112)
    text = summary(analyse(matrix))
    section = text[text.index("Benchmarks\n") :].split("\n\n")[0].splitlines()
    assert section[2].split() == ["run", "tokenizer", "hellaswag", "accuracy", "hellaswag", "accuracy", "norm"]
    assert [line.split()[1:] for line in section[4:]] == [["byte", "0.2900", "0.3112"]]


def test_the_bits_of_a_running_run_come_from_its_metrics(tmp_path):
    matrix = make_matrix(tmp_path, [run_of("byte", 1.0, 1)])
    (run,) = matrix.runs()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        if "val/loss" in line:
            line["val/bits_per_byte"] = line["val/loss"] / math.log(2) / 2.0
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.result.unlink()
    (numbers,) = analyse(matrix).runs
    assert numbers.final_bits_per_byte == pytest.approx(numbers.final_val_loss / math.log(2) / 2.0)
    assert numbers.best_bits_per_byte == pytest.approx(numbers.best_val_loss / math.log(2) / 2.0)
