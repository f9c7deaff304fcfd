from __future__ import annotations

from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult, read_result


def test_a_value_of_another_type_or_version_counts_as_missing():
    found = RunResult.from_json({"step": "12", "mfu": float("nan"), "params": 10**400, "of_tomorrow": 1, "device": 3})
    assert found == RunResult.from_json({}) == RunResult()


def test_a_whole_float_is_a_step_and_an_integer_is_a_loss():
    assert RunResult.from_json({"step": 12.0, "final_val_loss": 3}) == RunResult(step=12, final_val_loss=3.0)


def test_a_result_belongs_to_one_attempt_of_one_run():
    result = RunResult(run_id="a", attempt=2)
    assert result.is_of("a", 2)
    assert not result.is_of("a", 1)
    assert not result.is_of("b", 2)
    assert not RunResult().is_of(None, 1)


def test_a_result_without_an_attempt_is_of_the_first_one():
    assert RunResult(run_id="a").is_of("a", 1)


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
