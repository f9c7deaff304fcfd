"""The numbers and curves of a run's log equal those of its merged lines, read plainly one by one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_factory import STARTED, FakeGpus, write_samples
from kmatrix.curves.file import CurvesFile, read_curves_file
from kmatrix.curves.make import (
    END_BYTES,
    MOST_COLUMNS,
    MOST_EVALUATIONS,
    digest_of_ends,
    make_curves,
    read_curves,
    write_curves,
)
from kmatrix.curves.values import curves_of_file
from kmatrix.errors import damaged_files
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult, merged_metrics


def write_lines(folder, lines):
    """Write the log of a run; a text is written as it is."""
    run = RunDir(folder)
    run.path.mkdir(exist_ok=True)
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    run.metrics.write_text("".join(f"{text}\n" for text in texts))
    return run


def training(step, loss=3.0, *, attempt=1, elapsed=None, **values):
    elapsed = float(step) if elapsed is None else elapsed
    head = {"step": step, "time": STARTED + elapsed, "elapsed_s": elapsed, "tokens": step * 1024, "attempt": attempt}
    return {**head, "train/loss": loss, **values}


def evaluation(step, loss, **more):
    line = training(step, **more)
    del line["train/loss"]
    return {**line, "val/loss": loss}


def curves_of(run, attempt=1):
    return curves_of_file(make_curves(run, attempt))


lines = st.lists(
    st.one_of(
        st.builds(
            lambda step, attempt, loss, kind: {"step": step, "attempt": attempt, "tokens": 8 * step, kind: loss},
            st.integers(0, 12),
            st.integers(1, 3),
            st.none() | st.floats(0.5, 11),
            st.sampled_from(["train/loss", "val/loss", "throughput/mfu", "sparsity"]),
        ),
        st.builds(
            lambda step, attempt: {"step": step, "attempt": attempt, "resumed": True},
            st.integers(0, 12),
            st.integers(1, 3),
        ),
        st.sampled_from(["{", "[]", '{"step": -1}', '{"step": 3, "val/loss": "low"}']),
    ),
    max_size=25,
)


@given(lines)
@settings(max_examples=50, deadline=None)
def test_a_log_of_any_order_is_merged_as_its_lines_are(tmp_path_factory, log):
    run = write_lines(tmp_path_factory.mktemp("run"), log)
    curves, merged = curves_of(run), merged_metrics(run.metrics)
    val = [(line.step, line.values["val/loss"]) for line in merged if line.values.get("val/loss") is not None]
    train = [(line.step, line.values["train/loss"]) for line in merged if line.values.get("train/loss") is not None]
    mfu = [value for line in merged if (value := line.values.get("throughput/mfu")) is not None]
    assert [(point.step, point.loss) for point in curves.val] == val
    assert list(zip(curves.train.step, curves.train.mean, strict=True)) == [
        (step, float(f"{loss:.7g}")) for step, loss in train
    ]
    assert curves.measured.mfu == (statistics.median(mfu[1:] or mfu) if mfu else None)
    assert curves.measured.step == (merged[-1].step if merged else None)
    assert curves.measured.final_val_loss == (val[-1][1] if val else None)
    assert curves.measured.best_val_loss == min((loss for _, loss in val), default=None)


def test_time_accumulates_over_attempts_whose_clock_starts_again(tmp_path):
    first = [evaluation(step, 4.0, elapsed=2.0 * step) for step in (0, 1, 2)]
    again = [evaluation(step, 3.0, attempt=2, elapsed=step - 1.0) for step in (3, 4)]
    run = write_lines(tmp_path / "run", [*first, {"step": 2, "attempt": 2, "resumed": True}, *again])
    assert [point.seconds for point in curves_of(run).val] == [0.0, 2.0, 4.0, 6.0, 7.0]


def test_the_first_step_and_the_last_time_of_an_attempt_include_lost_work(tmp_path):
    log = [training(0), training(10), {"step": 5, "attempt": 2, "resumed": True}, training(6, attempt=2, elapsed=20.0)]
    curves = curves_of(write_lines(tmp_path / "run", log))
    assert curves.first_steps == {1: 0, 2: 5}
    assert curves.last_times == {1: STARTED + 10, 2: STARTED + 20}


def test_a_spike_of_one_step_in_twenty_thousand_stays_in_the_curve(tmp_path):
    run = write_lines(tmp_path / "run", [training(step, 97.5 if step == 12_345 else 3.0) for step in range(20_000)])
    curve = curves_of(run).train
    assert (curve.width, len(curve), sum(curve.count)) == (50, MOST_COLUMNS, 20_000)
    (at,) = (at for at, highest in enumerate(curve.maximum) if highest > 3)
    assert (curve.step[at], curve.maximum[at], curve.minimum[at]) == (12_300, 97.5, 3.0)
    assert curve.mean[at] == pytest.approx(3 + 94.5 / 50)


def test_columns_of_columns_are_columns_of_the_points(tmp_path):
    losses = [4 + math.sin(step) for step in range(5000)]
    run = write_lines(tmp_path / "run", [training(step, loss) for step, loss in enumerate(losses)])
    curve = curves_of(run).train.thinned(60)
    assert (curve.width, len(curve)) == (91, 55)
    for at, step in enumerate(curve.step):
        own = losses[step : step + curve.width]
        assert curve.count[at] == len(own)
        assert curve.mean[at] == pytest.approx(sum(own) / len(own), rel=1e-6)
        assert (curve.minimum[at], curve.maximum[at]) == pytest.approx((min(own), max(own)), rel=1e-6)


def test_all_evaluations_stay_up_to_the_limit_and_then_every_nth_with_the_lowest_and_the_last(tmp_path):
    losses = [3 + (step * 7919 % 1000) / 1000 for step in range(1000)]
    losses[617] = 2.0001234567890123
    exact = curves_of(write_lines(tmp_path / "few", [evaluation(s, losses[s]) for s in range(MOST_EVALUATIONS)]))
    assert [point.loss for point in exact.val] == losses[:MOST_EVALUATIONS]
    curves = curves_of(write_lines(tmp_path / "many", [evaluation(step, loss) for step, loss in enumerate(losses)]))
    points = {point.step: point for point in curves.val}
    assert list(points) == sorted({*range(0, 1000, 3), 617, 999})
    assert curves.val.total == 1000
    assert points[617].loss == 2.0001234567890123
    assert (points[617].tokens, points[617].seconds) == (617 * 1024, 617.0)
    fewer = curves.val.thinned(12)
    assert len(fewer) == 12
    assert {617, 999} <= {point.step for point in fewer}
    assert all(points[point.step] == point for point in fewer)


def test_a_loss_that_is_not_finite_is_left_out(tmp_path):
    log = [training(0, 3.0), training(1, None), evaluation(2, None), training(2, 2.5)]
    curves = curves_of(write_lines(tmp_path / "run", log))
    assert (list(curves.train.step), list(curves.train.mean)) == ([0, 2], [3.0, 2.5])
    assert not curves.val
    assert curves.measured.final_val_loss is None


def test_the_knots_of_the_time_follow_every_point(tmp_path):
    elapsed, log = 0.0, []
    for step in range(3000):
        elapsed += 0.2 + (60.0 if step in (700, 2100) else 0.0) + 0.01 * math.sin(step)
        log.append(training(step, elapsed=elapsed))
    curves = curves_of(write_lines(tmp_path / "run", log))
    room = (log[-1]["elapsed_s"] - log[0]["elapsed_s"]) / (2 * MOST_COLUMNS)
    assert len(curves.seconds) < 100
    assert all(abs(curves.seconds.at(line["step"]) - line["elapsed_s"]) <= room * 1.001 for line in log)
    assert len(curves.tokens) == 2
    assert curves.tokens.at(1234) == pytest.approx(1234 * 1024)


def test_a_run_without_a_log_has_no_curves(tmp_path):
    curves = read_curves(RunDir(tmp_path), 1, keep=True)
    assert (len(curves.val), len(curves.train), curves.lines, curves.measured.step) == (0, 0, 0, None)


def record_energy(run, *, counter=True, samples=60, power=(150.0, 50.0), name="NVIDIA A10G"):
    """Record two devices from the first line of the log on, one sample per second."""
    run.gpu_samples.unlink(missing_ok=True)
    gpus = FakeGpus(memory=(9.0, 9.0), power=power, utilization=(9.0, 9.0), samples=samples, counter=counter, name=name)
    write_samples(run.gpu_samples, gpus, list(gpus.snapshots()))


@pytest.mark.parametrize("counter", [True, False])
def test_joules_are_those_of_all_devices_since_the_training_began(tmp_path, counter):
    log = [training(step, elapsed=step / 2) for step in range(100)]
    run = write_lines(tmp_path / "run", [evaluation(0, 9.0), *log, evaluation(100, 3.0, elapsed=50.0)])
    record_energy(run, counter=counter)
    curves = curves_of(run)
    assert [point.joules for point in curves.val] == [0.0, 10_000.0]
    assert curves.joules.at(50) == pytest.approx(5000, rel=1e-3)
    assert not curves.simulated


def test_joules_skip_what_an_attempt_lost_and_the_time_between_attempts(tmp_path):
    first = [training(step, elapsed=float(step)) for step in range(11)]  # of which steps 6 to 10 are lost
    again = [training(step, attempt=2, elapsed=float(step)) | {"time": STARTED + 25 + step} for step in range(6, 11)]
    run = write_lines(tmp_path / "run", [*first, {"step": 5, "attempt": 2, "resumed": True}, *again])
    record_energy(run)
    assert curves_of(run, 2).joules.at(10) == pytest.approx(200.0 * 10)


def test_joules_are_unknown_if_the_recording_does_not_hold_the_whole_training(tmp_path):
    run = write_lines(tmp_path / "run", [training(step, elapsed=float(step)) for step in range(60)])
    record_energy(run, samples=50)
    assert not curves_of(run).joules
    record_energy(run, power=(150.0, None), counter=False)
    assert not curves_of(run).joules


def test_joules_of_simulated_devices_are_marked(tmp_path):
    run = write_lines(tmp_path / "run", [training(step, elapsed=float(step)) for step in range(20)])
    record_energy(run, name="NVIDIA A10G (simulated)")
    assert curves_of(run).simulated


def test_curves_are_read_from_their_file_until_the_log_the_recording_or_the_attempt_changes(tmp_path):
    run = write_lines(tmp_path / "run", [training(step) for step in range(10)])
    written = read_curves(run, 1, keep=True)
    stored = run.curves.read_bytes()
    assert read_curves(run, 1, keep=False) == written
    with run.metrics.open("a") as file:
        file.write(json.dumps(training(10)) + "\n")
    assert len(read_curves(run, 1, keep=False).train) == 11
    assert run.curves.read_bytes() == stored  # the run may still go on
    assert len(read_curves(run, 1, keep=True).train) == 11
    longer = run.curves.read_bytes()
    record_energy(run, samples=30)
    assert read_curves(run, 1, keep=True).joules
    recorded = run.curves.read_bytes()
    read_curves(run, 2, keep=True)
    assert len({stored, longer, recorded, run.curves.read_bytes()}) == 4
    assert not list(run.path.glob(".*"))


def test_the_report_of_a_damaged_log_counts_its_lines_with_and_without_the_file(tmp_path):
    run = write_lines(tmp_path / "run", [training(0), "{", training(1)])
    for _ in range(2):
        read_curves(run, 1, keep=True)
        assert damaged_files() == [f"{run.metrics}: 1 of 3 lines are damaged and were skipped"]


@pytest.mark.parametrize("steps", [10, 200])  # a log that is shorter, and one that is longer, than its two ends
@pytest.mark.parametrize("line", [0, -1])
def test_the_file_of_another_run_of_the_same_size_is_made_again(tmp_path, steps, line):
    logs = [[training(step) for step in range(steps)] for _ in range(2)]
    logs[1][line]["train/loss"] = 4.0
    run, other = (write_lines(tmp_path / name, log) for name, log in zip("ab", logs, strict=True))
    assert run.metrics.stat().st_size == other.metrics.stat().st_size
    good = read_curves(run, 1, keep=True)
    text = run.curves.read_text()
    read_curves(other, 1, keep=True)
    run.curves.write_bytes(other.curves.read_bytes())
    assert read_curves(run, 1, keep=True) == good
    assert run.curves.read_text() == text


def test_a_file_that_does_not_name_the_ends_of_its_log_is_made_again(tmp_path):
    run = write_lines(tmp_path / "run", [training(step) for step in range(10)])
    good = read_curves(run, 1, keep=True)
    text = run.curves.read_text()
    stored = json.loads(text)
    del stored["metrics_ends"]
    stored["train"]["mean"][3] = 9.0
    run.curves.write_text(json.dumps(stored))
    assert read_curves(run, 1, keep=True) == good
    assert run.curves.read_text() == text


def test_a_file_is_not_believed_without_a_log(tmp_path):
    run = write_lines(tmp_path / "run", [])
    forged = CurvesFile(metrics_bytes=0, attempt=1, measured=RunResult(final_val_loss=0.1, step=9))
    write_curves(run, forged)
    assert read_curves(run, 1, keep=False).measured == RunResult()


def test_the_digest_of_a_log_has_the_bytes_of_both_ends_once(tmp_path):
    path = tmp_path / "log"
    for size in (1, END_BYTES, END_BYTES + 1, 2 * END_BYTES, 2 * END_BYTES + 1):
        data = os.urandom(size)
        path.write_bytes(data + b"what is appended meanwhile")
        ends = data if size <= 2 * END_BYTES else data[:END_BYTES] + data[-END_BYTES:]
        assert digest_of_ends(path, size) == hashlib.sha256(ends).hexdigest()
    assert digest_of_ends(path, 0) == digest_of_ends(tmp_path / "missing", 5) == ""


DAMAGES = {
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "no fields": lambda text: '{"schema": 1}',
    "newer": lambda text: '{"schema": 99, "metrics_bytes": 7}',
    "negative": lambda text: text.replace('"metrics_bytes":', '"metrics_bytes":-'),
    "text": lambda text: "x" * 1000,
    "fewer means": lambda text: text.replace('"mean":[3.0,', '"mean":['),
    "unsorted": lambda text: text.replace('"step":[0,1,', '"step":[1,0,'),
    "no width": lambda text: text.replace('"width":1', '"width":0'),
    "NaN": lambda text: text.replace("3.0", "NaN"),
    "cut": lambda text: text[: len(text) // 2],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(tmp_path, damage):
    run = write_lines(tmp_path / "run", [training(step) for step in range(10)])
    good = read_curves(run, 1, keep=True)
    text = run.curves.read_text()
    changed = DAMAGES[damage](text)
    assert changed != text
    run.curves.write_text(changed)
    assert read_curves(run, 1, keep=True) == good
    assert run.curves.read_text() == text
    damaged_files()


def test_numbers_that_no_run_has_are_not_stored(tmp_path):
    """A reader would take them for damage at each report."""
    run = write_lines(tmp_path / "run", [training(step, elapsed=-5.0 - step) for step in range(3)])
    read_curves(run, 1, keep=True)
    assert read_curves_file(run) is None
    assert not damaged_files()


def test_the_folder_of_somebody_else_and_a_link_are_only_read(tmp_path, monkeypatch):
    run = write_lines(tmp_path / "run", [training(0)])
    (tmp_path / "link").symlink_to(run.path)
    read_curves(RunDir(tmp_path / "link"), 1, keep=True)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert read_curves(run, 1, keep=True).lines == 1
    assert not run.curves.exists()


def test_a_link_in_place_of_the_file_is_replaced_not_followed(tmp_path):
    run = write_lines(tmp_path / "run", [training(0)])
    (tmp_path / "precious").write_text("text")
    run.curves.symlink_to(tmp_path / "precious")
    read_curves(run, 1, keep=True)
    damaged_files()
    assert (tmp_path / "precious").read_text() == "text"
    assert not run.curves.is_symlink()


def test_a_full_disk_does_not_concern_the_reader(tmp_path, monkeypatch):
    run = write_lines(tmp_path / "run", [training(0)])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kmatrix.curves.make.write_bytes", full)
    assert read_curves(run, 1, keep=True).lines == 1
    with pytest.raises(OSError, match="No space"):
        write_curves(run, CurvesFile(metrics_bytes=0))
