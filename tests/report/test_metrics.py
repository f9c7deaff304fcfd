"""The numbers and curves of a run are those of the lines of its log that count."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_factory import STARTED, FakeGpus, write_samples
from kmatrix.errors import damaged_files
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunNumbers, merged_metrics
from kmatrix.report.gpu.recordings import recordings_of
from kmatrix.report.metrics import MOST_POINTS, Evaluations, Log, TrainingLosses, read, thinned


def write_log(folder, lines):
    """Write the log of a run; a text is written as it is."""
    run = RunDir(folder)
    run.path.mkdir(exist_ok=True)
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    run.metrics.write_text("".join(f"{text}\n" for text in texts))
    return run


def training(step, loss=3.0, *, attempt=1, elapsed=None):
    elapsed = float(step) if elapsed is None else elapsed
    head = {"step": step, "time": STARTED + elapsed, "elapsed_s": elapsed, "tokens": step * 1024, "attempt": attempt}
    return {**head, "train/loss": loss}


def evaluation(step, loss, **more):
    line = training(step, **more)
    del line["train/loss"]
    return {**line, "val/loss": loss}


def resumed(step, attempt=2):
    return {"step": step, "attempt": attempt, "resumed": True}


log_lines = st.lists(
    st.one_of(
        st.builds(
            lambda step, attempt, loss, kind: {"step": step, "attempt": attempt, "tokens": 8 * step, kind: loss},
            st.integers(0, 12),
            st.integers(1, 3),
            st.none() | st.floats(0.5, 11),
            st.sampled_from(["train/loss", "val/loss", "throughput/mfu", "sparsity"]),
        ),
        st.builds(resumed, st.integers(0, 12), st.integers(1, 3)),
        st.sampled_from(["{", "[]", '{"step": -1}', '{"step": 3, "val/loss": "low"}']),
    ),
    max_size=25,
)


@given(log_lines)
@settings(max_examples=50, deadline=None)
def test_a_log_of_any_order_gives_the_values_of_its_merged_lines(tmp_path_factory, lines):
    run = write_log(tmp_path_factory.mktemp("run"), lines)
    found, merged = read(run, None), merged_metrics(run.metrics)
    val, train, mfu = (
        [(line.step, line.values[name]) for line in merged if line.values.get(name) is not None]
        for name in ("val/loss", "train/loss", "throughput/mfu")
    )
    assert list(zip(found.val.step, found.val.loss, strict=True)) == val
    assert list(zip(found.train.step, found.train.loss, strict=True)) == train
    assert found.numbers.mfu == (statistics.median([value for _, value in mfu[1:] or mfu]) if mfu else None)
    assert found.numbers.step == (merged[-1].step if merged else None)
    assert found.numbers.final_val_loss == (val[-1][1] if val else None)
    assert found.numbers.best_val_loss == min((loss for _, loss in val), default=None)


def test_a_resume_voids_later_steps_and_time_adds_up_over_attempts_whose_clock_starts_again(tmp_path):
    first = [evaluation(step, 4.0, elapsed=2.0 * step) for step in (0, 1, 2, 9)]
    again = [evaluation(step, 3.0, attempt=2, elapsed=step - 1.0) for step in (3, 4)]
    found = read(write_log(tmp_path / "run", [*first, resumed(2), *again]), None)
    assert found.val.step == (0, 1, 2, 3, 4)
    assert found.val.seconds == (0.0, 2.0, 4.0, 6.0, 7.0)
    assert (found.numbers.seconds, found.numbers.tokens, found.numbers.attempt) == (7.0, 4096, 2)


def test_the_first_step_and_the_last_time_of_an_attempt_include_lost_work(tmp_path):
    lines = [training(0), training(10), resumed(5), training(6, attempt=2, elapsed=20.0)]
    log = Log(write_log(tmp_path / "run", lines).metrics)
    assert log.last_times == {1: STARTED + 10, 2: STARTED + 20}


def test_a_log_cut_at_any_byte_is_a_log_of_its_complete_lines(tmp_path):
    run = write_log(tmp_path / "run", [evaluation(0, 9.0), training(1), evaluation(1, 4.0)])
    data = run.metrics.read_bytes()
    for size in range(len(data)):
        run.metrics.write_bytes(data[:size])
        complete = data[:size].count(b"\n")
        found = read(run, None)
        assert (found.numbers.step, found.numbers.final_val_loss) == [(None, None), (0, 9.0), (1, 9.0)][complete]
        assert not damaged_files()


def test_a_damaged_line_is_named_once_and_a_missing_log_is_empty(tmp_path):
    run = write_log(tmp_path / "run", [training(0), "{", training(1)])
    for _ in range(2):
        assert read(run, None).train.step == (0, 1)
    assert damaged_files() == [f"{run.metrics}: 1 of 3 lines are damaged and were skipped"]
    nothing = read(RunDir(tmp_path / "none"), None)
    assert (nothing.numbers, nothing.val, nothing.train) == (RunNumbers(), Evaluations(), TrainingLosses())


def test_a_spike_of_one_step_and_the_lowest_loss_stay_in_a_thinned_curve():
    losses = [3.0 + (step * 7919 % 1000) / 1e4 for step in range(20_000)]
    losses[12_345], losses[777] = 97.5, 2.5
    kept = thinned(losses)
    assert len(kept) == MOST_POINTS
    assert {0, 777, 12_345, 19_999} <= set(kept)
    assert thinned(losses[:MOST_POINTS]).tolist() == list(range(MOST_POINTS))


@given(st.integers(2 * MOST_POINTS, 5000), st.floats(0.5, 1))
def test_thinned_seeds_have_common_steps_also_if_one_ended_early(evaluations, share):
    seeds = [thinned([0.0] * count) for count in (evaluations, int(share * evaluations))]
    assert len(set(seeds[0]) & set(seeds[1])) >= MOST_POINTS * 3 // 16


def record_energy(run, *, power=(150.0, 50.0), samples=60):
    """Record two devices from the first line of the log on, one sample per second."""
    gpus = FakeGpus(memory=(9.0, 9.0), power=power, utilization=(9.0, 9.0), samples=samples)
    write_samples(run.gpu_samples, gpus, list(gpus.snapshots()))


def test_joules_skip_what_an_attempt_lost_and_the_time_between_attempts(tmp_path):
    first = [evaluation(0, 9.0), *(training(step) for step in range(1, 11))]  # steps 6 to 10 are lost
    again = [evaluation(step, 4.0, attempt=2) | {"time": STARTED + 25 + step} for step in range(6, 11)]
    run = write_log(tmp_path / "run", [*first, resumed(5), *again])
    record_energy(run)
    assert read(run, recordings_of(run)[0].samples).val.joules == (0.0, *(200.0 * step for step in range(6, 11)))


@pytest.mark.parametrize("change", [{"samples": 20}, {"power": (150.0, None)}])
def test_joules_are_unknown_from_where_the_recording_does_not_hold_the_training(tmp_path, change):
    run = write_log(tmp_path / "run", [evaluation(step, 4.0) for step in (1, 59)])
    record_energy(run, **change)
    assert read(run, recordings_of(run)[0].samples).val.joules[1] is None
