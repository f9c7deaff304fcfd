"""Bits per byte and HellaSwag in the report, and the ranking of runs with different tokenizers."""

from __future__ import annotations

import json
import math

import pytest

from kmatrix.records.files import read_json, write_json
from kmatrix.report.analysis import analyse
from kmatrix.report.numbers import BITS, LOSS
from kmatrix.report.sentences.values import LineLabel
from kmatrix.report.verdict_text import verdict_texts
from kmatrix.report.write import write_summary
from kmatrix.verdict.family import Method, NoMoreSeeds
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
    numbers = analyse(two_tokenizers)
    assert [(ranking.metric, len(ranking.groups)) for ranking in numbers.rankings] == [(LOSS, 1), (LOSS, 1), (BITS, 2)]
    ranking = numbers.rankings[-1]
    assert [group.runs[0].tokenizer for group in ranking.groups] == ["bpe", "byte"]
    assert ranking.groups[0].mean == pytest.approx(3.602 / math.log(2) / 4)
    assert ranking.verdict.pairs[0].outcome == "better"
    assert any("other parts of it" in note for note in ranking.notes)


def test_with_adaptive_seeds_the_ranking_by_bits_is_sequential_too(two_tokenizers):
    """The rankings by loss choose the number of seeds by the same differences: a fixed test would err too often."""
    plan = read_json(two_tokenizers.matrix_json)
    fixed = analyse(two_tokenizers).rankings[-1].verdict.pairs[0]
    rules = {"seeds_auto": True, "seeds": [*range(1, 11)], "seeds_min": 3}
    write_json(two_tokenizers.matrix_json, {**plan, "verdict": rules})
    ranking = analyse(two_tokenizers).rankings[-1]
    (pair,) = ranking.verdict.pairs
    assert (ranking.metric, pair.method, pair.outcome) == (BITS, Method.SEQUENTIAL, "better")
    assert pair.p == pytest.approx(2 * crossing_table(3, 10).p(fixed.p / 2 / (2 / 9)), rel=1e-9)
    # Now a difference that three seeds do not show; the rankings by loss have one configuration, and want no other.
    add_bits_per_byte(two_tokenizers, {"byte": 1.0, "bpe": 3.594})
    for run in two_tokenizers.runs():
        record = read_json(run.run_json)["train"]
        if (record["tokenizer"], record["seed"]) == ("bpe", 2):
            write_json(run.result, read_json(run.result) | {"final_bits_per_byte": 3.58 / math.log(2) / 3.594})
    numbers = analyse(two_tokenizers)
    (pair,) = numbers.rankings[-1].verdict.pairs
    assert (pair.outcome, pair.no_more) == ("open", NoMoreSeeds.OTHER_RANKING)
    text = verdict_texts(numbers)[-1]
    assert text.sentence.startswith("No winner: ")
    assert "further seeds run only where a ranking by loss is open" in text.line(LineLabel.OPEN).text
    assert not any(line.command for line in text.lines)


def test_runs_with_unknown_bits_are_ranked_by_loss_on_their_own_data(two_tokenizers):
    add_bits_per_byte(two_tokenizers, {"byte": 1.0})
    for run in two_tokenizers.runs():
        run.metrics.write_text("")
    assert [ranking.metric for ranking in analyse(two_tokenizers).rankings] == [LOSS, LOSS]


def test_prebuilt_shards_without_known_text_do_not_count_as_the_same_text(tmp_path):
    runs = [run_of("byte", 1.0, 1, dataset="shards"), run_of("bpe", 3.6, 1, dataset="shards")]
    matrix = make_matrix(tmp_path, runs)
    add_bits_per_byte(matrix, {"byte": 1.0, "bpe": 4.0})
    assert [ranking.metric for ranking in analyse(matrix).rankings] == [LOSS, LOSS]


def test_hellaswag_is_listed_next_to_bits_and_a_run_without_either_has_no_row(tmp_path):
    runs = [run_of("byte", 1.0, 1), FakeRun(optimizer="sgd", status="planned")]
    matrix = make_matrix(tmp_path, runs)
    assert "Benchmarks" not in write_summary(analyse(matrix))
    add_bits_per_byte(matrix, {}, hellaswag_accuracy=0.29, hellaswag_accuracy_norm=0.3112)
    text = write_summary(analyse(matrix))
    section = text[text.index("Benchmarks\n") :].split("\n\n")[0].splitlines()
    assert section[2].split() == ["run", "tokenizer", "HellaSwag", "normalized"]
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
    assert numbers.bits_per_byte == pytest.approx(numbers.final_val_loss / math.log(2) / 2.0)
    assert numbers.best_bits_per_byte == pytest.approx(numbers.best_val_loss / math.log(2) / 2.0)
