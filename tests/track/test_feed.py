"""Convert the files of a run to tracker points: each step once, with its real time, without void lines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.json_array import ArrayTail, JsonArrayFile
from kmatrix.records.decode import replaced
from kmatrix.records.files import LineTail, append_jsonl, write_json
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import merged_metrics
from kmatrix.status.alerts import Alert, AlertKind, Severity
from kmatrix.track.feed import COARSE_S, FINE_S, AlertTail, DeviceTail, PointTail, RunFeed
from kmatrix.track.tracker import RUN_ID, AlertLevel, identity
from records_factory import write_alerts
from track_factory import (
    START_TIME,
    append_metrics,
    append_resume,
    expected_values,
    loss,
    make_run_dir,
    write_end,
    write_nodes,
    write_recording,
    write_training,
)


@pytest.fixture
def run(tmp_path):
    return make_run_dir(tmp_path)


def points_of(tail, *, ended=True):
    found = []
    while points := tail.read(ended=ended):
        found += points
    return found


def all_of(feed):
    batches = []
    while batch := feed.read(ended=True):
        batches.append(batch)
    return batches


def test_lines_of_one_step_form_one_point_with_the_time_of_the_last_line(run):
    append_metrics(run, 0, val__loss=5.5)
    append_metrics(run, 0, train__loss=5.4, time=START_TIME + 0.5)
    append_metrics(run, 1, train__loss=5.3)
    first, second = points_of(PointTail(run.metrics))
    assert (first.step, first.time) == (0, START_TIME + 0.5)
    assert first.values == {"attempt": 1, "val/loss": 5.5, "train/loss": 5.4}
    assert second.values["train/loss"] == 5.3


def test_a_step_is_complete_when_the_next_begins_and_the_last_step_at_the_end(run):
    tail = PointTail(run.metrics)
    write_training(run, range(3))
    append_metrics(run, 3, val__loss=5.0)
    assert [point.step for point in tail.read()] == [0, 1, 2]
    assert tail.read() == []
    assert [point.step for point in tail.read(ended=True)] == [3]
    assert tail.read(ended=True) == []


def test_a_step_with_its_training_loss_is_complete_without_a_later_line(run):
    tail = PointTail(run.metrics)
    append_metrics(run, 0, val__loss=5.0)
    assert tail.read() == []
    append_metrics(run, 0, train__loss=5.1)
    (point,) = tail.read()
    assert point.values == {"attempt": 1, "val/loss": 5.0, "train/loss": 5.1}


def test_the_losses_are_the_first_values_of_a_point(run):
    append_metrics(run, 0, val__loss=5.0)
    append_metrics(run, 0, tokens=7, train__loss=5.1)
    assert list(points_of(PointTail(run.metrics))[0].values)[:2] == ["train/loss", "val/loss"]


def test_an_unknown_number_is_omitted(run):
    append_metrics(run, 0, train__loss=None, throughput__mfu=None, train__lr=1e-3)
    (point,) = points_of(PointTail(run.metrics))
    assert point.values == {"attempt": 1, "train/lr": 1e-3}


def test_lines_made_void_before_a_poll_are_never_returned(run):
    write_training(run, range(30))
    append_resume(run, 20)
    write_training(run, range(20, 40), attempt=2, off=0.5)
    points = points_of(PointTail(run.metrics))
    assert [point.step for point in points] == list(range(40))
    assert points[25].values["train/loss"] == pytest.approx(loss(25) + 0.5)
    assert {p.step: p.values for p in points} == {line.step: line.values for line in merged_metrics(run.metrics)}


def test_a_partial_step_made_void_between_two_polls_is_not_returned(run):
    tail = PointTail(run.metrics)
    write_training(run, range(25))
    append_metrics(run, 25, val__loss=4.0)
    assert tail.read()[-1].step == 24
    append_resume(run, 20)
    write_training(run, range(20, 22), attempt=2)
    assert [point.step for point in tail.read()] == [20]


def test_an_incomplete_line_is_read_later_and_a_permanently_broken_one_costs_only_itself(run):
    write_training(run, range(2))
    tail = LineTail(run.metrics, dict)
    assert len(tail.read()) == 3
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "time"')
        file.flush()
        assert tail.read() == []
        file.write(': 7}\n{"step": 3, "ti\n{"step": 4}\n')
    assert [value["step"] for _, value in tail.read()] == [2, 4]


@settings(deadline=None, max_examples=15)
@given(cuts=st.lists(st.integers(0, 3000), max_size=8))
def test_the_points_do_not_depend_on_the_parts_in_which_a_file_appears(tmp_path_factory, cuts):
    run = make_run_dir(tmp_path_factory.mktemp("parts"))
    write_training(run, range(20))
    content = run.metrics.read_bytes()
    expected = points_of(PointTail(run.metrics))
    run.metrics.write_bytes(b"")
    tail, found, position = PointTail(run.metrics), [], 0
    for end in [*sorted(end for end in cuts if end < len(content)), len(content)]:
        with run.metrics.open("ab") as file:
            file.write(content[position:end])
        position = end
        found += tail.read()
    assert found + points_of(tail) == expected


@settings(deadline=None, max_examples=15)
@given(cuts=st.lists(st.integers(0, 3000), max_size=6))
def test_a_recording_is_read_once_while_its_closing_bracket_is_overwritten(tmp_path_factory, cuts):
    run = make_run_dir(tmp_path_factory.mktemp("parts"))
    tail, found = ArrayTail(run.gpu_stats_multi), []
    for begin in range(0, 9, 3):
        write_recording(run, range(begin, begin + 3))
        content = run.gpu_stats_multi.read_bytes()
        for end in sorted(end for end in cuts if end < len(content)):  # as a reader may see a write in progress
            run.gpu_stats_multi.write_bytes(content[:end] if end > tail._offset else content)
            found += tail.read()
        run.gpu_stats_multi.write_bytes(content)
        found += tail.read()
    assert [entry["timestamp"][17:19] for entry in found] == [f"{second:02}" for second in range(9)]


def test_devices_have_keys_per_gpu_and_for_all_gpus(run):
    write_recording(run, range(2))
    first, _ = DeviceTail(run.gpu_stats_multi).read()
    assert first.time == START_TIME
    assert first.values["gpu/1/memory_used"] == first.values["gpu_1_memory"] == 1100
    assert first.values["gpu_total_memory"] == 2000
    assert first.values["gpu_avg_utilization"] == 90
    assert first.values["gpu_load_balance_cv"] == pytest.approx(100 * 50 / 1050)
    assert not any("power" in key for key in first.values)


def test_one_gpu_has_no_balance(run):
    write_recording(run, range(1), gpus=1)
    (first,) = DeviceTail(run.gpu_stats_multi).read()
    assert "gpu_load_balance_cv" not in first.values


def test_a_long_recording_is_averaged_over_the_same_ten_seconds_in_every_reading(run):
    write_recording(run, range(int(FINE_S) + 55))
    points = DeviceTail(run.gpu_stats_multi).read()
    assert len(points) == FINE_S + 5
    assert points[-1].time - points[-2].time == COARSE_S
    parts, tail = [], DeviceTail(run.gpu_stats_multi)
    for until in range(0, 700, 7):
        parts += tail.read(until=START_TIME + until)
    assert parts == points


def test_device_values_are_returned_with_the_next_point(run):
    write_training(run, range(1200))
    write_recording(run, range(1300))
    first, second, *_ = all_of(RunFeed(run))
    assert first.devices[-1].time == first.points[-1].time == START_TIME + 499
    assert second.devices[0].time == START_TIME + 500


def test_a_long_run_is_returned_in_parts_without_loss(run):
    write_training(run, range(1200))
    batches = all_of(RunFeed(run))
    assert max(len(batch.points) for batch in batches) == 500
    assert {p.step: dict(p.values) for batch in batches for p in batch.points} == expected_values(run)


def test_the_nodes_of_each_attempt_come_before_its_points_and_those_of_one_node_never(run):
    feed = RunFeed(run)
    assert not feed.read().config
    write_nodes(run, ("n1", "n2"))
    write_training(run, range(2))
    batch = feed.read()
    assert batch.config == {"nodes": "2", "hosts": "n1, n2"}
    assert batch.points
    write_nodes(run, ("n1", "n2"), attempt=2)
    assert not feed.read().config
    write_nodes(run, ("n3", "n2"), attempt=3)
    assert feed.read().config == {"nodes": "2", "hosts": "n3, n2"}
    write_nodes(run, ("n1",), attempt=4)
    assert not RunFeed(run).read().config


def test_alerts_of_rules_events_and_failures_are_returned_once(run):
    rule = Alert(kind=AlertKind.THROTTLE, severity=Severity.WARNING, about="GPU 1", since=START_TIME, reason="heat")
    tail = AlertTail(run)
    write_end(run, "")
    write_alerts(run, rule)
    append_jsonl(run.events, {"time": START_TIME + 5, "step": 7, "event": "checkpoint refused", "text": "to step 5"})
    append_jsonl(run.events, {"time": START_TIME + 6, "step": 8, "event": "checkpoint", "text": "step 8"})
    first, second = tail.read()
    assert (first.alert.title, first.alert.level) == ("throttle of GPU 1", AlertLevel.WARN)
    assert second.alert.text == "step 7: to step 5"
    write_alerts(run, replaced(rule, until=START_TIME + 9))
    write_end(run, "oom", reason="out of memory", at=START_TIME + 9)
    (failed,) = tail.read()
    assert (failed.alert.title, failed.alert.text) == (f"{run.name} failed", "out of memory")
    assert failed.alert.level is AlertLevel.ERROR


def test_a_run_is_identified_by_its_matrix_and_configuration(run):
    run_identity = identity(run)
    assert (run_identity.name, run_identity.group, run_identity.project) == (
        run.name,
        run.path.parent.name,
        "gpt2-1a2b3",
    )
    assert run_identity.id == "0123456789ab-20260101000000"
    assert run_identity.tags == ("optimizer=adamw", "seed=1")
    assert run_identity.config["GPT2_MAX_ITERS"] == "500"
    assert run_identity.config["run_id"] == "0123456789ab"
    assert run_identity.tracking == run.path.parent.parent


def test_a_rerun_is_a_new_run_for_its_trackers(run):
    (run.archive / "1").mkdir(parents=True)
    assert identity(run).id == "0123456789ab-20260101000000-rerun1"
    assert identity(run).name == f"{run.name}-rerun1"


def test_a_directory_without_a_run_is_refused(run):
    write_json(run.run_json, {"name": "x"})
    with pytest.raises(RecordError, match="does not describe a run"):
        identity(run)


WRONG = (None, "text", 7, 1e300, [], {}, [[]], True)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("key", ["timestamp", "multi_gpu_data", "aggregate_stats", "gpu", "gpu_index", "memory_used"])
def test_a_device_sample_of_the_wrong_type_costs_only_itself(run, key, wrong):
    write_recording(run, range(3))
    samples = json.loads(run.gpu_stats_multi.read_text())
    gpu = samples[1]["multi_gpu_data"][0]
    if key == "gpu":
        samples[1]["multi_gpu_data"][0] = wrong
    else:
        (gpu if key in gpu else samples[1])[key] = wrong
    run.gpu_stats_multi.unlink()
    array = JsonArrayFile(run.gpu_stats_multi)
    for sample in samples:
        array.append(sample)
    array.close()
    times = [devices.time for devices in DeviceTail(run.gpu_stats_multi).read()]
    assert {START_TIME, START_TIME + 2} <= set(times)


def test_a_copy_of_a_matrix_has_runs_of_its_own_at_the_trackers(run):
    matrix = MatrixDir(run.path.parent)
    write_json(matrix.matrix_json, {"place": str(matrix.path.resolve())})
    original = identity(run)
    copied = RunDir(Path(shutil.copytree(matrix.path, matrix.path.with_name("copy"))) / run.name)
    copy = identity(copied)
    assert RUN_ID.fullmatch(copy.id)
    assert copy.id.startswith(f"{original.id}-copy")
    assert (copy.name == run.name, copy.group) == (False, "copy")
    # Renaming changes neither, and a copy of the copy is another one.
    assert identity(RunDir(copied.path.parent.rename(matrix.path.with_name("again")) / run.name)).id == copy.id
    second = RunDir(Path(shutil.copytree(matrix.path.with_name("again"), matrix.path.with_name("third"))) / run.name)
    assert len({identity(second).id, copy.id, original.id}) == 3
    moved = RunDir(matrix.path.rename(matrix.path.with_name("moved")) / run.name)
    assert identity(moved).id == original.id
