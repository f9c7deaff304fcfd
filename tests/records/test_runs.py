"""Read the JSON files of runs and matrices as records."""

from __future__ import annotations

import json

import pytest

from kmatrix.errors import RecordError, damaged_files
from kmatrix.records.decode import decode_bytes, decode_line
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.matrix import Plan
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import (
    Adjustment,
    ExcludedCells,
    MetricLine,
    MetricValues,
    RunFile,
    RunResult,
    VerdictRules,
    merged_metrics,
    metric_line_of,
    read_run_file,
    read_run_file_or_empty,
)


def metric_line(line):
    return metric_line_of(decode_line(line, MetricValues) or {})


def parse(values, kind):
    return decode_bytes(json.dumps(values).encode(), kind, "file")


def test_a_value_of_another_type_is_damage_and_an_unknown_one_is_ignored():
    for damaged in ({"step": "12"}, {"mfu": float("nan")}, {"params": 10**400}, {"device": 3}, {"step": 12.5}):
        with pytest.raises(RecordError, match="is damaged"):
            parse(damaged, RunResult)
    assert parse({"future_field": 1}, RunResult) == RunResult()


def test_an_integer_is_a_loss():
    assert parse({"step": 12, "final_val_loss": 3}, RunResult) == RunResult(step=12, final_val_loss=3.0)


@pytest.mark.parametrize(
    "damaged",
    [
        {"axes": [1]},
        {"symbols": None},
        {"asked": "all"},
        {"train": 3},
        {"tracking": []},
        {"provenance": "here"},
        {"train_tokens": "many"},
        {"train": {"max_iters": "12"}},
        {"provenance": {"gpus": [3]}},
        {"symbols": {"BUDGET_DOLLARS": "abc"}},
        {"symbols": {"BUDGET_HOURS": "inf"}},
        {"symbols": {"ALERT_LOSS": "high"}},
    ],
)
def test_a_run_file_with_a_value_of_another_type_is_damaged(damaged):
    with pytest.raises(RecordError, match="is damaged") as caught:
        parse(damaged, RunFile)
    assert next(iter(damaged)) in caught.value.why


def test_counts_of_a_run_file_are_digits_or_empty():
    symbols = {"BUDGET_DOLLARS": "50", "BUDGET_HOURS": "", "ALERT_LOSS": "5", "SEED": "any text of another symbol"}
    assert parse({"symbols": symbols}, RunFile).symbols == symbols


def test_a_run_file_has_typed_values(tmp_path):
    run = RunDir(tmp_path)
    write_json(
        run.run_json,
        {
            "run_id": "a1",
            "axes": {"gpus": "2"},
            "symbols": {"EXCLUSIVE": "y"},
            "asked": ["GPT2_MAX_ITERS"],
            "train": {"max_iters": 3, "future_field": 1},
            "timeout_s": 60,
        },
    )
    record = read_run_file(run)
    assert (record.run_id, record.axes, record.symbols) == ("a1", {"gpus": "2"}, {"EXCLUSIVE": "y"})
    assert (record.asked, record.train.max_iters, record.timeout_s) == (frozenset({"GPT2_MAX_ITERS"}), 3, 60.0)


def test_an_unreadable_run_file_is_empty(tmp_path):
    run = RunDir(tmp_path)
    run.run_json.write_text('{"run_id"')
    assert read_run_file_or_empty(run) == RunFile()


def test_a_matrix_file_has_axes_and_excluded_cells():
    axes = [{"label": "gpus", "symbol": "GPT2_NUM_GPUS", "values": ["1", "2"]}]
    plan = parse(
        {"axes": axes, "cuts": [{"count": 2, "reason": "no GPU"}], "runs": [{"name": "a", "run_id": "x"}]}, Plan
    )
    assert plan.axes == {"gpus": ("1", "2")}
    assert plan.excluded == (ExcludedCells(2, "no GPU"),)
    assert [run.name for run in plan.runs] == ["a"]


@pytest.mark.parametrize(
    "line",
    ['{"train/loss": 1.0}', '{"step": "3"}', '{"step": 3, "note": "text"}', '{"step": 3, "val/loss": NaN}', "[]"],
)
def test_a_damaged_line_is_not_a_line_of_metrics(line):
    assert metric_line(line) is None


def test_a_line_of_metrics_has_its_numbers_as_they_are():
    line = metric_line('{"schema": 1, "step": 3, "time": 5, "train/loss": null, "tokens": 7}')
    assert line == MetricLine(step=3, time=5.0, values={"train/loss": None, "tokens": 7})
    assert line.attempt == 1


def test_damaged_lines_of_metrics_are_named_and_the_others_used(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "train/loss": 5.0}\n{"step": 1, "train/loss": NaN}\n{"step": 2, "train/loss": 4.0}\n')
    damaged_files()
    assert [line.step for line in merged_metrics(path)] == [0, 2]
    assert damaged_files() == [f"{path}: 1 of 3 lines are damaged and were skipped"]


def test_lines_of_a_step_are_merged_and_a_resume_voids_later_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line in (
        {"step": 0, "time": 1.0, "attempt": 1, "train/loss": 5.0},
        {"step": 0, "time": 2.0, "attempt": 1, "val/loss": 6.0},
        {"step": 1, "time": 3.0, "attempt": 1, "train/loss": 4.0},
        {"step": 0, "time": 4.0, "attempt": 2, "resumed": True},
        {"step": 2, "time": 5.0, "attempt": 2, "train/loss": 3.0},
        {"event": 3},
    ):
        append_jsonl(path, line)
    assert merged_metrics(path) == [
        MetricLine(step=0, time=2.0, values={"attempt": 1, "train/loss": 5.0, "val/loss": 6.0}),
        MetricLine(step=2, time=5.0, values={"attempt": 2, "train/loss": 3.0}),
    ]


def test_adjustments_of_the_trainer_are_read():
    entry = {"field": "batch_size", "from": 12, "to": 6, "why": "out of memory"}
    found = parse({"used": {"batch_size": 6}, "adjusted": [entry]}, RunResult)
    assert found.adjusted == (Adjustment(name="batch_size", asked=12, used=6, why="out of memory"),)
    assert found.used == {"batch_size": 6}


@pytest.mark.parametrize(
    "damaged",
    [
        {"confidence": 0.0},  # every difference would be "better"
        {"confidence": 0.49},
        {"confidence": 1.0},
        {"confidence": "0.95"},
        {"seeds": [-1]},
        {"seeds": [2**31]},
        {"seeds": list(range(101))},
        {"seeds_min": 1},
        {"seeds_min": 101},
        {"min_difference": -0.1},
        {"baseline": {"optimizer": 3}},
        [],
    ],
)
def test_rules_that_no_matrix_has_are_damage(damaged):
    with pytest.raises(RecordError, match="is damaged"):
        parse({"verdict": damaged}, Plan)


def test_the_widest_rules_are_read():
    rules = {"seeds_auto": True, "seeds": [*range(99), 2**31 - 1], "seeds_min": 100, "confidence": 0.5}
    assert parse({"verdict": {**rules, "future": 1}}, Plan).verdict == VerdictRules(
        seeds_auto=True, seeds=(*range(99), 2**31 - 1), seeds_min=100, confidence=0.5
    )
