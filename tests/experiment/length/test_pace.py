"""The parts of a run's time, and the steps that fit into a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import train_config
from kmatrix.experiment.length.pace import Pace, mean_pace, pace_of
from kmatrix.records.files import append_jsonl, read_json, write_json
from kmatrix.records.paths import RunDir

PLAIN = replace(train_config(), eval_interval=1_000_000, save_best=False, checkpoint_interval=0)
PACE = Pace(overhead_s=10.0, step_s=0.5)


def test_the_time_of_a_run_has_everything_around_its_steps():
    pace = Pace(overhead_s=10.0, step_s=0.5, evaluation_s=2.0, benchmark_s=4.0, checkpoint_s=0.25, final_s=1.0)
    assert pace.seconds(PLAIN, 100) == 10 + 50 + 2 * 2 + 4 + 1  # the first and the last evaluation
    assert pace.seconds(replace(PLAIN, eval_interval=10), 100) == 65 + (9 + 2) * 2 - 0
    assert pace.seconds(replace(PLAIN, eval_interval=10, save_best=True), 100) == 87 + 9 * 0.25
    assert pace.seconds(replace(PLAIN, checkpoint_interval=20), 100) == 69 + 4 * 0.25
    assert pace.seconds(replace(PLAIN, keep_weights_every=50), 101) == 69.5 + 2 * 0.25
    assert pace.seconds(replace(PLAIN, sample_interval=25), 100) == 69 + 4 * 4
    assert pace.seconds(replace(PLAIN, checkpoint_minutes=1.0), 100) == 69 + 69 / 60 * 0.25


@given(
    st.floats(0.1, 1e6),
    st.builds(
        Pace,
        overhead_s=st.floats(0, 1000),
        step_s=st.floats(1e-3, 100),
        evaluation_s=st.floats(0, 100),
        checkpoint_s=st.floats(0, 10),
        final_s=st.floats(0, 100),
    ),
    st.integers(1, 1000),
)
def test_the_steps_are_the_largest_number_that_fits(seconds, pace, interval):
    train = replace(PLAIN, eval_interval=interval, checkpoint_interval=7, save_best=True)
    steps = pace.steps_within(train, seconds)
    assert not steps or pace.seconds(train, steps) <= seconds
    assert pace.seconds(train, steps + 1) > seconds


def test_a_part_of_the_budget_is_left_for_one_interruption():
    assert PACE.target_s(1000.0) == 990.0
    assert PACE.target_s(60.0) == pytest.approx(56.4)  # never more than 6 %


def test_a_budget_that_is_shorter_than_the_start_allows_no_step():
    assert PACE.steps_within(PLAIN, 10.4) == 0
    assert PACE.steps_within(PLAIN, 10.5) == 1


def test_several_measurements_are_averaged():
    assert mean_pace([PACE, replace(PACE, step_s=1.5)]) == replace(PACE, step_s=1.0)


def finished_run(folder, phases, **result):
    run = RunDir(folder)
    train = {"global_batch": 4, "block_size": 32, "max_iters": 100, "num_gpus": 1, "device": "cpu"}
    write_json(run.run_json, {"run_id": "a", "name": folder.name, "train": train})
    values = {"run_id": "a", "attempt": 1, "status": "finished", "step": 100, "tokens_per_second": 256.0}
    write_json(run.result, {**values, "spent_s": 70.0, **result})
    for name, step, seconds in phases:
        clock = {"begin_monotonic": 5.0, "end_monotonic": 5.0 + seconds}
        append_jsonl(run.phases, {"phase": name, "step": step, "attempt": 1, "begin": 0.0, "end": 0.0, **clock})
    return run


def test_a_finished_run_has_a_pace_that_gives_its_own_time(tmp_path):
    phases = [("set-up", 0, 3.0), ("evaluation", 0, 2.5), ("checkpoint", 40, 0.5), ("evaluation", 50, 1.5)]
    phases += [("checkpoint", 50, 0.5), ("evaluation", 100, 1.5), ("evaluation", 100, 4.0), ("checkpoint", 100, 1.0)]
    pace = pace_of(finished_run(tmp_path, phases))
    assert pace == Pace(
        overhead_s=pytest.approx(70 - 50 - 3 * 1.5 - 4 - 2), step_s=0.5, evaluation_s=1.5, benchmark_s=4.0,
        checkpoint_s=0.5, final_s=1.0,
    )  # fmt: skip
    train = replace(PLAIN, eval_interval=50, checkpoint_interval=50, hellaswag_interval=0)
    assert pace.seconds(train, 100) == pytest.approx(70 - 0.5)  # it has saved once more


@pytest.mark.parametrize(
    "change",
    [{"attempt": 2}, {"status": "stopped"}, {"tokens_per_second": None}, {"spent_s": None}, {"step": 1}],
)
def test_a_run_that_was_interrupted_or_has_no_numbers_has_no_pace(tmp_path, change):
    assert pace_of(finished_run(tmp_path, [], **change)) is None


def test_a_calibration_that_was_retried_with_a_smaller_micro_batch_has_a_pace_of_its_last_attempt(tmp_path):
    run = finished_run(tmp_path, [("evaluation", 0, 9.0)], attempt=2)
    clock = {"begin": 0.0, "end": 0.0, "begin_monotonic": 0.0, "end_monotonic": 2.0}
    append_jsonl(run.phases, {"phase": "evaluation", "step": 0, "attempt": 2, **clock})
    pace = pace_of(run, retried=True)
    assert pace == Pace(overhead_s=18.0, step_s=0.5, evaluation_s=2.0)  # the failed attempt takes time, too


def test_a_run_without_a_result_has_no_pace(tmp_path):
    run = finished_run(tmp_path, [])
    assert read_json(run.result)
    run.result.unlink()
    assert pace_of(run) is None
