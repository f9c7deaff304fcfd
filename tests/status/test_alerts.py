"""Alerts of a run: the rules, start and end of an alert, and where it is shown."""

import dataclasses
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_factory import write_timings
from gputop_values import T0, Recorder, append_event
from kmatrix.records.decode import as_json
from kmatrix.records.files import append_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.status.alerts import (
    Alert,
    AlertKind,
    AlertTracker,
    GpuState,
    RunSnapshot,
    Severity,
    Thresholds,
    findings,
    read_alerts,
)
from kmatrix.status.live import Observer
from times import Times

LIMITS = Thresholds(hold_s=30)
HEALTHY_GPU = GpuState(name="GPU 0", utilization=97.0, memory_percent=94.0, temperature=66.0, throttled=("power cap",))


def state(time=0.0, **fields):
    return RunSnapshot(**{"time": time, "gpus": (HEALTHY_GPU,)} | fields)


def alert_kinds(observation, limits=LIMITS):
    return {finding.kind for finding in findings(observation, limits)}


def gpu(**fields):
    return dataclasses.replace(HEALTHY_GPU, **fields)


# ---- the rules ---------------------------------------------------------------------------------------------------


def test_a_healthy_run_has_no_alerts():
    healthy = state(
        memory_cv=0.3, waiting=2.0, mfu=43.8, tokens_per_second=55_188.0, losses=[3.5] * 20, val_losses=[4, 3.5, 3.3]
    )
    assert alert_kinds(healthy, dataclasses.replace(LIMITS, tokens_per_second=30_000)) == set()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"gpus": (gpu(utilization=79.9),)}, AlertKind.UTILIZATION),
        ({"gpus": (gpu(memory_percent=98.75),)}, AlertKind.VRAM),
        ({"gpus": (gpu(temperature=87.0),)}, AlertKind.TEMPERATURE),
        ({"gpus": (gpu(throttled=("heat (software)",)),)}, AlertKind.THROTTLE),
        ({"gpus": (gpu(lost=True, utilization=None),)}, AlertKind.LOST),
        ({"gpus": (gpu(xids={13: 1}),)}, AlertKind.XID),
        ({"gpus": (gpu(xids={999: 1}),)}, AlertKind.XID),
        ({"gpus": (gpu(xids={79: 1}),)}, AlertKind.XID_FAULT),
        ({"memory_cv": 20.0}, AlertKind.BALANCE),
        ({"waiting": 23.0, "slowest": 3}, AlertKind.STRAGGLER),
        ({"mfu": 14.9}, AlertKind.MFU),
        ({"tokens_per_second": 29_999.0}, AlertKind.SPEED),
        ({"losses": [3.0] * 10 + [4.2]}, AlertKind.SPIKE),
        ({"losses": [3.0, None]}, AlertKind.NOT_FINITE),
        ({"val_losses": [4.0, 3.0, 3.1, 3.2, 3.1]}, AlertKind.LOSS),
        ({"quiet_s": 600.0}, AlertKind.STALL),
    ],
)
def test_each_rule_raises_its_alert_alone_and_can_be_disabled(fields, kind):
    limits = dataclasses.replace(LIMITS, tokens_per_second=30_000.0)
    assert alert_kinds(state(**fields), limits) == {kind}
    disabled = Thresholds(**{field.name: type(field.default)(0) for field in dataclasses.fields(Thresholds)})
    assert alert_kinds(state(**fields), disabled) <= {
        AlertKind.LOST,
        AlertKind.XID,
        AlertKind.XID_FAULT,
        AlertKind.NOT_FINITE,
    }  # these have no threshold: they are always an alert


def test_unknown_values_raise_no_alert():
    unknown = RunSnapshot(time=0.0, gpus=(GpuState(name="GPU 0"),))
    assert alert_kinds(unknown) == set()


@pytest.mark.parametrize(
    ("losses", "is_told"),
    [([4, 3, 3.1, 3.2], False), ([4, 3, 3.1, 3.2, 3.3], True), ([4, 3, 3.1, 3.2, 2.9], False), ([3.0] * 9, False)],
)
def test_a_validation_loss_above_its_best_for_three_evaluations_raises_an_alert(losses, is_told):
    assert (AlertKind.LOSS in alert_kinds(state(val_losses=losses))) == is_told


# ---- start and end -----------------------------------------------------------------------------------------------


def test_an_alert_starts_after_the_hold_time_and_keeps_the_worst_value():
    watch = AlertTracker(LIMITS)
    assert watch.update(state(100, gpus=(gpu(temperature=88.0),))) == ([], [])
    assert watch.update(state(129, gpus=(gpu(temperature=89.0),))) == ([], [])
    ((began,), _) = watch.update(state(130, gpus=(gpu(temperature=90.0),)))
    assert (began.since, began.value, began.threshold, began.about) == (100, 90.0, 87.0, "GPU 0")
    assert began.text == "GPU 0: 90 C, limit 87 C"
    assert watch.update(state(131, gpus=(gpu(temperature=93.0),))) == ([], [])
    _, ended = watch.update(state(140))
    assert watch.active == ()
    assert [(alert.value, alert.until) for alert in ended] == [(93.0, 140)]


@pytest.mark.parametrize(
    "fields", [{"gpus": (gpu(lost=True),)}, {"losses": [None]}, {"quiet_s": 700.0}, {"val_losses": [1, 2, 2, 2]}]
)
def test_a_permanent_fault_raises_an_alert_at_once(fields):
    assert len(AlertTracker(LIMITS).update(state(**fields))[0]) == 1


def test_critical_alerts_come_first():
    watch = AlertTracker(Thresholds(hold_s=0))
    hot, lost = gpu(temperature=95.0), gpu(name="GPU 1", lost=True)
    watch.update(state(0, gpus=(hot,)))
    watch.update(state(5, gpus=(hot, lost)))
    assert [alert.severity for alert in watch.active] == [Severity.CRITICAL, Severity.WARNING]
    assert [alert.until for alert in watch.end(9)] == [9, 9]


@given(st.lists(st.tuples(st.floats(0, 120), st.floats(0, 100)), max_size=40), st.floats(0, 60))
def test_every_alert_ends_once_and_lasts_at_least_the_hold_time(observations, hold):
    watch, time, began, ended = AlertTracker(Thresholds(hold_s=hold)), 0.0, [], []
    for step, utilization in observations:
        time += step
        new, over = watch.update(state(time, gpus=(gpu(utilization=utilization),)))
        began += new
        ended += over
    ended += watch.end(time)
    assert [alert.since for alert in began] == [alert.since for alert in ended]
    assert all(alert.until - alert.since >= hold for alert in ended)


def test_thresholds_come_from_the_configuration():
    text = {"ALERT_TEMPERATURE": "90", "ALERT_STALL": "0", "ALERT_LOSS": "5"}
    assert Thresholds.of(text) == Thresholds(temperature=90, stall=0, loss=5)


# ---- a running run -----------------------------------------------------------------------------------------------


@pytest.fixture
def times(monkeypatch):
    return Times(T0, monkeypatch)


def observer(run, **options):
    symbols = {"GPU_MONITOR": "y", "ALERT_HOLD": "0", **options.pop("symbols", {})}
    return Observer(run.path, 1, symbols, **options)


class Watched:
    """An observed run with two GPUs whose recording started at T0."""

    def __init__(self, path, times):
        self.recorder, self.times = Recorder(path, gpus=2), times
        self.observer = observer(self.recorder.run)

    def record(self, count, utilization):
        """Record samples, of which there are two per second, and let the observer see them."""
        self.recorder.write(count, utilization=utilization)
        self.times.unix, self.times.mono = self.recorder.now, self.times.mono + count / 2
        self.observer.poll()

    @property
    def alerts(self):
        return [(one.kind, one.about, one.until is None) for one in read_alerts(self.recorder.run.path)]


@pytest.fixture
def watched(tmp_path, times):
    return Watched(tmp_path / "run", times)


def test_a_growing_recording_is_followed(watched):
    watched.record(40, 95.0)
    assert watched.alerts == []
    watched.record(40, 50.0)
    assert watched.alerts == [(AlertKind.UTILIZATION, f"GPU {n}", True) for n in (0, 1)]
    watched.record(40, 95.0)
    assert watched.alerts == [(AlertKind.UTILIZATION, f"GPU {n}", False) for n in (0, 1)]


def test_low_utilization_needs_ten_seconds_of_samples(watched):
    watched.record(10, 10.0)
    assert watched.alerts == []


def test_a_lost_gpu_and_throttling_come_from_the_events(watched):
    events = [
        {"time": T0, "event": "started", "gpu_index": None, "text": ""},
        {"time": T0 + 1, "event": "throttle", "gpu_index": 0, "text": "throttled: heat (hardware)"},
        {"time": T0 + 2, "event": "lost", "gpu_index": 1, "text": "no response (values are null)"},
    ]
    watched.recorder.run.gpu_events.write_text("".join(json.dumps(event) + "\n" for event in events))
    watched.record(40, 95.0)
    assert watched.alerts == [(AlertKind.LOST, "GPU 1", True), (AlertKind.THROTTLE, "GPU 0", True)]


def test_xid_errors_of_this_attempt_are_alerts_until_its_end(watched):
    run = watched.recorder.run
    append_event(run, 0, "started")
    append_event(run, 1, "xid", 0, "XID 48", xid=48, xid_count=1)
    append_event(run, 2, "started")
    append_event(run, 3, "xid", 1, "XID 31", xid=31, xid_count=2)
    watched.record(40, 95.0)
    (alert,) = read_alerts(run.path)
    assert (alert.kind, alert.about, alert.severity, alert.value) == (AlertKind.XID, "GPU 1", Severity.WARNING, 2)
    append_event(run, 4, "xid", 1, "XID 79", xid=79, xid_count=1)
    append_event(run, 5, "xid", 1, "XID 63", xid=63, xid_count=1)
    watched.observer.end()  # an error that ends the program is found by the last look at the files
    assert watched.alerts == [(AlertKind.XID, "GPU 1", False), (AlertKind.XID_FAULT, "GPU 1", False)]
    text = "GPU 1: XID 79: the GPU has fallen off the bus; XID 63: a memory page or row was replaced"
    assert read_alerts(run.path)[1].text == text


def append_line(run, step, **values):
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "time": T0 + step, **values}) + "\n")


def test_metrics_and_ranks_raise_alerts(tmp_path, times):
    run = RunDir(tmp_path)
    watch = observer(run, ranks=3)
    watch.poll()
    for step, loss in enumerate([3.0, 3.0, 3.0, None]):
        append_line(run, step, **{"train/loss": loss, "throughput/mfu": 0.1})
    write_timings(run, [80.0, 80.0, 130.0])
    times.sleep(20.0)
    watch.poll()
    assert {(one.kind, one.about) for one in read_alerts(run.path)} == {
        (AlertKind.NOT_FINITE, ""),
        (AlertKind.MFU, ""),
        (AlertKind.STRAGGLER, "rank 2"),
    }
    times.sleep(700.0)
    watch.end()
    assert AlertKind.STALL in {one.kind for one in read_alerts(run.path)}
    assert all(one.until is not None for one in read_alerts(run.path))


def test_an_alert_of_a_killed_program_ends_when_it_wrote_last(tmp_path, times):
    stored = Alert(kind=AlertKind.MFU, severity=Severity.WARNING, since=50.0, value=9.5, threshold=15.0)
    append_jsonl(RunDir(tmp_path).alerts, as_json(stored))
    os.utime(RunDir(tmp_path).alerts, (100.0, 100.0))
    observer(RunDir(tmp_path))
    assert [one.until for one in read_alerts(tmp_path)] == [100.0]


def test_a_full_disk_costs_alerts_and_not_the_run(tmp_path, times, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    run = RunDir(tmp_path)
    watch = observer(run)
    append_line(run, 1, **{"train/loss": None})
    monkeypatch.setattr("kmatrix.status.live.append_jsonl", full)
    watch.end()
    assert read_alerts(tmp_path) == ()


def test_the_first_line_of_an_attempt_includes_warm_up_and_raises_no_alert(tmp_path, times):
    run = RunDir(tmp_path)
    watch = observer(run)
    append_line(run, 0, **{"train/loss": 9.0, "throughput/mfu": 0.01})
    watch.poll()
    assert read_alerts(tmp_path) == ()


def test_a_clock_that_is_set_forward_or_back_is_not_a_stall(tmp_path, times):
    run = RunDir(tmp_path)
    watch = observer(run, symbols={"ALERT_STALL": "300"})
    watch.poll()
    append_line(run, 0, **{"train/loss": 3.0})
    for by in (0.0, 86_400.0, -86_400.0):
        times.unix, times.mono = T0 + by, times.mono + 2
        watch.poll()
    assert read_alerts(tmp_path) == ()
    times.mono += 400.0
    watch.poll()
    (alert,) = read_alerts(tmp_path)
    assert (alert.kind, alert.value) == (AlertKind.STALL, 404.0)
    append_line(run, 1, **{"train/loss": 3.0})
    times.unix, times.mono = times.unix - 86_400, times.mono + 2
    watch.poll()
    (ended,) = read_alerts(tmp_path)
    assert ended.until == ended.since  # never before it began
