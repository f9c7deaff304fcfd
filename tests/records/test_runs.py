"""Read the JSON files of runs and matrices as values, tolerating missing and damaged fields."""

from __future__ import annotations

from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import (
    Adjustment,
    MatrixFile,
    MetricLine,
    RunFile,
    RunResult,
    Tracking,
    UsedFile,
    merged_metrics,
    read_result,
    read_run_file_or_empty,
)


def test_a_value_of_another_type_or_version_counts_as_missing():
    found = RunResult.from_json({"step": "12", "mfu": float("nan"), "params": 10**400, "future_field": 1, "device": 3})
    assert found == RunResult.from_json({}) == RunResult()


def test_a_whole_float_is_a_step_and_an_integer_is_a_loss():
    assert RunResult.from_json({"step": 12.0, "final_val_loss": 3}) == RunResult(step=12, final_val_loss=3.0)


def test_a_result_belongs_to_one_attempt_of_one_run():
    result = RunResult(run_id="a", attempt=2)
    assert result.belongs_to("a", 2)
    assert not result.belongs_to("a", 1)
    assert not result.belongs_to("b", 2)
    assert not RunResult().belongs_to(None, 1)


def test_a_result_without_an_attempt_belongs_to_the_first_one():
    assert RunResult(run_id="a").belongs_to("a", 1)


def test_missing_values_come_from_the_other_result():
    assert RunResult(step=3, mfu=0.0).or_else(RunResult(step=2, mfu=0.5, tokens=7)) == RunResult(
        step=3, mfu=0.0, tokens=7
    )


def test_an_unreadable_result_is_none(tmp_path):
    run = RunDir(tmp_path)
    assert read_result(run) is None
    run.result.write_text('{"schema": 1, "sta')
    assert read_result(run) is None
    write_json(run.result, {"status": "finished"})
    assert read_result(run) == RunResult(status="finished")


def test_a_run_file_without_or_with_damaged_values_is_empty():
    damaged = {"axes": [1], "symbols": None, "asked": "all", "train": 3, "tracking": [], "provenance": "here"}
    assert RunFile.from_json(damaged) == RunFile.from_json({}) == RunFile()
    assert RunFile.from_json({"train_tokens": "many", "expected_s": None, "timeout_s": None}) == RunFile()


def test_a_run_file_has_typed_values():
    run = RunFile.from_json(
        {
            "run_id": "a1",
            "axes": {"gpus": 2},
            "symbols": {"EXCLUSIVE": "y", "GPT2_MIN_LR": None},
            "asked": ["GPT2_MAX_ITERS"],
            "train": {"max_iters": 3, "future_field": 1},
            "timeout_s": 60,
        }
    )
    assert (run.run_id, run.axes, run.symbols) == ("a1", {"gpus": "2"}, {"EXCLUSIVE": "y"})
    assert (run.asked, run.train.max_iters, run.timeout_s) == (frozenset({"GPT2_MAX_ITERS"}), 3, 60.0)
    assert run.train_values == {"max_iters": 3, "future_field": 1}


def test_tracking_without_trackers_is_an_empty_object():
    assert Tracking(project="mine").to_json() == {}
    tracking = Tracking(trackers=("wandb",), project="mine", limit_s=60.0)
    assert Tracking.from_json(tracking.to_json()) == tracking


def test_an_unreadable_run_file_is_empty(tmp_path):
    run = RunDir(tmp_path)
    run.run_json.write_text('{"run_id"')
    assert read_run_file_or_empty(run) == RunFile()


def test_the_readable_fields_of_a_damaged_matrix_file_are_used():
    damaged = {"axes": [1, {"label": "gpus", "values": [1, 2]}], "runs": {}, "cuts": None, "overrides": "A=1"}
    assert MatrixFile.from_json({}) == MatrixFile()
    assert MatrixFile.from_json(damaged) == MatrixFile(axes={"gpus": ("1", "2")})


def test_a_line_without_a_step_is_not_a_line_of_metrics():
    assert MetricLine.from_json({"train/loss": 1.0}) is None
    assert MetricLine.from_json({"step": "3", "train/loss": 1.0}) is None


def test_a_value_that_is_not_a_finite_number_is_none():
    line = MetricLine.from_json({"schema": 1, "step": 3, "time": 5, "train/loss": None, "note": "text", "tokens": 7})
    assert line == MetricLine(step=3, time=5.0, values={"train/loss": None, "note": None, "tokens": 7})
    assert line.attempt == 1


def test_lines_of_a_step_are_merged_and_a_resume_voids_later_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line in (
        {"step": 0, "time": 1.0, "attempt": 1, "train/loss": 5.0},
        {"step": 0, "time": 2.0, "attempt": 1, "val/loss": 6.0},
        {"step": 1, "time": 3.0, "attempt": 1, "train/loss": 4.0},
        {"step": 0, "time": 4.0, "attempt": 2, "resumed": True},
        {"step": 2, "time": 5.0, "attempt": 2, "train/loss": 3.0},
        {"event": "of another version"},
    ):
        append_jsonl(path, line)
    assert merged_metrics(path) == [
        MetricLine(step=0, time=2.0, values={"attempt": 1, "train/loss": 5.0, "val/loss": 6.0}),
        MetricLine(step=2, time=5.0, values={"attempt": 2, "train/loss": 3.0}),
    ]


def test_adjustments_of_the_trainer_are_read_and_damaged_ones_ignored():
    entry = {"field": "batch_size", "from": 12, "to": 6, "why": "out of memory"}
    found = UsedFile.from_json({"train": {"batch_size": 6}, "adjusted": [entry, 3]})
    assert found.adjusted == (Adjustment("batch_size", 12, 6, "out of memory"),)
    assert found.train_values == {"batch_size": 6}
    assert UsedFile.from_json({"train": 1, "adjusted": None}) == UsedFile()
