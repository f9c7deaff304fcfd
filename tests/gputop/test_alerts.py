"""Alerts of gputop, and the rank and run on a GPU without a recorder."""

import dataclasses
import os
import subprocess
import sys

import pytest

import kmatrix.gputop.feeds as alarms
import kmatrix.simulate.library as simulate
from gputop_values import T0, Recorder, append_event, gpu_sample, line_of, rendered, view
from kmatrix.gpu.processes import Rank, rank_of
from kmatrix.gputop.feeds import AttachedFeed, ReplayFeed
from kmatrix.gputop.loop import Session
from kmatrix.gputop.view import Metric
from kmatrix.records import attempts
from kmatrix.records.decode import replaced
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.status.alerts import Alert, AlertKind, Severity, Thresholds
from once import session_folder
from records_factory import write_alerts
from skips import require_program
from waiting import wait_until

HOT = Alert(
    kind=AlertKind.TEMPERATURE,
    severity=Severity.WARNING,
    since=T0 + 20,
    until=T0 + 40,
    about="GPU 1",
    value=93.0,
    threshold=87.0,
)


def rows_after(screen_view, utilization, *, seconds=10):
    """Return the rows of a view after each GPU had this utilization for this time."""
    history = {Metric.UTILIZATION: (None,) * (60 - seconds) + (utilization,) * seconds}
    return tuple(dataclasses.replace(row, history=history) for row in screen_view.rows)


def kinds(alerts):
    return [(alert.kind, alert.about) for alert in alerts]


# ---- alerts ------------------------------------------------------------------------------------------------------


def test_rows_are_compared_with_the_thresholds():
    screen_view = view(
        gpu_sample(0, temperature=93.0), gpu_sample(1), throttle={0: ("heat (hardware)",), 1: ("power cap",)}
    )
    alerts = kinds(alarms.alerts_of_rows(rows_after(screen_view, 50.0), Thresholds(), T0))
    assert alerts[:2] == [(AlertKind.UTILIZATION, "GPU 0"), (AlertKind.TEMPERATURE, "GPU 0")]
    assert set(alerts[2:]) == {(AlertKind.THROTTLE, "GPU 0"), (AlertKind.UTILIZATION, "GPU 1")}


def test_low_utilization_needs_ten_seconds_and_an_idle_machine_has_no_alert():
    screen_view = view(gpu_sample(0), gpu_sample(1, memory_used=1.0))
    assert alarms.alerts_of_rows(rows_after(screen_view, 0.0, seconds=9), Thresholds(balance=0), T0) == ()
    assert alarms.alerts_of_rows(rows_after(screen_view, 0.0), alarms.MACHINE_THRESHOLDS, T0) == ()


def test_a_lost_gpu_is_critical():
    lost = dataclasses.replace(
        gpu_sample(1), **dict.fromkeys(("utilization", "memory_used", "power", "temperature", "sm_clock"))
    )
    (alerts,) = alarms.alerts_of_rows(view(gpu_sample(0), lost).rows, alarms.MACHINE_THRESHOLDS, T0)
    assert (alerts.kind, alerts.about, alerts.severity) == (AlertKind.LOST, "GPU 1", Severity.CRITICAL)


def test_xid_errors_are_alerts_at_the_position_of_a_replay(tmp_path):
    recorder = Recorder(tmp_path, gpus=2)
    recorder.write(200, utilization=95.0)
    append_event(recorder.run, 0, "started", monotonic=0.0)
    append_event(recorder.run, 20, "xid", 1, "XID 13", xid=13, xid_count=1, monotonic=20.0)
    append_event(recorder.run, 40, "xid", 1, "XID 79", xid=79, xid_count=1, monotonic=40.0)
    for second, expected in (
        (50, [AlertKind.XID_FAULT, AlertKind.XID]),
        (10, []),
        (30, [AlertKind.XID]),
    ):
        session = Session(feed=ReplayFeed(tmp_path, at=second))
        session.poll()
        assert kinds(session.view().alerts) == [(kind, "GPU 1") for kind in expected]


def test_the_screen_has_a_line_per_alert_and_the_number_of_hidden_ones():
    many = tuple(replaced(HOT, about=f"GPU {number}") for number in range(5))
    text = rendered(dataclasses.replace(view(gpu_sample(0)), alerts=many), 80, 24)
    lines = [line for line in text.splitlines() if line.startswith("!")]
    assert lines[0] == "! GPU 0: 93 C, limit 87 C", "no half advice"
    assert lines[-1] == "! and 2 more: key a"
    wide_screen = rendered(dataclasses.replace(view(gpu_sample(0)), alerts=many[:1]), 160, 24)
    assert "(check cooling and air flow" in wide_screen


def test_a_recording_without_a_runner_uses_the_thresholds_of_its_run(tmp_path):
    recorder = Recorder(tmp_path, gpus=1)
    recorder.write(100)  # 50 C
    write_json(RunDir(tmp_path).run_json, {"symbols": {"ALERT_TEMPERATURE": "45", "ALERT_GPU_UTILIZATION": "0"}})
    session = Session(feed=AttachedFeed(tmp_path))
    session.poll()
    assert kinds(session.view().alerts) == [(AlertKind.TEMPERATURE, "GPU 0")]


def test_a_replay_shows_the_alerts_that_were_recorded_at_its_time(tmp_path):
    recorder = Recorder(tmp_path, gpus=1)
    recorder.write(100)
    write_json(attempts.path_of(tmp_path, 1), {"number": 1, "host": "n1"})
    write_alerts(RunDir(tmp_path), replaced(HOT, since=T0 + 10), replaced(HOT, since=T0 + 10, until=T0 + 20))
    for at, expected in ((5, []), (15, [(HOT.kind, HOT.about)]), (25, [])):
        assert kinds(alarms.ReplayFeed(tmp_path, at=at).alerts(())) == expected


def test_a_run_over_several_nodes_says_which_one_is_shown_and_how_to_see_another(tmp_path):
    run = RunDir(tmp_path / "gpt2_a")
    for path in (run.path, run.path / "nodes" / "1"):
        Recorder(path, gpus=1).write(3)
    write_json(attempts.path_of(run.path, 1), {"number": 1, "host": "n1", "nodes": 2})
    write_json(run.path / "nodes" / "1.json", {"host": "n2"})
    first, second = alarms.ReplayFeed(run.path), alarms.ReplayFeed(run.path / "nodes" / "1")
    assert (first.title, second.title) == ("gpt2_a node 0 (n1)", "gpt2_a node 1 (n2)")
    (notice,) = alarms.other_nodes(run)
    assert notice.startswith("node 0 of 0 to 1: ")
    assert notice.endswith(f"RUN={run.path}/nodes/1 shows node 1")


# ---- ranks without a recorder ------------------------------------------------------------------------------------


@pytest.fixture
def start_ranks(tmp_path):
    """Start processes with the command lines of ranks; return their pids."""
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "__init__.py").write_text("")
    (tmp_path / "gpt2" / "train.py").write_text("import time; time.sleep(120)")
    started = []

    def start(run, rank=None):
        environment = {name: text for name, text in os.environ.items() if name != "RANK"}
        environment |= {} if rank is None else {"RANK": str(rank)}
        command = [sys.executable, "-u", "-m", "gpt2.train", str(tmp_path / run), "--attempt", "1"]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment))
        wait_until(lambda: rank_of(started[-1].pid) is not None)  # the command line is visible once the program runs
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.process
def test_a_process_reports_its_run_and_rank(start_ranks, tmp_path):
    path = tmp_path / "gpt2_muon_2gpu"
    assert rank_of(start_ranks("gpt2_muon_2gpu", 3)) == Rank(run="gpt2_muon_2gpu", rank=3, path=path)
    assert rank_of(start_ranks("gpt2_muon_2gpu")) == Rank(run="gpt2_muon_2gpu", rank=None, path=path)
    assert rank_of(os.getpid()) is None
    assert rank_of(2**22 + 5) is None


@pytest.mark.process
def test_the_live_screen_shows_rank_and_run_per_gpu_without_a_recorder(start_ranks, tmp_path, tmp_path_factory):
    require_program("gcc")
    pids = [start_ranks("gpt2_adamw_2gpu", 1), start_ranks("gpt2_adamw_2gpu", 0), start_ranks("gpt2_muon_1gpu", 0)]
    scenario = tmp_path / "x.scn"
    scenario.write_text("gpus 4\n" + "".join(f"0 {index} process {pid} 9000\n" for index, pid in enumerate(pids)))
    environ = simulate.environment(simulate.build(session_folder(tmp_path_factory)), scenario)
    command = [sys.executable, "-m", "kmatrix.gputop", "--once"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200", **environ}
    text = subprocess.check_output(command, env=environment, text=True)
    assert "gpt2_adamw_2gpu, gpt2_muon_1gpu" in text.splitlines()[0]
    rows = [line_of(text, index).split()[:3] for index in range(4)]
    assert rows[:3] == [["0", "1", "gpt2_adamw_2gpu"], ["1", "0", "gpt2_adamw_2gpu"], ["2", "0", "gpt2_muon_1gpu"]]
    assert rows[3][:3] == ["3", "-", "-"]
