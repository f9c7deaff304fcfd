"""Alerts of a run: the rules, start and end of an alert, and where it is shown."""

import dataclasses
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kmatrix.simulate.library as simulate
from gpu_factory import write_timings
from gputop_values import T0, Recorder, append_event
from kmatrix.cli.progress import ProgressDisplay
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.paths import RunDir
from kmatrix.runner.loop import drive
from kmatrix.status.alerts import Alert, AlertKind, GpuState, RunSnapshot, Severity, Thresholds, findings
from kmatrix.status.watch import AlertTracker, RunWatch
from once import session_folder
from running import engine, recorder_launcher
from skips import require_program

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
    assert watch.update(state(100, gpus=(gpu(temperature=88.0),))).began == ()
    assert watch.update(state(129, gpus=(gpu(temperature=89.0),))).began == ()
    (began,) = watch.update(state(130, gpus=(gpu(temperature=90.0),))).began
    assert (began.since, began.value, began.threshold, began.about) == (100, 90.0, 87.0, "GPU 0")
    assert began.text == "GPU 0: 90 C, limit 87 C"
    assert watch.update(state(131, gpus=(gpu(temperature=93.0),))).began == ()
    change = watch.update(state(140))
    assert change.active == ()
    assert [(alert.value, alert.until) for alert in change.ended] == [(93.0, 140)]


@pytest.mark.parametrize(
    "fields", [{"gpus": (gpu(lost=True),)}, {"losses": [None]}, {"quiet_s": 700.0}, {"val_losses": [1, 2, 2, 2]}]
)
def test_a_permanent_fault_raises_an_alert_at_once(fields):
    assert len(AlertTracker(LIMITS).update(state(**fields)).began) == 1


def test_critical_alerts_come_first():
    watch = AlertTracker(Thresholds(hold_s=0))
    hot, lost = gpu(temperature=95.0), gpu(name="GPU 1", lost=True)
    watch.update(state(0, gpus=(hot,)))
    active = watch.update(state(5, gpus=(hot, lost))).active
    assert [alert.severity for alert in active] == [Severity.CRITICAL, Severity.WARNING]
    assert [alert.until for alert in watch.end(9)] == [9, 9]


@given(st.lists(st.tuples(st.floats(0, 120), st.floats(0, 100)), max_size=40), st.floats(0, 60))
def test_every_alert_ends_once_and_lasts_at_least_the_hold_time(observations, hold):
    watch, time, began, ended = AlertTracker(Thresholds(hold_s=hold)), 0.0, [], []
    for step, utilization in observations:
        time += step
        change = watch.update(state(time, gpus=(gpu(utilization=utilization),)))
        began += change.began
        ended += change.ended
    ended += watch.end(time)
    assert [alert.since for alert in began] == [alert.since for alert in ended]
    assert all(alert.until - alert.since >= hold for alert in ended)


def test_thresholds_come_from_the_configuration_as_values_and_as_text():
    typed = {"ALERT_VRAM": 90, "ALERT_SPIKE": None, "ALERT_THROTTLE": False, "ALERT_LOSS": 5}
    text = {"ALERT_VRAM": "90", "ALERT_THROTTLE": "n", "ALERT_LOSS": "5", "ALERT_SPIKE": '"1.0"'}
    expected = Thresholds(vram=90.0, throttle=False, loss=5)
    assert Thresholds.of(typed) == Thresholds.of(text) == expected
    assert Thresholds.of({"ALERT_SPIKE": ""}).spike == 0


# ---- a running run -----------------------------------------------------------------------------------------------


@pytest.fixture
def alarm(tmp_path):
    """An alert monitor of a run with two GPUs whose recording started at T0."""
    recorder = Recorder(tmp_path / "run", gpus=2)
    made = RunWatch(recorder.run, Thresholds(hold_s=0))
    made.start(records_gpus=True)
    return made, recorder


def kinds(alerts):
    return [(alert.kind, alert.about) for alert in alerts]


def test_a_growing_recording_is_followed(alarm):
    made, recorder = alarm
    recorder.write(40, utilization=95.0)
    assert made.poll(recorder.now).alerts.active == ()
    recorder.write(40, utilization=50.0)
    assert kinds(made.poll(recorder.now).alerts.active) == [
        (AlertKind.UTILIZATION, "GPU 0"),
        (AlertKind.UTILIZATION, "GPU 1"),
    ]
    recorder.write(40, utilization=95.0)
    assert kinds(made.poll(recorder.now).alerts.ended) == [
        (AlertKind.UTILIZATION, "GPU 0"),
        (AlertKind.UTILIZATION, "GPU 1"),
    ]
    assert len(made.alerts) == 2


def test_low_utilization_needs_ten_seconds_of_samples(alarm):
    made, recorder = alarm
    recorder.write(10, utilization=10.0)
    assert made.poll(recorder.now).alerts.active == ()


def test_a_lost_gpu_and_throttling_come_from_the_events(alarm):
    made, recorder = alarm
    recorder.write(40, utilization=95.0)
    events = [
        {"time": T0, "event": "started", "gpu_index": None, "text": ""},
        {"time": T0 + 1, "event": "throttle", "gpu_index": 0, "text": "throttled: heat (hardware)"},
        {"time": T0 + 2, "event": "lost", "gpu_index": 1, "text": "no response (values are null)"},
    ]
    recorder.run.gpu_events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert kinds(made.poll(recorder.now).alerts.active) == [(AlertKind.LOST, "GPU 1"), (AlertKind.THROTTLE, "GPU 0")]


def test_xid_errors_of_this_attempt_are_alerts_until_its_end(alarm):
    made, recorder = alarm
    recorder.write(40, utilization=95.0)
    append_event(recorder.run, 0, "started")
    append_event(recorder.run, 1, "xid", 0, "XID 48", xid=48, xid_count=1)
    append_event(recorder.run, 2, "started")
    append_event(recorder.run, 3, "xid", 1, "XID 31", xid=31, xid_count=2)
    (alert,) = made.poll(recorder.now).alerts.began
    assert (alert.kind, alert.about, alert.severity, alert.value) == (AlertKind.XID, "GPU 1", Severity.WARNING, 2)
    append_event(recorder.run, 4, "xid", 1, "XID 79", xid=79, xid_count=1)
    append_event(recorder.run, 5, "xid", 1, "XID 63", xid=63, xid_count=1)
    # An error that ends the program is found by the last look at the files.
    change = made.end(recorder.now).alerts
    assert [alert.kind for alert in change.began] == [AlertKind.XID_FAULT]
    assert [(alert.kind, alert.severity) for alert in change.ended] == [
        (AlertKind.XID_FAULT, Severity.CRITICAL),
        (AlertKind.XID, Severity.WARNING),
    ]
    assert change.ended[0].text == (
        "GPU 1: XID 79: the GPU has fallen off the bus; XID 63: a memory page or row was replaced"
    )
    assert len(made.alerts) == 2


def test_metrics_and_ranks_raise_alerts(tmp_path):
    run = RunDir(tmp_path)
    made = RunWatch(run, Thresholds(hold_s=0), ranks=3)
    lines = [{"step": step, "time": 100.0 + step, "train/loss": 3.0, "throughput/mfu": 0.1} for step in range(3)]
    lines += [{"step": 3, "time": 103.0, "train/loss": None}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_timings(run, [80.0, 80.0, 130.0])
    active = made.poll(110.0).alerts.active
    assert kinds(active) == [(AlertKind.NOT_FINITE, ""), (AlertKind.STRAGGLER, "rank 2")]
    assert AlertKind.STALL in {alert.kind for alert in made.poll(900.0).alerts.active}
    assert made.end(901.0).alerts.active == ()
    assert all(alert.until is not None for alert in made.alerts)


def test_an_alert_of_a_killed_runner_ends_with_its_last_status(tmp_path):
    run = RunDir(tmp_path)
    stored = Alert(kind=AlertKind.MFU, severity=Severity.WARNING, since=50.0, value=9.5, threshold=15.0)
    write_json(run.status, {"alerts": [stored.to_json(), dataclasses.replace(stored, until=60.0).to_json()]})
    os.utime(run.status, (100.0, 100.0))
    assert [alert.until for alert in RunWatch(run, Thresholds()).alerts] == [100.0, 60.0]


def test_the_first_line_of_an_attempt_includes_warm_up_and_raises_no_alert(tmp_path):
    run = RunDir(tmp_path)
    watch = RunWatch(run, Thresholds(hold_s=0))
    run.metrics.write_text('{"step": 0, "time": 100.0, "train/loss": 9.0, "throughput/mfu": 0.01}\n')
    assert watch.poll(101.0).alerts.active == ()


# ---- where alerts are shown --------------------------------------------------------------------------------------


@pytest.fixture
def run_on_gpus(matrix, plan, tmp_path, tmp_path_factory):
    """Run a training on two simulated GPUs with these lines of a scenario, and return its plan."""
    require_program("gcc")
    library = simulate.build(session_folder(tmp_path_factory))

    def run(lines):
        scenario = tmp_path / "scenario.scn"
        scenario.write_text(f"gpus 2\n{lines}")
        recorders = recorder_launcher(simulated=True, environment=simulate.environment(library, scenario))
        planned = plan("a")
        known = read_json(planned.dir.run_json)
        write_json(planned.dir.run_json, known | {"train": known["train"] | {"max_iters": 200}})
        limits = Thresholds(hold_s=0)
        with ProgressDisplay() as show:
            outcome = drive(
                matrix, [planned], engine(recorders=recorders), poll_s=0.05, limits=limits, on_progress=show
            )
        assert outcome.exit_code == 0, "an alert changes nothing"
        return planned

    return run


@pytest.mark.process
def test_alerts_are_in_the_status_the_journal_and_on_the_screen(matrix, run_on_gpus, capsys):
    planned = run_on_gpus("0 1 temp 93\n")
    status = read_json(planned.dir.status)
    (alert,) = status["alerts"]
    assert (alert["kind"], alert["about"], alert["value"], alert["severity"]) == ("temperature", "GPU 1", 93, "warning")
    assert alert["until"] >= alert["since"] >= status["started"]
    assert "cooling" in alert["advice"]
    assert [line["about"] for line in read_jsonl(matrix.journal) if line["event"] == "alert"] == ["GPU 1"]
    assert capsys.readouterr().out.count("! a  GPU 1: 93 C, limit 87 C (check cooling") == 1


# ---- a wall clock that is set --------------------------------------------------------------------------------------

DAY_S = 86_400.0


def test_a_clock_that_is_set_forward_or_back_is_not_a_stall(tmp_path):
    run = RunDir(tmp_path)
    made = RunWatch(run, Thresholds(hold_s=0, stall=300.0))
    line = {"step": 0, "time": 1000.0, "train/loss": 3.0}
    run.metrics.write_text(json.dumps(line) + "\n")
    assert made.poll(1000.0, clock=50.0).alerts.active == ()
    assert made.poll(1000.0 + DAY_S, clock=52.0).alerts.active == ()
    assert made.poll(1000.0 - DAY_S, clock=54.0).alerts.active == ()
    (alert,) = made.poll(1000.0 - DAY_S, clock=400.0).alerts.active
    assert (alert.kind, alert.value) == (AlertKind.STALL, 350.0)
    run.metrics.write_text(json.dumps(line) + "\n" + json.dumps(line | {"step": 1, "time": 1.0}) + "\n")
    (ended,) = made.poll(1000.0 - 2 * DAY_S, clock=402.0).alerts.ended
    assert ended.until == ended.since  # never before it began
